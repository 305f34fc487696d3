"""attention_stats, compared with the whole matrix in float64."""

import pytest
import torch
from cases import COMPILER

import streamkl
from streamkl import Statistics, attention_stats
from streamkl._options import Lengths
from streamkl._problem import Options
from streamkl.stats import attention_stats_op

ALL = Statistics._fields


def matrix(q, k, *, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0, sink=None, key_lengths=None,
           key_begin=None, key_end=None):  # fmt: skip
    """(logits, P, LSE) in float64 of tensors [batch, length, heads, dim]; masked logits are -inf."""
    q, k = q.double().transpose(1, 2), k.double().transpose(1, 2)
    x = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
    x = x * (softmax_scale or q.shape[-1] ** -0.5)
    x = softcap * torch.tanh(x / softcap) if softcap else x
    position, key = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = torch.ones(q.shape[0], q.shape[2], k.shape[2], dtype=torch.bool)
    seen &= (left < 0) | (key >= position - left)
    seen &= (right < 0) | (key <= position + right)
    for bound, compare in (key_lengths, "lt"), (key_begin, "ge"), (key_end, "lt"):
        if bound is not None:
            seen &= getattr(key, compare)(bound[:, None, None] if bound.dim() == 1 else bound[..., None])
    x = x.masked_fill(~seen[:, None], -torch.inf)
    outcomes = x if sink is None else torch.cat([x, sink.double()[:, None, None].expand(*x.shape[:3], 1)], -1)
    lse = torch.where(seen.any(-1)[:, None], outcomes.logsumexp(-1), -torch.inf)
    return x, torch.where(seen[:, None], (x - lse[..., None]).exp(), 0.0).nan_to_num(0.0), lse


def distances(len_q, len_k):
    return (torch.arange(len_q)[:, None] + len_k - len_q - torch.arange(len_k)).abs()


def expected(q, k, *, row_weight=None, row_range=(0, 0), per_key_head=False, distance_buckets=24, key_ranges=(), top_k=8,
             chosen_rows=(), **options):  # fmt: skip
    """All statistics from the matrix."""
    x, p, lse = matrix(q, k, **options)
    batch, heads, len_q, len_k = p.shape
    rows = torch.zeros(len_q)
    rows[row_range[0] : row_range[1] or None] = 1
    weight = (torch.ones(batch, heads, len_q) if row_weight is None else row_weight.expand(batch, heads, len_q)) * rows
    counted = p.masked_fill((weight == 0)[..., None], 0.0)
    by_key = (counted * weight[..., None].double()).sum(2), counted.amax(2)
    if per_key_head:
        groups = [each.unflatten(1, (k.shape[2], -1)) for each in by_key]
        by_key = groups[0].sum(2), groups[1].amax(2)
    sink, is_empty = options.get("sink"), lse == -torch.inf
    entropy = -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)
    if sink is not None:
        p_sink = (sink.double()[:, None] - lse).exp().masked_fill(is_empty, 0.0)
        entropy -= p_sink * torch.where(p_sink > 0, p_sink, 1.0).log()
    d = distances(len_q, len_k)
    bucket = torch.where(d > 0, d.double().clamp(min=1).log2().floor() + 1, 0).clamp(max=distance_buckets - 1)
    weighted = (counted * weight[..., None].double()).flatten(2)
    mass = [torch.where((bucket == n).flatten(), weighted, 0.0).sum(-1) for n in range(distance_buckets)]
    ranges = [p[..., begin:end].sum(-1) for begin, end in key_ranges]
    range_mass = torch.stack(ranges, -1) if ranges else p.new_zeros(batch, heads, len_q, 0)
    top = p.topk(min(top_k, len_k))
    return Statistics(
        *by_key,
        lse=lse,
        entropy=entropy,
        max_logit=x.amax(-1),
        expected_distance=(p * d).sum(-1),
        head_max_logit=x.masked_fill((weight == 0)[..., None], -torch.inf).flatten(2).amax(-1),
        distance_mass=torch.stack(mass, -1),
        range_mass=range_mass,
        range_sum=(range_mass * weight[..., None].double()).sum(2),
        top_keys=None,
        top_p=top.values,
        weights=p[:, :, list(chosen_rows)],
    )


