/* A tile of 64 queries by 64 keys on 256 threads, in f32: logits, masks and the teacher's group.
 *
 * Thread (tx, ty) of 16 x 16 owns rows 4 ty + i and columns tx + 16 j, i, j < 4. The 16 threads of a row are half a
 * warp, so a row is reduced by shuffles. Operands pass through shared memory in chunks of 32 dimensions, converted to
 * f32 on the way: any type, stride, alignment and size will do. */
#ifndef SKL_CUDA_GENERAL_TILE_CUH
#define SKL_CUDA_GENERAL_TILE_CUH

#include "base/convert.h"
#include "base/kl_math.h"
#include "cuda/sequence.cuh"

constexpr int TILE = SKL_GENERAL_TILE;
constexpr int THREADS = 256;
constexpr int OWN = 4;    /* rows and columns of a thread */
constexpr int LANES = 16; /* threads of a row */
constexpr int CHUNK = 32; /* dimensions staged at once */

struct operands {
    float q[TILE][CHUNK + 1]; /* + 1: no two lanes of a column share a bank */
    float k[TILE][CHUNK + 1];
};

typedef float fragment[OWN][OWN]; /* what a thread owns of a tile */

/* Where a block works. */
struct place {
    skl_sequence sequence;
    int64_t head;        /* student head */
    int64_t query_first; /* of the tile */
    int64_t key_first;
};

__device__ inline int row_of(int i)
{
    return (int)threadIdx.x / LANES * OWN + i;
}

__device__ inline int column_of(int j)
{
    return (int)threadIdx.x % LANES + LANES * j;
}

/* Rows [first, first + TILE) of a tensor, dimensions [c_first, c_first + width), zeros outside [0, row_end) and dim.
 */
template <int WIDTH>
__device__ inline void stage_rows(float *to, int to_stride, const skl_input &tensor, skl_dtype dtype, int64_t base,
                                  int64_t first, int64_t row_end, int64_t c_first, int64_t dim)
{
    for (int at = (int)threadIdx.x; at < TILE * WIDTH; at += THREADS) {
        const int row = at / WIDTH;
        const int c = at % WIDTH;
        const bool inside = first + row < row_end && c_first + c < dim;
        const int64_t offset = base + (first + row) * tensor.stride_row + c_first + c;
        to[row * to_stride + c] = inside ? skl_load(tensor.data, dtype, offset) : 0.0F;
    }
}

__device__ inline int64_t query_base(const skl_side &side, const skl_sequence &s, int64_t head)
{
    return SKL_ROW(*side.q, s.batch, head, s.query_begin);
}

__device__ inline int64_t key_base(const skl_side &side, const skl_sequence &s, int64_t head)
{
    return SKL_ROW(*side.k, s.batch, skl_key_head(&side, head), s.key_begin);
}

/* x = softcap(scale <q, k>) in base 2, for one head. A call of its own: it is long, and used in many places. */
static __device__ __noinline__ void logit_tile(fragment x, operands &staged, const skl_side &side, const place &at,
                                               int64_t head)
{
    for (int i = 0; i < OWN; i++)
        for (int j = 0; j < OWN; j++)
            x[i][j] = 0.0F;
    for (int64_t c = 0; c < side.dim; c += CHUNK) {
        __syncthreads();
        stage_rows<CHUNK>(&staged.q[0][0], CHUNK + 1, *side.q, side.dtype, query_base(side, at.sequence, head),
                          at.query_first, at.sequence.query_count, c, side.dim);
        stage_rows<CHUNK>(&staged.k[0][0], CHUNK + 1, *side.k, side.dtype, key_base(side, at.sequence, head),
                          at.key_first, at.sequence.key_count, c, side.dim);
        __syncthreads();
#pragma unroll 8
        for (int step = 0; step < CHUNK; step++) {
            float q[OWN], k[OWN];
            for (int i = 0; i < OWN; i++) {
                q[i] = staged.q[row_of(i)][step];
                k[i] = staged.k[column_of(i)][step];
            }
            for (int i = 0; i < OWN; i++)
                for (int j = 0; j < OWN; j++)
                    x[i][j] += q[i] * k[j];
        }
    }
    for (int i = 0; i < OWN; i++)
        for (int j = 0; j < OWN; j++) {
            const float scaled = x[i][j] * side.scale;
            x[i][j] = SKL_LOG2E * (side.softcap > 0.0F ? side.softcap * tanhf(scaled / side.softcap) : scaled);
        }
}

