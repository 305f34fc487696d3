/* Known failure modes of attention kernels, one test each. Invalid arguments are in test_calls.c. */
#define _DEFAULT_SOURCE /* mmap */
#include "trial.h"

#include <math.h>
#include <stdio.h>
#include <sys/mman.h>

#include "case_words.h"
#include "device.h"

#define SMALL HEADS(2, 2), DIMS(16, 16)

/* ---- NaN and infinity -------------------------------------------------------------------------------------- */

/* Poison in keys that no query sees changes no bit of any result. */
static const test_case hidden_keys[] = {
    {"padded", SHAPE(2, 67, 131), SMALL, KEY_LENGTHS(100, 7)},
    {"causal", SHAPE(1, 67, 131), SMALL, CAUSAL, OFFSETS(3, 0)},
};

static void check_poison_in_hidden_keys(trial *t)
{
    const fixture *const f = t->f; /* starts poisoned */
    const test_tensor *const tensors[] = {&f->q_t, &f->k_t, &f->q_s, &f->k_s, &f->grad_kl};
    run_both(t->plan, f, &t->one);
    for (size_t n = 0; n < COUNT_OF(tensors); n++)
        for (int64_t e = 0; e < tensor_count(tensors[n]); e++)
            if (!isfinite(tensor_get(tensors[n], e)))
                tensor_set(tensors[n], e, 1);
    run_both(t->plan, f, &t->other);
    assert_same_bits(t, "poison in hidden keys");
}

/* Whether rows i < first of each head have the same bits. */
static int rows_equal_before(const test_tensor *a, const test_tensor *b, int64_t first)
{
    for (int64_t n = 0; n < tensor_count(a); n++) {
        const double value_a = tensor_get(a, n), value_b = tensor_get(b, n);
        if (n / a->dim % a->length < first && memcmp(&value_a, &value_b, sizeof value_a) != 0)
            return 0;
    }
    return 1;
}

/* Number of rows, and the poisoned row, in the tests below. */
enum { LENGTH = 230, POISONED = 101 };

/* Gives every query both signs: its product with a key of infinities is NaN. It could be -inf, a key of probability
 * 0. */
static void give_both_signs(const test_tensor *q)
{
    for (int64_t n = 0; n < tensor_count(q); n += q->dim) {
        tensor_set(q, n, 1);
        tensor_set(q, n + 1, -1);
    }
}

/* In a causal problem, rows i >= j see key j. NaN or infinity in it does not change earlier rows, in forward and
 * backward, and the KL of every row that sees it is not finite. */
static const test_case visible_key[] = {
    {"f32", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL},
    {"bf16", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL, TYPES(BF16, BF16)},
    {"teacher groups", SHAPE(1, LENGTH, LENGTH), HEADS(4, 2), DIMS(16, 16), CAUSAL},
};

static void set_key(const test_tensor *keys, double value)
{
    for (int64_t h = 0; h < keys->heads; h++)
        for (int64_t d = 0; d < keys->dim; d++)
            tensor_set(keys, tensor_index(keys, 0, h, POISONED) + d, value);
}

static void check_poison_in_a_visible_key(trial *t)
{
    const test_tensor *const sides[] = {&t->f->k_t, &t->f->k_s};
    give_both_signs(&t->f->q_t);
    give_both_signs(&t->f->q_s);
    for (int side = 0; side < 2; side++) {
        run_both(t->plan, t->f, &t->one);
        for (int infinite = 0; infinite < 2; infinite++) {
            set_key(sides[side], infinite ? (double)INFINITY : (double)NAN);
            run_both(t->plan, t->f, &t->other);
            assert_true(rows_equal_before(&t->one.kl, &t->other.kl, POISONED));
            assert_true(rows_equal_before(&t->one.lse_t, &t->other.lse_t, POISONED));
            assert_true(rows_equal_before(&t->one.lse_s, &t->other.lse_s, POISONED));
            assert_true(rows_equal_before(&t->one.dq_t, &t->other.dq_t, POISONED));
            assert_true(rows_equal_before(&t->one.dq_s, &t->other.dq_s, POISONED));
            for (int64_t n = 0; n < tensor_count(&t->other.kl); n++)
                assert_true(n % LENGTH < POISONED || !isfinite(tensor_get(&t->other.kl, n)));
        }
        set_key(sides[side], 1);
    }
}

