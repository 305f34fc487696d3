/* General forward: KL, LSEs and dot_t of any problem. The products are f32 FFMAs, at 36 of the 67 TFLOP/s of an H200
 * with heads of 128.
 *
 *   block   128 queries x 128 keys per tile (8 x 8 pairs per thread), 128 x 64 (8 x 4) with teacher groups;
 *           1 resident per SM, grid stride over the query tiles, one pass over the keys of each
 *   regs    250 per thread: logits of A and B, with teacher groups also the sum over heads; loads in flight
 *   shared  77 KB: two stages of both operands (33 KB), row states of all threads (40 KB), LSEs and spans of rows
 *
 *   one head:       for each key tile   x = q_t k_t^T, y = q_s k_s^T -> row states
 *   teacher group:  each head           its LSE, unless given
 *                   for each key tile   all heads -> x = log2 of their mean, y -> row states
 *                   each head           dot_t, if wanted: one more pass over the keys
 *
 * Each thread has a row state per row, over its columns; the 16 lanes of a row merge theirs at the end. */
#include "cuda/general/row_state.cuh"

struct forward_memory {
    pipeline_memory pipe;
    thread_states states;
    skl_lse2 lse_t[TILE]; /* LSEs of one head of the teacher group */
    skl_lse2 lse_s[TILE]; /* the student's LSEs, for dot_t */
    skl_dot_rule rules[TILE];
    key_span spans[TILE];
    work_item work;
};

/* ---- Rows --------------------------------------------------------------------------------------------------- */

/* The state of a row with its sink. The LSEs of a teacher group are in `lse`. */
static __device__ skl_row_state row_with_sink(const skl_cuda_params &params, const tile_position &tile, int row,
                                              const skl_row_state &state, int64_t group, const skl_lse2 *lse)
{
    const skl_problem &p = params.problem;
    const skl_inputs &inputs = params.call.inputs;
    const int64_t query = tile.query_first + row, head = tile.work.head;
    if (group == 1 || !p.sinks || !has_sink(p, tile.work.sequence, query))
        return with_sink(params, tile.work.sequence, head, query, state);
    skl_log_sum sum = {-INFINITY, 0.0F};
    for (int64_t h = 0; h < group; h++) {
        const skl_lse2 of_head = lse[h * TILE + row];
        sum = skl_log_sum_add(sum, inputs.sink_t[head * group + h] - (of_head.value + of_head.low) * SKL_LN2);
    }
    const skl_sink_logits sink = {sum.largest + logf(sum.sum / (float)group), inputs.sink_s[head]};
    return add_sink(state, sink, p.direction == SKL_KL_REVERSE);
}

/* Writes the results of a row. With a teacher group, also normalizes the LSEs of its heads in `lse`, unless the call
 * has both LSEs. Returns the student's LSE. */
static __device__ skl_lse2 finish_row(const skl_cuda_params &params, const tile_position &tile, int row,
                                      const skl_row_state &of_keys, int64_t group, skl_lse2 *lse)
{
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    const bool one_pass = skl_op_is_one_pass(params.call.op); /* dot_t is made of the LSEs of the gradients */
    const skl_rows &rows = params.call.rows;
    const int64_t query = tile.query_first + row;
    const skl_row_state state = row_with_sink(params, tile, row, of_keys, group, lse);
    const float lse_a = skl_lse(state.m_a, state.l_a);
    const float lse_b = skl_lse(state.m_b, state.l_b);
    const float lse_t = reverse ? lse_b : lse_a; /* teacher group: LSE of log mean_h P_h */
    const float lse_s = reverse ? lse_a : lse_b;
    skl_row_set(&rows.kl, &tile.work.sequence, tile.work.head, query, skl_kl_report(skl_state_kl(&state)));
    skl_row_set(&rows.lse_s, &tile.work.sequence, tile.work.head, query, lse_s);
    if (group == 1)
        skl_row_set(&rows.lse_t, &tile.work.sequence, tile.work.head, query, lse_t);
    for (int64_t h = 0; group > 1 && h < group; h++) {
        /* Given LSEs may cover more keys than the row attends to; lse_t renormalizes them. */
        skl_lse2 &head_lse = lse[h * TILE + row];
        const double given = (double)head_lse.value + (double)head_lse.low;
        const double total = lse_t == -INFINITY ? -INFINITY : given + (double)lse_t * SKL_LOG2E_DOUBLE;
        const float reported = (float)(total * SKL_LN2_DOUBLE);
        if (!one_pass)
            head_lse = skl_lse2_of(reported); /* rounded, as a backward reads it */
        skl_row_set(&rows.lse_t, &tile.work.sequence, tile.work.head * group + h, query, reported);
    }
    return skl_lse2_of(one_pass ? skl_row_value(&params.call.inputs.lse_s, &tile.work.sequence, tile.work.head, query)
                                : lse_s);
}

