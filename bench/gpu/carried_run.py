"""A run of bench/carried.py: the calls of a case, their errors, and the report."""

import sys
from functools import partial

import torch

from streamkl import _library as lib
from streamkl._options import translate
from streamkl._problem import DK_S, DQ_S, DV_S

from .alternate import time_alternately
from .carried_cases import APART, CARRIED, COLUMNS, CUDNN, FORWARD, WITH_KL, chosen
from .measure import refusal_of, release_memory
from .report import append_csv, rounded
from .run import LibraryBench

ATEN, OPS = torch.ops.aten, torch.ops.streamkl
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
CHECKED_LENGTH = 8192  # at most: float64 matrices of one head
GRADIENTS = ("dq", "dk", "dv")
CHANCE = 1.05  # two ways to round the same dv have the same error, except for chance


def options_of(case, gradients, device, grad_f32=False):
    """(lengths, options) of an operator; [heads, length, dim] if packed."""
    packed = {}
    if case.sequences > 1:
        begins = torch.arange(case.sequences + 1, dtype=torch.int32, device=device) * (case.length // case.sequences)
        longest = case.length // case.sequences
        packed = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=longest, max_seqlen_k=longest)
    given = dict(cu_seqlens_q=None, cu_seqlens_k=None, key_lengths=None) | packed
    lengths, options = translate(
        gradients, causal=case.causal, window_size=(-1, -1), softmax_scale_t=None, softmax_scale_s=None, softcap_t=0.0,
        direction="forward", layout="bhnd", **given,
    )  # fmt: skip
    return lengths, options._replace(grad_f32=grad_f32)


def cudnn_attention(q, k, v, causal):
    """(output, LSE)"""
    output, lse, *_ = ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return output, lse.detach().flatten(2)[..., : q.shape[2]]


class Calls:
    """One set of random tensors, [batch, heads, length, dim], and the calls on it."""

    def __init__(self, case, device, weight=None):
        def random(heads, dim):
            return torch.randn((1, heads, case.length, dim), device=device, dtype=DTYPES[case.dtype])

        self.case, self.device = case, device
        self.q_t, self.k_t = random(case.heads, case.dim_t), random(case.key_heads, case.dim_t)
        self.q, self.k, self.v = (random(heads, case.dim_s) for heads in (case.heads, case.key_heads, case.key_heads))
        self.upstream = random(case.heads, case.dim_s)
        weight = 1 / (case.heads * case.length) if weight is None else weight
        self.weight = torch.full((1, case.heads, case.length), weight, device=device)
        group = case.heads // case.key_heads
        if case.sequences == 1:
            k_t, k, v = (tensor.repeat_interleave(group, 1) for tensor in (self.k_t, self.k, self.v))
            self.leaves = [tensor.detach().requires_grad_() for tensor in (self.q, k, v)]
            self.output, self.lse_s = cudnn_attention(*self.leaves, case.causal)
            self.o, self.lse_t = self.output.detach(), cudnn_attention(self.q_t, k_t, k_t, case.causal)[1]
        else:  # an output does not change the time
            lengths, options = options_of(case, 0, device)
            self.o, lses = torch.zeros_like(self.q), lib.LSE_T | lib.LSE_S
            self.lse_t, self.lse_s = OPS.forward(
                *self.packed(self.q_t, self.k_t, self.q, self.k), *(None,) * 5, lses, *lengths, *options
            )

    def packed(self, *tensors):
        return [tensor if self.case.sequences == 1 else tensor.flatten(0, 1) for tensor in tensors]

    def forward(self):
        """The student's attention."""
        return cudnn_attention(*(tensor.detach() for tensor in self.leaves), self.case.causal)

    def cudnn(self):
        """[dq, dk, dv], the last two of expanded keys"""
        return torch.autograd.grad(self.output, self.leaves, self.upstream, retain_graph=True)

    def one_pass(self, grad_f32=True):
        """[dq, dk] of the KL; f32 as a caller adds them to those of the attention."""
        lengths, options = options_of(self.case, DQ_S | DK_S, self.device, grad_f32)
        rows = self.lse_t, self.lse_s, self.weight, 0
        return OPS.forward_backward(self.q_t, self.k_t, self.q, self.k, *(None,) * 4, *rows, *lengths, *options)

    def apart(self):
        self.cudnn()
        self.one_pass()

    def carried(self, rows=0):
        """[kl if asked for, dq, dk, dv]"""
        lengths, options = options_of(self.case, DQ_S | DK_S | DV_S, self.device)
        tensors = self.packed(self.q_t, self.k_t, self.q, self.k, self.v, self.o, self.upstream)
        (weight,) = self.packed(self.weight)
        return OPS.attention_backward(*tensors, self.lse_t, self.lse_s, weight, rows, *lengths, *options)

    def all(self):
        """{method: call}"""
        ours = {CARRIED: self.carried, WITH_KL: partial(self.carried, lib.KL)}
        return ours if self.case.sequences > 1 else {FORWARD: self.forward, CUDNN: self.cudnn, APART: self.apart} | ours


