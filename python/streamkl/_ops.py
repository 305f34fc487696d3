"""The torch operators of attention_kl and indexer_kl.

    streamkl::forward            row vectors: KL, LSEs, ...
    streamkl::backward           gradients, from the row vectors of a forward
    streamkl::forward_backward   one pass: row vectors and gradients, when both LSEs are known
    streamkl::attention_forward  row vectors and the output of the student's attention
    streamkl::attention_backward KL and gradients of the student's attention, which include those of its KL

w_s is given if the student is an indexer, indices if that is sparse. Tensors and gradients have the layout of the call;
row vectors are f32 [batch, heads, length], packed [heads, total]. An operator returns the row vectors of the bit mask
`rows` (bits of _library), in the order of their bits, and the gradients of `gradients`, in the order of their tensors.
A gradient has the type of its tensor, except that forward_backward returns f32 if one of them would be f16.
"""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter
from typing import Any, Callable

import torch

from . import _library as lib
from ._call import (
    describe_while_tracing, execute, new_gradients, new_output, new_rows, plan_for, prepare, row_names, specs_of,
)  # fmt: skip
from ._checks import INPUTS, TENSORS
from ._mean import divided, nonzero, total_weight, weighted
from ._options import Lengths
from ._problem import ATTENTION, INDEXER, OPTIONS_SCHEMA, Options
from ._tensors import are_transforms_active, check_gradient

TENSOR_COUNT, LENGTH_COUNT, OPTION_COUNT = len(TENSORS), len(Lengths._fields), len(Options._fields)
_TENSORS = ", ".join(f"Tensor{'' if place < 4 else '?'} {name}" for place, name in enumerate(TENSORS))
LENGTHS_SCHEMA = ", ".join(f"Tensor? {name}" for name in Lengths._fields)
TAGS = (
    torch.Tag.pt2_compliant_tag,
    # A gradient has the strides of its tensor: a compiler must pass the strides that the fake kernel saw.
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)

# ---- The operators -------------------------------------------------------------------------------------------------

KERNELS: dict[Any, Callable] = {}  # {torch operator: its implementation}


class Operator:
    """A torch operator on tensors, arguments of its `own`, lengths and options."""

    def __init__(self, name: str, op: int, own: str, tensors: str = _TENSORS, result: str = "Tensor[]") -> None:
        torch.library.define(
            f"streamkl::{name}", f"({tensors}, {own}, {LENGTHS_SCHEMA}, {OPTIONS_SCHEMA}) -> {result}", tags=TAGS
        )
        self.overload, self.op = getattr(torch.ops.streamkl, name).default, op
        names = [argument.name for argument in self.overload._schema.arguments]
        self.pick = itemgetter(*(names.index(each) if each in names else -1 for each in INPUTS))
        self.rows = names.index("rows") if "rows" in names else -1
        required = [place for place, each in enumerate(self.overload._schema.arguments) if str(each.type) == "Tensor"]
        self.required = [(place, names[place]) for place in required]
        torch.library.impl(f"streamkl::{name}", ("cpu", "cuda"), self.run)
        torch.library.register_fake(f"streamkl::{name}", self.fake)
        KERNELS[self.overload] = self.run

    def given(self, arguments: tuple) -> tuple[int, tuple, tuple]:
        """The bits of the row vectors, the inputs in the order of INPUTS, and the options."""
        for place, name in self.required:  # torch takes None for a tensor
            if arguments[place] is None:
                raise ValueError(f"{name}: None must be a tensor")
        arguments = (*arguments, None)
        return arguments[self.rows] or 0, self.pick(arguments), arguments[-OPTION_COUNT - 1 : -1]

    def run(self, *arguments, execute=execute):
        rows, given, options = self.given(arguments)
        call, given = prepare(self.op, rows, given, options)
        return call(given, execute)

    def fake(self, *arguments):
        rows, given, options = self.given(arguments)
        problem = describe_while_tracing(given, options, self.op == lib.FORWARD_BACKWARD)
        made = [] if self.op == lib.BACKWARD else new_rows(given[0], rows, problem)
        if self.op == lib.ATTENTION_FORWARD:
            return [*made, new_output(given[INPUTS.index("q_s")])]
        return made if self.op == lib.FORWARD else made + new_gradients(dict(zip(INPUTS, given)), problem)

    def __call__(self, *arguments):
        """Without the dispatcher where possible: it would convert 40 arguments to C++ and back."""
        return self.overload(*arguments) if _is_observed(arguments) else self.run(*arguments)


