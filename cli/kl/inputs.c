/* From files to a problem: finds the tensors, interprets their axes and checks that their shapes agree. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"

#include <inttypes.h>
#include <stdlib.h>

static shape_text shape_of(const stored_tensor *tensor)
{
    return shape_print(tensor->shape, tensor->rank);
}

/* ---- Axes --------------------------------------------------------------------------------------------------- */

/* Interprets the axes of a row-major tensor. Leading axes may be missing: [N, D] is one head of one batch. `order`
 * lists the axes from the right. */
static void name_axes(kl_view *view, const int *order)
{
    int64_t stride[AXIS_COUNT];
    int64_t span = 1;
    for (int axis = 0; axis < AXIS_COUNT; axis++) {
        view->extent[axis] = 1;
        stride[axis] = 0;
    }
    for (int d = view->stored->rank - 1; d >= 0; d--, order++) {
        view->extent[*order] = view->stored->shape[d];
        stride[*order] = span;
        span *= view->stored->shape[d];
    }
    view->input.stride_batch = stride[AXIS_BATCH];
    view->input.stride_head = stride[AXIS_HEADS];
    view->input.stride_row = stride[AXIS_LENGTH];
}

static const int *axis_order(kl_layout layout, int rank)
{
    static const int bhnd[] = {AXIS_DIM, AXIS_LENGTH, AXIS_HEADS, AXIS_BATCH};
    static const int bnhd[] = {AXIS_DIM, AXIS_HEADS, AXIS_LENGTH, AXIS_BATCH};
    return layout == LAYOUT_BNHD && rank > 2 ? bnhd : bhnd;
}

static void load_view(kl_view *view, const kl_found *found)
{
    view->stored = found->tensor;
    view->input.data = tensor_file_data(&found->file->contents, found->tensor);
}

/* [B, H, N, last] in the order of the request. */
static void name_head_axes(kl_view *view, const kl_request *request, kl_role role, const char *last)
{
    const int rank = view->stored->rank;
    if (rank < 2 || rank > 4)
        cli_fail(CLI_BAD_INPUT, "%s %s: must be [B, H, N, %s] with 2 to 4 dimensions", kl_role_names[role],
                 shape_of(view->stored).text, last);
    name_axes(view, axis_order(request->layout, rank));
}

/* The tensor of one model may be called q instead of q_s. */
static kl_found find_of_one_model(const kl_files *files, const kl_request *request, kl_role role)
{
    if (request->names[role] == NULL && kl_files_find(files, role, NULL, false).tensor == NULL) {
        const kl_found found = kl_files_find(files, role, role == ROLE_Q_S ? "q" : "k", false);
        if (found.tensor != NULL)
            return found;
    }
    return kl_files_find(files, role, request->names[role], true);
}

static void load_heads(kl_view *view, const kl_files *files, const kl_request *request, kl_role role)
{
    const kl_found found = request->one_model ? find_of_one_model(files, request, role)
                                              : kl_files_find(files, role, request->names[role], true);
    load_view(view, &found);
    name_head_axes(view, request, role, "D");
    if (view->extent[AXIS_HEADS] < 1) /* for the library 0 key heads means the number of query heads */
        cli_fail(CLI_BAD_INPUT, "%s %s: must have at least one head", kl_role_names[role],
                 shape_of(found.tensor).text);
}

/* ---- Agreement ---------------------------------------------------------------------------------------------- */

typedef struct agreement {
    kl_role left, right;
    int axis;
    const char *what;
} agreement;

static void check_agreement(const kl_view *views)
{
    static const agreement agreements[] = {
        {ROLE_Q_T, ROLE_K_T, AXIS_BATCH, "the batch (B)"},   {ROLE_Q_T, ROLE_Q_S, AXIS_BATCH, "the batch (B)"},
        {ROLE_Q_S, ROLE_K_S, AXIS_BATCH, "the batch (B)"},   {ROLE_Q_T, ROLE_Q_S, AXIS_LENGTH, "the length (N)"},
        {ROLE_K_T, ROLE_K_S, AXIS_LENGTH, "the length (N)"}, {ROLE_Q_T, ROLE_K_T, AXIS_DIM, "the head size (D)"},
        {ROLE_Q_S, ROLE_K_S, AXIS_DIM, "the head size (D)"},
    };
    for (size_t a = 0; a < sizeof agreements / sizeof agreements[0]; a++) {
        const agreement *const rule = &agreements[a];
        const kl_view *const left = &views[rule->left], *const right = &views[rule->right];
        if (left->extent[rule->axis] != right->extent[rule->axis])
            cli_fail(CLI_BAD_INPUT, "%s %s and %s %s: %s must be equal, is %" PRId64 " and %" PRId64,
                     kl_role_names[rule->left], shape_of(left->stored).text, kl_role_names[rule->right],
                     shape_of(right->stored).text, rule->what, left->extent[rule->axis], right->extent[rule->axis]);
    }
    static const kl_role sides[][2] = {{ROLE_Q_T, ROLE_K_T}, {ROLE_Q_S, ROLE_K_S}};
    for (size_t s = 0; s < sizeof sides / sizeof sides[0]; s++) {
        const stored_tensor *const q = views[sides[s][0]].stored, *const k = views[sides[s][1]].stored;
        if (q->dtype != k->dtype)
            cli_fail(CLI_BAD_INPUT, "%s is %s and %s is %s: the dtype must be equal", kl_role_names[sides[s][0]],
                     q->dtype_name, kl_role_names[sides[s][1]], k->dtype_name);
    }
}

