"""The problem of a call, declared once.

The fields of `Problem` determine the schemas of the torch operators, the key of the plan cache and the C struct
skl_problem. A new option is one more field here, and one more argument of attention_kl or indexer_kl.
"""

from __future__ import annotations

import ctypes
from collections import namedtuple
from dataclasses import dataclass, field, fields
from typing import Any

DQ_T, DK_T, DQ_S, DK_S, DW_S, DSINK_T, DSINK_S, DV_S = (1 << bit for bit in range(8))  # skl_problem.gradients
KL_FORWARD, KL_REVERSE = 0, 1  # skl_direction
LINK_SOFTMAX, LINK_LINEAR = 0, 1  # skl_link
ATTENTION, INDEXER = 0, 1  # skl_student
POOLS, POOL_HEADS, POOL_BLOCKS = (
    (None, "max", "sum"),
    ("mean", "max"),
    ("complete", "earlier", "visible"),
)  # skl_pool...
CPU, CUDA = 0, 1  # skl_device

_SKL_PROBLEM, _SKL_OPTIONS = "skl_problem", "skl_options"


def _option(schema: str, default: Any, c_type: Any = None, struct: str = _SKL_PROBLEM) -> Any:
    """A field that the caller chooses: an argument of every operator, of type `schema`; without c_type in no C struct."""
    return field(default=default, metadata={"schema": schema, "c_type": c_type, "struct": c_type and struct})


def _derived(c_type: Any, struct: str = _SKL_PROBLEM) -> Any:
    """A field that follows from shapes, types and devices of the tensors; 0 where this package does not set it."""
    return field(default=0, metadata={"schema": None, "c_type": c_type, "struct": struct})


@dataclass(frozen=True)
class Problem:
    """Everything that distinguishes one plan from another. include/streamkl.h documents the fields of the C structs."""

    # skl_problem, in the order of the C struct
    dtype_t: int = _derived(ctypes.c_int)
    dtype_s: int = _derived(ctypes.c_int)
    grad_f32: bool = _option("bool", False, ctypes.c_int32)
    gradients: int = _option("int", 0, ctypes.c_uint32)
    direction: int = _option("int", KL_FORWARD, ctypes.c_int)
    batch: int = _derived(ctypes.c_int64)
    len_q: int = _derived(ctypes.c_int64)
    len_k: int = _derived(ctypes.c_int64)
    heads_t: int = _derived(ctypes.c_int64)
    heads_s: int = _derived(ctypes.c_int64)
    key_heads_t: int = _derived(ctypes.c_int64)
    key_heads_s: int = _derived(ctypes.c_int64)
    dim_t: int = _derived(ctypes.c_int64)
    dim_s: int = _derived(ctypes.c_int64)
    scale_t: float = _option("float", 0.0, ctypes.c_float)
    scale_s: float = _option("float", 0.0, ctypes.c_float)
    softcap_t: float = _option("float", 0.0, ctypes.c_float)
    softcap_s: float = _option("float", 0.0, ctypes.c_float)
    causal: bool = _option("bool", False, ctypes.c_int32)
    window_left: int = _option("SymInt", -1, ctypes.c_int64)
    window_right: int = _option("SymInt", -1, ctypes.c_int64)
    positions: int = _derived(ctypes.c_int)
    offset_q: int = _derived(ctypes.c_int64)
    offset_k: int = _derived(ctypes.c_int64)
    packed: bool = _derived(ctypes.c_int32)
    total_q: int = _derived(ctypes.c_int64)
    total_k: int = _derived(ctypes.c_int64)
    student: int = _derived(ctypes.c_int)
    index_heads: int = _derived(ctypes.c_int64)
    dtype_w: int = _derived(ctypes.c_int)
    index_linear: bool = _option("bool", False, ctypes.c_int32)
    top_k: int = _derived(ctypes.c_int64)
    row_bounds: bool = _derived(ctypes.c_int32)
    sinks: bool = _derived(ctypes.c_int32)
    link_s: int = _option("int", LINK_SOFTMAX, ctypes.c_int)
    pool: int = _option("int", 0, ctypes.c_int)
    pool_heads: int = _option("int", 0, ctypes.c_int)
    pool_blocks: int = _option("int", 0, ctypes.c_int)
    pool_size: int = _option("SymInt", 0, ctypes.c_int64)

    # skl_options
    device: int = _derived(ctypes.c_int, _SKL_OPTIONS)
    device_index: int = _derived(ctypes.c_int32, _SKL_OPTIONS)
    deterministic: bool = _option("bool", False, ctypes.c_int32, _SKL_OPTIONS)

    # Arguments of the operators that reach the library in another form
    max_seqlen_q: int = _option("SymInt", -1)  # packed: bound of len_q; -1: total_q
    max_seqlen_k: int = _option("SymInt", -1)
    heads_first: bool = _option("bool", False)  # [batch, heads, length, dim], not [batch, length, heads, dim]

    def row_shape(self, heads: int) -> tuple[int, ...]:
        """Shape of a row vector: KL, LSE, row weight."""
        return (heads, self.total_q) if self.packed else (self.batch, heads, self.len_q)


def student_keys(options: Any, keys: int) -> int:
    """Rows of k_s for `keys` rows of k_t, with a pooled teacher."""
    return (
        keys // options.pool_size if POOL_BLOCKS[options.pool_blocks] == "complete" else -(-keys // options.pool_size)
    )


_OPTION_FIELDS = [declared for declared in fields(Problem) if declared.metadata["schema"]]


def _options_tuple() -> Any:
    names, defaults = zip(*((option.name, option.default) for option in _OPTION_FIELDS))
    return namedtuple("Options", names, defaults=defaults)


# The options of a call, as they cross the border of a torch operator. A tuple, and not a Problem, because torch.compile
# traces the code that makes it: every release of torch can trace a namedtuple.
Options = _options_tuple()

FLOAT_OPTIONS = tuple(
    option.name for option in _OPTION_FIELDS if option.metadata["schema"] == "float"
)  # 0.0 by default

# The options in the schema of an operator.
OPTIONS_SCHEMA = ", ".join(f"{option.metadata['schema']} {option.name}" for option in _OPTION_FIELDS)


def _fields_of(struct: str) -> dict[str, Any]:
    """{name: C type}"""
    members = [declared for declared in fields(Problem) if declared.metadata["struct"] == struct]
    return {member.name: member.metadata["c_type"] for member in members}


_PROBLEM_FIELDS, _PLAN_OPTION_FIELDS = _fields_of(_SKL_PROBLEM), _fields_of(_SKL_OPTIONS)


class SklProblem(ctypes.Structure):
    """skl_problem."""

    _fields_ = [("struct_size", ctypes.c_size_t), *_PROBLEM_FIELDS.items()]


class SklOptions(ctypes.Structure):
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
        ("gpu", ctypes.c_char_p),
        ("cancel", ctypes.c_void_p),
    ]


def skl_problem(problem: Problem) -> SklProblem:
    values = {name: getattr(problem, name) for name in _PROBLEM_FIELDS}
    return SklProblem(struct_size=ctypes.sizeof(SklProblem), **values)


def skl_options(problem: Problem) -> SklOptions:
    values = {name: getattr(problem, name) for name in _PLAN_OPTION_FIELDS}
    return SklOptions(struct_size=ctypes.sizeof(SklOptions), **values)
