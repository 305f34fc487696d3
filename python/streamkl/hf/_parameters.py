"""A KL as the only loss reaches no parameter after the last queries and keys; DDP waits for the gradient of each."""

from __future__ import annotations

import torch


class _ReachAll(torch.autograd.Function):
    """Passes the loss on. The other tensors receive no gradient, but autograd counts them as reached."""

    @staticmethod
    def forward(ctx, loss, *tensors):
        ctx.count = len(tensors)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, grad):
        return grad, *[None] * ctx.count


def reach_all_parameters(losses: dict[int, torch.Tensor], model: torch.nn.Module) -> dict[int, torch.Tensor]:
    if not torch.is_grad_enabled() or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return losses
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    (first, loss), *others = losses.items()
    return {first: _ReachAll.apply(loss, *parameters), **dict(others)}
