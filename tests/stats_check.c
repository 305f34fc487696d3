#include "stats_check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "any_call.h"

static const char *const names[STATS_RESULTS] = {
    "key_sum",           "key_max",        "lse",           "entropy",    "max_logit",
    "expected_distance", "head_max_logit", "distance_mass", "range_mass", "range_sum",
    "top_keys",          "top_p",          "weights"};

/* ---- Setup ---------------------------------------------------------------------------------------------------- */

static int64_t key_count(const fixture *f, int64_t b)
{
    return oracle_sequence_at(&f->problem, &f->inputs, b).len_k;
}

static int64_t row_count(const fixture *f, int64_t b)
{
    return oracle_sequence_at(&f->problem, &f->inputs, b).len_q;
}

static void draw_ranges(stats_setup *s, test_random *random)
{
    const int64_t batch = s->f->problem.batch;
    s->options.range_count = (int32_t)random_between(random, 1, 5);
    s->ranges = memory_create((size_t)(2 * batch * s->options.range_count) * sizeof(int32_t), sizeof(int32_t));
    int32_t *const ranges = (int32_t *)(void *)s->ranges.data;
    for (int64_t n = 0; n < batch * s->options.range_count; n++) {
        const int64_t keys = key_count(s->f, n / s->options.range_count);
        ranges[2 * n] = (int32_t)random_between(random, 0, keys);
        ranges[2 * n + 1] = (int32_t)random_between(random, ranges[2 * n], keys);
    }
    s->options.key_ranges = ranges;
}

static void draw_rows(stats_setup *s, test_random *random)
{
    const int64_t batch = s->f->problem.batch;
    s->options.chosen_count = (int32_t)random_between(random, 1, 4);
    s->rows = memory_create((size_t)(batch * s->options.chosen_count) * sizeof(int32_t), sizeof(int32_t));
    int32_t *const rows = (int32_t *)(void *)s->rows.data;
    for (int64_t n = 0; n < batch * s->options.chosen_count; n++)
        rows[n] = (int32_t)random_between(random, -1, row_count(s->f, n / s->options.chosen_count) - 1);
    s->options.chosen_rows = rows;
}

/* Weights of rows that attend to nothing are poisoned. */
static void draw_weights(stats_setup *s, test_random *random)
{
    const fixture *const f = s->f;
    s->weights = tensor_create(SKL_F32, f->batch, f->problem.heads_s, f->length_q, 1, LAYOUT_GAPS);
    for (int64_t n = 0; n < tensor_count(&s->weights); n++) {
        const int64_t row = n / f->length_q / f->problem.heads_s * f->length_q + n % f->length_q;
        const double drawn = random_between(random, 0, 3) == 0 ? 0 : random_uniform(random, -1, 2);
        tensor_set(&s->weights, n, f->live_q[row] ? drawn : (double)NAN);
    }
    s->options.row_weights = tensor_input(&s->weights);
    s->options.row_begin = random_between(random, -f->problem.len_q - 1, f->problem.len_q);
    s->options.row_end = random_between(random, -3, f->problem.len_q + 2);
}

/* The LSE of the visible keys, or of more. */
static void give_lse(stats_setup *s, test_random *random)
{
    const fixture *const f = s->f;
    oracle_stats visible = oracle_stats_run(&f->problem, &s->inputs, &s->options);
    s->lse = tensor_create(SKL_F32, f->batch, f->problem.heads_s, f->length_q, 1, LAYOUT_GAPS);
    for (int64_t n = 0; n < tensor_count(&s->lse); n++) {
        const double wider = random_between(random, 0, 1) ? random_uniform(random, 0, 2) : 0;
        const int empty = visible.lse.value[n] == -INFINITY; /* must not be read */
        tensor_set(&s->lse, n, empty ? (double)NAN : visible.lse.value[n] + wider);
    }
    oracle_stats_free(&visible);
    s->inputs.lse_s = tensor_input(&s->lse);
}

