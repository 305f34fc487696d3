/* General backward of an indexer: dq, dw, and what each tile adds to dk, with f32 FFMAs. No atomics, so the bits are
 * the same on every run; row_chunks.h explains how.
 *
 *     s_g = sum_j dy_j [a_gj > 0] k_j        dq_g = w_g s_g        dw_g = <q_g, s_g>
 *     entry_dk_j = sum_i dy_ij sum_g w_ig [a_igj > 0] q_ig         over the queries i of a tile
 *
 * dy, the gradient of the logits, is the same for all index heads, and the teacher is most of its work. So dy is
 * computed once and goes through the workspace, one chunk of tiles (tile.cuh) at a time:
 *
 *                    kernel           computes        work item
 *   for each chunk   key_gradients    dy, entry_dk    a tile; dense: 64 of its keys
 *                    query_gradients  dq, dw          a tile, the index heads of a product
 *                    sparse_dk.cu or add_tiles        dk += entry_dk
 *
 *   block   grid stride over the work items; 1 resident per SM
 *   shared  77 KB: index_memory, row stats */
#include "cuda/common/indexer/sparse_chunks.cuh"
#include "cuda/general/gradient_product.cuh"
#include "cuda/general/indexer/logits.cuh"

namespace indexer_backward
{

struct chunk_params : index_params {
    int32_t rows_known;   /* an earlier launch of the same call stored kl */
    int64_t first, count; /* tiles of the chunk */
    int64_t slots;        /* keys of a tile, at most */
    int64_t key_splits;   /* work items per tile in key_gradients */
    float *dy;            /* [tile][query][slot] */
    float *entry_dk;      /* [tile][slot][dim]; NULL: no dk */
};

struct row_stats {
    skl_lse2 lse_s;
    float factor; /* upstream gradient times scale */
    float kl;     /* KL of the row for the reverse KL, otherwise 0 */
};

template <int QUERIES> struct backward_memory {
    index_memory<QUERIES> index;
    row_stats stats[QUERIES];
};

template <int QUERIES> static __device__ backward_memory<QUERIES> &shared_memory(void)
{
    extern __shared__ __align__(16) unsigned char raw[];
    return *(backward_memory<QUERIES> *)(void *)raw;
}

/* ---- The gradient of the logits ------------------------------------------------------------------------------ */

/* Loads the row stats of the tile's queries. Other threads may read them after the next barrier. */
template <int QUERIES>
static __device__ void load_row_stats(backward_memory<QUERIES> &memory, const chunk_params &params)
{
    const skl_inputs &in = params.call.inputs;
    const skl_input kl = skl_known_rows(params.rows_known, &in.kl, &params.call.rows.kl);
    const index_tile &tile = memory.index.tile;
    const skl_sequence &s = tile.sequence;
    if (threadIdx.x >= tile.queries)
        return;
    const int64_t query = tile.query_first + threadIdx.x;
    const float grad = in.grad_kl.data != NULL ? skl_row_value(&in.grad_kl, &s, tile.head, query) : 1.0F;
    row_stats stats;
    stats.lse_s = skl_lse2_of(skl_row_value(&in.lse_s, &s, tile.head, query));
    stats.factor = grad * params.problem.scale_s;
    stats.kl = params.problem.direction == SKL_KL_REVERSE ? skl_row_value(&kl, &s, tile.head, query) : 0.0F;
    memory.stats[threadIdx.x] = stats;
}

/* dy of the visible pairs with memory.keys. `dy` points to the first query and key. */
template <int QUERIES>
static __device__ void logit_gradients(float *dy, backward_memory<QUERIES> &memory, const chunk_params &params)
{
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    const index_tile &tile = memory.index.tile;
    const auto lse_of = [&](int h, int query) {
        return skl_lse2_of(skl_row_value(&params.call.inputs.lse_t, &tile.sequence,
                                         tile.head * skl_group_size(&params.problem) + h, tile.query_first + query));
    };
    index_logits<true>(memory.index, params, true, lse_of, [&](int query, int n, float log_p, float y) {
        const row_stats stats = memory.stats[query];
        const float log_s = log_probability(y, stats.lse_s);
        const float s = ex2(log_s);
        dy[query * params.slots + n] =
            stats.factor * (reverse ? s * fmaf(SKL_LN2, log_s - log_p, -stats.kl) : s - ex2(log_p));
    });
    __syncthreads(); /* all threads may read dy */
}

/* Replaces the dot products of `heads` index heads in memory.dots: dy where the pair is visible and active, otherwise
 * 0. `weighted`: dy times the weight of the head. */
template <int QUERIES>
static __device__ void select_active(index_memory<QUERIES> &memory, const chunk_params &params, const float *dy,
                                     int heads, bool weighted)
{
    const bool linear = params.problem.index_linear != 0;
#pragma unroll 1
    for (int index = (int)threadIdx.x; index < computed_rows<QUERIES>(heads) * KEY_TILE; index += THREADS) {
        const int row = index / KEY_TILE, n = index % KEY_TILE, query = query_of_row<QUERIES>(row);
        float &dot = memory.dots[row * DOT_STRIDE + n];
        const bool seen = row < product_rows(memory, heads) && sees_key(memory, query, n);
        const float gradient = seen && index_active(linear, dot) ? dy[query * params.slots + n] : 0.0F;
        /* A row without visible keys may have a weight that is not finite. */
        dot = weighted && gradient != 0.0F ? gradient * memory.weights[row] : gradient;
    }
    __syncthreads();
}

/* ---- dy and entry_dk ----------------------------------------------------------------------------------------- */

/* Entry i of a thread in a sum of entry_dk. */
static __device__ int acc_entry(int i)
{
    return product_row<KEY_COLUMNS>(i);
}

/* sum[entry][dim] += memory.dots . rows of the product, SLICE dimensions from c. */
template <int QUERIES>
static __device__ void add_rows(fragment<8, KEY_COLUMNS> &sum, index_memory<QUERIES> &memory, int heads, int c)
{
    const skl_dtype dtype = memory.rows.dtype;
    const int count = product_rows(memory, heads);
    raw_quad rows[TILE_QUADS];
    load_steps(rows, memory.rows, 0, c);
#pragma unroll 1
    for (int first = 0, stage = 0; first < count; first += STAGE_STEPS, stage ^= 1) {
        float *const streamed = memory.stages.streamed[stage];
        const float *const dots = &memory.dots[first * DOT_STRIDE + acc_entry(0)];
        store_steps(streamed, rows, dtype);
        __syncthreads();
        if (first + STAGE_STEPS < count)
            load_steps(rows, memory.rows, first + STAGE_STEPS, c);
        multiply_steps<true>(
            sum, [&](auto &a, int first_step, int step) { read_fours(a, dots + (first_step + step) * DOT_STRIDE); },
            columns_of(streamed));
    }
    __syncthreads(); /* no thread reads memory.dots any more */
}

/* entry_dk[n][dim] of memory.keys. */
template <int QUERIES>
static __device__ void store_entry_dk(float *entry_dk, index_memory<QUERIES> &memory, const chunk_params &params,
                                      const float *dy)
{
    const skl_problem &p = params.problem;
#pragma unroll 1
    for (int c = 0; c < p.dim_s; c += SLICE) {
        fragment<8, KEY_COLUMNS> sum;
        clear(sum);
#pragma unroll 1
        for (int g = 0; g < p.index_heads; g += HEADS<QUERIES>) {
            const int heads = min((int)p.index_heads - g, HEADS<QUERIES>);
            index_dots(memory, params, g, heads);
            select_active(memory, params, dy, heads, true);
            add_rows(sum, memory, heads, c);
        }
#pragma unroll
        for (int i = 0; i < KEY_COLUMNS; i++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (memory.keys[acc_entry(i)] >= 0 && c + acc_column(j) < p.dim_s)
                    entry_dk[acc_entry(i) * p.dim_s + c + acc_column(j)] = sum.at[i][j];
    }
}

template <int QUERIES>
static __global__ void __launch_bounds__(THREADS, 1) key_gradients(const __grid_constant__ chunk_params params)
{
    backward_memory<QUERIES> &memory = shared_memory<QUERIES>();
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < params.count * params.key_splits; item += gridDim.x) {
        const int64_t n = params.count - 1 - item / params.key_splits; /* causal: longest first */
        if (!begin_tile(memory.index, params, params.first + n))
            continue;
        load_row_stats(memory, params);
        for_each_keys(memory.index, item % params.key_splits * KEY_TILE, params.key_splits * KEY_TILE,
                      [&](int64_t slot) {
                          float *const dy = params.dy + n * QUERIES * params.slots + slot;
                          logit_gradients(dy, memory, params);
                          if (params.entry_dk != NULL)
                              store_entry_dk(params.entry_dk + (n * params.slots + slot) * params.problem.dim_s,
                                             memory.index, params, dy);
                      });
    }
}

/* ---- dq and dw ----------------------------------------------------------------------------------------------- */

/* sum += memory.dots . keys, SLICE dimensions from c. */
template <int R, int QUERIES>
static __device__ void add_keys(fragment<8, R> &sum, index_memory<QUERIES> &memory, int c)
{
    const skl_dtype dtype = memory.gathered.dtype;
    const int entry = (int)(threadIdx.x / 32), dim = c + (int)(threadIdx.x % 32) * QUAD; /* a warp reads a key */
    raw_quad keys[TILE_QUADS];
    load_gathered(keys, memory, entry, THREADS / 32, dim);
#pragma unroll 1
    for (int first = 0, stage = 0; first < KEY_TILE; first += STAGE_STEPS, stage ^= 1) {
        float *const streamed = memory.stages.streamed[stage];
        store_steps(streamed, keys, dtype);
        __syncthreads();
        if (first + STAGE_STEPS < KEY_TILE)
            load_gathered(keys, memory, first + STAGE_STEPS + entry, THREADS / 32, dim);
        const auto read_dots = [&](float(&a)[R], int first_step, int step) {
#pragma unroll
            for (int i = 0; i < R; i++)
                a[i] = memory.dots[product_row<R>(i) * DOT_STRIDE + first + first_step + step];
        };
        multiply_steps<true>(sum, read_dots, columns_of(streamed));
    }
}

/* Adds <q_g, s_g> over a slice to memory.dw, and stores dq of the slice. */
template <int R, int QUERIES>
static __device__ void finish_slice(fragment<8, R> &sum, index_memory<QUERIES> &memory, const chunk_params &params,
                                    int g, int heads, int64_t c_first)
{
    const skl_problem &p = params.problem;
    const index_tile &tile = memory.tile;
    const skl_input &q = params.call.inputs.q_s;
    const skl_output &dq = params.call.gradients.dq_s;
#pragma unroll 1
    for (int i = 0; i < R; i++, rotate_rows(sum)) {
        const int row = product_row<R>(i);
        const int64_t query = tile.sequence.query_begin + tile.query_first + query_of_row<QUERIES>(row);
        const int64_t head = tile.head * p.index_heads + g + head_of_row<QUERIES>(row);
        float dot = 0.0F;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int64_t c = c_first + acc_column(j);
            if (row >= product_rows(memory, heads) || c >= p.dim_s)
                continue;
            /* Without visible keys the sum is 0, and query and weights, which may not be finite, are not used. */
            const bool nonzero = sum.at[0][j] != 0.0F;
            if (nonzero)
                dot = fmaf(skl_load(q.data, p.dtype_s, SKL_ROW(q, tile.sequence.batch, head, query) + c),
                           sum.at[0][j], dot);
            if (dq.data != NULL)
                skl_store(dq.data, skl_grad_dtype(&p, p.dtype_s), SKL_ROW(dq, tile.sequence.batch, head, query) + c,
                          nonzero ? memory.weights[row] * sum.at[0][j] : 0.0F);
        }
        dot = row_sum(dot);
        if (first_lane())
            memory.dw[row] = c_first == 0 ? dot : memory.dw[row] + dot;
    }
}

