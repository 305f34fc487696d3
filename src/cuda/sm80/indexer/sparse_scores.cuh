/* Scores of a sparse indexer and its teacher by mma.sync, sm_80 and up: the rows of a forward, and dy, the gradient
 * of the index logits.
 *
 * All heads that share a key head are the rows of one product, so that each key is gathered once for all of them. One
 * product per entry and head on the tensor cores, and for teacher heads one exponential on the special function
 * units.
 *
 *   block      persistent, one row after another; 8 warps, each with 32 heads x 64 keys of a tile
 *   tile       up to 128 heads x 128 keys, 64 heads x 256 keys, or 32 heads x 256 keys (4 warps)
 *   registers  64 products per thread; nothing of a head or a key stays in registers
 *   shared     slabs of 64 dimensions. Queries: all slabs of a product if they fit (144 KB for 128 heads of 576),
 *              otherwise one with each slab of keys. Keys: 2 to 4 stages of 16 or 32 KB. 87 KB suffice for every size
 *   memory     [top_k] sums per block: the teacher's mean and the index logits, to which each product adds
 *
 *   cp.async   | gather slabs n + 1 .. n + 3             | gather slabs n + 2 .. n + 4
 *   warps      | X += slab n (mma)                       | X += slab n + 1
 *              | after the last slab of a tile:          |
 *              |   mean_j += sum_h 2^(x_hj - lse_h), or  |
 *              |   y_j += sum_g w_g relu(x_gj)           |
 *
 * The mean is kept relative to its largest term, as a logarithm, so that nothing underflows; KL(S || P) needs that.
 * If the caller does not give the teacher's LSEs, a pass over the entries computes them first. After the last product
 * the block reduces the row's sums, and computes dy from them in the same launch. */
#ifndef SKL_CUDA_SM80_INDEXER_SPARSE_SCORES_CUH
#define SKL_CUDA_SM80_INDEXER_SPARSE_SCORES_CUH

#include "cuda/common/indexer/write_row.cuh"
#include "cuda/sm80/indexer/sparse_row.cuh"

