"""capture, compare, save_pair, and the options of the distiller, compared with output_attentions and the command-line tool."""

import json
import os
import subprocess

import pytest
import torch
import transformers
from hf_models import bart, batch, bert, gemma2, kl_from_attentions, llama, loss_of

from streamkl.hf import AttentionDistiller, capture, compare, save_pair


# ---- Looking at models -----------------------------------------------------------------------------------------------


def test_capture():
    model, inputs = gemma2(), batch("left")
    with capture(model) as layers:
        model(**inputs)
    assert model.config._attn_implementation == "eager" and len(layers) == 2
    first, second = layers
    assert first.name == "model.layers.0.self_attn" and first.q.requires_grad and first.refusal is None
    assert (first.q.shape, first.k.shape) == ((3, 4, 17, 16), (3, 2, 17, 16))
    assert (first.scale, first.softcap, first.causal) == (0.25, 3.0, True)
    assert (first.visible.window, second.visible.window) == ((4, 0), (-1, 0))
    assert torch.equal(first.counted, inputs["attention_mask"].bool())


def test_compare():
    teacher, student, inputs = llama(4, 8, 4, 64).eval(), llama().eval(), batch("right")
    found = compare(teacher, student, inputs, layer_map={0: 1, 1: 3}, buckets=(4, 4))
    expected = kl_from_attentions(teacher, student, inputs, {0: 1, 1: 3})
    assert list(found.rows) == [(0, 1), (1, 3)] and found.rows[0, 1].shape == (3, 4, 17)
    torch.testing.assert_close(sum(found.per_layer().values()) / 2, expected.item(), rtol=1e-4, atol=1e-6)
    padded = inputs["attention_mask"] == 0
    assert (
        found.rows[0, 1].isnan().transpose(1, 2)[padded].all()
        and not found.rows[0, 1].isnan().transpose(1, 2)[~padded].any()
    )
    assert len(found.table()) == 8 and found.maps[0, 1].kl.shape == (4, 4, 4)
    student.train().model.layers[0].eval()
    compare(teacher, student, inputs)
    assert student.training and not student.model.layers[0].training
    assert "student layer  teacher layer" in str(found) and student.config._attn_implementation == "sdpa"


def test_compare_names_the_heads_of_a_head_map():
    teacher, student, inputs = llama().eval(), llama().eval(), batch()
    every = compare(teacher, student, inputs, head_map=[2, 0, 1, 2])
    found = compare(teacher, student, inputs, head_map={1: 0, 3: 2})
    expected = {(row["student_layer"], row["head"]): row["kl"] for row in every.table()}
    assert [row["head"] for row in found.table()] == [1, 3] * 2
    assert all(row["kl"] == pytest.approx(expected[row["student_layer"], row["head"]], rel=1e-5) for row in found.table())
    with pytest.raises(TypeError, match="compare\\(\\) takes no temperature: must be one of attention, direction"):
        compare(teacher, student, inputs, temperature=2)


@pytest.mark.parametrize("padding", ["none", "left"])
def test_save_pair(padding, tmp_path):
    """The tool computes the KL of the file."""
    tool = os.environ.get("STREAMKL_CLI")
    if tool is None:
        pytest.skip("needs STREAMKL_CLI, the path of the tool")
    teacher, student, inputs = gemma2(), gemma2(), batch(padding)
    with capture(teacher) as layers_t, capture(student) as layers_s, torch.no_grad():
        teacher(**inputs)
        student(**inputs)
    for i in range(2):
        path = tmp_path / f"{i}.safetensors"
        options = save_pair(path, layers_t[i], layers_s[i])
        answer = subprocess.run([tool, "kl", path, "--json", *options], capture_output=True, text=True, check=True)
        found = compare(teacher, student, inputs, layer_map={i: i}).per_layer()[i, i]
        assert json.loads(answer.stdout)["kl"] == pytest.approx(found, rel=1e-4)


# ---- Options of the distiller ----------------------------------------------------------------------------------------


def test_one_student_layer_learns_from_several():
    teacher, student, inputs = llama(4).eval(), llama().eval(), batch()
    single = [kl_from_attentions(teacher, student, inputs, {0: j}) for j in (1, 3)]
    found = loss_of(teacher, student, inputs, layer_map={0: [1, 3]})
    torch.testing.assert_close(found, sum(single) / 2, rtol=1e-4, atol=1e-6)


def test_weights_of_layers_and_their_losses():
    teacher, student, inputs = llama(), llama(), batch()
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        losses = distiller.losses()
    assert list(losses) == [0, 1] and all(loss.requires_grad for loss in losses.values())
    found = loss_of(teacher, student, inputs, layer_weight={0: 3.0})
    torch.testing.assert_close(found, (3 * losses[0] + losses[1]) / 4)