/* dq and dw of `heads` index heads from g, with R rows per thread. */
template <int R, int QUERIES>
static __device__ void head_gradients(index_memory<QUERIES> &memory, const chunk_params &params, const float *dy,
                                      int g, int heads)
{
    const skl_problem &p = params.problem;
    const skl_output &dw = params.call.gradients.dw_s;
    const index_tile &tile = memory.tile;
    const int row = (int)threadIdx.x;
#pragma unroll 1
    for (int c = 0; c < p.dim_s; c += SLICE) {
        fragment<8, R> sum;
        clear(sum);
        for_each_keys(memory, 0, KEY_TILE, [&](int64_t slot) {
            index_dots(memory, params, g, heads);
            select_active(memory, params, dy + slot, heads, false);
            add_keys(sum, memory, c);
        });
        finish_slice(sum, memory, params, g, heads, c);
    }
    __syncthreads(); /* memory.dw is complete */
    if (dw.data != NULL && row < product_rows(memory, heads))
        skl_store(dw.data, skl_grad_dtype(&p, p.dtype_w),
                  SKL_ROW(dw, tile.sequence.batch, tile.head,
                          tile.sequence.query_begin + tile.query_first + query_of_row<QUERIES>(row)) +
                      g + head_of_row<QUERIES>(row),
                  memory.dw[row]);
}

