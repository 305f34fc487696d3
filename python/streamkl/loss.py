"""streamkl.AttentionKLLoss and streamkl.IndexerKLLoss: attention_kl and indexer_kl as modules that hold their options."""

from __future__ import annotations

import torch

from .attention import Direction, Layout, Reduction, attention_kl
from .indexer import indexer_kl


class _Loss(torch.nn.Module):
    """A loss whose options are what its function is called with, and what it is printed with."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class AttentionKLLoss(_Loss):
    """KL between teacher and student attention; options as of :func:`streamkl.attention_kl`, which see.

    Holds no parameters and no buffers: it adds nothing to a ``state_dict``.

    Example::

        criterion = streamkl.AttentionKLLoss(causal=True, window_size=(4096, 0))
        loss = criterion(q_t, k_t, q_s, k_s)
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale_t: float | None = None,
        softmax_scale_s: float | None = None,
        softcap_t: float = 0.0,
        softcap_s: float = 0.0,
        direction: Direction = "forward",
        reduction: Reduction = "mean",
        deterministic: bool = False,
        layout: Layout = "bnhd",
    ) -> None:
        super().__init__(
            causal=causal, window_size=window_size, softmax_scale_t=softmax_scale_t, softmax_scale_s=softmax_scale_s,
            softcap_t=softcap_t, softcap_s=softcap_s, direction=direction, reduction=reduction,
            deterministic=deterministic, layout=layout,
        )  # fmt: skip

    def forward(
        self,
        q_t: torch.Tensor,
        k_t: torch.Tensor,
        q_s: torch.Tensor,
        k_s: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        key_lengths: torch.Tensor | None = None,
        row_weight: torch.Tensor | None = None,
        lse_t: torch.Tensor | None = None,
        lse_s: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss of one batch: shapes as of :func:`streamkl.attention_kl`."""
        return attention_kl(
            q_t, k_t, q_s, k_s, **self.options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, key_lengths=key_lengths, row_weight=row_weight,
            lse_t=lse_t, lse_s=lse_s,
        )  # fmt: skip


class IndexerKLLoss(_Loss):
    """KL between a teacher's mean attention and an indexer's; options as of :func:`streamkl.indexer_kl`, which see.

    Holds no parameters and no buffers: it adds nothing to a ``state_dict``.

    Example::

        criterion = streamkl.IndexerKLLoss(causal=True)
        loss = criterion(q_t.detach(), k_t.detach(), q_s, k_s, w_s, lse_t=lse_t)
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale_t: float | None = None,
        softmax_scale_s: float | None = None,
        softcap_t: float = 0.0,
        relu: bool = True,
        direction: Direction = "forward",
        reduction: Reduction = "mean",
        lse_t_wider: bool = False,
        deterministic: bool = False,
        layout: Layout = "bnhd",
    ) -> None:
        super().__init__(
            causal=causal, window_size=window_size, softmax_scale_t=softmax_scale_t, softmax_scale_s=softmax_scale_s,
            softcap_t=softcap_t, relu=relu, direction=direction, reduction=reduction, lse_t_wider=lse_t_wider,
            deterministic=deterministic, layout=layout,
        )  # fmt: skip

    def forward(
        self,
        q_t: torch.Tensor,
        k_t: torch.Tensor,
        q_s: torch.Tensor,
        k_s: torch.Tensor,
        w_s: torch.Tensor,
        indices: torch.Tensor | None = None,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        key_lengths: torch.Tensor | None = None,
        row_weight: torch.Tensor | None = None,
        lse_t: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss of one batch: shapes as of :func:`streamkl.indexer_kl`."""
        return indexer_kl(
            q_t, k_t, q_s, k_s, w_s, indices, **self.options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, key_lengths=key_lengths, row_weight=row_weight, lse_t=lse_t,
        )  # fmt: skip
