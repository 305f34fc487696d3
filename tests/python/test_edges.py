"""Edges of single conditions. Each test fails for a change of one line that no other test notices: see scripts/mutate."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import make_tensors
from hf_models import batch, gemma2, llama
from hf_trainer_cases import arguments

import streamkl
from streamkl.distill._data import load
from streamkl.distill._needles import KEY, VALUE, NeedleBatch, Retrieval
from streamkl.distill._objective import Objective, Outputs
from streamkl.distill._options import Options, UserError
from streamkl.hf import DistillationTrainer
from streamkl.hf._inputs import check_same_input
from streamkl.hf._pairs import Pair


@pytest.mark.parametrize("narrow", [0, 1])
def test_a_sink_gradient_is_rounded_to_its_own_type(narrow):
    """The other sink has 16 bits: the gradient of this one has the same bits as without it."""
    torch.manual_seed(0)
    tensors = make_tensors(len_q=9, len_k=9, heads_t=2, heads_s=2)
    sinks = [torch.randn(2).bfloat16().float() for _ in range(2)]
    with torch.no_grad():
        _, lse_t, lse_s = streamkl.attention_kl(*tensors, sink_t=sinks[0], sink_s=sinks[1], return_lse=True)

    def gradient(sinks):
        leaves = [sink.clone().requires_grad_() for sink in sinks]
        streamkl.attention_kl(*tensors, sink_t=leaves[0], sink_s=leaves[1], lse_t=lse_t, lse_s=lse_s).backward()
        return leaves[1 - narrow].grad

    exact = gradient(sinks)
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(gradient([sink.bfloat16() if i == narrow else sink for i, sink in enumerate(sinks)]), exact)


def load_sequences(folder, count):
    np.save(folder / "data.npy", np.zeros((count, 4), np.int32))
    options = SimpleNamespace(
        data=[str(folder / "data.npy")], context=4, start_context=0, eval_sequences=4, held_out=[]
    )
    text = SimpleNamespace(max_position_embeddings=4)
    teacher = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text),
        get_input_embeddings=lambda: SimpleNamespace(num_embeddings=1),
    )
    return load(options, None, teacher)


def test_one_sequence_is_left_for_training(tmp_path):
    assert [len(part) for part in load_sequences(tmp_path, 2)] == [1, 1]
    with pytest.raises(UserError, match="has 1 sequences of 4 tokens: at least 2 are needed"):
        load_sequences(tmp_path, 1)


@pytest.mark.parametrize("key, found", [(9, 0), (10, 1), (10 + KEY + VALUE - 1, 1), (10 + KEY + VALUE, 0)])
def test_a_needle_has_a_first_and_a_last_token(key, found):
    probabilities = torch.nn.functional.one_hot(torch.full((1, 1, VALUE), key), 64)
    pair = SimpleNamespace(row_probabilities=lambda rows, cache: (probabilities, probabilities))
    retrieval = Retrieval()
    needle = NeedleBatch(torch.zeros(1, 64), np.array([[3]]), np.array([[10]]), list(range(52, 56)))
    retrieval.add_attention({(0, 0): pair}, needle)
    assert retrieval.found["teacher"][0, 0][3].tolist() == [found * VALUE]


def test_the_language_loss_alone():
    options = Options(attention_weight=0.0, output_weight=0.0, language_weight=0.5)
    student, ids = llama(), batch(size=2, length=7)["input_ids"]
    losses = Objective(llama(), student, options, {})(ids)
    expected = student(input_ids=ids, labels=ids).loss
    assert losses.keys() == {"language", "loss"}
    torch.testing.assert_close(losses["language"], expected)
    torch.testing.assert_close(losses["loss"], 0.5 * expected)


def test_hidden_states_are_compared_by_layer():
    options = Options(attention_weight=0.0, output_weight=0.0, hidden_weight=3.0, layer_map=[1, 0, 2])
    teacher, student, ids = llama(3), llama(3), batch(size=2, length=7)["input_ids"]
    losses = Objective(teacher, student, options, {})(ids)
    states_t, states_s = (
        model.base_model(input_ids=ids, output_hidden_states=True).hidden_states for model in (teacher, student)
    )
    errors = [(states_s[i] - states_t[j]).square().sum() / states_t[j].square().sum() for i, j in ((1, 2), (2, 1), (3, 3))]
    assert losses.keys() == {"hidden", "loss"}
    torch.testing.assert_close(losses["hidden"], torch.stack(errors).mean())
    torch.testing.assert_close(losses["loss"], 3 * losses["hidden"])
    losses["loss"].backward()
    assert student.base_model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    with pytest.raises(UserError, match=r"--layer-map=\[0, 2, 1\]: --hidden-weight needs the last layer to learn from the last one"):
        Objective(teacher, student, Options(hidden_weight=3.0, layer_map=[0, 2, 1]), {})


def test_hidden_states_follow_the_attention_kl():
    """By default a layer learns from the nearest one with the same window; the last ones, with the final norm, stay together."""
    teacher, student = gemma2(6), gemma2(3)
    objective, ids = Objective(teacher, student, Options(hidden_weight=1.0), {}), batch(size=2, length=17)["input_ids"]
    with objective.attached():
        objective(ids)
    assert objective._layers == {0: 0, 1: 3, 2: 5}


def test_hidden_states_follow_the_attention_kl_that_has_ended():
    """A run that resumes after --attention-until pairs the layers as the attention KL would."""
    teacher, student = gemma2(6), gemma2(3)
    objective, ids = Objective(teacher, student, Options(hidden_weight=1.0), {}), batch(size=2, length=17)["input_ids"]
    objective.teaches_attention = False
    with objective.attached():
        losses = objective(ids)
    assert "attention" not in losses and objective._layers == {0: 0, 1: 3, 2: 5}


def test_a_softcap_of_small_logits_is_noticed():
    assert Outputs(llama()).head is not None and isinstance(Outputs(llama()).head, torch.nn.Linear)
    model = gemma2()
    model.config.final_logit_softcapping = 30.0
    assert isinstance(Outputs(model).head, torch.nn.Identity)


IDS = torch.arange(6).view(2, 3)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def forward(input_ids, attention_mask, decoder_attention_mask, position_ids, token_type_ids, labels): ...


def capture(forward=forward, **inputs):
    step = SimpleNamespace(
        arguments=lambda: dict(input_ids=IDS, **inputs),
        versions_by_name=dict,
        module=SimpleNamespace(main_input_name="input_ids", forward=forward),
    )
    return SimpleNamespace(step=step, model=SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False)))


@pytest.mark.parametrize("only", ["teacher", "student"])
@pytest.mark.parametrize(
    "name, value, accepted",
    [
        ("attention_mask", torch.ones(2, 3), True),
        ("attention_mask", MASK, False),
        ("decoder_attention_mask", MASK, False),
        ("position_ids", torch.arange(3).expand(2, 3), True),
        ("position_ids", torch.tensor([[0, 1, 0]]), False),
        ("token_type_ids", torch.zeros(2, 3), True),
        ("token_type_ids", MASK, False),
        ("labels", IDS, True),
        ("use_cache", True, True),
    ],
)
def test_an_input_of_one_model_only(only, name, value, accepted):
    teacher = capture(**({name: value} if only == "teacher" else {}))
    student = capture(**({name: value} if only == "student" else {}))
    if accepted:
        check_same_input(teacher, student)
    else:
        with pytest.raises(ValueError, match=f"the teacher ran on another {name} than the student"):
            check_same_input(teacher, student)


def test_inputs_that_are_not_compared_hide_no_others():
    labels = capture(labels=IDS)
    check_same_input(labels, capture(labels=IDS + 1))
    with pytest.raises(ValueError, match="the teacher ran on another attention_mask"):
        check_same_input(labels, capture(labels=IDS, attention_mask=MASK))


def test_a_model_without_an_input_is_given_none():
    check_same_input(capture(token_type_ids=MASK), capture(forward=lambda input_ids: ...))


def test_models_that_read_different_inputs():
    embeds = capture()
    embeds.step.arguments = lambda: dict(inputs_embeds=torch.zeros(2, 3, 4))
    for teacher, student in (capture(), embeds), (embeds, capture()):
        with pytest.raises(ValueError, match="which cannot be compared"):
            check_same_input(teacher, student)
    check_same_input(embeds, embeds)


def test_the_weight_of_the_kl_in_evaluation(tmp_path):
    """Batches of 2, 2 and 1 sequences of one length: the means over rows and over sequences are equal."""
    data = [dict(input_ids=each, labels=each.clone()) for each in batch(size=5, length=12)["input_ids"]]
    options = arguments(tmp_path, per_device_eval_batch_size=2)
    trainer = DistillationTrainer(
        model=llama(), args=options, train_dataset=data, eval_dataset=data, teacher=llama(), kl_weight=3.0
    )
    found = trainer.evaluate()
    assert found["eval_attention_kl"] > 0 and found["eval_model_loss"] > 0
    total = found["eval_model_loss"] + 3 * found["eval_attention_kl"]
    assert found["eval_loss"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("shape", [(3, 2), (2, 1), (1, 3), (6,), (2, 3, 1)])
def test_row_weights_have_the_shape_of_the_rows(shape):
    pair = Pair("layer 0", None, SimpleNamespace(q=torch.zeros(2, 1, 3, 4)), None)
    assert pair.fitting(torch.ones(2, 3)).shape == (2, 3)
    with pytest.raises(ValueError) as refused:
        pair.fitting(torch.ones(shape))
    assert str(refused.value) == f"layer 0: row_weight or labels {list(shape)} must be [2, 3]"
