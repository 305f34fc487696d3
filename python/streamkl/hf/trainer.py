"""Attention distillation with transformers' Trainer and trainers that derive from it, such as TRL's.

class DistillingSFTTrainer(DistillationMixin, SFTTrainer): ...

trainer = DistillingSFTTrainer(model=student, args=arguments, train_dataset=data, teacher=teacher, kl_weight=0.1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

from ._capture import NO_DATA_PARALLEL, unwrap
from ._distiller import AttentionDistiller
from ._inputs import device_of, predicts_next_token

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the trainer comes after the mixin in the list of bases


# What the towers of images and sounds read.
_MEDIA = ("pixel_values", "input_features", "input_values")


class _Means:
    """Means over all processes since the last reset: the KL of every layer, and the model's own loss."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.weights: dict[str, Any] = {}

    def add(self, name: str, value: torch.Tensor, weight: Any) -> None:
        """`value` is multiplied by its weight already."""
        self.sums[name] = self.sums.get(name, 0) + value.detach().float()
        self.weights[name] = self.weights.get(name, 0) + weight

    def metrics(self, gather, prefix: str = "") -> dict[str, float]:
        """{"attention_kl": ..., "attention_kl_layer_0": ..., "model_loss": ...}. Resets the means."""
        if not self.sums:
            return {}
        device = next(iter(self.sums.values())).device
        weights = [torch.as_tensor(weight, dtype=torch.float32, device=device) for weight in self.weights.values()]
        sums = [each.to(device) for each in self.sums.values()]
        values = torch.stack([torch.stack(sums), torch.stack(weights)])
        summed, total = gather(values[None]).sum(0)
        names = [f"{prefix}{name}" for name in self.sums]
        self.sums, self.weights = {}, {}
        return dict(zip(names, (summed / total).tolist()))


@dataclass
class _Step:
    """The rows that the KL of an optimizer step averages over."""

    rows: list[torch.Tensor]  # counted in each micro-batch of this process
    total: torch.Tensor  # rows of all processes
    micro_batch: int = 0  # index of the current one


