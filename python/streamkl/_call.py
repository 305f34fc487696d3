"""One call of the library on torch tensors.

The first call on tensors of some shapes, strides, types and devices prepares a `Call`. Later ones find it in a cache:
they only allocate the results and fill in addresses.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from . import _library as lib
from ._checks import INPUTS, LENGTHS, ROWS, TENSORS, describe
from ._problem import Problem

_SEPARATE = ("v_s", "o_s", "do_s", "states")  # inputs that are no members of skl_inputs
_CONTIGUOUS = ("sink_t", "sink_s", *LENGTHS, "states")  # contiguous tensors: the library takes their addresses alone
TRAINED = (*TENSORS[:-1], "v_s")  # in the order of the bits of skl_problem.gradients


# ---- Problems and plans --------------------------------------------------------------------------------------------


def specs_of(**tensors: torch.Tensor | None) -> tuple:
    """The argument of describe(), from tensors by name."""
    return tuple([_spec(tensors.get(name)) for name in INPUTS])


def _spec(tensor):
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def describe_while_tracing(given: tuple, options: tuple, one_pass: bool) -> Problem:
    """A compiler's sizes may be symbols. Messages of errors contain numbers even then."""
    specs = tuple(map(_spec, given))
    try:
        return describe(specs, options, one_pass)
    except ValueError:
        numbers = [each and (tuple(int(size) for size in each[0]), *each[1:]) for each in specs]
        describe(tuple(numbers), options, one_pass)
        raise


@lru_cache(maxsize=4096)  # packed batches have new lengths at every step; a plan takes a few kilobytes
def plan_for(specs: tuple, options: tuple, one_pass: bool = False) -> lib.Plan:
    return lib.Plan(describe(specs, options, one_pass))


# ---- Results -------------------------------------------------------------------------------------------------------


# Names of the row vectors of a bit mask: a table, because every call looks them up.
_ROW_NAMES = tuple(
    tuple(name for bit, name in enumerate(lib.ROW_NAMES) if rows >> bit & 1)
    for rows in range(1 << len(lib.ROW_NAMES))
)


def row_names(rows: int) -> tuple[str, ...]:
    return _ROW_NAMES[rows]


def new_rows(q_t: torch.Tensor, rows: int, problem: Problem) -> list[torch.Tensor]:
    if not 0 <= rows < len(_ROW_NAMES):
        raise ValueError(f"rows={rows}: must be bits of {', '.join(lib.ROW_NAMES)}, at most {len(_ROW_NAMES) - 1}")
    of_teacher = ("lse_t", "dot_t")
    heads = [problem.heads_t if name in of_teacher else problem.heads_s for name in row_names(rows)]
    return [q_t.new_empty(problem.row_shape(count), dtype=torch.float32) for count in heads]


def new_gradients(tensors: dict[str, Any], problem: Problem) -> list[torch.Tensor]:
    """Gradients have the strides of their tensors, so that they flow back through views without a copy."""
    names = [name for bit, name in enumerate(TRAINED) if problem.gradients >> bit & 1]
    if absent := [name for name in names if tensors.get(name) is None]:
        raise ValueError(f"gradients={problem.gradients}: contains that of {absent[0]}, which is not given")
    wanted = [tensors[name] for name in names]
    made = [torch.empty_like(tensor, dtype=torch.float32 if problem.grad_f32 else None) for tensor in wanted]
    return [gradient if gradient.stride(-1) == 1 else gradient.new_empty(gradient.shape) for gradient in made]


def new_output(q_s: torch.Tensor) -> torch.Tensor:
    """The output of an attention, in the layout of its queries."""
    made = torch.empty_like(q_s)
    return made if made.stride(-1) == 1 else made.new_empty(made.shape)


# ---- The call ------------------------------------------------------------------------------------------------------


