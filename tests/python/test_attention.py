"""Results of attention_kl, compared with the reference in float64."""

import pytest
import torch
from cases import LONG, check_f16_range, compare, make_disagreeing, make_tensors, one_pass_kl
from hypothesis import given, settings
from hypothesis import strategies as st

import streamkl
from streamkl import reference

MASKS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 2)),
    "causal window": dict(causal=True, window_size=(4, -1)),
    "key lengths": dict(key_lengths=torch.tensor([0, 17])),
    "causal key lengths": dict(causal=True, window_size=(5, 0), key_lengths=torch.tensor([9, 23], dtype=torch.int32)),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, direction, reduction):
    compare(make_tensors(), direction=direction, reduction=reduction, **MASKS[mask])


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_packed(layout, weighted, reduction):
    """Includes an empty sequence, one without keys, one with more queries than keys, and rows after the last sequence."""
    tensors = make_tensors(len_q=19, len_k=23, packed=True, layout=layout)
    lengths = dict(cu_seqlens_q=torch.tensor([0, 3, 3, 5, 12, 17]), cu_seqlens_k=torch.tensor([0, 6, 6, 6, 10, 21]))
    weight = torch.linspace(0, 1, 19) if weighted else None
    for mask in ({}, dict(causal=True), dict(causal=True, window_size=(2, 0))):
        compare(tensors, row_weight=weight, reduction=reduction, layout=layout, **mask, **lengths)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_row_weight(mask, per_head):
    weight = torch.rand((2, 2, 19) if per_head else (2, 19), generator=torch.Generator().manual_seed(1))
    weight[0, ..., 3:9] = 0
    for reduction in ("mean", "sum", "none"):
        compare(
            make_tensors(len_k=15 if mask in ("full", "causal") else 23),
            row_weight=weight,
            reduction=reduction,
            **MASKS[mask],
        )


def test_scales_and_softcaps():
    compare(make_tensors(), softmax_scale_t=0.7, softmax_scale_s=-0.2, softcap_t=2.0, softcap_s=5.0, causal=True)


@pytest.mark.parametrize("heads", [(1, 1, 1, 1), (6, 6, 6, 2), (6, 2, 3, 3), (5, 1, 1, 1)])
def test_heads(heads):
    heads_t, key_heads_t, heads_s, key_heads_s = heads
    tensors = make_tensors(heads_t=heads_t, key_heads_t=key_heads_t, heads_s=heads_s, key_heads_s=key_heads_s)
    for direction in ("forward", "reverse"):
        compare(tensors, direction=direction, causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype):
    compare(make_tensors(dtype=dtype), causal=True)


@pytest.mark.parametrize("type_t", [torch.float16, torch.bfloat16])
def test_f16_one_pass_gradients_stay_in_range(type_t):
    """A teacher in bf16 that requires gradients has f32 gradients for a while, too."""
    tensors = make_disagreeing()
    tensors[:2] = (tensor.to(type_t).requires_grad_(type_t == torch.bfloat16) for tensor in tensors[:2])
    check_f16_range(one_pass_kl, reference.attention_kl, tensors)


def test_teacher_and_student_of_different_types():
    tensors = make_tensors()
    compare(
        [
            t.detach().to(dtype).requires_grad_()
            for t, dtype in zip(tensors, [torch.bfloat16] * 2 + [torch.float32] * 2)
        ]
    )


@pytest.mark.parametrize("wanted", range(16))
def test_every_subset_of_gradients(wanted):
    tensors = make_tensors()
    for bit, tensor in enumerate(tensors):
        tensor.requires_grad_(bool(wanted >> bit & 1))
    if wanted:
        compare(tensors, causal=True)
        compare(tensors, direction="reverse")
    else:
        assert not streamkl.attention_kl(*tensors).requires_grad


lengths = st.integers(0, 40)
heads = st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)])


@settings(max_examples=4000 if LONG else 300, deadline=None, derandomize=not LONG)
@given(
    batch=st.integers(0, 3), len_q=lengths, len_k=lengths, student=heads, group_size=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)), causal=st.booleans(),
    window=st.tuples(st.integers(-1, 9), st.integers(-1, 9)), layout=st.sampled_from(["bnhd", "bhnd"]),
    direction=st.sampled_from(["forward", "reverse"]), reduction=st.sampled_from(["mean", "sum", "none"]), data=st.data(),
)  # fmt: skip
def test_any_shape_and_mask(
    batch, len_q, len_k, student, group_size, dims, causal, window, layout, direction, reduction, data
):
    heads_s, key_heads_s = student
    options = dict(causal=causal, window_size=window, layout=layout, direction=direction, reduction=reduction)
    packed = data.draw(st.booleans(), "packed") and batch > 0
    tensors = make_tensors(
        batch,
        len_q,
        len_k,
        heads_s * group_size,
        heads_s,
        heads_s * group_size if group_size == 2 else key_heads_s,
        key_heads_s,
        *dims,
        layout,
        packed,
    )
    if packed:
        for name, total in ("q", len_q), ("k", len_k):
            cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=batch, max_size=batch), f"cuts {name}"))
            options[f"cu_seqlens_{name}"] = torch.tensor([0, *cuts])
    elif batch and data.draw(st.booleans(), "padded"):
        options["key_lengths"] = torch.tensor(
            data.draw(st.lists(st.integers(0, len_k), min_size=batch, max_size=batch), "keys")
        )
    if batch:
        compare(tensors, **options)
    else:
        loss = streamkl.attention_kl(*tensors, **options)
        assert loss.sum() == 0 and all(g.numel() == 0 for g in torch.autograd.grad(loss.sum(), tensors))


