/* All statistics of one attention, for any product: the logits of 64 keys and a tile of queries go to shared memory,
 * and the threads of a block read them there by rows or by columns.
 *
 *   block     256 threads, one tile of PRODUCT::QUERIES queries after another; grid stride over chunks of tiles
 *   shared    the logits of a tile (QUERIES x 65 floats), and what PRODUCT keeps
 *   scratch   in the workspace, per block and query: mass by distance and by range, candidates of the top keys
 *
 *   PRODUCT ▶ logits ▶ shared ─┬▶ rows: entropy, distance, maximum      4 or 2 threads per query, in registers
 *                              ├▶ keys: sum and maximum                 4 threads per key, added to the chunk's slot
 *                              ├▶ mass by distance and by range         a thread per query, added to its scratch
 *                              └▶ candidates above the row's threshold  appended to its scratch
 *
 * PRODUCT has QUERIES, begin(params, chunk, first), and multiply(stage, next, store), which calls store(row, column,
 * logit) for the pairs of a stage and starts to load `next`, a stage or -1. Logits are in base 2. */
#ifndef SKL_CUDA_COMMON_STATS_TILE_CUH
#define SKL_CUDA_COMMON_STATS_TILE_CUH

#include "cuda/common/launch.cuh"
#include "cuda/common/stats_top.cuh"

