/* Checkpoints: the state of the students, and the history that the report shows. */
#include "cli/common/cli.h"
#include "cli/distill/distill.h"
#include "cli/io/tensor_write.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

static const char format_name[] = "streamkl-distill-2";

/* ---- The tensors -------------------------------------------------------------------------------------------- */

typedef struct checkpoint_tensor {
    const char *name;
    float *data;
    int64_t count;
} checkpoint_tensor;

enum { TENSORS_MAX = 16 };

/* Returns their number: a run without a control has fewer. */
static int list_tensors(checkpoint_tensor tensors[TENSORS_MAX], const distill_run *run)
{
    const student_model *const student = &run->student, *const control = &run->control;
    const distill_history *const history = &run->history;
    const int64_t q_count = layer_q_count(&student->weights.shape), k_count = layer_k_count(&student->weights.shape);
    const checkpoint_tensor all[] = {
        {"w_q", student->weights.w_q, q_count},
        {"w_k", student->weights.w_k, k_count},
        {"first_moment_q", student->first_moment.w_q, q_count},
        {"first_moment_k", student->first_moment.w_k, k_count},
        {"second_moment_q", student->second_moment.w_q, q_count},
        {"second_moment_k", student->second_moment.w_k, k_count},
        {"loss", history->loss, student->step},
        {"evaluation_step", history->evaluation_step, history->evaluation_count},
        {"evaluation_kl", history->evaluation_kl, history->evaluation_count},
        {"evaluation_hits", history->evaluation_hits, history->evaluation_count},
        {"control_w_q", control->weights.w_q, q_count},
        {"control_w_k", control->weights.w_k, k_count},
        {"control_first_moment_q", control->first_moment.w_q, q_count},
        {"control_first_moment_k", control->first_moment.w_k, k_count},
        {"control_second_moment_q", control->second_moment.w_q, q_count},
        {"control_second_moment_k", control->second_moment.w_k, k_count},
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

int distill_student_save(const distill_run *run)
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
                         tensor_write(distill_path_of(run->request, "student.safetensors").text, output,
                                      sizeof output / sizeof output[0], NULL, 0, &error);
    free(w_q);
    free(w_k);
    return written ? CLI_OK : cli_fail(CLI_WRITE_FAILED, "%s", error.text);
}

/* ---- Reading ------------------------------------------------------------------------------------------------ */

static int read_tensor(tensor_file *file, const checkpoint_tensor *tensor, const char *path)
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
    return CLI_OK;
}

static int read_counts(distill_run *run, const tensor_file *file, const char *path)
{
    const int64_t steps = run->request->settings.steps;
    const char *const step = tensor_file_metadata(file, "step"), *const seconds =
                                                                     tensor_file_metadata(file, "seconds");
    const stored_tensor *const evaluations = tensor_file_find(file, "evaluation_step", NULL);
    run->student.step = step ? strtoll(step, NULL, 10) : -1;
    run->history.seconds = seconds ? strtod(seconds, NULL) : 0;
    run->history.evaluation_count = evaluations && evaluations->rank == 1 ? evaluations->shape[0] : -1;
    if (run->student.step < 0 || run->student.step > steps)
        return cli_fail(CLI_BAD_INPUT, "%s: step %s: must be 0..%" PRId64, path, step ? step : "(none)", steps);
    if (run->history.evaluation_count < 0 || run->history.evaluation_count > steps + 1)
        return cli_fail(CLI_BAD_INPUT, "%s: evaluation_step: must have 0..%" PRId64 " numbers", path, steps + 1);
    return CLI_OK;
}

static int read_checkpoint(distill_run *run, tensor_file *file, const char *path)
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
        exit_code = read_tensor(file, &tensors[t], path);
    run->control.step = run->student.step;
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
    const int exit_code = read_checkpoint(run, file, path.text);
    tensor_file_close(file);
    return exit_code;
}
