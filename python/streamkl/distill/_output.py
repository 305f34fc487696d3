"""What a finished run leaves: the model with its card, and the report with its data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._checkpoint import clear_errors, write_text
from ._evaluate import Evaluation
from ._report import document, page
from ._student import without_bars

if TYPE_CHECKING:
    from ._loop import Run


def write_results(run: Run, weights: dict[str, Any], control: Evaluation | None) -> None:
    """OUT/student, OUT/evaluation.json and OUT/report.html."""
    found = dict(before=run.before, after=run.after, control=control)
    evaluations = {name: evaluation for name, evaluation in found.items() if evaluation is not None}
    data = {name: found.as_json() for name, found in evaluations.items()}
    write_model(run.out / "student", run, weights)
    write_text(run.out / "evaluation.json", json.dumps(data))
    report = document(run.options, evaluations, run.history, run.student, run.teacher)
    write_text(run.out / "report.html", page(report))


def write_model(folder: Path, run: Run, weights: dict[str, Any]) -> None:
    """A folder for from_pretrained, complete or not there."""
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for left in new, old:
        shutil.rmtree(left, ignore_errors=True)
    try:
        with clear_errors(folder), without_bars():
            run.student.save_pretrained(new, state_dict=weights)
            if run.tokenizer is not None:
                run.tokenizer.save_pretrained(new)
            (new / "README.md").write_text(model_card(run))
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def model_card(run: Run) -> str:
    """Teacher, data, and the KL before and after."""
    options, before, after = run.options, run.before, run.after
    config_t, config_s = (model.config.get_text_config() for model in (run.teacher, run.student))
    lines = [
        "---",
        "library_name: transformers",
        "tags: [distillation, streamkl]",
        "---",
        "",
        f"# {Path(options.out).name}",
        "",
        "A student that learnt where its teacher attends, trained by `streamkl-distill`.",
        "",
        "| | teacher | student |",
        "|---|---|---|",
        f"| model | {_text(options.teacher)} | {type(run.student).__name__} |",
        f"| layers | {config_t.num_hidden_layers} | {config_s.num_hidden_layers} |",
        f"| attention heads | {config_t.num_attention_heads} | {config_s.num_attention_heads} |",
        f"| parameters | {run.teacher.num_parameters():,} | {run.student.num_parameters():,} |",
        "",
        f"Data: {', '.join(_text(Path(path).name) for path in options.data)}: {len(run.training)} sequences of "
        f"{options.context} tokens, digest {run.digest}. {run.step} steps of {run.tokens_per_step()} tokens.",
        "",
        *_results(before, after),
        "",
        "`options.toml` in the folder of the run has all options.",
        "",
    ]
    return "\n".join(lines)


def _results(before: Evaluation | None, after: Evaluation | None) -> list[str]:
    if before is None or after is None:
        return ["The student was not evaluated (`--eval-sequences 0`); `streamkl-distill eval` does it."]
    lines = [
        f"| on {after.sequences} held-out sequences | before | after |",
        "|---|---|---|",
        f"| attention KL, nats | {before.kl:.4g} | {after.kl:.4g} |",
    ]
    if after.output_kl is not None and before.output_kl is not None:
        lines.append(f"| output KL, nats | {before.output_kl:.4g} | {after.output_kl:.4g} |")
    for (i, j), first, last in zip(after.pairs, before.kl_layer, after.kl_layer):
        lines.append(f"| attention KL of layer {i}, which learns from teacher layer {j} | {first:.4g} | {last:.4g} |")
    return lines


def _text(value: str) -> str:
    """Safe inside a table of Markdown."""
    return value.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
