/* Fused backward on Hopper's tensor cores (sm_90a): dq and dk with respect to one argument, and with respect to B
 * also the KL, in one pass over the keys. 16-bit types, one teacher head per student head. DIM is the head size of
 * the wrt argument, up to 128, and OTHER_DIM that of the other one, up to 256.
 *
 * Bound: tensor cores and shared memory nearly equally: 2,048 and 2,250 clocks per 128 queries x 64 keys at
 * DIM = OTHER_DIM = 128. Exponentials take 1,024.
 *
 *   block      2 dq warpgroups of 64 queries and 1 dk warpgroup, which is also the producer; one block per SM
 *   registers  200 per dq thread: Q of the other argument (OTHER_DIM / 4), logits of a stage (64), dq (DIM / 2), G
 *              (16), 24 for the rest; 104 per dk thread: dk of a stage (DIM / 2)
 *   shared     Q of the wrt argument, DEPTH stages of 64 keys of both arguments, two buffers of G, dk of a stage in
 *              f32: 208 KB at DIM = OTHER_DIM = 128
 *
 *   dq warpgroups   stage n       X, Y (wgmma)  ->  exponentials  ->  dq += G K (wgmma), G to shared memory
 *   dk warpgroup    stage n - 1   dk = G^T Q (wgmma)  ->  shared memory  ->  global memory += dk (TMA)
 *                   stage n + 2   TMA load (at DEPTH = 3)
 *
 * dq stays in registers. dk of a stage leaves through shared memory; TMA adds it to f32 sums in global memory, in any
 * order, so its last bits differ between runs. A separate warpgroup for dk keeps these stores out of the path from
 * logits to logits: the dq warpgroups wait neither for the sums nor for each other, and one's exponentials overlap
 * the other's wgmmas. Under GQA all query heads add to the key head that they share.
 *
 * ptxas reserves the first 24 registers for ordinary values and places accumulators and operands of wgmma after them.
 * At DIM = OTHER_DIM = 128 that leaves room for 96 dimensions of the other argument's Q; the last 32 come from shared
 * memory.
 *
 * Tall tiles: 192 queries and 3 dq warpgroups, at DIM = 64 and OTHER_DIM = 64 or 128. Exponentials and the chain from
 * logits to logits take most of the time there, and a third warpgroup overlaps them with the others'. That leaves 144
 * registers per dq thread and 72 per dk thread: all of the other argument's Q comes from shared memory.
 *
 * WIDE_OTHER: an other argument of more than 128 dimensions needs more of both. dk is then multiplied and staged 64
 * dimensions at a time, which leaves 216 registers per dq thread and takes half of the shared memory. The two
 * arguments of a stage arrive separately: the dq warpgroups release the other argument's keys as soon as they have
 * the logits, so that its next load starts one stage earlier, and the load of the wrt argument's keys overlaps the
 * products of the other argument.
 *
 * FORM: what the logits are. CAPPED_LOGITS and LINEAR_LOGITS are instances of their own: in one instance the paths of
 * both made softcaps 6 to 9 % slower.
 *
 * query_backward.cuh has what this backward shares with the joint one. One loader and dk loop for both cost 2 to 4.5
 * % here, so each has its own. */
#ifndef SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_FUSED_BACKWARD_CUH

#include "cuda/sm90/attention/fused_backward_tile.cuh"

