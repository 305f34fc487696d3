/* dk of a sparse indexer: adds the contributions of list entries (entry_dk) after each chunk of rows (row_chunks.h).
 *
 *   indices_order   one block per row: sorts the entries of its list into buckets of 64 keys (stable counting sort)
 *   sparse_keys     one work item per 64 keys, grid stride: adds the entries of a bucket, in the order of rows and,
 *                   within a row, of its list
 *
 *       row 0   | bucket 0 | bucket 1 | ...
 *       row 1   | bucket 0 | bucket 1 | ...
 *       ...                     |
 *                               v   one work item, rows from top to bottom
 *
 * Each sum has one owner and one order, so the bits are the same on every run. With more than 262,144 keys, a bucket
 * has more than 64 keys and several work items read it. sparse_keys uses 43 KB of shared memory. */
#include "base/convert.h"
#include "cuda/common/indexer/sparse_chunks.cuh"
#include "cuda/common/indexer/sparse_row.cuh"
#include "cuda/common/launch.cuh"

namespace sparse_dk
{

constexpr int KEY_TILE = SKL_INDEX_STEP;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

/* ---- Sorting a list ----------------------------------------------------------------------------------------- */

/* Exclusive prefix sum over the threads of the block; *total = sum over all threads. */
static __device__ int scan(int value, int (&warp_sums)[WARPS], int *total)
{
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    int sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int before = __shfl_up_sync(~0U, sum, offset);
        sum += lane >= offset ? before : 0;
    }
    __syncthreads(); /* no thread reads the previous warp_sums any more */
    if (lane == 31)
        warp_sums[warp] = sum;
    __syncthreads();
    *total = 0;
    int before = sum - value;
    for (int w = 0; w < WARPS; w++) {
        before += w < warp ? warp_sums[w] : 0;
        *total += warp_sums[w];
    }
    return before;
}

struct order_memory {
    int next[SKL_SPARSE_BUCKETS_MAX]; /* number of entries of each bucket, then position of its next entry */
    int warp_sums[WARPS];
};