namespace sm80
{

constexpr int WARP_HEADS = 32, WARP_KEYS = 64; /* a warp's part of a tile */
constexpr int TILE_KEYS_MAX = 256;             /* one thread per key reduces a tile */
constexpr int TILE_SIZE = WARP_HEADS * WARP_KEYS * SPARSE_WARPS;
constexpr int SPARSE_STAGES_MAX = 4;
typedef logits<WARP_HEADS / 16, WARP_KEYS / 8> sparse_logits; /* logits of a warp */

/* How the warps share a product, by its number of heads. */
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

/* One product: heads of the row times the keys of its entries. */
template <typename ELEMENT> struct sparse_product {
    row_source<ELEMENT> queries, keys;
    int heads;
    tile_shape shape;
};

template <typename ELEMENT> struct sparse_smem {
    sparse_row32 row; /* all members are in shared memory to save registers */
    sparse_product<ELEMENT> product;
    lse_row *mean; /* the block's part of params.mean */
    float *logits;
    skl_lse2 lse[SPARSE_HEADS];              /* LSEs of the teacher heads of a product */
    float weights[SPARSE_HEADS];             /* weights of the index heads of a product */
    lse_row partial[TILE_SIZE / WARP_HEADS]; /* [warp along heads][key]; for LSEs [warp along keys][head] */
    index_row warp_sums[SPARSE_WARPS];       /* sums of the row over the entries of each warp */
    index_row sums;                          /* sums of the row over all entries */
    __align__(128) unsigned char slabs[];    /* resident queries, then stages */
};

/* ---- Products ----------------------------------------------------------------------------------------------- */

template <typename ELEMENT> struct sparse_gemm {
    const sparse_params &params;
    sparse_smem<ELEMENT> &smem;

    /* Sets the operands of the product. All threads call it. */
    __device__ void set_product(const skl_cuda_argument &side, int first, int count, int key_head) const
    {
        __syncthreads(); /* all threads are done with the previous product */
        if (threadIdx.x == 0)
            smem.product = {heads_of<ELEMENT>(side, smem.row, first), keys_of_row<ELEMENT>(side, smem.row, key_head),
                            count, tile_shape(count)};
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
    __device__ unsigned char *stage_at(int stage) const
    {
        return smem.slabs + (params.resident ? slabs() * shape().query_size() : 0) + stage * stage_size();
    }
    __device__ smem_rows<SLAB> &staged_keys(int stage) const
    {
        return *(smem_rows<SLAB> *)(void *)stage_at(stage);
    }
    __device__ smem_rows<SLAB> &staged_queries(int stage, int slab) const
    {
        unsigned char *const address =
            params.resident ? smem.slabs + slab * shape().query_size() : stage_at(stage) + shape().key_size();
        return *(smem_rows<SLAB> *)(void *)address;
    }

    /* The warp's heads and keys in a tile. With few heads some warps are not active. */
    __device__ int warp_head() const
    {
        return (int)threadIdx.x / 32 % shape().warps_m * WARP_HEADS;
    }
    __device__ int warp_key() const
    {
        return (int)threadIdx.x / 32 / shape().warps_m * WARP_KEYS;
    }
    __device__ bool is_active() const
    {
        return warp_key() < shape().keys;
    }

    __device__ void copy_stage(int stage, int tile, int slab) const
    {
        const sparse_product<ELEMENT> &product = smem.product;
        if (tile == 0 || !params.resident)
            gather_rows(&staged_queries(stage, slab), shape().heads(), product.queries, slab * SLAB,
                        [&](int n) { return n < product.heads ? n : -1; });
        const int first = tile * shape().keys;
        gather_rows(&staged_keys(stage), shape().keys, product.keys, slab * SLAB,
                    [&](int n) { return smem.row.key(first + n); });
    }

    __device__ void add_slab(sparse_logits &x, int stage, int slab) const
    {
        multiply_add_smem<ELEMENT, SLAB>(x.at, at_chunk<SLAB>(a_address(staged_queries(stage, slab)), warp_head(), 0),
                                         at_chunk<SLAB>(logit_b_address<2>(staged_keys(stage)), warp_key(), 0));
    }

    __device__ static void wait(int stages)
    {
        if (stages == 4)
            cp_async_wait<2>();
        else if (stages == 3)
            cp_async_wait<1>();
        else
            cp_async_wait<0>();
        __syncthreads(); /* this stage is complete, and the previous one is free */
    }

    /* Computes all tiles of the product and calls finish(x, first) for each; `first` is the tile's first entry. */
    template <typename FINISH> __device__ void run(FINISH finish) const
    {
        const int stages = min(SPARSE_STAGES_MAX, params.stage_size / stage_size());
        const auto is_tile = [&](int tile) { return tile * shape().keys < smem.row.count; };
        int prefetch_tile = 0, prefetch_slab = 0, prefetch_stage = 0;
        const auto copy_next = [&] {
            if (is_tile(prefetch_tile))
                copy_stage(prefetch_stage, prefetch_tile, prefetch_slab);
            cp_async_commit();
            prefetch_stage = prefetch_stage + 1 < stages ? prefetch_stage + 1 : 0;
            prefetch_slab++;
            if (prefetch_slab < slabs())
                return;
            prefetch_slab = 0;
            prefetch_tile++;
        };
        __syncthreads(); /* all threads are done with the stages of the previous pass */
        for (int n = 0; n < stages - 1; n++)
            copy_next();
        int stage = 0;
#pragma unroll 1
        for (int tile = 0; is_tile(tile); tile++) {
            sparse_logits x = {};
#pragma unroll 1
            for (int slab = 0; slab < slabs(); slab++) {
                wait(stages);
                copy_next();
                if (is_active())
                    add_slab(x, stage, slab);
                stage = stage + 1 < stages ? stage + 1 : 0;
            }
            finish(x, tile * shape().keys);
        }
    }
};

/* ---- Sums over heads ---------------------------------------------------------------------------------------- */

__device__ inline float shuffle_xor(float value, int offset)
{
    return __shfl_xor_sync(~0U, value, offset);
}

__device__ inline lse_row shuffle_xor(const lse_row &value, int offset)
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

/* Selects member by member. For a choice between two structs the compiler selects an address, which moves them to
 * local memory. */
__device__ inline lse_row select(bool first, const lse_row &a, const lse_row &b)
{
    return {first ? a.m : b.m, first ? a.l : b.l};
}

/* Merges the columns of a warp over its heads, which are spread over 8 groups of 4 lanes; of(n) is a thread's column
 * n over its own heads. Butterfly: each step halves the columns per lane, down to COUNT, and the last one leaves keys
 * 2 lane and 2 lane + 1 to each lane. */
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
    return merge_rows(select(upper, high, low), shuffle_xor(select(upper, low, high), COUNT * 2));
}

/* Adds a tile to the block's sums of entries. of(n) is a thread's column n over its own heads. is_first: the product
 * is the first of the row, and the sums start with it. */
template <typename VALUE, typename GEMM, typename OF>
__device__ inline void add_heads(VALUE *const &sums, bool is_first, const GEMM &gemm, int first, OF of)
{
    VALUE *const partial = (VALUE *)(void *)gemm.smem.partial;
    const int keys = gemm.shape().keys;
    if (gemm.is_active()) {
        VALUE *const to = partial + gemm.warp_head() / WARP_HEADS * keys + gemm.warp_key();
        to[threadIdx.x % 32 * 2] = merge_heads<2>(0, of);
        to[threadIdx.x % 32 * 2 + 1] = merge_heads<2>(1, of);
    }
    __syncthreads();
    const int key = (int)threadIdx.x, entry = first + key;
    if (key >= keys || entry >= gemm.smem.row.count)
        return;
    VALUE sum = partial[key];
    for (int warp = 1; warp < gemm.shape().warps_m; warp++)
        sum = merge_rows(sum, partial[warp * keys + key]);
    sums[entry] = is_first ? sum : merge_rows(sums[entry], sum);
}

/* ---- The teacher -------------------------------------------------------------------------------------------- */

/* The head that row (m, half) of a thread is in the product. */
template <typename GEMM> __device__ inline int head_of(const GEMM &gemm, int m, int half)
{
    return gemm.warp_head() + m * 16 + (int)threadIdx.x % 32 / 4 + half * 8;
}

/* Computes the LSEs of the product's heads over the row's entries: smem.lse. Partial sums per warp are in shared
 * memory. */
template <typename ELEMENT> __device__ inline void compute_lse(const sparse_gemm<ELEMENT> &gemm)
{
    sparse_smem<ELEMENT> &smem = gemm.smem;
    for (int n = (int)threadIdx.x; n < TILE_SIZE / WARP_HEADS; n += SPARSE_THREADS)
        smem.partial[n] = {-INFINITY, 0.0F};
    gemm.run([&](const sparse_logits &x, int first) {
        if (!gemm.is_active())
            return;
        const int entry = first + gemm.warp_key() + (int)threadIdx.x % 32;
        const uint64_t low = __ballot_sync(~0U, smem.row.key(entry) >= 0);
        const uint64_t seen = low | (uint64_t)__ballot_sync(~0U, smem.row.key(entry + 32) >= 0) << 32;
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

/* Sets smem.lse for the product's teacher heads, from `first` on: loads the LSEs, or computes them (COMPUTES_LSE) and
 * writes them to rows.lse_t. */
template <bool COMPUTES_LSE, typename ELEMENT>
__device__ inline void load_lse(const sparse_gemm<ELEMENT> &gemm, int first)
{
    sparse_smem<ELEMENT> &smem = gemm.smem;
    const sparse_row32 &row = smem.row;
    const skl_call &call = gemm.params.call;
    const int head = (int)threadIdx.x;
    if constexpr (COMPUTES_LSE)
        compute_lse(gemm);
    if (head >= SPARSE_HEADS)
        return;
    skl_lse2 &lse = smem.lse[head];
    if (head >= smem.product.heads)
        lse = {INFINITY, 0.0F}; /* a missing head: all its probabilities are 0 */
    else if (COMPUTES_LSE)
        skl_row_set(&call.rows.lse_t, &row.sequence, first + head, row.query,
                    (float)(((double)lse.value + (double)lse.low) * SKL_LN2_DOUBLE));
    else
        lse = skl_lse2_of(skl_row_value(&call.inputs.lse_t, &row.sequence, first + head, row.query));
}

/* Adds the probabilities of the product's teacher heads to the mean. */
template <typename ELEMENT> __device__ inline void add_teacher_heads(const sparse_gemm<ELEMENT> &gemm, bool is_first)
{
    const sparse_params &params = gemm.params;
    const sparse_smem<ELEMENT> &smem = gemm.smem;
    gemm.run([&](const sparse_logits &x, int tile_first) {
        const float scale = params.teacher.scale;
        skl_lse2 lse[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            lse[e] = smem.lse[head_of(gemm, e / 2, e % 2)];
        add_heads(smem.mean, is_first, gemm, tile_first, [&](int c) {
            float log_p[4];
            lse_row sum = {-3e38F, 0.0F}; /* finite: inf - inf would be NaN */
#pragma unroll
            for (int e = 0; e < 4; e++) {
                log_p[e] = fmaf(x.at[e / 2][c / 2][e % 2 * 2 + c % 2], scale, -lse[e].value) - lse[e].low;
                sum.m = fmaxf(sum.m, log_p[e]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum.l += ex2(log_p[e] - sum.m);
            return sum;
        });
    });
}

/* ---- The indexer -------------------------------------------------------------------------------------------- */

/* Adds the product's index heads, from g on, to the index logits, which are not scaled yet. */
template <typename ELEMENT>
__device__ inline void add_index_heads(const sparse_gemm<ELEMENT> &gemm, bool is_first, int g)
{
    const sparse_params &params = gemm.params;
    sparse_smem<ELEMENT> &smem = gemm.smem;
    const int head = (int)threadIdx.x;
    if (head < SPARSE_HEADS)
        smem.weights[head] = head < smem.product.heads ? sparse_weight(params, smem.row, g + head) : 0.0F;
    gemm.run([&](const sparse_logits &x, int tile_first) {
        float weights[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            weights[e] = smem.weights[head_of(gemm, e / 2, e % 2)];
        add_heads(smem.logits, is_first, gemm, tile_first, [&](int c) {
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
    float log_p, y;
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

/* Sums over all entries of the row: smem.sums. All threads call it. */
template <typename ELEMENT>
__device__ inline void sum_entries(sparse_smem<ELEMENT> &smem, const sparse_params &params)
{
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    index_row row = empty_row();
    for (int n = (int)threadIdx.x; n < smem.row.count; n += SPARSE_THREADS)
        if (smem.row.key(n) >= 0) {
            const entry_logits entry = logits_of(params, smem, n);
            row = merge_rows(
                row, {{reverse ? entry.y : entry.log_p, 1.0F, reverse ? entry.log_p : entry.y, 1.0F, 0.0F}, 0.0F});
        }
    row = merge_lanes<32>(row);
    if (threadIdx.x % 32 == 0)
        smem.warp_sums[threadIdx.x / 32] = row;
    __syncthreads();
    if (threadIdx.x == 0) {
        smem.sums = smem.warp_sums[0];
        for (int warp = 1; warp < SPARSE_WARPS; warp++)
            smem.sums = merge_rows(smem.sums, smem.warp_sums[warp]);
    }
    __syncthreads();
}

template <typename ELEMENT>
__device__ inline void write_sparse_row(const sparse_smem<ELEMENT> &smem, const sparse_params &params)
{
    const sparse_row32 &row = smem.row;
    const skl_row_state &state = smem.sums.state;
    const skl_row_state entropy_state = {state.m_a, state.l_a, 0.0F, 0.0F, smem.sums.p_log_p};
    const skl_input &given = params.call.inputs.lse_t;
    if (threadIdx.x == 0)
        (void)::write_row(params, row.sequence, row.head, row.query, state, entropy_state);
    if (params.call.rows.lse_t.data == NULL || (given.data == NULL && state.l_a != 0.0F))
        return; /* computed LSEs have been written already */
    const float mean_lse_t =
        params.problem.direction == SKL_KL_REVERSE ? skl_lse(state.m_b, state.l_b) : skl_lse(state.m_a, state.l_a);
    const int64_t group = skl_group_size(&params.problem);
    for (int64_t h = row.head * group + threadIdx.x; h < (row.head + 1) * group; h += SPARSE_THREADS)
        write_lse_t(params, row.sequence, h, row.query,
                    skl_lse2_of(given.data == NULL ? 0.0F : skl_row_value(&given, &row.sequence, h, row.query)),
                    mean_lse_t);
}

/* Writes d KL / d index logit of each entry, without the row's upstream gradient and scale; 0 if it is invalid. */
template <typename ELEMENT>
__device__ inline void write_dy(const sparse_smem<ELEMENT> &smem, const sparse_params &params, float *dy)
{
    const sparse_row32 &row = smem.row;
    const skl_inputs &in = params.call.inputs;
    const bool reverse = params.problem.direction == SKL_KL_REVERSE, one_pass = params.call.op != SKL_OP_BACKWARD;
    const skl_lse2 lse_s = skl_lse2_of(skl_row_value(&in.lse_s, &row.sequence, row.head, row.query));
    const float kl = !reverse   ? 0.0F
                     : one_pass ? skl_kl_report(skl_state_kl(&smem.sums.state))
                                : skl_row_value(&in.kl, &row.sequence, row.head, row.query);
    for (int n = (int)threadIdx.x; n < row.count; n += SPARSE_THREADS) {
        const entry_logits entry = logits_of(params, smem, n);
        const float log_s = (entry.y - lse_s.value) - lse_s.low, s = ex2(log_s);
        const float gradient = reverse ? s * fmaf(SKL_LN2, log_s - entry.log_p, -kl) : s - ex2(entry.log_p);
        dy[n] = row.key(n) >= 0 ? gradient : 0.0F;
    }
}

/* ---- Kernel ------------------------------------------------------------------------------------------------- */

/* All products of the current row. */
template <bool COMPUTES_LSE, typename ELEMENT>
__device__ inline void score_row(sparse_smem<ELEMENT> &smem, const sparse_params &params)
{
    const sparse_gemm<ELEMENT> gemm = {params, smem};
    const int group = params.with_teacher ? (int)skl_group_size(&params.problem) : 0;
#pragma unroll 1
    for (int h = 0, count; h < group; h += count) {
        const int head = (int)smem.row.head * group + h, sharing = params.teacher.heads_per_key;
        count = min(min(group - h, sharing - head % sharing), SPARSE_HEADS);
        gemm.set_product(params.teacher, head, count, head / sharing);
        load_lse<COMPUTES_LSE>(gemm, head);
        add_teacher_heads(gemm, h == 0);
    }
    const int index_heads = (int)params.problem.index_heads;
#pragma unroll 1
    for (int g = 0; g < index_heads; g += SPARSE_HEADS) {
        gemm.set_product(params.student, (int)smem.row.head * index_heads + g, min(index_heads - g, SPARSE_HEADS),
                         (int)smem.row.head / params.student.heads_per_key);
        add_index_heads(gemm, g == 0, g);
    }
    __syncthreads(); /* sums are complete */
}

/* COMPUTES_LSE: computes the teacher's LSEs, which the caller does not give. That needs so many registers that only
 * one block fits on an SM. */
template <typename ELEMENT, bool COMPUTES_LSE>
__global__ void __launch_bounds__(SPARSE_THREADS, COMPUTES_LSE ? 1 : 2)
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
        find_row(smem.row, params, item);
        if (!smem.row.exists)
            continue;
        trim_indices(smem.row);
        if (smem.row.count > 0)
            score_row<COMPUTES_LSE>(smem, params);
        sum_entries(smem, params);
        if (params.call.op != SKL_OP_BACKWARD)
            write_sparse_row(smem, params);
        if (params.dy != NULL)
            write_dy(smem, params, params.dy + (item - params.row_first) * top_k);
    }
}

} // namespace sm80

#endif
