"""The proof that a captured layer is modelled: its queries, keys, values and mask give the output that it returned.

Some rows of each layer are computed from what was captured and compared with what the layer returned. An attention that
does anything else, such as a bias, another mask, another scale or dropout, is refused, with the reason that explains its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ._attention import Call, fixed_rows
from ._keys import Keys, Refused

# Error of an output in units of sum_j p_j |v_j| (2 + the largest logit): what rounding explains, and no more.
_ROUNDING = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_TF32 = 1e-3


class Attention(NamedTuple):
    """softmax(q k) of some rows, which are stored: for single rows only."""

    p: torch.Tensor  # [batch, heads, rows, len_k]
    lse: torch.Tensor  # [batch, heads, rows]
    largest: torch.Tensor  # [batch, heads, rows]: the largest size of a logit


def attend(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float, sink: torch.Tensor | None, seen: torch.Tensor) -> Attention:
    """`seen` is [batch or 1, 1, rows, len_k] bool."""
    batch, heads, rows, dim = q.shape
    grouped = q.float().reshape(batch, k.shape[1], -1, dim)
    logits = (_product(grouped, k.float().transpose(2, 3)) * scale).reshape(batch, heads, rows, -1)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    largest = logits.masked_fill(~seen, 0.0).abs().amax(-1)
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    if sink is not None:  # an outcome that has no key
        lse = torch.logaddexp(lse, sink.float()[:, None])
    return Attention((logits - lse.nan_to_num(neginf=0.0)[..., None]).exp(), lse, largest)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autocast(a.device.type, enabled=False):  # in float32, also where the model rounds
        return a @ b


def scale_of(call: Call) -> float:
    return 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else float(call.scale)


def rows_to_prove(keys: Keys) -> list[int]:
    """Some rows, and those where the range of keys begins to move or moves last: there a wrong mask shows."""
    rows = set(fixed_rows(keys.len_q))
    for bound in keys.begin, keys.end:
        moves = (bound[:, 1:] > bound[:, :-1]).any(0).nonzero()[:, 0].tolist()
        for row in moves[:1] + moves[-1:]:
            rows |= {row, row + 1}
    return sorted(rows)


@torch.no_grad()
def prove(call: Call, keys: Keys, counted: torch.Tensor | None) -> None:
    """Raises Refused if the model of a call does not give its output, or its LSEs, for the rows of its probe."""
    if call.probe is None or call.value is None:
        return
    rows, output, batch = call.probe
    rows = fixed_rows(call.query.shape[2]) if rows is None else rows
    kept = torch.ones(1, keys.len_q, dtype=torch.bool, device=keys.begin.device) if counted is None else counted
    seen, kept = _of_batch(keys.of_rows(torch.tensor(rows, device=kept.device)), batch), _of_batch(kept[:, rows], batch)
    kept = kept & seen[:, 0].any(-1)
    q, k, v = (each[batch] for each in (call.query[:, :, rows], call.key, call.value))
    if not {output.dtype, q.dtype} <= _ROUNDING.keys():
        raise Refused(f"computes in {output.dtype}: must be torch.float32, torch.float16 or torch.bfloat16, as after model.float()")
    shape = [len(q), len(rows), q.shape[1], v.shape[-1]]
    if list(output.shape) != shape:
        raise Refused(f"returns an output {list(output.shape)} for {shape} of softmax(q k) v")
    model: dict[str, Any] = dict(q=q, k=k, scale=scale_of(call), softcap=call.softcap, sink=call.sink, seen=seen)
    attention = attend(**model)
    error, bound = _error(attention, v, output, kept), rounding(output, call.query)
    if not bool((error <= bound).all()):
        raise Refused(_explain(call, keys, model, v, output, kept, error, bound, rows, batch))
    if call.lse is not None:
        _check_lse(call, attention, call.lse[batch][:, :, rows], kept, bound, rows)


def _of_batch(tensor: torch.Tensor, batch: slice) -> torch.Tensor:
    return tensor if len(tensor) == 1 else tensor[batch]


def rounding(*tensors: torch.Tensor) -> float:
    """The bound of an error, in the units of _ROUNDING, for the coarsest of the types."""
    coarse = max(_ROUNDING[each.dtype] for each in tensors)
    uses_tf32 = tensors[0].is_cuda and torch.backends.cuda.matmul.allow_tf32
    return max(coarse, _TF32) if uses_tf32 else coarse


def _values(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p v, [batch, rows, heads, dim_v], where several heads share a value head."""
    batch, heads, rows, len_k = p.shape
    return _product(p.reshape(batch, v.shape[1], -1, len_k), v.float()).reshape(batch, heads, rows, -1).transpose(1, 2)


