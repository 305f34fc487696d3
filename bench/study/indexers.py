#!/usr/bin/env python3
"""Trains DSA-style indexers for a frozen model without indexers: a dense stage, then a sparse one.

    indexers.py --teacher TEACHER --data DIR --out FILE.csv

An indexer per layer scores keys as sum_g w_g relu(<q_g, k>), with index heads of the size of the model's heads and its RoPE.
The dense stage learns the attention over all keys (streamkl.indexer_kl), the sparse stage that over the indexer's own
top keys, to which the model attends meanwhile. Writes recall, the share of the attention that the top keys hold, and the
held-out loss of the model that attends to them alone; top = 0 is the dense model, "recent" the last keys in place of the top ones.
"""

import argparse
import csv
import time
from pathlib import Path

import numpy as np
import torch
from streamkl import indexer_kl
from streamkl.distill._options import Options
from streamkl.distill._student import load_teacher
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

HEADS = 4  # index heads


class Indexer(torch.nn.Module):
    def __init__(self, hidden: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.q, self.k, self.w = (torch.nn.Linear(hidden, size, bias=False) for size in (HEADS * dim, dim, HEADS))
        self.norm = torch.nn.LayerNorm(dim)

    def forward(self, hidden, cos, sin):
        """(q [batch, length, HEADS, dim], k [batch, length, dim], w [batch, length, HEADS])"""
        q, k = self.q(hidden).unflatten(-1, (HEADS, self.dim)).transpose(1, 2), self.norm(self.k(hidden))[:, None]
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q.transpose(1, 2), k[:, 0], self.w(hidden) * (HEADS * self.dim) ** -0.5


class Sparse:
    """The attention of a model with indexers. `mode`: "dense", "train-dense", "train-sparse", "sparse" or "recent"."""

    def __init__(self, model, rate: float) -> None:
        config = model.config
        self.model, self.mode, self.top = model, "dense", 0
        self.indexers = torch.nn.ModuleList(
            Indexer(config.hidden_size, config.head_dim) for _ in range(config.num_hidden_layers)
        ).to(model.device)
        self.optimizer = torch.optim.AdamW(self.indexers.parameters(), lr=rate, weight_decay=0.0)
        self.inputs: dict = {}
        self.losses: list[torch.Tensor] = []
        self.recalls: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(self.see, with_kwargs=True)
        AttentionInterface.register("study", self.attend)
        AttentionMaskInterface.register("study", sdpa_mask)
        model.config._attn_implementation = "study"

    def see(self, module, args, kwargs) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cos, sin = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]
        self.inputs = dict(hidden=hidden, cos=cos, sin=sin)

    def attend(self, module, query, key, value, attention_mask, scaling, **_):
        mask = None
        if self.mode != "dense":
            if self.mode.startswith("train"):
                self.learn(module.layer_idx, query, key, scaling)
            if self.mode != "train-dense":
                mask = self.listed(module.layer_idx, query.shape[2])
            if not self.mode.startswith("train"):
                self.recalls.append(recall(query, key, scaling, mask))
        how = dict(attn_mask=mask[:, None]) if mask is not None else dict(is_causal=True)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, enable_gqa=True, **how
        )
        return out.transpose(1, 2).contiguous(), None

    def learn(self, layer: int, query, key, scaling) -> None:
        """Adds the gradient of the layer's mean KL."""
        with torch.enable_grad():
            q, k, w = self.indexers[layer](**self.inputs)
            indices = None if self.mode == "train-dense" else self.topmost(layer, query.shape[2])
            dtype = query.dtype
            loss = indexer_kl(query.transpose(1, 2), key.transpose(1, 2), q.to(dtype), k.to(dtype), w, indices, causal=True,
                              softmax_scale_t=scaling, softmax_scale_s=1.0)  # fmt: skip
            loss.backward()
        self.losses.append(loss.detach())

    def topmost(self, layer: int, length: int) -> torch.Tensor:
        """[batch, length, top]: keys of the largest scores; rows with fewer keys list hidden ones, too."""
        with torch.no_grad():
            q, k, w = self.indexers[layer](**self.inputs)
            key = torch.arange(length, device=q.device)
            parts = []
            for at in range(0, length, 1024):
                rows = slice(at, at + 1024)
                products = torch.einsum("bsgd,btd->bsgt", q[:, rows].to(k.dtype), k).relu()
                scores = torch.einsum("bsgt,bsg->bst", products, w[:, rows].to(products.dtype)).float()
                scores.masked_fill_(key > key[rows, None], -torch.inf)
                parts.append(scores.topk(min(self.top, length), -1).indices)
            return torch.cat(parts, 1).int()

    def listed(self, layer: int, length: int) -> torch.Tensor:
        """[batch, length, length] bool: the keys that the layer attends to."""
        key = torch.arange(length, device=self.model.device)
        causal = key <= key[:, None]
        if self.mode == "recent":
            return (causal & (key > key[:, None] - self.top))[None]
        indices = self.topmost(layer, length)
        seen = torch.zeros(len(indices), length, length, dtype=torch.bool, device=key.device)
        return seen.scatter_(-1, indices.long(), True) & causal


