"""One step is one state: begun by the student's forward, used by loss(), and dropped by any failure."""

import copy
import pickle

import hf_architectures
import pytest
import torch
import transformers
from hf_models import bart, batch, bert, gemma2, llama, llama4, loss_of

from streamkl.hf import AttentionDistiller, compare
from streamkl.hf._maps import nearest_layer

# ---- Failures --------------------------------------------------------------------------------------------------------


def test_a_failed_loss_does_not_block_later_steps():
    teacher, student = llama(), llama()
    with AttentionDistiller(teacher, student) as distiller:
        student(**batch())
        with pytest.raises(ValueError, match="row_weight"):
            distiller.loss(row_weight=torch.ones(3, 5))
        with pytest.raises(RuntimeError, match="the student has not run"):
            distiller.loss()
        student(**batch(seed=1))
        assert torch.equal(distiller.loss(), loss_of(teacher, student, batch(seed=1)))


def test_no_stale_teacher_after_a_failed_loss():
    """Without check_input nothing else would tell."""
    teacher, student = llama(), llama()
    expected = loss_of(teacher, student, batch(seed=1))
    with AttentionDistiller(teacher, student, check_input=False) as distiller:
        student(**batch())
        with pytest.raises(ValueError, match="row_weight"):
            distiller.loss(row_weight=torch.ones(3, 5))
        student(**batch(seed=1))
        assert torch.equal(distiller.loss(), expected)
        teacher(**batch())
        with pytest.raises(IndexError):
            student(input_ids=torch.tensor([[1000]]))
        student(**batch(seed=1))
        assert torch.equal(distiller.loss(), expected)


@pytest.mark.parametrize("where", ["student", "teacher"])
def test_an_interrupted_forward(where):
    teacher, student = llama(), llama()
    expected = loss_of(teacher, student, batch(seed=1))
    interrupted = (student if where == "student" else teacher).model.layers[1]

    def interrupt(*_):
        raise KeyboardInterrupt

    with AttentionDistiller(teacher, student) as distiller:
        for run in (
            lambda: student(**batch()) and distiller.loss(),
            lambda: teacher(**batch()) and student(**batch()),
        ):
            hook = interrupted.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                run()
            hook.remove()
            student(**batch(seed=1))
            assert torch.equal(distiller.loss(), expected)


def test_two_forwards_before_one_loss_are_warned_of(recwarn):
    student = llama()
    with AttentionDistiller(llama(), student) as distiller:
        student(**batch())
        distiller.loss()
        student(**batch())
        assert not [each for each in recwarn if "AttentionDistiller" in str(each.message)]
        student(**batch())
    assert [each for each in recwarn if "a forward of the student is dropped" in str(each.message)]


# ---- The teacher -----------------------------------------------------------------------------------------------------


def test_the_teacher_runs_in_eval_mode_and_its_mode_is_restored():
    teacher, student, inputs = llama(implementation="eager").train(), llama(), batch()
    teacher.model.layers[0].eval()
    for layer in teacher.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        expected = distiller.loss()
        for run in (lambda: None, lambda: teacher(**inputs)):
            teacher.train()  # a module that contains it may call this
            run()
            student(**inputs)
            torch.testing.assert_close(distiller.loss(), expected)
            assert not teacher.training
    assert teacher.training and not teacher.model.layers[0].training and teacher.model.layers[1].training


def test_packed_positions_of_the_student_only():
    teacher, student, ids = llama(), llama(), batch()["input_ids"]
    packed = dict(input_ids=ids, position_ids=torch.arange(17).remainder(6).expand(3, -1), use_cache=False)
    with AttentionDistiller(teacher, student) as distiller:
        for other in dict(input_ids=ids), dict(input_ids=ids, position_ids=torch.arange(17).expand(3, -1)):
            teacher(**other, use_cache=False)
            student(**packed)
            with pytest.raises(ValueError, match="the teacher ran on another position_ids than the student"):
                distiller.loss()
        teacher(input_ids=ids)
        student(input_ids=ids, position_ids=torch.arange(17).expand(3, -1))
        assert distiller.loss() > 0


