"""Times streamkl.attention as a training step calls it, compared with the attention alone.

    bench/run.py call                                # all cases: less than a minute
    bench/run.py call --csv bench/results/call.csv   # appends the results

    attention         scaled_dot_product_attention by cuDNN, forward and backward
    gradient          streamkl.attention with kl_value=False and the teacher's LSE: the gradient of the KL alone
    value             streamkl.attention with the teacher's LSE
    value, no LSE     the same, which computes that LSE
    apart             scaled_dot_product_attention by cuDNN and streamkl.attention_kl

A time is that of forward and backward, from Python. A student with fewer heads than the teacher learns the mean of
a group. Extra memory is the peak of a call in addition to its inputs. On a GPU, a gradient or a value that takes longer than
`apart` is an error: the call chooses the faster way. Its median and its fastest time must both be longer: the median of a
short call is that of Python, which varies.
"""

import torch

import streamkl
from harness.attention import Shape, random_tensors
from harness.report import rounded, times_of
from harness.run import Result
from harness.timing import failures
from peers.attention import leaves_of, sdpa

BACKENDS = {"cuda": "CUDNN_ATTENTION", "cpu": "FLASH_ATTENTION"}
ALONE, GRADIENT, VALUE, NO_LSE, APART = "attention", "gradient", "value", "value, no LSE", "apart"
COLUMNS = (
    "date gpu torch commit case length mask heads_t heads_s key_heads_s dim dtype method ms fastest_ms added extra_bytes note"
).split()
SHOWN = "method ms fastest_ms added extra_bytes".split()


def case(name, heads_t=16, heads_s=16, key_heads=16, dim=128, **others):
    teacher_keys = key_heads * heads_t // heads_s
    return Shape(name, heads_t, teacher_keys, dim, heads_s, key_heads, dim, dtype_t="bf16", dtype_s="bf16", **others)


CASES = [
    case("causal, heads of 128"),
    case("full, heads of 128", causal=False),
    case("causal, heads of 64", dim=64),
    case("full, heads of 64", dim=64, causal=False),
    case("causal, 32/8 heads, N=32768", heads_t=32, heads_s=32, key_heads=8, length=32768),
    case("causal, groups of 2", heads_s=8, key_heads=8),
    case("causal, groups of 4", heads_s=4, key_heads=4),
    case("causal, N=2048", length=2048),
    case("causal, 32/8 heads, groups of 4", heads_t=32, heads_s=8, key_heads=2),
    case("full, N=2048, groups of 2", heads_s=8, key_heads=8, length=2048, causal=False),
]


def add_options(parser):
    pass


def cases(given):
    return CASES


def columns_of(shape):
    return {
        "case": shape.name, "length": shape.length, "mask": shape.mask, "heads_t": shape.heads_t, "heads_s": shape.heads_s,
        "key_heads_s": shape.key_heads_s, "dim": shape.dim_s, "dtype": shape.dtype_s,
    }  # fmt: skip


def calls_of(shape, device):
    """{method: call} on one set of random tensors, [1, heads, length, dim]."""
    tensors = random_tensors(shape, device)
    q_t, k_t = tensors["q_t"], tensors["k_t"]
    leaves = q, k, v = leaves_of(tensors["q_s"], tensors["k_s"], torch.randn_like(tensors["k_s"]))
    upstream, options = torch.randn_like(q), dict(causal=shape.causal, layout="bhnd")
    _, lse_t, _ = streamkl.attention_kl(q_t, k_t, q.detach(), k.detach(), return_lse=True, **options)

    def attention():
        return sdpa(q, k, v, shape.causal, BACKENDS[device.type])

    def alone():
        torch.autograd.grad(attention(), leaves, upstream)

    def carried(**given):
        out, _ = streamkl.attention(q, k, v, q_t=q_t, k_t=k_t, **options, **given)
        torch.autograd.grad(out, leaves, upstream)

    def apart():
        out, loss = attention(), streamkl.attention_kl(q_t, k_t, q, k, lse_t=lse_t, **options)
        torch.autograd.grad((out, loss), leaves, (upstream, torch.ones_like(loss)))

    return {
        ALONE: alone,
        GRADIENT: lambda: carried(lse_t=lse_t, kl_value=False),
        VALUE: lambda: carried(lse_t=lse_t),
        NO_LSE: carried,
        APART: apart,
    }


def measure(shape, run):
    timings = run.time(calls_of(shape, run.device))
    alone = timings[ALONE].median
    rows = [
        columns_of(shape)
        | {"method": method, "added": rounded(timing.median and 100 * (timing.median / alone - 1), "+.0f")}
        | times_of(timing)
        | {"extra_bytes": timing.extra_bytes}
        for method, timing in timings.items()
    ]
    return Result(rows, wrong=failures(timings) + (slower_ways(timings) if run.device.type == "cuda" else []))


def slower_ways(timings):
    """One text per way that takes longer than the attention and its KL apart, by its median and by its fastest time."""
    apart = timings[APART]
    if not apart.samples:
        return []
    measured = {method: timings[method] for method in (GRADIENT, VALUE) if timings[method].samples}
    slower = [method for method, way in measured.items() if way.median > apart.median and way.fastest > apart.fastest]
    return [f"{method} takes longer than apart" for method in slower]
