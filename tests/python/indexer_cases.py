"""Calls of indexer_kl, compared with the reference in float64."""

from typing import NamedTuple

import torch
from cases import TOLERANCE, assert_near

import streamkl
from streamkl import reference


class Indexer(NamedTuple):
    """The positional arguments of indexer_kl."""

    q_t: torch.Tensor
    k_t: torch.Tensor
    q_s: torch.Tensor
    k_s: torch.Tensor
    w_s: torch.Tensor
    indices: "torch.Tensor | None" = None

    @property
    def trained(self):
        return [tensor for tensor in self[2:5] if tensor.requires_grad]


def make_indexer(
    batch=2, len_q=19, len_k=23, heads_t=4, key_heads_t=2, heads_s=1, key_heads_s=1, index_heads=3, dim_t=8, dim_s=5, top_k=0,
    layout="bnhd", packed=False, dtype_t=torch.float32, dtype_s=torch.float32, dtype_w=torch.float32, device="cpu", seed=0,
    keys_s=None,
):  # fmt: skip
    """Random tensors; q_s, k_s and w_s require gradients. keys_s: keys of the indexer, if they are not those of the teacher.

    Index queries and keys are multiples of 1/8: their dot products are exact in f32, so that f32 and float64 agree on the
    ReLU. Indices contain -1, masked keys and repeated keys; the first row has no key.
    """
    generator = torch.Generator().manual_seed(seed)

    def tensor(length, heads, dim, dtype, grid=None):
        shape = (heads, length, dim) if layout == "bhnd" else (length, heads, dim)
        values = torch.randn(shape if packed else (batch, *shape), generator=generator)
        return (values if grid is None else (values / grid).round() * grid).to(device, dtype)

    q_t, k_t = tensor(len_q, heads_t, dim_t, dtype_t), tensor(len_k, key_heads_t, dim_t, dtype_t)
    q_s = tensor(len_q, heads_s * index_heads, dim_s, dtype_s, 0.125).requires_grad_()
    keys_s = len_k if keys_s is None else keys_s
    k_s = tensor(keys_s, key_heads_s, dim_s, dtype_s, 0.125).requires_grad_()
    w_s = tensor(len_q, heads_s, index_heads, dtype_w).requires_grad_()
    if not top_k:
        return Indexer(q_t, k_t, q_s, k_s, w_s)
    indices = torch.randint(-1, keys_s, (*w_s.shape[:-1], top_k), generator=generator, dtype=torch.int32)
    indices.view(-1, top_k)[:1] = -1
    return Indexer(q_t, k_t, q_s, k_s, w_s, indices.to(device))


def exact_of(indexer: Indexer) -> Indexer:
    """The same tensors in float64."""
    doubles = (tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in indexer[:5])
    return Indexer(*doubles, indexer.indices)


def gradients_of(loss, indexer: Indexer):
    """Gradients of a loss, or of rows with a different upstream gradient per row."""
    upstream = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view_as(loss) if loss.dim() else None
    return torch.autograd.grad(loss, indexer.trained, upstream)


def compare(indexer: Indexer, **options):
    """Compares loss, rows and gradients with the reference in float64: the teacher's LSE computed and, unless it is among
    the options, given."""
    exact = exact_of(indexer)
    exact_loss, exact_rows = reference.indexer_kl(*exact, return_rows=True, **options)
    exact_gradients = gradients_of(exact_loss, exact)
    known = {} if "lse_t" in options else dict(lse_t=exact_rows.lse_t.float())
    for given in ({}, known) if known else ({},):
        loss, rows = streamkl.indexer_kl(*indexer, return_rows=True, **options, **given)
        assert loss.dtype == torch.float32
        floor = floor_of(indexer, options) * (rows.kl.numel() if options.get("reduction") == "sum" else 1)
        assert_near("loss", loss, exact_loss, floor=floor)
        assert (rows.mass is not None) == (options.get("lse_t_wider", False) and "pool" not in options)
        for name in rows._fields:
            if (row := getattr(rows, name)) is not None:
                assert not row.requires_grad
                assert_near(f"rows.{name}", row, getattr(exact_rows, name), floor=floor_of(indexer, options))
        check_gradients(loss, indexer, exact_gradients, options)
        with torch.no_grad():
            alone = streamkl.indexer_kl(*indexer, **options, **given)
        assert_near("loss without gradients", alone, exact_loss, floor=floor)


def floor_of(indexer: Indexer, options):
    """P and S are exp(logit - LSE) in f32: their errors are a few roundings of the largest logit."""
    if any(tensor.numel() == 0 for tensor in indexer[:5]):
        return 1e-6
    norm_q_t, norm_k_t, norm_q, norm_k = (tensor.detach().float().norm(dim=-1).max().item() for tensor in indexer[:4])
    weight, scales = indexer.w_s.detach().float().abs().sum(-1).max().item(), scales_of(indexer, options)
    return 1e-6 + 8 * 2.0**-24 * (1 + max(scales[0] * norm_q_t * norm_k_t, scales[1] * weight * norm_q * norm_k))


def scales_of(indexer: Indexer, options):
    scale_t, scale_s = options.get("softmax_scale_t"), options.get("softmax_scale_s")
    default_s = (indexer.q_s.shape[-1] * indexer.w_s.shape[-1]) ** -0.5
    return abs(scale_t or indexer.q_t.shape[-1] ** -0.5), abs(scale_s or default_s)


def check_gradients(loss, indexer: Indexer, exact_gradients, options):
    largest = [tensor.detach().abs().max().item() if tensor.numel() else 0.0 for tensor in indexer[2:5]]
    dot = largest[0] * largest[1] * indexer.q_s.shape[-1]
    upstream = 2.0 if loss.dim() else 1.0  # see gradients_of; that of a mean is smaller
    # The error of one logit in dq, dk and dw. dk adds those of all rows and heads, with random signs.
    gathered = (indexer.w_s.numel() + 1) ** 0.5
    factors = dict(zip("qkw", (largest[2] * largest[1], largest[2] * largest[0] * gathered, dot)))
    trained = [name for name, tensor in zip("qkw", indexer[2:5]) if tensor.requires_grad]
    for name, tensor, gradient, exact in zip(trained, indexer.trained, gradients_of(loss, indexer), exact_gradients):
        assert gradient.dtype == tensor.dtype and gradient.shape == tensor.shape
        floor = floor_of(indexer, options) * scales_of(indexer, options)[1] * factors[name] * upstream
        # Tensor cores round the gradients of logits to the type of q and k, whatever the type of the weights.
        types = (tensor.dtype, indexer.q_s.dtype) if tensor.is_cuda else (tensor.dtype,)
        assert_near(f"gradient of {name}_s", gradient, exact, max(types, key=TOLERANCE.get), floor)


def check_masked_nan(indexer: Indexer, keys):
    """NaN in padded keys, and in the weights and queries of rows without visible keys, changes nothing."""
    lengths = dict(key_lengths=torch.tensor([0, keys], device=indexer.q_t.device), causal=True)
    clean = streamkl.indexer_kl(*indexer, **lengths)
    with torch.no_grad():
        for tensor in indexer[:5]:
            tensor[0] = torch.nan
        for tensor in (indexer.k_t, indexer.k_s):
            tensor[1, keys:] = torch.inf
    loss = streamkl.indexer_kl(*indexer, **lengths)
    assert torch.equal(loss, clean)
    for gradient in torch.autograd.grad(loss, indexer.trained):
        assert gradient.isfinite().all() and (gradient[0] == 0).all()
