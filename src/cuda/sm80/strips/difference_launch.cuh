/* Launches of a dense indexer by mma.sync: one for rows, three per strip for gradients. */
#ifndef SKL_CUDA_SM80_STRIPS_DIFFERENCE_LAUNCH_CUH
#define SKL_CUDA_SM80_STRIPS_DIFFERENCE_LAUNCH_CUH

#include "cuda/sm80/strips/difference_gradients.cuh"
#include "cuda/common/strips/launch.cuh"
#include "cuda/sm80/strips/difference_scores.cuh"

namespace sm80
{

template <typename KERNEL, typename PARAMS>
cudaError_t launch_index(KERNEL kernel, int64_t blocks, size_t memory, const PARAMS &params)
{
    if (blocks == 0)
        return cudaSuccess; /* there are no keys */
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)memory);
    if (error != cudaSuccess)
        return error;
    kernel<<<(unsigned)blocks, THREADS, memory, params.call.stream>>>(params);
    return cudaPeekAtLastError();
}

template <typename ELEMENT> cudaError_t launch_scores(const strip_params &kernel_params)
{
    const cudaError_t error =
        launch_index(score_kernel<difference_scores<ELEMENT>>, kernel_params.strip_count * kernel_params.num_splits,
                     sizeof(score_smem), kernel_params);
    return error == cudaSuccess ? launch_rows(kernel_params) : error;
}

template <typename ELEMENT>
cudaError_t launch_dense_rows(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch(kernel, SKL_VARIANT_ROWS, launch->strips.num_splits);
    const skl_problem *const p = &params->problem;
    const skl_index_layout &layout = launch->strips;
    strip_params kernel_params = params_for(params, layout);
    kernel_params.g = NULL;
    cudaError_t error = cudaSuccess;
    if (kernel_params.with_teacher && !kernel_params.lse_given) {
        assign_teacher_lse(&kernel_params, layout);
        error = launch_index(lse_kernel<ELEMENT>, p->batch * p->heads_t * skl_ceil_div(p->len_q, SIDE),
                             sizeof(score_smem), kernel_params);
    }
    return error == cudaSuccess ? launch_scores<ELEMENT>(kernel_params) : error;
}

/* M of the gradient kernels: a block has 64 M stationary rows. Registers limit M, and for keys the shared memory of
 * two blocks. */
template <typename ELEMENT, int DIM> using query_pairs = difference_queries<ELEMENT, DIM, (DIM > 64 ? 1 : 2)>;
template <typename ELEMENT, int DIM>
using key_pairs = difference_keys<ELEMENT, DIM, (DIM > 64 || G_PLANES<ELEMENT> > 1 ? 1 : 2)>;

template <typename ELEMENT, int DIM> cudaError_t launch_index_queries(const strip_params &kernel_params)
{
    typedef query_pairs<ELEMENT, DIM> pairs;
    return launch_index(query_gradient_kernel<pairs>,
                        kernel_params.strip_count * kernel_params.wrt.heads * BLOCKS_PER_TILE<pairs>,
                        sizeof(query_smem<DIM>), kernel_params);
}

template <typename ELEMENT, int DIM>
cudaError_t launch_index_keys(const strip_params &kernel_params, const skl_index_layout &layout)
{
    typedef key_pairs<ELEMENT, DIM> pairs;
    strip_params slice = kernel_params;
    slice.num_splits = layout.num_dk_splits;
    cudaError_t error = cudaSuccess;
    for (slice.dim_first = 0; slice.dim_first < kernel_params.problem.dim_s && error == cudaSuccess;
         slice.dim_first += pairs::WIDTH)
        error =
            launch_index(key_gradient_kernel<pairs>, layout.key_items * layout.num_dk_splits * BLOCKS_PER_TILE<pairs>,
                         sizeof(key_smem<pairs>), slice);
    return error;
}

template <typename ELEMENT, int DIM>
cudaError_t launch_index_sums(const strip_params &kernel_params, const skl_index_layout &layout)
{
    const skl_gradients *const grads = &kernel_params.call.gradients;
    cudaError_t error = cudaSuccess;
    if (grads->dq_s.data != NULL || grads->dw_s.data != NULL)
        error = launch_index_queries<ELEMENT, DIM>(kernel_params);
    if (error == cudaSuccess && grads->dk_s.data != NULL)
        error = launch_index_keys<ELEMENT, DIM>(kernel_params, layout);
    return error;
}

template <typename ELEMENT>
cudaError_t launch_dense_gradients(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch(kernel, SKL_VARIANT_GRADIENTS, launch->strips.num_splits);
    const skl_problem *const p = &params->problem;
    const skl_index_layout &layout = launch->strips;
    strip_params kernel_params = params_for(params, layout);
    return launch_strips(&kernel_params, launch, [&](const strip_params &strip) {
        const cudaError_t error = launch_scores<ELEMENT>(strip);
        return error != cudaSuccess ? error
               : p->dim_s <= 64     ? launch_index_sums<ELEMENT, 64>(strip, layout)
               : p->dim_s <= 128    ? launch_index_sums<ELEMENT, 128>(strip, layout)
                                    : launch_index_sums<ELEMENT, 256>(strip, layout);
    });
}

} // namespace sm80

#endif
