/* A choice in progress, and the layers of selection, each of which calls only those above it in this file. */
#ifndef SKL_CUDA_SELECT_CHOICE_H
#define SKL_CUDA_SELECT_CHOICE_H

#include "cuda/select.h"

typedef struct choice {
    const skl_problem *problem;
    const skl_cuda_target *target;
    const skl_cuda_device *device; /* the target's */
    const skl_cuda_request *request;
    const skl_cuda_layout *layout;
    skl_cuda_launches *launches;
    uint32_t work;                 /* SKL_DOES_*: work that the problem needs */
    const skl_cuda_kernel *kernel; /* the best one that the layout allows */
    const char *reason;            /* why it is this kernel */
    bool some_rows, some_keys;     /* the problem has queries; it has keys */
    bool rows, gradients;          /* the call computes row results; gradients */
    bool capped;                   /* a side has a softcap or a linear link */
} choice;

/* ---- fit.c: which kernel fits a problem, and why ------------------------------------------------------------ */

/* Either side has a softcap that changes logits, or a linear link. */
bool skl_select_is_capped(const skl_problem *p);

/* Whether a forward requests lse_s alone: that of an indexer then does not read the teacher. */
bool skl_select_only_lse_s(const skl_cuda_request *request);

/* The best kernel for the problem of a choice that needs no TMA. */
const skl_cuda_kernel *skl_select_without_tma(const skl_problem *p);

/* The best kernel for teacher groups that needs neither TMA nor a workspace of strips. Plans of Hopper's kernels fall
 * back to it: their workspace must not grow for tensors that they hardly ever meet. */
const skl_cuda_kernel *skl_select_without_strips(const skl_problem *p);

/* Sets the kernel of a call and its reason: the plan's, or the next one that the layout of the tensors allows. */
void skl_select_fit(choice *s);

/* ---- tiles.c: launches, their tiles and their workspace -------------------------------------------------------- */

skl_cuda_launch *skl_select_add(const choice *s, const char *step, const skl_cuda_kernel *kernel,
                                skl_cuda_launcher launcher, const char *variant, const char *reason);

/* Keeps `size` bytes of the workspace for all launches of the call: for the results of one that others read. Returns
 * where they begin. */
size_t skl_select_keep(const choice *s, size_t size);

/* Keeps the part of the workspace that a launch fills for later ones. */
void skl_select_keep_workspace(const choice *s, skl_cuda_launch *launch, size_t size);

/* Gives a launch `size` bytes for itself. Launches run one after another and share these bytes. */
void skl_select_give_workspace(const choice *s, skl_cuda_launch *launch, size_t size);

/* LSEs of a teacher group for each block of a general forward, bytes. */
size_t skl_select_general_lse_size(const choice *s);

int64_t skl_select_query_tiles(const skl_problem *p, int64_t tile_rows);

/* Every row attends to every key of its sequence: no window ends before the keys do. */
bool skl_select_has_no_window(const skl_problem *p);

/* Heads whose tiles of queries run together. `bytes_a`, `bytes_b`: bytes that a tile streams per element of an
 * argument's keys, f32 sums of dk included. */
int32_t skl_select_head_group(const choice *s, int64_t tile_rows, int64_t bytes_a, int64_t bytes_b);

/* Splits the keys of each query tile over `blocks` blocks per SM, whose states go to the workspace. */
void skl_select_split(const choice *s, skl_cuda_launch *launch, int64_t tile_rows, int64_t blocks);

/* Blocks per SM for skl_select_split on Hopper: 2 under a one-sided mask, whose tiles have half of the longest one's
 * keys on average, so that the longest one would take as long as all others of its SM; else 1. */
int64_t skl_select_blocks_to_fill(const skl_problem *p);

/* ---- attention.c: one teacher head per student head, and the parts that teacher groups share ------------------- */

/* One side of the KL, and the gradients that the call requests for it. */
typedef struct wanted_side {
    bool of_teacher, of_b; /* b is the second argument of the KL */
    bool dq, dk;
    int64_t dim;
    uint32_t dk_bit; /* SKL_DK_T or SKL_DK_S */
} wanted_side;

wanted_side skl_select_wanted(const choice *s, bool of_teacher);

void skl_select_add_forward(const choice *s);

/* Bytes of f32 sums of dk of one side, in the workspace; 0: dk is f32 and holds its own sums. */
size_t skl_select_dk_sums_size(const skl_problem *p, bool of_teacher);

/* The gradients of a side. `why_split`: why dq and dk do not come out of one kernel; NULL: they do. `kl`: the kernel
 * of dq also stores rows.kl. */
void skl_select_add_gradients(const choice *s, const wanted_side *side, const char *why_split, bool kl);

void skl_select_attention(const choice *s);

/* The student's attention, forward or backward, that carries the KL, or a refusal. */
void skl_select_carried(const choice *s);

/* ---- groups.c: teacher groups and indexers --------------------------------------------------------------------- */

/* A forward of all heads of a side, by the best kernel of this GPU, even if the plan's kernel is for older ones. If
 * the caller named a kernel, it is one of that kernel's architecture. */
void skl_select_add_lse(const choice *s, bool of_teacher, const char *reason);

void skl_select_groups(const choice *s);
void skl_select_indexer(const choice *s);

/* ---- stats.c: statistics of the student's attention ------------------------------------------------------------ */

/* The launches, or a refusal. */
void skl_select_stats(const choice *s);

#endif
