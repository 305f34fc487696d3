"""Attention KL and its gradients in float64 from whole matrices, one head at a time.

It shares no code with the library or with its C oracle.
"""

from dataclasses import dataclass, replace

import numpy as np


@dataclass
class Problem:
    causal: bool = False
    window: tuple = (-1, -1)
    offsets: tuple | None = None  # positions of query 0 and key 0; None: bottom-right aligned
    key_lengths: list | None = None
    scale_t: float | None = None
    scale_s: float | None = None
    softcap_t: float = 0
    softcap_s: float = 0
    reverse: bool = False
    lse_t: np.ndarray | None = None
    key_begin: np.ndarray | None = None  # row bounds: [B, N], packed [total]
    key_end: np.ndarray | None = None
    sink_t: np.ndarray | None = None  # [H_t]
    sink_s: np.ndarray | None = None  # [H_s]


def visible(problem, len_q, len_k, batch):
    """[len_q, len_k]: does query i attend to key j?"""
    offset_q, offset_k = problem.offsets or (len_k - len_q, 0)
    ahead = (offset_k + np.arange(len_k))[None, :] - (offset_q + np.arange(len_q))[:, None]
    mask = np.ones((len_q, len_k), bool)
    left, right = problem.window
    if problem.causal:
        mask &= ahead <= 0
    if left >= 0:
        mask &= ahead >= -left
    if right >= 0:
        mask &= ahead <= right
    if problem.key_lengths is not None:
        mask &= np.arange(len_k)[None, :] < problem.key_lengths[batch]
    if problem.key_begin is not None:
        mask &= np.arange(len_k)[None, :] >= problem.key_begin[batch][:, None]
    if problem.key_end is not None:
        mask &= np.arange(len_k)[None, :] < problem.key_end[batch][:, None]
    return mask


def logits(q, k, scale, softcap):
    """The logits, and their derivative with respect to scale * <q, k>."""
    x = q @ k.T * (scale if scale is not None else 1 / np.sqrt(q.shape[-1]))
    if not softcap:
        return x, np.ones_like(x)
    capped = np.tanh(x / softcap)
    return softcap * capped, 1 - capped**2


def with_sink(x, slope, sinks, head):
    """One more column: the logit of the sink, which is no product of q and k."""
    if sinks is None:
        return x, slope
    column = np.ones((len(x), 1))
    return np.hstack([x, sinks[head] * column]), np.hstack([slope, column])


def log_softmax(x, mask):
    """Log of the softmax over the visible keys, and the LSE; -inf for rows without visible keys."""
    x = np.where(mask, x, -np.inf)
    row_max = np.max(x, axis=-1, keepdims=True, initial=-np.inf)
    row_max = np.where(np.isfinite(row_max), row_max, 0)
    with np.errstate(divide="ignore"):
        lse = row_max + np.log(np.sum(np.exp(x - row_max), axis=-1, keepdims=True))
    return np.where(mask, x - np.where(np.isfinite(lse), lse, 0), -np.inf), lse[..., 0]


@dataclass
class Result:
    kl: np.ndarray
    lse_t: np.ndarray
    lse_s: np.ndarray
    gradients: dict
    matrices: dict | None = None  # P, S and the terms of the KL: [B, H_s, N, N_k], without sinks

    @property
    def valid(self):
        return np.isfinite(self.lse_s)

    def mean(self):
        return self.kl[self.valid].mean() if self.valid.any() else 0.0