namespace tensor_core
{

constexpr int STATS_TILE_THREADS = 256;

/* The scratch of one query. */
struct stats_row_scratch {
    float distances[SKL_STATS_SUMS], ranges[SKL_STATS_SUMS];
    uint64_t candidates[TOP_CANDIDATES];
};
static_assert(sizeof(stats_row_scratch) == SKL_STATS_SCRATCH_SIZE, "cuda/select sizes the workspace");

template <typename PRODUCT> struct stats_tile_memory {
    typename PRODUCT::memory product;
    float logits[PRODUCT::QUERIES][STATS_KEYS + 1]; /* logits in base 2 */
    range32 sees[PRODUCT::QUERIES];
    float lse2[PRODUCT::QUERIES], weight[PRODUCT::QUERIES];
    float threshold[PRODUCT::QUERIES]; /* top keys: smaller ones are no candidates */
    int count[PRODUCT::QUERIES];       /* candidates */
    float parts[4][STATS_KEYS], part_maxima[4][STATS_KEYS];
    stats_chunk chunk;
    int exists;
};

/* ---- One chunk ---------------------------------------------------------------------------------------------- */

template <typename PRODUCT> struct stats_tiles {
    static constexpr int QUERIES = PRODUCT::QUERIES, PER_ROW = STATS_TILE_THREADS / QUERIES;
    const stats_params &params;
    stats_tile_memory<PRODUCT> &memory;
    stats_row_scratch *scratch; /* one for each of the block's queries */
    int first;                  /* query of the tile */
    row_totals totals;          /* sums over the thread's part of a row */
    float head_sum; /* sum over the chunk: thread n has the sum of distance n, or of range n - SKL_STATS_SUMS */

    __device__ bool wants(uint32_t results) const
    {
        return (params.layout.results & results) != 0;
    }

    __device__ const skl_sequence &sequence() const
    {
        return memory.chunk.sequence;
    }

    /* 0 for a masked pair, whatever the LSE: a row without keys has -inf, or any number that the caller gave. */
    __device__ float probability(int row, int column) const
    {
        const float logit = memory.logits[row][column];
        return logit <= STATS_MASKED_LOGIT ? 0.0F : ex2(logit - memory.lse2[row]);
    }

    __device__ void start_tile(const skl_band &band)
    {
        const int row = (int)threadIdx.x;
        if (row < QUERIES) {
            const int64_t query = first + row, head = memory.chunk.head;
            const bool exists = query < sequence().query_count;
            const skl_range none = {0, 0}, sees = exists ? skl_band_range(&band, query) : none;
            memory.sees[row] = {(int)sees.begin, (int)sees.end};
            memory.lse2[row] = exists ? stats_lse2(params, sequence(), head, query) : 0.0F;
            memory.weight[row] = row_weight(params, sequence(), head, query, sees.begin >= sees.end);
            memory.threshold[row] = STATS_MASKED_LOGIT;
            memory.count[row] = 0;
            for (int n = 0; n < SKL_STATS_SUMS && wants(SKL_STATS_DISTANCE_MASS); n++)
                scratch[row].distances[n] = 0.0F;
            for (int n = 0; n < params.stats.range_count && wants(SKL_STATS_RANGES); n++)
                scratch[row].ranges[n] = 0.0F;
        }
        totals = {0.0F, 0.0F, -INFINITY};
        __syncthreads();
    }

    __device__ void add_rows(int first_key)
    {
        const int row = (int)threadIdx.x / PER_ROW;
        const int64_t position = first + row + sequence().diagonal - first_key;
#pragma unroll 4
        for (int column = (int)threadIdx.x % PER_ROW; column < STATS_KEYS; column += PER_ROW) {
            const float logit = memory.logits[row][column];
            const float log_p = logit <= STATS_MASKED_LOGIT ? STATS_MASKED_LOGIT : logit - memory.lse2[row];
            const float p = ex2(log_p);
            totals.entropy = fmaf(p, log_p, totals.entropy);
            totals.distance = fmaf(p, fabsf((float)(position - column)), totals.distance);
            totals.max_logit = fmaxf(totals.max_logit, logit);
        }
    }

    __device__ void add_keys(int first_key)
    {
        const int column = (int)threadIdx.x % STATS_KEYS, part = (int)threadIdx.x / STATS_KEYS;
        float sum = 0.0F, largest = 0.0F;
#pragma unroll 4
        for (int row = part * QUERIES / 4; row < (part + 1) * QUERIES / 4; row++) {
            const float weight = memory.weight[row], p = probability(row, column);
            sum = weight != 0.0F ? fmaf(weight, p, sum) : sum;
            largest = weight != 0.0F ? fmaxf(largest, p) : largest;
        }
        memory.parts[part][column] = sum;
        memory.part_maxima[part][column] = largest;
        __syncthreads();
        if (part != 0)
            return;
        for (int other = 1; other < 4; other++) {
            sum += memory.parts[other][column];
            largest = fmaxf(largest, memory.part_maxima[other][column]);
        }
        float *const slot = memory.chunk.slot(params, memory.chunk.chunk);
        if (first_key + column >= sequence().key_count)
            return;
        if (slot != NULL)
            slot[first_key + column] += sum;
        if (wants(SKL_STATS_KEY_MAX))
            raise_key(params, sequence(), memory.chunk.head, first_key + column, largest);
    }

    /* A thread per query. Distances of consecutive keys mostly have the same bucket. */
    __device__ void add_distances(int first_key)
    {
        const int row = (int)threadIdx.x, last = params.stats.distance_count - 1;
        if (row >= QUERIES)
            return;
        const int64_t position = first + row + sequence().diagonal - first_key;
        int bucket = -1;
        float mass = 0.0F;
        for (int column = 0; column < STATS_KEYS; column++) {
            const int64_t difference = position - column;
            const int next = min(64 - __clzll(difference < 0 ? -difference : difference), last);
            if (next != bucket && bucket >= 0)
                scratch[row].distances[bucket] += mass;
            mass = (next != bucket ? 0.0F : mass) + probability(row, column);
            bucket = next;
        }
        scratch[row].distances[bucket] += mass;
    }

    /* A thread per query. */
    __device__ void add_ranges(int first_key)
    {
        const int row = (int)threadIdx.x, count = params.stats.range_count;
        if (row >= QUERIES)
            return;
        const int32_t *const ranges = params.stats.key_ranges + memory.chunk.number * count * 2;
        for (int n = 0; n < count; n++) {
            const int begin = max(ranges[2 * n] - first_key, 0), end = min(ranges[2 * n + 1] - first_key, STATS_KEYS);
            float mass = 0.0F;
            for (int column = begin; column < end; column++)
                mass += probability(row, column);
            scratch[row].ranges[n] += mass;
        }
    }

    __device__ void add_candidates(int first_key)
    {
        const int row = (int)threadIdx.x / PER_ROW;
        const float threshold = memory.threshold[row];
#pragma unroll 4
        for (int column = (int)threadIdx.x % PER_ROW; column < STATS_KEYS; column += PER_ROW) {
            const float logit = memory.logits[row][column];
            if (logit > threshold)
                scratch[row].candidates[atomicAdd(&memory.count[row], 1)] = candidate_of(logit, first_key + column);
        }
        __syncthreads();
        for (int of = (int)threadIdx.x / 32; of < QUERIES; of += STATS_TILE_THREADS / 32) {
            const int count = memory.count[of];
            if (count <= TOP_CANDIDATES - STATS_KEYS)
                continue;
            float raised;
            const int kept = keep_largest(scratch[of].candidates, count, params.stats.top_k, raised);
            if (threadIdx.x % 32 == 0) {
                memory.count[of] = kept;
                memory.threshold[of] = raised;
            }
        }
    }

    __device__ void add_stage(int first_key)
    {
        if (wants(SKL_STATS_OF_ONE_PASS))
            add_rows(first_key);
        if (wants(SKL_STATS_OF_KEYS))
            add_keys(first_key);
        if (wants(SKL_STATS_DISTANCE_MASS))
            add_distances(first_key);
        if (wants(SKL_STATS_RANGES))
            add_ranges(first_key);
        if (wants(SKL_STATS_TOP))
            add_candidates(first_key);
    }

    __device__ void finish_rows()
    {
        const int row = (int)threadIdx.x / PER_ROW;
#pragma unroll
        for (int offset = 1; offset < PER_ROW; offset *= 2) {
            totals.entropy += __shfl_xor_sync(~0U, totals.entropy, offset);
            totals.distance += __shfl_xor_sync(~0U, totals.distance, offset);
            totals.max_logit = fmaxf(totals.max_logit, __shfl_xor_sync(~0U, totals.max_logit, offset));
        }
        if (threadIdx.x % PER_ROW == 0 && first + row < sequence().query_count)
            write_stats_row(params, memory.chunk, first + row, memory.sees[row], memory.lse2[row], totals);
    }

    /* Adds the rows of the tile to the sums of the chunk. */
    __device__ void finish_masses()
    {
        const int n = (int)threadIdx.x % SKL_STATS_SUMS;
        const bool of_ranges = threadIdx.x >= SKL_STATS_SUMS;
        const skl_output &out = params.stats.range_mass;
        if (threadIdx.x >= 2 * SKL_STATS_SUMS ||
            n >= (of_ranges ? params.stats.range_count : params.stats.distance_count) ||
            !wants(of_ranges ? SKL_STATS_RANGES : SKL_STATS_DISTANCE_MASS))
            return;
        for (int row = 0; row < QUERIES && first + row < sequence().query_count; row++) {
            const float mass = of_ranges ? scratch[row].ranges[n] : scratch[row].distances[n];
            head_sum = memory.weight[row] != 0.0F ? fmaf(memory.weight[row], mass, head_sum) : head_sum;
            if (of_ranges && out.data != NULL)
                ((float *)out
                     .data)[SKL_ROW(out, sequence().batch, memory.chunk.head, sequence().query_begin + first + row) +
                            n] = mass;
        }
    }

    __device__ void finish_top()
    {
        for (int row = (int)threadIdx.x / 32; row < QUERIES && first + row < sequence().query_count;
             row += STATS_TILE_THREADS / 32) {
            float raised;
            const int kept = keep_largest(scratch[row].candidates, memory.count[row], params.stats.top_k, raised);
            write_top(params, sequence(), memory.chunk.head, first + row, scratch[row].candidates, kept,
                      [&](float logit) { return exp2f(logit - memory.lse2[row]); });
        }
    }

    __device__ void run()
    {
        const skl_band band = skl_key_band(&params.problem, &sequence());
        const int rounds = memory.chunk.rounds();
        PRODUCT product(memory.product);
        head_sum = 0.0F;
        for (int round = 0; round < rounds; round++) {
            first = memory.chunk.first_query(round);
            if (first < 0)
                continue;
            start_tile(band);
            const range32 stages = memory.chunk.stages(band, first, QUERIES);
            if (stages.begin < stages.end) /* an empty range has no stage that waits for these loads */
                product.begin(params, memory.chunk, first, stages.begin);
#pragma unroll 1
            for (int stage = stages.begin; stage < stages.end; stage++) {
                const int first_key = stage * STATS_KEYS;
                product.multiply(stage + 1 < stages.end ? stage + 1 : -1, [&](int row, int column, float logit) {
                    const bool seen =
                        first_key + column >= memory.sees[row].begin && first_key + column < memory.sees[row].end;
                    memory.logits[row][column] = seen ? logit : STATS_MASKED_LOGIT;
                });
                __syncthreads();
                add_stage(first_key);
                __syncthreads();
            }
            if (wants(SKL_STATS_OF_ONE_PASS))
                finish_rows();
            if (wants(SKL_STATS_DISTANCE_MASS | SKL_STATS_RANGES))
                finish_masses();
            if (wants(SKL_STATS_TOP))
                finish_top();
            __syncthreads();
        }
    }

    __device__ void store_sums() const
    {
        const skl_problem &p = params.problem;
        if (threadIdx.x < 2 * SKL_STATS_SUMS && wants(SKL_STATS_DISTANCE_MASS | SKL_STATS_RANGES))
            params.head_sums[((memory.chunk.number * p.heads_s + memory.chunk.head) * params.layout.chunks +
                              memory.chunk.chunk) *
                                 2 * SKL_STATS_SUMS +
                             threadIdx.x] = head_sum;
    }
};

template <typename PRODUCT>
__global__ void __launch_bounds__(STATS_TILE_THREADS, PRODUCT::BLOCKS_PER_SM)
    stats_tile_kernel(const __grid_constant__ stats_params params)
{
    extern __shared__ __align__(1024) unsigned char raw[];
    stats_tile_memory<PRODUCT> &memory = *(stats_tile_memory<PRODUCT> *)(void *)raw;
    const int64_t chunks = params.layout.chunks, heads = params.problem.heads_s;
    for (int64_t item = blockIdx.x; item < params.problem.batch * heads * chunks; item += gridDim.x) {
        const int64_t number = item / (heads * chunks);
        if (threadIdx.x == 0)
            memory.exists = memory.chunk.find(params, number, (int)(item / chunks % heads), (int)(item % chunks),
                                              PRODUCT::QUERIES);
        __syncthreads();
        stats_tiles<PRODUCT> tiles = {params, memory,
                                      (stats_row_scratch *)(void *)params.scratch + blockIdx.x * PRODUCT::QUERIES};
        if (memory.exists)
            tiles.run();
        tiles.store_sums();
        __syncthreads();
    }
}

template <typename PRODUCT>
cudaError_t launch_stats_tiles(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    static_assert(PRODUCT::QUERIES == SKL_STATS_ROWS(PRODUCT::GENERAL), "cuda/select counts tiles");
    return launch_blocks(stats_tile_kernel<PRODUCT>, (int64_t)launch->stats.blocks, STATS_TILE_THREADS,
                         sizeof(stats_tile_memory<PRODUCT>), stats_params_of(params, launch));
}

} // namespace tensor_core

#endif
