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
from ._call import address, call, describe_while_tracing, execute, input_address, row_address
from ._checks import check_attention, describe
from ._problem import ATTENTION, INDEXER, OPTIONS_SCHEMA, Options, Problem

_TENSORS = "Tensor q_t, Tensor k_t, Tensor q_s, Tensor k_s, Tensor? w_s, Tensor? sink_t, Tensor? sink_s, Tensor? indices"
TENSOR_COUNT = 8  # the last has no gradient
_LENGTHS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? key_lengths, Tensor? key_begin, Tensor? key_end"
_LENGTH_COUNT = 5
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

# ---- Plans ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # packed batches have new lengths at every step; a plan takes less than a kilobyte
def _plan_for(*specs_and_options, one_pass: bool = False) -> lib.Plan:
    return lib.Plan(describe(*specs_and_options, one_pass=one_pass))


def specs_of(tensors, lse_t, lse_s, row_weight, lengths, options):
    """The arguments of describe()."""
    return *map(_spec, (*tensors, lse_t, lse_s, row_weight, *lengths)), *options


def _spec(tensor):
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


# ---- Outputs -------------------------------------------------------------------------------------------------------


# Names of the row vectors of a bit mask: a table, because every call looks them up.
_ROW_NAMES = tuple(
    tuple(name for bit, name in enumerate(lib.ROW_NAMES) if rows >> bit & 1) for rows in range(1 << len(lib.ROW_NAMES))
)


def row_names(rows: int) -> tuple[str, ...]:
    return _ROW_NAMES[rows]


def _new_rows(q_t: torch.Tensor, rows: int, problem: Problem) -> list[torch.Tensor]:
    of_teacher = ("lse_t", "dot_t")
    heads = [problem.heads_t if name in of_teacher else problem.heads_s for name in row_names(rows)]
    return [q_t.new_empty(problem.row_shape(count), dtype=torch.float32) for count in heads]


def _rows_struct(made, rows: int) -> bytes:
    if rows == lib.KL:
        return lib.pack_rows(row_address(made[0]))
    return lib.pack_rows(**dict(zip(row_names(rows), map(row_address, made))))


def _new_gradients(tensors, gradients: int, f32: bool = False) -> list[torch.Tensor]:
    dtype = torch.float32 if f32 else None
    return [_new_gradient(tensor, dtype) for bit, tensor in enumerate(tensors[:-1]) if gradients >> bit & 1]


def _new_gradient(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """With the strides of its tensor, so that it flows back through views without a copy. Sinks are contiguous."""
    gradient = torch.empty_like(tensor, dtype=dtype)
    return gradient if gradient.stride(-1) == 1 else gradient.new_empty(gradient.shape)


def per_tensor(made, gradients: int, absent):
    """The gradients of the tensors; `absent` for those that are not in the bit mask `gradients`."""
    remaining = iter(made)
    return [next(remaining) if gradients >> bit & 1 else absent for bit in range(TENSOR_COUNT - 1)]


def _gradients_struct(made, problem: Problem) -> bytes:
    addresses = [address(gradient, problem) if gradient.dim() > 1 else (gradient.data_ptr(), 0, 0, 0) for gradient in made]
    return lib.pack_gradients(*per_tensor(addresses, problem.gradients, lib.ABSENT))


# ---- The operators -------------------------------------------------------------------------------------------------


def _parted(lengths_and_options):
    return lengths_and_options[:_LENGTH_COUNT], lengths_and_options[_LENGTH_COUNT:]


def _forward(q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, rows, *lengths_and_options, execute=execute):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), _parted(lengths_and_options)
    plan = _plan_for(*specs_of(tensors, lse_t, None, None, lengths, options))
    made = _new_rows(q_t, rows, plan.problem)
    call(plan, lib.FORWARD, tensors, lengths, (_rows_struct(made, rows),), lse_t, execute=execute)
    return made


