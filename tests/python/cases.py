"""Calls of attention_kl, and their comparison with the reference in float64."""

import torch

import streamkl
from streamkl import reference

NAMES = ("q_t", "k_t", "q_s", "k_s")

# A gradient or KL may be off by this share of the largest one; a gradient in a 16-bit type is rounded to it besides.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make_tensors(
    batch=2, len_q=19, len_k=23, heads_t=4, heads_s=2, key_heads_t=2, key_heads_s=1, dim_t=8, dim_s=5,
    layout="bnhd", packed=False, dtype=torch.float32, device="cpu", seed=0,
):  # fmt: skip
    """q_t, k_t, q_s, k_s: random, leaves, requiring gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(len_q, heads_t, dim_t), (len_k, key_heads_t, dim_t), (len_q, heads_s, dim_s), (len_k, key_heads_s, dim_s)]
    if layout == "bhnd":
        shapes = [(heads, length, dim) for length, heads, dim in shapes]
    shapes = [shape if packed else (batch, *shape) for shape in shapes]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def gradients_of(loss, tensors):
    """Of a loss, or of rows with an upstream gradient that differs from row to row."""
    upstream = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view_as(loss) if loss.dim() else None
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    return torch.autograd.grad(loss, wanted, upstream, allow_unused=False)


def assert_near(name, actual, expected, dtype=torch.float32):
    assert torch.equal(actual.isfinite(), expected.isfinite()), f"{name}: other positions are not finite"
    kept = expected.isfinite()
    largest = expected[kept].abs().max().item() if kept.any() else 0.0
    error = (actual.double() - expected.double())[kept].abs().max().item() if kept.any() else 0.0
    assert error <= TOLERANCE[dtype] * largest + 1e-6, f"{name}: off by {error} where the largest is {largest}"


def compare(tensors, **options):
    """attention_kl, in two passes and in one, against the reference in float64: loss, LSEs, gradients."""
    exact_tensors = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]
    exact, exact_t, exact_s = reference.attention_kl(*exact_tensors, return_lse=True, **options)
    exact_gradients = gradients_of(exact, exact_tensors)

    loss, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True, **options)
    assert loss.dtype == torch.float32 and loss.shape == exact.shape
    assert_near("loss", loss, exact)
    assert_near("lse_t", lse_t, exact_t)
    assert_near("lse_s", lse_s, exact_s)
    check_gradients("two passes", tensors, loss, exact_gradients)

    if options.get("reduction") != "none":
        one_pass = streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s, **options)
        assert_near("loss in one pass", one_pass, exact)
        check_gradients("one pass", tensors, one_pass, exact_gradients)


def check_gradients(passes, tensors, loss, exact_gradients):
    wanted = [(name, tensor) for name, tensor in zip(NAMES, tensors) if tensor.requires_grad]
    for (name, tensor), gradient, exact in zip(wanted, gradients_of(loss, tensors), exact_gradients):
        assert gradient.dtype == tensor.dtype and gradient.shape == tensor.shape
        assert_near(f"gradient of {name} in {passes}", gradient, exact, tensor.dtype)
