/* StreamKL: the KL divergence between two attention distributions, without the N x N matrices.
 *
 * For every batch, student head and query row i, over the keys j visible to the row:
 *
 *     teacher  x_ij = softcap_t(scale_t * <q_t[i], k_t[j]>)    P = softmax_j(x)
 *     student  y_ij = softcap_s(scale_s * <q_s[i], k_s[j]>)    S = softmax_j(y)
 *     KL_i = sum_j P_ij (log P_ij - log S_ij)                  (or KL(S || P): see skl_direction)
 *
 * This file goes from simple to advanced:
 *
 *     Status                   what every call returns
 *     The simple API           two calls for contiguous tensors: the KL of every row, and its gradients
 *     The problem              shapes, types and masks, without pointers
 *     Tensors                  addresses and strides
 *     Plans                    kernels and workspace, chosen once for many calls
 *     Running                  forward, backward, both in one pass; the student's attention with its KL, forward and
 *                              backward; statistics of one attention
 *     Before a call            what it needs, and whether its arrays are valid
 *     Partial states           keys split over calls, devices or ranks
 *     Version and kernels
 *
 * Every struct starts with struct_size, which the caller sets to the sizeof that it was compiled with. So a program
 * runs with a library of another release, without being compiled again. New fields come last, and 0 in them keeps the
 * former behavior:
 *   - Fields that a shorter struct of an older program lacks count as 0.
 *   - A longer struct of a newer program is accepted if the bytes that the library does not know are 0.
 *   - In a struct that the library fills, it writes the fields that both know.
 * Initialize whole structs, not field by field: {.struct_size = sizeof inputs, ...}. Sizes below those of the first
 * release, 0.1.0, and above 4096 are refused. Programs of 0.1.0 that use skl_kernel_info or skl_row_state must be
 * compiled again.
 */
#ifndef STREAMKL_H
#define STREAMKL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(SKL_STATIC)
#define SKL_API
#elif defined(__GNUC__)
#define SKL_API __attribute__((visibility("default")))
#else
#define SKL_API
#endif

#define SKL_VERSION_MAJOR 0
#define SKL_VERSION_MINOR 2
#define SKL_VERSION_PATCH 0

/* ---- Status ------------------------------------------------------------------------------------------------ */

/* A call that fails has no effect, except that SKL_ERROR_DEVICE and SKL_ERROR_CANCELLED leave results half written.
 */
typedef enum skl_status {
    SKL_OK = 0,
    SKL_ERROR_ARGUMENT = 1,    /* an argument is out of range, missing or contradicts another */
    SKL_ERROR_UNSUPPORTED = 2, /* valid, but this build or this machine cannot do it */
    SKL_ERROR_MEMORY = 3,      /* an allocation failed: only the simple API and skl_plan_create allocate */
    SKL_ERROR_WORKSPACE = 4,   /* the workspace is NULL, too small or misaligned */
    SKL_ERROR_DEVICE = 5,      /* the device is missing or reported an error */
    SKL_ERROR_CANCELLED = 6    /* options.cancel ended the call */
} skl_status;

/* Returns "SKL_OK", "SKL_ERROR_ARGUMENT", ... */
SKL_API const char *skl_status_name(skl_status status);

/* Returns the message of this thread's last failed call. It names the argument, its value and the accepted values:
 * "dim_t=0: must be 1..512". Never NULL. */
SKL_API const char *skl_last_error(void);

/* ---- The simple API ---------------------------------------------------------------------------------------- */

struct skl_problem;
struct skl_options;

/* The type of cudaStream_t: pass a CUDA stream without a cast, and NULL on the CPU. */
typedef struct CUstream_st *skl_stream;

/* KL of every row, for contiguous tensors:
 *
 *     skl_problem problem = skl_problem_default();        // one sequence, one head, f32, no mask
 *     problem.heads_t = problem.heads_s = 16;
 *     problem.len_q = problem.len_k = 2048;
 *     problem.dim_t = problem.dim_s = 64;
 *     problem.causal = 1;
 *     if (skl_attention_kl(&problem, NULL, q_t, k_t, q_s, k_s, kl, NULL) != SKL_OK)
 *         puts(skl_last_error());
 *
 *     q_t  [batch, heads_t, len_q, dim_t]    k_t  [batch, key_heads_t, len_k, dim_t]    of type problem.dtype_t
 *     q_s  [batch, heads_s, len_q, dim_s]    k_s  [batch, key_heads_s, len_k, dim_s]    of type problem.dtype_s
 *     kl   [batch, heads_s, len_q], f32
 *
 * `problem` may set everything that needs no further tensor: masks by causal and window, grouped heads, types,
 * scales, softcaps, direction. Packed sequences, row bounds, sinks and indexers need a plan. `options` chooses the
 * device; NULL is the CPU with all cores. On a GPU, tensors are device memory, and the call returns before the stream
 * has executed it.
 *
 * The call creates a plan, allocates its workspace, runs and frees both: nothing is kept between calls. A GPU
 * allocates in stream order (cudaMallocAsync), without synchronizing. */
SKL_API skl_status skl_attention_kl(const struct skl_problem *problem, const struct skl_options *options,
                                    const void *q_t, const void *k_t, const void *q_s, const void *k_s, float *kl,
                                    skl_stream stream);

