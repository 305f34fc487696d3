/* Behavior that only a GPU has: streams, graphs, device memory, sticky errors. Run by ./test gpu. */
#define _POSIX_C_SOURCE 200809L /* nanosleep, fork */
#include "gpu_case.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "case_words.h"
#include "device.h"
#include "runner.h"

/* ---- Problems ----------------------------------------------------------------------------------------------- */

static skl_problem problem_of(skl_dtype dtype, int64_t batch, int64_t heads, int64_t length, int64_t dim)
{
    skl_problem problem = skl_problem_default();
    problem.dtype_t = problem.dtype_s = dtype;
    problem.batch = batch;
    problem.heads_t = problem.heads_s = heads;
    problem.len_q = problem.len_k = length;
    problem.dim_t = problem.dim_s = dim;
    problem.causal = 1;
    return problem;
}

static skl_problem windowed(skl_problem problem, int64_t left)
{
    problem.window_left = left;
    return problem;
}

static skl_problem with_attention(skl_problem problem)
{
    problem.gradients = SKL_DQ_S | SKL_DK_S | SKL_DV_S;
    return problem;
}

static void with_kernel(const skl_problem *problem, const char *kernel, int deterministic, void (*check)(gpu_case *g))
{
    gpu_case g;
    gpu_case_create(&g, problem, kernel, deterministic);
    check(&g);
    gpu_case_destroy(&g);
}

/* Runs a check with every kernel that supports the problem and, with SKL_DV_S, its attention backward: only Hopper
 * has such kernels. */
static void with_every_kernel(const skl_problem *problem, int deterministic, void (*check)(gpu_case *g))
{
    const char *(*const kernel_at)(const skl_problem *, int32_t) =
        problem->gradients & SKL_DV_S ? attention_kernel : problem_kernel;
    assert_non_null(problem_kernel(problem, 0));
    for (int32_t k = 0; kernel_at(problem, k); k++)
        with_kernel(problem, kernel_at(problem, k), deterministic, check);
}

static void assert_same_results(const gpu_case *g, const unsigned char *expected, const char *what)
{
    unsigned char *const results = gpu_case_results(g);
    const size_t size = gpu_case_result_size(g);
    size_t byte = 0;
    while (byte < size && results[byte] == expected[byte])
        byte++;
    if (byte < size)
        fail_msg("%s: %s: results differ at byte %zu of %zu", skl_plan_kernel(g->plan), what, byte, size);
    free(results);
}

/* ---- Graphs ------------------------------------------------------------------------------------------------- */

static void poison_results(const gpu_case *g)
{
    const skl_problem *const p = &g->problem;
    assert_cuda(cudaMemset(g->kl, POISON, (size_t)(p->batch * p->heads_s * p->len_q) * sizeof(float)));
    assert_cuda(cudaMemset(g->dk_s, POISON, (size_t)(p->batch * p->heads_s * p->len_k * p->dim_s) * 2));
    assert_cuda(cudaDeviceSynchronize()); /* non-blocking streams do not wait for the default stream */
}

static void check_graph(gpu_case *g)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    assert_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    gpu_case_launch(g, stream);
    assert_cuda(cudaStreamSynchronize(stream));
    unsigned char *const direct = gpu_case_results(g);

    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    gpu_case_launch(g, stream);
    assert_cuda(cudaStreamEndCapture(stream, &graph));
    assert_cuda(cudaGraphInstantiateWithFlags(&replay, graph, 0));
    poison_results(g);
    for (int n = 0; n < 3; n++)
        assert_cuda(cudaGraphLaunch(replay, stream));
    assert_cuda(cudaStreamSynchronize(stream));
    assert_same_results(g, direct, "a replayed graph");
    free(direct);

    /* Other inputs at the same addresses: swap the keys of teacher and student. */
    const size_t keys_size =
        (size_t)(g->problem.batch * g->problem.heads_s * g->problem.len_k * g->problem.dim_s) * 2;
    void *keys_t = NULL;
    assert_cuda(cudaMalloc(&keys_t, keys_size));
    assert_cuda(cudaMemcpy(keys_t, g->tensors[1], keys_size, cudaMemcpyDefault));
    assert_cuda(cudaMemcpy(g->tensors[1], g->tensors[3], keys_size, cudaMemcpyDefault));
    assert_cuda(cudaMemcpy(g->tensors[3], keys_t, keys_size, cudaMemcpyDefault));
    assert_cuda(cudaDeviceSynchronize());
    assert_cuda(cudaGraphLaunch(replay, stream));
    assert_cuda(cudaStreamSynchronize(stream));
    unsigned char *const replayed = gpu_case_results(g);
    poison_results(g);
    gpu_case_launch(g, stream);
    assert_cuda(cudaStreamSynchronize(stream));
    assert_same_results(g, replayed, "a graph replayed on other inputs");
    free(replayed);
    assert_cuda(cudaFree(keys_t));
    assert_cuda(cudaGraphExecDestroy(replay));
    assert_cuda(cudaGraphDestroy(graph));
    assert_cuda(cudaStreamDestroy(stream));
}