def test_packed_sequences_that_are_not_separated():
    """With a cache, or with an attention_mask, transformers attends across the sequences."""
    teacher, student, ids = llama(), llama(), batch()["input_ids"]
    positions = torch.arange(17).remainder(6).expand(3, -1)
    for more in dict(), dict(attention_mask=torch.ones_like(ids), use_cache=False):
        with pytest.raises(
            ValueError,
            match="position_ids begin again before row 6, but model.layers.0.self_attn attends to the keys",
        ):
            loss_of(teacher, student, dict(input_ids=ids, position_ids=positions, **more))
    with AttentionDistiller(teacher, student) as distiller:
        teacher(input_ids=ids, position_ids=positions)
        student(input_ids=ids, position_ids=positions, use_cache=False)
        with pytest.raises(ValueError, match="teacher: position_ids begin again before row 6"):
            distiller.loss()
    left = batch("left")
    positions = (left["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert loss_of(teacher, student, dict(left, position_ids=positions)) > 0


def test_a_path_is_not_a_model():
    with pytest.raises(
        TypeError,
        match=r"teacher='some/model': must be a model, which AutoModelForCausalLM.from_pretrained\('some/model'\)",
    ):
        AttentionDistiller("some/model", llama())


# ---- Copies ----------------------------------------------------------------------------------------------------------


def test_nothing_survives_a_copy(tmp_path):
    teacher, student, inputs = llama(), llama(), batch()
    own = student.register_forward_hook(_hook)
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        written = pickle.dumps(student)
        torch.save(student, tmp_path / "student.pt")
        copied = copy.deepcopy(student)
        assert distiller.loss() > 0
    assert b"streamkl" not in written and b"streamkl" not in (tmp_path / "student.pt").read_bytes()
    for other in copied, torch.load(tmp_path / "student.pt", weights_only=False), pickle.loads(written):
        assert list(other._forward_hooks.values()) == [_hook] and not other._forward_pre_hooks
        assert other.config._attn_implementation == "sdpa" and type(other.config._attn_implementation) is str
    own.remove()
    assert "__reduce_ex__" not in student.__dict__ and not student._forward_hooks_always_called
    assert type(student.config._attn_implementation) is str


def _hook(*_):
    return None


# ---- Which layers ----------------------------------------------------------------------------------------------------


def test_layers_by_name():
    teacher, student, inputs = llama(3), llama(2), batch()
    expected = loss_of(teacher, student, inputs, layer_map={1: [0, 2]})
    for given in (
        {"model.layers.1.self_attn": ["model.layers.0", 2]},
        {1: ["model.layers.0.self_attn", "model.layers.2"]},
    ):
        assert torch.equal(loss_of(teacher, student, inputs, layer_map=given), expected)
    with pytest.raises(
        ValueError,
        match=r"'model.layers.7' contains 0 attention layers of the teacher.*they are: model.layers.0.self_attn",
    ):
        loss_of(teacher, student, inputs, layer_map={0: "model.layers.7"})


def test_layers_of_a_hybrid_model():
    """Its attention layers are counted; names say which ones they are."""
    config = transformers.Lfm2Config(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention", "full_attention"],
    )  # fmt: skip
    teacher, student = transformers.Lfm2ForCausalLM(config), transformers.Lfm2ForCausalLM(config)
    first = loss_of(teacher, student, batch(), layer_map={0: 1})
    assert torch.equal(loss_of(teacher, student, batch(), layer_map={"model.layers.1": "model.layers.2"}), first)
    with pytest.raises(ValueError, match="'model.layers.0' contains 0 attention layers of the student"):
        loss_of(teacher, student, batch(), layer_map={"model.layers.0": 0})


def test_default_layers_prefer_windows(recwarn):
    """A student with windows learns from teacher layers with windows, if only of another size."""
    teacher, student = gemma2(4, window=9), gemma2(2, window=4)
    with AttentionDistiller(teacher, student) as distiller:
        student(**batch())
        assert list(distiller.pairs()) == [(0, 0), (1, 3)]
        distiller.loss()
        assert distiller.outside.keys() == {(0, 0)} and 0.05 < distiller.outside[0, 0] < 0.6
    assert any(
        "of the teacher's attention is on keys that the student does not attend to" in str(each.message)
        for each in recwarn
    )
    with AttentionDistiller(teacher, student, layer_map={0: 1}, verify="always") as full:
        student(**batch())
        full.loss()
    assert full.outside[0, 1] > distiller.outside[0, 0]


@pytest.mark.parametrize("make, layers", [(gemma2, [0, 1, 0, 1, 0]), (llama4, [0, 0, 0, 0, 1])])
def test_default_layers_are_those_of_every_length(make, layers):
    """A batch that is no longer than the window or the chunk has the same layers as a longer one."""
    teacher, student, ids = make(2), make(5), batch()["input_ids"]
    found = []
    with AttentionDistiller(teacher, student) as distiller:
        for length in 3, 5, 6, 17:
            student(input_ids=ids[:, :length])
            found.append(list(distiller.pairs()))
            distiller.drop()
    assert found == [list(enumerate(layers))] * 4


@pytest.mark.parametrize(
    "count_s, count_t, layers",
    [(3, 6, [1, 3, 5]), (3, 5, [1, 2, 4]), (4, 6, [0, 2, 3, 5]), (4, 4, [0, 1, 2, 3]), (6, 2, [0, 0, 0, 0, 1, 1])],
)
def test_an_even_spread_takes_the_nearest_layer(count_s, count_t, layers):
    """The lower of two that are as near."""
    assert [nearest_layer(range(count_t), i, count_s, count_t) for i in range(count_s)] == layers


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
def test_towers(name):
    """The language tower is compared, with an image or without; another one only if it is asked for."""
    teacher, student = (hf_architectures.tiny_model(name, seed) for seed in (0, 1))
    inputs = hf_architectures.inputs_of("none", student)
    text = dict(input_ids=inputs["input_ids"][:, :6], attention_mask=inputs["attention_mask"][:, :6])
    with AttentionDistiller(teacher, student) as distiller:
        for given in inputs, text:
            student(**given)
            assert [pair.s.name.split(".")[1] for pair in distiller.pairs().values()] == ["language_model"] * 2
            distiller.loss()
    with AttentionDistiller(teacher, student, tower="vision") as distiller:
        student(**inputs)
        if name.startswith("Llava"):
            assert {pair.s.name.split(".")[1] for pair in distiller.pairs().values()} == {"vision_tower"}
            assert distiller.loss() > 0
        else:
            with pytest.raises(
                ValueError, match="layer 0 .* runs its attention in 2 parts, once for each image or window"
            ):
                distiller.loss()
        student(**text)
        with pytest.raises(
            ValueError, match="has no layers for attention='self', tower='vision'; it has: .*tower='language'"
        ):
            distiller.loss()


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_forward_without_all_layers_is_refused(monkeypatch, skipped):
    """LayerDrop skips layers while the student trains, and layers are numbered by those that ran."""
    teacher, student = (hf_architectures.tiny_model("Wav2Vec2Model", seed) for seed in (0, 1))
    student.config.layerdrop = 0.5
    chances = iter([torch.tensor(0.1 if i == skipped else 0.9) for i in range(2)])
    with AttentionDistiller(teacher, student.train()) as distiller:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda *_: next(chances))
            student(**hf_architectures.inputs_of("none", student))
        with pytest.raises(ValueError, match=rf"student: the last forward skipped encoder.layers.{skipped}.attention, .* set layerdrop=0"):
            distiller.loss()


def test_other_layers_may_be_skipped():
    """The decoder is compared whatever layers of the encoder have run."""
    teacher, student = bart(), bart().train()
    student.model.encoder.layerdrop = 1.0
    assert loss_of(teacher, student, batch()) > 0


def test_layers_with_and_without_an_image():
    """Mllama's cross-attention runs only with an image, and its layers are no self-attention."""
    config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        cross_attention_layers=[1], pad_token_id=0, rope_parameters=dict(rope_type="default", rope_theta=1e4),
    )  # fmt: skip
    teacher, student = (transformers.MllamaForCausalLM(config) for _ in range(2))
    image = dict(cross_attention_states=torch.randn(3, 5, 32), cross_attention_mask=torch.zeros(3, 1, 17, 5))
    for attention, inputs, layers in ("self", {}, [0, 2, 3]), ("self", image, [0, 2, 3]), ("cross", image, [1]):
        with AttentionDistiller(teacher, student, attention=attention) as distiller:
            student(**batch(), **inputs)
            assert [int(pair.s.name.split(".")[2]) for pair in distiller.pairs().values()] == layers
            assert distiller.loss() > 0


