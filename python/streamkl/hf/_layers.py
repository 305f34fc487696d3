"""What the attention of a captured layer is: scale, softcap, sink, and which keys its queries attend to.

Whatever is not modeled is refused, by name. The mask is read by evaluation (_keys.py), and the whole model of a layer is
compared with the output that the layer returned (_proof.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .._carried import CarriedKL
from ._attention import Call
from ._keys import Keys, Refused, keys_in_window, keys_of_function, keys_of_sequences, keys_of_tensor
from ._proof import prove, scale_of

Kind = Literal["self", "cross", "encoder"]
Reach = tuple[str, Any]  # the type of a layer, and the size of its windows or chunks; None: all keys

# The one place that refuses an argument of an attention layer. Support for it replaces its line.
REFUSALS = {
    "position_bias": "adds a bias to its logits (position_bias), which the KL does not cover",
    "indices": "attends to a list of keys per query (indices): streamkl.hf.IndexerTrainer trains its indexers",
    "block_indices": "attends to a list of key blocks per query (block_indices), which the KL does not cover",
    "cache": "reads a paged cache: run the model without one (use_cache=False)",
}
WAY_OUT = "leave the layer out of layer_map, or use a model without it"
WAY_OUT_OF_ONE = "skip the layer, or use a model without it"  # of a model that is not compared


@dataclass
class Layer:
    """The queries and keys of one attention layer, and what its attention does with them."""

    name: str  # name of the module in its model
    kind: Kind
    tower: str  # the part of its model: "language", "vision", "audio", ...
    q: torch.Tensor  # [batch, heads, len_q, dim], after RoPE
    k: torch.Tensor  # [batch, key_heads, len_k, dim]
    v: torch.Tensor | None  # [batch, key_heads, len_k, dim_v], where it is needed
    lse: torch.Tensor | None  # [batch, heads, len_q], if the attention returns it
    scale: float
    softcap: float
    sink: torch.Tensor | None  # [heads], logits of the attention sinks
    keys: Keys | None  # None: the layer is refused
    counted: torch.Tensor | None  # [batch or 1, len_q] bool: False is padding; None: all queries count
    has_graph: bool
    handle: CarriedKL | None = None  # None: its backward cannot carry the KL
    apart: str | None = None  # why the backward cannot carry the KL
    refusal: str | None = None  # why its attention is not modeled
    window: int | None = None  # the sliding window in the whole sequence, of a shard: `keys` are those of the shard alone
    reach: Reach = ("full_attention", None)  # the same for every batch, however short

    @property
    def is_local(self) -> bool:
        return self.reach[1] is not None

    @property
    def causal(self) -> bool:
        return self.require().visible.causal

    @property
    def visible(self) -> Keys:
        """The keys of a layer that is not refused."""
        assert self.keys is not None
        return self.keys

    def operand(self, letter: str) -> torch.Tensor:
        """q, k or v."""
        tensor = {"q": self.q, "k": self.k, "v": self.v}[letter]
        assert tensor is not None
        return tensor

    def require(self) -> Layer:
        if self.refusal is not None:
            raise ValueError(self.refusal)
        return self


def as_layers(
    calls: list[Call], read: Callable[[Call], Keys], model: Any, role: str, needs_proof, proven, ranks: int | None = None
) -> list[Layer]:
    """The layers of a forward, in the order in which they ran. `needs_proof(call)` says whether to prove one, `proven(call)`
    learns that it is. `ranks` hold the shards of a sequence; None: it is whole."""
    names = {module: name for name, module in model.named_modules()}
    encoder, towers = _encoder_modules(model), _towers(model)
    layers: list[Layer] = []
    for number, (call, parts) in enumerate(_of_layers(calls)):
        name = names.get(call.module, type(call.module).__name__)
        refusal, keys, window = None, None, None
        try:
            _refuse_features(call)
            if parts > 1:
                raise Refused(f"runs its attention in {parts} parts, once for each image or window")
            keys = read(call)
            counted = _counted(keys)
            window = None if ranks is None else _window_of_shards(call, ranks)
            if needs_proof(call):
                prove(call, keys, counted)
                proven(call)
        except Refused as why:
            way_out = WAY_OUT_OF_ONE if role == "model" else WAY_OUT
            refusal, counted = f"{role}: layer {number} ({name}) {why}; {way_out}", None
        kind = _kind(call, keys, encoder)
        if kind == "cross":
            of_decoder = [layer.counted for layer in layers if layer.kind == "self"]
            counted = of_decoder[-1] if of_decoder else None
        layers.append(_layer(call, name, kind, _tower(name, towers), keys, counted, refusal, window))
    return layers


_NUMBER = re.compile(r"\d+")


def skipped_layers(model: Any, layers: list[Layer], ran: list[Layer]) -> list[str]:
    """Modules that did not run, and whose names differ from those of `layers` by numbers alone. `ran` is all that did."""
    modules, names = dict(model.named_modules()), {layer.name for layer in ran}

    def like(name: str) -> tuple:
        return _NUMBER.sub("*", name), type(modules.get(name))

    likes = {like(layer.name) for layer in layers}
    return [name for name in modules if name not in names and like(name) in likes]


def early_layer(call: Call, keys: Keys) -> Layer:
    """The self-attention of a call that has not run yet, whose name nobody asks for."""
    _refuse_features(call)
    return _layer(call, "", "self", "", keys, _counted(keys), None)


def _layer(call: Call, name: str, kind: Kind, tower: str, keys, counted, refusal, window: int | None = None) -> Layer:
    return Layer(
        name, kind, tower, call.query, call.key, call.value, call.lse, scale_of(call), call.softcap, call.sink, keys, counted,
        call.has_graph, call.handle, call.apart, refusal, window, _reach(call),
    )  # fmt: skip


def _counted(keys: Keys) -> torch.Tensor | None:
    """A token that no query attends to is padding, and its own query does not count. The queries are the last tokens."""
    return None if keys.shown is None or keys.len_q > keys.len_k else keys.shown[:, keys.len_k - keys.len_q :]


def _of_layers(calls: list[Call]) -> list[tuple[Call, int]]:
    """(call, parts) of each layer. DiffLlama applies one distribution to two sets of values, in two calls: the first counts."""
    layers: list[tuple[Call, int]] = []
    for before, call in zip([None, *calls], calls):
        if before is not None and call.query is before.query and call.key is before.key:
            continue
        if before is not None and call.module is before.module and _same_storage(call.query, before.query):
            layers[-1] = (layers[-1][0], layers[-1][1] + 1)
        else:
            layers.append((call, 1))
    return layers


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _encoder_modules(model: Any) -> set[torch.nn.Module] | None:
    """None: the model is no encoder-decoder."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return None
    encoder = model.get_encoder()
    return set(encoder.modules()) if encoder is not model else set()


