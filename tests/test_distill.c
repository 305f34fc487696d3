/* Distillation: matrix products, Adam, data and teacher, gradients of the weights, training. */
#include "distill/evaluate.h"
#include "distill/matmul.h"
#include "distill/random.h"
#include "distill/task.h"
#include "distill/train.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static float *random_matrix(int64_t count, uint64_t seed)
{
    float *const values = malloc((size_t)count * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < count; i++)
        values[i] = random_normal(&seed);
    return values;
}

/* ---- Matrix products ---------------------------------------------------------------------------------------- */

static void check_product(int64_t rows, int64_t columns, int64_t inner, int transposed)
{
    float *const a = random_matrix(rows * inner, 1), *const b = random_matrix(inner * columns, 2);
    float *const c = random_matrix(rows * columns, 3), *const threaded = random_matrix(rows * columns, 3);
    float *const before = random_matrix(rows * columns, 3);
    const matrix left = transposed ? (matrix){a, 1, rows} : (matrix){a, inner, 1};
    matmul_add(c, left, b, rows, columns, inner, 1);
    matmul_add(threaded, left, b, rows, columns, inner, 5);
    assert_memory_equal(c, threaded, (size_t)(rows * columns) * sizeof *c);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            double exact = (double)before[i * columns + j], size = fabs(exact);
            for (int64_t k = 0; k < inner; k++) {
                const double term =
                    (double)a[i * left.row_stride + k * left.column_stride] * (double)b[k * columns + j];
                exact += term;
                size += fabs(term);
            }
            /* each of inner + 1 additions rounds a number of at most `size` */
            assert_true(fabs((double)c[i * columns + j] - exact) <= (double)(inner + 1) * 0x1p-24 * size);
        }
    free(a);
    free(b);
    free(c);
    free(threaded);
    free(before);
}

static void products_of_any_shape(void **state)
{
    static const int64_t sizes[] = {1, 5, 16, 33, 64, 97};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    (void)state;
    for (int r = 0; r < COUNT; r++)
        for (int c = 0; c < COUNT; c++)
            for (int transposed = 0; transposed < 2; transposed++)
                check_product(sizes[r], sizes[c], sizes[(r + c) % COUNT], transposed);
    check_product(70, 40, 700, 0); /* several blocks of the inner index */
    check_product(70, 40, 700, 1);
}

/* ---- Adam --------------------------------------------------------------------------------------------------- */

static void rate_warms_up_and_decays(void **state)
{
    (void)state;
    float highest = 0;
    for (int64_t step = 0; step < 1000; step++)
        highest = fmaxf(highest, adam_rate(0.1F, step, 1000));
    assert_true(highest > 0.0999F && highest <= 0.1F);
    assert_true(adam_rate(0.1F, 0, 1000) < 0.002F);
    assert_true(adam_rate(0.1F, 999, 1000) < 0.0021F);
    for (int64_t step = 60; step < 999; step++)
        assert_true(adam_rate(0.1F, step + 1, 1000) <= adam_rate(0.1F, step, 1000));
}

/* With a constant gradient both moments are exact: every step has the length of the learning rate. */
static void adam_steps_have_the_length_of_the_rate(void **state)
{
    (void)state;
    const layer_shape shape = {3, 1, 1, 2};
    layer zeros;
    student_model student;
    assert_int_equal(layer_allocate(&zeros, shape), SKL_OK);
    assert_int_equal(student_allocate(&student, &zeros), SKL_OK);
    student.gradient.w_q[0] = 5;
    student.gradient.w_k[5] = -0.001F;
    for (int step = 1; step <= 20; step++) {
        adam_step(&student, 0.01F);
        assert_int_equal(student.step, step);
        assert_float_equal(student.weights.w_q[0], -0.01F * (float)step, 1e-5);
        assert_float_equal(student.weights.w_k[5], 0.01F * (float)step, 1e-5);
        assert_true(student.weights.w_q[1] == 0);
    }
    student_free(&student);
    layer_free(&zeros);
}

/* m' and v' are weighted means of all gradients so far, and of their squares: a closed form, in double. */
static double exact_update(const float *gradients, int step)
{
    double m = 0, v = 0, weight_m = 0, weight_v = 0;
    for (int t = 0; t < step; t++) {
        const double age = step - 1 - t, g = (double)gradients[t];
        m += pow(0.9, age) * g;
        v += pow(0.95, age) * g * g;
        weight_m += pow(0.9, age);
        weight_v += pow(0.95, age);
    }
    return m / weight_m / sqrt(v / weight_v);
}

