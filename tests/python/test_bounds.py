"""Row bounds: a key range per row, alone, with other masks, and as the masks that they stand for."""

import pytest
import torch
from cases import assert_near, gradients_of, make_tensors
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
    options |= {name: bounds[name] for name in given}
    exact_tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    loss, exact = streamkl.attention_kl(*tensors, **options), reference.attention_kl(*exact_tensors, **options)
    assert_near("loss", loss, exact, torch.float32)
    for tensor, made, expected in zip(tensors, gradients_of(loss, tensors), gradients_of(exact, exact_tensors)):
        assert_near(f"gradient {list(tensor.shape)}", made, expected, tensor.dtype)


def test_row_weights_of_empty_rows_do_not_count():
    tensors = make_tensors(len_q=21, len_k=33)
    options = dict(row_weight=torch.rand(2, 21), **bounds_of([(21, 33)] * 2, False))
    exact = reference.attention_kl(*(tensor.detach().double() for tensor in tensors), **options)
    assert_near("loss", streamkl.attention_kl(*tensors, **options), exact, torch.float32)


def shards(rank, ranks, length):
    """Positions of a zigzag shard: chunk `rank` and chunk 2 ranks - 1 - rank of 2 ranks chunks."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zigzag_shards_are_rows_of_the_whole(ranks):
    tensors = [tensor.detach() for tensor in make_tensors(len_q=64, len_k=64)]
    whole = streamkl.attention_kl(*tensors, causal=True, reduction="none")
    for rank in range(ranks):
        rows = shards(rank, ranks, 64)
        q_t, k_t, q_s, k_s = tensors
        part = streamkl.attention_kl(
            q_t[:, rows], k_t, q_s[:, rows], k_s, key_end=(rows + 1).expand(2, -1), reduction="none"
        )
        assert_near(f"rank {rank}", part, whole[..., rows].double(), torch.float32)


def test_packed_shards_are_rows_of_the_whole():
    """Zigzag in every sequence of a packed batch."""
    lengths, tensors = [16, 48], [tensor.detach() for tensor in make_tensors(len_q=64, len_k=64, packed=True)]
    cu_seqlens = torch.tensor([0, 16, 64])
    whole = streamkl.attention_kl(*tensors, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, reduction="none")
    for rank in range(2):
        positions = [shards(rank, 2, length) for length in lengths]
        rows = torch.cat([positions[0], positions[1] + 16])
        q_t, k_t, q_s, k_s = tensors
        part = streamkl.attention_kl(
            q_t[rows], k_t, q_s[rows], k_s, key_end=torch.cat(positions) + 1, reduction="none",
            cu_seqlens_q=torch.tensor([0, 8, 32]), cu_seqlens_k=cu_seqlens,
        )  # fmt: skip
        assert_near(f"rank {rank}", part, whole[..., rows].double(), torch.float32)


def test_chunked_attention_is_attention_in_every_chunk():
    tensors = [tensor.detach() for tensor in make_tensors(len_q=64, len_k=64)]
    positions = torch.arange(64)
    chunked = streamkl.attention_kl(
        *tensors, causal=True, key_begin=(positions // 16 * 16).expand(2, -1), reduction="none"
    )
    for first in range(0, 64, 16):
        part = streamkl.attention_kl(*(tensor[:, first : first + 16] for tensor in tensors), causal=True, reduction="none")
        assert_near(f"chunk {first}", chunked[..., first : first + 16], part.double(), torch.float32)


def test_compressed_keys_are_a_mask():
    """One key for four positions, visible to the queries after its last one."""
    tensors = [tensor.detach() for tensor in make_tensors(len_q=64, len_k=16)]
    visible = (torch.arange(64) + 1) // 4
    loss = streamkl.attention_kl(*tensors, key_end=visible.expand(2, -1), reduction="none")
    assert (loss[..., :3] == 0).all()
    for i in (3, 7, 40, 63):
        q_t, k_t, q_s, k_s = tensors
        keys = int(visible[i])
        row = streamkl.attention_kl(q_t[:, i : i + 1], k_t[:, :keys], q_s[:, i : i + 1], k_s[:, :keys], reduction="none")
        assert_near(f"row {i}", loss[..., i : i + 1], row.double(), torch.float32)


def test_sampled_rows_estimate_the_gradient_of_all_rows():
    """Every eighth row in turn: the mean of the estimates is the whole."""
    q_t, k_t, q_s, k_s = make_tensors(len_q=64, len_k=64)
    whole = streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True, reduction="sum")
    expected = torch.autograd.grad(whole, k_s)[0]
    total = torch.zeros_like(expected)
    for first in range(8):
        rows = torch.arange(first, 64, 8)
        part = streamkl.attention_kl(q_t[:, rows], k_t, q_s[:, rows], k_s, key_end=(rows + 1).expand(2, -1), reduction="sum")
        total += torch.autograd.grad(part, k_s)[0]
    assert_near("dk_s", total, expected.double(), torch.float32)


@pytest.mark.parametrize("top_k", [0, 9])
def test_indexer_equals_the_reference(top_k):
    *tensors, indices = make_indexer(len_q=21, len_k=33, top_k=top_k)
    options = bounds_of([(21, 33)] * 2, False)
    exact = reference.indexer_kl(*(tensor.detach().double() for tensor in tensors), indices, **options)
    assert_near("loss", streamkl.indexer_kl(*tensors, indices, **options), exact, torch.float32)


REFUSED = {
    "key_end[3]=1: must not be below key_end[2]=5 of the same sequence": dict(key_end=[[0, 2, 5, 1], [0, 0, 0, 0]]),
    "key_begin[4]=-1: must be 0..6, the keys of the sequence": dict(key_begin=[[0, 0, 0, 0], [-1, 0, 0, 0]]),
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
