/* Hidden states and projection weights from the user's safetensors files. */
#include "cli/common/cli.h"
#include "device/device.h"
#include "cli/distill/distill.h"
#include "distill/random.h"

#include <inttypes.h>

/* ---- Weights ------------------------------------------------------------------------------------------------ */

static const void *find_tensor(tensor_file *file, const char *name, const stored_tensor **tensor)
{
    tensor_error error;
    *tensor = tensor_file_find(file, name, &error);
    const void *const data = *tensor ? tensor_file_data(file, *tensor, &error) : NULL;
    if (data == NULL)
        cli_fail(CLI_BAD_INPUT, "%s", error.text);
    return data;
}

/* Heads and head size of weights [heads, dim, width], or of [heads * dim, width] if `dim` or `heads` is known. */
static void read_weight_shape(const stored_tensor *tensor, const char *path, int64_t *heads, int64_t *dim,
                              int64_t *width)
{
    const int64_t rows = tensor->rank == 3 ? tensor->shape[0] * tensor->shape[1] : tensor->shape[0];
    if (tensor->rank == 3) {
        *heads = tensor->shape[0];
        *dim = tensor->shape[1];
    } else if (tensor->rank == 2 && *dim > 0) {
        *heads = rows / *dim;
    } else if (tensor->rank == 2 && *heads > 0) {
        *dim = rows / *heads;
    }
    if (tensor->rank < 2 || tensor->rank > 3 || *heads < 1 || *dim < 1 || *heads * *dim != rows)
        cli_fail(CLI_BAD_INPUT,
                 "%s: %s: must be [heads, dim, hidden], or [heads * dim, hidden] with --heads-t and --heads-s", path,
                 tensor->name);
    *width = tensor->shape[tensor->rank - 1];
}

/* A file has [heads * dim, width], a layer [width, heads * dim]. */
static void transpose_into(float *weights, const void *data, skl_dtype dtype, int64_t columns, int64_t width)
{
    for (int64_t c = 0; c < columns; c++)
        for (int64_t i = 0; i < width; i++)
            weights[i * columns + c] = tensor_number_at(data, dtype, c * width + i);
}

static void read_layer(layer *weights, tensor_file *file, const char *path, int64_t heads)
{
    const stored_tensor *q, *k;
    const void *const q_data = find_tensor(file, "w_q", &q);
    const void *const k_data = find_tensor(file, "w_k", &k);
    layer_shape shape = {.heads = heads};
    read_weight_shape(q, path, &shape.heads, &shape.dim, &shape.width);
    int64_t dim_k = k->rank == 2 ? shape.dim : 0, width_k = 0;
    read_weight_shape(k, path, &shape.key_heads, &dim_k, &width_k);
    if (dim_k != shape.dim || width_k != shape.width || shape.heads % shape.key_heads != 0)
        cli_fail(CLI_BAD_INPUT,
                 "%s: w_q has %" PRId64 " heads of %" PRId64 " for hidden states of %" PRId64 ", w_k %" PRId64
                 " of %" PRId64 " for %" PRId64 ": must agree",
                 path, shape.heads, shape.dim, shape.width, shape.key_heads, dim_k, width_k);
    cli_check(layer_allocate(weights, shape));
    transpose_into(weights->w_q, q_data, q->dtype, shape.heads * shape.dim, shape.width);
    transpose_into(weights->w_k, k_data, k->dtype, shape.key_heads * shape.dim, shape.width);
}

/* ---- Hidden states ------------------------------------------------------------------------------------------ */

static void load_sequence(float *to, const stored_tensor *hidden, const void *data, int64_t index)
{
    const int64_t count = hidden->shape[1] * hidden->shape[2];
    for (int64_t i = 0; i < count; i++)
        to[i] = tensor_number_at(data, hidden->dtype, index * count + i);
}

/* The last sequences are held out. Training draws each of its sequences independently from the others. */
static sequence file_at(void *state, sequence_split split, uint64_t index)
{
    distill_files *const files = state;
    const int64_t training_count = files->sequences - files->held_out;
    uint64_t draw = random_stream(files->seed, SPLIT_TRAINING, index);
    const int64_t at =
        split == SPLIT_HELD_OUT ? training_count + (int64_t)index : random_below(&draw, training_count);
    load_sequence(files->buffer_t, files->hidden_t, files->data_t, at);
    if (files->buffer_s == NULL)
        return (sequence){files->buffer_t, files->buffer_t, NULL, 0};
    load_sequence(files->buffer_s, files->hidden_s, files->data_s, at);
    return (sequence){files->buffer_t, files->buffer_s, NULL, 0};
}

