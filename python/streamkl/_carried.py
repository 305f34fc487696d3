"""streamkl.attention: attention that carries its KL."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Literal, NamedTuple

import torch

from . import _library as lib
from ._attention_kl import expand_weight, promote_under_autocast
from ._call import plan_for, specs_of
from ._mean import attends_everywhere, nonzero, total_weight, weighted
from ._ops import BOTH_LSES, Operators, once_differentiable, supports
from ._options import AttentionOptions, CarriedOptions, Lengths, check_flags, check_number, translate, with_options
from ._problem import DK_S, DQ_S, DV_S, KL_REVERSE
from ._sdpa import as_autocast, attend, fixed_order
from ._tensors import check_gradient, check_tensors

GRADIENTS = DQ_S | DK_S | DV_S


@dataclass
class Term:
    """The KL that an attention carries: its teacher, and the weight of each row in the loss."""

    q_t: torch.Tensor
    k_t: torch.Tensor
    lse_t: torch.Tensor | None  # None: not known yet
    kl_weight: float | torch.Tensor  # a tensor is f32, of one element
    row_weight: torch.Tensor | None  # f32, [batch, heads_s, len_q] or packed [heads_s, total_q]
    is_mean: bool
    lengths: Lengths
    options: Any  # Options
    with_value: bool = True  # the KL of each row is still to be computed
    # The lengths describe packed sequences: the rows of the batch follow each other.
    packs_batch: bool = False
    plan: lib.Plan | None = None  # computes the attention and its KL; None until the call has looked it up
    lse_s: torch.Tensor | None = None  # the student's LSE, once a forward has computed the KL; packed as q_t is
    _weights: float | torch.Tensor | None = None  # see weights()

    def __post_init__(self) -> None:
        self.versions: list[tuple[str, torch.Tensor, int]] = []
        if torch.compiler.is_compiling():
            return  # a compiled graph saves these tensors itself
        given = {name: getattr(self, name) for name in ("q_t", "k_t", "lse_t", "kl_weight", "row_weight")}
        for name, tensor in (given | self.lengths._asdict()).items():
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():  # which has no version
                self.versions.append((name, tensor, tensor._version))

    def check_unchanged(self) -> None:
        """Raises RuntimeError if a tensor that the backward reads is not that of the forward: autograd does not save them."""
        for name, tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"streamkl.attention: {name} has been changed in place between the forward and the backward, which reads "
                    f"it: pass {name}.clone()"
                )

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, length, ...] as [heads, batch * length, ...]."""
        return tensor.transpose(0, 1).flatten(1, 2) if self.packs_batch else tensor

    def unpacked(self, tensor: torch.Tensor, batch: int) -> torch.Tensor:
        return tensor.unflatten(1, (batch, -1)).transpose(0, 1) if self.packs_batch else tensor

    @property
    def row_vectors(self) -> int:
        """Bits of _library. Gradients of KL(S || P) need the KL."""
        return lib.KL if self.with_value or self.options.direction == KL_REVERSE else 0

    def weights(self, lse_s: torch.Tensor) -> float | torch.Tensor:
        """The factor of each KL in the loss: a number, a tensor of one element, or one per row. Computed once."""
        if self._weights is not None:
            return self._weights
        weight = self.kl_weight if self.row_weight is None else self.kl_weight * self.row_weight
        if self.is_mean:
            everywhere = attends_everywhere(self.q_t, self.k_t, self.lengths, self.options)
            total = total_weight(lse_s, None if everywhere else lse_s, self.row_weight, self.lengths)
            weight = weight / (nonzero(total) if isinstance(total, torch.Tensor) else max(total, 1))
        self._weights = weight
        return weight

    def weigh(self, row_weight: torch.Tensor, q: torch.Tensor) -> None:
        """Sets the weights of the rows, before they are used; `q`: the student's queries, packed."""
        self.row_weight = expand_weight(row_weight, q, self.lengths, self.options, "q")

    def know(self, lse_t: torch.Tensor, lse_s: torch.Tensor) -> None:
        """Keeps the LSEs of a forward that has computed the KL."""
        self.lse_t = lse_t if self.lse_t is None else self.lse_t
        self.lse_s, self.with_value = lse_s, False

    def measure(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The KL of each row, by a forward of its own; `q` and `k` are packed."""
        kl, lse_t, lse_s = Operators.forward(
            self.q_t, self.k_t, q, k, None, None, None, None, self.lse_t, lib.KL | BOTH_LSES, *self.lengths, *self.options
        )  # fmt: skip
        self.know(lse_t, lse_s)
        return kl


class Slot:
    """What the two passes of an attention read and write. It does not refer to the graph, which refers to it."""

    def __init__(self, inject: bool, term: Term | None = None) -> None:
        self.inject = inject  # the weight of the KL does not depend on an upstream gradient
        # None: the attention carries no KL. A KL that comes after the forward has a kernel that carries it.
        self.term = term
        self.is_done = False  # the backward has run
        self.apart: str | None = None  # why later steps run the module's own attention
        # The tensors of an early term, which precedes the forward; its weights follow later.
        self.early: tuple | None = None
        self.kl: torch.Tensor | None = None  # the KL of each row, once it is known
        self.value: torch.Tensor | None = None  # the weighted KLs, added up

    def know(self, kl: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Keeps the KL of each row. `weight`: the factor of each KL in the loss."""
        assert self.term is not None
        self.kl = kl
        if not isinstance(weight, torch.Tensor):
            self.value = kl.sum() * weight if weight != 0 else kl.new_zeros(())
        elif weight.dim() == 0:
            self.value = weighted(kl.sum(), weight)
        else:
            self.value = weighted(kl, self.term.unpacked(weight, kl.shape[0])).sum()

    def weigh(self) -> torch.Tensor:
        """The value, from the KL of each row, once the term has its weights."""
        assert self.term is not None and self.term.lse_s is not None and self.kl is not None
        self.know(self.kl, self.term.weights(self.term.lse_s))
        assert self.value is not None
        return self.value.detach()

    def finish(self) -> None:
        """Frees the teacher."""
        self.is_done, self.term = True, None


class CarriedKL:
    """The KL that an attention carries.

    Attributes:
        loss: a scalar with the value of the KL in the loss; its value is 0 with ``kl_value=False``. With
            ``inject=False`` add it to the loss of the model, and the KL has the weight that this loss has: a loss
            scale, or a factor of gradient accumulation. With ``inject=True`` it is there to be read.
    """

    def __init__(self, loss: torch.Tensor, slot: Slot) -> None:
        self.loss, self.slot = loss, slot

    @property
    def kl(self) -> torch.Tensor:
        """The KL of each row, f32 ``[batch, heads, len_q]``, packed ``[heads, total_q]``, not weighted."""
        if self.slot.kl is None:
            raise RuntimeError("streamkl.attention: kl_value=False leaves out the KL of each row")
        return self.slot.kl


class Carried(torch.autograd.Function):
    """Runs `compute` (q, k, v) -> (output, lse or None). The backward is that of this attention and of the KL in `slot`.

    A KL that is there before the forward decides how both are computed; _forward() has the ways.
    """

    @staticmethod
    def forward(ctx, q, k, v, slot: Slot, compute: Callable):
        ctx.slot, ctx.compute = slot, compute
        made = _Forward(*compute(q, k, v)) if slot.term is None else _forward(slot, slot.term, compute, q, k, v)
        ctx.graph, ctx.of_kl = made.graph, made.of_kl
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, made.output, made.lse)
        # A tensor of its own: the one that the slot keeps would refer to the graph if it were an output.
        value = q.new_zeros((), dtype=torch.float32) if slot.value is None else slot.value.detach()
        return made.output, value

    @staticmethod
    def backward(ctx, grad_output, grad_loss):
        q, k, v, output, lse = ctx.saved_tensors
        with torch.no_grad():
            made = Carried._gradients(ctx, q, k, v, output, lse, grad_output, grad_loss)
        return *once_differentiable("attention", made, q, k, v, grad_output, grad_loss), None, None

    @staticmethod
    def _gradients(ctx, q, k, v, output, lse, grad_output, grad_loss):
        slot, term = ctx.slot, ctx.slot.term
        if slot.is_done:
            raise RuntimeError(
                "streamkl.attention: the backward runs once and frees the teacher: no retain_graph=True"
            )
        scale = 1.0 if slot.inject else grad_loss
        check_gradient("attention", grad_loss if grad_output is None else grad_output)
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        if term is not None and ctx.graph is None:
            term.check_unchanged()
        if ctx.graph is not None:
            own = ctx.graph.gradients(grad_output)
            made = own if scale is None else added(own, ctx.of_kl, scale)
            slot.finish()
        elif term is None or scale is None:
            made = Graph(ctx.compute, term, q, k, v).gradients(grad_output)
        else:
            operands, _ = _operands(term, q, k, lse, scale)
            made = in_one_call(operands, term, v, output, grad_output)[-3:]
            slot.finish()
        ctx.graph = ctx.of_kl = None
        return made


