/* General forward: one block a query tile, one pass over its keys, a row state in every thread. */
#include "cuda/general_tile.cuh"

/* Adds a thread's columns of one row to its state. */
static __device__ void add_columns(skl_row_state &state, const float *a, const float *b, const skl_range &visible,
                                   const place &at)
{
    float m_1 = state.m_1, m_2 = state.m_2;
    for (int j = 0; j < OWN; j++) {
        if (!sees(visible, at, j))
            continue;
        m_1 = fmaxf(m_1, a[j]);
        m_2 = fmaxf(m_2, b[j]);
    }
    state = skl_state_move(state, m_1, m_2);
    for (int j = 0; j < OWN; j++) {
        if (!sees(visible, at, j))
            continue;
        const float u = a[j] - m_1;
        const float v = b[j] - m_2;
        const float p = exp2f(u);
        state.l_1 += p;
        state.l_2 += exp2f(v);
        state.w += p * (u - v);
    }
}

/* log2-sum-exp2 of every teacher head of the group into lse [group][TILE]. */
static __device__ void compute_group_lse(float *lse, operands &staged, const skl_problem &p, const skl_side &teacher,
                                         place at, int64_t group)
{
    const skl_range keys = tile_keys(p, at);
    for (int64_t h = 0; h < group; h++) {
        skl_row_state state[OWN];
        for (int i = 0; i < OWN; i++)
            state[i] = skl_state_empty();
        for (at.key_first = keys.begin; at.key_first < keys.end; at.key_first += TILE) {
            fragment x;
            logit_tile(x, staged, teacher, at, at.head * group + h);
            for (int i = 0; i < OWN; i++)
                add_columns(state[i], x[i], x[i], row_visible(p, at, i), at);
        }
        for (int i = 0; i < OWN; i++) {
            const skl_row_state row = row_merge(state[i]);
            if (first_lane())
                lse[h * TILE + row_of(i)] = row.l_1 == 0.0F ? -INFINITY : row.m_1 + log2f(row.l_1);
        }
    }
    __syncthreads();
}

/* Writes a row, and leaves the LSEs that normalise it in `lse` (group > 1). Returns the student's LSE, base 2. */
static __device__ float finish_row(const skl_cuda_params &params, const place &at, int i, const skl_row_state &state,
                                   int64_t group, float *lse)
{
    const bool reverse = params.problem.direction == SKL_KL_REVERSE;
    const skl_rows &rows = params.call.rows;
    const int64_t query = at.query_first + row_of(i);
    const float lse_1 = skl_lse(state.m_1, state.l_1);
    const float lse_2 = skl_lse(state.m_2, state.l_2);
    const float own_t = reverse ? lse_2 : lse_1;
    const float own_s = reverse ? lse_1 : lse_2;
    if (first_lane() && query < at.sequence.query_count) {
        skl_row_set(&rows.kl, &at.sequence, at.head, query, skl_kl_report(skl_state_kl(&state)));
        skl_row_set(&rows.lse_s, &at.sequence, at.head, query, own_s);
        for (int64_t h = 0; h < group; h++) {
            float natural = own_t;
            if (group > 1) { /* the group's own sum renormalises given LSEs that cover more keys */
                float *const head_lse = &lse[h * TILE + row_of(i)];
                *head_lse = own_t == -INFINITY ? own_t : *head_lse + own_t * SKL_LOG2E;
                natural = *head_lse * SKL_LN2;
            }
            skl_row_set(&rows.lse_t, &at.sequence, at.head * group + h, query, natural);
        }
    }
    return own_s * SKL_LOG2E;
}

