"""streamkl stats: equal to the whole matrix, in JSON, in a file and in text."""

import json

import numpy as np
import pytest
from reference import Problem, log_softmax, logits, visible
from safetensors.numpy import load_file
from tool import run, save

TOLERANCE = 1e-5


def tensors(batch=2, heads=4, key_heads=2, len_q=70, len_k=90, dim=16, names=("q", "k"), seed=0):
    random = np.random.default_rng(seed)
    shapes = (batch, heads, len_q, dim), (batch, key_heads, len_k, dim)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in zip(names, shapes)}


def matrix(q, k, problem):
    """(logits, P, LSE) [B, H, N, N_k] in float64."""
    found = []
    for b in range(q.shape[0]):
        mask = visible(problem, q.shape[2], k.shape[2], b)
        for h in range(q.shape[1]):
            shared = q.shape[1] // k.shape[1]
            x = logits(q[b, h].astype(np.float64), k[b, h // shared].astype(np.float64), problem.scale_s, problem.softcap_s)[0]
            log_p, lse = log_softmax(x, mask)
            found.append((np.where(mask, x, -np.inf), np.exp(log_p), lse))
    return [np.stack([each[n] for each in found]).reshape(*q.shape[:2], *found[0][n].shape) for n in range(3)]


def stats_json(*arguments):
    done = run("stats", *arguments, "--json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


CASES = {
    "plain": ([], Problem()),
    "causal": (["--causal"], Problem(causal=True)),
    "window": (["--window", "20,3", "--scale", "0.5", "--softcap", "3"], Problem(window=(20, 3), scale_s=0.5, softcap_s=3)),
    "padded": (["--causal", "--key-lengths", "90,41"], Problem(causal=True, key_lengths=[90, 41])),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_matrix(case, tmp_path):
    given, (options, problem) = tensors(), CASES[case]
    path, out = tmp_path / "layer.safetensors", tmp_path / "stats.safetensors"
    save(path, given)
    answer = stats_json(path, *options, "--out", out, "--top", "3")
    x, p, lse = matrix(given["q"], given["k"], problem)
    attends = lse != -np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1)
    distance = np.abs(np.arange(70)[:, None] + 20 - np.arange(90)[None])
    bucket = np.where(distance > 0, np.floor(np.log2(np.maximum(distance, 1))) + 1, 0)
    share = np.array([(p * (bucket == n)).sum() for n in range(8)])
    written = load_file(out)
    expected = dict(
        key_sum=p.sum(2), key_max=p.max(2), lse=lse, entropy=entropy, max_logit=x.max(-1), head_max_logit=x.max((2, 3)),
        expected_distance=(p * distance).sum(-1), distance_mass=np.stack([(p * (bucket == n)).sum((2, 3)) for n in range(8)], -1),
    )  # fmt: skip
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(written[name], value, rtol=TOLERANCE, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(answer["distance_share"], share / share.sum(), rtol=1e-5, atol=1e-7)
    sums = p.sum((1, 2))
    first = answer["top_keys"][0]
    assert len(answer["top_keys"]) == 3 and (first["batch"], first["key"]) == np.unravel_index(sums.argmax(), sums.shape)
    assert first["share"] == pytest.approx(sums.max() / sums.sum(), rel=1e-5)
    for h, head in enumerate(answer["by_head"]):
        assert head["entropy"] == pytest.approx(entropy[:, h][attends[:, h]].mean(), rel=1e-5)
        assert head["max_logit"] == pytest.approx(x[:, h].max(), rel=1e-5)


def test_rows_and_key_heads(tmp_path):
    given = tensors()
    path, out = tmp_path / "layer.safetensors", tmp_path / "stats.safetensors"
    save(path, given)
    stats_json(path, "--causal", "--rows=-9,-2", "--per-key-head", "--out", out)
    _, p, _ = matrix(given["q"], given["k"], Problem(causal=True))
    expected = p[:, :, -9:-2].sum(2).reshape(2, 2, 2, 90).sum(2)
    np.testing.assert_allclose(load_file(out)["key_sum"], expected, rtol=1e-5, atol=1e-6)


def test_one_model_of_a_pair_and_sinks(tmp_path):
    """q_s and k_s are the default; other names choose the teacher. A sink takes its share of every row."""
    student, teacher = tensors(names=("q_s", "k_s")), tensors(names=("q_t", "k_t"), seed=1)
    path = tmp_path / "pair.safetensors"
    save(path, {**student, **teacher})
    for names, options in (student, []), (teacher, ["--q-s", "q_t", "--k-s", "k_t"]):
        q, k = names.values()
        heads = stats_json(path, "--causal", *options)["by_head"]
        x, _, _ = matrix(q, k, Problem(causal=True))
        assert heads[1]["max_logit"] == pytest.approx(x[:, 1].max(), rel=1e-5)
    out = tmp_path / "stats.safetensors"
    stats_json(path, "--causal", "--sink-s", "5,5,5,5", "--out", out)
    _, _, lse = matrix(student["q_s"], student["k_s"], Problem(causal=True))
    np.testing.assert_allclose(load_file(out)["lse"], np.logaddexp(lse, 5), rtol=1e-5)


def test_text(tmp_path):
    path = tmp_path / "layer.safetensors"
    save(path, tensors(batch=1))
    done = run("stats", path, "--causal", "--top", "2")
    assert done.returncode == 0 and done.stderr == ""
    assert "70 queries x 90 keys, 4 heads" in done.stdout and done.stdout.count("    key ") == 2
    assert "head   entropy  distance  max logit" in done.stdout and "attention by distance, all heads" in done.stdout


def test_files_without_rows_keys_or_sequences(tmp_path):
    """Every tensor keeps its dimensions: a size of 0 is not a missing one."""
    path, out = tmp_path / "layer.safetensors", tmp_path / "stats.safetensors"
    for batch, len_q, len_k in (1, 0, 90), (1, 70, 0), (0, 70, 90):
        save(path, tensors(batch=batch, len_q=len_q, len_k=len_k))
        answer = stats_json(path, "--out", out)
        written = load_file(out)
        assert written["entropy"].shape == (batch, 4, len_q) and written["key_sum"].shape == (batch, 4, len_k)
        assert written["head_max_logit"].shape == (batch, 4) and written["distance_mass"].shape[:2] == (batch, 4)
        assert len(answer["top_keys"]) == min(8, batch * len_k) and sum(answer["distance_share"]) == 0


def test_shares_of_a_sum_that_is_not_finite(tmp_path):
    """A sum over keys that is no number has no shares; the keys of the other sequence are no exception."""
    given = tensors()
    given["q"][0, 1, 0, 0] = np.nan
    path = tmp_path / "layer.safetensors"
    save(path, given)
    answer = stats_json(path, "--causal")
    assert [key["share"] for key in answer["top_keys"]] == ["NaN"] * 8
    assert [(key["batch"], key["key"]) for key in answer["top_keys"]] == [(0, key) for key in range(8)]
    assert answer["distance_share"] == ["NaN"] * 8 and answer["by_head"][1]["distance_share"] == ["NaN"] * 8
    assert sum(answer["by_head"][0]["distance_share"]) == pytest.approx(1, rel=1e-5)
