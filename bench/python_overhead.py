#!/usr/bin/env python3
"""The overhead of a call of streamkl.attention_kl, on tensors of size 1 on the CPU, and the time of the import.

PYTHONPATH=python STREAMKL_LIBRARY=build/release/src/libstreamkl.so python3 bench/python_overhead.py

On a machine with a GPU also the time of a loss and its gradients there, compared with that of its operators alone.
"""

import time

import torch
from gpu.alternate import time_alternately

begin = time.perf_counter()
import streamkl  # noqa: E402
from streamkl import _library as lib  # noqa: E402
from streamkl._problem import DK_S, DQ_S, Options  # noqa: E402

import_seconds = time.perf_counter() - begin


def microseconds(run, calls=200, samples=50):
    """The fastest sample, in CPU time of this thread, so that other processes do not count."""
    times = []
    for _ in range(samples):
        begin = time.thread_time()
        for _ in range(calls):
            run()
        times.append((time.thread_time() - begin) / calls)
    return min(times) * 1e6


def gpu_calls(device, heads, length, dim):
    """{name: call}: attention_kl with its gradients, and its operators alone, on the same tensors."""
    tensors = [torch.randn((1, heads, length, dim), device=device, dtype=torch.bfloat16) for _ in range(4)]
    leaves = [*tensors[:2], *(tensor.clone().requires_grad_() for tensor in tensors[2:])]
    problem = (*[None] * 5, *Options(gradients=DQ_S | DK_S, causal=True, heads_first=True))
    inputs, rows = (*tensors, *[None] * 4), lib.KL | lib.LSE_T | lib.LSE_S
    kl, lse_t, lse_s = torch.ops.streamkl.forward(*inputs, None, rows, *problem)
    weight = torch.full_like(kl, 1 / kl.numel())

    def two_passes():
        torch.ops.streamkl.forward(*inputs, None, rows, *problem)
        torch.ops.streamkl.backward(*inputs, lse_t, lse_s, None, None, weight, *problem)

    def one_pass():
        torch.ops.streamkl.forward_backward(*inputs, lse_t, lse_s, None, lib.KL, *problem)

    def loss(**lses):
        leaves[2].grad = leaves[3].grad = None
        streamkl.attention_kl(*leaves, causal=True, layout="bhnd", **lses).backward()

    return {
        "two passes": two_passes, "two passes, attention_kl": loss,
        "one pass": one_pass, "one pass, attention_kl": lambda: loss(lse_t=lse_t, lse_s=lse_s),
    }  # fmt: skip


def show_gpu(device="cuda", heads=16, lengths=(8192, 16384), dim=128):
    print(f"\nloss and gradients on {device}, {heads} heads of {dim}, bf16, causal")
    for length in lengths:
        timings = time_alternately(gpu_calls(device, heads, length, dim), device, rounds=25, sample_ms=300)
        for name, timing in timings.items():
            operators = timings[name.split(",")[0]].median
            print(f"N={length:6} {name:26} {timing.median:8.3f} ms   {timing.median / operators:.2f} of its operators' time")


def main():
    torch.set_num_threads(1)
    plain = [torch.randn(1, 1, 1, 1) for _ in range(4)]
    student = [*plain[:2], *(tensor.clone().requires_grad_() for tensor in plain[2:])]
    lse = torch.zeros(1, 1, 1)
    print(f"import streamkl, after import torch         {import_seconds:6.3f} s")
    print(
        f"forward                                     {microseconds(lambda: streamkl.attention_kl(*plain)):6.1f} us"
    )
    print(
        f"forward that records a graph                {microseconds(lambda: streamkl.attention_kl(*student)):6.1f} us"
    )
    one_pass = microseconds(lambda: streamkl.attention_kl(*student, lse_t=lse, lse_s=lse))
    print(f"forward with gradients in one pass          {one_pass:6.1f} us")
    print(
        f"forward and backward                        {microseconds(lambda: streamkl.attention_kl(*student).backward()):6.1f} us"
    )
    if torch.cuda.is_available():
        show_gpu()


if __name__ == "__main__":
    main()
