"""Times statistics of one attention compared with the KL forward and with what PyTorch offers for sums over rows.

    bench/run.py stats                                 # all cases
    bench/run.py stats --only N=8192                   # shapes whose name contains the text
    bench/run.py stats --csv bench/results/stats.csv   # appends the results

    KL forward    skl_forward of two such attentions: two products and two exponentials per pair
    statistics    key_sum, entropy, max_logit and expected_distance of one, from its LSE
    with LSE      the same without an LSE given, which a first pass computes
    weighted      the same as `statistics`, with row weights, and key_max
    top 64        keys and probabilities of the 64 largest of each row
    SDPA dV       gradients of scaled_dot_product_attention by cuDNN for dO = 1, whose dV has the sum of each key in every column
    FlexAttention the sums of keys as an attention with queries and keys exchanged, whose score subtracts the LSE

Sums of keys and entropies of the first head are compared with float64 up to 8192 tokens, those of FlexAttention, too.
cuDNN and FlexAttention have expanded key heads, outside of the time. FlexAttention returns a normalized output and its
LSE, which is the logarithm of the sum.
"""

import torch

from harness.attention import Shape, problem_of, random_tensors
from harness.library import Calls, address, addresses, lib
from harness.method import PEER_WRONG
from harness.report import ratio, rounded, times_of
from harness.run import Result
from harness.timing import failures
from peers.attention import flex_attend, leaves_of, sdpa

KL, STATS, WITH_LSE, WEIGHTED, TOP, SDPA, FLEX = (
    "KL forward", "statistics", "with LSE", "weighted", "top 64", "SDPA dV", "FlexAttention"
)  # fmt: skip
OURS = KL, STATS, WITH_LSE, WEIGHTED, TOP
COLUMNS = "date gpu torch commit case length mask heads key_heads dim dtype method ms fastest_ms kl_ratio extra_bytes note".split()
SHOWN = "method ms fastest_ms kl_ratio extra_bytes".split()
TOP_K, CHECKED_LENGTH = 64, 8192
WRONG = 1e-4  # relative


def case(name, dim=128, **others):
    return Shape(name, dim_t=dim, dim_s=dim, **others)


CASES = [
    case("N=8192, causal"),
    case("N=8192, full", causal=False),
    case("N=8192, causal, heads of 64", dim=64),
    case("N=8192, causal, heads of 256", dim=256, heads_t=16, heads_s=16),
    case("N=2048, causal, B=8", length=2048, batch=8),
    case("N=131072, causal", length=131072),
    case("N=1048576, causal, 1/1 head", length=1048576, heads_t=1, heads_s=1, key_heads_t=1, key_heads_s=1),
]


def add_options(parser):
    pass


def cases(given):
    return CASES


