"""A student made from chosen layers and heads of the teacher.

The student is built from a config, so that from_pretrained can build it again. A config says in many ways which layer is
what: lists with an entry per layer, periods, numbers of layers. So every layer is compared with the teacher layer whose
weights it starts from: classes, settings such as the use of RoPE, names and shapes of weights.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch

from ..hf._maps import nearest_layer
from ._options import Options, UserError

_FOLDER = "pass a student of your own with --student DIR"
# Config fields with the numbers of those layers that are special.
_NUMBERS = ("attn_layer_indices", "cross_attention_layers", "full_attn_idxs", "mlp_only_layers", "moe_layers")
# Config lists that have no entry per layer, whatever their length.
_NOT_BY_LAYER = re.compile(r"multipliers|limit|token|range")
# Settings of modules that differ between layers, and those that differ between models with other heads.
_OF_LAYER = re.compile(r"layer_(id|idx|index|number)|block_idx")
_OF_HEADS = re.compile(r"head|group|scal|size|dim|norm_factor|features|channels|shape")
# Parameters of an attention with a part per head: along rows, or along the columns of an output projection.
_PER_HEAD = re.compile(r"\b(q_proj|q_b_proj|kv_b_proj|q_norm|query|sinks)\b")
_PER_KEY_HEAD = re.compile(r"\b(k_proj|v_proj|k_norm|v_norm|key|value)\b")
_OUTPUTS = re.compile(r"\b(o_proj|out_proj|dense)\b")
_FUSED = re.compile(r"\bqkv_proj\b")  # rows of queries, then of keys, then of values


def make_student(options: Options, teacher: Any) -> Any:
    """A model of the teacher's class with fewer layers and heads, which starts from the teacher's weights."""
    if teacher.config.is_encoder_decoder:
        raise UserError(
            f"--student-layers, --student-heads: {type(teacher).__name__} is an encoder-decoder: {_FOLDER}"
        )
    sizes = _Sizes(options, teacher)
    even = [nearest_layer(range(sizes.layers_t), i, sizes.layers, sizes.layers_t) for i in range(sizes.layers)]
    chosen = options.init_layers or even
    if len(chosen) != sizes.layers or not all(0 <= j < sizes.layers_t for j in chosen):
        raise UserError(f"--init-layers={chosen}: must be {sizes.layers} numbers from 0 to {sizes.layers_t - 1}")
    stack = _stack_of(teacher, sizes.layers_t)
    try:
        config = _config_of(teacher, sizes, chosen)
        with teacher.device:  # drawing random weights, which the teacher's replace, takes long on a CPU
            student = type(teacher)._from_config(config, attn_implementation=teacher.config._attn_implementation)
        _run(student)
    except Exception as error:  # whatever its config or its modules do not accept
        raise UserError(f"--student-layers, --student-heads: {type(teacher).__name__} does not run with {sizes}: {error!r}: "
                        f"{_FOLDER}") from error  # fmt: skip
    layers_t, layers_s = teacher.get_submodule(stack), student.get_submodule(stack)
    if len(layers_s) != sizes.layers:
        raise UserError(
            f"--student-layers={sizes.layers}: {type(teacher).__name__} still has {len(layers_s)} layers: {_FOLDER}"
        )
    if not options.init_layers:
        chosen = _alike(layers_t, layers_s, even, sizes)
    for i, j in enumerate(chosen):
        if difference := _difference(layers_t[j], layers_s[i], sizes):
            raise UserError(f"--init-layers={chosen}: student layer {i} is no copy of teacher layer {j}: {difference}: "
                            f"choose other layers, or {_FOLDER}")  # fmt: skip
    _start_from(student, teacher, stack, chosen, sizes, options.init_heads == "pick")
    return student


@torch.no_grad()
def _run(student: Any) -> None:
    """Some sizes fit together only when the model runs."""
    student.eval()(input_ids=torch.zeros(1, 4, dtype=torch.int64, device=student.device))
    student.train()


class _Sizes:
    """Layers, heads and key heads of both models, checked."""

    def __init__(self, options: Options, teacher: Any) -> None:
        config = teacher.config.get_text_config(decoder=True)
        try:
            self.layers_t, self.heads_t = config.num_hidden_layers, config.num_attention_heads
        except AttributeError as error:
            raise UserError(f"--student-layers, --student-heads: the config of {type(teacher).__name__}: {error}: "
                            f"{_FOLDER}") from error  # fmt: skip
        self.key_heads_t = getattr(config, "num_key_value_heads", None) or self.heads_t
        self.layers = options.student_layers or self.layers_t
        self.heads = options.student_heads or self.heads_t
        self.key_heads = options.student_key_heads or max(self.key_heads_t * self.heads // self.heads_t, 1)
        if self.layers > self.layers_t:
            raise UserError(f"--student-layers={self.layers}: must be 1..{self.layers_t}, the layers of the teacher")
        for name, count, most in ("heads", self.heads, self.heads_t), ("key-heads", self.key_heads, self.key_heads_t):
            if count > most or most % count != 0:
                raise UserError(f"--student-{name}={count}: must divide {most}, those of the teacher")
        if self.heads % self.key_heads != 0:
            raise UserError(f"--student-key-heads={self.key_heads}: must divide {self.heads}, the student's heads")
        if getattr(config, "kv_lora_rank", None) and self.heads * self.key_heads_t != self.key_heads * self.heads_t:
            raise UserError(
                f"--student-key-heads={self.key_heads}: must be 0: multi-head latent attention has keys per head"
            )
        self.has_rope = getattr(config, "rope_parameters", None) is not None
        self.has_other_heads = (self.heads, self.key_heads) != (self.heads_t, self.key_heads_t)

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.heads} heads and {self.key_heads} key heads"


def _stack_of(teacher: Any, count: int) -> str:
    """The name of the list of layers, of the language model where there are several."""
    text = teacher.get_decoder() if hasattr(teacher, "get_decoder") else teacher.base_model
    inside = set(map(id, text.modules()))
    stacks = [
        name
        for name, module in teacher.named_modules()
        if isinstance(module, torch.nn.ModuleList) and id(module) in inside and len(module) == count
    ]
    outermost = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    if len(outermost) != 1:
        raise UserError(f"--student-layers, --student-heads: {type(teacher).__name__} has {len(outermost)} lists of {count} "
                        f"layers, not one: {_FOLDER}")  # fmt: skip
    return outermost[0]


def _config_of(teacher: Any, sizes: _Sizes, chosen: list[int]) -> Any:
    """The teacher's config with the student's numbers, and lists by layer as the chosen layers have them."""
    config = copy.deepcopy(teacher.config)
    text = config.get_text_config(decoder=True)
    lists = {
        name: type(value)(value[j] for j in chosen)
        for name, value in vars(text).items()
        if isinstance(value, (list, tuple)) and len(value) == sizes.layers_t and not _NOT_BY_LAYER.search(name)
    }
    for name in _NUMBERS:
        if isinstance(numbers := getattr(text, name, None), list):
            lists[name] = [i for i, j in enumerate(chosen) if j in numbers]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // sizes.heads_t
    text.num_hidden_layers, text.num_attention_heads = sizes.layers, sizes.heads
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = sizes.key_heads
    is_derived = isinstance(getattr(type(text), "head_dim", None), property) or getattr(
        text, "qk_rope_head_dim", None
    )
    if (hasattr(text, "head_dim") or sizes.has_rope) and not is_derived:
        text.head_dim = head_dim  # without RoPE, neighboring heads may become one wide head
    for name, value in lists.items():
        setattr(text, name, value)
    config.dtype = torch.float32
    return config


# ---- Which layer is a copy of which ----------------------------------------------------------------------------------


def _alike(layers_t: Any, layers_s: Any, even: list[int], sizes: _Sizes) -> list[int]:
    """For each student layer, in order, the teacher layer nearest to an even spread that it can be a copy of.

    Where a config says by a period which layers attend, the student's layers have the order that the period gives them.
    """
    chosen: list[int] = []
    for i, layer in enumerate(layers_s):
        first = chosen[-1] + 1 if chosen else 0
        fits = [j for j in range(first, len(layers_t)) if not _difference(layers_t[j], layer, sizes)]
        chosen.append(nearest_layer(fits or even[i : i + 1], i, len(layers_s), len(layers_t)))
    return chosen


def _difference(layer_t: Any, layer_s: Any, sizes: _Sizes) -> str:
    """What keeps a student layer from being a copy of a teacher layer; empty if nothing does."""
    modules_t, modules_s = dict(layer_t.named_modules()), dict(layer_s.named_modules())
    for name in sorted(modules_t.keys() ^ modules_s.keys()):
        return f"only the {'teacher' if name in modules_t else 'student'} has {name}"
    for name, module_t in modules_t.items():
        module_s, where = modules_s[name], name or "the layer"
        if type(module_t) is not type(module_s):
            return f"{where} is a {type(module_s).__name__}, not a {type(module_t).__name__}"
        settings_t, settings_s = (_settings(each, sizes) for each in (module_t, module_s))
        for setting in sorted(settings_t.keys() | settings_s.keys()):
            a, b = settings_t.get(setting), settings_s.get(setting)
            if a != b:
                return f"{where} has {setting}={b!r}, not {a!r}"
    shapes_t, shapes_s = ({n: p.shape for n, p in each.named_parameters()} for each in (layer_t, layer_s))
    if not sizes.has_other_heads and shapes_t != shapes_s:
        return "its weights have other shapes"
    return ""


def _settings(module: Any, sizes: _Sizes) -> dict[str, Any]:
    """Plain values of a module that are the same in a copy of it. With RoPE, a head keeps its size."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, type(None)))
        and name != "training"
        and not _OF_LAYER.search(name)
        and not (sizes.has_other_heads and _OF_HEADS.search(name) and not (name == "head_dim" and sizes.has_rope))
    }


