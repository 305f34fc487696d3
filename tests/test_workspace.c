/* The table of workspace sizes in include/streamkl.h, read from there: on every case of the case table, at N and 2 N,
 * no plan needs more than the rows that apply, and no figure could be half as large. GPUs need not be here. */
#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "support.h"

/* ---- A plan ------------------------------------------------------------------------------------------------- */

enum { THREADS = 1, MIB = 1 << 20, COUNTS_MAX = 16, CONDITIONS_MAX = 16 };

/* What the table may name, and what it is for one problem. */
typedef struct counted {
    const char *text;
    double count;
} counted;

typedef struct condition {
    const char *text;
    bool holds;
} condition;

/* A case with other lengths, on a device, and what the columns "for each" and "where" stand for. */
typedef struct setting {
    skl_problem problem; /* key heads filled in */
    const char *gpu;     /* NULL: the CPU */
    int32_t deterministic;
    counted counts[COUNTS_MAX];
    condition conditions[CONDITIONS_MAX];
} setting;

static bool is_16_bit(const skl_problem *p, uint32_t gradient, skl_dtype dtype)
{
    return p->gradients & gradient && dtype != SKL_F32 && !p->grad_f32;
}

/* Elements of the 16-bit dk of one head. */
static double elements_of_dk(const skl_problem *p)
{
    const int64_t dims = is_16_bit(p, SKL_DK_T, p->dtype_t) * p->dim_t +
                         (is_16_bit(p, SKL_DK_S, p->dtype_s) + is_16_bit(p, SKL_DV_S, p->dtype_s)) * p->dim_s;
    return (double)(p->len_k * dims);
}

static void set_counts(setting *s)
{
    const skl_problem *const p = &s->problem;
    const int64_t block = p->pool_size > 0 ? p->pool_size : 1;
    const double rows = (double)p->batch * (double)p->len_q, rows_s = rows * (double)p->heads_s;
    const double blocks = (double)((p->len_k + block - 1) / block);
    const double dk_t = p->gradients & SKL_DK_T ? rows * (double)(p->key_heads_t * p->dim_t) : 0;
    const double dk_s = p->gradients & SKL_DK_S ? rows * (double)(p->key_heads_s * p->dim_s) : 0;
    const counted counts[COUNTS_MAX] = {
        {"thread with work", THREADS},
        {"thread and element of a head's dk", THREADS * elements_of_dk(p)},
        {"call", 1},
        {"row and student head", rows_s},
        {"row and teacher head", rows * (double)p->heads_t},
        {"key", rows},
        {"row and block", rows + (double)p->batch * blocks},
        {"block of one sequence", blocks},
        {"key of one sequence", (double)p->len_k},
        {"row of q_t, q_s, k_t and k_s", rows * (double)(p->heads_t + p->heads_s + p->key_heads_t + p->key_heads_s)},
        {"element of dq_s", rows_s * (double)p->dim_s},
        {"element of dk_s", dk_s},
        {"element of dk_t and dk_s", dk_t + dk_s},
    };
    memcpy(s->counts, counts, sizeof counts);
}

static void set_conditions(setting *s)
{
    const skl_problem *const p = &s->problem;
    const bool indexer = p->student == SKL_STUDENT_INDEXER, groups = !indexer && p->heads_t != p->heads_s;
    const bool summed = (is_16_bit(p, SKL_DK_T, p->dtype_t) && p->dim_t <= 128) ||
                        (is_16_bit(p, SKL_DK_S, p->dtype_s) && p->dim_s <= 128);
    const bool other_types = p->dtype_t == SKL_F32 || p->dtype_s == SKL_F32 || p->dtype_t != p->dtype_s;
    const bool odd_sizes = p->dim_t % 8 != 0 || p->dim_s % 8 != 0;
    const condition conditions[CONDITIONS_MAX] = {
        {"CPU", s->gpu == NULL},
        {"GPU", s->gpu != NULL},
        {"Hopper", s->gpu != NULL && s->gpu[0] == 'h'},
        {"row bounds", p->row_bounds != 0},
        {"16-bit dk", elements_of_dk(p) > 0},
        {"summed dk", summed && !s->deterministic},
        {"two-term rows", !indexer && p->dim_t <= 128 && p->dim_s <= 128 && (other_types || odd_sizes)},
        {"pooled teacher", p->pool != SKL_POOL_NONE},
        {"groups or indexer", groups || indexer},
        {"groups", groups},
        {"indexer", indexer},
    };
    memcpy(s->conditions, conditions, sizeof conditions);
}

