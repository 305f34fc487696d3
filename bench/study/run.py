#!/usr/bin/env python3
"""Runs the arms of the study: a queue of streamkl-distill processes on one GPU.

    run.py --arms arms.toml --teacher DIR --data DIR --out DIR [--jobs N] [--limit SECONDS] [--steps N] [--only NAME ...]

The arms file has [options], which all arms share, and [[arm]] tables in the order of their priority: a name, any options of
streamkl-distill, and `seeds`, a list. `student = "@NAME"` starts from the student that the arm NAME has trained, with the same
seed or the only one. At the limit, running arms write a checkpoint and stop; the same command continues them. After every
arm, OUT/arms.csv (one row per arm) and OUT/curves.csv are written from all arms that are finished.
"""

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

try:
    import tomllib
except ImportError:
    import tomli as tomllib

STOPPING = 25  # seconds before the limit at which running arms are told to stop
CURVES = ("arm", "seed", "curve", "role", "at", "value")


class Arm:
    """One run of streamkl-distill: an arm with a seed."""

    def __init__(self, name: str, seed: int, options: dict, out: Path) -> None:
        self.name, self.seed, self.out = name, seed, out / f"{name}-{seed}"
        self.needs = options["student"][1:] if options.get("student", "").startswith("@") else None
        self.options = {**options, "seed": seed, "out": str(self.out)}
        self.process: subprocess.Popen | None = None
        self.started = 0.0

    @property
    def is_finished(self) -> bool:
        return (self.out / "evaluation.json").exists()

    def start(self, parent: "Arm | None", jobs: int) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        options = {**self.options, **({"student": str(parent.out / "student")} if parent else {})}
        path = self.out / "arm.toml"
        path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
        again = "--resume" if (self.out / "checkpoint.safetensors").exists() else "--overwrite"
        environment = {**os.environ, "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // jobs, 1))}
        command = [sys.executable, "-m", "streamkl.distill", "--options", str(path), again]
        with open(self.out / "output.log", "a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.started = time.monotonic()


def read_arms(given: argparse.Namespace) -> list[Arm]:
    file = tomllib.loads(given.arms.read_text())
    data = {name: [str(given.data / f"{file}.npy")] for name, file in (("data", "train"), ("held-out", "held-out"))}
    common = {"teacher": given.teacher, **data, **file["options"], **({"steps": given.steps} if given.steps else {})}
    arms = []
    for table in file["arm"]:
        name, seeds = table.pop("name"), table.pop("seeds", [0])
        options = {**common, **table}
        if options.get("student"):
            options.pop("student-layers", None)
        arms += [Arm(name, seed, options, given.out) for seed in seeds if not given.only or name in given.only]
    return arms


def parent_of(arm: Arm, arms: list[Arm]) -> Arm | None:
    """The arm whose student this one starts from."""
    found = {other.seed: other for other in arms if other.name == arm.needs}
    if not found and arm.needs:
        raise SystemExit(f"{arm.name}: student=@{arm.needs}: there is no such arm")
    return found.get(arm.seed, next(iter(found.values()), None))


def work(arms: list[Arm], jobs: int, end: float, finished) -> None:
    """Runs the arms, at most `jobs` at a time, until they are finished or time.monotonic() is `end`."""
    waiting, running, took = [arm for arm in arms if not arm.is_finished], [], []
    while waiting or running:
        left = end - STOPPING - time.monotonic()
        if left <= 0:
            break
        ready = [arm for arm in waiting if (parent := parent_of(arm, arms)) is None or parent.is_finished]
        if len(running) < jobs and ready and left > min(took, default=0):  # an arm that cannot end is not begun
            arm = ready[0]
            waiting.remove(arm)
            running.append(arm)
            arm.start(parent_of(arm, arms), jobs)
            say(f"{arm.out.name}: started, {left:.0f} s left")
        elif not running:
            break
        for arm in [arm for arm in running if arm.process.poll() is not None]:
            running.remove(arm)
            seconds = time.monotonic() - arm.started
            say(f"{arm.out.name}: status {arm.process.returncode} after {seconds:.0f} s")
            if arm.is_finished:
                took.append(seconds)
                (arm.out / "checkpoint.safetensors").unlink(missing_ok=True)
                finished()
            else:
                say((arm.out / "output.log").read_text()[-2000:])
        time.sleep(0.2)
    stop(running)
    if any(arm.is_finished for arm in running):
        finished()


def stop(running: list[Arm]) -> None:
    for arm in running:
        arm.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOPPING - 5
    for arm in running:
        try:
            arm.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            arm.process.kill()
            arm.process.wait()
        say(f"{arm.out.name}: {'finished' if arm.is_finished else 'stopped'}, status {arm.process.returncode}")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# ---- Results -----------------------------------------------------------------------------------------------------------


def row_of(arm: Arm, jobs: int, commit: str) -> tuple[dict, list[tuple]]:
    """(the row of arms.csv, the rows of curves.csv) of a finished arm."""
    found = json.loads((arm.out / "evaluation.json").read_text())
    before, after = found["before"], found["after"]
    log = [json.loads(line) for line in (arm.out / "log.jsonl").read_text().splitlines()]
    log = [entry for entry in log if "tokens_per_second" in entry]
    steps = len(log)
    tokens = arm.options["batch"] * arm.options["context"] * arm.options.get("accumulate", 1)
    row = dict(
        arm=arm.name, seed=arm.seed, commit=commit, jobs=jobs, context=after["context"], layers=len(after["kl_layer"]),
        heads=len(after["kl_head"][0]), steps=steps, tokens=steps * tokens, train_seconds=round(log[-1]["seconds"], 2),
        ms_per_step=round(1e3 * tokens / statistics.median(e["tokens_per_second"] for e in log), 2),
        peak_gib=round(max(e["memory"] for e in log) / 2**30, 3), sequences=after["sequences"],
        kl_before=before["kl"], kl=after["kl"], output_kl_before=before["output_kl"], output_kl=after["output_kl"],
        loss_before=_mean(before["language"]["student"]), loss=_mean(after["language"]["student"]),
        loss_teacher=_mean(after["language"]["teacher"]),
    )  # fmt: skip
    curves = [("kl_layer", "student", i, kl) for i, kl in enumerate(after["kl_layer"])]
    for role, losses in after["language"].items():
        size = after["context"] / len(losses)
        curves += [("loss_position", role, round((i + 1) * size), loss) for i, loss in enumerate(losses)]
        curves += [("loss_sequence", role, i, loss) for i, loss in enumerate(after["language_sequence"][role])]
        shares = [statistics.mean(pair) for pair in zip(*after["distance_share"][role])]
        curves += [("distance_share", role, 2**i // 2, share) for i, share in enumerate(shares)]
    for test in after["retrieval"]:
        length = test["length"]
        row.update({f"needle_rows_{length}": test["rows"], f"needle_heads_{length}": len(test["heads"])})
        for kind, label in ("attention", "found"), ("answers", "answered"):
            for role in "teacher", "student":
                shares = test[kind][role] or []
                row[f"{label}_{role}_{length}"] = _mean(shares)
                curves += [(f"{label}_{length}", role, i, share) for i, share in enumerate(shares)]
    bins = min(20, steps)
    for name in {"language", "output", "attention"} & log[0].keys():
        for i in range(bins):
            part = [e[name] for e in log[i * steps // bins : (i + 1) * steps // bins] if name in e]
            if part:
                curves.append((f"training_{name}", "student", (i + 1) * steps // bins, statistics.mean(part)))
    return row, [(arm.name, arm.seed, *curve) for curve in curves]


def _mean(values: list) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def write_csv(out: Path, arms: list[Arm], jobs: int, commit: str) -> None:
    rows, curves = [], []
    for arm in arms:
        if arm.is_finished:
            row, more = row_of(arm, jobs, commit)
            rows.append(row)
            curves += more
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(out / "arms.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    with open(out / "curves.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CURVES)
        writer.writerows([*row[:-1], "" if row[-1] is None else f"{row[-1]:.5g}"] for row in curves)


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", type=Path, required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train.npy and held-out.npy")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds")
    parser.add_argument(
        "--steps", type=int, help="of all arms that have no steps of their own; default: those of the file"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--commit", default="", help="default: that of the working tree")
    given = parser.parse_args()
    commit = (
        given.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
    )
    arms = read_arms(given)
    given.out.mkdir(parents=True, exist_ok=True)
    work(arms, given.jobs, began + given.limit, lambda: write_csv(given.out, arms, given.jobs, commit))
    write_csv(given.out, arms, given.jobs, commit)
    say(f"{sum(arm.is_finished for arm in arms)} of {len(arms)} arms are finished")


if __name__ == "__main__":
    main()