def _forward_fake(q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, rows, *lengths_and_options):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), _parted(lengths_and_options)
    problem = describe_while_tracing(*specs_of(tensors, lse_t, None, None, lengths, options))
    return _new_rows(q_t, rows, problem)


def _backward(
    q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, lse_s, kl, dot_t, grad_kl, *lengths_and_options, execute=execute
):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), _parted(lengths_and_options)
    plan = _plan_for(*specs_of(tensors, lse_t, lse_s, grad_kl, lengths, options))
    made = _new_gradients(tensors, plan.problem.gradients, plan.problem.grad_f32)
    outputs = (_gradients_struct(made, plan.problem),)
    call(plan, lib.BACKWARD, tensors, lengths, outputs, lse_t, lse_s, kl, dot_t, grad_kl, execute=execute)
    return made


def _backward_fake(
    q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, lse_s, kl, dot_t, grad_kl, *lengths_and_options
):
    asked = Options(*_parted(lengths_and_options)[1])
    return _new_gradients((q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, None), asked.gradients, asked.grad_f32)


def _forward_backward(
    q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, lse_s, row_weight, rows, *lengths_and_options, execute=execute
):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), _parted(lengths_and_options)
    plan = _plan_for(*specs_of(tensors, lse_t, lse_s, row_weight, lengths, options), one_pass=True)
    problem = plan.problem
    made, gradients = _new_rows(q_t, rows, problem), _new_gradients(tensors, problem.gradients, problem.grad_f32)
    outputs = (_rows_struct(made, rows), _gradients_struct(gradients, problem))
    call(plan, lib.FORWARD_BACKWARD, tensors, lengths, outputs, lse_t, lse_s, grad_kl=row_weight, execute=execute)
    return [*made, *gradients]


def _forward_backward_fake(
    q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, lse_s, row_weight, rows, *lengths_and_options
):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), _parted(lengths_and_options)
    problem = describe_while_tracing(*specs_of(tensors, lse_t, lse_s, row_weight, lengths, options), one_pass=True)
    return [*_new_rows(q_t, rows, problem), *_new_gradients(tensors, problem.gradients, problem.grad_f32)]


def _attention_backward(
    q_t, k_t, q_s, k_s, v_s, o_s, do_s, lse_t, lse_s, row_weight, rows, *lengths_and_options, execute=execute
):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, None, None, None, None), _parted(lengths_and_options)
    plan = _plan_for(*specs_of(tensors, lse_t, lse_s, row_weight, lengths, options))
    problem, copies = plan.problem, []
    check_attention((q_s, k_s), (v_s, o_s, do_s))
    made, gradients = _new_rows(q_t, rows, problem), _attention_gradients(q_s, k_s, v_s, problem)
    addresses = [address(gradient, problem) for gradient in gradients]
    of_values = (input_address(tensor, problem, copies) for tensor in (v_s, o_s, do_s))
    outputs = (
        lib.pack_attention(*of_values, addresses[2]), _rows_struct(made, rows),
        lib.pack_gradients(dq_s=addresses[0], dk_s=addresses[1]),
    )  # fmt: skip
    call(plan, lib.ATTENTION_BACKWARD, tensors, lengths, outputs, lse_t, lse_s, grad_kl=row_weight, execute=execute)
    return [*made, *gradients]


def _attention_backward_fake(
    q_t, k_t, q_s, k_s, v_s, o_s, do_s, lse_t, lse_s, row_weight, rows, *lengths_and_options
):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, None, None, None, None), _parted(lengths_and_options)
    problem = describe_while_tracing(*specs_of(tensors, lse_t, lse_s, row_weight, lengths, options))
    check_attention((q_s, k_s), (v_s, o_s, do_s))
    return [*_new_rows(q_t, rows, problem), *_attention_gradients(q_s, k_s, v_s, problem)]


