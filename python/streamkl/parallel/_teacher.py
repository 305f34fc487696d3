"""Tensor parallelism over the teacher heads of a student head.

The target of a student head is the mean P of its teacher heads, and rank n holds r_n of them, with mean P_n. So with

    c_n = r_n Z_n / sum_m r_m Z_m        Z_n: the mass of rank n under a wider LSE, else 1

P is sum_n c_n P_n. The cross-entropy and all gradients of the student are linear in P: ranks exchange one number per row,
and no scores. The entropy of P is not linear. Ranks sum the KLs of their own means instead, sum_n c_n KL(P_n || S), which
is the KL of P plus a term that does not depend on the student: how far the P_n are from each other.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .. import _library as lib
from .._call import row_names
from ._shards import split_arguments

_LINEAR = ("kl", "cross_entropy", "entropy", "mass")


class TeacherShards:
    """The operators of a student that all ranks hold and a teacher whose heads are spread over them, equally many each."""

    def __init__(self, group: dist.ProcessGroup, operators) -> None:
        self.group, self.operators, self.world = group, operators, dist.get_world_size(group)
        self.share: torch.Tensor | float = 1 / self.world  # c_n, of each row if an LSE is wider

    def forward(self, *arguments) -> list[torch.Tensor]:
        tensors, (lse_t, rows), rest = split_arguments(arguments, 2)
        wanted = rows | (0 if lse_t is None else lib.LSE_T)
        named = dict(zip(row_names(wanted), self.operators.forward(*tensors, lse_t, wanted, *rest)))
        if lse_t is not None and rows & lib.KL:
            self.share = self._shares(lse_t, named["lse_t"], named["kl"])
        self._sum_rows(named)
        return [named[name] for name in row_names(rows)]

    def _shares(self, lse_t: torch.Tensor, over_visible: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
        """c_n. The mass of the visible keys is by how much their LSE is below the given one, equally for all heads of a group."""
        group_size = lse_t.shape[-2] // kl.shape[-2]
        lower = (
            over_visible.unflatten(-2, (-1, group_size))[..., 0, :] - lse_t.unflatten(-2, (-1, group_size))[..., 0, :]
        )
        lower = torch.where(lower.isnan(), 0.0, lower)  # a row without visible keys has no mass, and no gradient
        largest = lower.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        # Relative to the largest of all ranks no row with visible keys underflows.
        mass = (lower - largest.clamp(min=torch.finfo(lower.dtype).min)).exp()
        total = mass.clone()
        dist.all_reduce(total, group=self.group)
        return mass / total.clamp(min=torch.finfo(total.dtype).tiny)

    def _sum_rows(self, named: dict[str, torch.Tensor]) -> None:
        linear = [name for name in _LINEAR if name in named]
        if linear:
            share = {name: 1 / self.world if name == "mass" else self.share for name in linear}
            sums = torch.stack([named[name] * share[name] for name in linear])
            dist.all_reduce(sums, group=self.group)
            named.update(zip(linear, sums))

    def backward(self, *arguments) -> list[torch.Tensor]:
        tensors, (*rows, grad_kl), rest = split_arguments(arguments, 5)
        return self._sum(self.operators.backward(*tensors, *rows, grad_kl * self.share, *rest))

    def forward_backward(self, *arguments) -> list[torch.Tensor]:
        tensors, (lse_t, lse_s, row_weight, rows), rest = split_arguments(arguments, 4)
        weight = torch.full_like(lse_s, 1 / self.world) if row_weight is None else row_weight / self.world
        made = self.operators.forward_backward(*tensors, lse_t, lse_s, weight, rows, *rest)
        names = row_names(rows)
        named = dict(zip(names, made))
        self._sum_rows(named)
        return [*(named[name] for name in names), *self._sum(made[len(names) :])]

    def _sum(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Every rank gets the whole gradient of the student."""
        summed = [gradient.float().contiguous() for gradient in gradients]
        for gradient in summed:
            dist.all_reduce(gradient, group=self.group)
        return [each.to(gradient.dtype) for each, gradient in zip(summed, gradients)]
