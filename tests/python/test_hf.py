"""AttentionDistiller compared with the KL from output_attentions, on several kinds of models."""

import copy

import pytest
import torch
import transformers
from hf_models import batch, bert, gemma2, kl_from_attentions, llama, loss_of

from streamkl._sdpa import sdpa_with_lse
from streamkl.hf import AttentionDistiller
from streamkl.hf._capture import Recorder

_Q = torch.zeros(1, 2, 4, 8)
LSE_WITH_GROUPS = sdpa_with_lse(_Q, _Q[:, :1], _Q[:, :1], gqa=True) is not None  # torch 2.6 returns none on a CPU

PAIRS = {
    "llama sdpa": (lambda: llama(4, 8, 4, 64), lambda: llama(2, 4, 2), {0: 1, 1: 3}),
    "llama eager": (
        lambda: llama(4, 8, 4, 64, "eager"),
        lambda: llama(2, 4, 2, implementation="eager"),
        {0: 1, 1: 3},
    ),
    "llama, deeper student": (lambda: llama(1, 4, 4), lambda: llama(2, 4, 1), {0: 0, 1: 0}),
    "gemma2": (lambda: gemma2(4, 8, 4, 64), lambda: gemma2(2, 4, 2, head_dim=8), {0: 0, 1: 3}),
    "bert sdpa": (lambda: bert(4, 8, 64), lambda: bert(2, 4), {0: 1, 1: 3}),
    "bert eager": (lambda: bert(4, 8, 64, "eager"), lambda: bert(2, 4, implementation="eager"), {0: 1, 1: 3}),
}


def gradients_of(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("pair", PAIRS)
def test_equals_kl_from_attentions(pair, padding):
    make_teacher, make_student, layers = PAIRS[pair]
    torch.manual_seed(0)
    teacher, student, inputs = make_teacher().eval(), make_student().eval(), batch(padding)
    expected = kl_from_attentions(teacher, student, inputs, layers)
    expected_gradients = gradients_of(expected, student)
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        captured = distiller.student.layers
        if "deeper" not in pair and (LSE_WITH_GROUPS or pair != "llama sdpa"):
            assert all((layer.lse is not None) == pair.endswith("sdpa") for layer in captured)
        loss = distiller.loss()
        assert list(distiller.last_losses) == [0, 1]
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    found = gradients_of(loss, student)
    assert set(found) == set(expected_gradients)
    for name, gradient in found.items():
        largest = max(g.abs().max() for g in expected_gradients.values())
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-3, atol=1e-4 * largest.item(), msg=name
        )


@pytest.mark.parametrize("how", ["lora", "checkpointed", "compiled"])
def test_gradients_of_wrapped_students(how):
    """Equal to those of the attention weights in float64."""
    teacher, student, inputs = llama().eval(), llama(), batch("right")
    if how == "lora":
        peft = pytest.importorskip("peft")
        student = peft.get_peft_model(student, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    dense = copy.deepcopy(student).double()
    inside = dense.get_base_model() if how == "lora" else dense
    loss = kl_from_attentions(copy.deepcopy(teacher).double(), inside, inputs, {0: 0, 1: 1})
    expected = gradients_of(loss, dense)
    if how == "checkpointed":
        student.gradient_checkpointing_enable()
        student.train()
    called = torch.compile(student, backend="eager") if how == "compiled" else student
    with AttentionDistiller(teacher, called) as distiller:
        called(**inputs, use_cache=False)
        found = gradients_of(distiller.loss(), student)
    assert set(found) == set(expected)
    largest = max(gradient.abs().max() for gradient in expected.values()).item()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-3, atol=1e-4 * largest, msg=name)


def test_lses_lead_to_one_pass(monkeypatch):
    from streamkl import _attention_kl

    torch.manual_seed(0)
    calls = []
    monkeypatch.setattr(
        _attention_kl.OnePass, "apply", lambda *a: calls.append(a) or (torch.zeros((), requires_grad=True),)
    )
    student = llama(key_heads=4)
    with AttentionDistiller(llama(key_heads=4), student) as distiller:
        student(**batch())
        distiller.loss()
    assert len(calls) == 2


def test_head_map():
    teacher, student, inputs = llama(2, 6, 3, 48).eval(), llama(2, 4, 2).eval(), batch("left")
    with pytest.raises(ValueError, match="6 heads are not a multiple of 4: pass a head_map"):
        loss_of(teacher, student, inputs)
    for head_map in ([5, 0, 2, 2], {3: 1, 0: 4}):
        heads = dict(enumerate(head_map)) if isinstance(head_map, list) else head_map
        loss = loss_of(teacher, student, inputs, layer_map=[1, 0], head_map=head_map)
        expected = kl_from_attentions(teacher, student, inputs, {0: 1, 1: 0}, heads)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)


