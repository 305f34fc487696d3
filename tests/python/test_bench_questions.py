"""The questions of bench/run.py on the CPU, with small problems: results agree with float64, and wrong ones are found."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import streamkl

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from harness import attention  # noqa: E402
from harness.attention import FORWARD_GIVEN, AttentionCalls, Exact, Shape, prepared_calls, random_tensors  # noqa: E402
from harness.library import BACKWARD, FORWARD, ONE_PASS, STEP  # noqa: E402
from harness.report import too_large  # noqa: E402
from harness.run import PEER_WRONG, Run, make_peer  # noqa: E402
from harness.timing import Prepared, Timing  # noqa: E402
from peers.attention import PEERS  # noqa: E402
from peers.linearard import linearard  # noqa: E402
from questions import call, cpu_attention, indexer, overhead, peers, pooled, shapes, stats, step  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_mkldnn():
    """Without bf16 instructions, each of its products raises and catches an exception, which takes milliseconds."""
    torch.manual_seed(1)
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def run_of(question, csv=None, **options):
    given = dict(device="cpu", commit="C", seed=1, csv=csv, rounds=3, sample_ms=0)
    return Run(question, SimpleNamespace(**{**given, **options}))


# ---- Peers ---------------------------------------------------------------------------------------------------------


def small(**options):
    return Shape("", 4, 2, 32, 4, 2, 32, length=50, **options)


@pytest.mark.parametrize(
    "shape", [small(), small(causal=False, packed=(40, 9)), small(batch=2)], ids=("dense", "packed", "batch")
)
def test_our_methods_agree_with_float64(shape):
    calls = prepared_calls(shape, CPU)
    for all_rows in False, True:
        exact = Exact(shape, calls.tensors, all_rows)
        two_passes, one_pass = peers.ours(calls, exact.weight)
        for method in two_passes, one_pass:
            errors = exact.errors(method.step())
            assert errors.keys() == {"kl", "dq_s", "dk_s"} and not too_large(errors, exact.limits)


def test_eager_pytorch_is_a_peer_and_another_loss_is_none():
    shape = replace(small(), key_heads_t=4, key_heads_s=4)
    tensors = random_tensors(shape, CPU)
    exact = Exact(shape, tensors)
    peer = make_peer("eager", lambda: PEERS["eager"](tensors, shape, exact.weight), exact, CPU)
    assert (
        not peer.refusal
        and peer.errors.keys() == {"kl", "dq_s", "dk_s"}
        and isinstance(peer.calls[BACKWARD], Prepared)
    )
    other = replace(shape, causal=False)
    peer = make_peer("eager", lambda: PEERS["eager"](tensors, other, exact.weight), exact, CPU)
    assert peer.refusal.startswith("it computes something else: kl is off by ") and not peer.calls
    peer = make_peer("cudnn", lambda: PEERS["cudnn"](tensors, shape, exact.weight), exact, CPU)
    assert peer.refusal, "there is no cuDNN on a CPU"


STAND_IN = """
import torch
from .scale import scale_of

def attn_kl_align(qs, ks, qt, kt, attn_mask=None, causal=True):
    hidden = torch.ones(qs.shape[2], ks.shape[2], dtype=torch.bool).triu(1 if causal else 1 << 20)
    x, y = (scale_of(q) * (q.float() @ k.float().mT).masked_fill(hidden, -1e30) for q, k in ((qt, kt), (qs, ks)))
    log_p, log_s = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
    return (log_p.exp() * (log_p - log_s)).sum()
"""


def make_checkout(folder, scale):
    """A folder with the names of LinearARD's entry point, and other code."""
    kernels = folder / "kernels/attention_KL"
    kernels.mkdir(parents=True)
    (kernels / "integration.py").write_text(STAND_IN)
    (kernels / "scale.py").write_text(f"def scale_of(q):\n    return {scale} * q.shape[-1] ** -0.5\n")
    return folder


