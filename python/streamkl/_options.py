"""The options of attention_kl and indexer_kl: their types, and their translation into those of the operators."""

from __future__ import annotations

import numbers
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch.autograd import forward_ad

from ._problem import KL_FORWARD, KL_REVERSE, Options

Direction = Literal["forward", "reverse"]
Reduction = Literal["mean", "sum", "none"]
Layout = Literal["bnhd", "bhnd"]
CpLayout = Literal["zigzag", "contiguous"]
CpComm = Literal["allgather", "ring"]
CpGrads = Literal["sum", "mean"]

# ---- Types of keyword arguments: for functions that pass them on -----------------------------------------------------


class _ModelOptions(TypedDict, total=False):
    causal: bool
    window_size: tuple[int, int]
    softmax_scale_t: float | None
    softmax_scale_s: float | None
    softcap_t: float
    direction: Direction
    reduction: Reduction
    deterministic: bool
    check_lse: bool
    layout: Layout
    cp_group: Any
    cp_layout: CpLayout
    cp_comm: CpComm
    cp_grads: CpGrads
    tp_group: Any
    loss_group: Any


class AttentionOptions(_ModelOptions, total=False):
    """Options of attention_kl that stay the same from batch to batch."""

    softcap_s: float


class IndexerOptions(_ModelOptions, total=False):
    """Options of indexer_kl that stay the same from batch to batch."""

    relu: bool
    lse_t_wider: bool


class IndexerBatch(TypedDict, total=False):
    """Options of indexer_kl that belong to one batch."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    key_lengths: torch.Tensor | None
    key_begin: torch.Tensor | None
    key_end: torch.Tensor | None
    row_weight: torch.Tensor | None
    lse_t: torch.Tensor | None


class AttentionBatch(IndexerBatch, total=False):
    """Options of attention_kl that belong to one batch."""

    lse_s: torch.Tensor | None
    sink_t: torch.Tensor | None
    sink_s: torch.Tensor | None


class AllAttentionOptions(AttentionOptions, AttentionBatch, total=False):
    """All options of attention_kl except return_lse."""


class AllIndexerOptions(IndexerOptions, IndexerBatch, total=False):
    """All options of indexer_kl except return_rows."""


# ---- Translation -----------------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """Length arrays of a call: int32, contiguous."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    key_lengths: torch.Tensor | None
    key_begin: torch.Tensor | None
    key_end: torch.Tensor | None


