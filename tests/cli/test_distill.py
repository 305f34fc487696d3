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
from tool import TOOL, load, run, succeed

SMALL = ["--context", "512", "--needles", "16"]


def distill(folder, *options, **more):
    return json.loads(succeed("distill", "--out", folder, *SMALL, *options, "--json", **more))


def student(folder):
    return (folder / "student.safetensors").read_bytes()


# ---- Training --------------------------------------------------------------------------------------------------------


TRAINED = ["--needles", "32", "--steps", "150"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, distill(folder, *TRAINED)


def test_kl_falls_and_definitions_are_found(trained):
    folder, answer = trained
    weights = load(folder / "student.safetensors")
    assert {name: (dtype, array.shape) for name, (dtype, array) in weights.items()} == dict.fromkeys(["w_q", "w_k"], ("F32", (2, 32, 64)))
    assert answer["step"] == 150
    assert answer["kl_after"] < answer["kl_before"] / 20
    for depth in answer["depths"]:
        assert depth["references"] > 0 and depth["before"] < 0.05
        assert depth["after"] >= 0.95 * depth["teacher"] and depth["teacher"] > 0.95
    assert answer["peak_bytes"] < 64 << 20


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
    assert 0 <= step < 100000 and "report.html" in text
    assert f"stopped at step {step} of 100000" in (tmp_path / "report.html").read_text()
    assert sorted(os.listdir(tmp_path)) == ["report.html", "student.safetensors"]


def test_a_name_that_is_not_utf8(tmp_path):
    """JSON output is UTF-8, whatever the names of files are."""
    assert distill(tmp_path / os.fsdecode(b"out\xe9"), "--steps", "1")["report"] == f"{tmp_path}/out?/report.html"


# ---- The report -------------------------------------------------------------------------------------------------------------------


def test_report_is_self_contained(trained):
    folder, answer = trained
    page = (folder / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "url(" not in page and not re.search("https?:(?!//www.w3.org/2000/svg)", page)
    document = browser.document_of(page)
    assert [section["title"] for section in document["sections"]] == [
        "Does the student use the whole context?", "How far do they look?", "Attention maps", "Training",
        "Reproducing this run",
    ]  # fmt: skip
    distances, maps, training, settings = (document["sections"][i]["blocks"] for i in (1, 2, 3, 4))
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


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_report_in_a_browser(trained, tmp_path, width, dark):
    """No console error, no horizontal scrolling, every chart and map drawn, every table inside its card."""
    browser.check_report(trained[0] / "report.html", tmp_path, width, dark, maps=10)
