/* The output of `streamkl stats`: text, one JSON object, and a file. */
#include "cli/common/cli.h"
#include "cli/stats/stats.h"
#include "cli/term/term.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

/* ---- Numbers of a head ------------------------------------------------------------------------------------------
 */

typedef struct head_summary {
    double entropy, distance; /* means over the rows that attend to any key */
    double max_logit;
} head_summary;

static head_summary summary_of(const stats_results *r, const skl_problem *p, int64_t head)
{
    const int64_t rows = kl_row_length(p);
    head_summary summary = {0, 0, -INFINITY};
    int64_t count = 0;
    for (int64_t b = 0; b < kl_row_batches(p); b++)
        for (int64_t i = (b * p->heads_s + head) * rows, end = i + rows; i < end; i++) {
            count += r->lse[i] != -INFINITY;
            summary.entropy += (double)r->entropy[i]; /* 0 for other rows */
            summary.distance += (double)r->expected_distance[i];
        }
    for (int64_t b = 0; b < p->batch; b++)
        summary.max_logit = fmax(summary.max_logit, (double)r->head_max_logit[b * p->heads_s + head]);
    summary.entropy /= count > 0 ? (double)count : 1;
    summary.distance /= count > 0 ? (double)count : 1;
    return summary;
}

/* Shares of the attention to keys by distance, of one head or, for -1, of all. */
static void distance_shares(const stats_results *r, const skl_problem *p, int64_t head, double *shares)
{
    double total = 0;
    for (int32_t n = 0; n < r->buckets; n++) {
        shares[n] = 0;
        for (int64_t at = 0; at < p->batch * p->heads_s; at++)
            if (head < 0 || at % p->heads_s == head)
                shares[n] += (double)r->distance_mass[at * r->buckets + n];
        total += shares[n];
    }
    for (int32_t n = 0; n < r->buckets; n++)
        shares[n] /= total > 0 ? total : 1;
}

/* ---- Keys with the largest sums ----------------------------------------------------------------------------------
 */

typedef struct heavy_key {
    int64_t batch, key; /* packed: batch 0, key of the buffer */
    double share;       /* its part of the sum of all keys, 0 to 1 */
} heavy_key;

static int by_share(const void *a, const void *b)
{
    const heavy_key *const left = a, *const right = b;
    if (left->share != right->share)
        return left->share < right->share ? 1 : -1;
    if (left->batch != right->batch)
        return left->batch < right->batch ? -1 : 1;
    return left->key < right->key ? -1 : left->key > right->key;
}

/* All keys with their share of the sums over heads, largest first. The caller frees them. */
static heavy_key *heavy_keys(const stats_results *r, const skl_problem *p, int64_t *count)
{
    const int64_t length = kl_key_length(p);
    *count = kl_row_batches(p) * length;
    heavy_key *const keys = cli_allocate_zeros((size_t)*count + 1, sizeof *keys, "the keys with the largest sums");
    double total = 0;
    for (int64_t n = 0; n < *count; n++) {
        keys[n] = (heavy_key){n / length, n % length, 0};
        for (int64_t h = 0; h < r->sum_heads; h++)
            keys[n].share += (double)r->key_sum[(n / length * r->sum_heads + h) * length + n % length];
        total += keys[n].share;
    }
    for (int64_t n = 0; n < *count; n++)
        keys[n].share /= total > 0 ? total : 1;
    qsort(keys, (size_t)*count, sizeof *keys, by_share);
    return keys;
}

/* ---- JSON --------------------------------------------------------------------------------------------------------
 */

static json_t *shares_json(const double *shares, int32_t count)
{
    return cli_json_array(shares, sizeof *shares, 1, (const int64_t[]){count});
}

static json_t *heads_json(const stats_results *r, const skl_problem *p, double *shares)
{
    json_t *const heads = json_array();
    for (int64_t h = 0; h < p->heads_s; h++) {
        const head_summary summary = summary_of(r, p, h);
        distance_shares(r, p, h, shares);
        cli_json_append(heads,
                        json_pack("{so so so so}", "entropy", cli_json_number(summary.entropy), "expected_distance",
                                  cli_json_number(summary.distance), "max_logit", cli_json_number(summary.max_logit),
                                  "distance_share", shares_json(shares, r->buckets)));
    }
    return heads;
}

