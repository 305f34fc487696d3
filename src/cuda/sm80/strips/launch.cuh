/* Launches of strips by mma.sync. Differences: one launch for rows, three per strip for gradients. Ratios: one or two
 * per strip for rows, the second for dot_t, and two for the gradients of one side. */
#ifndef SKL_CUDA_SM80_STRIPS_LAUNCH_CUH
#define SKL_CUDA_SM80_STRIPS_LAUNCH_CUH

#include "cuda/common/strips/launch.cuh"
#include "cuda/sm80/strips/difference_gradients.cuh"
#include "cuda/sm80/strips/difference_scores.cuh"
#include "cuda/sm80/strips/pool.cuh"
#include "cuda/sm80/strips/ratio_gradients.cuh"

namespace sm80
{

template <typename SCORES> cudaError_t launch_scores(const typename SCORES::params_type &params)
{
    return launch_blocks(score_kernel<SCORES>, params.strip_count * params.num_splits, THREADS, sizeof(score_smem),
                         params);
}

/* ---- Differences -------------------------------------------------------------------------------------------- */

/* For launch_differences. M of the gradient kernels: a block has 64 M stationary
 * rows. Registers limit M, and for keys the shared memory of two blocks. */
template <typename ELEMENT> struct difference_kernels {
    static cudaError_t encode(const tensor_core::difference_sides &)
    {
        return cudaSuccess;
    }

    static cudaError_t teacher_lse(const strip_params &params, int64_t blocks)
    {
        return launch_blocks(lse_kernel<ELEMENT>, blocks, THREADS, sizeof(score_smem), params);
    }

    static cudaError_t pool(const strip_params &params)
    {
        const bool largest = params.problem.pool_heads == SKL_POOL_HEADS_MAX;
        return launch_blocks(largest ? pool_kernel<ELEMENT, true> : pool_kernel<ELEMENT, false>,
                             params.strip_count * params.num_splits, THREADS, sizeof(score_smem), params);
    }

    static cudaError_t scores(const strip_params &params)
    {
        return launch_scores<difference_scores<ELEMENT>>(params);
    }

    template <int DIM> static cudaError_t queries(const strip_params &params)
    {
        typedef difference_queries<ELEMENT, DIM, (DIM > 64 ? 1 : 2)> pairs;
        return launch_blocks(query_gradient_kernel<pairs>,
                             params.strip_count * params.wrt.heads * BLOCKS_PER_TILE<pairs>, THREADS,
                             sizeof(query_smem<DIM>), params);
    }

    template <int DIM> static cudaError_t keys(const strip_params &params, int64_t items)
    {
        typedef difference_keys<ELEMENT, DIM, (DIM > 64 || G_PLANES<ELEMENT> > 1 ? 1 : 2)> pairs;
        strip_params slice = params;
        cudaError_t error = cudaSuccess;
        for (slice.dim_first = 0; slice.dim_first < params.problem.dim_s && error == cudaSuccess;
             slice.dim_first += pairs::WIDTH)
            error = launch_blocks(key_gradient_kernel<pairs>, items * BLOCKS_PER_TILE<pairs>, THREADS,
                                  sizeof(key_smem<pairs>), slice);
        return error;
    }
};

/* ---- Ratios ------------------------------------------------------------------------------------------------- */

inline ratio_params ratio_params_for(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_strip_layout &layout = launch->strips;
    const bool reverse = params->problem.direction == SKL_KL_REVERSE;
    skl_cuda_params sides = *params;
    sides.a = reverse ? params->b : params->a;
    sides.b = reverse ? params->a : params->b;
    ratio_params kernel_params = {};
    (strip_params &)kernel_params = params_for(&sides, layout);
    kernel_params.with_teacher = true;
    kernel_params.reverse = reverse;
    kernel_params.lse_computed = launch->lse_computed;
    return kernel_params;
}

template <typename ELEMENT> cudaError_t launch_ratio_scores(ratio_params kernel_params, ratio_output output)
{
    kernel_params.output = output;
    return launch_scores<ratio_scores<ELEMENT>>(kernel_params);
}

template <typename ELEMENT>
cudaError_t launch_ratio_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_strip_layout &layout = launch->strips;
    record_launch(kernel, SKL_VARIANT_ROWS, layout.num_splits);
    ratio_params kernel_params = ratio_params_for(params, launch);
    const bool dots = layout.dots_at > 0;
    char *const workspace = (char *)kernel_params.call.workspace;
    kernel_params.dot_rows = dots ? (dot_row *)(void *)(workspace + layout.dots_at) : NULL;
    kernel_params.split_dots = (float *)(void *)(workspace + layout.split_dots_at);
    kernel_params.wrt.dk = {};
    return launch_strips(&kernel_params, launch, [&](const ratio_params &strip) {
        cudaError_t error = launch_ratio_scores<ELEMENT>(strip, OUTPUT_ROWS);
        if (error == cudaSuccess)
            error = launch_finish_rows(strip);
        if (error == cudaSuccess && dots)
            error = launch_ratio_scores<ELEMENT>(strip, OUTPUT_DOTS);
        return error == cudaSuccess && dots
                   ? launch_blocks(finish_dots<ratio_params>, strip.strip_count, SIDE, 0, strip)
                   : error;
    });
}

template <typename ELEMENT>
cudaError_t launch_ratio_gradients(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    typedef ratio_keys<ELEMENT> keys;
    const skl_strip_layout &layout = launch->strips;
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
        const cudaError_t error = launch_ratio_scores<ELEMENT>(strip, OUTPUT_RATIOS);
        ratio_params gradients = strip;
        gradients.num_splits = layout.num_dk_splits;
        const int64_t query_items = side.dq->data != NULL ? strip.strip_count * heads : 0;
        const int64_t key_items = side.dk->data != NULL ? layout.key_items * layout.num_dk_splits : 0;
        gradients.query_blocks = (unsigned)(query_items * BLOCKS_PER_TILE<keys>);
        if (error != cudaSuccess)
            return error;
        return launch_blocks(gradient_kernel<ratio_queries<ELEMENT>, keys>,
                             (query_items + key_items) * BLOCKS_PER_TILE<keys>, THREADS, sizeof(key_smem<keys>),
                             gradients);
    });
}

} // namespace sm80

#endif
