"""bench/figures.py measures what the documents show, and nothing twice."""

import importlib
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import figures  # noqa: E402
from harness.report import append_csv, case_columns  # noqa: E402
from questions import shapes  # noqa: E402

OF_CPU = {"cpu", "cpu-rate", "cpu-memory"}  # `streamkl bench` measures them


def test_every_row_of_a_table_is_of_a_measured_case(monkeypatch):
    loader, shown = SourceFileLoader("benchmark_tables", str(ROOT / "scripts/benchmark-tables")), []
    tables = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(tables)
    monkeypatch.setattr(tables.Table, "text", lambda self, note: shown.extend(self.shown) or "")
    for name, write in tables.TABLES.items():
        if name not in OF_CPU:
            write(ROOT / "bench/results")
    columns = {each: importlib.import_module(f"questions.{each}").COLUMNS for each, *_ in figures.MEASUREMENTS}
    cases = {name: [] for name in columns}
    for each in figures.MEASUREMENTS:
        cases[each.question] += each.cases()
    seen = {name: 0 for name in columns}
    for row in shown:
        found = [name for name in columns if list(row) == columns[name]]
        assert found or row["method"] in ("streaming", "framework"), row  # the README has a row of the CPU
        for name in found:
            seen[name] += 1
            assert any(figures.is_of_case(row, case) for case in cases[name]), row
    assert [name for name, count in seen.items() if count == 0] == ["zigzag"]  # a page refers to the file


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Two measurements, an empty folder of results, and the calls of bench/run.py, which fill it."""
    calls = []

    def ask(command, commit):
        question = importlib.import_module(f"questions.{command[0]}")
        calls.append(command)
        write_figures(tmp_path, question, question.cases(GPU), commit)
        return True

    monkeypatch.setattr(figures, "ask", ask)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    with_peer = figures.Measurement("indexer", "--top-k 32", "tilelang")
    monkeypatch.setattr(figures, "MEASUREMENTS", [figures.Measurement("shapes"), with_peer])
    return SimpleNamespace(folder=tmp_path, calls=calls)


GPU = figures.run.parse("indexer", importlib.import_module("questions.indexer"), ["--top-k", "32"])[0]


def write_figures(folder, question, cases, commit, **figure):
    rows = [case_columns(case, question.COLUMNS) | ({"method": "tilelang", "ms": 1} | figure) for case in cases]
    append_csv(folder / f"{question.__name__.split('.')[1]}.csv", rows, {"commit": commit}, question.COLUMNS)


def lacking(*arguments):
    with pytest.raises(SystemExit) as exit:
        figures.main(list(arguments))
    return str(exit.value).splitlines()[1:]


def test_only_what_is_missing_is_measured(results):
    with_peer = "indexer --top-k 32 --tilelang DIR"
    assert lacking("--commit", "C", "--list") == ["shapes", with_peer] and not results.calls
    assert lacking("--commit", "C", "--seconds", "-1") == ["shapes", with_peer] and not results.calls
    assert lacking("--commit", "C") == [with_peer], "a peer without its folder is left out"
    assert results.calls == [["shapes"]]
    figures.main(["--commit", "C", "--tilelang", "T"])
    figures.main(["--commit", "C", "--tilelang", "T"])
    assert results.calls == [["shapes"], ["indexer", "--top-k", "32", "--tilelang", "T"]]
    assert lacking("--commit", "D", "--list") == ["shapes", with_peer], "figures of another commit do not count"


def test_cases_without_a_figure_are_missing(results):
    cases = shapes.cases(GPU)
    write_figures(results.folder, shapes, cases[1:], "C")
    write_figures(results.folder, shapes, cases[:1], "C", ms="", note="failed")
    assert [each["case"] for each in figures.Measurement("shapes").missing("C")] == [cases[0].name]
    write_figures(results.folder, shapes, cases[:1], "C")
    assert not figures.Measurement("shapes").missing("C")
    assert figures.Measurement("shapes", method="eager").missing("C")


def test_a_question_that_fails_is_named(results, monkeypatch):
    monkeypatch.setattr(figures, "ask", lambda command, commit: False)
    assert lacking("--commit", "C", "--tilelang", "T") == ["shapes", "indexer --top-k 32 --tilelang DIR"]


def test_the_commit_must_be_known(results, capsys):
    with pytest.raises(SystemExit):
        figures.main(["--commit", ""])
    assert "--commit: must be given where git does not know it" in capsys.readouterr().err


def test_a_question_runs_in_its_own_process(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert not figures.ask(["shapes", "--rounds", "0"], "C")
    assert figures.ask(["shapes", "--dry-run"], "C")
