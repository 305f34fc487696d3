/* Which kernels every case of the case table launches on every GPU of the selection's table, without a GPU.
 *
 *     test_selection FILE            compares with FILE, which is tests/selection.txt
 *     test_selection --write FILE    writes FILE
 *
 * One line of the file is one answer: case, operation, GPUs, and the launches with their splits and workspace. */
#define _POSIX_C_SOURCE 200809L /* popen */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/needs.h"
#include "base/problem.h"
#include "base/side.h"
#include "base/stats.h"
#include "case_words.h"
#include "cuda/backend.h"
#include "cuda/select.h"
#include "fixture.h"
#include "support.h"

static const char *const gpus[] = {"a100", "b200", "h100", "h200", "l40s", "rtx5090"};
static const char *const op_names[] = {"forward",        "backward",           "forward_backward",
                                       "partial",        "attention_backward", "attention_forward",
                                       "attention_stats"};

enum { GPU_COUNT = COUNT_OF(gpus), OP_COUNT = COUNT_OF(op_names), TEXT_SIZE = 8192 };

static const char *golden_path;

/* A plan for a GPU that is not here. NULL: the named kernel does not do this problem. */
static skl_plan *plan_for(const test_case *c, const char *gpu, int32_t deterministic, const char *kernel)
{
    const skl_problem problem = case_problem(c);
    skl_options options = skl_options_default();
    options.device = SKL_CUDA;
    options.gpu = gpu;
    options.deterministic = deterministic;
    options.kernel = kernel;
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &problem, &options);
    if (kernel == NULL && status != SKL_OK)
        fail_msg("%s on %s: %s", c->name, gpu, skl_last_error());
    return plan;
}

/* ---- The answers of all cases ---------------------------------------------------------------------------------- */

/* Appends ", text", or "text" to an empty buffer. `text` has `length` characters. */
static void append(char *buffer, const char *separator, const char *text, size_t length)
{
    const size_t used = strlen(buffer);
    assert_true(used + strlen(separator) + length < TEXT_SIZE);
    snprintf(buffer + used, TEXT_SIZE - used, "%s%.*s", used > 0 ? separator : "", (int)length, text);
}

/* "step: kernel, variant, 2 splits, 64 bytes of workspace (reason)" without its reason, one split and 0 bytes. */
static void append_launch(char *answer, const char *line)
{
    const char *const end = strstr(line, " bytes of workspace (");
    assert_non_null(end);
    const char *size = end, *splits = end;
    while (size[-1] != ' ')
        size--;
    const char *const after_splits = size - 2; /* ", " */
    splits = after_splits;
    while (*splits != ',')
        splits--;
    const bool one_split = strncmp(splits, ", 1 split,", strlen(", 1 split,")) == 0;
    append(answer, "; ", line, (size_t)((one_split ? splits : after_splits) - line));
    if (strncmp(size, "0 ", 2) != 0) {
        append(answer, ", ", size, (size_t)(end - size));
        append(answer, " ", "bytes", strlen("bytes"));
    }
}

/* What a plan answers about an operation; "" if its problem does not have the operation. */
static void answer_of(const skl_plan *plan, skl_op op, char *answer)
{
    static char text[TEXT_SIZE];
    answer[0] = '\0';
    if (skl_op_check_for(&plan->problem, op) != SKL_OK)
        return;
    const size_t length = skl_plan_explain(plan, NULL, op, text, sizeof text);
    assert_true(length < sizeof text);
    assert_int_equal(length > 0, skl_plan_supports(plan, op));
    if (length == 0) {
        const char *const reason = strchr(skl_last_error(), '('), *const end = strstr(skl_last_error(), "); ");
        assert_true(reason != NULL && end != NULL);
        append(answer, "", "refused", strlen("refused"));
        append(answer, " ", reason, (size_t)(end + 1 - reason));
        return;
    }
    if (strncmp(text, "nothing to launch", strlen("nothing to launch")) == 0) {
        append(answer, "", "nothing to launch", strlen("nothing to launch"));
        return;
    }
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n"))
        append_launch(answer, line);
}

/* One line for all GPUs of which `pending` holds and that give the same answer. */
static void write_answers(FILE *file, const char *label, char (*answers)[TEXT_SIZE], bool *pending)
{
    for (int first = 0; first < GPU_COUNT; first++) {
        if (!pending[first])
            continue;
        static char names[TEXT_SIZE];
        names[0] = '\0';
        int count = 0;
        for (int gpu = first; gpu < GPU_COUNT; gpu++) {
            if (!pending[gpu] || strcmp(answers[gpu], answers[first]) != 0)
                continue;
            append(names, ",", gpus[gpu], strlen(gpus[gpu]));
            pending[gpu] = false;
            count++;
        }
        fprintf(file, "%s %s: %s\n", label, count == GPU_COUNT ? "all" : names, answers[first]);
    }
}

