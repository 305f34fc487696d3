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
from ._call import describe_while_tracing, execute, prepare, stream_of
from ._checks import INPUTS, STATE
from ._ops import TAGS, TENSOR_COUNT, Operator
from ._problem import CPU, CUDA, Problem


class _Partial(Operator):
    def run(self, *arguments, execute=execute):
        _, given, options = self.given(arguments)
        first_key, end_key = arguments[TENSOR_COUNT + 1 : TENSOR_COUNT + 3]
        call, given = prepare(self.op, 0, given, options)
        states = _new_states(given[0], call.plan.problem)
        call.run(given, (first_key, end_key, states.data_ptr()), execute)
        return states

    def fake(self, *arguments):
        _, given, options = self.given(arguments)
        return _new_states(given[0], describe_while_tracing(given, options, False))


def _new_states(q_t: torch.Tensor, problem: Problem) -> torch.Tensor:
    return q_t.new_empty((*problem.row_shape(problem.heads_s), STATE), dtype=torch.float32)


class _Finish(Operator):
    def run(self, *arguments, execute=execute):
        rows, given, options = self.given(arguments)
        call, given = prepare(self.op, rows, given, options)
        states = given[INPUTS.index("states")]

        def finish(plan, op, inputs, outputs, device):
            finish_states = lib.library().skl_states_finish
            lib.check(finish_states(plan.handle, inputs, states.data_ptr(), *outputs, stream_of(device)))

        return call(given, finish)


_PARTIAL = "Tensor? lse_t, SymInt first_key, SymInt end_key"
partial = _Partial("partial", lib.PARTIAL, _PARTIAL, result="Tensor").overload
states_finish = _Finish("states_finish", lib.FORWARD, "Tensor states, Tensor? lse_t, int rows").overload


def _states_merge(states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    _check_states(states, others)
    merged, others = states.clone(memory_format=torch.contiguous_format), others.contiguous()
    plan = _plan_of_states(merged.numel() // STATE, merged.device)
    lib.check(
        lib.library().skl_states_merge(plan.handle, merged.data_ptr(), others.data_ptr(), stream_of(merged.device))
    )
    return merged


def _check_states(states: torch.Tensor, others: torch.Tensor) -> None:
    for name, given in ("states", states), ("others", others):
        if given is None:
            raise ValueError(f"{name}: None must be a tensor")
        if given.dtype != torch.float32 or given.dim() == 0 or given.shape[-1] != STATE:
            raise ValueError(f"{name}: {given.dtype} {list(given.shape)} must be torch.float32 [..., {STATE}]")
    if states.shape != others.shape or states.device != others.device:
        raise ValueError(
            f"others: {list(others.shape)} on {others.device} must be {list(states.shape)} on {states.device}, as states is"
        )


def _states_merge_fake(states: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    _check_states(states, others)
    return torch.empty_like(states, memory_format=torch.contiguous_format)


@lru_cache(maxsize=256)
def _plan_of_states(count: int, device: torch.device) -> lib.Plan:
    """A merge depends only on the number of rows."""
    kind, index = CUDA if device.type == "cuda" else CPU, device.index or 0
    return lib.Plan(
        Problem(batch=1, len_q=count, heads_t=1, heads_s=1, dim_t=1, dim_s=1, device=kind, device_index=index)
    )


torch.library.define("streamkl::states_merge", "(Tensor states, Tensor others) -> Tensor", tags=TAGS)
torch.library.impl("streamkl::states_merge", ("cpu", "cuda"), _states_merge)
torch.library.register_fake("streamkl::states_merge", _states_merge_fake)
states_merge = torch.ops.streamkl.states_merge.default
