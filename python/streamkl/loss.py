"""streamkl.AttentionKLLoss and streamkl.IndexerKLLoss: attention_kl and indexer_kl as modules that hold their options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._attention_kl import attention_kl
from ._options import AttentionOptions, IndexerOptions, defaults_of
from .indexer import indexer_kl

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Loss(torch.nn.Module):
    """A module that holds the options of its function. It has no parameters and no buffers: nothing of a ``state_dict``."""

    def __init__(self, declared: Any, given: dict[str, Any]) -> None:
        super().__init__()
        defaults = defaults_of(declared)
        if unknown := given.keys() - defaults.keys():
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {min(unknown)!r}")
        self.options: dict[str, Any] = given

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class AttentionKLLoss(_Loss):
    """KL between teacher and student attention. The options are those of :func:`streamkl.attention_kl`.

    Example::

        criterion = streamkl.AttentionKLLoss(causal=True, window_size=(4096, 0))
        loss = criterion(q_t, k_t, q_s, k_s)
    """

    def __init__(self, **options: Unpack[AttentionOptions]) -> None:
        super().__init__(AttentionOptions, {**options})

    def forward(
        self,
        q_t: torch.Tensor,
        k_t: torch.Tensor,
        q_s: torch.Tensor,
        k_s: torch.Tensor,
        **batch: Unpack[AttentionOptions],
    ) -> torch.Tensor:
        """The loss of one batch. Its own options, such as lengths, weights and LSEs, override those of the module."""
        options: AttentionOptions = {**self.options, **batch}  # type: ignore[typeddict-item]
        return attention_kl(q_t, k_t, q_s, k_s, **options)


class IndexerKLLoss(_Loss):
    """KL between a teacher's mean attention and an indexer's. The options are those of :func:`streamkl.indexer_kl`.

    Example::

        criterion = streamkl.IndexerKLLoss(causal=True)
        loss = criterion(q_t.detach(), k_t.detach(), q_s, k_s, w_s, lse_t=lse_t)
    """

    def __init__(self, **options: Unpack[IndexerOptions]) -> None:
        super().__init__(IndexerOptions, {**options})

    def forward(
        self,
        q_t: torch.Tensor,
        k_t: torch.Tensor,
        q_s: torch.Tensor,
        k_s: torch.Tensor,
        w_s: torch.Tensor,
        indices: torch.Tensor | None = None,
        **batch: Unpack[IndexerOptions],
    ) -> torch.Tensor:
        """The loss of one batch. Its own options, such as lengths, weights and LSEs, override those of the module."""
        options: IndexerOptions = {**self.options, **batch}  # type: ignore[typeddict-item]
        return indexer_kl(q_t, k_t, q_s, k_s, w_s, indices, **options)
