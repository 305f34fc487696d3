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
from ._call import call, describe_while_tracing
from ._ops import _LENGTHS, _TAGS, _TENSORS, KERNELS, _new_rows, _parted, _plan_for, _rows_struct, specs_of
from ._ops import execute as run
from ._problem import CPU, CUDA, OPTIONS_SCHEMA, Problem

_PARTIAL = f"({_TENSORS}, Tensor? lse_t, SymInt first_key, SymInt end_key, {_LENGTHS}, {OPTIONS_SCHEMA}) -> Tensor"
_FINISH = f"({_TENSORS}, Tensor states, Tensor? lse_t, int rows, {_LENGTHS}, {OPTIONS_SCHEMA}) -> Tensor[]"
torch.library.define("streamkl::partial", _PARTIAL, tags=_TAGS)
torch.library.define("streamkl::states_merge", "(Tensor states, Tensor others) -> Tensor", tags=_TAGS)
torch.library.define("streamkl::states_finish", _FINISH, tags=_TAGS)

_STATE = 5  # floats of a skl_row_state


def _new_states(q_t: torch.Tensor, problem: Problem) -> torch.Tensor:
    return q_t.new_empty((*problem.row_shape(problem.heads_s), _STATE), dtype=torch.float32)


def _partial(q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, first_key, end_key, *lengths_and_options, execute=run):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), _parted(lengths_and_options)
    plan = _plan_for(*specs_of(tensors, lse_t, None, None, lengths, options))
    states = _new_states(q_t, plan.problem)
    call(plan, lib.PARTIAL, tensors, lengths, (first_key, end_key, states.data_ptr()), lse_t, execute=execute)
    return states


def _partial_fake(q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, lse_t, first_key, end_key, *lengths_and_options):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), _parted(lengths_and_options)
    return _new_states(q_t, describe_while_tracing(*specs_of(tensors, lse_t, None, None, lengths, options)))


def _states_finish(q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, states, lse_t, rows, *lengths_and_options):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), _parted(lengths_and_options)
    plan = _plan_for(*specs_of(tensors, lse_t, None, None, lengths, options))
    made = _new_rows(q_t, rows, plan.problem)

    def finish(plan, op, inputs, outputs, device):
        lib.check(lib.library().skl_states_finish(plan.handle, inputs, *outputs, _stream(device)))

    outputs = (states.data_ptr(), _rows_struct(made, rows))
    call(plan, None, tensors, lengths, outputs, lse_t, execute=finish)
    return made


def _states_finish_fake(q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices, states, lse_t, rows, *lengths_and_options):
    tensors, (lengths, options) = (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), _parted(lengths_and_options)
    return _new_rows(q_t, rows, describe_while_tracing(*specs_of(tensors, lse_t, None, None, lengths, options)))


def _states_merge(states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    if states.shape != others.shape:
        raise ValueError(f"states {list(states.shape)} and {list(others.shape)}: must have equal shapes")
    merged, others = states.clone(memory_format=torch.contiguous_format), others.contiguous()
    plan = _plan_of_states(merged.numel() // _STATE, merged.device)
    lib.check(lib.library().skl_states_merge(plan.handle, merged.data_ptr(), others.data_ptr(), _stream(merged.device)))
    return merged


@lru_cache(maxsize=256)
def _plan_of_states(count: int, device: torch.device) -> lib.Plan:
    """A merge depends only on the number of rows."""
    kind, index = CUDA if device.type == "cuda" else CPU, device.index or 0
    return lib.Plan(Problem(batch=1, len_q=count, heads_t=1, heads_s=1, dim_t=1, dim_s=1, device=kind, device_index=index))


def _stream(device: torch.device):
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


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
