/* Launches of attention with teacher groups. */
#include "cuda/select/choice.h"

/* Where the teacher's LSEs are written when the caller gives none. */
static skl_output teacher_lse_of(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    return s->call->rows.lse_t.data != NULL
               ? s->call->rows.lse_t
               : skl_output_contiguous(s->call->workspace, p->heads_t, p->packed ? p->total_q : p->len_q, 1);
}

/* A forward gives the LSEs of both its arguments: those of a side, if they are the halves of its heads. An odd number
 * of heads is compared with itself. */
static bool has_halves(const skl_side *side)
{
    return side->heads % 2 == 0 && (side->key_heads % 2 == 0 || side->key_heads == 1);
}

static skl_input input_from(const skl_input *tensor, skl_dtype dtype, int64_t head)
{
    skl_input from = *tensor;
    from.data = (const char *)tensor->data + (size_t)(head * tensor->stride_head) * skl_dtype_size(dtype);
    return from;
}

/* The forward with the halves of a side's heads as its arguments. */
static skl_cuda_params halves_of(const skl_problem *p, const skl_call *call, bool of_teacher, const skl_output *lse)
{
    const skl_side side = of_teacher ? skl_teacher_of(p, call) : skl_student_of(p, call);
    const bool apart = has_halves(&side);
    const int64_t heads = apart ? side.heads / 2 : side.heads;
    const int64_t key_heads = apart ? skl_max(1, side.key_heads / 2) : side.key_heads;
    skl_problem halves = *p;
    halves.heads_t = halves.heads_s = heads;
    halves.key_heads_t = halves.key_heads_s = key_heads;
    halves.dim_t = halves.dim_s = side.dim;
    halves.dtype_t = halves.dtype_s = side.dtype;
    halves.scale_t = halves.scale_s = side.scale;
    halves.softcap_t = halves.softcap_s = side.softcap;
    halves.gradients = 0;
    skl_call forward = {.op = SKL_OP_FORWARD,
                        .inputs = call->inputs,
                        .keys = call->keys,
                        .workspace = call->workspace,
                        .stream = call->stream};
    const skl_input none = {0};
    forward.inputs.q_t = *side.q;
    forward.inputs.k_t = *side.k;
    forward.inputs.q_s = input_from(side.q, side.dtype, apart ? heads : 0);
    forward.inputs.k_s = input_from(side.k, side.dtype, apart && side.key_heads > 1 ? key_heads : 0);
    forward.inputs.lse_t = forward.inputs.lse_s = none;
    forward.rows.lse_t = forward.rows.lse_s = *lse;
    forward.rows.lse_s.data = apart ? (float *)lse->data + heads * lse->stride_head : NULL;
    return skl_select_params_of(&halves, &forward);
}

const skl_cuda_params *skl_cuda_launch_params(const skl_cuda_params *params, const skl_cuda_launch *launch,
                                              skl_cuda_params *halves)
{
    if (!launch->halves)
        return params;
    *halves = halves_of(&params->problem, &params->call, launch->teacher_side != 0, &launch->lse);
    return halves;
}

/* The best forward of this GPU, even if the plan's kernel is for older ones. If the caller named a kernel, one of
 * that kernel's architecture. */
static const skl_cuda_kernel *lse_kernel_of(const choice *s, const skl_cuda_params *halves)
{
    const skl_problem *const p = &halves->problem;
    const skl_inputs *const in = &halves->call.inputs;
    const int capability = s->plan->forced_by != NULL ? s->kernel->capability : s->plan->capability;
    const skl_cuda_kernel *const kernel = skl_cuda_select_kernel(p, capability, NULL);
    const bool readable = skl_select_tma_reads(p->dtype_t, &in->q_t, p->dim_t, p->heads_t, skl_query_rows(p)) &&
                          skl_select_tma_reads(p->dtype_t, &in->k_t, p->dim_t, p->key_heads_t, skl_key_rows(p));
    return skl_select_is_tma_kernel(kernel) && !readable ? skl_select_without_tma(p) : kernel;
}

