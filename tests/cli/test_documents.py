"""Markdown of this tree: links reach their targets, the README stays short."""

import csv
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose_of(path):
    """Without code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchor_of(heading):
    """As GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors_of(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    broken = []
    for link in LINK.findall(prose_of(path)):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if ":" in name:  # a page elsewhere
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert not broken


def test_the_readme_fits():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_pictures_of_attention_are_those_of_their_numbers(tmp_path):
    """docs/guide/attention-stats: the pictures and the table of the page come from heads.csv."""
    script = runpy.run_path(str(ROOT / "examples/attention_pictures.py"))
    folder, page = ROOT / "docs/guide/attention-stats", (ROOT / "docs/guide/attention-stats.md").read_text()
    with (folder / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    script["draw"](rows, tmp_path)
    for name in ("distance.svg", "heads.svg"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()
    layers = re.search(r"--layers (\S+)", page)[1]
    assert script["table"](rows, script["groups_of"](layers)) in page
