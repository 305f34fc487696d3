#include "cli/check/kernel.h"
#include "cli/common/cli.h"
#include "device/mirror.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Results ------------------------------------------------------------------------------------------------ */

enum {
    KL,
    LSE_T,
    LSE_S,
    DOT_T,
    CROSS_ENTROPY,
    ENTROPY,
    MASS,
    DQ_T,
    DK_T,
    DQ_S,
    DK_S,
    DW_S,
    DSINK_T,
    DSINK_S,
    DV_S,
    ARRAY_COUNT
};

static const char *const array_names[ARRAY_COUNT] = {"kl",      "lse_t", "lse_s",   "dot_t",   "cross_entropy",
                                                     "entropy", "mass",  "dq_t",    "dk_t",    "dq_s",
                                                     "dk_s",    "dw_s",  "dsink_t", "dsink_s", "dv_s"};

typedef struct result_array {
    void *data;
    oracle_expectation expected;
} result_array;

typedef struct check_run {
    const check_case *of;
    skl_plan *plan;
    mirror tensors;
    void *workspace; /* in device memory */
    size_t workspace_size;
    skl_row_state *states[2]; /* of two halves of the keys */
    result_array arrays[ARRAY_COUNT];
    check_verdict *verdict;
} check_run;

/* All bits set is NaN in every type, which reveals elements that are not written. */
static void *poisoned(size_t size)
{
    const size_t whole = (size / SKL_WORKSPACE_ALIGNMENT + 1) * SKL_WORKSPACE_ALIGNMENT;
    void *const data = aligned_alloc(SKL_WORKSPACE_ALIGNMENT, whole);
    return data ? memset(data, 0xff, whole) : NULL;
}

static void poison(check_run *run, int array)
{
    if (run->arrays[array].data)
        memset(run->arrays[array].data, 0xff, (size_t)run->arrays[array].expected.count * sizeof(float));
}

/* The arrays of a case: dot_t only for gradients with teacher groups, gradients of the teacher and of sinks if they
 * are requested, and some row vectors only for an indexer. */
static bool has_array(const check_case *of, int array)
{
    const skl_problem *const p = &of->problem;
    const bool indexer = p->student == SKL_STUDENT_INDEXER;
    switch (array) {
    case DOT_T:
        return skl_problem_needs(p, SKL_OP_BACKWARD) & SKL_ROW_DOT_T;
    case DQ_T:
        return p->gradients & SKL_DQ_T;
    case DK_T:
        return p->gradients & SKL_DK_T;
    case DSINK_T:
        return p->gradients & SKL_DSINK_T;
    case DSINK_S:
        return p->gradients & SKL_DSINK_S;
    case DV_S:
        return p->gradients & SKL_DV_S;
    case CROSS_ENTROPY:
    case ENTROPY:
    case MASS:
    case DW_S:
        return indexer;
    default:
        return true;
    }
}

static bool make_arrays(check_run *run, bool rounds_gradients)
{
    const check_case *const of = run->of;
    const skl_problem *const p = &of->problem;
    const int64_t *const rows = of->row_counts, *const elements = of->tensor_counts;
    const oracle_result *const exact = &of->exact, *const naive = &of->naive;
    const skl_dtype grad_t = p->grad_f32 ? SKL_F32 : p->dtype_t;
    const skl_dtype grad_s = p->grad_f32 ? SKL_F32 : p->dtype_s;
    const skl_dtype grad_w = p->grad_f32 ? SKL_F32 : p->dtype_w;
    const double product_t = rounds_gradients ? oracle_product_rounding(p, p->dtype_t) : 0;
    const double product_s = rounds_gradients ? oracle_product_rounding(p, p->dtype_s) : 0;
#define ROWS(x, count)                                                                                               \
    {                                                                                                                \
        .expected = { exact->x, naive->x, exact->rounding.x, 1, 0, NULL, 0, SKL_F32, count }                         \
    }
#define GRADIENT(x, product, dtype, count)                                                                           \
    {                                                                                                                \
        .expected = { exact->x, naive->x, exact->rounding.x, 1, 0, exact->terms.x, product, dtype, count }           \
    }
    const result_array arrays[ARRAY_COUNT] = {
        [KL] = ROWS(kl, rows[1]),
        [LSE_T] = ROWS(lse_t, rows[0]),
        [LSE_S] = ROWS(lse_s, rows[1]),
        [DOT_T] = ROWS(dot_t, rows[0]),
        [CROSS_ENTROPY] = ROWS(cross_entropy, rows[1]),
        [ENTROPY] = ROWS(entropy, rows[1]),
        [MASS] = ROWS(mass, rows[1]),
        [DQ_T] = GRADIENT(dq_t, product_t, grad_t, elements[0]),
        [DK_T] = GRADIENT(dk_t, product_t, grad_t, elements[1]),
        [DQ_S] = GRADIENT(dq_s, product_s, grad_s, elements[2]),
        [DK_S] = GRADIENT(dk_s, product_s, grad_s, elements[3]),
        [DW_S] = GRADIENT(dw_s, product_s, grad_w, elements[4]),
        [DSINK_T] = ROWS(dsink_t, p->heads_t), /* like rows: no product follows the gradient of a logit */
        [DSINK_S] = ROWS(dsink_s, p->heads_s),
        [DV_S] = GRADIENT(dv_s, product_s, grad_s, elements[5]),
    };
#undef ROWS
#undef GRADIENT
    memcpy(run->arrays, arrays, sizeof arrays);
    bool complete = true;
    for (int a = 0; a < ARRAY_COUNT; a++) {
        if (!has_array(of, a))
            continue;
        run->arrays[a].data = poisoned((size_t)run->arrays[a].expected.count * sizeof(float));
        complete = complete && run->arrays[a].data;
    }
    for (int half = 0; half < 2; half++) {
        run->states[half] = poisoned((size_t)rows[1] * sizeof(skl_row_state));
        complete = complete && run->states[half];
    }
    return complete;
}