/* Turns the number of entries of each bucket into the position of its first entry. */
static __device__ void find_starts(order_memory &memory, int buckets)
{
    const int share = (buckets + THREADS - 1) / THREADS, begin = min((int)threadIdx.x * share, buckets);
    const int end = min(begin + share, buckets);
    int count = 0, total;
    for (int bucket = begin; bucket < end; bucket++)
        count += memory.next[bucket];
    int start = scan(count, memory.warp_sums, &total);
    for (int bucket = begin; bucket < end; bucket++) {
        const int bucket_count = memory.next[bucket];
        memory.next[bucket] = start;
        start += bucket_count;
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS)
    indices_order(const __grid_constant__ sparse_dk_params params, skl_sparse_chunk chunk, int64_t first)
{
    __shared__ order_memory memory;
    const skl_problem &p = params.problem;
    const sparse_row row = sparse_row_at(params, first + blockIdx.x);
    const skl_range visible = skl_pooled_range(&p, row.visible);
    const int32_t *const list = row.list;
    const int64_t count = row.exists ? p.top_k : 0;
    int32_t *const order = (int32_t *)(void *)((char *)params.call.workspace + chunk.order) + blockIdx.x * p.top_k;
    int32_t *const starts = (int32_t *)(void *)((char *)params.call.workspace + chunk.starts) + blockIdx.x;
    const int buckets = (int)chunk.buckets;
    for (int bucket = (int)threadIdx.x; bucket < buckets; bucket += THREADS)
        memory.next[bucket] = 0;
    __syncthreads();
    for (int64_t n = threadIdx.x; n < count; n += THREADS)
        if (skl_index_is_visible(list[n], visible))
            atomicAdd(&memory.next[list[n] / chunk.bucket_keys], 1);
    __syncthreads();
    find_starts(memory, buckets);
    for (int bucket = (int)threadIdx.x; bucket < buckets; bucket += THREADS)
        starts[bucket * chunk.count] = memory.next[bucket];
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    /* One warp, 32 consecutive entries at a time, keeps the order of the list. */
    for (int64_t n_first = 0; n_first < count; n_first += 32) {
        const int64_t n = n_first + threadIdx.x;
        const int32_t key = n < count ? list[n] : -1;
        const int bucket = n < count && skl_index_is_visible(key, visible) ? (int)(key / chunk.bucket_keys) : -1;
        const unsigned same = __match_any_sync(~0U, bucket), before = same & ((1U << threadIdx.x) - 1U);
        const int position = bucket >= 0 ? memory.next[bucket] : 0;
        __syncwarp();
        if (bucket >= 0) {
            order[position + __popc(before)] = (int32_t)n;
            if (before == 0)
                memory.next[bucket] = position + __popc(same);
        }
        __syncwarp();
    }
    if (threadIdx.x == 0 && buckets > 0)
        starts[buckets * chunk.count] = memory.next[buckets - 1];
}

/* ---- Sums of dk --------------------------------------------------------------------------------------------- */

constexpr int SLICE = 128;     /* dimensions of dk that are summed together */
constexpr int HITS_MAX = 2048; /* hits, entries of the current bucket, that are collected before they are added */

struct dk_memory {
    float4 sums[KEY_TILE][SLICE / 4];
    int hit_entry[HITS_MAX];
    uint8_t hit_key[HITS_MAX]; /* relative to key_first; KEY_TILE: not a key of this work item */
    int warp_sums[WARPS];
};
static_assert(SLICE / 4 == 32, "a warp adds a slice at once, four dimensions per lane");

/* Work item: keys [key_first, key_first + KEY_TILE) of a key head, SLICE dimensions from c_first. */
struct key_item {
    skl_sequence sequence;
    int64_t key_head, key_first, c_first;
};

/* Up to four elements of a row of `dim` elements. If dim is a multiple of 4, rows are aligned to 16 bytes. */
static __device__ float4 load_four(const float *from, int64_t left, int64_t dim)
{
    if (dim % 4 == 0)
        return left > 0 ? *(const float4 *)(const void *)from : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    return make_float4(left > 0 ? from[0] : 0.0F, left > 1 ? from[1] : 0.0F, left > 2 ? from[2] : 0.0F,
                       left > 3 ? from[3] : 0.0F);
}

/* Adds the first `count` hits to the sums. A warp adds the hits of every eighth key, so each sum has one owner. */
static __device__ void add_hits(dk_memory &memory, int count, const float *entry_dk, int64_t c_first, int64_t dim)
{
    constexpr int LOADS = 8; /* loads in flight at once */
    const int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
    const int64_t c = c_first + lane * 4;
    __syncthreads(); /* the hits are complete */
#pragma unroll 1
    for (int first = 0; first < count; first += 64) {
        const auto is_of_warp = [&](int hit) {
            return hit < count && memory.hit_key[hit] < KEY_TILE && memory.hit_key[hit] % WARPS == warp;
        };
        const uint64_t low = __ballot_sync(~0U, is_of_warp(first + lane));
        uint64_t hits = low | (uint64_t)__ballot_sync(~0U, is_of_warp(first + 32 + lane)) << 32;
#pragma unroll 1
        while (hits != 0) {
            float4 value[LOADS];
            int key[LOADS];
#pragma unroll
            for (int n = 0; n < LOADS; n++, hits &= hits - 1) {
                key[n] = -1;
                if (hits == 0)
                    continue;
                const int hit = first + __ffsll((long long)hits) - 1;
                key[n] = memory.hit_key[hit];
                value[n] = load_four(entry_dk + memory.hit_entry[hit] * dim + c, dim - c, dim);
            }
#pragma unroll
            for (int n = 0; n < LOADS; n++)
                if (key[n] >= 0) {
                    float4 &sum = memory.sums[key[n]][lane];
                    sum = make_float4(sum.x + value[n].x, sum.y + value[n].y, sum.z + value[n].z, sum.w + value[n].w);
                }
        }
    }
    __syncthreads(); /* the hits may be overwritten */
}

/* Adds the entries of up to THREADS rows, one per thread: order[begin .. end) of the thread's row is its bucket. The
 * hits of all rows together are added HITS_MAX at a time. */
static __device__ void add_buckets(dk_memory &memory, const key_item &item, const int32_t *list, const int32_t *order,
                                   int begin, int end, int64_t first_entry, const float *entry_dk, int64_t dim)
{
    int total;
    const int before = scan(end - begin, memory.warp_sums, &total);
#pragma unroll 1
    for (int window = 0; window < total; window += HITS_MAX) {
        const int from = max(begin, begin + window - before), to = min(end, begin + window + HITS_MAX - before);
#pragma unroll 1
        for (int position = from; position < to; position++) {
            const int hit = before + position - begin - window, n = order[position];
            const int64_t key = list[n] - item.key_first;
            memory.hit_entry[hit] = (int)(first_entry + n);
            memory.hit_key[hit] =
                (uint8_t)(key >= 0 && key < KEY_TILE ? key : KEY_TILE); /* the bucket may have more keys */
        }
        add_hits(memory, min(total - window, HITS_MAX), entry_dk, item.c_first, dim);
    }
}

/* Adds the entries of `rows`; the chunk begins with first_row. */
static __device__ void add_rows(dk_memory &memory, const sparse_dk_params &params, const skl_sparse_chunk &chunk,
                                const key_item &item, skl_range rows, int64_t first_row, const float *entry_dk)
{
    const skl_problem &p = params.problem;
    const int32_t *const order = (const int32_t *)(const void *)((const char *)params.call.workspace + chunk.order);
    const int32_t *const starts =
        (const int32_t *)(const void *)((const char *)params.call.workspace + chunk.starts) +
        item.key_first / chunk.bucket_keys * chunk.count;
#pragma unroll 1
    for (int64_t first = rows.begin; first < rows.end; first += THREADS) {
        const int64_t row = first + threadIdx.x, chunk_row = row - first_row;
        const bool exists = row < rows.end;
        const int begin = exists ? starts[chunk_row] : 0, end = exists ? starts[chunk_row + chunk.count] : 0;
        const int32_t *const list = begin < end ? skl_row_indices(&params.call.inputs, &item.sequence,
                                                                  row / p.len_q % p.heads_s, row % p.len_q)
                                                : NULL;
        add_buckets(memory, item, list, order + chunk_row * p.top_k, begin, end, chunk_row * p.top_k, entry_dk,
                    p.dim_s);
    }
}

/* Adds the entries of a chunk to the sums of a work item. `rows` are all rows of the key head, chunk_rows the rows of
 * the chunk. Sums start at 0 with the first chunk that has rows of the key head, stay in params.dk_sums between
 * chunks, and become the gradient after the last one. */
static __device__ void add_chunk(dk_memory &memory, const sparse_dk_params &params, const skl_sparse_chunk &chunk,
                                 const key_item &item, skl_range rows, skl_range chunk_rows, const float *entry_dk)
{
    const skl_problem &p = params.problem;
    const skl_output &dk = params.call.gradients.dk_s;
    const skl_sequence &s = item.sequence;
    const int64_t key_end =
        p.packed ? s.key_count : skl_student_keys(&p, p.len_k); /* padding keys get a gradient of 0 */
    const bool begins = rows.begin >= chunk_rows.begin, ends = rows.end <= chunk_rows.end;
    const int64_t c = item.c_first + threadIdx.x % SLICE;
    float *const sums = &memory.sums[0][0].x;
#pragma unroll 1
    for (int key = (int)(threadIdx.x / SLICE); key < KEY_TILE; key += THREADS / SLICE) {
        const int64_t row = item.key_first + key;
        const bool stored = !begins && row < key_end && c < p.dim_s;
        sums[key * SLICE + threadIdx.x % SLICE] =
            stored ? ((const float *)
                          params.dk_sums.data)[SKL_ROW(params.dk_sums, s.batch, item.key_head, s.key_begin + row) + c]
                   : 0.0F;
    }
    add_rows(memory, params, chunk, item,
             skl_range{skl_max(rows.begin, chunk_rows.begin), skl_min(rows.end, chunk_rows.end)}, chunk_rows.begin,
             entry_dk);
    const skl_output &to = ends ? dk : params.dk_sums;
    const skl_dtype dtype = ends ? skl_grad_dtype(&p, p.dtype_s) : SKL_F32;
#pragma unroll 1
    for (int key = (int)(threadIdx.x / SLICE); key < KEY_TILE; key += THREADS / SLICE) {
        const int64_t row = item.key_first + key;
        if (row < key_end && c < p.dim_s)
            skl_store(to.data, dtype, SKL_ROW(to, s.batch, item.key_head, s.key_begin + row) + c,
                      sums[key * SLICE + threadIdx.x % SLICE]);
    }
}

static __global__ void __launch_bounds__(THREADS, 2)
    sparse_keys(const __grid_constant__ sparse_dk_params params, skl_sparse_chunk chunk, skl_range chunk_rows)
{
    extern __shared__ __align__(16) unsigned char raw[];
    dk_memory &memory = *(dk_memory *)(void *)raw;
    const skl_problem &p = params.problem;
    const float *const entry_dk = (const float *)(const void *)((const char *)params.call.workspace + chunk.entry_dk);
    const int64_t slices = skl_ceil_div(p.dim_s, SLICE),
                  tiles = skl_ceil_div(skl_student_keys(&p, p.len_k), KEY_TILE);
    const int64_t head_rows = p.heads_s / p.key_heads_s * p.len_q; /* rows of the heads that share a key head */
#pragma unroll 1
    for (int64_t n = blockIdx.x; n < p.batch * p.key_heads_s * tiles * slices; n += gridDim.x) {
        const int64_t flat_key_head = n / slices / tiles; /* counted over all sequences */
        const skl_range rows = {flat_key_head * head_rows, (flat_key_head + 1) * head_rows};
        const key_item item = {device_sequence(params, flat_key_head / p.key_heads_s), flat_key_head % p.key_heads_s,
                               n / slices % tiles * KEY_TILE, n % slices * SLICE};
        const bool none = rows.end > rows.begin && (rows.end <= chunk_rows.begin || rows.begin >= chunk_rows.end);
        if (!none)
            add_chunk(memory, params, chunk, item, rows, chunk_rows, entry_dk);
        __syncthreads();
    }
}

/* ---- Launcher ----------------------------------------------------------------------------------------------- */

extern "C" cudaError_t skl_cuda_sparse_dk(const sparse_dk_params *params, const skl_sparse_chunk *chunk,
                                          skl_range rows, int32_t sm_count)
{
    const cudaError_t error =
        launch_blocks(indices_order, rows.end - rows.begin, THREADS, 0, *params, *chunk, rows.begin);
    return error == cudaSuccess
               ? launch_blocks(sparse_keys, (int64_t)sm_count * 4, THREADS, sizeof(dk_memory), *params, *chunk, rows)
               : error;
}

} // namespace sparse_dk
