/* Calls of an indexer on tensor cores: what of them does not depend on how products are made. */
#ifndef SKL_CUDA_COMMON_INDEXER_STRIP_LAUNCH_CUH
#define SKL_CUDA_COMMON_INDEXER_STRIP_LAUNCH_CUH

#include "cuda/common/indexer/strip_rows.cuh"

namespace tensor_core
{

static_assert(sizeof(index_row) == SKL_INDEX_ROW_SIZE, "the workspace has room for them");

/* All slots at first. */
inline index_params params_for(const skl_cuda_params *params, const skl_index_layout &layout)
{
    char *const workspace = (char *)params->call.workspace;
    index_params own = {};
    (skl_cuda_params &)own = *params;
    own.with_teacher = !skl_only_lse_s(&params->call);
    own.lse_given = params->call.inputs.lse_t.data != NULL;
    own.least = params->problem.index_linear ? -INFINITY : 0.0F;
    own.num_splits = layout.num_splits;
    own.strip_first = 0;
    own.strip_count = layout.slots;
    own.g = (uint4 *)(void *)(workspace + layout.g_at);
    own.split_rows = (index_row *)(void *)(workspace + layout.split_rows_at);
    own.key_sums = (float *)(void *)(workspace + layout.sums_at);
    own.sum_batches = layout.sum_batches;
    own.sum_rows = layout.sum_rows;
    own.rest_at = layout.rest_at;
    return own;
}

/* The teacher's LSEs that are computed go where the caller looks for them, or to the workspace. */
inline void place_teacher_lse(index_params *own, const skl_index_layout &layout)
{
    const skl_problem *const p = &own->problem;
    skl_output *const lse = &own->call.rows.lse_t;
    if (lse->data == NULL)
        *lse = skl_output_contiguous((char *)own->call.workspace + layout.lse_at, p->heads_t,
                                     p->packed ? p->total_q : p->len_q, 1);
    own->call.inputs.lse_t = {lse->data, lse->stride_batch, lse->stride_head, lse->stride_row};
}

/* Behind the scores of a strip: its rows, where the call gives some. */
inline cudaError_t launch_rows(const index_params &own)
{
    if (own.call.op == SKL_OP_BACKWARD)
        return cudaSuccess;
    finish_rows<<<(unsigned)own.strip_count, SIDE, 0, own.call.stream>>>(own);
    return cudaPeekAtLastError();
}

/* launch(own) does the kernels of a strip, one strip after the other. */
template <typename LAUNCH> cudaError_t launch_strips(index_params *own, const skl_cuda_launch *chosen, LAUNCH launch)
{
    const skl_index_layout &layout = chosen->strips;
    const bool keys = own->call.gradients.dk_s.data != NULL;
    cudaError_t error = cudaSuccess;
    if (keys)
        error = cudaMemsetAsync(own->key_sums, 0, (size_t)layout.sum_count * sizeof(float), own->call.stream);
    for (int64_t slot = 0; slot < layout.slots && error == cudaSuccess; slot += layout.strip_slots) {
        own->strip_first = slot;
        own->strip_count = skl_min(layout.strip_slots, layout.slots - slot);
        error = launch(*own);
    }
    if (error != cudaSuccess || !keys)
        return error;
    own->num_splits = layout.num_dk_splits;
    store_key_sums<<<(unsigned)chosen->sm_count * 16, STORE_THREADS, 0, own->call.stream>>>(*own);
    return cudaPeekAtLastError();
}

} // namespace tensor_core

#endif