class Operators:
    """The operators, as attributes with the names that they have in torch.ops.streamkl."""

    forward = Operator("forward", lib.FORWARD, "Tensor? lse_t, int rows")
    backward = Operator(
        "backward", lib.BACKWARD, "Tensor lse_t, Tensor lse_s, Tensor? kl, Tensor? dot_t, Tensor grad_kl"
    )
    forward_backward = Operator(
        "forward_backward", lib.FORWARD_BACKWARD, "Tensor? lse_t, Tensor? lse_s, Tensor? grad_kl, int rows"
    )
    attention_forward = Operator(
        "attention_forward",
        lib.ATTENTION_FORWARD,
        "Tensor v_s, int rows",
        tensors="Tensor q_t, Tensor k_t, Tensor q_s, Tensor k_s",
    )
    attention_backward = Operator(
        "attention_backward",
        lib.ATTENTION_BACKWARD,
        "Tensor v_s, Tensor o_s, Tensor do_s, Tensor lse_t, Tensor lse_s, Tensor? grad_kl, int rows",
        tensors="Tensor q_t, Tensor k_t, Tensor q_s, Tensor k_s",
    )


def carries_kl(q_t: torch.Tensor, k_t: torch.Tensor, q_s: torch.Tensor, k_s: torch.Tensor, lengths, options) -> bool:
    """Whether attention_backward runs: on a CPU, or on a GPU with a kernel for the KL and the attention backward together."""
    specs = specs_of(q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_s, **lengths._asdict())
    return q_t.device.type == "cpu" or supports(plan_for(specs, options), lib.ATTENTION_BACKWARD)


@lru_cache(maxsize=4096)
def supports(plan: lib.Plan, op: int) -> bool:
    return plan.supports(op)


def per_tensor(made, gradients: int, absent):
    """The gradients of the tensors; `absent` for those that are not in the bit mask `gradients`."""
    remaining = iter(made)
    return [next(remaining) if gradients >> bit & 1 else absent for bit in range(TENSOR_COUNT - 1)]


# ---- Calls without the dispatcher ----------------------------------------------------------------------------------

# Without one of these functions of torch, every call goes through the dispatcher.
_count_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_tracing_state = getattr(torch._C, "_get_tracing_state", lambda: True)
_is_profiling = getattr(torch.autograd, "_profiler_enabled", lambda: True)
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float}


def _is_observed(arguments: tuple) -> bool:
    """Whether more than the kernel takes part in a call: a compiler, a mode, a transform, a profiler, a tensor subclass."""
    return (
        torch.compiler.is_compiling()  # first: a compiler cannot trace the others
        or _count_modes() > 0
        or _tracing_state() is not None
        or _is_profiling()
        or are_transforms_active()
        or not _PLAIN.issuperset(map(type, arguments))
    )


# ---- Autograd: around the operators, because torch.library.register_autograd takes 200 us per call -----------------


def rows_needed_by(op: int, q_t, q_s, w_s, options) -> int:
    """Row vectors that `op` needs for all gradients of the options."""
    heads = -3 if options.heads_first else -2
    student = ATTENTION if w_s is None else INDEXER
    of_student = q_s if w_s is None else w_s
    fits = min(q_t.dim(), of_student.dim()) >= 3  # else the checks of the operator report a tensor
    has_teacher_groups = True if fits and q_t.shape[heads] != of_student.shape[heads] else False
    return lib.rows_needed(op, options.gradients, options.direction, student, has_teacher_groups)


def _function_name(w_s) -> str:
    return "attention_kl" if w_s is None else "indexer_kl"