class DistillationMixin(_Trainer):
    """Adds ``kl_weight`` times the attention KL to the loss of a Trainer. Put it before the trainer in the list of bases.

    The KL of a step is the mean over all its rows, in all micro-batches and on all processes, whatever the loss of the
    model divides by. So neither gradient accumulation nor the number of processes changes the gradient; with the
    ``row_weight`` of the distiller, every micro-batch has a weighted mean of its own. A trainer that
    generates its inputs inside ``training_step`` (on-policy GKD) does not know all rows in advance: there every
    micro-batch counts the same. Without labels, the KL is the only loss of a plain Trainer.

    The logs contain ``attention_kl``, ``attention_kl_layer_<i>`` and ``model_loss``, the loss without the KL, over the
    logging window and all processes. Evaluation reports them as ``eval_attention_kl`` and so on; ``eval_loss`` includes
    the KL, as ``loss`` does. Checkpoints are those of the student; the teacher is not saved.

    Args:
        teacher: the teacher; default: the ``teacher_model`` of the trainer, which GKDTrainer and TRL's DistillationTrainer
            have and run themselves; or else the base model of a PEFT student.
        kl_weight: factor of the KL in the loss; this default and that of ``direction`` did best for a real model (docs/study).
        kl_until: the share of the steps with the KL. The steps after it train without, and evaluation still measures it.
        distiller_options: options of :class:`streamkl.hf.AttentionDistiller`; ``direction`` is ``"auto"`` by default.
    """

    def __init__(
        self, *args, teacher: torch.nn.Module | None = None, kl_weight: float = 0.1, kl_until: float = 1.0,
        distiller_options: Mapping[str, Any] | None = None, **kwargs,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        teacher = teacher if teacher is not None else getattr(self, "teacher_model", None)
        if not 0 <= kl_until <= 1:
            raise ValueError(f"kl_until={kl_until!r}: must be 0..1, a share of the steps")
        if self.args.n_gpu > 1:
            raise ValueError(f"args.n_gpu={self.args.n_gpu}: {NO_DATA_PARALLEL}, or set CUDA_VISIBLE_DEVICES to one")
        _refuse_fused_losses(self)
        self.kl_weight, self.kl_until, self._distiller_options = kl_weight, kl_until, dict(distiller_options or {})
        # unwrap() refuses a path, with the call that loads it
        if teacher is not None and device_of(unwrap(teacher, "teacher")) is not None:
            teacher = teacher.to(self.args.device)
        self._teacher = teacher
        self._distiller: AttentionDistiller | None = None
        self._means = {True: _Means(), False: _Means()}  # training has one, and evaluation the other
        self._step_rows: _Step | None = None
        self._generated: Any = None  # the micro-batches that a trainer has generated for this step
        assert self.distiller  # creates the distiller, which checks its options

    @property
    def distiller(self) -> AttentionDistiller:
        """The distiller of the current model: a trainer with ``model_init`` makes new ones."""
        if self._distiller is None or self._distiller.student.model is not unwrap(self.model, "student"):
            self._distiller = AttentionDistiller(
                self._teacher, self.model, **dict(direction="auto") | self._distiller_options
            )
        return self._distiller

    def _inner_training_loop(self, *args, **kwargs):
        with self.distiller:
            return super()._inner_training_loop(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        with self.distiller:
            output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        output.metrics.update(self._means[False].metrics(self.accelerator.gather, f"{prefix}_"))
        return output

    # ---- Rows of a step ----------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args, **kwargs):
        samples, items = super().get_batch_samples(*args, **kwargs)
        # GKDTrainer replaces the inputs of some micro-batches, and the weights of a step must add up.
        replaces = getattr(self, "lmbda", 0) > 0 or getattr(self, "seq_kd", False)
        self._step_rows = None if replaces else self._count_step(samples)
        return samples, items

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        generated = getattr(self, "_buffered_inputs", None)  # TRL's DistillationTrainer makes all of a step at once
        if self.model.training and generated is not None and generated is not self._generated:
            self._step_rows, self._generated = self._count_step(generated), generated
        return inputs

    def _count_step(self, samples) -> _Step | None:
        """All processes take part. None if a sample does not tell its rows."""
        counts = [self._count_rows(sample) for sample in samples]
        rows = [count.to(self.args.device) for count in counts if count is not None]
        own = torch.stack(rows).sum() if rows else torch.zeros((), dtype=torch.int64, device=self.args.device)
        total = self.accelerator.gather(own[None]).sum()
        return _Step(rows, total) if len(rows) == len(counts) else None

    def _count_rows(self, inputs) -> torch.Tensor | None:
        """Rows that the KL of a micro-batch averages over: tokens that are not padding, or that predict a label."""
        if not isinstance(inputs, Mapping):
            return None
        if self.distiller.rows == "labels":
            return self._count_labels(inputs)
        if "completion_ids" in inputs:  # generated by TRL's DistillationTrainer
            return inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        if self.distiller.tower not in (None, "language"):
            media = next((inputs[name] for name in _MEDIA if inputs.get(name) is not None), None)
            return None if media is None else torch.tensor(media.numel())  # in proportion to the rows
        is_decoder = self.distiller.student.model.config.is_encoder_decoder and self.distiller.attention != "encoder"
        mask = inputs.get("decoder_attention_mask" if is_decoder else "attention_mask")
        if mask is not None and mask.dim() == 2:
            return (mask != 0).sum()  # axolotl's masks number packed sequences
        names = ("decoder_input_ids", "labels") if is_decoder else ("input_ids", "inputs_embeds")
        tokens = next((inputs[name] for name in names if inputs.get(name) is not None), None)
        return None if tokens is None else torch.tensor(tokens.shape[0] * tokens.shape[1])

    def _count_labels(self, inputs) -> torch.Tensor | None:
        labels = inputs.get("labels")
        if labels is None:
            return None
        counted, mask = labels != -100, inputs.get("attention_mask")
        if predicts_next_token(self.distiller.student.model):
            counted = torch.nn.functional.pad(counted[..., 1:], (0, 1))
            if mask is not None and mask.shape == labels.shape:
                counted = counted & (mask != 0)  # a first token after padding is predicted by no row
        return counted.sum()

    # ---- The loss ----------------------------------------------------------------------------------------------------

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, **kwargs):
        distiller, labels = self.distiller, inputs.get("labels")
        if not distiller.attached:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        rows = self._count_rows(inputs)
        distiller.drop()
        distiller.student.keep_graph = True  # SFTTrainer may run a second forward, for metrics
        try:
            loss, outputs = self._model_loss(model, inputs, return_outputs, num_items_in_batch, kwargs)
        finally:
            distiller.student.keep_graph = False
        factor = self.kl_weight
        if model.training:
            steps, is_scaled = self.current_gradient_accumulation_steps, self._is_scaled(num_items_in_batch)
            is_split = distiller.parallel() is not None
            factor = factor * self._share(rows, is_split) * (1 if is_scaled else steps)  # Trainer divides by them
            self._means[True].add("model_loss", loss if is_scaled else loss / steps, 1 / steps)
        else:
            size = find_batch_size(inputs) or 1
            self._means[False].add("model_loss", loss * size, size)
        if model.training and self.state.global_step >= self.kl_until * self.state.max_steps:
            distiller.drop()
            return (loss, outputs) if return_outputs else loss
        kl = distiller.loss(labels=labels)
        self._count_kl(model.training, 1 if rows is None else rows.to(kl.device))
        loss = loss + factor * kl.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    def _model_loss(self, model, inputs, return_outputs, num_items_in_batch, kwargs) -> tuple[torch.Tensor, Any]:
        """Loss and outputs of the trainer. A plain Trainer refuses inputs without labels: their loss is 0 here."""
        if self._has_no_loss(inputs):
            if model.training and self.kl_until < 1:
                raise ValueError(
                    f"kl_until={self.kl_until:g}: needs labels, or another loss, to train with after the KL"
                )
            outputs = model(**inputs)
            return torch.zeros((), device=self.args.device), outputs
        answer = super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        return answer if return_outputs else (answer, None)

    def _has_no_loss(self, inputs) -> bool:
        is_plain = super().compute_loss.__func__ is Trainer.compute_loss and self.compute_loss_func is None
        return is_plain and not self.can_return_loss and all(inputs.get(name) is None for name in self.label_names)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if not self._has_no_loss(inputs):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, None if prediction_loss_only else outputs.logits, None

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self._step_rows is not None:
            self._step_rows.micro_batch += 1
        return loss

    def _count_kl(self, training: bool, rows: Any) -> None:
        mean = self.distiller.last_loss
        self._means[training].add("attention_kl", mean * rows, rows)
        for i, kl in self.distiller.last_losses.items():
            kl = kl.to(mean.device)
            is_known = ~kl.isnan()  # the distiller left the others out
            self._means[training].add(
                f"attention_kl_layer_{i}", torch.where(is_known, kl * rows, 0.0), rows * is_known
            )

    def _share(self, rows: torch.Tensor | None, is_split: bool) -> Any:
        """The factor of a micro-batch's mean KL in the mean over the rows of the step.

        DDP averages gradients over the processes. If the trainer has replaced the inputs since they were counted, all
        micro-batches count the same. Under context parallelism the inputs are a part of what was counted.
        """
        step, same = self._step_rows, 1 / self.current_gradient_accumulation_steps
        if step is None or rows is None or step.micro_batch >= len(step.rows):
            return same
        counted = step.rows[step.micro_batch]
        share = counted * self.accelerator.num_processes / step.total.clamp(min=1)
        return share if is_split else torch.where(rows.to(counted.device) == counted, share, same)

    def _is_scaled(self, num_items_in_batch) -> bool:
        """Whether the loss of a micro-batch is a part of that of the step, so that Trainer does not divide it."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return scaled
        return self.compute_loss_func is not None or (
            self.model_accepts_loss_kwargs and num_items_in_batch is not None
        )

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs.update(self._means[True].metrics(self.accelerator.gather))
        return super().log(logs, *args, **kwargs)


def _refuse_fused_losses(trainer: Any) -> None:
    """Refuses Liger's fused losses. One of them replaces the forward of the model."""
    untested = "the attention KL is not tested with Liger's fused losses"
    for name in "use_liger_loss", "use_liger_gkd_loss":  # trainers of older releases of TRL
        if getattr(trainer, name, False):
            raise ValueError(f"{name}=True: {untested}: pass use_liger_kernel=False")
    asked = getattr(trainer.args, "liger_kernel_config", None) or {}
    if trainer.args.use_liger_kernel and asked.get("fused_linear_cross_entropy", True):
        raise ValueError(
            f"use_liger_kernel=True: {untested}, of which one replaces the forward of the model: pass "
            "liger_kernel_config={'fused_linear_cross_entropy': False}, or use_liger_kernel=False"
        )


class DistillationTrainer(DistillationMixin, Trainer):
    """transformers' Trainer with the attention KL: see :class:`DistillationMixin`."""
