"""Attention distillation of Hugging Face models, without changes to their code.

    with streamkl.hf.AttentionDistiller(teacher, student, direction="auto") as distiller:
        for batch in loader:
            loss = student(**batch).loss + 0.1 * distiller.loss()
            loss.backward()

AttentionDistiller                      the KL between the attention of two models
DistillationTrainer, DistillationMixin  the same for transformers' Trainer and trainers that derive from it
AttentionStats                          which keys each layer attends to, how much, and how far away
capture                                 queries, keys, LSEs and masks of the layers of a model
IndexerTrainer                          trains the indexers of a model with sparse attention
compare                                 the KL per layer, head and position, and maps
save_pair                               a file for `streamkl kl` and `streamkl map`
"""

from typing import TYPE_CHECKING

from ._compare import Comparison, capture, compare, save_pair
from ._distiller import AttentionDistiller
from ._explain import Explanation
from ._indexer import IndexerReport, IndexerTrainer
from ._layers import Layer
from ._stats import AttentionStats

if TYPE_CHECKING:
    from .trainer import DistillationMixin, DistillationTrainer

__all__ = [
    "AttentionDistiller", "AttentionStats", "Comparison", "DistillationMixin", "DistillationTrainer", "Explanation", "IndexerReport", "IndexerTrainer", "Layer",
    "capture", "compare", "save_pair",
]  # fmt: skip


def __getattr__(name: str):
    """Imports the trainer on first use: it needs accelerate."""
    if name in ("DistillationMixin", "DistillationTrainer"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
