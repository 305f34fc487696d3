/* Strips and slots: one family of kernels for attention with teacher groups and for dense indexers. Its policies
 * differ in the number that a strip holds per pair of a query and a key:
 *
 *   differences   G = S - P             KL(P || S), gradients of the student; its logits are an index sum, or those
 * of an attention head, which is one index head without a ReLU; sm80, sm90 ratios        R = log2 A - log2 B
 * attention: both directions of the KL, gradients of either side, softcaps; sm80
 *
 * Gradients take three kernels per strip, or two where one launch has both queries and keys:
 *
 *   scores    logits of all heads -> G or R
 *   queries   G or R -> dq, dw
 *   keys      G or R -> dk
 *
 * G and R go through memory, but never for all pairs. A slot is 128 queries of a sequence and student head; a strip
 * is as many slots as a fixed budget holds. Strips run one after another. So no buffer grows with len_q x len_k,
 * every sum has one owner and a fixed order, and the teacher, most of the work by far, is computed only once.
 *
 *              keys, tiles of 128
 *            +----+----+----+----+
 *   slot 0   |    |    |    |####|   slots are ordered longest first under a causal mask
 *   slot 1   |    |    |####|        a tile is 8 x 8 blocks of 16 x 16, each stored as an A operand in one or two
 *   ...      +----+----+             planes of 16 bits: 16 bytes per lane and plane
 */
#ifndef SKL_CUDA_COMMON_STRIPS_STRIP_CUH
#define SKL_CUDA_COMMON_STRIPS_STRIP_CUH

#include "base/convert.h"
#include "cuda/common/strips/layout.h"
#include "cuda/common/row_state.cuh"