def test_linearard_is_imported_from_its_checkout_and_compared_by_its_sum(tmp_path):
    shape = Shape("", 3, 3, 32, 3, 3, 32, length=40)
    tensors = random_tensors(shape, CPU)
    exact = Exact(shape, tensors, all_rows=True)
    for scale, is_right in (1, True), (2, False):
        checkout = make_checkout(tmp_path / f"LinearARD-{scale}", scale)
        method = linearard(checkout)(tensors, shape, exact.weight)
        assert method.kernel == f"LinearARD {scale}", "the commit, from the name of an archive's folder"
        errors = exact.errors(method.step())
        assert errors.keys() == {"kl", "dq_s", "dk_s"}
        assert all((error <= PEER_WRONG) is is_right for error in errors.values())
        assert method.calls[FORWARD]().dim() == 0 and len(method.calls[BACKWARD].prepare()()) == 2


@pytest.mark.parametrize("options", [dict(), dict(packed=(40, 9))], ids=str)
def test_rows_of_a_run_with_peers(options):
    shape = replace(small(**options), key_heads_t=4, key_heads_s=4)
    result = peers.measure(shape, run_of(peers, peers=["eager"], linearard=None, deterministic=True))
    assert not result.wrong and any("forward: " in line for line in result.lines)
    found = [(row["method"], row["pass"]) for row in result.rows]
    ours = [("streamkl", name) for name in (FORWARD, BACKWARD, STEP, ONE_PASS)]
    ours += [("deterministic", BACKWARD), ("deterministic", ONE_PASS)]
    others = [("dense" if options else "eager", name) for name in (FORWARD, BACKWARD, STEP)]
    assert found == ours + others + ([("dense", ONE_PASS)] if options else [])
    assert result.rows[0].get("note", "").endswith(" of the dense rate" if options else "")


# ---- Shapes --------------------------------------------------------------------------------------------------------


def short(shape):
    """A sequence of 60 tokens, and a window that fits."""
    return replace(
        shape, length=60, batch=min(shape.batch, 2), window=shape.window // 100 if shape.window > 0 else -1
    )


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda shape: shape.name)
def test_every_shape_agrees_with_float64(shape):
    errors, wrong = shapes.check(short(shape), CPU)
    assert not wrong
    assert errors.keys() == {"kl", "dq_s", "dk_s"} | ({"dq_t", "dk_t"} if shape.teacher_gradients else set())


@pytest.mark.parametrize("change", [{"softcap": 0.0}, {"reverse": True}, {"window": 20}, {"causal": False}], ids=str)
def test_a_wrong_result_is_found(change, monkeypatch):
    """Exact results of one problem, and those of the library for another."""
    shape = replace(short(shapes.BASE), softcap=50.0)
    monkeypatch.setattr(
        shapes, "AttentionCalls", lambda tensors, _, weight: AttentionCalls(tensors, replace(shape, **change), weight)
    )
    assert shapes.check(shape, CPU)[1]


def test_a_shape_is_timed_with_the_base_shape_and_eager_pytorch():
    run, base = run_of(shapes, check=True), short(shapes.BASE)
    result = shapes.measure(short(shapes.SHAPES[2]), run, base)
    rows = {row["pass"]: row for row in result.rows}
    assert not result.wrong and list(rows) == [FORWARD, BACKWARD, ONE_PASS, FORWARD_GIVEN, STEP]
    assert float(rows[STEP]["ms"]) >= max(float(rows[name]["ms"]) for name in (FORWARD, BACKWARD))
    one_pass = rows[ONE_PASS]
    assert float(one_pass["base_ratio"]) == pytest.approx(
        float(one_pass["ms"]) / float(one_pass["base_ms"]), rel=0.01
    )
    assert rows[FORWARD]["kernel"].startswith("cpu_") and " " not in rows[FORWARD]["kernel"]
    assert not rows[FORWARD]["cudnn_ms"] and [note.split(":")[0] for note in result.notes] == ["cudnn not measured"]
    assert float(rows[FORWARD]["dk_error"]) < 2e-2
    alone = shapes.measure(base, run_of(shapes, check=False), base)
    assert {row["base_ratio"] for row in alone.rows} == {"1"}


