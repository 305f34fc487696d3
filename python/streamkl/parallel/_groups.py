"""Process groups: which ranks take part, whether they agree, and sums over them."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Newer releases of torch have other names for the collectives on one tensor.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


# A rank with a fault may not know how many facts the others compare.
_FACTS = 80


def agree(
    group: dist.ProcessGroup,
    device: torch.device,
    facts: dict[str, Any],
    values: dict[str, torch.Tensor | None],
    fault: Exception | None,
) -> None:
    """Raises an error on every rank if the ranks differ in a fact or in `values`, or if one of them has a `fault`.

    A collective call with different shapes would hang, or sum the wrong numbers. On a GPU the comparison is an assertion of
    the device, so that the host does not wait for it.
    """
    sums = [zlib.crc32(repr(fact).encode()) for fact in facts.values()]
    numbers = [0 if fault is None else 1, *sums, *[0] * (_FACTS - len(sums))]
    own = _to_device(torch.tensor(numbers, device="cpu"), device)
    own = torch.cat([own, *(_checksum(value, device) for value in values.values())])
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
    compared = [
        *facts.items(),
        *[("", "")] * (_FACTS - len(facts)),
        *((name, "the checksum of its values") for name in values),
    ]
    for (name, fact), ranks in zip(compared, differing):
        if any(ranks):
            own_rank, other = dist.get_rank(group), ranks.index(True)
            raise ValueError(f"{name}: {fact} on rank {own_rank} of the group differs from that on rank {other}")


def _checksum(values: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """One number on the device that depends on each bit of the values and on their order."""
    if values is None:
        return torch.zeros(1, dtype=torch.int64, device=device)
    values = values.detach().to(device).flatten()
    bits = values.float().view(torch.int32) if values.is_floating_point() else values
    return (bits.long() * torch.arange(1, len(bits) + 1, device=device)).sum().view(1)


def _to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without host-device synchronization, which a copy of pageable memory needs."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


class SumOverRanks(torch.autograd.Function):
    """The sums of a loss, of its row count and of a status over all ranks.

    The sum is one loss, of which every rank holds a copy: its gradient reaches the terms of each rank unchanged.
    """

    @staticmethod
    def forward(ctx, loss, count, status, group):
        sums = torch.stack([loss.double(), count.double(), status])
        dist.all_reduce(sums, group=group)
        loss, count = sums[:2].to(loss.dtype)
        status = sums[2].clone()
        ctx.mark_non_differentiable(*(() if ctx.needs_input_grad[1] else (count,)), status)
        return loss, count, status

    @staticmethod
    def backward(ctx, grad_loss, grad_count, _):
        return grad_loss, grad_count if ctx.needs_input_grad[1] else None, None, None
