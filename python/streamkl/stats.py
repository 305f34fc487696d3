"""streamkl.attention_stats: which keys an attention attends to, and how much, at any length.

    streamkl::attention_stats    the statistics of the bit mask `results`, in the order of Statistics

With the LSE of a row known, its probabilities are exact at first sight: one product and one exponential per pair of query
and key give every statistic, in memory that grows with the number of rows and keys, not with their product.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Collection, Iterator, NamedTuple, Sequence

import torch

from . import _library as lib
from ._attention_kl import expand_weight, sink_as_f32
from ._call import describe_while_tracing, execute, plan_for, specs_of
from ._checks import INPUTS, LENGTHS
from ._ops import Operator
from ._options import StatsOptions, check_flags, is_length, is_readable, is_whole, to_int32, translate, with_options
from ._problem import Problem
from ._tensors import check_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Statistics(NamedTuple):
    """Statistics of an attention; those that were not wanted are ``None``. All are f32, except ``top_keys``.

    Packed results have no batch dimension, except those of heads.
    """

    key_sum: torch.Tensor | None = None  #: ``[batch, heads, len_k]``: sum over rows of w P
    key_max: torch.Tensor | None = None  #: ``[batch, heads, len_k]``: largest P of a row
    lse: torch.Tensor | None = None  #: ``[batch, heads, len_q]``: log-sum-exp of the logits
    entropy: torch.Tensor | None = None  #: ``[batch, heads, len_q]``
    max_logit: torch.Tensor | None = None  #: ``[batch, heads, len_q]``: largest logit of the row
    expected_distance: torch.Tensor | None = None  #: ``[batch, heads, len_q]``: sum over keys of P distance
    head_max_logit: torch.Tensor | None = None  #: ``[batch, heads]``
    distance_mass: torch.Tensor | None = None  #: ``[batch, heads, distance_buckets]``: sum of w P by distance
    range_mass: torch.Tensor | None = None  #: ``[batch, heads, len_q, ranges]``: sum of P in each range of keys
    range_sum: torch.Tensor | None = None  #: ``[batch, heads, ranges]``: sum over rows of w range_mass
    top_keys: torch.Tensor | None = None  #: int32 ``[batch, heads, len_q, top_k]``; -1: the row sees fewer keys
    top_p: torch.Tensor | None = None  #: ``[batch, heads, len_q, top_k]``, largest first
    weights: torch.Tensor | None = None  #: ``[batch, heads, chosen rows, len_k]``: all P of the chosen rows

    @property
    def distance_share(self) -> torch.Tensor:
        """``distance_mass`` as shares of the attention to keys: the buckets of a head sum to 1."""
        if self.distance_mass is None:
            raise ValueError('distance_share: needs distance_mass in want, as in want=("distance_mass",)')
        return self.distance_mass / self.distance_mass.sum(-1, keepdim=True)


RESULTS = Statistics._fields
_OF_KEYS, _OF_ROWS = ("key_sum", "key_max"), ("lse", "entropy", "max_logit", "expected_distance")
_HEADS = ("q_t", "k_t", "q_s", "k_s")
_ARRAYS = (
    "head_max_logit", "distance_mass", "range_sum", "weights", "key_ranges", "chosen_rows", "sink_t", "sink_s", *LENGTHS
)  # fmt: skip


# ---- The operator ------------------------------------------------------------------------------------------------------


class _Stats(Operator):
    def unpack(self, arguments: tuple) -> tuple[dict[str, Any], dict[str, torch.Tensor | None], tuple]:
        """The arguments of its own, the inputs by name, and the options. The student stands for the teacher, too."""
        _, given, options = self.given(arguments)
        named = dict(zip(INPUTS, given))
        named.update(q_t=named["q_s"], k_t=named["k_s"], sink_t=named["sink_s"])
        return dict(zip(_OWN, arguments[3:])), named, options

    def run(self, *arguments, execute=execute):
        own, given, options = self.unpack(arguments)
        with _named_like_the_student():
            plan = plan_for(specs_of(**given), options)
        problem = plan.problem
        _check(given["q_s"], own, problem)
        made = _new_results(given["q_s"], own, problem)
        members = dict(
            made, row_weights=own["row_weight"], key_ranges=own["key_ranges"], chosen_rows=own["chosen_rows"]
        )
        tensors = {name: _readable(name, each) for name, each in (given | members).items() if each is not None}
        packed = {name: _member(name, each, problem) for name, each in tensors.items()}
        stats = lib.pack_stats(
            **{name: own[name] for name in ("row_begin", "row_end", "per_key_head", "distance_count", "top_k")},
            range_count=_count(own["key_ranges"], -2),
            chosen_count=_count(own["chosen_rows"], -1),
            **{name: member for name, member in packed.items() if name in members},
        )
        inputs = lib.pack_inputs(**{name: member for name, member in packed.items() if name in given})
        execute(plan, self.op, inputs, (stats,), given["q_s"].device)
        return list(made.values())

    def fake(self, *arguments):
        own, given, options = self.unpack(arguments)
        with _named_like_the_student():
            problem = describe_while_tracing(tuple(given[name] for name in INPUTS), options, False)
        _check(given["q_s"], own, problem)
        return list(_new_results(given["q_s"], own, problem).values())


@contextmanager
def _named_like_the_student() -> Iterator[None]:
    """Errors about the teacher are about the student, which stands for it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"\b(q|k|sink)_t\b", r"\1_s", str(error))) from None


