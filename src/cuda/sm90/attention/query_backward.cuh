/* Shared by the Hopper backwards with tiles of queries: fused (dq and dk of one argument), joint (of both), and that
 * of teacher groups. Their dq warpgroups keep dq in registers and write G to shared memory; a dk warpgroup multiplies
 * it with the queries, and TMA adds dk of each stage to f32 sums in global memory.
 *
 *   dq warpgroups   stage n       logits (wgmma)  ->  G  ->  dq += G K (wgmma), G to shared memory
 *   dk warpgroup    stage n - 1   dk = G^T Q (wgmma)  ->  shared memory  ->  global memory += dk (TMA)
 *
 * SMEM, the shared memory of such a kernel, has tile, count, keys, stats and unit; for sanitize_stage() also full,
 * sanitized, poison and sanitize_key(). */
#ifndef SKL_CUDA_SM90_ATTENTION_QUERY_BACKWARD_CUH
#define SKL_CUDA_SM90_ATTENTION_QUERY_BACKWARD_CUH

#include "cuda/common/dk_sums.cuh"
#include "cuda/sm90/attention/logit_gradients.cuh"
#include "cuda/sm90/attention/tile_kernel.cuh"

namespace sm90
{

constexpr int TILE_QUERIES = block_tile::ROWS;

/* ---- Queries ------------------------------------------------------------------------------------------------ */

/* Sets the number of queries and the schedule of keys of a tile. */
template <typename SMEM, typename TILE>
__device__ inline void set_rows(SMEM &smem, const TILE &tile, const row_stream &keys)
{
    smem.count = (int)skl_min(TILE::ROWS, tile.sequence.query_count - tile.first);
    smem.keys = keys;
    if (smem.count < TILE::ROWS) /* rows that do not exist must be masked: 0 times a non-finite key is NaN */
        smem.keys.masked_stages = smem.keys.stages;
}

/* G in f16 needs a unit, because f16 represents 2^-24 .. 2^16 only; bf16 has the range of f32. One warp derives it
 * from the block's largest upstream gradient, which bounds G with respect to B. Rows whose upstream gradient is less
 * than 2^-16 of that lose bits of dq. */
template <typename ELEMENT, int GROUPS>
__device__ inline float find_g_unit(const backward_params &params, const query_tile<GROUPS> &tile, ELEMENT)
{
    return 1.0F;
}

template <int GROUPS>
__device__ inline float find_g_unit(const backward_params &params, const query_tile<GROUPS> &tile, skl_f16)
{
    constexpr int LIMIT = 15; /* values stay below 2^LIMIT units */
    float largest = 0.0F;
#pragma unroll 1
    for (int row = (int)(threadIdx.x % 32); row < tile.ROWS; row += 32) {
        const int64_t query = skl_min(tile.first + row, tile.sequence.query_count - 1);
        const skl_range sees = skl_visible(&params.problem, &tile.sequence, query);
        if (sees.begin >= sees.end)
            continue; /* a row without keys has gradient 0, whatever its upstream gradient is */
        const float size = fabsf(row_stat(params, 3, tile.sequence, tile.head, query));
        largest = size < INFINITY ? fmaxf(largest, size) : largest;
    }
    const int size = (int)(__float_as_uint(warp_max(largest)) >> 23) - 126; /* largest < 2^size */
    return power_of_2(max(size - LIMIT, -126));
}

/* Row stats of the warpgroup's 64 queries, two threads each. The WORKER's sanitize_query() sets rows of an argument
 * with gradients that are not finite to 0, so that masked pairs add 0 to dk, and returns false for them: set_stats()
 * then makes their LSE NaN, and with it G of the pairs that they attend to. Rows from `count` on may belong to
 * another sequence: they become 0, too, and an LSE of 1e30 makes all their probabilities 0. */
template <typename WORKER> __device__ inline void prepare_queries(const WORKER &worker)
{
    const backward_params &params = worker.params;
    auto &smem = worker.smem;
    const int row = (int)(threadIdx.x / 2), count = smem.count;
    const bool finite = worker.sanitize_query(row, count);
    if (threadIdx.x % 2 == 0) {
        constexpr float HUGE_LSE = 1e30F;
        row_stats stats = {HUGE_LSE, HUGE_LSE, 0.0F, 0.0F};
        if (row < count) {
            float stat[4];
#pragma unroll
            for (int which = 0; which < 4; which++)
                stat[which] = row_stat(params, which, smem.tile.sequence, smem.tile.head, smem.tile.first + row);
            worker.set_stats(stats, stat, finite);
        }
        smem.stats[row] = stats;
    }
    fence_proxy_async();
    named_barrier_sync(1 + (int)(threadIdx.x / 128), 128);
}

/* ---- Stages ------------------------------------------------------------------------------------------------- */

/* Runs the masked stages, then the full ones. */
template <typename DQ> __device__ inline void add_all_stages(DQ &dq, const stage_schedule &keys)
{
    for (int n = 0; n < keys.masked_stages; n++)
        dq.template add_stage<true>(n);
    wgmma_wait<0>(); /* lets ptxas keep G in the same registers in both loops */
    for (int n = keys.masked_stages; n < keys.stages; n++)
        dq.template add_stage<false>(n);
    wgmma_wait<0>();
}

/* ---- Stores ------------------------------------------------------------------------------------------------- */

/* Writes G of the warpgroup's queries and 16 STEPS keys, from first_key on, to [query][key]. */
template <int STEPS, int ROWS>
__device__ inline void write_g(unsigned char (&rows)[ROWS][128], const uint32_t (&g)[STEPS][4], int lane, int row,
                               int first_key = 0)
{
    const uint32_t to = shared_address(&rows[row][(lane / 16 ^ row % 8) * 16]);
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        stmatrix_x4(to ^ (uint32_t)((first_key / 16 + step) * 32), g[step]);
}

/* Destination of a tile's dq. Without data the caller asks for no dq. */
struct dq_output {
    skl_side side;
    skl_output rows;
    int64_t base; /* first row of the tile */

