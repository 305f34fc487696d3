/* Launches of strips: the host code that the mma.sync and the wgmma kernels share. */
#ifndef SKL_CUDA_COMMON_STRIPS_LAUNCH_CUH
#define SKL_CUDA_COMMON_STRIPS_LAUNCH_CUH

#include "cuda/common/launch.cuh"
#include "cuda/common/strips/rows.cuh"

namespace tensor_core
{

static_assert(sizeof(index_row) == SKL_STRIP_ROW_SIZE, "cuda/select plans the workspace");

/* Parameters of a launch over all slots; launch_strips narrows them to a strip. */
inline strip_params params_for(const skl_cuda_params *params, const skl_strip_layout &layout)
{
    char *const workspace = (char *)params->call.workspace;
    strip_params kernel_params = {};
    (skl_cuda_params &)kernel_params = *params;
    if (!skl_is_indexer(&params->problem)) { /* an attention head is one index head without a ReLU */
        kernel_params.problem.index_heads = 1;
        kernel_params.problem.index_linear = 1;
    }
    const skl_side student = skl_student_of(&kernel_params.problem, &params->call);
    const int heads = (int)kernel_params.problem.index_heads;
    kernel_params.wrt = {heads,
                         params->b.heads_per_key * heads,
                         (int)student.key_heads,
                         (int)student.dim,
                         student.scale,
                         *student.dk,
                         student.grad_dtype};
    kernel_params.with_teacher = !skl_only_lse_s(&params->call);
    kernel_params.lse_given = params->call.inputs.lse_t.data != NULL;
    kernel_params.least = kernel_params.problem.index_linear ? -INFINITY : 0.0F;
    kernel_params.num_splits = layout.num_splits;
    kernel_params.strip_first = 0;
    kernel_params.strip_count = layout.slots;
    kernel_params.g = (uint4 *)(void *)(workspace + layout.g_at);
    kernel_params.split_rows = (index_row *)(void *)(workspace + layout.split_rows_at);
    kernel_params.key_sums = (float *)(void *)(workspace + layout.sums_at);
    kernel_params.sum_batches = layout.sum_batches;
    kernel_params.sum_rows = layout.sum_rows;
    kernel_params.rest_at = layout.rest_at;
    kernel_params.target = skl_is_pooled(&params->problem) ? (float *)(void *)(workspace + layout.target_at) : NULL;
    kernel_params.target_stride = layout.target_stride;
    if (skl_op_has_halves(&params->problem, params->call.op))
        kernel_params.target_scale = (float *)(void *)(workspace + layout.target_scale_at);
    return kernel_params;
}

/* Params for scores and gradients of a pooled teacher, whose keys are blocks. */
inline strip_params block_params_for(const strip_params &of_keys)
{
    strip_params of_blocks = of_keys;
    (skl_cuda_params &)of_blocks = block_params_of(&of_keys);
    of_blocks.lse_given = true; /* M is made of LSEs, and rows.lse_t restricts them to the blocks */
    of_blocks.target = of_keys.with_teacher ? of_keys.target : NULL;
    return of_blocks;
}

/* Assigns the place of computed teacher LSEs, which the next kernel reads: the caller's buffer, or the workspace. */
inline void assign_teacher_lse(strip_params *kernel_params, const skl_strip_layout &layout)
{
    const skl_problem *const p = &kernel_params->problem;
    skl_output *const lse = &kernel_params->call.rows.lse_t;
    if (lse->data == NULL)
        *lse = skl_output_contiguous((char *)kernel_params->call.workspace + layout.lse_at, p->heads_t,
                                     skl_query_rows(p).rows, 1);
    kernel_params->call.inputs.lse_t = skl_input_of(lse);
}

/* ---- Launches ----------------------------------------------------------------------------------------------- */

/* Finishes the rows of a strip, after its scores. */
template <typename PARAMS> cudaError_t launch_finish_rows(const PARAMS &kernel_params)
{
    return launch_blocks(finish_rows<PARAMS>, kernel_params.strip_count, SIDE, 0, kernel_params);
}

/* Calls launch(params) for one strip after another. */
template <typename PARAMS, typename LAUNCH>
cudaError_t launch_strips(PARAMS *kernel_params, const skl_cuda_launch *chosen, LAUNCH launch)
{
    const skl_strip_layout &layout = chosen->strips;
    const bool keys = kernel_params->wrt.dk.data != NULL;
    cudaError_t error = cudaSuccess;
    if (keys)
        error = cudaMemsetAsync(kernel_params->key_sums, 0, (size_t)layout.sum_count * sizeof(float),
                                kernel_params->call.stream);
    for (int64_t slot = 0; slot < layout.slots && error == cudaSuccess; slot += layout.strip_slots) {
        kernel_params->strip_first = slot;
        kernel_params->strip_count = skl_min(layout.strip_slots, layout.slots - slot);
        error = launch(*kernel_params);
    }
    if (error != cudaSuccess || !keys)
        return error;
    kernel_params->num_splits = layout.num_dk_splits;
    return launch_blocks(store_key_sums, (int64_t)chosen->sm_count * 16, STORE_THREADS, 0, *kernel_params);
}

/* ---- Differences -------------------------------------------------------------------------------------------- */

/* KERNELS are those of an architecture:
 *
 *   encode(sides)                            tensor maps, before the first launch
 *   teacher_lse(params, blocks)              LSEs of all teacher heads, to rows.lse_t
 *   pool(params)                             the target of a pooled teacher
 *   scores(params)                           row states of all splits, and G if params.g has data
 *   queries<DIM>(params), keys<DIM>(params, items)
 *
 * The teacher's keys, and the student's, which are blocks of these where the teacher is pooled. */
struct difference_sides {
    strip_params teacher, student;
};

inline difference_sides difference_sides_of(const strip_params &of_keys)
{
    return {of_keys, skl_is_pooled(&of_keys.problem) ? block_params_for(of_keys) : of_keys};
}

template <typename KERNELS> cudaError_t launch_strip_scores(const KERNELS &kernels, const strip_params &strip)
{
    const cudaError_t error = kernels.scores(strip);
    return error == cudaSuccess && strip.call.op != SKL_OP_BACKWARD ? launch_finish_rows(strip) : error;
}

/* The scores of a strip, and of a pooled teacher the target before. In one pass that target serves two launches of
 * scores: the rows, whose sums normalize it, then G. */
template <typename KERNELS>
cudaError_t launch_difference_scores(const KERNELS &kernels, strip_params teacher, const strip_params &strip,
                                     const skl_strip_layout &layout)
{
    if (strip.target == NULL)
        return launch_strip_scores(kernels, strip);
    teacher.strip_first = strip.strip_first;
    teacher.strip_count = strip.strip_count;
    teacher.num_splits = layout.num_pool_splits;
    cudaError_t error = kernels.pool(teacher);
    strip_params last = strip;
    if (error == cudaSuccess && skl_op_has_halves(&teacher.problem, strip.call.op)) {
        strip_params rows = strip;
        rows.g = NULL;
        rows.call = skl_call_half(&strip.call, SKL_OP_FORWARD);
        last.call = skl_call_half(&strip.call, SKL_OP_BACKWARD);
        error = launch_strip_scores(kernels, rows);
    }
    return error == cudaSuccess ? launch_strip_scores(kernels, last) : error;
}

/* dq and dw, dk, of a strip. */
template <int DIM, typename KERNELS>
cudaError_t launch_difference_sums(const KERNELS &kernels, const strip_params &strip, const skl_strip_layout &layout)
{
    const skl_gradients *const grads = &strip.call.gradients;
    cudaError_t error = cudaSuccess;
    if (grads->dq_s.data != NULL || grads->dw_s.data != NULL)
        error = kernels.template queries<DIM>(strip);
    strip_params of_keys = strip;
    of_keys.num_splits = layout.num_dk_splits;
    if (error == cudaSuccess && grads->dk_s.data != NULL)
        error = kernels.template keys<DIM>(of_keys, layout.key_items * layout.num_dk_splits);
    return error;
}

/* Rows or, with GRADIENTS, gradients. */
template <typename KERNELS, bool GRADIENTS>
cudaError_t launch_differences(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_problem *const p = &params->problem;
    const skl_strip_layout &layout = launch->strips;
    strip_params of_keys = params_for(params, layout);
    const bool computes_lse = of_keys.with_teacher && !of_keys.lse_given;
    if (!GRADIENTS) {
        of_keys.g = NULL;
        of_keys.wrt.dk = {};
    }
    if (computes_lse)
        assign_teacher_lse(&of_keys, layout);
    difference_sides sides = difference_sides_of(of_keys);
    KERNELS kernels;
    cudaError_t error = kernels.encode(sides);
    if (error != cudaSuccess)
        return error;
    record_launch(kernel, launch->variant, layout.num_splits);
    if (computes_lse)
        error = kernels.teacher_lse(sides.teacher, p->batch * p->heads_t * skl_ceil_div(p->len_q, SIDE));
    if (error != cudaSuccess)
        return error;
    return launch_strips(&sides.student, launch, [&](const strip_params &strip) {
        const cudaError_t scores = launch_difference_scores(kernels, sides.teacher, strip, layout);
        return scores != cudaSuccess || !GRADIENTS ? scores
               : p->dim_s <= 64                    ? launch_difference_sums<64>(kernels, strip, layout)
               : p->dim_s <= 128                   ? launch_difference_sums<128>(kernels, strip, layout)
                                                   : launch_difference_sums<256>(kernels, strip, layout);
    });
}

} // namespace tensor_core

#endif
