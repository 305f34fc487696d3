/* General forward of a dense indexer: KL, LSEs, entropies and mass of each row, with f32 FFMAs.
 *
 *   block   128 queries x 64 keys per tile, 8 x 4 pairs per thread; 1 resident per SM, grid stride over query tiles
 *   shared  84 KB: two stages of both operands (33 KB), row states of all threads (48 KB), LSEs, weights, spans
 *
 *   each teacher head   its LSE, unless given: one pass over the keys
 *   for each key tile   all teacher heads -> x = log2 of their mean, all index heads -> y -> row states */
#include "cuda/general/row_state.cuh"
#include "cuda/common/indexer/write_row.cuh"
#include "cuda/general/indexer/dense_tile.cuh"

namespace dense_forward
{

constexpr int COLUMNS = SKL_INDEX_STEP / LANES;

struct indexer_memory {
    pipeline_memory pipe;
    entropy_states states;
    skl_lse2 lse_t[TILE];
    float weights[TILE];
    key_span spans[TILE];
    work_item work;
};

static __device__ tile_operands first_operands(const skl_cuda_params &params, const tile_position &tile,
                                               bool with_teacher)
{
    return with_teacher ? operands_of<false>(tile, TEACHER, tile.work.head * skl_group_size(&params.problem))
                        : index_operands<false>(tile, params.problem.index_heads, 0);
}

/* Row states over all visible keys, in memory.states. Without the teacher (only lse_s is wanted) x = y. */
static __device__ void sum_keys(indexer_memory &memory, pipeline<COLUMNS> &pipe, const skl_cuda_params &params,
                                tile_position tile, const skl_lse2 *lse, bool with_teacher)
{
    const skl_problem &p = params.problem;
    const bool reverse = p.direction == SKL_KL_REVERSE;
    memory.states.clear();
    pipe.begin([&] { return first_operands(params, tile, with_teacher); });
#pragma unroll 1
    while (tile.key_first < tile.work.keys.end) {
        fragment<COLUMNS> x, y;
        if (with_teacher)
            teacher_mean(
                x, pipe, tile, skl_group_size(&p), memory.lse_t,
                [&](int64_t h) { return lse[h * TILE + threadIdx.x]; },
                [&] { return index_operands<false>(tile, p.index_heads, 0); });
        index_logits(y, pipe, params, tile, memory.weights,
                     [&] { return first_operands(params, next_key_tile<COLUMNS>(tile), with_teacher); });
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const float student = y.at[i][j], teacher = with_teacher ? x.at[i][j] : student;
                x.at[i][j] = reverse ? student : teacher;
                y.at[i][j] = reverse ? teacher : student;
            }
        add_tile(memory, x, y, p, tile);
        tile.key_first += COLUMNS * LANES;
    }
}

static __device__ void forward_tile(const skl_cuda_params &params, indexer_memory &memory, const tile_position &tile,
                                    skl_lse2 *lse)
{
    const int64_t group = skl_group_size(&params.problem);
    const bool with_teacher = !skl_only_lse_s(&params.call);
    pipeline<COLUMNS> pipe(memory.pipe);
    if (with_teacher && params.call.inputs.lse_t.data != NULL)
        load_group_lse(lse, params.call.inputs.lse_t, tile, group);
    else if (with_teacher)
        compute_group_lse(lse, memory, pipe, params, tile, group);
    __syncthreads();

    sum_keys(memory, pipe, params, tile, lse, with_teacher);
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
        const skl_row_state state = row_merge(memory.states.get(i));
        const skl_row_state entropy = row_merge(memory.states.entropy_state(i));
        const int64_t query = tile.query_first + acc_row(i);
        if (!first_lane() || query >= tile.work.queries.end)
            continue;
        const float lse_of_mean = write_row(params, tile.work.sequence, tile.work.head, query, state, entropy);
        for (int64_t h = 0; params.call.rows.lse_t.data != NULL && h < group; h++)
            write_lse_t(params, tile.work.sequence, tile.work.head * group + h, query, lse[h * TILE + acc_row(i)],
                        lse_of_mean);
    }
}

static __global__ void __launch_bounds__(THREADS, 1) indexer_forward(const __grid_constant__ skl_cuda_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    indexer_memory &memory = *(indexer_memory *)(void *)raw;
    skl_lse2 *const lse =
        (skl_lse2 *)params.call.workspace + (int64_t)blockIdx.x * skl_group_size(&params.problem) * TILE;
    const auto find = [&](int64_t index) { return query_item(params, index); };
    for_each_item(memory.work, find, [&] {
        if (memory.work.queries.begin < memory.work.queries.end)
            forward_tile(params, memory, {memory.work, memory.work.queries.begin, memory.work.keys.begin}, lse);
    });
}

extern "C" cudaError_t skl_cuda_general_dense_rows(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const cudaError_t error = cudaFuncSetAttribute(indexer_forward, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   (int)sizeof(indexer_memory));
    if (error != cudaSuccess)
        return error;
    record_launch("cuda_general", SKL_VARIANT_ROWS, 1);
    indexer_forward<<<(unsigned)launch->sm_count * SKL_GENERAL_BLOCKS_PER_SM, THREADS, sizeof(indexer_memory),
                      params->call.stream>>>(*params);
    return cudaPeekAtLastError();
}

} // namespace dense_forward
