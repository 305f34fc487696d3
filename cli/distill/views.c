/* What the report shows of one sequence: attention maps, and how far teacher and student look. */
#include "cli/common/cli.h"
#include "cli/distill/distill.h"

#include <stdlib.h>

enum { MAP_BUCKETS = 64, MAP_BUCKET_TOKENS = 8 }; /* the largest number of buckets; the least tokens of a bucket */

static void compute_look(look *found, const distill_run *run, const skl_problem *problem, const skl_inputs *inputs)
{
    const int64_t heads = problem->heads_s, rows = problem->len_q, group = heads / run->pair.problem.heads_s;
    *found = (look){.buckets = runner_distance_buckets(problem)};
    float *const entropy = cli_allocate((size_t)(heads * rows) * sizeof *entropy, "the entropies");
    float *const mass = cli_allocate((size_t)(heads * found->buckets) * sizeof *mass, "the distances");
    const skl_stats stats = {.struct_size = sizeof stats,
                             .entropy = skl_output_contiguous(entropy, heads, rows, 1),
                             .distance_mass = mass,
                             .distance_count = found->buckets};
    plan_runner runner;
    runner_open(&runner, problem, &run->request->options);
    runner_stats(&runner, inputs, &stats);
    runner_close(&runner);
    for (int64_t head = 0; head < heads; head++) {
        for (int32_t n = 0; n < found->buckets; n++)
            found->share[n] += (double)mass[head * found->buckets + n] / (double)(heads * rows);
        for (int64_t i = 0; i < rows && head / group < EVALUATE_HEADS_MAX; i++)
            found->entropy[head / group] += (double)entropy[head * rows + i] / (double)(group * rows);
    }
    free(entropy);
    free(mass);
}

/* The teacher stands for the student, on the sequence that was projected last. */
static void compute_look_of_teacher(look *found, const distill_run *run)
{
    skl_problem problem = run->pair.problem;
    skl_inputs inputs = attention_pair_inputs(&run->pair);
    problem.gradients = 0;
    problem.heads_s = problem.heads_t;
    problem.dim_s = problem.dim_t;
    inputs.q_s = inputs.q_t;
    inputs.k_s = inputs.k_t;
    compute_look(found, run, &problem, &inputs);
}

/* A student on the first held-out sequence, and the teacher's queries and keys. */
static attention_map view_student(look *found, distill_run *run, const layer *student)
{
    const sequence tokens = task_sequence(&run->task, SPLIT_HELD_OUT, 0);
    attention_pair_project(&run->pair, &run->task.teacher, student, &tokens);
    const skl_inputs inputs = attention_pair_inputs(&run->pair);
    skl_problem problem = run->pair.problem;
    problem.gradients = 0;
    compute_look(found, run, &problem, &inputs);
    const int64_t most = problem.len_q / MAP_BUCKET_TOKENS;
    return attention_map_of(&problem, &inputs, most < MAP_BUCKETS ? most : MAP_BUCKETS, &run->request->options);
}

void distill_views_compute(distill_views *views, distill_run *run)
{
    views->map_before = view_student(&views->before, run, &run->initial_student);
    views->map_after = view_student(&views->after, run, &run->student.weights);
    compute_look_of_teacher(&views->teacher, run);
}

void distill_views_free(distill_views *views)
{
    attention_map_free(&views->map_before);
    attention_map_free(&views->map_after);
}
