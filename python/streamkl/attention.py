"""streamkl.attention_kl: the KL divergence between two attention distributions, in one call."""

from __future__ import annotations

from typing import Literal

import torch

from . import _library as lib
from ._call import weighted
from ._checks import check_options, sizes
from ._ops import Forward, OnePass

Direction = Literal["forward", "reverse"]
Reduction = Literal["mean", "sum", "none"]
Layout = Literal["bnhd", "bhnd"]


def attention_kl(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale_t: float | None = None,
    softmax_scale_s: float | None = None,
    softcap_t: float = 0.0,
    softcap_s: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    key_lengths: torch.Tensor | None = None,
    direction: Direction = "forward",
    reduction: Reduction = "mean",
    row_weight: torch.Tensor | None = None,
    lse_t: torch.Tensor | None = None,
    lse_s: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    layout: Layout = "bnhd",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL divergence between a teacher's and a student's attention, without the N x N matrices.

    For every batch, student head and query row, over the keys that the row sees::

        P = softmax(softcap_t(softmax_scale_t * <q_t, k_t>))    the teacher
        S = softmax(softcap_s(softmax_scale_s * <q_s, k_s>))    the student
        KL = sum_j P_j (log P_j - log S_j)                      or sum_j S_j (log S_j - log P_j)

    Gradients flow to whichever of the four tensors require them; what is not required is not computed. A row that sees
    no key has KL 0 and gradient 0 and does not count in a mean.

    Args:
        q_t: teacher queries, ``[batch, len_q, heads_t, dim_t]``; float32, float16 or bfloat16.
        k_t: teacher keys, ``[batch, len_k, key_heads_t, dim_t]``: fewer heads are shared (GQA, MQA), not expanded.
        q_s: student queries, ``[batch, len_q, heads_s, dim_s]``. With ``heads_t = r * heads_s`` each student head learns
            the mean of ``r`` consecutive teacher heads. Head sizes and types may differ between teacher and student.
        k_s: student keys, ``[batch, len_k, key_heads_s, dim_s]``.
        causal: a query sees no key behind its own position. The last query stands at the last key (bottom-right).
        window_size: ``(left, right)``: a query sees keys at most so far before and behind it; -1: no limit.
        softmax_scale_t: what the teacher's dot products are multiplied with; default ``1 / sqrt(dim_t)``.
        softmax_scale_s: the student's; default ``1 / sqrt(dim_s)``.
        softcap_t: the teacher's logits become ``softcap * tanh(logit / softcap)``; 0: they do not.
        softcap_s: the student's.
        cu_seqlens_q: ``[sequences + 1]`` int32: sequences lie end to end in tensors ``[total_q, heads, dim]``, and
            sequence b has rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: the longest sequence, or any bound of it: a tight one saves time on a GPU; default ``total_q``.
        max_seqlen_k: the same for the keys.
        key_lengths: ``[batch]`` int32: keys from ``key_lengths[b]`` on are padding. Positions stay as they are.
        direction: ``"forward"``: KL(P || S); ``"reverse"``: KL(S || P).
        reduction: ``"mean"`` over rows that see a key, weighted if there are weights; ``"sum"``; ``"none"``.
        row_weight: weight of every row, ``[batch, len_q]`` or ``[batch, heads_s, len_q]``, packed ``[total_q]`` or
            ``[heads_s, total_q]``. A row of weight 0 counts for nothing, whatever it holds; on a GPU
            a NaN in it still reaches gradients.
        lse_t: the teacher's log-sum-exp (natural log, f32) of every row, ``[batch, heads_t, len_q]``, packed
            ``[heads_t, total_q]``, as flash attention returns it. With both LSEs and a scalar reduction, loss and
            gradients come from a single sweep in the forward: two thirds of the work. Both must then be of exactly
            the visible keys. Alone, it saves a pass where ``heads_t > heads_s``, and may cover more keys: the teacher is
            then its conditional distribution on the visible ones.
        lse_s: the student's, ``[batch, heads_s, len_q]``.
        deterministic: gradients have the same bits at every run. Only Hopper GPUs are faster without, and
            only for heads of up to 128 dimensions; so does
            ``torch.use_deterministic_algorithms(True)``.
        return_lse: also return both LSEs.
        layout: ``"bnhd"``, as above, or ``"bhnd"``: ``[batch, heads, length, dim]``, packed ``[heads, total, dim]``.

    Returns:
        The loss, f32: a scalar, or with ``reduction="none"`` the (weighted) KL of every row, ``[batch, heads_s, len_q]``,
        packed ``[heads_s, total_q]``. With ``return_lse`` a tuple ``(loss, lse_t, lse_s)``; no gradient flows through LSEs.

    Raises:
        ValueError: an argument does not fit; the message names it, with its shape or value and what is accepted.
    """
    check_options(direction, reduction, layout, window_size, softmax_scale_t, softmax_scale_s)
    packed, heads_first = cu_seqlens_q is not None, layout == "bhnd"
    if q_t.dtype != k_t.dtype or q_s.dtype != k_s.dtype:
        q_t, k_t, q_s, k_s = promote_under_autocast(q_t, k_t, q_s, k_s)
    if cu_seqlens_q is not None or cu_seqlens_k is not None or key_lengths is not None:
        cu_seqlens_q, cu_seqlens_k, key_lengths = map(as_int32, (cu_seqlens_q, cu_seqlens_k, key_lengths))
    if row_weight is not None:
        row_weight = expand_weight(row_weight, q_s, packed, heads_first)

    window_left, window_right = window_size
    problem = (
        cu_seqlens_q, cu_seqlens_k, key_lengths, -1 if max_seqlen_q is None else max_seqlen_q,
        -1 if max_seqlen_k is None else max_seqlen_k, causal, window_left, window_right,
        softmax_scale_t or 0.0, softmax_scale_s or 0.0, softcap_t or 0.0, softcap_s or 0.0, direction == "reverse",
        deterministic or torch.are_deterministic_algorithms_enabled(), heads_first, _wanted_gradients(q_t, k_t, q_s, k_s),
    )  # fmt: skip
    wants_gradients, scalar = problem[-1] != 0, reduction != "none"
    fixed_weight = row_weight is None or not row_weight.requires_grad
    if lse_t is not None and lse_s is not None and scalar and fixed_weight and wants_gradients:
        loss, out_t, out_s = OnePass.apply(q_t, k_t, q_s, k_s, lse_t, lse_s, row_weight, problem), lse_t, lse_s
    else:
        if wants_gradients:
            kl, *lses = Forward.apply(q_t, k_t, q_s, k_s, lse_t, return_lse, problem)
        else:
            kl, *lses = torch.ops.streamkl.forward(q_t, k_t, q_s, k_s, lse_t, return_lse, *problem)
        out_t, out_s = lses[:2] if return_lse else (None, None)
        loss = weighted(kl, row_weight).sum() if scalar else weighted(kl, row_weight)
    if reduction == "mean":
        loss = _divide_by_rows(loss, q_s, k_s, row_weight, problem)
    return (loss, out_t, out_s) if return_lse else loss


def _wanted_gradients(q_t, k_t, q_s, k_s) -> int:
    if not torch.is_grad_enabled():
        return 0
    return (
        q_t.requires_grad * lib.DQ_T
        + k_t.requires_grad * lib.DK_T
        + q_s.requires_grad * lib.DQ_S
        + k_s.requires_grad * lib.DK_S
    )


def promote_under_autocast(q_t, k_t, q_s, k_s):
    """Autocast may leave queries and keys of one model in different types: the wider one holds both."""
    if not torch.is_autocast_enabled(q_s.device.type):
        return q_t, k_t, q_s, k_s  # the check names them
    type_t, type_s = torch.promote_types(q_t.dtype, k_t.dtype), torch.promote_types(q_s.dtype, k_s.dtype)
    return q_t.to(type_t), k_t.to(type_t), q_s.to(type_s), k_s.to(type_s)


def as_int32(lengths: torch.Tensor | None) -> torch.Tensor | None:
    return None if lengths is None else lengths.to(torch.int32).contiguous()


def expand_weight(row_weight: torch.Tensor, student: torch.Tensor, packed: bool, heads_first: bool) -> torch.Tensor:
    """f32, with a heads dimension: [batch, heads_s, len_q], packed [heads_s, total_q]; `student` has these sizes."""
    if student.dim() != (3 if packed else 4):
        return row_weight  # the operator refuses that tensor
    batch, heads, length = sizes(student.shape, packed, heads_first)
    per_row, per_head = ((length,), (heads, length)) if packed else ((batch, length), (batch, heads, length))
    if tuple(row_weight.shape) not in (per_row, per_head):
        raise ValueError(f"row_weight: shape {list(row_weight.shape)} must be {list(per_row)} or {list(per_head)}")
    weight = row_weight.float()
    return weight if weight.dim() == len(per_head) else weight.unsqueeze(-2).expand(per_head)


# ---- The mean over rows that see a key -----------------------------------------------------------------------------
#
# Query i of a sequence stands at p = i + len_k - len_q and sees the keys j < keys with p - left <= j <= p + right. There
# is one if p + right >= 0 and p - left <= keys - 1: rows `first` up to `end` see a key, where
#
#     first = len_q - len_k - right        end = len_q - len_k + keys + left        within 0..len_q


def _divide_by_rows(loss, q_s, k_s, row_weight, problem):
    cu_seqlens_q, cu_seqlens_k, key_lengths, _, _, causal, left, right, *_, heads_first, _ = problem
    right = 0 if causal else right
    batch, heads, len_q = sizes(q_s.shape, cu_seqlens_q is not None, heads_first)
    len_k = k_s.shape[-2 if heads_first else -3]
    if cu_seqlens_q is None and key_lengths is None:
        first, end = _rows_that_see(len_q, len_k, len_k, left, right)
        if row_weight is None:
            return loss * (1.0 / max(batch * heads * (end - first), 1))
        return _divide_by_weight(loss, row_weight[..., first:end].sum())
    if cu_seqlens_q is None:
        first, end = _rows_that_see(len_q, len_k, key_lengths, left, right)
    else:
        first, end = _rows_that_see(cu_seqlens_q.diff(), cu_seqlens_k.diff(), cu_seqlens_k.diff(), left, right)
    if row_weight is None:
        return loss / ((end - first).sum() * heads).clamp(min=1)
    row = torch.arange(len_q, device=loss.device)
    if cu_seqlens_q is None:
        seeing = (row >= first) & (row < end.unsqueeze(-1))
    else:  # a row behind the last sequence is compared with that, and is not in it
        sequence = torch.searchsorted(cu_seqlens_q[1:], row, right=True).clamp(max=cu_seqlens_q.shape[0] - 2)
        row = row - cu_seqlens_q[sequence]
        seeing = (row >= (first if isinstance(first, int) else first[sequence])) & (row < end[sequence])
    return _divide_by_weight(loss, (row_weight * seeing.unsqueeze(-2)).sum())


def _rows_that_see(len_q, len_k, keys, left, right):
    """(first, end) of the rows of a sequence that see a key; numbers, or tensors where lengths are."""
    first = _clip(len_q - len_k - right, 0, len_q) if right >= 0 else 0
    end = _clip(len_q - len_k + keys + left, first, len_q) if left >= 0 else len_q
    if isinstance(keys, torch.Tensor):
        return first, torch.where(keys > 0, end, first)
    return first, end if keys > 0 else first


def _clip(value, lowest, highest):
    if isinstance(value, torch.Tensor):
        return value.clamp(min=lowest).clamp(max=highest)
    return min(max(value, lowest), highest)


def _divide_by_weight(loss, total):
    """No weight at all: the sum is 0, and so is its mean."""
    return loss / torch.where(total == 0, 1.0, total)
