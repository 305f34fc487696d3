/* Plans of the CUDA backend: plan.c. */
#ifndef SKL_CUDA_BACKEND_H
#define SKL_CUDA_BACKEND_H

#include "cuda/select.h"

/* The backend's part of a plan, at plan->of_backend. */
typedef struct skl_cuda_plan {
    skl_cuda_target target;
    /* The usual call of each operation asks for the KL and all gradients, and its tensors are aligned. */
    skl_cuda_request usual[SKL_OP_COUNT];
    skl_cuda_launches launches[SKL_OP_COUNT]; /* launches of the usual calls */
} skl_cuda_plan;

skl_status skl_cuda_plan_create(skl_plan *plan, const skl_options *options, const char *forced);
int skl_cuda_kernel_info_at(int32_t index, skl_kernel_info *info);

/* The launches of a call: the plan's or, for an unusual call, those selected into *other. */
const skl_cuda_launches *skl_cuda_plan_launches(const skl_plan *plan, const skl_call *call, skl_cuda_launches *other);

#endif
