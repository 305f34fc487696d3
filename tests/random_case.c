/* Random cases, for combinations that the table does not have. */
#include "cases.h"

#include <math.h>
#include <stdio.h>

/* Softcaps of wide cases. */
#define SOFTCAP_MIN 1e-7
#define SOFTCAP_MAX 3.4e38

/* The largest product of the sizes of queries and keys in a wide case, relative to the usual one. */
#define WIDE_PRODUCT    100
#define EXTREME_PRODUCT 1e20

static int one_in(test_random *random, int64_t n)
{
    return random_between(random, 1, n) == 1;
}

/* Small lengths, often close to a tile size. */
static int64_t draw_length(test_random *random)
{
    static const int64_t near_tile_sizes[] = {1,  2,  7,  8,  15, 16, 17, 31, 32,  33,  47,
                                              48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129};
    if (one_in(random, 2))
        return near_tile_sizes[random_between(random, 0, COUNT_OF(near_tile_sizes) - 1)];
    return random_between(random, 0, 90);
}

static int64_t draw_dim(test_random *random)
{
    static const int64_t usual[] = {1, 8, 16, 32, 64, 80, 96, 128};
    if (one_in(random, 2))
        return usual[random_between(random, 0, COUNT_OF(usual) - 1)];
    return random_between(random, 1, 70);
}

static int64_t draw_divisor(test_random *random, int64_t of)
{
    int64_t divisor;
    do
        divisor = random_between(random, 1, of);
    while (of % divisor != 0);
    return divisor;
}

static void draw_heads(test_case *c, test_random *random)
{
    c->heads_s = random_between(random, 1, 4);
    c->heads_t = c->heads_s * (one_in(random, 3) ? random_between(random, 2, 4) : 1);
    if (one_in(random, 2))
        c->key_heads_t = draw_divisor(random, c->heads_t);
    if (one_in(random, 2))
        c->key_heads_s = draw_divisor(random, c->heads_s);
}

static void draw_sequences(random_case *storage, test_random *random)
{
    test_case *const c = &storage->test_case;
    for (int64_t b = 0; b < c->batch; b++) {
        const int64_t len_q = one_in(random, 5) ? 0 : draw_length(random) / 2;
        const int64_t len_k = one_in(random, 5) ? 0 : draw_length(random) / 2;
        storage->cu_seqlens_q[b + 1] = storage->cu_seqlens_q[b] + (int32_t)len_q;
        storage->cu_seqlens_k[b + 1] = storage->cu_seqlens_k[b] + (int32_t)len_k;
    }
    c->cu_seqlens_q = storage->cu_seqlens_q;
    c->cu_seqlens_k = storage->cu_seqlens_k;
    c->tail_q = one_in(random, 2) ? random_between(random, 1, 40) : 0;
    c->tail_k = one_in(random, 2) ? random_between(random, 1, 40) : 0;
}

static void draw_masks(random_case *storage, test_random *random)
{
    test_case *const c = &storage->test_case;
    c->causal = one_in(random, 3);
    if (one_in(random, 3)) {
        storage->window[0] = random_between(random, -1, 70);
        storage->window[1] = random_between(random, -1, 70);
        c->window = storage->window;
    }
    if (one_in(random, 5)) {
        storage->offsets[0] = random_between(random, -60, 60);
        storage->offsets[1] = random_between(random, -60, 60);
        c->offsets = storage->offsets;
    }
    if (one_in(random, 3) && !c->cu_seqlens_q) {
        for (int64_t b = 0; b < c->batch; b++)
            storage->key_lengths[b] = (int32_t)random_between(random, 0, c->len_k);
        c->key_lengths = storage->key_lengths;
    }
}

/* Only sometimes, and last: other members of the case are drawn as before. */
static void draw_bounds_and_sinks(test_case *c, test_random *random)
{
    if (one_in(random, 5))
        c->bounds = (test_bounds)random_between(random, BOUNDS_NONE + 1, BOUNDS_COUNT - 1);
    const int reverse_group = c->heads_t > c->heads_s && c->direction == SKL_KL_REVERSE;
    c->sinks = one_in(random, 6) && !c->index_heads && c->lse != LSE_WIDER && !reverse_group;
    if (one_in(random, 8) && !c->index_heads) {
        c->linear = 1;
        c->direction = SKL_KL_FORWARD;
        c->scale_s = c->softcap_s = 0;
    }
    for (int side = 0; side < 2 && c->sinks; side++)
        c->sinks_above[side] = one_in(random, 2) ? random_uniform(random, -60, 120) : 0;
}

/* Turns the case into an indexer. */
static void draw_indexer(test_case *c, test_random *random)
{
    c->index_heads = random_between(random, 1, 6);
    c->index_linear = one_in(random, 4);
    c->dtype_w = (skl_dtype)random_between(random, SKL_F32, SKL_BF16);
    c->top_k = one_in(random, 2) ? random_between(random, 1, 50) : 0;
    c->softcap_s = 0;
    if (c->top_k && c->cu_seqlens_q && layout_shares(c->layout))
        c->layout = LAYOUT_GAPS; /* sequences of different lengths cannot share indices */
}

