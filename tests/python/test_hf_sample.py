"""sample_rows: a loss on random query rows, whose mean over all draws is that of all rows."""

import pytest
import torch
from cases import LONG
from hf_models import bart, batch, bert, gemma2, gpt_oss, llama, llama4

from streamkl.hf import AttentionDistiller, _pairs


def packed(model):
    """Two sequences per row of the batch, without an attention_mask."""
    positions = torch.cat([torch.arange(6), torch.arange(11)]).expand(3, 17)
    return dict(input_ids=batch()["input_ids"], position_ids=positions, use_cache=False)


def hole(model):
    inputs = batch()
    inputs["attention_mask"][0, 6:9] = 0
    return inputs


def translation(model):
    """The source and the target are padded."""
    source, target = batch("left", length=13), batch("right", length=11)
    return dict(source, decoder_input_ids=target["input_ids"], decoder_attention_mask=target["attention_mask"])


def padded(side):
    return lambda model: batch(side)


CASES = {
    "causal": (llama, padded("none"), "self"),
    "causal, padded left": (llama, padded("left"), "self"),
    "packed": (llama, packed, "self"),
    "window and softcap, padded right": (gemma2, padded("right"), "self"),
    "window and a hole": (gemma2, hole, "self"),
    "sinks and window, padded left": (gpt_oss, padded("left"), "self"),
    "chunks, padded left": (llama4, padded("left"), "self"),
    "bidirectional, padded right": (bert, padded("right"), "self"),
    "cross": (bart, translation, "cross"),
}
SHORT = ("causal, padded left", "packed", "window and a hole", "chunks, padded left", "cross")


class Draws:
    """Replaces the random numbers by all midpoints of equal parts of 0..1, one after the other."""

    def __init__(self, monkeypatch, count):
        self.number, self.count = 0, count
        monkeypatch.setattr(_pairs.RowCache, "_draw", self.draw)

    def draw(self, size):
        return torch.full((size,), (self.number + 0.5) / self.count, dtype=torch.float64)


@pytest.mark.parametrize("weighted", [False, True] if LONG else [True])
@pytest.mark.parametrize("name", CASES if LONG else SHORT)
def test_the_mean_over_all_draws_is_the_loss_of_all_rows(name, weighted, monkeypatch):
    """With as many parts as there are rows, every row is drawn equally often."""
    monkeypatch.setenv("STREAMKL_CHECK_LSE", "1")
    make, inputs_of, attention = CASES[name]
    teacher, student = make().eval(), make().eval()
    inputs = inputs_of(student)
    options = dict(direction="forward", relations=("qk",), temperature=1.0, parallel={})
    with AttentionDistiller(teacher, student, attention=attention) as distiller:
        student(**inputs)
        pairs = list(distiller.pairs().values())
        length = pairs[0].s.q.shape[2]
        weight = torch.rand(3, length) if weighted else None
        mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
        count = 3 * length if mask is None else int(mask.sum())

        def losses(share):
            cache = _pairs.RowCache(share)
            return torch.stack([pair.loss(weight, cache=cache, **options) for pair in pairs])

        whole, draws = losses(1.0), Draws(monkeypatch, count)
        torch.testing.assert_close(losses(1 - 1e-9), whole)  # a sample of all rows
        estimates = []
        for draws.number in range(count):
            estimates.append(losses(1 / 8))
        parameters = [p for p in student.parameters() if p.requires_grad]
        made, expected = (
            torch.autograd.grad(loss.sum(), parameters, allow_unused=True, retain_graph=True)
            for loss in (torch.stack(estimates).mean(0), whole)
        )
    torch.testing.assert_close(torch.stack(estimates).mean(0), whole, rtol=1e-5, atol=1e-6)
    assert torch.stack(estimates).std(0).min() > 0
    largest = max(gradient.abs().max() for gradient in expected if gradient is not None)
    for gradient, wanted in zip(made, expected):
        assert (gradient is None) == (wanted is None)
        if wanted is not None:
            assert (gradient - wanted).abs().max() < 1e-4 * largest


@pytest.mark.skipif(not LONG, reason="STREAMKL_TEST_LONG=1")
def test_random_draws_approach_the_loss_of_all_rows():
    teacher, student, inputs = gemma2().eval(), gemma2().train(), batch("left")
    with AttentionDistiller(teacher, student, sample_rows=1 / 8) as distiller:
        student(**inputs)
        whole = distiller.loss(sample_rows=1).detach()
        losses = []
        for _ in range(1000):
            student(**inputs)
            losses.append(distiller.loss().detach())
    estimates = torch.stack(losses).double()
    assert abs(estimates.mean() - whole) < 4 * estimates.std() / 1000**0.5 < 0.1 * whole


def sampled_loss(distiller, student, inputs, seed, **options):
    student(**inputs)
    torch.manual_seed(seed)
    return distiller.loss(**options)


def test_a_seed_decides_about_the_rows():
    teacher, student, inputs = gemma2(), gemma2().train(), batch("left")
    with AttentionDistiller(teacher, student, sample_rows=1 / 8) as distiller:
        first, again, other = (sampled_loss(distiller, student, inputs, seed) for seed in (1, 1, 2))
        assert torch.equal(first, again) and not torch.equal(first, other)
        student.gradient_checkpointing_enable()
        gradients = []
        for loss in first, sampled_loss(distiller, student, dict(inputs, use_cache=False), 1):
            student.zero_grad()
            loss.backward()
            gradients.append([parameter.grad for parameter in student.parameters() if parameter.grad is not None])
        assert len(gradients[0]) == len(gradients[1]) and all(map(torch.equal, *gradients))


def test_all_layers_compare_the_same_rows():
    teacher, student, inputs = gemma2(), gemma2().train(), batch("left")
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        cache = _pairs.RowCache(1 / 8)
        (q_t, *_), options, rows = distiller.pairs()[0, 0].arguments(cache)
        _, _, others = distiller.pairs()[1, 1].arguments(cache)
    assert q_t.shape[1] == round(inputs["attention_mask"].sum().item() / 8) == options["cu_seqlens_q"][-1]
    assert torch.equal(rows.queries.order, others.queries.order) and rows.masks.keys() != others.masks.keys()


def test_evaluation_compares_all_rows():
    teacher, student, inputs = llama(), llama().eval(), batch()
    with AttentionDistiller(teacher, student, sample_rows=1 / 8) as sampling, AttentionDistiller(teacher, student) as whole:
        student(**inputs)
        assert torch.equal(sampling.loss(), whole.loss())
        student.train()
        with torch.no_grad():
            student(**inputs)
            assert torch.equal(sampling.loss(), whole.loss())
            student(**inputs)
            assert not torch.equal(sampling.loss(sample_rows=1 / 8), whole.loss())
        student(**inputs)
        assert torch.equal(sampling.loss(sample_rows=1), whole.loss())


@pytest.mark.parametrize("share", [0, 1.5, -1, True, "1/8"])
def test_shares_are_checked(share):
    with pytest.raises(ValueError, match="sample_rows=.*: must be a number above 0, up to 1"):
        AttentionDistiller(llama(), llama(), sample_rows=share)
