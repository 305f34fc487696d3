#include "fixture.h"

#include <math.h>
#include <stdlib.h>

#include "device.h"

/* ---- Inputs ------------------------------------------------------------------------------------------------ */

/* Logits of a few units: distributions that are neither flat nor a single peak. */
#define QUERY_SIZE 3.0
#define KEY_SIZE   1.7

/* The same for the logits of an indexer. */
#define WEIGHT_SIZE 4.0

/* Gradients of an output that are as large as those of the KL. */
#define VALUE_SIZE 1.0

static void mark_live(fixture *f)
{
    f->live_q = calloc((size_t)(f->batch * f->length_q) + 1, 1);
    f->live_k = calloc((size_t)(f->batch * f->length_k) + 1, 1);
    f->live_s = calloc((size_t)(f->batch * f->length_s) + 1, 1);
    const size_t most = (size_t)(f->length_k + f->problem.top_k * oracle_block_keys(&f->problem)) + 1;
    int64_t *const keys = calloc(3 * most, sizeof *keys), *const seen = keys + most, *const outcomes = seen + most;
    if (!f->live_q || !f->live_k || !f->live_s || !keys)
        test_abandon("%s: out of memory", f->test_case->name);
    for (int64_t b = 0; b < f->problem.batch; b++) {
        const oracle_sequence sequence = oracle_sequence_at(&f->problem, &f->inputs, b);
        uint8_t *const live_q = f->live_q + sequence.batch * f->length_q + sequence.first_q;
        uint8_t *const live_k = f->live_k + sequence.batch * f->length_k + sequence.first_k;
        uint8_t *const live_s = f->live_s + sequence.batch * f->length_s + sequence.first_k;
        for (int64_t i = 0; i < sequence.len_q; i++)
            for (int64_t h = 0; h < f->problem.heads_s; h++) {
                const int64_t count = oracle_row_keys(&f->problem, &f->inputs, b, h, i, keys);
                live_q[i] |= count > 0;
                for (int64_t n = 0; n < count; n++)
                    live_s[keys[n]] = 1;
                const int64_t seen_count =
                    oracle_row_seen(&f->problem, &f->inputs, b, i, keys, count, seen, outcomes);
                for (int64_t n = 0; count > 0 && n < seen_count; n++)
                    live_k[seen[n]] = 1;
            }
    }
    free(keys);
}

static int is_live(const test_tensor *tensor, const uint8_t *live, int64_t n)
{
    if (!live)
        return 1;
    const int64_t row = n / tensor->dim, batch = row / tensor->length / tensor->heads;
    return live[batch * tensor->length + row % tensor->length];
}

/* Alternates NaN, inf and -inf wherever a kernel must not read. A shared element may be both dead and live. */
static void poison_dead(const test_tensor *tensor, const uint8_t *live)
{
    static const double poisons[] = {NAN, INFINITY, -INFINITY};
    if (layout_shares(tensor->layout))
        return;
    for (int64_t n = 0; n < tensor_count(tensor); n++)
        if (!is_live(tensor, live, n))
            tensor_set(tensor, n, poisons[n % 3]);
}

static void scale_keys(const test_tensor *k, double growth)
{
    if (layout_shares(k->layout))
        return; /* the last key may be the first one */
    for (int64_t n = 0; n < tensor_count(k); n++) {
        const double progress = (double)(n / k->dim % k->length) / (double)k->length;
        tensor_set(k, n, tensor_get(k, n) * (1 + fabs(growth) * (growth > 0 ? progress : 1 - progress)));
    }
}

static test_layout layout_of(const fixture *f, test_role role)
{
    return f->test_case->layouts ? f->test_case->layouts[role] : f->test_case->layout;
}

static test_tensor create_filled(const fixture *f, test_role role, skl_dtype dtype, int64_t heads, int64_t length,
                                 int64_t dim, double size, test_random *random)
{
    const test_tensor tensor = tensor_create(dtype, f->batch, heads, length, dim, layout_of(f, role));
    tensor_fill(&tensor, random, -size, size);
    return tensor;
}