static setting setting_of(const test_case *c, int64_t length, const char *gpu, int32_t deterministic)
{
    setting s = {.problem = case_problem(c), .gpu = gpu, .deterministic = deterministic};
    skl_problem *const p = &s.problem;
    p->len_q = p->len_k = length;
    p->batch = p->batch > 0 ? p->batch : 1;
    if (p->packed)
        p->total_q = p->total_k = p->batch * length;
    p->key_heads_t = p->key_heads_t ? p->key_heads_t : p->heads_t;
    p->key_heads_s = p->key_heads_s ? p->key_heads_s : p->heads_s;
    set_counts(&s);
    set_conditions(&s);
    return s;
}

static skl_plan *plan_of(const setting *s)
{
    skl_options options = skl_options_default();
    options.threads = s->gpu ? 0 : THREADS;
    options.device = s->gpu ? SKL_CUDA : SKL_CPU;
    options.gpu = s->gpu;
    options.deterministic = s->deterministic;
    skl_plan *plan = NULL;
    const skl_status status = skl_plan_create(&plan, &s->problem, &options);
    if (status != SKL_OK && status != SKL_ERROR_UNSUPPORTED)
        fail_msg("%s", skl_last_error());
    return plan;
}

/* The column "operations". */
static const struct {
    const char *text;
    uint32_t ops; /* bits of skl_op */
} operations[] = {
    {"all", 127},
    {"gradients", 1 << 1 | 1 << 2 | 1 << 4},
    {"forward_backward", 1 << 2},
    {"attention_backward", 1 << 4},
    {"attention_stats", 1 << 6},
    {"all but backward", 63 & ~(1 << 1)},
};

/* ---- The table ------------------------------------------------------------------------------------------------ */

enum { ROWS_MAX = 32, COLUMNS = 5 };

typedef struct table_row {
    char line[160];
    double bytes;
    int counted; /* number of a count of a setting */
    bool grows;
    uint32_t ops, conditions; /* bits of skl_op; bits of the conditions of a setting */
    bool possible;            /* a plan of this build can meet its conditions */
    bool needed;              /* with half the figure, a plan would need more than the table says */
} table_row;

static table_row table[ROWS_MAX];
static int table_rows;

/* Cuts a line into columns, which two spaces separate. */
static int columns_of(char *line, char *columns[COLUMNS])
{
    int count = 0;
    for (char *at = line; *at != '\0' && count < COLUMNS;) {
        columns[count++] = at;
        char *const end = strstr(at, "  ");
        if (end == NULL)
            break;
        *end = '\0';
        at = end + 1 + strspn(end + 1, " ");
    }
    return count;
}

static void parse_conditions(table_row *row, const setting *any, char *text)
{
    for (char *part = strtok(text, ","); part != NULL; part = strtok(NULL, ",")) {
        int n = 0;
        while (any->conditions[n].text && strcmp(any->conditions[n].text, part + strspn(part, " ")) != 0)
            n++;
        if (any->conditions[n].text == NULL)
            fail_msg("%s: unknown condition", row->line);
        row->conditions |= 1U << n;
    }
}

static void parse_row(const char *line)
{
    const setting any = setting_of(&test_cases[0], 1, NULL, 0); /* for the texts of counts and conditions */
    char text[160], *columns[COLUMNS] = {NULL}, unit[8] = "";
    table_row *const row = &table[table_rows++];
    assert_true(table_rows < ROWS_MAX);
    snprintf(row->line, sizeof row->line, "%s", line);
    snprintf(text, sizeof text, "%s", line);
    if (columns_of(text, columns) != COLUMNS || sscanf(columns[0], "%lf %7s", &row->bytes, unit) != 2)
        fail_msg("%s: not a row of five columns", line);
    row->bytes *= strcmp(unit, "MiB") == 0 ? MIB : 1;
    row->grows = strcmp(columns[2], "O(N)") == 0;
    while (any.counts[row->counted].text && strcmp(any.counts[row->counted].text, columns[1]) != 0)
        row->counted++;
    for (size_t n = 0; n < COUNT_OF(operations); n++)
        if (strcmp(operations[n].text, columns[3]) == 0)
            row->ops = operations[n].ops;
    parse_conditions(row, &any, columns[4]);
    if (any.counts[row->counted].text == NULL || row->ops == 0)
        fail_msg("%s: unknown count or operations", line);
}

/* Rows follow the heading "at most" and end at an empty line of the comment. */
static int read_table(void **state)
{
    (void)state;
    FILE *const file = fopen(SKL_HEADER, "r");
    assert_non_null(file);
    char line[160];
    bool inside = false;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        const char *const text = line + strspn(line, " *");
        if (inside && *text == '\0')
            break;
        if (inside)
            parse_row(text);
        inside = inside || strncmp(text, "at most    for each", 19) == 0;
    }
    fclose(file);
    return table_rows == 0;
}

