#!/usr/bin/env python3
"""What the attention KL adds to a whole training step: time and peak memory, compared with the same step without it.

    bench/step.py                                # all setups: about a minute
    bench/step.py --quick                        # up to 16384 tokens
    bench/step.py --kind layers --lengths 8192   # only some
    bench/step.py --attention flash              # instead of cuDNN
    bench/step.py --csv bench/results/step.csv   # appends the results
    bench/step.py --dry-run                      # lists the setups; needs no GPU

    layers         two layers of an 8B-like teacher (32/8 heads of 128, hidden size 4096) without gradients, and two of a
                   1B-like student (hidden size 2048) with 32, 16 or 8 heads. The loss is the mean over the layers, with
                   the LSEs of both attentions given, or computed
    hugging face   Llama models of transformers of the same sizes, with streamkl.hf.AttentionDistiller; 65536 tokens with
                   gradient checkpointing

A step runs the teacher forward and the student forward and backward, in bf16, one sequence. It has no optimizer, no
embedding of a large vocabulary and only a few layers, so the percentages are an upper bound of those of real training. The
variants of a setup alternate one by one after 0.3 s; medians count. Peak memory includes the models.
"""

import argparse

from gpu.step_cases import VARIANTS, chosen
from gpu.step_report import COLUMNS
from peers import add_run_options, measure, numbers, require_csv


def load_bench():
    from gpu.step_run import StepBench

    return StepBench


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=list(VARIANTS), help="may be repeated; default: all")
    parser.add_argument("--lengths", type=numbers, default=[], metavar="LIST", help="tokens; default: all")
    parser.add_argument("--quick", action="store_true", help="up to 16384 tokens, without the student of 8 heads")
    parser.add_argument("--attention", choices=["cudnn", "flash"], default="cudnn", help="of the layers; default cudnn")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="most samples per step; default 9")
    parser.add_argument("--sample-ms", type=float, default=600, metavar="X", help="time of all samples of a setup; default 600")
    parser.add_argument("--dry-run", action="store_true", help="list the setups and measure nothing")
    add_run_options(parser)
    return parser


def main():
    asked = parser()
    arguments = asked.parse_args()
    try:
        setups = chosen(arguments.kind, arguments.lengths, arguments.quick)
    except ValueError as error:
        asked.error(f"--lengths: {error}")
    if arguments.rounds < 1:
        asked.error(f"--rounds={arguments.rounds}: must be at least 1")
    require_csv(asked, arguments.csv, COLUMNS)
    if arguments.dry_run:
        print("\n".join(f"{setup}: {', '.join(setup.variants)}" for setup in setups))
    else:
        measure(arguments, load_bench)


if __name__ == "__main__":
    main()
