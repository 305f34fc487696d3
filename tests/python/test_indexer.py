"""Results of indexer_kl, compared with the reference in float64."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from cases import COMPILER, LONG, check_f16_range, make_disagreeing
from hypothesis import given, settings
from hypothesis import strategies as st
from indexer_cases import Indexer, check_masked_nan, compare, exact_of, gradients_of, make_indexer

import streamkl
from streamkl import _call, reference
from streamkl import _library as lib
from streamkl._problem import DK_S, DQ_S, DW_S, Options

TOP_K = {"dense": 0, "sparse": 9}
MASKS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 2)),
    "causal key lengths": dict(causal=True, window_size=(5, 0), key_lengths=torch.tensor([0, 23])),
}


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("keys", TOP_K)
def test_masks(keys, mask, direction):
    for reduction in ("mean", "sum", "none"):
        compare(make_indexer(top_k=TOP_K[keys]), direction=direction, reduction=reduction, **MASKS[mask])


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
@pytest.mark.parametrize("keys", TOP_K)
def test_packed(keys, layout):
    """Includes an empty sequence, one without keys, one with more queries than keys, and rows after the last sequence."""
    bounds_q, bounds_k = [0, 3, 3, 5, 12, 17], [0, 6, 6, 6, 10, 21]
    indexer = make_indexer(packed=True, layout=layout, heads_s=2, top_k=TOP_K[keys])
    if indexer.indices is not None:  # keys of the row's own sequence
        by_row = indexer.indices.transpose(0, 1) if layout == "bhnd" else indexer.indices
        for q_0, q_1, k_0, k_1 in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
            by_row[q_0:q_1].clamp_(max=k_1 - k_0 - 1)
        by_row[bounds_q[-1] :] = 1000  # rows of no sequence are not read
    lengths = dict(cu_seqlens_q=torch.tensor(bounds_q), cu_seqlens_k=torch.tensor(bounds_k))
    for mask in ({}, dict(causal=True), dict(causal=True, window_size=(2, 0))):
        for reduction in ("mean", "none"):
            compare(indexer, reduction=reduction, row_weight=torch.linspace(0, 1, 19), layout=layout, **mask, **lengths)


@pytest.mark.parametrize("keys", TOP_K)
def test_scales_softcap_and_no_relu(keys):
    indexer = make_indexer(top_k=TOP_K[keys])
    compare(indexer, softmax_scale_t=0.7, softmax_scale_s=-0.2, softcap_t=2.0, causal=True)
    compare(indexer, relu=False, causal=True)
    compare(indexer, relu=False, direction="reverse", reduction="none")


POOLED = {"complete": 23 // 4, "earlier": 6, "visible": 6}  # blocks of 4 keys


@pytest.mark.parametrize("pool", ["max", "sum"])
@pytest.mark.parametrize("pool_heads", ["mean", "max"])
@pytest.mark.parametrize("blocks", POOLED)
@pytest.mark.parametrize("keys", TOP_K)
def test_pooled_teachers(keys, blocks, pool_heads, pool):
    options = dict(pool=(pool, 4), pool_heads=pool_heads, pool_blocks=blocks)
    for n, mask in enumerate(MASKS.values()):
        reduction, direction = ("mean", "sum", "none")[n % 3], ("forward", "reverse")[n % 2]
        indexer = make_indexer(top_k=TOP_K[keys] // 2, keys_s=POOLED[blocks], heads_s=1 + n % 2, index_heads=2, seed=n)
        compare(indexer, **options, **mask, reduction=reduction, direction=direction)
        weight = torch.linspace(0, 1, 19).expand(2, -1)
        compare(indexer, **options, **mask, reduction=reduction, row_weight=weight, relu=False)


def test_a_pooled_teacher_of_single_keys_is_the_teacher():
    indexer = make_indexer()
    plain = streamkl.indexer_kl(*indexer, causal=True)
    for pool in ("max", "sum"):
        torch.testing.assert_close(streamkl.indexer_kl(*indexer, causal=True, pool=(pool, 1)), plain)


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
@pytest.mark.parametrize("heads_s", [1, 2, 4])
def test_attention_as_the_student_of_a_pooled_teacher(heads_s, layout):
    indexer = make_indexer(heads_s=heads_s, index_heads=1, keys_s=5, layout=layout)
    q_t, k_t, q_s, k_s, w_s, _ = indexer
    options = dict(causal=True, pool=("max", 4), pool_heads="max", layout=layout)
    ones = Indexer(q_t, k_t, q_s, k_s, torch.ones_like(w_s))
    exact = exact_of(ones)
    expected, rows = reference.indexer_kl(*exact, return_rows=True, relu=False, **options)
    loss, lse_t, lse_s = streamkl.attention_kl(q_t, k_t, q_s, k_s, return_lse=True, **options)
    for made, wanted in (loss, expected), (lse_t, rows.lse_t), (lse_s, rows.lse_s):
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-5)
    alone = streamkl.attention_kl(q_t, k_t, q_s, k_s, **options)
    wanted = torch.autograd.grad(expected, [exact.q_s, exact.k_s])
    for gradient, exact_gradient in zip(torch.autograd.grad(alone, [q_s, k_s]), wanted):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-4, atol=1e-6)


REFUSED_WITH_POOL = {
    "sink_s": dict(sink_s=torch.zeros(4)),
    "lse_s": dict(lse_s=torch.zeros(2, 4, 19)),
    "softcap_s=3.0": dict(softcap_s=3.0),
    "link_s='linear'": dict(link_s="linear"),
}


@pytest.mark.parametrize("name", REFUSED_WITH_POOL)
def test_what_the_student_of_a_pooled_teacher_has_not(name):
    q_t, k_t, q_s, k_s, *_ = make_indexer(heads_s=4, index_heads=1, keys_s=5)
    with pytest.raises(ValueError, match=f"{name}: must be left out with pool"):
        streamkl.attention_kl(q_t, k_t, q_s, k_s, pool=("max", 4), **REFUSED_WITH_POOL[name])


def test_a_pooled_teacher_takes_any_lse():
    """The target is divided by its sum: a constant per row cancels, one per head weighs the heads."""
    indexer = make_indexer(keys_s=5)
    options = dict(causal=True, pool=("max", 4))
    loss, rows = streamkl.indexer_kl(*indexer, **options, return_rows=True)
    for wider in (False, True):
        moved = streamkl.indexer_kl(*indexer, **options, lse_t=rows.lse_t + 1.5, lse_t_wider=wider)
        torch.testing.assert_close(moved, loss)
        with torch.no_grad():
            torch.testing.assert_close(
                streamkl.indexer_kl(*indexer, **options, lse_t=rows.lse_t + 1.5, lse_t_wider=wider), loss
            )
    of_heads = rows.lse_t + torch.arange(4.0)[:, None]
    compare(indexer, **options, lse_t=of_heads.float())


def test_pooled_teachers_keep_nan_of_hidden_keys_away():
    indexer = make_indexer(keys_s=5)
    masks = dict(key_lengths=torch.tensor([23, 9]), pool=("max", 4))
    clean = streamkl.indexer_kl(*indexer, **masks)
    with torch.no_grad():
        indexer.k_t[1, 9:], indexer.k_s[1, 2:] = torch.nan, torch.inf
    loss = streamkl.indexer_kl(*indexer, **masks)
    assert torch.equal(loss, clean)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, indexer.trained))
    with torch.no_grad():
        indexer.k_t[1, 8] = torch.nan  # no complete block has this key, but the softmax of the teacher does
    assert streamkl.indexer_kl(*indexer, **masks).isnan()


@pytest.mark.parametrize("pool_heads", ["mean", "max"])
@pytest.mark.parametrize("pool", ["max", "sum"])
@pytest.mark.parametrize("keys", TOP_K)
def test_a_nan_of_a_pooled_teacher_shows(keys, pool, pool_heads):
    """Under a given LSE only the block of a NaN, and so its rows, are NaN: the first, the middle and the last of a block."""
    options = dict(causal=True, pool=(pool, 4), pool_heads=pool_heads, reduction="none")
    for key in (8, 9, 11):
        indexer = make_indexer(len_q=23, keys_s=5, heads_t=2)
        if TOP_K[keys]:
            indexer = indexer._replace(indices=torch.arange(5, dtype=torch.int32).expand(2, 23, 1, 5).contiguous())
        lse_t = streamkl.indexer_kl(*indexer, **options, return_rows=True)[1].lse_t.clone()
        lse_t[lse_t.isinf()] = 0.0
        indexer.k_t[:, key, 0] = torch.nan
        rows = streamkl.indexer_kl(*indexer, **options, lse_t=lse_t)
        assert rows[..., :11].isfinite().all() and rows[..., 11:].isnan().all()


@pytest.mark.parametrize("head", range(3))
@pytest.mark.parametrize("keys", TOP_K)
def test_a_nan_of_any_teacher_head_shows(keys, head):
    indexer = make_indexer(heads_t=3, key_heads_t=1, index_heads=1, dim_s=8, top_k=TOP_K[keys])
    indexer.q_t[1, 7, head] = torch.nan
    rows = streamkl.indexer_kl(*indexer, reduction="none")
    assert rows[1, 0, 7].isnan() and rows.isnan().sum() == 1
    if not TOP_K[keys]:
        rows = streamkl.attention_kl(*indexer[:2], indexer.q_s, indexer.k_s, reduction="none")
        assert rows[1, 0, 7].isnan() and rows.isnan().sum() == 1


BAD_POOLS = {
    "pool=max: must be None": dict(pool="max"),
    r"pool=\('mean', 4\): must be None, \('max', block\) or \('sum', block\)": dict(pool=("mean", 4)),
    r"pool=\('max', 0\): must": dict(pool=("max", 0)),
    r"pool=\('max', True\): must": dict(pool=("max", True)),
    "pool_heads='sum': must be 'mean' or 'max'": dict(pool=("max", 4), pool_heads="sum"),
    "pool_blocks='all': must be 'complete', 'earlier' or 'visible'": dict(pool=("max", 4), pool_blocks="all"),
    "pool_heads=1: must be 0 unless pool is set": dict(pool_heads="max"),
    r"k_s: shape \[2, 5, 1, 5\] must have 6 keys, one per block of 4 of the 23 keys of k_t, with pool_blocks='visible'":
        dict(pool=("max", 4), pool_blocks="visible"),
    "lse_t_visible: must be None with pool": dict(pool=("max", 4), lse_t=1, lse_t_wider=True, lse_t_visible=1),
    "row_weight: must be a tensor or None with pool": dict(pool=("max", 4), lse_t=1, lse_t_wider=True, row_weight="mass"),
    "parallel: must be None with pool": dict(pool=("max", 4), parallel=streamkl.Parallel()),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_POOLS)
def test_bad_options_of_a_pooled_teacher(message):
    options = dict(BAD_POOLS[message])
    streamkl.indexer_kl(*make_indexer(keys_s=5), pool=("max", 4))
    for name in {"lse_t", "lse_t_visible"} & options.keys():
        options[name] = torch.zeros(2, 4, 19)
    indexer = make_indexer(keys_s=5 if "pool" in options else None)
    with pytest.raises(ValueError, match=message.replace("pool=max", "pool='max'")):
        streamkl.indexer_kl(*indexer, **options)
    with pytest.raises(ValueError, match="packed=1: must be 0 with pool"):
        packed = make_indexer(packed=True, keys_s=5)
        offsets = torch.tensor([0, 19], dtype=torch.int32), torch.tensor([0, 23], dtype=torch.int32)
        streamkl.indexer_kl(*packed, pool=("max", 4), cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])


@pytest.mark.parametrize("heads", [
    dict(heads_t=1, key_heads_t=1, index_heads=1), dict(heads_t=6, key_heads_t=6, index_heads=7),
    dict(heads_t=5, key_heads_t=1, dim_t=576, dim_s=32),  # latent attention: one key head
    dict(heads_t=6, key_heads_t=3, heads_s=3, key_heads_s=1), dict(heads_t=4, key_heads_t=2, heads_s=2, key_heads_s=2),
])  # fmt: skip
@pytest.mark.parametrize("keys", TOP_K)
def test_heads(keys, heads):
    for direction in ("forward", "reverse"):
        compare(make_indexer(top_k=TOP_K[keys], **heads), causal=True, direction=direction)


@pytest.mark.parametrize("types", [
    (torch.bfloat16, torch.bfloat16, torch.float32), (torch.float16, torch.float16, torch.float16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("keys", TOP_K)
def test_types(keys, types):
    """f32 weights with 16-bit queries, a single type, and a teacher of another type."""
    compare(make_indexer(top_k=TOP_K[keys], **dict(zip(("dtype_t", "dtype_s", "dtype_w"), types))), causal=True)


@pytest.mark.parametrize("keys", TOP_K)
@pytest.mark.parametrize("type_w", [torch.float16, torch.float32])
def test_f16_gradients_stay_in_range(keys, type_w):
    q_t, k_t, q_s, k_s = make_disagreeing()
    w_s = torch.ones(1, q_s.shape[1], 1, 1, dtype=type_w, requires_grad=True)
    indices = torch.tensor([0, 1]).expand(1, q_s.shape[1], 1, 2) if keys == "sparse" else None
    check_f16_range(streamkl.indexer_kl, reference.indexer_kl, [q_t, k_t, q_s, k_s, w_s, indices])


@pytest.mark.parametrize("wanted", range(8))
def test_every_subset_of_gradients(wanted):
    indexer = make_indexer()
    for bit, tensor in enumerate(indexer[2:5]):
        tensor.requires_grad_(bool(wanted >> bit & 1))
    if wanted:
        compare(indexer, causal=True)
        compare(indexer, direction="reverse", reduction="none")
    else:
        assert not streamkl.indexer_kl(*indexer).requires_grad


def test_the_reference_by_central_differences():
    indexer = exact_of(make_indexer(batch=1, len_q=4, len_k=5, top_k=3, heads_s=2))
    for options in ({}, dict(direction="reverse", relu=False), dict(lse_t=torch.full((1, 4, 4), 3.0), lse_t_wider=True)):
        def loss(*trained):
            return reference.indexer_kl(*indexer[:2], *trained, indexer.indices, causal=True, **options)

        assert torch.autograd.gradcheck(loss, indexer.trained)


lengths = st.integers(0, 40)


@settings(max_examples=2000 if LONG else 100, deadline=None, derandomize=not LONG)
@given(
    batch=st.integers(1, 3), len_q=lengths, len_k=lengths, heads_s=st.integers(1, 2), group_size=st.integers(1, 3),
    index_heads=st.integers(1, 9), dims=st.tuples(st.integers(1, 40), st.integers(1, 40)), top_k=st.integers(0, 12),
    causal=st.booleans(), window=st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
    layout=st.sampled_from(["bnhd", "bhnd"]), direction=st.sampled_from(["forward", "reverse"]),
    reduction=st.sampled_from(["mean", "sum", "none"]), relu=st.booleans(),
)  # fmt: skip
def test_any_shape_and_mask(
    batch, len_q, len_k, heads_s, group_size, index_heads, dims, top_k, causal, window, layout, direction, reduction, relu
):
    indexer = make_indexer(
        batch, len_q, len_k, heads_s * group_size, heads_s, heads_s, 1, index_heads, *dims, top_k if len_k else 0, layout
    )
    compare(
        indexer, causal=causal, window_size=window, layout=layout, direction=direction, reduction=reduction, relu=relu
    )


def test_an_indexer_learns():
    """As docs/guide/indexers.md: first dense, then on its own top-k keys, which in the end hold the teacher's attention."""
    tokens, top_k = 2 * torch.rand(1, 160, 12) - 1, 16
    projections = (3.3 * torch.eye(12).repeat(4, 1) + torch.rand(48, 12) - 0.5 for _ in range(2))  # similar heads
    teacher = [(tokens @ projection.T).unflatten(-1, (4, 12)) for projection in projections]
    parameters = [(torch.rand(width, 12) - 0.5).requires_grad_() for width in (8 * 12, 12, 8)]
    optimizer = torch.optim.Adam(parameters, lr=0.02, betas=(0.9, 0.99))

    def student():
        q, k, w = (tokens @ parameter.T for parameter in parameters)
        return q.unflatten(-1, (8, 12)), k, w + 1

    def own_keys():
        q, k, w = student()
        scores = torch.einsum("big,bigj->bij", w, torch.einsum("bigc,bjc->bigj", q, k).relu())
        best = scores.masked_fill(~torch.ones(160, 160).tril().bool(), -torch.inf).topk(top_k)
        return best.indices.masked_fill(best.values.isinf(), -1).int()

    lse_t = streamkl.indexer_kl(*teacher, *student(), causal=True, return_rows=True)[1].lse_t
    wider = dict(causal=True, lse_t=lse_t, lse_t_wider=True)

    def recall():
        """On rows that see far more than top_k keys."""
        return streamkl.indexer_kl(*teacher, *student(), own_keys(), return_rows=True, **wider)[1].mass[..., 64:].mean()

    def train(steps, sparse):
        losses = []
        for _ in range(steps):
            losses.append(streamkl.indexer_kl(*teacher, *student(), own_keys() if sparse else None, reduction="sum", **wider))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        return losses[0].item(), losses[-1].item()

    assert recall() < 0.6  # random keys
    first, last = train(120, sparse=False)
    assert last < 0.2 * first and recall() > 0.95
    first, last = train(20, sparse=True)
    assert last < first and recall() > 0.95