static void adam_follows_changing_gradients(void **state)
{
    enum { STEPS = 60 };
    (void)state;
    const layer_shape shape = {3, 1, 1, 2};
    layer zeros;
    student_model student;
    assert_int_equal(layer_allocate(&zeros, shape), SKL_OK);
    assert_int_equal(student_allocate(&student, &zeros), SKL_OK);
    float *const of_q = random_matrix(STEPS, 1), *const of_k = random_matrix(STEPS, 2);
    double q = 0, k = 0;
    for (int step = 1; step <= STEPS; step++) {
        const float rate = 0.01F * (float)step;
        of_k[step - 1] *= step % 3 ? 1 : 100; /* also large ones */
        student.gradient.w_q[2] = of_q[step - 1];
        student.gradient.w_k[3] = of_k[step - 1];
        adam_step(&student, rate);
        q -= (double)rate * exact_update(of_q, step);
        k -= (double)rate * exact_update(of_k, step);
        assert_true(fabs((double)student.weights.w_q[2] - q) < 1e-6 * step); /* the largest update is 0.6 */
        assert_true(fabs((double)student.weights.w_k[3] - k) < 1e-6 * step);
    }
    free(of_q);
    free(of_k);
    student_free(&student);
    layer_free(&zeros);
}

/* ---- Data and teacher --------------------------------------------------------------------------------------- */

static const task_shape small_task = {512, 8, {64, 4, 4, 32}, 2};

static sequence from_task(void *task, sequence_split split, uint64_t index)
{
    return task_sequence(task, (uint64_t)split, index);
}

static void sequences_are_a_function_of_seed_and_index(void **state)
{
    (void)state;
    retrieval_task first, second;
    assert_int_equal(task_create(&first, &small_task, 7, 1), SKL_OK);
    assert_int_equal(task_create(&second, &small_task, 7, 2), SKL_OK);
    const size_t size = (size_t)(small_task.context * small_task.teacher.width) * sizeof(float);
    const sequence other = task_sequence(&second, SPLIT_TRAINING, 3);
    task_sequence(&first, SPLIT_TRAINING, 4);
    assert_memory_not_equal(first.hidden, other.hidden, size);
    const sequence again = task_sequence(&first, SPLIT_TRAINING, 3);
    assert_memory_equal(again.hidden, other.hidden, size);
    assert_int_equal(again.reference_count, other.reference_count);
    assert_memory_equal(again.references, other.references, (size_t)again.reference_count * sizeof(reference));
    assert_memory_equal(first.teacher.w_q, second.teacher.w_q,
                        (size_t)layer_q_count(&small_task.teacher) * sizeof(float));
    task_sequence(&first, SPLIT_HELD_OUT, 3);
    assert_memory_not_equal(first.hidden, other.hidden, size);
    task_free(&first);
    task_free(&second);
}

static void references_point_back_to_every_depth(void **state)
{
    (void)state;
    retrieval_task task;
    assert_int_equal(task_create(&task, &small_task, 1, 1), SKL_OK);
    int64_t depths[EVALUATE_DEPTHS] = {0};
    for (uint64_t index = 0; index < 8; index++) {
        const sequence tokens = task_sequence(&task, SPLIT_TRAINING, index);
        for (int64_t r = 0; r < tokens.reference_count; r++) {
            assert_true(tokens.references[r].key >= 1 && tokens.references[r].key < tokens.references[r].query);
            assert_true(tokens.references[r].query < small_task.context);
            depths[tokens.references[r].key * EVALUATE_DEPTHS / small_task.context]++;
        }
    }
    for (int d = 0; d < EVALUATE_DEPTHS; d++)
        assert_true(depths[d] > 0);
    task_free(&task);
}

typedef struct fixture {
    retrieval_task task;
    attention_pair pair;
    student_model student;
    sequence_source source;
} fixture;

