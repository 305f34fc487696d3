#!/usr/bin/env python3
"""Measures the library on this machine, one question at a time.

    bench/run.py QUESTION                       # prints tables
    bench/run.py QUESTION --csv FILE            # also appends rows, with commit, GPU and versions
    bench/run.py QUESTION --dry-run             # lists the cases; needs no GPU
    bench/run.py QUESTION --help

docs/benchmarks.md says what is timed and how. A case or a peer that fails is named, and the others go on; the exit
status is 1 if a result of the library is wrong or missing.

It needs PyTorch and the package streamkl: an installed one, or that of this repository. STREAMKL_LIBRARY names another
libstreamkl.so than that of build/release or build/gpu, STREAMKL_KERNEL a kernel that `streamkl info` lists.

Questions:
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

from harness.options import add_numbers, check_least
from harness.report import check_csv

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = {
    "peers": "attention KL compared with PyTorch and attention kernels, in time and memory",
    "shapes": "shapes that distillation has: which are slow for their work?",
    "call": "what the loss adds to an attention, as Python calls it",
    "step": "what the loss adds to a training step",
    "stats": "statistics of one attention, compared with the KL forward, SDPA and FlexAttention",
    "indexer": "the loss of a sparse attention's indexer, compared with naive code",
    "pooled": "indexers of blocks with a pooled teacher, compared with the KL forward",
    "zigzag": "the work of each rank of a context-parallel group: is it balanced?",
    "overhead": "host time of a call from Python",
    "cpu_attention": "a CPU thread, compared with PyTorch's attention",
}


def find_package():
    """The package of this repository with the library of its build, unless others are installed or chosen."""
    sys.path.append(str(ROOT / "python"))
    built = [ROOT / "build" / preset / "src/libstreamkl.so" for preset in ("release", "gpu")]
    if found := next(filter(Path.exists, built), None):
        os.environ.setdefault("STREAMKL_LIBRARY", str(found))


def current_commit():
    asked = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip()


def parser_of(name, question):
    """The options of all questions, and those of one. A question may have other defaults."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"bench/run.py {name}", description=question.__doc__, formatter_class=form)

    def add(option, help, **how):
        parser.add_argument(option, help=help, **how)

    add("--device", "default cuda", choices=["cuda", "cpu"], default="cuda")
    add("--csv", "append the results", type=Path, metavar="FILE")
    add("--commit", "the commit in the CSV; default: that of git", default=current_commit())
    add("--only", "part of a case's name; may be repeated", action="append", default=[], metavar="TEXT")
    add_numbers(parser, rounds=(25, "most samples per call"), sample_ms=(300.0, "time of all samples of a case"))
    add_numbers(parser, seed=(0, "of the random inputs"))
    add("--dry-run", "list the cases and measure nothing", action="store_true")
    if hasattr(question, "add_options"):
        question.add_options(parser)
    return parser


def chosen(cases, texts):
    """The cases whose name contains one of the texts; all if there is none."""
    for text in texts:
        if not any(text in case.name for case in cases):
            raise ValueError(f"--only={text!r}: must be part of a name: {'; '.join(case.name for case in cases)}")
    return [case for case in cases if not texts or any(text in case.name for text in texts)]


def parse(name, question, arguments):
    """(arguments, cases); exits with status 2 if the question cannot take them."""
    parser = parser_of(name, question)
    given = parser.parse_args(arguments)
    try:
        check_least(given, 1, "rounds")
        cases = chosen(list(question.cases(given)), given.only)
    except ValueError as error:
        parser.error(str(error))
    try:
        if given.csv:
            check_csv(given.csv, question.COLUMNS)
    except (ValueError, OSError) as error:
        parser.error(f"--csv={given.csv}: {error}")
    return given, cases


def measure(question, given, cases):
    from harness.run import Run

    run = Run(question, given)
    for case in cases:
        run.measure(case)
    if run.wrong_cases:
        sys.exit(f"bench/run.py: a result is WRONG or missing: {'; '.join(run.wrong_cases)}")


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    find_package()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__ + "\n".join(f"    {name:15} {text}" for name, text in QUESTIONS.items()))
        return
    name = arguments[0]
    if name not in QUESTIONS:
        print(f"bench/run.py {name}: must be one of {', '.join(QUESTIONS)}", file=sys.stderr)
        sys.exit(2)
    try:
        question = importlib.import_module(f"questions.{name}")
    except ImportError as error:
        sys.exit(f"bench/run.py: measuring needs PyTorch and the package streamkl: {error}")
    given, cases = parse(name, question, arguments[1:])
    if given.dry_run:
        print("\n".join(case.name for case in cases))
    else:
        measure(question, given, cases)


if __name__ == "__main__":
    main()
