"""What attention_kl and indexer_kl do with process groups: check the call, choose its operators, reduce its loss."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import combinations
from typing import Any, Callable

import torch
import torch.distributed as dist

from .. import _library as lib
from .._call import specs_of
from .._checks import TENSORS, describe
from .._mean import nonzero
from .._ops import Operators, rows_needed_by
from .._options import Lengths, Parallel
from .._problem import DK_T, DQ_T, DSINK_S, DSINK_T, KL_REVERSE
from ._gather import AllGather
from ._groups import SumOverRanks, agree, group_of
from ._layout import check_lengths, layout_of
from ._ring import Ring
from ._shards import Shards
from ._teacher import TeacherShards

_COMMS = {"allgather": AllGather, "ring": Ring}
_FAULT = 2.0**20  # the status of a rank that has no loss; of the others 1 for a mean, 0 for a sum
_SHARED = ("sink_t", "sink_s", *Lengths._fields[:3])  # equal on all ranks that share sequences or heads


@torch.compiler.disable
def call_with_groups(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a function with `Groups` in place of `parallel`. A compiler breaks its graph here: what runs depends on all ranks."""
    groups = Groups(kwargs["parallel"])
    try:
        return function(*args, **kwargs | {"parallel": groups})
    except Exception as fault:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        groups.tell(fault, tensors[0].device if tensors else torch.device("cpu"), kwargs.get("reduction") != "none")
        raise


