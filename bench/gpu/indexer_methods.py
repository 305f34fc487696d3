"""The loss of an indexer by StreamKL and by naive code, and exact results for both."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from streamkl import reference
from streamkl._problem import DK_S, DQ_S, DW_S, INDEXER

from .cases import FORWARD, STEP, Case
from .library import SKL_BF16, SKL_F32, Workspace, address, addresses, lib, make_plan
from .measure import random_tensors
from .methods import Method


@dataclass
class IndexerMethod(Method):
    flops: dict = field(default_factory=dict)  # {pass: useful work}


# ---- Tensors -------------------------------------------------------------------------------------------------------------


def make_tensors(case, device):
    """{name: tensor}: bf16 [1, heads, length, dim]; w_s f32 [1, 1, length, index heads]; indices [1, 1, length, top_k]."""
    torch.manual_seed(0)

    def normal(heads, dim, dtype=torch.bfloat16):
        return torch.randn((1, heads, case.length, dim), device=device, dtype=dtype)

    tensors = dict(
        q_t=normal(case.heads, case.dim), k_t=normal(case.key_heads, case.dim),
        q_s=normal(case.index_heads, case.index_dim), k_s=normal(1, case.index_dim),
        w_s=normal(1, case.index_heads, torch.float32),
    )  # fmt: skip
    return tensors | ({"indices": random_indices(case, device)} if case.top_k else {})


def random_indices(case, device, block=1024):
    """top_k distinct visible keys per row, in no order; -1 where there are fewer."""
    blocks, keys = [], torch.arange(case.length, device=device)
    for begin in range(0, case.length, block):
        rows = torch.arange(begin, min(begin + block, case.length), device=device)
        scores = torch.rand((len(rows), case.length), device=device)
        if case.causal:
            scores.masked_fill_(keys > rows[:, None], -1.0)
        found = scores.topk(min(case.top_k, case.length), sorted=False)
        blocks.append(found.indices.masked_fill(found.values < 0, -1).int())
    return torch.cat(blocks)[None, None].contiguous()


# ---- Ours ----------------------------------------------------------------------------------------------------------------


class IndexerPlan:
    """The forward and the cheapest step, with the teacher's LSE given or computed, and their results."""

    def __init__(self, tensors, case, lse_t=None):
        q_s, k_s, w_s, device = tensors["q_s"], tensors["k_s"], tensors["w_s"], tensors["q_s"].device
        plan = make_plan(
            device, dtype_t=SKL_BF16, dtype_s=SKL_BF16, dtype_w=SKL_F32, gradients=DQ_S | DK_S | DW_S,
            causal=case.causal, batch=1, len_q=case.length, len_k=case.length, heads_t=case.heads, heads_s=1,
            key_heads_t=case.key_heads, key_heads_s=1, dim_t=case.dim, dim_s=case.index_dim, student=INDEXER,
            index_heads=case.index_heads, top_k=tensors["indices"].shape[-1] if case.top_k else 0,
        )  # fmt: skip
        self.kernel, self.workspace = plan.kernel, Workspace(plan, device)
        self.keep = tensors  # the structs hold only addresses

        def rows(heads):
            return q_s.new_empty((1, heads, case.length), dtype=torch.float32)

        self.kl, self.lse_s = rows(1), rows(1)
        self.lse_t = rows(case.heads) if lse_t is None else lse_t
        self.dq, self.dk, self.dw = torch.empty_like(q_s), torch.empty_like(k_s), torch.empty_like(w_s)
        given, lses = addresses(tensors), addresses(dict(lse_t=self.lse_t, lse_s=self.lse_s))
        known = {} if lse_t is None else {"lse_t": lses["lse_t"]}
        inputs, kl = lib.pack_inputs(**given, **known), lib.pack_rows(kl=address(self.kl))
        unknown = lib.pack_rows(**{name: row for name, row in lses.items() if name not in known})
        gradients = lib.pack_gradients(dq_s=address(self.dq), dk_s=address(self.dk), dw_s=address(self.dw))
        self.calls = {
            FORWARD: [(lib.FORWARD, inputs, kl)],
            STEP: [(lib.FORWARD, inputs, unknown), (lib.FORWARD_BACKWARD, lib.pack_inputs(**given, **lses), kl, gradients)],
        }

    def run(self, operation):
        for call in self.calls[operation]:
            self.workspace.run(*call)

    def explain(self, operation):
        return "\n".join(self.workspace.plan.explain(op, inputs) for op, inputs, *_ in self.calls[operation])

    @property
    def results(self):
        return {"kl": self.kl[0, 0], "dq": self.dq, "dk": self.dk, "dw": self.dw}


