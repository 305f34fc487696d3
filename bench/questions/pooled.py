"""Times indexers of blocks with a pooled teacher, compared with the KL forward of the teacher's shape.

    bench/run.py pooled                                  # 32/8 heads of 128, blocks of 64 keys, N = 8192 and 131072
    bench/run.py pooled --only 'N=8192'                  # one of the lengths
    bench/run.py pooled --top-blocks 32                  # lists of blocks
    bench/run.py pooled --csv bench/results/pooled.csv   # appends the results

    KL forward       attention of the teacher's heads, 32/8 on both sides: two products per pair
    QSA              the mean of the heads, then the largest key of each complete block (Qwen QSA)
    SeerAttention-R  the largest head, then the largest key of each earlier block
    mass             the mean of the heads, then the sum of the keys of each visible block

A step is a forward, whose LSEs and sum of M normalize the target, and a one-pass call. Passes ending in `lse_t computed`
begin without the teacher's LSE. kl_ratio divides by the KL forward of the same run, and 16 rows of every problem are
compared with float64.
"""

from dataclasses import dataclass, replace

import torch

from harness.attention import Shape, prepared_calls
from harness.library import FORWARD, STEP, address, addresses, lib
from harness.method import Method, time_methods
from harness.report import ratio, rounded
from harness.run import Result
from harness.timing import release_memory
from questions.indexer import ExactRows, IndexerCalls, IndexerCase, some_rows, wrong_of
from streamkl._problem import POOL_BLOCKS, POOL_HEADS, POOLS
from streamkl.reference import Pooling

CASE_COLUMNS = "length heads key_heads dim index_heads index_dim block top_blocks mask".split()
COLUMNS = [
    *"date gpu torch commit case".split(), *CASE_COLUMNS,
    *"method kernel pass ms fastest_ms kl_ratio tflops extra_bytes kl_error dq_error dk_error dw_error note".split(),
]  # fmt: skip
SHOWN = "method pass ms fastest_ms kl_ratio tflops extra_bytes kl_error dq_error dw_error".split()
KL, COMPUTED = "KL forward", ", lse_t computed"


@dataclass(frozen=True)
class PooledCase(IndexerCase):
    """One sequence and one student head of `index_heads`, which has a key per block."""

    block: int = 64
    top_blocks: int = 0  # 0: all blocks
    pooling: Pooling = Pooling()

    @property
    def name(self):
        sparse = f", {self.top_blocks} blocks of" if self.top_blocks else ", blocks of"
        return f"N={self.length} {self.mask}{sparse} {self.block}"

    @property
    def keys_s(self):
        return self.length // self.block if self.pooling.blocks == "complete" else -(-self.length // self.block)

    @property
    def problem(self):
        kind, size = self.pooling.pool
        return dict(
            pool=POOLS.index(kind), pool_size=size, pool_heads=POOL_HEADS.index(self.pooling.heads),
            pool_blocks=POOL_BLOCKS.index(self.pooling.blocks),
        )  # fmt: skip

    def flops(self, operation):
        """The teacher's logits, once; those of the student and its gradients are small."""
        keys = min(self.top_blocks * self.block or self.length, self.length)
        n, pairs = self.length, keys * (keys + 1) // 2 + (self.length - keys) * keys
        return 2 * (pairs if self.causal else n * keys) * self.heads * self.dim


def teachers(block):
    return {
        "QSA": Pooling(("max", block), "mean", "complete"),
        "SeerAttention-R": Pooling(("max", block), "max", "earlier"),
        "mass": Pooling(("sum", block), "mean", "visible"),
    }


def add_options(parser):
    parser.add_argument("--block", type=int, default=64, metavar="N", help="keys of a block; default 64")
    parser.add_argument("--top-blocks", type=int, default=0, metavar="N", help="blocks of a row's list; default 0: all")
    parser.add_argument("--index-heads", type=int, default=1, metavar="N", help="index heads; default 1")
    parser.add_argument("--full", dest="causal", action="store_false", help="every row attends to every key")
    parser.set_defaults(sample_ms=600)


def cases(given):
    for name in "block", "index_heads":
        if getattr(given, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(given, name)}: must be at least 1")
    if given.top_blocks < 0:
        raise ValueError(f"--top-blocks={given.top_blocks}: must be at least 0")
    return [
        PooledCase(length, 32, 8, 128, given.index_heads, 128, given.top_blocks, given.causal, given.block, given.top_blocks)
        for length in (8192, 131072)
    ]


