/* Launches of teacher groups and of indexers. */
#include "cuda/select/choice.h"

#include "base/problem.h"
#include "base/stats.h"

/* ---- LSEs of a side ------------------------------------------------------------------------------------------- */

skl_cuda_halves skl_cuda_halves_of(const skl_problem *p, bool of_teacher)
{
    const int64_t heads = of_teacher ? p->heads_t : p->heads_s;
    const int64_t key_heads = of_teacher ? p->key_heads_t : p->key_heads_s;
    const bool apart = heads % 2 == 0 && (key_heads % 2 == 0 || key_heads == 1);
    skl_cuda_halves halves = {*p, apart ? heads / 2 : heads, apart ? skl_max(1, key_heads / 2) : key_heads, apart};
    skl_problem *const q = &halves.problem;
    q->heads_t = q->heads_s = halves.heads;
    q->key_heads_t = q->key_heads_s = halves.key_heads;
    q->dim_t = q->dim_s = of_teacher ? p->dim_t : p->dim_s;
    q->dtype_t = q->dtype_s = of_teacher ? p->dtype_t : p->dtype_s;
    q->scale_t = q->scale_s = of_teacher ? p->scale_t : p->scale_s;
    q->softcap_t = q->softcap_s = of_teacher ? p->softcap_t : p->softcap_s;
    q->link_s = of_teacher ? SKL_LINK_SOFTMAX : p->link_s;
    q->direction = SKL_KL_FORWARD;
    q->gradients = 0;
    return halves;
}

void skl_select_add_lse(const choice *s, bool of_teacher, const char *reason)
{
    const skl_cuda_halves halves = skl_cuda_halves_of(s->problem, of_teacher);
    const skl_cuda_request request = {.op = SKL_OP_FORWARD,
                                      .rows = SKL_ROW_LSE_T | SKL_ROW_LSE_S,
                                      .key_lengths = s->request->key_lengths,
                                      .keys = s->request->keys};
    const uint32_t tensors = of_teacher ? SKL_TENSOR_Q_T | SKL_TENSOR_K_T : SKL_TENSOR_Q_S | SKL_TENSOR_K_S;
    choice forward = *s;
    forward.problem = &halves.problem;
    forward.request = &request;
    forward.work = SKL_DOES_ATTENTION;
    forward.capped = skl_select_is_capped(&halves.problem);
    forward.gradients = false;
    const int capability = s->target->named ? s->kernel->capability : s->device->capability;
    const bool general = (s->layout->aligned & tensors) != tensors || !s->some_keys;
    forward.kernel = skl_cuda_find_kernel(&halves.problem, capability, forward.work, NULL);
    if (general || forward.kernel->two_terms)
        forward.kernel = &skl_cuda_general;
    else if (forward.kernel->tma && (s->layout->tma & tensors) != tensors)
        forward.kernel = skl_select_without_tma(&halves.problem);
    forward.reason = reason;
    skl_cuda_launch *const launch = &s->launches->at[s->launches->count];
    const bool stats = s->request->op == SKL_OP_ATTENTION_STATS;
    const bool in_workspace = stats        ? (s->request->stats & SKL_STATS_LSE) == 0
                              : of_teacher ? (s->request->rows & SKL_ROW_LSE_T) == 0
                                           : false;
    const int64_t rows = skl_all_rows(skl_query_rows(s->problem));
    const int64_t heads = of_teacher ? s->problem->heads_t : s->problem->heads_s;
    if (in_workspace)
        s->launches->lse_at = skl_select_keep(s, (size_t)(rows * heads) * sizeof(float));
    skl_select_add_forward(&forward);
    launch->step = of_teacher ? "lse_t" : "lse_s";
    launch->halves = true;
    launch->teacher_side = of_teacher;
}

/* ---- Rows ------------------------------------------------------------------------------------------------------ */

/* A forward, after the launch for the teacher's LSEs that it needs if none are given. */
static skl_cuda_launch *add_rows_launch(const choice *s, const char *variant)
{
    if (!s->request->lse_given)
        skl_select_add_lse(s, true, "inputs.lse_t is not given");
    skl_cuda_launch *const launch = skl_select_add(s, "forward", s->kernel, s->kernel->forward, variant, s->reason);
    launch->lse_computed = !s->request->lse_given;
    return launch;
}

