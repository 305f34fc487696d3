"""The options of the public functions, declared once: name, type, default and documentation.

From a declaration follow the signature and the docstring of every function that takes the option, the rule that checks its
value, and the field of `Problem` that carries it to the schemas of the operators and to the C struct. A new option is one
line and one paragraph here, and one field of `Problem`.
"""

from __future__ import annotations

import inspect
import numbers
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import (
    Annotated,
    Any,
    Callable,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import torch

from ._problem import (
    FLOAT_OPTIONS,
    KL_FORWARD,
    KL_REVERSE,
    LINK_LINEAR,
    LINK_SOFTMAX,
    POOL_BLOCKS,
    POOL_HEADS,
    POOLS,
    Options,
)
from ._tensors import check_strided

Direction = Literal["forward", "reverse"]
Reduction = Literal["mean", "sum", "none"]
Layout = Literal["bnhd", "bhnd"]
Link = Literal["softmax", "linear"]
Pool = tuple[Literal["max", "sum"], int] | None
PoolHeads = Literal["mean", "max"]
PoolBlocks = Literal["complete", "earlier", "visible"]
ShardLayout = Literal["zigzag", "contiguous"]
Comm = Literal["allgather", "ring"]
Gradients = Literal["sum", "mean"]

# ---- Process groups --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parallel:
    """The process groups over which a call is split. A group is a ProcessGroup, or a DeviceMesh of one dimension.

    Attributes:
        context_group: context parallelism: its ranks hold equal shards of the queries and keys of every sequence, each its own
            ``q``, ``k``, ``row_weight`` and LSEs. ``cu_seqlens`` are those of the shard; masks, ``key_lengths`` and
            ``indices`` count in the whole sequence. The loss is that of the whole batch on every rank, and gradients are
            those of the rank's shards. Every rank must also run the backward, with the same upstream gradient.
        layout: how sequences are cut. ``"zigzag"``: into 2 W chunks, and rank r of W holds chunks r and 2 W - 1 - r, in this
            order; ``"contiguous"``: rank r holds the r-th of W chunks. Default: zigzag; a distiller takes that of torch's
            ``context_parallel`` region.
        comm: ``"allgather"``: ranks gather all keys, in slices of heads; ``"ring"``: key shards visit every rank.
        gradients: how you reduce the gradients of weights over ``context_group``: ``"sum"``, or ``"mean"`` as DDP and FSDP do,
            which multiplies all gradients by the size of the group. Default: sum; of a distiller mean.
        tensor_group: tensor parallelism over teacher heads: all ranks hold the same student and equally many of the teacher
            heads of every student head. The loss is the mean of the ranks' KLs, each to the mean of its own teacher heads;
            its gradients are those of the KL to the mean of all. Needs ``direction="forward"`` and a detached teacher.
        loss_group: ranks that hold other heads, or other batches, of the same call; or a list of such groups. Only the loss is
            reduced over them: sums and row counts, so that ranks with more rows count more.
    """

    context_group: Any = None
    layout: ShardLayout | None = None
    comm: Comm = "allgather"
    gradients: Gradients | None = None
    tensor_group: Any = None
    loss_group: Any = None

    def __post_init__(self) -> None:
        for name, choices in ("layout", ShardLayout), ("comm", Comm), ("gradients", Gradients):
            value = getattr(self, name)
            if value not in get_args(choices) and not (value is None and name != "comm"):
                raise ValueError(f"parallel.{name}={value!r}: must be {' or '.join(map(repr, get_args(choices)))}")


# ---- Declarations: Annotated[type, default] --------------------------------------------------------------------------


class _Masks(TypedDict, total=False):
    """
    causal: a query attends to no later key. The last query is aligned with the last key (bottom-right).
    window_size: ``(left, right)``: a query attends to at most ``left`` keys before it and ``right`` keys after it; -1: no limit.
    cu_seqlens_q: ``[sequences + 1]`` int32 or int64, for packed sequences in tensors ``[total_q, heads, dim]``: sequence b
        has rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``. Each call converts int64 to int32. The CPU refuses lengths
        outside of the tensors; a GPU limits them to the tensors, because a check would need a host-device synchronization.
    cu_seqlens_k: offsets of the keys, in the format of ``cu_seqlens_q``.
    key_lengths: ``[batch]`` int32 or int64, converted like ``cu_seqlens_q``: keys from ``key_lengths[b]`` on are padding.
        Padding does not move positions.
    layout: ``"bnhd"``, as above, or ``"bhnd"``: ``[batch, heads, length, dim]``, packed ``[heads, total, dim]``.
    """

    causal: Annotated[bool, False]
    window_size: Annotated[tuple[int, int], (-1, -1)]
    cu_seqlens_q: Annotated[torch.Tensor | None, None]
    cu_seqlens_k: Annotated[torch.Tensor | None, None]
    key_lengths: Annotated[torch.Tensor | None, None]
    layout: Annotated[Layout, "bnhd"]


class _Model(_Masks, total=False):
    """
    softmax_scale_t: factor of the teacher's dot products; default ``1 / sqrt(dim_t)``.
    softcap_t: caps the teacher's logits: ``softcap * tanh(logit / softcap)``; 0: no cap.
    direction: ``"forward"``: KL(P || S); ``"reverse"``: KL(S || P).
    """

    softmax_scale_t: Annotated[float | None, None]
    softcap_t: Annotated[float, 0.0]
    direction: Annotated[Direction, "forward"]


class MapOptions(_Model, total=False):
    """
    softmax_scale_s: factor of the student's dot products; default ``1 / sqrt(dim_s)``.
    softcap_s: caps the student's logits; 0: no cap.
    """

    softmax_scale_s: Annotated[float | None, None]
    softcap_s: Annotated[float, 0.0]


class _Bounds(_Masks, total=False):
    """
    max_seqlen_q: length of the longest sequence, or an upper bound. A tight bound saves time on a GPU. Default: ``total_q``.
    max_seqlen_k: bound of the keys of a sequence. Default: ``total_k``.
    key_begin: row bounds, ``[batch, len_q]``, packed ``[total_q]``, int32 or int64: a query attends to no key before
        ``key_begin``, counted from the start of its own sequence. Row bounds come on top of all other masks. They must
        not decrease within a sequence; a row may be empty. One call serves what is not a single causal mask: a zigzag
        shard of a context-parallel sequence, chunked attention, compressed keys, a sample of the rows. The CPU refuses
        invalid bounds; a GPU limits them to the keys, and where they decrease results are undefined.
    key_end: a query attends to the keys before ``key_end``. Default of both: no bound.
    """

    max_seqlen_q: Annotated[int | None, None]
    max_seqlen_k: Annotated[int | None, None]
    key_begin: Annotated[torch.Tensor | None, None]
    key_end: Annotated[torch.Tensor | None, None]


class StatsOptions(_Bounds, total=False):
    """
    softmax_scale: factor of the dot products; default ``1 / sqrt(dim)``.
    softcap: caps the logits: ``softcap * tanh(logit / softcap)``; 0: no cap.
    sink: attention sinks, ``[heads]``: the softmax of a head has one more outcome with this logit (natural log, neither
        scaled nor capped), which belongs to no key.
    row_weight: weight w of each row in sums over rows, ``[batch, len_q]`` or ``[batch, heads, len_q]``, packed ``[total_q]``
        or ``[heads, total_q]``. Rows of weight 0 take part in no sum and no maximum. Default: 1.
    row_range: ``(begin, end)``: the rows of each sequence that take part in sums and maxima over rows. Negative numbers
        count from the end, and an end of 0 is the end: ``(-64, 0)`` are the last 64 queries.
    per_key_head: ``key_sum`` and ``key_max`` have one row per key head, over the query heads that share it.
    distance_buckets: buckets of ``distance_mass``, 1 to 64: bucket 0 has distance 0, bucket n has distances from 2^(n-1) to
        2^n - 1, and the last one has no end.
    top_k: keys per row in ``top_keys`` and ``top_p``, 1 to 64.
    """

    softmax_scale: Annotated[float | None, None]
    softcap: Annotated[float, 0.0]
    sink: Annotated[torch.Tensor | None, None]
    row_weight: Annotated[torch.Tensor | None, None]
    row_range: Annotated[tuple[int, int], (0, 0)]
    per_key_head: Annotated[bool, False]
    distance_buckets: Annotated[int | None, 24]
    top_k: Annotated[int | None, 8]


class _Rows(_Model, _Bounds, total=False):
    """
    row_weight: weight of each row, finite also in a row that attends to no key, ``[batch, len_q]`` or
        ``[batch, heads_s, len_q]``, packed ``[total_q]`` or ``[heads_s, total_q]``. A row of weight 0 adds nothing to the
        loss, even if it contains NaN; on a GPU such a NaN still reaches the gradients.
    deterministic: gradients have the same bits on every run. ``torch.use_deterministic_algorithms(True)`` does the same.
        Only Hopper GPUs are faster without it, for heads of up to 128 dimensions.
    """

    row_weight: Annotated[torch.Tensor | None, None]
    lse_t: Annotated[torch.Tensor | None, None]
    deterministic: Annotated[bool, False]


class CarriedOptions(_Rows, total=False):
    """
    lse_t: the teacher's log-sum-exp of each row, ``[batch, heads_t, len_q]``, packed ``[heads_t, total_q]``, over the visible
        keys. Default: the backward computes it, in a separate pass.
    deterministic: gradients have the same bits on every run. On a GPU the attention's own backward is then torch's: flash
        attention or, with f32, row bounds or softcaps, stored matrices.
    softmax_scale: factor of the student's dot products; default ``1 / sqrt(dim)``.
    softcap: caps the student's logits; 0: no cap.
    reduction: ``"mean"``: weighted mean over the rows that attend to at least one key; ``"sum"``.
    """

    softmax_scale: Annotated[float | None, None]
    softcap: Annotated[float, 0.0]
    reduction: Annotated[Literal["mean", "sum"], "mean"]


class _Loss(_Rows, total=False):
    """
    pool: ``("max", block)`` or ``("sum", block)``: the teacher is pooled over blocks of this many keys, and the student has one
        key per block: ``k_s`` has ``len_k / block`` rows, rounded as ``pool_blocks`` says, and ``indices`` are blocks. The
        target of a row is M_b / sum_b M_b with M_b the largest P_j of block b, or their sum. Not for packed
        sequences. The student of ``attention_kl`` then has no softcap, no sink, no linear link and no ``lse_s``.
    pool_heads: how ``pool`` combines the teacher heads of a group before: ``"mean"``, P_j = mean_h P_hj, or ``"max"``.
    pool_blocks: the blocks of a row with ``pool``: ``"complete"``: those whose keys it all attends to (Qwen QSA);
        ``"earlier"``: the same without the block of its last key (SeerAttention-R); ``"visible"``: those whose first key it
        attends to, so that the last one may be incomplete. ``k_s`` is rounded down with ``"complete"``, else up.
    reduction: ``"mean"``: weighted mean over the rows that attend to at least one key; ``"sum"``; ``"none"``.
    parallel: process groups, if the call is split over ranks: see :class:`streamkl.Parallel`.
    """

    softmax_scale_s: Annotated[float | None, None]
    pool: Annotated[Pool, None]
    pool_heads: Annotated[PoolHeads, "mean"]
    pool_blocks: Annotated[PoolBlocks, "complete"]
    reduction: Annotated[Reduction, "mean"]
    check_lse: Annotated[bool, False]
    parallel: Annotated[Parallel | None, None]


class AttentionOptions(_Loss, total=False):
    """
    softmax_scale_s: factor of the student's dot products; default ``1 / sqrt(dim_s)``.
    softcap_s: caps the student's logits; 0: no cap.
    lse_t: the teacher's log-sum-exp (natural log, f32) of each row, ``[batch, heads_t, len_q]``, packed
        ``[heads_t, total_q]``, as flash attention returns it. With both LSEs and a scalar reduction, the forward computes
        loss and gradients in one pass, which is two thirds of the work; both must then cover exactly the visible keys, and
        be infinite in a row that attends to none. The backward multiplies the gradients by the upstream gradient; those of
        f16 tensors are f32 until then. ``lse_t`` alone saves a pass if ``heads_t > heads_s``, and may cover more keys: P is
        then the conditional distribution on the visible keys.
    lse_s: the student's log-sum-exp, ``[batch, heads_s, len_q]``.
    check_lse: compute ``lse_t`` and ``lse_s`` again for some rows, and raise an error if one differs, or if ``lse_t`` without
        ``lse_s`` is smaller. Wrong LSEs silently give a wrong loss. Waits for the GPU. Off under ``torch.compile`` and with
        ``parallel.context_group``. The environment variable ``STREAMKL_CHECK_LSE=1`` does the same.
    sink_t: attention sinks of the teacher, ``[heads_t]``: the softmax of a head has one more outcome with this logit (natural
        log, neither scaled nor capped), which belongs to no key. A sink is an outcome of both distributions, so both or
        none must be given. All LSEs include it. A row that attends to no key has no sink.
    sink_s: attention sinks of the student, ``[heads_s]``. Gradients flow to both. With ``heads_t > heads_s`` sinks need
        ``direction="forward"`` and a teacher without gradients.
    link_s: ``"softmax"``, or ``"linear"`` for a student with linear attention (Hedgehog, LoLCATs): S is a / sum a with
        a = <q_s, k_s>, and q_s and k_s are its feature maps. There is no scale and no softcap, lse_s is log sum a, and only
        ``direction="forward"`` is possible. No a may be negative, and not all of a row may be 0: that row is NaN. A key with
        a = 0 to which the teacher attends makes the KL infinite.
    """

    softcap_s: Annotated[float, 0.0]
    lse_s: Annotated[torch.Tensor | None, None]
    sink_t: Annotated[torch.Tensor | None, None]
    sink_s: Annotated[torch.Tensor | None, None]
    link_s: Annotated[Link, "softmax"]


class IndexerOptions(_Loss, total=False):
    """
    softmax_scale_s: factor of the indexer's weighted sum; default ``1 / sqrt(dim_s * G)``.
    relu: ``False``: the sum over index heads takes their dot products without a ReLU.
    lse_t: the teacher's log-sum-exp (natural log, f32) of each row over exactly the keys that it attends to,
        ``[batch, heads_t, len_q]``, packed ``[heads_t, total_q]``, as the teacher's attention returns it. The teacher's
        logits are then computed once instead of twice. Default: computed. With ``pool`` it may cover more keys; the default
        covers all visible keys, or those of the blocks in ``indices``.
    lse_t_wider: ``lse_t`` covers more keys than the row attends to: the whole sequence in addition to ``indices``, sinks,
        other branches. The teacher is then its conditional distribution on the visible keys. Unless ``lse_t_visible`` is
        given, that costs one more pass over its logits.
    lse_t_visible: with ``lse_t_wider``: the log-sum-exp over exactly the keys that the row attends to, as the sparse attention
        returns it. Shape and type are those of ``lse_t``.
    row_weight: as in :func:`streamkl.attention_kl`, or ``"mass"``, with ``lse_t_wider``: the weight of a row is the share of
        the attention that its visible keys hold, ``rows.mass``.
    check_lse: compute ``lse_t`` and ``lse_t_visible`` again for some rows, and raise an error if one differs, or with
        ``lse_t_wider`` or ``pool`` if ``lse_t`` is smaller. Wrong LSEs silently give a wrong loss. Waits for the GPU. Off
        under ``torch.compile`` and with ``parallel.context_group``. The environment variable ``STREAMKL_CHECK_LSE=1`` does
        the same.
    parallel: process groups, if the call is split over ranks: see :class:`streamkl.Parallel`. With ``tensor_group``,
        ``rows.cross_entropy`` is that of the mean of all teacher heads; ``kl`` and ``entropy`` are means over ranks.
    """

    relu: Annotated[bool, True]
    lse_t_wider: Annotated[bool, False]
    lse_t_visible: Annotated[torch.Tensor | None, None]
    row_weight: Annotated[torch.Tensor | Literal["mass"] | None, None]  # type: ignore[misc]


_BASES: dict[Any, tuple] = {
    MapOptions: (_Masks, _Model), StatsOptions: (_Masks, _Bounds),
    CarriedOptions: (_Masks, _Model, _Bounds, _Rows), AttentionOptions: (_Masks, _Model, _Bounds, _Rows, _Loss),
    IndexerOptions: (_Masks, _Model, _Bounds, _Rows, _Loss),
}  # fmt: skip


def _declared(options: Any) -> dict[str, tuple[Any, Any]]:
    """{name: (type, default)}"""
    hints = get_type_hints(options, include_extras=True)
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}


