/* Scores of a strip by mma.sync, sm_80 and up: row states, or planes for the gradients; and the teacher's LSEs if the
 * caller does not give them. A policy, SCORES, says how P comes from the teacher's heads, the student's logits from
 * its heads, and what becomes of a tile: difference_scores.cuh, ratio_scores.cuh.
 *
 * P and Y of a tile of queries and keys stay in registers while all heads stream past: one product per pair and head
 * on the tensor cores, and for teacher heads one exponential or more on the special function units. Two blocks share
 * an SM: the exponentials of one overlap the products of the other.
 *
 *   block      4 warps of 32 queries; 2 blocks per SM
 *   tile       128 queries x 64 keys; all teacher heads, then all heads of the student
 *   registers  P, Y and the products of a head: 64 each
 *   shared     2 stages of one slab, 64 dimensions of 128 queries and 64 keys: 48 KB
 *
 *   cp.async   | slab n + 1                       | slab n + 2
 *   warps      | X += slab n (mma)                | X += slab n + 1
 *              | after the last slab of a head:   |
 *              |   P or Y of SCORES               |
 *
 * The head size is only the number of slabs of a head, so one kernel serves all head sizes. Each lane loads the LSEs
 * or weights of one of the warp's 32 rows. */
#ifndef SKL_CUDA_SM80_STRIPS_SCORES_CUH
#define SKL_CUDA_SM80_STRIPS_SCORES_CUH

#include "cuda/common/strips/logit_tile.cuh"
#include "cuda/sm80/mma_tile.cuh"

namespace sm80
{

constexpr int TILE_KEYS = STAGE_ROWS<SLAB>;
constexpr int TILES_PER_G_TILE = SIDE / TILE_KEYS;
constexpr int M_TILES = SIDE / (WARPS * 16);          /* tiles of 16 queries per warp */
typedef float tile_logits[M_TILES][TILE_KEYS / 8][4]; /* 32 x 64 per warp */

__device__ inline void fill(tile_logits &x, float value)
{
#pragma unroll
    for (int e = 0; e < M_TILES * TILE_KEYS / 2; e++)
        x[e / (TILE_KEYS / 2)][e / 4 % (TILE_KEYS / 8)][e % 4] = value;
}

__device__ inline void clear(tile_logits &x)
{
    fill(x, 0.0F);
}

struct slab_stage {
    smem_rows<SLAB> queries[SIDE / STAGE_ROWS<SLAB>], keys;
};

struct score_smem {
    slab_stage stages[STAGES];
    query_slot slot;       /* these and the next members are in shared memory to save registers */
    head_list streamed[3]; /* one after another: the teacher, the student, ... */
    int streamed_count;
    unsigned slot_index;
    int split, tile_begin, tile_end; /* split of the keys, in tiles of TILE_KEYS */
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

/* Tiles of consecutive keys. */
struct whole_tiles {
    __device__ static int first_key(int tile)
    {
        return tile * TILE_KEYS;
    }
};

template <typename ELEMENT, typename TILES = whole_tiles> struct slab_stream {
    const strip_params &params;
    score_smem &smem;
    slab_iterator next_copy; /* the slab that is copied next */
    int stage;               /* stage of the slab that is multiplied next */
    TILES tiles;

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
            const row_source<ELEMENT> queries = query_rows<ELEMENT>(side, s, head, slot.first).slab(dim);
#pragma unroll
            for (int block = 0; block < SIDE / STAGE_ROWS<SLAB>; block++)
                copy_rows(to.queries[block], queries, block * STAGE_ROWS<SLAB>, slot.count);
            const row_source<ELEMENT> keys = key_rows<ELEMENT>(side, s, head / heads.heads_per_key, 0).slab(dim);
            if (!keys_are_reused(heads, n))
                copy_rows(to.keys, keys, tiles.first_key(next_copy.tile), (int)s.key_count);
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
        clear(x);
#pragma unroll 1
        for (int slab = 0; slab < slabs; slab++) {
            cp_async_wait<0>();
            __syncthreads(); /* this stage is complete, and the other one is free */
            copy_next(smem.stages[1 - stage]);
            add_slab(x, smem.stages[stage]);
            stage = 1 - stage;
        }
    }

