#include "gpu_case.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "oracle.h"
#include "tensor.h"

void test_assert_cuda(cudaError_t error, const char *call, const char *file, int line)
{
    if (error == cudaSuccess)
        return;
    print_error("%s: %s\n", call, cudaGetErrorString(error));
    _fail(file, line);
}

/* ---- Creation ----------------------------------------------------------------------------------------------- */

static void *gpu_allocate(size_t size)
{
    void *memory = NULL;
    assert_cuda(cudaMalloc(&memory, size));
    assert_cuda(cudaMemset(memory, POISON, size));
    return memory;
}

/* Bits of a random f16 or bf16 of any sign with an absolute value in [1/4, 2). */
static uint16_t random_element(skl_dtype dtype, test_random *random)
{
    const uint16_t sign = (uint16_t)(random_bits(random) & 0x8000);
    const uint16_t fraction_bits = dtype == SKL_F16 ? 10 : 7;
    const uint16_t one = (uint16_t)((dtype == SKL_F16 ? 15 : 127) << fraction_bits);
    const int64_t below_1 = 2; /* binades below 1 */
    const int64_t step = random_between(random, 0, ((below_1 + 1) << fraction_bits) - 1);
    return (uint16_t)(sign | (uint16_t)(one - (below_1 << fraction_bits) + step));
}

static void fill(gpu_case *g, int t, int64_t count)
{
    test_random random = random_for((const char *[]){"q_t", "k_t", "q_s", "k_s"}[t]);
    g->pattern[t] = malloc(GPU_CASE_PERIOD * sizeof *g->pattern[t]);
    assert_non_null(g->pattern[t]);
    for (int64_t n = 0; n < GPU_CASE_PERIOD; n++)
        g->pattern[t][n] = random_element(g->problem.dtype_s, &random);
    g->tensors[t] = gpu_allocate((size_t)count * sizeof(uint16_t));
    for (int64_t first = 0; first < count; first += GPU_CASE_PERIOD) {
        const int64_t length = count - first < GPU_CASE_PERIOD ? count - first : GPU_CASE_PERIOD;
        assert_cuda(cudaMemcpyAsync((uint16_t *)g->tensors[t] + first, first == 0 ? g->pattern[t] : g->tensors[t],
                                    (size_t)length * sizeof(uint16_t), cudaMemcpyDefault, NULL));
    }
}

static size_t gradient_size(const skl_problem *p)
{
    return p->grad_f32 ? sizeof(float) : sizeof(uint16_t);
}

static size_t row_count(const skl_problem *p)
{
    return (size_t)(p->batch * p->heads_s * p->len_q);
}

static void attach(gpu_case *g)
{
    const skl_problem *const p = &g->problem;
    const int64_t heads = p->heads_s, len_q = p->len_q, len_k = p->len_k;
    g->inputs = (skl_inputs){
        .struct_size = sizeof g->inputs,
        .q_t = skl_input_contiguous(g->tensors[0], heads, len_q, p->dim_t),
        .k_t = skl_input_contiguous(g->tensors[1], heads, len_k, p->dim_t),
        .q_s = skl_input_contiguous(g->tensors[2], heads, len_q, p->dim_s),
        .k_s = skl_input_contiguous(g->tensors[3], heads, len_k, p->dim_s),
    };
    g->rows = (skl_rows){
        .struct_size = sizeof g->rows,
        .kl = skl_output_contiguous(g->kl, heads, len_q, 1),
        .lse_t = skl_output_contiguous(g->lse_t, heads, len_q, 1),
        .lse_s = skl_output_contiguous(g->lse_s, heads, len_q, 1),
    };
    g->saved = g->inputs;
    g->saved.kl = skl_input_contiguous(g->kl, heads, len_q, 1);
    g->saved.lse_t = skl_input_contiguous(g->lse_t, heads, len_q, 1);
    g->saved.lse_s = skl_input_contiguous(g->lse_s, heads, len_q, 1);
    g->gradients = (skl_gradients){
        .struct_size = sizeof g->gradients,
        .dq_s = skl_output_contiguous(g->dq_s, heads, len_q, p->dim_s),
        .dk_s = skl_output_contiguous(g->dk_s, heads, len_k, p->dim_s),
    };
    g->attention = (skl_attention){
        .struct_size = sizeof g->attention,
        .v_s = g->inputs.k_t,
        .o_s = g->inputs.q_t,
        .do_s = g->inputs.q_s,
        .dv_s = skl_output_contiguous(g->dv_s, heads, len_k, p->dim_s),
    };
}

static bool has_attention(const gpu_case *g)
{
    return (g->problem.gradients & SKL_DV_S) != 0;
}

