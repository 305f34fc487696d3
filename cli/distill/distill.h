/* streamkl distill: settings (command line) -> source of sequences -> training -> weights and report. */
#ifndef STREAMKL_CLI_DISTILL_DISTILL_H
#define STREAMKL_CLI_DISTILL_DISTILL_H

#include "distill/evaluate.h"
#include "distill/task.h"
#include "distill/train.h"
#include "cli/io/tensor_file.h"

#include <stdbool.h>

/* Everything that affects the results of a run. Counts are int64_t, so that one table lists them all. */
typedef struct distill_settings {
    int64_t context, needles, hidden;
    int64_t heads_t, dim_t, heads_s, dim_s;
    int64_t steps, batch, held_out, seed;
    float rate;
    skl_direction direction;
    const char *teacher_path, *student_path; /* NULL: the synthetic task */
} distill_settings;

typedef struct distill_request {
    distill_settings settings;
    skl_options options;
    const char *folder;
    int32_t json;
} distill_request;

/* ---- Sequences and layers ----------------------------------------------------------------------------------- */

/* Sequences from the user's files, converted to f32 one at a time. */
typedef struct distill_files {
    tensor_file *teacher_file, *student_file;
    const stored_tensor *hidden_t, *hidden_s; /* [sequences, context, width]; equal if the student file has none */
    const void *data_t, *data_s;
    float *buffer_t, *buffer_s; /* of one sequence */
    int64_t context, sequences, held_out;
    uint64_t seed;
} distill_files;

typedef struct distill_source {
    attention_pair_shape shape;
    sequence_source sequences;
    const layer *teacher;
    layer initial_student; /* before training */
    bool retrieves;        /* the references of each sequence are known */
    retrieval_task synthetic;
    layer teacher_from_file;
    distill_files files;
} distill_source;

/* Both set the shapes in `settings` that the source determines. */
void distill_source_open(distill_source *source, distill_settings *settings, int threads); /* CPU threads */
void distill_files_open(distill_source *source, distill_settings *settings);
void distill_source_close(distill_source *source);

/* Call it before results are written: refuses files that changed since they were opened. */
void distill_source_unchanged(const distill_source *source);

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
