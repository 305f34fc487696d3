"""A run of bench/indexer.py: checks a small problem completely, then checks rows of the large one, times and reports it."""

from dataclasses import replace

import torch

from .cases import IndexerCase
from .indexer_methods import (
    GATHERED_BYTES, ExactRows, IndexerMethod, cudnn_attention, make_tensors, naive, ours, rows_together, some_rows,
)  # fmt: skip
from .indexer_report import COLUMNS, csv_rows, errors_text, print_table
from .measure import PEER_WRONG, WRONG, examine, refusing, release_memory, time_methods
from .report import append_csv, bytes_text, print_explanations
from .run import LibraryBench

DEVICE = "cuda"
# The naive code must compute the same: approximately in bf16, to the last digits in float64.
LIMITS = {"naive": dict.fromkeys(WRONG, PEER_WRONG), "naive, f64": dict.fromkeys(WRONG, 1e-12)}
SMALL = 1000  # queries and keys of the problem that is checked completely


class IndexerBench(LibraryBench):
    def run(self):
        given = self.arguments
        print(f"{self.introduction()}, weights in f32")
        case = IndexerCase(
            given.length, given.heads, given.key_heads or given.heads, given.dim, given.index_heads, given.index_dim,
            given.top_k, given.causal,
        )  # fmt: skip
        self.check_small(replace(case, length=min(case.length, SMALL)))
        release_memory()
        self.measure(case)

    def check_small(self, case):
        """Compares loss and all gradients of StreamKL and of the naive code with float64."""
        print(f"\nRelative errors compared with float64, {case}")
        tensors = make_tensors(case, DEVICE)
        exact = ExactRows(tensors, case, torch.arange(case.length, device=DEVICE))
        in_float64 = {name: tensor if name == "indices" else tensor.double() for name, tensor in tensors.items()}
        for method in [*ours(tensors, case), naive(tensors, case), naive(in_float64, case, "naive, f64")]:
            method.errors = exact.errors(method.step())
            print(f"  {method.name:13} {errors_text(method.errors)}{'' if self.judge(method) else '   WRONG'}")

    def judge(self, method):
        is_right = all(error <= LIMITS.get(method.name, WRONG)[name] for name, error in method.errors.items())
        self.is_right &= is_right
        return is_right

    def measure(self, case):
        tensors = make_tensors(case, DEVICE)
        exact = ExactRows(tensors, case, some_rows(case, DEVICE))
        methods = ours(tensors, case)
        for method in methods:
            examine(method, exact)
            self.judge(method)
        methods += [self.make_naive(tensors, case, exact), self.make_cudnn()]
        release_memory()
        time_methods(methods, self.arguments.rounds, self.arguments.sample_ms)
        print(f"\n{case}: {methods[0].kernel}")
        print_explanations(methods)
        print_table(methods)
        if rows_together(case) < case.length:
            rows = f"{rows_together(case)} rows at a time"
            print(f"  naive computes {rows}, for which it gathers up to {bytes_text(GATHERED_BYTES)} of teacher keys")
        for method in methods:
            if method.errors:
                print(f"  relative error of {method.name + ', some rows:':24} {errors_text(method.errors)}")
        mine, other = methods[0], methods[2]
        if other.extra_memory:
            share = mine.extra_memory / other.extra_memory
            print(f"  a step of StreamKL takes {share:.2%} of the extra memory of a naive step")
        self.is_right &= not any(method.refusal for method in methods[:2])
        if self.arguments.csv:
            append_csv(self.arguments.csv, csv_rows(methods, case), self.about, COLUMNS)

    def make_naive(self, tensors, case, exact):
        """If it is left out, or out of memory, the table says so."""
        refused = IndexerMethod("naive", case)
        rows, keys = rows_together(case), min(case.top_k or case.length, case.length)
        size = bytes_text(4 * case.heads * rows * keys)
        scores = f"its teacher scores alone, [{case.heads}, {rows}, {keys}] in f32, are {size}"
        if self.arguments.no_naive:
            refused.refusal = f"--no-naive; {scores}"
            return refused
        with refusing(refused):
            method = naive(tensors, case)
            examine(method, exact)
            self.judge(method)
            return method
        if refused.refusal.startswith("OutOfMemoryError"):
            refused.refusal = f"out of memory; {scores}. {refused.refusal}"
        return refused

    @staticmethod
    def make_cudnn():
        refused = IndexerMethod("cudnn", None)
        with refusing(refused):
            method = cudnn_attention()
            for prepare in method.passes.values():
                prepare()()
            return method
        return refused
