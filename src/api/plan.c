#include <stdbool.h>
#include <stdlib.h>

#include "base/backend.h"
#include "base/status.h"
#include "base/structs.h"

/* Backends of this build. */
static const skl_backend *const backends[] = {
    &skl_cpu_backend,
#if defined(SKL_WITH_CUDA)
    &skl_cuda_backend,
#endif
};

static const skl_backend *backend_for(skl_device device)
{
    for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++)
        if (backends[i]->device == device)
            return backends[i];
    return NULL;
}

/* The kernel that the caller forces, and who forces it; NULL: none. */
static const char *forced_kernel(const skl_options *options, const char **forced_by)
{
    *forced_by = "options.kernel";
    if (options->kernel != NULL)
        return options->kernel;
    const char *const from_environment = getenv("STREAMKL_KERNEL");
    const bool forced = from_environment != NULL && from_environment[0] != '\0';
    *forced_by = forced ? "STREAMKL_KERNEL" : NULL;
    return forced ? from_environment : NULL;
}

skl_status skl_plan_create(skl_plan **plan, const skl_problem *problem, const skl_options *given_options)
{
    if (plan == NULL)
        return skl_fail(SKL_ERROR_ARGUMENT, "plan=NULL: must point to a skl_plan *");
    *plan = NULL;
    skl_options options = skl_options_default();
    if (given_options != NULL)
        SKL_TRY(skl_struct_read(&skl_struct_options, &options, given_options));
    if (options.deterministic != 0 && options.deterministic != 1)
        return skl_fail(SKL_ERROR_ARGUMENT, "options.deterministic=%d: must be 0 or 1", (int)options.deterministic);
    if (options.gpu != NULL && options.device != SKL_CUDA)
        return skl_fail(SKL_ERROR_ARGUMENT, "options.gpu=%s: needs options.device=SKL_CUDA", options.gpu);
    skl_plan made = {.progress = options.progress, .progress_user = options.progress_user, .cancel = options.cancel};
    skl_status status = skl_problem_check(&made.problem, problem);
    if (status != SKL_OK)
        return status;
    made.backend = backend_for(options.device);
    if (made.backend == NULL)
        return skl_fail(SKL_ERROR_UNSUPPORTED, "device=%d: this build has no backend for it; it has %s",
                        (int)options.device, skl_build_info());
    const char *const forced = forced_kernel(&options, &made.forced_by);
    status = made.backend->plan(&made, &options, forced);
    if (status != SKL_OK)
        return status;
    if (!(made.problem.gradients & SKL_DV_S))
        made.workspace_size[SKL_OP_ATTENTION_FORWARD] = made.workspace_size[SKL_OP_ATTENTION_BACKWARD] = 0;
    skl_plan *const kept = malloc(sizeof *kept);
    if (kept == NULL) {
        free(made.of_backend);
        return skl_fail(SKL_ERROR_MEMORY, "plan: %zu bytes could not be allocated", sizeof *kept);
    }
    *kept = made;
    *plan = kept;
    return SKL_OK;
}

void skl_plan_destroy(skl_plan *plan)
{
    if (plan != NULL)
        free(plan->of_backend);
    free(plan);
}

size_t skl_plan_workspace_size(const skl_plan *plan, skl_op op)
{
    return plan != NULL && (unsigned)op < SKL_OP_COUNT ? plan->workspace_size[op] : 0;
}

const char *skl_plan_kernel(const skl_plan *plan)
{
    return plan != NULL ? plan->kernel_name : "";
}

int32_t skl_plan_threads(const skl_plan *plan)
{
    return plan != NULL ? plan->threads : 0;
}

int skl_kernel_at(int32_t index, skl_kernel_info *info)
{
    skl_kernel_info found;
    for (size_t i = 0; index >= 0 && i < sizeof backends / sizeof backends[0]; i++) {
        int32_t count = 0;
        while (backends[i]->kernel_at(count, &found)) {
            if (count == index)
                return skl_struct_write(&skl_struct_kernel_info, info, &found) == SKL_OK;
            count++;
        }
        index -= count;
    }
    return 0;
}
