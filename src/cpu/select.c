#include "cpu/select.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/needs.h"
#include "base/status.h"
#include "cpu/features.h"
#include "cpu/key_sums.h"
#include "cpu/pool.h"

/* ---- Kernel and threads of a plan --------------------------------------------------------------------------- */

/* Best first; every CPU can run the last one. AVX512-BF16 comes after f32 on AVX-512, which is faster where it was
 * measured. */
static const skl_cpu_kernel *const kernels[] = {
#if defined(__x86_64__)
    &skl_cpu_amx, &skl_cpu_avx512, &skl_cpu_avx512_bf16, &skl_cpu_avx2,
#elif defined(__aarch64__)
    &skl_cpu_neon_bf16,
#endif
    &skl_cpu_portable};

enum { KERNEL_COUNT = sizeof kernels / sizeof kernels[0] };

const skl_cpu_kernel *skl_cpu_kernel_number(int32_t index)
{
    return index < KERNEL_COUNT ? kernels[index] : NULL;
}

/* Other types and sparse indexers would run the same code on the vector units. */
static bool has_matrix_products(const skl_problem *p)
{
    return p->top_k == 0 && (p->dtype_t == SKL_BF16 || p->dtype_s == SKL_BF16);
}

static bool is_choice(const skl_cpu_kernel *kernel, const skl_problem *p)
{
    return kernel->usable() && (!kernel->on_matrix || has_matrix_products(p));
}

skl_status skl_cpu_select_kernel(const skl_cpu_kernel **chosen, const skl_plan *plan, const char *forced)
{
    for (int i = 0; i < KERNEL_COUNT; i++) {
        const bool wanted = forced == NULL || strcmp(forced, kernels[i]->name) == 0;
        if (!wanted || (forced == NULL && !is_choice(kernels[i], &plan->problem)))
            continue;
        if (!kernels[i]->usable())
            return skl_fail(SKL_ERROR_UNSUPPORTED, "%s=%s: this CPU lacks the instruction set (it has %s)",
                            plan->forced_by, forced, skl_cpu_features());
        *chosen = kernels[i];
        return SKL_OK;
    }
    return skl_fail(SKL_ERROR_ARGUMENT, "%s=%s: no CPU kernel has this name; streamkl info lists them",
                    plan->forced_by, forced);
}

skl_status skl_cpu_select_threads(int32_t *threads, int32_t requested)
{
    if (requested < 0 || requested > SKL_THREADS_MAX)
        return skl_fail(SKL_ERROR_ARGUMENT, "threads=%d: must be 0..%d", requested, SKL_THREADS_MAX);
    *threads = requested;
    const char *const text = getenv("STREAMKL_THREADS");
    if (requested == 0 && text != NULL && text[0] != '\0') {
        char *end = NULL;
        errno = 0;
        const long value = strtol(text, &end, 10);
        if (errno != 0 || *end != '\0' || value < 1 || value > SKL_THREADS_MAX)
            return skl_fail(SKL_ERROR_ARGUMENT, "STREAMKL_THREADS=%s: must be 1..%d", text, SKL_THREADS_MAX);
        *threads = (int32_t)value;
    }
    if (*threads == 0)
        *threads = (int32_t)skl_min(skl_cpu_count(), SKL_THREADS_MAX);
    return SKL_OK;
}

/* min(batch * heads * tiles, most), without overflow. */
static int64_t items_up_to(int64_t most, int64_t batch, int64_t heads, int64_t tiles)
{
    return skl_min(skl_min(batch, most) * skl_min(heads, most) * skl_min(tiles, most), most);
}

int32_t skl_cpu_select_workers(const skl_problem *p, const skl_cpu_work *work, int32_t threads)
{
    const skl_tiles tiles = work->tiles(p);
    const int64_t key_heads = skl_max(p->gradients & SKL_DK_T ? p->key_heads_t : 0,
                                      p->gradients & (SKL_DK_S | SKL_DV_S) ? p->key_heads_s : 0);
    const int64_t over_queries = items_up_to(threads, p->batch, p->heads_s, skl_ceil_div(p->len_q, tiles.queries));
    const int64_t over_keys =
        items_up_to(threads, p->batch, key_heads, skl_ceil_div(skl_student_keys(p, p->len_k), tiles.keys));
    return (int32_t)skl_max(1, skl_max(over_queries, over_keys));
}

