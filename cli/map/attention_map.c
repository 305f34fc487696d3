#include "cli/map/attention_map.h"
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "device/device.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

/* Queries per call of the library: enough to occupy every core or SM. */
enum { BLOCK_ROWS = 1024 };

/* The first query or key of a bucket. A bucket ends where the next one begins. */
static int64_t bucket_begin(int64_t bucket, int64_t count, int64_t length)
{
    /* length * bucket / count, without overflow of the product */
    return length / count * bucket + length % count * bucket / count;
}

static int64_t bucket_of(int64_t at, int64_t count, int64_t length)
{
    int64_t bucket = (int64_t)((double)at / (double)length * (double)count);
    bucket = bucket < count ? bucket : count - 1;
    while (bucket_begin(bucket, count, length) > at)
        bucket--;
    while (bucket_begin(bucket + 1, count, length) <= at)
        bucket++;
    return bucket;
}

/* ---- One sequence as a separate problem --------------------------------------------------------------------- */

typedef struct sequence_view {
    skl_problem problem; /* one sequence, not packed */
    skl_inputs inputs;
    int64_t offset_q; /* position of its first query */
} sequence_view;

/* Where a view begins, relative to the tensors that it is of. */
typedef struct view_begin {
    int64_t batch, query, key;
} view_begin;

static void advance(skl_input *tensor, view_begin begin, int64_t row, size_t size)
{
    if (tensor->data)
        tensor->data = (const char *)tensor->data +
                       (begin.batch * tensor->stride_batch + row * tensor->stride_row) * (int64_t)size;
}

static void advance_inputs(skl_inputs *inputs, const skl_problem *problem, view_begin begin)
{
    const size_t of_teacher = problem->dtype_t == SKL_F32 ? sizeof(float) : sizeof(uint16_t);
    const size_t of_student = problem->dtype_s == SKL_F32 ? sizeof(float) : sizeof(uint16_t);
    const int64_t row = begin.batch * problem->len_q + begin.query;
    advance(&inputs->q_t, begin, begin.query, of_teacher);
    advance(&inputs->k_t, begin, begin.key, of_teacher);
    advance(&inputs->q_s, begin, begin.query, of_student);
    advance(&inputs->k_s, begin, begin.key, of_student);
    advance(&inputs->lse_t, begin, begin.query, sizeof(float));
    if (inputs->key_begin)
        inputs->key_begin += row;
    if (inputs->key_end)
        inputs->key_end += row;
    if (inputs->key_lengths)
        inputs->key_lengths += begin.batch;
}

/* `host` has the lengths of packed sequences in host memory. */
static sequence_view view_sequence(const skl_problem *problem, const skl_inputs *on_device, const skl_inputs *host,
                                   int64_t b)
{
    sequence_view view = {.problem = *problem, .inputs = *on_device};
    if (problem->packed) {
        view.problem.len_q = host->cu_seqlens_q[b + 1] - host->cu_seqlens_q[b];
        view.problem.len_k = host->cu_seqlens_k[b + 1] - host->cu_seqlens_k[b];
        advance_inputs(&view.inputs, problem, (view_begin){0, host->cu_seqlens_q[b], host->cu_seqlens_k[b]});
        view.inputs.cu_seqlens_q = view.inputs.cu_seqlens_k = NULL;
        view.problem.packed = 0;
        view.problem.total_q = view.problem.total_k = 0;
    } else {
        advance_inputs(&view.inputs, problem, (view_begin){.batch = b});
    }
    const int bottom_right = problem->positions == SKL_POSITIONS_BOTTOM_RIGHT;
    view.offset_q = bottom_right ? view.problem.len_k - view.problem.len_q : problem->offset_q;
    view.problem.offset_k = bottom_right ? 0 : problem->offset_k;
    view.problem.positions = SKL_POSITIONS_OFFSET;
    view.problem.batch = 1;
    view.problem.gradients = 0;
    return view;
}

/* ---- One block of queries ----------------------------------------------------------------------------------- */

typedef struct map_work {
    attention_map *map;
    int64_t *valid_rows; /* [rows]: queries of a bucket that attend to any key, over all sequences */
    skl_options options; /* without progress */
    int64_t block_rows;
    skl_row_state *states;        /* [columns, heads, block_rows], on the host */
    skl_row_state *device_states; /* on the device; on the CPU equal to `states` */
    float *device_lse_t;          /* [heads_t, block_rows]; NULL if not needed */
    void *workspace;              /* for the blocks so far */
    size_t workspace_size;
} map_work;

static void *allocate_on_device(const map_work *work, size_t size, const char *what)
{
    void *memory;
    cli_check(device_allocate(work->options.device, size, what, &memory));
    return memory;
}