# ---- Equivalent calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_heads_dimension_of_one_student_head_is_optional(layout):
    indexer, heads = make_indexer(top_k=4, layout=layout), 1 if layout == "bhnd" else 2
    short = Indexer(*indexer[:3], *(tensor.squeeze(heads) for tensor in indexer[3:]))
    assert torch.equal(streamkl.indexer_kl(*short, layout=layout), streamkl.indexer_kl(*indexer, layout=layout))
    compare(short, layout=layout)


def test_layout_of_megatron():
    """[length, batch, heads, dim] as views; gradients have the strides of their tensors."""
    by_length = [t.detach().transpose(0, 1).contiguous().requires_grad_(t.requires_grad) for t in make_indexer()[:5]]
    views = Indexer(*(t.transpose(0, 1) for t in by_length))
    loss, copied = (streamkl.indexer_kl(*call, causal=True) for call in (views, [v.contiguous() for v in views[:5]]))
    assert torch.equal(loss, copied)
    for view, gradient in zip(views[2:5], torch.autograd.grad(loss, views[2:5], retain_graph=True)):
        assert gradient.stride() == view.stride()
    gradients, copies = (torch.autograd.grad(each, by_length[2:]) for each in (loss, copied))
    assert all(torch.equal(one, other) for one, other in zip(gradients, copies))


