#include "base/problem.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/status.h"
#include "base/structs.h"

#define WINDOW_UNLIMITED (SKL_LENGTH_MAX * 4)

typedef struct int_rule {
    const char *name;
    int64_t value, lowest, highest;
} int_rule;

static skl_status check_ranges(const skl_problem *p)
{
    const int_rule rules[] = {
        {"dtype_t", p->dtype_t, SKL_F32, SKL_BF16},
        {"dtype_s", p->dtype_s, SKL_F32, SKL_BF16},
        {"grad_f32", p->grad_f32, 0, 1},
        {"gradients", p->gradients, 0,
         SKL_DQ_T | SKL_DK_T | SKL_DQ_S | SKL_DK_S | SKL_DW_S | SKL_DSINK_T | SKL_DSINK_S | SKL_DV_S},
        {"student", p->student, SKL_STUDENT_ATTENTION, SKL_STUDENT_INDEXER},
        {"direction", p->direction, SKL_KL_FORWARD, SKL_KL_REVERSE},
        {"batch", p->batch, 0, INT32_MAX},
        {"len_q", p->len_q, 0, SKL_LENGTH_MAX},
        {"len_k", p->len_k, 0, SKL_LENGTH_MAX},
        {"heads_t", p->heads_t, 1, INT32_MAX},
        {"heads_s", p->heads_s, 1, INT32_MAX},
        {"key_heads_t", p->key_heads_t, 0, INT32_MAX},
        {"key_heads_s", p->key_heads_s, 0, INT32_MAX},
        {"dim_t", p->dim_t, 1, skl_is_indexer(p) ? SKL_INDEXED_DIM_MAX : SKL_DIM_MAX},
        {"dim_s", p->dim_s, 1, SKL_DIM_MAX},
        {"causal", p->causal, 0, 1},
        {"window_left", p->window_left, -1, SKL_LENGTH_MAX},
        {"window_right", p->window_right, -1, SKL_LENGTH_MAX},
        {"positions", p->positions, SKL_POSITIONS_BOTTOM_RIGHT, SKL_POSITIONS_OFFSET},
        {"offset_q", p->offset_q, -SKL_LENGTH_MAX, SKL_LENGTH_MAX},
        {"offset_k", p->offset_k, -SKL_LENGTH_MAX, SKL_LENGTH_MAX},
        {"packed", p->packed, 0, 1},
        {"total_q", p->total_q, 0, INT32_MAX},
        {"total_k", p->total_k, 0, INT32_MAX},
        {"dtype_w", p->dtype_w, SKL_F32, SKL_BF16},
        {"index_heads", p->index_heads, skl_is_indexer(p), SKL_INDEX_HEADS_MAX},
        {"index_linear", p->index_linear, 0, 1},
        {"top_k", p->top_k, 0, INT32_MAX},
        {"row_bounds", p->row_bounds, 0, 1},
        {"sinks", p->sinks, 0, 1},
        {"link_s", p->link_s, SKL_LINK_SOFTMAX, SKL_LINK_LINEAR},
        {"pool", p->pool, SKL_POOL_NONE, SKL_POOL_SUM},
        {"pool_heads", p->pool_heads, SKL_POOL_HEADS_MEAN, SKL_POOL_HEADS_MAX},
        {"pool_blocks", p->pool_blocks, SKL_POOL_COMPLETE, SKL_POOL_VISIBLE},
        {"pool_size", p->pool_size, 0, SKL_LENGTH_MAX},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const int_rule *const rule = &rules[i];
        if (rule->value < rule->lowest || rule->value > rule->highest)
            return skl_fail(SKL_ERROR_ARGUMENT, "%s=%" PRId64 ": must be %" PRId64 "..%" PRId64, rule->name,
                            rule->value, rule->lowest, rule->highest);
    }
    return SKL_OK;
}

