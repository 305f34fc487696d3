"""How sequences are cut into the shards of a context-parallel group.

    contiguous   W chunks; rank r holds chunk r
    zigzag       2 W chunks; rank r holds chunk r and chunk 2 W - 1 - r, in this order, which balances a causal mask

The positions of a shard increase. So the keys of a shard that a row attends to are one contiguous range, too. Packed
batches are cut sequence by sequence: every rank holds equally long parts of every sequence, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch

from .._options import ShardLayout, check_choice


@dataclass(frozen=True)
class Layout:
    """The shards of `world` ranks. `length` is that of a shard: a number, or a tensor with one length per element."""

    name: ShardLayout
    world: int

    @property
    def chunks_per_rank(self) -> int:
        return 2 if self.name == "zigzag" else 1

    def _chunks(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.world - 1 - rank) if self.name == "zigzag" else (rank,)

    def positions(self, rank: int, index: torch.Tensor, length: Any) -> torch.Tensor:
        """The position in its sequence of each `index` of a shard."""
        size = _at_least_1(length // self.chunks_per_rank)
        first, last = self._chunks(rank)[0], self._chunks(rank)[-1]
        is_tail = index >= size if self.name == "zigzag" else torch.zeros_like(index, dtype=torch.bool)
        return (first + is_tail * (last - first - 1)) * size + index

    def count_before(self, rank: int, position: torch.Tensor, length: Any) -> torch.Tensor:
        """How many elements of a shard come before a position of the sequence."""
        size = length // self.chunks_per_rank
        return sum(_clamp(position - chunk * size, size) for chunk in self._chunks(rank))  # type: ignore[return-value]

    def place(self, position: torch.Tensor, length: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(rank, index in its shard) of a position of the sequence."""
        size = _at_least_1(length // self.chunks_per_rank)
        chunk = position // size
        if self.name == "contiguous":
            return chunk, position % size
        is_tail = chunk >= self.world
        return torch.where(is_tail, 2 * self.world - 1 - chunk, chunk), position % size + is_tail * size


def layout_of(name: ShardLayout | None, world: int) -> Layout:
    """What an argument asks for; zigzag by default."""
    if name is not None:
        check_choice("layout", name, get_args(ShardLayout))
    return Layout(name or "zigzag", world)


def _at_least_1(size: Any) -> Any:
    """A divisor: an empty chunk contains nothing."""
    return size.clamp(min=1) if isinstance(size, torch.Tensor) else max(size, 1)


def _clamp(value: torch.Tensor, highest: Any) -> torch.Tensor:
    value = value.clamp(min=0)
    return torch.minimum(value, highest) if isinstance(highest, torch.Tensor) else value.clamp(max=highest)


def check_lengths(layout: Layout, name: str, length: int, cu_seqlens: torch.Tensor | None) -> None:
    """Raises ValueError if a shard cannot be cut into equal chunks. Reads cu_seqlens only on the CPU: no synchronization."""
    if layout.name == "contiguous":
        return
    lengths = [length]
    if cu_seqlens is not None:
        lengths = [] if cu_seqlens.is_cuda else cu_seqlens.diff().tolist()
    for each in lengths:
        if each % 2:
            raise ValueError(
                f"{name}: a shard of {each} tokens: parallel.layout='zigzag' needs two chunks of equal length; pad the sequence"
            )


def gather_order(layout: Layout, length: int, cu_seqlens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """For every row of the whole tensor its row in [world * length]: the shards, rank after rank.

    Rows of packed shards that come after their last sequence also come last in the whole tensor.
    """
    row = torch.arange(layout.world * length, device=device)
    if cu_seqlens is None:
        rank, index = layout.place(row, length)
        return rank * length + index
    begins = torch.cat([cu_seqlens.long(), cu_seqlens.new_full((1,), length, dtype=torch.long)])
    sequence = torch.searchsorted(layout.world * begins[1:], row, right=True)
    begin = begins[sequence]
    size = begins[sequence + 1] - begin
    position = row - layout.world * begin
    rank, index = layout.place(position, size)
    rank_after, index_after = Layout("contiguous", layout.world).place(position, size)
    is_after = sequence == len(cu_seqlens) - 1
    return torch.where(is_after, rank_after, rank) * length + begin + torch.where(is_after, index_after, index)


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
