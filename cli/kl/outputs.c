/* --out and --grad: writes both files or none. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "cli/common/options.h"
#include "cli/io/tensor_write.h"

#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Before the computation --------------------------------------------------------------------------------- */

int kl_outputs_compare(const kl_request *request, const output_file *outputs, size_t count)
{
    const char **const inputs = calloc(request->file_count + 1, sizeof *inputs); /* + 1: never 0 */
    if (inputs == NULL)
        return cli_fail(CLI_NO_MEMORY, "out of memory for %zu file names", request->file_count);
    for (size_t f = 0; f < request->file_count; f++)
        inputs[f] = kl_file_path(request->files[f]);
    const int exit_code = file_outputs_check(outputs, count, inputs, request->file_count);
    free(inputs);
    return exit_code;
}

/* The folder must be writable, for the temporary file and the output. */
static int check_folder(const char *option, const char *path)
{
    char folder[PATH_MAX];
    if (strlen(path) >= sizeof folder)
        return cli_fail(CLI_BAD_INPUT, "%s=%.60s...: must be shorter than %d bytes", option, path, PATH_MAX);
    strcpy(folder, path);
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode))
        return cli_fail(CLI_BAD_INPUT, "%s=%s: must be a regular file or not exist", option, path);
    if (access(dirname(folder), W_OK | X_OK) != 0)
        return cli_fail(CLI_WRITE_FAILED, "%s=%s: cannot write there: %s", option, path, strerror(errno));
    return CLI_OK;
}

int kl_outputs_check(const kl_request *request)
{
    if (request->grad_teacher && request->grad_path == NULL)
        return cli_fail(CLI_BAD_INPUT, "--grad-teacher: --grad FILE must be given too");
    output_file outputs[2];
    size_t count = 0;
    if (request->out_path)
        outputs[count++] = (output_file){"--out", request->out_path};
    if (request->grad_path)
        outputs[count++] = (output_file){"--grad", request->grad_path};
    int exit_code = kl_outputs_compare(request, outputs, count);
    for (size_t o = 0; o < count && exit_code == CLI_OK; o++)
        exit_code = check_folder(outputs[o].option, outputs[o].path);
    return exit_code;
}

/* ---- After the computation ---------------------------------------------------------------------------------- */

/* [B, H, N]; packed [H, total]. */
static output_tensor row_tensor(const char *name, const float *data, int64_t heads, const skl_problem *problem)
{
    output_tensor tensor = {.name = name, .dtype = SKL_F32, .data = data};
    if (!problem->packed)
        tensor.shape[tensor.rank++] = problem->batch;
    tensor.shape[tensor.rank++] = heads;
    tensor.shape[tensor.rank++] = kl_row_length(problem);
    return tensor;
}

static int write_rows(file_set *set, const kl_results *results, const skl_problem *problem, const kl_request *request)
{
    const output_tensor tensors[] = {
        row_tensor("kl", results->kl, problem->heads_s, problem),
        row_tensor("lse_t", results->lse_t, problem->heads_t, problem),
        row_tensor("lse_s", results->lse_s, problem->heads_s, problem),
        row_tensor("cross_entropy", results->cross_entropy, problem->heads_s, problem),
        row_tensor("entropy", results->entropy, problem->heads_s, problem),
        row_tensor("mass", results->mass, problem->heads_s, problem),
    };
    const size_t count =
        kl_is_indexer(problem) ? sizeof tensors / sizeof tensors[0] : 3; /* only an indexer has the last three */
    const output_metadata metadata[] = {{"direction", direction_name(problem->direction)}};
    tensor_error error;
    if (tensor_write_into(set, request->out_path, tensors, count, metadata, 1, &error))
        return CLI_OK;
    return cli_fail(CLI_WRITE_FAILED, "--out=%s", error.text);
}

static output_tensor gradient_tensor(const char *name, const void *data, const kl_view *view, const kl_inputs *inputs)
{
    const stored_tensor *const like = view->stored;
    output_tensor tensor = {.name = name, .rank = like->rank, .data = data};
    tensor.dtype = inputs->problem.grad_f32 ? SKL_F32 : like->dtype;
    memcpy(tensor.shape, like->shape, sizeof tensor.shape);
    return tensor;
}

static output_tensor sink_gradient(const char *name, const float *data, int64_t heads)
{
    return (output_tensor){.name = name, .dtype = SKL_F32, .rank = 1, .shape = {heads}, .data = data};
}

static int write_gradients(file_set *set, const kl_results *results, const kl_inputs *inputs,
                           const kl_request *request)
{
    static const char *const names[ROLE_REQUIRED_COUNT] = {"dq_t", "dk_t", "dq_s", "dk_s"};
    output_tensor tensors[ROLE_REQUIRED_COUNT + 3];
    size_t count = 0;
    for (kl_role role = 0; role < ROLE_REQUIRED_COUNT; role++)
        if (results->gradients[role])
            tensors[count++] = gradient_tensor(names[role], results->gradients[role], &inputs->views[role], inputs);
    if (results->dw_s)
        tensors[count++] = gradient_tensor("dw_s", results->dw_s, &inputs->w_s, inputs);
    if (results->dsink_t)
        tensors[count++] = sink_gradient("dsink_t", results->dsink_t, inputs->problem.heads_t);
    if (results->dsink_s)
        tensors[count++] = sink_gradient("dsink_s", results->dsink_s, inputs->problem.heads_s);
    const output_metadata metadata[] = {{"direction", direction_name(inputs->problem.direction)},
                                        {"reduction", kl_reduction_name(request->reduction)}};
    tensor_error error;
    if (tensor_write_into(set, request->grad_path, tensors, count, metadata, 2, &error))
        return CLI_OK;
    return cli_fail(CLI_WRITE_FAILED, "--grad=%s", error.text);
}

static int write_both(const kl_results *results, const kl_inputs *inputs, const kl_request *request)
{
    file_set set = {NULL, NULL};
    int exit_code = CLI_OK;
    if (request->out_path)
        exit_code = write_rows(&set, results, &inputs->problem, request);
    if (exit_code == CLI_OK && request->grad_path)
        exit_code = write_gradients(&set, results, inputs, request);
    return file_write_commit(&set, exit_code);
}

/* Blocks interrupts while files are written: otherwise a temporary file could remain. */
int kl_outputs_write(const kl_results *results, const kl_inputs *inputs, const kl_request *request)
{
    sigset_t interrupts, before;
    sigemptyset(&interrupts);
    sigaddset(&interrupts, SIGINT);
    sigaddset(&interrupts, SIGTERM);
    sigaddset(&interrupts, SIGHUP);
    sigprocmask(SIG_BLOCK, &interrupts, &before);
    const int exit_code = write_both(results, inputs, request);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return exit_code;
}