/* ---- Comparison --------------------------------------------------------------------------------------------- */

/* Largest error relative to the allowed error. */
static double worst_error(const result_array *array)
{
    const oracle_expectation *const expected = &array->expected;
    const double naive_error = oracle_naive_error(expected);
    double worst = 0;
    for (int64_t i = 0; i < expected->count; i++)
        worst = fmax(worst, oracle_excess(expected, naive_error, i, oracle_read(expected->dtype, array->data, i)));
    return worst;
}

static void compare(check_run *run, int array, const char *pass)
{
    const result_array *const computed = &run->arrays[array];
    if (computed->data == NULL)
        return;
    const double worst = worst_error(computed);
    check_verdict *const verdict = run->verdict;
    if (worst <= verdict->worst)
        return;
    verdict->worst = worst;
    snprintf(verdict->where, sizeof verdict->where, "%s of %s, %s", array_names[array], pass, run->of->name);
}

/* ---- The calls ---------------------------------------------------------------------------------------------- */

static skl_output row_output(const check_run *run, int array)
{
    const skl_problem *const problem = &run->of->problem;
    const int64_t heads = array == LSE_T || array == DOT_T ? problem->heads_t : problem->heads_s;
    const int64_t length = problem->packed ? problem->total_q : problem->len_q;
    return skl_output_contiguous(run->arrays[array].data, heads, length, 1);
}

static skl_input row_input(const check_run *run, int array)
{
    const skl_output output = row_output(run, array);
    return (skl_input){output.data, output.stride_batch, output.stride_head, output.stride_row};
}

/* A gradient has the layout of its tensor. */
static skl_output like_input(const check_run *run, int array, const skl_input *like)
{
    return (skl_output){run->arrays[array].data, like->stride_batch, like->stride_head, like->stride_row};
}

static skl_gradients gradient_outputs(const check_run *run)
{
    const skl_inputs *const inputs = &run->of->inputs;
    return (skl_gradients){
        .struct_size = sizeof(skl_gradients),
        .dq_t = like_input(run, DQ_T, &inputs->q_t),
        .dk_t = like_input(run, DK_T, &inputs->k_t),
        .dq_s = like_input(run, DQ_S, &inputs->q_s),
        .dk_s = like_input(run, DK_S, &inputs->k_s),
        .dw_s = like_input(run, DW_S, &inputs->w_s),
        .dsink_t = run->arrays[DSINK_T].data,
        .dsink_s = run->arrays[DSINK_S].data,
    };
}

static skl_inputs with_saved_rows(const check_run *run)
{
    skl_inputs inputs = run->of->inputs;
    inputs.lse_t = row_input(run, LSE_T);
    inputs.lse_s = row_input(run, LSE_S);
    return inputs;
}

