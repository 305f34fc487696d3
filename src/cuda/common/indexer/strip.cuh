/* What the tensor-core kernels for an indexer share, by mma.sync and on Hopper.
 *
 * A gradient takes three kernels, one behind the other: scores (logits of all heads -> G, the gradient of every index
 * logit), queries (G -> dq, dw) and keys (G -> dk). Between them G lies in memory: not for all pairs, but for a
 * strip, as many tiles of 128 queries as a fixed budget holds. A strip is done before the next one begins, so nothing
 * grows with len_q x len_k, every sum has one owner and one order, and the teacher, by far the most of the work, is
 * looked at once.
 *
 *              keys, 128 a tile
 *            +----+----+----+----+
 *   slot 0   |    |    |    |####|   a slot: 128 queries of a sequence and student head; causal: longest first
 *   slot 1   |    |    |####|        a tile of G: 8 x 8 blocks of 16 x 16, each as an A operand lies in registers:
 *   ...      +----+----+             16 bytes a lane
 */
#ifndef SKL_CUDA_COMMON_INDEXER_STRIP_CUH
#define SKL_CUDA_COMMON_INDEXER_STRIP_CUH

#include "cuda/common/indexer/strip_layout.h"
#include "cuda/common/row_state.cuh"

namespace tensor_core
{

constexpr int SIDE = SKL_INDEX_TILE; /* queries of a slot, keys of a tile */
constexpr int SLAB = 64;             /* dimensions of a head that are staged together */

/* What a part of a row's keys adds to it. */
struct index_row {
    skl_row_state state; /* of log2 P and the index logits */
    float spread;        /* sum 2^u u over u = log2 P - m_a */
};

/* The spread with another m_a, as skl_state_move does it. */
__device__ inline float spread_at(const index_row &row, float m_a)
{
    const float d = row.state.l_a == 0.0F ? 0.0F : row.state.m_a - m_a;
    return exp2f(d) * (row.spread + row.state.l_a * d);
}

__device__ inline index_row merge_rows(const index_row &a, const index_row &b)
{
    const skl_row_state state = skl_state_merge(a.state, b.state);
    return {state, spread_at(a, state.m_a) + spread_at(b, state.m_a)};
}

struct index_params : skl_cuda_params {
    int32_t num_splits; /* splits of the keys of a slot, or of the queries for dk */
    int64_t dim_first;  /* first dimension of the slice of dk that a launch computes */
    bool with_teacher;  /* false: only the LSEs of the indexer are wanted */
    bool lse_given;     /* by the caller: they may cover more than is visible */
    float least;        /* a product counts if it is above: 0, or -inf without a ReLU */
    int64_t strip_first, strip_count;
    uint4 *g;              /* of the strip */
    index_row *split_rows; /* [slot of the strip][part of the keys][query] */
    float *key_sums;       /* dk: [part of the queries][batch][key head][row][dim] */
    int64_t sum_batches, sum_rows;
    int64_t rest_at; /* from a block of G to what f16 leaves of it */
};

/* ---- Slots -------------------------------------------------------------------------------------------------- */

/* 128 queries of one sequence and head. */
struct query_slot {
    skl_sequence sequence;
    int head;
    int first, count;         /* queries; count may be 0 or less */
    int tile_begin, tile_end; /* key tiles that some of them see */
    int full_begin, full_end; /* keys that all of them see */
};

__device__ inline query_slot slot_at(const index_params &params, unsigned slot, unsigned heads)
{
    const skl_problem &p = params.problem;
    const unsigned tiles = (unsigned)skl_ceil_div(p.len_q, SIDE);
    query_slot at = {};
    at.sequence = device_sequence(params, slot / tiles / heads);
    at.head = (int)(slot / tiles % heads);
    at.first = (int)(tiles - 1 - slot % tiles) * SIDE; /* causal: longest first */
    at.count = (int)skl_min(SIDE, at.sequence.query_count - at.first);
    if (at.count <= 0)
        return at;
    const skl_range top = skl_visible(&p, &at.sequence, at.first);
    const skl_range bottom = skl_visible(&p, &at.sequence, at.first + at.count - 1);
    if (top.begin < bottom.end) {
        at.tile_begin = (int)(top.begin / SIDE);
        at.tile_end = (int)skl_ceil_div(bottom.end, SIDE);
    }
    /* Neither end of what a query sees ever moves backwards. Rows that are not there see nothing. */
    at.full_begin = (int)bottom.begin;
    at.full_end = at.count == SIDE ? (int)top.end : 0;
    return at;
}

/* What a block of a scores launch does: a part of a slot's keys. */
struct slot_split {
    unsigned slot;
    int split;
};

/* Blocks that run at the same time share queries and keys of all heads, so that both stay in the L2 cache: the first
 * part of a few slots, then their second part, and so on. */
__device__ inline slot_split slot_split_of_block(const index_params &params)
{
    constexpr unsigned TOGETHER = 8; /* slots */
    const unsigned num_splits = (unsigned)params.num_splits, slots = (unsigned)params.strip_count;
    const unsigned first = blockIdx.x / (TOGETHER * num_splits) * TOGETHER, at = blockIdx.x % (TOGETHER * num_splits);
    const unsigned count = min(TOGETHER, slots - first);
    return {(unsigned)params.strip_first + first + at % count, (int)(at / count)};
}

/* What a query of the slot sees, counted from key `first`; nothing if there is no such query. */
__device__ inline range32 visible_range(const index_params &params, const query_slot &at, int row, int first)
{
    if (row >= at.count)
        return {0, 0};
    const skl_range sees = skl_visible(&params.problem, &at.sequence, at.first + row);
    return {(int)sees.begin - first, (int)sees.end - first};
}

/* Rows behind the last one do what the last one does, and see nothing. */
__device__ inline int64_t query_of(const query_slot &at, int row)
{
    return at.first + min(row, at.count - 1);
}

/* Whether every query of the slot sees all keys [first, first + count). */
__device__ inline bool is_full(const query_slot &at, int first, int count)
{
    return first >= at.full_begin && first + count <= at.full_end;
}

__device__ inline float upstream_of(const index_params &params, const query_slot &at, int64_t query)
{
    const skl_input &rows = params.call.inputs.grad_kl;
    return rows.data != NULL ? skl_row_value(&rows, &at.sequence, at.head, query) : 1.0F;
}

/* ---- Heads -------------------------------------------------------------------------------------------------- */

/* The heads of one side, from the first to the last. */
struct head_list {
    int first, count;
    int heads_per_key;
    int slabs; /* of a head */
};

__device__ inline head_list teacher_heads(const index_params &params, int head)
{
    const int group = params.with_teacher ? (int)skl_group_size(&params.problem) : 0;
    return {head * group, group, params.a.heads_per_key, (params.a.dim + SLAB - 1) / SLAB};
}

/* All index heads of a student head share its keys. */
__device__ inline head_list index_heads(const index_params &params, int head)
{
    const int heads = (int)params.problem.index_heads;
    return {head * heads, heads, params.b.heads_per_key * heads, (params.b.dim + SLAB - 1) / SLAB};
}

/* ---- G ------------------------------------------------------------------------------------------------------ */

constexpr int G_BLOCKS = SIDE / 16;

/* S - P is kept in f16, which has 3 bits more than bf16, so that what is made of it is rounded to bf16 once; in a
 * unit that lets 1 become 2^15. Upstream gradients, which may have any size, come later. */
constexpr float G_UNIT = 1.0F / 32768.0F;

/* A key gradient's G has its weights in it, and is rounded with them. Where that is to f16, once more as coarsely,
 * what the first rounding left is kept beside it. */
template <typename ELEMENT> constexpr int G_PLANES = 1;
template <> constexpr int G_PLANES<__half> = 2;

/* A lane's part of a 16 x 16 block, as an A operand. */
__device__ inline uint4 *g_block(const index_params &params, unsigned slot, int tile, int query_smem, int key_smem)
{
    const int64_t tiles = skl_ceil_div(params.problem.len_k, SIDE);
    const int64_t index = ((slot - params.strip_first) * tiles + tile) * G_BLOCKS * G_BLOCKS;
    return params.g + (index + (unsigned)(query_smem * G_BLOCKS + key_smem)) * 32 + threadIdx.x % 32;
}

} // namespace tensor_core

#endif
