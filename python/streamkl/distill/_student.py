"""The two models of a run: loaded from folders, or a student made from chosen layers and heads of the teacher."""

from __future__ import annotations

import copy
import json
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Iterator

import torch
import transformers

from ._options import Options, UserError

_LAYER = re.compile(r"^(.*\b(?:layers|layer|h|blocks)\.)(\d+)(\..*)$")
_OUTPUTS = ("o_proj.weight", "out_proj.weight")  # their columns are the heads; rows of all other projections


def load_teacher(options: Options, shows_progress: bool) -> Any:
    """In the type of the computations: nothing trains its weights. Loading keeps buffers such as RoPE's in f32."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.precision]
    return _load_model("teacher", options.teacher, dtype, shows_progress).requires_grad_(False).eval()


def load_student(options: Options, teacher: Any, shows_progress: bool) -> Any:
    """With weights in f32, from its folder or made from the teacher."""
    if options.student:
        return _load_model("student", options.student, torch.float32, shows_progress)
    return make_student(options, teacher)


def _load_model(role: str, folder: str, dtype: torch.dtype, shows_progress: bool) -> Any:
    """The model of a folder, of the class that its config names."""
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"--{role} {folder}: must be a folder with a config.json, as save_pretrained writes it")
    _refuse_code(role, folder, "config.json", "architectures", transformers.PreTrainedModel)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = _class_of(config.architectures, transformers.PreTrainedModel) or transformers.AutoModel
        with nullcontext() if shows_progress else without_bars():
            return kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # a broken file: whatever its library says, the user learns which folder it is
        raise UserError(f"--{role} {folder}: cannot be loaded: {error}") from error


def _class_of(names: Any, base: type) -> Any:
    """The class of transformers that a field of a config names, alone or first in a list; None if there is none."""
    name = names[0] if isinstance(names, list) and names else names
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, base) else None


def _refuse_code(role: str, folder: str | Path, name: str, field: str, base: type) -> None:
    """Raises UserError if the file `name` asks for Python code, and its `field` for no class of transformers.

    Older models have code for what transformers contains by now: transformers then loads its own class.
    """
    try:
        about = json.loads((Path(folder) / name).read_text())
        is_known = _class_of(about.get(field), base) and about.get("model_type") in (
            None,
            *transformers.CONFIG_MAPPING,
        )
        needs_code = about.get("auto_map") and not is_known
    except (OSError, ValueError, AttributeError):  # a missing or broken file, which transformers reports
        return
    if needs_code:
        raise UserError(
            f"--{role} {folder}: {name} asks for Python code (auto_map: {json.dumps(about['auto_map'])}), and streamkl-distill "
            f"runs no code of a folder: use a {field} that transformers contains, or load the {role} in a script of yours and "
            "train with streamkl.hf.AttentionDistiller"
        )


@contextmanager
def without_bars() -> Iterator[None]:
    """Without the progress bars of transformers."""
    had = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if had:
            transformers.utils.logging.enable_progress_bar()


def load_tokenizer(options: Options) -> Any:
    """None if there is none."""
    folder = Path(options.tokenizer or options.teacher)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        return None
    _refuse_code(
        "tokenizer", folder, "tokenizer_config.json", "tokenizer_class", transformers.PreTrainedTokenizerBase
    )
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"--tokenizer {folder}: cannot be loaded: {error}") from error


def make_student(options: Options, teacher: Any) -> Any:
    """A model of the teacher's class with fewer layers and heads, which starts from the teacher's weights."""
    config = copy.deepcopy(teacher.config)
    layers_t, heads_t = config.num_hidden_layers, config.num_attention_heads
    key_heads_t = getattr(config, "num_key_value_heads", None) or heads_t
    layers = options.student_layers or layers_t
    heads = options.student_heads or heads_t
    key_heads = options.student_key_heads or max(key_heads_t * heads // heads_t, 1)
    if layers > layers_t:
        raise UserError(f"--student-layers={layers}: must be 1..{layers_t}, the layers of the teacher")
    for name, count, most in ("heads", heads, heads_t), ("key-heads", key_heads, key_heads_t):
        if count > most or most % count != 0:
            raise UserError(f"--student-{name}={count}: must divide {most}, those of the teacher")
    if heads % key_heads != 0:
        raise UserError(f"--student-key-heads={key_heads}: must divide {heads}, the student's heads")
    chosen = options.init_layers or [(i + 1) * layers_t // layers - 1 for i in range(layers)]
    if len(chosen) != layers or not all(0 <= j < layers_t for j in chosen):
        raise UserError(f"--init-layers={chosen}: must be {layers} numbers from 0 to {layers_t - 1}")

    config.num_hidden_layers, config.num_attention_heads = layers, heads
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = key_heads
    if hasattr(config, "head_dim"):
        config.head_dim = getattr(teacher.config, "head_dim", None) or config.hidden_size // heads_t
    if getattr(config, "layer_types", None):
        config.layer_types = [teacher.config.layer_types[j] for j in chosen]
    config.dtype = torch.float32
    with teacher.device:  # random weights, which those of the teacher replace, take long on a CPU
        student = type(teacher)._from_config(config, attn_implementation=teacher.config._attn_implementation)
    _start_from(student, teacher, chosen, options.init_heads == "pick")
    return student


@torch.no_grad()
def _start_from(student: Any, teacher: Any, layers: list[int], pick: bool) -> None:
    """Copies the teacher's weights: layer i from `layers[i]`, and heads by groups where the student has fewer."""
    source, head_dim = teacher.state_dict(), getattr(student.config, "head_dim", 1)
    for name, target in student.state_dict().items():
        match = _LAYER.match(name)
        name_t = name if match is None else f"{match[1]}{layers[int(match[2])]}{match[3]}"
        if name_t not in source:
            raise UserError(f"--student-layers: {name}: the teacher has no such weight: pass --student DIR")
        target.copy_(_with_fewer_heads(name, source[name_t].to(target.dtype), target.shape, head_dim, pick))


def _with_fewer_heads(name: str, weight: torch.Tensor, shape: torch.Size, head_dim: int, pick: bool) -> torch.Tensor:
    """The heads of a projection, reduced in groups of neighbours. The outputs of a group's heads add up."""
    if weight.shape == shape:
        return weight
    different = [d for d, (a, b) in enumerate(zip(weight.shape, shape)) if a != b]
    if len(different) != 1 or weight.shape[different[0]] % (shape[different[0]] or 1) != 0:
        raise UserError(f"--student-heads: {name} is {list(weight.shape)} in the teacher and {list(shape)} in the student: "
                        "pass --student DIR")  # fmt: skip
    (d,) = different
    heads = weight.unflatten(d, (-1, weight.shape[d] // shape[d], head_dim))  # [..., heads, group, head_dim, ...]
    if pick:
        return heads.select(d + 1, 0).flatten(d, d + 1)
    return (heads.sum(d + 1) if name.endswith(_OUTPUTS) else heads.mean(d + 1)).flatten(d, d + 1)
