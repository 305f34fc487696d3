/* A libFuzzer target: skl_plan_create accepts or refuses every problem, and calls on accepted small problems access
 * no memory out of bounds.
 *
 * Bytes become the fields of a problem, then cu_seqlens, key_lengths, row bounds and the elements of all tensors.
 * Tensors have exactly the size that the problem gives them, so that a sanitizer finds every access out of bounds. */
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

/* Mostly small, so that problems are accepted; sometimes any value. */
static int64_t take_number(byte_source *source, int64_t usual_range)
{
    const int64_t kind = take(source, 1);
    if (kind == 255)
        return take(source, 8);
    if (kind == 254)
        return -take(source, 1);
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
    p.batch = take_number(source, 4);
    p.len_q = take_number(source, 40);
    p.len_k = take_number(source, 40);
    p.heads_s = take_number(source, 4);
    p.heads_t = times(p.heads_s, take_number(source, 4));
    p.key_heads_t = take_number(source, 3);
    p.key_heads_s = take_number(source, 3);
    p.dim_t = take_number(source, 40);
    p.dim_s = take_number(source, 40);
    p.scale_t = take_float(source);
    p.scale_s = take_float(source);
    p.softcap_t = take_float(source);
    p.softcap_s = take_float(source);
    p.causal = (int32_t)take_number(source, 2);
    p.window_left = plus(take_number(source, 50), -1);
    p.window_right = plus(take_number(source, 50), -1);
    p.positions = (skl_positions)take_number(source, 2);
    p.offset_q = p.positions == SKL_POSITIONS_OFFSET ? plus(take_number(source, 50), -25) : 0;
    p.offset_k = p.positions == SKL_POSITIONS_OFFSET ? plus(take_number(source, 50), -25) : 0;
    p.packed = (int32_t)take_number(source, 2);
    p.total_q = p.packed ? take_number(source, 120) : 0;
    p.total_k = p.packed ? take_number(source, 120) : 0;
    p.student = (skl_student)take_number(source, 2);
    if (p.student == SKL_STUDENT_INDEXER) {
        p.index_heads = take_number(source, 6);
        p.dtype_w = (skl_dtype)take_number(source, 3);
        p.index_linear = (int32_t)take_number(source, 2);
        p.top_k = take_number(source, 20);
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
    return p;
}

/* Products of a pair of query and key, over all pairs. */
static double work_of(const skl_problem *p)
{
    const double rows = p->packed ? (double)p->total_q : (double)p->batch * (double)p->len_q;
    const double heads_s = (double)p->heads_s * (p->student == SKL_STUDENT_INDEXER ? (double)p->index_heads : 1);
    return rows * (double)p->len_k * ((double)p->heads_t * (double)p->dim_t + heads_s * (double)p->dim_s);
}

/* The usual values of take_problem() stay below the limit of work; larger ones would take seconds. */
static int is_small(const skl_problem *p)
{
    const double work_max = 1 << 23;
    return p->batch <= 8 && p->len_q <= 200 && p->len_k <= 200 && p->heads_t <= 32 && p->total_q <= 400 &&
           p->total_k <= 400 && p->top_k <= 200 && work_of(p) <= work_max;
}

/* ---- Memory of one call ------------------------------------------------------------------------------------- */

enum { BLOCKS_MAX = 40 };

typedef struct arena {
    void *blocks[BLOCKS_MAX];
    int count;
} arena;

static void *allocate(arena *arena, byte_source *source, size_t size)
{
    uint8_t *const block = malloc(size ? size : 1);
    if (!block || arena->count == BLOCKS_MAX)
        abort();
    for (size_t n = 0; n < size; n++)
        block[n] = n < 64 ? (uint8_t)take(source, 1) : block[n % 64];
    return arena->blocks[arena->count++] = block;
}

static skl_output make_tensor(arena *arena, byte_source *source, const skl_problem *p, skl_dtype dtype, int64_t heads,
                              int64_t length, int64_t dim)
{
    const int64_t batch = p->packed ? 1 : p->batch;
    const size_t element = dtype == SKL_F32 ? 4 : 2;
    void *const data = allocate(arena, source, (size_t)(batch * heads * length * dim) * element);
    return skl_output_contiguous(data, heads, length, dim);
}

static skl_input as_input(skl_output tensor)
{
    return (skl_input){tensor.data, tensor.stride_batch, tensor.stride_head, tensor.stride_row};
}

static const int32_t *take_lengths(arena *arena, byte_source *source, int64_t count, int64_t range, int running)
{
    int32_t *const lengths = allocate(arena, source, (size_t)count * sizeof *lengths);
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
    int32_t *const bounds = allocate(arena, source, (size_t)count * sizeof *bounds);
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
static skl_input take_indices(arena *arena, byte_source *source, const skl_problem *p, int64_t length)
{
    int32_t values[16];
    for (int n = 0; n < 16; n++)
        values[n] = (int32_t)plus(take_number(source, p->len_k + 1 < 250 ? p->len_k + 1 : 250), -1);
    const int64_t count = (p->packed ? 1 : p->batch) * p->heads_s * length * p->top_k;
    int32_t *const indices = allocate(arena, source, (size_t)count * sizeof *indices);
    for (int64_t n = 0; n < count; n++)
        indices[n] = values[n * 7 % 16];
    return skl_input_contiguous(indices, p->heads_s, length, p->top_k);
}

/* ---- The calls --------------------------------------------------------------------------------------------- */

/* Statistics with any numbers: those that a call accepts are small enough for their buffers. */
static void run_stats(const skl_plan *plan, const skl_problem *p, const skl_inputs *in, byte_source *source,
                      void *workspace, size_t size)
{
    enum { COUNT_MAX = 64, CHOSEN_MAX = 4 };
    arena arena = {.count = 0};
    const int64_t length_q = p->packed ? p->total_q : p->len_q, length_k = p->packed ? p->total_k : p->len_k;
    skl_stats stats = {.struct_size = sizeof stats};
    stats.row_begin = plus(take_number(source, 60), -30);
    stats.row_end = plus(take_number(source, 60), -30);
    stats.per_key_head = (int32_t)take_number(source, 2);
    stats.distance_count = (int32_t)take_number(source, COUNT_MAX);
    stats.range_count = (int32_t)take_number(source, COUNT_MAX);
    stats.top_k = (int32_t)take_number(source, COUNT_MAX);
    stats.chosen_count = (int32_t)(take(source, 1) % CHOSEN_MAX);
    stats.key_ranges = take_lengths(&arena, source, 2 * COUNT_MAX * p->batch, p->len_k, 0);
    stats.chosen_rows = take_lengths(&arena, source, CHOSEN_MAX * p->batch, p->len_q, 0);
    if (take(source, 1) % 2)
        stats.row_weights = as_input(make_tensor(&arena, source, p, SKL_F32, p->heads_s, length_q, 1));
    const int64_t bits = take(source, 2);
    skl_output *const rows[] = {&stats.lse, &stats.entropy, &stats.max_logit, &stats.expected_distance};
    for (int n = 0; n < 4; n++)
        if (bits >> n & 1)
            *rows[n] = make_tensor(&arena, source, p, SKL_F32, p->heads_s, length_q, 1);
    if (bits >> 4 & 1)
        stats.key_sum = make_tensor(&arena, source, p, SKL_F32, p->heads_s, length_k, 1);
    if (bits >> 5 & 1)
        stats.key_max = make_tensor(&arena, source, p, SKL_F32, p->heads_s, length_k, 1);
    const size_t heads = (size_t)(p->batch * p->heads_s);
    if (bits >> 6 & 1)
        stats.head_max_logit = allocate(&arena, source, heads * sizeof(float));
    if (bits >> 7 & 1)
        stats.distance_mass = allocate(&arena, source, heads * COUNT_MAX * sizeof(float));
    if (bits >> 8 & 1)
        stats.range_mass = make_tensor(&arena, source, p, SKL_F32, p->heads_s, length_q, COUNT_MAX);
    if (bits >> 9 & 1)
        stats.range_sum = allocate(&arena, source, heads * COUNT_MAX * sizeof(float));
    if (bits >> 10 & 1)
        stats.top_keys = make_tensor(&arena, source, p, SKL_F32, p->heads_s, length_q, COUNT_MAX);
    if (bits >> 11 & 1)
        stats.top_p = make_tensor(&arena, source, p, SKL_F32, p->heads_s, length_q, COUNT_MAX);
    if (bits >> 12 & 1)
        stats.weights = allocate(&arena, source, heads * CHOSEN_MAX * (size_t)p->len_k * sizeof(float));
    (void)skl_attention_stats(plan, in, &stats, workspace, size, NULL);
    for (int n = 0; n < arena.count; n++)
        free(arena.blocks[n]);
}

/* Errors are fine, since calls check lengths, row bounds and indices; crashes are not. */
static void run(const skl_plan *plan, skl_problem p, byte_source *source)
{
    arena arena = {.count = 0};
    const int64_t length_q = p.packed ? p.total_q : p.len_q, length_k = p.packed ? p.total_k : p.len_k;
    const int64_t key_heads_t = p.key_heads_t ? p.key_heads_t : p.heads_t;
    const int64_t key_heads_s = p.key_heads_s ? p.key_heads_s : p.heads_s;
    const skl_dtype grad_t = p.grad_f32 ? SKL_F32 : p.dtype_t, grad_s = p.grad_f32 ? SKL_F32 : p.dtype_s;
    const int indexer = p.student == SKL_STUDENT_INDEXER;
    const int teacher_groups = p.heads_t > p.heads_s || indexer;
    const int64_t query_heads_s = indexer ? p.heads_s * p.index_heads : p.heads_s;
    skl_inputs in = {.struct_size = sizeof in};
    in.q_t = as_input(make_tensor(&arena, source, &p, p.dtype_t, p.heads_t, length_q, p.dim_t));
    in.k_t = as_input(make_tensor(&arena, source, &p, p.dtype_t, key_heads_t, length_k, p.dim_t));
    in.q_s = as_input(make_tensor(&arena, source, &p, p.dtype_s, query_heads_s, length_q, p.dim_s));
    in.k_s = as_input(make_tensor(&arena, source, &p, p.dtype_s, key_heads_s, length_k, p.dim_s));
    if (indexer)
        in.w_s = as_input(make_tensor(&arena, source, &p, p.dtype_w, p.heads_s, length_q, p.index_heads));
    if (p.top_k > 0)
        in.indices = take_indices(&arena, source, &p, length_q);
    if (p.packed) {
        in.cu_seqlens_q = take_lengths(&arena, source, p.batch + 1, p.len_q, 1);
        in.cu_seqlens_k = take_lengths(&arena, source, p.batch + 1, p.len_k, 1);
    } else if (take(source, 1) % 2) {
        in.key_lengths = take_lengths(&arena, source, p.batch, p.len_k, 0);
    }
    const int64_t sides = p.row_bounds ? 1 + take(source, 1) % 3 : 0; /* of bounds: 1, 2 or both */
    if (sides & 1)
        in.key_begin = take_bounds(&arena, source, &in, &p);
    if (sides & 2)
        in.key_end = take_bounds(&arena, source, &in, &p);
    if (p.sinks) {
        in.sink_t = allocate(&arena, source, (size_t)p.heads_t * sizeof *in.sink_t);
        in.sink_s = allocate(&arena, source, (size_t)p.heads_s * sizeof *in.sink_s);
    }

    skl_rows rows = {.struct_size = sizeof rows};
    rows.kl = make_tensor(&arena, source, &p, SKL_F32, p.heads_s, length_q, 1);
    rows.lse_t = make_tensor(&arena, source, &p, SKL_F32, p.heads_t, length_q, 1);
    rows.lse_s = make_tensor(&arena, source, &p, SKL_F32, p.heads_s, length_q, 1);
    if (indexer) {
        rows.cross_entropy = make_tensor(&arena, source, &p, SKL_F32, p.heads_s, length_q, 1);
        rows.entropy = make_tensor(&arena, source, &p, SKL_F32, p.heads_s, length_q, 1);
        rows.mass = make_tensor(&arena, source, &p, SKL_F32, p.heads_s, length_q, 1);
    }
    if (teacher_groups && !indexer && !p.sinks)
        rows.dot_t = make_tensor(&arena, source, &p, SKL_F32, p.heads_t, length_q, 1);
    skl_gradients gradients = {.struct_size = sizeof gradients};
    if (p.gradients & SKL_DQ_T)
        gradients.dq_t = make_tensor(&arena, source, &p, grad_t, p.heads_t, length_q, p.dim_t);
    if (p.gradients & SKL_DK_T)
        gradients.dk_t = make_tensor(&arena, source, &p, grad_t, key_heads_t, length_k, p.dim_t);
    if (p.gradients & SKL_DQ_S)
        gradients.dq_s = make_tensor(&arena, source, &p, grad_s, query_heads_s, length_q, p.dim_s);
    if (p.gradients & SKL_DK_S)
        gradients.dk_s = make_tensor(&arena, source, &p, grad_s, key_heads_s, length_k, p.dim_s);
    if (p.gradients & SKL_DW_S)
        gradients.dw_s =
            make_tensor(&arena, source, &p, p.grad_f32 ? SKL_F32 : p.dtype_w, p.heads_s, length_q, p.index_heads);
    if (p.gradients & SKL_DSINK_T)
        gradients.dsink_t = allocate(&arena, source, (size_t)p.heads_t * sizeof *gradients.dsink_t);
    if (p.gradients & SKL_DSINK_S)
        gradients.dsink_s = allocate(&arena, source, (size_t)p.heads_s * sizeof *gradients.dsink_s);

    size_t size = 0;
    for (skl_op op = SKL_OP_FORWARD; op <= SKL_OP_ATTENTION_STATS; op++)
        size = skl_plan_workspace_size(plan, op) > size ? skl_plan_workspace_size(plan, op) : size;
    void *const workspace = aligned_alloc(SKL_WORKSPACE_ALIGNMENT, (size + 63) / 64 * 64);
    if (!workspace)
        abort();
    const skl_status checked = skl_inputs_check(plan, &in);
    const skl_status status = skl_forward(plan, &in, &rows, workspace, size, NULL);
    if (checked != status)
        abort(); /* all else is valid, so both must agree on lengths, row bounds and indices */
    const skl_op last_op = p.gradients & SKL_DV_S ? SKL_OP_ATTENTION_BACKWARD : SKL_OP_PARTIAL;
    for (skl_op op = SKL_OP_FORWARD; op <= last_op; op++) {
        char text[64];
        if (skl_plan_explain(plan, &in, op, text, sizeof text) == 0)
            abort();
    }
    if (!indexer)
        run_stats(plan, &p, &in, source, workspace, size);
    if (status == SKL_OK) {
        in.lse_t = as_input(rows.lse_t), in.lse_s = as_input(rows.lse_s);
        in.kl = as_input(rows.kl), in.dot_t = as_input(rows.dot_t);
        if (skl_backward(plan, &in, &gradients, workspace, size, NULL) != SKL_OK)
            abort(); /* the lengths are valid, and all required rows are given */
        if (p.gradients & SKL_DV_S) {
            skl_attention attention = {.struct_size = sizeof attention};
            attention.v_s = as_input(make_tensor(&arena, source, &p, p.dtype_s, key_heads_s, length_k, p.dim_s));
            attention.o_s = as_input(make_tensor(&arena, source, &p, p.dtype_s, p.heads_s, length_q, p.dim_s));
            attention.do_s = as_input(make_tensor(&arena, source, &p, p.dtype_s, p.heads_s, length_q, p.dim_s));
            attention.dv_s = make_tensor(&arena, source, &p, grad_s, key_heads_s, length_k, p.dim_s);
            const skl_rows only_kl = {.struct_size = sizeof only_kl, .kl = rows.kl};
            if (skl_attention_backward(plan, &in, &attention, &only_kl, &gradients, workspace, size, NULL) != SKL_OK)
                abort();
        }
        skl_row_state *const states = allocate(
            &arena, source, (size_t)((p.packed ? 1 : p.batch) * p.heads_s * length_q) * sizeof(skl_row_state));
        if (skl_partial(plan, &in, take_number(source, 50), 1000, states, workspace, size, NULL) == SKL_OK) {
            in.lse_t.data = teacher_groups ? in.lse_t.data : NULL;
            rows.dot_t.data = rows.cross_entropy.data = rows.entropy.data = rows.mass.data = NULL;
            rows.lse_t.data = teacher_groups && !p.sinks ? NULL : rows.lse_t.data; /* it is an input now */
            if (skl_states_finish(plan, &in, states, &rows, NULL) != SKL_OK)
                abort();
        }
    }
    free(workspace);
    for (int n = 0; n < arena.count; n++)
        free(arena.blocks[n]);
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
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &problem, &options);
    if ((status == SKL_OK) != (plan != NULL))
        abort();
    if (status == SKL_OK && is_small(&problem))
        run(plan, problem, &source);
    skl_plan_destroy(plan);
    return 0;
}
