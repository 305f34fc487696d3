/* General forward: one block a query tile, one pass over its keys, a row state for every thread and row.
 *
 *   block   128 queries; 128 keys a step (8 x 8 pairs a thread), 64 with a grouped teacher (8 x 4)
 *   regs    both logits of a thread's pairs, with a grouped teacher also their sum; a chunk on its way: 250, so
 *           1 block a multiprocessor
 *   shared  two chunks of both operands, 33 KB; the threads' row states, 40 KB; LSEs and masks of the rows: 77 KB */
#include "cuda/general/row_state.cuh"

struct forward_memory {
    stage_memory stage;
    thread_states states;
    skl_lse2 lse_t[TILE]; /* of a head of a group */
    skl_lse2 lse_s[TILE]; /* with dot_t */
    skl_dot_rule rules[TILE];
    key_span spans[TILE];
    work_item at;
};

/* ---- Rows --------------------------------------------------------------------------------------------------- */

/* Writes a row, and leaves the LSEs that normalise it in `lse` (group > 1). Returns the student's LSE. */
static __device__ skl_lse2 finish_row(const skl_cuda_params &params, const tile_position &at, int row,
                                      const skl_row_state &state, int64_t group, skl_lse2 *lse)
{
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    const skl_rows &rows = params.call.rows;
    const int64_t query = at.query_first + row;
    const float lse_a = skl_lse(state.m_a, state.l_a);
    const float lse_b = skl_lse(state.m_b, state.l_b);
    const float own_t = reverse ? lse_b : lse_a;
    const float own_s = reverse ? lse_a : lse_b;
    skl_row_set(&rows.kl, &at.in.sequence, at.in.head, query, skl_kl_report(skl_state_kl(&state)));
    skl_row_set(&rows.lse_s, &at.in.sequence, at.in.head, query, own_s);
    if (group == 1)
        skl_row_set(&rows.lse_t, &at.in.sequence, at.in.head, query, own_t);
    for (int64_t h = 0; group > 1 && h < group; h++) {
        /* The group's own sum renormalises given LSEs that cover more keys. */
        skl_lse2 &head_lse = lse[h * TILE + row];
        const double given = (double)head_lse.value + (double)head_lse.low;
        const double total = own_t == -INFINITY ? -INFINITY : given + (double)own_t * SKL_LOG2E_DOUBLE;
        head_lse = skl_lse2_split(total);
        skl_row_set(&rows.lse_t, &at.in.sequence, at.in.head * group + h, query, (float)(total * SKL_LN2_DOUBLE));
    }
    return skl_lse2_of(own_s);
}

/* ---- One query tile ----------------------------------------------------------------------------------------- */

/* States of the rows over all keys that they see. */
template <int COLUMNS>
static __device__ void sum_keys(forward_memory &memory, pipeline<COLUMNS> &line, const skl_cuda_params &params,
                                tile_position at, int64_t group, const skl_lse2 *lse)
{
    const skl_problem &p = params.problem;
    const bool reverse = p.direction == SKL_KL_REVERSE;
    memory.states.clear();
    line.begin([&] { return source_of<false>(at, TEACHER, at.in.head * group); });
#pragma unroll 1
    while (at.key_first < at.in.keys.end) {
        fragment<COLUMNS> x, y;
        logit_tiles<false>(
            x, y, line, at, group, memory.lse_t, [&](int64_t h) { return lse[h * TILE + threadIdx.x]; },
            [&] { return source_of<false>(next_keys<COLUMNS>(at), TEACHER, at.in.head * group); });
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const float teachers = x.at[i][j];
                x.at[i][j] = reverse ? y.at[i][j] : teachers;
                y.at[i][j] = reverse ? teachers : y.at[i][j];
            }
        add_tile(memory, x, y, p, at);
        at.key_first += COLUMNS * LANES;
    }
}