/* Answers of deterministic plans have separate lines where they differ. */
static void write_case(FILE *file, const test_case *c)
{
    static char answers[2][GPU_COUNT][TEXT_SIZE];
    skl_plan *plans[2][GPU_COUNT];
    for (int kind = 0; kind < 2; kind++)
        for (int gpu = 0; gpu < GPU_COUNT; gpu++)
            plans[kind][gpu] = plan_for(c, gpus[gpu], kind, NULL);
    for (int op = 0; op < OP_COUNT; op++)
        for (int kind = 0; kind < 2; kind++) {
            bool pending[GPU_COUNT];
            char label[256];
            for (int gpu = 0; gpu < GPU_COUNT; gpu++) {
                answer_of(plans[kind][gpu], (skl_op)op, answers[kind][gpu]);
                pending[gpu] =
                    answers[kind][gpu][0] != '\0' && (kind == 0 || strcmp(answers[0][gpu], answers[1][gpu]) != 0);
            }
            snprintf(label, sizeof label, "%s %s%s", c->name, op_names[op], kind == 0 ? "" : " deterministic");
            write_answers(file, label, answers[kind], pending);
        }
    for (int kind = 0; kind < 2; kind++)
        for (int gpu = 0; gpu < GPU_COUNT; gpu++)
            skl_plan_destroy(plans[kind][gpu]);
}

static void test_every_case_is_answered_as_in_the_file(void **state)
{
    (void)state;
    char command[4096];
    snprintf(command, sizeof command, "diff '%s' - >&2", golden_path);
    FILE *const diff = popen(command, "w");
    assert_non_null(diff);
    for (size_t n = 0; n < test_case_count; n++)
        write_case(diff, &test_cases[n]);
    if (pclose(diff) != 0)
        fail_msg("If that is intended: build/test/tests/test_selection --write tests/selection.txt");
}

static int write_file(const char *path)
{
    FILE *const file = fopen(path, "w");
    if (file == NULL) {
        fprintf(stderr, "%s cannot be written\n", path);
        return 1;
    }
    for (size_t n = 0; n < test_case_count; n++)
        write_case(file, &test_cases[n]);
    return fclose(file) != 0;
}

/* ---- Workspaces of all requests -------------------------------------------------------------------------------- */

typedef struct checked_plan {
    const test_case *test_case;
    const char *gpu, *kernel; /* kernel: that the caller named; NULL: none */
    const skl_plan *plan;
    int64_t selections;
} checked_plan;

typedef struct part {
    size_t begin, end; /* bytes of the workspace */
    bool kept;         /* several launches use it; the others share their bytes, one launch after another */
} part;

static void fail_plan(const checked_plan *checked, const skl_cuda_request *request, const skl_cuda_layout *layout,
                      const skl_cuda_launches *launches, const char *what)
{
    for (int n = 0; n < launches->count; n++)
        print_error("%s: %s, %s: %zu bytes at %zu\n", launches->at[n].step, launches->at[n].kernel,
                    launches->at[n].variant, launches->at[n].workspace_size, launches->at[n].workspace_at);
    fail_msg("%s on %s, kernel %s: %s: %s\n  rows=%u gradients=%u stats=%u lse_given=%d key_lengths=%d aligned=%x "
             "tma=%x\n  "
             "  the plan has %zu bytes, the launches have %zu",
             checked->test_case->name, checked->gpu, checked->kernel != NULL ? checked->kernel : "not named",
             op_names[request->op], what, request->rows, request->gradients, request->stats, request->lse_given,
             request->key_lengths, layout->aligned, layout->tma, skl_plan_workspace_size(checked->plan, request->op),
             launches->workspace_size);
}

/* Computed LSEs, of a teacher group or for statistics, that are results of no caller. */
static part lse_part(const skl_problem *p, const skl_cuda_request *request, const skl_cuda_launches *launches)
{
    const bool stats = request->op == SKL_OP_ATTENTION_STATS;
    bool computed = false;
    for (int n = 0; n < launches->count; n++)
        computed = computed || (launches->at[n].halves && (launches->at[n].teacher_side || stats));
    const int64_t heads = stats ? p->heads_s : p->heads_t;
    const size_t size = (size_t)(heads * skl_query_rows(p).rows * skl_query_rows(p).batch) * sizeof(float);
    const bool is_result = stats ? request->stats & SKL_STATS_LSE : request->rows & SKL_ROW_LSE_T;
    const bool in_workspace = computed && !is_result;
    return (part){launches->lse_at, in_workspace ? launches->lse_at + size : launches->lse_at, true};
}

/* Each part is inside the workspace and aligned, and a kept one is apart from all others. Returns the first mistake;
 * NULL: none. */
static const char *part_mistake(const part *parts, int count, size_t workspace_size)
{
    for (int n = 0; n < count; n++) {
        if (parts[n].begin == parts[n].end)
            continue;
        if (parts[n].begin % SKL_WORKSPACE_ALIGNMENT != 0)
            return "a part of the workspace is not aligned";
        if (parts[n].end > workspace_size)
            return "a part ends after the workspace";
        for (int m = 0; m < n; m++)
            if ((parts[m].kept || parts[n].kept) && parts[m].begin < parts[n].end && parts[n].begin < parts[m].end &&
                parts[m].begin < parts[m].end)
                return "a kept part of the workspace overlaps with another";
    }
    return NULL;
}

/* Each launch has a launcher, a kernel that runs on the device, and no sum in any order if that is excluded. Returns
 * the first mistake; NULL: none. */
static const char *launch_mistake(const skl_cuda_launches *launches, const skl_cuda_target *target)
{
    for (int n = 0; n < launches->count; n++) {
        const skl_cuda_launch *const launch = &launches->at[n];
        const skl_cuda_kernel *kernel = NULL;
        bool runs = false;
        for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL; i++)
            runs = runs ||
                   (strcmp(kernel->name, launch->kernel) == 0 && skl_cuda_runs_on(kernel, target->device.capability));
        if (launch->launcher == NULL)
            return "a launch has no launcher";
        if (!runs)
            return "a launch has a kernel that does not run on this GPU";
        if (launch->sums_dk && target->deterministic)
            return "a deterministic call adds up dk in any order";
        if (launch->num_splits < 1)
            return "a launch has no split";
    }
    return NULL;
}

