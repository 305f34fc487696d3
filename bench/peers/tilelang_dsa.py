"""TileLang's example of sparse fine-tuning (github.com/tile-ai/tilelang, examples/dsa_sparse_finetune) as a peer.

Nothing of it is in this repository: its kernels are imported from the folder that --tilelang names. A step is what its
backward does for the indexer: the teacher's target from the LSE, then dq, dk and dw. The softmax of the index logits, which
the example's top-k kernel returns, is given, and no KL is computed. Its kernels add to an index dk that nothing clears; dk is
therefore not compared.
"""

import importlib
import sys
from pathlib import Path

import torch

TILELANG, ENTRY = "tilelang", "sparse_mla_topk_reducesum.py"
HEAD, TAIL = 512, 64  # the dimensions of a teacher head that have values, and those of RoPE


def load(folder):
    """(target, gradients): the functions of the example."""
    sys.path.insert(0, str(Path(folder).resolve()))
    try:
        names = Path(ENTRY).stem, "indexer_bwd"
        target, gradients = map(importlib.import_module, names)
    finally:
        del sys.path[0]
    return target.sparse_mla_topk_reducesum_interface, gradients.indexer_bwd_interface


def index_scores(case, tensors, rows=256):
    """Softmax of the index logits of each list, f32 [length, top_k]; 0 where an entry is -1."""
    q_s, k_s, w_s = tensors["q_s"][0].transpose(0, 1), tensors["k_s"][0, 0], tensors["w_s"][0, 0]
    scores = []
    for begin in range(0, case.length, rows):
        some = slice(begin, begin + rows)
        indices = tensors["indices"][0, 0, some].long()
        dots = torch.einsum("igd,ijd->igj", q_s[some], k_s[indices.clamp(min=0)]).relu().float()
        logits = torch.einsum("ig,igj->ij", w_s[some], dots) * (case.index_dim * case.index_heads) ** -0.5
        scores.append(torch.softmax(logits.masked_fill(indices < 0, -torch.inf), dim=-1))
    return torch.cat(scores)


def tilelang_step(folder, case, tensors, lse_t):
    """The step of the example, on copies of the tensors in its layout: [length, heads, dim], weights in bf16."""
    if (case.key_heads, case.dim, case.causal) != (1, HEAD + TAIL, True) or not case.top_k:
        raise ValueError(f"the example is for causal lists of keys and one key head of {HEAD} + {TAIL} dimensions")
    target, gradients = load(folder)
    q, index_q = (tensors[name][0].transpose(0, 1).contiguous() for name in ("q_t", "q_s"))
    padded = tensors["k_t"].new_zeros((case.length + 1, 1, case.dim))  # the target reads key -1
    keys = padded[1:].copy_(tensors["k_t"][0, 0, :, None])
    index_k, indices = tensors["k_s"][0, 0].contiguous(), tensors["indices"][0, 0]
    unit = case.index_heads**-0.5  # its logits have a scale of 1 / sqrt(dim)
    weights = (tensors["w_s"][0, 0] * unit).to(q.dtype)
    lse, scores = lse_t[0].transpose(0, 1).contiguous(), index_scores(case, tensors)
    offsets = torch.tensor([0, case.length], dtype=torch.int32, device=q.device)

    def step():
        p = target(q, keys, indices[:, None], lse, offsets, dim_v=HEAD).squeeze(-2)
        dq, dw, _ = gradients(index_q, weights, index_k, p, scores, indices, offsets)
        return {"dq": dq.transpose(0, 1)[None], "dw": (dw * unit)[None, None]}

    return step