static void add_group_lse(const choice *s, bool of_teacher, const char *reason)
{
    const skl_problem *const p = &s->plan->problem;
    const skl_output lse = of_teacher ? teacher_lse_of(s) : s->call->rows.lse_s;
    const size_t lse_size = of_teacher && s->call->rows.lse_t.data == NULL ? skl_select_teacher_lse_size(p) : 0;
    skl_cuda_launch *const launch = &s->launches->at[s->launches->count];
    const skl_cuda_params halves = halves_of(p, s->call, of_teacher, &lse);
    skl_plan plan = *s->plan;
    plan.problem = halves.problem;
    choice forward = *s;
    forward.plan = &plan;
    forward.params = &halves;
    forward.call = &halves.call;
    forward.capped = halves.a.capped;
    forward.kernel = lse_kernel_of(s, &halves);
    forward.reason = reason;
    skl_select_add_forward(&forward);
    launch->step = of_teacher ? "lse_t" : "lse_s";
    launch->halves = true;
    launch->states_at = skl_select_teacher_lse_size(p);
    launch->workspace_size += launch->num_splits > 1 ? launch->states_at : lse_size;
    launch->teacher_side = of_teacher;
    launch->lse = lse;
}

/* Whether a call wants LSEs and nothing else; given LSEs have to be restricted to the visible keys by P. */
static bool wants_only_lses(const choice *s)
{
    const skl_rows *const rows = &s->call->rows;
    const bool given = s->call->inputs.lse_t.data != NULL;
    return s->call->op == SKL_OP_FORWARD && rows->kl.data == NULL && !(given && rows->lse_t.data != NULL);
}

static void add_group_lses(const choice *s)
{
    const char *const reason = "no KL is wanted: LSEs only";
    if (s->call->rows.lse_t.data != NULL)
        add_group_lse(s, true, reason);
    if (s->call->rows.lse_s.data != NULL)
        add_group_lse(s, false, reason);
}

/* A forward, after the launch for the teacher's LSEs that it needs if none are given. */
static skl_cuda_launch *add_rows_launch(const choice *s, skl_cuda_launcher launcher, const char *variant)
{
    const bool given = s->call->inputs.lse_t.data != NULL;
    if (!given)
        add_group_lse(s, true, "inputs.lse_t is not given");
    skl_cuda_launch *const launch = skl_select_add(s, "forward", s->kernel, launcher, variant, s->reason);
    if (!given) {
        launch->lse = teacher_lse_of(s);
        launch->states_at = skl_select_teacher_lse_size(&s->plan->problem);
    }
    return launch;
}

static void add_group_rows(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    skl_cuda_launch *const launch =
        add_rows_launch(s, s->kernel->group_rows, s->capped ? SKL_VARIANT_GROUPS_SOFTCAP : SKL_VARIANT_GROUPS);
    const bool hopper = s->kernel->group_fused != NULL;
    const int64_t rows = hopper ? SKL_GROUP_TILE : SKL_GROUP_TILES_ROWS;
    const int64_t blocks_per_sm = hopper ? 1 : SKL_GROUP_TILES_BLOCKS;
    launch->head_group = skl_select_head_group_for(s, rows * blocks_per_sm, 2, 2);
    skl_select_set_splits(launch, p, rows, s->plan->sm_count * blocks_per_sm * skl_select_blocks_to_fill(p));
    if (launch->num_splits > 1)
        launch->workspace_size += launch->states_at;
}

static void add_group_fused(const choice *s, const side_request *student, bool kl)
{
    skl_cuda_launch *const launch =
        skl_select_add(s, "dq_s and dk_s", s->kernel, s->kernel->group_fused,
                       s->capped ? SKL_VARIANT_FUSED_GROUPS_SOFTCAP : SKL_VARIANT_FUSED_GROUPS, s->reason);
    launch->kl_in_backward = kl;
    launch->dk_sums = skl_select_dk_sums_of(s, student);
    launch->workspace_size =
        student->dk && student->side.grad_dtype != SKL_F32 ? skl_select_dk_sums_size(&s->plan->problem) : 0;
    launch->head_group = skl_select_head_group_for(s, SKL_SM90_BACKWARD_ROWS, 2, 2 + 4);
}

static void add_group_dq_and_dk(const choice *s, const side_request *student, bool kl)
{
    if (student->dq)
        skl_select_add(s, "dq_s", s->kernel, s->kernel->group_dq, SKL_VARIANT_DQ_GROUPS, s->reason)->kl_in_backward =
            kl;
    if (student->dk)
        skl_select_add(s, "dk_s", s->kernel, s->kernel->group_dk, SKL_VARIANT_DK_GROUPS, s->reason)->streams_queries =
            true;
}

