"""row_weight and head_weight: the weighted mean of a layer's KL, against float64 formulas on stored matrices."""

import math

import pytest
import torch
from hf_models import batch, bert, gemma2, gpt_oss, llama, loss_of

from streamkl.hf import AttentionDistiller, _pairs
from streamkl.hf._weights import FIRST_KEYS, ROUNDING, far_mass

LENGTH, FAR = 40, 7


def padded(side):
    inputs = batch(side, length=LENGTH)
    start = (inputs["attention_mask"] == 0).sum(1) * (side == "left")
    return inputs, start[:, None].expand(-1, LENGTH)


def packed():
    positions = torch.cat([torch.arange(13), torch.arange(LENGTH - 13)]).expand(3, LENGTH)
    inputs = dict(input_ids=batch(length=LENGTH)["input_ids"], position_ids=positions, use_cache=False)
    return inputs, torch.where(torch.arange(LENGTH) < 13, 0, 13).expand(3, LENGTH)


CASES = {
    "causal": (llama, lambda: padded("none"), {}),
    "padded left": (llama, lambda: padded("left"), {}),
    "packed": (llama, packed, {}),
    "no LSEs": (lambda: llama(implementation="eager"), lambda: padded("right"), {}),
    "window and softcap, padded left": (lambda: gemma2(window=11), lambda: padded("left"), {}),
    "sinks": (lambda: gpt_oss(window=19), lambda: padded("right"), {}),
    "bidirectional": (bert, lambda: padded("right"), {}),
    "head map": (llama, lambda: padded("left"), dict(head_map={0: 3, 2: 1})),
    "groups": (lambda: llama(heads=8, key_heads=4), lambda: padded("left"), {}),
}


def distributions(pair):
    """P, S in float64, [batch, heads_s, len_q, len_k] of the compared heads, and the mass of the teacher's sink."""
    found = []
    for layer, heads in (pair.t, pair.heads and list(pair.heads.values())), (pair.s, pair.heads and list(pair.heads)):
        q, k = layer.q.double(), layer.k.double().repeat_interleave(layer.q.shape[1] // layer.k.shape[1], 1)
        logits = layer.scale * (q @ k.mT)
        logits = layer.softcap * torch.tanh(logits / layer.softcap) if layer.softcap else logits
        key = torch.arange(k.shape[2])
        keys = layer.visible
        seen = (key >= keys.begin[..., None]) & (key < keys.end[..., None])
        seen = seen if keys.shown is None else seen & keys.shown[:, None]
        logits = torch.where(seen[:, None], logits, -math.inf)
        if layer.sink is not None:
            sink = layer.sink.double()[:, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], -1)
        p = logits.softmax(-1).nan_to_num(0.0)
        found.append(p if heads is None else p[:, heads])
    p, s = found
    return p.unflatten(1, (s.shape[1], -1)).mean(2), s


def expected_far(p, start):
    """The teacher's attention to keys at least FAR tokens away, without the first ones of their sequence."""
    key = torch.arange(LENGTH)
    counts = ((key[:, None] - key).abs() >= FAR) & (key >= start[:, None, :] + FIRST_KEYS)
    far = (p[..., :LENGTH] * counts[:, None]).sum(-1)
    return torch.where(far < ROUNDING, 0, far)


def row_kl(p, s):
    return torch.where(p > 0, p * (torch.where(p > 0, p, 1).log() - torch.where(p > 0, s, 1).log()), 0).sum(-1)


