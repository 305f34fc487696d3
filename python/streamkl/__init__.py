"""StreamKL: the KL divergence between two attention distributions, without the N x N matrices.

    loss = streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True)

`streamkl.indexer_kl` trains the indexer of a sparse attention. `streamkl.AttentionKLLoss` and `streamkl.IndexerKLLoss` are
the same as modules, `streamkl.attention_map` shows where two models look and where their KL comes from,
`streamkl.hf.AttentionDistiller` distils Hugging Face models without touching their code, and `streamkl.reference` has
the plain implementations that store the matrices.
"""

from ._library import library as _load_library
from .attention import attention_kl
from .indexer import IndexerRows, indexer_kl
from .loss import AttentionKLLoss, IndexerKLLoss
from .maps import AttentionMap, attention_map

__all__ = [
    "AttentionKLLoss", "AttentionMap", "IndexerKLLoss", "IndexerRows", "attention_kl", "attention_map", "hf",
    "indexer_kl", "reference",
]  # fmt: skip
__version__: str = _load_library().skl_version().decode()


def __getattr__(name: str):
    """hf and reference are imported when they are first used: transformers takes seconds."""
    if name in ("hf", "reference"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
