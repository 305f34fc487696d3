"""Shapes and passes of the benchmarks. Needs neither torch nor a GPU."""

from dataclasses import dataclass

FORWARD, BACKWARD, ONE_PASS = "forward", "backward", "one pass"
STEP = "forward + backward"
OPERATIONS = {FORWARD: 0, BACKWARD: 1, ONE_PASS: 2}  # skl_op
PEER_NAMES = "cudnn fa2 triton flex compile eager".split()
# A peer that is not in this repository: --linearard names a checkout with this file.
LINEARARD, LINEARARD_ENTRY = "linearard", "kernels/attention_KL/integration.py"


@dataclass(frozen=True)
class Case:
    heads: int
    length: int  # of every sequence; packed: of the longest sequence
    dim: int
    causal: bool
    key_heads: int = 0  # 0: the number of heads
    batch: int = 1
    packed: tuple = ()  # lengths of packed sequences

    def __str__(self):
        shared = f"/{self.keys}" if self.keys != self.heads else ""
        lengths = f"packed {'+'.join(map(str, self.packed))}" if self.packed else f"N={self.length}"
        batched = f"B={self.batch} " if self.batch > 1 else ""
        return f"{batched}H={self.heads}{shared} {lengths} d={self.dim} {self.mask}"

    @property
    def keys(self):
        return self.key_heads or self.heads

    @property
    def mask(self):
        return "causal" if self.causal else "full"

    @property
    def sequences(self):
        """[(batch index, first row, end)]"""
        if not self.packed:
            return [(index, 0, self.length) for index in range(self.batch)]
        ends = [sum(self.packed[: index + 1]) for index in range(len(self.packed))]
        return [(0, end - length, end) for length, end in zip(self.packed, ends)]

    @property
    def rows(self):
        return sum(self.packed) or self.length

    @property
    def pairs(self):
        """Visible query-key pairs, the unit of useful work."""
        lengths = [end - begin for _, begin, end in self.sequences]
        return self.heads * sum(n * (n + 1) // 2 if self.causal else n * n for n in lengths)

    def dense(self):
        """The same work without shared key heads and packing: as many sequences, all of the same length."""
        if not self.packed:
            return Case(self.heads, self.length, self.dim, self.causal, batch=self.batch)
        mean_square = sum(n * n for n in self.packed) / len(self.packed)
        length = max(128, round(mean_square**0.5 / 128) * 128)
        return Case(self.heads, length, self.dim, self.causal, batch=len(self.packed))


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

    def __str__(self):
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
