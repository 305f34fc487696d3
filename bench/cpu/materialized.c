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
    materialized_problem problem;
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
static float *framework_matrix(int64_t length)
{
    return malloc(matrix_size(length));
}

/* Huge pages avoid most TLB misses. */
static float *reused_matrix(int64_t length)
{
    enum { HUGE_PAGE_SIZE = 2 << 20 };
    const size_t size = (matrix_size(length) + HUGE_PAGE_SIZE - 1) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
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

materialized *materialized_create(const materialized_problem *problem, const blas *library)
{
    materialized *const run = calloc(1, sizeof *run);
    if (run == NULL)
        return NULL;
    run->problem = *problem;
    run->library = library;
    run->kernels = row_kernels_best();
    run->heads = calloc((size_t)problem->heads, sizeof *run->heads);
    bool complete = run->heads != NULL;
    if (problem->memory == MATERIALIZED_IN_PLACE) {
        for (int64_t h = 0; complete && h < problem->heads; h++) {
            run->heads[h] = (head_matrices){reused_matrix(problem->length), reused_matrix(problem->length)};
            complete = run->heads[h].p && run->heads[h].s;
        }
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
    for (int64_t h = 0; run->heads && h < run->problem.heads; h++)
        release(&run->heads[h]);
    free(run->heads);
    free(run);
}

/* ---- Forward ------------------------------------------------------------------------------------------------ */

typedef struct softmax_pass {
    const row_kernels *kernels;
    const float *x, *y;
    float *p, *s, *kl;
    int64_t length;
    bool causal;
} softmax_pass;

static void softmax_rows(void *context, int64_t row_begin, int64_t row_end)
{
    const softmax_pass *const pass = context;
    for (int64_t i = row_begin; i < row_end; i++) {
        const int64_t row = i * pass->length;
        const int64_t visible = pass->causal ? i + 1 : pass->length;
        pass->kl[i] = pass->kernels->softmax_kl(pass->x + row, pass->y + row, pass->p + row, pass->s + row, visible,
                                                pass->length);
    }
}

static void logits_of(const materialized *run, const float *q, const float *k, float *logits)
{
    const int64_t length = run->problem.length, dim = run->problem.dim;
    const blas_operand queries = {q, dim, false};
    const blas_operand keys = {k, dim, true};
    blas_multiply(run->library, run->problem.scale, queries, keys, logits, length, length, dim);
}

static void forward_head(const materialized *run, int64_t h, float *x, float *y, int threads)
{
    const materialized_problem *const problem = &run->problem;
    const int64_t tensor = h * problem->length * problem->dim;
    logits_of(run, problem->q_t + tensor, problem->k_t + tensor, x);
    logits_of(run, problem->q_s + tensor, problem->k_s + tensor, y);
    softmax_pass pass = {
        .kernels = run->kernels,
        .x = x,
        .y = y,
        .p = run->heads[h].p,
        .s = run->heads[h].s,
        .kl = problem->kl + h * problem->length,
        .length = problem->length,
        .causal = problem->causal,
    };
    parallel_rows(threads, problem->length, softmax_rows, &pass);
}

bool materialized_forward(materialized *run, int threads)
{
    const materialized_problem *const problem = &run->problem;
    blas_set_threads(run->library, threads);
    for (int64_t h = 0; h < problem->heads; h++) {
        head_matrices *const head = &run->heads[h];
        if (problem->memory == MATERIALIZED_IN_PLACE) {
            forward_head(run, h, head->p, head->s, threads);
            continue;
        }
        release(head); /* a forward may follow a forward */
        *head = (head_matrices){framework_matrix(problem->length), framework_matrix(problem->length)};
        float *const x = framework_matrix(problem->length);
        float *const y = framework_matrix(problem->length);
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

typedef struct gradient_pass {
    const row_kernels *kernels;
    const float *grad_kl, *p, *s;
    float *dy;
    int64_t length;
} gradient_pass;

static void gradient_rows(void *context, int64_t row_begin, int64_t row_end)
{
    const gradient_pass *const pass = context;
    for (int64_t i = row_begin; i < row_end; i++) {
        const int64_t row = i * pass->length;
        pass->kernels->gradient(pass->grad_kl[i], pass->p + row, pass->s + row, pass->dy + row, pass->length);
    }
}

static void backward_head(const materialized *run, int64_t h, float *dy, int threads)
{
    const materialized_problem *const problem = &run->problem;
    const int64_t length = problem->length, dim = problem->dim, tensor = h * length * dim;
    gradient_pass pass = {
        .kernels = run->kernels,
        .grad_kl = problem->grad_kl + h * length,
        .p = run->heads[h].p,
        .s = run->heads[h].s,
        .dy = dy,
        .length = length,
    };
    parallel_rows(threads, length, gradient_rows, &pass);
    const blas_operand gradient = {dy, length, false}, gradient_transposed = {dy, length, true};
    const blas_operand queries = {problem->q_s + tensor, dim, false}, keys = {problem->k_s + tensor, dim, false};
    blas_multiply(run->library, problem->scale, gradient, keys, problem->dq_s + tensor, length, dim, length);
    blas_multiply(run->library, problem->scale, gradient_transposed, queries, problem->dk_s + tensor, length, dim,
                  length);
}

bool materialized_backward(materialized *run, int threads)
{
    const materialized_problem *const problem = &run->problem;
    blas_set_threads(run->library, threads);
    for (int64_t h = 0; h < problem->heads; h++) {
        head_matrices *const head = &run->heads[h];
        if (problem->memory == MATERIALIZED_IN_PLACE) {
            backward_head(run, h, head->s, threads);
            continue;
        }
        float *const dy = framework_matrix(problem->length);
        if (dy == NULL)
            return false;
        backward_head(run, h, dy, threads);
        free(dy);
        release(head);
    }
    return true;
}