def weighted_mean(kl, weight, counted):
    weight = weight * counted[:, None]
    return (kl * weight).sum() / weight.sum()


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_stored_matrices(name):
    make, inputs_of, options = CASES[name]
    torch.manual_seed(1)
    teacher, student = make().eval(), (llama if name == "groups" else make)().eval()
    inputs, start = inputs_of()
    counted = inputs.get("attention_mask", torch.ones(3, LENGTH)).bool()
    with AttentionDistiller(teacher, student, row_weight=f"far:{FAR}", **options) as distiller, torch.no_grad():
        student(**inputs)
        pairs = distiller.pairs()
        dense = {key: distributions(pair) for key, pair in pairs.items()}
        for key, pair in pairs.items():
            far = expected_far(dense[key][0], start) * counted[:, None]
            found = far_mass(pair, FAR, _pairs.RowCache())
            torch.testing.assert_close(found.double(), far, rtol=1e-5, atol=2e-6)
            assert far.max() > 0.05
        far_losses = distiller.losses()
        distiller._weights.rows = "kl"
        student(**inputs)
        kl_losses = distiller.losses()
    for key, (p, s) in dense.items():
        kl = row_kl(p, s)
        torch.testing.assert_close(far_losses[key[0]].double(), weighted_mean(kl, expected_far(p, start), counted), rtol=2e-4, atol=1e-6)
        torch.testing.assert_close(kl_losses[key[0]].double(), weighted_mean(kl, kl, counted), rtol=2e-4, atol=1e-6)


def test_the_gradient_is_that_of_the_weighted_mean():
    """No gradient flows through the weights."""
    teacher, student = llama().eval(), llama()
    inputs, start = padded("left")
    parameter = student.model.layers[1].self_attn.q_proj.weight
    for row_weight in f"far:{FAR}", "kl":
        with AttentionDistiller(teacher, student, row_weight=row_weight, layer_map={1: 1}) as distiller:
            student(**inputs)
            ((p, s),) = (distributions(pair) for pair in distiller.pairs().values())
            (found,) = torch.autograd.grad(distiller.loss(), parameter, retain_graph=True)
        kl = row_kl(p.detach(), s)
        weight = expected_far(p, start) if row_weight != "kl" else kl
        loss = weighted_mean(kl, weight.detach(), inputs["attention_mask"].bool())
        (expected,) = torch.autograd.grad(loss, parameter)
        assert (found - expected).norm() < 2e-4 * expected.norm()


def test_heads_without_a_weight():
    teacher, student = llama().eval(), llama().eval()
    options = dict(head_map={1: 0}, head_weight=[1, 0, 1, 1])
    with AttentionDistiller(teacher, student, **options) as distiller, torch.no_grad():
        student(**padded("none")[0])
        with pytest.raises(ValueError, match=r"head_weight=\[1.0, 0.0, .*: the heads of head_map, \[1\], have no weight"):
            distiller.loss()


def test_rows_are_weighted_by_the_kl_at_the_temperature():
    teacher, student = llama().eval(), llama().eval()
    inputs, _ = padded("left")
    options = dict(row_weight="kl", temperature=3.0, layer_map={1: 1})
    with AttentionDistiller(teacher, student, **options) as distiller, torch.no_grad():
        student(**inputs)
        ((p, s),) = (distributions(pair) for pair in distiller.pairs().values())
        found = distiller.loss()
    softer = [(each ** (1 / 3)) / (each ** (1 / 3)).sum(-1, keepdim=True).clamp(min=1e-30) for each in (p, s)]
    kl = row_kl(*softer)
    expected = 9 * weighted_mean(kl, kl, inputs["attention_mask"].bool())
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=1e-6)


def test_heads_and_rows_multiply():
    """A weight of a head, a weight of a row and far rows: their product, also for a head map and for one layer alone."""
    teacher, student = llama().eval(), llama().eval()
    inputs, start = padded("right")
    weight, heads = torch.rand(3, LENGTH), [0.5, 0.0, 2.0, 1.0]
    options = dict(row_weight=f"far:{FAR}", head_weight={1: heads}, head_map={0: 3, 2: 1, 3: 0})
    with AttentionDistiller(teacher, student, **options) as distiller, torch.no_grad():
        student(**inputs)
        dense = {i: distributions(pair) for (i, _), pair in distiller.pairs().items()}
        found = distiller.losses(row_weight=weight)
    counted = inputs["attention_mask"].bool()
    for i, (p, s) in dense.items():
        of_heads = torch.tensor([heads[0], heads[2], heads[3]] if i == 1 else [1.0, 1.0, 1.0]).double()
        total = expected_far(p, start) * weight[:, None] * of_heads[:, None]
        torch.testing.assert_close(found[i].double(), weighted_mean(row_kl(p, s), total, counted), rtol=2e-4, atol=1e-6)


