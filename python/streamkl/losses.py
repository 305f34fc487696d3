"""Losses on attention: attention_kl and indexer_kl as modules that hold their options, and what papers use besides them.

docs/guide/objectives.md lists the published objectives with the call that computes each.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, get_args

import torch

from ._attention_kl import attention_kl, weight_of_rows
from ._mean import divided, weighted
from ._options import (
    RULES,
    AttentionOptions,
    IndexerOptions,
    Layout,
    Reduction,
    as_int32,
    check_choice,
    defaults_of,
    is_whole,
)
from ._tensors import check_dense, check_tensors
from .indexer import indexer_kl

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Loss(torch.nn.Module):
    """A module that holds the options of its function. It has no parameters and no buffers: nothing of a ``state_dict``."""

    def __init__(self, declared: Any, given: dict[str, Any]) -> None:
        super().__init__()
        defaults = defaults_of(declared)
        if unknown := given.keys() - defaults.keys():
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {min(unknown)!r}")
        self.options: dict[str, Any] = given

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class AttentionKLLoss(_Loss):
    """KL between teacher and student attention. The options are those of :func:`streamkl.attention_kl`.

    Example::

        criterion = streamkl.AttentionKLLoss(causal=True, window_size=(4096, 0))
        loss = criterion(q_t, k_t, q_s, k_s)
    """

    def __init__(self, **options: Unpack[AttentionOptions]) -> None:
        super().__init__(AttentionOptions, {**options})

    def forward(
        self,
        q_t: torch.Tensor,
        k_t: torch.Tensor,
        q_s: torch.Tensor,
        k_s: torch.Tensor,
        **batch: Unpack[AttentionOptions],
    ) -> torch.Tensor:
        """The loss of one batch. Its own options, such as lengths, weights and LSEs, override those of the module."""
        options: AttentionOptions = {**self.options, **batch}  # type: ignore[typeddict-item]
        return attention_kl(q_t, k_t, q_s, k_s, **options)


class IndexerKLLoss(_Loss):
    """KL between a teacher's mean attention and an indexer's. The options are those of :func:`streamkl.indexer_kl`.

    Example::

        criterion = streamkl.IndexerKLLoss(causal=True)
        loss = criterion(q_t.detach(), k_t.detach(), q_s, k_s, w_s, lse_t=lse_t)
    """

    def __init__(self, **options: Unpack[IndexerOptions]) -> None:
        super().__init__(IndexerOptions, {**options})

    def forward(
        self,
        q_t: torch.Tensor,
        k_t: torch.Tensor,
        q_s: torch.Tensor,
        k_s: torch.Tensor,
        w_s: torch.Tensor,
        indices: torch.Tensor | None = None,
        **batch: Unpack[IndexerOptions],
    ) -> torch.Tensor:
        """The loss of one batch. Its own options, such as lengths, weights and LSEs, override those of the module."""
        options: IndexerOptions = {**self.options, **batch}  # type: ignore[typeddict-item]
        return indexer_kl(q_t, k_t, q_s, k_s, w_s, indices, **options)


_OF_TEACHERS = frozenset(
    ("direction", "sink_t", "sink_s", "lse_t", "lse_s", "check_lse", "parallel", "softmax_scale_t", "softcap_t",
     "pool", "pool_heads", "pool_blocks")
)  # fmt: skip


def entropy(q: torch.Tensor, k: torch.Tensor, **options: Unpack[AttentionOptions]) -> torch.Tensor:
    """Entropy of an attention, -sum_j A_j log A_j of each row, in nats. Gradients flow to ``q`` and ``k``.

    It is log n - KL(A || U) with the uniform distribution U on the n keys that a row attends to, so its absolute error is that
    of log n in f32.

    Args:
        q: queries, ``[batch, len_q, heads, dim]``, packed ``[total_q, heads, dim]``.
        k: keys, ``[batch, len_k, key_heads, dim]``.
        options: those of :func:`streamkl.attention_kl` about masks, sequences, rows and reduction. ``softmax_scale_s`` and
            ``softcap_s`` are those of ``q`` and ``k``.

    Returns:
        The entropy, f32: a scalar, or with ``reduction="none"`` the weighted entropy of each row, ``[batch, heads, len_q]``.

    Raises:
        ValueError: an argument does not fit, or belongs to a teacher.
    """
    for name in sorted(_OF_TEACHERS & options.keys()):
        raise ValueError(f"{name}: entropy() has no teacher; leave it out")
    if options.get("link_s", "softmax") != "softmax":
        raise ValueError(f"link_s={options['link_s']!r}: must be 'softmax' for entropy()")
    row_weight = options.get("row_weight")
    check_choice("reduction", options.get("reduction", "mean"), get_args(Reduction))
    check_tensors("entropy", q=q, k=k, optional=dict(row_weight=row_weight))
    reduction = options.get("reduction", "mean")
    asked: AttentionOptions = {**options, "direction": "reverse", "reduction": "none", "row_weight": None}
    uniform_q, uniform_k = (torch.zeros_like(tensor, requires_grad=False) for tensor in (q, k))
    try:
        kl, log_n, _ = attention_kl(uniform_q, uniform_k, q, k, return_lse=True, **asked)
    except ValueError as error:  # about either of the two attentions, which have the same shapes
        raise ValueError(re.sub(r"\b([qk])_[ts]\b", r"\1", str(error))) from None
    attends = ~log_n.isinf()
    rows = torch.where(attends, log_n, 0.0) - kl
    weight = (
        attends if row_weight is None else weight_of_rows(row_weight, tuple(rows.shape), q, "q").where(attends, 0.0)
    )
    rows = weighted(rows, weight)
    if reduction == "none":
        return rows
    return divided(rows, weight.sum() if reduction == "mean" else 1)


def _check_fit(name: str, tensor: torch.Tensor, expected: tuple[int, ...], others: str, shares: bool = True) -> None:
    """Raises ValueError for a [batch, heads, length, dim] that does not fit; with `shares` its heads may serve several each."""
    heads, wanted = tensor.shape[1], expected[1]
    fits = heads > 0 and wanted % heads == 0 if shares else heads == wanted
    if not fits or (tensor.shape[0], *tensor.shape[2:]) != (expected[0], *expected[2:]):
        given = "batch {}, {} heads, length {} and head size {}".format(*tensor.shape)
        accepted = "batch {}, {} heads, length {} and head size {}".format(*expected)
        raise ValueError(f"{name}: {given} must be {accepted}, as {others}; keys may have a divisor of the heads")


def relation_heads(tensor: torch.Tensor, heads: int, layout: Layout = "bnhd") -> torch.Tensor:
    """Regroups the concatenated heads of queries, keys or values into `heads` relation heads, as MiniLMv2 does.

    Teacher and student with other numbers of heads then have equally many. Packed tensors are accepted, too.
    """
    check_dense(tensor=tensor, optional={})
    check_choice("layout", layout, get_args(Layout))
    if tensor.dim() < 3:
        raise ValueError(f"tensor: shape {list(tensor.shape)} must be [..., length, heads, dim]")
    length_first = tensor if layout == "bnhd" else tensor.transpose(-3, -2)
    width = length_first.shape[-2] * length_first.shape[-1]
    if not is_whole(heads) or heads < 1 or width % heads:
        raise ValueError(f"heads={heads!r}: must divide the width {width} of all heads")
    regrouped = length_first.reshape(*length_first.shape[:-2], heads, width // heads)
    return regrouped if layout == "bnhd" else regrouped.transpose(-3, -2)


def score_mse(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    *,
    softmax_scale_t: float | None = None,
    softmax_scale_s: float | None = None,
    key_lengths: torch.Tensor | None = None,
    layout: Layout = "bnhd",
) -> torch.Tensor:
    """Mean squared error of the scores before the softmax, as in TinyBERT, in O(N d^2) time and O(N d) memory.

    The mean is over all pairs of queries and keys; pairs with padding count as 0. A sum of squared dot products needs two Gram
    matrices and no scores::

        sum_ij <a_i, b_j>^2 = <sum_i a_i a_i^T, sum_j b_j b_j^T>,   a = [scaled q_t - q_s, q_s],   b = [k_t, k_t - k_s]

    This holds for all pairs at once, so there is no causal mask. Gram matrices are float64, and equal inputs give 0.

    Args:
        q_t: teacher queries, ``[batch, len_q, heads, dim_t]``.
        k_t: teacher keys, ``[batch, len_k, key_heads_t, dim_t]``.
        q_s: student queries, ``[batch, len_q, heads, dim_s]``: as many heads as the teacher has.
        k_s: student keys, ``[batch, len_k, key_heads_s, dim_s]``.
        softmax_scale_t: factor of the teacher's dot products; default ``1 / sqrt(dim_t)``.
        softmax_scale_s: factor of the student's dot products; default ``1 / sqrt(dim_s)``.
        key_lengths: ``[batch]``: keys from ``key_lengths[b]`` on are padding.
        layout: ``"bnhd"``, as above, or ``"bhnd"``.
    """
    check_dense(q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_s, optional=dict(key_lengths=key_lengths))
    tensors = dict(q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_s)
    check_choice("layout", layout, get_args(Layout))
    for name, scale in ("softmax_scale_t", softmax_scale_t), ("softmax_scale_s", softmax_scale_s):
        RULES[AttentionOptions][name](name, scale)
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"{name}={scale}: must be finite")
    for name, tensor in tensors.items():
        if tensor.dim() != 4 or not tensor.is_floating_point():
            shape, expected = list(tensor.shape), "[batch, length, heads, dim] of floating-point numbers"
            raise ValueError(f"{name}: {tensor.dtype} {shape} must be {expected}")
        if tensor.device != q_t.device:
            raise ValueError(f"{name} is on {tensor.device}: must be on {q_t.device} as q_t is")
    q_t, k_t, q_s, k_s = (each if layout == "bhnd" else each.transpose(1, 2) for each in tensors.values())
    batch, heads, len_q, dim_t = q_t.shape
    len_k, dim_s = k_t.shape[2], q_s.shape[3]
    _check_fit("k_t", k_t, (batch, heads, len_k, dim_t), "q_t")
    _check_fit("q_s", q_s, (batch, heads, len_q, dim_s), "q_t", shares=False)
    _check_fit("k_s", k_s, (batch, heads, len_k, dim_s), "q_s and k_t")
    key_lengths = as_int32("key_lengths", key_lengths)
    if key_lengths is not None and (key_lengths.shape != (batch,) or key_lengths.device != q_t.device):
        given = f"shape {list(key_lengths.shape)} on {key_lengths.device}"
        raise ValueError(f"key_lengths: {given} must be [{batch}] on {q_t.device}")
    dim = max(dim_t, dim_s)

    def rows(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        padded = torch.nn.functional.pad(tensor.double() * scale, (0, dim - tensor.shape[3]))
        return padded.repeat_interleave(heads // tensor.shape[1], dim=1)

    scale_t = dim_t**-0.5 if softmax_scale_t is None else float(softmax_scale_t)
    scale_s = dim_s**-0.5 if softmax_scale_s is None else float(softmax_scale_s)
    query_t, query_s, key_t, key_s = rows(q_t, scale_t), rows(q_s, scale_s), rows(k_t, 1), rows(k_s, 1)
    queries, keys = torch.cat([query_t - query_s, query_s], dim=3), torch.cat([key_t, key_t - key_s], dim=3)
    if key_lengths is not None:
        is_key = torch.arange(len_k, device=keys.device) < key_lengths.unsqueeze(1)
        keys = torch.where(is_key[:, None, :, None], keys, 0.0)
    total = torch.sum((queries.mT @ queries) * (keys.mT @ keys))
    return (total / max(batch * heads * len_q * len_k, 1)).float()
