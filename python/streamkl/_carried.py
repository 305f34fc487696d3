"""streamkl.attention: attention that carries its KL."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Callable, Literal, NamedTuple

import torch

from . import _library as lib
from ._attention_kl import expand_weight
from ._call import specs_of
from ._checks import check_attention, describe
from ._mean import row_count
from ._ops import Operators, carries_kl
from ._options import Direction, Layout, Lengths, check_flags, refuse_transforms, translate
from ._problem import DK_S, DQ_S, DV_S, KL_REVERSE
from ._sdpa import as_autocast, attend, fixed_order

GRADIENTS = DQ_S | DK_S | DV_S
_NO_LENGTHS = dict(cu_seqlens_q=None, cu_seqlens_k=None, key_lengths=None)


@dataclass
class Term:
    """The KL that an attention carries: its teacher, and the weight of each row in the loss."""

    q_t: torch.Tensor
    k_t: torch.Tensor
    lse_t: torch.Tensor | None  # None: computed in the backward
    row_weight: torch.Tensor  # f32, [batch, heads_s, len_q] or packed [heads_s, total_q]
    lengths: Lengths
    options: Any  # Options
    with_value: bool = True  # the backward computes the KL of each row
    packs_batch: bool = False  # lengths are those of packed sequences, in which the rows of the batch follow each other

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, length, ...] as [heads, batch * length, ...]."""
        return tensor.transpose(0, 1).flatten(1, 2) if self.packs_batch else tensor

    def unpacked(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        return tensor.unflatten(1, (batch, -1)).transpose(0, 1) if self.packs_batch else tensor

    @property
    def row_vectors(self) -> int:
        """Bits of _library. Gradients of KL(S || P) need the KL."""
        return lib.KL if self.with_value or self.options.direction == KL_REVERSE else 0

    def rows(self, kl: torch.Tensor) -> torch.Tensor:
        """The weights, in the layout of the call."""
        return self.unpacked(self.row_weight, kl.shape[0]) if self.row_weight.dim() else self.row_weight


class Slot:
    """What the backward of an attention reads and writes. It does not refer to the graph, which refers to it."""

    def __init__(self, inject: bool) -> None:
        self.inject = inject  # the weight of the KL does not depend on an upstream gradient
        self.term: Term | None = None  # None: the backward is that of the attention alone
        self.is_done = False  # the backward has run
        self.kl: torch.Tensor | None = None  # after the backward, if the term asks for it
        self._value: torch.Tensor | None = None

    def finish(self, rows: list[torch.Tensor]) -> None:
        """Keeps the KL, if it was computed, and frees the teacher."""
        assert self.term is not None
        for kl in rows:
            weight = self.term.rows(kl)
            self.kl, self._value = kl, torch.where(weight == 0, 0.0, kl * weight).sum()
        self.is_done, self.term = True, None

    def value(self) -> torch.Tensor:
        """The weighted KLs, added up; NaN before the backward."""
        return torch.tensor(torch.nan) if self._value is None else self._value


class CarriedKL:
    """The KL that an attention carries. Its value comes with the backward.

    Attributes:
        loss: a scalar of value 0, whose gradient is that of the KL. With ``inject=False`` add it to the loss of the
            model, and the KL has the weight that this loss has: a loss scale, or a factor of gradient accumulation.
    """

    def __init__(self, loss: torch.Tensor, slot: Slot) -> None:
        self.loss, self.slot = loss, slot

    @property
    def is_ready(self) -> bool:
        """Whether the backward has run."""
        return self.slot.is_done

    @property
    def kl(self) -> torch.Tensor:
        """The KL of each row, f32 ``[batch, heads, len_q]``, packed ``[heads, total_q]``, not weighted."""
        if not self.slot.is_done:
            raise RuntimeError("streamkl.attention: the KL comes with the backward, which has not run")
        if self.slot.kl is None:
            raise RuntimeError("streamkl.attention: kl_value=False leaves out the KL of each row")
        return self.slot.kl

    def value(self) -> torch.Tensor:
        """The value of the KL in the loss: the weighted KLs, added up; NaN before the backward."""
        return self.slot.value()


class Carried(torch.autograd.Function):
    """Runs `compute` (q, k, v) -> (output, lse or None). The backward is that of this attention and of the KL in `slot`."""

    @staticmethod
    def forward(ctx, q, k, v, slot: Slot, compute: Callable):
        output, lse = compute(q, k, v)
        ctx.slot, ctx.compute = slot, compute
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, output, lse)
        return output, q.new_zeros((), dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, grad_loss):
        q, k, v, output, lse = ctx.saved_tensors
        slot, term = ctx.slot, ctx.slot.term
        if slot.is_done:
            raise RuntimeError("streamkl.attention: the backward runs once and frees the teacher: no retain_graph=True")
        scale = 1.0 if slot.inject else grad_loss
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        if term is None or scale is None:
            return *_own_backward(ctx.compute, q, k, v, grad_output), None, None
        operands = _Operands.of(term, q, k, lse, scale)
        if carries_kl(*operands):
            *rows, dq, dk, dv = _in_one_call(operands, term, v, output, grad_output)
        else:
            with fixed_order(q, term) if term.options.deterministic else nullcontext():
                own = _own_backward(ctx.compute, q, k, v, grad_output)
            *rows, dq, dk, dv = _apart(operands, term, own)
        slot.finish(rows)
        return dq, dk, dv, None, None


