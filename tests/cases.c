#include "cases.h"

#include "case_words.h"

/* A plain shape, for cases about something else. */
#define PLAIN SHAPE(2, 33, 41), HEADS(2, 2), DIMS(16, 16)

/* The formatter would put the braces of a macro on separate lines. */
/* clang-format off */

/* One case per subset of the gradients. */
#define WITHOUT(label, gradients, ...) {"gradients_" label, .without = gradients, __VA_ARGS__}
#define SUBSETS(label, ...)                                                                    \
    WITHOUT(label "_none",      15, __VA_ARGS__), WITHOUT(label "_dk_s",      7, __VA_ARGS__), \
    WITHOUT(label "_dq_s",      11, __VA_ARGS__), WITHOUT(label "_student",   3, __VA_ARGS__), \
    WITHOUT(label "_dk_t",      13, __VA_ARGS__), WITHOUT(label "_keys",      5, __VA_ARGS__), \
    WITHOUT(label "_dk_t_dq_s",  9, __VA_ARGS__), WITHOUT(label "_not_dq_t",  1, __VA_ARGS__), \
    WITHOUT(label "_dq_t",      14, __VA_ARGS__), WITHOUT(label "_dq_t_dk_s", 6, __VA_ARGS__), \
    WITHOUT(label "_queries",   10, __VA_ARGS__), WITHOUT(label "_not_dk_t",  2, __VA_ARGS__), \
    WITHOUT(label "_teacher",   12, __VA_ARGS__), WITHOUT(label "_not_dq_s",  4, __VA_ARGS__), \
    WITHOUT(label "_not_dk_s",   8, __VA_ARGS__), WITHOUT(label "_all",       0, __VA_ARGS__)

#define LAID_OUT(label, name, ...) {"layout_" label, LAYOUT(name), __VA_ARGS__}
#define LAYOUTS(label, ...)                                       \
    LAID_OUT(label "_length_first", LENGTH_FIRST, __VA_ARGS__),     \
    LAID_OUT(label "_sequence_first", SEQUENCE_FIRST, __VA_ARGS__), \
    LAID_OUT(label "_heads_first", HEADS_FIRST, __VA_ARGS__),       \
    LAID_OUT(label "_gaps", GAPS, __VA_ARGS__),                     \
    LAID_OUT(label "_misaligned", MISALIGNED, __VA_ARGS__),         \
    LAID_OUT(label "_expanded", EXPANDED, __VA_ARGS__),             \
    LAID_OUT(label "_repeated", REPEATED, __VA_ARGS__)
/* clang-format on */