/* Whether two lists launch the same kernels in the same way. */
static bool launches_equal(const skl_cuda_launches *a, const skl_cuda_launches *b)
{
    bool equal = a->count == b->count && a->workspace_size == b->workspace_size && a->lse_at == b->lse_at &&
                 a->key_bounds_at == b->key_bounds_at && a->terms_at == b->terms_at && a->term_dim == b->term_dim;
    for (int n = 0; equal && n < a->count; n++) {
        const skl_cuda_launch *const x = &a->at[n], *const y = &b->at[n];
        equal = x->launcher == y->launcher && strcmp(x->variant, y->variant) == 0 && strcmp(x->step, y->step) == 0 &&
                x->workspace_at == y->workspace_at && x->workspace_size == y->workspace_size &&
                x->num_splits == y->num_splits && x->head_group == y->head_group &&
                x->kl_in_backward == y->kl_in_backward && x->rows_known == y->rows_known &&
                x->sums_dk == y->sums_dk && x->lse_computed == y->lse_computed;
    }
    return equal;
}

static void check_request(checked_plan *checked, const skl_cuda_request *request, const skl_cuda_layout *layout)
{
    static skl_cuda_launches launches, normal_launches;
    const skl_plan *const plan = checked->plan;
    const skl_cuda_target *const target = &((const skl_cuda_plan *)plan->of_backend)->target;
    part parts[SKL_LAUNCHES_MAX + 1];
    skl_cuda_select(&plan->problem, target, request, layout, &launches);
    checked->selections++;
    const skl_cuda_request normal = skl_cuda_normal_request(&plan->problem, *request);
    skl_cuda_select(&plan->problem, target, &normal, layout, &normal_launches);
    if (!launches_equal(&launches, &normal_launches))
        fail_plan(checked, request, layout, &launches, "the normal request has other launches");
    if (launches.refusal != NULL) {
        if (request->op != SKL_OP_ATTENTION_BACKWARD && request->op != SKL_OP_ATTENTION_STATS)
            fail_plan(checked, request, layout, &launches, launches.refusal);
        return;
    }
    assert_in_range(launches.count, 0, SKL_LAUNCHES_MAX);
    for (int n = 0; n < launches.count; n++)
        parts[n] = (part){launches.at[n].workspace_at, launches.at[n].workspace_at + launches.at[n].workspace_size,
                          launches.at[n].keeps_workspace != 0};
    parts[launches.count] = lse_part(&plan->problem, request, &launches);
    const char *mistake = launch_mistake(&launches, target);
    if (mistake == NULL)
        mistake = part_mistake(parts, launches.count + 1, launches.workspace_size);
    if (mistake == NULL && launches.workspace_size > skl_plan_workspace_size(plan, request->op))
        mistake = "the plan's workspace is too small";
    if (mistake != NULL)
        fail_plan(checked, request, layout, &launches, mistake);
}

/* Layouts from that of aligned tensors down to one that allows nothing. */
static int layout_count(const skl_problem *p)
{
    const bool may_sum = (p->gradients & (SKL_DK_T | SKL_DK_S)) != 0;
    return may_sum ? 6 : 5;
}

static skl_cuda_layout layout_at(int n)
{
    skl_cuda_layout layout = skl_cuda_aligned;
    const uint32_t inputs = SKL_TENSOR_INPUTS;
    if (n == 1)
        layout.tma = ~inputs;
    if (n == 2)
        layout.tma = ~(uint32_t)(SKL_TENSOR_Q_T | SKL_TENSOR_K_T);
    if (n == 3)
        layout.aligned = layout.tma = ~inputs;
    if (n == 4)
        layout.aligned = inputs;
    if (n == 5)
        layout.tma = inputs;
    return layout;
}

/* Rows, or statistics, that a call of an operation can ask for. */
static const uint32_t rows_of_forward[] = {SKL_ROW_KL,
                                           SKL_ROW_LSE_T | SKL_ROW_LSE_S,
                                           SKL_ROW_LSE_T,
                                           SKL_ROW_LSE_S,
                                           SKL_ROW_KL | SKL_ROW_LSE_T | SKL_ROW_LSE_S,
                                           SKL_ROW_KL | SKL_ROW_DOT_T,
                                           SKL_ROW_KL | SKL_ROW_LSE_T | SKL_ROW_LSE_S | SKL_ROW_DOT_T,
                                           SKL_ROW_KL | SKL_ROW_ENTROPIES | SKL_ROW_MASS};
static const uint32_t rows_of_one_pass[] = {SKL_ROW_KL,
                                            0,
                                            SKL_ROW_KL | SKL_ROW_DOT_T,
                                            SKL_ROW_KL | SKL_ROW_ENTROPIES,
                                            SKL_ROW_KL | SKL_ROW_LSE_T,
                                            SKL_ROW_KL | SKL_ROW_LSE_S};
static const uint32_t no_rows[] = {0};
static const uint32_t statistics[] = {SKL_STATS_ALL,     0,
                                      SKL_STATS_LSE,     SKL_STATS_KEY_SUM | SKL_STATS_OF_ONE_PASS,
                                      SKL_STATS_KEY_MAX, SKL_STATS_DISTANCE_MASS,
                                      SKL_STATS_RANGES,  SKL_STATS_TOP,
                                      SKL_STATS_WEIGHTS};

