"""One call of the library on torch tensors."""

from __future__ import annotations

import torch

from . import _library as lib
from ._checks import describe
from ._problem import Problem


def describe_while_tracing(*call) -> Problem:
    """A compiler's sizes may be symbols. Messages of errors contain numbers even then."""
    try:
        return describe(*call)
    except ValueError:
        describe(*map(_in_numbers, call))
        raise


def _in_numbers(value):
    if isinstance(value, tuple):
        shape, dtype, device = value
        return tuple(int(size) for size in shape), dtype, device
    return value


# ---- Addresses and strides -----------------------------------------------------------------------------------------


def address(tensor: torch.Tensor, problem: Problem) -> tuple[int, int, int, int]:
    """skl_input or skl_output of a tensor in the layout of the call."""
    strides = tensor.stride()
    batch, first, second = (0, strides[0], strides[1]) if problem.packed else strides[:3]
    return (tensor.data_ptr(), batch, first, second) if problem.heads_first else (tensor.data_ptr(), batch, second, first)


def row_address(rows: torch.Tensor | None) -> tuple[int, int, int, int]:
    """skl_input or skl_output of a row vector: [batch, heads, length], packed [heads, total]."""
    if rows is None:
        return lib.ABSENT
    batch, head, row = rows.stride() if rows.dim() == 3 else (0, *rows.stride())
    return rows.data_ptr(), batch, head, row


def _with_contiguous_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The library accepts any strides, but the last dimension must be contiguous."""
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


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
    """Executes `op` on tensors (q_t, k_t, q_s, k_s, w_s, indices), length arrays and row vectors."""
    problem = plan.problem
    tensors = [_with_contiguous_rows(tensor) for tensor in tensors]  # the copies must live until the call returns
    q_t, k_t, q_s, k_s, w_s, indices = [
        lib.ABSENT if tensor is None else address(tensor, problem) for tensor in tensors
    ]
    cu_seqlens_q, cu_seqlens_k, key_lengths = [0 if array is None else array.data_ptr() for array in lengths]
    inputs = lib.pack_inputs(
        q_t, k_t, q_s, k_s, row_address(lse_t), row_address(lse_s), row_address(kl), row_address(dot_t),
        row_address(grad_kl), cu_seqlens_q, cu_seqlens_k, key_lengths, w_s, indices,
    )  # fmt: skip
    execute(plan, op, inputs, outputs, tensors[0].device)
