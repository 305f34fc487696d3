#include "distill/task.h"
#include "device/device.h"
#include "distill/matmul.h"
#include "distill/random.h"

#include <assert.h>
#include <math.h>

/* ---- The parts of a hidden state ---------------------------------------------------------------------------- */

enum {
    CODE = 16, /* numbers in the code of a needle */
    TOPIC = 8, /* and of a topic */
    PART_ASKED = 0,
    PART_DEFINED = PART_ASKED + CODE,
    PART_TOPIC = PART_DEFINED + CODE,
    PART_ONE = PART_TOPIC + TOPIC, /* 1 in every token */
    PART_SINK,                     /* not 0 in the first token only */
    PART_NOISE
};
static_assert((int)PART_NOISE <= (int)TASK_WIDTH_MIN, "the parts fit into the narrowest hidden state");
static_assert((int)CODE + 1 == (int)TASK_DIM_MIN, "a retrieval head holds a code and the sink");

/* How the data are drawn. */
enum {
    SEGMENTS = 24,            /* stretches of one topic */
    TOPICS = 8,               /* different ones in a sequence */
    TOKENS_A_LOOK_ALIKE = 128 /* one in so many tokens */
};
/* Shares of references among tokens, before the questions begin and from there on. */
static const float asked_early = 0.15F, asked_late = 0.5F;
static const double questions_begin = 0.875, definitions_end = 0.97; /* shares of the context */
static const float noise = 0.5F;                                     /* in every part that means nothing */
static const float sink_length = 4;                                  /* how far the first token stands out */
static const float likeness = 0.6F; /* cosine between the codes of a needle and of its look-alike */

/* How sharply the teacher looks: logits at a perfect match. */
static const double retrieval_logit = 22, sink_logit = 10, topic_logit = 6;
static const double head_difference = 0.1; /* heads of one group differ in sharpness by up to this share */

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

static void normalise(float *vector, int64_t count, double length)
{
    const float scale = (float)(length / sqrt(dot(vector, vector, count)));
    for (int64_t i = 0; i < count; i++)
        vector[i] *= scale;
}

/* `rows` random vectors of length 1 at right angles to each other (Gram-Schmidt, twice for accuracy). */
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
        normalise(vector, columns, 1);
    }
}

/* ---- The teacher -------------------------------------------------------------------------------------------- */

/* Adds to a head: part `q_part` of a query times part `k_part` of a key, through one direction of the head. `weight`
 * is what their product is worth in the logit, before the logit scale 1 / sqrt(dim). */
static void connect(task *work, int64_t head, const float *head_direction, int q_part, int k_part, double weight)
{
    const layer_shape *const shape = &work->teacher_shape;
    const int64_t columns = shape->heads * shape->dim;
    const float half = (float)sqrt(weight);
    for (int64_t i = 0; i < shape->width; i++)
        for (int64_t d = 0; d < shape->dim; d++) {
            const float to = half * head_direction[d];
            const int64_t at = i * columns + head * shape->dim + d;
            work->teacher.w_q[at] += work->directions[q_part * shape->width + i] * to;
            work->teacher.w_k[at] += work->directions[k_part * shape->width + i] * to;
        }
}

/* Codes have length sqrt(count), so that their numbers are of size 1: a perfect match has a product of `count`. */
static void make_head(task *work, int64_t head, float *head_directions, uint64_t *state)
{
    const layer_shape *const shape = &work->teacher_shape;
    const double scale = sqrt((double)shape->dim);
    const int64_t member = head % work->group;
    const double sharpness =
        1 + head_difference * (work->group > 1 ? 2.0 * (double)member / (double)(work->group - 1) - 1 : 0);
    random_rotation(head_directions, TASK_DIM_MIN, shape->dim, state);
    if (task_head_retrieves(head / work->group)) {
        for (int c = 0; c < CODE; c++)
            connect(work, head, head_directions + c * shape->dim, PART_ASKED + c, PART_DEFINED + c,
                    sharpness * scale * retrieval_logit / CODE);
        connect(work, head, head_directions + CODE * shape->dim, PART_ONE, PART_SINK,
                sharpness * scale * sink_logit / (double)sink_length);
        return;
    }
    for (int c = 0; c < TOPIC; c++)
        connect(work, head, head_directions + c * shape->dim, PART_TOPIC + c, PART_TOPIC + c,
                sharpness * scale * topic_logit / TOPIC);
}

static skl_status make_teacher(task *work)
{
    const layer_shape *const shape = &work->teacher_shape;
    assert(shape->key_heads == shape->heads);
    float *head_directions = NULL;
    skl_status status = device_allocate(SKL_CPU, (size_t)(TASK_DIM_MIN * shape->dim) * sizeof *head_directions,
                                        "the teacher", (void **)&head_directions);
    uint64_t state = random_stream(work->seed, STREAM_TEACHER, 0);
    for (int64_t head = 0; head < shape->heads && status == SKL_OK; head++)
        make_head(work, head, head_directions, &state);
    device_free(SKL_CPU, head_directions);
    return status;
}

