"""Ways to use the distiller that once trained nothing, or the wrong thing, without a word."""

import copy
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hf_architectures import inputs_of, tiny_model
from hf_models import bart, batch, bert, gemma2, kl_from_attentions, llama, llama4, loss_of, t5
from transformers import LlavaForConditionalGeneration

from streamkl import Parallel
from streamkl.hf import AttentionDistiller, _inputs, _layers
from streamkl.hf._capture import _configs
from streamkl.hf._compare import compare_captured
from streamkl.hf._inputs import check_shards, device_of
from streamkl.hf._maps import check_against_configs
from streamkl.hf._pairs import Pair
from streamkl.hf._parameters import _tensors


# ---- A KL that trains nothing ----------------------------------------------------------------------------------------


def test_a_second_forward_without_gradients_is_an_error():
    student, inputs = llama(), batch()
    with AttentionDistiller(llama(), student) as distiller:
        student(**inputs)
        with torch.no_grad():
            student(**inputs)
        with pytest.raises(
            RuntimeError, match=r"would not train the student: its last forward ran under torch.no_grad\(\)"
        ):
            distiller.loss()
        with torch.no_grad():
            student(**inputs)
            assert distiller.loss() > 0


def test_a_frozen_student_is_an_error():
    student = llama().requires_grad_(False)
    with AttentionDistiller(llama(), student) as distiller:
        student(**batch())
        with pytest.raises(
            RuntimeError, match="no parameter that its queries and keys depend on requires a gradient"
        ):
            distiller.loss()
        student.model.layers[1].requires_grad_(True)  # the layer below stays frozen
        student(**batch())
        distiller.loss().backward()


def test_only_reentrant_checkpointing_is_blamed_for_itself():
    student = llama().train()
    student.gradient_checkpointing_enable()
    with AttentionDistiller(llama(), student) as distiller:
        with torch.no_grad():
            student(**batch(), use_cache=False)
        with pytest.raises(RuntimeError, match="no_grad") as error:
            distiller.loss()
        assert "reentrant" not in str(error.value)


# ---- The teacher -----------------------------------------------------------------------------------------------------


def test_the_teacher_receives_no_gradient():
    teacher, student, inputs = llama(), llama(), batch()
    with AttentionDistiller(teacher, student) as distiller:
        teacher(**inputs)
        student(**inputs)
        distiller.loss().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert any(parameter.grad is not None for parameter in student.parameters())


@pytest.mark.parametrize("difference", ["tokens", "padding", "changed in place"])
def test_a_teacher_that_ran_on_other_input_is_an_error(difference):
    teacher, student, inputs = llama(), llama(), batch("left")
    other = {name: tensor.clone() for name, tensor in inputs.items()}
    with AttentionDistiller(teacher, student) as distiller, torch.no_grad():
        teacher(**other)
        student(**inputs)
        distiller.loss()  # equal values
        name = "attention_mask" if difference == "padding" else "input_ids"
        if difference == "changed in place":
            teacher(**inputs)
            inputs["input_ids"].random_(100)
        else:
            other[name] = other[name].flip(1)
            teacher(**other)
        student(**inputs)
        with pytest.raises(ValueError, match=f"the teacher ran on another {name} than the student"):
            distiller.loss()


def test_embeddings_of_the_student_are_not_the_teachers():
    teacher, student, inputs = llama(), llama(), batch()
    embeddings = student.get_input_embeddings()(inputs["input_ids"])
    with AttentionDistiller(teacher, student) as distiller:
        student(inputs_embeds=embeddings)
        with pytest.raises(ValueError, match="the student ran on inputs_embeds, which are its own embeddings"):
            distiller.loss()
        teacher(**inputs)
        student(inputs_embeds=embeddings)
        with pytest.raises(ValueError, match="cannot be compared: pass check_input=False"):
            distiller.loss()
    with AttentionDistiller(teacher, student, check_input=False) as distiller:
        teacher(**inputs)
        student(inputs_embeds=embeddings)
        loss = distiller.loss()
        student(**inputs)
        torch.testing.assert_close(loss, distiller.loss())


