"""A run of one question: measures its cases, prints their rows, and appends them to a file."""

import sys
from dataclasses import dataclass, field

import torch

from streamkl import _library as lib

from .report import append_csv, table
from .timing import refusal_of, release_memory, time_alternately


@dataclass
class Result:
    """What a question's measure(case, run) returns."""

    rows: list = field(default_factory=list)  # dicts by column
    lines: list = field(default_factory=list)  # text after the table
    notes: list = field(default_factory=list)  # what was not measured, for the column `note`
    wrong: list = field(default_factory=list)  # results of the library that are wrong or missing


class Run:
    """The arguments, the device, the columns that all rows share, and whether all results of the library were right."""

    def __init__(self, question, given):
        self.question, self.given, self.device = question, given, torch.device(given.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            sys.exit("bench/run.py: PyTorch finds no GPU")
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        about = {"gpu": name, "device": name, "torch": torch.__version__, "commit": given.commit}
        self.about = {column: about[column] for column in question.COLUMNS if column in about}
        self.is_right, self.wrong_cases = True, []
        version, commit = lib.library().skl_version().decode(), given.commit or "unknown"
        print(f"streamkl {version}, commit {commit}, PyTorch {torch.__version__}, {name}; times in ms", flush=True)

    def time(self, calls, **options):
        """{name: Timing} of calls that alternate."""
        return time_alternately(calls, self.device, self.given.rounds, self.given.sample_ms, **options)

    def measure(self, case):
        """Measures, prints and records one case. An error is noted, and the run goes on."""
        torch.manual_seed(self.given.seed)
        try:
            result = self.question.measure(case, self)
        except Exception as error:  # of the library or of the GPU
            result = Result(wrong=[f"failed: {refusal_of(error)}"])
        notes = [*result.wrong, *result.notes]
        rows = result.rows or [self.question.columns_of(case)]
        print(f"\n{case.name}" + (f": {case}" if str(case) != case.name else ""))
        print("\n".join(table(result.rows, self.question.SHOWN) + [f"  {line}" for line in result.lines + notes]))
        sys.stdout.flush()  # a later case may take long
        if self.given.csv:
            rows = [{**row, "note": "; ".join(filter(None, [row.get("note"), *notes]))} for row in rows]
            append_csv(self.given.csv, rows, self.about, self.question.COLUMNS)
        self.wrong_cases += [case.name] if result.wrong else []
        self.is_right &= not result.wrong
        del result
        release_memory()

    def finish(self):
        if self.wrong_cases:
            print(f"\nwrong or missing: {'; '.join(self.wrong_cases)}")
