"""Checkpoints of streamkl-distill: a resumed run ends with the same bits, and no failure leaves half a checkpoint."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import LONG
from distill_cases import arguments, evaluation, make_teacher, run, same
from hf_models import bert
from safetensors import safe_open

from streamkl.distill import _checkpoint as checkpoints
from streamkl.distill import _loop as loop

FAST = dict(needles=0, eval_sequences=1)
HOW = dict(sample_rows=0.5, attention_until=0.5, row_weight="far:8", **FAST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the result of a run that nothing interrupts. Half of the rows are drawn at random, in half of the steps."""
    folder = make_teacher(tmp_path_factory.mktemp("resume"))
    assert run(folder, "whole", **HOW) == 0
    return folder


def resume(folder, out):
    assert run(folder, out, "--resume", **HOW) == 0
    assert same(folder / "whole", folder / out)
    a, b = (evaluation(folder / each)["after"] for each in ("whole", out))
    assert a == b
    assert (folder / out / "log.jsonl").read_text().count("\n") == 6


def history_of(out):
    with safe_open(out / checkpoints.NAME, "pt") as file:
        return json.loads(file.metadata()["state"])["history"]


def stop_at(monkeypatch, step, what):
    """Does something at the beginning of a step, counted from 0."""
    own = loop.Run._one_step

    def one_step(run):
        if run.step == step:
            what()
        return own(run)

    monkeypatch.setattr(loop.Run, "_one_step", one_step)


class Killed(BaseException):
    """Nothing handles it, as a kill."""


def kill():
    raise Killed


@pytest.mark.parametrize("step", [0, 3, 4])
def test_resumes_with_the_same_bits(folder, monkeypatch, step):
    """Checkpoints are written after the steps 2 and 4."""
    with monkeypatch.context() as patched, pytest.raises(Killed):
        stop_at(patched, step, kill)
        run(folder, f"killed-{step}", **HOW)
    resume(folder, f"killed-{step}")


def test_weights_without_a_gradient(tmp_path, monkeypatch):
    """The pooler of a BERT is no part of the loss, and the optimizer has no state of it."""
    make_teacher(tmp_path, bert)
    assert run(tmp_path, "whole", **FAST) == 0
    with monkeypatch.context() as patched, pytest.raises(Killed):
        stop_at(patched, 3, kill)
        run(tmp_path, "killed", **FAST)
    assert run(tmp_path, "killed", "--resume", **FAST) == 0
    assert same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_writes_a_checkpoint(folder, monkeypatch, capsys, number):
    out, handler = f"stopped-{number}", signal.getsignal(number)
    with monkeypatch.context() as patched:
        stop_at(patched, 2, lambda: os.kill(os.getpid(), number))
        assert run(folder, out, **HOW, checkpoint_every=0) == 130
    assert "stopped at step 3 of 6; continue with --resume" in capsys.readouterr().err
    assert signal.getsignal(number) is handler
    assert run(folder, out, "--resume", **HOW, checkpoint_every=0) == 0
    assert same(folder / "whole", folder / out)


def test_an_earlier_run_is_not_replaced_by_accident(folder, capsys):
    assert run(folder, "whole", **HOW) == 2
    assert "contains an earlier run: pass --resume to continue it, or --overwrite" in capsys.readouterr().err


def test_overwrite_removes_the_earlier_run(folder, monkeypatch, capsys):
    """Its model and its report would look like those of the new run. Files that the command does not write stay."""
    out = folder / "replaced"
    assert run(folder, "replaced", "--control", **FAST, steps=1) == 0
    (out / "notes.txt").write_text("")
    made = dict(student_layers=None, student_heads=None)
    assert run(folder, "replaced", "--overwrite", **FAST, **made, student=out / "control/student") == 2
    assert "control/student: belongs to the earlier run in --out" in capsys.readouterr().err
    assert (out / "control/student").exists()
    with monkeypatch.context() as patched, pytest.raises(Killed):
        stop_at(patched, 0, kill)
        run(folder, "replaced", "--overwrite", **FAST)
    left = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert left - {"log.jsonl"} == {"options.toml", "before.json", "notes.txt"}


