/* Checkpoints: the state of the students, and the history that the report shows. */
#include "cli/common/cli.h"
#include "cli/common/options.h"
#include "cli/distill/distill.h"
#include "cli/io/tensor_write.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static const char format_name[] = "streamkl-distill-2";

/* ---- The tensors -------------------------------------------------------------------------------------------- */

/* What a number of a checkpoint may be: a file can contain anything. */
typedef enum number_rule { FINITE, NOT_NEGATIVE, SHARE_OR_NAN, STEP } number_rule;

typedef struct checkpoint_tensor {
    const char *name;
    float *data;
    int64_t count;
    number_rule rule;
} checkpoint_tensor;

enum { TENSORS_MAX = 16 };

/* Returns their number: a run without a control has fewer. */
static int list_tensors(checkpoint_tensor tensors[TENSORS_MAX], const distill_run *run)
{
    const student_model *const student = &run->student, *const control = &run->control;
    const distill_history *const history = &run->history;
    const int64_t q_count = layer_q_count(&student->weights.shape), k_count = layer_k_count(&student->weights.shape);
    const checkpoint_tensor all[] = {
        {"w_q", student->weights.w_q, q_count, FINITE},
        {"w_k", student->weights.w_k, k_count, FINITE},
        {"first_moment_q", student->first_moment.w_q, q_count, FINITE},
        {"first_moment_k", student->first_moment.w_k, k_count, FINITE},
        {"second_moment_q", student->second_moment.w_q, q_count, NOT_NEGATIVE},
        {"second_moment_k", student->second_moment.w_k, k_count, NOT_NEGATIVE},
        {"loss", history->loss, student->step, FINITE},
        {"evaluation_step", history->evaluation_step, history->evaluation_count, STEP},
        {"evaluation_kl", history->evaluation_kl, history->evaluation_count, FINITE},
        {"evaluation_hits", history->evaluation_hits, history->evaluation_count, SHARE_OR_NAN},
        {"control_w_q", control->weights.w_q, q_count, FINITE},
        {"control_w_k", control->weights.w_k, k_count, FINITE},
        {"control_first_moment_q", control->first_moment.w_q, q_count, FINITE},
        {"control_first_moment_k", control->first_moment.w_k, k_count, FINITE},
        {"control_second_moment_q", control->second_moment.w_q, q_count, NOT_NEGATIVE},
        {"control_second_moment_k", control->second_moment.w_k, k_count, NOT_NEGATIVE},
    };
    enum { ALL = sizeof all / sizeof all[0], OF_CONTROL = 6 };
    static_assert((int)ALL <= (int)TENSORS_MAX, "TENSORS_MAX is large enough");
    memcpy(tensors, all, sizeof all);
    return run->request->settings.control_queries ? ALL : ALL - OF_CONTROL;
}

/* ---- Writing ------------------------------------------------------------------------------------------------ */

int distill_checkpoint_save(const distill_run *run)
{
    checkpoint_tensor tensors[TENSORS_MAX];
    const int count = list_tensors(tensors, run);
    output_tensor output[TENSORS_MAX];
    for (int t = 0; t < count; t++)
        output[t] = (output_tensor){tensors[t].name, SKL_F32, 1, {tensors[t].count}, tensors[t].data};
    char step[32], seconds[32];
    snprintf(step, sizeof step, "%" PRId64, run->student.step);
    snprintf(seconds, sizeof seconds, "%.3f", run->history.seconds);
    char *const settings = distill_settings_text(&run->request->settings);
    if (settings == NULL)
        return cli_fail(CLI_NO_MEMORY, "out of memory for a checkpoint");
    const output_metadata metadata[] = {
        {"format", format_name}, {"step", step}, {"seconds", seconds}, {"settings", settings}};
    tensor_error error;
    const bool written = tensor_write(distill_path_of(run->request, "checkpoint.safetensors").text, output,
                                      (size_t)count, metadata, sizeof metadata / sizeof metadata[0], &error);
    free(settings);
    return written ? CLI_OK : cli_fail(CLI_WRITE_FAILED, "%s", error.text);
}

/* [width, heads * dim] to [heads, dim, width], the layout of linear layers. */
static float *transposed(const float *weights, int64_t width, int64_t columns)
{
    float *const out = malloc((size_t)(width * columns) * sizeof *out);
    for (int64_t i = 0; out && i < width; i++)
        for (int64_t c = 0; c < columns; c++)
            out[c * width + i] = weights[i * columns + c];
    return out;
}

int distill_student_save(file_set *set, const distill_run *run)
{
    const layer *const weights = &run->student.weights;
    const layer_shape *const shape = &weights->shape;
    float *const w_q = transposed(weights->w_q, shape->width, shape->heads * shape->dim);
    float *const w_k = transposed(weights->w_k, shape->width, shape->key_heads * shape->dim);
    const output_tensor output[] = {
        {"w_q", SKL_F32, 3, {shape->heads, shape->dim, shape->width}, w_q},
        {"w_k", SKL_F32, 3, {shape->key_heads, shape->dim, shape->width}, w_k},
    };
    tensor_error error = {"out of memory for the student's weights"};
    const bool written = w_q && w_k &&
                         tensor_write_into(set, distill_path_of(run->request, "student.safetensors").text, output,
                                           sizeof output / sizeof output[0], NULL, 0, &error);
    free(w_q);
    free(w_k);
    return written ? CLI_OK : cli_fail(CLI_WRITE_FAILED, "%s", error.text);
}

