"""Attention distillation with transformers' Trainer and trainers that derive from it, such as TRL's.

class DistillingSFTTrainer(DistillationMixin, SFTTrainer): ...

trainer = DistillingSFTTrainer(model=student, args=arguments, train_dataset=data, teacher=teacher, kl_weight=10.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

from ._capture import unwrap
from ._distiller import AttentionDistiller

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the trainer comes after the mixin in the list of bases


class _Mean:
    """The weighted mean of the KL of every layer since the last reset."""

    def __init__(self) -> None:
        self.sums: dict[Any, torch.Tensor] = {}
        self.weight: Any = 0

    def add(self, losses: Mapping[Any, torch.Tensor], weight: Any) -> None:
        for name, loss in losses.items():
            self.sums[name] = self.sums.get(name, 0) + loss.detach().float() * weight
        self.weight = self.weight + weight

    def metrics(self, gather, prefix: str = "") -> dict[str, float]:
        """{"attention_kl": ..., "attention_kl_layer_0": ...} over all processes. Resets the mean."""
        if not self.sums:
            return {}
        weight = torch.as_tensor(self.weight, dtype=torch.float32, device=next(iter(self.sums.values())).device)
        values = gather(torch.stack([*self.sums.values(), weight])[None]).sum(0)
        names = [f"{prefix}attention_kl" + ("" if name == "all" else f"_layer_{name}") for name in self.sums]
        self.sums, self.weight = {}, 0
        return dict(zip(names, (values[:-1] / values[-1]).tolist()))


class DistillationMixin(_Trainer):
    """Adds ``kl_weight`` times the attention KL to the loss of a Trainer. Put it before the trainer in the list of bases.

    The KL of a micro-batch counts as its share of the label tokens of the whole step, as the loss of the model does. So
    neither gradient accumulation nor the number of processes changes its weight. The logs contain ``attention_kl`` and
    ``attention_kl_layer_<i>``, averaged over the logging window and over all processes, and evaluation reports
    ``eval_attention_kl``. Checkpoints are those of the student; the teacher is not saved.

    Args:
        teacher: the teacher; default: the ``teacher_model`` of the trainer, which GKDTrainer has.
        kl_weight: factor of the KL in the loss.
        distiller_options: options of :class:`streamkl.hf.AttentionDistiller`. With ``fused=True`` the KL comes with the backward: the
            logged ``loss`` does not contain it, ``attention_kl`` does.
    """

    def __init__(
        self, *args, teacher: torch.nn.Module | None = None, kl_weight: float = 1.0,
        distiller_options: Mapping[str, Any] | None = None, **kwargs,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        teacher = teacher if teacher is not None else getattr(self, "teacher_model", None)
        if teacher is None:
            raise ValueError("teacher=None: must be a transformers model")
        self.kl_weight, self._distiller_options = kl_weight, dict(distiller_options or {})
        self._teacher = teacher.to(self.args.device)
        self._distiller: AttentionDistiller | None = None
        self._kl_means = {True: _Mean(), False: _Mean()}  # of training and evaluation
        self._uncounted: tuple[bool, Any] | None = None  # (training, weight) of a KL that the means lack
        assert self.distiller  # its options are checked now

    @property
    def distiller(self) -> AttentionDistiller:
        """The distiller of the current model: a trainer with ``model_init`` makes new ones."""
        if self._distiller is None or self._distiller.student.model is not unwrap(self.model, "student"):
            self._distiller = AttentionDistiller(self._teacher, self.model, **self._distiller_options)
        return self._distiller

    def _inner_training_loop(self, *args, **kwargs):
        with self.distiller:
            return super()._inner_training_loop(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        with self.distiller:
            output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        output.metrics.update(self._kl_means[False].metrics(self.accelerator.gather, f"{prefix}_"))
        return output

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, **kwargs):
        labels = inputs.get("labels")
        if not self.distiller.attached:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        items = self._count_items(inputs)
        self.distiller.student.clear()
        self.distiller.teacher.clear()
        self.distiller.student.keep_graph = True  # SFTTrainer may run a second forward, for metrics
        try:
            answer = super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        finally:
            self.distiller.student.keep_graph = False
        loss, outputs = answer if return_outputs else (answer, None)
        kl = self.distiller.loss(labels=labels)
        self._uncounted = (model.training, 1 if items is None else items)
        if not self.distiller.carried_layers:
            self._count_kl()
        share = self._share(items, num_items_in_batch) if model.training else 1.0
        loss = loss + self.kl_weight * share * kl.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self._count_kl()  # if the backward had to bring it
        return loss

    def _count_kl(self) -> None:
        if self._uncounted is not None:
            training, weight = self._uncounted
            self._kl_means[training].add({"all": self.distiller.last_loss, **self.distiller.last_losses}, weight)
            self._uncounted = None

    def _count_items(self, inputs) -> torch.Tensor | None:
        """Label tokens of a micro-batch, counted as Trainer counts those of the step."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if labels is None:
            return None
        if "shift_labels" not in inputs and getattr(self, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        return (labels != -100).sum()

    def _share(self, items, num_items_in_batch):
        """The factor of the mean KL of a micro-batch in the loss of the step."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            accepts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = accepts or self.compute_loss_func is not None
        if not scaled:
            return 1.0  # Trainer divides by the number of micro-batches
        if items is None or num_items_in_batch is None:
            return 1.0 / self.current_gradient_accumulation_steps
        processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return items / torch.as_tensor(num_items_in_batch).clamp(min=1) * processes

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs.update(self._kl_means[True].metrics(self.accelerator.gather))
        return super().log(logs, *args, **kwargs)


class DistillationTrainer(DistillationMixin, Trainer):
    """transformers' Trainer with the attention KL: see :class:`DistillationMixin`."""
