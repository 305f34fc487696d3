"""Attention distillation with Hugging Face's Trainer.

    python examples/distill_trainer.py

The logs contain attention_kl, evaluation reports eval_attention_kl. For TRL's trainers, write for example
`class DistillingSFTTrainer(DistillationMixin, SFTTrainer): ...`.
"""

import torch

from streamkl.hf import DistillationTrainer


def main():
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    torch.manual_seed(0)
    shape = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=4)
    teacher = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=4))
    student = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2))
    data = [dict(input_ids=ids, labels=ids) for ids in torch.randint(0, 256, (384, 48))]
    arguments = TrainingArguments(
        output_dir="distilled", max_steps=40, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=10,
        save_strategy="no", report_to=[],
    )  # fmt: skip
    trainer = DistillationTrainer(
        model=student,
        args=arguments,
        train_dataset=data[64:],
        eval_dataset=data[:64],
        teacher=teacher,
        kl_weight=10.0,  # tiny random models, which this makes visible; start with 0.1 for real ones
    )
    trainer.train()
    print(f"attention KL on held-out tokens: {trainer.evaluate()['eval_attention_kl']:.4f}")
    return trainer


if __name__ == "__main__":
    main()