DECLARED = {options: _declared(options) for options in _BASES}


def defaults_of(options: Any) -> dict[str, Any]:
    return {name: default for name, (_, default) in DECLARED[options].items()}


def texts_of(options: Any) -> dict[str, str]:
    """{name: documentation}, without the indentation of the class. A class overrides its bases."""
    found: dict[str, str] = {}
    for declaration in (*_BASES[options], options):
        paragraphs = re.findall(
            r"^(\w+): (.*?)(?=^\w+: |\Z)", inspect.cleandoc(declaration.__doc__ or ""), re.DOTALL | re.MULTILINE
        )
        found.update({name: text.strip() for name, text in paragraphs})
    return found


_FUNCTIONS: dict[Any, str] = {}  # {declaration: its function}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_options(options: Any) -> Callable[[_Function], _Function]:
    """Gives a function that takes **options their signature, and their documentation in place of {options}."""

    def decorate(function: _Function) -> _Function:
        own = inspect.signature(function).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        tensors = [each for each in own if each.kind not in (keyword, inspect.Parameter.VAR_KEYWORD)]
        others = [each for each in own if each.kind == keyword and each.name not in DECLARED[options]]
        required = [each for each in others if each.default is each.empty]
        declared = [
            inspect.Parameter(name, keyword, default=default, annotation=hint)
            for name, (hint, default) in DECLARED[options].items()
        ]
        signature = inspect.signature(function).replace(
            parameters=[*tensors, *required, *declared, *(each for each in others if each not in required)]
        )
        text = "\n".join(f"{name}: {text}" for name, text in texts_of(options).items())
        function.__signature__ = signature  # type: ignore[attr-defined]
        _FUNCTIONS[options] = function.__name__
        function.__doc__ = (function.__doc__ or "").replace("{options}", text.replace("\n", "\n        "))
        return function

    return decorate


