#!/usr/bin/env python3
"""Writes the tables of docs/study/README.md between their markers, and its pictures, from the CSV files of run.py and
indexers.py.

    tables.py [bench/study/results] [docs/study]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. The difference of an arm is that from its control: the arm
whose name ends in "control" with the same seed, context, layers, heads and steps, preferably of the same commit; its error is
twice the standard error over sequences.
"""

import csv
import math
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

PICTURES = ("course.svg", "needles.svg", "positions.svg")
SHOWN = ("50M-control", "50M-attention-0.03", "50M-reverse-0.1")  # arms with lines in the pictures of one shape
COURSE = ("attention-0.03", "reverse-0.1", "50M-attention-0.03", "50M-reverse-0.1", "ten-layers-0.1")
COLORS = ("#7a8190", "#1f5fbf", "#c2570c", "#2f8f6b", "#8a4fbf", "#1a1f2b")


class Study:
    def __init__(self, folder: Path) -> None:
        with open(folder / "arms.csv") as file:
            self.arms = {(row["arm"], int(row["seed"])): row for row in csv.DictReader(file)}
        with open(folder / "indexers.csv") as file:
            self.indexers = {(row["stage"], row["keys"], int(row["top"])): row for row in csv.DictReader(file)}
        self.curves: dict = defaultdict(dict)  # {(arm, seed, curve, role): {at: value}}
        with open(folder / "curves.csv") as file:
            for row in csv.DictReader(file):
                if row["value"]:
                    key = (row["arm"], int(row["seed"]), row["curve"], row["role"])
                    self.curves[key][int(row["at"])] = float(row["value"])

    def control(self, key):
        """The control of an arm; None if it has none."""
        names = ("seed", "context", "layers", "heads", "steps")
        shape = [self.arms[key][name] for name in names]
        found = [other for other, row in self.arms.items() if other[0].endswith("control") and [row[name] for name in names] == shape]
        found.sort(key=lambda other: self.arms[other]["commit"] != self.arms[key]["commit"])
        return found[0] if found and not key[0].endswith("control") else None

    def difference(self, key):
        """(held-out loss less that of the control, twice its standard error)."""
        other = self.control(key)
        if other is None:
            return None
        mine, theirs = (self.curves[(*each, "loss_sequence", "student")] for each in (key, other))
        apart = [mine[i] - theirs[i] for i in mine.keys() & theirs.keys()]
        return statistics.mean(apart), 2 * statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0

    def length(self, key) -> int:
        """The longest length of the retrieval test."""
        return max(
            int(name.rpartition("_")[2])
            for name, value in self.arms[key].items()
            if name.startswith("needle_rows_") and value
        )


def share(text: str) -> str:
    return f"{100 * float(text):.0f} %" if text else ""