template <int QUERIES>
static __global__ void __launch_bounds__(THREADS, 1) query_gradients(const __grid_constant__ chunk_params params)
{
    index_memory<QUERIES> &memory = shared_memory<QUERIES>().index;
    const int index_heads = (int)params.problem.index_heads;
    const int64_t products = skl_ceil_div(index_heads, HEADS<QUERIES>);
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < params.count * products; item += gridDim.x) {
        const int64_t n = params.count - 1 - item / products;
        const int g = (int)(item % products) * HEADS<QUERIES>, heads = min(index_heads - g, HEADS<QUERIES>);
        const float *const dy = params.dy + n * QUERIES * params.slots;
        if (begin_tile(memory, params, params.first + n))
            with_rows_per_thread<QUERIES>(
                heads, [&](auto rows) { head_gradients<decltype(rows)::value>(memory, params, dy, g, heads); });
    }
}

/* ---- dk of a dense indexer ----------------------------------------------------------------------------------- */

/* Adds the entry_dk of a chunk's tiles to dk_sums, tile after tile. Work item: KEY_TILE keys of a key head. Sums
 * start at 0 with the first chunk that has tiles of the key head, stay in dk_sums between chunks, and become the
 * gradient after the last one. */
static __global__ void __launch_bounds__(THREADS)
    add_tiles(const __grid_constant__ chunk_params params, const __grid_constant__ skl_output dk_sums)
{
    __shared__ skl_range keys[SKL_DENSE_CHUNK_TILES_MAX]; /* keys that each tile attends to */
    const skl_problem &p = params.problem;
    const int64_t keys_of_student = skl_student_keys(&p, p.len_k);
    const int64_t steps = skl_ceil_div(keys_of_student, KEY_TILE), chunk_end = params.first + params.count;
    const int64_t head_tiles = p.heads_s / p.key_heads_s * skl_ceil_div(p.len_q, TILE);
    for (int64_t n = threadIdx.x; n < params.count; n += THREADS) {
        const index_tile tile = index_tile_at<DENSE>(params, params.first + n);
        keys[n] = skl_range{tile.key_first, tile.key_first + tile.key_count};
    }
    __syncthreads();
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p.batch * p.key_heads_s * steps; item += gridDim.x) {
        const int64_t flat_key_head = item / steps, key_head = flat_key_head % p.key_heads_s;
        const skl_range tiles = {flat_key_head * head_tiles, (flat_key_head + 1) * head_tiles};
        if (tiles.begin < tiles.end && (tiles.end <= params.first || tiles.begin >= chunk_end))
            continue;
        const bool begins = tiles.begin >= params.first, ends = tiles.end <= chunk_end;
        const skl_output &to = ends ? params.call.gradients.dk_s : dk_sums;
        const skl_dtype dtype = ends ? skl_grad_dtype(&p, p.dtype_s) : SKL_F32;
        const skl_sequence s = device_sequence(params, flat_key_head / p.key_heads_s);
        const int64_t key_first = item % steps * KEY_TILE, key_end = p.packed ? s.key_count : keys_of_student;
        const int64_t rows = skl_min(key_end - key_first, KEY_TILE);
        for (int64_t e = threadIdx.x; e < rows * p.dim_s; e += THREADS) {
            const int64_t key = key_first + e / p.dim_s, c = e % p.dim_s;
            float sum =
                begins ? 0.0F
                       : ((const float *)dk_sums.data)[SKL_ROW(dk_sums, s.batch, key_head, s.key_begin + key) + c];
            for (int64_t tile = skl_max(tiles.begin, params.first); tile < skl_min(tiles.end, chunk_end); tile++) {
                const skl_range &of = keys[tile - params.first];
                if (key >= of.begin && key < of.end)
                    sum += params.entry_dk[((tile - params.first) * params.slots + key - of.begin) * p.dim_s + c];
            }
            skl_store(to.data, dtype, SKL_ROW(to, s.batch, key_head, s.key_begin + key) + c, sum);
        }
    }
}

