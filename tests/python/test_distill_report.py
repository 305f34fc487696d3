"""The report of streamkl-distill: complete, self-contained, and drawn in a browser."""

import re

import browser
import pytest
from distill_cases import make_teacher, run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of a run in a folder with a hostile name."""
    folder = tmp_path_factory.mktemp("report") / "</script><b>&'"
    folder.mkdir(parents=True)
    make_teacher(folder)
    assert run(folder, "out", "--control", steps=3) == 0
    return folder / "out/report.html"


def test_report_is_complete_and_self_contained(report):
    page = report.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "url(" not in page and not re.search("https?:(?!//www.w3.org/2000/svg)", page)
    assert "<b>" not in page and page.count("</script>") == 2 + page.count('<script id="document"') - 1
    document = browser.document_of(page)
    assert [section["title"] for section in document["sections"]] == [
        "Does the student use the whole context?", "Attention maps", "Training", "Where does the KL come from?", "Language loss",
        "Reproducing this run",
    ]  # fmt: skip
    (choice,) = document["sections"][1]["blocks"]
    assert [option["name"] for option in choice["choices"]] == [
        "0, learns from teacher layer 1",
        "1, learns from teacher layer 3",
    ]
    captions = [each["caption"] for each in choice["choices"][0]["blocks"][0]["maps"]]
    assert captions == ["teacher", "student before", "student after", "control", "contributions to the KL, before",
                        "contributions to the KL, after"]  # fmt: skip
    command = document["sections"][-1]["blocks"][0]["text"]
    assert "--student-layers 2" in command and "--control" in command and "script><b>&" in command


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width, dark", [(390, False), (1440, True)])
def test_report_in_a_browser(report, tmp_path, width, dark):
    browser.check_report(report, tmp_path, width, dark, maps=12)
