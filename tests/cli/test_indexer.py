"""`streamkl kl --student indexer` against whole matrices in float64."""

import numpy as np
import pytest
from reference import Problem, log_softmax, logits, visible
from test_bad_input import assert_refused
from tool import kl_json, load, run, save, succeed

BATCH, HEADS_T, INDEX_HEADS, LEN_Q, LEN_K, DIM_T, DIM_S, TOP_K = 2, 4, 3, 37, 53, 16, 24, 9


def make_indexer():
    random = np.random.default_rng(7)
    return {
        "q_t": random.normal(size=(BATCH, HEADS_T, LEN_Q, DIM_T)),
        "k_t": random.normal(size=(BATCH, 1, LEN_K, DIM_T)),
        "q_s": random.normal(size=(BATCH, INDEX_HEADS, LEN_Q, DIM_S)),
        "k_s": random.normal(size=(BATCH, 1, LEN_K, DIM_S)),
        "w_s": random.normal(size=(BATCH, 1, LEN_Q, INDEX_HEADS)),
    }


def make_indices():
    """Distinct keys, one row without keys, and a -1 in every other row."""
    random = np.random.default_rng(8)
    indices = np.argsort(random.random((BATCH, 1, LEN_Q, LEN_K)), axis=-1)[..., :TOP_K]
    indices[..., 4] = -1
    indices[0, 0, 3] = -1
    return indices


def indexer_kl(tensors, problem, indices=None, relu=True):
    """Row vectors, and gradients of the sum over rows; the target is the mean of the teacher heads."""
    q_t, k_t, q_s, k_s, w_s = (np.asarray(tensors[name], np.float32).astype(np.float64) for name in ("q_t", "k_t", "q_s", "k_s", "w_s"))
    scale = 1 / np.sqrt(DIM_S * INDEX_HEADS)
    rows = {name: np.zeros((BATCH, 1, LEN_Q)) for name in ("kl", "cross_entropy", "entropy", "mass")}
    grads = {"dq_s": np.zeros_like(q_s), "dk_s": np.zeros_like(k_s), "dw_s": np.zeros_like(w_s)}
    for b in range(BATCH):
        mask = visible(problem, LEN_Q, LEN_K, b)
        if indices is not None:
            in_top_k = np.zeros_like(mask)
            for i in range(LEN_Q):
                in_top_k[i, indices[b, 0, i][indices[b, 0, i] >= 0]] = True
            mask &= in_top_k
        seen = mask.any(-1)
        p = sum(np.exp(log_softmax(logits(q, k_t[b, 0], None, 0)[0], mask)[0]) for q in q_t[b]) / HEADS_T
        dots = np.einsum("gid,jd->gij", q_s[b], k_s[b, 0])
        active = dots > 0 if relu else np.ones_like(dots, bool)
        log_s = log_softmax(scale * np.einsum("ig,gij->ij", w_s[b, 0], np.where(active, dots, 0)), mask)[0]
        log_s = np.where(mask, log_s, 0)
        rows["entropy"][b, 0] = -np.where(mask, p * np.log(np.where(mask, p, 1)), 0).sum(-1)
        rows["cross_entropy"][b, 0] = -(p * log_s).sum(-1)
        rows["kl"][b, 0] = rows["cross_entropy"][b, 0] - rows["entropy"][b, 0]
        rows["mass"][b, 0] = seen
        dy = scale * np.where(mask, np.exp(log_s) - p, 0)
        through = np.where(active, dy, 0)
        grads["dw_s"][b, 0] = np.einsum("gij,gij->ig", through, dots)
        grads["dq_s"][b] = np.einsum("ig,gij,jd->gid", w_s[b, 0], through, k_s[b, 0])
        grads["dk_s"][b, 0] = np.einsum("ig,gij,gid->jd", w_s[b, 0], through, q_s[b])
    return rows, grads