/* KL of every row and gradients of sum_i grad_kl[i] * KL_i for the student. Needs no earlier call: it runs a forward
 * and a backward.
 *
 *     grad_kl  f32, the shape of kl. NULL stands for ones: gradients of the sum of all KL_i. For their mean, every
 *              element is 1 / rows
 *     kl       NULL: not requested
 *     dq_s     the shape of q_s, of type problem.dtype_s, or f32 with problem.grad_f32; NULL: not requested
 *     dk_s     the shape of k_s, the same type; NULL: not requested
 *
 * problem.gradients is not read: the pointers say what to compute. */
SKL_API skl_status skl_attention_kl_backward(const struct skl_problem *problem, const struct skl_options *options,
                                             const void *q_t, const void *k_t, const void *q_s, const void *k_s,
                                             const float *grad_kl, float *kl, void *dq_s, void *dk_s,
                                             skl_stream stream);

/* ---- The problem: shapes, types and masks; no pointers ----------------------------------------------------- */

typedef enum skl_dtype { SKL_F32 = 0, SKL_F16 = 1, SKL_BF16 = 2 } skl_dtype;

typedef enum skl_direction {
    SKL_KL_FORWARD = 0, /* KL(P || S): the student learns to cover everything the teacher attends to */
    SKL_KL_REVERSE = 1  /* KL(S || P): the student learns to avoid everything the teacher ignores */
} skl_direction;

typedef enum skl_positions {
    SKL_POSITIONS_BOTTOM_RIGHT = 0, /* key j has position j, query i has position i + len_k - len_q */
    SKL_POSITIONS_OFFSET = 1        /* key j has position offset_k + j, query i offset_q + i: shards of a sequence */
} skl_positions;

typedef enum skl_student {
    SKL_STUDENT_ATTENTION = 0, /* y_ij = softcap_s(scale_s * <q_s[i], k_s[j]>) */
    SKL_STUDENT_INDEXER = 1    /* y_ij = scale_s * sum_g w_s[i,g] relu(<q_s[g,i], k_s[j]>), over index heads g */
} skl_student;

/* How the student's distribution follows from its logits y. */
typedef enum skl_link {
    SKL_LINK_SOFTMAX = 0, /* S = softmax(y) */
    SKL_LINK_LINEAR = 1   /* S_ij = a_ij / sum_j a_ij with a = <q_s[i], k_s[j]> >= 0, the attention of linear students
                           * (Hedgehog, LoLCATs): q_s and k_s are their feature maps. y = log a, so that lse_s is
                           * log sum_j a_ij. A negative a makes the row NaN; a = 0 where P > 0 makes its KL infinite */
} skl_link;

/* The teacher of an indexer may be pooled over blocks of keys. The indexer then has one key per block, and the target
 * of a row is a distribution on blocks:
 *
 *     P_j = mean_h P_hj, or max_h P_hj        over the r teacher heads of the group: skl_pool_heads
 *     M_b = max_j P_j, or sum_j P_j           over the visible keys j of block b: skl_pool
 *     P_b = M_b / sum_b M_b                   over the blocks of the row: skl_pool_blocks
 *
 * Block b holds keys pool_size * b .. pool_size * (b + 1) - 1 of its sequence. P_hj = exp(x_hj - lse_t[h]) with the
 * given lse_t, or that of all visible keys; with top_k > 0, that of the listed blocks. The resulting lse_t of a row
 * adds log sum_b M_b to it, and its mass is sum_b M_b. */
typedef enum skl_pool { SKL_POOL_NONE = 0, SKL_POOL_MAX = 1, SKL_POOL_SUM = 2 } skl_pool;

typedef enum skl_pool_heads { SKL_POOL_HEADS_MEAN = 0, SKL_POOL_HEADS_MAX = 1 } skl_pool_heads;

/* The blocks of a row. Its other visible keys count only in lse_t. A row without blocks counts as one without visible
 * keys. */
typedef enum skl_pool_blocks {
    SKL_POOL_COMPLETE = 0, /* blocks whose keys are all visible (Qwen QSA) */
    SKL_POOL_EARLIER = 1,  /* the same without the block of the row's last visible key (SeerAttention-R) */
    SKL_POOL_VISIBLE = 2   /* blocks whose first key is visible: the last block may be incomplete */
} skl_pool_blocks;

/* Gradients that a plan can compute. */
enum {
    SKL_DQ_T = 1, /* teacher: not with an indexer, and not with SKL_DV_S */
    SKL_DK_T = 2,
    SKL_DQ_S = 4, /* student */
    SKL_DK_S = 8,
    SKL_DW_S = 16,    /* weights of an indexer */
    SKL_DSINK_T = 32, /* logits of sinks: with problem.sinks */
    SKL_DSINK_S = 64,
    SKL_DV_S = 128 /* values: makes a plan for skl_attention_forward and skl_attention_backward, without sinks */
};

/* Start from skl_problem_default(). Lengths may be 0. heads_t is a multiple of heads_s, and heads_t and heads_s are
 * multiples of key_heads_t and key_heads_s. r stands for heads_t / heads_s. */
