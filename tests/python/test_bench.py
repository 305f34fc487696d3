"""bench/peers.py, bench/indexer.py and bench/python_overhead.py on the CPU: StreamKL and the naive code agree with float64."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from gpu import indexer_methods as methods  # noqa: E402
from gpu import methods as attention_methods  # noqa: E402
from gpu.cases import BACKWARD, FORWARD, OPERATIONS, STEP, Case, IndexerCase  # noqa: E402
from gpu.linearard import linearard  # noqa: E402
from gpu.measure import PEER_WRONG, WRONG, Oracle, random_tensors  # noqa: E402
from python_overhead import host_calls, host_microseconds  # noqa: E402


@pytest.mark.parametrize("case", [Case(4, 50, 32, True, key_heads=2), Case(2, 40, 32, False, packed=(40, 9))], ids=str)
def test_attention_agrees_with_float64(case):
    tensors = random_tensors(case, "cpu")
    oracle = Oracle(tensors, case)
    two_passes, one_pass = attention_methods.ours(tensors, case, list(OPERATIONS), "streamkl")
    for method in two_passes, one_pass:
        assert all(error <= WRONG[name] for name, error in oracle.errors(method.step()).items())
    assert two_passes.explanation.startswith("forward: ") and "one-pass" in one_pass.explanation


def test_host_times_of_python_overhead():
    device = torch.device("cpu")
    for name, call in host_calls(device, (1, 2, 3, 4), torch.float32).items():
        assert host_microseconds(call, device, calls=1, samples=2) > 0, name


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
    case = Case(3, 40, 32, True)
    tensors = random_tensors(case, "cpu")
    oracle = Oracle(tensors, case)
    for scale, is_right in (1, True), (2, False):
        make = linearard(make_checkout(tmp_path / str(scale), scale))
        method = make(tensors, case, [FORWARD, BACKWARD])
        errors = oracle.errors(method.step())
        assert errors.keys() == {"kl", "dq", "dk"}
        assert all((error <= PEER_WRONG) is is_right for error in errors.values())
        assert method.passes[FORWARD]()().dim() == 0 and len(method.passes[BACKWARD]()()) == 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("top_k", [0, 9, 60])
def test_indexer_methods_agree_with_float64(top_k, causal):
    case = IndexerCase(50, heads=4, key_heads=2, dim=32, index_heads=3, index_dim=16, top_k=top_k, causal=causal)
    tensors = methods.make_tensors(case, "cpu")
    whole = methods.ExactRows(tensors, case, torch.arange(50))
    some = methods.ExactRows(tensors, case, methods.some_rows(case, "cpu", 7))
    assert whole.exact.keys() == {"kl", "dq", "dk", "dw"} and some.exact.keys() == {"kl", "dq", "dw"}
    for method in methods.ours(tensors, case):
        assert "dw_s" in method.explanation
        results = method.step()
        for exact in (whole, some):
            assert all(error <= WRONG[name] for name, error in exact.errors(results).items())
    naive = methods.naive(tensors, case)
    assert all(error <= PEER_WRONG for error in whole.errors(naive.step()).values())
    in_float64 = {name: tensor if name == "indices" else tensor.double() for name, tensor in tensors.items()}
    assert all(error <= 1e-12 for error in whole.errors(methods.naive(in_float64, case).step()).values())


def test_gradients_of_naive_chunks_add_up(monkeypatch):
    case = IndexerCase(50, heads=4, key_heads=2, dim=32, index_heads=3, index_dim=16, top_k=9, causal=True)
    tensors = {name: t if name == "indices" else t.double() for name, t in methods.make_tensors(case, "cpu").items()}
    monkeypatch.setattr(methods, "GATHERED_BYTES", 7 * 9 * 2 * 32 * 8)
    assert methods.rows_together(case, torch.float64) == 7
    whole = methods.ExactRows(tensors, case, torch.arange(50))
    assert all(error <= 1e-12 for error in whole.errors(methods.naive(tensors, case).step()).values())


def test_forward_alone_equals_the_forward_of_a_step():
    case = IndexerCase(50, heads=4, key_heads=4, dim=32, index_heads=3, index_dim=16, top_k=0, causal=True)
    tensors = methods.make_tensors(case, "cpu")
    plan = methods.IndexerPlan(tensors, case)
    plan.run(FORWARD)
    kl = plan.kl.clone()
    plan.run(STEP)
    torch.testing.assert_close(plan.kl, kl)
