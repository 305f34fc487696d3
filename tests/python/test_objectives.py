"""The objectives of docs/guide/objectives.md: losses and gradients against the published formulas, written out in float64."""

import pytest
import torch
from test_guides import snippets

import streamkl
from streamkl import losses


@pytest.fixture(scope="module")
def page():
    """The names of the page after its snippets have run."""
    names = {"__name__": "guide"}
    exec(compile(snippets("guide/objectives"), "objectives.md", "exec"), names)
    return names


def attention(q, k, *, causal=False, key_lengths=None, scale=None, logits=lambda scores: scores):
    """Softmax attention [batch, heads, len_q, len_k]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = logits(torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale))
    hidden = torch.zeros(q.shape[0], 1, q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        hidden |= torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    if key_lengths is not None:
        hidden |= (torch.arange(k.shape[1]) >= key_lengths.unsqueeze(1))[:, None, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def cross_entropy(p, s):
    return -torch.special.xlogy(p, torch.where(p == 0, 1.0, s)).sum(-1).mean()


def kl(p, s):
    return cross_entropy(p, s) - cross_entropy(p, p)


def relations(page, heads, **masks):
    total = 0
    for t, s in ("q_t", "q_s"), ("k_t", "k_s"), ("v_t", "v_s"):
        t, s = (page[name].double().flatten(2).unflatten(2, (heads, -1)) for name in (t, s))
        total = total + kl(attention(t, t, **masks), attention(s, s, **masks))
    return total


def index_scores(page, causal=True):
    q, k, w = (page[name].double() for name in ("index_q", "index_k", "index_w"))
    scores = torch.einsum("big,bigj->bij", w, torch.einsum("bigd,bjd->bigj", q, k).relu()) * (8 * 3) ** -0.5
    return (
        scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        .softmax(-1)
        .unsqueeze(1)
    )


def mobilebert(page):
    masks = dict(key_lengths=page["key_lengths"])
    p = attention(page["q_t"].double(), page["k_t"].double(), **masks)
    return cross_entropy(p, attention(page["q_s"].double(), page["k_s"].double(), **masks)) - cross_entropy(p, p)


def att_ce_mean(page):
    masks = dict(key_lengths=page["key_lengths"], logits=lambda scores: scores.mean(1, keepdim=True))
    p = attention(page["q_t"].double(), page["k_t"].double(), **masks)
    return kl(p, attention(page["q_s"].double(), page["k_s"].double(), **masks))


def tinybert(page):
    masked = (torch.arange(48) >= page["key_lengths"].unsqueeze(1))[:, None, None]

    def scores(q, k):
        scores = torch.einsum("bihd,bjhd->bhij", page[q].double(), page[k].double()) * page[q].shape[-1] ** -0.5
        return torch.where(scores - 10000.0 * masked <= -1e2, 0.0, scores)

    return torch.nn.functional.mse_loss(scores("q_s", "k_s"), scores("q_t", "k_t"))


def hedgehog(page):
    p = attention(page["q_t"].double(), page["k_t"].double(), causal=True)
    a = torch.einsum("bihd,bjhd->bhij", page["phi"](page["q_s"].double()), page["phi"](page["k_s"].double())).tril()
    return cross_entropy(p, a / a.sum(-1, keepdim=True)) - cross_entropy(p, p)


def entropy(page):
    a = attention(page["q_s"].double(), page["k_s"].double(), causal=True)
    return cross_entropy(a, a)


def dsa(page):
    p = attention(page["q_t"].double(), page["k_t"].double(), causal=True).mean(1, keepdim=True)
    return kl(p, index_scores(page))


def index_cache(page):
    p = torch.cat([attention(q.double(), k.double(), causal=True) for q, k in page["layers"]], dim=1)
    return kl(p.mean(1, keepdim=True), index_scores(page))


def msa(page):
    p = attention(page["q_t"].double(), page["k_t"].double(), causal=True).unflatten(1, (2, 2)).mean(2)
    return kl(p, attention(page["msa_q"].double(), page["msa_k"].double(), causal=True))


def lolcats(page):
    """The hybrid's distributions on the keys outside of the window, those before key i - 7 of row i."""
    outside = torch.ones(48, 48, dtype=torch.bool).tril(-page["window"])
    p = attention(page["q_t"].double(), page["k_t"].double(), causal=True).masked_fill(~outside, 0.0)[:, :, 8:]
    a = torch.einsum("bihd,bjhd->bhij", page["phi"](page["q_s"].double()), page["phi"](page["k_s"].double()))
    a = a.masked_fill(~outside, 0.0)[:, :, 8:]
    return kl(p / p.sum(-1, keepdim=True), a / a.sum(-1, keepdim=True))


