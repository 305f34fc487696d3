"""libstreamkl through ctypes: include/streamkl.h, as far as this package and bench/ call it.

Plans are made once for each problem and kept. The structs of a run call are packed with `struct`, which takes a
fraction of the time that filling ctypes structures field by field does.
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

CPU, CUDA = 0, 1  # skl_device
DQ_T, DK_T, DQ_S, DK_S, DW_S = 1, 2, 4, 8, 16  # gradients
FORWARD, BACKWARD, FORWARD_BACKWARD, PARTIAL = 0, 1, 2, 3  # skl_op
ATTENTION, INDEXER = 0, 1  # skl_student

_ARGUMENT, _MEMORY = 1, 3  # skl_status


class Problem(ctypes.Structure):
    """skl_problem."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("dtype_t", ctypes.c_int),
        ("dtype_s", ctypes.c_int),
        ("grad_f32", ctypes.c_int32),
        ("gradients", ctypes.c_uint32),
        ("direction", ctypes.c_int),
        ("batch", ctypes.c_int64),
        ("len_q", ctypes.c_int64),
        ("len_k", ctypes.c_int64),
        ("heads_t", ctypes.c_int64),
        ("heads_s", ctypes.c_int64),
        ("key_heads_t", ctypes.c_int64),
        ("key_heads_s", ctypes.c_int64),
        ("dim_t", ctypes.c_int64),
        ("dim_s", ctypes.c_int64),
        ("scale_t", ctypes.c_float),
        ("scale_s", ctypes.c_float),
        ("softcap_t", ctypes.c_float),
        ("softcap_s", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("positions", ctypes.c_int),
        ("offset_q", ctypes.c_int64),
        ("offset_k", ctypes.c_int64),
        ("packed", ctypes.c_int32),
        ("total_q", ctypes.c_int64),
        ("total_k", ctypes.c_int64),
        ("student", ctypes.c_int),
        ("index_heads", ctypes.c_int64),
        ("dtype_w", ctypes.c_int),
        ("index_linear", ctypes.c_int32),
        ("top_k", ctypes.c_int64),
    ]


class Options(ctypes.Structure):
    """skl_options."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device", ctypes.c_int),
        ("device_index", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("kernel", ctypes.c_char_p),
        ("progress", ctypes.c_void_p),
        ("progress_user", ctypes.c_void_p),
    ]


class _KernelInfo(ctypes.Structure):
    """skl_kernel_info."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("device", ctypes.c_int),
        ("usable", ctypes.c_int32),
        ("detail", ctypes.c_char_p),
        ("rounds_gradients", ctypes.c_int32),
    ]


_TENSOR = "Pqqq"  # skl_input, skl_output: address, stride_batch, stride_head, stride_row
ABSENT = (0, 0, 0, 0)
_INPUTS = struct.Struct("@N" + 9 * _TENSOR + "3P" + 2 * _TENSOR)
_ROWS = struct.Struct("@N" + 7 * _TENSOR)
_GRADIENTS = struct.Struct("@N" + 5 * _TENSOR)


def pack_inputs(
    q_t, k_t, q_s, k_s, lse_t=ABSENT, lse_s=ABSENT, kl=ABSENT, dot_t=ABSENT, grad_kl=ABSENT,
    cu_seqlens_q=0, cu_seqlens_k=0, key_lengths=0, w_s=ABSENT, indices=ABSENT,
) -> bytes:  # fmt: skip
    """skl_inputs. A tensor is (address, stride_batch, stride_head, stride_row) or ABSENT; a length array an address."""
    return _INPUTS.pack(
        _INPUTS.size, *q_t, *k_t, *q_s, *k_s, *lse_t, *lse_s, *kl, *dot_t, *grad_kl,
        cu_seqlens_q, cu_seqlens_k, key_lengths, *w_s, *indices,
    )  # fmt: skip


def pack_rows(
    kl=ABSENT, lse_t=ABSENT, lse_s=ABSENT, dot_t=ABSENT, cross_entropy=ABSENT, entropy=ABSENT, mass=ABSENT
) -> bytes:
    """skl_rows."""
    return _ROWS.pack(_ROWS.size, *kl, *lse_t, *lse_s, *dot_t, *cross_entropy, *entropy, *mass)


def pack_gradients(dq_t=ABSENT, dk_t=ABSENT, dq_s=ABSENT, dk_s=ABSENT, dw_s=ABSENT) -> bytes:
    """skl_gradients."""
    return _GRADIENTS.pack(_GRADIENTS.size, *dq_t, *dk_t, *dq_s, *dk_s, *dw_s)


# ---- Loading -------------------------------------------------------------------------------------------------------


