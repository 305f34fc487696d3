"""Which layer pairs of a distiller are fused, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class FusedPair(NamedTuple):
    """One layer pair of a loss."""

    student_layer: int
    name: str  # name of the student layer's module
    teacher_layer: int
    fused: bool
    reason: str  # why it is not fused


@dataclass
class Explanation:
    """The layer pairs of the last loss; printed, a table."""

    pairs: list[FusedPair]

    def __str__(self) -> str:
        width = max([len(pair.name) for pair in self.pairs] + [len("module")])
        lines = [f"student layer  {'module':{width}}  teacher layer  fused"]
        for pair in self.pairs:
            fused = "yes" if pair.fused else f"no: {pair.reason}"
            lines.append(f"{pair.student_layer:13}  {pair.name:{width}}  {pair.teacher_layer:13}  {fused}")
        return "\n".join(lines)
