"""What a call may look like: every rule about the shapes, types and devices of tensors, once.

What depends on values alone (scales, windows, the contents of length arrays) the library itself checks.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch

from . import _library as lib

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # skl_dtype

# What is checked of a tensor that may be absent.
Facts = Optional[tuple[torch.Size, torch.dtype, torch.device]]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_options(direction, reduction, layout, window_size, softmax_scale_t, softmax_scale_s) -> None:
    """Rules about options that the library does not see as they are given."""
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction={direction!r}: must be 'forward' or 'reverse'")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")
    if layout not in ("bnhd", "bhnd"):
        raise ValueError(f"layout={layout!r}: must be 'bnhd' or 'bhnd'")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size={window_size!r}: must be a pair (left, right), -1 for no limit")
    if softmax_scale_t == 0 or softmax_scale_s == 0:
        raise ValueError(f"softmax_scale_t={softmax_scale_t}, softmax_scale_s={softmax_scale_s}: must not be 0")


def _shape_text(shape) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _check_side(q_name: str, q: Facts, k_name: str, k: Facts, packed: bool, heads_first: bool) -> None:
    """Rules about the queries and keys of one model."""
    ndim = 3 if packed else 4
    shapes = {(False, False): "[batch, length, heads, dim]", (False, True): "[batch, heads, length, dim]",
              (True, False): "[total, heads, dim]", (True, True): "[heads, total, dim]"}  # fmt: skip
    expected = shapes[packed, heads_first] + (" with cu_seqlens" if packed else "")
    for name, (shape, dtype, _) in (q_name, q), (k_name, k):
        _require(len(shape) == ndim, f"{name}: shape {_shape_text(shape)} must be {expected}")
        _require(dtype in DTYPES, f"{name}: dtype {dtype} must be torch.float32, torch.float16 or torch.bfloat16")
    _require(q[1] == k[1], f"{q_name} is {q[1]} and {k_name} is {k[1]}: must be of one type")
    _require(
        q[0][-1] == k[0][-1],
        f"{q_name} {_shape_text(q[0])} and {k_name} {_shape_text(k[0])}: head sizes {q[0][-1]} and {k[0][-1]} must be equal",
    )


def sizes(shape, packed: bool, heads_first: bool):
    """(batch, heads, length) of a tensor in the caller's layout; batch is 1 where it is packed."""
    batch, one, two = (1, *shape[:2]) if packed else shape[:3]
    return (batch, one, two) if heads_first else (batch, two, one)


def _same(what: str, name_a: str, a: Facts, size_a: int, name_b: str, b: Facts, size_b: int) -> None:
    _require(
        size_a == size_b,
        f"{name_a} {_shape_text(a[0])} and {name_b} {_shape_text(b[0])}: {what} {size_a} and {size_b} must be equal",
    )


def _check_lengths_given(cu_seqlens_q: Facts, cu_seqlens_k: Facts, key_lengths: Facts) -> bool:
    """Whether sequences are packed."""
    packed = cu_seqlens_q is not None
    _require(
        packed == (cu_seqlens_k is not None),
        f"cu_seqlens_{'k' if packed else 'q'} is missing: cu_seqlens_q and cu_seqlens_k must be given together",
    )
    _require(
        not (packed and key_lengths is not None), "key_lengths: must be None with cu_seqlens, which hold the lengths"
    )
    return packed


class _Sizes(NamedTuple):
    batch: int
    len_q: int
    len_k: int
    heads_t: int
    key_heads_t: int
    query_heads_s: int  # of an indexer: heads_s * index_heads
    key_heads_s: int


def _check_models(q_t: Facts, k_t: Facts, q_s: Facts, k_s: Facts, packed: bool, heads_first: bool) -> _Sizes:
    """Rules about the queries and keys of both models, save those about heads."""
    _check_side("q_t", q_t, "k_t", k_t, packed, heads_first)
    _check_side("q_s", q_s, "k_s", k_s, packed, heads_first)
    batch, heads_t, len_q = sizes(q_t[0], packed, heads_first)
    batch_k, key_heads_t, len_k = sizes(k_t[0], packed, heads_first)
    batch_s, query_heads_s, len_q_s = sizes(q_s[0], packed, heads_first)
    batch_ks, key_heads_s, len_k_s = sizes(k_s[0], packed, heads_first)
    _same("batches", "q_t", q_t, batch, "k_t", k_t, batch_k)
    _same("batches", "q_t", q_t, batch, "q_s", q_s, batch_s)
    _same("batches", "q_t", q_t, batch, "k_s", k_s, batch_ks)
    _same("query lengths", "q_t", q_t, len_q, "q_s", q_s, len_q_s)
    _same("key lengths", "k_t", k_t, len_k, "k_s", k_s, len_k_s)
    for name, heads in ("q_t", heads_t), ("k_t", key_heads_t), ("q_s", query_heads_s), ("k_s", key_heads_s):
        _require(heads > 0, f"{name}: must have at least one head")
    return _Sizes(batch, len_q, len_k, heads_t, key_heads_t, query_heads_s, key_heads_s)