static void test_graph_replay_gives_the_same_bits(void **state)
{
    (void)state;
    const skl_problem bf16 = problem_of(SKL_BF16, 2, 3, 257, 64), f16 = problem_of(SKL_F16, 1, 2, 300, 128);
    with_every_kernel(&bf16, 1, check_graph);
    with_every_kernel(&f16, 1, check_graph);
    const skl_problem attention = with_attention(bf16), attention_f16 = with_attention(f16);
    with_every_kernel(&attention, 0, check_graph);
    with_every_kernel(&attention_f16, 0, check_graph);
}

/* ---- Streams ------------------------------------------------------------------------------------------------ */

/* Blocks a stream until the gate opens. Gives up after 20 s, so that a call that synchronizes fails the test instead
 * of hanging it. */
typedef struct gate {
    atomic_int open, gave_up;
} gate;

static void wait_at_gate(void *data)
{
    gate *const g = data;
    const struct timespec millisecond = {.tv_sec = 0, .tv_nsec = 1000 * 1000};
    for (int waited = 0; !atomic_load(&g->open); waited++) {
        if (waited > 20000) {
            atomic_store(&g->gave_up, 1);
            return;
        }
        nanosleep(&millisecond, NULL);
    }
}

static void check_stream(gpu_case *g)
{
    gpu_case_launch(g, NULL);
    assert_cuda(cudaDeviceSynchronize());
    unsigned char *const expected = gpu_case_results(g);
    poison_results(g);
    assert_cuda(cudaDeviceSynchronize());

    cudaStream_t stream;
    gate closed = {0, 0};
    assert_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    assert_cuda(cudaLaunchHostFunc(stream, wait_at_gate, &closed));
    gpu_case_launch(g, stream); /* must return before its kernels can run */
    const int gave_up = atomic_load(&closed.gave_up);
    const cudaError_t state = cudaStreamQuery(stream);
    atomic_store(&closed.open, 1);
    assert_cuda(cudaStreamSynchronize(stream));
    assert_int_equal(gave_up, 0);
    assert_int_equal(state, cudaErrorNotReady);
    assert_same_results(g, expected, "another stream");
    free(expected);
    assert_cuda(cudaStreamDestroy(stream));
}

static void test_calls_do_not_synchronize(void **state)
{
    (void)state;
    const skl_problem problem = problem_of(SKL_BF16, 1, 4, 513, 64);
    const skl_problem attention = with_attention(problem);
    with_every_kernel(&problem, 1, check_stream);
    with_every_kernel(&attention, 0, check_stream);
}

/* ---- Memory ------------------------------------------------------------------------------------------------- */

static size_t free_memory(void)
{
    size_t free_size = 0, total_size = 0;
    assert_cuda(cudaDeviceSynchronize());
    assert_cuda(cudaMemGetInfo(&free_size, &total_size));
    return free_size;
}

/* Other processes may use the GPU at the same time: they take memory, and give it back in some of the attempts. */
static void check_no_allocation(gpu_case *g)
{
    enum { ATTEMPTS = 20 };
    gpu_case_launch(g, NULL); /* loads the kernels */
    int as_much = 0;
    for (int attempt = 0; attempt < ATTEMPTS && !as_much; attempt++) {
        const size_t before = free_memory();
        for (int n = 0; n < 200; n++)
            gpu_case_launch(g, NULL);
        as_much = free_memory() >= before;
    }
    assert_true(as_much);
}

static void test_calls_do_not_allocate(void **state)
{
    (void)state;
    const skl_problem problem = problem_of(SKL_F16, 2, 4, 257, 128);
    const skl_problem attention = with_attention(problem);
    with_every_kernel(&problem, 0, check_no_allocation);
    with_every_kernel(&attention, 0, check_no_allocation);
}

