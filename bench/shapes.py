#!/usr/bin/env python3
"""Times the shapes that distillation has in practice, in one run, and finds those that are slow for their work.

    bench/shapes.py                                    # all shapes: less than a minute
    bench/shapes.py --quick                            # ten of them
    bench/shapes.py --only 'student heads' --only f32  # those whose name contains one of the texts
    bench/shapes.py --check                            # also compares results with float64
    bench/shapes.py --check --rounds 0                 # only compares
    bench/shapes.py --only 'mean of' --eager           # also times eager PyTorch, which stores the matrices
    bench/shapes.py --csv bench/results/shapes.csv     # appends the results
    bench/shapes.py --csv bench/results/shapes.csv --plot docs/gpu-shapes.svg
    bench/shapes.py --dry-run                          # lists the shapes; needs no GPU

Every shape is compared with the base shape (32 heads on 8 key heads of 128 on both sides, N = 8192, causal, bf16) and with
scaled_dot_product_attention by cuDNN on the teacher's shape. Calls of all three alternate one by one, after 0.3 s of
untimed rounds, so that they share one power state; medians count.

    forward    KL and LSEs. With teacher groups also with the teacher's LSEs given
    backward   both student gradients from saved LSEs; /cuDNN: compared with its attention backward
    one pass   KL and gradients, both LSEs given; /cuDNN: compared with its attention backward
    no LSEs    a step without given LSEs: forward + backward or, with teacher groups, the LSEs and then one pass, as
               attention_kl does; /cuDNN: its forward + backward

The last column has the kernels that skl_plan_explain names. --check draws fresh random inputs and gives a weight to a sample
of rows; KL, dq and dk of all heads are compared with float64 there. A shape that fails is reported, and the others go on;
the exit status is then 1.
"""

import argparse
from pathlib import Path

from gpu.report import read_csv
from gpu.shape_cases import chosen
from gpu.shape_report import COLUMNS
from peers import add_run_options, draw_or_exit, measure, require_csv


def load_bench():
    from gpu.shape_run import ShapesBench

    return ShapesBench


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="part of a shape's name; may be repeated")
    parser.add_argument("--quick", action="store_true", help="ten of the shapes")
    parser.add_argument("--check", action="store_true", help="compare results with float64")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random inputs; default: another one in every run")
    parser.add_argument("--eager", action="store_true", help="also time eager PyTorch; takes tens of GiB")
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="most samples per call; default 25; 0: none")
    parser.add_argument("--sample-ms", type=float, default=300, metavar="X", help="time of all samples of a shape; default 300")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing; draw the results in --csv")
    parser.add_argument("--dry-run", action="store_true", help="list the shapes and measure nothing")
    add_run_options(parser)
    return parser


def draw(arguments):
    from gpu.shape_figure import draw_shapes

    return [draw_shapes(read_csv(arguments.csv, COLUMNS), arguments.plot)]


def main():
    asked = parser()
    arguments = asked.parse_args()
    try:
        shapes = chosen(arguments.only, arguments.quick)
    except ValueError as error:
        asked.error(f"--only={error}")
    if arguments.rounds < 0:
        asked.error(f"--rounds={arguments.rounds}: must be at least 0")
    if arguments.rounds == 0 and not arguments.check:
        asked.error("--rounds=0: must be at least 1 without --check")
    if arguments.plot and not (arguments.csv and arguments.csv.exists()):
        asked.error("--plot: needs --csv=FILE, with the results of earlier runs")
    require_csv(asked, arguments.csv, COLUMNS)
    if arguments.dry_run:
        print("\n".join(f"{shape.name:36} {shape}" for shape in shapes))
    elif arguments.plot:
        draw_or_exit(arguments, draw)
    else:
        measure(arguments, load_bench)


if __name__ == "__main__":
    main()