static skl_status run_forward(check_run *run)
{
    skl_inputs inputs = run->of->inputs;
    skl_rows rows = {
        .struct_size = sizeof rows,
        .kl = row_output(run, KL),
        .lse_t = row_output(run, LSE_T),
        .lse_s = row_output(run, LSE_S),
        .dot_t = row_output(run, DOT_T),
        .cross_entropy = row_output(run, CROSS_ENTROPY),
        .entropy = row_output(run, ENTROPY),
        .mass = row_output(run, MASS),
    };
    const skl_status status = mirror_call(&run->tensors, &inputs, &rows, NULL);
    if (status != SKL_OK)
        return status;
    return skl_forward(run->plan, &inputs, &rows, run->workspace, run->workspace_size, NULL);
}

static skl_status run_backward(check_run *run)
{
    skl_inputs inputs = with_saved_rows(run);
    inputs.kl = row_input(run, KL);
    inputs.dot_t = row_input(run, DOT_T);
    skl_gradients gradients = gradient_outputs(run);
    const skl_status status = mirror_call(&run->tensors, &inputs, NULL, &gradients);
    if (status != SKL_OK)
        return status;
    return skl_backward(run->plan, &inputs, &gradients, run->workspace, run->workspace_size, NULL);
}

static skl_status run_forward_backward(check_run *run)
{
    skl_inputs inputs = with_saved_rows(run);
    skl_rows rows = {
        .struct_size = sizeof rows,
        .kl = row_output(run, KL),
        .dot_t = row_output(run, DOT_T),
        .cross_entropy = row_output(run, CROSS_ENTROPY),
        .entropy = row_output(run, ENTROPY),
    };
    skl_gradients gradients = gradient_outputs(run);
    const skl_status status = mirror_call(&run->tensors, &inputs, &rows, &gradients);
    if (status != SKL_OK)
        return status;
    return skl_forward_backward(run->plan, &inputs, &rows, &gradients, run->workspace, run->workspace_size, NULL);
}

static skl_status run_attention_backward(check_run *run)
{
    skl_inputs inputs = with_saved_rows(run);
    skl_rows rows = {.struct_size = sizeof rows, .kl = row_output(run, KL)};
    skl_gradients gradients = gradient_outputs(run);
    skl_attention attention = run->of->attention;
    attention.dv_s = like_input(run, DV_S, &attention.v_s);
    skl_status status = mirror_call(&run->tensors, &inputs, &rows, &gradients);
    if (status == SKL_OK)
        status = mirror_attention(&run->tensors, &attention);
    if (status != SKL_OK)
        return status;
    return skl_attention_backward(run->plan, &inputs, &attention, &rows, &gradients, run->workspace,
                                  run->workspace_size, NULL);
}

static skl_status run_halves(check_run *run)
{
    skl_inputs inputs = with_saved_rows(run);
    const int64_t middle = run->of->problem.len_k / 2;
    skl_rows rows = {.struct_size = sizeof rows, .kl = row_output(run, KL), .lse_s = row_output(run, LSE_S)};
    const bool sinks = run->of->problem.sinks; /* they are added at the end, and need both LSEs */
    if (sinks)
        rows.lse_t = row_output(run, LSE_T);
    skl_row_state *left = run->states[0], *right = run->states[1];
    skl_status status = mirror_call(&run->tensors, &inputs, &rows, NULL);
    if (status == SKL_OK)
        status = mirror_states(&run->tensors, &left);
    if (status == SKL_OK)
        status = mirror_states(&run->tensors, &right);
    if (status == SKL_OK)
        status = skl_partial(run->plan, &inputs, 0, middle, left, run->workspace, run->workspace_size, NULL);
    if (status == SKL_OK)
        status = skl_partial(run->plan, &inputs, middle, run->of->problem.len_k, right, run->workspace,
                             run->workspace_size, NULL);
    if (status == SKL_OK)
        status = skl_states_merge(run->plan, left, right, NULL);
    if (status == SKL_OK)
        status = skl_states_finish(run->plan, sinks ? &inputs : NULL, left, &rows, NULL);
    return status;
}

/* Whose gradients a case has: those of the KL, or those of the student's attention with its KL. */
typedef enum check_kind { ANY_CASE, KL_CASE, ATTENTION_CASE } check_kind;

/* In this order: a pass may read results of the passes before it. */
typedef struct check_pass {
    const char *name;
    check_kind kind;
    skl_status (*run)(check_run *run);
    uint32_t writes; /* bits of arrays */
} check_pass;

enum { GRADIENTS = 1 << DQ_T | 1 << DK_T | 1 << DQ_S | 1 << DK_S | 1 << DW_S | 1 << DSINK_T | 1 << DSINK_S };
enum { PARTS = 1 << CROSS_ENTROPY | 1 << ENTROPY };

