"""LinearARD's attention KL (github.com/gracefulning/LinearARD, arXiv:2604.00004) from a checkout, as a peer.

Nothing of it is in this repository: its Triton kernels are imported from the folder that --linearard names.
"""

import importlib
import subprocess
import sys
import types
from pathlib import Path

from .attention import leaves_of, with_autograd

LINEARARD, ENTRY = "linearard", "kernels/attention_KL/integration.py"


def load(checkout):
    """Its function (q_s, k_s, q_t, k_t, causal=) -> sum of the KLs of all rows, which autograd differentiates.

    It is imported as a package of another name, because `kernels` may also be the package of Hugging Face.
    """
    entry = Path(checkout).resolve() / ENTRY
    package = types.ModuleType(LINEARARD)
    package.__path__ = [str(entry.parent)]
    for name in [name for name in sys.modules if name.split(".")[0] == LINEARARD]:
        del sys.modules[name]  # of another checkout
    sys.modules[LINEARARD] = package
    return importlib.import_module(f"{LINEARARD}.{entry.stem}").attn_kl_align


def version(checkout):
    """The commit of a clone; of an archive the name of its folder, which GitHub ends with the commit."""
    if (checkout / ".git").exists():
        asked = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        return f"LinearARD {asked.stdout.strip()}"
    return checkout.resolve().name.replace("-", " ", 1)


def linearard(checkout):
    """Makes the method, as the entries of PEERS do."""

    def make(tensors, shape, weight):
        function, leaves = load(checkout), leaves_of(tensors["q_s"], tensors["k_s"])
        teacher = tensors["q_t"], tensors["k_t"]

        def forward():
            return function(*leaves, *teacher, causal=shape.causal)

        return with_autograd(LINEARARD, version(checkout), shape, forward, leaves, weight)

    return make
