"""The Python of docs/guide runs: all blocks of a page, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import LONG

GUIDES = Path(__file__).resolve().parents[2] / "docs/guide"


def snippets(name):
    text = (GUIDES / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    return "\n".join(blocks)


@pytest.mark.parametrize("name", ["getting-started", "hugging-face", "indexers", "attention-stats"])
def test_snippets(name):
    exec(compile(snippets(name), f"{name}.md", "exec"), {"__name__": "guide"})


@pytest.mark.skipif(not LONG, reason="starts processes that import torch; test_parallel.py makes the same calls")
@pytest.mark.parametrize("processes", [2, 4])
def test_many_gpus_with_torchrun(processes, tmp_path):
    """The page is one script."""
    script = tmp_path / "many_gpus.py"
    script.write_text(snippets("many-gpus") + "\ndist.destroy_process_group()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", script]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert answer.returncode == 0, answer.stderr[-3000:]
