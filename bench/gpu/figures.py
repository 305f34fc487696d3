"""Charts of speed and memory over the length, from the CSV of one or several runs. Needs matplotlib, no torch and no GPU.

The background is transparent and the colours have medium lightness, so that the charts suit light and dark pages.
"""

import math
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

from .cases import BACKWARD, FORWARD, ONE_PASS, STEP  # noqa: E402
from .report import bytes_text  # noqa: E402

TEXT, GRID = "#7d8590", "#7d859040"
STYLE = {
    "font.family": "sans-serif", "font.sans-serif": ["Segoe UI", "Helvetica", "Arial", "DejaVu Sans"], "font.size": 10,
    "svg.fonttype": "none", "svg.hashsalt": "streamkl", "text.color": TEXT, "axes.labelcolor": TEXT,
    "xtick.color": TEXT, "ytick.color": TEXT, "axes.edgecolor": GRID, "axes.grid": True, "grid.color": GRID,
    "grid.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
}  # fmt: skip

METHOD_STYLES = {  # {method: (name, colour, line)}
    "streamkl": ("StreamKL", "#2f81f7", "-"),
    "cudnn": ("cuDNN attention", "#8b949e", "--"),
    "fa2": ("FA2 attention", "#a5793a", "--"),
    "triton": ("plain Triton", "#2a9d5c", "-"),
    "flex": ("FlexAttention", "#9a6ae0", "-"),
    "compile": ("torch.compile", "#d98324", "-"),
    "eager": ("eager", "#dd4b4b", "-"),
}
ATTENTION = {"cudnn", "fa2"}  # compute no KL: neither their step nor their memory is comparable


# ---- Data ----------------------------------------------------------------------------------------------------------------


class Series:
    """The newest results of one GPU, head size and mask: {(method, pass): {length: row}}."""

    def __init__(self, rows, dims, masks):
        dense = [row for row in rows if row["method"] in METHOD_STYLES and not row["packed"] and row["key_heads"] == row["heads"]]
        if not dense:
            raise ValueError("it has no results of a run with peers")
        self.gpu = dense[-1]["gpu"]
        self.dim = self.choose({int(row["dim"]) for row in dense if row["gpu"] == self.gpu}, reversed(dims), "--dims")
        found = {row["mask"] for row in dense if row["gpu"] == self.gpu and row["dim"] == str(self.dim)}
        self.mask = self.choose(found, ["causal", "full"] if masks == "both" else [masks], "--masks")
        chosen = [row for row in dense if (row["gpu"], row["dim"], row["mask"]) == (self.gpu, str(self.dim), self.mask)]
        self.heads = chosen[-1]["heads"]
        self.rows, self.out_of_memory = {}, set()
        for row in chosen:  # later rows replace earlier ones
            if row["heads"] == self.heads:
                self.take(row)

    @staticmethod
    def choose(found, wanted, option):
        for value in wanted:
            if value in found:
                return value
        raise ValueError(f"no result fits {option}; it has {', '.join(map(str, sorted(found)))}")

    def take(self, row):
        length = int(row["length"])
        if row["pass"]:
            self.rows.setdefault((row["method"], row["pass"]), {})[length] = row
            self.out_of_memory.discard((row["method"], length))
        elif "out of memory" in row["note"].lower():
            self.out_of_memory.add((row["method"], length))

    def values(self, method, operation, column):
        return {length: float(row[column]) for length, row in sorted(self.rows.get((method, operation), {}).items())}

    def times_ours(self, method, operation, ratio):
        """{length: time as a multiple of StreamKL's time in the same run}"""
        found = self.rows.get((method, operation), {})
        return {length: 1 / float(row[ratio]) for length, row in sorted(found.items()) if row[ratio]}

    def ends_for_memory(self, method, length):
        return any(name == method and other > length for name, other in self.out_of_memory)

    def __str__(self):
        return f"{self.gpu}, bf16, {self.heads} heads of {self.dim}, {self.mask} mask, N queries and keys"


def speed_panels(series):
    """[(title, {method: {length: multiple}})]"""
    step, of_ours, ratio = STEP, STEP, "ours_ratio"
    if ("streamkl", ONE_PASS) in series.rows:
        step, of_ours, ratio = "forward + backward, StreamKL in one pass", ONE_PASS, "one_pass_ratio"
    panels = [
        ("forward", FORWARD, FORWARD, "ours_ratio", METHOD_STYLES),
        ("backward", BACKWARD, BACKWARD, "ours_ratio", METHOD_STYLES),
        (step, STEP, of_ours, ratio, METHOD_STYLES.keys() - ATTENTION),
    ]
    for title, operation, of_ours, ratio, methods in panels:
        lines = {name: series.times_ours(name, operation, ratio) for name in METHOD_STYLES if name in methods}
        lines["streamkl"] = dict.fromkeys(sorted(series.rows.get(("streamkl", of_ours), {})), 1.0)
        if lines["streamkl"]:
            yield title, lines


