/* Gradients from strips: the parts that the mma.sync and the wgmma kernels share. From differences G (strip.cuh):
 *
 *   queries    dq_g = scale w_g D_g      D_g = (G [A_g > 0]) k       dw_g = scale <q_g, D_g>
 *   keys       dk   = scale sum_g (w_g G [A_g > 0])^T q_g            A_g = q_g k^T, recomputed */
#ifndef SKL_CUDA_COMMON_STRIPS_GRADIENTS_CUH
#define SKL_CUDA_COMMON_STRIPS_GRADIENTS_CUH

#include "base/convert.h"
#include "cuda/common/gradient_row.cuh"
#include "cuda/common/row_stats.cuh"
#include "cuda/common/strips/strip.cuh"

namespace tensor_core
{

/* G times its weight where the ReLU of the logit is active, 0 elsewhere. Multiplies by 0 instead of selecting, so
 * that NaN stays NaN. */
__device__ inline float gate(float g, float logit, float weight, float least)
{
    return g * (logit > least ? weight : 0.0F);
}

/* Two of them in 16 bits. */
template <typename ELEMENT>
__device__ inline uint32_t gate_pair(float2 pair, float low, float high, float2 weights, float least)
{
    return pack(gate(pair.x, low, weights.x, least), gate(pair.y, high, weights.y, least), ELEMENT());
}

/* ---- Units of f16 -------------------------------------------------------------------------------------------- */

/* The unit of a row whose f16 operands are multiples of it: the power of two with 2^14 <= largest / unit < 2^15;
 * 1 if `largest` is 0 or not finite. */
__device__ inline float unit_for(float largest)
{
    constexpr int ROOM = 14;
    const int exponent = (int)(__float_as_uint(largest) >> 23) - 127; /* 2^exponent <= largest */
    return largest > 0.0F && largest < INFINITY ? power_of_2(max(exponent - ROOM, -126)) : 1.0F;
}

/* ---- Queries ------------------------------------------------------------------------------------------------ */

__device__ constexpr skl_dtype dtype_of(skl_bf16)
{
    return SKL_BF16;
}

__device__ constexpr skl_dtype dtype_of(skl_f16)
{
    return SKL_F16;
}

/* <q_g, D_g> over min(8 N, dim) dimensions, in each of the four lanes that hold D_g as sum(n, parity). Terms with
 * D_g = 0 are skipped, so that a non-finite query that attends to nothing adds nothing. */
template <typename ELEMENT, int N, typename SUM>
__device__ inline float dot_of(SUM sum, const ELEMENT *query, int dim)
{
    float dot = 0.0F;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float low = sum(n, 0), high = sum(n, 1);
        const uint32_t pair =
            acc_column(n, 0) < dim ? __ldg((const uint32_t *)(const void *)(query + acc_column(n, 0))) : 0U;
        const float2 q = unpack(pair, ELEMENT());
        dot = low != 0.0F ? fmaf(low, q.x, dot) : dot;
        dot = high != 0.0F ? fmaf(high, q.y, dot) : dot;
    }
    dot += __shfl_xor_sync(~0U, dot, 1);
    return dot + __shfl_xor_sync(~0U, dot, 2);
}

/* Stores rows of dq and dw. */
template <typename ELEMENT, int DIM> struct query_gradients {
    const strip_params &params;
    const query_slot &slot;
    int head; /* head of q_s */

    /* sum(n, parity): element acc_column(n, parity) of D_g. */
    template <typename SUM> __device__ void store_row(int row, SUM sum) const
    {
        const skl_problem &p = params.problem;
        const skl_output &dq = params.call.gradients.dq_s, &dw = params.call.gradients.dw_s;
        const skl_input &q = params.call.inputs.q_s;
        const int index_head = head % (int)p.index_heads, dim = (int)p.dim_s;
        const int64_t batch = slot.sequence.batch;
        const int64_t query = slot.sequence.query_begin + slot.first + min(row, slot.count - 1);
        const float dot =
            dw.data != NULL
                ? dot_of<ELEMENT, DIM / 8>(sum, (const ELEMENT *)q.data + SKL_ROW(q, batch, head, query), dim)
                : 0.0F;
        if (row >= slot.count)
            return;
        const range32 sees = visible_range(params, slot, row, 0);
        const bool blind = sees.begin >= sees.end; /* exactly 0, whatever its weight and upstream gradient are */
        const float scale = blind ? 0.0F : p.scale_s * G_UNIT * upstream_of(params, slot, slot.first + row);
        if (dw.data != NULL && threadIdx.x % 4 == 0)
            skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w), SKL_ROW(dw, batch, slot.head, query) + index_head,
                      dot * scale);
        if (dq.data == NULL)
            return;
        const float weight = weight_at(params, batch, slot.head, query, index_head);
        const float factor = blind ? 0.0F : scale * weight;
        const gradient_columns columns(dq.data, SKL_ROW(dq, batch, head, query),
                                       skl_grad_dtype(&p, dtype_of(ELEMENT())), dim);
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
            columns.store_pair(n, sum(n, 0) * factor, sum(n, 1) * factor, ELEMENT());
    }
};