static void draw_case(random_case *storage, test_random *random)
{
    test_case *const c = &storage->test_case;
    c->name = storage->name;
    c->batch = random_between(random, 1, 3);
    c->len_q = draw_length(random), c->len_k = draw_length(random);
    if (one_in(random, 4)) {
        c->batch = random_between(random, 0, 5);
        draw_sequences(storage, random);
    }
    draw_heads(c, random);
    draw_masks(storage, random);
    c->dim_t = draw_dim(random);
    c->dim_s = one_in(random, 2) ? c->dim_t : draw_dim(random);
    c->dtype_t = (skl_dtype)random_between(random, SKL_F32, SKL_BF16);
    c->dtype_s = one_in(random, 2) ? c->dtype_t : (skl_dtype)random_between(random, SKL_F32, SKL_BF16);
    c->grad_f32 = one_in(random, 2);
    c->without = one_in(random, 2) ? 0 : (uint32_t)random_between(random, 0, ALL_GRADIENTS);
    c->direction = one_in(random, 2) ? SKL_KL_FORWARD : SKL_KL_REVERSE;
    c->scale_t = one_in(random, 4) ? (float)random_uniform(random, 0.05, 0.5) : 0;
    c->scale_s = one_in(random, 4) ? (float)random_uniform(random, 0.05, 0.5) : 0;
    c->softcap_t = one_in(random, 4) ? (float)random_uniform(random, 1, 20) : 0;
    c->softcap_s = one_in(random, 4) ? (float)random_uniform(random, 1, 20) : 0;
    c->lse = (test_lse)random_between(random, LSE_COMPUTED, LSE_WIDER);
    c->layout = one_in(random, 2) ? LAYOUT_CONTIGUOUS : (test_layout)random_between(random, 0, LAYOUT_COUNT - 1);
    c->unit_upstream = one_in(random, 4);
    c->growth = one_in(random, 4) ? random_uniform(random, -30, 30) : 0;
    if (one_in(random, 4))
        draw_indexer(c, random);
    draw_bounds_and_sinks(c, random);
}

/* The last draw of a case, so that the other draws stay the same. */
static void draw_attention(test_case *c, test_random *random)
{
    c->attention = one_in(random, 3) && !c->index_heads && !c->sinks && !c->linear;
    c->positive_upstream = c->attention && one_in(random, 2);
}

/* Pools the teacher of an indexer over blocks; the last draw, too. */
static void draw_pool(test_case *c, test_random *random)
{
    if (!c->index_heads || c->cu_seqlens_q || one_in(random, 2))
        return;
    c->pool = (skl_pool)random_between(random, SKL_POOL_MAX, SKL_POOL_SUM);
    c->pool_heads = (skl_pool_heads)random_between(random, SKL_POOL_HEADS_MEAN, SKL_POOL_HEADS_MAX);
    c->pool_blocks = (skl_pool_blocks)random_between(random, SKL_POOL_COMPLETE, SKL_POOL_VISIBLE);
    c->pool_size = one_in(random, 4)   ? random_between(random, 20, 400)
                   : one_in(random, 3) ? (int64_t)16 << random_between(random, 0, 4)
                                       : random_between(random, 1, 12);
}

void case_draw(random_case *storage, int64_t number)
{
    *storage = (random_case){0};
    snprintf(storage->name, sizeof storage->name, "random_%lld", (long long)number);
    test_random random = random_for(storage->name);
    draw_case(storage, &random);
    draw_attention(&storage->test_case, &random);
    draw_pool(&storage->test_case, &random);
}

/* ---- Wide cases -------------------------------------------------------------------------------------------- */

/* Each decade is as likely as another. */
static double draw_decades(test_random *random, double low, double high)
{
    return pow(10, random_uniform(random, log10(low), log10(high)));
}

/* Up to the limits of the header, with fewer queries and keys, which keeps the oracle fast. */
static void widen_sizes(test_case *c, test_random *random)
{
    const int indexer = c->index_heads > 0;
    if (one_in(random, 12)) {
        c->dim_t = one_in(random, 2) ? random_between(random, 129, indexer ? 576 : 512) : indexer ? 576 : 512;
        c->len_q = c->len_q % 20, c->len_k = c->len_k % 40;
    }
    if (one_in(random, 12)) {
        c->dim_s = one_in(random, 2) ? random_between(random, 129, 512) : 512;
        c->len_q = c->len_q % 20, c->len_k = c->len_k % 40;
    }
    if (one_in(random, 12) && !indexer) { /* many teacher heads, as for an indexer */
        c->heads_s = 1, c->heads_t = random_between(random, 5, 24);
        c->key_heads_s = 1, c->key_heads_t = draw_divisor(random, c->heads_t);
        c->sinks = c->sinks && c->direction == SKL_KL_FORWARD;
        c->len_q = c->len_q % 20;
    }
    if (one_in(random, 12) && indexer) {
        c->index_heads = random_between(random, 7, 256);
        c->len_q = c->len_q % 9, c->len_k = c->len_k % 40;
    }
}

