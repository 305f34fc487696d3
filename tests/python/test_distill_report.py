"""The report of streamkl-distill: complete, self-contained, and drawn in a browser."""

import dataclasses
import json
import re
from types import SimpleNamespace

import browser
import numpy as np
import pytest
import torch
from distill_cases import CONTEXT, evaluation, make_teacher, run
from transformers import LlamaForCausalLM

from streamkl.distill import Evaluation
from streamkl.distill._loop import Run
from streamkl.distill._report import _figures, _retrieval, verdict


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
        "Does the student use the whole context?", "Perplexity", "How far do they look?", "Attention maps",
        "Where does the KL come from?", "Training", "Reproducing this run",
    ]  # fmt: skip
    assert document["lead"].startswith(
        "A student with 2 layers of 2 heads, compared with its teacher with 4 layers of 4 heads, after 3 steps, on 2 held-out"
    )
    for bars in [block for block in document["sections"][2]["blocks"] if block["kind"] == "bars"]:
        assert bars["top"] == max(share for series in bars["series"] for share in series["y"])
    (choice,) = document["sections"][3]["blocks"]
    assert [option["name"] for option in choice["choices"]] == [
        "0, learns from teacher layer 1",
        "1, learns from teacher layer 3",
    ]
    captions = [each["caption"] for each in choice["choices"][0]["blocks"][0]["maps"]]
    assert captions == ["teacher", "student before", "student after", "control", "contributions to the KL, before",
                        "contributions to the KL, after"]  # fmt: skip
    heads = choice["choices"][1]["blocks"]
    assert [block["note"] for block in heads] == [
        f"learns from the mean of heads {heads} of teacher layer 3" for heads in ("0, 1", "2, 3")
    ]
    assert all(block["tokens"] == [CONTEXT, CONTEXT] for block in heads)
    tables = [block for block in document["sections"][4]["blocks"] if block.get("heat")]
    brightest = max(number for table in tables for row in table["rows"] for number in row[2:])
    assert len(tables) == 3 and {table["heat"] for table in tables} == {brightest}  # one scale
    command, options = document["sections"][-1]["blocks"]
    assert options["plain"] and [name for name, _ in options["rows"][-2:]] == [
        "parameters of the teacher",
        "parameters of the student",
    ]
    command = command["text"]
    assert "--student-layers 2" in command and "--control" in command and "script><b>&" in command


def test_distances_and_entropy_are_those_of_the_attention_weights(report):
    found = evaluation(report.parent)["after"]
    ids = torch.from_numpy(np.load(report.parents[1] / "data.npy")[-2:]).long()
    apart = (torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)).clamp(min=0)
    bucket = torch.where(apart == 0, 0, apart.float().log2().floor().long() + 1)
    for role, folder, at in ("teacher", "../teacher", 1), ("student", "student", 0):
        model = LlamaForCausalLM.from_pretrained(report.parent / folder, attn_implementation="eager")
        with torch.no_grad():
            weights = model(input_ids=ids, output_attentions=True).attentions
        for n, pair in enumerate(found["pairs"]):
            p = weights[pair[at]].double()
            entropy = -torch.special.xlogy(p, p).sum(-1).mean()
            assert found["entropy"][role][n] == pytest.approx(entropy.item(), rel=1e-4)
            shares = torch.zeros(7).double().index_add_(0, bucket.flatten(), p.mean((0, 1)).flatten()) / CONTEXT
            assert found["distance_share"][role][n] == pytest.approx(shares.tolist(), abs=1e-5)


def test_percentages_come_with_the_size_of_their_sample(report):
    """A student that keeps 3 of 4 rows of its teacher at the last depth, with one of two heads that retrieve."""
    shares = dict(teacher=[0.5] * 8, student=[0.25] * 8)
    result = dict(
        length=48, rows=64, heads=[[0, 1, 1], [1, 3, 0]], missed=1, misses=[dict(head=[1, 3, 0], depth=7, needle=40, row=46, key=2)],
        attention=shares, answers=shares,
        kept={kind: [None, *[1.0] * 6, 0.75] for kind in ("attention", "answers")},
        kept_of={kind: [0.0, *[3.5] * 6, 4.0] for kind in ("attention", "answers")},
    )  # fmt: skip
    stored = json.loads((report.parent / "evaluation.json").read_text())
    found = {name: Evaluation(**stored[name] | {"retrieval": [result]}) for name in ("before", "after", "control")}
    details = {figure["label"]: (figure["value"], figure["detail"]) for figure in _figures(found)}
    assert details["needles found by attention"] == (
        "25.0 %",
        "teacher 50 %; 64 rows of 2 retrieval heads, 48 tokens",
    )
    assert details["found at the worst depth"] == ("75.0 %", "of 4 rows in which the teacher finds the needle")
    assert details["values answered"] == ("25.0 %", "teacher 50 %, control 25 %; 64 tokens")
    blocks = {block["title"]: block for block in _retrieval(found)["blocks"][0]["choices"][0]["blocks"]}
    assert blocks["Needles found by attention, by depth"]["note"] == "Each bar is 8 rows of 2 heads."
    kept = blocks["Needles found, % of those that the teacher finds"]
    assert kept["header"] == ["depth, %", "teacher's rows", "before", "after", "control"]
    assert [kept["rows"][depth] for depth in (0, 1, 7)] == [
        ("0", "0", "-", "-", "-"), ("12", "3.5", "100", "100", "100"), ("87", "4", "75", "75", "75")
    ]  # fmt: skip
    assert blocks["Retrieval heads"]["rows"] == [
        ["layer 0, head 1", "the mean of heads 2, 3 of teacher layer 1"], ["layer 1, head 0", "the mean of heads 0, 1 of teacher layer 3"]
    ]  # fmt: skip
    assert blocks["Rows in which only the teacher finds the needle: 1 shown of 1"]["rows"] == [
        ["1, 0", "40", "46", "2"]
    ]


