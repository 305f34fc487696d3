"""Plain implementations that store the N x N matrices, for tests and for reading.

They also accept float64 and can be differentiated any number of times. The arguments are those of streamkl.attention_kl and
streamkl.indexer_kl.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ._mean import weighted
from ._options import RULES, AttentionOptions, IndexerOptions, defaults_of


def _asked(declared: Any, given: dict[str, Any]) -> SimpleNamespace:
    """The options of a call, with their defaults. Their rules are those of the library's calls."""
    defaults = defaults_of(declared)
    if unknown := given.keys() - defaults.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    for name in RULES[declared].keys() & given.keys():
        RULES[declared][name](name, given[name])
    for name in ("parallel", "pool") if declared is AttentionOptions else ("parallel",):
        if given.get(name) is not None:
            raise ValueError(f"{name}: must be None for this function of streamkl.reference")
    return SimpleNamespace(**defaults | given)


def visible_keys(
    len_q, len_k, *, causal=False, window_size=(-1, -1), keys=None, key_begin=None, key_end=None, device=None
) -> torch.Tensor:
    """bool [len_q, len_k]: the keys j < `keys` that a query attends to. The last query is aligned with the last key."""
    left, right = window_size
    position = torch.arange(len_q, device=device)[:, None] + (len_k - len_q)
    j = torch.arange(len_k, device=device)[None, :]
    visible = j < (len_k if keys is None else keys)
    visible = visible if key_begin is None else visible & (j >= key_begin[:, None])
    visible = visible if key_end is None else visible & (j < key_end[:, None])
    visible = visible & (j <= position + (0 if causal else right)) if causal or right >= 0 else visible
    return visible & (j >= position - left) if left >= 0 else visible.expand(len_q, len_k)


def logits(q, k, scale, softcap) -> torch.Tensor:
    """Logits [heads, len_q, len_k] of q [heads, len_q, dim] and k [key_heads, len_k, dim]."""
    k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    x = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    return softcap * torch.tanh(x / softcap) if softcap else x


def sequence_kl(
    q_t,
    k_t,
    q_s,
    k_s,
    visible,
    scale_t,
    scale_s,
    softcap_t,
    softcap_s,
    reverse,
    sink_t=None,
    sink_s=None,
    link_s="softmax",
):
    """(KL, lse_t, lse_s) of one sequence: [heads, len_q] each, from tensors [heads, length, dim]."""
    is_linear = link_s == "linear"
    x, y = logits(q_t, k_t, scale_t, softcap_t), logits(q_s, k_s, 1.0 if is_linear else scale_s, softcap_s)
    y = y.log() if is_linear else y
    if sink_t is not None:  # one more outcome of every row that attends to a key
        x, y = (
            torch.cat([z, sink.to(z.dtype)[:, None, None].expand(*z.shape[:2], 1)], -1)
            for z, sink in ((x, sink_t), (y, sink_s))
        )
        visible = torch.cat([visible, visible.any(-1, keepdim=True)], -1)
    rows = rows_of_logits(x, y, visible, None, reverse)
    return rows.kl, rows.lse_t, rows.lse_s


class Rows(NamedTuple):
    """Row vectors of one sequence: [heads_s, len_q] each; lse_t [heads_t, len_q]."""

    kl: torch.Tensor
    cross_entropy: torch.Tensor
    entropy: torch.Tensor
    lse_t: torch.Tensor
    lse_s: torch.Tensor
    mass: torch.Tensor
    kl_uniform: torch.Tensor


