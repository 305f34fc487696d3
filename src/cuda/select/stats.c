/* Launches of attention statistics, which describe the student's attention. */
#include "cuda/select/choice.h"

#include "base/problem.h"
#include "base/stats.h"

/* Results of the Hopper kernels: with queries as columns, and of top keys. The others go through shared memory. */
#define OF_COLUMNS (SKL_STATS_OF_KEYS | SKL_STATS_OF_ONE_PASS)
#define OF_MASSES  (SKL_STATS_DISTANCE_MASS | SKL_STATS_RANGES)

/* Returns the problem that a kernel must support: the student on both sides. */
static skl_problem student_of(const skl_problem *p)
{
    skl_problem student = skl_cuda_halves_of(p, false).problem;
    student.heads_t = student.heads_s = p->heads_s;
    student.key_heads_t = student.key_heads_s = p->key_heads_s;
    return student;
}

/* The best kernel that the tensors allow, and why it is no better one. */
static const skl_cuda_kernel *kernel_of(const choice *s, const skl_problem *student, bool tma, const char **reason)
{
    const uint32_t tensors = SKL_TENSOR_Q_S | SKL_TENSOR_K_S;
    const skl_cuda_kernel *const planned = s->target->kernel;
    const bool aligned = (s->layout->aligned & tensors) == tensors;
    const bool addressed = (s->layout->tma & tensors) == tensors,
               hopper = tma && addressed && student->scale_s > 0.0F;
    const char *const name =
        !aligned || !s->some_keys || (s->target->named && planned->general) ? skl_cuda_general.name : NULL;
    const int capability = s->target->named ? planned->capability : s->device->capability;
    const skl_cuda_kernel *const kernel =
        skl_cuda_find_kernel(student, hopper ? capability : SKL_CAPABILITY_sm80, SKL_DOES_STATS, name);
    *reason = s->target->named  ? "a kernel of the architecture that the caller named"
              : !aligned        ? "q_s or k_s: address or strides not a multiple of 16 bytes: general kernel"
              : !s->some_keys   ? "no keys: general kernel"
              : kernel->general ? "f32 or a head size that is not a multiple of 8: no tensor cores"
              : !tma            ? "masses go through shared memory"
              : !addressed      ? "TMA cannot address q_s or k_s: mma.sync kernel"
              : !hopper         ? "a negative scale: mma.sync kernel"
                                : "best kernel for this type, head size and GPU";
    return kernel;
}

/* Chunks of the query tiles of a head. Few chunks need few slots; but blocks process one chunk each, or the same
 * number of them, so their number should be close to a multiple of the blocks that run at once. */
static int32_t chunks_of(const skl_problem *p, int64_t tile_rows, int64_t blocks)
{
    const int64_t heads = skl_max(1, p->batch * p->heads_s), tiles = skl_ceil_div(p->len_q, tile_rows);
    const int64_t enough = 15; /* sixteenths */
    int64_t best = 1, best_share = 0;
    for (int64_t chunks = 1; chunks <= tiles && chunks <= skl_ceil_div(2 * blocks, heads); chunks++) {
        const int64_t used = heads * chunks, share = 16 * used / (skl_ceil_div(used, blocks) * blocks);
        if (share > best_share) {
            best = chunks;
            best_share = share;
        }
        if (share >= enough)
            break;
    }
    return (int32_t)best;
}

/* The needs of a call's launches. */
typedef struct stats_needs {
    const skl_cuda_kernel *kernel; /* computes columns */
    const skl_cuda_kernel *tiles;  /* computes results that go through shared memory */
    uint32_t columns, top, masses; /* results of Hopper's kernels, and of the one for tiles */
    skl_stats_layout layout;       /* layout of the tiles */
    int32_t column_chunks, top_blocks, tile_rows;
} stats_needs;

/* Lays out the workspace that the launches share, and returns its size. */
static size_t lay_out(const choice *s, stats_needs *needs)
{
    const skl_problem *const p = s->problem;
    skl_stats_layout *const layout = &needs->layout;
    const int64_t keys = skl_all_rows(skl_key_rows(p));
    const bool sums = (s->request->stats & SKL_STATS_KEY_SUM) != 0;
    const bool scratch = (needs->masses & (OF_MASSES | SKL_STATS_TOP)) != 0;
    const size_t of_heads = (size_t)(p->batch * p->heads_s * layout->chunks) * 2 * SKL_STATS_SUMS * sizeof(float);
    /* Scratch of each query of a tile, for each block, bytes. */
    const size_t of_tiles = scratch ? (size_t)layout->blocks * (size_t)needs->tile_rows * SKL_STATS_SCRATCH_SIZE : 0;
    const size_t top_rows = (size_t)needs->top_blocks * SKL_SM90_STATS_ROWS;
    /* One more row than there are serves the alignment. */
    const size_t of_top = needs->top != 0 ? (top_rows + 1) * SKL_SM90_STATS_TOP_ROW : 0;
    layout->slot_stride = keys + SKL_STATS_STAGE_KEYS;
    layout->heads_at =
        sums ? skl_aligned_size((size_t)(p->heads_s * layout->slots * layout->slot_stride) * sizeof(float)) : 0;
    layout->scratch_at = layout->heads_at + (scratch ? skl_aligned_size(of_heads) : 0);
    return layout->scratch_at + (of_tiles > of_top ? of_tiles : of_top);
}