/* dot_t[h] = sum_j P_hj phi_j, phi = dKL/dP: log P - log S, or -S/P in reverse. */
static __device__ void group_dots(const skl_cuda_params &params, operands &staged, const skl_side &teacher,
                                  const skl_side &student, place at, int64_t group, const float *lse,
                                  const float *lse_s)
{
    const skl_problem &p = params.problem;
    const bool reverse = p.direction == SKL_KL_REVERSE;
    const skl_range keys = tile_keys(p, at);
    for (int64_t h = 0; h < group; h++) {
        float dot[OWN] = {0.0F, 0.0F, 0.0F, 0.0F};
        for (at.key_first = keys.begin; at.key_first < keys.end; at.key_first += TILE) {
            fragment x, y, z;
            teacher_tile(x, staged, teacher, at, group, lse);
            logit_tile(y, staged, student, at, at.head);
            logit_tile(z, staged, teacher, at, at.head * group + h);
            for (int i = 0; i < OWN; i++)
                for (int j = 0; j < OWN; j++) {
                    const float log_p = z[i][j] - lse[h * TILE + row_of(i)];
                    const float v = y[i][j] - lse_s[i];
                    const float term = reverse ? -exp2f(log_p - x[i][j] + v) : exp2f(log_p) * SKL_LN2 * (x[i][j] - v);
                    if (sees(row_visible(p, at, i), at, j))
                        dot[i] += term;
                }
        }
        for (int i = 0; i < OWN; i++) {
            const float total = row_sum(dot[i]);
            const int64_t query = at.query_first + row_of(i);
            if (first_lane() && query < at.sequence.query_count)
                skl_row_set(&params.call.rows.dot_t, &at.sequence, at.head * group + h, query, total);
        }
    }
}

static __device__ void forward_tile(const skl_cuda_params &params, operands &staged, place at, float *lse)
{
    const skl_problem &p = params.problem;
    const skl_side teacher = skl_teacher_of(&p, &params.call);
    const skl_side student = skl_student_of(&p, &params.call);
    const int64_t group = skl_group(&p);
    const bool reverse = p.direction == SKL_KL_REVERSE;
    __syncthreads(); /* the block may still read lse of the tile before */
    if (group > 1 && params.call.inputs.lse_t.data != NULL)
        load_group_lse(lse, params.call.inputs.lse_t, at, group);
    else if (group > 1)
        compute_group_lse(lse, staged, p, teacher, at, group);

    skl_row_state state[OWN];
    for (int i = 0; i < OWN; i++)
        state[i] = skl_state_empty();
    const skl_range keys = tile_keys(p, at);
    for (at.key_first = keys.begin; at.key_first < keys.end; at.key_first += TILE) {
        fragment x, y;
        teacher_tile(x, staged, teacher, at, group, lse);
        logit_tile(y, staged, student, at, at.head);
        for (int i = 0; i < OWN; i++) {
            float a[OWN], b[OWN];
            for (int j = 0; j < OWN; j++) {
                a[j] = reverse ? y[i][j] : x[i][j];
                b[j] = reverse ? x[i][j] : y[i][j];
            }
            add_columns(state[i], a, b, row_visible(p, at, i), at);
        }
    }
    float lse_s[OWN];
    for (int i = 0; i < OWN; i++) {
        state[i] = row_merge(state[i]);
        const int64_t query = at.query_first + row_of(i);
        if (params.call.op == SKL_OP_PARTIAL) {
            if (first_lane() && query < at.sequence.query_count)
                params.call.states[skl_state_index(&p, &at.sequence, at.head, query)] = state[i];
            continue;
        }
        lse_s[i] = finish_row(params, at, i, state[i], group, lse);
    }
    if (params.call.op != SKL_OP_PARTIAL && params.call.rows.dot_t.data != NULL) {
        __syncthreads();
        group_dots(params, staged, teacher, student, at, group, lse, lse_s);
    }
}

static __global__ void __launch_bounds__(THREADS, 1) general_forward(const __grid_constant__ skl_cuda_params params)
{
    __shared__ operands staged;
    const skl_problem &p = params.problem;
    const int64_t tiles = skl_ceil_div(p.len_q, TILE);
    const int64_t items = p.batch * p.heads_s * tiles;
    float *const lse = (float *)params.scratch + (int64_t)blockIdx.x * skl_group(&p) * TILE;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        place at;
        at.sequence = device_sequence(params, item / (p.heads_s * tiles));
        at.head = item / tiles % p.heads_s;
        at.query_first = (tiles - 1 - item % tiles) * TILE; /* causal: longest first */
        if (at.query_first < at.sequence.query_count)
            forward_tile(params, staged, at, lse);
    }
}

extern "C" cudaError_t skl_cuda_general_forward(const skl_cuda_params *params)
{
    general_forward<<<(unsigned)params->block_count, THREADS, 0, params->call.stream>>>(*params);
    return cudaPeekAtLastError();
}