/* ---- Passes of a call --------------------------------------------------------------------------------------- */

static bool wants_dv(const skl_call *call)
{
    return call->attention != NULL && call->attention->dv_s.data != NULL;
}

/* NULL if a pass over the queries gives the KL together with the gradients, else the reason for a forward pass. */
static const char *why_rows_first(const skl_needs *needs, const skl_rows *rows, bool halves, bool over_queries)
{
    if (halves)
        return "the target of a pooled teacher is divided by the sum of its row";
    if (needs->kl)
        return "gradients of the first argument of the KL read the KL of their row";
    if (needs->dot_t)
        return "teacher gradients under teacher groups read dot_t";
    if (rows->dot_t.data != NULL)
        return "rows.dot_t is requested";
    return over_queries ? NULL : "no pass over the queries follows";
}

static const char *reason_of_query_pass(const skl_problem *p, bool one_pass, bool dk_wanted)
{
    if (!dk_wanted)
        return one_pass ? "both LSEs are given, so P and S are exact at once" : "no key gradient is requested";
    if (p->top_k > 0)
        return one_pass ? "both LSEs are given; key gradients follow" : "key gradients follow";
    if (skl_key_sums_floats(p) > 0)
        return one_pass ? "both LSEs are given, and key gradients are summed in f32"
                        : "key gradients are summed in f32";
    return one_pass ? "both LSEs are given, and f32 key gradients are summed in place"
                    : "f32 key gradients are summed in place";
}

static void add_pass(skl_cpu_passes *passes, skl_cpu_pass pass)
{
    passes->pass[passes->count++] = pass;
}

/* Rows first: their LSEs make the probabilities of the pass over the keys. */
static skl_cpu_passes select_stats_passes(const skl_plan *plan, const skl_call *call)
{
    const skl_problem *const p = &plan->problem;
    const skl_cpu_work *const work = plan->kernel;
    const uint32_t bits = skl_stats_bits(call->stats);
    const bool of_keys = (bits & SKL_STATS_OF_KEYS) != 0, lse_given = call->inputs.lse_s.data != NULL;
    const bool of_rows = (bits & SKL_STATS_OF_ROWS) != 0 || (of_keys && !lse_given);
    skl_cpu_passes passes = {.fused = false};
    if (of_rows)
        add_pass(&passes, (skl_cpu_pass){.function = work->stats_rows,
                                         .reason = lse_given ? "lse_s is given, so probabilities are exact at once"
                                                             : "a product of its own computes the LSEs"});
    if (of_keys)
        add_pass(&passes, (skl_cpu_pass){.function = work->stats_keys,
                                         .over_keys = true,
                                         .key_result_heads = call->stats->per_key_head ? p->key_heads_s : p->heads_s,
                                         .reason = "sums over rows, key by key"});
    return passes;
}

skl_cpu_passes skl_cpu_select_passes(const skl_plan *plan, const skl_call *call)
{
    if (call->stats != NULL)
        return select_stats_passes(plan, call);
    const skl_problem *const p = &plan->problem;
    const skl_cpu_work *const work = plan->kernel;
    const skl_gradients *const grads = &call->gradients;
    const skl_needs needs = skl_call_needs(p, call);
    const bool dk_wanted = grads->dk_t.data != NULL || grads->dk_s.data != NULL || wants_dv(call);
    const bool dq_wanted = grads->dq_t.data != NULL || grads->dq_s.data != NULL || grads->dw_s.data != NULL;
    /* A fused backward sums key gradients while it goes over the queries, f32 ones in the caller's buffer and 16-bit
     * ones in key_sums: 4 matrix products per tile instead of 6. */
    const bool fused = needs.gradients && dk_wanted && p->top_k == 0;
    const bool over_queries = needs.gradients && (fused || dq_wanted);
    const bool halves = skl_op_has_halves(p, call->op);
    const char *const forward_first = why_rows_first(&needs, &call->rows, halves, over_queries);
    const bool has_rows = skl_op_has_rows(call->op, skl_row_bits(&call->rows));
    const bool forward = has_rows && (!needs.gradients || forward_first != NULL);
    const bool one_pass = has_rows && !forward;

    skl_cpu_passes passes = {.fused = fused, .rows_first = forward};
    if (forward)
        add_pass(&passes,
                 (skl_cpu_pass){.function = work->forward, .reason = needs.gradients ? forward_first : NULL});
    if (over_queries)
        add_pass(&passes, (skl_cpu_pass){.function = work->backward_queries,
                                         .fused = fused,
                                         .one_pass = one_pass,
                                         .reason = reason_of_query_pass(p, one_pass, dk_wanted)});
    if (needs.gradients && dk_wanted && !fused)
        add_pass(&passes,
                 (skl_cpu_pass){.function = work->backward_keys,
                                .over_keys = true,
                                .reason = "indices come in any order, so key gradients are summed key by key"});
    return passes;
}

