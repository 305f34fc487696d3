"""Functions that also take DTensors."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def accepts_dtensors(function: _Function) -> _Function:
    """Calls with DTensors go to streamkl.parallel, which imports torch.distributed.tensor: that takes time."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if any(type(value).__name__ == "DTensor" for value in (*args, *kwargs.values())):
            from .parallel._dtensor import call_on_shards

            return call_on_shards(function, args, kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
