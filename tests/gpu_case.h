/* A problem with contiguous tensors in GPU memory, its plan and its calls: for tests of streams, graphs, repeats, and
 * sizes that do not suit host memory. Student gradients only; teacher and student have the same number of heads. With
 * SKL_DV_S they come from skl_attention_backward. Its v, o and do are k_t, q_t and q_s, so head sizes are equal. */
#ifndef SKL_TESTS_GPU_CASE_H
#define SKL_TESTS_GPU_CASE_H

#include <cuda_runtime_api.h>

#include "support.h"

#define assert_cuda(call) test_assert_cuda((call), #call, __FILE__, __LINE__)
void test_assert_cuda(cudaError_t error, const char *call, const char *file, int line);

/* Elements repeat with this period, a prime, so that the host knows any row of a tensor of any size. */
enum { GPU_CASE_PERIOD = 1000003 };

typedef struct gpu_case {
    skl_problem problem;
    skl_plan *plan;
    size_t workspace_size;
    void *workspace;
    uint16_t *pattern[4]; /* in host memory: one period of q_t, k_t, q_s, k_s */
    void *tensors[4];     /* in GPU memory, in the same order */
    float *kl, *lse_t, *lse_s;
    void *dq_s, *dk_s, *dv_s;
    skl_inputs inputs, saved; /* of the forward; of the backward */
    skl_rows rows;
    skl_gradients gradients;
    skl_attention attention;
    int deterministic;
} gpu_case;

/* Teacher and student must have the same 16-bit type. kernel NULL: the best one. */
void gpu_case_create(gpu_case *g, const skl_problem *problem, const char *kernel, int deterministic);
void gpu_case_destroy(gpu_case *g);

/* Launches forward and backward, or forward and attention backward, on a stream, and does not synchronize. */
void gpu_case_launch(const gpu_case *g, skl_stream stream);

/* Copies all results to the host, one after another, and of an attention backward those that have the same bits in
 * every run. The caller frees them. */
size_t gpu_case_result_size(const gpu_case *g);
unsigned char *gpu_case_results(const gpu_case *g);

/* For a causal problem with a window: compares dk_s of key j of a head, and KL and dq_s of the queries that attend to
 * it, with the oracle. */
void gpu_case_check_around(const gpu_case *g, int64_t batch, int64_t head, int64_t j);

#endif
