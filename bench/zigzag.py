#!/usr/bin/env python3
"""The work of each rank of a context-parallel group, one after the other on one device: is it balanced?

    bench/zigzag.py                                # 131072 tokens, 16 heads of 128, bf16, causal, 8 ranks
    bench/zigzag.py --layout contiguous            # the layout that zigzag balances
    bench/zigzag.py --device cpu --length 2048     # small, on the CPU, in f32
    bench/zigzag.py --csv bench/results/zigzag.csv # appends the results

A rank computes its own query rows against the keys of all ranks, in the order of the sequence, as
streamkl.attention_kl(cp_group=...) does between its collective calls; the ranks' key gradients are f32. Compared are
the times of the ranks with each other (balance: slowest / mean), and their sum with the unsplit call: what is added.
`ordering` is what a rank adds around the collective calls: the copies that bring keys into the order of the sequence,
and their gradients back.

The sum of the ranks' losses and key gradients must be that of the unsplit call. All calls alternate one by one after
0.3 s, in another order in every round, because a call that follows one of less power is faster; medians count.
"""

import argparse
import os
import statistics
import sys

from gpu.report import append_csv
from peers import add_run_options, require_csv

COLUMNS = "date device torch commit pass layout ranks rank length heads key_heads dim mask ms fastest_ms of_unsplit note".split()
PASSES = ("forward + backward", "one pass")


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser)
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument("--layout", choices=["zigzag", "contiguous"], default="zigzag")
    parser.add_argument("--length", type=int, default=131072, metavar="N", help="tokens of the whole sequence; default 131072")
    parser.add_argument("--heads", type=int, default=16, metavar="N", help="query heads; default 16")
    parser.add_argument("--key-heads", type=int, default=0, metavar="N", help="key heads; default: as many")
    parser.add_argument("--dim", type=int, default=128, metavar="N", help="head size; default 128")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="most samples per call; default 9")
    parser.add_argument("--sample-ms", type=float, default=3000, metavar="X", help="time of all samples of a pass; default 3000")
    return parser