# name: (options of the tool, the same for the reference, sparse, ReLU)
CASES = {
    "dense": ([], Problem(), False, True),
    "causal": (["--causal"], Problem(causal=True), False, True),
    "linear": (["--window", "9,4", "--index-linear"], Problem(window=(9, 4)), False, False),
    "sparse": ([], Problem(), True, True),
    "sparse_causal": (["--causal", "--key-lengths", "53,20"], Problem(causal=True, key_lengths=[53, 20]), True, True),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_and_gradients(name, tmp_path, device):
    options, problem, sparse, relu = CASES[name]
    tensors = make_indexer()
    indices = make_indices() if sparse else None
    stored = {**tensors, "indices": indices} if sparse else tensors
    path = save(tmp_path / "in.safetensors", stored, indices="i64")
    out, grad = tmp_path / "out.safetensors", tmp_path / "grad.safetensors"
    rows, grads = indexer_kl(tensors, problem, indices, relu)
    valid = rows["mass"].sum()

    answer = kl_json(path, "--student", "indexer", *options, "--reduction", "sum", "--out", out, "--grad", grad)

    assert answer["rows"] == valid
    assert abs(answer["kl"] - rows["kl"].sum()) <= 1e-5 * rows["kl"].sum()
    for part in ("cross_entropy", "entropy", "mass"):
        assert abs(answer[part] - rows[part].sum() / valid) <= 1e-5
    found = load(out)
    assert set(found) == {"kl", "lse_t", "lse_s", "cross_entropy", "entropy", "mass"}
    for part, exact in rows.items():
        np.testing.assert_allclose(found[part][1], exact, rtol=1e-5, atol=1e-5)
    found = load(grad)
    assert set(found) == set(grads)
    for part, exact in grads.items():
        assert np.linalg.norm(found[part][1] - exact) <= 1e-5 * np.linalg.norm(exact), part


def test_table(tmp_path):
    path = save(tmp_path / "in.safetensors", {**make_indexer(), "indices": make_indices()}, indices="i32")
    text = succeed("kl", path, "--student", "indexer", "--causal")
    assert "1 student head with 3 index heads, top-k 9" in text
    assert "cross-entropy" in text


@pytest.mark.gpu
def test_indices_are_checked_before_the_copy_to_the_gpu(tmp_path):
    """The library cannot read GPU memory: the tool checks the indices before it copies them."""
    path = save(tmp_path / "in.safetensors", {**make_indexer(), "indices": np.full((BATCH, 1, LEN_Q, 2), 53)}, indices="i32")
    assert_refused(run("kl", path, "--student", "indexer", "--device", "cuda"), "indices[0, 0, 0, 0]=53")


BAD = {
    "no_weights": ({"w_s": None}, ["--student", "indexer"], "w_s", "not found"),
    "weights": ({"w_s": np.zeros((BATCH, 1, LEN_Q, 4))}, ["--student", "indexer"], "w_s [2, 1, 37, 4] and q_s [2, 3, 37, 24]", "[B, H * G, N, D]"),
    "weights_rank": ({"w_s": np.zeros(3)}, ["--student", "indexer"], "w_s [3]", "[B, H, N, G]"),
    "indices_shape": ({"indices": np.zeros((BATCH, 1, 36, 5))}, ["--student", "indexer"], "indices [2, 1, 36, 5] and w_s", "[B, H, N, k]"),
    "index": ({"indices": np.full((BATCH, 1, LEN_Q, 2), 53)}, ["--student", "indexer"], "indices[0, 0, 0, 0]=53", "0..52"),
    "student": ({}, ["--student", "teacher"], "--student=teacher", "attention or indexer"),
    "teacher_gradients": ({}, ["--student", "indexer", "--grad", "g", "--grad-teacher"], "--grad-teacher", "not available with --student indexer"),
    "no_indexer": ({}, ["--w-s", "w"], "--w-s", "--student indexer must be given too"),
    "softcap": ({}, ["--student", "indexer", "--softcap-s", "2"], "softcap_s=2", "must be 0 for an indexer"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name, tmp_path):
    changes, options, *fragments = BAD[name]
    tensors = {key: value for key, value in {**make_indexer(), **changes}.items() if value is not None}
    assert_refused(run("kl", save(tmp_path / "in.safetensors", tensors, indices="i64"), *options, cwd=tmp_path), *fragments)