static test_tensor create_input(const fixture *f, test_role role, skl_dtype dtype, int64_t heads, int64_t dim,
                                double size, test_random *random)
{
    const int64_t length = role == ROLE_KEYS ? f->length_k : f->length_q;
    return create_filled(f, role, dtype, heads, length, dim, size, random);
}

/* Makes the student equal to the teacher, with noise. */
static void move_near(const test_tensor *student, const test_tensor *teacher, double apart, test_random *random)
{
    for (int64_t n = 0; n < tensor_count(student); n++)
        tensor_set(student, n, tensor_get(teacher, n) + random_uniform(random, -apart, apart));
}

static void make_positive(const test_tensor *tensor)
{
    for (int64_t n = 0; n < tensor_count(tensor); n++)
        tensor_set(tensor, n, fabs(tensor_get(tensor, n)));
}

/* No two elements of an output may share an address, even if those of inputs do. */
static test_tensor create_output(const fixture *f, skl_dtype dtype, int64_t heads, int64_t length, int64_t dim)
{
    const test_layout layout = layout_of(f, ROLE_RESULTS);
    return tensor_create(dtype, f->batch, heads, length, dim, layout_shares(layout) ? LAYOUT_LENGTH_FIRST : layout);
}

/* LSE of the visible keys, or a wider one. With one teacher head per student head, no kernel may read it. */
static void give_lse(fixture *f, test_random *random)
{
    const skl_problem *const p = &f->problem;
    skl_problem forward_only = *p;
    forward_only.gradients = 0;
    oracle_result visible = oracle_run(&forward_only, &f->inputs);
    f->lse_t = create_output(f, SKL_F32, p->heads_t, f->length_q, 1); /* separate values per row */
    for (int64_t n = 0; n < tensor_count(&f->lse_t); n++) {
        const double extra = f->test_case->lse == LSE_WIDER ? random_uniform(random, 0, 2) : 0;
        tensor_set(&f->lse_t, n, p->heads_t > p->heads_s || p->index_heads ? visible.lse_t[n] + extra : (double)NAN);
    }
    oracle_free(&visible);
    poison_dead(&f->lse_t, f->live_q);
    f->inputs.lse_t = tensor_input(&f->lse_t);
}

/* Random indices: visible or masked keys, some -1, some keys twice, and no key in one row out of eight. */
static void draw_indices(fixture *f, test_random *random)
{
    const skl_problem *const p = &f->problem;
    f->indices = tensor_create(SKL_F32, f->batch, p->heads_s, f->length_q, p->top_k, layout_of(f, ROLE_ROWS));
    f->inputs.indices = tensor_input(&f->indices);
    for (int64_t b = 0; b < p->batch; b++) {
        const oracle_sequence sequence = oracle_sequence_at(p, &f->inputs, b);
        const int64_t keys = oracle_student_keys(p, sequence.len_k);
        for (int64_t h = 0; h < p->heads_s; h++)
            for (int64_t i = 0; i < sequence.len_q; i++) {
                const skl_input *const indices = &f->inputs.indices;
                int32_t *const row = (int32_t *)f->indices.data + sequence.batch * indices->stride_batch +
                                     h * indices->stride_head + (sequence.first_q + i) * indices->stride_row;
                const int empty = random_between(random, 1, 8) == 1;
                for (int64_t n = 0; n < p->top_k; n++) {
                    const int none = empty || keys == 0 || random_between(random, 1, 6) == 1;
                    row[n] = none ? -1 : (int32_t)random_between(random, 0, keys - 1);
                }
            }
    }
}

/* A copy that the device under test can read. */
static const int32_t *create_lengths(test_memory *memory, const int32_t *lengths, int64_t count)
{
    if (lengths == NULL)
        return NULL;
    *memory = memory_create((size_t)count * sizeof *lengths, sizeof *lengths);
    memcpy(memory->data, lengths, memory->size);
    return (const int32_t *)(const void *)memory->data;
}

