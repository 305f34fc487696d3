#!/usr/bin/env python3
"""Times StreamKL on a GPU beside what PyTorch has, in one run, and checks what it computed.

    bench/peers.py                                   # 16 heads of 64 and of 128, 8192 queries and keys, bf16
    bench/peers.py --only forward --lengths 4096,8192,16384 --masks causal
    bench/peers.py --csv bench/results/gpu.csv       # appends its figures

The peers, on tensors of the same shape:

    fa2     scaled_dot_product_attention by FlashAttention-2: the yardstick of kernel quality. Its forward executes two
            matmuls a pair, as ours does; its backward five, ours needs four
    cudnn   the same by cuDNN
    eager   attention KL as it is written without us: two N x N logits, two log_softmax, one sum

Every method has a warm-up, then all take turns. A turn is a few calls in a row between two CUDA events, so that no launch
is waited for; the median of all turns counts. KL and gradients of the first and last head are compared with float64.
"""

import argparse
import csv
import ctypes
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent

# ---- The library, as its header declares it ----------------------------------------------------------------------------

SIZE, I64, I32, FLOAT, POINTER = ctypes.c_size_t, ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
ENUM = ctypes.c_int
SKL_BF16, SKL_CUDA = 2, 1
SKL_DQ_S, SKL_DK_S = 4, 8
FORWARD, BACKWARD, ONE_PASS = "forward", "backward", "one pass"
STEP = "forward + backward"
OPERATIONS = {FORWARD: 0, BACKWARD: 1, ONE_PASS: 2}  # skl_op


def struct(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": [(key, kind) for kind, keys in fields for key in keys.split()]})


Problem = struct(
    "Problem",
    (SIZE, "struct_size"),
    (ENUM, "dtype_t dtype_s"),
    (I32, "grad_f32"),
    (ctypes.c_uint32, "gradients"),
    (ENUM, "direction"),
    (I64, "batch len_q len_k heads_t heads_s key_heads_t key_heads_s dim_t dim_s"),
    (FLOAT, "scale_t scale_s softcap_t softcap_s"),
    (I32, "causal"),
    (I64, "window_left window_right"),
    (ENUM, "positions"),
    (I64, "offset_q offset_k"),
    (I32, "packed"),
    (I64, "total_q total_k"),
)
Tensor = struct("Tensor", (POINTER, "data"), (I64, "stride_batch stride_head stride_row"))  # skl_input and skl_output
Inputs = struct(
    "Inputs",
    (SIZE, "struct_size"),
    (Tensor, "q_t k_t q_s k_s lse_t lse_s kl dot_t grad_kl"),
    (POINTER, "cu_seqlens_q cu_seqlens_k key_lengths"),
)
Rows = struct("Rows", (SIZE, "struct_size"), (Tensor, "kl lse_t lse_s dot_t"))
Gradients = struct("Gradients", (SIZE, "struct_size"), (Tensor, "dq_t dk_t dq_s dk_s"))
Options = struct(
    "Options",
    (SIZE, "struct_size"),
    (ENUM, "device"),
    (I32, "device_index threads"),
    (ctypes.c_char_p, "kernel"),
    (POINTER, "progress progress_user"),
)


def sized(kind, **values):
    return kind(struct_size=ctypes.sizeof(kind), **values)


def described(tensor):
    """[batch, heads, length, dim], or [batch, heads, length] of a row vector."""
    return Tensor(tensor.data_ptr(), *tensor.stride()[:3])


class Library:
    def __init__(self, path):
        self.calls = calls = ctypes.CDLL(str(path))
        calls.skl_last_error.restype = calls.skl_plan_kernel.restype = calls.skl_version.restype = ctypes.c_char_p
        calls.skl_plan_workspace_size.restype = SIZE
        calls.skl_plan_workspace_size.argtypes = [POINTER, ENUM]
        calls.skl_plan_kernel.argtypes = [POINTER]
        calls.skl_plan_destroy.argtypes = [POINTER]
        calls.skl_plan_destroy.restype = None
        calls.skl_forward.argtypes = [POINTER, POINTER, POINTER, POINTER, SIZE, POINTER]
        calls.skl_backward.argtypes = [POINTER, POINTER, POINTER, POINTER, SIZE, POINTER]
        calls.skl_forward_backward.argtypes = [POINTER, POINTER, POINTER, POINTER, POINTER, SIZE, POINTER]

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.calls.skl_last_error().decode())


