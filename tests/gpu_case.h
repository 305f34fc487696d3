/* A problem whose tensors lie in the memory of the GPU itself, contiguous, with its plan and its calls: for tests of
 * streams, graphs, repeats and sizes that host memory is no place for. Student gradients only; equal heads. */
#ifndef SKL_TESTS_GPU_CASE_H
#define SKL_TESTS_GPU_CASE_H

#include <cuda_runtime_api.h>

#include "support.h"

/* The call must succeed. */
#define assert_cuda(call) test_assert_cuda((call), #call, __FILE__, __LINE__)
void test_assert_cuda(cudaError_t error, const char *call, const char *file, int line);

/* Elements repeat after a prime number of them, so that any row of a tensor of any size is known to the host. */
enum { GPU_CASE_PERIOD = 1000003 };

typedef struct gpu_case {
    skl_problem problem;
    skl_plan *plan;
    size_t workspace_size;
    void *workspace;
    uint16_t *pattern[4]; /* on the host: the elements of q_t, k_t, q_s, k_s */
    void *tensors[4];
    float *kl, *lse_t, *lse_s;
    void *dq_s, *dk_s;
    skl_inputs inputs, saved; /* of a forward, of a backward */
    skl_rows rows;
    skl_gradients gradients;
} gpu_case;

/* One 16-bit type. `kernel` NULL: the best. */
void gpu_case_create(gpu_case *g, const skl_problem *problem, const char *kernel, int deterministic);
void gpu_case_destroy(gpu_case *g);

/* Forward, then backward, on a stream. Does not wait. */
void gpu_case_launch(const gpu_case *g, skl_stream stream);

/* All results on the host, one after another; to be freed. */
size_t gpu_case_result_size(const gpu_case *g);
unsigned char *gpu_case_results(const gpu_case *g);

/* For a causal problem with a window: compares key j of a head and the queries that see it with the oracle: their KL
 * and dq_s, and dk_s of the key. */
void gpu_case_check_around(const gpu_case *g, int64_t batch, int64_t head, int64_t j);

#endif
