"""Memory of a rank beyond its shards: as docs/guide/many-gpus.md says, without the copies that gloo makes."""

import pytest
import torch

import streamkl
from streamkl.parallel import _gather, _ring
from streamkl.parallel._layout import Layout
from streamkl.parallel._setup import Groups

WORLD, LENGTH, HEADS, DIM, SLICES = 4, 1024, 8, 64, 4
KEYS = 2 * WORLD * LENGTH * HEADS * DIM * 4 / SLICES  # a slice of the keys of both models
GRADIENTS = WORLD * LENGTH * HEADS * DIM * 4 / SLICES  # a slice of the student's f32 dk
KEPT = 2 * LENGTH * HEADS * DIM * 4  # dq and dk of the shard
SMALL = 2**21 + 64 * LENGTH * WORLD + KEPT / SLICES  # workspace; rows, orders and bounds; the slice of the shard to be sent


class Done:
    def wait(self):
        pass


class LonelyRank(_gather.AllGather):
    """Rank 1 of a group whose other ranks hold what it holds."""

    def __init__(self):
        self.group, self.layout, self.rank = None, Layout("zigzag", WORLD), 1


class LonelyRing(_ring.Ring):
    """The same as a ring: what arrives is a copy of what was sent."""

    def __init__(self):
        self.group, self.layout, self.rank, self.next, self.previous = None, Layout("zigzag", WORLD), 1, 2, 0


class Arrived(_ring._Traveling):
    def send(self, tensors):
        self.sent, self.received = tensors, [tensor.clone() for tensor in tensors]


def without_groups(monkeypatch, operators):
    monkeypatch.setattr(Groups, "__init__", lambda self, *groups: None)
    monkeypatch.setattr(Groups, "is_split", False)
    monkeypatch.setattr(Groups, "reduces", False)
    monkeypatch.setattr(Groups, "operators", lambda self, *call, **asked: operators)


@pytest.fixture
def in_a_ring(monkeypatch):
    monkeypatch.setattr(_ring, "_Traveling", Arrived)
    without_groups(monkeypatch, LonelyRing())


@pytest.fixture
def alone(monkeypatch):
    def all_gather(whole, own, group, async_op):
        whole.view(WORLD, *own.shape).copy_(own)
        return Done()

    def reduce_scatter(own, whole, group, async_op):
        torch.sum(whole.view(WORLD, *own.shape), 0, out=own)
        return Done()

    monkeypatch.setattr(_gather, "all_gather", all_gather)
    monkeypatch.setattr(_gather, "reduce_scatter", reduce_scatter)
    without_groups(monkeypatch, LonelyRank())


def peak_bytes(function):
    """The answer, and the most bytes of torch's CPU allocator that it has in use at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        answer = function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return answer, int(torch.tensor(sizes).cumsum(0).max())


OPTIONS = dict(causal=True, window_size=(8, 0), reduction="sum")  # a window is fast


def make_shards():
    return [torch.randn(1, LENGTH, HEADS, DIM).requires_grad_(i > 1) for i in range(4)]


def test_two_slices_of_keys_and_of_their_gradients(alone):
    own = make_shards()
    loss, peak = peak_bytes(lambda: streamkl.attention_kl(*own, parallel=streamkl.Parallel("any"), **OPTIONS))
    assert 1.9 * KEYS < peak <= 2 * KEYS + SMALL
    _, peak = peak_bytes(lambda: torch.autograd.grad(loss, own[2:]))
    # Slices of dq and dk are joined in the end: both are there twice.
    assert 1.9 * KEYS < peak <= 2 * (KEYS + GRADIENTS) + 2 * KEPT + SMALL


def test_a_ring_holds_two_shards_of_keys_and_three_of_their_gradients(in_a_ring):
    own, shard = make_shards(), LENGTH * HEADS * DIM * 4
    small = 2**21 + 2 * HEADS * LENGTH * 20 + 64 * LENGTH  # workspace; row states, two of them while they merge; bounds
    loss, peak = peak_bytes(lambda: streamkl.attention_kl(*own, parallel=streamkl.Parallel("any", comm="ring"), **OPTIONS))
    assert 3.9 * shard < peak <= 4 * shard + small  # keys of both models
    _, peak = peak_bytes(lambda: torch.autograd.grad(loss, own[2:]))
    assert 8.9 * shard < peak <= (4 + 3 + 2) * shard + small  # keys, dk; dq, and that of the last shard