def test_views_equal_their_copies():
    """Slices of one projection, and a non-contiguous last dimension."""
    indexer = make_indexer(dim_s=8, top_k=4)
    wide = torch.randn(2, 19, 3, 16, requires_grad=True)
    transposed = torch.randn(2, 3, 19, requires_grad=True)
    doubled = indexer.indices.repeat_interleave(2, -1)

    def call(change):
        w_s = transposed.transpose(1, 2)
        return Indexer(*indexer[:2], *map(change, (wide[..., 4:12], indexer.k_s, w_s)), change(doubled[..., ::2]))

    loss, copied = (streamkl.indexer_kl(*call(change)) for change in (lambda t: t, torch.Tensor.contiguous))
    assert torch.equal(loss, copied)
    for one, other in zip(*(torch.autograd.grad(each, (wide, transposed)) for each in (loss, copied))):
        torch.testing.assert_close(one, other)


def test_64_bit_indices():
    indexer = make_indexer(top_k=4)
    long = indexer._replace(indices=indexer.indices.long())
    assert torch.equal(streamkl.indexer_kl(*long), streamkl.indexer_kl(*indexer))
    far = long._replace(indices=long.indices + 2**32)  # must not be truncated to 32 bits
    with pytest.raises(ValueError, match=r"indices\[0, 0, 0, 0\]=\d{10}: must be -2147483648..2147483647"):
        streamkl.indexer_kl(*far)


