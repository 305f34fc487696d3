/* streamkl distill: settings (command line) -> source of sequences -> training -> weights and report. */
#ifndef STREAMKL_CLI_DISTILL_DISTILL_H
#define STREAMKL_CLI_DISTILL_DISTILL_H

#include "distill/evaluate.h"
#include "distill/task.h"
#include "distill/train.h"

#include <stdbool.h>

/* Everything that affects the results of a run. Counts are int64_t, so that one table lists them all. */
typedef struct distill_settings {
    int64_t context, needles, hidden;
    int64_t heads_t, dim_t, heads_s, dim_s;
    int64_t steps, batch, held_out, seed;
    float rate;
    skl_direction direction;
} distill_settings;

typedef struct distill_request {
    distill_settings settings;
    skl_options options;
    const char *folder;
    int32_t json;
} distill_request;

/* ---- Sequences and layers ----------------------------------------------------------------------------------- */

typedef struct distill_source {
    attention_pair_shape shape;
    retrieval_task task;       /* contains the teacher */
    sequence_source sequences; /* those of the task */
    layer initial_student;     /* before training */
} distill_source;

void distill_source_open(distill_source *source, const distill_settings *settings, int threads); /* CPU threads */
void distill_source_close(distill_source *source);

/* ---- The run ------------------------------------------------------------------------------------------------ */

/* The loss of every step, and evaluations at regular intervals. */
typedef struct distill_history {
    float *loss; /* [steps] */
    int64_t evaluation_count;
    float *evaluation_step, *evaluation_kl; /* at most [steps + 1] */
    double seconds;                         /* of training */
    double tokens;                          /* trained on */
} distill_history;

typedef struct distill_run {
    const distill_request *request;
    distill_source *source;
    attention_pair pair;
    student_model student;
    distill_history history;
    evaluation before, after;
    int64_t peak; /* resident bytes */
} distill_run;

extern volatile int distill_stop; /* set by Ctrl-C */

void distill_train(distill_run *run);

/* DIR/student.safetensors: w_q and w_k [heads, dim, hidden]. */
void distill_student_save(const distill_run *run);

/* DIR/report.html. Sets run->peak. */
void distill_report_write(distill_run *run);

void distill_print_result(const distill_run *run);
void distill_print_json(const distill_run *run);

/* A path in the output folder. */
typedef struct distill_path {
    char text[4096];
} distill_path;
distill_path distill_path_of(const distill_request *request, const char *name);

/* KL before training / KL after training. */
double distill_kl_ratio(const distill_run *run);

#endif