class Groups:
    """The process groups of a call."""

    def __init__(self, parallel: Parallel) -> None:
        if not isinstance(parallel, Parallel):
            raise ValueError(f"parallel={parallel!r}: must be a streamkl.Parallel")
        cp, tp, loss = parallel.context_group, parallel.tensor_group, parallel.loss_group
        self.cp: Any = None if cp is None else group_of("parallel.context_group", cp)
        self.tp: Any = None if tp is None else group_of("parallel.tensor_group", tp)
        world = 1 if self.cp is None else dist.get_world_size(self.cp)
        self.layout, self.comm, self.grads = layout_of(parallel.layout, world), parallel.comm, parallel.gradients
        given = loss if isinstance(loss, (list, tuple)) else [] if loss is None else [loss]
        self.loss: list[Any] = [group_of("parallel.loss_group", group) for group in given]
        if self.is_split:
            self.loss.append(self.cp)
        self._check_overlap()
        self._has_agreed = self._exchanges = self._has_reduced = False

    def _check_overlap(self) -> None:
        groups = self.loss if self.tp is None else [self.tp, *self.loss]
        if len(groups) < 2:
            return
        for some, others in combinations([set(dist.get_process_group_ranks(group)) for group in groups], 2):
            if len(some & others) > 1:
                raise ValueError(
                    f"parallel: two groups share the ranks {sorted(some & others)}, whose rows would count twice: groups may share "
                    "this rank alone, as the dimensions of a mesh do"
                )

    @property
    def is_split(self) -> bool:
        """Whether ranks hold shards of sequences."""
        return self.cp is not None and self.layout.world > 1

    @property
    def reduces(self) -> bool:
        """Whether the loss is a sum over ranks."""
        return bool(self.loss)

    def operators(self, tensors: tuple, rows: tuple, lengths, options, **asked: Any) -> Any:
        """The operators of _ops.py on the tensors of this rank, after all ranks have agreed on the call.

        `rows` are lse_t, lse_s and row_weight; `asked` are further options that decide what is exchanged. A rank that finds
        a fault takes part in the agreements of all its groups before it raises an error: the others would wait for it.
        """
        names = (*TENSORS, "lse_t", "lse_s", "row_weight", *lengths._fields)
        given = dict(zip(names, map(_fact, (*tensors, *rows, *lengths))))
        facts = {
            **given,
            **options._asdict(),
            **asked,
            "parallel.layout": self.layout.name,
            "parallel.comm": self.comm,
        }
        fault = _fault_of(self._check, tensors, rows, lengths, options)
        fault = self._agree(tensors[0].device, facts, dict(zip(TENSORS, tensors)) | lengths._asdict(), fault)
        if fault is not None:
            raise fault
        self._exchanges = self.is_split or self._is_spread
        operators = _COMMS[self.comm](self.cp, self.layout) if self.is_split else Operators
        return TeacherShards(self.tp, operators) if self._is_spread else operators

    @property
    def _is_spread(self) -> bool:
        """Whether ranks hold other teacher heads."""
        return self.tp is not None and dist.get_world_size(self.tp) > 1

    def _agree(self, device, facts: dict, values: dict, fault: Exception | None) -> Exception | None:
        """The fault of this rank or of another one."""
        self._has_agreed = True
        shared = {name: values.get(name) for name in _SHARED}
        if self.is_split:
            fault = _fault_of(agree, self.cp, device, facts, shared, fault) or fault
        if self._is_spread:  # ranks have teacher heads of their own; sinks of the others are copies of one parameter
            fault = _fault_of(agree, self.tp, device, facts, shared | {"sink_t": None}, fault) or fault
        return fault

    def tell(self, fault: Exception, device: torch.device, reduces: bool) -> None:
        """Takes part in what the other ranks wait for, if this one has a fault before tensors are exchanged."""
        with suppress(Exception):
            if not self._has_agreed:
                self._agree(device, {}, {}, fault)
            if reduces and not (self._exchanges or self._has_reduced):
                nothing = torch.full((), torch.nan, device=device)
                self._reduce(nothing, nothing, torch.full((), _FAULT, dtype=torch.float64, device=device))

    def _check(self, tensors: tuple, rows: tuple, lengths, options) -> None:
        given = dict(zip(TENSORS, tensors)) | dict(zip(("lse_t", "lse_s", "grad_kl"), rows)) | lengths._asdict()
        describe(specs_of(**given), options)
        if self.is_split:
            length = -2 if options.heads_first else -3
            check_lengths(self.layout, "queries", tensors[0].shape[length], lengths.cu_seqlens_q)
            check_lengths(self.layout, "keys", tensors[1].shape[length], lengths.cu_seqlens_k)
            if not tensors[0].is_cuda:
                Shards(self.layout, dist.get_rank(self.cp), tensors, (*lengths, *options)).check_values()
        if self.tp is not None and options.direction == KL_REVERSE:
            raise ValueError(
                "parallel.tensor_group: direction must be 'forward', which is linear in the teacher's probabilities"
            )
        if self.tp is not None and options.gradients & (DQ_T | DK_T | DSINK_T):
            raise ValueError("parallel.tensor_group: the teacher must not require gradients: detach q_t and k_t")
        q_t, _, q_s, _, w_s, *_ = tensors
        if self.is_split and self.comm == "ring" and rows_needed_by(lib.BACKWARD, q_t, q_s, w_s, options) & lib.DOT_T:
            raise ValueError("parallel.comm='ring': gradients of a teacher with teacher groups need comm='allgather'")
        if self.is_split and self.comm == "ring" and options.gradients & (DSINK_T | DSINK_S):
            raise ValueError("parallel.comm='ring': gradients of sinks need comm='allgather'")

    # ---- The loss --------------------------------------------------------------------------------------------------------

    def reduced(self, loss: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        """The loss of all ranks from their sums: a sum, or a mean over rows of total weight `total`."""
        count = torch.zeros_like(loss) if total is None else total
        status = torch.full((), 0.0 if total is None else 1.0, dtype=torch.float64, device=loss.device)
        loss, count, found = self._reduce(self.scaled(loss), self.scaled(count), status)
        ranks = math.prod(map(dist.get_world_size, self.loss))
        if loss.device.type == "cuda":
            torch._assert_async(found == ranks * status)
        elif found >= _FAULT:
            raise RuntimeError("streamkl: a rank of the groups refused its arguments: see its message")
        elif found != ranks * status:
            raise ValueError("reduction: differs between ranks: must be 'mean' or 'sum' on all of them")
        return loss if total is None else loss / nonzero(count)

    def _reduce(self, loss, count, status) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._has_reduced = True
        for group in self.loss:
            loss, count, status = SumOverRanks.apply(loss, count, status, group)
        return loss, count, status

    def scaled(self, value: torch.Tensor) -> torch.Tensor:
        """With the gradient that parallel.gradients asks for."""
        if self.is_split and self.grads == "mean" and value.requires_grad:
            value.register_hook(lambda gradient: gradient * self.layout.world)
        return value


def _fault_of(function, *arguments) -> Exception | None:
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def _fact(tensor: torch.Tensor | None) -> str | None:
    return (
        None if tensor is None else f"{list(tensor.shape)} {tensor.dtype}{', with a gradient' * tensor.requires_grad}"
    )
