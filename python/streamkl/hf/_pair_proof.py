"""The proof that attention_kl receives what two proven layers hold: their queries, the keys that both attend to, their LSEs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ._layers import Layer
from ._pairs import Pair, RowCache
from ._proof import attend
from ._rows import Rows


class _Row(NamedTuple):
    """A query row that attention_kl receives."""

    packed: tuple[int, ...]  # index of the query: (row,) if packed, otherwise (sequence, row)
    sequence: int
    query: int
    keys: torch.Tensor  # [len_k] bool: keys of its sequence that the masks of attention_kl show


def prove_pair(pair: Pair, cache: RowCache) -> float:
    """Compares some rows of the arguments of attention_kl with both layers.

    Returns the share of the teacher's attention, in these rows, on keys that the student does not attend to.
    """
    arguments = pair.arguments_to_prove(cache)
    with torch.no_grad():
        return _prove(pair, *arguments)


def _prove(pair: Pair, tensors: list[torch.Tensor], options: dict[str, Any], rows: Rows) -> float:
    q_t, _, q_s, _ = tensors
    heads_t, heads_s = (
        ([*pair.heads.values()], [*pair.heads]) if pair.heads is not None else (slice(None), slice(None))
    )
    outside = []
    for row in _some_rows(options, rows, pair.s):
        seen_t, seen_s = (_of_row(layer, row).to(row.keys.device) for layer in (pair.t, pair.s))
        common = seen_t & seen_s
        if not torch.equal(row.keys, common):
            raise _fault(pair, row, "other keys")
        for layer, seen, heads, q, lse in (
            (pair.t, seen_t, heads_t, q_t, options["lse_t"]),
            (pair.s, seen_s, heads_s, q_s, options["lse_s"]),
        ):
            if not torch.equal(_take(q, row, 2), layer.q[row.sequence, heads, row.query].to(q.device)):
                raise _fault(pair, row, "other queries")
            if lse is None:
                continue
            assert layer.lse is not None
            own = layer.lse[row.sequence, heads, row.query].to(lse.device)  # the proof of the layer has checked this LSE
            if not (torch.equal(seen, common) and torch.equal(_take(lse, row, 1), own)):
                raise _fault(pair, row, "LSEs of other keys")
        if torch.equal(seen_t, common):
            outside.append(0.0)
        else:
            p = _attention(pair.t, row, seen_t).p
            outside.append(float(p[..., ~common.to(p.device)].sum(-1).mean()))
    return sum(outside) / max(len(outside), 1)


def _fault(pair: Pair, row: _Row, what: str) -> RuntimeError:
    return RuntimeError(
        f"{pair.where}: row {row.query} of sequence {row.sequence} would be compared with {what} than the layers have: please report "
        "this fault of streamkl, and leave the layer out of layer_map"
    )


def _take(tensor: torch.Tensor, row: _Row, from_end: int) -> torch.Tensor:
    """One row of [heads, tokens, ...] or [batch, heads, tokens, ...]."""
    whole = tensor if len(row.packed) == 1 else tensor[row.packed[0]]
    return whole.select(-from_end, row.packed[-1])


def _of_row(layer: Layer, row: _Row) -> torch.Tensor:
    """[len_k] bool: the keys that a query of the layer attends to."""
    rows = layer.visible.of_rows(torch.tensor([row.query], device=layer.visible.begin.device))[:, 0, 0]
    return rows[row.sequence if len(rows) > 1 else 0]


def _attention(layer: Layer, row: _Row, seen: torch.Tensor):
    b, i = row.sequence, row.query
    seen = seen.to(layer.q.device)[None, None, None]
    return attend(layer.q[b : b + 1, :, i : i + 1], layer.k[b : b + 1], layer.scale, layer.softcap, layer.sink, seen)


# ---- What the arguments of attention_kl say --------------------------------------------------------------------------


def _some_rows(options: dict[str, Any], rows: Rows, layer: Layer) -> Iterator[_Row]:
    batch, len_q, len_k = layer.q.shape[0], layer.q.shape[2], layer.k.shape[2]
    if "cu_seqlens_q" not in options:
        for place in sorted({(0, len_q // 2), (batch - 1, 0), (batch - 1, len_q - 1)}):
            yield _Row(place, *place, _shown(options, place, place[1], len_q, len_k, layer.q.device))
        return
    assert rows.queries is not None and rows.keys is not None
    cu_q, cu_k = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    total, order = cu_k[-1], rows.keys.order
    token_of_key = torch.arange(total, device=layer.q.device) if order is None else order
    for number in sorted({0, len(cu_q) - 2}):
        first, end = cu_q[number : number + 2]
        for row in sorted({first, (first + end) // 2, end - 1} if first < end else set()):
            token = row if rows.queries.order is None else int(rows.queries.order[row])
            b, i = divmod(token, len_q)
            size_k = cu_k[number + 1] - cu_k[number]
            shown = _shown(options, (row,), row - first, end - first, size_k, layer.q.device)
            tokens = token_of_key[cu_k[number] : cu_k[number + 1]][shown] - b * len_k
            keys = torch.zeros(len_k, dtype=torch.bool, device=layer.q.device)
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < len_k:
                tokens = tokens[:0]  # keys of another sequence: no row has none
            keys[tokens] = True
            yield _Row((row,), b, i, keys)


def _shown(
    options: dict[str, Any], place: tuple[int, ...], row: int, size_q: int, size_k: int, device
) -> torch.Tensor:
    """[size_k] bool: the keys of its sequence that a row attends to, by the masks of attention_kl."""
    key, position = torch.arange(size_k, device=device), row + size_k - size_q
    left, right = options.get("window_size", (-1, -1))
    seen = torch.ones_like(key, dtype=torch.bool)
    seen &= key <= position if options.get("causal") else True
    seen &= key >= position - left if left >= 0 else True
    seen &= key <= position + right if right >= 0 else True
    seen &= key >= options["key_begin"][place] if "key_begin" in options else True
    seen &= key < options["key_end"][place] if "key_end" in options else True
    return seen
