"""Reads the mask functions of transformers: which keys each query attends to.

A model describes a mask as a tree of functions of (batch, head, query, key): `and_masks(sliding_window_overlay(4),
causal_mask_function)`. Every function that is known here becomes a `Visible`; another one is refused by its name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Callable

import torch


class Refused(Exception):
    """An attention that is not modelled: the message completes "student: layer 3 (model.layers.3.self_attn) ..."."""


@dataclass(frozen=True)
class Visible:
    """Query i attends to the keys from i - left to i + right that carry its number in every tensor of `segments`."""

    left: float = math.inf
    right: float = math.inf
    segments: tuple[torch.Tensor, ...] = field(default=(), compare=False)  # whole numbers, [batch, length]

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def windowed(self) -> bool:
        """Positions matter, not only the order of the tokens."""
        return self.left != math.inf or self.right not in (0, math.inf)

    def both(self, other: Visible) -> Visible:
        segments = self.segments + tuple(s for s in other.segments if all(s is not own for own in self.segments))
        return Visible(min(self.left, other.left), min(self.right, other.right), segments)

    def either(self, other: Visible) -> Visible:
        if self.segments or other.segments:
            raise Refused("unites the masks of packed sequences or chunks, which is not one range of keys per query")
        return Visible(max(self.left, other.left), max(self.right, other.right))

    def window_size(self) -> tuple[int, int]:
        """As attention_kl takes it."""
        return tuple(-1 if side == math.inf else int(side) for side in (self.left, self.right))  # type: ignore[return-value]


CAUSAL, FULL = Visible(right=0), Visible()


def read_mask_function(function: Callable, length: int) -> Visible:
    """The keys that a mask function of transformers shows, for sequences of `length` keys."""
    read = _READERS.get(function.__qualname__)
    if read is None and _is_always_true(function):
        return FULL
    if read is None:
        raise Refused(f"has an attention mask that is not modelled: {function.__module__}.{function.__qualname__}")
    names = function.__code__.co_freevars
    return read({name: cell.cell_contents for name, cell in zip(names, function.__closure__ or ())}, length)


def _is_always_true(function: Callable) -> bool:
    """Gemma 3 for embeddings unites its causal mask with `lambda *args: torch.tensor(True)`, which has no size of its arguments."""
    if function.__closure__ is not None:
        return False
    seen = function(*[torch.zeros(1, dtype=torch.long)] * 4)
    return isinstance(seen, torch.Tensor) and seen.dim() == 0 and bool(seen)


def _read_all(combine: Callable[[Visible, Visible], Visible]) -> Callable[[dict, int], Visible]:
    def read(cells: dict[str, Any], length: int) -> Visible:
        first, *others = (read_mask_function(function, length) for function in cells["mask_functions"])
        for other in others:
            first = combine(first, other)
        return first

    return read


def _chunks(cells: dict[str, Any], length: int) -> Visible:
    """Chunked attention: each chunk of tokens, counted from the first that is not padding, is a separate sequence."""
    begin = cells["left_padding"]
    position = torch.arange(length, device=begin.device)
    return Visible(segments=((position - begin[:, None]).div(cells["chunk_size"], rounding_mode="floor"),))


def _sides(cells: dict[str, Any], _) -> Visible:
    """T5Gemma 2 and audio models: how many keys on each side, of which the query itself is one."""
    window = cells["sliding_window"]
    if isinstance(window, tuple):
        left, right = window
    else:
        left, right = (window, 0) if cells["is_causal"] else ((window + 1) // 2, window // 2 + 1)
    return Visible(left - 1, max(right - 1, 0))


_READERS: dict[str, Callable[[dict[str, Any], int], Visible]] = {
    "causal_mask_function": lambda cells, length: CAUSAL,
    "bidirectional_mask_function": lambda cells, length: FULL,
    "and_masks.<locals>.and_mask": _read_all(Visible.both),
    "or_masks.<locals>.or_mask": _read_all(Visible.either),
    "sliding_window_overlay.<locals>.inner_mask": lambda cells, _: Visible(left=cells["sliding_window"] - 1),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": lambda cells, _: Visible(
        *[cells["sliding_window"]] * 2
    ),
    "_bidirectional_window_overlay.<locals>.inner_mask": lambda cells, _: Visible(*[cells["sliding_window"] - 1] * 2),
    "sliding_window_mask_function.<locals>.inner_mask": _sides,
    "chunked_overlay.<locals>.inner_mask": _chunks,
    "packed_sequence_mask_function.<locals>.inner_mask": lambda cells, _: Visible(
        segments=(cells["packed_sequence_mask"],)
    ),
}