def test_given_lse_means_one_pass_over_the_teacher(monkeypatch):
    """First only the indexer's LSE, which does not read the teacher (NaN), then everything else in one pass."""
    indexer = make_indexer()
    lse_t = streamkl.indexer_kl(*indexer, causal=True, return_rows=True)[1].lse_t
    calls, run_function = [], lib.run_function
    monkeypatch.setattr(_call.lib, "run_function", lambda op: calls.append(op) or run_function(op))
    loss = streamkl.indexer_kl(*indexer, causal=True, lse_t=lse_t)
    torch.autograd.grad(loss, indexer.trained)
    assert calls == [lib.FORWARD, lib.FORWARD_BACKWARD]
    poisoned = [torch.full_like(tensor, torch.nan) for tensor in indexer[:2]]
    problem = (*[None] * 5, *Options(causal=True))
    (lse_s,) = torch.ops.streamkl.forward(*poisoned, *indexer[2:5], None, None, None, lse_t, lib.LSE_S, *problem)
    assert lse_s.isfinite().all()


# ---- LSEs that cover more keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_wider_lse(direction, reduction):
    """The LSE covers the whole sequence in addition to the indices: the mass is the recall of the indices."""
    indexer = make_indexer(top_k=6)
    dense = streamkl.indexer_kl(*indexer[:5], causal=True, return_rows=True)[1]
    wider = dict(lse_t=dense.lse_t, lse_t_wider=True, causal=True, direction=direction, reduction=reduction)
    over_list = streamkl.indexer_kl(*indexer, causal=True, return_rows=True)[1].lse_t
    for more in {}, dict(lse_t_visible=over_list), dict(row_weight="mass"):
        compare(indexer, **wider, **more)
    once = indexer._replace(indices=torch.arange(6, dtype=torch.int32).expand(indexer.indices.shape))
    mass = streamkl.indexer_kl(*once, lse_t=dense.lse_t, lse_t_wider=True, causal=True, return_rows=True)[1].mass
    x = reference.logits(*(t[0].transpose(0, 1).double() for t in indexer[:2]), None, 0.0)
    p = torch.softmax(x.masked_fill(~reference.visible_keys(19, 23, causal=True), -torch.inf), -1).mean(0)
    torch.testing.assert_close(mass[0, 0].double(), p[:, :6].sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [dict(layout="bhnd"), dict(packed=True), dict(packed=True, layout="bhnd")])
