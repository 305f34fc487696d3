#!/usr/bin/env python3
"""Draws speed and memory by context length from the CSV of `streamkl bench`.

bench/cpu_figure.py bench.csv docs/cpu.svg
"""

import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

METHODS = {"streaming": "#1f5fbf", "one pass": "#2f8f6b", "in place": "#c2570c", "framework": "#7a8190"}


def steps(rows, method):
    """{length: seconds of the KL and its gradients}: two passes, or the one of "one pass"."""
    passes = ("one pass",) if method == "one pass" else ("forward", "backward")
    found = {}
    for row in rows:
        if row["method"] == method.replace("one pass", "streaming") and row["pass"] in passes:
            found.setdefault(int(row["length"]), []).append(float(row["median_s"]))
    return {length: sum(times) for length, times in sorted(found.items()) if len(times) == len(passes)}


def pairs(row, length):
    """Visible query-key pairs of all heads."""
    return int(row["heads"]) * (length * (length + 1) / 2 if row["mask"] == "causal" else length**2)


def draw(rows, path):
    threads = max(int(row["threads"]) for row in rows)
    rows = [row for row in rows if int(row["threads"]) == threads]
    dims = sorted({int(row["dim"]) for row in rows})
    figure, axes = plt.subplots(1, len(dims) + 1, figsize=(4.5 * (len(dims) + 1), 3.6), layout="constrained")
    for panel, dim in zip(axes, dims):
        for method, colour in METHODS.items():
            times = steps([row for row in rows if int(row["dim"]) == dim], method)
            speeds = [1e-6 * pairs(rows[0], length) / seconds for length, seconds in times.items()]
            panel.plot(list(times), speeds, "o-", color=colour, label=method)
        panel.set(title=f"Head size {dim}", ylabel="million query-key pairs per second")
    for method in ("streaming", "in place", "framework"):
        sizes = {int(row["length"]): int(row["memory_bytes"]) for row in rows if row["method"] == method}
        axes[-1].plot(*zip(*sorted(sizes.items())), "o-", color=METHODS[method], label=method)
    axes[-1].set(title="Memory in addition to inputs and outputs", ylabel="peak bytes")
    for panel in axes:
        panel.set(xscale="log", yscale="log", xlabel="context length N")
        panel.legend(frameon=False)
    first = rows[0]
    figure.suptitle(f"{first['machine']}, {threads} thread{'s' * (threads > 1)}, {first['dtype']}, {first['date']}")
    figure.savefig(path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        draw(list(csv.DictReader(file)), sys.argv[2])
