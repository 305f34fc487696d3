/* streamkl distill: settings (command line) -> task -> training -> weights and report. */
#ifndef STREAMKL_CLI_DISTILL_DISTILL_H
#define STREAMKL_CLI_DISTILL_DISTILL_H

#include "cli/common/options.h"
#include "cli/distill/pair.h"
#include "cli/map/attention_map.h"

/* Everything that affects the results of a run. */
typedef struct distill_settings {
    int64_t context, needles, hidden;
    int64_t heads_t, dim_t, heads_s, dim_s;
    int64_t steps, batch, held_out, seed;
    float rate;
    skl_direction direction;
} distill_settings;

extern const cli_option distill_task_options[], distill_training_options[]; /* they set distill_settings */

typedef struct distill_request {
    distill_settings settings;
    skl_options options;
    const char *folder;
    int32_t json;
} distill_request;

/* The loss of every step, and evaluations at regular intervals. */
typedef struct distill_history {
    double *loss; /* [steps] */
    int64_t evaluation_count;
    double *evaluation_step, *evaluation_kl; /* at most [steps + 1] */
    double seconds;                          /* the training took */
    double tokens;                           /* trained on */
} distill_history;

typedef struct distill_run {
    const distill_request *request;
    retrieval_task task;   /* contains the teacher */
    layer initial_student; /* before training */
    attention_pair pair;
    student_model student;
    distill_history history;
    evaluation before, after;
    int64_t peak; /* resident bytes */
} distill_run;

extern volatile int distill_stop; /* set by Ctrl-C */

void distill_train(distill_run *run);

/* Takes the next step on the attention KL, the mean over rows, heads and sequences of a batch before the update: puts
 * it into *mean_kl. False if distill_stop is set in the middle of the batch; the student is not updated then. */
bool distill_step(distill_run *run, double *mean_kl);

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

/* ---- What the report shows of one sequence ------------------------------------------------------------------- */

enum { LOOK_BUCKETS_MAX = 40 };

/* How far one attention looks on a sequence, and how spread it is. */
typedef struct look {
    int32_t buckets;
    double share[LOOK_BUCKETS_MAX]; /* share of attention at distances 0, 1, 2 to 3, 4 to 7, ...; mean over heads */
    double entropy[EVALUATE_HEADS_MAX]; /* nats; mean over rows: of a student head, or of its teacher heads */
} look;

/* Teacher and student on the first held-out sequence. */
typedef struct distill_views {
    attention_map map_before, map_after;
    look teacher, before, after;
} distill_views;

void distill_views_compute(distill_views *views, distill_run *run);
void distill_views_free(distill_views *views);

#endif
