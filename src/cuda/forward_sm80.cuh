/* Forward on tensor cores by mma.sync, sm_80 and up: 16-bit types, one teacher head a student head.
 *
 *   block   8 warps, 128 queries; a warp owns 16 of them and all 64 keys of a tile
 *   regs    Q_t and Q_s as A operands (DIM / 4 each), the X and Y tiles (32 each), a row state for 2 rows
 *   shared  2 stages of K_t and K_s, [64][DIM] each, 16-byte chunks exchanged by chunk ^= row % 8: ldmatrix without
 *           bank conflicts. 64 KB at DIM = 128
 *
 *   tile n + 1 is copied (cp.async)  |  X, Y of tile n (mma)  |  both exponentials and the KL sums of tile n
 *
 * A thread keeps the state of its own 16 columns of each of its rows; four lanes merge theirs at the end. The
 * stabiliser is lazy: see docs/maths.md. */
#ifndef SKL_CUDA_FORWARD_SM80_CUH
#define SKL_CUDA_FORWARD_SM80_CUH

#include "base/kl_math.h"
#include "cuda/launch.h"
#include "cuda/ptx.cuh"
#include "cuda/sequence.cuh"

namespace forward_sm80
{

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_Q = 16 * WARPS;
constexpr int TILE_K = 64;
constexpr int BLOCKS_N = TILE_K / 8; /* 16 x 8 accumulator blocks of a warp */
constexpr int STAGES = 2;

/* Rows 0 and 1 of a thread are lane / 4 and lane / 4 + 8 of its warp's 16. */
constexpr int ROWS = 2;

typedef float tile_fragment[BLOCKS_N][4]; /* [block][row * 2 + column parity] */

template <int DIM> struct key_stage {
    uint4 chunks[TILE_K * DIM / 8]; /* 16 bytes, 8 elements each */
};

template <int DIM> struct shared_memory {
    key_stage<DIM> k_t[STAGES], k_s[STAGES];
};

/* Address of 16-byte chunk `chunk` of row `row`. */
template <int DIM> __device__ inline uint32_t chunk_address(const key_stage<DIM> &stage, int row, int chunk)
{
    return shared_address(stage.chunks) + (uint32_t)(row * (DIM / 8) + (chunk ^ (row & 7))) * 16;
}

/* Starts copying keys [first, first + TILE_K) of one side; rows and dimensions that are not there become 0. */
template <int DIM, typename ELEMENT>
__device__ inline void copy_keys(key_stage<DIM> &to, const ELEMENT *keys, int64_t stride, int first, int key_count,
                                 int dim)
{
    constexpr int CHUNKS = DIM / 8;
    static_assert(TILE_K * CHUNKS % THREADS == 0, "every thread copies as many chunks");
#pragma unroll
    for (int n = 0; n < TILE_K * CHUNKS / THREADS; n++) {
        const int at = (int)threadIdx.x + n * THREADS;
        const int row = at / CHUNKS;
        const int chunk = at % CHUNKS;
        const bool inside = first + row < key_count && chunk * 8 < dim;
        const ELEMENT *const from = inside ? keys + (first + row) * stride + chunk * 8 : keys;
        cp_async_16(chunk_address(to, row, chunk), from, inside ? 16 : 0);
    }
}

/* A operands of a warp's 16 queries, straight from global memory. */
template <int DIM, typename ELEMENT>
__device__ inline void load_queries(uint32_t (&q)[DIM / 16][4], const ELEMENT *queries, int64_t stride, int64_t first,
                                    int64_t query_count, int dim)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t row = first + (int)threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int step = 0; step < DIM / 16; step++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int64_t i = row + part % 2 * 8;
            const int c = step * 16 + lane % 4 * 2 + part / 2 * 8;
            const bool inside = i < query_count && c < dim;
            q[step][part] = inside ? *(const uint32_t *)(const void *)(queries + i * stride + c) : 0U;
        }
}

