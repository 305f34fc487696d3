"""What a function accepts as a tensor: a dense one, outside of transforms that have no rule for its operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad


def check_strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        given = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise ValueError(f"{name}: {given} must be a dense tensor, torch.strided")


are_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def check_dense(*, optional: dict[str, Any], **tensors: Any) -> None:
    """Raises ValueError for what is no tensor, or no dense one."""
    if torch.compiler.is_compiling():
        return
    for name, given in (*tensors.items(), *optional.items()):
        if not isinstance(given, torch.Tensor) and not (given is None and name in optional):
            raise ValueError(
                f"{name}: {type(given).__name__} must be a torch.Tensor, such as torch.as_tensor({name})"
            )
        if given is not None:
            check_strided(name, given)


def check_tensors(function: str, *, optional: dict[str, Any], **tensors: Any) -> None:
    """check_dense(), for the arguments of an operator. Raises RuntimeError under a transform of torch.func, too.

    Without a forward-mode rule, an operator would have a tangent of 0.
    """
    check_dense(optional=optional, **tensors)
    if torch.compiler.is_compiling() or not (are_transforms_active() or forward_ad._current_level >= 0):
        return
    given = [each for each in (*tensors.values(), *optional.values()) if each is not None]
    if are_transforms_active() and any(map(torch._C._functorch.is_functorch_wrapped_tensor, given)):
        raise _unsupported(function, "torch.func transforms (jvp, grad, vmap, hessian)")
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(each).tangent is not None for each in given):
        raise _unsupported(function, "forward-mode differentiation")


def check_gradient(function: str, gradient: torch.Tensor | None) -> None:
    """Raises RuntimeError for many upstream gradients at once."""
    if not torch.compiler.is_compiling() and gradient is not None and _is_batched(gradient):
        raise _unsupported(function, "batches of gradients (is_grads_batched=True, vectorize=True)")


_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)


def _unsupported(function: str, case: str) -> RuntimeError:
    from . import reference  # which imports this module

    known = f"; streamkl.reference.{function} supports them" if hasattr(reference, function) else ""
    return RuntimeError(
        f"streamkl.{function} does not support {case}: use backward() or torch.autograd.grad, and the batch dimension for "
        f"vmap{known}"
    )