static const struct {
    const uint32_t *at;
    int count;
} rows_of[OP_COUNT] = {[SKL_OP_FORWARD] = {rows_of_forward, COUNT_OF(rows_of_forward)},
                       [SKL_OP_BACKWARD] = {no_rows, 1},
                       [SKL_OP_FORWARD_BACKWARD] = {rows_of_one_pass, COUNT_OF(rows_of_one_pass)},
                       [SKL_OP_PARTIAL] = {no_rows, 1},
                       [SKL_OP_ATTENTION_BACKWARD] = {rows_of_one_pass, 2},
                       [SKL_OP_ATTENTION_STATS] = {statistics, COUNT_OF(statistics)}};

/* All gradients, none, each alone, those of each side, of queries and of keys, and all but one. */
static const uint32_t gradient_sets[] = {~0U,
                                         0,
                                         SKL_DQ_T,
                                         SKL_DK_T,
                                         SKL_DQ_S,
                                         SKL_DK_S,
                                         SKL_DW_S,
                                         SKL_DQ_T | SKL_DK_T,
                                         SKL_DQ_S | SKL_DK_S,
                                         SKL_DQ_T | SKL_DQ_S,
                                         SKL_DK_T | SKL_DK_S,
                                         ~(uint32_t)SKL_DQ_T,
                                         ~(uint32_t)SKL_DK_T,
                                         ~(uint32_t)SKL_DQ_S,
                                         ~(uint32_t)SKL_DK_S};

static bool has_gradients(skl_op op)
{
    return op == SKL_OP_BACKWARD || op == SKL_OP_FORWARD_BACKWARD || op == SKL_OP_ATTENTION_BACKWARD;
}

/* Every request that differs from the earlier ones of the operation. */
static void check_op(checked_plan *checked, skl_op op)
{
    const skl_problem *const p = &checked->plan->problem;
    const int gradient_count = has_gradients(op) ? (int)COUNT_OF(gradient_sets) : 1;
    for (int n = 0; n < rows_of[op].count * gradient_count * 4 * layout_count(p); n++) {
        const int set = n / rows_of[op].count % gradient_count, rest = n / rows_of[op].count / gradient_count;
        const uint32_t rows = rows_of[op].at[n % rows_of[op].count], gradients = p->gradients & gradient_sets[set];
        const bool repeated = set > 1 && (gradients == 0 || gradients == p->gradients);
        const bool stats = op == SKL_OP_ATTENTION_STATS;
        const bool dots_of_one_head = !stats && (rows & SKL_ROW_DOT_T) != 0 && !skl_has_teacher_groups(p);
        if (repeated || dots_of_one_head)
            continue;
        const skl_cuda_layout layout = layout_at(rest / 4);
        const skl_cuda_request request = {.op = op,
                                          .rows = stats ? 0 : rows,
                                          .stats = stats ? rows : 0,
                                          .gradients = has_gradients(op) ? gradients : 0,
                                          .lse_given = rest % 2,
                                          .key_lengths = rest / 2 % 2 && !p->packed,
                                          .keys = op == SKL_OP_PARTIAL && rest % 2 ? p->len_k / 16 : p->len_k};
        check_request(checked, &request, &layout);
    }
}

static void check_plan(checked_plan *checked)
{
    for (int op = 0; op < OP_COUNT; op++)
        if (skl_op_check_for(&checked->plan->problem, (skl_op)op) == SKL_OK)
            check_op(checked, (skl_op)op);
}

static int64_t check_kernel(const test_case *c, const char *gpu, int deterministic, const char *kernel)
{
    skl_plan *const plan = plan_for(c, gpu, deterministic, kernel);
    checked_plan checked = {.test_case = c, .gpu = gpu, .kernel = kernel, .plan = plan};
    if (plan != NULL)
        check_plan(&checked);
    skl_plan_destroy(plan);
    return checked.selections;
}

/* Checks a case on every GPU. Only Hopper has kernels that a deterministic call avoids, and an H200 is an H100. */
static int64_t check_gpus(const test_case *c)
{
    int64_t selections = check_kernel(c, "h100", 1, NULL);
    for (int gpu = 0; gpu < GPU_COUNT; gpu++)
        if (strcmp(gpus[gpu], "h200") != 0)
            selections += check_kernel(c, gpus[gpu], 0, NULL);
    return selections;
}

static void test_no_request_needs_more_than_the_plan(void **state)
{
    (void)state;
    int64_t selections = 0;
    for (size_t n = 0; n < test_case_count; n++)
        selections += check_gpus(&test_cases[n]);
    printf("%lld selections\n", (long long)selections);
}

