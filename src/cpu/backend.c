/* The CPU backend: runs the passes that select.c chooses. */
#include "cpu/select.h"

#include <stdlib.h>
#include <string.h>

#include "base/sinks.h"
#include "base/status.h"
#include "cpu/pool.h"
#include "cpu/row_sums.h"
#include "cpu/stats.h"

static int kernel_at(int32_t index, skl_kernel_info *info)
{
    const skl_cpu_kernel *const kernel = skl_cpu_kernel_number(index);
    if (kernel == NULL)
        return 0;
    const bool usable = kernel->usable();
    *info = (skl_kernel_info){sizeof *info,
                              kernel->name,
                              SKL_CPU,
                              usable,
                              usable ? kernel->detail : "this CPU lacks the instruction set",
                              kernel->on_matrix};
    return 1;
}

/* ---- Plan --------------------------------------------------------------------------------------------------- */

static size_t ordered_sum_size(int threads)
{
    return (size_t)skl_ordered_sum_count(threads) * sizeof(skl_ordered_sum_counter);
}

static size_t scratch_size(const skl_plan *plan, skl_op op)
{
    const skl_cpu_work *const work = plan->kernel;
    return op == SKL_OP_ATTENTION_STATS ? work->stats_scratch_size(&plan->problem)
                                        : work->scratch_size(&plan->problem);
}

/* The workspace of a call: counters, scratch memory of the workers, and then what they share: the sums of 16-bit key
 * gradients, or the memory of statistics. */
static size_t shared_begin(const skl_plan *plan, skl_op op)
{
    return ordered_sum_size(plan->workers) + (size_t)plan->workers * scratch_size(plan, op);
}

static size_t key_sums_size(const skl_plan *plan)
{
    const skl_problem *const p = &plan->problem;
    return (size_t)(skl_key_sums_count(p, plan->workers) * skl_key_sums_floats(p)) * sizeof(float);
}

static size_t workspace_size(const skl_plan *plan, skl_op op)
{
    if (skl_op_has_gradients(op))
        return shared_begin(plan, op) + key_sums_size(plan);
    if (op != SKL_OP_ATTENTION_STATS)
        return shared_begin(plan, op);
    return !skl_has_statistics(&plan->problem) ? 0 : shared_begin(plan, op) + skl_cpu_stats_size(plan);
}

static skl_status plan_cpu(skl_plan *plan, const skl_options *options, const char *forced)
{
    const skl_cpu_kernel *kernel = NULL;
    SKL_TRY(skl_cpu_select_kernel(&kernel, plan, forced));
    SKL_TRY(skl_cpu_select_threads(&plan->threads, options->threads));
    const skl_problem *const p = &plan->problem;
    const skl_cpu_work *const work = !skl_is_indexer(p) ? &kernel->works->attention
                                     : p->top_k > 0     ? &kernel->works->sparse_indexer
                                                        : &kernel->works->indexer;
    plan->kernel = work;
    plan->kernel_name = kernel->name;
    plan->workers = skl_cpu_select_workers(p, work, plan->threads);
    for (int op = 0; op < SKL_OP_COUNT; op++)
        plan->workspace_size[op] = workspace_size(plan, (skl_op)op);
    skl_pool_reserve(plan->workers);
    return SKL_OK;
}

/* ---- Rows after the last packed sequence -------------------------------------------------------------------- */

static void clear_gradient(const skl_output *grad, skl_dtype dtype, int64_t batch, int64_t heads, int64_t row_begin,
                           int64_t row_end, int64_t dim)
{
    const int64_t size = (int64_t)skl_dtype_size(dtype);
    const bool has_rows = grad->data != NULL && row_begin < row_end;
    for (int64_t b = 0; has_rows && b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = row_begin; i < row_end; i++)
                memset((char *)grad->data + SKL_ROW(*grad, b, h, i) * size, 0, (size_t)(dim * size));
}

/* Key gradients start at 0 in a fused backward, which adds to them, and stay 0 after the last packed sequence. */
static void clear_key_gradients(const skl_problem *p, const skl_call *call, bool fused)
{
    const skl_gradients *const grads = &call->gradients;
    const int64_t rows = skl_student_keys(p, p->packed ? p->total_k : p->len_k);
    const int64_t used = p->packed ? call->inputs.cu_seqlens_k[p->batch] : rows;
    const int64_t begin = fused ? 0 : used;
    const int64_t batch = p->packed ? 1 : p->batch;
    clear_gradient(&grads->dk_t, skl_grad_dtype(p, p->dtype_t), batch, p->key_heads_t, begin, rows, p->dim_t);
    clear_gradient(&grads->dk_s, skl_grad_dtype(p, p->dtype_s), batch, p->key_heads_s, begin, rows, p->dim_s);
    if (call->attention != NULL)
        clear_gradient(&call->attention->dv_s, skl_grad_dtype(p, p->dtype_s), batch, p->key_heads_s, begin, rows,
                       p->dim_s);
}

