"""What attention_kl and indexer_kl do with process groups: check the call, choose its operators, reduce its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import _library as lib
from .._call import specs_of
from .._checks import TENSORS, describe
from .._mean import nonzero
from .._ops import Operators, rows_needed_by
from .._options import Parallel
from .._problem import DK_T, DQ_T, DSINK_S, DSINK_T, KL_REVERSE
from ._gather import AllGather
from ._groups import SumOverRanks, agree, group_of
from ._layout import Layout, check_lengths
from ._ring import Ring
from ._teacher import TeacherShards

_COMMS = {"allgather": AllGather, "ring": Ring}


class Groups:
    """The process groups of a call."""

    def __init__(self, parallel: Parallel) -> None:
        if not isinstance(parallel, Parallel):
            raise ValueError(f"parallel={parallel!r}: must be a streamkl.Parallel")
        cp, tp, loss = parallel.context_group, parallel.tensor_group, parallel.loss_group
        self.cp: Any = None if cp is None else group_of("parallel.context_group", cp)
        self.tp: Any = None if tp is None else group_of("parallel.tensor_group", tp)
        world = 1 if self.cp is None else dist.get_world_size(self.cp)
        self.layout, self.comm, self.grads = (
            Layout(parallel.layout or "zigzag", world),
            parallel.comm,
            parallel.gradients,
        )
        given = loss if isinstance(loss, (list, tuple)) else [] if loss is None else [loss]
        self.loss: list[Any] = [group_of("parallel.loss_group", group) for group in given]
        if self.is_split:
            self.loss.append(self.cp)

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
        is_spread = self.tp is not None and dist.get_world_size(self.tp) > 1
        fault = _fault_of(self._check, tensors, rows, lengths, options)
        # Ranks of the tensor group have teacher heads of their own; sinks of the others are copies of one parameter.
        for group, equal in [(self.cp, ("sink_t", "sink_s"))] * self.is_split + [(self.tp, ("sink_s",))] * is_spread:
            sinks = {name: tensor for name, tensor in zip(TENSORS, tensors) if name in equal and tensor is not None}
            fault = _fault_of(agree, group, tensors[0].device, facts, sinks, fault) or fault
        if fault is not None:
            raise fault
        operators = _COMMS[self.comm](self.cp, self.layout) if self.is_split else Operators
        return TeacherShards(self.tp, operators) if is_spread else operators

    def _check(self, tensors: tuple, rows: tuple, lengths, options) -> None:
        given = dict(zip(TENSORS, tensors)) | dict(zip(("lse_t", "lse_s", "grad_kl"), rows)) | lengths._asdict()
        describe(specs_of(**given), options)
        if self.is_split:
            length = -2 if options.heads_first else -3
            check_lengths(self.layout, "queries", tensors[0].shape[length], lengths.cu_seqlens_q)
            check_lengths(self.layout, "keys", tensors[1].shape[length], lengths.cu_seqlens_k)
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
        for group in self.loss:
            factor = self.layout.world if group is self.cp and self.grads == "mean" else 1
            loss, count = SumOverRanks.apply(loss, count, group, factor)
        return loss if total is None else loss / nonzero(count)


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
