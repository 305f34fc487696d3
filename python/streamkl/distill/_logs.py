"""OUT/log.jsonl, and what accelerate's trackers receive."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ._checkpoint import clear_errors, write_text
from ._options import Options


class Log:
    """One line of JSON per entry. A resumed run drops the lines after its checkpoint."""

    def __init__(self, options: Options, entries: list[dict[str, float]], accelerator: Any) -> None:
        self._options, self._accelerator = options, accelerator
        self._path = Path(options.out) / "log.jsonl"
        entries = sorted(entries, key=lambda entry: entry["step"])
        if accelerator.is_main_process:
            write_text(self._path, "".join(json.dumps(entry) + "\n" for entry in entries))

    def __enter__(self) -> Log:
        if self._options.track:
            config = {name: value if isinstance(value, (int, float)) else str(value)
                      for name, value in dataclasses.asdict(self._options).items()}  # fmt: skip
            out = Path(self._options.out)
            of_wandb = dict(name=out.name, dir=str(out))
            self._accelerator.init_trackers("streamkl-distill", config=config, init_kwargs={"wandb": of_wandb})
        return self

    def __exit__(self, *_) -> None:
        if self._options.track:
            self._accelerator.end_training()

    def add(self, entry: dict[str, float]) -> None:
        if self._accelerator.is_main_process:
            with clear_errors(self._path), open(self._path, "a") as file:
                file.write(json.dumps(entry) + "\n")
        if self._options.track:
            self._accelerator.log(
                {name: value for name, value in entry.items() if name != "step"}, step=int(entry["step"])
            )
