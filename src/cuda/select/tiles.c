/* Launches, their tiles and their workspace. */
#include "cuda/select/choice.h"

#include "base/problem.h"
#include "base/side.h"

skl_cuda_launch *skl_select_add(const choice *s, const char *step, const skl_cuda_kernel *kernel,
                                skl_cuda_launcher launcher, const char *variant, const char *reason)
{
    skl_cuda_launch *const launch = &s->launches->at[s->launches->count++];
    *launch = (skl_cuda_launch){.step = step,
                                .kernel = kernel->name,
                                .variant = variant,
                                .reason = reason,
                                .launcher = launcher,
                                .op = s->request->op,
                                .sm_count = s->device->sm_count,
                                .smem_per_block = s->device->smem_per_block,
                                .smem_per_sm = s->device->smem_per_sm,
                                .num_splits = 1,
                                .head_group = SKL_HEAD_GROUP_MAX,
                                .rows_known = s->gradients && s->rows};
    return launch;
}

/* ---- Workspace ------------------------------------------------------------------------------------------------- */

size_t skl_select_keep(const choice *s, size_t size)
{
    const size_t at = s->launches->kept_size;
    s->launches->kept_size += skl_aligned_size(size);
    return at;
}

void skl_select_keep_workspace(const choice *s, skl_cuda_launch *launch, size_t size)
{
    launch->workspace_at = skl_select_keep(s, size);
    launch->workspace_size = size;
    launch->keeps_workspace = true;
}

void skl_select_give_workspace(const choice *s, skl_cuda_launch *launch, size_t size)
{
    const size_t aligned = skl_aligned_size(size);
    launch->workspace_size = size;
    s->launches->private_size = aligned > s->launches->private_size ? aligned : s->launches->private_size;
}

size_t skl_select_general_lse_size(const choice *s)
{
    return (size_t)s->device->sm_count * SKL_GENERAL_BLOCKS_PER_SM * (size_t)skl_group_size(s->problem) *
           SKL_GENERAL_TILE * sizeof(skl_lse2);
}

/* ---- Tiles ----------------------------------------------------------------------------------------------------- */

bool skl_select_has_no_window(const skl_problem *p)
{
    return skl_is_unlimited(p->window_left) && skl_is_unlimited(p->window_right) && !p->row_bounds;
}

int64_t skl_select_query_tiles(const skl_problem *p, int64_t tile_rows)
{
    return p->batch * p->heads_s * skl_ceil_div(p->len_q, tile_rows);
}

int64_t skl_select_blocks_to_fill(const skl_problem *p)
{
    const bool one_sided = skl_is_unlimited(p->window_left) != skl_is_unlimited(p->window_right);
    return (one_sided || p->row_bounds) && 2 * p->len_q > p->len_k ? 2 : 1;
}

/* Streamed rows, `head_size` bytes per head, must fill at most half of the L2 cache: with more heads at once they are
 * read from memory again for every wave of tiles, and f32 sums are read and written there. But where tiles differ in
 * length, each group of heads begins with its longest ones: there may be several groups only where the longest tile
 * is a small part of an SM's work. */
static int32_t head_group_of(const choice *s, int64_t tiles, int64_t head_size)
{
    const int64_t l2_share = (int64_t)25 << 20, small_part = 32, few_heads_share = (int64_t)256 << 20;
    const bool few_tiles = !skl_select_has_no_window(s->problem) && tiles < 2 * small_part * s->device->sm_count;
    /* With few tiles of different lengths, the last group would end late. A few heads at a time are enough to
     * avoid that, and better than all of them if the rows of one do not fit. */
    if (few_tiles && head_size <= 2 * l2_share)
        return SKL_HEAD_GROUP_MAX;
    const int64_t share = few_tiles ? few_heads_share : l2_share;
    return (int32_t)skl_max(1, skl_min(SKL_HEAD_GROUP_MAX, share / skl_max(1, head_size)));
}

int32_t skl_select_head_group(const choice *s, int64_t tile_rows, int64_t bytes_a, int64_t bytes_b)
{
    const skl_problem *const p = s->problem;
    const bool reverse = p->direction == SKL_KL_REVERSE;
    const int64_t bytes_t = reverse ? bytes_b : bytes_a, bytes_s = reverse ? bytes_a : bytes_b;
    const int64_t terms = s->kernel->two_terms ? 2 * s->kernel->dim_max : 0;
    const int64_t keys_t = p->len_k * (terms > 0 ? terms : p->dim_t) * bytes_t;
    const int64_t keys_s = p->len_k * (terms > 0 ? terms : p->dim_s) * bytes_s;
    const int64_t heads_per_key_t = p->heads_t / p->key_heads_t, heads_per_key_s = p->heads_s / p->key_heads_s;
    return head_group_of(s, skl_select_query_tiles(p, tile_rows),
                         keys_t * skl_group_size(p) / heads_per_key_t + keys_s / heads_per_key_s);
}

void skl_select_split(const choice *s, skl_cuda_launch *launch, int64_t tile_rows, int64_t blocks)
{
    const int64_t keys_min = 256; /* enough keys for each split */
    const int64_t tiles = skl_select_query_tiles(s->problem, tile_rows), all = s->device->sm_count * blocks;
    launch->num_splits = (int32_t)skl_max(1, skl_min(all / tiles, s->problem->len_k / keys_min));
    if (launch->num_splits == 1)
        return;
    launch->reason = "too few query tiles to fill the GPU: their keys are split";
    skl_select_give_workspace(s, launch, (size_t)(tiles * launch->num_splits * tile_rows) * sizeof(skl_row_state));
}
