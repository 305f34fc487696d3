/* The parts of distillation: matrix products, Adam, data and teacher, gradients of weights, training. */
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
            /* every one of inner + 1 additions rounds what is at most `size` */
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
    check_product(70, 40, 700, 0); /* more than one block of the inner index */
    check_product(70, 40, 700, 1);
}

/* ---- Adam --------------------------------------------------------------------------------------------------- */

static void the_rate_warms_up_and_falls(void **state)
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

/* With a constant gradient both means are that gradient: every step has the length of the rate. */
static void adam_walks_at_its_rate(void **state)
{
    (void)state;
    const layer_shape shape = {3, 1, 1, 2};
    learner student;
    layer gradient;
    assert_int_equal(learner_allocate(&student, shape), SKL_OK);
    assert_int_equal(layer_allocate(&gradient, shape), SKL_OK);
    gradient.w_q[0] = 5;
    gradient.w_k[5] = -0.001F;
    for (int step = 1; step <= 20; step++) {
        adam_step(&student, &gradient, 0.01F);
        assert_int_equal(student.step, step);
        assert_float_equal(student.weights.w_q[0], -0.01F * (float)step, 1e-5);
        assert_float_equal(student.weights.w_k[5], 0.01F * (float)step, 1e-5);
        assert_true(student.weights.w_q[1] == 0);
    }
    learner_free(&student);
    layer_free(&gradient);
}

/* ---- Data and teacher --------------------------------------------------------------------------------------- */

static const task_shape small_task = {512, 8, {64, 4, 4, 32}, 2};

static sequence from_task(void *made_up, sequence_split split, uint64_t index)
{
    return task_sequence(made_up, (uint64_t)split, index);
}

static void sequences_are_a_function_of_seed_and_index(void **state)
{
    (void)state;
    task first, second;
    assert_int_equal(task_create(&first, &small_task, 7, 1), SKL_OK);
    assert_int_equal(task_create(&second, &small_task, 7, 2), SKL_OK);
    const size_t size = (size_t)(small_task.context * small_task.teacher.width) * sizeof(float);
    const sequence other = task_sequence(&second, SPLIT_TRAINING, 3);
    task_sequence(&first, SPLIT_TRAINING, 4);
    assert_memory_not_equal(first.hidden, other.hidden_t, size);
    const sequence again = task_sequence(&first, SPLIT_TRAINING, 3);
    assert_memory_equal(again.hidden_t, other.hidden_t, size);
    assert_int_equal(again.reference_count, other.reference_count);
    assert_memory_equal(again.references, other.references, (size_t)again.reference_count * sizeof(reference));
    assert_memory_equal(first.teacher.w_q, second.teacher.w_q,
                        (size_t)layer_q_count(&small_task.teacher) * sizeof(float));
    task_sequence(&first, SPLIT_HELD_OUT, 3);
    assert_memory_not_equal(first.hidden, other.hidden_t, size);
    task_free(&first);
    task_free(&second);
}

static void references_look_back_at_every_depth(void **state)
{
    (void)state;
    task made_up;
    assert_int_equal(task_create(&made_up, &small_task, 1, 1), SKL_OK);
    int64_t depths[EVALUATE_DEPTHS] = {0};
    for (uint64_t index = 0; index < 8; index++) {
        const sequence text = task_sequence(&made_up, SPLIT_TRAINING, index);
        for (int64_t r = 0; r < text.reference_count; r++) {
            assert_true(text.references[r].key >= 1 && text.references[r].key < text.references[r].query);
            assert_true(text.references[r].query < small_task.context);
            depths[text.references[r].key * EVALUATE_DEPTHS / small_task.context]++;
        }
    }
    for (int d = 0; d < EVALUATE_DEPTHS; d++)
        assert_true(depths[d] > 0);
    task_free(&made_up);
}

typedef struct classroom {
    task made_up;
    lesson work;
    trainee guided, alone;
    unguided outputs;
    sequence_source source;
} classroom;

