#!/usr/bin/env python3
"""Draws the charts of docs/ from the newest rows of bench/results. Needs matplotlib.

    bench/charts.py                                  # all of them
    bench/charts.py cpu --results DIR --out FOLDER   # one, from DIR/cpu.csv

The background is transparent and the colors have medium lightness, so that the charts suit light and dark pages.
"""

import argparse
import csv
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

from harness.report import bytes_text  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TEXT, GRID = "#7d8590", "#7d859040"
STYLE = {
    "font.family": "sans-serif", "font.sans-serif": ["Segoe UI", "Helvetica", "Arial", "DejaVu Sans"], "font.size": 10,
    "svg.fonttype": "none", "svg.hashsalt": "streamkl", "text.color": TEXT, "axes.labelcolor": TEXT,
    "xtick.color": TEXT, "ytick.color": TEXT, "axes.edgecolor": GRID, "axes.grid": True, "grid.color": GRID,
    "grid.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
}  # fmt: skip
OURS = "StreamKL"
LINES = {  # {method of peers.csv: (name, color, line)}; those with -- compute no KL
    "streamkl": (OURS, "#2f81f7", "-"),
    "cudnn": ("cuDNN attention", "#8b949e", "--"),
    "fa2": ("FA2 attention", "#a5793a", "--"),
    "flex": ("FlexAttention", "#9a6ae0", "-"),
    "compile": ("torch.compile", "#d98324", "-"),
    "eager": ("eager", "#dd4b4b", "-"),
}
TWO_PASSES, ONE_PASS = ("forward", "backward"), ("one pass",)
CPU_LINES = {  # {(method of cpu.csv, passes of a step): (name, color, line)}
    ("streaming", TWO_PASSES): (OURS, "#2f81f7", "-"),
    ("streaming", ONE_PASS): ("one pass", "#2f8f6b", "-"),
    ("in place", TWO_PASSES): ("in place", "#d98324", "-"),
    ("framework", TWO_PASSES): ("framework", "#8b949e", "-"),
}
BAR_COLORS = ("#8b949e", "#2f81f7")
PEAKS = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}  # TFLOP/s of dense bf16 products at the boost clock
MULTIPLES = [digit * 10.0**power for power in range(-2, 4) for digit in (1, 2, 5)]
POWERS_OF_4 = [4.0**power for power in range(5, 24)]


# ---- Drawing -------------------------------------------------------------------------------------------------------


def save(figure, path, title, note):
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.1 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.012, 1 - 0.36 / height, note, fontsize=9, va="top")
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def bar_chart(path, title, note, names, shares):
    """Two bars per name, as percentages; shares: {label: one number per name}."""
    figure, axes = plt.subplots(figsize=(8.6, 1.15 + 0.27 * len(names)))
    height = figure.get_figheight()
    figure.subplots_adjust(left=0.31, right=0.97, top=1 - 0.82 / height, bottom=0.35 / height)
    for offset, color, (label, bars) in zip((-0.19, 0.19), BAR_COLORS, shares.items()):
        axes.barh([index + offset for index in range(len(names))], bars, 0.36, color=color, label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axes.margins(y=0.01)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    save(figure, path, title, note)


@dataclass
class Panel:
    """Lines on logarithmic axes over the length, with their names at the ends."""

    title: str
    lines: dict  # {(name, color, line): {length: value}}
    heights: list  # labels of the vertical axis
    text_of: object  # {height: text}, a function
    crossed: tuple = ()  # names of lines that end with a cross

    def draw(self, axes):
        lines = {style: points for style, points in self.lines.items() if points}
        values = [value for points in lines.values() for value in points.values()]
        lengths = sorted({length for points in lines.values() for length in points})
        low, high = min(values) / 1.5, max(values) * 1.6
        axes.set(
            xscale="log", yscale="log", xlim=(lengths[0] / 1.15, lengths[-1] * 1.15), ylim=(low, high), xlabel="N"
        )
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}K" if n >= 1024 else f"{n:g}"))
        axes.yaxis.set_major_locator(FixedLocator([height for height in self.heights if low <= height <= high]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda height, _: self.text_of(height)))
        for axis in axes.xaxis, axes.yaxis:
            axis.set_minor_locator(NullLocator())
        axes.tick_params(length=0)
        axes.set_title(self.title, fontsize=11, loc="left", color=TEXT)
        for (name, color, line), points in lines.items():
            last, width = max(points), 3 if name == OURS else 1.8
            axes.plot(*zip(*points.items()), line, color=color, linewidth=width, marker="o", markersize=width + 2)
            if name in self.crossed:
                axes.plot(last, points[last], "x", color=color, markersize=11, markeredgewidth=2.2)
        self.write_names(axes, lines, 0.055 * math.log(high / low))

    def write_names(self, axes, lines, gap):
        """Names that end at one length are at least a gap apart, in the order of their lines."""
        floors = {}
        for (name, color, _), points in sorted(lines.items(), key=lambda line: line[1][max(line[1])]):
            last = max(points)
            floors[last] = height = max(math.log(points[last]), floors.get(last, -math.inf) + gap)
            axes.annotate(
                name, (last, math.exp(height)), xytext=(9, 0), textcoords="offset points", va="center", color=color,
                fontweight="bold" if name == OURS else "normal", annotation_clip=False,
            )  # fmt: skip


