/* The options of commands that read q_t, k_t, q_s, k_s from files: names and layout of the tensors. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "cli/common/options.h"

#include <errno.h>

enum {
    KEY_NAME = OPTIONS_INPUT_KEYS, /* + role: name of its tensor */
    KEY_LAYOUT = KEY_NAME + ROLE_COUNT,
};

static const struct argp_option options[] = {
    {"q-t", KEY_NAME + ROLE_Q_T, "NAME", 0, "Name of the teacher's queries in the files; default q_t", 0},
    {"k-t", KEY_NAME + ROLE_K_T, "NAME", 0, "Name of the teacher's keys; default k_t", 0},
    {"q-s", KEY_NAME + ROLE_Q_S, "NAME", 0, "Name of the student's queries; default q_s", 0},
    {"k-s", KEY_NAME + ROLE_K_S, "NAME", 0, "Name of the student's keys; default k_s", 0},
    {"lse-t", KEY_NAME + ROLE_LSE_T, "NAME", 0, "Name of the teacher's log-sum-exp; default lse_t, if present", 0},
    {"layout", KEY_LAYOUT, "bhnd|bnhd", 0,
     "Order of the axes: batch, heads, length, dim (default), or batch, length, heads, dim, which PyTorch's flash "
     "attention and streamkl.attention_kl have",
     0},
    {"key-lengths", KEY_NAME + ROLE_KEY_LENGTHS, "LIST|NAME", 0,
     "Number of keys per sequence that are not padding: integers separated by commas, or a tensor", 0},
    {"cu-seqlens-q", KEY_NAME + ROLE_CU_SEQLENS_Q, "LIST|NAME", 0,
     "Packed queries: the offset of each sequence, and the end of the last one", 0},
    {"cu-seqlens-k", KEY_NAME + ROLE_CU_SEQLENS_K, "LIST|NAME", 0, "Packed keys; default equal to the queries", 0},
    {"key-begin", KEY_NAME + ROLE_KEY_BEGIN, "LIST|NAME", 0,
     "Row bounds: the first key that a query may attend to, one integer per query", 0},
    {"key-end", KEY_NAME + ROLE_KEY_END, "LIST|NAME", 0, "Row bounds: the key after the last one", 0},
    {0},
};

static const char *parse_layout(const char *text, void *value)
{
    const bool bnhd = strcmp(text, "bnhd") == 0;
    if (!bnhd && strcmp(text, "bhnd") != 0)
        return "bhnd or bnhd";
    *(kl_layout *)value = bnhd ? LAYOUT_BNHD : LAYOUT_BHND;
    return NULL;
}

#define NAME_FIELD(role)                                                                                             \
    {                                                                                                                \
        KEY_NAME + (role), parse_string, offsetof(kl_request, names) + (role) * sizeof(const char *)                 \
    }

static const option_field fields[] = {
    NAME_FIELD(ROLE_Q_T),
    NAME_FIELD(ROLE_K_T),
    NAME_FIELD(ROLE_Q_S),
    NAME_FIELD(ROLE_K_S),
    NAME_FIELD(ROLE_LSE_T),
    NAME_FIELD(ROLE_KEY_LENGTHS),
    NAME_FIELD(ROLE_CU_SEQLENS_Q),
    NAME_FIELD(ROLE_CU_SEQLENS_K),
    NAME_FIELD(ROLE_KEY_BEGIN),
    NAME_FIELD(ROLE_KEY_END),
    {KEY_LAYOUT, parse_layout, offsetof(kl_request, layout)},
    {0, NULL, 0},
};

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    kl_request *const request = state->input;
    if (key == ARGP_KEY_ARGS) {
        request->files = state->argv + state->next;
        request->file_count = (size_t)(state->argc - state->next);
        return 0;
    }
    if (key == ARGP_KEY_NO_ARGS) {
        cli_fail(CLI_BAD_INPUT, "FILE: at least one must be given; see %s --help", program_invocation_name);
        return EINVAL;
    }
    return options_store(fields, options, key, text, request);
}

const struct argp kl_input_argp = {.options = options, .parser = parse_option};