/* Bounds of the rows of one sequence. */
static void draw_bounds(test_bounds kind, oracle_sequence sequence, int32_t *begin, int32_t *end, test_random *random)
{
    const int64_t rows = sequence.len_q, keys = sequence.len_k;
    int64_t position = 0, other = 0;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t diagonal = keys - rows + i; /* position of row i where the last row has that of the last key */
        const int64_t step = random_between(random, 0, 2 * (keys / rows + 1));
        position = kind == BOUNDS_ZIGZAG       ? i < rows / 2 || diagonal < i ? i : diagonal
                   : kind == BOUNDS_CHUNKS     ? diagonal
                   : kind == BOUNDS_COMPRESSED ? (i + 1) / 4 - 1
                                               : position + step;
        other = kind == BOUNDS_CHUNKS ? position - position % 16 : other + random_between(random, 0, 2 * step);
        const int64_t limited = position < 0 ? 0 : position + 1 > keys ? keys : position + 1;
        end[i] = (int32_t)limited;
        begin[i] = (int32_t)(other < 0 ? 0 : other > keys ? keys : other);
    }
}

/* Of the size of the largest logits of a row, so that a sink has a part of the mass that is neither 0 nor 1, unless
 * the case wants them above (or below) the logits. */
static const float *create_sinks(test_memory *memory, int64_t heads, double above, test_random *random)
{
    *memory = memory_create((size_t)heads * sizeof(float), sizeof(float));
    float *const sinks = (float *)(void *)memory->data;
    for (int64_t h = 0; h < heads; h++)
        sinks[h] = (float)(above + random_uniform(random, -1, 4));
    return sinks;
}

static void create_bounds(fixture *f, test_random *random)
{
    const skl_problem *const p = &f->problem;
    const test_bounds kind = f->test_case->bounds;
    int32_t *arrays[2];
    for (int n = 0; n < 2; n++) {
        f->bounds[n] = memory_create((size_t)(f->batch * f->length_q) * sizeof(int32_t), sizeof(int32_t));
        arrays[n] = (int32_t *)(void *)f->bounds[n].data;
        for (int64_t i = 0; i < f->batch * f->length_q; i++)
            arrays[n][i] = -7; /* rows after the last packed sequence have no bounds */
    }
    for (int64_t b = 0; b < p->batch; b++) {
        const oracle_sequence sequence = oracle_sequence_at(p, &f->inputs, b);
        const int64_t first = sequence.batch * p->len_q + sequence.first_q;
        draw_bounds(kind, sequence, arrays[0] + first, arrays[1] + first, random);
    }
    const int with_begin = kind == BOUNDS_RANDOM || kind == BOUNDS_BEGIN || kind == BOUNDS_CHUNKS;
    f->inputs.key_begin = with_begin ? arrays[0] : NULL;
    f->inputs.key_end = kind != BOUNDS_BEGIN ? arrays[1] : NULL;
}

/* Values and upstream gradients, and the output that belongs to them. */
static void create_attention(fixture *f, test_random *random)
{
    const skl_problem *const p = &f->problem;
    f->v_s = create_input(f, ROLE_KEYS, p->dtype_s, f->k_s.heads, p->dim_s, VALUE_SIZE, random);
    f->o_s = create_input(f, ROLE_QUERIES, p->dtype_s, p->heads_s, p->dim_s, VALUE_SIZE, random);
    f->do_s = create_input(f, ROLE_QUERIES, p->dtype_s, p->heads_s, p->dim_s, VALUE_SIZE, random);
    f->attention = (skl_attention){.struct_size = sizeof(skl_attention),
                                   .v_s = tensor_input(&f->v_s),
                                   .o_s = tensor_input(&f->o_s),
                                   .do_s = tensor_input(&f->do_s)};
    poison_dead(&f->v_s, f->live_k);
    skl_problem forward_only = *p;
    forward_only.gradients = 0;
    oracle_result result = oracle_run_attention(&forward_only, &f->inputs, &f->attention);
    for (int64_t n = 0; n < tensor_count(&f->o_s); n++)
        tensor_set(&f->o_s, n, result.o_s[n]);
    oracle_free(&result);
    poison_dead(&f->o_s, f->live_q), poison_dead(&f->do_s, f->live_q);
}

