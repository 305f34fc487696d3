#!/usr/bin/env python3
"""Times StreamKL on CPU threads compared with PyTorch's attention on tensors of the same shape, in one run.

    bench/cpu_attention.py                       # bf16, 4 heads of 64 and of 128, 2048 queries and keys, one thread
    bench/cpu_attention.py --threads 2 --dtype f32
    STREAMKL_KERNEL=cpu_avx512 bench/cpu_attention.py

It imports the package streamkl: an installed one, or that of this repository, which needs STREAMKL_LIBRARY.

Forward: attention_kl without gradients; scaled_dot_product_attention without gradients. Step: both with the gradients of
the student's queries and keys, or of queries, keys and values. One pass: the same step with both LSEs given. The calls
alternate, each after an untimed one, during which the threads of the other library fall asleep. Medians count. A ratio
below 1 means that StreamKL takes less time.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def numbers(text):
    return [int(part) for part in text.split(",")]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of both; default 1")
    parser.add_argument("--dtype", choices=["bf16", "f16", "f32"], default="bf16")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="default 4")
    parser.add_argument("--lengths", type=numbers, default=[2048], metavar="LIST", help="default 2048")
    parser.add_argument("--dims", type=numbers, default=[64, 128], metavar="LIST", help="head sizes; default 64,128")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="samples per call; default 15")
    return parser.parse_args()


def sample(calls, rounds):
    """{name: median seconds} of calls that alternate."""
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) for name, taken in times.items()}


def calls_of(torch, streamkl, shape, dtype, causal):
    def tensors(count, gradients):
        return [torch.randn(shape, dtype=dtype).requires_grad_(gradients) for _ in range(count)]

    teacher, student, attended = tensors(2, False), tensors(2, True), tensors(3, True)
    upstream = torch.randn(shape, dtype=dtype)
    attention = torch.nn.functional.scaled_dot_product_attention

    def kl(**lses):
        return streamkl.attention_kl(*teacher, *student, causal=causal, layout="bhnd", **lses)

    def without_gradients(call):
        with torch.no_grad():
            return call()

    def step(call, leaves, gradient=None):
        for leaf in leaves:
            leaf.grad = None
        call().backward(gradient)

    def sdpa():
        return attention(*attended, is_causal=causal)

    lses = [lse(q, k, causal) for q, k in (teacher, student)]
    return {
        "sdpa forward": lambda: without_gradients(sdpa),
        "forward": lambda: without_gradients(kl),
        "sdpa step": lambda: step(sdpa, attended, upstream),
        "step": lambda: step(kl, student),
        "one pass": lambda: step(lambda: kl(lse_t=lses[0], lse_s=lses[1]), student),
    }


def lse(q, k, causal):
    logits = (q.detach().double() @ k.detach().double().transpose(-1, -2)) / q.shape[-1] ** 0.5
    if causal:
        logits.masked_fill_(logits.new_ones(logits.shape[-2:]).triu(1).bool(), float("-inf"))
    return logits.logsumexp(-1).float()


def main():
    arguments = parse()
    os.environ["STREAMKL_THREADS"] = str(arguments.threads)
    sys.path.append(str(ROOT / "python"))  # after an installed package
    import streamkl
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[arguments.dtype]
    print(f"torch {torch.__version__}, {arguments.dtype}, {arguments.heads} heads, {arguments.threads} threads; times in ms")
    print("     N    d  mask    sdpa fwd    forward   ratio   sdpa step       step   ratio   one pass   ratio")
    for length in arguments.lengths:
        for dim in arguments.dims:
            for causal in (True, False):
                shape = (1, arguments.heads, length, dim)
                t = sample(calls_of(torch, streamkl, shape, dtype, causal), arguments.rounds)
                print(
                    f"{length:6} {dim:4}  {'causal' if causal else 'full  '}"
                    f" {t['sdpa forward'] * 1e3:9.2f}  {t['forward'] * 1e3:9.2f}  {t['forward'] / t['sdpa forward']:6.2f}"
                    f"   {t['sdpa step'] * 1e3:9.2f}  {t['step'] * 1e3:9.2f}  {t['step'] / t['sdpa step']:6.2f}"
                    f"  {t['one pass'] * 1e3:9.2f}  {t['one pass'] / t['sdpa step']:6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
