"""Captures the queries and keys of Hugging Face models, after RoPE and before attention.

Each attached model has one Recorder and a separate attention implementation, `streamkl3_sdpa`, which wraps the model's own,
`sdpa`. The recorder records calls only while the forward of the model runs. So the recomputation of activation checkpointing,
which runs in the backward, is not recorded a second time. Any number of Captures may listen to a recorder.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel

from .._carried import Slot, Term
from ._attention import Call, record_attention
from ._context import Region, active_region
from ._keys import Keys, Refused
from ._layers import KeyReader, Layer, as_layers
from ._parameters import is_distributed
from ._proof import rows_to_prove

Verify = Literal["first", "always", "never"]

_PREFIX = re.compile(r"^streamkl\d+_")
_ids = itertools.count()
_recorders: weakref.WeakKeyDictionary[torch.nn.Module, Recorder] = weakref.WeakKeyDictionary()


NO_DATA_PARALLEL = (
    "torch.nn.DataParallel runs copies of a model at once, whose attention cannot be told apart: start one process per GPU with "
    "torchrun, and use DistributedDataParallel"
)


def unwrap(model: Any, role: str) -> PreTrainedModel:
    """The transformers model inside wrappers: DDP, FSDP, torch.compile, peft."""
    inside = model
    while not isinstance(inside, PreTrainedModel):
        if isinstance(model, (str, os.PathLike)):
            raise TypeError(
                f"{role}={str(model)!r}: must be a model, which AutoModelForCausalLM.from_pretrained({str(model)!r}) loads"
            )
        if not isinstance(inside, torch.nn.Module):
            raise TypeError(f"{role}: {type(model).__name__} must be a transformers model")
        if isinstance(inside, torch.nn.DataParallel):
            raise TypeError(f"{role}: {NO_DATA_PARALLEL}")
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


def refuse_tensor_parallel(model: Any, role: str) -> None:
    """Refuses a model whose attention heads are on several ranks: its KL would cover the heads of this rank alone."""
    if (size := getattr(model, "tp_size", None) or 1) > 1:
        raise ValueError(
            f"{role}: {type(model).__name__} is tensor parallel (tp_size={size}), so a rank holds some of its attention heads, and loss "
            "and gradients would be wrong: must have tp_size=1. Load it without tp_plan and tp_size; AttentionDistiller works with "
            "FSDP2, which splits the parameters"
        )


@dataclass(eq=False)
class Step:
    """One forward of a model: its arguments, and the calls of its attention."""

    module: torch.nn.Module
    args: tuple
    kwargs: dict[str, Any]
    versions: tuple[tuple, dict[str, Any]]  # versions of the arguments: a tensor that changes in place gets another
    has_graph: bool  # the forward ran with gradients enabled
    training: bool
    region: Region | None  # the context-parallel region that it ran in; a compiled model does not know
    calls: list[Call]
    in_generate: bool = False
    output: Any = None  # kept only on several processes: see _parameters.py
    _read_keys: KeyReader | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments by name; those that are None are left out."""
        return self._by_name(self.args, self.kwargs)

    def versions_by_name(self) -> dict[str, Any]:
        return self._by_name(*self.versions)

    def _by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        given = dict(inspect.signature(self.module.forward).bind_partial(*args, **kwargs).arguments)
        given.update(given.pop("kwargs", {}))
        return {name: value for name, value in given.items() if value is not None}

    @property
    def is_generation(self) -> bool:
        """A forward of generate(), which a distiller does not learn from."""
        given = (self.kwargs.get(name) for name in ("past_key_values", "cache_position"))  # the latter in 5.0
        return self.in_generate or (not self.has_graph and any(each is not None for each in given))

    def read_keys(self, call: Call) -> Keys:
        if self._read_keys is None:  # read late: torch.compile would trace it in the constructor
            mask, config = self.arguments().get("attention_mask"), self.module.config  # type: Any, Any
            is_of_tokens = isinstance(mask, torch.Tensor) and mask.dim() == 2 and not config.is_encoder_decoder
            self._read_keys = KeyReader(mask.bool() if is_of_tokens else None)
        return self._read_keys(call)

    def rows_to_prove(self, call: Call) -> list[int] | None:
        try:
            return rows_to_prove(self.read_keys(call))
        except Refused:
            return None


