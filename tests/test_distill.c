/* Distillation: matrix products, Adam, data and teacher, gradients of the weights, training. */
#include "cli/common/random.h"
#include "cli/distill/distill.h"

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

/* From random gradients, and from one that is constant: then every step has the length of the learning rate. */
static void adam_follows_its_gradients(void **state)
{
    enum { STEPS = 60, WEIGHTS = 3 };
    (void)state;
    static const int64_t places[WEIGHTS] = {2, 9, 11};
    const layer zeros = layer_zeros((layer_shape){3, 1, 2});
    student_model student = student_of(&zeros);
    float *const gradients[WEIGHTS] = {random_matrix(STEPS, 1), random_matrix(STEPS, 2), random_matrix(STEPS, 3)};
    double expected[WEIGHTS] = {0};
    for (int step = 1; step <= STEPS; step++) {
        const float rate = 0.01F * (float)step;
        gradients[1][step - 1] *= step % 3 ? 1 : 100; /* also large ones */
        gradients[2][step - 1] = -0.001F;
        for (int w = 0; w < WEIGHTS; w++)
            student.gradient.w_q[places[w]] = gradients[w][step - 1];
        adam_step(&student, rate);
        assert_int_equal(student.step, step);
        expected[2] += (double)rate;
        for (int w = 0; w < WEIGHTS; w++) {
            expected[w] -= w < 2 ? (double)rate * exact_update(gradients[w], step) : 0;
            assert_true(fabs((double)student.weights.w_q[places[w]] - expected[w]) <
                        1e-6 * step); /* updates: to 0.6 */
        }
        assert_true(student.weights.w_q[1] == 0);
    }
    for (int w = 0; w < WEIGHTS; w++)
        free(gradients[w]);
    student_free(&student);
    free(zeros.w_q);
}

/* ---- Data and teacher --------------------------------------------------------------------------------------- */

static const task_shape small_task = {512, 8, {64, 4, 32}, 2, 7};

static void sequences_are_a_function_of_split_and_index(void **state)
{
    (void)state;
    retrieval_task first, second;
    task_create(&first, &small_task, 1);
    task_create(&second, &small_task, 2);
    const size_t size = (size_t)(small_task.context * small_task.teacher.width) * sizeof(float);
    const sequence other = task_sequence(&second, SPLIT_TRAINING, 3);
    task_sequence(&first, SPLIT_TRAINING, 4);
    assert_memory_not_equal(first.hidden, other.hidden, size);
    task_sequence(&first, SPLIT_HELD_OUT, 3);
    assert_memory_not_equal(first.hidden, other.hidden, size);
    const sequence again = task_sequence(&first, SPLIT_TRAINING, 3);
    assert_memory_equal(again.hidden, other.hidden, size);
    assert_int_equal(again.reference_count, other.reference_count);
    assert_memory_equal(again.references, other.references, (size_t)again.reference_count * sizeof(reference));
    int64_t depths[EVALUATE_DEPTHS] = {0};
    for (uint64_t index = 0; index < 8; index++) {
        const sequence tokens = task_sequence(&first, SPLIT_TRAINING, index);
        for (int64_t r = 0; r < tokens.reference_count; r++) {
            const reference asked = tokens.references[r]; /* points back, to every depth */
            assert_true(asked.key >= 1 && asked.key < asked.query && asked.query < small_task.context);
            depths[asked.key * EVALUATE_DEPTHS / small_task.context]++;
        }
    }
    for (int d = 0; d < EVALUATE_DEPTHS; d++)
        assert_true(depths[d] > 0);
    task_free(&first);
    task_free(&second);
}

/* A run of 40 steps of 2 sequences. */
static void run_open(distill_run *run, skl_direction direction, int64_t context)
{
    static distill_request request;
    const layer_shape student = {64, 2, 24};
    request = (distill_request){.settings = {.context = context, .steps = 40, .batch = 2, .rate = 0.05F},
                                .options = skl_options_default()};
    task_shape task = small_task;
    task.context = context;
    *run = (distill_run){.request = &request, .initial_student = layer_zeros(student)};
    task_create(&run->task, &task, 1);
    attention_pair_open(&run->pair, &task, student, direction, &request.options, 1);
    layer_randomize(&run->initial_student, 5);
    run->student = student_of(&run->initial_student);
}

static void run_close(distill_run *run)
{
    task_free(&run->task);
    attention_pair_close(&run->pair);
    student_free(&run->student);
    free(run->initial_student.w_q);
}

static void teacher_finds_definitions_and_untrained_student_does_not(void **state)
{
    (void)state;
    distill_run run;
    run_open(&run, SKL_KL_FORWARD, small_task.context);
    const evaluation result = evaluate(&run.pair, &run.task, &run.initial_student, 3);
    assert_true(result.all.references > 100);
    assert_true(evaluate_hit_rate_t(&result.all) > 0.95);
    assert_true(evaluate_hit_rate_s(&result.all) < 0.05);
    assert_true(fabs(result.kl - (result.kl_head[0] + result.kl_head[1]) / 2) < 1e-9);
    double mean = 0;
    for (int b = 0; b < EVALUATE_POSITIONS; b++)
        mean += result.kl_position[b] / EVALUATE_POSITIONS;
    assert_true(fabs(result.kl - mean) < 1e-9); /* 512 rows fill all buckets equally */
    run_close(&run);
}

static void add_expected(depth_score *score, const attention_pair *pair, reference asked)
{
    for (int64_t head = 0; head < pair->problem.heads_s; head += 2) { /* even heads retrieve */
        score->references++;
        score->hits_t += attention_pair_p(pair, head, asked) > 0.5;
        score->hits_s += attention_pair_s(pair, head, asked) > 0.5;
        score->kl += (double)pair->kl[head * pair->problem.len_q + asked.query];
    }
}