def columns_of(case):
    return {"case": case.name} | {name: getattr(case, name) for name in CASE_COLUMNS}


def block_indices(case, device):
    """top_blocks of the blocks before each row, evenly spread; -1 where there are fewer."""
    rows = torch.arange(case.length, device=device)
    count = (rows + 1) // case.block if case.causal else torch.full_like(rows, case.keys_s)
    n = torch.arange(case.top_blocks, device=device)
    spread = n * count[:, None].clamp(min=case.top_blocks) // case.top_blocks
    return torch.where(spread < count[:, None], spread, -1).int()[None, None].contiguous()


def make_tensors(case, device):
    """{name: tensor}: as questions.indexer has them, with a key of the student per block."""

    def normal(heads, length, dim, dtype=torch.bfloat16):
        return torch.randn((1, heads, length, dim), device=device, dtype=dtype)

    tensors = dict(
        q_t=normal(case.heads, case.length, case.dim), k_t=normal(case.key_heads, case.length, case.dim),
        q_s=normal(case.index_heads, case.length, case.index_dim), k_s=normal(1, case.keys_s, case.index_dim),
        w_s=normal(1, case.length, case.index_heads, torch.float32),
    )  # fmt: skip
    return tensors | ({"indices": block_indices(case, device)} if case.top_blocks else {})


class PooledCalls(IndexerCalls):
    """A forward normalizes the target: the one-pass call of a step takes its LSEs, whether the teacher's are given or not."""

    def __init__(self, tensors, case, given_lse_t=None):
        super().__init__(tensors, case)
        self.mass = torch.empty_like(self.lse_s)
        inputs = addresses(tensors)
        lses = addresses(dict(lse_t=self.lse_t, lse_s=self.lse_s))
        known = {} if given_lse_t is None else addresses(dict(lse_t=given_lse_t))
        kl, gradients = self.calls[STEP][1][2:]
        forward = lib.pack_inputs(**inputs, **known)
        self.calls = {
            FORWARD: [(lib.FORWARD, forward, kl)],
            STEP: [
                (lib.FORWARD, forward, lib.pack_rows(mass=address(self.mass), **lses)),
                (lib.FORWARD_BACKWARD, lib.pack_inputs(**inputs, **lses), kl, gradients),
            ],
        }

    def teacher_lse(self):
        """The teacher's own LSEs, after a step. Rows without blocks have none."""
        return torch.where(self.mass > 0, self.lse_t - self.mass.log(), 0.0)


def ours(name, case, device, exact_rows=16):
    """The forward and the step of a teacher, with its LSE given and without."""
    tensors = make_tensors(case, device)
    exact = ExactRows(tensors, case, some_rows(case, device, exact_rows))
    alone = PooledCalls(tensors, case)
    alone.run(STEP)
    lse_t = alone.teacher_lse()
    known = PooledCalls(tensors, case, lse_t)
    calls = known.timed([FORWARD, STEP]) | {
        one + COMPUTED: call for one, call in alone.timed([FORWARD, STEP]).items()
    }

    def step():
        fresh = PooledCalls(tensors, case, lse_t)
        fresh.run(STEP)
        return fresh.results()

    method = Method(name, known.kernels(STEP), calls, dict.fromkeys(calls, case.flops(STEP)), step, known.explain(STEP))
    method.examine(exact, device)
    return method


def kl_forward(case, device):
    shape = Shape("", length=case.length, causal=case.causal)
    calls = prepared_calls(shape, device)
    return Method(KL, calls.kernels(FORWARD), calls.timed([FORWARD]), {FORWARD: shape.flops(FORWARD)})


def measure(case, run):
    result = Result()
    methods = [kl_forward(case, run.device)]
    for name, pooling in teachers(case.block).items():
        methods.append(ours(name, replace(case, pooling=pooling), run.device))
        result.wrong += wrong_of(methods[-1])
        result.lines += [f"{name}: {line}" for line in methods[-1].explanation.splitlines()]
        release_memory()
    time_methods(methods, run.device, run.given.rounds, run.given.sample_ms)
    result.wrong += [f"{method.name} failed: {method.refusal}" for method in methods if method.refusal]
    base = methods[0].ms(FORWARD)
    for method in methods:
        for name in method.timings:
            row = columns_of(case) | method.row(name) | {"kl_ratio": rounded(ratio(method.ms(name), base), ".3f")}
            result.rows.append(row | {"extra_bytes": method.extra_bytes})
    return result