def test_results_do_not_wait_for_the_control(folder, monkeypatch):
    """The run has finished when its control is killed, and --resume trains the rest of the control."""
    with monkeypatch.context() as patched, pytest.raises(Killed):
        own = loop.Run._one_step
        patched.setattr(loop.Run, "_one_step", lambda run: kill() if run.out.name == "control" else own(run))
        run(folder, "first", "--control", **FAST, steps=2)
    assert evaluation(folder / "first").keys() == {"before", "after"} and (folder / "first/report.html").exists()
    assert run(folder, "first", "--control", "--resume", **FAST, steps=2) == 0
    assert evaluation(folder / "first").keys() == {"before", "after", "control"}


def test_resume_extends_a_finished_run(folder, capsys):
    held_out = dict(held_out=folder / "data.npy")
    assert run(folder, "extended", **FAST, **held_out, steps=3) == 0
    assert (
        run(folder, "extended", "--resume", needles=1, eval_sequences=2, **held_out, steps=5) == 0
    )  # these may change
    log = [json.loads(line) for line in (folder / "extended/log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [1, 2, 3, 4, 5]
    # The rate is that of a run of 5 steps.
    assert log[3]["rate"] == pytest.approx(3e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * 3 / 5))))
    assert run(folder, "extended", "--resume", **FAST, **held_out, steps=4) == 2
    assert "--steps=4: " in (error := capsys.readouterr().err) and "has taken 5 steps: must be 5.." in error
    assert run(folder, "extended", "--resume", needles=0, eval_sequences=0, **held_out, steps=6) == 0
    assert "held-out sequences" not in capsys.readouterr().out


@pytest.mark.parametrize("option, message", [
    (dict(rate=1e-4), "was written with --rate 0.003, and this run has 0.0001"),
    (dict(data="other.npy"), "was written with --data"),
])  # fmt: skip
def test_another_run_is_not_resumed(folder, capsys, option, message):
    import numpy as np

    np.save(folder / "other.npy", np.load(folder / "data.npy")[::-1])
    option = {name: folder / value if name == "data" else value for name, value in option.items()}
    assert run(folder, "whole", "--resume", **{**HOW, **option}) == 2
    assert message in capsys.readouterr().err


def test_changed_data_is_noticed(tmp_path, capsys):
    import numpy as np

    make_teacher(tmp_path)
    assert run(tmp_path, "out", **FAST, steps=2) == 0
    np.save(tmp_path / "data.npy", np.load(tmp_path / "data.npy")[::-1])
    assert run(tmp_path, "out", "--resume", **FAST, steps=2) == 2
    assert "was written by a run on other data" in capsys.readouterr().err


# ---- Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_failed_write_keeps_the_last_checkpoint(folder, monkeypatch, capsys, where):
    """The second checkpoint fails: the disk is full, or the file cannot be put in its place."""
    out = f"failed-{where}"
    calls = []

    def fails(own, error):
        def function(*arguments, **options):
            path = Path(arguments[1])
            if path.name in (checkpoints.NAME, f".{checkpoints.NAME}.new"):
                calls.append(path)
                if len(calls) == 2:
                    if where == "write":
                        path.write_bytes(b"half of it")
                    raise error
            return own(*arguments, **options)

        return function

    with monkeypatch.context() as patched:
        if where == "write":
            patched.setattr(
                checkpoints,
                "save_file",
                fails(checkpoints.save_file, OSError(errno.ENOSPC, "No space left on device")),
            )
        else:
            patched.setattr(
                checkpoints.os, "replace", fails(os.replace, PermissionError(errno.EACCES, "Permission denied"))
            )
        assert run(folder, out, **HOW) == 2
    error = capsys.readouterr().err
    assert f"{checkpoints.NAME}: cannot be written" in error and "Traceback" not in error
    assert ("free some space, then continue with --resume" in error) == (where == "write")
    assert not list((folder / out).glob(".*"))
    resume(folder, out)


def test_a_broken_checkpoint_is_refused(folder, capsys):
    out = folder / "broken"
    out.mkdir()
    whole = (folder / "whole" / checkpoints.NAME).read_bytes()
    for broken in whole[: len(whole) // 2], b"", b"\xff" * 100:
        (out / checkpoints.NAME).write_bytes(broken)
        assert run(folder, "broken", "--resume", **HOW) == 2
        error = capsys.readouterr().err
        assert "the checkpoint is broken; start again with --overwrite" in error and "Traceback" not in error


def test_a_foreign_file_is_no_checkpoint(folder, capsys):
    from safetensors.torch import save_file

    out = folder / "foreign"
    out.mkdir()
    save_file({"a": torch.zeros(1)}, out / checkpoints.NAME)
    assert run(folder, "foreign", "--resume", **HOW) == 2
    assert "is no checkpoint of streamkl-distill" in capsys.readouterr().err


# ---- Other processes -------------------------------------------------------------------------------------------------


def start(folder, out, *more, before="pass", **options):
    code = f"import sys, torch; torch.set_num_threads(1); {before}; from streamkl.distill.cli import main; sys.exit(main())"
    given = {**FAST, "sample_rows": 0.5, **options}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments(folder, out, *more, **given)], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(not LONG, reason="takes a minute")
