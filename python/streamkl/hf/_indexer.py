"""IndexerTrainer: trains the indexers of a model that attends to a list of keys per query, in the dense and the sparse stage.

transformers' axk2, deepseek_v32, glm_moe_dsa and hy_v4 are such models. Their code is not repeated here. An indexer runs once
more, with gradients, on the inputs of its layer, and its two products yield its tensors before any matrix of scores exists.
The teacher's tensors come with the call of the attention function.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Literal, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from .._options import IndexerOptions, check_choice
from ..indexer import indexer_kl
from ._capture import refuse_tensor_parallel
from ._keys import Refused, keys_of_tensor

ATTENTION = "streamkl_indexer"
Stage = Literal["dense", "sparse"]


class IndexerReport(NamedTuple):
    """What a step has found, of each layer with an attention: f32, without gradients."""

    loss: torch.Tensor  # mean KL over the rows
    recall: torch.Tensor  # share of the layer's full attention that the keys of the list hold, mean over the rows


class _Finished(Exception):
    pass


class _Products(TorchFunctionMode):
    """Runs an indexer up to its second product: q [B, S, G, D] with keys [B, 1, D, T], then weights [B, S, 1, G]."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.matmul:
            return function(*args, **(kwargs or {}))
        if self.found:
            weights, factor = args[0].squeeze(-2), args[1].squeeze(-1)  # factor: multiplies the product in the model's code
            self.found.append(weights * factor)
            raise _Finished
        query, keys = args
        self.found += [query, keys.squeeze(1).transpose(-1, -2)]
        return torch.ones_like(query[..., :1])


