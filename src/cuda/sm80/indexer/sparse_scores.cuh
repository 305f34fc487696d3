/* Scores of an indexer and of its teacher over a list of keys, by mma.sync, sm_80 and up: rows of a forward, and the
 * gradient of the index logits.
 *
 *   block     a row, then the next; 8 warps, each 32 heads x 64 keys of a tile
 *   tile      up to 128 heads x 128 keys, 64 heads x 256 keys, 32 heads x 256 keys (4 warps): a product of all heads
 *             that share a key head, so that a key is gathered once for them
 *   regs      64 products of a thread; of a head or a key nothing stays in registers
 *   shared    slabs of 64 dimensions. Queries of the product: all of them where they fit (128 heads of 576: 144 KB),
 *             or else a slab with each slab of keys. Keys: 2 to 4 stages of 16 or 32 KB. 87 KB are enough for all
 *   memory    [top_k] sums of each block: what a product adds to the teacher's mean, or to the index logits
 *
 *   slabs n + 1 .. n + 3 are gathered  |  X += slab n (mma);  behind a tile's last one, over its heads,
 *                                      |  mean_j += sum_h 2^(x_hj - lse_h)   or   y_j += sum_g w_g relu(x_gj)
 *
 * The mean is kept beside its largest term, in logarithms, so that nothing underflows: KL(S || P) feels that.
 * LSEs of the teacher's heads, where the caller has none, take a sweep of their own before. Behind the last product a
 * row's sums are put together, and its gradients S - P follow from them at once: both are one launch. */
#ifndef SKL_CUDA_SM80_INDEXER_SPARSE_SCORES_CUH
#define SKL_CUDA_SM80_INDEXER_SPARSE_SCORES_CUH

#include "cuda/common/indexer/write_row.cuh"
#include "cuda/sm80/indexer/sparse_row.cuh"

namespace sm80
{

constexpr int WARP_HEADS = 32, WARP_KEYS = 64; /* of a tile */
constexpr int TILE_KEYS_MAX = 256;             /* a thread for each in what follows a tile */
constexpr int TILE_SIZE = WARP_HEADS * WARP_KEYS * SPARSE_WARPS;
constexpr int SPARSE_STAGES_MAX = 4;
typedef logits<WARP_HEADS / 16, WARP_KEYS / 8> sparse_logits; /* of a warp */

/* How the warps share a product of so many heads. */
struct tile_shape {
    int warps_m, keys; /* warps along heads, keys of a tile */

