"""A call of the library on torch tensors: what the operators of attention_kl and of indexer_kl share.

`problem` is the tail of an operator's arguments: the three length arrays come first, `heads_first` and the wanted
gradients last.
"""

from __future__ import annotations

import torch

from . import _library as lib
from ._checks import sizes

TAGS = (
    torch.Tag.pt2_compliant_tag,
    # The strides of a gradient are those of its tensor: a compiler must pass what the fake kernel saw.
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


def facts_of(tensor: torch.Tensor | None):
    """What is checked of a tensor."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def check_while_tracing(check, facts) -> None:
    """A compiler's sizes may be symbols; the message of an error has numbers, whichever call was traced before."""
    try:
        check(*facts)
    except ValueError:
        check(*map(_in_numbers, facts))
        raise


def _in_numbers(fact):
    if isinstance(fact, tuple):
        shape, dtype, device = fact
        return tuple(int(size) for size in shape), dtype, device
    return fact


class Layout:
    """How the caller lays out his tensors: where batch, heads and rows are among their dimensions."""

    def __init__(self, problem) -> None:
        self.packed, self.heads_first = problem[0] is not None, problem[-2]

    def address(self, tensor: torch.Tensor | None) -> tuple[int, int, int, int]:
        """skl_input and skl_output of a tensor."""
        if tensor is None:
            return lib.ABSENT
        strides = tensor.stride()
        batch, one, two = (0, strides[0], strides[1]) if self.packed else strides[:3]
        return (tensor.data_ptr(), batch, one, two) if self.heads_first else (tensor.data_ptr(), batch, two, one)

    def rows_like(self, q: torch.Tensor) -> torch.Tensor:
        batch, heads, length = sizes(q.shape, self.packed, self.heads_first)
        return q.new_empty((heads, length) if self.packed else (batch, heads, length), dtype=torch.float32)

    def is_grouped(self, q_t: torch.Tensor, q_s: torch.Tensor) -> bool:
        heads = -3 if self.heads_first else -2
        return q_t.shape[heads] != q_s.shape[heads]


def row_address(rows: torch.Tensor | None) -> tuple[int, int, int, int]:
    if rows is None:
        return lib.ABSENT
    return (rows.data_ptr(), *rows.stride()) if rows.dim() == 3 else (rows.data_ptr(), 0, *rows.stride())


def _with_contiguous_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The library takes any strides, save that the last dimension is contiguous."""
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def run(
    plan, op, tensors, lse_t, lse_s, grad_kl, problem, outputs, kl=None, dot_t=None, w_s=None, indices=None
) -> None:
    """Calls what `op` stands for; `outputs` are what it takes between inputs and workspace."""
    device, layout = tensors[2].device, Layout(problem)
    q_t, k_t, q_s, k_s = tensors = [_with_contiguous_rows(tensor) for tensor in tensors]
    w_s, indices = _with_contiguous_rows(w_s), _with_contiguous_rows(indices)
    inputs = lib.pack_inputs(
        layout.address(q_t), layout.address(k_t), layout.address(q_s), layout.address(k_s),
        row_address(lse_t), row_address(lse_s), row_address(kl), row_address(dot_t), row_address(grad_kl),
        *(0 if lengths is None else lengths.data_ptr() for lengths in problem[:3]),
        layout.address(w_s), layout.address(indices),
    )  # fmt: skip
    # From torch's allocator, whose blocks are aligned to 64 bytes: in stream order, and fit for CUDA graphs.
    size = plan.workspace_sizes[op]
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    lib.check(lib.run_function(op)(plan.handle, inputs, *outputs, workspace.data_ptr(), size, stream))


def new_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """In the order of the tensor's own memory, so that a gradient flows back through its views without a copy."""
    gradient = torch.empty_like(tensor)
    return gradient if gradient.stride(-1) == 1 else gradient.new_empty(gradient.shape)


def weighted(kl: torch.Tensor, row_weight: torch.Tensor | None) -> torch.Tensor:
    """Rows of weight 0 count as 0, whatever their KL is: padding may hold NaN."""
    return kl if row_weight is None else torch.where(row_weight == 0, 0.0, kl * row_weight)


class OnceDifferentiable(torch.autograd.Function):
    """Gradients as they are, but depending on the tensors that they were computed from: a second derivative is refused."""

    @staticmethod
    def forward(ctx, function, count, *gradients_and_tensors):
        ctx.function = function
        return tuple(gradient.view_as(gradient) for gradient in gradients_and_tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"streamkl: {ctx.function} cannot be differentiated twice; streamkl.reference.{ctx.function} can"
        )