def _check_heads(size: _Sizes, heads_s: int, q_t: Facts, student_name: str, student: Facts) -> None:
    """`student` is the tensor that says how many student heads there are."""
    _require(
        size.heads_t % heads_s == 0,
        f"q_t {_shape_text(q_t[0])} and {student_name} {_shape_text(student[0])}: {size.heads_t} teacher heads must be a "
        f"multiple of {heads_s} student heads",
    )
    sides = ("q_t", size.heads_t, "k_t", size.key_heads_t), (student_name, heads_s, "k_s", size.key_heads_s)
    for name, heads, key_name, key_heads in sides:
        _require(
            heads % key_heads == 0, f"{name} has {heads} heads: must be a multiple of the {key_heads} heads of {key_name}"
        )


def _check_rows(
    size: _Sizes, heads_s: int, packed: bool, lse_t: Facts, lse_s: Facts, row_weight: Facts, key_lengths: Facts
) -> None:
    """Rules about what has a number for every row, or for every sequence."""

    def rows(heads):
        return (heads, size.len_q) if packed else (size.batch, heads, size.len_q)

    expected = {
        "lse_t": (lse_t, rows(size.heads_t), torch.float32),
        "lse_s": (lse_s, rows(heads_s), torch.float32),
        "row_weight": (row_weight, rows(heads_s), torch.float32),
        "key_lengths": (key_lengths, (size.batch,), torch.int32),
    }
    for name, (given, shape, dtype) in expected.items():
        if given is not None:
            _require(tuple(given[0]) == shape, f"{name}: shape {_shape_text(given[0])} must be {_shape_text(shape)}")
            _require(given[1] == dtype, f"{name}: dtype {given[1]} must be {dtype}")


def _check_sequences(size: _Sizes, packed: bool, cu_seqlens_q: Facts, cu_seqlens_k: Facts) -> int:
    """How many there are."""
    if not packed:
        return size.batch
    for name, given in ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k):
        _require(
            len(given[0]) == 1 and given[0][0] > 0 and given[1] == torch.int32,
            f"{name}: {given[1]} of shape {_shape_text(given[0])} must be torch.int32 of shape [sequences + 1]",
        )
    sequences = cu_seqlens_q[0][0] - 1
    _same("sequences", "cu_seqlens_q", cu_seqlens_q, sequences, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_k[0][0] - 1)
    return sequences


def _check_device(q_t: Facts, **others: Facts) -> torch.device:
    device = q_t[2]
    for name, given in others.items():
        _require(
            given is None or given[2] == device,
            f"q_t is on {device} and {name} on {given and given[2]}: must be one device",
        )
    _require(device.type in ("cpu", "cuda"), f"q_t is on {device}: must be on a CPU or a CUDA device")
    return device


def _plan_key(
    size: _Sizes, heads_s: int, sequences: int, device, packed, q_t: Facts, q_s: Facts, max_seqlen_q, max_seqlen_k, causal,
    window_left, window_right, scale_t, scale_s, softcap_t, softcap_s, reverse, deterministic, gradients, **indexer,
) -> lib.PlanKey:  # fmt: skip
    return lib.PlanKey(
        lib.CUDA if device.type == "cuda" else lib.CPU, device.index or 0, deterministic, DTYPES[q_t[1]],
        DTYPES[q_s[1]], gradients, int(reverse), sequences,
        size.len_q if max_seqlen_q < 0 or not packed else max_seqlen_q,
        size.len_k if max_seqlen_k < 0 or not packed else max_seqlen_k,
        size.heads_t, heads_s, size.key_heads_t, size.key_heads_s, q_t[0][-1], q_s[0][-1], scale_t, scale_s, softcap_t,
        softcap_s, causal, window_left, window_right, packed, size.len_q if packed else 0, size.len_k if packed else 0,
        **indexer,
    )  # fmt: skip


