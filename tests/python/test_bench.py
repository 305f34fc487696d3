"""bench/peers.py and bench/indexer.py on the CPU: StreamKL and the naive code agree with float64."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from gpu import indexer_methods as methods  # noqa: E402
from gpu import methods as attention_methods  # noqa: E402
from gpu.cases import FORWARD, OPERATIONS, STEP, Case, IndexerCase  # noqa: E402
from gpu.measure import PEER_WRONG, WRONG, Oracle, random_tensors  # noqa: E402


@pytest.mark.parametrize("case", [Case(4, 50, 32, True, key_heads=2), Case(2, 40, 32, False, packed=(40, 9))], ids=str)
def test_attention_agrees_with_float64(case):
    tensors = random_tensors(case, "cpu")
    oracle = Oracle(tensors, case)
    two_passes, one_pass = attention_methods.ours(tensors, case, list(OPERATIONS), "streamkl")
    for method in two_passes, one_pass:
        assert all(error <= WRONG[name] for name, error in oracle.errors(method.step()).items())
    assert two_passes.explanation.startswith("forward: ") and "one-pass" in one_pass.explanation


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
