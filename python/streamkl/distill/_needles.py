"""Retrieval: does the student's attention find what the teacher's finds, at every depth and length?

A needle is a key and a value: tokens that are rare in a held-out text. It is put at some depth of the text, which
ends with the key and the beginning of the value. Each of these last rows has to continue the value, so a retrieval
head puts its largest probability somewhere in the needle. A long text has several needles at once. Only the rows that
answer are computed: nothing grows with the square of the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..hf._pairs import RowCache
from ._data import Sequences

KEY, VALUE = 8, 4  # tokens
DEPTHS = 8
TOGETHER = 4  # needles of a long text: with more, a text of 8,192 tokens has no rare ones left of a small vocabulary
RETRIEVES = 0.5  # a head retrieves if the teacher finds this share of all needles with it
_SIZE = KEY + VALUE
_ASKED = _SIZE - 1  # all but the value's last token, at the end of the text
_TOKENS_PER_BATCH = 8192
_MISSES = 12  # maximum number of misses per length in the results
_COUNTED = ("teacher", "student", "both")


@dataclass
class NeedleBatch:
    """Texts with needles, in the order in which the texts ask for them."""

    ids: torch.Tensor  # [texts, length]
    depths: np.ndarray  # [texts, needles], 0..DEPTHS-1
    places: np.ndarray  # [texts, needles]: where they begin
    rows: list[int]  # VALUE rows per needle that answer: all texts have the same

    def answers(self) -> torch.Tensor:
        """The values: [texts, needles, VALUE]."""
        at = torch.from_numpy(self.places)[..., None] + torch.arange(KEY, _SIZE)
        return self.ids.gather(1, at.flatten(1)).view(at.shape)


def needle_batches(held_out: Sequences, length: int, count: int, seed: int) -> list[NeedleBatch]:
    """`count` needles per depth, in texts of `length` tokens. An empty list if the texts are too short."""
    rng = np.random.default_rng([seed, length])
    first, end = len(held_out.prefix), length - len(held_out.suffix)

    def room(needles: int) -> int:  # positions for the first token of a needle
        return end - needles * _ASKED - first - _SIZE

    together = TOGETHER if room(TOGETHER) >= DEPTHS * _SIZE else 1  # needles of other depths do not overlap
    if room(together) < DEPTHS:
        return []
    known = np.unique(held_out.tokens)
    apart = DEPTHS // together
    texts = [
        _text(held_out, known, length, end, first, room(together), np.arange(start, DEPTHS, apart), rng)
        for _ in range(count)
        for start in range(apart)
    ]
    asked = end - _ASKED * np.arange(together, 0, -1)[:, None]  # the positions at which the text asks for its needles
    rows = (asked + np.arange(_ASKED - VALUE, _ASKED)).ravel().tolist()
    step = max(1, _TOKENS_PER_BATCH // length)
    batches = []
    for at in range(0, len(texts), step):
        ids, depths, places = zip(*texts[at : at + step])
        batches.append(NeedleBatch(torch.stack(ids), np.stack(depths), np.stack(places), rows))
    return batches


def _text(held_out, known, length, end, first, room, depths, rng) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """A text with a needle at each of the depths, which it asks for in random order."""
    ids = held_out.batch([int(rng.integers(len(held_out)))])[0][:length].clone()
    if held_out.suffix:
        ids[end:] = torch.tensor(held_out.suffix)
    needles = _rare_tokens(known, ids.numpy(), len(depths) * _SIZE, rng).view(len(depths), _SIZE)
    depths = rng.permutation(depths)
    places = first + (room * (depths + rng.random(len(depths))) / DEPTHS).astype(np.int64)
    for place, needle in zip(places, needles):
        ids[place : place + _SIZE] = needle
    ids[end - needles[:, :-1].numel() : end] = needles[:, :-1].flatten()
    return ids, depths, places


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
        self.rows_of: dict[Any, int] = {}  # per pair
        self.found: dict[str, dict[Any, np.ndarray]] = {name: {} for name in _COUNTED}  # [depths, heads] per pair
        self.right = {name: np.zeros(DEPTHS) for name in _COUNTED}
        self.misses: list[dict[str, Any]] = []

    def add_attention(self, pairs: dict, batch: NeedleBatch) -> None:
        """A batch whose forward was captured."""
        cache, begin = RowCache(), batch.places[:, None, :, None]
        np.add.at(self.rows, batch.depths, VALUE)
        for key, pair in pairs.items():
            self.rows_of[key] = self.rows_of.get(key, 0) + VALUE * batch.depths.size
            best = [  # [texts, heads, needles, VALUE]
                p.argmax(-1).unflatten(-1, (-1, VALUE)).cpu().numpy()
                for p in pair.row_probabilities(batch.rows, cache)
            ]
            teacher, student = ((each >= begin) & (each < begin + _SIZE) for each in best)
            for name, hits in zip(_COUNTED, (teacher, student, teacher & student)):
                total = self.found[name].setdefault(key, np.zeros((DEPTHS, hits.shape[1])))
                np.add.at(total, batch.depths, hits.sum(-1).swapaxes(1, 2))
            for text, head, needle, row in np.argwhere(teacher & ~student).tolist():
                self.misses.append(
                    dict(head=[*key, head], depth=int(batch.depths[text, needle]), needle=int(batch.places[text, needle]),
                         row=batch.rows[needle * VALUE + row], key=int(best[1][text, head, needle, row]))
                )  # fmt: skip

    def add_answers(self, batch: NeedleBatch, teacher: torch.Tensor, student: torch.Tensor) -> None:
        """Whether both predict the tokens of the values: [texts, needles, VALUE] each."""
        for name, right in zip(_COUNTED, (teacher, student, teacher & student)):
            np.add.at(self.right[name], batch.depths, right.sum(-1).cpu().numpy())

    def scores(self) -> dict[int, list[float]]:
        """{student layer: the share of needles that the teacher of each student head finds}."""
        sums: dict[int, Any] = {}
        rows: dict[int, int] = {}
        for (i, j), found in self.found["teacher"].items():  # lengths may pair a layer with other teacher layers
            sums[i] = sums.get(i, 0) + found.sum(0)
            rows[i] = rows.get(i, 0) + self.rows_of[i, j]
        return {i: (found / rows[i]).tolist() for i, found in sums.items()}

    def result(self, length: int, has_answers: bool) -> dict[str, Any]:
        """Rates by depth. Those of the attention are means over the heads with which the teacher retrieves.

        "kept" is the student's share of the rows of the teacher, None where the teacher has none, and "kept_of" the
        number of these rows: a mean over heads.
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
            length=length, rows=int(self.rows.sum()), heads=chosen, missed=len(misses),
            misses=misses[:: -(-len(misses) // _MISSES) or 1],  # evenly spread
            **{kind: {role: _shares(found[role], self.rows) for role in ("teacher", "student")}
               for kind, found in counts.items()},
            kept={kind: _shares(found["both"], found["teacher"]) for kind, found in counts.items()},
            kept_of={kind: None if found["teacher"] is None else found["teacher"].tolist() for kind, found in counts.items()},
        )  # fmt: skip


def _shares(part: np.ndarray | None, whole: np.ndarray | None) -> list[float | None] | None:
    if part is None or whole is None:
        return None
    return [float(a / b) if b else None for a, b in zip(part, whole)]