    __host__ __device__ explicit tile_shape(int heads)
        : warps_m(heads > 2 * WARP_HEADS ? 4
                  : heads > WARP_HEADS   ? 2
                                         : 1),
          keys(warps_m == 4 ? 128 : TILE_KEYS_MAX)
    {
    }
    __host__ __device__ int heads() const
    {
        return warps_m * WARP_HEADS;
    }
    /* Bytes of a slab. */
    __host__ __device__ int query_size() const
    {
        return heads() * SLAB * 2;
    }
    __host__ __device__ int key_size() const
    {
        return keys * SLAB * 2;
    }
};

/* One product: heads of the row times the keys on its list. */
template <typename ELEMENT> struct sparse_product {
    row_source<ELEMENT> queries, keys;
    int heads;
    tile_shape shape;
};

template <typename ELEMENT> struct sparse_smem {
    sparse_row32 place; /* all these here, and not in the registers of every thread */
    sparse_product<ELEMENT> product;
    lse_row *mean; /* of this block */
    float *logits;
    skl_lse2 lse[SPARSE_HEADS];              /* of the teacher heads of a product */
    float weights[SPARSE_HEADS];             /* of the index heads of one */
    lse_row partial[TILE_SIZE / WARP_HEADS]; /* [warp along heads][key]; or [warp along keys][head] of LSEs */
    index_row rows[SPARSE_WARPS];
    index_row row;                        /* all of it */
    __align__(128) unsigned char slabs[]; /* of queries that stay, then stages */
};

/* ---- Products ----------------------------------------------------------------------------------------------- */

template <typename ELEMENT> struct sparse_gemm {
    const sparse_params &params;
    sparse_smem<ELEMENT> &smem;

    /* Says what the product is of, for all threads. */
    __device__ void begin(const skl_cuda_argument &side, int first, int count, int key_head) const
    {
        __syncthreads(); /* nobody looks at the last product any more */
        if (threadIdx.x == 0)
            smem.product = {heads_of<ELEMENT>(side, smem.place, first),
                            gathered_keys_of<ELEMENT>(side, smem.place, key_head), count, tile_shape(count)};
        __syncthreads();
    }

    __device__ const tile_shape &shape() const
    {
        return smem.product.shape;
    }
    __device__ int slabs() const
    {
        return (smem.product.queries.dim + SLAB - 1) / SLAB;
    }
    __device__ int stage_size() const
    {
        return shape().key_size() + (params.resident ? 0 : shape().query_size());
    }
    __device__ unsigned char *stage(int slot) const
    {
        return smem.slabs + (params.resident ? slabs() * shape().query_size() : 0) + slot * stage_size();
    }
    __device__ staged_rows<SLAB> &staged_keys(int slot) const
    {
        return *(staged_rows<SLAB> *)(void *)stage(slot);
    }
    __device__ staged_rows<SLAB> &staged_queries(int slot, int slab) const
    {
        unsigned char *const at =
            params.resident ? smem.slabs + slab * shape().query_size() : stage(slot) + shape().key_size();
        return *(staged_rows<SLAB> *)(void *)at;
    }

    /* The warp's place in a tile; some have none. */
    __device__ int warp_head() const
    {
        return (int)threadIdx.x / 32 % shape().warps_m * WARP_HEADS;
    }
    __device__ int warp_key() const
    {
        return (int)threadIdx.x / 32 / shape().warps_m * WARP_KEYS;
    }
    __device__ bool has_part() const
    {
        return warp_key() < shape().keys;
    }

    __device__ void copy(int slot, int tile, int slab) const
    {
        const sparse_product<ELEMENT> &product = smem.product;
        if (tile == 0 || !params.resident)
            gather_rows(&staged_queries(slot, slab), shape().heads(), product.queries, slab * SLAB,
                        [&](int n) { return n < product.heads ? n : -1; });
        const int first = tile * shape().keys;
        gather_rows(&staged_keys(slot), shape().keys, product.keys, slab * SLAB,
                    [&](int n) { return smem.place.key(first + n); });
    }

    __device__ void add_slab(sparse_logits &x, int slot, int slab) const
    {
        add_staged<ELEMENT, SLAB>(x.at, at_chunk<SLAB>(own_operand(staged_queries(slot, slab)), warp_head(), 0),
                                  at_chunk<SLAB>(logit_operand<2>(staged_keys(slot)), warp_key(), 0));
    }

    __device__ static void wait(int stages)
    {
        if (stages == 4)
            cp_async_wait<2>();
        else if (stages == 3)
            cp_async_wait<1>();
        else
            cp_async_wait<0>();
        __syncthreads(); /* this stage is complete, and the one before it free */
    }

    /* finish(x, first) makes something of every tile of products, whose first entry is `first`. */
    template <typename FINISH> __device__ void run(FINISH finish) const
    {
        const int stages = min(SPARSE_STAGES_MAX, params.stage_size / stage_size());
        const int tiles = (smem.place.count + shape().keys - 1) / shape().keys;
        int ahead_tile = 0, ahead_slab = 0, ahead_slot = 0;
        const auto copy_next = [&] {
            if (ahead_tile < tiles)
                copy(ahead_slot, ahead_tile, ahead_slab);
            cp_async_commit();
            ahead_slot = ahead_slot + 1 < stages ? ahead_slot + 1 : 0;
            ahead_slab++;
            if (ahead_slab < slabs())
                return;
            ahead_slab = 0;
            ahead_tile++;
        };
        __syncthreads(); /* nobody looks at the last stages any more */
        for (int n = 0; n < stages - 1; n++)
            copy_next();
        int slot = 0;
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            sparse_logits x = {};
#pragma unroll 1
            for (int slab = 0; slab < slabs(); slab++) {
                wait(stages);
                copy_next();
                if (has_part())
                    add_slab(x, slot, slab);
                slot = slot + 1 < stages ? slot + 1 : 0;
            }
            finish(x, tile * shape().keys);
        }
    }
};

