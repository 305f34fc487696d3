"""Times the student's attention backward with the gradient of its KL, compared with the two calls that it replaces.

    bench/run.py carried                                   # all cases: less than a minute
    bench/run.py carried --only causal                     # those whose name contains the text
    bench/run.py carried --check                           # also compares gradients with float64
    bench/run.py carried --csv bench/results/carried.csv   # appends the results

    forward    scaled_dot_product_attention of the student by cuDNN
    cuDNN      the backward of scaled_dot_product_attention by cuDNN, without a KL
    apart      the same and a one-pass call: what a step pays without the kernel that does both
    carried    skl_attention_backward: attention and KL gradients in one call
    with KL    the same with the KL of each row

cuDNN has expanded key heads, outside of the time. TFLOP/s are those of six products. --check compares the gradients of the
first key head with float64: the error of `carried` must not exceed that of cuDNN's backward of the same attention, by 5 %
for chance, plus twice that of a one-pass call.
"""

import torch

from harness.attention import Shape, cu_seqlens_of, exact_rows, pointers, problem_of, random_tensors
from harness.library import Calls, address, addresses, lib
from harness.report import errors_of, errors_text, ratio, rounded, tflops, times_of
from harness.run import Result
from harness.timing import failures, release_memory
from peers.attention import leaves_of, sdpa
from streamkl._problem import DK_S, DQ_S, DV_S

FORWARD, CUDNN, APART, CARRIED, WITH_KL = "forward", "cuDNN", "apart", "carried", "with KL"
LSES, ONE_PASS = "LSEs", "one pass"
COLUMNS = (
    "date gpu torch commit case length mask heads key_heads dim_t dim_s dtype method ms fastest_ms cudnn_ratio tflops"
    " dq_error dk_error dv_error note"
).split()
SHOWN = "method ms fastest_ms cudnn_ratio tflops".split()
BACKENDS = {"cuda": "CUDNN_ATTENTION", "cpu": "FLASH_ATTENTION"}
CHECKED_LENGTH = 8192  # at most: float64 matrices of one key head
CHANCE = 1.05  # two ways to round the same dv have the same error, except for chance


def case(name, heads=16, key_heads=16, dim_t=128, dim_s=128, dtype="bf16", **others):
    """Both models have the same heads."""
    return Shape(name, heads, key_heads, dim_t, heads, key_heads, dim_s, dtype_t=dtype, dtype_s=dtype, **others)


CASES = [
    case("causal, heads of 128"),
    case("full, heads of 128", causal=False),
    case("causal, heads of 64", dim_t=64, dim_s=64),
    case("full, heads of 64", dim_t=64, dim_s=64, causal=False),
    case("causal, student of 64", dim_s=64),
    case("causal, f16", dtype="f16"),
    case("causal, 32/8 heads", heads=32, key_heads=8),
    case("causal, packed", packed=(4096,) * 4),
    case("causal, N=2048", length=2048, heads=64, key_heads=64),
    case("causal, N=32768", length=32768),
    case("causal, N=131072", length=131072, heads=4, key_heads=4),
]


def add_options(parser):
    parser.add_argument("--check", action="store_true", help="compare gradients with float64, up to 8192 tokens")


def cases(given):
    return CASES


def columns_of(shape):
    return {
        "case": shape.name, "length": sum(shape.packed) or shape.length, "mask": shape.mask, "heads": shape.heads_s,
        "key_heads": shape.key_heads_s, "dim_t": shape.dim_t, "dim_s": shape.dim_s, "dtype": shape.dtype_s,
    }  # fmt: skip


def flops_of(shape):
    """Six products: X with the teacher's head size, Y, dP, dq, dk and dv with the student's."""
    return 2 * shape.pairs * shape.heads_s * (shape.dim_t + 5 * shape.dim_s)


