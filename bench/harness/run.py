"""A run of one question: times its methods, prints their rows, and appends them to a file."""

import sys
from dataclasses import dataclass, field
from typing import Callable

import torch

from streamkl import _library as lib

from .library import BACKWARD, FORWARD, STEP
from .report import append_csv, case_columns, errors_of, rounded, table, too_large
from .timing import Timing, first_run, refusal_of, release_memory, time_alternately

PEER_WRONG = 5e-2  # peers that sum in bf16 lose more than we do; with a larger error they compute something else


@dataclass
class Method:
    """One way to compute something, and what was measured of it."""

    name: str
    calls: dict = field(default_factory=dict)  # {pass: call}
    kernel: str = ""  # a peer has its name and version here
    flops: dict = field(default_factory=dict)  # {pass: useful work}
    step: Callable = dict  # a whole training step with its allocations; returns its results by name
    is_peer: bool = False  # the run goes on without a peer that fails or computes something else
    refusal: str = ""  # why it was not measured
    wrong: list = field(default_factory=list)  # results of ours with too large an error
    extra_bytes: int | str = ""  # peak of a step in addition to its inputs; empty: that of each call counts
    errors: dict = field(default_factory=dict)  # {result: relative error}
    timings: dict = field(default_factory=dict)  # {pass: Timing}

    def examine(self, exact, device):
        """Runs the step, and records its memory and its errors, which exact.errors() compares with exact.limits."""
        results, timing = first_run(self.step, device)
        self.refusal, self.extra_bytes = timing.refusal, timing.extra_bytes
        if not self.refusal:
            self.errors = exact.errors(results)
            limits = dict.fromkeys(self.errors, PEER_WRONG) if self.is_peer else exact.limits
            off = too_large(self.errors, limits)
            if off and self.is_peer:
                self.refusal = f"it computes something else: {', '.join(off)}"
            self.wrong = [] if self.is_peer else [f"{self.name}: {text}" for text in off]
        if self.refusal:
            self.calls, self.step = {}, dict
            release_memory()

    def ms(self, name):
        """Median time of a pass, or None."""
        return self.timings[name].median if name in self.timings else None

    def row(self, name):
        """The columns of a pass."""
        timing, work = self.timings[name], self.flops.get(name)
        return {
            "method": self.name, "kernel": self.kernel, "pass": name, "ms": rounded(timing.median, ".4f"),
            "fastest_ms": rounded(timing.fastest, ".4f"), "tflops": rounded(work and work / timing.median * 1e-9, ".1f"),
            "peak_bytes": timing.peak_bytes, "extra_bytes": timing.extra_bytes if self.extra_bytes == "" else self.extra_bytes,
            **errors_of(self.errors),
        }  # fmt: skip


def methods_of(calls, peers=()):
    """One method per call of {name: call}, without passes."""
    return [Method(name, {"": call}, is_peer=name in peers) for name, call in calls.items()]


def make_peer(name, make, exact=None, device=None):
    """The peer that make() returns, or a method with the reason why it cannot run or, with `exact`, is not comparable."""
    try:
        method = make()
        method.is_peer = True
        if exact is not None:
            method.examine(exact, device)
        return method
    except Exception as error:
        return Method(name, is_peer=True, refusal=refusal_of(error))


def time_methods(methods, device, rounds, sample_ms, shuffle=False):
    """Fills in the timings of all methods, whose calls alternate. A call that fails is the method's refusal.

    A step that is not timed as a whole takes as long as the forward and the backward of a round.
    """
    release_memory()
    calls = {(n, name): call for n, method in enumerate(methods) for name, call in method.calls.items()}
    for (n, name), timing in time_alternately(calls, device, rounds, sample_ms, shuffle).items():
        methods[n].refusal = methods[n].refusal or timing.refusal
        if timing.samples:
            methods[n].timings[name] = timing
    for timings in (method.timings for method in methods):
        if {FORWARD, BACKWARD} <= timings.keys() and STEP not in timings:
            timings[STEP] = Timing([sum(pair) for pair in zip(timings[FORWARD].samples, timings[BACKWARD].samples)])


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
        self.about = {"gpu": name, "torch": torch.__version__, "commit": given.commit}
        self.wrong_cases = []
        version, commit = lib.library().skl_version().decode(), given.commit or "unknown"
        print(f"streamkl {version}, commit {commit}, PyTorch {torch.__version__}, {name}; times in ms", flush=True)

    def time(self, methods, more=lambda method, name: {}, others=(), shuffle=False):
        """The Result of methods whose calls alternate: a row per pass, with more(method, pass), and one per refusal.

        The calls of `others` alternate with them, and have no rows.
        """
        time_methods([*methods, *others], self.device, self.given.rounds, self.given.sample_ms, shuffle)
        result = Result()
        for method in methods:
            result.rows += [method.row(name) | more(method, name) for name in method.timings]
            result.wrong += method.wrong
            if method.refusal:
                result.rows.append({"method": method.name, "note": f"not measured: {method.refusal}"})
                result.wrong += [] if method.is_peer else [f"{method.name} failed: {method.refusal}"]
        return result

    def measure(self, case):
        """Measures, prints and records one case. An error is noted, and the run goes on."""
        torch.manual_seed(self.given.seed)
        columns = self.question.COLUMNS
        try:
            result = self.question.measure(case, self)
        except Exception as error:  # of the library or of the GPU
            result = Result(wrong=[f"failed: {refusal_of(error)}"])
        notes, common = [*result.wrong, *result.notes], case_columns(case, columns)
        print(f"\n{case.name}")
        shown = [column for column in columns if column not in common]
        print("\n".join(table(result.rows, shown) + [f"  {line}" for line in result.lines + notes]))
        sys.stdout.flush()  # a later case may take long
        if self.given.csv:
            rows = [common | row for row in result.rows or [{}]]
            rows = [{**row, "note": "; ".join(filter(None, [row.get("note"), *notes]))} for row in rows]
            append_csv(self.given.csv, rows, self.about, columns)
        self.wrong_cases += [case.name] if result.wrong else []
        del result
        release_memory()