/* ---- One query tile ----------------------------------------------------------------------------------------- */

/* Row states over all visible keys, in memory.states. */
template <int COLUMNS>
static __device__ void sum_keys(forward_memory &memory, pipeline<COLUMNS> &pipe, const skl_cuda_params &params,
                                tile_position tile, int64_t group, const skl_lse2 *lse)
{
    const skl_problem &p = params.problem;
    const bool reverse = p.direction == SKL_KL_REVERSE;
    clear(memory.states);
    pipe.begin([&] { return operands_of<false>(tile, TEACHER, tile.work.head * group); });
#pragma unroll 1
    while (tile.key_first < tile.work.keys.end) {
        fragment<COLUMNS> x, y;
        logit_tiles<false>(
            x, y, pipe, tile, group, memory.lse_t, [&](int64_t h) { return lse[h * TILE + threadIdx.x]; },
            [&] { return operands_of<false>(next_key_tile<COLUMNS>(tile), TEACHER, tile.work.head * group); });
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const float teacher = x.at[i][j];
                x.at[i][j] = reverse ? y.at[i][j] : teacher;
                y.at[i][j] = reverse ? teacher : y.at[i][j];
            }
        add_tile(memory, x, y, p, tile);
        tile.key_first += COLUMNS * LANES;
    }
}

/* dot_t[h] = sum_j P_hj dKL/dP_j, where dKL/dP is log P - log S, or -S/P for the reverse KL. mean and
 * share: see skl_dot_rule. */
template <int COLUMNS>
static __device__ void group_dots(const skl_cuda_params &params, pipeline<COLUMNS> &pipe,
                                  const tile_position &first_tile, int64_t group, const skl_lse2 *lse,
                                  forward_memory &memory)
{
    const skl_problem &p = params.problem;
    const bool reverse = p.direction == SKL_KL_REVERSE;
#pragma unroll 1
    for (int64_t h = 0; h < group; h++) {
        const int64_t head = first_tile.work.head * group + h;
        float dot[ROWS] = {}, mass[ROWS] = {}; /* sums of p_head (phi - mean) and of p_head */
        tile_position tile = first_tile;
        pipe.begin([&] { return operands_of<false>(tile, TEACHER, tile.work.head * group); });
#pragma unroll 1
        while (tile.key_first < tile.work.keys.end) {
            fragment<COLUMNS> x, y;
            logit_tiles<false>(
                x, y, pipe, tile, group, memory.lse_t, [&](int64_t g) { return lse[g * TILE + threadIdx.x]; },
                [&] { return operands_of<false>(tile, TEACHER, head); });
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
                    x.at[i][j] -= log_probability(y.at[i][j], memory.lse_s[acc_row(i)]);
            pipe.prefetch(
                [&] { return operands_of<false>(next_key_tile<COLUMNS>(tile), TEACHER, tile.work.head * group); });
            pipe.multiply_tile(y);
            scale_products(y, tile.work.sides[TEACHER]);
            find_spans(memory.spans, p, tile);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
                    const float log_ratio = x.at[i][j];
                    const float log_p = log_probability(y.at[i][j], lse[h * TILE + acc_row(i)]);
                    const float p_head = ex2(log_p), mean = memory.rules[acc_row(i)].mean;
                    const float term =
                        reverse ? -ex2(log_p - log_ratio) - p_head * mean : p_head * (SKL_LN2 * log_ratio - mean);
                    const bool seen = sees(memory.spans[acc_row(i)], acc_column(j));
                    dot[i] += seen ? term : 0.0F;
                    mass[i] += seen ? p_head : 0.0F;
                }
            tile.key_first += COLUMNS * LANES;
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const skl_dot_rule rule = memory.rules[acc_row(i)];
            const float of_row = row_sum(dot[i]), of_head = row_sum(mass[i]);
            const float total =
                rule.mean + (rule.normalizes && of_head > 0.0F ? of_row / of_head : rule.share * of_row);
            const int64_t query = tile.query_first + acc_row(i);
            if (first_lane() && query < tile.work.queries.end)
                skl_row_set(&params.call.rows.dot_t, &tile.work.sequence, head, query, total);
        }
    }
}

