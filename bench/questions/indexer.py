"""Times the loss that trains a sparse attention's indexer compared with naive code, and checks the results.

    bench/run.py indexer                                  # 8192 tokens, 64 teacher heads of 128, 32 index heads of 128
    bench/run.py indexer --length 131072                  # the naive code runs out of memory
    bench/run.py indexer --top-k 2048                     # sparse
    bench/run.py indexer --top-k 2048 --key-heads 1 --dim 576 --tilelang DIR   # latent attention, and TileLang's example

    streamkl       the C library, with the teacher's LSE as its attention has returned it
    no LSE given   the same, which computes that LSE first
    naive          unfused training code over all keys: bf16 einsum to [heads, N, N] teacher scores, f32 softmax, mean over
                   heads; [index heads, N, N] dot products, ReLU, weights, sum; KL in log space; autograd
    tilelang       the kernels of TileLang's examples/dsa_sparse_finetune in DIR: the target and the gradients, without a
                   KL, with the softmax of the index logits given

Our loss and all gradients of a problem of 1000 tokens, and 16 rows of the large one, are compared with float64.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from harness.attention import WRONG, WRONG_16_BITS, relative_error
from harness.library import FORWARD, STEP, Calls, address, addresses, lib
from harness.options import add_numbers, check_least
from harness.report import errors_text, ratio
from harness.run import Method, make_peer
from harness.timing import release_memory
from peers.attention import PYTORCH, leaves_of
from peers.tilelang_dsa import ENTRY, TILELANG, tilelang_step
from streamkl import reference
from streamkl._problem import DK_S, DQ_S, DW_S

COLUMNS = (
    "date gpu torch commit method kernel pass length heads key_heads dim index_heads index_dim top_k mask ms fastest_ms tflops"
    " naive_ratio extra_bytes kl_error dq_error dk_error dw_error note"
).split()
STREAMKL, NO_LSE, NAIVE = "streamkl", "no LSE given", "naive"
SMALL = 1000  # queries and keys of the problem that is checked completely


@dataclass(frozen=True)
class IndexerCase:
    """One sequence and one student head, which learns the mean of all teacher heads."""

    length: int
    heads: int
    key_heads: int
    dim: int
    index_heads: int
    index_dim: int
    top_k: int  # 0: all keys that the mask leaves, not sparse
    causal: bool

    problem: ClassVar[dict] = {}  # options besides the mask: a pooled teacher
    pooling = reference.Pooling()

    @property
    def name(self):
        shared = f"/{self.key_heads}" if self.key_heads != self.heads else ""
        sparse = f", top_k={self.top_k}" if self.top_k else ""
        teacher, indexer = f"{self.heads}{shared} x {self.dim}", f"{self.index_heads} x {self.index_dim}"
        return f"N={self.length} {self.mask}, teacher {teacher}, indexer {indexer}{sparse}"

    @property
    def mask(self):
        return "causal" if self.causal else "full"

    @property
    def keys_s(self):
        """Keys of the student."""
        return self.length

    @property
    def pairs(self):
        """Visible query-key pairs."""
        n, k = self.length, min(self.top_k or self.length, self.length)
        return k * (k + 1) // 2 + (n - k) * k if self.causal else n * k

    def flops(self, operation):
        """Work that the loss requires: the logits once, and dq and dk for the gradients."""
        products = 1 if operation == FORWARD else 3
        return 2 * self.pairs * (self.heads * self.dim + products * self.index_heads * self.index_dim)

    def indices(self, device, block=1024):
        """top_k distinct visible keys per row, in no order; -1 where there are fewer."""
        blocks, keys = [], torch.arange(self.length, device=device)
        for begin in range(0, self.length, block):
            rows = torch.arange(begin, min(begin + block, self.length), device=device)
            scores = torch.rand((len(rows), self.length), device=device)
            if self.causal:
                scores.masked_fill_(keys > rows[:, None], -1.0)
            found = scores.topk(min(self.top_k, self.length), sorted=False)
            blocks.append(found.indices.masked_fill(found.values < 0, -1).int())
        return torch.cat(blocks)


def add_options(parser):
    add_numbers(
        parser,
        length=(8192, "queries and keys"),
        heads=(64, "teacher heads"),
        key_heads=(0, "teacher key heads, 0: one per head"),
        dim=(128, "size of a teacher head"),
        index_heads=(32, "index heads"),
        index_dim=(128, "size of an index head"),
        top_k=(0, "sparse: keys per row, 0: all"),
    )
    parser.add_argument("--full", dest="causal", action="store_false", help="every row attends to every key")
    parser.add_argument("--tilelang", type=Path, metavar="DIR", help=f"also time TileLang's example: DIR has {ENTRY}")
    parser.set_defaults(sample_ms=600)


def cases(given):
    check_least(given, 1, "length heads dim index_heads index_dim")
    check_least(given, 0, "top_k")
    if given.key_heads < 0 or given.heads % (given.key_heads or 1):
        raise ValueError(f"--key-heads={given.key_heads}: must divide --heads={given.heads}")
    if given.tilelang and not (given.tilelang / ENTRY).is_file():
        accepted = f"TileLang's examples/dsa_sparse_finetune, with {ENTRY}"
        raise ValueError(f"--tilelang={given.tilelang}: must be {accepted}")
    teacher, indexer = (given.heads, given.key_heads or given.heads, given.dim), (given.index_heads, given.index_dim)
    return [IndexerCase(given.length, *teacher, *indexer, given.top_k, given.causal)]


# ---- Ours ----------------------------------------------------------------------------------------------------------


def make_tensors(case, device):
    """{name: tensor}: bf16 [1, heads, length, dim]; w_s f32 [1, 1, length, index heads]; indices [1, 1, length, top_k]."""

    def normal(heads, length, dim, dtype=torch.bfloat16):
        return torch.randn((1, heads, length, dim), device=device, dtype=dtype)

    tensors = dict(
        q_t=normal(case.heads, case.length, case.dim), k_t=normal(case.key_heads, case.length, case.dim),
        q_s=normal(case.index_heads, case.length, case.index_dim), k_s=normal(1, case.keys_s, case.index_dim),
        w_s=normal(1, case.length, case.index_heads, torch.float32),
    )  # fmt: skip
    return tensors | ({"indices": case.indices(device)[None, None].contiguous()} if case.top_k else {})


class IndexerCalls(Calls):
    """The forward and the cheapest step, with the teacher's LSE given or computed, and their results."""

    def __init__(self, tensors, case, lse_t=None):
        q_s, k_s, w_s = tensors["q_s"], tensors["k_s"], tensors["w_s"]
        super().__init__(tensors, gradients=DQ_S | DK_S | DW_S, causal=case.causal, **case.problem)
        self.tensors, self.given_lse_t = tensors, lse_t  # kept: the structs hold only addresses

        def rows(heads):
            return q_s.new_empty((1, heads, case.length), dtype=torch.float32)

        self.kl, self.lse_s, self.mass, self.pools = rows(1), rows(1), rows(1), bool(case.problem)
        self.lse_t = rows(case.heads) if lse_t is None or self.pools else lse_t
        self.dq, self.dk, self.dw = torch.empty_like(q_s), torch.empty_like(k_s), torch.empty_like(w_s)
        given, lses = addresses(tensors), addresses(dict(lse_t=self.lse_t, lse_s=self.lse_s))
        known = {} if lse_t is None else {"lse_t": address(lse_t)}
        written = {name: row for name, row in lses.items() if name not in known}
        inputs, kl = lib.pack_inputs(**given, **known), dict(kl=address(self.kl))
        gradients = lib.pack_gradients(dq_s=address(self.dq), dk_s=address(self.dk), dw_s=address(self.dw))
        step = [
            (lib.FORWARD, inputs, lib.pack_rows(**written)),
            (lib.FORWARD_BACKWARD, lib.pack_inputs(**given, **lses), lib.pack_rows(**kl), gradients),
        ]
        if self.pools:
            rows = lib.pack_rows(**kl, **lses, mass=address(self.mass))
            step = [(lib.FORWARD_BACKWARD, inputs, rows, gradients)]
        self.calls = {FORWARD: [(lib.FORWARD, inputs, lib.pack_rows(**kl))], STEP: step}

    def results(self):
        return {"kl": self.kl[0, 0], "dq": self.dq, "dk": self.dk, "dw": self.dw}

    def teacher_lse(self):
        """The teacher's own LSEs, after a step without them. Rows without blocks have none."""
        return torch.where(self.mass > 0, self.lse_t - self.mass.log(), 0.0) if self.pools else self.lse_t.clone()


