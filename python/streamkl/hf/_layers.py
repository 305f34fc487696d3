"""What the attention of a captured layer is: scale, softcap, and which keys its queries attend to.

Whatever is not modelled is refused here, by name. Two guards follow: a mask tensor must be one that the model made
from mask functions that _masks.py knows, and the first call of every layer is verified against its output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .._carried import CarriedKL
from ._attention import Call, Mask
from ._masks import CAUSAL, FULL, Refused, Visible, read_mask_function

Kind = Literal["self", "cross", "encoder"]

# The one place that refuses a feature of an attention layer. Support for a feature replaces its line.
REFUSALS = {
    "position_bias": "adds a bias to its logits (position_bias), which the KL does not cover",
    "indices": "attends to a list of keys per query (indices): use streamkl.indexer_kl, which takes such a list",
    "block_indices": "attends to a list of key blocks per query (block_indices), which the KL does not cover",
    "cache": "reads a paged cache: run the model without one (use_cache=False)",
}
WAY_OUT = "leave the layer out of layer_map, or use a model without it"


@dataclass
class Layer:
    """The queries and keys of one attention layer, and what its attention does with them."""

    name: str  # of the module in its model
    kind: Kind
    q: torch.Tensor  # [batch, heads, len_q, dim], after RoPE
    k: torch.Tensor  # [batch, key_heads, len_k, dim]
    v: torch.Tensor | None  # [batch, key_heads, len_k, dim_v], where it is needed
    lse: torch.Tensor | None  # [batch, heads, len_q], if the attention returns it
    scale: float
    softcap: float
    sink: torch.Tensor | None  # [heads], logits of the attention sinks
    visible: Visible
    padding: torch.Tensor | None  # of the keys, [batch, len_k] bool: False is padding
    row_padding: torch.Tensor | None  # of the queries, [batch, len_q]
    has_graph: bool
    handle: CarriedKL | None = None  # if its backward can carry the KL
    refusal: str | None = None  # why its attention is not modelled

    @property
    def causal(self) -> bool:
        return self.visible.causal

    def operand(self, letter: str) -> torch.Tensor:
        """q, k or v."""
        tensor = {"q": self.q, "k": self.k, "v": self.v}[letter]
        assert tensor is not None
        return tensor

    def require(self) -> Layer:
        if self.refusal is not None:
            raise ValueError(self.refusal)
        return self


def as_layers(calls: list[Call], model: Any, role: str, verify: bool = True) -> list[Layer]:
    """The layers of a forward, in the order in which they ran; `verify` that their attention is modelled."""
    names = {module: name for name, module in model.named_modules()}
    encoder = _encoder_modules(model)
    layers: list[Layer] = []
    for number, call in enumerate(_without_repetitions(calls)):
        name = names.get(call.module, type(call.module).__name__)
        refusal, visible, padding = None, CAUSAL if call.causal else FULL, None
        try:
            visible, padding = _visible(call)
            _refuse_features(call)
            if verify:
                _verify(call, visible, padding)
        except Refused as why:
            refusal = f"{role}: layer {number} ({name}) {why}; {WAY_OUT}"
        kind = _kind(call, visible, encoder)
        scale = 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else float(call.scale)
        row_padding = padding
        if kind == "cross":
            of_decoder = [layer.row_padding for layer in layers if layer.kind == "self"]
            row_padding = of_decoder[-1] if of_decoder else None
        layers.append(
            Layer(name, kind, call.query, call.key, call.value, call.lse, scale, call.softcap, call.sink, visible, padding,
                  row_padding, call.has_graph, call.handle, refusal)
        )  # fmt: skip
        call.probe = None
    return layers


def _without_repetitions(calls: list[Call]) -> list[Call]:
    """DiffLlama applies one distribution to two sets of values, in two calls."""
    repeated = [
        i > 0 and call.query is calls[i - 1].query and call.key is calls[i - 1].key for i, call in enumerate(calls)
    ]
    return [call for call, again in zip(calls, repeated) if not again]


def _encoder_modules(model: Any) -> set[torch.nn.Module] | None:
    """None: the model is no encoder-decoder."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return None
    encoder = model.get_encoder()
    return set(encoder.modules()) if encoder is not model else set()


def _kind(call: Call, visible: Visible, encoder: set[torch.nn.Module] | None) -> Kind:
    if encoder is None:
        return "cross" if getattr(call.module, "is_cross_attention", False) else "self"
    if call.module in encoder:
        return "encoder"
    return "self" if visible.causal else "cross"  # a decoder is causal


def _refuse_features(call: Call) -> None:
    for name, refusal in REFUSALS.items():
        if name in call.options:
            raise Refused(refusal)