def test_head_maps_per_layer():
    teacher, student, inputs = llama(), llama(), batch()
    whole = loss_of(teacher, student, inputs, head_map={0: [3, 2, 1, 0], 1: {0: 1}})
    parts = [loss_of(teacher, student, inputs, layer_map={0: 0}, head_map=[3, 2, 1, 0]),
             loss_of(teacher, student, inputs, layer_map={1: 1}, head_map={0: 1})]  # fmt: skip
    torch.testing.assert_close(whole, sum(parts) / 2)


def test_temperature():
    """A temperature of 2 is the KL of half the scale, times 4; it drops the LSEs of the attention."""
    teacher, student, inputs = gemma2(), gemma2(), batch()
    found = loss_of(teacher, student, inputs, layer_map={1: 1}, temperature=2.0)
    with capture(teacher) as t, capture(student) as s, torch.no_grad():
        teacher(**inputs)
        student(**inputs)

    def logits(layer):
        k = layer.k.repeat_interleave(2, 1)
        x = 3.0 * torch.tanh(layer.q @ k.transpose(2, 3) * layer.scale / 3.0) / 2.0
        return x.masked_fill(~torch.ones(17, 17).tril().bool(), -torch.inf).log_softmax(-1)

    log_p, log_s = logits(t[1]), logits(s[1])
    expected = torch.where(log_p.isinf(), 0.0, log_p.exp() * (log_p - log_s)).sum(-1).mean() * 4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("relation", ["qq", "kk", "vv"])
def test_relations(relation):
    teacher, student, inputs = bert(2, 4, 64).eval(), bert(2, 4, 32).eval(), batch("right")
    found = loss_of(teacher, student, inputs, layer_map={1: 1}, relations=(relation,))
    with capture(teacher) as t, capture(student) as s:
        teacher(**inputs)
        student(**inputs)
    x, y = (dict(q=layer.q, k=layer.k, v=layer.v)[relation[0]] for layer in (t[1], s[1]))
    hidden = inputs["attention_mask"][:, None, None] == 0
    log_p, log_s = (
        (a @ a.transpose(2, 3) / a.shape[-1] ** 0.5).masked_fill(hidden, -1e30).log_softmax(-1) for a in (x, y)
    )
    kl = (log_p.exp() * (log_p - log_s)).sum(-1).transpose(1, 2)[inputs["attention_mask"].bool()].mean()
    torch.testing.assert_close(found, kl, rtol=1e-4, atol=1e-6)
    both = loss_of(teacher, student, inputs, layer_map={1: 1}, relations=("qk", relation))
    torch.testing.assert_close(both, (found + loss_of(teacher, student, inputs, layer_map={1: 1})) / 2)


def test_shared_keys_have_no_head_map():
    """Head 2 and head 3 have key head 1: a map of heads does not say which key heads to compare."""
    teacher, student = llama(), llama()
    with pytest.raises(ValueError, match="head_map names heads of queries, and relation 'kk' compares key heads"):
        loss_of(teacher, student, batch(), relations=("kk",), head_map={0: 1})
    assert loss_of(teacher, student, batch(), relations=("qq",), head_map={0: 3}) > 0


@pytest.mark.parametrize("relation", ["qq", "kk", "vv"])
def test_relation_heads(relation):
    """MiniLMv2, in float64: heads of the models whose numbers do not divide each other."""
    teacher, student, inputs = bert(2, 4, 64).eval(), bert(2, 3, 48).eval(), batch("right")
    with capture(teacher) as t, capture(student) as s:
        teacher(**inputs)
        student(**inputs)
    logs, hidden = [], inputs["attention_mask"][:, None, None] == 0
    for layer in t[1], s[1]:
        heads = dict(q=layer.q, k=layer.k, v=layer.v)[relation[0]].double()
        a = heads.transpose(1, 2).flatten(2).unflatten(2, (2, -1)).transpose(1, 2)
        logs.append((a @ a.transpose(2, 3) / a.shape[-1] ** 0.5).masked_fill(hidden, -1e30).log_softmax(-1))
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).transpose(1, 2)[inputs["attention_mask"].bool()].mean()
    kl.backward()
    expected = {name: each.grad.clone() for name, each in student.named_parameters() if each.grad is not None}
    student.zero_grad()
    options = dict(layer_map={1: 1}, relations=(relation,), relation_heads=2)
    with AttentionDistiller(teacher, student, **options) as distiller:
        student(**inputs)
        loss = distiller.loss()
        loss.backward()
    torch.testing.assert_close(loss.double(), kl, rtol=1e-5, atol=1e-7)
    largest = max(gradient.abs().max().item() for gradient in expected.values())  # some biases have none
    for name, gradient in expected.items():
        made = dict(student.named_parameters())[name].grad
        torch.testing.assert_close(made, gradient, rtol=0, atol=1e-5 * largest)
    with pytest.raises(ValueError, match="layer 1 and teacher layer 1: relation_heads=5 must divide 64"):
        loss_of(teacher, student, inputs, **options | dict(relation_heads=5))


