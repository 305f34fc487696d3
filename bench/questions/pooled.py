"""Times indexers of blocks with a pooled teacher, compared with the KL forward of the teacher's shape.

    bench/run.py pooled                                  # 32/8 heads of 128, blocks of 64 keys, N = 8192 and 131072
    bench/run.py pooled --only 'N=8192'                  # one of the lengths
    bench/run.py pooled --top-blocks 32                  # lists of blocks

    KL forward       attention of the teacher's heads, 32/8 on both sides: two products per pair
    QSA              the mean of the heads, then the largest key of each complete block (Qwen QSA)
    SeerAttention-R  the largest head, then the largest key of each earlier block
    mass             the mean of the heads, then the sum of the keys of each visible block

A step is a one-pass call; methods ending in `no LSE given` begin without the teacher's LSE. kl_ratio divides by the KL
forward of the same run, and 16 rows of every problem are compared with float64.
"""

from dataclasses import dataclass, replace

import torch

from harness.attention import Shape, prepared_calls
from harness.library import FORWARD
from harness.options import add_numbers, check_least
from harness.report import ratio
from harness.run import Method
from harness.timing import release_memory
from questions.indexer import NO_LSE, ExactRows, IndexerCase, make_tensors, ours, some_rows
from streamkl._problem import POOL_BLOCKS, POOL_HEADS, POOLS
from streamkl.reference import Pooling

COLUMNS = (
    "date gpu torch commit case length heads key_heads dim index_heads index_dim block top_blocks mask method kernel pass ms"
    " fastest_ms kl_ratio tflops extra_bytes kl_error dq_error dk_error dw_error note"
).split()
KL = "KL forward"


@dataclass(frozen=True)
class PooledCase(IndexerCase):
    """One sequence and one student head of `index_heads`, which has a key per block; top_k counts blocks."""

    block: int = 64
    pooling: Pooling = Pooling()

    @property
    def name(self):
        sparse = f", {self.top_blocks} blocks of" if self.top_blocks else ", blocks of"
        return f"N={self.length} {self.mask}{sparse} {self.block}"

    @property
    def top_blocks(self):
        return self.top_k

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

    def indices(self, device):
        """top_blocks of the blocks before each row, evenly spread; -1 where there are fewer."""
        rows = torch.arange(self.length, device=device)
        count = (rows + 1) // self.block if self.causal else torch.full_like(rows, self.keys_s)
        n = torch.arange(self.top_blocks, device=device)
        spread = n * count[:, None].clamp(min=self.top_blocks) // self.top_blocks
        return torch.where(spread < count[:, None], spread, -1).int()


def teachers(block):
    return {
        "QSA": Pooling(("max", block), "mean", "complete"),
        "SeerAttention-R": Pooling(("max", block), "max", "earlier"),
        "mass": Pooling(("sum", block), "mean", "visible"),
    }


def add_options(parser):
    add_numbers(
        parser,
        block=(64, "keys of a block"),
        top_blocks=(0, "blocks of a list, 0: all"),
        index_heads=(1, "index heads"),
    )
    parser.add_argument("--full", dest="causal", action="store_false", help="every row attends to every key")
    parser.set_defaults(sample_ms=600)


def cases(given):
    check_least(given, 1, "block index_heads")
    check_least(given, 0, "top_blocks")
    sizes = (32, 8, 128, given.index_heads, 128, given.top_blocks)
    return [PooledCase(length, *sizes, given.causal, given.block) for length in (8192, 131072)]


def examined(name, case, device, exact_rows=16):
    """(the two methods of a teacher, lines that name their launches)"""
    tensors = make_tensors(case, device)
    exact = ExactRows(tensors, case, some_rows(case, device, exact_rows))
    methods, launches = ours(tensors, case, (name, f"{name}, {NO_LSE}"))
    for method in methods:
        method.examine(exact, device)
    return methods, [f"{name}: {line}" for line in launches]


def measure(case, run):
    shape = Shape("", length=case.length, causal=case.causal)
    calls = prepared_calls(shape, run.device)
    forward = Method(KL, calls.timed([FORWARD]), calls.kernels(FORWARD), {FORWARD: shape.flops(FORWARD)})
    methods, lines = [forward], []
    for name, pooling in teachers(case.block).items():
        more, launches = examined(name, replace(case, pooling=pooling), run.device)
        methods += more
        lines += launches
        release_memory()
    result = run.time(methods, lambda method, name: {"kl_ratio": ratio(method.ms(name), forward.ms(FORWARD), ".3f")})
    result.lines += lines
    return result
