"""Which teacher layer and head each student layer and head learns from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union

import torch

from .._options import Direction, is_whole
from ._layers import Layer

IntMap = Union[Mapping[int, int], Sequence[int]]
LayerName = Union[int, str]  # the number of an attention layer, or the name of its module
LayerMap = Union[
    Mapping[LayerName, Union[LayerName, Sequence[LayerName]]], Sequence[Union[LayerName, Sequence[LayerName]]]
]
HeadMap = Union[IntMap, Mapping[int, IntMap]]
AskedDirection = Union[Direction, Literal["auto"]]


class _ForEach(dict):
    """The map that a sequence stands for, which has an entry for each layer or head of the student."""


def layer_map_of(given: LayerMap | None) -> dict[LayerName, list[LayerName]] | None:
    """{student layer: teacher layers}, checked."""
    if given is None:
        return None
    pairs = _as_dict("layer_map", given)
    layers = type(pairs)((i, list(j) if isinstance(j, (list, tuple)) else [j]) for i, j in pairs.items())
    named = [*layers, *(j for many in layers.values() for j in many)]
    _check("layer_map", given, [each for each in named if not isinstance(each, str)])
    if not all(layers.values()):
        raise ValueError(f"layer_map={given!r}: a student layer must have at least one teacher layer")
    return layers


def head_map_of(given: HeadMap | None) -> dict[int | None, dict[int, int]] | None:
    """{student layer: {student head: teacher head}}, checked; the key None holds for all layers."""
    if given is None:
        return None
    pairs = _as_dict("head_map", given)
    if any(isinstance(value, (Mapping, list, tuple)) for value in pairs.values()):
        _check("head_map", given, list(pairs))
        return {i: _head_pairs(given, heads) for i, heads in pairs.items()}
    return {None: _head_pairs(given, given)}


def _head_pairs(given, heads) -> dict[int, int]:
    pairs = _as_dict("head_map", heads)
    _check("head_map", given, [*pairs, *pairs.values()])
    return pairs


def _as_dict(name: str, given) -> dict[Any, Any]:
    if not isinstance(given, (Mapping, Sequence)) or isinstance(given, (str, bytes)):
        raise ValueError(f"{name}={given!r}: must be a mapping {{student: teacher}} or a sequence of teachers")
    pairs = dict(given) if isinstance(given, Mapping) else _ForEach(enumerate(given))
    if not pairs:
        raise ValueError(f"{name}={given!r}: must contain at least one pair")
    return pairs


def _check(name: str, given, indices: list) -> None:
    if not all(is_whole(index) for index in indices):
        raise ValueError(f"{name}={given!r}: must contain whole numbers")
    if any(index < 0 for index in indices):
        raise ValueError(f"{name}={given!r}: must contain numbers from 0 on")


def check_against_configs(layers, heads, teacher, student, tower: str | None = None, attention: str = "self") -> None:
    """Refuses indices that the models do not have, before anything runs, where their configs tell."""
    has_one_stack = not any(model.config.is_encoder_decoder for model in (teacher, student))
    if layers is not None and has_one_stack and (counts := _counts("num_hidden_layers", teacher, student, tower)):
        for i, many in layers.items():
            for j in many:
                _check_pair(i, j, *(range(count) for count in counts))
    if counts := _counts("num_attention_heads", teacher, student, tower, attention):
        for heads_of_layer in (heads or {}).values():
            check_heads(heads_of_layer, *counts, "every layer")


def direction_of(
    asked: str, pairs_heads: bool, teacher, student, tower: str | None = None, attention: str = "self"
) -> Direction:
    """What "auto" stands for. The reverse KL to the mean of several heads would choose one of them.

    `pairs_heads`: a head map of all layers, or relations of new heads.
    """
    is_reverse = asked == "reverse"
    if asked == "auto":
        counts = _counts("num_attention_heads", teacher, student, tower, attention)
        is_reverse = pairs_heads or (counts is not None and counts[0] == counts[1])
    return "reverse" if is_reverse else "forward"


def _counts(name: str, teacher, student, tower: str | None = None, attention: str = "self") -> tuple[int, int] | None:
    """A number of both configs; None if one does not have it."""
    a, b = (getattr(_config(model, tower, attention), name, None) for model in (teacher, student))
    return (int(a), int(b)) if is_whole(a) and is_whole(b) else None  # type: ignore[arg-type]


def _config(model, tower: str | None, attention: str):
    """The config of a tower: a model that sees has `vision_config`, one that only sees has no other."""
    part = dict(encoder=True) if attention == "encoder" else dict(decoder=True)
    return getattr(model.config, f"{tower}_config", None) or model.config.get_text_config(**part)


def _check_pair(i: LayerName, j: LayerName, layers_t: Sequence, layers_s: Sequence) -> None:
    if (isinstance(i, int) and i >= len(layers_s)) or (isinstance(j, int) and j >= len(layers_t)):
        raise ValueError(
            f"layer_map[{i}]={j}: the student has layers 0..{len(layers_s) - 1}, the teacher 0..{len(layers_t) - 1}"
        )


def check_layers(name: str, given: Iterable[Any], compared: Iterable[int], count: int) -> None:
    """Layers that have something of their own must be compared: nothing else would tell."""
    for i in given:
        if not is_whole(i) or not 0 <= i < count:
            raise ValueError(f"{name}: {i!r} is no layer of the student: must be a number, 0..{count - 1}")
        if i not in compared:
            raise ValueError(f"{name}: student layer {i} is not compared: it is not in layer_map")


def numbered_layers(
    named: dict[LayerName, list[LayerName]], teacher: list[Layer], student: list[Layer]
) -> dict[int, list[int]]:
    """The map with numbers in place of names."""
    for i, many in named.items():
        for j in many:
            _check_pair(i, j, teacher, student)
    _check_length("layer_map", named, len(student), "layers")
    numbers = [_number(i, student, "student") for i in named]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"layer_map={named!r}: names a student layer twice: one entry may have a list of teacher layers")
    return {i: [_number(j, teacher, "teacher") for j in many] for i, many in zip(numbers, named.values())}


def _number(given: LayerName, layers: list[Layer], role: str) -> int:
    """The attention layer of a number, or the one in the module of a name."""
    if not isinstance(given, str):
        return given
    found = [i for i, layer in enumerate(layers) if f"{layer.name}.".startswith(f"{given}.")]
    if len(found) != 1:
        names = ", ".join(layer.name for layer in layers)
        raise ValueError(
            f"layer_map: {given!r} contains {len(found)} attention layers of the {role}, must be 1; they are: {names}"
        )
    return found[0]


def check_heads(heads: dict[int, int], count_t: int, count_s: int, where: str) -> None:
    for role, chosen, count in ("student", list(heads), count_s), ("teacher", list(heads.values()), count_t):
        if not all(0 <= head < count for head in chosen):
            raise ValueError(f"head_map: {role} heads {chosen} must be 0..{count - 1} at {where}")
    _check_length("head_map", heads, count_s, "heads")


def _check_length(name: str, pairs: dict, count: int, parts: str) -> None:
    if isinstance(pairs, _ForEach) and len(pairs) != count:
        raise ValueError(
            f"{name}: a sequence of {len(pairs)} for {count} student {parts}: must have one entry for each; "
            "a mapping {student: teacher} may leave some out"
        )


def nearest_layer(layers: Iterable[int], i: int, count_s: int, count_t: int) -> int:
    """The one of some teacher layers that is nearest to student layer i in an even spread, which ends at the last layer."""
    even = (i + 1) * count_t / count_s - 1
    return min(layers, key=lambda j: abs(j - even))  # the first of two that are as near


def default_layers(teacher: list[Layer], student: list[Layer]) -> dict[int, list[int]]:
    """Evenly spread: the nearest layer of the same reach, or else one that also is or is not local."""

    def of(i: int) -> int:
        reach, is_local = student[i].reach, student[i].is_local
        same = [j for j, layer in enumerate(teacher) if layer.reach == reach]
        alike = [j for j, layer in enumerate(teacher) if layer.is_local == is_local]
        return nearest_layer(same or alike or range(len(teacher)), i, len(student), len(teacher))

    return {i: [of(i)] for i in range(len(student))}


def select_heads(heads: list[int], q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor | None):
    """The given heads and the key head of each."""
    group = q.shape[1] // k.shape[1]
    index = torch.tensor(heads, device=q.device)
    return q[:, index], k[:, index // group], None if lse is None else lse[:, index]