def _own_backward(compute, q, k, v, grad_output):
    """Of an attention without a KL: by torch, from a second forward."""
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        return torch.autograd.grad(compute(*inputs)[0], inputs, grad_output)


class _Operands(NamedTuple):
    """What a call of the library takes: packed where the lengths of the term are those of packed sequences."""

    q_t: torch.Tensor
    k_t: torch.Tensor
    q_s: torch.Tensor
    k_s: torch.Tensor
    lse_t: torch.Tensor
    lse_s: torch.Tensor
    row_weight: torch.Tensor
    lengths: Lengths
    options: Any

    @staticmethod
    def of(term: Term, q, k, lse_s, scale) -> _Operands:
        """`scale` multiplies the weights of the term. LSEs that are not known are computed."""
        q, k, lse_s = term.packed(q), term.packed(k), None if lse_s is None else term.packed(lse_s)
        lse_t = term.lse_t
        if lse_t is None or lse_s is None:
            computed_t, computed_s = Operators.forward(
                term.q_t, term.k_t, q, k, None, None, None, None, lse_t, lib.LSE_T | lib.LSE_S, *term.lengths, *term.options
            )
            lse_t, lse_s = computed_t if lse_t is None else lse_t, computed_s if lse_s is None else lse_s
        weight = (term.row_weight * scale).expand(lse_s.shape)
        return _Operands(term.q_t, term.k_t, q, k, lse_t, lse_s, weight, term.lengths, term.options)


def _in_one_call(operands: _Operands, term: Term, v, output, grad_output):
    """[kl, dq, dk, dv], or without the KL"""
    q_t, k_t, q_s, k_s, lse_t, lse_s, weight, lengths, options = operands
    of_values = map(term.packed, (v, output, grad_output))
    made = Operators.attention_backward(
        q_t, k_t, q_s, k_s, *of_values, lse_t, lse_s, weight, term.row_vectors, *lengths, *options
    )
    return [term.unpacked(each, v.shape[0]) for each in made]


def _apart(operands: _Operands, term: Term, own):
    """The same from the attention's own gradients and a one-pass call, whose sum is rounded once."""
    q_t, k_t, q_s, k_s, lse_t, lse_s, weight, lengths, options = operands
    options = options._replace(gradients=DQ_S | DK_S, grad_f32=True)
    made = Operators.forward_backward(
        q_t, k_t, q_s, k_s, None, None, None, None, lse_t, lse_s, weight, term.row_vectors, *lengths, *options
    )
    *rows, dq, dk = (term.unpacked(each, own[0].shape[0]) for each in made)
    return [*rows, (own[0] + dq).to(own[0].dtype), (own[1] + dk).to(own[1].dtype), own[2]]


def term_of(q_t, k_t, q_s, k_s, lse_t, direction, *, row_weight, with_value, packs_batch, **options) -> Term:
    """The mean KL over rows, with the arguments of attention_kl."""
    lengths, translated = translate(GRADIENTS, direction=direction, **{**_NO_LENGTHS, **options})
    weight = _weight_of_rows(q_s, k_s, 1.0, row_weight, "mean", lengths, translated)
    return Term(q_t, k_t, lse_t, weight, lengths, translated, with_value, packs_batch)


