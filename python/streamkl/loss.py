"""streamkl.AttentionKLLoss and streamkl.IndexerKLLoss: attention_kl and indexer_kl as modules that hold their options."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable

import torch

from ._options import AttentionBatch, AttentionOptions, IndexerBatch, IndexerOptions
from ._attention_kl import attention_kl
from .indexer import indexer_kl

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Loss(torch.nn.Module):
    """A module that holds the options of its function: all `accepted` ones, in the order of the function's signature."""

    def __init__(self, function: Callable, accepted: type, given: dict[str, Any]) -> None:
        super().__init__()
        names = accepted.__annotations__
        if unknown := given.keys() - names.keys():
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {min(unknown)!r}")
        parameters = inspect.signature(function).parameters.values()
        self.options: dict[str, Any] = {each.name: each.default for each in parameters if each.name in names} | given

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class AttentionKLLoss(_Loss):
    """KL between teacher and student attention. The options are those of :func:`streamkl.attention_kl`.

    The module holds no parameters and no buffers: it adds nothing to a ``state_dict``.

    Example::

        criterion = streamkl.AttentionKLLoss(causal=True, window_size=(4096, 0))
        loss = criterion(q_t, k_t, q_s, k_s)
    """

    def __init__(self, **options: Unpack[AttentionOptions]) -> None:
        super().__init__(attention_kl, AttentionOptions, {**options})

    def forward(
        self, q_t: torch.Tensor, k_t: torch.Tensor, q_s: torch.Tensor, k_s: torch.Tensor, **batch: Unpack[AttentionBatch]
    ) -> torch.Tensor:
        """The loss of one batch. Tensors, lengths, weights and LSEs are those of :func:`streamkl.attention_kl`."""
        return attention_kl(q_t, k_t, q_s, k_s, **self.options, **batch)


class IndexerKLLoss(_Loss):
    """KL between a teacher's mean attention and an indexer's. The options are those of :func:`streamkl.indexer_kl`.

    The module holds no parameters and no buffers: it adds nothing to a ``state_dict``.

    Example::

        criterion = streamkl.IndexerKLLoss(causal=True)
        loss = criterion(q_t.detach(), k_t.detach(), q_s, k_s, w_s, lse_t=lse_t)
    """

    def __init__(self, **options: Unpack[IndexerOptions]) -> None:
        super().__init__(indexer_kl, IndexerOptions, {**options})

    def forward(
        self, q_t: torch.Tensor, k_t: torch.Tensor, q_s: torch.Tensor, k_s: torch.Tensor, w_s: torch.Tensor,
        indices: torch.Tensor | None = None, **batch: Unpack[IndexerBatch],
    ) -> torch.Tensor:  # fmt: skip
        """The loss of one batch. Tensors, lengths, weights and LSEs are those of :func:`streamkl.indexer_kl`."""
        return indexer_kl(q_t, k_t, q_s, k_s, w_s, indices, **self.options, **batch)
