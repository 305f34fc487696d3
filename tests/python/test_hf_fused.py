"""AttentionDistiller(fused=True): the student's attention carries the KL."""

import copy

import pytest
import torch
from cases import LONG
from hf_models import gpt_oss, llama
from transformers import TrainingArguments

import streamkl
from streamkl.hf import AttentionDistiller
from streamkl.hf.trainer import DistillationTrainer

IDS = torch.randint(0, 100, (2, 21), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.cat([torch.arange(13), torch.arange(8)]).expand(2, -1)
MASK = torch.ones_like(IDS)
MASK[0, 15:] = 0
BATCHES = {
    "plain": (dict(), [0, 1]),
    "packed": (dict(position_ids=POSITIONS), [0, 1]),
    "padded": (dict(attention_mask=MASK, labels=torch.where(MASK == 1, IDS, -100)), []),
}


def models(**options):
    torch.manual_seed(5)
    teacher = llama(layers=4, heads=8, key_heads=2, hidden=64)
    return teacher, llama(**options)


def gradients(teacher, student, batch, kl_weight=1.0, scale=1.0, autocast=False, **options):
    """(gradients, value of the KL, KL of the layers, carried layers) of one step."""
    student = copy.deepcopy(student).train()
    with AttentionDistiller(teacher, student, **options) as distiller:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = student(input_ids=IDS, use_cache=False, **{"labels": IDS, **batch}).loss
        loss = loss + kl_weight * distiller.loss()
        (loss * scale).backward()
        value, by_layer, carried = distiller.last_loss, distiller.last_losses, distiller.carried_layers
    return {name: p.grad for name, p in student.named_parameters()}, value, by_layer, carried


def assert_same(fused, apart, tolerance=2e-5):
    assert fused.keys() == apart.keys()
    for name, gradient in apart.items():
        assert (fused[name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("name", BATCHES)
def test_gradients_are_those_of_the_separate_loss(name):
    batch, expected_layers = BATCHES[name]
    teacher, student = models()
    apart, value, by_layer, none = gradients(teacher, student, batch)
    fused, fused_value, fused_by_layer, carried = gradients(teacher, student, batch, fused=True)
    assert carried == expected_layers and none == []
    assert_same(fused, apart)
    torch.testing.assert_close(fused_value, value, rtol=1e-5, atol=1e-7)
    for i, kl in by_layer.items():
        torch.testing.assert_close(fused_by_layer[i], kl, rtol=1e-5, atol=1e-7)
    plain, _, _, _ = gradients(teacher, student, batch, kl_weight=0.0)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (plain[name] - apart[name]).norm() > 0.01 * apart[name].norm()  # the KL matters in what was compared


def test_a_layer_that_no_kernel_carries_runs_its_own_attention(monkeypatch):
    """From the second step on: the first learns it after the student's forward."""
    teacher, student = models()
    student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch, _ = BATCHES["packed"]
    expected, _, _, _ = gradients(teacher, student, batch)
    monkeypatch.setattr(streamkl.hf._pairs, "carries_kl", lambda *_: False)
    student.train()
    handles = []
    with AttentionDistiller(teacher, student, fused=True) as distiller:
        for _ in range(2):
            student.zero_grad()
            loss = student(input_ids=IDS, use_cache=False, labels=IDS, **batch).loss
            handles.append([call.handle is not None for call in distiller.student.step.calls])
            (loss + distiller.loss()).backward()
            assert distiller.carried_layers == []
            assert_same({name: p.grad for name, p in student.named_parameters()}, expected)
    assert handles == [[True, True], [False, False]]


OPTIONS = {
    "reverse": (dict(direction="reverse"), [0, 1]),
    "layer_weight": (dict(layer_weight={0: 3.0}), [0, 1]),
    "rows": (dict(rows="labels"), [0, 1]),
    "layer_map": (dict(layer_map={1: 2}), [1]),
    "two_teachers": (dict(layer_map={0: [0, 1], 1: 3}), [0, 1]),
    "head_map": (dict(head_map={0: 1, 2: 3}), []),
}


@pytest.mark.parametrize("name", OPTIONS if LONG else ("reverse", "two_teachers"))
def test_options(name):
    options, expected_layers = OPTIONS[name]
    teacher, student = models()
    batch = dict(labels=torch.where(IDS % 3 == 0, IDS, -100))
    apart, value, _, _ = gradients(teacher, student, batch, **options)
    fused, fused_value, _, carried = gradients(teacher, student, batch, fused=True, **options)
    assert carried == expected_layers
    assert_same(fused, apart)
    torch.testing.assert_close(fused_value, value, rtol=1e-5, atol=1e-7)


def test_loss_scale_and_autocast():
    teacher, student = models()
    apart, _, _, _ = gradients(teacher, student, {})
    fused, _, _, _ = gradients(teacher, student, {}, fused=True, scale=64.0)
    assert_same({name: gradient / 64 for name, gradient in fused.items()}, apart)
    rounded, _, _, carried = gradients(teacher, student, {}, fused=True, autocast=True)
    expected, _, _, _ = gradients(teacher, student, {}, autocast=True)
    assert carried == [0, 1]
    assert_same(rounded, expected, tolerance=3e-2)


def test_checkpointing():
    teacher, student = models()
    apart, value, _, _ = gradients(teacher, student, {})
    student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fused, fused_value, _, carried = gradients(teacher, student, {}, fused=True)
    assert carried == [0, 1]
    assert_same(fused, apart)
    torch.testing.assert_close(fused_value, value, rtol=1e-5, atol=1e-7)


def test_the_output_is_unchanged_and_the_teacher_is_freed():
    teacher, student = models()
    student.train()
    expected = student(input_ids=IDS).logits
    with AttentionDistiller(teacher, student, fused=True) as distiller:
        logits = student(input_ids=IDS).logits
        assert torch.equal(logits, expected)
        loss = distiller.loss()
        assert loss.item() == 0 and distiller.last_loss.isnan()
        slot = distiller._last[0][0]
        assert slot.term is not None
        loss.backward()
        assert slot.kl is not None and slot.term is None and not distiller.last_loss.isnan()


def test_gradients_without_values():
    teacher, student = models()
    apart, _, _, _ = gradients(teacher, student, {})
    fused, value, _, carried = gradients(teacher, student, {}, fused=True, fused_values=False)
    assert carried == [0, 1] and value.isnan()
    assert_same(fused, apart)


def test_without_a_loss_it_is_the_plain_backward():
    teacher, student = models()
    expected, _, _, _ = gradients(teacher, student, {}, kl_weight=0.0)
    with AttentionDistiller(teacher, student, fused=True):
        student(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert_same({name: p.grad for name, p in student.named_parameters()}, expected)


def test_sinks_are_compared_separately():
    torch.manual_seed(5)
    teacher, student = gpt_oss(), gpt_oss()
    _, _, _, carried = gradients(teacher, student, {}, fused=True)
    assert carried == []


def test_evaluation_measures_at_once():
    teacher, student = models()
    with AttentionDistiller(teacher, student, fused=True) as distiller, torch.no_grad():
        student(input_ids=IDS)
        assert distiller.loss() > 0 and distiller.carried_layers == []


def test_refused_options():
    teacher, student = models()
    for options in dict(relations=("qk", "vv")), dict(temperature=2.0), dict(sample_rows=0.5):
        with pytest.raises(ValueError, match="fused=True: needs"):
            AttentionDistiller(teacher, student, fused=True, **options)


def test_trainer(tmp_path):
    """The same training, and the same attention_kl in the logs."""
    teacher, student = models()
    data = [dict(input_ids=ids, labels=ids) for ids in torch.randint(0, 100, (8, 12))]
    histories = []
    for fused in False, True:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = DistillationTrainer(
            model=copy.deepcopy(student), args=arguments, train_dataset=data, teacher=teacher, kl_weight=10.0,
            distiller_options=dict(fused=fused),
        )  # fmt: skip
        trainer.train()
        histories.append([entry for entry in trainer.state.log_history if "attention_kl" in entry])
    assert len(histories[0]) == 3
    for apart, fused in zip(*histories):
        assert fused["attention_kl"] == pytest.approx(apart["attention_kl"], rel=1e-4)
        assert fused["attention_kl_layer_1"] == pytest.approx(apart["attention_kl_layer_1"], rel=1e-4)
        assert fused["loss"] == pytest.approx(apart["loss"] - 10.0 * apart["attention_kl"], rel=2e-3)
