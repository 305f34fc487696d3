"""Teacher and student must have read the same tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ._capture import Capture

_COMPARED = (
    "input_ids",
    "decoder_input_ids",
    "attention_mask",
    "decoder_attention_mask",
    "position_ids",
    "token_type_ids",
)
_NOT_FOR_TEACHER = {
    "past_key_values",
    "num_items_in_batch",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
}
_ADVICE = "run the teacher on the student's batch after the last loss(), or not at all: loss() runs it"


def run_teacher(teacher: Capture, student: Capture) -> None:
    """Runs the teacher on the input of the student's last forward."""
    given = student.root.arguments()
    if "inputs_embeds" in given or "decoder_inputs_embeds" in given:
        raise ValueError(
            "AttentionDistiller: the student ran on inputs_embeds, which are its own embeddings and not the teacher's: run the "
            "teacher on the same tokens before loss(), and pass check_input=False"
        )
    module = teacher.model if student.root.module is student.model else teacher.model.base_model
    accepted = inspect.signature(module.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    unwanted = _NOT_FOR_TEACHER | ({"labels"} if not _needs_labels(student, given) else set())
    kept = {k: v for k, v in given.items() if k not in unwanted and (anything or k in accepted)}
    if "use_cache" in accepted:
        kept["use_cache"] = False  # with a cache, transformers does not look for packed sequences
    if "logits_to_keep" in accepted:
        kept["logits_to_keep"] = 1
    _check_vocabulary(teacher, student, kept)
    with torch.no_grad():
        module(**kept)


def _needs_labels(student: Capture, given: dict[str, Any]) -> bool:
    """An encoder-decoder without decoder_input_ids makes them from the labels."""
    return bool(student.model.config.is_encoder_decoder) and "decoder_input_ids" not in given


def _check_vocabulary(teacher: Capture, student: Capture, given: dict[str, Any]) -> None:
    size_t, size_s = (capture.model.get_input_embeddings().num_embeddings for capture in (teacher, student))
    ids = given.get("input_ids")
    if size_s > size_t and ids is not None and (largest := int(ids.max())) >= size_t:
        raise ValueError(
            f"input_ids contains {largest}: the teacher has {size_t} tokens and the student {size_s}; both must read the same "
            "tokens"
        )


def check_same_input(teacher: Capture, student: Capture) -> None:
    """The teacher that the caller ran has read what the student has read. Compares values only of different tensors."""
    given_t, given_s = teacher.root.arguments(), student.root.arguments()
    if "input_ids" not in given_t or "input_ids" not in given_s:
        names = [
            next((name for name in ("input_ids", "inputs_embeds") if name in given), "other input")
            for given in (given_t, given_s)
        ]
        raise ValueError(
            f"AttentionDistiller: the teacher ran on {names[0]} and the student on {names[1]}, which cannot be compared: pass "
            "check_input=False if both read the same tokens"
        )
    versions_t, versions_s = teacher.root.versions_by_name(), student.root.versions_by_name()
    for name in _COMPARED:
        a, b = given_t.get(name), given_s.get(name)
        if not _same(name, a, b) or (a is b and versions_t.get(name) != versions_s.get(name)):
            raise ValueError(
                f"AttentionDistiller: the teacher ran on another {name} than the student {_shapes(a, b)}: {_ADVICE}"
            )


def _same(name: str, a: Any, b: Any) -> bool:
    if a is b:
        return True
    if a is None or b is None:
        given = a if b is None else b
        # Left out, a mask hides nothing; positions and token types follow from the model.
        return name not in ("attention_mask", "decoder_attention_mask") or bool(given.all())
    return a.shape == b.shape and torch.equal(a.to(b.device), b)


def _shapes(a: Any, b: Any) -> str:
    texts = ["none" if each is None else str(list(each.shape)) for each in (a, b)]
    return f"({texts[0]} and {texts[1]})"
