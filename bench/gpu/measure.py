"""Errors, memory and time of methods."""

import gc
import math
from contextlib import contextmanager
from functools import cached_property

import torch

# A larger relative error of StreamKL is a bug and not rounding to bf16. NaN exceeds every limit.
WRONG = {"kl": 1e-4, "dq": 2e-2, "dk": 2e-2, "dw": 2e-2}
# Peers that sum in bf16 lose more. A peer with a larger error computes something else and is not compared.
PEER_WRONG = 5e-2

# ---- Errors --------------------------------------------------------------------------------------------------------------


def random_tensors(case, device="cuda"):
    """q_t, k_t, q_s, k_s"""
    torch.manual_seed(0)
    shapes = [(case.batch, heads, case.rows, case.dim) for heads in (case.heads, case.keys) * 2]
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def exact(q_t, k_t, q_s, k_s, causal, block=1024):
    """KL, dq and dk in float64 of queries [heads, length, dim] that share keys [length, dim], per block of queries."""
    q_t, k_t, q_s, k_s = (tensor.double() for tensor in (q_t, k_t, q_s, k_s))
    length, dim = k_s.shape
    scale, positions = dim**-0.5, torch.arange(length, device=q_s.device)
    kl, dq, dk = torch.empty_like(q_s[..., 0]), torch.empty_like(q_s), torch.zeros_like(k_s)
    for begin in range(0, length, block):
        rows = slice(begin, min(begin + block, length))
        x, y = scale * q_t[:, rows] @ k_t.T, scale * q_s[:, rows] @ k_s.T
        if causal:
            hidden = positions[None, :] > positions[rows, None]
            x, y = x.masked_fill(hidden, float("-inf")), y.masked_fill(hidden, float("-inf"))
        log_p, log_s = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
        p, s = log_p.exp(), log_s.exp()
        difference = torch.where(p > 0, log_p - log_s, 0)  # hidden keys are inf - inf
        kl[:, rows] = (p * difference).sum(-1)
        dq[:, rows] = scale * (s - p) @ k_s
        dk += scale * ((s - p).mT @ q_s[:, rows]).sum(0)
    return {"kl": kl, "dq": dq, "dk": dk}


class Oracle:
    """Exact results of the first key head of the first sequence and of the last key head of the last sequence."""

    def __init__(self, tensors, case):
        self.tensors, self.case, self.group = tensors, case, case.heads // case.keys
        places = {(*case.sequences[0], 0), (*case.sequences[-1], case.keys - 1)}
        self.exact = {place: self.compute(place) for place in places}

    def part(self, place, tensor, of_keys):
        batch, begin, end, key_head = place
        heads = key_head if of_keys else slice(key_head * self.group, (key_head + 1) * self.group)
        return tensor[batch, heads, begin:end]

    def compute(self, place):
        parts = [self.part(place, tensor, of_keys) for tensor, of_keys in zip(self.tensors, (False, True, False, True))]
        return exact(*parts, self.case.causal)

    @cached_property
    def exact_sum(self):
        """The sum of the KLs of all rows of all heads."""
        places = [(*sequence, key_head) for sequence in self.case.sequences for key_head in range(self.case.keys)]
        return sum(self.compute(place)["kl"].sum() for place in places)

    def errors(self, results):
        """{result: largest relative error in norm}; a KL without dimensions is the sum of all rows."""
        found = {}
        for name, result in results.items():
            pairs = [(self.part(place, result, name == "dk"), true[name]) for place, true in self.exact.items() if result.dim()]
            pairs = pairs or [(result, self.exact_sum)]
            errors = [((part.double() - true).norm() / true.norm()).item() for part, true in pairs]
            found[name] = float("nan") if any(error != error for error in errors) else max(errors)
        return found


# ---- Memory --------------------------------------------------------------------------------------------------------------


def examine(method, oracle):
    """Runs one step to warm up, compile and tune, and a second one to record memory and errors."""
    method.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = method.step()
    torch.cuda.synchronize()
    method.extra_memory = torch.cuda.max_memory_allocated() - before
    method.errors = oracle.errors(results)


# ---- Time ----------------------------------------------------------------------------------------------------------------


# Untimed calls before each sample. The power limit sets the clock, which for this long depends on the previous method.
WARM_UP_MS = 300


def milliseconds(prepare, calls, untimed):
    """Time per call of `calls` calls in a row, after `untimed` others."""
    run = prepare()
    for _ in range(untimed):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def time_methods(methods, rounds, sample_ms):
    """Fills in the times of all methods: in each round, one sample per method. A method that fails is refused."""
    calls = {}
    for round_index in range(-1, rounds):  # the first round, untimed, determines the calls per sample
        for index, method in enumerate(methods):
            for operation, prepare in method.passes.items():
                if method.refusal:
                    continue
                with refusing(method):
                    if round_index < 0:
                        time = milliseconds(prepare, 1, 1)
                        calls[index, operation] = max(1, min(100, round(sample_ms / time))), math.ceil(WARM_UP_MS / time)
                    else:
                        time = milliseconds(prepare, *calls[index, operation])
                        method.times.setdefault(operation, []).append(time)


@contextmanager
def refusing(method):
    """An error becomes the method's refusal, and its memory is freed."""
    try:
        yield
    except Exception as error:  # from a compiler, from a driver, out of memory, ...
        method.refusal = refusal_of(error)
        method.passes, method.times, method.step = {}, {}, dict
    if method.refusal:
        release_memory()


def refusal_of(error):
    """One line that says why something was not measured."""
    first_line = (str(error).strip() or "no reason given").split("\n")[0]
    return first_line if type(error) is RuntimeError else f"{type(error).__name__}: {first_line}"


def release_memory():
    gc.collect()
    torch.cuda.empty_cache()
