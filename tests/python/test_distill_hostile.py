"""Folders that streamkl-distill does not trust: models, tokenizers, data and checkpoints from elsewhere.

Each ends with exit status 2 and a message that has the name of the folder or file, and runs no code of the folder, even if
standard input answers "y" to every question.
"""

import io
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from distill_cases import make_teacher, run

FAST = dict(steps=2, needles=0, eval_sequences=1)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return open, (str(self.proof), "w")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A teacher, its data and a finished run."""
    folder = make_teacher(tmp_path_factory.mktemp("whole"))
    assert run(folder, "out", **FAST) == 0
    return folder


@pytest.fixture
def folder(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    shutil.copytree(whole / "teacher", tmp_path / "teacher")
    shutil.copytree(whole / "out", tmp_path / "out")
    (tmp_path / "data.npy").symlink_to(whole / "data.npy")
    return tmp_path


def proof(folder):
    return folder / "code-ran"


def write_code(folder, name):
    (folder / name).write_text(f"open({str(proof(folder.parent))!r}, 'w')\n")


def change_json(path, **fields):
    about = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**about, **fields}))


# ---- Models and tokenizers -------------------------------------------------------------------------------------------


def config_with_code(folder, model_type="evil", architectures=("Evil",), auto_map=None):
    write_code(folder, "evil.py")
    auto_map = auto_map or {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    change_json(folder / "config.json", model_type=model_type, architectures=list(architectures), auto_map=auto_map)


def pickled_weights(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload(proof(folder.parent))}, folder / "pytorch_model.bin")


def generate_with_code(folder):
    (folder / "custom_generate").mkdir()
    write_code(folder, "custom_generate/generate.py")
    (folder / "model.safetensors").write_bytes(b"")


def tokenizer_with_code(folder):
    write_code(folder, "evil.py")
    change_json(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]})


MODELS = {
    "config": (config_with_code, "asks for Python code (auto_map: "),
    "model of a known config": (lambda f: config_with_code(f, "llama", auto_map={"AutoModel": "evil.M"}), "asks for Python code"),
    "code of another repository": (lambda f: config_with_code(f, auto_map={"AutoConfig": "a/b--evil.C"}), "a/b--evil.C"),
    "no architecture": (lambda f: config_with_code(f, "llama", ()), "asks for Python code"),
    "no model": (lambda f: config_with_code(f, "evil", ["LlamaTokenizer"]), "asks for Python code"),
    "code beside a stock class": (lambda f: config_with_code(f, "evil", ["LlamaForCausalLM"]), "asks for Python code"),
    "tokenizer as a model": (lambda f: change_json(f / "config.json", architectures=["LlamaTokenizer"], vocab_size="x"), "cannot"),
    "list as config": (lambda f: (f / "config.json").write_text("[1]"), "cannot be loaded"),
    "pickled weights": (pickled_weights, "cannot be loaded"),
    "generate": (generate_with_code, "cannot be loaded"),
    "tokenizer": (tokenizer_with_code, "tokenizer_config.json asks for Python code"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "cannot be loaded"),
}  # fmt: skip


@pytest.mark.parametrize("what", MODELS)
def test_model_folders(folder, capsys, what):
    change, message = MODELS[what]
    change(folder / "teacher")
    refused(folder, capsys, [str(folder / "teacher"), message], "--overwrite")


@pytest.mark.parametrize("change", [config_with_code, pickled_weights])
def test_student_folders(folder, capsys, change):
    shutil.copytree(folder / "teacher", folder / "student")
    change(folder / "student")
    given = dict(student=folder / "student", student_layers=None, student_heads=None)
    refused(folder, capsys, [f"--student {folder / 'student'}"], "--overwrite", **given)


def test_code_that_transformers_replaces_is_not_run(folder):
    """Many published folders have code that transformers contains by now."""
    config_with_code(folder / "teacher", "llama", ["LlamaForCausalLM"])
    assert run(folder, "out", "--overwrite", **FAST) == 0
    assert not proof(folder).exists()


def refused(folder, capsys, messages, *more, **options):
    capsys.readouterr()
    assert run(folder, "out", *more, **{**FAST, **options}) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages) and "Traceback" not in error, error
    assert not proof(folder).exists()


# ---- Data ------------------------------------------------------------------------------------------------------------


def pickled(path):
    np.save(path, np.array([Payload(path.parent / "code-ran")], dtype=object), allow_pickle=True)


DATA = {
    "pickled.npy": pickled,
    "plain-pickle.npy": lambda path: path.write_bytes(pickle.dumps(Payload(path.parent / "code-ran"))),
    "pickle.safetensors": lambda path: path.write_bytes(pickle.dumps(Payload(path.parent / "code-ran"))),
    "folder.npy": lambda path: path.mkdir(),
    "floats.npy": lambda path: np.save(path, np.ones(1000)),
    "far.npy": lambda path: np.save(path, np.full(1000, 2**40)),
    "empty.npy": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("name", DATA)
def test_data(folder, capsys, name):
    DATA[name](folder / name)
    refused(folder, capsys, [str(folder / name)], "--overwrite", data=folder / name)
