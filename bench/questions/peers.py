"""Times StreamKL compared with PyTorch and attention kernels, and checks the results.

    bench/run.py peers                                   # 16 heads of 64 and of 128, 8192 queries and keys, bf16
    bench/run.py peers --lengths 4096,8192,16384 --masks causal --peers cudnn,eager
    bench/run.py peers --csv bench/results/peers.csv     # appends the results
    bench/run.py peers --heads 32 --key-heads 8          # GQA, compared with as many key heads as heads
    bench/run.py peers --packed 8192,4096,2048,1024,512  # packed sequences, compared with a dense batch
    bench/run.py peers --deterministic                   # adds gradients with the same bits on every run
    bench/run.py peers --linearard DIR --peers '' --masks causal   # compared with LinearARD in the checkout DIR

The peers, on the same tensors; the column `kernel` has their version:

    cudnn    scaled_dot_product_attention by cuDNN, the reference for kernel quality. Its forward takes two matmuls per
             pair, as ours does; its backward takes five, ours four
    fa2      the same by FlashAttention-2
    flex     attention KL composed of FlexAttention calls: O(N) memory without a custom kernel
    compile  eager under torch.compile
    eager    plain attention KL: two N x N logits, two log_softmax, one sum
    linearard   the Triton kernels of github.com/gracefulning/LinearARD, only with --linearard. They return the sum of all
                rows, so the error of their KL is that of the sum

The backward of a peer goes through a graph that is built before, untimed. Extra memory is the peak of a step (forward and
gradients) in addition to its inputs: results, saved tensors, workspace. KL and gradients of a sample of rows of all heads
are compared with float64. A peer that is missing, fails or computes something else is named and left out.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from harness.attention import AttentionCalls, Exact, Shape, prepared_calls
from harness.library import BACKWARD, FORWARD, ONE_PASS, STEP
from harness.method import Method, make_peer, time_methods
from harness.report import ratio, rounded
from harness.run import Result
from harness.timing import release_memory
from peers.attention import PEERS
from peers.linearard import ENTRY, LINEARARD, linearard

COLUMNS = (
    "date gpu torch commit method kernel pass heads key_heads batch length packed dim mask ms fastest_ms tflops"
    " ours_ratio one_pass_ratio extra_bytes kl_error dq_error dk_error note"
).split()
SHOWN = (
    "method kernel pass ms fastest_ms tflops ours_ratio one_pass_ratio extra_bytes kl_error dq_error dk_error note"
).split()
STREAMKL, DENSE, DETERMINISTIC = "streamkl", "dense", "deterministic"  # our methods


# ---- The command line ----------------------------------------------------------------------------------------------


def numbers(text):
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def peer_names(text):
    names = list(filter(None, text.split(",")))
    if unknown := sorted(set(names) - set(PEERS)):
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; must be of {', '.join(PEERS)}")
    return names


def add_options(parser):
    parser.add_argument("--heads", type=int, default=16, metavar="N", help="query heads; default 16")
    parser.add_argument("--key-heads", type=int, default=0, metavar="N", help="compares with one key head per head")
    parser.add_argument("--packed", type=numbers, default=[], metavar="LIST", help="compares with a dense batch")
    parser.add_argument(
        "--lengths", type=numbers, default=[8192], metavar="LIST", help="queries and keys; default 8192"
    )
    parser.add_argument("--dims", type=numbers, default=[64, 128], metavar="LIST", help="head sizes; default 64,128")
    parser.add_argument("--masks", choices=["full", "causal", "both"], default="both")
    parser.add_argument(
        "--peers", type=peer_names, default=list(PEERS), metavar="LIST", help="default: all; '' for none"
    )
    parser.add_argument("--linearard", type=Path, metavar="DIR", help=f"also time LinearARD: DIR has {ENTRY}")
    parser.add_argument(
        "--deterministic", action="store_true", help="also time gradients with the same bits every time"
    )
    parser.set_defaults(sample_ms=600)


def cases(given):
    if given.key_heads < 0 or given.heads < 1 or given.heads % (given.key_heads or 1):
        raise ValueError(f"--key-heads={given.key_heads}: must divide --heads={given.heads}")
    if given.linearard and not (given.linearard / ENTRY).is_file():
        raise ValueError(f"--linearard={given.linearard}: must be a checkout of LinearARD, with {ENTRY}")
    if given.linearard and (given.packed or given.key_heads):
        raise ValueError(
            "--linearard: must be without --packed and --key-heads, which compare the library with itself"
        )
    key_heads, packed = given.key_heads or given.heads, tuple(given.packed)
    for length in [max(packed)] if packed else given.lengths:
        for dim in given.dims:
            for mask in ("full", "causal") if given.masks == "both" else (given.masks,):
                shape = Shape(
                    "", given.heads, key_heads, dim, given.heads, key_heads, dim, length=length, packed=packed,
                    causal=mask == "causal",
                )  # fmt: skip
                yield replace(shape, name=f"{mask}, d={dim}, N={'+'.join(map(str, packed)) or length}")


def columns_of(shape):
    return {
        "heads": shape.heads_s, "key_heads": shape.key_heads_s, "batch": shape.batch, "length": shape.length,
        "dim": shape.dim_s, "packed": "+".join(map(str, shape.packed)), "mask": shape.mask,
    }  # fmt: skip


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
        explanation = "\n".join(calls.explain(each) for each in timed)
        return Method(name, calls.plan.kernel, calls.timed(timed), flops, step, explanation)

    return [method([FORWARD, BACKWARD], [FORWARD, BACKWARD]), method([ONE_PASS], [FORWARD, ONE_PASS])]


def rows_of(methods, shape, notes=None):
    """One row per method and pass, one for forward + backward, one per refusal; notes: {pass: text} of our methods."""
    common, mine = columns_of(shape), [method for method in methods if method.name == STREAMKL]
    own = {name: timing.median for method in mine for name, timing in method.timings.items()}
    one_pass, own_step = own.get(ONE_PASS), own.get(FORWARD, 0) + own.get(BACKWARD, 0)
    for method in methods:
        is_peer = method.name != STREAMKL
        for name in method.timings:
            row = common | method.row(name) | {"extra_bytes": method.extra_bytes, "note": (notes or {}).get(name, "")}
            row["ours_ratio"] = rounded(ratio(own.get(name), method.ms(name)) if is_peer else None, ".3g")
            row["one_pass_ratio"] = rounded(ratio(one_pass, method.ms(name)) if name == BACKWARD else None, ".3g")
            yield row
        if {FORWARD, BACKWARD} <= set(method.timings):
            ms = method.ms(FORWARD) + method.ms(BACKWARD)
            yield common | method.row(BACKWARD) | {
                "pass": STEP, "ms": rounded(ms, ".4f"), "fastest_ms": "", "tflops": "", "extra_bytes": method.extra_bytes,
                "ours_ratio": rounded(ratio(own_step, ms) if is_peer else None, ".3g"),
                "one_pass_ratio": rounded(ratio(one_pass, ms), ".3g"),
            }  # fmt: skip
        if method.refusal:
            yield common | {"method": method.name, "note": f"not measured: {method.refusal}"}


def make_ours(shape, run, result, name=STREAMKL):
    """Our methods, checked; the tensors, and the exact results for peers."""
    calls = prepared_calls(shape, run.device)
    exact = Exact(shape, calls.tensors, all_rows=bool(run.given.linearard))
    methods = ours(calls, exact.weight, name)
    if run.given.deterministic and name == STREAMKL:
        same_bits = AttentionCalls(calls.tensors, replace(shape, deterministic=True))
        same_bits.run(FORWARD)
        two_passes, one_pass = ours(same_bits, exact.weight, DETERMINISTIC)
        del two_passes.calls[FORWARD]  # it has the same bits anyway
        methods += [two_passes, one_pass]
    for method in methods:
        method.examine(exact, run.device)
        result.wrong += exact.wrong(method.errors)
    result.lines += dict.fromkeys(line for method in methods for line in method.explanation.splitlines())
    return methods, calls.tensors, exact


def time(methods, run, result):
    release_memory()
    time_methods(methods, run.device, run.given.rounds, run.given.sample_ms)
    own = [method for method in methods if method.name in (STREAMKL, DENSE, DETERMINISTIC)]
    result.wrong += [f"{method.name} failed: {method.refusal}" for method in own if method.refusal]


def measure(shape, run):
    result = Result()
    methods, tensors, exact = make_ours(shape, run, result)
    if shape.packed or shape.key_heads_s != shape.heads_s:
        return compare_dense(methods, shape, run, result)
    torch.compiler.reset()  # after a few shapes, torch.compile stops compiling
    peers = {name: PEERS[name] for name in run.given.peers}
    if run.given.linearard:
        peers[LINEARARD] = linearard(run.given.linearard)
    for name, make in peers.items():
        methods.append(make_peer(name, lambda: make(tensors, shape, exact.weight), exact, run.device))
    time(methods, run, result)
    result.rows = list(rows_of(methods, shape))
    return result


def compare_dense(methods, shape, run, result):
    """Shared key heads or packing, compared with the same work without them."""
    dense_shape = shape.dense()
    dense, _, _ = make_ours(dense_shape, run, result, DENSE)
    time(methods + dense, run, result)
    notes = {}
    for mine, other in zip(methods, dense):
        for name in mine.timings.keys() & other.timings.keys():
            rates = [method.flops[name] / method.ms(name) for method in (mine, other)]
            notes[name] = f"{rates[0] / rates[1]:.3f} of the dense rate"
    result.rows = [*rows_of(methods, shape, notes), *rows_of(dense, dense_shape)]
    return result
