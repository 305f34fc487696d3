"""streamkl.indexer_kl: the KL divergence that trains the indexer of a sparse attention, in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _indexer_ops as ops
from . import _library as lib
from ._call import weighted
from ._checks import check_options
from .attention import Direction, Layout, Reduction, as_int32, expand_weight, promote_under_autocast


class IndexerRows(NamedTuple):
    """Numbers of every row, f32 ``[batch, heads_s, len_q]``, packed ``[heads_s, total_q]``; no gradient flows through them.

    A is the first argument of the KL, B the second: with KL(P || S) teacher and student. A row that sees no key has
    LSEs of -inf and 0 elsewhere.
    """

    kl: torch.Tensor  # cross_entropy - entropy
    cross_entropy: torch.Tensor  # -sum_j A_j log B_j: what training changes
    entropy: torch.Tensor  # -sum_j A_j log A_j
    lse_t: torch.Tensor  # [batch, heads_t, len_q]: of the keys that the row sees
    lse_s: torch.Tensor
    mass: torch.Tensor | None  # what the visible keys hold of the attention that a wider lse_t covers; else None


def indexer_kl(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    w_s: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale_t: float | None = None,
    softmax_scale_s: float | None = None,
    softcap_t: float = 0.0,
    relu: bool = True,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    key_lengths: torch.Tensor | None = None,
    direction: Direction = "forward",
    reduction: Reduction = "mean",
    row_weight: torch.Tensor | None = None,
    lse_t: torch.Tensor | None = None,
    lse_t_wider: bool = False,
    deterministic: bool = False,
    return_rows: bool = False,
    layout: Layout = "bnhd",
) -> torch.Tensor | tuple[torch.Tensor, IndexerRows]:
    """KL divergence between a teacher's attention, averaged over its heads, and an indexer's, without the N x N matrices.

    For every batch, student head and query row, over the keys that the row sees::

        P_j = mean_h softmax_j(softcap_t(softmax_scale_t * <q_t[h], k_t[j]>))         the teacher: r heads
        S_j = softmax_j(softmax_scale_s * sum_g w_s[g] relu(<q_s[g], k_s[j]>))        the indexer: G heads
        KL = sum_j P_j (log P_j - log S_j)                                            or sum_j S_j (log S_j - log P_j)

    Gradients flow to ``q_s``, ``k_s`` and ``w_s``. The teacher is fixed: a ``q_t`` or ``k_t`` that requires a gradient is
    refused; detach it. A row that sees no key has KL 0 and gradient 0 and does not count in a mean.

    With a scalar reduction, loss and gradients are computed together in the forward, and the backward only scales them: call
    it under ``torch.no_grad()`` where no gradient is wanted.

    Args:
        q_t: teacher queries, ``[batch, len_q, heads_t, dim_t]``; float32, float16 or bfloat16. Any strides will do:
            Megatron's ``[len, batch, heads, dim]`` is ``q_t.transpose(0, 1)``.
        k_t: teacher keys, ``[batch, len_k, key_heads_t, dim_t]``: fewer heads are shared (GQA, MQA), not expanded.
        q_s: index queries, ``[batch, len_q, heads_s * G, dim_s]``: index head g of student head h is head ``h * G + g``.
            With ``heads_t = r * heads_s`` each student head learns the mean of ``r`` consecutive teacher heads.
        k_s: index keys, ``[batch, len_k, dim_s]``, or ``[batch, len_k, key_heads_s, dim_s]``.
        w_s: weights of the index heads, ``[batch, len_q, G]``: one student head, which learns the mean of all teacher
            heads; or ``[batch, len_q, heads_s, G]``. Of any of the three types, whatever that of ``q_s`` is.
        indices: the keys that each row sees, ``[batch, len_q, top_k]`` or ``[batch, len_q, heads_s, top_k]``, int32 or
            int64, in any order, counted from the row's own sequence; -1, or a key that the masks hide: none. A key that is
            listed twice counts twice. One that is no key of the sequence is refused on a CPU and counts as none on a GPU,
            which would have to wait to say so. Default: all keys that the masks leave.
        causal: a query sees no key behind its own position. The last query stands at the last key (bottom-right).
        window_size: ``(left, right)``: a query sees keys at most so far before and behind it; -1: no limit.
        softmax_scale_t: what the teacher's dot products are multiplied with; default ``1 / sqrt(dim_t)``.
        softmax_scale_s: the indexer's; default ``1 / sqrt(dim_s * G)``.
        softcap_t: the teacher's logits become ``softcap * tanh(logit / softcap)``; 0: they do not.
        relu: ``False``: the index heads' dot products enter the sum as they are.
        cu_seqlens_q: ``[sequences + 1]`` int32: sequences lie end to end in tensors without a batch dimension, as of
            :func:`streamkl.attention_kl`.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: the longest sequence, or any bound of it: a tight one saves time on a GPU; default ``total_q``.
        max_seqlen_k: the same for the keys.
        key_lengths: ``[batch]`` int32: keys from ``key_lengths[b]`` on are padding. Positions stay as they are.
        direction: ``"forward"``: KL(P || S); ``"reverse"``: KL(S || P).
        reduction: ``"mean"`` over rows that see a key, weighted if there are weights; ``"sum"``; ``"none"``.
        row_weight: weight of every row, ``[batch, len_q]`` or ``[batch, heads_s, len_q]``, packed ``[total_q]`` or
            ``[heads_s, total_q]``. A row of weight 0 counts for nothing, whatever it holds; on a GPU
            a NaN in it still reaches gradients.
        lse_t: the teacher's log-sum-exp (natural log, f32) of every row over exactly the keys that it sees,
            ``[batch, heads_t, len_q]``, packed ``[heads_t, total_q]``, as the attention that has just run returns it:
            the teacher's logits are then computed once. Default: computed.
        lse_t_wider: ``lse_t`` covers more keys than a row sees: the whole sequence beside ``indices``, sinks, other
            branches. The teacher is then its conditional distribution on the keys that the row sees, at the price of
            one more look at its logits.
        deterministic: gradients have the same bits at every run; so does ``torch.use_deterministic_algorithms(True)``.
        return_rows: also return what is known of every row.
        layout: ``"bnhd"``, as above, or ``"bhnd"``: ``[batch, heads, length, dim]``, packed ``[heads, total, dim]``.

    Returns:
        The loss, f32: a scalar, or with ``reduction="none"`` the (weighted) KL of every row, ``[batch, heads_s, len_q]``,
        packed ``[heads_s, total_q]``. With ``return_rows`` a tuple ``(loss, IndexerRows)``.

    Raises:
        ValueError: an argument does not fit; the message names it, with its shape or value and what is accepted.
    """
    check_options(direction, reduction, layout, window_size, softmax_scale_t, softmax_scale_s)
    if lse_t_wider and lse_t is None:
        raise ValueError("lse_t_wider=True: needs lse_t")
    packed, heads_first = cu_seqlens_q is not None, layout == "bhnd"
    gradients = _wanted_gradients(q_t, k_t, q_s, k_s, w_s)
    if q_t.dtype != k_t.dtype or q_s.dtype != k_s.dtype:
        q_t, k_t, q_s, k_s = promote_under_autocast(q_t, k_t, q_s, k_s)
    k_s, w_s, indices = (_with_heads(tensor, packed, heads_first) for tensor in (k_s, w_s, indices))
    if indices is not None and indices.dtype == torch.int64:
        limits = torch.iinfo(torch.int32)  # what is far out of range stays out of range
        indices = indices.clamp(limits.min, limits.max).to(torch.int32)
    cu_seqlens_q, cu_seqlens_k, key_lengths = map(as_int32, (cu_seqlens_q, cu_seqlens_k, key_lengths))
    if row_weight is not None:
        row_weight = expand_weight(row_weight, w_s, packed, heads_first)

    tensors = (q_t, k_t, q_s, k_s, w_s, indices)
    problem = (
        cu_seqlens_q, cu_seqlens_k, key_lengths, -1 if max_seqlen_q is None else max_seqlen_q,
        -1 if max_seqlen_k is None else max_seqlen_k, causal, *window_size, softmax_scale_t or 0.0, softmax_scale_s or 0.0,
        softcap_t or 0.0, not relu, direction == "reverse",
        deterministic or torch.are_deterministic_algorithms_enabled(), heads_first, gradients,
    )  # fmt: skip
    fixed_weight = row_weight is None or not row_weight.requires_grad
    if gradients and reduction != "none" and fixed_weight and not lse_t_wider:
        loss, rows = _one_pass(tensors, lse_t, row_weight, return_rows, problem)
    else:
        rows = _forward(tensors, lse_t, lse_t_wider, return_rows, problem)
        loss = weighted(rows["kl"], row_weight)
        loss = loss if reduction == "none" else loss.sum()
    if reduction == "mean":
        loss = _divide_by_rows(loss, rows["lse_s"], row_weight)
    if not return_rows:
        return loss
    rows["kl"] = rows["kl"].detach()
    return loss, IndexerRows(mass=rows.pop("mass", None), **rows)


def _wanted_gradients(q_t, k_t, q_s, k_s, w_s) -> int:
    if not torch.is_grad_enabled():
        return 0
    for name, tensor in ("q_t", q_t), ("k_t", k_t):
        if tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient: the teacher of an indexer is fixed; pass {name}.detach()")
    return q_s.requires_grad * lib.DQ_S + k_s.requires_grad * lib.DK_S + w_s.requires_grad * lib.DW_S


def _with_heads(tensor: torch.Tensor | None, packed: bool, heads_first: bool) -> torch.Tensor | None:
    """A tensor of one head may come without that dimension."""
    if tensor is None or tensor.dim() != (2 if packed else 3):
        return tensor
    return tensor.unsqueeze(-3 if heads_first else -2)


_ENTROPIES = ops.CROSS_ENTROPY | ops.ENTROPY


def _one_pass(tensors, lse_t, row_weight, return_rows, problem):
    """The LSE of the indexer, for which the teacher is not looked at, then everything else in a single sweep."""
    with torch.no_grad():
        if lse_t is None:
            lse_t, lse_s = torch.ops.streamkl.indexer_rows(*tensors, None, ops.LSE_T | ops.LSE_S, *problem)
        else:
            (lse_s,) = torch.ops.streamkl.indexer_rows(*tensors, lse_t, ops.LSE_S, *problem)
    wanted = ops.KL | (_ENTROPIES if return_rows else 0)
    loss, *made = ops.IndexerOnePass.apply(*tensors, lse_t, lse_s, row_weight, wanted, problem)
    return loss, {**dict(zip(ops.row_names(wanted), made)), "lse_t": lse_t, "lse_s": lse_s}


def _forward(tensors, lse_t, lse_t_wider, return_rows, problem):
    """The rows, of which kl can be differentiated where gradients are wanted."""
    gradients = problem[-1]
    wanted = ops.KL | ops.LSE_S
    if return_rows or gradients:
        wanted |= ops.LSE_T
    if return_rows:
        wanted |= _ENTROPIES | (ops.MASS if lse_t_wider else 0)
    if gradients:
        made = ops.IndexerForward.apply(*tensors, lse_t, wanted, problem)
    else:
        made = torch.ops.streamkl.indexer_rows(*tensors, lse_t, wanted, *problem)
    return dict(zip(ops.row_names(wanted), made))


def _divide_by_rows(loss, lse_s, row_weight):
    """The mean over rows that see a key; 0 if there is none, or no weight at all."""
    seen = lse_s != -torch.inf
    total = seen.sum() if row_weight is None else torch.where(seen, row_weight, 0.0).sum()
    return loss / torch.where(total == 0, 1, total)