static void check_hidden(const stored_tensor *hidden, const char *path, int64_t width)
{
    if (hidden->rank != 3 || hidden->shape[2] != width)
        cli_fail(CLI_BAD_INPUT,
                 "%s: hidden: must be [sequences, context, %" PRId64 "], with the width of w_q of the same model",
                 path, width);
}

static float *allocate_sequence(const stored_tensor *hidden)
{
    void *buffer;
    const size_t size = (size_t)(hidden->shape[1] * hidden->shape[2]) * sizeof(float);
    cli_check(device_allocate(SKL_CPU, size, "hidden states", &buffer));
    return buffer;
}

static void open_hidden(distill_source *source, const distill_settings *settings)
{
    distill_files *const files = &source->files;
    const bool separate = tensor_file_find(files->student_file, "hidden", NULL) != NULL;
    files->data_s = files->data_t = find_tensor(files->teacher_file, "hidden", &files->hidden_t);
    files->hidden_s = files->hidden_t;
    if (separate)
        files->data_s = find_tensor(files->student_file, "hidden", &files->hidden_s);
    check_hidden(files->hidden_t, settings->teacher_path, source->teacher_from_file.shape.width);
    check_hidden(files->hidden_s, separate ? settings->student_path : settings->teacher_path,
                 source->initial_student.shape.width);
    for (int axis = 0; axis < 2; axis++)
        if (files->hidden_t->shape[axis] != files->hidden_s->shape[axis])
            cli_fail(CLI_BAD_INPUT,
                     "hidden: %s has %" PRId64 " sequences of %" PRId64 ", %s %" PRId64 " of %" PRId64
                     ": must be equal",
                     settings->teacher_path, files->hidden_t->shape[0], files->hidden_t->shape[1],
                     settings->student_path, files->hidden_s->shape[0], files->hidden_s->shape[1]);
    files->buffer_t = allocate_sequence(files->hidden_t);
    files->buffer_s = separate ? allocate_sequence(files->hidden_s) : NULL;
}

/* ---- All of it ---------------------------------------------------------------------------------------------- */

static tensor_file *open_file(const char *path)
{
    tensor_error error;
    tensor_file *const file = tensor_file_open(path, &error);
    if (file == NULL)
        cli_fail(CLI_BAD_INPUT, "%s", error.text);
    return file;
}

static void check_sequences(const distill_files *files, const distill_settings *settings)
{
    if (files->context < 1)
        cli_fail(CLI_BAD_INPUT, "%s: hidden: must have at least one token", settings->teacher_path);
    if (files->held_out >= files->sequences)
        cli_fail(CLI_BAD_INPUT,
                 "--held-out=%" PRId64 ": must be below the %" PRId64 " sequences of %s, to leave some for training",
                 files->held_out, files->sequences, settings->teacher_path);
}

void distill_files_open(distill_source *source, distill_settings *settings)
{
    distill_files *const files = &source->files;
    files->teacher_file = open_file(settings->teacher_path);
    files->student_file = open_file(settings->student_path);
    read_layer(&source->teacher_from_file, files->teacher_file, settings->teacher_path, settings->heads_t);
    read_layer(&source->initial_student, files->student_file, settings->student_path, settings->heads_s);
    open_hidden(source, settings);
    const layer_shape *const teacher = &source->teacher_from_file.shape, *const student =
                                                                             &source->initial_student.shape;
    files->sequences = files->hidden_t->shape[0];
    files->context = files->hidden_t->shape[1];
    files->held_out = settings->held_out;
    files->seed = (uint64_t)settings->seed;
    settings->context = files->context;
    settings->hidden = teacher->width;
    settings->heads_t = teacher->heads;
    settings->dim_t = teacher->dim;
    settings->heads_s = student->heads;
    settings->dim_s = student->dim;
    settings->needles = 0;
    source->shape = (attention_pair_shape){files->context, *teacher, *student, settings->direction};
    source->teacher = &source->teacher_from_file;
    source->sequences = (sequence_source){files, file_at};
    check_sequences(files, settings);
}
