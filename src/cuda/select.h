/* Selection: the launches of a call, as a pure function of the problem, the request, and facts about tensors and
 * device. It asks no driver and reads no pointer, so it answers on any machine for any GPU. */
#ifndef SKL_CUDA_SELECT_H
#define SKL_CUDA_SELECT_H

#include "base/needs.h"
#include "cuda/kernels.h"

/* ---- Facts ---------------------------------------------------------------------------------------------------- */

typedef struct skl_cuda_device {
    const char *name;   /* a GPU that need not be here; NULL: a device of this machine */
    int32_t capability; /* compute capability: 90 is 9.0 */
    int32_t sm_count;
    int32_t smem_per_block; /* bytes, with the opt-in */
    int32_t smem_per_sm;    /* bytes */
} skl_cuda_device;

/* A GPU by its name: h100, h200, a100, l40s, b200, rtx5090. NULL: the table has no such GPU. */
const skl_cuda_device *skl_cuda_device_named(const char *name);
const char *skl_cuda_device_names(void); /* "a100, b200, ..." */

/* Inputs of a call, as bits of skl_cuda_layout. Gradients have the bits SKL_DQ_T, ... */
enum {
    SKL_TENSOR_Q_T = 1 << 8,
    SKL_TENSOR_K_T = 1 << 9,
    SKL_TENSOR_Q_S = 1 << 10,
    SKL_TENSOR_K_S = 1 << 11,
    SKL_TENSOR_V_S = 1 << 12,
    SKL_TENSOR_O_S = 1 << 13,
    SKL_TENSOR_DO_S = 1 << 14,
    SKL_TENSOR_INPUTS = 0x7f00
};

/* Layout facts: accesses that addresses and strides of a call's tensors allow, as bits per tensor. Gradients that are
 * not requested allow everything. */
typedef struct skl_cuda_layout {
    uint32_t aligned; /* rows begin at multiples of 16 bytes; rows of gradients at even elements */
    uint32_t tma;     /* TMA can address the tensor. A 16-bit dk has f32 sums in the workspace, which it can */
} skl_cuda_layout;

extern const skl_cuda_layout skl_cuda_aligned; /* allows everything */

skl_cuda_layout skl_cuda_layout_of(const skl_problem *problem, const skl_call *call);

/* Whether TMA can address a tensor of this type, address and shape, by the limits that CUDA documents for tensor maps
 * of 128-byte boxes. */
bool skl_cuda_tma_addresses(skl_dtype dtype, const skl_input *tensor, int64_t dim, int64_t heads,
                            skl_tensor_rows shape);

/* The request of a call: its operation and results. */
typedef struct skl_cuda_request {
    skl_op op;
    uint32_t rows;       /* skl_row_bits(): results that have a buffer */
    uint32_t gradients;  /* SKL_DQ_T, ...: gradients that have a buffer */
    uint32_t stats;      /* SKL_STATS_*: statistics that have a buffer */
    int32_t lse_given;   /* inputs.lse_t has data; statistics: inputs.lse_s */
    int32_t key_lengths; /* inputs.key_lengths has data */
    int64_t keys;        /* keys of skl_partial's range, at most len_k */
} skl_cuda_request;

skl_cuda_request skl_cuda_request_of(const skl_problem *problem, const skl_call *call);

/* Leaves out differences between requests that change no launch: with one teacher head per student head, every
 * forward computes all row results, whichever of them it stores. */
skl_cuda_request skl_cuda_normal_request(const skl_problem *problem, skl_cuda_request request);

/* ---- Selection ------------------------------------------------------------------------------------------------ */

enum { SKL_LAUNCHES_MAX = 12 };

typedef struct skl_cuda_launches {
    int count;
    size_t kept_size;      /* bytes at the start of the workspace that several launches read or write */
    size_t private_size;   /* bytes after these that one launch at a time uses for itself: the largest such part */
    size_t workspace_size; /* bytes of both together */
    size_t lse_at;         /* offset of computed LSEs, unless they go to rows.lse_t or stats.lse; bytes */
    size_t key_bounds_at;  /* offset of params.key_bounds, if `has_key_bounds`; bytes */
    size_t terms_at;       /* offset of two-term rows, if `term_dim` is not 0; bytes */
    size_t stats_at;       /* offset of the workspace that launches of statistics share; bytes */
    int32_t term_dim;      /* head size that two-term rows are padded to */
    int32_t has_key_bounds;
    const char *refusal; /* why no launch computes this; NULL: the launches do */
    skl_cuda_launch at[SKL_LAUNCHES_MAX];
} skl_cuda_launches;

/* Facts that all calls of a plan share besides its problem. */
typedef struct skl_cuda_target {
    skl_cuda_device device;
    const skl_cuda_kernel *kernel; /* kernel of calls with aligned tensors */
    int32_t named;                 /* the caller named the kernel */
    int32_t deterministic;         /* no sum in any order */
} skl_cuda_target;

bool skl_cuda_runs_on(const skl_cuda_kernel *kernel, int capability);

/* Returns the work that a problem needs, as bits SKL_DOES_*. */
uint32_t skl_cuda_work_of(const skl_problem *problem);

/* The best kernel that does `work` for a problem with aligned tensors, or the one of this name; NULL: there is none.
 */
const skl_cuda_kernel *skl_cuda_find_kernel(const skl_problem *problem, int capability, uint32_t work,
                                            const char *name);

/* The launches of a call, in their order. */
void skl_cuda_select(const skl_problem *problem, const skl_cuda_target *target, const skl_cuda_request *request,
                     const skl_cuda_layout *layout, skl_cuda_launches *launches);

/* ---- What selection and binding share ------------------------------------------------------------------------- */

/* The forward with the halves of a side's heads as its two arguments: one pass gives the LSEs of all heads. An odd
 * number of heads is compared with itself. */
typedef struct skl_cuda_halves {
    skl_problem problem;
    int64_t heads, key_heads; /* per half; the second half begins at these */
    bool apart;               /* the halves differ */
} skl_cuda_halves;

skl_cuda_halves skl_cuda_halves_of(const skl_problem *problem, bool of_teacher);

/* Lays out two-term rows of `dim` dimensions at `workspace`. Returns their size in bytes. */
size_t skl_cuda_lay_out_terms(const skl_problem *problem, int64_t dim, const void *workspace,
                              skl_cuda_argument *teacher, skl_cuda_argument *student);

#endif
