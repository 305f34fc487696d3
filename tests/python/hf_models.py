"""Small models for the tests, and the attention KL computed from output_attentions."""

import torch
from transformers import (
    BartConfig, BartForConditionalGeneration, BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, GptOssConfig,
    GptOssForCausalLM, Llama4ForCausalLM, Llama4TextConfig, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration,
)  # fmt: skip

from streamkl.hf import AttentionDistiller


def _sharpen(model, factor):
    """Random models of this size attend almost uniformly: scale the weights, so that the KL is not 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model


def llama(layers=2, heads=4, key_heads=2, hidden=32, implementation="sdpa", factor=12.0):
    config = LlamaConfig(
        vocab_size=100, hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads,
    )  # fmt: skip
    return _sharpen(LlamaForCausalLM._from_config(config, attn_implementation=implementation), factor)


def gemma2(layers=2, heads=4, key_heads=2, hidden=32, head_dim=16, window=5, implementation="eager", factor=12.0):
    """Every other layer has a sliding window; all logits have a softcap."""
    config = Gemma2Config(
        vocab_size=100, hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=head_dim, sliding_window=window, attn_logit_softcapping=3.0,
        query_pre_attn_scalar=head_dim,
    )  # fmt: skip
    return _sharpen(Gemma2ForCausalLM._from_config(config, attn_implementation=implementation), factor)


def gpt_oss(layers=2, heads=4, key_heads=2, window=5, factor=12.0):
    """Every head has an attention sink; every other layer has a sliding window."""
    config = GptOssConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=window,
    )  # fmt: skip
    model = _sharpen(GptOssForCausalLM._from_config(config, attn_implementation="eager"), factor)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


def llama4(layers=2, heads=4, key_heads=2, chunk=5, factor=12.0):
    """Chunked attention: a query attends to its own chunk; the last layer attends to all tokens."""
    config = Llama4TextConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=8, num_local_experts=2, attention_chunk_size=chunk,
        layer_types=["chunked_attention"] * (layers - 1) + ["full_attention"],
    )  # fmt: skip
    return _sharpen(Llama4ForCausalLM._from_config(config, attn_implementation="eager"), factor)


def bert(layers=2, heads=4, hidden=32, implementation="sdpa", vocabulary=100):
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads,
    )  # fmt: skip
    return BertModel._from_config(config, attn_implementation=implementation, add_pooling_layer=False)


def bart(layers=2, heads=4, hidden=32, implementation="sdpa", factor=8.0):
    config = BartConfig(
        vocab_size=100, d_model=hidden, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, pad_token_id=1,
    )  # fmt: skip
    return _sharpen(BartForConditionalGeneration._from_config(config, attn_implementation=implementation), factor)


def t5(layers=2, heads=4, hidden=32, implementation="eager"):
    config = T5Config(
        vocab_size=100, d_model=hidden, d_kv=8, d_ff=64, num_layers=layers, num_heads=heads, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration._from_config(config, attn_implementation=implementation)


def batch(padding="none", size=3, length=17, seed=0):
    mask = torch.ones(size, length, dtype=torch.long)
    if padding != "none":
        mask[0, :4], mask[-1, :9] = 0, 0
    mask = mask.flip(1) if padding == "right" else mask
    return dict(
        input_ids=torch.randint(0, 100, (size, length), generator=torch.Generator().manual_seed(seed)),
        attention_mask=mask,
    )


def loss_of(teacher, student, inputs, **options):
    """The attention KL of one forward; `options` are those of the distiller."""
    with AttentionDistiller(teacher, student, **options) as distiller:
        student(**inputs)
        return distiller.loss()


def kl_from_attentions(teacher, student, inputs, pairs, heads=None):
    """Mean over pairs {student layer: teacher layer} of the mean KL over heads and rows that are not padding.

    `heads`: {student head: teacher head}; None: all student heads, each with the mean of its teacher heads.
    """
    before = [model.config._attn_implementation for model in (teacher, student)]
    for model in teacher, student:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        teachers = teacher(**inputs, output_attentions=True).attentions
    students = student(**inputs, output_attentions=True).attentions
    for model, implementation in zip((teacher, student), before):
        model.set_attn_implementation(implementation)
    losses = []
    for i, j in pairs.items():
        s, p = (students[i], teachers[j]) if heads is None else (students[i][:, list(heads)], teachers[j][:, list(heads.values())])
        p = p.unflatten(1, (s.shape[1], -1)).mean(2)
        terms = torch.where(p > 0, p * (torch.log(p.clamp_min(1e-38)) - torch.log(s.clamp_min(1e-38))), 0.0)
        kept = inputs["attention_mask"].bool()[:, None].expand(s.shape[:3])
        losses.append(terms.sum(-1)[kept].mean())
    return torch.stack(losses).mean()
