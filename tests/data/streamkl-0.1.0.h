/* StreamKL: the KL divergence between two attention distributions, without the N x N matrices.
 *
 * For every batch, student head and query row i, over the keys j that the row sees:
 *
 *     teacher  x_ij = softcap_t(scale_t * <q_t[i], k_t[j]>)    P = softmax_j(x)
 *     student  y_ij = softcap_s(scale_s * <q_s[i], k_s[j]>)    S = softmax_j(y)
 *     KL_i = sum_j P_ij (log P_ij - log S_ij)                  (or KL(S || P): see skl_direction)
 *
 * The student may also be the indexer of a sparse attention: see skl_student.
 *
 * Describe a problem, make a plan, run it as often as you like:
 *
 *     skl_problem problem = skl_problem_default();   // set shapes, types, masks
 *     skl_plan *plan;
 *     skl_plan_create(&plan, &problem, NULL);
 *     skl_forward(plan, &inputs, &rows, workspace, workspace_size, NULL);
 *     skl_plan_destroy(plan);
 *
 * Every call returns a status; skl_last_error() then says which argument, its value and what is accepted.
 * A plan is immutable and may be shared between threads. Run calls never allocate, print or exit.
 * Structs begin with their size: a library of another release, whose structs differ, refuses them.
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
#define SKL_VERSION_MINOR 1
#define SKL_VERSION_PATCH 0

/* ---- Status ------------------------------------------------------------------------------------------------ */

typedef enum skl_status {
    SKL_OK = 0,
    SKL_ERROR_ARGUMENT = 1,    /* an argument is out of range, missing or disagrees with another */
    SKL_ERROR_UNSUPPORTED = 2, /* valid, but nothing in this build or on this machine can do it */
    SKL_ERROR_MEMORY = 3,      /* an allocation failed (only skl_plan_create allocates) */
    SKL_ERROR_WORKSPACE = 4,   /* the workspace is NULL, too small or misaligned */
    SKL_ERROR_DEVICE = 5       /* the device is absent or reported a fault */
} skl_status;

/* "SKL_OK", "SKL_ERROR_ARGUMENT", ... */
SKL_API const char *skl_status_name(skl_status status);

/* The message of the last call of this thread that failed: "dim_t=0: must be 1..512". Never NULL. */
SKL_API const char *skl_last_error(void);

/* ---- The problem: shapes, types and masks; no pointers ----------------------------------------------------- */

typedef enum skl_dtype { SKL_F32 = 0, SKL_F16 = 1, SKL_BF16 = 2 } skl_dtype;

typedef enum skl_direction {
    SKL_KL_FORWARD = 0, /* KL(P || S): the student covers everything the teacher looks at */
    SKL_KL_REVERSE = 1  /* KL(S || P): the student avoids what the teacher ignores */
} skl_direction;

typedef enum skl_positions {
    SKL_POSITIONS_BOTTOM_RIGHT = 0, /* the last query stands at the last key: query i at i + len_k - len_q */
    SKL_POSITIONS_OFFSET = 1 /* query i stands at offset_q + i, key j at offset_k + j: shards of a longer one */
} skl_positions;

typedef enum skl_student {
    SKL_STUDENT_ATTENTION = 0, /* y_ij = softcap_s(scale_s * <q_s[i], k_s[j]>) */
    SKL_STUDENT_INDEXER = 1 /* y_ij = scale_s * sum_g w_s[i,g] relu(<q_s[g,i], k_s[j]>), over index_heads heads g */
} skl_student;

/* Gradients a plan can be asked for; of an indexer only those of the student, and only it has weights. */
enum { SKL_DQ_T = 1, SKL_DK_T = 2, SKL_DQ_S = 4, SKL_DK_S = 8, SKL_DW_S = 16 };

