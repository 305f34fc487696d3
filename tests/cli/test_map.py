"""streamkl map: equal to the pooled full matrix, with little memory at any length, and valid pictures."""

import itertools
import json
import struct
import zlib

import numpy as np
import pytest
import tool
from reference import Problem, attention_kl, visible
from tool import load, make_tensors, run, save, succeed

MIB = 1 << 20
TOLERANCE = 1e-5


def bucket_begins(count, length):
    return [length // count * b + length % count * b // count for b in range(count + 1)]


def pooled(tensors, buckets, problem):
    """{"p", "s", "kl"}: [H_s, rows, columns], pooled from the full matrices."""
    exact = attention_kl(tensors, problem)
    _, heads, len_q, len_k = exact.matrices["p"].shape
    rows, columns = min(buckets, len_q), min(buckets, len_k)
    row_begins, column_begins = bucket_begins(rows, len_q), bucket_begins(columns, len_k)
    answer = {name: np.zeros((heads, rows, columns)) for name in ("p", "s", "kl")}
    for row in range(rows):
        begin, end = row_begins[row : row + 2]
        valid = exact.valid[:, 0, begin:end].sum()
        for column in range(columns):
            left, right = column_begins[column : column + 2]
            for name, matrix in exact.matrices.items():
                cell = matrix[:, :, begin:end, left:right].sum((0, 2, 3))
                answer[name][:, row, column] = cell / valid if valid else 0
    return answer


def assert_equal_maps(path, tensors, problem, *options, buckets=16):
    answer = json.loads(succeed("map", path, "--json", "--head", "all", "--buckets", buckets, "--device", tool.device, *options))
    for name, exact in pooled(tensors, buckets, problem).items():
        assert np.shape(answer[name]) == exact.shape
        assert np.abs(np.array(answer[name]) - exact).max() < TOLERANCE, name


CASES = {
    "plain": ({}, Problem(), []),
    "causal": ({"len_q": 200, "len_k": 200}, Problem(causal=True), ["--causal"]),
    "bottom_right": ({"len_q": 61, "len_k": 97}, Problem(causal=True), ["--causal"]),
    "rows_without_keys": ({"len_q": 97, "len_k": 61}, Problem(causal=True), ["--causal"]),
    "window": ({"len_q": 150, "len_k": 150}, Problem(causal=True, window=(30, 0)), ["--causal", "--window", "30,0"]),
    "key_lengths": ({}, Problem(key_lengths=[53, 11]), ["--key-lengths", "53,11"]),
    "group": ({"heads_t": 6, "len_q": 90, "len_k": 90}, Problem(causal=True), ["--causal"]),
    "shared_keys": ({"heads_t": 4, "key_heads_t": 2, "key_heads_s": 1}, Problem(), []),
    "reverse": ({}, Problem(reverse=True), ["--direction", "reverse"]),
    "group_reverse": ({"heads_t": 4}, Problem(reverse=True), ["--direction", "reverse"]),
    "offsets": ({}, Problem(causal=True, offsets=(30, 4)), ["--causal", "--offset-q", "30", "--offset-k", "4"]),
    "softcap": ({}, Problem(softcap_t=2, softcap_s=3), ["--softcap-t", "2", "--softcap-s", "3"]),
    "two_blocks": ({"batch": 1, "heads_t": 1, "heads_s": 1, "len_q": 1100, "len_k": 1100}, Problem(causal=True), ["--causal"]),
    "few_queries": ({"len_q": 3, "len_k": 5}, Problem(), []),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_pooled_full_matrix(tmp_path, name, device):
    shape, problem, options = CASES[name]
    tensors = make_tensors(**shape)
    assert_equal_maps(save(tmp_path / "pair.safetensors", tensors), tensors, problem, *options)


@pytest.mark.gpu
def test_a_short_last_block_may_need_more_workspace(tmp_path):
    """A GPU splits the keys of few queries: those of the last block, not those of the first one."""
    tensors = {name: array.astype(np.float16) for name, array in make_tensors(batch=1, heads_t=40, heads_s=40, len_q=1030, len_k=600).items()}
    path = save(tmp_path / "pair.safetensors", tensors)
    on = {device: json.loads(succeed("map", path, "--json", "--causal", "--buckets", 8, "--device", device)) for device in ("cpu", "cuda")}
    for name in ("p", "s", "kl"):
        assert np.abs(np.array(on["cuda"][name]) - np.array(on["cpu"][name])).max() < TOLERANCE


PACKED = {
    "equal": ([0, 40, 40, 100], None),
    "more_keys": ([0, 40, 40, 100], [0, 43, 50, 130]),
    "more_queries": ([0, 40, 90, 100], [0, 29, 70, 90]),  # some queries attend to no key
    "no_keys": ([0, 40, 60, 100], [0, 50, 50, 90]),
    "few_keys": ([0, 10, 30], [0, 5, 10]),  # fewer than buckets
    "few_queries": ([0, 5, 10], [0, 10, 30]),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_averaged(tmp_path, device, name):
    """The buckets of queries and those of keys start at the beginning of each sequence."""
    begins_q, begins_k = PACKED[name]
    options = ["--cu-seqlens-q", ",".join(map(str, begins_q))]
    if begins_k:
        options += ["--cu-seqlens-k", ",".join(map(str, begins_k))]
    begins_k = begins_k or begins_q
    tensors = {name: array[0] for name, array in make_tensors(batch=1, len_q=begins_q[-1], len_k=begins_k[-1]).items()}
    path = save(tmp_path / "packed.safetensors", tensors)
    answer = json.loads(succeed("map", path, "--json", "--head", "all", "--buckets", 8, "--causal", *options, "--device", device))
    whole = {name: 0 for name in ("p", "s", "kl")}
    rows = 0
    for sequence in range(len(begins_q) - 1):
        of_q, of_k = (slice(*begins[sequence : sequence + 2]) for begins in (begins_q, begins_k))
        len_q, len_k = of_q.stop - of_q.start, of_k.stop - of_k.start
        if len_q == 0 or len_k == 0:
            continue
        part = pooled({name: array[None, :, of_q if name[0] == "q" else of_k] for name, array in tensors.items()}, 8, Problem(causal=True))
        attends = visible(Problem(causal=True), len_q, len_k, 0).any(-1)
        counts = np.array([attends[begin:end].sum() for begin, end in itertools.pairwise(bucket_begins(min(8, len_q), len_q))])
        rows = rows + counts
        for name in whole:
            whole[name] = whole[name] + part[name] * counts[None, :, None]
    for name in whole:
        assert np.abs(np.array(answer[name]) - whole[name] / np.maximum(rows, 1)[None, :, None]).max() < TOLERANCE


def test_heads(tmp_path):
    tensors = make_tensors(heads_t=3, heads_s=3)
    path = save(tmp_path / "pair.safetensors", tensors)

    def maps(head):
        return {name: np.array(json.loads(run("map", path, "--json", "--head", head).stdout)[name]) for name in ("p", "s", "kl")}

    every = maps("all")
    for name in every:
        assert np.allclose(maps("1")[name][0], every[name][1], atol=1e-8)
        assert np.allclose(maps("mean")[name][0], every[name].mean(0), atol=1e-8)
    assert np.allclose(every["p"].sum(-1), 1, atol=1e-6)
    refused = run("map", path, "--head", "3")
    assert refused.returncode == 2 and "--head=3: must be 0..2" in refused.stderr


LEFT, TOP, RIGHT, BOTTOM = 96, 34, 132, 60  # pixels around the map of a picture: view/view.h


def test_files(tmp_path, pair):
    succeed("map", pair, "--buckets", 8, "--out", tmp_path / "maps.safetensors", "--png", tmp_path / "map", "--json")
    maps = load(tmp_path / "maps.safetensors")
    assert {name: array.shape for name, (_, array) in maps.items()} == {name: (2, 8, 8) for name in ("p", "s", "kl")}
    picture = decode_png((tmp_path / "map-p.png").read_bytes())
    assert picture.shape == (TOP + 512 + BOTTOM, LEFT + 512 + RIGHT, 3)
    assert decode_png((tmp_path / "map-kl.png").read_bytes()).shape == picture.shape
    cells = picture[TOP + 32 : TOP + 512 : 64, LEFT + 32 : LEFT + 512 : 64].astype(int).sum(-1)
    mean = maps["p"][1].mean(0)
    assert cells.flat[mean.argmax()] == cells.max()
    ordered = cells.flatten()[mean.flatten().argsort()]
    assert (np.diff(ordered) >= -2).all()  # brighter where there is more attention; colors are whole numbers
    assert run("map", pair, "--head", "all", "--png", tmp_path / "each").returncode == 0
    assert (tmp_path / "each-h1-s.png").exists()


@pytest.mark.parametrize("len_q, len_k", [(3, 9), (9, 3)])
def test_size_of_pictures(tmp_path, len_q, len_k):
    """The longer side has at least 512 pixels, in whole pixels per cell."""
    path = save(tmp_path / "small.safetensors", make_tensors(len_q=len_q, len_k=len_k))
    assert run("map", path, "--png", tmp_path / "map").returncode == 0
    assert decode_png((tmp_path / "map-p.png").read_bytes()).shape == (TOP + 57 * len_q + BOTTOM, LEFT + 57 * len_k + RIGHT, 3)


def test_one_bright_cell_does_not_darken_a_picture(tmp_path):
    """Colors end at the 99th percentile of the teacher: the first query attends to one key alone, the others to many."""
    tensors = make_tensors(batch=1, heads_t=1, heads_s=1, len_q=256, len_k=256)
    tensors = {name: 0 * each for name, each in tensors.items()}
    path = save(tmp_path / "flat.safetensors", tensors)
    text = succeed("map", path, "--causal", "--buckets", 16, "--png", tmp_path / "map", "--json")
    picture = decode_png((tmp_path / "map-p.png").read_bytes()).astype(int).sum(-1)
    cells = picture[TOP + 16 : TOP + 512 : 32, LEFT + 16 : LEFT + 512 : 32]
    p = np.array(json.loads(text)["p"])[0]
    bright = np.sort(p.flatten())[-1 - p.size // 100]
    assert p.max() > 1.5 * bright
    assert cells[0, 0] == cells[p >= bright].max() == cells[p >= bright].min()


def test_axes_and_color_bar(tmp_path):
    """Left of the map are the positions of queries, below those of keys, on the right a bar of all colors with numbers."""
    path = save(tmp_path / "small.safetensors", make_tensors(len_q=64, len_k=64))
    assert run("map", path, "--buckets", 8, "--png", tmp_path / "map").returncode == 0
    picture = decode_png((tmp_path / "map-p.png").read_bytes())
    is_ink = (picture == (32, 36, 44)).all(-1)
    for part in (slice(None), slice(0, LEFT)), (slice(TOP + 512, None), slice(None)), (slice(None), slice(LEFT + 550, None)), (slice(0, TOP), slice(LEFT, LEFT + 512)):
        assert is_ink[part].sum() > 100
    bar = picture[TOP : TOP + 512, LEFT + 512 + 25].astype(int).sum(-1)
    assert (np.diff(bar) <= 0).all() and len(set(bar)) > 150


@pytest.mark.parametrize("len_q, len_k", [(0, 0), (0, 5), (5, 0)])
def test_nothing_to_draw(tmp_path, len_q, len_k):
    """Maps without cells are no error, but there is no picture of them."""
    path = save(tmp_path / "empty.safetensors", make_tensors(len_q=len_q, len_k=len_k))
    done = run("map", path, "--png", tmp_path / "x", "--out", tmp_path / "maps.safetensors")
    assert done.returncode == 2 and "--png" in done.stderr and "at least one of each" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert run("map", path, "--json", "--out", tmp_path / "maps.safetensors").returncode == 0
    assert load(tmp_path / "maps.safetensors")["kl"][1].size == 0


def decode_png(content):
    """The pixels [height, width, 3] of an indexed PNG without filters."""
    chunks, at = {}, 8
    while at < len(content):
        size, kind = struct.unpack(">I4s", content[at : at + 8])
        chunks[kind] = content[at + 8 : at + 8 + size]
        at += 12 + size
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (kind, depth, color) == (b"IEND", 8, 3)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(256, 3)[lines[:, 1:]]


def test_text_is_plain(pair):
    text = run("map", pair, "--buckets", 16).stdout
    assert text.isascii() and "\x1b" not in text
    for words in ("P, the teacher", "S, the student", "contributions to the KL"):
        assert words in text


def test_memory_at_131072(tmp_path):
    """Inputs of 32 MiB; one matrix would take 64 GiB. The window shortens the test; the buffers are those of a full map."""
    random = np.random.default_rng(0)
    path = save(tmp_path / "long.safetensors", {name: random.standard_normal((131072, 16), np.float32) for name in ("q_t", "k_t", "q_s", "k_s")})
    answer = json.loads(run("map", path, "--causal", "--window", "4096,0", "--json").stdout)
    assert answer["peak_bytes"] < 300 * MIB
    assert np.shape(answer["p"]) == (1, 64, 64) and np.allclose(np.sum(answer["p"], -1), 1, atol=1e-5)