void fixture_create(fixture *f, const test_case *c)
{
    *f = (fixture){.test_case = c, .problem = case_problem(c), .inputs = {.struct_size = sizeof(skl_inputs)}};
    const skl_problem *const p = &f->problem;
    f->batch = p->packed ? 1 : p->batch;
    f->length_q = p->packed ? p->total_q : p->len_q;
    f->length_k = p->packed ? p->total_k : p->len_k;
    f->length_s = oracle_student_keys(p, f->length_k);

    const int64_t key_heads_t = p->key_heads_t ? p->key_heads_t : p->heads_t;
    const int64_t key_heads_s = p->key_heads_s ? p->key_heads_s : p->heads_s;
    test_random random = random_for(c->name);
    static const double usual_sizes[] = {1, 1, 1, 1};
    const double *const sizes = c->sizes ? c->sizes : usual_sizes;
    f->q_t = create_input(f, ROLE_QUERIES, p->dtype_t, p->heads_t, p->dim_t, QUERY_SIZE * sizes[0], &random);
    f->k_t = create_input(f, ROLE_KEYS, p->dtype_t, key_heads_t, p->dim_t, KEY_SIZE * sizes[1], &random);
    const int64_t query_heads_s = p->heads_s * (p->index_heads ? p->index_heads : 1);
    f->q_s = create_input(f, ROLE_QUERIES, p->dtype_s, query_heads_s, p->dim_s, QUERY_SIZE * sizes[2], &random);
    f->k_s =
        create_filled(f, ROLE_KEYS, p->dtype_s, key_heads_s, f->length_s, p->dim_s, KEY_SIZE * sizes[3], &random);
    if (c->apart != 0) {
        move_near(&f->q_s, &f->q_t, c->apart, &random);
        move_near(&f->k_s, &f->k_t, c->apart, &random);
    }
    if (c->linear) {
        make_positive(&f->q_s);
        make_positive(&f->k_s);
    }
    if (!c->unit_upstream)
        f->grad_kl = create_input(f, ROLE_ROWS, SKL_F32, p->heads_s, 1, 3, &random);
    for (int64_t n = 0; c->equal_upstream && n < tensor_count(&f->grad_kl); n++)
        tensor_set(&f->grad_kl, n, -0.375);
    for (int64_t n = 0; c->zero_upstream && n < tensor_count(&f->grad_kl); n++)
        if (random_between(&random, 1, c->zero_upstream) == 1)
            tensor_set(&f->grad_kl, n, 0);
    for (int64_t n = 0; c->positive_upstream && n < tensor_count(&f->grad_kl); n++)
        tensor_set(&f->grad_kl, n, fabs(tensor_get(&f->grad_kl, n)));
    if (c->growth != 0) {
        scale_keys(&f->k_t, c->growth);
        scale_keys(&f->k_s, c->growth);
    }

    f->inputs.q_t = tensor_input(&f->q_t), f->inputs.k_t = tensor_input(&f->k_t);
    f->inputs.q_s = tensor_input(&f->q_s), f->inputs.k_s = tensor_input(&f->k_s);
    f->inputs.grad_kl = tensor_input(&f->grad_kl);
    f->inputs.key_lengths = create_lengths(&f->lengths[0], c->key_lengths, p->batch);
    f->inputs.cu_seqlens_q = create_lengths(&f->lengths[1], c->cu_seqlens_q, p->batch + 1);
    f->inputs.cu_seqlens_k = create_lengths(&f->lengths[2], c->cu_seqlens_k, p->batch + 1);

    if (c->bounds != BOUNDS_NONE)
        create_bounds(f, &random);
    if (c->sinks) {
        f->inputs.sink_t = create_sinks(&f->sinks[0], p->heads_t, c->sinks_above[0], &random);
        f->inputs.sink_s = create_sinks(&f->sinks[1], p->heads_s, c->sinks_above[1], &random);
    }

    if (p->index_heads) {
        f->w_s = create_input(f, ROLE_ROWS, p->dtype_w, p->heads_s, p->index_heads, WEIGHT_SIZE, &random);
        f->inputs.w_s = tensor_input(&f->w_s);
    }
    if (p->top_k)
        draw_indices(f, &random);

    mark_live(f);
    poison_dead(&f->q_t, f->live_q), poison_dead(&f->k_t, f->live_k);
    poison_dead(&f->q_s, f->live_q), poison_dead(&f->k_s, f->live_s);
    poison_dead(&f->grad_kl, f->live_q), poison_dead(&f->w_s, f->live_q);
    if (c->lse != LSE_COMPUTED)
        give_lse(f, &random);
    if (c->attention)
        create_attention(f, &random);
}