def attention_kl(tensors, problem=None, upstream=1.0):
    """Rows [B, H_s, N] and the gradients of upstream * sum(KL). Tensors are [B, H, N, D]."""
    problem = problem or Problem()
    q_t, k_t, q_s, k_s = (np.asarray(tensors[name], np.float64) for name in ("q_t", "k_t", "q_s", "k_s"))
    batch, heads_t, len_q, dim_t = q_t.shape
    heads_s, len_k, dim_s = q_s.shape[1], k_t.shape[2], q_s.shape[3]
    group_size = heads_t // heads_s
    scale_t = problem.scale_t if problem.scale_t is not None else 1 / np.sqrt(dim_t)
    scale_s = problem.scale_s if problem.scale_s is not None else 1 / np.sqrt(dim_s)
    result = Result(
        np.zeros((batch, heads_s, len_q)),
        np.zeros((batch, heads_t, len_q)),
        np.zeros((batch, heads_s, len_q)),
        {"dq_t": np.zeros_like(q_t), "dk_t": np.zeros_like(k_t), "dq_s": np.zeros_like(q_s), "dk_s": np.zeros_like(k_s)},
    )
    result.matrices = {name: np.zeros((batch, heads_s, len_q, len_k)) for name in ("p", "s", "kl")}
    grads = result.gradients
    if problem.sink_s is not None:
        grads |= {"dsink_t": np.zeros(heads_t), "dsink_s": np.zeros(heads_s)}
    for b in range(batch):
        mask = visible(problem, len_q, len_k, b)
        if problem.sink_s is not None:
            mask = np.hstack([mask, mask.any(-1, keepdims=True)])  # a row without keys has no sink
        for h in range(heads_s):
            key_s = h // (heads_s // k_s.shape[1])
            y, slope_s = with_sink(*logits(q_s[b, h], k_s[b, key_s], scale_s, problem.softcap_s), problem.sink_s, h)
            log_s, result.lse_s[b, h] = log_softmax(y, mask)
            s = np.exp(log_s)

            members = range(h * group_size, (h + 1) * group_size)
            p_heads, slopes_t = [], []
            for t in members:
                key_t = t // (heads_t // k_t.shape[1])
                x, slope = with_sink(*logits(q_t[b, t], k_t[b, key_t], scale_t, problem.softcap_t), problem.sink_t, t)
                log_p, result.lse_t[b, t] = log_softmax(x, mask)
                p_heads.append(np.exp(log_p))
                slopes_t.append(slope)
            p = sum(p_heads) / group_size

            # KL(A || B) = sum a (log a - log b), over the visible keys
            with np.errstate(divide="ignore", invalid="ignore"):
                log_p_mean = np.where(mask, np.log(p), 0) if group_size > 1 else np.where(mask, log_p, 0)
                log_s_seen = np.where(mask, log_s, 0)
                a, log_ratio = (s, log_s_seen - log_p_mean) if problem.reverse else (p, log_p_mean - log_s_seen)
                terms = np.where(a > 0, a * log_ratio, 0)
            result.kl[b, h] = terms.sum(-1)
            for name, matrix in ("p", p), ("s", s), ("kl", terms):
                result.matrices[name][b, h] = matrix[:, :len_k]

            # dKL/ds and dKL/dp up to a constant per row, which the gradient of the softmax removes
            if problem.reverse:
                d_s = np.where(mask, log_ratio, 0)
                d_p = np.where(mask & (p > 0), -s / np.where(p > 0, p, 1), 0)
            else:
                d_s = np.where(mask & (s > 0), -p / np.where(s > 0, s, 1), 0)
                d_p = np.where(mask, log_ratio, 0)
            dy = upstream * s * (d_s - (s * d_s).sum(-1, keepdims=True)) * slope_s
            if problem.sink_s is not None:
                grads["dsink_s"][h] += dy[:, len_k].sum()
            dy = dy[:, :len_k] * scale_s
            grads["dq_s"][b, h] += dy @ k_s[b, key_s]
            grads["dk_s"][b, key_s] += dy.T @ q_s[b, h]
            for t, p_head, slope in zip(members, p_heads, slopes_t):
                key_t = t // (heads_t // k_t.shape[1])
                dx = upstream / group_size * p_head * (d_p - (p_head * d_p).sum(-1, keepdims=True)) * slope
                if problem.sink_t is not None:
                    grads["dsink_t"][t] += dx[:, len_k].sum()
                dx = dx[:, :len_k] * scale_t
                grads["dq_t"][b, t] += dx @ k_t[b, key_t]
                grads["dk_t"][b, key_t] += dx.T @ q_t[b, t]
    return result


def rows_of(problem, rows):
    """The problem of one packed sequence."""
    if problem is None:
        return None
    begin, end = (bounds if bounds is None else bounds[None, rows] for bounds in (problem.key_begin, problem.key_end))
    return replace(problem, key_begin=begin, key_end=end)


def packed_attention_kl(tensors, cu_q, cu_k, problem=None, upstream=1.0):
    """The same for packed [H, total, D]; rows after the last sequence have KL 0 and gradient 0."""
    total_q = tensors["q_t"].shape[1]
    heads_t, heads_s = tensors["q_t"].shape[0], tensors["q_s"].shape[0]
    total = Result(
        np.zeros((heads_s, total_q)),
        np.full((heads_t, total_q), -np.inf),
        np.full((heads_s, total_q), -np.inf),
        {"d" + name: np.zeros(tensors[name].shape) for name in ("q_t", "k_t", "q_s", "k_s")},
    )
    for begin_q, end_q, begin_k, end_k in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        rows = {"q": slice(begin_q, end_q), "k": slice(begin_k, end_k)}
        part = {name: array[None, :, rows[name[0]]] for name, array in tensors.items()}
        one = attention_kl(part, rows_of(problem, rows["q"]), upstream)
        total.kl[:, rows["q"]] = one.kl[0]
        total.lse_t[:, rows["q"]] = one.lse_t[0]
        total.lse_s[:, rows["q"]] = one.lse_s[0]
        for name, gradient in one.gradients.items():
            total.gradients[name][:, rows[name[1]]] += gradient[0]
    return total
