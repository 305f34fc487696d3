"""The functions that an attached model calls for its masks and its attention.

They run what the model ran before, bit for bit, and tell the model's Recorder about it. torch.compile traces them, so they
read no value of a tensor and change nothing but the lists of the Recorder.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Callable

import torch
from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._carried import Carried, CarriedKL, Slot
from .._sdpa import as_autocast, sdpa_with_lse
from ._context import active_region

# Arguments of an attention function that change its distribution and are not modelled; see _layers.py for the messages.
UNMODELLED = ("position_bias", "indices", "block_indices", "cache")


@dataclass
class Mask:
    """A mask that a model made."""

    tensor: Any  # what the layers receive
    function: Callable | None
    padding: torch.Tensor | None  # [batch, keys] bool: False is padding
    aligned: Any  # the last query is at the position of the last key


@dataclass
class Call:
    """A call of an attention function."""

    module: torch.nn.Module
    implementation: str
    query: torch.Tensor  # [batch, heads, len_q, dim]
    key: torch.Tensor  # [batch, key_heads, len_k, dim]
    value: torch.Tensor | None  # if it is needed: a teacher would keep it only for us
    lse: torch.Tensor | None  # [batch, heads, len_q], if the attention returns it
    mask: Any  # the Mask of a model; None: no mask tensor; otherwise the unknown mask tensor
    causal: bool  # what the attention does without a mask tensor
    scale: float | None
    softcap: float
    sink: torch.Tensor | None  # [heads], logits
    options: dict[
        str, Any
    ]  # the other arguments that matter: sliding_window, cu_seq_lens_q, ... and those of UNMODELLED
    has_graph: bool  # it ran with gradients enabled
    handle: CarriedKL | None = None  # if its backward can carry the KL
    probe: Any = None  # (rows, output of these rows) to verify the model of this attention, once


def record_mask(recorder, own: Callable, /, **kwargs):
    """The mask of the model's own implementation. transformers passes all arguments by name."""
    made = own(**kwargs)
    if recorder.depth > 0:
        aligned = kwargs.get("q_offset", 0) - kwargs.get("kv_offset", 0) == kwargs["kv_length"] - kwargs["q_length"]
        recorder.masks.append(Mask(made, kwargs.get("mask_function"), kwargs.get("attention_mask"), aligned))
    return made


def record_attention(recorder, implementation: str, module, query, key, value, attention_mask=None, *args, **kwargs):
    """Runs the attention of `implementation`, and records it while the model of the recorder runs."""
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    # The same kernel whether recorded or not: checkpointing expects the recomputation to save the same tensors.
    lse, handle = None, None
    is_whole = not torch.compiler.is_compiling() and active_region() is None  # a region replaces SDPA, not its kernels
    if implementation == "sdpa" and not args and is_whole:
        if recorder.carries and _can_carry(query, key, value, **kwargs):
            query, key, value = map(as_autocast, (query, key, value))
            answer, lse, handle = _carried(module, query, key, value, attention_mask, causal, **kwargs)
        else:
            answer, lse = _sdpa_with_lse(module, query, key, value, attention_mask, causal, **kwargs)
    if lse is None and handle is None:
        answer = _run_own(implementation, module, query, key, value, attention_mask, *args, **kwargs)
    if recorder.depth > 0:
        if lse is not None:
            query, key = map(as_autocast, (query, key))  # the LSE is that of the rounded ones
        options = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
        sink = kwargs.get("s_aux")
        sink = None if sink is None else sink.clone()  # FSDP frees a parameter after the forward of its module
        call = Call(
            module, implementation, query, key, value, lse, _mask_of(recorder.masks, attention_mask), causal, kwargs.get("scaling"),
            kwargs.get("softcap") or 0.0, sink, options, torch.is_grad_enabled(), handle,
        )  # fmt: skip
        if not torch.compiler.is_compiling() and recorder.is_new(call):
            call.probe = _probe(call, answer, attention_mask, args, kwargs)
        elif not recorder.needs_values:
            call.value = None
        recorder.calls.append(call)
    return answer


