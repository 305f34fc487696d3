"""A run: for every case the methods are made, examined, timed in turns and reported."""

import torch

from .cases import BACKWARD, FORWARD, OPERATIONS, Case
from .library import lib
from .measure import PEER_WRONG, WRONG, Oracle, examine, random_tensors, refusing, release_memory, take_turns
from .methods import PEERS, Method, ours
from .report import append_csv, beside_dense, csv_rows, print_errors, print_table


DETERMINISTIC = "deterministic"  # ours, with gradients that have the same bits on every run
OURS = ("streamkl", "dense", DETERMINISTIC)  # dense: without groups and packing, as a yardstick for them


class NotPossible(Exception):
    """Nothing can be measured here; the message says why."""


def cases_of(arguments):
    masks = {"full": [False], "causal": [True], "both": [False, True]}[arguments.masks]
    lengths = [max(arguments.packed)] if arguments.packed else arguments.lengths
    for length in lengths:
        for dim in arguments.dims:
            for causal in masks:
                yield Case(arguments.heads, length, dim, causal, arguments.key_heads, packed=tuple(arguments.packed))


def make_peer(name, tensors, case, wanted, oracle):
    """A peer that cannot run, or computes something else, says why."""
    refused = Method(name, case)
    with refusing(refused):
        method = PEERS[name](tensors, case, wanted)
        examine(method, oracle)
        wrong = [f"{result} is off by {error:.1e}" for result, error in method.errors.items() if not error <= PEER_WRONG]
        if not wrong:
            return method
        refused.refusal = f"it computes something else: {', '.join(wrong)}"
    return refused


class LibraryBench:
    """The library, the arguments, and whether all that we computed was right."""

    def __init__(self, arguments):
        if not torch.cuda.is_available():
            raise NotPossible("PyTorch sees no GPU")
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

    def run(self):
        print(self.introduction())
        measure = self.beside_dense if self.arguments.packed or self.arguments.key_heads else self.beside_peers
        for case in cases_of(self.arguments):
            measure(case)
            release_memory()

    def beside_peers(self, case):
        torch.compiler.reset()  # it compiles a function for a few shapes, and runs it uncompiled for any further one
        methods, tensors, oracle = self.make_ours(case)
        if {FORWARD, BACKWARD} & set(self.wanted):
            methods += [make_peer(name, tensors, case, self.wanted, oracle) for name in self.arguments.peers]
        self.time(methods)
        self.report(methods)

    def beside_dense(self, case):
        """Groups or packing, in turns with the same work without them."""
        methods, dense = self.make_ours(case)[0], self.make_ours(case.dense(), "dense")[0]
        self.time(methods + dense)
        rates = list(beside_dense(methods, dense))
        self.report(methods, {operation: f"{mine / other:.3f} of the dense rate" for operation, mine, other in rates})
        self.report(dense)
        for operation, mine, other in rates:
            print(f"  {operation:9} {mine:6.1f} TFLOP/s, dense {other:6.1f}: {mine / other:.3f} of the dense rate")

    def make_ours(self, case, name="streamkl"):
        """Our methods, examined, and what peers are made with."""
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
        take_turns(methods, self.arguments.rounds, self.arguments.turn_ms)
        self.is_right &= not any(method.refusal for method in methods if method.name in OURS)

    def report(self, methods, notes=None):
        print(f"\n{methods[0].case}: {methods[0].kernel}")
        print_table(methods)
        print_errors(methods)
        if self.arguments.csv:
            append_csv(self.arguments.csv, csv_rows(methods, notes), self.about)
