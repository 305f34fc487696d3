"""OUT/log.jsonl, and TensorBoard's logs on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ._checkpoint import clear_errors, write_text
from ._options import UserError


class Log:
    """One line of JSON per entry. A resumed run drops the lines after its checkpoint."""

    def __init__(self, out: Path, entries: list[dict[str, float]], tensorboard: bool, is_main: bool) -> None:
        entries = sorted(entries, key=lambda entry: entry["step"])
        self._path = out / "log.jsonl" if is_main else None
        self._writer: Any = None
        if self._path is None:
            return
        write_text(self._path, "".join(json.dumps(entry) + "\n" for entry in entries))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UserError("--tensorboard: needs the package tensorboard: pip install tensorboard") from error
            self._writer = SummaryWriter(
                out / "tensorboard", purge_step=len(entries) and int(entries[-1]["step"]) + 1
            )

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, entry: dict[str, float]) -> None:
        if self._path is None:
            return
        with clear_errors(self._path), open(self._path, "a") as file:
            file.write(json.dumps(entry) + "\n")
        if self._writer is not None:
            for name, value in entry.items():
                if name != "step":
                    self._writer.add_scalar(name, value, int(entry["step"]))
