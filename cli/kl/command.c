/* streamkl kl: the command line and the order of the steps. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"
#include "cli/common/options.h"

static const char doc[] =
    "KL divergence between the attention of a teacher (q_t, k_t) and a student (q_s, k_s), read from safetensors "
    "or .npy files. Tensors are [B, H, N, D]; leading axes may be missing. The numbers of heads may differ: query "
    "heads "
    "may share key heads (GQA), and a student head may learn the mean of a group of teacher heads."
    "\vThe tensors q_t, k_t, q_s, k_s are found by name in all files. ROLE=FILE gives the role of a file's tensor; "
    "an "
    ".npy file always needs it. Optional tensors are used if present: lse_t [B, H, N], the log-sum-exp of every "
    "teacher "
    "row; key_lengths [B]; cu_seqlens_q and cu_seqlens_k [sequences + 1], the offsets of packed sequences in [H, "
    "total, "
    "D]; key_begin and key_end [B, N], packed [total]; sink_t and sink_s [H].\n"
    "\n"
    "Row bounds limit the keys of every query to key_begin <= j < key_end, besides all other masks. One of the two "
    "is "
    "enough. Neither may decrease within a sequence.\n"
    "\n"
    "A sink is one more outcome of the softmax of a head. Its logit is a number per head, and it belongs to no key. "
    "Teacher and student must both have sinks, and all LSEs include them. A head without a sink has -inf.\n"
    "\n"
    "With --student indexer the student's logits are sum_g w_s[g] relu(<q_s[g], k_s>): w_s [B, H, N, G] holds the "
    "weights of G index heads, q_s [B, H * G, N, D] their queries. The student head learns the mean of its teacher "
    "heads. indices [B, H, N, k], if present, makes it sparse: the top-k keys of every query; -1 means none.\n"
    "\n"
    "A mean is over the rows of all batches and student heads that attend to at least one key. --grad writes the "
    "gradients of the loss that --reduction names; with none, those of the sum.\n"
    "\n"
    "Times are kernel times: from the clock on the CPU, from events in the stream on a GPU. They exclude reading "
    "files "
    "and copying tensors to and from a GPU. The workspace is the memory that the library needs on the device in "
    "addition to the tensors.\n"
    "\n"
    "Examples:\n"
    "  streamkl kl pair.safetensors --causal\n"
    "  streamkl kl q_t=a.npy k_t=b.npy q_s=c.npy k_s=d.npy --json\n"
    "  streamkl kl teacher.safetensors student.safetensors --q-t q --k-t k\n"
    "  streamkl kl pair.safetensors --causal --window 1024,0 --softcap-t 50\n"
    "  streamkl kl packed.safetensors --causal --cu-seqlens-q 0,512,2048\n"
    "  streamkl kl pair.safetensors --key-end ends --sink-t 0.5,-1.25 --sink-s 0.5,-1.25\n"
    "  streamkl kl pair.safetensors --out rows.safetensors --grad grad.safetensors\n"
    "  streamkl kl layer.safetensors --student indexer --causal --lse-t lse --grad grad.safetensors\n"
    "  streamkl kl pair.safetensors --device cuda:1 --explain";

enum {
    KEY_REDUCTION = OPTIONS_COMMAND_KEYS,
    KEY_OUT,
    KEY_GRAD,
    KEY_GRAD_TEACHER,
    KEY_GRAD_F32,
    KEY_EXPLAIN,
    KEY_JSON,
    KEY_STUDENT,
    KEY_W_S,
    KEY_INDICES,
    KEY_INDEX_LINEAR,
    KEY_SINK_T,
    KEY_SINK_S,
};

enum { GROUP_INPUT = 1, GROUP_STUDENT, GROUP_SINKS, GROUP_RESULT, GROUP_PROBLEM, GROUP_ENGINE };

static const struct argp_option options[] = {
    {NULL, 0, NULL, 0, "Student:", GROUP_STUDENT},
    {"student", KEY_STUDENT, "attention|indexer", 0, "Kind of student; default attention", 0},
    {"w-s", KEY_W_S, "NAME", 0, "Name of the indexer's weights; default w_s", 0},
    {"indices", KEY_INDICES, "NAME", 0, "Name of the top-k indices of a sparse indexer; default indices, if present",
     0},
    {"index-linear", KEY_INDEX_LINEAR, NULL, 0, "An indexer without ReLU", 0},
    {NULL, 0, NULL, 0, "Sinks:", GROUP_SINKS},
    {"sink-t", KEY_SINK_T, "LIST|NAME", 0,
     "Logits of the teacher's sinks: one number per head, separated by commas, or a tensor; default sink_t, if "
     "present",
     0},
    {"sink-s", KEY_SINK_S, "LIST|NAME", 0, "Logits of the student's sinks; default sink_s, if present", 0},
    {NULL, 0, NULL, 0, "Result:", GROUP_RESULT},
    {"reduction", KEY_REDUCTION, "mean|sum|none", 0, "One number, or one per row; default mean", 0},
    {"out", KEY_OUT, "FILE", 0,
     "Write kl, lse_t, lse_s of every row as safetensors; for an indexer also cross_entropy, entropy, mass", 0},
    {"grad", KEY_GRAD, "FILE", 0,
     "Write the gradients dq_s, dk_s as safetensors; for an indexer also dw_s, with sinks also dsink_s", 0},
    {"grad-teacher", KEY_GRAD_TEACHER, NULL, 0, "Write dq_t, dk_t to the same file, with sinks also dsink_t", 0},
    {"grad-f32", KEY_GRAD_F32, NULL, 0, "Gradients in f32 instead of the type of their tensors", 0},
    {"explain", KEY_EXPLAIN, NULL, 0, "Show the kernels that run, and the reason for each choice", 0},
    {"json", KEY_JSON, NULL, 0, "Print one JSON object instead of the table", 0},
    {0},
};

static const char *parse_student(const char *text, void *value)
{
    const bool indexer = strcmp(text, "indexer") == 0;
    if (!indexer && strcmp(text, "attention") != 0)
        return "attention or indexer";
    *(skl_student *)value = indexer ? SKL_STUDENT_INDEXER : SKL_STUDENT_ATTENTION;
    return NULL;
}

static const option_field fields[] = {
    {KEY_STUDENT, parse_student, offsetof(kl_request, problem.student)},
    {KEY_W_S, parse_string, offsetof(kl_request, names[ROLE_W_S])},
    {KEY_INDICES, parse_string, offsetof(kl_request, names[ROLE_INDICES])},
    {KEY_INDEX_LINEAR, parse_flag, offsetof(kl_request, problem.index_linear)},
    {KEY_SINK_T, parse_string, offsetof(kl_request, names[ROLE_SINK_T])},
    {KEY_SINK_S, parse_string, offsetof(kl_request, names[ROLE_SINK_S])},
    {KEY_REDUCTION, parse_reduction, offsetof(kl_request, reduction)},
    {KEY_OUT, parse_string, offsetof(kl_request, out_path)},
    {KEY_GRAD, parse_string, offsetof(kl_request, grad_path)},
    {KEY_GRAD_TEACHER, parse_flag, offsetof(kl_request, grad_teacher)},
    {KEY_GRAD_F32, parse_flag, offsetof(kl_request, problem.grad_f32)},
    {KEY_EXPLAIN, parse_flag, offsetof(kl_request, explain)},
    {KEY_JSON, parse_flag, offsetof(kl_request, json)},
    {0, NULL, 0},
};

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    kl_request *const request = state->input;
    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = request;
        state->child_inputs[1] = &request->problem;
        state->child_inputs[2] = &request->options;
        return 0;
    }
    return options_store(fields, options, key, text, request);
}

/* Refuses options that have no effect. */
static int check_student(const kl_request *request)
{
    if (kl_is_indexer(&request->problem))
        return request->grad_teacher
                   ? cli_fail(CLI_BAD_INPUT,
                              "--grad-teacher: not available with --student indexer, whose teacher is fixed")
                   : CLI_OK;
    const char *const needless = request->names[ROLE_W_S]        ? "w-s"
                                 : request->names[ROLE_INDICES]  ? "indices"
                                 : request->problem.index_linear ? "index-linear"
                                                                 : NULL;
    return needless ? cli_fail(CLI_BAD_INPUT, "--%s: --student indexer must be given too", needless) : CLI_OK;
}

