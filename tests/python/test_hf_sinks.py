"""Attention sinks in the distiller: outcomes of both distributions, with gradients for those of the student."""

import copy

import pytest
import torch
from hf_models import batch, gpt_oss, llama, loss_of

from streamkl.hf import AttentionDistiller, capture, compare, save_pair


def weights_of(model, inputs):
    """Attention weights of every layer; the last one is that of the sink."""
    weights = model(**inputs, output_attentions=True).attentions
    return [torch.cat([weight, 1 - weight.sum(-1, keepdim=True)], -1) for weight in weights]


def in_float64(model):
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


def expected(teacher, student, inputs, direction="forward", keys_only=False, heads=None):
    """(loss, gradients) from output_attentions in float64; `heads`: {student: teacher}."""
    teacher, student = in_float64(teacher), in_float64(student)
    kept, losses = inputs["attention_mask"].bool(), []
    for p, s in zip(weights_of(teacher, inputs), weights_of(student, inputs)):
        p, s = (each.transpose(1, 2)[kept] for each in (p.detach(), s))  # [rows, heads, keys and sink]
        p, s = (p, s) if heads is None else (p[:, list(heads.values())], s[:, list(heads)])
        p, s = (each[..., :-1] / each[..., :-1].sum(-1, keepdim=True) if keys_only else each for each in (p, s))
        p = p.unflatten(1, (s.shape[1], -1)).mean(2)
        a, b = (p, s) if direction == "forward" else (s, p)
        terms = torch.where(a > 0, a * (a.clamp_min(1e-300).log() - b.clamp_min(1e-300).log()), 0.0)
        losses.append(terms.sum(-1).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


def assert_equal(loss, student, wanted):
    loss.backward()
    assert abs(loss.item() - wanted[0].item()) < 1e-5 * wanted[0].item()
    largest = max(gradient.abs().max() for gradient in wanted[1].values())
    for name, parameter in student.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (found.double() - wanted[1].get(name, 0.0)).abs().max() < 1e-4 * largest, name


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    "heads_t, direction, head_map",
    [(4, "forward", None), (4, "reverse", None), (8, "forward", None), (8, "reverse", {0: 5, 1: 2, 3: 7})],
)
def test_equals_the_attention_weights(heads_t, direction, head_map, padding):
    teacher, student, inputs = gpt_oss(heads=heads_t), gpt_oss(), batch(padding)
    loss = loss_of(teacher, student, inputs, direction=direction, head_map=head_map)
    assert_equal(loss, student, expected(teacher, student, inputs, direction, heads=head_map))
    assert all(layer.self_attn.sinks.grad.abs().max() > 0 for layer in student.model.layers)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_sink_that_takes_everything_counts():
    teacher, inputs = gpt_oss(), batch()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for layer in student.model.layers:
            layer.self_attn.sinks.fill_(60.0)
    with torch.no_grad():
        assert loss_of(teacher, student, inputs) > 10


def test_only_the_sinks_train():
    teacher, student, inputs = gpt_oss(), gpt_oss().requires_grad_(False), batch()
    for layer in student.model.layers:
        layer.self_attn.sinks.requires_grad_(True)
    loss_of(teacher, student, inputs).backward()
    assert all(layer.self_attn.sinks.grad.abs().max() > 0 for layer in student.model.layers)


def test_checkpointing_and_temperature():
    """A temperature divides the logits of the sinks too: it is a smaller scale and smaller sinks."""
    teacher, student, inputs = gpt_oss(), gpt_oss().train(), batch()
    gradients = []
    for checkpointing in False, True:
        if checkpointing:
            student.gradient_checkpointing_enable()
        loss_of(teacher, student, dict(inputs, use_cache=False), temperature=2.0).backward()
        gradients.append([layer.self_attn.sinks.grad for layer in student.model.layers])
        student.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(*gradients))
    with AttentionDistiller(teacher, student, layer_map={0: 0}, temperature=2.0) as distiller, torch.no_grad():
        student(**inputs)
        warm = distiller.loss()
        for model in teacher, student:
            model.model.layers[0].self_attn.scaling /= 2
            model.model.layers[0].self_attn.sinks.div_(2)
        student(**inputs)
        distiller.temperature = 1.0
        torch.testing.assert_close(warm, distiller.loss() * 4)


def test_sinks_on_one_side():
    inputs = batch()
    for teacher, student, role in (gpt_oss(), llama(), "teacher"), (llama(), gpt_oss(), "student"):
        with AttentionDistiller(teacher, student, layer_map={1: 1}) as distiller:
            student(**inputs)
            with pytest.raises(ValueError, match=rf"student layer 1 and .*: only the {role} has attention sinks \(s_aux\)"):
                distiller.loss()
            distiller.sinks = "keys only"
            student(**inputs)
            assert distiller.loss() > 0


def test_the_conditional_distribution_on_the_keys():
    teacher, student, inputs = gpt_oss(), gpt_oss(), batch("right")
    loss = loss_of(teacher, student, inputs, sinks="keys only")
    assert_equal(loss, student, expected(teacher, student, inputs, keys_only=True))


def test_what_has_no_sinks_says_so(tmp_path):
    teacher, student, inputs = gpt_oss(), gpt_oss(), batch()
    assert compare(teacher, student, inputs).per_layer()[0, 0] > 0
    with pytest.raises(ValueError, match="maps of student layer 0 .*: the layers have attention sinks"):
        compare(teacher, student, inputs, buckets=(4, 4))
    assert compare(teacher, student, inputs, buckets=(4, 4), sinks="keys only").maps
    with capture(teacher) as layers, torch.no_grad():
        teacher(**inputs)
    assert torch.equal(layers[0].sink, teacher.model.layers[0].self_attn.sinks)
    with pytest.raises(ValueError, match="save_pair: the layers have attention sinks"):
        save_pair(tmp_path / "pair.safetensors", layers[0], layers[1])
    save_pair(tmp_path / "pair.safetensors", layers[0], layers[0], sinks="keys only")


def test_choices_are_checked():
    with pytest.raises(ValueError, match="sinks='none': must be 'both' or 'keys only'"):
        AttentionDistiller(llama(), llama(), sinks="none")
    teacher, student = gpt_oss(heads=8), gpt_oss()
    with pytest.raises(ValueError, match="sinks"):
        loss_of(teacher, student, batch(), direction="reverse")