typedef struct skl_problem {
    size_t struct_size;      /* sizeof(skl_problem) */
    skl_dtype dtype_t;       /* type of q_t, k_t */
    skl_dtype dtype_s;       /* type of q_s, k_s */
    int32_t grad_f32;        /* 1: gradients are f32; 0: each has the type of its tensor */
    uint32_t gradients;      /* SKL_DQ_T | ...: the gradients that calls may request */
    skl_direction direction; /* KL(P || S) or KL(S || P) */
    int64_t batch;           /* number of sequences */
    int64_t len_q;           /* queries per sequence; packed: of the longest sequence */
    int64_t len_k;           /* keys per sequence; packed: of the longest sequence */
    int64_t heads_t;         /* teacher heads: each student head learns the mean of r of them */
    int64_t heads_s;         /* student heads */
    int64_t key_heads_t;     /* key heads, for GQA and MQA without expanded keys; 0: heads_t */
    int64_t key_heads_s;     /* key heads of the student; 0: heads_s */
    int64_t dim_t;           /* head dimension, 1..512; teacher of an indexer: 1..576 */
    int64_t dim_s;           /* head dimension, 1..512 */
    /* Scales and softcaps: exactly 0 is the default; -0 and subnormal numbers are refused, because they are what
     * remains of a number that a float cannot hold. */
    float scale_t;           /* logit scale; 0: 1 / sqrt(dim_t) */
    float scale_s;           /* logit scale; 0: 1 / sqrt(dim_s); indexer: 1 / sqrt(dim_s * index_heads) */
    float softcap_t;         /* logit -> cap * tanh(logit / cap); 0: none */
    float softcap_s;         /* softcap of the student; 0: none; an indexer has none */
    int32_t causal;          /* 1: a query attends to no later key, by position */
    int64_t window_left;     /* a query attends to at most this many keys before its position; -1: no limit */
    int64_t window_right;    /* a query attends to at most this many keys after its position; -1: no limit */
    skl_positions positions; /* how the positions of queries and keys are aligned */
    int64_t offset_q;        /* SKL_POSITIONS_OFFSET: position of query 0 of every sequence */
    int64_t offset_k;        /* SKL_POSITIONS_OFFSET: position of key 0 of every sequence */
    int32_t packed;          /* 1: sequences are concatenated without padding; cu_seqlens_* hold their boundaries */
    int64_t total_q;         /* packed: rows of the query buffers */
    int64_t total_k;         /* packed: rows of the key buffers */
    skl_student student;     /* attention or indexer */
    int64_t index_heads;     /* indexer: index heads per student head, 1..256; they share its keys */
    skl_dtype dtype_w;       /* indexer: type of the weights w_s */
    int32_t index_linear;    /* indexer: 1: without the ReLU */
    int64_t top_k;      /* indexer: > 0: sparse, a row attends only to the top_k keys in inputs.indices; 0: dense */
    int32_t row_bounds; /* 1: a query attends only to keys within the bounds of its row, inputs.key_begin and
                         * inputs.key_end, and the other masks apply as well */
    int32_t sinks;      /* 1: every softmax has a sink: see below */
    skl_link link_s;    /* SKL_LINK_LINEAR needs SKL_STUDENT_ATTENTION, KL(P || S), scale_s = softcap_s = 0 and no
                         * SKL_DV_S. It has no statistics */
    skl_pool pool;      /* indexer, not packed: pools the teacher over blocks of keys */
    skl_pool_heads pool_heads;   /* pool: how the heads of a teacher group combine */
    skl_pool_blocks pool_blocks; /* pool: the blocks of a row */
    int64_t pool_size;           /* pool: keys per block. k_s and dk_s have len_k / pool_size rows, rounded down with
                                  * SKL_POOL_COMPLETE and up otherwise; indices are blocks */
} skl_problem;

/* A sink is one more outcome of P and S that belongs to no key. Its logit is a number per head, inputs.sink_t and
 * inputs.sink_s, and all LSEs include it. Indexers have no sinks. With r > 1, sinks exclude KL(S || P) and teacher
 * gradients. Without sinks, P and S are distributions on the keys alone. */

/* ---- Tensors: address, and strides in elements ------------------------------------------------------------- */

/* Tensors are [batch, heads, length, dim] with a contiguous last dimension; row vectors (KL, LSE, upstream gradient)
 * are f32 [batch, heads, length]. Packed tensors have no batch dimension: stride_batch is ignored. data == NULL: not
 * given or not requested.
 *
 * Inputs may be expanded (stride 0). An output may interleave with other tensors, such as dq and dk in
 * [length, 2, dim], but must not share a byte with another output, an input, an array of the inputs or the workspace
 * that the plan needs. Calls refuse an overlap that they find. Exception: rows->lse_t may be inputs->lse_t with the
 * same strides, and so on for each row vector. */
typedef struct skl_input {
    const void *data;
    int64_t stride_batch, stride_head, stride_row;
} skl_input;

typedef struct skl_output {
    void *data;
    int64_t stride_batch, stride_head, stride_row;
} skl_output;