class Plan:
    """The three calls on one set of tensors, and where their results are."""

    def __init__(self, library, tensors, causal, kernel=None, device=SKL_CUDA):
        self.library, self.handle = library, POINTER()
        q_t, k_t, q_s, k_s = tensors
        batch, heads, length, dim = q_s.shape
        problem = sized(
            Problem, dtype_t=SKL_BF16, dtype_s=SKL_BF16, gradients=SKL_DQ_S | SKL_DK_S, batch=batch, len_q=length,
            len_k=length, heads_t=heads, heads_s=heads, dim_t=dim, dim_s=dim, causal=int(causal), window_left=-1,
            window_right=-1,
        )  # fmt: skip
        options = sized(Options, device=device, kernel=kernel.encode() if kernel else None)
        created = library.calls.skl_plan_create(ctypes.byref(self.handle), ctypes.byref(problem), ctypes.byref(options))
        library.check(created)
        self.kernel = library.calls.skl_plan_kernel(self.handle).decode()
        self.workspace_size = max(library.calls.skl_plan_workspace_size(self.handle, op) for op in OPERATIONS.values())
        self.workspace = torch.empty(max(self.workspace_size, 1), dtype=torch.uint8, device=q_s.device)
        self.kl, self.lse_t, self.lse_s = (q_s.new_empty(q_s.shape[:3], dtype=torch.float32) for _ in range(3))
        self.dq, self.dk = torch.empty_like(q_s), torch.empty_like(k_s)
        given = {"q_t": described(q_t), "k_t": described(k_t), "q_s": described(q_s), "k_s": described(k_s)}
        saved = {"lse_t": described(self.lse_t), "lse_s": described(self.lse_s)}
        self.inputs, self.saved = sized(Inputs, **given), sized(Inputs, **given, **saved)
        self.rows, self.only_kl = sized(Rows, kl=described(self.kl), **saved), sized(Rows, kl=described(self.kl))
        self.gradients = sized(Gradients, dq_s=described(self.dq), dk_s=described(self.dk))
        self.keep = tensors  # the structs above know only their addresses

    def __del__(self):
        self.library.calls.skl_plan_destroy(self.handle)

    def run(self, operation, stream=None):
        calls, address = self.library.calls, ctypes.byref
        rest = (self.workspace.data_ptr(), self.workspace_size, stream)
        if operation == FORWARD:
            status = calls.skl_forward(self.handle, address(self.inputs), address(self.rows), *rest)
        elif operation == BACKWARD:
            status = calls.skl_backward(self.handle, address(self.saved), address(self.gradients), *rest)
        else:
            status = calls.skl_forward_backward(
                self.handle, address(self.saved), address(self.only_kl), address(self.gradients), *rest
            )
        self.library.check(status)


# ---- Methods -------------------------------------------------------------------------------------------------------------


@dataclass
class Method:
    """What is timed: a function for each pass, or why there is none."""

    name: str
    passes: dict = field(default_factory=dict)
    matmuls: dict = field(default_factory=dict)  # N x N x d matmuls that a pass is credited with
    results: dict = field(default_factory=dict)  # kl, dq, dk, where it computes them
    refusal: str = ""


def ours(library, tensors, causal, wanted, kernel):
    plan = Plan(library, tensors, causal, kernel)
    stream = torch.cuda.current_stream().cuda_stream

    def run(operation):
        return lambda: plan.run(operation, stream)

    plan.run(FORWARD, stream)  # the LSEs that the other passes read
    method = Method("streamkl", {name: run(name) for name in OPERATIONS if name in wanted})
    method.matmuls = {FORWARD: 2, BACKWARD: 4, ONE_PASS: 4}
    method.results = {"kl": plan.kl, "dq": plan.dq, "dk": plan.dk}
    return method, plan