namespace tensor_core
{

constexpr int SIDE = SKL_STRIP_TILE; /* queries of a slot, keys of a tile */
constexpr int SLAB = 64;             /* dimensions of a head in one pipeline stage */

/* The sums of a row over some of its keys. */
struct index_row {
    skl_row_state state; /* differences: A is log2 P, B the index logits */
    float p_log_p;       /* differences: sum 2^u u with u = log2 P - m_a, which gives the entropy of P */
};

/* p_log_p after a change of the shift m_a, as in skl_state_move. */
__device__ inline float p_log_p_at(const index_row &row, float m_a)
{
    const float d = row.state.l_a == 0.0F ? 0.0F : row.state.m_a - m_a;
    return exp2f(d) * (row.p_log_p + row.state.l_a * d);
}

__device__ inline index_row merge_rows(const index_row &a, const index_row &b)
{
    const skl_row_state state = skl_state_merge(a.state, b.state);
    return {state, p_log_p_at(a, state.m_a) + p_log_p_at(b, state.m_a)};
}

/* The side that gradients are taken with respect to. */
struct strip_side {
    int heads; /* heads per slot on this side: index heads, the group size, or 1 */
    int heads_per_key, key_heads;
    int dim;
    float scale;
    skl_output dk;
    skl_dtype dk_dtype;
};

struct strip_params : skl_cuda_params {
    strip_side wrt;
    int32_t num_splits; /* splits of the keys of a slot, or of the queries for dk */
    int64_t dim_first;  /* first dimension of the slice of dk that a launch computes */
    bool with_teacher;  /* false: only the LSEs of the student are wanted */
    bool lse_given;     /* teacher LSEs are the caller's, and may cover more than the visible keys */
    float least;        /* lower bound of the ReLU: 0, or -inf without a ReLU */
    int64_t strip_first, strip_count;
    uint4 *g;              /* planes of the strip; NULL: only rows are wanted */
    index_row *split_rows; /* [slot of the strip][split of the keys][query] */
    float *key_sums;       /* dk: [split of the queries][batch][key head][row][dim] */
    int64_t sum_batches, sum_rows;
    int64_t rest_at; /* offset from the first plane to the second, in units of 16 bytes */
    float *target;   /* pooled teacher: M of blocks [slot of the strip][query][target_stride]; NULL: not pooled */
    int64_t target_stride;
    float *target_scale; /* pooled teacher in one pass: 1 / sum M, which the rows of a strip write, its gradients
                          * read; [slot of the strip][query]; else NULL: M is normalized */
};

/* Differences have gradients of the student alone. */
__device__ inline const skl_cuda_argument &wrt_of(const strip_params &params)
{
    return params.b;
}

/* ---- Slots -------------------------------------------------------------------------------------------------- */

/* 128 queries of one sequence and head. */
struct query_slot {
    skl_sequence sequence;
    int head;
    int first, count;         /* queries; count is 0 or less for a slot after the sequence's end */
    int tile_begin, tile_end; /* key tiles that some of them may attend to */
    int full_begin, full_end; /* keys that all of them attend to */
};

__device__ inline query_slot slot_at(const strip_params &params, unsigned index, unsigned heads)
{
    const skl_problem &p = params.problem;
    const unsigned tiles = (unsigned)skl_ceil_div(p.len_q, SIDE);
    query_slot slot = {};
    slot.sequence = device_sequence(params, index / tiles / heads);
    slot.head = (int)(index / tiles % heads);
    slot.first = (int)(tiles - 1 - index % tiles) * SIDE; /* causal: longest first */
    slot.count = (int)skl_min(SIDE, slot.sequence.query_count - slot.first);
    if (slot.count <= 0)
        return slot;
    const skl_range top = skl_visible(&p, &slot.sequence, slot.first);
    const skl_range bottom = skl_visible(&p, &slot.sequence, slot.first + slot.count - 1);
    /* The range also holds tiles that no query attends to, between a `begin` and a smaller `end` of row bounds: dk
     * reads G of every slot from the first query whose `end` is after a tile's first key to the last whose `begin` is
     * not after its last key. */
    slot.tile_begin = (int)(top.begin / SIDE);
    slot.tile_end = max(slot.tile_begin, (int)skl_ceil_div(bottom.end, SIDE));
    /* Both ends of the visible range are non-decreasing in the query. Missing rows attend to nothing. */
    slot.full_begin = (int)bottom.begin;
    slot.full_end = slot.count == SIDE ? (int)top.end : 0;
    return slot;
}

/* The work of a block in a scores launch: a split of a slot's keys. */
struct slot_split {
    unsigned slot;
    int split;
};

/* L2 swizzle: blocks that run at the same time share the queries and keys of all heads. First come the first splits
 * of a few slots, then their second splits, and so on. */
__device__ inline slot_split slot_split_of_block(const strip_params &params)
{
    constexpr unsigned TOGETHER = 8; /* slots */
    const unsigned num_splits = (unsigned)params.num_splits, slots = (unsigned)params.strip_count;
    const unsigned first = blockIdx.x / (TOGETHER * num_splits) * TOGETHER;
    const unsigned item = blockIdx.x % (TOGETHER * num_splits);
    const unsigned count = min(TOGETHER, slots - first);
    return {(unsigned)params.strip_first + first + item % count, (int)(item / count)};
}

/* The key tiles of a split. */
__device__ inline range32 tiles_of_split(const query_slot &slot, int split, int num_splits)
{
    const int tiles = slot.tile_end - slot.tile_begin, share = (tiles + num_splits - 1) / num_splits;
    const int begin = slot.tile_begin + min(split * share, tiles);
    return {begin, min(begin + share, slot.tile_end)};
}

/* Visible keys of a query of the slot, counted from key `first`; empty if there is no such query. */
__device__ inline range32 visible_range(const strip_params &params, const query_slot &slot, int row, int first)
{
    if (row >= slot.count)
        return {0, 0};
    const skl_range sees = skl_visible(&params.problem, &slot.sequence, slot.first + row);
    return {(int)sees.begin - first, (int)sees.end - first};
}

/* Rows after the last query load the last query's data; they attend to nothing. */
__device__ inline int64_t query_of(const query_slot &slot, int row)
{
    return slot.first + min(row, slot.count - 1);
}

/* Whether every query of the slot attends to all keys [first, first + count). */
__device__ inline bool is_full(const query_slot &slot, int first, int count)
{
    return first >= slot.full_begin && first + count <= slot.full_end;
}

/* Rows of a head's queries, and of a key head, from `first` on. */
template <typename ELEMENT>
__device__ inline row_source<ELEMENT> query_rows(const skl_cuda_argument &side, const skl_sequence &s, int head,
                                                 int first)
{
    return {(const ELEMENT *)side.q.data + SKL_ROW(side.q, s.batch, head, s.query_begin + first), side.q.stride_row,
            side.dim};
}

template <typename ELEMENT>
__device__ inline row_source<ELEMENT> key_rows(const skl_cuda_argument &side, const skl_sequence &s, int key_head,
                                               int first)
{
    return {(const ELEMENT *)side.k.data + SKL_ROW(side.k, s.batch, key_head, s.key_begin + first), side.k.stride_row,
            side.dim};
}

/* Weight of an index head. Attention heads have none: theirs is 1. `row`: of the tensor. */
__device__ inline float weight_at(const strip_params &params, int64_t batch, int64_t head, int64_t row,
                                  int index_head)
{
    const skl_input &w = params.call.inputs.w_s;
    return w.data == NULL ? 1.0F
                          : skl_load(w.data, params.problem.dtype_w, SKL_ROW(w, batch, head, row) + index_head);
}

__device__ inline float upstream_of(const strip_params &params, const query_slot &slot, int64_t query)
{
    const skl_input &rows = params.call.inputs.grad_kl;
    return rows.data != NULL ? skl_row_value(&rows, &slot.sequence, slot.head, query) : 1.0F;
}

/* ---- Heads -------------------------------------------------------------------------------------------------- */

/* Consecutive heads of the teacher or of the student. */
struct head_list {
    int first, count;
    int heads_per_key;
    int slabs; /* slabs per head */
    bool of_b; /* heads of the student */
};

__device__ inline head_list group_heads(const strip_params &params, int head)
{
    const int group = (int)skl_group_size(&params.problem);
    return {head * group, group, params.a.heads_per_key, (params.a.dim + SLAB - 1) / SLAB, false};
}

/* The teacher's heads that scores stream: none without a teacher, and none where the target is in memory. */
__device__ inline head_list teacher_heads(const strip_params &params, int head)
{
    head_list heads = group_heads(params, head);
    heads.count = params.with_teacher && params.target == NULL ? heads.count : 0;
    return heads;
}

/* Index of a query of the slot in arrays of the strip's queries. */
__device__ inline int64_t strip_row(const strip_params &params, unsigned slot, int row)
{
    return (int64_t)(slot - (unsigned)params.strip_first) * SIDE + row;
}

/* A pooled teacher's target for a query of the slot, from block `first` on. */
__device__ inline float *target_row(const strip_params &params, unsigned slot, int row, int first)
{
    return params.target + strip_row(params, slot, row) * params.target_stride + first;
}

/* All index heads of a student head share its keys. */
__device__ inline head_list student_heads(const strip_params &params, int head)
{
    const int heads = (int)params.problem.index_heads;
    return {head * heads, heads, params.b.heads_per_key * heads, (params.b.dim + SLAB - 1) / SLAB, true};
}

/* ---- G ------------------------------------------------------------------------------------------------------ */

constexpr int G_BLOCKS = SIDE / 16;

/* G = S - P is stored in f16, which has 3 mantissa bits more than bf16, so that the operands made of it are in effect
 * rounded to bf16 once. It is stored as a multiple of G_UNIT, which maps 1 to 2^15. Upstream gradients, which may
 * have any magnitude, are applied later. */
constexpr float G_UNIT = 1.0F / 32768.0F;

/* For dk, G is multiplied by the weights and rounded again. Where that is to f16, it would be the same rounding
 * twice: a second plane holds the residual of the first rounding. */
template <typename ELEMENT> constexpr int G_PLANES = 1;
template <> constexpr int G_PLANES<skl_f16> = 2;

/* The lane's 16 bytes of a 16 x 16 block of the first plane, as an A operand. */
__device__ inline uint4 *g_block(const strip_params &params, unsigned slot, int tile, int query_block, int key_block)
{
    const int64_t tiles = skl_ceil_div(params.problem.len_k, SIDE);
    const int64_t index = ((slot - params.strip_first) * tiles + tile) * G_BLOCKS * G_BLOCKS;
    return params.g + (index + (unsigned)(query_block * G_BLOCKS + key_block)) * 32 + threadIdx.x % 32;
}

} // namespace tensor_core

#endif