typedef struct skl_inputs {
    size_t struct_size; /* sizeof(skl_inputs) */
    skl_input q_t, k_t; /* teacher: [batch, heads_t, len_q, dim_t], [batch, key_heads_t, len_k, dim_t] */
    skl_input q_s, k_s; /* student: [batch, heads_s, len_q, dim_s], [batch, key_heads_s, len_k, dim_s]; with
                         * problem.pool, k_s has one row per block */
    /* Row vectors, results of an earlier call: each call says which of them it needs. */
    skl_input lse_t;             /* [batch, heads_t, len_q] log-sum-exp of the teacher's logits, natural log */
    skl_input lse_s;             /* [batch, heads_s, len_q] log-sum-exp of the student's logits */
    skl_input kl;                /* [batch, heads_s, len_q] */
    skl_input dot_t;             /* [batch, heads_t, len_q], with r > 1: see skl_rows */
    skl_input grad_kl;           /* [batch, heads_s, len_q] upstream gradient of every KL_i; without data it is 1, and
                                  * gradients are those of the sum of all KL_i. Where it is 0, the row contributes no
                                  * gradient, even if its tensors hold NaN; on a GPU, NaN still propagates */
    const int32_t *cu_seqlens_q; /* packed: batch + 1 row offsets; the first is 0, and none is below the one before */
    const int32_t *cu_seqlens_k; /* packed: batch + 1 row offsets of the keys */
    const int32_t *key_lengths;  /* optional, not packed: keys j >= key_lengths[b] are padding; moves no position */
    /* Indexer. q_s is [batch, heads_s * index_heads, len_q, dim_s]: index head g of student head h is head
     * h * index_heads + g. */
    skl_input w_s;     /* [batch, heads_s, len_q, index_heads] weights */
    skl_input indices; /* sparse: int32 [batch, heads_s, len_q, top_k], keys of the row's sequence in any order. -1
                        * means none, and so does a key that is masked for the row. A key that occurs twice counts
                        * twice. The CPU refuses other values; a GPU treats them as none: see skl_inputs_check */
    /* row_bounds, [batch, len_q], packed [total_q]: query i attends to keys key_begin[i] <= j < key_end[i] of its
     * sequence. Neither array may decrease within a sequence, but a row may be empty. At least one is given; without
     * the other, keys are not limited on that side. Row bounds serve shards of a context-parallel sequence, chunked
     * attention and sampled rows. The CPU refuses invalid bounds. A GPU limits them to the keys of the sequence; rows
     * of tiles in which they decrease have undefined results there: see skl_inputs_check. */
    const int32_t *key_begin;
    const int32_t *key_end;
    /* sinks: logits, natural log, without scale or softcap. A row without visible keys has no sink. */
    const float *sink_t; /* [heads_t] */
    const float *sink_s; /* [heads_s] */
} skl_inputs;

/* Row results, f32. A row without visible keys has KL 0 and LSE -inf. */
typedef struct skl_rows {
    size_t struct_size; /* sizeof(skl_rows) */
    skl_output kl;    /* [batch, heads_s, len_q], never below 0. Where numbers leave the range of floats it is NaN or
                       * infinite, of either sign */
    skl_output lse_t; /* [batch, heads_t, len_q] */
    skl_output lse_s; /* [batch, heads_s, len_q] */
    skl_output dot_t; /* [batch, heads_t, len_q]: sum_j P_hj dKL/dP_j, or its equivalent under a wider LSE. Only
                       * with r > 1, where teacher gradients need it */
    /* Indexer only, [batch, heads_s, len_q]; 0 for a row without visible keys. A is the first argument of the KL and
     * B the second: teacher and student of KL(P || S). */
    skl_output cross_entropy; /* -sum_j A_j log B_j = KL + entropy */
    skl_output entropy;       /* -sum_j A_j log A_j */
    skl_output mass;          /* probability of the visible keys under the given lse_t, mean over teacher heads; 1 if
                               * lse_t is not given */
} skl_rows;

/* Gradients of sum_i grad_kl[i] * KL_i. Each has the shape of its tensor; the plan's problem.gradients must name it.
 */
typedef struct skl_gradients {
    size_t struct_size; /* sizeof(skl_gradients) */
    skl_output dq_t, dk_t, dq_s, dk_s;
    skl_output dw_s; /* indexer */
    float *dsink_t;  /* sinks: f32 [heads_t]; NULL: not requested */
    float *dsink_s;  /* sinks: f32 [heads_s]; NULL: not requested */
} skl_gradients;

/* The student's own attention o_s = S v_s, for skl_attention_forward and skl_attention_backward. Values have the head
 * size and the type of the keys, dim_s and dtype_s. */
typedef struct skl_attention {
    size_t struct_size; /* sizeof(skl_attention) */
    skl_input v_s;      /* values: [batch, key_heads_s, len_k, dim_s] */
    skl_input o_s;      /* output: [batch, heads_s, len_q, dim_s] */
    skl_input do_s;     /* upstream gradient of the output: [batch, heads_s, len_q, dim_s] */
    skl_output dv_s;    /* gradient of the values; no data: not requested */
} skl_attention;

/* Statistics of the student's attention, for skl_attention_stats: which ones, and where to write them. Start from
 * zeros: a result without data is not requested, and any subset may be. All results are f32, except top_keys.
 *
 *     x_ij = softcap_s(scale_s * <q_s[i], k_s[j]>)    P_ij = exp(x_ij - lse_i), for the keys j visible to row i
 *     lse_i = inputs.lse_s if given, else the log-sum-exp of x_ij over these keys and, with sinks, of sink_s
 *     d_ij = |position of query i - position of key j|, see skl_positions
 *     w_i = row_weights, else 1; 0 for a row outside [row_begin, row_end) of its sequence
 *
 * Sums and maxima over rows i leave out rows with w_i = 0. A sink is no key: it takes its share of each row and adds
 * to the entropy, and no other result contains it. A row without visible keys has lse and max_logit -inf and 0
 * elsewhere, keys -1, and adds to no sum. A sum over no row is 0, and so is key_max. A masked key has 0 everywhere.
 * NaN in a visible query or key makes the lse of its row NaN and every sum that the row adds to; maxima and top keys
 * of such a row are unspecified. */
