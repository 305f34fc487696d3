"""bench/step.py on the CPU, with small models: steps with and without the loss, and a setup that fails."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import streamkl
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from gpu import report, step_models, step_report, step_run  # noqa: E402
from gpu.step_cases import (  # noqa: E402
    CARRIED, COMPUTED, DISTILLER, FUSED_DISTILLER, GIVEN, GRADIENT_ONLY, HUGGING_FACE, LAYERS, NO_LOSS, Model, Setup,
)  # fmt: skip

TEACHER = Model(8, 2, 16, hidden=64, mlp=96)
STUDENTS = [Model(8, 2, 8, hidden=32, mlp=48), Model(4, 2, 16, hidden=32, mlp=48), Model(2, 2, 16, hidden=32, mlp=48)]


@pytest.fixture(autouse=True)
def without_mkldnn():
    """Without bf16 instructions, each of its products raises and catches an exception, which takes milliseconds."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def setup(kind, student, **others):
    return Setup(kind, student, 24, teacher=TEACHER, **others)


@pytest.mark.parametrize("student", STUDENTS, ids=str)
def test_the_loss_of_layers_does_not_depend_on_where_the_lses_come_from(student, monkeypatch):
    torch.manual_seed(1)
    options, own = [], streamkl.attention_kl
    monkeypatch.setattr(streamkl, "attention_kl", lambda *tensors, **given: options.append(given) or own(*tensors, **given))
    steps = step_models.layer_steps(setup(LAYERS, student), "cpu", "cpu")
    losses = {variant: step().item() for variant, step in steps.items()}
    assert list(losses) == [NO_LOSS, GIVEN, COMPUTED, CARRIED, GRADIENT_ONLY]
    assert losses[CARRIED] == losses[GRADIENT_ONLY] == losses[NO_LOSS]  # the KL comes with the backward
    assert ["lse_s" in given and "lse_t" in given for given in options] == [True, True, False, False], "two layers each"
    assert losses[GIVEN] == pytest.approx(losses[COMPUTED], rel=1e-3)
    assert losses[GIVEN] > losses[NO_LOSS] * 1.0001


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_distiller_adds_to_the_loss_of_transformers_models(checkpointing):
    torch.manual_seed(1)
    steps = step_models.hugging_face_steps(setup(HUGGING_FACE, STUDENTS[1], checkpointing=checkpointing), "cpu")
    losses = {variant: step().item() for variant, step in steps.items()}
    assert losses[DISTILLER] > losses[NO_LOSS]
    assert losses[FUSED_DISTILLER] == pytest.approx(losses[DISTILLER], rel=1e-3)
    assert steps[NO_LOSS]().item() == losses[NO_LOSS], "a step leaves nothing"


class OnCpu(step_run.StepBench):
    DEVICE = "cpu"

    def __init__(self, **arguments):
        given = dict(kind=None, lengths=[], quick=False, attention="cpu", rounds=3, sample_ms=0, csv=None)
        self.arguments, self.is_right = SimpleNamespace(**{**given, **arguments}), True
        self.version, self.about = "0", {"gpu": "G", "torch": "T", "commit": "C"}


def test_a_run_goes_on_after_a_setup_that_fails(monkeypatch, tmp_path, capsys):
    bad = setup(LAYERS, replace(STUDENTS[0], heads=5, key_heads=5))
    setups = [bad, setup(LAYERS, STUDENTS[1]), setup(HUGGING_FACE, STUDENTS[2])]
    monkeypatch.setattr(step_run, "chosen", lambda *_: setups)
    bench = OnCpu(csv=tmp_path / "step.csv")
    bench.run()
    shown = capsys.readouterr().out
    assert not bench.is_right and "LSEs given failed: ValueError: q_t [1, 8, 24, 16]" in shown
    rows = report.read_csv(tmp_path / "step.csv", step_report.COLUMNS)
    variants = [NO_LOSS, NO_LOSS, GIVEN, COMPUTED, CARRIED, GRADIENT_ONLY, NO_LOSS, DISTILLER, FUSED_DISTILLER]
    assert [row["variant"] for row in rows] == variants
    assert [bool(row["percent"]) for row in rows] == [variant != NO_LOSS for variant in variants]
    assert "failed" in rows[0]["note"] and {row["attention"] for row in rows} == {"cpu", "sdpa"}