/* A problem of a size that GPUs are used for: the case table has small ones, whose keys are rarely split. */
static test_case draw_large(test_random *random)
{
    static const int64_t lengths[] = {0, 1, 64, 127, 500, 1024, 1500, 2048, 4096, 8192, 32768, 131072};
    static const int64_t dims[] = {8, 33, 40, 64, 80, 96, 128, 136, 192, 256, 300},
                         heads[] = {1, 2, 4, 8, 16, 32, 64};
    static const int64_t groups[] = {2, 3, 4, 5, 8, 9, 16};
    enum { OF_ONE_HEAD, OF_GROUPS, OF_INDEXER, OF_ATTENTION, OF_SINKS, KIND_COUNT };
#define ONE_OF(array) (array)[random_between(random, 0, (int64_t)COUNT_OF(array) - 1)]
    const int64_t kind = random_between(random, 0, KIND_COUNT - 1), types = random_between(random, 0, 5);
    test_case c = {.name = "large", .len_q = ONE_OF(lengths), .len_k = ONE_OF(lengths), .heads_s = ONE_OF(heads)};
    c.batch = random_between(random, 1, random_between(random, 1, 40));
    c.dim_t = ONE_OF(dims), c.dim_s = ONE_OF(dims);
    c.dtype_s = types < 3 ? SKL_BF16 : types < 5 ? SKL_F16 : SKL_F32;
    c.dtype_t = random_between(random, 0, 9) == 0 ? SKL_BF16 : c.dtype_s;
    c.grad_f32 = random_between(random, 0, 3) == 0;
    c.direction = random_between(random, 0, 3) == 0 ? SKL_KL_REVERSE : SKL_KL_FORWARD;
    c.causal = (int32_t)random_between(random, 0, 1);
    c.bounds = random_between(random, 0, 5) == 0 ? BOUNDS_RANDOM : BOUNDS_NONE;
    c.softcap_t = random_between(random, 0, 5) == 0 ? 30 : 0;
    c.without = random_between(random, 0, 1) ? 0 : (uint32_t)random_between(random, 0, 15);
    c.heads_t = kind == OF_GROUPS ? c.heads_s * ONE_OF(groups) : c.heads_s;
    c.key_heads_t = random_between(random, 0, 2) == 0, c.key_heads_s = random_between(random, 0, 2) == 0;
    c.attention = kind == OF_ATTENTION, c.sinks = kind == OF_SINKS;
    if (kind == OF_INDEXER) {
        c.heads_s = 1, c.key_heads_s = 0, c.without = 0;
        c.index_heads = random_between(random, 1, 64);
        c.top_k = random_between(random, 0, 1) ? random_between(random, 1, 2048) : 0;
        c.pool = (skl_pool)random_between(random, 0, 2);
        if (c.pool != SKL_POOL_NONE) {
            c.pool_size = ONE_OF(dims);
            c.pool_heads = (skl_pool_heads)random_between(random, 0, 1);
            c.pool_blocks = (skl_pool_blocks)random_between(random, 0, 2);
        }
    }
#undef ONE_OF
    return c;
}

static void test_no_request_of_a_large_problem_needs_more_than_the_plan(void **state)
{
    (void)state;
    /* A deterministic call for dk_s alone has a forward, whose keys Hopper splits more than other GPUs, and a table
     * of its row bounds. */
    const test_case split = {"split",         SHAPE(1, 4096, 4096), HEADS(1, 1),   DIMS(64, 64),
                             TYPES(F16, F16), STUDENT_ONLY,         BOUNDS(RANDOM)};
    (void)check_gpus(&split);
    /* Rows of groups in strips take more memory without dot_t, which is computed a part of the slots at a time. */
    const test_case groups = {"groups", SHAPE(8, 2560, 2560), HEADS(64, 32), DIMS(8, 8), TYPES(BF16, BF16), REVERSE};
    (void)check_gpus(&groups);
    test_random random = random_for("large problems");
    for (int n = 0; n < 200; n++) {
        const test_case c = draw_large(&random);
        (void)check_gpus(&c);
    }
}

static void test_no_request_of_a_named_kernel_needs_more_than_the_plan(void **state)
{
    (void)state;
    const skl_cuda_kernel *kernel = NULL;
    for (int32_t k = 0; (kernel = skl_cuda_kernel_at(k)) != NULL; k++)
        for (size_t n = 0; n < test_case_count && skl_cuda_has_plans(kernel); n++)
            (void)check_kernel(&test_cases[n], "h100", 0, kernel->name);
}

/* ---- Reasons --------------------------------------------------------------------------------------------------- */

#define H100     "h100"
#define A100     "a100"
#define BOTH     NULL
#define FORWARD  SKL_OP_FORWARD
#define BACKWARD SKL_OP_BACKWARD
#define ONE_PASS SKL_OP_FORWARD_BACKWARD
#define CARRIED  SKL_OP_ATTENTION_BACKWARD

/* Cases of the table below. */
#define TWO    "two heads", SHAPE(1, 64, 64), HEADS(2, 2)
#define GROUP  "a group", SHAPE(1, 64, 64), HEADS(4, 2)
#define JOINT  "joint", SHAPE(1, 200, 300), HEADS(2, 2)
#define TALL   "tall", SHAPE(4, 102400, 8), HEADS(1, 1)
#define EVEN   "even", SHAPE(2, 96, 96), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16)
#define BLOCKS "blocks", SHAPE(1, 256, 512), HEADS(8, 1), INDEXER(2), POOL(MAX, MEAN, COMPLETE, 64)
#define B16    TYPES(BF16, BF16)
#define F_16   TYPES(F16, F16)

/* Words of explanations. */
#define BEST          "best kernel"
#define ABOVE         "a head size above those of the kernels"
#define FUSED         ", fused backward"
#define IN_STRIPS     "teacher gradients of a group: in strips"
#define TALL_TILES    "fused backward, 192 queries per tile"
#define ALL_FOUR      "all four gradients"
#define JOINT_KERNEL  "dq and dk of both sides: cuda_sm90_bf16_joint, joint backward"
#define STUDENT_GROUP "gradients of the student: cuda_sm80_bf16_groups, gradients"
#define TEACHER_GROUP "gradients of the teacher: cuda_sm80_"

