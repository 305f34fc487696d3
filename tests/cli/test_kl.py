"""`streamkl kl` against an independent float64 computation: every mask, type, direction and head layout."""

import numpy as np
import pytest
from reference import Problem, attention_kl, packed_attention_kl
from tool import kl_json, load, make_tensors, rounded, run, save, succeed

pytestmark = pytest.mark.usefixtures("device")

# name: (options of the tool, the same for the reference)
PROBLEMS = {
    "plain": ([], Problem()),
    "causal": (["--causal"], Problem(causal=True)),
    "window": (["--window", "9,4"], Problem(window=(9, 4))),
    "window_left_only": (["--window", "5,-1"], Problem(window=(5, -1))),
    "causal_window": (["--causal", "--window", "7,-1"], Problem(causal=True, window=(7, -1))),
    "key_lengths": (["--key-lengths", "53,20"], Problem(key_lengths=[53, 20])),
    "key_length_0": (["--key-lengths", "0,31", "--causal"], Problem(key_lengths=[0, 31], causal=True)),
    "offsets": (["--causal", "--offset-q", "100", "--offset-k", "90"], Problem(causal=True, offsets=(100, 90))),
    "offsets_window": (["--window", "6,2", "--offset-q", "3"], Problem(window=(6, 2), offsets=(3, 0))),
    "scales": (["--scale-t", "0.7", "--scale-s", "0.3"], Problem(scale_t=0.7, scale_s=0.3)),
    "softcap": (["--softcap-t", "2.5", "--softcap-s", "1.5"], Problem(softcap_t=2.5, softcap_s=1.5)),
}
DIRECTIONS = {"forward": False, "reverse": True}


def assert_rows_agree(actual, exact):
    """2e-6 + 2e-6 KL, the documented accuracy for f32."""
    np.testing.assert_array_less(np.abs(np.asarray(actual) - exact), 2e-6 + 2e-6 * np.abs(exact))