/* Start from skl_problem_default(). Lengths may be 0; heads_t is a multiple of heads_s, heads_* of key_heads_*. */
typedef struct skl_problem {
    size_t struct_size;      /* sizeof(skl_problem) */
    skl_dtype dtype_t;       /* type of q_t, k_t */
    skl_dtype dtype_s;       /* type of q_s, k_s */
    int32_t grad_f32;        /* 1: gradients are f32; 0: each in the type of its tensor */
    uint32_t gradients;      /* SKL_DQ_T | ...: which gradients a backward may ask for */
    skl_direction direction; /* KL(P || S) or KL(S || P) */
    int64_t batch;           /* sequences */
    int64_t len_q;           /* queries of a sequence (packed: of the longest one) */
    int64_t len_k;           /* keys of a sequence (packed: of the longest one) */
    int64_t heads_t;         /* r = heads_t / heads_s teacher heads are averaged for each student head */
    int64_t heads_s;
    int64_t key_heads_t; /* key heads; 0: as many as query heads. GQA and MQA need no expanded keys */
    int64_t key_heads_s;
    int64_t dim_t; /* head sizes, 1..512 each; of the teacher of an indexer 1..576 */
    int64_t dim_s;
    float scale_t; /* logit scale; 0: 1 / sqrt(dim), of an indexer 1 / sqrt(dim_s * index_heads) */
    float scale_s;
    float softcap_t; /* logit -> cap * tanh(logit / cap); 0: none */
    float softcap_s;
    int32_t causal;          /* 1: a query sees no key behind its own position */
    int64_t window_left;     /* a query sees keys at most this far before its position; -1: no limit */
    int64_t window_right;    /* and at most this far behind it; -1: no limit */
    skl_positions positions; /* how query and key positions are aligned */
    int64_t offset_q;        /* SKL_POSITIONS_OFFSET: position of query 0 and of key 0 of every sequence */
    int64_t offset_k;
    int32_t packed;  /* 1: sequences lie end to end, divided by cu_seqlens_q and cu_seqlens_k */
    int64_t total_q; /* packed: rows of the query buffers, and of the key buffers */
    int64_t total_k;
    skl_student student;
    int64_t index_heads;  /* indexer: heads g that share a student head's keys, 1..256 */
    skl_dtype dtype_w;    /* indexer: type of the weights w_s */
    int32_t index_linear; /* indexer: 1: no ReLU */
    int64_t top_k;        /* indexer: k > 0: a row sees only the keys that inputs.indices lists for it; 0: all keys */
} skl_problem;

/* ---- Tensors: address and strides, in elements ------------------------------------------------------------- */

/* [batch, heads, length, dim] with the last dimension contiguous; packed tensors have no batch dimension and
 * their stride_batch is ignored. A row vector (KL, LSE, upstream gradient) is f32 [batch, heads, length].
 * Inputs may be expanded (stride 0). An output has memory of its own: views of one buffer may interleave, say dq and
 * dk in [length, 2, dim], but share no byte with each other or with an input, save that rows->x may be inputs->x
 * itself. A call that finds an overlap refuses it. data == NULL: not given, not wanted. */
typedef struct skl_input {
    const void *data;
    int64_t stride_batch, stride_head, stride_row;
} skl_input;

typedef struct skl_output {
    void *data;
    int64_t stride_batch, stride_head, stride_row;
} skl_output;

typedef struct skl_inputs {
    size_t struct_size;          /* sizeof(skl_inputs) */
    skl_input q_t, k_t;          /* teacher: [batch, heads_t, len_q, dim_t], [batch, key_heads_t, len_k, dim_t] */
    skl_input q_s, k_s;          /* student: the same with heads_s, key_heads_s, dim_s */
    skl_input lse_t;             /* [batch, heads_t, len_q], natural log. See each call for what it needs */
    skl_input lse_s;             /* [batch, heads_s, len_q] */
    skl_input kl;                /* [batch, heads_s, len_q] */
    skl_input dot_t;             /* [batch, heads_t, len_q] */
    skl_input grad_kl;           /* [batch, heads_s, len_q] upstream gradient of every KL_i; not given: all ones.
                                  * A row of 0 has no gradients, whatever it holds; on a GPU NaN in it still
                                  * reaches them */
    const int32_t *cu_seqlens_q; /* packed: batch + 1 row offsets, 0 first, never decreasing */
    const int32_t *cu_seqlens_k;
    const int32_t *key_lengths; /* optional, not packed: keys j >= key_lengths[b] are padding; moves no position */
    /* Indexer. q_s is [batch, heads_s * index_heads, len_q, dim_s]: index head g of student head h is head
     * h * index_heads + g. */
    skl_input w_s;     /* [batch, heads_s, len_q, index_heads] weights */
    skl_input indices; /* int32 [batch, heads_s, len_q, top_k]: keys of the row's own sequence, in any order. -1, or a
                        * key that the masks hide from the row: none; a key that is listed twice counts twice. What is
                        * no key of the sequence the CPU refuses; a GPU, which cannot look first, takes it for none */
} skl_inputs;

