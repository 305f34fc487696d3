"""The loss of an indexer in the terms of training frameworks: Megatron-core's tensors, and a loss that rides on an output.

Megatron-core is not imported: its process groups and its DSAIndexerLossAutoScaler work with these functions.
"""

from __future__ import annotations

from typing import Any

import torch

from ._mean import nonzero
from ._options import Parallel, check_flags
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
    mask: torch.Tensor | None = None,
    varlen_starts: torch.Tensor | None = None,
    varlen_ends: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    query_valid_rows: torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
    *,
    use_relu: bool = True,
    lse_t: torch.Tensor | None = None,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``compute_dsa_indexer_loss`` of Megatron-core, from the indexer's tensors in place of their matrix of scores.

    The arguments after the indexer's are those of Megatron-core 0.19. Without ``mask`` and bounds the loss is causal, and
    query i attends to the keys up to i, also where there are more keys than queries.

    Args:
        index_query: ``[len, batch, index_heads, dim]``.
        index_weights: ``[len, batch, index_heads]``, which Megatron-core has scaled already.
        index_key: ``[len_k, batch, dim]``.
        topk_indices: ``[batch, len, top_k]``; read only if ``sparse_loss``.
        query: ``[len, batch, heads, dim]``, or packed ``[len, heads, dim]``; no gradient flows to it or to ``key``.
        key: ``[len_k, batch, key_heads, dim]``: latent attention's one key head need not be expanded.
        pg_collection: if its ``tp`` has several ranks, each holds some of the teacher's heads. Gradients are then those of the
            mean of all heads; the loss is the mean of the ranks' KLs.
        mask: f32 ``[len, len_k]`` or ``[batch, len, len_k]``: 0, or -inf to hide a key. Each row must show one range of keys,
            which moves forward from row to row. Its values are read, so a GPU is synchronized: prefer bounds.
        varlen_starts: ``[len]``: a query attends to no key whose position is before it.
        varlen_ends: ``[len]``: a query attends to the keys whose position is before it.
        key_positions: ``[len_k]``: the position of each key; default: its index.
        query_valid_rows: bool ``[len]`` or ``[batch, len]``: the rows that count; default: all.
        calculate_per_token_loss: the loss is the sum over the rows, not their mean.
        use_relu: ``dsa_indexer_scoring_relu`` of the configuration; ``False`` for GLM-5.
        lse_t: the LSE of the attention, f32 ``[batch, heads, len]``: of the list if ``sparse_loss``. Default: computed.
        loss_mask: weight of each row, ``[batch, len]``; the loss is then their weighted mean.

    Returns:
        ``loss_coeff`` times the mean KL of all rows. Pass it to ``DSAIndexerLossAutoScaler.apply(output, loss)``.

    Raises:
        ValueError: an argument does not fit. Bounds are called ``key_begin`` and ``key_end`` in its message.
    """
    check_flags(sparse_loss=sparse_loss, calculate_per_token_loss=calculate_per_token_loss)
    query, key = (tensor.detach() if tensor.dim() == 4 else tensor.detach().unsqueeze(1) for tensor in (query, key))
    len_q, batch, len_k = *query.shape[:2], len(key)
    if sparse_loss and topk_indices is None:
        raise ValueError("topk_indices: None must be the list of keys with sparse_loss=True")
    indices = topk_indices if sparse_loss else None
    if key_positions is not None:  # the keys in the order of their positions
        if varlen_starts is None:
            raise ValueError("key_positions: needs varlen_starts and varlen_ends")
        if key_positions.shape != (len_k,):
            raise ValueError(f"key_positions: shape {list(key_positions.shape)} must be [{len_k}]")
        key_positions, order = key_positions.sort()
        key, index_key = key[order], index_key[order]
        if indices is not None:
            indices = torch.where(indices < 0, -1, order.argsort()[indices.clamp(min=0)])
    group = getattr(pg_collection, "tp", None)
    split = group is not None and group.size() > 1
    weight = _weight_of_rows(query_valid_rows, loss_mask, batch, len_q)
    total = indexer_kl(
        query.transpose(0, 1), key.transpose(0, 1), index_query.transpose(0, 1), index_key.transpose(0, 1),
        index_weights.transpose(0, 1), indices, softmax_scale_t=softmax_scale, softmax_scale_s=1.0, relu=use_relu, lse_t=lse_t,
        row_weight=weight, reduction="sum", parallel=Parallel(tensor_group=group) if split else None,
        **_masks(mask, varlen_starts, varlen_ends, key_positions, batch, len_q, len_k, query.device),
    )  # fmt: skip
    if calculate_per_token_loss:
        return loss_coeff * total
    return loss_coeff * total / (max(batch * len_q, 1) if weight is None else nonzero(weight.sum()))


def _weight_of_rows(valid, loss_mask, batch, len_q):
    """The weight of each row, f32 [batch, len_q]; None: 1."""
    if valid is None:
        return loss_mask
    if valid.shape not in ((len_q,), (1, len_q), (batch, len_q)):
        raise ValueError(f"query_valid_rows: shape {list(valid.shape)} must be [{len_q}] or [{batch}, {len_q}]")
    valid = valid.bool().expand(batch, len_q)
    return valid.float() if loss_mask is None else torch.where(valid, loss_mask, 0.0)


def _masks(mask, starts, ends, positions, batch, len_q, len_k, device):
    """causal or row bounds, as indexer_kl takes them. `positions` do not decrease."""
    if (starts is None) != (ends is None):
        missing = "varlen_starts" if starts is None else "varlen_ends"
        raise ValueError(f"{missing} is missing: varlen_starts and varlen_ends must be given together")
    if mask is not None and starts is not None:
        raise ValueError("mask: must be None with varlen_starts and varlen_ends")
    for name, bound in ("varlen_starts", starts), ("varlen_ends", ends):
        if bound is not None and bound.shape != (len_q,):
            raise ValueError(f"{name}: shape {list(bound.shape)} must be [{len_q}]")
    if mask is not None:
        starts, ends = _bounds_of(mask, batch, len_q, len_k)
    elif starts is None:
        if len_q == len_k:
            return dict(causal=True)
        ends = torch.arange(1, len_q + 1, device=device)
    elif positions is not None:
        starts, ends = (_count_below(positions, bound) for bound in (starts, ends))
    bounds = dict(key_begin=starts, key_end=ends)
    return {name: bound.clamp(0, len_k).expand(batch, len_q) for name, bound in bounds.items() if bound is not None}


def _count_below(positions, bound):
    """The number of positions below each bound. searchsorted takes one type, and a framework has int32 and int64."""
    dtype = torch.promote_types(positions.dtype, bound.dtype)
    return torch.searchsorted(positions.to(dtype), bound.to(dtype))


def _bounds_of(mask, batch, len_q, len_k):
    """The range of keys that each row of an additive mask shows."""
    if mask.shape not in ((len_q, len_k), (batch, len_q, len_k)):
        raise ValueError(f"mask: shape {list(mask.shape)} must be [{len_q}, {len_k}] or [{batch}, {len_q}, {len_k}]")
    shown = mask == 0
    if not torch.equal(shown, mask != -torch.inf):
        raise ValueError("mask: must be 0, or -inf where it hides a key; the loss covers no bias of the logits")
    key = torch.arange(len_k, device=mask.device)
    end = torch.where(shown, key + 1, 0).amax(-1)
    begin = end - shown.sum(-1)
    empty = begin == end
    above = end.cummax(-1).values
    bounds = begin, end = torch.where(empty, above, begin), torch.where(empty, above, end)
    wrong = (shown != (key >= begin[..., None]) & (key < end[..., None])).any(-1)
    wrong[..., 1:] |= (begin.diff() < 0) | (end.diff() < 0)
    if wrong.any():
        *sequence, row = wrong.nonzero()[0].tolist()
        above = [*sequence, row - 1]
        fault = f"row {above} shows none" if row and empty[tuple(above)] else f"row {[*sequence, row]} does not"
        raise ValueError(
            "mask: each row must show one range of keys, which does not begin or end before that of the row above: "
            + fault
        )
    return bounds


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
    ``scale`` is that of the main loss: 1 / the tokens of all ranks, or a loss scale. Torch refuses to change the result in
    place: write ``x = x + output``.
    """
    for name, given in ("output", output), ("loss", loss):
        if not isinstance(given, torch.Tensor):
            raise ValueError(f"{name}: {type(given).__name__} must be a tensor")
    if loss.dim():
        raise ValueError(f"loss: shape {list(loss.shape)} must be a scalar")
    return _Attached.apply(output, loss, scale)
