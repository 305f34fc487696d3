/* Finds the kernel that fits a problem, by its row in the kernel list, and the reason why no better one does. */
#include "cuda/select/choice.h"

#include <string.h>

#include "base/problem.h"
#include "base/side.h"

enum { ELEMENTS_16_BYTES = 8 }; /* 16-bit elements in a 16-byte copy */

bool skl_cuda_runs_on(const skl_cuda_kernel *kernel, int capability)
{
    return capability >= kernel->capability && capability < kernel->capability_end;
}

bool skl_select_is_capped(const skl_problem *p)
{
    return skl_caps_logits(p->softcap_t) || skl_caps_logits(p->softcap_s) || p->link_s == SKL_LINK_LINEAR;
}

uint32_t skl_cuda_work_of(const skl_problem *p)
{
    if (skl_is_indexer(p))
        return p->top_k > 0 ? SKL_DOES_SPARSE : SKL_DOES_DENSE;
    return skl_group_size(p) > 1 ? SKL_DOES_GROUPS : SKL_DOES_ATTENTION;
}

/* On Hopper the queries of all teacher heads of a group stay in shared memory, with at least one stage of keys.
 * Kernels with softcaps pad heads to 128 dimensions. */
static bool fits_group_memory(const skl_problem *p)
{
    const bool narrow = p->dim_t <= 64 && p->dim_s <= 64 && !skl_select_is_capped(p);
    return skl_group_size(p) * (narrow ? 64 : SKL_GROUP_DIM_MAX) <= SKL_GROUP_DIMS_MAX;
}

/* Kernels count tiles in 32 bits. */
static bool fits_tile_numbers(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const int64_t length = skl_max(p->len_q, p->len_k), heads = skl_max(p->heads_t, skl_query_heads_s(p));
    if (kernel->does & SKL_DOES_SPARSE) {
        const bool counts_rows = kernel->fused != NULL; /* other kernels have a block per row */
        return heads < SKL_ROWS_MAX && p->len_k < SKL_ROWS_MAX && p->top_k < SKL_ROWS_MAX &&
               (!counts_rows || p->batch * p->heads_s < SKL_ROWS_MAX / skl_max(1, p->len_q));
    }
    if (kernel->gradients != NULL) { /* strips */
        const int64_t tiles = skl_ceil_div(length + 1, SKL_STRIP_TILE);
        return tiles < INT32_MAX / SKL_STRIP_TILE && p->batch < INT32_MAX / tiles / heads / SKL_STRIP_BLOCKS;
    }
    if (kernel->does & SKL_DOES_GROUPS)
        return length < SKL_ROWS_MAX && p->batch * p->heads_t < INT32_MAX / skl_ceil_div(length + 1, SKL_GROUP_TILE);
    return length < SKL_ROWS_MAX && p->heads_s < INT32_MAX / skl_ceil_div(length + 1, SKL_SM80_TILE_MIN);
}

static bool fits_dims(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const int64_t large = skl_max(p->dim_t, p->dim_s), small = skl_min(p->dim_t, p->dim_s);
    if (kernel->does & (SKL_DOES_DENSE | SKL_DOES_SPARSE))
        return p->dim_s <= kernel->dim_max &&
               (kernel->index_heads_max == 0 || p->index_heads <= kernel->index_heads_max);
    return large <= kernel->dim_max && (kernel->small_dim_max == 0 || small <= kernel->small_dim_max);
}

enum { ALL_NEEDS = 9 };

/* How many of the needs of a problem a kernel meets, up to the first that it does not, which *missing explains. */
static int needs_met(const skl_cuda_kernel *kernel, const skl_problem *p, const char **missing)
{
    const bool terms = kernel->two_terms, queries_in_memory = kernel->does & SKL_DOES_GROUPS && kernel->fused != NULL;
    const struct {
        bool met;
        const char *missing;
    } needs[ALL_NEEDS] = {
        {terms || (p->dtype_t == kernel->dtype && p->dtype_s == kernel->dtype),
         "f32 or mixed types: no tensor cores for this problem on this GPU; bf16 or f16 has them"},
        {terms || (p->dim_t % ELEMENTS_16_BYTES == 0 && p->dim_s % ELEMENTS_16_BYTES == 0),
         "a head size is not a multiple of 8: no tensor cores"},
        {fits_dims(kernel, p), "a head size above those of the kernels for this problem: no tensor cores"},
        {kernel->softcap || !skl_select_is_capped(p), "a softcap or a linear link: no tensor cores for this problem"},
        {kernel->linear_link || p->link_s != SKL_LINK_LINEAR, "a linear link: no tensor cores for this problem"},
        {kernel->reverse || p->direction != SKL_KL_REVERSE, "the reverse KL: no tensor cores for this problem"},
        {(kernel->group_max == 0 || skl_group_size(p) <= kernel->group_max) &&
             (!queries_in_memory || fits_group_memory(p)),
         "teacher groups of this size: no tensor cores"},
        {!skl_is_pooled(p) || p->dim_t <= kernel->pool_dim_max,
         "a pooled teacher with lists of blocks: no tensor cores"},
        {fits_tile_numbers(kernel, p), "sizes beyond 32-bit tile numbers: no tensor cores"}};
    int n = 0;
    while (n < ALL_NEEDS && needs[n].met)
        n++;
    *missing = n < ALL_NEEDS ? needs[n].missing : NULL;
    return n;
}

static uint32_t work_of_row(const skl_cuda_kernel *kernel)
{
    return kernel->does | (kernel->dk != NULL ? SKL_DOES_DK : 0U) | (kernel->fused == NULL ? SKL_DOES_ORDERED : 0U);
}