void gpu_case_create(gpu_case *g, const skl_problem *problem, const char *kernel, int deterministic)
{
    *g = (gpu_case){.problem = *problem,
                    .deterministic = deterministic,
                    .plan = deterministic ? test_deterministic_plan(problem, kernel) : test_plan(problem, kernel, 0)};
    const skl_problem *const p = &g->problem;
    const size_t forward = skl_plan_workspace_size(g->plan, SKL_OP_FORWARD);
    const size_t backward =
        skl_plan_workspace_size(g->plan, has_attention(g) ? SKL_OP_ATTENTION_BACKWARD : SKL_OP_BACKWARD);
    g->workspace_size = forward > backward ? forward : backward;
    g->workspace = gpu_allocate(g->workspace_size);
    const int64_t heads = p->batch * p->heads_s;
    fill(g, 0, heads * p->len_q * p->dim_t);
    fill(g, 1, heads * p->len_k * p->dim_t);
    fill(g, 2, heads * p->len_q * p->dim_s);
    fill(g, 3, heads * p->len_k * p->dim_s);
    g->kl = gpu_allocate(row_count(p) * sizeof(float));
    g->lse_t = gpu_allocate(row_count(p) * sizeof(float));
    g->lse_s = gpu_allocate(row_count(p) * sizeof(float));
    g->dq_s = gpu_allocate((size_t)(heads * p->len_q * p->dim_s) * gradient_size(p));
    g->dk_s = gpu_allocate((size_t)(heads * p->len_k * p->dim_s) * gradient_size(p));
    if (has_attention(g))
        g->dv_s = gpu_allocate((size_t)(heads * p->len_k * p->dim_s) * gradient_size(p));
    attach(g);
    assert_cuda(cudaDeviceSynchronize());
}

void gpu_case_destroy(gpu_case *g)
{
    void *const owned[] = {g->workspace, g->tensors[0], g->tensors[1], g->tensors[2], g->tensors[3], g->kl,
                           g->lse_t,     g->lse_s,      g->dq_s,       g->dk_s,       g->dv_s};
    for (size_t n = 0; n < COUNT_OF(owned); n++)
        assert_cuda(cudaFree(owned[n]));
    for (int t = 0; t < 4; t++)
        free(g->pattern[t]);
    skl_plan_destroy(g->plan);
}

void gpu_case_launch(const gpu_case *g, skl_stream stream)
{
    assert_ok(skl_forward(g->plan, &g->inputs, &g->rows, g->workspace, g->workspace_size, stream));
    const skl_rows no_rows = {.struct_size = sizeof no_rows};
    if (has_attention(g))
        assert_ok(skl_attention_backward(g->plan, &g->saved, &g->attention, &no_rows, &g->gradients, g->workspace,
                                         g->workspace_size, stream));
    else
        assert_ok(skl_backward(g->plan, &g->saved, &g->gradients, g->workspace, g->workspace_size, stream));
}

/* ---- Results ------------------------------------------------------------------------------------------------ */

typedef struct result_buffer {
    const void *data;
    size_t size;
} result_buffer;

enum { RESULT_COUNT = 6 };

static void list_results(const gpu_case *g, result_buffer *list)
{
    const skl_problem *const p = &g->problem;
    const size_t rows_size = row_count(p) * sizeof(float);
    const size_t dq_size = row_count(p) * (size_t)p->dim_s * gradient_size(p);
    const size_t dk_size = (size_t)(p->batch * p->heads_s * p->len_k * p->dim_s) * gradient_size(p);
    const bool stable_dq = !has_attention(g); /* dq of an attention backward is a sum in any order */
    const result_buffer all[RESULT_COUNT] = {{g->kl, rows_size},    {g->lse_t, rows_size},
                                             {g->lse_s, rows_size}, {g->dq_s, stable_dq ? dq_size : 0},
                                             {g->dk_s, dk_size},    {g->dv_s, has_attention(g) ? dk_size : 0}};
    memcpy(list, all, sizeof all);
}

size_t gpu_case_result_size(const gpu_case *g)
{
    result_buffer list[RESULT_COUNT];
    list_results(g, list);
    size_t size = 0;
    for (int n = 0; n < RESULT_COUNT; n++)
        size += list[n].size;
    return size;
}

unsigned char *gpu_case_results(const gpu_case *g)
{
    result_buffer list[RESULT_COUNT];
    list_results(g, list);
    unsigned char *const results = malloc(gpu_case_result_size(g)), *next = results;
    assert_non_null(results);
    for (int n = 0; n < RESULT_COUNT; next += list[n++].size)
        assert_cuda(cudaMemcpy(next, list[n].data, list[n].size, cudaMemcpyDefault));
    return results;
}