void fixture_solve(fixture *f)
{
    oracle_compare_gpu(test_device() == SKL_CUDA);
    f->exact = oracle_run(&f->problem, &f->inputs);
    f->naive = oracle_run_f32(&f->problem, &f->inputs);
    if (f->test_case->attention) {
        f->attention_exact = oracle_run_attention(&f->problem, &f->inputs, &f->attention);
        f->attention_naive = oracle_run_attention_f32(&f->problem, &f->inputs, &f->attention);
    }
}

void fixture_destroy(fixture *f)
{
    test_tensor *const tensors[] = {&f->q_t, &f->k_t,     &f->q_s, &f->k_s, &f->lse_t, &f->grad_kl,
                                    &f->w_s, &f->indices, &f->v_s, &f->o_s, &f->do_s};
    for (size_t t = 0; t < COUNT_OF(tensors); t++)
        tensor_destroy(tensors[t]);
    for (size_t n = 0; n < COUNT_OF(f->lengths); n++)
        memory_destroy(&f->lengths[n]);
    for (size_t n = 0; n < COUNT_OF(f->bounds); n++)
        memory_destroy(&f->bounds[n]);
    for (size_t n = 0; n < COUNT_OF(f->sinks); n++)
        memory_destroy(&f->sinks[n]);
    oracle_free(&f->exact);
    oracle_free(&f->naive);
    oracle_free(&f->attention_exact);
    oracle_free(&f->attention_naive);
    free(f->live_q);
    free(f->live_k);
    free(f->live_s);
    *f = (fixture){0};
}

/* ---- Results ----------------------------------------------------------------------------------------------- */