/* ---- Launchers ----------------------------------------------------------------------------------------------- */

/* Computes dy, entry_dk, dq and dw of a chunk's tiles. */
template <int QUERIES> static cudaError_t launch_tiles(const chunk_params &chunk, const skl_cuda_launch *launch)
{
    const skl_gradients &grads = chunk.call.gradients;
    const bool queries = grads.dq_s.data != NULL || grads.dw_s.data != NULL;
    const cudaError_t error = launch_general(key_gradients<QUERIES>, chunk, launch, sizeof(backward_memory<QUERIES>));
    return error == cudaSuccess && queries
               ? launch_general(query_gradients<QUERIES>, chunk, launch, sizeof(backward_memory<QUERIES>))
               : error;
}

static chunk_params chunk_params_of(const skl_cuda_params *params, const skl_cuda_launch *launch, skl_range tiles,
                                    int64_t slots, int64_t key_splits, size_t entry_dk)
{
    char *const workspace = (char *)params->call.workspace;
    const bool keys = params->call.gradients.dk_s.data != NULL;
    const index_params of_launch = {*params, (float2 *)(void *)(workspace + launch->pooled_at)};
    return {of_launch, launch->rows_known, tiles.begin,        tiles.end - tiles.begin,
            slots,     key_splits,         (float *)workspace, keys ? (float *)(workspace + entry_dk) : NULL};
}

