"""mypy accepts the README's example and the package; the types of losses are known."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[2]

TYPES = """
import torch
from typing_extensions import assert_type

import streamkl

x = torch.zeros(1, 1, 1, 1)
assert_type(streamkl.attention_kl(x, x, x, x, causal=True), torch.Tensor)
assert_type(streamkl.attention_kl(x, x, x, x, return_lse=False), torch.Tensor)
assert_type(streamkl.attention_kl(x, x, x, x, return_lse=True), tuple[torch.Tensor, torch.Tensor, torch.Tensor])
assert_type(streamkl.indexer_kl(x, x, x, x, x, relu=False), torch.Tensor)
assert_type(streamkl.indexer_kl(x, x, x, x, x, return_rows=True), tuple[torch.Tensor, streamkl.IndexerRows])
assert_type(streamkl.explain(x, x, x, x, window_size=(1, 0)), str)
streamkl.attention_kl(x, x, x, x, direction="both")  # type: ignore[call-overload]
streamkl.attention_kl(x, x, x, x, relu=True)  # type: ignore[call-overload]
streamkl.AttentionKLLoss(layout="thd")  # type: ignore[arg-type]
"""


def test_mypy(tmp_path):
    (tmp_path / "usage.py").write_text(TYPES)
    readme = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert "loss.backward()" in readme
    (tmp_path / "readme.py").write_text(readme)
    command = [sys.executable, "-m", "mypy", "--warn-unused-ignores", "--cache-dir", "build/mypy", "python/streamkl"]
    answer = subprocess.run(
        [*command, tmp_path / "readme.py", tmp_path / "usage.py"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
