/* The one place that chooses: which kernel a plan is made for, and which launches a call consists of. */
#ifndef SKL_CUDA_SELECT_H
#define SKL_CUDA_SELECT_H

#include <stdbool.h>

#include "cuda/launch.h"

/* An entry of the kernel list: the launchers of one line of instances.def, or the general kernels. NULL: it has no
 * such launcher. */
typedef struct skl_cuda_kernel {
    const char *name, *detail;
    int capability, capability_end; /* lowest compute capability, and the first beyond the highest: 90 is 9.0 */
    skl_dtype dtype;
    int64_t dim_max; /* of attention heads; 0: any size and type */
    skl_cuda_launcher forward, fused, dq, dk;
    int (*blocks_per_sm)(void); /* of the forward */
    skl_cuda_launcher dense_rows, dense_gradients, sparse_rows, sparse_gradients;
} skl_cuda_kernel;

/* The kernel list, best first; NULL past its end. */
const skl_cuda_kernel *skl_cuda_kernel_at(int32_t index);

bool skl_cuda_runs_on(const skl_cuda_kernel *kernel, int capability);

/* The best kernel for a problem with aligned tensors, or the one with the name `forced`; NULL: there is none. */
const skl_cuda_kernel *skl_cuda_select_kernel(const skl_problem *problem, int capability, const char *forced);

/* Bytes of workspace for an operation of a plan, whatever the strides of its tensors are. */
size_t skl_cuda_workspace_size(const skl_plan *plan, skl_op op);

enum { SKL_LAUNCHES_MAX = 8 };

typedef struct skl_cuda_launches {
    int count;
    skl_cuda_launch at[SKL_LAUNCHES_MAX];
} skl_cuda_launches;

/* The launches of a call, in their order, with the parameters that all of them share. The plan's device is current.
 */
void skl_cuda_select(const skl_plan *plan, const skl_call *call, skl_cuda_params *params,
                     skl_cuda_launches *launches);

#endif