/* Poison in the keys and in the LSEs of a one-pass call. Only student gradients are requested, so that the pass over
 * the keys also gives the KL. */
static const test_case one_pass[] = {{"one-pass", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL, STUDENT_ONLY}};

static void check_poison_in_one_pass(trial *t)
{
    static const double poisons[] = {NAN, INFINITY, -INFINITY};
    for (size_t p = 0; p < COUNT_OF(poisons); p++) {
        for (int64_t h = 0; h < t->f->k_s.heads; h++)
            tensor_set(&t->f->k_s, tensor_index(&t->f->k_s, 0, h, POISONED), poisons[p]);
        run_both(t->plan, t->f, &t->one);
        run_one_pass(t->plan, t->f, &t->one, &t->other);
        for (int64_t n = 0; n < tensor_count(&t->other.kl); n++)
            assert_int_equal(n % LENGTH < POISONED, isfinite(tensor_get(&t->other.kl, n)) != 0);
    }
}

/* A NaN query affects its row and the gradients of the keys that it sees, and no other query. */
static const test_case narrow_window[] = {{"query", SHAPE(1, LENGTH, LENGTH), SMALL, WINDOW(5, 0)}};

static void check_poison_in_a_query(trial *t)
{
    const fixture_results *const clean = &t->one, *const poisoned = &t->other;
    run_both(t->plan, t->f, clean);
    tensor_set(&t->f->q_s, tensor_index(&t->f->q_s, 0, 0, POISONED), NAN);
    run_both(t->plan, t->f, poisoned);
    for (int64_t n = 0; n < tensor_count(&poisoned->kl); n++)
        assert_true(n == POISONED ? isnan(tensor_get(&poisoned->kl, n))
                                  : tensor_get(&poisoned->kl, n) == tensor_get(&clean->kl, n));
    for (int64_t n = 0; n < tensor_count(&poisoned->dk_s); n++) {
        const int64_t row = n / poisoned->dk_s.dim; /* head 0 comes first */
        const int seen = row >= POISONED - 5 && row <= POISONED;
        assert_true(seen ? isnan(tensor_get(&poisoned->dk_s, n))
                         : tensor_get(&poisoned->dk_s, n) == tensor_get(&clean->dk_s, n));
    }
}

/* The upstream gradient of a row without visible keys changes no bit of any result, even if it is large: f16
 * gradients are scaled by a factor that must not depend on it. All rows are in one tile, so that the order of sums is
 * fixed. */
static const test_case empty_rows[] = {
    {"empty rows first", SHAPE(1, 97, 41), SMALL, CAUSAL, OFFSETS(0, 32)},
    {"empty rows last", SHAPE(1, 97, 41), SMALL, WINDOW(20, -1), OFFSETS(0, 0)},
    {"empty rows first, reverse", SHAPE(1, 97, 41), SMALL, CAUSAL, OFFSETS(0, 32), REVERSE},
};

/* Returns the number of such rows. */
static int64_t set_upstream_of_empty_rows(const fixture *f, double value)
{
    int64_t count = 0;
    for (int64_t n = 0; n < tensor_count(&f->grad_kl); n++)
        if (!f->live_q[n % f->length_q])
            tensor_set(&f->grad_kl, n, value), count++;
    return count;
}

static void check_garbage_upstream(trial *t)
{
    static const double garbage[] = {1e30, -1e38, INFINITY, NAN};
    assert_in_range(set_upstream_of_empty_rows(t->f, 0), 1, tensor_count(&t->f->grad_kl) - 1);
    run_both(t->plan, t->f, &t->one);
    for (size_t g = 0; g < COUNT_OF(garbage); g++) {
        set_upstream_of_empty_rows(t->f, garbage[g]);
        run_both(t->plan, t->f, &t->other);
        assert_same_bits(t, "garbage from upstream");
    }
}

