"""bench/indexer.py on the CPU: our calls and the naive loss compute what float64 computes."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from gpu import indexer_methods as methods  # noqa: E402
from gpu.cases import FORWARD, STEP, IndexerCase  # noqa: E402
from gpu.measure import PEER_WRONG, WRONG  # noqa: E402


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("top_k", [0, 9, 60])
def test_all_methods_agree_with_float64(top_k, causal):
    case = IndexerCase(50, heads=4, key_heads=2, dim=32, index_heads=3, index_dim=16, top_k=top_k, causal=causal)
    tensors = methods.make_tensors(case, "cpu")
    whole = methods.ExactRows(tensors, case, torch.arange(50))
    some = methods.ExactRows(tensors, case, methods.some_rows(case, "cpu", 7))
    assert whole.exact.keys() == {"kl", "dq", "dk", "dw"} and some.exact.keys() == {"kl", "dq", "dw"}
    for method in methods.ours(tensors, case):
        results = method.step()
        for exact in (whole, some):
            assert all(error <= WRONG[name] for name, error in exact.errors(results).items())
    naive = methods.naive(tensors, case)
    assert all(error <= PEER_WRONG for error in whole.errors(naive.step()).values())
    in_float64 = {name: tensor if name == "indices" else tensor.double() for name, tensor in tensors.items()}
    assert all(error <= 1e-12 for error in whole.errors(methods.naive(in_float64, case).step()).values())


def test_naive_lots_of_rows_add_up(monkeypatch):
    case = IndexerCase(50, heads=4, key_heads=2, dim=32, index_heads=3, index_dim=16, top_k=9, causal=True)
    tensors = {name: t if name == "indices" else t.double() for name, t in methods.make_tensors(case, "cpu").items()}
    monkeypatch.setattr(methods, "GATHERED_BYTES", 7 * 9 * 2 * 32 * 8)
    assert methods.rows_together(case, torch.float64) == 7
    whole = methods.ExactRows(tensors, case, torch.arange(50))
    assert all(error <= 1e-12 for error in whole.errors(methods.naive(tensors, case).step()).values())


def test_the_forward_alone_is_that_of_the_step():
    case = IndexerCase(50, heads=4, key_heads=4, dim=32, index_heads=3, index_dim=16, top_k=0, causal=True)
    tensors = methods.make_tensors(case, "cpu")
    plan = methods.IndexerPlan(tensors, case)
    plan.run(FORWARD)
    kl = plan.kl.clone()
    plan.run(STEP)
    torch.testing.assert_close(plan.kl, kl)
