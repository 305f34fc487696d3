"""Times the loss that trains a sparse attention's indexer compared with naive code, and checks the results.

    bench/run.py indexer                                  # 8192 tokens, 64 teacher heads of 128, 32 index heads of 128
    bench/run.py indexer --length 131072 --no-naive       # the naive code would run out of memory
    bench/run.py indexer --top-k 2048                     # sparse
    bench/run.py indexer --key-heads 1 --dim 576          # latent attention
    bench/run.py indexer --csv bench/results/indexer.csv  # appends the results
    bench/run.py indexer --top-k 2048 --key-heads 1 --dim 576 --tilelang DIR   # compared with TileLang's example

    streamkl       the C library, with the teacher's LSE as its attention has returned it
    no LSE given   the same, which computes that LSE first
    naive          unfused training code: bf16 einsum to [heads, N, N] teacher scores, f32 softmax, mean over heads;
                   [index heads, N, N] dot products, ReLU, weights, sum; KL in log space; autograd. Sparse: gathers the keys
                   of each row, for as many rows at once as 4 GiB of teacher keys allow
    tilelang       the kernels of TileLang's examples/dsa_sparse_finetune in DIR: the target and the gradients, without a
                   KL, with the softmax of the index logits given
    cudnn          scaled_dot_product_attention by cuDNN, 16 heads of 128, N = 8192: the rate that this GPU reaches

TFLOP/s count the work that the loss requires for visible pairs: 2 dim per teacher head, 2 dim per index head, and for the
gradients the latter again for dq and for dk. Recomputation does not count.

Loss and all gradients of a problem of 1000 tokens, and 16 rows of the large one, are compared with float64. The naive code,
run in float64, must agree to the last digits.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from harness.attention import WRONG, Shape, random_tensors, relative_error
from harness.library import DTYPES, FORWARD, STEP, Calls, address, addresses, lib
from harness.method import PEER_WRONG, Method, make_peer, refusing, time_methods
from harness.report import bytes_text, errors_text, ratio, rounded
from harness.run import Result
from harness.timing import release_memory
from peers.attention import cudnn_version, sdpa
from peers.tilelang_dsa import ENTRY, TILELANG, tilelang_step
from streamkl import reference
from streamkl._problem import DK_S, DQ_S, DW_S, INDEXER

CASE_COLUMNS = "length heads key_heads dim index_heads index_dim top_k mask".split()
COLUMNS = [
    *"date gpu torch commit method kernel pass".split(), *CASE_COLUMNS,
    *"ms fastest_ms tflops of_cudnn_causal of_cudnn_full naive_ratio extra_bytes kl_error dq_error dk_error dw_error note".split(),
]  # fmt: skip
SHOWN = (
    "method kernel pass ms fastest_ms tflops of_cudnn_causal of_cudnn_full naive_ratio extra_bytes kl_error dq_error dw_error note"
).split()
STREAMKL, NAIVE, CUDNN = "streamkl", "naive", "cudnn"
SMALL = 1000  # queries and keys of the problem that is checked completely
# The naive code must compute the same: approximately in bf16, to the last digits in float64.
LIMITS = {"naive": dict.fromkeys(WRONG, PEER_WRONG), "naive, f64": dict.fromkeys(WRONG, 1e-12)}


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

    problem = {}  # fields of the problem besides shapes and masks
    pooling = reference.Pooling()

    def __str__(self):
        return self.name

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
    def pairs(self):
        """Visible query-key pairs."""
        n, k = self.length, min(self.top_k or self.length, self.length)
        return k * (k + 1) // 2 + (n - k) * k if self.causal else n * k

    def flops(self, operation):
        """Work that the loss requires: the logits once, and dq and dk for the gradients."""
        products = 1 if operation == FORWARD else 3
        return 2 * self.pairs * (self.heads * self.dim + products * self.index_heads * self.index_dim)


def add_options(parser):
    parser.add_argument("--length", type=int, default=8192, metavar="N", help="queries and keys; default 8192")
    parser.add_argument("--heads", type=int, default=64, metavar="N", help="teacher heads; default 64")
    parser.add_argument("--key-heads", type=int, default=0, metavar="N", help="teacher key heads; default: the same")
    parser.add_argument("--dim", type=int, default=128, metavar="N", help="size of a teacher head; default 128")
    parser.add_argument("--index-heads", type=int, default=32, metavar="N", help="index heads; default 32")
    parser.add_argument("--index-dim", type=int, default=128, metavar="N", help="size of an index head; default 128")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="sparse: keys per row; default 0: all")
    parser.add_argument("--full", dest="causal", action="store_false", help="every row attends to every key")
    parser.add_argument("--tilelang", type=Path, metavar="DIR", help=f"also time TileLang's example: DIR has {ENTRY}")
    parser.add_argument("--no-naive", action="store_true", help="leave the naive code out")
    parser.set_defaults(sample_ms=600)


def cases(given):
    for name in "length heads dim index_heads index_dim".split():
        if getattr(given, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(given, name)}: must be at least 1")
    if given.top_k < 0:
        raise ValueError(f"--top-k={given.top_k}: must be at least 0")
    if given.key_heads < 0 or given.heads % (given.key_heads or 1):
        raise ValueError(f"--key-heads={given.key_heads}: must divide --heads={given.heads}")
    if given.tilelang and not (given.tilelang / ENTRY).is_file():
        raise ValueError(f"--tilelang={given.tilelang}: must be TileLang's examples/dsa_sparse_finetune, with {ENTRY}")
    teacher, indexer = (given.heads, given.key_heads or given.heads, given.dim), (given.index_heads, given.index_dim)
    return [IndexerCase(given.length, *teacher, *indexer, given.top_k, given.causal)]


def columns_of(case):
    return {name: getattr(case, name) for name in CASE_COLUMNS}


# ---- Tensors -------------------------------------------------------------------------------------------------------


def make_tensors(case, device):
    """{name: tensor}: bf16 [1, heads, length, dim]; w_s f32 [1, 1, length, index heads]; indices [1, 1, length, top_k]."""

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


# ---- Ours ----------------------------------------------------------------------------------------------------------


class IndexerCalls(Calls):
    """The forward and the cheapest step, with the teacher's LSE given or computed, and their results."""

    def __init__(self, tensors, case, lse_t=None):
        q_s, k_s, w_s, device = tensors["q_s"], tensors["k_s"], tensors["w_s"], tensors["q_s"].device
        bf16, f32 = DTYPES["bf16"][0], DTYPES["f32"][0]
        super().__init__(
            device, dtype_t=bf16, dtype_s=bf16, dtype_w=f32, gradients=DQ_S | DK_S | DW_S,
            causal=case.causal, batch=1, len_q=case.length, len_k=case.length, heads_t=case.heads, heads_s=1,
            key_heads_t=case.key_heads, key_heads_s=1, dim_t=case.dim, dim_s=case.index_dim, student=INDEXER,
            index_heads=case.index_heads, top_k=tensors["indices"].shape[-1] if case.top_k else 0, **case.problem,
        )  # fmt: skip
        self.tensors = tensors  # kept: the structs hold only addresses

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
            STEP: [
                (lib.FORWARD, inputs, unknown),
                (lib.FORWARD_BACKWARD, lib.pack_inputs(**given, **lses), kl, gradients),
            ],
        }

    def results(self):
        return {"kl": self.kl[0, 0], "dq": self.dq, "dk": self.dk, "dw": self.dw}