def _error(attention: Attention, v: torch.Tensor, output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """[batch, rows, heads, dim_v]: the difference to `output`, in units that _ROUNDING bounds."""
    unit = _values(attention.p * (2 + attention.largest[..., None]), v.abs()).amax(-1, keepdim=True)
    error = (output.float() - _values(attention.p, v)).abs() / unit.clamp(min=1e-30)
    return torch.where(kept[..., None, None], error.nan_to_num(nan=math.inf), 0.0)


def _check_lse(call: Call, attention: Attention, lse: torch.Tensor, kept: torch.Tensor, bound: float, rows: list[int]) -> None:
    error = (lse - attention.lse).abs() / (2 + attention.largest)
    error = torch.where(kept[:, None], error.nan_to_num(nan=math.inf), 0.0)
    if not bool((error <= bound).all()):
        at = _largest(error)
        raise Refused(f"returns LSEs of other logits or keys: {lse[at]:.6g} instead of {attention.lse[at]:.6g} at head {at[1]}, row {rows[at[2]]}")


def _largest(error: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(index) for index in torch.unravel_index(error.argmax(), error.shape))


# ---- The likely reason -------------------------------------------------------------------------------------------------


def _explain(call: Call, keys: Keys, model, v, output, kept, error, bound: float, rows: list[int], batch: slice) -> str:
    at = _largest(error)
    expected = _values(attend(**model).p, v)
    return (
        f"does not compute softmax(q k) v over the keys that its mask shows: {output[at]:.6g} instead of {expected[at]:.6g} at head "
        f"{at[2]}, row {rows[at[1]]}, sequence {at[0] + (batch.start or 0)}: {_reason(call, keys, model, v, output, kept, bound, rows, batch)}"
    )


def _reason(call: Call, keys: Keys, model: dict[str, Any], v, output, kept, bound: float, rows: list[int], batch: slice) -> str:
    if call.dropout and not call.training:
        return f"it has a dropout of {call.dropout:g} in eval mode"
    for reason, change in _other_models(call, keys, model, rows, batch):
        changed = {**model, **change}
        if bool((_error(attend(**changed), v, output, kept & changed["seen"][:, 0].any(-1)) <= bound).all()):
            return reason
    name = type(call.module).__name__
    return f"{name} adds a bias to the logits, or reads other queries, keys or values than it is called with"


def _other_models(call: Call, keys: Keys, model: dict[str, Any], rows: list[int], batch: slice) -> Iterator[tuple[str, dict[str, Any]]]:
    """Models that would explain another output: (reason, what they change)."""
    scale, dim = model["scale"], call.query.shape[-1]
    for other in (1 / math.sqrt(dim), 1.0, 1 / math.sqrt(call.value.shape[-1]), scale**2, math.sqrt(scale)):  # type: ignore[union-attr]
        yield f"its scale is {other:.6g}, not {scale:.6g}", dict(scale=other)
    yield "it leaves out its attention sink", dict(sink=None)
    yield "it leaves out its softcap", dict(softcap=0.0)
    begin, end, everything = keys.begin, keys.end, torch.full_like(keys.end, keys.len_k)
    position = torch.arange(keys.len_k - keys.len_q, keys.len_k, device=begin.device)
    bounds = [
        ("it attends to all keys", 0 * begin, everything),
        ("it is causal", begin, end.minimum(position + 1)),
        ("it looks ahead", begin, everything),
        ("it has no window", 0 * begin, end),
        ("its window is one key wider", begin - 1, end),
        ("its window is one key narrower", begin + 1, end),
        ("it looks ahead by one key", begin, end + 1),
        ("it does not attend to the last of its keys", begin, end - 1),
    ]
    for reason, first, last in bounds:
        for shown in {id(each): each for each in (keys.shown, None)}.values():
            seen = replace(keys, begin=first, end=last, shown=shown).of_rows(torch.tensor(rows, device=begin.device))
            yield f"{reason}: its mask differs from the one that it is called with", dict(seen=_of_batch(seen, batch))