/* x = q k^T for a warp's 16 queries and the 64 keys of a stage. */
template <int DIM, typename ELEMENT>
__device__ inline void multiply(tile_fragment &x, const uint32_t (&q)[DIM / 16][4], const key_stage<DIM> &k)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < BLOCKS_N; block++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[block][e] = 0.0F;
#pragma unroll
    for (int step = 0; step < DIM / 16; step++)
#pragma unroll
        for (int pair = 0; pair < BLOCKS_N / 2; pair++) {
            uint32_t b[4]; /* keys 16 pair + {0..7, 8..15}, dimensions 16 step + {0..7, 8..15} */
            ldmatrix_x4(b, chunk_address(k, pair * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
            mma_m16n8k16(x[2 * pair], q[step], b[0], b[1], ELEMENT());
            mma_m16n8k16(x[2 * pair + 1], q[step], b[2], b[3], ELEMENT());
        }
}

/* ---- Row states --------------------------------------------------------------------------------------------- */

/* Key of element e of a block, counted from the tile's first. */
__device__ inline int column_of(int block, int e)
{
    return block * 8 + (int)threadIdx.x % 4 * 2 + e % 2;
}

struct sums {
    float l_1, l_2, w;
};

/* Sums over a thread's columns of one row; `visible` counts from the tile's first key. */
template <bool MASKED>
__device__ inline sums sum_columns(const tile_fragment &a, float scale_a, float m_1, const tile_fragment &b,
                                   float scale_b, float m_2, int row, int begin, int end)
{
    sums even = {0.0F, 0.0F, 0.0F}, odd = {0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int block = 0; block < BLOCKS_N; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int e = row * 2 + parity;
            const float u = fmaf(a[block][e], scale_a, -m_1);
            const float v = fmaf(b[block][e], scale_b, -m_2);
            const float p = ex2(u);
            const float s = ex2(v);
            sums &chain = parity ? odd : even;
            if (MASKED && (column_of(block, e) < begin || column_of(block, e) >= end))
                continue;
            chain.l_1 += p;
            chain.l_2 += s;
            chain.w = fmaf(p, u - v, chain.w);
        }
    const sums total = {even.l_1 + odd.l_1, even.l_2 + odd.l_2, even.w + odd.w};
    return total;
}

/* With the true maximum: for masked tiles, a row's first, and where sums outgrew the stabiliser. */
__device__ inline void add_exactly(skl_row_state &state, const tile_fragment &a, float scale_a,
                                   const tile_fragment &b, float scale_b, int row, int begin, int end)
{
    float m_1 = state.m_1, m_2 = state.m_2;
    bool any = false;
#pragma unroll
    for (int block = 0; block < BLOCKS_N; block++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            const int e = row * 2 + parity;
            const bool seen = column_of(block, e) >= begin && column_of(block, e) < end;
            m_1 = seen ? fmaxf(m_1, a[block][e] * scale_a) : m_1;
            m_2 = seen ? fmaxf(m_2, b[block][e] * scale_b) : m_2;
            any = any || seen;
        }
    if (!any)
        return;
    state = skl_state_move(state, m_1, m_2);
    const sums tile = sum_columns<true>(a, scale_a, m_1, b, scale_b, m_2, row, begin, end);
    state.l_1 += tile.l_1;
    state.l_2 += tile.l_2;
    state.w += tile.w;
}

/* Adds a tile that every row of the warp sees whole. */
__device__ inline void add_blindly(skl_row_state (&state)[ROWS], const tile_fragment &a, float scale_a,
                                   const tile_fragment &b, float scale_b)
{
    sums tile[ROWS];
    bool fine = true;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        tile[row] = sum_columns<false>(a, scale_a, state[row].m_1, b, scale_b, state[row].m_2, row, 0, TILE_K);
        fine = fine && tile[row].l_1 < SKL_LAZY_BOUND && tile[row].l_2 < SKL_LAZY_BOUND;
    }
    if (__any_sync(~0U, !fine)) {
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            add_exactly(state[row], a, scale_a, b, scale_b, row, 0, TILE_K);
        return;
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        state[row].l_1 += tile[row].l_1;
        state[row].l_2 += tile[row].l_2;
        state[row].w += tile[row].w;
    }
}