extern "C" cudaError_t skl_cuda_general_dense_gradients(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_dense_chunk &dense = launch->dense;
    const skl_output dk_sums = dk_sums_of(params, false, dense.sums);
    record_launch("cuda_general", SKL_VARIANT_GRADIENTS, 1);
    return for_each_chunk(dense.tiles, dense.count, [&](skl_range tiles) {
        const chunk_params chunk =
            chunk_params_of(params, launch, tiles, dense.slots, dense.slots / KEY_TILE, dense.entry_dk);
        const cudaError_t error = chunk.count > 0 ? launch_tiles<DENSE>(chunk, launch) : cudaSuccess;
        if (error != cudaSuccess || chunk.entry_dk == NULL)
            return error;
        add_tiles<<<(unsigned)launch->sm_count * 4, THREADS, 0, params->call.stream>>>(chunk, dk_sums);
        return cudaPeekAtLastError();
    });
}

extern "C" cudaError_t skl_cuda_general_sparse_gradients(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    record_launch("cuda_general", SKL_VARIANT_GRADIENTS, 1);
    return launch_sparse_chunks(params, launch, [&](skl_range rows) {
        return launch_tiles<SPARSE>(
            chunk_params_of(params, launch, rows, params->problem.top_k, 1, launch->sparse.chunk.entry_dk), launch);
    });
}

} // namespace indexer_backward
