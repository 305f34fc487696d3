"""StreamKL: the KL divergence between two attention distributions, without the N x N matrices.

    loss = streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True)

attention_kl, AttentionKLLoss    KL between a teacher's and a student's attention: a function and a module
indexer_kl, IndexerKLLoss        the same for a student that is the indexer of a sparse attention
losses                           what papers use besides them: entropy, relation heads, squared errors of scores
attention                        attention whose backward carries its KL to a teacher
attention_map                    where two models attend, and where their KL comes from
attention_stats                  which keys one attention attends to, how much, and how far away
explain, explain_indexer         the launches of a call, and the reasons
hf.AttentionDistiller            distills Hugging Face models without changes to their code
Parallel                         process groups of a call that is split over ranks
parallel                         sequences, split over the ranks of torch.distributed
reference                        plain implementations that store the matrices
"""

from ._explain import explain, explain_indexer
from ._library import library as _load_library
from ._attention_kl import attention_kl
from ._carried import CarriedKL, attention
from . import _traced_attention  # registers its operators
from .indexer import IndexerRows, indexer_kl
from . import losses
from .losses import AttentionKLLoss, IndexerKLLoss
from ._options import Parallel
from .maps import AttentionMap, attention_map
from .stats import Statistics, attention_stats

__all__ = [
    "AttentionKLLoss", "AttentionMap", "CarriedKL", "IndexerKLLoss", "IndexerRows", "Parallel", "Statistics", "attention", "attention_kl", "attention_map",
    "attention_stats", "explain", "explain_indexer", "hf", "indexer_kl", "losses", "parallel", "reference",
]  # fmt: skip
__version__: str = _load_library().skl_version().decode()


def __getattr__(name: str):
    """Imports hf, parallel and reference on first use: transformers takes seconds."""
    if name in ("hf", "parallel", "reference"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
