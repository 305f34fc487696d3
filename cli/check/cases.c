#include "cli/check/cases.h"

#include <stdlib.h>

/* ---- The cases ---------------------------------------------------------------------------------------------- */

/* Every case starts from this problem, 2 x 67 queries x 131 keys, and makes the changes that its name states. */
static skl_problem base_problem(void)
{
    skl_problem problem = skl_problem_default();
    problem.gradients = SKL_DQ_T | SKL_DK_T | SKL_DQ_S | SKL_DK_S;
    problem.batch = 2;
    problem.len_q = 67;
    problem.len_k = 131;
    problem.heads_t = problem.heads_s = 2;
    problem.dim_t = 64;
    problem.dim_s = 40;
    return problem;
}

static const int32_t case_key_lengths[] = {0, 77};
static const int32_t case_cu_seqlens_q[] = {0, 67, 67, 80}; /* one sequence without queries */
static const int32_t case_cu_seqlens_k[] = {0, 70, 131,
                                            131}; /* one sequence without keys, and unused rows at the end */

static void plain(skl_problem *problem, skl_inputs *inputs)
{
    (void)problem;
    (void)inputs;
}

static void reverse(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->direction = SKL_KL_REVERSE;
}

static void causal(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->causal = 1;
}

static void causal_with_empty_rows(skl_problem *problem, skl_inputs *inputs)
{
    causal(problem, inputs);
    problem->len_q = 131;
    problem->len_k = 67;
}

static void window(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->window_left = 9;
    problem->window_right = 3;
}

static void shard_of_a_window(skl_problem *problem, skl_inputs *inputs)
{
    causal(problem, inputs);
    problem->window_left = 50;
    problem->positions = SKL_POSITIONS_OFFSET;
    problem->offset_q = 1000;
    problem->offset_k = 920;
}

static void shard_outside_the_window(skl_problem *problem, skl_inputs *inputs)
{
    shard_of_a_window(problem, inputs);
    problem->offset_q = 1000000;
}

static void key_lengths(skl_problem *problem, skl_inputs *inputs)
{
    (void)problem;
    inputs->key_lengths = case_key_lengths;
}

static void packed(skl_problem *problem, skl_inputs *inputs)
{
    problem->packed = 1;
    problem->causal = 1;
    problem->batch = 3;
    problem->total_q = 90;
    problem->total_k = 140;
    problem->len_k = 70;
    inputs->cu_seqlens_q = case_cu_seqlens_q;
    inputs->cu_seqlens_k = case_cu_seqlens_k;
}

static void softcap(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->scale_t = problem->scale_s = 0.5F;
    problem->softcap_t = 4;
    problem->softcap_s = 3;
}

static void teacher_groups(skl_problem *problem, skl_inputs *inputs)
{
    causal(problem, inputs);
    problem->heads_t = 6;
}

static void teacher_groups_reverse(skl_problem *problem, skl_inputs *inputs)
{
    teacher_groups(problem, inputs);
    problem->direction = SKL_KL_REVERSE;
}

/* Teacher groups without gradients of the teacher: on a GPU they have tensor cores. */
static void student_of_groups(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->gradients = SKL_DQ_S | SKL_DK_S;
    problem->heads_t = 4;
    problem->key_heads_t = 2;
}

static void student_of_groups_causal(skl_problem *problem, skl_inputs *inputs)
{
    student_of_groups(problem, inputs);
    causal(problem, inputs);
    problem->heads_t = 6;
}

static void student_of_groups_window(skl_problem *problem, skl_inputs *inputs)
{
    window(problem, inputs);
    student_of_groups(problem, inputs);
    problem->heads_t = problem->key_heads_t = 8;
}

static void student_of_groups_packed(skl_problem *problem, skl_inputs *inputs)
{
    packed(problem, inputs);
    student_of_groups(problem, inputs);
}

static void student_of_groups_of_128(skl_problem *problem, skl_inputs *inputs)
{
    student_of_groups(problem, inputs);
    problem->heads_t = 8;
    problem->dim_t = problem->dim_s = 128;
}

