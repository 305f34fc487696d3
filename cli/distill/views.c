#include "cli/distill/views.h"
#include "cli/common/cli.h"
#include "cli/common/runner.h"

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
    problem.key_heads_s = problem.key_heads_t;
    problem.dim_s = problem.dim_t;
    inputs.q_s = inputs.q_t;
    inputs.k_s = inputs.k_t;
    compute_look(found, run, &problem, &inputs);
}

/* A student on the first held-out sequence, and the teacher's queries and keys. */
static void view_student(attention_map *map, look *found, distill_run *run, const layer *student)
{
    const sequence_source *const source = &run->source->sequences;
    const sequence tokens = source->at(source->state, SPLIT_HELD_OUT, 0);
    attention_pair_project_teacher(&run->pair, &run->source->task.teacher, &tokens);
    attention_pair_project_student(&run->pair, student, &tokens);
    const skl_inputs inputs = attention_pair_inputs(&run->pair);
    skl_problem problem = run->pair.problem;
    problem.gradients = 0;
    const int64_t most = problem.len_q / MAP_BUCKET_TOKENS, buckets = most < MAP_BUCKETS ? most : MAP_BUCKETS;
    cli_check(attention_map_compute(map, buckets, buckets, &problem, &inputs, &run->request->options));
    compute_look(found, run, &problem, &inputs);
}

void distill_views_compute(distill_views *views, distill_run *run)
{
    *views = (distill_views){.teacher = {.buckets = 0}};
    view_student(&views->map_before, &views->before, run, &run->source->initial_student);
    view_student(&views->map_after, &views->after, run, &run->student.weights);
    compute_look_of_teacher(&views->teacher, run);
}

void distill_views_free(distill_views *views)
{
    attention_map_free(&views->map_before);
    attention_map_free(&views->map_after);
}