def check(found, exact, tolerance=2e-6):
    for name, result in exact._asdict().items():
        actual = getattr(found, name)
        if result is None or actual is None:
            continue
        actual = actual[..., : result.shape[-1]] if name == "top_p" else actual
        assert actual.shape == result.shape and actual.dtype == torch.float32, name
        assert torch.equal(actual == -torch.inf, result == -torch.inf), name
        finite = result != -torch.inf
        error = (actual.double() - result)[finite].abs().max().item() if finite.any() else 0.0
        assert error <= tolerance * (1 + result[finite].abs().max().item()), f"{name}: off by {error}"


def tensors(batch=2, len_q=37, len_k=53, heads=4, key_heads=2, dim=8, dtype=torch.float32):
    return torch.randn(batch, len_q, heads, dim).to(dtype), torch.randn(batch, len_k, key_heads, dim).to(dtype)


CASES = {
    "plain": dict(),
    "causal": dict(causal=True),
    "window": dict(window_size=(5, 3), softcap=2.0),
    "scale": dict(softmax_scale=0.7, per_key_head=True),
    "padded": dict(key_lengths=torch.tensor([53, 20]), causal=True),
    "bounds": dict(key_begin=torch.arange(37).expand(2, -1), key_end=torch.arange(10, 47).expand(2, -1)),
    "sinks": dict(causal=True, sink=torch.tensor([0.5, -1.0, 3.0, 0.0]).bfloat16()),
    "rows": dict(row_range=(-9, -2), row_weight=torch.arange(37.0).expand(2, 4, 37) % 3, causal=True),
    "counts": dict(distance_buckets=5, top_k=64, row_range=(3, 30), per_key_head=True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_matrix(case, dtype):
    q, k = tensors(dtype=dtype)
    options = dict(CASES[case], key_ranges=[(0, 4), (10, 53)], chosen_rows=[0, -1, 5])
    exact = expected(q, k, **options)
    found = attention_stats(q, k, want=ALL, **options)
    check(found, exact)
    heads_first = attention_stats(q.transpose(1, 2), k.transpose(1, 2), layout="bhnd", want=ALL, **options)
    for name in ALL:
        assert torch.equal(getattr(found, name), getattr(heads_first, name)), name
    keys = found.top_keys.long()
    _, p, _ = matrix(q, k, **{name: value for name, value in options.items() if name in MATRIX_OPTIONS})
    of_keys = p.gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, 0.0)
    assert (of_keys - found.top_p).abs().max() < 2e-6
    given = attention_stats(q, k, want=[name for name in ALL if name != "lse"], lse=exact.lse.float(), **options)
    check(given, exact._replace(lse=None))


def test_any_strides():
    q, k = tensors()
    arrays = dict(sink=torch.randn(4, 2)[:, 1], key_lengths=torch.tensor([[53, 0], [20, 0]], dtype=torch.int32)[:, 0])
    strided = (each.transpose(1, 3).contiguous().transpose(1, 3) for each in (q, k))
    check(attention_stats(*strided, want=("key_sum", "lse"), **arrays), expected(q, k, **arrays))


MATRIX_OPTIONS = ("causal", "window_size", "softmax_scale", "softcap", "sink", "key_lengths", "key_begin", "key_end")


def test_packed():
    """Each packed sequence has the statistics of a batch of its own; tokens after the last one have none."""
    lengths = [(5, 9), (0, 3), (17, 17)]
    parts = [tensors(batch=1, len_q=a, len_k=b) for a, b in lengths]
    q, k = (torch.cat([*(part[side][0] for part in parts), torch.full((2, 4 >> side, 8), torch.nan)]) for side in (0, 1))
    cu_q, cu_k = (torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0) for side in (0, 1))
    options = dict(causal=True, want=ALL, distance_buckets=6, top_k=3)
    found = attention_stats(
        q, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=17, max_seqlen_k=17, chosen_rows=[-1], key_ranges=[(0, 2)],
        **{**options, "want": [name for name in ALL if name != "weights"]},
    )  # fmt: skip
    for n, part in enumerate(parts):
        if part[0].shape[1] == 0:
            continue
        alone = attention_stats(*part, chosen_rows=[-1], key_ranges=[(0, 2)], **options)
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        for name in ("lse", "entropy", "max_logit", "expected_distance", "range_mass", "top_keys", "top_p"):
            assert torch.equal(getattr(found, name)[:, rows], getattr(alone, name)[0]), name
        for name in ("key_sum", "key_max"):
            assert torch.equal(getattr(found, name)[:, keys], getattr(alone, name)[0]), name
        for name in ("head_max_logit", "distance_mass", "range_sum"):
            assert torch.equal(getattr(found, name)[n], getattr(alone, name)[0]), name
    assert (found.lse[:, 22:] == -torch.inf).all() and (found.top_keys[:, 22:] == -1).all()
    assert (found.key_sum[:, 29:] == 0).all() and (found.key_sum[:, 9:12] == 0).all()
    weights = attention_stats(
        q[:22], k[:29], cu_seqlens_q=cu_q[[0, 1]], cu_seqlens_k=cu_k[[0, 1]], causal=True, want=["weights"], chosen_rows=[-1]
    ).weights  # fmt: skip
    assert (weights[0, :, 0, 9:] == 0).all() and torch.allclose(weights.sum(-1), torch.ones(1, 4, 1))