def with_autograd(name, forward, leaves, wanted, matmuls):
    """Forward without a graph, backward through one that is kept."""

    def forward_alone():
        with torch.no_grad():
            return forward()

    method = Method(name, {FORWARD: forward_alone} if FORWARD in wanted else {}, matmuls)
    if BACKWARD in wanted:
        result = forward()
        upstream = torch.ones_like(result)
        method.passes[BACKWARD] = lambda: torch.autograd.grad(result, leaves, upstream, retain_graph=True)
    return method


def attention(name, backend):
    def make(tensors, causal, wanted):
        from torch.nn.attention import sdpa_kernel

        leaves = [tensor.detach().clone().requires_grad_() for tensor in (tensors[2], tensors[3], tensors[1])]

        def forward():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*leaves, is_causal=causal)

        return with_autograd(name, forward, leaves, wanted, {FORWARD: 2, BACKWARD: 5})

    return make


def eager_kl(q_t, k_t, q_s, k_s, causal):
    scale = q_s.shape[-1] ** -0.5
    x, y = (q_t @ k_t.mT) * scale, (q_s @ k_s.mT) * scale
    if causal:
        hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        x, y = x.masked_fill(hidden, float("-inf")), y.masked_fill(hidden, float("-inf"))
    log_p, log_s = torch.log_softmax(x.float(), -1), torch.log_softmax(y.float(), -1)
    terms = log_p.exp() * (log_p - log_s)
    return (terms.masked_fill(hidden, 0) if causal else terms).sum(-1)


def eager(tensors, causal, wanted):
    q_t, k_t = tensors[:2]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[2:]]

    def forward():
        return eager_kl(q_t, k_t, *leaves, causal)

    method = with_autograd("eager", forward, leaves, wanted, {FORWARD: 2, BACKWARD: 4})
    with torch.no_grad():
        method.results["kl"] = forward()
    if BACKWARD in wanted:
        method.results["dq"], method.results["dk"] = method.passes[BACKWARD]()
    return method


def peers():
    from torch.nn.attention import SDPBackend

    return {
        "fa2": attention("fa2", SDPBackend.FLASH_ATTENTION),
        "cudnn": attention("cudnn", SDPBackend.CUDNN_ATTENTION),
        "eager": eager,
    }


def make_peer(name, tensors, causal, wanted):
    """A peer that cannot run says why, and the others go on."""
    try:
        method = peers()[name](tensors, causal, wanted)
        for run in method.passes.values():
            run()
        torch.cuda.synchronize()
        return method
    except RuntimeError as error:  # out of memory is one
        return Method(name, refusal=str(error).strip().split("\n")[0])
    finally:
        torch.cuda.empty_cache()


# ---- Time ----------------------------------------------------------------------------------------------------------------