def test_needles_of_other_pairs(report):
    """In shorter texts, a student layer may learn from another teacher layer than in held-out sequences."""
    stored = json.loads((report.parent / "evaluation.json").read_text())["after"]
    result = stored["retrieval"][0] | dict(
        heads=[[0, 2, 1]], missed=1, misses=[dict(head=[0, 2, 1], depth=7, needle=40, row=46, key=2)]
    )
    (section,) = _retrieval({"student": Evaluation(**stored | {"retrieval": [result]})})["blocks"]
    tables = {block["title"]: block for block in section["choices"][0]["blocks"]}
    assert tables["Retrieval heads"]["rows"] == [["layer 0, head 1", "the mean of heads 2, 3 of teacher layer 2"]]


def test_tokens_of_all_processes(report, monkeypatch):
    """Each of the processes reads other sequences."""
    monkeypatch.setattr(Run, "tokens_per_step", lambda run: 8 * 96)
    assert run(report.parents[1], "readers", steps=2, eval_sequences=0) == 0
    document = browser.document_of((report.parents[1] / "readers/report.html").read_text())
    assert document["figures"][0]["detail"] == "2 steps of 768 tokens"


def test_verdict(report):
    """It says what the attention loss has changed only where the difference exceeds twice its standard error."""
    stored = json.loads((report.parent / "evaluation.json").read_text())
    found = {name: Evaluation(**stored[name]) for name in ("before", "after", "control")}

    def with_losses(after, control):
        changed = {"after": after, "control": control}
        return verdict(found | {
            name: dataclasses.replace(found[name], language_sequence=dict(teacher=[2.0] * len(losses), student=losses))
            for name, losses in changed.items()
        })  # fmt: skip

    helps = with_losses([2.0, 3.0, 4.0], [2.1, 3.1, 4.11])
    assert helps.startswith(
        "The attention loss helps: held-out perplexity 20.09 with it, 22.27 without (-0.103 ± 0.003 nats)."
    )
    assert with_losses([2.1, 3.1, 4.11], [2.0, 3.0, 4.0]).startswith("The attention loss hurts: ")
    for after, control in ([2.0, 3.0, 4.0], [2.2, 2.9, 4.0]), ([2.0], [3.0]), ([2.0, 2.0], [2.0, 2.0]):
        assert with_losses(after, control).startswith(f"The attention loss makes no difference to the held-out perplexity that 2 sequences can show: ")  # fmt: skip
    assert "--control trains without it" in verdict({name: found[name] for name in ("before", "after")})
    assert verdict({"student": found["after"]}).endswith("nats from its teacher's.") and verdict({}) == ""


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width, dark", [(390, False), (1440, True)])
def test_report_in_a_browser(report, tmp_path, width, dark):
    """Also with the perplexities of a student that has learnt nothing, whose labels are long."""
    page = report.read_text()
    document = browser.document_of(page)
    for series in document["sections"][1]["blocks"][0]["series"][1:]:
        series["y"] = [1e6 * y for y in series["y"]]
    path = tmp_path / "report.html"
    path.write_text(
        page.replace(
            re.search(r'json">(.*?)</script>', page, re.DOTALL)[1], json.dumps(document).replace("<", "\\u003c")
        )
    )
    browser.check_report(path, tmp_path, width, dark, maps=12)


def test_a_control_of_models_without_a_language_loss():
    found = {
        name: SimpleNamespace(kl=kl, language_sequence={})
        for name, kl in (("before", 3.0), ("after", 1.0), ("control", 2.0))
    }
    assert verdict(found) == "The attention KL fell from 3 to 1 nats, to 2 without the attention loss."


def test_a_kl_that_rises():
    found = {name: SimpleNamespace(kl=kl) for name, kl in (("before", 1.0), ("after", 3.0))}
    assert verdict(found).startswith("The attention KL did not fall: from 1 to 3 nats. ")
