"""streamkl.attention_map: where two models attend, and where their KL comes from, at any length.

A forward computes the LSEs of all rows. Then, for each bucket of keys, partial states of all rows over these keys give the
bucket's share of the attention and of the KL: a share depends only on the state and the LSEs of its row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Iterator, NamedTuple

import torch

from ._checks import sizes
from ._options import Lengths, MapOptions, check_flags, is_whole, translate, with_options
from ._problem import KL_REVERSE
from ._states import partial
from ._attention_kl import attention_kl, promote_under_autocast
from ._tensors import check_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttentionMap(NamedTuple):
    """Three images, f32 ``[heads_s, rows, columns]``, or ``[rows, columns]`` if averaged over heads."""

    teacher: torch.Tensor
    student: torch.Tensor
    kl: torch.Tensor


@with_options(MapOptions)
@torch.no_grad()
def attention_map(
    q_t: torch.Tensor,
    k_t: torch.Tensor,
    q_s: torch.Tensor,
    k_s: torch.Tensor,
    *,
    buckets: tuple[int, int] = (64, 64),
    per_head: bool = True,
    **options: Unpack[MapOptions],
) -> AttentionMap:
    """Attention maps of a teacher and a student, and of the KL between them, without the N x N matrices.

    The queries and keys of each sequence are divided into buckets of equal length. A cell contains the share of attention that
    the keys of its bucket receive, or their part of the KL, averaged over the sequences and over the queries of its bucket
    that attend to a key. So a row of ``teacher`` or ``student`` sums to 1, and a row of ``kl`` sums to the mean KL of its
    queries; single cells of ``kl`` may be negative. A row whose queries attend to no key is 0.

    It takes the time of two forwards, and about 300 bytes per query and head. No gradient flows.

    Example::

        maps = streamkl.attention_map(q_t, k_t, q_s, k_s, causal=True, per_head=False)
        pyplot.imshow(maps.student.sqrt().cpu())

    Args:
        q_t, k_t, q_s, k_s: as in :func:`streamkl.attention_kl`.
        buckets: ``(rows, columns)``: buckets of queries and of keys, at most the length of the longest sequence.
        per_head: one map per student head; ``False``: their mean. The teacher of a student head is the mean of its
            ``heads_t / heads_s`` teacher heads.
        {options}

    Returns:
        ``AttentionMap(teacher, student, kl)`` on the device of the tensors: f32 ``[heads_s, rows, columns]``, or with
        ``per_head=False`` ``[rows, columns]``.

    Raises:
        ValueError: an argument does not fit; the message contains its name, its shape or value, and what is accepted.
    """
    check_flags(per_head=per_head)
    if not (
        isinstance(buckets, (tuple, list))
        and len(buckets) == 2
        and all(is_whole(count) and count >= 1 for count in buckets)
    ):
        raise ValueError(f"buckets={buckets!r}: must be a pair (rows, columns) of whole numbers, at least 1")
    check_tensors("attention_map", q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_s, optional={})
    lengths, asked = translate(MapOptions, 0, {**options})  # refuses options of attention_kl that a map does not have
    _, lse_t, lse_s = attention_kl(q_t, k_t, q_s, k_s, reduction="none", return_lse=True, **options)
    cu_seqlens_q, cu_seqlens_k = lengths.cu_seqlens_q, lengths.cu_seqlens_k
    lengths_and_options = Lengths(key_lengths=lengths.key_lengths), asked
    reverse, heads_first = asked.direction == KL_REVERSE, asked.heads_first
    tensors = (*promote_under_autocast(q_t, k_t, q_s, k_s), None, None, None, None)

    if cu_seqlens_q is None or cu_seqlens_k is None:
        sequences: list[tuple] = [(tensors, lse_t, lse_s)]
    else:
        sequences = list(_unpack(tensors, lse_t, lse_s, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), heads_first))
    sizes_of = [[sizes(t.shape, False, heads_first)[2] for t in parts[:2]] for parts, _, _ in sequences]
    rows, columns = (min(count, max((pair[i] for pair in sizes_of), default=0)) for i, count in enumerate(buckets))
    sums = torch.zeros(3, lse_s.shape[-2], rows, columns, dtype=torch.float64, device=q_s.device)
    counts = torch.zeros(rows, dtype=torch.float64, device=q_s.device)
    for (parts, part_lse_t, part_lse_s), (len_q, len_k) in zip(sequences, sizes_of):
        if part_lse_s.numel() and len_k:
            _add_sequence(sums, counts, parts, part_lse_t, part_lse_s, len_q, len_k, lengths_and_options, reverse)
    images = sums / counts.clamp(min=1)[:, None]
    images = (images if per_head else images.mean(1)).float()
    return AttentionMap(*images)


def _unpack(tensors, lse_t, lse_s, bounds_q, bounds_k, heads_first) -> Iterator[tuple]:
    """Views of each packed sequence as a batch of one."""
    length = -2 if heads_first else -3
    for q_0, q_1, k_0, k_1 in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
        bounds = ((q_0, q_1 - q_0), (k_0, k_1 - k_0)) * 2
        parts = [t.narrow(length, *bound).unsqueeze(0) for t, bound in zip(tensors, bounds)]
        yield (*parts, None, None, None, None), lse_t[None, :, q_0:q_1], lse_s[None, :, q_0:q_1]


def _edges(count: int, length: int) -> list[int]:
    """Bucket b of `count` covers edges[b] <= i < edges[b + 1]."""
    return [length * bucket // count for bucket in range(count + 1)]


def _add_sequence(sums, counts, tensors, lse_t, lse_s, len_q, len_k, lengths_and_options, reverse) -> None:
    """Adds the queries of a batch of sequences to their buckets: sums [3, heads, rows, columns] and query counts [rows]."""
    _, _, rows, columns = sums.shape
    edges = torch.tensor(_edges(rows, len_q), device=sums.device)
    row_of_query = torch.repeat_interleave(torch.arange(rows, device=sums.device), edges.diff(), output_size=len_q)
    attends = lse_s != -torch.inf
    counts.index_add_(0, row_of_query, attends[:, 0].sum(0).double())  # all heads of a query attend to the same keys

    # LSEs in base 2, like the states. The states of a teacher group are normalized already.
    in_base_2 = [torch.where(lse == -torch.inf, 0.0, lse.double()) / math.log(2) for lse in (lse_t, lse_s)]
    if lse_t.shape != lse_s.shape:
        in_base_2[0] = torch.zeros_like(in_base_2[1])
    lse_a, lse_b = reversed(in_base_2) if reverse else in_base_2
    edges_k = _edges(columns, len_k)
    for column, (begin, end) in enumerate(zip(edges_k, edges_k[1:])):
        if begin == end:
            continue
        lengths, options = lengths_and_options
        states = partial(*tensors, lse_t, begin, end, *lengths, *options)
        mass_a, mass_b, kl = _shares(states, lse_a, lse_b)
        shares = (mass_b, mass_a, kl) if reverse else (mass_a, mass_b, kl)
        for image, share in zip(sums, shares):
            image[..., column].index_add_(-1, row_of_query, share.sum(0))


def _shares(states, lse_a, lse_b):
    """Shares of A, of B and of the KL that the keys of the states hold: [batch, heads, len_q] each."""
    m_a, l_a, m_b, l_b, w = states.movedim(-1, 0).double()
    d_a = torch.where(l_a == 0, 0.0, m_a - lse_a)  # a state without keys has m = -inf, l = 0 and w = 0
    d_b = torch.where(l_b == 0, 0.0, m_b - lse_b)
    factor = d_a.exp2()
    mass_a, mass_b = factor * l_a, d_b.exp2() * l_b
    return mass_a, mass_b, math.log(2) * (factor * w + mass_a * (d_a - d_b))