fixture_results results_create(const fixture *f)
{
    const skl_problem *const p = &f->problem;
    const skl_dtype dtype_t = p->grad_f32 ? SKL_F32 : p->dtype_t;
    const skl_dtype dtype_s = p->grad_f32 ? SKL_F32 : p->dtype_s;
    fixture_results results = {0};
    results.kl = create_output(f, SKL_F32, p->heads_s, f->length_q, 1);
    results.lse_t = create_output(f, SKL_F32, p->heads_t, f->length_q, 1);
    results.lse_s = create_output(f, SKL_F32, p->heads_s, f->length_q, 1);
    if (p->index_heads) {
        results.cross_entropy = create_output(f, SKL_F32, p->heads_s, f->length_q, 1);
        results.entropy = create_output(f, SKL_F32, p->heads_s, f->length_q, 1);
        results.mass = create_output(f, SKL_F32, p->heads_s, f->length_q, 1);
    }
    if (p->gradients & SKL_DW_S)
        results.dw_s = create_output(f, p->grad_f32 ? SKL_F32 : p->dtype_w, p->heads_s, f->length_q, p->index_heads);
    if (p->heads_t > p->heads_s && !p->index_heads && p->gradients & (SKL_DQ_T | SKL_DK_T))
        results.dot_t = create_output(f, SKL_F32, p->heads_t, f->length_q, 1);
    if (p->gradients & SKL_DQ_T)
        results.dq_t = create_output(f, dtype_t, p->heads_t, f->length_q, p->dim_t);
    if (p->gradients & SKL_DK_T)
        results.dk_t = create_output(f, dtype_t, f->k_t.heads, f->length_k, p->dim_t);
    if (p->gradients & SKL_DQ_S)
        results.dq_s = create_output(f, dtype_s, f->q_s.heads, f->length_q, p->dim_s);
    if (p->gradients & SKL_DK_S)
        results.dk_s = create_output(f, dtype_s, f->k_s.heads, f->length_s, p->dim_s);
    if (p->gradients & SKL_DSINK_T)
        results.dsink_t = tensor_create(SKL_F32, 1, 1, 1, p->heads_t, LAYOUT_CONTIGUOUS);
    if (p->gradients & SKL_DSINK_S)
        results.dsink_s = tensor_create(SKL_F32, 1, 1, 1, p->heads_s, LAYOUT_CONTIGUOUS);
    if (p->gradients & SKL_DV_S)
        results.o_s = create_output(f, p->dtype_s, p->heads_s, f->length_q, p->dim_s);
    if (p->gradients & SKL_DV_S)
        results.dv_s = create_output(f, dtype_s, f->k_s.heads, f->length_k, p->dim_s);
    return results;
}

enum { RESULT_COUNT = 16 };
_Static_assert(ALL_RESULTS == (1 << RESULT_COUNT) - 1, "one bit for each result");

static const char *const result_names[RESULT_COUNT] = {
    "kl",   "lse_t", "lse_s", "dot_t", "cross_entropy", "entropy", "mass", "dq_t",
    "dk_t", "dq_s",  "dk_s",  "dw_s",  "dsink_t",       "dsink_s", "o_s",  "dv_s"};

static test_tensor *result_at(fixture_results *r, int index)
{
    test_tensor *const tensors[RESULT_COUNT] = {
        &r->kl,   &r->lse_t, &r->lse_s, &r->dot_t, &r->cross_entropy, &r->entropy, &r->mass, &r->dq_t,
        &r->dk_t, &r->dq_s,  &r->dk_s,  &r->dw_s,  &r->dsink_t,       &r->dsink_s, &r->o_s,  &r->dv_s};
    return tensors[index];
}

void results_destroy(fixture_results *results)
{
    for (int t = 0; t < RESULT_COUNT; t++)
        tensor_destroy(result_at(results, t));
}

void results_poison(const fixture_results *results)
{
    fixture_results copy = *results;
    for (int t = 0; t < RESULT_COUNT; t++)
        if (result_at(&copy, t)->data)
            memory_poison(&result_at(&copy, t)->memory);
}

int results_untouched(const fixture_results *results)
{
    fixture_results copy = *results;
    int t = 0;
    while (t < RESULT_COUNT && memory_untouched(&result_at(&copy, t)->memory))
        t++;
    return t == RESULT_COUNT;
}

fixture_results results_subset(const fixture_results *results, uint32_t bits)
{
    fixture_results subset = *results;
    for (int t = 0; t < RESULT_COUNT; t++)
        if (!(bits >> t & 1))
            result_at(&subset, t)->data = NULL;
    return subset;
}

const char *results_difference(const fixture_results *a, const fixture_results *b)
{
    fixture_results copy_a = *a, copy_b = *b;
    for (int t = 0; t < RESULT_COUNT; t++)
        if (!tensor_equal(result_at(&copy_a, t), result_at(&copy_b, t)))
            return result_names[t];
    return NULL;
}