static void shared_key_heads(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->heads_t = 8;
    problem->heads_s = 4;
    problem->key_heads_t = 2;
    problem->key_heads_s = 1;
}

static void odd_head_sizes(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->dim_t = 1;
    problem->dim_s = 131;
}

static void large_logits(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->scale_t = 100;
    problem->scale_s = 70;
}

static void one_key(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->len_q = problem->len_k = 1;
}

/* Problems that tensor-core kernels support; the problems above are too irregular for some of them. */
static void heads_of(skl_problem *problem, int64_t dim)
{
    problem->heads_t = problem->heads_s = 2;
    problem->dim_t = problem->dim_s = dim;
}

static void heads_of_128(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    heads_of(problem, 128);
}

static void heads_of_256_reverse(skl_problem *problem, skl_inputs *inputs)
{
    reverse(problem, inputs);
    heads_of(problem, 256);
}

static void heads_of_128_and_64_reverse(skl_problem *problem, skl_inputs *inputs)
{
    reverse(problem, inputs);
    problem->dim_t = 128;
    problem->dim_s = 64;
}

static void heads_of_256_and_64(skl_problem *problem, skl_inputs *inputs)
{
    causal(problem, inputs);
    problem->dim_t = 256;
    problem->dim_s = 64;
}

static void shared_keys_and_lengths(skl_problem *problem, skl_inputs *inputs)
{
    key_lengths(problem, inputs);
    problem->heads_t = problem->heads_s = 4;
    problem->key_heads_t = 2;
    problem->key_heads_s = 1;
    problem->dim_t = problem->dim_s = 64;
}

static void softcap_of_64(skl_problem *problem, skl_inputs *inputs)
{
    softcap(problem, inputs);
    heads_of(problem, 64);
}

static void several_tiles(skl_problem *problem, skl_inputs *inputs)
{
    causal(problem, inputs);
    problem->batch = 1;
    problem->heads_t = problem->heads_s = 1;
    problem->len_q = problem->len_k = 521;
    problem->dim_t = problem->dim_s = 96;
}

/* Indexers: groups of three teacher heads with two key heads, and f32 weights. */
static void indexer(skl_problem *problem, skl_inputs *inputs)
{
    causal(problem, inputs);
    problem->student = SKL_STUDENT_INDEXER;
    problem->gradients = SKL_DQ_S | SKL_DK_S | SKL_DW_S;
    problem->heads_t = 6;
    problem->key_heads_t = 2;
    problem->key_heads_s = 1;
    problem->index_heads = 5;
}

static void indexer_linear(skl_problem *problem, skl_inputs *inputs)
{
    indexer(problem, inputs);
    problem->index_linear = 1;
}

static void indexer_reverse_linear(skl_problem *problem, skl_inputs *inputs)
{
    indexer_linear(problem, inputs);
    problem->direction = SKL_KL_REVERSE;
}

static void indexer_packed(skl_problem *problem, skl_inputs *inputs)
{
    indexer(problem, inputs);
    packed(problem, inputs);
    problem->dtype_w = problem->dtype_s;
}

/* The shapes of sparse models: one key head of compressed keys, one student head with 128 dimensions. */
static void indexer_of_latents(skl_problem *problem, skl_inputs *inputs)
{
    indexer(problem, inputs);
    problem->len_q = 35;
    problem->heads_s = problem->key_heads_t = 1;
    problem->dim_t = 576;
    problem->dim_s = 128;
}

static void indexer_window(skl_problem *problem, skl_inputs *inputs)
{
    indexer(problem, inputs);
    problem->window_left = 40;
}

static void sparse_indexer(skl_problem *problem, skl_inputs *inputs)
{
    indexer(problem, inputs);
    problem->top_k = 70;
}

static void sparse_indexer_reverse(skl_problem *problem, skl_inputs *inputs)
{
    sparse_indexer(problem, inputs);
    problem->direction = SKL_KL_REVERSE;
}

static void sparse_indexer_packed(skl_problem *problem, skl_inputs *inputs)
{
    indexer_packed(problem, inputs);
    problem->top_k = 70;
}

