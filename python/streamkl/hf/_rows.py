"""Packs the tokens of a batch that count, without those that are padding, as sequences of attention_kl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._masks import Visible


@dataclass
class _Side:
    """The tokens of one side, queries or keys."""

    order: (
        torch.Tensor
    )  # of the tokens of [batch * length]; padding follows after the last sequence, where it is ignored
    cu_seqlens: torch.Tensor
    longest: int


@dataclass
class Rows:
    """How the rows of a batch are packed; `queries` is None if they are not."""

    queries: _Side | None
    keys: _Side | None

    def lengths(self) -> dict[str, Any]:
        """Arguments of attention_kl."""
        if self.queries is None or self.keys is None:
            return {}
        return dict(cu_seqlens_q=self.queries.cu_seqlens, cu_seqlens_k=self.keys.cu_seqlens, max_seqlen_q=self.queries.longest,
                    max_seqlen_k=self.keys.longest)  # fmt: skip

    def pack_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, length, ...] as [heads, batch * length, ...]."""
        return _pack(tensor, self.queries)

    def pack_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        return _pack(tensor, self.keys)

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """[batch, length] as [batch * length]."""
        return weight if self.queries is None else weight.flatten()[self.queries.order.to(weight.device)]

    def unpack_rows(self, rows: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """[heads, batch * length] as [batch, heads, length]; NaN for padding."""
        if self.queries is None:
            return rows
        kept = torch.arange(rows.shape[1], device=rows.device) < self.queries.cu_seqlens[-1]
        whole = torch.empty_like(rows)
        whole[:, self.queries.order] = torch.where(kept, rows, torch.nan)
        return whole.unflatten(1, (batch, length)).transpose(0, 1)


def _pack(tensor: torch.Tensor, side: _Side | None) -> torch.Tensor:
    return tensor if side is None else tensor.transpose(0, 1).flatten(1, 2)[:, side.order]


def pack_rows(
    visible: Visible, padding: torch.Tensor | None, row_padding: torch.Tensor | None, batch: int, len_q: int, len_k: int,
    is_cross: bool, where: str, device: torch.device,
) -> Rows:  # fmt: skip
    """The rows of a layer pair, at `where`. Without padding and packed sequences nothing is packed."""
    if padding is None and row_padding is None and not visible.segments:
        return Rows(None, None)
    if is_cross:
        return Rows(_of_batch(row_padding, batch, len_q, device), _of_batch(padding, batch, len_k, device))
    for name, given in ("attention_mask", padding), *(("packed sequences", each) for each in visible.segments):
        if given is not None and (len_q != len_k or given.shape[1] != len_q):
            raise ValueError(f"{where}: {name} {list(given.shape)} with {len_q} queries and {len_k} keys: padding and packed "
                             "sequences need as many queries as keys")  # fmt: skip
    if padding is not None and visible.windowed and _has_hole(padding):
        raise ValueError(f"{where}: the attention_mask hides tokens between visible ones, which moves the positions that a sliding "
                         "window counts; leave layers with a window out of layer_map, or mask only the ends")  # fmt: skip
    if visible.segments:
        side = _of_segments(visible.segments, padding, batch, len_q, device)
    else:
        side = _of_batch(padding, batch, len_q, device)
    return Rows(side, side)


def _has_hole(padding: torch.Tensor) -> bool:
    begins = (padding[:, 1:] & ~padding[:, :-1]).sum(1) + padding[:, 0]
    return bool((begins > 1).any())


def _of_batch(padding: torch.Tensor | None, batch: int, length: int, device: torch.device) -> _Side:
    """One sequence per row of the batch. No size depends on a value: no host-device synchronisation."""
    if padding is None:
        padding = torch.ones(batch, length, dtype=torch.bool, device=device)
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
