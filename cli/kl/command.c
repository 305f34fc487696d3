/* streamkl kl: the command line and the order of the steps. */
#include "cli/common/cli.h"
#include "cli/kl/kl.h"

static const char doc[] =
    "KL divergence between the attention of a teacher (q_t, k_t) and a student (q_s, k_s), read from safetensors "
    "or .npy files. Tensors are [B, H, N, D]; leading axes may be missing. The numbers of heads may differ: "
    "query heads may share key heads (GQA), and a student head may learn the mean of a group of teacher heads."
    "\vThe tensors q_t, k_t, q_s, k_s are found by name in all files. ROLE=FILE gives the role of a file's "
    "tensor; an .npy file always needs it. Optional tensors are used if present: lse_t [B, H, N], the "
    "log-sum-exp of every teacher row; key_lengths [B]; cu_seqlens_q and cu_seqlens_k [sequences + 1], the "
    "offsets of packed sequences in [H, total, D]; key_begin and key_end [B, N], packed [total]; sink_t and "
    "sink_s [H].\n"
    "\n"
    "Row bounds limit the keys of every query to key_begin <= j < key_end, besides all other masks. One of the "
    "two is enough. Neither may decrease within a sequence.\n"
    "\n"
    "A sink is one more outcome of the softmax of a head. Its logit is a number per head, and it belongs to no "
    "key. Teacher and student must both have sinks, and all LSEs include them. A head without a sink has -inf.\n"
    "\n"
    "With --student indexer the student's logits are sum_g w_s[g] relu(<q_s[g], k_s>): w_s [B, H, N, G] holds "
    "the weights of G index heads, q_s [B, H * G, N, D] their queries. The student head learns the mean of its "
    "teacher heads. indices [B, H, N, k], if present, makes it sparse: the top-k keys of every query; -1 means "
    "none.\n"
    "\n"
    "A mean is over the rows of all batches and student heads that attend to at least one key. --grad writes the "
    "gradients of the loss that --reduction names; with none, those of the sum.\n"
    "\n"
    "Times are kernel times: from the clock on the CPU, from events in the stream on a GPU. They exclude reading "
    "files and copying tensors to and from a GPU. The workspace is the memory that the library needs on the "
    "device in addition to the tensors.\n"
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

const char *const kl_layout_names[] = {[LAYOUT_BHND] = "bhnd", [LAYOUT_BNHD] = "bnhd", [LAYOUT_DEFAULT] = "bhnd"};
const char *const kl_reduction_names[] = {"mean", "sum", "none"};

#define NAME(role) offsetof(kl_request, names[role])

const cli_option kl_pair_options[] = {
    {"q-t", "NAME", parse_string, NAME(ROLE_Q_T), "Name of the teacher's queries in the files; default q_t"},
    {"k-t", "NAME", parse_string, NAME(ROLE_K_T), "Name of the teacher's keys; default k_t"},
    {"q-s", "NAME", parse_string, NAME(ROLE_Q_S), "Name of the student's queries; default q_s"},
    {"k-s", "NAME", parse_string, NAME(ROLE_K_S), "Name of the student's keys; default k_s"},
    {"lse-t", "NAME", parse_string, NAME(ROLE_LSE_T), "Name of the teacher's log-sum-exp; default lse_t, if present"},
    {0},
};

const cli_option kl_sequence_options[] = {
    {"layout", "bhnd|bnhd", PARSE_WORD, offsetof(kl_request, layout),
     "Order of the axes: batch, heads, length, dim (default), or batch, length, heads, dim, which PyTorch's flash "
     "attention and streamkl.attention_kl have"},
    {"key-lengths", "LIST|NAME", parse_string, NAME(ROLE_KEY_LENGTHS),
     "Number of keys per sequence that are not padding: integers separated by commas, or a tensor"},
    {"cu-seqlens-q", "LIST|NAME", parse_string, NAME(ROLE_CU_SEQLENS_Q),
     "Packed queries: the offset of each sequence, and the end of the last one"},
    {"cu-seqlens-k", "LIST|NAME", parse_string, NAME(ROLE_CU_SEQLENS_K), "Packed keys; default equal to the queries"},
    {"key-begin", "LIST|NAME", parse_string, NAME(ROLE_KEY_BEGIN),
     "Row bounds: the first key that a query may attend to, one integer per query"},
    {"key-end", "LIST|NAME", parse_string, NAME(ROLE_KEY_END), "Row bounds: the key after the last one"},
    {0},
};

static const cli_option student_options[] = {
    {"student", "attention|indexer", PARSE_WORD, offsetof(kl_request, problem.student),
     "Kind of student; default attention"},
    {"w-s", "NAME", parse_string, NAME(ROLE_W_S), "Name of the indexer's weights; default w_s"},
    {"indices", "NAME", parse_string, NAME(ROLE_INDICES),
     "Name of the top-k indices of a sparse indexer; default indices, if present"},
    {"index-linear", NULL, parse_flag, offsetof(kl_request, problem.index_linear), "An indexer without ReLU"},
    {0},
};

