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
    # Not Python's own end, in which a thread of gloo that still has a tensor ends the process: pytorch #179291.
    end = "dist.destroy_process_group()\nos._exit(0)\n"
    script.write_text(f"import os\n{snippets('guide/many-gpus')}\n{end}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", script]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert answer.returncode == 0, answer.stderr[-3000:]
