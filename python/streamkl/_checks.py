"""What a call may look like: every rule about the shapes, types and devices of tensors, once.

What depends on values alone (scales, windows, the contents of length arrays) the library itself checks.
"""

from __future__ import annotations

from typing import Optional

import torch

from . import _library as lib

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # skl_dtype

# What is checked of a tensor that may be absent.
Facts = Optional[tuple[torch.Size, torch.dtype, torch.device]]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


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


def check_call(
    q_t, k_t, q_s, k_s, lse_t, lse_s, row_weight, cu_seqlens_q, cu_seqlens_k, key_lengths,
    max_seqlen_q, max_seqlen_k, causal, window_left, window_right, scale_t, scale_s, softcap_t, softcap_s,
    reverse, deterministic, heads_first, gradients,
):  # fmt: skip
    """The library's description of a call whose tensors are given as (shape, dtype, device); ValueError if it has none."""
    packed = cu_seqlens_q is not None
    _require(
        packed == (cu_seqlens_k is not None),
        f"cu_seqlens_{'k' if packed else 'q'} is missing: cu_seqlens_q and cu_seqlens_k must be given together",
    )
    _require(
        not (packed and key_lengths is not None), "key_lengths: must be None with cu_seqlens, which hold the lengths"
    )
    _check_side("q_t", q_t, "k_t", k_t, packed, heads_first)
    _check_side("q_s", q_s, "k_s", k_s, packed, heads_first)

    batch, heads_t, len_q = sizes(q_t[0], packed, heads_first)
    batch_k, key_heads_t, len_k = sizes(k_t[0], packed, heads_first)
    batch_s, heads_s, len_q_s = sizes(q_s[0], packed, heads_first)
    batch_ks, key_heads_s, len_k_s = sizes(k_s[0], packed, heads_first)
    _same("batches", "q_t", q_t, batch, "k_t", k_t, batch_k)
    _same("batches", "q_t", q_t, batch, "q_s", q_s, batch_s)
    _same("batches", "q_t", q_t, batch, "k_s", k_s, batch_ks)
    _same("query lengths", "q_t", q_t, len_q, "q_s", q_s, len_q_s)
    _same("key lengths", "k_t", k_t, len_k, "k_s", k_s, len_k_s)
    for name, heads in ("q_t", heads_t), ("k_t", key_heads_t), ("q_s", heads_s), ("k_s", key_heads_s):
        _require(heads > 0, f"{name}: must have at least one head")
    _require(
        heads_t % heads_s == 0,
        f"q_t {_shape_text(q_t[0])} and q_s {_shape_text(q_s[0])}: {heads_t} teacher heads must be a multiple of "
        f"{heads_s} student heads",
    )
    for side, heads, key_heads in ("t", heads_t, key_heads_t), ("s", heads_s, key_heads_s):
        _require(
            heads % key_heads == 0,
            f"q_{side} has {heads} heads: must be a multiple of the {key_heads} heads of k_{side}",
        )

    def rows(heads):
        return (heads, len_q) if packed else (batch, heads, len_q)

    expected = {
        "lse_t": (lse_t, rows(heads_t), torch.float32),
        "lse_s": (lse_s, rows(heads_s), torch.float32),
        "row_weight": (row_weight, rows(heads_s), torch.float32),
        "key_lengths": (key_lengths, (batch,), torch.int32),
    }
    for name, (given, shape, dtype) in expected.items():
        if given is not None:
            _require(tuple(given[0]) == shape, f"{name}: shape {_shape_text(given[0])} must be {_shape_text(shape)}")
            _require(given[1] == dtype, f"{name}: dtype {given[1]} must be {dtype}")
    sequences = batch
    if packed:
        for name, given in ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k):
            _require(
                len(given[0]) == 1 and given[0][0] > 0 and given[1] == torch.int32,
                f"{name}: {given[1]} of shape {_shape_text(given[0])} must be torch.int32 of shape [sequences + 1]",
            )
        sequences = cu_seqlens_q[0][0] - 1
        _same(
            "sequences", "cu_seqlens_q", cu_seqlens_q, sequences, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_k[0][0] - 1
        )

    device = q_t[2]
    others = {"k_t": k_t, "q_s": q_s, "k_s": k_s, "lse_t": lse_t, "lse_s": lse_s, "row_weight": row_weight,
              "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "key_lengths": key_lengths}  # fmt: skip
    for name, given in others.items():
        _require(
            given is None or given[2] == device,
            f"q_t is on {device} and {name} on {given and given[2]}: must be one device",
        )
    _require(device.type in ("cpu", "cuda"), f"q_t is on {device}: must be on a CPU or a CUDA device")

    return lib.PlanKey(
        lib.CUDA if device.type == "cuda" else lib.CPU, device.index or 0, deterministic, DTYPES[q_t[1]],
        DTYPES[q_s[1]], gradients, int(reverse), sequences,
        len_q if max_seqlen_q < 0 or not packed else max_seqlen_q,
        len_k if max_seqlen_k < 0 or not packed else max_seqlen_k,
        heads_t, heads_s, key_heads_t, key_heads_s, q_t[0][-1], q_s[0][-1], scale_t, scale_s, softcap_t, softcap_s,
        causal, window_left, window_right, packed, len_q if packed else 0, len_k if packed else 0,
    )  # fmt: skip
