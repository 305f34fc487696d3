"""Times StreamKL on CPU threads compared with PyTorch's attention on tensors of the same shape.

    bench/run.py cpu_attention                       # bf16, 4 heads of 64 and of 128, 2048 queries and keys, one thread
    bench/run.py cpu_attention --threads 2 --dtype f32
    STREAMKL_KERNEL=cpu_avx512 bench/run.py cpu_attention

    forward    attention_kl without gradients; PyTorch: scaled_dot_product_attention without gradients
    step       both with the gradients of the student's queries and keys, or of queries, keys and values
    one pass   our step with both LSEs given, compared with PyTorch's step

A call is timed after an untimed one, during which the threads of the other library fall asleep. A ratio below 1 means that
StreamKL takes less time.
"""

import os
from dataclasses import dataclass

import torch

import streamkl
from harness.library import DTYPES, FORWARD, ONE_PASS
from harness.report import ratio, rounded, times_of
from harness.run import Result
from harness.timing import Prepared, failures

from .peers import numbers

STEP = "step"
SDPA = {FORWARD: "sdpa forward", STEP: "sdpa step", ONE_PASS: "sdpa step"}  # {our call: PyTorch's}
CASE_COLUMNS = "threads dtype heads length dim mask".split()
COLUMNS = ["date", "device", "torch", "commit", *CASE_COLUMNS, *"call ms fastest_ms sdpa_ratio note".split()]
SHOWN = "call ms fastest_ms sdpa_ratio".split()


@dataclass(frozen=True)
class Case:
    threads: int
    dtype: str
    heads: int
    length: int
    dim: int
    mask: str

    def __str__(self):
        return f"{self.threads} threads, {self.heads} heads, {self.dtype}"

    @property
    def name(self):
        return f"{self.mask}, d={self.dim}, N={self.length}"


def add_options(parser):
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of both; default 1")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="default 4")
    parser.add_argument("--lengths", type=numbers, default=[2048], metavar="LIST", help="default 2048")
    parser.add_argument("--dims", type=numbers, default=[64, 128], metavar="LIST", help="head sizes; default 64,128")
    parser.set_defaults(device="cpu", rounds=15, sample_ms=1e9)


def cases(given):
    sizes = [(length, dim, mask) for length in given.lengths for dim in given.dims for mask in ("causal", "full")]
    return [Case(given.threads, given.dtype, given.heads, *size) for size in sizes]


def columns_of(case):
    return {name: getattr(case, name) for name in CASE_COLUMNS}


def after_an_untimed_one(call):
    def prepare():
        call()
        return call

    return Prepared(prepare)


def calls_of(case):
    """{name: call}"""
    shape, causal = (1, case.heads, case.length, case.dim), case.mask == "causal"

    def tensors(count, gradients):
        return [torch.randn(shape).to(DTYPES[case.dtype][1]).requires_grad_(gradients) for _ in range(count)]

    teacher, student, attended, (upstream,) = tensors(2, False), tensors(2, True), tensors(3, True), tensors(1, False)

    def kl(**options):
        return streamkl.attention_kl(*teacher, *student, causal=causal, layout="bhnd", **options)

    def sdpa():
        return torch.nn.functional.scaled_dot_product_attention(*attended, is_causal=causal)

    def step(loss, leaves, gradient=None):
        for leaf in leaves:
            leaf.grad = None
        loss.backward(gradient)

    with torch.no_grad():
        _, lse_t, lse_s = kl(return_lse=True)
    return {
        SDPA[FORWARD]: torch.no_grad()(sdpa),
        FORWARD: torch.no_grad()(kl),
        SDPA[STEP]: lambda: step(sdpa(), attended, upstream),
        STEP: lambda: step(kl(), student),
        ONE_PASS: lambda: step(kl(lse_t=lse_t, lse_s=lse_s), student),
    }


def measure(case, run):
    os.environ["STREAMKL_THREADS"] = str(case.threads)
    torch.set_num_threads(case.threads)
    timings = run.time({name: after_an_untimed_one(call) for name, call in calls_of(case).items()})
    rows = []
    for name, timing in timings.items():
        other = timings[SDPA[name]].median if name in SDPA else None
        row = {"call": name, **times_of(timing), "sdpa_ratio": rounded(ratio(timing.median, other), ".2f")}
        rows.append(columns_of(case) | row)
    return Result(rows, wrong=failures(timings))