/* References to the first and the last key of every depth, asked for by later queries. */
static void scores_are_those_of_their_depth(void **state)
{
    enum { CONTEXT = 520, DEPTH = CONTEXT / EVALUATE_DEPTHS };
    (void)state;
    distill_run run;
    run_open(&run, SKL_KL_FORWARD, CONTEXT);
    sequence tokens = task_sequence(&run.task, SPLIT_HELD_OUT, 0);
    reference asked[2 * EVALUATE_DEPTHS];
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        asked[2 * d] = (reference){CONTEXT - 1 - d, d * DEPTH};
        asked[2 * d + 1] = (reference){CONTEXT - 1, d * DEPTH + DEPTH - 1};
        for (int64_t r = 0; r < tokens.reference_count; r++) /* a real one, where there is one, so that some hit */
            if (tokens.references[r].key / DEPTH == d)
                asked[2 * d] = tokens.references[r];
    }
    tokens.references = asked;
    tokens.reference_count = 2 * EVALUATE_DEPTHS;
    attention_pair_project(&run.pair, &run.task.teacher, &run.initial_student, &tokens);
    attention_pair_forward(&run.pair);
    evaluation result = {.kl = 0};
    evaluate_references(&result, &run.pair, &tokens);
    depth_score all = {0};
    for (int d = 0; d < EVALUATE_DEPTHS; d++) {
        depth_score expected = {0};
        add_expected(&expected, &run.pair, asked[2 * d]);
        add_expected(&expected, &run.pair, asked[2 * d + 1]);
        assert_memory_equal(&result.depths[d], &expected, sizeof expected);
        all.references += expected.references;
        all.hits_t += expected.hits_t;
        all.hits_s += expected.hits_s;
    }
    assert_int_equal(result.all.references, all.references);
    assert_int_equal(result.all.hits_t, all.hits_t);
    assert_int_equal(result.all.hits_s, all.hits_s);
    assert_true(all.hits_t > 0 && all.hits_t < all.references && all.hits_s != all.hits_t);
    run_close(&run);
}

/* ---- Gradients of the weights ------------------------------------------------------------------------------- */

static double total_kl(distill_run *run, const sequence *tokens, const layer *weights)
{
    attention_pair_project(&run->pair, &run->task.teacher, weights, tokens);
    attention_pair_forward(&run->pair);
    double sum = 0;
    for (int64_t row = 0; row < run->pair.problem.heads_s * run->pair.problem.len_q; row++)
        sum += (double)run->pair.kl[row];
    return sum;
}

/* Along a random direction: (KL(w + h d) - KL(w - h d)) / 2h against <gradient, d>. */
static void check_slope(distill_run *run, const sequence *tokens)
{
    const layer_shape shape = run->student.weights.shape;
    const double step = 1e-3;
    layer along = layer_zeros(shape), moved = layer_zeros(shape);
    layer_randomize(&along, 11);
    double ends[2], slope = 0;
    for (int end = 0; end < 2; end++) {
        const float h = (float)(end ? step : -step);
        for (int64_t i = 0; i < layer_count(&shape); i++)
            moved.w_q[i] = run->student.weights.w_q[i] + h * along.w_q[i];
        ends[end] = total_kl(run, tokens, &moved);
    }
    for (int64_t i = 0; i < layer_count(&shape); i++)
        slope += (double)run->student.gradient.w_q[i] * (double)along.w_q[i];
    assert_true(fabs((ends[1] - ends[0]) / (2 * step) - slope) < 0.01 * fabs(slope));
    free(along.w_q);
    free(moved.w_q);
}

static void gradients_of_the_weights(void **state)
{
    (void)state;
    for (int direction = SKL_KL_FORWARD; direction <= SKL_KL_REVERSE; direction++) {
        distill_run run;
        run_open(&run, (skl_direction)direction, small_task.context);
        const sequence tokens = task_sequence(&run.task, SPLIT_TRAINING, 0);
        total_kl(&run, &tokens, &run.student.weights);
        attention_pair_backward(&run.pair, 1, &tokens, &run.student.gradient);
        check_slope(&run, &tokens);
        run_close(&run);
    }
}

/* ---- Training ----------------------------------------------------------------------------------------------- */

static void training_lowers_the_loss_and_stops_between_steps(void **state)
{
    (void)state;
    distill_run run;
    run_open(&run, SKL_KL_FORWARD, small_task.context);
    double first = 0, loss = 0;
    for (int step = 0; step < 40; step++) {
        assert_true(distill_step(&run, &loss));
        first = step == 0 ? loss : first;
    }
    assert_int_equal(run.student.step, 40);
    assert_true(loss < first / 8);
    const float weight = run.student.weights.w_q[0];
    distill_stop = 1;
    assert_false(distill_step(&run, &loss));
    assert_int_equal(run.student.step, 40);
    assert_true(run.student.weights.w_q[0] == weight);
    run_close(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_of_any_shape),
        cmocka_unit_test(rate_warms_up_and_decays),
        cmocka_unit_test(adam_follows_its_gradients),
        cmocka_unit_test(sequences_are_a_function_of_split_and_index),
        cmocka_unit_test(teacher_finds_definitions_and_untrained_student_does_not),
        cmocka_unit_test(scores_are_those_of_their_depth),
        cmocka_unit_test(gradients_of_the_weights),
        cmocka_unit_test(training_lowers_the_loss_and_stops_between_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