typedef struct skl_stats {
    size_t struct_size;    /* sizeof(skl_stats) */
    skl_input row_weights; /* f32 [batch, heads_s, len_q]; no data: all 1. Strides may be 0 */
    int64_t row_begin;     /* rows of the sums and maxima over rows, by number in their sequence, as in a Python */
    int64_t row_end;       /* slice: a negative bound counts from the end, and row_end = 0 is the end */
    /* Per key: [batch, heads_s, len_k]; with per_key_head [batch, key_heads_s, len_k], packed [heads, total_k]. */
    int32_t per_key_head; /* 1: the query heads that share a key head count as more rows of one head */
    skl_output key_sum;   /* sum_i w_i P_ij */
    skl_output key_max;   /* max_i P_ij */
    /* Per row, whatever its weight: [batch, heads_s, len_q] */
    skl_output lse;               /* lse_i; must not be requested if inputs.lse_s is given */
    skl_output entropy;           /* -sum_j P_ij log P_ij, natural log; the sink is one more outcome */
    skl_output max_logit;         /* max_j x_ij */
    skl_output expected_distance; /* sum_j P_ij d_ij */
    /* Per head: contiguous [batch, heads_s, ...], also when packed; NULL: not requested. */
    float *head_max_logit;  /* [batch, heads_s]: max_ij x_ij over the rows of the sums; -inf without any */
    float *distance_mass;   /* [batch, heads_s, distance_count]: sum_i w_i P_ij over the pairs of a bucket: bucket 0
                             * has d_ij = 0, and bucket n has 2^(n-1) <= d_ij < 2^n. The last bucket has no end */
    int32_t distance_count; /* buckets, 1..64 */
    int32_t range_count;    /* key ranges, 1..64 */
    /* int32 [batch, range_count, 2]: begin and end of ranges of keys, by number in their sequence. Ranges may overlap
     * or be empty. The CPU refuses ranges outside the sequence; a GPU cuts them off. */
    const int32_t *key_ranges;
    skl_output range_mass; /* [batch, heads_s, len_q, range_count]: sum_j P_ij over a range, whatever w_i */
    float *range_sum;      /* [batch, heads_s, range_count]: sum_i w_i range_mass_i */
    /* The top_k largest P_ij of every row, largest first: [batch, heads_s, len_q, top_k]. Where a row sees fewer keys
     * the rest is -1 and 0. Equal ones come in the order of their keys on the CPU, in any order on a GPU. A key with
     * a logit of -inf has P_ij = 0; the CPU lists it last, and a GPU has -1 in its place. */
    int32_t top_k;       /* 1..64 */
    skl_output top_keys; /* int32: keys, by number in their sequence */
    skl_output top_p;    /* P_ij of these keys */
    /* All P_ij of chosen rows. */
    int32_t chosen_count;       /* rows per sequence */
    const int32_t *chosen_rows; /* int32 [batch, chosen_count]: rows by number in their sequence; -1: none, a row of
                                 * zeros. The CPU refuses other numbers; a GPU treats them as none */
    float *weights;             /* contiguous [batch, heads_s, chosen_count, len_k], also when packed; keys by number
                                 * in their sequence, 0 after its last; NULL: not requested */
} skl_stats;

/* ---- Plans: kernels and workspace, chosen once for many calls ------------------------------------------------ */

/* A plan checks a problem, chooses kernels and knows the workspace of each operation:
 *
 *     skl_plan *plan;
 *     skl_plan_create(&plan, &problem, NULL);
 *     const size_t size = skl_plan_workspace_size(plan, SKL_OP_FORWARD);  // each operation has a size of its own
 *     skl_forward(plan, &inputs, &rows, workspace, size, NULL);           // as often as you like
 *     skl_plan_destroy(plan);
 *
 * A plan is immutable and can be shared between threads. Run calls never allocate, synchronize, print or exit. */
typedef struct skl_plan skl_plan;

typedef enum skl_device { SKL_CPU = 0, SKL_CUDA = 1 } skl_device;

/* Called now and then, in the thread of the run call, when `done` of `total` units of work are finished. */
typedef void (*skl_progress)(void *user, int64_t done, int64_t total);

/* How to compute. NULL stands for skl_options_default(): CPU, all cores available to the process. */
typedef struct skl_options {
    size_t struct_size;    /* sizeof(skl_options) */
    skl_device device;     /* SKL_CPU or SKL_CUDA */
    int32_t device_index;  /* SKL_CUDA: the number of the GPU */
    int32_t threads;       /* CPU threads; 0: STREAMKL_THREADS, else one per core. Results do not depend on it */
    int32_t deterministic; /* 1: gradients have the same bits in every run. 0: Hopper GPUs may sum key gradients of
                            * heads of up to 128 dimensions in any order, which is faster but takes workspace. CPU
                            * results are always deterministic */
    const char *kernel;    /* forces a kernel by name; NULL: STREAMKL_KERNEL, else the best that fits */
    skl_progress progress; /* CPU: progress of long calls; may be NULL */
    void *progress_user;   /* CPU: first argument of `progress` */
    const char *gpu;       /* SKL_CUDA: explains the launches on a GPU that need not be here: a100, b200, h100, h200,
                            * l40s or rtx5090. Such a plan runs nothing. NULL: device_index, on this machine */
    const int32_t *cancel; /* CPU: run calls end with SKL_ERROR_CANCELLED within a tile after another thread or a
                            * signal handler sets this flag to other than 0; NULL: nothing cancels calls */
} skl_options;

