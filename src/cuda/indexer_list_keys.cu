/* dk of an indexer's sparse stage: behind every band of rows (indexer_plan.h) a block for 64 keys walks over the
 * lists of the band and adds up what is its own, in the order of the lists. 41 KB of shared memory. */
#include "base/convert.h"
#include "base/selection.h"
#include "cuda/indexer_bands.cuh"
#include "cuda/sequence.cuh"

constexpr int STEP = SKL_INDEX_STEP;
constexpr int THREADS = 256;
constexpr int SLICE = 128;     /* dimensions of a gradient that are summed up together */
constexpr int HITS_MAX = 1024; /* entries that are found before they are added */
constexpr int WARPS = THREADS / 32;

struct collect_memory {
    float sums[STEP][SLICE];
    int hit_entry[HITS_MAX], hit_key[HITS_MAX];
    int warp_hits[WARPS];
};

/* What a block collects: keys [key_first, key_first + STEP) of a key head, dimensions from c_first on. Its sums
 * belong to its threads: two for each dimension, one for even keys, one for odd ones. */
struct collection {
    skl_sequence sequence;
    int64_t key_head, key_first, c_first;
};

static __device__ void add_hits(collect_memory &memory, int count, const float *parts, int64_t c, int64_t dim)
{
    constexpr int TOGETHER = 8; /* loads that are under way at once */
    const int parity = (int)threadIdx.x / SLICE;
    __syncthreads(); /* the hits are complete */
#pragma unroll 1
    for (int first = 0; first < count; first += TOGETHER) {
        float value[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) {
            const int hit = first + n;
            const bool own = hit < count && memory.hit_key[hit] % 2 == parity && c < dim;
            value[n] = own ? parts[memory.hit_entry[hit] * dim + c] : 0.0F;
        }
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) {
            const int hit = first + n;
            if (hit < count && memory.hit_key[hit] % 2 == parity)
                memory.sums[memory.hit_key[hit]][threadIdx.x % SLICE] += value[n];
        }
    }
    __syncthreads(); /* they may be overwritten */
}

/* Finds the entries of a list that name a key of `wanted`, behind the `found` ones, in their order. Returns how many
 * there are now; whatever does not fit is added at once. */
static __device__ int find_hits(collect_memory &memory, int found, const int32_t *list, const skl_problem &p,
                                skl_range wanted, int64_t key_first, int64_t first_entry, const float *parts,
                                int64_t c)
{
#pragma unroll 1
    for (int64_t first = 0; first < p.top_k; first += THREADS) {
        const int64_t n = first + threadIdx.x;
        const int32_t key = n < p.top_k ? list[n] : -1;
        const bool hit = n < p.top_k && skl_is_selected(key, wanted);
        if (!__syncthreads_or(hit))
            continue;
        const unsigned hits = __ballot_sync(~0U, hit), lane = threadIdx.x % 32;
        if (lane == 0)
            memory.warp_hits[threadIdx.x / 32] = __popc(hits);
        __syncthreads();
        int at = found + __popc(hits & ((1U << lane) - 1U));
        for (int warp = 0; warp < WARPS; warp++) {
            found += memory.warp_hits[warp];
            at += warp < (int)threadIdx.x / 32 ? memory.warp_hits[warp] : 0;
        }
        if (hit) {
            memory.hit_entry[at] = (int)(first_entry + n);
            memory.hit_key[at] = (int)(key - key_first);
        }
        if (found > HITS_MAX - THREADS) {
            add_hits(memory, found, parts, c, p.dim_s);
            found = 0;
        }
    }
    return found;
}

/* Adds what rows [begin, end) have for the keys; the band's first row is first_row. */
static __device__ void collect_rows(collect_memory &memory, const skl_cuda_params &params, const collection &of,
                                    int64_t begin, int64_t end, int64_t first_row, const float *parts)
{
    const skl_problem &p = params.problem;
    const int64_t c = of.c_first + threadIdx.x % SLICE;
    int found = 0;
#pragma unroll 1
    for (int64_t row = begin; row < end; row++) {
        const int64_t head = row / p.len_q % p.heads_s, query = row % p.len_q;
        if (query >= of.sequence.query_count)
            continue;
        const skl_range visible = skl_visible(&p, &of.sequence, query);
        const skl_range wanted = {skl_max(visible.begin, of.key_first), skl_min(visible.end, of.key_first + STEP)};
        if (wanted.begin < wanted.end)
            found = find_hits(memory, found, skl_selection(&params.call.inputs, &of.sequence, head, query), p, wanted,
                              of.key_first, (row - first_row) * p.top_k, parts, c);
    }
    add_hits(memory, found, parts, c, p.dim_s);
}