static void open_classroom(classroom *room, skl_direction direction)
{
    const layer_shape student_shape = {64, 2, 2, 24};
    const lesson_shape shape = {small_task.context, small_task.teacher, student_shape, direction};
    const skl_options options = skl_options_default();
    assert_int_equal(task_create(&room->made_up, &small_task, 1, 1), SKL_OK);
    assert_int_equal(lesson_open(&room->work, &shape, &options, 1), SKL_OK);
    layer first;
    assert_int_equal(layer_allocate(&first, student_shape), SKL_OK);
    layer_randomise(&first, 5);
    assert_int_equal(trainee_allocate(&room->guided, &first), SKL_OK);
    assert_int_equal(trainee_allocate(&room->alone, &first), SKL_OK);
    assert_int_equal(unguided_open(&room->outputs, &room->work, 200, small_task.teacher.width), SKL_OK);
    layer_free(&first);
    room->source = (sequence_source){&room->made_up, from_task};
}

static void close_classroom(classroom *room)
{
    task_free(&room->made_up);
    lesson_close(&room->work);
    trainee_free(&room->guided);
    trainee_free(&room->alone);
    unguided_close(&room->outputs);
}

static const volatile int go_on = 0, stop_now = 1;

static void the_teacher_finds_and_an_untrained_student_does_not(void **state)
{
    (void)state;
    classroom room;
    open_classroom(&room, SKL_KL_FORWARD);
    evaluation result;
    assert_int_equal(
        evaluate(&result, &room.work, &room.made_up.teacher, &room.guided.student.weights, &room.source, 3, &go_on),
        SKL_OK);
    assert_true(result.all.references > 100);
    assert_true(evaluate_hit_rate_t(&result.all) > 0.95);
    assert_true(evaluate_hit_rate_s(&result.all) < 0.05);
    assert_true(fabs(result.kl - (result.kl_head[0] + result.kl_head[1]) / 2) < 1e-9);
    double mean = 0;
    for (int b = 0; b < EVALUATE_POSITIONS; b++)
        mean += result.kl_position[b] / EVALUATE_POSITIONS;
    assert_true(fabs(result.kl - mean) < 1e-9); /* 512 rows fill all buckets alike */
    close_classroom(&room);
}

/* ---- Gradients of the weights ------------------------------------------------------------------------------- */

static double total_kl(classroom *room, const sequence *text, const layer *weights)
{
    lesson_project_teacher(&room->work, &room->made_up.teacher, text);
    lesson_project_student(&room->work, weights, text);
    assert_int_equal(lesson_forward(&room->work), SKL_OK);
    double sum = 0;
    for (int64_t row = 0; row < room->work.problem.heads_s * room->work.problem.len_q; row++)
        sum += (double)room->work.kl[row];
    return sum;
}

typedef double loss_of_weights(classroom *room, const sequence *text, const layer *weights);

/* Along a random direction: (loss(w + h d) - loss(w - h d)) / 2h against <gradient, d>. */
static void check_slope(classroom *room, const sequence *text, loss_of_weights *loss, const trainee *pupil)
{
    const layer_shape shape = pupil->student.weights.shape;
    const double step = 1e-3;
    layer along, moved;
    assert_int_equal(layer_allocate(&along, shape), SKL_OK);
    assert_int_equal(layer_allocate(&moved, shape), SKL_OK);
    layer_randomise(&along, 11);
    double ends[2], slope = 0;
    for (int end = 0; end < 2; end++) {
        const float h = (float)(end ? step : -step);
        for (int64_t i = 0; i < layer_q_count(&shape); i++) {
            moved.w_q[i] = pupil->student.weights.w_q[i] + h * along.w_q[i];
            moved.w_k[i] = pupil->student.weights.w_k[i] + h * along.w_k[i];
        }
        ends[end] = loss(room, text, &moved);
    }
    for (int64_t i = 0; i < layer_q_count(&shape); i++)
        slope += (double)pupil->gradient.w_q[i] * (double)along.w_q[i] +
                 (double)pupil->gradient.w_k[i] * (double)along.w_k[i];
    assert_true(fabs((ends[1] - ends[0]) / (2 * step) - slope) < 0.01 * fabs(slope));
    layer_free(&along);
    layer_free(&moved);
}

