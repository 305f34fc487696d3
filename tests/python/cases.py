"""Calls of attention_kl, compared with the reference in float64."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch

import streamkl
from streamkl import _library as lib
from streamkl import reference
from streamkl._problem import DK_S, DQ_S, Options

LONG = os.environ.get("STREAMKL_TEST_LONG", "") not in ("", "0")  # ./test long
COMPILER = "inductor" if LONG else "aot_eager"  # inductor runs a C++ compiler, which takes 20 seconds

NAMES = ("q_t", "k_t", "q_s", "k_s")

# Tolerated error of a gradient or KL relative to the largest one; a 16-bit gradient is also rounded to its type.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def end_of_rank():
    """Ends a process of torchrun. In Python's own end a thread of gloo that still has a tensor asks for the interpreter's lock, and
    that may end the process with SIGABRT: pytorch #179291."""
    torch.distributed.destroy_process_group()
    os._exit(0)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU: tensor.as_subclass(OnGpu)."""

    is_cuda, device = True, torch.device("cuda", 0)


def make_tensors(
    batch=2, len_q=19, len_k=23, heads_t=4, heads_s=2, key_heads_t=2, key_heads_s=1, dim_t=8, dim_s=5,
    layout="bnhd", packed=False, dtype=torch.float32, device="cpu", seed=0,
):  # fmt: skip
    """Random q_t, k_t, q_s, k_s: leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (len_q, heads_t, dim_t),
        (len_k, key_heads_t, dim_t),
        (len_q, heads_s, dim_s),
        (len_k, key_heads_s, dim_s),
    ]
    if layout == "bhnd":
        shapes = [(heads, length, dim) for length, heads, dim in shapes]
    shapes = [shape if packed else (batch, *shape) for shape in shapes]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def gradients_of(loss, tensors):
    """Gradients of a loss, or of rows with a different upstream gradient per row."""
    upstream = (
        torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view_as(loss)
        if loss.dim()
        else None
    )
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    return torch.autograd.grad(loss, wanted, upstream, allow_unused=False)


def assert_near(name, actual, expected, dtype=torch.float32, floor=1e-6):
    assert torch.equal(actual.isfinite(), expected.isfinite()), f"{name}: different positions are not finite"
    kept = expected.isfinite()
    largest = expected[kept].abs().max().item() if kept.any() else 0.0
    error = (actual.double() - expected.double())[kept].abs().max().item() if kept.any() else 0.0
    assert error <= TOLERANCE[dtype] * largest + floor, f"{name}: off by {error} where the largest is {largest}"


def compare(tensors, **options):
    """Compares loss, LSEs and gradients of attention_kl, in two passes and in one, with the reference in float64."""
    exact_tensors = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]
    exact, exact_t, exact_s = reference.attention_kl(*exact_tensors, return_lse=True, **options)
    exact_gradients = gradients_of(exact, exact_tensors)

    loss, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True, **options)
    assert loss.dtype == torch.float32 and loss.shape == exact.shape
    assert_near("loss", loss, exact, floor=loss_floor(tensors, options))
    assert_near("lse_t", lse_t, exact_t)
    assert_near("lse_s", lse_s, exact_s)
    check_gradients("two passes", tensors, loss, exact_gradients, options)

    if options.get("reduction") != "none":
        one_pass = streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s, **options)
        assert_near("loss in one pass", one_pass, exact, floor=loss_floor(tensors, options))
        check_gradients("one pass", tensors, one_pass, exact_gradients, options)


def rounding_of(tensors, options):
    """P and S are 2^(logit - LSE) in f32: their errors are a few roundings of the largest logit."""
    if any(tensor.numel() == 0 for tensor in tensors):
        return 0.0
    norms = [tensor.detach().float().norm(dim=-1).max().item() for tensor in tensors]
    logits = [scale_of(side, tensors, options) * norms[2 * side] * norms[2 * side + 1] for side in (0, 1)]
    return 8 * 2.0**-24 * (1 + max(logits))


def scale_of(side, tensors, options):
    given = options.get(("softmax_scale_t", "softmax_scale_s")[side])
    return tensors[2 * side].shape[-1] ** -0.5 if given is None else abs(given)


def row_count(tensors):
    return tensors[2].shape.numel() // tensors[2].shape[-1]


def loss_floor(tensors, options):
    """Rounding error of a KL that is 0, as in rows with one visible key; a sum adds that of all rows."""
    rows = row_count(tensors) if options.get("reduction") == "sum" else 1
    return 1e-6 + rows * rounding_of(tensors, options)


