"""What commands write: never over an input, all files or none, no leftovers."""

import os

import numpy as np
import pytest
from test_distill import make_files
from tool import make_tensors, run, save

# ---- Outputs that are inputs -----------------------------------------------------------------------------------------


def same(path):
    return path


def spelled_differently(path):
    return path.parent / "." / ".." / path.parent.name / path.name


def hard_link(path):
    link = path.with_name("link.safetensors")
    os.link(path, link)
    return link


@pytest.mark.parametrize("spelling", [same, spelled_differently, hard_link])
@pytest.mark.parametrize("command", [["kl", "--out"], ["kl", "--grad"], ["map", "--out"]])
def test_output_is_an_input(pair, command, spelling):
    before = pair.read_bytes()
    name, option = command
    done = run(name, pair, option, spelling(pair))
    assert done.returncode == 2 and "must not be an input file" in done.stderr and option in done.stderr
    assert done.stdout == "" and pair.read_bytes() == before


@pytest.mark.parametrize("command", ["kl", "map"])
def test_output_is_an_input_with_a_role(tmp_path, command):
    tensors = make_tensors()
    files = []
    for name, array in tensors.items():
        np.save(tmp_path / f"{name}.npy", array)
        files.append(f"{name}={tmp_path / name}.npy")
    before = (tmp_path / "k_s.npy").read_bytes()
    done = run(command, *files, "--out", tmp_path / "k_s.npy")
    assert done.returncode == 2 and "must not be an input file" in done.stderr
    assert (tmp_path / "k_s.npy").read_bytes() == before


@pytest.mark.parametrize("name, head", [("x-p.png", "mean"), ("x-kl.png", "1"), ("x-h1-s.png", "all")])
def test_picture_is_an_input(tmp_path, name, head):
    path = save(tmp_path / name, make_tensors())
    before = path.read_bytes()
    done = run("map", path, "--png", tmp_path / "x", "--head", head)
    assert done.returncode == 2 and f"--png={path}: must not be an input file" in done.stderr
    assert path.read_bytes() == before and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["student.safetensors", "checkpoint.safetensors", "report.html"])
def test_distill_replaces_no_input(tmp_path, which, name):
    (tmp_path / "run").mkdir()
    files = list(make_files(tmp_path))
    files[which] = files[which].rename(tmp_path / "run" / name)
    before = files[which].read_bytes()
    command = ["--teacher", files[0], "--student", files[1], "--steps", "1", "--no-baseline"]
    done = run("distill", *command, "--out", tmp_path / "run")
    assert done.returncode == 2 and name in done.stderr and "must not be an input file" in done.stderr
    assert files[which].read_bytes() == before and os.listdir(tmp_path / "run") == [name]


def test_two_outputs_are_one_file(pair):
    folder = pair.parent
    done = run("kl", pair, "--out", folder / "new", "--grad", folder / "." / ".." / folder.name / "new")
    assert done.returncode == 2 and "must be different files" in done.stderr
    done = run("map", pair, "--png", folder / "x", "--out", folder / "x-s.png")
    assert done.returncode == 2 and "must be different files" in done.stderr
    done = run("bench", "--lengths", "16", "--csv", folder / "new", "--plot", folder / "new")
    assert done.returncode == 2 and "must be different files" in done.stderr
    assert os.listdir(folder) == [pair.name]