/* ---- Comparison with the oracle ----------------------------------------------------------------------------- */

/* Rows [first, first + count) of a head, from the pattern. */
static uint16_t *rows_of(const gpu_case *g, int t, int64_t head, int64_t length, int64_t first, int64_t count,
                         int64_t dim)
{
    uint16_t *const rows = malloc((size_t)(count * dim) * sizeof *rows);
    assert_non_null(rows);
    const int64_t begin = (head * length + first) * dim;
    for (int64_t n = 0; n < count * dim; n++)
        rows[n] = g->pattern[t][(begin + n) % GPU_CASE_PERIOD];
    return rows;
}

/* Largest error, and the largest absolute value of the exact elements. */
typedef struct sample_error {
    double error, size;
} sample_error;

static sample_error compare(const void *on_gpu, skl_dtype dtype, int64_t first, int64_t count, const double *exact)
{
    const size_t element = dtype_size(dtype);
    unsigned char *const copy = malloc((size_t)count * element);
    assert_non_null(copy);
    assert_cuda(cudaMemcpy(copy, (const unsigned char *)on_gpu + (size_t)first * element, (size_t)count * element,
                           cudaMemcpyDefault));
    sample_error result = {0, 0};
    for (int64_t n = 0; n < count; n++) {
        const double error = fabs(oracle_read(dtype, copy, n) - exact[n]);
        result.error = error <= result.error ? result.error : error; /* keeps a NaN */
        result.size = fmax(result.size, fabs(exact[n]));
    }
    free(copy);
    return result;
}

/* `relative` is loose enough for rounding to bf16, and tight enough to find a wrong index. */
static void assert_close(sample_error sample, double relative, const char *what, int64_t head, int64_t j)
{
    const double allowed = relative * (sample.size + 1e-3);
    if (!(sample.error <= allowed))
        fail_msg("%s around key %lld of head %lld: error %g, allowed %g", what, (long long)j, (long long)head,
                 sample.error, allowed);
}

void gpu_case_check_around(const gpu_case *g, int64_t batch, int64_t head_of_batch, int64_t j)
{
    const skl_problem *const p = &g->problem;
    assert_true(p->causal && p->window_left >= 0 && p->len_q == p->len_k);
    const int64_t head = batch * p->heads_s + head_of_batch, length = p->len_q, reach = p->window_left;
    const int64_t end = j + reach < length ? j + reach + 1 : length; /* of the queries and of their keys */
    const int64_t first_key = j > reach ? j - reach : 0;

    skl_problem subproblem = *p;
    subproblem.batch = subproblem.heads_t = subproblem.heads_s = 1;
    subproblem.len_q = end - j, subproblem.len_k = end - first_key;
    subproblem.positions = SKL_POSITIONS_OFFSET;
    subproblem.offset_q = j, subproblem.offset_k = first_key;
    uint16_t *const tensors[4] = {
        rows_of(g, 0, head, length, j, subproblem.len_q, p->dim_t),
        rows_of(g, 1, head, length, first_key, subproblem.len_k, p->dim_t),
        rows_of(g, 2, head, length, j, subproblem.len_q, p->dim_s),
        rows_of(g, 3, head, length, first_key, subproblem.len_k, p->dim_s),
    };
    const skl_inputs inputs = {
        .struct_size = sizeof inputs,
        .q_t = skl_input_contiguous(tensors[0], 1, subproblem.len_q, p->dim_t),
        .k_t = skl_input_contiguous(tensors[1], 1, subproblem.len_k, p->dim_t),
        .q_s = skl_input_contiguous(tensors[2], 1, subproblem.len_q, p->dim_s),
        .k_s = skl_input_contiguous(tensors[3], 1, subproblem.len_k, p->dim_s),
    };
    oracle_result exact = oracle_run(&subproblem, &inputs);
    const skl_dtype gradient = p->grad_f32 ? SKL_F32 : p->dtype_s;
    const int64_t first_row = head * length + j;
    assert_close(compare(g->kl, SKL_F32, first_row, subproblem.len_q, exact.kl), 1e-4, "kl", head, j);
    assert_close(compare(g->dq_s, gradient, first_row * p->dim_s, subproblem.len_q * p->dim_s, exact.dq_s), 0x1p-6,
                 "dq_s", head, j);
    assert_close(compare(g->dk_s, gradient, first_row * p->dim_s, p->dim_s, exact.dk_s + (j - first_key) * p->dim_s),
                 0x1p-6, "dk_s", head, j);
    oracle_free(&exact);
    for (int t = 0; t < 4; t++)
        free(tensors[t]);
}
