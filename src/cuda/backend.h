/* What the files of the CUDA backend share. */
#ifndef SKL_CUDA_BACKEND_H
#define SKL_CUDA_BACKEND_H

#include "cuda/select.h"

/* ---- plan.c ---------------------------------------------------------------------------------------------------- */

/* What a plan holds besides its problem, at plan->of_backend. */
typedef struct skl_cuda_plan {
    skl_cuda_device device;
    int32_t deterministic, named; /* as in skl_cuda_request */
    const skl_cuda_kernel *kernel;
    /* The usual call of each operation asks for the KL and all gradients, and its tensors are aligned. */
    skl_cuda_request usual[SKL_OP_COUNT];
    const skl_cuda_launches *usual_launches[SKL_OP_COUNT]; /* in the memory of this plan, cut off after `count` */
} skl_cuda_plan;

skl_status skl_cuda_plan_create(skl_plan *plan, const skl_options *options, const char *forced);
int skl_cuda_kernel_info_at(int32_t index, skl_kernel_info *info);

/* The launches of a call: the plan's or, for an unusual call, those selected into *other. */
const skl_cuda_launches *skl_cuda_plan_launches(const skl_plan *plan, const skl_call *call, skl_cuda_launches *other);

/* ---- params.c -------------------------------------------------------------------------------------------------- */

/* Parameters that all launches of a call share. */
skl_cuda_params skl_cuda_shared_params(const skl_problem *problem, const skl_call *call,
                                       const skl_cuda_launches *launches);

/* Parameters of one launch: its part of the workspace, and the LSEs that an earlier launch computed. */
skl_cuda_params skl_cuda_launch_params(const skl_cuda_params *shared, const skl_cuda_launches *launches,
                                       const skl_cuda_launch *launch);

#endif
