#include "base/tensors.h"

#include <assert.h>
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include "base/arrays.h"
#include "base/needs.h"
#include "base/overlap.h"
#include "base/side.h"
#include "base/stats.h"
#include "base/status.h"

typedef enum kind { INPUT, OUTPUT, WORKSPACE } kind;
typedef enum need { OPTIONAL, REQUIRED, REFUSED } need;

/* One tensor of a call: its name, its address and strides, and its shape in the problem. */
typedef struct tensor_rule {
    const char *name;
    const void *data;
    int64_t stride_batch, stride_head, stride_row;
    int64_t heads, rows, dim;
    skl_dtype dtype;
    kind kind;
    need need;
    const char *why; /* completes "NULL: must be given ..." or "given: must be NULL ..." */
    bool shared;     /* all sequences share the tensor: no batch dimension */
} tensor_rule;

static int64_t span_of(int64_t extent, int64_t stride, int64_t inner_span)
{
    int64_t span = 0;
    if (__builtin_mul_overflow(extent - 1, stride, &span) || __builtin_add_overflow(span, inner_span, &span))
        return INT64_MAX;
    return span;
}

/* A dimension of a tensor, except the last. */
typedef struct dimension {
    const char *name; /* name of the stride */
    int64_t extent, stride;
} dimension;

enum { DIMENSIONS = 3 };

static void dimensions_of(const skl_problem *p, const tensor_rule *t, dimension dimensions[DIMENSIONS])
{
    dimensions[0] = (dimension){"stride_row", t->rows, t->stride_row};
    dimensions[1] = (dimension){"stride_head", t->heads, t->stride_head};
    const bool one = p->packed || t->shared;
    dimensions[2] = (dimension){"stride_batch", one ? 1 : p->batch, one ? 0 : t->stride_batch};
}

/* Sorts by increasing stride. */
static void sort_by_stride(dimension dimensions[DIMENSIONS])
{
    for (int i = 1; i < DIMENSIONS; i++)
        for (int k = i; k > 0 && dimensions[k].stride < dimensions[k - 1].stride; k--) {
            const dimension swapped = dimensions[k];
            dimensions[k] = dimensions[k - 1];
            dimensions[k - 1] = swapped;
        }
}

/* Inputs only need to fit into the address space. In an output, each stride must be at least the span of the
 * dimensions inside it, so that no two elements share an address. */
static skl_status check_strides(const skl_problem *p, const tensor_rule *t)
{
    dimension dimensions[DIMENSIONS];
    dimensions_of(p, t, dimensions);
    for (int i = 0; i < DIMENSIONS; i++) {
        if (dimensions[i].stride < 0)
            return skl_fail(SKL_ERROR_ARGUMENT, "%s.%s=%" PRId64 ": must be at least 0", t->name, dimensions[i].name,
                            dimensions[i].stride);
        if (dimensions[i].extent == 0)
            return SKL_OK; /* no elements */
    }
    sort_by_stride(dimensions);
    int64_t span = t->dim;
    for (int i = 0; i < DIMENSIONS; i++) {
        const dimension *const d = &dimensions[i];
        if (d->extent == 1)
            continue;
        if (t->kind == OUTPUT && d->stride < span)
            return skl_fail(SKL_ERROR_ARGUMENT,
                            "%s.%s=%" PRId64 ": elements of an output overlap; must be at least %" PRId64, t->name,
                            d->name, d->stride, span);
        span = span_of(d->extent, d->stride, span);
    }
    if (span > INT64_MAX / 8)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "%s strides (batch %" PRId64 ", head %" PRId64 ", row %" PRId64 "): span overflows 64 bits",
                        t->name, t->stride_batch, t->stride_head, t->stride_row);
    return SKL_OK;
}

static bool has_elements(const skl_problem *p, const tensor_rule *t)
{
    return t->dim > 0 && (t->shared || (t->rows > 0 && (p->packed || p->batch > 0)));
}

