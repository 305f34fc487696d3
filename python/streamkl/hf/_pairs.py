"""The KL of one student layer and one of its teacher layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .. import _library as lib
from .._options import Direction, Parallel
from .._attention_kl import attention_kl
from .._carried import Term, plan_of, term_of
from .._ops import carries_kl, supports
from ..losses import relation_heads
from . import _maps as maps
from ._keys import Keys
from ._layers import Layer
from ._proof import attend
from ._rows import Rows, pack_rows

Relation = Literal["qk", "qq", "kk", "vv"]
RELATIONS = ("qk", "qq", "kk", "vv")
Sinks = Literal["both", "keys only"]


class Apart(Exception):
    """Why a KL is computed apart from the student's attention. `lasts`: for every batch."""

    def __init__(self, why: str, lasts: bool = False) -> None:
        super().__init__(why)
        self.lasts = lasts


@dataclass
class RowCache:
    """Layers of a forward share their masks: what depends on values of a mask is computed once per loss.

    They also share the sample of their rows, of which `share` is the size.
    """

    share: float = 1.0
    _common: dict[tuple[int, int], tuple[Keys, bool]] = field(default_factory=dict)
    _rows: dict[tuple, tuple[Any, Rows]] = field(default_factory=dict)
    _uniform: dict[int, torch.Tensor] = field(default_factory=dict)

    def common(self, t: Keys, s: Keys) -> tuple[Keys, bool]:
        """The keys that both attend to, and whether these are all keys of both."""
        key = (id(t), id(s))
        if key not in self._common:
            self._common[key] = (s, True) if s.equals(t) else (s.both(t), False)
        return self._common[key]

    def rows(self, t: Layer, s: Layer, where: str) -> Rows:
        keys, _ = self.common(t.visible, s.visible)
        used = (keys, t.counted, s.counted)
        key = (*map(id, used), s.q.shape[0])
        if key not in self._rows:
            counted = [each.to(keys.begin.device) for each in used[1:] if each is not None]
            both = None if not counted else counted[0] & counted[-1]
            packed = pack_rows(keys, both, s.q.shape[0], where, self.share, self._draw)
            self._rows[key] = (used, packed)  # keeps their ids
        return self._rows[key][1]

    def _draw(self, count: int) -> torch.Tensor:
        """Random numbers of torch's generator on the CPU: neither the device nor the number of layers changes them."""
        if count not in self._uniform:
            self._uniform[count] = torch.rand(count, dtype=torch.float64)
        return self._uniform[count]


def _same(made_of: tuple, now: tuple) -> bool:
    """Whether an early term was made of the tensor, the rows and the direction that loss() has now."""
    return made_of[0] is now[0] and made_of[1] is now[1] and made_of[2] == now[2]


def _narrower(side: int, limit: int) -> int:
    """One side of a window_size, whose -1 is no limit, and at most `limit`."""
    return limit if side < 0 else min(side, limit)