def recall(query, key, scaling, mask) -> torch.Tensor:
    """The share of the full attention on the keys of the mask, mean over heads and over the rows that have to choose."""
    length, shares = query.shape[2], []
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    position = torch.arange(length, device=query.device)
    for at in range(0, length, 1024):
        rows = slice(at, at + 1024)
        scores = (query[:, :, rows] @ key.transpose(-1, -2)).float() * scaling
        p = scores.masked_fill_(position > position[rows, None], -torch.inf).softmax(-1)
        shares.append((p * mask[:, None, rows]).sum(-1))
    chooses = mask.sum(-1) < position + 1
    shares = torch.cat(shares, 2).mean(1)
    return (shares * chooses).sum() / chooses.sum().clamp(min=1)


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dense-steps", type=int, default=300)
    parser.add_argument("--sparse-steps", type=int, default=100)
    parser.add_argument("--train-top", type=int, default=512)
    parser.add_argument("--tops", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--sequences", type=int, default=8)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = load_teacher(Options(teacher=given.teacher, precision="bfloat16"), shows_progress=False).to(device)
    sparse = Sparse(model, 1e-3)
    data = {}
    for name in "train", "held-out":
        stream = np.load(given.data / f"{name}.npy", mmap_mode="r")
        data[name] = stream[: len(stream) // given.context * given.context].reshape(-1, given.context)
    order = np.random.default_rng(0).permutation(len(data["train"]))
    rows: list[dict] = []

    def step(mode: str, number: int) -> None:
        picked = np.take(order, range(number * given.batch, (number + 1) * given.batch), mode="wrap")
        ids = torch.from_numpy(data["train"][picked].astype(np.int64)).to(device)
        sparse.mode, sparse.top = mode, given.train_top
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            model.model(input_ids=ids, use_cache=False)
        torch.nn.utils.clip_grad_norm_(sparse.indexers.parameters(), 1.0)
        sparse.optimizer.step()
        sparse.optimizer.zero_grad()

    def measure(stage: str, mode: str, top: int, steps: int) -> None:
        sparse.mode, sparse.top, sparse.recalls = mode, top, []
        losses = []
        for sequence in data["held-out"][: given.sequences]:
            ids = torch.from_numpy(sequence[None].astype(np.int64)).to(device)
            with torch.no_grad(), torch.autocast(device, torch.bfloat16):
                losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss.float())
        share = torch.stack(sparse.recalls).mean().item() if sparse.recalls else 1.0
        loss = torch.stack(losses).mean().item()
        rows.append(dict(stage=stage, keys=mode, top=top, steps=steps, context=given.context, sequences=len(losses), recall=f"{share:.4f}",
                         loss=f"{loss:.4f}", seconds=f"{time.monotonic() - began:.1f}"))  # fmt: skip
        print(rows[-1], flush=True)
        with open(given.out, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    measure("none", "dense", 0, 0)
    for top in given.tops:
        measure("none", "recent", top, 0)
    taken = 0
    for stage, count in ("dense", given.dense_steps), ("sparse", given.sparse_steps):
        for _ in range(count):
            step(f"train-{stage}", taken)
            taken += 1
        kl = torch.stack(sparse.losses[-model.config.num_hidden_layers :]).mean().item()
        print(f"{stage}: {taken} steps, KL {kl:.4f}, {time.monotonic() - began:.1f} s", flush=True)
        for top in given.tops:
            measure(stage, "sparse", top, taken)


if __name__ == "__main__":
    main()