def test_kill_9_at_random_moments(tmp_path):
    make_teacher(tmp_path)
    options = dict(**FAST, sample_rows=0.5, steps=60, checkpoint_every=1)
    assert run(tmp_path, "whole", **options) == 0
    seed = os.environ.get("SKL_TEST_SEED", str(time.time_ns() % 10**6))
    script = Path(__file__).parent / "distill_kill.py"
    command = [sys.executable, script, seed, *arguments(tmp_path, "killed", "--resume", **options)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=900)
    print(f"seed {seed}: {answer.stdout}")
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert int(answer.stdout.splitlines()[-1].split()[0]) > 0
    assert same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.skipif(not LONG, reason="takes seconds")
def test_a_full_disk(folder):
    """The limit of a file's size is that of a full disk, for this process: the checkpoint does not fit."""
    ignore = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    limit = f"{ignore}; resource.setrlimit(resource.RLIMIT_FSIZE, (150000, 150000))"
    process = start(folder, "full", before=limit)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 2, error
    assert "cannot be written" in error and "continue with --resume" in error and "Traceback" not in error
    resume(folder, "full")


def test_an_attention_phase_that_longer_runs_extend(folder):
    """Later lines of the log may have an attention KL that the first one lacks."""
    options = dict(attention_until=0.3, log_every=5, checkpoint_every=0, **FAST)
    assert run(folder, "phases", steps=5, **options) == 0  # the phase is two steps
    assert run(folder, "phases", "--resume", steps=40, **options) == 0  # 12 steps
    assert [entry["step"] for entry in history_of(folder / "phases") if "attention" in entry] == [10]
    assert run(folder, "phases", "--resume", steps=41, **options) == 0
    assert "Attention KL by step" in (folder / "phases/report.html").read_text()


def test_a_resumed_run_that_measures_something_else(folder):
    """The student as it starts is measured on the same sequences and needles as the one that results."""
    options = dict(held_out=folder / "data.npy", needles=0, eval_every=3)
    assert run(folder, "other", eval_sequences=1, **options) == 0
    assert run(folder, "other", "--resume", eval_sequences=3, **options, steps=9) == 0
    found = evaluation(folder / "other")
    assert [found[when]["sequences"] for when in ("before", "after")] == [3, 3]
    lines = [json.loads(line) for line in (folder / "other/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [9]  # the others are of one sequence
    assert run(folder, "anew", eval_sequences=3, **options, steps=9) == 0
    assert found["before"] == evaluation(folder / "anew")["before"]


def test_what_changes_a_resumed_run_is_refused(folder, monkeypatch, capsys):
    """Needles decide which heads of the teacher retrieve, and processes which sequences a step reads."""
    options = dict(head_weight="retrieval", eval_sequences=0, steps=2)
    assert run(folder, "needles", needles=1, **options) == 0
    assert run(folder, "needles", "--resume", needles=2, **options | dict(steps=4)) == 2
    assert "was written with --needles 1, and this run has 2" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(loop.Run, "tokens_per_step", lambda run: 7)
        assert run(folder, "needles", "--resume", needles=1, **options | dict(steps=4)) == 2
    assert "tokens per step, and this run has 7: use as many processes" in capsys.readouterr().err


def test_other_held_out_sequences_are_evaluated_again(folder):
    """The student as it starts is measured on the same sequences as the one that results."""
    data = np.load(folder / "data.npy")
    np.save(folder / "held-out.npy", data[-2:])
    options = dict(held_out=folder / "held-out.npy", **FAST)
    assert run(folder, "edited", **options, steps=1) == 0
    before = evaluation(folder / "edited")["before"]
    np.save(folder / "held-out.npy", data[:2])
    assert run(folder, "edited", "--resume", **options, steps=2) == 0
    assert evaluation(folder / "edited")["before"]["kl"] != before["kl"]
