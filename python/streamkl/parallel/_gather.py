"""Context parallelism by all-gather: every rank gets all keys, computes its own rows, and gets back the sum of its dk.

Key heads are gathered in slices, and the next slice travels while one is computed. So a rank holds at most two slices of keys
beyond its shards: the one that is computed, in the order of the sequence, and the next one, as it arrives. In a backward it
also holds at most two slices of f32 key gradients: the one that is computed, and the one that is being summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterator

import torch
import torch.distributed as dist

from .. import _library as lib
from .._call import row_names
from .._checks import rounds_later
from .._ops import TENSOR_COUNT, per_tensor
from .._problem import DK_S, DK_T
from ._groups import all_gather, reduce_scatter
from ._layout import Layout, inverse_of
from ._shards import Shards, split_arguments

_MAX_SLICES = 4  # each computes a part of the heads: more of them would be small launches

streamkl = torch.ops.streamkl


@dataclass
class _Slice:
    """Part `number` of `count` of the heads, with the keys of all ranks."""

    number: int
    count: int
    tensors: tuple

    def heads(self, rows: torch.Tensor | None) -> torch.Tensor | None:
        """The heads of row vectors."""
        return _cut(rows, -2, self.number, self.count)


def _cut(tensor: Any, dim: int, index: int, count: int) -> Any:
    if tensor is None or count == 1:
        return tensor
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, index * size, size)


def _join(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def slice_count(key_heads_t: int, key_heads_s: int) -> int:
    """A slice has whole key heads of both models, and with them whole teacher groups."""
    common = math.gcd(key_heads_t, key_heads_s)
    return max(count for count in range(1, _MAX_SLICES + 1) if common % count == 0)


class AllGather:
    """The operators of _ops.py on shards. Row vectors and dq are those of the rank's rows, dk of its keys."""

    def __init__(self, group: dist.ProcessGroup, layout: Layout) -> None:
        self.group, self.layout, self.rank = group, layout, dist.get_rank(group)

    def forward(self, *arguments) -> list[torch.Tensor]:
        tensors, (lse_t, rows), rest = split_arguments(arguments, 2)
        shards = Shards(self.layout, self.rank, tensors, rest)
        lengths, made = shards.lengths_of_all_keys(), []
        reads_teacher = rows != lib.LSE_S or tensors[4] is None  # the LSE of an indexer does not read it
        for part in self._slices(shards, reads_teacher):
            made.append(streamkl.forward(*part.tensors, part.heads(lse_t), rows, *lengths, *shards.options))
            del part  # frees its keys before the next ones are ordered
        return [_join(list(each), -2) for each in zip(*made)]

    def backward(self, *arguments) -> list[torch.Tensor]:
        tensors, rows, rest = split_arguments(arguments, 5)
        shards = Shards(self.layout, self.rank, tensors, rest)
        lengths, gradients = shards.lengths_of_all_keys(), _Gradients(self.group, shards, one_pass=False)
        for part in self._slices(shards):
            gradients.add(streamkl.backward(*part.tensors, *map(part.heads, rows), *lengths, *shards.options))
            del part
        return gradients.finish()

    def forward_backward(self, *arguments) -> list[torch.Tensor]:
        tensors, (*given, rows), rest = split_arguments(arguments, 4)
        shards = Shards(self.layout, self.rank, tensors, rest)
        lengths, gradients, made = shards.lengths_of_all_keys(), _Gradients(self.group, shards, one_pass=True), []
        row_count = len(row_names(rows))
        for part in self._slices(shards):
            answer = streamkl.forward_backward(
                *part.tensors, *map(part.heads, given), rows, *lengths, *shards.options
            )
            made.append(answer[:row_count])
            gradients.add(answer[row_count:])
            del part, answer
        return [*(_join(list(each), -2) for each in zip(*made)), *gradients.finish()]

    def _slices(self, shards: Shards, reads_teacher: bool = True) -> Iterator[_Slice]:
        q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices = shards.tensors
        dim = shards.heads_dim
        count = slice_count(k_t.shape[dim], k_s.shape[dim])

        def start(index: int) -> list[_Gathering]:
            keys = (k_t, k_s) if reads_teacher else (k_s,)
            return [_Gathering(self.group, shards, _cut(key, dim, index, count)) for key in keys]

        following = start(0)
        for index in range(count):
            *keys_t, keys_s = [gathering.ordered() for gathering in following]
            following = start(index + 1) if index + 1 < count else []
            read_t = keys_t[0] if reads_teacher else _unread(_cut(k_t, dim, index, count), keys_s, shards)
            own_t, own_s, own_w, own_indices = (
                _cut(tensor, dim, index, count) for tensor in (q_t, q_s, w_s, indices)
            )
            sinks = (_cut(sink, 0, index, count) for sink in (sink_t, sink_s))
            yield _Slice(index, count, (own_t, read_t, own_s, keys_s, own_w, *sinks, own_indices))
            del keys_t, keys_s, read_t


