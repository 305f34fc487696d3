/* Scores of a strip as differences G = S - P (strip.cuh) by mma.sync: a policy for scores.cuh. The student is an
 * indexer, or an attention head, which is one index head without a ReLU.
 *
 *   teacher head h   P += 2^(X - lse_h) / heads     or P = M of a pooled teacher, from the strip's target
 *   index head g     Y += w_g relu(X)
 *   then             row states, G */
#ifndef SKL_CUDA_SM80_STRIPS_DIFFERENCE_SCORES_CUH
#define SKL_CUDA_SM80_STRIPS_DIFFERENCE_SCORES_CUH

#include "cuda/common/strips/pool.cuh"
#include "cuda/sm80/strips/scores.cuh"

namespace sm80
{

template <typename ELEMENT> struct difference_scores {
    typedef ELEMENT element;
    typedef strip_params params_type;
    const strip_params &params;
    const score_smem &smem;

    __device__ difference_scores(const strip_params &of_launch, const score_smem &of_block)
        : params(of_launch), smem(of_block)
    {
        rows_of_split(params, smem.slot_index, smem.split)[threadIdx.x] = empty_row();
    }

    __device__ static bool teacher_again(const strip_params &)
    {
        return false;
    }

    __device__ void teacher(tile_logits &p, int tile, slab_stream<ELEMENT> &slabs) const
    {
        clear(p);
        if (params.target != NULL) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
                load_target(p[m], params, smem.slot_index, {acc_row<M_TILES>(m, 0), acc_row<M_TILES>(m, 1)},
                            tile * TILE_KEYS);
            return;
        }
        if (!params.with_teacher)
            return;
        const head_list &heads = smem.streamed[0];
        const mean_of_heads add = {params.a.scale};
        slabs.for_heads(heads, lse_of(params, smem.slot, heads.first, query_of(smem.slot, (int)threadIdx.x)),
                        [&](int, const tile_logits &x, const split_lse &lse) { combine_tile(p, x, lse, add); });
    }

    __device__ void student(tile_logits &y, slab_stream<ELEMENT> &slabs) const
    {
        clear(y);
        const index_sum add = {params.least};
        slabs.for_heads(smem.streamed[smem.streamed_count - 1],
                        weight_of(params, smem.slot, query_of(smem.slot, (int)threadIdx.x)),
                        [&](int, const tile_logits &x, float weight) { combine_tile(y, x, weight, add); });
    }

    /* Stores G if it is wanted, and adds to the row states unless the operation is a backward. */
    __device__ void finish(int m, int tile, float (&p)[TILE_KEYS / 8][4], const float (&y)[TILE_KEYS / 8][4]) const
    {
        const int rows[2] = {acc_row<M_TILES>(m, 0), acc_row<M_TILES>(m, 1)};
        if (params.g != NULL)
            store_tile<G_PLANES<ELEMENT>>(params, smem.slot, planes_of(params, smem, m, tile), p, y, rows,
                                          tile * TILE_KEYS);
        if (params.call.op == SKL_OP_BACKWARD)
            return;
        index_row *const sums = rows_of_split(params, smem.slot_index, smem.split);
#pragma unroll
        for (int half = 0; half < 2; half++)
            add_to_row(sums + rows[half], sum_row(params, smem.slot, p, y, half, rows[half], tile * TILE_KEYS));
    }

    __device__ static void end_tile(slab_stream<ELEMENT> &, const tile_logits &)
    {
    }
};

} // namespace sm80

#endif
