import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import tool  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped where the tool has none")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and tool.why_no_gpu():
        pytest.skip(tool.why_no_gpu())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """The device that computes, for tests whose result does not depend on it."""
    monkeypatch.setattr(tool, "device", request.param)
    return request.param


@pytest.fixture
def pair(tmp_path):
    """A small file with all four tensors."""
    return tool.save(tmp_path / "pair.safetensors", tool.make_tensors())
