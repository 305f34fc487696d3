"""The Python of docs/guide and docs/integrations runs: all blocks of a page, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import LONG

DOCS = Path(__file__).resolve().parents[2] / "docs"


def snippets(name):
    text = (DOCS / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    return "\n".join(blocks)


PAGES = [
    "guide/getting-started",
    "guide/hugging-face",
    "guide/indexers",
    "guide/attention-stats",
    "integrations/transformers",
    "integrations/trl",
]


@pytest.mark.parametrize("name", PAGES)
def test_snippets(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # trainers write here
    exec(compile(snippets(name), f"{name}.md", "exec"), {"__name__": "guide"})


@pytest.mark.skipif(not LONG, reason="starts processes that import torch; test_parallel.py makes the same calls")
@pytest.mark.parametrize("processes", [2, 4])
def test_many_gpus_with_torchrun(processes, tmp_path):
    """The page is one script."""
    script = tmp_path / "many_gpus.py"
    script.write_text(snippets("guide/many-gpus") + "\nfrom cases import end_of_rank\nend_of_rank()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", script]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert answer.returncode == 0, answer.stderr[-3000:]
