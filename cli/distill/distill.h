/* streamkl distill: settings (the command line) -> source of sequences -> training -> checkpoint and report. */
#ifndef STREAMKL_CLI_DISTILL_DISTILL_H
#define STREAMKL_CLI_DISTILL_DISTILL_H

#include "distill/evaluate.h"
#include "distill/task.h"
#include "distill/train.h"
#include "cli/io/tensor_file.h"

#include <stdbool.h>

/* What decides the numbers of a run: a checkpoint can be resumed only with the same. Counts are int64_t, so that one
 * table can go through them. */
typedef struct distill_settings {
    int64_t context, needles, hidden;
    int64_t heads_t, dim_t, heads_s, dim_s;
    int64_t steps, batch, held_out, seed;
    int64_t unguided; /* queries of a sequence for the student without guidance; 0: there is none */
    float rate;
    skl_direction direction;
    const char *teacher_path, *student_path; /* NULL: the made-up task */
} distill_settings;

enum { UNGUIDED_DEFAULT = -1 }; /* becomes a sixteenth of the context, or 0 */

typedef struct distill_request {
    distill_settings settings;
    skl_options options;
    const char *folder;
    int64_t checkpoint_every;
    int32_t resume, no_baseline, json;
} distill_request;

/* Every setting by name, for checkpoints, messages and the report. */
typedef struct setting_name {
    const char *name; /* that of its option, without the dashes */
    size_t offset;
} setting_name;
extern const setting_name distill_counts[];
extern const size_t distill_count_of_counts;

/* One line of JSON, to be freed; NULL: out of memory. Equal settings give equal text. */
char *distill_settings_text(const distill_settings *settings);

/* Prints which setting of a checkpoint differs and returns CLI_BAD_INPUT; CLI_OK if none does. */
int distill_settings_compare(const distill_settings *settings, const char *text, const char *path);

/* ---- Where sequences and layers come from ------------------------------------------------------------------- */

/* The user's files. Sequences are converted to f32 one at a time. */
typedef struct distill_files {
    tensor_file *teacher_file, *student_file;
    const stored_tensor *hidden_t, *hidden_s; /* [sequences, context, width]; the same where a student has none */
    const void *data_t, *data_s;
    float *buffer_t, *buffer_s; /* of one sequence */
    int64_t context, sequences, held_out;
    uint64_t seed;
} distill_files;

typedef struct distill_source {
    lesson_shape shape;
    sequence_source sequences;
    const layer *teacher;
    layer first_student; /* before any training */
    bool retrieves;      /* references are known */
    task made_up;
    layer teacher_of_file;
    distill_files files;
} distill_source;

/* Both fill in the shapes of `settings` that they decide. Each prints why not and returns an exit code. */
int distill_source_open(distill_source *source, distill_settings *settings, int threads); /* threads: of the CPU */
int distill_files_open(distill_source *source, distill_settings *settings);
void distill_source_close(distill_source *source);

/* ---- The run ------------------------------------------------------------------------------------------------ */

/* What was seen on the way: the loss of every step, and held-out figures now and then. */
typedef struct distill_history {
    float *loss; /* [steps] */
    int64_t evaluation_count;
    float *evaluation_step, *evaluation_kl, *evaluation_hits; /* [steps + 1] at most */
    double seconds;                                           /* of training, over all parts of a resumed run */
    double tokens;                                            /* seen in this part */
    double tokens_seconds;                                    /* and the time they took */
} distill_history;

typedef struct distill_run {
    const distill_request *request;
    distill_source *source;
    lesson work;
    trainee guided, alone; /* `alone` is empty where settings.unguided is 0 */
    unguided outputs;
    distill_history history;
    evaluation before, after, without;
    int64_t peak; /* resident bytes, of everything but the baseline of the report */
} distill_run;

extern volatile int distill_stop; /* set by Ctrl-C */

int distill_train(distill_run *run);

/* DIR/checkpoint.safetensors: all or nothing. A checkpoint that is not there is no error: *found says. */
int distill_checkpoint_save(const distill_run *run);
int distill_checkpoint_load(distill_run *run, bool *found);

/* DIR/student.safetensors: w_q and w_k [heads, dim, hidden]. */
int distill_student_save(const distill_run *run);

/* DIR/report.html. Sets run->peak. */
int distill_report_write(distill_run *run);

void distill_print_result(const distill_run *run);
int distill_print_json(const distill_run *run);

/* A path in the folder of a run. */
typedef struct distill_path {
    char text[4096];
} distill_path;
distill_path distill_path_of(const distill_request *request, const char *name);

/* How many times smaller the KL has become. */
double distill_kl_ratio(const distill_run *run);

#endif
