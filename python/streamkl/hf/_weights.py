"""Weights of rows and heads in the mean of a layer's KL: how far the teacher looks, how large the KL is, which head it is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Union

import torch

from .._options import Direction
from .._row_weight import parse_row_weight
from ..stats import attention_stats
from ._pairs import Pair, RowCache

HeadWeight = Union[Sequence[float], Mapping[int, Sequence[float]]]

# Decoders rest their attention on the first tokens of a sequence: that is no look at something far away.
FIRST_KEYS = 4
ROUNDING = 1e-4  # a share of the attention below this is the rounding of two LSEs


class Weights:
    """The weights of an AttentionDistiller's rows and heads."""

    def __init__(self, row_weight: str | None, head_weight: HeadWeight | None) -> None:
        self.rows, self.distance = parse_row_weight(row_weight)
        by_layer = head_weight if isinstance(head_weight, Mapping) else {None: head_weight}
        self._heads = {layer: _checked(head_weight, weights) for layer, weights in by_layer.items() if weights is not None}

    @property
    def layers(self) -> list[int | None]:
        """The student layers that have weights of their own; None stands for all others."""
        return list(self._heads)

    def of(
        self, layer: int, pair: Pair, given: torch.Tensor | None, direction: Direction, temperature: float, cache: RowCache
    ) -> torch.Tensor | None:  # fmt: skip
        """[batch, len_q] or [batch, heads_s, len_q], the product of all weights and of the `given` [batch, len_q]; None: all 1."""
        found = None if given is None else pair.fitting(given)
        heads = self._heads.get(layer, self._heads.get(None))
        if self.rows is None and heads is None:
            return found
        product: Any = 1.0 if found is None else found[:, None]
        whole = cache if cache.share == 1 else RowCache()
        if self.rows == "far":
            product = product * far_mass(pair, self.distance, whole)
        elif self.rows == "kl":
            with torch.no_grad():
                product = product * pair.row_losses(direction, whole, temperature).nan_to_num(0.0)
        if heads is not None:
            batch, count, length = pair.s.q.shape[:3]
            if len(heads) != count:
                raise ValueError(f"{pair.where}: head_weight has {len(heads)} weights: must be {count}, one per student head")
            chosen = heads if pair.heads is None else [heads[head] for head in pair.heads]
            if not any(chosen):
                raise ValueError(f"{pair.where}: head_weight={heads}: the heads of head_map, {list(pair.heads or {})}, have no weight")
            product = product * torch.tensor(chosen, device=pair.s.q.device)[:, None].expand(batch, -1, length)
        return product

    def without_rows(self, weights: Mapping[tuple[int, int], torch.Tensor | None]) -> set[tuple[int, int]]:
        """The layer pairs, of those with these weights, whose teacher looks at nothing far away, unless all are such."""
        if self.rows != "far":
            return set()
        without = {key for key, weight in weights.items() if weight is not None and not bool(weight.any())}
        if not without:
            return without
        is_all = len(without) == len(weights)
        where, result = "all student layers", "their KL is 0"
        if not is_all:
            where, result = f"student layers {sorted({i for i, _ in without})}", "the mean leaves them out"
        warnings.warn(f"AttentionDistiller: row_weight='far:{self.distance}': no row counts in {where}, because the teacher attends to "
                      f"nothing that far away: {result}", stacklevel=5)  # fmt: skip
        return set() if is_all else without


def _checked(asked: Any, weights: Any) -> list[float]:
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str)
    if not is_list or any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in weights):
        raise ValueError(f"head_weight={asked!r}: must be one number per student head, or such a list per student layer")
    if not all(0 <= each < float("inf") for each in weights) or not any(weights):
        raise ValueError(f"head_weight={asked!r}: must not be negative, and at least one weight of a layer must be above 0")
    return [float(each) for each in weights]


@torch.no_grad()
def far_mass(pair: Pair, distance: int, cache: RowCache) -> torch.Tensor:
    """The teacher's attention to keys at least `distance` tokens away, [batch, heads_s, len_q].

    A student head has the mean of its teacher heads. The first keys of a sequence and the sink do not count. With a known
    LSE the time is that of a window of `distance` keys: far = 1 - near - first - sink.
    """
    (q, k, _, _), options, rows = pair.arguments(cache)
    sink = options.get("sink_t")
    asked = {name: value for name, value in options.items() if name[-2:] not in ("_t", "_s")}
    asked |= dict(softmax_scale=options["softmax_scale_t"], softcap=options["softcap_t"], want=("lse",))
    lse: Any = options["lse_t"]
    lse = attention_stats(q, k, sink=sink, **asked).lse if lse is None else lse
    position, size = _positions(q, k, options)
    begin, end = options.get("key_begin", torch.zeros_like(position)), options.get("key_end", size)
    near = (begin.maximum(position - distance + 1), end.minimum(position + distance))
    first = (begin, end.minimum((position - distance + 1).clamp(0, FIRST_KEYS)))
    mass = torch.ones_like(lse) if sink is None else 1 - (sink.float()[:, None] - lse).exp()
    for part_begin, part_end in near, first:
        bounds = dict(key_begin=part_begin.int().contiguous(), key_end=part_end.int().contiguous())
        part: Any = attention_stats(q, k, **(asked | bounds)).lse
        mass = mass - (part - lse).exp()
    mass = torch.where(lse.isinf(), 0.0, mass)
    heads = pair.s.q.shape[1] if pair.heads is None else len(pair.heads)
    by_row = rows.unpack_rows(mass.unflatten(-2, (heads, -1)).mean(-2), pair.s.q.shape[0], pair.s.q.shape[2])
    return torch.where(by_row > ROUNDING, by_row, 0.0)  # NaN, which is padding, becomes 0, too


def _positions(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The key at the position of every query, and the keys of its sequence: [batch, len_q], packed [total_q].

    The last query is at the last key, as in a causal mask.
    """
    if "cu_seqlens_q" not in options:
        row = torch.arange(q.shape[-2], device=q.device) + k.shape[-2] - q.shape[-2]
        return row.expand(q.shape[0], -1), torch.full_like(row, k.shape[-2]).expand(q.shape[0], -1)
    cu_q, cu_k = options["cu_seqlens_q"].long(), options["cu_seqlens_k"].long()
    row = torch.arange(q.shape[-2], device=q.device)
    sequence = torch.searchsorted(cu_q[1:].contiguous(), row, right=True)
    size_q, size_k = cu_q.diff()[sequence], cu_k.diff()[sequence]
    return row - cu_q[sequence] + size_k - size_q, size_k