class Call:
    """An operation on inputs (shape, dtype, device, strides): its plan, its results, and its structs without addresses."""

    def __init__(self, op: int, rows: int, options: tuple, *inputs: tuple | None) -> None:
        one_pass = op == lib.FORWARD_BACKWARD
        self.op, self.plan = op, plan_for(tuple([each and each[:3] for each in inputs]), options, one_pass)
        given = {name: each for name, each in zip(INPUTS, inputs) if each is not None}
        self.device, problem, empty = given["q_t"][2], self.plan.problem, torch.empty_strided
        tensors = {name: empty(each[0], each[3], dtype=each[1], device="meta") for name, each in given.items()}
        copied = {name for name, each in tensors.items() if given[name][4] or _needs_copy(name, each)}
        self.copied = [place for place, name in enumerate(INPUTS) if name in copied]
        strides = {
            name: _strides(name, each.contiguous() if name in copied else each, problem)
            for name, each in tensors.items()
        }
        separate = {name: strides.pop(name) for name in _SEPARATE if name in strides}
        self.inputs = lib.Template(lib.pack_inputs, strides)

        made = new_rows(tensors["q_t"], rows, problem)
        self.rows = lib.Template(
            lib.pack_rows, {n: _strides(n, each, problem) for n, each in zip(row_names(rows), made)}
        )
        self.row_count = len(made)
        if op in (lib.BACKWARD, lib.FORWARD_BACKWARD, lib.ATTENTION_BACKWARD):
            made += new_gradients(tensors, problem)
            names = ["d" + name for bit, name in enumerate(TRAINED) if problem.gradients >> bit & 1]
            strides = {n: _strides(n, each, problem) for n, each in zip(names, made[self.row_count :])}
            if op == lib.ATTENTION_BACKWARD:
                of_v = {"dv_s": strides.pop("dv_s")} if "dv_s" in strides else {}
                self.values = lib.Template(lib.pack_attention, separate | of_v)
            self.gradients = lib.Template(lib.pack_gradients, strides)
        if op == lib.ATTENTION_FORWARD:
            made.append(new_output(tensors["q_s"]))
            self.values = lib.Template(lib.pack_tensor, {"tensor": separate["v_s"]})
            self.output = lib.Template(lib.pack_tensor, {"tensor": _strides("o_s", made[-1], problem)})
        self.results = [(each.shape, each.stride(), each.dtype) for each in made]

    def __call__(self, given: tuple, execute) -> list[torch.Tensor]:
        """Row vectors, then gradients or the output of an attention."""
        device, empty = self.device, torch.empty_strided  # takes half the time of torch.empty
        made = [empty(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self.results]
        outputs: tuple = () if self.op == lib.BACKWARD else (self.rows.fill(made[: self.row_count]),)
        if self.op == lib.ATTENTION_FORWARD:
            outputs = self.values.fill(given[_FIRST_VALUE : _FIRST_VALUE + 1]), *outputs, self.output.fill(made[-1:])
        elif self.op != lib.FORWARD:
            outputs = *outputs, self.gradients.fill(made[self.row_count :])
        if self.op == lib.ATTENTION_BACKWARD:
            outputs = self.values.fill((*given[_FIRST_VALUE:], made[-1])), *outputs
        self.run(given, outputs, execute)
        return made

    def run(self, given: tuple, outputs: tuple, execute) -> None:
        """`outputs` are the arguments of the C function between inputs and workspace."""
        execute(self.plan, self.op, self.inputs.fill(given), outputs, self.device)


def _needs_copy(name: str, tensor: torch.Tensor) -> bool:
    """The library accepts any strides except in the last dimension of a tensor with heads. Arrays must be contiguous."""
    if name in ROWS:
        return False
    return not tensor.is_contiguous() if name in _CONTIGUOUS else tensor.stride(-1) != 1 and tensor.shape[-1] != 1


def _strides(name: str, tensor: torch.Tensor, problem: Problem) -> tuple[int, ...]:
    """(stride_batch, stride_head, stride_row) of a member of a struct; none for an array, of which only the address counts."""
    if name in _CONTIGUOUS:
        return ()
    if tensor.dim() == 1:  # the gradient of a sink
        return 0, 0, 0
    batch, first, second = (0, *tensor.stride()[:2]) if problem.packed else tensor.stride()[:3]
    heads_first = problem.heads_first or name in (*ROWS, *lib.ROW_NAMES)
    return (batch, first, second) if heads_first else (batch, second, first)


prepared = lru_cache(maxsize=1024)(Call)
_FIRST_VALUE = INPUTS.index("v_s")


def prepare(op: int, rows: int, given: tuple, options: tuple) -> tuple[Call, tuple]:
    """The call of an operation on the tensors `given`, in the order of INPUTS, and these tensors as it reads them."""
    inputs = [
        None if each is None else (each.shape, each.dtype, each.device, each.stride(), each.is_neg())
        for each in given
    ]
    call = prepared(op, rows, options, *inputs)
    if call.copied:
        given = tuple(
            each.resolve_neg().contiguous() if place in call.copied else each for place, each in enumerate(given)
        )
    return call, given


# torch.cuda.current_stream also makes a Stream object.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda n: torch.cuda.current_stream(n).cuda_stream
)


def stream_of(device: torch.device) -> int | None:
    return _raw_stream(device.index) if device.type == "cuda" else None


def execute(plan: lib.Plan, op: int, inputs: bytes, outputs: tuple, device: torch.device) -> None:
    """Runs an operation; `outputs` are its arguments between inputs and workspace."""
    # Blocks of torch's allocator are aligned to 64 bytes, ordered by stream and safe in CUDA graphs.
    size = plan.workspace_sizes[op]
    workspace = torch.empty_strided((size,), (1,), dtype=torch.uint8, device=device)
    arguments = (plan.handle, inputs, *outputs, workspace.data_ptr(), size, stream_of(device))
    if device.type == "cpu" and plan.is_long:
        lib.check_interruptible(lambda: lib.run_function(op)(*arguments))
    else:
        lib.check(lib.run_function(op)(*arguments))
