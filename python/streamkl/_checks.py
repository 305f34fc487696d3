"""Every rule about the shapes, types and devices of tensors.

The library checks the rules about values: scales, windows, the contents of length arrays.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ._problem import CPU, CUDA, INDEXER, POOL_BLOCKS, Options, Problem, student_keys

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # skl_dtype

# The tensors that operators take: the four of the models, those of indexers and sinks, row vectors, length arrays, and those of
# the student's attention and of row states.
TENSORS = ("q_t", "k_t", "q_s", "k_s", "w_s", "sink_t", "sink_s", "indices")
ROWS = ("lse_t", "lse_s", "kl", "dot_t", "grad_kl")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "key_lengths", "key_begin", "key_end")
INPUTS = (*TENSORS, *ROWS, *LENGTHS, "v_s", "o_s", "do_s", "states")
STATE = 5  # floats of a skl_row_state

# (shape, dtype, device) of a tensor; None where the tensor is absent.
Spec = Any


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _shape_text(shape) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _check_type(name: str, dtype: torch.dtype) -> None:
    _require(
        dtype in DTYPES,
        f"{name}: dtype {dtype} must be torch.float32, torch.float16 or torch.bfloat16: convert it with {name}.float(); "
        "streamkl.reference computes in float64",
    )


def _check_side(q_name: str, q: Spec, k_name: str, k: Spec, packed: bool, heads_first: bool) -> None:
    """Rules about the queries and keys of one model."""
    ndim = 3 if packed else 4
    shapes = {
        (False, False): "[batch, length, heads, dim]",
        (False, True): "[batch, heads, length, dim]",
        (True, False): "[total, heads, dim]",
        (True, True): "[heads, total, dim]",
    }
    expected = shapes[packed, heads_first] + (" with cu_seqlens" if packed else "")
    for name, (shape, dtype, _) in (q_name, q), (k_name, k):
        _require(len(shape) == ndim, f"{name}: shape {_shape_text(shape)} must be {expected}")
        _check_type(name, dtype)
    _require(q[1] == k[1], f"{q_name} is {q[1]} and {k_name} is {k[1]}: must be of one type")
    _require(
        q[0][-1] == k[0][-1],
        f"{q_name} {_shape_text(q[0])} and {k_name} {_shape_text(k[0])}: head sizes {q[0][-1]} and {k[0][-1]} must be equal",
    )


def sizes(shape, packed: bool, heads_first: bool):
    """(batch, heads, length) of a tensor in the layout of the call; the batch of packed tensors is 1."""
    batch, one, two = (1, *shape[:2]) if packed else shape[:3]
    return (batch, one, two) if heads_first else (batch, two, one)


def _same(what: str, name_a: str, a: Spec, size_a: int, name_b: str, b: Spec, size_b: int) -> None:
    _require(
        size_a == size_b,
        f"{name_a} {_shape_text(a[0])} and {name_b} {_shape_text(b[0])}: {what} {size_a} and {size_b} must be equal",
    )


def _check_lengths_given(cu_seqlens_q: Spec, cu_seqlens_k: Spec, key_lengths: Spec) -> bool:
    """Returns whether sequences are packed."""
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
    query_heads_s: int  # indexer: heads_s * index_heads
    key_heads_s: int


def _check_models(q_t: Spec, k_t: Spec, q_s: Spec, k_s: Spec, packed: bool, asked: Any) -> _Sizes:
    """Rules about the queries and keys of both models, except those about heads."""
    heads_first = asked.heads_first
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
    if asked.pool:
        blocks = student_keys(asked, len_k)
        _require(
            len_k_s == blocks,
            f"k_s: shape {_shape_text(k_s[0])} must have {blocks} keys, one per block of {asked.pool_size} of the {len_k} keys "
            f"of k_t, with pool_blocks={POOL_BLOCKS[asked.pool_blocks]!r}",
        )
    else:
        _same("key lengths", "k_t", k_t, len_k, "k_s", k_s, len_k_s)
    for name, heads in ("q_t", heads_t), ("k_t", key_heads_t), ("q_s", query_heads_s), ("k_s", key_heads_s):
        _require(heads > 0, f"{name}: must have at least one head")
    return _Sizes(batch, len_q, len_k, heads_t, key_heads_t, query_heads_s, key_heads_s)


def _check_heads(size: _Sizes, heads_s: int, q_t: Spec, student_name: str, student: Spec) -> None:
    """`student` is the tensor that determines the number of student heads."""
    _require(
        size.heads_t % heads_s == 0,
        f"q_t {_shape_text(q_t[0])} and {student_name} {_shape_text(student[0])}: {size.heads_t} teacher heads must be a "
        f"multiple of {heads_s} student heads",
    )
    sides = ("q_t", size.heads_t, "k_t", size.key_heads_t), (student_name, heads_s, "k_s", size.key_heads_s)
    for name, heads, key_name, key_heads in sides:
        _require(
            heads % key_heads == 0,
            f"{name} has {heads} heads: must be a multiple of the {key_heads} heads of {key_name}",
        )


def _check_others(given: Any, size: _Sizes, heads_s: int, packed: bool, sequences: int) -> None:
    """Shape and type of everything except queries, keys and the tensors of an indexer."""

    def rows(heads):
        return (heads, size.len_q) if packed else (size.batch, heads, size.len_q)

    bounds = (size.len_q,) if packed else (size.batch, size.len_q)
    expected = {
        "lse_t": (rows(size.heads_t), torch.float32),
        "lse_s": (rows(heads_s), torch.float32),
        "kl": (rows(heads_s), torch.float32),
        "dot_t": (rows(size.heads_t), torch.float32),
        "grad_kl": (rows(heads_s), torch.float32),
        "states": ((*rows(heads_s), STATE), torch.float32),
        "sink_t": ((size.heads_t,), torch.float32),
        "sink_s": ((heads_s,), torch.float32),
        "cu_seqlens_q": ((sequences + 1,), torch.int32),
        "cu_seqlens_k": ((sequences + 1,), torch.int32),
        "key_lengths": ((size.batch,), torch.int32),
        "key_begin": (bounds, torch.int32),
        "key_end": (bounds, torch.int32),
        "v_s": given.k_s[:2],
        "o_s": given.q_s[:2],
        "do_s": given.q_s[:2],
    }
    for name, (shape, dtype) in expected.items():
        spec = getattr(given, name)
        if spec is not None:
            _require(
                tuple(spec[0]) == tuple(shape), f"{name}: shape {_shape_text(spec[0])} must be {_shape_text(shape)}"
            )
            _require(spec[1] == dtype, f"{name}: dtype {spec[1]} must be {dtype}")


def _check_sinks_given(sink_t: Spec, sink_s: Spec) -> None:
    _require(
        (sink_t is None) == (sink_s is None),
        f"sink_{'s' if sink_s is None else 't'} is missing: a sink is an outcome of both distributions; without both sinks the "
        "KL is that of the distributions on the keys alone",
    )


def _sequences(size: _Sizes, cu_seqlens_q: Spec, cu_seqlens_k: Spec) -> int:
    """The number of sequences."""
    if cu_seqlens_q is None:
        return size.batch
    for name, (shape, dtype, _) in ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k):
        _require(
            len(shape) == 1 and shape[0] > 0,
            f"{name}: {dtype} of shape {_shape_text(shape)} must be torch.int32 of shape [sequences + 1]",
        )
    sequences, of_keys = cu_seqlens_q[0][0] - 1, cu_seqlens_k[0][0] - 1
    _same("sequences", "cu_seqlens_q", cu_seqlens_q, sequences, "cu_seqlens_k", cu_seqlens_k, of_keys)
    return sequences


def _check_device(given: Any) -> torch.device:
    device = given.q_t[2]
    for name, spec in vars(given).items():
        _require(
            spec is None or spec[2] == device,
            f"q_t is on {device} and {name} on {spec and spec[2]}: must be one device",
        )
    _require(device.type in ("cpu", "cuda"), f"q_t is on {device}: must be on a CPU or a CUDA device")
    return device


def rounds_later(gradients: int, dtypes) -> bool:
    """Whether one-pass gradients of tensors of these types are f32, and rounded when they are multiplied by the upstream gradient.

    If one of them is f16: the sum over all rows may exceed its range where the mean does not.
    """
    return any(dtype == torch.float16 and gradients >> bit & 1 for bit, dtype in enumerate(dtypes))


def describe(specs: tuple, options: tuple, one_pass: bool = False) -> Problem:
    """The problem of a call with inputs of these `specs`, in the order of INPUTS. With w_s the student is an indexer.

    Raises:
        ValueError: an argument does not fit.
    """
    asked, given = Options(*options), SimpleNamespace(**dict.fromkeys(INPUTS) | dict(zip(INPUTS, specs)))
    q_t, k_t, q_s, k_s, w_s = given.q_t, given.k_t, given.q_s, given.k_s, given.w_s
    packed = _check_lengths_given(given.cu_seqlens_q, given.cu_seqlens_k, given.key_lengths)
    size = _check_models(q_t, k_t, q_s, k_s, packed, asked)
    of_indexer: dict[str, Any] = {}
    if w_s is None:
        _require(given.indices is None, "indices: must be None without w_s: only an indexer takes lists of keys")
        heads_s = size.query_heads_s
        _check_heads(size, heads_s, q_t, "q_s", q_s)
    else:
        heads_s, of_indexer = _check_indexer(q_t, q_s, w_s, given.indices, size, packed, asked.heads_first)
    _check_sinks_given(given.sink_t, given.sink_s)
    sequences = _sequences(size, given.cu_seqlens_q, given.cu_seqlens_k)
    _check_others(given, size, heads_s, packed, sequences)
    device = _check_device(given)
    dtypes = [tensor and tensor[1] for tensor in (q_t, k_t, q_s, k_s, w_s, given.sink_t, given.sink_s)]
    grad_f32 = asked.grad_f32 or (one_pass and rounds_later(asked.gradients, dtypes))
    return Problem(
        **asked._replace(grad_f32=grad_f32)._asdict(),
        **of_indexer,
        device=CUDA if device.type == "cuda" else CPU,
        device_index=device.index or 0,
        dtype_t=DTYPES[q_t[1]],
        dtype_s=DTYPES[q_s[1]],
        batch=sequences,
        len_q=min(asked.max_seqlen_q, size.len_q) if packed and asked.max_seqlen_q >= 0 else size.len_q,
        len_k=min(asked.max_seqlen_k, size.len_k) if packed and asked.max_seqlen_k >= 0 else size.len_k,
        heads_t=size.heads_t,
        heads_s=heads_s,
        key_heads_t=size.key_heads_t,
        key_heads_s=size.key_heads_s,
        dim_t=q_t[0][-1],
        dim_s=q_s[0][-1],
        packed=packed,
        total_q=size.len_q if packed else 0,
        total_k=size.len_k if packed else 0,
        row_bounds=given.key_begin is not None or given.key_end is not None,
        sinks=given.sink_t is not None,
    )


def _check_indexer(
    q_t: Spec, q_s: Spec, w_s: Spec, indices: Spec, size: _Sizes, packed: bool, heads_first: bool
) -> tuple[int, dict[str, Any]]:
    """Rules of an indexer. Returns the number of student heads, which the weights determine, and fields of Problem."""
    for name, given in ("w_s", w_s), ("indices", indices):
        if given is not None:
            _check_row_vectors(name, given, size, packed, heads_first)
    heads_s, index_heads = sizes(w_s[0], packed, heads_first)[1], w_s[0][-1]
    _check_type("w_s", w_s[1])
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
        _require(indices[0][-1] > 0, f"indices: shape {_shape_text(indices[0])} must list at least one key per row")
    top_k = 0 if indices is None else indices[0][-1]
    return heads_s, dict(student=INDEXER, index_heads=index_heads, dtype_w=DTYPES[w_s[1]], top_k=top_k)


def _check_row_vectors(name: str, given: Spec, size: _Sizes, packed: bool, heads_first: bool) -> None:
    """Rules about the weights and indices of an indexer. indexer_kl has added a missing heads dimension before."""
    last = {"w_s": "index heads", "indices": "top_k"}[name]
    rows = "total" if packed else "batch, length"
    with_heads = {
        (False, False): f"batch, length, heads_s, {last}",
        (False, True): f"batch, heads_s, length, {last}",
        (True, False): f"total, heads_s, {last}",
        (True, True): f"heads_s, total, {last}",
    }
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
