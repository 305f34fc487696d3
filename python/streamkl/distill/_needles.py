"""Retrieval: does the student's attention find what the teacher's finds, at every depth and length?

A needle is a key and a value: tokens that are rare in a held-out text. It is put at some depth of the text, which
ends with the key and the beginning of the value. Each of the last rows has to continue the value, so a retrieval
head puts its largest probability somewhere in the needle. Only these rows are computed: nothing grows with the
square of the length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..hf._pairs import RowCache
from ._data import Sequences

KEY, VALUE = 8, 4  # tokens
DEPTHS = 8
RETRIEVES = 0.5  # a head retrieves if the teacher finds this share of all needles with it
_TOKENS_PER_BATCH = 8192
_MISSES = 32  # of a length, in the results
_COUNTED = ("teacher", "student", "both")


def needle_batches(
    held_out: Sequences, length: int, count: int, seed: int
) -> list[tuple[torch.Tensor, list[int], list[int]]]:
    """Batches of (ids [needles, length], their depths 0..DEPTHS-1, the places of their needles)."""
    rng = np.random.default_rng([seed, length])
    size = KEY + VALUE
    first, end = (
        len(held_out.prefix),
        length - len(held_out.suffix) - size,
    )  # a text ends with all but the value's last token
    room = end - first - size
    if room < DEPTHS:
        return []
    known = np.unique(held_out.tokens)
    rows, depths, places = [], [], []
    for depth in range(DEPTHS):
        for number in range(count):
            ids = held_out.batch([int(rng.integers(len(held_out)))])[0][:length].clone()
            if held_out.suffix:
                ids[length - len(held_out.suffix) :] = torch.tensor(held_out.suffix)
            needle = _rare_tokens(known, ids.numpy(), size, rng)
            place = first + int(room * (depth + rng.random()) / DEPTHS)
            ids[place : place + size] = needle
            ids[end + 1 : end + size] = needle[:-1]
            rows.append(ids)
            depths.append(depth)
            places.append(place)
    step = max(1, _TOKENS_PER_BATCH // length)
    return [
        (torch.stack(rows[at : at + step]), depths[at : at + step], places[at : at + step])
        for at in range(0, len(rows), step)
    ]


def _rare_tokens(known: np.ndarray, text: np.ndarray, size: int, rng: np.random.Generator) -> torch.Tensor:
    """Tokens of the held-out data that occur nowhere in the text, or as rarely as possible: a needle is there once."""
    shuffled = rng.permutation(known)
    tokens, counts = np.unique(text, return_counts=True)
    at = np.searchsorted(tokens, shuffled).clip(max=len(tokens) - 1)
    occurrences = np.where(tokens[at] == shuffled, counts[at], 0)
    rarest = shuffled[np.argsort(occurrences, kind="stable")]
    return torch.from_numpy(np.resize(rarest[: max(size, 1)], size).astype(np.int64))


class Retrieval:
    """Counts by depth for teacher and student: rows in which a head finds the needle, and right answers.

    "both" counts the rows of the teacher in which the student succeeds, too: a row in which the teacher fails does not
    count for or against the student.
    """

    def __init__(self) -> None:
        self.rows = np.zeros(DEPTHS)
        self.found: dict[str, dict[Any, np.ndarray]] = {name: {} for name in _COUNTED}  # [depths, heads] per pair
        self.right = {name: np.zeros(DEPTHS) for name in _COUNTED}
        self.misses: list[dict[str, Any]] = []

    def add_attention(self, pairs: dict, depths: list[int], places: list[int], rows: list[int]) -> None:
        """The rows of a batch whose forward was captured."""
        cache = RowCache()
        np.add.at(self.rows, depths, len(rows))
        for key, pair in pairs.items():
            begin = np.array(places)[:, None, None]
            best = [p.argmax(-1).cpu().numpy() for p in pair.row_probabilities(rows, cache)]  # [needles, heads, rows]
            teacher, student = ((each >= begin) & (each < begin + KEY + VALUE) for each in best)
            for name, hits in zip(_COUNTED, (teacher, student, teacher & student)):
                total = self.found[name].setdefault(key, np.zeros((DEPTHS, hits.shape[1])))
                np.add.at(total, depths, hits.sum(-1))
            for needle, head, row in np.argwhere(teacher & ~student).tolist():
                self.misses.append(
                    dict(head=[*key, head], depth=depths[needle], needle=places[needle], row=rows[row],
                         key=int(best[1][needle, head, row]))
                )  # fmt: skip

    def add_answers(self, depths: list[int], teacher: torch.Tensor, student: torch.Tensor) -> None:
        """Whether both predict the tokens of the values: [needles, VALUE] each."""
        for name, right in zip(_COUNTED, (teacher, student, teacher & student)):
            np.add.at(self.right[name], depths, right.sum(1).cpu().numpy())

    def result(self, length: int, has_answers: bool) -> dict[str, Any]:
        """Rates by depth. Those of the attention are means over the heads with which the teacher retrieves.

        "kept" is the student's share of the rows of the teacher; None where the teacher has none.
        """
        heads = [
            (pair, head)
            for pair, found in self.found["teacher"].items()
            for head in range(found.shape[1])
            if found[:, head].sum() >= RETRIEVES * self.rows.sum()
        ]
        chosen = [[*pair, head] for pair, head in heads]
        attention = {
            name: np.mean([found[pair][:, head] for pair, head in heads], 0) if heads else None
            for name, found in self.found.items()
        }
        counts = dict(attention=attention, answers=self.right if has_answers else dict.fromkeys(_COUNTED))
        misses = [miss for miss in self.misses if miss["head"] in chosen]
        return dict(
            length=length, rows=int(self.rows.sum()), heads=chosen, missed=len(misses), misses=misses[:_MISSES],
            **{kind: {role: _shares(found[role], self.rows) for role in ("teacher", "student")}
               for kind, found in counts.items()},
            kept={kind: _shares(found["both"], found["teacher"]) for kind, found in counts.items()},
        )  # fmt: skip


def _shares(part: np.ndarray | None, whole: np.ndarray | None) -> list[float | None] | None:
    if part is None or whole is None:
        return None
    return [float(a / b) if b else None for a, b in zip(part, whole)]
