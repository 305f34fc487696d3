/* Launches of attention with one teacher head per student head, the parts that teacher groups share, and the
 * student's attention backward that carries the KL. */
#include "cuda/select/choice.h"

#include "base/problem.h"

/* ---- Forward --------------------------------------------------------------------------------------------------- */

/* Sum of both head sizes, as the kernel pads them. */
static int64_t dims_of(const skl_cuda_kernel *kernel)
{
    return kernel->dim_max + kernel->small_dim_max;
}

static bool has_narrow_forward(const skl_cuda_kernel *kernel)
{
    return dims_of(kernel) <= SKL_SM90_NARROW_DIMS_MAX && !kernel->two_terms;
}

/* Resident blocks need tiles of equal length, more tiles than SMs, and more keys than the pipeline holds. */
static bool is_persistent(const choice *s)
{
    const skl_problem *const p = s->problem;
    const int64_t dims = dims_of(s->kernel), tiles = skl_select_query_tiles(p, SKL_SM90_FORWARD_ROWS(dims));
    return has_narrow_forward(s->kernel) && skl_select_has_no_window(p) && !p->packed && !s->request->key_lengths &&
           s->request->keys > SKL_SM90_FORWARD_STAGES(dims) * SKL_SM90_STAGE_KEYS && tiles > s->device->sm_count &&
           tiles < SKL_ROWS_MAX;
}

/* Two blocks of few queries per SM: one computes while the other begins or ends, and a mask cuts fewer pairs. */
static bool is_paired(const choice *s)
{
    return has_narrow_forward(s->kernel) && s->problem->len_k <= SKL_SM90_PAIRED_KEYS_MAX(dims_of(s->kernel));
}

/* Resident blocks, two per SM: for more tiles than these with few keys, if all sequences have the same mask. Tiles of
 * all heads and sequences run together, so their keys have to fit into the L2 cache. */
static bool is_short(const choice *s)
{
    const skl_problem *const p = s->problem;
    const int64_t l2_size = (int64_t)40 << 20, tiles = skl_select_query_tiles(p, SKL_SM90_PAIRED_ROWS);
    const int64_t row_size = (p->key_heads_t * p->dim_t + p->key_heads_s * p->dim_s) * 2;
    return p->len_k <= SKL_SM90_SHORT_KEYS_MAX(dims_of(s->kernel)) && s->request->op != SKL_OP_PARTIAL &&
           !p->packed && !p->row_bounds && !s->request->key_lengths && tiles > 2 * s->device->sm_count &&
           tiles < SKL_ROWS_MAX && p->batch * p->len_k * row_size <= l2_size;
}

static void set_hopper_forward(const choice *s, skl_cuda_launch *launch)
{
    const bool equal_tiles = !s->capped && is_persistent(s);
    launch->paired = !s->capped && !equal_tiles && is_paired(s);
    launch->persistent = equal_tiles || (launch->paired && is_short(s));
    launch->variant = s->capped            ? SKL_VARIANT_SOFTCAP
                      : launch->persistent ? launch->paired ? SKL_VARIANT_SHORT : SKL_VARIANT_PERSISTENT
                      : launch->paired     ? SKL_VARIANT_PAIRED
                                           : SKL_VARIANT_TILES;
    const int64_t tile_rows = launch->paired                  ? SKL_SM90_PAIRED_ROWS
                              : has_narrow_forward(s->kernel) ? SKL_SM90_FORWARD_ROWS(dims_of(s->kernel))
                                                              : SKL_SM90_WIDE_ROWS;
    launch->head_group = skl_select_head_group(s, tile_rows, 2, 2);
    if (!launch->persistent)
        skl_select_split(s, launch, tile_rows, (launch->paired ? 2 : 1) * skl_select_blocks_to_fill(s->problem));
}

static void set_mma_forward(const choice *s, skl_cuda_launch *launch)
{
    const int64_t dim = s->kernel->dim_max, reserved_smem = 1024; /* bytes of a block that the system takes */
    const int64_t blocks_per_sm = skl_min(SKL_SM80_FORWARD_BLOCKS(dim, s->device->capability),
                                          s->device->smem_per_sm / (SKL_SM80_FORWARD_SMEM(dim) + reserved_smem));
    skl_select_split(s, launch, SKL_SM80_FORWARD_ROWS(dim), blocks_per_sm);
}

void skl_select_add_forward(const choice *s)
{
    skl_cuda_launch *const launch =
        skl_select_add(s, "forward", s->kernel, s->kernel->forward, SKL_VARIANT_TILES, s->reason);
    if (s->kernel->tma) {
        set_hopper_forward(s, launch);
    } else if (!s->kernel->general) {
        set_mma_forward(s, launch);
    } else if (skl_group_size(s->problem) > 1) {
        launch->variant = SKL_VARIANT_GROUPS;
        skl_select_give_workspace(s, launch, skl_select_general_lse_size(s));
    } else {
        launch->variant = SKL_VARIANT_GRID_STRIDE;
    }
}