const test_case test_cases[] = {
    /* Lengths at and around the tile sizes of the kernels. */
    {"shape_1x1", SHAPE(1, 1, 1), HEADS(1, 1), DIMS(64, 64)},
    {"shape_1x127", SHAPE(2, 1, 127), HEADS(2, 2), DIMS(64, 64)},
    {"shape_127x1", SHAPE(2, 127, 1), HEADS(2, 2), DIMS(64, 64)},
    {"shape_2x3", SHAPE(3, 2, 3), HEADS(5, 5), DIMS(4, 4)},
    {"shape_63x65", SHAPE(1, 63, 65), HEADS(2, 2), DIMS(64, 64)},
    {"shape_65x63", SHAPE(2, 65, 63), HEADS(1, 1), DIMS(64, 64)},
    {"shape_64x64", SHAPE(1, 64, 64), HEADS(2, 2), DIMS(64, 64)},
    {"shape_95x97", SHAPE(1, 95, 97), HEADS(1, 1), DIMS(32, 32)},
    {"shape_97x193", SHAPE(1, 97, 193), HEADS(1, 1), DIMS(64, 64)},
    {"shape_127x127", SHAPE(1, 127, 127), HEADS(2, 2), DIMS(32, 32)},
    {"shape_193x95", SHAPE(1, 193, 95), HEADS(1, 1), DIMS(64, 64)},
    {"shape_128x256", SHAPE(1, 128, 256), HEADS(1, 1), DIMS(64, 64)},
    {"shape_129x257", SHAPE(1, 129, 257), HEADS(1, 1), DIMS(48, 48)},
    {"shape_3x1021", SHAPE(1, 3, 1021), HEADS(2, 2), DIMS(32, 32)},
    {"shape_509x7", SHAPE(1, 509, 7), HEADS(2, 2), DIMS(32, 32)},
    {"shape_17x31_many_heads", SHAPE(3, 17, 31), HEADS(13, 13), DIMS(8, 8)},
    {"no_queries", SHAPE(2, 0, 5), HEADS(2, 2), DIMS(8, 8)},
    {"no_keys", SHAPE(2, 5, 0), HEADS(2, 2), DIMS(8, 8)},
    {"no_queries_no_keys", SHAPE(1, 0, 0), HEADS(1, 1), DIMS(8, 8)},
    {"no_batch", SHAPE(0, 5, 5), HEADS(1, 1), DIMS(8, 8)},

    /* Head dimensions. */
    {"dim_1", SHAPE(1, 37, 41), HEADS(2, 2), DIMS(1, 1)},
    {"dim_8", SHAPE(1, 37, 67), HEADS(2, 2), DIMS(8, 8)},
    {"dim_33", SHAPE(1, 65, 97), HEADS(1, 1), DIMS(33, 33)},
    {"dim_128", SHAPE(1, 65, 97), HEADS(1, 1), DIMS(128, 128)},
    {"dim_192", SHAPE(1, 33, 67), HEADS(1, 1), DIMS(192, 192)},
    {"dim_256", SHAPE(1, 33, 67), HEADS(1, 1), DIMS(256, 256)},
    {"dim_511", SHAPE(1, 17, 67), HEADS(1, 1), DIMS(511, 511)},
    {"dim_512", SHAPE(1, 33, 67), HEADS(1, 1), DIMS(512, 512)},
    {"dim_128_and_33", SHAPE(1, 37, 67), HEADS(2, 2), DIMS(128, 33)},
    {"dim_8_and_512", SHAPE(1, 37, 41), HEADS(1, 1), DIMS(8, 512)},
    {"dim_1_and_64", SHAPE(1, 37, 67), HEADS(1, 1), DIMS(1, 64)},
    {"dim_31_and_17_bf16", SHAPE(1, 37, 67), HEADS(2, 2), DIMS(31, 17), TYPES(BF16, BF16)},

    /* Types of the inputs and of the gradients. */
    {"f16", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(64, 64), TYPES(F16, F16)},
    {"f16_grad_f32", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(64, 64), TYPES(F16, F16), .grad_f32 = 1},
    {"bf16", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16)},
    {"bf16_grad_f32", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), .grad_f32 = 1},
    {"f32_grad_f32", PLAIN, .grad_f32 = 1},
    {"f32_and_bf16", PLAIN, TYPES(F32, BF16)},
    {"bf16_and_f32", PLAIN, TYPES(BF16, F32)},
    {"bf16_and_f32_grad_f32", PLAIN, TYPES(BF16, F32), .grad_f32 = 1},
    {"f16_and_f32", PLAIN, TYPES(F16, F32)},
    {"f16_and_bf16", PLAIN, TYPES(F16, BF16)},
    {"bf16_and_f16_grad_f32", PLAIN, TYPES(BF16, F16), .grad_f32 = 1},
    /* More keys than the CPU kernels sum 16-bit gradients of in one pass. */
    {"bf16_many_keys", SHAPE(1, 5, 8200), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(9, 8), TYPES(BF16, BF16)},
    {"bf16_many_keys_indexer", SHAPE(1, 5, 8200), HEADS(2, 1), DIMS(9, 8), INDEXER(2), TYPES(BF16, BF16)},
    {"bf16_many_keys_attention", SHAPE(1, 5, 8200), HEADS(1, 1), DIMS(9, 8), TYPES(BF16, BF16), ATTENTION},
    {"f16_dim_512", SHAPE(1, 17, 67), HEADS(1, 1), DIMS(512, 512), TYPES(F16, F16)},

    /* Masks. */
    {"causal", SHAPE(1, 97, 97), HEADS(2, 2), DIMS(32, 32), CAUSAL},
    {"causal_tall", SHAPE(1, 97, 33), HEADS(2, 2), DIMS(32, 32), CAUSAL},
    {"causal_wide", SHAPE(1, 33, 193), HEADS(2, 2), DIMS(32, 32), CAUSAL},
    {"causal_one_query", SHAPE(2, 1, 65), HEADS(2, 2), DIMS(32, 32), CAUSAL},
    {"causal_long", SHAPE(1, 257, 257), HEADS(1, 1), DIMS(16, 16), CAUSAL},
    {"window_both", SHAPE(1, 127, 127), HEADS(1, 1), DIMS(32, 32), WINDOW(5, 3)},
    {"window_left", SHAPE(1, 97, 130), HEADS(1, 1), DIMS(32, 32), WINDOW(16, -1)},
    {"window_right", SHAPE(1, 97, 130), HEADS(1, 1), DIMS(32, 32), WINDOW(-1, 4)},
    {"window_diagonal", SHAPE(1, 67, 67), HEADS(2, 2), DIMS(16, 16), WINDOW(0, 0)},
    {"window_tall", SHAPE(1, 131, 31), HEADS(1, 1), DIMS(16, 16), WINDOW(7, 9)},
    /* Row bounds. */
    {"bounds_random", SHAPE(3, 97, 131), HEADS(2, 2), DIMS(16, 16), BOUNDS(RANDOM)},
    {"bounds_begin", SHAPE(2, 65, 97), HEADS(2, 2), DIMS(16, 16), BOUNDS(BEGIN)},
    {"bounds_sampled", SHAPE(2, 33, 257), HEADS(2, 2), DIMS(16, 16), BOUNDS(SAMPLED)},
    {"bounds_zigzag", SHAPE(2, 64, 256), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(32, 16), BOUNDS(ZIGZAG)},
    {"bounds_chunks", SHAPE(1, 131, 131), HEADS(2, 2), DIMS(16, 16), BOUNDS(CHUNKS)},
    {"bounds_compressed", SHAPE(1, 131, 33), HEADS(2, 2), DIMS(16, 16), BOUNDS(COMPRESSED)},
    {"bounds_and_window", SHAPE(2, 97, 97), HEADS(2, 2), DIMS(16, 16), BOUNDS(RANDOM), WINDOW(20, 5),
     KEY_LENGTHS(60, 97)},
    {"bounds_packed", PACKED(4, LENGTHS(0, 37, 37, 101, 130), LENGTHS(0, 65, 70, 70, 130)), TAILS(3, 5), HEADS(2, 2),
     DIMS(16, 16), BOUNDS(RANDOM)},
    {"bounds_group", SHAPE(1, 97, 131), HEADS(6, 2), DIMS(16, 16), BOUNDS(RANDOM)},
    {"bounds_reverse_softcap", SHAPE(1, 97, 131), HEADS(2, 2), DIMS(16, 16), BOUNDS(RANDOM), REVERSE, SOFTCAPS(3, 4)},
    {"bounds_indexer", SHAPE(1, 97, 131), HEADS(4, 1), DIMS(16, 16), INDEXER(3), BOUNDS(RANDOM)},
    {"bounds_sparse", SHAPE(1, 65, 131), HEADS(4, 1), DIMS(16, 16), INDEXER(3), TOP_K(17), BOUNDS(RANDOM)},
    {"bounds_bf16", SHAPE(2, 300, 500), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), BOUNDS(RANDOM)},
    {"bounds_128_f16", SHAPE(1, 301, 421), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(128, 128), TYPES(F16, F16),
     BOUNDS(ZIGZAG), STUDENT_ONLY},
    {"bounds_chunks_128_bf16", SHAPE(1, 301, 301), HEADS(2, 2), DIMS(128, 128), TYPES(BF16, BF16), BOUNDS(CHUNKS)},
    {"bounds_sampled_bf16", SHAPE(1, 100, 900), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), BOUNDS(SAMPLED)},
    {"bounds_256_bf16", SHAPE(1, 200, 333), HEADS(2, 2), DIMS(256, 256), TYPES(BF16, BF16), BOUNDS(RANDOM)},
    {"bounds_192_f16", SHAPE(1, 200, 333), HEADS(2, 2), DIMS(192, 192), TYPES(F16, F16), BOUNDS(RANDOM)},
    {"bounds_192_few_f16", SHAPE(1, 70, 210), HEADS(2, 2), DIMS(192, 192), TYPES(F16, F16), BOUNDS(RANDOM)},
    {"bounds_256_f16", SHAPE(1, 130, 200), HEADS(2, 2), DIMS(256, 256), TYPES(F16, F16), BOUNDS(ZIGZAG)},
    {"bounds_packed_bf16", PACKED(3, LENGTHS(0, 130, 130, 400), LENGTHS(0, 200, 205, 333)), TAILS(3, 5), HEADS(2, 2),
     DIMS(64, 64), TYPES(BF16, BF16), BOUNDS(RANDOM)},
    {"bounds_softcap_bf16", SHAPE(1, 200, 333), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), BOUNDS(RANDOM),
     SOFTCAPS(3, 4)},
    {"bounds_group_bf16", SHAPE(1, 300, 400), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), BOUNDS(RANDOM),
     STUDENT_ONLY},
    {"bounds_group_5_f16", SHAPE(1, 200, 300), HEADS(10, 2), DIMS(128, 64), TYPES(F16, F16), BOUNDS(ZIGZAG),
     STUDENT_ONLY},
    {"bounds_indexer_bf16", SHAPE(1, 300, 400), HEADS(8, 1), KEY_HEADS(1, 1), DIMS(64, 64), TYPES(BF16, BF16),
     INDEXER(4), BOUNDS(RANDOM)},
    {"bounds_sparse_bf16", SHAPE(1, 97, 400), HEADS(8, 1), KEY_HEADS(1, 1), DIMS(64, 64), TYPES(BF16, BF16),
     INDEXER(4), TOP_K(64), BOUNDS(RANDOM)},
    /* Sinks. */
    {"sinks", SHAPE(2, 65, 97), HEADS(2, 2), DIMS(16, 16), SINKS},
    {"sinks_causal", SHAPE(1, 97, 97), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(16, 32), SINKS, CAUSAL},
    {"sinks_reverse", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(16, 16), SINKS, REVERSE},
    {"sinks_reverse_student", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(16, 16), SINKS, REVERSE, STUDENT_ONLY},
    {"sinks_one_key", SHAPE(1, 65, 65), HEADS(2, 2), DIMS(16, 16), SINKS, WINDOW(0, 0)},
    {"sinks_softcap", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(16, 16), SINKS, SOFTCAPS(3, 4), WINDOW(20, 0)},
    {"sinks_packed", PACKED(4, LENGTHS(0, 37, 37, 101, 130), LENGTHS(0, 65, 70, 70, 130)), TAILS(3, 5), HEADS(2, 2),
     DIMS(16, 16), SINKS, CAUSAL},
    {"sinks_padded", SHAPE(3, 37, 67), HEADS(2, 2), DIMS(16, 16), SINKS, KEY_LENGTHS(0, 20, 67)},
    {"sinks_bounds", SHAPE(2, 97, 131), HEADS(2, 2), DIMS(16, 16), SINKS, BOUNDS(RANDOM)},
    {"sinks_group", SHAPE(1, 65, 97), HEADS(6, 2), DIMS(16, 16), SINKS, CAUSAL},
    {"sinks_group_given", SHAPE(2, 65, 97), HEADS(4, 2), DIMS(16, 16), SINKS, .lse = LSE_GIVEN},
    {"sinks_group_packed", PACKED(4, LENGTHS(0, 37, 37, 101, 130), LENGTHS(0, 65, 70, 70, 130)), TAILS(3, 5),
     HEADS(4, 2), DIMS(16, 16), SINKS, CAUSAL},
    {"sinks_group_above", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(16, 16), SINKS_ABOVE(16, 30)},
    {"sinks_group_above_far", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(16, 16), SINKS_ABOVE(30, 100)},
    {"sinks_group_above_given", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(16, 16), SINKS_ABOVE(30, 16), .lse = LSE_GIVEN},
    {"sinks_group_below", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(16, 16), SINKS_ABOVE(-60, -200), CAUSAL},
    {"sinks_above_student", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(16, 16), SINKS_ABOVE(0, 200), STUDENT_ONLY},
    {"sinks_above_teacher", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(16, 16), SINKS_ABOVE(200, 0), STUDENT_ONLY},
    {"sinks_above_both", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(16, 16), SINKS_ABOVE(8, 200), REVERSE},
    {"sinks_below", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(16, 16), SINKS_ABOVE(-200, -60)},
    {"sinks_above_bf16", SHAPE(1, 300, 400), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), SINKS_ABOVE(0, 200),
     CAUSAL, STUDENT_ONLY},
    {"sinks_bf16", SHAPE(2, 300, 500), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), SINKS, CAUSAL},
    {"sinks_128_f16", SHAPE(1, 301, 421), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(128, 128), TYPES(F16, F16), SINKS},
    {"sinks_group_bf16", SHAPE(1, 300, 400), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), SINKS, CAUSAL,
     STUDENT_ONLY},
    {"sinks_group_above_bf16", SHAPE(1, 300, 400), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), SINKS_ABOVE(16, 30),
     STUDENT_ONLY},
    {"sinks_group_above_far_f16", SHAPE(1, 300, 400), HEADS(6, 2), DIMS(128, 128), TYPES(F16, F16),
     SINKS_ABOVE(30, 100), .lse = LSE_GIVEN, STUDENT_ONLY},
    {"sinks_group_given_bf16", SHAPE(1, 300, 400), HEADS(4, 2), DIMS(128, 128), TYPES(BF16, BF16), SINKS,
     .lse = LSE_GIVEN, STUDENT_ONLY},
    {"sinks_group_given_few_bf16", SHAPE(1, 97, 230), HEADS(4, 2), DIMS(96, 96), TYPES(BF16, BF16), SINKS, CAUSAL,
     .lse = LSE_GIVEN, STUDENT_ONLY},
    {"sinks_group_of_16_bf16", SHAPE(1, 97, 230), HEADS(32, 2), KEY_HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16),
     SINKS, CAUSAL, STUDENT_ONLY},
    {"sinks_group_of_9_f16", SHAPE(1, 97, 230), HEADS(9, 1), KEY_HEADS(1, 1), DIMS(96, 96), TYPES(F16, F16), SINKS,
     STUDENT_ONLY},
    {"window_wider_than_keys", SHAPE(1, 31, 37), HEADS(1, 1), DIMS(16, 16), WINDOW(1000, 1000)},
    {"causal_window", SHAPE(1, 193, 193), HEADS(1, 1), DIMS(32, 32), CAUSAL, WINDOW(31, -1)},
    {"causal_window_right", SHAPE(1, 61, 61), HEADS(1, 1), DIMS(16, 16), CAUSAL, WINDOW(13, 7)},
    {"causal_window_far", SHAPE(1, 300, 300), HEADS(1, 1), DIMS(8, 8), CAUSAL, WINDOW(100, -1)},
    {"key_lengths", SHAPE(4, 37, 97), HEADS(2, 2), DIMS(16, 16), KEY_LENGTHS(0, 1, 64, 97)},
    {"key_lengths_all_0", SHAPE(2, 37, 41), HEADS(2, 2), DIMS(16, 16), KEY_LENGTHS(0, 0)},
    {"key_lengths_causal", SHAPE(3, 97, 97), HEADS(1, 1), DIMS(16, 16), KEY_LENGTHS(5, 63, 96), CAUSAL},
    {"key_lengths_window", SHAPE(3, 97, 97), HEADS(1, 1), DIMS(16, 16), KEY_LENGTHS(5, 63, 96), WINDOW(9, 9)},
    {"key_lengths_bf16", SHAPE(3, 65, 97), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), KEY_LENGTHS(33, 0, 95)},
    {"offsets_inside", SHAPE(1, 37, 97), HEADS(2, 2), DIMS(16, 16), CAUSAL, OFFSETS(32, 0)},
    {"offsets_late_keys", SHAPE(1, 97, 41), HEADS(2, 2), DIMS(16, 16), CAUSAL, OFFSETS(0, 32)},
    {"offsets_all_keys_later", SHAPE(1, 37, 41), HEADS(2, 2), DIMS(16, 16), CAUSAL, OFFSETS(0, 1000)},
    {"offsets_window", SHAPE(1, 65, 97), HEADS(1, 1), DIMS(16, 16), WINDOW(20, 4), OFFSETS(1000000, 999990)},
    {"offsets_negative", SHAPE(1, 65, 97), HEADS(1, 1), DIMS(16, 16), CAUSAL, OFFSETS(-20, -50)},
    {"offsets_unmasked", PLAIN, OFFSETS(3, 70)},
    {"offsets_far_apart_bf16", SHAPE(1, 64, 128), HEADS(1, 1), DIMS(64, 64), TYPES(BF16, BF16),
     OFFSETS((int64_t)1 << 40, 0)},
    /* No query sees the last keys, but the unused rows of its query tile would. */
    {"offsets_keys_after_the_queries", SHAPE(2, 24, 8), HEADS(1, 1), DIMS(16, 16), TYPES(BF16, BF16), WINDOW(56, 19),
     OFFSETS(-25, 13)},

    /* Several query tiles and several key blocks, with masks that cut through them. */
    {"long_causal", SHAPE(1, 410, 421), HEADS(1, 1), DIMS(8, 8), CAUSAL},
    {"long_causal_bf16", SHAPE(1, 410, 421), HEADS(1, 1), DIMS(8, 8), TYPES(BF16, BF16), CAUSAL},
    {"long_causal_bf16_grad_f32", SHAPE(1, 410, 421), HEADS(1, 1), DIMS(8, 8), TYPES(BF16, BF16), .grad_f32 = 1,
     CAUSAL},
    {"long_window_f16", SHAPE(1, 500, 450), HEADS(1, 1), DIMS(8, 16), TYPES(F16, F16), WINDOW(33, 70)},
    {"long_gqa_bf16", SHAPE(1, 410, 421), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(8, 8), TYPES(BF16, BF16), CAUSAL,
     REVERSE},
    {"long_mqa_bf16", SHAPE(1, 300, 200), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(64, 128), TYPES(BF16, BF16),
     WINDOW(190, 40)},
    {"long_mqa_f16", SHAPE(1, 200, 300), HEADS(4, 4), KEY_HEADS(1, 2), DIMS(128, 104), TYPES(F16, F16), CAUSAL,
     REVERSE},
    {"long_128_bf16", SHAPE(1, 260, 300), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(128, 104), TYPES(BF16, BF16)},
    {"long_128_reverse_bf16", SHAPE(1, 200, 330), HEADS(2, 2), KEY_HEADS(2, 1), DIMS(104, 128), TYPES(BF16, BF16),
     CAUSAL, REVERSE},
    {"long_teacher_groups_bf16", SHAPE(1, 300, 421), HEADS(3, 1), DIMS(8, 8), TYPES(BF16, BF16), CAUSAL},
    {"long_teacher_groups", SHAPE(1, 300, 421), HEADS(4, 2), KEY_HEADS(2, 1), DIMS(8, 8), WINDOW(150, 33)},
    {"long_key_lengths_bf16", SHAPE(3, 200, 800), HEADS(1, 1), DIMS(8, 8), TYPES(BF16, BF16),
     KEY_LENGTHS(390, 0, 777)},
    {"long_packed_bf16", PACKED(3, LENGTHS(0, 1, 250, 700), LENGTHS(0, 200, 431, 900)), HEADS(1, 1), DIMS(8, 8),
     TYPES(BF16, BF16), CAUSAL, TAILS(7, 3)},

    /* On a GPU with 132 SMs: keys that are not split and fill the pipeline of a forward more than twice; splits of
     * more than one tile. */
    {"many_stages_bf16", SHAPE(1, 5, 1100), HEADS(70, 70), DIMS(8, 8), TYPES(BF16, BF16), .without = ALL_GRADIENTS},
    {"many_stages_128_bf16", SHAPE(1, 3, 700), HEADS(70, 70), DIMS(128, 104), TYPES(BF16, BF16),
     .without = ALL_GRADIENTS},
    /* Too many keys for two blocks per SM at 128 dimensions. */
    {"long_keys_bf16", SHAPE(1, 270, 2150), HEADS(1, 1), DIMS(128, 72), TYPES(BF16, BF16), CAUSAL, STUDENT_ONLY},
    {"long_keys_f16", SHAPE(2, 140, 2100), HEADS(1, 1), DIMS(100, 128), TYPES(F16, F16), WINDOW(1900, 90),
     KEY_LENGTHS(2100, 70), .without = ALL_GRADIENTS},
    {"many_stages_softcap_bf16", SHAPE(1, 5, 1100), HEADS(70, 70), DIMS(8, 8), TYPES(BF16, BF16), SOFTCAPS(3, 0),
     .without = ALL_GRADIENTS},
    {"many_stages_192_bf16", SHAPE(1, 3, 500), HEADS(70, 70), DIMS(192, 192), TYPES(BF16, BF16),
     .without = ALL_GRADIENTS},
    {"many_splits_causal_bf16", SHAPE(1, 257, 512), HEADS(66, 66), DIMS(8, 8), TYPES(BF16, BF16), CAUSAL,
     .without = ALL_GRADIENTS}, /* as many splits as the workspace has room for */
    {"many_splits_bf16", SHAPE(1, 300, 800), HEADS(1, 1), DIMS(8, 8), TYPES(BF16, BF16), .without = ALL_GRADIENTS},

    /* More query tiles than that GPU has SMs, all with the same keys: a persistent forward. Sequences that begin in
     * the middle of a wave, a fourth wave, tiles of one row; one pipeline stage more than the pipeline has, full or
     * with one key, and twice as many stages as it has. */
    {"persistent_bf16", SHAPE(2, 5, 1100), HEADS(90, 90), KEY_HEADS(45, 18), DIMS(8, 8), TYPES(BF16, BF16),
     .without = ALL_GRADIENTS},
    {"persistent_f16", SHAPE(1, 5, 513), HEADS(140, 140), DIMS(8, 64), TYPES(F16, F16), .without = ALL_GRADIENTS},
    {"persistent_128_bf16", SHAPE(5, 1, 512), HEADS(81, 81), DIMS(8, 72), TYPES(BF16, BF16), REVERSE,
     .without = ALL_GRADIENTS},
    {"persistent_one_row_tiles_f16", SHAPE(1, 257, 320), HEADS(67, 67), DIMS(8, 72), TYPES(F16, F16), .growth = 20,
     .without = ALL_GRADIENTS},

    /* More tiles of 128 queries than two per SM of that GPU, under one mask: a persistent forward of short tiles.
     * Tiles of two rows, three tiles per block with a window that ends on both sides, tiles without keys. */
    {"short_bf16", SHAPE(1, 130, 70), HEADS(133, 133), KEY_HEADS(133, 1), DIMS(8, 8), TYPES(BF16, BF16), CAUSAL,
     .without = ALL_GRADIENTS},
    {"short_window_f16", SHAPE(3, 2, 400), HEADS(201, 201), DIMS(8, 72), TYPES(F16, F16), REVERSE, WINDOW(70, 20),
     .growth = 20, .without = ALL_GRADIENTS},
    {"short_no_keys_bf16", SHAPE(1, 257, 20), HEADS(90, 90), KEY_HEADS(9, 45), DIMS(72, 24), TYPES(BF16, BF16),
     CAUSAL, .without = ALL_GRADIENTS},

    /* Heads of more than 128 dimensions in 16-bit types: separate kernels, which keep more in shared memory. */
    {"wide_bf16", SHAPE(1, 140, 330), HEADS(1, 1), DIMS(256, 256), TYPES(BF16, BF16)},
    {"wide_causal_bf16", SHAPE(1, 140, 200), HEADS(2, 2), KEY_HEADS(2, 1), DIMS(256, 192), TYPES(BF16, BF16), CAUSAL},
    {"wide_mqa_bf16", SHAPE(1, 200, 140), HEADS(4, 4), KEY_HEADS(1, 2), DIMS(192, 192), TYPES(BF16, BF16),
     WINDOW(150, 40), REVERSE},
    {"wide_f16", SHAPE(1, 140, 200), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(136, 256), TYPES(F16, F16), .grad_f32 = 1,
     CAUSAL},
    {"wide_softcap_f16", SHAPE(1, 67, 200), HEADS(1, 1), DIMS(192, 184), TYPES(F16, F16), SOFTCAPS(0, 2), REVERSE},
    {"wide_packed_bf16", PACKED(3, LENGTHS(0, 1, 70, 210), LENGTHS(0, 60, 131, 300)), HEADS(2, 2), KEY_HEADS(2, 1),
     DIMS(256, 200), TYPES(BF16, BF16), CAUSAL, TAILS(7, 3)},

    /* Pairs of head sizes that have kernels, both ways round, and sizes between them. */
    {"pair_128_64_bf16", SHAPE(1, 200, 330), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(128, 64), TYPES(BF16, BF16), CAUSAL},
    {"pair_64_128_reverse_bf16", SHAPE(1, 140, 260), HEADS(1, 1), DIMS(64, 128), TYPES(BF16, BF16), REVERSE,
     WINDOW(150, 40)},
    {"pair_256_64_bf16", SHAPE(1, 140, 260), HEADS(2, 2), KEY_HEADS(2, 1), DIMS(256, 64), TYPES(BF16, BF16), CAUSAL},
    {"pair_56_200_reverse_bf16", PACKED(3, LENGTHS(0, 1, 70, 210), LENGTHS(0, 60, 131, 500)), HEADS(1, 1),
     DIMS(56, 200), TYPES(BF16, BF16), REVERSE, TAILS(7, 3)},
    {"pair_256_128_bf16", SHAPE(1, 67, 400), HEADS(1, 1), DIMS(256, 128), TYPES(BF16, BF16)},
    {"pair_120_248_reverse_bf16", SHAPE(1, 140, 200), HEADS(1, 1), DIMS(120, 248), TYPES(BF16, BF16), REVERSE,
     CAUSAL},
    {"pair_192_128_bf16", SHAPE(1, 140, 200), HEADS(2, 2), KEY_HEADS(1, 1), DIMS(192, 128), TYPES(BF16, BF16),
     .grad_f32 = 1, CAUSAL},
    {"pair_72_184_bf16", SHAPE(2, 67, 200), HEADS(1, 1), DIMS(72, 184), TYPES(BF16, BF16), KEY_LENGTHS(200, 65)},
    {"dim_96_bf16", SHAPE(1, 140, 330), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(96, 96), TYPES(BF16, BF16), CAUSAL},
    {"dim_80_and_96_reverse_bf16", SHAPE(1, 140, 330), HEADS(1, 1), DIMS(80, 96), TYPES(BF16, BF16), REVERSE},
    {"many_stages_pair_bf16", SHAPE(1, 1, 600), HEADS(70, 70), DIMS(256, 64), TYPES(BF16, BF16),
     .without = ALL_GRADIENTS},
    {"persistent_pair_bf16", SHAPE(1, 1, 450), HEADS(135, 135), DIMS(72, 64), TYPES(BF16, BF16),
     .without = ALL_GRADIENTS},

    /* On a GPU with 132 SMs: enough tiles of 192 queries for a fused backward with tall tiles. Most of them attend to
     * no key, the last has 48 rows. The one before it has full stages, in the pair without a multiplication by the
     * upstream gradient. */
    {"tall_bf16", SHAPE(1, 202800, 470), HEADS(1, 1), DIMS(8, 8), TYPES(BF16, BF16), CAUSAL, STUDENT_ONLY},
    {"tall_f16", SHAPE(1, 202800, 200), HEADS(1, 1), DIMS(8, 8), TYPES(F16, F16), WINDOW(140, 20), STUDENT_ONLY},
    {"tall_pair_bf16", SHAPE(1, 202800, 400), HEADS(1, 1), DIMS(72, 8), TYPES(BF16, BF16), CAUSAL, STUDENT_ONLY,
     .equal_upstream = 1},

    /* Packed sequences. */
    {"packed", PACKED(3, LENGTHS(0, 5, 38, 135), LENGTHS(0, 9, 20, 117)), HEADS(2, 2), DIMS(32, 32)},
    {"packed_one", PACKED(1, LENGTHS(0, 67), LENGTHS(0, 71)), HEADS(2, 2), DIMS(16, 16), CAUSAL},
    {"packed_empty_sequences", PACKED(6, LENGTHS(0, 0, 13, 13, 50, 57, 57), LENGTHS(0, 0, 17, 30, 30, 66, 66)),
     HEADS(2, 2), DIMS(16, 16)},
    {"packed_all_empty", PACKED(2, LENGTHS(0, 0, 0), LENGTHS(0, 0, 0)), HEADS(2, 2), DIMS(16, 16), TAILS(3, 4)},
    {"packed_no_queries", PACKED(2, LENGTHS(0, 0, 0), LENGTHS(0, 9, 20)), HEADS(2, 2), DIMS(16, 16), TAILS(3, 4)},
    {"packed_no_keys", PACKED(2, LENGTHS(0, 9, 20), LENGTHS(0, 0, 0)), HEADS(2, 2), DIMS(16, 16), TAILS(3, 4)},
    {"packed_no_sequence", PACKED(0, LENGTHS(0), LENGTHS(0)), HEADS(2, 2), DIMS(16, 16), TAILS(3, 4)},
    {"packed_tails", PACKED(2, LENGTHS(0, 33, 70), LENGTHS(0, 41, 74)), HEADS(2, 2), DIMS(16, 16), TAILS(11, 23)},
    {"packed_causal", PACKED(4, LENGTHS(0, 1, 65, 98, 105), LENGTHS(0, 1, 65, 100, 101)), HEADS(2, 2), DIMS(32, 32),
     CAUSAL, TAILS(2, 0)},
    {"packed_window", PACKED(3, LENGTHS(0, 40, 77, 110), LENGTHS(0, 40, 60, 130)), HEADS(1, 1), DIMS(16, 16),
     WINDOW(6, 2)},
    {"packed_offsets", PACKED(2, LENGTHS(0, 20, 60), LENGTHS(0, 50, 90)), HEADS(1, 1), DIMS(16, 16), CAUSAL,
     OFFSETS(10, 0)},
    {"packed_bf16_length_first", PACKED(3, LENGTHS(0, 5, 38, 100), LENGTHS(0, 9, 20, 117)), HEADS(4, 4),
     KEY_HEADS(2, 4), DIMS(32, 32), TYPES(BF16, BF16), CAUSAL, TAILS(4, 7), LAYOUT(LENGTH_FIRST)},
    {"packed_teacher_groups", PACKED(3, LENGTHS(0, 5, 38, 60), LENGTHS(0, 9, 9, 57)), HEADS(6, 2), DIMS(16, 16),
     TAILS(1, 1)},
    {"packed_reverse", PACKED(3, LENGTHS(0, 5, 38, 60), LENGTHS(0, 9, 9, 57)), HEADS(2, 2), DIMS(16, 16), REVERSE,
     TAILS(1, 1), LAYOUT(GAPS)},

    /* Shared key heads. */
    {"gqa_student", SHAPE(2, 37, 67), HEADS(8, 8), KEY_HEADS(8, 2), DIMS(16, 16)},
    {"gqa_teacher", SHAPE(2, 37, 67), HEADS(8, 8), KEY_HEADS(2, 8), DIMS(16, 16)},
    {"gqa_both", SHAPE(1, 67, 97), HEADS(6, 6), KEY_HEADS(2, 3), DIMS(32, 32), CAUSAL},
    {"mqa_both", SHAPE(2, 67, 67), HEADS(5, 5), KEY_HEADS(1, 1), DIMS(32, 32), WINDOW(10, 10)},
    {"gqa_bf16", SHAPE(1, 65, 97), HEADS(8, 8), KEY_HEADS(2, 2), DIMS(64, 32), TYPES(BF16, BF16), CAUSAL},
    {"gqa_f16_grad_f32", SHAPE(1, 65, 97), HEADS(8, 8), KEY_HEADS(2, 4), DIMS(32, 32), TYPES(F16, F16),
     .grad_f32 = 1},

    /* Teacher groups: several teacher heads per student head. */
    {"group_2", SHAPE(2, 37, 67), HEADS(4, 2), DIMS(16, 16)},
    {"group_3", SHAPE(1, 65, 97), HEADS(6, 2), DIMS(32, 16)},
    {"group_8", SHAPE(1, 37, 67), HEADS(8, 1), DIMS(16, 16), CAUSAL},
    {"group_2_given", SHAPE(2, 37, 67), HEADS(4, 2), DIMS(16, 16), .lse = LSE_GIVEN},
    {"group_3_given", SHAPE(1, 65, 97), HEADS(6, 2), DIMS(32, 16), .lse = LSE_GIVEN, CAUSAL},
    {"group_8_given", SHAPE(1, 37, 67), HEADS(8, 1), DIMS(16, 16), .lse = LSE_GIVEN, TYPES(BF16, BF16)},
    {"group_2_wider", SHAPE(2, 37, 67), HEADS(4, 2), DIMS(16, 16), .lse = LSE_WIDER},
    {"group_3_wider", SHAPE(1, 65, 97), HEADS(6, 2), DIMS(32, 16), .lse = LSE_WIDER, WINDOW(9, 0)},
    {"group_8_wider", SHAPE(1, 37, 67), HEADS(8, 1), DIMS(16, 16), .lse = LSE_WIDER, KEY_HEADS(1, 1)},
    {"group_4_wider_tiles", SHAPE(1, 200, 301), HEADS(4, 1), DIMS(8, 8), .lse = LSE_WIDER, CAUSAL},
    {"group_2_reverse", SHAPE(2, 37, 67), HEADS(4, 2), DIMS(16, 16), REVERSE},
    {"group_3_reverse_given", SHAPE(1, 37, 67), HEADS(6, 2), DIMS(16, 16), REVERSE, .lse = LSE_GIVEN},
    {"group_8_reverse_wider", SHAPE(1, 37, 67), HEADS(8, 1), DIMS(16, 16), REVERSE, .lse = LSE_WIDER, CAUSAL},
    {"group_4_reverse_wider_tiles", SHAPE(1, 200, 301), HEADS(4, 1), DIMS(8, 8), REVERSE, .lse = LSE_WIDER},
    {"group_2_wider_bf16", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(64, 64), .lse = LSE_WIDER, TYPES(BF16, BF16),
     SOFTCAPS(6, 4), REVERSE},
    {"group_2_wider_growing", SHAPE(1, 37, 257), HEADS(4, 2), DIMS(16, 16), .lse = LSE_WIDER, .growth = 20},
    {"group_misaligned", SHAPE(1, 37, 67), HEADS(6, 3), KEY_HEADS(2, 1), DIMS(16, 16)},
    {"group_misaligned_bf16", SHAPE(1, 65, 67), HEADS(6, 3), KEY_HEADS(2, 3), DIMS(64, 33), TYPES(BF16, BF16),
     CAUSAL},
    {"group_misaligned_given", SHAPE(1, 37, 67), HEADS(6, 3), KEY_HEADS(2, 1), DIMS(16, 16), .lse = LSE_GIVEN,
     REVERSE},
    {"group_masked", SHAPE(3, 37, 67), HEADS(4, 2), DIMS(16, 16), KEY_LENGTHS(0, 20, 67), CAUSAL},
    {"group_masked_wider", SHAPE(3, 37, 67), HEADS(4, 2), DIMS(16, 16), KEY_LENGTHS(0, 20, 67), .lse = LSE_WIDER},
    {"group_softcap", SHAPE(1, 37, 67), HEADS(4, 2), DIMS(16, 16), SOFTCAPS(3, 2), .lse = LSE_GIVEN},
    {"group_gaps", SHAPE(2, 37, 67), HEADS(4, 2), DIMS(16, 16), LAYOUT(GAPS), .lse = LSE_WIDER},
    {"lse_given_without_groups", PLAIN, .lse = LSE_GIVEN},

    /* Teacher groups on tensor cores: several tiles of queries and keys, queries of all heads in shared memory or
     * not, shared keys or not. */
    {"student_group_2_bf16", SHAPE(1, 200, 330), HEADS(4, 2), KEY_HEADS(2, 1), DIMS(64, 64), TYPES(BF16, BF16),
     CAUSAL, STUDENT_ONLY},
    {"student_group_3_bf16", SHAPE(2, 130, 300), HEADS(6, 2), DIMS(40, 24), TYPES(BF16, BF16), WINDOW(140, 20),
     STUDENT_ONLY},
    {"student_group_4_bf16", SHAPE(1, 270, 270), HEADS(8, 2), KEY_HEADS(2, 2), DIMS(128, 128), TYPES(BF16, BF16),
     CAUSAL, STUDENT_ONLY, .lse = LSE_GIVEN},
    {"student_group_4_apart_bf16", SHAPE(1, 64, 300), HEADS(4, 1), KEY_HEADS(4, 1), DIMS(128, 128), TYPES(BF16, BF16),
     STUDENT_ONLY, .lse = LSE_WIDER, WINDOW(200, 0)},
    {"student_group_8_bf16", SHAPE(1, 129, 257), HEADS(8, 1), KEY_HEADS(2, 1), DIMS(64, 64), TYPES(BF16, BF16),
     CAUSAL, STUDENT_ONLY, .grad_f32 = 1},
    {"student_group_8_wide_bf16", SHAPE(1, 70, 140), HEADS(8, 1), KEY_HEADS(1, 1), DIMS(128, 64), TYPES(BF16, BF16),
     STUDENT_ONLY},
    {"student_group_sizes_bf16", SHAPE(1, 140, 200), HEADS(4, 2), KEY_HEADS(1, 2), DIMS(128, 64), TYPES(BF16, BF16),
     CAUSAL, STUDENT_ONLY},
    {"student_group_2_f16", SHAPE(1, 200, 330), HEADS(4, 2), KEY_HEADS(1, 2), DIMS(64, 128), TYPES(F16, F16), CAUSAL,
     STUDENT_ONLY},
    {"student_group_4_f16", SHAPE(2, 65, 193), HEADS(4, 1), DIMS(64, 64), TYPES(F16, F16), STUDENT_ONLY,
     KEY_LENGTHS(100, 0)},
    {"student_group_16_f16", SHAPE(1, 130, 259), HEADS(16, 1), KEY_HEADS(4, 1), DIMS(128, 128), TYPES(F16, F16),
     CAUSAL, STUDENT_ONLY, .lse = LSE_GIVEN},
    {"student_group_5_shared_bf16", SHAPE(1, 259, 130), HEADS(20, 4), KEY_HEADS(4, 2), DIMS(104, 128),
     TYPES(BF16, BF16), WINDOW(-1, 100), STUDENT_ONLY},
    {"student_group_packed_bf16", PACKED(3, LENGTHS(0, 1, 150, 330), LENGTHS(0, 200, 200, 431)), HEADS(6, 3),
     KEY_HEADS(2, 1), DIMS(64, 64), TYPES(BF16, BF16), CAUSAL, TAILS(7, 3), STUDENT_ONLY},
    {"student_group_growing_bf16", SHAPE(1, 65, 517), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), .growth = 20,
     STUDENT_ONLY},
    {"student_group_shrinking_bf16", SHAPE(1, 65, 517), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), .growth = -20,
     STUDENT_ONLY},
    {"student_group_misaligned_bf16", SHAPE(1, 65, 130), HEADS(6, 3), KEY_HEADS(2, 3), DIMS(64, 64),
     TYPES(BF16, BF16), CAUSAL, STUDENT_ONLY},
    {"student_group_offsets_bf16", SHAPE(1, 150, 300), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), CAUSAL,
     OFFSETS(10, 40), STUDENT_ONLY},
    {"student_group_one_key_bf16", SHAPE(1, 37, 1), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), SCALES(0.1F, 30),
     STUDENT_ONLY},
    {"student_group_far_heads_bf16", SHAPE(1, 67, 67), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), CAUSAL,
     SCALES(30, 0.1F), STUDENT_ONLY},
    {"student_group_high_lse_bf16", SHAPE(1, 67, 267), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), SCALES(3, 0.1F),
     STUDENT_ONLY},
    {"student_group_no_keys_bf16", PACKED(2, LENGTHS(0, 28, 71), LENGTHS(0, 0, 0)), TAILS(3, 23), HEADS(8, 2),
     DIMS(24, 24), TYPES(BF16, BF16), STUDENT_ONLY},

    /* The same with softcaps, below and above which logits are, in reverse, and with gradients of both sides. */
    {"group_4_softcap_bf16", SHAPE(1, 270, 270), HEADS(8, 2), KEY_HEADS(2, 2), DIMS(128, 128), TYPES(BF16, BF16),
     CAUSAL, SOFTCAPS(50, 30)},
    {"group_3_softcap_bf16", SHAPE(1, 200, 330), HEADS(6, 2), DIMS(40, 24), TYPES(BF16, BF16), SOFTCAPS(2, 1),
     STUDENT_ONLY},
    {"group_2_softcap_t_f16", SHAPE(1, 130, 200), HEADS(4, 2), KEY_HEADS(1, 2), DIMS(64, 128), TYPES(F16, F16),
     WINDOW(90, 20), SOFTCAPS(3, 0), .lse = LSE_GIVEN},
    {"group_2_softcap_s_bf16", SHAPE(1, 200, 130), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), BOUNDS(RANDOM),
     SOFTCAPS(0, 3), .lse = LSE_WIDER, STUDENT_ONLY},
    {"group_8_softcap_bf16", SHAPE(1, 129, 257), HEADS(8, 1), KEY_HEADS(2, 1), DIMS(64, 64), TYPES(BF16, BF16),
     SOFTCAPS(20, 20), .grad_f32 = 1},
    {"group_2_saturated_f16", SHAPE(1, 67, 130), HEADS(4, 2), DIMS(16, 16), TYPES(F16, F16), SOFTCAPS(2e-4F, 1e-3F),
     REVERSE},
    {"group_2_one_key_bf16", SHAPE(2, 130, 1), HEADS(4, 2), DIMS(16, 16), TYPES(BF16, BF16), SCALES(0.1F, 30),
     REVERSE},
    {"group_4_reverse_bf16", SHAPE(1, 270, 270), HEADS(8, 2), KEY_HEADS(2, 2), DIMS(128, 128), TYPES(BF16, BF16),
     CAUSAL, REVERSE},
    {"group_3_reverse_wider_f16", SHAPE(2, 130, 200), HEADS(6, 2), DIMS(40, 64), TYPES(F16, F16), WINDOW(140, 20),
     REVERSE, .lse = LSE_WIDER},
    {"group_2_reverse_softcap_bf16", SHAPE(1, 200, 300), HEADS(4, 2), KEY_HEADS(2, 1), DIMS(64, 64), SOFTCAPS(5, 4),
     TYPES(BF16, BF16), BOUNDS(ZIGZAG), REVERSE},
    {"group_2_reverse_apart_bf16", SHAPE(1, 65, 517), HEADS(4, 2), DIMS(64, 64), TYPES(BF16, BF16), REVERSE,
     .growth = 20},
    {"group_3_gradients_f16", SHAPE(1, 200, 330), HEADS(6, 2), KEY_HEADS(2, 1), DIMS(128, 64), TYPES(F16, F16)},
    {"group_2_gradients_misaligned_bf16", SHAPE(1, 130, 200), HEADS(6, 3), KEY_HEADS(2, 3), DIMS(64, 64), CAUSAL,
     TYPES(BF16, BF16), .lse = LSE_WIDER},
    {"group_2_gradients_packed_bf16", PACKED(3, LENGTHS(0, 1, 150, 330), LENGTHS(0, 200, 200, 431)), HEADS(6, 3),
     KEY_HEADS(2, 1), DIMS(64, 64), TYPES(BF16, BF16), CAUSAL, TAILS(7, 3), .grad_f32 = 1},

    /* Students with linear attention: feature maps, the quotient in place of the softmax. */
    {"linear", PLAIN, LINEAR},
    {"linear_causal", SHAPE(2, 65, 97), HEADS(2, 2), DIMS(16, 24), LINEAR, CAUSAL},
    {"linear_window_gqa", SHAPE(1, 140, 211), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(33, 12), LINEAR, WINDOW(40, 3)},
    {"linear_softcap_t", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(16, 16), SOFTCAPS(3, 0), LINEAR, CAUSAL},
    {"linear_bounds", SHAPE(1, 97, 131), HEADS(2, 2), DIMS(16, 16), LINEAR, BOUNDS(RANDOM)},
    {"linear_packed", PACKED(3, LENGTHS(0, 17, 17, 60), LENGTHS(0, 23, 31, 80)), HEADS(2, 2), DIMS(16, 16), LINEAR,
     CAUSAL},
    {"linear_sinks", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(16, 16), LINEAR, SINKS},
    {"linear_groups", SHAPE(1, 65, 97), HEADS(4, 2), DIMS(16, 16), LINEAR},
    {"linear_bf16", SHAPE(1, 200, 421), HEADS(2, 2), DIMS(128, 128), TYPES(BF16, BF16), LINEAR, CAUSAL},
    {"linear_64_bf16", SHAPE(1, 300, 300), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), LINEAR},
    {"linear_256_bf16", SHAPE(1, 140, 211), HEADS(1, 1), DIMS(128, 256), TYPES(BF16, BF16), LINEAR, CAUSAL},
    {"linear_f16", SHAPE(1, 140, 211), HEADS(2, 2), DIMS(64, 64), TYPES(F16, F16), LINEAR, CAUSAL},
    {"linear_group_4_bf16", SHAPE(1, 200, 300), HEADS(8, 2), KEY_HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), LINEAR,
     CAUSAL, STUDENT_ONLY},

    /* Scales, softcaps, directions. */
    {"scales", PLAIN, SCALES(0.7F, 0.125F)},
    {"scale_negative", PLAIN, SCALES(-0.3F, 0.2F)},
    {"softcap_teacher", PLAIN, SOFTCAPS(2.5F, 0)},
    {"softcap_student", PLAIN, SOFTCAPS(0, 2.5F)},
    {"softcap_both", SHAPE(1, 65, 97), HEADS(1, 1), DIMS(64, 64), SOFTCAPS(30, 1.5F), CAUSAL},
    {"softcap_reverse", PLAIN, SOFTCAPS(1.5F, 3), REVERSE},
    {"softcap_bf16", SHAPE(1, 65, 97), HEADS(1, 1), DIMS(64, 64), SOFTCAPS(3, 3), TYPES(BF16, BF16)},
    {"softcap_long_bf16", SHAPE(1, 200, 421), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(16, 8), SOFTCAPS(3, 0),
     TYPES(BF16, BF16), CAUSAL},
    {"softcap_far_bf16", SHAPE(1, 140, 330), HEADS(1, 1), DIMS(128, 96), SOFTCAPS(50, 30), TYPES(BF16, BF16), CAUSAL},
    {"softcap_near_bf16", SHAPE(1, 140, 330), HEADS(1, 1), DIMS(64, 128), SOFTCAPS(5, 4), TYPES(BF16, BF16)},
    {"softcap_f16", SHAPE(1, 33, 300), HEADS(1, 1), DIMS(128, 128), SOFTCAPS(0, 2), TYPES(F16, F16), REVERSE},
    {"softcap_growing_bf16", SHAPE(1, 37, 513), HEADS(1, 1), DIMS(16, 16), SOFTCAPS(40, 30), TYPES(BF16, BF16),
     .growth = 30},
    {"reverse", SHAPE(1, 97, 127), HEADS(2, 2), DIMS(32, 32), REVERSE},
    {"reverse_causal", SHAPE(1, 97, 127), HEADS(2, 2), DIMS(64, 32), REVERSE, CAUSAL},
    {"reverse_bf16", SHAPE(1, 65, 97), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(64, 64), REVERSE, TYPES(BF16, BF16)},
    {"reverse_f16_window", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(64, 64), REVERSE, TYPES(F16, F16), WINDOW(12, 5)},
    {"unit_upstream", PLAIN, .unit_upstream = 1},
    {"unit_upstream_reverse", PLAIN, .unit_upstream = 1, REVERSE},

    /* Logits whose size changes along the keys, so that a lazy shift has to be renewed. */
    {"growing", SHAPE(1, 37, 513), HEADS(2, 2), DIMS(16, 16), .growth = 30},
    {"growing_reverse", SHAPE(1, 37, 513), HEADS(1, 1), DIMS(16, 16), .growth = 30, REVERSE},
    {"growing_causal", SHAPE(1, 257, 257), HEADS(1, 1), DIMS(16, 16), .growth = 30, CAUSAL},
    {"growing_teacher_groups", SHAPE(1, 37, 257), HEADS(4, 2), DIMS(16, 16), .growth = 20},
    {"growing_fast", SHAPE(1, 37, 193), HEADS(1, 1), DIMS(16, 16), .growth = 300},
    {"shrinking", SHAPE(1, 37, 513), HEADS(2, 2), DIMS(16, 16), .growth = -30},
    {"growing_bf16", SHAPE(1, 70, 513), HEADS(2, 2), DIMS(128, 128), .growth = 30, TYPES(BF16, BF16)},
    {"growing_full_stages_bf16", SHAPE(1, 70, 256), HEADS(1, 1), DIMS(128, 128), .growth = 30, TYPES(BF16, BF16)},
    {"growing_causal_f16", SHAPE(1, 193, 193), HEADS(1, 1), DIMS(64, 64), .growth = 30, TYPES(F16, F16), CAUSAL},
    {"shrinking_bf16", SHAPE(1, 37, 257), HEADS(2, 2), DIMS(64, 64), .growth = -30, TYPES(BF16, BF16)},

    /* Nearly all probabilities are 0. Full tiles of f16 gradients are then 0 and have no magnitude to scale by. */
    {"peaked_f16", SHAPE(1, 2, 200), HEADS(4, 4), DIMS(64, 64), TYPES(F16, F16), SCALES(40, 28)},
    {"peaked_f16_reverse", SHAPE(1, 2, 200), HEADS(4, 4), DIMS(136, 192), TYPES(F16, F16), SCALES(40, 28), REVERSE},

    /* Late in training: KLs of 1e-6 to 1e-3, with small and large logits. */
    {"near", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(64, 64), .apart = 1e-2},
    {"near_reverse", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(64, 64), .apart = 1e-3, REVERSE},
    {"near_growing", SHAPE(1, 37, 513), HEADS(2, 2), DIMS(16, 16), .apart = 1e-3, .growth = 30},
    {"near_bf16", SHAPE(1, 65, 97), HEADS(2, 2), DIMS(64, 64), .apart = 5e-2, TYPES(BF16, BF16), CAUSAL},

    /* Layouts of inputs, gradients and row vectors. */
    LAYOUTS("f32", SHAPE(3, 37, 41), HEADS(4, 4), KEY_HEADS(2, 4), DIMS(33, 16)),
    LAYOUTS("bf16", SHAPE(2, 37, 67), HEADS(2, 2), DIMS(64, 24), TYPES(BF16, F16), CAUSAL),
    LAID_OUT("one_query", FREE_STRIDES, SHAPE(1, 1, 41), HEADS(1, 1), DIMS(16, 16)),
    LAID_OUT("one_key_bf16", FREE_STRIDES, SHAPE(1, 37, 1), HEADS(2, 1), DIMS(16, 16), TYPES(BF16, BF16)),
    LAID_OUT("one_query_group", FREE_STRIDES, SHAPE(1, 1, 41), HEADS(4, 1), KEY_HEADS(1, 1), DIMS(16, 16)),
    LAID_OUT("one_query_indexer", FREE_STRIDES, SHAPE(1, 1, 41), HEADS(2, 1), DIMS(16, 16), INDEXER(3)),
    LAID_OUT("one_query_attention", FREE_STRIDES, SHAPE(1, 1, 41), HEADS(1, 1), DIMS(16, 16), ATTENTION),

    /* Gradients that are not requested need no buffer and do not affect the others. */
    SUBSETS("forward", SHAPE(1, 17, 37), HEADS(2, 2), DIMS(8, 8)),
    SUBSETS("reverse", SHAPE(1, 17, 37), HEADS(2, 2), DIMS(8, 8), REVERSE),
    SUBSETS("group", SHAPE(1, 17, 37), HEADS(4, 2), KEY_HEADS(2, 1), DIMS(8, 8)),
    SUBSETS("group_reverse", SHAPE(1, 17, 37), HEADS(4, 2), DIMS(8, 8), REVERSE),
    SUBSETS("bf16", SHAPE(1, 17, 37), HEADS(2, 2), DIMS(8, 8), TYPES(BF16, BF16)),
    SUBSETS("bf16_and_f32", SHAPE(1, 17, 37), HEADS(2, 2), DIMS(8, 8), TYPES(BF16, F32), REVERSE),

    /* Many options at once. */
    {"combined_a", PACKED(4, LENGTHS(0, 1, 34, 34, 95), LENGTHS(0, 40, 73, 80, 113)), HEADS(6, 3), KEY_HEADS(2, 1),
     DIMS(33, 64), TYPES(BF16, F16), .grad_f32 = 1, CAUSAL, WINDOW(17, 3), SOFTCAPS(4, 2), TAILS(3, 5),
     LAYOUT(LENGTH_FIRST), .lse = LSE_WIDER},
    {"combined_b", SHAPE(3, 65, 97), HEADS(8, 4), KEY_HEADS(4, 2), DIMS(24, 40), TYPES(F16, F32), REVERSE, CAUSAL,
     WINDOW(40, -1), KEY_LENGTHS(97, 0, 50), SOFTCAPS(0, 5), SCALES(0.2F, 0), LAYOUT(GAPS), .lse = LSE_GIVEN},
    {"combined_c", SHAPE(2, 67, 131), HEADS(4, 4), KEY_HEADS(1, 2), DIMS(128, 8), TYPES(F32, BF16), WINDOW(50, 20),
     OFFSETS(100, 60), KEY_LENGTHS(131, 90), REVERSE, LAYOUT(MISALIGNED), .unit_upstream = 1, .growth = 10},

    /* Dense indexers. */
    {"indexer", SHAPE(2, 33, 41), HEADS(4, 1), DIMS(16, 16), INDEXER(4)},
    {"indexer_1x1", SHAPE(1, 1, 1), HEADS(1, 1), DIMS(8, 8), INDEXER(1)},
    {"indexer_one_teacher", SHAPE(1, 37, 67), HEADS(1, 1), DIMS(16, 32), INDEXER(3)},
    {"indexer_one_teacher_wider", SHAPE(1, 37, 67), HEADS(2, 2), DIMS(16, 32), INDEXER(3), .lse = LSE_WIDER},
    {"indexer_linear", SHAPE(1, 37, 67), HEADS(2, 1), DIMS(16, 16), INDEXER(4), .index_linear = 1},
    {"indexer_tiles", SHAPE(1, 195, 197), HEADS(2, 1), DIMS(16, 32), INDEXER(4)},
    {"indexer_tall", SHAPE(1, 389, 31), HEADS(2, 1), DIMS(16, 16), INDEXER(2), TYPES(BF16, BF16)},
    {"indexer_long", SHAPE(1, 3, 1021), HEADS(2, 1), DIMS(16, 32), INDEXER(4)},
    {"indexer_mqa", SHAPE(1, 65, 97), HEADS(16, 1), KEY_HEADS(1, 1), DIMS(64, 64), INDEXER(8)},
    {"indexer_gqa", SHAPE(1, 65, 97), HEADS(12, 2), KEY_HEADS(6, 1), DIMS(16, 32), INDEXER(4), CAUSAL},
    {"indexer_gqa_across_groups", SHAPE(1, 65, 97), HEADS(12, 6), KEY_HEADS(4, 3), DIMS(16, 32), INDEXER(2), CAUSAL},
    {"indexer_mla", SHAPE(1, 33, 67), HEADS(6, 1), KEY_HEADS(1, 1), DIMS(576, 128), INDEXER(4), TYPES(BF16, BF16),
     CAUSAL, .lse = LSE_GIVEN},
    {"indexer_128_heads", SHAPE(1, 9, 31), HEADS(128, 1), KEY_HEADS(1, 1), DIMS(32, 32), INDEXER(128), CAUSAL},
    {"indexer_256", SHAPE(1, 17, 33), HEADS(2, 1), DIMS(64, 256), INDEXER(5), TYPES(F16, F16)},
    {"indexer_odd", SHAPE(2, 37, 53), HEADS(3, 1), DIMS(33, 31), INDEXER(7), WINDOW(9, 4)},
    {"indexer_f16", SHAPE(1, 65, 97), HEADS(4, 1), DIMS(64, 64), INDEXER(4), TYPES(F16, F16), WEIGHTS(F16)},
    {"indexer_bf16", SHAPE(1, 65, 97), HEADS(4, 1), DIMS(64, 64), INDEXER(4), TYPES(BF16, BF16), WEIGHTS(BF16),
     CAUSAL},
    {"indexer_bf16_grad_f32", SHAPE(1, 65, 97), HEADS(4, 1), DIMS(64, 64), INDEXER(4), TYPES(BF16, BF16),
     .grad_f32 = 1},
    {"indexer_bf16_and_f32", SHAPE(1, 33, 41), HEADS(4, 1), DIMS(16, 16), INDEXER(4), TYPES(BF16, F32), WEIGHTS(F16)},
    {"indexer_causal", SHAPE(1, 97, 97), HEADS(2, 1), DIMS(32, 32), INDEXER(4), CAUSAL},
    {"indexer_causal_tall", SHAPE(1, 97, 33), HEADS(2, 1), DIMS(16, 16), INDEXER(4), CAUSAL},
    {"indexer_causal_window", SHAPE(1, 193, 193), HEADS(2, 1), DIMS(16, 16), INDEXER(4), CAUSAL, WINDOW(31, -1)},
    {"indexer_key_lengths", SHAPE(4, 37, 97), HEADS(2, 1), DIMS(16, 16), INDEXER(4), KEY_LENGTHS(0, 1, 64, 97)},
    {"indexer_offsets", SHAPE(1, 97, 41), HEADS(2, 1), DIMS(16, 16), INDEXER(4), CAUSAL, OFFSETS(0, 32)},
    {"indexer_packed", PACKED(4, LENGTHS(0, 5, 5, 70, 103), LENGTHS(0, 9, 40, 40, 141)), TAILS(7, 5), HEADS(2, 1),
     DIMS(16, 16), INDEXER(4), CAUSAL, .lse = LSE_WIDER},
    {"indexer_packed_f16", PACKED(3, LENGTHS(0, 5, 70, 103), LENGTHS(0, 9, 40, 141)), TAILS(7, 5), HEADS(4, 2),
     DIMS(16, 16), INDEXER(3), TYPES(F16, F16), WEIGHTS(F16)},
    {"indexer_packed_no_keys_bf16", PACKED(2, LENGTHS(0, 28, 71), LENGTHS(0, 0, 0)), TAILS(3, 23), HEADS(2, 1),
     DIMS(16, 16), INDEXER(2), TYPES(BF16, BF16)},
    {"indexer_given_lse", SHAPE(1, 37, 67), HEADS(4, 2), DIMS(16, 16), INDEXER(4), .lse = LSE_GIVEN},
    {"indexer_wider_lse", SHAPE(1, 37, 67), HEADS(4, 1), DIMS(16, 16), INDEXER(4), CAUSAL, .lse = LSE_WIDER},
    {"indexer_reverse", SHAPE(1, 37, 67), HEADS(4, 1), DIMS(16, 16), INDEXER(4), REVERSE, CAUSAL},
    {"indexer_reverse_bf16", SHAPE(1, 37, 67), HEADS(4, 1), DIMS(16, 16), INDEXER(4), REVERSE, TYPES(BF16, BF16)},
    {"indexer_softcap_scales", SHAPE(1, 37, 67), HEADS(4, 1), DIMS(16, 16), INDEXER(4), SOFTCAPS(3, 0),
     SCALES(0.4F, -0.2F)},
    {"indexer_growth", SHAPE(1, 67, 259), HEADS(2, 1), DIMS(16, 16), INDEXER(4), .growth = 20},
    {"indexer_only_dw", SHAPE(1, 37, 67), HEADS(2, 1), DIMS(16, 16), INDEXER(4), .without = SKL_DQ_S | SKL_DK_S},
    {"indexer_only_dk", SHAPE(1, 37, 67), HEADS(2, 1), DIMS(16, 16), INDEXER(4), .without = SKL_DQ_S | SKL_DW_S},
    {"indexer_only_dq", SHAPE(1, 37, 67), HEADS(2, 1), DIMS(16, 16), INDEXER(4), .without = SKL_DK_S | SKL_DW_S},
    {"indexer_no_gradients", SHAPE(1, 37, 67), HEADS(2, 1), DIMS(16, 16), INDEXER(4), .without = INDEXER_GRADIENTS},
    LAYOUTS("indexer", SHAPE(2, 37, 41), HEADS(4, 2), DIMS(16, 16), INDEXER(3)),
    {"indexer_bf16_tiles", SHAPE(2, 300, 420), HEADS(6, 2), KEY_HEADS(3, 1), DIMS(192, 32), INDEXER(3),
     TYPES(BF16, BF16), CAUSAL},
    {"indexer_bf16_128", SHAPE(1, 260, 390), HEADS(3, 1), DIMS(128, 128), INDEXER(5), TYPES(BF16, BF16),
     WINDOW(70, 9)},
    {"indexer_bf16_256", SHAPE(1, 129, 257), HEADS(2, 1), DIMS(64, 256), INDEXER(3), TYPES(BF16, BF16), CAUSAL,
     .grad_f32 = 1},
    {"indexer_bf16_mla", SHAPE(1, 130, 270), HEADS(5, 1), KEY_HEADS(1, 1), DIMS(576, 64), INDEXER(4),
     TYPES(BF16, BF16), CAUSAL, .lse = LSE_WIDER},
    {"indexer_bf16_key_lengths", SHAPE(4, 37, 297), HEADS(2, 1), DIMS(64, 64), INDEXER(4), TYPES(BF16, BF16),
     KEY_LENGTHS(0, 1, 164, 297)},
    {"indexer_bf16_packed", PACKED(4, LENGTHS(0, 5, 5, 170, 303), LENGTHS(0, 9, 40, 240, 541)), TAILS(7, 5),
     HEADS(4, 2), DIMS(64, 32), INDEXER(4), TYPES(BF16, BF16), CAUSAL},
    {"indexer_bf16_offsets", SHAPE(1, 297, 141), HEADS(2, 1), DIMS(24, 40), INDEXER(4), TYPES(BF16, BF16), CAUSAL,
     OFFSETS(0, 132), .index_linear = 1},
    {"indexer_bf16_only_dw", SHAPE(1, 137, 67), HEADS(2, 1), DIMS(16, 16), INDEXER(4), TYPES(BF16, BF16),
     .without = SKL_DQ_S | SKL_DK_S},
    LAYOUTS("indexer_bf16", SHAPE(2, 37, 141), HEADS(4, 2), DIMS(16, 16), INDEXER(3), TYPES(BF16, BF16)),
    {"indexer_f16_tiles", SHAPE(1, 200, 300), HEADS(4, 2), KEY_HEADS(2, 1), DIMS(72, 32), INDEXER(3), TYPES(F16, F16),
     CAUSAL},
    {"indexer_f16_128", SHAPE(1, 140, 270), HEADS(2, 1), DIMS(128, 128), INDEXER(3), TYPES(F16, F16), WINDOW(70, 9)},
    {"indexer_f16_256", SHAPE(1, 129, 130), HEADS(2, 1), DIMS(64, 256), INDEXER(2), TYPES(F16, F16), CAUSAL,
     .grad_f32 = 1},
    {"indexer_f16_mla", SHAPE(1, 70, 140), HEADS(3, 1), KEY_HEADS(1, 1), DIMS(576, 64), INDEXER(3), TYPES(F16, F16),
     CAUSAL, .lse = LSE_WIDER},
    {"indexer_f16_key_lengths", SHAPE(4, 37, 297), HEADS(2, 1), DIMS(64, 64), INDEXER(4), TYPES(F16, F16),
     KEY_LENGTHS(0, 1, 164, 297)},
    {"indexer_f16_packed", PACKED(4, LENGTHS(0, 5, 5, 170, 303), LENGTHS(0, 9, 40, 240, 541)), TAILS(7, 5),
     HEADS(4, 2), DIMS(64, 32), INDEXER(4), TYPES(F16, F16), CAUSAL},
    {"indexer_f16_offsets", SHAPE(1, 297, 141), HEADS(2, 1), DIMS(24, 40), INDEXER(4), TYPES(F16, F16), CAUSAL,
     OFFSETS(0, 132), .index_linear = 1},
    {"indexer_f16_192", SHAPE(1, 67, 131), HEADS(2, 2), KEY_HEADS(1, 1), DIMS(72, 192), INDEXER(2), TYPES(F16, F16)},
    LAYOUTS("indexer_f16", SHAPE(2, 37, 141), HEADS(4, 2), DIMS(16, 16), INDEXER(3), TYPES(F16, F16)),
    {"indexer_bf16_no_keys", SHAPE(2, 5, 0), HEADS(2, 1), DIMS(8, 8), INDEXER(2), TYPES(BF16, BF16)},
    {"indexer_bf16_no_queries", SHAPE(2, 0, 5), HEADS(2, 1), DIMS(8, 8), INDEXER(2), TYPES(BF16, BF16)},
    {"indexer_no_keys", SHAPE(2, 5, 0), HEADS(2, 1), DIMS(8, 8), INDEXER(2)},
    {"indexer_no_queries", SHAPE(2, 0, 5), HEADS(2, 1), DIMS(8, 8), INDEXER(2)},

    /* The student's attention, with its KL. */
    {"attention", PLAIN, ATTENTION},
    {"attention_causal", SHAPE(1, 97, 97), HEADS(2, 2), DIMS(64, 64), CAUSAL, ATTENTION},
    {"attention_gqa", SHAPE(1, 65, 97), HEADS(6, 6), KEY_HEADS(2, 3), DIMS(32, 24), CAUSAL, ATTENTION},
    {"attention_window", SHAPE(1, 193, 201), HEADS(1, 1), DIMS(24, 32), WINDOW(40, 9), ATTENTION},
    {"attention_key_lengths", SHAPE(3, 37, 97), HEADS(2, 2), DIMS(16, 16), KEY_LENGTHS(0, 33, 97), ATTENTION},
    {"attention_packed", PACKED(4, LENGTHS(0, 5, 5, 70, 103), LENGTHS(0, 9, 40, 40, 141)), TAILS(7, 5), HEADS(4, 4),
     KEY_HEADS(4, 2), DIMS(16, 16), CAUSAL, ATTENTION},
    {"attention_bounds", SHAPE(2, 97, 141), HEADS(2, 2), DIMS(16, 16), BOUNDS(RANDOM), ATTENTION},
    {"attention_groups", SHAPE(1, 67, 131), HEADS(6, 2), KEY_HEADS(3, 1), DIMS(24, 16), CAUSAL, ATTENTION},
    {"attention_reverse", PLAIN, REVERSE, ATTENTION},
    {"attention_softcaps", PLAIN, SOFTCAPS(3, 2), CAUSAL, ATTENTION},
    {"attention_zero_upstream", PLAIN, CAUSAL, .zero_upstream = 2, ATTENTION},
    {"attention_unit_upstream", PLAIN, .unit_upstream = 1, ATTENTION},
    {"attention_only_dq", PLAIN, .without = SKL_DK_S, ATTENTION},
    {"attention_only_dk", PLAIN, .without = SKL_DQ_S, ATTENTION},
    {"attention_only_dv", PLAIN, .without = SKL_DQ_S | SKL_DK_S, ATTENTION},
    {"attention_no_keys", SHAPE(2, 5, 0), HEADS(2, 2), DIMS(8, 8), ATTENTION},
    {"attention_packed_none", PACKED(2, LENGTHS(0, 0, 0), LENGTHS(0, 0, 0)), TAILS(7, 5), HEADS(2, 2), DIMS(8, 8),
     ATTENTION},
    {"attention_no_queries", SHAPE(2, 0, 5), HEADS(2, 2), DIMS(8, 8), ATTENTION},
    {"attention_bf16_64", SHAPE(1, 193, 137), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(64, 64), TYPES(BF16, BF16), CAUSAL,
     ATTENTION},
    {"attention_bf16_128", SHAPE(1, 130, 161), HEADS(2, 2), KEY_HEADS(1, 1), DIMS(128, 128), TYPES(BF16, BF16),
     ATTENTION},
    {"attention_bf16_packed", PACKED(4, LENGTHS(0, 5, 5, 140, 173), LENGTHS(0, 9, 40, 180, 241)), TAILS(7, 5),
     HEADS(2, 2), KEY_HEADS(1, 2), DIMS(64, 128), TYPES(BF16, BF16), CAUSAL, ATTENTION},
    {"attention_bf16_groups", SHAPE(1, 67, 131), HEADS(8, 2), KEY_HEADS(2, 1), DIMS(64, 64), TYPES(BF16, BF16),
     CAUSAL, ATTENTION},
    {"attention_bf16_full", SHAPE(1, 325, 200), HEADS(2, 2), KEY_HEADS(2, 1), DIMS(128, 128), TYPES(BF16, BF16),
     WEIGHTED, ATTENTION},
    {"attention_bf16_causal", SHAPE(1, 333, 333), HEADS(1, 1), DIMS(128, 128), TYPES(BF16, BF16), CAUSAL, WEIGHTED,
     ATTENTION},
    {"attention_bf16_64_causal", SHAPE(1, 333, 391), HEADS(2, 2), KEY_HEADS(1, 1), DIMS(64, 64), TYPES(BF16, BF16),
     CAUSAL, WEIGHTED, ATTENTION},
    {"attention_bf16_window", SHAPE(1, 391, 333), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(128, 64), TYPES(BF16, BF16),
     WINDOW(130, 33), WEIGHTED, ATTENTION},
    {"attention_bf16_gqa", SHAPE(1, 197, 261), HEADS(4, 4), KEY_HEADS(1, 2), DIMS(64, 64), TYPES(BF16, BF16), CAUSAL,
     WEIGHTED, ATTENTION},
    {"attention_bf16_gqa_of_teacher", SHAPE(1, 130, 140), HEADS(4, 4), KEY_HEADS(2, 1), DIMS(128, 128),
     TYPES(BF16, BF16), WEIGHTED, ATTENTION},
    {"attention_bf16_packed_128", PACKED(4, LENGTHS(0, 5, 5, 220, 333), LENGTHS(0, 9, 40, 255, 401)), TAILS(7, 5),
     HEADS(2, 2), KEY_HEADS(2, 1), DIMS(128, 128), TYPES(BF16, BF16), CAUSAL, WEIGHTED, ATTENTION},
    {"attention_bf16_key_lengths", SHAPE(4, 67, 297), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16),
     KEY_LENGTHS(0, 1, 164, 297), WEIGHTED, ATTENTION},
    {"attention_bf16_bounds", SHAPE(1, 297, 341), HEADS(2, 2), KEY_HEADS(2, 1), DIMS(64, 128), TYPES(BF16, BF16),
     BOUNDS(RANDOM), WEIGHTED, ATTENTION},
    {"attention_bf16_few_window", SHAPE(1, 91, 133), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(128, 64), TYPES(BF16, BF16),
     WINDOW(50, 13), WEIGHTED, ATTENTION},
    {"attention_bf16_few_bounds", SHAPE(1, 67, 141), HEADS(2, 2), KEY_HEADS(2, 1), DIMS(64, 128), TYPES(BF16, BF16),
     BOUNDS(RANDOM), WEIGHTED, ATTENTION},
    {"attention_bf16_zero_upstream", SHAPE(1, 200, 200), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), CAUSAL,
     .zero_upstream = 2, WEIGHTED, ATTENTION},
    {"attention_bf16_unit_upstream", SHAPE(1, 200, 161), HEADS(2, 2), DIMS(24, 40), TYPES(BF16, BF16),
     .unit_upstream = 1, .grad_f32 = 1, ATTENTION},
    {"attention_bf16_one_query", SHAPE(2, 1, 261), HEADS(2, 2), KEY_HEADS(1, 1), DIMS(128, 128), TYPES(BF16, BF16),
     CAUSAL, WEIGHTED, ATTENTION},
    {"attention_bf16_only_dq", SHAPE(1, 137, 161), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), WEIGHTED,
     .without = SKL_DK_S, ATTENTION},
    {"attention_bf16_only_dv", SHAPE(1, 137, 161), HEADS(2, 2), DIMS(64, 64), TYPES(BF16, BF16), WEIGHTED,
     .without = SKL_DQ_S | SKL_DK_S, ATTENTION},
    {"attention_f16_64", SHAPE(1, 325, 200), HEADS(2, 2), KEY_HEADS(1, 2), DIMS(64, 64), TYPES(F16, F16), CAUSAL,
     WEIGHTED, ATTENTION},
    {"attention_f16_128", SHAPE(1, 200, 130), HEADS(2, 2), KEY_HEADS(2, 1), DIMS(128, 128), TYPES(F16, F16), WEIGHTED,
     ATTENTION},
    {"attention_f16_window", SHAPE(1, 137, 131), HEADS(1, 1), DIMS(128, 64), TYPES(F16, F16), WINDOW(70, 0),
     .grad_f32 = 1, ATTENTION},
    {"attention_f16_512", SHAPE(1, 33, 67), HEADS(1, 1), DIMS(40, 512), TYPES(F16, F16), ATTENTION},
    LAYOUTS("attention", SHAPE(2, 37, 41), HEADS(4, 4), KEY_HEADS(2, 2), DIMS(16, 16), TYPES(BF16, BF16), ATTENTION),

    /* Indexers of blocks, with pooled teachers. */
    {"pooled_max", SHAPE(2, 65, 97), HEADS(4, 1), KEY_HEADS(2, 1), DIMS(16, 24), INDEXER(3),
     POOL(MAX, MEAN, COMPLETE, 8), CAUSAL},
    {"pooled_max_heads", SHAPE(1, 200, 300), HEADS(8, 2), KEY_HEADS(4, 1), DIMS(32, 16), INDEXER(1),
     POOL(MAX, MAX, EARLIER, 16), CAUSAL, .index_linear = 1},
    {"pooled_sum", SHAPE(1, 130, 601), HEADS(6, 2), DIMS(16, 16), INDEXER(2), POOL(SUM, MEAN, VISIBLE, 5)},
    {"pooled_sum_heads", SHAPE(1, 65, 97), HEADS(3, 1), DIMS(16, 16), INDEXER(2), POOL(SUM, MAX, COMPLETE, 7), CAUSAL,
     REVERSE},
    {"pooled_visible", SHAPE(1, 97, 131), HEADS(2, 1), DIMS(16, 16), INDEXER(4), POOL(MAX, MEAN, VISIBLE, 10),
     CAUSAL},
    {"pooled_wide_blocks", SHAPE(1, 97, 460), HEADS(2, 1), DIMS(16, 16), INDEXER(2), POOL(MAX, MEAN, VISIBLE, 150)},
    {"pooled_one_key", SHAPE(1, 67, 101), HEADS(4, 1), DIMS(16, 16), INDEXER(4), POOL(SUM, MEAN, COMPLETE, 1),
     CAUSAL},
    {"pooled_no_block", SHAPE(1, 37, 41), HEADS(2, 1), DIMS(16, 16), INDEXER(2), POOL(MAX, MEAN, COMPLETE, 42)},
    {"pooled_window", SHAPE(1, 140, 211), HEADS(2, 1), DIMS(16, 16), INDEXER(2), POOL(MAX, MEAN, EARLIER, 6),
     WINDOW(50, 9)},
    {"pooled_key_lengths", SHAPE(3, 37, 97), HEADS(4, 2), DIMS(16, 16), INDEXER(2), POOL(SUM, MAX, VISIBLE, 12),
     KEY_LENGTHS(0, 33, 97)},
    {"pooled_bounds", SHAPE(1, 130, 180), HEADS(2, 1), DIMS(16, 16), INDEXER(2), POOL(MAX, MAX, VISIBLE, 9),
     BOUNDS(RANDOM)},
    {"pooled_offsets", SHAPE(1, 97, 141), HEADS(2, 1), DIMS(16, 16), INDEXER(2), POOL(SUM, MEAN, EARLIER, 8), CAUSAL,
     OFFSETS(64, 32)},
    {"pooled_softcap", SHAPE(1, 65, 97), HEADS(2, 1), DIMS(16, 16), INDEXER(2), POOL(MAX, MEAN, COMPLETE, 8),
     SOFTCAPS(3, 0), .lse = LSE_GIVEN},
    {"pooled_wider_lse", SHAPE(1, 65, 97), HEADS(4, 1), DIMS(16, 16), INDEXER(2), POOL(MAX, MAX, COMPLETE, 8), CAUSAL,
     .lse = LSE_WIDER},
    {"pooled_bf16", SHAPE(1, 200, 421), HEADS(4, 1), KEY_HEADS(1, 1), DIMS(128, 64), INDEXER(4), TYPES(BF16, BF16),
     WEIGHTS(BF16), POOL(MAX, MEAN, COMPLETE, 32), CAUSAL},
    {"pooled_f16", SHAPE(1, 140, 211), HEADS(4, 2), DIMS(64, 64), INDEXER(2), TYPES(F16, F16), WEIGHTS(F16),
     POOL(SUM, MAX, EARLIER, 16), CAUSAL, .zero_upstream = 3},
    {"pooled_many_blocks", SHAPE(1, 30, 1300), HEADS(2, 1), DIMS(8, 8), INDEXER(2), POOL(SUM, MEAN, VISIBLE, 3),
     WINDOW(900, 0), .growth = 20},
    {"pooled_bf16_64", SHAPE(1, 261, 517), HEADS(8, 1), KEY_HEADS(2, 1), DIMS(128, 128), INDEXER(2),
     TYPES(BF16, BF16), POOL(MAX, MEAN, COMPLETE, 64), CAUSAL},
    {"pooled_bf16_64_max_heads", SHAPE(2, 141, 389), HEADS(6, 2), KEY_HEADS(3, 1), DIMS(64, 64), INDEXER(1),
     TYPES(BF16, BF16), POOL(SUM, MAX, EARLIER, 64), .index_linear = 1},
    {"pooled_bf16_128", SHAPE(1, 130, 513), HEADS(3, 1), KEY_HEADS(1, 1), DIMS(96, 72), INDEXER(3), TYPES(BF16, BF16),
     POOL(SUM, MEAN, VISIBLE, 128), CAUSAL, .growth = 6},
    {"pooled_bf16_300", SHAPE(1, 67, 1100), HEADS(4, 2), DIMS(64, 40), INDEXER(1), TYPES(BF16, BF16),
     POOL(SUM, MAX, VISIBLE, 300), WINDOW(800, 60)},
    {"pooled_bf16_320", SHAPE(1, 33, 1000), HEADS(2, 1), DIMS(64, 64), INDEXER(1), TYPES(BF16, BF16),
     POOL(MAX, MEAN, VISIBLE, 320), CAUSAL},
    {"pooled_bf16_one_key", SHAPE(1, 137, 333), HEADS(4, 1), KEY_HEADS(2, 1), DIMS(32, 64), INDEXER(2),
     TYPES(BF16, BF16), POOL(MAX, MAX, COMPLETE, 1), CAUSAL, .grad_f32 = 1},
    {"pooled_bf16_wide_heads", SHAPE(1, 140, 211), HEADS(2, 1), KEY_HEADS(1, 1), DIMS(192, 64), INDEXER(2),
     TYPES(BF16, BF16), POOL(MAX, MEAN, EARLIER, 24), CAUSAL},
    {"pooled_bf16_key_lengths", SHAPE(4, 67, 297), HEADS(4, 1), DIMS(64, 64), INDEXER(2), TYPES(BF16, BF16),
     POOL(MAX, MEAN, VISIBLE, 48), KEY_LENGTHS(0, 1, 164, 297)},
    {"pooled_bf16_bounds", SHAPE(1, 297, 341), HEADS(4, 2), KEY_HEADS(2, 2), DIMS(64, 64), INDEXER(2),
     TYPES(BF16, BF16), POOL(SUM, MEAN, COMPLETE, 20), BOUNDS(RANDOM), .zero_upstream = 2},
    {"pooled_bf16_wider_lse", SHAPE(1, 140, 270), HEADS(4, 1), DIMS(64, 64), INDEXER(2), TYPES(BF16, BF16),
     POOL(MAX, MAX, COMPLETE, 32), CAUSAL, .lse = LSE_WIDER},
    {"pooled_f16_64", SHAPE(1, 200, 450), HEADS(4, 1), KEY_HEADS(1, 1), DIMS(128, 64), INDEXER(2), TYPES(F16, F16),
     WEIGHTS(F16), POOL(MAX, MEAN, VISIBLE, 64), CAUSAL, .lse = LSE_GIVEN},
    {"pooled_f16_many_blocks", SHAPE(1, 40, 700), HEADS(2, 1), DIMS(64, 64), INDEXER(1), TYPES(F16, F16),
     POOL(SUM, MEAN, VISIBLE, 3), .grad_f32 = 1},
    LAYOUTS("pooled_bf16", SHAPE(2, 67, 130), HEADS(4, 2), DIMS(64, 64), INDEXER(3), TYPES(BF16, BF16),
            POOL(MAX, MEAN, VISIBLE, 16)),
    LAYOUTS("pooled", SHAPE(2, 37, 41), HEADS(4, 2), DIMS(16, 16), INDEXER(3), POOL(MAX, MEAN, VISIBLE, 4)),
    {"pooled_sparse", SHAPE(2, 37, 141), HEADS(4, 1), KEY_HEADS(2, 1), DIMS(16, 16), INDEXER(3),
     POOL(MAX, MEAN, COMPLETE, 8), TOP_K(6), CAUSAL},
    {"pooled_sparse_sum", SHAPE(1, 37, 301), HEADS(6, 2), DIMS(16, 16), INDEXER(2), POOL(SUM, MEAN, VISIBLE, 120),
     TOP_K(3), REVERSE},
    {"pooled_sparse_max_heads", SHAPE(1, 67, 101), HEADS(4, 1), DIMS(16, 16), INDEXER(4), POOL(MAX, MAX, EARLIER, 5),
     TOP_K(30), WINDOW(60, 20), .lse = LSE_WIDER},
    {"pooled_sparse_key_lengths", SHAPE(3, 17, 97), HEADS(2, 1), DIMS(16, 16), INDEXER(2), TYPES(BF16, BF16),
     POOL(SUM, MAX, VISIBLE, 12), TOP_K(5), KEY_LENGTHS(0, 33, 97)},

    /* Sparse indexers. */
    {"sparse", SHAPE(2, 33, 141), HEADS(4, 1), DIMS(16, 16), INDEXER(4), TOP_K(16)},
    {"sparse_causal", SHAPE(1, 130, 130), HEADS(4, 1), KEY_HEADS(1, 1), DIMS(32, 32), INDEXER(4), TOP_K(40), CAUSAL},
    {"sparse_one", SHAPE(1, 37, 67), HEADS(2, 1), DIMS(16, 16), INDEXER(2), TOP_K(1)},
    {"sparse_more_than_keys", SHAPE(1, 37, 23), HEADS(2, 1), DIMS(16, 16), INDEXER(2), TOP_K(61)},
    {"sparse_large_top_k", SHAPE(1, 9, 611), HEADS(2, 1), DIMS(16, 16), INDEXER(2), TOP_K(301)},
    {"sparse_heads", SHAPE(1, 37, 67), HEADS(12, 4), KEY_HEADS(6, 2), DIMS(16, 24), INDEXER(3), TOP_K(20), CAUSAL},
    {"sparse_window", SHAPE(1, 65, 97), HEADS(2, 1), DIMS(16, 16), INDEXER(4), TOP_K(30), WINDOW(20, 8)},
    {"sparse_key_lengths", SHAPE(3, 37, 97), HEADS(2, 1), DIMS(16, 16), INDEXER(4), TOP_K(20),
     KEY_LENGTHS(0, 33, 97)},
    {"sparse_offsets", SHAPE(1, 97, 41), HEADS(2, 1), DIMS(16, 16), INDEXER(4), TOP_K(12), CAUSAL, OFFSETS(0, 32)},
    {"sparse_packed", PACKED(4, LENGTHS(0, 5, 5, 70, 103), LENGTHS(0, 9, 40, 40, 141)), TAILS(7, 5), HEADS(2, 1),
     DIMS(16, 16), INDEXER(4), TOP_K(14), CAUSAL, .lse = LSE_WIDER},
    {"sparse_mla", SHAPE(1, 17, 67), HEADS(6, 1), KEY_HEADS(1, 1), DIMS(576, 64), INDEXER(4), TYPES(BF16, BF16),
     CAUSAL, WEIGHTS(BF16), TOP_K(24), .lse = LSE_WIDER},
    {"sparse_f16", SHAPE(1, 37, 67), HEADS(4, 1), DIMS(32, 32), INDEXER(4), TOP_K(20), TYPES(F16, F16),
     .grad_f32 = 1},
    {"sparse_reverse", SHAPE(1, 37, 67), HEADS(4, 1), DIMS(16, 16), INDEXER(4), TOP_K(20), REVERSE},
    {"sparse_linear", SHAPE(1, 37, 67), HEADS(1, 1), DIMS(16, 16), INDEXER(4), TOP_K(20), .index_linear = 1},
    {"sparse_growth", SHAPE(1, 37, 459), HEADS(2, 1), DIMS(16, 16), INDEXER(4), TOP_K(130), .growth = -20},
    LAYOUTS("sparse", SHAPE(2, 37, 41), HEADS(4, 2), DIMS(16, 16), INDEXER(3), TOP_K(9)),
    {"sparse_bf16_mqa", SHAPE(1, 3, 301), HEADS(128, 1), KEY_HEADS(1, 1), DIMS(576, 128), INDEXER(64),
     TYPES(BF16, BF16), TOP_K(270), .lse = LSE_GIVEN},
    {"sparse_bf16_groups", SHAPE(1, 9, 97), HEADS(40, 2), KEY_HEADS(4, 1), DIMS(72, 40), INDEXER(20),
     TYPES(BF16, BF16), WEIGHTS(BF16), TOP_K(70), CAUSAL, .grad_f32 = 1},
    {"sparse_bf16_two_products", SHAPE(1, 5, 91), HEADS(130, 1), KEY_HEADS(1, 1), DIMS(32, 32), INDEXER(130),
     TYPES(BF16, BF16), TOP_K(67)},
    {"sparse_bf16_reverse", SHAPE(1, 9, 97), HEADS(6, 1), KEY_HEADS(1, 1), DIMS(64, 64), INDEXER(4),
     TYPES(BF16, BF16), TOP_K(40), REVERSE, .lse = LSE_WIDER},
    {"sparse_bf16_packed", PACKED(4, LENGTHS(0, 5, 5, 17, 22), LENGTHS(0, 9, 40, 40, 341)), TAILS(7, 5), HEADS(4, 2),
     KEY_HEADS(2, 1), DIMS(64, 32), INDEXER(4), TYPES(BF16, BF16), TOP_K(261), CAUSAL, .index_linear = 1},
    {"sparse_bf16_576", SHAPE(1, 5, 301), HEADS(64, 1), KEY_HEADS(1, 1), DIMS(576, 128), INDEXER(32),
     TYPES(BF16, BF16), TOP_K(200), .lse = LSE_GIVEN},
    {"sparse_bf16_512", SHAPE(1, 5, 201), HEADS(70, 1), KEY_HEADS(1, 1), DIMS(512, 64), INDEXER(33),
     TYPES(BF16, BF16), TOP_K(129), CAUSAL},
    {"sparse_bf16_256", SHAPE(2, 9, 97), HEADS(16, 1), KEY_HEADS(1, 1), DIMS(256, 128), INDEXER(1), TYPES(BF16, BF16),
     TOP_K(65), BOUNDS(RANDOM), .lse = LSE_WIDER},
    {"sparse_bf16_192", SHAPE(1, 5, 91), HEADS(130, 1), KEY_HEADS(1, 1), DIMS(192, 64), INDEXER(64),
     TYPES(BF16, BF16), TOP_K(67), .grad_f32 = 1},
    {"sparse_bf16_gqa", SHAPE(1, 9, 301), HEADS(32, 1), KEY_HEADS(4, 1), DIMS(128, 128), INDEXER(32),
     TYPES(BF16, BF16), WEIGHTS(BF16), TOP_K(257), CAUSAL},
    {"sparse_bf16_many_rows", SHAPE(2, 301, 97), HEADS(2, 1), DIMS(16, 16), INDEXER(2), TYPES(BF16, BF16), TOP_K(70),
     CAUSAL},
    {"sparse_bf16_only_dw", SHAPE(1, 9, 67), HEADS(2, 1), DIMS(16, 16), INDEXER(4), TYPES(BF16, BF16), TOP_K(20),
     .without = SKL_DQ_S | SKL_DK_S},
    LAYOUTS("sparse_bf16", SHAPE(2, 5, 41), HEADS(4, 2), DIMS(16, 16), INDEXER(3), TYPES(BF16, BF16), TOP_K(9)),
    {"sparse_f16_mqa", SHAPE(1, 3, 301), HEADS(48, 1), KEY_HEADS(1, 1), DIMS(200, 256), INDEXER(40), TYPES(F16, F16),
     TOP_K(270), CAUSAL},
    {"sparse_f16_576", SHAPE(1, 5, 301), HEADS(128, 1), KEY_HEADS(1, 1), DIMS(576, 128), INDEXER(64), TYPES(F16, F16),
     TOP_K(201), CAUSAL},
    {"sparse_f16_gqa", SHAPE(1, 9, 301), HEADS(32, 1), KEY_HEADS(4, 1), DIMS(128, 64), INDEXER(32), TYPES(F16, F16),
     WEIGHTS(F16), TOP_K(300)},
    {"sparse_f16_reverse", SHAPE(1, 9, 97), HEADS(6, 1), DIMS(64, 128), INDEXER(33), TYPES(F16, F16), WEIGHTS(F16),
     TOP_K(40), REVERSE, .growth = 20},
    {"sparse_f16_key_lengths", SHAPE(3, 7, 97), HEADS(2, 1), DIMS(24, 40), INDEXER(4), TYPES(F16, F16), TOP_K(20),
     KEY_LENGTHS(0, 33, 97)},
};

