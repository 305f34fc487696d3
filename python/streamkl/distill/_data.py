"""Sequences of tokens from files and datasets, and the order in which training reads them."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ._options import Options, UserError

# First bytes of files that are no text.
_PACKED = {
    "gzip": b"\x1f\x8b",
    "zstd": b"\x28\xb5\x2f\xfd",
    "zip": b"PK\x03\x04",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ",
    "parquet": b"PAR1",
}


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
    parts, are_texts = [], []
    for path in paths:
        reader: Callable = {".npy": _read_npy, ".safetensors": _read_safetensors}.get(Path(path).suffix, _read_text)
        try:
            part = reader(path, options, tokenizer)
        except UserError:
            raise
        except Exception as error:  # a broken file: whatever its library says, the user learns which one it is
            raise UserError(f"{path}: cannot be read: {error}") from error
        are_texts.append(reader is _read_text)
        parts.append(part)
    bounds = _special_tokens(tokenizer) if any(are_texts) else ([], [])
    if any(bounds) and not all(are_texts):
        tokens = paths[are_texts.index(False)]
        raise UserError(
            f"{tokens}: is tokens, and the tokenizer puts special tokens around text: pass only tokens or only text"
        )
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
    """[sequences, length] of streams, and of each sequence of a table."""
    tables = []
    for path, part in zip(paths, parts):
        if part.ndim == 2 and part.shape[1] < length:
            raise UserError(f"{path}: has sequences of {part.shape[1]} tokens: --context needs {length}")
        if part.ndim == 2:
            whole = part.shape[1] // length
            tables.append(part[:, : whole * length].reshape(len(part) * whole, length))
    if len(parts) == len(tables) == 1:
        return tables[0]  # stays on disk, mapped, unless the last tokens of a sequence are left over
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
    """Texts, or lists of tokens, of a file or a dataset."""
    suffixes = Path(path).suffixes
    kind = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else "".join(suffixes[-1:])
    is_name = not Path(path).exists() and (":" in path or not kind)
    if Path(path).is_dir() or is_name:
        records: Iterable[Any] = _dataset(path)
    elif kind == ".parquet":
        records = _parquet(path, field)
    elif kind == ".jsonl":
        records = _lines(path)
    else:
        with _opened(path) as file:
            yield file.read()
        return
    for number, record in enumerate(records, 1):
        if record is None:  # an empty line
            continue
        document = record.get(field) if isinstance(record, dict) else None
        if not isinstance(document, (str, list)):
            raise UserError(f"{path}:{number}: has no field {field!r} with text: pass --text-field")
        if isinstance(document, list) and not all(type(token) is int for token in document):
            raise UserError(f"{path}:{number}: {field!r} is a list: must contain whole numbers, the tokens of a text")
        yield document


def _opened(path: str) -> Any:
    """A text file, unpacked."""
    with open(path, "rb") as file:
        first = file.read(8)
    packed = next((name for name, start in _PACKED.items() if first.startswith(start)), "")
    if packed and packed != "gzip":
        raise UserError(
            f"{path}: is a {packed} file: unpack it, or pass text, .jsonl, .parquet, .npy or .safetensors"
        )
    return gzip.open(path, "rt", encoding="utf-8") if packed else open(path, encoding="utf-8")


def _lines(path: str) -> Iterator[Any]:
    with _opened(path) as file:
        for line in file:
            yield json.loads(line) if line.strip() else None


def _parquet(path: str, field: str) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{path}: needs the package pyarrow: pip install pyarrow") from error
    with parquet.ParquetFile(path) as file:
        if field not in file.schema_arrow.names:
            raise UserError(
                f"{path}: has the columns {', '.join(file.schema_arrow.names)}, and not {field!r}: pass --text-field"
            )
        for batch in file.iter_batches(columns=[field]):
            yield from batch.to_pylist()


def _dataset(name: str) -> Iterable[Any]:
    """A folder, or a name of the Hugging Face Hub, NAME[:CONFIG][:SPLIT]. The split is train by default."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name}: is no file; a dataset needs the package datasets: pip install datasets") from error
    if (Path(name) / "state.json").exists():
        return datasets.load_from_disk(name)
    path, *rest = [name] if Path(name).exists() else name.split(":")
    split = rest.pop() if rest else "train"
    return datasets.load_dataset(path, *rest, split=split)


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return full[:at], full[at + len(plain) :]
