"""The table and the CSV rows of bench/shapes.py. Needs neither torch nor a GPU."""

import sys
from dataclasses import dataclass, field

from .cases import BACKWARD, FORWARD, ONE_PASS, STEP
from .report import column, ratio, rounded
from .shape_cases import ALL_PASSES, FORWARD_GIVEN

COLUMNS = (
    "date gpu torch commit shape pass batch length mask heads_t key_heads_t dim_t dtype_t heads_s key_heads_s dim_s dtype_s"
    " softcap teacher_gradients deterministic reverse ms fastest_ms tflops base_ms base_ratio cudnn_ms cudnn_ratio"
    " eager_ms eager_ratio kernel kl_error dq_error dk_error note"
).split()

# {our pass: the pass that it is compared with}. The base shape has no teacher groups: its forward computes all LSEs.
BASE_PASSES = {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, BACKWARD: BACKWARD, ONE_PASS: ONE_PASS, STEP: STEP}
# cuDNN's forward has as many products as ours, its backward one more. Eager PyTorch has no backward alone.
CUDNN_PASSES = {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, BACKWARD: BACKWARD, ONE_PASS: BACKWARD, STEP: STEP}
EAGER_PASSES = {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, ONE_PASS: STEP, STEP: STEP}
COMPARED = {"base": BASE_PASSES, "cudnn": CUDNN_PASSES, "eager": EAGER_PASSES}


@dataclass
class Measured:
    """All results of one shape. Times are those of gpu.alternate, by pass."""

    shape: object
    ours: dict = field(default_factory=dict)
    base: dict = field(default_factory=dict)
    cudnn: dict = field(default_factory=dict)
    eager: dict = field(default_factory=dict)
    kernels: dict = field(default_factory=dict)  # {pass: names}
    errors: dict = field(default_factory=dict)  # {result: relative error}
    notes: list = field(default_factory=list)  # what went wrong or was not measured

    @staticmethod
    def ms(of, operation):
        """Median time, or None; a step that was not timed as a whole is the sum of its two passes."""
        if operation == STEP and STEP not in of:
            both = [Measured.ms(of, one) for one in (FORWARD, BACKWARD)]
            return sum(both) if all(both) else None
        timing = of.get(operation)
        return timing and timing.median

    @property
    def lines(self):
        """One dict per pass that was measured; a ratio is our time divided by the other."""
        for operation in ALL_PASSES:
            ms = self.ms(self.ours, operation)
            if not ms:
                continue
            line = {"pass": operation, "ms": ms, "tflops": self.shape.flops(operation) / ms * 1e-9}
            for name, passes in COMPARED.items():
                line[name] = self.ms(getattr(self, name), passes.get(operation))
                line[f"{name}_ratio"] = ratio(ms, line[name])
            yield line

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
    if any(line["eager"] for line in by_pass.values()):
        multiples = [f"{1 / line['eager_ratio']:.1f} x {name}" for name, line in by_pass.items() if line["eager"]]
        print(f"  eager PyTorch takes {', '.join(multiples)}")
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
    values = {name: getattr(shape, name) for name in names}
    return {"shape": shape.name} | {name: int(value) if type(value) is bool else value for name, value in values.items()}


def csv_rows(measured):
    """One row per pass, or a single one with the reason if nothing was measured."""
    common = shape_columns(measured.shape) | {"note": "; ".join(measured.notes)}
    common |= {f"{name}_error": rounded(error, ".2e") for name, error in measured.largest.items()}
    lines = list(measured.lines)
    for line in lines:
        timing = measured.ours.get(line["pass"])
        yield common | {
            "pass": line["pass"], "ms": rounded(line["ms"], ".4f"), "fastest_ms": rounded(timing and timing.fastest, ".4f"),
            "tflops": rounded(line["tflops"], ".1f"), "kernel": measured.kernels.get(line["pass"], ""),
            **{f"{name}_ms": rounded(line[name], ".4f") for name in COMPARED},
            **{f"{name}_ratio": rounded(line[f"{name}_ratio"], ".3g") for name in COMPARED},
        }  # fmt: skip
    if not lines:
        yield common
