"""Captures the queries and keys of Hugging Face models, after RoPE and before attention.

Each attached model has one Recorder and a separate attention implementation, `streamkl3_sdpa`, which wraps the model's own,
`sdpa`. The recorder records calls only while the forward of the model runs. So the recomputation of activation checkpointing,
which runs in the backward, is not recorded a second time. Any number of Captures may listen to a recorder.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ._attention import Call, Mask, record_attention, record_mask
from ._context import Region, active_region
from ._layers import Layer, as_layers
from ._parameters import is_distributed

_PREFIX = re.compile(r"^streamkl\d+_")
_ids = itertools.count()
_recorders: weakref.WeakKeyDictionary[torch.nn.Module, Recorder] = weakref.WeakKeyDictionary()


def unwrap(model: Any, role: str) -> PreTrainedModel:
    """The transformers model inside wrappers: DDP, FSDP, torch.compile, peft."""
    inside = model
    while not isinstance(inside, PreTrainedModel):
        if not isinstance(inside, torch.nn.Module):
            raise TypeError(f"{role}: {type(model).__name__} must be a transformers model")
        if hasattr(inside, "get_base_model"):  # peft
            inside = inside.get_base_model()  # type: ignore[operator]
        else:
            wrapped = inside._modules.get("_orig_mod", inside._modules.get("module"))
            if wrapped is None:
                raise TypeError(f"{role}: {type(model).__name__} must be a transformers model")
            inside = wrapped
    if not inside._can_set_attn_implementation():
        raise TypeError(f"{role}: {type(inside).__name__} must take its attention from AttentionInterface")
    return inside


class Root(NamedTuple):
    """The call of a model."""

    module: torch.nn.Module
    args: tuple
    kwargs: dict[str, Any]
    versions: tuple[tuple, dict[str, Any]]  # of the arguments: a tensor that changes in place gets another version
    has_graph: bool  # it ran with gradients enabled
    region: Region | None = None  # the context-parallel region that it ran in; a compiled model does not know

    def arguments(self) -> dict[str, Any]:
        """The arguments by name; those that are None are left out."""
        return self._by_name(self.args, self.kwargs)

    def versions_by_name(self) -> dict[str, Any]:
        return self._by_name(*self.versions)

    def _by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        given = inspect.signature(self.module.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.pop("kwargs", {})}
        return {name: value for name, value in given.items() if value is not None}


def _version(value: Any) -> int | None:
    is_tracked = isinstance(value, torch.Tensor) and not torch.compiler.is_compiling() and not value.is_inference()
    return value._version if is_tracked else None


class Recorder:
    """Records the forward of a model, from the first submodel that is called to its end, for its captures."""

    def __init__(self, model: PreTrainedModel | None) -> None:
        self.number = next(_ids)
        self.captures: list[Capture] = []
        self.needs_values = False
        self.carries = False  # its attention can carry the KL
        self.depth = 0
        self.calls: list[Call] = []
        self.masks: list[Mask] = []
        self.root: Any = None  # of Root
        self._verified: set = set()
        self._hooks: list = []
        self._implementations: list[tuple[Any, str]] = []  # configs and their own implementation
        self._shared: list[
            tuple[torch.nn.Module, Any]
        ] = []  # modules and the config that they share with another model
        self._model = None if model is None else weakref.ref(model)

    # A copy of an attached model, or a pickled one, runs its own attention and records nothing.
    def __deepcopy__(self, memo) -> Recorder:
        return Recorder(None)

    def __reduce__(self):
        return Recorder, (None,)

    @staticmethod
    def of(model: PreTrainedModel) -> Recorder:
        return _recorders.setdefault(model, Recorder(model))

    # ---- Listening -----------------------------------------------------------------------------------------------------

    def add(self, capture: Capture) -> None:
        if not self.captures:
            self._attach()
        self.captures.append(capture)
        self.needs_values = any(capture.needs_values for capture in self.captures)
        self.carries = any(capture.carries for capture in self.captures)

    def remove(self, capture: Capture) -> None:
        self.captures = [other for other in self.captures if other is not capture]
        self.carries = any(other.carries for other in self.captures)
        if not self.captures:
            self._detach()

    def _attach(self) -> None:
        assert self._model is not None
        model = self._model()
        assert model is not None
        self._own_shared_configs(model)
        for config in _configs(model):
            own = _PREFIX.sub("", config._attn_implementation or "eager")
            self._register(own)
            config._attn_implementation_internal = f"streamkl{self.number}_{own}"
            self._implementations.append((config, own))
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                self._hooks.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._end, always_call=True))

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for config, own in self._implementations:
            if config._attn_implementation.startswith(f"streamkl{self.number}_"):
                config._attn_implementation_internal = own
        for module, config in self._shared:
            module.config = config
        self._hooks, self._implementations, self._shared = [], [], []
        self._clear()

    def _own_shared_configs(self, model: PreTrainedModel) -> None:
        """Models made from one config object share it: this one gets a copy while another one is attached."""
        attached = {id(config) for other in _recorders.values() for config, _ in other._implementations}
        copies: dict[int, Any] = {}
        for module in model.modules():
            config = getattr(module, "config", None)
            if id(config) in attached:
                self._shared.append((module, config))
                module.config = copies.setdefault(id(config), copy.deepcopy(config))

    def _register(self, own: str) -> None:
        name = f"streamkl{self.number}_{own}"
        AttentionInterface.register(name, partial(record_attention, self, own))
        if own in AttentionMaskInterface._global_mapping:
            own_mask = AttentionMaskInterface._global_mapping[own]
            AttentionMaskInterface.register(name, partial(record_mask, self, own_mask))

    # ---- Recording -----------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self.depth, self.calls, self.masks, self.root = 0, [], [], None

    def _begin(self, module, args, kwargs) -> None:
        if not self.captures or _is_redirected(args):
            return
        if self.depth == 0:
            self.calls, self.masks = [], []
            versions = (tuple(map(_version, args)), {name: _version(value) for name, value in kwargs.items()})
            region = None if torch.compiler.is_compiling() else active_region()
            self.root = Root(module, args, kwargs, versions, torch.is_grad_enabled(), region)
        self.depth += 1

    def _end(self, module, args, output) -> None:
        if not self.captures or _is_redirected(args):
            return
        self.depth -= 1
        if self.depth == 0:
            for capture in self.captures:
                if output is None:  # the forward raised an error
                    capture.clear()
                else:
                    capture.take(self.calls, self.root, output)
            self.calls, self.masks, self.root = [], [], None

    def is_new(self, call: Call) -> bool:
        """Whether a call of this kind has not been seen yet."""
        kind = (id(call.module), call.implementation, call.mask is None, call.sink is None, *call.options)
        if kind in self._verified:
            return False
        self._verified.add(kind)
        return True


def _is_redirected(args: tuple) -> bool:
    """TRL calls a function through the forward of a model, so that wrappers notice it. The model is an argument."""
    return bool(args) and isinstance(args[0], PreTrainedModel)


def _configs(model: PreTrainedModel) -> list:
    """All configs that decide about the attention of a part of the model."""
    found = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    waiting = list(found.values())
    while waiting:
        config = waiting.pop()
        for name in config.sub_configs:
            if (inner := getattr(config, name, None)) is not None and id(inner) not in found:
                found[id(inner)] = inner
                waiting.append(inner)
    return list(found.values())


class Capture:
    """The last forward of a model, between attach() and detach()."""

    def __init__(self, model: Any, role: str, needs_values: bool = False, carries: bool = False) -> None:
        self.model, self.role, self.needs_values, self.carries = unwrap(model, role), role, needs_values, carries
        self.is_split = False  # its attention reads keys of other ranks
        self.keep_graph = False  # a forward without gradients does not replace one with gradients
        self._recorder: Recorder | None = None
        self.clear()

    def attach(self) -> None:
        self._recorder = Recorder.of(self.model)
        self._recorder.add(self)

    def detach(self) -> None:
        if self._recorder is not None:
            self._recorder.remove(self)
            self._recorder = None
        self.clear()

    def clear(self) -> None:
        self.calls: list[Call] = []
        self.root: Any = None
        self.output: Any = None  # kept only on several processes: see _parameters.py
        self._layers: list[Layer] | None = None

    def take(self, calls: list[Call], root: Root, output: Any) -> None:
        if self.keep_graph and self.root is not None and self.root.has_graph and not root.has_graph:
            return
        self.calls, self.root, self._layers = calls, root, None
        self.output = output if is_distributed() else None

    @property
    def has_run(self) -> bool:
        return self.root is not None

    @property
    def is_checkpointing(self) -> bool:
        return self.model.training and self.model.is_gradient_checkpointing

    @property
    def layers(self) -> list[Layer]:
        if self._layers is None:
            self._layers = as_layers(self.calls, self.model, self.role, verify=not self.is_split)
        return self._layers