def line_charts(path, title, note, panels):
    """Panels side by side."""
    count = len(panels)
    figure, all_axes = plt.subplots(1, count, figsize=(max(4.3 * count + 0.3, 7.2), 4.2), squeeze=False)
    figure.subplots_adjust(left=0.19 / count, right=1 - 0.3 / count, top=0.78, bottom=0.12, wspace=0.62)
    for axes, panel in zip(all_axes[0], panels):
        panel.draw(axes)
    save(figure, path, title, note)


# ---- Attention KL compared with its peers --------------------------------------------------------------------------


class Peers:
    """The newest rows of one GPU, 16 heads of 128, causal: {(method, pass): {length: row}}."""

    def __init__(self, rows):
        shape = {"heads": "16", "key_heads": "16", "packed": "", "dim": "128", "mask": "causal"}
        rows = [row for row in rows if row["method"] in LINES and shape.items() <= row.items()]
        self.gpu, self.rows, no_memory = rows[-1]["gpu"], {}, set()
        for row in rows:  # later rows replace earlier ones
            key = row["method"], int(row["length"])
            if row["gpu"] != self.gpu:
                continue
            if row["pass"]:
                self.rows.setdefault((row["method"], row["pass"]), {})[key[1]] = row
                no_memory.discard(key)
            elif "out of memory" in row["note"].lower():
                no_memory.add(key)
        longest = {method: max(found) for (method, _), found in self.rows.items()}
        self.crossed = {LINES[method][0] for method, length in no_memory if length > longest.get(method, length)}
        self.note = f"{self.gpu}, bf16, 16 heads of 128, causal mask, N queries and keys"
        self.note += ".  ×: out of memory at the next length" if self.crossed else ""

    def points(self, method, name, value_of):
        """{length: value}"""
        found = sorted(self.rows.get((method, name), {}).items())
        return {length: value_of(row) for length, row in found if value_of(row)}

    def lines(self, name, value_of, with_attention=False):
        chosen = {method: style for method, style in LINES.items() if with_attention or style[2] == "-"}
        return {style: self.points(method, name, value_of) for method, style in chosen.items()}


def gpu_speed(rows, path):
    peers = Peers(rows)

    def panel(title, name, ours, column, with_attention):
        lines = peers.lines(name, lambda row: row[column] and 1 / float(row[column]), with_attention)
        lines[LINES["streamkl"]] = peers.points("streamkl", ours, lambda row: 1.0)
        return Panel(title, lines, MULTIPLES, "{:g}×".format, peers.crossed)

    panels = [
        panel("forward", "forward", "forward", "ours_ratio", True),
        panel("backward", "backward", "backward", "ours_ratio", True),
        panel("forward + backward, StreamKL in one pass", "forward + backward", "one pass", "one_pass_ratio", False),
    ]
    line_charts(path, "Time, as a multiple of StreamKL's (lower is faster)", peers.note, panels)