const skl_cuda_kernel *skl_cuda_find_kernel(const skl_problem *p, int capability, uint32_t work, const char *name)
{
    const skl_cuda_kernel *kernel = NULL;
    const char *missing = NULL;
    for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL; i++)
        if (skl_cuda_runs_on(kernel, capability) && (work_of_row(kernel) & work) == work &&
            (name == NULL || strcmp(name, kernel->name) == 0) &&
            (kernel->general || needs_met(kernel, p, &missing) == ALL_NEEDS))
            break;
    return kernel;
}

const skl_cuda_kernel *skl_select_without_tma(const skl_problem *p)
{
    return skl_cuda_find_kernel(p, SKL_CAPABILITY_sm80, skl_cuda_work_of(p), NULL);
}

const skl_cuda_kernel *skl_select_without_strips(const skl_problem *p)
{
    return skl_cuda_find_kernel(p, SKL_CAPABILITY_sm80, SKL_DOES_GROUPS | SKL_DOES_DK, NULL);
}

bool skl_select_only_lse_s(const skl_cuda_request *request)
{
    return request->op == SKL_OP_FORWARD && (request->rows & ~(uint32_t)SKL_ROW_LSE_S) == 0;
}

/* ---- Reasons --------------------------------------------------------------------------------------------------- */

/* Why a problem has no tensor-core kernel: the feature that the closest kernel lacks. */
static const char *why_general(const choice *s)
{
    const skl_cuda_kernel *kernel = NULL;
    const char *reason = NULL, *missing = NULL;
    int closest = -1;
    for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL; i++) {
        const bool compared =
            !kernel->general && skl_cuda_runs_on(kernel, s->device->capability) && kernel->does & s->work;
        const int met = compared ? needs_met(kernel, s->problem, &missing) : -1;
        if (met > closest) {
            closest = met;
            reason = missing;
        }
    }
    return reason;
}

static const char *why_kernel(const choice *s)
{
    if (s->target->named)
        return "the kernel was named by the caller";
    if (s->kernel->general)
        return why_general(s);
    return s->kernel->two_terms ? "f32, mixed types or an odd head size: two-term rows"
                                : "best kernel for this type, head size and GPU";
}

/* Why tensor-core kernels cannot copy the call's tensors, 16 bytes at a time, or store pairs of its gradients; NULL:
 * they can. */
static const char *why_misaligned(const skl_cuda_layout *layout)
{
    static const struct {
        uint32_t tensor;
        const char *why;
    } reasons[] = {{SKL_TENSOR_Q_T, "q_t: address or strides not a multiple of 16 bytes: general kernel"},
                   {SKL_TENSOR_K_T, "k_t: address or strides not a multiple of 16 bytes: general kernel"},
                   {SKL_TENSOR_Q_S, "q_s: address or strides not a multiple of 16 bytes: general kernel"},
                   {SKL_TENSOR_K_S, "k_s: address or strides not a multiple of 16 bytes: general kernel"},
                   {SKL_DQ_T, "dq_t: a row begins at an odd element: general kernel"},
                   {SKL_DK_T, "dk_t: a row begins at an odd element: general kernel"},
                   {SKL_DQ_S, "dq_s: a row begins at an odd element: general kernel"},
                   {SKL_DK_S, "dk_s: a row begins at an odd element: general kernel"}};
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
        if ((layout->aligned & reasons[i].tensor) == 0)
            return reasons[i].why;
    return NULL;
}

/* Why a call does not run on the Hopper kernel that fits its problem; NULL: it does. */
static const char *why_no_tma(const choice *s)
{
    const skl_problem *const p = s->problem;
    const uint32_t of_student = SKL_TENSOR_Q_S | SKL_TENSOR_K_S, of_teacher = SKL_TENSOR_Q_T | SKL_TENSOR_K_T;
    if (!s->some_rows || !s->some_keys)
        return "no queries or no keys: mma.sync kernel";
    if ((s->layout->tma & of_student) != of_student)
        return "TMA cannot address q_s or k_s: mma.sync kernel";
    if ((s->layout->tma & of_teacher) != of_teacher && !(skl_is_indexer(p) && skl_select_only_lse_s(s->request)))
        return "TMA cannot address q_t or k_t: mma.sync kernel";
    if (p->row_bounds && s->gradients && s->kernel->dq != NULL && s->kernel->dtype == SKL_F16 &&
        s->kernel->dim_max == SKL_SM90_UNBOUNDED_F16_DIM)
        return "f16 gradients of heads above 128 dimensions with row bounds: mma.sync kernel";
    return NULL;
}

void skl_select_fit(choice *s)
{
    const skl_problem *const p = s->problem;
    s->kernel = s->target->kernel;
    s->reason = why_kernel(s);
    if (s->kernel->general)
        return;
    /* Two-term rows are aligned, whatever they are made of. */
    const char *no_copies = s->kernel->two_terms ? NULL : why_misaligned(s->layout);
    const char *const no_tma = s->kernel->tma && !s->kernel->two_terms ? why_no_tma(s) : NULL;
    if (no_copies == NULL && (s->kernel->two_terms || s->work == SKL_DOES_GROUPS) && (!s->some_rows || !s->some_keys))
        no_copies = "no queries or no keys: general kernel";
    if (no_copies != NULL) {
        s->kernel = skl_cuda_find_kernel(p, SKL_CAPABILITY_sm80, s->work, skl_cuda_general.name);
        s->reason = no_copies;
    } else if (no_tma != NULL) {
        const bool groups = s->work == SKL_DOES_GROUPS && s->kernel->fused != NULL;
        s->kernel = groups ? skl_select_without_strips(p) : skl_select_without_tma(p);
        s->reason = no_tma;
    }
}
