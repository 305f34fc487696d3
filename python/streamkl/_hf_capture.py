"""Captures the queries and keys of Hugging Face models, after RoPE and before attention.

A model gets an attention implementation that wraps the model's own: `streamkl_sdpa` wraps `sdpa`. Its attention and mask
functions record their arguments only while the forward of the model runs. So the recomputation of activation checkpointing,
which runs in the backward, is not recorded a second time.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PREFIX = "streamkl_"

_running = threading.local()  # .capture: the Capture of the model whose forward runs in this thread


@dataclass
class Layer:
    """The recorded call of one attention layer."""

    q: torch.Tensor  # [batch, heads, len_q, dim]
    k: torch.Tensor  # [batch, key_heads, len_k, dim]
    lse: torch.Tensor | None  # [batch, heads, len_q], if the attention returns it
    scale: float | None
    softcap: float
    causal: bool
    window: int  # a query attends to this many keys before it and, if not causal, after it; -1: no limit
    padding: torch.Tensor | None  # [batch, len_k] bool: False is padding


@dataclass
class _Mask:
    tensor: torch.Tensor | None  # the mask that the attention layers receive
    padding: torch.Tensor | None
    local_size: int | None
    supported: bool  # combines only causality, a window and padding


@dataclass
class Capture:
    """The recorded layers of the last forward of a model, between attach() and detach()."""

    model: Any  # of transformers
    role: str
    layers: list[Layer] = field(default_factory=list)
    masks: list[_Mask] = field(default_factory=list)
    arguments: tuple[tuple, dict[str, Any]] | None = None
    _own_implementation: str | None = None
    _hooks: list = field(default_factory=list)

    def attach(self) -> None:
        if not hasattr(self.model, "set_attn_implementation"):
            raise TypeError(f"{self.role}: {type(self.model).__name__} must be a transformers model")
        implementation = self.model.config._attn_implementation.removeprefix(PREFIX)
        _register(implementation)
        self._own_implementation = implementation
        self.model.set_attn_implementation(PREFIX + implementation)
        if self.model.config._attn_implementation != PREFIX + implementation:
            raise TypeError(
                f"{self.role}: {type(self.model).__name__} must take its attention from AttentionInterface"
            )
        self._hooks = [
            self.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.model.register_forward_hook(self._end, always_call=True),
        ]

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.clear()
        self.model.set_attn_implementation(self._own_implementation)

    def clear(self) -> None:
        self.layers, self.masks, self.arguments = [], [], None

    def _begin(self, module, args, kwargs) -> None:
        self.clear()  # only the latest forward counts
        self.arguments = (args, kwargs)
        _running.capture = self

    def _end(self, *_) -> None:
        _running.capture = None

    def mask_of(self, attention_mask: torch.Tensor | None, sliding_window: int | None) -> _Mask:
        """The recorded mask of a layer that received `attention_mask`."""
        same = [mask for mask in self.masks if mask.tensor is attention_mask and mask.local_size == sliding_window]
        same = same or [mask for mask in self.masks if mask.tensor is attention_mask]
        if same and same[0].supported and same[0].local_size == sliding_window:
            return same[0]
        if not self.masks and attention_mask is None:
            return _Mask(None, None, sliding_window, True)
        raise ValueError(
            f"{self.role}: layer {len(self.layers)} uses an attention mask we do not support (chunked, packed or 4-D); "
            "AttentionDistiller supports causal and bidirectional masks, sliding windows and padding (2-D attention_mask)"
        )


# ---- The functions that a model calls ------------------------------------------------------------------------------


def _register(implementation: str) -> None:
    AttentionInterface.register(PREFIX + implementation, partial(_attention, implementation))
    if implementation in AttentionMaskInterface._global_mapping:
        own_mask = AttentionMaskInterface._global_mapping[implementation]
        AttentionMaskInterface.register(PREFIX + implementation, partial(_mask, own_mask))


def _mask(own, /, **kwargs):
    """Records the mask of the model's own implementation. transformers passes all arguments by name."""
    made = own(**kwargs)
    if (capture := getattr(_running, "capture", None)) is not None:
        padding = kwargs.get("attention_mask")
        padding = None if padding is None or bool(padding.all()) else padding
        # transformers withdraws this permission if a mask combines more than causality, a window and padding.
        supported = kwargs.get("allow_is_causal_skip", False) or kwargs.get("allow_is_bidirectional_skip", False)
        capture.masks.append(_Mask(made, padding, kwargs.get("local_size"), supported))
    return made


def _attention(implementation, module, query, key, value, attention_mask, /, **kwargs):
    """Runs the attention of `implementation`, and records it while a captured model runs."""
    modeling = sys.modules[type(module).__module__]
    functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    own = functions.get_interface(implementation, getattr(modeling, "eager_attention_forward", None))
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    # The same kernel whether recorded or not: checkpointing expects the recomputation to save the same tensors.
    answer, lse = None, None
    if implementation == "sdpa":
        answer, lse = _sdpa_with_lse(query, key, value, attention_mask, causal, **kwargs)
    if answer is None:
        answer = own(module, query, key, value, attention_mask, **kwargs)
    if (capture := getattr(_running, "capture", None)) is not None:
        mask = capture.mask_of(attention_mask, kwargs.get("sliding_window"))
        window = -1 if mask.local_size is None else mask.local_size - 1 if causal else mask.local_size
        softcap = kwargs.get("softcap") or 0.0
        capture.layers.append(Layer(query, key, lse, kwargs.get("scaling"), softcap, causal, window, mask.padding))
    return answer


def _sdpa_with_lse(query, key, value, attention_mask, causal, *, dropout=0.0, scaling=None, **kwargs):
    """((output, None), lse) from the kernel that scaled_dot_product_attention chooses; (None, None) if it returns no LSE."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    causal = causal and query.shape[2] > 1 and attention_mask is None
    others = [kwargs.get(name) for name in ("softcap", "position_bias", "cache")]
    if choose is None or any(other is not None for other in others) or (causal and query.shape[2] != key.shape[2]):
        return None, None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    backend = choose(query, key, value, attention_mask, dropout, causal, scale=scaling)
    aten, flash, efficient, cudnn = torch.ops.aten, 1, 2, 3  # torch.nn.attention.SDPBackend
    if query.device.type == "cpu" and backend == flash:
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
                ~attention_mask, -torch.inf
            )
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, causal, attn_mask=attention_mask, scale=scaling
        )
    elif query.device.type != "cuda" or attention_mask is not None or query.shape[-1] % 8 != 0:
        return None, None
    elif backend == flash:
        output, lse, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scaling
        )
    elif backend == efficient:
        output, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, dropout, causal, scale=scaling
        )
    elif backend == cudnn:
        output, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, dropout, causal, False, scale=scaling
        )
    else:
        return None, None
    lse = lse.detach().flatten(2)[..., : query.shape[2]]  # some kernels round the length up, or add a dimension of 1
    return (output.transpose(1, 2).contiguous(), None), lse