# ---- Rules: one for each type --------------------------------------------------------------------------------------------
#
# Python and torch convert silently: True is 1, a tensor is its value (a host-device synchronization on a GPU, without a
# gradient). The rules refuse such values. A compiler's symbols are numbers.


def is_whole(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)


_LONGEST = 1 << 40  # the library's limit; far larger numbers would wrap in its integers


def is_length(value: Any) -> bool:
    """Negative numbers included: some options give them a meaning."""
    return is_whole(value) and (isinstance(value, torch.SymInt) or abs(value) <= _LONGEST)


def check_number(name: str, value: Any) -> None:
    numeric: Any = (float, int, torch.SymFloat, torch.SymInt, numbers.Real)
    if not isinstance(value, numeric) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be a number")
    if isinstance(value, int) and abs(value) >= 1 << 128:
        raise ValueError(f"{name}={value!r}: must be finite in float32")


def _is_zero_in_f32(name: str, value: Any) -> bool:
    """Half the smallest f32, 2^-149, is rounded to 0."""
    check_number(name, value)
    return abs(value) <= 2.0**-150


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        _check_flag(name, flag)


def _check_pair(name: str, value: Any) -> None:
    if not (isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_length, value))):
        raise ValueError(
            f"{name}={value!r}: must be a pair (left, right) of whole numbers up to 2^40, -1 for no limit"
        )


