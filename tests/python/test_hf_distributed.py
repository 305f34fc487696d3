"""The distiller under DDP, FSDP2 and accelerate: two processes with gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = Path(__file__).parent / "hf_distributed.py"


def test_two_processes():
    cases = (
        "ddp", "ddp_with_loss", "fsdp2", "fsdp2_both", "fsdp2_sinks", "accelerate_loop", "context_parallel_group",
        "context_parallel_region", "accelerate_context_parallel",
    )  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT, *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert [f"{case} works" for case in cases] == [
        line for line in answer.stdout.splitlines() if line.endswith("works")
    ]
