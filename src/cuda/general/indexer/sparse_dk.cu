/* dk of an indexer's sparse stage, behind every chunk of rows (indexer_plan.h). First a block a row puts the entries
 * of its list in the order of their keys, 64 keys a bucket, those of a bucket as they stood on the list. Then a block
 * for 64 keys has what entries add to them in one place for each row, and adds it up in the order of the lists. Every
 * sum has one owner and one order; of very many keys a bucket has more than 64, and some blocks share it. 43 KB of
 * shared memory. */
#include "base/convert.h"
#include "cuda/common/indexer/sparse_chunks.cuh"
#include "cuda/common/indexer/sparse_row.cuh"

constexpr int STEP = SKL_INDEX_STEP;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

/* ---- The order of a list ------------------------------------------------------------------------------------ */

/* Sum over the threads before this one; `all`: over all of them. */
static __device__ int scan(int value, int (&warp_sums)[WARPS], int *all)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int before = __shfl_up_sync(~0U, sum, offset);
        sum += lane >= offset ? before : 0;
    }
    __syncthreads(); /* nobody looks at the last sums any more */
    if (lane == 31)
        warp_sums[warp] = sum;
    __syncthreads();
    *all = 0;
    int before = sum - value;
    for (int w = 0; w < WARPS; w++) {
        before += w < warp ? warp_sums[w] : 0;
        *all += warp_sums[w];
    }
    return before;
}

struct order_memory {
    int next[SKL_SPARSE_BUCKETS_MAX]; /* entries of a bucket, then where its next one goes */
    int warp_sums[WARPS];
};

