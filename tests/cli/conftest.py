import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tool  # noqa: E402


@pytest.fixture
def pair(tmp_path):
    """A small file with all four tensors, to be used by tests that do not care which."""
    return tool.save(tmp_path / "pair.safetensors", tool.make_tensors())