/* Positions and windows of any size; the difference of the offsets decides what is visible. */
static void widen_masks(random_case *storage, test_random *random)
{
    static const int64_t limit = (int64_t)1 << 40;
    test_case *const c = &storage->test_case;
    if (c->offsets && one_in(random, 2)) {
        const int64_t difference = storage->offsets[0] - storage->offsets[1];
        const int64_t position = one_in(random, 2) ? limit - 200 : random_between(random, -limit + 200, limit - 200);
        storage->offsets[1] = position, storage->offsets[0] = position + difference;
    } else if (c->offsets && one_in(random, 4)) {
        storage->offsets[0] = one_in(random, 2) ? limit : -limit;
        storage->offsets[1] = one_in(random, 2) ? limit : -limit;
    }
    if (c->window && one_in(random, 3))
        storage->window[random_between(random, 0, 1)] = one_in(random, 2) ? limit : random_between(random, 0, limit);
}

/* Factors for the queries and keys of a model, with the given product if the type allows: f16 ends at 65504. */
static void draw_sizes(double *sizes, skl_dtype dtype, double product, test_random *random)
{
    const double most = dtype == SKL_F16 ? 1e4 : 1e8;
    sizes[0] = draw_decades(random, 1 / most, most);
    sizes[1] = dtype == SKL_F16 ? fmin(product / sizes[0], most) : product / sizes[0];
}

/* Logits from hundredths to thousands, or to 1e25, by way of the scale, of its sign, or of the tensors. */
static void widen_logits(random_case *storage, test_random *random, int extreme)
{
    const double largest_product = extreme ? EXTREME_PRODUCT : WIDE_PRODUCT;
    test_case *const c = &storage->test_case;
    for (int n = 0; n < 4; n++)
        storage->sizes[n] = 1;
    const int unusual = one_in(random, 3);
    if (unusual || extreme) {
        draw_sizes(storage->sizes, c->dtype_t, draw_decades(random, 0.01, largest_product), random);
        draw_sizes(storage->sizes + 2, c->dtype_s, draw_decades(random, 0.01, largest_product), random);
        c->sizes = storage->sizes;
        c->growth = 0;
    }
    const double sign_t = one_in(random, 2) ? 1 : -1, sign_s = one_in(random, 2) ? 1 : -1;
    if (one_in(random, 4))
        c->scale_t = (float)(sign_t * draw_decades(random, 1e-4, 10));
    if (one_in(random, 4) && !c->linear)
        c->scale_s = (float)(sign_s * draw_decades(random, 1e-4, 10));
    if (one_in(random, 4))
        c->softcap_t = (float)draw_decades(random, SOFTCAP_MIN, SOFTCAP_MAX);
    if (one_in(random, 4) && !c->index_heads && !c->linear)
        c->softcap_s = (float)draw_decades(random, SOFTCAP_MIN, SOFTCAP_MAX);
    if (one_in(random, 6) && c->dim_t == c->dim_s && c->heads_t == c->heads_s && !c->index_heads &&
        c->key_heads_t == c->key_heads_s && !c->sizes && !c->linear)
        c->apart = draw_decades(random, 1e-4, 1);
}

static void draw_layouts(random_case *storage, test_random *random)
{
    test_case *const c = &storage->test_case;
    for (int role = 0; role < ROLE_COUNT; role++)
        storage->layouts[role] = (test_layout)random_between(random, 0, LAYOUT_COUNT - 1);
    if (c->top_k && c->cu_seqlens_q && layout_shares(storage->layouts[ROLE_ROWS]))
        storage->layouts[ROLE_ROWS] = LAYOUT_GAPS; /* sequences of different lengths cannot share indices */
    c->layouts = storage->layouts;
}

void case_draw_wide(random_case *storage, int64_t number, int extreme)
{
    *storage = (random_case){0};
    snprintf(storage->name, sizeof storage->name, "wide_%lld", (long long)number);
    test_random random = random_for(storage->name);
    test_case *const c = &storage->test_case;
    draw_case(storage, &random);
    if (!c->cu_seqlens_q)
        widen_sizes(c, &random);
    for (int64_t b = 0; c->key_lengths && b < c->batch; b++) /* the keys may have become fewer */
        storage->key_lengths[b] %= (int32_t)c->len_k + 1;
    widen_masks(storage, &random);
    widen_logits(storage, &random, extreme);
    if (one_in(&random, 2))
        draw_layouts(storage, &random);
    c->slack = one_in(&random, 3) ? random_between(&random, 1, 50) : 0;
    c->zero_upstream = one_in(&random, 4) ? (int32_t)random_between(&random, 1, 5) : 0;
    draw_attention(c, &random);
    draw_pool(c, &random);
}