def test_the_step_of_teacher_groups_is_that_of_attention_kl(monkeypatch):
    monkeypatch.setattr(attention, "lses_first", lambda *_: True)  # as on a GPU
    assert not shapes.check(short(shapes.SHAPES[2]), CPU)[1]
    calls = prepared_calls(short(shapes.SHAPES[2]), CPU)
    assert list(calls.calls)[-1] == STEP and len(calls.calls[STEP]) == 2


# ---- The public call -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [call.CASES[4], call.CASES[5]], ids=lambda case: case.name)
def test_calls_of_the_attention_with_its_kl(case):
    tiny = dict(length=24, dim_t=16, dim_s=16, heads_t=8, key_heads_t=4, heads_s=8 // (case.heads_t // case.heads_s))
    result = call.measure(replace(case, key_heads_s=tiny["heads_s"] // 2, **tiny), run_of(call))
    assert not result.wrong
    assert [row["method"] for row in result.rows] == [call.ALONE, call.GRADIENT, call.VALUE, call.NO_LSE, call.APART]
    assert result.rows[0]["added"] == "+0" and all(float(row["ms"]) > 0 for row in result.rows)


def test_a_call_that_is_slower_than_apart_is_wrong():
    timings = {method: Timing([1.0]) for method in (call.GRADIENT, call.VALUE, call.APART)}
    assert call.slower_ways(timings) == []
    assert call.slower_ways(timings | {call.VALUE: Timing([1.1])}) == ["value takes longer than apart"]
    assert call.slower_ways(timings | {call.VALUE: Timing([0.9, 1.2, 1.3])}) == []  # the median of a busy host


# ---- Indexers ------------------------------------------------------------------------------------------------------


def small_indexer(top_k, causal=True):
    return indexer.IndexerCase(
        50, heads=4, key_heads=2, dim=32, index_heads=3, index_dim=16, top_k=top_k, causal=causal
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("top_k", [0, 9, 60])
def test_indexer_methods_agree_with_float64(top_k, causal):
    case = small_indexer(top_k, causal)
    tensors = indexer.make_tensors(case, CPU)
    whole = indexer.ExactRows(tensors, case, torch.arange(50))
    some = indexer.ExactRows(tensors, case, indexer.some_rows(case, CPU, 7))
    assert whole.exact.keys() == {"kl", "dq", "dk", "dw"} and some.exact.keys() == {"kl", "dq", "dw"}
    methods, launches = indexer.ours(tensors, case)
    assert any("dw_s" in line for line in launches)
    for method in methods:
        results = method.step()
        for exact in (whole, some):
            assert not too_large(exact.errors(results), exact.limits)
    if top_k:
        return
    assert all(error <= PEER_WRONG for error in whole.errors(indexer.naive(tensors, case).step()).values())
    in_float64 = {name: tensor.double() for name, tensor in tensors.items()}
    assert all(error <= 1e-12 for error in whole.errors(indexer.naive(in_float64, case).step()).values())


@pytest.mark.parametrize("top_blocks", [0, 2])
def test_pooled_teachers_agree_with_float64(top_blocks):
    given = dict(block=8, top_blocks=top_blocks, index_heads=2, causal=True)
    case = replace(pooled.cases(SimpleNamespace(**given))[0], length=50, heads=4, key_heads=2, dim=32, index_dim=16)
    for name, pooling in pooled.teachers(case.block).items():
        methods, lines = pooled.examined(name, replace(case, pooling=pooling), CPU, exact_rows=50)
        assert [method.name for method in methods] == [name, f"{name}, no LSE given"] and lines[0].startswith(
            f"{name}: "
        )
        for method in methods:
            assert method.errors.keys() == {"kl", "dq", "dk", "dw"} and not method.wrong and not method.refusal


def test_forward_alone_equals_the_forward_of_a_step():
    case = small_indexer(0)
    calls = indexer.IndexerCalls(indexer.make_tensors(case, CPU), case)
    calls.run(FORWARD)
    kl = calls.kl.clone()
    calls.run(STEP)
    torch.testing.assert_close(calls.kl, kl)


TILELANG_EXAMPLE = {
    "sparse_mla_topk_reducesum": """
import torch
def sparse_mla_topk_reducesum_interface(q, kv, indices, lse, offsets, dim_v):
    logits = torch.einsum("ihd,ijd->ihj", q.float(), kv[indices[:, 0].clamp(min=0), 0].float()) * q.shape[-1] ** -0.5
    p = (logits - lse[..., None]).exp().masked_fill(indices < 0, 0).sum(1, keepdim=True)
    return p / p.sum(-1, keepdim=True)
""",
    "indexer_bwd": """
import torch
def indexer_bwd_interface(q, weights, k, p, s, indices, offsets):
    q, weights = (tensor.detach().float().requires_grad_() for tensor in (q, weights))
    dots = torch.einsum("igd,ijd->igj", q, k[indices.clamp(min=0)].float()).relu() * q.shape[-1] ** -0.5
    logits = torch.einsum("ig,igj->ij", weights, dots)
    return *torch.autograd.grad(logits, (q, weights), s - p), None
""",
}


def test_a_tilelang_example_is_a_peer(tmp_path):
    """A step of functions with the example's signatures has our gradients; other head sizes are refused."""
    for name, text in TILELANG_EXAMPLE.items():
        (tmp_path / f"{name}.py").write_text(text)
    for dim in 576, 32:
        case = replace(small_indexer(9), heads=4, key_heads=1, dim=dim)
        measured = indexer.measure(case, run_of(indexer, tilelang=tmp_path))
        (row,) = [row for row in measured.rows if row["method"] == "tilelang"]
        if dim == 576:
            assert row["pass"] == STEP and float(row["dq_error"]) < PEER_WRONG and float(row["dw_error"]) < PEER_WRONG
        else:
            assert "one key head of 512 + 64 dimensions" in row["note"]


@pytest.mark.parametrize("top_k", [0, 9])
def test_rows_of_an_indexer(top_k):
    result = indexer.measure(small_indexer(top_k), run_of(indexer, tilelang=None))
    assert not result.wrong and result.lines[1].startswith("N=50, no LSE given: relative errors: kl ")
    assert all(bool(row["naive_ratio"]) is not bool(top_k) for row in result.rows if row["method"] == "streamkl")
    found = {row["method"] for row in result.rows if row.get("ms")}
    assert found == {"streamkl", "no LSE given"} | (set() if top_k else {"naive"})
    notes = {row["method"]: row["note"] for row in result.rows if "note" in row}
    assert notes == ({"naive": "not measured: ValueError: it is for all keys"} if top_k else {})


# ---- A training step -----------------------------------------------------------------------------------------------


TEACHER = step.Model(8, 2, 16, hidden=64, mlp=96)
STUDENTS = [step.Model(heads, 2, dim, hidden=32, mlp=48) for heads, dim in ((8, 8), (4, 16), (2, 16))]


def setup(kind, student, **others):
    return step.Setup(kind, student, 24, teacher=TEACHER, **others)


@pytest.mark.parametrize("student", STUDENTS, ids=str)
def test_the_loss_of_layers_does_not_depend_on_where_the_lses_come_from(student, monkeypatch):
    options, own = [], streamkl.attention_kl
    monkeypatch.setattr(
        streamkl, "attention_kl", lambda *tensors, **given: options.append(given) or own(*tensors, **given)
    )
    steps = step.layer_steps(setup(step.LAYERS, student), CPU)
    losses = {variant: run().item() for variant, run in steps.items()}
    assert list(losses) == [step.NO_LOSS, step.GIVEN, step.COMPUTED, step.CARRIED, step.GRADIENT_ONLY]
    assert (
        losses[step.CARRIED] == losses[step.GRADIENT_ONLY] == losses[step.NO_LOSS]
    )  # the KL comes with the backward
    assert ["lse_s" in given and "lse_t" in given for given in options] == [True, True, False, False], (
        "two layers each"
    )
    assert losses[step.GIVEN] == pytest.approx(losses[step.COMPUTED], rel=1e-3)
    assert losses[step.GIVEN] > losses[step.NO_LOSS] * 1.0001


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_distiller_adds_to_the_loss_of_transformers_models(checkpointing):
    steps = step.hugging_face_steps(setup(step.HUGGING_FACE, STUDENTS[1], checkpointing=checkpointing), CPU)
    losses = {variant: run().item() for variant, run in steps.items()}
    assert losses[step.DISTILLER] > losses[step.NO_LOSS]
    assert losses[step.FUSED_DISTILLER] == pytest.approx(losses[step.DISTILLER], rel=1e-3)
    assert steps[step.NO_LOSS]().item() == losses[step.NO_LOSS], "a step leaves nothing"


def test_rows_of_steps():
    run = run_of(step)
    bad = step.measure(setup(step.LAYERS, replace(STUDENTS[0], heads=5, key_heads=5)), run)
    assert bad.wrong[0].startswith("LSEs given failed: ValueError: q_t [1, 8, 24, 16]")
    assert [row["method"] for row in bad.rows if row.get("ms")] == [step.NO_LOSS]
    for kind, student in (step.LAYERS, STUDENTS[1]), (step.HUGGING_FACE, STUDENTS[2]):
        result = step.measure(setup(kind, student), run)
        assert not result.wrong and [row["method"] for row in result.rows] == list(step.VARIANTS[kind])
        percents = ["percent" in row for row in result.rows]
        assert percents == [variant != step.NO_LOSS for variant in step.VARIANTS[kind]]


# ---- Statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_statistics_and_flex_attention_agree_with_float64(causal, monkeypatch):
    monkeypatch.setattr("peers.attention.compiled", lambda function: function)
    shape = stats.case("", dim=16, heads_t=4, heads_s=4, key_heads_t=2, key_heads_s=2, length=128, causal=causal)
    calls = stats.StatsCalls(shape, CPU)
    sums = stats.flex(calls)().exp()
    assert not calls.wrong(sums)
    assert [line.split()[0] for line in calls.wrong(sums + 0.1)] == [stats.FLEX]


def test_rows_of_statistics(monkeypatch):
    monkeypatch.setattr("peers.attention.compiled", lambda function: function)
    shape = stats.case("", dim=16, heads_t=4, heads_s=4, key_heads_t=2, key_heads_s=2, length=128)
    result = stats.measure(shape, run_of(stats))
    rows = {row["method"]: row for row in result.rows}
    assert not result.wrong and rows[stats.KL]["kl_ratio"] == "1.000" and rows[stats.STATS]["extra_bytes"] > 0
    assert list(rows) == [stats.KL, stats.STATS, stats.WITH_LSE, stats.TOP, stats.SDPA, stats.FLEX]
    assert rows[stats.SDPA]["note"].startswith("not measured: "), "there is no cuDNN on a CPU"


# ---- The host ------------------------------------------------------------------------------------------------------


def test_host_times():
    shape = Shape("", 2, 2, 4, 2, 2, 4, length=3, dtype_t="f32", dtype_s="f32")
    for name, run in overhead.host_calls(shape, CPU).items():
        assert overhead.host_microseconds(run, CPU, calls=1, samples=2) > 0, name
    assert overhead.import_seconds() > 0


def test_cpu_attention_is_compared_call_by_call():
    case = cpu_attention.case(32, 16, "causal", 2, "f32")
    result = cpu_attention.measure(case, run_of(cpu_attention, threads=1))
    rows = {row["method"]: row for row in result.rows}
    assert not result.wrong and list(rows) == ["sdpa forward", "forward", "sdpa step", "step", "one pass"]
    expected = float(rows["one pass"]["ms"]) / float(rows["sdpa step"]["ms"])
    assert float(rows["one pass"]["sdpa_ratio"]) == pytest.approx(expected, rel=2e-3)
    assert not rows["sdpa step"]["sdpa_ratio"]
