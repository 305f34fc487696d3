import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # browser, examples

# The models are small and the machine may be busy: waiting for threads would cost more than they save.
torch.set_num_threads(1)

# The tests of models need both packages.
if not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")):
    collect_ignore_glob = ["test_architectures.py", "test_distill*.py", "test_guides.py", "test_hf*.py"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def any_precision():
    """accelerate has one precision per process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
