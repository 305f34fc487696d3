#!/usr/bin/env python3
"""Runs the arms of the study together, in one process on one GPU.

    run.py --arms arms.toml --teacher TEACHER --data DIR --out DIR [--seed N] [--steps N] [--only NAME ...]

The arms file has [options], which all arms share, and [[arm]] tables: a name and any options of streamkl-distill;
`student = "@NAME"` is the student that the arm NAME has left with --save. All arms read the same batch in every step, and the
teacher reads it once for all of them. OUT/arms.csv (one row per arm) and OUT/curves.csv receive the arms' rows.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

os.environ["TQDM_DISABLE"] = "1"  # read by the import

import torch  # noqa: E402
from streamkl.distill._loop import Run  # noqa: E402
from streamkl.distill._objective import Outputs, next_tokens  # noqa: E402
from streamkl.distill._options import Options  # noqa: E402
from streamkl.distill._output import write_model  # noqa: E402
from streamkl.distill._output_losses import row_losses  # noqa: E402
from streamkl.distill._checkpoint import full_weights  # noqa: E402

try:
    import tomllib
except ImportError:
    import tomli as tomllib

BINS = 20  # points of a curve over the steps
MEASURED = 10  # measurements of the held-out loss during training
MEASURED_SEQUENCES = 64
TOGETHER = 8  # sequences of a forward without gradients
POSITIONS = 16  # points of a curve over the positions
CURVES = ("arm", "seed", "curve", "role", "at", "value")


class SharedTeacher(Outputs):
    """The logits of the teacher for the last batch: all arms learn from one forward."""

    def __init__(self, teacher) -> None:
        super().__init__(teacher)
        self.head = torch.nn.Identity()  # its outputs are logits
        self._ids = None

    def hidden(self, ids, positions=None, states=None):
        if states is not None:
            return super().hidden(ids, positions, states)
        if ids is not self._ids:
            self._ids, self._logits = ids, super().hidden(ids, positions)
        return self._logits


class SharedBatches:
    """The training data of all arms: a batch is on the device once."""

    def __init__(self, sequences, device) -> None:
        self.sequences, self.device, self._indices = sequences, device, None

    def __len__(self) -> int:
        return len(self.sequences)

    def batch(self, indices):
        if indices != self._indices:
            self._indices, self._ids = indices, self.sequences.batch(indices).to(self.device)
        return self._ids


class Arm:
    """A student in training."""

    def __init__(self, name: str, options: Options, others: "list[Arm]") -> None:
        same = [other for other in others if other.shape_of(other.run.options) == self.shape_of(options)]
        before = same[0].run.before if same else None
        self.name, self.run = name, Run(options, SimpleNamespace(pressed=0), before, like=others[0].run if others else None)
        self.measured: list[tuple[int, float]] = []  # (step, held-out loss)

    @staticmethod
    def shape_of(options: Options) -> tuple:
        """Arms of one shape begin with the same student."""
        names = ("student", "student_layers", "student_heads", "student_key_heads", "init_layers", "init_heads", "layer_map")
        return tuple(str(getattr(options, name)) for name in names)

    def measure(self) -> None:
        losses = held_out_losses(self.run, self.run.student, MEASURED_SEQUENCES)
        self.measured.append((self.run.step, losses.mean().item()))


@torch.no_grad()
def held_out_losses(run: Run, model, count: int) -> torch.Tensor:
    """[sequences, tokens]: the language loss of the first held-out sequences."""
    outputs, losses = Outputs(model), []
    for at in range(0, min(count, len(run.held_out)), TOGETHER):
        ids = run.held_out.batch(list(range(at, min(at + TOGETHER, count, len(run.held_out))))).to(model.device)
        with run.accelerator.autocast():
            hidden = outputs.hidden(ids)
            losses.append(row_losses(None, outputs.head, None, hidden, next_tokens(ids))["language"][:, :-1])
    run.objective.distiller.drop()
    return torch.cat(losses)


def read_arms(given: argparse.Namespace) -> dict[str, Options]:
    file = tomllib.loads(given.arms.read_text())
    common = {"teacher": given.teacher, "data": [str(given.data / "train.npy")], "held-out": [str(given.data / "held-out.npy")],
              "seed": given.seed, "overwrite": True, **file["options"]}  # fmt: skip
    if given.steps:
        common["steps"] = given.steps
    if given.cpu:
        common["cpu"] = True
    arms = {}
    for table in file["arm"]:
        name = table.pop("name")
        if given.only and name not in given.only:
            continue
        options = {**common, **table, "out": str(given.out / f"{name}-{given.seed}")}
        if options.get("student", "").startswith("@"):
            options["student"] = str(given.out / f"{options['student'][1:]}-{given.seed}" / "student")
        arms[name] = Options(**{key.replace("-", "_"): value for key, value in options.items()}).check()
    first = next(iter(arms.values()))
    for name, options in arms.items():
        for key in ("context", "batch", "accumulate", "start_context", "steps", "precision"):
            if getattr(options, key) != getattr(first, key):
                sys.exit(f"{given.arms}: {name}: {key} must be that of the other arms, which read the same batches")
    if first.accumulate != 1 or first.start_context:
        sys.exit(f"{given.arms}: accumulate must be 1 and start-context 0")
    return arms


class Together:
    """The arms, and the teacher that they share."""

    def __init__(self, arms: list[Arm]) -> None:
        self.arms, first = arms, arms[0].run
        self.teacher, self.data = SharedTeacher(first.teacher), SharedBatches(first.training, first.accelerator.device)
        for arm in arms:
            arm.run.training = self.data
            arm.run.objective.outputs = (self.teacher, arm.run.objective.outputs[1])
            arm.run.student.train()
        self.teacher_seconds: list[float] = []

    def step(self) -> None:
        """One step of every arm."""
        run = self.arms[0].run
        started = time.monotonic()
        ids = run.batches()[0]
        with torch.no_grad(), run.accelerator.autocast():
            self.teacher.hidden(ids)
        if ids.is_cuda:
            torch.cuda.synchronize()
        self.teacher_seconds.append(time.monotonic() - started)
        for arm in self.arms:
            arm.run.history.append(arm.run.advance())


def _seconds(entry: dict, run: Run) -> float:
    return run.tokens_per_step() / entry["tokens_per_second"]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def train(arms: list[Arm]) -> Together:
    together, steps = Together(arms), arms[0].run.options.steps
    with ExitStack() as stack:
        for arm in arms:
            stack.enter_context(arm.run.objective.attached())
            arm.measure()
        every = -(-steps // MEASURED)
        for step in range(1, steps + 1):
            together.step()
            if step % every == 0 or step == steps:
                for arm in arms:
                    arm.measure()
                losses = ", ".join(f"{arm.name} {arm.measured[-1][1]:.3f}" for arm in arms)
                say(f"step {step} of {steps}: held-out loss: {losses}")
    return together


# ---- Results -----------------------------------------------------------------------------------------------------------


def row_of(arm: Arm, together: Together, losses: dict[str, torch.Tensor], given: argparse.Namespace) -> tuple[dict, list]:
    """(the row of arms.csv, the rows of curves.csv) of a trained arm."""
    run, after, before, history = arm.run, arm.run.after, arm.run.before, arm.run.history
    tokens, steps = run.tokens_per_step(), len(history)
    row = dict(
        arm=arm.name, seed=given.seed, commit=given.commit, together=len(together.arms), context=after.context,
        layers=len(after.kl_layer), heads=len(after.kl_head[0]), rate=run.options.rate, steps=steps, tokens=steps * tokens,
        train_seconds=round(run.seconds, 2), ms_per_step=round(1e3 * statistics.median(_seconds(e, run) for e in history), 2),
        ms_teacher=round(1e3 * statistics.median(together.teacher_seconds), 2),
        peak_gib=round(max(e["memory"] for e in history) / 2**30, 3), sequences=len(losses["student"]),
        kl_before=before.kl, kl=after.kl, output_kl_before=before.output_kl, output_kl=after.output_kl,
        loss_before=arm.measured[0][1], loss=losses["student"].mean().item(), loss_teacher=losses["teacher"].mean().item(),
    )  # fmt: skip
    curves = [("kl_layer", "student", i, kl) for i, kl in enumerate(after.kl_layer)]
    curves += [("held_out_loss", "student", step, loss) for step, loss in arm.measured]
    for role, each in losses.items():
        parts, size = each.tensor_split(POSITIONS, 1), after.context / POSITIONS
        curves += [("loss_position", role, round((i + 1) * size), part.mean().item()) for i, part in enumerate(parts)]
        shares = [statistics.mean(pair) for pair in zip(*after.distance_share[role])]
        curves += [("distance_share", role, 2**i // 2, share) for i, share in enumerate(shares)]
    curves += [("loss_sequence", "student", i, loss) for i, loss in enumerate(losses["student"].mean(1).tolist())]
    for test in after.retrieval:
        length = test["length"]
        row.update({f"needle_rows_{length}": test["rows"], f"needle_heads_{length}": len(test["heads"])})
        for kind, label in ("attention", "found"), ("answers", "answered"):
            for role in "teacher", "student":
                shares = test[kind][role] or []
                row[f"{label}_{role}_{length}"] = _mean(shares)
                curves += [(f"{label}_{length}", role, i, share) for i, share in enumerate(shares)]
    bins = min(BINS, steps)
    for name in {"language", "output", "attention"} & history[0].keys():
        for i in range(bins):
            part = [e[name] for e in history[i * steps // bins : (i + 1) * steps // bins] if name in e]
            if part:
                curves.append((f"training_{name}", "student", (i + 1) * steps // bins, statistics.mean(part)))
    return row, [(arm.name, given.seed, *curve) for curve in curves]


def _mean(values: list) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def write_csv(out: Path, rows: list[dict], curves: list[tuple]) -> None:
    """Adds the rows to those of other arms and seeds."""
    new = {(row["arm"], str(row["seed"])) for row in rows}
    old, old_curves = ([row for row in _read(out / name) if (row["arm"], row["seed"]) not in new] for name in ("arms.csv", "curves.csv"))  # fmt: skip
    rows = old + [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    _write(out / "arms.csv", list(dict.fromkeys(name for row in rows for name in row)), rows)
    made = [dict(zip(CURVES, (*row[:-1], "" if row[-1] is None else f"{row[-1]:.5g}"))) for row in curves]
    _write(out / "curves.csv", list(CURVES), old_curves + made)


def _read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, names: list[str], rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", type=Path, required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train.npy and held-out.npy")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="default: those of the arms file")
    parser.add_argument("--sequences", type=int, default=192, help="held-out sequences of the loss")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--commit", default="", help="default: that of the working tree")
    parser.add_argument("--save", action="store_true", help="write the students to OUT/NAME-SEED/student")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if not given.commit:
        given.commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
    arms: list[Arm] = []
    for name, options in read_arms(given).items():
        arms.append(Arm(name, options, arms))
        say(f"{name}: can train")
    together = train(arms)
    rows, curves = [], []
    of_teacher = held_out_losses(arms[0].run, arms[0].run.teacher, given.sequences)
    for arm in arms:
        losses = dict(student=held_out_losses(arm.run, arm.run.student, given.sequences), teacher=of_teacher)
        arm.run.after = arm.run._evaluate("after training")
        row, more = row_of(arm, together, losses, given)
        rows.append(row)
        curves += more
        write_csv(given.out, rows, curves)
        if given.save:
            write_model(arm.run.out / "student", arm.run, full_weights(arm.run.wrapped), [])
        say(f"{arm.name}: held-out loss {row['loss']:.4f}, attention KL {row['kl']:.3f}")


if __name__ == "__main__":
    main()
