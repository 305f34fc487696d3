"""DistillationTrainer: logs, evaluation and checkpoints. test_hf_trainer_steps.py has its gradients."""

import copy
import math
import re

import hf_architectures
import pytest
import torch
import transformers
from hf_models import batch, bert, gemma2, llama
from hf_trainer_cases import TRAINERS, arguments

from streamkl.hf import AttentionDistiller, DistillationTrainer


def dataset(size=16, length=12):
    ids = batch(size=size, length=length)["input_ids"]
    return [dict(input_ids=each, labels=each.clone()) for each in ids]


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
    with AttentionDistiller(teacher, student, direction="reverse") as distiller, torch.no_grad():
        for inputs, found, prefix in (ids, entry, ""), (ids[:5], metrics, "eval_"):
            student(input_ids=inputs)
            assert found[f"{prefix}attention_kl"] == pytest.approx(distiller.loss().item(), rel=1e-4)
            for i, kl in distiller.last_losses.items():
                assert found[f"{prefix}attention_kl_layer_{i}"] == pytest.approx(kl.item(), rel=1e-4)
            total = found[f"{prefix}model_loss"] + 0.1 * found[f"{prefix}attention_kl"]
            assert found[f"{prefix}loss"] == pytest.approx(total, rel=1e-4)
            if hasattr(trainer, "_loss_shifts_labels"):  # older releases count one label too many
                own = student(input_ids=inputs, labels=inputs).loss.item()
                assert found[f"{prefix}model_loss"] == pytest.approx(own, rel=1e-4)
    assert student.config._attn_implementation == "sdpa"


def test_evaluation_without_labels(tmp_path):
    """The KL is the only loss, and evaluation measures it."""
    data = [dict(input_ids=each["input_ids"]) for each in dataset()]
    trainer = DistillationTrainer(
        model=llama(),
        args=arguments(tmp_path, max_steps=2),
        train_dataset=data,
        eval_dataset=data[:5],
        teacher=llama(),
    )
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    metrics = trainer.evaluate()
    for found, prefix in (entry, ""), (metrics, "eval_"):
        assert found[f"{prefix}loss"] == pytest.approx(0.1 * found[f"{prefix}attention_kl"], rel=1e-4)
        assert found[f"{prefix}model_loss"] == 0


def test_images_count_the_same_with_any_text(tmp_path):
    """Micro-batches of one image, whose texts have different lengths, have the gradient of one batch of both."""
    teacher, student = (hf_architectures.tiny_model("LlavaForConditionalGeneration", seed) for seed in (0, 1))
    inputs = hf_architectures.inputs_of("right", student)
    assert inputs["attention_mask"][0].sum() != inputs["attention_mask"][1].sum()
    data = [{name: each[i] for name, each in inputs.items()} for i in range(2)]
    found = []
    for size in 2, 1:
        options = dict(
            per_device_train_batch_size=size, gradient_accumulation_steps=2 // size, optim="sgd", learning_rate=1.0
        )
        trainer = DistillationTrainer(
            model=copy.deepcopy(student), args=arguments(tmp_path, **options), train_dataset=data, teacher=teacher,
            kl_weight=100.0, distiller_options=dict(tower="vision"),
        )  # fmt: skip
        trainer.train()
        found.append({name: each for name, each in trainer.model.state_dict().items() if "vision" in name})
    torch.testing.assert_close(*found)
    assert any((each - student.state_dict()[name]).abs().max() > 1e-4 for name, each in found[0].items())


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


