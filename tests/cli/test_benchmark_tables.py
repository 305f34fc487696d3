"""scripts/benchmark-tables: the tables of this tree are current, and the check notices one that is not."""

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


def test_tables_are_current():
    done = run_tables("--check")
    assert done.returncode == 0, done.stdout + done.stderr


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
    path = tree / "bench/results/peers.csv"
    lines = path.read_text().splitlines(keepends=True)
    run = [line for line in lines if ",03bb94f," in line and ",192,full," in line]
    path.write_text("".join(lines + [line.replace(",03bb94f,", ",abcdef0,") for line in run]))
    done = run_tables("--check", "--root", tree)
    assert done.returncode == 1 and "abcdef0" in done.stdout


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda text: text.replace("<!-- table: peers -->", "<!-- table: beers -->"), "there is no table beers"),
        (lambda text: text.replace("<!-- table: peers -->", ""), None),
    ],
)
def test_markers(tree, edit, message):
    """An unknown table is an error; text outside of markers is left alone."""
    path = tree / "docs/benchmarks.md"
    path.write_text(edit(path.read_text()))
    done = run_tables("--check", "--root", tree)
    assert (done.returncode == 0) if message is None else (done.returncode == 1 and message in done.stderr)


def test_rows_that_are_missing_are_named(tree):
    path = tree / "bench/results/indexer.csv"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    done = run_tables("--check", "--root", tree)
    assert done.returncode == 1 and "no run has the naive dense loss" in done.stderr
