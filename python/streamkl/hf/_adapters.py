"""A PEFT student whose teacher is its own base model: one module, which is the teacher while its adapters are off."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import torch


def peft_model(student: Any) -> Any:
    """The PEFT model inside wrappers such as DDP and torch.compile."""
    inside = student
    while inside is not None and not hasattr(inside, "disable_adapter"):
        modules = getattr(inside, "_modules", {})
        inside = modules.get("_orig_mod", modules.get("module"))
    if inside is None:
        raise ValueError("teacher=None: must be a transformers model; only a PEFT student has a teacher of its own, its base model")
    return inside


@contextmanager
def _adapters_off(adapted: Any) -> Iterator[None]:
    """Inside this context the adapters are off. PEFT lets every active one be trained when it is on again: here, as before."""
    flags = [(each, each.requires_grad) for each in adapted.parameters()]
    try:
        with adapted.disable_adapter():
            yield
    finally:
        for each, flag in flags:
            each.requires_grad = flag


# Initializations of LoRA that take the adapters out of the base weights.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")


def check_base_is_teacher(adapted: Any) -> None:
    """Refuses a base model that its adapters have changed, or that is trained with them: it is not the model that it was."""
    for name, config in adapted.peft_config.items():
        how = getattr(config, "init_lora_weights", None)
        if isinstance(how, str) and how.startswith(_CHANGE_THE_BASE):
            raise ValueError(
                f"teacher=None: init_lora_weights={how!r} of the adapter {name!r} changes the weights of the base model: pass a copy of "
                "the base model, made before, as the teacher"
            )
    base = adapted.base_model
    trained = {name for name, each in base.named_parameters() if each.requires_grad}
    with _adapters_off(adapted):
        shared = [name for name, each in base.named_parameters() if each.requires_grad and name in trained]
    if shared:
        raise ValueError(
            f"teacher=None: {shared[0]} is trained and belongs to the base model, too, which would change with the student "
            '(an adapter of bias="none" leaves it alone): pass a copy of the base model as the teacher'
        )


def adapters_are_off(model: torch.nn.Module) -> bool:
    """Whether a forward would be that of the base model. Layers of PEFT have this flag; a method of transformers has its name."""
    return any(getattr(module, "disable_adapters", None) is True for module in model.modules())


def modes_of(model: torch.nn.Module) -> dict[torch.nn.Module, bool]:
    """Whether each module is in training mode."""
    return {module: module.training for module in model.modules()}


def restore_modes(modes: dict[torch.nn.Module, bool]) -> None:
    for module, mode in modes.items():
        module.training = mode


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Inside this context a model is in eval mode. Each of its modules has its own mode again afterwards."""
    modes = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        restore_modes(modes)


@contextmanager
def base_model(adapted: Any) -> Iterator[None]:
    """Inside this context a PEFT model is its base model, in eval mode."""
    with eval_mode(adapted), _adapters_off(adapted):
        yield