@torch._disable_dynamo  # the KL reaches its handle in the backward: a side effect that no graph has
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    lse_t: torch.Tensor | None = None,
    kl_weight: float | torch.Tensor = 1.0,
    inject: bool = True,
    kl_value: bool = True,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softmax_scale_t: float | None = None,
    softcap: float = 0.0,
    softcap_t: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    key_lengths: torch.Tensor | None = None,
    key_begin: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    direction: Direction = "forward",
    reduction: Literal["mean", "sum"] = "mean",
    row_weight: torch.Tensor | None = None,
    deterministic: bool = False,
    layout: Layout = "bnhd",
) -> tuple[torch.Tensor, CarriedKL]:
    """Attention of a student whose backward adds the gradient of its KL to a teacher.

    The forward is torch's own fused attention, ``softmax(softmax_scale <q, k>) v``. The backward computes its
    gradients and those of ``kl_weight`` times the attention KL in one call: both need the same probabilities and
    the same products. So the KL has no value before the backward.

    Args:
        q: queries, ``[batch, len_q, heads, dim]``; float32, float16 or bfloat16.
        k: keys, ``[batch, len_k, key_heads, dim]``.
        v: values, of the shape of the keys.
        q_t: teacher queries, as in :func:`streamkl.attention_kl`. The teacher receives no gradient.
        k_t: teacher keys.
        lse_t: the teacher's log-sum-exp of each row, ``[batch, heads_t, len_q]``, packed ``[heads_t, total_q]``,
            over the visible keys. Default: the backward computes it, in a separate pass.
        kl_weight: factor of the KL in the loss: a number, or a tensor with one element.
        inject: ``True``: the gradient of the KL counts with ``kl_weight``, whatever the loss is. A loss scale
            belongs in ``kl_weight``: ``scaler.scale(torch.tensor(0.1, device=q.device))``. ``False``:
            ``handle.loss``, a scalar of value 0, is part of your loss, and its upstream gradient multiplies
            ``kl_weight``.
        kl_value: the backward computes ``handle.kl``. On a GPU this takes a forward pass; without it there is only
            the gradient.
        causal: a query attends to no later key. The last query is aligned with the last key (bottom-right).
        window_size: as in :func:`streamkl.attention_kl`, like all options below. Off a GPU, or with f32, windows
            and lengths make the forward store the matrix of probabilities.
        softmax_scale: factor of the dot products; default ``1 / sqrt(dim)``.
        softmax_scale_t: the same for the teacher.
        softcap: caps the logits: ``softcap * tanh(logit / softcap)``; 0: no cap.
        softcap_t: the same for the teacher.
        cu_seqlens_q: for packed sequences in tensors ``[total_q, heads, dim]``.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: length of the longest sequence, or an upper bound.
        max_seqlen_k: the same for the keys.
        key_lengths: ``[batch]``: keys from ``key_lengths[b]`` on are padding.
        key_begin: row bounds, ``[batch, len_q]``, packed ``[total_q]``.
        key_end: the same for the first key that a query does not attend to.
        direction: ``"forward"``: KL(teacher || student); ``"reverse"``: KL(student || teacher).
        reduction: ``"mean"``: weighted mean over the rows that attend to at least one key; ``"sum"``.
        row_weight: weight of each row, ``[batch, len_q]`` or ``[batch, heads, len_q]``, packed ``[total_q]`` or
            ``[heads, total_q]``.
        deterministic: gradients have the same bits on every run. On a GPU the attention's own backward is then torch's:
            flash attention or, with f32, row bounds or softcaps, stored matrices.
        layout: ``"bnhd"``, as above, or ``"bhnd"``: ``[batch, heads, length, dim]``, packed ``[heads, total, dim]``.

    Returns:
        ``(out, handle)``: the output, of the shape of ``q``, and a handle with ``handle.kl`` after the backward.

    Raises:
        ValueError: an argument does not fit.
    """
    refuse_transforms("attention", q, k, v)
    check_flags(inject=inject, kl_value=kl_value)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: must be 'mean' or 'sum'")
    q, k, v = map(as_autocast, (q, k, v))
    lengths, options = translate(
        GRADIENTS, causal=causal, window_size=window_size, softmax_scale_t=softmax_scale_t, softmax_scale_s=softmax_scale,
        softcap_t=softcap_t, softcap_s=softcap, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, key_lengths=key_lengths, key_begin=key_begin, key_end=key_end, direction=direction,
        deterministic=deterministic, layout=layout,
    )  # fmt: skip
    check_call(q_t, k_t, q, k, v, lse_t, lengths, options)
    weight = _weight_of_rows(q, k, kl_weight, row_weight, reduction, lengths, options)
    slot = Slot(inject)
    lse_t = None if lse_t is None else lse_t.detach()
    slot.term = Term(q_t.detach(), k_t.detach(), lse_t, weight, lengths, options, kl_value)
    out, loss = Carried.apply(q, k, v, slot, lambda q, k, v: attend(q, k, v, lengths, options))
    return out, CarriedKL(loss, slot)


def check_call(q_t, k_t, q, k, v, lse_t, lengths, options) -> None:
    """The rules of the operator, at once and not in the backward."""
    describe(*specs_of((q_t, k_t, q, k, None, None, None, None), lse_t, None, None, lengths, options))
    check_attention((q, k), (v, q, q))


def _weight_of_rows(q, k, kl_weight, row_weight, reduction, lengths, options) -> torch.Tensor:
    """The factor of each KL in the loss, f32: one number, or one per row."""
    if isinstance(kl_weight, torch.Tensor) and (kl_weight.numel() != 1 or kl_weight.requires_grad):
        raise ValueError("kl_weight: must be a number, or a tensor of one element without a gradient; row_weight weights rows")
    weight = torch.as_tensor(kl_weight, dtype=torch.float32, device=q.device).reshape(())
    if row_weight is not None:
        row_weight = expand_weight(row_weight, q, lengths, options)
        weight = weight * row_weight
    return weight / row_count(q, k, row_weight, lengths, options) if reduction == "mean" else weight
