"""streamkl.attention_kl: the KL divergence between two attention distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from . import _library as lib
from ._check_lse import check_both_lses, is_lse_check_on
from ._checks import sizes
from ._distributed import may_be_distributed
from ._mean import divided, row_count, weighted
from ._ops import BOTH_LSES, Forward, OnePass, Operators
from ._options import (
    AllAttentionOptions, CpComm, CpGrads, CpLayout, Direction, Layout, Reduction, check_flags, refuse_transforms, translate,
)  # fmt: skip
from ._problem import DK_S, DK_T, DQ_S, DQ_T, DSINK_S, DSINK_T, KL_FORWARD

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_kl(
    q_t: torch.Tensor, k_t: torch.Tensor, q_s: torch.Tensor, k_s: torch.Tensor, *, return_lse: Literal[False] = False,
    **options: Unpack[AllAttentionOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention_kl(
    q_t: torch.Tensor, k_t: torch.Tensor, q_s: torch.Tensor, k_s: torch.Tensor, *, return_lse: Literal[True],
    **options: Unpack[AllAttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip


@may_be_distributed
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
    key_begin: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    sink_t: torch.Tensor | None = None,
    sink_s: torch.Tensor | None = None,
    direction: Direction = "forward",
    reduction: Reduction = "mean",
    row_weight: torch.Tensor | None = None,
    lse_t: torch.Tensor | None = None,
    lse_s: torch.Tensor | None = None,
    deterministic: bool = False,
    check_lse: bool = False,
    return_lse: bool = False,
    layout: Layout = "bnhd",
    cp_group: Any = None,
    cp_layout: CpLayout = "zigzag",
    cp_comm: CpComm = "allgather",
    cp_grads: CpGrads = "sum",
    tp_group: Any = None,
    loss_group: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL divergence between a teacher's and a student's attention, without the N x N matrices.

    For every batch, student head and query row, over the keys that the row attends to::

        P = softmax(softcap_t(softmax_scale_t * <q_t, k_t>))    the teacher
        S = softmax(softcap_s(softmax_scale_s * <q_s, k_s>))    the student
        KL = sum_j P_j (log P_j - log S_j)                      or sum_j S_j (log S_j - log P_j)

    Gradients flow to those of the four tensors that require them; the others are not computed. A row that attends to no
    key has KL 0 and gradient 0, and a mean leaves it out.

    Args:
        q_t: teacher queries, ``[batch, len_q, heads_t, dim_t]``; float32, float16 or bfloat16. Any strides are accepted.
        k_t: teacher keys, ``[batch, len_k, key_heads_t, dim_t]``. Query heads may share key heads (GQA, MQA) without
            expanding them.
        q_s: student queries, ``[batch, len_q, heads_s, dim_s]``. With ``heads_t = group_size * heads_s`` each student head
            learns the mean of ``group_size`` consecutive teacher heads. Head sizes and types of teacher and student may
            differ.
        k_s: student keys, ``[batch, len_k, key_heads_s, dim_s]``.
        causal: a query attends to no later key. The last query is aligned with the last key (bottom-right).
        window_size: ``(left, right)``: a query attends to at most ``left`` keys before it and ``right`` keys after it; -1: no
            limit.
        softmax_scale_t: factor of the teacher's dot products; default ``1 / sqrt(dim_t)``.
        softmax_scale_s: the same for the student; default ``1 / sqrt(dim_s)``.
        softcap_t: caps the teacher's logits: ``softcap * tanh(logit / softcap)``; 0: no cap.
        softcap_s: the same for the student.
        cu_seqlens_q: ``[sequences + 1]`` int32 or int64, for packed sequences in tensors ``[total_q, heads, dim]``: sequence b
            has rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``. Each call converts int64 to int32, where a value out of
            range becomes the nearest int32. The CPU refuses lengths outside of the tensors; a GPU limits them to the tensors,
            because a check would need a host-device synchronisation.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: length of the longest sequence, or an upper bound. A tight bound saves time on a GPU. Default: ``total_q``.
        max_seqlen_k: the same for the keys.
        key_lengths: ``[batch]`` int32 or int64, converted like ``cu_seqlens_q``: keys from ``key_lengths[b]`` on are padding.
            Padding does not move positions.
        key_begin: row bounds, ``[batch, len_q]``, packed ``[total_q]``, int32 or int64: a query attends to no key before
            ``key_begin``, counted from the start of its own sequence. Row bounds come on top of all other masks. They must
            not decrease within a sequence; a row may be empty. One call serves what is not a single causal mask: a zigzag
            shard of a context-parallel sequence, chunked attention, compressed keys, a sample of the rows. The CPU refuses
            invalid bounds; a GPU limits them to the keys, and where they decrease results are undefined.
        key_end: a query attends to the keys before ``key_end``. Default of both: no bound.
        sink_t: attention sinks of the teacher, ``[heads_t]``: the softmax of a head has one more outcome with this logit (natural
            log, neither scaled nor capped), which belongs to no key. A sink is an outcome of both distributions, so both or
            none must be given. All LSEs include it. A row that attends to no key has no sink.
        sink_s: the same for the student, ``[heads_s]``. Gradients flow to both. With ``heads_t > heads_s`` sinks need
            ``direction="forward"`` and a teacher without gradients.
        direction: ``"forward"``: KL(P || S); ``"reverse"``: KL(S || P).
        reduction: ``"mean"``: weighted mean over the rows that attend to at least one key; ``"sum"``; ``"none"``.
        row_weight: weight of each row, ``[batch, len_q]`` or ``[batch, heads_s, len_q]``, packed ``[total_q]`` or
            ``[heads_s, total_q]``. A row of weight 0 adds nothing to the loss, even if it contains NaN; on a GPU such a NaN
            still reaches the gradients.
        lse_t: the teacher's log-sum-exp (natural log, f32) of each row, ``[batch, heads_t, len_q]``, packed
            ``[heads_t, total_q]``, as flash attention returns it. With both LSEs and a scalar reduction, the forward computes
            loss and gradients in one pass, which is two thirds of the work; both must then cover exactly the visible keys.
            The backward multiplies the gradients by the upstream gradient; those of f16 tensors are f32 until then.
            ``lse_t`` alone saves a pass if ``heads_t > heads_s``, and may cover more keys: P is then the conditional
            distribution on the visible keys.
        lse_s: the same for the student, ``[batch, heads_s, len_q]``.
        deterministic: gradients have the same bits on every run. ``torch.use_deterministic_algorithms(True)`` does the same.
            Only Hopper GPUs are faster without it, for heads of up to 128 dimensions.
        check_lse: compute both given LSEs again for some rows, and raise an error if they differ: wrong LSEs give a wrong loss and
            nothing else tells. Waits for the GPU. The environment variable ``STREAMKL_CHECK_LSE=1`` does the same.
        return_lse: also return both LSEs.
        layout: ``"bnhd"``, as above, or ``"bhnd"``: ``[batch, heads, length, dim]``, packed ``[heads, total, dim]``.
        cp_group: context parallelism: a process group whose ranks hold equal shards of the queries and keys of every sequence,
            each its own ``q``, ``k``, ``row_weight`` and LSEs. ``cu_seqlens`` are those of the shard; masks and ``key_lengths``
            count in the whole sequence. The loss is that of the whole batch on every rank, and gradients are those of
            the rank's shards. Every rank must also run the backward, with the same upstream gradient.
        cp_layout: ``"zigzag"``: sequences are cut into 2 W chunks, and rank r of W holds chunks r and 2 W - 1 - r, in this order;
            ``"contiguous"``: rank r holds the r-th of W chunks.
        cp_comm: ``"allgather"``: ranks gather all keys, in slices of heads; ``"ring"``: key shards visit every rank.
        cp_grads: how you reduce the gradients of weights over ``cp_group``: ``"sum"``, or ``"mean"`` as DDP and FSDP do, which
            multiplies all gradients by the size of the group.
        tp_group: tensor parallelism over teacher heads: all ranks hold the same student and equally many of the teacher heads of
            every student head. The loss is the mean of the ranks' KLs, each to the mean of its own teacher heads; its
            gradients are those of the KL to the mean of all. Needs ``direction="forward"`` and a detached teacher.
        loss_group: ranks that hold other heads, or other batches, of the same call. Only the loss is reduced over them: sums and
            row counts, so that ranks with more rows count more.

    Returns:
        The loss, f32: a scalar, or with ``reduction="none"`` the weighted KL of each row, ``[batch, heads_s, len_q]``, packed
        ``[heads_s, total_q]``. With ``return_lse`` a tuple ``(loss, lse_t, lse_s)``; no gradient flows through the LSEs.

    Raises:
        ValueError: an argument does not fit; the message contains its name, its shape or value, and what is accepted.
    """
    refuse_transforms("attention_kl", q_t, k_t, q_s, k_s)
    sink_t, sink_s = _as_f32("sink_t", sink_t), _as_f32("sink_s", sink_s)
    check_flags(return_lse=return_lse, check_lse=check_lse)
    lengths, options = translate(
        _wanted_gradients(q_t, k_t, q_s, k_s, sink_t, sink_s), causal=causal, window_size=window_size, softmax_scale_t=softmax_scale_t,
        softmax_scale_s=softmax_scale_s, softcap_t=softcap_t, softcap_s=softcap_s, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, key_lengths=key_lengths,
        key_begin=key_begin, key_end=key_end, direction=direction, reduction=reduction, deterministic=deterministic, layout=layout,
    )  # fmt: skip
    if q_t.dtype != k_t.dtype or q_s.dtype != k_s.dtype:
        q_t, k_t, q_s, k_s = promote_under_autocast(q_t, k_t, q_s, k_s)
    if row_weight is not None:
        row_weight = expand_weight(row_weight, q_s, lengths, options)

    tensors, given_lses = (q_t, k_t, q_s, k_s, None, sink_t, sink_s), (lse_t, lse_s)
    operators, groups = Operators, None
    if cp_group is not None or tp_group is not None or loss_group is not None:
        from .parallel import Groups

        groups = Groups(cp_group, cp_layout, cp_comm, cp_grads, tp_group, loss_group)
        operators = groups.operators(
            (*tensors, None), (lse_t, lse_s, row_weight), lengths, options, reduction=reduction, return_lse=return_lse
        )
    is_split = groups is not None and groups.is_split
    is_mean = reduction == "mean" and not (groups is not None and groups.reduces)
    one_pass = options.gradients and reduction != "none" and (row_weight is None or not row_weight.requires_grad)
    if one_pass and lse_t is None and lse_s is None and lses_first(q_t, q_s, options):
        with torch.no_grad():
            lse_t, lse_s = operators.forward(*tensors, None, None, lib.LSE_T | lib.LSE_S, *lengths, *options)
    if one_pass and lse_t is not None and lse_s is not None:
        (loss,) = OnePass.apply(*tensors, (operators, None, lse_t, lse_s, row_weight, 0, is_mean, lengths, options))
    else:
        rows = lib.KL | (lib.LSE_T | lib.LSE_S if return_lse else 0)
        if options.gradients:
            kl, *lses = Forward.apply(*tensors, (operators, None, lse_t, rows, lengths, options))
        else:
            rows |= BOTH_LSES if sink_t is not None else 0
            kl, *lses = operators.forward(*tensors, None, lse_t, rows, *lengths, *options)
        if return_lse:
            lse_t, lse_s = lses
        loss = weighted(kl, row_weight)
        if reduction != "none":
            loss = divided(loss, row_count(q_s, k_s, row_weight, lengths, options) if is_mean else 1)
    if is_lse_check_on(check_lse, *given_lses) and not is_split:  # the operator has checked all shapes
        check_both_lses((q_t, k_t, given_lses[0], sink_t), (q_s, k_s, given_lses[1], sink_s), lengths, options)
    if groups is not None and groups.reduces and reduction != "none":
        loss = groups.reduced_over_rows(loss, reduction, (*tensors, None), row_weight, lengths, options)
    if not return_lse:
        return loss
    assert lse_t is not None and lse_s is not None
    return loss, lse_t, lse_s