/* One operation per run call: SKL_OP_FORWARD is skl_forward, SKL_OP_ATTENTION_STATS skl_attention_stats. */
typedef enum skl_op {
    SKL_OP_FORWARD = 0,
    SKL_OP_BACKWARD = 1,
    SKL_OP_FORWARD_BACKWARD = 2,
    SKL_OP_PARTIAL = 3,
    SKL_OP_ATTENTION_BACKWARD = 4,
    SKL_OP_ATTENTION_FORWARD = 5,
    SKL_OP_ATTENTION_STATS = 6
} skl_op;

SKL_API skl_status skl_plan_create(skl_plan **plan, const skl_problem *problem, const skl_options *options);
SKL_API void skl_plan_destroy(skl_plan *plan); /* NULL is fine */

/* Returns the bytes of workspace that an operation needs. Align it to SKL_WORKSPACE_ALIGNMENT, and give concurrent
 * calls separate ones. Its size is at most the sum of the rows that apply:
 *
 *     at most    for each                              growth  operations          where
 *     16 MiB     thread with work                      O(1)    all                 CPU
 *     4 bytes    thread and element of a head's dk     O(N)    gradients           CPU, 16-bit dk
 *     4 bytes    element of dk_t and dk_s              O(N)    gradients           CPU, 16-bit dk, groups
 *     16 bytes   row and student head                  O(N)    attention_stats     CPU
 *     2 MiB      call                                  O(1)    all                 GPU
 *     64 MiB     call                                  O(1)    attention_stats     GPU
 *     12 bytes   row and student head                  O(N)    attention_stats     GPU
 *     4224 bytes  key of one sequence                  O(N)    attention_stats     GPU
 *     8 bytes    key                                   O(N)    gradients           GPU, row bounds
 *     4 bytes    element of dk_t and dk_s              O(N)    gradients           Hopper, summed dk
 *     516 bytes  row of q_t, q_s, k_t and k_s          O(N)    all                 Hopper, two-term rows
 *     4 bytes    element of dq_s                       O(N)    attention_backward  Hopper
 *     16 bytes   row and student head                  O(N)    attention_backward  Hopper
 *     448 MiB    call                                  O(1)    all                 GPU, groups or indexer
 *     4 bytes    row and teacher head                  O(N)    all but backward    GPU, groups or indexer
 *     384 bytes  row and student head                  O(N)    all but backward    GPU, groups or indexer
 *     512 bytes  key of one sequence                   O(N)    gradients           GPU, groups or indexer
 *     4 bytes    element of dk_t and dk_s              O(N)    gradients           GPU, groups
 *     8 bytes    element of dk_s                       O(N)    gradients           GPU, indexer
 *     8 bytes    row and block                         O(N)    all                 GPU, pooled teacher
 *     128 bytes  block of one sequence                 O(N)    all                 GPU, pooled teacher
 *
 *   - N stands for len_q and len_k. A thread has work if there is a tile of a head for it.
 *   - CPU, attention_stats: the rows of a sequence count as a multiple of 96.
 *   - CPU, 16-bit dk: f32 sums of dk_t, dk_s and dv_s of one key head, where these are 16-bit; of a teacher group
 *     with several key heads those of dk_t of all of them.
 *   - Hopper, summed dk: 16-bit dk of heads of up to 128 dimensions, in a plan that need not be deterministic.
 *   - Hopper, two-term rows: f32, mixed types and head sizes that are no multiple of 8, up to 128 dimensions. A row
 *     takes 4 bytes per element, padded to 128.
 *   - groups: r > 1. */
#define SKL_WORKSPACE_ALIGNMENT 64
SKL_API size_t skl_plan_workspace_size(const skl_plan *plan, skl_op op);

/* Returns the name of the kernel of calls with aligned tensors, as in skl_kernel_at; skl_plan_explain lists every
 * launch. */
SKL_API const char *skl_plan_kernel(const skl_plan *plan);

/* Returns the number of CPU threads; 0 on a GPU. */
SKL_API int32_t skl_plan_threads(const skl_plan *plan);

/* Explains which kernels an operation launches and why, with one line per launch:
 *
 *     STEP: KERNEL, VARIANT[, N splits][, N bytes of workspace] (REASON)
 *
 * The choice can depend on strides and alignment, so pass the inputs of the call; no tensor is read. NULL stands for
 * aligned, contiguous inputs. All of problem.gradients, the KL of every row and all statistics count as requested.
 * Like snprintf, it writes at most `size` bytes including the terminating zero and returns the length of the whole
 * text. Returns 0 and sets skl_last_error() if an argument is invalid. */
SKL_API size_t skl_plan_explain(const skl_plan *plan, const skl_inputs *inputs, skl_op op, char *buffer, size_t size);

/* Returns 1 if calls of an operation run, with aligned tensors and all of problem.gradients. Returns 0 and sets
 * skl_last_error() if not: the message says why, and what to call instead. Only the three calls of the student's own
 * attention can be missing, and skl_partial with a pooled teacher. On a GPU, skl_attention_forward and
 * skl_attention_backward need Hopper, bf16 or f16 on both sides, heads of up to 128 dimensions in multiples of 8,
 * KL(P || S), r = 1 and no softcap; the forward also needs positive scales, the backward a plan that need not be
 * deterministic. On a CPU there is no skl_attention_forward. */
SKL_API int skl_plan_supports(const skl_plan *plan, skl_op op);

/* ---- Running ----------------------------------------------------------------------------------------------- */

