"""The torch operators of attention_kl and indexer_kl.

    streamkl::forward            row vectors: KL, LSEs, ...
    streamkl::backward           gradients, from the row vectors of a forward
    streamkl::forward_backward   one pass: row vectors and gradients, when both LSEs are known
    streamkl::attention_backward KL and gradients of the student's attention, which include those of its KL

w_s is given if the student is an indexer, indices if that is sparse. Tensors and gradients have the layout of the call;
row vectors are f32 [batch, heads, length], packed [heads, total]. An operator returns the row vectors of the bit mask
`rows` (bits of _library), in the order of their bits, and the gradients of `gradients`, in the order of their tensors.
A gradient has the type of its tensor, except that forward_backward returns f32 if one of them would be f16.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from . import _library as lib
from ._call import (
    LENGTH_COUNT, TENSOR_COUNT, describe_while_tracing, execute, new_gradients, new_rows, plan_for, prepare, row_names, specs_of,
)  # fmt: skip
from ._checks import check_attention
from ._mean import divided, row_count, weighted
from ._options import are_transforms_active
from ._problem import ATTENTION, INDEXER, OPTIONS_SCHEMA, Options

_TENSORS = "Tensor q_t, Tensor k_t, Tensor q_s, Tensor k_s, Tensor? w_s, Tensor? sink_t, Tensor? sink_s, Tensor? indices"
_LENGTHS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? key_lengths, Tensor? key_begin, Tensor? key_end"
_OWN_ARGUMENTS = {
    "forward": "Tensor? lse_t, int rows",
    "backward": "Tensor lse_t, Tensor lse_s, Tensor? kl, Tensor? dot_t, Tensor grad_kl",
    "forward_backward": "Tensor lse_t, Tensor lse_s, Tensor? row_weight, int rows",
}
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    # A gradient has the strides of its tensor: a compiler must pass the strides that the fake kernel saw.
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)
for _name, _own in _OWN_ARGUMENTS.items():
    _schema = f"({_TENSORS}, {_own}, {_LENGTHS}, {OPTIONS_SCHEMA}) -> Tensor[]"
    torch.library.define(f"streamkl::{_name}", _schema, tags=_TAGS)

torch.library.define(
    "streamkl::attention_backward",
    "(Tensor q_t, Tensor k_t, Tensor q_s, Tensor k_s, Tensor v_s, Tensor o_s, Tensor do_s, Tensor lse_t, Tensor lse_s, "
    f"Tensor? row_weight, int rows, {_LENGTHS}, {OPTIONS_SCHEMA}) -> Tensor[]",
    tags=_TAGS,
)

# ---- The operators -------------------------------------------------------------------------------------------------


def _parted(arguments: tuple, own: int, tensors: int = TENSOR_COUNT) -> tuple[tuple, tuple, tuple, tuple]:
    """The tensors, the `own` next arguments, the lengths and the options of an operator."""
    end = tensors + own
    return arguments[:tensors], arguments[tensors:end], arguments[end : end + LENGTH_COUNT], arguments[end + LENGTH_COUNT :]


def _run(op: int, rows: int, given: tuple, options: tuple, execute) -> list[torch.Tensor]:
    call, given = prepare(op, rows, given, options)
    return call(given, execute)


def _forward(*arguments, execute=execute):
    tensors, (lse_t, rows), lengths, options = _parted(arguments, 2)
    return _run(lib.FORWARD, rows, (*tensors, lse_t, None, None, None, None, *lengths), options, execute)


def _forward_fake(*arguments):
    tensors, (lse_t, rows), lengths, options = _parted(arguments, 2)
    return new_rows(tensors[0], rows, describe_while_tracing(*specs_of(tensors, lse_t, None, None, lengths, options)))


def _backward(*arguments, execute=execute):
    tensors, row_vectors, lengths, options = _parted(arguments, 5)
    return _run(lib.BACKWARD, 0, (*tensors, *row_vectors, *lengths), options, execute)


def _backward_fake(*arguments):
    tensors, _, _, options = _parted(arguments, 5)
    asked = Options(*options)
    return new_gradients(tensors, asked.gradients, asked.grad_f32)


def _forward_backward(*arguments, execute=execute):
    tensors, (lse_t, lse_s, row_weight, rows), lengths, options = _parted(arguments, 4)
    given = (*tensors, lse_t, lse_s, None, None, row_weight, *lengths)
    return _run(lib.FORWARD_BACKWARD, rows, given, options, execute)


def _forward_backward_fake(*arguments):
    tensors, (lse_t, lse_s, row_weight, rows), lengths, options = _parted(arguments, 4)
    problem = describe_while_tracing(*specs_of(tensors, lse_t, lse_s, row_weight, lengths, options), one_pass=True)
    return [*new_rows(tensors[0], rows, problem), *new_gradients(tensors, problem.gradients, problem.grad_f32)]


def _attention_backward(*arguments, execute=execute):
    tensors, (*values, lse_t, lse_s, row_weight, rows), lengths, options = _parted(arguments, 7, tensors=4)
    check_attention(tensors[2:], values)
    given = (*tensors, None, None, None, None, lse_t, lse_s, None, None, row_weight, *lengths, *values)
    return _run(lib.ATTENTION_BACKWARD, rows, given, options, execute)


def _attention_backward_fake(*arguments):
    tensors, (*values, lse_t, lse_s, row_weight, rows), lengths, options = _parted(arguments, 7, tensors=4)
    described = specs_of((*tensors, None, None, None, None), lse_t, lse_s, row_weight, lengths, options)
    problem = describe_while_tracing(*described)
    check_attention(tensors[2:], values)
    trained = (*tensors, None, None, None, values[0])
    return [*new_rows(tensors[0], rows, problem), *new_gradients(trained, problem.gradients, problem.grad_f32)]


def carries_kl(q_t, k_t, q_s, k_s, lse_t, lse_s, row_weight, lengths, options) -> bool:
    """Whether attention_backward runs: on a CPU, or on a GPU with a kernel for the KL and the attention backward together."""
    if q_t.device.type == "cpu":
        return True
    plan = plan_for(*specs_of((q_t, k_t, q_s, k_s, None, None, None, None), lse_t, lse_s, row_weight, lengths, options))
    return _has_carrying_kernel(plan)


@lru_cache(maxsize=4096)
def _has_carrying_kernel(plan: lib.Plan) -> bool:
    return plan.supports(lib.ATTENTION_BACKWARD)


KERNELS = {}  # {torch operator: its implementation}
for _kernel, _fake in (
    (_forward, _forward_fake), (_backward, _backward_fake), (_forward_backward, _forward_backward_fake),
    (_attention_backward, _attention_backward_fake),
):  # fmt: skip
    _name = _kernel.__name__.removeprefix("_")
    torch.library.impl(f"streamkl::{_name}", ("cpu", "cuda"), _kernel)
    torch.library.register_fake(f"streamkl::{_name}", _fake)
    KERNELS[getattr(torch.ops.streamkl, _name).default] = _kernel


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


def _direct(operator, kernel):
    """The operator, called without the dispatcher where possible: it would convert 40 arguments to C++ and back."""

    def call(*arguments):
        return operator(*arguments) if _is_observed(arguments) else kernel(*arguments)

    return call


class Operators:
    """The operators, as attributes with the names that they have in torch.ops.streamkl."""

    forward, backward, forward_backward, attention_backward = (staticmethod(_direct(*pair)) for pair in KERNELS.items())


# ---- Autograd: around the operators, because torch.library.register_autograd takes 200 us per call -----------------


def rows_needed_by(op: int, q_t, q_s, w_s, options) -> int:
    """Row vectors that `op` needs for all gradients of the options."""
    heads = -3 if options.heads_first else -2
    student = ATTENTION if w_s is None else INDEXER
    has_teacher_groups = True if q_t.shape[heads] != (q_s if w_s is None else w_s).shape[heads] else False
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
        with torch.no_grad():
            made = ctx.operators.backward(
                *tensors, indices, lse_t, lse_s, kl, dot_t, grad_kl, *lengths, *ctx.options
            )
        if torch.is_grad_enabled():  # create_graph=True
            made = _OnceDifferentiable.apply(_function_name(tensors[4]), len(made), *made, *tensors)
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
        operators, indices, lse_t, lse_s, row_weight, rows, is_mean, lengths, options = fixed
        needed = rows_needed_by(lib.FORWARD_BACKWARD, q_t, q_s, w_s, options) & lib.DOT_T
        made = operators.forward_backward(
            q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, lse_s, row_weight, rows | needed | lib.KL,
            *lengths, *options,
        )
        names = row_names(rows | needed | lib.KL)
        total = row_count(q_s, k_s, row_weight, lengths, options) if is_mean else 1
        loss = divided(weighted(made[0], row_weight), total)  # kl is the first row vector
        is_number = not isinstance(total, torch.Tensor)
        ctx.save_for_backward(None if is_number else total, *made[len(names) :])
        ctx.gradients, ctx.total, ctx.function = options.gradients, total if is_number else 1, _function_name(w_s)
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
        if torch.is_grad_enabled():  # create_graph=True; a second derivative would depend on tensors that are not saved
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
        made = [gradient * grad_loss for gradient in gradients]
        made = [each if each.dtype == dtype else each.to(dtype) for each, dtype in zip(made, ctx.dtypes)]
        return *per_tensor(made, ctx.gradients, None), None


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients, unchanged, as functions of the tensors that they depend on: a second derivative is refused."""

    @staticmethod
    def forward(ctx, function, count, *gradients_and_tensors):
        ctx.function = function
        return tuple(gradient.view_as(gradient) for gradient in gradients_and_tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"streamkl: {ctx.function} cannot be differentiated twice; streamkl.reference.{ctx.function} can"
        )