def test_sums_over_parts_of_the_keys_add_up():
    """With the LSE of all keys, statistics of a part of the keys are parts of the whole: keys split over calls or ranks."""
    q, k = tensors()
    whole = attention_stats(q, k, want=("key_sum", "entropy", "lse"))
    parts = [attention_stats(q, k[:, keys], lse=whole.lse) for keys in (slice(0, 30), slice(30, 53))]
    assert torch.allclose(torch.cat([part.key_sum for part in parts], -1), whole.key_sum, rtol=1e-5)
    assert torch.allclose(parts[0].entropy + parts[1].entropy, whole.entropy, rtol=1e-5)


def test_the_entropy_is_a_loss():
    """The reverse KL to a teacher of zeros is log n - H: its gradient is that of the entropy, with the other sign."""
    q, k = tensors(len_q=12, len_k=12)
    q.requires_grad_(), k.requires_grad_()
    zeros = torch.zeros_like(q[..., :1]), torch.zeros_like(k[..., :1])
    kl = streamkl.attention_kl(*zeros, q, k, causal=True, direction="reverse", reduction="none")
    seen = torch.arange(1.0, 13.0)
    entropy = attention_stats(q, k, causal=True).entropy
    assert torch.allclose(seen.log() - kl, entropy, atol=1e-5)
    _, p, _ = matrix(q, k, causal=True)
    exact = -(p * torch.where(p > 0, p, 1.0).log()).sum()
    for found, wanted in zip(torch.autograd.grad(-kl.sum(), (q, k)), torch.autograd.grad(exact, (q, k))):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_scores_of_kv_cache_presses():
    """kvpress: ObservedAttentionPress and KVzipPress compute these scores from eager attention weights."""
    q, k = tensors(batch=1, len_q=53)
    _, p, _ = matrix(q, k, causal=True)
    found = attention_stats(q, k, causal=True, want=("key_sum", "key_max"), per_key_head=True)
    observed = p.sum(2) / torch.arange(53, 0, -1)
    observed = observed.view(1, 2, -1, 53).mean(2)
    scores = found.key_sum / 2 / torch.arange(53, 0, -1)
    assert (scores - observed).abs().max() < 1e-5
    assert torch.equal(scores.topk(20).indices.sort().values, observed.topk(20).indices.sort().values)
    assert (found.key_max - p.view(1, 2, 2, 53, 53).amax((2, 3))).abs().max() < 1e-6