def gradient_floor(index, tensors, options):
    """The same for a gradient: a query multiplies it by a key; a key adds that of all rows, with random signs."""
    if any(tensor.numel() == 0 for tensor in tensors):
        return 0.0
    other_side = tensors[index ^ 1]  # the keys for the queries, the queries for the keys
    largest = other_side.detach().abs().max().item()
    gathered = row_count(tensors) ** 0.5 if index % 2 else 1.0
    upstream = 2.0 if options.get("reduction") == "none" else 1.0  # see gradients_of; that of a mean is smaller
    return rounding_of(tensors, options) * scale_of(index // 2, tensors, options) * largest * gathered * upstream


def check_gradients(passes, tensors, loss, exact_gradients, options):
    wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    for index, gradient, exact in zip(wanted, gradients_of(loss, tensors), exact_gradients):
        tensor = tensors[index]
        assert gradient.dtype == tensor.dtype and gradient.shape == tensor.shape
        floor = gradient_floor(index, tensors, options)
        assert_near(f"gradient of {NAMES[index]} in {passes}", gradient, exact, tensor.dtype, floor)


def check_operators(tensors, gradients, cu_seqlens=None, key_lengths=None):
    """torch.library.opcheck of the operators that attention_kl calls."""
    tensors = [*tensors, None, None, None, None]  # no indexer, no sinks
    options = Options(gradients=gradients, causal=True, window_left=5, scale_s=0.3, softcap_s=4.0)
    problem = (cu_seqlens, cu_seqlens, key_lengths, None, None, *options)
    of_teacher = lib.DOT_T if gradients & ~(DQ_S | DK_S) else 0
    rows = lib.KL | lib.LSE_T | lib.LSE_S | of_teacher
    torch.library.opcheck(torch.ops.streamkl.forward, (*tensors, None, rows, *problem))
    if gradients:
        kl, lse_t, lse_s, *dot_t = torch.ops.streamkl.forward(*tensors, None, rows, *problem)
        dot_t, ones = dot_t[0] if dot_t else None, torch.ones_like(kl)
        torch.library.opcheck(torch.ops.streamkl.backward, (*tensors, lse_t, lse_s, kl, dot_t, ones, *problem))
        one_pass = (*tensors, lse_t, lse_s, ones, lib.KL | of_teacher, *problem)
        torch.library.opcheck(torch.ops.streamkl.forward_backward, one_pass)


def check_threads(**shape):
    """Eight threads with different problems: each result has the same bits as in a single thread."""
    lengths = [dict(shape, len_q=shape["len_q"] + n, len_k=shape["len_k"] + n, seed=n) for n in range(8)]
    problems = [make_tensors(**each) for each in lengths]

    def gradients(tensors):
        return gradients_of(streamkl.attention_kl(*tensors, causal=True, deterministic=True), tensors)

    expected = [gradients(tensors) for tensors in problems]

    def is_right(n):
        found = [gradients(problems[n]) for _ in range(20)]
        return all(torch.equal(one, other) for each in found for one, other in zip(each, expected[n]))

    with ThreadPoolExecutor(len(problems)) as pool:
        right = list(pool.map(is_right, range(len(problems))))
    assert all(right), right


# ---- The range of f16 ----------------------------------------------------------------------------------------------


def make_disagreeing(rows=8192, dtype=torch.float16, device="cpu"):
    """Two keys, of which the teacher attends to the first and the student to the second, in each of many rows.

    A row adds -16 and 16 to the gradients of the student's keys: their sum exceeds the range of f16, 65504.
    """

    def tensor(values, length):
        return torch.tensor(values).view(1, -1, 1, 1).expand(1, length, 1, 8).to(device, dtype, copy=True)

    q_t, k_t = tensor([4.0], rows), tensor([0.5, -0.5], 2)
    q_s, k_s = tensor([32.0], rows), tensor([0.0, 0.125], 2)
    return [q_t, k_t, q_s.requires_grad_(), k_s.requires_grad_()]


def one_pass_kl(*tensors, softmax_scale_s, **options):
    """attention_kl with both LSEs given."""
    _, lse_t, lse_s = streamkl.attention_kl(*tensors, softmax_scale_s=softmax_scale_s, return_lse=True)
    return streamkl.attention_kl(*tensors, softmax_scale_s=softmax_scale_s, lse_t=lse_t, lse_s=lse_s, **options)


def check_f16_range(function, reference_function, tensors):
    """Gradients of losses that are in the range of f16, although those of the sum over all rows are not."""
    rows = tensors[2].shape[1]
    weight = torch.full((1, rows), 8.0, device=tensors[0].device)
    losses = {
        "mean": (dict(reduction="mean"), 1.0),
        "weighted mean": (dict(reduction="mean", row_weight=weight), 1.0),
        "sum, scaled by the row weights": (dict(reduction="sum", row_weight=weight / (8 * rows)), 1.0),
        "sum, scaled afterwards": (dict(reduction="sum"), 1.0 / rows),
        "mean, with a loss scale": (dict(reduction="mean"), 1024.0),
        "mean of a small loss, with a loss scale": (dict(reduction="mean", softmax_scale_s=1e-4), 65536.0),
    }
    floats = [tensor for tensor in tensors if tensor is not None and tensor.is_floating_point()]
    others = tensors[len(floats) :]
    trained = [tensor for tensor in floats if tensor.requires_grad]
    for name, (reduction, upstream) in losses.items():
        given = dict(softmax_scale_s=0.5) | reduction
        exact_tensors = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in floats]
        exact_trained = [tensor for tensor in exact_tensors if tensor.requires_grad]
        exact = torch.autograd.grad(upstream * reference_function(*exact_tensors, *others, **given), exact_trained)
        gradients = torch.autograd.grad(upstream * function(*tensors, **given), trained)
        for tensor, gradient, expected in zip(trained, gradients, exact):
            assert gradient.dtype == tensor.dtype and gradient.stride() == tensor.stride()
            assert 0 < expected.abs().max() < 65504
            # Tensor cores round logit gradients to the type of q and k, also for f32 weights.
            assert_near(f"{name}: gradient {list(gradient.shape)}", gradient, expected, tensors[0].dtype)
