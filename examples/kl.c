/* The KL divergence between the attention of a teacher and a student, and its gradients for the student.
 *
 *     cc kl.c $(pkg-config --cflags --libs streamkl) -o kl && ./kl
 */
#include <stdio.h>
#include <stdlib.h>
#include <streamkl.h>

enum { LENGTH = 2048, DIM = 64 };

static float q_t[LENGTH][DIM], k_t[LENGTH][DIM], q_s[LENGTH][DIM], k_s[LENGTH][DIM];
static float kl[LENGTH], dq_s[LENGTH][DIM], dk_s[LENGTH][DIM];

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

    skl_problem problem = skl_problem_default(); /* one sequence, one head, f32 */
    problem.len_q = problem.len_k = LENGTH;
    problem.dim_t = problem.dim_s = DIM;
    problem.causal = 1;

    check(skl_attention_kl_backward(&problem, NULL, q_t, k_t, q_s, k_s, NULL, kl, dq_s, dk_s, NULL));
    printf("StreamKL %s: mean KL %.6f nats over %d rows\n", skl_version(), mean_kl(), LENGTH);
    return 0;
}