BAD = {
    "want": (dict(want="key_sum"), "want='key_sum': must be a list or tuple of names of key_sum, key_max, "),
    "name": (dict(want=["mean"]), "want=.'mean'.: must be a list or tuple of names"),
    "top_k": (dict(top_k=65), "top_k=65: must be a whole number, 1 to 64"),
    "buckets": (dict(distance_buckets=True), "distance_buckets=True: must be a whole number, 1 to 64"),
    "rows": (dict(row_range=(0, None)), r"row_range=\(0, None\): must be a pair \(begin, end\) of whole numbers"),
    "row wrap": (dict(row_range=(2**64 + 3, 0)), r"row_range=\(18446744073709551619, 0\): must be .* up to 2\^40"),
    "flag": (dict(per_key_head=1), "per_key_head=1: must be True or False"),
    "ranges": (dict(want=["range_sum"]), "key_ranges=None: range_mass and range_sum need it"),
    "range shape": (dict(want=["range_sum"], key_ranges=[1, 2]), r"key_ranges: shape \[2\] must be \[ranges, 2\]"),
    "range": (dict(want=["range_sum"], key_ranges=[(0, 54)]), r"key_ranges\[0, 0\]=0..54: must be 0 <= begin <= end <= 53"),
    "chosen": (dict(want=["weights"]), "chosen_rows=None: weights need it"),
    "chosen type": (dict(want=["weights"], chosen_rows=[0.5]), "chosen_rows: torch.float32 on cpu must be torch.int32 or"),
    "chosen shape": (dict(want=["weights"], chosen_rows=[[1], [2], [3]]), r"chosen_rows: shape \[3, 1\] must be \[rows\] or \[2, rows\]"),
    "chosen row": (dict(want=["weights"], chosen_rows=[37]), r"chosen_rows\[0, 0\]=37: must be -37..36, a row of the sequence"),
    "row before": (dict(want=["weights"], chosen_rows=[[0, 1], [0, -40]]), r"chosen_rows\[1, 1\]=-40: must be -37..36, a row"),
    "chosen list": (dict(want=["weights"], chosen_rows=[1, [2]]), r"chosen_rows=\[1, \[2\]\]: must be a list or a tensor of whole"),
    "chosen wrap": (dict(want=["weights"], chosen_rows=[2**70]), r"chosen_rows=\[1180591620717411303424\]: must be a list or"),
    "no range": (dict(want=["range_sum"], key_ranges=[]), r"key_ranges: shape \[0\] must be \[ranges, 2\] or \[2, ranges, 2\]"),
    "range list": (dict(want=["range_sum"], key_ranges=[(0, None)]), r"key_ranges=\[\(0, None\)\]: must be a list or a tensor of whole"),
    "want nothing": (dict(want=None), "want=None: must be a list or tuple of names"),
    "want once": (dict(want=iter(["lse"])), "want=<list_iterator .*>: must be a list or tuple of names"),
    "lse": (dict(want=["lse"], lse=torch.zeros(2, 4, 37)), 'want: must not contain "lse" if lse is given'),
    "lse shape": (dict(lse=torch.zeros(2, 4, 36)), r"lse: shape \[2, 4, 36\] must be \[2, 4, 37\]"),
    "sink": (dict(sink=torch.zeros(3)), r"sink: shape \[3\] must be \[4\]"),
    "sink type": (dict(sink=torch.zeros(4).int()), "sink: must be a tensor of floating-point numbers"),
    "weight": (dict(row_weight=torch.ones(3)), r"row_weight: shape \[3\] must be \[2, 37\] or \[2, 4, 37\]"),
    "tensor": (dict(lse=1.0), "lse: float must be a torch.Tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        attention_stats(*tensors(), **options)


@pytest.mark.parametrize("array", [dict(want=["weights"], chosen_rows=[0]), dict(want=["range_sum"], key_ranges=[(0, 1)])])
def test_errors_about_shapes_come_first(array):
    """Arrays that depend on the number of sequences do not hide what is wrong with it."""
    q, k = tensors()
    for shape in (), (8,), (37, 4, 8):
        with pytest.raises(ValueError, match=r"q: shape .* must be \[batch, length, heads, dim\]"):
            attention_stats(torch.zeros(shape), k, **array)
    for cu_seqlens in torch.tensor(6), torch.zeros(0, dtype=torch.int32):
        with pytest.raises(ValueError, match=r"cu_seqlens_q: .* must be torch.int32 of shape \[sequences \+ 1\]"):
            attention_stats(q[0], k[0], cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **array)


def test_rows_of_empty_sequences():
    q, k = (each[0] for each in tensors())
    cu_q, cu_k = torch.tensor([0, 0, 37]), torch.tensor([0, 5, 53])
    options = dict(want=["weights"], chosen_rows=[-1, 0])
    found = attention_stats(q, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options).weights
    assert not found[0].any() and not found[1, ..., 48:].any()
    assert torch.equal(found[1, ..., :48], attention_stats(q[None], k[None, 5:], **options).weights[0])
    assert attention_stats(q[None], k[None], want=["weights"], chosen_rows=[]).weights.shape == (1, 4, 0, 53)


def test_row_bounds_of_no_rows():
    """An empty tensor has no address."""
    for batch, len_q in (0, 6), (2, 0):
        q, k = tensors(batch=batch, len_q=len_q)
        found = attention_stats(q, k, key_begin=torch.zeros(batch, len_q, dtype=torch.int32))
        assert found.entropy.shape == (batch, 4, len_q) and not found.key_sum.any()


def test_transforms_have_no_other_implementation():
    q, k = tensors()
    with pytest.raises(RuntimeError, match="streamkl.attention_stats does not support torch.func .* the batch dimension for vmap$"):
        torch.func.vmap(lambda q, k: attention_stats(q[None], k[None]).key_sum)(q, k)


def test_errors_name_q_and_k():
    q, k = tensors()
    with pytest.raises(ValueError, match=r"^q \[2, 37, 4, 8\] and k \[2, 53, 2, 7\]: head sizes 8 and 7 must be equal"):
        attention_stats(q, k[..., :7])
    with pytest.raises(TypeError, match="attention_stats.. got an unexpected keyword argument 'direction'"):
        attention_stats(q, k, direction="forward")
    with pytest.raises(ValueError, match="distance_share: needs distance_mass in want"):
        attention_stats(q, k).distance_share


def test_shares():
    q, k = tensors()
    found = attention_stats(q, k, causal=True, want=["distance_mass"], distance_buckets=7)
    assert torch.allclose(found.distance_share.sum(-1), torch.ones(2, 4)) and found.key_sum is None


def test_operator():
    q, k = tensors(batch=1, len_q=5, len_k=5)
    ranges, rows = torch.tensor([[[0, 2]]], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    own = (None, None, ranges, rows, (1 << len(ALL)) - 1, 0, 0, False, 4, 2)
    arguments = (q, k, None, *own, *Lengths(), *Options())
    torch.library.opcheck(attention_stats_op.overload, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiled():
    q, k = tensors()
    compiled = torch.compile(lambda q, k: attention_stats(q, k, causal=True).key_sum * 2, fullgraph=True, backend=COMPILER)
    assert torch.equal(compiled(q, k), attention_stats(q, k, causal=True).key_sum * 2)


def test_autocast_promotes_keys():
    """Autocast may leave queries and keys in different types."""
    q, k = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8).bfloat16()
    with pytest.raises(ValueError, match="must be of one type"):
        streamkl.attention_stats(q, k, want=["entropy"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = streamkl.attention_stats(q, k, want=["entropy"]).entropy
    torch.testing.assert_close(found, streamkl.attention_stats(q, k.float(), want=["entropy"]).entropy)


def test_bits_of_no_result():
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="results=8192: must be bits of key_sum, key_max"):
        attention_stats_op(q, q, *[None] * 5, 1 << 13, 0, 0, False, 0, 0, *Lengths(), *Options(gradients=0))