/* All launches of a call have the workspace at launches->stats_at, which the first one keeps for the others. */
static skl_cuda_launch *add(const choice *s, const stats_needs *needs, const char *step,
                            const skl_cuda_kernel *kernel, skl_cuda_launcher launcher, const char *variant,
                            const char *reason, uint32_t results)
{
    skl_cuda_launch *const launch = skl_select_add(s, step, kernel, launcher, variant, reason);
    launch->lse_computed = !s->request->lse_given;
    launch->stats = needs->layout;
    launch->stats.results = results;
    return launch;
}

static void find_needs(const choice *s, stats_needs *needs, const char **reason, const char **tile_reason)
{
    const skl_problem *const p = s->problem;
    const skl_problem student = student_of(p);
    const uint32_t results = s->request->stats;
    const int64_t sm_count = s->device->sm_count, heads = p->batch * p->heads_s;
    needs->kernel = kernel_of(s, &student, true, reason);
    const bool hopper = needs->kernel->tma;
    needs->tiles = hopper ? kernel_of(s, &student, false, tile_reason) : needs->kernel;
    needs->columns = hopper ? results & OF_COLUMNS : 0;
    needs->top = hopper ? results & SKL_STATS_TOP : 0;
    needs->masses = results & (hopper ? OF_MASSES : OF_COLUMNS | SKL_STATS_TOP | OF_MASSES);
    needs->tile_rows = SKL_STATS_ROWS(needs->tiles->general);
    const int64_t tile_blocks = sm_count * (needs->tiles->general ? 1 : SKL_STATS_TILE_BLOCKS);
    needs->column_chunks = chunks_of(p, SKL_SM90_STATS_ROWS, sm_count);
    needs->top_blocks = (int32_t)skl_min(sm_count, skl_max(1, heads * needs->column_chunks));
    needs->layout.chunks = chunks_of(p, needs->tile_rows, tile_blocks);
    needs->layout.slots = hopper ? needs->column_chunks * SKL_SM90_STATS_ADDERS : needs->layout.chunks;
    needs->layout.blocks = (int32_t)skl_min(tile_blocks, skl_max(1, heads * needs->layout.chunks));
}

/* Why there is no kernel; NULL: there is one. */
static const char *why_none(const skl_problem *p)
{
    return !skl_has_statistics(p)                                         ? "an indexer or a linear link"
           : p->dim_s > SKL_STATS_DIM_MAX                                 ? "heads of more than 256 dimensions"
           : p->len_q >= SKL_ROWS_MAX || p->len_k >= SKL_ROWS_MAX         ? "sequences of 2^30 rows or more"
           : p->batch * p->heads_s * SKL_STATS_TOP_CANDIDATES > INT32_MAX ? "more than ten million heads"
                                                                          : NULL;
}

void skl_select_stats(const choice *s)
{
    const uint32_t results = s->request->stats;
    const bool given = s->request->lse_given;
    const char *reason = NULL, *tile_reason = NULL;
    s->launches->refusal = why_none(s->problem);
    if (s->launches->refusal != NULL)
        return;
    stats_needs needs = {0};
    find_needs(s, &needs, &reason, &tile_reason);
    const size_t size = lay_out(s, &needs);
    if (!given && s->some_rows)
        skl_select_add_lse(s, false, "inputs.lse_s is not given");
    skl_cuda_launch *const clear =
        add(s, &needs, "clear", &skl_cuda_general, skl_cuda_stats_clear, SKL_VARIANT_STATS_CLEAR,
            "outputs and slots that later launches add to", results);
    skl_select_keep_workspace(s, clear, size);
    s->launches->stats_at = clear->workspace_at;
    if (needs.columns != 0 && s->some_rows) {
        skl_cuda_launch *const launch = add(s, &needs, "statistics", needs.kernel, needs.kernel->forward,
                                            SKL_VARIANT_STATS_COLUMNS, reason, needs.columns);
        launch->stats.chunks = needs.column_chunks;
        launch->stats.blocks = (int32_t)(s->problem->batch * s->problem->heads_s * needs.column_chunks);
    }
    if (needs.top != 0 && s->some_rows) {
        skl_cuda_launch *const launch =
            add(s, &needs, "top keys", needs.kernel, needs.kernel->top, SKL_VARIANT_STATS_TOP, reason, needs.top);
        launch->stats.chunks = needs.column_chunks;
        launch->stats.blocks = needs.top_blocks;
    }
    if (needs.masses != 0 && s->some_rows)
        (void)add(s, &needs, needs.kernel->tma ? "masses" : "statistics", needs.tiles, needs.tiles->forward,
                  SKL_VARIANT_STATS, tile_reason != NULL ? tile_reason : reason, needs.masses);
    if (results & SKL_STATS_WEIGHTS && s->some_keys)
        (void)add(s, &needs, "weights", &skl_cuda_general, skl_cuda_stats_weights, SKL_VARIANT_STATS_WEIGHTS,
                  "chosen rows are few", results);
    if (results & (SKL_STATS_KEY_SUM | SKL_STATS_DISTANCE_MASS | SKL_STATS_RANGE_SUM))
        (void)add(s, &needs, "sums", &skl_cuda_general, skl_cuda_stats_sums, SKL_VARIANT_STATS_SUMS,
                  "sums of chunks in their order", results);
}
