"""The work of all ranks on one device, without or with a group of one rank: for CPUs and GPUs."""

import torch
import torch.distributed as dist
from cases import make_tensors
from indexer_cases import make_indexer

import streamkl
from streamkl import _library as lib
from streamkl._options import Lengths
from streamkl._problem import DK_S, DQ_S, DW_S, Options
from streamkl._states import partial, states_finish, states_merge
from streamkl.parallel._gather import AllGather
from streamkl.parallel._layout import Layout, gather_order, inverse_of
from streamkl.parallel._ring import Ring
from streamkl.parallel._shards import Shards

NO_LENGTHS = Lengths(None, None, None, None, None)


def problems(device, dtype, length):
    """(name, tensors of the operators, gradients)"""
    shape = dict(len_q=length, len_k=length, device=device)
    attention = make_tensors(**shape, dtype=dtype, heads_t=4, key_heads_t=2, heads_s=4, key_heads_s=2, dim_t=64, dim_s=64)
    groups = make_tensors(**shape, dtype=dtype, heads_t=4, key_heads_t=2, heads_s=2, key_heads_s=2, dim_t=64, dim_s=64)
    types = dict(dtype_t=dtype, dtype_s=dtype)
    dense = make_indexer(**shape, **types, heads_t=4, key_heads_t=2, index_heads=8, dim_t=64, dim_s=64)
    sparse = make_indexer(**shape, **types, heads_t=4, key_heads_t=2, index_heads=8, dim_t=64, dim_s=64, top_k=8)
    yield "attention", (*attention, None, None, None, None), DQ_S | DK_S
    yield "teacher groups", (*groups, None, None, None, None), DQ_S | DK_S
    yield "dense indexer", (*dense[:5], None, None, None), DQ_S | DK_S | DW_S
    yield "sparse indexer", (*sparse[:5], None, None, sparse.indices), DQ_S | DK_S | DW_S


def near(name, found, expected, share):
    error = (found.double() - expected.double()).norm().item()
    assert error <= share * expected.double().norm().item() + 1e-9, f"{name}: off by {error} of {expected.double().norm().item()}"


def check_shards(device, dtype=torch.float32, length=96, world=4):
    """Row states of all key shards merge to the KL and LSEs of each rank, and its gradients add up to those of the whole."""
    share = 1e-5 if dtype == torch.float32 else 2e-2
    for name, tensors, gradients in problems(device, dtype, length):
        tensors = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
        options = Options(gradients=gradients, causal=True)
        wanted = lib.KL | lib.LSE_T | lib.LSE_S
        whole = torch.ops.streamkl.forward(*tensors, None, wanted, *NO_LENGTHS, *options)
        upstream = torch.ones_like(whole[0])
        expected = torch.ops.streamkl.backward(*tensors, *whole[1:], None, None, upstream, *NO_LENGTHS, *options)
        for layout_name in "zigzag", "contiguous":
            layout = Layout(layout_name, world)
            rows = inverse_of(gather_order(layout, length // world, None, torch.device(device))).view(world, -1)
            own = [tuple(None if each is None else each.index_select(1, rows[rank]) for each in tensors) for rank in range(world)]
            dk = torch.zeros_like(expected[1], dtype=torch.float32)
            for rank in range(world):
                shards = Shards(layout, rank, own[rank], (*NO_LENGTHS, *options))
                merged, lse_t = None, whole[1].index_select(-1, rows[rank])
                for source in range(world):
                    called = with_keys(own[rank], own[source], shards.indices_of_shard(source))
                    lengths = shards.lengths_of_shard(source)
                    states = partial(*called, lse_t, 0, length // world, *lengths, *shards.options)
                    merged = states if merged is None else states_merge(merged, states)
                found = states_finish(*called, merged, lse_t, wanted, *lengths, *shards.options)
                for row, whole_row, what in zip(found, whole, ("kl", "lse_t", "lse_s")):
                    cut = whole_row.index_select(-1, rows[rank])
                    assert torch.equal(row.isinf(), cut.isinf()), f"{name}, {layout_name}, {what}"
                    near(f"{name}, {layout_name}, {what}", row.nan_to_num(neginf=0), cut.nan_to_num(neginf=0), max(share, 1e-5))
                others = {}
                for source in range(world):
                    called = with_keys(own[rank], own[source], shards.indices_of_shard(source))
                    given = (found[1], found[2], None, None, torch.ones_like(found[0]))
                    lengths = shards.lengths_of_shard(source)
                    dq, dk_part, *dw = torch.ops.streamkl.backward(*called, *given, *lengths, *shards.options)
                    dk[:, rows[source]] += dk_part
                    for place, part in enumerate((dq, *dw)):
                        others[place] = others.get(place, 0) + part
                for place, of_whole in enumerate((expected[0], *expected[2:])):
                    near(f"{name}, {layout_name}, dq or dw", others[place], of_whole.index_select(1, rows[rank]), share)
            near(f"{name}, {layout_name}, dk", dk, expected[1], share)


def with_keys(own, source, indices):
    return own[0], source[1], own[2], source[3], own[4], None, None, indices


def check_group_of_one_rank(device, dtype=torch.float32, length=96):
    """All collective calls, over a group of one rank. attention_kl leaves them out for such a group."""
    share = 1e-5 if dtype == torch.float32 else 2e-2
    group = dist.group.WORLD
    for name, tensors, gradients in problems(device, dtype, length):
        tensors = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
        arguments = (*NO_LENGTHS, *Options(gradients=gradients, causal=True))
        wanted = lib.KL | lib.LSE_T | lib.LSE_S
        kinds = (AllGather, Ring) if dist.get_backend() == "nccl" else (AllGather,)  # gloo sends nothing to itself
        for operators in (kind(group, Layout("zigzag", 1)) for kind in kinds):
            results = []
            for called in torch.ops.streamkl, operators:
                rows = called.forward(*tensors, None, wanted, *arguments)
                upstream = torch.ones_like(rows[0])
                made = called.backward(*tensors, *rows[1:], None, None, upstream, *arguments)
                results.append([row.nan_to_num(neginf=0) for row in rows] + list(made))
            for index, (expected, found) in enumerate(zip(*results)):
                near(f"{name}, {type(operators).__name__}, result {index}", found, expected, share)
    tensors = make_tensors(device=device)
    loss = streamkl.attention_kl(*tensors, parallel=streamkl.Parallel(group, loss_group=group))
    near("loss", loss, streamkl.attention_kl(*tensors), 1e-6)
