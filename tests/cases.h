/* The case table: the shapes, masks, types and layouts with which every kernel is tested. */
#ifndef SKL_TESTS_CASES_H
#define SKL_TESTS_CASES_H

#include "tensor.h"

/* inputs->lse_t of a forward. */
typedef enum test_lse {
    LSE_COMPUTED, /* not given */
    LSE_GIVEN,    /* of the visible keys */
    LSE_WIDER     /* of more keys than are visible */
} test_lse;

/* Row bounds: the ranges of keys that rows of a sequence may attend to. */
typedef enum test_bounds {
    BOUNDS_NONE,
    BOUNDS_RANDOM,     /* neither bound decreases; some rows are empty */
    BOUNDS_BEGIN,      /* the same without key_end */
    BOUNDS_SAMPLED,    /* without key_begin: causal, for rows at increasing random positions */
    BOUNDS_ZIGZAG,     /* without key_begin: causal, for the first and the last chunk of a sequence */
    BOUNDS_CHUNKS,     /* causal within chunks of 16 keys */
    BOUNDS_COMPRESSED, /* causal, with one key for four positions */
    BOUNDS_COUNT
} test_bounds;

/* Tensors that have one layout in a random case. */
typedef enum test_role { ROLE_QUERIES, ROLE_KEYS, ROLE_ROWS, ROLE_RESULTS, ROLE_COUNT } test_role;

/* Members that a case does not set are 0, which is the plain choice. */
typedef struct test_case {
    const char *name;
    int64_t batch, len_q, len_k; /* packed cases: derived from cu_seqlens */
    int64_t heads_t, heads_s, key_heads_t, key_heads_s;
    int64_t dim_t, dim_s;
    skl_dtype dtype_t, dtype_s;
    int32_t grad_f32;
    uint32_t without; /* gradients that are not requested */
    skl_direction direction;
    float scale_t, scale_s, softcap_t, softcap_s;
    int32_t causal;
    const int64_t *window;      /* left, right */
    const int64_t *offsets;     /* of query 0 and of key 0 */
    const int32_t *key_lengths; /* [batch] */
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
    int64_t tail_q, tail_k; /* rows of packed buffers after the last sequence */
    test_bounds bounds;
    int32_t sinks;
    int32_t linear;        /* 1: SKL_LINK_LINEAR; queries and keys of the student are positive, as feature maps are */
    double sinks_above[2]; /* added to the logits of the sinks of teacher and student */
    test_lse lse;
    test_layout layout;
    int32_t unit_upstream;     /* 1: no grad_kl */
    int32_t positive_upstream; /* 1: no negative grad_kl */
    int32_t attention;         /* 1: also skl_attention_backward, which knows no teacher gradients */
    int64_t index_heads;       /* > 0: the student is an indexer */
    skl_dtype dtype_w;
    int32_t index_linear;
    int64_t top_k;
    skl_pool pool;
    skl_pool_heads pool_heads;
    skl_pool_blocks pool_blocks;
    int64_t pool_size;
    /* For random cases. */
    const test_layout *layouts; /* of each role, instead of `layout` */
    const double *sizes;        /* of q_t, k_t, q_s, k_s, relative to the usual ones */
    int64_t slack;              /* packed: named lengths exceed the longest sequence by up to this much */
    int32_t zero_upstream;      /* one upstream gradient in so many is 0 */
    int32_t equal_upstream;     /* 1: all upstream gradients are the same, and not 1 */
    double growth; /* keys are scaled by 1 at the first to 1 + growth at the last; below 0: in reverse order */
    double apart;  /* > 0: the student is the teacher with noise of up to this much; 0: independent */
} test_case;

enum {
    ALL_GRADIENTS = SKL_DQ_T | SKL_DK_T | SKL_DQ_S | SKL_DK_S,
    INDEXER_GRADIENTS = SKL_DQ_S | SKL_DK_S | SKL_DW_S
};

extern const test_case test_cases[];
extern const size_t test_case_count;

skl_problem case_problem(const test_case *test_case);

/* Multiplications of a pass over the case without a mask. */
enum { MILLION = 1000000 };
int64_t case_work(const test_case *test_case);

/* A random case; its arrays are in `storage`. */
typedef struct random_case {
    test_case test_case;
    char name[32];
    int64_t window[2], offsets[2];
    int32_t key_lengths[8], cu_seqlens_q[9], cu_seqlens_k[9];
    test_layout layouts[ROLE_COUNT];
    double sizes[4];
} random_case;

/* Small, with logits of a few units. */
void case_draw(random_case *storage, int64_t number);

/* The same with everything that a problem accepts: the largest sizes of heads, offsets and windows, scales of any
 * sign, small and large logits and softcaps, and a layout for each role of tensors. `extreme`: logits
 * of up to 1e25. */
void case_draw_wide(random_case *storage, int64_t number, int extreme);

#endif
