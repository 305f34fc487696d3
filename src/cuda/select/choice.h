/* What the files of this folder share: a choice in progress. */
#ifndef SKL_CUDA_SELECT_CHOICE_H
#define SKL_CUDA_SELECT_CHOICE_H

#include "cuda/common/tensor_map.h"
#include "cuda/select.h"

enum { ELEMENTS_16_BYTES = 8 }; /* 16-bit elements in a 16-byte copy */

/* What the choice depends on besides the problem. */
typedef struct choice {
    const skl_plan *plan;
    const skl_call *call;
    const skl_cuda_params *params;
    skl_cuda_launches *launches;
    const skl_cuda_kernel *kernel; /* that the call's tensors allow */
    const char *reason;
    bool some_rows, some_keys;
    bool rows, gradients; /* that the call computes */
    bool capped;          /* an argument has a softcap */
} choice;

/* One side of the KL, and what is wanted of it. */
typedef struct side_request {
    skl_side side;
    bool of_teacher, of_b;
    bool dq, dk;
} side_request;

/* ---- kernel.c ------------------------------------------------------------------------------------------------ */

/* A student of attention whose heads each learn the mean of several teacher heads. */
bool skl_select_is_attention_with_groups(const skl_problem *p);

/* `kernel` or, if it is for a pair of head sizes, the one of its architecture that has dq or a fused backward, and
 * dk, for every head size of the problem. */
const skl_cuda_kernel *skl_select_with_dk(const skl_cuda_kernel *kernel, const skl_problem *p);

/* The best kernel for the student's gradients with teacher groups that does not add them up atomically. */
const skl_cuda_kernel *skl_select_deterministic_kernel_of(const skl_problem *p);

/* The plan may ask for gradients of q_t or k_t. */
bool skl_select_has_teacher_gradients(const skl_problem *p);

/* The kernel that computes dot_t and gradients of the teacher of an attention with teacher groups. */
const skl_cuda_kernel *skl_select_teacher_kernel_of(const skl_problem *p);

/* The best kernel that needs no TMA. */
const skl_cuda_kernel *skl_select_without_tma(const skl_problem *p);

/* The kernel that computes the student's attention backward together with the KL; NULL: there is none. */
const skl_cuda_kernel *skl_select_carrying_kernel(const skl_problem *p, int capability);

/* The kernel that computes the gradients of both sides where `kernel` would compute them one after the other; NULL:
 * there is none, or not all of them are wanted. */
const skl_cuda_kernel *skl_select_joint_kernel(const skl_problem *p, const skl_cuda_kernel *kernel);

const char *skl_select_why_kernel(const skl_plan *plan, const skl_cuda_kernel *kernel);

/* ---- workspace.c --------------------------------------------------------------------------------------------- */

/* LSEs of a teacher group for each block of a general forward. */
size_t skl_select_group_lse_size(const skl_plan *plan);

/* f32 sums of dk, unless they are dk itself: those of the larger side. */
size_t skl_select_dk_sums_size(const skl_problem *p);

/* The same of one side, and where those of the teacher begin in a joint backward: after the student's. */
size_t skl_select_side_sums_size(const skl_problem *p, bool of_teacher);
size_t skl_select_teacher_sums_at(const skl_problem *p);

/* LSEs of the teacher, for a forward that computes them without returning them. */
size_t skl_select_teacher_lse_size(const skl_problem *p);

/* Where params.key_bounds begin, after what the other launches use, and their size. */
size_t skl_select_key_bounds_at(const skl_plan *plan, skl_op op);
size_t skl_select_key_bounds_size(const skl_problem *p);

skl_sparse_layout skl_select_sparse_layout_of(const skl_plan *plan, bool gradients, bool with_teacher);

/* Where two-term rows begin: after what the other launches use, except for key bounds. */
size_t skl_select_two_term_at(const skl_plan *plan, skl_op op);

/* ---- two_term.c ---------------------------------------------------------------------------------------------- */

/* Whether a kernel multiplies two-term rows: f32, mixed types, and 16-bit types in sizes that 16-byte copies do not
 * fit. */
bool skl_select_has_two_terms(const skl_cuda_kernel *kernel);