/* From counts to the place of each bucket's first entry. */
static __device__ void find_starts(order_memory &memory, int buckets)
{
    const int share = (buckets + THREADS - 1) / THREADS, begin = min((int)threadIdx.x * share, buckets);
    const int end = min(begin + share, buckets);
    int count = 0, all;
    for (int bucket = begin; bucket < end; bucket++)
        count += memory.next[bucket];
    int start = scan(count, memory.warp_sums, &all);
    for (int bucket = begin; bucket < end; bucket++) {
        const int own = memory.next[bucket];
        memory.next[bucket] = start;
        start += own;
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS)
    indices_order(const __grid_constant__ sparse_dk_params params, skl_sparse_chunk chunk, int64_t first)
{
    __shared__ order_memory memory;
    const skl_problem &p = params.problem;
    const sparse_row row = sparse_row_at(params, first + blockIdx.x);
    const skl_range visible = row.visible;
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
    /* One warp: 32 entries after one another keep the order of the list. */
    for (int64_t at = 0; at < count; at += 32) {
        const int64_t n = at + threadIdx.x;
        const int32_t key = n < count ? list[n] : -1;
        const int bucket = n < count && skl_index_is_visible(key, visible) ? (int)(key / chunk.bucket_keys) : -1;
        const unsigned same = __match_any_sync(~0U, bucket), before = same & ((1U << threadIdx.x) - 1U);
        const int tile_position = bucket >= 0 ? memory.next[bucket] : 0;
        __syncwarp();
        if (bucket >= 0) {
            order[tile_position + __popc(before)] = (int32_t)n;
            if (before == 0)
                memory.next[bucket] = tile_position + __popc(same);
        }
        __syncwarp();
    }
    if (threadIdx.x == 0 && buckets > 0)
        starts[buckets * chunk.count] = memory.next[buckets - 1];
}

/* ---- Sums of keys ------------------------------------------------------------------------------------------- */

constexpr int SLICE = 128;     /* dimensions of a gradient that are summed up together */
constexpr int HITS_MAX = 2048; /* entries that are found before they are added */

struct dk_memory {
    float4 sums[STEP][SLICE / 4];
    int hit_entry[HITS_MAX];
    uint8_t hit_key[HITS_MAX]; /* STEP: one that is not the block's */
    int warp_sums[WARPS];
};
static_assert(SLICE / 4 == 32, "a warp adds a slice at once, four dimensions a lane");

/* What a block collects: keys [key_first, key_first + STEP) of a key head, dimensions from c_first on. */
struct collection {
    skl_sequence sequence;
    int64_t key_head, key_first, c_first;
};

/* Up to four numbers of a row of `dim`; it begins where a multiple of 16 bytes does if dim is a multiple of 4. */
static __device__ float4 load_four(const float *from, int64_t left, int64_t dim)
{
    if (dim % 4 == 0)
        return left > 0 ? *(const float4 *)(const void *)from : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    return make_float4(left > 0 ? from[0] : 0.0F, left > 1 ? from[1] : 0.0F, left > 2 ? from[2] : 0.0F,
                       left > 3 ? from[3] : 0.0F);
}

/* Every eighth key is a warp's: no other one adds to its sums. */
static __device__ void add_hits(dk_memory &memory, int count, const float *parts, int64_t c_first, int64_t dim)
{
    constexpr int TOGETHER = 8; /* loads that are under way at once */
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int64_t c = c_first + lane * 4;
    __syncthreads(); /* the hits are complete */
#pragma unroll 1
    for (int first = 0; first < count; first += 64) {
        const auto is_own = [&](int hit) {
            return hit < count && memory.hit_key[hit] < STEP && memory.hit_key[hit] % WARPS == warp;
        };
        const uint64_t low = __ballot_sync(~0U, is_own(first + lane));
        uint64_t own = low | (uint64_t)__ballot_sync(~0U, is_own(first + 32 + lane)) << 32;
#pragma unroll 1
        while (own != 0) {
            float4 value[TOGETHER];
            int key[TOGETHER];
#pragma unroll
            for (int n = 0; n < TOGETHER; n++, own &= own - 1) {
                key[n] = -1;
                if (own == 0)
                    continue;
                const int hit = first + __ffsll((long long)own) - 1;
                key[n] = memory.hit_key[hit];
                value[n] = load_four(parts + memory.hit_entry[hit] * dim + c, dim - c, dim);
            }
#pragma unroll
            for (int n = 0; n < TOGETHER; n++)
                if (key[n] >= 0) {
                    float4 &sum = memory.sums[key[n]][lane];
                    sum = make_float4(sum.x + value[n].x, sum.y + value[n].y, sum.z + value[n].z, sum.w + value[n].w);
                }
        }
    }
    __syncthreads(); /* they may be overwritten */
}

/* Adds what a row for each thread has for the keys: its entries [begin, end) in the order of keys. */
static __device__ void collect_indices(dk_memory &memory, const collection &of, const int32_t *list,
                                       const int32_t *order, int begin, int end, int64_t first_entry,
                                       const float *parts, int64_t dim)
{
    int all;
    const int before = scan(end - begin, memory.warp_sums, &all);
#pragma unroll 1
    for (int window = 0; window < all; window += HITS_MAX) {
        const int from = max(begin, begin + window - before), to = min(end, begin + window + HITS_MAX - before);
#pragma unroll 1
        for (int at = from; at < to; at++) {
            const int hit = before + at - begin - window, n = order[at];
            const int64_t key = list[n] - of.key_first;
            memory.hit_entry[hit] = (int)(first_entry + n);
            memory.hit_key[hit] = (uint8_t)(key >= 0 && key < STEP ? key : STEP); /* buckets may have more keys */
        }
        add_hits(memory, min(all - window, HITS_MAX), parts, of.c_first, dim);
    }
}

/* Adds what rows [begin, end) have for the keys; the chunk's first row is first_row. */
static __device__ void collect_rows(dk_memory &memory, const sparse_dk_params &params, const skl_sparse_chunk &chunk,
                                    const collection &of, skl_range rows, int64_t first_row, const float *parts)
{
    const skl_problem &p = params.problem;
    const int32_t *const order = (const int32_t *)(const void *)((const char *)params.call.workspace + chunk.order);
    const int32_t *const starts =
        (const int32_t *)(const void *)((const char *)params.call.workspace + chunk.starts) +
        of.key_first / chunk.bucket_keys * chunk.count;
#pragma unroll 1
    for (int64_t first = rows.begin; first < rows.end; first += THREADS) {
        const int64_t row = first + threadIdx.x, at = row - first_row;
        const bool some = row < rows.end;
        const int begin = some ? starts[at] : 0, end = some ? starts[at + chunk.count] : 0;
        const int32_t *const list =
            begin < end ? skl_row_indices(&params.call.inputs, &of.sequence, row / p.len_q % p.heads_s, row % p.len_q)
                        : NULL;
        collect_indices(memory, of, list, order + at * p.top_k, begin, end, at * p.top_k, parts, p.dim_s);
    }
}

/* One block of keys over one chunk. Sums start at 0 with the first chunk that has rows of the key head, wait in
 * `sums` for the next one, and are stored as the gradient behind the last. */
static __device__ void collect(dk_memory &memory, const sparse_dk_params &params, const skl_sparse_chunk &chunk,
                               const collection &of, skl_range rows, skl_range of_chunk, const float *parts)
{
    const skl_problem &p = params.problem;
    const skl_output &dk = params.call.gradients.dk_s;
    const skl_sequence &s = of.sequence;
    const int64_t key_end = p.packed ? s.key_count : p.len_k; /* padding keys get a gradient of 0 */
    const bool begins = rows.begin >= of_chunk.begin, ends = rows.end <= of_chunk.end;
    const int64_t c = of.c_first + threadIdx.x % SLICE;
    float *const sums = &memory.sums[0][0].x;
    for (int key = (int)threadIdx.x / SLICE; key < STEP; key += THREADS / SLICE) {
        const int64_t row = of.key_first + key;
        const bool stored = !begins && row < key_end && c < p.dim_s;
        sums[key * SLICE + threadIdx.x % SLICE] =
            stored ? ((const float *)
                          params.dk_sums.data)[SKL_ROW(params.dk_sums, s.batch, of.key_head, s.key_begin + row) + c]
                   : 0.0F;
    }
    collect_rows(memory, params, chunk, of,
                 skl_range{skl_max(rows.begin, of_chunk.begin), skl_min(rows.end, of_chunk.end)}, of_chunk.begin,
                 parts);
    const skl_output &to = ends ? dk : params.dk_sums;
    const skl_dtype dtype = ends ? skl_grad_dtype(&p, p.dtype_s) : SKL_F32;
    for (int key = (int)threadIdx.x / SLICE; key < STEP; key += THREADS / SLICE) {
        const int64_t row = of.key_first + key;
        if (row < key_end && c < p.dim_s)
            skl_store(to.data, dtype, SKL_ROW(to, s.batch, of.key_head, s.key_begin + row) + c,
                      sums[key * SLICE + threadIdx.x % SLICE]);
    }
}

static __global__ void __launch_bounds__(THREADS, 2)
    sparse_keys(const __grid_constant__ sparse_dk_params params, skl_sparse_chunk chunk, skl_range of_chunk)
{
    extern __shared__ __align__(16) unsigned char raw[];
    dk_memory &memory = *(dk_memory *)(void *)raw;
    const skl_problem &p = params.problem;
    const float *const parts = (const float *)(const void *)((const char *)params.call.workspace + chunk.parts);
    const int64_t slices = skl_ceil_div(p.dim_s, SLICE), steps = skl_ceil_div(p.len_k, STEP);
    const int64_t head_rows = p.heads_s / p.key_heads_s * p.len_q; /* of the heads that share a key head */
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p.batch * p.key_heads_s * steps * slices; item += gridDim.x) {
        const int64_t heads = item / slices / steps; /* key heads of all sequences */
        const skl_range rows = {heads * head_rows, (heads + 1) * head_rows};
        const collection of = {device_sequence(params, heads / p.key_heads_s), heads % p.key_heads_s,
                               item / slices % steps * STEP, item % slices * SLICE};
        const bool none = rows.end > rows.begin && (rows.end <= of_chunk.begin || rows.begin >= of_chunk.end);
        if (!none)
            collect(memory, params, chunk, of, rows, of_chunk, parts);
        __syncthreads();
    }
}

/* ---- Launcher ----------------------------------------------------------------------------------------------- */

extern "C" cudaError_t skl_cuda_sparse_dk(const sparse_dk_params *params, const skl_sparse_chunk *chunk,
                                          skl_range rows, int32_t sm_count)
{
    cudaError_t error =
        cudaFuncSetAttribute(sparse_keys, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(dk_memory));
    if (error == cudaSuccess && rows.begin < rows.end) {
        indices_order<<<(unsigned)(rows.end - rows.begin), THREADS, 0, params->call.stream>>>(*params, *chunk,
                                                                                              rows.begin);
        error = cudaPeekAtLastError();
    }
    if (error != cudaSuccess)
        return error;
    sparse_keys<<<(unsigned)sm_count * 4, THREADS, sizeof(dk_memory), params->call.stream>>>(*params, *chunk, rows);
    return cudaPeekAtLastError();
}