static skl_status check_multiple(const char *name, int64_t value, const char *of_name, int64_t of)
{
    if (value % of == 0)
        return SKL_OK;
    return skl_fail(SKL_ERROR_ARGUMENT, "%s=%" PRId64 ": must be a multiple of %s=%" PRId64, name, value, of_name,
                    of);
}

/* Only the bits of +0 stand for the default. Other zeros and subnormals are what a number becomes that a float can
 * hardly represent or not at all, so they are refused. The bits decide: a thread that flushes subnormals, as PyTorch
 * can, would compare them equal to 0. */
static skl_status check_float(const char *name, float value, float lowest, const char *accepted)
{
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t exponent = bits >> 23 & 0xFFU, mantissa = bits & 0x7FFFFFU;
    if (bits != 0 && exponent == 0)
        return skl_fail(SKL_ERROR_ARGUMENT, "%s=%s%g: must be 0, or at least %g in magnitude", name,
                        bits >> 31 ? "-" : "", (double)mantissa * 0x1p-149, (double)FLT_MIN);
    if (isfinite(value) && value >= lowest)
        return SKL_OK;
    return skl_fail(SKL_ERROR_ARGUMENT, "%s=%g: must be %s", name, (double)value, accepted);
}

/* Rules that join several fields. The first broken one is reported as "NAME=VALUE: RULE". */
static skl_status check_combinations(const skl_problem *p)
{
    const bool offset = p->positions == SKL_POSITIONS_OFFSET, linear = p->link_s == SKL_LINK_LINEAR;
    const bool indexer = skl_is_indexer(p), pooled = skl_is_pooled(p);
    const uint32_t of_teacher = p->gradients & (SKL_DQ_T | SKL_DK_T), of_weights = p->gradients & SKL_DW_S;
    const uint32_t of_sinks = p->gradients & (SKL_DSINK_T | SKL_DSINK_S), of_values = p->gradients & SKL_DV_S;
    const char *const with_packed = "must be 0 unless packed=1";
    const char *const with_offsets = "must be 0 unless positions=SKL_POSITIONS_OFFSET";
    const char *const with_indexer = "must be 0 unless student=SKL_STUDENT_INDEXER";
    const char *const with_pool = "must be 0 unless pool is set";
    const char *const not_linear = "must be 0 with link_s=SKL_LINK_LINEAR";
    const struct {
        bool broken;
        const char *name;
        double value;
        const char *rule;
    } rules[] = {
        {!p->packed && p->total_q != 0, "total_q", (double)p->total_q, with_packed},
        {!p->packed && p->total_k != 0, "total_k", (double)p->total_k, with_packed},
        {!offset && p->offset_q != 0, "offset_q", (double)p->offset_q, with_offsets},
        {!offset && p->offset_k != 0, "offset_k", (double)p->offset_k, with_offsets},
        {!indexer && p->index_heads != 0, "index_heads", (double)p->index_heads, with_indexer},
        {!indexer && p->dtype_w != 0, "dtype_w", p->dtype_w, with_indexer},
        {!indexer && p->index_linear != 0, "index_linear", p->index_linear, with_indexer},
        {!indexer && p->top_k != 0, "top_k", (double)p->top_k, with_indexer},
        {!indexer && of_weights != 0, "gradients & SKL_DW_S", of_weights, with_indexer},
        {indexer && of_teacher != 0, "gradients", p->gradients,
         "an indexer's teacher is fixed; must be SKL_DQ_S | SKL_DK_S | SKL_DW_S or fewer"},
        {indexer && p->softcap_s != 0.0F, "softcap_s", (double)p->softcap_s, "must be 0 for an indexer"},
        {indexer && p->sinks, "sinks", p->sinks,
         "must be 0 for an indexer; a given lse_t that includes the teacher's sink gives the KL on the keys"},
        {!p->sinks && of_sinks != 0, "gradients", p->gradients, "SKL_DSINK_* need sinks=1"},
        {linear && p->student != 0, "student", p->student, not_linear},
        {linear && p->direction != 0, "direction", p->direction, not_linear},
        {linear && of_values != 0, "gradients & SKL_DV_S", of_values, not_linear},
        {linear && p->scale_s != 0.0F, "scale_s", (double)p->scale_s, not_linear},
        {linear && p->softcap_s != 0.0F, "softcap_s", (double)p->softcap_s, not_linear},
        {!pooled && p->pool_heads != 0, "pool_heads", p->pool_heads, with_pool},
        {!pooled && p->pool_blocks != 0, "pool_blocks", p->pool_blocks, with_pool},
        {!pooled && p->pool_size != 0, "pool_size", (double)p->pool_size, with_pool},
        {pooled && !indexer, "pool", p->pool,
         "needs student=SKL_STUDENT_INDEXER; one with index_heads=1, index_linear=1 and weights of 1 is an "
         "attention"},
        {pooled && p->packed, "packed", p->packed, "must be 0 with pool; pad the sequences and give key_lengths"},
        {pooled && p->top_k > 0 && p->len_k > INT32_MAX, "len_k", (double)p->len_k,
         "must be at most 2147483647 with pool and top_k"},
        {pooled && p->pool_size == 0, "pool_size", 0.0, "must be 1 or more with pool"},
        {indexer && of_values != 0, "gradients", p->gradients, "SKL_DV_S needs student=SKL_STUDENT_ATTENTION"},
        {of_teacher != 0 && of_values != 0, "gradients", p->gradients,
         "with SKL_DV_S the teacher has no gradients; must be SKL_DQ_S | SKL_DK_S | SKL_DV_S or fewer"},
        {p->sinks && of_values != 0, "gradients", p->gradients, "SKL_DV_S needs sinks=0"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (rules[i].broken)
            return skl_fail(SKL_ERROR_ARGUMENT, rules[i].value == floor(rules[i].value) ? "%s=%.0f: %s" : "%s=%g: %s",
                            rules[i].name, rules[i].value, rules[i].rule);
    return SKL_OK;
}

static skl_status check_at_most(const char *name, int64_t value, const char *of_name, int64_t of)
{
    return value <= of ? SKL_OK
                       : skl_fail(SKL_ERROR_ARGUMENT, "%s=%" PRId64 ": must be at most %s=%" PRId64, name, value,
                                  of_name, of);
}

/* All rows of a tensor can be counted in 64 bits, also those of one sequence in an empty batch. */
static skl_status check_row_count(const skl_problem *p, const char *name, int64_t length)
{
    const int64_t sequences = p->packed || p->batch == 0 ? 1 : p->batch;
    int64_t rows = 0;
    if (__builtin_mul_overflow(sequences * p->heads_t, length, &rows) || rows > INT64_MAX / 64)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "batch=%" PRId64 " x heads_t=%" PRId64 " x %s=%" PRId64 ": too many rows for 64-bit sizes",
                        p->batch, p->heads_t, name, length);
    return SKL_OK;
}

/* Sinks with several teacher heads per student head. */
static skl_status check_sinks_of_groups(const skl_problem *p)
{
    const uint32_t of_teacher = SKL_DQ_T | SKL_DK_T | SKL_DSINK_T;
    if (!p->sinks || p->heads_t == p->heads_s)
        return SKL_OK;
    if (p->direction == SKL_KL_REVERSE)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "direction=%d: with sinks, KL(S || P) needs heads_t=%" PRId64 " to be heads_s=%" PRId64,
                        (int)p->direction, p->heads_t, p->heads_s);
    if (p->gradients & of_teacher)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "gradients=%" PRIu32 ": with sinks, teacher gradients need heads_t=%" PRId64
                        " to be heads_s=%" PRId64,
                        p->gradients, p->heads_t, p->heads_s);
    return SKL_OK;
}

