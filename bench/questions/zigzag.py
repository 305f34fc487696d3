"""The work of each rank of a context-parallel group, one after the other on one device: is it balanced?

    bench/run.py zigzag                                # 131072 tokens, 16 heads of 128, bf16, causal, 8 ranks
    bench/run.py zigzag --layout contiguous            # the layout that zigzag balances
    bench/run.py zigzag --device cpu --length 2048     # small, on the CPU, in f32

A rank computes its own query rows against the keys of all ranks, in the order of the sequence, as attention_kl does
between its collective calls; the ranks' key gradients are f32. Compared are the times of the ranks with each other
(balance: slowest / mean), and their sum with the unsplit call: what is added. `ordering` is what a rank adds around the
collective calls: the copies that bring keys into the order of the sequence, and their gradients back.

The sum of the ranks' losses and key gradients must be that of the unsplit call. The calls of a round are in another order
in every round, because a call that follows one of less power is faster.
"""

import statistics
from dataclasses import dataclass

import torch

from harness.library import ONE_PASS, STEP, lib
from harness.options import add_numbers
from harness.report import errors_text, ratio, too_large
from harness.run import Method
from streamkl._options import Lengths
from streamkl._problem import DK_S, DQ_S, Options
from streamkl.parallel._layout import Layout, gather_order, inverse_of
from streamkl.parallel._shards import Shards

OPS = torch.ops.streamkl
COLUMNS = "date gpu torch commit pass layout ranks method length heads key_heads dim mask ms fastest_ms of_unsplit note".split()
LIMITS = {"kl": 1e-5, "dq": 1e-2, "dk": 1e-2}  # dq and dk of the unsplit call are rounded to bf16


@dataclass(frozen=True)
class Case:
    operation: str  # the pass
    layout: str
    ranks: int
    length: int
    heads: int
    key_heads: int
    dim: int
    mask = "causal"

    @property
    def name(self):
        heads = f"{self.heads}/{self.key_heads} heads of {self.dim}"
        return f"{self.operation}, {self.layout}, {self.ranks} ranks, {self.length} tokens, {heads}"


def add_options(parser):
    add_numbers(
        parser,
        ranks=(8, "ranks"),
        length=(131072, "tokens of the sequence"),
        heads=(16, "query heads"),
        key_heads=(0, "key heads, 0: as many"),
        dim=(128, "head size"),
    )
    parser.add_argument("--layout", choices=["zigzag", "contiguous"], default="zigzag")
    parser.set_defaults(rounds=9, sample_ms=3000)


def cases(given):
    chunks = 2 * given.ranks if given.layout == "zigzag" else given.ranks
    if given.ranks < 1 or given.length < 1 or given.length % max(chunks, 1):
        raise ValueError(f"--length={given.length}: must be a multiple of {chunks} for --ranks={given.ranks}")
    heads = given.heads, given.key_heads or given.heads
    return [Case(name, given.layout, given.ranks, given.length, *heads, given.dim) for name in (STEP, ONE_PASS)]