class Graph:
    """torch's attention, with the graph of its own backward."""

    def __init__(self, compute, term: Term | None, q, k, v) -> None:
        fixed = term is not None and term.options.deterministic
        self.order = partial(fixed_order, q, term) if fixed else nullcontext
        self.inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad(), self.order():
            self.output, self.lse = compute(*self.inputs)

    def gradients(self, grad_output):
        with self.order():
            return torch.autograd.grad(self.output, self.inputs, grad_output)


class _Forward(NamedTuple):
    output: torch.Tensor
    lse: torch.Tensor | None  # the student's LSE
    graph: Graph | None = None  # apart: the attention's own
    of_kl: list[torch.Tensor] | None = None  # apart: gradients of q and k


def _forward(slot: Slot, term: Term, compute, q, k, v) -> _Forward:
    """The forward of an attention whose KL is known. Three ways, the first that a device has:

    the attention and the KL in one launch, and a backward that carries the gradient of the KL
    torch's attention, a forward of the KL if its value is wanted, and the same backward
    torch's attention with its own backward, and a one-pass call
    """
    plan = term.plan or plan_of(term.q_t, term.k_t, q, k, v, None, term.lengths, term.options)
    carries = supports(plan, lib.ATTENTION_BACKWARD)
    with_value = term.with_value
    needs_rows = with_value or term.lse_t is None
    kl: torch.Tensor | None = None
    lse: torch.Tensor | None
    if carries and needs_rows and supports(plan, lib.ATTENTION_FORWARD):
        kl, lse_t, lse_s, output = Operators.attention_forward(
            term.q_t, term.k_t, *map(term.packed, (q, k, v)), lib.KL | BOTH_LSES, *term.lengths, *term.options
        )
        term.know(lse_t, lse_s)
        output, lse, kl = (term.unpacked(each, q.shape[0]) for each in (output, lse_s, kl))
    elif carries:
        output, lse = compute(q, k, v)
        if with_value:
            kl = term.measure(q, k)
    else:
        graph = Graph(compute, term, q, k, v)
        lse = None if graph.lse is None else graph.lse.detach()
        operands, weight = _operands(term, q, k, lse, 1.0)
        *rows, dq, dk = one_pass(operands, term, q.shape[0])
        if term.with_value:
            slot.know(rows[0], weight)
        return _Forward(graph.output.detach(), lse, graph, [dq, dk])
    if with_value:
        slot.kl = kl
        if slot.early is None:
            slot.weigh()
    return _Forward(output, lse)


