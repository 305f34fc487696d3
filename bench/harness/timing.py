"""Times calls that alternate one by one, so that all of them share one power state of the GPU."""

import gc
import math
import random
import statistics
import time
from dataclasses import dataclass, field

import torch

# Untimed rounds before the timed ones: for this long the clock under the power limit depends on the work before.
WARM_UP_MS = 300
SLOW_MS = 2000  # a call that takes longer is timed once
BRIEF_MS = 1  # calls on a GPU are repeated for as long: the first one may wait for its launch
LEAST_ROUNDS = 3


@dataclass
class Timing:
    samples: list = field(default_factory=list)  # milliseconds
    peak_bytes: int = 0  # all memory allocated while the call runs; 0 on the CPU
    extra_bytes: int = 0  # peak_bytes minus the memory allocated before
    refusal: str = ""  # why it was not measured

    @property
    def median(self):
        """None if it was not measured."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def fastest(self):
        return min(self.samples, default=None)


class Prepared:
    """A call with an untimed preparation before every sample: prepare() returns the function to time."""

    def __init__(self, prepare):
        self.prepare = prepare


def ready(call):
    return call.prepare() if isinstance(call, Prepared) else call


def refusal_of(error):
    """One line that says why something was not measured."""
    first_line = (str(error).strip() or "no reason given").split("\n")[0]
    return first_line if type(error) is RuntimeError else f"{type(error).__name__}: {first_line}"


def release_memory():
    gc.collect()
    torch.cuda.empty_cache()


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


def first_run(call, device):
    """(result, Timing): one call to compile and tune, a second one to estimate the time and to record the memory."""
    on_gpu, refusal = device.type == "cuda", ""
    try:
        ready(call)()
        run = ready(call)
        synchronize(device)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        result = run()
        synchronize(device)
        ms = (time.perf_counter() - begin) * 1e3
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
        return result, Timing([ms], peak, peak - before)
    except Exception as error:  # from the library, a compiler, a driver, out of memory, ...: the other calls go on
        refusal = refusal_of(error)
    release_memory()  # after the except block, whose traceback keeps tensors alive
    return None, Timing(refusal=refusal)


def repeats_of(ms, device):
    """Calls of a sample."""
    return max(1, min(100, round(BRIEF_MS / ms))) if device.type == "cuda" else 1


def time_alternately(calls, device, rounds, sample_ms, shuffle=False):
    """{name: Timing} of {name: call}. A round takes one sample of every call; enough rounds for sample_ms, at most
    `rounds`. `shuffle`: in another order in every round.

    There is no host-device synchronization between WARM_UP_MS of untimed rounds and the last timed one. So launches
    run ahead of the GPU and their time is hidden, if the calls of a round take longer than their launches.
    """
    device = torch.device(device)
    timings = {name: first_run(call, device)[1] for name, call in calls.items()}
    brief = [name for name, timing in timings.items() if timing.samples and timing.samples[0] <= SLOW_MS]
    repeats = {name: repeats_of(timings[name].samples[0], device) for name in brief}
    round_ms = sum(timings[name].samples[0] * repeats[name] for name in brief)
    if not brief:
        return timings
    timed = max(LEAST_ROUNDS, min(rounds, math.ceil(sample_ms / round_ms)))
    untimed = math.ceil((WARM_UP_MS if device.type == "cuda" else 0) / round_ms)
    points, randomness = {name: [] for name in brief}, random.Random(0)
    for number in range(untimed + timed):
        if shuffle:
            randomness.shuffle(brief)
        for name in brief:
            run = ready(calls[name])
            begin = now(device)
            for _ in range(repeats[name]):
                run()
            if number >= untimed:
                points[name].append((begin, now(device)))
            del run  # with what it prepared
    synchronize(device)
    for name in brief:
        timings[name].samples = [milliseconds(*pair) / repeats[name] for pair in points[name]]
    return timings
