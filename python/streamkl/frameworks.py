"""The loss of an indexer in the terms of training frameworks: Megatron-core's tensors, and a loss that rides on an output.

Megatron-core is not imported: its process groups and its DSAIndexerLossAutoScaler work with these functions.
"""

from __future__ import annotations

from typing import Any

import torch

from ._options import Parallel
from .indexer import indexer_kl


def megatron_indexer_loss(
    index_query: torch.Tensor,
    index_weights: torch.Tensor,
    index_key: torch.Tensor,
    topk_indices: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    pg_collection: Any = None,
    *,
    lse_t: torch.Tensor | None = None,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``compute_dsa_indexer_loss`` of Megatron-core, from the indexer's tensors in place of their matrix of scores.

    Args:
        index_query: ``[len, batch, index_heads, dim]``.
        index_weights: ``[len, batch, index_heads]``, which Megatron-core has scaled already.
        index_key: ``[len, batch, dim]``.
        topk_indices: ``[batch, len, top_k]``; read only if ``sparse_loss``.
        query: ``[len, batch, heads, dim]``; no gradient flows to it or to ``key``.
        key: ``[len, batch, key_heads, dim]``: latent attention's one key head need not be expanded.
        pg_collection: if its ``tp`` has several ranks, each holds some of the teacher's heads.
        lse_t: the LSE of the attention, f32 ``[batch, heads, len]``: of the list if ``sparse_loss``. Default: computed.
        loss_mask: weight of each row, ``[batch, len]``; the loss is then their weighted mean.

    Returns:
        ``loss_coeff`` times the mean KL of all rows, causal. Pass it to ``DSAIndexerLossAutoScaler.apply(output, loss)``.
    """
    group = getattr(pg_collection, "tp", None)
    split = group is not None and group.size() > 1
    return loss_coeff * indexer_kl(
        query.detach().transpose(0, 1), key.detach().transpose(0, 1), index_query.transpose(0, 1), index_key.transpose(0, 1),
        index_weights.transpose(0, 1), topk_indices if sparse_loss else None, causal=True, softmax_scale_t=softmax_scale, softmax_scale_s=1.0, lse_t=lse_t, row_weight=loss_mask,
        parallel=Parallel(tensor_group=group) if split else None,
    )  # fmt: skip


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, loss, scale):
        ctx.scale, ctx.one = scale, torch.ones_like(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, ctx.one * ctx.scale, None


def attach_loss(output: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """The output, unchanged; a backward through it also differentiates ``scale * loss``.

    A layer trains its indexer this way without a change of what the model returns: torchtitan injects its auxiliary losses so.
    ``scale`` is that of the main loss: 1 / the tokens of all ranks, or a loss scale.
    """
    if loss.dim():
        raise ValueError(f"loss: shape {list(loss.shape)} must be a scalar")
    return _Attached.apply(output, loss, scale)