def exact(calls):
    """{part: [dq, dk, dv]} in float64 for the first key head: of the attention, and of the KL with its weight."""
    case, group = calls.case, calls.case.heads // calls.case.key_heads
    q, q_t, upstream = (tensor[0, :group].double() for tensor in (calls.q, calls.q_t, calls.upstream))
    k, k_t, v = (tensor[0, 0].double() for tensor in (calls.k, calls.k_t, calls.v))
    found = {part: [torch.zeros_like(tensor) for tensor in (q, k, v)] for part in ("attention", "KL")}
    hidden = torch.ones((case.length, case.length), dtype=torch.bool, device=q.device).triu(1) if case.causal else None

    def probabilities(queries, keys):
        logits = queries @ keys.T * keys.shape[-1] ** -0.5
        return torch.softmax(logits if hidden is None else logits.masked_fill_(hidden, -torch.inf), -1)

    for head in range(group):
        s = probabilities(q[head], k)
        dp = upstream[head] @ v.T
        found["attention"][2] += s.T @ upstream[head]
        of_kl = calls.weight[0, head, :, None].double() * (s - probabilities(q_t[head], k_t))
        for part, ds in ("attention", s * (dp - (s * dp).sum(-1, keepdim=True))), ("KL", of_kl):
            found[part][0][head] = ds @ k * case.dim_s**-0.5
            found[part][1] += ds.T @ q[head] * case.dim_s**-0.5
    return found


def check(case, device):
    """{gradient: relative error}, and what is wrong."""
    calls = Calls(case, device, weight=1.0)
    group, true = case.heads // case.key_heads, exact(calls)
    carried, of_kl = calls.carried(), calls.one_pass(grad_f32=False)
    cudnn = calls.cudnn()
    cudnn = [cudnn[0], *(each.double().unflatten(1, (-1, group)).sum(2) for each in cudnn[1:])]
    errors, wrong = {}, []
    for n, name in enumerate(GRADIENTS):

        def off(got, expected, n=n):
            return ((got[0, :group] if n == 0 else got[0, 0]).double() - expected).norm()

        both = true["attention"][n] + true["KL"][n]
        error = off(carried[n], both)
        allowed = CHANCE * off(cudnn[n], true["attention"][n]) + (2 * off(of_kl[n], true["KL"][n]) if n < 2 else 0)
        errors[name] = (error / both.norm()).item()
        if not error <= allowed:
            wrong.append(f"{name} is off by {error:.2e}, allowed {allowed:.2e}")
    return errors, wrong


def added_percent(timings):
    """What the loss adds to the student's attention, forward and backward; None if a time is missing."""
    forward, cudnn, carried = (timings[method].median if method in timings else None for method in (FORWARD, CUDNN, CARRIED))
    return 100 * (carried - cudnn) / (forward + cudnn) if forward and cudnn and carried else None


def csv_rows(case, timings, errors, notes):
    """One row per method."""
    cudnn = timings[CUDNN].median if CUDNN in timings else None
    for method, timing in timings.items():
        ms, ours = timing.median, method in (CARRIED, WITH_KL)
        yield {
            "case": case.name, "length": case.length, "mask": "causal" if case.causal else "full", "heads": case.heads,
            "key_heads": case.key_heads, "dim_t": case.dim_t, "dim_s": case.dim_s, "dtype": case.dtype, "method": method,
            "ms": rounded(ms, ".4f"), "fastest_ms": rounded(timing.fastest, ".4f"),
            "cudnn_ratio": rounded(ms / cudnn if ms and cudnn else None, ".3f"),
            "tflops": rounded(case.flops / ms * 1e-9 if ms and ours else None, ".0f"),
            **{f"{name}_error": rounded(errors.get(name) if method == CARRIED else None, ".2e") for name in GRADIENTS},
            "note": "; ".join(notes),
        }  # fmt: skip


class CarriedBench(LibraryBench):
    DEVICE = "cuda"

    def run(self):
        given = self.arguments
        print(f"{self.introduction()} unless named; ms, and relative to cuDNN's backward alone\n")
        for case in chosen(given.only):
            timings, errors, notes = {}, {}, []
            try:
                if given.check and case.length <= CHECKED_LENGTH:
                    errors, notes = check(case, self.DEVICE)
                    release_memory()
                timings = time_alternately(Calls(case, self.DEVICE).all(), self.DEVICE, given.rounds, given.sample_ms)
            except Exception as error:  # of the library, of cuDNN, out of memory: the other cases go on
                notes.append(f"failed: {refusal_of(error)}")
            notes += [f"{method} failed: {timing.refusal}" for method, timing in timings.items() if timing.refusal]
            self.is_right &= not notes
            rows = list(csv_rows(case, timings, errors, notes))
            print(f"{case.name:24}", *(f"{row['method']} {row['ms']} ({row['cudnn_ratio'] or '-'})  " for row in rows))
            percent = added_percent(timings)
            added = [] if percent is None else [f"{percent:+.1f} % of forward and backward,"]
            tflops = [f"{row['tflops']} TFLOP/s" for row in rows if row["method"] == CARRIED]
            print(f"{'':24}", *added, *tflops, errors or "", *notes)
            sys.stdout.flush()
            if given.csv:
                append_csv(given.csv, rows, self.about, COLUMNS)
            release_memory()
