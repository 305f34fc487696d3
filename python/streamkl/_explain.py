"""streamkl.explain and streamkl.explain_indexer: the launches of a call, and the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _library as lib
from ._ops import KERNELS
from ._options import AttentionOptions, IndexerOptions
from ._attention_kl import attention_kl, explained_gpu
from .indexer import indexer_kl

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Explaining(TorchDispatchMode):
    """Explains every operator of this package instead of running it. Results are allocated and not computed."""

    def __init__(self, gpu: str | None) -> None:
        super().__init__()
        self.gpu = gpu
        self.texts: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in KERNELS:
            return func(*args, **(kwargs or {}))
        return KERNELS[func](*args, execute=self._explain)

    def _explain(self, plan, op, inputs, outputs, device) -> None:
        on_gpu = plan if self.gpu is None else lib.Plan(plan.problem, self.gpu)
        self.texts.append(on_gpu.explain(op, inputs))


def _explain(function, tensors, gpu, options) -> str:
    with _Explaining(gpu) as explaining:
        outer = explained_gpu.set(gpu)
        try:
            answer = function(*tensors, **options)
        finally:
            explained_gpu.reset(outer)
        loss = answer[0] if isinstance(answer, tuple) else answer
        if loss.requires_grad:
            trained = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
            torch.autograd.grad(loss.sum(), trained, allow_unused=True)
    return "\n".join(explaining.texts)


def explain(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    *,
    gpu: str | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> str:
    """The launches of :func:`streamkl.attention_kl` with the same arguments, and of its backward if gradients are required.

    Nothing is computed. The choice of a kernel depends on shapes, types, masks, strides and addresses: pass the tensors of
    the real call.

    Args:
        gpu: explains the launches on this GPU, which need not be here: ``"a100"``, ``"b200"``, ``"h100"``, ``"h200"``,
            ``"l40s"`` or ``"rtx5090"``. The tensors may be on a CPU. Default: the device of the tensors.

    Example::

        >>> print(streamkl.explain(q_t, k_t, q_s, k_s, causal=True))
        forward: cpu_avx512, 2 threads, 1578624 bytes of workspace (best kernel for this CPU)
        ...

    Returns:
        One line per launch: ``STEP: KERNEL, VARIANT[, N splits][, N bytes of workspace] (REASON)``.

    Raises:
        ValueError: as :func:`streamkl.attention_kl`.
    """
    return _explain(attention_kl, (q_t, k_t, q_s, k_s), gpu, {**options, "return_lse": return_lse})


def explain_indexer(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    w_s: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    gpu: str | None = None,
    return_rows: bool = False,
    **options: Unpack[IndexerOptions],
) -> str:
    """The launches of :func:`streamkl.indexer_kl` with the same arguments: see :func:`streamkl.explain`."""
    return _explain(indexer_kl, (q_t, k_t, q_s, k_s, w_s, indices), gpu, {**options, "return_rows": return_rows})