def gpu_memory(rows, path):
    peers = Peers(rows)
    lines = peers.lines("backward", lambda row: float(row["extra_bytes"] or 0))
    line_charts(
        path, "Extra memory of a step", peers.note, [Panel("", lines, POWERS_OF_4, bytes_text, peers.crossed)]
    )


# ---- Shapes of distillation ----------------------------------------------------------------------------------------


def gpu_shapes(rows, path):
    """The newest row of each shape and pass; the base shape comes first."""
    timed = [row for row in rows if row["ms"]]
    gpu, found = timed[-1]["gpu"], {}
    for row in timed:
        if row["gpu"] == gpu:
            found.setdefault(row["shape"], {})[row["pass"]] = float(row["tflops"]) / PEAKS[gpu]
    shapes = dict(sorted(found.items(), key=lambda item: not item[0].startswith("base")))
    shares = {name: [passes.get(name, 0.0) for passes in shapes.values()] for name in ("forward", "one pass")}
    title = "Useful TFLOP/s, as a share of the tensor cores' 16-bit peak (longer is faster)"
    note = f"{gpu}, 32/8 heads of 128, N = 8,192, causal, bf16 unless named; one pass: loss and gradients"
    bar_chart(path, title, note, list(shapes), shares)


# ---- A CPU ---------------------------------------------------------------------------------------------------------


def cpu(rows, path):
    """Speed and memory of the most threads that were measured."""
    threads = max(int(row["threads"]) for row in rows)
    rows = [row for row in rows if int(row["threads"]) == threads]
    newest = {(row["method"], row["pass"], row["dim"], int(row["length"])): row for row in rows}
    lengths = sorted({int(row["length"]) for row in rows})

    def speeds(method, passes, dim):
        """{length: million visible pairs per second}"""
        found = {}
        for n in lengths:
            step = [newest[method, one, dim, n] for one in passes if (method, one, dim, n) in newest]
            if len(step) == len(passes):
                pairs = int(step[0]["heads"]) * (n * (n + 1) / 2 if step[0]["mask"] == "causal" else n * n)
                found[n] = 1e-6 * pairs / sum(float(row["median_s"]) for row in step)
        return found

    def sizes(method):
        return {n: int(row["memory_bytes"]) for (name, _, _, n), row in newest.items() if name == method}

    panels = [
        Panel(
            f"heads of {dim}: million pairs per second",
            {style: speeds(*line, dim) for line, style in CPU_LINES.items()},
            MULTIPLES + [1000 * multiple for multiple in MULTIPLES],
            "{:g}".format,
        )
        for dim in sorted({row["dim"] for row in rows}, key=int)
    ]
    memory = {style: sizes(method) for (method, passes), style in CPU_LINES.items() if passes == TWO_PASSES}
    panels.append(Panel("memory in addition to inputs and outputs", memory, POWERS_OF_4, bytes_text))
    about = rows[-1]
    note = (
        f"{about['machine']}, {threads} threads, {about['heads']} head, {about['dtype']}, loss and student gradients"
    )
    line_charts(path, "Speed and memory on a CPU", note, panels)


CHARTS = {  # {name: (file of bench/results, function)}
    "gpu-speed": ("peers.csv", gpu_speed),
    "gpu-memory": ("peers.csv", gpu_memory),
    "gpu-shapes": ("shapes.csv", gpu_shapes),
    "cpu": ("cpu.csv", cpu),
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHARTS)}; default: all")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "bench/results", metavar="DIR", help="default bench/results"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs", metavar="DIR", help="default docs")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(CHARTS):
        parser.error(f"{', '.join(unknown)}: must be of {', '.join(CHARTS)}")
    for name in given.names or CHARTS:
        file, draw = CHARTS[name]
        with (given.results / file).open(newline="") as results, plt.rc_context(STYLE):
            draw(list(csv.DictReader(results)), given.out / f"{name}.svg")
        print(given.out / f"{name}.svg")


if __name__ == "__main__":
    main()
