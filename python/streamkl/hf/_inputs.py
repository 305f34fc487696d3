"""Teacher and student must have read the same tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .._options import Parallel
from ._capture import Capture
from ._layers import Kind, Layer

_NOT_COMPARED = {"past_key_values", "inputs_embeds", "decoder_inputs_embeds", "cache_position"}
# Inputs of a model's own loss: they change no attention.
_FOR_LOSS = ("label", "start_positions", "end_positions", "num_items_in_batch")
# Inputs that a model has computed itself.
_OF_ONE_MODEL = {
    "inputs_embeds": "its own embeddings", "decoder_inputs_embeds": "its own embeddings", "encoder_outputs": "its own hidden states"
}  # fmt: skip
_MASKS = ("attention_mask", "decoder_attention_mask")
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
    given = student.step.arguments()
    for name, what in _OF_ONE_MODEL.items():
        if name in given:
            raise ValueError(
                f"AttentionDistiller: the student ran on {name}, which are {what} and not the teacher's: run the teacher on the same "
                "tokens before loss(), and pass check_input=False"
            )
    ids, mask = (given.get(name) for name in ("input_ids", "attention_mask"))
    if "past_key_values" in given and ids is not None and mask is not None and ids.shape[1] < mask.shape[-1]:
        raise ValueError(
            f"AttentionDistiller: the student ran on {ids.shape[1]} tokens after {mask.shape[-1] - ids.shape[1]} keys of "
            "past_key_values, as in prefix tuning, which the teacher does not have: train the student without them"
        )
    module = teacher.model if student.step.module is student.model else teacher.model.base_model
    accepted = inspect.signature(module.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    unwanted = _NOT_FOR_TEACHER | ({"labels"} if not _needs_labels(student, given) else set())
    kept = {k: v for k, v in given.items() if k not in unwanted and (anything or k in accepted)}
    if "use_cache" in accepted:
        kept["use_cache"] = False  # transformers looks for packed sequences only without a cache
    if "logits_to_keep" in accepted:
        kept["logits_to_keep"] = 1
    _check_vocabulary(teacher, student, kept)
    for name, version in student.step.versions_by_name().items():
        if name in kept and kept[name]._version != version:
            raise ValueError(
                f"AttentionDistiller: {name} has changed in place since the student ran, so the teacher would read something else: call "
                "loss() before the change, or give the student a copy"
            )
    if (device := device_of(teacher.model)) is not None:
        kept = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in kept.items()}
    with teacher.running(), torch.no_grad():
        teacher.model.eval()
        module(**kept)
    if not teacher.has_run:
        raise RuntimeError(
            f"AttentionDistiller: the forward of the teacher, {type(module).__name__}, was not captured"
        )


def device_of(model: Any) -> torch.device | None:
    """The device of a model; None: accelerate has spread or offloaded its parameters, and moves the inputs itself."""
    is_spread = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    return None if is_spread or model.device.type == "meta" else model.device


def predicts_next_token(model: Any) -> bool:
    """Whether row i of a model predicts label i + 1: else each row has the label of its own token."""
    of_own_token = getattr(model, "loss_type", None) in ("ForMaskedLM", "ForTokenClassification")
    return not model.config.is_encoder_decoder and not of_own_token


def _needs_labels(student: Capture, given: dict[str, Any]) -> bool:
    """An encoder-decoder without decoder_input_ids makes them from the labels."""
    return bool(student.model.config.is_encoder_decoder) and "decoder_input_ids" not in given


def _check_vocabulary(teacher: Capture, student: Capture, given: dict[str, Any]) -> None:
    ids = given.get("input_ids")
    if ids is None:  # a model that sees or hears has none
        return
    sizes = [_vocabulary(capture.model.get_input_embeddings()) for capture in (teacher, student)]
    if sizes[1] > sizes[0] and (largest := int(ids.max())) >= sizes[0]:
        raise ValueError(
            f"input_ids contains {largest}: the teacher has {sizes[0]} tokens and the student {sizes[1]}; both must read the same "
            "tokens"
        )


def _vocabulary(embeddings: torch.nn.Module) -> int:
    """The number of tokens; an adapter of PEFT wraps the module that has it."""
    sizes = (getattr(each, "num_embeddings", None) for each in embeddings.modules())
    return next(size for size in sizes if size is not None)


def check_same_input(teacher: Capture, student: Capture) -> None:
    """The teacher that the caller ran has read what the student has read. Compares values only of different tensors."""
    given_t, given_s = (_with_decoder_ids(capture) for capture in (teacher, student))
    inputs = [_main_input(capture, given) for capture, given in ((teacher, given_t), (student, given_s))]
    if inputs[0] != inputs[1] or inputs[0] not in given_t:
        raise ValueError(
            f"AttentionDistiller: the teacher ran on {inputs[0]} and the student on {inputs[1]}, which cannot be compared: pass "
            "check_input=False if both read the same tokens"
        )
    versions_t, versions_s = teacher.step.versions_by_name(), student.step.versions_by_name()
    for name in {**given_t, **given_s}:
        a, b = given_t.get(name), given_s.get(name)
        if name in _NOT_COMPARED or any(part in name for part in _FOR_LOSS):
            continue
        if not any(isinstance(each, torch.Tensor) for each in (a, b)):
            continue
        if (a is None or b is None) and not all(_takes(capture, name) for capture in (teacher, student)):
            continue  # the other model has no such input
        if not _same(name, a, b) or (a is b and versions_t.get(name) != versions_s.get(name)):
            raise ValueError(
                f"AttentionDistiller: the teacher ran on another {name} than the student {_shapes(a, b)}: {_ADVICE}"
            )


def _with_decoder_ids(capture: Capture) -> dict[str, Any]:
    """The arguments of a forward. An encoder-decoder makes the tokens of its decoder from labels, unless it received them."""
    given = capture.step.arguments()
    if not capture.model.config.is_encoder_decoder or given.get("labels") is None or "decoder_input_ids" in given:
        return given
    make = getattr(capture.model, "prepare_decoder_input_ids_from_labels", None)
    return {**given, "decoder_input_ids": given["labels"] if make is None else make(given["labels"])}


def _takes(capture: Capture, name: str) -> bool:
    return name in inspect.signature(capture.step.module.forward).parameters


def _main_input(capture: Capture, given: dict[str, Any]) -> str:
    main: Any = capture.step.module.main_input_name
    if main in given:
        return main
    return next((name for name in ("input_ids", "inputs_embeds") if name in given), "other input")


def _same(name: str, a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.equal(a.to(b.device), b)
    given = a if isinstance(a, torch.Tensor) else b
    if name in _MASKS:  # left out, a mask hides nothing
        return bool(given.all())
    if name == "position_ids":  # left out, tokens are counted; packed sequences count again
        return torch.equal(given, torch.arange(given.shape[-1], device=given.device).expand_as(given))
    return name == "token_type_ids" and not given.any()  # left out, all tokens are of type 0


def _shapes(a: Any, b: Any) -> str:
    texts = [str(list(each.shape)) if isinstance(each, torch.Tensor) else "none" for each in (a, b)]
    return f"({texts[0]} and {texts[1]})"


def check_packing(student: Capture, role: str, layers: list[Layer]) -> None:
    """The layers of a model separate the packed sequences that the student has read.

    transformers does so only without an attention_mask and without a cache, and not in every model; otherwise it says nothing.
    """
    positions = student.step.arguments().get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
        return
    token = torch.arange(positions.shape[1], device=positions.device)
    begin = torch.where(positions == 0, token, 0).cummax(1).values  # first token of each token's sequence
    checked = set()  # layers share their keys, and every check waits for the GPU
    for layer in layers:
        if layer.keys is None or layer.refusal is not None or layer.kind == "cross" or layer.keys.len_q != len(token):
            continue
        if id(layer.keys) in checked:
            continue
        checked.add(id(layer.keys))
        keys_begin = layer.keys.begin.to(begin.device)
        crosses = (keys_begin < begin) & (keys_begin < layer.keys.end.to(begin.device))
        crosses = crosses if layer.counted is None else crosses & layer.counted.to(begin.device)
        if bool(crosses.any()):
            row = int(crosses.any(0).nonzero()[0])
            raise ValueError(
                f"{role}: position_ids begin again before row {row}, but {layer.name} attends to the keys before: packed sequences "
                "need use_cache=False and no attention_mask"
            )


def check_shards(student: Capture, layers: list[Layer], attention: Kind, parallel: Parallel) -> None:
    """Refuses padding and packed sequences under context parallelism: an attention over shards receives no mask that shows them.

    The ranks exchange what they have read, so that all of them raise the error: the others would wait for one that does.
    """
    from ..parallel import Groups, unshard
    from ..parallel._layout import check_lengths

    groups, given = Groups(parallel), student.step.arguments()
    device, length = layers[0].q.device, layers[0].q.shape[2]
    is_decoder = student.model.config.is_encoder_decoder and attention == "self"
    for name in _MASKS if attention == "cross" else [_MASKS[is_decoder]]:
        mask = given.get(name)
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            continue
        hides = (mask == 0).any().long().to(device)[None]
        if bool((hides if groups.cp is None else unshard(hides, groups.cp, 0, layout="contiguous")).any()):
            raise ValueError(
                f"AttentionDistiller: {name} hides tokens, and padding is not supported under context parallelism: must be left out or all "
                "ones. For a causal model, pad at the end, leave it out, and pass loss(row_weight=...) with 0 for padding"
            )
    bounds = given.get("cu_seq_lens_q")
    fault = "cu_seq_lens_q names several sequences" if isinstance(bounds, torch.Tensor) and len(bounds) > 2 else None
    positions = given.get("decoder_position_ids" if is_decoder else "position_ids")
    if isinstance(positions, torch.Tensor) and positions.shape[-1] == length:
        positions = positions[0] if positions.dim() == 3 else positions  # rotary variants: the first row is time
        check_lengths(groups.layout, "position_ids", length, None)
        positions = positions.to(device)
        if groups.cp is not None:
            positions = unshard(positions, groups.cp, -1, layout=groups.layout.name)
        if bool((positions.diff(dim=-1) < 0).any()):
            fault = f"position_ids decrease along the sequence, in the order of layout={groups.layout.name!r}"
    if fault is not None:
        raise ValueError(
            f"AttentionDistiller: {fault}, and packed sequences are not supported under context parallelism: each row of the batch must be "
            "one sequence, cut as streamkl.parallel.shard cuts it; pass the layout of your shards in parallel=streamkl.Parallel(...)"
        )