# ---- Different keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_chunks_of_different_size(implementation):
    """The KL covers the keys that both attend to, without the LSEs, which cover others."""
    teacher, student, inputs = llama4(chunk=5).eval(), llama4(chunk=7).eval(), batch("left")
    weights = []
    for model in teacher, student:
        model.set_attn_implementation("eager")
        weights.append(model(**inputs, output_attentions=True).attentions[0])
        model.set_attn_implementation(implementation)
    p, s = weights[0].detach().double(), weights[1].double()
    common = (p > 0) & (s > 0)
    p, s = (each * common / (each * common).sum(-1, keepdim=True) for each in (p, s))
    rows = torch.where(
        common, p * (p / s.where(common, torch.ones(()))).where(common, torch.ones(())).log(), 0.0
    ).sum(-1)
    expected = rows.transpose(1, 2)[inputs["attention_mask"].bool()].mean()
    expected.backward()
    gradient = student.model.layers[0].self_attn.q_proj.weight.grad.clone()
    student.zero_grad()
    loss = loss_of(teacher, student, inputs, layer_map={0: 0})
    loss.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-6)
    found = student.model.layers[0].self_attn.q_proj.weight.grad
    assert (found - gradient).abs().max() < 1e-3 * gradient.abs().max()


# ---- Labels ----------------------------------------------------------------------------------------------------------


