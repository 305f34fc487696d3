"""AttentionDistiller(fused=True): the student's attention carries the KL."""

import copy
from types import SimpleNamespace

import pytest
import torch
from cases import LONG
from hf_models import gpt_oss, llama
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TrainingArguments

import streamkl
from streamkl.hf import AttentionDistiller, _attention
from streamkl.hf._attention import _sdpa_with_lse, _why_apart
from streamkl.hf._pairs import Apart, RowCache
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
        kl = distiller.loss()
        value, by_layer, carried = distiller.last_loss, distiller.last_losses, distiller.carried_layers
        if options.get("fused_values", True):
            torch.testing.assert_close(kl.detach(), value)
        ((loss + kl_weight * kl) * scale).backward()
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
        slots = [call.handle.slot for call in distiller.student.step.calls]
        loss = distiller.loss()
        assert loss.item() > 0 and torch.equal(distiller.last_loss, loss.detach())
        assert all(slot.term is not None for slot in slots)
        loss.backward()
        assert all(slot.term is None for slot in slots)


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


APART = {
    "temperature": (dict(temperature=2.0), dict(), "temperature=2"),
    "sample_rows": (dict(sample_rows=0.5), dict(), "sample_rows=0.5"),
    "relations": (dict(relations=("qk", "vv"), layer_map={0: 1}, relation_heads=4), dict(), "relations=('qk', 'vv')"),
    "head_map": (dict(head_map={0: 1, 2: 3}), dict(), "head_map"),
    "padding": (dict(), BATCHES["padded"][0], "padding"),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_not_fused_is_compared_apart(name):
    """Loss and gradients of the distiller that is not fused, and the reason."""
    options, batch, reason = APART[name]
    teacher, student = models()
    student.train()
    expected, found = [], []
    for fused, results in (False, expected), (True, found):
        copied = copy.deepcopy(student)
        with AttentionDistiller(teacher, copied, fused=fused, **options) as distiller:
            for _ in range(2):  # the second step knows what the first one has found
                torch.manual_seed(11)
                copied.zero_grad()
                model_loss = copied(input_ids=IDS, use_cache=False, **{"labels": IDS, **batch}).loss
                loss = distiller.loss()
                (model_loss + loss).backward()
                assert {(pair.fused, pair.reason) for pair in distiller.explain().pairs} == {
                    (False, reason if fused else "fused=False")
                }
                results.append((loss.detach(), {name: p.grad.clone() for name, p in copied.named_parameters()}))
    for (loss, gradient), (apart_loss, apart_gradient) in zip(found, expected):
        torch.testing.assert_close(loss, apart_loss, rtol=1e-5, atol=1e-7)
        assert_same(gradient, apart_gradient)


@pytest.mark.parametrize("change, reason", [
    (dict(), None),
    (dict(kwargs=dict(dropout=0.25)), "attention dropout of 0.25"),
    (dict(value=torch.zeros(1, 1, 3, 6)), "heads of 6 values and 8 keys"),
    (dict(kwargs=dict(softcap=2.0)), "the attention takes softcap"),
    (dict(args=(1,)), "the attention takes more arguments"),
    (dict(region=object()), r"the sequences are split (context parallelism)"),
])  # fmt: skip
def test_attention_that_carries_no_kl(change, reason, monkeypatch):
    q = torch.zeros(1, 1, 3, 8)
    given = dict(value=q, args=(), kwargs={}, region=None) | change
    monkeypatch.setattr(_attention, "active_region", lambda: given["region"])
    recorder = SimpleNamespace(carries=True, apart={})
    assert _why_apart(recorder, "sdpa", None, q, q, given["value"], given["args"], given["kwargs"]) == reason


def test_shards_are_compared_apart():
    distiller = AttentionDistiller(*models(), fused=True)
    assert distiller._why_apart(None, 1) is None
    assert distiller._why_apart(streamkl.Parallel(), 1) == "the sequences are split (context parallelism)"


def test_attention_without_an_lse():
    """torch's plain kernel returns none, and attention with a softcap is not torch's."""
    q = torch.zeros(1, 1, 3, 8)
    assert _sdpa_with_lse(SimpleNamespace(), q, q, q, None, True, softcap=2.0) == (None, None)
    teacher, student = models()
    apart, *_ = gradients(teacher, student, {})
    with sdpa_kernel(SDPBackend.MATH):
        fused, _, _, carried = gradients(teacher, student, {}, fused=True)
    assert carried == [0, 1]
    assert_same(fused, apart)


def test_pairs_that_no_attention_carries():
    """Sinks, other keys and keys that no causal mask or window describes."""
    torch.manual_seed(5)
    wide, narrow = (gpt_oss(window=window) for window in (5, 3))
    row, key = torch.arange(21)[:, None], torch.arange(21)
    two_chunks = ((key <= row) & (key >= (row // 4 - 1) * 4)).expand(2, 1, 21, 21)  # its own and the one before
    for teacher, student, sinks, reasons in (
        (wide, wide, "both", ["attention sinks", "attention sinks"]),
        (wide, narrow, "keys only", ["the teacher attends to other keys", None]),
        (*models(), "both", ["no causal mask, window or packed sequences describe its keys"] * 2),
    ):
        student = copy.deepcopy(student)
        with AttentionDistiller(teacher, student, sinks=sinks) as distiller:
            student(input_ids=IDS, attention_mask=None if teacher is wide else two_chunks)
            found = []
            for pair in distiller.pairs().values():
                try:
                    found.append(pair.carried_rows(RowCache()) and None)
                except Apart as why:
                    found.append(str(why))
        assert found == reasons


def test_explain():
    teacher, student = models()
    with AttentionDistiller(teacher, student, fused=True, layer_map={0: [0, 1], 1: 3}) as distiller:
        with pytest.raises(RuntimeError, match="call that first"):
            distiller.explain()
        student(input_ids=IDS)
        distiller.loss()
        assert str(distiller.explain()).splitlines() == [
            "student layer  module                    teacher layer  fused",
            "            0  model.layers.0.self_attn              0  yes",
            "            0  model.layers.0.self_attn              1  no: its attention carries another KL already",
            "            1  model.layers.1.self_attn              3  yes",
        ]
        assert distiller.carried_layers == [0, 1]
        with torch.no_grad():
            student(input_ids=IDS)
            distiller.loss()
        assert {pair.reason for pair in distiller.explain().pairs} == {"gradients are off"}


def test_a_compiled_student_is_one_graph():
    """It is compared apart: nothing of its forward is left out of the graph."""
    teacher, student = models()
    expected, value, _, _ = gradients(teacher, student, {})
    student.train()
    torch._dynamo.reset()
    compiled = torch.compile(student, backend="eager", fullgraph=True)
    try:
        compiled(input_ids=IDS, labels=IDS, use_cache=False)
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"this torch compiles no model of this transformers in one graph: {error}")
    with AttentionDistiller(teacher, student, fused=True) as distiller:
        loss = compiled(input_ids=IDS, labels=IDS, use_cache=False).loss
        kl = distiller.loss()
        (loss + kl).backward()
        assert {pair.reason for pair in distiller.explain().pairs} == {"the student is compiled"}
    torch.testing.assert_close(kl.detach(), value, rtol=1e-5, atol=1e-7)
    assert_same({name: p.grad for name, p in student.named_parameters()}, expected)


# ---- The teacher runs first ------------------------------------------------------------------------------------------


def attention_forward(q_t, k_t, q, k, v, rows, *rest):
    """The operator by its parts: a CPU has no kernel for the attention and its KL."""
    from streamkl._ops import LENGTH_COUNT, Operators
    from streamkl._options import Lengths
    from streamkl._problem import Options
    from streamkl._sdpa import attend

    lengths, options = Lengths(*rest[:LENGTH_COUNT]), Options(*rest[LENGTH_COUNT:])
    output, _ = attend(q, k, v, lengths, options)
    FORWARDS.append(q.shape)
    return [*Operators.forward(q_t, k_t, q, k, None, None, None, None, None, rows, *lengths, *options), output]


FORWARDS: list = []


@pytest.fixture
def one_forward(monkeypatch):
    """Pretends that a kernel computes the attention and its KL."""
    for module in streamkl._carried, streamkl.hf._pairs:
        monkeypatch.setattr(module, "supports", lambda *_: True)
    monkeypatch.setattr(streamkl._carried.Operators, "attention_forward", staticmethod(attention_forward))
    FORWARDS.clear()


def early_step(distiller, teacher, student, batch, weight=None):
    """(loss, gradients, was computed in the student's forward) of a step in which the teacher runs first."""
    student.zero_grad()
    given = dict(input_ids=IDS, use_cache=False, **batch)
    given.pop("labels", None)
    with torch.no_grad():
        teacher(**given)
    count = len(FORWARDS)
    model_loss = student(labels=IDS, **given).loss
    is_early = len(FORWARDS) - count == 2
    loss = distiller.loss(row_weight=weight)
    (model_loss + loss).backward()
    return loss.detach(), {name: p.grad.clone() for name, p in student.named_parameters()}, is_early


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_the_teacher_runs_first(name, one_forward):
    batch, _ = BATCHES[name]
    weight = torch.linspace(0, 1, 21).expand(2, -1).contiguous()
    teacher, student = models()
    student.train()
    with AttentionDistiller(teacher, copy.deepcopy(student)) as distiller:
        expected = [early_step(distiller, teacher, distiller.student.model, batch, each) for each in (None, weight)]
    with AttentionDistiller(teacher, student, fused=True) as distiller:
        for number, each in enumerate((None, weight, None)):
            loss, found, is_early = early_step(distiller, teacher, student, batch, each)
            assert is_early == (number > 0) and distiller.carried_layers == [0, 1]
            torch.testing.assert_close(loss, expected[number % 2][0], rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(distiller.last_loss, loss)
            assert_same(found, expected[number % 2][1])


def test_an_early_term_is_checked_by_the_loss(one_forward):
    """Another direction, and a batch with padding: the loss makes the term again, or compares apart."""
    teacher, student = models()
    student.train()
    reverse, _, _, _ = gradients(teacher, student, {}, direction="reverse")
    with AttentionDistiller(teacher, student, fused=True) as distiller:
        assert not early_step(distiller, teacher, student, {})[2]
        student.zero_grad()
        teacher(input_ids=IDS)
        loss = student(input_ids=IDS, labels=IDS, use_cache=False).loss
        assert len(FORWARDS) == 2
        distiller.direction = "reverse"
        (loss + distiller.loss()).backward()
        assert_same({name: p.grad for name, p in student.named_parameters()}, reverse)
        _, _, is_early = early_step(distiller, teacher, student, BATCHES["padded"][0])
        assert not is_early and {pair.reason for pair in distiller.explain().pairs} == {"padding"}


def test_an_early_term_without_a_loss_is_the_plain_backward(one_forward):
    teacher, student = models()
    expected, _, _, _ = gradients(teacher, student, {}, kl_weight=0.0)
    student.train()
    with AttentionDistiller(teacher, student, fused=True) as distiller:
        early_step(distiller, teacher, student, {})
        student.zero_grad()
        teacher(input_ids=IDS)
        student(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert len(FORWARDS) == 2
    assert_same({name: p.grad for name, p in student.named_parameters()}, expected)


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
        assert fused["loss"] == pytest.approx(apart["loss"], rel=2e-3)
