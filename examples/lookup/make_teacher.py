"""Trains a small decoder on real text to copy and look up, and writes it with its data for streamkl-distill.

    python examples/lookup/make_teacher.py --out lookup --context 8192

The text is the documentation of the installed Debian packages. Records of random tokens are inserted into it and
repeated far away: only a model that finds the first copy can continue the second one. Training starts with short
sequences, where copying is learnt quickly, and ends at the full context. Writes OUT/teacher, OUT/train.npy and
OUT/held-out.npy.
"""

import argparse
import gzip
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SUFFIXES = ("", ".md", ".txt", ".gz")
VOCABULARY = 1024


def read_text(folder: Path, size: int) -> str:
    """Up to `size` characters of documentation, a little of each file, in the order of the paths."""
    parts, total = [], 0
    for path in sorted(folder.rglob("*")):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        data = path.read_bytes()
        try:
            text = (gzip.decompress(data) if path.suffix == ".gz" else data)[:30000].decode()
        except (OSError, EOFError, UnicodeDecodeError):
            continue  # a picture, or not a text
        parts.append(text)
        total += len(text)
        if total >= size:
            break
    return "\n".join(parts)


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [text[:2_000_000]], vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="</s>")


def make_sequences(tokens: np.ndarray, count: int, length: int, rng: np.random.Generator, share=0.5):
    """[count, length] of text in which records of random tokens cover about a `share`, and the tokens that can be copied.

    A record is new, or one that has been in the sequence before. Sizes and gaps are random: a record cannot be
    found by its distance.
    """
    starts = rng.integers(0, len(tokens) - length, count)
    sequences = np.stack([tokens[start : start + length] for start in starts]).astype(np.int64)
    copied = np.zeros_like(sequences, dtype=bool)
    gap = 48 * (1 - share)  # between records of 24 tokens, on average
    for row, is_copied in zip(sequences, copied):
        records: list[np.ndarray] = []
        at = int(rng.integers(0, 8))
        while at < length:
            if records and rng.random() < 0.6:
                record = records[rng.integers(len(records))]
                is_copied[at + 2 : at + len(record)] = True  # the first tokens only say which record it is
            else:
                record = rng.integers(4, VOCABULARY, rng.integers(12, 37))
                records.append(record)
            row[at : at + len(record)] = record[: length - at]
            at += len(record) + int(rng.integers(0, 2 * gap + 1))
    return torch.from_numpy(sequences), torch.from_numpy(copied)


def make_model(context: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=context, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e12), bos_token_id=0, eos_token_id=1, initializer_range=0.03,
        attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    start_with_attention(model)
    return model


@torch.no_grad()
def start_with_attention(model) -> None:
    """Some heads start with the weights that copying needs: from random weights, they take hours on a CPU to appear.

    In layer 1, head 0 attends to the token before and adds a projection of it to the residual stream. In layer 3,
    heads 0 and 1 compare the same projection of the current token with it: they attend to tokens that came after an
    earlier copy of the current one, and predict them.
    """
    # `rows` dimensions that RoPE hardly turns, and `fast` frequencies that it turns by
    rows, fast, dim = 40, 8, model.config.head_dim
    frequency = model.model.rotary_emb.inv_freq
    slow = torch.cat([torch.arange(dim // 2 - rows // 2, dim // 2), torch.arange(dim - rows // 2, dim)])
    hidden = model.config.hidden_size
    own, before = slice(0, hidden - dim), slice(hidden - dim, hidden - dim + rows)  # in the residual stream
    model.model.embed_tokens.weight.normal_(std=0.2)[:, hidden - dim :] = 0
    projection = torch.linalg.qr(torch.randn(hidden - dim, rows))[0].T

    first = model.model.layers[1].self_attn
    for part, angle in (first.q_proj, 0 * frequency), (first.k_proj, frequency):
        part.weight[:dim], part.bias[:dim] = 0, 0
        # A logit of 16 sum cos(f (n - 1)) at distance n. Four frequencies are too few: almost the same sum comes again
        # within 8,192 tokens, and the token before keeps 56 % of the attention. Eight leave it 99.98 %.
        part.bias[:fast] = (16 * dim**0.5) ** 0.5 * angle[:fast].cos()
        part.bias[dim // 2 : dim // 2 + fast] = (16 * dim**0.5) ** 0.5 * angle[:fast].sin()
    first.v_proj.weight[slow], first.v_proj.bias[slow] = 0, 0
    first.v_proj.weight[slow, own] = projection
    first.o_proj.weight[:, :dim] = 0
    first.o_proj.weight[before, slow] = 0.2 * torch.eye(rows)

    second = model.model.layers[3].self_attn
    for head in 0, 1:
        at = head * dim
        for part in second.q_proj, second.k_proj:
            part.weight[at : at + dim], part.bias[at : at + dim] = 0, 0
        second.q_proj.weight[at + slow, own] = 4 * projection
        second.k_proj.weight[at + slow, before] = 4 * torch.eye(rows)
        second.v_proj.weight[at : at + dim] = 0
        second.v_proj.weight[at : at + dim, own] = torch.eye(dim)
        second.o_proj.weight[:, at : at + dim] = 0
        second.o_proj.weight[own, at : at + dim] = 0.6 * torch.eye(dim)


@dataclass
class Stage:
    """Training at one length."""

    length: int
    batch: int
    steps: int
    rate: float
    share: float  # of the tokens that are records


def train(model, tokens, stage: Stage, rng) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01)
    begin, found = time.monotonic(), []
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                stage.rate * min((step + 1) / 20, 1.0) * min((stage.steps - step) / (0.3 * stage.steps), 1.0)
            )
        made = make_sequences(tokens, stage.batch, stage.length, rng, stage.share)
        ids, copied = (each.to(model.device) for each in made)
        logits = model(ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = torch.where(copied[:, 1:], 1.0, 0.2).flatten()
        loss = (losses * weight).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((logits.argmax(-1) == ids[:, 1:])[copied[:, 1:]].float().mean().item())
        if step % 20 == 19 or step == stage.steps - 1:
            share, seconds = 100 * np.mean(found[-20:]), time.monotonic() - begin
            print(f"length {stage.length:5} step {step:5}: loss {loss.item():.3f}, copied tokens right {share:.1f} %, "
                  f"{seconds:.0f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path("/usr/share/doc"), help="folder with text files")
    parser.add_argument("--out", type=Path, default=Path("lookup"))
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=200, help="number of training sequences to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)

    text = read_text(options.text, 2_000_000)
    tokenizer = make_tokenizer(text)
    tokens = np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
    held_out = tokens[-len(tokens) // 10 :]
    tokens = tokens[: -len(tokens) // 10]
    print(f"{len(tokens)} tokens of text, {len(held_out)} held out", flush=True)

    model = make_model(options.context).to("cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    stages = [
        Stage(128, 8, 200, 5e-4, share=0.5),
        Stage(options.context, max(1024 // options.context, 1), 40, 3e-4, share=0.5),
    ]
    for stage in stages:
        train(model, tokens, stage, rng)
    model.save_pretrained(options.out / "teacher")
    tokenizer.save_pretrained(options.out / "teacher")
    for name, source, count in ("train", tokens, options.sequences), ("held-out", held_out, 16):
        np.save(
            options.out / f"{name}.npy",
            make_sequences(source, count, options.context, rng)[0].numpy().astype(np.int32),
        )


if __name__ == "__main__":
    main()