static skl_status check_tensor(const skl_problem *p, const tensor_rule *t)
{
    if (t->data == NULL && t->need == REQUIRED && has_elements(p, t))
        return skl_fail(SKL_ERROR_ARGUMENT, "%s=NULL: must be given%s", t->name, t->why);
    if (t->data != NULL && t->need == REFUSED)
        return skl_fail(SKL_ERROR_ARGUMENT, "%s given: must be NULL%s", t->name, t->why);
    if (t->data == NULL)
        return SKL_OK;
    if ((uintptr_t)t->data % skl_dtype_size(t->dtype) != 0)
        return skl_fail(SKL_ERROR_ARGUMENT, "%s=%p: must be aligned to its element size, %zu bytes", t->name, t->data,
                        skl_dtype_size(t->dtype));
    return check_strides(p, t);
}

static skl_layout layout_of(const skl_problem *p, const tensor_rule *t)
{
    const uint64_t element_size = skl_dtype_size(t->dtype);
    dimension dimensions[DIMENSIONS];
    dimensions_of(p, t, dimensions);
    sort_by_stride(dimensions);
    skl_layout layout = skl_layout_run(t->data, (uint64_t)t->dim * element_size);
    for (int i = 0; i < DIMENSIONS; i++)
        skl_layout_repeat(&layout, (uint64_t)dimensions[i].extent, (uint64_t)dimensions[i].stride * element_size);
    return layout;
}

/* A row result may be written in place of the input of the same name: rows.lse_t in place of lse_t. */
static bool is_in_place(const tensor_rule *output, const tensor_rule *input)
{
    return strncmp(output->name, "rows.", 5) == 0 && strcmp(output->name + 5, input->name) == 0 &&
           output->data == input->data && output->stride_batch == input->stride_batch &&
           output->stride_head == input->stride_head && output->stride_row == input->stride_row;
}

enum { TENSORS_MAX = 64 };

/* The rules of a call. Inputs come first, the workspace last. */
typedef struct rule_list {
    size_t count;
    tensor_rule at[TENSORS_MAX];
} rule_list;

/* An output must not share a byte with another tensor, and the workspace with none. */
static skl_status check_overlaps(const skl_problem *p, const rule_list *rules)
{
    const tensor_rule *given[TENSORS_MAX];
    skl_layout layouts[TENSORS_MAX];
    size_t before = 0;
    for (const tensor_rule *t = rules->at; t < rules->at + rules->count; t++) {
        if (t->data == NULL || !has_elements(p, t))
            continue;
        const skl_layout layout = layout_of(p, t);
        for (size_t k = 0; k < before && t->kind != INPUT; k++)
            if (!is_in_place(t, given[k]) && skl_layouts_overlap(&layout, &layouts[k]))
                return skl_fail(SKL_ERROR_ARGUMENT,
                                "%s=%p and %s=%p overlap: %s must not share memory with another tensor",
                                given[k]->name, given[k]->data, t->name, t->data,
                                t->kind == OUTPUT ? "an output" : "the workspace");
        given[before] = t;
        layouts[before++] = layout;
    }
    return SKL_OK;
}

static skl_status check_rules(const skl_problem *p, const rule_list *rules)
{
    assert(rules->count <= TENSORS_MAX);
    for (size_t i = 0; i < rules->count; i++)
        SKL_TRY(check_tensor(p, &rules->at[i]));
    return check_overlaps(p, rules);
}

enum { STATE_FLOATS = sizeof(skl_row_state) / sizeof(float) };

/* TENSOR, ROWS and ARRAY append a rule to the list `rules`. */
#define TENSOR(t, label, heads, rows, dim, dtype, kind, need, why)                                                   \
    rules->at[rules->count++] = (tensor_rule)                                                                        \
    {                                                                                                                \
        label, (t).data, (t).stride_batch, (t).stride_head, (t).stride_row, heads, rows, dim, dtype, kind, need,     \
            why, false                                                                                               \
    }