/* Tensors in another layout than the default are read without an error if all heads are shared by both models. More
 * heads than rows on every side give it away, except for a single row. */
static void warn_about_layout(const kl_view *views, kl_layout layout)
{
    bool suspicious = layout == LAYOUT_DEFAULT;
    for (kl_role role = 0; role < ROLE_REQUIRED_COUNT; role++)
        suspicious = suspicious && views[role].extent[AXIS_LENGTH] > 1 &&
                     views[role].extent[AXIS_HEADS] > views[role].extent[AXIS_LENGTH] &&
                     views[role].extent[AXIS_HEADS] == views[role % 2 == 0 ? ROLE_Q_T : ROLE_K_T].extent[AXIS_HEADS];
    const int64_t *const extent = views[ROLE_Q_T].extent;
    if (suspicious)
        cli_warn("warning: q_t %s has %" PRId64 " heads and %" PRId64
                 " queries in the layout bhnd, the default; for [batch, length, heads, dim] pass --layout=bnhd, "
                 "and --layout=bhnd to confirm",
                 shape_of(views[ROLE_Q_T].stored).text, extent[AXIS_HEADS], extent[AXIS_LENGTH]);
}

static void fill_problem(skl_problem *problem, const kl_view *views)
{
    problem->dtype_t = views[ROLE_Q_T].stored->dtype;
    problem->dtype_s = views[ROLE_Q_S].stored->dtype;
    problem->batch = views[ROLE_Q_T].extent[AXIS_BATCH];
    problem->len_q = views[ROLE_Q_T].extent[AXIS_LENGTH];
    problem->len_k = views[ROLE_K_T].extent[AXIS_LENGTH];
    problem->heads_t = views[ROLE_Q_T].extent[AXIS_HEADS];
    problem->heads_s = views[ROLE_Q_S].extent[AXIS_HEADS];
    problem->key_heads_t = views[ROLE_K_T].extent[AXIS_HEADS];
    problem->key_heads_s = views[ROLE_K_S].extent[AXIS_HEADS];
    problem->dim_t = views[ROLE_Q_T].extent[AXIS_DIM];
    problem->dim_s = views[ROLE_Q_S].extent[AXIS_DIM];
}

/* ---- Lengths ------------------------------------------------------------------------------------------------ */

/* The longest sequence, limited to the buffer, so that the library reports a wrong offset. */
static int64_t longest_sequence(const int32_t *offsets, int64_t batch, int64_t total)
{
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t length = (int64_t)offsets[b + 1] - offsets[b];
        longest = length > longest ? length : longest;
    }
    return longest < total ? longest : total;
}

static void load_packing(kl_inputs *inputs, const kl_request *request)
{
    int64_t count_q = 0, count_k = 0;
    inputs->cu_seqlens_q =
        kl_lengths_load(&inputs->files, ROLE_CU_SEQLENS_Q, request->names[ROLE_CU_SEQLENS_Q], &count_q);
    inputs->cu_seqlens_k =
        kl_lengths_load(&inputs->files, ROLE_CU_SEQLENS_K, request->names[ROLE_CU_SEQLENS_K], &count_k);
    const int32_t *const offsets_q = inputs->cu_seqlens_q, *const given_k = inputs->cu_seqlens_k;
    if (offsets_q == NULL && given_k == NULL)
        return;
    if (offsets_q == NULL)
        cli_fail(CLI_BAD_INPUT, "cu_seqlens_k: cu_seqlens_q must be given too");
    const int32_t *const offsets_k = given_k ? given_k : offsets_q; /* equal sequences of queries and keys */
    if (count_q < 1 || (given_k && count_k != count_q))
        cli_fail(CLI_BAD_INPUT,
                 "cu_seqlens_q has %" PRId64 " entries, cu_seqlens_k %" PRId64
                 ": both must have one more than there are sequences",
                 count_q, given_k ? count_k : count_q);
    skl_problem *const problem = &inputs->problem;
    if (problem->batch != 1)
        cli_fail(CLI_BAD_INPUT, "q_t %s: packed sequences (cu_seqlens_q) must have a batch of 1",
                 shape_of(inputs->views[ROLE_Q_T].stored).text);
    problem->packed = 1;
    problem->batch = count_q - 1;
    problem->total_q = problem->len_q;
    problem->total_k = problem->len_k;
    problem->len_q = longest_sequence(offsets_q, problem->batch, problem->total_q);
    problem->len_k = longest_sequence(offsets_k, problem->batch, problem->total_k);
    inputs->tensors.cu_seqlens_q = offsets_q;
    inputs->tensors.cu_seqlens_k = offsets_k;
}