static int parse_command_line(kl_request *request, int argc, char **argv)
{
    static const struct argp_child children[] = {
        {&kl_input_argp, 0, "Input:", GROUP_INPUT},
        {&problem_argp, 0, "Masks, scales and direction:", GROUP_PROBLEM},
        {&engine_argp, 0, "Engine:", GROUP_ENGINE},
        {0},
    };
    static const struct argp argp = {
        .options = options, .parser = parse_option, .args_doc = "FILE...", .doc = doc, .children = children};
    request->problem = skl_problem_default();
    request->options = skl_options_default();
    const int refused = options_parse(&argp, argc, argv, 0, request);
    if (refused)
        return refused;
    const int exit_code = check_student(request);
    if (exit_code != CLI_OK)
        return exit_code;
    const uint32_t weights = kl_is_indexer(&request->problem) ? SKL_DW_S : 0;
    const uint32_t student = request->grad_path ? SKL_DQ_S | SKL_DK_S | weights : 0;
    const uint32_t teacher = request->grad_teacher ? SKL_DQ_T | SKL_DK_T : 0;
    request->problem.gradients = student | teacher;
    return kl_outputs_check(request);
}

int cmd_kl(int argc, char **argv)
{
    kl_request request = {.files = NULL};
    int exit_code = parse_command_line(&request, argc, argv);
    if (exit_code != CLI_OK)
        return exit_code;
    kl_inputs inputs = {.files = {NULL, 0}};
    kl_results results = {.kl = NULL};
    exit_code = kl_inputs_load(&inputs, &request);
    if (exit_code == CLI_OK)
        exit_code = kl_compute(&results, &inputs, &request);
    if (exit_code == CLI_OK)
        exit_code = kl_files_unchanged(&inputs.files);
    if (exit_code == CLI_OK)
        exit_code = kl_outputs_write(&results, &inputs, &request);
    if (exit_code == CLI_OK)
        exit_code = kl_report(&results, &inputs, &request);
    kl_results_free(&results);
    kl_inputs_free(&inputs);
    return exit_code;
}