def test_hidden_states_of_the_students_encoder_are_not_the_teachers():
    teacher, student, ids = bart(), bart(), batch()["input_ids"]
    with AttentionDistiller(teacher, student, attention="cross") as distiller:
        student(encoder_outputs=student.get_encoder()(ids), decoder_input_ids=ids)
        with pytest.raises(ValueError, match="the student ran on encoder_outputs, which are its own hidden states"):
            distiller.loss()


def test_input_that_changed_after_the_students_forward_is_an_error():
    inputs = batch()
    student = llama()
    with AttentionDistiller(llama(), student) as distiller:
        student(**inputs, use_cache=False)
        inputs["input_ids"].random_(100)
        with pytest.raises(ValueError, match="input_ids has changed in place since the student ran"):
            distiller.loss()


def test_a_larger_vocabulary_of_the_student():
    student = llama()
    student.resize_token_embeddings(120)
    with AttentionDistiller(llama(), student) as distiller:
        student(**batch())
        assert distiller.loss() > 0
        student(input_ids=torch.full((1, 5), 110))
        with pytest.raises(
            ValueError, match="input_ids contains 110: the teacher has 100 tokens and the student 120"
        ):
            distiller.loss()


# ---- Attention that is not modeled --------------------------------------------------------------------------------


def test_position_bias_is_refused():
    teacher, student, inputs = t5(), t5(), batch()
    refusal = r"layer 2 \(decoder.*SelfAttention\) adds a bias to its logits \(position_bias\)|T5For.* must take its attention from"
    with pytest.raises((ValueError, TypeError), match=refusal):
        loss_of(teacher, student, dict(inputs, decoder_input_ids=inputs["input_ids"]))


# ---- Masks -----------------------------------------------------------------------------------------------------------