static void gradients_of_the_weights(void **state)
{
    (void)state;
    for (int direction = SKL_KL_FORWARD; direction <= SKL_KL_REVERSE; direction++) {
        classroom room;
        open_classroom(&room, (skl_direction)direction);
        const sequence text = task_sequence(&room.made_up, SPLIT_TRAINING, 0);
        total_kl(&room, &text, &room.guided.student.weights);
        assert_int_equal(lesson_backward(&room.work, 1, &text, &room.guided.gradient), SKL_OK);
        check_slope(&room, &text, total_kl, &room.guided);
        close_classroom(&room);
    }
}

/* |o_s - o_t|^2 of every query and head, written down in double. */
static double output_loss(classroom *room, const sequence *text, const layer *weights)
{
    const skl_problem *const p = &room->work.problem;
    const int64_t width = small_task.teacher.width;
    total_kl(room, text, weights);
    double loss = 0;
    for (int64_t head = 0; head < p->heads_s; head++)
        for (int64_t i = 0; i < p->len_q; i++) {
            double difference[64] = {0};
            for (int64_t j = 0; j <= i; j++) {
                const double more =
                    lesson_student_share(&room->work, head, i, j) - lesson_teacher_share(&room->work, head, i, j);
                for (int64_t c = 0; c < width; c++)
                    difference[c] += more * (double)text->hidden_t[j * width + c];
            }
            for (int64_t c = 0; c < width; c++)
                loss += difference[c] * difference[c];
        }
    return loss;
}

/* With as many rows as queries every one is drawn, once. */
static void gradients_without_guidance(void **state)
{
    (void)state;
    classroom room;
    open_classroom(&room, SKL_KL_FORWARD);
    unguided every;
    assert_int_equal(unguided_open(&every, &room.work, small_task.context, small_task.teacher.width), SKL_OK);
    const sequence text = task_sequence(&room.made_up, SPLIT_TRAINING, 0);
    lesson_project_teacher(&room.work, &room.made_up.teacher, &text);
    lesson_project_student(&room.work, &room.alone.student.weights, &text);
    unguided_gradient(&every, &room.work, &text, 1, 1, &room.alone.gradient);
    check_slope(&room, &text, output_loss, &room.alone);
    unguided_close(&every);
    close_classroom(&room);
}

/* ---- Training ----------------------------------------------------------------------------------------------- */

static void training_lowers_the_loss_and_stops_cleanly(void **state)
{
    (void)state;
    classroom room;
    open_classroom(&room, SKL_KL_FORWARD);
    const training plan = {&room.made_up.teacher, &room.source, 40, 2, 0.05F, 1};
    double first = 0, loss = 0;
    for (int step = 0; step < 40; step++) {
        assert_int_equal(train_step(&room.guided, &room.alone, &plan, &room.work, &room.outputs, &loss, &go_on),
                         SKL_OK);
        first = step == 0 ? loss : first;
    }
    assert_int_equal(room.guided.student.step, 40);
    assert_true(loss < first / 8);
    assert_int_equal(room.alone.student.step, 40);
    const float weight = room.guided.student.weights.w_q[0], other = room.alone.student.weights.w_q[0];
    assert_true(weight != other);
    assert_int_equal(train_step(&room.guided, &room.alone, &plan, &room.work, &room.outputs, &loss, &stop_now),
                     SKL_OK);
    assert_int_equal(room.guided.student.step, 40);
    assert_int_equal(room.alone.student.step, 40);
    assert_true(room.guided.student.weights.w_q[0] == weight && room.alone.student.weights.w_q[0] == other);
    close_classroom(&room);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_of_any_shape),
        cmocka_unit_test(the_rate_warms_up_and_falls),
        cmocka_unit_test(adam_walks_at_its_rate),
        cmocka_unit_test(sequences_are_a_function_of_seed_and_index),
        cmocka_unit_test(references_look_back_at_every_depth),
        cmocka_unit_test(the_teacher_finds_and_an_untrained_student_does_not),
        cmocka_unit_test(gradients_of_the_weights),
        cmocka_unit_test(gradients_without_guidance),
        cmocka_unit_test(training_lowers_the_loss_and_stops_cleanly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
