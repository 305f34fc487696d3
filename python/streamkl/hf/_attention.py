"""The function that an attached model calls for its attention.

It runs what the model ran before, bit for bit unless it may carry the KL, and tells the model's Recorder about it.
torch.compile traces it, so it reads no value of a tensor then and changes nothing but the list of calls.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.integrations.sdpa_attention import repeat_kv, use_gqa_in_sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._carried import Carried, CarriedKL, Slot
from .._sdpa import as_autocast, sdpa_with_lse
from ._context import active_region

# Arguments of an attention function that change its distribution and are not modeled; see _layers.py for the messages.
UNMODELED = ("position_bias", "indices", "block_indices", "cache")


class Probe(NamedTuple):
    """What a layer returned for some of its rows, to prove the model of it."""

    rows: list[int] | None  # None: the rows of fixed_rows()
    output: torch.Tensor  # [batch, rows, heads, dim_v]
    batch: slice  # the sequences that it covers


@dataclass
class Call:
    """A call of an attention function."""

    module: torch.nn.Module
    implementation: str
    query: torch.Tensor  # [batch, heads, len_q, dim]
    key: torch.Tensor  # [batch, key_heads, len_k, dim]
    value: torch.Tensor | None  # None: nothing needs it; a teacher would keep it only for us
    lse: torch.Tensor | None  # [batch, heads, len_q], if the attention returns it
    mask: Any  # the mask that the layer received
    causal: bool  # the attention is causal if it has no mask tensor
    scale: float | None
    softcap: float
    sink: torch.Tensor | None  # [heads], logits
    dropout: float
    options: dict[str, Any]  # the other arguments that matter: those of _OPTIONS
    training: bool
    has_graph: bool  # the attention ran with gradients enabled
    handle: CarriedKL | None = None  # None: its backward cannot carry the KL
    apart: str | None = None  # why the backward cannot carry the KL
    probe: Probe | None = None
    again: tuple[tuple, dict[str, Any]] | None = None  # further arguments, if only a second run without dropout proves it


def record_attention(recorder, implementation: str, module, query, key, value, attention_mask=None, *args, **kwargs):
    """Runs the attention of `implementation`, and records it while the model of the recorder runs."""
    if recorder.step is None and recorder.others:
        recorder = next((other for other in recorder.others if other.step is not None), recorder)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    lse, handle, call = None, None, None
    if recorder.step is not None:
        options = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
        sink = kwargs.get("s_aux")
        sink = None if sink is None else sink.clone()  # FSDP frees a parameter after the forward of its module
        call = Call(
            module, implementation, query, key, value, None, attention_mask, causal, kwargs.get("scaling"),
            kwargs.get("softcap") or 0.0, sink, kwargs.get("dropout") or 0.0, options, module.training, torch.is_grad_enabled(),
        )  # fmt: skip
    apart = _why_apart(recorder, implementation, module, query, key, value, args, kwargs)
    # Recorded or not, the same kernel runs: checkpointing expects the recomputation to save the same tensors.
    # A context-parallel region replaces SDPA, not its kernels.
    is_whole = not torch.compiler.is_compiling() and active_region() is None
    if implementation == "sdpa" and not args and is_whole:
        if apart is None:
            query, key, value = map(as_autocast, (query, key, value))
            slot = Slot(inject=False)
            if call is not None:
                call.query, call.key, call.value = query, key, value
                slot.term, slot.early = recorder.early_term(call)
            answer, lse, handle = _carried(slot, module, query, key, value, attention_mask, causal, **kwargs)
        else:
            answer, lse = _sdpa_with_lse(module, query, key, value, attention_mask, causal, **kwargs)
    if lse is None and handle is None:
        answer = _run_own(implementation, module, query, key, value, attention_mask, *args, **kwargs)
    if call is not None:
        if lse is not None:
            call.query, call.key = map(as_autocast, (query, key))  # the LSE belongs to the rounded queries and keys
        call.lse, call.handle, call.apart = lse, handle, apart
        if recorder.wants_proof(call):
            call.probe = _probe(recorder, call, answer, args, kwargs)
        elif not recorder.needs_values:
            call.value = None
        recorder.step.calls.append(call)
        if handle is not None:
            recorder.slots[module] = handle.slot
    return answer


_OPTIONS = ("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", *UNMODELED)


def _run_own(implementation, module, query, key, value, attention_mask, *args, **kwargs):
    modeling = sys.modules[type(module).__module__]
    functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    own = modeling.eager_attention_forward if implementation == "eager" else functions[implementation]
    if "flash" not in implementation:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    attached = module.config._attn_implementation  # transformers looks the kernel up by this name
    module.config._attn_implementation_internal = implementation
    try:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    finally:
        module.config._attn_implementation_internal = attached


# ---- What a proof needs ------------------------------------------------------------------------------------------------


def fixed_rows(length: int) -> list[int]:
    return [0, length // 3, length // 2, length - 1]


@torch.no_grad()
def _probe(recorder, call: Call, answer, args, kwargs) -> Probe | None:
    """The output of the attention for some rows, without dropout. None: the proof of a compiled call runs it again."""
    has_dropout = bool(call.dropout and call.training)
    if torch.compiler.is_compiling():
        if has_dropout:
            call.again = (args, kwargs)
            return None
        return Probe(
            None, torch.stack([answer[0][:, row] for row in fixed_rows(call.query.shape[2])], 1), slice(None)
        )
    rows = recorder.step.rows_to_prove(call)
    if has_dropout:
        return probe_again(call, rows, args, kwargs)
    output = answer[0]
    batch = slice(max(len(output) - 2, 0), len(output))  # two sequences are enough
    return Probe(rows, _of_rows(output[batch], rows), batch)


def probe_again(call: Call, rows: list[int] | None, args: tuple, kwargs: dict[str, Any]) -> Probe:
    """Runs the attention of the last sequence again, without dropout."""
    assert call.value is not None
    last = slice(len(call.query) - 1, len(call.query))
    tensors = [each[last].to(call.query.dtype) for each in (call.query, call.key, call.value)]
    mask = call.mask[last] if isinstance(call.mask, torch.Tensor) and len(call.mask) == len(call.query) else call.mask
    output = _run_own(call.implementation, call.module, *tensors, mask, *args, **{**kwargs, "dropout": 0.0})[0]
    return Probe(rows, _of_rows(output, rows), last)


def _of_rows(output: torch.Tensor, rows: list[int] | None) -> torch.Tensor:
    return output if rows is None or output.dim() != 4 else output[:, rows]


# ---- Attention whose backward carries the KL -------------------------------------------------------------------------


def _why_apart(recorder, implementation, module, query, key, value, args, kwargs) -> str | None:
    """Why the backward of an attention cannot carry its KL; None: it can."""
    if not recorder.carries:
        return "fused=False"
    if torch.compiler.is_compiling():
        return "the student is compiled"
    if implementation != "sdpa":
        return f"attn_implementation={implementation!r} is not 'sdpa'"
    if active_region() is not None:
        return "the sequences are split (context parallelism)"
    if not torch.is_grad_enabled():
        return "gradients are off"
    if module in recorder.apart:
        return recorder.apart[module]
    if kwargs.get("dropout"):
        return f"attention dropout of {kwargs['dropout']:g}"
    if key.shape != value.shape:
        return f"heads of {value.shape[-1]} values and {key.shape[-1]} keys"
    given = [name for name in ("softcap", "s_aux", *UNMODELED) if kwargs.get(name) is not None]
    return f"the attention takes {given[0] if given else 'more arguments'}" if given or args else None


def _carried(slot, module, query, key, value, attention_mask, causal, **kwargs):
    """(answer, lse, handle): the answer, with a backward that adds the KL which the slot has or is given.

    With an early term one kernel computes the answer and the KL. Without, the fastest kernel computes the answer.
    """
    lses: list[torch.Tensor | None] = []

    def compute(q, k, v):
        answer, lse = _sdpa_with_lse(module, q, k, v, attention_mask, causal, fastest=True, **kwargs)
        if lse is None:
            answer = _run_own("sdpa", module, q, k, v, attention_mask, **kwargs)
        lses.append(lse)
        return answer[0].transpose(1, 2), lse

    output, loss = Carried.apply(query, key, value, slot, compute)
    lse = slot.term.unpacked(slot.term.lse_s, len(query)) if slot.early is not None else lses[0]
    return (output.transpose(1, 2), None), lse, CarriedKL(loss, slot)


# ---- torch's fused attention, with its LSE -------------------------------------------------------------------------

_GQA_ARGUMENTS = len(inspect.signature(use_gqa_in_sdpa).parameters)  # transformers 5.0 does not ask for the values


def _sdpa_with_lse(
    module, query, key, value, attention_mask, causal, *, dropout=0.0, scaling=None, fastest=False, **kwargs
):
    """((output, None), lse) from the kernel that scaled_dot_product_attention chooses; (None, None) if it returns no LSE.

    `fastest`: from cuDNN's kernel where that is faster.
    """
    causal = causal and query.shape[2] > 1 and attention_mask is None
    others = [kwargs.get(name) for name in ("softcap", "s_aux", "position_bias", "cache")]
    if any(other is not None for other in others):
        return None, None
    groups = getattr(module, "num_key_value_groups", 1)
    gqa = groups > 1 and use_gqa_in_sdpa(*(attention_mask, key, value)[:_GQA_ARGUMENTS])
    if groups > 1 and not gqa:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    given = map(as_autocast, (query, key, value, attention_mask))
    answer = sdpa_with_lse(*given, dropout, causal, scaling, gqa, fastest)
    if answer is None:
        return None, None
    output, lse = answer
    return (output.transpose(1, 2).contiguous(), None), lse
