"""Which keys each query of a layer attends to, read from the mask that the layer received.

A mask becomes row bounds by evaluation: whatever made it, each row must show one range of the keys. Keys that no row shows
are left out first, so padding between visible tokens does not divide a range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_BLOCK = 1 << 24  # pairs of query and key that are evaluated at once
_HIDDEN = -1e4  # an additive mask hides a key with this or less: its probability is 0 in every type


class Refused(Exception):
    """An attention that is not modeled: the message completes "student: layer 3 (model.layers.3.self_attn) ..."."""


@dataclass(eq=False)
class Keys:
    """Query i attends to the keys from begin[i] up to end[i], without end[i], that are in `shown`."""

    begin: torch.Tensor  # [batch or 1, len_q], whole numbers
    end: torch.Tensor  # [batch or 1, len_q]; begin = end = 0: no key
    shown: torch.Tensor | None  # [batch or 1, len_k] bool: keys that some query attends to; None: all
    len_k: int

    @property
    def len_q(self) -> int:
        return self.begin.shape[1]

    @cached_property
    def window(self) -> tuple[int, int]:
        """(left, right) as attention_kl takes it: how many keys the queries look back and ahead at most; -1: no limit."""
        before = _count_before(self.shown, self.begin, self.len_k)
        begin, end, position = before.gather(1, self.begin), before.gather(1, self.end), self._position()
        is_row = begin < end
        left, right = position - self.begin, self.end - 1 - position
        limits_left, limits_right = is_row & (begin > 0), is_row & (end < before[:, -1:])
        return tuple(int(side[is_row].max()) if bool(limits.any()) else -1
                     for side, limits in ((left, limits_left), (right, limits_right)))  # type: ignore[return-value]  # fmt: skip

    @cached_property
    def count(self) -> int:
        """Pairs of a query and a key that it attends to."""
        before = _count_before(self.shown, self.begin, self.len_k)
        return int((before.gather(1, self.end) - before.gather(1, self.begin)).sum())

    @cached_property
    def edges(self) -> list[int]:
        """The rows before and after the first and the last begin of a range that differs from that of the row above."""
        moves = (self.begin[:, 1:] != self.begin[:, :-1]).any(0).nonzero()[:, 0]
        return [row + i for row in {*moves[:1].tolist(), *moves[-1:].tolist()} for i in (0, 1)]

    @cached_property
    def causal(self) -> bool:
        """No query looks ahead."""
        return bool((self.end <= self._position() + 1).all())

    def _position(self) -> torch.Tensor:
        """The position of each query among the keys: the last query stands at the last key."""
        return torch.arange(self.len_k - self.len_q, self.len_k, device=self.begin.device)

    def both(self, other: Keys) -> Keys:
        """The keys that the queries of both attend to."""
        if other is self:
            return self
        device = self.begin.device
        shown = [each.to(device) for each in (self.shown, other.shown) if each is not None]
        shown_by_both = shown[0] & shown[-1] if shown else None
        begin, end = self.begin.maximum(other.begin.to(device)), self.end.minimum(other.end.to(device))
        return keys_between(begin, end, shown_by_both, self.len_k)

    def equals(self, other: Keys) -> bool:
        """Whether the queries of both attend to the same keys."""
        if other is self:
            return True
        if (self.len_q, self.len_k) != (other.len_q, other.len_k) or (self.shown is None) != (other.shown is None):
            return False
        pairs = [(self.begin, other.begin), (self.end, other.end)]
        if self.shown is not None and other.shown is not None:
            pairs.append((self.shown, other.shown))
        return all(bool((a == b.to(a.device)).all()) for a, b in pairs)

    def without_padding(self, tokens: torch.Tensor | None) -> Keys:
        """The keys, if padding attends to padding: its rows then attend to nothing. `tokens` is [batch, length] bool."""
        if tokens is None or not self.len_q == self.len_k == tokens.shape[1] or len(self.begin) not in (1, len(tokens)):
            return self
        hidden = ~tokens.to(self.begin.device)
        if not bool((hidden if self.shown is None else hidden & self.shown).any()):
            return self
        begin, end = (each.masked_fill(hidden, 0) for each in (self.begin, self.end))
        return keys_between(begin, end, self.shown, self.len_k)

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[batch or 1, 1, rows, len_k] bool: the keys of some rows."""
        key = torch.arange(self.len_k, device=self.begin.device)
        seen = (key >= self.begin[:, rows, None]) & (key < self.end[:, rows, None])
        return (seen if self.shown is None else seen & self.shown[:, None])[:, None]