static void fill_defaults(skl_problem *p)
{
    if (p->key_heads_t == 0)
        p->key_heads_t = p->heads_t;
    if (p->key_heads_s == 0)
        p->key_heads_s = p->heads_s;
    if (p->scale_t == 0.0F)
        p->scale_t = 1.0F / sqrtf((float)p->dim_t);
    if (p->link_s == SKL_LINK_LINEAR)
        p->scale_s = 1.0F;
    if (p->scale_s == 0.0F)
        p->scale_s = 1.0F / sqrtf((float)(skl_is_indexer(p) ? p->dim_s * p->index_heads : p->dim_s));
    if (p->window_left < 0)
        p->window_left = WINDOW_UNLIMITED;
    if (p->window_right < 0)
        p->window_right = WINDOW_UNLIMITED;
    if (p->causal)
        p->window_right = 0;
}

skl_status skl_op_check(skl_op op)
{
    const int value = (int)op;
    return value >= 0 && value < SKL_OP_COUNT
               ? SKL_OK
               : skl_fail(SKL_ERROR_ARGUMENT, "op=%d: must be 0..%d", value, SKL_OP_COUNT - 1);
}

skl_status skl_op_check_for(const skl_problem *p, skl_op op)
{
    if (op == SKL_OP_ATTENTION_STATS && p->link_s != SKL_LINK_SOFTMAX)
        return skl_fail(SKL_ERROR_ARGUMENT, "link_s=%d: skl_attention_stats needs SKL_LINK_SOFTMAX", (int)p->link_s);
    if (op == SKL_OP_ATTENTION_STATS && skl_is_indexer(p))
        return skl_fail(SKL_ERROR_ARGUMENT, "student=%d: skl_attention_stats needs SKL_STUDENT_ATTENTION",
                        (int)p->student);
    if ((op == SKL_OP_PARTIAL || op == SKL_OP_FINISH) && skl_is_pooled(p))
        return skl_fail(SKL_ERROR_ARGUMENT, "pool=%d: pooled teachers have no partial states; must be 0",
                        (int)p->pool);
    return skl_op_is_attention(op) && !(p->gradients & SKL_DV_S)
               ? skl_fail(SKL_ERROR_ARGUMENT,
                          "gradients=%" PRIu32 ": skl_attention_%s needs a plan whose problem.gradients include "
                          "SKL_DV_S",
                          p->gradients, op == SKL_OP_ATTENTION_FORWARD ? "forward" : "backward")
               : SKL_OK;
}

