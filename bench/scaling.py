#!/usr/bin/env python3
"""A plan on paper: time and memory per rank of the loss under context parallelism, up to 1M tokens on 64 GPUs.

    bench/scaling.py                                # an 8B-like model: 32 query heads, 8 key heads of 128, 32 layers
    bench/scaling.py --heads 16 --key-heads 16      # another one
    bench/scaling.py --two-passes                   # without the LSEs of the attention
    torchrun --nproc-per-node=8 bench/scaling.py --measure 131072   # on these GPUs: a layer's step, next to its plan

Nothing is measured without --measure. Rates of a GPU are the newest of bench/results/peers.csv, and links have the rates of
their data sheets times --efficiency:

    compute         pairs / W x 2 dim x products / rate: zigzag gives every rank the same number of visible pairs. The rate is
                    that of the longest causal sequence in the file, of heads of the same size, whatever their number
    communication   all-gather of k_t and k_s (once per pass), reduce-scatter of dk in f32, per layer. All GPUs of a
                    node receive over their network links what the other nodes hold, and pass it on over NVLink;
                    the slower one counts
    exposed         the first slice of keys before the first computation, and the last slice of dk after the last;
                    the other slices overlap with computation. If communication takes longer than computation, the
                    difference as well
    memory          of one layer: shards of q, k, dq and dk, row vectors, and at most two slices of gathered keys and
                    of f32 dk

Assumptions: bf16; teacher and student of the same shape; power and clocks do not change with the number of GPUs; layers
run one after the other; nothing else uses the links.
"""

import argparse
import csv
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from harness.options import add_numbers

RESULTS = Path(__file__).resolve().parent / "results/peers.csv"
PASSES = {"forward": 2, "backward": 4, "one pass": 4}  # products of visible pairs that each counts
MAX_SLICES = 4  # of streamkl.parallel
BF16, F32 = 2, 4


@dataclass(frozen=True)
class Model:
    heads: int
    key_heads: int
    dim: int
    layers: int

    @property
    def slices(self):
        return max(count for count in range(1, MAX_SLICES + 1) if self.key_heads % count == 0)


@dataclass(frozen=True)
class Cluster:
    """Links in GB/s per GPU and direction."""

    node_size: int
    node_link: float
    nvlink: float
    efficiency: float

    def seconds(self, received, ranks):
        """To receive `received` bytes in all, of which each of `ranks` GPUs holds an equal part."""
        inside = min(ranks, self.node_size)
        over_nvlink = received * (ranks - 1) / ranks / (self.nvlink * 1e9)
        over_network = received * (ranks - inside) / ranks / (inside * self.node_link * 1e9)
        return max(over_nvlink, over_network) / self.efficiency


def newest_rates(dim):
    """({pass: TFLOP/s}, the row's description) of the longest causal sequence of heads of `dim`."""
    with RESULTS.open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file)
            if row["method"] == "streamkl" and row["mask"] == "causal" and row["dim"] == str(dim) and row["tflops"]
            and not row["packed"] and row["pass"] in PASSES
        ]  # fmt: skip
    if not rows:
        raise SystemExit(f"scaling.py: {RESULTS} has no causal rows of streamkl with heads of {dim}")
    longest = max(int(row["length"]) for row in rows)
    newest = {row["pass"]: row for row in rows if int(row["length"]) == longest}  # later rows are newer
    figures = (f"{name} {row['tflops']} TFLOP/s ({row['gpu']}, {row['commit']})" for name, row in newest.items())
    return {name: float(row["tflops"]) for name, row in newest.items()}, f"N = {longest}: {'; '.join(figures)}"


@dataclass(frozen=True)
class Plan:
    """One step of one sequence of `length` tokens on `ranks` GPUs."""

    model: Model
    cluster: Cluster
    rates: dict
    length: int
    ranks: int
    two_passes: bool

    @property
    def passes(self):
        return ("forward", "backward") if self.two_passes else ("one pass",)

    @property
    def compute(self):
        """Seconds per layer."""
        pairs = self.model.heads * self.length * (self.length + 1) / 2 / self.ranks
        return sum(pairs * 2 * self.model.dim * PASSES[name] / (self.rates[name] * 1e12) for name in self.passes)

    @property
    def key_bytes(self):
        """Of the keys of one model, all ranks."""
        return self.length * self.model.key_heads * self.model.dim * BF16

    @property
    def gathered(self):
        """Bytes that a rank has after the all-gathers of a layer."""
        return len(self.passes) * 2 * self.key_bytes

    @property
    def scattered(self):
        """Bytes of f32 dk that a rank contributes to the reduce-scatter of a layer."""
        return self.key_bytes * F32 // BF16

    @property
    def communication(self):
        return self.cluster.seconds(self.gathered, self.ranks) + self.cluster.seconds(self.scattered, self.ranks)

    @property
    def exposed(self):
        return max(self.communication / self.model.slices, self.communication - self.compute)

    @property
    def memory(self):
        """{part: bytes} of a layer on a rank."""
        own = self.length / self.ranks
        queries, keys = own * self.model.heads * self.model.dim, own * self.model.key_heads * self.model.dim
        slices = 2 / self.model.slices
        return {
            "shards": 2 * (queries + keys) * BF16,
            "gradients": (queries + keys) * BF16,
            "rows": 3 * own * self.model.heads * F32,
            "gathered": slices * (2 * self.key_bytes + self.scattered) if self.ranks > 1 else 0,
        }


