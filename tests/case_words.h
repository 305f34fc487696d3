/* Macros to write test cases: {"name", SHAPE(1, 37, 41), HEADS(2, 2), DIMS(16, 16), CAUSAL}. */
#ifndef SKL_TESTS_CASE_WORDS_H
#define SKL_TESTS_CASE_WORDS_H

/* The formatter would put the braces of a macro on separate lines. */
/* clang-format off */
#define SHAPE(b, q, k)   .batch = b, .len_q = q, .len_k = k
#define HEADS(t, s)      .heads_t = t, .heads_s = s
#define KEY_HEADS(t, s)  .key_heads_t = t, .key_heads_s = s
#define DIMS(t, s)       .dim_t = t, .dim_s = s
#define TYPES(t, s)      .dtype_t = SKL_##t, .dtype_s = SKL_##s
#define REVERSE          .direction = SKL_KL_REVERSE
#define SCALES(t, s)     .scale_t = t, .scale_s = s
#define SOFTCAPS(t, s)   .softcap_t = t, .softcap_s = s
#define CAUSAL           .causal = 1
#define WINDOW(l, r)     .window = (const int64_t[]){l, r}
#define OFFSETS(q, k)    .offsets = (const int64_t[]){q, k}
#define LENGTHS(...)     (const int32_t[]){__VA_ARGS__}
#define KEY_LENGTHS(...) .key_lengths = LENGTHS(__VA_ARGS__)
#define PACKED(n, q, k)  .batch = n, .cu_seqlens_q = q, .cu_seqlens_k = k
#define TAILS(q, k)      .tail_q = q, .tail_k = k
#define LAYOUT(name)     .layout = LAYOUT_##name
#define INDEXER(g)       .index_heads = g
#define TOP_K(k)         .top_k = k
#define WEIGHTS(type)    .dtype_w = SKL_##type
#define BOUNDS(kind)     .bounds = BOUNDS_##kind
#define SINKS            .sinks = 1
#define SINKS_ABOVE(t, s) .sinks = 1, .sinks_above = {t, s}
#define ATTENTION        .attention = 1
#define LINEAR           .linear = 1
#define POOL(keys, heads, blocks, size)                                                                              \
    .pool = SKL_POOL_##keys, .pool_heads = SKL_POOL_HEADS_##heads, .pool_blocks = SKL_POOL_##blocks, .pool_size = size
#define WEIGHTED         .positive_upstream = 1
#define STUDENT_ONLY     .without = SKL_DQ_T | SKL_DK_T
/* clang-format on */

#endif
