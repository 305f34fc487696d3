/* General forward of a sparse indexer: KL, LSEs, entropies and mass of each row over its list of top-k keys.
 *
 *   block   one row at a time, grid stride over the rows; 2 resident per SM
 *   shared  74 KB: sparse_memory, and two row states per key column
 *
 *   each teacher head      its LSE over the list, unless given
 *   for each 64 entries    teacher heads -> x = log2 of their mean, index heads -> y -> row states */
#include "cuda/general/indexer/sparse_product.cuh"
#include "cuda/common/indexer/write_row.cuh"

/* State n covers the n-th key of each tile. States are in shared memory, because the products need the registers. */
struct sparse_forward_memory {
    sparse_memory sparse;
    skl_row_state states[KEY_TILE];         /* of A and B */
    skl_row_state entropy_states[KEY_TILE]; /* of A against all-zero logits, see skl_state_entropy() */
    float lse_of_mean;                      /* over the teacher heads */
};

/* log2-sum-exp2 of each teacher head over the list, two threads per head. */
static __device__ void compute_sparse_lse(skl_lse2 *lse, sparse_memory &memory, const skl_problem &p)
{
    constexpr int HALF_TILE = KEY_TILE / 2;
    const int64_t group = skl_group_size(&p);
    const int head = (int)(threadIdx.x / 2), first_key = (int)(threadIdx.x % 2) * HALF_TILE;
#pragma unroll 1
    for (int64_t h = 0, count; h < group; h += count) {
        count = teacher_heads_per_product(memory, group, h);
        skl_row_state state = skl_state_empty();
#pragma unroll 1
        for (int64_t first = 0; first < p.top_k; first += KEY_TILE) {
            if (!load_indices(memory, p.top_k, first))
                continue;
            set_teacher_product(memory, group, h, count, [](int64_t) { return skl_lse2{0.0F, 0.0F}; });
            multiply_heads(memory, count);
#pragma unroll 1
            for (int key = first_key; key < first_key + HALF_TILE; key++)
                if (head < count && memory.keys[key] >= 0) {
                    const float x = teacher_logit(memory.sides[TEACHER], memory.dots[head * DOT_STRIDE + key]);
                    state = skl_state_add(state, x, x);
                }
        }
        skl_row_state other = state;
        other.m_a = __shfl_xor_sync(~0U, state.m_a, 1);
        other.l_a = __shfl_xor_sync(~0U, state.l_a, 1);
        const skl_row_state both = skl_state_merge(state, other);
        if (head < count && first_key == 0)
            lse[h + head] = skl_lse2_split(both.l_a == 0.0F ? -INFINITY : (double)both.m_a + log2((double)both.l_a));
    }
}

/* LSEs of the row's teacher heads: given by the caller, or computed over the list. */
static __device__ void load_or_compute_lse(skl_lse2 *lse, sparse_memory &memory, const skl_cuda_params &params)
{
    const skl_input &given = params.call.inputs.lse_t;
    const int64_t group = skl_group_size(&params.problem);
    if (given.data == NULL)
        compute_sparse_lse(lse, memory, params.problem);
    for (int64_t h = threadIdx.x; given.data != NULL && h < group; h += THREADS)
        lse[h] =
            skl_lse2_of(skl_row_value(&given, &memory.row.sequence, memory.row.head * group + h, memory.row.query));
    __syncthreads();
}

/* Merges the states of all keys. Only thread 0 gets the result. Each thread has written the state that it reads
 * first, so no barrier is needed before. */
static __device__ skl_row_state merge_keys(skl_row_state (&states)[KEY_TILE])
{
    const skl_row_state merged = row_merge(threadIdx.x < KEY_TILE ? states[threadIdx.x] : skl_state_empty());
    if (threadIdx.x < KEY_TILE && first_lane())
        states[threadIdx.x] = merged;
    __syncthreads();
    skl_row_state all = states[0];
    for (int n = LANES; threadIdx.x == 0 && n < KEY_TILE; n += LANES)
        all = skl_state_merge(all, states[n]);
    return all;
}

static __device__ void forward_row(const skl_cuda_params &params, sparse_forward_memory &shared, skl_lse2 *lse)
{
    const skl_problem &p = params.problem;
    sparse_memory &memory = shared.sparse;
    const int64_t group = skl_group_size(&p);
    const bool with_teacher = !skl_only_lse_s(&params.call), reverse = p.direction == SKL_KL_REVERSE;
    if (threadIdx.x < KEY_TILE)
        shared.states[threadIdx.x] = shared.entropy_states[threadIdx.x] = skl_state_empty();
    if (with_teacher)
        load_or_compute_lse(lse, memory, params);
#pragma unroll 1
    for (int64_t first = 0; first < p.top_k; first += KEY_TILE) {
        if (!load_indices(memory, p.top_k, first))
            continue;
        row_logits(memory, params, with_teacher, [&](int64_t h) { return lse[h]; });
        if (threadIdx.x >= KEY_TILE || memory.keys[threadIdx.x] < 0)
            continue;
        const float y = memory.y[threadIdx.x], x = with_teacher ? memory.x[threadIdx.x] : y;
        skl_row_state &state = shared.states[threadIdx.x], &entropy = shared.entropy_states[threadIdx.x];
        state = skl_state_add(state, reverse ? y : x, reverse ? x : y);
        entropy = skl_state_add(entropy, reverse ? y : x, 0.0F);
    }
    const skl_row_state all = merge_keys(shared.states);
    const skl_row_state all_entropy = merge_keys(shared.entropy_states);
    const sparse_row &row = memory.row;
    if (threadIdx.x == 0)
        shared.lse_of_mean = write_row(params, row.sequence, row.head, row.query, all, all_entropy);
    __syncthreads();
    for (int64_t h = threadIdx.x; params.call.rows.lse_t.data != NULL && h < group; h += THREADS)
        write_lse_t(params, row.sequence, row.head * group + h, row.query, lse[h], shared.lse_of_mean);
}

static __global__ void __launch_bounds__(THREADS, 2) sparse_forward(const __grid_constant__ skl_cuda_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    sparse_forward_memory &memory = *(sparse_forward_memory *)(void *)raw;
    const skl_problem &p = params.problem;
    skl_lse2 *const lse = (skl_lse2 *)params.call.workspace + (int64_t)blockIdx.x * skl_group_size(&p);
#pragma unroll 1
    for (int64_t item = blockIdx.x; item < p.batch * p.heads_s * p.len_q; item += gridDim.x) {
        begin_row(memory.sparse, params, item);
        if (memory.sparse.row.exists)
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