static void load_key_lengths(kl_inputs *inputs, const kl_request *request)
{
    int64_t count;
    inputs->key_lengths = kl_lengths_load(&inputs->files, ROLE_KEY_LENGTHS, request->names[ROLE_KEY_LENGTHS], &count);
    if (inputs->key_lengths && count != inputs->problem.batch)
        cli_fail(CLI_BAD_INPUT, "key_lengths has %" PRId64 " entries: must be one per sequence, %" PRId64, count,
                 inputs->problem.batch);
    inputs->tensors.key_lengths = inputs->key_lengths;
}

static void load_row_bounds(kl_inputs *inputs, const kl_request *request)
{
    skl_problem *const problem = &inputs->problem;
    const int64_t batch = kl_row_batches(problem), length = kl_row_length(problem);
    inputs->key_begin = kl_bounds_load(&inputs->files, ROLE_KEY_BEGIN, request->names[ROLE_KEY_BEGIN], batch, length);
    inputs->key_end = kl_bounds_load(&inputs->files, ROLE_KEY_END, request->names[ROLE_KEY_END], batch, length);
    problem->row_bounds = inputs->key_begin || inputs->key_end;
    inputs->tensors.key_begin = inputs->key_begin;
    inputs->tensors.key_end = inputs->key_end;
}

/* Also requests their gradients if those of q are requested. */
static void load_sinks(kl_inputs *inputs, const kl_request *request)
{
    skl_problem *const problem = &inputs->problem;
    const kl_role role_t = request->one_model ? ROLE_SINK_S : ROLE_SINK_T;
    inputs->sink_t = kl_sinks_load(&inputs->files, role_t, request->names[role_t], problem->heads_t);
    inputs->sink_s = kl_sinks_load(&inputs->files, ROLE_SINK_S, request->names[ROLE_SINK_S], problem->heads_s);
    if (inputs->sink_t == NULL && inputs->sink_s == NULL)
        return;
    problem->sinks = 1; /* the library refuses it for an indexer */
    if (!kl_is_indexer(problem) && (inputs->sink_t == NULL || inputs->sink_s == NULL))
        cli_fail(CLI_BAD_INPUT,
                 "%s is missing and %s is given: both must be given, or neither for the KL on the keys alone",
                 inputs->sink_t ? "sink_s" : "sink_t", inputs->sink_t ? "sink_t" : "sink_s");
    problem->gradients |=
        (problem->gradients & SKL_DQ_T ? SKL_DSINK_T : 0U) | (problem->gradients & SKL_DQ_S ? SKL_DSINK_S : 0U);
    inputs->tensors.sink_t = inputs->sink_t;
    inputs->tensors.sink_s = inputs->sink_s;
}

static void load_lse_t(kl_inputs *inputs, const kl_request *request)
{
    static const int order[] = {AXIS_LENGTH, AXIS_HEADS, AXIS_BATCH};
    const kl_found found = kl_files_find(&inputs->files, ROLE_LSE_T, request->names[ROLE_LSE_T], false);
    if (found.tensor == NULL)
        return;
    kl_view view;
    load_view(&view, &found);
    const kl_view *const q_t = &inputs->views[ROLE_Q_T];
    bool fits = view.stored->rank >= 1 && view.stored->rank <= 3 && view.stored->dtype == SKL_F32;
    if (fits)
        name_axes(&view, order);
    for (int axis = AXIS_BATCH; axis <= AXIS_LENGTH; axis++)
        fits = fits && view.extent[axis] == q_t->extent[axis];
    if (!fits)
        cli_fail(CLI_BAD_INPUT, "lse_t %s %s: must be F32 [B, H, N] of q_t, [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                 view.stored->dtype_name, shape_of(view.stored).text, q_t->extent[AXIS_BATCH],
                 q_t->extent[AXIS_HEADS], q_t->extent[AXIS_LENGTH]);
    inputs->tensors.lse_t = view.input;
}

