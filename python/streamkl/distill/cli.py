"""The command streamkl-distill."""

from __future__ import annotations

import dataclasses
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from ._options import EVALUATION, Parser, UserError, add_arguments, options_from

INTERRUPTED, BAD_INPUT = 130, 2


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 2 for something that the user can fix, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given[:1] == ["eval"]:
            return _evaluate(given[1:])
        return _distill(given)
    except UserError as error:
        print(f"streamkl-distill: {error}", file=sys.stderr)
        return BAD_INPUT
    except (ValueError, TypeError, RuntimeError) as error:
        if not _is_refusal(error):
            raise
        print(f"streamkl-distill: {str(error).replace('layer_map', '--layer-map').replace('head_map', '--head-map')}",
              file=sys.stderr)  # fmt: skip
        return BAD_INPUT
    except KeyboardInterrupt:
        print("streamkl-distill: interrupted; the last checkpoint is whole", file=sys.stderr)
        return INTERRUPTED


def _is_refusal(error: BaseException) -> bool:
    """Whether streamkl.hf has raised it itself: it names what it does not accept."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].startswith("streamkl.hf.")


def _distill(given: list[str]) -> int:
    parser = Parser(
        prog="streamkl-distill", allow_abbrev=False,
        description="Distills a Hugging Face model into a smaller one that attends where its teacher attends, and reports what "
        "the student has learnt. `streamkl-distill eval --help` compares two models without training.",
    )  # fmt: skip
    add_arguments(parser)
    options = options_from(parser.parse_args(given)).check()
    _check_packages()
    from ._loop import Stopped, distill  # transformers takes seconds: mistakes are found before

    try:
        out = distill(options)
    except Stopped as stopped:
        print(f"streamkl-distill: {stopped}", file=sys.stderr)
        return INTERRUPTED
    if os.environ.get("RANK", "0") == "0" and not options.dry_run:
        print(f"model  {out / 'student'}\nreport {out / 'report.html'}")
    return 0


def _evaluate(given: list[str]) -> int:
    parser = Parser(
        prog="streamkl-distill eval", allow_abbrev=False,
        description="Compares the attention of a student with that of its teacher on held-out data: KL, retrieval, maps.",
    )  # fmt: skip
    add_arguments(parser, EVALUATION)
    arguments = parser.parse_args(given)
    options = options_from(arguments)
    if options.data and "data" not in arguments:  # the options of a run, whose data is what its student has learnt
        if not options.held_out:
            raise UserError(
                "--data: must be given: that of --options is what the student has learnt, and it names no held-out files"
            )
        options = dataclasses.replace(options, data=options.held_out)
    if "out" not in arguments:
        options = dataclasses.replace(options, out="evaluation")
    if any((Path(options.out) / name).exists() for name in ("student", "checkpoint.safetensors")):
        raise UserError(
            f"--out {options.out}: contains a run, whose report would be replaced: must be another folder"
        )
    if not options.student:
        raise UserError("--student: is missing: the folder of a transformers model")
    if not options.eval_sequences:
        raise UserError("--eval-sequences=0: must be 1..")
    options = dataclasses.replace(
        options, student_layers=0, student_heads=0, student_key_heads=0, init_layers=[]
    ).check()
    _check_packages()
    from ._checkpoint import to_json
    from ._compare_models import compare_models

    out, found = compare_models(options)
    print(to_json({name: found[name] for name in ("kl", "output_kl", "kl_layer")}))
    print(f"report {out / 'report.html'}")
    return 0


def _check_packages() -> None:
    missing = [name for name in ("transformers", "accelerate", "safetensors") if find_spec(name) is None]
    if missing:
        raise UserError(f"needs {', '.join(missing)}: pip install 'streamkl[distill]'")
