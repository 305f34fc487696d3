"""A run of bench/shapes.py: checks, times and reports every shape, and goes on if one fails."""

from contextlib import contextmanager

import torch

from .alternate import time_alternately
from .cases import BACKWARD, FORWARD, ONE_PASS
from .measure import refusal_of, release_memory
from .report import append_csv
from .run import LibraryBench
from .shape_cases import BASE, chosen
from .shape_methods import Check, ShapePlan, cudnn_calls, eager_calls, random_tensors
from .shape_report import COLUMNS, Measured, csv_rows, print_head, print_measured

BASE_CALLS = (FORWARD, BACKWARD, ONE_PASS)


def make_plan(shape, device):
    """The plan on random inputs, after a forward: the LSEs that the other passes read."""
    plan = ShapePlan(random_tensors(shape, device), shape)
    plan.run(FORWARD)
    return plan


def calls_of(plan, operations, name):
    return {(name, operation): lambda operation=operation: plan.run(operation) for operation in operations}


def measure(shape, base, device, rounds, sample_ms, with_eager=False):
    """Measured: our passes, those of the base shape, attention by cuDNN, and eager PyTorch, which alternate one by one."""
    plan, measured = make_plan(shape, device), Measured(shape)
    measured.kernels = {operation: plan.kernels(operation) for operation in plan.passes}
    calls = calls_of(plan, plan.passes, "ours")
    if shape != base.shape:
        calls |= calls_of(base.plan, BASE_CALLS, "base")
    others = {"cudnn": lambda: cudnn_calls(shape, device)}
    if with_eager:
        others["eager"] = lambda: eager_calls(plan.tensors, shape)
    for name, make in others.items():
        try:
            calls |= {(name, operation): call for operation, call in make().items()}
        except Exception as error:  # they support fewer types, masks and options
            measured.notes.append(f"{name} not measured: {refusal_of(error)}")
    for (name, operation), timing in time_alternately(calls, device, rounds, sample_ms).items():
        getattr(measured, name)[operation] = timing
        if timing.refusal:
            measured.notes.append(f"{name} {operation} not measured: {timing.refusal}")
    if shape == base.shape:
        measured.base = measured.ours
    return measured


@contextmanager
def noting(what, failures):
    """An error of the library or of the GPU is noted, and the run goes on."""
    try:
        yield
    except Exception as error:
        failures.append(f"{what} failed: {refusal_of(error)}")


class Base:
    """The shape that all others are compared with, and its plan."""

    def __init__(self, device, shape=BASE):
        self.shape, self.plan = shape, make_plan(shape, device)


class ShapesBench(LibraryBench):
    DEVICE = "cuda"

    def run(self):
        given = self.arguments
        self.seed = torch.seed() if given.seed is None else given.seed  # fresh inputs in every run
        print(f"{self.introduction()} unless named; times in ms; --seed {self.seed}\n")
        print_head()
        base = Base(self.DEVICE) if given.rounds else None
        general, failed = [], []
        for shape in chosen(given.only, given.quick):
            measured = self.one(shape, base)
            print_measured(measured)
            general += [shape.name] if "general" in measured.all_kernels else []
            failed += [shape.name] if not (measured.ours or measured.errors) else []
            if given.csv:
                append_csv(given.csv, csv_rows(measured), self.about, COLUMNS)
            release_memory()
        print(f"\nshapes on a general kernel: {'; '.join(general) or 'none'}")
        if failed:
            print(f"shapes that failed: {'; '.join(failed)}")

    def one(self, shape, base):
        """Measured, with what went wrong in its notes."""
        given, measured, errors, wrong = self.arguments, Measured(shape), {}, []
        torch.manual_seed(self.seed)
        if given.check:
            with noting("check", wrong):
                errors, differences = Check(shape, self.DEVICE).run()
                wrong += differences
        if given.rounds:
            with noting("timing", wrong):
                measured = measure(shape, base, self.DEVICE, given.rounds, given.sample_ms, given.eager)
        wrong += [f"{operation} failed: {timing.refusal}" for operation, timing in measured.ours.items() if timing.refusal]
        self.is_right &= not wrong
        measured.errors, measured.notes = errors, [*wrong, *measured.notes]
        return measured