static void set_strips(const choice *s, skl_cuda_launch *launch, skl_strip_layout layout)
{
    launch->strips = layout;
    launch->num_splits = layout.num_splits;
    skl_select_give_workspace(s, launch, layout.size);
}

static skl_sparse_layout sparse_layout_of(const choice *s, bool gradients, bool with_teacher)
{
    const skl_problem *const p = s->problem;
    skl_sparse_layout layout = {.chunk = skl_sparse_chunk_of(p),
                                .num_blocks = (int64_t)s->device->sm_count * SKL_GENERAL_BLOCKS_PER_SM};
    layout.scores_at = gradients ? layout.chunk.end : 0;
    layout.end = layout.scores_at + (size_t)layout.num_blocks * (size_t)p->top_k * SKL_SPARSE_SCORE_SIZE;
    skl_sparse_plan_memory(&layout, p, with_teacher, p->heads_t / p->key_heads_t, s->device->smem_per_block,
                           s->device->smem_per_sm);
    return layout;
}

/* Kernels that add to dk in memory need dy of a chunk of rows, after f32 sums of dk, and nothing per entry of dk. */
static skl_sparse_layout fused_sparse_layout_of(const choice *s, bool gradients, bool sums_dk)
{
    const skl_problem *const p = s->problem;
    const int64_t rows = p->batch * p->heads_s * p->len_q, dy_size = p->top_k * (int64_t)sizeof(float);
    skl_sparse_layout layout = {.chunk = {.rows = rows, .count = rows}, .num_blocks = s->device->sm_count};
    if (gradients) {
        layout.chunk.count = skl_max(1, skl_min(rows, SKL_SPARSE_DY_SIZE / dy_size));
        layout.chunk.dy = sums_dk ? skl_select_dk_sums_size(p, false) : 0;
        layout.scores_at = layout.chunk.dy + skl_aligned_size((size_t)(layout.chunk.count * dy_size));
    }
    layout.end = layout.scores_at + (size_t)layout.num_blocks * (size_t)p->top_k * SKL_SPARSE_SCORE_SIZE;
    return layout;
}

/* `size` bytes, and after them the scratch of a pooled teacher for each block. */
static void give_general_workspace(const choice *s, skl_cuda_launch *launch, size_t size)
{
    const size_t blocks = (size_t)s->device->sm_count * SKL_GENERAL_BLOCKS_PER_SM;
    const size_t scratch = SKL_POOL_SCRATCH_SIZE(s->problem->top_k > 0 ? 1 : SKL_GENERAL_TILE);
    launch->pooled_at = skl_aligned_size(size);
    skl_select_give_workspace(s, launch, skl_is_pooled(s->problem) ? launch->pooled_at + blocks * scratch : size);
}

static void add_indexer_launch(const choice *s, const char *step, bool gradients)
{
    const skl_problem *const p = s->problem;
    const skl_cuda_kernel *const kernel = s->kernel;
    const bool general = kernel->general, fused = kernel->fused != NULL;
    const skl_cuda_launcher of_gradients = fused ? kernel->fused : kernel->gradients;
    skl_cuda_launch *const launch = skl_select_add(s, step, kernel, gradients ? of_gradients : kernel->forward,
                                                   gradients ? SKL_VARIANT_GRADIENTS : SKL_VARIANT_ROWS, s->reason);
    launch->streams_queries = gradients && p->top_k == 0 && !skl_is_pooled(p);
    if (skl_op_has_halves(p, launch->op) && (general || !gradients)) {
        launch->op = gradients ? SKL_OP_BACKWARD : SKL_OP_FORWARD;
        launch->rows_known = false; /* inputs of the half */
    }
    if (fused) {
        launch->sums_dk = gradients && (s->request->gradients & SKL_DK_S) != 0;
        launch->sparse = fused_sparse_layout_of(s, gradients, launch->sums_dk);
        skl_select_give_workspace(s, launch, launch->sparse.end);
    } else if (p->top_k > 0) {
        launch->sparse = sparse_layout_of(s, gradients, !skl_select_only_lse_s(s->request));
        if (!general)
            launch->variant = launch->sparse.resident ? SKL_VARIANT_RESIDENT : SKL_VARIANT_STREAMED;
        if (!general)
            skl_select_give_workspace(s, launch, launch->sparse.end);
        else
            give_general_workspace(s, launch, gradients ? launch->sparse.chunk.end : skl_select_general_lse_size(s));
    } else if (!general) {
        set_strips(s, launch, skl_strip_differences_layout(p, s->device->sm_count, gradients));
    } else {
        launch->dense = skl_dense_chunk_of(p, s->device->sm_count);
        give_general_workspace(s, launch, gradients ? launch->dense.end : skl_select_general_lse_size(s));
    }
}

