"""The losses of a row of logits and their gradient, in one Triton kernel for GPUs: no logit is stored in f32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 2048, 8  # 60 registers on sm_90: four rows per SM


def fused_losses(
    logits_s: torch.Tensor, logits_t: torch.Tensor | None, labels: torch.Tensor, w_output: float, w_language: float,
    dy: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(output KL, language loss) of every row, [rows]. Writes the gradient of the student's logits to `dy`, which may be them."""
    rows, vocabulary = logits_s.shape
    output, language = (torch.empty(rows, dtype=torch.float32, device=logits_s.device) for _ in range(2))
    teacher = logits_s if logits_t is None else logits_t
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    _row_losses[(rows,)](
        logits_s, teacher, labels, dy, output, language, logits_s.stride(0), teacher.stride(0), dy.stride(0),
        float(w_output), float(w_language), vocabulary, logits_t is not None, block, num_warps=_WARPS,
    )  # fmt: skip
    return output, language


@triton.jit
def _row_losses(
    logits_s, logits_t, labels, dy, output, language, stride_s, stride_t, stride_dy, w_output, w_language,
    VOCABULARY: tl.constexpr, HAS_TEACHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block per row. The first pass computes both LSEs, the second one the KL and the gradient, from logits in L2."""
    row = tl.program_id(0).to(tl.int64)
    row_s, row_t, row_dy = logits_s + row * stride_s, logits_t + row * stride_t, dy + row * stride_dy
    label = tl.load(labels + row)
    is_labeled = label != -100
    # Read before the barriers of the first pass: the second one may overwrite the student's logits.
    at_label = tl.load(row_s + tl.where(is_labeled, label, 0)).to(tl.float32)
    lse_s = _lse(row_s, VOCABULARY, BLOCK)
    lse_t = lse_s
    if HAS_TEACHER:
        lse_t = _lse(row_t, VOCABULARY, BLOCK)

    w_label = tl.where(is_labeled, w_language, 0.0)
    kl = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, VOCABULARY, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        seen = token < VOCABULARY
        y = tl.load(row_s + token, mask=seen, other=float("-inf")).to(tl.float32) - lse_s
        gradient = w_label * (tl.exp(y) - tl.where(token == label, 1.0, 0.0))
        if HAS_TEACHER:
            x = tl.load(row_t + token, mask=seen, other=float("-inf")).to(tl.float32) - lse_t
            p = tl.exp(x)
            kl += tl.where(p > 0, p * (x - y), 0.0)
            gradient += w_output * (tl.exp(y) - p)
        tl.store(row_dy + token, gradient.to(dy.dtype.element_ty), mask=seen)
    tl.store(output + row, tl.sum(kl, 0))
    tl.store(language + row, tl.where(is_labeled, lse_s - at_label, 0.0))


@triton.jit
def _lse(logits, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    m, l = float("-inf"), 0.0  # noqa: E741  (the row state of the package)
    for begin in range(0, VOCABULARY, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < VOCABULARY, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(m, tl.max(x, 0))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        l = l * tl.exp(m - shift) + tl.sum(tl.exp(x - shift), 0)  # noqa: E741
        m = larger
    return m + tl.log(l)
