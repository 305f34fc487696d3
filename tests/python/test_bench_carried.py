"""bench/carried.py on the CPU, with small cases and torch's attention in place of cuDNN's."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from gpu import carried_run, report  # noqa: E402
from gpu.carried_cases import APART, CARRIED, CASES, COLUMNS, CUDNN, FORWARD, WITH_KL, chosen  # noqa: E402


def small(case):
    key_heads = 2 if case.key_heads < case.heads else 4
    return replace(case, length=24 * case.sequences, heads=4, key_heads=key_heads, dim_t=16, dim_s=16 * case.dim_s // case.dim_t)


@pytest.fixture(autouse=True)
def attention_of_the_cpu(monkeypatch):
    def attend(q, k, v, causal):
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return output, lse.detach().flatten(2)[..., : q.shape[2]]

    torch.manual_seed(1)
    monkeypatch.setattr(carried_run, "cudnn_attention", attend)
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.parametrize("case", [case for case in CASES if case.sequences == 1][:7], ids=lambda case: case.name)
def test_gradients_agree_with_float64(case):
    errors, wrong = carried_run.check(small(case), "cpu")
    assert not wrong
    assert all(0 < error < 1e-2 for error in errors.values())


def test_a_wrong_gradient_is_found(monkeypatch):
    own = carried_run.Calls.carried
    monkeypatch.setattr(carried_run.Calls, "carried", lambda self: [gradient * 1.02 for gradient in own(self)])
    _, wrong = carried_run.check(small(CASES[0]), "cpu")
    assert [text.split()[0] for text in wrong] == ["dq", "dk", "dv"]


@pytest.mark.parametrize("case", [CASES[0], next(case for case in CASES if case.sequences > 1)], ids=lambda case: case.name)
def test_methods_and_rows(case, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(carried_run, "chosen", lambda only: [small(case)])
    monkeypatch.setattr(carried_run.CarriedBench, "DEVICE", "cpu")
    bench = object.__new__(carried_run.CarriedBench)
    path = tmp_path / "carried.csv"
    bench.arguments = SimpleNamespace(only=[], check=case.sequences == 1, rounds=1, sample_ms=1, csv=path)
    bench.is_right, bench.version, bench.about = True, "0", {"gpu": "none", "torch": "0", "commit": "0"}
    bench.run()
    assert bench.is_right, capsys.readouterr().out
    rows = report.read_csv(path, COLUMNS)
    assert [row["method"] for row in rows] == ([FORWARD, CUDNN, APART] if case.sequences == 1 else []) + [CARRIED, WITH_KL]
    assert all(float(row["ms"]) > 0 for row in rows)


def test_cases_are_chosen_by_name():
    assert chosen([]) == CASES
    assert [case.name for case in chosen(["f16"])] == ["causal, f16"]
    with pytest.raises(ValueError, match="no such case"):
        chosen(["cubic"])
