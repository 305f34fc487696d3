"""streamkl-distill: what it trains, evaluates and writes, its options, and its errors."""

import gzip
import importlib.util
import json
import re
import shlex
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import browser
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from distill_cases import CONTEXT, arguments, evaluation, make_teacher, run, same, weights
from safetensors.torch import load_file, save_file
from hf_models import bert, kl_from_attentions, llama
from transformers import AutoModel, BertForMaskedLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from streamkl.distill import _data as data
from streamkl.distill import _device as devices
from streamkl.distill import _loop as loop
from streamkl.distill import cli, distill
from streamkl.distill._checkpoint import to_json
from streamkl.distill._evaluate import _heads_of, evaluate, retrieval_scores
from streamkl.distill._logs import Log
from streamkl.distill._needles import DEPTHS, KEY, VALUE, NeedleBatch, Retrieval, needle_batches
from streamkl.distill._output import summary
from streamkl.distill._options import Options, Parser, UserError, add_arguments, options_from, read_toml
from streamkl.distill._student import load_student, load_teacher
from streamkl.distill.cli import main
from streamkl.hf import AttentionDistiller


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("distill"))


@pytest.fixture(scope="module")
def trained(folder):
    assert run(folder, "trained", "--control", steps=12) == 0
    return folder / "trained"


# ---- A run -----------------------------------------------------------------------------------------------------------


def test_learns(trained):
    found = evaluation(trained)
    assert found["after"]["kl"] < 0.95 * found["before"]["kl"]
    assert found["after"]["kl"] < found["control"]["kl"]
    assert found["after"]["pairs"] == [[0, 1], [1, 3]]


