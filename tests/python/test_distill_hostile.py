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
from safetensors import safe_open
from safetensors.torch import save_file

from streamkl.distill import _checkpoint as checkpoints

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
    auto_map = auto_map or {
        "AutoConfig": "evil.Config",
        "AutoModel": "evil.Model",
        "AutoModelForCausalLM": "evil.Model",
    }
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
    change_json(
        folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]}
    )


MODELS = {
    "config": (config_with_code, "asks for Python code (auto_map: "),
    "model of a known config": (lambda f: config_with_code(f, "llama", auto_map={"AutoModel": "evil.M"}), "asks for Python code"),
    "code of another repository": (lambda f: config_with_code(f, auto_map={"AutoConfig": "a/b--evil.C"}), "a/b--evil.C"),
    "no architecture": (lambda f: config_with_code(f, "llama", ()), "asks for Python code"),
    "no model": (lambda f: config_with_code(f, "evil", ["LlamaTokenizer"]), "asks for Python code"),
    "code next to a stock class": (lambda f: config_with_code(f, "evil", ["LlamaForCausalLM"]), "asks for Python code"),
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


# ---- Checkpoints -----------------------------------------------------------------------------------------------------

WEIGHT = "module.model.layers.0.self_attn.q_proj.weight"


def inputs(whole):
    """A checkpoint is resumed only with the paths that it was written with."""
    return dict(teacher=whole / "teacher", data=whole / "data.npy")


def rewrite(path, change_state=lambda state: state, change_tensors=lambda tensors: tensors):
    """Replaces the state, as an object or as text, and the tensors of a checkpoint."""
    with safe_open(path, "pt") as file:
        state = json.loads(file.metadata()["state"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    state = change_state(state)
    save_file(
        change_tensors(tensors), path, metadata={"state": state if isinstance(state, str) else json.dumps(state)}
    )


def with_entry(**fields):
    """The fields of the last line of the history, replaced; None: without the field."""

    def change(state):
        last = {name: value for name, value in {**state["history"][-1], **fields}.items() if value is not None}
        return {**state, "history": [*state["history"][:-1], last]}

    return change


def without(name):
    return lambda whole: {each: value for each, value in whole.items() if each != name}


STATES = {
    "no JSON": (lambda state: "{", "its state is no JSON"),
    "nested too deeply": (lambda state: "[" * 100_000, "its state is no JSON"),
    "a list": (lambda state: [1], "its state=[1]: must be an object"),
    "options of another type": (lambda state: {**state, "options": 3}, "options=3: must be an object"),
    "no options": (without("options"), "options=None: must be an object"),
    "no data": (without("data"), "was written by a run on other data"),
    "negative step": (lambda state: {**state, "step": -5}, "step=-5: must be 1..2"),
    "huge step": (lambda state: {**state, "step": 10**30}, "step=1000000000000000000000000000000: must be 1..2"),
    "step as text": (lambda state: {**state, "step": "2"}, "step='2': must be 1..2"),
    "step as a flag": (lambda state: {**state, "step": True}, "step=True: must be 1..2"),
    "no step": (without("step"), "step=None: must be 1..2"),
    "seconds before 0": (lambda state: {**state, "seconds": -1}, "seconds=-1: must be a number, at least 0"),
    "seconds that are no number": (lambda state: {**state, "seconds": float("nan")}, "seconds=nan: must be a number"),
    "seconds beyond floats": (lambda state: {**state, "seconds": 10**400}, "must be a number, at least 0"),
    "history of another type": (lambda state: {**state, "history": {}}, "history={}: must be a list"),
    "history of numbers": (lambda state: {**state, "history": [1]}, "history[0]=1: must be an object with loss, memory,"),
    "history without a loss": (with_entry(loss=None), "history[1]={"),
    "history of another run": (with_entry(more=1), "history[1]={"),
    "history beyond the step": (with_entry(step=3), "history[1].step=3: must be 2..2"),
    "history out of order": (with_entry(step=1), "history[1].step=1: must be 2..2"),
    "history with text": (with_entry(loss="low"), "history[1].loss='low': must be a finite number"),
}  # fmt: skip


@pytest.mark.parametrize("what", STATES)
def test_states_of_checkpoints(whole, folder, capsys, what):
    change, message = STATES[what]
    rewrite(folder / "out" / checkpoints.NAME, change)
    refused(folder, capsys, [checkpoints.NAME, message, "start again with --overwrite"], "--resume", **inputs(whole))


def with_tensor(name, change):
    return lambda tensors: {**tensors, name: change(tensors[name])}


TENSORS = {
    "weight missing": (without(f"student.{WEIGHT}"), f"student.{WEIGHT}: is missing"),
    "weight of another shape": (with_tensor(f"student.{WEIGHT}", lambda t: t[:1]), "must be torch.float32["),
    "weight of another type": (with_tensor(f"student.{WEIGHT}", lambda t: t.half()), "is torch.float16["),
    "weight of NaN": (with_tensor(f"student.{WEIGHT}", lambda t: t * float("nan")), f"student.{WEIGHT}: contains NaN"),
    "unknown weight": (lambda tensors: {**tensors, "student.b": torch.ones(1)}, "student.b: the student has no such tensor"),
    "no kind": (lambda tensors: {**tensors, "student": torch.ones(1)}, "student: the student has no such tensor"),
    "unknown moment": (lambda tensors: {**tensors, f"optimizer.a.{WEIGHT}": torch.ones(1)}, "has no such tensor"),
    "moment missing": (without(f"optimizer.exp_avg.{WEIGHT}"), f"optimizer.exp_avg.{WEIGHT}: is missing"),
    "moment of another shape": (with_tensor(f"optimizer.exp_avg.{WEIGHT}", lambda t: t[:1]), "must be torch.float32["),
    "optimizer before its start": (with_tensor(f"optimizer.step.{WEIGHT}", lambda t: t * 0 - 5), "=-5.0: must be 1..2"),
}  # fmt: skip


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_of_checkpoints(whole, folder, capsys, what):
    change, message = TENSORS[what]
    rewrite(folder / "out" / checkpoints.NAME, change_tensors=change)
    refused(folder, capsys, [checkpoints.NAME, message, "start again with --overwrite"], "--resume", **inputs(whole))


def test_a_rewritten_checkpoint_is_accepted(whole, folder):
    """What the two tables change is all that is wrong with their checkpoints."""
    rewrite(folder / "out" / checkpoints.NAME)
    assert run(folder, "out", "--resume", **FAST, **inputs(whole)) == 0


BEFORE = {
    "no JSON": (lambda before: "{", "cannot be read"),
    "a list": (lambda before: "[]", "must be an object with sequences, context"),
    "field missing": (lambda before: json.dumps(without("kl")(before)), "must be an object with sequences, context"),
    "field of another type": (lambda before: json.dumps({**before, "kl": "low"}), "kl='low': must be <class 'float'>"),
    "list of another type": (lambda before: json.dumps({**before, "pairs": [[0, None]]}), "pairs=[[0, None]]: must be list[list[int]]"),
}  # fmt: skip


@pytest.mark.parametrize("what", BEFORE)
def test_evaluations_before_training(whole, folder, capsys, what):
    change, message = BEFORE[what]
    path = folder / "out/before.json"
    path.write_text(change(json.loads(path.read_text())))
    refused(
        folder, capsys, [f"{path}: ", message, "delete it, and --resume evaluates again"], "--resume", **inputs(whole)
    )
    path.unlink()
    assert run(folder, "out", "--resume", **FAST, **inputs(whole)) == 0
