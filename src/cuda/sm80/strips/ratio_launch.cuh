/* Launches of the mma.sync kernels for teacher groups: rows, with dot_t where it is wanted, and the gradients of one
 * side, strip by strip. */
#ifndef SKL_CUDA_SM80_STRIPS_RATIO_LAUNCH_CUH
#define SKL_CUDA_SM80_STRIPS_RATIO_LAUNCH_CUH

#include "cuda/common/strips/launch.cuh"
#include "cuda/sm80/strips/ratio_gradients.cuh"
#include "cuda/sm80/strips/difference_launch.cuh"

namespace sm80
{

inline ratio_params ratio_params_for(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_index_layout &layout = launch->strips;
    const bool reverse = params->problem.direction == SKL_KL_REVERSE;
    skl_cuda_params sides = with_computed_lse(params, launch);
    sides.a = reverse ? params->b : params->a;
    sides.b = reverse ? params->a : params->b;
    sides.call.workspace = (char *)params->call.workspace + launch->states_at;
    ratio_params kernel_params = {};
    (strip_params &)kernel_params = params_for(&sides, layout);
    kernel_params.with_teacher = true;
    kernel_params.reverse = reverse;
    kernel_params.lse_computed = launch->lse.data != NULL;
    return kernel_params;
}

template <typename ELEMENT> cudaError_t launch_group_scores(ratio_params kernel_params, group_output output)
{
    kernel_params.output = output;
    return launch_index(score_kernel<ratio_scores<ELEMENT>>, kernel_params.strip_count * kernel_params.num_splits,
                        sizeof(score_smem), kernel_params);
}

template <typename ELEMENT>
cudaError_t launch_group_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_index_layout &layout = launch->strips;
    record_launch(kernel, SKL_VARIANT_ROWS, layout.num_splits);
    ratio_params kernel_params = ratio_params_for(params, launch);
    const bool dots = layout.dots_at > 0;
    char *const workspace = (char *)kernel_params.call.workspace;
    kernel_params.dot_rows = dots ? (dot_row *)(void *)(workspace + layout.dots_at) : NULL;
    kernel_params.split_dots = (float *)(void *)(workspace + layout.split_dots_at);
    kernel_params.wrt.dk = {};
    return launch_strips(&kernel_params, launch, [&](const ratio_params &strip) {
        cudaError_t error = launch_group_scores<ELEMENT>(strip, GROUP_ROWS);
        if (error != cudaSuccess)
            return error;
        finish_group_rows<<<(unsigned)strip.strip_count, SIDE, 0, strip.call.stream>>>(strip);
        error = cudaPeekAtLastError();
        if (error == cudaSuccess && dots)
            error = launch_group_scores<ELEMENT>(strip, GROUP_DOTS);
        if (error != cudaSuccess || !dots)
            return error;
        finish_group_dots<<<(unsigned)strip.strip_count, SIDE, 0, strip.call.stream>>>(strip);
        return cudaPeekAtLastError();
    });
}

template <typename ELEMENT>
cudaError_t launch_group_gradients(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    typedef ratio_keys<ELEMENT> keys;
    const skl_index_layout &layout = launch->strips;
    record_launch(kernel, SKL_VARIANT_GRADIENTS, layout.num_splits);
    ratio_params kernel_params = ratio_params_for(params, launch);
    const skl_problem *const p = &kernel_params.problem;
    const skl_inputs *const in = &kernel_params.call.inputs;
    const skl_rows *const rows = &kernel_params.call.rows;
    const bool of_teacher = launch->teacher_side != 0;
    const skl_side side =
        of_teacher ? skl_teacher_of(p, &kernel_params.call) : skl_student_of(p, &kernel_params.call);
    const int64_t heads = of_teacher ? skl_group_size(p) : 1;
    kernel_params.of_teacher = of_teacher;
    kernel_params.wrt = {(int)heads,     (int)(side.heads / side.key_heads), (int)side.key_heads,
                         (int)side.dim,  side.scale / (float)heads,          *side.dk,
                         side.grad_dtype};
    kernel_params.lse = of_teacher ? in->lse_t : in->lse_s;
    if (of_teacher)
        kernel_params.offset = skl_known_rows(launch->rows_known, &in->dot_t, &rows->dot_t);
    else if (kernel_params.reverse)
        kernel_params.offset = skl_known_rows(launch->rows_known, &in->kl, &rows->kl);
    return launch_strips(&kernel_params, launch, [&](const ratio_params &strip) {
        const cudaError_t error = launch_group_scores<ELEMENT>(strip, GROUP_RATIOS);
        ratio_params gradients = strip;
        gradients.num_splits = layout.num_dk_splits;
        const int64_t query_items = side.dq->data != NULL ? strip.strip_count * heads : 0;
        const int64_t key_items = side.dk->data != NULL ? layout.key_items * layout.num_dk_splits : 0;
        gradients.query_blocks = (unsigned)(query_items * BLOCKS_PER_TILE<keys>);
        return error != cudaSuccess ? error
                                    : launch_index(gradient_kernel<ratio_queries<ELEMENT>, keys>,
                                                   (query_items + key_items) * BLOCKS_PER_TILE<keys>,
                                                   sizeof(key_smem<keys>), gradients);
    });
}

} // namespace sm80

#endif
