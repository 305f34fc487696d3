/* Scores of a dense indexer and its teacher by mma.sync, sm_80 and up: row sums of a forward, or G; and the teacher's
 * LSEs if the caller does not give them.
 *
 * P and Y of a tile of queries and keys stay in registers while all heads stream past: one product per pair and head
 * on the tensor cores, and for teacher heads one exponential on the special function units. Two blocks share an SM:
 * the exponentials of one overlap the products of the other.
 *
 *   block      4 warps of 32 queries; 2 blocks per SM
 *   tile       128 queries x 64 keys; all teacher heads, then all index heads
 *   registers  P, Y and the products of a head: 64 each
 *   shared     2 stages of one slab, 64 dimensions of 128 queries and 64 keys: 48 KB
 *
 *   cp.async   | slab n + 1                       | slab n + 2
 *   warps      | X += slab n (mma)                | X += slab n + 1
 *              | after the last slab of a head:   |
 *              |   P += 2^(X - lse_h) / heads, or |
 *              |   Y += w_g relu(X)               |
 *
 * The head size is only the number of slabs of a head, so one kernel serves all head sizes. Each lane loads the LSEs
 * or weights of one of the warp's 32 rows. */
#ifndef SKL_CUDA_SM80_STRIPS_DIFFERENCE_SCORES_CUH
#define SKL_CUDA_SM80_STRIPS_DIFFERENCE_SCORES_CUH

#include "cuda/common/strips/logit_tile.cuh"
#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

constexpr int TILE_KEYS = STAGE_ROWS<SLAB>;
constexpr int TILES_PER_G_TILE = SIDE / TILE_KEYS;
constexpr int M_TILES = SIDE / (WARPS * 16);          /* of 16 queries, per warp */
typedef float tile_logits[M_TILES][TILE_KEYS / 8][4]; /* 32 x 64 per warp */

struct slab_stage {
    smem_rows<SLAB> queries[SIDE / STAGE_ROWS<SLAB>], keys;
};

struct score_smem {
    slab_stage stages[STAGES];
    query_slot slot;       /* this and the rest are in shared memory to save registers */
    head_list streamed[3]; /* one after another: the teacher, the student, ... */
    int streamed_count;
    unsigned slot_index;
    int split, tile_begin, tile_end; /* of the keys, in tiles of TILE_KEYS */
};
static_assert(2 * (sizeof(score_smem) + 1024) <= 100 * 1024, "two blocks share an SM of a consumer card");

/* ---- Slabs -------------------------------------------------------------------------------------------------- */

/* The order of the slabs: [tile][list][head][slab]. */
struct slab_iterator {
    int tile, list, head, slab;

    __device__ void next(const score_smem &smem)
    {
        if (++slab < smem.streamed[list].slabs)
            return;
        slab = 0;
        if (++head < smem.streamed[list].count)
            return;
        head = 0;
        if (++list < smem.streamed_count)
            return;
        list = 0;
        tile++;
    }
};