typedef struct reason {
    const char *gpu; /* NULL: both */
    skl_op op;
    const char *launch, *words; /* in the explanation; launch NULL: refused with these words */
    test_case c;
} reason;

/* clang-format off */
#define ROW(gpu, op, launch, words, ...) {gpu, op, launch, words, {__VA_ARGS__}}
/* clang-format on */
static const reason reasons[] = {
    /* Strides and addresses that copies cannot read. */
    ROW(BOTH, FORWARD, "cuda_general", "not a multiple of 16 bytes", EVEN, LAYOUT(GAPS)),
    ROW(BOTH, FORWARD, "cuda_general", "not a multiple of 16 bytes", EVEN, LAYOUT(MISALIGNED)),

    /* Problems that tensor cores do not do. Odd head sizes of up to 128 are two-term rows on Hopper. */
    ROW(H100, FORWARD, "cuda_general", ABOVE, TWO, DIMS(160, 64)),
    ROW(A100, FORWARD, "cuda_general", "f32 or mixed types: no tensor cores", TWO, DIMS(160, 64)),
    ROW(BOTH, FORWARD, "cuda_general", "the reverse KL: no tensor cores for", GROUP, DIMS(64, 136), B16, REVERSE),
    ROW(H100, FORWARD, "cuda_general", ABOVE, TWO, DIMS(132, 60), F_16),
    ROW(A100, FORWARD, "cuda_general", "not a multiple of 8", TWO, DIMS(132, 60), F_16),

    /* The kernel for a pair of head sizes; the padded one for the gradients that it does not compute. */
    ROW(H100, BACKWARD, "dq_s and dk_s: cuda_sm90_bf16_256_128" FUSED, BEST, TWO, DIMS(256, 96), B16),
    ROW(H100, BACKWARD, "dk_t: cuda_sm90_bf16_256, dk", "of more than 128 dimensions", TWO, DIMS(256, 96), B16),
    ROW(H100, FORWARD, "forward: cuda_sm90_bf16_128_64", BEST, TWO, DIMS(64, 128), B16),
    ROW(H100, BACKWARD, "dq_t and dk_t: cuda_sm90_bf16_128_64" FUSED, BEST, TWO, DIMS(64, 128), B16),
    ROW(H100, FORWARD, "forward: cuda_sm90_bf16_96_96", BEST, TWO, DIMS(80, 80), B16),
    ROW(H100, FORWARD, "forward: cuda_sm90_bf16_128, softcap", BEST, TWO, DIMS(80, 80), B16, SOFTCAPS(0, 30)),

    /* The reverse KL and gradients of the teacher are computed in strips; Hopper has softcaps without them. Tiles
     * have groups of up to eight heads where Hopper's own kernels have none. */
    ROW(BOTH, FORWARD, "cuda_sm80_bf16_groups, rows", BEST, GROUP, DIMS(64, 64), B16, REVERSE, STUDENT_ONLY),
    ROW(BOTH, BACKWARD, STUDENT_GROUP, BEST, GROUP, DIMS(64, 64), B16, REVERSE, STUDENT_ONLY),
    ROW(BOTH, FORWARD, "forward: cuda_sm80_bf16_groups, rows", IN_STRIPS, GROUP, DIMS(64, 64), B16),
    ROW(BOTH, BACKWARD, TEACHER_GROUP "bf16_groups, gradients", IN_STRIPS, GROUP, DIMS(64, 64), B16),
    ROW(BOTH, BACKWARD, "dk_t: cuda_general, dk", "a group with more than 128", GROUP, DIMS(136, 64), B16),
    ROW(BOTH, FORWARD, "forward: cuda_general", ABOVE, GROUP, DIMS(64, 264), B16, STUDENT_ONLY),
    ROW(H100, BACKWARD, "cuda_sm90_bf16_groups" FUSED ", teacher groups, softcap", BEST, GROUP, DIMS(64, 64), B16,
        STUDENT_ONLY, SOFTCAPS(0, 30)),
    ROW(A100, BACKWARD, STUDENT_GROUP, BEST, GROUP, DIMS(64, 64), B16, STUDENT_ONLY, SOFTCAPS(0, 30)),
    ROW(H100, BACKWARD, "cuda_sm90_bf16_groups" FUSED ", teacher groups", BEST, GROUP, DIMS(64, 64), B16,
        STUDENT_ONLY),
    ROW(A100, BACKWARD, "cuda_sm80_bf16_group_tiles, dk, teacher groups", BEST, GROUP, DIMS(64, 64), B16,
        STUDENT_ONLY),
    ROW(BOTH, FORWARD, "forward: cuda_sm80_f16_group_tiles, teacher groups", BEST, "8 heads", SHAPE(1, 64, 64),
        HEADS(8, 1), DIMS(128, 64), F_16, STUDENT_ONLY),
    ROW(BOTH, FORWARD, "forward: cuda_sm80_f16_strips, rows", BEST, "9 heads", SHAPE(1, 64, 64), HEADS(9, 1),
        DIMS(128, 64), F_16, STUDENT_ONLY),
    ROW(BOTH, BACKWARD, TEACHER_GROUP "f16_groups, gradients", IN_STRIPS, "9 heads", SHAPE(1, 64, 64), HEADS(9, 1),
        DIMS(128, 64), F_16),

    /* Hopper's own kernels have softcaps where a model has them; elsewhere the next kernel that fits. */
    ROW(H100, FORWARD, "forward: cuda_sm90_bf16_256, softcap", BEST, TWO, DIMS(192, 192), B16, SOFTCAPS(30, 30)),
    ROW(H100, BACKWARD, "dk_t: cuda_sm90_bf16_256, dk, softcap", BEST, TWO, DIMS(192, 192), B16, SOFTCAPS(30, 30)),
    ROW(H100, FORWARD, "forward: cuda_sm80_f16_256", BEST, TWO, DIMS(192, 192), F_16, SOFTCAPS(30, 30)),
    ROW(H100, FORWARD, "forward: cuda_sm90_f16_256", BEST, TWO, DIMS(192, 192), F_16),
    ROW(H100, FORWARD, "forward: cuda_sm90_f32_128, softcap", "two-term rows", TWO, DIMS(64, 64), SOFTCAPS(0, 5)),

    /* Three dq warpgroups: gradients of B of 64 dimensions, long sequences, and 8 waves of tiles. */
    ROW(H100, BACKWARD, "dq_s and dk_s: cuda_sm90_bf16_64" FUSED, TALL_TILES, TALL, DIMS(64, 64), B16, STUDENT_ONLY),
    ROW(H100, BACKWARD, "dq_t and dk_t: cuda_sm90_bf16_64" FUSED ", 1 split", BEST, TALL, DIMS(64, 64), B16,
        .without = SKL_DQ_S | SKL_DK_S),
    ROW(H100, BACKWARD, "dq_s and dk_s: cuda_sm90_bf16_128_64" FUSED, TALL_TILES, TALL, DIMS(128, 64), B16),
    ROW(H100, BACKWARD, "dq_s and dk_s: cuda_sm90_bf16_128_64" FUSED ", 1 split", BEST, "few tiles",
        SHAPE(1, 102400, 8), HEADS(1, 1), DIMS(128, 64), B16),
    ROW(H100, BACKWARD, "dq_s and dk_s: cuda_sm90_bf16_128_64" FUSED ", 1 split", BEST, "short", SHAPE(50, 8191, 8),
        HEADS(1, 1), DIMS(128, 64), B16),
    ROW(H100, BACKWARD, "dq_s and dk_s: cuda_sm90_bf16_128" FUSED ", softcap", BEST, "capped", SHAPE(50, 8192, 8),
        HEADS(1, 1), DIMS(64, 64), B16, SOFTCAPS(0, 30)),

    /* One kernel for all four gradients of bf16 heads of up to 128 dimensions, where the KL is known. */
    ROW(H100, BACKWARD, JOINT_KERNEL, ALL_FOUR, JOINT, DIMS(64, 40), B16),
    ROW(H100, ONE_PASS, "dq_s and dk_s: cuda_sm90_bf16_64" FUSED, BEST, JOINT, DIMS(64, 40), B16),
    ROW(H100, BACKWARD, JOINT_KERNEL, ALL_FOUR, JOINT, DIMS(64, 40), B16, REVERSE, .grad_f32 = 1),
    ROW(H100, BACKWARD, "dq_t and dk_t: cuda_sm90_bf16_64" FUSED, BEST, JOINT, DIMS(64, 40), B16,
        .without = SKL_DK_T),
    ROW(H100, BACKWARD, JOINT_KERNEL, ALL_FOUR, JOINT, DIMS(128, 128), B16),
    ROW(H100, BACKWARD, "dq_t and dk_t: cuda_sm90_bf16_128_64" FUSED, BEST, JOINT, DIMS(128, 64), B16), /* a pair */
    ROW(H100, BACKWARD, "dq_s and dk_s: cuda_sm90_f16_64" FUSED, BEST, JOINT, DIMS(64, 40), F_16),

    /* Strips pool teachers of any head size, those of Hopper up to 128; lists of blocks run on the general kernel. */
    ROW(H100, FORWARD, "forward: cuda_sm90_bf16_strips, rows", BEST, BLOCKS, DIMS(128, 64), B16),
    ROW(BOTH, ONE_PASS, "blocks: cuda_general, blocks of rows", "keys are blocks of keys", BLOCKS, DIMS(128, 64),
        B16),
    ROW(H100, BACKWARD, "gradients: cuda_sm80_bf16_strips", BEST, BLOCKS, DIMS(136, 64), B16),
    ROW(A100, BACKWARD, "gradients: cuda_sm80_bf16_strips", BEST, BLOCKS, DIMS(128, 64), B16),
    ROW(BOTH, FORWARD, "forward: cuda_sm80_f16_strips, rows", BEST, BLOCKS, DIMS(576, 64), F_16),
    ROW(BOTH, FORWARD, "forward: cuda_general, rows", "a pooled teacher with lists of blocks", BLOCKS, DIMS(128, 64),
        B16, TOP_K(3)),
    ROW(H100, FORWARD, "forward: cuda_sm80_bf16_strips, rows", "no queries or no keys", "no block", SHAPE(1, 64, 90),
        HEADS(4, 1), INDEXER(2), POOL(MAX, MEAN, COMPLETE, 91), DIMS(64, 64), B16),

    /* The attention backward with the KL is on Hopper; where no kernel carries the KL, the call is refused. */
    ROW(H100, CARRIED, "forward: cuda_sm90", "1 split", TWO, DIMS(128, 64), B16, ATTENTION),
    ROW(H100, CARRIED, "dq_s, dk_s and dv_s: cuda_sm90_bf16_attention, attention backward with KL", "1 split", TWO,
        DIMS(128, 64), B16, ATTENTION),
    ROW(H100, CARRIED, "dq_s, dk_s and dv_s: cuda_sm90_f16_attention",
        "one kernel for the attention backward and the gradient of the KL", TWO, DIMS(128, 64), F_16, ATTENTION),
    ROW(H100, CARRIED, NULL, "(types or head sizes that no such kernel has)", TWO, DIMS(192, 64), F_16, ATTENTION),
    ROW(BOTH, CARRIED, NULL, "(teacher groups)", GROUP, DIMS(64, 64), B16, ATTENTION),
    ROW(BOTH, CARRIED, NULL, "(the reverse KL)", TWO, DIMS(64, 64), B16, ATTENTION, REVERSE),
    ROW(BOTH, CARRIED, NULL, "(a softcap)", TWO, DIMS(64, 64), B16, ATTENTION, SOFTCAPS(0, 5)),
    ROW(H100, CARRIED, NULL, "(f32, mixed types or an odd head size: two-term rows)", TWO, DIMS(64, 64), ATTENTION),
    ROW(H100, CARRIED, NULL, "(no queries or no keys)", "no keys", SHAPE(1, 64, 0), HEADS(2, 2), DIMS(64, 64), B16,
        ATTENTION),
    ROW(A100, CARRIED, NULL, "(a GPU other than Hopper)", TWO, DIMS(64, 64), ATTENTION),
    ROW(A100, CARRIED, NULL, "(a GPU other than Hopper)", "no keys", SHAPE(1, 64, 0), HEADS(2, 2), DIMS(64, 64), B16,
        ATTENTION),
};

