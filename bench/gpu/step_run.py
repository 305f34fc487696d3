"""A run of bench/step.py: makes, times and reports every setup, and goes on if one fails."""

import torch

from .alternate import time_alternately
from .measure import refusal_of, release_memory
from .report import append_csv
from .run import LibraryBench
from .step_cases import HUGGING_FACE, chosen
from .step_models import hugging_face_steps, layer_steps
from .step_report import COLUMNS, csv_rows, print_setup


def measure(setup, device, attention, rounds, sample_ms):
    """({variant: Timing}, what went wrong). The variants alternate, and only they live in memory."""
    torch.manual_seed(0)
    try:
        is_plain = setup.kind != HUGGING_FACE
        steps = layer_steps(setup, device, attention) if is_plain else hugging_face_steps(setup, device)
        timings = time_alternately(steps, device, rounds, sample_ms)
    except Exception as error:  # transformers is missing, out of memory, ...: the other setups go on
        return {}, [f"failed: {refusal_of(error)}"]
    return timings, [f"{variant} failed: {timing.refusal}" for variant, timing in timings.items() if timing.refusal]


class StepBench(LibraryBench):
    DEVICE = "cuda"

    def run(self):
        given = self.arguments
        print(f"{self.introduction()}; attention by {given.attention}, in transformers by sdpa")
        for setup in chosen(given.kind, given.lengths, given.quick):
            timings, notes = measure(setup, self.DEVICE, given.attention, given.rounds, given.sample_ms)
            self.is_right &= not notes
            print_setup(setup, timings, notes)
            if given.csv:
                append_csv(given.csv, csv_rows(setup, timings, notes, given.attention), self.about, COLUMNS)
            del timings
            release_memory()
