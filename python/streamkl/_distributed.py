"""Functions that also take DTensors and process groups."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def may_be_distributed(function: _Function) -> _Function:
    """Calls with either go to streamkl.parallel, whose import takes time."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if "DTensor" in [type(value).__name__ for value in (*args, *kwargs.values())]:
            from .parallel._dtensor import call_on_shards

            return call_on_shards(call, args, kwargs)
        if kwargs.get("parallel") is not None:
            from .parallel._setup import call_with_groups

            return call_with_groups(function, args, kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