def indexer_tensors(indexer: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """(q_s, k_s, w_s) of an indexer's call, with gradients; the scale is part of w_s."""
    forward = getattr(type(indexer).forward, "__wrapped__", type(indexer).forward)  # the function inside its decorator torch.no_grad
    products = _Products()
    try:
        with torch.enable_grad(), products:
            forward(indexer, *args, **{**kwargs, "past_key_values": None})
    except _Finished:
        dtype = args[0].dtype  # the model widens queries and keys to f32
        query, keys, weights = products.found
        return query.to(dtype), keys.to(dtype), weights
    raise ValueError(f"{type(indexer).__name__}: no indexer that this version knows: it makes no two products")


def row_bounds(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """key_begin and key_end of an attention mask [B, 1, S, T], boolean or added to the logits; rows of padding attend to nothing."""
    try:
        keys = keys_of_tensor(mask, *mask.shape[2:])
    except Refused as error:
        raise ValueError(f"attention_mask: every query must attend to one range of keys: the layer {error}") from error
    begin, end = (bound.expand(len(mask), -1) for bound in (keys.begin, keys.end))
    if keys.count != int((keys.end - keys.begin).sum()):
        raise ValueError("attention_mask: every query must attend to one range of keys, also those that no query sees")
    attending, last = begin < end, end.cummax(-1).values
    if keys.shown is not None:  # a token that no query attends to is padding, and its own query does not count
        attending = attending & keys.shown
    begin, end = torch.where(attending, begin, last), torch.where(attending, end, last)  # an empty row stays empty
    if (begin.diff(dim=-1) < 0).any() or (end != last).any():
        raise ValueError("attention_mask: the ranges of the queries must not move back; pad at the end")
    return begin, end


class IndexerTrainer:
    """Freezes a model except for its indexers, and computes their losses and gradients layer by layer.

    Example::

        trainer = streamkl.hf.IndexerTrainer(model)
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
        for batch in batches:
            report = trainer.backward(**batch, stage="dense")   # the model attends to all keys; later stage="sparse"
            optimizer.step(), optimizer.zero_grad()

    A layer without an indexer of its own uses the list of the last one before it, and teaches that indexer, too. Sinks belong
    to the teacher: the target is its distribution on the keys.

    Args:
        model: a transformers model, not inside DDP: on several processes, average the gradients of `parameters()` over them.
    """

    def __init__(self, model: Any) -> None:
        indexers = [(name, m) for name, m in model.named_modules() if name.endswith("indexer") and hasattr(m, "index_topk")]
        if not indexers:
            raise ValueError(f"{type(model).__name__}: has no indexers; axk2, deepseek_v32, glm_moe_dsa and hy_v4 models have")
        if not hasattr(getattr(model, "config", None), "_attn_implementation"):
            raise TypeError(
                f"model: {type(model).__name__} must be a transformers model: pass the model inside. On several processes, average the "
                "gradients of trainer.parameters() before optimizer.step()"
            )
        refuse_tensor_parallel(model, "model")  # the target is the mean over all heads
        self.model, self.indexers = model, dict(indexers)
        model.requires_grad_(False)
        for indexer in self.indexers.values():
            indexer.requires_grad_(True)
        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of all indexers."""
        for indexer in self.indexers.values():
            yield from indexer.parameters()

    def backward(self, *, stage: Stage, **inputs: Any) -> IndexerReport:
        """Adds the gradients of the mean loss of all layers to the indexers. The model's output is not kept."""
        return self._run(stage, inputs, gradients=True)

    def evaluate(self, *, stage: Stage = "dense", **inputs: Any) -> IndexerReport:
        """The same without gradients."""
        return self._run(stage, inputs, gradients=False)

    def _run(self, stage: Stage, inputs: dict[str, Any], gradients: bool) -> IndexerReport:
        check_choice("stage", stage, ("dense", "sparse"))
        step = _Step(stage, gradients, self.model.config.num_hidden_layers)
        with self._attached(step), torch.no_grad():
            self.model(**{"use_cache": False, **inputs})
        step.finish()
        return IndexerReport(torch.stack(step.losses), torch.stack(step.recalls))

    @contextmanager
    def _attached(self, step: _Step) -> Iterator[None]:
        before, config = self.model.config._attn_implementation, self.model.config
        hooks = [m.register_forward_pre_hook(step.see_indexer, with_kwargs=True) for m in self.indexers.values()]
        config._attn_implementation, _current[:] = ATTENTION, [step]
        try:
            yield
        finally:
            config._attn_implementation = before
            _current.clear()
            for hook in hooks:
                hook.remove()


_current: list[_Step] = []  # the step of the model that runs


class _Step:
    """A forward of the model. Losses of layers that share an indexer are differentiated together."""

    def __init__(self, stage: Stage, gradients: bool, layers: int) -> None:
        self.stage, self.gradients, self.layers = stage, gradients, layers
        self.indexer: tuple[torch.Tensor, ...] = ()
        self.pending: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.recalls: list[torch.Tensor] = []

    def see_indexer(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.finish()
        self.indexer = indexer_tensors(module, args, kwargs)

    def finish(self) -> None:
        if self.gradients and self.pending:
            with torch.enable_grad():
                (torch.stack(self.pending).sum() / self.layers).backward()
        self.pending.clear()

    def see_attention(self, query, key, mask, scaling, indices, sinks) -> torch.Tensor:
        """Adds the layer's loss. Returns the LSEs of its keys [B, H, S]: all of them in the dense stage, else the list's."""
        begin, end = row_bounds(mask)
        options: IndexerOptions = dict(
            key_begin=begin, key_end=end, softmax_scale_t=scaling, softmax_scale_s=1.0
        )  # fmt: skip
        q_t, k_t, (q_s, k_s, w_s) = query.transpose(1, 2), key.transpose(1, 2), self.indexer
        tensors = q_t, k_t, q_s, k_s, w_s
        with torch.no_grad():
            own, full = (indexer_kl(*tensors, keys, return_rows=True, **options)[1].lse_t for keys in (indices, None))
        whole = full if sinks is None else torch.logaddexp(full, sinks.float()[:, None])
        listed = self.stage == "sparse"
        lse = own if listed else full
        options["lse_t"] = lse
        if sinks is not None:
            wide = torch.logaddexp(lse, sinks.float()[:, None])
            options |= {"lse_t": wide, "lse_t_visible": lse, "lse_t_wider": True}
        with torch.set_grad_enabled(self.gradients):
            loss = indexer_kl(*tensors, indices if listed else None, **options)
        self.pending.append(loss)
        self.losses.append(loss.detach())
        attending = ~full.isinf()
        share = torch.where(attending, (own - whole).exp(), 0.0)
        self.recalls.append(share.sum() / attending.sum().clamp(min=1))
        return lse


def _attention(module, query, key, value, attention_mask, scaling, indices=None, s_aux=None, **_):
    """The attention of a step: over all keys or over the list, like that of the model."""
    (step,) = _current
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    lse = step.see_attention(query, key, attention_mask, scaling, indices, s_aux)
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    if step.stage == "sparse":
        listed = torch.zeros_like(visible[:, 0]).scatter(-1, indices.long(), True)
        visible = visible & listed[:, None]
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, visible, scale=scaling)
    if s_aux is not None:
        output = output * torch.sigmoid(lse - s_aux.float()[:, None])[..., None].to(output.dtype)
    return output.transpose(1, 2).contiguous(), None