def memory_lines(series):
    """{method: {length: bytes of a step}}"""
    operation = BACKWARD if ("streamkl", BACKWARD) in series.rows else FORWARD
    return {name: series.values(name, operation, "extra_bytes") for name in METHOD_STYLES if name not in ATTENTION}


# ---- Drawing -------------------------------------------------------------------------------------------------------------


def spread(heights, gap):
    """Moves heights up until neighbours are at least a gap apart; keeps their order."""
    placed, floor = {}, -math.inf
    for key, height in sorted(heights.items(), key=lambda item: item[1]):
        placed[key] = floor = max(height, floor + gap)
    return placed


def draw_lines(axes, lines, series):
    """Lines on logarithmic axes, with their names at the ends."""
    lines = {method: points for method, points in lines.items() if points}
    values = [value for points in lines.values() for value in points.values()]
    lengths = sorted({length for points in lines.values() for length in points})
    axes.set(xscale="log", yscale="log", xlim=(lengths[0] / 1.15, lengths[-1] * 1.15))
    axes.set_ylim(min(values) / 1.5, max(values) * 1.6)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}K" if n >= 1024 else f"{n:g}"))
    axes.tick_params(length=0)
    ends = {}
    for method, points in lines.items():
        name, colour, line = METHOD_STYLES[method]
        last = max(points)
        width = 3 if method == "streamkl" else 1.8
        axes.plot(*zip(*points.items()), line, color=colour, linewidth=width, marker="o", markersize=width + 2)
        if series.ends_for_memory(method, last):
            axes.plot(last, points[last], "x", color=colour, markersize=11, markeredgewidth=2.2)
        ends.setdefault(last, {})[method, name, colour] = math.log(points[last])
    gap = (math.log(max(values) * 1.6) - math.log(min(values) / 1.5)) * 0.055
    for last, heights in ends.items():
        for (method, name, colour), height in spread(heights, gap).items():
            axes.annotate(
                name, (last, math.exp(height)), xytext=(9, 0), textcoords="offset points", va="center", color=colour,
                fontweight="bold" if method == "streamkl" else "normal", annotation_clip=False,
            )  # fmt: skip


def label_heights(axes, heights, text_of):
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(FixedLocator([height for height in heights if low <= height <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda height, _: text_of(height)))


def decorate(figure, title, series):
    figure.text(0.012, 0.975, title, fontsize=13, fontweight="bold", va="top")
    note = f"{series}{'.  ×: out of memory at the next length' if series.out_of_memory else ''}"
    figure.text(0.012, 0.975 - 0.26 / figure.get_figheight(), note, fontsize=9, va="top")


def save(figure, path):
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return path


def draw_speed(series, path):
    panels = list(speed_panels(series))
    if not panels:
        raise ValueError("it has no times of StreamKL")
    figure, all_axes = plt.subplots(1, len(panels), figsize=(max(4.3 * len(panels) + 0.3, 6.6), 4.1), squeeze=False)
    figure.subplots_adjust(left=0.19 / len(panels), right=1 - 0.3 / len(panels), top=0.78, bottom=0.12, wspace=0.62)
    for axes, (title, lines) in zip(all_axes[0], panels):
        draw_lines(axes, lines, series)
        axes.set_title(title, fontsize=11, loc="left", color=TEXT)
        axes.set_xlabel("N")
        label_heights(axes, [digit * 10.0**power for power in range(-2, 4) for digit in (1, 2, 5)], "{:g}×".format)
    decorate(figure, "Time, as a multiple of StreamKL's (lower is faster)", series)
    return save(figure, path)


def draw_memory(series, path):
    figure, axes = plt.subplots(figsize=(7.2, 4.3))
    figure.subplots_adjust(left=0.11, right=0.82, top=0.82, bottom=0.12)
    draw_lines(axes, memory_lines(series), series)
    axes.set_xlabel("N")
    label_heights(axes, [4.0**power for power in range(5, 24)], bytes_text)
    decorate(figure, "Extra memory of a step", series)
    return save(figure, path)


def draw_figures(rows, prefix, dims, masks):
    """Writes PREFIX-speed.svg and PREFIX-memory.svg; raises ValueError if rows are missing."""
    series = Series(rows, dims, masks)
    with plt.rc_context(STYLE):
        return [
            draw_speed(series, Path(f"{prefix}-speed.svg")),
            draw_memory(series, Path(f"{prefix}-memory.svg")),
        ]
