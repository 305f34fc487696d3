"""Partial states as torch operators: keys split over calls or ranks.

    streamkl::partial         row states over a range of keys: f32 [batch, heads_s, len_q, 5], packed [heads_s, total_q, 5]
    streamkl::states_merge    row states over the keys of both
    streamkl::states_finish   row vectors of merged states: kl, lse_t, lse_s

Tensors, lengths and options are those of the operators in _ops.py. `states_finish` reads only their shapes, and the sinks,
which states do not contain. With teacher groups and for indexers, lse_t must be given and cover all keys.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from . import _library as lib
from ._call import describe_while_tracing, execute, new_rows, prepare, specs_of, stream_of
from ._ops import _LENGTHS, _TAGS, _TENSORS, KERNELS, _parted, _run
from ._problem import CPU, CUDA, OPTIONS_SCHEMA, Problem

_PARTIAL = f"({_TENSORS}, Tensor? lse_t, SymInt first_key, SymInt end_key, {_LENGTHS}, {OPTIONS_SCHEMA}) -> Tensor"
_FINISH = f"({_TENSORS}, Tensor states, Tensor? lse_t, int rows, {_LENGTHS}, {OPTIONS_SCHEMA}) -> Tensor[]"
torch.library.define("streamkl::partial", _PARTIAL, tags=_TAGS)
torch.library.define("streamkl::states_merge", "(Tensor states, Tensor others) -> Tensor", tags=_TAGS)
torch.library.define("streamkl::states_finish", _FINISH, tags=_TAGS)

_STATE = 5  # floats of a skl_row_state


def _new_states(q_t: torch.Tensor, problem: Problem) -> torch.Tensor:
    return q_t.new_empty((*problem.row_shape(problem.heads_s), _STATE), dtype=torch.float32)


def _partial(*arguments, execute=execute):
    tensors, (lse_t, first_key, end_key), lengths, options = _parted(arguments, 3)
    call, given = prepare(lib.PARTIAL, 0, (*tensors, lse_t, None, None, None, None, *lengths), options)
    states = _new_states(tensors[0], call.plan.problem)
    call.run(given, (first_key, end_key, states.data_ptr()), execute)
    return states


def _partial_fake(*arguments):
    tensors, (lse_t, _, _), lengths, options = _parted(arguments, 3)
    return _new_states(tensors[0], describe_while_tracing(*specs_of(tensors, lse_t, None, None, lengths, options)))


def _states_finish(*arguments):
    tensors, (states, lse_t, rows), lengths, options = _parted(arguments, 3)

    def finish(plan, op, inputs, outputs, device):
        finish_states = lib.library().skl_states_finish
        lib.check(finish_states(plan.handle, inputs, states.data_ptr(), *outputs, stream_of(device)))

    return _run(lib.FORWARD, rows, (*tensors, lse_t, None, None, None, None, *lengths), options, finish)


def _states_finish_fake(*arguments):
    tensors, (_, lse_t, rows), lengths, options = _parted(arguments, 3)
    return new_rows(tensors[0], rows, describe_while_tracing(*specs_of(tensors, lse_t, None, None, lengths, options)))


def _states_merge(states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    if states.shape != others.shape:
        raise ValueError(f"states {list(states.shape)} and {list(others.shape)}: must have equal shapes")
    merged, others = states.clone(memory_format=torch.contiguous_format), others.contiguous()
    plan = _plan_of_states(merged.numel() // _STATE, merged.device)
    lib.check(lib.library().skl_states_merge(plan.handle, merged.data_ptr(), others.data_ptr(), stream_of(merged.device)))
    return merged


@lru_cache(maxsize=256)
def _plan_of_states(count: int, device: torch.device) -> lib.Plan:
    """A merge depends only on the number of rows."""
    kind, index = CUDA if device.type == "cuda" else CPU, device.index or 0
    return lib.Plan(Problem(batch=1, len_q=count, heads_t=1, heads_s=1, dim_t=1, dim_s=1, device=kind, device_index=index))


for _name, _kernel, _fake in (
    ("partial", _partial, _partial_fake),
    ("states_merge", _states_merge, lambda states, others: torch.empty_like(states)),
    ("states_finish", _states_finish, _states_finish_fake),
):
    torch.library.impl(f"streamkl::{_name}", ("cpu", "cuda"), _kernel)
    torch.library.register_fake(f"streamkl::{_name}", _fake)
KERNELS[torch.ops.streamkl.partial.default] = _partial

partial, states_merge, states_finish = (
    getattr(torch.ops.streamkl, name) for name in ("partial", "states_merge", "states_finish")
)