def library_path() -> Path:
    """The library that this process uses: $STREAMKL_LIBRARY, or the one inside the package."""
    if given := os.environ.get("STREAMKL_LIBRARY"):
        return Path(given)
    return Path(__file__).with_name("lib") / "libstreamkl.so"


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BYTES = ctypes.c_char_p  # a packed struct; the library reads it and keeps nothing of it
_SIGNATURES = {
    "skl_last_error": (ctypes.c_char_p, []),
    "skl_version": (ctypes.c_char_p, []),
    "skl_build_info": (ctypes.c_char_p, []),
    "skl_cpu_features": (ctypes.c_char_p, []),
    "skl_kernel_at": (ctypes.c_int, [ctypes.c_int32, ctypes.POINTER(_KernelInfo)]),
    "skl_plan_create": (ctypes.c_int, [ctypes.POINTER(_POINTER), ctypes.POINTER(Problem), ctypes.POINTER(Options)]),
    "skl_plan_destroy": (None, [_POINTER]),
    "skl_plan_workspace_size": (_SIZE, [_POINTER, ctypes.c_int]),
    "skl_plan_kernel": (ctypes.c_char_p, [_POINTER]),
    "skl_forward": (ctypes.c_int, [_POINTER, _BYTES, _BYTES, _POINTER, _SIZE, _POINTER]),
    "skl_backward": (ctypes.c_int, [_POINTER, _BYTES, _BYTES, _POINTER, _SIZE, _POINTER]),
    "skl_forward_backward": (ctypes.c_int, [_POINTER, _BYTES, _BYTES, _BYTES, _POINTER, _SIZE, _POINTER]),
    "skl_partial": (
        ctypes.c_int,
        [_POINTER, _BYTES, ctypes.c_int64, ctypes.c_int64, _POINTER, _POINTER, _SIZE, _POINTER],
    ),
}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libstreamkl with its signatures, loaded at the first call."""
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        hint = "set STREAMKL_LIBRARY to a libstreamkl.so, or install the package again: pip install ."
        raise ImportError(f"streamkl: {path} cannot be loaded ({error}); {hint}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def run_function(op: int):
    """skl_forward, skl_backward, skl_forward_backward or skl_partial."""
    calls = library()
    return (calls.skl_forward, calls.skl_backward, calls.skl_forward_backward, calls.skl_partial)[op]


def check(status: int) -> None:
    """Raises what a status other than SKL_OK stands for, with the library's own message."""
    if status == 0:
        return
    message = "streamkl: " + library().skl_last_error().decode()
    raise {_ARGUMENT: ValueError, _MEMORY: MemoryError}.get(status, RuntimeError)(message)


# ---- Plans ---------------------------------------------------------------------------------------------------------


class PlanKey(NamedTuple):
    """What tells one plan from another: names and meanings are those of skl_options and skl_problem."""

    device: int
    device_index: int
    deterministic: bool
    dtype_t: int
    dtype_s: int
    gradients: int
    direction: int
    batch: int
    len_q: int
    len_k: int
    heads_t: int
    heads_s: int
    key_heads_t: int
    key_heads_s: int
    dim_t: int
    dim_s: int
    scale_t: float
    scale_s: float
    softcap_t: float
    softcap_s: float
    causal: bool
    window_left: int
    window_right: int
    packed: bool
    total_q: int
    total_k: int
    student: int = ATTENTION
    index_heads: int = 0
    dtype_w: int = 0
    index_linear: bool = False
    top_k: int = 0


class Plan:
    """A skl_plan and what its calls need; destroyed together with this object."""

    def __init__(self, key: PlanKey) -> None:
        calls = library()
        fields = key._asdict()
        chosen = {name: fields.pop(name) for name in ("device", "device_index", "deterministic")}
        options = Options(struct_size=ctypes.sizeof(Options), **chosen)
        problem = Problem(struct_size=ctypes.sizeof(Problem), **fields)
        handle = ctypes.c_void_p()
        check(calls.skl_plan_create(ctypes.byref(handle), ctypes.byref(problem), ctypes.byref(options)))
        self.handle = handle
        self.workspace_sizes = tuple(calls.skl_plan_workspace_size(handle, op) for op in range(4))
        self.kernel = calls.skl_plan_kernel(handle).decode()
        self._destroy = calls.skl_plan_destroy

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._destroy(self.handle)


class Kernel(NamedTuple):
    name: str
    device: int
    usable: bool
    detail: str


def kernels() -> list[Kernel]:
    """Every kernel of the library, best first."""
    found: list[Kernel] = []
    info = _KernelInfo()
    while library().skl_kernel_at(len(found), ctypes.byref(info)):
        found.append(Kernel(info.name.decode(), info.device, bool(info.usable), info.detail.decode()))
    return found
