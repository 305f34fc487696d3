"""Process groups: which ranks take part, whether they agree, and sums over them."""

from __future__ import annotations

import zlib
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Newer releases of torch have other names for the collectives on one tensor.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@torch.compiler.disable
def call_in_eager_mode(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch.compile breaks its graph here: the function communicates, and what it does depends on all ranks."""
    return function(*args, **kwargs)


def group_of(name: str, given: Any) -> dist.ProcessGroup:
    """The process group of an argument: a ProcessGroup, or a DeviceMesh of one dimension."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"{name}: a mesh of {given.ndim} dimensions must have one; select it by its name: mesh['cp']"
            )
        return given.get_group()
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}: this rank is not in the group")
    if not isinstance(given, dist.ProcessGroup):
        raise ValueError(f"{name}={given!r}: must be a torch.distributed process group, or a mesh of one dimension")
    return given


def agree(
    group: dist.ProcessGroup,
    device: torch.device,
    facts: dict[str, Any],
    values: dict[str, torch.Tensor],
    fault: Exception | None,
) -> None:
    """Raises an error on every rank if the ranks differ in a fact or in `values`, or if one of them has a `fault`.

    A collective call with different shapes would hang, or sum the wrong numbers. On a GPU the comparison is an assertion of
    the device, so that the host does not wait for it.
    """
    sums = [zlib.crc32(repr(fact).encode()) for fact in facts.values()]
    own = _to_device(torch.tensor([0 if fault is None else 1, *sums]), device)
    own = torch.cat([own, *(_checksum(value) for value in values.values())])
    world = dist.get_world_size(group)
    all_ranks = own.new_empty(world * len(own))
    all_gather(all_ranks, own, group=group)
    if fault is not None:
        raise fault
    all_ranks = all_ranks.view(world, -1)
    if device.type == "cuda":
        torch._assert_async((all_ranks == own).all())
        return
    faulty, *differing = (all_ranks != own).T.tolist()
    if any(faulty):
        raise RuntimeError(f"streamkl: rank {faulty.index(True)} of the group refused its arguments: see its message")
    compared = [*facts.items(), *((name, "the checksum of its values") for name in values)]
    for (name, fact), ranks in zip(compared, differing):
        if any(ranks):
            own_rank, other = dist.get_rank(group), ranks.index(True)
            raise ValueError(f"{name}: {fact} on rank {own_rank} of the group differs from that on rank {other}")


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """One number, on the device of the values, that depends on each of their bits and on their order."""
    bits = values.detach().float().flatten().view(torch.int32).long()
    return (bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum().view(1)


def _to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without host-device synchronization, which a copy of pageable memory needs."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


class SumOverRanks(torch.autograd.Function):
    """(sum of the losses of all ranks, sum of their row counts).

    The sum is one loss, of which every rank holds a copy: its gradient reaches the terms of each rank unchanged, times
    `factor`.
    """

    @staticmethod
    def forward(ctx, loss, count, group, factor):
        ctx.factor = factor
        sums = torch.stack([loss.double(), count.double()])
        dist.all_reduce(sums, group=group)
        loss, count = sums.to(loss.dtype)
        ctx.mark_non_differentiable(count)
        return loss, count

    @staticmethod
    def backward(ctx, grad_loss, _):
        return grad_loss * ctx.factor, None, None, None