_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def _is_generating() -> bool:
    """Whether generate() runs: without a cache, and in an encoder, its forwards look like others."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return frame is not None


def _version(value: Any) -> int | None:
    is_tracked = isinstance(value, torch.Tensor) and not torch.compiler.is_compiling() and not value.is_inference()
    return value._version if is_tracked else None


class _Name(str):
    """The name of an attention implementation in a config. A copy of it, or what pickle reads, is the model's own name."""

    own: str

    def __deepcopy__(self, memo) -> str:
        return self.own

    def __reduce_ex__(self, protocol):
        return str, (self.own,)


def _reduce_detached(module: torch.nn.Module, protocol):
    """What pickle and deepcopy take of an attached model: the model without hooks of recorders."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    made, arguments, state, *others = reduced
    pairs = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
    hooks = {key for key, hook in pairs if isinstance(getattr(hook, "__self__", None), Recorder)}
    state = {name: value for name, value in state.items() if name != "__reduce_ex__"}
    for name, value in state.items():
        if name.startswith("_forward_") and isinstance(value, dict):
            state[name] = type(value)((key, each) for key, each in value.items() if key not in hooks)
    return made, arguments, state, *others


class Recorder:
    """Records the forward of a model, from the first submodel that is called to its end, for its captures."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.number = next(_ids)
        self.captures: list[Capture] = []
        self._update()
        # Modules that run their own attention, and why: nothing carries their KL. That changes between steps only: a recomputation
        # must run what the forward ran.
        self.apart: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self.slots: dict[torch.nn.Module, Slot] = {}  # slots of the last step
        self.step: Step | None = None  # belongs to the forward that runs now
        self._proven: set[tuple] = set()  # the kinds of calls that have been proven
        self._hooks: list = []
        self._implementations: list[tuple[Any, str]] = []  # configs and their own implementation
        self._shared: list[tuple[torch.nn.Module, Any]] = []  # modules and configs of another model, too
        self.others: list[Recorder] = []  # recorders of models that share modules with this one
        self._model = weakref.ref(model)

    @staticmethod
    def of(model: PreTrainedModel) -> Recorder:
        return _recorders.setdefault(model, Recorder(model))

    # ---- Listening -----------------------------------------------------------------------------------------------------

    def add(self, capture: Capture) -> None:
        if not self.captures:
            self._attach()
        self.captures.append(capture)
        self._update()

    def remove(self, capture: Capture) -> None:
        self.captures = [other for other in self.captures if other is not capture]
        self._update()
        if not self.captures:
            self._detach()

    def _update(self) -> None:
        self.needs_values = any(capture.needs_values for capture in self.captures)
        self.carries = any(capture.carries for capture in self.captures)  # the model's attention can carry the KL
        self._verify = {capture.verify for capture in self.captures}

    def _attach(self) -> None:
        model = self._model()
        assert model is not None
        self._own_shared_configs(model)
        self._find_others(model)
        for config in _configs(model):
            own = _PREFIX.sub("", config._attn_implementation or "eager")
            self._register(own)
            name = _Name(f"streamkl{self.number}_{own}")
            name.own = own
            config._attn_implementation_internal = name
            self._implementations.append((config, own))
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                hooks = [
                    module.register_forward_pre_hook(self._begin, with_kwargs=True),
                    module.register_forward_hook(self._end, always_call=True),
                ]
                self._hooks.append((module, hooks))
                module.__dict__["__reduce_ex__"] = partial(_reduce_detached, module)

    def is_undone(self) -> bool:
        """Whether set_attn_implementation() has taken the place of the recorder's attention."""
        return any(not _PREFIX.match(config._attn_implementation) for config, _ in self._implementations)

    def _detach(self) -> None:
        for module, hooks in self._hooks:
            if not any(other.hooks(module) for other in self.others):
                del module.__dict__["__reduce_ex__"]
            for hook in hooks:
                hook.remove()
        for config, own in self._implementations:
            if config._attn_implementation.startswith(f"streamkl{self.number}_"):
                config._attn_implementation_internal = own
        for module, config in self._shared:
            module.config = config
        for other in self.others:
            other.others.remove(self)
        self._hooks, self._implementations, self._shared, self.others = [], [], [], []
        self.step = None
        self._proven.clear()
        self.apart.clear()
        self.slots = {}

    def _own_shared_configs(self, model: PreTrainedModel) -> None:
        """Models made from one config object share it: this one gets a copy while another one is attached."""
        attached = {id(config) for other in _recorders.values() for config, _ in other._implementations}
        copies: dict[int, Any] = {}
        for module in model.modules():
            config = getattr(module, "config", None)
            if id(config) in attached:
                self._shared.append((module, config))
                module.config = copies.setdefault(id(config), copy.deepcopy(config))

    def hooks(self, module: torch.nn.Module) -> bool:
        return any(module is each for each, _ in self._hooks)

    def _find_others(self, model: PreTrainedModel) -> None:
        """A shared module calls the attention of the model that was attached last: the recorder of the one that runs records it."""
        modules = set(model.modules())
        for owner, other in _recorders.items():
            if other._hooks and not modules.isdisjoint(owner.modules()):
                self.others.append(other)
                other.others.append(self)

    def _register(self, own: str) -> None:
        name = f"streamkl{self.number}_{own}"
        AttentionInterface.register(name, partial(record_attention, self, own))
        if own in AttentionMaskInterface._global_mapping:
            AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping[own])

    # ---- Recording -----------------------------------------------------------------------------------------------------

    def _begin(self, module, args, kwargs) -> None:
        if getattr(module, "_is_replica", False):  # of a DataParallel that wraps the model
            raise RuntimeError(f"{type(module).__name__}: {NO_DATA_PARALLEL}")
        if not self.captures or _is_redirected(args) or (self.step is not None and self.step.module is not module):
            return
        if any(other.step is not None and other.hooks(module) for other in self.others):
            return  # a shared module, which runs in the other model
        if self.step is not None:  # a KeyboardInterrupt ended the last forward, without a hook
            self._fail()
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            for capture in self.captures:
                capture.before_forward()
        for layer, slot in self.slots.items():
            if slot.apart is not None:
                self.apart[layer] = slot.apart  # dynamo of torch 2.6 traces no update()
        self.slots = {}
        versions = (tuple(map(_version, args)), {name: _version(value) for name, value in kwargs.items()})
        region = None if is_compiling else active_region()
        has_graph = torch.is_grad_enabled()
        in_generate = not has_graph and not is_compiling and _is_generating()
        self.step = Step(module, args, kwargs, versions, has_graph, module.training, region, [], in_generate)

    def _end(self, module, args, output) -> None:
        step = self.step
        if not self.captures or _is_redirected(args) or step is None or step.module is not module:
            return
        self.step = None
        if output is None:  # the forward raised an error
            self._fail()
            return
        step.output = output if is_distributed() else None
        for capture in self.captures:
            capture.take(step)

    def _fail(self) -> None:
        self.step = None
        for capture in self.captures:
            capture.drop()

    def early_term(self, call: Call) -> tuple[Term | None, tuple | None]:
        """The KL that the attention of a call carries, if it is known before it runs, and what it was made of."""
        assert self.step is not None
        with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):  # the forward may run in autocast
            terms = (capture.early_term(call, self.step) for capture in self.captures if capture.carries)
            return next((term for term in terms if term is not None), (None, None))

    # ---- Proofs ----------------------------------------------------------------------------------------------------------

    def wants_proof(self, call: Call) -> bool:
        """Whether a call is to be proven. A compiled call is probed always: a graph has no memory."""
        if self._verify == {"never"}:
            return False
        return torch.compiler.is_compiling() or "always" in self._verify or _kind(call) not in self._proven

    def proven(self, call: Call) -> None:
        self._proven.add(_kind(call))

    def forget_proofs(self) -> None:
        self._proven.clear()


