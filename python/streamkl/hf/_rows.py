"""Which rows of a batch attention_kl receives, as packed sequences: all that count, or a sample of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._keys import Keys, covered_keys

Bounds = dict[str, torch.Tensor]


@dataclass
class _Side:
    """The tokens of one side, queries or keys."""

    order: torch.Tensor | None  # the tokens of [batch * length] in the sequences; None: all, in order
    cu_seqlens: torch.Tensor
    longest: int


@dataclass
class Rows:
    """How the rows of a batch are packed; `queries` is None if they are not."""

    masks: dict[str, Any]  # arguments of attention_kl: causal and window_size, or row bounds
    queries: _Side | None = None
    keys: _Side | None = None
    # A sample: its share of the rows; `attending` has the tokens of [batch * length] that count and attend to a key.
    share: float = 1.0
    attending: torch.Tensor | None = None

    @property
    def has_bounds(self) -> bool:
        return "causal" not in self.masks

    @property
    def leaves_out(self) -> bool:
        """Some tokens are not in the sequences."""
        return any(side is not None and side.order is not None for side in (self.queries, self.keys))

    def arguments(self) -> dict[str, Any]:
        """Arguments of attention_kl."""
        if self.queries is None or self.keys is None:
            return self.masks
        return dict(self.masks, cu_seqlens_q=self.queries.cu_seqlens, cu_seqlens_k=self.keys.cu_seqlens,
                    max_seqlen_q=self.queries.longest, max_seqlen_k=self.keys.longest)  # fmt: skip

    def mean(self, weight: torch.Tensor | None, heads: int) -> tuple[dict[str, Any], Any]:
        """(arguments, factor) with which attention_kl gives the mean over all rows.

        `weight` is [batch, length] or [batch, heads, length].

        The sum over a sample, divided by its share, is an unbiased estimate of the sum over all rows. So the mean
        divides by the weight of all rows: that of the sample is a random number too, and a ratio of two is biased.
        """
        packed = None if weight is None else self._pack_weight(weight)
        if self.attending is None:
            return dict(row_weight=packed), None
        attending = self.attending
        if weight is not None:
            attending = attending * (weight if weight.dim() == 2 else weight.mean(1)).flatten()
        total = attending.sum()
        return dict(row_weight=packed, reduction="sum"), 1 / (self.share * heads * torch.where(total == 0, 1, total))

    def pack_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, length, ...] as [heads, tokens, ...]."""
        return _pack(tensor, self.queries)

    def pack_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        return _pack(tensor, self.keys)

    def _pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """[batch, length] as [tokens], [batch, heads, length] as [heads, tokens]."""
        if self.queries is None:
            return weight
        return _pack(weight[:, None], self.queries)[0] if weight.dim() == 2 else _pack(weight, self.queries)

    def unpack_rows(self, rows: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """[heads, tokens] as [batch, heads, length]; NaN for rows that do not count."""
        if self.queries is None:
            return rows
        if self.queries.order is not None:
            packed, rows = rows, rows.new_full((len(rows), batch * length), torch.nan)
            rows[:, self.queries.order] = packed
        return rows.unflatten(1, (batch, length)).transpose(0, 1)


def _pack(tensor: torch.Tensor, side: _Side | None) -> torch.Tensor:
    if side is None:
        return tensor
    tokens = tensor.transpose(0, 1).flatten(1, 2)
    return tokens if side.order is None else tokens.index_select(1, side.order)


def pack_rows(
    keys: Keys, counted: torch.Tensor | None, batch: int, where: str, share: float = 1.0, uniform=None
) -> Rows:
    """The rows of a layer pair, at `where`, that attend to `keys`; `counted`, [batch, len_q] bool, leaves some out.

    Rows that attend to no key are left out, and so are keys that no row attends to. Rows that share a key are in one
    sequence. If nothing is left out and one causal mask or window describes all rows, nothing is packed.

    A sample of `share` of the rows has one row of each of `share * rows` equal parts, so every row is drawn with the same
    probability; `uniform(count)` gives random numbers from 0 to 1.
    """
    begin, end, len_k = keys.begin.expand(batch, -1), keys.end.expand(batch, -1), keys.len_k
    rows = begin < end if counted is None else (begin < end) & counted
    shown = covered_keys(torch.where(rows, begin, 0), torch.where(rows, end, 0), len_k)
    shown = shown if keys.shown is None else shown & keys.shown
    before = torch.nn.functional.pad(shown.flatten().cumsum(0), (1, 0))  # packed keys before each key of the batch
    place = torch.arange(0, batch * len_k, len_k, device=begin.device)[:, None]
    first, last = before[begin + place][rows], before[end + place][rows]
    _check_order(first, last, rows, where)
    starts = torch.nn.functional.pad(first[1:] >= last[:-1], (1, 0), value=True)[: len(first)]
    cu_q = torch.nn.functional.pad(starts.nonzero()[:, 0], (0, 1), value=len(first))
    cu_k = torch.nn.functional.pad(first[cu_q[:-1]], (0, 1), value=int(before[-1]))
    sequence = starts.cumsum(0) - 1
    masks, bounds = _masks(first - cu_k[sequence], last - cu_k[sequence], sequence, cu_q, cu_k)
    has_all = bool(rows.all()) and bool(shown.all())
    if has_all and "causal" in masks and len(cu_q) == batch + 1 and share == 1:
        return Rows(masks)
    order_q, order_k = (None if bool(kept.all()) else kept.flatten().nonzero()[:, 0] for kept in (rows, shown))
    key_side = _Side(order_k, cu_k.int(), _longest(cu_k))
    if share == 1:
        return Rows(masks, _Side(order_q, cu_q.int(), _longest(cu_q)), key_side)
    every = len(first)
    count = max(round(share * every), 1) if every else 0
    part = torch.arange(count, dtype=torch.float64)
    drawn = ((part + uniform(count)) * (every / max(count, 1))).long().clamp(max=max(every - 1, 0)).to(first.device)
    order = drawn if order_q is None else order_q[drawn]
    query_side = _Side(order, torch.searchsorted(drawn, cu_q, out_int32=True), min(_longest(cu_q), count))
    bounds = {name: bound[drawn] for name, bound in bounds.items()}
    return Rows(bounds, query_side, key_side, count / max(every, 1), rows.flatten())


def _longest(cu_seqlens: torch.Tensor) -> int:
    return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0


def _check_order(first: torch.Tensor, last: torch.Tensor, rows: torch.Tensor, where: str) -> None:
    """The kernels need ranges that move forward from row to row."""
    backward = (first[1:] < first[:-1]) | (last[1:] < last[:-1])
    if bool(backward.any()):
        at = rows.nonzero()[1:][backward][0].tolist()
        raise ValueError(f"{where}: the keys of row {at[1]} of sequence {at[0]} begin or end before those of the row above it, which "
                         "the KL does not cover")  # fmt: skip


def _masks(begin, end, sequence, cu_q, cu_k) -> tuple[dict[str, Any], Bounds]:
    """(masks, row bounds) of rows with the keys from `begin` to `end` of their sequence: causal and window_size where they do."""
    size_q, size_k = cu_q.diff(), cu_k.diff()
    row = torch.arange(len(sequence), device=sequence.device) - cu_q[sequence]
    position, limit = row + (size_k - size_q)[sequence], size_k[sequence]
    limits_left, limits_right = bool((begin > 0).any()), bool((end < limit).any())
    left = int((position - begin).max()) if limits_left else -1
    right = int((end - 1 - position).max()) if limits_right else -1
    bounds = {}
    if limits_left:
        bounds["key_begin"] = begin.int()
    if limits_right:
        bounds["key_end"] = end.int()
    fits_left = not limits_left or (left >= 0 and torch.equal(begin, (position - left).clamp(min=0)))
    fits_right = not limits_right or (right >= 0 and torch.equal(end, (position + right + 1).minimum(limit)))
    return (dict(causal=right == 0, window_size=(left, right)) if fits_left and fits_right else bounds), bounds
