"""Losses over several processes with gloo. The cases are in parallel_cases.py and parallel_tensor.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import LONG, make_tensors
from indexer_cases import make_indexer
from parallel_one_device import check_group_of_one_rank, check_shards
from torch.distributed.tensor import Shard, distribute_tensor

import streamkl
from streamkl import Parallel
from streamkl._options import Lengths
from streamkl._problem import Options
from streamkl.parallel import shard, unshard
from streamkl.parallel._gather import slice_count
from streamkl.parallel._groups import agree
from streamkl.parallel._layout import Layout, gather_order, inverse_of
from streamkl.parallel._shards import Shards

SCRIPT = Path(__file__).parent / "parallel_run.py"
HEADS = (
    "teacher_heads_of_indexer", "teacher_heads_of_megatron", "teacher_heads_under_a_wider_lse", "teacher_heads_of_attention", "refusals",
    "ulysses", "unequal_batches", "dtensor",
)  # fmt: skip
SEQUENCES = (
    "layout_of_torch", "gradients_for_averaging", "gradients_of_rows", "gradients_of_sinks", "half_precision", "different_calls",
    "faults_of_one_rank", "compiled",
)  # fmt: skip


def torchrun(processes, *cases, script=SCRIPT):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", script, *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def run(processes, *cases):
    answer = torchrun(processes, *cases)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert [line for line in answer.stdout.splitlines() if line.endswith("works")] == [f"{case} works" for case in cases]


def test_two_processes():
    run(2, "some_problems", *SEQUENCES, *HEADS)


@pytest.mark.skipif(not LONG, reason="./test long")
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_every_problem(processes):
    """Every layout and communication, packed and not, teacher groups, one pass, indexers dense and sparse."""
    run(processes, "all_problems", "sub_groups", *SEQUENCES, *HEADS, "teacher_heads_and_context", "faults_in_a_mesh")


@pytest.mark.skipif(not LONG, reason="./test long")
@pytest.mark.parametrize("case", ["rank_dies_before_a_call", "rank_dies_before_a_gather", "rank_dies_in_a_ring"])
@pytest.mark.parametrize("processes", [2, 4])
def test_a_rank_that_dies(processes, case):
    """The others get an error before the timeout of the group, and nothing hangs."""
    answer = torchrun(processes, case)
    expected = [f"rank {rank}: RuntimeError" for rank in range(processes - 1)]
    assert sorted(re.findall(r"rank \d+: \w+", answer.stdout)) == expected, answer.stderr[-3000:]


def test_megatron():
    pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    run(2, "megatron")


@pytest.mark.skipif(not LONG, reason="./test long")
@pytest.mark.parametrize("comm", ["allgather", "ring"])
def test_the_example_trains_a_student_over_four_processes(comm):
    script = Path(__file__).parents[2] / "examples/context_parallel.py"
    answer = torchrun(4, "--length=1024", "--steps=20", f"--comm={comm}", script=script)
    assert answer.returncode == 0, answer.stderr[-3000:]
    values = [float(value) for value in re.findall(r"attention KL ([\d.]+)", answer.stdout)]
    assert len(values) == 20 and values[-1] < 0.7 * values[0]


# ---- Without other processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_layout_is_a_permutation_that_increases_on_every_rank(name, world):
    layout, length = Layout(name, world), 6
    order = gather_order(layout, length, None, torch.device("cpu"))
    assert torch.equal(order.sort().values, torch.arange(world * length))
    by_rank = inverse_of(order).view(world, length)
    for rank in range(world):
        positions = layout.positions(rank, torch.arange(length), length)
        assert torch.equal(positions, by_rank[rank]) and (positions.diff() > 0).all()
        everything = torch.arange(world * length + 1)
        assert torch.equal(layout.count_before(rank, everything, length), (positions < everything[:, None]).sum(1))


def test_packed_shards_hold_a_part_of_every_sequence():
    """Sequences of 4, 0 and 8 tokens on two ranks, and a row of padding on each."""
    own = torch.tensor([0, 2, 2, 6])
    order = inverse_of(gather_order(Layout("zigzag", 2), 7, own, torch.device("cpu"))).view(2, 7)
    assert order.tolist() == [[0, 3, 4, 5, 10, 11, 12], [1, 2, 6, 7, 8, 9, 13]]


def test_slices_have_whole_key_heads_of_both_models():
    assert [slice_count(*heads) for heads in ((8, 8), (8, 1), (6, 4), (9, 3), (5, 5))] == [4, 1, 2, 3, 1]


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("comm", ["allgather", "ring"])
def test_a_group_of_one_rank_changes_nothing(one_rank, comm):
    tensors = make_tensors()
    expected = streamkl.attention_kl(*tensors, causal=True)
    loss = streamkl.attention_kl(*tensors, causal=True, parallel=Parallel(one_rank, comm=comm))
    assert torch.equal(loss, expected)
    for found, whole in zip(torch.autograd.grad(loss, tensors), torch.autograd.grad(expected, tensors)):
        assert torch.equal(found, whole)
    mesh = dist.init_device_mesh("cpu", (1,))
    assert torch.equal(streamkl.AttentionKLLoss(causal=True, parallel=Parallel(mesh))(*tensors), expected)


def test_any_default_device(one_rank):
    tensors, indices = (*make_tensors(), None, None, None), torch.zeros(2, 19, 2, 3, dtype=torch.int32)
    bounds = Lengths(key_lengths=torch.tensor([40, 46]), key_end=torch.arange(19).expand(2, 19))
    with torch.device("meta"):
        agree(one_rank, torch.device("cpu"), {"layout": "zigzag"}, bounds._asdict(), None)
        Shards(Layout("zigzag", 2), 0, (*tensors, indices), (*bounds, *Options())).check_values()


def test_all_collective_calls_of_one_rank(one_rank):
    check_group_of_one_rank("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_of_all_ranks_on_one_device(dtype):
    check_shards("cpu", dtype)


def test_shards_of_one_rank(one_rank):
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(shard(tokens, one_rank), tokens) and torch.equal(unshard(tokens, one_rank), tokens)
    for given, message in (
        (dict(tensor=tokens[:, :7]), "7 tokens: must be a multiple of 2 for 1 ranks"),
        (dict(tensor=tokens, layout="zig-zag"), "layout='zig-zag': must be 'zigzag' or 'contiguous'"),
        (dict(tensor=tokens[0], dim=0, cu_seqlens=torch.tensor([0, 8, 24])), "cu_seqlens: has 24 tokens: must be at most 12"),
    ):
        with pytest.raises(ValueError, match=message):
            shard(group=one_rank, **given)
    with pytest.raises(ValueError, match="layout='zig-zag'"):
        unshard(tokens, one_rank, layout="zig-zag")


@pytest.mark.parametrize("name", ["context_group", "tensor_group", "loss_group"])
def test_something_else_than_a_group(name):
    with pytest.raises(ValueError, match=f"parallel.{name}='cuda': must be a torch.distributed process group"):
        streamkl.attention_kl(*make_tensors(), parallel=Parallel(**{name: "cuda"}))


def test_groups_without_this_rank_and_meshes_of_two_dimensions(one_rank):
    for group, message in (
        (dist.GroupMember.NON_GROUP_MEMBER, "parallel.context_group: this rank is not in the group"),
        (dist.init_device_mesh("cpu", (1, 1)), "parallel.context_group: a mesh of 2 dimensions must have one"),
    ):
        with pytest.raises(ValueError, match=message):
            streamkl.attention_kl(*make_tensors(), parallel=Parallel(group))


def test_results_of_dtensors(one_rank):
    """All tensors of a result are DTensors, and what is None stays None."""
    mesh = dist.init_device_mesh("cpu", (1,))
    tensors, sinks = [tensor.detach() for tensor in make_tensors(heads_s=4)], (torch.ones(4), torch.zeros(4))
    whole = streamkl.attention_kl(*tensors, sink_t=sinks[0], sink_s=sinks[1], return_lse=True)
    cut, (sink_t, sink_s) = ([distribute_tensor(each, mesh) for each in some] for some in (tensors, sinks))
    found = streamkl.attention_kl(*cut, sink_t=sink_t, sink_s=sink_s, return_lse=True)
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(found, whole))
    indexer = [tensor.detach() for tensor in make_indexer()[:5]]
    _, rows = streamkl.indexer_kl(*(distribute_tensor(each, mesh) for each in indexer), return_rows=True)
    expected = streamkl.indexer_kl(*indexer, return_rows=True)[1]
    assert rows.mass is None and torch.equal(rows.kl.full_tensor(), expected.kl)


def test_dtensors_that_are_refused(one_rank):
    mesh, other = dist.init_device_mesh("cpu", (1,)), dist.init_device_mesh("cpu", (1, 1))
    tensors = [distribute_tensor(tensor, mesh) for tensor in make_tensors()]
    lse_t = torch.zeros(2, 4, 19)
    for changed, options, message in (
        ([distribute_tensor(make_tensors()[3], other)], {}, "k_s: must be on the mesh of q_t"),
        ([make_tensors()[3]], {}, "k_s: a plain tensor with DTensors: must be a DTensor, too"),
        (tensors[3:], dict(pool=("mean", 4)), "pool: a pooled teacher takes no DTensors"),
        (tensors[3:], dict(cu_seqlens_q=torch.tensor([0, 19])), "cu_seqlens_q: packed sequences have no batch to shard"),
        (tensors[3:], dict(parallel=Parallel(loss_group=one_rank)), "parallel.loss_group: DTensors bring their own groups"),
        (tensors[3:], dict(lse_t=distribute_tensor(lse_t, mesh, [Shard(1)])), r"lse_t: S.*1\) must be R.*, as the tensors are split by all"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            streamkl.attention_kl(*tensors[:3], *changed, **options)


def test_something_else_than_parallel(one_rank):
    with pytest.raises(ValueError, match="parallel=.*: must be a streamkl.Parallel"):
        streamkl.attention_kl(*make_tensors(), parallel=one_rank)
    with pytest.raises(ValueError, match="parallel.layout='stripes': must be 'zigzag' or 'contiguous'"):
        Parallel(one_rank, layout="stripes")
    with pytest.raises(ValueError, match="parallel.comm='tree': must be 'allgather' or 'ring'"):
        Parallel(one_rank, comm="tree")
    with pytest.raises(ValueError, match="parallel.gradients='max': must be 'sum' or 'mean'"):
        Parallel(one_rank, gradients="max")
    with pytest.raises(TypeError, match="attention_kl.* got an unexpected keyword argument 'cp_group'"):
        streamkl.attention_kl(*make_tensors(), cp_group=one_rank)