stats_setup stats_setup_create(const fixture *f, stats_kind kind)
{
    char purpose[96];
    snprintf(purpose, sizeof purpose, "statistics %d of %s", (int)kind, f->test_case->name);
    test_random random = random_for(purpose);
    stats_setup s = {.f = f, .inputs = f->inputs, .options = {.struct_size = sizeof s.options}};
    s.inputs.q_t.data = s.inputs.k_t.data = s.inputs.lse_t.data = s.inputs.grad_kl.data = NULL;
    s.inputs.sink_t = NULL;
    s.options.distance_count = (int32_t)random_between(&random, 1, kind == STATS_PLAIN ? 64 : 12);
    s.options.top_k = (int32_t)random_between(&random, 1, kind == STATS_PLAIN ? 64 : 9);
    s.options.per_key_head = kind == STATS_WEIGHTED || (kind == STATS_RANDOM && random_between(&random, 0, 1));
    draw_ranges(&s, &random);
    draw_rows(&s, &random);
    if (kind == STATS_WEIGHTED || (kind == STATS_RANDOM && random_between(&random, 0, 1)))
        draw_weights(&s, &random);
    if (kind == STATS_WEIGHTED || (kind == STATS_RANDOM && random_between(&random, 0, 1)))
        give_lse(&s, &random);
    oracle_compare_gpu(test_device() == SKL_CUDA);
    s.exact = oracle_stats_run(&f->problem, &s.inputs, &s.options);
    s.naive = oracle_stats_run_f32(&f->problem, &s.inputs, &s.options);
    return s;
}

void stats_setup_destroy(stats_setup *s)
{
    tensor_destroy(&s->weights);
    tensor_destroy(&s->lse);
    memory_destroy(&s->ranges);
    memory_destroy(&s->rows);
    oracle_stats_free(&s->exact);
    oracle_stats_free(&s->naive);
}

/* ---- Results -------------------------------------------------------------------------------------------------- */

stats_results stats_results_create(const stats_setup *s)
{
    const skl_problem *const p = &s->f->problem;
    const int64_t key_heads = s->options.per_key_head && p->key_heads_s ? p->key_heads_s : p->heads_s;
    const test_layout strided = s->f->test_case->layout;
    const test_layout layout = layout_shares(strided) ? LAYOUT_LENGTH_FIRST : strided;
    const struct {
        int64_t heads, rows, dim;
    } shapes[STATS_RESULTS] = {
        [KEY_SUM] = {key_heads, s->f->length_k, 1},
        [KEY_MAX] = {key_heads, s->f->length_k, 1},
        [LSE] = {p->heads_s, s->f->length_q, 1},
        [ENTROPY] = {p->heads_s, s->f->length_q, 1},
        [MAX_LOGIT] = {p->heads_s, s->f->length_q, 1},
        [EXPECTED_DISTANCE] = {p->heads_s, s->f->length_q, 1},
        [RANGE_MASS] = {p->heads_s, s->f->length_q, s->options.range_count},
        [TOP_KEYS] = {p->heads_s, s->f->length_q, s->options.top_k},
        [TOP_P] = {p->heads_s, s->f->length_q, s->options.top_k},
        /* Results of heads are contiguous, and have a batch even when packed. */
        [HEAD_MAX_LOGIT] = {0, 1, 1},
        [DISTANCE_MASS] = {0, 1, s->options.distance_count},
        [RANGE_SUM] = {0, 1, s->options.range_count},
        [WEIGHTS] = {0, s->options.chosen_count, p->len_k},
    };
    stats_results results;
    for (int n = 0; n < STATS_RESULTS; n++)
        results.tensors[n] =
            shapes[n].heads
                ? tensor_create(SKL_F32, s->f->batch, shapes[n].heads, shapes[n].rows, shapes[n].dim, layout)
                : tensor_create(SKL_F32, p->batch, p->heads_s, shapes[n].rows, shapes[n].dim, LAYOUT_CONTIGUOUS);
    return results;
}

void stats_results_destroy(stats_results *results)
{
    for (int n = 0; n < STATS_RESULTS; n++)
        tensor_destroy(&results->tensors[n]);
}

skl_stats stats_of(const stats_setup *s, const stats_results *results, uint32_t bits)
{
    skl_stats stats = s->options;
    skl_output outputs[STATS_RESULTS];
    for (int n = 0; n < STATS_RESULTS; n++) {
        outputs[n] = tensor_output(&results->tensors[n]);
        outputs[n].data = bits >> n & 1 ? outputs[n].data : NULL;
    }
    stats.key_sum = outputs[KEY_SUM], stats.key_max = outputs[KEY_MAX];
    stats.lse = outputs[LSE], stats.entropy = outputs[ENTROPY];
    stats.max_logit = outputs[MAX_LOGIT], stats.expected_distance = outputs[EXPECTED_DISTANCE];
    stats.head_max_logit = outputs[HEAD_MAX_LOGIT].data, stats.distance_mass = outputs[DISTANCE_MASS].data;
    stats.range_mass = outputs[RANGE_MASS], stats.range_sum = outputs[RANGE_SUM].data;
    stats.top_keys = outputs[TOP_KEYS], stats.top_p = outputs[TOP_P];
    stats.weights = outputs[WEIGHTS].data;
    return stats;
}

