"""libstreamkl through ctypes: the part of include/streamkl.h that this package and bench/ call.

`struct` packs the structs of a run call: it takes a fraction of the time of filling ctypes structures field by field.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterable, NamedTuple

from ._problem import (
    ATTENTION, CUDA, DSINK_T, INDEXER, KL_FORWARD, KL_REVERSE, Problem, SklOptions, SklProblem, skl_options, skl_problem,
)  # fmt: skip

FORWARD, BACKWARD, FORWARD_BACKWARD, PARTIAL, ATTENTION_BACKWARD, ATTENTION_FORWARD, ATTENTION_STATS = OPS = range(
    7
)  # skl_op

# Row vectors: the members of skl_rows, bit by bit. The first four are the bits of skl_problem_needs.
ROW_NAMES = ("kl", "lse_t", "lse_s", "dot_t", "cross_entropy", "entropy", "mass")
KL, LSE_T, LSE_S, DOT_T, CROSS_ENTROPY, ENTROPY, MASS = (1 << bit for bit in range(len(ROW_NAMES)))

_ARGUMENT, _MEMORY = 1, 3  # skl_status


class _KernelInfo(ctypes.Structure):
    """skl_kernel_info."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("device", ctypes.c_int),
        ("usable", ctypes.c_int32),
        ("detail", ctypes.c_char_p),
        ("rounds_gradients", ctypes.c_int32),
    ]


_TENSOR = "Pqqq"  # skl_input, skl_output: address, stride_batch, stride_head, stride_row
ABSENT = (0, 0, 0, 0)
_INPUTS = struct.Struct("@N" + 9 * _TENSOR + "3P" + 2 * _TENSOR + "4P")
_ROWS = struct.Struct("@N" + 7 * _TENSOR)
_GRADIENTS = struct.Struct("@N" + 5 * _TENSOR + "2P")
_ATTENTION = struct.Struct("@N" + 4 * _TENSOR)
_STATS = struct.Struct("@N" + _TENSOR + "qqi" + 6 * _TENSOR + "PPiiP" + _TENSOR + "Pi" + 2 * _TENSOR + "iPP")


def pack_inputs(
    q_t, k_t, q_s, k_s, lse_t=ABSENT, lse_s=ABSENT, kl=ABSENT, dot_t=ABSENT, grad_kl=ABSENT,
    cu_seqlens_q=0, cu_seqlens_k=0, key_lengths=0, w_s=ABSENT, indices=ABSENT, key_begin=0, key_end=0,
    sink_t=0, sink_s=0,
) -> bytes:  # fmt: skip
    """skl_inputs. A tensor is (address, stride_batch, stride_head, stride_row) or ABSENT; a length array an address."""
    return _INPUTS.pack(
        _INPUTS.size, *q_t, *k_t, *q_s, *k_s, *lse_t, *lse_s, *kl, *dot_t, *grad_kl,
        cu_seqlens_q, cu_seqlens_k, key_lengths, *w_s, *indices, key_begin, key_end, sink_t, sink_s,
    )  # fmt: skip


def pack_rows(
    kl=ABSENT, lse_t=ABSENT, lse_s=ABSENT, dot_t=ABSENT, cross_entropy=ABSENT, entropy=ABSENT, mass=ABSENT
) -> bytes:
    """skl_rows."""
    return _ROWS.pack(_ROWS.size, *kl, *lse_t, *lse_s, *dot_t, *cross_entropy, *entropy, *mass)


def pack_gradients(
    dq_t=ABSENT, dk_t=ABSENT, dq_s=ABSENT, dk_s=ABSENT, dw_s=ABSENT, dsink_t=ABSENT, dsink_s=ABSENT
) -> bytes:
    """skl_gradients. The gradient of a sink is contiguous: only its address counts."""
    return _GRADIENTS.pack(_GRADIENTS.size, *dq_t, *dk_t, *dq_s, *dk_s, *dw_s, dsink_t[0], dsink_s[0])