/* A GPU splits the keys of a block with few queries, which may need more workspace than a larger block. */
static void reserve_workspace(map_work *work, const skl_plan *plan)
{
    const size_t partial = skl_plan_workspace_size(plan, SKL_OP_PARTIAL);
    const size_t forward = skl_plan_workspace_size(plan, SKL_OP_FORWARD);
    const size_t size = partial > forward ? partial : forward;
    if (size <= work->workspace_size)
        return;
    device_free(work->options.device, work->workspace);
    work->workspace = allocate_on_device(work, size, "the workspace");
    work->workspace_size = size;
}

/* Teacher groups need the LSE of each teacher head first. */
static void teacher_lse(const map_work *work, const skl_plan *plan, const skl_problem *problem, skl_inputs *inputs)
{
    const int64_t heads = problem->heads_t, rows = problem->len_q;
    if (work->device_lse_t == NULL || inputs->lse_t.data)
        return;
    const skl_rows wanted = {.struct_size = sizeof wanted,
                             .lse_t = skl_output_contiguous(work->device_lse_t, heads, rows, 1)};
    cli_check(skl_forward(plan, inputs, &wanted, work->workspace, work->workspace_size, NULL));
    inputs->lse_t = skl_input_contiguous(work->device_lse_t, heads, rows, 1);
}

/* Normalizes a state by the LSEs of its row, in base 2. With m_a = lse_a and m_b = lse_b its sums become
 *
 *     l_a = sum_j A_j     l_b = sum_j B_j     w = sum_j A_j (log2 A_j - log2 B_j)
 *
 * over the keys of a bucket: its probability masses and its contribution to the KL(A || B). */
typedef struct bucket_share {
    double a, b, kl;
} bucket_share;

static bucket_share share_of(const skl_row_state *state, double lse_a, double lse_b)
{
    static const double ln_2 = 0.69314718055994530942;
    if (state->l_a == 0.0F || state->l_b == 0.0F)
        return (bucket_share){0, 0, 0};
    const double d_a = (double)state->m_a - lse_a, d_b = (double)state->m_b - lse_b;
    const double a = exp2(d_a) * (double)state->l_a;
    return (bucket_share){a, exp2(d_b) * (double)state->l_b, ln_2 * (exp2(d_a) * (double)state->w + a * (d_a - d_b))};
}

/* log2 sum 2^m l over `count` states, `stride` apart; of A, or of B. */
static double log2_sum(const skl_row_state *states, int64_t count, int64_t stride, bool of_b)
{
    double shift = -INFINITY, sum = 0;
    for (int64_t c = 0; c < count; c++) {
        const skl_row_state *const state = &states[c * stride];
        const double m = (double)(of_b ? state->m_b : state->m_a), l = (double)(of_b ? state->l_b : state->l_a);
        if (l == 0)
            continue;
        if (m > shift) {
            sum *= exp2(shift - m);
            shift = m;
        }
        sum += l * exp2(m - shift);
    }
    return shift + log2(sum);
}

/* Adds one query of one head to its row of buckets. Returns whether it attends to any key. */
static bool add_query(const map_work *work, const skl_row_state *states, int64_t stride, int reverse, int64_t cell)
{
    const attention_map *const map = work->map;
    const double lse_a = log2_sum(states, map->columns, stride, false),
                 lse_b = log2_sum(states, map->columns, stride, true);
    if (isinf(lse_a) && lse_a < 0)
        return false;
    for (int64_t column = 0; column < map->columns; column++) {
        const bucket_share share = share_of(&states[column * stride], lse_a, lse_b);
        map->p[cell + column] += reverse ? share.b : share.a;
        map->s[cell + column] += reverse ? share.a : share.b;
        map->kl[cell + column] += share.kl;
    }
    return true;
}

static void add_block(const map_work *work, const sequence_view *view, int64_t first_query, int64_t rows)
{
    const attention_map *const map = work->map;
    const int64_t stride = map->heads * rows;
    const int reverse = view->problem.direction == SKL_KL_REVERSE;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = bucket_of(first_query + i, map->rows, view->problem.len_q);
        bool valid = false;
        for (int64_t head = 0; head < map->heads; head++)
            valid = add_query(work, &work->states[head * rows + i], stride, reverse,
                              (head * map->rows + row) * map->columns);
        work->valid_rows[row] += valid; /* equal for all heads of a query */
    }
}