/* The plan refuses the operation, for this reason, and says what to call instead. */
static void assert_refusal(const skl_plan *plan, skl_op op, const char *words)
{
    char text[64] = "old";
    assert_int_equal(skl_plan_supports(plan, op), 0);
    for (int asked = 0; asked < 2; asked++) {
        assert_non_null(strstr(skl_last_error(), words));
        assert_non_null(strstr(skl_last_error(), "; call skl_forward_backward and the backward of your attention"));
        assert_int_equal(skl_plan_explain(plan, NULL, op, text, sizeof text), 0);
        assert_string_equal(text, "");
    }
    assert_int_equal(skl_plan_workspace_size(plan, op), 0);
}

static void check_reason(const reason *r, const char *gpu)
{
    static char text[TEXT_SIZE];
    skl_plan *const plan = plan_for(&r->c, gpu, 0, NULL);
    if (r->launch == NULL) {
        assert_refusal(plan, r->op, r->words);
    } else if (r->c.layout == LAYOUT_CONTIGUOUS) {
        skl_plan_explain(plan, NULL, r->op, text, sizeof text);
    } else {
        fixture f;
        fixture_create(&f, &r->c);
        skl_plan_explain(plan, &f.inputs, r->op, text, sizeof text);
        fixture_destroy(&f);
    }
    if (r->launch && (strstr(text, r->launch) == NULL || strstr(text, r->words) == NULL))
        fail_msg("%s on %s: %s\nmust name %s and: %s", r->c.name, gpu, text, r->launch, r->words);
    skl_plan_destroy(plan);
}