/* ---- Backward -------------------------------------------------------------------------------------------------- */

wanted_side skl_select_wanted(const choice *s, bool of_teacher)
{
    const skl_problem *const p = s->problem;
    const uint32_t dq = of_teacher ? SKL_DQ_T : SKL_DQ_S, dk = of_teacher ? SKL_DK_T : SKL_DK_S;
    const wanted_side side = {.of_teacher = of_teacher,
                              .of_b = (p->direction == SKL_KL_REVERSE) == of_teacher,
                              .dq = s->gradients && s->request->gradients & dq,
                              .dk = s->gradients && s->request->gradients & dk,
                              .dim = of_teacher ? p->dim_t : p->dim_s,
                              .dk_bit = dk};
    return side;
}

/* Why the plan's fused backward computes no gradient of a side; NULL: it does. */
static const char *why_no_fused_kernel(const choice *s, const wanted_side *side)
{
    if (s->kernel->fused == NULL)
        return s->reason;
    if (side->dim > s->kernel->fused_dim_max)
        return "gradients of more than 128 dimensions: separate dq and dk";
    if (!side->of_b && s->kernel->dtype == SKL_F16)
        return "f16 gradients of the first argument have no bound: separate dq and dk";
    return NULL;
}

/* Why dq and dk of a side do not come out of one kernel; NULL: they do. */
static const char *why_not_fused(const choice *s, const wanted_side *side)
{
    const char *const no_kernel = why_no_fused_kernel(s, side);
    if (no_kernel != NULL)
        return no_kernel;
    if (s->target->deterministic)
        return "deterministic: dk has a separate kernel";
    if (!s->some_rows || !s->some_keys)
        return "no queries or no keys: separate dq and dk";
    if (side->dk && (s->layout->tma & side->dk_bit) == 0)
        return "TMA cannot add to dk: separate dq and dk";
    return NULL;
}

/* The plan's kernel or, if that is for a pair of head sizes, the one of its architecture that has dk for both. */
static const skl_cuda_kernel *kernel_with_dk(const choice *s)
{
    return s->kernel->dk != NULL
               ? s->kernel
               : skl_cuda_find_kernel(s->problem, s->kernel->capability, s->work | SKL_DOES_DK, NULL);
}

static const skl_cuda_kernel *dq_kernel_of(const choice *s, const wanted_side *side)
{
    if (why_no_fused_kernel(s, side) == NULL)
        return s->kernel; /* the fused backward computes dq alone, too */
    const skl_cuda_kernel *const kernel = kernel_with_dk(s);
    const bool f16_of_a = !side->of_b && kernel->dtype == SKL_F16;
    return kernel->dq != NULL || !f16_of_a ? kernel : skl_select_without_tma(s->problem);
}

/* The Hopper kernel of B's dq, or of both gradients of B, also accumulates the KL, which the gradients of A read in a
 * later launch. */
static bool gives_kl(const choice *s, const wanted_side *of_b, bool fused)
{
    return s->gradients && s->rows && (of_b->dq || of_b->dk) && (fused || (s->some_keys && of_b->dq)) &&
           dq_kernel_of(s, of_b)->tma;
}

/* A third dq warpgroup fits if the gradients have few dimensions. More of a taller tile is padding or masked, and
 * fewer tiles fill the last wave worse, so it must be a small part of a sequence and of all tiles. */
static bool has_tall_tiles(const choice *s, const skl_cuda_kernel *kernel, const wanted_side *side)
{
    const skl_problem *const p = s->problem;
    const int64_t queries = p->packed ? p->total_q / skl_max(1, p->batch) : p->len_q;
    const int64_t queries_min = 8192, waves_min = 8;
    return side->of_b && !s->capped && side->dim <= SKL_SM90_TALL_DIM && kernel->small_dim_max == SKL_SM90_TALL_DIM &&
           kernel->dim_max <= SKL_SM90_TALL_OTHER_DIM && queries >= queries_min &&
           skl_select_query_tiles(p, SKL_SM90_TALL_ROWS) >= waves_min * s->device->sm_count;
}

size_t skl_select_dk_sums_size(const skl_problem *p, bool of_teacher)
{
    const int64_t rows = skl_all_rows(of_teacher ? skl_key_rows(p) : skl_student_key_rows(p));
    const int64_t row_count = of_teacher ? p->key_heads_t * p->dim_t : p->key_heads_s * p->dim_s;
    return skl_grad_dtype(p, of_teacher ? p->dtype_t : p->dtype_s) == SKL_F32
               ? 0
               : skl_aligned_size((size_t)(rows * row_count) * sizeof(float));
}

