#!/usr/bin/env python3
"""Times the loss that trains a sparse attention's indexer on a GPU compared with naive code, and checks the results.

    bench/indexer.py                                  # 8192 tokens, 64 teacher heads of 128, 32 index heads of 128, causal
    bench/indexer.py --length 131072 --no-naive       # the naive code would run out of memory
    bench/indexer.py --top-k 2048                     # sparse
    bench/indexer.py --key-heads 1 --dim 576          # latent attention
    bench/indexer.py --csv bench/results/indexer.csv  # appends the results

    streamkl       the C library, with the teacher's LSE as its attention has returned it
    no LSE given   the same, which computes that LSE first
    naive          unfused training code: bf16 einsum to [heads, N, N] teacher scores, f32 softmax, mean over heads;
                   [index heads, N, N] dot products, ReLU, weights, sum; KL in log space; autograd. Sparse: gathers the keys
                   of each row, for as many rows at once as 4 GiB of teacher keys allow
    cudnn          scaled_dot_product_attention by cuDNN, 16 heads of 128, N = 8192: the rate that this GPU reaches

TFLOP/s count the work that the loss requires for visible pairs: 2 dim per teacher head, 2 dim per index head, and for the
gradients the latter again for dq and for dk. Recomputation does not count.

Loss and all gradients of a problem of 1000 tokens, and 16 rows of the large one, are compared with float64. The naive code,
run in float64, must agree to the last digits. Samples, medians and extra memory are those of bench/peers.py.
"""

import argparse

from gpu.indexer_report import COLUMNS
from peers import add_run_options, measure, require_csv


def load_bench():
    from gpu.indexer_run import IndexerBench

    return IndexerBench


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser)
    parser.add_argument("--length", type=int, default=8192, metavar="N", help="queries and keys; default 8192")
    parser.add_argument("--heads", type=int, default=64, metavar="N", help="teacher heads; default 64")
    parser.add_argument("--key-heads", type=int, default=0, metavar="N", help="teacher key heads; default: the same")
    parser.add_argument("--dim", type=int, default=128, metavar="N", help="size of a teacher head; default 128")
    parser.add_argument("--index-heads", type=int, default=32, metavar="N", help="index heads; default 32")
    parser.add_argument("--index-dim", type=int, default=128, metavar="N", help="size of an index head; default 128")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="sparse: keys per row; default 0: all visible keys")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=True, help="the default")
    mask.add_argument("--full", dest="causal", action="store_false", help="every row attends to every key")
    parser.add_argument("--no-naive", action="store_true", help="leave the naive code out")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="samples per method; default 9")
    parser.add_argument("--sample-ms", type=float, default=20, metavar="X", help="minimum time of a sample; default 20")
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
    require_csv(asked, arguments.csv, COLUMNS)
    measure(arguments, load_bench)


if __name__ == "__main__":
    main()
