"""scripts/benchmark-tables --check notices a table that is not current."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/benchmarks.md")


def run_tables(*arguments):
    command = [sys.executable, ROOT / "scripts/benchmark-tables", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path):
    """A copy of what the script reads and writes."""
    shutil.copytree(ROOT / "bench/results", tmp_path / "bench/results")
    (tmp_path / "docs").mkdir()
    for name in DOCUMENTS:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_edited_table_is_found_and_rewritten(tree, name):
    path = tree / name
    current = path.read_text()
    path.write_text(current.replace("| --- |", "| --- | ", 1))
    done = run_tables("--check", "--root", tree)
    assert done.returncode == 1 and "out of date" in done.stderr and name in done.stdout
    assert path.read_text() != current, "a check writes nothing"
    assert run_tables("--root", tree).returncode == 0
    assert path.read_text() == current


def test_new_rows_replace_old_ones(tree):
    path = tree / "bench/results/stats.csv"
    lines = path.read_text().splitlines(keepends=True)
    commits = {line.split(",")[3] for line in lines[1:]}
    path.write_text("".join([lines[0], *(re.sub(rf",({'|'.join(commits)}),", ",abcdef0,", line) for line in lines[1:])]))
    done = run_tables("--check", "--root", tree)
    assert done.returncode == 1 and "abcdef0" in done.stdout


def test_a_table_of_several_commits_says_why(tree):
    """The reason stands below the table, in its marker and in the text."""
    document, results = tree / "docs/benchmarks.md", empty(tree / "bench/results/stats.csv")
    document.write_text(re.sub("<!-- table: stats.*? -->", "<!-- table: stats -->", document.read_text()))
    append_statistics(results, "short")
    assert run_tables("--root", tree).returncode == run_tables("--check", "--root", tree).returncode == 0
    append_statistics(results, "long", commit="abcdef1")
    assert run_tables("--root", tree).returncode == 0
    done = run_tables("--check", "--root", tree)
    assert done.returncode == 1 and "docs/benchmarks.md: table stats mixes commits" in done.stderr
    document.write_text(
        document.read_text().replace("<!-- table: stats -->", "<!-- table: stats; several commits: a test -->")
    )
    assert run_tables("--root", tree).returncode == run_tables("--check", "--root", tree).returncode == 0
    assert "Several commits: a test.*" in " ".join(document.read_text().split())
    append_statistics(empty(results), "short")
    assert run_tables("--root", tree).returncode == 0
    done = run_tables("--check", "--root", tree)
    assert done.returncode == 1 and "table stats is of one commit" in done.stderr


def append_statistics(path, case, **about):
    append(path, case=case, method="KL forward", ms=1, **about)
    append(path, case=case, method="statistics", ms=0.75, extra_bytes=1024, **about)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda text: text.replace("<!-- table: peers", "<!-- table: beers"), "there is no table beers"),
        (lambda text: text.replace("<!-- table: peers", "<!-- peers"), None),
    ],
)
def test_markers(tree, edit, message):
    """An unknown table is an error; text outside of markers is left alone."""
    path = tree / "docs/benchmarks.md"
    path.write_text(edit(path.read_text()))
    done = run_tables("--check", "--root", tree)
    assert (done.returncode == 0) if message is None else (done.returncode == 1 and message in done.stderr)


def test_rows_that_are_missing_are_named(tree):
    empty(tree / "bench/results/indexer.csv")
    done = run_tables("--check", "--root", tree)
    assert done.returncode == 1 and "no run has the naive dense loss" in done.stderr


def table_of(tree, name):
    """The rewritten table, by its first cell: the other cells of the line."""
    done = run_tables("--root", tree)
    assert done.returncode == 0, done.stderr
    text = (
        (tree / "docs/benchmarks.md")
        .read_text()
        .split(f"<!-- table: {name}")[1]
        .split("<!-- end of table -->")[0]
    )
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


def empty(path):
    """Leaves the columns of a file of results."""
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    return path


def append(path, **row):
    with path.open("r+", newline="") as file:
        columns = next(csv.reader(file))
        file.seek(0, 2)
        about = {"date": "2026-11-17", "gpu": "G", "commit": "abcdef0"}
        csv.DictWriter(file, columns, restval="", lineterminator="\n").writerow(about | row)


def test_shapes_fill_their_table(tree):
    path = empty(tree / "bench/results/shapes.csv")
    for name, operation, ms in ("r=1", "forward", 1), ("r=1", "one pass", 2), ("r=1", "forward", 1.25):
        append(path, shape=name, **{"pass": operation}, ms=ms, base_ratio="1.1", cudnn_ratio="0.9")
    for operation, ms in ("forward", 9), ("forward, lse_t given", 3), ("one pass", 5), ("forward + backward", 14):
        append(path, shape="r=4", **{"pass": operation}, ms=ms, base_ratio="3", cudnn_ratio="")
    append(path, shape="bad", note="failed")
    shown = table_of(tree, "distillation")
    assert shown["r=1"] == ["1.25", "1.1", "0.9", "2.00", "1.1", "0.9", ""], "the newest row counts"
    assert [shown["r=4"][index] for index in (0, 3, 6)] == ["3.00", "5.00", "14.0"]
    assert "bad" not in shown


def test_steps_fill_their_table(tree):
    path = empty(tree / "bench/results/step.csv")
    setup = dict(kind="layers", student="8/8 heads of 128", length=8192)
    append(path, **setup, method="no loss", ms=20, peak_bytes=2**30)
    append(path, **setup, method="LSEs given", ms=25, percent="25.0", peak_bytes=2**30, more_bytes=2**20)
    append(path, **setup, method="LSEs computed", ms=28, percent="40.0", peak_bytes=2**30, more_bytes=0)
    append(path, **setup, method="carried, no value", ms=22, percent="10.0", peak_bytes=2**30)
    shown = table_of(tree, "step")
    assert shown["layers, student 8/8 heads of 128, 8,192 tokens"] == [
        "20.0",
        "+25 %",
        "+40 %",
        "+10 %",
        "1 GiB",
        "1 MiB",
    ]


def test_calls_fill_their_table(tree):
    path = empty(tree / "bench/results/call.csv")
    append(path, case="causal", method="attention", ms=2, added="+0")
    append(path, case="causal", method="gradient", ms=2.2, added="+10")
    append(path, case="causal", method="apart", ms=3.6, added="+80")
    append(path, case="causal", method="value", note="failed")
    shown = table_of(tree, "call")
    assert shown["causal"] == ["2.00", "+10 %", "", "", "+80 %"]
    append(path, case="causal", method="attention", ms=2, added="+0", extra_bytes=2**20)
    append(path, case="causal", method="value", ms=2.5, added="+25", extra_bytes=2**21)
    assert table_of(tree, "call")["causal"] == ["2.00", "+10 %", "+25 %", "", "+80 %", "1 MiB / 2 MiB"]


def test_host_times_fill_their_table(tree):
    path = tree / "bench/results/overhead.csv"
    path.write_text("date,gpu,torch,commit,case,call,us,ms,of_c_calls,note\n")
    append(path, case="host time", call="forward", us=57.4)
    append(path, case="loss and gradients, N=8192", call="two passes", ms=1.5)
    assert table_of(tree, "overhead")["forward"] == ["57"]


def test_the_sparse_stage_is_shown_next_to_its_peer(tree):
    path = tree / "bench/results/indexer.csv"
    step, others = {"pass": "forward + backward"}, dict(key_heads=1, dim=576, index_dim=128, top_k=2048, mask="causal")
    for heads, index_heads, length in (128, 64, 8192), (64, 32, 8192), (128, 64, 32768):
        shape = dict(heads=heads, index_heads=index_heads, length=length, **others)
        append(path, method="streamkl", **{"pass": "forward"}, ms=4, tflops=500, **shape)
        append(path, method="streamkl", **step, ms=8, tflops=350, extra_bytes=2**20, **shape)
        append(path, method="no LSE given", **step, ms=11, tflops=250, **shape)
        append(path, method="tilelang", **step, ms=30, tflops=90, **shape)
    shown = table_of(tree, "sparse")
    assert shown["64, 32, 8,192"] == ["4.00", "8.00", "350", "1 MiB", "11.0", "30.0", "3.8x"]


def test_statistics_fill_their_table(tree):
    path = empty(tree / "bench/results/stats.csv")
    append(path, case="long", method="KL forward", ms=1)
    append(path, case="long", method="statistics", ms=0.75, extra_bytes=1024)
    append(path, case="long", method="top 64", ms=5)
    assert table_of(tree, "stats")["long"] == ["1.00", "0.750", "", "5.00", "", "", "1 KiB"]


def test_pooled_teachers_fill_their_table(tree):
    path, both = empty(tree / "bench/results/pooled.csv"), "forward + backward"
    append(path, case="blocks", method="KL forward", **{"pass": "forward"}, ms=1)
    for teacher in "QSA", "SeerAttention-R", "mass":
        append(path, case="blocks", method=teacher, **{"pass": "forward"}, ms=0.75)
        append(path, case="blocks", method=teacher, **{"pass": both}, ms=0.875, kl_ratio=0.875, extra_bytes=1024)
        append(path, case="blocks", method=f"{teacher}, no LSE given", **{"pass": both}, ms=1.75)
    assert table_of(tree, "pooled")["blocks"] == ["mass", "1.00", "0.750", "0.875", "1.75", "0.88", "1 KiB"]


def test_linearard_fills_its_table(tree):
    path = tree / "bench/results/peers.csv"
    shape = dict(heads=16, key_heads=16, batch=1, length=8192, dim=128, mask="causal")
    shape |= dict(kl_error="1e-7", dq_error="2e-3", dk_error="3e-3")
    for operation, ms in ("forward", 0.5), ("backward", 1.25), ("forward + backward", 1.75), ("one pass", 1.25):
        append(path, method="streamkl", **{"pass": operation}, ms=ms, **shape)
    append(path, method="linearard", **{"pass": "forward"}, ms=80, ours_ratio="0.00625", **shape)
    ratios = dict(ours_ratio="0.004", one_pass_ratio="0.0025")
    append(path, method="linearard", **{"pass": "forward + backward"}, ms=437.5, **ratios, **shape)
    shown = table_of(tree, "linearard")
    assert shown["d = 128"][:6] == ["0.500", "160x", "1.25", "1.75", "250x", "400x"]
    assert shown["d = 128"][6] == "1e-7, 2e-3, 3e-3"