skl_rows results_rows(const fixture_results *r)
{
    return (skl_rows){.struct_size = sizeof(skl_rows),
                      .kl = tensor_output(&r->kl),
                      .lse_t = tensor_output(&r->lse_t),
                      .lse_s = tensor_output(&r->lse_s),
                      .dot_t = tensor_output(&r->dot_t),
                      .cross_entropy = tensor_output(&r->cross_entropy),
                      .entropy = tensor_output(&r->entropy),
                      .mass = tensor_output(&r->mass)};
}

skl_gradients results_gradients(const fixture_results *r)
{
    return (skl_gradients){.struct_size = sizeof(skl_gradients),
                           .dq_t = tensor_output(&r->dq_t),
                           .dk_t = tensor_output(&r->dk_t),
                           .dq_s = tensor_output(&r->dq_s),
                           .dk_s = tensor_output(&r->dk_s),
                           .dw_s = tensor_output(&r->dw_s),
                           .dsink_t = r->dsink_t.data,
                           .dsink_s = r->dsink_s.data};
}

skl_attention results_attention(const fixture *f, const fixture_results *r)
{
    skl_attention attention = f->attention;
    attention.dv_s = tensor_output(&r->dv_s);
    return attention;
}

skl_inputs results_backward_inputs(const fixture *f, const fixture_results *r)
{
    skl_inputs inputs = f->inputs;
    inputs.kl = tensor_input(&r->kl);
    inputs.lse_t = tensor_input(&r->lse_t);
    inputs.lse_s = tensor_input(&r->lse_s);
    inputs.dot_t = tensor_input(&r->dot_t);
    return inputs;
}

skl_inputs results_one_pass_inputs(const fixture *f, const fixture_results *r)
{
    skl_inputs inputs = f->inputs;
    if (f->problem.pool != SKL_POOL_NONE)
        return inputs;
    inputs.lse_t = tensor_input(&r->lse_t);
    inputs.lse_s = tensor_input(&r->lse_s);
    return inputs;
}

skl_rows results_one_pass_rows(const fixture *f, const fixture_results *r)
{
    skl_rows rows = results_rows(r);
    if (f->problem.pool == SKL_POOL_NONE)
        rows.lse_t.data = rows.lse_s.data = rows.mass.data = NULL;
    return rows;
}

/* ---- Comparison -------------------------------------------------------------------------------------------- */

int tensor_mismatch(const test_tensor *actual, const oracle_expectation *expected, const uint8_t *live,
                    const char *label, const char *name)
{
    if (!actual->data)
        return 0;
    const oracle_error naive_error = oracle_naive_error(expected), none = {0, 0};
    double worst = 0; /* error / allowed error */
    int64_t worst_at = 0;
    for (int64_t n = 0; n < expected->count; n++) {
        const double value = tensor_get(actual, n);
        const int must_be_same = !is_live(actual, live, n);
        const double excess = oracle_excess(expected, must_be_same ? none : naive_error, n, value);
        if (excess > worst) {
            worst = must_be_same ? (double)INFINITY : excess;
            worst_at = n;
        }
    }
    test_measured(label, name, worst);
    if (worst > 1) {
        const int64_t row = worst_at / actual->dim, head = row / actual->length;
        test_wrong("%s: %s[%lld, %lld, %lld, %lld] is %.9g, not %.9g: %.2f times the allowed error (naive: %.3g, "
                   "roundings: %.3g)",
                   label, name, (long long)(head / actual->heads), (long long)(head % actual->heads),
                   (long long)(row % actual->length), (long long)(worst_at % actual->dim),
                   tensor_get(actual, worst_at), expected->exact[worst_at], worst, naive_error.absolute,
                   expected->roundings * ORACLE_ROUNDING * expected->rounding[worst_at]);
        return 1;
    }
    const int64_t strays = tensor_stray_writes(actual);
    if (strays)
        test_wrong("%s: %s: %lld bytes written between its elements", label, name, (long long)strays);
    return strays != 0;
}

