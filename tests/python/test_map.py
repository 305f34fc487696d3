"""attention_map, compared with pooled full matrices in float64."""

import subprocess
import sys

import pytest
import torch
from cases import make_tensors

import streamkl
from streamkl import reference


def edges(count, length):
    return [length * bucket // count for bucket in range(count + 1)]


def full_matrices(q_t, k_t, q_s, k_s, visible, reverse, scale_t=None, scale_s=None, softcap_t=0.0, softcap_s=0.0):
    """P, S and the terms of the KL of one sequence, [3, heads_s, len_q, len_k], from tensors [heads, length, dim]."""
    p, s = (
        torch.where(visible, reference.logits(q, k, scale, softcap), -torch.inf).softmax(-1).nan_to_num(0.0)
        for q, k, scale, softcap in ((q_t, k_t, scale_t, softcap_t), (q_s, k_s, scale_s, softcap_s))
    )
    p = p.unflatten(0, (q_s.shape[0], -1)).mean(1)
    a, b = (s, p) if reverse else (p, s)
    return torch.stack([p, s, torch.where(visible, a * (a.log() - b.log()), 0.0)])


def pooled(tensors, buckets, *, direction="forward", layout="bnhd", cu_seqlens_q=None, cu_seqlens_k=None,
           key_lengths=None, causal=False, window_size=(-1, -1), softmax_scale_t=None, softmax_scale_s=None,
           softcap_t=0.0, softcap_s=0.0):  # fmt: skip
    tensors = [t.detach().double() if layout == "bhnd" else t.detach().double().transpose(-3, -2) for t in tensors]
    if cu_seqlens_q is None:
        sequences = [[t[b] for t in tensors] for b in range(len(tensors[0]))]
    else:
        q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        spans = [[slice(*span) for span in pair] * 2 for pair in zip(zip(q, q[1:]), zip(k, k[1:]))]
        sequences = [[t[:, span] for t, span in zip(tensors, each)] for each in spans]
    rows, columns = (min(count, max(each[i].shape[1] for each in sequences)) for i, count in enumerate(buckets))
    sums, counts = torch.zeros(3, tensors[2].shape[-3], rows, columns).double(), torch.zeros(rows).double()
    for b, sequence in enumerate(sequences):
        len_q, len_k = sequence[0].shape[1], sequence[1].shape[1]
        keys = None if key_lengths is None else int(key_lengths[b])
        visible = reference.visible_keys(len_q, len_k, causal=causal, window_size=window_size, keys=keys)
        options = (direction == "reverse", softmax_scale_t, softmax_scale_s, softcap_t, softcap_s)
        matrices = full_matrices(*sequence, visible, *options)
        for row, (q_0, q_1) in enumerate(zip(edges(rows, len_q), edges(rows, len_q)[1:])):
            counts[row] += visible[q_0:q_1].any(-1).sum()
            for column, (k_0, k_1) in enumerate(zip(edges(columns, len_k), edges(columns, len_k)[1:])):
                sums[..., row, column] += matrices[..., q_0:q_1, k_0:k_1].sum((-2, -1))
    return sums / counts.clamp(min=1)[:, None]


def compare(tensors, buckets=(5, 7), **options):
    exact = pooled(tensors, buckets, **options)
    each = streamkl.attention_map(*tensors, buckets=buckets, **options)
    mean = streamkl.attention_map(*tensors, buckets=buckets, per_head=False, **options)
    for name, picture, picture_mean, expected in zip(each._fields, each, mean, exact):
        assert picture.dtype == torch.float32 and not picture.requires_grad
        for actual, wanted in (picture, expected), (picture_mean, expected.mean(0)):
            torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=1e-5, msg=lambda text: f"{name}: {text}")


MASKS = {
    "full": {},
    "causal": dict(causal=True),
    "causal window": dict(causal=True, window_size=(4, -1)),
    "window": dict(window_size=(3, 2)),
    "key lengths": dict(key_lengths=torch.tensor([0, 17])),
    "scales and softcaps": dict(softmax_scale_t=0.7, softmax_scale_s=-0.2, softcap_t=2.0, softcap_s=5.0),
}


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, direction):
    """GQA; each student head learns from two teacher heads, then from one."""
    for heads_t in (4, 2):
        compare(make_tensors(heads_t=heads_t), direction=direction, **MASKS[mask])