def _labels(inputs):
    labels = inputs["input_ids"].masked_fill(torch.rand(inputs["input_ids"].shape) < 0.7, -100)
    return labels.masked_fill(inputs["attention_mask"] == 0, -100)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForTokenClassification", "LlamaForTokenClassification"])
def test_labels_of_their_own_position(name):
    config = (bert() if name.startswith("Bert") else llama()).config
    config.num_labels = 100
    teacher, student = (getattr(transformers, name)(config).eval() for _ in range(2))
    inputs = batch("right")
    labels = _labels(inputs)
    found = loss_of(teacher, student, dict(inputs, labels=labels), rows="labels")
    rows = torch.stack(list(compare(teacher, student, inputs).rows.values()))
    torch.testing.assert_close(found, rows.transpose(2, 3)[:, labels != -100].mean(), rtol=1e-4, atol=1e-8)


def test_labels_of_whole_sequences_are_refused():
    config = llama().config
    config.pad_token_id = 0
    teacher, student = (transformers.LlamaForSequenceClassification(config) for _ in range(2))
    with pytest.raises(
        ValueError, match=r"labels \[3\] of LlamaForSequenceClassification must be \[batch, length\], one per token"
    ):
        loss_of(teacher, student, dict(batch(), labels=torch.tensor([0, 1, 0])), rows="labels")
