"""Context parallelism of models: the region in which torch splits attention over ranks, and its group.

accelerate's ``ParallelismConfig(cp_size=...)`` opens the same region, in ``accelerator.maybe_context_parallel()``.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch

_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_CONTEXT_PARALLEL = f"{_EXPERIMENTAL}._context_parallel._attention"


@dataclass(frozen=True)
class Region:
    """An active region. Without a mesh, its group is not known."""

    mesh: Any
    layout: str


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


def _layout(module: Any) -> str:
    return "zigzag" if module._cp_options.enable_load_balance else "contiguous"


def options_of(region: Region | None, cp_group: Any, cp_layout: str | None, cp_grads: str) -> dict[str, Any]:
    """Options of attention_kl for a student that ran in `region`; {} if it holds whole sequences.

    Raises:
        RuntimeError: the student's sequences are split, and over which ranks is not known.
    """
    if cp_group is None and region is None:
        return {}
    if cp_group is None and region is not None and region.mesh is None:
        raise RuntimeError(
            "AttentionDistiller: the student ran in a context-parallel region whose mesh is not known, and the KL of its shards "
            "would not be that of its sequences: pass cp_group"
        )
    group = cp_group if cp_group is not None or region is None else region.mesh
    layout = cp_layout or ("zigzag" if region is None else region.layout)
    return dict(cp_group=group, cp_layout=layout, cp_grads=cp_grads)