static void test_reasons(void **state)
{
    (void)state;
    for (size_t n = 0; n < COUNT_OF(reasons); n++) {
        check_reason(&reasons[n], reasons[n].gpu ? reasons[n].gpu : H100);
        if (reasons[n].gpu == NULL)
            check_reason(&reasons[n], A100);
    }
    const test_case carried = {TWO, DIMS(128, 64), F_16, ATTENTION};
    skl_plan *const deterministic = plan_for(&carried, H100, 1, NULL);
    assert_refusal(deterministic, CARRIED, "(deterministic gradients)");
    skl_plan_destroy(deterministic);
}

/* ---- GPUs ------------------------------------------------------------------------------------------------------ */

static void test_this_test_knows_every_gpu(void **state)
{
    (void)state;
    char names[256] = "";
    for (int gpu = 0; gpu < GPU_COUNT; gpu++) {
        assert_string_equal(skl_cuda_device_named(gpus[gpu])->name, gpus[gpu]);
        strcat(strcat(names, gpus[gpu]), gpu + 2 < GPU_COUNT ? ", " : gpu + 1 < GPU_COUNT ? " or " : "");
    }
    assert_string_equal(skl_cuda_device_names(), names);
    assert_null(skl_cuda_device_named("h1"));
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--write") == 0)
        return write_file(argv[2]);
    if (argc != 2) {
        fprintf(stderr, "usage: test_selection [--write] FILE\n");
        return 2;
    }
    golden_path = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_this_test_knows_every_gpu),
        cmocka_unit_test(test_every_case_is_answered_as_in_the_file),
        cmocka_unit_test(test_reasons),
        cmocka_unit_test(test_no_request_needs_more_than_the_plan),
        cmocka_unit_test(test_no_request_of_a_large_problem_needs_more_than_the_plan),
        cmocka_unit_test(test_no_request_of_a_named_kernel_needs_more_than_the_plan),
    };
    return test_run("selection", tests, COUNT_OF(tests));
}
