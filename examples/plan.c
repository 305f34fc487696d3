/* The program of kl.c with a plan: the caller owns the workspace, and a training loop would run the plan in every
 * step.
 *
 *     cc plan.c $(pkg-config --cflags --libs streamkl) -o plan && ./plan
 */
#include <stdio.h>
#include <stdlib.h>
#include <streamkl.h>

enum { LENGTH = 2048, DIM = 64 };

static float q_t[LENGTH][DIM], k_t[LENGTH][DIM], q_s[LENGTH][DIM], k_s[LENGTH][DIM];
static float kl[LENGTH], lse_t[LENGTH], lse_s[LENGTH];
static float dq_s[LENGTH][DIM], dk_s[LENGTH][DIM];

static void check(skl_status status)
{
    if (status == SKL_OK)
        return;
    fprintf(stderr, "%s: %s\n", skl_status_name(status), skl_last_error());
    exit(1);
}

static float noise(void)
{
    return 2.0F * (float)rand() / (float)RAND_MAX - 1.0F;
}

/* A student close to its teacher. */
static void fill_inputs(void)
{
    for (int i = 0; i < LENGTH; i++)
        for (int c = 0; c < DIM; c++) {
            q_s[i][c] = (q_t[i][c] = noise()) + 0.1F * noise();
            k_s[i][c] = (k_t[i][c] = noise()) + 0.1F * noise();
        }
}

static double mean_kl(void)
{
    double sum = 0.0;
    for (int i = 0; i < LENGTH; i++)
        sum += kl[i];
    return sum / LENGTH;
}

int main(void)
{
    fill_inputs();

    skl_problem problem = skl_problem_default(); /* one batch, one head, f32 */
    problem.len_q = problem.len_k = LENGTH;
    problem.dim_t = problem.dim_s = DIM;
    problem.causal = 1;

    skl_plan *plan;
    check(skl_plan_create(&plan, &problem, NULL));
    const size_t forward_size = skl_plan_workspace_size(plan, SKL_OP_FORWARD);
    const size_t backward_size = skl_plan_workspace_size(plan, SKL_OP_BACKWARD);
    const size_t size = forward_size > backward_size ? forward_size : backward_size;
    void *const workspace = aligned_alloc(SKL_WORKSPACE_ALIGNMENT, size);

    skl_inputs inputs = {.struct_size = sizeof inputs,
                         .q_t = skl_input_contiguous(q_t, 1, LENGTH, DIM),
                         .k_t = skl_input_contiguous(k_t, 1, LENGTH, DIM),
                         .q_s = skl_input_contiguous(q_s, 1, LENGTH, DIM),
                         .k_s = skl_input_contiguous(k_s, 1, LENGTH, DIM)};
    const skl_rows rows = {.struct_size = sizeof rows,
                           .kl = skl_output_contiguous(kl, 1, LENGTH, 1),
                           .lse_t = skl_output_contiguous(lse_t, 1, LENGTH, 1),
                           .lse_s = skl_output_contiguous(lse_s, 1, LENGTH, 1)};
    check(skl_forward(plan, &inputs, &rows, workspace, size, NULL));

    /* The backward recomputes both distributions from the saved LSEs. */
    inputs.lse_t = skl_input_contiguous(lse_t, 1, LENGTH, 1);
    inputs.lse_s = skl_input_contiguous(lse_s, 1, LENGTH, 1);
    const skl_gradients gradients = {.struct_size = sizeof gradients,
                                     .dq_s = skl_output_contiguous(dq_s, 1, LENGTH, DIM),
                                     .dk_s = skl_output_contiguous(dk_s, 1, LENGTH, DIM)};
    check(skl_backward(plan, &inputs, &gradients, workspace, size, NULL));

    printf("StreamKL %s: mean KL %.6f nats over %d rows\n", skl_version(), mean_kl(), LENGTH);
    printf("kernel %s, %zu KiB of workspace instead of %zu MiB of matrices\n", skl_plan_kernel(plan), size / 1024,
           (size_t)4 * LENGTH * LENGTH * sizeof(float) >> 20);

    free(workspace);
    skl_plan_destroy(plan);
    return 0;
}