def flops_of(case):
    return {name: case.flops(name) for name in (FORWARD, STEP)}


def ours(tensors, case):
    """Two methods: with the LSE that the teacher's attention returns, and without it."""
    alone = IndexerCalls(tensors, case)
    alone.run(STEP)
    lse_t = alone.lse_t.clone()
    methods = []
    for name, calls, known in (STREAMKL, IndexerCalls(tensors, case, lse_t), lse_t), ("no LSE given", alone, None):

        def step(known=known):
            fresh = IndexerCalls(tensors, case, known)
            fresh.run(STEP)
            return fresh.results()

        timed = calls.timed([FORWARD, STEP])
        methods.append(Method(name, calls.plan.kernel, timed, flops_of(case), step, calls.explain(STEP)))
    return methods


# ---- Naive code ----------------------------------------------------------------------------------------------------


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


def naive(tensors, case, name=NAIVE):
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

    return Method(name, f"PyTorch {torch.__version__}", {FORWARD: forward, STEP: step}, flops_of(case), step)


# ---- Attention, for comparison -------------------------------------------------------------------------------------


def cudnn_rate(device, heads=16, length=8192, dim=128):
    """Forward of scaled_dot_product_attention by cuDNN with either mask."""
    method = Method(CUDNN)
    with refusing(method):
        shapes = [
            Shape("", heads, heads, dim, heads, heads, dim, length=length, causal=causal) for causal in (True, False)
        ]
        q, k, v, _ = random_tensors(shapes[0], device).values()
        method.kernel = f"{cudnn_version()}, {heads} heads of {dim}, N={length}"
        for shape in shapes:
            name = f"forward, {shape.mask}"
            method.calls[name] = lambda causal=shape.causal: sdpa(q, k, v, causal, "CUDNN_ATTENTION")
            method.flops[name] = shape.flops(FORWARD)
            method.calls[name]()
    return method


# ---- Exact results -------------------------------------------------------------------------------------------------