static void fixture_open_with(fixture *f, skl_direction direction, int64_t context)
{
    const layer_shape student_shape = {64, 2, 2, 24};
    const attention_pair_shape shape = {context, small_task.teacher, student_shape, direction};
    const skl_options options = skl_options_default();
    task_shape task = small_task;
    task.context = context;
    assert_int_equal(task_create(&f->task, &task, 1, 1), SKL_OK);
    assert_int_equal(attention_pair_open(&f->pair, &shape, &options, 1), SKL_OK);
    layer first;
    assert_int_equal(layer_allocate(&first, student_shape), SKL_OK);
    layer_randomise(&first, 5);
    assert_int_equal(student_allocate(&f->student, &first), SKL_OK);
    layer_free(&first);
    f->source = (sequence_source){&f->task, from_task};
}

static void fixture_open(fixture *f, skl_direction direction)
{
    fixture_open_with(f, direction, small_task.context);
}

static void fixture_close(fixture *f)
{
    task_free(&f->task);
    attention_pair_close(&f->pair);
    student_free(&f->student);
}

static const volatile int go_on = 0, stop_now = 1;

static void teacher_finds_definitions_and_untrained_student_does_not(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, SKL_KL_FORWARD);
    evaluation result;
    assert_int_equal(evaluate(&result, &f.pair, &f.task.teacher, &f.student.weights, &f.source, 3, &go_on), SKL_OK);
    assert_true(result.all.references > 100);
    assert_true(evaluate_hit_rate_t(&result.all) > 0.95);
    assert_true(evaluate_hit_rate_s(&result.all) < 0.05);
    assert_true(fabs(result.kl - (result.kl_head[0] + result.kl_head[1]) / 2) < 1e-9);
    double mean = 0;
    for (int b = 0; b < EVALUATE_POSITIONS; b++)
        mean += result.kl_position[b] / EVALUATE_POSITIONS;
    assert_true(fabs(result.kl - mean) < 1e-9); /* 512 rows fill all buckets equally */
    fixture_close(&f);
}

/* The references of a test: the first and the last key of every depth, asked for by later queries. */
typedef struct asked_references {
    retrieval_task *task;
    reference all[2 * EVALUATE_DEPTHS];
} asked_references;

static sequence with_references(void *state, sequence_split split, uint64_t index)
{
    asked_references *const asked = state;
    sequence tokens = from_task(asked->task, split, index);
    tokens.references = asked->all;
    tokens.reference_count = 2 * EVALUATE_DEPTHS;
    return tokens;
}

static void add_expected(depth_score *score, const attention_pair *pair, reference asked)
{
    for (int64_t head = 0; head < pair->problem.heads_s; head += 2) { /* even heads retrieve */
        score->references++;
        score->hits_t += attention_pair_p(pair, head, asked.query, asked.key) > 0.5;
        score->hits_s += attention_pair_s(pair, head, asked.query, asked.key) > 0.5;
        score->kl += (double)pair->kl[head * pair->problem.len_q + asked.query];
    }
}

static void scores_are_those_of_their_depth(void **state)
{
    enum { CONTEXT = 520, DEPTH = CONTEXT / EVALUATE_DEPTHS };
    (void)state;
    fixture f;
    fixture_open_with(&f, SKL_KL_FORWARD, CONTEXT);
    asked_references asked = {&f.task, {{0}}};
    const sequence tokens = task_sequence(&f.task, SPLIT_HELD_OUT, 0);
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        asked.all[2 * d] = (reference){CONTEXT - 1 - d, d * DEPTH};
        asked.all[2 * d + 1] = (reference){CONTEXT - 1, d * DEPTH + DEPTH - 1};
        for (int64_t r = 0; r < tokens.reference_count; r++) /* a real one, where there is one, so that some hit */
            if (tokens.references[r].key / DEPTH == d)
                asked.all[2 * d] = tokens.references[r];
    }
    const sequence_source source = {&asked, with_references};
    evaluation result;
    assert_int_equal(evaluate(&result, &f.pair, &f.task.teacher, &f.student.weights, &source, 1, &go_on), SKL_OK);
    depth_score all = {0};
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        depth_score expected = {0};
        add_expected(&expected, &f.pair, asked.all[2 * d]);
        add_expected(&expected, &f.pair, asked.all[2 * d + 1]);
        assert_memory_equal(&result.depths[d], &expected, sizeof expected);
        all.references += expected.references;
        all.hits_t += expected.hits_t;
        all.hits_s += expected.hits_s;
    }
    assert_int_equal(result.all.references, all.references);
    assert_int_equal(result.all.hits_t, all.hits_t);
    assert_int_equal(result.all.hits_s, all.hits_s);
    assert_true(all.hits_t > 0 && all.hits_t < all.references && all.hits_s != all.hits_t);
    fixture_close(&f);
}

