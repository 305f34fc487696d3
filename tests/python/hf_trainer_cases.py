"""One optimizer step of the trainers of transformers and TRL, and the gradient that its attention KL must have.

The reference is dense and in float64: KL(student || teacher), the default for equal numbers of heads, of all rows of the
step, in all micro-batches and on all processes, divided by their number.
"""

import copy
import os
import sys

import pytest
import torch
import transformers
from hf_models import batch, llama

from streamkl.hf import DistillationMixin

SEQUENCES = 16
WEIGHT = 1000.0  # the KL's weight: its gradient is what remains when that of the trainer's own loss is subtracted


class Records:
    """What the student reads with gradients, and the gradients before the optimizer clears them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.read, self.gradients, self.labels = [], {}, []
        student = self.accelerator.unwrap_model(self.model)
        student.model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module, args, kwargs):
        if torch.is_grad_enabled() and self.model.training:
            names = ("input_ids", "attention_mask", "position_ids")
            self.read.append({name: kwargs[name].clone() for name in names if kwargs.get(name) is not None})

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.labels.append(inputs.get("labels"))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        student = self.accelerator.unwrap_model(self.model)
        optimizer.register_step_pre_hook(
            lambda *_: self.gradients.update(
                {name: each.grad.clone() for name, each in student.named_parameters() if each.grad is not None}
            )
        )
        return optimizer


def arguments(path, kind=transformers.TrainingArguments, **options):
    fixed = dict(
        output_dir=str(path), report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, max_steps=1, learning_rate=1e-3,
        lr_scheduler_type="constant", max_grad_norm=1e9, disable_tqdm=True,
    )  # fmt: skip
    return kind(**{**fixed, **options})


def models():
    """(teacher, student)"""
    torch.manual_seed(1)
    return llama(), llama()


# ---- Trainers --------------------------------------------------------------------------------------------------------


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(90))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )  # fmt: skip


def words(i, count):
    return " ".join(f"w{(3 * i + j * j) % 90}" for j in range(count))


def texts(count=SEQUENCES):
    from datasets import Dataset

    return Dataset.from_list([dict(text=words(i, 5 + 3 * (i % 4))) for i in range(count)])


def dataset(count=SEQUENCES, length=12):
    """Padded sequences whose prompts, of different lengths, have no labels."""
    found = []
    for i, ids in enumerate(batch(size=count, length=length)["input_ids"]):
        mask = (torch.arange(length) < length - i % 5).long()
        labels = ids.masked_fill((mask == 0) | (torch.arange(length) < 3 * (i % 4)), -100)
        found.append(dict(input_ids=ids, attention_mask=mask, labels=labels))
    return found


def plain(path, sizes, options, **more):
    return _make(transformers.Trainer, arguments(path, **sizes), options, train_dataset=dataset(), **more)


def left_padded(path, sizes, options, **more):
    """Every token has a label, and so has the first one after the padding."""
    data = []
    for i, each in enumerate(dataset()):
        mask = (torch.arange(12) >= 2 * (i % 5)).long()
        data.append(dict(each, attention_mask=mask, labels=each["input_ids"].masked_fill(mask == 0, -100)))
    return _make(transformers.Trainer, arguments(path, **sizes), options, train_dataset=data, **more)


def unlabeled(path, sizes, options, **more):
    data = [{name: each[name] for name in ("input_ids", "attention_mask")} for each in dataset()]
    return _make(transformers.Trainer, arguments(path, **sizes), options, train_dataset=data, **more)


def sft(path, sizes, options, **config):
    import trl

    config = arguments(path, trl.SFTConfig, **{"max_length": 32, "bf16": False, **sizes, **config})
    return _make(trl.SFTTrainer, config, options, train_dataset=texts(), processing_class=make_tokenizer())


def sft_packing(path, sizes, options):
    from datasets import concatenate_datasets

    import trl

    config = arguments(path, trl.SFTConfig, max_length=24, bf16=False, packing=True, **sizes)
    data = concatenate_datasets([texts()] * 3)  # packs of up to 24 tokens: at least 16 of them
    return _make(trl.SFTTrainer, config, options, train_dataset=data, processing_class=make_tokenizer())


def sft_padding_free(path, sizes, options):
    return sft(path, sizes, options, padding_free=True, max_length=None)


def sft_label_smoothing(path, sizes, options):
    """A second forward, without gradients, makes the metrics."""
    return sft(path, sizes, options, label_smoothing_factor=0.1)


def gkd(path, sizes, options):
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    talks = [[("user", words(i, 2 + i % 3)), ("assistant", words(i + 7, 3 + i % 4))] for i in range(SEQUENCES)]
    data = Dataset.from_list([dict(messages=[dict(role=a, content=b) for a, b in talk]) for talk in talks])
    config = arguments(path, GKDConfig, max_length=32, max_new_tokens=4, bf16=False, **{"lmbda": 0.0, **sizes})
    return _make(GKDTrainer, config, options, "teacher_model", train_dataset=data, processing_class=make_tokenizer())


def dpo(path, sizes, options):
    import trl
    from datasets import Dataset

    data = [
        dict(prompt=words(i, 2 + i % 3), chosen=" " + words(i + 7, 3 + i % 4), rejected=" " + words(i + 9, 2))
        for i in range(SEQUENCES)
    ]
    config = arguments(path, trl.DPOConfig, max_length=32, bf16=False, **sizes)
    more = dict(train_dataset=Dataset.from_list(data), processing_class=make_tokenizer(), ref_model=models()[1])
    trainer = _make(trl.DPOTrainer, config, options, **more)
    if "input_ids" not in next(iter(trainer.get_train_dataloader())):
        pytest.skip("DPOTrainer of this release makes its batch inside the loss: micro-batches count the same")
    return trainer


def distillation(path, sizes, options):
    import trl
    from datasets import Dataset

    if not hasattr(trl, "DistillationTrainer"):
        pytest.skip("this release of TRL has no DistillationTrainer")
    data = Dataset.from_list([dict(prompt=words(i, 2 + i % 3)) for i in range(SEQUENCES)])
    from streamkl.trl import AttentionDistillationTrainer

    config = arguments(path, trl.DistillationConfig, max_completion_length=6, bf16=False, **sizes)
    return _make(AttentionDistillationTrainer, config, options, "teacher_model", train_dataset=data,
                 processing_class=make_tokenizer())  # fmt: skip


def _make(kind, config, options, teacher_name="teacher", **more):
    bases = (Records, kind) if issubclass(kind, DistillationMixin) else (Records, DistillationMixin, kind)

    class Trainer(*bases):
        pass

    teacher, student = models()
    return Trainer(model=student, args=config, **{teacher_name: teacher}, **options, **more)


TRAINERS = dict(
    plain=plain, left_padded=left_padded, unlabeled=unlabeled, sft=sft, sft_packing=sft_packing, sft_padding_free=sft_padding_free, sft_label_smoothing=sft_label_smoothing, gkd=gkd, dpo=dpo,
    distillation=distillation,
)  # fmt: skip


# ---- The gradient ----------------------------------------------------------------------------------------------------


def run_step(path, name, accumulate, rows="all"):
    """(gradients of WEIGHT * KL by parameter, what the student read in each micro-batch, labels) of this process."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = dict(
        per_device_train_batch_size=SEQUENCES // processes // accumulate, gradient_accumulation_steps=accumulate
    )
    gradients = []
    for weight in 0.0, WEIGHT:
        options = dict(kl_weight=weight, distiller_options=dict(rows=rows))
        transformers.set_seed(0)
        trainer = TRAINERS[name](path, sizes, options)
        trainer.train()
        gradients.append(trainer.gradients)
    without, with_kl = gradients
    found = {name: (with_kl[name] - without[name]) / WEIGHT for name in with_kl}
    return found, trainer.read, trainer.labels