static const cli_option sink_options[] = {
    {"sink-t", "LIST|NAME", parse_string, NAME(ROLE_SINK_T),
     "Logits of the teacher's sinks: one number per head, separated by commas, or a tensor; default sink_t, if "
     "present"},
    {"sink-s", "LIST|NAME", parse_string, NAME(ROLE_SINK_S),
     "Logits of the student's sinks; default sink_s, if present"},
    {0},
};

static const cli_option result_options[] = {
    {"reduction", "mean|sum|none", PARSE_WORD, offsetof(kl_request, reduction),
     "One number, or one per row; default mean"},
    {"out", "FILE", parse_string, offsetof(kl_request, out_path),
     "Write kl, lse_t, lse_s of every row as safetensors; for an indexer also cross_entropy, entropy, mass"},
    {"grad", "FILE", parse_string, offsetof(kl_request, grad_path),
     "Write the gradients dq_s, dk_s as safetensors; for an indexer also dw_s, with sinks also dsink_s"},
    {"grad-teacher", NULL, parse_flag, offsetof(kl_request, grad_teacher),
     "Write dq_t, dk_t to the same file, with sinks also dsink_t"},
    {"grad-f32", NULL, parse_flag, offsetof(kl_request, problem.grad_f32),
     "Gradients in f32 instead of the type of their tensors"},
    {"explain", NULL, parse_flag, offsetof(kl_request, explain),
     "Show the kernels that run, and the reason for each choice"},
    {"json", NULL, parse_flag, offsetof(kl_request, json), "Print one JSON object instead of the table"},
    {0},
};

static const option_group groups[] = {
    {"Input:", kl_pair_options, 0},
    {"Layout and sequences:", kl_sequence_options, 0},
    {"Student:", student_options, 0},
    {"Sinks:", sink_options, 0},
    {"Result:", result_options, 0},
    {"Masks:", mask_options, offsetof(kl_request, problem)},
    {"Scales and direction:", logit_options, offsetof(kl_request, problem)},
    {"Engine:", engine_options, offsetof(kl_request, options)},
    {0},
};

/* Refuses options that have no effect. */
static void check_student(const kl_request *request)
{
    const bool indexer = kl_is_indexer(&request->problem);
    if (indexer && request->grad_teacher)
        cli_fail(CLI_BAD_INPUT, "--grad-teacher: not available with --student indexer, whose teacher is fixed");
    const char *const needless = request->names[ROLE_W_S]        ? "w-s"
                                 : request->names[ROLE_INDICES]  ? "indices"
                                 : request->problem.index_linear ? "index-linear"
                                                                 : NULL;
    if (!indexer && needless)
        cli_fail(CLI_BAD_INPUT, "--%s: --student indexer must be given too", needless);
}

static void check_outputs(const kl_request *request)
{
    if (request->grad_teacher && request->grad_path == NULL)
        cli_fail(CLI_BAD_INPUT, "--grad-teacher: --grad FILE must be given too");
    output_file outputs[2];
    size_t count = 0;
    if (request->out_path)
        outputs[count++] = (output_file){"--out", request->out_path};
    if (request->grad_path)
        outputs[count++] = (output_file){"--grad", request->grad_path};
    kl_outputs_check(request, outputs, count);
}

void kl_request_parse(kl_request *input, const command_line *command, int argc, char **argv, void *request)
{
    input->problem = skl_problem_default();
    input->problem.gradients = 0;
    input->options = options_watched();
    input->layout = LAYOUT_DEFAULT;
    input->file_count = (size_t)options_parse(command, argc, argv, request);
    input->files = argv + argc - input->file_count;
}

int cmd_kl(int argc, char **argv)
{
    static const command_line command = {doc, groups, "FILE..."};
    kl_request request = {.reduction = REDUCTION_MEAN};
    kl_request_parse(&request, &command, argc, argv, &request);
    check_student(&request);
    const uint32_t weights = kl_is_indexer(&request.problem) ? SKL_DW_S : 0;
    request.problem.gradients =
        (request.grad_path ? SKL_DQ_S | SKL_DK_S | weights : 0) | (request.grad_teacher ? SKL_DQ_T | SKL_DK_T : 0);
    check_outputs(&request);
    kl_inputs inputs = {.files = {NULL, 0}};
    kl_results results = {.kl = NULL};
    kl_inputs_load(&inputs, &request);
    kl_compute(&results, &inputs, &request);
    kl_files_unchanged(&inputs.files);
    kl_outputs_write(&results, &inputs, &request);
    kl_report(&results, &inputs, &request);
    kl_results_free(&results);
    kl_inputs_free(&inputs);
    return CLI_OK;
}
