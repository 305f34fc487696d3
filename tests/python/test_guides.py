"""The Python of docs/guide runs: all blocks of a page, one after the other."""

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs/guide"


@pytest.mark.parametrize("name", ["getting-started", "hugging-face", "indexers", "many-gpus"])
def test_snippets(name):
    text = (GUIDES / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), f"{name}.md", "exec"), {"__name__": "guide"})
