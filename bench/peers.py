#!/usr/bin/env python3
"""Times StreamKL on a GPU compared with PyTorch, in one run, and checks the results.

    bench/peers.py                                   # 16 heads of 64 and of 128, 8192 queries and keys, bf16
    bench/peers.py --only forward --lengths 4096,8192,16384 --masks causal
    bench/peers.py --csv bench/results/peers.csv     # appends the results
    bench/peers.py --csv bench/results/peers.csv --plot docs/gpu       # draws docs/gpu-speed.svg and docs/gpu-memory.svg
    bench/peers.py --heads 32 --key-heads 8          # GQA, compared with as many key heads as heads
    bench/peers.py --packed 8192,4096,2048,1024,512  # packed sequences, compared with a dense batch
    bench/peers.py --deterministic --only backward   # adds gradients with the same bits on every run
    bench/peers.py --linearard DIR --peers '' --masks causal --rounds 3   # compared with LinearARD in the checkout DIR

It imports the package streamkl: an installed one, or that of this repository.

The peers, on tensors of the same shape:

    cudnn    scaled_dot_product_attention by cuDNN, the reference for kernel quality. Its forward takes two matmuls per
             pair, as ours does; its backward takes five, ours four
    fa2      the same by FlashAttention-2
    triton   attention KL as plain Triton kernels (bench/gpu/triton_kernels.py)
    flex     attention KL composed of FlexAttention calls: O(N) memory without a custom kernel
    compile  eager under torch.compile
    eager    plain attention KL: two N x N logits, two log_softmax, one sum
    linearard   the Triton kernels of github.com/gracefulning/LinearARD, only with --linearard. They return the sum of all
                rows, so the error of their KL is that of the sum

All methods warm up. Then each round takes one sample per method: 0.3 s of untimed calls, so that the clock under the power
limit is the method's own and not that of the previous method, then a few calls between two CUDA events. The median of the
samples counts. Extra memory is the peak of a step (forward and gradients, or only the forward if nothing else is measured)
in addition to its inputs: results, saved tensors, workspace. KL and gradients of the first and last head are compared with
float64. A peer that is missing, fails or computes something else is named and left out.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from gpu.cases import LINEARARD_ENTRY, OPERATIONS, PEER_NAMES
from gpu.report import COLUMNS, check_csv, read_csv

ROOT = Path(__file__).resolve().parent.parent


def measure(arguments, load):
    """Runs the benchmark whose class load() imports. Only measuring needs PyTorch."""
    program = Path(sys.argv[0]).name
    if arguments.library:
        if not arguments.library.exists():
            sys.exit(f"{program}: --library={arguments.library}: no such file; build it, or name another")
        os.environ["STREAMKL_LIBRARY"] = str(arguments.library)
    if arguments.kernel:
        os.environ["STREAMKL_KERNEL"] = arguments.kernel
    sys.path.append(str(ROOT / "python"))  # after an installed package
    try:
        from gpu.run import NotPossible

        bench_class = load()
    except ImportError as error:
        sys.exit(f"{program}: measuring needs PyTorch and the package streamkl: {error}")
    try:
        bench = bench_class(arguments)
    except NotPossible as error:
        sys.exit(f"{program}: {error}")
    bench.run()
    if not bench.is_right:
        sys.exit(f"{program}: a result is WRONG or missing: see above")


def load_bench():
    from gpu.run import Bench

    return Bench


def draw(arguments):
    from gpu.figures import draw_figures

    return draw_figures(read_csv(arguments.csv), arguments.plot, arguments.dims, arguments.masks)


def draw_or_exit(arguments, draw):
    """Prints the paths of the charts that draw(arguments) writes from --csv."""
    program = Path(sys.argv[0]).name
    try:
        written = draw(arguments)
    except ImportError as error:
        sys.exit(f"{program}: --plot needs matplotlib: {error}")
    except ValueError as error:
        sys.exit(f"{program}: --csv={arguments.csv}: {error}")
    print("\n".join(map(str, written)))


# ---- The command line ----------------------------------------------------------------------------------------------------


LIBRARY_HELP = "libstreamkl.so; default: that of build/release or build/gpu, else that of the installed package"


def find_library():
    built = [ROOT / "build" / preset / "src/libstreamkl.so" for preset in ("release", "gpu")]
    return next((path for path in built if path.exists()), None)


def current_commit():
    asked = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip()


def require_csv(asked, path, columns=COLUMNS):
    """Refuses a --csv that cannot take the rows, before minutes of measuring."""
    try:
        if path:
            check_csv(path, columns)
    except (ValueError, OSError) as error:
        asked.error(f"--csv={path}: {error}")


def add_run_options(parser):
    """The options that all benchmarks of the library on a GPU have."""
    parser.add_argument("--library", type=Path, default=find_library(), help=LIBRARY_HELP)
    parser.add_argument("--kernel", help="force a kernel that `streamkl info` lists")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append the results")
    parser.add_argument("--commit", default=current_commit(), help="the commit in the CSV; default: that of git")


def numbers(text):
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def peer_names(text):
    names = list(filter(None, text.split(",")))
    if unknown := sorted(set(names) - set(PEER_NAMES)):
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; must be of {', '.join(PEER_NAMES)}")
    return names


PLOT_HELP = """measure nothing; draw the results in --csv as PREFIX-speed.svg and PREFIX-memory.svg: the last of --dims,
and the causal mask unless --masks is full"""


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser)
    parser.add_argument("--heads", type=int, default=16, metavar="N", help="query heads; default 16")
    parser.add_argument("--key-heads", type=int, default=0, metavar="N", help="key heads; compares with as many key heads as heads")
    parser.add_argument("--packed", type=numbers, default=[], metavar="LIST", help="lengths of packed sequences; compares with a dense batch")
    parser.add_argument("--lengths", type=numbers, default=[8192], metavar="LIST", help="queries and keys; default 8192")
    parser.add_argument("--dims", type=numbers, default=[64, 128], metavar="LIST", help="head sizes; default 64,128")
    parser.add_argument("--masks", choices=["full", "causal", "both"], default="both")
    parser.add_argument("--only", action="append", choices=list(OPERATIONS), help="a pass; may be repeated; default: all")
    parser.add_argument("--peers", type=peer_names, default=PEER_NAMES, metavar="LIST", help="default: all; '' for none")
    parser.add_argument("--linearard", type=Path, metavar="DIR", help=f"also time LinearARD: DIR has {LINEARARD_ENTRY}")
    parser.add_argument("--deterministic", action="store_true", help="also time gradients with the same bits on every run")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="samples per method; default 9")
    parser.add_argument("--sample-ms", type=float, default=20, metavar="X", help="minimum time of a sample; default 20")
    parser.add_argument("--plot", metavar="PREFIX", help=PLOT_HELP)
    return parser


def main():
    asked = parser()
    arguments = asked.parse_args()
    if arguments.key_heads < 0 or arguments.heads < 1 or arguments.heads % (arguments.key_heads or 1):
        asked.error(f"--key-heads={arguments.key_heads}: must divide --heads={arguments.heads}")
    if arguments.linearard and not (arguments.linearard / LINEARARD_ENTRY).is_file():
        asked.error(f"--linearard={arguments.linearard}: must be a checkout of LinearARD, with {LINEARARD_ENTRY}")
    if arguments.linearard and (arguments.packed or arguments.key_heads):
        asked.error("--linearard: must be without --packed and --key-heads, which compare the library with itself")
    if arguments.plot and not (arguments.csv and arguments.csv.exists()):
        asked.error("--plot: needs --csv=FILE, with the results of earlier runs")
    require_csv(asked, arguments.csv)
    if arguments.plot:
        draw_or_exit(arguments, draw)
    else:
        measure(arguments, load_bench)


if __name__ == "__main__":
    main()
