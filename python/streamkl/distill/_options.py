"""Everything that a run can be told: one table, from which the command line, the TOML file and their checks follow."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .._row_weight import parse_row_weight

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class UserError(Exception):
    """Something that the user can fix. The command prints the message without a traceback."""


def _option(
    default: Any, help: str, kind: Any = None, *, many: bool = False, choices: tuple = (), affects: bool = True
) -> Any:
    """`affects`: a checkpoint can be resumed only with the same value, because it changes the weights."""
    kind = kind or type(default)
    values = dict(help=help, kind=kind, many=many, choices=choices, affects=affects)
    if many:
        return field(default_factory=lambda: list(default), metadata=values)
    return field(default=default, metadata=values)


@dataclass
class Options:
    """Options of ``streamkl-distill``; ``student_layers`` is ``--student-layers`` there, and ``student-layers`` in TOML."""

    teacher: str = _option(
        "", "the teacher: a folder as save_pretrained writes it, a .gguf file, or an id of the Hugging Face Hub"
    )
    student: str = _option("", "the student, the same way; without it, one is made from the teacher")
    student_layers: int = _option(0, "layers of a student made from the teacher; 0: as many as the teacher", int)
    student_heads: int = _option(0, "its attention heads; 0: as many as the teacher", int)
    student_key_heads: int = _option(0, "its key and value heads; 0: in proportion to its heads", int)
    init_layers: list[int] = _option(
        (), "teacher layers that its layers start from; default: evenly spread", int, many=True
    )
    init_heads: str = _option("mean", "its heads start as the mean of neighboring teacher heads, or pick the first of them",
                              choices=("mean", "pick"))  # fmt: skip
    tokenizer: str = _option("", "the tokenizer, the same way; default: the teacher's", affects=False)
    out: str = _option("distilled", "folder for checkpoint, model, report and logs", affects=False)

    data: list[str] = _option(
        (),
        "training data: text, .jsonl, .parquet, a dataset as NAME[:CONFIG][:SPLIT] or folder, or tokens as .npy or .safetensors; "
        "text and .jsonl may be packed with gzip",
        str,
        many=True,
    )
    held_out: list[str] = _option(
        (), "held-out data; default: the last sequences of the training data", str, many=True
    )
    text_field: str = _option(
        "text", "the field of a record of .jsonl, .parquet or a dataset with its text (or a list of tokens)"
    )
    context: int = _option(2048, "tokens per sequence")
    start_context: int = _option(
        0, "tokens per sequence of the first steps, doubled up to --context; 0: --context from the start", int
    )

    steps: int = _option(1000, "optimizer steps; with --resume, more steps extend a run", affects=False)
    batch: int = _option(1, "sequences per process and micro-batch")
    accumulate: int = _option(1, "micro-batches per step")
    rate: float = _option(3e-4, "peak learning rate: linear warm-up, then cosine decay to a tenth")
    warmup: float = _option(0.05, "share of the steps for the warm-up")
    weight_decay: float = _option(0.0, "weight decay of AdamW")
    clip: float = _option(1.0, "largest norm of the gradient; 0: no limit")
    seed: int = _option(0, "seed of the data order, of sampled rows and of dropout")
    precision: str = _option(
        "float32",
        "type of computations and of the teacher's weights; the student's and the optimizer stay in float32",
        choices=("float32", "bfloat16"),
    )
    gradient_checkpointing: bool = _option(
        False, "recompute the student's layers in the backward: less memory, more time"
    )

    shard: bool = _option(
        False, "FSDP2: share weights, gradients and optimizer state among the processes", affects=False
    )

    context_parallel: int = _option(1, "processes that share every sequence, zigzag", affects=False)

    attention_weight: float = _option(0.1, "weight of the attention KL")
    output_weight: float = _option(1.0, "weight of the KL between the output distributions; for a model without a language "
                                   "head, of the squared error of its last hidden states")  # fmt: skip
    language_weight: float = _option(0.0, "weight of the language loss: cross-entropy of the next token")
    hidden_weight: float = _option(0.0, "weight of the squared error of hidden states, relative to those of the teacher: of every "
                                   "student layer and the teacher layer that it learns from")  # fmt: skip
    direction: str = _option("auto", "forward: KL(teacher || student); reverse: KL(student || teacher); auto: reverse where every "
                             "student head learns one teacher head", choices=("auto", "forward", "reverse"))  # fmt: skip
    layer_map: list[int] = _option((), "teacher layer that each student layer learns from; default: evenly spread", int,
                                   many=True)  # fmt: skip
    head_map: list[int] = _option((), "teacher head of each student head; default: the mean of neighboring heads", int,
                                  many=True)  # fmt: skip
    relations: list[str] = _option(("qk",), "what the attention KL compares: qk, the attention, or the relations qq, kk and vv of "
                                   "MiniLMv2", str, many=True, choices=("qk", "qq", "kk", "vv"))  # fmt: skip
    temperature: float = _option(1.0, "divides the logits of the attention KL, which is multiplied by its square")
    sample_rows: float = _option(1.0, "share of the rows that the attention KL compares in a step")
    attention_until: float = _option(1.0, "share of the steps with the attention KL; those after it train without")
    row_weight: str = _option("", "how rows count in the attention KL: far or far:TOKENS, by the teacher's attention to keys "
                              "that far away [far:256]; kl, by their KL; default: all the same")  # fmt: skip
    head_weight: str = _option("same", "how heads count in it: same, or retrieval, by the share of needles that their "
                               "teacher heads find", choices=("same", "retrieval"))  # fmt: skip
    layer_weight: list[float] = _option((), "how student layers count in it; default: all the same", float, many=True)

    eval_sequences: int = _option(8, "held-out sequences that are evaluated; 0: no evaluation", affects=False)
    needles: int = _option(4, "needles per depth and length; 0: no retrieval test", affects=False)
    needle_lengths: list[int] = _option((), "lengths of the retrieval test; default: a quarter of the context, half of it, and "
                                        "all of it", int, many=True, affects=False)  # fmt: skip
    map_layers: list[int] = _option((), "student layers with attention maps in the report; default: up to 4, evenly spread",
                                    int, many=True, affects=False)  # fmt: skip
    map_heads: list[int] = _option((), "student heads with attention maps in the report; default: up to 8, evenly spread",
                                   int, many=True, affects=False)  # fmt: skip
    control: bool = _option(False, "also train the same student without the attention KL, and compare", affects=False)

    eval_every: int = _option(0, "steps between measurements on the held-out sequences; 0: only before and after. OUT/best "
                              "keeps the student of the lowest held-out loss", affects=False)  # fmt: skip
    checkpoint_every: int = _option(
        100, "steps between checkpoints; 0: only when the run ends or is stopped", affects=False
    )
    log_every: int = _option(1, "steps between lines of log.jsonl", affects=False)
    track: list[str] = _option((), "also log to these trackers of accelerate, such as tensorboard (in OUT/streamkl-distill) and wandb",
                               str, many=True, affects=False)  # fmt: skip
    resume: bool = _option(False, "continue from the checkpoint in OUT", affects=False)
    overwrite: bool = _option(False, "replace an earlier run in OUT", affects=False)
    dry_run: bool = _option(
        False, "run two steps, say what would be trained and what it takes, and write nothing", affects=False
    )
    cpu: bool = _option(False, "run on the CPU even if there is a GPU")

    # ---- Checks ------------------------------------------------------------------------------------------------------

    def check(self) -> Options:
        """Every rule about single options. Returns itself."""
        if not self.teacher:
            raise UserError(
                "--teacher: is missing: the folder of a transformers model, a .gguf file or an id of the Hugging Face Hub"
            )
        if not self.data:
            raise UserError("--data: is missing: one or more files with text or tokens")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and least <= value <= most):
                raise UserError(f"--{_dashed(name)}={value}: must be {least}..{'' if most == math.inf else most}")
        if self.student and (self.student_layers or self.student_heads or self.student_key_heads or self.init_layers):
            raise UserError("--student: its folder says its shape: leave out --student-layers, --student-heads, "
                            "--student-key-heads and --init-layers")  # fmt: skip
        others = self.output_weight + self.language_weight + self.hidden_weight
        if self.attention_weight + others == 0:
            raise UserError(
                "--attention-weight, --output-weight, --language-weight, --hidden-weight: at least one must be above 0"
            )
        if self.attention_until < 1 and others == 0:
            raise UserError(f"--attention-until={self.attention_until:g}: needs --output-weight, --language-weight or --hidden-weight "
                            "above 0: the steps after it learn from nothing else")  # fmt: skip
        if self.control and others == 0:
            raise UserError(
                "--control: needs --output-weight, --language-weight or --hidden-weight above 0: the control learns from nothing else"
            )
        if self.control and not self.eval_sequences:
            raise UserError("--control: needs --eval-sequences above 0: it is a comparison on held-out sequences")
        if self.context_parallel > 1 and (
            (self.start_context or self.context) % (2 * self.context_parallel) or self.sample_rows < 1
        ):
            raise UserError(f"--context-parallel={self.context_parallel}: --context and --start-context must be multiples of "
                            "twice as many, and --sample-rows 1")  # fmt: skip
        doublings = self.context / (self.start_context or self.context)
        if doublings < 1 or not math.log2(doublings).is_integer():
            raise UserError(f"--start-context={self.start_context}: --context must be 1, 2, 4, 8, ... times as long")
        try:
            kind, distance = parse_row_weight(self.row_weight or None)
        except ValueError as error:
            raise UserError(f"--{_dashed(str(error))}") from None
        if not all(1 <= length <= self.context for length in self.needle_lengths):
            raise UserError(f"--needle-lengths={self.needle_lengths}: must be 1..{self.context}, the --context")
        if self.head_weight == "retrieval" and not self.needles:
            raise UserError("--head-weight=retrieval: needs --needles above 0")
        if self.row_weight and self.context_parallel > 1:
            raise UserError(f"--row-weight={self.row_weight}: must be left out with --context-parallel")
        if kind == "far" and distance >= self.context:
            raise UserError(
                f"--row-weight=far:{distance}: must be below --context={self.context}: no key is that far away"
            )
        if not all(0 <= weight < math.inf for weight in self.layer_weight) or (
            self.layer_weight and not any(self.layer_weight)
        ):
            raise UserError(f"--layer-weight={self.layer_weight}: must not be negative, and one must be above 0")
        if self.eval_every and not self.eval_sequences:
            raise UserError(f"--eval-every={self.eval_every}: needs --eval-sequences above 0")
        if self.resume and self.overwrite:
            raise UserError("--resume and --overwrite: only one of them")
        return self

    @property
    def lengths(self) -> list[int]:
        """Of the retrieval test."""
        return self.needle_lengths or sorted({max(self.context // 4, 1), max(self.context // 2, 1), self.context})

    def length_at(self, step: int) -> int:
        """Tokens per sequence of a step. Attention at twice the length takes half as many steps: the same time."""
        length, end = self.start_context or self.context, 1.0
        at = (step + 0.5) / self.steps * (2 - length / self.context)  # 1 + 1/2 + 1/4 + ... down to start / context
        while at > end:
            length, end = 2 * length, end + self.start_context / (2 * length)
        return length

    def kl_in_words(self) -> str:
        """The KL of a run whose models are known."""
        return "KL(student || teacher)" if self.direction == "reverse" else "KL(teacher || student)"

    def distiller(self) -> dict[str, Any]:
        """Options of AttentionDistiller, in training and in evaluation."""
        return dict(layer_map=self.layer_map or None, head_map=self.head_map or None, direction=self.direction)

    # ---- TOML --------------------------------------------------------------------------------------------------------

    def as_toml(self) -> str:
        lines = ["# Options of streamkl-distill; --options FILE reads them again."]
        for name, value in dataclasses.asdict(self).items():
            if name in ("resume", "overwrite", "dry_run"):  # options of this call, not of the run
                continue
            lines.append(f"{_dashed(name)} = {json.dumps(value, ensure_ascii=False)}")  # valid TOML for these values
        return "\n".join(lines) + "\n"

    def affecting(self) -> dict[str, Any]:
        """The options that change the weights."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["affects"]}
        if self.head_weight == "retrieval":  # heads are weighted by the needles that they find
            found |= {"needles": self.needles, "needle_lengths": self.lengths}
        return found


