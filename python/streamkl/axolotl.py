"""Attention distillation in axolotl: a plugin that adds the attention KL to the loss of its trainer.

plugins: [streamkl.axolotl.AttentionKLPlugin]
attention_kl_teacher: org/model        # a folder, or an id of the Hub; left out with LoRA: the base model
attention_kl_weight: 0.1
attention_kl_options: {row_weight: far, sample_rows: 0.25}
"""

from __future__ import annotations

from typing import Any

import transformers
from axolotl.integrations.base import BasePlugin, PluginManager
from pydantic import BaseModel

from .hf import DistillationMixin


class AttentionKLArgs(BaseModel):
    """The keys of the YAML file."""

    attention_kl_teacher: str | None = None
    """Folder or Hub id of the teacher. Default: the base model of a student with adapters."""
    attention_kl_weight: float = 0.1
    """Factor of the KL in the loss."""
    attention_kl_until: float = 1.0
    """The share of the steps with the KL."""
    attention_kl_options: dict[str, Any] | None = None
    """Options of streamkl.hf.AttentionDistiller; `direction` is "auto" by default."""


class AttentionKLPlugin(BasePlugin):
    """Trains with :class:`streamkl.hf.DistillationMixin`: logs, evaluation and checkpoints are as it describes them."""

    def get_input_args(self) -> str:
        return "streamkl.axolotl.AttentionKLArgs"

    def pre_model_load(self, cfg: Any) -> None:
        """Refuses other trainers. axolotl takes the first one that a plugin has, and says nothing about a second."""
        ours = "streamkl.axolotl.AttentionKLPlugin"
        for name in "rl", "reward_model", "process_reward_model", "trainer_cls":
            if cfg.get(name):
                raise ValueError(
                    f"{name}={cfg[name]!r}: {ours} has axolotl's causal trainer: leave out {name} or the plugin"
                )
        for name, plugin in PluginManager.get_instance().plugins.items():
            asked = name in cfg["plugins"] and plugin is not self
            if asked and plugin.get_trainer_cls(cfg) is not None:
                raise ValueError(f"plugins: {name} and {ours} both replace axolotl's trainer: leave one of them out")

    def get_trainer_cls(self, cfg: Any) -> type[transformers.Trainer]:
        """axolotl's trainer with the KL."""
        from axolotl.core.trainers import AxolotlTrainer

        class AttentionKLTrainer(DistillationMixin, AxolotlTrainer):
            def __init__(self, *args, **kwargs) -> None:
                distillation = dict(
                    teacher=_load_teacher(cfg), kl_weight=cfg["attention_kl_weight"], kl_until=cfg["attention_kl_until"],
                    distiller_options=cfg.to_dict().get("attention_kl_options"),
                )  # fmt: skip
                super().__init__(*args, **kwargs, **distillation)

        return AttentionKLTrainer


def _load_teacher(cfg: Any) -> Any:
    """In the type of the student, with its attention implementation. None: the base model of the student."""
    if not cfg.get("attention_kl_teacher"):
        return None
    given = {name: value for name, value in (("attn_implementation", cfg.get("attn_implementation")),) if value}
    teacher = transformers.AutoModelForCausalLM.from_pretrained(
        cfg["attention_kl_teacher"], dtype=cfg["torch_dtype"], trust_remote_code=bool(cfg.get("trust_remote_code")), **given
    )  # fmt: skip
    return teacher.requires_grad_(False).eval()