/* The exception: two-term rows are as large as f32 inputs. Every row of the four tensors becomes two f16 rows and a
 * factor. */
static size_t split_size(const char *kernel, int64_t length)
{
    const size_t dim = strcmp(kernel, "cuda_sm90_f32_64") == 0    ? 64
                       : strcmp(kernel, "cuda_sm90_f32_128") == 0 ? 128
                                                                  : 0;
    return dim == 0 ? 0 : (size_t)(4 * length) * (2 * dim * sizeof(uint16_t) + sizeof(float));
}

/* States of split keys are for a few rows per SM, so they are bounded, whatever the length is. */
static void test_workspace_does_not_grow_with_length(void **state)
{
    (void)state;
    const size_t most = (size_t)4 << 20;
    static const int64_t lengths[] = {4096, 65536, 262144, 1048576};
    static const skl_dtype dtypes[] = {SKL_F32, SKL_BF16};
    for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
        const skl_problem shortest = problem_of(dtypes[d], 1, 1, lengths[0], 64);
        assert_non_null(problem_kernel(&shortest, 0));
        for (int32_t k = 0; problem_kernel(&shortest, k); k++)
            for (int op = SKL_OP_FORWARD; op <= SKL_OP_PARTIAL; op++)
                for (size_t n = 0; n < COUNT_OF(lengths); n++) {
                    const skl_problem problem = problem_of(dtypes[d], 1, 1, lengths[n], 64);
                    const char *const kernel = problem_kernel(&shortest, k);
                    skl_plan *const plan = test_deterministic_plan(&problem, kernel);
                    assert_true(skl_plan_workspace_size(plan, (skl_op)op) <= most + split_size(kernel, lengths[n]));
                    skl_plan_destroy(plan);
                }
    }
}

/* ---- Repeats ------------------------------------------------------------------------------------------------ */

/* Many heads, so that blocks of different heads run at the same time and finish in any order. Problems alternate, so
 * that shared memory holds leftovers of another problem. */
static void test_a_thousand_repeats_give_the_same_bits(void **state)
{
    (void)state;
    const skl_problem problems[] = {
        problem_of(SKL_BF16, 8, 8, 129, 64),
        problem_of(SKL_BF16, 16, 8, 65, 128),
        problem_of(SKL_F16, 4, 16, 193, 64),
        problem_of(SKL_F16, 64, 2, 67, 32),
        problem_of(SKL_BF16, 1, 1, 1025, 64),
        windowed(problem_of(SKL_BF16, 2, 40, 257, 64), 33),
        problem_of(SKL_F16, 1, 2, 511, 128),
        windowed(problem_of(SKL_F16, 1, 3, 1500, 40), 100),
        problem_of(SKL_BF16, 2, 8, 321, 256),
        problem_of(SKL_F16, 4, 3, 200, 192),
        /* Not deterministic from here on, and only on Hopper. */
        with_attention(problem_of(SKL_BF16, 2, 8, 513, 128)),
        with_attention(problem_of(SKL_BF16, 8, 8, 257, 64)),
        with_attention(windowed(problem_of(SKL_F16, 1, 16, 400, 128), 100)),
    };
    const size_t in_any_order = 3, in_order = COUNT_OF(problems) - in_any_order;
    const size_t count = attention_kernel(&problems[in_order], 0) != NULL ? COUNT_OF(problems) : in_order;
    gpu_case cases[COUNT_OF(problems)];
    unsigned char *first[COUNT_OF(problems)];
    for (size_t p = 0; p < count; p++) {
        gpu_case_create(&cases[p], &problems[p], NULL, p < in_order);
        gpu_case_launch(&cases[p], NULL);
        first[p] = gpu_case_results(&cases[p]);
    }
    const int64_t repeats = test_environment("SKL_TEST_REPEATS", 1000);
    for (int64_t n = 1; n < repeats; n++)
        for (size_t p = 0; p < count; p++) {
            gpu_case_launch(&cases[p], NULL);
            assert_same_results(&cases[p], first[p], "a repeated forward and backward");
        }
    for (size_t p = 0; p < count; p++) {
        gpu_case_destroy(&cases[p]);
        free(first[p]);
    }
}