def _check_pool(name: str, value: Any) -> None:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if value is not None and not (is_pair and value[0] in POOLS[1:] and is_length(value[1]) and value[1] > 0):
        raise ValueError(
            f"{name}={value!r}: must be None, ('max', block) or ('sum', block), with 1 to 2^40 keys per block"
        )


def _check_scale(name: str, value: Any) -> None:
    if value is not None and _is_zero_in_f32(name, value):
        raise ValueError(f"{name}={value!r}: must not be 0 in float32")


def _check_softcap(name: str, value: Any) -> None:
    if _is_zero_in_f32(name, value) and value != 0:
        raise ValueError(f"{name}={value!r}: must not be 0 in float32; 0: no cap")


def _check_length(name: str, value: Any) -> None:
    if value is not None and (not is_length(value) or value < 0):
        raise ValueError(f"{name}={value!r}: must be None or a whole number, at least 0 and at most 2^40")


def check_choice(name: str, value: Any, choices: tuple) -> None:
    if value not in choices:
        accepted = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        raise ValueError(f"{name}={value!r}: must be {accepted}")


_RULES = {
    bool: _check_flag, tuple[int, int]: _check_pair, float | None: _check_scale, float: _check_softcap, int | None: _check_length,
    Pool: _check_pool,
}  # fmt: skip