def test_more_queries_than_keys():
    """The first rows of a causal mask attend to no key and are 0."""
    tensors = make_tensors(len_q=31, len_k=12)
    compare(tensors, causal=True)
    assert not any(picture[:, 0].any() for picture in streamkl.attention_map(*tensors, causal=True, buckets=(5, 7)))


@pytest.mark.parametrize("buckets", [(1, 1), (19, 23), (100, 100), (3, 64)])
def test_buckets(buckets):
    compare(make_tensors(), buckets, causal=True)
    shape = (2, min(buckets[0], 19), min(buckets[1], 23))
    assert streamkl.attention_map(*make_tensors(), buckets=buckets).teacher.shape == shape


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_packed(layout, direction):
    """Includes an empty sequence, one without keys, one with more queries than keys, and rows after the last sequence."""
    tensors = make_tensors(packed=True, layout=layout)
    lengths = dict(cu_seqlens_q=torch.tensor([0, 3, 3, 5, 12, 17]), cu_seqlens_k=torch.tensor([0, 6, 6, 6, 10, 21]))
    for mask in {}, dict(causal=True), dict(causal=True, window_size=(2, 0)):
        compare(tensors, layout=layout, direction=direction, **mask, **lengths)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype):
    compare(make_tensors(dtype=dtype, layout="bhnd"), causal=True, layout="bhnd")


def test_empty_inputs():
    for lengths, shape in (dict(len_q=0), (2, 0, 4)), (dict(len_k=0), (2, 3, 0)), (dict(batch=0), (2, 3, 4)):
        for picture in streamkl.attention_map(*make_tensors(**lengths), buckets=(3, 4)):
            assert picture.shape == shape and not picture.any()
    no_sequence = dict(cu_seqlens_q=torch.tensor([0]), cu_seqlens_k=torch.tensor([0]))
    assert streamkl.attention_map(*make_tensors(packed=True), **no_sequence).kl.shape == (2, 0, 0)


def test_row_sums():
    """Rows of teacher and student sum to 1, rows of kl to the mean KL of the queries."""
    tensors = make_tensors(len_q=50, len_k=50)
    teacher, student, kl = streamkl.attention_map(*tensors, causal=True, buckets=(5, 6))
    torch.testing.assert_close(teacher.sum(-1), torch.ones(2, 5))
    torch.testing.assert_close(student.sum(-1), torch.ones(2, 5))
    rows = streamkl.attention_kl(*tensors, causal=True, reduction="none").detach()
    torch.testing.assert_close(kl.sum(-1), rows.mean(0).unflatten(-1, (5, 10)).mean(-1), rtol=1e-5, atol=1e-5)


MEMORY = """
import resource, torch, streamkl
tensors = [torch.randn(1, 16384, 1, 8) for _ in range(4)]
streamkl.attention_map(*[t[:, :64] for t in tensors], causal=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
streamkl.attention_map(*tensors, causal=True, buckets=(16, 16))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory():
    """An N x N matrix would take 1 GiB."""
    answer = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert float(answer.stdout) < 32


@pytest.mark.parametrize("buckets", [8, (8,), (0, 8), (8, -1), (8.0, 8), (True, 8)])
def test_bad_buckets(buckets):
    with pytest.raises(ValueError, match=r"buckets=.*: must be a pair \(rows, columns\) of whole numbers, at least 1"):
        streamkl.attention_map(*make_tensors(), buckets=buckets)


def test_errors_are_those_of_attention_kl():
    with pytest.raises(ValueError, match=r"direction='both': must be 'forward' or 'reverse'"):
        streamkl.attention_map(*make_tensors(), direction="both")
    with pytest.raises(ValueError, match=r"key_lengths\[1\]=24: must be 0..len_k=23"):
        streamkl.attention_map(*make_tensors(), key_lengths=torch.tensor([0, 24]))
    with pytest.raises(ValueError, match=r"key_lengths: dtype torch.float32 must be torch.int32 or torch.int64"):
        streamkl.attention_map(*make_tensors(), key_lengths=torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("name", ["key_begin", "key_end", "max_seqlen_k", "sink_t"])
def test_options_of_attention_kl_that_a_map_does_not_have(name):
    with pytest.raises(TypeError, match=rf"attention_map\(\) got an unexpected keyword argument '{name}'"):
        streamkl.attention_map(*make_tensors(), causal=True, **{name: torch.zeros(2, 19, dtype=torch.int32)})


def test_per_head_is_a_flag():
    with pytest.raises(ValueError, match=r"per_head=0: must be True or False"):
        streamkl.attention_map(*make_tensors(), per_head=0)