/* ---- Comparison ----------------------------------------------------------------------------------------------- */

static double row_bytes(const table_row *row, const setting *s, int op)
{
    bool applies = row->ops >> op & 1;
    for (int n = 0; n < CONDITIONS_MAX; n++)
        applies = applies && (s->conditions[n].holds || !(row->conditions >> n & 1));
    return applies ? row->bytes * s->counts[row->counted].count : 0;
}

static double table_bytes(const setting *s, int op)
{
    double sum = 0;
    for (int n = 0; n < table_rows; n++)
        sum += row_bytes(&table[n], s, op);
    return sum;
}

static double plan_bytes(const skl_plan *plan, int op)
{
    return (double)skl_plan_workspace_size(plan, (skl_op)op);
}

static void check_size(const test_case *c, const setting *s, const skl_plan *plan, int op)
{
    const double needed = plan_bytes(plan, op), allowed = table_bytes(s, op);
    if (needed > allowed)
        fail_msg("%s, N=%d, %s, op %d: %.0f bytes; the table says %.0f", c->name, (int)s->problem.len_q,
                 s->gpu ? s->gpu : "CPU", op, needed, allowed);
    for (int n = 0; n < table_rows; n++) {
        const double bytes = row_bytes(&table[n], s, op);
        table[n].possible = table[n].possible || bytes > 0;
        table[n].needed = table[n].needed || (bytes > 0 && needed > allowed - bytes / 2);
    }
}

/* From N to 2 N a plan grows as the rows of growth O(N) do; sizes are rounded to a few hundred bytes. */
static void check_growth(const test_case *c, const setting *at_n, const setting *at_2n, double growth, int op)
{
    enum { ROUNDING = 1 << 16 };
    double allowed = 0;
    for (int n = 0; n < table_rows; n++) {
        const double bytes = row_bytes(&table[n], at_n, op), added = row_bytes(&table[n], at_2n, op) - bytes;
        if (bytes > 0 && (added > 0) != table[n].grows)
            fail_msg("%s: the column growth is wrong", table[n].line);
        allowed += table[n].grows ? added : 0;
    }
    for (int n = 0; n < table_rows; n++) {
        const double added = row_bytes(&table[n], at_2n, op) - row_bytes(&table[n], at_n, op);
        table[n].needed = table[n].needed || (added > ROUNDING && growth > allowed - added / 2);
    }
    if (growth > allowed + ROUNDING)
        fail_msg("%s, N=%d, %s, op %d: grows by %.0f bytes; the table says %.0f", c->name, (int)at_n->problem.len_q,
                 at_n->gpu ? at_n->gpu : "CPU", op, growth, allowed);
}

/* Constants hide the growth of short sequences, and bounded rows the constants of long ones. */
static void check_case(const test_case *c, int64_t length, const char *gpu, int32_t deterministic)
{
    enum { LONG = 1 << 20 };
    const setting at_n = setting_of(c, length, gpu, deterministic);
    const setting at_2n = setting_of(c, 2 * length, gpu, deterministic);
    skl_plan *const plan = plan_of(&at_n), *const doubled = plan_of(&at_2n);
    for (int op = SKL_OP_FORWARD; plan && doubled && op <= SKL_OP_ATTENTION_STATS; op++) {
        const bool carried = op == SKL_OP_ATTENTION_FORWARD || op == SKL_OP_ATTENTION_BACKWARD;
        if (carried && !(at_n.problem.gradients & SKL_DV_S))
            continue;
        check_size(c, &at_n, plan, op);
        check_size(c, &at_2n, doubled, op);
        if (length >= LONG)
            check_growth(c, &at_n, &at_2n, plan_bytes(doubled, op) - plan_bytes(plan, op), op);
    }
    skl_plan_destroy(plan);
    skl_plan_destroy(doubled);
}

static void test_plans_need_what_the_header_says(void **state)
{
    (void)state;
    static const char *const gpus[] = {NULL, "a100", "h200", "rtx5090"};
    static const int64_t lengths[] = {512, 4096, 1 << 20};
    for (size_t n = 0; n < test_case_count; n++)
        for (size_t k = 0; k < COUNT_OF(gpus) * COUNT_OF(lengths) * 2; k++)
            check_case(&test_cases[n], lengths[k % 3], gpus[k / 3 % 4], k >= 12);
    for (int n = 0; n < table_rows; n++)
        if (table[n].possible && !table[n].needed)
            fail_msg("%s: no plan needs half of it", table[n].line);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_plans_need_what_the_header_says)};
    return cmocka_run_group_tests_name("workspace", tests, read_table, NULL);
}