/* Row results: KL, LSEs and whatever else `rows` requests. Where the teacher's LSEs come from:
 *   - Attention with r = 1: always computed; inputs->lse_t is not read.
 *   - r > 1 or an indexer: inputs->lse_t if given, else computed in an extra pass over the keys.
 *
 * A given LSE may be wider, that is, cover more keys than are visible, except with sinks. P is then the conditional
 * distribution on the visible keys, and teacher gradients treat the share of the other keys as constant. rows->lse_t
 * always normalizes P over the visible keys: pass it to skl_backward. */
SKL_API skl_status skl_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows, void *workspace,
                               size_t workspace_size, skl_stream stream);

/* Gradients from the row results of a forward: always lse_t and lse_s. Gradients of the first argument of the KL
 * (teacher in KL(P || S), student in KL(S || P)) also need kl; with r > 1, teacher gradients need dot_t instead.
 * With a pooled teacher, lse_t is the one that skl_forward has returned. skl_problem_needs() returns these needs as
 * bits. */
SKL_API skl_status skl_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_gradients *gradients,
                                void *workspace, size_t workspace_size, skl_stream stream);

/* One-pass: loss and gradients in one pass over the keys, if both LSEs of the visible keys are known. Every flash
 * attention returns its LSE; for an indexer, skl_forward with only rows->lse_s requested computes it without the
 * teacher. rows->lse_t, rows->lse_s and rows->mass must not be requested. kl or dot_t must be requested in rows where
 * skl_backward would need it, which costs a second pass. For teacher gradients under wider LSEs, call skl_forward,
 * then skl_backward.
 *
 * With a pooled teacher, the call reads the teacher's keys once and computes both LSEs: request rows->lse_t and
 * rows->lse_s, pass inputs->lse_t as to skl_forward, and leave inputs->lse_s empty. rows->mass may be requested.
 *
 * Gradients are those of the sum over rows, which can exceed the range of f16. A factor that is known at this time,
 * such as 1 / rows of a mean or a loss scale, belongs in inputs->grad_kl: it is applied before gradients are rounded,
 * and one float with strides of 0 serves all rows. A factor that follows later needs problem.grad_f32. */
SKL_API skl_status skl_forward_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows,
                                        const skl_gradients *gradients, void *workspace, size_t workspace_size,
                                        skl_stream stream);

/* Attention that carries its KL, forward: the output of the student's attention o_s = S v_s, and the row results of
 * skl_forward, in one pass of three products. It takes the place of the attention's own forward and returns all that
 * skl_attention_backward needs. rows->kl, lse_t and lse_s are those to store. The plan's problem.gradients must
 * include SKL_DV_S. Only GPUs have kernels for it: where skl_plan_supports() says 0, call your attention and
 * skl_forward. */
SKL_API skl_status skl_attention_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_input *v_s,
                                         const skl_rows *rows, const skl_output *o_s, void *workspace,
                                         size_t workspace_size, skl_stream stream);

/* Attention that carries its KL, backward: that of the student's attention o_s = S v_s, with the gradients of
 * sum_i grad_kl[i] * KL_i added to its own. With dP = do_s v_s^T and D_i = <do_s[i], o_s[i]>, KL(P || S) makes it
 *
 *     dS_ij = S_ij (dP_ij - D_i) + grad_kl[i] (S_ij - P_ij)
 *     dq_s = scale_s dS k_s      dk_s = scale_s dS^T q_s      dv_s = S^T do_s
 *
 * The call replaces the attention's own backward: both need S, and multiply it by the same queries and keys.
 *   - inputs->lse_s is the LSE of the attention's forward, inputs->lse_t that of the teacher; both cover the visible
 *     keys.
 *   - attention->do_s holds the gradient of the loss without this KL, inputs->grad_kl the weight of each row's KL.
 *   - gradients->dq_s, gradients->dk_s and attention->dv_s are the gradients to compute.
 *   - rows->kl is optional with KL(P || S), and must be requested with KL(S || P).
 * The plan's problem.gradients must include SKL_DV_S. skl_plan_supports() tells whether a GPU has a kernel for it. */
SKL_API skl_status skl_attention_backward(const skl_plan *plan, const skl_inputs *inputs,
                                          const skl_attention *attention, const skl_rows *rows,
                                          const skl_gradients *gradients, void *workspace, size_t workspace_size,
                                          skl_stream stream);

/* Statistics of one attention, that of the student: which keys it attends to, and how much, without its matrix.
 *
 *     problem.heads_t = problem.heads_s = 32, problem.dim_t = problem.dim_s = 128, problem.gradients = 0;
 *     skl_inputs inputs = {.struct_size = sizeof inputs, .q_s = q, .k_s = k};
 *     skl_stats stats = {.struct_size = sizeof stats, .key_sum = ..., .entropy = ..., .row_begin = -64};
 *     const size_t size = skl_plan_workspace_size(plan, SKL_OP_ATTENTION_STATS);
 *     skl_attention_stats(plan, &inputs, &stats, workspace, size, NULL);
 *
 * The teacher is not read: q_t, k_t and sink_t may be missing. The problem's fields of the teacher must be valid;
 * heads_t and dim_t can repeat those of the student.
 *
 * inputs->lse_s is optional, and saves the pass over the keys that computes it: every flash attention returns its
 * LSE. It includes the sink. A given LSE may be wider, that is, cover more keys than are visible: then P_ij are their
 * shares of all these keys, and sums over calls for parts of the keys add up to those of the whole. The CPU has a
 * kernel for every attention; skl_plan_supports() tells whether a GPU has one. */