/* ---- Large -------------------------------------------------------------------------------------------------- */

static void skip_without_memory(double gib)
{
    if ((double)free_memory() < gib * 0x1p30) {
        print_message("needs %.0f GiB of GPU memory\n", gib);
        skip();
    }
}

/* q_s, k_s and their gradients have more than 2^31 elements. Some checks are of the last ones. */
static void test_more_than_2_to_the_31_elements(void **state)
{
    (void)state;
    skip_without_memory(32);
    skl_problem problem = windowed(problem_of(SKL_BF16, 2, 8, 1048640, 128), 63);
    problem.dim_t = 64;
    assert_true(problem.batch * problem.heads_s * problem.len_q * problem.dim_s > (int64_t)1 << 31);
    gpu_case g;
    gpu_case_create(&g, &problem, NULL, 0);
    gpu_case_launch(&g, NULL);
    assert_cuda(cudaDeviceSynchronize());
    gpu_case_check_around(&g, 0, 0, 0);
    gpu_case_check_around(&g, 0, 5, 777777);
    gpu_case_check_around(&g, 1, 0, 12);
    gpu_case_check_around(&g, 1, 7, problem.len_k - 700);
    gpu_case_check_around(&g, 1, 7, problem.len_k - 64);
    gpu_case_check_around(&g, 1, 7, problem.len_k - 1);
    gpu_case_destroy(&g);
}

static void check_a_million(gpu_case *g)
{
    gpu_case_launch(g, NULL);
    assert_cuda(cudaDeviceSynchronize());
    gpu_case_check_around(g, 0, 0, 100);
    gpu_case_check_around(g, 0, 0, 524288);
    gpu_case_check_around(g, 0, 0, g->problem.len_k - 1025);
}

static void test_a_million_queries_and_keys(void **state)
{
    (void)state;
    skip_without_memory(4);
    const skl_problem problem = windowed(problem_of(SKL_BF16, 1, 1, 1048576, 64), 1024);
    with_every_kernel(&problem, 0, check_a_million);
}

/* ---- Devices ------------------------------------------------------------------------------------------------ */

static void test_device_index_out_of_range_is_refused(void **state)
{
    (void)state;
    static const int32_t indices[] = {-1, 99};
    const skl_problem problem = problem_of(SKL_BF16, 1, 1, 64, 64);
    for (size_t n = 0; n < COUNT_OF(indices); n++) {
        skl_options options = skl_options_default();
        options.device = SKL_CUDA;
        options.device_index = indices[n];
        char expected[64];
        snprintf(expected, sizeof expected, "device_index=%d: must be 0..", indices[n]);
        skl_plan *plan = NULL;
        assert_refused(skl_plan_create(&plan, &problem, &options), SKL_ERROR_DEVICE, expected);
        assert_null(plan);
    }
}

/* The plan is for device 0, and device 1 is current during the call. */
static void test_current_device_is_unchanged(void **state)
{
    (void)state;
    int count = 0, current = -1;
    assert_cuda(cudaGetDeviceCount(&count));
    if (count < 2) {
        print_message("needs two GPUs\n");
        skip();
    }
    const skl_problem problem = problem_of(SKL_BF16, 1, 2, 257, 64);
    gpu_case g;
    gpu_case_create(&g, &problem, NULL, 0);
    gpu_case_launch(&g, NULL);
    assert_cuda(cudaDeviceSynchronize());
    unsigned char *const expected = gpu_case_results(&g);
    poison_results(&g);
    cudaStream_t stream;
    assert_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    assert_cuda(cudaDeviceSynchronize());
    assert_cuda(cudaSetDevice(1));
    gpu_case_launch(&g, stream);
    assert_cuda(cudaGetDevice(&current));
    assert_int_equal(current, 1);
    assert_cuda(cudaSetDevice(0));
    assert_cuda(cudaStreamSynchronize(stream));
    assert_same_results(&g, expected, "a call with another current device");
    free(expected);
    assert_cuda(cudaStreamDestroy(stream));
    gpu_case_destroy(&g);
}

/* ---- Errors that leave the context usable -------------------------------------------------------------------- */

static skl_status forward_on(const gpu_case *g, cudaStream_t stream)
{
    return skl_forward(g->plan, &g->inputs, &g->rows, g->workspace, g->workspace_size, stream);
}

