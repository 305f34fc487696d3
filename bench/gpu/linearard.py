"""LinearARD's attention KL (github.com/gracefulning/LinearARD, arXiv:2604.00004) from a checkout, as a peer of bench/peers.py.

Nothing of it is in this repository: its Triton kernels are imported from the folder that --linearard names.
"""

import importlib
import sys
import types
from pathlib import Path

from .cases import BACKWARD, FORWARD, LINEARARD, LINEARARD_ENTRY
from .methods import leaves_of, with_autograd


def load(checkout):
    """Its function (q_s, k_s, q_t, k_t, causal=) -> sum of the KLs of all rows, which autograd differentiates.

    It is imported as a package of another name, because `kernels` may also be the package of Hugging Face.
    """
    entry = Path(checkout).resolve() / LINEARARD_ENTRY
    package = types.ModuleType(LINEARARD)
    package.__path__ = [str(entry.parent)]
    for name in [name for name in sys.modules if name.split(".")[0] == LINEARARD]:
        del sys.modules[name]  # of another checkout
    sys.modules[LINEARARD] = package
    return importlib.import_module(f"{LINEARARD}.{entry.stem}").attn_kl_align


def linearard(checkout):
    """Makes the method, as the entries of PEERS do."""

    def make(tensors, case, wanted):
        function, leaves = load(checkout), leaves_of(*tensors[2:])
        q_t, k_t, *_ = tensors

        def forward():
            return function(*leaves, q_t, k_t, causal=case.causal)

        return with_autograd(LINEARARD, case, wanted, forward, leaves, {FORWARD: 2, BACKWARD: 4})

    return make