class ExactRows:
    """KL, dq and dw of some rows in float64, which depend on no other row. With all rows also dk."""

    def __init__(self, tensors, case, rows):
        q_t, q_s, w_s = (tensors[name][0][:, rows].double() for name in ("q_t", "q_s", "w_s"))
        k_t, k_s = (tensors[name][0].double() for name in ("k_t", "k_s"))
        self.rows, is_whole = rows, len(rows) == case.length
        trained = [tensor.requires_grad_() for tensor in (q_s, k_s, w_s)]
        indices = tensors["indices"][0][:, rows] if case.top_k else None
        keys = torch.arange(case.length, device=q_t.device)
        visible = (
            keys <= rows[:, None] if case.causal else torch.ones_like(keys, dtype=torch.bool).expand(len(rows), -1)
        )
        options = (None, None, 0.0, True, False, case.pooling)  # scales, softcap, relu, reverse
        exact = reference.sequence_indexer_kl(q_t, k_t, *trained, indices, None, visible, *options)
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


def wrong_of(method):
    limits = LIMITS.get(method.name, WRONG)
    found = method.errors.items()
    return [f"{method.name}: {name} is off by {error:.1e}" for name, error in found if not error <= limits[name]]


# ---- Measuring -----------------------------------------------------------------------------------------------------


def check_small(case, device):
    """(lines, what is wrong): loss and all gradients of StreamKL and of the naive code, compared with float64."""
    tensors = make_tensors(case, device)
    exact = ExactRows(tensors, case, torch.arange(case.length, device=device))
    in_float64 = {name: tensor if name == "indices" else tensor.double() for name, tensor in tensors.items()}
    lines, wrong = [], []
    for method in [*ours(tensors, case), naive(tensors, case), naive(in_float64, case, "naive, f64")]:
        method.errors = exact.errors(method.step())
        lines.append(f"N={case.length}, {method.name}: {errors_text(method.errors)}")
        wrong += wrong_of(method)
    return lines, wrong


def make_naive(tensors, case, exact, run):
    """If it is left out, or out of memory, the table says so."""
    rows, keys = rows_together(case), min(case.top_k or case.length, case.length)
    size = bytes_text(4 * case.heads * rows * keys)
    scores = f"its teacher scores alone, [{case.heads}, {rows}, {keys}] in f32, are {size}"
    if run.given.no_naive:
        return Method(NAIVE, refusal=f"--no-naive; {scores}")
    method = make_peer(NAIVE, lambda: naive(tensors, case), exact, run.device)
    if method.refusal.startswith("OutOfMemoryError"):
        method.refusal = f"out of memory; {scores}. {method.refusal}"
    return method


def make_tilelang(tensors, case, exact, run):
    def make():
        calls = IndexerCalls(tensors, case)
        calls.run(STEP)
        step = tilelang_step(run.given.tilelang, case, tensors, calls.lse_t)
        return Method(TILELANG, "examples/dsa_sparse_finetune", {STEP: step}, flops_of(case), step)

    return make_peer(TILELANG, make, exact, run.device)


def rows_of(methods, case):
    """One row per method and pass, and one per method that was not measured. cuDNN's rows have no shape."""
    by_name = {method.name: method for method in methods}
    for method in methods:
        for name in method.timings:
            row, mine = method.row(name), method.flops[name] / method.ms(name)
            if method.name != CUDNN:
                row |= columns_of(case)
                for mask in "causal", "full":
                    theirs = by_name[CUDNN].ms(f"forward, {mask}") if CUDNN in by_name else None
                    rate = by_name[CUDNN].flops[f"forward, {mask}"] / theirs if theirs else None
                    row[f"of_cudnn_{mask}"] = rounded(ratio(mine, rate), ".3f")
            if method.name not in (CUDNN, NAIVE):
                row["naive_ratio"] = rounded(ratio(by_name[NAIVE].ms(name), method.ms(name)), ".4g")
            yield row | ({"extra_bytes": method.extra_bytes} if name == STEP else {})
        if method.refusal:
            yield columns_of(case) | {"method": method.name, "note": f"not measured: {method.refusal}"}


def measure(case, run):
    result = Result()
    result.lines, result.wrong = check_small(replace(case, length=min(case.length, SMALL)), run.device)
    release_memory()
    tensors = make_tensors(case, run.device)
    exact = ExactRows(tensors, case, some_rows(case, run.device))
    methods = ours(tensors, case)
    for method in methods:
        method.examine(exact, run.device)
        result.wrong += wrong_of(method)
    result.lines += dict.fromkeys(line for method in methods for line in method.explanation.splitlines())
    methods += [make_naive(tensors, case, exact, run), cudnn_rate(run.device)]
    if run.given.tilelang:
        methods.append(make_tilelang(tensors, case, exact, run))
    release_memory()
    time_methods(methods, run.device, run.given.rounds, run.given.sample_ms)
    result.wrong += [f"{method.name} failed: {method.refusal}" for method in methods[:2] if method.refusal]
    result.rows = list(rows_of(methods, case))
    return result