def test_a_hole_in_the_mask():
    """Without a window only the order of the tokens matters. A window counts hidden tokens too."""
    inputs = batch()
    inputs["attention_mask"][0, 6:9] = 0
    for model in llama, gemma2:
        teacher, student = model().eval(), model().eval()
        expected = kl_from_attentions(teacher, student, inputs, {0: 0, 1: 1})
        torch.testing.assert_close(loss_of(teacher, student, inputs), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_chunks(padding):
    """Chunks count from the first token that is not padding."""
    teacher, student, inputs = llama4().eval(), llama4().eval(), batch(padding)
    expected = kl_from_attentions(teacher, student, inputs, {0: 0, 1: 1})
    torch.testing.assert_close(loss_of(teacher, student, inputs), expected, rtol=1e-4, atol=1e-6)


# ---- Models and distillers -----------------------------------------------------------------------------------------


def test_several_distillers_share_models():
    teachers, student, inputs = [llama(), llama()], llama(), batch("right")
    alone = [loss_of(teacher, student, inputs) for teacher in teachers]
    with AttentionDistiller(teachers[0], student) as one, AttentionDistiller(teachers[1], student) as two:
        student(**inputs)
        assert torch.equal(one.loss(), alone[0]) and torch.equal(two.loss(), alone[1])
    other = llama()
    with AttentionDistiller(teachers[0], student) as one, AttentionDistiller(teachers[0], other) as two:
        student(**inputs)
        other(**inputs)
        assert torch.equal(one.loss(), alone[0]) and two.loss() > 0
    for model in (*teachers, student, other):
        assert model.config._attn_implementation == "sdpa" and not model._forward_hooks


def test_nested_blocks():
    student, inputs = llama(), batch()
    distiller = AttentionDistiller(llama(), student)
    with distiller:
        with distiller:
            student(**inputs)
        assert distiller.loss() > 0
    assert not distiller.attached and student.config._attn_implementation == "sdpa"


def test_a_copy_of_an_attached_model(tmp_path):
    student, inputs = llama(), batch()
    with AttentionDistiller(llama(), student) as distiller:
        student(**inputs)
        copied = copy.deepcopy(student)
        torch.save(student, tmp_path / "student.pt")
        loss = distiller.loss()
        student(**inputs)
        expected = copied(**inputs).logits  # of a copy: not captured
        assert torch.equal(distiller.loss(), loss)
        student.save_pretrained(tmp_path / "saved")
    assert torch.equal(copied(**inputs).logits, expected)
    assert torch.equal(torch.load(tmp_path / "student.pt", weights_only=False)(**inputs).logits, expected)
    assert "streamkl" not in (tmp_path / "saved/config.json").read_text()
    assert loss_of(copied, student, inputs).abs() < 1e-6
    assert copied.config._attn_implementation == "sdpa"


def test_wrapped_models():
    peft = pytest.importorskip("peft")
    teacher, student, inputs = llama(), llama(), batch()
    expected = loss_of(teacher, student, inputs)
    adapted = peft.get_peft_model(copy.deepcopy(student), peft.LoraConfig(target_modules=["q_proj"], r=2))
    wrapped = torch.nn.Module()
    wrapped.module, wrapped.forward = student, student.forward
    for wrapper in adapted, torch.compile(student, backend="eager"), wrapped:
        with AttentionDistiller(teacher, wrapper) as distiller:
            (wrapped.module if wrapper is wrapped else wrapper)(**inputs)
            loss = distiller.loss()
            torch.testing.assert_close(loss, expected)
            loss.backward()
    assert adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.grad.abs().sum() > 0


def test_the_inner_model_may_be_called():
    teacher, student, inputs = llama(), llama(), batch()
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        whole = distiller.loss()
        student.model(**inputs)
        assert torch.equal(distiller.loss(), whole)


def test_teacher_and_student_are_two_models():
    student = llama()
    with pytest.raises(ValueError, match="teacher: must be another model than the student"):
        AttentionDistiller(student, student)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(layer_map={}), r"layer_map=\{\}: must contain at least one pair"),
        (dict(layer_map={0: []}), "must have at least one teacher layer"),
        (dict(layer_map=[0, -1]), "must contain numbers from 0 on"),
        (dict(layer_map=[0, 1, 1]), r"layer_map\[2\]=1: the student has layers 0..1"),
        (dict(layer_map={0: 2}), r"layer_map\[0\]=2: the student has layers 0..1, the teacher 0..1"),
        (dict(layer_map=3), "layer_map=3: must be a mapping"),
        (dict(head_map=[]), "head_map=.*: must contain at least one pair"),
        (dict(head_map={9: 0}), r"head_map: student heads \[9\] must be 0..3"),
        (dict(head_map=[0, 1, 2]), "head_map: a sequence of 3 for 4 student heads: must have one entry for each"),
        (dict(head_map={0: [0, 1, 2]}), "head_map: a sequence of 3 for 4 student heads"),
        (dict(head_map={0: {0: 7}}), r"head_map: teacher heads \[7\] must be 0..3"),
        (dict(attention="decoder"), "attention='decoder': must be 'self', 'cross' or 'encoder'"),
        (dict(relations=("qv",)), "relations=.*: must be one or more of 'qk', 'qq', 'kk', 'vv'"),
        (dict(relation_heads=2), "relation_heads=2: needs relations 'qq', 'kk' or 'vv', and no head_map"),
        (dict(relation_heads=2, relations=("vv",), head_map=[0]), "relation_heads=2: needs relations .*, and no head_map"),
        (dict(relation_heads=0, relations=("vv",)), "relation_heads=0: must be None or a whole number, at least 1"),
        (dict(relation_heads=True, relations=("vv",)), "relation_heads=True: must be None or a whole number"),
        (dict(relation_heads=2, relations=("vv",), row_weight="far"), "relation_heads=2: needs row_weight=None and head_weight=None"),
        (dict(relation_heads=2, relations=("vv",), head_weight=[1, 1]), "relation_heads=2: needs row_weight=None and head_weight=None"),
        (dict(layer_weight={1: -1.0}), "layer_weight=.*: must be finite, and not negative"),
        (dict(layer_weight={1: float("nan")}), "layer_weight=.*: must be finite, and not negative"),
        (dict(layer_weight=[1, 2]), r"layer_weight=\[1, 2\]: must be {student layer: weight}"),
        (dict(attention="encoder", rows="labels"), "rows='labels': needs attention='self' or 'cross'"),
        (dict(parallel=Parallel(tensor_group="a group")), "parallel: a distiller takes context_group alone"),
        (dict(parallel=Parallel(loss_group="a group")), "parallel: a distiller takes context_group alone"),
        (dict(temperature=0), "temperature=0: must be a positive number"),
        (dict(direction="both"), "direction='both': must be 'forward', 'reverse' or 'auto'"),
    ],
)
def test_options_are_checked_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionDistiller(llama(), llama(), **options)


