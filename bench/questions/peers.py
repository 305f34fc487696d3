"""Times StreamKL compared with PyTorch and attention kernels, and checks the results.

    bench/run.py peers                                   # 16 heads of 64 and of 128, 8192 queries and keys, bf16
    bench/run.py peers --lengths 4096,8192,16384 --masks causal --peers cudnn,eager
    bench/run.py peers --heads 32 --key-heads 8          # GQA, compared with as many key heads as heads
    bench/run.py peers --packed 8192,4096,2048,1024,512  # packed sequences, compared with a dense batch
    bench/run.py peers --deterministic                   # adds gradients with the same bits on every run
    bench/run.py peers --linearard DIR --peers '' --masks causal   # compared with LinearARD in the checkout DIR

docs/benchmarks.md has a table of the peers; the column `kernel` has their version. Extra memory is the peak of a step
(forward and gradients) in addition to its inputs: results, saved tensors, workspace. KL and gradients of a sample of rows
of all heads are compared with float64. A peer that is missing, fails or computes something else is named and left out.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from harness.attention import AttentionCalls, Exact, Shape, prepared_calls
from harness.library import BACKWARD, FORWARD, ONE_PASS, STEP
from harness.options import add_numbers, numbers
from harness.report import case_columns, ratio
from harness.run import Method, make_peer
from peers.attention import PEERS
from peers.linearard import ENTRY, LINEARARD, linearard

COLUMNS = (
    "date gpu torch commit method kernel pass heads key_heads batch length packed dim mask ms fastest_ms tflops"
    " ours_ratio one_pass_ratio extra_bytes kl_error dq_error dk_error note"
).split()
STREAMKL, DENSE, DETERMINISTIC = "streamkl", "dense", "deterministic"  # our methods


# ---- The command line ----------------------------------------------------------------------------------------------


def peer_names(text):
    names = list(filter(None, text.split(",")))
    if unknown := sorted(set(names) - set(PEERS)):
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; must be of {', '.join(PEERS)}")
    return names


def add_options(parser):
    add = parser.add_argument
    add_numbers(parser, heads=(16, "query heads"), key_heads=(0, "fewer than heads: compared with as many"))
    add("--packed", type=numbers, default=[], metavar="LIST", help="compares with a dense batch")
    add("--lengths", type=numbers, default=[8192], metavar="LIST", help="queries and keys; default 8192")
    add("--dims", type=numbers, default=[64, 128], metavar="LIST", help="head sizes; default 64,128")
    add("--masks", choices=["full", "causal", "both"], default="both")
    add("--peers", type=peer_names, default=list(PEERS), metavar="LIST", help="default: all; '' for none")
    add("--linearard", type=Path, metavar="DIR", help=f"also time LinearARD: DIR has {ENTRY}")
    add("--deterministic", action="store_true", help="also time gradients with the same bits every time")
    parser.set_defaults(sample_ms=600)


def cases(given):
    if given.key_heads < 0 or given.heads < 1 or given.heads % (given.key_heads or 1):
        raise ValueError(f"--key-heads={given.key_heads}: must divide --heads={given.heads}")
    if given.linearard and not (given.linearard / ENTRY).is_file():
        raise ValueError(f"--linearard={given.linearard}: must be a checkout of LinearARD, with {ENTRY}")
    if given.linearard and (given.packed or given.key_heads):
        others = "--packed and --key-heads, which compare the library with itself"
        raise ValueError(f"--linearard: must be without {others}")
    heads, packed = (given.heads, given.key_heads or given.heads), tuple(given.packed)
    for length in [max(packed)] if packed else given.lengths:
        for dim in given.dims:
            for mask in ("full", "causal") if given.masks == "both" else (given.masks,):
                name = f"{mask}, {heads[0]}/{heads[1]} heads, d={dim}, N={'+'.join(map(str, packed)) or length}"
                sides = (*heads, dim) * 2
                yield Shape(name, *sides, length=length, packed=packed, causal=mask == "causal")


# ---- Measuring -----------------------------------------------------------------------------------------------------


def ours(calls, weight, name=STREAMKL):
    """Two methods, whose results are checked separately: forward with backward, and one-pass."""

    def method(timed, passes):
        def step():
            fresh = AttentionCalls(calls.tensors, calls.shape, weight)
            for each in passes:
                fresh.run(each)
            return fresh.results()

        flops = {each: calls.shape.flops(each) for each in timed}
        return Method(name, calls.timed(timed), calls.plan.kernel, flops, step)

    return [method([FORWARD, BACKWARD], [FORWARD, BACKWARD]), method([ONE_PASS], [FORWARD, ONE_PASS])]


def make_ours(shape, run, name=STREAMKL):
    """(our methods, examined; lines that name their launches; the tensors; the exact results for peers)"""
    calls = prepared_calls(shape, run.device)
    exact = Exact(shape, calls.tensors, all_rows=bool(run.given.linearard))
    methods, sources = ours(calls, exact.weight, name), [calls]
    if run.given.deterministic and name == STREAMKL:
        same_bits = AttentionCalls(calls.tensors, replace(shape, deterministic=True))
        same_bits.run(FORWARD)
        two_passes, one_pass = ours(same_bits, exact.weight, DETERMINISTIC)
        del two_passes.calls[FORWARD]  # it has the same bits anyway
        methods, sources = [*methods, two_passes, one_pass], [calls, same_bits]
    for method in methods:
        method.examine(exact, run.device)
    launches = [source.explain(one) for source in sources for one in (FORWARD, BACKWARD, ONE_PASS)]
    return methods, list(dict.fromkeys("\n".join(launches).splitlines())), calls.tensors, exact


def ratios_of(methods):
    """The columns that compare a method with ours, as a function of the method and its pass."""

    def our_ms(name):
        return next((method.ms(name) for method in methods if method.name == STREAMKL and method.ms(name)), None)

    def ratios(method, name):
        ms, is_ours = method.ms(name), method.name == STREAMKL
        return {
            "ours_ratio": "" if is_ours else ratio(our_ms(name), ms),
            "one_pass_ratio": ratio(our_ms(ONE_PASS), ms) if name in (BACKWARD, STEP) else "",
        }

    return ratios


def measure(shape, run):
    methods, launches, tensors, exact = make_ours(shape, run)
    if shape.packed or shape.key_heads_s != shape.heads_s:
        return compare_dense(methods, launches, shape, run)
    torch.compiler.reset()  # after a few shapes, torch.compile stops compiling
    peers = {name: PEERS[name] for name in run.given.peers}
    if run.given.linearard:
        peers[LINEARARD] = linearard(run.given.linearard)
    for name, make in peers.items():
        methods.append(make_peer(name, lambda: make(tensors, shape, exact.weight), exact, run.device))
    result = run.time(methods, ratios_of(methods))
    result.lines += launches
    return result


def compare_dense(methods, launches, shape, run):
    """Shared key heads or packing, compared with the same work without them."""
    dense_shape = shape.dense()
    dense, more_launches, *_ = make_ours(dense_shape, run, DENSE)
    ratios, dense_columns = ratios_of(methods), case_columns(dense_shape, COLUMNS)

    def rate(some, name):
        timed = (method for method in some if method.ms(name) and name in method.flops)
        return next((method.flops[name] / method.ms(name) for method in timed), None)

    def compared(method, name):
        if method in dense:
            return dense_columns | ratios(method, name)
        rates = rate(methods, name), rate(dense, name)
        return ratios(method, name) | ({"note": f"{ratio(*rates, '.3f')} of the dense rate"} if all(rates) else {})

    result = run.time([*methods, *dense], compared)
    result.lines += dict.fromkeys(launches + more_launches)
    return result