def test_windows_of_different_width():
    """The KL covers the keys visible to both: it equals that of a teacher with the narrower window."""
    wide, student, inputs = gemma2(2, window=9), gemma2(2, window=4), batch()
    narrow = gemma2(2, window=4)
    narrow.load_state_dict(wide.state_dict())
    torch.testing.assert_close(*(loss_of(teacher, student, inputs, layer_map={0: 0}) for teacher in (wide, narrow)))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_recomputation_of_checkpointing_is_not_captured(implementation):
    teacher, student, inputs = (
        llama(implementation=implementation),
        llama(implementation=implementation),
        batch("right"),
    )
    student.train()
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        plain = gradients_of(distiller.loss(), student)
        student.gradient_checkpointing_enable()
        student(**inputs, use_cache=False)
        assert len(distiller.student.layers) == 2
        again = gradients_of(distiller.loss(), student)
        assert distiller.student.layers == [], "the recomputation of a checkpointed layer was captured"
        for name in plain:
            torch.testing.assert_close(again[name], plain[name])
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        student(**inputs, use_cache=False)
        with pytest.raises(RuntimeError, match="'use_reentrant': False"):
            distiller.loss()


def test_eval_mode_and_no_grad():
    teacher, student, inputs = llama(), llama().eval(), batch()
    with AttentionDistiller(teacher, student) as distiller, torch.no_grad():
        student(**inputs)
        loss = distiller.loss()
        assert not loss.requires_grad and loss > 0
        assert not teacher.training


def test_captures_nothing_when_detached():
    teacher, student, inputs = llama(), llama(implementation="eager"), batch()
    before = student(**inputs).logits
    distiller = AttentionDistiller(teacher, student)
    student(**inputs)
    assert distiller.student.layers == []
    with pytest.raises(RuntimeError, match="attach"):
        distiller.loss()
    with distiller:
        torch.testing.assert_close(student(**inputs).logits, before)
        assert len(distiller.student.layers) == 2
    assert (teacher.config._attn_implementation, student.config._attn_implementation) == ("sdpa", "eager")
    student(**inputs)
    assert distiller.student.layers == [] and not distiller.student.has_run
    assert not student._forward_hooks and not student._forward_pre_hooks


def test_teacher_runs_once_per_loss():
    teacher, student, inputs = llama(), llama(), batch()
    runs = []
    teacher.register_forward_hook(lambda *_: runs.append(1))
    with AttentionDistiller(teacher, student) as distiller:
        with torch.no_grad():
            teacher(**inputs)
        student(**inputs, labels=inputs["input_ids"])
        distiller.loss()
        assert len(runs) == 1
        student(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=inputs["input_ids"])
        distiller.loss()
        assert len(runs) == 2
        with pytest.raises(RuntimeError, match="the student has not run since the last loss"):
            distiller.loss()


def test_the_latest_forward_counts():
    teacher, student = llama(), llama()
    with AttentionDistiller(teacher, student) as distiller:
        student(**batch(seed=1))
        with pytest.warns(UserWarning, match="a forward of the student is dropped"):
            student(**batch(seed=2))
        twice = distiller.loss()
        student(**batch(seed=2))
        assert torch.equal(twice, distiller.loss())


def test_models_that_share_a_config():
    teacher = llama()
    student = transformers.LlamaForCausalLM(teacher.config)
    assert student.config is teacher.config
    assert loss_of(teacher, student, batch()) > 0
    assert teacher.config._attn_implementation == "sdpa"


def test_unsupported_cases_are_errors():
    student, inputs = llama(), batch()
    with pytest.raises(ValueError, match="student layer 0 and teacher layer 0: one is causal and the other is not"):
        loss_of(bert(), student, inputs)


@pytest.mark.parametrize("name", ["layer_map", "head_map"])
@pytest.mark.parametrize("given", [[True, False], {0: 1.0}, {False: 1}, [torch.tensor(1), 0]])
def test_maps_contain_whole_numbers(name, given):
    """A list of flags would select heads as a mask does."""
    with pytest.raises(ValueError, match=rf"{name}=.*: must contain whole numbers"):
        AttentionDistiller(llama(), llama(), **{name: given})


def test_other_modules_are_refused():
    teacher = llama()
    with pytest.raises(TypeError, match="student: Linear must be a transformers model"):
        AttentionDistiller(teacher, torch.nn.Linear(1, 1)).attach()
    assert teacher.config._attn_implementation == "sdpa" and not teacher._forward_hooks


def test_an_exception_in_forward_ends_the_capture():
    student = llama()
    with AttentionDistiller(llama(), student):
        with pytest.raises(IndexError):
            student(input_ids=torch.tensor([[1000]]))
        assert Recorder.of(student).step is None


def test_bidirectional_gemma3():
    """Embedding models of Gemma 3 unite two windows: a plain one on both sides."""
    config = transformers.Gemma3TextConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"], use_bidirectional_attention=True,
    )  # fmt: skip
    torch.manual_seed(0)
    teacher, student = (transformers.Gemma3TextModel._from_config(config, attn_implementation="eager").eval() for _ in range(2))
    inputs = batch("left")
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        side = config.sliding_window - 1  # of the half that the config makes of 4
        assert [layer.visible.window for layer in distiller.student.layers] == [(side, side), (-1, -1)]
        loss = distiller.loss()
    expected = kl_from_attentions(teacher, student, inputs, {0: 0, 1: 1})
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-7)
    labels = inputs["input_ids"].masked_fill(torch.arange(17) < 9, -100)
    with AttentionDistiller(teacher, student, rows="labels") as distiller:  # a row predicts its own token
        student(**inputs)
        loss = distiller.loss(labels=labels)
    masked = dict(inputs, attention_mask=inputs["attention_mask"])
    with AttentionDistiller(teacher, student) as distiller:
        student(**masked)
        torch.testing.assert_close(loss, distiller.loss(row_weight=(labels != -100).float()))
