"""OUT/checkpoint.safetensors: weights, optimizer and history of a run, in one file that is replaced as a whole.

A run needs nothing else to continue: the order of the data and all random numbers follow from the seed and the step.
"""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import sys
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict as distributed

from ._options import Options, UserError

NAME = "checkpoint.safetensors"
# A line of the history has at least these.
_ENTRY = {"step", "loss", "rate", "memory", "tokens_per_second", "seconds"}
_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # AdamW keeps these for each weight
_FULL = distributed.StateDictOptions(full_state_dict=True, cpu_offload=True)
_SOME = distributed.StateDictOptions(
    full_state_dict=True, cpu_offload=True, strict=False
)  # a weight may have no gradient


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Lets `write` write a new file, then puts it in the place of `path`: there is always an old or a new one, complete."""
    new = path.with_name(f".{path.name}.new")
    try:
        with clear_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
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
        with suppress(OSError):
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


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value))


def to_json(value: Any) -> str:
    """JSON has no NaN and no infinity: null stands for them."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def read_state(path: Path, options: Options, digest: str, tokens_per_step: int) -> dict[str, Any]:
    """What save() was given, after a check that it is well-formed and that this run is the same one."""
    with _opened(path) as file:
        metadata = (file.metadata() or {}).get("state")
    if metadata is None:
        raise UserError(f"{path}: is no checkpoint of streamkl-distill")
    try:
        state = json.loads(metadata)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its state is no JSON: {error}") from error
    _require(path, isinstance(state, dict), "its state", state, "an object")
    written = state.get("options")
    _require(path, isinstance(written, dict), "options", written, "an object")
    written = {**Options().affecting(), **written}  # earlier versions had fewer options
    for name, value in options.affecting().items():
        if written.get(name, value) != value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{path}: was written with {flag} {written[name]}, and this run has {value}: "
                            "use the same, or start again with --overwrite")  # fmt: skip
    if state.get("data") != digest:
        raise UserError(
            f"{path}: was written by a run on other data: use the same files and, without --held-out, the same "
            "--eval-sequences, or start again with --overwrite"
        )
    read = state.get("tokens_per_step", tokens_per_step)  # earlier versions wrote none
    if read != tokens_per_step:
        raise UserError(
            f"{path}: was written by a run of {read} tokens per step, and this run has {tokens_per_step}: use as many "
            "processes, or start again with --overwrite"
        )
    state.setdefault("steps", written.get("steps"))  # nor steps
    state.setdefault("measured", [])
    _check_progress(path, state)
    if state["step"] > options.steps:
        raise UserError(f"--steps={options.steps}: {path} has taken {state['step']} steps: must be {state['step']}..")
    return state


def _check_progress(path: Path, state: dict[str, Any]) -> None:
    """Rules about step, seconds and history."""
    steps: Any = state["steps"]
    step: Any = state.get("step")
    seconds: Any = state.get("seconds")
    _require(path, type(steps) is int and steps >= 1, "steps", steps, "1..")
    _require(path, type(step) is int and 1 <= step <= steps, "step", step, f"1..{steps}")
    _require(path, _is_number(seconds) and seconds >= 0, "seconds", seconds, "a number, at least 0")
    _check_entries(path, "history", state.get("history"), _ENTRY, step)
    _check_entries(path, "measured", state.get("measured"), {"step", "loss"}, step)


def _check_entries(path: Path, name: str, entries: Any, fields: set[str], step: int) -> None:
    """Rules about a list of objects with numbers, in the order of their steps."""
    _require(path, isinstance(entries, list), name, entries, "a list")
    before = 0
    for index, entry in enumerate(entries):
        where = f"{name}[{index}]"
        is_entry = isinstance(entry, dict) and fields <= entry.keys()
        # A phase with the attention KL may end, and a longer run may extend it.
        is_entry = is_entry and entry.keys() <= entries[0].keys() | {"attention"}
        _require(
            path,
            is_entry,
            where,
            entry,
            f"an object with {', '.join(sorted(fields))}, and with no more than the first",
        )
        for field, value in entry.items():
            _require(path, _is_number(value), f"{where}.{field}", value, "a finite number")
        at = entry["step"]
        _require(path, type(at) is int and before < at <= step, f"{where}.step", at, f"{before + 1}..{step}")
        before = at


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _require(path: Path, condition: bool, name: str, value: Any, accepted: str) -> None:
    if not condition:
        raise _broken(path, f"{name}={reprlib.repr(value)}: must be {accepted}")


def _broken(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}: the checkpoint is broken; start again with --overwrite")


def load(path: Path, objective: torch.nn.Module, model: torch.nn.Module, optimizer: Any, step: int) -> None:
    """Sets the weights and the optimizer as they were after `step` steps. `model` is the objective or a wrapper of it."""
    weights: dict[str, Any] = {}
    moments: dict[str, Any] = defaultdict(dict)  # torch 2.6 requires moments of every weight
    expected = {f"student.{name}": tensor for name, tensor in objective.state_dict().items()}
    trained = {name: tensor for name, tensor in objective.named_parameters() if tensor.requires_grad}
    with _opened(path) as file:
        names = set(file.keys())
        for name in sorted(names):
            kind, _, rest = name.partition(".")
            key, _, parameter = rest.partition(".")
            if name in expected:
                weights[rest] = _checked_tensor(path, name, file.get_tensor(name), expected[name])
            elif kind == "optimizer" and key in _MOMENTS and parameter in trained:
                like = torch.zeros(()) if key == "step" else trained[parameter]
                moments[parameter][key] = _checked_tensor(path, name, file.get_tensor(name), like)
            else:
                raise _broken(path, f"{name}: the student has no such tensor")
    for name in sorted(expected.keys() - names):
        raise _broken(path, f"{name}: is missing")
    for parameter, found in moments.items():  # a weight without a gradient has none of them
        for key in sorted(_MOMENTS - found.keys()):
            raise _broken(path, f"optimizer.{key}.{parameter}: is missing")
        taken = found["step"].item()
        _require(path, 1 <= taken <= step, f"optimizer.step.{parameter}", taken, f"1..{step}")
    (group,) = optimizer.param_groups
    state: Any = dict(state=moments, param_groups=[{**group, "params": list(trained)}])
    distributed.set_model_state_dict(model, weights, options=_FULL)
    distributed.set_optimizer_state_dict(model, optimizer, state, options=_SOME)


def _checked_tensor(path: Path, name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    found, accepted = (f"{each.dtype}{list(each.shape)}" for each in (tensor, like))
    if found != accepted:
        raise _broken(path, f"{name}: is {found} and must be {accepted}")
    if tensor.isnan().any():
        raise _broken(path, f"{name}: contains NaN")
    return tensor


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _broken(path, f"cannot be read: {error}") from error