def _check(q: torch.Tensor, own: dict[str, Any], problem: Problem) -> None:
    """Rules about the tensors of its own."""
    if not 0 <= own["results"] < 1 << len(RESULTS):
        raise ValueError(f"results={own['results']}: must be bits of {', '.join(RESULTS)}")
    expected = {
        "row_weight": (problem.row_shape(problem.heads_s), torch.float32),
        "key_ranges": ((problem.batch, _count(own["key_ranges"], -2), 2), torch.int32),
        "chosen_rows": ((problem.batch, _count(own["chosen_rows"], -1)), torch.int32),
    }
    for name, (shape, dtype) in expected.items():
        given = own[name]
        if given is not None and (given.shape != shape or given.dtype != dtype or given.device != q.device):
            raise ValueError(
                f"{name}: {given.dtype} {list(given.shape)} on {given.device} must be {dtype} {list(shape)} on {q.device}"
            )


_SCHEMA = (
    "Tensor? lse_s, Tensor? row_weight, Tensor? key_ranges, Tensor? chosen_rows, int results, int row_begin, int row_end, "
    "bool per_key_head, int distance_count, int top_k"
)
_OWN = re.findall(r"(\w+)(?:, |$)", _SCHEMA)
attention_stats_op = _Stats(
    "attention_stats", lib.ATTENTION_STATS, _SCHEMA, tensors="Tensor q_s, Tensor k_s, Tensor? sink_s"
)


def _count(array: torch.Tensor | None, dim: int) -> int:
    return 0 if array is None or array.dim() < -dim else array.shape[dim]