SKL_API skl_status skl_attention_stats(const skl_plan *plan, const skl_inputs *inputs, const skl_stats *stats,
                                       void *workspace, size_t workspace_size, skl_stream stream);

/* ---- Before a call: what it needs, and whether its arrays are valid ----------------------------------------- */

/* Row vectors as bits. */
enum { SKL_ROW_KL = 1, SKL_ROW_LSE_T = 2, SKL_ROW_LSE_S = 4, SKL_ROW_DOT_T = 8 };

/* Returns the row vectors that an operation with all of problem.gradients requires. SKL_OP_BACKWARD and
 * SKL_OP_PARTIAL read them from inputs. SKL_OP_FORWARD_BACKWARD and SKL_OP_ATTENTION_BACKWARD read the LSEs from
 * inputs; kl and dot_t must be requested in rows, where the gradients then read them. Returns 0 and sets
 * skl_last_error() if an argument is invalid. */
SKL_API uint32_t skl_problem_needs(const skl_problem *problem, skl_op op);

/* Checks inputs whose arrays (cu_seqlens, key_lengths, row bounds, indices) are in host memory: struct_size,
 * pointers, strides, and the values of the arrays. Calls on the CPU do this themselves, whatever they are asked for.
 * A GPU call cannot read them, so check before the arrays are copied to the GPU. The plan may be for either device.
 */
SKL_API skl_status skl_inputs_check(const skl_plan *plan, const skl_inputs *inputs);

/* ---- Partial states: keys split over calls, devices or ranks ----------------------------------------------- */

/* Summary of the keys that a query row has seen so far. A is the first argument of the KL, B the second; a and b are
 * their logits, in base 2:
 *
 *     m, l = shift and sum of 2^(logit - m)
 *     w    = sum 2^(a - m_a) ((a - m_a) - (b - m_b))
 *
 * Arrays of states are contiguous: [batch, heads_s, len_q], packed [heads_s, total_q]. */
typedef struct skl_row_state {
    float m_a, l_a, m_b, l_b, w;
} skl_row_state;

/* Computes states over keys [key_begin, key_end) of every sequence. With r > 1 and for indexers, inputs->lse_t must
 * be given and cover all keys. */
SKL_API skl_status skl_partial(const skl_plan *plan, const skl_inputs *inputs, int64_t key_begin, int64_t key_end,
                               skl_row_state *states, void *workspace, size_t workspace_size, skl_stream stream);

/* Merges `from` into `into`, row by row; the two share no memory. Merging is associative: any order gives the same
 * result up to rounding. */
SKL_API skl_status skl_states_merge(const skl_plan *plan, skl_row_state *into, const skl_row_state *from,
                                    skl_stream stream);

/* Computes KL and LSEs of merged states; other row results cannot be requested. States contain no sinks: this call
 * adds them. `inputs` may be NULL, except with sinks and where rows->lse_t needs inputs->lse_t: with r > 1 and for
 * indexers. Given inputs need no q and k, and their arrays are checked as in every call. */
SKL_API skl_status skl_states_finish(const skl_plan *plan, const skl_inputs *inputs, const skl_row_state *states,
                                     const skl_rows *rows, skl_stream stream);

/* ---- Version and kernels ----------------------------------------------------------------------------------- */

SKL_API const char *skl_version(void);      /* "MAJOR.MINOR.PATCH" */
SKL_API const char *skl_build_info(void);   /* compiler, target and backends on one line */
SKL_API const char *skl_cpu_features(void); /* instruction sets found on this CPU, separated by spaces */

typedef struct skl_kernel_info {
    size_t struct_size;       /* sizeof(skl_kernel_info), set by the caller */
    const char *name;         /* for options.kernel and STREAMKL_KERNEL */
    skl_device device;        /* SKL_CPU or SKL_CUDA */
    int32_t usable;           /* 1 if it runs on this machine */
    const char *detail;       /* instruction set and tile shape; if not usable, the reason */
    int32_t rounds_gradients; /* 1: rounds logit gradients to the 16-bit input type before it multiplies them by q or
                               * k, as other attention backwards on tensor cores do; 0: keeps them in f32 */
} skl_kernel_info;

/* Fills `info` with kernel number `index` of this build, best first, and returns 1. Returns 0 past the end of the
 * list, and if struct_size is invalid. */
SKL_API int skl_kernel_at(int32_t index, skl_kernel_info *info);

/* ---- Initializers ------------------------------------------------------------------------------------------ */

static inline skl_problem skl_problem_default(void)
{
    skl_problem problem;
    memset(&problem, 0, sizeof problem);
    problem.struct_size = sizeof(skl_problem);
    problem.gradients = SKL_DQ_S | SKL_DK_S;
    problem.batch = 1;
    problem.heads_t = problem.heads_s = 1;
    problem.window_left = problem.window_right = -1;
    return problem;
}

static inline skl_options skl_options_default(void)
{
    skl_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof(skl_options);
    return options;
}

/* A contiguous [batch, heads, length, dim] tensor; dim = 1 for row vectors. */
static inline skl_input skl_input_contiguous(const void *data, int64_t heads, int64_t length, int64_t dim)
{
    skl_input tensor = {data, heads * length * dim, length * dim, dim};
    return tensor;
}

static inline skl_output skl_output_contiguous(void *data, int64_t heads, int64_t length, int64_t dim)
{
    skl_output tensor = {data, heads * length * dim, length * dim, dim};
    return tensor;
}

#ifdef __cplusplus
}
#endif

#endif