def test_the_kl_ends_early(tmp_path):
    """After a share of the steps the KL is neither computed nor logged; evaluation measures it."""
    teacher, data, runs = llama(), dataset(), []
    teacher.model.register_forward_hook(lambda *_: runs.append(1))
    options = arguments(tmp_path, max_steps=4, per_device_train_batch_size=4, learning_rate=0.0)
    trainer = DistillationTrainer(
        model=llama(), args=options, train_dataset=data, eval_dataset=data, teacher=teacher, kl_until=0.5
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert ["attention_kl" in entry for entry in entries] == [True, True, False, False] and len(runs) == 2
    for entry in entries:
        assert entry["loss"] == pytest.approx(entry["model_loss"] + 0.1 * entry.get("attention_kl", 0), rel=1e-4)
    assert trainer.evaluate()["eval_attention_kl"] > 0


def test_a_kl_that_ends_needs_another_loss(tmp_path):
    """It is refused at the first step: after the KL a step would have no gradient."""
    data = [dict(input_ids=each["input_ids"]) for each in dataset()]
    trainer = DistillationTrainer(
        model=llama(), args=arguments(tmp_path, max_steps=4), train_dataset=data, teacher=llama(), kl_until=0.5
    )
    with pytest.raises(ValueError, match="kl_until=0.5: needs labels, or another loss"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_layer_that_is_left_out_is_logged_as_such(tmp_path):
    """A window in which nothing is far away has no KL in the log, and the mean is that of the other layer."""
    trainer = DistillationTrainer(
        model=gemma2(window=3), args=arguments(tmp_path), train_dataset=dataset(), teacher=gemma2(window=3),
        distiller_options=dict(row_weight="far:5"),
    )  # fmt: skip
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert math.isnan(entry["attention_kl_layer_0"])
    assert entry["attention_kl"] == entry["attention_kl_layer_1"] > 0


def test_trl_runs_the_teacher_once(tmp_path):
    """DistillationTrainer of TRL runs its teacher itself, and the KL shares that forward."""
    pytest.importorskip("trl")
    sizes = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer, runs = TRAINERS["distillation"](tmp_path, sizes, {}), []
    trainer.teacher_model.model.register_forward_hook(lambda *_: runs.append(1))
    trainer.train()
    assert len(runs) == 2
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["attention_kl"] > 0


@pytest.mark.parametrize("name", ["use_liger_loss", "use_liger_gkd_loss"])
def test_a_trainer_with_a_loss_of_liger_is_refused(tmp_path, name):
    """Trainers of older releases of TRL set one of these."""
    made = type("LigerTrainer", (DistillationTrainer,), {name: True})
    with pytest.raises(ValueError, match=f"{name}=True: .*: pass use_liger_kernel=False"):
        made(model=llama(), args=arguments(tmp_path), teacher=llama())


@pytest.mark.parametrize("name", ["plain", "sft", "gkd", "distillation"])
def test_fused_losses_of_liger_are_refused(tmp_path, name):
    """A fused loss replaces the forward of the model. Kernels of layers do not, and TRL's SFTTrainer asks for these alone."""
    if not hasattr(transformers.trainer, "apply_liger_kernel"):
        pytest.skip("Trainer of this release applies Liger in its constructor")
    if name != "plain":
        pytest.importorskip("trl")
    message = "use_liger_kernel=True: .*: pass liger_kernel_config={'fused_linear_cross_entropy': False}, or use_liger_kernel=False"
    try:
        trainer = TRAINERS[name](tmp_path, dict(use_liger_kernel=True), {})
    except ValueError as error:
        assert re.search(message, str(error)), error
    else:
        assert name in ("sft", "gkd") and trainer.args.liger_kernel_config["fused_linear_cross_entropy"] is False
    layers = dict(use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": False})
    assert TRAINERS[name](tmp_path, layers, {}).distiller


def test_options_are_checked(tmp_path):
    with pytest.raises(ValueError, match="kl_until=1.5: must be 0..1, a share of the steps"):
        DistillationTrainer(model=llama(), args=arguments(tmp_path), teacher=llama(), kl_until=1.5)
    with pytest.raises(ValueError, match="layer_map=.*: must contain at least one pair"):
        DistillationTrainer(
            model=llama(), args=arguments(tmp_path), teacher=llama(), distiller_options=dict(layer_map={})
        )
    with pytest.raises(ValueError, match="teacher=None: must be a transformers model"):
        DistillationTrainer(model=llama(), args=arguments(tmp_path))
    with pytest.raises(
        TypeError, match=r"teacher='some/model': must be a model, which AutoModelForCausalLM.from_pretrained"
    ):
        DistillationTrainer(model=llama(), args=arguments(tmp_path), teacher="some/model")


def test_data_parallel_is_refused(tmp_path):
    """Trainer wraps the model in it where a process sees several GPUs."""
    args = arguments(tmp_path)
    assert args.n_gpu == 0
    args._n_gpu = 2
    with pytest.raises(ValueError, match="args.n_gpu=2: torch.nn.DataParallel runs copies .* torchrun"):
        DistillationTrainer(model=llama(), args=args, teacher=llama())


def test_a_teacher_on_several_devices_stays(tmp_path, monkeypatch):
    teacher, moved = llama(), []
    monkeypatch.setattr(teacher, "to", lambda device: moved.append(device) or teacher)
    for places in {"": 0}, {"model.layers.0": 0, "model.layers.1": 1}:
        teacher.hf_device_map = places
        DistillationTrainer(model=llama(), args=arguments(tmp_path), teacher=teacher)
    assert len(moved) == 1


def test_example(tmp_path, monkeypatch):
    from examples import distill_trainer

    monkeypatch.chdir(tmp_path)
    history = distill_trainer.main().state.log_history
    values = [entry["attention_kl"] for entry in history if "attention_kl" in entry]
    assert len(values) == 4 and values[-1] < values[0]
    assert "eval_attention_kl" in history[-1]


def test_a_step_outside_of_training(tmp_path):
    """Without an attached distiller the loss is the model's; without counted rows all micro-batches count the same."""
    inputs = dict(input_ids=batch()["input_ids"], labels=batch()["input_ids"])
    trainer = DistillationTrainer(
        model=llama(),
        args=arguments(tmp_path, gradient_accumulation_steps=4),
        train_dataset=dataset(),
        teacher=llama(),
    )
    torch.testing.assert_close(trainer.compute_loss(trainer.model, inputs), trainer.model(**inputs).loss)
    assert trainer._count_labels(dict(input_ids=inputs["input_ids"])) is None
    trainer.current_gradient_accumulation_steps = 4
    assert trainer._share(torch.tensor(3), False) == 0.25
    assert type(trainer._means[True])().metrics(None) == {}
    with trainer.distiller:  # as a trainer that fetches its batches itself does
        trainer.create_optimizer()
        assert trainer.training_step(trainer.model, inputs) > 0 and trainer._step_rows is None


@pytest.mark.parametrize(
    "architecture, masked, expected", [("llama", True, 3), ("llama", False, 4), ("bert", True, 5)]
)
def test_labels_that_count(tmp_path, architecture, masked, expected):
    """Row i of a causal model has label i + 1, and a row of padding none; in a masked language model it has its own."""
    model = llama() if architecture == "llama" else transformers.BertForMaskedLM._from_config(bert().config)
    trainer = DistillationTrainer(
        model=model,
        teacher=copy.deepcopy(model),
        args=arguments(tmp_path),
        train_dataset=dataset(),
        distiller_options=dict(rows="labels"),
    )
    inputs = dict(
        labels=torch.tensor([[-100, 7, 8, 9], [5, -100, 6, -100]]),
        attention_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]),
    )
    if not masked:
        del inputs["attention_mask"]
    assert trainer._count_rows(inputs) == expected
