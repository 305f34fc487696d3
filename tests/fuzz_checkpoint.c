/* A libFuzzer target: `distill --resume` accepts a checkpoint from a stranger only if training can continue from it.
 *
 * Each input is read twice: as a whole file, and as decisions about a checkpoint that is valid except for them.
 * Buffers have exactly the size that the settings give them, so that a sanitizer finds every access out of bounds. */
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/common/cli.h"
#include "cli/distill/distill.h"

enum { STEPS = 4, WIDTH = 2, HEADS = 2, KEY_HEADS = 1, DIM = 1 };
enum { Q_COUNT = WIDTH * HEADS * DIM, K_COUNT = WIDTH * KEY_HEADS * DIM };

/* Refusals are formatted, to check their arguments, but not printed. */
int __wrap_cli_fail(int exit_code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int __wrap_cli_fail(int exit_code, const char *format, ...)
{
    char message[2048];
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(message, sizeof message, format, arguments) < 0 || exit_code == CLI_OK)
        abort();
    va_end(arguments);
    return exit_code;
}

/* ---- The run that resumes ----------------------------------------------------------------------------------- */

static const distill_request request = {.settings = {.context = 64,
                                                     .hidden = WIDTH,
                                                     .heads_t = HEADS,
                                                     .dim_t = DIM,
                                                     .heads_s = HEADS,
                                                     .dim_s = DIM,
                                                     .steps = STEPS,
                                                     .batch = 1,
                                                     .held_out = 1,
                                                     .control_queries = 1,
                                                     .rate = 0.5F}};

static float *allocate(int64_t count)
{
    float *const memory = malloc((size_t)count * sizeof *memory);
    if (!memory)
        abort();
    return memory;
}

static layer allocate_layer(void)
{
    return (layer){{WIDTH, HEADS, KEY_HEADS, DIM}, allocate(Q_COUNT), allocate(K_COUNT)};
}

static void free_layer(layer *weights)
{
    free(weights->w_q);
    free(weights->w_k);
}

static void open_run(distill_run *run)
{
    *run = (distill_run){.request = &request};
    student_model *const students[] = {&run->student, &run->control};
    for (int s = 0; s < 2; s++) {
        students[s]->weights = allocate_layer();
        students[s]->first_moment = allocate_layer();
        students[s]->second_moment = allocate_layer();
    }
    run->history.loss = allocate(STEPS + 1);
    run->history.evaluation_step = allocate(STEPS + 1);
    run->history.evaluation_kl = allocate(STEPS + 1);
    run->history.evaluation_hits = allocate(STEPS + 1);
}

static void close_run(distill_run *run)
{
    student_model *const students[] = {&run->student, &run->control};
    for (int s = 0; s < 2; s++) {
        free_layer(&students[s]->weights);
        free_layer(&students[s]->first_moment);
        free_layer(&students[s]->second_moment);
    }
    free(run->history.loss);
    free(run->history.evaluation_step);
    free(run->history.evaluation_kl);
    free(run->history.evaluation_hits);
}

static void require(bool holds)
{
    if (!holds)
        abort();
}

static void require_layer(const layer *weights, float least)
{
    for (int i = 0; i < Q_COUNT; i++)
        require(isfinite(weights->w_q[i]) && weights->w_q[i] >= least);
    for (int i = 0; i < K_COUNT; i++)
        require(isfinite(weights->w_k[i]) && weights->w_k[i] >= least);
}

/* What the training loop and the report rely on. */
static void require_usable(const distill_run *run)
{
    const distill_history *const history = &run->history;
    const int64_t step = run->student.step;
    require(step >= 0 && step <= STEPS && run->control.step == step);
    require(history->evaluation_count >= 0 && history->evaluation_count <= step + 1);
    require(history->seconds >= 0 && history->seconds < 1e10);
    double before = -1;
    for (int64_t e = 0; e < history->evaluation_count; e++) {
        const double at = (double)history->evaluation_step[e];
        require(at > before && at <= (double)step && isfinite(history->evaluation_kl[e]));
        before = at;
    }
    const bool evaluated = history->evaluation_count > 0 && before == (double)step;
    require(evaluated || history->evaluation_count <= STEPS); /* there is room for the next one */
    for (int64_t i = 0; i < step; i++)
        require(isfinite(history->loss[i]));
    const student_model *const students[] = {&run->student, &run->control};
    for (int s = 0; s < 2; s++) {
        require_layer(&students[s]->weights, -INFINITY);
        require_layer(&students[s]->first_moment, -INFINITY);
        require_layer(&students[s]->second_moment, 0);
    }
}

static bool read_file(const unsigned char *bytes, size_t size)
{
    tensor_error error;
    tensor_file *const file = tensor_file_parse(bytes, size, "fuzz", &error);
    if (!file)
        return false;
    distill_run run;
    open_run(&run);
    const bool accepted = distill_checkpoint_read(&run, file, "fuzz") == CLI_OK;
    if (accepted)
        require_usable(&run);
    close_run(&run);
    tensor_file_close(file);
    return accepted;
}

/* ---- A checkpoint with mistakes ----------------------------------------------------------------------------- */

typedef struct byte_source {
    const uint8_t *data;
    size_t size;
} byte_source;

/* Returns zeros after the end of the input. */
static uint8_t take(byte_source *source)
{
    if (source->size == 0)
        return 0;
    source->size--;
    return *source->data++;
}

