"""The proof that a captured layer is modeled: its queries, keys, values and mask give the output that it returned.

Some rows of each layer are computed from what was captured and compared with what the layer returned. An attention that
does anything else, such as a bias, another mask, another scale or dropout, is refused, with the reason that explains its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ._attention import Call, fixed_rows, probe_again
from ._keys import Keys, Refused

# Error of an output in units of sum_j p_j max |v_j| (2 + the largest logit): what rounding explains, and no more.
_ROUNDING = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_TF32 = 1e-3


class Attention(NamedTuple):
    """softmax(q k) of some rows, which are stored: for single rows only."""

    p: torch.Tensor  # [batch, heads, rows, len_k]
    lse: torch.Tensor  # [batch, heads, rows]
    largest: torch.Tensor  # [batch, heads, rows]: the largest size of a logit


def attend(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float, sink: torch.Tensor | None, seen: torch.Tensor
) -> Attention:
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
    """a b in float32, also where the model rounds; sequence by sequence, because matmul would copy all of b."""
    with torch.autocast(a.device.type, enabled=False):
        return torch.stack([one @ other for one, other in zip(a, b)])


def scale_of(call: Call) -> float:
    return 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else float(call.scale)


def rows_to_prove(keys: Keys) -> list[int]:
    """Some rows, and those where the range of keys begins to move or moves last: there a wrong mask shows."""
    return sorted({*fixed_rows(keys.len_q), *keys.edges})


@torch.no_grad()
def prove(call: Call, keys: Keys, counted: torch.Tensor | None) -> None:
    """Raises Refused if the model of a call does not give its output, or its LSEs, for the rows of its probe."""
    if call.probe is None and call.again is not None:
        call.probe = probe_again(call, rows_to_prove(keys), *call.again)
    if call.probe is not None and call.value is not None:
        _Proof(call, keys, counted).check()


class _Proof:
    """The rows of a probe, and the model that has to reproduce them."""

    def __init__(self, call: Call, keys: Keys, counted: torch.Tensor | None) -> None:
        assert call.probe is not None and call.value is not None
        rows, self.output, self.batch = call.probe
        self.call, self.keys = call, keys
        self.rows = fixed_rows(call.query.shape[2]) if rows is None else rows
        q, k, self.v = (each[self.batch] for each in (call.query[:, :, self.rows], call.key, call.value))
        self.model: dict[str, Any] = dict(
            q=q, k=k, scale=scale_of(call), softcap=call.softcap, sink=call.sink, seen=self._seen(keys)
        )
        self.kept = self.model["seen"][:, 0].any(-1)  # [batch or 1, rows]: rows that are not padding
        if counted is not None:
            self.kept = self.kept & self._of_batch(counted[:, self.rows])

    def _of_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if len(tensor) == 1 else tensor[self.batch]

    def _seen(self, keys: Keys) -> torch.Tensor:
        return self._of_batch(keys.of_rows(torch.tensor(self.rows, device=keys.begin.device)))

    def check(self) -> None:
        q, v, output = self.model["q"], self.v, self.output
        if not {output.dtype, q.dtype} <= _ROUNDING.keys():
            raise Refused(
                f"computes in {output.dtype}: must be torch.float32, torch.float16 or torch.bfloat16, as after model.float()"
            )
        shape = [len(q), len(self.rows), q.shape[1], v.shape[-1]]
        if list(output.shape) != shape:
            raise Refused(f"returns an output {list(output.shape)} for {shape} of softmax(q k) v")
        attention = attend(**self.model)
        error = self._error(attention)
        if not bool((error <= self._bound()).all()):
            raise Refused(self._explain(attention, error))
        if self.call.lse is not None:
            self._check_lse(attention, self.call.lse[self.batch][:, :, self.rows])

    def _bound(self) -> float:
        """The bound of an error, in the units of _ROUNDING, for the coarser of the types."""
        coarse = max(_ROUNDING[each.dtype] for each in (self.output, self.call.query))
        uses_tf32 = self.output.is_cuda and torch.backends.cuda.matmul.allow_tf32
        return max(coarse, _TF32) if uses_tf32 else coarse

    def _error(self, attention: Attention) -> torch.Tensor:
        """[batch, rows, heads, dim_v]: the difference to the output, in units that _ROUNDING bounds."""
        size = self.v.abs().amax(-1, keepdim=True)
        unit = _values(attention.p, size) * (2 + attention.largest).transpose(1, 2)[..., None]
        error = (self.output.float() - _values(attention.p, self.v)).abs() / unit.clamp(min=1e-30)
        return torch.where(self.kept[..., None, None], error.nan_to_num(nan=math.inf), 0.0)

    def _check_lse(self, attention: Attention, lse: torch.Tensor) -> None:
        error = (lse - attention.lse).abs() / (2 + attention.largest)
        error = torch.where(self.kept[:, None], error.nan_to_num(nan=math.inf), 0.0)
        if not bool((error <= self._bound()).all()):
            at = _largest(error)
            raise Refused(
                f"returns LSEs of other logits or keys: {lse[at]:.6g} instead of {attention.lse[at]:.6g} at head {at[1]}, "
                f"row {self.rows[at[2]]}"
            )

    # ---- The likely reason -------------------------------------------------------------------------------------------

    def _explain(self, attention: Attention, error: torch.Tensor) -> str:
        at, expected = _largest(error), _values(attention.p, self.v)
        return (
            f"does not compute softmax(q k) v over the keys that its mask shows: {self.output[at]:.6g} instead of "
            f"{expected[at]:.6g} at head {at[2]}, row {self.rows[at[1]]}, sequence {at[0] + (self.batch.start or 0)}: "
            f"{self._reason()}"
        )

    def _reason(self) -> str:
        call = self.call
        if call.dropout and not call.training:
            return f"it has a dropout of {call.dropout:g} in eval mode"
        for reason, change in self._other_models():
            other = {**self.model, **change}
            has_keys = other["seen"][:, 0].any(-1)[..., None, None]
            if bool(((self._error(attend(**other)) <= self._bound()) | ~has_keys).all()):
                return reason
        name = type(call.module).__name__
        return f"{name} adds a bias to the logits, or reads other queries, keys or values than it is called with"

    def _other_models(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Models that would explain another output: (reason, what they change)."""
        scale = self.model["scale"]
        dims = self.call.query.shape[-1], self.v.shape[-1]
        for other in (*(1 / math.sqrt(dim) for dim in dims), 1.0, scale**2, math.sqrt(scale)):
            yield f"its scale is {other:.6g}, not {scale:.6g}", dict(scale=other)
        yield "it leaves out its attention sink", dict(sink=None)
        yield "it leaves out its softcap", dict(softcap=0.0)
        keys, begin, end = self.keys, self.keys.begin, self.keys.end
        everything = torch.full_like(end, keys.len_k)
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
            for shown in (keys.shown, None):
                seen = self._seen(replace(keys, begin=first, end=last, shown=shown))
                yield f"{reason}: its mask differs from the one that it is called with", dict(seen=seen)


def _values(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p v, [batch, rows, heads, dim_v], where several heads share a value head."""
    batch, heads, rows, len_k = p.shape
    return (
        _product(p.reshape(batch, v.shape[1], -1, len_k), v.float()).reshape(batch, heads, rows, -1).transpose(1, 2)
    )


def _largest(error: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(index) for index in torch.unravel_index(error.argmax(), error.shape))