def carries_kl(q_t, k_t, q_s, k_s, lse_t, lse_s, row_weight, lengths, options) -> bool:
    """Whether attention_backward is fast: a CPU, or a GPU with a kernel for the KL and the attention backward together."""
    if q_t.device.type == "cpu":
        return True
    plan = _plan_for(*specs_of((q_t, k_t, q_s, k_s, None, None, None, None), lse_t, lse_s, row_weight, lengths, options))
    return _has_carrying_kernel(plan)


@lru_cache(maxsize=4096)
def _has_carrying_kernel(plan: lib.Plan) -> bool:
    return "cuda_general, attention backward" not in plan.explain(lib.ATTENTION_BACKWARD)


def _attention_gradients(q_s, k_s, v_s, problem: Problem) -> list[torch.Tensor]:
    return [_new_gradient(tensor, torch.float32 if problem.grad_f32 else None) for tensor in (q_s, k_s, v_s)]


KERNELS = {}  # {torch operator: its implementation}
for _kernel, _fake in (
    (_forward, _forward_fake), (_backward, _backward_fake), (_forward_backward, _forward_backward_fake),
    (_attention_backward, _attention_backward_fake),
):  # fmt: skip
    _name = _kernel.__name__.removeprefix("_")
    torch.library.impl(f"streamkl::{_name}", ("cpu", "cuda"), _kernel)
    torch.library.register_fake(f"streamkl::{_name}", _fake)
    KERNELS[getattr(torch.ops.streamkl, _name).default] = _kernel

# ---- Autograd: around the operators, because torch.library.register_autograd takes 200 us per call -----------------


def rows_needed_by(op: int, q_t, q_s, w_s, options) -> int:
    """Row vectors that `op` needs for all gradients of the options."""
    heads = -3 if options.heads_first else -2
    student = ATTENTION if w_s is None else INDEXER
    has_teacher_groups = True if q_t.shape[heads] != (q_s if w_s is None else w_s).shape[heads] else False
    return lib.rows_needed(op, options.gradients, options.direction, student, has_teacher_groups)


def weighted(kl: torch.Tensor, row_weight: torch.Tensor | None) -> torch.Tensor:
    """A row of weight 0 counts as 0 even if its KL is NaN, as in padding."""
    return kl if row_weight is None else torch.where(row_weight == 0, 0.0, kl * row_weight)


def _function_name(w_s) -> str:
    return "attention_kl" if w_s is None else "indexer_kl"


class Forward(torch.autograd.Function):
    """streamkl::forward, whose kl streamkl::backward differentiates. Returns the row vectors of `rows`, kl first.

    `fixed` is a tuple of the arguments without a gradient, because autograd takes time for each argument. Its first element
    has the three operators as attributes: torch.ops.streamkl, or those of a process group.
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
    """streamkl::forward_backward. Returns the sum of the weighted KLs and the row vectors of `rows`.

    The backward multiplies the gradients by the upstream gradient, which includes the division of a mean, and only then
    rounds those of f16 tensors: see describe().
    """

    @staticmethod
    def forward(ctx, q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, fixed):
        operators, indices, lse_t, lse_s, row_weight, rows, lengths, options = fixed
        needed = rows_needed_by(lib.FORWARD_BACKWARD, q_t, q_s, w_s, options) & lib.DOT_T
        made = operators.forward_backward(
            q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, lse_s, row_weight, rows | needed | lib.KL,
            *lengths, *options,
        )
        names = row_names(rows | needed | lib.KL)
        ctx.save_for_backward(*made[len(names) :])
        ctx.gradients, ctx.function = options.gradients, _function_name(w_s)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s)]
        loss = weighted(made[0], row_weight).sum()  # kl is the first row vector
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
        made = per_tensor([gradient * grad_loss for gradient in ctx.saved_tensors], ctx.gradients, None)
        return *[None if each is None else each.to(dtype) for each, dtype in zip(made, ctx.dtypes)], None


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