class CarriedCalls:
    """One set of random tensors, [1, heads, length, dim], and the calls on it."""

    def __init__(self, shape, device, weight=None, grad_f32=True):
        """weight: of the KL of each row; None: the mean. grad_f32: gradients of the one-pass call, as a caller adds them."""
        self.shape, self.backend = shape, BACKENDS[device.type]
        self.tensors = random_tensors(shape, device)
        q, k = self.tensors["q_s"], self.tensors["k_s"]
        self.v, self.upstream = torch.randn_like(k), torch.randn_like(q)
        rows = torch.empty(q.shape[:3], device=device)
        self.weight = torch.full_like(rows, 1 / rows.numel() if weight is None else weight)
        self.kl, self.lses = rows.clone(), dict(lse_t=rows.clone(), lse_s=rows.clone())
        self.o = torch.zeros_like(q)  # packed: an output does not change the time
        if not shape.packed:
            group = shape.heads_s // shape.key_heads_s
            self.leaves = leaves_of(q, *(tensor.repeat_interleave(group, 1) for tensor in (k, self.v)))
            self.output = sdpa(*self.leaves, shape.causal, self.backend)
            self.o = self.output.detach().contiguous()
        self.carried = [torch.empty_like(tensor) for tensor in (q, k, self.v)]
        self.of_kl = [torch.empty_like(tensor, dtype=torch.float32 if grad_f32 else None) for tensor in (q, k)]
        self.make_calls(device, grad_f32)

    def make_calls(self, device, grad_f32):
        problem, self.cu_seqlens = problem_of(self.shape), cu_seqlens_of(self.shape, device)
        given, lses = addresses(self.tensors) | pointers(self.cu_seqlens), addresses(self.lses)
        inputs = lib.pack_inputs(**given, **lses, grad_kl=address(self.weight))
        dq, dk, dv = map(address, self.carried)
        attention = lib.pack_attention(address(self.v), address(self.o), address(self.upstream), dv)
        gradients = lib.pack_gradients(dq_s=dq, dk_s=dk)
        self.both = Calls(device, gradients=DQ_S | DK_S | DV_S, **problem)
        self.both.calls = {
            LSES: [(lib.FORWARD, lib.pack_inputs(**given), lib.pack_rows(**lses))],
            CARRIED: [(lib.ATTENTION_BACKWARD, inputs, attention, lib.pack_rows(), gradients)],
            WITH_KL: [(lib.ATTENTION_BACKWARD, inputs, attention, lib.pack_rows(kl=address(self.kl)), gradients)],
        }
        self.both.run(LSES)
        gradients = lib.pack_gradients(**addresses(dict(zip(("dq_s", "dk_s"), self.of_kl))))
        self.kl_alone = Calls(device, gradients=DQ_S | DK_S, grad_f32=grad_f32, **problem)
        self.kl_alone.calls = {ONE_PASS: [(lib.FORWARD_BACKWARD, inputs, lib.pack_rows(), gradients)]}
        self.both.tensors = self.kl_alone.tensors = self  # kept: the structs hold only addresses

    def forward(self):
        """The student's attention."""
        with torch.no_grad():
            return sdpa(*self.leaves, self.shape.causal, self.backend)

    def cudnn(self):
        """[dq, dk, dv], the last two of expanded keys"""
        return torch.autograd.grad(self.output, self.leaves, self.upstream, retain_graph=True)

    def apart(self):
        self.cudnn()
        self.kl_alone.run(ONE_PASS)

    def all(self):
        """{method: call}"""
        attention = {FORWARD: self.forward, CUDNN: self.cudnn, APART: self.apart}
        return ({} if self.shape.packed else attention) | self.both.timed([CARRIED, WITH_KL])


# ---- Errors --------------------------------------------------------------------------------------------------------


def exact_gradients(calls):
    """([dq, dk, dv] of the attention, [dq, dk] of the KL) in float64, for the first key head."""
    shape, group = calls.shape, calls.shape.heads_s // calls.shape.key_heads_s
    first = {name: tensor[0, : group if name.startswith("q") else 1] for name, tensor in calls.tensors.items()}
    q, k, v = (tensor.double().requires_grad_() for tensor in (first["q_s"], first["k_s"], calls.v[0, :1]))
    logits = q @ k.mT * shape.dim_s**-0.5
    if shape.causal:
        logits = logits.masked_fill(torch.ones_like(logits[0], dtype=torch.bool).triu(1), -torch.inf)
    of_attention = torch.autograd.grad(torch.softmax(logits, -1) @ v, (q, k, v), calls.upstream[0, :group].double())
    rows = torch.arange(shape.length, device=q.device)
    of_kl = exact_rows(shape, first, rows, calls.weight[0, :group].double())
    return of_attention, [of_kl["dq_s"], of_kl["dk_s"]]


def check(shape, device):
    """({gradient: relative error}, what is wrong)"""
    calls = CarriedCalls(shape, device, weight=1.0, grad_f32=False)
    group, (of_attention, of_kl) = shape.heads_s // shape.key_heads_s, exact_gradients(calls)
    calls.both.run(CARRIED)
    calls.kl_alone.run(ONE_PASS)
    cudnn = calls.cudnn()
    cudnn = [cudnn[0], *(each.double().unflatten(1, (-1, group)).sum(2) for each in cudnn[1:])]
    errors, wrong = {}, []
    for n, name in enumerate(("dq", "dk", "dv")):

        def off(got, expected, n=n):
            return (got[0, : 1 if n else group].double() - expected).norm()

        both = of_attention[n] + of_kl[n] if n < 2 else of_attention[n]
        error, allowed = off(calls.carried[n], both), CHANCE * off(cudnn[n], of_attention[n])
        allowed += 2 * off(calls.of_kl[n], of_kl[n]) if n < 2 else 0
        errors[name] = (error / both.norm()).item()
        if not error <= allowed:
            wrong.append(f"{name} is off by {error:.2e}, allowed {allowed:.2e}")
    return errors, wrong


# ---- Measuring -----------------------------------------------------------------------------------------------------


def added_percent(forward, cudnn, carried):
    """What the loss adds to the student's attention, forward and backward."""
    return 100 * (carried - cudnn) / (forward + cudnn)


def measure(shape, run):
    result, errors = Result(), {}
    if run.given.check and not shape.packed and shape.length <= CHECKED_LENGTH:
        errors, result.wrong = check(shape, run.device)
        release_memory()
    timings = run.time(CarriedCalls(shape, run.device).all())
    ms = {method: timing.median for method, timing in timings.items()}
    result.wrong += failures(timings)
    for method, timing in timings.items():
        is_ours = method in (CARRIED, WITH_KL)
        row = columns_of(shape) | {"method": method} | times_of(timing)
        row["cudnn_ratio"] = rounded(ratio(ms[method], ms.get(CUDNN)), ".3f")
        row["tflops"] = tflops(flops_of(shape), ms[method]) if is_ours else ""
        result.rows.append(row | (errors_of(errors) if method == CARRIED else {}))
    if all(ms.get(method) for method in (FORWARD, CUDNN, CARRIED)):
        added = added_percent(ms[FORWARD], ms[CUDNN], ms[CARRIED])
        result.lines.append(f"carried adds {added:+.1f} % to forward and backward")
    result.lines += [errors_text(errors)] if errors else []
    return result
