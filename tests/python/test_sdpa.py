"""Which of torch's attention kernels a GPU would run, and with which arguments. No GPU is needed: the kernels are stubs."""

from types import SimpleNamespace

import pytest
import torch
from cases import OnGpu

import streamkl
from streamkl import _sdpa
from streamkl._attention_kl import lses_first
from streamkl._options import AttentionOptions, CarriedOptions, translate

CHOICES = {"_scaled_dot_product_flash_attention": 1, "_scaled_dot_product_efficient_attention": 2,
           "_scaled_dot_product_cudnn_attention": 3}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """[(kernel, its arguments by name)]. The kernels return LSEs as torch's do: rounded up, or with a last dimension."""
    found = []

    def kernel(name):
        names = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]

        def run(*values, **given):
            given |= dict(zip(names, values))
            found.append((name, given))
            query = given["query"]
            lse = query.new_empty(*query.shape[:2], -(-query.shape[2] // 32) * 32, dtype=torch.float32)
            if name == "_flash_attention_forward":  # heads after the length
                lse = query.new_empty(*query.shape[:-3], query.shape[-2], -(-query.shape[-3] // 128) * 128)
            return torch.empty_like(query), lse[..., None] if "cudnn" in name else lse, None

        return run

    for name in (*CHOICES, "_flash_attention_forward"):
        monkeypatch.setattr(torch.ops.aten, name, kernel(name))
    monkeypatch.setattr(_sdpa, "_prefers_cudnn", lambda *_: False)
    return found


def fake(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


def choose(monkeypatch, number):
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: number)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_the_kernel_that_torch_chooses(name, causal, calls, monkeypatch):
    choose(monkeypatch, CHOICES[name])
    q, k = fake(2, 4, 17, 64), fake(2, 4, 17, 64)
    output, lse = _sdpa.sdpa_with_lse(q, k, k, None, 0.25, causal, 0.5)
    assert output.shape == q.shape and lse.shape == (2, 4, 17)
    ((called, given),) = calls
    assert called == name and given["query"] is q and given["key"] is k and given["value"] is k
    asked = {"dropout_p": 0.25, "is_causal": causal, "scale": 0.5}
    if "flash" not in name:
        asked |= {"attn_bias": None, "compute_log_sumexp": True}
    if "efficient" not in name:
        asked |= {"return_debug_mask": False}
    assert asked.items() <= given.items()


@pytest.mark.parametrize("number, dim, mask", [(0, 64, None), (1, 60, None), (2, 64, True)])
def test_kernels_that_give_no_lse(number, dim, mask, calls, monkeypatch):
    """The one with matrices, sizes that torch pads, and masks, which torch pads, too."""
    choose(monkeypatch, number)
    q = fake(2, 4, 16, dim)
    assert _sdpa.sdpa_with_lse(q, q, q, mask and fake(16, 16)) is None
    assert not calls


@pytest.mark.parametrize("capability, dim, is_enabled, fits", [
    ((9, 0), 128, True, True), ((8, 9), 128, True, True), ((9, 0), 136, True, True), ((10, 0), 64, False, True),
    ((9, 0), 64, True, False),
])  # fmt: skip
def test_cudnn_on_hopper(capability, dim, is_enabled, fits, monkeypatch):
    cuda = SimpleNamespace(SDPAParams=lambda *given: given, cudnn_sdp_enabled=lambda: is_enabled)
    cuda.can_use_cudnn_attention = lambda given: fits and given[3:] == (None, 0.0, True, False)
    monkeypatch.setattr(torch.backends, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = fake(1, 2, 8, dim)
    expected = capability >= (9, 0) and dim <= 128 and is_enabled and fits
    assert _sdpa._prefers_cudnn(q, q, q, True, False) is expected


def test_the_fastest_kernel_is_cudnns(calls, monkeypatch):
    choose(monkeypatch, 1)
    monkeypatch.setattr(_sdpa, "_prefers_cudnn", lambda *_: True)
    q = fake(2, 4, 16, 64)
    for fastest in (True, False):
        _sdpa.sdpa_with_lse(q, q, q, fastest=fastest)
    assert [name for name, _ in calls] == ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"]


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("causal, window, len_k", [(True, (0, 0), 9), (True, (5, 0), 16), (False, (0, 3), 16)])
def test_windows_run_flash_attention(layout, causal, window, len_k, calls):
    lengths, options = translate(
        CarriedOptions, 0, dict(layout=layout, softmax_scale=0.5, causal=causal, window_size=window)
    )
    q, k = fake(2, 9, 4, 64), fake(2, len_k, 4, 64)
    if layout == "bhnd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    output, lse = _sdpa.attend(q, k, k, lengths, options)
    assert output.shape == q.shape and lse.shape == (2, 4, 9)
    ((called, given),) = calls
    assert called == "_flash_attention_forward"
    keys = (2, len_k, 4, 64)
    assert [given[name].shape for name in ("query", "key", "value")] == [(2, 9, 4, 64), keys, keys]
    expected = dict(cum_seq_q=None, cum_seq_k=None, max_q=9, max_k=len_k, dropout_p=0.0, return_debug_mask=False, scale=0.5)
    expected |= dict(is_causal=causal, window_size_left=window[0], window_size_right=window[1])
    assert expected.items() <= given.items()


@pytest.mark.parametrize("longest, asked", [((None, None), (11, 13)), ((1, 0), (2, 0)), ((7, 8), (7, 8))])
def test_packed_sequences_run_flash_attention(longest, asked, calls):
    cu_q, cu_k = (torch.tensor([0, 4, 9], dtype=torch.int32) for _ in range(2))
    lengths, options = translate(CarriedOptions, 0, dict(
        layout="bnhd", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1]
    ))  # fmt: skip
    q, k = fake(11, 4, 64), fake(13, 4, 64)
    q[9:] = k[9:] = torch.nan
    output, lse = _sdpa.attend(q, k, k, lengths, options)
    assert output.shape == q.shape and lse.shape == (4, 11)
    assert not output[9:].any() and (lse[:, 9:] == -torch.inf).all()
    ((_, given),) = calls
    assert given["cum_seq_q"] is cu_q and given["cum_seq_k"] is cu_k and (given["max_q"], given["max_k"]) == asked
    assert not any(given[name].any() for name in ("query", "key", "value"))
    assert given["window_size_left"] is None and given["window_size_right"] is None


@pytest.mark.parametrize("change, has_flash", [
    ({}, True), (dict(dim=256), True), (dict(dim=264), False), (dict(dim=60), False), (dict(dtype=torch.float32), False),
    (dict(softcap=2.0), False), (dict(bounded="key_lengths"), False), (dict(bounded="key_begin"), False),
    (dict(bounded="key_end"), False),
])  # fmt: skip
def test_what_flash_attention_computes(change, has_flash):
    """Where a fixed order is asked for, too: there its backward is the deterministic one."""
    q = fake(2, 4, 16, change.get("dim", 8), dtype=change.get("dtype", torch.float16))
    asked = {change["bounded"]: fake(2, dtype=torch.int32)} if "bounded" in change else {}
    lengths, options = translate(CarriedOptions, 0, dict(softcap=change.get("softcap", 0.0), **asked))
    assert _sdpa._has_flash(q, lengths, options) is has_flash
    with _sdpa.fixed_order(q, SimpleNamespace(lengths=lengths, options=options)):
        assert torch.are_deterministic_algorithms_enabled() is has_flash
        assert torch.backends.cuda.flash_sdp_enabled() is has_flash
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("heads_t, direction, gradients, expected", [
    (4, "forward", 0b1100, True), (2, "forward", 0b1100, False), (4, "reverse", 0b1100, False), (4, "forward", 0b1101, False),
    (4, "forward", 0b1110, False),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_teacher_groups_compute_the_lses_first(heads_t, direction, gradients, expected, layout):
    _, options = translate(AttentionOptions, gradients, dict(layout=layout, direction=direction))
    q_t, q_s = fake(1, 8, heads_t, 16), fake(1, 8, 2, 16)
    if layout == "bhnd":
        q_t, q_s = q_t.transpose(1, 2), q_s.transpose(1, 2)
    assert lses_first(q_t, q_s, options) is expected
    assert not lses_first(q_t, q_s[0, 0], options)  # the checks report it
    assert not lses_first(torch.empty(q_t.shape), torch.empty(q_s.shape), options)


def test_fewer_queries_than_keys():
    """torch aligns the first query with the first key."""
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 9, 2, 8)
    assert _sdpa.sdpa_with_lse(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), causal=True) is None
    output, _ = streamkl.attention(q, k, k, q_t=q, k_t=k, causal=True)
    expected, _ = streamkl.reference.attention(q.double(), k.double(), k.double(), causal=True)
    torch.testing.assert_close(output, expected.float())
