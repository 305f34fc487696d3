"""The device and the processes of a run."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from ._options import Options, UserError


def make_accelerator(options: Options) -> Accelerator:
    """One process, or one of those that torchrun or accelerate has started."""
    mixed = {"float32": "no", "bfloat16": "bf16"}[options.precision]
    # Without a GPU, accelerate forms no group of processes unless it is told that the CPU is meant.
    is_cpu = options.cpu or not torch.accelerator.is_available()
    known = [str(tracker) for tracker in get_available_trackers()]
    for name in options.track:  # accelerate would leave it out without a word
        if name not in known:
            raise UserError(
                f"--track {name}: must be one of {', '.join(known) or 'none'}, which are installed; pip install {name}?"
            )
    trackers = dict(log_with=options.track, project_dir=options.out) if options.track else {}
    accelerator = Accelerator(cpu=is_cpu, mixed_precision=mixed, **trackers)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise UserError(f"{started} processes were started, and accelerate has formed a group of {accelerator.num_processes}: "
                        "start them with torchrun or accelerate launch")  # fmt: skip
    return accelerator