/* One block of keys over one band. Sums start at 0 with the first band that has rows of the key head, wait in `sums`
 * for the next one, and are stored as the gradient behind the last. */
static __device__ void collect(collect_memory &memory, const skl_cuda_params &params, const collection &of,
                               skl_range rows, int64_t first, int64_t count, const float *parts)
{
    const skl_problem &p = params.problem;
    const skl_output &dk = params.call.gradients.dk_s;
    const skl_sequence &s = of.sequence;
    const int64_t key_end = p.packed ? s.key_count : p.len_k; /* padding keys get a gradient of 0 */
    const bool begins = rows.begin >= first, ends = rows.end <= first + count;
    const int64_t c = of.c_first + threadIdx.x % SLICE;
    for (int key = (int)threadIdx.x / SLICE; key < STEP; key += THREADS / SLICE) {
        const int64_t row = of.key_first + key;
        const bool stored = !begins && row < key_end && c < p.dim_s;
        memory.sums[key][threadIdx.x % SLICE] =
            stored
                ? ((const float *)params.sums.data)[SKL_ROW(params.sums, s.batch, of.key_head, s.key_begin + row) + c]
                : 0.0F;
    }
    collect_rows(memory, params, of, skl_max(rows.begin, first), skl_min(rows.end, first + count), first, parts);
    const skl_output &to = ends ? dk : params.sums;
    const skl_dtype dtype = ends ? skl_grad_dtype(&p, p.dtype_s) : SKL_F32;
    for (int key = (int)threadIdx.x / SLICE; key < STEP; key += THREADS / SLICE) {
        const int64_t row = of.key_first + key;
        if (row < key_end && c < p.dim_s)
            skl_store(to.data, dtype, SKL_ROW(to, s.batch, of.key_head, s.key_begin + row) + c,
                      memory.sums[key][threadIdx.x % SLICE]);
    }
}

static __global__ void __launch_bounds__(THREADS, 2)
    list_keys(const __grid_constant__ skl_cuda_params params, skl_list_band band, int64_t first, int64_t count)
{
    extern __shared__ __align__(16) unsigned char raw[];
    collect_memory &memory = *(collect_memory *)(void *)raw;
    const skl_problem &p = params.problem;
    const float *const parts = (const float *)(const void *)((const char *)params.scratch + band.parts);
    const int64_t slices = skl_ceil_div(p.dim_s, SLICE), steps = skl_ceil_div(p.len_k, STEP);
    const int64_t head_rows = p.heads_s / p.key_heads_s * p.len_q; /* of the heads that share a key head */
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p.batch * p.key_heads_s * steps * slices; item += gridDim.x) {
        const int64_t heads = item / slices / steps; /* key heads of all sequences */
        const skl_range rows = {heads * head_rows, (heads + 1) * head_rows};
        const collection of = {device_sequence(params, heads / p.key_heads_s), heads % p.key_heads_s,
                               item / slices % steps * STEP, item % slices * SLICE};
        const bool none = rows.end > rows.begin && (rows.end <= first || rows.begin >= first + count);
        if (!none)
            collect(memory, params, of, rows, first, count, parts);
        __syncthreads();
    }
}

extern "C" cudaError_t skl_cuda_listed_keys(const skl_cuda_params *params, const skl_list_band *band, skl_range rows)
{
    const cudaError_t error =
        cudaFuncSetAttribute(list_keys, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(collect_memory));
    if (error != cudaSuccess)
        return error;
    list_keys<<<(unsigned)params->multiprocessors * 4, THREADS, sizeof(collect_memory), params->call.stream>>>(
        *params, *band, rows.begin, rows.end - rows.begin);
    return cudaPeekAtLastError();
}