uint32_t stats_requested(const stats_setup *s, stats_kind kind)
{
    char purpose[96];
    snprintf(purpose, sizeof purpose, "requested statistics of %s", s->f->test_case->name);
    test_random random = random_for(purpose);
    const uint32_t bits = kind == STATS_RANDOM ? (uint32_t)random_between(&random, 0, ALL_STATS) : ALL_STATS;
    return s->inputs.lse_s.data ? bits & ~(1U << LSE) : bits;
}

int stats_run(const skl_plan *plan, const stats_setup *s, const skl_stats *stats)
{
    const int supported = skl_plan_supports(plan, SKL_OP_ATTENTION_STATS);
    const any_call call = {.plan = plan, .inputs_address = &s->inputs, .stats_address = stats};
    const skl_status status = any_call_run_in_workspace(STATS, &call);
    if (status == SKL_ERROR_UNSUPPORTED && test_device() == SKL_CUDA && !supported)
        assert_ok(strstr(skl_last_error(), "call it on the CPU") != NULL ? SKL_OK : status);
    else
        assert_ok(status);
    return status == SKL_OK;
}

const char *stats_difference(const stats_results *a, const stats_results *b)
{
    for (int n = 0; n < STATS_RESULTS; n++)
        if (!tensor_equal(&a->tensors[n], &b->tensors[n]))
            return names[n];
    return NULL;
}

/* ---- Comparison ------------------------------------------------------------------------------------------------ */

/* Places of a result in the oracle's p: rows of `weights`, keys of `top_keys`. */
typedef struct gathered {
    double *exact, *naive, *rounding;
} gathered;

static gathered gather_create(int64_t count)
{
    const size_t size = ((size_t)count + 1) * sizeof(double);
    const gathered g = {malloc(size), malloc(size), malloc(size)};
    if (!g.exact || !g.naive || !g.rounding)
        test_abandon("no memory");
    return g;
}

static void gather(const gathered *g, int64_t n, const stats_setup *s, int64_t place)
{
    g->exact[n] = place < 0 ? 0 : s->exact.p.value[place];
    g->naive[n] = place < 0 ? 0 : s->naive.p.value[place];
    g->rounding[n] = place < 0 ? 0 : s->exact.p.rounding[place];
}

static int gathered_mismatch(gathered *g, const test_tensor *actual, const char *label, const char *name)
{
    const oracle_expectation expected = {.exact = g->exact,
                                         .naive = g->naive,
                                         .rounding = g->rounding,
                                         .roundings = kernel_roundings(label),
                                         .dtype = SKL_F32,
                                         .count = tensor_count(actual)};
    const int wrong = tensor_mismatch(actual, &expected, NULL, label, name);
    free(g->exact), free(g->naive), free(g->rounding);
    return wrong;
}

static int weights_mismatch(const stats_setup *s, const test_tensor *actual, const char *label)
{
    const skl_problem *const p = &s->f->problem;
    const int64_t chosen = s->options.chosen_count;
    gathered g = gather_create(tensor_count(actual));
    for (int64_t n = 0; n < tensor_count(actual); n++) {
        const int64_t j = n % p->len_k, c = n / p->len_k % chosen, h = n / p->len_k / chosen % p->heads_s;
        const int64_t b = n / p->len_k / chosen / p->heads_s, row = s->options.chosen_rows[b * chosen + c];
        gather(&g, n, s, row < 0 ? -1 : ((b * p->heads_s + h) * p->len_q + row) * p->len_k + j);
    }
    return gathered_mismatch(&g, actual, label, "weights");
}

/* The sequence and the row in it of a row of the buffers. Returns 0 for one after the last sequence. */
static int find_row(const fixture *f, int64_t batch, int64_t row, int64_t *b, int64_t *i)
{
    for (*b = 0; *b < f->problem.batch; (*b)++) {
        const oracle_sequence sequence = oracle_sequence_at(&f->problem, &f->inputs, *b);
        *i = row - sequence.first_q;
        if (sequence.batch == batch && *i >= 0 && *i < sequence.len_q)
            return 1;
    }
    return 0;
}