_RANGES = {
    "context": (2, math.inf), "steps": (1, math.inf), "batch": (1, math.inf), "accumulate": (1, math.inf),
    "rate": (0, math.inf), "warmup": (0, 1), "weight_decay": (0, math.inf), "clip": (0, math.inf), "seed": (0, 2**31 - 1),
    "attention_weight": (0, math.inf), "output_weight": (0, math.inf), "language_weight": (0, math.inf),
    "hidden_weight": (0, math.inf), "temperature": (1e-6, math.inf),
    "sample_rows": (1e-6, 1), "attention_until": (0, 1), "eval_sequences": (0, math.inf), "needles": (0, math.inf), "checkpoint_every": (0, math.inf), "eval_every": (0, math.inf),
    "log_every": (1, math.inf), "student_layers": (0, math.inf), "student_heads": (0, math.inf),
    "student_key_heads": (0, math.inf), "context_parallel": (1, math.inf), "start_context": (0, math.inf),
}  # fmt: skip

# The options of streamkl-distill eval.
EVALUATION = {
    "teacher", "student", "tokenizer", "out", "data", "text_field", "context", "seed", "precision", "direction", "layer_map",
    "head_map", "eval_sequences", "needles", "needle_lengths", "map_layers", "map_heads", "cpu",
}  # fmt: skip