@dataclass
class Pair:
    where: str
    t: Layer
    s: Layer
    heads: dict[int, int] | None  # {student head: teacher head}
    sinks: Sinks = "both"
    relation_heads: int | None = None  # heads of the relations other than qk
    _kept: Any = None  # arguments() that a proof has read and the loss takes

    def loss(
        self, row_weight: torch.Tensor | None, direction: Direction, relations: tuple[Relation, ...], temperature: float,
        cache: RowCache, parallel: Parallel | None,
    ) -> torch.Tensor:  # fmt: skip
        """The mean KL of the relations."""
        losses = []
        for relation in relations:
            tensors, options, rows = self.arguments(cache, relation, temperature)
            if parallel:
                options = {**self._of_shards(options, rows), "parallel": parallel}
            heads = tensors[2].shape[-3]
            if row_weight is not None and row_weight.dim() == 3 and row_weight.shape[1] != heads:
                raise ValueError(f"{self.where}: relation {relation!r} compares {heads} key heads of the student, and row_weight and "
                                 f"head_weight weight its {row_weight.shape[1]} heads: leave out the relation or the weights")  # fmt: skip
            mean, factor = rows.mean(row_weight, heads=heads)
            options |= mean
            loss = attention_kl(*tensors, direction=direction, **options)
            losses.append(loss if factor is None else loss * factor)
        loss = torch.stack(losses).mean()
        return loss if temperature == 1.0 else loss * temperature**2

    def carry(
        self, row_weight: torch.Tensor | None, direction: Direction, cache: RowCache, with_value: bool
    ) -> torch.Tensor:
        """Gives this KL to the backward of the student's attention, and returns it; without its value it is 0.

        Raises:
            Apart: that cannot carry it.
        """
        if self.s.handle is None:
            raise Apart(self.s.apart or "no attention has run")
        loss, slot = self.s.handle.loss, self.s.handle.slot
        if slot.term is not None and slot.early is None:
            raise Apart("its attention carries another KL already")
        early, made_of = slot.term, slot.early
        slot.term = slot.early = None
        try:
            rows = self.carried_rows(cache)
            if early is not None and made_of is not None and _same(made_of, (self.t.q, rows, direction)):
                slot.term = early
                if row_weight is not None:
                    mean, _ = rows.mean(row_weight, heads=self.s.q.shape[1])
                    early.weigh(mean["row_weight"], rows.pack_queries(self.s.q))
            else:
                term, q_s, k_s = self.term(row_weight, direction, cache, with_value)
                if not carries_kl(term.q_t, term.k_t, q_s, k_s, term.lengths, term.options):
                    raise Apart("no kernel computes the KL in its attention's backward", lasts=True)
                slot.term, slot.kl = term, None
                if with_value:
                    with torch.no_grad():
                        slot.kl = term.unpacked(term.measure(q_s, k_s), self.s.q.shape[0])
        except Apart as why:
            slot.apart = str(why) if why.lasts else None
            raise
        slot.apart = None
        if slot.kl is None:
            return loss
        return loss + slot.weigh()

    def carried_rows(self, cache: RowCache) -> Rows:
        """The rows of a KL that an attention carries: all that it has.

        Raises:
            Apart: it has others.
        """
        if self.heads is not None:
            raise Apart("head_map", lasts=True)
        if self.sinks == "both" and (self.t.sink is not None or self.s.sink is not None):
            raise Apart("attention sinks", lasts=True)
        if not self.has_same_keys(cache):
            raise Apart("the teacher attends to other keys")
        self._check()
        rows = cache.rows(self.t, self.s, self.where)
        if rows.leaves_out:
            raise Apart("padding")  # rows of padding may have gradients, too
        if rows.has_bounds:
            raise Apart("no causal mask, window or packed sequences describe its keys")
        return rows

    def term(
        self, row_weight: torch.Tensor | None, direction: Direction, cache: RowCache, with_value: bool = True
    ) -> tuple[Term, torch.Tensor, torch.Tensor]:
        """The KL as an attention carries it, and the student's queries and keys, packed."""
        (q_t, k_t, q_s, k_s), options, rows = self.arguments(cache)
        mean, _ = rows.mean(row_weight, heads=q_s.shape[-3])
        lse_t = options.pop("lse_t")
        del options["lse_s"]  # the backward has it
        how = dict(with_value=with_value, packs_batch=rows.queries is not None)
        return term_of(q_t, k_t, q_s, k_s, lse_t, direction, **mean, **options, **how), q_s, k_s

    def early_term(self, direction: Direction, cache: RowCache) -> tuple[Term, tuple] | None:
        """The term of an attention that has not run, without weights of rows, and what it is made of.

        None: no kernel computes the attention and its KL.

        Raises:
            Apart: the attention cannot carry it.
        """
        rows = self.carried_rows(cache)
        term, q_s, k_s = self.term(None, direction, cache)
        term.plan = plan_of(term.q_t, term.k_t, q_s, k_s, rows.pack_keys(self.s.operand("v")), None, term.lengths, term.options)
        runs = all(supports(term.plan, op) for op in (lib.ATTENTION_FORWARD, lib.ATTENTION_BACKWARD))
        return (term, (self.t.q, rows, direction)) if runs else None

    def _of_shards(self, options: dict[str, Any], rows: Rows) -> dict[str, Any]:
        """Options that hold for the whole sequence: windows may be longer than a shard, and LSEs may be those of its keys alone."""
        if rows.queries is not None:
            raise ValueError(
                f"{self.where}: padding and packed sequences are not supported under context parallelism"
            )
        left, right = options["window_size"]
        for layer in self.t, self.s:
            if layer.window is not None:
                left, right = (_narrower(side, layer.window - 1) for side in (left, right))
        return {**options, "window_size": (left, right), "lse_t": None, "lse_s": None}

    def row_losses(self, direction: Direction, cache: RowCache, temperature: float = 1.0) -> torch.Tensor:
        """The attention KL of each row, [batch, heads_s, len_q], NaN for padding; not multiplied by temperature**2."""
        tensors, options, rows = self.arguments(cache, "qk", temperature)
        kl = attention_kl(*tensors, direction=direction, reduction="none", **options)
        return rows.unpack_rows(kl, self.s.q.shape[0], self.s.q.shape[2])

    def row_probabilities(self, rows: list[int], cache: RowCache) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention of some rows, [batch, heads_s, rows, len_k] of teacher and student.

        A head's teacher is the mean of its group.
        """
        self._check()
        (q_t, k_t, q_s, k_s), _ = self._tensors("qk", cache, 1.0)
        seen = cache.common(self.t.visible, self.s.visible)[0].of_rows(torch.tensor(rows, device=q_s.device))
        sinks = self._sinks() if self.sinks == "both" else {}
        p = attend(q_t[:, :, rows], k_t, self.t.scale, self.t.softcap, sinks.get("sink_t"), seen).p
        s = attend(q_s[:, :, rows], k_s, self.s.scale, self.s.softcap, sinks.get("sink_s"), seen).p
        return p.unflatten(1, (s.shape[1], -1)).mean(2), s

    def arguments_to_prove(self, cache: RowCache) -> tuple[list[torch.Tensor], dict[str, Any], Rows]:
        """The arguments of the attention, which the next call of arguments() returns again: packing them takes time."""
        self._kept = self.arguments(cache)
        return self._kept

    def arguments(
        self, cache: RowCache, relation: Relation = "qk", temperature: float = 1.0
    ) -> tuple[list[torch.Tensor], dict[str, Any], Rows]:
        """Tensors and options of attention_kl, and how the rows of the batch are packed in them."""
        if self._kept is not None and (relation, temperature) == ("qk", 1.0):
            kept, self._kept = self._kept, None
            return kept
        self._check()
        rows = cache.rows(self.t, self.s, self.where)
        (q_t, k_t, q_s, k_s), lses = self._tensors(relation, cache, temperature)
        options = {**self._logits(relation, temperature), **rows.arguments(), "layout": "bhnd"}
        options.update({name: None if lse is None else rows.pack_queries(lse) for name, lse in lses.items()})
        packed = [rows.pack_queries(q_t), rows.pack_keys(k_t), rows.pack_queries(q_s), rows.pack_keys(k_s)]
        return packed, options, rows

    def _check(self) -> None:
        shapes = [(layer.q.shape[0], layer.q.shape[2], layer.k.shape[2]) for layer in (self.t, self.s)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{self.where}: [batch, queries, keys] {list(shapes[0])} and {list(shapes[1])} must be equal: "
                "did both read the same tokens?"
            )
        if self.t.causal != self.s.causal:
            raise ValueError(f"{self.where}: one is causal and the other is not")

    def fitting(self, row_weight: torch.Tensor) -> torch.Tensor:
        """Weights of rows that a caller gives, [batch, len_q], on the device of the student."""
        shape = (self.s.q.shape[0], self.s.q.shape[2])
        if tuple(row_weight.shape) != shape:
            raise ValueError(f"{self.where}: row_weight or labels {list(row_weight.shape)} must be {list(shape)}")
        return row_weight.to(self.s.q.device)

    def _tensors(self, relation: Relation, cache: RowCache, temperature: float):
        """(q_t, k_t, q_s, k_s) and the LSEs of a relation. The teacher receives no gradient."""
        (q_t, k_t), (q_s, k_s) = (map(layer.operand, relation) for layer in (self.t, self.s))
        q_t, k_t = (tensor.detach().to(q_s.device) for tensor in (q_t, k_t))
        use_lses = relation == "qk" and temperature == 1.0 and self.has_same_keys(cache)
        lse_t, lse_s = (self.t.lse, self.s.lse) if use_lses else (None, None)
        lse_t = None if lse_t is None else lse_t.to(q_s.device)
        heads = self._new_heads(relation)
        if heads is not None:
            q_t, k_t, q_s, k_s = (self._regrouped(tensor, heads) for tensor in (q_t, k_t, q_s, k_s))
        elif self.heads is not None:
            if any(each.shape[1] != layer.q.shape[1] for each, layer in ((q_t, self.t), (q_s, self.s))):
                raise ValueError(f"{self.where}: head_map names heads of queries, and relation {relation!r} compares key heads, which several "
                                 "of them share: leave out the relation or the head_map")  # fmt: skip
            maps.check_heads(self.heads, q_t.shape[1], q_s.shape[1], self.where)
            q_t, k_t, lse_t = maps.select_heads(list(self.heads.values()), q_t, k_t, lse_t)
            q_s, k_s, lse_s = maps.select_heads(list(self.heads), q_s, k_s, lse_s)
        elif q_t.shape[1] % q_s.shape[1] != 0 and self.relation_heads is None:
            raise ValueError(
                f"{self.where}: {q_t.shape[1]} heads are not a multiple of {q_s.shape[1]}: pass a head_map"
            )
        return (q_t, k_t, q_s, k_s), dict(lse_t=lse_t, lse_s=lse_s)

    def _new_heads(self, relation: Relation) -> int | None:
        """Into how many heads a relation is regrouped; None: it keeps its own."""
        return None if relation == "qk" else self.relation_heads

    def _regrouped(self, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        width = tensor.shape[1] * tensor.shape[-1]
        if width % heads:
            raise ValueError(f"{self.where}: relation_heads={heads} must divide {width}, the width of all heads")
        return relation_heads(tensor, heads, "bhnd")

    def has_same_keys(self, cache: RowCache) -> bool:
        """Both attend to the same keys, so that their LSEs are those of the KL."""
        self._check()
        return cache.common(self.t.visible, self.s.visible)[1]

    def _logits(self, relation: Relation, temperature: float) -> dict[str, Any]:
        """Scales, softcaps and sinks. Only the attention itself has sinks."""
        options: dict[str, Any] = {}
        for side, layer in ("t", self.t), ("s", self.s):
            operand = layer.operand(relation[0])
            heads = self._new_heads(relation)
            dim = operand.shape[-1] if heads is None else operand.shape[1] * operand.shape[-1] / heads
            scale, softcap = (layer.scale, layer.softcap) if relation == "qk" else (1 / math.sqrt(dim), 0.0)
            options[f"softmax_scale_{side}"] = scale / temperature
            options[f"softcap_{side}"] = softcap / temperature
        if relation == "qk" and self.sinks == "both":
            options.update({name: sink / temperature for name, sink in self._sinks().items()})
        return options

    def _sinks(self) -> dict[str, torch.Tensor]:
        """The sinks of both layers, for the heads that are compared, if they have any."""
        sink_t, sink_s = self.t.sink, self.s.sink
        if sink_t is None and sink_s is None:
            return {}
        if sink_t is None or sink_s is None:
            role = "student" if sink_t is None else "teacher"
            raise ValueError(f"{self.where}: only the {role} has attention sinks (s_aux), and a sink is an outcome of both "
                             "distributions: pass sinks='keys only' to compare the distributions on the keys")  # fmt: skip
        sink_t = sink_t.detach().to(sink_s.device)
        if self.heads is not None:
            sink_t, sink_s = sink_t[list(self.heads.values())], sink_s[list(self.heads)]
        return dict(sink_t=sink_t, sink_s=sink_s)