/* ---- One query tile ----------------------------------------------------------------------------------------- */

/* One argument of the KL. */
template <typename ELEMENT> struct argument {
    const ELEMENT *q, *k;
    int64_t q_stride, k_stride;
    int dim;
    float scale, softcap;
};

template <typename ELEMENT>
__device__ inline argument<ELEMENT> argument_of(const skl_side &side, const skl_sequence &s, int64_t head)
{
    const argument<ELEMENT> one = {(const ELEMENT *)side.q->data + SKL_ROW(*side.q, s.batch, head, s.query_begin),
                                   (const ELEMENT *)side.k->data +
                                       SKL_ROW(*side.k, s.batch, skl_key_head(&side, head), s.key_begin),
                                   side.q->stride_row,
                                   side.k->stride_row,
                                   (int)side.dim,
                                   side.scale,
                                   side.softcap};
    return one;
}

/* Caps the logits of a tile, in base 2; returns what still scales them. */
__device__ inline float cap_logits(tile_fragment &x, float scale, float softcap)
{
    if (softcap == 0.0F)
        return scale * SKL_LOG2E;
#pragma unroll
    for (int block = 0; block < BLOCKS_N; block++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[block][e] = softcap * SKL_LOG2E * tanhf(x[block][e] * (scale / softcap));
    return 1.0F;
}

/* Four lanes hold a row; the lower one goes first on both sides, so that all get the same bits. */
__device__ inline skl_row_state merge_lanes(skl_row_state state)
{
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
        skl_row_state other;
        other.m_1 = __shfl_xor_sync(~0U, state.m_1, offset);
        other.l_1 = __shfl_xor_sync(~0U, state.l_1, offset);
        other.m_2 = __shfl_xor_sync(~0U, state.m_2, offset);
        other.l_2 = __shfl_xor_sync(~0U, state.l_2, offset);
        other.w = __shfl_xor_sync(~0U, state.w, offset);
        const bool lower = (threadIdx.x & (unsigned)offset) == 0;
        state = lower ? skl_state_merge(state, other) : skl_state_merge(other, state);
    }
    return state;
}

__device__ inline void write_row(const skl_cuda_params &params, const skl_sequence &s, int64_t head, int64_t query,
                                 const skl_row_state &state)
{
    if (params.call.op == SKL_OP_PARTIAL) {
        params.call.states[skl_state_index(&params.problem, &s, head, query)] = state;
        return;
    }
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    const float lse_1 = skl_lse(state.m_1, state.l_1);
    const float lse_2 = skl_lse(state.m_2, state.l_2);
    skl_row_set(&params.call.rows.kl, &s, head, query, skl_kl_report(skl_state_kl(&state)));
    skl_row_set(&params.call.rows.lse_t, &s, head, query, reverse ? lse_2 : lse_1);
    skl_row_set(&params.call.rows.lse_s, &s, head, query, reverse ? lse_1 : lse_2);
}