def pack_attention(v_s, o_s, do_s, dv_s=ABSENT) -> bytes:
    """skl_attention."""
    return _ATTENTION.pack(_ATTENTION.size, *v_s, *o_s, *do_s, *dv_s)


def pack_stats(
    row_weights=ABSENT, row_begin=0, row_end=0, per_key_head=False, key_sum=ABSENT, key_max=ABSENT, lse=ABSENT,
    entropy=ABSENT, max_logit=ABSENT, expected_distance=ABSENT, head_max_logit=0, distance_mass=0, distance_count=0,
    range_count=0, key_ranges=0, range_mass=ABSENT, range_sum=0, top_k=0, top_keys=ABSENT, top_p=ABSENT,
    chosen_count=0, chosen_rows=0, weights=0,
) -> bytes:  # fmt: skip
    """skl_stats. A tensor is (address, stride_batch, stride_head, stride_row) or ABSENT; an array an address."""
    return _STATS.pack(
        _STATS.size, *row_weights, row_begin, row_end, per_key_head, *key_sum, *key_max, *lse, *entropy, *max_logit,
        *expected_distance, head_max_logit, distance_mass, distance_count, range_count, key_ranges, *range_mass,
        range_sum, top_k, *top_keys, *top_p, chosen_count, chosen_rows, weights,
    )  # fmt: skip


def pack_tensor(tensor) -> bytes:
    """skl_input or skl_output."""
    return struct.pack("@" + _TENSOR, *tensor)


class Template:
    """A struct of tensors of fixed strides, packed by one of the functions above at every call.

    `strides` has those of every tensor by the name of its member; an array has none.
    """

    def __init__(self, pack: Callable[..., bytes], strides: dict[str, tuple[int, ...]]) -> None:
        mark = 1 << 62  # stands for an address: no stride is as large
        members = {name: (mark + n, *each) if each else mark + n for n, (name, each) in enumerate(strides.items())}
        self.words = list(memoryview(pack(**members)).cast("q"))
        self.places = [self.words.index(mark + n) for n in range(len(strides))]
        self.pack = struct.Struct(f"@{len(self.words)}q").pack

    def fill(self, tensors: Iterable[Any]) -> bytes:
        """The struct with the addresses of its tensors, in the order of `strides`; None is passed over."""
        words = self.words.copy()
        for place, address in zip(self.places, [tensor.data_ptr() for tensor in tensors if tensor is not None]):
            words[place] = address
        return self.pack(*words)


# ---- Loading -------------------------------------------------------------------------------------------------------