def test_a_sequence_has_an_entry_for_each_layer():
    teacher, student = llama(), llama()
    with pytest.raises(ValueError, match="layer_map: a sequence of 1 for 2 student layers: must have one entry for each"):
        loss_of(teacher, student, batch(), layer_map=[1])
    assert loss_of(teacher, student, batch(), layer_map={0: 1}, head_map={0: 1}) > 0


@pytest.mark.parametrize(
    "heads_t, head_map, direction", [(4, None, "reverse"), (8, None, "forward"), (8, [0, 2, 4, 6], "reverse"), (8, {0: [0, 2, 4, 6]}, "forward")]
)
def test_auto_is_forward_for_a_mean_of_heads(heads_t, head_map, direction):
    teacher, student = llama(heads=heads_t), llama(heads=4)
    auto, named, other = (
        loss_of(teacher, student, batch(), head_map=head_map, direction=each).item()
        for each in ("auto", direction, {"forward": "reverse", "reverse": "forward"}[direction])
    )
    assert auto == named != other


def test_auto_counts_the_heads_of_the_tower():
    teacher, student = (tiny_model("LlavaForConditionalGeneration", seed) for seed in (0, 1))
    student.config.vision_config.num_attention_heads = 2
    directions = {tower: AttentionDistiller(teacher, student, direction="auto", tower=tower).direction for tower in ("language", "vision")}
    assert directions == dict(language="reverse", vision="forward")


def test_maps_are_those_of_the_tower():
    """The vision tower may have more layers and heads than the text that the model reads."""
    config = tiny_model("LlavaForConditionalGeneration", 0).config
    config.vision_config.num_hidden_layers, config.vision_config.num_attention_heads = 4, 8
    teacher, student = (LlavaForConditionalGeneration(config) for _ in range(2))
    inputs = inputs_of("none", student)
    for options in dict(layer_map={2: 3}), dict(head_map={5: 6}):
        assert loss_of(teacher, student, inputs, tower="vision", **options) > 0
    for tower in "language", None:
        with pytest.raises(ValueError, match=r"layer_map\[2\]=3: the student has layers 0..1, the teacher 0..1"):
            AttentionDistiller(teacher, student, tower=tower, layer_map={2: 3})


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(layer_weight={2: 3.0}), r"layer_weight: 2 is no layer of the student: must be a number, 0..1"),
        (dict(layer_weight={"model.layers.0": 3.0}), "layer_weight: 'model.layers.0' is no layer of the student"),
        (dict(head_weight={2: [1, 0, 0, 0]}), "head_weight: 2 is no layer of the student"),
        (dict(head_map={2: [1, 0, 0, 0]}), "head_map: 2 is no layer of the student"),
        (dict(layer_map={0: 0, "model.layers.0": 1}), "layer_map=.*: names a student layer twice"),
    ],
)
def test_what_no_layer_would_use_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        loss_of(llama(), llama(), batch(), **options)


# ---- Layers of another model -----------------------------------------------------------------------------------------


def expected_of(teacher, student):
    """The KL of copies whose layers have the configs of their models."""
    copies = [llama(), llama()]
    for made, model in zip(copies, (teacher, student)):
        made.load_state_dict(model.state_dict())
    return kl_from_attentions(*copies, batch(), {0: 0, 1: 1})