def _rule_of(hint: Any) -> Callable[[str, Any], None]:
    if get_origin(hint) is Literal:
        return lambda name, value: check_choice(name, value, get_args(hint))
    return _RULES[hint]


# Types that Lengths.of, the operators and Groups check.
_CHECKED_LATER = (torch.Tensor | None, torch.Tensor | Literal["mass"] | None, Parallel | None)
RULES = {
    options: {name: _rule_of(hint) for name, (hint, _) in declared.items() if hint not in _CHECKED_LATER}
    for options, declared in DECLARED.items()
}

# ---- Translation -----------------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """Length arrays of a call: int32, contiguous."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    key_begin: torch.Tensor | None = None
    key_end: torch.Tensor | None = None


def _as_float(value: Any) -> Any:
    """A whole number of any size; a compiler's symbols stay."""
    return float(value) if isinstance(value, int) else value


# Options whose values reach the operators in another form; the others are fields of Problem by the same name and value.
_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "window_size": lambda window: dict(window_left=window[0], window_right=window[1]),
    "softmax_scale_t": lambda scale: dict(scale_t=_as_float(scale)),
    "softmax_scale_s": lambda scale: dict(scale_s=_as_float(scale)),
    "softmax_scale": lambda scale: dict(scale_s=_as_float(scale)),
    "softcap_t": lambda softcap: dict(softcap_t=_as_float(softcap)),
    "softcap_s": lambda softcap: dict(softcap_s=_as_float(softcap)),
    "softcap": lambda softcap: dict(softcap_s=_as_float(softcap)),
    "direction": lambda direction: dict(direction=KL_REVERSE if direction == "reverse" else KL_FORWARD),
    "layout": lambda layout: dict(heads_first=layout == "bhnd"),
    "relu": lambda relu: dict(index_linear=not relu),
    "link_s": lambda link: dict(link_s=LINK_LINEAR if link == "linear" else LINK_SOFTMAX),
    "pool": lambda pool: dict(pool=POOLS.index(pool[0]), pool_size=pool[1]),
    "pool_heads": lambda heads: dict(pool_heads=POOL_HEADS.index(heads)),
    "pool_blocks": lambda blocks: dict(pool_blocks=POOL_BLOCKS.index(blocks)),
    "reduction": lambda _: {},
    "check_lse": lambda _: {},
    "lse_t_wider": lambda _: {},
}