enum { OF_DQ, OF_DK, OF_BOTH };

/* A launch for dq, dk or both of a side. A kernel without `dq` computes dq alone as its fused backward does. */
static void add_gradient(const choice *s, const wanted_side *side, int part, const skl_cuda_kernel *kernel,
                         const char *reason, bool kl)
{
    static const char *const steps[][2] = {
        [OF_DQ] = {"dq_s", "dq_t"}, [OF_DK] = {"dk_s", "dk_t"}, [OF_BOTH] = {"dq_s and dk_s", "dq_t and dk_t"}};
    static const char *const variants[][2][2] = {
        [OF_DQ] = {{SKL_VARIANT_DQ, SKL_VARIANT_DQ_SOFTCAP}, {SKL_VARIANT_DQ_GROUPS}},
        [OF_DK] = {{SKL_VARIANT_DK, SKL_VARIANT_DK_SOFTCAP}, {SKL_VARIANT_DK_GROUPS}},
        [OF_BOTH] = {{SKL_VARIANT_FUSED, SKL_VARIANT_FUSED_SOFTCAP},
                     {SKL_VARIANT_FUSED_GROUPS, SKL_VARIANT_FUSED_GROUPS_SOFTCAP}}};
    const bool fused = part == OF_BOTH || (part == OF_DQ && kernel->dq == NULL);
    const bool groups = s->work == SKL_DOES_GROUPS && !kernel->general, softcap = s->capped && kernel->tma;
    skl_cuda_launch *const launch = skl_select_add(s, steps[part][side->of_teacher], kernel,
                                                   fused           ? kernel->fused
                                                   : part == OF_DQ ? kernel->dq
                                                                   : kernel->dk,
                                                   variants[fused ? OF_BOTH : part][groups][softcap], reason);
    launch->teacher_side = side->of_teacher;
    launch->kl_in_backward = kl;
    launch->streams_queries = part == OF_DK;
    launch->sums_dk = part == OF_BOTH && side->dk;
    skl_select_give_workspace(s, launch, launch->sums_dk ? skl_select_dk_sums_size(s->problem, side->of_teacher) : 0);
    if (!fused)
        return;
    const int64_t keys = 2, keys_and_sums = 2 + 4; /* bytes per element: f32 sums of dk are streamed with its keys */
    launch->head_group = skl_select_head_group(s, SKL_SM90_BACKWARD_ROWS, side->of_b ? keys : keys_and_sums,
                                               side->of_b ? keys_and_sums : keys);
    launch->tall_tiles = has_tall_tiles(s, kernel, side);
    if (launch->tall_tiles)
        launch->variant = SKL_VARIANT_FUSED_TALL;
}

void skl_select_add_gradients(const choice *s, const wanted_side *side, const char *why_split, bool kl)
{
    if ((side->dq || side->dk) && why_split == NULL)
        add_gradient(s, side, OF_BOTH, s->kernel, s->reason, kl);
    if (side->dq && why_split != NULL && s->some_rows)
        add_gradient(s, side, OF_DQ, dq_kernel_of(s, side), why_split, kl);
    if (side->dk && why_split != NULL && s->some_keys)
        add_gradient(s, side, OF_DK, kernel_with_dk(s), why_split, false);
}

/* One kernel for the gradients of both sides: six products instead of eight, and the logits' exponentials once. It
 * reads the KL, so a one-pass call, whose KL comes out of the gradients of B, does not use it. Two fused backwards of
 * a pair of head sizes are faster than padding. */
static const skl_cuda_kernel *joint_kernel_of(const choice *s)
{
    const uint32_t all = SKL_DQ_T | SKL_DK_T | SKL_DQ_S | SKL_DK_S;
    const bool is_pair = s->kernel->dk == NULL;
    return (s->request->gradients & all) == all && s->request->op == SKL_OP_BACKWARD && !s->capped && !is_pair
               ? skl_cuda_find_kernel(s->problem, s->kernel->capability, SKL_DOES_JOINT, NULL)
               : NULL;
}

static void add_joint(const choice *s, const skl_cuda_kernel *kernel)
{
    const int64_t keys_and_sums = 2 + 4;
    skl_cuda_launch *const launch = skl_select_add(s, "dq and dk of both sides", kernel, kernel->fused,
                                                   SKL_VARIANT_JOINT, "one kernel for all four gradients");
    launch->sums_dk = true;
    launch->sums_t_at = skl_select_dk_sums_size(s->problem, false);
    launch->head_group = skl_select_head_group(s, SKL_SM90_BACKWARD_ROWS, keys_and_sums, keys_and_sums);
    skl_select_give_workspace(s, launch, launch->sums_t_at + skl_select_dk_sums_size(s->problem, true));
}

