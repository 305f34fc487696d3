/* Forward of an indexer, sparse: a block a row. 74 KB of shared memory. */
#include "cuda/general/indexer/sparse_product.cuh"
#include "cuda/common/indexer/write_row.cuh"

/* The n-th key of every step has a state, which stays out of registers while products are summed up in them. */
struct sparse_forward_memory {
    sparse_memory list;
    skl_row_state states[STEP], spreads[STEP]; /* of both arguments; of the first one beside zeros */
    float own_t;
};

/* log2-sum-exp2 of every teacher head over the list, two threads a head. */
static __device__ void compute_sparse_lse(skl_lse2 *lse, sparse_memory &memory, const skl_problem &p)
{
    constexpr int HALF_STEP = STEP / 2;
    const int64_t group = skl_group_size(&p);
    const int row = (int)threadIdx.x / 2, first_key = (int)threadIdx.x % 2 * HALF_STEP;
#pragma unroll 1
    for (int64_t h = 0, count; h < group; h += count) {
        count = teacher_run(memory, group, h);
        skl_row_state state = skl_state_empty();
#pragma unroll 1
        for (int64_t first = 0; first < p.top_k; first += STEP) {
            if (!load_indices(memory, p.top_k, first))
                continue;
            teacher_dots(memory, group, h, count, [](int64_t) { return skl_lse2{0.0F, 0.0F}; });
#pragma unroll 1
            for (int key = first_key; key < first_key + HALF_STEP; key++)
                if (row < count && memory.keys[key] >= 0) {
                    const float x = teacher_logit(memory.sides[TEACHER], memory.dots[row * DOT_STRIDE + key]);
                    state = skl_state_add(state, x, x);
                }
        }
        skl_row_state other = state;
        other.m_a = __shfl_xor_sync(~0U, state.m_a, 1);
        other.l_a = __shfl_xor_sync(~0U, state.l_a, 1);
        const skl_row_state both = skl_state_merge(state, other);
        if (row < count && first_key == 0)
            lse[h + row] = skl_lse2_split(both.l_a == 0.0F ? -INFINITY : (double)both.m_a + log2((double)both.l_a));
    }
}

/* LSEs of the row's teacher heads into lse: the caller's, or computed over the list. */
static __device__ void find_sparse_lse(skl_lse2 *lse, sparse_memory &memory, const skl_cuda_params &params)
{
    const skl_input &given = params.call.inputs.lse_t;
    const int64_t group = skl_group_size(&params.problem);
    if (given.data == NULL)
        compute_sparse_lse(lse, memory, params.problem);
    for (int64_t h = threadIdx.x; given.data != NULL && h < group; h += THREADS)
        lse[h] = skl_lse2_of(skl_row_value(&given, &memory.at.sequence, memory.at.head * group + h, memory.at.query));
    __syncthreads();
}

/* Merges the states of all keys in the first thread; each has been left there by its own. */
static __device__ skl_row_state merge_keys(skl_row_state (&states)[STEP])
{
    const skl_row_state sixteen = row_merge(threadIdx.x < STEP ? states[threadIdx.x] : skl_state_empty());
    if (threadIdx.x < STEP && first_lane())
        states[threadIdx.x] = sixteen;
    __syncthreads();
    skl_row_state all = states[0];
    for (int n = LANES; threadIdx.x == 0 && n < STEP; n += LANES)
        all = skl_state_merge(all, states[n]);
    return all;
}

static __device__ void forward_row(const skl_cuda_params &params, sparse_forward_memory &shared, skl_lse2 *lse)
{
    const skl_problem &p = params.problem;
    sparse_memory &memory = shared.list;
    const int64_t group = skl_group_size(&p);
    const bool with_teacher = !skl_only_lse_s(&params.call), reverse = p.direction == SKL_KL_REVERSE;
    if (threadIdx.x < STEP)
        shared.states[threadIdx.x] = shared.spreads[threadIdx.x] = skl_state_empty();
    if (with_teacher)
        find_sparse_lse(lse, memory, params);
#pragma unroll 1
    for (int64_t first = 0; first < p.top_k; first += STEP) {
        if (!load_indices(memory, p.top_k, first))
            continue;
        if (with_teacher)
            teacher_block(memory, group, [&](int64_t h) { return lse[h]; });
        student_block(memory, params);
        if (threadIdx.x >= STEP || memory.keys[threadIdx.x] < 0)
            continue;
        const float y = memory.y[threadIdx.x], x = with_teacher ? memory.x[threadIdx.x] : y;
        skl_row_state &state = shared.states[threadIdx.x], &spread = shared.spreads[threadIdx.x];
        state = skl_state_add(state, reverse ? y : x, reverse ? x : y);
        spread = skl_state_add(spread, reverse ? y : x, 0.0F);
    }
    const skl_row_state all = merge_keys(shared.states);
    const skl_row_state all_spread = merge_keys(shared.spreads);
    const sparse_row &at = memory.at;
    if (threadIdx.x == 0)
        shared.own_t = write_row(params, at.sequence, at.head, at.query, all, all_spread);
    __syncthreads();
    for (int64_t h = threadIdx.x; params.call.rows.lse_t.data != NULL && h < group; h += THREADS)
        write_lse_t(params, at.sequence, at.head * group + h, at.query, lse[h], shared.own_t);
}

static __global__ void __launch_bounds__(THREADS, 2) sparse_forward(const __grid_constant__ skl_cuda_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    sparse_forward_memory &memory = *(sparse_forward_memory *)(void *)raw;
    const skl_problem &p = params.problem;
    skl_lse2 *const lse = (skl_lse2 *)params.call.workspace + (int64_t)blockIdx.x * skl_group_size(&p);
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p.batch * p.heads_s * p.len_q; item += gridDim.x) {
        begin_row(memory.list, params, item);
        if (memory.list.at.exists)
            forward_row(params, memory, lse);
    }
}

extern "C" cudaError_t skl_cuda_general_sparse_rows(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const cudaError_t error = cudaFuncSetAttribute(sparse_forward, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   (int)sizeof(sparse_forward_memory));
    if (error != cudaSuccess)
        return error;
    record_launch("cuda_general", SKL_VARIANT_ROWS, 1);
    sparse_forward<<<(unsigned)launch->sm_count * SKL_GENERAL_BLOCKS_PER_SM, THREADS, sizeof(sparse_forward_memory),
                     params->call.stream>>>(*params);
    return cudaPeekAtLastError();
}
