/* Scores of an indexer and of its teacher on tensor cores by mma.sync, sm_80 and up: row sums of a forward, or G; and
 * the teacher's LSEs, where the caller has none.
 *
 *   block    4 warps of 32 queries; 2 blocks a multiprocessor: one's exponentials run beside the other one's products
 *   tile     128 queries x 64 keys, which stay while heads stream: all teacher heads, then all index heads
 *   regs     P, Y and the products of a head: 64 each
 *   shared   2 stages of a slab, 64 dimensions of 128 queries and 64 keys: 48 KB
 *
 *   slab n + 1 is copied  |  X += slab n (mma);  behind a head's last one  P += 2^(X - lse_h)  or  Y += w_g relu(X)
 *
 * Head sizes are a matter of how many slabs a head has, so one kernel does them all. A lane loads what heads have for
 * one row of the warp's 32, LSE or weight. */
#ifndef SKL_CUDA_SM80_INDEXER_DENSE_SCORES_CUH
#define SKL_CUDA_SM80_INDEXER_DENSE_SCORES_CUH

#include "cuda/common/indexer/logit_tile.cuh"

namespace sm80
{

constexpr int TILE_KEYS = STAGE_ROWS<SLAB>;
constexpr int TILES = SIDE / TILE_KEYS;           /* of a tile of G */
constexpr int OWN = SIDE / (WARPS * 16);          /* times 16 queries of a warp */
typedef float tile_logits[OWN][TILE_KEYS / 8][4]; /* 32 x 64 of a warp */

struct slab_stage {
    staged_rows<SLAB> queries[SIDE / STAGE_ROWS<SLAB>], keys;
};

struct score_smem {
    slab_stage stages[STAGES];
    query_slot place; /* here, and not in the registers of every thread */
    head_list teacher, index;
    unsigned slot;
    int split, tile_begin, tile_end; /* of the keys, in tiles of TILE_KEYS */
};
static_assert(2 * (sizeof(score_smem) + 1024) <= 100 * 1024, "two blocks share a multiprocessor of a consumer card");

/* ---- Slabs -------------------------------------------------------------------------------------------------- */

/* The order in which slabs come: tiles, in each of them all heads, in each of them its slabs. */
struct slab_walk {
    int tile, head, slab; /* heads of the teacher, and behind them those of the indexer */

    __device__ void next(const score_smem &smem)
    {
        const head_list &heads = head < smem.teacher.count ? smem.teacher : smem.index;
        if (++slab < heads.slabs)
            return;
        slab = 0;
        if (++head < smem.teacher.count + smem.index.count)
            return;
        head = 0;
        tile++;
    }
};

template <typename ELEMENT> struct slab_stream {
    const index_params &params;
    score_smem &smem;
    slab_walk ahead; /* the slab that is copied next */
    int at;          /* stage of the slab that is multiplied next */

    /* The stage's keys are those of two slabs before. */
    __device__ static bool keys_are_reused(const head_list &heads, int n)
    {
        const int before = n - (heads.slabs == 1 ? 2 : 1);
        return heads.slabs <= 2 && before >= 0 &&
               (heads.first + before) / heads.heads_per_key == (heads.first + n) / heads.heads_per_key;
    }

    __device__ void copy_next(slab_stage &to)
    {
        if (ahead.tile < smem.tile_end) {
            const bool of_teacher = ahead.head < smem.teacher.count;
            const head_list &heads = of_teacher ? smem.teacher : smem.index;
            const skl_cuda_argument &side = of_teacher ? params.a : params.b;
            const query_slot &place = smem.place;
            const skl_sequence &s = place.sequence;
            const int n = of_teacher ? ahead.head : ahead.head - smem.teacher.count, head = heads.first + n;
            const int dim = ahead.slab * SLAB;
            const row_source<ELEMENT> queries = {
                (const ELEMENT *)side.q.data + SKL_ROW(side.q, s.batch, head, s.query_begin + place.first) + dim,
                side.q.stride_row, side.dim - dim};
#pragma unroll
            for (int part = 0; part < SIDE / STAGE_ROWS<SLAB>; part++)
                copy_rows(to.queries[part], queries, part * STAGE_ROWS<SLAB>, place.count);
            const row_source<ELEMENT> keys = {(const ELEMENT *)side.k.data +
                                                  SKL_ROW(side.k, s.batch, head / heads.heads_per_key, s.key_begin) +
                                                  dim,
                                              side.k.stride_row, side.dim - dim};
            if (!keys_are_reused(heads, n))
                copy_rows(to.keys, keys, ahead.tile * TILE_KEYS, (int)s.key_count);
            ahead.next(smem);
        }
        cp_async_commit();
    }

    __device__ void begin()
    {
        copy_next(smem.stages[at]);
    }

    __device__ static void add_slab(tile_logits &x, const slab_stage &stage)
    {
        const int warp_row = (int)threadIdx.x / 32 * 16 * OWN;
        const uint32_t queries = own_operand(stage.queries[warp_row / STAGE_ROWS<SLAB>]);
        add_staged<ELEMENT, SLAB>(x, at_chunk<SLAB>(queries, warp_row % STAGE_ROWS<SLAB>, 0),
                                  logit_operand<2>(stage.keys));
    }

    /* x = queries of a head times its keys. */
    __device__ void multiply(tile_logits &x, int slabs)
    {
#pragma unroll
        for (int e = 0; e < OWN * TILE_KEYS / 2; e++)
            x[e / (TILE_KEYS / 2)][e / 4 % (TILE_KEYS / 8)][e % 4] = 0.0F;
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab++) {
            cp_async_wait<0>();
            __syncthreads(); /* this stage is complete, and the other one free */
            copy_next(smem.stages[1 - at]);
            add_slab(x, smem.stages[at]);
            at = 1 - at;
        }
    }