def ours(tensors, case):
    """Two methods: with the LSE that the teacher's attention returns, and without it."""
    alone = IndexerPlan(tensors, case)
    alone.run(STEP)
    lse_t = alone.lse_t.clone()
    methods = []
    for name, plan, known in ("streamkl", IndexerPlan(tensors, case, lse_t), lse_t), ("no LSE given", alone, None):
        passes = {operation: lambda plan=plan, operation=operation: lambda: plan.run(operation) for operation in plan.calls}

        def step(known=known):
            fresh = IndexerPlan(tensors, case, known)
            fresh.run(STEP)
            return fresh.results

        flops = {operation: case.flops(operation) for operation in passes}
        methods.append(
            IndexerMethod(
                name, case, passes, step=step, kernel=plan.kernel, explanation=plan.explain(STEP), flops=flops
            )
        )
    return methods


# ---- Naive code ----------------------------------------------------------------------------------------------------------


GATHERED_BYTES = 4 << 30  # limit of teacher keys that are gathered at once; more are not faster


def widened(scores):
    """f32, or float64 if the scores are float64, which shows that the formula is the same."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def kl_of_scores(case, scores, dots, w_s, hidden):
    """KL of rows [batch, i] from scores [batch, heads, i, j]: softmax, mean over heads, log_softmax, sum.

    scores() makes the teacher's scores, which are freed before the indexer's are allocated. hidden: bool [.., i, j], or None.
    """

    def masked(logits):
        return logits if hidden is None else logits.masked_fill(hidden, -torch.inf)

    with torch.no_grad():
        target = torch.softmax(masked(widened(scores()) * case.dim**-0.5), dim=-1).mean(dim=1)
    weights = w_s[:, 0].transpose(1, 2).unsqueeze(-1)  # [batch, index heads, i, 1]
    logits = (widened(dots().relu()) * weights).sum(dim=1) * (case.index_dim * case.index_heads) ** -0.5
    log_s = torch.log_softmax(masked(logits), dim=-1)
    if hidden is not None:
        log_s = log_s.masked_fill(hidden, 0.0)  # where the target is 0
    return (torch.xlogy(target, target) - target * log_s).sum(dim=-1)


def dense_kl(case, q_t, k_t, q_s, k_s, w_s):
    """KL of every row over all keys."""
    hidden = None
    if case.causal:
        hidden = torch.ones((case.length, case.length), dtype=torch.bool, device=q_t.device).triu(1)

    def scores():
        return torch.einsum("bhid,bhjd->bhij", q_t, k_t.repeat_interleave(case.heads // case.key_heads, dim=1))

    return kl_of_scores(case, scores, lambda: torch.einsum("bgid,bjd->bgij", q_s, k_s[:, 0]), w_s, hidden)


def sparse_kl(case, q_t, k_t, q_s, k_s, w_s, indices):
    """KL of the given rows over their top-k keys, which are gathered to [batch, key heads, i, j, dim]."""
    hidden, keys = indices[:, 0] < 0, indices[0, 0].clamp(min=0).long()

    def scores():
        by_key_head = q_t.unflatten(1, (case.key_heads, -1))
        return torch.einsum("bkgid,bkijd->bkgij", by_key_head, k_t[:, :, keys]).flatten(1, 2)

    return kl_of_scores(case, scores, lambda: torch.einsum("bgid,bijd->bgij", q_s, k_s[:, 0, keys]), w_s, hidden)


def rows_together(case, dtype=torch.bfloat16):
    """Sparse: rows whose gathered teacher keys fit into GATHERED_BYTES. Dense: all rows."""
    row_bytes = case.top_k * case.key_heads * case.dim * dtype.itemsize
    return max(1, min(case.length, GATHERED_BYTES // row_bytes)) if case.top_k else case.length


def naive(tensors, case, name="naive"):
    """Dense: all rows at once. Sparse: chunks of rows, whose gradients are added."""
    trained = {name: tensors[name].detach().clone().requires_grad_() for name in ("q_s", "k_s", "w_s")}
    tensors, together = tensors | trained, rows_together(case, tensors["q_t"].dtype)

    def chunks():
        for begin in range(0, case.length, together):
            rows = slice(begin, begin + together)
            some = {name: tensors[name][:, :, rows] for name in ("q_t", "q_s", "w_s", "indices") if name in tensors}
            yield (sparse_kl if case.top_k else dense_kl)(case, **(tensors | some))

    def forward():
        with torch.no_grad():
            return torch.cat(list(chunks()), dim=1)

    def step():
        kl = []
        for tensor in trained.values():
            tensor.grad = None
        for some in chunks():
            some.sum().backward()
            kl.append(some.detach())
        dq, dk, dw = (tensor.grad for tensor in trained.values())
        return {"kl": torch.cat(kl, dim=1)[0], "dq": dq, "dk": dk, "dw": dw}

    passes = {FORWARD: lambda: forward, STEP: lambda: step}
    return IndexerMethod(name, case, passes, step=step, flops={each: case.flops(each) for each in passes})


# ---- Attention, for comparison -------------------------------------------------------------------------------------------


def cudnn_attention(heads=16, length=8192, dim=128):
    """Forward of scaled_dot_product_attention by cuDNN with either mask."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, _ = random_tensors(Case(heads, length, dim, False))

    def attend(causal):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    cases = {f"forward, {case.mask}": case for case in (Case(heads, length, dim, causal) for causal in (True, False))}
    passes = {name: lambda causal=case.causal: lambda: attend(causal) for name, case in cases.items()}
    flops = {name: 2 * 2 * case.pairs * dim for name, case in cases.items()}  # pairs of all heads
    about = f"attention, {heads} heads of {dim}, N={length}"
    return IndexerMethod("cudnn", None, passes, kernel=about, flops=flops)