@pytest.mark.parametrize("shares", [False, True], ids=["copied", "shared"])
def test_layers_of_the_teacher_in_the_student(shares):
    """Their attention modules have the config of the teacher, or a copy."""
    teacher, student = llama(), llama()
    layer = teacher.model.layers[0]
    student.model.layers[0] = layer if shares else copy.deepcopy(layer)
    for _ in range(2):
        with AttentionDistiller(teacher, student) as distiller:
            student(**batch(), use_cache=False)
            torch.testing.assert_close(distiller.loss(), expected_of(teacher, student), rtol=1e-4, atol=1e-6)
            assert len(distiller.last_losses) == 2
    assert layer.self_attn.config is teacher.config and teacher.config._attn_implementation == "sdpa"


def test_a_shared_encoder():
    teacher, student, ids = bart(), bart(), batch()["input_ids"]
    student.model.encoder = teacher.model.encoder
    with AttentionDistiller(teacher, student, attention="encoder") as distiller:
        student(input_ids=ids, decoder_input_ids=ids)
        assert distiller.loss() == 0
        assert not copy.deepcopy(student).model.encoder._forward_hooks
    with AttentionDistiller(teacher, student) as distiller:
        student(input_ids=ids, decoder_input_ids=ids)
        assert distiller.loss() > 0
    assert not student.model.encoder._forward_hooks and "__reduce_ex__" not in student.model.encoder.__dict__


def test_an_implementation_that_changes_inside_the_block_is_named():
    student = llama()
    with AttentionDistiller(llama(), student) as distiller:
        student.set_attn_implementation("eager")
        student(**batch())
        with pytest.raises(ValueError, match=r"it has: none \(set_attn_implementation\(\) between attach"):
            distiller.loss()


def test_other_attention_is_named():
    with pytest.raises(ValueError, match="BertModel has no layers for attention='cross'; it has: attention='self'"):
        loss_of(bert(), bert(), batch(), attention="cross")
    with pytest.raises(ValueError, match="attention='self', tower='vision'; it has: attention='self', tower='language'"):
        loss_of(bert(), bert(), batch(), tower="vision")


# ---- A KL of shards --------------------------------------------------------------------------------------------------


def test_a_context_parallel_region_without_a_known_group_is_an_error():
    """torch's region of modules keeps its mesh to itself: the models would compare shards as if they were sequences."""
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_region

    student = llama()
    with AttentionDistiller(llama(), student) as distiller:
        torch_region._enable_cp_dtensor_dispatcher()
        try:
            student(**batch())
            with pytest.raises(RuntimeError, match="context-parallel region whose mesh is not known.*pass parallel="):
                distiller.loss()
        finally:
            torch_region._disable_cp_dtensor_dispatcher()


def test_parallel_needs_a_forward():
    student = llama()
    with AttentionDistiller(llama(), student) as distiller:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"parallel\(\) tells how the last forward of the student ran, and it has not run"):
                distiller.parallel()
            student(**batch())
            assert distiller.parallel() is None
            distiller.loss()


def test_a_teacher_whose_forward_is_not_captured():
    teacher, student = llama(), llama()
    with AttentionDistiller(teacher, student) as distiller:
        distiller.teacher.takes = lambda: False
        student(**batch())
        with pytest.raises(RuntimeError, match="the forward of the teacher, LlamaForCausalLM, was not captured"):
            distiller.loss()


def test_a_teacher_in_training_mode():
    """An attached one is in eval mode; compiled code does not ask."""
    teacher, student = llama(), llama()
    with AttentionDistiller(teacher, student) as distiller:
        teacher(**batch())
        distiller.teacher.step.training = True
        student(**batch())
        with pytest.raises(RuntimeError, match="the compiled teacher ran in training mode: call teacher.eval"):
            distiller.loss()


@pytest.mark.parametrize("options, message", [
    (dict(sample_rows=0.5), "sample_rows=0.5: must be 1 under context parallelism"),
    (dict(row_weight="kl"), "row_weight='kl': must be None under context parallelism"),
    (dict(rows="labels"), "rows='labels': a shard of labels does not contain the next token of all its rows"),
])  # fmt: skip
def test_what_context_parallelism_does_not_have(options, message):
    student = llama()
    with AttentionDistiller(llama(), student, verify="never", **options) as distiller:
        student(**batch(), labels=batch()["input_ids"])
        distiller.parallel = lambda: Parallel(layout="zigzag")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # verify="never": nothing is said about proofs
            with pytest.raises(ValueError, match=message):
                distiller.loss()