def _wanted_gradients(q_t, k_t, q_s, k_s, sink_t, sink_s) -> int:
    if not torch.is_grad_enabled():
        return 0
    gradients = q_t.requires_grad * DQ_T + k_t.requires_grad * DK_T + q_s.requires_grad * DQ_S + k_s.requires_grad * DK_S
    if sink_t is not None and sink_s is not None:
        gradients += sink_t.requires_grad * DSINK_T + sink_s.requires_grad * DSINK_S
    return gradients


def _as_f32(name: str, sink: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks are a number per head: models keep them in any type."""
    if sink is None:
        return None
    if not isinstance(sink, torch.Tensor) or not sink.is_floating_point():
        raise ValueError(f"{name}: must be a tensor of floating-point numbers")
    return sink.float().contiguous()


def lses_first(q_t, q_s, options) -> bool:
    """Whether a GPU is faster with a pass for the LSEs and one for the rest: a student that learns from teacher groups.

    The forward of r teacher heads needs their LSEs first, so that loss and gradients take 3 r + 4 products, but r + 1 for
    LSEs and r + 3 for the rest.
    """
    heads = -3 if options.heads_first else -2
    groups = min(q_t.dim(), q_s.dim()) >= 3 and q_t.shape[heads] > q_s.shape[heads]
    return q_t.is_cuda and groups and options.direction == KL_FORWARD and not options.gradients & (DQ_T | DK_T)


def promote_under_autocast(q_t, k_t, q_s, k_s):
    """Autocast may leave queries and keys of one model in different types: promotes both to the wider type."""
    if not torch.is_autocast_enabled(q_s.device.type):
        return q_t, k_t, q_s, k_s  # the checks report the mismatch
    type_t, type_s = torch.promote_types(q_t.dtype, k_t.dtype), torch.promote_types(q_s.dtype, k_s.dtype)
    return q_t.to(type_t), k_t.to(type_t), q_s.to(type_s), k_s.to(type_s)


def expand_weight(row_weight: torch.Tensor, student: torch.Tensor, lengths, options) -> torch.Tensor:
    """The weights as f32 [batch, heads_s, len_q], packed [heads_s, total_q]: the sizes of the tensor `student`."""
    packed = lengths.cu_seqlens_q is not None
    if student.dim() != (3 if packed else 4):
        return row_weight  # the checks of the operator report that tensor
    batch, heads, length = sizes(student.shape, packed, options.heads_first)
    per_row, per_head = ((length,), (heads, length)) if packed else ((batch, length), (batch, heads, length))
    if tuple(row_weight.shape) not in (per_row, per_head):
        raise ValueError(f"row_weight: shape {list(row_weight.shape)} must be {list(per_row)} or {list(per_head)}")
    if row_weight.is_complex():
        raise ValueError(f"row_weight: dtype {row_weight.dtype} must be real")
    weight = row_weight.float()
    return weight if weight.dim() == len(per_head) else weight.unsqueeze(-2).expand(per_head)