/* A number per row of each head. */
#define ROWS(t, label, heads, kind, need, why)                                                                       \
    TENSOR(t, label, heads, skl_query_rows(p).rows, 1, SKL_F32, kind, need, why)

/* A contiguous array of 4-byte elements that all sequences share. */
#define ARRAY(address, label, extent, kind, need, why)                                                               \
    rules->at[rules->count++] = (tensor_rule)                                                                        \
    {                                                                                                                \
        label, address, 0, 0, 0, 1, 1, extent, SKL_F32, kind, need, why, true                                        \
    }

static need required_if(bool condition)
{
    return condition ? REQUIRED : OPTIONAL;
}

static need optional_if(bool condition)
{
    return condition ? OPTIONAL : REFUSED;
}

/* Elements of key_begin and key_end. */
static int64_t bounded_rows(const skl_problem *p)
{
    return p->packed ? p->total_q : p->batch * p->len_q;
}

/* A sink on one side only would be an outcome that the other distribution does not have. */
static void add_arrays(rule_list *rules, const skl_problem *p, const skl_call *call)
{
    const skl_inputs *const in = &call->inputs;
    const bool reads_teacher = call->stats == NULL;
    const need lengths = p->packed ? REQUIRED : REFUSED, sinks = p->sinks ? REQUIRED : REFUSED;
    const char *const why_lengths = p->packed ? " when packed=1" : " unless packed=1";
    const char *const why_bounds = " unless row_bounds=1";
    const char *const why_sinks =
        p->sinks ? " when sinks=1; sinks=0 gives the KL of the distributions on the keys alone" : " unless sinks=1";
    ARRAY(in->cu_seqlens_q, "cu_seqlens_q", p->batch + 1, INPUT, lengths, why_lengths);
    ARRAY(in->cu_seqlens_k, "cu_seqlens_k", p->batch + 1, INPUT, lengths, why_lengths);
    ARRAY(in->key_lengths, "key_lengths", p->batch, INPUT, optional_if(!p->packed), why_lengths);
    ARRAY(in->key_begin, "key_begin", bounded_rows(p), INPUT, optional_if(p->row_bounds), why_bounds);
    ARRAY(in->key_end, "key_end", bounded_rows(p), INPUT, optional_if(p->row_bounds), why_bounds);
    ARRAY(in->sink_t, "sink_t", p->heads_t, INPUT, reads_teacher ? sinks : optional_if(p->sinks), why_sinks);
    ARRAY(in->sink_s, "sink_s", p->heads_s, INPUT, sinks, why_sinks);
}

