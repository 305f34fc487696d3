/* Which kernel fits a problem, by its row in the kernel list, and why it is not a better one. */
#include "cuda/select/choice.h"

#include <string.h>

#include "base/problem.h"
#include "base/side.h"

enum { ELEMENTS_16_BYTES = 8 }; /* 16-bit elements in a 16-byte copy */

bool skl_cuda_runs_on(const skl_cuda_kernel *kernel, int capability)
{
    return capability >= kernel->capability && capability < kernel->capability_end;
}

bool skl_select_is_general(const skl_cuda_kernel *kernel)
{
    return kernel->dim_max == 0;
}

bool skl_select_is_tma_kernel(const skl_cuda_kernel *kernel)
{
    return kernel->capability == SKL_CAPABILITY_sm90;
}

bool skl_select_has_two_terms(const skl_cuda_kernel *kernel)
{
    return !skl_select_is_general(kernel) && kernel->dtype == SKL_F32;
}

bool skl_select_is_capped(const skl_problem *p)
{
    return skl_caps_logits(p->softcap_t) || skl_caps_logits(p->softcap_s);
}

bool skl_select_is_attention_with_groups(const skl_problem *p)
{
    return !skl_is_indexer(p) && skl_group_size(p) > 1;
}

static uint32_t work_of(const skl_problem *p)
{
    if (skl_is_indexer(p))
        return p->top_k > 0 ? SKL_DOES_SPARSE : SKL_DOES_DENSE;
    return skl_group_size(p) > 1 ? SKL_DOES_GROUPS : SKL_DOES_ATTENTION;
}

/* On Hopper the queries of all teacher heads of a group stay in shared memory, with two stages of keys if the heads
 * do not share them. Kernels with softcaps pad heads to 128 dimensions. */
static bool fits_group_memory(const skl_problem *p)
{
    const bool narrow = p->dim_s <= 64 && !skl_select_is_capped(p);
    const bool shared = p->heads_t / p->key_heads_t % skl_group_size(p) == 0;
    const int64_t padded_dim_t = p->dim_t <= 64 && narrow ? 64 : SKL_GROUP_DIM_MAX;
    const int64_t dims_max = shared || narrow ? SKL_GROUP_DIMS_MAX : SKL_GROUP_DIMS_MAX - SKL_GROUP_DIM_MAX;
    return skl_group_size(p) * padded_dim_t <= dims_max;
}