def assert_gradients_agree(path, exact, names=("dq_s", "dk_s"), tolerance=1e-5):
    found = load(path)
    assert set(found) == set(names)
    for name in names:
        error = np.linalg.norm(found[name][1] - exact[name]) / max(np.linalg.norm(exact[name]), 1e-30)
        assert error <= tolerance, f"{name}: relative error {error}"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_mean_rows_and_gradients(name, direction, tmp_path):
    options, problem = PROBLEMS[name]
    problem = Problem(**{**problem.__dict__, "reverse": DIRECTIONS[direction]})
    tensors = make_tensors()
    path = save(tmp_path / "in.safetensors", tensors)
    rows = attention_kl(tensors, problem)
    out, grad = tmp_path / "out.safetensors", tmp_path / "grad.safetensors"

    answer = kl_json(path, *options, "--direction", direction, "--out", out, "--grad", grad, "--grad-teacher")

    assert abs(answer["kl"] - rows.mean()) <= 2e-6 + 2e-6 * rows.mean()
    assert answer["rows"] == rows.valid.sum()
    assert answer["masked_rows"] == (~rows.valid).sum()
    assert answer["direction"] == direction
    stored = {key: value for key, (_, value) in load(out).items()}
    assert set(stored) == {"kl", "lse_t", "lse_s"}
    assert_rows_agree(stored["kl"], rows.kl)
    for key, exact in (("lse_t", rows.lse_t), ("lse_s", rows.lse_s)):
        np.testing.assert_array_equal(np.isfinite(stored[key]), np.isfinite(exact))
        assert_rows_agree(stored[key][np.isfinite(exact)], exact[np.isfinite(exact)])
    exact = attention_kl(tensors, problem, upstream=1 / rows.valid.sum())
    assert_gradients_agree(grad, exact.gradients, ("dq_s", "dk_s", "dq_t", "dk_t"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_packed(direction, tmp_path):
    """Sequences of different lengths, one without queries, one without keys, and NaN after the last one."""
    cu_q, cu_k = [0, 11, 11, 40, 44], [0, 20, 29, 60, 60]
    tensors = {name: array[0] for name, array in make_tensors(batch=1, len_q=50, len_k=64).items()}
    exact = packed_attention_kl(tensors, cu_q, cu_k, Problem(causal=True, reverse=DIRECTIONS[direction]))
    for name, used in (("q_t", 44), ("q_s", 44), ("k_t", 60), ("k_s", 60)):
        tensors[name][:, used:] = np.nan
    path = save(tmp_path / "in.safetensors", tensors)
    lists = ["--cu-seqlens-q", ",".join(map(str, cu_q)), "--cu-seqlens-k", ",".join(map(str, cu_k))]
    grad = tmp_path / "grad.safetensors"

    options = ["--causal", "--direction", direction, "--reduction", "none"]
    answer = kl_json(path, *lists, *options, "--grad", grad, "--grad-teacher")

    assert_rows_agree(answer["kl"], exact.kl)
    assert answer["rows"] == exact.valid.sum()
    assert answer["nonfinite_rows"] == 0
    assert_gradients_agree(grad, exact.gradients, ("dq_s", "dk_s", "dq_t", "dk_t"))


@pytest.mark.parametrize("stored", ["i32", "i64"])
def test_lengths_from_tensors_of_the_file(stored, tmp_path):
    tensors = {name: array[0] for name, array in make_tensors(batch=1, len_q=48, len_k=48).items()}
    cu = [0, 13, 48]
    exact = packed_attention_kl(tensors, cu, cu)
    lengths = {"cu_seqlens_q": np.array(cu)}
    path = save(tmp_path / "in.safetensors", {**tensors, **lengths}, cu_seqlens_q=stored)
    assert abs(kl_json(path)["kl"] - exact.mean()) <= 4e-6

    renamed = save(tmp_path / "named.safetensors", {**tensors, "cuts": np.array(cu)}, cuts=stored)
    assert abs(kl_json(renamed, "--cu-seqlens-q", "cuts")["kl"] - exact.mean()) <= 4e-6


HEADS = {
    "teacher_groups": {"heads_t": 6, "heads_s": 2},
    "one_student_head": {"heads_t": 4, "heads_s": 1},
    "gqa": {"heads_t": 4, "heads_s": 4, "key_heads_t": 2, "key_heads_s": 1},
    "gqa_and_teacher_groups": {"heads_t": 8, "heads_s": 4, "key_heads_t": 2, "key_heads_s": 2},
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", HEADS)
def test_heads(name, direction, tmp_path):
    tensors = make_tensors(seed=3, **HEADS[name])
    problem = Problem(causal=True, reverse=DIRECTIONS[direction])
    exact = attention_kl(tensors, problem)
    path, grad = save(tmp_path / "in.safetensors", tensors), tmp_path / "grad.safetensors"
    options = ["--causal", "--direction", direction, "--reduction", "sum"]

    answer = kl_json(path, *options, "--grad", grad, "--grad-teacher")

    rows = kl_json(path, *options[:3], "--reduction", "none")["kl"]
    assert_rows_agree(rows, exact.kl)
    assert answer["kl"] == pytest.approx(exact.kl.sum(), rel=2e-6, abs=2e-6)
    assert_gradients_agree(grad, exact.gradients, ("dq_s", "dk_s", "dq_t", "dk_t"))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_types(dtype, device, tmp_path):
    """Inputs are exact: only gradients, which are stored in the same type, are rounded. Kernels of tensor cores and of
    AMX also round the logit gradients."""
    rounding = {"f16": 2**-11, "bf16": 2**-8}[dtype]
    tensors = make_tensors(seed=5)
    exact = attention_kl({name: rounded(array, dtype) for name, array in tensors.items()})
    path, grad = save(tmp_path / "in.safetensors", tensors, dtype), tmp_path / "grad.safetensors"

    assert_rows_agree(kl_json(path, "--reduction", "none", "--grad", grad)["kl"], exact.kl)
    assert {stored for stored, _ in load(grad).values()} == {dtype.upper()}
    assert_gradients_agree(grad, exact.gradients, tolerance=rounding)

    kernel = kl_json(path, "--reduction", "none", "--grad", grad, "--grad-f32")["kernel"]
    assert {stored for stored, _ in load(grad).values()} == {"F32"}
    keeps_f32 = device == "cpu" and kernel != "cpu_amx"
    assert_gradients_agree(grad, exact.gradients, tolerance=1e-5 if keeps_f32 else rounding)


def test_types_may_differ_between_teacher_and_student(tmp_path):
    tensors = make_tensors(seed=6)
    dtypes = {"q_t": "bf16", "k_t": "bf16", "q_s": "f32", "k_s": "f32"}
    exact = attention_kl({name: rounded(array, dtypes[name]) for name, array in tensors.items()})
    path = save(tmp_path / "in.safetensors", tensors, **dtypes)
    assert_rows_agree(kl_json(path, "--reduction", "none")["kl"], exact.kl)


def test_layout_bnhd_is_the_transpose(tmp_path):
    tensors = make_tensors(seed=7)
    transposed = {name: np.ascontiguousarray(array.transpose(0, 2, 1, 3)) for name, array in tensors.items()}
    grads = tmp_path / "grad.safetensors"
    bhnd = kl_json(save(tmp_path / "a.safetensors", tensors), "--causal", "--reduction", "none")
    path = save(tmp_path / "b.safetensors", transposed)
    bnhd = kl_json(path, "--causal", "--layout", "bnhd", "--reduction", "none", "--grad", grads)
    assert bhnd["kl"] == bnhd["kl"]
    exact = attention_kl(tensors, Problem(causal=True)).gradients
    assert_gradients_agree(grads, {name: array.transpose(0, 2, 1, 3) for name, array in exact.items()})


def test_layout_is_named_and_doubted(tmp_path):
    """A file of [batch, length, heads, dim] is read as 37 heads of 2 rows without an error: the tool says so."""
    transposed = {name: np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for name, a in make_tensors(len_k=37).items()}
    path = save(tmp_path / "bnhd.safetensors", transposed)
    doubted = run("kl", path)
    assert doubted.returncode == 0 and "layout   bhnd, the default" in doubted.stdout
    assert "warning: q_t [2, 37, 2, 16] has 37 heads and 2 queries" in doubted.stderr and "--layout=bnhd" in doubted.stderr
    for layout in "bnhd", "bhnd":
        done = run("kl", path, "--layout", layout)
        assert done.stderr == "" and f"layout   {layout}\n" in done.stdout
        assert kl_json(path, "--layout", layout)["layout"] == layout
    assert run("kl", save(tmp_path / "bhnd.safetensors", make_tensors())).stderr == ""


def test_leading_axes_may_be_missing(tmp_path):
    tensors = make_tensors(batch=1, heads_t=1, heads_s=1)
    whole = kl_json(save(tmp_path / "a.safetensors", tensors))["kl"]
    flat = {name: array[0, 0] for name, array in tensors.items()}
    assert kl_json(save(tmp_path / "b.safetensors", flat))["kl"] == whole


def test_npy_files(tmp_path):
    tensors = make_tensors(seed=8)
    whole = kl_json(save(tmp_path / "in.safetensors", tensors))["kl"]
    arguments = []
    for name, array in tensors.items():
        np.save(tmp_path / f"{name}.npy", array)
        arguments.append(f"{name}={tmp_path / name}.npy")
    assert kl_json(*arguments)["kl"] == whole


def test_several_files_and_other_names(tmp_path):
    tensors = make_tensors(seed=9)
    whole = kl_json(save(tmp_path / "in.safetensors", tensors))["kl"]
    teacher = save(tmp_path / "teacher.safetensors", {"q": tensors["q_t"], "k": tensors["k_t"]})
    student = save(tmp_path / "student.safetensors", {"q_s": tensors["q_s"], "k_s": tensors["k_s"]})
    assert kl_json(teacher, student, "--q-t", "q", "--k-t", "k")["kl"] == whole


def test_given_teacher_lse_is_used(tmp_path):
    """An LSE over more than the visible keys weights the heads of a group; the KL is over the visible keys."""
    tensors = make_tensors(seed=10, heads_t=4, heads_s=2)
    lse = attention_kl(tensors).lse_t.astype(np.float32)
    path = save(tmp_path / "in.safetensors", tensors)
    with_lse = save(tmp_path / "with.safetensors", {**tensors, "lse_t": lse})
    assert kl_json(with_lse)["kl"] == pytest.approx(kl_json(path)["kl"], rel=1e-5)


def test_nan_in_a_query_is_a_string_in_valid_json(tmp_path):
    tensors = make_tensors(seed=12)
    tensors["q_s"][0, 1, 5] = np.nan
    path = save(tmp_path / "in.safetensors", tensors)
    mean = kl_json(path)
    assert mean["kl"] == "NaN"
    assert mean["nonfinite_rows"] == 1
    rows = kl_json(path, "--reduction", "none")["kl"]
    assert rows[0][1][5] == "NaN"
    assert sum(isinstance(value, str) for heads in rows for row in heads for value in row) == 1


def test_a_row_of_infinite_logits_is_not_one_without_keys(tmp_path):
    """Both have an LSE of -infinity."""
    tensors = make_tensors(seed=13, len_q=4, len_k=4)
    tensors["q_s"][0, 0, 2] = 1e30
    tensors["k_s"][0, 0] = -1e30
    answer = kl_json(save(tmp_path / "in.safetensors", tensors))
    assert answer["kl"] == "NaN" and answer["nonfinite_rows"] >= 1 and answer["masked_rows"] == 0


def test_infinite_kl_is_a_string_in_valid_json(pair):
    """The sink of the teacher is an outcome that the student does not have."""
    answer = kl_json(pair, "--sink-t=0,0", "--sink-s=-inf,-inf", "--reduction", "sum")
    assert answer["kl"] == "Infinity"


def test_no_visible_keys(device, pair, tmp_path):
    grad = tmp_path / "grad.safetensors"
    answer = kl_json(pair, "--key-lengths", "0,0", "--grad", grad)
    assert (answer["kl"], answer["rows"], answer["masked_rows"]) == (0, 0, 2 * 2 * 37)
    assert all((array == 0).all() for _, array in load(grad).values())
    assert answer["device"] == device and answer["seconds"] > 0 and answer["extra_bytes"] > 0
    assert answer["shapes"] == {name: list(array.shape) for name, array in make_tensors().items()}


@pytest.mark.parametrize("offset", [1000, 10**6, 10**9, -(10**6)])
def test_shard_outside_of_every_window(offset, pair, tmp_path):
    """Context parallel: a rank whose keys are masked for all of its queries, at any offset."""
    grad = tmp_path / "grad.safetensors"
    answer = kl_json(pair, "--window", "50,0", "--offset-q", offset, "--grad", grad, "--grad-teacher")
    assert (answer["kl"], answer["rows"], answer["masked_rows"]) == (0, 0, 2 * 2 * 37)
    assert all((array == 0).all() for _, array in load(grad).values())


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1)])
def test_lengths_of_0_and_1(lengths, tmp_path):
    tensors = make_tensors(len_q=lengths[0], len_k=lengths[1])
    answer = kl_json(save(tmp_path / "in.safetensors", tensors), "--grad", tmp_path / "grad.safetensors")
    assert answer["kl"] == pytest.approx(0, abs=2e-6)