/* Everything but the arrays and the workspace of a call that reads teacher and student. */
static void add_tensors(rule_list *rules, const skl_problem *p, const skl_call *call)
{
    static const skl_attention no_attention = {.struct_size = sizeof(skl_attention)};
    const skl_inputs *const in = &call->inputs;
    const skl_rows *const rows = &call->rows;
    const skl_gradients *const grads = &call->gradients;
    const bool attends = skl_op_is_attention(call->op), makes_output = call->op == SKL_OP_ATTENTION_FORWARD;
    const bool backward = call->op == SKL_OP_BACKWARD, finish = call->op == SKL_OP_FINISH;
    const bool one_pass = skl_op_is_one_pass(call->op), halves = skl_op_has_halves(p, call->op);
    const bool indexer = skl_is_indexer(p), teacher_groups = skl_has_teacher_groups(p);
    const skl_attention *const attention = attends ? call->attention : &no_attention;
    const skl_needs needs = skl_call_needs(p, call);

    const char *const in_finish = " in skl_states_finish";
    const char *const for_backward = ": a backward needs the LSEs of the forward";
    const char *const for_first = ": gradients of the first argument of the KL need it";
    const char *const for_dots = ": teacher gradients with heads_t > heads_s need it";
    const char *const for_partial = indexer ? ": partial states of an indexer need the LSE of all keys"
                                            : ": partial states with heads_t > heads_s need the LSE of all keys";
    const char *const for_finish =
        indexer ? ": rows.lse_t of an indexer needs it" : ": rows.lse_t or sinks with heads_t > heads_s need it";
    const char *const known =
        halves ? ": the gradients of a pooled teacher read it" : " in a one-pass call: the LSEs are inputs";
    const char *const indexer_only = " unless student=SKL_STUDENT_INDEXER";
    const char *const indexer_why = finish ? in_finish : indexer_only;
    const char *const mass_why = indexer && one_pass ? known : indexer_why;
    const char *const lse_t_why = finish ? for_finish : call->op == SKL_OP_PARTIAL ? for_partial : for_backward;
    const char *const lse_s_why =
        halves ? " in a one-pass call with a pooled teacher, which computes it" : for_backward;
    const char *const dot_why = finish     ? in_finish
                                : p->sinks ? " with sinks: there are no teacher gradients with heads_t > heads_s"
                                : indexer  ? " for an indexer: its teacher is fixed"
                                : teacher_groups ? for_dots
                                                 : " unless heads_t > heads_s";
    const char *const unplanned = ": the plan's problem.gradients does not name it";

    const bool finish_of_groups = finish && teacher_groups && (rows->lse_t.data != NULL || p->sinks);
    const need key_need = required_if(!finish); /* states stand for queries and keys */
    const need lse_t_need = required_if((needs.lse_t && !halves) || finish_of_groups);
    const need lse_s_need = halves ? REFUSED : required_if(needs.lse_s);
    const need lse_out_need = halves ? REQUIRED : optional_if(!one_pass);
    const need dot_out_need =
        !teacher_groups || indexer || p->sinks || finish ? REFUSED : required_if(one_pass && needs.dot_t);
    const need indexer_out_need = optional_if(indexer && !finish);
    const need mass_need = one_pass && !halves ? REFUSED : indexer_out_need;
    const need output_need = required_if(attends && !makes_output); /* of the attention's forward */

    const int64_t rows_q = skl_query_rows(p).rows, rows_k = skl_key_rows(p).rows;
    const int64_t rows_k_s = skl_student_key_rows(p).rows, query_heads_s = skl_query_heads_s(p);
    const skl_output states = skl_output_contiguous(call->states, p->heads_s, rows_q, STATE_FLOATS);
    const skl_dtype grad_t = skl_grad_dtype(p, p->dtype_t), grad_s = skl_grad_dtype(p, p->dtype_s);
    const skl_dtype grad_w = skl_grad_dtype(p, p->dtype_w);

    TENSOR(in->q_t, "q_t", p->heads_t, rows_q, p->dim_t, p->dtype_t, INPUT, key_need, "");
    TENSOR(in->k_t, "k_t", p->key_heads_t, rows_k, p->dim_t, p->dtype_t, INPUT, key_need, "");
    TENSOR(in->q_s, "q_s", query_heads_s, rows_q, p->dim_s, p->dtype_s, INPUT, key_need, "");
    TENSOR(in->k_s, "k_s", p->key_heads_s, rows_k_s, p->dim_s, p->dtype_s, INPUT, key_need, "");
    ROWS(in->lse_t, "lse_t", p->heads_t, INPUT, lse_t_need, lse_t_why);
    ROWS(in->lse_s, "lse_s", p->heads_s, INPUT, lse_s_need, lse_s_why);
    ROWS(in->kl, "kl", p->heads_s, INPUT, required_if(backward && needs.kl), for_first);
    ROWS(in->dot_t, "dot_t", p->heads_t, INPUT, required_if(backward && needs.dot_t), for_dots);
    ROWS(in->grad_kl, "grad_kl", p->heads_s, INPUT, OPTIONAL, "");
    TENSOR(in->w_s, "w_s", p->heads_s, rows_q, p->index_heads, p->dtype_w, INPUT, indexer ? key_need : REFUSED,
           indexer ? ": the weights of an indexer" : indexer_only);
    TENSOR(in->indices, "indices", p->heads_s, rows_q, p->top_k, SKL_F32 /* int32 has its size */, INPUT,
           p->top_k > 0 ? key_need : REFUSED, p->top_k > 0 ? ": top_k > 0" : " unless top_k > 0");
    TENSOR(attention->v_s, "v_s", p->key_heads_s, rows_k, p->dim_s, p->dtype_s, INPUT, required_if(attends), "");
    TENSOR(attention->o_s, "o_s", p->heads_s, rows_q, p->dim_s, p->dtype_s, INPUT, output_need, "");
    TENSOR(attention->do_s, "do_s", p->heads_s, rows_q, p->dim_s, p->dtype_s, INPUT, output_need, "");
    TENSOR(states, "states", p->heads_s, rows_q, STATE_FLOATS, SKL_F32, finish ? INPUT : OUTPUT,
           required_if(finish || call->op == SKL_OP_PARTIAL), "");

    TENSOR(call->o_s, "o_s", p->heads_s, rows_q, p->dim_s, p->dtype_s, OUTPUT, required_if(makes_output), "");
    ROWS(rows->kl, "rows.kl", p->heads_s, OUTPUT, required_if(one_pass && needs.kl), for_first);
    ROWS(rows->lse_t, "rows.lse_t", p->heads_t, OUTPUT, lse_out_need, known);
    ROWS(rows->lse_s, "rows.lse_s", p->heads_s, OUTPUT, lse_out_need, known);
    ROWS(rows->dot_t, "rows.dot_t", p->heads_t, OUTPUT, dot_out_need, dot_why);
    ROWS(rows->cross_entropy, "rows.cross_entropy", p->heads_s, OUTPUT, indexer_out_need, indexer_why);
    ROWS(rows->entropy, "rows.entropy", p->heads_s, OUTPUT, indexer_out_need, indexer_why);
    ROWS(rows->mass, "rows.mass", p->heads_s, OUTPUT, mass_need, mass_why);
#define GRADIENT(name, bit, heads, rows, dim, dtype)                                                                 \
    TENSOR(grads->name, #name, heads, rows, dim, dtype, OUTPUT, optional_if(p->gradients &(bit)), unplanned)
    GRADIENT(dq_t, SKL_DQ_T, p->heads_t, rows_q, p->dim_t, grad_t);
    GRADIENT(dk_t, SKL_DK_T, p->key_heads_t, rows_k, p->dim_t, grad_t);
    GRADIENT(dq_s, SKL_DQ_S, query_heads_s, rows_q, p->dim_s, grad_s);
    GRADIENT(dk_s, SKL_DK_S, p->key_heads_s, rows_k_s, p->dim_s, grad_s);
    GRADIENT(dw_s, SKL_DW_S, p->heads_s, rows_q, p->index_heads, grad_w);
    ARRAY(grads->dsink_t, "dsink_t", p->heads_t, OUTPUT, optional_if(p->gradients & SKL_DSINK_T), unplanned);
    ARRAY(grads->dsink_s, "dsink_s", p->heads_s, OUTPUT, optional_if(p->gradients & SKL_DSINK_S), unplanned);
    TENSOR(attention->dv_s, "dv_s", p->key_heads_s, rows_k, p->dim_s, grad_s, OUTPUT, OPTIONAL, "");
}

/* Elements of a contiguous [batch, heads_s, rows, columns]; INT64_MAX where 64 bits cannot count them. */
static int64_t elements_of(const skl_problem *p, int64_t rows, int64_t columns)
{
    int64_t count = p->batch * p->heads_s;
    const bool overflow =
        __builtin_mul_overflow(count, rows, &count) || __builtin_mul_overflow(count, columns, &count);
    return overflow ? INT64_MAX : count;
}

/* Everything but the arrays and the workspace of skl_attention_stats, which reads the student alone. */
static void add_stats_tensors(rule_list *rules, const skl_problem *p, const skl_call *call)
{
    const skl_inputs *const in = &call->inputs;
    const skl_stats *const out = call->stats;
    const uint32_t bits = skl_stats_bits(out);
    const int64_t rows_q = skl_query_rows(p).rows, rows_k = skl_key_rows(p).rows;
    const int64_t sum_heads = out->per_key_head ? p->key_heads_s : p->heads_s;
    TENSOR(in->q_s, "q_s", p->heads_s, rows_q, p->dim_s, p->dtype_s, INPUT, REQUIRED, "");
    TENSOR(in->k_s, "k_s", p->key_heads_s, rows_k, p->dim_s, p->dtype_s, INPUT, REQUIRED, "");
    ROWS(in->lse_s, "lse_s", p->heads_s, INPUT, OPTIONAL, "");
    ROWS(out->row_weights, "stats.row_weights", p->heads_s, INPUT, OPTIONAL, "");
    ARRAY(out->key_ranges, "stats.key_ranges", 2 * p->batch * out->range_count, INPUT,
          required_if(bits & SKL_STATS_RANGES), ": range_mass and range_sum need it");
    ARRAY(out->chosen_rows, "stats.chosen_rows", p->batch * out->chosen_count, INPUT,
          required_if(bits & SKL_STATS_WEIGHTS), ": weights need it");
    TENSOR(out->key_sum, "stats.key_sum", sum_heads, rows_k, 1, SKL_F32, OUTPUT, OPTIONAL, "");
    TENSOR(out->key_max, "stats.key_max", sum_heads, rows_k, 1, SKL_F32, OUTPUT, OPTIONAL, "");
    ROWS(out->lse, "stats.lse", p->heads_s, OUTPUT, optional_if(in->lse_s.data == NULL), " if lse_s is given");
    ROWS(out->entropy, "stats.entropy", p->heads_s, OUTPUT, OPTIONAL, "");
    ROWS(out->max_logit, "stats.max_logit", p->heads_s, OUTPUT, OPTIONAL, "");
    ROWS(out->expected_distance, "stats.expected_distance", p->heads_s, OUTPUT, OPTIONAL, "");
    TENSOR(out->range_mass, "stats.range_mass", p->heads_s, rows_q, out->range_count, SKL_F32, OUTPUT, OPTIONAL, "");
    TENSOR(out->top_keys, "stats.top_keys", p->heads_s, rows_q, out->top_k, SKL_F32, OUTPUT, OPTIONAL, "");
    TENSOR(out->top_p, "stats.top_p", p->heads_s, rows_q, out->top_k, SKL_F32, OUTPUT, OPTIONAL, "");
    ARRAY(out->head_max_logit, "stats.head_max_logit", elements_of(p, 1, 1), OUTPUT, OPTIONAL, "");
    ARRAY(out->distance_mass, "stats.distance_mass", elements_of(p, 1, out->distance_count), OUTPUT, OPTIONAL, "");
    ARRAY(out->range_sum, "stats.range_sum", elements_of(p, 1, out->range_count), OUTPUT, OPTIONAL, "");
    ARRAY(out->weights, "stats.weights", elements_of(p, out->chosen_count, p->len_k), OUTPUT, OPTIONAL, "");
}

/* `workspace_size` is the part of the workspace that the call uses; 0: none. */
static skl_status check_tensors(const skl_problem *p, const skl_call *call, size_t workspace_size)
{
    const skl_inputs *const in = &call->inputs;
    const bool has_arrays = in->struct_size != 0 || p->sinks;
    rule_list list, *const rules = &list;
    rules->count = 0;
    const bool bounded = has_arrays && p->row_bounds && bounded_rows(p) > 0; /* empty arrays may have no address */
    if (bounded && in->key_begin == NULL && in->key_end == NULL)
        return skl_fail(SKL_ERROR_ARGUMENT, "key_begin=NULL, key_end=NULL: row_bounds=1 needs at least one of them");
    if (has_arrays)
        add_arrays(rules, p, call);
    (call->stats != NULL ? add_stats_tensors : add_tensors)(rules, p, call);
    if (workspace_size > 0)
        ARRAY(call->workspace, "workspace", (int64_t)(workspace_size / skl_dtype_size(SKL_F32)), WORKSPACE, OPTIONAL,
              "");
    return check_rules(p, rules);
}

static skl_status check_workspace(const skl_plan *plan, const skl_call *call, size_t workspace_size)
{
    const size_t needed = plan->workspace_size[call->op];
    if (needed == 0)
        return SKL_OK;
    if (call->workspace == NULL)
        return skl_fail(SKL_ERROR_WORKSPACE, "workspace=NULL: must point to %zu bytes", needed);
    if (workspace_size < needed)
        return skl_fail(SKL_ERROR_WORKSPACE, "workspace_size=%zu: must be at least %zu", workspace_size, needed);
    if ((uintptr_t)call->workspace % SKL_WORKSPACE_ALIGNMENT != 0)
        return skl_fail(SKL_ERROR_WORKSPACE, "workspace=%p: must be aligned to %d bytes", call->workspace,
                        SKL_WORKSPACE_ALIGNMENT);
    return SKL_OK;
}

skl_status skl_call_check(const skl_plan *plan, const skl_call *call, size_t workspace_size)
{
    const skl_problem *const p = &plan->problem;
    const skl_status workspace_status = check_workspace(plan, call, workspace_size);
    const size_t used_size = workspace_status == SKL_OK ? plan->workspace_size[call->op] : 0;
    SKL_TRY(skl_op_check_for(p, call->op));
    if (call->stats != NULL)
        SKL_TRY(skl_stats_check(call->stats));
    SKL_TRY(check_tensors(p, call, used_size));
    if (call->op == SKL_OP_PARTIAL && call->keys.begin > call->keys.end)
        return skl_fail(SKL_ERROR_ARGUMENT, "key_begin=%" PRId64 ": must be at most key_end=%" PRId64,
                        call->keys.begin, call->keys.end);
    SKL_TRY(workspace_status);
    if (plan->backend->device != SKL_CPU)
        return SKL_OK;
    if (call->inputs.struct_size != 0)
        SKL_TRY(skl_arrays_check_values(p, &call->inputs));
    return call->stats != NULL ? skl_stats_check_values(p, &call->inputs, call->stats) : SKL_OK;
}

skl_status skl_inputs_check_layout(const skl_problem *problem, const skl_inputs *inputs, skl_op op)
{
    /* A call without results requires no row vector and has no output. */
    static const skl_stats no_stats = {.struct_size = sizeof(skl_stats)};
    const bool of_stats = op == SKL_OP_ATTENTION_STATS;
    const skl_call call = {
        .op = of_stats ? op : SKL_OP_FORWARD, .inputs = *inputs, .stats = of_stats ? &no_stats : NULL};
    return check_tensors(problem, &call, 0);
}

skl_status skl_merge_check(const skl_problem *p, const skl_row_state *into, const skl_row_state *from)
{
    const int64_t rows_q = skl_query_rows(p).rows;
    const skl_input read = skl_input_contiguous(from, p->heads_s, rows_q, STATE_FLOATS);
    const skl_input written = skl_input_contiguous(into, p->heads_s, rows_q, STATE_FLOATS);
    rule_list list, *const rules = &list;
    rules->count = 0;
    TENSOR(read, "from", p->heads_s, rows_q, STATE_FLOATS, SKL_F32, INPUT, REQUIRED, "");
    TENSOR(written, "into", p->heads_s, rows_q, STATE_FLOATS, SKL_F32, OUTPUT, REQUIRED, "");
    return check_rules(p, rules);
}