def flops_of(case):
    return {name: case.flops(name) for name in (FORWARD, STEP)}


def ours(tensors, case, names=(STREAMKL, NO_LSE)):
    """(two methods: with the LSE that the teacher's attention returns, and without it; lines that name their launches)"""
    alone = IndexerCalls(tensors, case)
    alone.run(STEP)
    lse_t = alone.teacher_lse()
    methods, launches = [], []
    for name, calls in zip(names, (IndexerCalls(tensors, case, lse_t), alone)):

        def step(known=calls.given_lse_t):
            fresh = IndexerCalls(tensors, case, known)
            fresh.run(STEP)
            return fresh.results()

        methods.append(Method(name, calls.timed([FORWARD, STEP]), calls.kernels(STEP), flops_of(case), step))
        launches += calls.explain(STEP).splitlines()
    return methods, list(dict.fromkeys(launches))


# ---- Naive code ----------------------------------------------------------------------------------------------------


def widened(scores):
    """f32, or float64 if the scores are float64, which shows that the formula is the same."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def naive_kl(case, q_t, k_t, q_s, k_s, w_s):
    """KL of every row over all keys: softmax, mean over heads, log_softmax, sum."""

    def masked(logits, value):
        ones = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
        return logits.masked_fill(ones.triu(1), value) if case.causal else logits

    with torch.no_grad():
        scores = torch.einsum("bhid,bhjd->bhij", q_t, k_t.repeat_interleave(case.heads // case.key_heads, dim=1))
        target = torch.softmax(masked(widened(scores) * case.dim**-0.5, -torch.inf), dim=-1).mean(dim=1)
        del scores  # before those of the indexer
    dots = widened(torch.einsum("bgid,bjd->bgij", q_s, k_s[:, 0]).relu())
    weights = w_s[:, 0].transpose(1, 2).unsqueeze(-1)  # [batch, index heads, i, 1]
    logits = (dots * weights).sum(dim=1) * (case.index_dim * case.index_heads) ** -0.5
    log_s = masked(torch.log_softmax(masked(logits, -torch.inf), dim=-1), 0.0)  # 0 where the target is 0
    return (torch.xlogy(target, target) - target * log_s).sum(dim=-1)


def naive(tensors, case):
    if case.top_k:
        raise ValueError("it is for all keys")
    leaves = q_s, k_s, w_s = leaves_of(*(tensors[name] for name in ("q_s", "k_s", "w_s")))

    def kl():
        return naive_kl(case, tensors["q_t"], tensors["k_t"], q_s, k_s, w_s)

    def step():
        rows = kl()
        dq, dk, dw = torch.autograd.grad(rows.sum(), leaves)
        return {"kl": rows.detach()[0], "dq": dq, "dk": dk, "dw": dw}

    return Method(NAIVE, {FORWARD: torch.no_grad()(kl), STEP: step}, PYTORCH, flops_of(case), step)


# ---- Exact results -------------------------------------------------------------------------------------------------


class ExactRows:
    """KL, dq and dw of some rows in float64, which depend on no other row. With all rows also dk."""

    limits = {"kl": WRONG} | dict.fromkeys(("dq", "dk", "dw"), WRONG_16_BITS)

    def __init__(self, tensors, case, rows):
        q_t, q_s, w_s = (tensors[name][0][:, rows].double() for name in ("q_t", "q_s", "w_s"))
        k_t, k_s = (tensors[name][0].double() for name in ("k_t", "k_s"))
        self.rows, is_whole = rows, len(rows) == case.length
        trained = [tensor.requires_grad_() for tensor in (q_s, k_s, w_s)]
        indices = tensors["indices"][0][:, rows] if case.top_k else None
        keys = torch.arange(case.length, device=q_t.device)
        last = rows[:, None] if case.causal else torch.full_like(rows, case.length)[:, None]
        options = (None, None, 0.0, True, False, case.pooling)  # scales, softcap, relu, reverse
        exact = reference.sequence_indexer_kl(q_t, k_t, *trained, indices, None, keys <= last, *options)
        dq, dk, dw = torch.autograd.grad(exact.kl.sum(), trained)
        self.exact = {"kl": exact.kl.detach()[0], "dq": dq, "dw": dw} | ({"dk": dk} if is_whole else {})

    def errors(self, results):
        """{result: relative error in norm}, of the results that a method has"""
        found = {}
        for name, true in self.exact.items():
            if name not in results:
                continue
            result = results[name] if name == "kl" else results[name][0]
            if name != "dk":
                result = result[..., self.rows] if name == "kl" else result[:, self.rows]
            found[name] = relative_error(result, true)
        return found


def some_rows(case, device, count=16):
    return torch.linspace(0, case.length - 1, min(count, case.length), device=device).round().long()


# ---- Measuring -----------------------------------------------------------------------------------------------------


def check_small(case, device):
    """(lines, what is wrong): our loss and all gradients, compared with float64."""
    tensors = make_tensors(case, device)
    exact = ExactRows(tensors, case, torch.arange(case.length, device=device))
    methods, _ = ours(tensors, case)
    for method in methods:
        method.examine(exact, device)
    lines = [f"N={case.length}, {method.name}: {errors_text(method.errors)}" for method in methods]
    return lines, [text for method in methods for text in method.wrong]


def make_tilelang(tensors, case, exact, run):
    def make():
        calls = IndexerCalls(tensors, case)
        calls.run(STEP)
        step = tilelang_step(run.given.tilelang, case, tensors, calls.lse_t)
        return Method(TILELANG, {STEP: step}, "examples/dsa_sparse_finetune", flops_of(case), step)

    return make_peer(TILELANG, make, exact, run.device)


def measure(case, run):
    lines, wrong = check_small(replace(case, length=min(case.length, SMALL)), run.device)
    release_memory()
    tensors = make_tensors(case, run.device)
    exact = ExactRows(tensors, case, some_rows(case, run.device))
    methods, launches = ours(tensors, case)
    for method in methods:
        method.examine(exact, run.device)
    naive_code = make_peer(NAIVE, lambda: naive(tensors, case), exact, run.device)
    methods.append(naive_code)
    if run.given.tilelang:
        methods.append(make_tilelang(tensors, case, exact, run))

    def compared(method, name):
        naive_ratio = "" if method is naive_code else ratio(naive_code.ms(name), method.ms(name), ".4g")
        return {"naive_ratio": naive_ratio} | ({"extra_bytes": ""} if name == FORWARD else {})  # it is that of a step

    result = run.time(methods, compared)
    result.lines += lines + launches
    result.wrong += wrong
    return result
