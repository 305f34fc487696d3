#!/usr/bin/env python3
"""Measures every GPU figure of README.md and docs/benchmarks.md that this commit lacks, question by question.

    bench/figures.py --tilelang DIR --linearard DIR     # all of them; then scripts/benchmark-tables writes the tables
    bench/figures.py ... --seconds 540                  # begins no question after 540 s; the next call measures the rest
    bench/figures.py --list                             # what is missing; needs no GPU

A question is measured once bench/results has a figure of this commit for each of its cases. The exit status is 1 if a
question failed or figures are still missing.
"""

import argparse
import csv
import importlib
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import run  # bench/run.py
from harness.report import case_columns

RESULTS = run.ROOT / "bench/results"
FOLDERS = ("tilelang", "linearard")  # peers that are imported from a folder


class Measurement(NamedTuple):
    """A call of bench/run.py. `method`: the one whose row tells that a case is measured; empty: any."""

    question: str
    options: str = ""
    method: str = ""

    def command(self, folders=None):
        """The arguments of bench/run.py; without `folders` those that determine the cases."""
        peer = [f"--{self.method}", str(folders[self.method])] if folders and self.method in FOLDERS else []
        return [self.question, *shlex.split(self.options), *peer]

    def missing(self, commit):
        """The cases without a figure of this commit."""
        path = RESULTS / f"{self.question}.csv"
        rows = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
        figures = [row for row in rows if row["commit"] == commit and (row.get("ms") or row.get("us"))]
        figures = [row for row in figures if self.method in ("", row.get("method"))]
        return [case for case in self.cases() if not any(is_of_case(row, case) for row in figures)]

    def cases(self):
        """The columns of each case."""
        question = importlib.import_module(f"questions.{self.question}")
        _, cases = run.parse(self.question, question, self.command()[1:])
        return [case_columns(case, question.COLUMNS) for case in cases]


SPARSE = "--top-k 2048 --key-heads 1 --dim 576"
MEASUREMENTS = [
    Measurement("overhead"),
    Measurement("shapes"),
    Measurement("call"),
    Measurement("stats"),
    Measurement("pooled"),
    Measurement("indexer", f"{SPARSE} --heads 128 --index-heads 64", "tilelang"),
    Measurement("indexer", f"{SPARSE} --heads 64 --index-heads 32", "tilelang"),
    Measurement("indexer", f"{SPARSE} --heads 128 --index-heads 64 --length 32768", "tilelang"),
    Measurement("indexer", method="naive"),
    Measurement("indexer", "--length 131072"),
    Measurement("peers", "--peers '' --masks causal", "linearard"),
    Measurement("peers", "--peers cudnn --dims 64 --deterministic", "deterministic"),
    Measurement("peers", "--peers cudnn --dims 192,256"),
    Measurement("peers", "--peers cudnn --lengths 32768"),
    Measurement("peers", "--peers cudnn --heads 128 --lengths 640,1024,2048 --masks full"),
    Measurement("peers", "--heads 32 --key-heads 8 --dims 128"),
    Measurement("peers", "--packed 8192,4096,2048,1024,512,512 --dims 128"),
    Measurement("peers", "--dims 128 --deterministic", "eager"),
    Measurement("peers", "--dims 128 --lengths 1024,2048,4096,16384 --masks causal", "eager"),
    Measurement("step"),
    Measurement("zigzag"),
]


def ask(command, commit):
    """Whether a call of bench/run.py, which appends its rows to the results, succeeds."""
    words = [*command, "--csv", str(RESULTS / f"{command[0]}.csv"), "--commit", commit]
    print(f"\n{shlex.join(words)}", flush=True)
    return subprocess.run([sys.executable, run.ROOT / "bench/run.py", *words]).returncode == 0


def is_of_case(row, case):
    return all(row[column] == str(value) for column, value in case.items() if column in row)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in FOLDERS:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help="as in bench/run.py")
    parser.add_argument("--commit", default=run.current_commit(), help="the measured commit; default: that of git")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="N", help="begin no question after N s"
    )
    parser.add_argument("--list", action="store_true", help="measure nothing")
    given = parser.parse_args(arguments)
    if not given.commit:
        parser.error("--commit: must be given where git does not know it")
    return given


def main(arguments=None):
    given, begin, lacking = parse(arguments), time.monotonic(), []
    folders = {name: getattr(given, name) for name in FOLDERS}
    run.find_package()
    for each in MEASUREMENTS:
        if not each.missing(given.commit):
            continue
        waits = given.list or time.monotonic() - begin > given.seconds
        if not waits and folders.get(each.method, True):
            if ask(each.command(folders), given.commit) and not each.missing(given.commit):
                continue
        lacking.append(
            shlex.join([*each.command(), *([f"--{each.method}", "DIR"] if each.method in FOLDERS else [])])
        )
    if lacking:
        sys.exit("\n".join([f"bench/results has no figures of {given.commit} from:", *lacking]))


if __name__ == "__main__":
    main()