def test_wider_lse_of_other_layouts(how):
    """As many sequences, rows and heads as no other dimension has."""
    indexer = make_indexer(batch=3, heads_t=4, heads_s=2, top_k=6, **how)
    options = dict(layout=how.get("layout", "bnhd"))
    if "packed" in how:
        options |= dict(cu_seqlens_q=torch.tensor([0, 7, 19]), cu_seqlens_k=torch.tensor([0, 9, 23]))
        indexer.indices[indexer.indices >= 9] = -1
    dense = streamkl.indexer_kl(*indexer[:5], **options, return_rows=True)[1]
    compare(indexer, lse_t=dense.lse_t, lse_t_wider=True, row_weight="mass", **options)


def test_check_lse_of_listed_blocks():
    """Of blocks 1 and 2, without the first one. Without a list it may cover more keys, too."""
    indexer = make_indexer(batch=1, len_q=3, keys_s=5)
    blocks = torch.tensor([1, 2, -1]).expand(1, 3, 3)
    options = dict(pool=("max", 4), check_lse=True)
    x = torch.einsum("bihd,bjhd->bhij", indexer.q_t, indexer.k_t.repeat_interleave(2, 2)) * 8**-0.5
    lse_t = x[..., 4:12].logsumexp(-1)
    streamkl.indexer_kl(*indexer[:5], blocks, lse_t=lse_t, **options)
    with pytest.raises(ValueError, match="lse_t: .* must be at least"):
        streamkl.indexer_kl(*indexer[:5], blocks, lse_t=lse_t - 0.1, **options)
    streamkl.indexer_kl(*indexer[:5], lse_t=x.logsumexp(-1) + 0.1, **options)


def test_wider_lse_without_indices():
    """As with a sink, the teacher's distribution on the visible keys does not change."""
    indexer = make_indexer()
    loss, rows = streamkl.indexer_kl(*indexer, return_rows=True)
    sunk, wider = streamkl.indexer_kl(*indexer, lse_t=rows.lse_t + 0.5, lse_t_wider=True, return_rows=True)
    torch.testing.assert_close(sunk, loss)
    torch.testing.assert_close(wider.mass, torch.full_like(wider.mass, torch.tensor(-0.5).exp().item()))
    torch.testing.assert_close(wider.lse_t, rows.lse_t)


