/* The one place that chooses: which kernel a plan is made for, and which launches a call consists of. */
#ifndef SKL_CUDA_SELECT_H
#define SKL_CUDA_SELECT_H

#include <stdbool.h>

#include "cuda/kernels.h"

bool skl_cuda_runs_on(const skl_cuda_kernel *kernel, int capability);

/* The best kernel for a problem with aligned tensors, or the one with the name `forced`; NULL: there is none. */
const skl_cuda_kernel *skl_cuda_select_kernel(const skl_problem *problem, int capability, const char *forced);

/* Bytes of workspace for an operation of a plan, whatever the strides of its tensors are. */
size_t skl_cuda_workspace_size(const skl_plan *plan, skl_op op);

enum { SKL_LAUNCHES_MAX = 12 };

typedef struct skl_cuda_launches {
    int count;
    skl_cuda_launch at[SKL_LAUNCHES_MAX];
} skl_cuda_launches;

/* The launches of a call, in their order, with the parameters that all of them share. The plan's device is current.
 */
void skl_cuda_select(const skl_plan *plan, const skl_call *call, skl_cuda_params *params,
                     skl_cuda_launches *launches);

/* The parameters of one of them: those that all share or, in *halves, its own. */
const skl_cuda_params *skl_cuda_launch_params(const skl_cuda_params *params, const skl_cuda_launch *launch,
                                              skl_cuda_params *halves);

#endif