def arms_table(study: Study, keys) -> list[str]:
    lines = ["| arm | tokens, M | attention KL | held-out loss | less than the control | needles found | values answered | ms per step |",
             "|---|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for key in keys:
        row, length, apart = study.arms[key], study.length(key), study.difference(key)
        difference = "" if apart is None else f"{-apart[0]:+.4f} ± {apart[1]:.4f}"
        lines.append(f"| {key[0]} | {int(row['tokens']) / 1e6:.1f} | {float(row['kl']):.3f} | {float(row['loss']):.4f} | {difference} | "
                     f"{share(row[f'found_student_{length}'])} | {share(row[f'answered_student_{length}'])} | "
                     f"{1e3 * float(row['train_seconds']) / int(row['steps']):.1f} |")  # fmt: skip
    for context in sorted({study.arms[key]["context"] for key in keys}, key=int):
        key = next(key for key in keys if study.arms[key]["context"] == context)
        row, length = study.arms[key], study.length(key)
        lines.append(f"| the teacher, {int(context):,} tokens | | | {float(row['loss_teacher']):.4f} | | {share(row[f'found_teacher_{length}'])} | "
                     f"{share(row[f'answered_teacher_{length}'])} | {float(row['ms_teacher']):.1f} |")  # fmt: skip
    row, length = study.arms[keys[0]], study.length(keys[0])
    heads = " or ".join(sorted({study.arms[key][f"needle_heads_{length}"] for key in keys}, key=int))
    return [*lines, "", f"{row['sequences']} held-out sequences; needles at {length:,} tokens: {row[f'needle_rows_{length}']} rows, "
            f"{heads} heads of the teacher that retrieve."]  # fmt: skip


def seeds_table(study: Study) -> list[str]:
    seeds = defaultdict(list)
    for key in study.arms:
        seeds[key[0]].append(key)
    lines = [
        "| arm | seeds | held-out loss, each seed | less than the control, mean | needles found, each seed |",
        "|---|---:|---|---:|---|",
    ]
    for name, keys in seeds.items():
        if len(keys) < 2:
            continue
        apart = [-found[0] for key in keys if (found := study.difference(key))]
        losses = ", ".join(f"{float(study.arms[key]['loss']):.4f}" for key in keys)
        needles = ", ".join(share(study.arms[key][f"found_student_{study.length(key)}"]) for key in keys)
        mean = f"{statistics.mean(apart):+.4f}" if apart else ""
        lines.append(f"| {name} | {len(keys)} | {losses} | {mean} | {needles} |")
    return lines if len(lines) > 2 else []


def indexers_table(study: Study) -> list[str]:
    lines = ["| keys | the most recent: recall | loss | after the dense stage: recall | loss | after the sparse stage: recall | loss |",
             "|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for top in sorted({top for _, _, top in study.indexers if top}):
        found = [study.indexers[key] for key in (("none", "recent", top), ("dense", "sparse", top), ("sparse", "sparse", top))]
        cells = " | ".join(f"{float(row['recall']):.3f} | {float(row['loss']):.3f}" for row in found)
        lines.append(f"| {top:,} | {cells} |")
    dense = study.indexers["none", "dense", 0]
    return [*lines, "", f"{dense['sequences']} held-out sequences of {int(dense['context']):,} tokens; with all keys the loss is "
            f"{float(dense['loss']):.3f}."]  # fmt: skip


def tables(study: Study) -> dict[str, list[str]]:
    first = [key for key in study.arms if key[1] == 0]
    main = study.arms[first[0]]
    same = {
        name: [key for key in first if (study.arms[key][name] == main[name])]
        for name in ("context", "layers", "heads")
    }
    plain = [key for key in first if all(key in keys for keys in same.values())]
    plain.sort(key=lambda key: (int(study.arms[key]["tokens"]), float(study.arms[key]["loss"])))
    other = [key for key in first if key not in plain]
    longer = [key for key in other if int(study.arms[key]["context"]) > int(main["context"])]
    shapes = [key for key in other if key not in longer]
    found = {"arms": arms_table(study, plain), "seeds": seeds_table(study), "indexers": indexers_table(study)}
    return found | {name: arms_table(study, keys) for name, keys in (("long", longer), ("students", shapes)) if keys}


def write_tables(study: Study, page: Path) -> None:
    text = page.read_text()
    for name, lines in tables(study).items():
        marker = f"<!-- table: {name} -->"
        if lines and marker not in text:
            sys.exit(f"{page}: has no {marker}")
        body = "\n".join(lines)
        text = re.sub(
            f"{re.escape(marker)}.*?<!-- end -->", lambda _: f"{marker}\n{body}\n<!-- end -->", text, flags=re.S
        )
    page.write_text(text)


# ---- Pictures ----------------------------------------------------------------------------------------------------------


def draw_course(plt, study: Study, path: Path) -> None:
    found = {key: other for name in COURSE if (key := (name, 0)) in study.arms and (other := study.control(key))}
    figure, panel = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for (key, other), color in zip(found.items(), COLORS[1:]):
        mine, theirs = (study.curves[(*each, "held_out_loss", "student")] for each in (key, other))
        per_step = int(study.arms[key]["tokens"]) / int(study.arms[key]["steps"]) / 1e6
        panel.plot([at * per_step for at in mine], [mine[at] - theirs[at] for at in mine], "o-", label=key[0], color=color)
    panel.axhline(0, color=COLORS[0])
    panel.set(xlabel="tokens, millions", ylabel="held-out loss less that of the control, nats")
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def draw_needles(plt, study: Study, path: Path) -> None:
    keys = [key for name in SHOWN if (key := (name, 0)) in study.arms]
    length = study.length(keys[0])
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for panel, (curve, title) in zip(
        panels, (("found", "Needles found by attention"), ("answered", "Values answered"))
    ):
        lines = [
            (keys[0], "teacher", "teacher", "black"),
            *((key, "student", key[0], color) for key, color in zip(keys, COLORS)),
        ]
        for key, role, label, color in lines:
            points = study.curves[(*key, f"{curve}_{length}", role)]
            panel.plot(list(points), [100 * value for value in points.values()], "o-", label=label, color=color)
        panel.set(
            title=f"{title}, {length:,} tokens",
            xlabel="depth: 0 is the beginning of the text, 7 its end",
            ylim=(-3, 103),
        )
    panels[0].set(ylabel="%")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def draw_positions(plt, study: Study, path: Path) -> None:
    keys = [key for name in SHOWN if (key := (name, 0)) in study.arms]
    longer = [key for key in study.arms if key[0].startswith("long-") and key[1] == 0]
    figure, panels = plt.subplots(
        1, 1 + bool(longer), figsize=(5 + 4.5 * bool(longer), 3.6), layout="constrained", squeeze=False
    )
    for panel, many in zip(panels[0], (keys, longer)):
        for key, color in zip(many, COLORS):
            student, teacher = (study.curves[(*key, "loss_position", role)] for role in ("student", "teacher"))
            panel.plot(list(student), [student[at] - teacher[at] for at in student], "o-", label=key[0], color=color)
        panel.set(
            title=f"{int(study.arms[many[0]]['context']):,} tokens",
            xlabel="position",
            ylabel="loss above the teacher's, nats",
        )
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main(results: Path, docs: Path) -> None:
    study = Study(results)
    write_tables(study, docs / "README.md")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "streamkl"  # the same bytes every time
    for name, draw in zip(PICTURES, (draw_course, draw_needles, draw_positions)):
        draw(plt, study, docs / name)


if __name__ == "__main__":
    given = [Path(each) for each in sys.argv[1:]]
    root = Path(__file__).resolve().parents[2]
    main(*(given or [root / "bench/study/results", root / "docs/study"]))
