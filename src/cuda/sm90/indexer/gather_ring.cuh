/* Code that the wgmma kernels for a sparse indexer share: rows that a producer publishes, and copies of gathered
 * keys.
 *
 * Blocks are persistent and compute one row of [sequence][head][query] after another. The producer, a warpgroup, runs
 * ahead: it finds the next row, trims its list and fills the ring of stages while the consumers are at the end of the
 * row before. TMA of Hopper cannot gather, so copies are cp.async, 128 bytes of a key at a time, in the swizzle that
 * wgmma reads. */
#ifndef SKL_CUDA_SM90_INDEXER_GATHER_RING_CUH
#define SKL_CUDA_SM90_INDEXER_GATHER_RING_CUH

#include "base/convert.h"
#include "cuda/common/indexer/sparse_row.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace sm90
{

constexpr int INDEX_HEADS = SKL_SM90_INDEX_HEADS_MAX; /* heads of an index product; missing ones are zeros */
constexpr int SLAB_SIZE = STAGE_KEYS * 128;           /* bytes of 64 dimensions of a tile of keys */
constexpr int ROW_SLOTS = 2;
constexpr int PRODUCER_REGISTERS = 56; /* registers per thread */

struct sparse_params : skl_cuda_params { /* a is the teacher, b the indexer: KL(P || S) alone */
    float least;                         /* lower bound of the ReLU: 0, or -inf without a ReLU */
    bool with_teacher;                   /* false: only the LSEs of the indexer are wanted */
    bool with_mean;                      /* false: the teacher's LSEs are wanted, and nothing of its mean */
    bool splits_heads;                   /* a key head has more than 64 teacher heads: each warpgroup takes half */
    int32_t row_first, row_count;        /* rows of the launch */
    float *scores;                       /* [block][3][top_k]: mean of the teacher in two parts, index logits */
    float *dy;                           /* [row of the launch][top_k], without upstream gradient and scale */
    skl_output dk_sums;                  /* f32; no data: no dk */
};

/* ---- Rows ----------------------------------------------------------------------------------------------------- */

/* A row that the producer has found. */
struct row_slot {
    sparse_row32 row;
    float weights[INDEX_HEADS]; /* weight of each index head; 0 for missing heads */
};

struct row_ring {
    row_slot slots[ROW_SLOTS];
    int last[4]; /* entries up to the last valid one, of each warp of the producer */
    uint64_t full[ROW_SLOTS], empty[ROW_SLOTS];
};

/* Finds row n of the launch and trims its list. All threads of the producer call it, and each arrives at `full`
 * later. Returns the number of entries. */
__device__ inline int find_row(row_ring &ring, row_slot &slot, const sparse_params &params, int n)
{
    constexpr int PRODUCER_BARRIER = 1;
    const int thread = (int)(threadIdx.x % 128);
    sparse_row32 &row = slot.row;
    if (thread == 0) {
        const unsigned item = (unsigned)(params.row_first + n), len_q = (unsigned)params.problem.len_q;
        const unsigned heads = (unsigned)params.problem.heads_s; /* 32 bits: a division in 64 takes registers */
        row = to_row32(params, sparse_row_of(params, item / len_q / heads, item / len_q % heads, item % len_q));
    }
    named_barrier_sync(PRODUCER_BARRIER, 128);
    const skl_input &w = params.call.inputs.w_s;
    if (thread < INDEX_HEADS)
        slot.weights[thread] =
            row.exists && thread < params.problem.index_heads
                ? skl_load(w.data, params.problem.dtype_w,
                           SKL_ROW(w, row.sequence.batch, row.head, row.sequence.query_begin + row.query) + thread)
                : 0.0F;
    int last = 0;
#pragma unroll 8
    for (int entry = thread; entry < row.count; entry += 128)
        last = row.key(entry) >= 0 ? entry + 1 : last;
    last = __reduce_max_sync(~0U, last);
    if (thread % 32 == 0)
        ring.last[thread / 32] = last;
    named_barrier_sync(PRODUCER_BARRIER, 128);
    const int count = max(max(ring.last[0], ring.last[1]), max(ring.last[2], ring.last[3]));
    if (thread == 0)
        row.count = count;
    named_barrier_sync(PRODUCER_BARRIER, 128);
    return count;
}

/* ---- Copies --------------------------------------------------------------------------------------------------- */

/* Arrives at the barrier once the thread's copies so far have landed. */
__device__ inline void cp_async_arrive(uint64_t &barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

/* Starts copying 64 rows to [slab][row][128 bytes]. Lanes 0 to 15 of warp w have the source rows of rows 16 w to
 * 16 w + 15. Row -1 and dimensions from from.dim on become 0. */
template <int SLABS, typename ELEMENT>
__device__ inline void copy_tile(unsigned char *to, const row_source<ELEMENT> &from, int source_rows)
{
    const int lane = (int)(threadIdx.x % 32), chunk = lane % 8;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int row = (int)(threadIdx.x % 128 / 32) * 16 + n * 4 + lane / 8;
        const int source_row = __shfl_sync(~0U, source_rows, n * 4 + lane / 8);
        const ELEMENT *const source = from.rows + max(source_row, 0) * from.stride + chunk * 8;
        const uint32_t target = shared_address(to) + (uint32_t)(row * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++)
            cp_async_16(target + slab * SLAB_SIZE, source + slab * 64,
                        source_row >= 0 && slab * 64 + chunk * 8 < from.dim ? 16 : 0);
    }
}

/* The row of a tile whose source a lane of the producer looks up. */
__device__ inline int looked_up_row()
{
    return (int)(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16);
}

/* Copies the queries of `count` heads, at most 64. */
template <int SLABS, typename ELEMENT>
__device__ inline void copy_heads(unsigned char *to, const row_source<ELEMENT> &from, int count)
{
    const int head = looked_up_row();
    copy_tile<SLABS>(to, from, head < count ? head : -1);
}

/* Stage of a ring, and the parity of its round. */
template <int DEPTH> struct ring_position {
    int stage = 0, phase = 0;

    __device__ void next()
    {
        stage = stage + 1 < DEPTH ? stage + 1 : 0;
        phase ^= stage == 0;
    }
};

} // namespace sm90

#endif