def translate(
    gradients: int, *, window_size: tuple[int, int], cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    key_lengths: torch.Tensor | None, key_begin: torch.Tensor | None = None, key_end: torch.Tensor | None = None, **others: Any,
) -> tuple[Lengths, Any]:  # fmt: skip
    """Length arrays and options as the operators take them. Checks the rules that the library cannot check."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size={window_size!r}: {_PAIR}")
    fixed = gradients, torch.are_deterministic_algorithms_enabled(), *window_size
    options_of = _options.__wrapped__ if torch.compiler.is_compiling() else _options
    try:
        options = options_of(*fixed, **others)
    except TypeError:  # a value without a hash: a compiler's symbol, or one that the checks refuse
        options = _options.__wrapped__(*fixed, **others)
    if cu_seqlens_q is cu_seqlens_k is key_lengths is key_begin is key_end is None:
        return _NO_LENGTHS, options
    given = Lengths(cu_seqlens_q, cu_seqlens_k, key_lengths, key_begin, key_end)
    return Lengths(*(_as_int32(name, lengths) for name, lengths in zip(Lengths._fields, given))), options


@lru_cache(maxsize=1024, typed=True)  # typed: 1 is no flag, although it equals True
def _options(
    gradients: int, all_deterministic: bool, window_left: int, window_right: int, *, softmax_scale_t: float | None,
    softmax_scale_s: float | None, softcap_t: float, softcap_s: float = 0.0, relu: bool = True,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, direction: Direction, reduction: Reduction = "none",
    deterministic: bool = False, layout: Layout, **unchanged: Any,
) -> Any:  # fmt: skip
    """Options that are fields of Problem by the same name need no translation: `unchanged`."""
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction={direction!r}: must be 'forward' or 'reverse'")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")
    if layout not in ("bnhd", "bhnd"):
        raise ValueError(f"layout={layout!r}: must be 'bnhd' or 'bhnd'")
    if not (is_whole(window_left) and is_whole(window_right)):
        raise ValueError(f"window_size={(window_left, window_right)!r}: {_PAIR}")
    for name, scale in ("softmax_scale_t", softmax_scale_t), ("softmax_scale_s", softmax_scale_s):
        if scale is not None and _is_zero_in_f32(name, scale):
            raise ValueError(f"{name}={scale!r}: must not be 0 in float32")
    for name, softcap in ("softcap_t", softcap_t), ("softcap_s", softcap_s):
        if softcap and _is_zero_in_f32(name, softcap):
            raise ValueError(f"{name}={softcap!r}: must not be 0 in float32; 0: no cap")
    for name, longest in ("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k):
        if longest is not None and (not is_whole(longest) or longest < 0):
            raise ValueError(f"{name}={longest!r}: must be None or a whole number, at least 0")
    check_flags(relu=relu, deterministic=deterministic, **unchanged)
    return Options(
        gradients=gradients, direction=KL_REVERSE if direction == "reverse" else KL_FORWARD, scale_t=softmax_scale_t or 0.0,
        scale_s=softmax_scale_s or 0.0, softcap_t=softcap_t or 0.0, softcap_s=softcap_s or 0.0, window_left=window_left,
        window_right=window_right, index_linear=not relu, deterministic=deterministic or all_deterministic,
        max_seqlen_q=-1 if max_seqlen_q is None else max_seqlen_q, max_seqlen_k=-1 if max_seqlen_k is None else max_seqlen_k,
        heads_first=layout == "bhnd", **unchanged,
    )  # fmt: skip


_PAIR = "must be a pair (left, right) of whole numbers, -1 for no limit"
_NO_LENGTHS = Lengths(None, None, None, None, None)
_INT32 = torch.iinfo(torch.int32)


def _as_int32(name: str, lengths: torch.Tensor | None) -> torch.Tensor | None:
    if lengths is None:
        return None
    is_tensor = isinstance(lengths, torch.Tensor)
    if not is_tensor or lengths.dtype not in (torch.int32, torch.int64):
        given = f"dtype {lengths.dtype}" if is_tensor else type(lengths).__name__
        raise ValueError(f"{name}: {given} must be {'' if is_tensor else 'a tensor of '}torch.int32 or torch.int64")
    return to_int32(lengths).contiguous()


def to_int32(values: torch.Tensor) -> torch.Tensor:
    """A value out of range stays out of range, where a plain conversion wraps. Needs no host-device synchronisation."""
    return values.clamp(_INT32.min, _INT32.max).to(torch.int32) if values.dtype == torch.int64 else values


# ---- Types of numbers ------------------------------------------------------------------------------------------------
#
# Python and torch convert silently: True is 1, a tensor is its value (a host-device synchronisation on a GPU, without a
# gradient). These checks refuse such values. A compiler's symbols are numbers.


def is_whole(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    numeric = (float, int, torch.SymFloat, torch.SymInt, numbers.Real)
    return isinstance(value, numeric) and not isinstance(value, bool)


def _is_zero_in_f32(name: str, value: Any) -> bool:
    """Half the smallest f32, 2^-149, is rounded to 0."""
    if not _is_number(value):
        raise ValueError(f"{name}={value!r}: must be a number")
    return abs(value) <= 2.0**-150


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name}={flag!r}: must be True or False")


# ---- Transforms of torch.func --------------------------------------------------------------------------------------------

are_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def refuse_transforms(function: str, *tensors: torch.Tensor) -> None:
    """Without a forward-mode rule, an operator has a tangent of 0."""
    if torch.compiler.is_compiling():
        return
    if are_transforms_active() and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        case = "torch.func transforms (jvp, grad, vmap, hessian)"
    elif forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        case = "forward-mode differentiation"
    else:
        return
    raise RuntimeError(
        f"streamkl.{function} does not support {case}: use backward() or torch.autograd.grad, and the batch dimension for vmap; "
        f"streamkl.reference.{function} supports them"
    )