class Forward(torch.autograd.Function):
    """streamkl::forward, whose kl streamkl::backward differentiates. Returns the row vectors of `rows`, kl first.

    `fixed` is a tuple of the arguments without a gradient, because autograd takes time for each argument. Its first element
    has the three operators as attributes: Operators, or those of a process group.
    """

    @staticmethod
    def forward(ctx, q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, fixed):
        operators, indices, lse_t, rows, lengths, options = fixed
        needed = rows_needed_by(lib.BACKWARD, q_t, q_s, w_s, options)
        computed = rows | needed | (BOTH_LSES if sink_t is not None else 0)  # the KL with sinks is made of both LSEs
        made = operators.forward(
            q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, computed, *lengths, *options
        )
        named = dict(zip(row_names(computed), made))
        saved = [named[name] if needed & bit else None for name, bit in _SAVED_ROWS]
        ctx.save_for_backward(q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, *saved, *lengths)
        ctx.operators, ctx.options = operators, options
        returned = tuple([named[name] for name in row_names(rows)])
        ctx.mark_non_differentiable(*returned[1:])
        return returned

    @staticmethod
    def backward(ctx, grad_kl, *_):
        saved = ctx.saved_tensors  # once: under checkpointing, every access computes them again
        *tensors, indices, lse_t, lse_s, kl, dot_t = saved[: TENSOR_COUNT + 4]
        lengths = saved[TENSOR_COUNT + 4 :]
        check_gradient(_function_name(tensors[4]), grad_kl)
        with torch.no_grad():
            made = ctx.operators.backward(*tensors, indices, lse_t, lse_s, kl, dot_t, grad_kl, *lengths, *ctx.options)
        made = once_differentiable(_function_name(tensors[4]), made, *tensors, grad_kl)
        return *per_tensor(made, ctx.options.gradients, None), None


BOTH_LSES = lib.LSE_T | lib.LSE_S
_SAVED_ROWS = (("lse_t", lib.LSE_T), ("lse_s", lib.LSE_S), ("kl", lib.KL), ("dot_t", lib.DOT_T))


class OnePass(torch.autograd.Function):
    """streamkl::forward_backward. Returns the sum or mean of the weighted KLs and the row vectors of `rows`.

    The backward multiplies the gradients by the upstream gradient, divided by the number of rows of a mean, and only then
    rounds those of f16 tensors: see describe().
    """

    @staticmethod
    def forward(ctx, q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, fixed):
        operators, indices, lse_t, lse_s, row_weight, rows, is_mean, everywhere, lengths, options = fixed
        needed = rows_needed_by(lib.FORWARD_BACKWARD, q_t, q_s, w_s, options) & lib.DOT_T
        made = operators.forward_backward(
            q_t,
            k_t,
            q_s,
            k_s,
            w_s,
            sink_t,
            sink_s,
            indices,
            lse_t,
            lse_s,
            row_weight,
            rows | needed | lib.KL,
            *lengths,
            *options,
        )
        names = row_names(rows | needed | lib.KL)
        kl = made[0]
        total = total_weight(kl, None if everywhere else lse_s, row_weight, lengths) if is_mean else 1
        loss = divided(weighted(kl, row_weight), total)
        is_number = not isinstance(total, torch.Tensor)
        ctx.save_for_backward(None if is_number else nonzero(total), *made[len(names) :])
        ctx.gradients, ctx.total, ctx.function = (
            options.gradients,
            max(total, 1) if is_number else 1,
            _function_name(w_s),
        )
        tensors = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s)
        ctx.dtypes = [tensor.dtype for bit, tensor in enumerate(tensors) if options.gradients >> bit & 1]
        if rows == 0:
            return (loss,)
        named = dict(zip(names, made))
        returned = [named[name] for name in row_names(rows)]
        ctx.mark_non_differentiable(*returned)
        return loss, *returned

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if (
            torch.is_grad_enabled()
        ):  # create_graph=True; a second derivative would depend on tensors that are not saved
            case = {"attention_kl": "attention_kl with both LSEs", "indexer_kl": "the sum or mean of indexer_kl"}
            raise RuntimeError(
                f"streamkl: {case[ctx.function]} cannot be differentiated twice, nor take create_graph=True; "
                f"streamkl.reference.{ctx.function} can"
            )
        total, *gradients = ctx.saved_tensors
        if total is not None:
            grad_loss = grad_loss / total
        elif ctx.total != 1:
            grad_loss = grad_loss * (1.0 / ctx.total)
        made = torch._foreach_mul(gradients, grad_loss)
        made = [each if each.dtype == dtype else each.to(dtype) for each, dtype in zip(made, ctx.dtypes)]
        return *per_tensor(made, ctx.gradients, None), None


def once_differentiable(function: str, made, *inputs):
    """The gradients `made` of a backward. Under create_graph=True second derivatives in the `inputs` are refused."""
    return _OnceDifferentiable.apply(function, len(made), *made, *inputs) if torch.is_grad_enabled() else made


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients, unchanged, as functions of the tensors that they depend on."""

    @staticmethod
    def forward(ctx, function, count, *gradients_and_inputs):
        ctx.function = function
        return tuple(gradient.view_as(gradient) for gradient in gradients_and_inputs[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"streamkl: {ctx.function} cannot be differentiated twice; streamkl.reference.{ctx.function} can"
        )