def test_sampled_rows_divide_by_the_weight_of_all_rows(monkeypatch):
    """The mean over all draws is the loss of all rows."""
    teacher, student = llama().eval(), llama().train()
    inputs, _ = padded("left")
    count = int(inputs["attention_mask"].sum())
    with AttentionDistiller(teacher, student, row_weight=f"far:{FAR}", head_weight=[1, 2, 3, 4]) as distiller:
        with torch.no_grad():
            student(**inputs)
            whole = distiller.loss(sample_rows=1)
            estimates = []
            for number in range(count):
                monkeypatch.setattr(
                    _pairs.RowCache, "_draw",
                    lambda self, size: torch.full((size,), (number + 0.5) / count, dtype=torch.float64),
                )  # fmt: skip
                student(**inputs)
                estimates.append(distiller.loss(sample_rows=1 / 8))
    torch.testing.assert_close(torch.stack(estimates).mean(), whole, rtol=1e-5, atol=1e-6)
    assert torch.stack(estimates).std() > 0


def test_a_fused_step_has_the_same_gradients():
    gradients = []
    torch.manual_seed(2)
    teacher, student = llama().eval(), llama()
    for fused in False, True:
        student.zero_grad()
        with AttentionDistiller(teacher, student, fused=fused, row_weight=f"far:{FAR}", head_weight=[1, 0, 3, 4]) as distiller:
            output = student(**batch(length=LENGTH))
            (0 * output.logits.sum() + distiller.loss()).backward()
            assert bool(distiller.carried_layers) == fused
        gradients.append(student.model.layers[1].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_nothing_far_away():
    """A mean of nothing is 0, and so is its gradient."""
    student = llama()
    with pytest.warns(UserWarning, match="row_weight='far:1000': no row counts in all student layers, .*: their KL is 0"):
        loss = loss_of(llama(), student, batch(), row_weight="far:1000")
    loss.backward()
    assert loss == 0 and not any(p.grad is not None and p.grad.any() for p in student.parameters())


def test_a_window_in_which_nothing_is_far_away():
    """The layer is left out: a KL of 0 would be a perfect match, and make the mean of the others smaller."""
    teacher, student = gemma2(window=5), gemma2(window=5)
    with AttentionDistiller(teacher, student, row_weight=f"far:{FAR}") as distiller:
        student(**batch(length=LENGTH))
        with pytest.warns(UserWarning, match=rf"'far:{FAR}': no row counts in student layers \[0\], .*: the mean leaves them out"):
            found = distiller.loss()
        assert distiller.last_losses[0].isnan() and distiller.last_losses[1] == distiller.last_loss == found > 0
        student(**batch(length=LENGTH))
        assert list(distiller.losses()) == [1]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(row_weight="near"), r"row_weight='near': must be 'far', 'far:TOKENS' or 'kl'"),
        (dict(row_weight="far:0"), "row_weight='far:0': must be"),
        (dict(row_weight="kl:3"), "row_weight='kl:3': must be"),
        (dict(row_weight=3), "row_weight=3: must be"),
        (dict(head_weight=1.0), "head_weight=1.0: must be one number per student head"),
        (dict(head_weight=["1"]), "head_weight=.*: must be one number per student head"),
        (dict(head_weight=[1, -1]), "head_weight=.*: must not be negative"),
        (dict(head_weight={0: [0, 0]}), "head_weight=.*: .* at least one weight of a layer must be above 0"),
    ],
)  # fmt: skip
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionDistiller(llama(), llama(), **options)


def test_as_many_weights_as_heads():
    with pytest.raises(ValueError, match="student layer 0 and .*: head_weight has 2 weights: must be 4"):
        loss_of(llama(), llama(), batch(), head_weight=[1, 2])


def test_one_layer_counts():
    with pytest.raises(ValueError, match=r"layer_weight=.*: at least one of the layers \[0, 1\] must count"):
        loss_of(llama(), llama(), batch(), layer_weight={0: 0.0, 1: 0.0})