@pytest.mark.parametrize("name, given, message", [
    ("attention_mask", [[1, 1, 1, 0]], "attention_mask hides tokens, .*pad at the end, leave it out, and pass loss"),
    ("attention_mask", [[1, 1, 1, 1]], None),
    ("position_ids", [[3, 4, 5, 5]], None),
    ("position_ids", [[0, 1, 0, 1]], "position_ids decrease along the sequence, in the order of layout='zigzag', and packed"),
    ("position_ids", [[[0, 1, 0, 1]]] * 3, "position_ids decrease along the sequence"),
    ("position_ids", [[[0, 1, 1, 2]], [[0, 2, 1, 3]], [[0, 1, 2, 3]]], None),  # an image: only time does not decrease
    ("position_ids", [[0, 1, 2, 0, 1, 2, 3, 4]], None),  # of whole sequences: the region has ended
    ("cu_seq_lens_q", [0, 2, 4], "cu_seq_lens_q names several sequences, and packed sequences are not supported"),
    ("cu_seq_lens_q", [0, 4], None),
])  # fmt: skip
def test_shards_of_padded_and_packed_sequences_are_refused(name, given, message):
    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    student = SimpleNamespace(model=model, step=SimpleNamespace(arguments=lambda: {name: torch.tensor(given)}))
    layers = [SimpleNamespace(q=torch.zeros(1, 2, 4, 8))]
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_shards(student, layers, "self", Parallel())


def test_no_comparison_of_shards():
    student = llama()
    with AttentionDistiller(llama(), student) as distiller:
        student(**batch())
        distiller.pairs()
        distiller.parallel = lambda: Parallel()
        with pytest.warns(UserWarning, match="are not proven"), pytest.raises(RuntimeError, match="without context parallelism"):
            compare_captured(distiller)


def test_tokens_of_other_models():
    student, inputs = llama(), batch()
    with AttentionDistiller(llama(), student, check_input=False) as distiller:
        distiller.teacher.model(input_ids=inputs["input_ids"][:, :9])
        student(**inputs)
        with pytest.raises(ValueError, match=r"\[3, 9, 9\] and \[3, 17, 17\] must be equal: did both read the same tokens"):
            distiller.loss()


def test_what_is_no_model():
    with pytest.raises(TypeError, match="student: int must be a transformers model"):
        AttentionDistiller(llama(), 3)


def test_data_parallel_is_refused():
    """Its copies share the hooks of the model, wrapped before or after."""
    student, message = llama(), "torch.nn.DataParallel runs copies .* start one process per GPU with torchrun"
    with pytest.raises(TypeError, match=f"student: {message}"):
        AttentionDistiller(llama(), torch.nn.DataParallel(student))
    with AttentionDistiller(llama(), student) as distiller:
        with pytest.raises(RuntimeError, match=f"LlamaForCausalLM: {message}"):
            student._replicate_for_data_parallel()(**batch())
        student(**batch())
        assert distiller.loss() > 0


def test_an_implementation_that_changed_meanwhile_stays():
    """detach() gives back only what attach() has replaced; a second one changes nothing."""
    teacher, student = llama(), llama()
    with AttentionDistiller(teacher, student) as distiller:
        student.set_attn_implementation("eager")
        distiller.detach()
        distiller.detach()
        distiller.reset()
    assert (teacher.config._attn_implementation, student.config._attn_implementation) == ("sdpa", "eager")


def test_configs_inside_of_configs(monkeypatch):
    student = llama()
    kind = type(student.config)
    monkeypatch.setattr(kind, "sub_configs", {"inner": kind, "none": kind})
    student.config.inner = kind()
    assert _configs(student) == [student.config, student.config.inner]


def test_heads_are_checked_where_configs_tell():
    """A config without the number of heads tells nothing."""
    plain = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False, get_text_config=lambda **_: SimpleNamespace()))
    check_against_configs(None, {0: {9: 9}}, plain, plain)