/* Only LSEs are wanted. Given LSEs are restricted to the visible keys by P, so they need more than this. */
static bool wants_only_lses(const choice *s)
{
    const uint32_t rows = s->request->rows;
    return s->request->op == SKL_OP_FORWARD && (rows & SKL_ROW_KL) == 0 &&
           !(s->request->lse_given && rows & SKL_ROW_LSE_T);
}

static void add_tiled_rows(const choice *s)
{
    skl_cuda_launch *const launch = add_rows_launch(s, s->capped ? SKL_VARIANT_GROUPS_SOFTCAP : SKL_VARIANT_GROUPS);
    const bool hopper = s->kernel->tma;
    const int64_t tile_rows = hopper ? SKL_GROUP_TILE : SKL_GROUP_TILES_ROWS;
    const int64_t blocks_per_sm = hopper ? 1 : SKL_GROUP_TILES_BLOCKS;
    launch->head_group = skl_select_head_group(s, tile_rows * blocks_per_sm, 2, 2);
    skl_select_split(s, launch, tile_rows, blocks_per_sm * skl_select_blocks_to_fill(s->problem));
}

static void add_rows(const choice *s, bool dots)
{
    if (!dots && wants_only_lses(s)) {
        if (s->request->rows & SKL_ROW_LSE_T)
            skl_select_add_lse(s, true, "no KL is wanted: LSEs only");
        if (s->request->rows & SKL_ROW_LSE_S)
            skl_select_add_lse(s, false, "no KL is wanted: LSEs only");
    } else if (s->kernel->gradients == NULL) {
        s->kernel->general ? skl_select_add_forward(s) : add_tiled_rows(s);
    } else if (s->kernel->does & SKL_DOES_TEACHER) {
        skl_cuda_launch *const launch = add_rows_launch(s, SKL_VARIANT_ROWS);
        set_strips(s, launch, skl_strip_ratio_rows_layout(s->problem, s->device->sm_count, dots));
    } else {
        add_indexer_launch(s, "forward", false);
    }
}

/* ---- Gradients ------------------------------------------------------------------------------------------------- */

/* The kernel for dot_t and for the teacher's gradients. */
static choice teacher_choice(const choice *s)
{
    const skl_problem *const p = s->problem;
    const bool in_plan = (p->gradients & (SKL_DQ_T | SKL_DK_T)) != 0;
    choice result = *s;
    if (s->kernel->general)
        return result;
    result.kernel = in_plan ? skl_cuda_find_kernel(p, SKL_CAPABILITY_sm80, SKL_DOES_GROUPS | SKL_DOES_TEACHER, NULL)
                            : &skl_cuda_general;
    result.reason = !result.kernel->general ? "teacher gradients of a group: in strips"
                    : in_plan ? "teacher gradients of a group with more than 128 dimensions: no tensor cores"
                              : "rows.dot_t without teacher gradients of the plan: no tensor cores";
    return result;
}

/* The kernel for the student's gradients, and why it is not the plan's. */
static choice student_choice(const choice *s, const wanted_side *student)
{
    choice result = *s;
    if (s->kernel->fused != NULL && s->target->deterministic) {
        result.kernel =
            skl_cuda_find_kernel(s->problem, SKL_CAPABILITY_sm90, SKL_DOES_GROUPS | SKL_DOES_ORDERED, NULL);
        result.reason = "deterministic: no sums by atomic additions";
    } else if (s->kernel->fused != NULL && student->dk && (s->layout->tma & SKL_DK_S) == 0) {
        result.kernel = skl_select_without_strips(s->problem);
        result.reason = "TMA cannot add to dk_s: separate dq and dk";
    }
    return result;
}

