"""The chart of bench/shapes.py from its CSV: the rate of every shape as a share of the base shape's."""

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from .cases import FORWARD, ONE_PASS
from .figures import STYLE, TEXT, save
from .shape_cases import BASE

PASS_COLOURS = {FORWARD: "#8b949e", ONE_PASS: "#2f81f7"}


def newest(rows):
    """{shape: {pass: row}} of the last run's GPU; later rows replace earlier ones. The base shape comes first."""
    timed = [row for row in rows if row["ms"]]
    if not timed:
        raise ValueError("it has no times")
    found = {}
    for row in timed:
        if row["gpu"] == timed[-1]["gpu"]:
            found.setdefault(row["shape"], {})[row["pass"]] = row
    return dict(sorted(found.items(), key=lambda item: item[0] != BASE.name))


def rate_of_base(row, base_flops):
    """Useful TFLOP/s divided by those of the base shape in the same run."""
    return float(row["tflops"]) / (base_flops / float(row["base_ms"]) * 1e-9)


def draw_shapes(rows, path):
    """Writes the chart; raises ValueError if rows are missing."""
    shapes = newest(rows)
    last = next(iter(shapes.values()))
    about = next(iter(last.values()))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.6, 1.15 + 0.27 * len(shapes)))
        height = figure.get_figheight()
        figure.subplots_adjust(left=0.31, right=0.97, top=1 - 0.82 / height, bottom=0.35 / height)
        for offset, (operation, colour) in zip((-0.19, 0.19), PASS_COLOURS.items()):
            bars = {
                index: rate_of_base(passes[operation], BASE.flops(operation))
                for index, passes in enumerate(shapes.values())
                if operation in passes and passes[operation]["base_ms"]
            }
            axes.barh([index + offset for index in bars], list(bars.values()), 0.36, color=colour, label=operation)
        axes.axvline(1.0, color=TEXT, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(shapes)), list(shapes))
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.tick_params(length=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
        axes.margins(y=0.01)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        title = "Useful TFLOP/s, as a share of the base shape's (longer is faster)"
        figure.text(0.012, 1 - 0.1 / height, title, fontsize=13, fontweight="bold", va="top")
        note = f"{about['gpu']}, 32/8 heads of 128, N = 8,192, causal, bf16 unless named; one pass: loss and gradients"
        figure.text(0.012, 1 - 0.36 / height, note, fontsize=9, va="top")
        return save(figure, path)