def test_outputs_without_a_graph():
    tensors = [torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2, dtype=torch.int64)]
    assert [each is tensors[0] for each in _tensors({"logits": tensors[0], "others": tensors[1:]})] == [True]


def test_a_pair_of_shards_has_no_padding():
    pair = Pair("layer 0", None, None, None)
    with pytest.raises(ValueError, match="layer 0: padding and packed sequences are not supported under context parallelism"):
        pair._of_shards({}, SimpleNamespace(queries=object()))


def test_a_teacher_of_other_targets():
    """Without decoder_input_ids, the tokens of a decoder are made from labels."""
    teacher, student = bart().eval(), bart()
    inputs = batch()
    labels, others = inputs["input_ids"].clone(), inputs["input_ids"].flip(1)
    made = teacher.prepare_decoder_input_ids_from_labels(labels)
    for given, fits in (dict(labels=labels), True), (dict(decoder_input_ids=made), True), (dict(labels=others), False):
        with AttentionDistiller(teacher, student) as distiller, torch.no_grad():
            teacher(**inputs, **given)
            student(**inputs, labels=labels)
            if fits:
                assert distiller.loss() > 0
            else:
                with pytest.raises(ValueError, match="ran on another decoder_input_ids than the student"):
                    distiller.loss()


def test_an_input_of_one_model_alone():
    teacher, student, inputs = bert().eval(), bert(), batch()
    types = (torch.arange(inputs["input_ids"].shape[1]) % 2).expand_as(inputs["input_ids"])
    for given, fits in (types, False), (torch.zeros_like(types), True):
        with AttentionDistiller(teacher, student) as distiller, torch.no_grad():
            teacher(**inputs, token_type_ids=given)
            student(**inputs)
            if fits:
                assert distiller.loss() > 0
            else:
                with pytest.raises(ValueError, match="ran on another token_type_ids than the student"):
                    distiller.loss()


def test_labels_of_a_model_whose_image_tokens_see_each_other():
    """Row i predicts token i + 1 whatever the mask is: labels at tokens 12.. count rows 11.. ."""
    name = "Gemma3ForConditionalGeneration"
    teacher, student = (tiny_model(name, seed) for seed in (0, 1))
    inputs = inputs_of("none", student)
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, 12:16] = inputs["input_ids"][:, 12:16]
    rows = torch.zeros(labels.shape)
    rows[:, 11:15] = 1
    losses = []
    for options, given in (dict(rows="labels"), dict(labels=labels)), ({}, dict(row_weight=rows)):
        with AttentionDistiller(teacher, student, **options) as distiller, torch.no_grad():
            student(**inputs)
            losses.append(distiller.loss(**given))
    torch.testing.assert_close(*losses)


def test_relations_of_cross_attention_are_refused():
    with pytest.raises(ValueError, match=r"relations=\('qq',\): must be \('qk',\) with attention='cross'"):
        AttentionDistiller(bart(), bart(), attention="cross", relations=("qq",))


@pytest.mark.parametrize("name, value", [("layer_weight", 5.0), ("head_weight", [0, 0, 0, 1]), ("head_map", [0, 0, 0, 0])])
def test_a_layer_outside_of_layer_map_has_nothing_of_its_own(name, value):
    with pytest.raises(ValueError, match=f"{name}: student layer 1 is not compared: it is not in layer_map"):
        loss_of(llama(), llama(), batch(), layer_map={0: 1}, **{name: {1: value}})


def test_auto_knows_encoders_and_relation_heads():
    teacher, student = bart(), bart()
    student.config.encoder_attention_heads //= 2
    found = {kind: AttentionDistiller(teacher, student, direction="auto", attention=kind).direction for kind in ("self", "encoder")}
    assert found == dict(self="reverse", encoder="forward")
    options = dict(direction="auto", relations=("vv",), relation_heads=4)
    assert AttentionDistiller(llama(heads=8), llama(heads=4), **options).direction == "reverse"