# ---- Weights ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _start_from(student: Any, teacher: Any, stack: str, layers: list[int], sizes: _Sizes, pick: bool) -> None:
    """Copies the teacher's weights: layer i from `layers[i]`, and heads by groups where the student has fewer."""
    source, layer = teacher.state_dict(), re.compile(rf"^{re.escape(stack)}\.(\d+)\.(.*)$")
    for name, target in student.state_dict().items():
        match = layer.match(name)
        name_t = name if match is None else f"{stack}.{layers[int(match[1])]}.{match[2]}"
        if name_t not in source:
            raise UserError(f"--student-layers: {name}: the teacher has no such weight: {_FOLDER}")
        target.copy_(_with_fewer_heads(name, source[name_t].to(target.dtype), target.shape, sizes, pick))


def _with_fewer_heads(name: str, weight: torch.Tensor, shape: torch.Size, sizes: _Sizes, pick: bool) -> torch.Tensor:
    """The heads of a projection, reduced in groups of neighbors. The outputs of a group's heads add up."""
    if weight.shape == shape:
        return weight
    different = [d for d, (a, b) in enumerate(zip(weight.shape, shape)) if a != b]
    per_head, per_key_head = (sizes.heads_t, sizes.heads), (sizes.key_heads_t, sizes.key_heads)
    if _FUSED.search(name):
        parts = [per_head, per_key_head, per_key_head]
    elif _PER_HEAD.search(name) or (_OUTPUTS.search(name) and different == [1]):
        parts = [per_head]
    elif _PER_KEY_HEAD.search(name):
        parts = [per_key_head]
    else:
        parts = []
    heads_t, heads_s = (sum(part[side] for part in parts) for side in (0, 1))
    d = different[0] if len(different) == 1 else 0
    if len(different) != 1 or not parts or weight.shape[d] * heads_s != shape[d] * heads_t:
        raise UserError(f"--student-heads: {name} is {list(weight.shape)} in the teacher and {list(shape)} in the student: "
                        f"which part is a head's is not known: {_FOLDER}")  # fmt: skip
    size = weight.shape[d] // heads_t  # rows of one head
    reduced, begin = [], 0
    for count_t, count_s in parts:
        heads = weight.narrow(d, begin, count_t * size).unflatten(d, (count_s, count_t // count_s, size))
        adds_up = _OUTPUTS.search(name) and not pick
        group = heads.select(d + 1, 0) if pick else heads.sum(d + 1) if adds_up else heads.mean(d + 1)
        reduced.append(group.flatten(d, d + 1))
        begin += count_t * size
    return torch.cat(reduced, d)
