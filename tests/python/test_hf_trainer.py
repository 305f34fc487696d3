"""DistillationMixin with the trainers of transformers and TRL."""

import copy

import pytest
import torch
import transformers
from hf_models import batch, llama

from streamkl.hf import AttentionDistiller, DistillationMixin, DistillationTrainer


def dataset(size=16, length=12):
    ids = batch(size=size, length=length)["input_ids"]
    return [dict(input_ids=each, labels=each.clone()) for each in ids]


def arguments(path, kind=transformers.TrainingArguments, **options):
    fixed = dict(
        output_dir=str(path), report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, max_steps=1, learning_rate=1e-3,
        lr_scheduler_type="constant", max_grad_norm=1e9, disable_tqdm=True,
    )  # fmt: skip
    return kind(**{**fixed, **options})


class RecordsGradients:
    """The gradient of a parameter at the first step, before the optimizer clears it."""

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        parameter = self.model.get_submodule("model.layers.0.self_attn.q_proj").weight
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "gradient", parameter.grad.clone()))
        return optimizer


class Distilling(RecordsGradients, DistillationTrainer):
    pass


def test_accumulation_does_not_change_the_weight(tmp_path):
    """16 x 1, 4 x 4 and 2 x 8 micro-batches of the same 16 sequences give the same gradient."""
    teacher, student, gradients = llama(), llama(), []
    for size, count in (16, 1), (4, 4), (2, 8):
        options = arguments(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=count)
        trainer = Distilling(
            model=copy.deepcopy(student), args=options, train_dataset=dataset(), teacher=teacher, kl_weight=100.0
        )
        trainer.train()
        gradients.append(trainer.gradient)
    assert all((gradient - gradients[0]).norm() < 1e-3 * gradients[0].norm() for gradient in gradients)
    plain = student.zero_grad()
    inputs = {name: torch.stack([each[name] for each in dataset()]) for name in ("input_ids", "labels")}
    with AttentionDistiller(teacher, student) as distiller:
        plain = student(**inputs).loss
        (plain + 100.0 * distiller.loss()).backward()
    torch.testing.assert_close(
        gradients[0], student.model.layers[0].self_attn.q_proj.weight.grad, rtol=1e-3, atol=1e-5
    )


def test_logs_and_evaluation(tmp_path):
    """The log has the mean over its window; evaluation has the KL of the held-out data."""
    teacher, student, data = llama(), llama(), dataset()
    options = arguments(tmp_path, max_steps=4, per_device_train_batch_size=4, logging_steps=4, learning_rate=0.0)
    trainer = DistillationTrainer(
        model=student, args=options, train_dataset=data, eval_dataset=data[:5], teacher=teacher
    )
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    metrics = trainer.evaluate()
    ids = torch.stack([each["input_ids"] for each in data])
    with AttentionDistiller(teacher, student) as distiller, torch.no_grad():
        for inputs, found, prefix in (ids, entry, ""), (ids[:5], metrics, "eval_"):
            student(input_ids=inputs)
            assert found[f"{prefix}attention_kl"] == pytest.approx(distiller.loss().item(), rel=1e-4)
            for i, kl in distiller.last_losses.items():
                assert found[f"{prefix}attention_kl_layer_{i}"] == pytest.approx(kl.item(), rel=1e-4)
    assert student.config._attn_implementation == "sdpa"


def test_checkpoint_and_resume(tmp_path):
    teacher, student, data = llama(), llama(), dataset()
    options = dict(per_device_train_batch_size=4, save_strategy="steps", save_steps=2, gradient_checkpointing=True)
    weights = []
    for path, stops in (tmp_path / "whole", [4]), (tmp_path / "parts", [2, 4]):
        for stop in stops:
            trainer = DistillationTrainer(
                model=copy.deepcopy(student),
                args=arguments(path, max_steps=stop, **options),
                train_dataset=data,
                teacher=teacher,
            )
            trainer.train(resume_from_checkpoint=stop != stops[0])
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert "streamkl" not in (tmp_path / "whole/checkpoint-2/config.json").read_text()


def test_options_are_checked(tmp_path):
    with pytest.raises(ValueError, match="layer_map=.*: must contain at least one pair"):
        DistillationTrainer(
            model=llama(), args=arguments(tmp_path), teacher=llama(), distiller_options=dict(layer_map={})
        )
    with pytest.raises(ValueError, match="teacher=None: must be a transformers model"):
        DistillationTrainer(model=llama(), args=arguments(tmp_path))


def test_example(tmp_path, monkeypatch):
    from examples import distil_trainer

    monkeypatch.chdir(tmp_path)
    history = distil_trainer.main().state.log_history
    values = [entry["attention_kl"] for entry in history if "attention_kl" in entry]
    assert len(values) == 4 and values[-1] < values[0]
    assert "eval_attention_kl" in history[-1]


# ---- TRL ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(90))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )  # fmt: skip


def texts(count=8):
    from datasets import Dataset

    return Dataset.from_list(
        [dict(text=" ".join(f"w{(3 * i + j * j) % 90}" for j in range(5 + i % 4))) for i in range(count)]
    )


def sft_gradient(tmp_path, tokenizer, weight, **options):
    trl = pytest.importorskip("trl")

    class Trainer(RecordsGradients, DistillationMixin, trl.SFTTrainer):
        pass

    torch.manual_seed(0)
    config = arguments(
        tmp_path, trl.SFTConfig, **{"max_length": 32, "per_device_train_batch_size": 4, "bf16": False, **options}
    )
    trainer = Trainer(
        model=llama(),
        args=config,
        train_dataset=texts(),
        processing_class=tokenizer,
        teacher=llama(),
        kl_weight=weight,
    )
    trainer.train()
    assert any("attention_kl" in entry for entry in trainer.state.log_history)
    return trainer.gradient


@pytest.mark.parametrize(
    "options",
    [{}, dict(label_smoothing_factor=0.1), dict(packing=True), dict(padding_free=True, max_length=None)],
    ids=["plain", "label smoothing", "packing", "padding-free"],
)
def test_sft_trainer(options, tmp_path, tokenizer):
    """The KL trains: SFTTrainer once ran a second forward, whose KL had no graph, and the weight changed nothing."""
    without, with_kl = (sft_gradient(tmp_path, tokenizer, weight, **options) for weight in (0.0, 1000.0))
    assert (with_kl - without).norm() > 10 * without.norm()


def test_gkd_trainer(tmp_path, tokenizer):
    gkd = pytest.importorskip("trl.experimental.gkd")
    from datasets import Dataset

    class Trainer(RecordsGradients, DistillationMixin, gkd.GKDTrainer):
        pass

    talks = [
        dict(messages=[dict(role="user", content=f"w{i} w{i + 1}"), dict(role="assistant", content="w3 w4 w5")])
        for i in range(8)
    ]
    gradients = []
    for weight in 0.0, 1000.0:
        torch.manual_seed(0)
        config = arguments(
            tmp_path, gkd.GKDConfig, max_length=32, per_device_train_batch_size=4, max_new_tokens=4, lmbda=0.0
        )
        trainer = Trainer(
            model=llama(), teacher_model=llama(), args=config, train_dataset=Dataset.from_list(talks), processing_class=tokenizer,
            kl_weight=weight,
        )  # fmt: skip
        trainer.train()
        gradients.append(trainer.gradient)
    assert (gradients[1] - gradients[0]).norm() > 10 * gradients[0].norm()
