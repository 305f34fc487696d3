"""Which rows of a batch attention_kl receives, as packed sequences: all that are not padding, or a sample of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ._masks import Visible


@dataclass
class _Side:
    """The tokens of one side, queries or keys."""

    order: torch.Tensor | None  # of the tokens of [batch * length], first those of the sequences; None: all, in order
    cu_seqlens: torch.Tensor
    longest: int


@dataclass
class Rows:
    """How the rows of a batch are packed; `queries` is None if they are not."""

    visible: Visible
    queries: _Side | None = None
    keys: _Side | None = None
    bounds: dict[str, torch.Tensor] | None = None  # key_begin and key_end, in place of `visible`
    # Of a sample: its share of the rows, and the tokens of [batch * length] that count and attend to a key.
    share: float = 1.0
    attending: torch.Tensor | None = None

    def masks(self) -> dict[str, Any]:
        """Arguments of attention_kl."""
        if self.bounds is None:
            masks: dict[str, Any] = dict(causal=self.visible.causal, window_size=self.visible.window_size())
        else:
            masks = dict(self.bounds)
        if self.queries is not None and self.keys is not None:
            masks.update(cu_seqlens_q=self.queries.cu_seqlens, cu_seqlens_k=self.keys.cu_seqlens,
                         max_seqlen_q=self.queries.longest, max_seqlen_k=self.keys.longest)  # fmt: skip
        return masks

    def mean(self, weight: torch.Tensor | None, heads: int) -> tuple[dict[str, Any], Any]:
        """(arguments, factor) with which attention_kl gives the mean over all rows; `weight` is [batch, length].

        The sum over a sample, divided by its share, is an unbiased estimate of the sum over all rows. So the mean
        divides by the weight of all rows: that of the sample is a random number too, and a ratio of two is biased.
        """
        packed = None if weight is None else self._pack_weight(weight)
        if self.attending is None:
            return dict(row_weight=packed), None
        total = (self.attending if weight is None else weight.flatten() * self.attending).sum()
        return dict(row_weight=packed, reduction="sum"), 1 / (self.share * heads * torch.where(total == 0, 1, total))

    def pack_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, length, ...] as [heads, batch * length, ...]."""
        return _pack(tensor, self.queries)

    def pack_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        return _pack(tensor, self.keys)

    def _pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """[batch, length] as [batch * length]."""
        return weight if self.queries is None else _pack(weight[:, None], self.queries)[0]

    def unpack_rows(self, rows: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """[heads, batch * length] as [batch, heads, length]; NaN for padding."""
        if self.queries is None:
            return rows
        if self.queries.order is not None:
            kept = torch.arange(rows.shape[1], device=rows.device) < self.queries.cu_seqlens[-1]
            packed, rows = rows, torch.empty_like(rows)
            rows[:, self.queries.order] = torch.where(kept, packed, torch.nan)
        return rows.unflatten(1, (batch, length)).transpose(0, 1)


def _pack(tensor: torch.Tensor, side: _Side | None) -> torch.Tensor:
    if side is None:
        return tensor
    tokens = tensor.transpose(0, 1).flatten(1, 2)
    return tokens if side.order is None else tokens.index_select(1, side.order)


def pack_rows(
    visible: Visible, padding: torch.Tensor | None, row_padding: torch.Tensor | None, batch: int, len_q: int, len_k: int,
    is_cross: bool, where: str, device: torch.device, pack_always: bool = False,
) -> Rows:  # fmt: skip
    """The rows of a layer pair, at `where`. Without padding and packed sequences nothing is packed, unless asked for."""
    if padding is None and row_padding is None and not visible.segments and not pack_always:
        return Rows(visible)
    if is_cross:
        return Rows(visible, _of_batch(row_padding, batch, len_q, device), _of_batch(padding, batch, len_k, device))
    for name, given in ("attention_mask", padding), *(("packed sequences", each) for each in visible.segments):
        if given is not None and (len_q != len_k or given.shape[1] != len_q):
            raise ValueError(f"{where}: {name} {list(given.shape)} with {len_q} queries and {len_k} keys: padding and packed "
                             "sequences need as many queries as keys")  # fmt: skip
    if visible.segments:
        keys = _of_segments(visible.segments, padding, batch, len_k, device)
    else:
        keys = _of_batch(padding, batch, len_k, device)
    rows = Rows(visible, keys if len_q == len_k else _of_batch(None, batch, len_q, device), keys)
    if padding is not None and visible.windowed and _has_hole(padding):
        rows.bounds = _bounds(rows, padding, batch, len_q, len_k)  # a window counts the hidden tokens as well
    return rows


def _has_hole(padding: torch.Tensor) -> bool:
    begins = (padding[:, 1:] & ~padding[:, :-1]).sum(1) + padding[:, 0]
    return bool((begins > 1).any())


def _of_batch(padding: torch.Tensor | None, batch: int, length: int, device: torch.device) -> _Side:
    """One sequence per row of the batch. No size depends on a value: no host-device synchronisation."""
    if padding is None:
        return _Side(None, torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device), length)
    order = (~padding).flatten().int().argsort(stable=True)
    ends = padding.sum(-1).cumsum(0)
    return _Side(order, torch.nn.functional.pad(ends, (1, 0)).int(), length)