/* ---- Sums over heads ---------------------------------------------------------------------------------------- */

__device__ inline float other_lane(float value, int offset)
{
    return __shfl_xor_sync(~0U, value, offset);
}

__device__ inline lse_row other_lane(const lse_row &value, int offset)
{
    return {__shfl_xor_sync(~0U, value.m, offset), __shfl_xor_sync(~0U, value.l, offset)};
}

__device__ inline float merge_rows(float a, float b)
{
    return a + b;
}

__device__ inline float select(bool first, float a, float b)
{
    return first ? a : b;
}

/* Number by number: the choice between two structs is one between addresses, for which they would go to memory. */
__device__ inline lse_row select(bool first, const lse_row &a, const lse_row &b)
{
    return {first ? a.m : b.m, first ? a.l : b.l};
}

/* Merges a warp's columns, of(n) of a thread, over its 8 groups of lanes, each of which has some heads. A step halves
 * the columns that a lane has, to COUNT of them, and the last one leaves it those of keys 2 lane and 2 lane + 1. */
template <int COUNT, typename OF> __device__ inline auto merge_heads(int n, OF of)
{
    const auto column = [&](int c) {
        if constexpr (COUNT == WARP_KEYS / 8)
            return of(c);
        else
            return merge_heads<COUNT * 2>(c, of);
    };
    const auto low = column(n), high = column(n + COUNT);
    const bool upper = (threadIdx.x & (unsigned)(COUNT * 2)) != 0;
    return merge_rows(select(upper, high, low), other_lane(select(upper, low, high), COUNT * 2));
}

/* Adds a tile to sums of entries, of the block: of(n) has a thread's heads of its column n. */
template <typename VALUE, typename GEMM, typename OF>
__device__ inline void add_heads(VALUE *const &sums, bool begins, const GEMM &gemm, int first, OF of)
{
    VALUE *const partial = (VALUE *)(void *)gemm.smem.partial;
    const int keys = gemm.shape().keys;
    if (gemm.has_part()) {
        VALUE *const to = partial + gemm.warp_head() / WARP_HEADS * keys + gemm.warp_key();
        to[threadIdx.x % 32 * 2] = merge_heads<2>(0, of);
        to[threadIdx.x % 32 * 2 + 1] = merge_heads<2>(1, of);
    }
    __syncthreads();
    const int key = (int)threadIdx.x, entry = first + key;
    if (key >= keys || entry >= gemm.smem.place.count)
        return;
    VALUE sum = partial[key];
    for (int warp = 1; warp < gemm.shape().warps_m; warp++)
        sum = merge_rows(sum, partial[warp * keys + key]);
    sums[entry] = begins ? sum : merge_rows(sums[entry], sum);
}

/* ---- The teacher -------------------------------------------------------------------------------------------- */

/* Head of a product that row m, half of a thread is. */
template <typename GEMM> __device__ inline int head_of(const GEMM &gemm, int m, int half)
{
    return gemm.warp_head() + m * 16 + (int)threadIdx.x % 32 / 4 + half * 8;
}