static void sparse_indexer_of_latents(skl_problem *problem, skl_inputs *inputs)
{
    indexer_of_latents(problem, inputs);
    problem->top_k = 70;
}

static void sparse_indexer_window(skl_problem *problem, skl_inputs *inputs)
{
    indexer_window(problem, inputs);
    problem->top_k = 70;
}

static void row_bounds(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->row_bounds = 1;
}

static void row_bounds_packed(skl_problem *problem, skl_inputs *inputs)
{
    packed(problem, inputs);
    row_bounds(problem, inputs);
}

static void row_bounds_of_128(skl_problem *problem, skl_inputs *inputs)
{
    row_bounds(problem, inputs);
    heads_of(problem, 128);
}

static void row_bounds_of_256(skl_problem *problem, skl_inputs *inputs)
{
    row_bounds(problem, inputs);
    heads_of(problem, 256);
    problem->batch = 1;
}

static void row_bounds_of_groups(skl_problem *problem, skl_inputs *inputs)
{
    student_of_groups(problem, inputs);
    row_bounds(problem, inputs);
}

static void row_bounds_of_indexer(skl_problem *problem, skl_inputs *inputs)
{
    indexer(problem, inputs);
    row_bounds(problem, inputs);
}

static void row_bounds_of_sparse_indexer(skl_problem *problem, skl_inputs *inputs)
{
    sparse_indexer(problem, inputs);
    row_bounds(problem, inputs);
}

/* All gradients that the problem has, and those of the sinks. */
static void sinks(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->sinks = 1;
    problem->gradients |= SKL_DSINK_S | (problem->gradients & SKL_DQ_T ? SKL_DSINK_T : 0U);
}

static void sinks_reverse(skl_problem *problem, skl_inputs *inputs)
{
    reverse(problem, inputs);
    sinks(problem, inputs);
}

static void sinks_packed(skl_problem *problem, skl_inputs *inputs)
{
    packed(problem, inputs);
    sinks(problem, inputs);
}

static void sinks_and_row_bounds(skl_problem *problem, skl_inputs *inputs)
{
    row_bounds(problem, inputs);
    sinks(problem, inputs);
}

static void sinks_of_groups(skl_problem *problem, skl_inputs *inputs)
{
    student_of_groups_causal(problem, inputs);
    sinks(problem, inputs);
}

static void sinks_of_128(skl_problem *problem, skl_inputs *inputs)
{
    causal(problem, inputs);
    heads_of(problem, 128);
    sinks(problem, inputs);
}

/* The student's attention backward with its KL. */
static void attention(skl_problem *problem, skl_inputs *inputs)
{
    (void)inputs;
    problem->gradients = SKL_DQ_S | SKL_DK_S | SKL_DV_S;
}

static void attention_causal(skl_problem *problem, skl_inputs *inputs)
{
    several_tiles(problem, inputs);
    attention(problem, inputs);
    problem->len_q = problem->len_k = 261;
    problem->dim_t = problem->dim_s = 64;
}

static void attention_of_128(skl_problem *problem, skl_inputs *inputs)
{
    heads_of_128(problem, inputs);
    attention(problem, inputs);
    problem->len_q = 163;
}

static void attention_of_shared_keys(skl_problem *problem, skl_inputs *inputs)
{
    shared_keys_and_lengths(problem, inputs);
    attention(problem, inputs);
}

static void attention_window(skl_problem *problem, skl_inputs *inputs)
{
    window(problem, inputs);
    attention(problem, inputs);
}

static void attention_packed(skl_problem *problem, skl_inputs *inputs)
{
    packed(problem, inputs);
    attention(problem, inputs);
}

static void attention_row_bounds(skl_problem *problem, skl_inputs *inputs)
{
    row_bounds_of_128(problem, inputs);
    attention(problem, inputs);
}

static void attention_of_groups(skl_problem *problem, skl_inputs *inputs)
{
    student_of_groups_causal(problem, inputs);
    attention(problem, inputs);
}

typedef struct case_entry {
    const char *name;
    skl_dtype dtype_t, dtype_s;
    int32_t grad_f32;
    void (*change)(skl_problem *problem, skl_inputs *inputs);
} case_entry;

