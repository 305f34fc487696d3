/* Keys split over ranks: each rank keeps the row state of its keys, states are merged, and the backward of each rank
 * uses the merged LSEs. Two shards in one process, compared with the whole.
 *
 *     cc ring.c $(pkg-config --cflags --libs streamkl) -lm -o ring && ./ring
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <streamkl.h>

enum { N = 512, DIM = 32, SHARDS = 2, KEYS = N / SHARDS };

static float q_t[N][DIM], k_t[N][DIM], q_s[N][DIM], k_s[N][DIM];
static float kl[N], lse_t[N], lse_s[N], whole_kl[N], whole_lse_t[N], whole_lse_s[N];
static float dq[N][DIM], dk[N][DIM], whole_dq[N][DIM], whole_dk[N][DIM];
static skl_row_state merged[N], states[N];

static void check(skl_status status)
{
    if (status != SKL_OK)
        exit((fprintf(stderr, "%s\n", skl_last_error()), 1));
}

static skl_rows rows_of(float *kl_out, float *t, float *s)
{
    return (skl_rows){.struct_size = sizeof(skl_rows),
                      .kl = skl_output_contiguous(kl_out, 1, N, 1),
                      .lse_t = skl_output_contiguous(t, 1, N, 1),
                      .lse_s = skl_output_contiguous(s, 1, N, 1)};
}

static skl_plan *plan_of(int first, int keys) /* all queries, keys first .. first + keys of the sequence */
{
    skl_problem problem = skl_problem_default();
    problem.len_q = N, problem.len_k = keys, problem.dim_t = problem.dim_s = DIM;
    problem.causal = 1, problem.positions = SKL_POSITIONS_OFFSET, problem.offset_k = first;
    skl_plan *plan;
    check(skl_plan_create(&plan, &problem, NULL));
    return plan;
}

static skl_inputs inputs_of(int first, int keys)
{
    return (skl_inputs){.struct_size = sizeof(skl_inputs),
                        .q_t = skl_input_contiguous(q_t, 1, N, DIM),
                        .k_t = skl_input_contiguous(k_t[first], 1, keys, DIM),
                        .q_s = skl_input_contiguous(q_s, 1, N, DIM),
                        .k_s = skl_input_contiguous(k_s[first], 1, keys, DIM)};
}

static void backward(skl_plan *plan, skl_inputs inputs, float *t, float *s, float *dq_out, float *dk_out, int keys,
                     void *workspace, size_t size)
{
    inputs.lse_t = skl_input_contiguous(t, 1, N, 1), inputs.lse_s = skl_input_contiguous(s, 1, N, 1);
    const skl_gradients gradients = {.struct_size = sizeof gradients,
                                     .dq_s = skl_output_contiguous(dq_out, 1, N, DIM),
                                     .dk_s = skl_output_contiguous(dk_out, 1, keys, DIM)};
    check(skl_backward(plan, &inputs, &gradients, workspace, size, NULL));
}

int main(void)
{
    float *const all[] = {q_t[0], k_t[0], q_s[0], k_s[0]};
    for (int t = 0; t < 4; t++)
        for (int i = 0; i < N * DIM; i++)
            all[t][i] = 2.0F * (float)rand() / (float)RAND_MAX - 1.0F;
    skl_plan *const whole = plan_of(0, N);
    size_t size = 0; /* what the whole needs is enough for a shard */
    for (skl_op op = SKL_OP_FORWARD; op <= SKL_OP_PARTIAL; op++)
        if (size < skl_plan_workspace_size(whole, op))
            size = skl_plan_workspace_size(whole, op);
    void *const workspace = aligned_alloc(SKL_WORKSPACE_ALIGNMENT, size);

    skl_inputs inputs = inputs_of(0, N);
    skl_rows rows = rows_of(whole_kl, whole_lse_t, whole_lse_s);
    check(skl_forward(whole, &inputs, &rows, workspace, size, NULL));
    backward(whole, inputs, whole_lse_t, whole_lse_s, whole_dq[0], whole_dk[0], N, workspace, size);

    for (int n = 0; n < SHARDS; n++) { /* each rank: the state of its keys; all ranks: merge */
        skl_plan *const plan = plan_of(n * KEYS, KEYS);
        inputs = inputs_of(n * KEYS, KEYS);
        check(skl_partial(plan, &inputs, 0, KEYS, n == 0 ? merged : states, workspace, size, NULL));
        if (n > 0)
            check(skl_states_merge(plan, merged, states, NULL));
        skl_plan_destroy(plan);
    }
    rows = rows_of(kl, lse_t, lse_s);
    check(skl_states_finish(whole, NULL, merged, &rows, NULL));

    for (int n = 0; n < SHARDS; n++) { /* each rank: its dk and its part of dq; all ranks: sum dq */
        static float part[N][DIM];
        skl_plan *const plan = plan_of(n * KEYS, KEYS);
        backward(plan, inputs_of(n * KEYS, KEYS), lse_t, lse_s, part[0], dk[n * KEYS], KEYS, workspace, size);
        for (int i = 0; i < N * DIM; i++)
            dq[i / DIM][i % DIM] += part[i / DIM][i % DIM];
        skl_plan_destroy(plan);
    }

    float worst[3] = {0};
    for (int i = 0; i < N; i++)
        worst[0] = fmaxf(worst[0], fabsf(kl[i] - whole_kl[i]));
    for (int i = 0; i < N * DIM; i++) {
        const int row = i / DIM, d = i % DIM;
        worst[1] = fmaxf(worst[1], fabsf(dq[row][d] - whole_dq[row][d]));
        worst[2] = fmaxf(worst[2], fabsf(dk[row][d] - whole_dk[row][d]));
    }
    printf("largest differences: KL %.1e, dq %.1e, dk %.1e\n", worst[0], worst[1], worst[2]);
    skl_plan_destroy(whole);
    free(workspace);
    return worst[0] < 1e-5F && worst[1] < 1e-5F && worst[2] < 1e-5F ? 0 : 1;
}
