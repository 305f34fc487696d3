"""Output KL and language loss, a chunk of tokens at a time.

The logits of a step are tokens x vocabulary numbers. While the loss is computed, each chunk of them also yields its part
of the gradients of the hidden states and of the head, and is gone: nothing is computed again in the backward.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

LOGITS = 1 << 26  # numbers in a chunk, some of which are stored in f32
_HAS_TRITON = find_spec("triton") is not None
FUSED_LOGITS = 1 << 28  # numbers in a chunk of the fused kernel: 512 MiB of bf16


def output_losses(
    head_t: Any, head_s: Any, hidden_t: torch.Tensor | None, hidden_s: torch.Tensor, labels: torch.Tensor,
    weights: tuple[float, float], labeled: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(weighted sum, output KL, language loss): means over all tokens, and over `labeled` tokens. The sum has the gradient.

    `weights` are those of the output KL and of the language loss. A head is a Linear, or Identity for hidden states that
    are logits. A token without a label has -100.
    """
    is_linear = isinstance(head_s, torch.nn.Linear)
    weight, bias = (head_s.weight, head_s.bias) if is_linear else (None, None)
    return _Losses.apply(hidden_s, weight, bias, head_t, hidden_t, labels, weights, labeled)


def row_losses(head_t, head_s, hidden_t, hidden_s, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """{"output": KL of the output distributions, "language": cross-entropy of the label}, [batch, length] each, without gradients.

    Rows without a label have the language loss 0. Without `hidden_t`, there is no output KL.
    """
    parts: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad():
        size = head_s.out_features if isinstance(head_s, torch.nn.Linear) else hidden_s.shape[-1]
        for rows_t, rows_s, row_labels in _chunks(size, hidden_t, hidden_s, labels):
            log_s = _log_softmax(head_s(rows_s))
            parts.setdefault("language", []).append(
                F.nll_loss(log_s, row_labels, ignore_index=-100, reduction="none")
            )
            if rows_t is not None:
                log_p = _log_softmax(head_t(rows_t))
                p = log_p.exp()
                parts.setdefault("output", []).append(torch.where(p > 0, p * (log_p - log_s), 0.0).sum(-1))
    return {name: torch.cat(chunks).view_as(labels) for name, chunks in parts.items()}


class _Losses(torch.autograd.Function):
    """Losses whose gradients exist before the backward begins."""

    @staticmethod
    def forward(ctx, hidden_s, weight, bias, head_t, hidden_t, labels, weights, labeled):
        w_output, w_language = weights[0] / labels.numel(), weights[1] / labeled
        needs = ctx.needs_input_grad
        output, language = (torch.zeros((), device=hidden_s.device) for _ in range(2))
        parts_h = []
        dweight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        dbias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
        size = hidden_s.shape[-1] if weight is None else weight.shape[0]
        for rows_t, rows_s, row_labels in _chunks(size, hidden_t, hidden_s, labels, _is_fused(hidden_s)):
            logits_s = rows_s if weight is None else F.linear(rows_s, weight, bias)
            logits_t = None if rows_t is None else head_t(rows_t)
            losses_of = _fused_losses if _is_fused(logits_s) else _chunk_losses
            dy, of_output, of_language = losses_of(
                logits_s, logits_t, row_labels, w_output, w_language, weight is not None
            )
            output += of_output
            language += of_language
            if needs[0]:
                parts_h.append(dy if weight is None else dy @ weight.to(dy.dtype))
            if dweight is not None:
                dweight += dy.T @ rows_s.to(dy.dtype)
            if dbias is not None:
                dbias += dy.sum(0, dtype=torch.float32)
        dhidden = torch.cat(parts_h).view_as(hidden_s).to(hidden_s.dtype) if needs[0] else None
        ctx.save_for_backward(
            dhidden, *(None if each is None else each.to(weight.dtype) for each in (dweight, dbias))
        )
        output, language = output / labels.numel(), language / labeled
        ctx.mark_non_differentiable(output, language)
        return weights[0] * output + weights[1] * language, output, language

    @staticmethod
    def backward(ctx, g, *_):
        return *(None if each is None else g * each for each in ctx.saved_tensors), *[None] * 5


def _chunk_losses(logits_s, logits_t, labels, w_output: float, w_language: float, may_overwrite: bool):
    """(gradient of the student's logits, sum of the output KL, sum of the language loss) of some tokens.

    With x = log softmax of the teacher's logits and y of the student's:

    output = sum exp(x) (x - y)     language = -y[label]        a token with exp(x) = 0 adds 0
    dy = w_output (exp(y) - exp(x)) + w_language (exp(y) - onehot(label))
    """
    y = _log_softmax(logits_s)
    language = F.nll_loss(y, labels, ignore_index=-100, reduction="sum")
    has_label = labels != -100
    dy = y.exp().mul_((w_output * (logits_t is not None) + w_language * has_label)[:, None])
    output = torch.zeros_like(language)
    if logits_t is not None:
        x = _log_softmax(logits_t)
        p = x.exp()
        dy.sub_(p, alpha=w_output)
        output = x.sub_(y).mul_(p).masked_fill_(p == 0, 0.0).sum()
    dy.scatter_add_(1, labels.clamp(min=0)[:, None], (-w_language * has_label.to(dy.dtype))[:, None])
    return dy.to(logits_s.dtype), output, language


def _fused_losses(logits_s, logits_t, labels, w_output: float, w_language: float, may_overwrite: bool):
    """What `_chunk_losses` computes, in one kernel, over the student's logits if it may overwrite them."""
    from ._output_kernel import fused_losses

    logits_s, logits_t = logits_s.contiguous(), None if logits_t is None else logits_t.contiguous()
    dy = logits_s if may_overwrite else torch.empty_like(logits_s)
    output, language = fused_losses(logits_s, logits_t, labels, w_output, w_language, dy)
    return dy, output.sum(), language.sum()


def _is_fused(tensor: torch.Tensor) -> bool:
    """Whether the fused kernel computes the losses of logits on this device."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and _HAS_TRITON


def _chunks(
    vocabulary: int, hidden_t: torch.Tensor | None, hidden_s: torch.Tensor, labels: torch.Tensor, fused: bool = False
):
    """(teacher rows or None, student rows, labels) of a few tokens each."""
    count = max((FUSED_LOGITS if fused else LOGITS) // vocabulary, 1)
    rows_s, row_labels = hidden_s.flatten(0, 1).split(count), labels.flatten().split(count)
    rows_t = [None] * len(rows_s) if hidden_t is None else hidden_t.flatten(0, 1).split(count)
    return zip(rows_t, rows_s, row_labels)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1, dtype=torch.float32 if logits.dtype != torch.float64 else None)
