"""Row bounds and sinks in `streamkl kl` and `streamkl map`, against whole matrices in float64."""

import numpy as np
import pytest
from reference import Problem, attention_kl, packed_attention_kl
from test_bad_input import assert_refused
from test_kl import DIRECTIONS, assert_gradients_agree, assert_rows_agree
from test_map import assert_equal_maps
from tool import kl_json, load, make_tensors, rounded, run, save, succeed

BATCH, HEADS, LEN_Q, LEN_K = 2, 2, 37, 53
ALL = ("dq_s", "dk_s", "dq_t", "dk_t")


def make_bounds(batch=BATCH, len_q=LEN_Q, len_k=LEN_K):
    """Neither decreases; the first row of every sequence attends to no key."""
    random = np.random.default_rng(13)
    begin = np.sort(random.integers(0, len_k // 2, (batch, len_q)), axis=-1)
    end = np.sort(random.integers(len_k // 4, len_k + 1, (batch, len_q)), axis=-1)
    begin[:, 0] = end[:, 0] = 0
    return begin, end


def listed(values):
    return ",".join(map(str, np.ravel(values)))


# name: (tensors, options, names of the bounds in the reference)
BOUNDS = {
    "both": (("key_begin", "key_end"), [], True, True),
    "begin": (("key_begin",), [], True, False),
    "end_causal": (("key_end",), ["--causal"], False, True),
    "other_names": (("first", "past"), ["--key-begin", "first", "--key-end", "past"], True, True),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", BOUNDS)
def test_row_bounds(name, direction, tmp_path):
    names, options, with_begin, with_end = BOUNDS[name]
    begin, end = make_bounds()
    problem = Problem(causal="--causal" in options, reverse=DIRECTIONS[direction], key_begin=begin if with_begin else None, key_end=end if with_end else None)
    given = dict(zip(names, ([begin] if with_begin else []) + ([end] if with_end else [])))
    tensors = make_tensors()
    path, grad = save(tmp_path / "in.safetensors", {**tensors, **given}, **dict.fromkeys(given, "i64")), tmp_path / "grad.safetensors"
    exact = attention_kl(tensors, problem)

    answer = kl_json(path, *options, "--direction", direction, "--reduction", "none", "--grad", grad, "--grad-teacher")

    assert answer["row_bounds"] is True and answer["sinks"] is False
    assert_rows_agree(answer["kl"], exact.kl)
    assert answer["rows"] == exact.valid.sum() and answer["pairs"] < BATCH * LEN_Q * LEN_K
    assert_gradients_agree(grad, exact.gradients, ALL)


@pytest.mark.usefixtures("device")
def test_row_bounds_of_packed_sequences_and_in_lists(tmp_path):
    cu_q, cu_k = [0, 11, 11, 37], [0, 20, 29, 53]
    tensors = {name: array[0] for name, array in make_tensors(batch=1).items()}
    end = np.concatenate([np.sort(np.random.default_rng(1).integers(0, keys + 1, rows)) for rows, keys in zip(np.diff(cu_q), np.diff(cu_k))])
    lists = ["--cu-seqlens-q", listed(cu_q), "--cu-seqlens-k", listed(cu_k), "--reduction", "none"]
    exact = packed_attention_kl(tensors, cu_q, cu_k, Problem(key_end=end))
    path = save(tmp_path / "in.safetensors", {**tensors, "key_end": end}, key_end="i32")
    assert_rows_agree(kl_json(path, *lists)["kl"], exact.kl)
    plain = save(tmp_path / "plain.safetensors", tensors)
    assert_rows_agree(kl_json(plain, *lists, "--key-end", listed(end))["kl"], exact.kl)


# name: (shapes, options, the same for the reference, gradients of the teacher)
SINKS = {
    "plain": ({}, [], {}, True),
    "causal": ({}, ["--causal"], {"causal": True}, True),
    "key_length_0": ({}, ["--key-lengths", "0,31"], {"key_lengths": [0, 31]}, True),
    "reverse": ({}, ["--direction", "reverse"], {"reverse": True}, True),
    "softcap": ({}, ["--softcap-t", "2.5"], {"softcap_t": 2.5}, True),
    "teacher_groups": ({"heads_t": 6}, ["--causal"], {"causal": True}, False),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name, tmp_path):
    shapes, options, reference, of_teacher = SINKS[name]
    tensors = make_tensors(seed=4, **shapes)
    random = np.random.default_rng(14)
    sink_t, sink_s = (random.normal(1, 1, tensors[side].shape[1]).astype(np.float32) for side in ("q_t", "q_s"))
    exact = attention_kl(tensors, Problem(sink_t=sink_t, sink_s=sink_s, **reference))
    path = save(tmp_path / "in.safetensors", {**tensors, "sink_t": sink_t, "sink_s": sink_s})
    out, grad = tmp_path / "out.safetensors", tmp_path / "grad.safetensors"

    answer = kl_json(path, *options, "--reduction", "none", "--out", out, "--grad", grad, *(["--grad-teacher"] if of_teacher else []))

    assert answer["sinks"] is True and answer["row_bounds"] is False
    assert_rows_agree(answer["kl"], exact.kl)
    for side, lse in ("lse_t", exact.lse_t), ("lse_s", exact.lse_s):
        found = load(out)[side][1]
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(lse))
        assert_rows_agree(found[np.isfinite(lse)], lse[np.isfinite(lse)])
    assert_gradients_agree(grad, exact.gradients, (*ALL, "dsink_s", "dsink_t") if of_teacher else ("dq_s", "dk_s", "dsink_s"))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sinks_of_16_bits_and_in_lists(dtype, tmp_path):
    """The file has the teacher's sinks in 16 bits and under another name; the student's are a list."""
    tensors, sink = make_tensors(seed=5), np.array([0.3, -1.7])
    exact = attention_kl(tensors, Problem(sink_t=rounded(sink, dtype), sink_s=[0.25, -2]))
    path = save(tmp_path / "in.safetensors", {**tensors, "logits": sink}, logits=dtype)
    assert_rows_agree(kl_json(path, "--sink-t", "logits", "--sink-s", ".25,-2", "--reduction", "none")["kl"], exact.kl)


def test_a_sink_of_minus_infinity_is_none(pair):
    assert kl_json(pair, "--sink-t", "-inf,-inf", "--sink-s", "-inf,-inf")["kl"] == pytest.approx(kl_json(pair)["kl"], rel=1e-6)


def test_table_and_explanation(pair, tmp_path):
    begin, _ = make_bounds()
    sinks = ["--sink-t", "1,2", "--sink-s", "1,2"]
    text = succeed("kl", pair, "--key-begin", listed(begin), *sinks, "--explain", "--grad", tmp_path / "grad", "--grad-teacher")
    assert "bounds   key_begin of every query\n" in text and "sinks    sink_t and sink_s of every head\n" in text
    assert "(dq_s, dk_s, dq_t, dk_t, dsink_s, dsink_t)" in text
    assert "sinks: " in text
    both = run("kl", pair, "--key-begin", listed(begin), "--key-end", listed([LEN_K] * begin.size))
    assert "bounds   key_begin and key_end of every query\n" in both.stdout and "sinks" not in both.stdout


@pytest.mark.usefixtures("device")
def test_map_of_row_bounds(tmp_path):
    begin, end = make_bounds()
    tensors = make_tensors()
    path = save(tmp_path / "in.safetensors", {**tensors, "key_begin": begin, "key_end": end}, key_begin="i32", key_end="i32")
    assert_equal_maps(path, tensors, Problem(key_begin=begin, key_end=end), buckets=5)


def test_map_refuses_sinks(tmp_path):
    tensors = make_tensors()
    path = save(tmp_path / "in.safetensors", {**tensors, "sink_t": np.ones(2), "sink_s": np.ones(2)})
    assert_refused(run("map", path), "sink_t, sink_s", "q_t=FILE")
    plain = run("map", save(tmp_path / "plain.safetensors", tensors))
    assert plain.returncode == 0 and run("map", *(f"{role}={path}" for role in tensors)).stdout == plain.stdout


def test_sinks_of_teacher_groups_have_no_teacher_gradients(tmp_path):
    path = save(tmp_path / "in.safetensors", make_tensors(heads_t=4))
    sinks = ["--sink-t", "1,2,3,4", "--sink-s", "1,2"]
    assert_refused(run("kl", path, *sinks, "--grad", tmp_path / "grad", "--grad-teacher"), "with sinks, teacher gradients need heads_t=4")
    assert_refused(run("kl", path, *sinks, "--direction", "reverse"), "direction=1", "with sinks")


@pytest.mark.gpu
def test_bounds_are_checked_before_the_copy_to_the_gpu(pair):
    """The library cannot read GPU memory: the tool checks the bounds before it copies them."""
    assert_refused(run("kl", pair, "--key-end", listed([5, 4] + [9] * 72), "--device", "cuda"), "key_end[1]=4: must not be below key_end[0]=5")
