"""streamkl-distill: distills a Hugging Face model in one command, and shows what the student has learnt.

    streamkl-distill --teacher DIR --student-layers 8 --student-heads 16 --data text/*.txt --context 32768 --out DIR
    streamkl-distill eval --teacher DIR --student DIR --data text/held-out.txt --out DIR

Options      everything that a run can be told, as on the command line and in a TOML file
distill       trains a student, evaluates it and writes model, report and model card
evaluate     the attention KL of two models on held-out data, retrieval, language loss and maps
"""

from typing import TYPE_CHECKING

from ._options import Options, UserError

if TYPE_CHECKING:
    from ._evaluate import Evaluation, evaluate
    from ._loop import distill

__all__ = ["Evaluation", "Options", "UserError", "distill", "evaluate"]


def __getattr__(name: str):
    """Imports transformers and accelerate on first use: the command finds mistakes in its options before."""
    if name in ("Evaluation", "evaluate"):
        from . import _evaluate

        return getattr(_evaluate, name)
    if name == "distill":
        from ._loop import distill

        return distill
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