class Pooling(NamedTuple):
    """How the teacher is pooled over blocks of keys, the last dimension of x."""

    pool: tuple[str, int] = ("none", 0)
    heads: str = "mean"
    blocks: str = "complete"

    def visible(self, seen, blocks) -> torch.Tensor:
        """bool [len_q, blocks]: the blocks of each row, from the keys [len_q, len_k] that it attends to."""
        size = self.pool[1]
        keys = torch.nn.functional.pad(seen, (0, size))[..., : blocks * size].unflatten(-1, (blocks, size))
        if self.blocks == "visible":
            return keys[..., 0]
        last = (seen * torch.arange(seen.shape[-1], device=seen.device)).amax(-1, keepdim=True) // size
        is_last = torch.arange(blocks, device=seen.device) == last
        return keys.all(-1) & ~is_last if self.blocks == "earlier" else keys.all(-1)

    def __call__(self, log_p, blocks) -> torch.Tensor:
        """log M [..., blocks] of log P [..., keys], which is -inf where a key is hidden."""
        size = self.pool[1]
        padded = torch.nn.functional.pad(log_p, (0, size), value=-torch.inf)
        keys = padded[..., : blocks * size].unflatten(-1, (blocks, size))
        return keys.amax(-1) if self.pool[0] == "max" else keys.logsumexp(-1)


def rows_of_logits(x, y, visible, lse_t, reverse, seen=None, pooling=Pooling()) -> Rows:
    """Row vectors of logits x [heads_t, len_q, n] and y [heads_s, len_q, n] with mask [len_q, n] or [heads_s, len_q, n].

    With pooling, y and `visible` are those of blocks, and x has the mask `seen` of keys.
    """
    heads_s, group_size = y.shape[0], x.shape[0] // y.shape[0]
    visible = visible.expand(y.shape)
    seen = visible if seen is None else seen.expand(heads_s, *x.shape[1:])
    attending = visible.any(-1)  # a row without visible keys is 0 in the end
    # A student head learns the mean of its teacher group.
    seen_t, attending_t, sees_t = (mask.repeat_interleave(group_size, 0) for mask in (seen, attending, seen.any(-1)))
    x, y = torch.where(seen_t, x, -torch.inf), torch.where(visible, y, -torch.inf)
    x_safe, y_safe = torch.where(sees_t[..., None], x, 0.0), torch.where(attending[..., None], y, 0.0)
    own_lse = torch.logsumexp(x_safe, -1)
    normalizer = own_lse if lse_t is None else torch.where(attending_t, lse_t.to(x.dtype), own_lse)
    log_p = torch.where(seen_t, x_safe - normalizer[..., None], 0.0).unflatten(0, (heads_s, group_size))
    log_p = log_p.amax(1) if pooling.heads == "max" else log_p.logsumexp(1) - math.log(group_size)
    if pooling.pool[1] > 0:
        log_p = torch.where(visible, pooling(torch.where(seen, log_p, -torch.inf), y.shape[-1]), 0.0)
    # Under an LSE of more keys the teacher is conditional on the visible keys, which hold `mass` of its attention.
    log_mass = torch.where(visible, log_p, -torch.inf).masked_fill(~attending[..., None], 0.0).logsumexp(-1)
    log_p = log_p - log_mass[..., None]
    log_s = torch.where(visible, torch.log_softmax(y_safe, -1), 0.0)
    log_a, log_b = (log_s, log_p) if reverse else (log_p, log_s)

    def row_sum(terms):
        return torch.where(attending, torch.where(visible, terms, 0.0).sum(-1), 0.0)

    kl, entropy = row_sum(log_a.exp() * (log_a - log_b)), row_sum(-log_a.exp() * log_a)
    normalizer = normalizer + log_mass.repeat_interleave(group_size, 0)
    return Rows(
        kl,
        kl + entropy,
        entropy,
        torch.where(attending_t, normalizer, -torch.inf),
        torch.logsumexp(y, -1),
        torch.where(attending, log_mass.exp(), 0.0),
        torch.where(attending, visible.sum(-1).log() - entropy, 0.0),
    )