class Split:
    """A causal sequence, whole and cut into the shards of all ranks."""

    def __init__(self, arguments):
        import torch

        from streamkl._options import Lengths
        from streamkl._problem import DK_S, DQ_S, Options
        from streamkl.parallel._layout import Layout, gather_order, inverse_of
        from streamkl.parallel._shards import Shards

        torch.manual_seed(0)
        self.torch, self.device = torch, torch.device(arguments.device)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        heads, key_heads = arguments.heads, arguments.key_heads or arguments.heads
        shapes = [(1, arguments.length, count, arguments.dim) for count in (heads, key_heads) * 2]
        self.tensors = (*(torch.randn(shape, device=self.device, dtype=dtype) for shape in shapes), None, None, None, None)
        self.options = Options(gradients=DQ_S | DK_S, causal=True)
        self.no_lengths = Lengths(None, None, None, None, None)
        layout = Layout(arguments.layout, arguments.ranks)
        self.order = gather_order(layout, arguments.length // arguments.ranks, None, self.device)
        self.rows_of_rank = inverse_of(self.order).view(arguments.ranks, -1)
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
        make = {"forward + backward": self.two_passes, "one pass": self.one_pass}[name]
        return {place: make(*call) for place, call in calls.items()}

    def two_passes(self, tensors, lengths, options):
        from streamkl import _library as lib

        streamkl = self.torch.ops.streamkl

        def step():
            kl, lse_t, lse_s = streamkl.forward(*tensors, None, lib.KL | lib.LSE_T | lib.LSE_S, *lengths, *options)
            upstream = self.torch.ones_like(kl)
            return kl.sum(), *streamkl.backward(*tensors, lse_t, lse_s, None, None, upstream, *lengths, *options)

        return step

    def one_pass(self, tensors, lengths, options):
        from streamkl import _library as lib

        streamkl = self.torch.ops.streamkl
        lse_t, lse_s = streamkl.forward(*tensors, None, lib.LSE_T | lib.LSE_S, *lengths, *options)

        def step():
            kl, dq, dk = streamkl.forward_backward(*tensors, lse_t, lse_s, None, lib.KL, *lengths, *options)
            return kl.sum(), dq, dk

        return step

    def ordering(self):
        """What a rank does around the collective calls: keys of both models into order, dk back to f32 shards."""
        from streamkl.parallel._layout import inverse_of

        keys = [self.tensors[place].movedim(1, 0).contiguous() for place in (1, 3)]
        gradient, inverse = keys[1].float(), inverse_of(self.order)

        def step():
            return [*(each.index_select(0, self.order) for each in keys), gradient.index_select(0, inverse)]

        return step

    def errors(self, steps):
        """Relative errors of the sums over ranks: {"kl", "dq", "dk"}."""
        loss, dq, dk = steps["unsplit"]()
        sums = {"kl": self.torch.zeros_like(loss), "dk": self.torch.zeros_like(dk, dtype=self.torch.float32)}
        difference = self.torch.zeros((), device=self.device)
        for rank, rows in enumerate(self.rows_of_rank):
            own_loss, own_dq, own_dk = steps[f"rank {rank}"]()
            sums["kl"] += own_loss
            sums["dk"] += own_dk
            difference += (own_dq - dq.index_select(1, rows).float()).square().sum()
        found = {"kl": (sums["kl"] - loss).abs() / loss, "dk": (sums["dk"] - dk.float()).norm() / dk.float().norm()}
        return {name: value.item() for name, value in {**found, "dq": difference.sqrt() / dq.float().norm()}.items()}


LIMITS = {"kl": 1e-5, "dq": 1e-2, "dk": 1e-2}  # dq and dk of the unsplit call are rounded to bf16


def run(arguments):
    """Rows for the CSV. Prints a table per pass."""
    from gpu.alternate import time_alternately

    split, rows, is_right = Split(arguments), [], True
    device = arguments.device if arguments.device == "cpu" else split.torch.cuda.get_device_name()
    about = dict(
        device=device, torch=split.torch.__version__, commit=arguments.commit,
        layout=arguments.layout, ranks=arguments.ranks, length=arguments.length, heads=arguments.heads,
        key_heads=arguments.key_heads or arguments.heads, dim=arguments.dim, mask="causal",
    )  # fmt: skip
    for name in PASSES:
        steps = split.steps(name)
        errors = split.errors(steps)
        wrong = [result for result, error in errors.items() if not error <= LIMITS[result]]
        is_right = is_right and not wrong
        calls = {**steps, "ordering": split.ordering()}
        timings = time_alternately(calls, split.device, arguments.rounds, arguments.sample_ms, shuffle=True)
        print_table(name, arguments, timings, errors, wrong)
        unsplit = timings["unsplit"].median
        for place, timing in timings.items():
            figures = {"ms": timing.median, "fastest_ms": timing.fastest, "of_unsplit": timing.median and timing.median / unsplit}
            figures = {column: f"{value:.4f}" if value else "" for column, value in figures.items()}
            rows.append({**about, "pass": name, "rank": place, **figures, "note": timing.refusal or ("WRONG" if wrong else "")})
    return rows, is_right


def print_table(name, arguments, timings, errors, wrong):
    print(f"{name}, {arguments.layout}, {arguments.ranks} ranks, {arguments.length} tokens")
    for place, timing in timings.items():
        print(f"  {place:10} {timing.median:10.3f} ms" if timing.median else f"  {place:10} not measured: {timing.refusal}")
    ranks = [timing.median for place, timing in timings.items() if place.startswith("rank")]
    if all(ranks) and timings["unsplit"].median:
        mean = statistics.mean(ranks)
        print(f"  slowest / mean {max(ranks) / mean:.3f}, fastest / mean {min(ranks) / mean:.3f}, "
              f"sum / unsplit {sum(ranks) / timings['unsplit'].median:.3f}")  # fmt: skip
    print("  errors of the sums over ranks: " + ", ".join(f"{result} {error:.1e}" for result, error in errors.items())
          + (f"  WRONG: {', '.join(wrong)}" if wrong else ""))  # fmt: skip


def main():
    asked = parser()
    arguments = asked.parse_args()
    chunks = 2 * arguments.ranks if arguments.layout == "zigzag" else arguments.ranks
    if arguments.ranks < 1 or arguments.length < 1 or arguments.length % max(chunks, 1):
        asked.error(f"--length={arguments.length}: must be a multiple of {chunks} for --ranks={arguments.ranks}")
    require_csv(asked, arguments.csv, COLUMNS)
    if arguments.library:
        os.environ["STREAMKL_LIBRARY"] = str(arguments.library)
    if arguments.kernel:
        os.environ["STREAMKL_KERNEL"] = arguments.kernel
    rows, is_right = run(arguments)
    if arguments.csv:
        append_csv(arguments.csv, rows, {}, COLUMNS)
    if not is_right:
        sys.exit("zigzag.py: a result is WRONG: see above")


if __name__ == "__main__":
    main()
