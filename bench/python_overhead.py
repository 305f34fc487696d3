#!/usr/bin/env python3
"""Host time of a call of streamkl.attention_kl, and the time of the import.

PYTHONPATH=python STREAMKL_LIBRARY=build/release/src/libstreamkl.so python3 bench/python_overhead.py

On a machine with a GPU, calls are submitted there without waiting for their kernels, on small tensors; then the time of a loss
and its gradients is compared with that of its operators alone. Elsewhere, calls run on CPU tensors of size 1.
"""

import statistics
import time

import torch
from gpu.alternate import time_alternately

begin = time.perf_counter()
import streamkl  # noqa: E402
from streamkl import _call  # noqa: E402
from streamkl import _library as lib  # noqa: E402
from streamkl._problem import DK_S, DQ_S, Options  # noqa: E402

import_seconds = time.perf_counter() - begin


def host_microseconds(run, device, calls=20, samples=50):
    """Host time of a call. On a GPU the median of the samples, whose launches all fit into the queue of a stream.

    On the CPU the fastest sample, in CPU time of this thread, so that other processes do not count.
    """
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    times = []
    for _ in range(samples + 1):
        if on_gpu:
            torch.cuda.synchronize(device)
        begin = clock()
        for _ in range(calls):
            run()
        times.append((clock() - begin) / calls)
    return (statistics.median(times[1:]) if on_gpu else min(times[1:])) * 1e6


def c_call(tensors):
    """The forward in C, with structs and memory that are ready."""
    prepared = []
    call, given = _call.prepare(lib.FORWARD, lib.KL, (*tensors, *[None] * 14), Options(causal=True, heads_first=True))
    made = call(given, lambda *arguments: prepared.append(arguments))
    plan, op, inputs, outputs, device = prepared[0]
    run, size = lib.run_function(op), plan.workspace_sizes[op]
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    arguments = (plan.handle, inputs, *outputs, memory.data_ptr(), size, _call.stream_of(device))
    return lambda keep=(made, memory): lib.check(run(*arguments))


def host_calls(device, shape, dtype):
    """{name: call} on tensors [batch, heads, length, dim]."""
    plain = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
    student = [*plain[:2], *(tensor.clone().requires_grad_() for tensor in plain[2:])]
    _, *lses = streamkl.attention_kl(*plain, causal=True, layout="bhnd", return_lse=True)
    lses, output = dict(zip(("lse_t", "lse_s"), lses)), torch.ones_like(plain[0])
    attend = torch.nn.functional.scaled_dot_product_attention

    def forward(tensors, **lses):
        return streamkl.attention_kl(*tensors, causal=True, layout="bhnd", **lses)

    def with_backward(call, *upstream):
        student[2].grad = student[3].grad = None
        call().backward(*upstream)

    return {
        "C call, forward": c_call(plain),
        "forward": lambda: forward(plain),
        "forward that records a graph": lambda: forward(student),
        "forward and backward": lambda: with_backward(lambda: forward(student)),
        "one pass, without its backward": lambda: forward(student, **lses),
        "one pass and its backward": lambda: with_backward(lambda: forward(student, **lses)),
        "torch SDPA, forward": lambda: attend(*plain[:3], is_causal=True),
        "torch SDPA, forward and backward": lambda: with_backward(lambda: attend(*student[2:], plain[0], is_causal=True), output),
    }  # fmt: skip


def show_host_time(device, shape, dtype):
    print(f"\nhost time of a call on {device}, tensors {list(shape)} of {dtype}")
    for name, run in host_calls(device, shape, dtype).items():
        print(f"{name:40} {host_microseconds(run, device):7.1f} us")


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
    print(f"import streamkl, after import torch {import_seconds:12.3f} s")
    if torch.cuda.is_available():
        show_host_time(torch.device("cuda", 0), (1, 16, 256, 64), torch.bfloat16)
        show_gpu()
    else:
        torch.set_num_threads(1)
        show_host_time(torch.device("cpu"), (1, 1, 1, 1), torch.float32)


if __name__ == "__main__":
    main()
