"""The mean over the rows that attend to a key.

Query i of a sequence has position p = i + len_k - len_q and attends to the keys j < keys with p - left <= j <= p + right.
Such a key exists if p + right >= 0 and p - left <= keys - 1. So rows first <= i < end attend to a key, where

    first = len_q - len_k - right        end = len_q - len_k + keys + left        within 0..len_q
"""

from __future__ import annotations

import torch

from ._checks import sizes


def weighted(kl: torch.Tensor, row_weight: torch.Tensor | None) -> torch.Tensor:
    """A row of weight 0 counts as 0 even if its KL is NaN, as in padding."""
    return kl if row_weight is None else torch.where(row_weight == 0, 0.0, kl * row_weight)


def divided(rows: torch.Tensor, total: int | torch.Tensor) -> torch.Tensor:
    """The sum of all rows, divided by `total`."""
    if isinstance(total, torch.Tensor):
        return rows.sum() / total
    return rows.mean() if total == rows.numel() else rows.sum() * (1.0 / total)  # a mean is one launch, not two


def row_count(q_s, k_s, row_weight, lengths, options):
    """The number of these rows, or their total weight; 1 where that is 0. A number or a tensor."""
    cu_seqlens_q, cu_seqlens_k, key_lengths, key_begin, key_end = lengths
    heads_first, left = options.heads_first, options.window_left
    right = 0 if options.causal else options.window_right
    batch, heads, len_q = sizes(q_s.shape, cu_seqlens_q is not None, heads_first)
    len_k = k_s.shape[-2 if heads_first else -3]
    if key_begin is not None or key_end is not None:
        attending = _attending_mask(batch, len_q, len_k, lengths, left, right)
        if row_weight is None:
            return (attending.sum() * heads).clamp(min=1)
        return _not_zero((row_weight * attending.unsqueeze(-2)).sum())
    if cu_seqlens_q is None and key_lengths is None:
        first, end = _attending_rows(len_q, len_k, len_k, left, right)
        if row_weight is None:
            return max(batch * heads * (end - first), 1)
        return _not_zero(row_weight[..., first:end].sum())
    if cu_seqlens_q is None:
        first, end = _attending_rows(len_q, len_k, key_lengths, left, right)
    else:
        first, end = _attending_rows(cu_seqlens_q.diff(), cu_seqlens_k.diff(), cu_seqlens_k.diff(), left, right)
    if row_weight is None:
        return ((end - first).sum() * heads).clamp(min=1)
    row = torch.arange(len_q, device=q_s.device)
    if cu_seqlens_q is None:
        attending = (row >= first) & (row < end.unsqueeze(-1))
    else:
        sequence, row = _place_in_sequence(cu_seqlens_q, row)
        attending = (row >= (first if isinstance(first, int) else first[sequence])) & (row < end[sequence])
    return _not_zero((row_weight * attending.unsqueeze(-2)).sum())


def _place_in_sequence(cu_seqlens_q, row):
    """(sequence, index in it) of packed rows. A row after the last sequence gets that sequence, and an index outside of it."""
    sequence = torch.searchsorted(cu_seqlens_q[1:], row, right=True).clamp(max=cu_seqlens_q.shape[0] - 2)
    return sequence, row - cu_seqlens_q[sequence]


def _attending_mask(batch, len_q, len_k, lengths, left, right):
    """bool [batch, len_q], packed [total_q]: the rows that attend to a key, with row bounds."""
    cu_seqlens_q, cu_seqlens_k, key_lengths, key_begin, key_end = lengths
    row = torch.arange(len_q, device=(key_end if key_begin is None else key_begin).device)
    if cu_seqlens_q is None:
        keys = len_k if key_lengths is None else key_lengths.unsqueeze(-1)
        position, exists = (row + (len_k - len_q)).expand(batch, len_q), True
    else:
        sequence, row = _place_in_sequence(cu_seqlens_q, row)
        queries, keys = cu_seqlens_q.diff()[sequence], cu_seqlens_k.diff()[sequence]
        position, exists = row + keys - queries, row < queries
    begin = position - left if left >= 0 else torch.zeros_like(position)
    end = position + (right + 1) if right >= 0 else torch.full_like(position, len_k)
    begin = begin.clamp(min=0) if key_begin is None else begin.clamp(min=0).maximum(key_begin)
    end = end if key_end is None else end.minimum(key_end)
    return exists & (begin < end) & (begin < keys)


def _attending_rows(len_q, len_k, keys, left, right):
    """(first, end) of the rows of a sequence that attend to a key: numbers, or tensors if the lengths are tensors."""
    first = _clip(len_q - len_k - right, 0, len_q) if right >= 0 else 0
    end = _clip(len_q - len_k + keys + left, first, len_q) if left >= 0 else len_q
    if isinstance(keys, torch.Tensor):
        return first, torch.where(keys > 0, end, first)
    return first, end if keys > 0 else first


def _clip(value, lowest, highest):
    if isinstance(value, torch.Tensor):
        return value.clamp(min=lowest).clamp(max=highest)
    return min(max(value, lowest), highest)


def _not_zero(total):
    """If all weights are 0, the sum is 0 and so is the mean."""
    return torch.where(total == 0, 1.0, total)
