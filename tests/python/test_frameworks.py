"""Losses of indexers in the terms of training frameworks. Megatron-core itself is compared where it is installed."""

from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from indexer_cases import make_indexer

from streamkl import reference
from streamkl.frameworks import attach_loss, megatron_indexer_loss

ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


def megatron_tensors(length=24, heads=4, index_heads=3, top_k=7):
    """Tensors as Megatron-core has them: (q, weights, k) of the indexer, topk_indices, query, key."""
    indexer = make_indexer(len_q=length, len_k=length, heads_t=heads, key_heads_t=heads, index_heads=index_heads)
    query, key, q, k, weights = (t.detach().transpose(0, 1).contiguous() for t in indexer[:5])
    trained = [q, weights.squeeze(2) * 0.3, k.squeeze(2)]
    for tensor in trained:
        tensor.requires_grad_()
    scores = scores_of(*trained).detach()
    scores += torch.full_like(scores, -torch.inf).triu(1)
    return trained, scores.topk(top_k).indices, query, key


def scores_of(q, weights, k):
    """DSAIndexer's: [batch, len_q, len_k]"""
    dots = torch.einsum("sbhd,tbd->sbht", q, k).relu()
    return (dots * weights.unsqueeze(-1)).sum(2).transpose(0, 1)


@pytest.mark.parametrize("sparse", [False, True])
def test_megatron_indexer_loss(sparse):
    trained, topk, query, key = megatron_tensors()
    loss = megatron_indexer_loss(*trained, topk, query, key, 0.3, 0.5, sparse, ONE_RANK)
    q, weights, k = (tensor.detach().double().transpose(0, 1).requires_grad_() for tensor in trained)
    teacher = (tensor.double().transpose(0, 1) for tensor in (query, key))
    exact = 0.5 * reference.indexer_kl(
        *teacher, q, k, weights, topk if sparse else None, causal=True, softmax_scale_t=0.3, softmax_scale_s=1.0
    )
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    for one, other in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(exact, (q, weights, k))):
        torch.testing.assert_close(one.double(), other.transpose(0, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sparse", [False, True])
def test_megatron_core(sparse):
    """compute_dsa_indexer_loss and DSAIndexerLossAutoScaler of the installed package."""
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    names = [list(signature(loss).parameters) for loss in (dsa.compute_dsa_indexer_loss, megatron_indexer_loss)]
    assert names[0][0] == "index_scores" and names[0][1:8] == names[1][3:10], "same arguments after the indexer's"
    trained, topk, query, key = megatron_tensors()
    scores = scores_of(*trained) + torch.full((24, 24), -torch.inf).triu(1)
    theirs = dsa.compute_dsa_indexer_loss(scores, topk, query, key, 0.3, 0.5, sparse, ONE_RANK)
    ours = megatron_indexer_loss(*trained, topk, query, key, 0.3, 0.5, sparse, ONE_RANK)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(theirs, trained)
    dsa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(2.0))
    output = torch.ones(3, requires_grad=True)
    dsa.DSAIndexerLossAutoScaler.apply(output, ours).sum().backward()
    for tensor, gradient in zip(trained, expected):
        torch.testing.assert_close(tensor.grad, 2 * gradient, rtol=1e-4, atol=1e-5)


def test_loss_mask_weighs_rows():
    trained, topk, query, key = megatron_tensors()
    mask = torch.ones(2, 24)
    mask[1, 5:] = 0
    masked = megatron_indexer_loss(*trained, topk, query, key, 0.3, 1.0, True, loss_mask=mask)
    losses = []
    for b, rows in (0, 24), (1, 5):
        indexer, (q, k) = ([t[:rows, b : b + 1] for t in some] for some in (trained, (query, key)))
        own = topk[b : b + 1, :rows]
        losses.append(megatron_indexer_loss(*indexer, torch.where(own < rows, own, -1), q, k, 0.3, 1.0, True))
    first, second = losses
    torch.testing.assert_close(masked, (24 * first + 5 * second) / 29)


def test_attached_loss():
    x, w = torch.ones(4, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    output = attach_loss(2 * x, w.square().sum(), scale=0.5)
    assert torch.equal(output, 2 * x)
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0)) and torch.equal(w.grad, torch.full((2,), 3.0))
    with pytest.raises(ValueError, match=r"loss: shape \[2\] must be a scalar"):
        attach_loss(x, w)
