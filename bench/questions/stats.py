"""Times statistics of one attention compared with the KL forward and with what PyTorch offers for sums over rows.

    KL forward    skl_forward of two such attentions: two products and two exponentials per pair
    statistics    key_sum, entropy, max_logit and expected_distance of one, from its LSE
    with LSE      the same without an LSE given, which a first pass computes
    top 64        keys and probabilities of the 64 largest of each row
    SDPA dV       gradients of scaled_dot_product_attention by cuDNN for dO = 1: every column of dV has the sums of the keys
    FlexAttention the sums of keys as an attention with queries and keys exchanged, whose score subtracts the LSE: the
                  LSE that it returns is the logarithm of the sum

Sums of keys, entropies and the largest probabilities of the first head are compared with float64 up to 8192 tokens, the
sums of FlexAttention, too. cuDNN and FlexAttention have expanded key heads, outside of the time.
"""

import torch

from harness.attention import WRONG, Shape, random_tensors, relative_error
from harness.library import Calls, addresses, lib
from harness.report import ratio, too_large
from harness.run import PEER_WRONG, methods_of
from harness.timing import Prepared
from peers.attention import flex_attend, leaves_of, sdpa

KL, STATS, WITH_LSE, TOP = "KL forward", "statistics", "with LSE", "top 64"
SDPA, FLEX = "SDPA dV", "FlexAttention"
COLUMNS = "date gpu torch commit case length mask heads key_heads dim dtype method ms fastest_ms kl_ratio extra_bytes note".split()
TOP_K, CHECKED_LENGTH = 64, 8192


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


def cases(given):
    return CASES


class StatsCalls(Calls):
    """One set of random tensors, and the calls on it."""

    def __init__(self, shape, device):
        self.shape, self.tensors = shape, random_tensors(shape, device)
        super().__init__(self.tensors, gradients=0, causal=shape.causal)
        rows = torch.empty(self.tensors["q_s"].shape[:3], device=device)
        names = "kl lse_t lse_s entropy max_logit expected_distance key_sum".split()
        self.rows = {name: rows.clone() for name in names}
        top_p = rows.new_empty((*rows.shape, TOP_K))
        self.top = {"top_keys": torch.empty_like(top_p, dtype=torch.int32), "top_p": top_p}
        given, row = addresses(self.tensors), addresses(self.rows)
        known, unknown = lib.pack_inputs(**given, lse_s=row["lse_s"]), lib.pack_inputs(**given)

        def some(*names):
            return {name: row[name] for name in names}

        every = lib.pack_stats(**some("entropy", "max_logit", "expected_distance", "key_sum"))
        self.calls = {
            KL: [(lib.FORWARD, unknown, lib.pack_rows(**some("kl", "lse_t", "lse_s")))],
            STATS: [(lib.ATTENTION_STATS, known, every)],
            WITH_LSE: [(lib.ATTENTION_STATS, unknown, every)],
            TOP: [(lib.ATTENTION_STATS, known, lib.pack_stats(top_k=TOP_K, **addresses(self.top)))],
        }
        self.run(KL)

    def wrong(self, flex_sums):
        """What is wrong with the results of the first head, compared with float64."""
        q, k = (self.tensors[name][0, 0].double() for name in ("q_s", "k_s"))
        logits = q @ k.mT * self.shape.dim_s**-0.5
        if self.shape.causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        self.run(TOP)
        self.run(STATS)
        errors = {
            "key_sum": relative_error(self.rows["key_sum"][0, 0], p.sum(0)),
            "entropy": relative_error(self.rows["entropy"][0, 0], -(p * log_p.clamp(min=-1e30)).sum(-1)),
            "top_p": relative_error(self.top["top_p"][0, 0], p.topk(TOP_K, -1).values),
            FLEX: relative_error(flex_sums[0, 0], p.sum(0)),
        }
        return too_large(errors, dict.fromkeys(errors, WRONG) | {FLEX: PEER_WRONG})


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
    calls = StatsCalls(shape, run.device)
    timed = calls.timed(calls.calls)
    if shape.length * shape.heads_s <= 131072 * 32:
        timed[SDPA] = Prepared(lambda: sdpa_dv(calls))
    if shape.length <= 131072:
        timed[FLEX] = flex(calls)
    wrong = calls.wrong(timed[FLEX]().exp()) if shape.length <= CHECKED_LENGTH else []
    methods = methods_of(timed, peers=(SDPA, FLEX))
    for method in methods:
        method.extra_bytes = calls.workspace_bytes(method.name) if method.name in calls.calls else 0
    result = run.time(methods, lambda method, name: {"kl_ratio": ratio(method.ms(name), methods[0].ms(name), ".3f")})
    result.wrong += wrong
    return result