static void print_json(const stats_results *r, const skl_problem *p, const heavy_key *keys, int64_t listed,
                       double *shares)
{
    json_t *const top = json_array();
    for (int64_t n = 0; n < listed; n++)
        cli_json_append(top, json_pack("{sI sI so}", "batch", (json_int_t)keys[n].batch, "key",
                                       (json_int_t)keys[n].key, "share", cli_json_number(keys[n].share)));
    json_t *const heads = heads_json(r, p, shares);
    distance_shares(r, p, -1, shares);
    cli_print_json(json_pack("{sI sI sI sI sI so so so so}", "batch", (json_int_t)p->batch, "len_q",
                             (json_int_t)p->len_q, "len_k", (json_int_t)p->len_k, "heads", (json_int_t)p->heads_s,
                             "key_heads", (json_int_t)p->key_heads_s, "seconds", cli_json_number(r->seconds),
                             "distance_share", shares_json(shares, r->buckets), "top_keys", top, "by_head", heads));
}

/* ---- Text --------------------------------------------------------------------------------------------------------
 */

static void print_distances(const stats_results *r, const double *shares)
{
    printf("\n  attention by distance, all heads\n");
    term_chart(stdout, shares, r->buckets, 8);
    for (int32_t n = 0; n < r->buckets; n++) {
        const int64_t begin = n == 0 ? 0 : (int64_t)1 << (n - 1), end = n == 0 ? 1 : (int64_t)1 << n;
        if (shares[n] < 0.001)
            continue;
        if (end - begin == 1)
            printf("    %17" PRId64 "  %5.1f %%\n", begin, 100 * shares[n]);
        else
            printf("    %8" PRId64 "-%8" PRId64 "  %5.1f %%\n", begin, end - 1, 100 * shares[n]);
    }
}

static void print_text(const stats_results *r, const skl_problem *p, const heavy_key *keys, int64_t listed,
                       double *shares)
{
    const term_style style = term_style_for(stdout);
    printf("%sAttention statistics%s  %" PRId64 " queries x %" PRId64 " keys, %" PRId64 " head%s, %s %s\n",
           style.bold, style.plain, p->len_q, p->len_k, p->heads_s, cli_plural(p->heads_s),
           cli_seconds_text(r->seconds).text, runner_location_of(&r->runner).text);
    printf("\n  head   entropy  distance  max logit\n");
    for (int64_t h = 0; h < p->heads_s; h++) {
        const head_summary summary = summary_of(r, p, h);
        printf("  %4" PRId64 "  %8.4f  %8.1f  %9.3f\n", h, summary.entropy, summary.distance, summary.max_logit);
    }
    distance_shares(r, p, -1, shares);
    print_distances(r, shares);
    printf("\n  keys with most attention, all heads\n");
    for (int64_t n = 0; n < listed; n++) {
        if (kl_row_batches(p) > 1)
            printf("    batch %-4" PRId64, keys[n].batch);
        printf("    key %-8" PRId64 "  %5.1f %%\n", keys[n].key, 100 * keys[n].share);
    }
}

void stats_report(const stats_results *results, const skl_problem *problem, const stats_request *request)
{
    int64_t count = 0;
    heavy_key *const keys = heavy_keys(results, problem, &count);
    double *const shares = cli_allocate((size_t)results->buckets * sizeof *shares, "the distances");
    const int64_t listed = request->top_count < count ? request->top_count : count;
    (request->json ? print_json : print_text)(results, problem, keys, listed, shares);
    free(shares);
    free(keys);
}

/* ---- --out -------------------------------------------------------------------------------------------------------
 */

/* [batch, heads, length], packed [heads, length]; `last` > 0 adds a dimension. */
static output_tensor tensor_of(const char *name, const float *data, int64_t batch, int64_t heads, int64_t last)
{
    output_tensor tensor = {.name = name, .dtype = SKL_F32, .data = data};
    if (batch > 0)
        tensor.shape[tensor.rank++] = batch;
    tensor.shape[tensor.rank++] = heads;
    if (last > 0)
        tensor.shape[tensor.rank++] = last;
    return tensor;
}

void stats_write(const stats_results *r, const skl_problem *p, const stats_request *request)
{
    if (request->out_path == NULL)
        return;
    const int64_t batch = p->packed ? 0 : p->batch, rows = kl_row_length(p), keys = kl_key_length(p);
    const output_tensor tensors[] = {
        tensor_of("key_sum", r->key_sum, batch, r->sum_heads, keys),
        tensor_of("key_max", r->key_max, batch, r->sum_heads, keys),
        tensor_of("lse", r->lse, batch, p->heads_s, rows),
        tensor_of("entropy", r->entropy, batch, p->heads_s, rows),
        tensor_of("max_logit", r->max_logit, batch, p->heads_s, rows),
        tensor_of("expected_distance", r->expected_distance, batch, p->heads_s, rows),
        tensor_of("head_max_logit", r->head_max_logit, p->batch, p->heads_s, 0),
        tensor_of("distance_mass", r->distance_mass, p->batch, p->heads_s, r->buckets),
    };
    file_write_tensors(request->out_path, tensors, sizeof tensors / sizeof tensors[0], NULL, 0);
    file_write_commit();
}