void skl_select_attention(const choice *s)
{
    const bool reverse = s->problem->direction == SKL_KL_REVERSE;
    const wanted_side of_a = skl_select_wanted(s, !reverse), of_b = skl_select_wanted(s, reverse);
    const char *const split_a = why_not_fused(s, &of_a), *const split_b = why_not_fused(s, &of_b);
    const bool kl = gives_kl(s, &of_b, split_b == NULL);
    if (s->rows && !kl && s->some_rows)
        skl_select_add_forward(s);
    const skl_cuda_kernel *const joint = split_a == NULL && split_b == NULL ? joint_kernel_of(s) : NULL;
    if (joint != NULL) {
        add_joint(s, joint);
        return;
    }
    skl_select_add_gradients(s, &of_b, split_b, kl);
    skl_select_add_gradients(s, &of_a, split_a, false);
}

/* ---- The student's attention, which carries the KL ------------------------------------------------------------ */

/* Why no kernel computes the attention together with the KL; NULL: *kernel does. */
static const char *why_not_carried(const choice *s, const skl_cuda_kernel **kernel)
{
    const skl_problem *const p = s->problem;
    const uint32_t values = SKL_TENSOR_V_S | SKL_TENSOR_O_S | (s->gradients ? SKL_TENSOR_DO_S : 0);
    if (skl_has_teacher_groups(p))
        return "teacher groups";
    if (p->direction == SKL_KL_REVERSE)
        return "the reverse KL";
    if (s->capped)
        return "a softcap";
    if (s->device->capability != SKL_CAPABILITY_sm90)
        return "a GPU other than Hopper";
    if (!s->some_rows || !s->some_keys)
        return "no queries or no keys";
    if (!s->kernel->tma || s->kernel->two_terms)
        return s->reason;
    if (s->gradients && s->target->deterministic)
        return "deterministic gradients";
    if (!s->gradients && (p->scale_t < 0.0F || p->scale_s < 0.0F))
        return "a negative scale";
    if ((s->layout->tma & values) != values)
        return s->gradients ? "TMA cannot address v_s, o_s or do_s" : "TMA cannot address v_s or o_s";
    if (s->gradients && (s->layout->aligned & SKL_DV_S) == 0)
        return "dv_s: a row begins at an odd element";
    *kernel = skl_cuda_find_kernel(p, s->device->capability, SKL_DOES_CARRIED, NULL);
    return *kernel == NULL ? "types or head sizes that no such kernel has" : NULL;
}

/* Returns the number of key heads whose tiles fill the GPU twice, or more if the L2 cache holds the rows that they
 * stream. */
static int32_t carried_head_group(const choice *s)
{
    const skl_problem *const p = s->problem;
    const int64_t bytes = 2 * p->dim_t + (2 + 2 + 4) * p->dim_s; /* per query: q_t; q_s, do_s and the sums of dq_s */
    const int64_t head_size = p->heads_s / p->key_heads_s * p->len_q * bytes, l2_share = (int64_t)44 << 20;
    const int64_t full = 2 * s->device->sm_count / skl_ceil_div(p->len_k, SKL_CARRYING_KEYS);
    return (int32_t)skl_max(1, skl_min(SKL_HEAD_GROUP_MAX, skl_max(full, l2_share / head_size)));
}

static void add_carried_forward(const choice *s, const skl_cuda_kernel *kernel)
{
    skl_cuda_launch *const launch =
        skl_select_add(s, "o_s and rows", kernel, kernel->forward, SKL_VARIANT_CARRYING_FORWARD,
                       "one kernel for the attention forward and the KL");
    launch->head_group = skl_select_head_group(s, SKL_CARRYING_ROWS, 2, 4); /* values have the size of keys */
}

/* The tiles of the backward are keys, so it has no KL of a row, which is a sum over tiles: a forward gives it. */
void skl_select_carried(const choice *s)
{
    const skl_problem *const p = s->problem;
    const skl_cuda_kernel *kernel = NULL;
    s->launches->refusal = why_not_carried(s, &kernel);
    if (s->launches->refusal != NULL)
        return;
    if (!s->gradients) {
        add_carried_forward(s, kernel);
        return;
    }
    if (s->rows)
        skl_select_add_forward(s);
    skl_cuda_launch *const launch =
        skl_select_add(s, "dq_s, dk_s and dv_s", kernel, kernel->fused, SKL_VARIANT_CARRYING,
                       "one kernel for the attention backward and the gradient of the KL");
    launch->head_group = carried_head_group(s);
    launch->streams_queries = true;
    skl_select_give_workspace(
        s, launch,
        skl_aligned_size((size_t)skl_state_count(p) * SKL_CARRYING_ROW_SIZE + SKL_CARRYING_LARGEST_SIZE) +
            (size_t)(skl_state_count(p) * p->dim_s) * sizeof(float));
}
