"""streamkl distill: it trains, reproduces its bits, and writes a self-contained report."""

import json
import os
import re
import signal
import subprocess
import time

import browser
import numpy as np
import pytest
from tool import TOOL, load, run, save

SMALL = ["--context", "512", "--needles", "16"]


def distill(folder, *options, **more):
    done = run("distill", "--out", folder, *SMALL, *options, "--json", **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def student(folder):
    return (folder / "student.safetensors").read_bytes()


# ---- Training --------------------------------------------------------------------------------------------------------


TRAINED = ["--needles", "32", "--steps", "150"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, distill(folder, *TRAINED)


def test_kl_falls_and_definitions_are_found(trained):
    _, answer = trained
    assert answer["step"] == 150
    assert answer["kl_after"] < answer["kl_before"] / 20
    for depth in answer["depths"]:
        assert depth["references"] > 0 and depth["before"] < 0.05
        assert depth["after"] >= 0.95 * depth["teacher"] and depth["teacher"] > 0.95
    assert answer["peak_bytes"] < 64 << 20


def test_shapes_of_the_weights(trained):
    folder, _ = trained
    weights = load(folder / "student.safetensors")
    assert {name: (dtype, array.shape) for name, (dtype, array) in weights.items()} == {
        "w_q": ("F32", (2, 32, 64)),
        "w_k": ("F32", (2, 32, 64)),
    }


def test_text(tmp_path):
    done = run("distill", "--out", tmp_path / "run", *SMALL, "--steps", "12")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.isascii()
    for words in ("held-out KL", "hits", "tokens/s", "peak memory", "12/12", "Hits and KL by depth", "report.html"):
        assert words in done.stdout
    assert "\r" not in done.stdout


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    assert distill(tmp_path, "--steps", "40", "--device", "cuda")["kl_after"] < 1


# ---- Reproducibility -----------------------------------------------------------------------------------------------------


def test_seed_and_threads(tmp_path):
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    distill(one, "--steps", "8", "--threads", "1")
    distill(two, "--steps", "8", "--threads", "2")
    distill(other, "--steps", "8", "--seed", "2")
    assert student(one) == student(two)
    assert student(one) != student(other)


def test_ctrl_c_ends_with_a_report(tmp_path):
    command = [TOOL, "distill", "--out", str(tmp_path), *SMALL, "--steps", "100000"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while "/100000" not in child.stdout.readline():
        pass
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    text = child.stdout.read()
    assert child.wait(60) == 130
    step = int(re.search(r"Stopped at step (\d+)", text)[1])
    assert 0 < step < 100000 and "report.html" in text
    assert f"stopped at step {step} of 100000" in (tmp_path / "report.html").read_text()
    assert sorted(os.listdir(tmp_path)) == ["report.html", "student.safetensors"]


# ---- Files of the user ------------------------------------------------------------------------------------------------------------


def make_files(folder, dtype="f32", sequences=6, context=96, width_t=24, width_s=32, own_hidden=True, heads_t=4, **weights):
    """A teacher in f32, f16 or bf16; a student of different sizes, optionally with its own hidden states."""
    numbers = np.random.default_rng(0)
    hidden = numbers.standard_normal((sequences, context, width_t)).astype(np.float32)
    teacher = {
        "hidden": hidden,
        "w_q": numbers.standard_normal((heads_t, 16, width_t)).astype(np.float32) / 3,
        "w_k": numbers.standard_normal((heads_t // 2, 16, width_t)).astype(np.float32) / 3,
    }
    width = width_s if own_hidden else width_t
    student = {
        "w_q": numbers.standard_normal((2, 12, width)).astype(np.float32) / 5,
        "w_k": numbers.standard_normal((1, 12, width)).astype(np.float32) / 5,
    }
    if own_hidden:
        student["hidden"] = hidden @ numbers.standard_normal((width_t, width_s)).astype(np.float32) / 5
    teacher.update(weights.get("teacher", {}))
    student.update(weights.get("student", {}))
    return save(folder / "teacher.safetensors", teacher, dtype), save(folder / "student.safetensors", student)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("own_hidden", [True, False])
def test_files(tmp_path, dtype, own_hidden):
    teacher, initial = make_files(tmp_path, dtype, own_hidden=own_hidden)
    files = ["--teacher", teacher, "--student", initial, "--held-out", "2"]
    done = run("distill", *files, "--out", tmp_path / "out", "--steps", "60", "--rate", "0.02", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["kl_after"] < answer["kl_before"] / 1.5
    weights = load(tmp_path / "out/student.safetensors")
    first = load(initial)
    for name in ("w_q", "w_k"):
        assert weights[name][1].shape == first[name][1].shape
        assert not np.array_equal(weights[name][1], first[name][1])
    assert "retrieval" not in (tmp_path / "out/report.html").read_text()  # only the synthetic task knows the right key


def test_kl_before_equals_kl_of_the_projections(tmp_path):
    """numpy projects the held-out sequences; streamkl kl gives the same KL."""
    teacher, initial = make_files(tmp_path, own_hidden=True)
    answer = run("distill", "--teacher", teacher, "--student", initial, "--held-out", "2", "--steps", "1", "--out", tmp_path / "out", "--json")
    big, small = ({name: array for name, (_, array) in load(path).items()} for path in (teacher, initial))

    def project(weights, hidden):
        return np.einsum("hde,bne->bhnd", weights, hidden[-2:])

    tensors = {
        "q_t": project(big["w_q"], big["hidden"]),
        "k_t": project(big["w_k"], big["hidden"]),
        "q_s": project(small["w_q"], small["hidden"]),
        "k_s": project(small["w_k"], small["hidden"]),
    }
    pair = save(tmp_path / "pair.safetensors", tensors)
    exact = json.loads(run("kl", pair, "--causal", "--json").stdout)["kl"]
    assert json.loads(answer.stdout)["kl_before"] == pytest.approx(exact, rel=1e-5)


def test_names_that_are_not_utf8(tmp_path):
    """JSON output and reports are UTF-8, whatever the names of files are."""
    teacher, initial = make_files(tmp_path)
    teacher = teacher.rename(os.fsdecode(os.fsencode(teacher) + b"\xff"))
    out = tmp_path / os.fsdecode(b"out\xe9")
    options = ["distill", "--teacher", teacher, "--student", initial, "--steps", "1", "--out", out, "--json"]
    done = run(*options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"] == f"{tmp_path}/out?/report.html"


def test_flat_weights_need_heads(tmp_path):
    flat = np.random.default_rng(1).standard_normal((64, 24)).astype(np.float32)
    teacher, initial = make_files(tmp_path, own_hidden=False, teacher={"w_q": flat, "w_k": flat[:32]})
    options = ["distill", "--teacher", teacher, "--student", initial, "--out", tmp_path / "out", "--steps", "2"]
    refused = run(*options)
    assert refused.returncode == 2 and "w_q" in refused.stderr and "--heads-t" in refused.stderr
    assert run(*options, "--heads-t", "4").returncode == 0


# ---- Bad input -----------------------------------------------------------------------------------------------------------

BAD = {
    "context": (["--context", "63"], "--context=63: must be 64.."),
    "context_text": (["--context", "long"], "--context=long"),
    "needles": (["--needles", "257"], "--needles=257"),
    "needles_many": (["--context", "64", "--needles", "17"], "--needles=17"),
    "hidden": (["--hidden", "47"], "--hidden=47"),
    "dim_t": (["--dim-t", "16"], "--dim-t=16"),
    "dim_s": (["--dim-s", "513"], "--dim-s=513"),
    "heads": (["--heads-t", "3"], "--heads-t=3: must be a multiple of --heads-s=2"),
    "steps": (["--steps", "0"], "--steps=0"),
    "steps_many": (["--steps", "9223372036854775807"], "--steps=9223372036854775807: must be 1..16777216"),
    "batch_many": (["--batch", "9223372036854775807"], "--batch=9223372036854775807: must be 1..1048576"),
    "steps_many_with_files": (["--steps", "16777217", "--teacher", "/no/such", "--student", "/no/such"], "--steps=16777217: must be 1..16777216"),
    "rate": (["--rate", "-1"], "--rate=-1: must be a number above 0"),
    "direction": (["--direction", "both"], "--direction=both"),
    "teacher_alone": (["--teacher", "x.safetensors"], "--teacher: --student must be given"),
    "student_alone": (["--student", "x.safetensors"], "--student: --teacher must be given"),
    "no_such_file": (["--teacher", "/no/such", "--student", "/no/such"], "/no/such"),
    "out": (["--out", "/no/such/folder/run"], "--out=/no/such/folder/run"),
    "argument": (["now"], "unexpected argument 'now'"),
    "kernel": (["--kernel", "no_such"], "kernel=no_such"),
    "resume": (["--resume"], "unrecognized option '--resume'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(tmp_path, name):
    options, words = BAD[name]
    done = run("distill", "--out", tmp_path / "run", *options)
    assert done.returncode in (2, 5), done.stderr
    first, *rest = done.stderr.splitlines()
    assert words in first and (not rest or rest[0].startswith("Try "))
    assert not (tmp_path / "run").exists() or not os.listdir(tmp_path / "run")


BAD_FILES = {
    "no_hidden": ({"teacher": {"hidden": np.zeros((2, 2), np.float32)}}, "hidden: must be [sequences, context, 24]"),
    "width": ({"teacher": {"hidden": np.zeros((6, 96, 23), np.float32)}}, "hidden: must be [sequences, context, 24]"),
    "student_width": ({"student": {"hidden": np.zeros((6, 96, 31), np.float32)}}, "hidden: must be [sequences, context, 32]"),
    "lengths": ({"student": {"hidden": np.zeros((6, 95, 32), np.float32)}}, "6 sequences of 96"),
    "w_k": ({"teacher": {"w_k": np.zeros((3, 16, 24), np.float32)}}, "w_k 3"),
    "rank": ({"teacher": {"w_q": np.zeros(24, np.float32)}}, "w_q"),
    "heads": ({"heads_t": 2, "student": {"w_q": np.zeros((3, 12, 32), np.float32)}}, "heads_t=2"),
    "held_out": ({"sequences": 3}, "--held-out=4"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path, name):
    changes, words = BAD_FILES[name]
    teacher, initial = make_files(tmp_path, **changes)
    done = run("distill", "--teacher", teacher, "--student", initial, "--out", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


# ---- The report -------------------------------------------------------------------------------------------------------------------


def test_report_is_self_contained(trained):
    folder, answer = trained
    page = (folder / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "url(" not in page and not re.search("https?:(?!//www.w3.org/2000/svg)", page)
    document = browser.document_of(page)
    assert [section["title"] for section in document["sections"]] == [
        "Does the student use the whole context?", "How far do they look?", "Attention maps", "Training",
        "Compared with materializing", "Reproducing this run",
    ]  # fmt: skip
    distances, maps, training, settings = (document["sections"][i]["blocks"] for i in (1, 2, 3, 5))
    assert document["verdict"].startswith("The student finds ")
    assert [series["name"] for series in distances[0]["series"]] == ["teacher", "before", "after"]
    assert [sum(series["y"]) for series in distances[0]["series"]] == pytest.approx([1, 1, 1], rel=1e-3)
    assert distances[0]["groups"] == ["0", "1", "2", "4", "8", "16", "32", "64", "128", "256"]
    entropy = np.array([row[1:] for row in distances[1]["rows"]])  # [heads, teacher | before | after]
    assert (abs(entropy[:, 2] - entropy[:, 0]) < 0.5 * abs(entropy[:, 1] - entropy[:, 0])).all()
    assert [block["note"] for block in maps] == ["learns from the mean of teacher heads 0..1", "learns from the mean of teacher heads 2..3"]
    assert all(block["tokens"] == [512, 512] for block in maps)
    assert [len(block["maps"]) for block in maps] == [5, 5]  # per head
    assert all(len(each["values"]) == 64 and len(each["values"][0]) == 64 for block in maps for each in block["maps"])
    assert [block["title"] for block in training] == ["KL by step", "KL by position", "KL by head"]
    assert training[0]["series"][1]["x"] == list(range(0, 151, 25))
    assert settings[0]["text"].startswith("streamkl distill --context 512")


def test_hostile_names_are_escaped(tmp_path):
    folder = tmp_path / "<b>&'"
    folder.mkdir()
    teacher, initial = make_files(folder)
    done = run("distill", "--teacher", teacher, "--student", initial, "--steps", "1", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out/report.html").read_text()
    assert "<b>&'" not in page and "\\u003cb>&'" in page
    assert str(folder) in browser.document_of(page)["sections"][-1]["blocks"][0]["text"]


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_report_in_a_browser(trained, tmp_path, width, dark):
    """No console error, no horizontal scrolling, every chart and map drawn, every table inside its card."""
    browser.check_report(trained[0] / "report.html", tmp_path, width, dark, maps=10)