def on_blocks(weights, scores, sees):
    """KL of maxima of weights [..., blocks], divided by their sum, and softmax(scores), in rows that see a block."""
    target = weights.masked_fill(~sees, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-30)
    student = scores.masked_fill(~sees, -1e20).softmax(-1)
    return torch.special.xlogy(target, target / torch.where(target == 0, 1.0, student)).sum(-1)


def qsa(page):
    p = attention(page["q_t"].double(), page["k_t"].double(), causal=True).sum(1)
    p = (p / p.sum(-1, keepdim=True)).unflatten(-1, (-1, page["block"])).amax(-1)
    dots = torch.einsum("bigd,bjd->bigj", page["qsa_q"].double(), page["qsa_k"].double())
    complete = (torch.arange(48)[:, None] + 1) // page["block"] > torch.arange(48 // page["block"])
    return on_blocks(p, dots.relu().sum(2) * 8**-0.5, complete)[:, page["block"] - 1 :].mean()


def seer(page):
    p = attention(page["q_t"].double(), page["k_t"].double(), causal=True).unflatten(-1, (-1, page["block"])).amax(-1)
    p = p.unflatten(1, (page["groups"], -1)).amax(2)
    scores = torch.einsum("bihd,bjhd->bhij", page["seer_q"].double(), page["seer_k"].double()) * 8**-0.5
    earlier = torch.arange(48)[:, None] // page["block"] > torch.arange(48 // page["block"])
    return on_blocks(p, scores, earlier)[:, :, 24:].mean()