_OPTIONS = ("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", *UNMODELLED)


def _run_own(implementation, module, query, key, value, attention_mask, *args, **kwargs):
    modeling = sys.modules[type(module).__module__]
    functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    own = functions.get_interface(implementation, getattr(modeling, "eager_attention_forward", None))
    if "flash" not in implementation:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    attached = module.config._attn_implementation  # transformers looks the kernel up by this name
    module.config._attn_implementation_internal = implementation
    try:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    finally:
        module.config._attn_implementation_internal = attached


def _mask_of(masks: list[Mask], tensor):
    """The recorded mask of a layer that received `tensor`; the tensor itself if no mask of the model is known for it."""
    if tensor is None:
        return None
    for mask in masks:
        if mask.tensor is tensor:
            return mask
    if isinstance(tensor, torch.Tensor) and not torch.compiler.is_compiling():
        for mask in masks:
            if isinstance(mask.tensor, torch.Tensor) and _same_view(mask.tensor, tensor):
                return mask
    return tensor


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A slice of all keys is another tensor with the same elements."""
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


@torch.no_grad()
def _probe(call: Call, answer, attention_mask, args, kwargs):
    """Some query rows, and the output of the attention for them, without dropout."""
    if kwargs.get("dropout"):
        answer = _run_own(
            call.implementation,
            call.module,
            call.query,
            call.key,
            call.value,
            attention_mask,
            *args,
            **{**kwargs, "dropout": 0.0},
        )
    length = call.query.shape[2]
    rows = sorted({length // 3, length // 2, length - 1})
    output = answer[0]
    return rows, output[:, rows].clone() if output.dim() == 4 and output.shape[1] == length else output


# ---- Attention whose backward carries the KL -------------------------------------------------------------------------


def _can_carry(query, key, value, dropout=0.0, **kwargs) -> bool:
    others = (kwargs.get(name) for name in ("softcap", "s_aux", *UNMODELLED))
    return torch.is_grad_enabled() and not dropout and key.shape == value.shape and all(other is None for other in others)


def _carried(module, query, key, value, attention_mask, causal, **kwargs):
    """(answer, lse, handle): the same answer, with a backward that adds the KL which the handle is given."""
    slot, lses = Slot(inject=False), []

    def compute(q, k, v):
        answer, lse = _sdpa_with_lse(module, q, k, v, attention_mask, causal, **kwargs)
        if lse is None:
            answer = _run_own("sdpa", module, q, k, v, attention_mask, **kwargs)
        lses.append(lse)
        return answer[0].transpose(1, 2), lse

    output, loss = Carried.apply(query, key, value, slot, compute)
    return (output.transpose(1, 2), None), lses[0], CarriedKL(loss, slot)


# ---- torch's fused attention, with its LSE -------------------------------------------------------------------------


def _sdpa_with_lse(module, query, key, value, attention_mask, causal, *, dropout=0.0, scaling=None, **kwargs):
    """((output, None), lse) from the kernel that scaled_dot_product_attention chooses; (None, None) if it returns no LSE."""
    causal = causal and query.shape[2] > 1 and attention_mask is None
    others = [kwargs.get(name) for name in ("softcap", "s_aux", "position_bias", "cache")]
    if any(other is not None for other in others):
        return None, None
    groups = getattr(module, "num_key_value_groups", 1)
    gqa = groups > 1 and use_gqa_in_sdpa(attention_mask, key, value)
    if groups > 1 and not gqa:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    given = map(as_autocast, (query, key, value, attention_mask))
    answer = sdpa_with_lse(*given, dropout, causal, scaling, gqa)
    if answer is None:
        return None, None
    output, lse = answer
    return (output.transpose(1, 2).contiguous(), None), lse
