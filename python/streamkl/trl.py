"""Attention distillation with TRL's DistillationTrainer.

trainer = AttentionDistillationTrainer(model=student, teacher_model=teacher, kl_weight=0.1, args=DistillationConfig(...))
"""

from __future__ import annotations

import trl

from .hf import DistillationMixin


class AttentionDistillationTrainer(DistillationMixin, trl.DistillationTrainer):
    """TRL's DistillationTrainer with the attention KL: one forward of ``teacher_model`` serves both losses.

    Its arguments are those of both: see :class:`streamkl.hf.DistillationMixin`. ``use_liger_kernel``
    needs ``liger_kernel_config={"fused_linear_cross_entropy": False}``: Liger's fused losses are refused.
    """
