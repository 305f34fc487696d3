#include "bench/cpu/materialized.h"
#include "device/device.h"
#include "bench/cpu/row_kernels.h"

#include <stdlib.h>
#include <sys/mman.h>

/* The matrices of one head, [length, length]. */
typedef struct head_matrices {
    float *p, *s;
} head_matrices;

struct materialized {
    const bench_tensors *tensors;
    materialized_memory memory;
    const blas *library;
    const row_kernels *kernels;
    head_matrices *heads;
};

/* ---- Matrices ----------------------------------------------------------------------------------------------- */

static size_t matrix_size(int64_t length)
{
    return (size_t)length * (size_t)length * sizeof(float);
}

size_t materialized_size(materialized_memory memory, int64_t heads, int64_t length)
{
    const size_t kept_count = 2 * (size_t)heads;
    const size_t logit_count = memory == MATERIALIZED_FRAMEWORK ? 2 : 0; /* x and y of the current head */
    return (kept_count + logit_count) * matrix_size(length);
}

/* Plain malloc: above its mmap threshold every matrix gets new, zeroed pages, a cost that frameworks have too. */
static float *framework_matrix(const materialized *run)
{
    return malloc(matrix_size(run->tensors->length));
}

/* Huge pages avoid most TLB misses. */
static float *reused_matrix(const materialized *run)
{
    enum { HUGE_PAGE_SIZE = 2 << 20 };
    const size_t size = (matrix_size(run->tensors->length) + HUGE_PAGE_SIZE - 1) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
    float *const matrix = aligned_alloc(HUGE_PAGE_SIZE, size);
    if (matrix)
        madvise(matrix, size, MADV_HUGEPAGE); /* only advice: may be ignored */
    return matrix;
}

static void release(head_matrices *head)
{
    free(head->p);
    free(head->s);
    *head = (head_matrices){NULL, NULL};
}

static const row_kernels *best_row_kernels(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return &row_kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &row_kernels_avx2;
#endif
    return &row_kernels_portable;
}

materialized *materialized_create(const bench_tensors *tensors, materialized_memory memory, const blas *library)
{
    materialized *const run = calloc(1, sizeof *run);
    if (run == NULL)
        return NULL;
    *run = (materialized){tensors, memory, library, best_row_kernels(), NULL};
    run->heads = calloc((size_t)tensors->heads, sizeof *run->heads);
    bool complete = run->heads != NULL;
    for (int64_t h = 0; complete && memory == MATERIALIZED_IN_PLACE && h < tensors->heads; h++) {
        run->heads[h] = (head_matrices){reused_matrix(run), reused_matrix(run)};
        complete = run->heads[h].p && run->heads[h].s;
    }
    if (complete)
        return run;
    materialized_destroy(run);
    return NULL;
}

void materialized_destroy(materialized *run)
{
    if (run == NULL)
        return;
    for (int64_t h = 0; run->heads && h < run->tensors->heads; h++)
        release(&run->heads[h]);
    free(run->heads);
    free(run);
}

/* ---- Forward ------------------------------------------------------------------------------------------------ */

/* The rows of one head. */
typedef struct head_pass {
    const materialized *run;
    int64_t head;
    float *x, *y; /* logits of a forward */
    float *dy;    /* NULL without a backward */
} head_pass;

static void softmax_rows(void *context, int64_t row_begin, int64_t row_end)
{
    const head_pass *const pass = context;
    const bench_tensors *const tensors = pass->run->tensors;
    const head_matrices *const head = &pass->run->heads[pass->head];
    float *const kl = tensors->baseline_kl + pass->head * tensors->length;
    for (int64_t i = row_begin; i < row_end; i++) {
        const int64_t row = i * tensors->length;
        const int64_t visible = tensors->causal ? i + 1 : tensors->length;
        kl[i] = pass->run->kernels->softmax_kl(pass->x + row, pass->y + row, head->p + row, head->s + row, visible,
                                               tensors->length);
    }
}

static void logits_of(const materialized *run, const float *q, const float *k, float *logits)
{
    const int64_t length = run->tensors->length, dim = run->tensors->dim;
    const blas_operand queries = {q, dim, false};
    const blas_operand keys = {k, dim, true};
    blas_multiply(run->library, run->tensors->scale, queries, keys, logits, length, length, dim);
}

static void forward_head(const materialized *run, int64_t h, float *x, float *y, int threads)
{
    const bench_tensors *const tensors = run->tensors;
    const int64_t head = h * tensors->length * tensors->dim;
    logits_of(run, tensors->q_t_f32 + head, tensors->k_t_f32 + head, x);
    logits_of(run, tensors->q_s_f32 + head, tensors->k_s_f32 + head, y);
    head_pass pass = {.run = run, .head = h, .x = x, .y = y};
    parallel_rows(threads, tensors->length, softmax_rows, &pass);
}

bool materialized_forward(materialized *run, int threads)
{
    blas_set_threads(run->library, threads);
    for (int64_t h = 0; h < run->tensors->heads; h++) {
        head_matrices *const head = &run->heads[h];
        if (run->memory == MATERIALIZED_IN_PLACE) {
            forward_head(run, h, head->p, head->s, threads);
            continue;
        }
        release(head); /* a forward may follow a forward */
        *head = (head_matrices){framework_matrix(run), framework_matrix(run)};
        float *const x = framework_matrix(run);
        float *const y = framework_matrix(run);
        const bool complete = head->p && head->s && x && y;
        if (complete)
            forward_head(run, h, x, y, threads);
        free(x);
        free(y);
        if (!complete)
            return false;
    }
    return true;
}

/* ---- Backward ----------------------------------------------------------------------------------------------- */

static void gradient_rows(void *context, int64_t row_begin, int64_t row_end)
{
    const head_pass *const pass = context;
    const bench_tensors *const tensors = pass->run->tensors;
    const head_matrices *const head = &pass->run->heads[pass->head];
    const float *const grad_kl = tensors->grad_kl + pass->head * tensors->length;
    for (int64_t i = row_begin; i < row_end; i++) {
        const int64_t row = i * tensors->length;
        pass->run->kernels->gradient(grad_kl[i], head->p + row, head->s + row, pass->dy + row, tensors->length);
    }
}

static void backward_head(const materialized *run, int64_t h, float *dy, int threads)
{
    const bench_tensors *const tensors = run->tensors;
    const int64_t length = tensors->length, dim = tensors->dim, head = h * length * dim;
    head_pass pass = {.run = run, .head = h, .dy = dy};
    parallel_rows(threads, length, gradient_rows, &pass);
    const blas_operand gradient = {dy, length, false}, gradient_transposed = {dy, length, true};
    const blas_operand queries = {tensors->q_s_f32 + head, dim, false}, keys = {tensors->k_s_f32 + head, dim, false};
    const float scale = tensors->scale;
    blas_multiply(run->library, scale, gradient, keys, tensors->baseline_dq_s + head, length, dim, length);
    blas_multiply(run->library, scale, gradient_transposed, queries, tensors->baseline_dk_s + head, length, dim,
                  length);
}

bool materialized_backward(materialized *run, int threads)
{
    blas_set_threads(run->library, threads);
    for (int64_t h = 0; h < run->tensors->heads; h++) {
        head_matrices *const head = &run->heads[h];
        if (run->memory == MATERIALIZED_IN_PLACE) {
            backward_head(run, h, head->s, threads);
            continue;
        }
        float *const dy = framework_matrix(run);
        if (dy == NULL)
            return false;
        backward_head(run, h, dy, threads);
        free(dy);
        release(head);
    }
    return true;
}