def library_path() -> Path:
    """The library that this process loads: $STREAMKL_LIBRARY, or the one inside the package."""
    if given := os.environ.get("STREAMKL_LIBRARY"):
        return Path(given)
    return Path(__file__).with_name("lib") / "libstreamkl.so"


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BYTES = ctypes.c_char_p  # a packed struct; the library keeps no reference to it
_SIGNATURES = {
    "skl_last_error": (ctypes.c_char_p, []),
    "skl_version": (ctypes.c_char_p, []),
    "skl_build_info": (ctypes.c_char_p, []),
    "skl_cpu_features": (ctypes.c_char_p, []),
    "skl_kernel_at": (ctypes.c_int, [ctypes.c_int32, ctypes.POINTER(_KernelInfo)]),
    "skl_plan_create": (
        ctypes.c_int,
        [ctypes.POINTER(_POINTER), ctypes.POINTER(SklProblem), ctypes.POINTER(SklOptions)],
    ),
    "skl_plan_destroy": (None, [_POINTER]),
    "skl_plan_workspace_size": (_SIZE, [_POINTER, ctypes.c_int]),
    "skl_plan_kernel": (ctypes.c_char_p, [_POINTER]),
    "skl_plan_explain": (_SIZE, [_POINTER, _BYTES, ctypes.c_int, ctypes.c_char_p, _SIZE]),
    "skl_plan_supports": (ctypes.c_int, [_POINTER, ctypes.c_int]),
    "skl_problem_needs": (ctypes.c_uint32, [ctypes.POINTER(SklProblem), ctypes.c_int]),
    "skl_forward": (ctypes.c_int, [_POINTER, _BYTES, _BYTES, _POINTER, _SIZE, _POINTER]),
    "skl_backward": (ctypes.c_int, [_POINTER, _BYTES, _BYTES, _POINTER, _SIZE, _POINTER]),
    "skl_forward_backward": (ctypes.c_int, [_POINTER, _BYTES, _BYTES, _BYTES, _POINTER, _SIZE, _POINTER]),
    "skl_attention_backward": (ctypes.c_int, [_POINTER, _BYTES, _BYTES, _BYTES, _BYTES, _POINTER, _SIZE, _POINTER]),
    "skl_attention_forward": (ctypes.c_int, [_POINTER, _BYTES, _BYTES, _BYTES, _BYTES, _POINTER, _SIZE, _POINTER]),
    "skl_attention_stats": (ctypes.c_int, [_POINTER, _BYTES, _BYTES, _POINTER, _SIZE, _POINTER]),
    "skl_partial": (
        ctypes.c_int,
        [_POINTER, _BYTES, ctypes.c_int64, ctypes.c_int64, _POINTER, _POINTER, _SIZE, _POINTER],
    ),
    "skl_states_merge": (ctypes.c_int, [_POINTER, _POINTER, _POINTER, _POINTER]),
    "skl_states_finish": (ctypes.c_int, [_POINTER, _BYTES, _POINTER, _BYTES, _POINTER]),
}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libstreamkl with its signatures; the first call loads it."""
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


@lru_cache(maxsize=None)
def run_function(op: int):
    """The C function of an operation."""
    attention = "attention_backward", "attention_forward", "attention_stats"
    names = "forward", "backward", "forward_backward", "partial", *attention
    return getattr(library(), "skl_" + names[op])


def check(status: int) -> None:
    """Raises an exception with the message of the library if the status is not SKL_OK."""
    if status == 0:
        return
    message = "streamkl: " + library().skl_last_error().decode()
    raise {_ARGUMENT: ValueError, _MEMORY: MemoryError}.get(status, RuntimeError)(message)


# ---- Interrupts ----------------------------------------------------------------------------------------------------

_cancel = ctypes.c_int32(0)  # shared by all plans; CPU calls end early while it is not 0


def check_interruptible(call: Callable[[], int]) -> None:
    """check(call()), which an interrupt such as Ctrl-C ends early, with the exception of the signal's handler.

    Python handles signals in the main thread, between its own instructions, so there the call runs in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        check(call())
        return
    errors: list[Exception] = []
    done = threading.Event()
    begins = threading.Lock()  # taken when the call begins, or by an interrupt before that: then it never does

    def run() -> None:
        if not begins.acquire(blocking=False):
            return
        try:
            check(call())  # checked in this thread: each thread has its own last error
        except Exception as error:
            errors.append(error)
        done.set()

    thread = threading.Thread(target=run, name="streamkl")
    interrupt: BaseException | None = None
    while True:  # A second interrupt does not end the wait: the library still writes to the tensors.
        try:
            if interrupt is None:
                thread.start()
            done.wait()
            break
        except BaseException as error:
            if begins.acquire(blocking=False):
                raise
            interrupt, _cancel.value = error, 1
    _cancel.value = 0
    if interrupt is not None:
        raise interrupt
    if errors:
        raise errors[0]


# ---- Plans ---------------------------------------------------------------------------------------------------------


