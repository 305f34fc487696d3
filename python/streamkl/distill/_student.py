"""The two models of a run, and the tokenizer of their data: from folders, GGUF files or the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import torch
import transformers

from ._make_student import make_student
from ._options import Options, UserError

_PROBE = "The 12 quick foxes, naïve as ever:\n\tdef jump(over): return 3.14  # dogs"


def load_teacher(options: Options, shows_progress: bool) -> Any:
    """In the type of the computations: nothing trains its weights. Loading keeps buffers such as RoPE's in f32."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.precision]
    return _load_model("teacher", options.teacher, dtype, shows_progress).requires_grad_(False).eval()


def load_student(options: Options, teacher: Any, shows_progress: bool) -> Any:
    """With weights in f32, from its folder or made from the teacher."""
    if options.student:
        return _load_model("student", options.student, torch.float32, shows_progress)
    return make_student(options, teacher)


class _Source(NamedTuple):
    """A folder as save_pretrained writes it, or a GGUF file in a folder, with the arguments of from_pretrained."""

    folder: Path
    arguments: dict[str, Any]


_OF_THE_HUB = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja"]


def _find(role: str, given: str) -> _Source:
    """The folder or file of this name, or a snapshot of the Hub: from its cache, or downloaded."""
    path = Path(given)
    if path.suffix == ".gguf" and path.is_file():
        if find_spec("gguf") is None:
            raise UserError(f"--{role} {given}: needs the package gguf: pip install gguf")
        return _Source(path.parent, dict(gguf_file=path.name))
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        return _Source(path, {})
    from huggingface_hub import snapshot_download

    try:
        return _Source(Path(snapshot_download(given, allow_patterns=_OF_THE_HUB)), {})
    except Exception as error:  # offline, unknown or private: its message says which
        raise UserError(
            f"--{role} {given}: is no folder, and cannot be had from the Hugging Face Hub: {error}"
        ) from error


def _load_model(role: str, given: str, dtype: torch.dtype, shows_progress: bool) -> Any:
    """A model of the class that its config names; of a GGUF file, a causal language model with dequantized weights."""
    folder, arguments = _find(role, given)
    if not arguments and not (folder / "config.json").is_file():
        raise UserError(f"--{role} {given}: must be a folder with a config.json, as save_pretrained writes it, a .gguf file, or an "
                        "id of the Hugging Face Hub")  # fmt: skip
    _refuse_code(role, folder, "config.json", "architectures", transformers.PreTrainedModel)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, **arguments)
        default = transformers.AutoModelForCausalLM if arguments else transformers.AutoModel
        kind = _class_of(config.architectures, transformers.PreTrainedModel) or default
        with nullcontext() if shows_progress else without_bars():
            model = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False, **arguments)
    except Exception as error:  # a broken file: whatever its library says, the user learns which folder it is
        raise UserError(f"--{role} {given}: cannot be loaded: {error}") from error
    return _without_quantization(model, dtype) if arguments else model


def _without_quantization(model: Any, dtype: torch.dtype) -> Any:
    """The same weights in a model that save_pretrained accepts: transformers marks one from GGUF as quantized."""
    config = type(model.config).from_dict({**model.config.to_dict(), "quantization_config": None, "dtype": dtype})
    del config.quantization_config
    made = type(model)(config).to(dtype)
    made.load_state_dict(model.state_dict())
    return made


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
    """That of the data; None if there is none."""
    return _tokenizer_of(options.tokenizer or options.teacher)


def _tokenizer_of(given: str) -> Any:
    folder, arguments = _find("tokenizer", given)
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    if not arguments and not any((folder / name).is_file() for name in names):
        return None
    _refuse_code(
        "tokenizer", folder, "tokenizer_config.json", "tokenizer_class", transformers.PreTrainedTokenizerBase
    )
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **arguments)
    except Exception as error:
        raise UserError(f"--tokenizer {given}: cannot be loaded: {error}") from error


def check_tokenizers(options: Options, tokenizer: Any) -> None:
    """The student of a folder must read the tokens that the run writes: its own tokenizer, if it has one, is compared."""
    own = _tokenizer_of(options.student) if options.student else None
    if own is None or tokenizer is None:
        return
    words, words_s = ({number: word for word, number in each.get_vocab().items()} for each in (tokenizer, own))
    for number in sorted(words.keys() | words_s.keys()):
        if words.get(number) != words_s.get(number):
            raise UserError(f"--student {options.student}: its tokenizer differs from that of the data: token {number} is "
                            f"{words_s.get(number)!r}, not {words.get(number)!r}: both models must read the same tokens")  # fmt: skip
    ids, ids_s = (each(_PROBE, add_special_tokens=False)["input_ids"] for each in (tokenizer, own))
    if ids != ids_s:
        raise UserError(f"--student {options.student}: its tokenizer splits {_PROBE!r} into {ids_s}, and that of the data into "
                        f"{ids}: both models must read the same tokens")  # fmt: skip
