"""streamkl.indexer_kl: the KL divergence that trains the indexer of a sparse attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

import torch

from . import _library as lib
from ._call import row_names
from ._check_lse import check_teacher_lse, is_lse_check_on
from ._mean import nonzero, total_weight, weighted
from ._ops import BOTH_LSES, Forward, OnePass, Operators
from ._distributed import may_be_distributed
from ._options import (
    IndexerOptions,
    Parallel,
    Reduction,
    check_choice,
    check_flags,
    to_int32,
    translate,
    with_options,
)
from ._problem import DK_S, DQ_S, DW_S, KL_FORWARD
from ._attention_kl import expand_weight, promote_under_autocast
from ._tensors import check_tensors

if TYPE_CHECKING:
    from .parallel import Groups
    from typing_extensions import Unpack


class IndexerRows(NamedTuple):
    """Row vectors of a call, f32 ``[batch, heads_s, len_q]``, packed ``[heads_s, total_q]``; no gradient flows through them.

    A is the first argument of the KL and B the second: KL(A || B). A row that attends to no key has LSEs of -inf and is 0
    elsewhere.
    """

    kl: torch.Tensor  # cross_entropy - entropy
    cross_entropy: torch.Tensor  # -sum_j A_j log B_j: the part of the KL that training changes
    entropy: torch.Tensor  # -sum_j A_j log A_j
    lse_t: (
        torch.Tensor
    )  # [batch, heads_t, len_q], over the keys that the row attends to; with pool, plus log sum_b M_b
    lse_s: torch.Tensor
    mass: torch.Tensor | None  # with lse_t_wider: the visible keys' share of the attention that lse_t covers
    kl_uniform: torch.Tensor | None  # KL(P || uniform), of an indexer that knows nothing; None if A is the indexer

    @property
    def captured(self) -> torch.Tensor:
        """1 - kl / kl_uniform of each row: 1 for the teacher's distribution, 0 for a uniform one, less for a worse one.

        Over many rows, ``1 - rows.kl.sum() / rows.kl_uniform.sum()``.
        """
        if self.kl_uniform is None:
            raise ValueError("captured: needs direction='forward'")
        return torch.where(self.kl == 0, 1.0, 1 - self.kl / self.kl_uniform)


@overload
def indexer_kl(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    w_s: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    return_rows: Literal[False] = False,
    **options: Unpack[IndexerOptions],
) -> torch.Tensor: ...


@overload
def indexer_kl(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    w_s: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    return_rows: Literal[True],
    **options: Unpack[IndexerOptions],
) -> tuple[torch.Tensor, IndexerRows]: ...


@may_be_distributed
@with_options(IndexerOptions)
def indexer_kl(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    w_s: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    row_weight: torch.Tensor | Literal["mass"] | None = None,
    lse_t: torch.Tensor | None = None,
    lse_t_wider: bool = False,
    lse_t_visible: torch.Tensor | None = None,
    check_lse: bool = False,
    return_rows: bool = False,
    parallel: Parallel | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, IndexerRows]:
    """KL divergence between a teacher's attention, averaged over its heads, and an indexer's, without the N x N matrices.

    For every batch, student head and query row, over the keys that the row attends to::

        P_j = mean_h softmax_j(softcap_t(softmax_scale_t * <q_t[h], k_t[j]>))         the teacher: group_size heads h
        S_j = softmax_j(softmax_scale_s * sum_g w_s[g] relu(<q_s[g], k_s[j]>))        the indexer: G index heads g
        KL = sum_j P_j (log P_j - log S_j)                                            or sum_j S_j (log S_j - log P_j)

    Gradients flow to ``q_s``, ``k_s`` and ``w_s``. The teacher is fixed: a ``q_t`` or ``k_t`` that requires a gradient is
    refused; detach it. A row that attends to no key has KL 0 and gradient 0, and a mean leaves it out.

    With a scalar reduction the forward computes the loss and its gradients in one pass, and the backward only scales the
    gradients. Call it under ``torch.no_grad()`` if you need no gradient. Gradients of f16 tensors are f32 until the backward
    has scaled them, so that only the scaled ones must be in the range of f16.

    Args:
        q_t: teacher queries, ``[batch, len_q, heads_t, dim_t]``; float32, float16 or bfloat16. Any strides are accepted:
            Megatron's ``[len, batch, heads, dim]`` is ``q_t.transpose(0, 1)``.
        k_t: teacher keys, ``[batch, len_k, key_heads_t, dim_t]``. Query heads may share key heads (GQA, MQA) without
            expanding them.
        q_s: index queries, ``[batch, len_q, heads_s * G, dim_s]``: index head g of student head h is head ``h * G + g``.
            With ``heads_t = group_size * heads_s`` each student head learns the mean of ``group_size`` consecutive teacher
            heads.
        k_s: index keys, ``[batch, len_k, dim_s]``, or ``[batch, len_k, key_heads_s, dim_s]``.
        w_s: weights of the index heads: ``[batch, len_q, G]`` for one student head, which learns the mean of all teacher
            heads, or ``[batch, len_q, heads_s, G]``. Their type may differ from that of ``q_s``.
        indices: top-k keys that each row attends to (sparse), ``[batch, len_q, top_k]`` or
            ``[batch, len_q, heads_s, top_k]``, int32 or int64, in any order, counted from the start of the row's own
            sequence. -1 and keys that the masks hide are ignored; a key that occurs twice counts twice. The CPU refuses an
            index outside of the sequence; a GPU ignores it, because a check would need a host-device synchronization.
            Default: all keys that the masks leave.
        {options}
        return_rows: also return the row vectors.

    Returns:
        The loss, f32: a scalar, or with ``reduction="none"`` the weighted KL of each row, ``[batch, heads_s, len_q]``, packed
        ``[heads_s, total_q]``. With ``return_rows`` a tuple ``(loss, IndexerRows)``.

    Raises:
        ValueError: an argument does not fit; the message contains its name, its shape or value, and what is accepted.
    """
    by_mass = isinstance(row_weight, str)
    weight = None if isinstance(row_weight, str) else row_weight
    given = dict(indices=indices, row_weight=weight, lse_t=lse_t, lse_t_visible=lse_t_visible)
    check_tensors("indexer_kl", q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_s, w_s=w_s, optional=given)
    check_flags(lse_t_wider=lse_t_wider, check_lse=check_lse, return_rows=return_rows)
    _check_wider(lse_t, lse_t_wider, lse_t_visible, row_weight)
    pool = options.get("pool")
    _check_pooled(pool, lse_t_visible, row_weight, parallel)
    gradients = _wanted_gradients(q_t, k_t, q_s, k_s, w_s)
    lengths, options = translate(IndexerOptions, gradients, {"reduction": reduction, **options})
    if q_t.dtype != k_t.dtype or q_s.dtype != k_s.dtype:
        q_t, k_t, q_s, k_s = promote_under_autocast(q_t, k_t, q_s, k_s)
    k_s, w_s, indices = (_with_heads(tensor, lengths, options) for tensor in (k_s, w_s, indices))
    if indices is not None:
        indices = to_int32("indices", indices)
    if weight is not None:
        weight = expand_weight(weight, w_s, lengths, options, "w_s")

    tensors = (q_t, k_t, q_s, k_s, w_s, None, None, indices)
    operators, groups = Operators, cast("Groups | None", parallel)  # see may_be_distributed
    if groups is not None:
        asked = dict(reduction=reduction, return_rows=return_rows, lse_t_wider=lse_t_wider)
        asked |= {"row_weight='mass'": by_mass, "lse_t_visible": lse_t_visible is not None}
        operators = groups.operators(tensors, (lse_t, None, weight), lengths, options, **asked)
    one_pass = bool(gradients) and reduction != "none" and (weight is None or not weight.requires_grad)
    target, mass = lse_t, None
    if groups is not None and groups.tp is not None:  # the ranks weigh their heads by their own masses
        if by_mass or lse_t_visible is not None:
            raise ValueError("parallel.tensor_group: must be without lse_t_visible and row_weight='mass'")
        one_pass = one_pass and not lse_t_wider
    elif pool is None and lse_t_wider and (one_pass or by_mass or lse_t_visible is not None):
        if lse_t_visible is None:
            with torch.no_grad():
                (lse_t_visible,) = operators.forward(*tensors, None, lib.LSE_T, *lengths, *options)
        target, mass = _conditional(lse_t, lse_t_visible, w_s, options)
        weight = mass if by_mass else weight
    if one_pass:
        loss, rows = _one_pass(operators, tensors, target, weight, return_rows, lengths, options)
    else:
        is_wider = lse_t_wider and mass is None and pool is None
        rows = _forward(operators, tensors, target, is_wider, return_rows, lengths, options)
        loss = weighted(rows["kl"], weight)
        loss = loss if reduction == "none" else loss.sum()
    if not (groups and groups.is_split) and is_lse_check_on(check_lse, lse_t):  # the operator has checked all shapes
        keys = indices if pool is None or indices is None else _keys_of_blocks(indices, pool[1])
        check_teacher_lse((q_t, k_t, lse_t, None), keys, lse_t_wider or pool is not None, lengths, options)
        visible = given["lse_t_visible"]
        check_teacher_lse((q_t, k_t, visible, None), keys, False, lengths, options, "lse_t_visible")
    if reduction != "none":
        total = total_weight(loss, rows["lse_s"], weight, lengths) if reduction == "mean" else None
        if groups is not None and groups.reduces:
            loss = groups.reduced(loss, total)
        elif total is not None:
            loss = loss / nonzero(total)
    elif groups is not None:
        loss = groups.scaled(loss)
    if not return_rows:
        return loss
    rows["kl"] = rows["kl"].detach()
    kl_uniform = _kl_uniform(operators, tensors, rows["entropy"], lengths, options)
    return loss, IndexerRows(mass=rows.pop("mass", mass), kl_uniform=kl_uniform, **rows)


def _check_wider(lse_t, lse_t_wider, lse_t_visible, row_weight) -> None:
    by_mass = isinstance(row_weight, str)
    if by_mass:
        check_choice("row_weight", row_weight, ("mass", None))
    if lse_t_wider and lse_t is None:
        raise ValueError("lse_t_wider=True: needs lse_t")
    if not lse_t_wider and (by_mass or lse_t_visible is not None):
        raise ValueError(
            f"{'row_weight=' + repr(row_weight) if by_mass else 'lse_t_visible'}: needs lse_t_wider=True"
        )
    if lse_t_visible is not None and lse_t_visible.shape != lse_t.shape:
        shape, accepted = list(lse_t_visible.shape), list(lse_t.shape)
        raise ValueError(f"lse_t_visible: shape {shape} must be that of lse_t, {accepted}")


def _check_pooled(pool, lse_t_visible, row_weight, parallel) -> None:
    by_mass = row_weight if isinstance(row_weight, str) else None
    given = dict(lse_t_visible=lse_t_visible, parallel=parallel, row_weight=by_mass)
    refused = [name for name, value in given.items() if value is not None]
    if pool is not None and refused:
        raise ValueError(f"{refused[0]}: must be {'a tensor or ' if by_mass else ''}None with pool")


def _keys_of_blocks(blocks, size):
    """The keys of blocks [..., n], [..., n * size]; -1 stays."""
    keys = blocks[..., None] * size + torch.arange(size, dtype=blocks.dtype, device=blocks.device)
    return torch.where(blocks[..., None] < 0, -1, keys).flatten(-2)


def _wanted_gradients(q_t, k_t, q_s, k_s, w_s) -> int:
    if not torch.is_grad_enabled():
        return 0
    for name, tensor in ("q_t", q_t), ("k_t", k_t):
        if tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient: the teacher of an indexer is fixed; pass {name}.detach()")
    return q_s.requires_grad * DQ_S + k_s.requires_grad * DK_S + w_s.requires_grad * DW_S


def _with_heads(tensor, lengths, options):
    """Adds the heads dimension, which the caller may omit for a single head."""
    if tensor is None or tensor.dim() != (3 if lengths.cu_seqlens_q is None else 2):
        return tensor
    return tensor.unsqueeze(-3 if options.heads_first else -2)


def _conditional(lse_t, visible, w_s, options):
    """(LSEs, mass): relative to these LSEs, the mean of a group's heads on the visible keys is a distribution.

    mass: the share of the visible keys, sum_j mean_h exp(x_hj - lse_t[h]). Both have no gradient.
    """
    heads_s = w_s.shape[-3 if options.heads_first else -2]
    if lse_t.dim() < 2 or lse_t.shape[-2] % heads_s or lse_t.shape != visible.shape:
        return lse_t, None  # the checks of the operator report lse_t
    lse_t, visible = lse_t.detach(), visible.detach()
    log_shares = torch.where(visible.isinf(), -torch.inf, visible - lse_t).unflatten(-2, (heads_s, -1))
    group_size = log_shares.shape[-2]
    log_mass = log_shares.logsumexp(-2) - math.log(group_size)  # finite where the mass underflows
    return lse_t + log_mass.repeat_interleave(group_size, -2), log_mass.exp()


def _kl_uniform(operators, tensors, entropy, lengths, options):
    """KL(P || uniform) = log n - entropy. log n of n visible keys is the LSE of an indexer whose weights are 0."""
    if options.direction != KL_FORWARD:
        return None
    q_t, k_t, q_s, k_s, w_s, *others = tensors
    dim = 8  # the smallest that tensor cores take
    q_0, k_0 = q_s.new_zeros((*w_s.shape[:-1], dim)), k_s.new_zeros((*k_s.shape[:-1], dim))
    with torch.no_grad():
        (log_n,) = operators.forward(
            q_t, k_t, q_0, k_0, w_s.new_zeros((*w_s.shape[:-1], 1)), *others, None, lib.LSE_S, *lengths, *options
        )
    return torch.where(log_n.isinf(), 0.0, log_n - entropy)


_ENTROPIES = lib.CROSS_ENTROPY | lib.ENTROPY


def _one_pass(operators, tensors, lse_t, row_weight, return_rows, lengths, options):
    """The LSE of the indexer, which does not read the teacher, then everything else in one pass.

    With a pooled teacher that pass also gives the LSEs.
    """
    wanted = lib.KL | (_ENTROPIES if return_rows else 0)
    if options.pool:
        wanted, lse_s, of_inputs = wanted | BOTH_LSES, None, {}
    else:
        with torch.no_grad():
            if lse_t is None:
                lse_t, lse_s = operators.forward(*tensors, lse_t, BOTH_LSES, *lengths, *options)
            else:
                (lse_s,) = operators.forward(*tensors, lse_t, lib.LSE_S, *lengths, *options)
        of_inputs = {"lse_t": lse_t.detach(), "lse_s": lse_s}
    *differentiable, indices = tensors
    loss, *made = OnePass.apply(
        *differentiable, (operators, indices, lse_t, lse_s, row_weight, wanted, False, False, lengths, options)
    )
    return loss, {**dict(zip(row_names(wanted), made)), **of_inputs}


def _forward(operators, tensors, lse_t, lse_t_wider, return_rows, lengths, options):
    """The row vectors. kl is differentiable if gradients are wanted."""
    wanted = lib.KL | lib.LSE_S
    if return_rows:
        wanted |= lib.LSE_T | _ENTROPIES | (lib.MASS if lse_t_wider else 0)
    if options.gradients:
        *differentiable, indices = tensors
        made = Forward.apply(*differentiable, (operators, indices, lse_t, wanted, lengths, options))
    else:
        made = operators.forward(*tensors, lse_t, wanted, *lengths, *options)
    return dict(zip(row_names(wanted), made))
