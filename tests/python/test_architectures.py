"""The distiller on every text architecture of the installed transformers, and on some that see or hear: exact, or refused.

Loss and gradients are compared with those of the float64 attention weights that the model returns under eager. A sample of the
architectures runs by default, all of them with STREAMKL_TEST_LONG=1.
"""

from pathlib import Path

import hf_architectures as architectures
import pytest
import transformers
from cases import LONG

SAMPLE = (
    "LlamaForCausalLM", "Gemma2ForCausalLM", "Llama4ForCausalLM", "GptOssForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM",
    "AfmoeForCausalLM", "BloomForCausalLM", "ModernBertForMaskedLM", "AlbertForMaskedLM", "BartForConditionalGeneration",
    "T5ForConditionalGeneration", *architectures.MEDIA,
)  # fmt: skip
PAGE = (Path(__file__).parents[2] / "docs/guide/architectures.md").read_text()
ROWS = PAGE.split("| result | why |")[1].splitlines()[2:]


def cells_of(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def names_on_page(result, why):
    (names,) = [cells[3] for cells in map(cells_of, ROWS) if cells[:2] == [result, why]]
    return names.split(", ")


@pytest.mark.parametrize("name", architectures.page_names() if LONG else SAMPLE)
def test_is_exact_or_refused(name):
    """The page is about one release of transformers; the others must be exact or refused, too."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    transformers.logging.set_verbosity_error()
    outcome = architectures.outcome_of(name)
    assert outcome.kind != "different", outcome.reason
    if f"classes of transformers {transformers.__version__}," in PAGE:
        (row,) = architectures.grouped([architectures.row_of(name, outcome)])
        assert name in names_on_page(*cells_of(row)[:2])


def test_most_are_exact():
    """A page that refuses what it once computed is not a result."""
    assert len(names_on_page("exact", "")) >= 135
    assert sum(int(count) for result, _, count, _ in map(cells_of, ROWS) if result == "not tested") <= 70