/* Row results, f32. A row that sees no key has KL 0 and LSE -inf. */
typedef struct skl_rows {
    size_t struct_size; /* sizeof(skl_rows) */
    skl_output kl;      /* [batch, heads_s, len_q], never below 0 */
    skl_output lse_t;   /* [batch, heads_t, len_q] */
    skl_output lse_s;   /* [batch, heads_s, len_q] */
    skl_output dot_t;   /* [batch, heads_t, len_q]: sum_j P_hj dKL/dP_j, or what takes its place with a wider LSE;
                         * only with r > 1, for teacher gradients */
    /* Indexer, [batch, heads_s, len_q]; 0 for a row that sees no key. A is the first argument of the KL, B the
     * second: with KL(P || S) teacher and student. */
    skl_output cross_entropy; /* -sum_j A_j log B_j: KL + entropy */
    skl_output entropy;       /* -sum_j A_j log A_j */
    skl_output mass;          /* what the visible keys hold of the attention that a given lse_t covers, mean of heads;
                               * 1 when none was given */
} skl_rows;

/* Gradients of sum_i grad_kl[i] * KL_i; each has the shape of its tensor. */
typedef struct skl_gradients {
    size_t struct_size; /* sizeof(skl_gradients) */
    skl_output dq_t, dk_t, dq_s, dk_s;
    skl_output dw_s; /* indexer */
} skl_gradients;

/* ---- The plan ---------------------------------------------------------------------------------------------- */

typedef enum skl_device { SKL_CPU = 0, SKL_CUDA = 1 } skl_device;

/* Called from the thread that made the run call, now and then, with done of total units of work finished. */
typedef void (*skl_progress)(void *user, int64_t done, int64_t total);

/* How to compute; NULL stands for skl_options_default(): CPU, all cores of the process. */
typedef struct skl_options {
    size_t struct_size; /* sizeof(skl_options) */
    skl_device device;
    int32_t device_index;
    int32_t threads;       /* CPU threads; 0: STREAMKL_THREADS, else every core. Results do not depend on it */
    int32_t deterministic; /* 1: gradients have the same bits on every run, and need no workspace that grows with
                            * len_k, unless the student is an indexer; 0: Hopper GPUs may sum key gradients of heads
                            * of up to 128 dimensions in any order, which is faster */
    const char *kernel;    /* force a kernel by its name; NULL: STREAMKL_KERNEL, else the best that fits */
    skl_progress progress; /* CPU: progress of long calls; may be NULL */
    void *progress_user;
} skl_options;

typedef struct skl_plan skl_plan;

typedef enum skl_op {
    SKL_OP_FORWARD = 0,
    SKL_OP_BACKWARD = 1,
    SKL_OP_FORWARD_BACKWARD = 2,
    SKL_OP_PARTIAL = 3
} skl_op;

SKL_API skl_status skl_plan_create(skl_plan **plan, const skl_problem *problem, const skl_options *options);
SKL_API void skl_plan_destroy(skl_plan *plan); /* NULL is fine */

/* Bytes of workspace an operation needs, at an address that is a multiple of SKL_WORKSPACE_ALIGNMENT. It does not
 * grow with len_q or len_k, with two exceptions on a GPU. A backward on Hopper that is not asked to be deterministic
 * sums 16-bit key gradients of heads of up to 128 dimensions there, in f32. Indexers have row sums there, and sum key
 * gradients in f32; a backward takes up to 256 MiB beside, or what one list or 128 queries need where that is more.
 * Calls that run at the same time need a workspace each. */
#define SKL_WORKSPACE_ALIGNMENT 64
SKL_API size_t skl_plan_workspace_size(const skl_plan *plan, skl_op op);
SKL_API const char *skl_plan_kernel(const skl_plan *plan); /* its name in the kernel list */
SKL_API int32_t skl_plan_threads(const skl_plan *plan);    /* CPU threads it uses; 0 on a GPU */

/* ---- Running ----------------------------------------------------------------------------------------------- */

/* `struct CUstream_st *` is cudaStream_t's own type: pass a CUDA stream as it is, NULL on the CPU. */
typedef struct CUstream_st *skl_stream;