def test_rows_of_labels():
    """Only rows that predict a label count: row i predicts token i + 1."""
    teacher, student, inputs = llama().eval(), llama().eval(), batch("right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :5] = -100
    found = loss_of(teacher, student, dict(inputs, labels=labels), rows="labels")
    kept = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))
    rows = torch.stack(list(compare(teacher, student, inputs).rows.values()))
    torch.testing.assert_close(found, rows.transpose(2, 3)[:, kept].mean())
    with AttentionDistiller(teacher, student, rows="labels") as distiller:
        student(**inputs)
        with pytest.raises(
            ValueError, match=r"rows='labels': the student ran without labels: pass loss\(labels=...\)"
        ):
            distiller.loss()
        student(**inputs)
        torch.testing.assert_close(distiller.loss(labels=labels), found)
        student(**inputs)
        torch.testing.assert_close(distiller.loss(labels=labels, row_weight=torch.full(labels.shape, 0.5)), found)


# ---- Encoder-decoders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["self", "cross", "encoder"])
def test_kinds_of_attention_without_decoder_input(kind):
    """The decoder makes its input from the labels; so does that of the teacher."""
    teacher, student, inputs = bart().eval(), bart().eval(), batch("right")
    labels = inputs["input_ids"][:, :9].clone()
    found = loss_of(teacher, student, dict(inputs, labels=labels), attention=kind)
    with capture(student) as layers:
        student(**inputs, labels=labels)
    assert [layer.kind for layer in layers] == ["encoder"] * 2 + ["self", "cross"] * 2
    assert found > 0


def test_cross_attention_to_a_padded_encoder():
    """With fewer tokens than the padding has, its keys look like those of a causal mask."""
    student, inputs = bart(), batch("right")
    inputs["attention_mask"][:, 5:] = 0
    with capture(student) as layers:
        student(**inputs, decoder_input_ids=inputs["input_ids"][:, :3])
    assert [layer.kind for layer in layers] == ["encoder"] * 2 + ["self", "cross"] * 2


# ---- Packed sequences --------------------------------------------------------------------------------------------------

LENGTHS = [6, 1, 10]


@pytest.mark.parametrize("make", [llama, gemma2], ids=["llama", "gemma2"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_sequences(make, implementation):
    """Sequences that position_ids separate give the loss and gradients of the single ones."""
    if make is gemma2 and implementation == "sdpa":
        pytest.skip("sdpa has no softcap")
    teacher, student = make(implementation=implementation), make(implementation=implementation)
    ids = batch()["input_ids"][:1]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    inputs = dict(input_ids=ids, position_ids=positions, use_cache=False)
    loss = loss_of(teacher, student, inputs)
    loss.backward()
    gradient = student.model.layers[0].self_attn.q_proj.weight.grad.clone()
    student.zero_grad()
    expected = loss_of_parts(teacher, student, ids.split(LENGTHS, 1))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    expected.backward()
    torch.testing.assert_close(student.model.layers[0].self_attn.q_proj.weight.grad, gradient, rtol=1e-3, atol=1e-6)


def loss_of_parts(teacher, student, parts):
    """The mean over all rows of the losses of single sequences."""
    losses = [loss_of(teacher, student, dict(input_ids=part, use_cache=False)) for part in parts]
    return sum(loss * part.shape[1] for loss, part in zip(losses, parts)) / sum(part.shape[1] for part in parts)


def test_flattening_collator():
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    parts = batch()["input_ids"][0].split(LENGTHS)
    inputs = collator([dict(input_ids=part.tolist()) for part in parts])
    assert "cu_seq_lens_q" in inputs
    teacher, student = llama(), llama()
    found = loss_of(teacher, student, dict(inputs, use_cache=False))
    expected = loss_of_parts(teacher, student, [part[None] for part in parts])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_maps_of_other_masks_are_refused():
    """A row sees its own chunk of 4 tokens and the one before."""
    row, key = torch.arange(17)[:, None], torch.arange(17)
    mask = ((key <= row) & (key >= (row // 4 - 1) * 4)).expand(3, 1, 17, 17)
    with pytest.raises(ValueError, match="layer 0.*: the layers attend to keys that no causal mask, window or packed sequences"):
        compare(llama(), llama(), dict(batch(), attention_mask=mask), buckets=(4, 4))
