"""Charts as SVG files. Needs matplotlib.

The background is transparent and the colours have medium lightness, so that the charts suit light and dark pages.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

TEXT, GRID = "#7d8590", "#7d859040"
STYLE = {
    "font.family": "sans-serif", "font.sans-serif": ["Segoe UI", "Helvetica", "Arial", "DejaVu Sans"], "font.size": 10,
    "svg.fonttype": "none", "svg.hashsalt": "streamkl", "text.color": TEXT, "axes.labelcolor": TEXT,
    "xtick.color": TEXT, "ytick.color": TEXT, "axes.edgecolor": GRID, "axes.grid": True, "grid.color": GRID,
    "grid.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
}  # fmt: skip
BAR_COLOURS = ("#8b949e", "#2f81f7")


def write_title(figure, title, note):
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.1 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.012, 1 - 0.36 / height, note, fontsize=9, va="top")


def save(figure, path):
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return path


def bar_chart(path, title, note, names, shares):
    """Two bars per name, as percentages; shares: {label: one number per name}."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.6, 1.15 + 0.27 * len(names)))
        height = figure.get_figheight()
        figure.subplots_adjust(left=0.31, right=0.97, top=1 - 0.82 / height, bottom=0.35 / height)
        for offset, colour, (label, bars) in zip((-0.19, 0.19), BAR_COLOURS, shares.items()):
            axes.barh([index + offset for index in range(len(names))], bars, 0.36, color=colour, label=label)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.tick_params(length=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
        axes.margins(y=0.01)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        write_title(figure, title, note)
        return save(figure, path)


def spread(heights, gap):
    """Moves heights up until neighbours are at least a gap apart; keeps their order."""
    placed, floor = {}, -math.inf
    for key, height in sorted(heights.items(), key=lambda item: item[1]):
        placed[key] = floor = max(height, floor + gap)
    return placed


def draw_lines(axes, lines, styles, crossed, heights, text_of):
    """Lines {method: {length: value}} on logarithmic axes, with their names at the ends.

    styles: {method: (name, colour, line)}; crossed: methods that end with a cross; heights: labels of the vertical axis.
    """
    lines = {method: points for method, points in lines.items() if points}
    values = [value for points in lines.values() for value in points.values()]
    lengths = sorted({length for points in lines.values() for length in points})
    low, high = min(values) / 1.5, max(values) * 1.6
    axes.set(xscale="log", yscale="log", xlim=(lengths[0] / 1.15, lengths[-1] * 1.15), ylim=(low, high), xlabel="N")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}K" if n >= 1024 else f"{n:g}"))
    axes.yaxis.set_major_locator(FixedLocator([height for height in heights if low <= height <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda height, _: text_of(height)))
    for axis in axes.xaxis, axes.yaxis:
        axis.set_minor_locator(NullLocator())
    axes.tick_params(length=0)
    ends = {}
    for method, points in lines.items():
        name, colour, line = styles[method]
        last = max(points)
        width = 3 if method == "streamkl" else 1.8
        axes.plot(*zip(*points.items()), line, color=colour, linewidth=width, marker="o", markersize=width + 2)
        if method in crossed:
            axes.plot(last, points[last], "x", color=colour, markersize=11, markeredgewidth=2.2)
        ends.setdefault(last, {})[method, name, colour] = math.log(points[last])
    for last, names in ends.items():
        for (method, name, colour), height in spread(names, (math.log(high) - math.log(low)) * 0.055).items():
            axes.annotate(
                name, (last, math.exp(height)), xytext=(9, 0), textcoords="offset points", va="center", color=colour,
                fontweight="bold" if method == "streamkl" else "normal", annotation_clip=False,
            )  # fmt: skip


def line_charts(path, title, note, panels, styles, heights, text_of):
    """Panels side by side: [(title, {method: {length: value}}, crossed methods)]"""
    with plt.rc_context(STYLE):
        count = len(panels)
        figure, all_axes = plt.subplots(1, count, figsize=(max(4.3 * count + 0.3, 7.2), 4.2), squeeze=False)
        figure.subplots_adjust(left=0.19 / count, right=1 - 0.3 / count, top=0.78, bottom=0.12, wspace=0.62)
        for axes, (panel, lines, crossed) in zip(all_axes[0], panels):
            draw_lines(axes, lines, styles, crossed, heights, text_of)
            axes.set_title(panel, fontsize=11, loc="left", color=TEXT)
        write_title(figure, title, note)
        return save(figure, path)
