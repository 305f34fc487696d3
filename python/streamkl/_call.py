"""One call of the library on torch tensors."""

from __future__ import annotations

import torch

from . import _library as lib
from ._checks import describe
from ._problem import Problem


def describe_while_tracing(*call, one_pass: bool = False) -> Problem:
    """A compiler's sizes may be symbols. Messages of errors contain numbers even then."""
    try:
        return describe(*call, one_pass=one_pass)
    except ValueError:
        describe(*map(_in_numbers, call), one_pass=one_pass)
        raise


def _in_numbers(value):
    if isinstance(value, tuple):
        shape, dtype, device = value
        return tuple(int(size) for size in shape), dtype, device
    return value


# ---- Addresses and strides -----------------------------------------------------------------------------------------


def address(tensor: torch.Tensor, problem: Problem) -> tuple[int, int, int, int]:
    """skl_output of a tensor in the layout of the call."""
    strides = tensor.stride()
    batch, first, second = (0, strides[0], strides[1]) if problem.packed else strides[:3]
    return (tensor.data_ptr(), batch, first, second) if problem.heads_first else (tensor.data_ptr(), batch, second, first)


def input_address(tensor: torch.Tensor | None, problem: Problem, copies: list) -> tuple[int, int, int, int]:
    """skl_input of a tensor. The library accepts any strides except in the last dimension: `copies` keeps a copy alive."""
    if tensor is None:
        return lib.ABSENT
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        tensor = tensor.contiguous()
        copies.append(tensor)
    return address(tensor, problem)


def row_address(rows: torch.Tensor | None) -> tuple[int, int, int, int]:
    """skl_input or skl_output of a row vector: [batch, heads, length], packed [heads, total]."""
    if rows is None:
        return lib.ABSENT
    batch, head, row = rows.stride() if rows.dim() == 3 else (0, *rows.stride())
    return rows.data_ptr(), batch, head, row


def _data_ptr(array: torch.Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()


# ---- The call ------------------------------------------------------------------------------------------------------


def execute(plan: lib.Plan, op: int, inputs: bytes, outputs: tuple, device: torch.device) -> None:
    """Runs an operation; `outputs` are its arguments between inputs and workspace."""
    # Blocks of torch's allocator are aligned to 64 bytes, ordered by stream and safe in CUDA graphs.
    size = plan.workspace_sizes[op]
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    lib.check(lib.run_function(op)(plan.handle, inputs, *outputs, workspace.data_ptr(), size, stream))


def call(
    plan, op, tensors, lengths, outputs, lse_t=None, lse_s=None, kl=None, dot_t=None, grad_kl=None, execute=execute
) -> None:
    """Executes `op` on tensors (q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices), length arrays and row vectors."""
    q_t, k_t, q_s, k_s, w_s, sink_t, sink_s, indices = tensors
    cu_seqlens_q, cu_seqlens_k, key_lengths, key_begin, key_end = lengths
    problem = plan.problem
    copies: list[torch.Tensor] = []
    inputs = lib.pack_inputs(
        input_address(q_t, problem, copies), input_address(k_t, problem, copies),
        input_address(q_s, problem, copies), input_address(k_s, problem, copies),
        row_address(lse_t), row_address(lse_s), row_address(kl), row_address(dot_t), row_address(grad_kl),
        _data_ptr(cu_seqlens_q), _data_ptr(cu_seqlens_k), _data_ptr(key_lengths),
        input_address(w_s, problem, copies), input_address(indices, problem, copies),
        _data_ptr(key_begin), _data_ptr(key_end), _data_ptr(sink_t), _data_ptr(sink_s),
    )  # fmt: skip
    execute(plan, op, inputs, outputs, q_t.device)
