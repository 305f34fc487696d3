/* Memory-bound kernels of attention statistics: they clear outputs and sums, add the slots of key sums, and write the
 * weights of chosen rows. */
#include "base/convert.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/stats.cuh"

stats_params stats_params_of(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_stats_layout &layout = launch->stats;
    char *const workspace = (char *)params->call.workspace;
    stats_params of = {*params,
                       *params->call.stats,
                       layout,
                       params->call.inputs.lse_s,
                       (float *)(void *)(workspace + layout.keys_at),
                       (float *)(void *)(workspace + layout.heads_at),
                       (unsigned char *)workspace + layout.scratch_at};
    return of;
}

namespace stats_rows
{

constexpr int THREADS = 256;

static __device__ int64_t first_index(void)
{
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}

static __device__ int64_t index_step(void)
{
    return (int64_t)gridDim.x * THREADS;
}

template <typename KERNEL>
static cudaError_t launch_rows(KERNEL kernel, int64_t count, const skl_cuda_params *params,
                               const skl_cuda_launch *launch)
{
    const int64_t blocks_max = 2048; /* grid-stride loops do the rest; more blocks take longer to start than to run */
    const int64_t blocks = skl_max(1, skl_min(blocks_max, skl_ceil_div(count, THREADS)));
    record_launch("cuda_general", launch->variant, 1);
    return launch_blocks(kernel, blocks, THREADS, 0, stats_params_of(params, launch));
}

/* ---- Clear -------------------------------------------------------------------------------------------------- */

/* Sets the rows after the last packed sequence: `width` numbers each. */
template <typename NUMBER>
static __device__ void set_tail(const stats_params &params, const skl_output &rows, int width, NUMBER value)
{
    const skl_problem &p = params.problem;
    if (!p.packed || rows.data == NULL)
        return;
    const int64_t used = skl_max(0, skl_min(p.total_q, params.call.inputs.cu_seqlens_q[p.batch]));
    const int64_t tail = p.total_q - used;
    for (int64_t index = first_index(); index < p.heads_s * tail * width; index += index_step()) {
        const int64_t row = index / width;
        ((NUMBER *)rows.data)[SKL_ROW(rows, 0, row / tail, used + row % tail) + index % width] = value;
    }
}

static __host__ __device__ int64_t key_heads_of(const skl_problem &p, const skl_stats &stats)
{
    return stats.per_key_head ? p.key_heads_s : p.heads_s;
}

static __global__ void __launch_bounds__(THREADS) clear_stats(const __grid_constant__ stats_params params)
{
    const skl_problem &p = params.problem;
    const skl_stats &stats = params.stats;
    set_tail(params, stats.lse, 1, -INFINITY);
    set_tail(params, stats.entropy, 1, 0.0F);
    set_tail(params, stats.max_logit, 1, -INFINITY);
    set_tail(params, stats.expected_distance, 1, 0.0F);
    set_tail(params, stats.range_mass, stats.range_count, 0.0F);
    set_tail(params, stats.top_keys, stats.top_k, (int32_t)-1);
    set_tail(params, stats.top_p, stats.top_k, 0.0F);
    const skl_tensor_rows keys = skl_key_rows(&p);
    const int64_t heads = key_heads_of(p, stats);
    for (int64_t n = first_index(); stats.key_max.data != NULL && n < keys.batch * heads * keys.rows;
         n += index_step())
        ((float *)stats.key_max
             .data)[SKL_ROW(stats.key_max, n / keys.rows / heads, n / keys.rows % heads, n % keys.rows)] = 0.0F;
    for (int64_t n = first_index(); stats.head_max_logit != NULL && n < p.batch * p.heads_s; n += index_step())
        stats.head_max_logit[n] = -INFINITY;
    for (int64_t n = first_index();
         stats.key_sum.data != NULL && n < p.heads_s * params.layout.slots * params.layout.slot_stride;
         n += index_step())
        params.key_slots[n] = 0.0F;
    const int64_t sums = p.batch * p.heads_s * params.layout.chunks * 2 * SKL_STATS_SUMS;
    for (int64_t n = first_index(); params.layout.results & (SKL_STATS_DISTANCE_MASS | SKL_STATS_RANGES) && n < sums;
         n += index_step())
        params.head_sums[n] = 0.0F;
}

extern "C" cudaError_t skl_cuda_stats_clear(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_problem *const p = &params->problem;
    return launch_rows(clear_stats,
                       p->heads_s * skl_max(launch->stats.slots * launch->stats.slot_stride,
                                            skl_key_rows(p).batch * skl_key_rows(p).rows),
                       params, launch);
}

/* ---- Sums --------------------------------------------------------------------------------------------------- */

/* Adds the slots of a key, and of the heads that share it with per_key_head. */
static __device__ void store_key_sums(const stats_params &params)
{
    const skl_problem &p = params.problem;
    const skl_output &out = params.stats.key_sum;
    const skl_tensor_rows keys = skl_key_rows(&p);
    const int64_t heads = key_heads_of(p, params.stats), slots = p.heads_s / heads * params.layout.slots;
    for (int64_t n = first_index(); n < keys.batch * heads * keys.rows; n += index_step()) {
        const int64_t b = n / keys.rows / heads, head = n / keys.rows % heads, key = n % keys.rows;
        const float *const first = params.key_slots + head * slots * params.layout.slot_stride + b * keys.rows + key;
        float sum = 0.0F;
        for (int64_t slot = 0; slot < slots; slot++)
            sum += first[slot * params.layout.slot_stride];
        ((float *)out.data)[SKL_ROW(out, b, head, key)] = sum;
    }
}

/* Sums of heads by distance (which = 0) or by range (1), over the chunks in their order. */
static __device__ void store_head_sums(const stats_params &params, float *to, int count, int which)
{
    const int64_t heads = params.problem.batch * params.problem.heads_s, chunks = params.layout.chunks;
    for (int64_t n = first_index(); n < heads * count; n += index_step()) {
        const float *const of_head = params.head_sums + n / count * chunks * 2 * SKL_STATS_SUMS;
        float sum = 0.0F;
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            sum += of_head[(chunk * 2 + which) * SKL_STATS_SUMS + n % count];
        to[n] = sum;
    }
}

static __global__ void __launch_bounds__(THREADS) add_slots(const __grid_constant__ stats_params params)
{
    if (params.layout.results & SKL_STATS_KEY_SUM)
        store_key_sums(params);
    if (params.layout.results & SKL_STATS_DISTANCE_MASS)
        store_head_sums(params, params.stats.distance_mass, params.stats.distance_count, 0);
    if (params.layout.results & SKL_STATS_RANGE_SUM)
        store_head_sums(params, params.stats.range_sum, params.stats.range_count, 1);
}

extern "C" cudaError_t skl_cuda_stats_sums(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_problem *const p = &params->problem;
    const skl_tensor_rows keys = skl_key_rows(p);
    const int64_t sums = (launch->stats.results & SKL_STATS_KEY_SUM) == 0 ? 0 : keys.batch * p->heads_s * keys.rows;
    return launch_rows(add_slots, skl_max(sums, p->batch * p->heads_s * SKL_STATS_SUMS), params, launch);
}

/* ---- Weights of chosen rows --------------------------------------------------------------------------------- */

static __device__ float element_at(const skl_input &tensor, skl_dtype dtype, int64_t at)
{
    return dtype == SKL_F32    ? ((const float *)tensor.data)[at]
           : dtype == SKL_BF16 ? skl_from_bf16(((const uint16_t *)tensor.data)[at])
                               : skl_from_f16(((const uint16_t *)tensor.data)[at]);
}

/* A warp per key: chosen rows are few. */
static __global__ void __launch_bounds__(THREADS) chosen_weights(const __grid_constant__ stats_params params)
{
    const skl_problem &p = params.problem;
    const skl_stats &stats = params.stats;
    const skl_cuda_argument &side = params.b;
    const int64_t all = p.batch * p.heads_s * stats.chosen_count * p.len_k;
    for (int64_t n = first_index() / 32; n < all; n += index_step() / 32) {
        const int64_t key = n % p.len_k, which = n / p.len_k % stats.chosen_count;
        const int64_t head = n / p.len_k / stats.chosen_count % p.heads_s;
        const int64_t number = n / p.len_k / stats.chosen_count / p.heads_s;
        const skl_sequence s = device_sequence(params, number);
        const int64_t row = stats.chosen_rows[number * stats.chosen_count + which];
        const skl_range none = {0, 0}, sees = row >= 0 && row < s.query_count ? skl_visible(&p, &s, row) : none;
        float weight = 0.0F;
        if (key >= sees.begin && key < sees.end) {
            const int64_t q = SKL_ROW(side.q, s.batch, head, s.query_begin + row);
            const int64_t k = SKL_ROW(side.k, s.batch, head / side.heads_per_key, s.key_begin + key);
            float product = 0.0F;
            for (int64_t d = threadIdx.x % 32; d < p.dim_s; d += 32)
                product = fmaf(element_at(side.q, p.dtype_s, q + d), element_at(side.k, p.dtype_s, k + d), product);
            for (int offset = 16; offset > 0; offset /= 2)
                product += __shfl_xor_sync(~0U, product, offset);
            const float scaled = product * side.scale;
            const float logit = side.capped ? side.softcap_2 * tanhf(scaled) : scaled;
            weight = tensor_core::at_most_1(exp2f(logit - tensor_core::stats_lse2(params, s, head, row)));
        }
        if (threadIdx.x % 32 == 0)
            stats.weights[n] = weight;
    }
}

extern "C" cudaError_t skl_cuda_stats_weights(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const skl_problem *const p = &params->problem;
    return launch_rows(chosen_weights, p->batch * p->heads_s * params->call.stats->chosen_count * p->len_k * 32,
                       params, launch);
}

} // namespace stats_rows
