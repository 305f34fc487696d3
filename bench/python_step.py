#!/usr/bin/env python3
"""A distillation step in PyTorch on a GPU: a 2-layer, 16-head, d = 128 student against its teacher at 64K tokens.

    STREAMKL_LIBRARY=build/gpu/src/libstreamkl.so PYTHONPATH=python python3 bench/python_step.py

Compares time and peak memory of the step with those of a loss that stores the attention matrices, and the time of
attention_kl with that of its operators alone.
"""

import argparse
import statistics
import sys

import torch
import torch.nn.functional as F

import streamkl
from streamkl import _library as lib
from streamkl._problem import DK_S, DQ_S, Options

ATEN = torch.ops.aten


class Layer(torch.nn.Module):
    """Attention and a feed-forward block, pre-norm. Also returns the queries, keys and LSE of its attention."""

    def __init__(self, heads, dim):
        super().__init__()
        width = heads * dim
        self.heads, self.dim = heads, dim
        self.norm, self.qkv, self.out = (
            torch.nn.RMSNorm(width),
            torch.nn.Linear(width, 3 * width),
            torch.nn.Linear(width, width),
        )
        self.mlp = torch.nn.Sequential(
            torch.nn.RMSNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.SiLU(),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x):
        q, k, v = (
            self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, self.dim)).permute(2, 0, 3, 1, 4)
        )  # [B, H, N, D]
        attended, lse, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x), (q, k, lse)


class Model(torch.nn.Module):
    def __init__(self, layers, heads, dim):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(heads, dim) for _ in range(layers))

    def forward(self, x):
        kept = []
        for layer in self.layers:
            x, attention = layer(x)
            kept.append(attention)
        return x, kept


def streaming_kl(q_t, k_t, lse_t, q_s, k_s, lse_s):
    return streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True, lse_t=lse_t, lse_s=lse_s, layout="bhnd")


def materialised_kl(q_t, k_t, lse_t, q_s, k_s, lse_s):
    length, scale = q_s.shape[-2], q_s.shape[-1] ** -0.5
    hidden = torch.ones(length, length, dtype=torch.bool, device=q_s.device).triu(1)
    x, y = ((scale * q @ k.mT).float().masked_fill(hidden, -torch.inf) for q, k in ((q_t, k_t), (q_s, k_s)))
    log_p, log_s = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
    return (log_p.exp() * (log_p - log_s)).masked_fill(hidden, 0).sum(-1).mean()


def step(teacher, student, tokens, kl):
    with torch.no_grad():
        target, kept_t = teacher(tokens)
    output, kept_s = student(tokens)
    losses = [kl(q_t, k_t, lse_t, q_s, k_s, lse_s) for (q_t, k_t, lse_t), (q_s, k_s, lse_s) in zip(kept_t, kept_s)]
    loss = F.mse_loss(output.float(), target.float()) + torch.stack(losses).mean()
    loss.backward()
    student.zero_grad()
    return loss.detach()


def milliseconds(run, rounds):
    times = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def show_step(name, kl, arguments, teacher, student, tokens):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        time = milliseconds(lambda: step(teacher, student, tokens, kl), arguments.rounds)
        print(f"  {name:13} {time:9.1f} ms   peak {torch.cuda.max_memory_allocated() / 2**30:6.1f} GiB")
    except torch.cuda.OutOfMemoryError as error:
        print(f"  {name:13} out of memory: {str(error).split('. ')[1]}")


def show_overhead(arguments):
    """Forward and backward of attention_kl compared with its operators alone, on the same tensors."""
    print(f"\nattention_kl compared with its operators, H={arguments.heads} d={arguments.dim} bf16 causal, forward + backward")
    for length in arguments.overhead_lengths:
        shape = (1, arguments.heads, length, arguments.dim)
        tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        problem = (None, None, None, *Options(gradients=DQ_S | DK_S, causal=True, heads_first=True))
        inputs, rows = (*tensors, None, None), lib.KL | lib.LSE_T | lib.LSE_S
        kl, lse_t, lse_s = torch.ops.streamkl.forward(*inputs, None, rows, *problem)
        weight = torch.full_like(kl, 1 / kl.numel())
        leaves = [tensors[0], tensors[1], tensors[2].clone().requires_grad_(), tensors[3].clone().requires_grad_()]

        def two_passes():
            torch.ops.streamkl.forward(*inputs, None, rows, *problem)
            torch.ops.streamkl.backward(*inputs, lse_t, lse_s, None, None, weight, *problem)

        def one_pass():
            torch.ops.streamkl.forward_backward(*inputs, lse_t, lse_s, None, lib.KL, *problem)

        def loss(**lses):
            leaves[2].grad = leaves[3].grad = None
            streamkl.attention_kl(*leaves, causal=True, layout="bhnd", **lses).backward()

        for name, kernels, run in (
            ("two passes", two_passes, loss),
            ("one pass", one_pass, lambda: loss(lse_t=lse_t, lse_s=lse_s)),
        ):
            own, whole = milliseconds(kernels, arguments.rounds), milliseconds(run, arguments.rounds)
            print(
                f"  N={length:6} {name:10} operators {own:8.3f} ms   attention_kl {whole:8.3f} ms   {whole / own:.2f} times"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--overhead-lengths", type=int, nargs="*", default=[8192, 16384])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("python_step.py: torch finds no GPU")
    print(f"streamkl {streamkl.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}, bf16")
    torch.manual_seed(0)
    teacher, student = (Model(arguments.layers, arguments.heads, arguments.dim).cuda().bfloat16() for _ in range(2))
    tokens = torch.randn(1, arguments.tokens, arguments.heads * arguments.dim, device="cuda", dtype=torch.bfloat16)
    print(f"step of {arguments.layers} layers, {arguments.heads} heads of {arguments.dim}, {arguments.tokens} tokens")
    show_step("attention_kl", streaming_kl, arguments, teacher, student, tokens)
    show_step("materialised", materialised_kl, arguments, teacher, student, tokens)
    del teacher, student, tokens
    torch.cuda.empty_cache()
    show_overhead(arguments)


if __name__ == "__main__":
    main()
