"""Trains a student on one sequence of 32,768 tokens that is split over all processes.

    torchrun --nproc-per-node=4 examples/context_parallel.py                   # CPU processes, with gloo
    torchrun --nproc-per-node=8 examples/context_parallel.py --length 1048576  # one GPU per process, with NCCL

Every process holds its zigzag shard of the tokens: chunk r and chunk 2 W - 1 - r of 2 W. DDP averages the gradients of the
weights over the processes, so the loss is computed with gradients="mean".
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import streamkl
from streamkl.parallel import shard


class Attention(torch.nn.Module):
    """Queries and keys of tokens: [batch, length, heads, dim]."""

    def __init__(self, features, heads, dim):
        super().__init__()
        self.heads, self.query, self.key = (
            heads,
            torch.nn.Linear(features, heads * dim),
            torch.nn.Linear(features, heads * dim),
        )

    def forward(self, tokens):
        return self.query(tokens).unflatten(-1, (self.heads, -1)), self.key(tokens).unflatten(-1, (self.heads, -1))


def make_tokens(length, features):
    """Equal on every process; neighbors resemble each other."""
    noise = torch.randn(1, features, length, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.avg_pool1d(noise, 9, stride=1, padding=4)
    return torch.nn.functional.normalize(smooth.transpose(1, 2), dim=-1) * features**0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--length", type=int, default=32768, help="tokens of the sequence; a multiple of twice the processes"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--comm", choices=["allgather", "ring"], default="allgather")
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    features, group = 32, dist.group.WORLD
    teacher, student = Attention(features, 2, 16).to(device), Attention(features, 1, 8).to(device)
    with torch.no_grad():  # the teacher's attention is far from uniform
        teacher.query.weight *= 3
        teacher.key.weight *= 3
    student = DistributedDataParallel(student)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    tokens = shard(make_tokens(arguments.length, features), group).to(device)  # [1, length / W, features]

    parallel = streamkl.Parallel(group, layout="zigzag", comm=arguments.comm, gradients="mean")
    for step in range(arguments.steps):
        begin = time.perf_counter()
        with torch.no_grad():
            q_t, k_t = teacher(tokens)
        q_s, k_s = student(tokens)
        loss = streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True, parallel=parallel)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: attention KL {loss.item():.4f}, {time.perf_counter() - begin:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