def translate(declared: Any, gradients: int, options: dict[str, Any]) -> tuple[Lengths, Any]:
    """Length arrays and options as the operators take them. Checks the rules that the library cannot check."""
    lengths, names = _NO_LENGTHS, _LENGTH_NAMES[declared]
    if not names.isdisjoint(options):
        lengths = Lengths(*[as_int32(name, options.get(name)) for name in Lengths._fields])
        options = {name: value for name, value in options.items() if name not in names}
    for name, check in ("window_size", _check_pair), ("pool", _check_pool):
        if name in options:  # checked before the cache, which does not compare types inside a tuple
            check(name, options[name])
    fixed = declared, gradients, torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_compiling():
        return lengths, _options.__wrapped__(*fixed, **options)
    try:
        return lengths, _options(*fixed, **options)
    except TypeError:  # a value without a hash, or an option that does not exist
        return lengths, _options.__wrapped__(*fixed, **options)


@lru_cache(maxsize=1024, typed=True)  # typed: 1 is no flag, although it equals True
def _options(declared: Any, gradients: int, all_deterministic: bool, **given: Any) -> Any:
    # A compiler would make symbols of the floats among the defaults of Options: they are literals here.
    fields: dict[str, Any] = {"gradients": gradients, **dict.fromkeys(FLOAT_OPTIONS, 0.0)}
    for name, value in given.items():
        if name not in RULES[declared]:
            raise TypeError(f"{_FUNCTIONS[declared]}() got an unexpected keyword argument {name!r}")
        RULES[declared][name](name, value)
        if value is not None:
            fields.update(_FIELDS[name](value) if name in _FIELDS else {name: value})
    if all_deterministic:
        fields["deterministic"] = True
    return Options(**fields)