    /* sum += what combine makes of a product and of its row's value, over all heads; values: of the lane's row. */
    template <typename VALUES, typename COMBINE>
    __device__ void add_heads(tile_logits &sum, const head_list &heads, VALUES values, COMBINE combine)
    {
        if (heads.count == 0)
            return;
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
            const auto own = values.value(now);
#pragma unroll
            for (int m = 0; m < OWN; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const auto value = of_lane(own, (m * 2 + half) * 8 + (int)threadIdx.x % 32 / 4);
#pragma unroll
                    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                        for (int e = half * 2; e < half * 2 + 2; e++)
                            sum[m][n][e] = combine(sum[m][n][e], x[m][n][e], value);
                }
        }
    }

    __device__ static float of_lane(float value, int lane)
    {
        return __shfl_sync(~0U, value, lane);
    }

    __device__ static split_lse of_lane(const split_lse &value, int lane)
    {
        return {__shfl_sync(~0U, value.high, lane), __shfl_sync(~0U, value.factor, lane)};
    }
};

/* ---- Rows and G --------------------------------------------------------------------------------------------- */

/* 16 queries of a warp. */
template <bool GRADIENTS, int PLANES>
__device__ inline void finish_tile(const index_params &params, const score_smem &smem, int m, int tile,
                                   float (&p)[TILE_KEYS / 8][4], const float (&y)[TILE_KEYS / 8][4])
{
    const query_slot &at = smem.place;
    const int rows[2] = {acc_row<OWN>(m, 0), acc_row<OWN>(m, 1)};
    if (GRADIENTS)
        store_tile<PLANES>(params, at,
                           g_block(params, smem.slot, tile / TILES, (int)threadIdx.x / 32 * OWN + m,
                                   tile % TILES * (TILE_KEYS / 16)),
                           p, y, rows, tile * TILE_KEYS);
    if (params.call.op == SKL_OP_BACKWARD)
        return;
    index_row *const sums = rows_of_split(params, smem.slot, smem.split);
#pragma unroll
    for (int half = 0; half < 2; half++)
        add_to_row(sums + rows[half], sum_row(params, at, p, y, half, rows[half], tile * TILE_KEYS));
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

__device__ inline void find_split(score_smem &smem, const index_params &params)
{
    const slot_split own = slot_split_of_block(params);
    smem.slot = own.slot;
    smem.split = own.split;
    smem.place = slot_at(params, smem.slot, (unsigned)params.problem.heads_s);
    smem.teacher = teacher_heads(params, smem.place.head);
    smem.index = index_heads(params, smem.place.head);
    const int tiles = smem.place.tile_end - smem.place.tile_begin;
    const int share = (tiles + params.num_splits - 1) / params.num_splits;
    const int begin = smem.place.tile_begin + min(smem.split * share, tiles);
    smem.tile_begin = begin * TILES;
    smem.tile_end = min(begin + share, smem.place.tile_end) * TILES;
}

template <typename ELEMENT, bool GRADIENTS>
__global__ void __launch_bounds__(THREADS, 2) index_score_kernel(const __grid_constant__ index_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0)
        find_split(smem, params);
    __syncthreads();
    const query_slot &at = smem.place;
    rows_of_split(params, smem.slot, smem.split)[threadIdx.x] = empty_row();
    __syncwarp(); /* the same warp adds to them */
    slab_stream<ELEMENT> slabs = {params, smem, {smem.tile_begin, 0, 0}, 0};
    slabs.begin();
    const float scale_t = params.a.scale, least = params.least;
#pragma unroll 1
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        const int64_t query = query_of(at, (int)threadIdx.x);
        tile_logits p = {}, y = {};
        slabs.add_heads(p, smem.teacher, lse_of(params, at, smem.teacher.first, query),
                        [=](float sum, float x, const split_lse &value) {
                            return fmaf(ex2(fmaf(x, scale_t, -value.high)), value.factor, sum);
                        });
        slabs.add_heads(y, smem.index, weight_of(params, at, query),
                        [=](float sum, float x, float value) { return fmaf(value, at_least(x, least), sum); });
#pragma unroll
        for (int m = 0; m < OWN; m++)
            finish_tile<GRADIENTS, G_PLANES<ELEMENT>>(params, smem, m, tile, p[m], y[m]);
    }
}