def milliseconds(run, calls):
    """Of one call, when `calls` of them follow each other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def take_turns(methods, rounds, turn_ms):
    """{(method, pass): times}, in milliseconds."""
    runs = {(method.name, name): run for method in methods for name, run in method.passes.items()}
    calls = {}
    for key, run in runs.items():
        run()
        calls[key] = max(1, min(100, round(turn_ms / milliseconds(run, 1))))
    times = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            times[key].append(milliseconds(run, calls[key]))
    return times


# ---- Errors --------------------------------------------------------------------------------------------------------------


def exact_head(tensors, head, causal, block=1024):
    """KL, dq and dk of one head of batch 0 in float64, block by block of queries."""
    q_t, k_t, q_s, k_s = (tensor[0, head].double() for tensor in tensors)
    length, dim = q_s.shape
    scale, positions = dim**-0.5, torch.arange(length, device=q_s.device)
    kl, dq, dk = torch.empty_like(q_s[:, 0]), torch.empty_like(q_s), torch.zeros_like(k_s)
    for begin in range(0, length, block):
        rows = slice(begin, min(begin + block, length))
        x, y = scale * q_t[rows] @ k_t.T, scale * q_s[rows] @ k_s.T
        if causal:
            hidden = positions[None, :] > positions[rows, None]
            x, y = x.masked_fill(hidden, float("-inf")), y.masked_fill(hidden, float("-inf"))
        log_p, log_s = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
        p, s = log_p.exp(), log_s.exp()
        difference = torch.where(p > 0, log_p - log_s, 0)  # hidden keys are inf - inf
        kl[rows] = (p * difference).sum(-1)
        dq[rows] = scale * (s - p) @ k_s
        dk += scale * (s - p).T @ q_s[rows]
    return {"kl": kl, "dq": dq, "dk": dk}


# Beyond these a result is wrong, not merely rounded to bf16 on its way. A NaN is beyond anything.
WRONG = {"kl": 1e-4, "dq": 2e-2, "dk": 2e-2}


def relative_errors(methods, tensors, causal):
    """{(method, result): largest relative error of the first and the last head}, as norms."""
    errors = {}
    for head in {0, tensors[0].shape[1] - 1}:
        exact = exact_head(tensors, head, causal)
        for method in methods:
            for name, result in method.results.items():
                error = ((result[0, head].double() - exact[name]).norm() / exact[name].norm()).item()
                errors[method.name, name] = max(errors.get((method.name, name), 0), error)
    return errors


# ---- What is shown -------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    heads: int
    length: int
    dim: int
    causal: bool

    def __str__(self):
        return f"H={self.heads} N={self.length} d={self.dim} {'causal' if self.causal else 'full'}"

    @property
    def pairs(self):
        return self.heads * self.length * (self.length + 1) / 2 if self.causal else self.heads * self.length**2


def medians(times):
    """Of every method and pass; and of forward + backward, which is what the one pass saves a caller without us."""
    found = {key: statistics.median(turns) for key, turns in times.items()}
    for method in ("streamkl", "eager"):
        if {(method, FORWARD), (method, BACKWARD)} <= set(found):
            found[method, STEP] = found[method, FORWARD] + found[method, BACKWARD]
    return found


def compared_with(found, operation):
    """[(what, milliseconds)]: what stands beside a pass of ours."""
    if operation == ONE_PASS:
        return [(f"{method} {STEP}", found[method, STEP]) for method in ("streamkl", "eager") if (method, STEP) in found]
    return [(f"{method} {name}", ms) for (method, name), ms in found.items() if name == operation and method != "streamkl"]


def print_case(case, methods, times, errors, plan):
    print(f"\n{case}: {plan.kernel}, workspace {plan.workspace_size} bytes")
    found = medians(times)
    print(f"  {'method':10} {'pass':10} {'median':>10} {'fastest':>10} {'TFLOP/s':>9} {'ours/this':>10}")
    for method in methods:
        if method.refusal:
            print(f"  {method.name:10} did not run: {method.refusal}")
        for name in method.passes:
            median, least = found[method.name, name], min(times[method.name, name])
            rate = method.matmuls[name] * 2 * case.pairs * case.dim / median * 1e-9
            mine = found.get(("streamkl", name)) if method.name != "streamkl" else None
            ratio = f"{mine / median:10.2f}" if mine else ""
            print(f"  {method.name:10} {name:10} {median:7.3f} ms {least:7.3f} ms {rate:9.1f} {ratio}")
    if one_pass := found.get(("streamkl", ONE_PASS)):
        for what, other in compared_with(found, ONE_PASS):
            print(f"  one pass / {what}: {one_pass / other:.2f}")
    for method in methods:
        shown = [f"{name} {errors[method.name, name]:.1e}" for name in method.results if (method.name, name) in errors]
        if shown:
            print(f"  relative error of {method.name:9} {', '.join(shown)}")


def figures(case, times, errors, plan):
    """Rows of bench/results/gpu.csv: measure, shape, value, unit, beside, ratio."""
    found = medians(times)
    for name, operation in times:
        if name != "streamkl":
            continue
        own = found[name, operation]
        beside = [[f"{what} {ms:.3f} ms", f"{own / ms:.2f}"] for what, ms in compared_with(found, operation)]
        for compared in beside or [["", ""]]:
            yield [f"{operation} {plan.kernel}", str(case), f"{own:.3f}", "ms", *compared]
    for (name, result), own in errors.items():
        if name == "streamkl":
            other = errors.get(("eager", result))
            compared = [f"eager {other:.2e}", f"{own / other:.2g}"] if other else ["", ""]
            yield [f"relative error of {result} {plan.kernel}", str(case), f"{own:.2e}", "", *compared]


def append_csv(path, rows, commit):
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow("date gpu commit measure shape value unit beside ratio".split())
        for row in rows:
            writer.writerow([date.today().isoformat(), torch.cuda.get_device_name(), commit, *row])


# ---- The command line ----------------------------------------------------------------------------------------------------


def find_library():
    built = [ROOT / "build" / preset / "src/libstreamkl.so" for preset in ("release", "gpu")]
    return next((path for path in built if path.exists()), built[0])


def current_commit():
    asked = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip()


def numbers(text):
    return [int(number) for number in text.split(",")]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=find_library(), help="libstreamkl.so; default that of build/release")
    parser.add_argument("--kernel", help="force a kernel that `streamkl info` lists")
    parser.add_argument("--heads", type=int, default=16, metavar="N")
    parser.add_argument("--lengths", type=numbers, default=[8192], metavar="LIST", help="queries and keys; default 8192")
    parser.add_argument("--dims", type=numbers, default=[64, 128], metavar="LIST", help="head sizes; default 64,128")
    parser.add_argument("--masks", choices=["full", "causal", "both"], default="both")
    parser.add_argument("--only", action="append", choices=list(OPERATIONS), help="a pass, may be repeated; default all")
    parser.add_argument("--peers", default="fa2,cudnn,eager", metavar="LIST", help="default fa2,cudnn,eager")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of every method; default 9")
    parser.add_argument("--turn-ms", type=float, default=20, metavar="X", help="least time of a turn; default 20")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append every figure")
    parser.add_argument("--commit", default=current_commit(), help="what the CSV says was measured; default that of git")
    arguments = parser.parse_args()
    if unknown := set(filter(None, arguments.peers.split(","))) - set(peers()):
        parser.error(f"--peers: no {', '.join(sorted(unknown))}; must be of fa2, cudnn, eager")
    if not torch.cuda.is_available():
        sys.exit("peers.py: PyTorch sees no GPU")
    if not arguments.library.exists():
        sys.exit(f"peers.py: --library={arguments.library}: not there; build it, or name another")
    return arguments


def measure(library, case, arguments):
    wanted = arguments.only or list(OPERATIONS)
    torch.manual_seed(0)
    shape = (1, case.heads, case.length, case.dim)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    mine, plan = ours(library, tensors, case.causal, wanted, arguments.kernel)
    methods = [mine]
    methods += [make_peer(name, tensors, case.causal, wanted) for name in filter(None, arguments.peers.split(","))]
    times = take_turns(methods, arguments.rounds, arguments.turn_ms)
    if not {BACKWARD, ONE_PASS} & set(wanted):
        mine.results = {"kl": plan.kl}
    errors = relative_errors(methods, tensors, case.causal)
    print_case(case, methods, times, errors, plan)
    if arguments.csv:
        append_csv(arguments.csv, figures(case, times, errors, plan), arguments.commit)
    return all(error <= WRONG[name] for (method, name), error in errors.items() if method == "streamkl")


def main():
    arguments = parse_arguments()
    library = Library(arguments.library)
    version = library.calls.skl_version().decode()
    gpu, commit = torch.cuda.get_device_name(), arguments.commit or "unknown"
    print(f"streamkl {version}, commit {commit}, PyTorch {torch.__version__}, {gpu}, bf16")
    right = True
    masks = {"full": [False], "causal": [True], "both": [False, True]}[arguments.masks]
    for length in arguments.lengths:
        for dim in arguments.dims:
            for causal in masks:
                right = measure(library, Case(arguments.heads, length, dim, causal), arguments) and right
                torch.cuda.empty_cache()
    sys.exit(0 if right else "peers.py: streamkl is WRONG: see its relative errors")


if __name__ == "__main__":
    main()