# ---- Exact results -------------------------------------------------------------------------------------------------------


class ExactRows:
    """KL, dq and dw of some rows in float64, which depend on no other row. With all rows also dk."""

    def __init__(self, tensors, case, rows):
        q_t, q_s, w_s = (tensors[name][0][:, rows].double() for name in ("q_t", "q_s", "w_s"))
        k_t, k_s = (tensors[name][0].double() for name in ("k_t", "k_s"))
        self.rows, is_whole = rows, len(rows) == case.length
        trained = [tensor.requires_grad_() for tensor in (q_s, k_s, w_s)]
        indices = tensors["indices"][0][:, rows] if case.top_k else None
        keys = torch.arange(case.length, device=q_t.device)
        visible = keys <= rows[:, None] if case.causal else torch.ones_like(keys, dtype=torch.bool).expand(len(rows), -1)
        options = (None, None, 0.0, True, False)  # scales, softcap, relu, reverse
        exact = reference.sequence_indexer_kl(q_t, k_t, *trained, indices, None, visible, *options)
        dq, dk, dw = torch.autograd.grad(exact.kl.sum(), trained)
        self.exact = {"kl": exact.kl.detach()[0], "dq": dq, "dw": dw} | ({"dk": dk} if is_whole else {})

    def errors(self, results):
        """{result: relative error in norm}"""
        found = {}
        for name, true in self.exact.items():
            result = results[name] if name == "kl" else results[name][0]
            if name != "dk":
                result = result[..., self.rows] if name == "kl" else result[:, self.rows]
            found[name] = ((result.double() - true).norm() / true.norm()).item()
        return found


def some_rows(case, device, count=16):
    return torch.linspace(0, case.length - 1, min(count, case.length), device=device).round().long()
