"""streamkl.attention in code that torch.compile traces: two operators with registered gradients.

    streamkl::carried_attention            output, KL (0 without its value), lse_t (empty if it is given), lse_s
    streamkl::carried_attention_backward   gradients of q, k and v, from those of the output and of each row's KL

Eager code does not call them: with registered gradients, a call would take 200 us more.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _library as lib
from ._call import describe_while_tracing, new_output, new_rows
from ._carried import CarriedKL, Graph, Operands, Slot, Term, added, check_call, in_one_call, one_pass, supports
from ._checks import INPUTS
from ._mean import weighted
from ._ops import BOTH_LSES, LENGTH_COUNT, LENGTHS_SCHEMA, OPTION_COUNT, TAGS, Operators, carries_kl
from ._options import Lengths
from ._problem import OPTIONS_SCHEMA, Options
from ._sdpa import attend

_INPUTS_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor q_t, Tensor k_t, Tensor? lse_t"


def traced_attention(q, k, v, slot: Slot, term: Term) -> tuple[torch.Tensor, CarriedKL]:
    """streamkl.attention in code that a compiler traces."""
    given = term.q_t, term.k_t, term.lse_t, term.with_value
    out, kl, _, lse_s = torch.ops.streamkl.carried_attention(q, k, v, *given, *term.lengths, *term.options)
    weight = term.weights(lse_s)
    loss = (weighted(kl, weight) if isinstance(weight, torch.Tensor) else kl * weight).sum()
    if slot.inject:
        out, loss = _Injected.apply(out, loss), loss.detach()
    slot.kl = kl.detach() if term.with_value else None
    slot.term = None
    return out, CarriedKL(loss, slot)


class _Injected(torch.autograd.Function):
    """The output of an attention; its backward gives the loss of the KL the gradient 1."""

    @staticmethod
    def forward(ctx, output, loss):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, grad_output.new_ones((), dtype=torch.float32)


def _call_of(rest) -> tuple[Lengths, Any]:
    """Lengths and options, the last arguments of an operator."""
    return Lengths(*rest[:LENGTH_COUNT]), Options(*rest[LENGTH_COUNT:])


def _compute(q, k, v, q_t, k_t, lse_t, with_value, *rest):
    """The forward of Carried, without a graph."""
    lengths, options = _call_of(rest)
    plan, kl, lse_of_t = check_call(q_t, k_t, q, k, v, lse_t, lengths, options), None, lse_t
    if supports(plan, lib.ATTENTION_FORWARD) and (with_value or lse_t is None):
        kl, lse_of_t, lse_s, output = Operators.attention_forward(
            q_t, k_t, q, k, v, lib.KL | BOTH_LSES, *lengths, *options
        )
    else:
        output, lse_s = attend(q, k, v, lengths, options)
        if with_value or lse_t is None:
            kl, lse_of_t, lse_s = Operators.forward(
                q_t, k_t, q, k, None, None, None, None, lse_t, lib.KL | BOTH_LSES, *lengths, *options
            )
    kl = kl if with_value else torch.zeros_like(lse_s, memory_format=torch.contiguous_format)
    return _with_strides_of(q, output), kl, _unless_given(lse_t, lse_of_t), lse_s.contiguous()


def _with_strides_of(tensor, result):
    """The result as the fake kernel describes it."""
    expected = new_output(tensor)
    return result if result.stride() == expected.stride() else expected.copy_(result)


def _unless_given(lse_t, computed):
    """An operator returns none of its inputs."""
    return computed if lse_t is None else computed.new_empty(0)


def _fake_compute(q, k, v, q_t, k_t, lse_t, with_value, *rest):
    lengths, options = _call_of(rest)
    named = dict(q_t=q_t, k_t=k_t, q_s=q, k_s=k, v_s=v, lse_t=lse_t, **lengths._asdict())
    problem = describe_while_tracing(tuple(named.get(name) for name in INPUTS), options, False)
    kl, lse_of_t, lse_s = new_rows(q_t, lib.KL | BOTH_LSES, problem)
    return new_output(q), kl, _unless_given(lse_t, lse_of_t), lse_s


def _differentiate(q, k, v, q_t, k_t, lse_t, output, lse_s, grad_output, grad_kl, *rest):
    """The backward of Carried. `grad_kl`: of each row."""
    lengths, options = _call_of(rest)
    term = Term(q_t, k_t, lse_t, 1.0, None, False, lengths, options, with_value=False)
    operands = Operands(q_t, k_t, q, k, lse_t, lse_s, grad_kl, lengths, options)
    if carries_kl(q_t, k_t, q, k, lengths, options):
        made = in_one_call(operands, term, v, output, grad_output)[-3:]
    else:
        own = Graph(lambda q, k, v: attend(q, k, v, lengths, options), term, q, k, v).gradients(grad_output)
        made = added(own, one_pass(operands, term, q.shape[0])[-2:], 1.0)
    return tuple(map(_with_strides_of, (q, k, v), made))


def _fake_differentiate(q, k, v, *_):
    return tuple(map(new_output, (q, k, v)))


def _keep(ctx, inputs, output):
    q, k, v, q_t, k_t, lse_t, _, *rest = inputs
    out, _, lse_of_t, lse_s = output
    ctx.mark_non_differentiable(lse_of_t, lse_s)
    ctx.save_for_backward(q, k, v, q_t, k_t, lse_of_t if lse_t is None else lse_t, out, lse_s, *rest[:LENGTH_COUNT])
    ctx.options = rest[LENGTH_COUNT:]


def _gradients(ctx, grad_output, grad_kl, *_):
    *saved, lse_s = ctx.saved_tensors[:8]
    lengths = ctx.saved_tensors[8:]
    made = torch.ops.streamkl.carried_attention_backward(*saved, lse_s, grad_output, grad_kl, *lengths, *ctx.options)
    return *made, *(None for _ in range(4 + LENGTH_COUNT + OPTION_COUNT))


def _register() -> None:
    """Defines both operators."""
    forward, backward = "streamkl::carried_attention", "streamkl::carried_attention_backward"
    made = "Tensor output, Tensor lse_s, Tensor grad_output, Tensor grad_kl"
    tail = f"{LENGTHS_SCHEMA}, {OPTIONS_SCHEMA}"
    tensors = "Tensor, Tensor, Tensor"
    torch.library.define(forward, f"({_INPUTS_SCHEMA}, bool with_value, {tail}) -> ({tensors}, Tensor)", tags=TAGS)
    torch.library.define(backward, f"({_INPUTS_SCHEMA}, {made}, {tail}) -> ({tensors})", tags=TAGS)
    for name, run, fake in (forward, _compute, _fake_compute), (backward, _differentiate, _fake_differentiate):
        torch.library.impl(name, ("cpu", "cuda"), run)
        torch.library.register_fake(name, fake)
    torch.library.register_autograd(forward, _gradients, setup_context=_keep)


_register()