def _kind(call: Call) -> tuple:
    """Calls of one kind are proven once: the module, its mode, the kind of its mask, and the size of its shape."""
    mask = call.mask
    kind = (type(mask), mask.dim(), mask.dtype) if isinstance(mask, torch.Tensor) else type(mask)
    sizes = [length.bit_length() for length in (call.query.shape[2], call.key.shape[2])]
    return (
        id(call.module), call.implementation, call.training, call.has_graph, kind, call.sink is None, call.lse is None,
        call.handle is not None and call.handle.slot.early is not None, call.query.dtype, call.query.shape[0] > 1, *sizes,
        *call.options,
    )  # fmt: skip


def _is_redirected(args: tuple) -> bool:
    """TRL calls a function through the forward of a model, so that wrappers notice it. The model is an argument."""
    return bool(args) and isinstance(args[0], PreTrainedModel)


def _configs(model: PreTrainedModel) -> list:
    """All configs that decide about the attention of a part of the model; a layer from another model has its own."""
    of_modules: Any = (getattr(module, "config", None) for module in model.modules())
    found = {id(config): config for config in of_modules if hasattr(config, "_attn_implementation_internal")}
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

    def __init__(
        self, model: Any, role: str, needs_values: bool = False, carries: bool = False, verify: Verify = "first"
    ) -> None:
        self.model, self.role, self.needs_values, self.carries = unwrap(model, role), role, needs_values, carries
        self.verify: Verify = verify
        self.ranks: int | None = None  # how many hold the shards of a sequence; None: it is whole
        self.keep_graph = False  # a forward without gradients does not replace one with gradients
        self.must_be_eval = False  # each forward runs in eval mode, whatever the owner of the model has called
        self.takes: Callable[[], bool] = lambda: True  # whether a forward of the model belongs to this role
        self.running: Callable[[], Any] = nullcontext  # the context in which the distiller runs the model
        self.drop = self.clear  # is called if a forward fails
        self.early_term: Callable[[Call, Step], tuple[Term, tuple] | None] = lambda call, step: None
        self._recorder: Recorder | None = None
        self.clear()

    def attach(self) -> None:
        recorder = Recorder.of(self.model)
        roles = {capture.must_be_eval for capture in recorder.captures if capture.role != "model"}
        if roles - {self.must_be_eval} and self.role != "model":
            raise ValueError(
                f"{self.role}: {type(self.model).__name__} is the student of one distiller and the teacher of another, which runs it in "
                "eval mode: give the other one a copy as its teacher"
            )
        self._recorder = recorder
        recorder.add(self)

    def detach(self) -> None:
        assert self._recorder is not None
        self._recorder.remove(self)
        self._recorder = None
        self.clear()

    def clear(self) -> None:
        self._step: Step | None = None
        self._layers: list[Layer] | None = None

    def is_undone(self) -> bool:
        return self._recorder is not None and self._recorder.is_undone()

    def close(self) -> None:
        """Clears the capture, and forgets a forward that was interrupted."""
        self.clear()
        if self._recorder is not None:
            self._recorder.step = None

    def reset(self) -> None:
        """Clears the capture, and forgets which layers are proven."""
        self.close()
        if self._recorder is not None:
            self._recorder.forget_proofs()

    def before_forward(self) -> None:
        if self.must_be_eval and any(module.training for module in self.model.modules()):
            self.model.eval()

    def take(self, step: Step) -> None:
        if step.is_generation and self.role != "model":
            return
        if not self.takes() or (self.keep_graph and self.has_run and self.step.has_graph and not step.has_graph):
            return
        if self.has_run and self.step.has_graph and self.role == "student" and not torch.compiler.is_compiling():
            warnings.warn(
                "AttentionDistiller: a forward of the student is dropped, because the student ran again before loss(): call loss() "
                "after each forward", stacklevel=2,
            )  # fmt: skip
        self._step, self._layers = step, None

    @property
    def has_run(self) -> bool:
        return self._step is not None

    @property
    def step(self) -> Step:
        assert self._step is not None
        return self._step

    @property
    def is_checkpointing(self) -> bool:
        return self.model.training and self.model.is_gradient_checkpointing

    @property
    def layers(self) -> list[Layer]:
        if self._step is None:
            return []
        if self._layers is None:
            self._layers = as_layers(
                self.step.calls, self.step.read_keys, self.model, self.role, self._needs_proof, self._proven, self.ranks
            )
        return self._layers

    def _needs_proof(self, call: Call) -> bool:
        return self.ranks is None and self._recorder is not None and self._recorder.wants_proof(call)

    def _proven(self, call: Call) -> None:
        if self._recorder is not None and call.probe is not None:
            self._recorder.proven(call)
