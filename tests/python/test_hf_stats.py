"""hf.AttentionStats under each model's own attention, compared with the weights that eager attention returns."""

import copy

import pytest
import torch
from hf_architectures import classes_of, tiny_config
from hf_models import batch, bert, gemma2, llama, t5

from examples import attention_pictures
from examples import attention_stats as example
from streamkl.hf import AttentionStats

WANT = ("key_sum", "key_max", "lse", "entropy", "expected_distance", "top_keys", "top_p", "distance_mass")

FAMILIES = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "GptOssForCausalLM", "GPTNeoXForCausalLM", "PhiForCausalLM", "Olmo2ForCausalLM",
    "GPT2LMHeadModel", "BertForMaskedLM", "DeepseekV3ForCausalLM",
)  # fmt: skip


def eager_attentions(model, inputs):
    """The weights of every layer, [batch, heads, len_q, len_k] in float64."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        return [each.double() for each in eager(**inputs, output_attentions=True).attentions]


def check_layer(found, p, real):
    """`real` [batch, length]: tokens that are not padding. Eager attention also has rows of padding."""
    p = torch.where(real[:, None, :, None], p, 0.0)
    entropy = -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)
    top = p.topk(found.top_p.shape[-1])
    assert (found.key_sum - p.sum(2)).abs().max() < 1e-5
    assert (found.key_max - p.amax(2)).abs().max() < 1e-5
    assert (found.top_p - top.values).abs().max() < 1e-5
    keys = found.top_keys.long()
    of_keys = p.gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, 0.0)
    assert (of_keys - found.top_p).abs().max() < 1e-5
    return entropy


@pytest.mark.parametrize("family", FAMILIES)
def test_against_eager_attention(family):
    config_class, model_class = classes_of(family)
    model = model_class(tiny_config(config_class)).eval()
    inputs = dict(input_ids=torch.randint(3, 99, (2, 13)))
    weights = eager_attentions(model, inputs)
    with AttentionStats(model, want=WANT, top_k=4, distance_buckets=5) as stats, torch.no_grad():
        model(**inputs)
        assert len(stats) == len(weights) == len(stats.names)
        for found, p in zip(stats, weights):
            entropy = check_layer(found, p, torch.ones(2, 13, dtype=torch.bool))
            has_sink = (p.sum(-1) < 1 - 1e-4).any()  # eager attention leaves it out
            assert has_sink or (found.entropy - entropy).abs().max() < 1e-4
            assert torch.allclose(found.distance_mass.sum(-1), p.sum((2, 3)).float(), atol=1e-4)


@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("make", [llama, gemma2, bert])
def test_padding(make, padding):
    model, inputs = make().eval(), batch(padding)
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    weights = eager_attentions(model, inputs)
    with AttentionStats(model, want=WANT, top_k=4) as stats, torch.no_grad():
        model(**inputs)
        for found, p in zip(stats, weights):
            entropy = check_layer(found, p, real)
            assert torch.where(real[:, None], found.entropy - entropy, 0.0).abs().max() < 1e-4
            assert (found.lse.transpose(1, 2)[~real] == -torch.inf).all()


def test_use():
    model, inputs = llama().eval(), batch("none")
    with AttentionStats(model, per_key_head=True) as stats:
        with pytest.raises(RuntimeError, match="run the model inside the with block first"):
            len(stats)
        with torch.no_grad():
            model(**inputs)
        first = stats[-1]
        assert stats[1:] == [first] and stats[1] is first
        assert first.key_sum.shape == (3, 2, 17) and stats.names[0] == "model.layers.0.self_attn"
        with torch.no_grad():
            model(**{name: value[:1] for name, value in inputs.items()})
        assert stats[1].key_sum.shape == (1, 2, 17)
        with pytest.raises(IndexError):
            stats[2]
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        AttentionStats(model, causal=True)


def test_bad_requests_are_refused_at_once():
    for options, message in (
        (dict(want="entropy"), "want='entropy': must be a list or tuple of names"),
        (dict(top_k=65), "top_k=65: must be a whole number, 1 to 64"),
        (dict(row_range=3), r"row_range=3: must be a pair \(begin, end\)"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionStats(llama(), **options)


@pytest.mark.parametrize("make", [llama, gemma2])
def test_forward_with_a_cache(make):
    """The rows of the last forward, also of generate(): its own tokens, over all keys of the cache."""
    model, tokens = make().eval(), torch.randint(3, 99, (2, 9))
    weights = eager_attentions(model, dict(input_ids=tokens))
    with AttentionStats(model, want=WANT, top_k=4) as stats, torch.no_grad():
        cache = None
        for begin, end in (0, 4), (4, 5), (5, 9):
            cache = model(input_ids=tokens[:, begin:end], past_key_values=cache, use_cache=True).past_key_values
            for found, p in zip(stats[:], weights, strict=True):
                check_new_rows(found, p[:, :, begin:end, :end])
        made = model.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
        assert made.shape == (2, 12)
        weights = eager_attentions(model, dict(input_ids=made[:, :-1]))
        for found, p in zip(stats, weights, strict=True):
            check_new_rows(found, p[:, :, -1:])


def check_new_rows(found, p):
    """A cache of a sliding window has only the last keys."""
    p = p[..., -found.key_sum.shape[-1] :]
    check_layer(found, p, torch.ones(p.shape[0], p.shape[2], dtype=torch.bool))


def test_messages_are_about_one_model():
    """It has no layer_map and no loss."""
    model = t5().eval()
    refusal = "position_bias.*; skip the layer, or use a model without it$|T5For.* must take its attention from"
    with pytest.raises((ValueError, TypeError), match=refusal), AttentionStats(model) as stats, torch.no_grad():
        model(input_ids=torch.randint(3, 99, (1, 5)), decoder_input_ids=torch.randint(3, 99, (1, 4)))
        stats[0]
    model = llama()
    with AttentionStats(model) as stats, torch.no_grad():
        model.set_attn_implementation("eager")
        model(**batch("none"))
        with pytest.raises(RuntimeError, match="set_attn_implementation.. inside the with block ends the capture"):
            len(stats)


def test_example():
    """Its four answers, from the weights that eager attention returns."""
    model, tokens = llama().eval(), torch.randint(3, 99, (1, 40))
    weights = eager_attentions(model, dict(input_ids=tokens))
    sums = torch.stack([p[0].sum(1).unflatten(0, (2, 2)).sum(1) for p in weights])
    assert torch.equal(example.heavy_hitters(model, tokens), sums.topk(8).indices)
    share = torch.stack([p[0, :, :, 0].mean(-1) for p in weights])
    assert (example.sink_share(model, tokens) - share).abs().max() < 1e-5

    factors = example.qk_clip_factors(model, tokens, limit=1.0)
    assert (factors < 1).any()
    with torch.no_grad():
        for layer, factor in zip(model.model.layers[:1], factors):
            layer.self_attn.q_proj.weight.mul_(factor.repeat_interleave(8)[:, None])
    assert (example.qk_clip_factors(model, tokens, limit=1.0)[0] > 1 - 1e-4).all()  # the first layer's logits are clipped

    scores = example.retrieval_scores(model, 99, length=16)
    assert scores.shape == (2, 4) and ((scores >= 0) & (scores <= 1)).all()


def test_pictures_are_of_the_weights(monkeypatch, tmp_path):
    """Their numbers, from the weights that eager attention returns: the first token is in no distance bucket."""
    monkeypatch.syspath_prepend(attention_pictures.__file__.rpartition("/")[0])
    model, tokens = llama().eval(), torch.randint(3, 99, (1, 40))
    rows = attention_pictures.measure(model, tokens)
    weights = eager_attentions(model, dict(input_ids=tokens))
    apart = (torch.arange(40)[:, None] - torch.arange(40)).clamp(min=0)
    for row in rows:
        p = weights[row["layer"]][0, row["head"]]
        others = p.clone()
        others[:, 0] = 0
        begins = [int(name[5:]) for name in row if name.startswith("from ")]
        assert begins == [0, 1, 2, 4, 8, 16, 32] and float(row["first"]) == pytest.approx(p[:, 0].mean().item(), abs=1e-4)
        for begin, end in zip(begins, [*begins[1:], 64]):
            share = others[(apart >= begin) & (apart < end)].sum().item() / 40
            assert float(row[f"from {begin}"]) == pytest.approx(share, abs=1e-4)
    attention_pictures.draw(rows, tmp_path)
    assert (tmp_path / "distance.svg").read_text().count('class="cell"') == 2 * 8 + 32  # 2 layers, and the color bar
