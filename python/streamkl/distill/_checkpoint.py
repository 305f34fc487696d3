"""OUT/checkpoint.safetensors: weights, optimiser and history of a run, in one file that is replaced as a whole.

A run needs nothing else to continue: the order of the data and all random numbers follow from the seed and the step.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict as distributed

from ._options import Options, UserError

NAME = "checkpoint.safetensors"
_FULL = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)
_SOME = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)  # a weight may have no gradient


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Lets `write` write a new file, then puts it in the place of `path`: there is always an old or a new one, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    try:
        with clear_errors(path):
            write(new)
            with open(new, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(new, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turns failures to write into errors that say what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        is_full = (
            number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            or "os error 28" in str(error)
            or "os error 27" in str(error)
        )
        advice = "; free some space, then continue with --resume" if is_full else ""
        raise UserError(f"{path}: cannot be written: {error}{advice}") from error


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda new: new.write_text(text))


def save(path: Path, model: torch.nn.Module, optimizer: Any, state: dict[str, Any], is_main: bool) -> None:
    """All ranks take part, the main one writes."""
    weights: Any
    moments: Any
    weights, moments = distributed.get_state_dict(model, optimizer, options=_FULL)
    if not is_main:
        return
    tensors = {f"student.{name}": tensor.contiguous().clone() for name, tensor in weights.items()}
    for name, values in moments["state"].items():
        for key, value in values.items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value).contiguous()
    write_whole(path, lambda new: save_file(tensors, new, metadata={"state": json.dumps(state)}))


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the student inside an Objective, on the CPU. All ranks take part."""
    weights: dict[str, Any] = distributed.get_model_state_dict(model, options=_FULL)
    return {name.removeprefix("module."): tensor for name, tensor in weights.items()}


def read_state(path: Path, options: Options, digest: str) -> dict[str, Any]:
    """What save() was given, after a check that this run is the same one."""
    with _opened(path) as file:
        metadata = (file.metadata() or {}).get("state")
    if metadata is None:
        raise UserError(f"{path}: is no checkpoint of streamkl-distill")
    state = json.loads(metadata)
    for name, value in options.affecting().items():
        if state["options"].get(name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{path}: was written with {flag} {state['options'].get(name)}, and this run has {value}: "
                            "use the same, or start again with --overwrite")  # fmt: skip
    if state["data"] != digest:
        raise UserError(
            f"{path}: was written by a run on other data: use the same files and, without --held-out, the same "
            "--eval-sequences, or start again with --overwrite"
        )
    return state


def load(path: Path, model: torch.nn.Module, optimizer: Any) -> None:
    """Sets the weights and the optimiser."""
    weights: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    with _opened(path) as file:
        for name in file.keys():
            kind, rest = name.split(".", 1)
            if kind == "student":
                weights[rest] = file.get_tensor(name)
            else:
                key, parameter = rest.split(".", 1)
                moments.setdefault(parameter, {})[key] = file.get_tensor(name)
    state = distributed.get_optimizer_state_dict(model, optimizer, options=_FULL)
    state["state"] = moments
    distributed.set_model_state_dict(model, weights, options=_FULL)
    distributed.set_optimizer_state_dict(model, optimizer, state, options=_SOME)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: cannot be read: {error}: the checkpoint is broken; start again with --overwrite"
        ) from error