static void set_first_dimension(const test_tensor *t, int64_t begin, int64_t end, double value)
{
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t row = begin; row < end; row++)
            tensor_set(t, tensor_index(t, 0, h, row), value);
}

static int has_zero_upstream(int64_t query)
{
    return query % 7 == 3 || query == LENGTH - 1;
}

static void poison_zero_upstream(const test_tensor *t)
{
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t i = 0; i < t->length; i++)
            for (int64_t d = 0; has_zero_upstream(i) && d < t->dim; d++)
                tensor_set(t, tensor_index(t, 0, h, i) + d, NAN);
}

static void assert_zero_upstream_is_zero(const test_tensor *dq)
{
    for (int64_t n = 0; dq->data != NULL && n < tensor_count(dq); n++)
        assert_true(!has_zero_upstream(n / dq->dim % dq->length) || tensor_get(dq, n) == 0);
}

/* With NaN in rows without upstream gradient, their KL is NaN, and gradients match the oracle without the NaN. The
 * random indices of a sparse row may be none, which leaves its KL at 0. */
static void assert_zero_upstream_rows(const trial *t)
{
    assert_true(isnan(tensor_get(&t->one.kl, LENGTH - 1)) || !t->f->live_q[LENGTH - 1]);
    assert_int_equal(gradients_mismatch(t->f, &t->one, t->kernel, t->kernel), 0);
    assert_zero_upstream_is_zero(&t->one.dq_t);
    assert_zero_upstream_is_zero(&t->one.dq_s);
    assert_zero_upstream_is_zero(&t->one.dw_s);
}

/* A row whose upstream gradient is 0 has gradient 0 and contributes nothing to key gradients, even if it, or a key
 * that only it sees, holds NaN. GPU kernels multiply it by 0. */
static const test_case zero_upstream[] = {
    {"full", SHAPE(1, LENGTH, LENGTH), SMALL},
    {"one-pass", SHAPE(1, LENGTH, LENGTH), SMALL, STUDENT_ONLY},
    {"causal", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL},
    {"bf16, causal, one-pass", SHAPE(1, LENGTH, LENGTH), SMALL, TYPES(BF16, BF16), CAUSAL, STUDENT_ONLY},
    {"reverse", SHAPE(1, LENGTH, LENGTH), SMALL, REVERSE},
    {"teacher groups", SHAPE(1, LENGTH, LENGTH), HEADS(4, 2), DIMS(16, 16), CAUSAL},
    {"indexer", SHAPE(1, LENGTH, LENGTH), HEADS(4, 1), DIMS(16, 16), INDEXER(3), STUDENT_ONLY},
    {"sparse", SHAPE(1, LENGTH, LENGTH), HEADS(4, 1), DIMS(16, 16), INDEXER(3), TOP_K(150), STUDENT_ONLY},
};

static void poison_rows_without_upstream(fixture *f)
{
    for (int64_t n = 0; n < tensor_count(&f->grad_kl); n++)
        if (has_zero_upstream(n % LENGTH))
            tensor_set(&f->grad_kl, n, 0);
    fixture_solve(f);
    poison_zero_upstream(&f->q_t);
    poison_zero_upstream(&f->q_s);
    if (f->problem.causal)
        set_first_dimension(&f->k_s, LENGTH - 1, LENGTH, NAN);
}

static void check_poison_in_rows_without_upstream(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    assert_zero_upstream_rows(t);
    if (t->one.dq_t.data == NULL) {
        run_one_pass(t->plan, t->f, &t->one, &t->one);
        assert_zero_upstream_rows(t);
    }
}

/* A key whose teacher logit is -inf has P = 0 in every row, like a key with a very low logit: the student's gradients
 * have the same bits. Unused rows of a query tile are 0, and 0 * inf is NaN; such a NaN must not reach a sum. All
 * queries are in one tile, so that the order of sums is fixed. */
static const test_case one_tile[] = {
    {"few queries", SHAPE(1, 37, LENGTH), SMALL, STUDENT_ONLY},
    {"one tile, causal", SHAPE(1, 100, LENGTH), SMALL, CAUSAL, STUDENT_ONLY},
};