skl_status skl_problem_check(skl_problem *problem, const skl_problem *given)
{
    skl_problem p;
    SKL_TRY(skl_struct_read(&skl_struct_problem, &p, given));
    SKL_TRY(check_ranges(&p));
    SKL_TRY(check_float("scale_t", p.scale_t, -INFINITY, "finite; 0 stands for 1/sqrt(dim_t)"));
    SKL_TRY(check_float("scale_s", p.scale_s, -INFINITY, "finite; 0 stands for 1/sqrt(dim_s)"));
    SKL_TRY(check_float("softcap_t", p.softcap_t, 0.0F, "finite and at least 0; 0 stands for none"));
    SKL_TRY(check_float("softcap_s", p.softcap_s, 0.0F, "finite and at least 0; 0 stands for none"));
    SKL_TRY(check_combinations(&p));
    if (p.packed) {
        SKL_TRY(check_at_most("len_q", p.len_q, "total_q", p.total_q));
        SKL_TRY(check_at_most("len_k", p.len_k, "total_k", p.total_k));
    }
    SKL_TRY(check_row_count(&p, p.packed ? "total_q" : "len_q", p.packed ? p.total_q : p.len_q));
    SKL_TRY(check_row_count(&p, p.packed ? "total_k" : "len_k", p.packed ? p.total_k : p.len_k));
    SKL_TRY(check_sinks_of_groups(&p));
    fill_defaults(&p);
    SKL_TRY(check_multiple("heads_t", p.heads_t, "heads_s", p.heads_s));
    SKL_TRY(check_multiple("heads_t", p.heads_t, "key_heads_t", p.key_heads_t));
    SKL_TRY(check_multiple("heads_s", p.heads_s, "key_heads_s", p.key_heads_s));
    *problem = p;
    return SKL_OK;
}
