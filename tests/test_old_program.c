/* A program compiled against the header of an older release, SKL_OLD_HEADER, linked with this library. It makes every
 * kind of call that 0.1.0 had, and compares the results with plain C in double. */
#include SKL_OLD_HEADER

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

enum { N = 37, DIM = 8 };

typedef float matrix[N][DIM];

static matrix q_t, k_t, q_s, k_s;
static skl_problem problem;
static skl_plan *plan;
static void *workspace;
static size_t size;

/* ---- Plain C: causal attention, scale 1 / sqrt(DIM) ---------------------------------------------------------- */

static double logit(const float *q, const float *k)
{
    double sum = 0;
    for (int c = 0; c < DIM; c++)
        sum += (double)q[c] * (double)k[c];
    return sum / sqrt(DIM);
}

static double lse_of(matrix q, matrix k, int i)
{
    double sum = 0;
    for (int j = 0; j <= i; j++)
        sum += exp(logit(q[i], k[j]));
    return log(sum);
}

typedef struct expectation {
    double kl[N], lse_t[N], lse_s[N], dq_s[N][DIM], dk_s[N][DIM];
} expectation;

static expectation expected;

static void expect(void)
{
    for (int i = 0; i < N; i++) {
        expected.lse_t[i] = lse_of(q_t, k_t, i);
        expected.lse_s[i] = lse_of(q_s, k_s, i);
        for (int j = 0; j <= i; j++) {
            const double log_p = logit(q_t[i], k_t[j]) - expected.lse_t[i];
            const double log_s = logit(q_s[i], k_s[j]) - expected.lse_s[i];
            const double dy = (exp(log_s) - exp(log_p)) / sqrt(DIM);
            expected.kl[i] += exp(log_p) * (log_p - log_s);
            for (int c = 0; c < DIM; c++) {
                expected.dq_s[i][c] += dy * (double)k_s[j][c];
                expected.dk_s[j][c] += dy * (double)q_s[i][c];
            }
        }
    }
}

static void assert_close(const float *actual, const double *wanted, int count)
{
    for (int n = 0; n < count; n++)
        if (!(fabs((double)actual[n] - wanted[n]) < 1e-5))
            fail_msg("element %d: %g instead of %g", n, (double)actual[n], wanted[n]);
}

/* ---- Calls of 0.1.0 ------------------------------------------------------------------------------------------- */

static float kl[N], lse_t[N], lse_s[N];
static matrix dq_s, dk_s;

static skl_inputs inputs_of(void)
{
    skl_inputs inputs = {.struct_size = sizeof inputs,
                         .q_t = skl_input_contiguous(q_t, 1, N, DIM),
                         .k_t = skl_input_contiguous(k_t, 1, N, DIM),
                         .q_s = skl_input_contiguous(q_s, 1, N, DIM),
                         .k_s = skl_input_contiguous(k_s, 1, N, DIM)};
    return inputs;
}

static skl_rows rows_of(void)
{
    skl_rows rows = {.struct_size = sizeof rows,
                     .kl = skl_output_contiguous(kl, 1, N, 1),
                     .lse_t = skl_output_contiguous(lse_t, 1, N, 1),
                     .lse_s = skl_output_contiguous(lse_s, 1, N, 1)};
    return rows;
}

static void assert_rows(void)
{
    assert_close(kl, expected.kl, N);
    assert_close(lse_t, expected.lse_t, N);
    assert_close(lse_s, expected.lse_s, N);
}

static void assert_ok(skl_status status)
{
    if (status != SKL_OK)
        fail_msg("%s: %s", skl_status_name(status), skl_last_error());
}

