#include "base/problem.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
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

static skl_status check_layout(const skl_problem *p)
{
    if (!p->packed && (p->total_q != 0 || p->total_k != 0))
        return skl_fail(SKL_ERROR_ARGUMENT, "total_q=%" PRId64 ", total_k=%" PRId64 ": must be 0 unless packed=1",
                        p->total_q, p->total_k);
    if (p->packed && p->len_q > p->total_q)
        return skl_fail(SKL_ERROR_ARGUMENT, "len_q=%" PRId64 ": must be at most total_q=%" PRId64, p->len_q,
                        p->total_q);
    if (p->packed && p->len_k > p->total_k)
        return skl_fail(SKL_ERROR_ARGUMENT, "len_k=%" PRId64 ": must be at most total_k=%" PRId64, p->len_k,
                        p->total_k);
    if (p->positions != SKL_POSITIONS_OFFSET && (p->offset_q != 0 || p->offset_k != 0))
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "offset_q=%" PRId64 ", offset_k=%" PRId64 ": must be 0 unless positions=SKL_POSITIONS_OFFSET",
                        p->offset_q, p->offset_k);

    /* All rows of a tensor can be counted in 64 bits, also those of one sequence in an empty batch. */
    const int64_t sequences = p->packed || p->batch == 0 ? 1 : p->batch;
    const int64_t length = p->packed ? p->total_q : p->len_q;
    int64_t rows = 0;
    if (__builtin_mul_overflow(sequences * p->heads_t, length, &rows) || rows > INT64_MAX / 64)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "batch=%" PRId64 " x heads_t=%" PRId64 " x %s=%" PRId64 ": too many rows for 64-bit sizes",
                        p->batch, p->heads_t, p->packed ? "total_q" : "len_q", length);
    return SKL_OK;
}

static skl_status check_student(const skl_problem *p)
{
    if (!skl_is_indexer(p)) {
        const int_rule rules[] = {{"index_heads", p->index_heads, 0, 0},
                                  {"dtype_w", p->dtype_w, 0, 0},
                                  {"index_linear", p->index_linear, 0, 0},
                                  {"top_k", p->top_k, 0, 0},
                                  {"gradients & SKL_DW_S", p->gradients & SKL_DW_S, 0, 0}};
        for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
            if (rules[i].value != 0)
                return skl_fail(SKL_ERROR_ARGUMENT, "%s=%" PRId64 ": must be 0 unless student=SKL_STUDENT_INDEXER",
                                rules[i].name, rules[i].value);
        return SKL_OK;
    }
    if (p->index_heads < 1 || p->index_heads > SKL_INDEX_HEADS_MAX)
        return skl_fail(SKL_ERROR_ARGUMENT, "index_heads=%" PRId64 ": must be 1..%d for an indexer", p->index_heads,
                        SKL_INDEX_HEADS_MAX);
    if (p->gradients & (SKL_DQ_T | SKL_DK_T))
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "gradients=%" PRIu32 ": an indexer's teacher is fixed; must be SKL_DQ_S | SKL_DK_S | "
                        "SKL_DW_S or fewer",
                        p->gradients);
    if (p->softcap_s != 0.0F)
        return skl_fail(SKL_ERROR_ARGUMENT, "softcap_s=%g: must be 0 for an indexer", (double)p->softcap_s);
    return SKL_OK;
}

static skl_status check_sinks(const skl_problem *p)
{
    const uint32_t of_sinks = SKL_DSINK_T | SKL_DSINK_S, of_teacher = SKL_DQ_T | SKL_DK_T | SKL_DSINK_T;
    if (!p->sinks && p->gradients & of_sinks)
        return skl_fail(SKL_ERROR_ARGUMENT, "gradients=%" PRIu32 ": SKL_DSINK_* need sinks=1", p->gradients);
    if (p->sinks && skl_is_indexer(p))
        return skl_fail(
            SKL_ERROR_ARGUMENT,
            "sinks=1: must be 0 for an indexer; a given lse_t that includes the teacher's sink gives the KL "
            "on the keys");
    if (p->sinks && p->heads_t != p->heads_s && p->direction == SKL_KL_REVERSE)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "direction=%d: with sinks, KL(S || P) needs heads_t=%" PRId64 " to be heads_s=%" PRId64,
                        (int)p->direction, p->heads_t, p->heads_s);
    if (p->sinks && p->heads_t != p->heads_s && p->gradients & of_teacher)
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "gradients=%" PRIu32 ": with sinks, teacher gradients need heads_t=%" PRId64
                        " to be heads_s=%" PRId64,
                        p->gradients, p->heads_t, p->heads_s);
    return SKL_OK;
}