# ---- Views ---------------------------------------------------------------------------------------------------------


def test_views_equal_their_copies():
    """Slices of one projection, transposed heads, a non-contiguous last dimension, expanded keys."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, 19, 4, 16, generator=generator, requires_grad=True)
    heads_first = torch.randn(2, 4, 19, 8, generator=generator, requires_grad=True)
    transposed = torch.randn(2, 8, 19, 4, generator=generator, requires_grad=True)
    one_head = torch.randn(2, 19, 1, 8, generator=generator, requires_grad=True)
    leaves = (both, heads_first, transposed, one_head)

    def views():
        return both[..., :8], heads_first.transpose(1, 2), transposed.permute(0, 2, 3, 1), one_head.expand(2, 19, 4, 8)

    loss = streamkl.attention_kl(*views(), causal=True)
    copied = streamkl.attention_kl(*(view.contiguous() for view in views()), causal=True)
    assert torch.equal(loss, copied)
    for one, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(copied, leaves)):
        torch.testing.assert_close(one, other)


def test_gradient_has_the_strides_of_its_tensor():
    q_t, k_t, q_s, k_s = make_tensors(heads_t=2, key_heads_t=2, key_heads_s=2, layout="bhnd")
    base = q_s.detach().transpose(1, 2).contiguous().requires_grad_()
    view = base.transpose(1, 2)
    (gradient,) = torch.autograd.grad(streamkl.attention_kl(q_t, k_t, view, k_s, layout="bhnd"), view)
    assert gradient.stride() == view.stride()


def test_misaligned_storage():
    buffer = torch.randn(1 + 2 * 19 * 2 * 8)
    tensors = [buffer[1:].view(2, 19, 2, 8)] + [torch.randn(2, 19, 2, 8) for _ in range(3)]
    assert torch.equal(streamkl.attention_kl(*tensors), streamkl.attention_kl(tensors[0].clone(), *tensors[1:]))


# ---- Special values ------------------------------------------------------------------------------------------------


def test_padding_may_hold_nan():
    tensors = make_tensors(len_q=6, len_k=8)
    clean = streamkl.attention_kl(*tensors, key_lengths=torch.tensor([5, 8]))
    with torch.no_grad():
        tensors[1][0, 5:], tensors[3][0, 5:] = torch.nan, torch.inf
    loss = streamkl.attention_kl(*tensors, key_lengths=torch.tensor([5, 8]))
    assert torch.equal(loss, clean)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, tensors))


def test_packed_tail_may_hold_nan():
    tensors = make_tensors(len_q=9, len_k=9, packed=True)
    with torch.no_grad():
        for tensor in tensors:
            tensor[7:] = torch.nan
    cu_seqlens = torch.tensor([0, 3, 7])
    loss = streamkl.attention_kl(*tensors, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)
    assert loss.isfinite()
    for gradient in torch.autograd.grad(loss, tensors):
        assert gradient.isfinite().all() and (gradient[7:] == 0).all()


def test_weight_zero_masks_a_nan():
    tensors = make_tensors()
    weight = torch.ones(2, 19)
    weight[0, 3] = 0
    clean = streamkl.attention_kl(*tensors, row_weight=weight)
    expected = torch.autograd.grad(clean, tensors)
    with torch.no_grad():
        tensors[0][0, 3], tensors[2][0, 3] = torch.nan, torch.inf
    lses = streamkl.attention_kl(*tensors, return_lse=True)[1:]
    for options in (dict(), dict(lse_t=lses[0], lse_s=lses[1])):
        for reduction in ("mean", "sum", "none"):
            loss = streamkl.attention_kl(*tensors, row_weight=weight, reduction=reduction, **options)
            assert loss.isfinite().all()
        loss = streamkl.attention_kl(*tensors, row_weight=weight, **options)
        torch.testing.assert_close(loss, clean)
        torch.testing.assert_close(torch.autograd.grad(loss, tensors), expected)


def test_no_row_attends_to_a_key():
    tensors = make_tensors()
    for options in (dict(key_lengths=torch.zeros(2, dtype=torch.int32)), dict(row_weight=torch.zeros(2, 19))):
        loss = streamkl.attention_kl(*tensors, **options)
        assert loss == 0
        assert all((g == 0).all() for g in torch.autograd.grad(loss, tensors))


def test_equal_models_have_zero_kl_and_gradients():
    q, k = make_tensors(heads_t=2, key_heads_t=2)[:2]
    loss = streamkl.attention_kl(q.detach(), k.detach(), q, k, causal=True)
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (q, k)))


def test_wider_lse_of_a_teacher_group():
    """With a teacher LSE over more keys, the teacher is conditional on the visible keys."""
    q_t, k_t, q_s, k_s = make_tensors(batch=1, heads_t=4, heads_s=2, key_heads_t=4, key_heads_s=2)
    wider = reference.attention_kl(q_t, k_t, q_s, k_s, return_lse=True)[1] + 0.5
    exact = reference.attention_kl(q_t.double(), k_t.double(), q_s.double(), k_s.double())
    loss = streamkl.attention_kl(q_t, k_t, q_s, k_s, lse_t=wider)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