static void map_block(map_work *work, const sequence_view *view, int64_t first_query, int64_t rows)
{
    const int64_t columns = work->map->columns, stride = work->map->heads * rows;
    skl_problem problem = view->problem;
    problem.len_q = rows;
    problem.offset_q = view->offset_q + first_query;
    skl_inputs inputs = view->inputs;
    advance_inputs(&inputs, &problem, (view_begin){.query = first_query});
    skl_plan *const plan = plan_create(&problem, &work->options);
    reserve_workspace(work, plan);
    teacher_lse(work, plan, &problem, &inputs);
    for (int64_t column = 0; column < columns; column++)
        cli_check(skl_partial(plan, &inputs, bucket_begin(column, columns, problem.len_k),
                              bucket_begin(column + 1, columns, problem.len_k), work->device_states + column * stride,
                              work->workspace, work->workspace_size, NULL));
    if (work->device_states != work->states)
        cli_check(device_copy(work->options.device, work->states, work->device_states,
                              (size_t)(columns * stride) * sizeof *work->states));
    add_block(work, view, first_query, rows);
    skl_plan_destroy(plan);
}

/* ---- All of it ---------------------------------------------------------------------------------------------- */

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void allocate_work(map_work *work, const skl_problem *problem)
{
    const size_t state_count = (size_t)(work->map->columns * problem->heads_s * work->block_rows);
    skl_plan_destroy(plan_create(problem, &work->options)); /* fails if the device is not available */
    cli_check(device_open(work->options.device, work->options.device_index));
    work->valid_rows = cli_allocate_zeros((size_t)work->map->rows, sizeof *work->valid_rows, "the map");
    work->states = cli_allocate_zeros(state_count, sizeof *work->states, "the states");
    work->device_states = work->options.device == SKL_CPU
                              ? work->states
                              : allocate_on_device(work, state_count * sizeof *work->states, "the states");
    if (problem->heads_t != problem->heads_s)
        work->device_lse_t =
            allocate_on_device(work, (size_t)(problem->heads_t * work->block_rows) * sizeof(float), "lse_t");
}

static void free_work(map_work *work)
{
    device_free(work->options.device, work->workspace);
    device_free(work->options.device, work->device_lse_t);
    if (work->device_states != work->states)
        device_free(work->options.device, work->device_states);
    free(work->states);
    free(work->valid_rows);
}

static void map_sequences(map_work *work, const skl_problem *problem, const skl_inputs *on_device,
                          const skl_inputs *host, const skl_options *watched)
{
    int64_t done = 0;
    const int64_t blocks =
        (problem->len_q + work->block_rows - 1) / work->block_rows; /* the longest sequence has this many */
    for (int64_t b = 0; b < problem->batch; b++) {
        const sequence_view view = view_sequence(problem, on_device, host, b);
        for (int64_t query = 0; query < view.problem.len_q; query += work->block_rows) {
            map_block(work, &view, query, smaller(work->block_rows, view.problem.len_q - query));
            if (watched->progress)
                watched->progress(watched->progress_user, ++done, problem->batch * blocks);
        }
    }
}

static void divide_by_valid_rows(const map_work *work)
{
    const attention_map *const map = work->map;
    for (int64_t cell = 0; cell < map->heads * map->rows * map->columns; cell++) {
        const int64_t valid = work->valid_rows[cell / map->columns % map->rows];
        const double scale = valid ? 1 / (double)valid : 0;
        map->p[cell] *= scale;
        map->s[cell] *= scale;
        map->kl[cell] *= scale;
    }
}

attention_map attention_map_of(const skl_problem *problem, const skl_inputs *inputs, int64_t buckets,
                               const skl_options *options)
{
    assert(buckets > 0);
    const int64_t len_q = problem->len_q, len_k = problem->len_k; /* packed: of the longest sequences */
    attention_map map = {
        .heads = problem->heads_s, .rows = smaller(buckets, len_q), .columns = smaller(buckets, len_k)};
    double **const pictures[] = {&map.p, &map.s, &map.kl};
    for (int p = 0; p < 3; p++)
        *pictures[p] = cli_allocate_zeros((size_t)(map.heads * map.rows * map.columns), sizeof(double), "the map");
    if (map.rows == 0 || map.columns == 0)
        return map;
    map_work work = {.map = &map, .options = *options, .block_rows = smaller(BLOCK_ROWS, len_q)};
    work.options.progress = NULL;
    mirror tensors = mirror_of(problem, options->device);
    skl_inputs on_device = *inputs;
    allocate_work(&work, problem);
    cli_check(mirror_call(&tensors, &on_device, NULL, NULL));
    map_sequences(&work, problem, &on_device, inputs, options);
    divide_by_valid_rows(&work);
    mirror_destroy(&tensors);
    free_work(&work);
    return map;
}

void attention_map_free(attention_map *map)
{
    free(map->p);
    free(map->s);
    free(map->kl);
}

void attention_map_mean(const attention_map *map, double *picture)
{
    const int64_t cells = map->rows * map->columns;
    for (int64_t cell = 0; cell < cells; cell++) {
        double sum = 0;
        for (int64_t head = 0; head < map->heads; head++)
            sum += picture[head * cells + cell];
        picture[cell] = sum / (double)map->heads;
    }
}
