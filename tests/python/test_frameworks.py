"""Losses of indexers in the terms of training frameworks. Megatron-core itself is compared where it is installed."""

from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from indexer_cases import make_indexer

from streamkl.frameworks import attach_loss, megatron_indexer_loss

ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
OF_INDEXER = ["index_query", "index_weights", "index_key"]
# Arguments of compute_dsa_indexer_loss in Megatron-core 0.19, after the scores.
ARGUMENTS = "topk_indices query key softmax_scale loss_coeff sparse_loss pg_collection mask varlen_starts varlen_ends".split()
ARGUMENTS += "key_positions query_valid_rows calculate_per_token_loss".split()


def megatron_tensors(length=24, keys=24, heads=4, index_heads=3, top_k=7):
    """Tensors as Megatron-core has them: (q, weights, k) of the indexer, topk_indices, query, key."""
    indexer = make_indexer(len_q=length, len_k=keys, heads_t=heads, key_heads_t=heads, index_heads=index_heads)
    query, key, q, k, weights = (t.detach().transpose(0, 1).contiguous() for t in indexer[:5])
    trained = [q, weights.squeeze(2) * 0.3, k.squeeze(2)]
    for tensor in trained:
        tensor.requires_grad_()
    scores = scores_of(*trained).detach()
    scores += torch.full_like(scores, -torch.inf).triu(1)
    return trained, scores.topk(top_k).indices, query, key


def scores_of(q, weights, k, relu=True):
    """DSAIndexer's: [batch, len_q, len_k]"""
    dots = torch.einsum("sbhd,tbd->sbht", q, k)
    return ((dots.relu() if relu else dots) * weights.unsqueeze(-1)).sum(2).transpose(0, 1)


def visible_keys(len_q, len_k, mask=None, varlen_starts=None, varlen_ends=None, key_positions=None, **_):
    if mask is not None:
        return mask == 0
    if varlen_starts is None:
        return torch.ones(len_q, len_k).tril().bool()
    at = torch.arange(len_k) if key_positions is None else key_positions
    return (at >= varlen_starts[:, None]) & (at < varlen_ends[:, None])


def formula(trained, topk, query, key, scale, coeff, sparse, relu=True, **options):
    """compute_dsa_indexer_loss of Megatron-core 0.19 in float64, without its clamp at 1e-10."""
    x = torch.einsum("sbhd,tbhd->bhst", query.double(), key.double()) * scale
    y = scores_of(*trained, relu)
    shown = visible_keys(*x.shape[2:], **options).expand(y.shape)
    if sparse:
        listed = torch.zeros(shown.shape).scatter_add(-1, topk.clamp(min=0), (topk >= 0).float())
        shown = shown & (listed > 0)
    attends = shown.any(-1, keepdim=True)
    p = x.masked_fill(~shown[:, None] & attends[:, None], -torch.inf).softmax(-1).mean(1)
    log_s = y.masked_fill(~shown & attends, -torch.inf).log_softmax(-1)
    rows = torch.where(shown & (p > 0), p * (p.log() - log_s), 0.0).sum(-1)
    valid = options.get("query_valid_rows")
    weight = (torch.ones(rows.shape[1]) if valid is None else valid).expand(rows.shape).double()
    total = (rows * weight).sum()
    return coeff * (total if options.get("calculate_per_token_loss") else total / weight.sum())


def window_mask(length):
    return torch.full((length, length), -torch.inf).triu(1) + torch.full((length, length), -torch.inf).tril(-4)


def cut_mask(length):
    """Two packed sequences; the last rows show no key."""
    mask = torch.full((length, length), -torch.inf).triu(1)
    mask[10:, :10] = -torch.inf
    mask[-2:] = -torch.inf
    return mask


STARTS, ENDS = torch.arange(24) // 10 * 10, torch.arange(1, 25)
SHUFFLED = torch.randperm(24, generator=torch.Generator().manual_seed(1))
OPTIONS = {
    "causal": {},
    "mask": dict(mask=cut_mask(24)),
    "mask of each sequence": dict(mask=torch.stack([cut_mask(24), torch.full((24, 24), -torch.inf).triu(1)])),
    "bounds": dict(varlen_starts=STARTS, varlen_ends=ENDS),
    "bounds past the keys": dict(varlen_starts=STARTS - 3, varlen_ends=ENDS + 5),
    "positions": dict(varlen_starts=STARTS, varlen_ends=ENDS, key_positions=SHUFFLED),
    "positions of another type": dict(varlen_starts=STARTS.int(), varlen_ends=ENDS.int(), key_positions=SHUFFLED),
    "valid rows": dict(query_valid_rows=torch.arange(24) < 17),
    "valid rows of all sequences": dict(query_valid_rows=(torch.arange(24) % 5 > 0)[None]),
    "valid rows of each sequence": dict(query_valid_rows=torch.arange(24) < torch.tensor([[24], [5]])),
    "per token": dict(calculate_per_token_loss=True),
    "per valid token": dict(calculate_per_token_loss=True, query_valid_rows=torch.arange(24) % 2 == 0),
}  # fmt: skip


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_megatron_indexer_loss(options, sparse):
    trained, topk, query, key = megatron_tensors()
    topk[0, 3, 1] = -1
    loss = megatron_indexer_loss(*trained, topk, query, key, 0.3, 0.5, sparse, ONE_RANK, **options)
    exact_trained = [tensor.detach().double().requires_grad_() for tensor in trained]
    exact = formula(exact_trained, topk, query, key, 0.3, 0.5, sparse, **options)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    for one, other in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(exact, exact_trained)):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_fewer_queries_than_keys_packed_teacher_and_no_relu():
    trained, _, query, key = megatron_tensors(length=5, keys=9, top_k=5)
    loss = megatron_indexer_loss(*trained, None, query, key, 0.3, 0.5, False, use_relu=False)
    torch.testing.assert_close(loss.double(), formula([t.double() for t in trained], None, query, key, 0.3, 0.5, False, relu=False))
    one = [tensor[:, :1] for tensor in (*trained, query, key)]
    packed = megatron_indexer_loss(*one[:3], None, one[3][:, 0], one[4][:, 0], 0.3, 0.5, False)
    torch.testing.assert_close(packed, megatron_indexer_loss(*one[:3], None, *one[3:], 0.3, 0.5, False))