_NO_LENGTHS = Lengths()
_LENGTH_NAMES = {options: frozenset(Lengths._fields) & declared.keys() for options, declared in DECLARED.items()}
_INT32 = torch.iinfo(torch.int32)


def as_int32(name: str, lengths: torch.Tensor | None) -> torch.Tensor | None:
    if lengths is None:
        return None
    is_tensor = isinstance(lengths, torch.Tensor)
    if not is_tensor or lengths.dtype not in (torch.int32, torch.int64):
        given = f"dtype {lengths.dtype}" if is_tensor else type(lengths).__name__
        raise ValueError(f"{name}: {given} must be {'' if is_tensor else 'a tensor of '}torch.int32 or torch.int64")
    check_strided(name, lengths)
    return to_int32(name, lengths).contiguous()


def is_readable(values: torch.Tensor) -> bool:
    """Whether reading a value neither synchronizes with a GPU nor breaks the graph of compiled code."""
    return values.device.type == "cpu" and type(values) is torch.Tensor and not torch.compiler.is_compiling()


def to_int32(name: str, values: torch.Tensor) -> torch.Tensor:
    """Converts int64. Raises ValueError for a value out of range, where a plain conversion would wrap.

    A value that is not readable becomes the nearest int32.
    """
    if values.dtype != torch.int64:
        return values
    clamped = values.clamp(_INT32.min, _INT32.max)
    if is_readable(values) and not torch.equal(clamped, values):
        first = (clamped != values).nonzero()[0].tolist()
        raise ValueError(f"{name}{first}={values[tuple(first)]}: must be {_INT32.min}..{_INT32.max}, an int32")
    return clamped.to(torch.int32)
