"""check_lse: the LSEs that a caller passes, compared with those of some rows."""

from __future__ import annotations

import math
import os

import torch

from ._checks import sizes
from ._problem import LINK_LINEAR

_ROWS = 4  # per sequence
_SEQUENCES = 8
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}  # relative to 1 + |LSE|


def is_lse_check_on(check_lse: bool, lse_t: torch.Tensor | None) -> bool:
    if lse_t is None or torch.compiler.is_compiling():
        return False
    return check_lse or os.environ.get("STREAMKL_CHECK_LSE") == "1"


def check_both_lses(teacher, student, lengths, options) -> None:
    """Raises ValueError if an LSE of teacher or student, given as (q, k, lse, sink), is not that of the visible keys.

    That of the student may be None. That of a teacher alone may cover more keys.
    """
    linear = options.link_s == LINK_LINEAR
    _check("lse_t", teacher, options.scale_t, options.softcap_t, lengths, options, wider=student[2] is None)
    _check("lse_s", student, options.scale_s, options.softcap_s, lengths, options, linear=linear)


def check_teacher_lse(teacher, indices, wider, lengths, options, name="lse_t") -> None:
    """Raises ValueError if an LSE of an indexer's teacher is wrong. `wider`: it may cover more keys."""
    _check(name, teacher, options.scale_t, options.softcap_t, lengths, options, indices, wider)


@torch.no_grad()
def _check(name, given, scale, softcap, lengths, options, indices=None, wider=False, linear=False) -> None:
    q, k, lse, sink = given
    if lse is None:
        return
    scale = scale or (1.0 if linear else 1 / math.sqrt(q.shape[-1]))
    for place, q_row, keys, found, in_indices in _sample(q, k, lse, indices, lengths, options):
        with torch.autocast(q.device.type, enabled=False):  # which would round the products
            logits = torch.einsum("hd,hnd->hn", q_row.float(), keys.float()) * scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits.log() if linear else logits
        if in_indices is not None:
            logits = logits.gather(1, in_indices.clamp(min=0)).masked_fill(in_indices < 0, -torch.inf)
        expected = logits.logsumexp(-1)
        attends = expected != -torch.inf  # a mean counts the rows whose LSE is finite
        expected = expected if sink is None else torch.where(attends, torch.logaddexp(expected, sink), expected)
        difference = found - expected if wider else -(found - expected).abs()
        differs = ~(difference >= -_TOLERANCE[q.dtype] * (1 + expected.abs()))
        wrong = torch.where(attends, differs, ~found.isinf() & (not wider))
        if wrong.any():
            head, least = int(wrong.int().argmax()), "at least " if wider else ""
            raise ValueError(
                f"{name}: {found[head]:.5g} at {place}, head {head} must be {least}{expected[head]:.5g}, the "
                "log-sum-exp of the scaled and capped logits of the visible keys (natural logarithm)"
            )


def _sample(q, k, lse, indices, lengths, options):
    """(place, query [heads, dim], visible keys [heads, keys, dim], LSE [heads], in_indices) of some rows.

    in_indices: which of these keys the row attends to, [heads, top_k], -1 for none; None: all of them.
    """
    if not options.heads_first:
        q, k = q.transpose(-3, -2), k.transpose(-3, -2)
        indices = None if indices is None else indices.transpose(-3, -2)
    packed = lengths.cu_seqlens_q is not None
    for place, q_0, q_1, k_0, k_1, keys, b in _sequences(q, k, lengths, packed):
        len_q, len_k = q_1 - q_0, k_1 - k_0
        for i in sorted({len_q * part // _ROWS for part in range(_ROWS)} | {len_q - 1}) if len_q else ():
            position = i + len_k - len_q
            right = 0 if options.causal else options.window_right
            begin = max(0, position - options.window_left) if options.window_left >= 0 else 0
            end = min(keys, position + right + 1) if right >= 0 else keys
            bounds = q_0 + i if packed else (b, i)
            begin = begin if lengths.key_begin is None else max(begin, int(lengths.key_begin[bounds]))
            end = max(0, end if lengths.key_end is None else min(end, int(lengths.key_end[bounds])))
            query, key, row = (
                (q[:, q_0 + i], k[:, k_0:k_1], lse[:, q_0 + i]) if packed else (q[b, :, i], k[b], lse[b, :, i])
            )
            key = key[:, begin:end].repeat_interleave(query.shape[0] // key.shape[0], 0)
            in_indices = None
            if indices is not None and begin < end:
                in_indices = (indices[:, q_0 + i] if packed else indices[b, :, i]).long()
                in_indices = torch.where((in_indices >= begin) & (in_indices < end), in_indices - begin, -1)
                in_indices = in_indices.repeat_interleave(query.shape[0] // in_indices.shape[0], 0)
            yield f"{place}, row {i}", query, key, row, in_indices


def _sequences(q, k, lengths, packed):
    """(name, first and last query, first and last key, visible keys, batch index)"""
    if packed:
        bounds_q, bounds_k = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
        for b, (q_0, q_1, k_0, k_1) in enumerate(zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:])):
            if b < _SEQUENCES:
                yield f"sequence {b}", q_0, q_1, k_0, k_1, k_1 - k_0, 0
        return
    batch, _, len_q = sizes(q.shape, False, True)
    len_k = k.shape[2]
    counts = [len_k] * batch if lengths.key_lengths is None else lengths.key_lengths.tolist()
    for b in range(min(batch, _SEQUENCES)):
        yield f"batch {b}", 0, len_q, 0, len_k, counts[b], b
