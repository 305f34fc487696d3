"""The device and the processes of a run."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator

from ._options import Options, UserError


def make_accelerator(options: Options) -> Accelerator:
    """One process, or one of those that torchrun or accelerate has started."""
    mixed = {"float32": "no", "bfloat16": "bf16"}[options.precision]
    # Without a GPU, accelerate forms no group of processes unless it is told that the CPU is meant.
    accelerator = Accelerator(cpu=options.cpu or not torch.accelerator.is_available(), mixed_precision=mixed)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise UserError(f"{started} processes were started, and accelerate has formed a group of {accelerator.num_processes}: "
                        "start them with torchrun or accelerate launch")  # fmt: skip
    return accelerator
