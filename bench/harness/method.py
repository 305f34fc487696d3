"""One way to compute a loss and its gradients, and what was measured of it."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable

from .report import errors_of, times_of, tflops
from .timing import refusal_of, release_memory, run_once, time_alternately

PEER_WRONG = 5e-2  # peers that sum in bf16 lose more than we do; with a larger error they compute something else


@dataclass
class Method:
    name: str
    kernel: str = ""  # of a peer: its name and version
    calls: dict = field(default_factory=dict)  # {pass: call}
    flops: dict = field(default_factory=dict)  # {pass: useful work}
    step: Callable = dict  # a whole training step with its allocations; returns its results by name
    explanation: str = ""  # launches, and the reason of each choice
    refusal: str = ""  # why it was not measured
    extra_bytes: int = 0  # peak of a step in addition to its inputs
    errors: dict = field(default_factory=dict)  # {result: relative error}
    timings: dict = field(default_factory=dict)  # {pass: Timing}

    def examine(self, exact, device):
        """Runs one step to warm up, compile and tune, and a second one to record memory and errors."""
        self.step()
        results, timing = run_once(self.step, device)
        self.extra_bytes, self.errors = timing.extra_bytes, exact.errors(results)

    def ms(self, name):
        """Median time of a pass, or None."""
        return self.timings[name].median if name in self.timings else None

    def row(self, name):
        """The columns of a pass."""
        timing = self.timings[name]
        return {
            "method": self.name, "kernel": self.kernel, "pass": name, **times_of(timing),
            "tflops": tflops(self.flops[name], timing.median), **errors_of(self.errors),
        }  # fmt: skip


@contextmanager
def refusing(method):
    """An error becomes the method's refusal, and its memory is freed."""
    try:
        yield
    except Exception as error:  # from a compiler, from a driver, out of memory, ...
        method.refusal = refusal_of(error)
        method.calls, method.step = {}, dict
    if method.refusal:
        release_memory()


def make_peer(name, make, exact, device, limit=PEER_WRONG):
    """The peer that make() returns, or a method with the reason why it cannot run or is not comparable."""
    refused = Method(name)
    with refusing(refused):
        method = make()
        method.examine(exact, device)
        wrong = [f"{result} is off by {error:.1e}" for result, error in method.errors.items() if not error <= limit]
        if not wrong:
            return method
        refused.refusal = f"it computes something else: {', '.join(wrong)}"
    return refused


def time_methods(methods, device, rounds, sample_ms):
    """Fills in the timings of all methods, whose calls alternate. A call that fails is the method's refusal."""
    calls = {(n, name): call for n, method in enumerate(methods) for name, call in method.calls.items()}
    for (n, name), timing in time_alternately(calls, device, rounds, sample_ms).items():
        methods[n].refusal = methods[n].refusal or timing.refusal
        if timing.samples:
            methods[n].timings[name] = timing