def table(plans):
    lines = [
        "tokens   GPUs  compute, s  communication, s  exposed, s  step, s  shards, GiB  gathered, GiB  total, GiB"
    ]
    for plan in plans:
        layers, memory = plan.model.layers, {name: size / 2**30 for name, size in plan.memory.items()}
        communication, exposed = (0.0, 0.0) if plan.ranks == 1 else (plan.communication, plan.exposed)
        step = layers * (plan.compute + exposed)
        lines.append(
            f"{plan.length:8} {plan.ranks:5} {layers * plan.compute:11.3f} {layers * communication:17.3f} {layers * exposed:11.3f} "
            f"{step:8.3f} {memory['shards'] + memory['gradients']:12.2f} {memory['gathered']:14.2f} {sum(memory.values()):11.2f}"
        )
    return lines


def measured(model, length, two_passes, rounds=5):
    """(seconds, ranks): the loss of one layer and its gradients on the processes of torchrun, the slowest rank's median."""
    import torch
    import torch.distributed as dist

    import run

    run.find_package()
    import streamkl

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    ranks, own = dist.get_world_size(), length // dist.get_world_size()
    if length % (2 * ranks):
        raise SystemExit(f"scaling.py: --measure={length}: must be a multiple of {2 * ranks} for {ranks} ranks")
    parallel = streamkl.Parallel(dist.group.WORLD, layout="zigzag")

    def tensor(heads):
        return torch.randn(1, own, heads, model.dim, device=device, dtype=torch.bfloat16)

    q_t, k_t, q_s, k_s = (tensor(heads) for heads in (model.heads, model.key_heads) * 2)
    options = dict(causal=True, parallel=parallel)
    _, lse_t, lse_s = streamkl.attention_kl(q_t, k_t, q_s, k_s, return_lse=True, **options)
    given = {} if two_passes else dict(lse_t=lse_t, lse_s=lse_s)
    leaves = [tensor.requires_grad_() for tensor in (q_s, k_s)]

    def step():
        loss = streamkl.attention_kl(q_t, k_t, *leaves, **options, **given)
        torch.autograd.grad(loss, leaves)
        if on_gpu:
            torch.cuda.synchronize(device)

    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(times[1:]), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    return (slowest.item(), ranks) if is_first else None


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    add_numbers(
        parser,
        heads=(32, "query heads"),
        key_heads=(8, "key heads"),
        dim=(128, "head size"),
        layers=(32, "compared layers"),
        node_size=(8, "GPUs per node"),
        node_link=(50.0, "GB/s per GPU between nodes, 400 Gb/s"),
        nvlink=(450.0, "GB/s per GPU inside a node, NVLink 4"),
        efficiency=(0.8, "of links"),
    )
    parser.add_argument("--two-passes", action="store_true", help="forward and backward, without given LSEs")
    parser.add_argument("--measure", type=int, metavar="N", help="under torchrun: time a layer of N tokens in all")
    return parser


SIZES = ((131072, 1), (131072, 8), (262144, 8), (262144, 16), (524288, 32), (1048576, 8), (1048576, 64))


def main():
    asked = parser()
    given = asked.parse_args()
    if (
        min(given.heads, given.key_heads, given.dim, given.layers, given.node_size) < 1
        or given.heads % given.key_heads
    ):
        asked.error(f"--key-heads={given.key_heads}: must divide --heads={given.heads}; sizes must be at least 1")
    if not all(math.isfinite(rate) and rate > 0 for rate in (given.node_link, given.nvlink, given.efficiency)):
        asked.error("--node-link, --nvlink and --efficiency: must be positive numbers")
    model = Model(given.heads, given.key_heads, given.dim, given.layers)
    cluster = Cluster(given.node_size, given.node_link, given.nvlink, given.efficiency)
    rates, about = newest_rates(given.dim)
    if given.measure:
        if found := measured(model, given.measure, given.two_passes):
            seconds, ranks = found
            plan = Plan(model, cluster, rates, given.measure, ranks, given.two_passes)
            planned = plan.compute + (plan.exposed if ranks > 1 else 0.0)
            print(
                f"{given.measure} tokens, {ranks} ranks, one layer: measured {seconds:.4f} s, planned {planned:.4f} s"
            )
        return
    print(f"rates of one GPU at {about}")
    heads = f"{model.heads} query heads and {model.key_heads} key heads of {model.dim}"
    print(f"{model.layers} layers, {heads}, causal, bf16; memory of one layer")
    print("\n".join(table([Plan(model, cluster, rates, *size, given.two_passes) for size in SIZES])))


if __name__ == "__main__":
    main()