/* Kernels count tiles in 32 bits. */
static bool fits_tile_numbers(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const int64_t length = skl_max(p->len_q, p->len_k), heads = skl_max(p->heads_t, skl_query_heads_s(p));
    if (kernel->does & SKL_DOES_SPARSE) {
        const bool counts_rows = kernel->fused != NULL; /* others have a block per row */
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

/* What a problem needs of a kernel, in the order in which an explanation names the first thing that is missing. */
enum { HAS_TYPES, HAS_COPIES, HAS_DIMS, HAS_SOFTCAP, HAS_DIRECTION, HAS_GROUP, HAS_TILE_NUMBERS, HAS_ALL };

static const char *const no_tensor_cores[HAS_ALL] = {
    [HAS_TYPES] = "f32 or mixed types: no tensor cores for this problem on this GPU; bf16 or f16 has them",
    [HAS_COPIES] = "a head size is not a multiple of 8: no tensor cores",
    [HAS_DIMS] = "a head size above those of the kernels for this problem: no tensor cores",
    [HAS_SOFTCAP] = "a softcap: no tensor cores for this problem",
    [HAS_DIRECTION] = "the reverse KL: no tensor cores for this problem",
    [HAS_GROUP] = "teacher groups of this size: no tensor cores",
    [HAS_TILE_NUMBERS] = "sizes beyond 32-bit tile numbers: no tensor cores"};

/* The first thing that a kernel lacks for a problem; HAS_ALL: nothing. */
static int first_missing(const skl_cuda_kernel *kernel, const skl_problem *p)
{
    const bool terms = skl_select_has_two_terms(kernel), reverse = p->direction == SKL_KL_REVERSE;
    const bool queries_in_memory = (kernel->does & SKL_DOES_GROUPS) != 0 && kernel->fused != NULL;
    const bool has[HAS_ALL] = {[HAS_TYPES] = terms || (p->dtype_t == kernel->dtype && p->dtype_s == kernel->dtype),
                               [HAS_COPIES] =
                                   terms || (p->dim_t % ELEMENTS_16_BYTES == 0 && p->dim_s % ELEMENTS_16_BYTES == 0),
                               [HAS_DIMS] = fits_dims(kernel, p),
                               [HAS_SOFTCAP] = kernel->softcap || !skl_select_is_capped(p),
                               [HAS_DIRECTION] = kernel->reverse || !reverse,
                               [HAS_GROUP] = (kernel->group_max == 0 || skl_group_size(p) <= kernel->group_max) &&
                                             (!queries_in_memory || fits_group_memory(p)),
                               [HAS_TILE_NUMBERS] = fits_tile_numbers(kernel, p)};
    int n = 0;
    while (n < HAS_ALL && has[n])
        n++;
    return n;
}

static bool fits(const skl_cuda_kernel *kernel, const skl_problem *p, uint32_t work)
{
    return (kernel->does & work) != 0 && (skl_select_is_general(kernel) || first_missing(kernel, p) == HAS_ALL);
}

/* The first kernel of the list that fits, from row `from` on; NULL: none. */
static const skl_cuda_kernel *next_fit(int32_t *from, const skl_problem *p, int capability, uint32_t work)
{
    const skl_cuda_kernel *kernel = NULL;
    while ((kernel = skl_cuda_kernel_at((*from)++)) != NULL)
        if (skl_cuda_runs_on(kernel, capability) && fits(kernel, p, work))
            break;
    return kernel;
}

const skl_cuda_kernel *skl_select_first(const skl_problem *p, int capability, uint32_t work,
                                        bool (*wants)(const skl_cuda_kernel *kernel))
{
    int32_t row = 0;
    const skl_cuda_kernel *kernel = next_fit(&row, p, capability, work);
    while (kernel != NULL && wants != NULL && !wants(kernel))
        kernel = next_fit(&row, p, capability, work);
    return kernel;
}

const skl_cuda_kernel *skl_cuda_select_kernel(const skl_problem *p, int capability, const char *name)
{
    int32_t row = 0;
    const skl_cuda_kernel *kernel = next_fit(&row, p, capability, work_of(p));
    while (kernel != NULL && name != NULL && strcmp(name, kernel->name) != 0)
        kernel = next_fit(&row, p, capability, work_of(p));
    return kernel;
}

bool skl_select_only_lse_s(const skl_cuda_request *request)
{
    return request->op == SKL_OP_FORWARD && (request->rows & ~(uint32_t)SKL_ROW_LSE_S) == 0;
}

const skl_cuda_kernel *skl_select_without_tma(const skl_problem *p)
{
    return skl_cuda_select_kernel(p, SKL_CAPABILITY_sm80, NULL);
}

static bool has_no_strips(const skl_cuda_kernel *kernel)
{
    return kernel->gradients == NULL;
}

const skl_cuda_kernel *skl_select_without_strips(const skl_problem *p)
{
    return skl_select_first(p, SKL_CAPABILITY_sm80, SKL_DOES_GROUPS, has_no_strips);
}

/* ---- Reasons --------------------------------------------------------------------------------------------------- */

/* Why a problem has no tensor-core kernel: what the kernel that comes closest lacks. */
static const char *why_general(const choice *s)
{
    const skl_cuda_kernel *kernel = NULL;
    int closest = HAS_TYPES;
    for (int32_t i = 0; (kernel = skl_cuda_kernel_at(i)) != NULL && !skl_select_is_general(kernel); i++)
        if (skl_cuda_runs_on(kernel, s->device->capability) && kernel->does & work_of(s->problem))
            closest = (int)skl_max(closest, first_missing(kernel, s->problem));
    return no_tensor_cores[closest];
}

static const char *why_kernel(const choice *s)
{
    if (s->request->named)
        return "the kernel was named by the caller";
    if (skl_select_is_general(s->kernel))
        return why_general(s);
    return skl_select_has_two_terms(s->kernel) ? "f32, mixed types or an odd head size: two-term rows"
                                               : "best kernel for this type, head size and GPU";
}

/* Why tensor-core kernels cannot copy the call's tensors, 16 bytes at a time, or store pairs of its gradients; NULL:
 * they can. */
static const char *why_misaligned(const skl_cuda_layout *layout)
{
    static const struct {
        uint32_t tensor;
        const char *why;
    } inputs[] = {{SKL_TENSOR_Q_T, "q_t: address or strides not a multiple of 16 bytes: general kernel"},
                  {SKL_TENSOR_K_T, "k_t: address or strides not a multiple of 16 bytes: general kernel"},
                  {SKL_TENSOR_Q_S, "q_s: address or strides not a multiple of 16 bytes: general kernel"},
                  {SKL_TENSOR_K_S, "k_s: address or strides not a multiple of 16 bytes: general kernel"}},
      gradients[] = {{SKL_DQ_T, "dq_t: a row begins at an odd element: general kernel"},
                     {SKL_DK_T, "dk_t: a row begins at an odd element: general kernel"},
                     {SKL_DQ_S, "dq_s: a row begins at an odd element: general kernel"},
                     {SKL_DK_S, "dk_s: a row begins at an odd element: general kernel"}};
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        if ((layout->copied & inputs[i].tensor) == 0)
            return inputs[i].why;
    for (size_t i = 0; i < sizeof gradients / sizeof gradients[0]; i++)
        if ((layout->paired & gradients[i].tensor) == 0)
            return gradients[i].why;
    return NULL;
}

/* Why a call does not run on the Hopper kernel that fits its problem; NULL: it does. */
static const char *why_no_tma(const choice *s)
{
    const skl_problem *const p = s->problem;
    const uint32_t of_student = SKL_TENSOR_Q_S | SKL_TENSOR_K_S, of_teacher = SKL_TENSOR_Q_T | SKL_TENSOR_K_T;
    if (!s->some_rows || !s->some_keys)
        return "no queries or no keys: mma.sync kernel";
    if ((s->layout->addressed & of_student) != of_student)
        return "TMA cannot address q_s or k_s: mma.sync kernel";
    if ((s->layout->addressed & of_teacher) != of_teacher &&
        !(skl_is_indexer(p) && skl_select_only_lse_s(s->request)))
        return "TMA cannot address q_t or k_t: mma.sync kernel";
    if (p->row_bounds && s->gradients && s->kernel->dq != NULL && s->kernel->dtype == SKL_F16 &&
        s->kernel->dim_max == SKL_SM90_UNBOUNDED_F16_DIM)
        return "f16 gradients of heads above 128 dimensions with row bounds: mma.sync kernel";
    return NULL;
}

static void take_general(choice *s, const char *reason)
{
    s->kernel = skl_cuda_general_for(s->problem);
    s->reason = reason;
}

void skl_select_fit(choice *s)
{
    const skl_problem *const p = s->problem;
    s->kernel = s->request->kernel;
    s->reason = why_kernel(s);
    if (skl_select_is_general(s->kernel))
        return;
    if (skl_select_has_two_terms(s->kernel)) { /* two-term rows are aligned, whatever they are made of */
        if (!s->some_rows || !s->some_keys)
            take_general(s, "no queries or no keys: general kernel");
        return;
    }
    const char *const misaligned = why_misaligned(s->layout);
    if (misaligned != NULL) {
        take_general(s, misaligned);
        return;
    }
    const bool groups = skl_select_is_attention_with_groups(p);
    const char *const no_tma = skl_select_is_tma_kernel(s->kernel) ? why_no_tma(s) : NULL;
    if (no_tma != NULL) {
        s->kernel = groups && s->kernel->fused != NULL ? skl_select_without_strips(p) : skl_select_without_tma(p);
        s->reason = no_tma;
    }
    if (groups && (!s->some_rows || !s->some_keys))
        take_general(s, "no queries or no keys: general kernel");
}
