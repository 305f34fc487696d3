"""The table and the CSV rows of bench/step.py. Needs neither torch nor a GPU."""

import sys

from .report import bytes_text, rounded
from .step_cases import HUGGING_FACE, NO_LOSS

COLUMNS = (
    "date gpu torch commit kind teacher student length layers checkpointing attention variant ms fastest_ms percent"
    " peak_bytes more_bytes note"
).split()


def lines_of(timings):
    """One dict per variant that was measured: `percent` is its time over the step without the loss."""
    without = timings.get(NO_LOSS)
    for variant, timing in timings.items():
        if timing.median is None:
            continue
        line = {"variant": variant, "ms": timing.median, "fastest": timing.fastest, "peak": timing.peak_bytes}
        is_compared = variant != NO_LOSS and without and without.median
        line["percent"] = (timing.median / without.median - 1) * 100 if is_compared else None
        line["more"] = timing.peak_bytes - without.peak_bytes if is_compared else None
        yield line


def print_setup(setup, timings, notes):
    print(f"\n{setup}")
    for line in lines_of(timings):
        percent = f"{line['percent']:+.1f} %" if line["percent"] is not None else ""
        more = f"{'-' if line['more'] < 0 else '+'}{bytes_text(abs(line['more']))}" if line["more"] is not None else ""
        print(f"  {line['variant']:19} {line['ms']:9.2f} ms {percent:>10}   peak {bytes_text(line['peak']):>10} {more:>11}")
    for note in notes:
        print(f"  {note}")
    sys.stdout.flush()  # a later step may take long


def csv_rows(setup, timings, notes, attention):
    """One row per variant, or a single one with the reason if nothing was measured."""
    common = {
        "kind": setup.kind, "teacher": setup.teacher, "student": setup.student, "length": setup.length,
        "layers": setup.layers, "checkpointing": int(setup.checkpointing),
        "attention": "sdpa" if setup.kind == HUGGING_FACE else attention, "note": "; ".join(notes),
    }  # fmt: skip
    lines = list(lines_of(timings))
    for line in lines:
        yield common | {
            "variant": line["variant"], "ms": rounded(line["ms"], ".3f"), "fastest_ms": rounded(line["fastest"], ".3f"),
            "percent": rounded(line["percent"], ".1f"), "peak_bytes": line["peak"],
            "more_bytes": "" if line["more"] is None else line["more"],
        }  # fmt: skip
    if not lines:
        yield common