static void check_key_at_minus_infinity(trial *t)
{
    set_first_dimension(&t->f->q_t, 0, t->f->q_t.length, 1);
    set_first_dimension(&t->f->k_t, POISONED, POISONED + 1, -1e4);
    run_both(t->plan, t->f, &t->one);
    set_first_dimension(&t->f->k_t, POISONED, POISONED + 1, -INFINITY);
    const skl_inputs inputs = results_backward_inputs(t->f, &t->one);
    const skl_gradients gradients = results_gradients(&t->other);
    run_backward(t->plan, &inputs, &gradients);
    assert_elements(t, &t->one.dk_s, is_finite, "dk_s");
    assert_true(tensor_equal(&t->one.dq_s, &t->other.dq_s));
    assert_true(tensor_equal(&t->one.dk_s, &t->other.dk_s));
}

/* Cases whose logits overflow. GPU kernels make such rows NaN. */
static const test_case overflows[] = {
    {"full", SHAPE(1, LENGTH, LENGTH), SMALL},
    {"one-pass", SHAPE(1, LENGTH, LENGTH), SMALL, STUDENT_ONLY},
    {"causal", SHAPE(1, LENGTH, LENGTH), SMALL, CAUSAL},
    {"bf16", SHAPE(1, LENGTH, LENGTH), SMALL, TYPES(BF16, BF16), CAUSAL, STUDENT_ONLY},
    {"reverse", SHAPE(1, LENGTH, LENGTH), SMALL, REVERSE},
    {"teacher groups", SHAPE(1, LENGTH, LENGTH), HEADS(4, 2), DIMS(16, 16)},
};
static const test_case overflows_of_indexers[] = {
    {"indexer", SHAPE(1, LENGTH, LENGTH), HEADS(4, 1), DIMS(16, 16), INDEXER(3), STUDENT_ONLY},
    {"sparse", SHAPE(1, LENGTH, LENGTH), HEADS(4, 1), DIMS(16, 16), INDEXER(3), TOP_K(150), STUDENT_ONLY},
};

/* Gives a side queries of 2 in their first dimension, and one of its keys this value there. */
static void set_logit(const test_tensor *q, const test_tensor *k, double value)
{
    set_first_dimension(q, 0, q->length, 2);
    set_first_dimension(k, POISONED, POISONED + 1, value);
}

/* A logit of A that overflows to -inf gives its key no mass, like a very low logit: 0 log 0 = 0, and all results
 * match the oracle's for the low logit. Without teacher gradients, this includes a one-pass call. */
static void overflow_in_a(fixture *f)
{
    const int reverse = f->problem.direction == SKL_KL_REVERSE;
    const test_tensor *const q = reverse ? &f->q_s : &f->q_t, *const k = reverse ? &f->k_s : &f->k_t;
    set_logit(q, k, -1e4);
    fixture_solve(f);
    set_logit(q, k, -3e38);
}

static void check_overflow_in_a(trial *t)
{
    check_oracle(t);
    if (t->one.dq_t.data == NULL) {
        tensor_set_all(&t->one.kl, NAN);
        run_one_pass(t->plan, t->f, &t->one, &t->one);
        assert_exact(t, &t->one);
    }
}

/* B has no mass where A has: the KL of the rows that see the key is infinite. */
static void overflow_in_b(fixture *f)
{
    const int reverse = f->problem.direction == SKL_KL_REVERSE;
    set_logit(reverse ? &f->q_t : &f->q_s, reverse ? &f->k_t : &f->k_s, -3e38);
}

static void check_overflow_in_b(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    assert_elements(t, &t->one.lse_s, is_finite, "lse_s");
    for (int64_t n = 0; n < tensor_count(&t->one.kl); n++) {
        const double kl = tensor_get(&t->one.kl, n);
        assert_true(n % LENGTH >= POISONED || !t->f->problem.causal ? kl == INFINITY : isfinite(kl));
    }
}

/* The first heads of a teacher group ignore key 0 entirely and the last does not: with two keys and a group of three
 * heads, P_0 is 1/6. The dimension is 1, so that keys are logits. */
