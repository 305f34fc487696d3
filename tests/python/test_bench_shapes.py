"""bench/shapes.py on the CPU, with short sequences: every shape agrees with float64, and a wrong one is found."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from gpu import report, shape_methods, shape_report, shape_run  # noqa: E402
from gpu.alternate import time_alternately  # noqa: E402
from gpu.cases import BACKWARD, FORWARD, ONE_PASS, STEP  # noqa: E402
from gpu.shape_cases import BASE, FORWARD_GIVEN, SHAPES  # noqa: E402
from gpu.shape_run import Base, ShapesBench, make_plan, measure  # noqa: E402


def short(shape):
    """A sequence of 60 tokens, and a window that fits."""
    return replace(shape, length=60, batch=min(shape.batch, 2), window=shape.window // 100 if shape.window > 0 else -1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_shape_agrees_with_float64(shape):
    torch.manual_seed(1)
    errors, wrong = shape_methods.Check(short(shape), "cpu").run()
    assert not wrong
    both = {"dq_t", "dk_t"} if shape.teacher_gradients else set()
    assert errors.keys() == {"kl", "dq_s", "dk_s"} | both


@pytest.mark.parametrize(
    "change", [{"softcap": 0.0}, {"reverse": True}, {"window": 20}, {"causal": False}], ids=lambda change: str(change)
)
def test_a_wrong_result_is_found(change):
    """The check of one problem, given the results of another."""
    torch.manual_seed(1)
    shape = replace(short(BASE), softcap=50.0)
    check = shape_methods.Check(shape, "cpu")
    check.shape = replace(shape, **change)  # for which the library is asked
    assert check.run()[1]


def test_a_shape_is_timed_with_the_base_shape():
    torch.manual_seed(1)
    base = Base("cpu", short(BASE))
    measured = measure(short(SHAPES[2]), base, "cpu", rounds=4, sample_ms=1)
    assert set(measured.ours) == {FORWARD, FORWARD_GIVEN, BACKWARD, ONE_PASS}
    assert set(measured.base) == {FORWARD, BACKWARD, ONE_PASS}
    assert all(len(timing.samples) == 3 for timing in measured.ours.values())
    assert measured.kernels[FORWARD].startswith("cpu_") and " " not in measured.kernels[FORWARD]
    rows = {row["pass"]: row for row in shape_report.csv_rows(measured)}
    step = float(rows[FORWARD]["ms"]) + float(rows[BACKWARD]["ms"])
    assert float(rows[STEP]["ms"]) == pytest.approx(step, abs=2e-4)
    assert float(rows[ONE_PASS]["base_ratio"]) == pytest.approx(
        float(rows[ONE_PASS]["ms"]) / float(rows[ONE_PASS]["base_ms"]), rel=0.01
    )
    assert rows[FORWARD]["cudnn_ms"] == rows[FORWARD]["eager_ms"] == "" and "cudnn not measured" in rows[FORWARD]["note"]
    assert all(row.keys() <= set(shape_report.COLUMNS) for row in rows.values())


def test_the_step_of_teacher_groups_is_that_of_attention_kl(monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(shape_methods, "lses_first", lambda *_: True)  # as on a GPU
    assert not shape_methods.Check(short(SHAPES[2]), "cpu").run()[1]
    measured = measure(short(SHAPES[2]), Base("cpu", short(BASE)), "cpu", rounds=3, sample_ms=1)
    rows = {row["pass"]: row for row in shape_report.csv_rows(measured)}
    assert float(rows[STEP]["ms"]) == pytest.approx(measured.ours[STEP].median, abs=1e-4)
    assert rows[STEP]["kernel"] and float(rows[STEP]["base_ratio"]) > 0


@pytest.mark.parametrize("shape", [SHAPES[2], replace(BASE, causal=False)], ids=str)
def test_eager_pytorch_computes_the_same(shape):
    torch.manual_seed(1)
    plan = make_plan(replace(short(shape), dtype_t="f32", dtype_s="f32"), "cpu")
    plan.run(ONE_PASS)
    calls = shape_methods.eager_calls(plan.tensors, plan.shape)
    torch.testing.assert_close(calls[FORWARD](), plan.rows["kl"], rtol=1e-4, atol=1e-5)
    for eager, ours in zip(calls[STEP](), plan.gradients.values()):
        torch.testing.assert_close(eager, ours, rtol=1e-3, atol=1e-5)


def test_eager_pytorch_is_timed_where_it_can():
    base = Base("cpu", short(BASE))
    rows = {}
    for shape in SHAPES[2], replace(SHAPES[2], softcap=50.0):
        measured = measure(short(shape), base, "cpu", rounds=1, sample_ms=0, with_eager=True)
        rows[shape.softcap] = {row["pass"]: row for row in shape_report.csv_rows(measured)}
    assert rows[0.0][ONE_PASS]["eager_ms"] == rows[0.0][STEP]["eager_ms"] != rows[0.0][FORWARD]["eager_ms"]
    assert rows[0.0][BACKWARD]["eager_ms"] == "" and "eager not measured" in rows[50.0][FORWARD]["note"]


def test_the_base_shape_is_its_own_base():
    base = Base("cpu", short(BASE))
    measured = measure(short(BASE), base, "cpu", rounds=4, sample_ms=1)
    assert {line["base_ratio"] for line in measured.lines} == {1.0}


def test_a_call_that_fails_is_named_and_the_others_are_timed():
    def fail():
        raise RuntimeError("no such kernel\nand more")

    timings = time_alternately({"bad": fail, "good": lambda: None}, "cpu", rounds=5, sample_ms=0)
    assert timings["bad"].refusal == "no such kernel" and timings["bad"].median is None
    assert len(timings["good"].samples) == 3 and timings["good"].median >= 0


class OnCpu(ShapesBench):
    DEVICE = "cpu"

    def __init__(self, **arguments):
        given = dict(only=[], quick=False, check=True, rounds=3, sample_ms=1, csv=None, seed=3, eager=True)
        self.arguments, self.is_right = SimpleNamespace(**{**given, **arguments}), True
        self.version, self.about = "0", {"gpu": "G", "torch": "T", "commit": "C"}


def test_a_run_goes_on_after_a_shape_that_fails(monkeypatch, tmp_path, capsys):
    bad = replace(short(BASE), name="bad", heads_s=5)
    monkeypatch.setattr(shape_run, "chosen", lambda *_: [bad, short(SHAPES[2])])
    monkeypatch.setattr(shape_run, "Base", lambda device: Base(device, short(BASE)))
    bench = OnCpu(csv=tmp_path / "shapes.csv")
    bench.run()
    shown = capsys.readouterr().out
    assert not bench.is_right and "shapes that failed: bad\n" in shown
    assert "timing failed: ValueError: streamkl: heads_t=32" in shown
    rows = report.read_csv(tmp_path / "shapes.csv", shape_report.COLUMNS)
    assert [row["pass"] for row in rows] == ["", FORWARD, FORWARD_GIVEN, BACKWARD, ONE_PASS, STEP]
    assert rows[0]["shape"] == "bad" and "check failed: " in rows[0]["note"] and not rows[0]["ms"]
    assert float(rows[1]["dk_error"]) < 2e-2 and rows[1]["commit"] == "C"
