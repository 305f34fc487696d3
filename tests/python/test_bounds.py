"""Row bounds: a key range per row, alone and with other masks.

The masks that bounds stand for (zigzag shards, chunks, compressed keys, sampled rows) are in tests/cases.c.
"""

import pytest
import torch
from cases import assert_near, compare, make_tensors
from indexer_cases import compare as compare_indexer
from indexer_cases import make_indexer

import streamkl
from streamkl import reference

torch.manual_seed(2606)


def drawn_bounds(rows, keys):
    """Two lists of bounds that do not decrease; some rows are empty."""
    return [torch.randint(0, keys + 1, (rows,)).sort().values.tolist() for _ in range(2)]


def bounds_of(sequences, packed):
    """{key_begin, key_end} for sequences of (queries, keys)."""
    drawn = [drawn_bounds(*lengths) for lengths in sequences]
    join = (lambda parts: torch.tensor(sum(parts, []))) if packed else torch.tensor
    return dict(zip(("key_begin", "key_end"), (join([bounds[n] for bounds in drawn]) for n in range(2))))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("given", [("key_begin", "key_end"), ("key_begin",), ("key_end",)])
@pytest.mark.parametrize("form", ["dense", "window", "packed"])
def test_equals_the_reference(form, given, reduction):
    packed = form == "packed"
    tensors = make_tensors(len_q=21, len_k=33, packed=packed)
    options = dict(reduction=reduction)
    if packed:
        options |= dict(cu_seqlens_q=torch.tensor([0, 9, 21]), cu_seqlens_k=torch.tensor([0, 12, 33]))
    if form == "window":
        options |= dict(window_size=(9, 3), key_lengths=torch.tensor([20, 33]))
    bounds = bounds_of([(9, 12), (12, 21)] if packed else [(21, 33)] * 2, packed)
    compare(tensors, **options, **{name: bounds[name] for name in given})


def test_row_weights_of_empty_rows_do_not_count():
    tensors = make_tensors(len_q=21, len_k=33)
    options = dict(row_weight=torch.rand(2, 21), **bounds_of([(21, 33)] * 2, False))
    exact = reference.attention_kl(*(tensor.detach().double() for tensor in tensors), **options)
    assert_near("loss", streamkl.attention_kl(*tensors, **options), exact, torch.float32)


@pytest.mark.parametrize("top_k", [0, 9])
def test_indexer_equals_the_reference(top_k):
    compare_indexer(make_indexer(len_q=21, len_k=33, top_k=top_k), **bounds_of([(21, 33)] * 2, False))


REFUSED = {
    "key_end[3]=1: must not be below key_end[2]=5 of the same sequence": dict(key_end=[[0, 2, 5, 1], [0, 0, 0, 0]]),
    "key_begin[4]=-1: must be 0..6, the keys of the sequence": dict(key_begin=[[0, 0, 0, 0], [-1, 0, 0, 0]]),
    "key_end[1, 2]=4294967297: must be -2147483648..2147483647": dict(key_end=[[6] * 4, [0, 1, 2**32 + 1, 2**32 + 2]]),
    "key_begin[0, 0]=-2147483649: must be -2147483648..2147483647": dict(key_begin=[[-(2**31) - 1, 0, 0, 0], [0] * 4]),
    "key_end: shape [4] must be [2, 4]": dict(key_end=[1, 2, 3, 4]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_bounds_are_refused(message):
    with pytest.raises(ValueError) as error:
        streamkl.attention_kl(
            *make_tensors(len_q=4, len_k=6), **{name: torch.tensor(bounds) for name, bounds in REFUSED[message].items()}
        )
    assert message in str(error.value)


def test_bounds_of_another_type_are_refused():
    with pytest.raises(ValueError, match="key_end: dtype torch.float32 must be torch.int32 or torch.int64"):
        streamkl.attention_kl(*make_tensors(len_q=4, len_k=6), key_end=torch.ones(2, 4))