FORMULAS = {
    "mobilebert": mobilebert,
    "att_ce_mean": att_ce_mean,
    "minilm": lambda page: relations(page, page["relation"].__defaults__[0], key_lengths=page["key_lengths"]),
    "linear_ard": lambda page: relations(page, page["heads"], causal=True),
    "tinybert": tinybert,
    "hedgehog": hedgehog,
    "entropy": entropy,
    "dsa": dsa,
    "index_cache": index_cache,
    "msa": msa,
    "lolcats": lolcats,
    "qsa": qsa,
    "seer": seer,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_objective(page, name):
    loss, expected = page[name], FORMULAS[name](page)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    leaves = [
        tensor
        for tensor in page.values()
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf
    ]
    made = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    wanted = torch.autograd.grad(expected, leaves, allow_unused=True)
    assert sum(each is not None for each in wanted) >= 2
    for actual, gradient in zip(made, wanted):
        assert (actual is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(actual, gradient.float(), rtol=0, atol=1e-5 * gradient.abs().max().item())


def test_qsa_on_selected_blocks(page):
    """The second stage: the teacher's softmax runs over the selected blocks and the query's own incomplete block."""
    block, blocks = page["block"], 48 // page["block"]
    torch.manual_seed(1)
    selected = torch.rand(2, 48, blocks).topk(3).indices
    selected[selected >= (torch.arange(48)[:, None] + 1) // block] = -1
    chosen = torch.zeros(2, 48, blocks + 1, dtype=torch.bool).scatter(2, selected % (blocks + 1), True)[..., :-1]
    positions, keys = torch.arange(48)[:, None], torch.arange(48)
    tail = (keys >= (positions + 1) // block * block) & (keys <= positions)
    attended = chosen.repeat_interleave(block, -1) | tail
    logits = torch.einsum("bihd,bjhd->bhij", page["q_t"].double(), page["k_t"].double()) / 4
    logits = logits.masked_fill(~attended[:, None], -torch.inf)
    p = logits.softmax(-1).sum(1).unflatten(-1, (blocks, block)).amax(-1)
    q, k = (page[name].detach().double().requires_grad_() for name in ("qsa_q", "qsa_k"))
    dots = torch.einsum("bigd,bjd->bigj", q, k).relu().sum(2) * 8**-0.5
    expected = on_blocks(p, dots, chosen)[chosen.any(-1)].mean()
    options = dict(causal=True, pool=("max", block), softmax_scale_s=8**-0.5, lse_t=logits.logsumexp(-1).float())
    arguments = page["q_t"], page["k_t"], page["qsa_q"], page["qsa_k"], torch.ones(2, 48, 3), selected
    loss = streamkl.indexer_kl(*arguments, check_lse=True, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = torch.autograd.grad(expected, (q, k))
    for made, gradient in zip(torch.autograd.grad(loss, (page["qsa_q"], page["qsa_k"])), wanted):
        torch.testing.assert_close(made, gradient.float(), rtol=0, atol=1e-5 * gradient.abs().max().item())
    with pytest.raises(ValueError, match="lse_t: .* must be at least"):
        streamkl.indexer_kl(*arguments, check_lse=True, **options | dict(lse_t=options["lse_t"] - 1))


def test_score_mse_of_equal_models_is_zero():
    q, k = torch.randn(1, 9, 4, 16), torch.randn(1, 7, 2, 16)
    assert losses.score_mse(q, k, q, k).item() == 0


def test_score_mse_of_nearly_equal_models_is_accurate():
    q, k = torch.randn(1, 64, 2, 16), torch.randn(1, 64, 2, 16)
    q_s, k_s = q + 1e-4 * torch.randn_like(q), k + 1e-4 * torch.randn_like(k)

    def scores(q, k):
        return torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 4

    expected = (scores(q, k) - scores(q_s, k_s)).square().mean()
    assert losses.score_mse(q, k, q_s, k_s).item() == pytest.approx(expected.item(), rel=1e-6)


def test_score_mse_groups_and_layout():
    q_t, k_t, q_s, k_s = (
        torch.randn(2, 5, 4, 8),
        torch.randn(2, 6, 2, 8),
        torch.randn(2, 5, 4, 3),
        torch.randn(2, 6, 1, 3),
    )
    expected = losses.score_mse(q_t, k_t.repeat_interleave(2, dim=2), q_s, k_s.repeat_interleave(4, dim=2))
    transposed = (tensor.transpose(1, 2) for tensor in (q_t, k_t, q_s, k_s))
    assert losses.score_mse(*transposed, layout="bhnd").item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    "name, change", [("k_t", (2, 6, 3, 8)), ("q_s", (2, 5, 2, 3)), ("k_s", (2, 7, 1, 3)), ("q_t", (5, 4, 8))]
)
def test_score_mse_names_what_does_not_fit(name, change):
    shapes = {"q_t": (2, 5, 4, 8), "k_t": (2, 6, 2, 8), "q_s": (2, 5, 4, 3), "k_s": (2, 6, 1, 3), name: change}
    with pytest.raises(ValueError, match=name):
        losses.score_mse(*(torch.randn(shape) for shape in shapes.values()))


def test_entropy_of_rows_with_weights_and_without_keys():
    q, k = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 2, 4)
    key_end = torch.tensor([[0, 1, 2, 3, 4, 5]])
    rows = losses.entropy(q, k, key_end=key_end, reduction="none")
    assert rows.shape == (1, 2, 6) and (rows[..., :2] == 0).all()  # no key, and one key
    weight = torch.tensor([[5.0, 1, 0, 2, 1, 1]])
    attending = weight.expand(2, 6)[:, 1:].sum()
    expected = (rows * weight).sum() / attending
    assert losses.entropy(q, k, key_end=key_end, row_weight=weight).item() == pytest.approx(expected.item())
    total = losses.entropy(q, k, key_end=key_end, row_weight=weight, reduction="sum")
    assert total.item() == pytest.approx((rows * weight).sum().item())


def test_transforms():
    """score_mse is plain torch; the message of entropy names no reference that does not exist."""
    q, k = torch.randn(3, 1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    found = torch.func.vmap(lambda q: losses.score_mse(q, k, losses.relation_heads(q, 2), k + 1))(q)
    torch.testing.assert_close(found, torch.stack([losses.score_mse(each, k, each, k + 1) for each in q]))
    with pytest.raises(RuntimeError, match="streamkl.entropy does not support torch.func transforms.* for vmap$"):
        torch.func.grad(lambda q: losses.entropy(q, k))(k)


def test_entropy_has_no_teacher():
    q = torch.randn(1, 6, 2, 4)
    with pytest.raises(ValueError, match="link_s='linear': must be 'softmax' for entropy"):
        losses.entropy(q, q, link_s="linear")
    with pytest.raises(ValueError, match="pool: entropy.. has no teacher"):
        losses.entropy(q, q, pool=("max", 2))
    with pytest.raises(ValueError, match="lse_t: entropy.. has no teacher"):
        losses.entropy(q, q, lse_t=torch.zeros(1, 2, 6))


def test_relation_heads_must_divide():
    with pytest.raises(ValueError, match="heads=5: must divide the width 64"):
        losses.relation_heads(torch.randn(1, 3, 4, 16), 5)
    tensor = torch.randn(1, 3, 4, 16)
    assert torch.equal(losses.relation_heads(tensor, 1), tensor.flatten(2)[:, :, None])
    assert torch.equal(losses.relation_heads(tensor[0], 2), losses.relation_heads(tensor, 2)[0])
    bhnd = losses.relation_heads(tensor.transpose(1, 2), 2, layout="bhnd")
    assert torch.equal(bhnd.transpose(1, 2), losses.relation_heads(tensor, 2))


def linear_features(zero=None, sign=1.0):
    """A teacher, and positive feature maps of a student."""
    torch.manual_seed(3)
    q_t, k_t = torch.randn(1, 9, 1, 8), torch.randn(1, 9, 1, 8)
    q_s, k_s = torch.rand(1, 9, 1, 4) + 0.1, torch.rand(1, 9, 1, 4) + 0.1
    if zero is not None:
        k_s[:, zero] = 0
    k_s[:, 4] *= sign
    return q_t, k_t, q_s.requires_grad_(), k_s.requires_grad_()


def test_a_negative_product_of_a_linear_student_makes_its_row_nan():
    rows = streamkl.attention_kl(*linear_features(sign=-1.0), link_s="linear", causal=True, reduction="none")
    assert rows[..., :4].isfinite().all() and rows[..., 4:].isnan().all()


def test_a_zero_of_a_linear_student_is_infinite_where_the_teacher_attends():
    rows = streamkl.attention_kl(*linear_features(zero=4), link_s="linear", causal=True, reduction="none")
    assert rows[..., :4].isfinite().all() and rows[..., 4:].isposinf().all()


def test_a_zero_of_a_linear_student_is_free_where_the_teacher_does_not_attend():
    q_t, k_t, q_s, k_s = linear_features(zero=4)
    q_t, k_t[:, 4] = q_t.abs(), -1e4
    loss = streamkl.attention_kl(q_t, k_t, q_s, k_s, link_s="linear")
    loss.backward()
    assert loss.isfinite() and q_s.grad.isfinite().all() and k_s.grad.isfinite().all()


@pytest.mark.parametrize("options, named", [(dict(softmax_scale_s=0.5), "scale_s=0.5"),
                                            (dict(softcap_s=3.0), "softcap_s=3"), (dict(direction="reverse"), "direction=1")])  # fmt: skip
def test_a_linear_student_has_no(options, named):
    with pytest.raises(ValueError, match=f"{named}: must be 0 with link_s"):
        streamkl.attention_kl(*linear_features(), link_s="linear", **options)


def test_the_lse_of_a_linear_student_is_checked():
    q_t, k_t, q_s, k_s = linear_features()
    loss, lse_t, lse_s = streamkl.attention_kl(q_t, k_t, q_s, k_s, link_s="linear", return_lse=True)
    expected = torch.einsum("bihd,bjhd->bhij", q_s, k_s).sum(-1).log()
    torch.testing.assert_close(lse_s, expected.detach())
    given = dict(lse_t=lse_t, check_lse=True, link_s="linear")
    again = streamkl.attention_kl(q_t, k_t, q_s, k_s, lse_s=lse_s, **given)
    torch.testing.assert_close(again, loss)
    with pytest.raises(ValueError, match="lse_s"):
        streamkl.attention_kl(q_t, k_t, q_s, k_s, lse_s=lse_s + 1, **given)