@pytest.mark.parametrize("options, message", [
    (dict(mask=torch.zeros(24, 23)), r"mask: shape \[24, 23\] must be \[24, 24\] or \[2, 24, 24\]"),
    (dict(mask=torch.full((24, 24), 0.5)), "mask: must be 0, or -inf"),
    (dict(mask=torch.zeros(24, 24).index_fill(1, torch.tensor([4]), -torch.inf)), "mask: each row must show one range"),
    (dict(mask=window_mask(24).index_fill(0, torch.tensor([9]), -torch.inf)), r"mask: each row .*: row \[9\] shows none"),
    (dict(mask=torch.stack([window_mask(24), window_mask(24).roll(1, 0)])), r"mask: each row .*: row \[1, 1\] does not"),
    (dict(mask=torch.full((24, 24), -torch.inf).triu(1).flip(0)), "mask: each row .* before that of the row above"),
    (dict(mask=cut_mask(24), varlen_starts=STARTS, varlen_ends=ENDS), "mask: must be None with varlen_starts"),
    (dict(varlen_starts=STARTS), "varlen_ends is missing"),
    (dict(varlen_ends=ENDS), "varlen_starts is missing"),
    (dict(varlen_starts=STARTS[None], varlen_ends=ENDS), r"varlen_starts: shape \[1, 24\] must be \[24\]"),
    (dict(key_positions=SHUFFLED), "key_positions: needs varlen_starts and varlen_ends"),
    (dict(key_positions=SHUFFLED[1:], varlen_starts=STARTS, varlen_ends=ENDS), r"key_positions: shape \[23\] must be \[24\]"),
    (dict(query_valid_rows=torch.ones(3)), r"query_valid_rows: shape \[3\] must be \[24\] or \[2, 24\]"),
    (dict(calculate_per_token_loss=1), "calculate_per_token_loss=1: must be True or False"),
])  # fmt: skip
def test_refused_arguments(options, message):
    trained, topk, query, key = megatron_tensors()
    with pytest.raises(ValueError, match=message):
        megatron_indexer_loss(*trained, topk, query, key, 0.3, 0.5, False, **options)


def test_a_sparse_loss_needs_its_list():
    trained, _, query, key = megatron_tensors()
    with pytest.raises(ValueError, match="topk_indices: None must be the list of keys with sparse_loss=True"):
        megatron_indexer_loss(*trained, None, query, key, 0.3, 0.5, True)


def test_arguments_are_those_of_megatron_core():
    assert list(signature(megatron_indexer_loss).parameters)[:16] == OF_INDEXER + ARGUMENTS


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_megatron_core(options, sparse):
    """compute_dsa_indexer_loss and DSAIndexerLossAutoScaler of the installed package."""
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    first, *names = signature(dsa.compute_dsa_indexer_loss).parameters
    assert first == "index_scores" and names == ARGUMENTS[: len(names)], "an argument that megatron_indexer_loss does not have"
    if not options.keys() <= set(names):
        pytest.skip("an option of a later release")
    trained, topk, query, key = megatron_tensors()
    scores = scores_of(*trained)
    if options.keys().isdisjoint(("mask", "varlen_starts")):
        scores = scores + torch.full((24, 24), -torch.inf).triu(1)
    theirs = dsa.compute_dsa_indexer_loss(scores, topk, query, key, 0.3, 0.5, sparse, ONE_RANK, **options)
    ours = megatron_indexer_loss(*trained, topk, query, key, 0.3, 0.5, sparse, ONE_RANK, **options)
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
    rows = torch.tensor([[True], [False]]).expand(2, 24)
    both = megatron_indexer_loss(*trained, topk, query, key, 0.3, 1.0, True, query_valid_rows=rows, loss_mask=2 * mask)
    torch.testing.assert_close(both, first)


def test_attached_loss():
    x, w = torch.ones(4, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    output = attach_loss(2 * x, w.square().sum(), scale=0.5)
    assert torch.equal(output, 2 * x)
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0)) and torch.equal(w.grad, torch.full((2,), 3.0))
    for given, message in ((x, w), r"loss: shape \[2\] must be a scalar"), (((x, x), w), "output: tuple must be a tensor"), (
        (x, 1.0), "loss: float must be a tensor"
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            attach_loss(*given)