def keys_between(begin: torch.Tensor, end: torch.Tensor, shown: torch.Tensor | None, len_k: int) -> Keys:
    """Keys with the smallest bounds that say the same: equal key sets have equal bounds."""
    begin, end = begin.clamp(0, len_k), end.clamp(0, len_k)
    if shown is not None:
        batch = max(len(begin), len(shown))
        begin, end, shown = (each.expand(batch, -1) for each in (begin, end, shown))
        count = _count_before(shown, begin, len_k)
        first, last = count.gather(1, begin), count.gather(1, end)
        begin = torch.where(first < last, torch.searchsorted(count, first, right=True) - 1, 0)
        end = torch.where(first < last, torch.searchsorted(count, last), 0)
    is_empty = begin >= end
    begin, end = begin.masked_fill(is_empty, 0), end.masked_fill(is_empty, 0)
    covered = covered_keys(begin, end, len_k)
    shown = covered if shown is None else shown & covered
    return Keys(begin, end, None if bool(shown.all()) else shown, len_k)


def _count_before(shown: torch.Tensor | None, rows: torch.Tensor, len_k: int) -> torch.Tensor:
    """[batch of `rows`, len_k + 1]: how many shown keys come before each key."""
    if shown is None:
        return torch.arange(len_k + 1, device=rows.device).expand(len(rows), -1)
    return torch.nn.functional.pad(shown.cumsum(1), (1, 0)).expand(len(rows), -1)


def covered_keys(begin: torch.Tensor, end: torch.Tensor, len_k: int) -> torch.Tensor:
    """[batch, len_k] bool: the keys that are in the range of some row."""
    change = torch.zeros(len(begin), len_k + 1, dtype=torch.long, device=begin.device)
    one = torch.ones_like(begin)
    change.scatter_add_(1, begin, one).scatter_add_(1, end, -one)
    return change.cumsum(1)[:, :-1] > 0


# ---- Keys without a mask tensor ----------------------------------------------------------------------------------------


def keys_in_window(left: float, right: float, len_q: int, len_k: int, device) -> Keys:
    """A query at position p attends to the keys from p - left to p + right; the last one stands at the last key."""
    position = torch.arange(len_k - len_q, len_k, device=device)[None]
    begin = torch.zeros_like(position) if left == math.inf else position - int(left)
    end = torch.full_like(position, len_k) if right == math.inf else position + int(right) + 1
    return keys_between(begin, end, None, len_k)