# Names that other programs have, accepted without a line in --help.
_ALIASES = {
    "--lr": "rate", "--learning-rate": "rate", "--batch-size": "batch", "--per-device-train-batch-size": "batch",
    "--gradient-accumulation-steps": "accumulate", "--max-steps": "steps", "--seq-len": "context", "--seq-length": "context",
    "--max-length": "context", "--output": "out", "--output-dir": "out", "--warmup-ratio": "warmup",
    "--max-grad-norm": "clip", "--report-to": "track", "--eval-steps": "eval_every", "--save-steps": "checkpoint_every",
}  # fmt: skip


def in_bytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def read_toml(path: str) -> dict[str, Any]:
    """{field: value} of a file, checked."""
    try:
        given = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {error}") from error
    fields = {_dashed(f.name): f for f in dataclasses.fields(Options)}
    values = {}
    for name, value in given.items():
        if name not in fields:
            raise UserError(f"{path}: {name}: is no option; `streamkl-distill --help` lists them")
        values[fields[name].name] = _checked(f"{path}: {name}", value, fields[name].metadata)
    return values


def _checked(where: str, value: Any, about: Any) -> Any:
    kind, many = about["kind"], about["many"]
    for each in value if many and isinstance(value, list) else [value]:
        fits = isinstance(each, (int, float) if kind is float else kind) and (kind is bool) == isinstance(each, bool)
        if not fits or many != isinstance(value, list):
            raise UserError(f"{where}={value!r}: must be {'a list of ' * many}{kind.__name__}")
        if about["choices"] and each not in about["choices"]:
            raise UserError(f"{where}={value!r}: must be {' or '.join(about['choices'])}")
    return kind(value) if kind is float and not many else value