size_t skl_select_two_term_size(const skl_problem *p, const skl_cuda_kernel *kernel);

/* Adds the launch that makes two-term rows, and makes them q and k of both arguments. */
void skl_select_two_term_rows(const choice *s, skl_cuda_params *params);

/* ---- call.c -------------------------------------------------------------------------------------------------- */

bool skl_select_is_tma_kernel(const skl_cuda_kernel *kernel);

bool skl_select_tma_reads(skl_dtype dtype, const skl_input *tensor, int64_t dim, int64_t heads,
                          skl_tensor_rows shape);

/* Whether all rows of a gradient begin at even elements: kernels with tensor cores store pairs of them. `dtype`: of
 * the tensor that it is the gradient of. */
bool skl_select_has_pairs(const skl_problem *p, const skl_output *gradient, skl_dtype dtype);

/* The choice of a call, which has no launch yet, and the parameters of its launches. */
choice skl_select_begin(const skl_plan *plan, const skl_call *call, skl_cuda_params *params,
                        skl_cuda_launches *launches);

/* Adds the launch that clears what comes after the last packed sequence. */
void skl_select_add_tails(const choice *s);

/* Adds the launches of a call about the KL. */
void skl_select_kl(choice *s, skl_cuda_params *params);

/* Adds the launch that tabulates row bounds by key, before the others, where one of them needs it. */
void skl_select_add_bounds(const choice *s, skl_cuda_params *params);

skl_cuda_params skl_select_params_of(const skl_problem *p, const skl_call *call);

skl_cuda_launch *skl_select_add(const choice *s, const char *step, const skl_cuda_kernel *kernel,
                                skl_cuda_launcher launcher, const char *variant, const char *reason);

/* ---- attention.c --------------------------------------------------------------------------------------------- */

/* Heads whose streamed rows, `head_size` bytes of a head, fill half of the L2 cache: with more of them at once they
 * are read from memory again for every wave of tiles, and f32 sums are read and written there. But where tiles differ
 * in length, each group begins with its longest ones: there may be several groups only where the longest tile is a
 * small part of an SM's work. */
int32_t skl_select_head_group_of(const choice *s, int64_t tiles, int64_t head_size);

/* The same for tiles of queries. `bytes_a`, `bytes_b`: per element of an argument's keys, with what else is streamed
 * for it. */
int32_t skl_select_head_group_for(const choice *s, int64_t tile_rows, int64_t bytes_a, int64_t bytes_b);

void skl_select_set_splits(skl_cuda_launch *launch, const skl_problem *p, int64_t tile_rows, int64_t blocks);

/* Blocks that keep an SM busy on Hopper, one at a time. A one-sided mask leaves tiles half of the longest one's keys
 * on average: then two, or the longest tile takes as long as all of them together. */
int64_t skl_select_blocks_to_fill(const skl_problem *p);

void skl_select_add_forward(const choice *s);

side_request skl_select_request_of(const choice *s, bool of_teacher);

/* Where a fused backward adds up dk. */
skl_output skl_select_dk_sums_of(const choice *s, const side_request *request);

bool skl_select_tma_adds_to(const choice *s, const side_request *request);

void skl_select_add_dq(const choice *s, const side_request *request, const char *reason, bool kl);

void skl_select_add_dk(const choice *s, const side_request *request, const char *reason);

void skl_select_attention(choice *s);

/* ---- attention_backward.c ------------------------------------------------------------------------------------ */

void skl_select_attention_backward(const skl_plan *plan, const skl_call *call, skl_cuda_params *params,
                                   skl_cuda_launches *launches);

/* Bytes of workspace for it. */
size_t skl_select_attention_backward_size(const skl_plan *plan);

/* ---- indexer.c ----------------------------------------------------------------------------------------------- */

void skl_select_add_indexer(const choice *s, const char *step, bool gradients);

void skl_select_indexer(choice *s);

/* ---- groups.c ------------------------------------------------------------------------------------------------ */

/* Rows and the student's gradients on tensor cores: by separate kernels, or by those of an indexer, since an
 * attention head is an index head of weight 1 without a ReLU. What is about the teacher, too, by kernels in strips.
 */
void skl_select_groups(choice *s);

#endif