def _kind(call: Call, keys: Keys | None, encoder: set[torch.nn.Module] | None) -> Kind:
    if encoder is None:
        is_cross = getattr(call.module, "is_cross_attention", False) or "CrossAttention" in type(call.module).__name__
        return "cross" if is_cross else "self"
    if call.module in encoder:
        return "encoder"
    if keys is None or keys.len_q == 1:  # the keys do not tell the kind
        return "self" if getattr(call.module, "is_causal", True) else "cross"
    if keys.len_q != keys.len_k:  # an encoder padded to more tokens than the decoder has, or a cache of the decoder
        return "self" if getattr(call.module, "is_causal", False) else "cross"
    return "self" if keys.causal else "cross"  # a decoder is causal


# ---- Towers ------------------------------------------------------------------------------------------------------------


def _towers(model: Any) -> dict[str, str]:
    """{module: tower} of a model that has several, each with a config of its own, such as a vision and a language tower."""
    parts = {
        type(part): name
        for name in model.config.sub_configs
        if (part := getattr(model.config, name, None)) is not None
    }
    if len(parts) < 2 or set(model.config.sub_configs) == {"encoder", "decoder"}:
        return {}
    towers = {}
    for name, module in model.named_modules():
        if (part := parts.get(type(getattr(module, "config", None)))) is not None:
            tower = part.removesuffix("_config")
            towers[name] = "language" if tower in ("text", "llm") else tower
    return towers


def _tower(name: str, towers: dict[str, str]) -> str:
    while name and name not in towers:
        name = name.rpartition(".")[0]
    return towers.get(name, "language")


