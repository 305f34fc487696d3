"""streamkl.attention_kl: the KL divergence between two attention distributions."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch

from . import _library as lib
from ._call import row_names
from ._check_lse import check_both_lses, is_lse_check_on
from ._checks import sizes
from ._distributed import may_be_distributed
from ._mean import attends_everywhere, divided, total_weight, weighted
from ._ops import BOTH_LSES, Forward, OnePass, Operators
from ._options import AttentionOptions, Parallel, Reduction, check_flags, defaults_of, translate, with_options
from ._problem import DK_S, DK_T, DQ_S, DQ_T, DSINK_S, DSINK_T, KL_FORWARD
from ._tensors import check_tensors

if TYPE_CHECKING:
    from .parallel import Groups
    from typing_extensions import Unpack


@overload
def attention_kl(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...


@overload
def attention_kl(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@may_be_distributed
@with_options(AttentionOptions)
def attention_kl(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    *,
    sink_t: torch.Tensor | None = None,
    sink_s: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    row_weight: torch.Tensor | None = None,
    lse_t: torch.Tensor | None = None,
    lse_s: torch.Tensor | None = None,
    check_lse: bool = False,
    return_lse: bool = False,
    parallel: Parallel | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """KL divergence between a teacher's and a student's attention, without the N x N matrices.

    For every batch, student head and query row, over the keys that the row attends to::

        P = softmax(softcap_t(softmax_scale_t * <q_t, k_t>))    the teacher
        S = softmax(softcap_s(softmax_scale_s * <q_s, k_s>))    the student; with link_s="linear" <q_s, k_s> / sum <q_s, k_s>
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
        {options}
        return_lse: also return both LSEs.

    Returns:
        The loss, f32: a scalar, or with ``reduction="none"`` the weighted KL of each row, ``[batch, heads_s, len_q]``, packed
        ``[heads_s, total_q]``. With ``return_lse`` a tuple ``(loss, lse_t, lse_s)``; no gradient flows through the LSEs.

    Raises:
        ValueError: an argument does not fit; the message contains its name, its shape or value, and what is accepted.
    """
    given = dict(sink_t=sink_t, sink_s=sink_s, row_weight=row_weight, lse_t=lse_t, lse_s=lse_s)
    check_tensors("attention_kl", q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_s, optional=given)
    if options.get("pool") is not None:
        shared = dict(reduction=reduction, row_weight=row_weight, lse_t=lse_t, check_lse=check_lse, parallel=parallel)
        refused = dict(sink_t=sink_t, sink_s=sink_s, lse_s=lse_s)
        return _pooled(q_t, k_t, q_s, k_s, return_lse, refused, **shared, **options)
    sink_t, sink_s = sink_as_f32("sink_t", sink_t), sink_as_f32("sink_s", sink_s)
    check_flags(return_lse=return_lse, check_lse=check_lse)
    gradients = _wanted_gradients(q_t, k_t, q_s, k_s, sink_t, sink_s)
    lengths, options = translate(AttentionOptions, gradients, {"reduction": reduction, **options})
    if q_t.dtype != k_t.dtype or q_s.dtype != k_s.dtype:
        q_t, k_t, q_s, k_s = promote_under_autocast(q_t, k_t, q_s, k_s)
    if row_weight is not None:
        row_weight = expand_weight(row_weight, q_s, lengths, options)

    tensors, given_lses = (q_t, k_t, q_s, k_s, None, sink_t, sink_s), (lse_t, lse_s)
    operators, groups = Operators, cast("Groups | None", parallel)  # see may_be_distributed
    if groups is not None:
        asked = dict(reduction=reduction, return_lse=return_lse)
        operators = groups.operators((*tensors, None), (lse_t, lse_s, row_weight), lengths, options, **asked)
    is_mean, reduces = reduction == "mean", groups is not None and groups.reduces
    one_pass = gradients and reduction != "none" and (row_weight is None or not row_weight.requires_grad)
    if one_pass and lse_t is None and lse_s is None and lses_first(q_t, q_s, options):
        with torch.no_grad():
            lse_t, lse_s = operators.forward(*tensors, None, None, BOTH_LSES, *lengths, *options)
    everywhere = is_mean and groups is None and attends_everywhere(q_s, k_s, lengths, options)
    if one_pass and lse_t is not None and lse_s is not None:
        mean = is_mean and not reduces, everywhere
        (loss,) = OnePass.apply(*tensors, (operators, None, lse_t, lse_s, row_weight, 0, *mean, lengths, options))
    else:
        rows = lib.KL | (
            BOTH_LSES if return_lse or sink_t is not None else lib.LSE_S if is_mean and not everywhere else 0
        )
        if gradients:
            made = Forward.apply(*tensors, (operators, None, lse_t, rows, lengths, options))
        else:
            made = operators.forward(*tensors, None, lse_t, rows, *lengths, *options)
        named = dict(zip(row_names(rows), made))
        kl, lse_t, lse_s = named["kl"], named.get("lse_t"), named.get("lse_s")
        loss = weighted(kl, row_weight)
        if reduction != "none":
            total = total_weight(kl, lse_s, row_weight, lengths) if is_mean and not reduces else 1
            loss = divided(loss, total)
    if is_lse_check_on(check_lse, given_lses[0]) and not (
        groups and groups.is_split
    ):  # the operator has checked all shapes
        check_both_lses((q_t, k_t, given_lses[0], sink_t), (q_s, k_s, given_lses[1], sink_s), lengths, options)
    if groups is not None and reduces:
        total = total_weight(loss, lse_s, row_weight, lengths) if is_mean else None
        loss = groups.scaled(loss) if reduction == "none" else groups.reduced(loss, total)
    if not return_lse:
        return loss
    assert lse_t is not None and lse_s is not None
    return loss, lse_t.detach(), lse_s.detach()


def _pooled(q_t, k_t, q_s, k_s, return_lse, refused, softcap_s=0.0, link_s="softmax", **options):
    """The student of a pooled teacher: an indexer with one index head per head, no ReLU and weights of 1."""
    from .indexer import indexer_kl

    if unknown := options.keys() - defaults_of(AttentionOptions).keys():
        raise TypeError(f"attention_kl() got an unexpected keyword argument {min(unknown)!r}")
    refused = refused | dict(softcap_s=softcap_s or None, link_s=None if link_s == "softmax" else link_s)
    for name, value in refused.items():
        if value is not None:
            shown = "" if isinstance(value, torch.Tensor) else f"={value!r}"
            raise ValueError(f"{name}{shown}: must be left out with pool: the student of a pooled teacher has none")
    check_flags(return_lse=return_lse)
    weights = torch.ones((), dtype=torch.float32, device=q_s.device).expand(*q_s.shape[:-1], 1)
    try:
        result = indexer_kl(q_t, k_t, q_s, k_s, weights, relu=False, return_rows=return_lse, **options)
    except ValueError as error:  # the weights are those of the queries
        message = re.sub(r"\bw_s (\[[^]]*\])", f"q_s {list(q_s.shape)}", str(error))
        raise ValueError(re.sub(r"\bw_s\b", "q_s", message)) from None
    return (result[0], result[1].lse_t, result[1].lse_s) if return_lse else result


def _wanted_gradients(q_t, k_t, q_s, k_s, sink_t, sink_s) -> int:
    if not torch.is_grad_enabled():
        return 0
    gradients = (
        q_t.requires_grad * DQ_T + k_t.requires_grad * DK_T + q_s.requires_grad * DQ_S + k_s.requires_grad * DK_S
    )
    if sink_t is not None and sink_s is not None:
        gradients += sink_t.requires_grad * DSINK_T + sink_s.requires_grad * DSINK_S
    return gradients


def sink_as_f32(name: str, sink: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks are a number per head: models keep them in any type."""
    if sink is None:
        return None
    if not isinstance(sink, torch.Tensor) or not sink.is_floating_point():
        raise ValueError(f"{name}: must be a tensor of floating-point numbers")
    return sink.float().contiguous()