/* LSEs of the product's heads over the list, to block.lse. Sums of a warp's heads and keys wait in shared memory. */
template <typename ELEMENT> __device__ inline void find_lse(const sparse_gemm<ELEMENT> &gemm)
{
    sparse_smem<ELEMENT> &smem = gemm.smem;
    for (int n = (int)threadIdx.x; n < TILE_SIZE / WARP_HEADS; n += SPARSE_THREADS)
        smem.partial[n] = {-INFINITY, 0.0F};
    gemm.run([&](const sparse_logits &x, int first) {
        if (!gemm.has_part())
            return;
        const int entry = first + gemm.warp_key() + (int)threadIdx.x % 32;
        const uint64_t low = __ballot_sync(~0U, smem.place.key(entry) >= 0);
        const uint64_t seen = low | (uint64_t)__ballot_sync(~0U, smem.place.key(entry + 32) >= 0) << 32;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            lse_row rows[2] = {{-INFINITY, 0.0F}, {-INFINITY, 0.0F}};
            add_tile(rows, x.at[m], gemm.params.teacher.scale,
                     [&](int, int column) { return (seen >> column & 1U) != 0; });
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const lse_row row = merge_lanes(rows[half]);
                lse_row &sum = smem.partial[gemm.warp_key() / WARP_KEYS * SPARSE_HEADS + head_of(gemm, m, half)];
                if (threadIdx.x % 4 == 0)
                    sum = merge_rows(sum, row);
            }
        }
    });
    __syncthreads();
    const int head = (int)threadIdx.x;
    if (head >= smem.product.heads)
        return;
    lse_row row = smem.partial[head];
    for (int warp = 1; warp < gemm.shape().keys / WARP_KEYS; warp++)
        row = merge_rows(row, smem.partial[warp * SPARSE_HEADS + head]);
    smem.lse[head] = skl_lse2_split(row.l == 0.0F ? -INFINITY : (double)row.m + log2((double)row.l));
}

/* LSEs of the product's teacher heads, from `first` on, to block.lse: the caller's, or over the list and to its rows.
 */
template <bool FINDS_LSE, typename ELEMENT>
__device__ inline void take_lse(const sparse_gemm<ELEMENT> &gemm, int first)
{
    sparse_smem<ELEMENT> &smem = gemm.smem;
    const sparse_row32 &at = smem.place;
    const skl_call &call = gemm.params.call;
    const int head = (int)threadIdx.x;
    if constexpr (FINDS_LSE)
        find_lse(gemm);
    if (head >= SPARSE_HEADS)
        return;
    skl_lse2 &lse = smem.lse[head];
    if (head >= smem.product.heads)
        lse = {INFINITY, 0.0F}; /* has no share in any key */
    else if (FINDS_LSE)
        skl_row_set(&call.rows.lse_t, &at.sequence, first + head, at.query,
                    (float)(((double)lse.value + (double)lse.low) * SKL_LN2_DOUBLE));
    else
        lse = skl_lse2_of(skl_row_value(&call.inputs.lse_t, &at.sequence, first + head, at.query));
}