def add_arguments(parser: argparse.ArgumentParser, names: set[str] | None = None) -> None:
    """An argument for every option, or for those of `names`. The result has only options that are given."""
    parser.add_argument(
        "--options", metavar="FILE.toml", help="read options from a file; those of the command line win"
    )
    for alias, name in _ALIASES.items():
        if names is None or name in names:
            about = Options.__dataclass_fields__[name].metadata
            parser.add_argument(alias, dest=name, type=about["kind"], nargs="+" if about["many"] else None,
                                help=argparse.SUPPRESS, default=argparse.SUPPRESS)  # fmt: skip
    for f in dataclasses.fields(Options):
        if names is not None and f.name not in names:
            continue
        about, flag = f.metadata, f"--{_dashed(f.name)}"
        default = f.default if f.default is not dataclasses.MISSING else None
        text = about["help"].replace("%", "%%") + ("" if default in (None, "", 0, False) else f" [{default}]")
        common: dict[str, Any] = dict(dest=f.name, help=text, default=argparse.SUPPRESS)
        if about["kind"] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif about["many"] and about["kind"] in (int, float):
            name = "N" if about["kind"] is int else "X"
            parser.add_argument(flag, type=partial(_numbers, about["kind"]), metavar=f"{name},{name},...", **common)
        elif about["many"]:
            names_of = {"track": "NAME", "relations": None}
            parser.add_argument(
                flag, nargs="+", choices=about["choices"] or None, metavar=names_of.get(f.name, "FILE"), **common
            )
        else:
            words = {"row_weight": "HOW"}
            metavar = (
                None if about["choices"] else words.get(f.name) or {int: "N", float: "X"}.get(about["kind"], "DIR")
            )
            parser.add_argument(flag, type=about["kind"], choices=about["choices"] or None, metavar=metavar, **common)


class Parser(argparse.ArgumentParser):
    """Suggests options for those that it does not know."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        for given in (each.partition("=")[0] for each in unknown):
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            alike = difflib.get_close_matches(given, known, 1) if given.startswith("-") else []
            advice = f"; did you mean {alike[0]}?" if alike else "; --help lists the options"
            self.error(f"{given}: is no option{advice}")
        return found


def _numbers(kind: Any, text: str) -> list[Any]:
    return [kind(part) for part in text.split(",")]


def options_from(arguments: argparse.Namespace) -> Options:
    """The options of the file, if one is given, and of the command line."""
    given = dict(vars(arguments))
    path = given.pop("options", None)
    values = read_toml(path) if path else {}
    return Options(**{**values, **given})
