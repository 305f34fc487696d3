/* streamkl: finds the command and passes it the rest of the command line. */
#include "cli/common/cli.h"

#include <argp.h>
#include <errno.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
} command;

static const command commands[] = {
    {"distill", cmd_distill}, {"kl", cmd_kl},     {"map", cmd_map},     {"stats", cmd_stats},
    {"demo", cmd_demo},       {"info", cmd_info}, {"check", cmd_check}, {"bench", cmd_bench},
};
enum { COMMAND_COUNT = sizeof commands / sizeof commands[0] };

static const command *find_command(const char *name)
{
    for (int c = 0; c < COMMAND_COUNT; c++) {
        if (strcmp(commands[c].name, name) == 0)
            return &commands[c];
    }
    return NULL;
}

_Noreturn static void fail_unknown_command(const char *name)
{
    char names[128] = "";
    for (int c = 0; c < COMMAND_COUNT; c++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", c ? ", " : "", commands[c].name);
    cli_fail(CLI_BAD_INPUT, "unknown command '%s': must be one of %s; see streamkl --help", name, names);
}

/* ---- The command line --------------------------------------------------------------------------------------- */

static const char doc[] =
    "The KL divergence between the attention of a teacher and a student, streamed: without the N x N matrices, "
    "at any context length.\n"
    "\n"
    "Commands:\n"
    "  distill  distill attention at a long context, with a report\n"
    "  kl       KL and gradients of the tensors in safetensors or .npy files\n"
    "  map      attention maps, and contributions to the KL\n"
    "  stats    which keys an attention attends to, how much, and how far away\n"
    "  demo     a 16K context on this machine, compared with materializing\n"
    "  info     version, CPU, devices, kernels, and why a kernel is chosen\n"
    "  check    compare this machine's kernels with the float64 oracle\n"
    "  bench    compare streaming with a materialized baseline\n"
    "\n"
    "Options:"
    "\vExamples:\n"
    "  streamkl distill                       train a student, in minutes\n"
    "  streamkl kl pair.safetensors --causal  KL of q_t, k_t and q_s, k_s\n"
    "  streamkl kl --help                     the options of a command\n"
    "\n"
    "Exit status:\n"
    "  0  success\n"
    "  1  check: a kernel disagrees with the oracle\n"
    "  2  an argument or an input file is invalid\n"
    "  3  out of memory\n"
    "  4  the device is absent, failed, or does not support the request\n"
    "  5  an output could not be written\n"
    "  130  distill was interrupted, and wrote what it had learned so far\n"
    "\n"
    "Environment:\n"
    "  STREAMKL_THREADS  CPU threads if --threads is not given\n"
    "  STREAMKL_KERNEL   kernel if --kernel is not given\n"
    "  NO_COLOR          disables color";

static void print_version(FILE *stream, struct argp_state *state)
{
    (void)state;
    fprintf(stream, "streamkl %s\n", skl_version());
}

typedef struct remainder {
    int argc;
    char **argv; /* argv[0] is the command; NULL: no command */
} remainder;

static error_t take_command(int key, char *text, struct argp_state *state)
{
    (void)text;
    remainder *rest = state->input;
    if (key == ARGP_KEY_NO_ARGS) {
        argp_state_help(state, stderr, ARGP_HELP_USAGE | ARGP_HELP_LONG | ARGP_HELP_DOC);
        return 0;
    }
    if (key != ARGP_KEY_ARG)
        return ARGP_ERR_UNKNOWN;
    rest->argv = state->argv + state->next - 1;
    rest->argc = state->argc - state->next + 1;
    state->next = state->argc; /* the rest belongs to the command */
    return 0;
}

static const struct argp top_argp = {
    .parser = take_command,
    .args_doc = "COMMAND [ARGUMENT...]",
    .doc = doc,
};

static int run_command(remainder line)
{
    static char title[64];
    static char help_option[] = "--help";
    char *help_argv[] = {title, help_option, NULL};
    if (strcmp(line.argv[0], "help") == 0 && line.argc > 1) {
        help_argv[0] = line.argv[1];
        line = (remainder){2, help_argv};
    }
    const command *found = find_command(line.argv[0]);
    if (found == NULL)
        fail_unknown_command(line.argv[0]);
    snprintf(title, sizeof title, "streamkl %s", found->name);
    program_invocation_name = title; /* the prefix of our errors and argp's */
    line.argv[0] = title;
    return found->run(line.argc, line.argv);
}

/* If stdout is a file on a full disk, only the last write may fail. */
static void close_stdout(void)
{
    const int failed_before = ferror(stdout);
    if (fflush(stdout) == 0 && !failed_before)
        return;
    cli_warn("standard output: %s", strerror(errno));
    _exit(CLI_WRITE_FAILED);
}

int main(int argc, char **argv)
{
    static char title[] = "streamkl";
    atexit(close_stdout);
    signal(SIGXFSZ, SIG_IGN); /* exceeding the file size limit is an error to report, not a crash */
    setlocale(LC_CTYPE, "");  /* to detect UTF-8; LC_NUMERIC stays C */
    if (argc > 0)
        argv[0] = title;
    program_invocation_name = title;
    setenv("ARGP_HELP_FMT", "opt-doc-col=34", 0); /* room for --direction=forward|reverse; a user's setting wins */
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);    /* otherwise the first time would include loading the kernel */
    argp_program_version_hook = print_version;
    argp_err_exit_status = CLI_BAD_INPUT;
    remainder line = {0, NULL};
    if (argp_parse(&top_argp, argc, argv, ARGP_IN_ORDER, NULL, &line) != 0)
        cli_fail(CLI_NO_MEMORY, "out of memory for the command line");
    return line.argv ? run_command(line) : CLI_BAD_INPUT;
}