double kernel_product_rounding(const char *kernel, const skl_problem *problem, skl_dtype dtype)
{
    skl_kernel_info info = {.struct_size = sizeof info};
    for (int32_t index = 0; skl_kernel_at(index, &info); index++)
        if (strcmp(info.name, kernel) == 0)
            return info.rounds_gradients ? oracle_product_rounding(problem, dtype) : 0;
    return 0;
}

double kernel_roundings(const char *label)
{
    return strstr(label, "_sm90_f32_") ? 3 : 1;
}

/* `sums`: those of a row state that the result is made of. */
#define ROW_MISMATCH(member, sums)                                                                                   \
    tensor_mismatch(&r->member,                                                                                      \
                    &(oracle_expectation){f->exact.member, f->naive.member, f->exact.rounding.member,                \
                                          kernel_roundings(label), r->merges * (sums), NULL, 0, 0, r->member.dtype,  \
                                          tensor_count(&r->member)},                                                 \
                    f->live_q, label, #member)

int rows_mismatch(const fixture *f, const fixture_results *r, const char *label)
{
    return ROW_MISMATCH(kl, 3) + ROW_MISMATCH(lse_t, 1) + ROW_MISMATCH(lse_s, 1) + ROW_MISMATCH(dot_t, 0) +
           ROW_MISMATCH(cross_entropy, 0) + ROW_MISMATCH(entropy, 0) + ROW_MISMATCH(mass, 0);
}

/* Products whose sum an element of a gradient is: pairs of a query or a key, in every head. */
static int64_t products_at_most(const fixture *f)
{
    const skl_problem *const p = &f->problem;
    const int64_t heads_s = p->heads_s * (p->student == SKL_STUDENT_INDEXER ? p->index_heads : 1);
    return (f->length_q + p->len_k) * (p->heads_t > heads_s ? p->heads_t : heads_s);
}

#define GRADIENT_MISMATCH(member, type, live)                                                                        \
    tensor_mismatch(&r->member,                                                                                      \
                    &(oracle_expectation){f->exact.member, f->naive.member, f->exact.rounding.member,                \
                                          kernel_roundings(label), 0, f->exact.terms.member,                         \
                                          kernel_product_rounding(kernel, &f->problem, f->problem.type),             \
                                          products_at_most(f), r->member.dtype, tensor_count(&r->member)},           \
                    live, label, #member)

/* No product follows the gradient of a sink's logit. */
#define SINK_MISMATCH(member)                                                                                        \
    tensor_mismatch(&r->member,                                                                                      \
                    &(oracle_expectation){f->exact.member, f->naive.member, f->exact.rounding.member,                \
                                          kernel_roundings(label), 0, NULL, 0, 0, r->member.dtype,                   \
                                          tensor_count(&r->member)},                                                 \
                    NULL, label, #member)

int gradients_mismatch(const fixture *f, const fixture_results *r, const char *kernel, const char *label)
{
    return GRADIENT_MISMATCH(dq_t, dtype_t, f->live_q) + GRADIENT_MISMATCH(dk_t, dtype_t, f->live_k) +
           GRADIENT_MISMATCH(dq_s, dtype_s, f->live_q) + GRADIENT_MISMATCH(dk_s, dtype_s, f->live_s) +
           GRADIENT_MISMATCH(dw_s, dtype_s, f->live_q) + /* the type of the logits, not of the weights */
           SINK_MISMATCH(dsink_t) + SINK_MISMATCH(dsink_s);
}

int output_mismatch(const fixture *given, const fixture_results *r, const char *kernel, const char *label)
{
    fixture with_attention = *given, *const f = &with_attention;
    f->exact = given->attention_exact, f->naive = given->attention_naive;
    return GRADIENT_MISMATCH(o_s, dtype_s, f->live_q);
}

int attention_mismatch(const fixture *given, const fixture_results *r, const char *kernel, const char *label)
{
    fixture with_attention = *given, *const f = &with_attention;
    f->exact = given->attention_exact, f->naive = given->attention_naive;
    return gradients_mismatch(f, r, kernel, label) + GRADIENT_MISMATCH(dv_s, dtype_s, f->live_k);
}
