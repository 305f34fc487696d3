"""The harness of bench/run.py on the CPU: command line, timing, rows, a run that goes on, charts."""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import run as command  # noqa: E402
from harness import report  # noqa: E402
from harness.attention import Shape  # noqa: E402
from harness.library import BACKWARD, FORWARD, ONE_PASS, STEP  # noqa: E402
from harness.run import Method, Result, Run, time_methods  # noqa: E402
from harness.timing import Prepared, Timing, repeats_of, time_alternately  # noqa: E402
from questions import call, indexer, peers, pooled, shapes, stats, step, zigzag  # noqa: E402

# ---- The command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("speed", "bench/run.py speed: must be one of peers, shapes, "),
        ("shapes --only d=7", "--only='d=7': must be part of a name: base: 32/8 heads of 128; "),
        ("shapes --rounds 0", "--rounds=0: must be at least 1"),
        ("shapes --csv /nowhere/shapes.csv", "--csv=/nowhere/shapes.csv: there is no folder /nowhere"),
        ("pooled --block 0", "--block=0: must be at least 1"),
        ("peers --peers fa3", "no fa3; must be of cudnn, fa2, flex, compile, eager"),
        ("peers --heads 32 --key-heads 12", "--key-heads=12: must divide --heads=32"),
        ("peers --packed 128,0", "--packed"),
        (
            "peers --linearard /nowhere",
            "--linearard=/nowhere: must be a checkout of LinearARD, with kernels/attention_KL/integration.py",
        ),
        ("indexer --length 0", "--length=0: must be at least 1"),
        ("indexer --top-k -1", "--top-k=-1: must be at least 0"),
        ("indexer --heads 64 --key-heads 5", "--key-heads=5: must divide --heads=64"),
        (
            "indexer --tilelang /nowhere",
            "--tilelang=/nowhere: must be TileLang's examples/dsa_sparse_finetune, with sparse_mla_topk_reducesum.py",
        ),
        ("zigzag --length 100", "--length=100: must be a multiple of 16 for --ranks=8"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(arguments.split())
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_linearard_is_compared_on_dense_problems_only(tmp_path, capsys):
    (tmp_path / "kernels/attention_KL").mkdir(parents=True)
    (tmp_path / "kernels/attention_KL/integration.py").touch()
    with pytest.raises(SystemExit):
        command.main(["peers", "--linearard", str(tmp_path), "--packed", "64,32"])
    assert "--linearard: must be without --packed and --key-heads" in capsys.readouterr().err


def test_a_file_with_other_columns_is_refused_before_anything_is_measured(tmp_path, capsys):
    path = tmp_path / "other.csv"
    path.write_text("date,value\n")
    with pytest.raises(SystemExit):
        command.main(["peers", "--csv", str(path)])
    assert "its columns are not those" in capsys.readouterr().err and path.read_text() == "date,value\n"


def test_a_dry_run_lists_the_cases(capsys):
    for arguments, count in (
        ("shapes", 37), ("shapes --only softcap --only deterministic", 6), ("call", 10), ("call --only groups", 4),
        ("step", 12), ("peers --masks causal --lengths 64,128", 4), ("indexer", 1), ("pooled", 2), ("stats", 7),
        ("zigzag", 2), ("overhead", 1), ("cpu_attention", 4),
    ):  # fmt: skip
        command.main([*arguments.split(), "--dry-run"])
        assert len(capsys.readouterr().out.splitlines()) == count, arguments


@pytest.mark.parametrize("question", [peers, shapes, call, step, stats, indexer, pooled, zigzag])
def test_results_have_the_columns_of_their_question(question):
    """Rows of earlier runs stay readable, and new ones can be added."""
    name = question.__name__.rpartition(".")[2]
    report.check_csv(Path(__file__).resolve().parents[2] / f"bench/results/{name}.csv", question.COLUMNS)


# ---- Timing --------------------------------------------------------------------------------------------------------


def test_a_call_that_fails_is_named_and_the_others_are_timed():
    def fail():
        raise RuntimeError("no such kernel\nand more")

    timings = time_alternately({"bad": fail, "good": lambda: None}, "cpu", rounds=5, sample_ms=0)
    assert timings["bad"].refusal == "no such kernel" and timings["bad"].median is None
    assert len(timings["good"].samples) == 3 and timings["good"].median >= 0


def test_calls_alternate_and_their_preparation_is_not_timed():
    import time

    order = []

    def prepare():
        time.sleep(0.05)
        return lambda: order.append("prepared")

    calls = {"plain": lambda: order.append("plain"), "prepared": Prepared(prepare)}
    timings = time_alternately(calls, "cpu", rounds=4, sample_ms=1e9)
    assert order == ["plain"] * 2 + ["prepared"] * 2 + ["plain", "prepared"] * 4
    assert len(timings["prepared"].samples) == 4 and timings["prepared"].median < 25


def test_brief_calls_of_a_gpu_are_repeated():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [repeats_of(ms, gpu) for ms in (1e-4, 0.05, 0.4, 3.0)] == [100, 20, 2, 1] and repeats_of(0.05, cpu) == 1


# ---- Work and rows -------------------------------------------------------------------------------------------------


def test_visible_pairs_and_work_are_counted():
    assert Shape(length=5).pairs == 15
    assert Shape(length=5, causal=False).pairs == 25
    assert Shape(length=5, window=1).pairs == 1 + 2 + 2 + 2 + 2
    assert Shape(length=5, window=9).pairs == 15
    assert Shape(packed=(5, 1, 3)).pairs == 15 + 1 + 6
    assert Shape(packed=(5, 1, 3)).sequences == [(0, 0, 5), (0, 5, 6), (0, 6, 9)]
    shape = Shape(heads_t=4, dim_t=8, heads_s=2, dim_s=16, length=5, batch=3)
    assert shape.flops(FORWARD) == 2 * 3 * 15 * (4 * 8 + 2 * 16)
    assert shape.flops(BACKWARD) == shape.flops(ONE_PASS) == 2 * 3 * 15 * (4 * 8 + 3 * 2 * 16)
    assert shape.flops(STEP) == shape.flops(FORWARD) + shape.flops(BACKWARD)
    both = Shape(heads_t=2, heads_s=2, length=5, teacher_gradients=True)
    assert both.flops(BACKWARD) == 3 * both.flops(FORWARD)


def test_dense_work_is_that_of_the_packed_batch():
    packed = Shape(key_heads_s=8, packed=(8192, 4096, 2048, 1024, 512))
    dense = packed.dense()
    assert (dense.batch, dense.key_heads_s, dense.packed) == (5, 32, ())
    assert dense.pairs == pytest.approx(packed.pairs, rel=0.05)


def test_indexer_work_is_that_of_visible_pairs():
    case = indexer.IndexerCase(5, heads=4, key_heads=2, dim=8, index_heads=3, index_dim=2, top_k=0, causal=True)
    seen = [1, 2, 3, 4, 5]
    assert case.pairs == sum(seen)
    assert case.flops(FORWARD) == 2 * sum(seen) * (4 * 8 + 3 * 2)
    assert case.flops(STEP) == 2 * sum(seen) * (4 * 8 + 3 * 3 * 2)
    for top_k, causal, pairs in (2, True, sum(min(2, n) for n in seen)), (9, True, sum(seen)), (2, False, 5 * 2):
        assert indexer.IndexerCase(5, 4, 2, 8, 3, 2, top_k, causal).pairs == pairs


def timed(**times):
    """{pass: Timing}"""
    return {name.replace("_", " "): Timing([ms, 2 * ms, ms]) for name, ms in times.items()}


def rows_of(monkeypatch, methods, more, **others):
    """The rows of a run whose methods already have timings."""
    monkeypatch.setattr("harness.run.time_methods", lambda methods, *_: [method.timings for method in methods])
    run = SimpleNamespace(device=torch.device("cpu"), given=SimpleNamespace(rounds=1, sample_ms=1))
    return Run.time(run, methods, more, **others)


def test_peers_have_medians_ratios_and_refusals(monkeypatch):
    flops = {FORWARD: 2e9, BACKWARD: 4e9, ONE_PASS: 4e9}
    steps = {STEP: Timing([3.0])}, {STEP: Timing([12.0])}
    methods = [
        Method("streamkl", flops=flops, timings=timed(forward=1.0, backward=2.0) | steps[0]),
        Method("streamkl", flops=flops, timings=timed(one_pass=2.5)),
        Method(
            "flex",
            flops=flops,
            timings=timed(forward=4.0, backward=8.0) | steps[1],
            errors={"kl": 1e-3, "dq_s": float("nan")},
        ),
        Method("eager", is_peer=True, refusal="CUDA out of memory"),
    ]
    result = rows_of(monkeypatch, methods, peers.ratios_of(methods))
    rows = {(row["method"], row.get("pass", "")): row for row in result.rows}
    flex = rows["flex", BACKWARD]
    found = [flex[column] for column in ("ms", "ours_ratio", "one_pass_ratio", "tflops")]
    assert found == ["8.0000", "0.25", "0.312", "0.5"]
    assert (flex["kl_error"], flex["dq_error"]) == ("1.00e-03", "nan")
    assert (rows["flex", STEP]["ours_ratio"], rows["flex", STEP]["one_pass_ratio"]) == ("0.25", "0.208")
    assert rows["eager", ""]["note"] == "not measured: CUDA out of memory" and not result.wrong
    methods[3].is_peer = False
    assert rows_of(monkeypatch, methods, peers.ratios_of(methods)).wrong == ["eager failed: CUDA out of memory"]


def test_ratios_of_shapes_are_those_of_the_same_run(monkeypatch):
    shape, errors = shapes.SHAPES[2], {"kl": 1e-6, "dq_t": float("nan"), "dq_s": 2e-3, "dk_t": 1e-3, "dk_s": 2e-3}
    passes = timed(forward=1.25, backward=9.0, one_pass=10.0) | {
        shapes.FORWARD_GIVEN: Timing([0.5]),
        STEP: Timing([10.25]),
    }
    ours = Method("ours", flops={FORWARD: shape.flops(FORWARD)}, timings=passes, errors=errors)
    others = {
        "base": Method("base", timings=timed(forward=1.0, backward=2.0, one_pass=2.2) | {STEP: Timing([3.0])}),
        "cudnn": Method("cudnn", timings=timed(forward=0.8, backward=2.5)),
    }
    result = rows_of(
        monkeypatch,
        [ours],
        lambda method, name: shapes.columns_of(name, "fast", method, others),
        others=others.values(),
    )
    rows = {row["pass"]: row for row in result.rows}
    assert (rows[BACKWARD]["base_ratio"], rows[BACKWARD]["cudnn_ratio"]) == ("4.5", "3.6")
    assert rows[ONE_PASS]["cudnn_ratio"] == "4", "compared with the backward"
    assert rows[shapes.FORWARD_GIVEN]["base_ratio"] == "0.5" and rows[STEP]["base_ratio"] == "3.42"
    row = rows[FORWARD]
    assert (row["dq_error"], row["dk_error"]) == ("nan", "2.00e-03"), "the larger of both sides"
    assert row["tflops"] == f"{shape.flops(FORWARD) / 1.25e9:.1f}" and row["kernel"] == "fast"


def test_a_step_is_the_forward_and_the_backward_of_a_round():
    method = Method("ours", {FORWARD: lambda: None, BACKWARD: lambda: None})
    time_methods([method], torch.device("cpu"), rounds=3, sample_ms=1)
    pairs = zip(method.timings[FORWARD].samples, method.timings[BACKWARD].samples)
    assert method.timings[STEP].samples == [sum(pair) for pair in pairs] and len(method.timings[STEP].samples) == 3


def test_percent_and_memory_are_those_over_the_step_without_the_loss():
    without, given = (
        Method(name, timings={"": Timing([ms], peak)})
        for name, ms, peak in (("no", 20.0, 1000), ("given", 25.0, 1500))
    )
    assert step.more_than(without, given) == {"percent": "25.0", "more_bytes": 500}
    assert step.more_than(without, without) == step.more_than(Method("no"), given) == {}


def test_a_table_shows_bytes_and_leaves_empty_columns_out():
    rows = [{"method": "a", "ms": "1.5", "extra_bytes": 2**20}, {"method": "long", "ms": "10.25", "extra_bytes": ""}]
    assert report.table(rows, ["method", "ms", "tflops", "extra_bytes"]) == [
        "  method     ms  extra_bytes", "  a         1.5        1 MiB", "  long    10.25"
    ]  # fmt: skip


# ---- A run ---------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    name: str


def test_a_run_goes_on_after_a_case_that_fails(tmp_path, capsys):
    def measure(case, run):
        if case.name == "bad":
            raise MemoryError("too large\nand more")
        wrong = ["kl is off by 1"] if case.name == "wrong" else []
        return Result([{"case": case.name, "ms": "1"}], notes=["no peer"], wrong=wrong)

    question = SimpleNamespace(COLUMNS=["date", "commit", "case", "ms", "note"], measure=measure)
    path = tmp_path / "new.csv"
    run = Run(question, SimpleNamespace(device="cpu", commit="C", seed=0, csv=path))
    for name in "good", "bad", "wrong":
        run.measure(Case(name))
    assert run.wrong_cases == ["bad", "wrong"] and "failed: MemoryError: too large" in capsys.readouterr().out
    rows = list(csv.DictReader(path.open(newline="")))
    assert [(row["case"], row["ms"], row["commit"], row["note"]) for row in rows] == [
        ("good", "1", "C", "no peer"), ("bad", "", "C", "failed: MemoryError: too large"), ("wrong", "1", "C", "kl is off by 1; no peer")
    ]  # fmt: skip


# ---- Charts --------------------------------------------------------------------------------------------------------


def test_charts_are_drawn_from_the_results(tmp_path, capsys):
    charts = pytest.importorskip("charts", reason="needs matplotlib", exc_type=ImportError)
    charts.main(["--out", str(tmp_path)])
    paths = [tmp_path / f"{name}.svg" for name in charts.CHARTS]
    assert capsys.readouterr().out.split() == list(map(str, paths))
    speed, memory, bars, cpu = (path.read_text() for path in paths)
    for text in speed, memory:
        for name in ("StreamKL", "FlexAttention", "eager", "out of memory at the next length"):
            assert name in text
    assert all(name in bars for name in (shapes.BASE.name, shapes.SHAPES[2].name, FORWARD, ONE_PASS))
    assert all(name in cpu for name in ("StreamKL", "one pass", "in place", "framework", "heads of 128"))
    with pytest.raises(SystemExit):
        charts.main(["gpu"])
    assert "gpu: must be of gpu-speed, gpu-memory, gpu-shapes, cpu" in capsys.readouterr().err