def _of_segments(segments, padding, batch: int, length: int, device: torch.device) -> _Side:
    """One sequence per run of tokens with the same numbers."""
    begins = torch.zeros(batch, length, dtype=torch.bool, device=device)
    begins[:, 0] = True
    for segment in segments:
        begins[:, 1:] |= (segment[:, 1:] != segment[:, :-1]).expand(batch, -1)
    counted = torch.ones_like(begins) if padding is None else padding
    order = (~counted).flatten().int().argsort(stable=True)
    sequence = (begins.flatten().cumsum(0) - 1)[order][: int(counted.sum())]
    sizes = sequence.unique_consecutive(return_counts=True)[1]
    cu_seqlens = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    return _Side(order, cu_seqlens, int(sizes.max()) if len(sizes) else 0)


# ---- Row bounds and samples ------------------------------------------------------------------------------------------


def _bounds(rows: Rows, padding: torch.Tensor | None, batch: int, len_q: int, len_k: int) -> dict[str, torch.Tensor]:
    """The keys that each packed query attends to, counted from the first key of its sequence.

    A query at position p of its batch attends to the positions from p - left to p + right. Padding before them
    moves their keys forward in the packed ones, and its sequence is only a part of these.
    """
    queries, keys, visible = rows.queries, rows.keys, rows.visible
    assert queries is not None and keys is not None
    device = keys.cu_seqlens.device
    token = torch.arange(batch * len_q, device=device) if queries.order is None else queries.order
    place, position = token // len_q * len_k, token % len_q + (len_k - len_q)
    counted = torch.ones(batch * len_k, dtype=torch.long, device=device) if padding is None else padding.flatten().long()
    packed_before = torch.nn.functional.pad(counted.cumsum(0), (1, 0))
    row = torch.arange(len(token), dtype=torch.int32, device=device)
    sequence = torch.searchsorted(queries.cu_seqlens[1:], row, right=True).clamp(max=len(queries.cu_seqlens) - 2)
    first, end = keys.cu_seqlens[sequence], keys.cu_seqlens[sequence + 1]

    def key_at(side: torch.Tensor) -> torch.Tensor:
        packed = packed_before[place + side.clamp(0, len_k)]
        return (packed.maximum(first).minimum(end) - first).int()

    left, right = (len_k if side == math.inf else int(side) for side in (visible.left, visible.right))
    return dict(key_begin=key_at(position - left), key_end=key_at(position + right + 1))


def sample_rows(
    rows: Rows, share: float, uniform, padding: torch.Tensor | None, batch: int, len_q: int, len_k: int
) -> Rows:
    """A sample of packed query rows: one of each of `share * rows` equal parts, so every row is drawn with the same probability.

    `uniform(count)` gives random numbers from 0 to 1.
    """
    queries = rows.queries
    assert queries is not None and rows.keys is not None
    every = batch * len_q if queries.order is None else int(queries.cu_seqlens[-1])
    count = max(round(share * every), 1) if every else 0
    part = torch.arange(count, dtype=torch.float64)
    drawn = ((part + uniform(count)) * (every / max(count, 1))).long().clamp(max=max(every - 1, 0))
    drawn = drawn.to(queries.cu_seqlens.device)
    bounds = rows.bounds if rows.bounds is not None else _bounds(rows, padding, batch, len_q, len_k)
    order = torch.arange(batch * len_q, device=drawn.device) if queries.order is None else queries.order
    attending = torch.zeros(batch * len_q, dtype=torch.bool, device=drawn.device)
    attending[order[:every]] = (bounds["key_begin"] < bounds["key_end"])[:every]
    cu_seqlens = torch.searchsorted(drawn, queries.cu_seqlens.long(), out_int32=True)
    longest = min(int(queries.longest * count / max(every, 1)) + 2, count)  # a sequence begins and ends inside a part
    limits = dict(key_begin=rows.visible.left, key_end=rows.visible.right)
    bounds = {name: bound[drawn] for name, bound in bounds.items() if limits[name] != math.inf}
    return Rows(rows.visible, _Side(order[drawn], cu_seqlens, longest), rows.keys, bounds, count / max(every, 1), attending)