# ---- Visible keys -----------------------------------------------------------------------------------


def _visible(call: Call) -> tuple[Visible, torch.Tensor | None]:
    """(visible keys, padding) of a call."""
    len_q, len_k = call.query.shape[2], call.key.shape[2]
    if "flash" in call.implementation:
        return _visible_to_flash(call)
    if call.mask is None:
        causal = call.causal and call.implementation != "eager" and len_q > 1
        if causal and len_q != len_k:
            raise Refused(f"has {len_q} queries and {len_k} keys of a static cache: run the model without it")
        return (CAUSAL if causal else FULL), None
    if not isinstance(call.mask, Mask) or call.mask.function is None:
        shape = list(call.mask.shape) if isinstance(call.mask, torch.Tensor) else type(call.mask).__name__
        raise Refused(
            f"receives an attention mask {shape} that the model did not make from a 2-D attention_mask (4-D, or with a bias)"
        )
    visible = read_mask_function(call.mask.function, len_k)
    if visible != FULL and not bool(call.mask.aligned):
        raise Refused("has a static cache, whose last key is not that of the last query: run the model without it")
    return visible, call.mask.padding


def _visible_to_flash(call: Call) -> tuple[Visible, torch.Tensor | None]:
    """Flash attention takes causality, the window and the sequences as arguments, and the 2-D mask."""
    window = call.options.get("sliding_window")
    visible = CAUSAL if call.causal else FULL
    if window is not None:
        visible = visible.both(Visible(window - 1, window - 1))
    mask = call.mask.tensor if isinstance(call.mask, Mask) else call.mask
    if (bounds := call.options.get("cu_seq_lens_q")) is not None:
        token = torch.arange(call.query.shape[2], device=bounds.device)
        visible = visible.both(
            Visible(segments=(torch.searchsorted(bounds[1:].contiguous(), token, right=True)[None],))
        )
    return visible, mask


# ---- Verification ----------------------------------------------------------------------------------------------------

_TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


@torch.no_grad()
def _verify(call: Call, visible: Visible, padding: torch.Tensor | None) -> None:
    """The output of the layer, for some rows, is softmax(q k) v over the visible keys. Otherwise something is not modelled."""
    if call.probe is None or call.value is None:
        return
    rows, output = call.probe
    if output.dtype not in _TOLERANCE:
        raise Refused(f"computes in {output.dtype}: must be torch.float32, torch.float16 or torch.bfloat16, as after model.float()")
    q, v = call.query[:, :, rows], call.value.float()
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scale = 1 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale
    seen = visible_keys(visible, padding, torch.tensor(rows, device=q.device), call.query.shape[2], v.shape[2])
    p = probabilities(q, call.key, scale, call.softcap, call.sink, seen)
    expected = (p @ v).transpose(1, 2)
    if output.shape != expected.shape:
        raise Refused(f"returns an output {list(output.shape)} for {list(expected.shape)} of softmax(q k) v")
    kept = seen.any(-1).transpose(1, 2).unsqueeze(-1)
    if padding is not None and padding.shape[1] == call.query.shape[2]:
        kept = kept & padding[:, rows, None, None]
    error = torch.where(kept, output.float() - expected, 0.0).abs().max()
    if not error <= _TOLERANCE[output.dtype] * v.abs().max():
        raise Refused(
            f"does not compute softmax(q k) v over the keys that its mask shows (its output differs by {error.item():.2g}): "
            f"{type(call.module).__name__} does something that is not modelled"
        )


def visible_keys(visible: Visible, padding, rows: torch.Tensor, len_q: int, len_k: int) -> torch.Tensor:
    """[batch or 1, 1, rows, len_k] bool."""
    position, key = (rows + len_k - len_q)[:, None], torch.arange(len_k, device=rows.device)
    seen = ((key >= position - visible.left) & (key <= position + visible.right))[None]
    for segment in visible.segments:
        seen = seen & (segment[:, rows, None] == segment[:, None])
    if padding is not None:
        seen = seen & padding[:, None, :len_k]
    return seen[:, None]


def probabilities(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float, sink: torch.Tensor | None, seen: torch.Tensor
) -> torch.Tensor:
    """softmax(q k) of some rows, [batch, heads, rows, len_k]: for single rows only, because it stores them."""
    q, k = q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q @ k.transpose(2, 3) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sink is not None:  # its column goes after the softmax: it has no key
        logits = torch.cat([logits, sink.float()[:, None, None].expand(*logits.shape[:3], 1)], -1)
    return logits.softmax(-1)[..., : k.shape[2]]