/* KL and LSEs, whichever of `rows` are wanted. Teacher LSEs:
 *   r = 1: computed; inputs->lse_t is not read.
 *   r > 1, and any indexer: inputs->lse_t if given, else computed in a pass of its own. A given LSE may cover more
 *          keys than are visible: P is then the conditional distribution on the visible keys, and teacher gradients
 *          take what the hidden keys add to an LSE as fixed.
 * rows->lse_t is always the normaliser of P on the visible keys: what skl_backward wants. */
SKL_API skl_status skl_forward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows, void *workspace,
                               size_t workspace_size, skl_stream stream);

/* Gradients from the saved rows of a forward: needs lse_t and lse_s. Gradients of the first argument of the KL
 * (teacher in KL(P || S), student in KL(S || P)) also need kl; teacher gradients with r > 1 need dot_t. */
SKL_API skl_status skl_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_gradients *gradients,
                                void *workspace, size_t workspace_size, skl_stream stream);

/* Loss and gradients in one sweep, when both LSEs (of the visible keys) are already known: every flash attention
 * returns them, and skl_forward with nothing but rows->lse_s gives an indexer's without a look at the teacher.
 * rows->lse_* and rows->mass must be empty; whatever skl_backward would read as kl or dot_t must be wanted in rows,
 * and costs a second sweep. Teacher gradients under LSEs of more keys: skl_forward, then skl_backward. */
SKL_API skl_status skl_forward_backward(const skl_plan *plan, const skl_inputs *inputs, const skl_rows *rows,
                                        const skl_gradients *gradients, void *workspace, size_t workspace_size,
                                        skl_stream stream);

/* ---- Partial states: keys split over calls, devices or ranks ----------------------------------------------- */

/* What one query row remembers of the keys it has seen; base 2. A is the first argument of the KL, B the second:
 *     m, l = stabiliser and sum of 2^(logit - m);   w = sum 2^(a - m_a) ((a - m_a) - (b - m_b)).
 * Arrays of states are contiguous: [batch, heads_s, len_q], packed [heads_s, total_q]. */
typedef struct skl_row_state {
    float m_a, l_a, m_b, l_b, w;
} skl_row_state;

/* States over keys [key_begin, key_end) of every sequence. With r > 1, and for any indexer, inputs->lse_t (of all
 * keys) is required. */
SKL_API skl_status skl_partial(const skl_plan *plan, const skl_inputs *inputs, int64_t key_begin, int64_t key_end,
                               skl_row_state *states, void *workspace, size_t workspace_size, skl_stream stream);

/* into = into + from, row by row; associative, so any order and any tree will do. */
SKL_API skl_status skl_states_merge(const skl_plan *plan, skl_row_state *into, const skl_row_state *from,
                                    skl_stream stream);

/* KL and LSEs of merged states. With r > 1, and for any indexer, inputs->lse_t is needed for rows->lse_t; otherwise
 * inputs may be NULL. rows->dot_t and what only an indexer has must be empty. */
SKL_API skl_status skl_states_finish(const skl_plan *plan, const skl_inputs *inputs, const skl_row_state *states,
                                     const skl_rows *rows, skl_stream stream);

/* ---- What is here ------------------------------------------------------------------------------------------ */

SKL_API const char *skl_version(void);      /* "0.1.0" */
SKL_API const char *skl_build_info(void);   /* compiler, target, backends, on one line */
SKL_API const char *skl_cpu_features(void); /* instruction sets found on this CPU, separated by spaces */

typedef struct skl_kernel_info {
    const char *name; /* what STREAMKL_KERNEL takes */
    skl_device device;
    int32_t usable;           /* 1 if it runs on this machine */
    const char *detail;       /* instruction set and tile shape; why not, if it is not usable */
    int32_t rounds_gradients; /* 1: rounds gradients of logits to the inputs' 16-bit type before it multiplies them
                               * with q or k, as attention backwards on tensor cores do; 0: keeps them in f32 */
} skl_kernel_info;

/* Every kernel of this build, best first. Returns 0 past the end of the list. */
SKL_API int skl_kernel_at(int32_t index, skl_kernel_info *info);

/* ---- Convenience ------------------------------------------------------------------------------------------- */

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

/* Contiguous [batch, heads, length, dim]; dim = 1 for row vectors. */
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