def keys_of_sequences(number: torch.Tensor) -> Keys:
    """Packed sequences: a query attends to the keys of its run of equal numbers, [batch, length]."""
    length = number.shape[1]
    token = torch.arange(length, device=number.device).expand(number.shape)
    is_first = torch.nn.functional.pad(number[:, 1:] != number[:, :-1], (1, 0), value=True)
    begin = torch.where(is_first, token, 0).cummax(1).values
    is_last = torch.nn.functional.pad(is_first[:, 1:], (0, 1), value=True)
    end = torch.where(is_last, token + 1, length).flip(1).cummin(1).values.flip(1)
    return keys_between(begin, end, None, length)


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def keys_of_tensor(mask: torch.Tensor, len_q: int, len_k: int) -> Keys:
    """The keys that a mask tensor shows: [batch, len_k], or [batch, heads, len_q, len_k], of bools or of what is added."""
    if mask.dim() == 2:
        shown = mask[:, :len_k].bool()
        if shown.shape[1] != len_k:
            raise Refused(f"receives an attention mask {list(mask.shape)} for {len_k} keys")
        begin = torch.zeros(len(mask), len_q, dtype=torch.long, device=mask.device)
        return keys_between(begin, begin + len_k, shown, len_k)
    if mask.dim() != 4 or mask.shape[2] not in (1, len_q) or mask.shape[3] < len_k:
        raise Refused(f"receives an attention mask {list(mask.shape)} for {len_q} queries and {len_k} keys")
    mask = mask[..., :len_k]
    for dimension in 0, 1, 2:  # an expanded mask repeats itself
        if mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)

    def blocks(size: int) -> Iterator[torch.Tensor]:
        for rows in mask.split(size, 2):
            yield _shown_in(rows)

    keys = _evaluate(blocks, mask.shape[0] * mask.shape[1], len_k)
    return Keys(keys.begin.expand(-1, len_q), keys.end.expand(-1, len_q), keys.shown, len_k)


def _shown_in(rows: torch.Tensor) -> torch.Tensor:
    """[batch, rows, len_k] bool."""
    if rows.dtype == torch.bool:
        seen = rows
    else:
        seen = rows == 0
        if not bool((seen | (rows <= _HIDDEN)).all()):
            raise Refused(
                "adds a bias to its logits (its attention mask is neither 0 nor hides a key), which the KL does not cover"
            )
    if rows.shape[1] > 1 and not bool((seen == seen[:, :1]).all()):
        raise Refused("has another attention mask for each head")
    return seen[:, 0]


def keys_of_function(function: Callable, batch: int, len_q: int, len_k: int, device: Any) -> Keys:
    """The keys that a mask function of (batch, head, query, key) shows, such as that of a BlockMask."""
    index = torch.arange(max(batch, len_q, len_k), device=device)
    head, key = torch.zeros(1, 1, 1, dtype=torch.long, device=device), index[None, None, :len_k]

    def blocks(size: int) -> Iterator[torch.Tensor]:
        for rows in index[:len_q].split(size):
            seen = function(index[:batch, None, None], head, rows[None, :, None], key)
            yield torch.as_tensor(seen, device=device).expand(batch, len(rows), len_k)

    try:
        return _evaluate(blocks, batch, len_k)
    except (TypeError, IndexError, RuntimeError) as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise Refused(f"has an attention mask function that cannot be evaluated: {name}: {error}") from error


def _evaluate(blocks: Callable[[int], Iterator[torch.Tensor]], batch: int, len_k: int) -> Keys:
    """Row bounds of a mask that comes in blocks of rows, [batch, rows, len_k] bool."""
    begins, ends, counts, shown = [], [], [], None
    for seen in blocks(max(_BLOCK // max(batch * len_k, 1), 1)):
        number = torch.arange(1, len_k + 1, dtype=torch.int32, device=seen.device)
        numbered = seen * number
        end = numbered.amax(-1)
        begins.append(torch.where(end > 0, seen.to(torch.uint8).argmax(-1), 0))
        ends.append(end.long())
        counts.append(seen.sum(-1))
        shown = seen.any(1) if shown is None else shown | seen.any(1)
    assert shown is not None
    begin, end, count = (torch.cat(parts, 1) for parts in (begins, ends, counts))
    before = _count_before(shown, begin, len_k)
    divided = before.gather(1, end) - before.gather(1, begin) != count
    if bool(divided.any()):
        where, row = divided.nonzero()[0].tolist()
        raise Refused(
            f"attends to more than one range of keys: row {row} of sequence {where} sees {int(count[where, row])} of the keys "
            f"{int(begin[where, row])}..{int(end[where, row]) - 1}"
        )
    return Keys(begin, end, None if bool(shown.all()) else shown, len_k)
