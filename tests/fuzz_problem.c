/* A libFuzzer target: skl_plan_create accepts or refuses every problem, and calls on accepted small problems access
 * no memory out of bounds. Every call refuses the arrays that skl_inputs_check refuses, and only those.
 *
 * Bytes become the fields of a problem, then cu_seqlens, key_lengths, row bounds, one wrong argument and the elements
 * of all tensors. Tensors have exactly the size that the problem gives them, so that a sanitizer finds every access
 * out of bounds. Problems are small: thousands of them run per second. */
#include <sanitizer/asan_interface.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "streamkl.h"

typedef struct byte_source {
    const uint8_t *data;
    size_t size;
} byte_source;

/* Returns zeros after the end of the input. */
static int64_t take(byte_source *source, size_t size)
{
    uint8_t bytes[sizeof(int64_t)] = {0};
    const size_t taken = source->size < size ? source->size : size;
    memcpy(bytes, source->data, taken);
    source->data += taken;
    source->size -= taken;
    int64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/* Mostly small, so that problems are accepted and fast; sometimes larger than a tile of keys or queries, or any
 * value.
 */
static int64_t take_number(byte_source *source, int64_t usual_range)
{
    const int64_t kind = take(source, 1);
    if (kind == 255)
        return take(source, 8);
    if (kind == 254)
        return -take(source, 1);
    if (kind == 253)
        return take(source, 1);
    return kind % usual_range;
}

/* Sums and products of arbitrary values wrap around in the fuzzer. */
static int64_t plus(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

static int64_t times(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a * (uint64_t)b);
}

static float take_float(byte_source *source)
{
    const int64_t kind = take(source, 1);
    if (kind < 192)
        return (float)(kind % 16) / 4;
    const uint32_t bits = (uint32_t)take(source, 4);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static skl_problem take_problem(byte_source *source)
{
    skl_problem p = skl_problem_default();
    p.dtype_t = (skl_dtype)take_number(source, 3);
    p.dtype_s = (skl_dtype)take_number(source, 3);
    p.grad_f32 = (int32_t)take_number(source, 2);
    p.gradients = (uint32_t)take_number(source, 16);
    p.direction = (skl_direction)take_number(source, 2);
    p.batch = take_number(source, 3);
    p.len_q = take_number(source, 10);
    p.len_k = take_number(source, 12);
    p.heads_s = take_number(source, 3);
    p.heads_t = times(p.heads_s, take_number(source, 3));
    p.key_heads_t = take_number(source, 3);
    p.key_heads_s = take_number(source, 3);
    p.dim_t = take_number(source, 20);
    p.dim_s = take_number(source, 20);
    p.scale_t = take_float(source);
    p.scale_s = take_float(source);
    p.softcap_t = take_float(source);
    p.softcap_s = take_float(source);
    p.causal = (int32_t)take_number(source, 2);
    p.window_left = plus(take_number(source, 14), -1);
    p.window_right = plus(take_number(source, 14), -1);
    p.positions = (skl_positions)take_number(source, 2);
    p.offset_q = p.positions == SKL_POSITIONS_OFFSET ? plus(take_number(source, 20), -10) : 0;
    p.offset_k = p.positions == SKL_POSITIONS_OFFSET ? plus(take_number(source, 20), -10) : 0;
    p.packed = (int32_t)take_number(source, 2);
    p.total_q = p.packed ? take_number(source, 30) : 0;
    p.total_k = p.packed ? take_number(source, 36) : 0;
    p.student = (skl_student)take_number(source, 2);
    if (p.student == SKL_STUDENT_INDEXER) {
        p.index_heads = take_number(source, 5);
        p.dtype_w = (skl_dtype)take_number(source, 3);
        p.index_linear = (int32_t)take_number(source, 2);
        p.top_k = take_number(source, 10);
        p.gradients = (uint32_t)take_number(source, 8) * SKL_DQ_S; /* student gradients */
        p.softcap_s = 0;
    }
    p.row_bounds = (int32_t)take_number(source, 2);
    p.sinks = (int32_t)take_number(source, 2);
    if (p.sinks)
        p.gradients |= (uint32_t)take_number(source, 4) * SKL_DSINK_T; /* any of both */
    if (take_number(source, 3) == 2)                                   /* now and then with what SKL_DV_S excludes */
        p.gradients = (p.gradients & ~(uint32_t)(SKL_DQ_T | SKL_DK_T)) | SKL_DV_S;
    p.link_s = (skl_link)take_number(source, 2);
    if (p.link_s == SKL_LINK_LINEAR && take_number(source, 4) != 0) /* mostly without what it excludes */
        p.scale_s = p.softcap_s = 0, p.direction = SKL_KL_FORWARD;
    if (p.student == SKL_STUDENT_INDEXER && take_number(source, 2) != 0) {
        p.pool = (skl_pool)take_number(source, 3), p.pool_heads = (skl_pool_heads)take_number(source, 2);
        p.pool_blocks = (skl_pool_blocks)take_number(source, 3), p.pool_size = take_number(source, 12);
    }
    return p;
}

/* Products of a pair of query and key, over all pairs. */
static double work_of(const skl_problem *p)
{
    const double rows = p->packed ? (double)p->total_q : (double)p->batch * (double)p->len_q;
    const double heads_s = (double)p->heads_s * (p->student == SKL_STUDENT_INDEXER ? (double)p->index_heads : 1);
    return rows * (double)p->len_k * ((double)p->heads_t * (double)p->dim_t + heads_s * (double)p->dim_s);
}

/* The usual values of take_problem() stay below the limit of work; larger ones would take longer than a thousand of
 * them. */
static bool is_small(const skl_problem *p)
{
    const double work_max = 1 << 20;
    return p->batch <= 8 && p->len_q <= 255 && p->len_k <= 255 && p->heads_t <= 32 && p->total_q <= 400 &&
           p->total_k <= 400 && p->top_k <= 255 && work_of(p) <= work_max;
}

/* ---- Memory of one input --------------------------------------------------------------------------------------- */

enum { BLOCKS_MAX = 64, PATTERN_SIZE = 32 };

typedef struct arena {
    uint8_t pattern[PATTERN_SIZE]; /* the elements of all tensors */
    void *blocks[BLOCKS_MAX];
    int count;
} arena;

/* Elements repeat the next bytes, which choose the other arguments, too: inputs stay short. */
static arena arena_create(byte_source source)
{
    arena arena = {.count = 0};
    for (int n = 0; n < PATTERN_SIZE; n++)
        arena.pattern[n] = (uint8_t)take(&source, 1);
    return arena;
}

static void *allocate(arena *arena, size_t size)
{
    uint8_t *const block = malloc(size ? size : 1);
    if (!block || arena->count == BLOCKS_MAX)
        abort();
    for (size_t n = 0; n < size; n += PATTERN_SIZE)
        memcpy(block + n, arena->pattern, size - n < PATTERN_SIZE ? size - n : PATTERN_SIZE);
    return arena->blocks[arena->count++] = block;
}

static void arena_destroy(arena *arena)
{
    for (int n = 0; n < arena->count; n++)
        free(arena->blocks[n]);
}

static int64_t rows_q(const skl_problem *p)
{
    return p->packed ? p->total_q : p->len_q;
}

static int64_t rows_k(const skl_problem *p)
{
    return p->packed ? p->total_k : p->len_k;
}

/* Keys of the student: as many, or blocks. */
static int64_t rows_k_s(const skl_problem *p)
{
    const int64_t more = p->pool_blocks != SKL_POOL_COMPLETE ? p->pool_size - 1 : 0;
    return p->pool != SKL_POOL_NONE ? (rows_k(p) + more) / p->pool_size : rows_k(p);
}

static skl_output make_tensor(arena *arena, const skl_problem *p, skl_dtype dtype, int64_t heads, int64_t rows,
                              int64_t dim)
{
    const int64_t batch = p->packed ? 1 : p->batch;
    const size_t element = dtype == SKL_F32 ? 4 : 2;
    void *const data = allocate(arena, (size_t)(batch * heads * rows * dim) * element);
    return skl_output_contiguous(data, heads, rows, dim);
}

static skl_output make_rows(arena *arena, const skl_problem *p, int64_t heads)
{
    return make_tensor(arena, p, SKL_F32, heads, rows_q(p), 1);
}

static skl_input as_input(skl_output tensor)
{
    return (skl_input){tensor.data, tensor.stride_batch, tensor.stride_head, tensor.stride_row};
}

/* The same memory for every input: only the bytes that a call may use are not poisoned. */
static void *make_workspace(size_t size)
{
    enum { CAPACITY = 64 << 20 };
    static uint8_t *memory;
    static size_t open;
    if (!memory) {
        memory = aligned_alloc(SKL_WORKSPACE_ALIGNMENT, CAPACITY);
        if (!memory)
            abort();
        ASAN_POISON_MEMORY_REGION(memory, CAPACITY);
    }
    if (size > CAPACITY)
        abort();
    if (size < open)
        ASAN_POISON_MEMORY_REGION(memory + size, open - size);
    ASAN_UNPOISON_MEMORY_REGION(memory, size);
    open = size;
    return memory;
}

/* ---- Arrays ------------------------------------------------------------------------------------------------------
 */

static const int32_t *take_lengths(arena *arena, byte_source *source, int64_t count, int64_t range, bool running)
{
    int32_t *const lengths = allocate(arena, (size_t)count * sizeof *lengths);
    int64_t total = 0;
    for (int64_t n = 0; n < count; n++) {
        const int64_t length = take_number(source, range + 1);
        lengths[n] = (int32_t)(running ? total : length);
        total = plus(total, length);
    }
    return lengths;
}

/* Bounds of all rows. Mostly they do not decrease within a sequence; sometimes one has any value. */
static const int32_t *take_bounds(arena *arena, byte_source *source, const skl_inputs *in, const skl_problem *p)
{
    const int64_t count = p->packed ? p->total_q : p->batch * p->len_q;
    int32_t *const bounds = allocate(arena, (size_t)count * sizeof *bounds);
    int64_t steps[4];
    for (int n = 0; n < 4; n++)
        steps[n] = take(source, 1) % 4;
    int64_t bound = 0, sequence = 0;
    for (int64_t n = 0; n < count; n++) {
        bound += steps[n % 4];
        while (p->packed && sequence < p->batch && in->cu_seqlens_q[sequence] <= n) {
            sequence++;
            bound = 0;
        }
        if (!p->packed && n % p->len_q == 0)
            bound = 0;
        bounds[n] = (int32_t)(bound < p->len_k ? bound : p->len_k);
    }
    if (count > 0 && take(source, 1) % 8 == 7)
        bounds[take(source, 1) % count] = (int32_t)take_number(source, 50);
    return bounds;
}

/* Indices, a few of which may not be keys of the sequence. */
static skl_input take_indices(arena *arena, byte_source *source, const skl_problem *p)
{
    int32_t values[8];
    for (int n = 0; n < 8; n++)
        values[n] = (int32_t)plus(take_number(source, p->len_k + 1 < 250 ? p->len_k + 1 : 250), -1);
    const int64_t count = (p->packed ? 1 : p->batch) * p->heads_s * rows_q(p) * p->top_k;
    int32_t *const indices = allocate(arena, (size_t)count * sizeof *indices);
    for (int64_t n = 0; n < count; n++)
        indices[n] = values[n * 3 % 8];
    return skl_input_contiguous(indices, p->heads_s, rows_q(p), p->top_k);
}

/* ---- The arguments of all calls ----------------------------------------------------------------------------------
 */

typedef struct call {
    const skl_plan *plan;
    const skl_problem *p;
    skl_inputs in;
    skl_rows rows;
    skl_gradients gradients;
    skl_attention attention;
    skl_stats stats;
    skl_row_state *states, *from;
    void *workspace;
    size_t workspace_size;
    bool spoiled;       /* an argument is wrong, other than values of arrays */
    skl_status checked; /* what skl_inputs_check says */
} call;

static bool is_indexer(const skl_problem *p)
{
    return p->student == SKL_STUDENT_INDEXER;
}

static int64_t query_heads_s(const skl_problem *p)
{
    return p->heads_s * (is_indexer(p) ? p->index_heads : 1);
}

static skl_dtype grad_dtype(const skl_problem *p, skl_dtype dtype)
{
    return p->grad_f32 ? SKL_F32 : dtype;
}

static skl_inputs make_inputs(arena *arena, byte_source *source, const skl_problem *p)
{
    skl_inputs in = {.struct_size = sizeof in};
    in.q_t = as_input(make_tensor(arena, p, p->dtype_t, p->heads_t, rows_q(p), p->dim_t));
    in.k_t = as_input(make_tensor(arena, p, p->dtype_t, p->key_heads_t, rows_k(p), p->dim_t));
    in.q_s = as_input(make_tensor(arena, p, p->dtype_s, query_heads_s(p), rows_q(p), p->dim_s));
    in.k_s = as_input(make_tensor(arena, p, p->dtype_s, p->key_heads_s, rows_k_s(p), p->dim_s));
    if (is_indexer(p))
        in.w_s = as_input(make_tensor(arena, p, p->dtype_w, p->heads_s, rows_q(p), p->index_heads));
    if (p->top_k > 0)
        in.indices = take_indices(arena, source, p);
    if (p->packed) {
        in.cu_seqlens_q = take_lengths(arena, source, p->batch + 1, p->len_q, true);
        in.cu_seqlens_k = take_lengths(arena, source, p->batch + 1, p->len_k, true);
    } else if (take(source, 1) % 2) {
        in.key_lengths = take_lengths(arena, source, p->batch, p->len_k, false);
    }
    const int64_t sides = p->row_bounds ? 1 + take(source, 1) % 3 : 0; /* of bounds: 1, 2 or both */
    if (sides & 1)
        in.key_begin = take_bounds(arena, source, &in, p);
    if (sides & 2)
        in.key_end = take_bounds(arena, source, &in, p);
    if (p->sinks) {
        in.sink_t = allocate(arena, (size_t)p->heads_t * sizeof *in.sink_t);
        in.sink_s = allocate(arena, (size_t)p->heads_s * sizeof *in.sink_s);
    }
    return in;
}

static skl_rows make_row_results(arena *arena, const skl_problem *p)
{
    skl_rows rows = {.struct_size = sizeof rows};
    rows.kl = make_rows(arena, p, p->heads_s);
    rows.lse_t = make_rows(arena, p, p->heads_t);
    rows.lse_s = make_rows(arena, p, p->heads_s);
    if (is_indexer(p)) {
        rows.cross_entropy = make_rows(arena, p, p->heads_s);
        rows.entropy = make_rows(arena, p, p->heads_s);
        rows.mass = make_rows(arena, p, p->heads_s);
    }
    if (p->heads_t > p->heads_s && !is_indexer(p) && !p->sinks)
        rows.dot_t = make_rows(arena, p, p->heads_t);
    return rows;
}

static skl_gradients make_gradients(arena *arena, const skl_problem *p)
{
    skl_gradients g = {.struct_size = sizeof g};
    if (p->gradients & SKL_DQ_T)
        g.dq_t = make_tensor(arena, p, grad_dtype(p, p->dtype_t), p->heads_t, rows_q(p), p->dim_t);
    if (p->gradients & SKL_DK_T)
        g.dk_t = make_tensor(arena, p, grad_dtype(p, p->dtype_t), p->key_heads_t, rows_k(p), p->dim_t);
    if (p->gradients & SKL_DQ_S)
        g.dq_s = make_tensor(arena, p, grad_dtype(p, p->dtype_s), query_heads_s(p), rows_q(p), p->dim_s);
    if (p->gradients & SKL_DK_S)
        g.dk_s = make_tensor(arena, p, grad_dtype(p, p->dtype_s), p->key_heads_s, rows_k_s(p), p->dim_s);
    if (p->gradients & SKL_DW_S)
        g.dw_s = make_tensor(arena, p, grad_dtype(p, p->dtype_w), p->heads_s, rows_q(p), p->index_heads);
    if (p->gradients & SKL_DSINK_T)
        g.dsink_t = allocate(arena, (size_t)p->heads_t * sizeof *g.dsink_t);
    if (p->gradients & SKL_DSINK_S)
        g.dsink_s = allocate(arena, (size_t)p->heads_s * sizeof *g.dsink_s);
    return g;
}

static skl_attention make_attention(arena *arena, const skl_problem *p)
{
    skl_attention a = {.struct_size = sizeof a};
    a.v_s = as_input(make_tensor(arena, p, p->dtype_s, p->key_heads_s, rows_k(p), p->dim_s));
    a.o_s = as_input(make_tensor(arena, p, p->dtype_s, p->heads_s, rows_q(p), p->dim_s));
    a.do_s = as_input(make_tensor(arena, p, p->dtype_s, p->heads_s, rows_q(p), p->dim_s));
    a.dv_s = make_tensor(arena, p, grad_dtype(p, p->dtype_s), p->key_heads_s, rows_k(p), p->dim_s);
    return a;
}

/* A number of statistics, 0 if a call must refuse it. */
static int64_t valid_count(int32_t count)
{
    return count >= 0 && count <= 64 ? count : 0;
}

/* Any subset of the statistics, with any numbers. */
static skl_stats make_stats(arena *arena, byte_source *source, const skl_problem *p)
{
    skl_stats stats = {.struct_size = sizeof stats};
    stats.row_begin = plus(take_number(source, 20), -10);
    stats.row_end = plus(take_number(source, 20), -10);
    stats.per_key_head = (int32_t)take_number(source, 2);
    stats.distance_count = (int32_t)take_number(source, 8);
    stats.range_count = (int32_t)take_number(source, 4);
    stats.top_k = (int32_t)take_number(source, 8);
    stats.chosen_count = (int32_t)(take(source, 1) % 4);
    const int64_t distances = valid_count(stats.distance_count), ranges = valid_count(stats.range_count);
    const int64_t top_k = valid_count(stats.top_k);
    stats.key_ranges = take_lengths(arena, source, 2 * ranges * p->batch, p->len_k, false);
    stats.chosen_rows = take_lengths(arena, source, stats.chosen_count * p->batch, p->len_q, false);
    if (take(source, 1) % 2)
        stats.row_weights = as_input(make_rows(arena, p, p->heads_s));
    const int64_t bits = take(source, 2);
    skl_output *const rows[] = {&stats.lse, &stats.entropy, &stats.max_logit, &stats.expected_distance};
    for (int n = 0; n < 4; n++)
        if (bits >> n & 1)
            *rows[n] = make_rows(arena, p, p->heads_s);
    if (bits >> 4 & 1)
        stats.key_sum = make_tensor(arena, p, SKL_F32, p->heads_s, rows_k(p), 1);
    if (bits >> 5 & 1)
        stats.key_max = make_tensor(arena, p, SKL_F32, p->heads_s, rows_k(p), 1);
    const size_t heads = (size_t)(p->batch * p->heads_s);
    if (bits >> 6 & 1)
        stats.head_max_logit = allocate(arena, heads * sizeof(float));
    if (bits >> 7 & 1)
        stats.distance_mass = allocate(arena, heads * (size_t)distances * sizeof(float));
    if (bits >> 8 & 1)
        stats.range_mass = make_tensor(arena, p, SKL_F32, p->heads_s, rows_q(p), ranges);
    if (bits >> 9 & 1)
        stats.range_sum = allocate(arena, heads * (size_t)ranges * sizeof(float));
    if (bits >> 10 & 1)
        stats.top_keys = make_tensor(arena, p, SKL_F32, p->heads_s, rows_q(p), top_k);
    if (bits >> 11 & 1)
        stats.top_p = make_tensor(arena, p, SKL_F32, p->heads_s, rows_q(p), top_k);
    if (bits >> 12 & 1)
        stats.weights = allocate(arena, heads * (size_t)stats.chosen_count * (size_t)p->len_k * sizeof(float));
    return stats;
}

/* ---- One wrong argument ------------------------------------------------------------------------------------------
 */

/* clang-format off */
#define AT(member) offsetof(call, member)
static const size_t structs[] = {
    AT(in), AT(rows), AT(gradients), AT(attention), AT(stats),
};
static const size_t inputs[] = {
    AT(in.q_t), AT(in.k_t), AT(in.q_s), AT(in.k_s), AT(in.lse_t), AT(in.lse_s), AT(in.kl), AT(in.dot_t),
    AT(in.grad_kl), AT(in.w_s), AT(in.indices), AT(attention.v_s), AT(attention.o_s), AT(attention.do_s),
    AT(stats.row_weights),
};
static const size_t outputs[] = {
    AT(rows.kl), AT(rows.lse_t), AT(rows.lse_s), AT(rows.dot_t), AT(rows.cross_entropy), AT(rows.entropy),
    AT(rows.mass), AT(gradients.dq_t), AT(gradients.dk_t), AT(gradients.dq_s), AT(gradients.dk_s),
    AT(gradients.dw_s), AT(attention.dv_s), AT(stats.key_sum), AT(stats.key_max), AT(stats.lse), AT(stats.entropy),
    AT(stats.max_logit), AT(stats.expected_distance), AT(stats.range_mass), AT(stats.top_keys), AT(stats.top_p),
};
static const size_t arrays[] = {
    AT(in.cu_seqlens_q), AT(in.cu_seqlens_k), AT(in.key_lengths), AT(in.key_begin), AT(in.key_end), AT(in.sink_t),
    AT(in.sink_s), AT(gradients.dsink_t), AT(gradients.dsink_s), AT(stats.key_ranges), AT(stats.chosen_rows),
    AT(stats.head_max_logit), AT(stats.distance_mass), AT(stats.range_sum), AT(stats.weights), AT(states), AT(from),
    AT(workspace),
};
/* clang-format on */

#define TAKE_FROM(table, source) ((table)[take(source, 1) % (int64_t)(sizeof(table) / sizeof((table)[0]))])

/* Makes a pointer NULL or misaligned. */
static void spoil_pointer(void *pointer, byte_source *source)
{
    uint8_t *address;
    memcpy(&address, pointer, sizeof address);
    address = address == NULL || take(source, 1) % 2 ? NULL : address + 1;
    memcpy(pointer, &address, sizeof address);
}

static void spoil_stride(void *tensor, byte_source *source)
{
    static const int64_t strides[] = {-1, INT64_MIN, 0, INT64_MAX / 4}; /* the last: no span has 64 bits */
    skl_input changed;
    memcpy(&changed, tensor, sizeof changed);
    int64_t *const of_tensor[] = {&changed.stride_batch, &changed.stride_head, &changed.stride_row};
    int64_t *const stride = TAKE_FROM(of_tensor, source);
    *stride = TAKE_FROM(strides, source);
    memcpy(tensor, &changed, sizeof changed);
}

/* An older program's struct, or none at all: a larger one would have bytes after its end. */
static void spoil_size(void *size_of_struct, byte_source *source)
{
    size_t size;
    memcpy(&size, size_of_struct, sizeof size);
    size = (size_t)take(source, 2) % size;
    memcpy(size_of_struct, &size, sizeof size);
}

/* Changes one argument into one that calls refuse, or do not need. */
static void spoil(call *c, byte_source *source)
{
    uint8_t *const bytes = (uint8_t *)c;
    const bool has_queries = rows_q(c->p) > 0 && (c->p->packed || c->p->batch > 0);
    c->spoiled = true;
    switch (take(source, 1) % 16) {
    case 0:
        spoil_pointer(bytes + TAKE_FROM(inputs, source), source);
        break;
    case 1:
        spoil_pointer(bytes + TAKE_FROM(outputs, source), source);
        break;
    case 2:
        spoil_pointer(bytes + TAKE_FROM(arrays, source), source);
        break;
    case 3:
        spoil_stride(bytes + TAKE_FROM(inputs, source), source);
        break;
    case 4:
        spoil_stride(bytes + TAKE_FROM(outputs, source), source);
        break;
    case 5:
        spoil_size(bytes + TAKE_FROM(structs, source), source);
        break;
    case 6:
        c->workspace_size = (size_t)take(source, 2);
        break;
    case 7: /* an output on the queries */
        if (has_queries)
            memcpy(bytes + TAKE_FROM(outputs, source), &c->in.q_s.data, sizeof c->in.q_s.data);
        break;
    default:
        c->spoiled = false;
    }
}

/* ---- The calls ---------------------------------------------------------------------------------------------------
 */

/* Without a wrong argument, a call refuses exactly what skl_inputs_check refuses. */
static void expect(const call *c, skl_status status)
{
    if (status != SKL_OK && skl_last_error()[0] == '\0')
        abort();
    if (!c->spoiled && (status == SKL_OK) != (c->checked == SKL_OK))
        abort();
}

static void run_backwards(const call *c)
{
    expect(c, skl_backward(c->plan, &c->in, &c->gradients, c->workspace, c->workspace_size, NULL));
    skl_rows rows = c->rows;
    skl_inputs in = c->in;
    if (c->p->pool != SKL_POOL_NONE)
        in.lse_s.data = NULL; /* the LSEs are results */
    else
        rows.lse_t.data = rows.lse_s.data = rows.mass.data = NULL;
    expect(c, skl_forward_backward(c->plan, &in, &rows, &c->gradients, c->workspace, c->workspace_size, NULL));
}

static void run_attention(const call *c)
{
    const skl_rows only_kl = {.struct_size = sizeof only_kl, .kl = c->rows.kl};
    const skl_status status = skl_attention_backward(c->plan, &c->in, &c->attention, &only_kl, &c->gradients,
                                                     c->workspace, c->workspace_size, NULL);
    if (c->p->gradients & SKL_DV_S)
        expect(c, status);
    else if (status == SKL_OK)
        abort();
    if (skl_attention_forward(c->plan, &c->in, &c->attention.v_s, &c->rows, &c->attention.dv_s, c->workspace,
                              c->workspace_size, NULL) == SKL_OK)
        abort(); /* a CPU has none */
}

static void run_states(const call *c, byte_source *source)
{
    const int64_t begin = take_number(source, 12), end = plus(begin, take_number(source, 12));
    skl_status status = skl_partial(c->plan, &c->in, begin, end, c->states, c->workspace, c->workspace_size, NULL);
    if (c->p->pool != SKL_POOL_NONE) { /* a pooled teacher has no states */
        if (status == SKL_OK)
            abort();
        return;
    }
    if (begin <= end)
        expect(c, status);
    else if (status == SKL_OK)
        abort();
    expect(c, skl_partial(c->plan, &c->in, end, INT64_MAX, c->from, c->workspace, c->workspace_size, NULL));
    status = skl_states_merge(c->plan, c->states, c->from, NULL);
    if (!c->spoiled && status != SKL_OK)
        abort();
    skl_rows rows = c->rows;
    rows.dot_t.data = rows.cross_entropy.data = rows.entropy.data = rows.mass.data = NULL;
    expect(c, skl_states_finish(c->plan, &c->in, c->states, &rows, NULL));
    if (!c->spoiled) /* without inputs, the call cannot see that an output is on the queries */
        (void)skl_states_finish(c->plan, NULL, c->states, &rows, NULL);
}

static void run_simple(const call *c, const skl_options *options, const skl_problem *problem)
{
    const skl_inputs *const in = &c->in;
    (void)skl_attention_kl(problem, options, in->q_t.data, in->k_t.data, in->q_s.data, in->k_s.data, c->rows.kl.data,
                           NULL);
    (void)skl_attention_kl_backward(problem, options, in->q_t.data, in->k_t.data, in->q_s.data, in->k_s.data,
                                    in->grad_kl.data, c->rows.kl.data, c->gradients.dq_s.data, c->gradients.dk_s.data,
                                    NULL);
}

static void explain(const call *c, byte_source *source)
{
    for (int op = 0; op <= SKL_OP_ATTENTION_STATS + 1; op++) {
        char text[64];
        (void)skl_plan_explain(c->plan, &c->in, (skl_op)op, text, (size_t)take(source, 1) % sizeof text);
        (void)skl_plan_explain(c->plan, NULL, (skl_op)op, NULL, 0);
        (void)skl_plan_supports(c->plan, (skl_op)op);
    }
}

/* Errors are fine, since calls check their arguments; crashes are not. */
static void run(const skl_plan *plan, const skl_options *options, skl_problem p, byte_source *source)
{
    enum { BACKWARD = 1, STATES = 2, STATS = 4, ATTENTION = 8, SIMPLE = 16, EXPLAIN = 32, GIVEN_LSE = 64 };
    const int64_t calls = take(source, 1);
    p.key_heads_t = p.key_heads_t ? p.key_heads_t : p.heads_t;
    p.key_heads_s = p.key_heads_s ? p.key_heads_s : p.heads_s;
    call c = {.plan = plan, .p = &p};
    arena arena = arena_create(*source);
    c.in = make_inputs(&arena, source, &p);
    c.rows = make_row_results(&arena, &p);
    c.gradients = make_gradients(&arena, &p);
    c.attention.struct_size = sizeof c.attention;
    c.stats.struct_size = sizeof c.stats;
    if (calls & ATTENTION && !is_indexer(&p))
        c.attention = make_attention(&arena, &p);
    if (calls & STATS)
        c.stats = make_stats(&arena, source, &p);
    const size_t states_size = (size_t)(p.heads_s * (p.packed ? p.total_q : p.batch * p.len_q)) * sizeof *c.states;
    if (calls & STATES) {
        c.states = allocate(&arena, states_size);
        c.from = allocate(&arena, states_size);
    }
    for (skl_op op = SKL_OP_FORWARD; op <= SKL_OP_ATTENTION_STATS; op++)
        if (skl_plan_workspace_size(plan, op) > c.workspace_size)
            c.workspace_size = skl_plan_workspace_size(plan, op);
    c.workspace = make_workspace(c.workspace_size);
    c.in.lse_t = as_input(c.rows.lse_t), c.in.lse_s = as_input(c.rows.lse_s);
    c.in.kl = as_input(c.rows.kl), c.in.dot_t = as_input(c.rows.dot_t);
    spoil(&c, source);

    skl_inputs first = c.in;
    if (!(calls & GIVEN_LSE))
        first.lse_t.data = NULL;
    c.checked = skl_inputs_check(plan, &first);
    expect(&c, skl_forward(plan, &first, &c.rows, c.workspace, c.workspace_size, NULL));
    if (calls & STATS) {
        const skl_status status = skl_attention_stats(plan, &c.in, &c.stats, c.workspace, c.workspace_size, NULL);
        if (!c.spoiled && c.checked != SKL_OK && status == SKL_OK)
            abort();
    }
    if (calls & EXPLAIN)
        explain(&c, source);
    if (calls & BACKWARD)
        run_backwards(&c);
    if (calls & ATTENTION)
        run_attention(&c);
    if (calls & STATES)
        run_states(&c, source);
    if (calls & SIMPLE)
        run_simple(&c, options, &p);
    arena_destroy(&arena);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    byte_source source = {data, size};
    skl_kernel_info kernel = {.struct_size = sizeof kernel};
    skl_options options = skl_options_default();
    options.threads = 1;
    if (skl_kernel_at((int32_t)(take(&source, 1) % 8), &kernel) && kernel.device == SKL_CPU && kernel.usable)
        options.kernel = kernel.name;
    const skl_problem problem = take_problem(&source);
    (void)skl_problem_needs(&problem, (skl_op)take(&source, 1));
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &problem, &options);
    if ((status == SKL_OK) != (plan != NULL))
        abort();
    if (status == SKL_OK && is_small(&problem))
        run(plan, &options, problem, &source);
    skl_plan_destroy(plan);
    return 0;
}