/* A number, or any text that needs no escape. */
static void take_text(byte_source *source, char *text, size_t text_size)
{
    const uint8_t kind = take(source);
    snprintf(text, text_size, "%d", kind % (STEPS + 2));
    if (kind < 192)
        return;
    size_t length = 0;
    for (; length < (size_t)(kind % 8); length++) {
        const uint8_t letter = take(source);
        text[length] = letter < ' ' || letter > '~' || letter == '"' || letter == '\\' ? '9' : (char)letter;
    }
    text[length] = '\0';
}

static float take_float(byte_source *source)
{
    const uint8_t kind = take(source);
    if (kind < 224)
        return (float)(kind % 8) / (float)(kind < 192 ? 1 : 8);
    uint8_t bytes[sizeof(float)];
    for (size_t b = 0; b < sizeof bytes; b++)
        bytes[b] = take(source);
    float value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

typedef struct writer {
    char text[8192];
    size_t length;
    unsigned char data[2048];
    size_t data_size;
} writer;

static void print(writer *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void print(writer *out, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int added = vsnprintf(out->text + out->length, sizeof out->text - out->length, format, arguments);
    va_end(arguments);
    if (added < 0 || (size_t)added >= sizeof out->text - out->length)
        abort();
    out->length += (size_t)added;
}

/* Rarely another count or type, or no tensor at all. Evaluations are numbered, until the input says otherwise. */
static void add_tensor(writer *out, byte_source *source, const char *name, int64_t count)
{
    const uint8_t mistake = take(source);
    if (mistake == 255)
        return;
    if (mistake >= 250)
        count = take(source) % 16;
    const bool wide = mistake != 249, ordered = strcmp(name, "evaluation_step") == 0 && take(source) < 128;
    const size_t begin = out->data_size;
    for (int64_t i = 0; i < count; i++) {
        const float value = ordered ? (float)i : take_float(source);
        memcpy(out->data + out->data_size, &value, wide ? 4 : 2);
        out->data_size += wide ? 4 : 2;
    }
    const char *const shape = mistake == 248 ? "1, " : "";
    print(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%s%d],\"data_offsets\":[%zu,%zu]}", name, wide ? "F32" : "F16",
          shape, (int)count, begin, out->data_size);
}

/* The settings with the escapes that the header needs. */
static char settings_text[1024];

static void make_settings(void)
{
    char *const settings = distill_settings_text(&request.settings);
    size_t length = 0;
    require(settings && 2 * strlen(settings) < sizeof settings_text);
    for (const char *letter = settings; *letter; letter++) {
        if (*letter == '"')
            settings_text[length++] = '\\';
        settings_text[length++] = *letter;
    }
    free(settings);
}

static void print_settings(writer *out, byte_source *source)
{
    const size_t begin = out->length;
    print(out, "%s", settings_text);
    if (take(source) >= 250)
        out->text[begin + take(source) % (out->length - begin)] = '1';
}

static bool read_mistaken(byte_source *source)
{
    static const struct {
        const char *name;
        enum { OF_Q, OF_K, OF_STEPS, OF_EVALUATIONS } count;
    } tensors[] = {
        {"w_q", OF_Q},
        {"w_k", OF_K},
        {"first_moment_q", OF_Q},
        {"first_moment_k", OF_K},
        {"second_moment_q", OF_Q},
        {"second_moment_k", OF_K},
        {"loss", OF_STEPS},
        {"evaluation_step", OF_EVALUATIONS},
        {"evaluation_kl", OF_EVALUATIONS},
        {"evaluation_hits", OF_EVALUATIONS},
        {"control_w_q", OF_Q},
        {"control_w_k", OF_K},
        {"control_first_moment_q", OF_Q},
        {"control_first_moment_k", OF_K},
        {"control_second_moment_q", OF_Q},
        {"control_second_moment_k", OF_K},
    };
    writer out;
    out.length = sizeof(uint64_t);
    out.data_size = 0;
    char step[16], seconds[16];
    take_text(source, step, sizeof step);
    take_text(source, seconds, sizeof seconds);
    print(&out,
          "{\"__metadata__\":{\"format\":\"streamkl-distill-%d\",\"step\":\"%s\",\"seconds\":\"%s\",\"settings\":\"",
          take(source) == 255 ? 1 : 2, step, seconds);
    print_settings(&out, source);
    print(&out, "\"}");
    const uint8_t evaluations = take(source);
    const int64_t steps = atoi(step) % 100;
    const int64_t counts[] = {Q_COUNT, K_COUNT, steps > 0 ? steps : 0, evaluations % (STEPS + 3)};
    for (size_t t = 0; t < sizeof tensors / sizeof tensors[0]; t++)
        add_tensor(&out, source, tensors[t].name, counts[tensors[t].count]);
    print(&out, "}");
    const uint64_t header_size = out.length - sizeof header_size;
    memcpy(out.text, &header_size, sizeof header_size);
    unsigned char *const file = malloc(out.length + out.data_size);
    if (!file)
        abort();
    memcpy(file, out.text, out.length);
    memcpy(file + out.length, out.data, out.data_size);
    const bool accepted = read_file(file, out.length + out.data_size);
    free(file);
    return accepted;
}

/* A checkpoint without mistakes is accepted: otherwise the target would test nothing. */
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    byte_source none = {NULL, 0};
    make_settings();
    require(read_mistaken(&none));
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    byte_source source = {input, size};
    read_file(input, size);
    read_mistaken(&source);
    return 0;
}