template <bool TEACHER_GROUPS>
static __device__ void forward_tile(const skl_cuda_params &params, forward_memory &memory, const tile_position &tile,
                                    skl_lse2 *lse)
{
    const skl_problem &p = params.problem;
    const int64_t group = TEACHER_GROUPS ? skl_group_size(&p) : 1;
    pipeline<TEACHER_GROUPS ? 4 : 8> pipe(memory.pipe);
    if (TEACHER_GROUPS) {
        find_group_lse(lse, memory, pipe, params, tile, group);
        __syncthreads();
    }

    sum_keys(memory, pipe, params, tile, group, lse);
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
        const skl_row_state state = row_merge(memory.states[i][threadIdx.x]);
        const int64_t query = tile.query_first + acc_row(i);
        if (!first_lane() || query >= tile.work.queries.end)
            continue;
        if (params.call.op == SKL_OP_PARTIAL) {
            params.call.states[skl_state_index(&p, &tile.work.sequence, tile.work.head, query)] = state;
            continue;
        }
        memory.lse_s[acc_row(i)] = finish_row(params, tile, acc_row(i), state, group, lse);
        memory.rules[acc_row(i)] =
            skl_dot_rule_of(&state, p.direction == SKL_KL_REVERSE,
                            params.call.inputs.lse_t.data != NULL && !skl_op_is_one_pass(params.call.op));
    }
    if (TEACHER_GROUPS && params.call.op != SKL_OP_PARTIAL && params.call.rows.dot_t.data != NULL) {
        __syncthreads();
        group_dots(params, pipe, tile, group, lse, memory);
    }
}

template <bool TEACHER_GROUPS>
static __global__ void __launch_bounds__(THREADS, 1) general_forward(const __grid_constant__ skl_cuda_params params)
{
    extern __shared__ __align__(16) unsigned char raw[];
    forward_memory &memory = *(forward_memory *)(void *)raw;
    skl_lse2 *const lse =
        (skl_lse2 *)params.call.workspace + (int64_t)blockIdx.x * skl_group_size(&params.problem) * TILE;
    const auto find = [&](int64_t index) { return query_item(params, index, false); };
    for_each_item(memory.work, find, [&] {
        if (memory.work.queries.begin < memory.work.queries.end)
            forward_tile<TEACHER_GROUPS>(params, memory,
                                         {memory.work, memory.work.queries.begin, memory.work.keys.begin}, lse);
    });
}

extern "C" cudaError_t skl_cuda_general_forward(const skl_cuda_params *params, const skl_cuda_launch *launch)
{
    const bool groups = skl_group_size(&params->problem) > 1;
    record_launch("cuda_general", groups ? SKL_VARIANT_GROUPS : SKL_VARIANT_GRID_STRIDE, 1);
    return launch_general(groups ? general_forward<true> : general_forward<false>, *params, launch,
                          sizeof(forward_memory));
}
