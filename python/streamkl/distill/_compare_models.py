"""streamkl-distill eval: two models on held-out data, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..hf._maps import direction_of
from ._checkpoint import write_json, write_text
from ._data import load_all
from ._device import make_accelerator
from ._evaluate import evaluate
from ._options import Options
from ._report import document, page
from ._student import check_tokenizers, load_student, load_teacher, load_tokenizer


def compare_models(options: Options) -> tuple[Path, dict[str, Any]]:
    """Writes OUT/report.html and OUT/evaluation.json. All data counts as held out."""
    accelerator = make_accelerator(options)
    shows = accelerator.is_main_process
    teacher = load_teacher(options, shows).to(accelerator.device)
    student = load_student(options, teacher, shows).to(accelerator.device).eval()
    options.direction = direction_of(options.direction, bool(options.head_map), teacher, student)
    tokenizer = load_tokenizer(options)
    check_tokenizers(options, tokenizer)
    held_out = load_all(options.data, options, tokenizer, teacher)
    found = evaluate(teacher, student, held_out, options, context=accelerator.autocast)
    out = Path(options.out)
    if accelerator.is_main_process:
        write_json(out / "evaluation.json", {"student": found.as_json()})
        write_text(out / "report.html", page(document(options, {"student": found}, [], student, teacher)))
    return out, found.as_json()