/* ---- Gradients of the weights ------------------------------------------------------------------------------- */

static double total_kl(fixture *f, const sequence *tokens, const layer *weights)
{
    attention_pair_project_teacher(&f->pair, &f->task.teacher, tokens);
    attention_pair_project_student(&f->pair, weights, tokens);
    assert_int_equal(attention_pair_forward(&f->pair), SKL_OK);
    double sum = 0;
    for (int64_t row = 0; row < f->pair.problem.heads_s * f->pair.problem.len_q; row++)
        sum += (double)f->pair.kl[row];
    return sum;
}

/* Along a random direction: (KL(w + h d) - KL(w - h d)) / 2h against <gradient, d>. */
static void check_slope(fixture *f, const sequence *tokens, const student_model *student)
{
    const layer_shape shape = student->weights.shape;
    const double step = 1e-3;
    layer along, moved;
    assert_int_equal(layer_allocate(&along, shape), SKL_OK);
    assert_int_equal(layer_allocate(&moved, shape), SKL_OK);
    layer_randomise(&along, 11);
    double ends[2], slope = 0;
    for (int end = 0; end < 2; end++) {
        const float h = (float)(end ? step : -step);
        for (int64_t i = 0; i < layer_q_count(&shape); i++) {
            moved.w_q[i] = student->weights.w_q[i] + h * along.w_q[i];
            moved.w_k[i] = student->weights.w_k[i] + h * along.w_k[i];
        }
        ends[end] = total_kl(f, tokens, &moved);
    }
    for (int64_t i = 0; i < layer_q_count(&shape); i++)
        slope += (double)student->gradient.w_q[i] * (double)along.w_q[i] +
                 (double)student->gradient.w_k[i] * (double)along.w_k[i];
    assert_true(fabs((ends[1] - ends[0]) / (2 * step) - slope) < 0.01 * fabs(slope));
    layer_free(&along);
    layer_free(&moved);
}

static void gradients_of_the_weights(void **state)
{
    (void)state;
    for (int direction = SKL_KL_FORWARD; direction <= SKL_KL_REVERSE; direction++) {
        fixture f;
        fixture_open(&f, (skl_direction)direction);
        const sequence tokens = task_sequence(&f.task, SPLIT_TRAINING, 0);
        total_kl(&f, &tokens, &f.student.weights);
        assert_int_equal(attention_pair_backward(&f.pair, 1, &tokens, &f.student.gradient), SKL_OK);
        check_slope(&f, &tokens, &f.student);
        fixture_close(&f);
    }
}

/* ---- Training ----------------------------------------------------------------------------------------------- */

static void training_lowers_the_loss_and_stops_between_steps(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, SKL_KL_FORWARD);
    const training_config config = {&f.task.teacher, &f.source, 40, 2, 0.05F};
    double first = 0, loss = 0;
    for (int step = 0; step < 40; step++) {
        assert_int_equal(train_step(&f.student, &config, &f.pair, &loss, &go_on), SKL_OK);
        first = step == 0 ? loss : first;
    }
    assert_int_equal(f.student.step, 40);
    assert_true(loss < first / 8);
    const float weight = f.student.weights.w_q[0];
    assert_int_equal(train_step(&f.student, &config, &f.pair, &loss, &stop_now), SKL_OK);
    assert_int_equal(f.student.step, 40);
    assert_true(f.student.weights.w_q[0] == weight);
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_of_any_shape),
        cmocka_unit_test(rate_warms_up_and_decays),
        cmocka_unit_test(adam_steps_have_the_length_of_the_rate),
        cmocka_unit_test(adam_follows_changing_gradients),
        cmocka_unit_test(sequences_are_a_function_of_seed_and_index),
        cmocka_unit_test(references_point_back_to_every_depth),
        cmocka_unit_test(teacher_finds_definitions_and_untrained_student_does_not),
        cmocka_unit_test(scores_are_those_of_their_depth),
        cmocka_unit_test(gradients_of_the_weights),
        cmocka_unit_test(training_lowers_the_loss_and_stops_between_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