    template <typename TILE> __device__ static dq_output of(const skl_side &side, const TILE &tile)
    {
        const skl_output rows = *side.dq;
        return {side, rows, SKL_ROW(rows, tile.sequence.batch, tile.head, tile.sequence.query_begin + tile.first)};
    }

    /* Stores the thread's rows that exist if dq is `wanted`. SMEM has the number of the tile's queries and the unit
     * of G. */
    template <typename ELEMENT, typename SMEM, int BLOCKS>
    __device__ void store(const SMEM &smem, const float (&dq)[BLOCKS][4], bool wanted = true) const
    {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = acc_row<1>(0, half);
            if (row < smem.count && wanted)
                store_row<ELEMENT>(rows.data, base + row * rows.stride_row, side, dq, half, smem.unit * side.scale);
        }
    }
};

/* ---- dk ----------------------------------------------------------------------------------------------------- */

/* Executed by the dk warpgroup: sanitizes the keys of stage n. Only masked stages need it: see logit_gradients.cuh.
 */
template <typename ELEMENT, typename SMEM> __device__ inline void sanitize_stage(SMEM &smem, int n)
{
    const int stage = n % smem.DEPTH;
    const int row = (int)(threadIdx.x % 128 / 2);
    barrier_wait(smem.full[stage], n / smem.DEPTH % 2);
    const bool finite = smem.template sanitize_key<ELEMENT>(stage, row);
    smem.poison[stage][row] = finite ? 0.0F : NAN;
    fence_proxy_async();
    barrier_arrive(smem.sanitized[stage]); /* every thread, because every thread has written rows or poison */
}

/* Writes dk of a stage to shared memory, in TMA's 128-byte swizzle. Lanes of odd rows swap pairs of 8-dimension
 * blocks with the next pair, which avoids bank conflicts. */
template <int DIM>
__device__ inline void write_dk(unsigned char (&rows)[DIM / 32][STAGE_KEYS][128], const float (&dk)[DIM / 8][4],
                                float factor)
{
    const int lane = (int)(threadIdx.x % 32);
    const int row = (int)(threadIdx.x % 128 / 32) * 16 + lane / 4;
    const bool odd = row % 2;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
        const int chunk = (n % 4 ^ (odd ? 2 : 0)) * 2 + lane % 4 / 2;
        unsigned char *const to = &rows[n / 4][row][(chunk ^ row % 8) * 16 + lane % 2 * 8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float low = odd ? dk[n ^ 2][half * 2] : dk[n][half * 2];
            const float high = odd ? dk[n ^ 2][half * 2 + 1] : dk[n][half * 2 + 1];
            *(float2 *)(void *)(to + half * 8 * 128) = make_float2(low * factor, high * factor);
        }
    }
}

/* dk = G^T Q of a stage: 64 keys x N = 64 keys x ROWS queries . ROWS queries x N. `g` and `q` are operands. */
template <typename ELEMENT, int ROWS, int BLOCKS>
__device__ inline void multiply_dk(float (&dk)[BLOCKS][4], uint32_t g, uint32_t q)
{
    wgmma_fence();
    wgmma_steps<true, ROWS / 16>(dk, g, q, 0, ELEMENT());
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(dk);
}

/* Adds dk of a warp's 16 keys of stage n, from dimension first_dim on. row_at() is called for each slab: with one
 * call before the loop, ptxas compiles it to a branch. */
template <int SLABS>
__device__ inline void reduce_add_dk(const CUtensorMap &sums, const unsigned char (&dk)[SLABS][STAGE_KEYS][128],
                                     int first_dim, const stage_schedule &keys, int n, int warp, int key_head,
                                     int batch)
{
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
        tma_reduce_add(sums, first_dim + slab * 32, keys.row_at(n) + warp * 16, key_head, batch, dk[slab][warp * 16]);
    tma_commit();
}

/* ---- Launch ------------------------------------------------------------------------------------------------- */

/* Launches one block per tile of queries. */
template <typename WORKER, typename MAPS>
cudaError_t launch_query_tiles(const backward_params &params, const MAPS &maps)
{
    constexpr int ROWS = tile_of<WORKER>::ROWS;
    static_assert(ROWS == (WORKER::GROUPS == 3 ? SKL_SM90_TALL_ROWS : SKL_SM90_BACKWARD_ROWS),
                  "cuda/select counts tiles");
    const skl_problem &p = params.problem;
    return launch_tiles<WORKER>(params, maps, p.heads_s, skl_ceil_div(p.len_q, ROWS));
}

/* Encodes the sums of dk, if there is a dk. `box_rows`: keys that TMA adds at once. */
inline bool encode_dk_sums(CUtensorMap *map, const backward_params &params, int box_rows = 16)
{
    const skl_problem *const p = &params.problem;
    const skl_cuda_argument *const wrt = wrt_of(params);
    return params.dk_sums.data == NULL ||
           encode_sums(map, params.dk_sums, wrt->dim, p->heads_s / wrt->heads_per_key, skl_key_rows(p), box_rows);
}

/* Clears the sums of dk, calls launch(), which adds to them, and rounds them to dk's type. */
template <typename LAUNCH> cudaError_t with_dk_sums(const backward_params &params, const LAUNCH &launch)
{
    cudaError_t error = clear_dk_sums(&params);
    if (error == cudaSuccess)
        error = launch();
    return error == cudaSuccess ? store_dk_sums(&params) : error;
}

} // namespace sm90

#endif
