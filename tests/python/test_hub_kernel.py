"""The folder that scripts/build-hub-kernel makes for the Hugging Face hub loads and computes.

`scripts/check-frameworks` has an environment with `kernels`; the wheel is that of `scripts/build-wheel --cpu`.
"""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kernels")
ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted((ROOT / "dist/cpu").glob(f"streamkl-*{platform.machine()}.whl"))
PROGRAM = """
import sys
from pathlib import Path

import torch
from kernels import get_local_kernel

streamkl = get_local_kernel(Path(sys.argv[1]))
q_t, k_t = torch.randn(1, 64, 4, 16), torch.randn(1, 64, 4, 16)
q_s, k_s = (torch.randn(1, 64, 4, 16, requires_grad=True) for _ in range(2))
loss = streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True)
exact = streamkl.reference.attention_kl(*(tensor.double() for tensor in (q_t, k_t, q_s, k_s)), causal=True)
torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
loss.backward()
assert q_s.grad.norm() > 0 and Path(sys.argv[1]) in Path(streamkl.__file__).parents
"""


@pytest.mark.skipif(not WHEELS, reason="there is no wheel in dist/cpu: scripts/build-wheel --cpu")
def test_the_folder_for_the_hub_loads(tmp_path):
    """In a process of its own, without the package: operators of one name are registered once."""
    subprocess.run([ROOT / "scripts/build-hub-kernel", WHEELS[-1], tmp_path], check=True)
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