/* x = log2 mean_h P_h of the heads of a group, which `lse` [group][TILE] (base 2) normalises; r = 1: plain logits. */
__device__ inline void teacher_tile(fragment x, operands &staged, const skl_side &teacher, const place &at,
                                    int64_t group, const float *lse)
{
    if (group == 1) {
        logit_tile(x, staged, teacher, at, at.head);
        return;
    }
    fragment sum, z;
    for (int64_t h = 0; h < group; h++) {
        logit_tile(z, staged, teacher, at, at.head * group + h);
        for (int i = 0; i < OWN; i++)
            for (int j = 0; j < OWN; j++) {
                const float log_p = z[i][j] - lse[h * TILE + row_of(i)];
                const float difference = h == 0 ? 0.0F : log_p - x[i][j];
                const float ratio = exp2f(-fabsf(difference));
                sum[i][j] = h == 0 ? 1.0F : difference > 0.0F ? sum[i][j] * ratio + 1.0F : sum[i][j] + ratio;
                x[i][j] = h == 0 || difference > 0.0F ? log_p : x[i][j];
            }
    }
    for (int i = 0; i < OWN; i++)
        for (int j = 0; j < OWN; j++)
            x[i][j] += log2f(sum[i][j] / (float)group);
}

/* ---- Rows --------------------------------------------------------------------------------------------------- */

/* The visible keys of a thread's rows; rows behind the last query see none. */
__device__ inline skl_range row_visible(const skl_problem &p, const place &at, int i)
{
    const int64_t row = at.query_first + row_of(i);
    const skl_range none = {0, 0};
    return row < at.sequence.query_count ? skl_visible(&p, &at.sequence, row) : none;
}

__device__ inline bool sees(const skl_range &visible, const place &at, int j)
{
    const int64_t key = at.key_first + column_of(j);
    return key >= visible.begin && key < visible.end;
}

/* Keys that some query of the tile sees, from a multiple of TILE on. */
__device__ inline skl_range tile_keys(const skl_problem &p, const place &at)
{
    const int64_t last = skl_min(at.query_first + TILE, at.sequence.query_count) - 1;
    skl_range keys = {skl_visible(&p, &at.sequence, at.query_first).begin, skl_visible(&p, &at.sequence, last).end};
    keys.begin = keys.begin / TILE * TILE;
    return keys;
}

__device__ inline float row_sum(float value)
{
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(~0U, value, offset);
    return value;
}

__device__ inline skl_row_state row_merge(skl_row_state state)
{
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        skl_row_state other;
        other.m_1 = __shfl_xor_sync(~0U, state.m_1, offset);
        other.l_1 = __shfl_xor_sync(~0U, state.l_1, offset);
        other.m_2 = __shfl_xor_sync(~0U, state.m_2, offset);
        other.l_2 = __shfl_xor_sync(~0U, state.l_2, offset);
        other.w = __shfl_xor_sync(~0U, state.w, offset);
        /* The lower lane goes first on both sides, so that both get the same bits. */
        const bool lower = (threadIdx.x & (unsigned)offset) == 0;
        state = lower ? skl_state_merge(state, other) : skl_state_merge(other, state);
    }
    return state;
}

__device__ inline bool first_lane(void)
{
    return threadIdx.x % LANES == 0;
}

/* LSEs of the group's heads for the tile's rows, base 2, as the caller gave them. */
__device__ inline void load_group_lse(float *lse, const skl_input &given, const place &at, int64_t group)
{
    for (int64_t index = threadIdx.x; index < group * TILE; index += THREADS) {
        const int64_t row = at.query_first + index % TILE;
        const bool inside = row < at.sequence.query_count;
        lse[index] =
            inside ? skl_row_value(&given, &at.sequence, at.head * group + index / TILE, row) * SKL_LOG2E : 0.0F;
    }
    __syncthreads();
}

#endif