/* Top keys are distinct, as many as there are visible keys, and their p are those of top_p. */
static int top_keys_mismatch(const stats_setup *s, const test_tensor *keys, const test_tensor *p, const char *label)
{
    const skl_problem *const problem = &s->f->problem;
    const int64_t count = s->options.top_k;
    gathered g = gather_create(tensor_count(keys));
    int wrong = 0;
    for (int64_t n = 0; n < tensor_count(keys); n++) {
        const int64_t line = n / count, row = line % keys->length, head = line / keys->length % keys->heads;
        const int64_t batch = line / keys->length / keys->heads;
        const int64_t element = batch * keys->stride_batch + head * keys->stride_head + row * keys->stride_row;
        int64_t b = 0, i = 0;
        const int found = find_row(s->f, batch, row, &b, &i);
        const oracle_keys seen = found ? oracle_visible_keys(problem, &s->inputs, b, i) : (oracle_keys){0, 0};
        const int32_t *const of_row = (const int32_t *)keys->data + element;
        const int32_t key = of_row[n % count];
        const int expected = n % count < seen.end - seen.begin;
        int valid = expected ? key >= seen.begin && key < seen.end : key == -1;
        for (int64_t m = 0; m < n % count && key >= 0; m++)
            valid = valid && of_row[m] != key;
        if (!valid && !wrong)
            test_wrong("%s: top_keys[%lld] is %d: a row with keys %lld..%lld", label, (long long)n, key,
                       (long long)seen.begin, (long long)seen.end);
        wrong = wrong || !valid;
        gather(&g, n, s,
               valid && expected ? ((b * problem->heads_s + head) * problem->len_q + i) * problem->len_k + key : -1);
    }
    if (tensor_stray_writes(keys))
        wrong = 1;
    return wrong + (p ? gathered_mismatch(&g, p, label, "top_p of its keys")
                      : (free(g.exact), free(g.naive), free(g.rounding), 0));
}

int stats_mismatch(const stats_setup *s, const stats_results *results, uint32_t bits, const char *label)
{
    const struct {
        int result;
        const oracle_array *exact, *naive;
        const uint8_t *live; /* rows or keys that must be exact: NULL: all */
    } arrays[] = {
        {KEY_SUM, &s->exact.key_sum, &s->naive.key_sum, s->f->live_k},
        {KEY_MAX, &s->exact.key_max, &s->naive.key_max, s->f->live_k},
        {LSE, &s->exact.lse, &s->naive.lse, s->f->live_q},
        {ENTROPY, &s->exact.entropy, &s->naive.entropy, s->f->live_q},
        {MAX_LOGIT, &s->exact.max_logit, &s->naive.max_logit, s->f->live_q},
        {EXPECTED_DISTANCE, &s->exact.expected_distance, &s->naive.expected_distance, s->f->live_q},
        {HEAD_MAX_LOGIT, &s->exact.head_max_logit, &s->naive.head_max_logit, NULL},
        {DISTANCE_MASS, &s->exact.distance_mass, &s->naive.distance_mass, NULL},
        {RANGE_MASS, &s->exact.range_mass, &s->naive.range_mass, s->f->live_q},
        {RANGE_SUM, &s->exact.range_sum, &s->naive.range_sum, NULL},
        {TOP_P, &s->exact.top_p, &s->naive.top_p, s->f->live_q},
    };
    int wrong = 0;
    oracle_expectation max_logit;
    for (size_t n = 0; n < COUNT_OF(arrays); n++) {
        const test_tensor *const actual = &results->tensors[arrays[n].result];
        const oracle_expectation expected = {.exact = arrays[n].exact->value,
                                             .naive = arrays[n].naive->value,
                                             .rounding = arrays[n].exact->rounding,
                                             .roundings = kernel_roundings(label),
                                             .dtype = SKL_F32,
                                             .count = arrays[n].exact->count,
                                             .rows = arrays[n].result == HEAD_MAX_LOGIT ? &max_logit : NULL};
        if (arrays[n].result == MAX_LOGIT)
            max_logit = expected;
        if (bits >> arrays[n].result & 1)
            wrong += tensor_mismatch(actual, &expected, arrays[n].live, label, names[arrays[n].result]);
    }
    if (bits >> WEIGHTS & 1)
        wrong += weights_mismatch(s, &results->tensors[WEIGHTS], label);
    if (bits >> TOP_KEYS & 1)
        wrong += top_keys_mismatch(s, &results->tensors[TOP_KEYS],
                                   bits >> TOP_P & 1 ? &results->tensors[TOP_P] : NULL, label);
    return wrong;
}