template <typename ELEMENT, int DIM>
__device__ inline void query_tile(const skl_cuda_params &params, shared_memory<DIM> &memory, const skl_sequence &s,
                                  int64_t head, int64_t query_first)
{
    const skl_problem &p = params.problem;
    const skl_side teacher = skl_teacher_of(&p, &params.call);
    const skl_side student = skl_student_of(&p, &params.call);
    const bool reverse = p.direction == SKL_KL_REVERSE;
    const argument<ELEMENT> one = argument_of<ELEMENT>(reverse ? student : teacher, s, head);
    const argument<ELEMENT> two = argument_of<ELEMENT>(reverse ? teacher : student, s, head);

    uint32_t q_1[DIM / 16][4], q_2[DIM / 16][4];
    load_queries<DIM>(q_1, one.q, one.q_stride, query_first, s.query_count, one.dim);
    load_queries<DIM>(q_2, two.q, two.q_stride, query_first, s.query_count, two.dim);

    const int64_t last_query = skl_min(query_first + TILE_Q, s.query_count) - 1;
    const skl_range sees_first = skl_visible(&p, &s, query_first);
    const skl_range sees_last = skl_visible(&p, &s, last_query);
    const int64_t own_query = query_first + (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4;
    skl_row_state state[ROWS] = {skl_state_empty(), skl_state_empty()};

    /* From here on keys are counted from the first tile's first: 32 bits hold what a block can see. */
    const int64_t origin = sees_first.begin / TILE_K * TILE_K;
    const int key_count = (int)(s.key_count - origin);
    const int key_end = (int)(sees_last.end - origin);
    const int whole_begin = (int)(sees_last.begin - origin), whole_end = (int)(sees_first.end - origin);
    const ELEMENT *const k_1 = one.k + origin * one.k_stride;
    const ELEMENT *const k_2 = two.k + origin * two.k_stride;
    __syncthreads(); /* the stages may still be read by the tile before */
    if (key_end > 0) {
        copy_keys<DIM>(memory.k_t[0], k_1, one.k_stride, 0, key_count, one.dim);
        copy_keys<DIM>(memory.k_s[0], k_2, two.k_stride, 0, key_count, two.dim);
    }
    cp_async_commit();
    for (int first = 0, stage = 0; first < key_end; first += TILE_K, stage = 1 - stage) {
        cp_async_wait<0>();
        __syncthreads(); /* this stage is complete, and the other one free */
        if (first + TILE_K < key_end) {
            copy_keys<DIM>(memory.k_t[1 - stage], k_1, one.k_stride, first + TILE_K, key_count, one.dim);
            copy_keys<DIM>(memory.k_s[1 - stage], k_2, two.k_stride, first + TILE_K, key_count, two.dim);
        }
        cp_async_commit();

        tile_fragment x, y;
        multiply<DIM, ELEMENT>(x, q_1, memory.k_t[stage]);
        multiply<DIM, ELEMENT>(y, q_2, memory.k_s[stage]);
        const float scale_1 = cap_logits(x, one.scale, one.softcap);
        const float scale_2 = cap_logits(y, two.scale, two.softcap);
        if (whole_begin <= first && whole_end >= first + TILE_K && first > 0) {
            add_blindly(state, x, scale_1, y, scale_2);
            continue;
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const skl_range sees = skl_visible(&p, &s, skl_min(own_query + 8 * row, last_query));
            add_exactly(state[row], x, scale_1, y, scale_2, row, (int)(sees.begin - origin) - first,
                        (int)(sees.end - origin) - first);
        }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const skl_row_state merged = merge_lanes(state[row]);
        const int64_t query = own_query + 8 * row;
        if (threadIdx.x % 4 == 0 && query < s.query_count)
            write_row(params, s, head, query, merged);
    }
}

template <typename ELEMENT, int DIM>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ skl_cuda_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    shared_memory<DIM> &memory = *(shared_memory<DIM> *)(void *)raw;
    const skl_problem &p = params.problem;
    const int64_t tiles = skl_ceil_div(p.len_q, TILE_Q);
    for (int64_t item = blockIdx.x; item < p.batch * p.heads_s * tiles; item += gridDim.x) {
        const skl_sequence s = device_sequence(params, item / (p.heads_s * tiles));
        const int64_t query_first = (tiles - 1 - item % tiles) * TILE_Q; /* causal: longest first */
        if (query_first < s.query_count)
            query_tile<ELEMENT, DIM>(params, memory, s, item / tiles % p.heads_s, query_first);
    }
}

template <typename ELEMENT, int DIM> cudaError_t launch(const skl_cuda_params *params)
{
    const cudaError_t error = cudaFuncSetAttribute(kernel<ELEMENT, DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   (int)sizeof(shared_memory<DIM>));
    if (error != cudaSuccess)
        return error;
    const skl_problem *const p = &params->problem;
    const int64_t items = p->batch * p->heads_s * skl_ceil_div(p->len_q, TILE_Q);
    const unsigned blocks = (unsigned)skl_min(items, INT32_MAX);
    kernel<ELEMENT, DIM><<<blocks, THREADS, sizeof(shared_memory<DIM>), params->call.stream>>>(*params);
    return cudaPeekAtLastError();
}

} // namespace forward_sm80

#endif
