"""Context parallelism of models: the region in which torch splits attention over ranks, and its group.

accelerate's ``ParallelismConfig(cp_size=...)`` opens the same region, in ``accelerator.maybe_context_parallel()``.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._options import Parallel, ShardLayout

_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_CONTEXT_PARALLEL = f"{_EXPERIMENTAL}._context_parallel._attention"


@dataclass(frozen=True)
class Region:
    """An active region. Without a mesh, its group is not known."""

    mesh: Any
    layout: ShardLayout


def active_region() -> Region | None:
    """The region of torch's context_parallel that a model runs in now, if any. It replaces scaled_dot_product_attention."""
    attention = torch.nn.functional.scaled_dot_product_attention
    name = getattr(attention, "__module__", None) or ""
    if name.startswith(_EXPERIMENTAL):
        return Region(inspect.getclosurevars(attention).nonlocals.get("device_mesh"), _layout(sys.modules[name]))
    module: Any = sys.modules.get(_CONTEXT_PARALLEL)
    if module is None or module.DTensor._op_dispatcher._custom_op_handlers is module.existing_custom_ops:
        return None
    return Region(None, _layout(module))  # a region of modules, which keep their mesh to themselves


def _layout(module: Any) -> ShardLayout:
    return "zigzag" if module._cp_options.enable_load_balance else "contiguous"


def ranks_of(parallel: Parallel | None) -> int | None:
    """How many ranks hold the shards of a sequence; None: it is whole."""
    if parallel is None:
        return None
    from ..parallel import Groups  # torch may lack torch.distributed

    return Groups(parallel).layout.world


def parallel_of(region: Region | None, asked: Parallel) -> Parallel | None:
    """The groups of attention_kl for a student that ran in `region`; None if it holds whole sequences.

    Raises:
        RuntimeError: the student's sequences are split, and over which ranks is not known.
    """
    group, layout = asked.context_group, asked.layout
    if group is None and region is None:
        return None
    if group is None and region is not None and region.mesh is None:
        raise RuntimeError(
            "AttentionDistiller: the student ran in a context-parallel region whose mesh is not known, and the KL of its shards "
            "would not be that of its sequences: pass parallel=streamkl.Parallel(context_group=...)"
        )
    if region is not None:
        group, layout = region.mesh if group is None else group, layout or region.layout
    return replace(asked, context_group=group, layout=layout, gradients=asked.gradients or "mean")