static void clear_query_tail(const skl_problem *p, const skl_call *call)
{
    if (!p->packed)
        return;
    const skl_rows *const rows = &call->rows;
    const int64_t used = call->inputs.cu_seqlens_q[p->batch], end = p->total_q;
    skl_cpu_fill_rows(&rows->lse_t, p->heads_t, used, end, 1, -INFINITY);
    skl_cpu_fill_rows(&rows->dot_t, p->heads_t, used, end, 1, 0.0F);
    skl_cpu_fill_rows(&rows->kl, p->heads_s, used, end, 1, 0.0F);
    skl_cpu_fill_rows(&rows->lse_s, p->heads_s, used, end, 1, -INFINITY);
    skl_cpu_fill_rows(&rows->cross_entropy, p->heads_s, used, end, 1, 0.0F);
    skl_cpu_fill_rows(&rows->entropy, p->heads_s, used, end, 1, 0.0F);
    skl_cpu_fill_rows(&rows->mass, p->heads_s, used, end, 1, 0.0F);
    const skl_sequence tail = {.query_begin = used, .query_count = end - used};
    for (int64_t h = 0; call->states != NULL && h < p->heads_s; h++)
        for (int64_t i = 0; i < tail.query_count; i++)
            call->states[skl_state_index(p, &tail, h, i)] = skl_state_empty();
    const skl_gradients *const grads = &call->gradients;
    clear_gradient(&grads->dq_t, skl_grad_dtype(p, p->dtype_t), 1, p->heads_t, used, end, p->dim_t);
    clear_gradient(&grads->dq_s, skl_grad_dtype(p, p->dtype_s), 1, skl_query_heads_s(p), used, end, p->dim_s);
    clear_gradient(&grads->dw_s, skl_grad_dtype(p, p->dtype_w), 1, p->heads_s, used, end, p->index_heads);
}

/* ---- Run ---------------------------------------------------------------------------------------------------- */

static skl_status run(const skl_plan *plan, const skl_call *call)
{
    SKL_TRY(skl_cpu_check_op(call->op));
    const skl_problem *const p = &plan->problem;
    const skl_cpu_work *const work = plan->kernel;
    const skl_cpu_passes passes = skl_cpu_select_passes(plan, call);
    const bool halves = skl_op_has_halves(p, call->op);
    void *const shared = (char *)call->workspace + shared_begin(plan, call->op);
    skl_schedule s = {.plan = plan,
                      .scratch = (char *)call->workspace + ordered_sum_size(plan->workers),
                      .scratch_size = scratch_size(plan, call->op),
                      .key_sums = shared,
                      .task = {.problem = p,
                               .call = call,
                               .tiles = work->tiles(p),
                               .ordered_sum = {call->workspace, skl_ordered_sum_count(plan->workers)},
                               .rows_known = passes.rows_first && !halves}};
    clear_query_tail(p, call);
    clear_key_gradients(p, call, passes.fused);
    if (call->stats != NULL) {
        s.task.stats = skl_cpu_stats_memory(plan, call, shared);
        skl_cpu_stats_clear(p, call);
    }
    for (int i = 0; i < passes.count; i++)
        s.work_total += skl_pass_items(plan, &passes.pass[i]);
    for (int i = 0; i < passes.count; i++) {
        skl_call half;
        if (halves) {
            half = skl_call_half(call, i == 0 ? SKL_OP_FORWARD : SKL_OP_BACKWARD);
            s.task.call = &half;
        }
        if (!skl_schedule_run(&s, &passes.pass[i]))
            return skl_fail(SKL_ERROR_CANCELLED, "cancelled: results are not complete");
    }
    if (call->stats != NULL)
        skl_cpu_stats_finish(p, call, &s.task.stats);
    return SKL_OK;
}

/* ---- States ------------------------------------------------------------------------------------------------- */

static skl_status states_merge(const skl_plan *plan, skl_row_state *into, const skl_row_state *from,
                               skl_stream stream)
{
    (void)stream;
    const int64_t count = skl_state_count(&plan->problem);
    for (int64_t i = 0; i < count; i++) {
        const row_sums merged = row_sums_merge(row_sums_of_state(&into[i]), row_sums_of_state(&from[i]));
        into[i] = row_state_of(&merged);
    }
    return SKL_OK;
}