/* ---- Explanation -------------------------------------------------------------------------------------------- */

/* Adds the results of a pass: "KL, dq_s and dk_s". */
static void add_results(skl_text *text, const skl_call *call, const skl_cpu_pass *pass)
{
    const skl_gradients *const grads = &call->gradients;
    const bool queries = !pass->over_keys;
    const struct {
        const char *name;
        bool given;
    } results[] = {{"KL", pass->one_pass},
                   {"dq_t", queries && grads->dq_t.data != NULL},
                   {"dk_t", pass->fused && grads->dk_t.data != NULL},
                   {"dq_s", queries && grads->dq_s.data != NULL},
                   {"dk_s", grads->dk_s.data != NULL && (pass->fused || !queries)},
                   {"dv_s", pass->fused && wants_dv(call)},
                   {"dw_s", queries && grads->dw_s.data != NULL}};
    enum { RESULT_COUNT = sizeof results / sizeof results[0] };
    int left = 0;
    for (int i = 0; i < RESULT_COUNT; i++)
        left += results[i].given;
    for (int i = 0; i < RESULT_COUNT; i++)
        if (results[i].given) {
            left--;
            skl_text_add(text, "%s%s", results[i].name, left > 1 ? ", " : left == 1 ? " and " : "");
        }
}

static const char *variant_of(const skl_cpu_pass *pass)
{
    if (pass->fused)
        return pass->one_pass ? "fused, one-pass, " : "fused, ";
    return pass->one_pass ? "one-pass, " : "";
}

skl_status skl_cpu_check_op(skl_op op)
{
    return op == SKL_OP_ATTENTION_FORWARD
               ? skl_fail(SKL_ERROR_UNSUPPORTED,
                          "skl_attention_forward on a CPU: there is no kernel; call your attention and skl_forward")
               : SKL_OK;
}

skl_status skl_cpu_explain(const skl_plan *plan, const skl_call *call, skl_text *text)
{
    SKL_TRY(skl_cpu_check_op(call->op));
    const skl_cpu_passes passes = skl_cpu_select_passes(plan, call);
    for (int i = 0; i < passes.count; i++) {
        const skl_cpu_pass *const pass = &passes.pass[i];
        const int64_t items = skl_pass_items(plan, pass);
        if (items == 0)
            continue;
        const bool forward = pass->function == ((const skl_cpu_work *)plan->kernel)->forward;
        const bool kernel_reason = text->length == 0; /* printed once: all passes have one kernel */
        const int threads = (int)skl_min(plan->workers, items);
        if (call->stats != NULL)
            skl_text_add(text, "statistics of %s", pass->over_keys ? "keys" : "rows");
        else if (forward)
            skl_text_add(text, "%s", call->op == SKL_OP_PARTIAL ? "partial states" : "forward");
        else
            add_results(text, call, pass);
        skl_text_add(text, ": %s, %s%d thread%s, %zu bytes of workspace (", plan->kernel_name, variant_of(pass),
                     threads, threads == 1 ? "" : "s", plan->workspace_size[call->op]);
        if (kernel_reason)
            skl_text_add(text, "%s%s", plan->forced_by != NULL ? plan->forced_by : "best kernel for this CPU",
                         plan->forced_by != NULL ? " names the kernel" : "");
        if (pass->reason != NULL)
            skl_text_add(text, "%s%s", kernel_reason ? "; " : "", pass->reason);
        skl_text_add(text, ")\n");
    }
    return SKL_OK;
}