/* Rows of the kernels that compute in strips; `dots`: with dot_t. */
static void add_strip_rows(const choice *s, bool dots)
{
    skl_cuda_launch *const launch = add_rows_launch(s, s->kernel->strip_rows, SKL_VARIANT_ROWS);
    launch->strips = skl_group_rows_layout(&s->plan->problem, s->plan->sm_count, dots);
    launch->num_splits = launch->strips.num_splits;
    launch->workspace_size = launch->states_at + launch->strips.size;
}

static void add_strip_gradients(const choice *s, const side_request *request)
{
    skl_cuda_launch *const launch =
        skl_select_add(s, request->of_teacher ? "gradients of the teacher" : "gradients of the student", s->kernel,
                       s->kernel->strip_gradients, SKL_VARIANT_GRADIENTS, s->reason);
    launch->teacher_side = request->of_teacher;
    launch->streams_queries = true;
    launch->strips = skl_group_gradients_layout(&s->plan->problem, s->plan->sm_count, request->of_teacher);
    launch->num_splits = launch->strips.num_splits;
    launch->workspace_size = launch->strips.size;
}

/* The kernel for what is about the teacher: dot_t and its gradients. */
static choice teacher_choice(const choice *s)
{
    const skl_problem *const p = &s->plan->problem;
    choice result = *s;
    result.kernel = skl_select_teacher_kernel_of(p);
    result.reason = result.kernel != skl_cuda_general ? "teacher gradients of a group: in strips"
                    : skl_select_has_teacher_gradients(p)
                        ? "teacher gradients of a group with more than 128 dimensions: no tensor cores"
                        : "rows.dot_t without teacher gradients of the plan: no tensor cores";
    return result;
}

/* The kernel for the student's gradients, and why it is not the plan's. */
static choice student_choice(const choice *s, const side_request *student)
{
    choice result = *s;
    if (s->kernel->group_fused != NULL && s->plan->deterministic) {
        result.kernel = skl_select_deterministic_kernel_of(&s->plan->problem);
        result.reason = "deterministic: no sums by atomic additions";
    } else if (s->kernel->group_fused != NULL && student->dk && !skl_select_tma_adds_to(s, student)) {
        result.kernel = skl_cuda_general;
        result.reason = "TMA cannot add to dk_s: general kernel";
    }
    return result;
}

static void add_group_gradients(const choice *s, const side_request *request, const char *step, bool kl)
{
    if (s->kernel->group_fused != NULL) {
        add_group_fused(s, request, kl);
    } else if (s->kernel->group_dq != NULL) {
        add_group_dq_and_dk(s, request, kl);
    } else if (s->kernel->strip_gradients != NULL) {
        add_strip_gradients(s, request);
    } else if (s->kernel != skl_cuda_general) {
        skl_select_add_indexer(s, step, true);
    } else {
        if (request->dq && s->some_rows)
            skl_select_add_dq(s, request, s->reason, false);
        if (request->dk && s->some_keys)
            skl_select_add_dk(s, request, s->reason);
    }
}

static void add_rows(const choice *s)
{
    if (wants_only_lses(s))
        add_group_lses(s);
    else if (s->kernel->group_rows != NULL)
        add_group_rows(s);
    else if (s->kernel->strip_rows != NULL)
        add_strip_rows(s, false);
    else
        skl_select_add_indexer(s, "forward", false);
}

/* One launch for both. */
static bool gives_rows_with_gradients(const skl_cuda_kernel *kernel, const side_request *student)
{
    return kernel->group_fused != NULL || (kernel->group_dq != NULL && student->dq) ||
           (kernel->dense_gradients != NULL && kernel != skl_cuda_general);
}

void skl_select_groups(choice *s)
{
    const side_request student = skl_select_request_of(s, false), teacher = skl_select_request_of(s, true);
    const choice of_student = student_choice(s, &student), of_teacher = teacher_choice(s);
    const bool of_s = (student.dq && s->some_rows) || (student.dk && s->some_keys);
    const bool rows = s->rows && s->some_rows, dots = rows && s->call->rows.dot_t.data != NULL;
    const bool rows_in_gradients = rows && of_s && !dots && gives_rows_with_gradients(of_student.kernel, &student);
    if (dots && of_teacher.kernel != skl_cuda_general)
        add_strip_rows(&of_teacher, true);
    else if (dots)
        skl_select_add_forward(&of_teacher);
    else if (rows && !rows_in_gradients)
        add_rows(s);
    if (of_s)
        add_group_gradients(&of_student, &student, rows_in_gradients ? "forward and gradients" : "gradients",
                            rows_in_gradients);
    if (teacher.dq || teacher.dk)
        add_group_gradients(&of_teacher, &teacher, "", false);
}