def _readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The library accepts any strides except in the last dimension of q and k. Arrays must be contiguous."""
    tensor = tensor.resolve_neg()
    if name in _ARRAYS or (name in _HEADS and tensor.stride(-1) != 1):
        return tensor.contiguous()
    return tensor


def _new_results(q: torch.Tensor, own: dict[str, Any], problem: Problem) -> dict[str, torch.Tensor]:
    """Empty results of the bit mask, by name."""
    heads, sequences = problem.heads_s, (problem.batch, problem.heads_s)
    rows = problem.row_shape(heads)
    key_heads = problem.key_heads_s if own["per_key_head"] else heads
    keys = (key_heads, problem.total_k) if problem.packed else (problem.batch, key_heads, problem.len_k)
    ranges, chosen = _count(own["key_ranges"], -2), _count(own["chosen_rows"], -1)
    shapes = {
        **dict.fromkeys(_OF_KEYS, keys),
        **dict.fromkeys(_OF_ROWS, rows),
        "head_max_logit": sequences,
        "distance_mass": (*sequences, own["distance_count"]),
        "range_mass": (*rows, ranges),
        "range_sum": (*sequences, ranges),
        "top_keys": (*rows, own["top_k"]),
        "top_p": (*rows, own["top_k"]),
        "weights": (*sequences, chosen, problem.len_k),
    }
    return {
        name: q.new_empty(shapes[name], dtype=torch.int32 if name == "top_keys" else torch.float32)
        for bit, name in enumerate(RESULTS)
        if own["results"] >> bit & 1
    }


def _member(name: str, tensor: torch.Tensor, problem: Problem) -> Any:
    """A tensor as a member of a C struct: its address, with strides unless it is an array."""
    if name in _ARRAYS:
        return tensor.data_ptr()
    batch, first, second = (0, *tensor.stride()[:2]) if problem.packed else tensor.stride()[:3]
    heads_first = problem.heads_first or name not in _HEADS
    return (tensor.data_ptr(), batch, first, second) if heads_first else (tensor.data_ptr(), batch, second, first)


# ---- The function ------------------------------------------------------------------------------------------------------


@with_options(StatsOptions)
@torch.no_grad()
def attention_stats(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    want: Sequence[str] = ("key_sum", "entropy"),
    key_ranges: Any = None,
    chosen_rows: Any = None,
    **options: Unpack[StatsOptions],
) -> Statistics:
    """Statistics of an attention, without its N x N matrix: which keys it attends to, how much, and how far away.

    P is the softmax of ``scale * <q, k>`` over the keys that a query sees. Memory is linear in the number of queries and
    keys; the time is that of one or two products of queries and keys. No gradient flows: the entropy as a loss is
    ``-streamkl.attention_kl(zeros, zeros, q, k, direction="reverse")`` up to a constant, see the guide.

    Example::

        stats = streamkl.attention_stats(q, k, causal=True, want=("key_sum", "entropy", "top_keys", "top_p"))
        heavy_hitters = stats.key_sum.topk(64).indices

    Args:
        q: queries ``[batch, len_q, heads, dim]``, packed ``[total_q, heads, dim]``, on a CPU or a GPU.
        k: keys ``[batch, len_k, key_heads, dim]``; ``heads`` is a multiple of ``key_heads``.
        lse: log-sum-exp (natural log, f32) of each row, ``[batch, heads, len_q]``, packed ``[heads, total_q]``, as flash
            attention returns it; it saves the pass that computes it, and includes the sink. It may cover more keys than
            the row sees here: P are then shares of all these keys, and sums over calls on parts of the keys add up.
        want: names of the fields of :class:`Statistics` to compute.
        key_ranges: for ``range_mass`` and ``range_sum``: pairs ``(begin, end)`` of keys of the sequence, ``[ranges, 2]``, or
            ``[batch, ranges, 2]`` for one list per sequence; at most 64.
        chosen_rows: for ``weights``: numbers of queries in their sequence, ``[rows]`` or ``[batch, rows]``; negative ones
            count from the end. The weights of a sequence without queries are 0.
        {options}

    Returns:
        :class:`Statistics` on the device of the tensors. A row that sees no key has ``lse`` and ``max_logit`` -inf,
        ``top_keys`` -1 and 0 elsewhere, and adds to no sum. A sink takes its share of a row and adds to its entropy; no
        other result contains it.

    Raises:
        ValueError: an argument does not fit; the message contains its name, its shape or value, and what is accepted.
    """
    results = _bits_of(want)
    check_tensors(
        "attention_stats", q=q, k=k, optional=dict(lse=lse, **{name: options.get(name) for name in _TENSOR_OPTIONS})
    )
    own: dict[str, Any] = {name: options.pop(name, default) for name, default in _OWN_OPTIONS.items()}  # type: ignore[misc]
    _check_own(own, results, lse)
    try:
        lengths, asked = translate(StatsOptions, 0, {**options})
        sink = sink_as_f32("sink", own["sink"])
        if torch.is_autocast_enabled(q.device.type):
            q, k = (each.to(torch.promote_types(q.dtype, k.dtype)) for each in (q, k))
        row_weight = own["row_weight"]
        if row_weight is not None:
            row_weight = expand_weight(row_weight, q, lengths, asked, "q")
        ranges, rows, sequences = None, None, _sequences(q, lengths)
        if sequences is not None and results & _OF_RANGES:
            ranges = _ranges_of(key_ranges, q.device, sequences)
        if sequences is not None and results & _OF_CHOSEN:
            rows = _rows_of(chosen_rows, q, lengths, asked, sequences)
        made = attention_stats_op(
            q,
            k,
            sink,
            lse,
            row_weight,
            ranges,
            rows,
            results,
            *own["row_range"],
            own["per_key_head"],
            own["distance_buckets"] if results & _bits_of(["distance_mass"]) else 0,
            own["top_k"] if results & _bits_of(["top_keys", "top_p"]) else 0,
            *lengths,
            *asked,
        )
    except ValueError as error:  # q and k are those of both models of a problem
        raise ValueError(
            re.sub(r"\b(q|k|lse|sink|dim|heads|key_heads|softcap|scale|dtype)_[st]\b", r"\1", str(error))
        ) from None
    return Statistics(**dict(zip([name for bit, name in enumerate(RESULTS) if results >> bit & 1], made)))


_OWN_OPTIONS: dict[str, Any] = dict(
    sink=None, row_weight=None, row_range=(0, 0), per_key_head=False, distance_buckets=24, top_k=8
)
_TENSOR_OPTIONS = ("sink", "row_weight")


def _bits_of(want: Sequence[str]) -> int:
    if isinstance(want, str) or not isinstance(want, Collection) or not all(name in RESULTS for name in want):
        raise ValueError(f"want={want!r}: must be a list or tuple of names of {', '.join(RESULTS)}")
    return sum(1 << RESULTS.index(name) for name in set(want))


_OF_RANGES, _OF_CHOSEN = _bits_of(("range_mass", "range_sum")), _bits_of(("weights",))


def check_request(want: Sequence[str], options: dict[str, Any]) -> None:
    """Raises ValueError for names and options that no attention accepts."""
    _check_own({**_OWN_OPTIONS, **options}, _bits_of(want), None)


def _check_own(own: dict[str, Any], results: int, lse: torch.Tensor | None) -> None:
    if lse is not None and results & _bits_of(["lse"]):
        raise ValueError('want: must not contain "lse" if lse is given')
    check_flags(per_key_head=own["per_key_head"])
    bounds = own["row_range"]
    if not (isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(map(is_length, bounds))):
        raise ValueError(
            f"row_range={bounds!r}: must be a pair (begin, end) of whole numbers up to 2^40; end 0 is the end"
        )
    for name in "distance_buckets", "top_k":
        if not is_whole(own[name]) or not 1 <= own[name] <= 64:
            raise ValueError(f"{name}={own[name]!r}: must be a whole number, 1 to 64")


def _sequences(q: torch.Tensor, lengths: Any) -> int | None:
    """The number of sequences; None: the checks of the operator report the shapes."""
    cu_seqlens = lengths.cu_seqlens_q
    if cu_seqlens is None:
        return q.shape[0] if q.dim() == 4 else None
    return cu_seqlens.numel() - 1 if cu_seqlens.dim() == 1 and cu_seqlens.numel() > 0 else None


def _as_integers(name: str, given: Any, device: torch.device) -> torch.Tensor:
    try:
        values = given if isinstance(given, torch.Tensor) else torch.tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}={given!r}: must be a list or a tensor of whole numbers") from None
    if values.numel() == 0 and not isinstance(given, torch.Tensor):
        values = values.int()  # an empty list has no type
    if values.dtype not in (torch.int32, torch.int64) or values.device != device:
        raise ValueError(f"{name}: {values.dtype} on {values.device} must be torch.int32 or torch.int64 on {device}")
    return to_int32(name, values)


def _ranges_of(given: Any, device: torch.device, sequences: int) -> torch.Tensor:
    """[sequences, ranges, 2]"""
    if given is None:
        raise ValueError("key_ranges=None: range_mass and range_sum need it, such as [(0, 4)] for the first 4 keys")
    ranges = _as_integers("key_ranges", given, device)
    if ranges.dim() not in (2, 3) or ranges.shape[-1] != 2 or (ranges.dim() == 3 and ranges.shape[0] != sequences):
        raise ValueError(f"key_ranges: shape {list(ranges.shape)} must be [ranges, 2] or [{sequences}, ranges, 2]")
    return ranges.expand(sequences, -1, -1).contiguous()


def _rows_of(given: Any, q: torch.Tensor, lengths: Any, asked: Any, sequences: int) -> torch.Tensor:
    """[sequences, rows], counted from the start of each sequence."""
    if given is None:
        raise ValueError("chosen_rows=None: weights need it, such as [-1] for the last query")
    rows = _as_integers("chosen_rows", given, q.device)
    if rows.dim() not in (1, 2) or (rows.dim() == 2 and rows.shape[0] != sequences):
        raise ValueError(f"chosen_rows: shape {list(rows.shape)} must be [rows] or [{sequences}, rows]")
    rows = rows.expand(sequences, -1)
    if lengths.cu_seqlens_q is not None:
        counts = lengths.cu_seqlens_q.diff().unsqueeze(-1)
    else:
        counts = rows.new_full((sequences, 1), q.shape[2 if asked.heads_first else 1])
    outside = (rows < -counts) | (rows >= counts)
    if is_readable(outside) and bool((wrong := outside & (counts > 0)).any()):
        sequence, place = wrong.nonzero()[0].tolist()
        count = int(counts[sequence])
        raise ValueError(
            f"chosen_rows[{sequence}, {place}]={int(rows[sequence, place])}: must be {-count}..{count - 1}, a row of the sequence"
        )
    return torch.where(outside, -1, torch.where(rows < 0, rows + counts, rows)).contiguous()  # -1: none