    /* Calls visit(n, x, value of the lane's row) for each head. `values` reads the head's LSEs or weights. */
    template <typename VALUES, typename VISIT>
    __device__ void for_heads(const head_list &heads, VALUES values, VISIT visit)
    {
        typename VALUES::raw next = values.load();
#pragma unroll 1
        for (int n = 0; n < heads.count; n++) {
            const typename VALUES::raw now = next;
            if (n + 1 < heads.count) {
                values.next();
                next = values.load();
            }
            tile_logits x;
            multiply(x, heads.slabs);
            visit(n, x, values.value(now));
        }
    }
};

/* ---- Values of rows ----------------------------------------------------------------------------------------- */

/* The lane that holds the values of a thread's row. */
__device__ inline int lane_of_row(int m, int half)
{
    return (m * 2 + half) * 8 + (int)(thread_index() % 32 / 4);
}

__device__ inline float broadcast(float value, int lane)
{
    return __shfl_sync(~0U, value, lane);
}

__device__ inline split_lse broadcast(const split_lse &value, int lane)
{
    return {__shfl_sync(~0U, value.high, lane), __shfl_sync(~0U, value.factor, lane)};
}

__device__ inline skl_lse2 broadcast(const skl_lse2 &value, int lane)
{
    return {__shfl_sync(~0U, value.value, lane), __shfl_sync(~0U, value.low, lane)};
}

/* sum = combine(sum, x, value) for all elements, with the value of the element's row. */
template <typename VALUE, typename COMBINE>
__device__ inline void combine_tile(tile_logits &sum, const tile_logits &x, const VALUE &of_lane, COMBINE combine)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const VALUE value = broadcast(of_lane, lane_of_row(m, half));
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                for (int e = half * 2; e < half * 2 + 2; e++)
                    sum[m][n][e] = combine(sum[m][n][e], x[m][n][e], value);
        }
}

/* The lane's part of the planes of 16 queries of a warp. */
__device__ inline uint4 *planes_of(const strip_params &params, const score_smem &smem, int m, int tile)
{
    return g_block(params, smem.slot_index, tile / TILES_PER_G_TILE, (int)(thread_index() / 32) * M_TILES + m,
                   tile % TILES_PER_G_TILE * (TILE_KEYS / 16));
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

__device__ inline void init_split(score_smem &smem, const strip_params &params)
{
    const slot_split work = slot_split_of_block(params);
    smem.slot_index = work.slot;
    smem.split = work.split;
    smem.slot = slot_at(params, smem.slot_index, (unsigned)params.problem.heads_s);
    smem.streamed_count = 0;
    const head_list teacher = teacher_heads(params, smem.slot.head);
    if (teacher.count > 0)
        smem.streamed[smem.streamed_count++] = teacher;
    smem.streamed[smem.streamed_count++] = student_heads(params, smem.slot.head);
    const range32 tiles = tiles_of_split(smem.slot, smem.split, params.num_splits);
    smem.tile_begin = tiles.begin * TILES_PER_G_TILE;
    smem.tile_end = tiles.end * TILES_PER_G_TILE;
}

/* SCORES has
 *
 *   element, params_type
 *   teacher_again(params)        whether the teacher's heads stream past a second time, after the student's
 *   SCORES(params, smem)         also clears what the split adds up
 *   teacher(p, tile, slabs), student(y, slabs)
 *   finish(m, tile, p, y)        of 16 queries of a warp
 *   end_tile(slabs, p) */
template <typename SCORES>
__global__ void __launch_bounds__(THREADS, 2)
    score_kernel(const __grid_constant__ typename SCORES::params_type params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    score_smem &smem = *(score_smem *)(void *)raw;
    if (threadIdx.x == 0) {
        init_split(smem, params);
        if (SCORES::teacher_again(params))
            smem.streamed[smem.streamed_count++] = smem.streamed[0];
    }
    __syncthreads();
    if (smem.slot.count <= 0)
        return;
    slab_stream<typename SCORES::element> slabs = {params, smem, {smem.tile_begin, 0, 0, 0}, 0, {}};
    slabs.prefetch();
    const SCORES scores(params, smem);
    __syncwarp(); /* a warp is enough: no other adds to its rows */
#pragma unroll 1
    for (int tile = smem.tile_begin; tile < smem.tile_end; tile++) {
        tile_logits p, y;
        scores.teacher(p, tile, slabs);
        scores.student(y, slabs);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            scores.finish(m, tile, p[m], y[m]);
        scores.end_tile(slabs, p);
    }
}

/* Teacher LSEs, written to rows.lse_t. One block per head and 128 queries, over all of their visible keys. */
template <typename ELEMENT>
__global__ void __launch_bounds__(THREADS, 2) lse_kernel(const __grid_constant__ strip_params params)
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
    slab_stream<ELEMENT> slabs = {params, smem, {smem.tile_begin, 0, 0, 0}, 0, {}};
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
        const float lse = lse_of_lanes(params, slot, row, rows[e / 2][e % 2]);
        if (threadIdx.x % 4 == 0 && row < slot.count)
            skl_row_set(&params.call.rows.lse_t, &slot.sequence, slot.head, slot.first + row, lse);
    }
}

} // namespace sm80

#endif