/* One product of teacher heads adds its probabilities to the mean. */
template <typename ELEMENT> __device__ inline void add_teacher(const sparse_gemm<ELEMENT> &gemm, bool begins)
{
    const sparse_params &params = gemm.params;
    const sparse_smem<ELEMENT> &smem = gemm.smem;
    gemm.run([&](const sparse_logits &x, int tile_first) {
        const float scale = params.teacher.scale;
        skl_lse2 lse[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            lse[e] = smem.lse[head_of(gemm, e / 2, e % 2)];
        add_heads(smem.mean, begins, gemm, tile_first, [&](int c) {
            float u[4];
            lse_row sum = {-3e38F, 0.0F}; /* finite: the difference of two infinities is none */
#pragma unroll
            for (int e = 0; e < 4; e++) {
                u[e] = fmaf(x.at[e / 2][c / 2][e % 2 * 2 + c % 2], scale, -lse[e].value) - lse[e].low;
                sum.m = fmaxf(sum.m, u[e]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum.l += ex2(u[e] - sum.m);
            return sum;
        });
    });
}

/* ---- The indexer -------------------------------------------------------------------------------------------- */

/* One product of index heads from g on: adds to the logits, which are not scaled yet. */
template <typename ELEMENT> __device__ inline void add_index(const sparse_gemm<ELEMENT> &gemm, bool begins, int g)
{
    const sparse_params &params = gemm.params;
    sparse_smem<ELEMENT> &smem = gemm.smem;
    const int head = (int)threadIdx.x;
    if (head < SPARSE_HEADS)
        smem.weights[head] = head < smem.product.heads ? sparse_weight(params, smem.place, g + head) : 0.0F;
    gemm.run([&](const sparse_logits &x, int tile_first) {
        float weights[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            weights[e] = smem.weights[head_of(gemm, e / 2, e % 2)];
        add_heads(smem.logits, begins, gemm, tile_first, [&](int c) {
            float sum = 0.0F;
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum = fmaf(weights[e], at_least(x.at[e / 2][c / 2][e % 2 * 2 + c % 2], params.least), sum);
            return sum;
        });
    });
}

/* ---- Rows --------------------------------------------------------------------------------------------------- */

/* log2 of the teacher's mean, and the index logit in base 2. */
struct entry_logits {
    float u, y;
};

template <typename ELEMENT>
__device__ inline entry_logits logits_of(const sparse_params &params, const sparse_smem<ELEMENT> &smem, int n)
{
    const float y = __fmul_rn(smem.logits[n], params.student.scale);
    if (!params.with_teacher)
        return {y, y};
    const lse_row mean = smem.mean[n];
    return {mean.m + log2f(mean.l / (float)skl_group_size(&params.problem)), y};
}

/* All entries of the row, to block.row; for all threads. */
template <typename ELEMENT>
__device__ inline void sum_entries(sparse_smem<ELEMENT> &smem, const sparse_params &params)
{
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    index_row row = empty_row();
    for (int n = (int)threadIdx.x; n < smem.place.count; n += SPARSE_THREADS)
        if (smem.place.key(n) >= 0) {
            const entry_logits at = logits_of(params, smem, n);
            row = merge_rows(row, {{reverse ? at.y : at.u, 1.0F, reverse ? at.u : at.y, 1.0F, 0.0F}, 0.0F});
        }
    row = merge_lanes<32>(row);
    if (threadIdx.x % 32 == 0)
        smem.rows[threadIdx.x / 32] = row;
    __syncthreads();
    if (threadIdx.x == 0) {
        smem.row = smem.rows[0];
        for (int warp = 1; warp < SPARSE_WARPS; warp++)
            smem.row = merge_rows(smem.row, smem.rows[warp]);
    }
    __syncthreads();
}

template <typename ELEMENT>
__device__ inline void write_sparse_row(const sparse_smem<ELEMENT> &smem, const sparse_params &params)
{
    const sparse_row32 &at = smem.place;
    const skl_row_state &state = smem.row.state;
    const skl_row_state spread = {state.m_a, state.l_a, 0.0F, 0.0F, smem.row.spread};
    const skl_input &given = params.call.inputs.lse_t;
    if (threadIdx.x == 0)
        (void)::write_row(params, at.sequence, at.head, at.query, state, spread);
    if (params.call.rows.lse_t.data == NULL || (given.data == NULL && state.l_a != 0.0F))
        return; /* LSEs that were computed are there already */
    const float own_t =
        params.problem.direction == SKL_KL_REVERSE ? skl_lse(state.m_b, state.l_b) : skl_lse(state.m_a, state.l_a);
    const int64_t group = skl_group_size(&params.problem);
    for (int64_t h = at.head * group + threadIdx.x; h < (at.head + 1) * group; h += SPARSE_THREADS)
        write_lse_t(params, at.sequence, h, at.query,
                    skl_lse2_of(given.data == NULL ? 0.0F : skl_row_value(&given, &at.sequence, h, at.query)), own_t);
}

/* d KL / d index logit of every entry, less the row's upstream gradient and scale; 0 where there is no key. */
template <typename ELEMENT>
__device__ inline void write_dy(const sparse_smem<ELEMENT> &smem, const sparse_params &params, float *dy)
{
    const sparse_row32 &at = smem.place;
    const skl_inputs &in = params.call.inputs;
    const bool reverse = params.problem.direction == SKL_KL_REVERSE, one_pass = params.call.op != SKL_OP_BACKWARD;
    const skl_lse2 lse_s = skl_lse2_of(skl_row_value(&in.lse_s, &at.sequence, at.head, at.query));
    const float kl = !reverse   ? 0.0F
                     : one_pass ? skl_kl_report(skl_state_kl(&smem.row.state))
                                : skl_row_value(&in.kl, &at.sequence, at.head, at.query);
    for (int n = (int)threadIdx.x; n < at.count; n += SPARSE_THREADS) {
        const entry_logits of = logits_of(params, smem, n);
        const float v = (of.y - lse_s.value) - lse_s.low, s = ex2(v);
        const float gradient = reverse ? s * fmaf(SKL_LN2, v - of.u, -kl) : s - ex2(of.u);
        dy[n] = at.key(n) >= 0 ? gradient : 0.0F;
    }
}

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

template <bool FINDS_LSE, typename ELEMENT>
__device__ inline void score_row(sparse_smem<ELEMENT> &smem, const sparse_params &params)
{
    const sparse_gemm<ELEMENT> gemm = {params, smem};
    const int group = params.with_teacher ? (int)skl_group_size(&params.problem) : 0;
#pragma unroll 1
    for (int h = 0, count; h < group; h += count) {
        const int head = (int)smem.place.head * group + h, sharing = params.teacher.heads_per_key;
        count = min(min(group - h, sharing - head % sharing), SPARSE_HEADS);
        gemm.begin(params.teacher, head, count, head / sharing);
        take_lse<FINDS_LSE>(gemm, head);
        add_teacher(gemm, h == 0);
    }
    const int index_heads = (int)params.problem.index_heads;
#pragma unroll 1
    for (int g = 0; g < index_heads; g += SPARSE_HEADS) {
        gemm.begin(params.student, (int)smem.place.head * index_heads + g, min(index_heads - g, SPARSE_HEADS),
                   (int)smem.place.head / params.student.heads_per_key);
        add_index(gemm, g == 0, g);
    }
    __syncthreads(); /* sums are complete */
}

/* FINDS_LSE: of the teacher, which the caller has not; what that takes of registers leaves no room for two blocks. */
template <typename ELEMENT, bool FINDS_LSE>
__global__ void __launch_bounds__(SPARSE_THREADS, FINDS_LSE ? 1 : 2)
    sparse_score_kernel(const __grid_constant__ sparse_params params)
{
    extern __shared__ __align__(128) unsigned char raw[];
    sparse_smem<ELEMENT> &smem = *(sparse_smem<ELEMENT> *)(void *)raw;
    const int64_t top_k = params.problem.top_k;
    if (threadIdx.x == 0) {
        smem.mean = params.mean + blockIdx.x * top_k;
        smem.logits = params.logits + blockIdx.x * top_k;
    }
#pragma unroll 1
    for (int64_t item = params.row_first + blockIdx.x; item < params.row_end; item += gridDim.x) {
        find_row(smem.place, params, item);
        if (!smem.place.exists)
            continue;
        trim_indices(smem.place);
        if (smem.place.count > 0)
            score_row<FINDS_LSE>(smem, params);
        sum_entries(smem, params);
        if (params.call.op != SKL_OP_BACKWARD)
            write_sparse_row(smem, params);
        if (params.dy != NULL)
            write_dy(smem, params, params.dy + (item - params.row_first) * top_k);
    }
}

} // namespace sm80

#endif