/* ---- Keys --------------------------------------------------------------------------------------------------- */

/* The work of a block: a tile of keys, and a split of the slots that attend to them. */
struct key_work {
    skl_sequence sequence;
    int64_t item; /* index of the sequence in the batch */
    int key_head, tile;
    range32 heads;            /* student heads with a head that has these keys */
    int tile_begin, tile_end; /* query tiles that attend to the keys */
    int split;
    int stages;
};

/* Slots of a student head that attend to the block's keys and belong to the strip. */
__device__ inline range32 slots_of_head(const strip_params &params, const key_work &work, int head)
{
    const int tiles = (int)skl_ceil_div(params.problem.len_q, SIDE);
    const int begin = ((int)work.item * (int)params.problem.heads_s + head) * tiles; /* slot of the last tile */
    const int strip_begin = (int)params.strip_first, strip_end = strip_begin + (int)params.strip_count;
    const int end = min(begin + tiles - work.tile_begin, strip_end);
    return {min(max(begin + tiles - work.tile_end, strip_begin), end), end};
}

/* Calls visit(slot) for every slot of the block's split, in order. The slots of all heads that share the keys are
 * divided into splits of equal size. */
template <typename VISIT>
__device__ inline void for_slots(const strip_params &params, const key_work &work, VISIT visit)
{
    int count = 0;
    for (int head = work.heads.begin; head < work.heads.end; head++) {
        const range32 slots = slots_of_head(params, work, head);
        count += slots.end - slots.begin;
    }
    int skip = (int)((int64_t)count * work.split / params.num_splits);
    int left = (int)((int64_t)count * (work.split + 1) / params.num_splits) - skip;
    for (int head = work.heads.begin; head < work.heads.end && left > 0; head++) {
        const range32 slots = slots_of_head(params, work, head);
        for (int slot = slots.begin + skip; slot < slots.end && left > 0; slot++, left--)
            visit(slot);
        skip = max(0, skip - (slots.end - slots.begin));
    }
}

/* The work of a block; its queries are streamed in stages of ROWS. */
template <int ROWS> __device__ inline key_work key_work_of_block(const strip_params &params, unsigned block)
{
    const skl_problem &p = params.problem;
    const strip_side &wrt = params.wrt;
    const int64_t tiles = skl_ceil_div(p.len_k, SIDE);
    const int64_t index = block / params.num_splits;
    key_work work = {};
    work.item = index / tiles / wrt.key_heads;
    work.sequence = device_sequence(params, work.item);
    work.key_head = (int)(index / tiles % wrt.key_heads);
    const int first_head = work.key_head * wrt.heads_per_key, last_head = first_head + wrt.heads_per_key - 1;
    work.heads = {first_head / wrt.heads, last_head / wrt.heads + 1};
    work.tile = (int)(index % tiles); /* causal: longest first */
    work.split = (int)(block % params.num_splits);
    if (work.tile * SIDE >= work.sequence.key_count)
        return work;
    const skl_band band = skl_query_band(&p, &work.sequence);
    const int64_t last = skl_min((int64_t)(work.tile + 1) * SIDE, work.sequence.key_count) - 1;
    const int64_t begin = skl_band_begin(&band, (int64_t)work.tile * SIDE), end = skl_band_range(&band, last).end;
    work.tile_begin = (int)(begin / SIDE);
    work.tile_end = begin < end ? (int)skl_ceil_div(end, SIDE) : work.tile_begin;
    for_slots(params, work, [&](int) { work.stages += SIDE / ROWS * (int)p.index_heads; });
    return work;
}

__device__ inline uint32_t transpose(uint32_t matrix)
{
    uint32_t result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}

/* A 16 x 16 block of G as the A operand of G^T. */
__device__ inline uint4 transpose(const uint4 &block)
{
    return make_uint4(transpose(block.x), transpose(block.z), transpose(block.y), transpose(block.w));
}

/* Adds WIDTH dimensions, from `first` on, of a row of the block's key tile to the sums of its split. sum(n, parity):
 * element first + acc_column(n, parity). */
template <int WIDTH, typename SUM>
__device__ inline void add_key_row(const strip_params &params, const key_work &work, int row, int first, SUM sum)
{
    const int key = work.tile * SIDE + row, dim = params.wrt.dim;
    const int64_t split =
        ((int64_t)work.split * params.sum_batches + work.sequence.batch) * params.wrt.key_heads + work.key_head;
    float *const to = params.key_sums + (split * params.sum_rows + work.sequence.key_begin + key) * dim;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
        if (key < work.sequence.key_count && first + acc_column(n, 0) < dim) {
            float2 *const pair = (float2 *)(void *)(to + first + acc_column(n, 0));
            const float2 before = *pair;
            *pair = make_float2(before.x + sum(n, 0), before.y + sum(n, 1));
        }
}

} // namespace tensor_core

#endif