def check_call(
    q_t, k_t, q_s, k_s, lse_t, lse_s, row_weight, cu_seqlens_q, cu_seqlens_k, key_lengths,
    max_seqlen_q, max_seqlen_k, causal, window_left, window_right, scale_t, scale_s, softcap_t, softcap_s,
    reverse, deterministic, heads_first, gradients,
):  # fmt: skip
    """The library's description of a call whose tensors are given as (shape, dtype, device); ValueError if it has none."""
    packed = _check_lengths_given(cu_seqlens_q, cu_seqlens_k, key_lengths)
    size = _check_models(q_t, k_t, q_s, k_s, packed, heads_first)
    heads_s = size.query_heads_s
    _check_heads(size, heads_s, q_t, "q_s", q_s)
    _check_rows(size, heads_s, packed, lse_t, lse_s, row_weight, key_lengths)
    sequences = _check_sequences(size, packed, cu_seqlens_q, cu_seqlens_k)
    device = _check_device(
        q_t, k_t=k_t, q_s=q_s, k_s=k_s, lse_t=lse_t, lse_s=lse_s, row_weight=row_weight, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, key_lengths=key_lengths,
    )  # fmt: skip
    return _plan_key(
        size, heads_s, sequences, device, packed, q_t, q_s, max_seqlen_q, max_seqlen_k, causal, window_left, window_right,
        scale_t, scale_s, softcap_t, softcap_s, reverse, deterministic, gradients,
    )  # fmt: skip


def check_indexer_call(
    q_t, k_t, q_s, k_s, w_s, indices, lse_t, lse_s, row_weight, cu_seqlens_q, cu_seqlens_k, key_lengths,
    max_seqlen_q, max_seqlen_k, causal, window_left, window_right, scale_t, scale_s, softcap_t, linear,
    reverse, deterministic, heads_first, gradients,
):  # fmt: skip
    """The same for an indexer, whose weights say how many student and index heads there are."""
    packed = _check_lengths_given(cu_seqlens_q, cu_seqlens_k, key_lengths)
    size = _check_models(q_t, k_t, q_s, k_s, packed, heads_first)
    of_a_row = {"w_s": w_s} if indices is None else {"w_s": w_s, "indices": indices}
    for name, given in of_a_row.items():
        _check_row_vectors(name, given, size, packed, heads_first)
    heads_s, index_heads = sizes(w_s[0], packed, heads_first)[1], w_s[0][-1]
    _require(w_s[1] in DTYPES, f"w_s: dtype {w_s[1]} must be torch.float32, torch.float16 or torch.bfloat16")
    _require(heads_s > 0, "w_s: must have at least one student head")
    _require(
        size.query_heads_s == heads_s * index_heads,
        f"q_s {_shape_text(q_s[0])} and w_s {_shape_text(w_s[0])}: {size.query_heads_s} index query heads must be "
        f"{heads_s} student heads x {index_heads} weights",
    )
    _check_heads(size, heads_s, q_t, "w_s", w_s)
    if indices is not None:
        _same("student heads", "w_s", w_s, heads_s, "indices", indices, sizes(indices[0], packed, heads_first)[1])
        _require(indices[1] == torch.int32, f"indices: dtype {indices[1]} must be torch.int32 or torch.int64")
        _require(indices[0][-1] > 0, f"indices: shape {_shape_text(indices[0])} must list at least one key a row")
    _check_rows(size, heads_s, packed, lse_t, lse_s, row_weight, key_lengths)
    sequences = _check_sequences(size, packed, cu_seqlens_q, cu_seqlens_k)
    device = _check_device(
        q_t, k_t=k_t, q_s=q_s, k_s=k_s, w_s=w_s, indices=indices, lse_t=lse_t, lse_s=lse_s, row_weight=row_weight,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, key_lengths=key_lengths,
    )  # fmt: skip
    return _plan_key(
        size, heads_s, sequences, device, packed, q_t, q_s, max_seqlen_q, max_seqlen_k, causal, window_left, window_right,
        scale_t, scale_s, softcap_t, 0.0, reverse, deterministic, gradients, student=lib.INDEXER, index_heads=index_heads,
        dtype_w=DTYPES[w_s[1]], index_linear=linear, top_k=0 if indices is None else indices[0][-1],
    )  # fmt: skip


def _check_row_vectors(name: str, given: Facts, size: _Sizes, packed: bool, heads_first: bool) -> None:
    """Rules about the weights and lists of an indexer, which may come without a heads dimension."""
    last = {"w_s": "index heads", "indices": "top_k"}[name]
    rows = "total" if packed else "batch, length"
    with_heads = {(False, False): f"batch, length, heads_s, {last}", (False, True): f"batch, heads_s, length, {last}",
                  (True, False): f"total, heads_s, {last}", (True, True): f"heads_s, total, {last}"}  # fmt: skip
    _require(
        len(given[0]) == (3 if packed else 4),
        f"{name}: shape {_shape_text(given[0])} must be [{rows}, {last}] or [{with_heads[packed, heads_first]}]",
    )
    batch, _, length = sizes(given[0], packed, heads_first)
    _require(
        (batch, length) == (size.batch, size.len_q),
        f"{name}: shape {_shape_text(given[0])} must have "
        + (f"{size.len_q} rows" if packed else f"batch {size.batch} and length {size.len_q}")
        + ", as q_t has",
    )