static const check_pass passes[] = {
    {"forward", ANY_CASE, run_forward, 1 << KL | 1 << LSE_T | 1 << LSE_S | 1 << DOT_T | PARTS | 1 << MASS},
    {"backward", KL_CASE, run_backward, GRADIENTS},
    {"forward_backward", KL_CASE, run_forward_backward, 1 << KL | 1 << DOT_T | PARTS | GRADIENTS},
    {"attention_backward", ATTENTION_CASE, run_attention_backward, 1 << KL | 1 << DV_S | GRADIENTS},
    {"merged halves", ANY_CASE, run_halves, 1 << KL | 1 << LSE_S},
};

/* A plan without the attention backward must refuse the call. */
static void check_refusal(check_run *run, const check_pass *pass)
{
    const skl_status status = pass->run(run);
    if (status != SKL_ERROR_UNSUPPORTED)
        snprintf(run->verdict->failure, sizeof run->verdict->failure,
                 "%s, %s: %s, but the plan does not support this call", pass->name, run->of->name,
                 status == SKL_OK ? "it ran" : cli_status_text());
}

static void run_pass(check_run *run, const check_pass *pass)
{
    for (int a = 0; a < ARRAY_COUNT; a++) {
        if (pass->writes >> a & 1)
            poison(run, a);
    }
    if (pass->kind == ATTENTION_CASE && !skl_plan_supports(run->plan, SKL_OP_ATTENTION_BACKWARD)) {
        check_refusal(run, pass);
        return;
    }
    skl_status status = pass->run(run);
    if (status == SKL_OK)
        status = mirror_fetch(&run->tensors);
    if (status != SKL_OK) {
        snprintf(run->verdict->failure, sizeof run->verdict->failure, "%s, %s: %s", pass->name, run->of->name,
                 cli_status_text());
        return;
    }
    for (int a = 0; a < ARRAY_COUNT; a++) {
        if (pass->writes >> a & 1)
            compare(run, a, pass->name);
    }
}

/* ---- All passes --------------------------------------------------------------------------------------------- */

static bool make_workspace(check_run *run)
{
    for (int op = SKL_OP_FORWARD; op <= SKL_OP_ATTENTION_BACKWARD; op++) {
        const size_t size = skl_plan_workspace_size(run->plan, (skl_op)op);
        run->workspace_size = size > run->workspace_size ? size : run->workspace_size;
    }
    void *const poison_bytes = poisoned(run->workspace_size);
    skl_status status = poison_bytes ? SKL_OK : SKL_ERROR_MEMORY;
    if (status == SKL_OK)
        status = device_allocate(run->tensors.device, run->workspace_size, "the workspace", &run->workspace);
    if (status == SKL_OK)
        status = device_copy(run->tensors.device, run->workspace, poison_bytes, run->workspace_size);
    free(poison_bytes);
    return status == SKL_OK;
}

static void free_run(check_run *run)
{
    mirror_destroy(&run->tensors);
    device_free(run->tensors.device, run->workspace);
    skl_plan_destroy(run->plan);
    free(run->states[0]);
    free(run->states[1]);
    for (int a = 0; a < ARRAY_COUNT; a++)
        free(run->arrays[a].data);
}

bool check_kernel(check_verdict *verdict, const check_case *of, const skl_options *options, bool rounds_gradients)
{
    check_run run = {.of = of, .verdict = verdict, .tensors = mirror_of(&of->problem, options->device)};
    const skl_status status = skl_plan_create(&run.plan, &of->problem, options);
    if (status == SKL_ERROR_ARGUMENT && options->device == SKL_CUDA)
        return true; /* this kernel does not support the type or size; CPU kernels support all */
    verdict->cases++;
    if (status != SKL_OK) {
        snprintf(verdict->failure, sizeof verdict->failure, "plan, %s: %s", of->name, skl_last_error());
        return true;
    }
    const bool ready = make_arrays(&run, rounds_gradients) && make_workspace(&run);
    const check_kind kind = of->problem.gradients & SKL_DV_S ? ATTENTION_CASE : KL_CASE;
    for (size_t p = 0; ready && p < sizeof passes / sizeof passes[0]; p++)
        if (passes[p].kind == ANY_CASE || passes[p].kind == kind)
            run_pass(&run, &passes[p]);
    free_run(&run);
    return ready;
}
