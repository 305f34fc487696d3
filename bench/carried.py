#!/usr/bin/env python3
"""Times the student's attention backward with the gradient of its KL, compared with the two calls that it replaces.

    bench/carried.py                                   # all cases: less than a minute
    bench/carried.py --only causal                     # those whose name contains the text
    bench/carried.py --check                           # also compares gradients with float64
    bench/carried.py --csv bench/results/carried.csv   # appends the results
    bench/carried.py --dry-run                         # lists the cases; needs no GPU

    forward    scaled_dot_product_attention of the student by cuDNN
    cuDNN      the backward of scaled_dot_product_attention by cuDNN, without a KL
    apart      the same and a one-pass call: what a step pays without the kernel that does both
    carried    skl_attention_backward: attention and KL gradients in one call
    with KL    the same with the KL of each row

The calls alternate one by one, after 0.3 s of untimed rounds, so that they share one power state; medians count. cuDNN has
expanded key heads, outside of the time. Percentages are what `carried` adds to the student's attention, forward and
backward. TFLOP/s are those of six products. --check draws fresh inputs and compares the
gradients of the first key head with float64: the error of `carried` must not exceed that of cuDNN's backward of the same
attention, by 5 % for chance, plus twice that of a one-pass call.
"""

import argparse

from gpu.carried_cases import COLUMNS, chosen
from peers import add_run_options, measure, require_csv


def load_bench():
    from gpu.carried_run import CarriedBench

    return CarriedBench


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="part of a case's name; may be repeated")
    parser.add_argument("--check", action="store_true", help="compare gradients with float64, up to 8192 tokens")
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="most samples per call; default 25")
    parser.add_argument("--sample-ms", type=float, default=300, metavar="X", help="time of all samples of a case; default 300")
    parser.add_argument("--dry-run", action="store_true", help="list the cases and measure nothing")
    add_run_options(parser)
    return parser


def main():
    asked = parser()
    arguments = asked.parse_args()
    try:
        cases = chosen(arguments.only)
    except ValueError as error:
        asked.error(f"--only={error}")
    require_csv(asked, arguments.csv, COLUMNS)
    if arguments.dry_run:
        print("\n".join(f"{case.name:28} {case}" for case in cases))
    else:
        measure(arguments, load_bench)


if __name__ == "__main__":
    main()
