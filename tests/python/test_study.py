"""bench/study/run.py: arms that share a teacher learn what they learn alone."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from distill_cases import CONTEXT, make_teacher


def _load(path):
    """A module by its path: bench/run.py has the same name."""
    spec = importlib.util.spec_from_file_location("study_run", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


study = _load(Path(__file__).parents[2] / "bench/study/run.py")
pytestmark = pytest.mark.usefixtures("any_precision")

ARMS = """
[options]
student-layers = 2
student-heads = 2
context = 48
batch = 2
steps = 10
language-weight = 0.5
eval-sequences = 2
needles = 1
needle-lengths = [48]
[[arm]]
name = "control"
attention-weight = 0.0
[[arm]]
name = "attention"
[[arm]]
name = "first-half"
attention-until = 0.5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_teacher(tmp_path_factory.mktemp("study"))
    (folder / "data").mkdir()
    for name in "train", "held-out":
        (folder / f"data/{name}.npy").write_bytes((folder / "data.npy").read_bytes())
    (folder / "arms.toml").write_text(ARMS)
    return folder


def arguments(folder, *more):
    return ["run.py", "--arms", str(folder / "arms.toml"), "--teacher", str(folder / "teacher"), "--data", str(folder / "data"),
            "--out", str(folder / "out"), "--cpu", "--sequences", "4", *more]  # fmt: skip


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_arms_together_learn_what_they_learn_alone(folder, monkeypatch):
    forwards, own = [], study.Outputs.hidden
    monkeypatch.setattr(study.SharedTeacher, "hidden", lambda self, ids, *more: _count(self, ids, more, forwards))
    histories = {}
    add = study.row_of
    monkeypatch.setattr(study, "row_of", lambda arm, *more: histories.update({arm.name: arm.run.history}) or add(arm, *more))
    monkeypatch.setattr(sys, "argv", arguments(folder))
    study.main()
    assert own and len(forwards) == 10  # one per step, for three arms
    found = {row["arm"]: row for row in rows(folder / "out/arms.csv")}
    assert list(found) == ["control", "attention", "first-half"]
    assert all(row["steps"] == "10" and row["tokens"] == str(10 * 2 * CONTEXT) for row in found.values())
    assert ["attention" in entry for entry in histories["first-half"]] == [True] * 5 + [False] * 5
    assert float(found["attention"]["kl"]) < float(found["control"]["kl"])

    given = study.argparse.Namespace(arms=folder / "arms.toml", teacher=str(folder / "teacher"), data=folder / "data",
                                     out=folder / "alone", seed=0, steps=0, cpu=True, only=[])  # fmt: skip
    for name, options in study.read_arms(given).items():
        run = study.Run(options, SimpleNamespace(pressed=0))
        with run.objective.attached():
            alone = [run.advance()["loss"] for _ in range(10)]
        assert alone == pytest.approx([entry["loss"] for entry in histories[name]], rel=1e-4), name


def _count(teacher, ids, more, forwards):
    if ids is not teacher._ids:
        forwards.append(ids)
        teacher._ids, teacher._logits = ids, study.Outputs.hidden(teacher, ids, *more)
    return teacher._logits


def test_a_second_call_adds_its_rows(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", arguments(folder, "--only", "control", "--steps", "3", "--out", str(folder / "seeds")))
    study.main()
    monkeypatch.setattr(sys, "argv", arguments(folder, "--only", "control", "--steps", "3", "--seed", "1", "--out", str(folder / "seeds")))
    study.main()
    assert [(row["arm"], row["seed"]) for row in rows(folder / "seeds/arms.csv")] == [("control", "0"), ("control", "1")]
    assert {row["seed"] for row in rows(folder / "seeds/curves.csv")} == {"0", "1"}
    assert {row["steps"] for row in rows(folder / "seeds/arms.csv")} == {"3"}
