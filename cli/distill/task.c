#include "cli/distill/task.h"
#include "cli/common/cli.h"
#include "cli/common/random.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

/* ---- Components of a hidden state ---------------------------------------------------------------------------- */

enum {
    CODE = 16, /* dimensions of the code of a needle */
    TOPIC = 8, /* dimensions of the code of a topic */
    PART_ASKED = 0,
    PART_DEFINED = PART_ASKED + CODE,
    PART_TOPIC = PART_DEFINED + CODE,
    PART_ONE = PART_TOPIC + TOPIC, /* 1 in every token */
    PART_SINK,                     /* 0 except in the first token */
    PART_NOISE
};
static_assert((int)PART_NOISE <= (int)TASK_WIDTH_MIN, "the parts fit into the narrowest hidden state");
static_assert((int)CODE + 1 == (int)TASK_DIM_MIN, "a retrieval head holds a code and the sink");

/* The distribution of the data. */
enum {
    SEGMENTS = 24,              /* of one topic each */
    TOPICS = 8,                 /* different topics per sequence */
    TOKENS_PER_DISTRACTOR = 128 /* one distractor per so many tokens, on average */
};
/* Fraction of tokens that are references, before and after questions_begin. */
static const float asked_early = 0.15F, asked_late = 0.5F;
static const double questions_begin = 0.875, definitions_end = 0.97; /* fractions of the context */
static const float noise = 0.5F;                                     /* in every component without a meaning */
static const float sink_length = 4;                                  /* of the first token, along PART_SINK */
static const float distractor_cosine = 0.6F; /* between the codes of a needle and of its distractor */

/* The teacher's logits at a perfect match. */
static const double retrieval_logit = 22, sink_logit = 10, topic_logit = 6;
static const double head_difference =
    0.1; /* relative difference of the logits between the heads of a teacher group */

/* Streams of random numbers. */
enum { STREAM_DIRECTIONS = 101, STREAM_TEACHER = 102, STREAM_DATA = 200 };

int task_head_retrieves(int64_t head_s)
{
    return head_s % 2 == 0;
}

/* ---- Directions --------------------------------------------------------------------------------------------- */