static void finish_row(const skl_problem *p, const skl_call *call, const skl_sequence *s, int64_t head, int64_t i)
{
    const bool reverse = p->direction == SKL_KL_REVERSE;
    row_sums sums = row_sums_of_state(&call->states[skl_state_index(p, s, head, i)]);
    const int64_t group_size = skl_group_size(p);
    if (p->sinks && !row_sums_is_empty(&sums)) {
        const skl_input *const given = &call->inputs.lse_t;
        const skl_row_lses lses = {group_size, group_size > 1 ? skl_row_at(given, s, head * group_size, i) : NULL,
                                   given->stride_head, NULL};
        sums = row_sums_merge(sums, row_sums_of_sink(skl_sink_logits_of(&call->inputs, head, lses), reverse));
    }
    const float lse_a = row_lse(sums.m_a, sums.l_a);
    const float lse_b = row_lse(sums.m_b, sums.l_b);
    skl_row_set(&call->rows.kl, s, head, i, skl_kl_report(row_kl(&sums)));
    skl_row_set(&call->rows.lse_s, s, head, i, reverse ? lse_a : lse_b);
    const float lse_t = reverse ? lse_b : lse_a; /* teacher groups: relative to the given LSEs */
    for (int64_t h = head * group_size; call->rows.lse_t.data != NULL && h < (head + 1) * group_size; h++) {
        const float given = skl_has_teacher_groups(p) ? skl_row_value(&call->inputs.lse_t, s, h, i) : 0.0F;
        skl_row_set(&call->rows.lse_t, s, h, i, lse_t == -INFINITY ? lse_t : given + lse_t);
    }
}

static skl_status states_finish(const skl_plan *plan, const skl_call *call)
{
    const skl_problem *const p = &plan->problem;
    const int64_t batch = skl_state_count(p) == 0 ? 0 : p->packed ? 1 : p->batch;
    for (int64_t b = 0; b < batch; b++) {
        const skl_sequence all_rows = {.batch = b, .query_count = p->packed ? p->total_q : p->len_q};
        for (int64_t h = 0; h < p->heads_s; h++)
            for (int64_t i = 0; i < all_rows.query_count; i++)
                finish_row(p, call, &all_rows, h, i);
    }
    return SKL_OK;
}

/* ---- Sinks -------------------------------------------------------------------------------------------------- */

/* Teacher gradients have one teacher head per student head. */
static void add_sink_gradient(const skl_plan *plan, const skl_call *call, int64_t head, bool of_teacher)
{
    const skl_problem *const p = &plan->problem;
    const skl_input kl = skl_known_rows(skl_op_is_one_pass(call->op), &call->inputs.kl, &call->rows.kl);
    double sum = 0.0;
    for (int64_t b = 0; b < p->batch; b++) {
        const skl_sequence s = skl_sequence_at(p, &call->inputs, call->keys, b);
        for (int64_t i = 0; i < s.query_count; i++) {
            const skl_range sees = skl_visible(p, &s, i);
            const skl_input *const grad_kl = &call->inputs.grad_kl;
            const float grad = grad_kl->data != NULL ? skl_row_value(grad_kl, &s, head, i) : 1.0F;
            if (sees.begin < sees.end && grad != 0.0F)
                sum += (double)grad * skl_sink_gradient(p, &call->inputs, &kl, &s, head, i, of_teacher);
        }
    }
    (of_teacher ? call->gradients.dsink_t : call->gradients.dsink_s)[head] = (float)sum;
}

static skl_status sink_gradients(const skl_plan *plan, const skl_call *call)
{
    for (int64_t h = 0; h < plan->problem.heads_s; h++) {
        if (call->gradients.dsink_s != NULL)
            add_sink_gradient(plan, call, h, false);
        if (call->gradients.dsink_t != NULL)
            add_sink_gradient(plan, call, h, true);
    }
    return SKL_OK;
}

/* ---- Memory of one call --------------------------------------------------------------------------------------- */

static skl_status allocate(const skl_plan *plan, size_t size, void **memory, skl_stream stream)
{
    (void)plan, (void)stream;
    const size_t units = size / SKL_WORKSPACE_ALIGNMENT + 1; /* at least 1 */
    *memory = aligned_alloc(SKL_WORKSPACE_ALIGNMENT, units * SKL_WORKSPACE_ALIGNMENT);
    return *memory != NULL ? SKL_OK : skl_fail(SKL_ERROR_MEMORY, "workspace: %zu bytes could not be allocated", size);
}

static void release(const skl_plan *plan, void *memory, skl_stream stream)
{
    (void)plan, (void)stream;
    free(memory);
}

const skl_backend skl_cpu_backend = {.device = SKL_CPU,
                                     .plan = plan_cpu,
                                     .run = run,
                                     .states_merge = states_merge,
                                     .states_finish = states_finish,
                                     .allocate = allocate,
                                     .release = release,
                                     .explain = skl_cpu_explain,
                                     .kernel_at = kernel_at,
                                     .sink_gradients = sink_gradients};