class Split:
    """A causal sequence, whole and cut into the shards of all ranks."""

    def __init__(self, case, device):
        self.device, dtype = device, torch.float32 if device.type == "cpu" else torch.bfloat16
        shapes = [(1, case.length, count, case.dim) for count in (case.heads, case.key_heads) * 2]
        random = (torch.randn(shape, device=self.device, dtype=dtype) for shape in shapes)
        self.tensors = (*random, *[None] * 4)
        self.options = Options(gradients=DQ_S | DK_S, causal=True)
        self.no_lengths = Lengths(None, None, None, None, None)
        layout = Layout(case.layout, case.ranks)
        self.order = gather_order(layout, case.length // case.ranks, None, self.device)
        self.rows_of_rank = inverse_of(self.order).view(case.ranks, -1)
        self.shards = []
        for rank, rows in enumerate(self.rows_of_rank):
            own = tuple(None if each is None else each.index_select(1, rows) for each in self.tensors)
            shard = Shards(layout, rank, own, (*self.no_lengths, *self.options))
            q_t, _, q_s, *_ = own
            called = (q_t, self.tensors[1], q_s, self.tensors[3], None, None, None, None)
            self.shards.append((called, shard.lengths_of_all_keys(), shard.options))

    def steps(self, name):
        """{name: step} of the unsplit call and of all ranks. A step returns (sum of the KL, dq, dk)."""
        whole = (self.tensors, self.no_lengths, self.options)
        calls = {"unsplit": whole, **{f"rank {rank}": shard for rank, shard in enumerate(self.shards)}}
        make = {STEP: self.two_passes, ONE_PASS: self.one_pass}[name]
        return {place: make(*call) for place, call in calls.items()}

    def two_passes(self, tensors, lengths, options):
        def step():
            kl, lse_t, lse_s = OPS.forward(*tensors, None, lib.KL | lib.LSE_T | lib.LSE_S, *lengths, *options)
            upstream = torch.ones_like(kl)
            return kl.sum(), *OPS.backward(*tensors, lse_t, lse_s, None, None, upstream, *lengths, *options)

        return step

    def one_pass(self, tensors, lengths, options):
        lse_t, lse_s = OPS.forward(*tensors, None, lib.LSE_T | lib.LSE_S, *lengths, *options)

        def step():
            kl, dq, dk = OPS.forward_backward(*tensors, lse_t, lse_s, None, lib.KL, *lengths, *options)
            return kl.sum(), dq, dk

        return step

    def ordering(self):
        """What a rank does around the collective calls: keys of both models into order, dk back to f32 shards."""
        keys = [self.tensors[place].movedim(1, 0).contiguous() for place in (1, 3)]
        gradient, inverse = keys[1].float(), inverse_of(self.order)

        def step():
            return [*(each.index_select(0, self.order) for each in keys), gradient.index_select(0, inverse)]

        return step

    def errors(self, steps):
        """Relative errors of the sums over ranks: {"kl", "dq", "dk"}."""
        loss, dq, dk = steps["unsplit"]()
        sums = {"kl": torch.zeros_like(loss), "dk": torch.zeros_like(dk, dtype=torch.float32)}
        difference = torch.zeros((), device=self.device)
        for rank, rows in enumerate(self.rows_of_rank):
            own_loss, own_dq, own_dk = steps[f"rank {rank}"]()
            sums["kl"] += own_loss
            sums["dk"] += own_dk
            difference += (own_dq - dq.index_select(1, rows).float()).square().sum()
        found = {"kl": (sums["kl"] - loss).abs() / loss, "dk": (sums["dk"] - dk.float()).norm() / dk.float().norm()}
        return {name: value.item() for name, value in {**found, "dq": difference.sqrt() / dq.float().norm()}.items()}


def measure(case, run):
    split = Split(case, run.device)
    steps = split.steps(case.operation)
    errors = split.errors(steps)
    methods = [
        Method(place, {case.operation: step}) for place, step in {**steps, "ordering": split.ordering()}.items()
    ]
    unsplit, *ranks, _ = methods

    def compared(method, name):
        return {"of_unsplit": ratio(method.ms(name), unsplit.ms(name), ".4f")}

    result = run.time(methods, compared, shuffle=True)
    result.wrong += too_large(errors, LIMITS)
    result.lines.append(f"sums over ranks: {errors_text(errors)}")
    ms, whole = [rank.ms(case.operation) for rank in ranks], unsplit.ms(case.operation)
    if all(ms) and whole:
        mean = statistics.mean(ms)
        balance = f"slowest / mean {max(ms) / mean:.3f}, fastest / mean {min(ms) / mean:.3f}"
        result.lines.append(f"{balance}, sum / unsplit {sum(ms) / whole:.3f}")
    return result