def test_a_student_is_no_teacher_meanwhile():
    """The teacher of a distiller runs in eval mode."""
    a, b = llama(), llama()
    with AttentionDistiller(a, b), pytest.raises(ValueError, match="LlamaForCausalLM is the student of one distiller and the teacher"):
        AttentionDistiller(b, a).attach()
    with AttentionDistiller(b, a) as distiller, torch.no_grad():  # nothing is left attached
        a(**batch())
        assert distiller.loss() > 0


@pytest.mark.parametrize("make, attention, options", [
    (llama, "self", {}), (llama, "self", dict(use_cache=False)), (bart, "encoder", {}), (bart, "self", {}),
])  # fmt: skip
@pytest.mark.parametrize("role", ["teacher", "student"])
def test_generate_is_no_step(make, attention, options, role):
    """Without a cache neither, nor in the encoder of an encoder-decoder."""
    models, inputs, others = dict(teacher=make(), student=make()), batch(), batch(seed=5)["input_ids"][:, :9]
    inputs |= dict(decoder_input_ids=inputs["input_ids"]) if make is bart else {}
    losses = []
    for generates in False, True:
        with AttentionDistiller(*models.values(), attention=attention) as distiller, torch.no_grad():
            models["student"](**inputs)
            if generates:
                models[role].generate(others, max_new_tokens=3, do_sample=False, **options)
            losses.append(distiller.loss())
    assert torch.equal(*losses)


def test_padding_after_a_cache():
    """Of the new tokens after past_key_values, those of padding are no rows."""
    models, ids = (llama().eval(), llama()), batch()["input_ids"][:1]
    mask, rows = torch.ones(1, 14, dtype=torch.long), torch.ones(1, 8)
    mask[0, 11:] = rows[0, 5:] = 0
    losses = []
    for weight in None, rows:
        with torch.no_grad():
            caches = [model(ids[:, :6], use_cache=True).past_key_values for model in models]
        with AttentionDistiller(*models) as distiller:
            for model, cache in zip(models, caches):
                model(ids[:, 6:14], attention_mask=mask, past_key_values=cache)
            losses.append(distiller.loss(row_weight=weight))
    torch.testing.assert_close(*losses)


# ---- Several devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places, device, expected", [
    (None, "cpu", "cpu"), ({"": 0}, "cuda:0", "cuda:0"), ({"model.layers.0": 0, "model.layers.1": 1}, "cuda:0", None),
    ({"": "disk"}, "meta", None),
])  # fmt: skip
def test_the_device_of_a_model(places, device, expected):
    """accelerate moves the inputs of a model that it has spread or offloaded."""
    model = SimpleNamespace(hf_device_map=places, device=torch.device(device))
    assert device_of(model) == (None if expected is None else torch.device(expected))


def test_the_teacher_reads_the_inputs_on_its_device(monkeypatch):
    teacher, student, found = llama(), llama(), []

    def read(module, args, kwargs):
        found.extend(kwargs[name].device.type for name in ("input_ids", "attention_mask"))
        raise KeyError("a teacher on another device")

    monkeypatch.setattr(_inputs, "device_of", lambda model: torch.device("meta"))
    with AttentionDistiller(teacher, student) as distiller:
        student(**batch())
        hook = teacher.register_forward_pre_hook(read, with_kwargs=True, prepend=True)
        with pytest.raises(KeyError, match="a teacher on another device"):
            distiller.loss()
        hook.remove()
    assert found == ["meta", "meta"]


def test_keys_are_on_the_device_of_their_layer(monkeypatch):
    monkeypatch.setattr(_layers, "_read", lambda call, *_: call.query.device.type)
    read = _layers.KeyReader(None)
    queries = [torch.zeros(1, 2, 4, 8, device=device) for device in ("cpu", "meta")]
    calls = [SimpleNamespace(query=q, key=q, mask=None, causal=True, implementation="sdpa") for q in queries]
    assert [read(call) for call in calls] == ["cpu", "meta"]


@pytest.mark.parametrize("weights", [None, {0: 2.0}])
def test_the_mean_of_layers_on_several_devices(weights):
    distiller = AttentionDistiller(llama(), llama(), layer_weight=weights)
    losses = {0: torch.ones((), device="meta"), 1: torch.ones(())}
    assert distiller._mean_of_layers(losses).device.type == "meta"