namespace sm90
{

/* f16 has no instances for gradients of A: nothing bounds them that f16 could rely on. */
template <typename ELEMENT> constexpr bool HAS_GRAD_OF_A = true;
template <> constexpr bool HAS_GRAD_OF_A<skl_f16> = false;

/* Tall tiles are for gradients of B. */
template <typename ELEMENT, typename SHAPE> constexpr bool HAS_INSTANCE_OF_A = HAS_GRAD_OF_A<ELEMENT>;
template <typename ELEMENT, int DIM, int OTHER_DIM>
constexpr bool HAS_INSTANCE_OF_A<ELEMENT, fused_backward_shape<DIM, OTHER_DIM, 3>> = false;

template <typename ELEMENT, typename SHAPE, logit_form FORM>
cudaError_t launch_fused_backward_of(const char *kernel, const backward_params &params)
{
    constexpr bool OF_A = HAS_INSTANCE_OF_A<ELEMENT, SHAPE> && FORM != LINEAR_LOGITS;
    const bool wrt_b = is_grad_of_b(params);
    const skl_problem *const p = &params.problem;
    const ELEMENT element = ELEMENT();
    fused_backward_maps maps;
    if (!(wrt_b || OF_A) || !encode_queries(&maps.wrt_queries, p, wrt_of(params), SHAPE::ROWS, element) ||
        !encode_queries(&maps.other_queries, p, other_of(params), SHAPE::ROWS, element) ||
        !encode_keys(&maps.wrt_keys, p, wrt_of(params), STAGE_KEYS, element) ||
        !encode_keys(&maps.other_keys, p, other_of(params), STAGE_KEYS, element) ||
        !encode_dk_sums(&maps.sums, params))
        return encode_error();
    return with_dk_sums(params, [&] {
        record_launch(kernel,
                      FORM != PLAIN_LOGITS    ? SKL_VARIANT_FUSED_SOFTCAP
                      : SHAPE::DQ_GROUPS == 3 ? SKL_VARIANT_FUSED_TALL
                                              : SKL_VARIANT_FUSED,
                      1);
        if constexpr (OF_A)
            if (!wrt_b)
                return launch_query_tiles<fused_backward<ELEMENT, SHAPE, false, FORM>>(params, maps);
        return launch_query_tiles<fused_backward<ELEMENT, SHAPE, true, FORM>>(params, maps);
    });
}

/* Launches a fused backward without softcaps. */
template <typename ELEMENT, int DIM, int OTHER_DIM>
cudaError_t launch_fused_backward_tiled(const char *kernel, const backward_params &params, bool tall_tiles)
{
    if constexpr (DIM == SKL_SM90_TALL_DIM && OTHER_DIM <= SKL_SM90_TALL_OTHER_DIM)
        if (tall_tiles)
            return launch_fused_backward_of<ELEMENT, fused_backward_shape<DIM, OTHER_DIM, 3>, PLAIN_LOGITS>(kernel,
                                                                                                            params);
    return launch_fused_backward_of<ELEMENT, fused_backward_shape<DIM, OTHER_DIM>, PLAIN_LOGITS>(kernel, params);
}

template <typename ELEMENT, int DIM, bool SOFTCAP>
cudaError_t launch_fused_backward(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params kernel_params = backward_params_of(params, launch);
    return with_softcap<SOFTCAP>(kernel_params, [&](auto capped) {
        if constexpr (capped()) {
            using SHAPE = fused_backward_shape<DIM, DIM>;
            return kernel_params.b.linear && is_grad_of_b(kernel_params)
                       ? launch_fused_backward_of<ELEMENT, SHAPE, LINEAR_LOGITS>(kernel, kernel_params)
                       : launch_fused_backward_of<ELEMENT, SHAPE, CAPPED_LOGITS>(kernel, kernel_params);
        } else
            return launch_fused_backward_tiled<ELEMENT, DIM, DIM>(kernel, kernel_params, launch->tall_tiles);
    });
}

/* Head sizes that differ: one argument has at most SMALL dimensions, the other one at most LARGE. cuda/select asks
 * for no gradient of more than 128 dimensions, and not with softcaps. */
template <typename ELEMENT, int LARGE, int SMALL>
cudaError_t launch_fused_pair(const char *kernel, const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const backward_params kernel_params = backward_params_of(params, launch);
    if constexpr (LARGE > SMALL && LARGE <= SKL_SM90_FUSED_DIM_MAX)
        if (wrt_of(kernel_params)->dim > SMALL)
            return launch_fused_backward_of<ELEMENT, fused_backward_shape<LARGE, SMALL>, PLAIN_LOGITS>(kernel,
                                                                                                       kernel_params);
    return launch_fused_backward_tiled<ELEMENT, SMALL, LARGE>(kernel, kernel_params, launch->tall_tiles);
}

} // namespace sm90

#endif
