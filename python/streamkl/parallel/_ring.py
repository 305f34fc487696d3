"""Context parallelism as a ring: key shards visit every rank, and ranks keep row states, not keys.

A step computes with the shard of one rank while the next shard travels. Row states of the shards merge into the LSEs and the KL
of all keys. The backward of a shard uses these global LSEs; its dk travels along with it, summed in f32, and arrives
complete at its own rank. A rank holds two shards of keys and three of f32 dk at a time, whatever the number of ranks.
"""

from __future__ import annotations

from typing import Iterator, Sequence

import torch
import torch.distributed as dist

from .. import _library as lib
from .._checks import rounds_later
from .._ops import per_tensor, row_names
from .._options import Lengths
from .._problem import DK_S, DK_T
from .._states import partial, states_finish, states_merge
from ._layout import Layout
from ._shards import Shards, split_arguments

streamkl = torch.ops.streamkl

_LSES = lib.LSE_T | lib.LSE_S
_OF_STATES = lib.KL | _LSES
_KEYS = {1: DK_T, 3: DK_S}  # places of the keys among the tensors


class Ring:
    """The operators of _ops.py on shards. Row vectors and dq are those of the rank's rows, dk of its keys."""

    def __init__(self, group: dist.ProcessGroup, layout: Layout) -> None:
        self.group, self.layout, self.rank = group, layout, dist.get_rank(group)
        self.next, self.previous = (
            dist.get_global_rank(group, (self.rank + step) % layout.world) for step in (1, -1)
        )

    def forward(self, *arguments) -> list[torch.Tensor]:
        tensors, (lse_t, rows), rest = split_arguments(arguments, 2)
        shards = Shards(self.layout, self.rank, tensors, rest)
        if rows & ~_OF_STATES:
            names = ", ".join(row_names(rows & ~_OF_STATES))
            raise ValueError(f"parallel.comm='ring': row states do not give {names}; use comm='allgather'")
        if rows & ~_LSES == 0:
            return self._lses(shards, lse_t, rows)
        if lse_t is None and _needs_lse_t(shards):
            (lse_t,) = self._lses(shards, None, lib.LSE_T)
        merged = None
        for called, lengths in self._visits(shards):
            end = called[1].shape[shards.length_dim]
            states = partial(*called, lse_t, 0, end, *lengths, *shards.options)
            merged = states if merged is None else states_merge(merged, states)
            del called  # frees its keys before the next ones arrive
        own, lengths = self._own(shards)
        if tensors[5] is None:
            return states_finish(*own, merged, lse_t, rows, *lengths, *shards.options)
        return self._finish_with_sinks(shards, own, merged, lse_t, rows)

    def _finish_with_sinks(self, shards: Shards, own: tuple, merged, lse_t, rows: int) -> list[torch.Tensor]:
        """Whether a row attends to a key, and so has a sink, does not depend on one shard: its bounds are left out.

        The KL is made of both LSEs, which are computed even if they are not asked for.
        """
        lengths = Lengths(shards.lengths.cu_seqlens_q, shards.lengths.cu_seqlens_k, None, None, None)
        made = states_finish(*own, merged, lse_t, _OF_STATES, *lengths, *shards.options)
        begin, end = shards.bounds
        attending = (end > begin).unsqueeze(-2)
        named = zip(row_names(_OF_STATES), made)
        found = {name: torch.where(attending, row, 0.0 if name == "kl" else -torch.inf) for name, row in named}
        return [found[name] for name in row_names(rows)]

    def _lses(self, shards: Shards, lse_t, rows: int) -> list[torch.Tensor]:
        """LSEs of all keys from those of the shards, to which sinks are added once."""
        found: list[torch.Tensor] = []
        for called, lengths in self._visits(shards):
            without_sinks = (*called[:5], None, None, called[-1])
            made = streamkl.forward(*without_sinks, lse_t, rows, *lengths, *shards.options)
            del called, without_sinks
            found = [torch.logaddexp(*pair) for pair in zip(found, made)] if found else made
        sinks = dict(lse_t=shards.tensors[5], lse_s=shards.tensors[6])
        return [_with_sink(lse, sinks[name]) for name, lse in zip(row_names(rows), found)]

    def backward(self, *arguments) -> list[torch.Tensor]:
        tensors, rows, rest = split_arguments(arguments, 5)
        return self._backward(Shards(self.layout, self.rank, tensors, rest), rows, one_pass=False)

    def forward_backward(self, *arguments) -> list[torch.Tensor]:
        """Two passes over the ring: a KL of a shard alone can be negative, which one pass over the keys does not return."""
        tensors, (lse_t, lse_s, row_weight, rows), rest = split_arguments(arguments, 4)
        shards = Shards(self.layout, self.rank, tensors, rest)
        made = self.forward(*tensors, lse_t, rows, *rest)
        kl = made[0]  # OnePass always asks for it
        weight = torch.ones_like(kl) if row_weight is None else row_weight
        return [*made, *self._backward(shards, (lse_t, lse_s, kl, None, weight), one_pass=True)]

    def _backward(self, shards: Shards, rows: Sequence, one_pass: bool) -> list[torch.Tensor]:
        asked = shards.asked.gradients
        wanted_keys = [place for place, bit in _KEYS.items() if asked & bit]
        sums: dict[int, torch.Tensor] = {}
        traveling = _Traveling(self)
        for called, lengths in self._visits(shards):
            made = per_tensor(streamkl.backward(*called, *rows, *lengths, *shards.options), asked, None)
            del called
            arrived = traveling.wait()
            for place in [place for place, gradient in enumerate(made) if gradient is not None]:
                gradient, made[place] = made[place], None  # frees each gradient when it has been added
                if place in wanted_keys:
                    gradient = shards.length_first(gradient).contiguous()
                    sums[place] = gradient.add_(arrived.pop(0)) if arrived else gradient
                else:
                    sums[place] = sums[place].add_(gradient) if place in sums else gradient
                del gradient
            traveling.send([sums[place] for place in wanted_keys])
        for place, gradient in zip(wanted_keys, traveling.wait()):  # the last step brings them home
            sums[place] = shards.length_back(gradient)
        stays_f32 = one_pass and rounds_later(asked, shards.dtypes)
        return [sums[place] if stays_f32 else sums[place].to(shards.dtypes[place]) for place in sorted(sums)]

    def _own(self, shards: Shards) -> tuple:
        """(tensors, lengths) with the keys of this rank."""
        return (*shards.tensors[:-1], shards.indices_of_shard(self.rank)), shards.lengths_of_shard(self.rank)

    def _visits(self, shards: Shards) -> Iterator[tuple]:
        """(tensors, lengths) with the keys of each rank, starting with this one. The caller deletes the tensors."""
        q_t, k_t, q_s, k_s, w_s, *sinks, _ = shards.tensors
        keys = [shards.length_first(key).contiguous() for key in (k_t, k_s)]
        traveling = _Traveling(self)
        for step in range(self.layout.world):
            source = (self.rank - step) % self.layout.world
            if step + 1 < self.layout.world:
                traveling.send(keys)
            here_t, here_s = map(shards.length_back, keys)
            yield (
                (q_t, here_t, q_s, here_s, w_s, *sinks, shards.indices_of_shard(source)),
                shards.lengths_of_shard(source),
            )
            del here_t, here_s
            if step + 1 < self.layout.world:
                keys = traveling.wait()


def _with_sink(lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """A row that attends to no key has no sink."""
    return lse if sink is None else torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sink.unsqueeze(-1)))


def _needs_lse_t(shards: Shards) -> bool:
    """Teacher groups and indexers average probabilities, which need normalized ones."""
    q_t, _, q_s, _, w_s, *_ = shards.tensors
    return w_s is not None or q_t.shape[shards.heads_dim] != q_s.shape[shards.heads_dim]


class _Traveling:
    """Tensors on their way to the next rank, while those of the previous rank arrive."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.works: list = []
        self.sent: list[torch.Tensor] = []
        self.received: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor]) -> None:
        ring = self.ring
        self.sent, self.received = tensors, [torch.empty_like(tensor) for tensor in tensors]
        sends = [dist.P2POp(dist.isend, tensor, ring.next, ring.group) for tensor in self.sent]
        receives = [dist.P2POp(dist.irecv, tensor, ring.previous, ring.group) for tensor in self.received]
        self.works = dist.batch_isend_irecv(sends + receives) if tensors else []

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        self.works, self.sent = [], []
        return self.received
