"""attention_kl and indexer_kl on DTensors that are sharded on batch or heads.

Rows of different batches and heads are independent: every rank computes the local shards, and the sums of the loss are reduced.
The operators return lists, for which torch.distributed.tensor.experimental.register_sharding has no placements.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any, Callable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._options import Parallel

_TENSORS = ("q_t", "k_t", "q_s", "k_s", "w_s", "indices")
_KEYS = ("k_t", "k_s")
_ROWS = ("row_weight", "lse_t", "lse_t_visible", "lse_s", "key_begin", "key_end", "key_lengths")
_SINKS = ("sink_t", "sink_s")


def call_on_shards(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`function` with its DTensors as local shards. The loss is that of all ranks, a replicated DTensor."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    _check_types(given)
    mesh = given["q_t"].device_mesh
    heads = 1 if given["layout"] == "bhnd" else 2
    splits = [_split_of(given, mesh, dim, heads) for dim in range(mesh.ndim)]
    parts = math.prod(mesh.size(dim) for dim, split in enumerate(splits) if split == "heads")
    _check_heads(given, heads, parts)
    batch = given["q_t"].shape[0]
    for name in (*_TENSORS, *_ROWS, *_SINKS):
        if isinstance(given.get(name), DTensor):
            given[name] = _local(name, given[name], splits, heads)
    groups = [mesh.get_group(dim) for dim, split in enumerate(splits) if split != "all"]
    given["parallel"] = replace(given["parallel"] or Parallel(), loss_group=groups) if groups else given["parallel"]
    answer = function(*bound.args, **bound.kwargs)

    row_split = [{"batch": Shard(0), "heads": Shard(1), "all": Replicate()}[split] for split in splits]

    def whole(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0:
            return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        shape = torch.Size((batch, value.shape[1] * parts, *value.shape[2:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(value, mesh, row_split, run_check=False, shape=shape, stride=stride)

    if not isinstance(answer, tuple):
        return whole(answer)
    loss, *others = answer
    if isinstance(others[0], tuple):  # IndexerRows
        return whole(loss), type(others[0])(*map(whole, others[0]))
    return (whole(loss), *map(whole, others))


def _check_types(given: dict[str, Any]) -> None:
    for name in (*_TENSORS, *_ROWS, *_SINKS):
        value = given.get(name)
        if isinstance(value, str):  # row_weight="mass"
            continue
        if value is not None and not isinstance(value, DTensor):
            raise ValueError(f"{name}: a plain tensor with DTensors: must be a DTensor, too")
        if value is not None and value.device_mesh != given["q_t"].device_mesh:
            raise ValueError(f"{name}: must be on the mesh of q_t")
    if given.get("pool") is not None:
        raise ValueError("pool: a pooled teacher takes no DTensors: pass local tensors, and reduce the loss")
    for name in "cu_seqlens_q", "cu_seqlens_k":
        if given.get(name) is not None:
            raise ValueError(f"{name}: packed sequences have no batch to shard: pass local tensors")
    if given["parallel"] is not None and given["parallel"].loss_group is not None:
        raise ValueError("parallel.loss_group: DTensors bring their own groups")


def _split_of(given: dict[str, Any], mesh, dim: int, heads: int) -> str:
    """What a mesh dimension splits: "batch", "heads", or nothing ("all")."""
    by_name = {name: given[name].placements[dim] for name in _TENSORS if given.get(name) is not None}
    meanings = {Replicate(): "all", Shard(0): "batch"}
    found = {}
    for name, placement in by_name.items():
        has_heads = given[name].dim() == 4  # some tensors of an indexer have no such dimension
        found[name] = meanings.get(placement, "heads" if placement == Shard(heads) and has_heads else "?")
    # A single key head serves the query heads of all ranks.
    split = {kind for name, kind in found.items() if not _is_shared(given, name, found, heads)}
    if len(split) == 1 and "?" not in split:
        return split.pop()
    where = f"mesh dimension {mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else dim}"
    given_text = ", ".join(f"{name} {placement}" for name, placement in by_name.items())
    raise ValueError(
        f"{given_text} on {where}: all must be Shard(0) (batch), Shard({heads}) (heads, where a tensor has that dimension) or "
        "Replicate(); for shards of the sequence pass local tensors and parallel.context_group, for index heads whole ones"
    )


def _check_heads(given: dict[str, Any], heads: int, parts: int) -> None:
    """Shards of heads must be equal: else a rank would pair its queries with the key heads of others."""
    for name in _TENSORS:
        tensor = given.get(name)
        if tensor is not None and Shard(heads) in tensor.placements and tensor.shape[heads] % parts:
            raise ValueError(
                f"{name}: {tensor.shape[heads]} heads: must be a multiple of the {parts} ranks that share them"
            )


def _is_shared(given: dict[str, Any], name: str, found: dict[str, str], heads: int) -> bool:
    has_one_head = given[name].dim() == 3 or given[name].shape[heads] == 1
    return name in _KEYS and has_one_head and found[name] == "all" and found["q_s"] == "heads"


def _local(name: str, tensor: DTensor, splits: list[str], heads: int) -> torch.Tensor:
    """The local shard. The gradient of what ranks share is a sum over them: key heads, sinks, weights for all heads."""
    grad_placements = []
    for placement, split in zip(tensor.placements, splits):
        expected = {"all": Replicate(), "batch": Shard(0), "heads": Shard(1) if tensor.dim() == 3 else Replicate()}[
            split
        ]
        if name in _SINKS:
            expected = Shard(0) if split == "heads" else Replicate()
        if name not in _TENSORS and placement != expected:
            raise ValueError(f"{name}: {placement} must be {expected}, as the tensors are split by {split}")
        shared = placement == Replicate() and (
            name in (*_KEYS, "row_weight") and split == "heads" or name in _SINKS and split == "batch"
        )
        grad_placements.append(Partial() if shared else placement)
    return tensor.to_local(grad_placements=grad_placements)