explained_gpu: ContextVar[str | None] = ContextVar("explained_gpu", default=None)  # that of explain(gpu=)


def lses_first(q_t, q_s, options) -> bool:
    """Whether a GPU is faster with a pass for the LSEs and one for the rest: a student that learns from teacher groups.

    The forward of r teacher heads needs their LSEs first, so that loss and gradients take 3 r + 4 products, but r + 1 for
    LSEs and r + 3 for the rest.
    """
    heads = -3 if options.heads_first else -2
    groups = min(q_t.dim(), q_s.dim()) >= 3 and q_t.shape[heads] > q_s.shape[heads]
    is_faster = groups and options.direction == KL_FORWARD and not options.gradients & (DQ_T | DK_T)
    return is_faster and (q_t.is_cuda or not torch.compiler.is_compiling() and explained_gpu.get() is not None)


def promote_under_autocast(q_t, k_t, q_s, k_s):
    """Autocast may leave queries and keys of one model in different types: promotes both to the wider type."""
    if not torch.is_autocast_enabled(q_s.device.type):
        return q_t, k_t, q_s, k_s  # the checks report the mismatch
    type_t, type_s = torch.promote_types(q_t.dtype, k_t.dtype), torch.promote_types(q_s.dtype, k_s.dtype)
    return q_t.to(type_t), k_t.to(type_t), q_s.to(type_s), k_s.to(type_s)


def expand_weight(row_weight: torch.Tensor, student: torch.Tensor, lengths, options, name="q_s") -> torch.Tensor:
    """The weights as f32 [batch, heads_s, len_q], packed [heads_s, total_q]: the sizes of the tensor `student`, named `name`."""
    packed = lengths.cu_seqlens_q is not None
    if student.dim() != (3 if packed else 4):
        return row_weight  # the checks of the operator report that tensor
    batch, heads, length = sizes(student.shape, packed, options.heads_first)
    return weight_of_rows(row_weight, (heads, length) if packed else (batch, heads, length), student, name)


def weight_of_rows(
    row_weight: torch.Tensor, per_head: tuple[int, ...], queries: torch.Tensor, name: str
) -> torch.Tensor:
    """The weights as f32 of the shape `per_head`, [..., heads, rows]; they may lack the heads. `name` is that of the queries."""
    per_row = (*per_head[:-2], per_head[-1])
    if tuple(row_weight.shape) not in (per_row, per_head):
        raise ValueError(
            f"row_weight: shape {list(row_weight.shape)} must be {list(per_row)} or {list(per_head)} with {name} {list(queries.shape)}"
        )
    if row_weight.device != queries.device:
        raise ValueError(f"{name} is on {queries.device} and row_weight on {row_weight.device}: must be one device")
    if row_weight.is_complex():
        raise ValueError(f"row_weight: dtype {row_weight.dtype} must be real")
    weight = row_weight.float()
    return weight if weight.dim() == len(per_head) else weight.unsqueeze(-2).expand(per_head)