/* To rows.lse_t of the call: a block has one head, and all the keys that its 128 queries see. */
template <typename ELEMENT>
__global__ void __launch_bounds__(THREADS, 2) index_lse_kernel(const __grid_constant__ index_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0) {
        smem.place = slot_at(params, blockIdx.x, (unsigned)params.problem.heads_t);
        smem.teacher = {smem.place.head, 1, params.a.heads_per_key, (params.a.dim + SLAB - 1) / SLAB};
        smem.index = {};
        smem.tile_begin = smem.place.tile_begin * TILES;
        smem.tile_end = smem.place.tile_end * TILES;
    }
    __syncthreads();
    const query_slot &at = smem.place;
    slab_stream<ELEMENT> slabs = {params, smem, {smem.tile_begin, 0, 0}, 0};
    slabs.begin();
    lse_row rows[OWN][2];
#pragma unroll
    for (int e = 0; e < OWN * 2; e++)
        rows[e / 2][e % 2] = {-INFINITY, 0.0F};
#pragma unroll 1
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        tile_logits x;
        slabs.multiply(x, smem.teacher.slabs);
#pragma unroll
        for (int m = 0; m < OWN; m++) {
            const range32 sees[2] = {visible_range(params, at, acc_row<OWN>(m, 0), tile * TILE_KEYS),
                                     visible_range(params, at, acc_row<OWN>(m, 1), tile * TILE_KEYS)};
            if (is_full(at, tile * TILE_KEYS, TILE_KEYS))
                add_tile<false>(rows[m], x[m], params.a.scale, sees);
            else
                add_tile<true>(rows[m], x[m], params.a.scale, sees);
        }
    }
#pragma unroll
    for (int e = 0; e < OWN * 2; e++) {
        const int row = acc_row<OWN>(e / 2, e % 2);
        const float lse = lse_of_lanes(rows[e / 2][e % 2]);
        if (threadIdx.x % 4 == 0 && row < at.count)
            skl_row_set(&params.call.rows.lse_t, &at.sequence, at.head, at.first + row, lse);
    }
}

} // namespace sm80

#endif