def towers_of(model: Any) -> list[str]:
    return list(dict.fromkeys(_towers(model).values())) or ["language"]


# ---- Visible keys -----------------------------------------------------------------------------------


# Implementations that learn of a window from their mask alone; all others take it as an argument.
_WINDOW_IN_MASK = ("eager", "sdpa", "flex_attention")


def _window_of_shards(call: Call, ranks: int) -> int | None:
    """The sliding window of a call on a shard; None: it is not shorter than the whole sequence."""
    window = call.options.get("sliding_window")
    if window is None or window >= ranks * call.key.shape[2]:
        return None
    if call.mask is None and call.implementation in _WINDOW_IN_MASK:
        raise Refused(
            f"has a sliding window of {window} tokens, which attn_implementation={call.implementation!r} did not apply: it takes it from "
            "a mask, and received none for its shard of the sequence"
        )
    return window


# The size that a config has for the layers of a type.
_SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def _reach(call: Call) -> Reach:
    """The mask of a batch does not tell the reach: in a short one no window hides a key."""
    if (window := call.options.get("sliding_window")) is not None:
        return "sliding_attention", window
    config, index = getattr(call.module, "config", None), getattr(call.module, "layer_idx", None)
    types = getattr(config, "layer_types", None) or []
    kind = types[index] if isinstance(index, int) and index < len(types) else "full_attention"
    return kind, getattr(config, _SIZES.get(kind, ""), None)


def _refuse_features(call: Call) -> None:
    for name, refusal in REFUSALS.items():
        if name in call.options:
            raise Refused(refusal)


class KeyReader:
    """Reads which keys the queries of a call attend to; layers of a forward that share a mask share its evaluation."""

    def __init__(self, tokens: torch.Tensor | None) -> None:
        self._tokens = tokens  # [batch, length] bool: False is padding; None: not known
        self._known: dict[tuple, tuple[Any, Keys]] = {}

    def __call__(self, call: Call) -> Keys:
        shape, window, bounds = (call.query.shape[0], call.query.shape[2], call.key.shape[2]), None, None
        if "flash" in call.implementation:
            window, bounds = call.options.get("sliding_window"), call.options.get("cu_seq_lens_q")
        key = (id(call.mask), *shape, call.query.device, call.causal, call.implementation, window, id(bounds))
        if key not in self._known:
            keys = _read(call, window, bounds, *shape)
            keys = keys if call.mask is None else keys.without_padding(self._tokens)
            self._known[key] = ((call.mask, bounds), keys)  # keeps the mask, and so its id
        return self._known[key][1]


def _read(call: Call, window: int | None, bounds: torch.Tensor | None, batch: int, len_q: int, len_k: int) -> Keys:
    device, mask = call.query.device, call.mask
    if "flash" in call.implementation:
        return _read_flash(mask, call.causal, window, bounds, len_q, len_k, device)
    if mask is None:
        causal = call.causal and call.implementation != "eager" and len_q > 1
        if causal and len_q != len_k:
            raise Refused(f"has {len_q} queries and {len_k} keys of a static cache: run the model without it")
        return keys_in_window(math.inf, 0 if causal else math.inf, len_q, len_k, device)
    if isinstance(mask, torch.Tensor):
        return keys_of_tensor(mask, len_q, len_k)
    if callable(function := getattr(mask, "mask_mod", None)):  # a BlockMask
        return keys_of_function(function, batch, len_q, len_k, device)
    raise Refused(f"receives an attention mask of type {type(mask).__name__}, which cannot be evaluated")


def _read_flash(
    mask, causal: bool, window: int | None, bounds: torch.Tensor | None, len_q: int, len_k: int, device
) -> Keys:
    """Flash attention takes causality, the window and the sequences as arguments, and the 2-D mask."""
    side = math.inf if window is None else window - 1
    keys = keys_in_window(side, 0 if causal else side, len_q, len_k, device)
    if bounds is not None:
        token = torch.arange(len_q, device=bounds.device)
        keys = keys.both(keys_of_sequences(torch.searchsorted(bounds[1:].contiguous(), token, right=True)[None]))
    return keys if mask is None else keys.both(keys_of_tensor(mask, len_q, len_k))