#define GROUP_OF_3 SHAPE(1, 1, 2), HEADS(3, 1), DIMS(1, 1), SCALES(1, 1), .without = ALL_GRADIENTS
static const test_case partly_hidden[] = {
    {"hidden from two heads", GROUP_OF_3},
    {"hidden from two heads, reverse", GROUP_OF_3, REVERSE},
    {"hidden from two heads, given LSE", GROUP_OF_3, .lse = LSE_GIVEN},
    {"hidden from two heads, given LSE, reverse", GROUP_OF_3, .lse = LSE_GIVEN, REVERSE},
};

static void hide_key_from_two_heads(fixture *f)
{
    tensor_set_all(&f->q_t, 1), tensor_set_all(&f->q_s, 1);
    tensor_set_all(&f->k_t, 0), tensor_set_all(&f->k_s, 0);
    tensor_set_all(&f->lse_t, 0);
    if (f->lse_t.data)
        tensor_set(&f->lse_t, 2, log(2));
    tensor_set(&f->k_t, 0, -1e4), tensor_set(&f->k_t, 2, -1e4); /* the oracle's result is that of -inf */
    fixture_solve(f);
    tensor_set(&f->k_t, 0, -INFINITY), tensor_set(&f->k_t, 2, -INFINITY);
    const double p[] = {1.0 / 6, 5.0 / 6}, s = 0.5;
    const double forward = p[0] * log(p[0] / s) + p[1] * log(p[1] / s);
    const double reverse = s * log(s / p[0]) + s * log(s / p[1]);
    assert_true(fabs(f->exact.kl[0] - (f->problem.direction == SKL_KL_FORWARD ? forward : reverse)) < 1e-6);
}

/* ---- Large counts ------------------------------------------------------------------------------------------ */

static const test_case many_heads[] = {
    {"batches", SHAPE(66000, 1, 2), HEADS(1, 1), DIMS(1, 2)},
    {"heads", SHAPE(1, 1, 2), HEADS(66000, 66000), DIMS(1, 2)},
    {"both", SHAPE(300, 1, 2), HEADS(220, 220), .key_heads_s = 1, DIMS(1, 2)},
    {"teachers", SHAPE(1, 2, 3), HEADS(66000, 22000), DIMS(1, 2)},
    {"bf16", SHAPE(33000, 1, 2), HEADS(2, 2), DIMS(8, 8), TYPES(BF16, BF16)},
    {"f16", SHAPE(2, 1, 2), HEADS(33000, 33000), .key_heads_t = 1, DIMS(8, 8), TYPES(F16, F16)},
};

static const test_case many_rows[] = {
    {"queries", SHAPE(1, 40001, 3), HEADS(1, 1), DIMS(2, 2)},
    {"keys", SHAPE(1, 3, 40001), HEADS(1, 1), DIMS(2, 2)},
    {"window", SHAPE(1, 40001, 40001), HEADS(1, 1), DIMS(2, 2), WINDOW(2, 0)},
    {"tails", PACKED(3, LENGTHS(0, 0, 0, 0), LENGTHS(0, 0, 0, 0)), SMALL, TAILS(300, 500)}, /* a rank of padding */
};

/* ---- Large strides ----------------------------------------------------------------------------------------- */

enum { PAGE = 4096, MOST_PAGES = 64 };

