"""Scores of kvpress, which needs eager attention, from attention_stats under sdpa.

kvpress supports older releases of transformers than streamkl.hf: without it these tests are skipped, and test_stats.py has
its formulas.
"""

import copy

import pytest
import torch

from streamkl import attention_stats

kvpress = pytest.importorskip("kvpress")
transformers = pytest.importorskip("transformers")

LENGTH, HEADS, KEY_HEADS = 40, 4, 2


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, attn_implementation="eager",
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)  # random weights attend almost uniformly
    return made


def captured(model, tokens):
    """Queries, keys and scale of every layer, under sdpa."""
    calls = []
    sdpa = transformers.AttentionInterface()["sdpa"]

    def record(module, query, key, value, mask, **options):
        calls.append((query, key, options["scaling"]))
        return sdpa(module, query, key, value, mask, **options)

    transformers.AttentionInterface.register("recorded_sdpa", record)
    transformers.AttentionMaskInterface.register("recorded_sdpa", transformers.AttentionMaskInterface()["sdpa"])
    quick = copy.deepcopy(model)
    quick.set_attn_implementation("recorded_sdpa")
    with torch.no_grad():
        quick(input_ids=tokens)
    return calls


def test_observed_attention(model):
    """ObservedAttentionPress: equal scores, and the same keys are kept."""
    scores = []

    class Observed(kvpress.ObservedAttentionPress):
        def score(self, *arguments, **named):
            scores.append(super().score(*arguments, **named))
            return scores[-1]

    tokens = torch.randint(3, 99, (1, LENGTH))
    with torch.no_grad(), Observed(compression_ratio=0.5)(model):
        model(input_ids=tokens, output_attentions=True)
    calls = captured(model, tokens)
    assert len(scores) == len(calls) == 2
    for (query, key, scale), score in zip(calls, scores):
        found = attention_stats(
            query, key, layout="bhnd", causal=True, softmax_scale=scale, want=["key_sum"], per_key_head=True
        )
        ours = found.key_sum / (HEADS // KEY_HEADS) / torch.arange(LENGTH, 0, -1)
        assert (ours - score).abs().max() < 1e-5
        kept = [each.topk(LENGTH // 2).indices.sort().values for each in (ours, score)]
        assert torch.equal(*kept)