static const case_entry entries[] = {
    {"f32", SKL_F32, SKL_F32, 0, plain},
    {"f16", SKL_F16, SKL_F16, 1, plain},
    {"bf16", SKL_BF16, SKL_BF16, 1, plain},
    {"bf16 teacher, f16 student", SKL_BF16, SKL_F16, 0, causal},
    {"reverse", SKL_F32, SKL_F32, 0, reverse},
    {"causal", SKL_F32, SKL_F32, 0, causal},
    {"causal, rows without keys", SKL_F32, SKL_F32, 0, causal_with_empty_rows},
    {"window", SKL_F32, SKL_F32, 0, window},
    {"shard of a window", SKL_BF16, SKL_BF16, 1, shard_of_a_window},
    {"shard without visible keys", SKL_F32, SKL_F32, 0, shard_outside_the_window},
    {"key lengths", SKL_F32, SKL_F32, 0, key_lengths},
    {"packed", SKL_F32, SKL_F32, 0, packed},
    {"packed, f16", SKL_F16, SKL_F16, 0, packed},
    {"softcap", SKL_F32, SKL_F32, 0, softcap},
    {"teacher groups", SKL_F32, SKL_F32, 0, teacher_groups},
    {"teacher groups, reverse", SKL_F32, SKL_F32, 0, teacher_groups_reverse},
    {"shared key heads", SKL_F32, SKL_F32, 0, shared_key_heads},
    {"head sizes 1 and 131", SKL_F32, SKL_F32, 0, odd_head_sizes},
    {"large logits", SKL_F32, SKL_F32, 0, large_logits},
    {"one key", SKL_F32, SKL_F32, 0, one_key},
    {"several tiles", SKL_F32, SKL_F32, 0, several_tiles},
    {"several tiles, bf16", SKL_BF16, SKL_BF16, 0, several_tiles},
    {"several tiles, f16", SKL_F16, SKL_F16, 1, several_tiles},
    {"head size 128, bf16", SKL_BF16, SKL_BF16, 0, heads_of_128},
    {"head size 128, f16", SKL_F16, SKL_F16, 0, heads_of_128},
    {"head size 256, bf16, reverse", SKL_BF16, SKL_BF16, 1, heads_of_256_reverse},
    {"head sizes 128 and 64, f16, reverse", SKL_F16, SKL_F16, 1, heads_of_128_and_64_reverse},
    {"head sizes 128 and 64, bf16, reverse", SKL_BF16, SKL_BF16, 0, heads_of_128_and_64_reverse},
    {"head sizes 256 and 64, bf16", SKL_BF16, SKL_BF16, 0, heads_of_256_and_64},
    {"shared keys, key lengths, bf16", SKL_BF16, SKL_BF16, 0, shared_keys_and_lengths},
    {"shared keys, key lengths, f16", SKL_F16, SKL_F16, 1, shared_keys_and_lengths},
    {"window, bf16", SKL_BF16, SKL_BF16, 0, window},
    {"causal, rows without keys, f16", SKL_F16, SKL_F16, 0, causal_with_empty_rows},
    {"packed, bf16", SKL_BF16, SKL_BF16, 1, packed},
    {"softcap, bf16", SKL_BF16, SKL_BF16, 1, softcap_of_64},
    {"large logits, f16", SKL_F16, SKL_F16, 1, large_logits},
    {"student of teacher groups, bf16", SKL_BF16, SKL_BF16, 1, student_of_groups},
    {"student of teacher groups, f16", SKL_F16, SKL_F16, 0, student_of_groups},
    {"student of teacher groups, causal, bf16", SKL_BF16, SKL_BF16, 0, student_of_groups_causal},
    {"student of teacher groups, causal, f16", SKL_F16, SKL_F16, 1, student_of_groups_causal},
    {"student of teacher groups, window, bf16", SKL_BF16, SKL_BF16, 1, student_of_groups_window},
    {"student of teacher groups, window, f16", SKL_F16, SKL_F16, 1, student_of_groups_window},
    {"student of teacher groups, packed, bf16", SKL_BF16, SKL_BF16, 0, student_of_groups_packed},
    {"student of teacher groups, packed, f16", SKL_F16, SKL_F16, 0, student_of_groups_packed},
    {"student of teacher groups, head size 128, bf16", SKL_BF16, SKL_BF16, 1, student_of_groups_of_128},
    {"student of teacher groups, head size 128, f16", SKL_F16, SKL_F16, 1, student_of_groups_of_128},
    {"indexer", SKL_F32, SKL_F32, 0, indexer},
    {"indexer, reverse, linear", SKL_F32, SKL_F32, 0, indexer_reverse_linear},
    {"indexer, packed, f16", SKL_F16, SKL_F16, 0, indexer_packed},
    {"indexer, latent keys, bf16", SKL_BF16, SKL_BF16, 0, indexer_of_latents},
    {"indexer, latent keys, f16", SKL_F16, SKL_F16, 1, indexer_of_latents},
    {"indexer, bf16", SKL_BF16, SKL_BF16, 1, indexer},
    {"indexer, linear, bf16", SKL_BF16, SKL_BF16, 0, indexer_linear},
    {"indexer, linear, f16", SKL_F16, SKL_F16, 0, indexer_linear},
    {"indexer, packed, bf16", SKL_BF16, SKL_BF16, 0, indexer_packed},
    {"indexer, f16", SKL_F16, SKL_F16, 1, indexer},
    {"indexer, window, bf16", SKL_BF16, SKL_BF16, 1, indexer_window},
    {"indexer, window, f16", SKL_F16, SKL_F16, 0, indexer_window},
    {"sparse indexer", SKL_F32, SKL_F32, 0, sparse_indexer},
    {"sparse indexer, reverse", SKL_F32, SKL_F32, 0, sparse_indexer_reverse},
    {"sparse indexer, packed, f16", SKL_F16, SKL_F16, 1, sparse_indexer_packed},
    {"sparse indexer, latent keys, bf16", SKL_BF16, SKL_BF16, 0, sparse_indexer_of_latents},
    {"sparse indexer, latent keys, f16", SKL_F16, SKL_F16, 0, sparse_indexer_of_latents},
    {"sparse indexer, reverse, bf16", SKL_BF16, SKL_BF16, 1, sparse_indexer_reverse},
    {"sparse indexer, reverse, f16", SKL_F16, SKL_F16, 0, sparse_indexer_reverse},
    {"sparse indexer, packed, bf16", SKL_BF16, SKL_BF16, 0, sparse_indexer_packed},
    {"sparse indexer, bf16", SKL_BF16, SKL_BF16, 1, sparse_indexer},
    {"sparse indexer, f16", SKL_F16, SKL_F16, 1, sparse_indexer},
    {"sparse indexer, window, bf16", SKL_BF16, SKL_BF16, 0, sparse_indexer_window},
    {"sparse indexer, window, f16", SKL_F16, SKL_F16, 0, sparse_indexer_window},
    {"row bounds", SKL_F32, SKL_F32, 0, row_bounds},
    {"row bounds, bf16", SKL_BF16, SKL_BF16, 1, row_bounds},
    {"row bounds, f16", SKL_F16, SKL_F16, 0, row_bounds},
    {"row bounds, packed", SKL_F32, SKL_F32, 0, row_bounds_packed},
    {"row bounds, packed, bf16", SKL_BF16, SKL_BF16, 0, row_bounds_packed},
    {"row bounds, head size 128, bf16", SKL_BF16, SKL_BF16, 0, row_bounds_of_128},
    {"row bounds, head size 128, f16", SKL_F16, SKL_F16, 1, row_bounds_of_128},
    {"row bounds, head size 256, bf16", SKL_BF16, SKL_BF16, 1, row_bounds_of_256},
    {"row bounds, head size 256, f16", SKL_F16, SKL_F16, 0, row_bounds_of_256},
    {"row bounds, student of teacher groups, bf16", SKL_BF16, SKL_BF16, 0, row_bounds_of_groups},
    {"row bounds, student of teacher groups, f16", SKL_F16, SKL_F16, 1, row_bounds_of_groups},
    {"row bounds, indexer", SKL_F32, SKL_F32, 0, row_bounds_of_indexer},
    {"row bounds, indexer, bf16", SKL_BF16, SKL_BF16, 0, row_bounds_of_indexer},
    {"row bounds, indexer, f16", SKL_F16, SKL_F16, 1, row_bounds_of_indexer},
    {"row bounds, sparse indexer", SKL_F32, SKL_F32, 0, row_bounds_of_sparse_indexer},
    {"row bounds, sparse indexer, bf16", SKL_BF16, SKL_BF16, 1, row_bounds_of_sparse_indexer},
    {"row bounds, sparse indexer, f16", SKL_F16, SKL_F16, 0, row_bounds_of_sparse_indexer},
    {"sinks", SKL_F32, SKL_F32, 0, sinks},
    {"sinks, reverse", SKL_F32, SKL_F32, 0, sinks_reverse},
    {"sinks, packed", SKL_F32, SKL_F32, 0, sinks_packed},
    {"sinks, row bounds", SKL_F32, SKL_F32, 0, sinks_and_row_bounds},
    {"sinks, row bounds, bf16", SKL_BF16, SKL_BF16, 1, sinks_and_row_bounds},
    {"sinks, student of teacher groups", SKL_F32, SKL_F32, 0, sinks_of_groups},
    {"sinks, student of teacher groups, bf16", SKL_BF16, SKL_BF16, 0, sinks_of_groups},
    {"sinks, student of teacher groups, f16", SKL_F16, SKL_F16, 1, sinks_of_groups},
    {"sinks, head size 128, bf16", SKL_BF16, SKL_BF16, 1, sinks_of_128},
    {"sinks, head size 128, f16", SKL_F16, SKL_F16, 0, sinks_of_128},
    {"attention backward", SKL_F32, SKL_F32, 0, attention},
    {"attention backward, causal, bf16", SKL_BF16, SKL_BF16, 0, attention_causal},
    {"attention backward, causal, f16", SKL_F16, SKL_F16, 0, attention_causal},
    {"attention backward, head size 128, bf16", SKL_BF16, SKL_BF16, 1, attention_of_128},
    {"attention backward, head size 128, f16", SKL_F16, SKL_F16, 1, attention_of_128},
    {"attention backward, shared keys, key lengths, bf16", SKL_BF16, SKL_BF16, 0, attention_of_shared_keys},
    {"attention backward, window, bf16", SKL_BF16, SKL_BF16, 0, attention_window},
    {"attention backward, window, f16", SKL_F16, SKL_F16, 1, attention_window},
    {"attention backward, packed, bf16", SKL_BF16, SKL_BF16, 0, attention_packed},
    {"attention backward, row bounds, bf16", SKL_BF16, SKL_BF16, 0, attention_row_bounds},
    {"attention backward, teacher groups, bf16", SKL_BF16, SKL_BF16, 0, attention_of_groups},
};

int check_case_count(void)
{
    return (int)(sizeof entries / sizeof entries[0]);
}

bool check_case_make(check_case *made, int index)
{
    const case_entry *const entry = &entries[index];
    *made =
        (check_case){.name = entry->name, .problem = base_problem(), .inputs = {.struct_size = sizeof made->inputs}};
    made->problem.dtype_t = entry->dtype_t;
    made->problem.dtype_s = entry->dtype_s;
    made->problem.grad_f32 = entry->grad_f32;
    entry->change(&made->problem, &made->inputs);
    if (!check_case_draw(made, (uint64_t)index))
        return false;
    const skl_attention *const values = made->problem.gradients & SKL_DV_S ? &made->attention : NULL;
    made->exact = oracle_run_attention(&made->problem, &made->inputs, values);
    made->naive = oracle_run_attention_f32(&made->problem, &made->inputs, values);
    return true;
}

void check_case_free(check_case *made)
{
    for (int t = 0; t < CHECK_TENSORS; t++)
        free(made->tensors[t]);
    free(made->grad_kl);
    free(made->indices);
    free(made->key_begin);
    free(made->key_end);
    free(made->sink_t);
    free(made->sink_s);
    oracle_free(&made->exact);
    oracle_free(&made->naive);
}
