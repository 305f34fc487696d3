#!/usr/bin/env python3
"""Times the loss that trains a sparse attention's indexer on a GPU, ours beside the naive one, and checks what it computed.

    bench/indexer.py                                  # 8192 tokens, 64 teacher heads of 128, 32 index heads of 128, causal
    bench/indexer.py --length 131072 --no-naive       # where the naive one has no memory
    bench/indexer.py --top-k 2048                     # the sparse stage
    bench/indexer.py --key-heads 1 --dim 576          # latent attention
    bench/indexer.py --csv bench/results/indexer.csv  # appends every figure

    streamkl       the C library; the teacher's LSE is given, as from the attention that has just run
    no LSE given   the same, which computes that first
    naive          as unfused training code has it: bf16 einsum to [heads, N, N] teacher scores, f32 softmax, mean of heads;
                   [index heads, N, N] dot products, ReLU, weights, sum; KL in logarithms; autograd. Over lists the keys
                   of each row are gathered first, for as many rows at a time as 4 GiB of teacher keys allow
    cudnn          scaled_dot_product_attention by cuDNN, 16 heads of 128, N = 8192: what this GPU's tensor cores give

TFLOP/s count what the loss must compute, for visible pairs: teacher logits 2 dim a head, index logits 2 dim an index head,
and for the gradients as much for dq and for dk again. What a method computes twice is its own affair.

Loss and all gradients of a problem of 1000 tokens are compared with float64, and 16 rows of the large one; the naive code, run
in float64, must agree to the last digits. Every method has a warm-up, then all take turns; the median counts. Extra memory is the
most that a step holds beside its inputs.
"""

import argparse
from pathlib import Path

from gpu.indexer_report import COLUMNS
from gpu.report import check_csv
from peers import LIBRARY_HELP, current_commit, find_library, measure


def load_bench():
    from gpu.indexer_run import IndexerBench

    return IndexerBench


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=find_library(), help=LIBRARY_HELP)
    parser.add_argument("--kernel", help="force a kernel that `streamkl info` lists")
    parser.add_argument("--length", type=int, default=8192, metavar="N", help="queries and keys; default 8192")
    parser.add_argument("--heads", type=int, default=64, metavar="N", help="teacher heads; default 64")
    parser.add_argument("--key-heads", type=int, default=0, metavar="N", help="their key heads; default as many")
    parser.add_argument("--dim", type=int, default=128, metavar="N", help="their size; default 128")
    parser.add_argument("--index-heads", type=int, default=32, metavar="N", help="index heads; default 32")
    parser.add_argument("--index-dim", type=int, default=128, metavar="N", help="their size; default 128")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="keys on a row's list; default 0: all it sees")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=True, help="the default")
    mask.add_argument("--full", dest="causal", action="store_false", help="every row sees every key")
    parser.add_argument("--no-naive", action="store_true", help="leave the naive one out")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of every method; default 9")
    parser.add_argument("--turn-ms", type=float, default=20, metavar="X", help="least time of a turn; default 20")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append every figure")
    parser.add_argument("--commit", default=current_commit(), help="what the CSV says was measured; default that of git")
    return parser


def main():
    asked = parser()
    arguments = asked.parse_args()
    for name in "length heads dim index_heads index_dim rounds".split():
        if getattr(arguments, name) < 1:
            asked.error(f"--{name.replace('_', '-')}={getattr(arguments, name)}: must be at least 1")
    if arguments.top_k < 0:
        asked.error(f"--top-k={arguments.top_k}: must be at least 0")
    if arguments.key_heads < 0 or arguments.heads % (arguments.key_heads or 1):
        asked.error(f"--key-heads={arguments.key_heads}: must divide --heads={arguments.heads}")
    try:
        if arguments.csv:
            check_csv(arguments.csv, COLUMNS)  # before minutes of measuring
    except (ValueError, OSError) as error:
        asked.error(f"--csv={arguments.csv}: {error}")
    measure(arguments, load_bench)


if __name__ == "__main__":
    main()