/* dot_t[h] by the rules of the rows; phi = dKL/dP: log P - log S, or -S/P in reverse. */
template <int COLUMNS>
static __device__ void group_dots(const skl_cuda_params &params, pipeline<COLUMNS> &line, const tile_position &tile,
                                  int64_t group, const skl_lse2 *lse, forward_memory &memory)
{
    const skl_problem &p = params.problem;
    const bool reverse = p.direction == SKL_KL_REVERSE;
#pragma unroll 1
    for (int64_t h = 0; h < group; h++) {
        const int64_t head = tile.in.head * group + h;
        float dot[ROWS] = {};
        tile_position at = tile;
        line.begin([&] { return source_of<false>(at, TEACHER, at.in.head * group); });
#pragma unroll 1
        while (at.key_first < at.in.keys.end) {
            fragment<COLUMNS> x, y;
            logit_tiles<false>(
                x, y, line, at, group, memory.lse_t, [&](int64_t g) { return lse[g * TILE + threadIdx.x]; },
                [&] { return source_of<false>(at, TEACHER, head); });
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
                    x.at[i][j] -= log_probability(y.at[i][j], memory.lse_s[row_of(i)]);
            line.prefetch([&] { return source_of<false>(next_keys<COLUMNS>(at), TEACHER, at.in.head * group); });
            line.multiply_tile(y);
            scale_products(y, at.in.sides[TEACHER]);
            find_spans(memory.spans, p, at);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
                    const float difference = x.at[i][j];
                    const float log_p = log_probability(y.at[i][j], lse[h * TILE + row_of(i)]);
                    const float p_head = ex2(log_p), mean = memory.rules[row_of(i)].mean;
                    const float term =
                        reverse ? -ex2(log_p - difference) - p_head * mean : p_head * (SKL_LN2 * difference - mean);
                    dot[i] += sees(memory.spans[row_of(i)], acc_column(j)) ? term : 0.0F;
                }
            at.key_first += COLUMNS * LANES;
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const skl_dot_rule rule = memory.rules[row_of(i)];
            const float total = rule.mean + rule.share * row_sum(dot[i]);
            const int64_t query = at.query_first + row_of(i);
            if (first_lane() && query < at.in.queries.end)
                skl_row_set(&params.call.rows.dot_t, &at.in.sequence, head, query, total);
        }
    }
}

template <bool GROUPED>
static __device__ void forward_tile(const skl_cuda_params &params, forward_memory &memory, const tile_position &at,
                                    skl_lse2 *lse)
{
    const skl_problem &p = params.problem;
    const int64_t group = GROUPED ? skl_group_size(&p) : 1;
    pipeline<GROUPED ? 4 : 8> line(memory.stage);
    if (GROUPED && params.call.inputs.lse_t.data != NULL)
        load_group_lse(lse, params.call.inputs.lse_t, at, group);
    else if (GROUPED)
        compute_group_lse(lse, memory, line, params, at, group);
    if (GROUPED)
        __syncthreads();

    sum_keys(memory, line, params, at, group, lse);
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
        const skl_row_state state = row_merge(memory.states.get(i));
        const int64_t query = at.query_first + row_of(i);
        if (!first_lane() || query >= at.in.queries.end)
            continue;
        if (params.call.op == SKL_OP_PARTIAL) {
            params.call.states[skl_state_index(&p, &at.in.sequence, at.in.head, query)] = state;
            continue;
        }
        memory.lse_s[row_of(i)] = finish_row(params, at, row_of(i), state, group, lse);
        memory.rules[row_of(i)] =
            skl_dot_rule_of(&state, p.direction == SKL_KL_REVERSE, params.call.inputs.lse_t.data != NULL);
    }
    if (GROUPED && params.call.op != SKL_OP_PARTIAL && params.call.rows.dot_t.data != NULL) {
        __syncthreads();
        group_dots(params, line, at, group, lse, memory);
    }
}

template <bool GROUPED>
static __global__ void __launch_bounds__(THREADS, 1) general_forward(const __grid_constant__ skl_cuda_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    forward_memory &memory = *(forward_memory *)(void *)raw;
    skl_lse2 *const lse =
        (skl_lse2 *)params.call.workspace + (int64_t)blockIdx.x * skl_group_size(&params.problem) * TILE;
    const auto find = [&](int64_t item) { return query_item(params, item, false); };
    for_items(memory.at, find, [&] {
        if (memory.at.queries.begin < memory.at.queries.end)
            forward_tile<GROUPED>(params, memory, {memory.at, memory.at.queries.begin, memory.at.keys.begin}, lse);
    });
}

template <bool GROUPED>
static cudaError_t launch_forward(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const cudaError_t error = cudaFuncSetAttribute(
        general_forward<GROUPED>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(forward_memory));
    if (error != cudaSuccess)
        return error;
    record_launch("cuda_general", GROUPED ? SKL_VARIANT_GROUPS : SKL_VARIANT_GRID_STRIDE, 1);
    general_forward<GROUPED><<<(unsigned)launch->sm_count * SKL_GENERAL_BLOCKS_PER_SM, THREADS,
                               sizeof(forward_memory), params->call.stream>>>(*params);
    return cudaPeekAtLastError();
}

extern "C" cudaError_t skl_cuda_general_forward(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    return skl_group_size(&params->problem) > 1 ? launch_forward<true>(params, launch)
                                                : launch_forward<false>(params, launch);
}