def test_wider_lse_of_a_mass_that_underflows():
    indexer = make_indexer()
    loss, rows = streamkl.indexer_kl(*indexer, return_rows=True)
    far = streamkl.indexer_kl(*indexer, lse_t=rows.lse_t + 200, lse_t_wider=True)
    torch.testing.assert_close(far, loss, rtol=1e-4, atol=1e-5)
    for one, other in zip(torch.autograd.grad(far, indexer.trained), torch.autograd.grad(loss, indexer.trained)):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_loss_of_deepseek_v4():
    """torchtitan's loss of compressed attention: target p relative to an LSE that covers more, weighted by its own sum."""
    indexer = exact_of(make_indexer(heads_s=2, top_k=6))
    lse_t = streamkl.indexer_kl(*make_indexer(heads_s=2), causal=True, return_rows=True)[1].lse_t + 0.3  # with a sink
    visible = reference.visible_keys(19, 23, causal=True)
    total = 0.0
    for b, h in itertools.product(range(2), range(2)):
        indices, heads = indexer.indices[b, :, h].long(), slice(2 * h, 2 * h + 2)
        valid = (indices >= 0) & visible.gather(-1, indices.clamp(min=0))
        keys = indices.clamp(min=0)
        x = torch.einsum("ihd,ijd->hij", indexer.q_t[b, :, heads], indexer.k_t[b, :, h][keys]) * 8**-0.5
        p = torch.where(valid, (x - lse_t[b, heads, :, None]).exp().mean(0), 0.0)
        dots = torch.einsum("igd,ijd->igj", indexer.q_s[b, :, 3 * h : 3 * h + 3], indexer.k_s[b, :, 0][keys]).relu()
        y = torch.einsum("igj,ig->ij", dots, indexer.w_s[b, :, h]) * 15**-0.5
        log_s = torch.where(valid, y, -torch.inf).log_softmax(-1)
        mass = p.sum(-1, keepdim=True)
        total = total + torch.where(valid & (p > 0), p * ((p / mass).log() - log_s), 0.0).sum()
    options = dict(causal=True, lse_t=lse_t, lse_t_wider=True, row_weight="mass", reduction="sum")
    given = make_indexer(heads_s=2, top_k=6)
    loss = streamkl.indexer_kl(*given, **options)
    torch.testing.assert_close(loss.double(), total.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(loss, given.trained), torch.autograd.grad(total, indexer.trained)):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


def test_given_visible_lse_saves_the_pass(monkeypatch):
    indexer = make_indexer(top_k=6)
    dense = streamkl.indexer_kl(*indexer[:5], causal=True, return_rows=True)[1].lse_t
    over_list = streamkl.indexer_kl(*indexer, causal=True, return_rows=True)[1].lse_t
    calls, run_function = [], lib.run_function
    monkeypatch.setattr(_call.lib, "run_function", lambda op: calls.append(op) or run_function(op))
    wider = dict(causal=True, lse_t=dense, lse_t_wider=True)
    streamkl.indexer_kl(*indexer, lse_t_visible=over_list, **wider)
    assert calls == [lib.FORWARD, lib.FORWARD_BACKWARD]
    streamkl.indexer_kl(*indexer, **wider)
    assert calls[2:] == [lib.FORWARD, lib.FORWARD, lib.FORWARD_BACKWARD]