@pytest.mark.parametrize("heads", [1, 3, 32, 33])
def test_table_of_heads(heads, tmp_path):
    """Mean, largest row and its query of the first 32 heads; head 0 sees no key in one batch."""
    path, out = save(tmp_path / "in.safetensors", make_tensors(heads_t=heads, heads_s=heads, len_q=5)), tmp_path / "out.safetensors"
    text = succeed("kl", path, "--key-lengths", "0,53", "--out", out)
    kl = load(out)["kl"][1][1]  # of the second batch; the rows of the first one do not count
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if line.split() == ["head", "mean", "max", "at", "query"]) + 1
    table = [line.split() for line in lines[first : lines.index("", first)]]
    assert table[32:] == ([["...", "--out", "FILE", "writes", "all", "rows"]] if heads > 32 else [])
    assert [int(row[0]) for row in table[:32]] == list(range(min(heads, 32)))
    for row in table[:32]:
        rows = kl[int(row[0])]
        assert float(row[1]) == pytest.approx(rows.mean(), rel=1e-5) and float(row[2]) == pytest.approx(rows.max(), rel=1e-5)
        assert int(row[3]) == rows.argmax()


def test_table_of_heads_without_keys(tmp_path):
    done = run("kl", save(tmp_path / "in.safetensors", make_tensors(len_q=5)), "--key-lengths", "0,0")
    assert done.stdout.count("no visible key") == 2
