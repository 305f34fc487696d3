"""The gradient of a step does not depend on how it is divided into micro-batches and processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import LONG
from hf_trainer_cases import TRAINERS, check, run_step

SCRIPT = Path(__file__).parent / "hf_trainer_cases.py"
OTHERS = [name for name in TRAINERS if name not in ("plain", "left_padded", "unlabeled")]


@pytest.mark.parametrize("accumulate", [1, 2, 8])
@pytest.mark.parametrize("rows", ["all", "labels"])
def test_trainer(tmp_path, rows, accumulate):
    """The micro-batches have different shares of padding and of labels."""
    check(*run_step(tmp_path, "plain", accumulate, rows), rows)


def test_left_padding(tmp_path):
    """Padding predicts no token: its row does not count, whatever the label after it."""
    check(*run_step(tmp_path, "left_padded", 8, "labels"), "labels")


@pytest.mark.parametrize("accumulate", [1, 2, 8])
def test_without_labels(tmp_path, accumulate):
    check(*run_step(tmp_path, "unlabeled", accumulate))


@pytest.mark.parametrize("accumulate", [1, 2, 8] if LONG else [2])
@pytest.mark.parametrize("name", OTHERS)
def test_trl(tmp_path, name, accumulate):
    pytest.importorskip("trl")
    check(*run_step(tmp_path, name, accumulate))


def test_micro_batches_of_on_policy_gkd_count_the_same(tmp_path):
    """Also those that GKDTrainer does not replace: the weights of a step add up to 1."""
    pytest.importorskip("trl")
    sizes = dict(lmbda=1e-9, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    trainer = TRAINERS["gkd"](tmp_path, sizes, {})
    share, shares = trainer._share, []
    trainer._share = lambda *args: shares.append(share(*args)) or shares[-1]
    trainer.train()
    assert shares == [0.25] * 4


@pytest.mark.parametrize("name", TRAINERS if LONG else ["plain"])
def test_two_processes(tmp_path, name):
    accumulations = ["1", "2", "8"] if LONG else ["2"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        SCRIPT,
        tmp_path,
        name,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    answer = subprocess.run([*command, *accumulations], capture_output=True, text=True, timeout=600, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count(": equal\n") == len(accumulations), answer.stdout