def test_several_layers_teach_one_indexer():
    """Their heads are one teacher group: the KL of the mean has the gradient of the mean of the KLs."""
    indexer = make_indexer(top_k=6)
    layers = [make_indexer(seed=seed)[:2] for seed in range(3)]
    joined = [torch.cat(tensors, dim=2) for tensors in zip(*layers)]
    together, rows = streamkl.indexer_kl(*joined, *indexer[2:], causal=True, return_rows=True)
    apart = torch.stack([streamkl.indexer_kl(*layer, *indexer[2:], causal=True) for layer in layers]).mean()
    assert together < apart  # by how far the layers are from each other
    for one, other in zip(gradients_of(together, indexer), gradients_of(apart, indexer)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    again = streamkl.indexer_kl(*joined, *indexer[2:], causal=True, lse_t=rows.lse_t)
    torch.testing.assert_close(again, together)


def test_captured():
    """Of a teacher that is itself an indexer: nothing with weights of 0, everything with its own weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((1, 12, 1, 8), generator=generator)  # positive: the ReLU changes nothing
    for factor, captured in (0.0, 0.0), (1.0, 1.0):
        call = (x, x, x, x[:, :, 0], torch.full((1, 12, 1), factor))
        rows = streamkl.indexer_kl(*call, causal=True, softmax_scale_t=9.0, softmax_scale_s=9.0, return_rows=True)[1]
        assert rows.captured[0, 0, 0] == 1  # one key
        torch.testing.assert_close(rows.captured[0, 0, 1:], torch.full((11,), captured), atol=1e-4, rtol=0)
    reverse = streamkl.indexer_kl(*call, direction="reverse", return_rows=True)[1]
    assert reverse.kl_uniform is None
    with pytest.raises(ValueError, match="captured: needs direction='forward'"):
        reverse.captured


def test_bad_options_of_a_wider_lse():
    indexer = make_indexer()
    lse_t = torch.zeros(2, 4, 19)
    for options, message in (
        (dict(row_weight="mass"), "row_weight='mass': needs lse_t_wider=True"),
        (dict(row_weight="mean"), "row_weight='mean': must be 'mass' or None"),
        (dict(lse_t=lse_t, lse_t_visible=lse_t), "lse_t_visible: needs lse_t_wider=True"),
        (dict(lse_t=lse_t, lse_t_wider=True, lse_t_visible=lse_t[:, :3]), r"lse_t_visible: shape \[2, 3, 19\]"),
    ):
        with pytest.raises(ValueError, match=message):
            streamkl.indexer_kl(*indexer, **options)


CHECKED = {
    "dense": (dict(), dict()),
    "masks and softcap": (dict(heads_s=2), dict(causal=True, window_size=(9, 0), softcap_t=2.0, softmax_scale_t=0.7, key_lengths=torch.tensor([9, 23]))),
    "row bounds": (dict(top_k=9), dict(key_begin=torch.arange(19).expand(2, 19) // 4, key_end=torch.full((2, 19), 20))),
    "sparse": (dict(top_k=9, heads_s=2), dict(causal=True)),
    "sparse, packed": (dict(top_k=9, packed=True, layout="bhnd"), dict(cu_seqlens_q=torch.tensor([0, 8, 8, 19]), cu_seqlens_k=torch.tensor([0, 11, 11, 23]), layout="bhnd")),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKED)
def test_check_lse(case, monkeypatch):
    shape, options = CHECKED[case]
    indexer = make_indexer(**shape)
    if indexer.indices is not None:
        indexer.indices.clamp_(max=10)
    loss, rows = streamkl.indexer_kl(*indexer, return_rows=True, **options)
    torch.testing.assert_close(streamkl.indexer_kl(*indexer, lse_t=rows.lse_t, check_lse=True, **options), loss)
    wider = dict(lse_t=rows.lse_t + 0.1, lse_t_wider=True, check_lse=True)
    streamkl.indexer_kl(*indexer, lse_t_visible=rows.lse_t, **wider, **options)
    with pytest.raises(ValueError, match=r"lse_t_visible: .*, head \d must be -?\d.* \(natural logarithm\)"):
        streamkl.indexer_kl(*indexer, lse_t_visible=rows.lse_t + 0.1, **wider, **options)
    streamkl.indexer_kl(*indexer, lse_t=rows.lse_t + 0.1, **options)  # nothing tells
    with pytest.raises(ValueError, match=r"lse_t: .*, row \d+, head \d must be -?\d.* \(natural logarithm\)"):
        streamkl.indexer_kl(*indexer, lse_t=rows.lse_t + 0.1, check_lse=True, **options)
    monkeypatch.setenv("STREAMKL_CHECK_LSE", "1")
    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match="lse_t: .* must be at least"):
            streamkl.indexer_kl(*indexer, lse_t=rows.lse_t - 0.1, lse_t_wider=True, reduction=reduction, **options)


# ---- Special values ------------------------------------------------------------------------------------------------


def test_no_row_attends_to_a_key():
    nothing = dict(indices=torch.full((2, 19, 1, 4), -1, dtype=torch.int32))
    for indexer, options in (
        (make_indexer(), dict(key_lengths=torch.zeros(2, dtype=torch.int32))), (make_indexer()._replace(**nothing), {}),
        (make_indexer(), dict(row_weight=torch.zeros(2, 19))),
    ):  # fmt: skip
        for reduction in ("mean", "sum", "none"):
            loss = streamkl.indexer_kl(*indexer, reduction=reduction, **options).sum()
            assert loss == 0
            assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, indexer.trained))


@pytest.mark.parametrize("keys", TOP_K)
def test_masked_values_may_be_nan(keys):
    check_masked_nan(make_indexer(len_q=8, len_k=8, top_k=TOP_K[keys]), keys=5)


def test_weight_zero_masks_a_nan():
    indexer = make_indexer()
    weight = torch.ones(2, 19)
    weight[0, 7] = 0
    with torch.no_grad():
        indexer.w_s[0, 7] = torch.nan
    for reduction in ("mean", "sum", "none"):
        loss = streamkl.indexer_kl(*indexer, row_weight=weight, reduction=reduction)
        assert loss.isfinite().all()
        for gradient in torch.autograd.grad(loss.sum(), indexer.trained):
            assert gradient.isfinite().all()


# ---- Other parts of torch ------------------------------------------------------------------------------------------

STUDENT = DQ_S | DK_S | DW_S
FORMS, TRAINED = ("dense", "sparse", "packed", "key lengths"), (STUDENT, DW_S)


@pytest.mark.parametrize("form, gradients", itertools.product(FORMS, TRAINED) if LONG else zip(FORMS, 2 * TRAINED))
def test_opcheck(form, gradients):
    indexer = [
        None if tensor is None else tensor.detach()
        for tensor in make_indexer(len_q=11, len_k=11, heads_s=2, packed=form == "packed", top_k=3 * (form == "sparse"))
    ]
    indexer[5:5] = [None, None]  # no sinks
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32) if form == "packed" else None
    key_lengths = torch.tensor([3, 11], dtype=torch.int32) if form == "key lengths" else None
    all_rows = lib.KL | lib.LSE_T | lib.LSE_S | lib.CROSS_ENTROPY | lib.ENTROPY | lib.MASS
    options = Options(gradients=gradients, causal=True, window_left=5, scale_s=0.3, softcap_t=2.0)
    problem = (bounds, bounds, key_lengths, None, None, *options)
    torch.library.opcheck(torch.ops.streamkl.forward, (*indexer, None, all_rows, *problem))
    kl, lse_t, lse_s = torch.ops.streamkl.forward(*indexer, None, lib.KL | lib.LSE_T | lib.LSE_S, *problem)
    ones = torch.ones_like(kl)
    torch.library.opcheck(torch.ops.streamkl.backward, (*indexer, lse_t, lse_s, None, None, ones, *problem))
    rows = lib.KL | lib.CROSS_ENTROPY
    torch.library.opcheck(torch.ops.streamkl.forward_backward, (*indexer, lse_t, lse_s, ones, rows, *problem))


@pytest.mark.parametrize("dynamic", [False, True] if LONG else [True])
def test_compile(dynamic):
    """Every path of indexer_kl in one graph, on views."""

    def step(q_t, k_t, q_s, k_s, w_s, indices):
        call = (q_t, k_t, q_s.transpose(1, 2).contiguous().transpose(1, 2) * 2, k_s, w_s)
        mean, rows = streamkl.indexer_kl(*call, causal=True, return_rows=True)
        one_pass = streamkl.indexer_kl(*call, causal=True, lse_t=rows.lse_t, reduction="sum")
        wider = streamkl.indexer_kl(*call, indices.long(), causal=True, lse_t=rows.lse_t, lse_t_wider=True)
        return mean + one_pass + wider + streamkl.indexer_kl(*call, indices, reduction="none").square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=COMPILER)
    for length in (16, 24) if dynamic else (16,):
        indexer = make_indexer(len_q=length, len_k=length, top_k=5)
        expected, actual = step(*indexer), compiled(*indexer)
        torch.testing.assert_close(actual, expected)
        for one, other in zip(gradients_of(actual, indexer), gradients_of(expected, indexer)):
            torch.testing.assert_close(one, other)


def test_repeated_and_double_backward_and_gradient_of_the_weights():
    indexer = make_indexer()
    loss = streamkl.indexer_kl(*indexer)
    first, second = torch.autograd.grad(loss, indexer.trained, retain_graph=True), torch.autograd.grad(loss, indexer.trained)
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    with pytest.raises(RuntimeError, match="mean of indexer_kl cannot be differentiated twice"):
        torch.autograd.grad(streamkl.indexer_kl(*indexer), indexer.trained, create_graph=True)
    rows = streamkl.indexer_kl(*indexer, reduction="none")
    (dq,) = torch.autograd.grad(rows.sum(), indexer.q_s, create_graph=True)
    with pytest.raises(RuntimeError, match="indexer_kl cannot be differentiated twice; streamkl.reference.indexer_kl can"):
        torch.autograd.grad(dq.sum(), indexer.k_s)
    weight = torch.rand(2, 19, requires_grad=True)
    loss = streamkl.indexer_kl(*indexer, row_weight=weight, reduction="sum")
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], rows.detach().sum(1))


def test_only_gradients_are_saved():
    indexer = make_indexer(top_k=5)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        streamkl.indexer_kl(*indexer, reduction="sum")
    assert sorted(tensor.numel() for tensor in saved) == sorted(tensor.numel() for tensor in indexer.trained)


def test_autocast():
    indexer = make_indexer()
    projection = torch.nn.Linear(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = streamkl.indexer_kl(*indexer._replace(q_s=projection(indexer.q_s)))
    loss.backward()
    assert loss.dtype == torch.float32 and projection.weight.grad is not None


def test_loss_module():
    criterion = streamkl.IndexerKLLoss(causal=True, window_size=(5, 0), softcap_t=3.0, relu=False, direction="reverse")
    indexer = make_indexer(top_k=7)
    expected = streamkl.indexer_kl(
        *indexer, causal=True, window_size=(5, 0), softcap_t=3.0, relu=False, direction="reverse"
    )
    for same in criterion, copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion)):
        assert torch.equal(same(*indexer), expected)
    assert criterion.state_dict() == {} and list(criterion.parameters()) == []
    assert "relu=False" in repr(criterion)


def test_teacher_need_not_be_detached_without_gradients():
    indexer = make_indexer()
    indexer.q_t.requires_grad_()
    with torch.no_grad():
        assert streamkl.indexer_kl(*indexer).isfinite()


@pytest.mark.parametrize("options", [dict(row_weight="mass"), dict(lse_t_visible=torch.zeros(2, 4, 19))])
def test_the_teacher_heads_of_other_ranks_have_other_masses(options):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        given = dict(lse_t=torch.zeros(2, 4, 19), lse_t_wider=True, parallel=streamkl.Parallel(tensor_group=dist.group.WORLD))
        with pytest.raises(ValueError, match="parallel.tensor_group: must be without lse_t_visible and row_weight='mass'"):
            streamkl.indexer_kl(*make_indexer(), **given, **options)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(19,), (2, 3, 19), (2, 4, 18)])
def test_the_shape_of_a_wider_lse(shape):
    lse_t = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"lse_t: shape .* must be \[2, 4, 19\]"):
        streamkl.indexer_kl(*make_indexer(heads_s=2), lse_t=lse_t, lse_t_visible=lse_t, lse_t_wider=True)