def _unread(k_t: torch.Tensor, keys_s: torch.Tensor, shards: Shards) -> torch.Tensor:
    """Teacher keys for an operation that does not read them."""
    shape = list(k_t.shape)
    shape[shards.length_dim] = keys_s.shape[shards.length_dim]
    return k_t.new_zeros(()).expand(shape)


class _Gathering:
    """An all-gather of keys under way."""

    def __init__(self, group, shards: Shards, keys: torch.Tensor) -> None:
        self.shards, self.own = shards, shards.length_first(keys).contiguous()
        self.gathered: Any = self.own.new_empty(shards.layout.world * self.own.shape[0], *self.own.shape[1:])
        self.work: Any = all_gather(self.gathered, self.own, group=group, async_op=True)

    def ordered(self) -> torch.Tensor:
        """The keys of all ranks, in the order of the sequence."""
        self.work.wait()
        gathered, self.gathered, self.work = self.gathered, None, None
        return self.shards.length_back(gathered.index_select(0, self.shards.order))


class _Gradients:
    """Gradients of slices: those of queries are complete, those of keys are summed over ranks, in f32."""

    def __init__(self, group, shards: Shards, one_pass: bool) -> None:
        self.group, self.shards = group, shards
        self.inverse = inverse_of(shards.order)
        self.stays_f32 = one_pass and rounds_later(shards.asked.gradients, shards.dtypes)
        self.parts: list[list] = [[] for _ in range(TENSOR_COUNT - 1)]
        self.pending: list = []

    def add(self, made: list[torch.Tensor]) -> None:
        for bit, gradient in enumerate(per_tensor(made, self.shards.asked.gradients, None)):
            if gradient is not None:
                is_key = 1 << bit in (DK_T, DK_S)
                self.parts[bit].append(self._scatter(gradient) if is_key else self._rounded(bit, gradient))

    def _rounded(self, bit: int, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.stays_f32 else gradient.to(self.shards.tensors[bit].dtype)

    def _scatter(self, gradient: torch.Tensor) -> torch.Tensor:
        self.wait()
        by_rank = self.shards.length_first(gradient).index_select(0, self.inverse)
        own = by_rank.new_empty(by_rank.shape[0] // self.shards.layout.world, *by_rank.shape[1:])
        work = reduce_scatter(own, by_rank, group=self.group, async_op=True)
        self.pending.append((work, by_rank))
        return self.shards.length_back(own)

    def wait(self) -> None:
        """At most one sum is under way, so that extra memory does not grow with the number of slices."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()

    def finish(self) -> list[torch.Tensor]:
        self.wait()
        dim = [self.shards.heads_dim] * 5 + [0, 0]  # a sink is a number per head
        return [self._rounded(bit, _join(each, dim[bit])) for bit, each in enumerate(self.parts) if each]