class StatsCalls(Calls):
    """One set of random tensors, and the calls on it."""

    def __init__(self, shape, device):
        super().__init__(device, gradients=0, **problem_of(shape))
        self.shape, self.tensors = shape, random_tensors(shape, device)
        rows = torch.empty(self.tensors["q_s"].shape[:3], device=device)
        self.rows = {name: rows.clone() for name in ("kl", "lse_t", "lse_s", "entropy", "max_logit", "expected_distance")}
        self.keys = {name: rows.clone() for name in ("key_sum", "key_max")}
        self.weight = torch.rand_like(rows)
        self.top = {"top_keys": rows.new_empty((*rows.shape, TOP_K), dtype=torch.int32), "top_p": rows.new_empty((*rows.shape, TOP_K))}
        given, row = addresses(self.tensors), addresses(self.rows)
        known, unknown = lib.pack_inputs(**given, lse_s=row["lse_s"]), lib.pack_inputs(**given)
        of_rows = {name: row[name] for name in ("entropy", "max_logit", "expected_distance")}
        key_sum = address(self.keys["key_sum"])
        every = lib.pack_stats(key_sum=key_sum, **of_rows)
        weighted = lib.pack_stats(row_weights=address(self.weight), **addresses(self.keys), **of_rows)
        self.calls = {
            KL: [(lib.FORWARD, unknown, lib.pack_rows(**{name: row[name] for name in ("kl", "lse_t", "lse_s")}))],
            STATS: [(lib.ATTENTION_STATS, known, every)],
            WITH_LSE: [(lib.ATTENTION_STATS, unknown, every)],
            WEIGHTED: [(lib.ATTENTION_STATS, known, weighted)],
            TOP: [(lib.ATTENTION_STATS, known, lib.pack_stats(top_k=TOP_K, **addresses(self.top)))],
        }
        self.run(KL)

    def errors(self, flex_sums=None):
        """[what is wrong] with the key sums and entropies of the first head, compared with float64"""
        q, k = (self.tensors[name][0, 0].double() for name in ("q_s", "k_s"))
        logits = q @ k.mT * self.shape.dim_s**-0.5
        if self.shape.causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        values = p.topk(TOP_K, -1).values
        self.run(TOP)
        self.run(STATS)
        off = {
            "key_sum": (self.keys["key_sum"][0, 0], p.sum(0)),
            "entropy": (self.rows["entropy"][0, 0], -(p * log_p.clamp(min=-1e30)).sum(-1)),
            "top_p": (self.top["top_p"][0, 0], values),
        }
        limits = dict.fromkeys(off, WRONG)
        if flex_sums is not None:
            off[FLEX], limits[FLEX] = (flex_sums[0, 0], p.sum(0)), PEER_WRONG
        errors = {name: ((got.double() - exact).norm() / exact.norm()).item() for name, (got, exact) in off.items()}
        return [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= limits[name]]


def sdpa_dv(calls):
    """A call that computes dv for dO = 1, and dq and dk, which no backend leaves out."""
    shape, group = calls.shape, calls.shape.heads_s // calls.shape.key_heads_s
    q, k = (calls.tensors[name] for name in ("q_s", "k_s"))
    q, k, v = leaves_of(q, *(2 * [k.repeat_interleave(group, 1)]))
    output = sdpa(q, k, v, shape.causal, "CUDNN_ATTENTION")
    ones = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, v, ones, retain_graph=True)


def flex(calls):
    """A call that computes the logarithms of the sums of keys: keys are its queries."""
    shape, group = calls.shape, calls.shape.heads_s // calls.shape.key_heads_s
    q, k, lse = calls.tensors["q_s"], calls.tensors["k_s"].repeat_interleave(group, 1), calls.rows["lse_s"]

    def minus_lse(score, b, h, key, query):
        return score - lse[b, h, query]

    visible = (lambda b, h, key, query: query >= key) if shape.causal else None
    attend = flex_attend(visible, shape.length, q.device, minus_lse)
    return lambda: attend(k, q, q)[1]


def measure(shape, run):
    result, calls = Result(), StatsCalls(shape, run.device)
    methods = calls.timed(OURS)
    if shape.length * shape.heads_s <= 131072 * 32:
        methods[SDPA] = sdpa_dv(calls)
    if shape.length <= 131072:
        methods[FLEX] = flex(calls)
    if shape.length <= CHECKED_LENGTH:
        result.wrong += calls.errors(methods[FLEX]().exp())
    timings = run.time(methods)
    ms = {method: timing.median for method, timing in timings.items()}
    result.wrong += failures({method: timing for method, timing in timings.items() if method in OURS})
    for method, timing in timings.items():
        row = {
            "case": shape.name, "length": shape.length, "mask": shape.mask, "heads": shape.heads_s,
            "key_heads": shape.key_heads_s, "dim": shape.dim_s, "dtype": shape.dtype_s, "method": method,
        }  # fmt: skip
        row |= times_of(timing) | {"kl_ratio": rounded(ratio(ms[method], ms.get(KL)), ".3f")}
        operations = [operation for operation, *_ in calls.calls.get(method, [])]
        row["extra_bytes"] = calls.plan.workspace_sizes[operations[0]] if operations else ""
        result.rows.append(row)
    return result