def test_held_out_kl_is_that_of_the_attention_weights(folder, trained):
    teacher = LlamaForCausalLM.from_pretrained(folder / "teacher")
    student = LlamaForCausalLM.from_pretrained(trained / "student")
    assert student.config.num_hidden_layers == 2 and student.config.num_attention_heads == 2
    ids = torch.from_numpy(np.load(folder / "data.npy")[-2:]).long()
    expected = kl_from_attentions(
        teacher, student, dict(input_ids=ids, attention_mask=torch.ones_like(ids)), {0: 1, 1: 3}
    )
    found = evaluation(trained)["after"]
    assert found["kl"] == pytest.approx(expected.item(), rel=1e-4)
    for pair in range(2):
        assert np.mean(found["kl_head"][pair]) == pytest.approx(found["kl_layer"][pair], rel=1e-6)
        assert np.mean(found["kl_position"][pair]) == pytest.approx(found["kl_layer"][pair], rel=1e-4)
        assert len(found["kl_position"][pair]) == 16
        assert sum(found["kl_distance"][pair]) == pytest.approx(found["kl_layer"][pair], rel=1e-4)
    logits = student(input_ids=ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert np.mean(found["language"]["student"]) == pytest.approx(
        loss.item(), rel=2e-2
    )  # buckets are not all equally long


def test_writes(trained):
    card = (trained / "student/README.md").read_text()
    found = evaluation(trained)
    for words in ("teacher", "data.npy", f"{found['before']['kl']:.4g}", f"{found['after']['kl']:.4g}"):
        assert words in card
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == list(range(1, 13))
    assert {"loss", "attention", "output", "rate", "tokens_per_second", "memory", "seconds"} < log[0].keys()
    assert not list(trained.glob(".*"))


def test_options_of_a_run_repeat_it(folder, trained):
    assert main(["--options", str(trained / "options.toml"), "--no-control", "--out", str(folder / "again")]) == 0
    assert same(trained, folder / "again")


def test_a_file_of_options_has_all_but_those_of_a_call(tmp_path):
    (tmp_path / "options.toml").write_text(Options().as_toml())
    assert {*read_toml(str(tmp_path / "options.toml"))} == {*vars(Options())} - {"resume", "overwrite", "dry_run"}


def test_eval_repeats_the_evaluation(folder, trained, capsys):
    np.save(folder / "held-out.npy", np.load(folder / "data.npy")[-2:])
    out = str(folder / "eval")
    options = ["--options", str(trained / "options.toml"), "--student", str(trained / "student"), "--out", out]
    assert main(["eval", *options, "--data", str(folder / "held-out.npy")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["kl"] == pytest.approx(
        evaluation(trained)["after"]["kl"], rel=1e-5
    )
    # Without --data, the held-out data of the run, and not what the student has learnt.
    assert main(["eval", *options]) == 2
    assert "--data: must be given: that of --options is what the student has learnt" in capsys.readouterr().err
    own = (trained / "options.toml").read_text().replace("held-out = []", f'held-out = ["{folder / "held-out.npy"}"]')
    (folder / "own.toml").write_text(own)
    assert main(["eval", "--options", str(folder / "own.toml"), *options[2:]]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["kl"] == pytest.approx(
        evaluation(trained)["after"]["kl"], rel=1e-5
    )
    # The report says how to repeat the evaluation, without the options of the run.
    document = browser.document_of((folder / "eval/report.html").read_text())
    command = shlex.split(document["sections"][-1]["blocks"][0]["text"])
    found = evaluation(folder / "eval")
    assert command[:2] == ["streamkl-distill", "eval"] and main(command[1:]) == 0
    assert evaluation(folder / "eval") == found


def test_eval_replaces_no_report_of_a_run(folder, trained, capsys):
    report = (trained / "report.html").read_text()
    data = ["--data", str(folder / "data.npy"), "--student", str(trained / "student")]
    assert main(["eval", "--options", str(trained / "options.toml"), *data, "--out", str(trained)]) == 2
    assert "contains a run, whose report would be replaced: must be another folder" in capsys.readouterr().err
    assert (trained / "report.html").read_text() == report


def test_a_control_begins_with_the_same_student(tmp_path):
    """Weights that the folders lack are drawn at random."""
    make_teacher(tmp_path)
    file = tmp_path / "teacher/model.safetensors"
    weights = {name: each for name, each in load_file(file).items() if name != "lm_head.weight"}
    save_file(weights, file, metadata=dict(format="pt"))
    student = dict(student=tmp_path / "teacher", student_layers=None, student_heads=None)
    assert run(tmp_path, "out", "--control", rate=0, steps=1, **student) == 0
    a, b = (load_file(tmp_path / f"out/{name}/model.safetensors") for name in ("student", "control/student"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_without_evaluation(folder, capsys):
    """Model and report are there, and say that nothing was evaluated. All of the data is training data."""
    assert run(folder, "unseen", steps=2, eval_sequences=0, needles=1) == 0
    assert evaluation(folder / "unseen") == {}
    card, page = ((folder / "unseen" / name).read_text() for name in ("student/README.md", "report.html"))
    assert "was not evaluated" in card and "20 sequences of 48 tokens" in card
    document = browser.document_of(page)
    assert "was not evaluated" in document["lead"]
    assert [section["title"] for section in document["sections"]] == ["Training", "Reproducing this run"]
    assert [figure["label"] for figure in document["figures"]] == ["of training", "peak memory"]
    models = ["--options", str(folder / "unseen/options.toml"), "--student", str(folder / "unseen/student")]
    capsys.readouterr()
    assert main(["eval", *models, "--data", str(folder / "data.npy")]) == 2
    assert "--eval-sequences=0: must be 1.." in capsys.readouterr().err


def test_teacher_in_the_precision_of_the_run(folder):
    """Its weights, but not the frequencies of RoPE: rounded, they turn far positions wrongly. The student learns in f32."""
    options = Options(teacher=str(folder / "teacher"), precision="bfloat16", student_layers=2, student_heads=2)
    teacher = load_teacher(options, False)
    assert {each.dtype for each in teacher.parameters()} == {torch.bfloat16}
    assert teacher.model.rotary_emb.inv_freq.dtype == torch.float32
    student = load_student(options, teacher, False)
    assert {each.dtype for each in student.parameters()} == {torch.float32}


def test_measures_during_training_and_keeps_the_best(folder, capsys):
    """The measurement is the held-out loss of the student then, and OUT/best is the student of the lowest one."""
    options = dict(needles=0, eval_sequences=2, eval_every=2)
    assert run(folder, "measured", "--control", **options) == 0
    lines = [json.loads(line) for line in (folder / "measured/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    measured = [line for line in lines if "held_out_loss" in line]
    after = evaluation(folder / "measured")["after"]
    assert measured[-1]["held_out_attention"] == pytest.approx(after["kl"], rel=1e-4)
    assert measured[-1]["held_out_output"] == pytest.approx(after["output_kl"], rel=1e-4)
    best = min(measured, key=lambda line: line["held_out_loss"])
    assert (
        f"Held-out loss {best['held_out_loss']:.4g} at step {best['step']}."
        in (folder / "measured/best/README.md").read_text()
    )
    if best["step"] == 6:
        best_weights, last = (
            load_file(folder / f"measured/{name}/model.safetensors") for name in ("best", "student")
        )
        assert all(torch.equal(best_weights[name], last[name]) for name in last)
    printed = capsys.readouterr().out
    for words in (
        "attention KL, nats",
        f"{after['kl']:.4g}",
        "control",
        "6 steps of 96 tokens",
        "lowest held-out loss",
    ):
        assert words in printed
    titles = [block["title"] for block in training_section(folder / "measured")["blocks"]]
    assert "Loss by step" in titles


def training_section(folder):
    document = browser.document_of((folder / "report.html").read_text())
    return next(section for section in document["sections"] if section["title"] == "Training")


@pytest.mark.parametrize(
    "given, loss",
    [
        (dict(), "0.1 x attention KL, KL(teacher || student)"),  # 2 student heads learn the means of 4 heads
        (dict(head_map="0,2"), "0.1 x attention KL, KL(student || teacher)"),
        (dict(student_heads=4), "0.1 x attention KL, KL(student || teacher)"),
        (dict(student_heads=4, direction="forward"), "0.1 x attention KL, KL(teacher || student)"),
    ],
)
def test_default_of_the_attention_kl(folder, capsys, given, loss):
    assert run(folder, "dry", "--dry-run", steps=1, **{"attention_weight": None, **given}) == 0
    assert loss in capsys.readouterr().out


def test_dry_run_writes_nothing(folder, capsys):
    assert run(folder, "dry", "--dry-run", steps=60_000) == 0
    assert not (folder / "dry").exists()
    printed = capsys.readouterr().out
    for words in ("teacher  LlamaForCausalLM", "18 sequences of 48 tokens; 2 sequences held out",
                  "model.layers.1.self_attn (2 heads) learns from model.layers.3.self_attn (4 heads); 0.0% of the", "s per step of 96 tokens: 60000 steps take"):  # fmt: skip
        assert words in printed, printed
    assert "report.html" not in printed
    seconds, hours, minutes = re.search(r"([\d.e-]+) s per step .* take (?:(\d+) h )?(\d+) min", printed).groups()
    assert 60 * int(hours or 0) + int(minutes) == pytest.approx(1000 * float(seconds), rel=0.01, abs=1)


def test_accumulation_is_a_larger_batch(folder, monkeypatch):
    """Processes add their gradients in the last backward of a step."""
    common = dict(steps=2, needles=0, eval_sequences=1)
    assert run(folder, "whole", "--batch", "4", **common) == 0
    calls, own = [], Accelerator.backward
    monkeypatch.setattr(Accelerator, "no_sync", lambda *_: calls.append("no_sync") or nullcontext())
    monkeypatch.setattr(Accelerator, "backward", lambda self, loss: calls.append("backward") or own(self, loss))
    assert run(folder, "parts", "--batch", "2", "--accumulate", "2", **common) == 0
    assert calls == 2 * ["no_sync", "backward", "backward"]
    a, b = weights(folder / "whole"), weights(folder / "parts")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def test_language_loss_checkpointing_and_samples(folder):
    options = dict(steps=2, needles=0, eval_sequences=1, language_weight=1.0, sample_rows=0.5)
    assert run(folder, "sampled", "--gradient-checkpointing", **options) == 0
    log = [json.loads(line) for line in (folder / "sampled/log.jsonl").read_text().splitlines()]
    assert log[0]["loss"] == pytest.approx(log[0]["attention"] + log[0]["output"] + log[0]["language"], rel=1e-5)


def test_attention_in_a_first_phase(folder):
    """Steps after it have no attention KL; held-out measurements of both phases contain it."""
    assert run(folder, "phase", attention_until=0.5, eval_every=3, needles=0) == 0
    log = [json.loads(line) for line in (folder / "phase/log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "attention" in entry] == [1, 2, 3]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in log if "held_out_attention" in entry] == [3, 6]


def test_weights_of_rows_heads_and_layers(folder, monkeypatch):
    """The attention KL of a step is that of a distiller with these weights."""
    scores, teachers = {0: [0.0, 0.5], 1: [0.25, 0.75]}, []
    monkeypatch.setattr(loop, "retrieval_scores", lambda teacher, *_: teachers.append(teacher) or scores)
    given = dict(row_weight="far:8", head_weight="retrieval", layer_weight="3,0.5", output_weight=0, steps=1)
    assert run(folder, "weighted", rate=0, batch=1, **given) == 0
    entry = json.loads((folder / "weighted/log.jsonl").read_text())
    student = LlamaForCausalLM.from_pretrained(folder / "weighted/student")
    ids = torch.from_numpy(np.load(folder / "data.npy")[data.order(18, 0, 0, 1)]).long()
    weights = dict(row_weight="far:8", head_weight=scores, layer_weight={0: 3 * 0.5, 1: 0.5 * 1.0})
    with AttentionDistiller(teachers[0], student, layer_map=[1, 3], **weights) as distiller, torch.no_grad():
        student(input_ids=ids)
        assert entry["attention"] == pytest.approx(distiller.loss().item(), rel=1e-4)


def test_relations_and_temperature(folder, monkeypatch):
    """The loss of a step is that of a distiller with these options."""
    teachers, load_teacher = [], loop.load_teacher
    monkeypatch.setattr(loop, "load_teacher", lambda *given: teachers.append(load_teacher(*given)) or teachers[-1])
    assert (
        run(folder, "relations", "--relations", "qk", "vv", rate=0, batch=1, temperature=2, output_weight=0, steps=1)
        == 0
    )
    entry = json.loads((folder / "relations/log.jsonl").read_text())
    student = LlamaForCausalLM.from_pretrained(folder / "relations/student")
    ids = torch.from_numpy(np.load(folder / "data.npy")[data.order(18, 0, 0, 1)]).long()
    options = dict(relations=("qk", "vv"), temperature=2.0, layer_map=[1, 3])
    with AttentionDistiller(teachers[0], student, **options) as distiller, torch.no_grad():
        student(input_ids=ids)
        assert entry["attention"] == pytest.approx(distiller.loss().item(), rel=1e-4)


def test_a_teacher_that_finds_no_needle(folder, monkeypatch, capsys):
    monkeypatch.setattr(loop, "retrieval_scores", lambda *_: {0: [0.0, 0.0], 1: [0.0, 0.0]})
    assert run(folder, "blind", head_weight="retrieval") == 2
    assert "--head-weight=retrieval: no head of the teacher finds a needle" in capsys.readouterr().err


def test_retrieval_scores_of_the_teacher():
    """A score per student head: the share of needles that its teacher heads find. Both models are those of one run."""
    teacher, student = llama(layers=4), llama(layers=2, heads=2)
    options = Options(context=64, needles=1, needle_lengths=[64])
    texts = data.Sequences(np.random.default_rng(0).integers(0, 100, (4, 64)), ([], []))
    found = retrieval_scores(teacher, student, texts, options, nullcontext)
    assert {i: len(scores) for i, scores in found.items()} == {0: 2, 1: 2}
    assert all(0 <= score <= 1 for scores in found.values() for score in scores) and not student.training


def test_parts_of_the_kl_by_distance_add_up():
    """Also where the cells of a map have different numbers of rows."""
    texts = data.Sequences(np.random.default_rng(0).integers(0, 100, (2, 100)), ([], []))
    options = Options(context=100, needles=0, eval_sequences=2, layer_map=[1, 0])
    found = evaluate(llama(), llama(), texts, options)
    np.testing.assert_allclose(np.sum(found.kl_distance, 1), found.kl_layer, rtol=1e-4)


def test_lengths_without_room_for_a_needle(folder, monkeypatch):
    """They are left out; a line of the log per three steps; the best student is the first that was measured."""
    monkeypatch.setattr(loop.Run, "best", property(lambda run: run.measured[0]))
    options = dict(needle_lengths=f"8,{CONTEXT}", log_every=3, eval_every=1, steps=2)
    assert run(folder, "rare", **options) == 0
    assert [each["length"] for each in evaluation(folder / "rare")["after"]["retrieval"]] == [CONTEXT]
    lines = [json.loads(line) for line in (folder / "rare/log.jsonl").read_text().splitlines()]
    assert ["loss" in line for line in lines] == [False, True, False]
    assert "at step 1" in (folder / "rare/best/README.md").read_text()


def test_start_context():
    """Lengths double, and each takes half as many steps as the one before."""
    lengths = [Options(context=64, start_context=8, steps=150).length_at(step) for step in range(150)]
    assert lengths == [8] * 80 + [16] * 40 + [32] * 20 + [64] * 10
    assert {Options(context=64, steps=9).length_at(step) for step in range(9)} == {64}


def test_lengths_of_the_retrieval_test():
    assert [Options(context=context).lengths for context in (64, 3, 1)] == [[16, 32, 64], [1, 3], [1]]
    assert Options(context=64, needle_lengths=[8]).lengths == [8]


def test_the_rate_warms_up():
    with_it, without = (
        [loop.Run._rate(SimpleNamespace(options=Options(steps=10, warmup=warmup)), step) for step in range(10)]
        for warmup in (0.3, 0.0)
    )
    assert np.divide(with_it, without) == pytest.approx([1 / 3, 2 / 3, *[1] * 8])


def test_short_sequences_are_parts_of_long_ones(folder):
    """Two sequences of 24 tokens are what a batch of two reads from data that is cut so."""
    np.save(folder / "halves.npy", np.load(folder / "data.npy").reshape(-1, 24)[:2])
    np.save(folder / "whole.npy", np.load(folder / "data.npy")[:1])
    common = dict(batch=1, needles=0, eval_sequences=1, held_out=folder / "data.npy")
    assert run(folder, "short", **common, data=folder / "whole.npy", steps=1, start_context=24) == 0
    common |= dict(batch=2, context=24, needle_lengths=24)
    assert run(folder, "cut", **common, data=folder / "halves.npy", steps=1) == 0
    a, b = weights(folder / "short"), weights(folder / "cut")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def test_masked_language_models_of_other_vocabularies(tmp_path):
    """Neither an output KL nor a language loss is measured."""
    for name, size in ("teacher", 100), ("student", 104):
        config = bert(vocabulary=size).config
        BertForMaskedLM._from_config(config).save_pretrained(tmp_path / name)
    np.save(tmp_path / "data.npy", np.zeros((4, CONTEXT), np.int32))
    models = [f"--{name}={tmp_path / name}" for name in ("teacher", "student")]
    assert main(["eval", "--cpu", *models, f"--data={tmp_path / 'data.npy'}", f"--context={CONTEXT}", "--needles=0",
                 "--eval-sequences=2", f"--out={tmp_path / 'out'}"]) == 0  # fmt: skip
    found = evaluation(tmp_path / "out")["student"]
    assert found["kl"] > 0 and found["output_kl"] is None and not found["language_sequence"]


def test_encoder(tmp_path):
    """A model without a language head learns the hidden states. Its heads become fewer and wider."""
    make_teacher(tmp_path, bert)
    assert run(tmp_path, "out", steps=4) == 0
    found = evaluation(tmp_path / "out")
    assert found["after"]["output_kl"] is None and found["after"]["kl"] < found["before"]["kl"]
    assert AutoModel.from_pretrained(tmp_path / "out/student").config.num_attention_heads == 2


def test_student_of_all_layers_and_heads_is_the_teacher(folder):
    maps = dict(map_layers="1,2", map_heads="0,3")
    assert run(folder, "copy", steps=1, student_layers=4, student_heads=4, rate=0.0, needles=0, **maps) == 0
    found = evaluation(folder / "copy")["before"]
    assert [[*each["pair"], each["head"]] for each in found["maps"]] == [[1, 1, 0], [1, 1, 3], [2, 2, 0], [2, 2, 3]]
    assert found["kl"] < 1e-6 and found["output_kl"] < 1e-6


@pytest.mark.parametrize("how", ["mean", "pick"])
def test_heads_of_the_student(folder, how):
    """Of 4 heads and 2 key heads, 2 and 1 are left: means of neighbors, whose outputs add up, or the first of them."""
    options = dict(steps=1, rate=0.0, student_layers=1, init_layers=2, init_heads=how, needles=0, eval_sequences=1)
    assert run(folder, how, **options) == 0
    teacher, student = LlamaForCausalLM.from_pretrained(folder / "teacher").state_dict(), weights(folder / how)
    layer_t, layer_s = "model.layers.2.self_attn", "model.layers.0.self_attn"
    q = teacher[f"{layer_t}.q_proj.weight"].unflatten(0, (2, 2, 8))
    o = teacher[f"{layer_t}.o_proj.weight"].unflatten(1, (2, 2, 8))
    expected = (q.mean(1), o.sum(2)) if how == "mean" else (q[:, 0], o[:, :, 0])
    torch.testing.assert_close(student[f"{layer_s}.q_proj.weight"], expected[0].flatten(0, 1))
    torch.testing.assert_close(student[f"{layer_s}.o_proj.weight"], expected[1].flatten(1, 2))


@torch.no_grad()
def test_example_teacher_attends_to_the_token_before():
    """At every length: RoPE's frequencies must not repeat. This head starts as a function of the distance alone."""
    path = Path(__file__).parents[2] / "examples/lookup/make_teacher.py"
    spec = importlib.util.spec_from_file_location("make_teacher", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, length = example.make_model(8192), 8192
    attention, dim = model.model.layers[1].self_attn, model.config.head_dim
    q, k = (part.bias[:dim].expand(1, 1, length, dim) for part in (attention.q_proj, attention.k_proj))
    q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(q, torch.arange(length)[None]))
    p = (q[0, 0, -1] @ k[0, 0].T / dim**0.5).softmax(-1)
    assert p[-2] > 0.999 and not attention.q_proj.weight[:dim].any() and not attention.k_proj.weight[:dim].any()


# ---- Data ------------------------------------------------------------------------------------------------------------


def test_order_visits_every_sequence_once_per_epoch():
    whole = data.order(7, 3, 0, 21)
    assert [sorted(whole[at : at + 7]) for at in (0, 7, 14)] == [list(range(7))] * 3
    assert whole[:7] != whole[7:14]
    assert whole[5:16] == data.order(7, 3, 5, 11)


@pytest.mark.parametrize("length, together", [(62, 1), (200, 4)])
def test_needles(length, together):
    """Every needle is there once, and the text asks for it at its end."""
    texts = np.random.default_rng(0).integers(10, 100, (3, 200))
    texts[:, 40:] %= 30  # other tokens are rare
    sequences = data.Sequences(texts, ([1], [2]))
    found = np.zeros(DEPTHS)
    room = length - 2 - together * (KEY + VALUE - 1) - (KEY + VALUE)
    for batch in needle_batches(sequences, length, 2, seed=0):
        assert batch.depths.shape[1] == together and len(batch.rows) == together * VALUE
        for row, depths, places, answers in zip(batch.ids, batch.depths, batch.places, batch.answers()):
            assert len(row) == length and row[0] == 1 and row[-1] == 2
            asked = row[1 : length - 1].unfold(0, KEY + VALUE - 1, 1)
            for number, (depth, place) in enumerate(zip(depths, places)):
                needle = row[place : place + KEY + VALUE]
                assert torch.equal(needle[KEY:], answers[number])
                assert (asked == needle[:-1]).all(1).sum() == 2  # the needle, and where the text asks for it
                rows = batch.rows[number * VALUE : (number + 1) * VALUE]
                assert torch.equal(row[rows], needle[KEY - 1 : -1])  # their next tokens are the value
                assert depth * room // DEPTHS <= place - 1 < (depth + 1) * room / DEPTHS
                found[depth] += 1
    assert (found == 2).all()


class Row:
    """Attention to one key: of teacher and student, for each head and row."""

    def __init__(self, teacher, student):
        self.keys = torch.tensor([teacher, student])

    def row_probabilities(self, rows, cache):
        return torch.nn.functional.one_hot(self.keys, 64)


def test_retrieval_counts_the_rows_of_the_teacher():
    """Two needles of a text, at 10 and 30, one head that retrieves and one that does not; rows 52 to 59."""
    teacher = [[[10, 21, 10, 10, 41, 3, 3, 30], [0] * 8]]
    student = [[[12, 5, 10, 10, 7, 30, 30, 30], [10] * 8]]
    batch = NeedleBatch(torch.zeros(1, 64), np.array([[0, 2]]), np.array([[10, 30]]), list(range(52, 60)))
    retrieval = Retrieval()
    retrieval.add_attention({(1, 3): Row(teacher, student)}, batch)
    right = torch.tensor([[[True, True, True, True], [False, True, False, False]]])
    retrieval.add_answers(batch, right, torch.tensor([[[True, False, True, True], [True, True, True, False]]]))
    found = retrieval.result(64, True)
    assert found["heads"] == [[1, 3, 0]] and found["rows"] == 8
    assert found["attention"] == dict(teacher=[1, None, 0.5] + [None] * 5, student=[0.75, None, 0.75] + [None] * 5)
    assert found["kept"] == dict(attention=[0.75, None, 0.5] + [None] * 5, answers=[0.75, None, 1.0] + [None] * 5)
    assert found["kept_of"] == dict(attention=[4, 0, 2] + [0] * 5, answers=[4, 0, 1] + [0] * 5)
    assert found["missed"] == 2
    assert retrieval.scores() == {1: [0.75, 0.0]}
    assert found["misses"] == [
        dict(head=[1, 3, 0], depth=0, needle=10, row=53, key=5), dict(head=[1, 3, 0], depth=2, needle=30, row=56, key=7)
    ]  # fmt: skip


def test_retrieval_of_a_layer_with_two_teacher_layers():
    """Lengths differ in which layers have a sliding window: each score is a share of the rows of the layer itself."""
    batch = NeedleBatch(torch.zeros(1, 64), np.array([[0]]), np.array([[10]]), list(range(52, 56)))
    found, missed = (Row([[[key] * 4]], [[[0] * 4]]) for key in (10, 40))
    retrieval = Retrieval()
    for pairs in {(0, 0): found, (1, 0): found}, {(0, 1): missed, (1, 0): found}:
        retrieval.add_attention(pairs, batch)
    assert retrieval.scores() == {0: [0.5], 1: [1.0]}


class Words:
    """A tokenizer: one token per letter, between 1 and 2."""

    eos_token_id, sep_token_id = 3, 4

    def __call__(self, text, add_special_tokens=True, **_):
        ids = [ord(letter) - ord("a") + 10 for letter in text]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def test_text_and_jsonl(folder, tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "b.jsonl").write_text('{"text": "abc"}\n\n{"text": [20, 21]}\n')
    teacher = LlamaForCausalLM.from_pretrained(folder / "teacher")
    options = Options(context=6)
    found = data.load_all([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], options, Words(), teacher)
    assert found.batch([0, 1, 2]).tolist() == [[1, 10, 11, 12, 13, 2], [1, 14, 15, 3, 10, 2], [1, 11, 12, 3, 20, 2]]


def test_tables_are_cut(folder, tmp_path):
    """Whatever their length, all tokens are read that fill a sequence."""
    teacher = LlamaForCausalLM.from_pretrained(folder / "teacher")
    np.save(tmp_path / "table.npy", np.arange(20).reshape(2, 10))
    np.save(tmp_path / "stream.npy", np.arange(30, 35))
    paths = [str(tmp_path / name) for name in ("table.npy", "stream.npy")]
    for length, expected in (
        (5, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]),
        (4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ):
        found = data.load_all(paths, Options(context=length), Words(), teacher)
        assert found.batch(list(range(len(expected)))).tolist() == expected
        assert found.batch([4]).tolist() == [list(range(30, 30 + length))]


def test_tokens_get_no_special_tokens(folder, tmp_path):
    (tmp_path / "a.txt").write_text("abcdef")
    np.save(tmp_path / "table.npy", np.arange(20).reshape(2, 10))
    teacher = LlamaForCausalLM.from_pretrained(folder / "teacher")
    with pytest.raises(UserError, match="table.npy: is tokens, and the tokenizer puts special tokens around text"):
        data.load_all([str(tmp_path / name) for name in ("a.txt", "table.npy")], Options(context=6), Words(), teacher)


def test_packed_lines_parquet_and_datasets(folder, tmp_path, monkeypatch):
    """All have the same two documents."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    records = [dict(text="abcdef", other=1), dict(text="ghijkl", other=2)]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    dataset = datasets.Dataset.from_list(records)
    dataset.save_to_disk(tmp_path / "saved")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **options: asked.append((given, options)) or dataset)
    teacher = LlamaForCausalLM.from_pretrained(folder / "teacher")
    names = ["corpus/name:en:validation", "corpus/name"]
    for path in *(str(tmp_path / each) for each in ("a.jsonl.gz", "a.parquet", "saved")), *names:
        found = data.load_all([path], Options(context=9), Words(), teacher)
        assert found.batch([0, 1]).tolist() == [[1, *range(10, 16), 3, 2], [1, *range(16, 22), 3, 2]]
    assert asked == [(("corpus/name", "en"), dict(split="validation")), (("corpus/name",), dict(split="train"))]


# ---- Errors ----------------------------------------------------------------------------------------------------------


ERRORS = {
    "context=1": (dict(context=1), "--context=1: must be 2.."),
    "no teacher": (dict(teacher=None), "--teacher: is missing"),
    "no data": (dict(data=None), "--data: is missing"),
    "no loss": (dict(attention_weight=0, output_weight=0), "at least one must be above 0"),
    "no control": (["--control", "--output-weight", "0"], "--control: needs"),
    "no comparison": (["--control", "--eval-sequences", "0"], "--control: needs --eval-sequences above 0"),
    "temperature": (dict(temperature=0), "--temperature=0.0: must be 1e-06.."),
    "teacher": (dict(teacher="nowhere"), "--teacher nowhere: must be a folder with a config.json"),
    "layers": (dict(student_layers=9), "--student-layers=9: must be 1..4"),
    "heads": (dict(student_heads=3), "--student-heads=3: must divide 4"),
    "init layers": (dict(init_layers="0,9"), "--init-layers=[0, 9]: must be 2 numbers from 0 to 3"),
    "both students": (["--student", "x"], "--student: its folder says its shape"),
    "too long": (dict(context=4096), "--context=4096: the teacher has positions for 2048"),
    "start context": (dict(start_context=36), "--start-context=36: --context must be 1, 2, 4, 8, ... times as long"),
    "layer map": (dict(layer_map="1,9"), "--layer-map[1]=9: the student has layers 0..1, the teacher 0..3"),
    "map layers": (dict(map_layers="7"), "--map-layers=[7]: the student has the layers [0, 1]"),
    "map heads": (dict(map_heads="0,2"), "--map-heads=[2]: the student has the heads [0, 1]"),
    "missing data": (dict(data="nowhere.npy"), "nowhere.npy: cannot be read"),
    "few": (dict(context=49), "data.npy: has sequences of 48 tokens: --context needs 49"),
    "row weight": (dict(row_weight="near"), "--row-weight='near': must be 'far', 'far:TOKENS' or 'kl'"),
    "near": (
        dict(row_weight=f"far:{CONTEXT}"),
        "--row-weight=far:48: must be below --context=48: no key is that far away",
    ),
    "first phase": (
        ["--attention-until", "0.5", "--output-weight", "0"],
        "--attention-until=0.5: needs --output-weight, --language-weight or --hidden-weight above 0",
    ),
    "long needles": (
        dict(needle_lengths=f"8,{2 * CONTEXT}"),
        "--needle-lengths=[8, 96]: must be 1..48, the --context",
    ),
    "negative needles": (dict(needle_lengths="-5"), "--needle-lengths=[-5]: must be 1..48, the --context"),
    "key heads": (
        ["--relations", "kk", "--row-weight", "far:8"],
        "student layer 0 and teacher layer 1: relation 'kk' compares 1 key heads of the student, and row_weight and head_weight "
        "weight its 2 heads: leave out the relation or the weights",
    ),
    "head weight": (dict(head_weight="retrieval", needles=0), "--head-weight=retrieval: needs --needles above 0"),
    "layer weight": (
        dict(layer_weight="0,0"),
        "--layer-weight=[0.0, 0.0]: must not be negative, and one must be above 0",
    ),
    "layer weights": (dict(layer_weight="1"), "--layer-weight=[1.0]: must have 2 numbers, one per student layer"),
    "cut sequences": (
        ["--context-parallel", "5"],
        "--context-parallel=5: --context and --start-context must be multiples",
    ),
    "sampled rows": (
        ["--context-parallel", "2", "--sample-rows", "0.5"],
        "must be multiples of twice as many, and --sample-rows 1",
    ),
    "cut weights": (
        ["--context-parallel", "2", "--row-weight", "far"],
        "--row-weight=far: must be left out with --context-parallel",
    ),
    "processes": (["--context-parallel", "2"], "--context-parallel=2: must divide 1, the number of processes"),
    "measurements": (
        ["--eval-every", "1", "--eval-sequences", "0"],
        "--eval-every=1: needs --eval-sequences above 0",
    ),
    "either": (["--resume", "--overwrite"], "--resume and --overwrite: only one of them"),
    "TOML": (["--options", "nowhere.toml"], "nowhere.toml: "),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(folder, capsys, case):
    given, message = ERRORS[case]
    more, options = (given, {}) if isinstance(given, list) else ([], given)
    assert run(folder, "errors", *more, **options) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("broken.npy", b"\x93NUMPY\x01\x00garbage", "broken.npy: cannot be read"),
        ("floats.npy", None, r"float64\[2, 3\]: must be whole numbers"),
        ("broken.safetensors", b"\xff" * 40, "broken.safetensors: cannot be read"),
        ("broken.jsonl", b'{"text": \n', "broken.jsonl: cannot be read"),
        ("other.jsonl", b'{"words": "a"}\n', "other.jsonl:1: has no field 'text'"),
        (
            "fractions.jsonl",
            b'{"text": [1, 2]}\n{"text": [1.5]}\n',
            "fractions.jsonl:2: 'text' is a list: must contain whole numbers",
        ),
        ("packed.txt", b"\x28\xb5\x2f\xfd" * 9, "packed.txt: is a zstd file: unpack it"),
        ("broken.parquet", b"PAR1 nothing else", "broken.parquet: cannot be read"),
        ("latin.txt", b"\xe4\xf6\xfc" * 9, "latin.txt: cannot be read"),
        ("short.txt", b"abc", "short.txt: has 4 tokens: a sequence needs 46"),
    ],
)
def test_broken_data(folder, tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content) if content else np.save(path, np.zeros((2, 3)))
    teacher = LlamaForCausalLM.from_pretrained(folder / "teacher")
    with pytest.raises(UserError, match=message):
        data.load_all([str(path)], Options(context=CONTEXT), Words(), teacher)


def test_special_tokens_alone_are_no_sequence(folder, tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    teacher = LlamaForCausalLM.from_pretrained(folder / "teacher")
    with pytest.raises(UserError, match="--context=2: must be above 2, the special tokens of a sequence"):
        data.load_all([str(tmp_path / "a.txt")], Options(context=2), Words(), teacher)


def test_sequences_with_special_tokens_cannot_be_cut(folder, tmp_path):
    (tmp_path / "a.txt").write_text("abcdef" * 20)
    teacher = LlamaForCausalLM.from_pretrained(folder / "teacher")
    with pytest.raises(UserError, match="--start-context: must be 0: the tokenizer puts special tokens"):
        data.load(Options(data=[str(tmp_path / "a.txt")], context=16, start_context=8), Words(), teacher)


def test_a_folder_that_cannot_be_written(folder, capsys):
    assert run(folder, "data.npy/out") == 2
    error = capsys.readouterr().err
    assert f"{folder / 'data.npy/out'}" in error and "cannot be written" in error and "Traceback" not in error


def test_heads_that_do_not_divide(folder, tmp_path, capsys):
    llama(layers=2, heads=3, key_heads=3, hidden=24).save_pretrained(tmp_path / "student")
    assert run(folder, "errors", student=tmp_path / "student", student_layers=None, student_heads=None) == 2
    error = capsys.readouterr().err
    assert "4 heads are not a multiple of 3: pass a --head-map" in error and "Traceback" not in error


def test_a_diverged_run_stops_with_a_report(folder, capsys):
    assert run(folder, "diverged", rate=1e30, clip=0, needles=0, checkpoint_every=0) == 2
    error = capsys.readouterr().err
    assert "step 2 of 6 diverged: " in error and "use a smaller --rate; there is no checkpoint" in error
    assert "Traceback" not in error and not (folder / "diverged/student").exists()
    document = browser.document_of((folder / "diverged/report.html").read_text())
    assert "The run stopped: step 2 of 6 diverged" in document["lead"]
    assert (folder / "diverged/log.jsonl").read_text().count("\n") == 1


def test_a_control_that_diverges_leaves_the_results(folder, capsys, monkeypatch):
    train = loop.Run.train

    def diverge(self):
        if not self.options.control:
            raise loop.Diverged("step 2 of 6 diverged: loss nan")
        train(self)

    monkeypatch.setattr(loop.Run, "train", diverge)
    assert run(folder, "diverged_control", "--control", needles=0) == 2
    assert "step 2 of 6 diverged: loss nan: use a smaller --rate" in capsys.readouterr().err
    out = folder / "diverged_control"
    assert (out / "student").exists() and (out / "control/report.html").exists()


def test_a_fault_of_the_program_is_no_mistake_of_the_user(monkeypatch):
    def fail(_):
        raise ValueError("a fault")

    monkeypatch.setattr(cli, "_distill", fail)
    with pytest.raises(ValueError, match="a fault"):
        main([])


def test_packages_and_models_that_are_missing(monkeypatch, capsys):
    assert main(["eval", "--teacher", "x", "--data", "y"]) == 2
    assert "--student: is missing" in capsys.readouterr().err
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "accelerate" else name)
    assert main(["--teacher", "x", "--data", "y"]) == 2
    assert "needs accelerate: pip install 'streamkl[distill]'" in capsys.readouterr().err


def test_a_column_that_is_missing(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([dict(words="a", others="b")]), tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match="a.parquet: has the columns words, others, and not 'text': pass --text-field"
    ):
        list(data._parquet(str(tmp_path / "a.parquet"), "text"))


def test_trackers_receive_the_log(tmp_path, monkeypatch):
    """tests/python/test_distill_sources.py has real ones."""
    given, options = [], Options(out=str(tmp_path), track=["wandb"], steps=7)
    monkeypatch.setattr(devices, "get_available_trackers", lambda: ["tensorboard", "wandb"])
    monkeypatch.setattr(devices, "Accelerator", lambda **told: given.append(told) or SimpleNamespace(num_processes=1))
    devices.make_accelerator(options)
    assert given.pop()["log_with"] == ["wandb"]
    accelerator = SimpleNamespace(
        is_main_process=True, init_trackers=lambda *_, **told: given.append(told), log=lambda *told, **at: given.append((told, at)),
        end_training=lambda: given.append("end"),
    )  # fmt: skip
    with Log(options, [], accelerator) as log:
        log.add(dict(step=3, loss=0.5))
    (told, *others) = given
    assert told["config"]["steps"] == 7 and told["init_kwargs"]["wandb"]["name"] == tmp_path.name
    assert others == [((dict(loss=0.5),), dict(step=3)), "end"]
    assert json.loads((tmp_path / "log.jsonl").read_text()) == dict(step=3, loss=0.5)


def test_processes_that_form_no_group(monkeypatch):
    monkeypatch.setattr(devices, "Accelerator", lambda **_: SimpleNamespace(num_processes=1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes were started, and accelerate has formed a group of 1"):
        devices.make_accelerator(Options(cpu=True))


def test_fsdp_of_accelerate_is_refused():
    accelerator = SimpleNamespace(distributed_type=loop.DistributedType.FSDP)
    with pytest.raises(UserError, match="accelerate's FSDP: leave it out of its configuration and pass --shard"):
        loop.Run._wrap(SimpleNamespace(options=Options(), accelerator=accelerator))


def test_a_second_ctrl_c_ends_the_run_at_once(monkeypatch):
    with loop._Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pressed == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    # An evaluation asks, too: an exception within a callback of C does not reach it.
    monkeypatch.setattr(loop, "evaluate", lambda *_, progress, **__: progress(1, 2))
    run = SimpleNamespace(
        _is_main=False, interrupts=interrupts, accelerator=SimpleNamespace(autocast=None), options=None
    )
    run.teacher = run.student = run.held_out = run.wrapped = None
    with pytest.raises(KeyboardInterrupt):
        loop.Run._evaluate(run, "now")


def test_a_run_of_no_steps_has_no_summary():
    assert summary(SimpleNamespace(before=None, after=None, history=[], measured=[]), None) == ""


def test_heads_of_a_head_map():
    assert _heads_of(SimpleNamespace(heads={0: 3, 2: 1})) == [[0, 3], [2, 1]]


def test_the_package_has_the_function_of_the_command():
    assert distill is loop.distill


def test_numbers_that_json_does_not_have():
    assert to_json(dict(a=[float("nan"), 1.5], b=(float("inf"),))) == '{"a":[null,1.5],"b":[null]}'


def test_names_of_other_programs(capsys):
    parser = Parser()
    add_arguments(parser)
    found = options_from(parser.parse_args(["--lr", "1e-3", "--batch-size=4", "--output-dir", "x"]))
    assert (found.rate, found.batch, found.out) == (1e-3, 4, "x")
    with pytest.raises(SystemExit):
        parser.parse_args(["--learn-rate", "1"])
    assert "--learn-rate: is no option; did you mean --learning-rate?" in capsys.readouterr().err


def test_text_needs_a_tokenizer(folder, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc")
    assert run(folder, "errors", data=tmp_path / "a.txt") == 2
    assert "the teacher's folder has no tokenizer" in capsys.readouterr().err


def test_tokens_that_the_teacher_does_not_know(folder, tmp_path, capsys):
    np.save(tmp_path / "tokens.npy", np.full((9, CONTEXT), 100))
    assert run(folder, "errors", data=tmp_path / "tokens.npy") == 2
    assert "has tokens 100..100: the teacher knows 0..99" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("steps = 'many'", "steps='many': must be int"),
        ("steps = true", "steps=True: must be int"),
        ("layer-map = 3", "layer-map=3: must be a list of int"),
        ("precision = 'int8'", "must be float32 or bfloat16"),
        ("color = 3", "color: is no option"),
        ("steps =", "options.toml: "),
    ],
)
def test_toml_errors(tmp_path, text, message):
    (tmp_path / "options.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_toml(str(tmp_path / "options.toml"))


def test_command_line_wins_over_the_file(tmp_path, folder):
    (tmp_path / "options.toml").write_text("rate = 1\nsteps = 99\nlayer-map = [2, 3]\n")
    parser = Parser()
    add_arguments(parser)
    found = options_from(
        parser.parse_args([*arguments(folder, "x", rate=None), "--options", str(tmp_path / "options.toml")])
    )
    assert (found.rate, found.steps, found.layer_map) == (1.0, 6, [2, 3])
    assert options_from(parser.parse_args([])) == Options()