static int create_plan(void **state)
{
    (void)state;
    float *const tensors[] = {q_t[0], k_t[0], q_s[0], k_s[0]};
    for (int n = 0; n < 4 * N * DIM; n++)
        tensors[n / (N * DIM)][n % (N * DIM)] = (float)(rand() % 2001 - 1000) / 1000.0F;
    expect();
    problem = skl_problem_default();
    problem.len_q = problem.len_k = N;
    problem.dim_t = problem.dim_s = DIM;
    problem.causal = 1;
    skl_options options = skl_options_default();
    options.threads = 1;
    assert_ok(skl_plan_create(&plan, &problem, &options));
    for (int op = SKL_OP_FORWARD; op <= SKL_OP_PARTIAL; op++)
        if (skl_plan_workspace_size(plan, (skl_op)op) > size)
            size = skl_plan_workspace_size(plan, (skl_op)op);
    workspace =
        aligned_alloc(SKL_WORKSPACE_ALIGNMENT, (size / SKL_WORKSPACE_ALIGNMENT + 1) * SKL_WORKSPACE_ALIGNMENT);
    return workspace == NULL;
}

static int destroy_plan(void **state)
{
    (void)state;
    free(workspace);
    skl_plan_destroy(plan);
    return 0;
}

static void test_forward_and_backward(void **state)
{
    (void)state;
    skl_inputs inputs = inputs_of();
    const skl_rows rows = rows_of();
    assert_ok(skl_forward(plan, &inputs, &rows, workspace, size, NULL));
    assert_rows();
    inputs.lse_t = skl_input_contiguous(lse_t, 1, N, 1);
    inputs.lse_s = skl_input_contiguous(lse_s, 1, N, 1);
    const skl_gradients gradients = {.struct_size = sizeof gradients,
                                     .dq_s = skl_output_contiguous(dq_s, 1, N, DIM),
                                     .dk_s = skl_output_contiguous(dk_s, 1, N, DIM)};
    assert_ok(skl_backward(plan, &inputs, &gradients, workspace, size, NULL));
    assert_close(dq_s[0], expected.dq_s[0], N * DIM);
    assert_close(dk_s[0], expected.dk_s[0], N * DIM);
}

static void test_one_pass(void **state)
{
    (void)state;
    float given_t[N], given_s[N];
    for (int i = 0; i < N; i++) {
        given_t[i] = (float)expected.lse_t[i];
        given_s[i] = (float)expected.lse_s[i];
    }
    skl_inputs inputs = inputs_of();
    inputs.lse_t = skl_input_contiguous(given_t, 1, N, 1);
    inputs.lse_s = skl_input_contiguous(given_s, 1, N, 1);
    const skl_rows rows = {.struct_size = sizeof rows, .kl = skl_output_contiguous(kl, 1, N, 1)};
    const skl_gradients gradients = {.struct_size = sizeof gradients,
                                     .dq_s = skl_output_contiguous(dq_s, 1, N, DIM),
                                     .dk_s = skl_output_contiguous(dk_s, 1, N, DIM)};
    assert_ok(skl_forward_backward(plan, &inputs, &rows, &gradients, workspace, size, NULL));
    assert_close(kl, expected.kl, N);
    assert_close(dq_s[0], expected.dq_s[0], N * DIM);
    assert_close(dk_s[0], expected.dk_s[0], N * DIM);
}

static void test_states(void **state)
{
    (void)state;
    skl_row_state first[N], second[N];
    const skl_inputs inputs = inputs_of();
    const skl_rows rows = rows_of();
    assert_ok(skl_partial(plan, &inputs, 0, N / 2, first, workspace, size, NULL));
    assert_ok(skl_partial(plan, &inputs, N / 2, N, second, workspace, size, NULL));
    assert_ok(skl_states_merge(plan, first, second, NULL));
    assert_ok(skl_states_finish(plan, &inputs, first, &rows, NULL));
    assert_rows();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward_and_backward),
        cmocka_unit_test(test_one_pass),
        cmocka_unit_test(test_states),
    };
    return cmocka_run_group_tests_name("old_program", tests, create_plan, destroy_plan);
}