const size_t test_case_count = COUNT_OF(test_cases);

static int64_t longest(const int32_t *offsets, int64_t sequences)
{
    int64_t length = 0;
    for (int64_t b = 0; b < sequences; b++)
        length = offsets[b + 1] - offsets[b] > length ? offsets[b + 1] - offsets[b] : length;
    return length;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

skl_problem case_problem(const test_case *c)
{
    skl_problem p = skl_problem_default();
    p.dtype_t = c->dtype_t, p.dtype_s = c->dtype_s;
    p.grad_f32 = c->grad_f32;
    p.gradients = (uint32_t)(c->index_heads ? INDEXER_GRADIENTS : ALL_GRADIENTS) & ~c->without;
    if (c->attention)
        p.gradients = (p.gradients & ~(uint32_t)(SKL_DQ_T | SKL_DK_T)) | SKL_DV_S;
    p.direction = c->direction;
    p.batch = c->batch;
    p.len_q = c->len_q, p.len_k = c->len_k;
    p.heads_t = c->heads_t, p.heads_s = c->heads_s;
    p.key_heads_t = c->key_heads_t, p.key_heads_s = c->key_heads_s;
    p.dim_t = c->dim_t, p.dim_s = c->dim_s;
    p.scale_t = c->scale_t, p.scale_s = c->scale_s;
    p.softcap_t = c->softcap_t, p.softcap_s = c->softcap_s;
    p.student = c->index_heads ? SKL_STUDENT_INDEXER : SKL_STUDENT_ATTENTION;
    p.index_heads = c->index_heads, p.index_linear = c->index_linear;
    p.dtype_w = c->dtype_w;
    p.top_k = c->top_k;
    p.pool = c->pool, p.pool_heads = c->pool_heads, p.pool_blocks = c->pool_blocks, p.pool_size = c->pool_size;
    p.causal = c->causal;
    p.row_bounds = c->bounds != BOUNDS_NONE;
    p.sinks = c->sinks;
    p.link_s = c->linear ? SKL_LINK_LINEAR : SKL_LINK_SOFTMAX;
    if (c->sinks) {
        p.gradients |= (p.gradients & SKL_DQ_T ? SKL_DSINK_T : 0U) | (p.gradients & SKL_DQ_S ? SKL_DSINK_S : 0U);
        if (c->heads_t > c->heads_s) /* a group of heads with sinks has no teacher gradients */
            p.gradients &= ~(uint32_t)(SKL_DQ_T | SKL_DK_T | SKL_DSINK_T);
    }
    if (c->window)
        p.window_left = c->window[0], p.window_right = c->window[1];
    if (c->offsets) {
        p.positions = SKL_POSITIONS_OFFSET;
        p.offset_q = c->offsets[0], p.offset_k = c->offsets[1];
    }
    if (c->cu_seqlens_q) {
        p.packed = 1;
        p.total_q = c->cu_seqlens_q[c->batch] + c->tail_q, p.total_k = c->cu_seqlens_k[c->batch] + c->tail_k;
        p.len_q = smaller(longest(c->cu_seqlens_q, c->batch) + c->slack, p.total_q);
        p.len_k = smaller(longest(c->cu_seqlens_k, c->batch) + c->slack, p.total_k);
    }
    return p;
}

int64_t case_work(const test_case *c)
{
    const skl_problem p = case_problem(c);
    const int64_t listed = p.top_k * (p.pool != SKL_POOL_NONE ? smaller(p.pool_size, p.len_k) : 1);
    const int64_t pairs = p.batch * p.len_q * (p.top_k > 0 ? listed : p.len_k);
    const int64_t heads_s = p.index_heads > 0 ? p.heads_s * p.index_heads : p.heads_s;
    return pairs * (p.heads_t * p.dim_t + heads_s * p.dim_s);
}
