"""The table and the CSV rows of bench/shapes.py. Needs neither torch nor a GPU."""

import sys
from dataclasses import dataclass, field

from .cases import BACKWARD, FORWARD, ONE_PASS, STEP
from .report import column, ratio, rounded
from .shape_cases import ALL_PASSES, FORWARD_GIVEN

COLUMNS = (
    "date gpu torch commit shape pass batch length mask heads_t key_heads_t dim_t dtype_t heads_s key_heads_s dim_s dtype_s"
    " softcap teacher_gradients deterministic reverse ms fastest_ms tflops base_ms base_ratio cudnn_ms cudnn_ratio kernel"
    " kl_error dq_error dk_error note"
).split()

# What a pass is compared with: cuDNN's forward has as many products as ours, its backward one more.
CUDNN_PASSES = {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, BACKWARD: BACKWARD, ONE_PASS: BACKWARD}
# The base shape has no teacher groups: its forward always computes the LSEs.
BASE_PASSES = {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, BACKWARD: BACKWARD, ONE_PASS: ONE_PASS, STEP: STEP}


@dataclass
class Measured:
    """All results of one shape. Times are those of gpu.alternate, by pass."""

    shape: object
    ours: dict = field(default_factory=dict)
    base: dict = field(default_factory=dict)
    cudnn: dict = field(default_factory=dict)
    kernels: dict = field(default_factory=dict)  # {pass: names}
    errors: dict = field(default_factory=dict)  # {result: relative error}
    notes: list = field(default_factory=list)  # what went wrong or was not measured

    def ms(self, of, operation):
        """Median time, or None; the step without LSEs is the sum of its two passes."""
        if operation == STEP:
            both = [self.ms(of, one) for one in (FORWARD, BACKWARD)]
            return sum(both) if all(both) else None
        timing = of.get(operation)
        return timing and timing.median

    def cudnn_ms(self, operation):
        if operation == STEP:
            return self.ms(self.cudnn, STEP)
        return self.ms(self.cudnn, CUDNN_PASSES[operation])

    @property
    def lines(self):
        """One dict per pass that was measured."""
        for operation in ALL_PASSES:
            ms = self.ms(self.ours, operation)
            if not ms:
                continue
            base, cudnn = self.ms(self.base, BASE_PASSES[operation]), self.cudnn_ms(operation)
            yield {
                "pass": operation, "ms": ms, "base": base, "base_ratio": ratio(ms, base), "cudnn": cudnn,
                "cudnn_ratio": ratio(ms, cudnn), "tflops": self.shape.flops(operation) / ms * 1e-9,
            }  # fmt: skip

    @property
    def all_kernels(self):
        return ", ".join(dict.fromkeys(self.kernels.values()))

    @property
    def largest(self):
        """{kl, dq, dk: largest error of either side}"""
        found = {}
        for name, error in self.errors.items():
            kind = name.split("_")[0]
            found[kind] = error if not error <= found.get(kind, -1.0) else found[kind]
        return found


SHOWN = (FORWARD, BACKWARD, ONE_PASS, STEP)


def print_head():
    heads = " ".join(f"{name:>9} {'/base':>6} {'/cuDNN':>6}" for name in ("forward", "backward", "one pass", "no LSEs"))
    print(f"{'shape':36} {heads}  kernels")


def cells(line):
    line = line or {}
    return f"{column(line.get('ms'), '9.3f')} {column(line.get('base_ratio'), '6.2f')} {column(line.get('cudnn_ratio'), '6.2f')}"


def print_measured(measured):
    by_pass = {line["pass"]: line for line in measured.lines}
    shown = " ".join(cells(by_pass.get(operation)) for operation in SHOWN)
    print(f"{measured.shape.name:36} {shown}  {measured.all_kernels}")
    if FORWARD_GIVEN in by_pass:
        print(f"{'  lse_t given':36} {cells(by_pass[FORWARD_GIVEN])}")
    if measured.errors:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in measured.errors.items())
        print(f"  relative errors: {errors}")
    for note in measured.notes:
        print(f"  {note}")
    sys.stdout.flush()  # a later shape may take long


def shape_columns(shape):
    names = (
        "batch length mask heads_t key_heads_t dim_t dtype_t heads_s key_heads_s dim_s dtype_s softcap teacher_gradients"
        " deterministic reverse"
    ).split()
    flags = {name: getattr(shape, name) for name in names}
    return {"shape": shape.name} | {name: int(value) if value in (True, False) else value for name, value in flags.items()}


def csv_rows(measured):
    """One row per pass, or a single one with the reason if nothing was measured."""
    common = shape_columns(measured.shape) | {"note": "; ".join(measured.notes)}
    common |= {f"{name}_error": rounded(error, ".2e") for name, error in measured.largest.items()}
    lines = list(measured.lines)
    for line in lines:
        timing = measured.ours.get(line["pass"])
        yield common | {
            "pass": line["pass"], "ms": rounded(line["ms"], ".4f"), "fastest_ms": rounded(timing and timing.fastest, ".4f"),
            "tflops": rounded(line["tflops"], ".1f"), "base_ms": rounded(line["base"], ".4f"),
            "base_ratio": rounded(line["base_ratio"], ".3g"), "cudnn_ms": rounded(line["cudnn"], ".4f"),
            "cudnn_ratio": rounded(line["cudnn_ratio"], ".3g"), "kernel": measured.kernels.get(line["pass"], ""),
        }  # fmt: skip
    if not lines:
        yield common
