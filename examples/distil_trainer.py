"""Attention distillation in a short subclass of Hugging Face's Trainer.

    python examples/distil_trainer.py

TRL's trainers derive from Trainer: to use SFTTrainer, say, change the base class.
"""

import torch
from transformers import Trainer

import streamkl.hf


class DistillingTrainer(Trainer):
    """Adds `weight` times the attention KL to the loss, and logs `attention_kl`."""

    def __init__(self, *args, teacher, weight=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = weight
        self.distiller = streamkl.hf.AttentionDistiller(teacher.to(self.args.device), self.model)

    def train(self, *args, **kwargs):
        with self.distiller:
            return super().train(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training and self.distiller.attached:
            attention_kl = self.distiller.loss()
            self.latest_kl = attention_kl.detach()
            loss = loss + self.weight * attention_kl
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs["attention_kl"] = self.latest_kl.item()
        super().log(logs, *args, **kwargs)


def main():
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    torch.manual_seed(0)
    shape = dict(vocab_size=256, hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4)
    teacher = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=4))
    student = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2))
    data = [dict(input_ids=ids, labels=ids) for ids in torch.randint(0, 256, (512, 64))]
    arguments = TrainingArguments(
        output_dir="distilled", max_steps=60, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=10,
        save_strategy="no", report_to=[],
    )  # fmt: skip
    DistillingTrainer(model=student, args=arguments, train_dataset=data, teacher=teacher, weight=10.0).train()


if __name__ == "__main__":
    main()
