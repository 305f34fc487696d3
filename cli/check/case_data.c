/* Random tensors, indices, row bounds and sinks of a case. */
#include "cli/check/cases.h"
#include "distill/random.h"

#include <math.h>
#include <stdlib.h>

static void store_bf16(uint16_t *to, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    *to = (uint16_t)(bits >> 16);
}

/* Truncates. random_normal() is below 4; the few values below 2^-6 become 0. */
static void store_f16(uint16_t *to, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t exponent = bits >> 23 & 0xff, fraction = bits >> 13 & 0x3ff, sign = bits >> 16 & 0x8000;
    const uint32_t f32_bias = 127, f16_bias = 15, least_exponent = f32_bias - 6;
    const uint32_t size = exponent < least_exponent ? 0 : (exponent - f32_bias + f16_bias) << 10 | fraction;
    *to = (uint16_t)(sign | size);
}

static void *random_tensor(skl_dtype dtype, int64_t count, uint64_t *state)
{
    float *const tensor = malloc((size_t)count * sizeof *tensor);
    uint16_t *const halves = (uint16_t *)(void *)tensor;
    for (int64_t i = 0; tensor && i < count; i++) {
        const float value = random_normal(state);
        if (dtype == SKL_F32)
            tensor[i] = value;
        else if (dtype == SKL_F16)
            store_f16(&halves[i], value);
        else
            store_bf16(&halves[i], value);
    }
    return tensor;
}

/* Random keys of sequence b, some of them twice or masked; every fifth index is -1. */
static void draw_indices(check_case *made, int64_t b, uint64_t *state)
{
    const oracle_sequence sequence = oracle_sequence_at(&made->problem, &made->inputs, b);
    const skl_input *const layout = &made->inputs.indices;
    for (int64_t h = 0; h < made->problem.heads_s; h++)
        for (int64_t i = 0; i < sequence.len_q; i++) {
            int32_t *const row = made->indices + sequence.batch * layout->stride_batch + h * layout->stride_head +
                                 (sequence.first_q + i) * layout->stride_row;
            for (int64_t n = 0; n < made->problem.top_k; n++)
                row[n] = n % 5 == 4 || sequence.len_k == 0 ? -1 : (int32_t)random_below(state, sequence.len_k);
        }
}

static bool make_indices(check_case *made, uint64_t *state)
{
    const skl_problem *const problem = &made->problem;
    const int64_t rows_q = problem->packed ? problem->total_q : problem->len_q;
    made->indices = calloc((size_t)(made->row_counts[1] * problem->top_k), sizeof *made->indices);
    made->inputs.indices = skl_input_contiguous(made->indices, problem->heads_s, rows_q, problem->top_k);
    for (int64_t b = 0; made->indices && b < problem->batch; b++)
        draw_indices(made, b, state);
    return made->indices != NULL;
}

/* Bounds of the rows of sequence b that do not decrease. The first row attends to no key, and the
 * last ones may not either. */
static void draw_bounds(check_case *made, int64_t b, uint64_t *state)
{
    const skl_problem *const problem = &made->problem;
    const oracle_sequence sequence = oracle_sequence_at(problem, &made->inputs, b);
    const int64_t first = sequence.batch * problem->len_q + sequence.first_q, keys = sequence.len_k;
    int64_t begin = 0, end = 0;
    for (int64_t i = 0; i < sequence.len_q; i++) {
        made->key_begin[first + i] = (int32_t)begin;
        made->key_end[first + i] = (int32_t)end;
        const int64_t step = 2 * (keys / sequence.len_q + 1);
        end += random_below(state, 2 * step);
        begin += random_below(state, step);
        end = end < keys ? end : keys;
        begin = begin < keys ? begin : keys;
    }
}