/* `rows`: the launch gives row results, too. */
static void add_gradients(const choice *s, const wanted_side *side, bool rows)
{
    const skl_cuda_kernel *const kernel = s->kernel;
    if (kernel->gradients == NULL) {
        skl_select_add_gradients(s, side, kernel->fused == NULL ? s->reason : NULL, rows);
    } else if (kernel->does & SKL_DOES_TEACHER) {
        skl_cuda_launch *const launch =
            skl_select_add(s, side->of_teacher ? "gradients of the teacher" : "gradients of the student", kernel,
                           kernel->gradients, SKL_VARIANT_GRADIENTS, s->reason);
        launch->teacher_side = side->of_teacher;
        launch->streams_queries = true;
        set_strips(s, launch, skl_strip_ratio_gradients_layout(s->problem, s->device->sm_count, side->of_teacher));
    } else {
        add_indexer_launch(s, rows ? "forward and gradients" : "gradients", true);
    }
}

/* One launch gives row results and the student's gradients. */
static bool gives_rows_with_gradients(const skl_cuda_kernel *kernel, const wanted_side *student)
{
    return !kernel->general && !(kernel->does & SKL_DOES_TEACHER) &&
           (kernel->fused != NULL || kernel->gradients != NULL || student->dq);
}

void skl_select_groups(const choice *s)
{
    const wanted_side student = skl_select_wanted(s, false), teacher = skl_select_wanted(s, true);
    const choice of_student = student_choice(s, &student), of_teacher = teacher_choice(s);
    const bool of_s = (student.dq && s->some_rows) || (student.dk && s->some_keys);
    const bool dots = s->rows && s->request->rows & SKL_ROW_DOT_T;
    const bool rows_in_gradients = s->rows && of_s && !dots && gives_rows_with_gradients(of_student.kernel, &student);
    if (s->rows && s->some_rows && !rows_in_gradients)
        add_rows(dots ? &of_teacher : s, dots);
    if (of_s)
        add_gradients(&of_student, &student, rows_in_gradients);
    if (teacher.dq || teacher.dk)
        add_gradients(&of_teacher, &teacher, false);
}

/* ---- Indexers -------------------------------------------------------------------------------------------------- */

/* The kernel for an indexer's gradients: without sums by atomic additions where they are not wanted or not possible.
 */
static choice gradients_choice(const choice *s)
{
    const bool sums = s->kernel->fused != NULL && (s->request->gradients & SKL_DK_S) != 0;
    choice result = *s;
    if (sums && s->target->deterministic)
        result.reason = "deterministic: no sums by atomic additions";
    else if (sums && (s->layout->tma & SKL_DK_S) == 0)
        result.reason = "dk_s: rows not at multiples of 16 bytes, no sums by atomic additions";
    else
        return result;
    result.kernel = skl_select_without_tma(s->problem);
    return result;
}

/* Strips with a pooled teacher read which blocks a row has, and which rows a block, from tables. */
static void add_blocks(const choice *s)
{
    const skl_problem *const p = s->problem;
    const int64_t count = 2 * p->batch * (p->len_q + skl_student_keys(p, p->len_k));
    skl_cuda_launch *const launch = skl_select_add(s, "blocks", &skl_cuda_general, skl_cuda_bounds_of_blocks,
                                                   SKL_VARIANT_BLOCKS, "the student's keys are blocks of keys");
    skl_select_keep_workspace(s, launch, (size_t)count * sizeof(int32_t));
    s->launches->key_bounds_at = launch->workspace_at;
    s->launches->has_key_bounds = true;
}

void skl_select_indexer(const choice *s)
{
    const uint32_t gradients = s->gradients ? s->request->gradients : 0;
    const bool of_queries = s->some_rows && gradients & (SKL_DQ_S | SKL_DW_S);
    const bool of_keys = s->some_keys && gradients & SKL_DK_S;
    /* On tensor cores one launch gives gradients and rows. */
    const bool rows_in_gradients = !s->kernel->general && (of_queries || of_keys);
    if (skl_is_pooled(s->problem) && !s->kernel->general)
        add_blocks(s);
    if (s->rows && s->some_rows && !rows_in_gradients)
        add_indexer_launch(s, "forward", false);
    const choice of_gradients = gradients_choice(s);
    if (of_queries || of_keys)
        add_indexer_launch(&of_gradients, rows_in_gradients && s->rows ? "forward and gradients" : "gradients", true);
}