def added(own, of_kl, scale):
    """The gradients of an attention, and those of its KL times `scale`: one launch per sum, which rounds it once."""
    for each, more in zip(own, of_kl):
        each.add_(more if isinstance(scale, float) and scale == 1.0 else more * scale)
    return own


class Operands(NamedTuple):
    """What a call of the library takes: packed where the lengths of the term are those of packed sequences."""

    q_t: torch.Tensor
    k_t: torch.Tensor
    q_s: torch.Tensor
    k_s: torch.Tensor
    lse_t: torch.Tensor
    lse_s: torch.Tensor
    grad_kl: torch.Tensor
    lengths: Lengths
    options: Any


def _operands(term: Term, q, k, lse_s, scale) -> tuple[Operands, float | torch.Tensor]:
    """The operands, whose weights are those of the term times `scale`, and the weights. Computes LSEs that are not known."""
    q, k, lse_s = term.packed(q), term.packed(k), term.lse_s if lse_s is None else term.packed(lse_s)
    lse_t = term.lse_t
    if lse_t is None or lse_s is None:
        computed_t, computed_s = Operators.forward(
            term.q_t, term.k_t, q, k, None, None, None, None, lse_t, BOTH_LSES, *term.lengths, *term.options
        )
        lse_t, lse_s = computed_t if lse_t is None else lse_t, computed_s if lse_s is None else lse_s
    weight = term.weights(lse_s)
    scaled = weight * scale
    if not isinstance(scaled, torch.Tensor):
        # Filled in on the device: a copy from the host would wait for all that is queued there.
        scaled = lse_s.new_full((), scaled, dtype=torch.float32)
    scaled = scaled.expand(lse_s.shape)
    return Operands(term.q_t, term.k_t, q, k, lse_t, lse_s, scaled, term.lengths, term.options), weight


