"""The mean over the rows that attend to a key.

Such a row has a finite LSE: that of a row without visible keys is -inf, or inf in the results of some flash attentions.
"""

from __future__ import annotations

from typing import Any

import torch


def weighted(kl: torch.Tensor, row_weight: torch.Tensor | None) -> torch.Tensor:
    """A row of weight 0 counts as 0 even if its KL is NaN or infinite, as in padding."""
    if row_weight is None:
        return kl
    if row_weight.requires_grad:  # the gradient of a weight is the KL, also where the weight is 0
        return torch.where(row_weight == 0, kl.nan_to_num(0.0, 0.0, 0.0), kl) * row_weight
    return torch.where(row_weight == 0, 0.0, kl * row_weight)


def divided(rows: torch.Tensor, total: int | torch.Tensor) -> torch.Tensor:
    """The sum of all rows, divided by `total`, or by 1 if that is 0: then the sum is 0, too."""
    if isinstance(total, torch.Tensor):
        return rows.sum() / nonzero(total)
    if total == rows.numel() != 0:
        return rows.mean()  # one launch, not two
    return rows.sum() * (1.0 / max(total, 1))


def nonzero(total: torch.Tensor) -> torch.Tensor:
    return torch.where(total == 0, 1, total)


def attends_everywhere(q_s, k_s, lengths, options) -> bool:
    """Whether shapes alone tell that every row attends to a key: that of its own position, which is in every window."""
    if torch.compiler.is_compiling():
        return False  # the result should not depend on symbols for sizes
    dim = -2 if options.heads_first else -3
    if min(q_s.dim(), k_s.dim()) < 3:
        return False  # the checks of the operator report it
    return all(given is None for given in lengths) and q_s.shape[dim] <= k_s.shape[dim]


def total_weight(kl, lse_s: torch.Tensor | None, row_weight, lengths) -> Any:
    """The number of rows that attend to a key, or their total weight. lse_s=None: all rows do."""
    if lse_s is None:
        return kl.numel() if row_weight is None else row_weight.sum()
    attending = ~lse_s.isinf()
    if lengths.cu_seqlens_q is not None:  # a given LSE may be anything after the last sequence
        attending &= torch.arange(lse_s.shape[-1], device=lse_s.device) < lengths.cu_seqlens_q[-1]
    return attending.sum() if row_weight is None else torch.where(attending, row_weight, 0.0).sum()