/* ---- Indexers ----------------------------------------------------------------------------------------------- */

/* Weights [B, H, N, G] determine how many heads of q_s are index heads of one student head. */
static void load_weights(kl_inputs *inputs, const kl_request *request)
{
    kl_view *const w_s = &inputs->views[ROLE_W_S];
    const kl_view *const q_s = &inputs->views[ROLE_Q_S];
    const kl_found found = kl_files_find(&inputs->files, ROLE_W_S, request->names[ROLE_W_S], true);
    load_view(w_s, &found);
    name_head_axes(w_s, request, ROLE_W_S, "G");
    const int64_t index_heads = w_s->extent[AXIS_DIM], heads = w_s->extent[AXIS_HEADS];
    if (w_s->extent[AXIS_BATCH] != q_s->extent[AXIS_BATCH] || w_s->extent[AXIS_LENGTH] != q_s->extent[AXIS_LENGTH] ||
        heads < 1 || index_heads < 1 || q_s->extent[AXIS_HEADS] % heads != 0 ||
        q_s->extent[AXIS_HEADS] / heads != index_heads)
        cli_fail(CLI_BAD_INPUT, "w_s %s and q_s %s: must be [B, H, N, G] and [B, H * G, N, D]",
                 shape_of(w_s->stored).text, shape_of(q_s->stored).text);
    inputs->problem.heads_s = heads;
    inputs->problem.index_heads = index_heads;
    inputs->problem.dtype_w = w_s->stored->dtype;
    inputs->tensors.w_s = w_s->input;
}

/* Optional indices [B, H, N, k] of I32 or I64. */
static void load_indices(kl_inputs *inputs, const kl_request *request)
{
    const kl_found found = kl_files_find(&inputs->files, ROLE_INDICES, request->names[ROLE_INDICES], false);
    if (found.tensor == NULL)
        return;
    kl_view view = {.stored = found.tensor};
    name_head_axes(&view, request, ROLE_INDICES, "k");
    for (int axis = AXIS_BATCH; axis <= AXIS_LENGTH; axis++)
        if (view.extent[axis] != inputs->views[ROLE_W_S].extent[axis] || view.extent[AXIS_DIM] < 1)
            cli_fail(CLI_BAD_INPUT, "indices %s and w_s %s: must be [B, H, N, k] and [B, H, N, G]",
                     shape_of(view.stored).text, shape_of(inputs->views[ROLE_W_S].stored).text);
    int64_t count;
    view.input.data = inputs->indices = kl_integers_load(ROLE_INDICES, &found, &count);
    inputs->problem.top_k = view.extent[AXIS_DIM];
    inputs->tensors.indices = view.input;
}

/* ---- All inputs --------------------------------------------------------------------------------------------- */

void kl_inputs_load(kl_inputs *inputs, const kl_request *request)
{
    inputs->problem = request->problem;
    inputs->tensors.struct_size = sizeof inputs->tensors;
    inputs->files = kl_files_open(request->files, request->file_count);
    for (kl_role role = request->one_model ? ROLE_Q_S : 0; role < ROLE_REQUIRED_COUNT; role++)
        load_heads(&inputs->views[role], &inputs->files, request, role);
    if (request->one_model) {
        inputs->views[ROLE_Q_T] = inputs->views[ROLE_Q_S];
        inputs->views[ROLE_K_T] = inputs->views[ROLE_K_S];
    }
    check_agreement(inputs->views);
    warn_about_layout(inputs->views, request->layout);
    fill_problem(&inputs->problem, inputs->views);
    inputs->tensors.q_t = inputs->views[ROLE_Q_T].input;
    inputs->tensors.k_t = inputs->views[ROLE_K_T].input;
    inputs->tensors.q_s = inputs->views[ROLE_Q_S].input;
    inputs->tensors.k_s = inputs->views[ROLE_K_S].input;
    if (kl_is_indexer(&inputs->problem)) {
        load_weights(inputs, request);
        load_indices(inputs, request);
    }
    if (!request->one_model)
        load_lse_t(inputs, request);
    load_packing(inputs, request);
    load_key_lengths(inputs, request);
    load_row_bounds(inputs, request);
    load_sinks(inputs, request);
}

void kl_inputs_free(kl_inputs *inputs)
{
    kl_files_close(&inputs->files);
    free(inputs->key_lengths);
    free(inputs->cu_seqlens_q);
    free(inputs->cu_seqlens_k);
    free(inputs->indices);
    free(inputs->key_begin);
    free(inputs->key_end);
    free(inputs->sink_t);
    free(inputs->sink_s);
}