def in_one_call(operands: Operands, term: Term, v, output, grad_output):
    """[kl, dq, dk, dv], or without the KL"""
    q_t, k_t, q_s, k_s, lse_t, lse_s, weight, lengths, options = operands
    of_values = map(term.packed, (v, output, grad_output))
    made = Operators.attention_backward(
        q_t, k_t, q_s, k_s, *of_values, lse_t, lse_s, weight, term.row_vectors, *lengths, *options
    )
    return [term.unpacked(each, v.shape[0]) for each in made]


def one_pass(operands: Operands, term: Term, batch: int):
    """[kl, dq, dk] of the KL alone, or without the KL. Gradients are f32."""
    q_t, k_t, q_s, k_s, lse_t, lse_s, weight, lengths, options = operands
    options = options._replace(gradients=DQ_S | DK_S, grad_f32=True)
    made = Operators.forward_backward(
        q_t, k_t, q_s, k_s, None, None, None, None, lse_t, lse_s, weight, term.row_vectors, *lengths, *options
    )
    return [term.unpacked(each, batch) for each in made]


def term_of(q_t, k_t, q_s, k_s, lse_t, direction, *, row_weight, with_value, packs_batch, **options) -> Term:
    """The mean KL over rows, with the arguments of attention_kl."""
    lengths, translated = translate(AttentionOptions, GRADIENTS, {"direction": direction, **options})
    weights = _weights(q_s, 1.0, row_weight, lengths, translated)
    return Term(q_t, k_t, lse_t, *weights, True, lengths, translated, with_value, packs_batch)


