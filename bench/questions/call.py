"""Times streamkl.attention as a training step calls it, compared with the attention alone: forward and backward.

    attention         scaled_dot_product_attention by cuDNN
    gradient          streamkl.attention with kl_value=False and the teacher's LSE: the gradient of the KL alone
    value             streamkl.attention with the teacher's LSE
    value, no LSE     the same, which computes that LSE
    apart             scaled_dot_product_attention by cuDNN and streamkl.attention_kl

On a GPU, a gradient or a value that takes longer than `apart` is an error: the call chooses the faster way. Its median
and its fastest time must both be longer: the median of a short call is that of Python, which varies.
"""

import torch

import streamkl
from harness.attention import Shape, random_tensors
from harness.run import methods_of
from peers.attention import leaves_of, sdpa

BACKENDS = {"cuda": "CUDNN_ATTENTION", "cpu": "FLASH_ATTENTION"}
ALONE, GRADIENT, VALUE, NO_LSE, APART = "attention", "gradient", "value", "value, no LSE", "apart"
COLUMNS = (
    "date gpu torch commit case length mask heads_t heads_s key_heads_s dim dtype method ms fastest_ms added extra_bytes note"
).split()


def case(name, heads_t=16, heads_s=16, key_heads=16, dim=128, **others):
    teacher_keys = key_heads * heads_t // heads_s
    return Shape(name, heads_t, teacher_keys, dim, heads_s, key_heads, dim, **others)


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


def cases(given):
    return CASES


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
    methods = methods_of(calls_of(shape, run.device))

    def added(method, name):
        alone = methods[0].ms(name)
        return {"added": f"{100 * (method.ms(name) / alone - 1):+.0f}" if alone else ""}

    result = run.time(methods, added)
    if run.device.type == "cuda":
        result.wrong += slower_ways({method.name: method.timings[""] for method in methods if method.timings})
    return result


def slower_ways(timings):
    """One text per way that takes longer than the attention and its KL apart, by its median and by its fastest time."""
    apart = timings.get(APART)
    ways = {name: timings[name] for name in (GRADIENT, VALUE) if apart and name in timings}
    slower = [name for name, way in ways.items() if way.median > apart.median and way.fastest > apart.fastest]
    return [f"{name} takes longer than apart" for name in slower]
