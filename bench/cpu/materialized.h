/* The baseline: attention KL with the N x N matrices in memory. f32, student gradients, one head at a time: BLAS for
 * the matmuls, one fused vectorized pass for the elementwise operations.
 *
 *     forward    x = scale q_t k_t^T;  y = scale q_s k_s^T;  P, S = softmax;  KL        P and S are saved
 *     backward   G = g (S - P);  dq_s = scale G k_s;  dk_s = scale G^T q_s
 *
 * Like in frameworks, a causal mask is applied after the full matmul, but masked keys are not exponentiated. */
#ifndef STREAMKL_BENCH_CPU_MATERIALIZED_H
#define STREAMKL_BENCH_CPU_MATERIALIZED_H

#include "bench/cpu/blas.h"
#include "bench/cpu/tensors.h"

typedef enum materialized_memory {
    MATERIALIZED_FRAMEWORK, /* like autograd: every result in a new buffer, freed after its last use */
    MATERIALIZED_IN_PLACE   /* buffers are reused, P over x, S over y, G over S: the minimum for materializing */
} materialized_memory;

typedef struct materialized materialized;

/* Reads the f32 inputs of the tensors, which must outlive it, and writes their baseline results. NULL: out of memory.
 */
materialized *materialized_create(const bench_tensors *tensors, materialized_memory memory, const blas *library);
void materialized_destroy(materialized *run); /* may be NULL */

/* A backward consumes the matrices of its forward. Both return false if memory runs out. */
bool materialized_forward(materialized *run, int threads);
bool materialized_backward(materialized *run, int threads);

/* Peak bytes of the matrices. */
size_t materialized_size(materialized_memory memory, int64_t heads, int64_t length);

#endif
