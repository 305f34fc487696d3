"""streamkl.parallel.shard and unshard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._options import ShardLayout
from ._groups import all_gather, group_of
from ._layout import gather_order, inverse_of, layout_of


def shard(
    tensor: torch.Tensor,
    group: Any,
    dim: int = 1,
    *,
    layout: ShardLayout | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The part of a tensor that this rank of a context-parallel group holds.

    Shard tokens, labels and positions with it: ``position_ids = shard(torch.arange(length)[None], group)``.

    Args:
        tensor: a whole tensor, equal on every rank.
        group: process group, or mesh of one dimension.
        dim: the dimension of the tokens. Its length must be a multiple of the size of the group; zigzag: of twice that.
        layout: as in :class:`streamkl.Parallel`; default: zigzag.
        cu_seqlens: of the whole, for packed sequences: each is cut, so that the shard has ``cu_seqlens // size``.
    """
    group = group_of("group", group)
    cut = layout_of(layout, dist.get_world_size(group))
    length, chunks = tensor.shape[dim], cut.world * cut.chunks_per_rank
    lengths = [length] if cu_seqlens is None else cu_seqlens.diff().tolist()
    if sum(lengths) > length:
        raise ValueError(f"cu_seqlens: has {sum(lengths)} tokens: must be at most {length}, those of the tensor")
    for each in lengths:
        if each % chunks:
            raise ValueError(
                f"{each} tokens: must be a multiple of {chunks} for {cut.world} ranks and layout={cut.name!r}; pad the sequence"
            )
    if length % cut.world:
        raise ValueError(f"{length} tokens: must be a multiple of {cut.world}, the size of the group")
    own_cu_seqlens = None if cu_seqlens is None else cu_seqlens // cut.world
    order = inverse_of(gather_order(cut, length // cut.world, own_cu_seqlens, tensor.device))
    return tensor.index_select(dim, order.view(cut.world, -1)[dist.get_rank(group)])


def unshard(
    tensor: torch.Tensor,
    group: Any,
    dim: int = 1,
    *,
    layout: ShardLayout | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole tensor from its shards, on every rank: the inverse of :func:`shard`. No gradient flows.

    Args:
        cu_seqlens: those of the shard.
    """
    group = group_of("group", group)
    cut = layout_of(layout, dist.get_world_size(group))
    own = tensor.detach().movedim(dim, 0).contiguous()
    gathered = own.new_empty(cut.world * own.shape[0], *own.shape[1:])
    all_gather(gathered, own, group=group)
    order = gather_order(cut, own.shape[0], cu_seqlens, tensor.device)
    return gathered.index_select(0, order).movedim(0, dim)