template <typename ELEMENT> struct slab_stream {
    const strip_params &params;
    score_smem &smem;
    slab_iterator next_copy; /* the slab that is copied next */
    int stage;               /* of the slab that is multiplied next */

    /* Whether the stage still holds these keys, from two slabs before. */
    __device__ static bool keys_are_reused(const head_list &heads, int n)
    {
        const int before = n - (heads.slabs == 1 ? 2 : 1);
        return heads.slabs <= 2 && before >= 0 &&
               (heads.first + before) / heads.heads_per_key == (heads.first + n) / heads.heads_per_key;
    }

    __device__ void copy_next(slab_stage &to)
    {
        if (next_copy.tile < smem.tile_end) {
            const head_list &heads = smem.streamed[next_copy.list];
            const skl_cuda_argument &side = heads.of_b ? params.b : params.a;
            const query_slot &slot = smem.slot;
            const skl_sequence &s = slot.sequence;
            const int n = next_copy.head, head = heads.first + n;
            const int dim = next_copy.slab * SLAB;
            const row_source<ELEMENT> queries = {(const ELEMENT *)side.q.data +
                                                     SKL_ROW(side.q, s.batch, head, s.query_begin + slot.first) + dim,
                                                 side.q.stride_row, side.dim - dim};
#pragma unroll
            for (int block = 0; block < SIDE / STAGE_ROWS<SLAB>; block++)
                copy_rows(to.queries[block], queries, block * STAGE_ROWS<SLAB>, slot.count);
            const row_source<ELEMENT> keys = {(const ELEMENT *)side.k.data +
                                                  SKL_ROW(side.k, s.batch, head / heads.heads_per_key, s.key_begin) +
                                                  dim,
                                              side.k.stride_row, side.dim - dim};
            if (!keys_are_reused(heads, n))
                copy_rows(to.keys, keys, next_copy.tile * TILE_KEYS, (int)s.key_count);
            next_copy.next(smem);
        }
        cp_async_commit();
    }

    __device__ void prefetch()
    {
        copy_next(smem.stages[stage]);
    }

    __device__ static void add_slab(tile_logits &x, const slab_stage &stage)
    {
        const int warp_row = (int)threadIdx.x / 32 * 16 * M_TILES;
        const uint32_t queries = a_address(stage.queries[warp_row / STAGE_ROWS<SLAB>]);
        multiply_add_smem<ELEMENT, SLAB>(x, at_chunk<SLAB>(queries, warp_row % STAGE_ROWS<SLAB>, 0),
                                         logit_b_address<2>(stage.keys));
    }

    /* x = queries of a head times its keys, slab by slab. */
    __device__ void multiply(tile_logits &x, int slabs)
    {
#pragma unroll
        for (int e = 0; e < M_TILES * TILE_KEYS / 2; e++)
            x[e / (TILE_KEYS / 2)][e / 4 % (TILE_KEYS / 8)][e % 4] = 0.0F;
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab++) {
            cp_async_wait<0>();
            __syncthreads(); /* this stage is complete, and the other one is free */
            copy_next(smem.stages[1 - stage]);
            add_slab(x, smem.stages[stage]);
            stage = 1 - stage;
        }
    }

    /* For each head: sum = combine(sum, x, value) for all elements, with the head's LSE or weight of the row as
     * value. `values` reads those of the lane's row. */
    template <typename VALUES, typename COMBINE>
    __device__ void add_heads(tile_logits &sum, const head_list &heads, VALUES values, COMBINE combine)
    {
        typename VALUES::raw next = values.load();
#pragma unroll 1
        for (int head = 0; head < heads.count; head++) {
            const typename VALUES::raw now = next;
            if (head + 1 < heads.count) {
                values.next();
                next = values.load();
            }
            tile_logits x;
            multiply(x, heads.slabs);
            const auto lane_value = values.value(now);
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const auto value = broadcast(lane_value, (m * 2 + half) * 8 + (int)threadIdx.x % 32 / 4);
#pragma unroll
                    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                        for (int e = half * 2; e < half * 2 + 2; e++)
                            sum[m][n][e] = combine(sum[m][n][e], x[m][n][e], value);
                }
        }
    }

    __device__ static float broadcast(float value, int lane)
    {
        return __shfl_sync(~0U, value, lane);
    }

    __device__ static split_lse broadcast(const split_lse &value, int lane)
    {
        return {__shfl_sync(~0U, value.high, lane), __shfl_sync(~0U, value.factor, lane)};
    }
};

/* ---- Rows and G --------------------------------------------------------------------------------------------- */

/* Stores G if it is wanted, and adds to the row sums (unless the operation is a backward) for 16 queries of a warp.
 */
