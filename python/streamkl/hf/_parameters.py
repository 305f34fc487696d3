"""A KL as the only loss reaches no parameter after the last queries and keys: DDP and FSDP wait for them.

DDP waits for the gradient of every parameter, or for the news that there is none. FSDP gathers the parameters of a module when
the gradient of its output arrives: a gradient of 0 makes it do so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class _Reach(torch.autograd.Function):
    """Passes the loss on. Outputs receive a gradient of 0; parameters receive none, but autograd counts them as reached."""

    @staticmethod
    def forward(ctx, loss, parameters_count, *tensors):
        ctx.parameters_count = parameters_count
        ctx.outputs = [(output.shape, output.dtype, output.device) for output in tensors[parameters_count:]]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, grad):
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.outputs]
        return grad, None, *[None] * ctx.parameters_count, *zeros


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def reach_everything(loss: torch.Tensor, model: torch.nn.Module, output: Any) -> torch.Tensor:
    """The loss, in a graph that reaches all parameters of a model that runs on several processes."""
    if not torch.is_grad_enabled() or not is_distributed():
        return loss
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    outputs = list(_tensors(output)) if _is_fsdp(model) else []
    return _Reach.apply(loss, len(parameters), *parameters, *outputs)


def _is_fsdp(model: torch.nn.Module) -> bool:
    from torch.distributed import fsdp

    kinds = tuple(getattr(fsdp, name) for name in ("FSDPModule", "FullyShardedDataParallel") if hasattr(fsdp, name))
    return any(isinstance(module, kinds) for module in model.modules())


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Tensors with a graph in the output of a model; not its cache."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad and output.is_floating_point():
            yield output
    elif isinstance(output, (dict, list, tuple)):
        for each in output.values() if isinstance(output, dict) else output:
            yield from _tensors(each)
