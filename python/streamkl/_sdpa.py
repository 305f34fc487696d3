"""torch's fused attention, with its LSE."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import reference
from ._checks import sizes

_FLASH, _EFFICIENT, _CUDNN = 1, 2, 3  # torch.nn.attention.SDPBackend


def as_autocast(tensor):
    """What autocast makes of an argument of scaled_dot_product_attention: the kernels below would not see it."""
    eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    if not eligible or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _prefers_cudnn(query, key, value, causal: bool, gqa: bool) -> bool:
    """Whether cuDNN's attention runs here and is faster than flash attention: on Hopper it takes two thirds of the time."""
    cuda = torch.backends.cuda
    if not query.is_cuda or not hasattr(cuda, "can_use_cudnn_attention") or not cuda.cudnn_sdp_enabled():
        return False
    if torch.cuda.get_device_capability(query.device) < (9, 0) or query.shape[-1] > 128:
        return False
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(query, key, value, None, 0.0, causal, gqa))


def sdpa_with_lse(query, key, value, mask=None, dropout=0.0, causal=False, scale=None, gqa=False, fastest=False):
    """(output, lse) of the kernel that scaled_dot_product_attention chooses; None if it returns no LSE.

    Tensors are [batch, heads, length, dim], the LSE [batch, heads, length]. `fastest`: cuDNN's kernel where it is faster.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None or (causal and query.shape[2] != key.shape[2]):
        return None
    if fastest and _prefers_cudnn(query, key, value, causal, gqa):
        backend = _CUDNN
    else:
        backend = choose(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    aten = torch.ops.aten
    if query.device.type == "cpu" and backend == _FLASH:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, causal, attn_mask=mask, scale=scale
        )
    elif query.device.type != "cuda" or mask is not None or query.shape[-1] % 8 != 0:
        return None
    elif backend == _FLASH:
        output, lse, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )
    elif backend == _EFFICIENT:
        output, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, dropout, causal, scale=scale
        )
    elif backend == _CUDNN:
        output, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, dropout, causal, False, scale=scale
        )
    else:
        return None
    return output, lse.detach().flatten(2)[..., : query.shape[2]]  # some kernels pad the length or add a dimension


def attend(q, k, v, lengths, options) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) of a call's student, in the layout of the call; the LSE is [batch, heads, length], packed [heads, total].

    Windows and lengths need flash attention on a GPU. Elsewhere the matrices are stored.
    """
    packed = lengths.cu_seqlens_q is not None
    is_plain = all(given is None for given in lengths) and options.window_left < 0 and options.softcap_s == 0
    right = 0 if options.causal else options.window_right
    scale = options.scale_s or q.shape[-1] ** -0.5
    if is_plain and (options.causal or right < 0):
        query, key, value = (tensor if options.heads_first else tensor.transpose(1, 2) for tensor in (q, k, v))
        gqa = query.shape[1] != key.shape[1]
        answer = sdpa_with_lse(query, key, value, causal=options.causal, scale=scale, gqa=gqa, fastest=True)
        if answer is not None:
            output, lse = answer
            return output if options.heads_first else output.transpose(1, 2), lse
    if _has_flash(q, lengths, options):
        return _flash(q, k, v, lengths, options, scale, packed)
    return _with_matrices(q, k, v, lengths, options, scale)


def _has_flash(q, lengths, options) -> bool:
    """Whether flash attention computes a call's student on a GPU: with windows and packed sequences, too."""
    bounded = lengths.key_begin is not None or lengths.key_end is not None or lengths.key_lengths is not None
    return (
        q.is_cuda
        and q.dtype != torch.float32
        and not bounded
        and options.softcap_s == 0
        and q.shape[-1] in range(8, 257, 8)
    )


@contextmanager
def fixed_order(q, term):
    """Inside, the backward of `attend` adds in a fixed order: that of flash attention or, elsewhere, of stored matrices."""
    flash = _has_flash(q, term.lengths, term.options)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if flash else SDPBackend.MATH):
        if flash:  # flash reads this setting in its backward
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _in_sequences(tensor, cu_seqlens, other=0.0):
    """Rows [total, ...] of packed sequences. Those after the last one, which torch does not write, are `other`."""
    rows = torch.arange(tensor.shape[0], device=cu_seqlens.device) < cu_seqlens[-1]
    return torch.where(rows.view(-1, *[1] * (tensor.dim() - 1)), tensor, other)


def _flash(q, k, v, lengths, options, scale, packed):
    length_first = [tensor.transpose(-3, -2) if options.heads_first else tensor for tensor in (q, k, v)]
    if packed:  # so that the others have gradients of 0
        of_rows = (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.cu_seqlens_k)
        length_first = list(map(_in_sequences, length_first, of_rows))
    _, _, len_q = sizes(q.shape, packed, options.heads_first)
    _, _, len_k = sizes(k.shape, packed, options.heads_first)
    left, right = options.window_left, 0 if options.causal else options.window_right
    # torch moves query heads into the length if the longest sequence is 1, and fails for several sequences.
    longest_q = options.max_seqlen_q if options.max_seqlen_q >= 0 else len_q
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        *length_first,
        lengths.cu_seqlens_q,
        lengths.cu_seqlens_k,
        max(2, longest_q) if packed else longest_q,
        options.max_seqlen_k if options.max_seqlen_k >= 0 else len_k,
        0.0,
        options.causal,
        False,
        scale=scale,
        window_size_left=None if left < 0 else left,
        window_size_right=None if right < 0 else right,
    )
    lse = lse[..., :len_q]
    if packed:
        output = _in_sequences(output, lengths.cu_seqlens_q)
        lse = _in_sequences(lse.mT, lengths.cu_seqlens_q, -torch.inf).mT
    return output.transpose(-3, -2) if options.heads_first else output, lse


def _with_matrices(q, k, v, lengths, options, scale):
    q, k, v = (tensor if options.heads_first else tensor.transpose(-3, -2) for tensor in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):  # which would round the products
        output, lse = reference.attention(
            q.float(),
            k.float(),
            v.float(),
            causal=options.causal,
            window_size=(options.window_left, options.window_right),
            softmax_scale=scale,
            softcap=options.softcap_s,
            layout="bhnd",
            **lengths._asdict(),
        )
    # A copy in the strides of q: the output of one query would have rows one element apart, which no kernel takes.
    output = torch.empty_like(q).copy_(output)
    return output if options.heads_first else output.transpose(-3, -2), lse