/* A capture that a synchronization has invalidated accepts no launch. */
static void test_a_failed_call_does_not_fail_the_next(void **state)
{
    (void)state;
    const skl_problem problem = problem_of(SKL_BF16, 1, 1, 64, 64);
    gpu_case g;
    cudaStream_t captured, other;
    cudaGraph_t graph = NULL;
    gpu_case_create(&g, &problem, NULL, 0);
    assert_int_equal(forward_on(&g, NULL), SKL_OK);
    assert_cuda(cudaDeviceSynchronize());
    assert_cuda(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
    assert_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    assert_cuda(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
    assert_int_not_equal(cudaStreamSynchronize(captured), cudaSuccess);
    (void)cudaGetLastError();
    assert_int_equal(forward_on(&g, captured), SKL_ERROR_DEVICE);
    assert_int_equal(forward_on(&g, other), SKL_OK);
    assert_int_not_equal(cudaStreamEndCapture(captured, &graph), cudaSuccess);
    (void)cudaGetLastError();
    assert_cuda(cudaStreamSynchronize(other));
    assert_cuda(cudaStreamDestroy(captured));
    assert_cuda(cudaStreamDestroy(other));
    gpu_case_destroy(&g);
}

/* ---- Sticky errors: in a child process, because the CUDA context is unusable after them ----------------------- */

enum { AS_EXPECTED = 0, NOT_AS_EXPECTED = 1 };

/* Queries at an invalid address: the kernel faults, and the next call reports it with the kernel's name. */
static int child_with_a_bad_address(void)
{
    const skl_problem problem = problem_of(SKL_BF16, 1, 1, 64, 64);
    gpu_case g;
    gpu_case_create(&g, &problem, NULL, 0);
    skl_inputs bad = g.inputs;
    bad.q_s.data = (const void *)(uintptr_t)0x1000;
    skl_status status = skl_forward(g.plan, &bad, &g.rows, g.workspace, g.workspace_size, NULL);
    const cudaError_t fault = cudaDeviceSynchronize();
    if (status == SKL_OK)
        status = skl_forward(g.plan, &g.inputs, &g.rows, g.workspace, g.workspace_size, NULL);
    printf("%s after %s: %s\n", skl_status_name(status), cudaGetErrorString(fault), skl_last_error());
    const int named = strstr(skl_last_error(), skl_plan_kernel(g.plan)) != NULL;
    return fault != cudaSuccess && status == SKL_ERROR_DEVICE && named ? AS_EXPECTED : NOT_AS_EXPECTED;
}

/* Lengths in GPU memory cannot be checked before the launch. Invalid ones must not lead to writes outside the
 * buffers. */
static int child_with_bad_lengths(void)
{
    static const int32_t invalid[][4] = {{0, 3, 2, 7},         {-5, 3, 3, 7}, {0, 3, INT32_MAX, 7},
                                         {0, INT32_MIN, 3, 7}, {7, 3, 1, 0},  {100, 200, 300, 400}};
    static const skl_dtype dtypes[] = {SKL_F32, SKL_BF16};
    for (size_t d = 0; d < COUNT_OF(dtypes); d++)
        for (size_t n = 0; n < COUNT_OF(invalid); n++) {
            const test_case c = {"invalid",           PACKED(3, LENGTHS(0, 3, 3, 7), LENGTHS(0, 2, 7, 8)),
                                 HEADS(2, 2),         DIMS(8, 8),
                                 TAILS(1, 2),         .dtype_t = dtypes[d],
                                 .dtype_s = dtypes[d]};
            fixture f;
            fixture_create(&f, &c);
            memcpy(f.lengths[1].data, invalid[n], sizeof invalid[n]);
            memcpy(f.lengths[2].data, invalid[COUNT_OF(invalid) - 1 - n], sizeof invalid[n]);
            for (int32_t k = 0; case_kernel(&c, k); k++) {
                fixture_results results = results_create(&f);
                run_kernel(&f, case_kernel(&c, k), 0, &results);
                if (tensor_stray_writes(&results.kl) + tensor_stray_writes(&results.dq_s) +
                    tensor_stray_writes(&results.dk_s))
                    return NOT_AS_EXPECTED;
                results_destroy(&results);
            }
            fixture_destroy(&f);
        }
    return AS_EXPECTED;
}

typedef struct child_role {
    const char *name;
    int (*run)(void);
} child_role;

static const child_role children[] = {
    {"bad-address", child_with_a_bad_address},
    {"bad-lengths", child_with_bad_lengths},
};

/* A CUDA context does not survive a fork, so the child runs this program again. */
static int exit_status_of_child(const char *role)
{
    const pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "test_cuda", role, (char *)NULL);
        _exit(127);
    }
    int status = -1;
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_kernel_fault_is_reported_with_the_kernel_name(void **state)
{
    (void)state;
    assert_int_equal(exit_status_of_child("bad-address"), AS_EXPECTED);
}

static void test_invalid_lengths_do_not_write_out_of_bounds(void **state)
{
    (void)state;
    assert_int_equal(exit_status_of_child("bad-lengths"), AS_EXPECTED);
}

/* ---- Indexers ----------------------------------------------------------------------------------------------- */

/* A backward in several chunks agrees with the oracle. one_chunk_size: workspace of a single chunk for all rows. */
static void check_chunks(const test_case *c, size_t one_chunk_size)
{
    fixture f;
    fixture_create(&f, c);
    fixture_solve(&f);
    fixture_results results = results_create(&f);
    for (int32_t k = 0; case_kernel(c, k); k++) {
        skl_plan *const plan = test_plan(&f.problem, case_kernel(c, k), 0);
        assert_true(skl_plan_workspace_size(plan, SKL_OP_BACKWARD) < one_chunk_size);
        run_both(plan, &f, &results);
        assert_int_equal(rows_mismatch(&f, &results, c->name), 0);
        assert_int_equal(gradients_mismatch(&f, &results, case_kernel(c, k), c->name), 0);
        skl_plan_destroy(plan);
    }
    results_destroy(&results);
    fixture_destroy(&f);
}

static void test_indexer_backward_in_several_chunks(void **state)
{
    (void)state;
    const test_case dense = {"dense chunks", SHAPE(1, 13000, 700), HEADS(2, 1), DIMS(4, 2), INDEXER(16)};
    check_chunks(&dense, (size_t)13000 * 700 * sizeof(float));
    const test_case sparse = {"sparse chunks", SHAPE(1, 650, 300), HEADS(2, 2), KEY_HEADS(1, 1),
                              DIMS(8, 128),    INDEXER(2),         TOP_K(500)};
    test_case sparse_bf16 = sparse;
    sparse_bf16.name = "sparse chunks, bf16";
    sparse_bf16.dtype_t = sparse_bf16.dtype_s = SKL_BF16;
    check_chunks(&sparse, (size_t)2 * 650 * 500 * 128 * sizeof(float));
    check_chunks(&sparse_bf16, (size_t)2 * 650 * 500 * 128 * sizeof(float));
    /* Hopper's kernel keeps only the gradients of logits, 32 MiB of them. */
    const test_case large_top_k = {"sparse chunks, large top_k",
                                   SHAPE(1, 2100, 300),
                                   HEADS(1, 1),
                                   DIMS(8, 16),
                                   INDEXER(1),
                                   TYPES(BF16, BF16),
                                   TOP_K(4100)};
    check_chunks(&large_top_k, (size_t)2100 * 4100 * 16 * sizeof(float));
}

int main(int argc, char **argv)
{
    for (size_t n = 0; argc > 1 && n < COUNT_OF(children); n++)
        if (strcmp(argv[1], children[n].name) == 0)
            return children[n].run();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_graph_replay_gives_the_same_bits),
        cmocka_unit_test(test_calls_do_not_synchronize),
        cmocka_unit_test(test_calls_do_not_allocate),
        cmocka_unit_test(test_workspace_does_not_grow_with_length),
        cmocka_unit_test(test_a_thousand_repeats_give_the_same_bits),
        cmocka_unit_test(test_more_than_2_to_the_31_elements),
        cmocka_unit_test(test_a_million_queries_and_keys),
        cmocka_unit_test(test_device_index_out_of_range_is_refused),
        cmocka_unit_test(test_current_device_is_unchanged),
        cmocka_unit_test(test_a_failed_call_does_not_fail_the_next),
        cmocka_unit_test(test_kernel_fault_is_reported_with_the_kernel_name),
        cmocka_unit_test(test_invalid_lengths_do_not_write_out_of_bounds),
        cmocka_unit_test(test_indexer_backward_in_several_chunks),
    };
    return test_run("cuda", tests, COUNT_OF(tests));
}