static bool make_bounds(check_case *made, uint64_t *state)
{
    const int64_t rows = made->row_counts[1] / made->problem.heads_s;
    made->key_begin = calloc((size_t)rows, sizeof *made->key_begin);
    made->key_end = calloc((size_t)rows, sizeof *made->key_end);
    made->inputs.key_begin = made->key_begin;
    made->inputs.key_end = made->key_end;
    const bool complete = made->key_begin && made->key_end;
    for (int64_t b = 0; complete && b < made->problem.batch; b++)
        draw_bounds(made, b, state);
    return complete;
}

static bool make_sinks(check_case *made, uint64_t *state)
{
    made->inputs.sink_t = made->sink_t = random_tensor(SKL_F32, made->problem.heads_t, state);
    made->inputs.sink_s = made->sink_s = random_tensor(SKL_F32, made->problem.heads_s, state);
    return made->sink_t && made->sink_s;
}

bool check_case_draw(check_case *made, uint64_t seed)
{
    const skl_problem *const problem = &made->problem;
    const int64_t key_heads_t = problem->key_heads_t ? problem->key_heads_t : problem->heads_t;
    const int64_t key_heads_s = problem->key_heads_s ? problem->key_heads_s : problem->heads_s;
    const int64_t rows_q = problem->packed ? problem->total_q : problem->len_q;
    const int64_t rows_k = problem->packed ? problem->total_k : problem->len_k;
    const int64_t batch = problem->packed ? 1 : problem->batch;
    const int64_t query_heads_s = problem->heads_s * (problem->index_heads ? problem->index_heads : 1);
    const int64_t dim_v = problem->gradients & SKL_DV_S ? problem->dim_s : 0;
    const struct {
        skl_input *input;
        skl_dtype dtype;
        int64_t heads, rows, dim;
    } shapes[CHECK_TENSORS] = {
        {&made->inputs.q_t, problem->dtype_t, problem->heads_t, rows_q, problem->dim_t},
        {&made->inputs.k_t, problem->dtype_t, key_heads_t, rows_k, problem->dim_t},
        {&made->inputs.q_s, problem->dtype_s, query_heads_s, rows_q, problem->dim_s},
        {&made->inputs.k_s, problem->dtype_s, key_heads_s, rows_k, problem->dim_s},
        {&made->inputs.w_s, problem->dtype_w, problem->heads_s, rows_q, problem->index_heads},
        {&made->attention.v_s, problem->dtype_s, key_heads_s, rows_k, dim_v},
        {&made->attention.o_s, problem->dtype_s, problem->heads_s, rows_q, dim_v},
        {&made->attention.do_s, problem->dtype_s, problem->heads_s, rows_q, dim_v},
    };
    uint64_t state = seed;
    made->attention.struct_size = sizeof made->attention;
    for (int t = 0; t < CHECK_TENSORS; t++) {
        made->tensor_counts[t] = batch * shapes[t].heads * shapes[t].rows * shapes[t].dim;
        if (shapes[t].dim == 0)
            continue; /* attention has no weights, and its values matter to its backward alone */
        made->tensors[t] = random_tensor(shapes[t].dtype, made->tensor_counts[t], &state);
        if (made->tensors[t] == NULL)
            return false;
        *shapes[t].input = skl_input_contiguous(made->tensors[t], shapes[t].heads, shapes[t].rows, shapes[t].dim);
    }
    made->row_counts[0] = batch * problem->heads_t * rows_q;
    made->row_counts[1] = batch * problem->heads_s * rows_q;
    made->grad_kl = random_tensor(SKL_F32, made->row_counts[1], &state);
    for (int64_t i = 0; dim_v > 0 && made->grad_kl && i < made->row_counts[1]; i++)
        made->grad_kl[i] = fabsf(made->grad_kl[i]); /* as weights usually are; a kernel may have a path for others */
    made->inputs.grad_kl = skl_input_contiguous(made->grad_kl, problem->heads_s, rows_q, 1);
    return made->grad_kl != NULL && (problem->top_k == 0 || make_indices(made, &state)) &&
           (!problem->row_bounds || make_bounds(made, &state)) && (!problem->sinks || make_sinks(made, &state));
}
