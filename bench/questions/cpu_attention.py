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

import torch

import streamkl
from harness.attention import Shape, random_tensors
from harness.library import DTYPES, FORWARD, ONE_PASS
from harness.options import add_numbers, numbers
from harness.report import ratio
from harness.run import methods_of
from harness.timing import Prepared
from peers.attention import leaves_of

STEP = "step"
SDPA = {FORWARD: "sdpa forward", STEP: "sdpa step", ONE_PASS: "sdpa step"}  # {our call: PyTorch's}
COLUMNS = "date gpu torch commit threads dtype heads length dim mask method ms fastest_ms sdpa_ratio note".split()


def add_options(parser):
    add_numbers(parser, threads=(1, "threads of both"), heads=(4, "heads"))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--lengths", type=numbers, default=[2048], metavar="LIST", help="default 2048")
    parser.add_argument("--dims", type=numbers, default=[64, 128], metavar="LIST", help="head sizes; default 64,128")
    parser.set_defaults(device="cpu", rounds=15, sample_ms=1e9)


def cases(given):
    sizes = [(length, dim, mask) for length in given.lengths for dim in given.dims for mask in ("causal", "full")]
    return [case(*size, given.heads, given.dtype) for size in sizes]


def case(length, dim, mask, heads, dtype):
    name, sides, types = (
        f"{mask}, {heads} heads, d={dim}, N={length}, {dtype}",
        (heads, heads, dim) * 2,
        dict(dtype_t=dtype, dtype_s=dtype),
    )
    return Shape(name, *sides, length=length, causal=mask == "causal", **types)


def after_an_untimed_one(call):
    def prepare():
        call()
        return call

    return Prepared(prepare)


def calls_of(shape):
    """{name: call}"""
    tensors = random_tensors(shape, torch.device("cpu"))
    teacher = tensors["q_t"], tensors["k_t"]
    student = leaves_of(tensors["q_s"], tensors["k_s"])
    upstream, *attended = (torch.randn_like(teacher[0]) for _ in range(4))
    attended = leaves_of(*attended)

    def kl(**options):
        return streamkl.attention_kl(*teacher, *student, causal=shape.causal, layout="bhnd", **options)

    def sdpa():
        return torch.nn.functional.scaled_dot_product_attention(*attended, is_causal=shape.causal)

    with torch.no_grad():
        _, lse_t, lse_s = kl(return_lse=True)
    return {
        SDPA[FORWARD]: torch.no_grad()(sdpa),
        FORWARD: torch.no_grad()(kl),
        SDPA[STEP]: lambda: torch.autograd.grad(sdpa(), attended, upstream),
        STEP: lambda: torch.autograd.grad(kl(), student),
        ONE_PASS: lambda: torch.autograd.grad(kl(lse_t=lse_t, lse_s=lse_s), student),
    }


def measure(shape, run):
    os.environ["STREAMKL_THREADS"] = str(run.given.threads)
    torch.set_num_threads(run.given.threads)
    methods = methods_of({name: after_an_untimed_one(call) for name, call in calls_of(shape).items()})
    by_name = {method.name: method for method in methods}

    def compared(method, name):
        other = by_name.get(SDPA.get(method.name))
        return {"threads": run.given.threads, "sdpa_ratio": ratio(method.ms(name), other and other.ms(name), ".2f")}

    return run.time(methods, compared)
