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

from dataclasses import dataclass

import torch

from harness.attention import Shape, exact_rows
from harness.library import DTYPES, Calls, address, addresses, lib
from harness.report import errors_of, errors_text, ratio, rounded, tflops, times_of
from harness.run import Result
from harness.timing import failures, release_memory
from peers.attention import leaves_of, sdpa
from streamkl._problem import DK_S, DQ_S, DV_S

FORWARD, CUDNN, APART, CARRIED, WITH_KL = "forward", "cuDNN", "apart", "carried", "with KL"
LSES, ONE_PASS = "LSEs", "one pass"
CASE_COLUMNS = "length mask heads key_heads dim_t dim_s dtype".split()
COLUMNS = [
    *"date gpu torch commit case".split(), *CASE_COLUMNS,
    *"method ms fastest_ms cudnn_ratio tflops dq_error dk_error dv_error note".split(),
]  # fmt: skip
SHOWN = "method ms fastest_ms cudnn_ratio tflops".split()
BACKENDS = {"cuda": "CUDNN_ATTENTION", "cpu": "FLASH_ATTENTION"}
CHECKED_LENGTH = 8192  # at most: float64 matrices of one key head
CHANCE = 1.05  # two ways to round the same dv have the same error, except for chance


@dataclass(frozen=True)
class Case:
    name: str
    length: int = 8192
    heads: int = 16
    key_heads: int = 16
    dim_t: int = 128
    dim_s: int = 128
    causal: bool = True
    dtype: str = "bf16"
    sequences: int = 1  # of equal length, packed

    def __str__(self):
        packed = f", {self.sequences} packed sequences" if self.sequences > 1 else ""
        sizes = f"teacher of {self.dim_t}, student of {self.dim_s}"
        return f"N={self.length}{packed}, {self.mask}, {self.heads}/{self.key_heads} heads, {sizes}, {self.dtype}"

    @property
    def mask(self):
        return "causal" if self.causal else "full"

    @property
    def flops(self):
        """Of six products: X with the teacher's head size, Y, dP, dq, dk and dv with the student's."""
        length = self.length // self.sequences
        pairs = self.heads * self.sequences * (length * (length + 1) // 2 if self.causal else length * length)
        return 2 * pairs * (self.dim_t + 5 * self.dim_s)


CASES = [
    Case("causal, heads of 128"),
    Case("full, heads of 128", causal=False),
    Case("causal, heads of 64", dim_t=64, dim_s=64),
    Case("full, heads of 64", dim_t=64, dim_s=64, causal=False),
    Case("causal, student of 64", dim_s=64),
    Case("causal, f16", dtype="f16"),
    Case("causal, 32/8 heads", heads=32, key_heads=8),
    Case("causal, packed", length=16384, sequences=4),
    Case("causal, N=2048", length=2048, heads=64, key_heads=64),
    Case("causal, N=32768", length=32768),
    Case("causal, N=131072", length=131072, heads=4, key_heads=4),
]


def add_options(parser):
    parser.add_argument("--check", action="store_true", help=f"compare gradients with float64, up to {CHECKED_LENGTH} tokens")


def cases(given):
    return CASES


def columns_of(case):
    return {"case": case.name} | {name: getattr(case, name) for name in CASE_COLUMNS}


class CarriedCalls:
    """One set of random tensors, [1, heads, length, dim], and the calls on it."""

    def __init__(self, case, device, weight=None, grad_f32=True):
        """weight: of the KL of each row; None: the mean. grad_f32: gradients of the one-pass call, as a caller adds them."""
        device, dtype = torch.device(device), DTYPES[case.dtype][1]

        def random(heads, dim):
            return torch.randn((1, heads, case.length, dim), device=device, dtype=dtype)

        self.case, self.backend = case, BACKENDS[device.type]
        q_t, k_t = random(case.heads, case.dim_t), random(case.key_heads, case.dim_t)
        q, k, self.v = (random(heads, case.dim_s) for heads in (case.heads, case.key_heads, case.key_heads))
        self.tensors, self.upstream = dict(q_t=q_t, k_t=k_t, q_s=q, k_s=k), torch.randn_like(q)
        rows = torch.empty((1, case.heads, case.length), device=device)
        self.weight = torch.full_like(rows, 1 / (case.heads * case.length) if weight is None else weight)
        self.kl, self.lses = rows.clone(), dict(lse_t=rows.clone(), lse_s=rows.clone())
        self.o = torch.zeros_like(q)  # packed: an output does not change the time
        if case.sequences == 1:
            group = case.heads // case.key_heads
            self.leaves = leaves_of(q, *(tensor.repeat_interleave(group, 1) for tensor in (k, self.v)))
            self.output = sdpa(*self.leaves, case.causal, self.backend)
            self.o = self.output.detach().contiguous()
        self.carried = [torch.empty_like(tensor) for tensor in (q, k, self.v)]
        self.of_kl = [torch.empty_like(tensor, dtype=torch.float32 if grad_f32 else dtype) for tensor in (q, k)]
        self.make_calls(device, grad_f32)

    def make_calls(self, device, grad_f32):
        case, packed = self.case, self.case.sequences > 1
        longest, total = case.length // case.sequences, case.length if packed else 0
        kind = DTYPES[case.dtype][0]
        problem = dict(
            dtype_t=kind, dtype_s=kind, causal=case.causal, batch=case.sequences, len_q=longest, len_k=longest,
            heads_t=case.heads, heads_s=case.heads, key_heads_t=case.key_heads, key_heads_s=case.key_heads,
            dim_t=case.dim_t, dim_s=case.dim_s, packed=packed, total_q=total, total_k=total,
        )  # fmt: skip
        given = addresses(self.tensors)
        if packed:
            self.cu_seqlens = torch.arange(case.sequences + 1, dtype=torch.int32, device=device) * longest
            given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), self.cu_seqlens.data_ptr())
        inputs = lib.pack_inputs(**given, **addresses(self.lses), grad_kl=address(self.weight))
        dq, dk, dv = map(address, self.carried)
        attention = lib.pack_attention(address(self.v), address(self.o), address(self.upstream), dv)
        gradients = lib.pack_gradients(dq_s=dq, dk_s=dk)
        self.both = Calls(device, gradients=DQ_S | DK_S | DV_S, **problem)
        self.both.calls = {
            LSES: [(lib.FORWARD, lib.pack_inputs(**given), lib.pack_rows(**addresses(self.lses)))],
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
            return sdpa(*self.leaves, self.case.causal, self.backend)

    def cudnn(self):
        """[dq, dk, dv], the last two of expanded keys"""
        return torch.autograd.grad(self.output, self.leaves, self.upstream, retain_graph=True)

    def apart(self):
        self.cudnn()
        self.kl_alone.run(ONE_PASS)

    def all(self):
        """{method: call}"""
        ours = self.both.timed([CARRIED, WITH_KL])
        return ours if self.case.sequences > 1 else {FORWARD: self.forward, CUDNN: self.cudnn, APART: self.apart} | ours


# ---- Errors --------------------------------------------------------------------------------------------------------


def exact_gradients(calls):
    """([dq, dk, dv] of the attention, [dq, dk] of the KL) in float64, for the first key head."""
    case, group = calls.case, calls.case.heads // calls.case.key_heads
    first = {name: tensor[0, : group if name.startswith("q") else 1] for name, tensor in calls.tensors.items()}
    q, k, v = (tensor.double().requires_grad_() for tensor in (first["q_s"], first["k_s"], calls.v[0, :1]))
    logits = q @ k.mT * case.dim_s**-0.5
    if case.causal:
        logits = logits.masked_fill(torch.ones_like(logits[0], dtype=torch.bool).triu(1), -torch.inf)
    of_attention = torch.autograd.grad(torch.softmax(logits, -1) @ v, (q, k, v), calls.upstream[0, :group].double())
    rows = torch.arange(case.length, device=q.device)
    of_kl = exact_rows(Shape(causal=case.causal), first, rows, calls.weight[0, :group].double())
    return of_attention, [of_kl["dq_s"], of_kl["dk_s"]]


def check(case, device):
    """({gradient: relative error}, what is wrong)"""
    calls = CarriedCalls(case, device, weight=1.0, grad_f32=False)
    group, (of_attention, of_kl) = case.heads // case.key_heads, exact_gradients(calls)
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


def measure(case, run):
    result, errors = Result(), {}
    if run.given.check and case.length <= CHECKED_LENGTH:
        errors, result.wrong = check(case, run.device)
        release_memory()
    timings = run.time(CarriedCalls(case, run.device).all())
    ms = {method: timing.median for method, timing in timings.items()}
    result.wrong += failures(timings)
    for method, timing in timings.items():
        is_ours = method in (CARRIED, WITH_KL)
        row = columns_of(case) | {"method": method} | times_of(timing)
        row["cudnn_ratio"] = rounded(ratio(ms[method], ms.get(CUDNN)), ".3f")
        row["tflops"] = tflops(case.flops, ms[method]) if is_ours else ""
        result.rows.append(row | (errors_of(errors) if method == CARRIED else {}))
    if all(ms.get(method) for method in (FORWARD, CUDNN, CARRIED)):
        added = added_percent(ms[FORWARD], ms[CUDNN], ms[CARRIED])
        result.lines.append(f"carried adds {added:+.1f} % to forward and backward")
    result.lines += [errors_text(errors)] if errors else []
    return result
