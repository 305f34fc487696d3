/* Forward of an indexer, dense: one block a query tile, one pass over its keys, after one for the LSEs of the teacher
 * if they are not given. Every key tile sees all teacher heads, then all index heads.
 *
 *   block   128 queries, 64 keys a step: 8 x 4 pairs a thread
 *   shared  two chunks of both operands, 33 KB; the threads' row states, 48 KB; LSEs, weights and masks: 84 KB */
#include "cuda/general/row_state.cuh"
#include "cuda/common/indexer/write_row.cuh"
#include "cuda/general/indexer/dense_tile.cuh"

constexpr int COLUMNS = SKL_INDEX_STEP / LANES;

struct indexer_memory {
    stage_memory stage;
    spread_states states;
    skl_lse2 lse_t[TILE];
    float weights[TILE];
    key_span spans[TILE];
    work_item at;
};

static __device__ tile_source first_source(const skl_cuda_params &params, const tile_position &at, bool with_teacher)
{
    return with_teacher ? source_of<false>(at, TEACHER, at.in.head * skl_group_size(&params.problem))
                        : index_source<false>(at, params.problem.index_heads, 0);
}

/* States of the rows over all keys that they see; without the teacher, of the student beside itself. */
static __device__ void sum_keys(indexer_memory &memory, pipeline<COLUMNS> &line, const skl_cuda_params &params,
                                tile_position at, const skl_lse2 *lse, bool with_teacher)
{
    const skl_problem &p = params.problem;
    const bool reverse = p.direction == SKL_KL_REVERSE;
    memory.states.clear();
    line.begin([&] { return first_source(params, at, with_teacher); });
#pragma unroll 1
    while (at.key_first < at.in.keys.end) {
        fragment<COLUMNS> x, y;
        if (with_teacher)
            teacher_mean(
                x, line, at, skl_group_size(&p), memory.lse_t, [&](int64_t h) { return lse[h * TILE + threadIdx.x]; },
                [&] { return index_source<false>(at, p.index_heads, 0); });
        index_logits(y, line, params, at, memory.weights,
                     [&] { return first_source(params, next_keys<COLUMNS>(at), with_teacher); });
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const float students = y.at[i][j], teachers = with_teacher ? x.at[i][j] : students;
                x.at[i][j] = reverse ? students : teachers;
                y.at[i][j] = reverse ? teachers : students;
            }
        add_tile(memory, x, y, p, at);
        at.key_first += COLUMNS * LANES;
    }
}

static __device__ void forward_tile(const skl_cuda_params &params, indexer_memory &memory, const tile_position &at,
                                    skl_lse2 *lse)
{
    const int64_t group = skl_group_size(&params.problem);
    const bool with_teacher = !skl_only_lse_s(&params.call);
    pipeline<COLUMNS> line(memory.stage);
    if (with_teacher && params.call.inputs.lse_t.data != NULL)
        load_group_lse(lse, params.call.inputs.lse_t, at, group);
    else if (with_teacher)
        compute_group_lse(lse, memory, line, params, at, group);
    __syncthreads();

    sum_keys(memory, line, params, at, lse, with_teacher);
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
        const skl_row_state state = row_merge(memory.states.get(i));
        const skl_row_state spread = row_merge(memory.states.spread(i));
        const int64_t query = at.query_first + row_of(i);
        if (!first_lane() || query >= at.in.queries.end)
            continue;
        const float own_t = write_row(params, at.in.sequence, at.in.head, query, state, spread);
        for (int64_t h = 0; params.call.rows.lse_t.data != NULL && h < group; h++)
            write_lse_t(params, at.in.sequence, at.in.head * group + h, query, lse[h * TILE + row_of(i)], own_t);
    }
}

static __global__ void __launch_bounds__(THREADS, 1) indexer_forward(const __grid_constant__ skl_cuda_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    indexer_memory &memory = *(indexer_memory *)(void *)raw;
    skl_lse2 *const lse =
        (skl_lse2 *)params.call.workspace + (int64_t)blockIdx.x * skl_group_size(&params.problem) * TILE;
    const auto find = [&](int64_t item) { return query_item(params, item); };
    for_items(memory.at, find, [&] {
        if (memory.at.queries.begin < memory.at.queries.end)
            forward_tile(params, memory, {memory.at, memory.at.queries.begin, memory.at.keys.begin}, lse);
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