@with_options(CarriedOptions)
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
    reduction: Literal["mean", "sum"] = "mean",
    row_weight: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, CarriedKL]:
    """Attention of a student together with its KL to a teacher.

    The output is ``softmax(softmax_scale <q, k>) v``. The backward adds the gradient of ``kl_weight`` times the attention
    KL to its own: both need the same probabilities and the same products. On Hopper one launch computes the output and
    the KL, and one launch all gradients. Where no such kernel is, the attention is torch's own.

    Args:
        q: queries, ``[batch, len_q, heads, dim]``; float32, float16 or bfloat16.
        k: keys, ``[batch, len_k, key_heads, dim]``.
        v: values, of the shape of the keys.
        q_t: teacher queries, as in :func:`streamkl.attention_kl`. The teacher receives no gradient.
        k_t: teacher keys.
        kl_weight: factor of the KL in the loss: a number, or a tensor with one element.
        inject: ``True``: the gradient of the KL counts with ``kl_weight``, whatever the loss is. A loss scale
            belongs in ``kl_weight``: ``scaler.scale(torch.tensor(0.1, device=q.device))``. ``False``:
            ``handle.loss`` is part of your loss, and its upstream gradient multiplies ``kl_weight``.
        kl_value: compute ``handle.kl`` and the value of ``handle.loss``. Without it there is only the gradient, which
            takes less time if ``lse_t`` is given.
        {options}

    Windows and lengths make the forward store the matrix of probabilities off a GPU, with f32, and with heads of more than
    256 dimensions.

    Returns:
        ``(out, handle)``: the output, of the shape of ``q``, and a handle with ``handle.loss`` and ``handle.kl``.

    Raises:
        ValueError: an argument does not fit.
    """
    given = dict(
        row_weight=row_weight, lse_t=lse_t, kl_weight=kl_weight if isinstance(kl_weight, torch.Tensor) else None
    )
    check_tensors("attention", q=q, k=k, v=v, q_t=q_t, k_t=k_t, optional=given)
    check_flags(inject=inject, kl_value=kl_value)
    q, k, v = map(as_autocast, (q, k, v))
    if q_t.dtype != k_t.dtype:
        q_t, k_t, _, _ = promote_under_autocast(q_t, k_t, q, k)
    lengths, options = translate(CarriedOptions, GRADIENTS, {"reduction": reduction, **options})
    weights = _weights(q, kl_weight, row_weight, lengths, options)
    lse_t = None if lse_t is None else lse_t.detach()
    term = Term(q_t.detach(), k_t.detach(), lse_t, *weights, reduction == "mean", lengths, options, kl_value)
    slot = Slot(inject, term)
    if torch.compiler.is_compiling():
        from ._traced_attention import traced_attention

        return traced_attention(q, k, v, slot, term)
    term.plan = check_call(q_t, k_t, q, k, v, lse_t, lengths, options)
    out, loss = Carried.apply(q, k, v, slot, lambda q, k, v: attend(q, k, v, lengths, options))
    if not out.requires_grad:
        slot.finish()
    return out, CarriedKL(loss, slot)


def plan_of(q_t, k_t, q, k, v, lse_t, lengths, options) -> lib.Plan:
    return plan_for(specs_of(q_t=q_t, k_t=k_t, q_s=q, k_s=k, v_s=v, lse_t=lse_t, **lengths._asdict()), options)


def check_call(q_t, k_t, q, k, v, lse_t, lengths, options) -> lib.Plan:
    """The plan. Its rules are checked here, and not in the backward."""
    try:
        return plan_of(q_t, k_t, q, k, v, lse_t, lengths, options)
    except ValueError as error:
        raise ValueError(re.sub(r"\b(q|k|v|dim)_s\b", r"\1", str(error))) from None  # names as this function has them


def _weights(q, kl_weight, row_weight, lengths, options) -> tuple[float | torch.Tensor, torch.Tensor | None]:
    """The weights of a term; tensors are f32."""
    weight: float | torch.Tensor
    if isinstance(kl_weight, torch.Tensor):
        if kl_weight.numel() != 1 or kl_weight.requires_grad or kl_weight.is_complex():
            shown = (
                f"{kl_weight.dtype} {list(kl_weight.shape)}{' with a gradient' if kl_weight.requires_grad else ''}"
            )
            accepted = "a number, or a real tensor of one element without a gradient"
            raise ValueError(f"kl_weight: {shown} must be {accepted}; row_weight weights rows")
        weight = kl_weight.to(q.device, torch.float32).reshape(())
    else:
        check_number("kl_weight", kl_weight)
        weight = float(kl_weight)
    if row_weight is None:
        return weight, None
    if row_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "row_weight: requires a gradient, and the KL of an attention has none for it: pass row_weight.detach()"
        )
    return weight, expand_weight(row_weight, q, lengths, options, "q")