static skl_status check_link(const skl_problem *p)
{
    if (p->link_s != SKL_LINK_LINEAR)
        return SKL_OK;
    const int_rule rules[] = {{"student", p->student, 0, 0},
                              {"direction", p->direction, 0, 0},
                              {"gradients & SKL_DV_S", p->gradients & SKL_DV_S, 0, 0},
                              {"scale_s", p->scale_s != 0.0F, 0, 0},
                              {"softcap_s", p->softcap_s != 0.0F, 0, 0}};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (rules[i].value != 0)
            return skl_fail(SKL_ERROR_ARGUMENT, "%s: must be 0 with link_s=SKL_LINK_LINEAR", rules[i].name);
    return SKL_OK;
}

static skl_status check_pool(const skl_problem *p)
{
    if (!skl_is_pooled(p) && (p->pool_heads != 0 || p->pool_blocks != 0 || p->pool_size != 0))
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "pool_heads=%d, pool_blocks=%d, pool_size=%" PRId64 ": must be 0 unless pool is set",
                        (int)p->pool_heads, (int)p->pool_blocks, p->pool_size);
    if (!skl_is_pooled(p))
        return SKL_OK;
    if (!skl_is_indexer(p))
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "pool=%d: needs student=SKL_STUDENT_INDEXER; one with index_heads=1, index_linear=1 and "
                        "weights of 1 is an attention",
                        (int)p->pool);
    if (p->packed)
        return skl_fail(SKL_ERROR_ARGUMENT, "packed=1: must be 0 with pool; pad the sequences and give key_lengths");
    if (p->top_k > 0 && p->len_k > INT32_MAX)
        return skl_fail(SKL_ERROR_ARGUMENT, "len_k=%" PRId64 ": must be at most %d with pool and top_k", p->len_k,
                        INT32_MAX);
    if (p->pool_size == 0)
        return skl_fail(SKL_ERROR_ARGUMENT, "pool_size=0: must be 1 or more with pool");
    return SKL_OK;
}

/* A plan for skl_attention_forward and skl_attention_backward. */
static skl_status check_values(const skl_problem *p)
{
    if (!(p->gradients & SKL_DV_S))
        return SKL_OK;
    if (skl_is_indexer(p))
        return skl_fail(SKL_ERROR_ARGUMENT, "gradients=%" PRIu32 ": SKL_DV_S needs student=SKL_STUDENT_ATTENTION",
                        p->gradients);
    if (p->gradients & (SKL_DQ_T | SKL_DK_T))
        return skl_fail(SKL_ERROR_ARGUMENT,
                        "gradients=%" PRIu32 ": with SKL_DV_S the teacher has no gradients; must be SKL_DQ_S | "
                        "SKL_DK_S | SKL_DV_S or fewer",
                        p->gradients);
    if (p->sinks)
        return skl_fail(SKL_ERROR_ARGUMENT, "gradients=%" PRIu32 ": SKL_DV_S needs sinks=0", p->gradients);
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
    SKL_TRY(check_layout(&p));
    SKL_TRY(check_student(&p));
    SKL_TRY(check_sinks(&p));
    SKL_TRY(check_link(&p));
    SKL_TRY(check_pool(&p));
    SKL_TRY(check_values(&p));
    fill_defaults(&p);
    SKL_TRY(check_multiple("heads_t", p.heads_t, "heads_s", p.heads_s));
    SKL_TRY(check_multiple("heads_t", p.heads_t, "key_heads_t", p.key_heads_t));
    SKL_TRY(check_multiple("heads_s", p.heads_s, "key_heads_s", p.key_heads_s));
    *problem = p;
    return SKL_OK;
}
