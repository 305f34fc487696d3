"""Attention distillation of Hugging Face models, without changes to their code.

with streamkl.hf.AttentionDistiller(teacher, student) as distiller:
    for batch in loader:
        loss = student(**batch).loss + distiller.loss()
        loss.backward()
"""

from ._distiller import AttentionDistiller

__all__ = ["AttentionDistiller"]