/* ---- Reading ------------------------------------------------------------------------------------------------ */

/* Evaluations are in order, at most one per step, and none later than the checkpoint: so the history has room. */
static const char *step_fault(const checkpoint_tensor *tensor, int64_t at, int64_t last_step)
{
    const float step = tensor->data[at], before = at > 0 ? tensor->data[at - 1] : -1;
    if (step >= 0 && step <= (float)last_step && step == floorf(step) && step > before)
        return NULL;
    return "a step that is not after the previous one, or after the last";
}

static const char *number_fault(const checkpoint_tensor *tensor, int64_t at, int64_t last_step)
{
    const float number = tensor->data[at];
    if (tensor->rule == STEP)
        return step_fault(tensor, at, last_step);
    if (tensor->rule == SHARE_OR_NAN)
        return isnan(number) || (number >= 0 && number <= 1) ? NULL : "a share that is not in 0..1";
    if (!isfinite(number))
        return "a number that is not finite";
    return tensor->rule == NOT_NEGATIVE && number < 0 ? "a negative number" : NULL;
}

static int read_tensor(tensor_file *file, const checkpoint_tensor *tensor, int64_t last_step, const char *path)
{
    tensor_error error;
    const stored_tensor *const stored = tensor_file_find(file, tensor->name, &error);
    const void *const data = stored ? tensor_file_data(file, stored, &error) : NULL;
    if (data == NULL)
        return cli_fail(CLI_BAD_INPUT, "%s", error.text);
    if (stored->dtype != SKL_F32 || stored->size != (size_t)tensor->count * sizeof(float))
        return cli_fail(CLI_BAD_INPUT, "%s: %s has %zu bytes of %s; must be %" PRId64 " numbers of F32", path,
                        tensor->name, stored->size, stored->dtype_name, tensor->count);
    memcpy(tensor->data, data, stored->size);
    for (int64_t i = 0; i < tensor->count; i++) {
        const char *const fault = number_fault(tensor, i, last_step);
        if (fault)
            return cli_fail(CLI_BAD_INPUT, "%s: %s[%" PRId64 "] is %g, %s", path, tensor->name, i,
                            (double)tensor->data[i], fault);
    }
    return CLI_OK;
}

static bool parse_seconds(const char *text, double *seconds)
{
    const double century = 3.2e9;
    char *end;
    *seconds = strtod(text, &end);
    return end != text && *end == '\0' && *seconds >= 0 && *seconds <= century;
}

static int read_counts(distill_run *run, const tensor_file *file, const char *path)
{
    const int64_t steps = run->request->settings.steps;
    const char *const step = tensor_file_metadata(file, "step");
    const char *const seconds = tensor_file_metadata(file, "seconds");
    const stored_tensor *const evaluations = tensor_file_find(file, "evaluation_step", NULL);
    int64_t number;
    if (step == NULL || parse_int64(step, &number) != NULL || number < 0 || number > steps)
        return cli_fail(CLI_BAD_INPUT, "%s: step %s: must be 0..%" PRId64, path, step ? step : "(none)", steps);
    run->student.step = run->control.step = number;
    if (seconds == NULL || !parse_seconds(seconds, &run->history.seconds))
        return cli_fail(CLI_BAD_INPUT, "%s: seconds %s: must be a number, 0 or more", path,
                        seconds ? seconds : "(none)");
    if (evaluations == NULL || evaluations->rank != 1 || evaluations->shape[0] > number + 1)
        return cli_fail(CLI_BAD_INPUT, "%s: evaluation_step: must have 0..%" PRId64 " numbers", path, number + 1);
    run->history.evaluation_count = evaluations->shape[0];
    return CLI_OK;
}

int distill_checkpoint_read(distill_run *run, tensor_file *file, const char *path)
{
    const char *const format = tensor_file_metadata(file, "format");
    const char *const settings = tensor_file_metadata(file, "settings");
    if (format == NULL || settings == NULL || strcmp(format, format_name) != 0)
        return cli_fail(CLI_BAD_INPUT, "%s: not a checkpoint of streamkl distill: format %s, must be %s", path,
                        format ? format : "none", format_name);
    int exit_code = distill_settings_compare(&run->request->settings, settings, path);
    if (exit_code == CLI_OK)
        exit_code = read_counts(run, file, path);
    checkpoint_tensor tensors[TENSORS_MAX];
    const int count = list_tensors(tensors, run);
    for (int t = 0; t < count && exit_code == CLI_OK; t++)
        exit_code = read_tensor(file, &tensors[t], run->student.step, path);
    return exit_code;
}

int distill_checkpoint_load(distill_run *run, bool *found)
{
    const distill_path path = distill_path_of(run->request, "checkpoint.safetensors");
    *found = access(path.text, F_OK) == 0;
    if (!*found)
        return CLI_OK;
    tensor_error error;
    tensor_file *const file = tensor_file_open(path.text, &error);
    if (file == NULL)
        return cli_fail(CLI_BAD_INPUT, "%s", error.text);
    int exit_code = distill_checkpoint_read(run, file, path.text);
    if (exit_code == CLI_OK && !tensor_file_unchanged(file, &error))
        exit_code = cli_fail(CLI_BAD_INPUT, "%s", error.text);
    tensor_file_close(file);
    return exit_code;
}
