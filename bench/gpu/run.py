"""A run of bench/peers.py: makes, checks, times and reports the methods of every case."""

import torch

from .cases import BACKWARD, FORWARD, LINEARARD, OPERATIONS, Case
from .library import lib
from .linearard import linearard
from .measure import PEER_WRONG, WRONG, Oracle, examine, random_tensors, refusing, release_memory, time_methods
from .methods import PEERS, Method, ours
from .report import append_csv, compared_with_dense, csv_rows, print_errors, print_explanations, print_table

DETERMINISTIC = "deterministic"  # StreamKL with gradients that have the same bits on every run
OURS = ("streamkl", "dense", DETERMINISTIC)  # dense: without shared key heads and packing, for comparison


class NotPossible(Exception):
    """The machine cannot run the benchmark; the message says why."""


def cases_of(arguments):
    masks = {"full": [False], "causal": [True], "both": [False, True]}[arguments.masks]
    lengths = [max(arguments.packed)] if arguments.packed else arguments.lengths
    for length in lengths:
        for dim in arguments.dims:
            for causal in masks:
                yield Case(arguments.heads, length, dim, causal, arguments.key_heads, packed=tuple(arguments.packed))


def make_peer(name, make, tensors, case, wanted, oracle):
    """The peer, or a method with the reason why it cannot run or is not comparable."""
    refused = Method(name, case)
    with refusing(refused):
        method = make(tensors, case, wanted)
        examine(method, oracle)
        wrong = [f"{result} is off by {error:.1e}" for result, error in method.errors.items() if not error <= PEER_WRONG]
        if not wrong:
            return method
        refused.refusal = f"it computes something else: {', '.join(wrong)}"
    return refused


class LibraryBench:
    """The arguments, the library, and whether all results of StreamKL were right."""

    def __init__(self, arguments):
        if not torch.cuda.is_available():
            raise NotPossible("PyTorch finds no GPU")
        self.arguments, self.is_right = arguments, True
        self.version = lib.library().skl_version().decode()
        self.about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": arguments.commit}

    def introduction(self):
        commit = self.about["commit"] or "unknown"
        return f"streamkl {self.version}, commit {commit}, PyTorch {self.about['torch']}, {self.about['gpu']}, bf16"


class Bench(LibraryBench):
    def __init__(self, arguments):
        super().__init__(arguments)
        self.wanted = arguments.only or list(OPERATIONS)
        self.peers = {name: PEERS[name] for name in arguments.peers}
        if arguments.linearard:
            self.peers[LINEARARD] = linearard(arguments.linearard)

    def run(self):
        print(self.introduction())
        measure = self.compare_dense if self.arguments.packed or self.arguments.key_heads else self.compare_peers
        for case in cases_of(self.arguments):
            measure(case)
            release_memory()

    def compare_peers(self, case):
        torch.compiler.reset()  # after a few shapes, torch.compile stops compiling
        methods, tensors, oracle = self.make_ours(case)
        if {FORWARD, BACKWARD} & set(self.wanted):
            peers = self.peers.items()
            methods += [make_peer(name, make, tensors, case, self.wanted, oracle) for name, make in peers]
        self.time(methods)
        self.report(methods)

    def compare_dense(self, case):
        """Shared key heads or packing, compared with the same work without them."""
        methods, dense = self.make_ours(case)[0], self.make_ours(case.dense(), "dense")[0]
        self.time(methods + dense)
        rates = list(compared_with_dense(methods, dense))
        self.report(methods, {operation: f"{mine / other:.3f} of the dense rate" for operation, mine, other in rates})
        self.report(dense)
        for operation, mine, other in rates:
            print(f"  {operation:9} {mine:6.1f} TFLOP/s, dense {other:6.1f}: {mine / other:.3f} of the dense rate")

    def make_ours(self, case, name="streamkl"):
        """The methods of StreamKL, checked; and the tensors and the oracle for peers."""
        tensors = random_tensors(case)
        oracle = Oracle(tensors, case)
        methods = ours(tensors, case, self.wanted, name)
        if self.arguments.deterministic and name == "streamkl":
            gradients = [operation for operation in self.wanted if operation != FORWARD]
            methods += ours(tensors, case, gradients, DETERMINISTIC, True)
        for method in methods:
            examine(method, oracle)
            self.is_right &= all(error <= WRONG[name] for name, error in method.errors.items())
        return methods, tensors, oracle

    def time(self, methods):
        release_memory()
        time_methods(methods, self.arguments.rounds, self.arguments.sample_ms)
        self.is_right &= not any(method.refusal for method in methods if method.name in OURS)

    def report(self, methods, notes=None):
        print(f"\n{methods[0].case}: {methods[0].kernel}")
        print_explanations(methods)
        print_table(methods)
        print_errors(methods)
        if self.arguments.csv:
            append_csv(self.arguments.csv, csv_rows(methods, notes), self.about)
