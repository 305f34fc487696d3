"""Four questions about the attention of a Hugging Face model, without its attention matrices:

heavy hitters    which tokens get most of the attention: candidates that a KV cache keeps
sinks            how much goes to the first token
max logits       how large logits get, and the factors with which QK-clip shrinks the query weights
retrieval heads  which heads find the token that followed an earlier occurrence of the current one

python examples/attention_stats.py                            # a small random model, seconds
python examples/attention_stats.py --model MODEL --tokens 8192
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from streamkl.hf import AttentionStats


def heavy_hitters(model, tokens, kept=8):
    """The tokens with the largest sum of attention in every key head: [layers, key heads, kept]."""
    with AttentionStats(model, want=["key_sum"], per_key_head=True) as stats, torch.no_grad():
        model(input_ids=tokens)
        return torch.stack([found.key_sum[0].topk(kept).indices for found in stats])


def sink_share(model, tokens):
    """The share of attention that the first token gets: [layers, heads]."""
    with AttentionStats(model, want=["range_sum"], key_ranges=[(0, 1)]) as stats, torch.no_grad():
        model(input_ids=tokens)
        return torch.stack([found.range_sum[0, :, 0] / tokens.shape[1] for found in stats])


def qk_clip_factors(model, tokens, limit=100.0):
    """QK-clip: the factor for the query weights of each head that keeps its largest logit below `limit`: [layers, heads]."""
    with AttentionStats(model, want=["head_max_logit"]) as stats, torch.no_grad():
        model(input_ids=tokens)
        return torch.stack([(limit / found.head_max_logit[0]).clamp(max=1.0) for found in stats])


def retrieval_scores(model, vocabulary, length=64):
    """How often the top key of a repeated token is the one after its first occurrence: [layers, heads]."""
    once = torch.randint(vocabulary, (1, length))
    with AttentionStats(model, want=["top_keys"], top_k=1) as stats, torch.no_grad():
        model(input_ids=torch.cat([once, once], 1))
        target = torch.arange(1, length)  # one for each of the queries length .. 2 length - 2
        return torch.stack([(found.top_keys[0, :, length:-1, 0] == target).float().mean(-1) for found in stats])


def small_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def by_layer(values):
    return " ".join(f"{value:.2f}" for value in values.tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a causal language model; default: a small random one")
    parser.add_argument("--text", help="a file for the model to read; default: random tokens")
    parser.add_argument("--tokens", type=int, default=128, help="context length; default 128")
    given, _ = parser.parse_known_args()
    model = (AutoModelForCausalLM.from_pretrained(given.model) if given.model else small_model()).eval()
    tokens = torch.randint(model.config.vocab_size, (1, given.tokens))
    if given.text:
        with open(given.text) as file:
            read = AutoTokenizer.from_pretrained(given.model)(file.read(), return_tensors="pt").input_ids
        tokens = read[:, : given.tokens]
    print("tokens:", tokens.shape[1])
    print("heavy hitters of layer 0:", heavy_hitters(model, tokens)[0].tolist())
    print("share of the first token, by layer:", by_layer(sink_share(model, tokens).mean(1)))
    clip = qk_clip_factors(model, tokens)
    print(f"QK-clip to 100 would shrink {int((clip < 1).sum())} of {clip.numel()} heads")
    scores = retrieval_scores(model, model.config.vocab_size)
    print("best retrieval score, by layer:", by_layer(scores.amax(1)))
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    print(f"best retrieval head: layer {layer}, head {head}: {scores.max().item():.2f} of the repeated tokens")


if __name__ == "__main__":
    main()