class Plan:
    """A skl_plan, the problem that it solves and the sizes of its workspaces. Destroyed together with this object.

    `gpu`: the name of a GPU that need not be here; such a plan explains its launches and runs none.
    """

    def __init__(self, problem: Problem, gpu: str | None = None) -> None:
        calls = library()
        c_problem, c_options, handle = skl_problem(problem), skl_options(problem), ctypes.c_void_p()
        c_options.cancel = ctypes.addressof(_cancel)
        if gpu is not None:
            c_options.device, c_options.device_index, c_options.gpu = CUDA, 0, gpu.encode()
        check(calls.skl_plan_create(ctypes.byref(handle), ctypes.byref(c_problem), ctypes.byref(c_options)))
        self.handle, self.problem = handle, problem
        self.workspace_sizes = tuple(calls.skl_plan_workspace_size(handle, op) for op in OPS)
        self.kernel = calls.skl_plan_kernel(handle).decode()
        self._destroy = calls.skl_plan_destroy
        rows = problem.total_q if problem.packed else problem.batch * problem.len_q
        # Calls from about 0.1 s of one core on can be interrupted, which costs a thread each.
        self.is_long = (
            rows * problem.len_k * (problem.heads_t * problem.dim_t + problem.heads_s * problem.dim_s) > 10**9
        )

    def supports(self, op: int) -> bool:
        """Whether calls of an operation run: skl_plan_supports."""
        return bool(library().skl_plan_supports(self.handle, op))

    def explain(self, op: int, inputs: bytes | None = None) -> str:
        """The launches of an operation, one per line, with the reason of each choice: skl_plan_explain."""
        explain = library().skl_plan_explain
        length = explain(self.handle, inputs, op, None, 0)
        check(_ARGUMENT if length == 0 else 0)
        text = ctypes.create_string_buffer(length + 1)
        explain(self.handle, inputs, op, text, length + 1)
        return text.value.decode().rstrip("\n")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._destroy(self.handle)


class Kernel(NamedTuple):
    name: str
    device: int
    usable: bool
    detail: str


def kernels() -> list[Kernel]:
    """All kernels of the library, best first."""
    found: list[Kernel] = []
    info = _KernelInfo(struct_size=ctypes.sizeof(_KernelInfo))
    while library().skl_kernel_at(len(found), ctypes.byref(info)):
        found.append(Kernel(info.name.decode(), info.device, bool(info.usable), info.detail.decode()))
    return found


# ---- Row vectors that an operation needs ---------------------------------------------------------------------------


def rows_needed(op: int, gradients: int, direction: int, student: int, has_teacher_groups: bool) -> int:
    """Row vectors that BACKWARD or FORWARD_BACKWARD needs, as bits: see skl_problem_needs."""
    return _NEEDS[_index_of_needs(op, gradients, direction, student, has_teacher_groups)]


def _index_of_needs(op, gradients, direction, student, has_teacher_groups) -> int:
    return (op == FORWARD_BACKWARD) << 10 | has_teacher_groups << 9 | student << 8 | direction << 7 | gradients


def _table_of_needs() -> bytes:
    """skl_problem_needs of the smallest problem of each kind; 0 for invalid ones, such as DW_S without an indexer."""
    table = bytearray(1 << 11)
    problem = skl_problem(Problem(batch=1, heads_s=1, dim_t=1, dim_s=1))
    every = itertools.product(
        (BACKWARD, FORWARD_BACKWARD), range(1 << 7), (KL_FORWARD, KL_REVERSE), (ATTENTION, INDEXER), (False, True)
    )
    for op, gradients, direction, student, has_teacher_groups in every:
        problem.gradients, problem.direction, problem.heads_t = gradients, direction, 1 + has_teacher_groups
        problem.student = problem.index_heads = student
        problem.sinks = gradients >= DSINK_T
        index = _index_of_needs(op, gradients, direction, student, has_teacher_groups)
        table[index] = library().skl_problem_needs(ctypes.byref(problem), op)
    return bytes(table)


# A table, because torch.compile can trace a lookup but not a call of the library.
_NEEDS = _table_of_needs()