/* Reserves address space; pages are allocated on first access. */
static void *reserve(int64_t element_count, size_t element_size)
{
    void *const memory = mmap(NULL, (size_t)element_count * element_size, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        fail_msg("address space for %lld elements could not be reserved", (long long)element_count);
    return memory;
}

/* The pages that hold elements, which a GPU must be able to reach. A row never spans several pages. */
static size_t touched_pages(const test_tensor *t, unsigned char **pages)
{
    size_t count = 0;
    for (int64_t n = 0; n < tensor_count(t); n++) {
        const int64_t row = n / t->dim, head = row / t->length;
        const int64_t element = head / t->heads * t->stride_batch + head % t->heads * t->stride_head +
                                row % t->length * t->stride_row + n % t->dim;
        const uintptr_t address = (uintptr_t)t->data + (uintptr_t)element * dtype_size(t->dtype);
        unsigned char *const page = (unsigned char *)(address - address % PAGE);
        size_t p = 0;
        while (p < count && pages[p] != page)
            p++;
        if (p < count)
            continue;
        assert_true(count < MOST_PAGES);
        pages[count++] = page;
    }
    return count;
}

static void enlarge_strides(test_tensor *t, int64_t stride_batch, int64_t stride_head, int64_t stride_row)
{
    const test_tensor dense = *t;
    t->stride_batch = stride_batch, t->stride_head = stride_head, t->stride_row = stride_row;
    const int64_t count =
        1 + (t->batch - 1) * stride_batch + (t->heads - 1) * stride_head + (t->length - 1) * stride_row + t->dim;
    t->data = reserve(count, dtype_size(t->dtype));
    tensor_copy(t, &dense);
    unsigned char *pages[MOST_PAGES];
    const size_t page_count = touched_pages(t, pages);
    for (size_t p = 0; p < page_count; p++)
        device_share(pages[p], PAGE);
}

static void free_reserved(test_tensor *t)
{
    unsigned char *pages[MOST_PAGES];
    const size_t page_count = touched_pages(t, pages);
    for (size_t p = 0; p < page_count; p++)
        device_unshare(pages[p]);
    const int64_t count = 1 + (t->batch - 1) * t->stride_batch + (t->heads - 1) * t->stride_head +
                          (t->length - 1) * t->stride_row + t->dim;
    munmap(t->data, (size_t)count * dtype_size(t->dtype));
}

/* Products of an index and a stride exceed 2^31 elements, and some exceed 2^32. The results have the same bits as
 * those of dense tensors. */
static void run_far(trial *t, int64_t stride_batch, int64_t stride_head, int64_t stride_row)
{
    fixture far = *t->f;
    fixture_results far_results = t->other;
    test_tensor *const tensors[] = {&far.q_t,          &far.k_t,          &far.q_s,           &far.k_s,
                                    &far.grad_kl,      &far_results.kl,   &far_results.lse_t, &far_results.lse_s,
                                    &far_results.dq_t, &far_results.dk_t, &far_results.dq_s,  &far_results.dk_s};
    for (size_t n = 0; n < COUNT_OF(tensors); n++)
        enlarge_strides(tensors[n], stride_batch, stride_head, stride_row);
    far.inputs.q_t = tensor_input(&far.q_t), far.inputs.k_t = tensor_input(&far.k_t);
    far.inputs.q_s = tensor_input(&far.q_s), far.inputs.k_s = tensor_input(&far.k_s);
    far.inputs.grad_kl = tensor_input(&far.grad_kl);
    run_both(t->plan, &far, &far_results);
    const char *const different = results_difference(&t->one, &far_results);
    if (different)
        trial_fail(t, "%s differs when strides are large", different);
    for (size_t n = 0; n < COUNT_OF(tensors); n++)
        free_reserved(tensors[n]);
}

static void check_far_strides(trial *t)
{
    const int64_t far = ((int64_t)1 << 31) + 72; /* a multiple of 8, like the others, as tensor cores require */
    run_both(t->plan, t->f, &t->one);
    run_far(t, far, 104, 24);
    run_far(t, 208, far, 24);
    run_far(t, 208, 104, far);
}

static const test_case far_strides[] = {
    {"large strides", SHAPE(2, 3, 4), SMALL, .dtype_t = SKL_BF16},
    {"large strides, bf16", SHAPE(2, 3, 4), SMALL, TYPES(BF16, BF16)},
};

/* ---- Sinks ----------------------------------------------------------------------------------------------------- */

/* The teacher's sink leaves its keys a probability of e^-34, and the student's sink nothing: that little mass is the
 * KL, about 1e10. f32 LSEs with the sinks equal the sinks. */
static void check_mass_next_to_a_sink(trial *t)
{
    run_both(t->plan, t->f, &t->one);
    run_one_pass(t->plan, t->f, &t->one, &t->other);
    for (int64_t n = 0; n < tensor_count(&t->one.kl); n++) {
        const double of_forward = tensor_get(&t->one.kl, n), of_one_pass = tensor_get(&t->other.kl, n);
        if (!(of_forward > 1e6 && fabs(of_one_pass / of_forward - 1) < 1e-3))
            trial_fail(t, "KL %lld is %g in a forward and %g in one pass", (long long)n, of_forward, of_one_pass);
    }
}

static const test_case mass_next_to_a_sink[] = {
    {"mass next to a sink", SHAPE(1, 5, 67), SMALL, SINKS_ABOVE(50, 1e30), STUDENT_ONLY},
    {"mass next to a sink, groups", SHAPE(1, 5, 67), HEADS(4, 2), DIMS(16, 16), SINKS_ABOVE(50, 1e30), STUDENT_ONLY},
};

static void set_sinks(trial *t, float sink_t, float sink_s)
{
    const int64_t heads[] = {t->f->problem.heads_t, t->f->problem.heads_s};
    for (int side = 0; side < 2; side++)
        for (int64_t h = 0; h < heads[side]; h++)
            ((float *)(void *)t->f->sinks[side].data)[h] = side == 0 ? sink_t : sink_s;
}

static void overflow_all_logits(fixture *f)
{
    const test_tensor *const queries[] = {&f->q_t, &f->q_s}, *const keys[] = {&f->k_t, &f->k_s};
    for (int side = 0; side < 2; side++) {
        tensor_set_all(queries[side], 1e30);
        tensor_set_all(keys[side], -1e30);
    }
}

/* Keys without mass leave everything to the sinks. */
static void check_only_sinks_have_mass(trial *t)
{
    overflow_all_logits(t->f);
    run_both(t->plan, t->f, &t->one);
    assert_elements(t, &t->one.kl, is_zero, "kl");
    assert_elements(t, &t->one.lse_t, is_finite, "lse_t");
    assert_elements(t, &t->one.lse_s, is_finite, "lse_s");
    run_one_pass(t->plan, t->f, &t->one, &t->other);
    assert_elements(t, &t->other.kl, is_zero, "kl in one pass");
}

/* Without mass there is no distribution, as without sinks. */
static void check_sinks_without_mass(trial *t)
{
    overflow_all_logits(t->f);
    set_sinks(t, -INFINITY, -INFINITY);
    run_both(t->plan, t->f, &t->one);
    assert_elements(t, &t->one.kl, is_nan, "kl");
    assert_elements(t, &t->one.lse_t, is_minus_infinity, "lse_t");
    assert_elements(t, &t->one.lse_s, is_minus_infinity, "lse_s");
}

static const test_case only_sinks[] = {{"only sinks", SHAPE(1, 5, 67), SMALL, SINKS, STUDENT_ONLY}};

/* A sink at -inf is none: its gradient is 0, and no 0 log 0. */
static void check_absent_sinks(trial *t)
{
    set_sinks(t, -INFINITY, -INFINITY);
    run_both(t->plan, t->f, &t->one);
    assert_elements(t, &t->one.kl, is_finite, "kl");
    assert_elements(t, &t->one.dsink_t, is_zero, "dsink_t");
    assert_elements(t, &t->one.dsink_s, is_zero, "dsink_s");
}

static const test_case absent_sinks[] = {{"absent sinks", SHAPE(1, 5, 67), SMALL, SINKS},
                                         {"absent sinks, reverse", SHAPE(1, 5, 67), SMALL, SINKS, REVERSE}};

/* NaN in one sink of a row makes its KL NaN, whatever a maximum of it and a logit is. */
static void check_nan_sinks(trial *t)
{
    for (int side = 0; side < 2; side++) {
        set_sinks(t, side == 0 ? NAN : 0.0F, side == 0 ? 0.0F : NAN);
        run_both(t->plan, t->f, &t->one);
        assert_elements(t, &t->one.kl, is_nan, "kl");
    }
}

/* The teacher's sink has a weight of about e^-depth and the student's has none: the KL is infinite. */
static void check_sinks_of_one_side(trial *t)
{
    for (float depth = 3; depth < 700; depth *= 6) { /* 3, 18, 108, 648 nats */
        set_sinks(t, -depth, -INFINITY);
        run_both(t->plan, t->f, &t->one);
        assert_elements(t, &t->one.kl, is_infinity, "kl");
        run_one_pass(t->plan, t->f, &t->one, &t->other);
        assert_elements(t, &t->other.kl, is_infinity, "kl in one pass");
    }
}

static const test_case sinks_of_a_head[] = {
    {"sinks of a head", SHAPE(1, 5, 67), SMALL, SINKS, STUDENT_ONLY},
    {"sinks of a head of 128", SHAPE(1, 5, 67), HEADS(1, 1), DIMS(128, 128), SINKS, STUDENT_ONLY},
    {"sinks of a group", SHAPE(1, 5, 67), HEADS(4, 2), DIMS(16, 16), SINKS, STUDENT_ONLY},
};

int main(void)
{
#define IN_ALL_WAYS .every_type = 1, .every_kind = 1
#define WITH_ORACLE .prepare = fixture_solve, .check = check_oracle
    const struct CMUnitTest tests[] = {
        TRIALS(poison_in_hidden_keys, hidden_keys, IN_ALL_WAYS, .check = check_poison_in_hidden_keys),
        TRIALS(poison_in_a_visible_key, visible_key, .check = check_poison_in_a_visible_key),
        TRIALS(poison_in_one_pass, one_pass, .every_type = 1, .check = check_poison_in_one_pass),
        TRIALS(poison_in_a_query, narrow_window, IN_ALL_WAYS, .check = check_poison_in_a_query),
        TRIALS(garbage_upstream_of_rows_without_keys, empty_rows, IN_ALL_WAYS, .check = check_garbage_upstream),
        TRIALS(unused_rows_of_a_tile_and_infinity, one_tile, IN_ALL_WAYS, .check = check_key_at_minus_infinity),
        TRIALS(poison_in_rows_without_upstream_gradient, zero_upstream, .prepare = poison_rows_without_upstream,
               .check = check_poison_in_rows_without_upstream, .only_cpu = 1, .sample = 3),
        TRIALS(logits_of_a_that_overflow, overflows, .prepare = overflow_in_a, .check = check_overflow_in_a,
               .only_cpu = 1, .sample = 3),
        TRIALS(logits_of_b_that_overflow, overflows, .prepare = overflow_in_b, .check = check_overflow_in_b,
               .only_cpu = 1, .sample = 3),
        TRIALS(logits_of_indexers_that_overflow, overflows_of_indexers, .prepare = overflow_in_a,
               .check = check_overflow_in_a, .only_cpu = 1),
        TRIALS(the_last_head_of_a_group_sees_a_key, partly_hidden, .prepare = hide_key_from_two_heads,
               .check = check_oracle, .only_cpu = 1),
        TRIALS(more_than_65535_batches_and_heads, many_heads, WITH_ORACLE, .best_on_cpu = 1, .sample = 3),
        TRIALS(more_than_32768_rows_and_none, many_rows, WITH_ORACLE, .best_on_cpu = 1, .sample = 3),
        TRIALS(mass_next_to_a_sink_counts, mass_next_to_a_sink, .check = check_mass_next_to_a_sink, .only_cpu = 1),
        TRIALS(only_sinks_have_mass, only_sinks, .check = check_only_sinks_have_mass, .only_cpu = 1),
        TRIALS(sinks_at_minus_infinity, absent_sinks, .every_type = 1, .check = check_absent_sinks),
        TRIALS(nan_in_a_sink, sinks_of_a_head, .every_type = 1, .check = check_nan_sinks),
        TRIALS(sinks_of_one_side, sinks_of_a_head, .every_type = 1, .check = check_sinks_of_one_side),
        TRIALS(sinks_without_mass, only_sinks, .check = check_sinks_without_mass, .only_cpu = 1),
        TRIALS(strides_beyond_32_bits, far_strides, .check = check_far_strides),
    };
    return test_run("faults", tests, COUNT_OF(tests));
}
