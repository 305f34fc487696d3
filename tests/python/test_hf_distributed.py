"""The distiller under DDP, FSDP2 and accelerate: two processes with gloo."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "hf_distributed.py"


def test_two_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count(" works\n") + answer.stdout.count(" cannot run here\n") == 12, answer.stdout
