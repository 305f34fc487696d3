"""Times calls that alternate one by one, so that all of them share one power state of the GPU."""

import math
import random
import statistics
import time
from dataclasses import dataclass, field

import torch

from .measure import WARM_UP_MS, refusal_of, release_memory

SLOW_MS = 2000  # a call that takes longer is timed once
LEAST_ROUNDS = 3


@dataclass
class Timing:
    samples: list = field(default_factory=list)  # milliseconds
    peak_bytes: int = 0  # of all memory allocated while the call runs; 0 on the CPU
    refusal: str = ""  # why it was not measured

    @property
    def median(self):
        """None if it was not measured."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def fastest(self):
        return min(self.samples, default=None)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device):
    """A point in time: on the GPU an event, which does not wait for the work before it."""
    if device.type != "cuda":
        return time.perf_counter() * 1e3
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin, end):
    return begin.elapsed_time(end) if isinstance(begin, torch.cuda.Event) else end - begin


def first_timing(call, device):
    """One call to compile and tune, a second one for an estimate of the time and for the memory."""
    timing, on_gpu = Timing(), device.type == "cuda"
    try:
        call()
        synchronize(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        timing.samples = [(time.perf_counter() - begin) * 1e3]
        timing.peak_bytes = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    except Exception as error:  # from the library, a driver, out of memory, ...: the other calls go on
        timing.refusal = refusal_of(error)
    if timing.refusal:
        release_memory()  # after the except block, whose traceback keeps tensors alive
    return timing


def time_alternately(calls, device, rounds, sample_ms, shuffle=False):
    """{name: Timing} of {name: call}. In a round every call runs once; enough rounds for sample_ms, at most `rounds`.
    `shuffle`: in another order in every round.

    There is no host-device synchronisation between WARM_UP_MS of untimed rounds and the last timed one. So launches run
    ahead of the GPU and their time is hidden, if the calls of a round take longer than their launches.
    """
    device = torch.device(device)
    timings = {name: first_timing(call, device) for name, call in calls.items()}
    brief = [name for name, timing in timings.items() if timing.samples and timing.samples[0] <= SLOW_MS]
    round_ms = sum(timings[name].samples[0] for name in brief)
    if not brief or rounds == 0:
        return timings
    timed = max(LEAST_ROUNDS, min(rounds, math.ceil(sample_ms / round_ms)))
    for _ in range(math.ceil((WARM_UP_MS if device.type == "cuda" else 0) / round_ms)):
        for name in brief:
            calls[name]()
    points, randomness = {name: [] for name in brief}, random.Random(0)
    for _ in range(timed):
        if shuffle:
            randomness.shuffle(brief)
        for name in brief:
            begin = now(device)
            calls[name]()
            points[name].append((begin, now(device)))
    synchronize(device)
    for name in brief:
        timings[name].samples = [milliseconds(*pair) for pair in points[name]]
    return timings