skl_status task_create(task *work, const task_shape *shape, uint64_t seed, int threads)
{
    const layer_shape teacher_shape = shape->teacher;
    const int64_t context = shape->context;
    assert(context >= TASK_CONTEXT_MIN && teacher_shape.width >= TASK_WIDTH_MIN && teacher_shape.dim >= TASK_DIM_MIN);
    assert(shape->needles <= TASK_NEEDLES_MAX && shape->needles * 2 <= context);
    *work = (task){.context = context,
                   .needles = shape->needles,
                   .teacher_shape = teacher_shape,
                   .group = shape->group,
                   .seed = seed,
                   .threads = threads};
    const size_t width = (size_t)teacher_shape.width;
    skl_status status =
        device_allocate(SKL_CPU, width * width * sizeof(float), "directions", (void **)&work->directions);
    if (status == SKL_OK)
        status = device_allocate(SKL_CPU, (size_t)context * width * sizeof(float), "hidden states",
                                 (void **)&work->hidden);
    if (status == SKL_OK)
        status =
            device_allocate(SKL_CPU, (size_t)context * width * sizeof(float), "hidden states", (void **)&work->parts);
    if (status == SKL_OK)
        status =
            device_allocate(SKL_CPU, (size_t)context * sizeof(reference), "references", (void **)&work->references);
    if (status == SKL_OK)
        status = layer_allocate(&work->teacher, teacher_shape);
    if (status != SKL_OK)
        return status;
    uint64_t state = random_stream(seed, STREAM_DIRECTIONS, 0);
    random_rotation(work->directions, teacher_shape.width, teacher_shape.width, &state);
    return make_teacher(work);
}

void task_free(task *work)
{
    device_free(SKL_CPU, work->directions);
    device_free(SKL_CPU, work->hidden);
    device_free(SKL_CPU, work->parts);
    device_free(SKL_CPU, work->references);
    layer_free(&work->teacher);
}

/* ---- A sequence --------------------------------------------------------------------------------------------- */

static void random_code(float *code, int64_t count, uint64_t *state)
{
    for (int64_t c = 0; c < count; c++)
        code[c] = random_normal(state);
    normalise(code, count, sqrt((double)count));
}

static float random_share(uint64_t *state)
{
    return (float)(random_bits(state) >> 40) / (float)(1 << 24);
}

typedef struct sequence_plan {
    float needles[TASK_NEEDLES_MAX][CODE];
    int64_t places[TASK_NEEDLES_MAX]; /* of the definitions, rising */
    float topics[TOPICS][TOPIC];
    int segment_topics[SEGMENTS];
} sequence_plan;

/* One needle in every slot of the context, so that every depth has its share; none so late that nobody asks for it.
 */
static void plan_sequence(sequence_plan *plan, const task *work, uint64_t *state)
{
    const int64_t span = (int64_t)(definitions_end * (double)work->context) - 1;
    for (int64_t n = 0; n < work->needles; n++) {
        const int64_t begin = 1 + span * n / work->needles, end = 1 + span * (n + 1) / work->needles;
        plan->places[n] = begin + random_below(state, end - begin);
        random_code(plan->needles[n], CODE, state);
    }
    for (int t = 0; t < TOPICS; t++)
        random_code(plan->topics[t], TOPIC, state);
    for (int s = 0; s < SEGMENTS; s++)
        plan->segment_topics[s] = (int)random_below(state, TOPICS);
}

static void add_look_alike(float *parts, const float *needle, uint64_t *state)
{
    float other[CODE];
    random_code(other, CODE, state);
    const float overlap = (float)(dot(other, needle, CODE) / CODE);
    for (int c = 0; c < CODE; c++)
        other[c] -= overlap * needle[c];
    normalise(other, CODE, sqrt(CODE));
    for (int c = 0; c < CODE; c++)
        parts[PART_DEFINED + c] = likeness * needle[c] + sqrtf(1 - likeness * likeness) * other[c];
}

/* The parts of token `at`. Returns the needle that it asks for, or -1. */
static int64_t draw_token(float *parts, const task *work, const sequence_plan *plan, int64_t at, int64_t defined,
                          uint64_t *state)
{
    const int late = (double)at >= questions_begin * (double)work->context;
    const float *const topic = plan->topics[plan->segment_topics[at * SEGMENTS / work->context]];
    memset(parts, 0, PART_NOISE * sizeof *parts);
    memcpy(parts + PART_TOPIC, topic, TOPIC * sizeof *topic);
    parts[PART_ONE] = 1;
    parts[PART_SINK] = at == 0 ? sink_length : 0;
    for (int64_t part = PART_NOISE; part < work->teacher_shape.width; part++)
        parts[part] = noise * random_normal(state);
    if (defined > 0 && plan->places[defined - 1] == at) {
        memcpy(parts + PART_DEFINED, plan->needles[defined - 1], CODE * sizeof(float));
        return -1;
    }
    if (at > 0 && random_below(state, TOKENS_A_LOOK_ALIKE) == 0) {
        add_look_alike(parts, plan->needles[random_below(state, work->needles)], state);
        return -1;
    }
    if (defined == 0 || random_share(state) >= (late ? asked_late : asked_early))
        return -1;
    const int64_t asked = random_below(state, defined);
    memcpy(parts + PART_ASKED, plan->needles[asked], CODE * sizeof(float));
    return asked;
}

sequence task_sequence(task *work, uint64_t stream, uint64_t index)
{
    const int64_t width = work->teacher_shape.width;
    uint64_t state = random_stream(work->seed, STREAM_DATA + stream, index);
    sequence_plan plan;
    plan_sequence(&plan, work, &state);
    work->reference_count = 0;
    int64_t defined = 0;
    for (int64_t at = 0; at < work->context; at++) {
        while (defined < work->needles && plan.places[defined] <= at)
            defined++;
        const int64_t asked = draw_token(work->parts + at * width, work, &plan, at, defined, &state);
        if (asked >= 0)
            work->references[work->reference_count++] = (reference){at, plan.places[asked]};
    }
    /* hidden = sum over parts of part * direction */
    memset(work->hidden, 0, (size_t)(work->context * width) * sizeof *work->hidden);
    matmul_add(work->hidden, (matrix){work->parts, width, 1}, work->directions, work->context, width, width,
               work->threads);
    return (sequence){work->hidden, work->hidden, work->references, work->reference_count};
}