template <int PLANES>
__device__ inline void finish_tile(const strip_params &params, const score_smem &smem, int m, int tile,
                                   float (&p)[TILE_KEYS / 8][4], const float (&y)[TILE_KEYS / 8][4])
{
    const query_slot &slot = smem.slot;
    const int rows[2] = {acc_row<M_TILES>(m, 0), acc_row<M_TILES>(m, 1)};
    if (params.g != NULL)
        store_tile<PLANES>(params, slot,
                           g_block(params, smem.slot_index, tile / TILES_PER_G_TILE,
                                   (int)threadIdx.x / 32 * M_TILES + m, tile % TILES_PER_G_TILE * (TILE_KEYS / 16)),
                           p, y, rows, tile * TILE_KEYS);
    if (params.call.op == SKL_OP_BACKWARD)
        return;
    index_row *const sums = rows_of_split(params, smem.slot_index, smem.split);
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_to_row(sums + rows[half], sum_row(params, slot, p, y, half, rows[half], tile * TILE_KEYS));
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

__device__ inline void init_split(score_smem &smem, const strip_params &params)
{
    const slot_split work = slot_split_of_block(params);
    smem.slot_index = work.slot;
    smem.split = work.split;
    smem.slot = slot_at(params, smem.slot_index, (unsigned)params.problem.heads_s);
    smem.streamed_count = 0;
    if (params.with_teacher)
        smem.streamed[smem.streamed_count++] = teacher_heads(params, smem.slot.head);
    smem.streamed[smem.streamed_count++] = index_heads(params, smem.slot.head);
    const int tiles = smem.slot.tile_end - smem.slot.tile_begin;
    const int share = (tiles + params.num_splits - 1) / params.num_splits;
    const int begin = smem.slot.tile_begin + min(smem.split * share, tiles);
    smem.tile_begin = begin * TILES_PER_G_TILE;
    smem.tile_end = min(begin + share, smem.slot.tile_end) * TILES_PER_G_TILE;
}

template <typename ELEMENT>
__global__ void __launch_bounds__(THREADS, 2) index_score_kernel(const __grid_constant__ strip_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0)
        init_split(smem, params);
    __syncthreads();
    const query_slot &slot = smem.slot;
    rows_of_split(params, smem.slot_index, smem.split)[threadIdx.x] = empty_row();
    __syncwarp(); /* only this warp adds to its rows */
    slab_stream<ELEMENT> slabs = {params, smem, {smem.tile_begin, 0, 0, 0}, 0};
    slabs.prefetch();
    const float scale_t = params.a.scale, least = params.least;
#pragma unroll 1
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        const int64_t query = query_of(slot, (int)threadIdx.x);
        tile_logits p = {}, y = {};
        if (params.with_teacher)
            slabs.add_heads(p, smem.streamed[0], lse_of(params, slot, smem.streamed[0].first, query),
                            [=](float sum, float x, const split_lse &value) {
                                return fmaf(ex2(fmaf(x, scale_t, -value.high)), value.factor, sum);
                            });
        slabs.add_heads(y, smem.streamed[smem.streamed_count - 1], weight_of(params, slot, query),
                        [=](float sum, float x, float value) { return fmaf(value, at_least(x, least), sum); });
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            finish_tile<G_PLANES<ELEMENT>>(params, smem, m, tile, p[m], y[m]);
    }
}

/* Teacher LSEs, written to rows.lse_t. One block per head and 128 queries, over all of their visible keys. */
template <typename ELEMENT>
__global__ void __launch_bounds__(THREADS, 2) index_lse_kernel(const __grid_constant__ strip_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0) {
        smem.slot = slot_at(params, blockIdx.x, (unsigned)params.problem.heads_t);
        smem.streamed[0] = {smem.slot.head, 1, params.a.heads_per_key, (params.a.dim + SLAB - 1) / SLAB, false};
        smem.streamed_count = 1;
        smem.tile_begin = smem.slot.tile_begin * TILES_PER_G_TILE;
        smem.tile_end = smem.slot.tile_end * TILES_PER_G_TILE;
    }
    __syncthreads();
    const query_slot &slot = smem.slot;
    slab_stream<ELEMENT> slabs = {params, smem, {smem.tile_begin, 0, 0, 0}, 0};
    slabs.prefetch();
    lse_row rows[M_TILES][2];
#pragma unroll
    for (int e = 0; e < M_TILES * 2; e++)
        rows[e / 2][e % 2] = {-INFINITY, 0.0F};
#pragma unroll 1
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        tile_logits x;
        slabs.multiply(x, smem.streamed[0].slabs);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            const range32 sees[2] = {visible_range(params, slot, acc_row<M_TILES>(m, 0), tile * TILE_KEYS),
                                     visible_range(params, slot, acc_row<M_TILES>(m, 1), tile * TILE_KEYS)};
            if (is_full(slot, tile * TILE_KEYS, TILE_KEYS))
                add_tile<false>(rows[m], x[m], params.a.scale, sees);
            else
                add_tile<true>(rows[m], x[m], params.a.scale, sees);
        }
    }
#pragma unroll
    for (int e = 0; e < M_TILES * 2; e++) {
        const int row = acc_row<M_TILES>(e / 2, e % 2);
        const float lse = lse_of_lanes(rows[e / 2][e % 2]);
        if (threadIdx.x % 4 == 0 && row < slot.count)
            skl_row_set(&params.call.rows.lse_t, &slot.sequence, slot.head, slot.first + row, lse);
    }
}

} // namespace sm80

#endif
