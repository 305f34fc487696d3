"""The command streamkl-distill."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from importlib.util import find_spec

from ._options import UserError, add_arguments, options_from

_EVALUATION = {
    "teacher", "student", "tokenizer", "out", "data", "text_field", "context", "seed", "precision", "direction", "layer_map",
    "head_map", "eval_sequences", "needles", "needle_lengths", "map_layers", "map_heads", "cpu",
}  # fmt: skip
INTERRUPTED, BAD_INPUT = 130, 2


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, 2 for something that the user can fix, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given[:1] == ["eval"]:
            return _evaluate(given[1:])
        return _distil(given)
    except UserError as error:
        print(f"streamkl-distill: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("streamkl-distill: interrupted; the last checkpoint is whole", file=sys.stderr)
        return INTERRUPTED


def _distil(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="streamkl-distill", allow_abbrev=False,
        description="Distils a Hugging Face model into a smaller one that attends where its teacher attends, and reports what "
        "the student has learnt. `streamkl-distill eval --help` compares two models without training.",
    )  # fmt: skip
    add_arguments(parser)
    options = options_from(parser.parse_args(given)).check()
    _check_packages()
    from ._loop import Stopped, distil  # transformers takes seconds: mistakes are found before

    try:
        out = distil(options)
    except Stopped as stopped:
        print(f"streamkl-distill: {stopped}", file=sys.stderr)
        return INTERRUPTED
    if os.environ.get("RANK", "0") == "0":
        print(f"model  {out / 'student'}\nreport {out / 'report.html'}")
    return 0


def _evaluate(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="streamkl-distill eval", allow_abbrev=False,
        description="Compares the attention of a student with that of its teacher on held-out data: KL, retrieval, maps.",
    )  # fmt: skip
    add_arguments(parser, _EVALUATION)
    options = options_from(parser.parse_args(given))
    if not options.student:
        raise UserError("--student: is missing: the folder of a transformers model")
    if not options.eval_sequences:
        raise UserError("--eval-sequences=0: must be 1..")
    options = dataclasses.replace(
        options, student_layers=0, student_heads=0, student_key_heads=0, init_layers=[]
    ).check()
    _check_packages()
    from ._compare_models import compare_models

    out, found = compare_models(options)
    print(json.dumps({name: found[name] for name in ("kl", "output_kl", "kl_layer")}))
    print(f"report {out / 'report.html'}")
    return 0


def _check_packages() -> None:
    missing = [name for name in ("transformers", "accelerate", "safetensors") if find_spec(name) is None]
    if missing:
        raise UserError(f"needs {', '.join(missing)}: pip install 'streamkl[distill]'")


if __name__ == "__main__":
    sys.exit(main())
