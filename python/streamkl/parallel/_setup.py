"""What attention_kl and indexer_kl do with process groups: check the call, choose its operators, reduce its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import _library as lib
from .._call import specs_of
from .._checks import describe
from .._ops import Operators, rows_needed_by
from .._problem import DK_T, DQ_T, DSINK_S, DSINK_T, KL_REVERSE
from ._gather import AllGather
from ._groups import SumOverRanks, agree, group_of
from ._layout import LAYOUTS, Layout, check_lengths
from ._ring import Ring
from ._shards import Shards
from ._teacher import TeacherShards

_COMMS = {"allgather": AllGather, "ring": Ring}


class Groups:
    """The process groups of a call, of which at least one is given."""

    def __init__(
        self, cp_group: Any, cp_layout: str, cp_comm: str, cp_grads: str, tp_group: Any, loss_group: Any
    ) -> None:
        for name, value, accepted in (
            ("cp_layout", cp_layout, LAYOUTS), ("cp_comm", cp_comm, tuple(_COMMS)), ("cp_grads", cp_grads, ("sum", "mean")),
        ):  # fmt: skip
            if value not in accepted:
                raise ValueError(f"{name}={value!r}: must be {' or '.join(map(repr, accepted))}")
        self.cp: Any = None if cp_group is None else group_of("cp_group", cp_group)
        self.tp: Any = None if tp_group is None else group_of("tp_group", tp_group)
        world = 1 if self.cp is None else dist.get_world_size(self.cp)
        self.layout, self.comm, self.grads = Layout(cp_layout, world), cp_comm, cp_grads  # type: ignore[arg-type]
        self.rank = dist.get_rank(self.cp) if self.is_split else 0
        given = loss_group if isinstance(loss_group, (list, tuple)) else [] if loss_group is None else [loss_group]
        self.loss: list[Any] = [group_of("loss_group", group) for group in given]
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
        names = (
            "q_t", "k_t", "q_s", "k_s", "w_s", "sink_t", "sink_s", "indices", "lse_t", "lse_s", "row_weight", *lengths._fields,
        )  # fmt: skip
        given = dict(zip(names, map(_fact, (*tensors, *rows, *lengths))))
        facts = {**given, "options": {**options._asdict(), **asked, "cp_layout": self.layout.name, "cp_comm": self.comm}}
        is_spread = self.tp is not None and dist.get_world_size(self.tp) > 1
        fault = _fault_of(self._check, tensors, rows, lengths, options)
        for group in [self.cp] * self.is_split + [self.tp] * is_spread:
            fault = _fault_of(agree, group, tensors[0].device, facts, fault) or fault
        if fault is not None:
            raise fault
        operators = _COMMS[self.comm](self.cp, self.layout) if self.is_split else Operators
        return TeacherShards(self.tp, operators) if is_spread else operators

    def _check(self, tensors: tuple, rows: tuple, lengths, options) -> None:
        lse_t, lse_s, row_weight = rows
        describe(*specs_of(tensors, lse_t, lse_s, row_weight, lengths, options))
        if self.is_split:
            length = -2 if options.heads_first else -3
            check_lengths(self.layout, "queries", tensors[0].shape[length], lengths.cu_seqlens_q)
            check_lengths(self.layout, "keys", tensors[1].shape[length], lengths.cu_seqlens_k)
        if self.tp is not None and options.direction == KL_REVERSE:
            raise ValueError("tp_group: direction must be 'forward', which is linear in the teacher's probabilities")
        if self.tp is not None and options.gradients & (DQ_T | DK_T | DSINK_T):
            raise ValueError("tp_group: the teacher must not require gradients: detach q_t and k_t")
        q_t, _, q_s, _, w_s, *_ = tensors
        if self.is_split and self.comm == "ring" and rows_needed_by(lib.BACKWARD, q_t, q_s, w_s, options) & lib.DOT_T:
            raise ValueError("cp_comm='ring': gradients of a teacher with teacher groups need cp_comm='allgather'")
        if self.is_split and self.comm == "ring" and options.gradients & (DSINK_T | DSINK_S):
            raise ValueError("cp_comm='ring': gradients of sinks need cp_comm='allgather'")

    # ---- The loss --------------------------------------------------------------------------------------------------------

    def reduced_over_rows(self, loss, reduction, tensors: tuple, row_weight, lengths, options) -> torch.Tensor:
        """The loss of all ranks: the sum, or the mean over rows that attend to a key by their masks."""
        if reduction == "sum":
            return self.reduced(loss, None)
        begin, end = Shards(self.layout, self.rank, tensors, (*lengths, *options)).bounds
        attending = (end > begin).unsqueeze(-2)  # [batch, 1, len_q], packed [1, total_q]
        heads_s = tensors[2].shape[-3 if options.heads_first else -2]
        return self.reduced(loss, attending.sum() * heads_s if row_weight is None else (row_weight * attending).sum())

    def reduced(self, loss: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        """The loss of all ranks from their sums: a sum, or a mean over rows of total weight `total`."""
        count = torch.zeros_like(loss) if total is None else total
        for group in self.loss:
            factor = self.layout.world if group is self.cp and self.grads == "mean" else 1
            loss, count = SumOverRanks.apply(loss, count, group, factor)
        return loss if total is None else loss / torch.where(count == 0, 1.0, count)


def _fault_of(function, *arguments) -> Exception | None:
    try:
        function(*arguments)
    except Exception as error:
        return error
    return None


def _fact(tensor: torch.Tensor | None) -> str | None:
    return None if tensor is None else f"{list(tensor.shape)} {tensor.dtype}{', with a gradient' * tensor.requires_grad}"
