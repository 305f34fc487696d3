"""Sequences of tokens from text, .jsonl, .npy and .safetensors files, and the order in which training reads them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import torch

from ._options import Options, UserError


class Sequences:
    """Sequences of `context` tokens each."""

    def __init__(self, tokens: np.ndarray, bounds: tuple[list[int], list[int]] = ([], [])) -> None:
        self.tokens = tokens  # [sequences, tokens]
        self.prefix, self.suffix = bounds  # special tokens of the tokenizer

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: list[int]) -> torch.Tensor:
        """[indices, context]"""
        rows = torch.from_numpy(np.stack([self.tokens[i] for i in indices]).astype(np.int64))
        begin, end = (
            torch.tensor(ids, dtype=torch.int64).expand(len(indices), -1) for ids in (self.prefix, self.suffix)
        )
        return torch.cat([begin, rows, end], 1)

    def digest(self) -> str:
        """Of all tokens: a resumed run must read the same ones."""
        hasher = hashlib.blake2b(repr((self.tokens.shape, self.prefix, self.suffix)).encode(), digest_size=16)
        for begin in range(0, len(self.tokens), 256):
            hasher.update(np.asarray(self.tokens[begin : begin + 256], dtype=np.int32).tobytes())
        return hasher.hexdigest()

    def split(self, count: int) -> tuple[Sequences, Sequences]:
        """All but the last `count` sequences, and those."""
        at = len(self.tokens) - count
        bounds = (self.prefix, self.suffix)
        return Sequences(self.tokens[:at], bounds), Sequences(self.tokens[at:], bounds)


def load(options: Options, tokenizer: Any, teacher: Any) -> tuple[Sequences, Sequences]:
    """(training, held out). The last sequences of the training data are held out, unless files are given."""
    training = load_all(options.data, options, tokenizer, teacher)
    if options.start_context and (training.prefix or training.suffix):
        raise UserError("--start-context: must be 0: the tokenizer puts special tokens around a sequence")
    if not options.eval_sequences:
        return training, Sequences(training.tokens[:0], (training.prefix, training.suffix))
    if options.held_out:
        return training, load_all(options.held_out, options, tokenizer, teacher)
    count = min(options.eval_sequences, max(len(training) // 10, 1))
    if len(training) <= count:
        raise UserError(f"--data: has {len(training)} sequences of {options.context} tokens: at least {count + 1} are needed, "
                        "because some are held out")  # fmt: skip
    return training.split(count)


def order(count: int, seed: int, first: int, number: int) -> list[int]:
    """The sequences first, first + 1, ... of an endless order that shuffles all `count` of them in every epoch.

    It depends on nothing but its arguments: a resumed run continues exactly where it stopped.
    """
    indices: list[int] = []
    while len(indices) < number:
        epoch, at = divmod(first + len(indices), count)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        shuffled = torch.randperm(count, generator=generator)[at : at + number - len(indices)]
        indices += shuffled.tolist()
    return indices


# ---- Files -----------------------------------------------------------------------------------------------------------


def load_all(paths: list[str], options: Options, tokenizer: Any, teacher: Any) -> Sequences:
    """All sequences of the files, checked against the teacher."""
    most = getattr(teacher.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and options.context > most:
        raise UserError(f"--context={options.context}: the teacher has positions for {most} tokens")
    bounds = _special_tokens(tokenizer)
    parts, is_text = [], False
    for path in paths:
        kind = Path(path).suffix
        reader: Callable = {".npy": _read_npy, ".safetensors": _read_safetensors}.get(kind, _read_text)
        try:
            part = reader(path, options, tokenizer)
        except UserError:
            raise
        except Exception as error:  # a broken file: whatever its library says, the user learns which one it is
            raise UserError(f"{path}: cannot be read: {error}") from error
        is_text |= reader is _read_text
        parts.append(part)
    bounds = bounds if is_text else ([], [])
    length = options.context - sum(map(len, bounds))
    if length < 1:
        raise UserError(
            f"--context={options.context}: must be above {sum(map(len, bounds))}, the special tokens of a sequence"
        )
    rows = _cut(paths, parts, length)
    lowest, highest = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
    vocabulary = teacher.get_input_embeddings().num_embeddings
    if lowest < 0 or highest >= vocabulary:
        raise UserError(f"{', '.join(paths)}: has tokens {lowest}..{highest}: the teacher knows 0..{vocabulary - 1}")
    return Sequences(rows, bounds)


def _cut(paths: list[str], parts: list[np.ndarray], length: int) -> np.ndarray:
    """[sequences, length] of streams, and of tables of sequences that are long enough."""
    if len(parts) == 1 and parts[0].ndim == 2 and parts[0].shape[1] == length:
        return parts[0]  # stays on disk, mapped
    for path, part in zip(paths, parts):
        if part.ndim == 2 and part.shape[1] < length:
            raise UserError(f"{path}: has sequences of {part.shape[1]} tokens: --context needs {length}")
    tables = [part[:, :length] for part in parts if part.ndim == 2]
    stream = np.concatenate([part for part in parts if part.ndim == 1] or [np.zeros(0, np.int32)])
    count = len(stream) // length
    rows = np.concatenate([*tables, stream[: count * length].reshape(count, length)])
    if len(rows) == 0:
        raise UserError(f"{', '.join(paths)}: has {len(stream)} tokens: a sequence needs {length}")
    return rows


def _read_npy(path: str, options: Options, tokenizer: Any) -> np.ndarray:
    return _as_tokens(path, np.load(path, mmap_mode="r", allow_pickle=False))


def _read_safetensors(path: str, options: Options, tokenizer: Any) -> np.ndarray:
    from safetensors.numpy import load_file

    tensors = load_file(path)
    for name in ("input_ids", "tokens", *(list(tensors) if len(tensors) == 1 else [])):
        if name in tensors:
            return _as_tokens(path, tensors[name])
    raise UserError(f"{path}: has the tensors {', '.join(tensors)}: one must be input_ids or tokens")


def _as_tokens(path: str, array: np.ndarray) -> np.ndarray:
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        raise UserError(
            f"{path}: {array.dtype}{list(array.shape)}: must be whole numbers, [tokens] or [sequences, tokens]"
        )
    return array


def _read_text(path: str, options: Options, tokenizer: Any) -> np.ndarray:
    """The tokens of all documents, each followed by the end of a text."""
    if tokenizer is None:
        raise UserError(
            f"{path}: is text, and the teacher's folder has no tokenizer: pass --tokenizer, or tokens as .npy"
        )
    end = next((i for i in (tokenizer.eos_token_id, tokenizer.sep_token_id) if i is not None), None)
    ids: list[int] = []
    for document in _documents(path, options.text_field):
        ids += (
            tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
            if isinstance(document, str)
            else document
        )
        ids += [] if end is None else [end]
    return np.asarray(ids, dtype=np.int32)


def _documents(path: str, field: str) -> Iterator[str | list[int]]:
    with open(path, encoding="utf-8") as file:
        if Path(path).suffix != ".jsonl":
            yield file.read()
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            record = json.loads(line)
            document = record.get(field) if isinstance(record, dict) else None
            if not isinstance(document, (str, list)):
                raise UserError(f"{path}:{number}: has no field {field!r} with text: pass --text-field")
            yield document


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    if tokenizer is None:
        return [], []
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return full[:at], full[at + len(plain) :]
