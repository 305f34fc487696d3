"""What a finished run leaves: the model with its card, and the report with its data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._checkpoint import clear_errors, write_json, write_text
from ._evaluate import Evaluation
from ._options import in_bytes
from ._report import document, page, verdict
from ._student import without_bars

if TYPE_CHECKING:
    from ._loop import Run


def write_results(run: Run, weights: dict[str, Any]) -> None:
    """OUT/student, OUT/evaluation.json and OUT/report.html."""
    write_model(run.out / "student", run, weights, _results(run.before, run.after))
    write_report(run)


def write_report(run: Run, control: Evaluation | None = None) -> None:
    """OUT/evaluation.json and OUT/report.html."""
    found = dict(before=run.before, after=run.after, control=control)
    evaluations = {name: evaluation for name, evaluation in found.items() if evaluation is not None}
    data = {name: found.as_json() for name, found in evaluations.items()}
    write_json(run.out / "evaluation.json", data)
    _write_page(run, evaluations, measured=run.measured)


def write_divergence(run: Run, what: str) -> None:
    """OUT/report.html of a run that has diverged."""
    _write_page(run, {}, diverged=what)


def _write_page(run: Run, evaluations: dict[str, Evaluation], **more: Any) -> None:
    tokens = run.tokens_per_step()
    report = document(run.options, evaluations, run.history, run.student, run.teacher, tokens_per_step=tokens, **more)
    write_text(run.out / "report.html", page(report))


def write_model(folder: Path, run: Run, weights: dict[str, Any], results: list[str]) -> None:
    """A folder for from_pretrained, complete or not there. Its model card has the lines `results`."""
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for left in new, old:
        shutil.rmtree(left, ignore_errors=True)
    try:
        with clear_errors(folder), without_bars():
            run.student.save_pretrained(new, state_dict=weights)
            if run.tokenizer is not None:
                run.tokenizer.save_pretrained(new)
            (new / "README.md").write_text(model_card(run, results))
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def model_card(run: Run, results: list[str]) -> str:
    """Teacher, data, and what was measured."""
    options = run.options
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
        *results,
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


# ---- What a run prints -----------------------------------------------------------------------------------------------


def summary(run: Run, control: Evaluation | None) -> str:
    """The numbers of the report that come first, as a table."""
    lines = []
    if run.before is not None and run.after is not None:
        columns = {"before": run.before, "after": run.after, **({"control": control} if control else {})}
        lines.append(
            f"{f'on {run.after.sequences} held-out sequences':40}" + "".join(f"{name:>12}" for name in columns)
        )
        for label, value in _measures(run.after).items():
            lines.append(f"{label:40}" + "".join(f"{value(found):>12}" for found in columns.values()))
        lines.append(verdict(columns))
    if run.history:
        tokens = run.tokens_per_step()
        speed = run.step * tokens / max(run.seconds, 1e-9)
        memory = max(entry["memory"] for entry in run.history)
        lines.append(
            f"{run.step} steps of {tokens:,} tokens in {run.seconds:,.1f} s: {speed:,.0f} tokens/s, {in_bytes(memory)}"
        )
    if run.measured:
        lines.append(f"lowest held-out loss {run.best['loss']:.4g} at step {run.best['step']}: {run.out / 'best'}")
    return "\n".join(lines)


def _measures(after: Evaluation) -> dict[str, Callable[[Evaluation], str]]:
    """{label: text of its value}, of what was evaluated."""
    found: dict[str, Callable[[Evaluation], str]] = {"attention KL, nats": lambda each: f"{each.kl:.4g}"}
    if after.output_kl is not None:
        found["output KL, nats"] = lambda each: f"{each.output_kl:.4g}"
    if after.language:
        of_teacher = _mean(after.language["teacher"])
        found[f"language loss, nats (teacher {of_teacher})"] = lambda each: _mean(each.language["student"])
    for result in after.retrieval:
        for kind, label in ("attention", "needles found"), ("answers", "values answered"):
            if result[kind]["teacher"] is not None:
                name = f"{label} at {result['length']}, % (teacher {_mean(result[kind]['teacher'], 100)})"
                found[name] = partial(_share_found, result["length"], kind)
    return found


def _share_found(length: int, kind: str, found: Evaluation) -> str:
    """Empty without this length: a run can be resumed with other needles."""
    shares = [result[kind]["student"] for result in found.retrieval if result["length"] == length]
    return _mean(shares[0], 100) if shares else ""


def _mean(values: list[float | None], factor: float = 1) -> str:
    known = [value for value in values if value is not None]
    return f"{factor * sum(known) / len(known):.4g}" if known else ""


def rehearsal(run: Run, seconds: float, memory: int) -> str:
    """What a run would train, and what it takes. The step that was timed has not the longest context of a schedule."""
    options = run.options
    lines = []
    for role, model in ("teacher", run.teacher), ("student", run.student):
        config = model.config.get_text_config()
        lines.append(f"{role}  {type(model).__name__}: {model.num_parameters():,} parameters, {config.num_hidden_layers} layers, "
                     f"{config.num_attention_heads} heads")  # fmt: skip
    held_out = f"{len(run.held_out)} sequences" if options.eval_sequences else "nothing"
    lines.append(f"data     {len(run.training)} sequences of {options.context} tokens; {held_out} held out")
    ids = run.training.batch([0]).to(run.accelerator.device)
    lines += run.wrapped(partial(run.objective.pairs_in_words, ids))
    lines.append(f"loss     {options.attention_weight:g} x attention KL, {options.kl_in_words()}")
    tokens = run.tokens_per_step()
    total = seconds * options.steps
    lines.append(f"time     {seconds:.3g} s per step of {tokens:,} tokens: {options.steps} steps take {_duration(total)}, "
                 f"without evaluation{' and the control' if options.control else ''}")  # fmt: skip
    lines.append(f"memory   {in_bytes(memory)} at most in two steps, {run.accelerator.device.type}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
