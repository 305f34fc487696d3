"""The plain implementation, which stores the N x N matrices: for tests, and to read.

Takes float64, too, and can be differentiated as often as one likes. Arguments are those of streamkl.attention_kl.
"""

from __future__ import annotations

import math

import torch


def visible_keys(len_q, len_k, *, causal=False, window_size=(-1, -1), keys=None, device=None) -> torch.Tensor:
    """[len_q, len_k] bool: which keys j < `keys` a query sees. The last query stands at the last key."""
    left, right = window_size
    position = torch.arange(len_q, device=device)[:, None] + (len_k - len_q)
    j = torch.arange(len_k, device=device)[None, :]
    visible = j < (len_k if keys is None else keys)
    visible = visible & (j <= position + (0 if causal else right)) if causal or right >= 0 else visible
    return visible & (j >= position - left) if left >= 0 else visible.expand(len_q, len_k)


def logits(q, k, scale, softcap) -> torch.Tensor:
    """[heads, len_q, len_k] of q [heads, len_q, dim] and k [key_heads, len_k, dim]."""
    k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    x = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    return softcap * torch.tanh(x / softcap) if softcap else x


def sequence_kl(q_t, k_t, q_s, k_s, visible, scale_t, scale_s, softcap_t, softcap_s, reverse):
    """(KL, lse_t, lse_s) of one sequence: tensors [heads, length, dim], rows [heads, len_q]."""
    x, y = logits(q_t, k_t, scale_t, softcap_t), logits(q_s, k_s, scale_s, softcap_s)
    seen = visible.any(-1)  # where a row sees nothing, all of it is masked and it is 0 in the end
    x, y = (torch.where(visible, z, -torch.inf) for z in (x, y))
    x_safe, y_safe = (torch.where(seen[:, None], z, 0.0) for z in (x, y))
    # A student head learns the mean of its r teacher heads.
    groups = (q_s.shape[0], q_t.shape[0] // q_s.shape[0])
    p, s = torch.softmax(x_safe, -1).unflatten(0, groups).mean(1), torch.softmax(y_safe, -1)
    log_p, log_s = (torch.where(visible, torch.log_softmax(z, -1), 0.0) for z in (x_safe, y_safe))
    log_p = log_p.unflatten(0, groups).logsumexp(1) - math.log(groups[1])
    difference = log_p - log_s
    terms = -s * difference if reverse else p * difference
    kl = torch.where(seen, torch.where(visible, terms, 0.0).sum(-1), 0.0)
    return kl, torch.logsumexp(x, -1), torch.logsumexp(y, -1)


def attention_kl(
    q_t, k_t, q_s, k_s, *, causal=False, window_size=(-1, -1), softmax_scale_t=None, softmax_scale_s=None,
    softcap_t=0.0, softcap_s=0.0, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    key_lengths=None, direction="forward", reduction="mean", row_weight=None, lse_t=None, lse_s=None,
    deterministic=False, return_lse=False, layout="bnhd",
):  # fmt: skip
    """streamkl.attention_kl with matrices. LSEs that are given are not used: it computes its own."""
    tensors = [q_t, k_t, q_s, k_s] if layout == "bhnd" else [t.transpose(-3, -2) for t in (q_t, k_t, q_s, k_s)]
    batch, (len_q, len_k) = (1 if q_t.dim() == 3 else q_t.shape[0]), (tensors[0].shape[-2], tensors[1].shape[-2])
    options = (softmax_scale_t, softmax_scale_s, softcap_t, softcap_s, direction == "reverse")

    rows, seen = [], []
    if cu_seqlens_q is None:
        for b in range(batch):
            keys = None if key_lengths is None else int(key_lengths[b])
            mask = visible_keys(len_q, len_k, causal=causal, window_size=window_size, keys=keys, device=q_t.device)
            rows.append(sequence_kl(*(t[b] for t in tensors), mask, *options))
            seen.append(mask.any(-1))
        kl, out_t, out_s = (torch.stack(parts) for parts in zip(*rows))
        seen = torch.stack(seen)
    else:
        bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for q_0, q_1, k_0, k_1 in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
            mask = visible_keys(q_1 - q_0, k_1 - k_0, causal=causal, window_size=window_size, device=q_t.device)
            parts = [t[:, a:b] for t, (a, b) in zip(tensors, [(q_0, q_1), (k_0, k_1)] * 2)]
            rows.append(sequence_kl(*parts, mask, *options))
            seen.append(mask.any(-1))
        tail = len_q - bounds_q[-1]  # rows of no sequence
        kl, out_t, out_s = (torch.cat(parts, -1) for parts in zip(*rows))
        kl = torch.nn.functional.pad(kl, (0, tail))
        out_t, out_s = (torch.nn.functional.pad(lse, (0, tail), value=-torch.inf) for lse in (out_t, out_s))
        seen = torch.nn.functional.pad(torch.cat(seen), (0, tail))

    seen = seen.unsqueeze(-2).expand_as(kl)
    if row_weight is None:
        weight = seen.to(kl.dtype)
    else:
        per_head = row_weight if row_weight.dim() == kl.dim() else row_weight.unsqueeze(-2)
        weight = torch.where(seen, per_head.to(kl.dtype), 0.0)
    loss = torch.where(weight == 0, 0.0, kl * weight)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        total = weight.sum()
        loss = loss / torch.where(total == 0, 1.0, total)
    return (loss, out_t.detach(), out_s.detach()) if return_lse else loss