def sequence_indexer_kl(
    q_t, k_t, q_s, k_s, w_s, indices, lse_t, visible, scale_t, scale_s, softcap_t, relu, reverse, pooling=Pooling()
) -> Rows:
    """Row vectors of one sequence, with w_s [heads_s, len_q, G] and indices [heads_s, len_q, top_k] or None."""
    x, dots = logits(q_t, k_t, scale_t, softcap_t), logits(q_s, k_s, 1.0, 0.0)
    dots = (dots.relu() if relu else dots).unflatten(0, (w_s.shape[0], w_s.shape[-1]))
    y = ((q_s.shape[-1] * w_s.shape[-1]) ** -0.5 if scale_s is None else scale_s) * torch.einsum(
        "hgij,hig->hij", dots, w_s
    )
    seen = None
    if pooling.pool[1] > 0:
        seen, visible = visible, pooling.visible(visible, y.shape[-1])
    if indices is not None and y.shape[-1]:  # nothing can be gathered if there are no keys
        gathered = indices.long().clamp(min=0)
        visible = visible.expand(y.shape).gather(-1, gathered) & (indices >= 0)
        y, keys = y.gather(-1, gathered), gathered
        if seen is not None:  # the keys of each block
            size = pooling.pool[1]
            keys = (gathered[..., None] * size + torch.arange(size, device=x.device)).flatten(-2)
            inside, keys = keys < x.shape[-1], keys.clamp(max=x.shape[-1] - 1)
            seen = (
                seen.expand(y.shape[0], *x.shape[1:]).gather(-1, keys) & inside & visible.repeat_interleave(size, -1)
            )
        x = x.gather(-1, keys.repeat_interleave(x.shape[0] // y.shape[0], 0))
    return rows_of_logits(x, y, visible, lse_t, reverse, seen, pooling)


def sequences(q, k, asked):
    """Yields for each sequence of [batch, heads, length, dim] its index in the batch, slices of queries and keys, and its mask."""
    mask = dict(causal=asked.causal, window_size=asked.window_size, device=q.device)

    def bounds(rows):
        given = dict(key_begin=asked.key_begin, key_end=asked.key_end)
        return {name: None if bound is None else bound[rows] for name, bound in given.items()}

    if asked.cu_seqlens_q is None:
        for b in range(q.shape[0]):
            keys = None if asked.key_lengths is None else int(asked.key_lengths[b])
            yield b, slice(None), slice(None), visible_keys(q.shape[-2], k.shape[-2], keys=keys, **bounds(b), **mask)
        return
    bounds_q, bounds_k = asked.cu_seqlens_q.tolist(), asked.cu_seqlens_k.tolist()
    for q_0, q_1, k_0, k_1 in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
        yield (
            ...,
            slice(q_0, q_1),
            slice(k_0, k_1),
            visible_keys(q_1 - q_0, k_1 - k_0, **bounds(slice(q_0, q_1)), **mask),
        )


def join(parts, packed, len_q, value=0.0) -> torch.Tensor:
    """Joins the rows of all sequences; packed rows after the last sequence become `value`."""
    if not packed:
        return torch.stack(parts)
    joined = torch.cat(parts, -1)
    return torch.nn.functional.pad(joined, (0, len_q - joined.shape[-1]), value=value)


def reduced(kl, attending, row_weight, reduction) -> torch.Tensor:
    if row_weight is None:
        weight = attending.to(kl.dtype)
    else:
        per_head = row_weight if row_weight.dim() == kl.dim() else row_weight.unsqueeze(-2)
        weight = torch.where(attending, per_head.to(kl.dtype), 0.0)
    loss = weighted(kl, weight)
    if reduction == "none":
        return loss
    total = weight.sum() if reduction == "mean" else loss.new_ones(())
    return loss.sum() / torch.where(total == 0, 1.0, total)


def attention_kl(q_t, k_t, q_s, k_s, *, return_lse=False, **options):
    """streamkl.attention_kl with matrices. Ignores given LSEs and computes its own."""
    asked = _asked(AttentionOptions, options)
    q_t, k_t, q_s, k_s = (t if asked.layout == "bhnd" else t.transpose(-3, -2) for t in (q_t, k_t, q_s, k_s))
    packed, len_q, reverse = asked.cu_seqlens_q is not None, q_t.shape[-2], asked.direction == "reverse"
    logits_of = (asked.softmax_scale_t, asked.softmax_scale_s, asked.softcap_t, asked.softcap_s)
    rows = []
    for b, q, k, visible in sequences(q_t, k_t, asked):
        parts = (q_t[b][:, q], k_t[b][:, k], q_s[b][:, q], k_s[b][:, k])
        rows.append(sequence_kl(*parts, visible, *logits_of, reverse, asked.sink_t, asked.sink_s, asked.link_s))
    kl, out_t, out_s = (
        join(parts, packed, len_q, value) for parts, value in zip(zip(*rows), (0.0, -torch.inf, -torch.inf))
    )
    # A row that attends to keys has an LSE of the teacher, also if the student is linear and all its products are 0.
    attending = (out_t != -torch.inf).unflatten(-2, (kl.shape[-2], -1)).any(-2)
    loss = reduced(kl, attending, asked.row_weight, asked.reduction)
    return (loss, out_t.detach(), out_s.detach()) if return_lse else loss


def attention(q, k, v, *, softmax_scale=None, softcap=0.0, **options):
    """(output, LSE) of attention, with matrices. A row that attends to no key has output 0 and LSE -inf."""
    asked = _asked(AttentionOptions, options)
    q, k, v = (t if asked.layout == "bhnd" else t.transpose(-3, -2) for t in (q, k, v))
    packed, len_q = asked.cu_seqlens_q is not None, q.shape[-2]
    outputs, lses = [], []
    for b, rows, keys, visible in sequences(q, k, asked):
        x = logits(q[b][:, rows], k[b][:, keys], softmax_scale, softcap)
        x = torch.where(visible, x, -torch.inf)
        attending = visible.any(-1)[:, None]
        s = torch.where(attending, torch.softmax(torch.where(attending, x, 0.0), -1), 0.0)
        outputs.append((s @ v[b][:, keys].repeat_interleave(q.shape[-3] // k.shape[-3], dim=0)).transpose(-2, -1))
        lses.append(torch.logsumexp(x, -1))
    output = join(outputs, packed, len_q).transpose(-2, -1)
    return output if asked.layout == "bhnd" else output.transpose(-3, -2), join(lses, packed, len_q, -torch.inf)


def indexer_kl(q_t, k_t, q_s, k_s, w_s, indices=None, *, return_rows=False, **options):
    """streamkl.indexer_kl with matrices. Normalizes the teacher on the visible keys, whatever lse_t covers."""
    asked = _asked(IndexerOptions, options)
    packed, heads = asked.cu_seqlens_q is not None, -3 if asked.layout == "bhnd" else -2
    k_s, w_s, indices = (
        t.unsqueeze(heads) if t is not None and t.dim() == 3 - packed else t for t in (k_s, w_s, indices)
    )
    q_t, k_t, q_s, k_s, w_s, indices = (
        t if t is None or asked.layout == "bhnd" else t.transpose(-3, -2) for t in (q_t, k_t, q_s, k_s, w_s, indices)
    )
    len_q, reverse = q_t.shape[-2], asked.direction == "reverse"
    logits_of = (asked.softmax_scale_t, asked.softmax_scale_s, asked.softcap_t, asked.relu)
    pooling = Pooling(asked.pool or ("none", 0), asked.pool_heads, asked.pool_blocks)
    rows = []
    for b, q, k, visible in sequences(q_t, k_t, asked):
        of_rows = (None if t is None else t[b][:, q] for t in (w_s, indices, asked.lse_t))
        parts = (q_t[b][:, q], k_t[b][:, k], q_s[b][:, q], k_s[b][:, k])
        rows.append(sequence_indexer_kl(*parts, *of_rows, visible, *logits_of, reverse, pooling))
    values = Rows(0.0, 0.0, 0.0, -torch.inf, -torch.inf, 0.0, 0.0)
    joined = Rows(*(join(parts, packed, len_q, value) for parts, value in zip(zip(*rows), values)))
    weight = joined.mass if isinstance(asked.row_weight, str) else asked.row_weight
    loss = reduced(joined.kl, joined.lse_s != -torch.inf, weight, asked.reduction)
    return (loss, Rows(*(row.detach() for row in joined))) if return_rows else loss
