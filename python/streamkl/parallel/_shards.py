"""The shards of one rank: a call of an operator, as context parallelism sees it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from .._ops import LENGTH_COUNT, TENSOR_COUNT
from .._options import Lengths
from .._problem import Options
from ._layout import Layout, gather_order


def split_arguments(arguments: tuple, own: int) -> tuple[tuple, tuple, tuple]:
    """The tensors, the `own` next arguments, and the lengths and options of an operator."""
    end = TENSOR_COUNT + own
    return arguments[:TENSOR_COUNT], arguments[TENSOR_COUNT:end], arguments[end:]


class Shards:
    """Tensors (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), lengths and options of an operator, on a rank."""

    def __init__(self, layout: Layout, rank: int, tensors: tuple, lengths_and_options: tuple) -> None:
        self.layout, self.rank, self.tensors = layout, rank, tensors
        self.lengths, self.asked = (
            Lengths(*lengths_and_options[:LENGTH_COUNT]),
            Options(*lengths_and_options[LENGTH_COUNT:]),
        )
        self.heads_dim, self.length_dim = (-3, -2) if self.asked.heads_first else (-2, -3)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def dtypes(self) -> list[Any]:
        """Of the tensors that may have a gradient."""
        return [None if tensor is None else tensor.dtype for tensor in self.tensors[:-1]]

    def length_first(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(self.length_dim, 0)

    def length_back(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(0, self.length_dim)

    @cached_property
    def options(self) -> Any:
        """Options of the calls on shards: `bounds` replace all masks. Gradients are f32, because ranks add them."""
        return self.asked._replace(causal=False, window_left=-1, window_right=-1, max_seqlen_k=-1, grad_f32=True)

    @cached_property
    def order(self) -> torch.Tensor:
        """Of the gathered keys: see gather_order."""
        length = self.tensors[1].shape[self.length_dim]
        return gather_order(self.layout, length, self.lengths.cu_seqlens_k, self.device)

    # ---- Masks -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _shard_lengths(self) -> tuple[Any, ...]:
        """Queries and keys of the shard of a sequence; packed: of the sequence of each row."""
        cu_q, cu_k, *_ = self.lengths
        if cu_q is None or cu_k is None:
            return tuple(self.tensors[place].shape[self.length_dim] for place in (0, 1))
        return cu_q.long().diff()[self._sequence], cu_k.long().diff()[self._sequence]

    @cached_property
    def _sequence(self) -> torch.Tensor:
        """Packed: the sequence of each row; rows after the last sequence are given to it."""
        cu_q: Any = self.lengths.cu_seqlens_q
        row = torch.arange(self.tensors[0].shape[self.length_dim], device=self.device)
        return torch.searchsorted(cu_q[1:], row, right=True).clamp(max=max(len(cu_q) - 2, 0))

    @cached_property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(begin, end) of the keys of the whole sequence that each row attends to under all masks.

        [batch, len_q], packed [total_q]. The last query of the sequence is aligned with its last key, as on one rank.
        """
        cu_q, cu_k, key_lengths, key_begin, key_end = self.lengths
        world, (len_q, len_k) = self.layout.world, self._shard_lengths
        index = torch.arange(self.tensors[0].shape[self.length_dim], device=self.device)
        if cu_q is not None:
            index = index - cu_q.long()[self._sequence]
        position = self.layout.positions(self.rank, index, len_q) + world * (len_k - len_q)
        keys = world * len_k if isinstance(len_k, torch.Tensor) else torch.full_like(position, world * len_k)
        left, right = self.asked.window_left, 0 if self.asked.causal else self.asked.window_right
        begin = position - left if left >= 0 else torch.zeros_like(position)
        end = torch.minimum(position + right + 1, keys) if right >= 0 else keys
        if cu_q is None:
            begin, end = (bound.expand(self.tensors[0].shape[0], -1) for bound in (begin, end))
        if key_lengths is not None:
            end = torch.minimum(end, key_lengths.unsqueeze(-1))
        if key_begin is not None:
            begin = torch.maximum(begin, key_begin)
        if key_end is not None:
            end = torch.minimum(end, key_end)
        if cu_q is not None:
            end = torch.where(index < len_q, end, 0)
        end = end.clamp(min=0)
        return torch.minimum(begin.clamp(min=0), end), end

    def lengths_of_all_keys(self) -> Lengths:
        """With the keys of all ranks, in the order of the sequence."""
        cu_k = self.lengths.cu_seqlens_k
        return self._with_bounds(None if cu_k is None else cu_k * self.layout.world, *self.bounds)

    def lengths_of_shard(self, rank: int) -> Lengths:
        """With the keys of a rank."""
        count = (self.layout.count_before(rank, bound, self._shard_lengths[1]) for bound in self.bounds)
        return self._with_bounds(self.lengths.cu_seqlens_k, *count)

    def indices_of_shard(self, rank: int) -> torch.Tensor | None:
        """The indices of keys of a rank, counted in its shard; -1 for all others."""
        indices, length = self.tensors[-1], self._keys_of_indices
        if indices is None:
            return None
        before = self.layout.count_before(rank, indices, length)
        is_inside = self.layout.count_before(rank, indices + 1, length) > before
        return torch.where(is_inside, before, -1).int()

    @property
    def _keys_of_indices(self) -> Any:
        """Keys of the shard that the indices of a row count in."""
        length = self._shard_lengths[1]
        return self._as_indices(length) if isinstance(length, torch.Tensor) else length

    def _as_indices(self, rows: torch.Tensor) -> torch.Tensor:
        """One value per row, as it broadcasts to indices: [total] as [total, 1, 1] or [1, total, 1]."""
        return rows.unsqueeze(-1).unsqueeze(self.heads_dim)

    def check_values(self) -> None:
        """What the library refuses in whole sequences, and cannot see in shards. Reads the values: for CPUs."""
        cu_q, _, key_lengths, *bounds = self.lengths
        world, indices = self.layout.world, self.tensors[-1]
        row = torch.arange(self.tensors[0].shape[self.length_dim], device=self.device)
        is_read = row < (len(row) if cu_q is None else cu_q[-1])  # rows after the last sequence are not
        if key_lengths is not None:
            keys = world * self.tensors[1].shape[self.length_dim]
            _require_range("key_lengths", key_lengths, 0, torch.full_like(key_lengths, keys))
        for name, bound in zip(("key_begin", "key_end"), bounds):
            if bound is None:
                continue
            keys = torch.as_tensor(world * self._shard_lengths[1], device=self.device).expand(bound.shape)
            _require_range(name, torch.where(is_read, bound, 0), 0, keys)
            falls = (bound.diff() < 0) & is_read[1:]
            if cu_q is not None:
                falls &= self._sequence[1:] == self._sequence[:-1]
            if falls.any():
                raise ValueError(
                    f"{name}{falls.nonzero()[0].tolist()}: must not be above the next one of the same sequence"
                )
        if indices is not None:
            last = torch.as_tensor(world * self._keys_of_indices - 1, device=self.device).expand(indices.shape)
            _require_range("indices", torch.where(self._as_indices(is_read), indices, -1), -1, last)

    def _with_bounds(self, cu_seqlens_k, begin, end) -> Lengths:
        return Lengths(
            self.lengths.cu_seqlens_q, cu_seqlens_k, None, begin.int().contiguous(), end.int().contiguous()
        )


def _require_range(name: str, values: torch.Tensor, least: int, most: torch.Tensor) -> None:
    wrong = ((values < least) | (values > most)).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise ValueError(
            f"{name}{list(place)}={values[place]}: must be {least}..{most[place]}, in the whole sequence"
        )