def dense_gradient(read, labels, rows="all"):
    """The mean over all rows of all micro-batches, from stored attention matrices in float64."""
    teacher, student = (copy.deepcopy(model).double() for model in models())
    for model in teacher, student:
        model.set_attn_implementation("eager")
    total, count = 0.0, 0
    for inputs, targets in zip(read, labels):
        counted = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        inputs = dict(inputs, attention_mask=dense_mask(counted, inputs.get("position_ids")))
        with torch.no_grad():
            attention_t = teacher(**inputs, output_attentions=True, use_cache=False).attentions
        attention_s = student(**inputs, output_attentions=True, use_cache=False).attentions
        if rows == "labels":
            counted = counted & torch.nn.functional.pad(targets[:, 1:] != -100, (0, 1))
        for p, s in zip(attention_t, attention_s):
            p, s = (each.transpose(1, 2)[counted] for each in (p, s))  # [rows, heads, keys]
            seen = p > 0
            terms = s * (torch.where(seen, s, 1).log() - torch.where(seen, p, 1).log())
            total = total + terms.sum() / p.shape[1] / len(attention_s)
        count += int(counted.sum())
    (total / count).backward()
    return {name: each.grad for name, each in student.named_parameters()}


def dense_mask(counted, positions):
    """What to add to the logits, [batch, 1, queries, keys]: a row sees itself and the tokens before it in its sequence."""
    length = counted.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril() & counted[:, None]
    if positions is not None:
        sequence = (positions == 0).cumsum(1)
        seen = seen & (sequence[:, :, None] == sequence[:, None])
    seen = seen | torch.eye(length, dtype=torch.bool)
    return torch.where(seen, 0.0, -1e30).double()[:, None]


def check(gradients, read, labels, rows="all"):
    expected = dense_gradient(read, labels, rows)
    for name, gradient in gradients.items():
        if expected[name] is not None:
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < 2e-4, f"{name}: {error:.2g}"


def main():
    """hf_trainer_cases.py FOLDER NAME ACCUMULATE...: a step of a trainer in each of several processes."""
    import torch.distributed as dist

    folder, name, *accumulations = sys.argv[1:]
    torch.set_num_threads(1)
    for accumulate in map(int, accumulations):
        gradients, read, labels = run_step(folder, name, accumulate)
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, (read, labels))
        all_read, all_labels = (sum(parts, []) for parts in zip(*everything))
        if dist.get_rank() == 0:
            check(gradients, all_read, all_labels)
            print(f"{name}, {accumulate} micro-batches: equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
