#!/usr/bin/env python3
"""The overhead of a call of streamkl.attention_kl, on tensors of size 1 on the CPU, and the time of the import.

PYTHONPATH=python STREAMKL_LIBRARY=build/release/src/libstreamkl.so python3 bench/python_overhead.py
"""

import time

import torch

begin = time.perf_counter()
import streamkl  # noqa: E402

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


if __name__ == "__main__":
    main()
