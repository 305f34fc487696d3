"""What commands write: never over an input, all files or none, no leftovers."""

import os
import resource
import time

import numpy as np
import pytest
from tool import make_tensors, run, save, succeed

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


def test_two_outputs_are_one_file(pair):
    folder = pair.parent
    done = run("kl", pair, "--out", folder / "new", "--grad", folder / "." / ".." / folder.name / "new")
    assert done.returncode == 2 and "must be different files" in done.stderr
    done = run("map", pair, "--png", folder / "x", "--out", folder / "x-s.png")
    assert done.returncode == 2 and "must be different files" in done.stderr
    assert os.listdir(folder) == [pair.name]


# ---- Temporary files -------------------------------------------------------------------------------------------------


def test_leftovers_are_removed_and_block_nothing(pair):
    """Process ids repeat, in containers always: a file that a killed process left must not be in the way."""
    for number in range(400):
        (pair.parent / f".streamkl-{number}.tmp").write_text("left")
        os.utime(pair.parent / f".streamkl-{number}.tmp", (0, time.time() - 7200))
    (pair.parent / ".streamkl-new.tmp").write_text("being written")
    (pair.parent / "streamkl-1.tmp").write_text("not ours")
    backup = ".streamkl-{:x}-0123456789abcdef.old".format  # a link to a file that is being replaced
    kept = [".streamkl-new.tmp", "streamkl-1.tmp", backup(int(time.time())), backup(2**63 - 1), backup(1) + "er", ".streamkl-1.old", backup(3)[:-4]]
    for name in [backup(1), backup(int(time.time()) - 7200), *kept[2:]]:
        os.link(pair, pair.parent / name)
    kept.append(backup(2))
    (pair.parent / backup(2)).write_text("an old file that has no other name")
    other = pair.parent / "other"  # a second folder with outputs
    other.mkdir()
    os.mkfifo(other / ".streamkl-2.tmp")  # no file of ours
    (other / ".streamkl-1.tmp").write_text("left")
    os.utime(other / ".streamkl-1.tmp", (0, 0))
    succeed("kl", pair, "--out", pair.parent / "rows", "--grad", other / "grad")
    assert sorted(os.listdir(pair.parent)) == sorted([pair.name, *kept, "other", "rows"])
    assert sorted(os.listdir(other)) == [".streamkl-2.tmp", "grad"]


def test_many_pictures(tmp_path):
    """More files than a process may have open."""
    path = save(tmp_path / "pair.safetensors", make_tensors(batch=1, heads_t=80, heads_s=80, len_q=1, len_k=1))
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))  # noqa: E731
    succeed("map", path, "--head", "all", "--png", tmp_path / "x", "--json", preexec_fn=limit)
    assert len(os.listdir(tmp_path)) == 241