static double dot(const float *a, const float *b, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

static void normalize(float *vector, int64_t count, double length)
{
    const float scale = (float)(length / sqrt(dot(vector, vector, count)));
    for (int64_t i = 0; i < count; i++)
        vector[i] *= scale;
}

/* `rows` random orthonormal vectors (Gram-Schmidt, twice for accuracy). */
static void random_rotation(float *vectors, int64_t rows, int64_t columns, uint64_t *state)
{
    for (int64_t row = 0; row < rows; row++) {
        float *const vector = vectors + row * columns;
        for (int64_t i = 0; i < columns; i++)
            vector[i] = random_normal(state);
        for (int64_t before = 0; before < 2 * row; before++) {
            const float *const other = vectors + before % row * columns;
            const float overlap = (float)dot(vector, other, columns);
            for (int64_t i = 0; i < columns; i++)
                vector[i] -= overlap * other[i];
        }
        normalize(vector, columns, 1);
    }
}

/* ---- The teacher -------------------------------------------------------------------------------------------- */

/* Adds weight * (part `q_part` of a query) * (part `k_part` of a key) to the logits of a head, before the logit scale
 * 1 / sqrt(dim), through one direction of the head. */
static void connect(retrieval_task *task, int64_t head, const float *head_direction, int q_part, int k_part,
                    double weight)
{
    const layer_shape *const shape = &task->shape.teacher;
    const int64_t columns = shape->heads * shape->dim;
    const float half = (float)sqrt(weight);
    for (int64_t i = 0; i < shape->width; i++)
        for (int64_t d = 0; d < shape->dim; d++) {
            const float to = half * head_direction[d];
            const int64_t at = i * columns + head * shape->dim + d;
            task->teacher.w_q[at] += task->directions[q_part * shape->width + i] * to;
            task->teacher.w_k[at] += task->directions[k_part * shape->width + i] * to;
        }
}

/* Codes have length sqrt(count), so that their components are about 1: the dot product of equal codes is `count`. */
static void make_head(retrieval_task *task, int64_t head, float *head_directions, uint64_t *state)
{
    const layer_shape *const shape = &task->shape.teacher;
    const double scale = sqrt((double)shape->dim);
    const int64_t member = head % task->shape.group_size;
    const double sharpness =
        1 + head_difference *
                (task->shape.group_size > 1 ? 2.0 * (double)member / (double)(task->shape.group_size - 1) - 1 : 0);
    random_rotation(head_directions, TASK_DIM_MIN, shape->dim, state);
    if (task_head_retrieves(head / task->shape.group_size)) {
        for (int c = 0; c < CODE; c++)
            connect(task, head, head_directions + c * shape->dim, PART_ASKED + c, PART_DEFINED + c,
                    sharpness * scale * retrieval_logit / CODE);
        connect(task, head, head_directions + CODE * shape->dim, PART_ONE, PART_SINK,
                sharpness * scale * sink_logit / (double)sink_length);
        return;
    }
    for (int c = 0; c < TOPIC; c++)
        connect(task, head, head_directions + c * shape->dim, PART_TOPIC + c, PART_TOPIC + c,
                sharpness * scale * topic_logit / TOPIC);
}

static void make_teacher(retrieval_task *task)
{
    const layer_shape *const shape = &task->shape.teacher;
    const size_t count = (size_t)(TASK_DIM_MIN * shape->dim);
    float *const head_directions = cli_allocate_zeros(count, sizeof *head_directions, "the teacher");
    uint64_t state = random_stream(task->shape.seed, STREAM_TEACHER, 0);
    task->teacher = layer_zeros(*shape);
    for (int64_t head = 0; head < shape->heads; head++)
        make_head(task, head, head_directions, &state);
    free(head_directions);
}

void task_create(retrieval_task *task, const task_shape *shape, int threads)
{
    const layer_shape *const teacher = &shape->teacher;
    const size_t context = (size_t)shape->context, width = (size_t)teacher->width;
    assert(shape->context >= TASK_CONTEXT_MIN && teacher->width >= TASK_WIDTH_MIN && teacher->dim >= TASK_DIM_MIN);
    assert(shape->needles <= TASK_NEEDLES_MAX && shape->needles * 2 <= shape->context);
    *task = (retrieval_task){.shape = *shape, .threads = threads};
    task->directions = cli_allocate_zeros(width * width, sizeof(float), "directions");
    task->hidden = cli_allocate_zeros(context * width, sizeof(float), "hidden states");
    task->parts = cli_allocate_zeros(context * width, sizeof(float), "hidden states");
    task->references = cli_allocate_zeros(context, sizeof(reference), "references");
    uint64_t state = random_stream(shape->seed, STREAM_DIRECTIONS, 0);
    random_rotation(task->directions, teacher->width, teacher->width, &state);
    make_teacher(task);
}

void task_free(retrieval_task *task)
{
    free(task->directions);
    free(task->hidden);
    free(task->parts);
    free(task->references);
    free(task->teacher.w_q);
}

/* ---- A sequence --------------------------------------------------------------------------------------------- */

static void random_code(float *code, int64_t count, uint64_t *state)
{
    for (int64_t c = 0; c < count; c++)
        code[c] = random_normal(state);
    normalize(code, count, sqrt((double)count));
}

static float random_fraction(uint64_t *state)
{
    return (float)(random_bits(state) >> 40) / (float)(1 << 24);
}

typedef struct sequence_layout {
    float needles[TASK_NEEDLES_MAX][CODE];
    int64_t positions[TASK_NEEDLES_MAX]; /* of the definitions, increasing */
    float topics[TOPICS][TOPIC];
    int segment_topics[SEGMENTS];
} sequence_layout;

/* One needle in each of equal slots of the context, so that all depths occur, and early enough to be referenced. */
static void draw_layout(sequence_layout *layout, const retrieval_task *task, uint64_t *state)
{
    const int64_t span = (int64_t)(definitions_end * (double)task->shape.context) - 1;
    for (int64_t n = 0; n < task->shape.needles; n++) {
        const int64_t begin = 1 + span * n / task->shape.needles, end = 1 + span * (n + 1) / task->shape.needles;
        layout->positions[n] = begin + random_below(state, end - begin);
        random_code(layout->needles[n], CODE, state);
    }
    for (int t = 0; t < TOPICS; t++)
        random_code(layout->topics[t], TOPIC, state);
    for (int s = 0; s < SEGMENTS; s++)
        layout->segment_topics[s] = (int)random_below(state, TOPICS);
}

static void add_distractor(float *parts, const float *needle, uint64_t *state)
{
    float other[CODE];
    random_code(other, CODE, state);
    const float overlap = (float)(dot(other, needle, CODE) / CODE);
    for (int c = 0; c < CODE; c++)
        other[c] -= overlap * needle[c];
    normalize(other, CODE, sqrt(CODE));
    for (int c = 0; c < CODE; c++)
        parts[PART_DEFINED + c] =
            distractor_cosine * needle[c] + sqrtf(1 - distractor_cosine * distractor_cosine) * other[c];
}

/* Draws the components of token `at`. Returns the needle that it refers to, or -1. */
static int64_t draw_token(float *parts, const retrieval_task *task, const sequence_layout *layout, int64_t at,
                          int64_t defined, uint64_t *state)
{
    const int late = (double)at >= questions_begin * (double)task->shape.context;
    const float *const topic = layout->topics[layout->segment_topics[at * SEGMENTS / task->shape.context]];
    memset(parts, 0, PART_NOISE * sizeof *parts);
    memcpy(parts + PART_TOPIC, topic, TOPIC * sizeof *topic);
    parts[PART_ONE] = 1;
    parts[PART_SINK] = at == 0 ? sink_length : 0;
    for (int64_t part = PART_NOISE; part < task->shape.teacher.width; part++)
        parts[part] = noise * random_normal(state);
    if (defined > 0 && layout->positions[defined - 1] == at) {
        memcpy(parts + PART_DEFINED, layout->needles[defined - 1], CODE * sizeof(float));
        return -1;
    }
    if (at > 0 && random_below(state, TOKENS_PER_DISTRACTOR) == 0) {
        add_distractor(parts, layout->needles[random_below(state, task->shape.needles)], state);
        return -1;
    }
    if (defined == 0 || random_fraction(state) >= (late ? asked_late : asked_early))
        return -1;
    const int64_t asked = random_below(state, defined);
    memcpy(parts + PART_ASKED, layout->needles[asked], CODE * sizeof(float));
    return asked;
}

sequence task_sequence(retrieval_task *task, sequence_split split, uint64_t index)
{
    const int64_t width = task->shape.teacher.width;
    uint64_t state = random_stream(task->shape.seed, STREAM_DATA + (uint64_t)split, index);
    sequence_layout layout;
    draw_layout(&layout, task, &state);
    int64_t defined = 0, reference_count = 0;
    for (int64_t at = 0; at < task->shape.context; at++) {
        while (defined < task->shape.needles && layout.positions[defined] <= at)
            defined++;
        const int64_t asked = draw_token(task->parts + at * width, task, &layout, at, defined, &state);
        if (asked >= 0)
            task->references[reference_count++] = (reference){at, layout.positions[asked]};
    }
    /* hidden = sum over parts of part * direction */
    memset(task->hidden, 0, (size_t)(task->shape.context * width) * sizeof *task->hidden);
    matmul_add(task->hidden, (matrix){task->parts, width, 1}, task->directions, task->shape.context, width, width,
               task->threads);
    return (sequence){task->hidden, task->references, reference_count};
}
