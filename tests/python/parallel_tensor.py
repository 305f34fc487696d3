"""Heads on several processes, compared with one: tensor parallelism, Ulysses, DTensor: see parallel_run.py."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import make_tensors
from indexer_cases import make_indexer
from parallel_cases import GRADIENT, LOSS, equal_on_all_ranks, near

import streamkl
from streamkl import Parallel
from streamkl.frameworks import megatron_indexer_loss
from streamkl.parallel import shard


def rank_and_world():
    return dist.get_rank(), dist.get_world_size()


def own_heads(tensor, dim=-2):
    rank, world = rank_and_world()
    return tensor.chunk(world, dim)[rank]


def compare_gradients(found, expected):
    for index, (gradient, whole) in enumerate(zip(found, expected)):
        near(f"gradient {index}", gradient, whole, GRADIENT)


# ---- Teacher heads -------------------------------------------------------------------------------------------------------


def teacher_heads_of_indexer():
    """Dense and sparse; the cross-entropy is that of the mean of all heads, and so are the gradients."""
    _, world = rank_and_world()
    for top_k in 0, 5:
        for given in False, True:
            tensors = make_indexer(heads_t=2 * world, key_heads_t=world, top_k=top_k)
            whole, rows = streamkl.indexer_kl(*tensors, causal=True, return_rows=True)
            expected = torch.autograd.grad(whole, tensors.trained)
            own = (own_heads(tensors.q_t), own_heads(tensors.k_t), *tensors[2:])
            options = dict(causal=True, lse_t=own_heads(rows.lse_t) if given else None, parallel=Parallel(tensor_group=dist.group.WORLD))
            loss, own_rows = streamkl.indexer_kl(*own, return_rows=True, **options)
            near("cross-entropy", own_rows.cross_entropy, rows.cross_entropy, LOSS * 10)
            torch.testing.assert_close(own_rows.kl, own_rows.cross_entropy - own_rows.entropy)
            assert loss > whole  # by how far the ranks' teacher heads are from each other
            equal_on_all_ranks(loss, None)
            compare_gradients(torch.autograd.grad(loss, tensors.trained), expected)


def teacher_heads_of_megatron():
    """megatron_indexer_loss with the ranks of pg_collection.tp has the gradients of one call with all teacher heads."""
    _, world = rank_and_world()
    tensors = make_indexer(len_k=19, heads_t=2 * world, key_heads_t=world, top_k=5)
    q_t, k_t, q_s, k_s, w_s, indices = (tensor.transpose(0, 1) for tensor in tensors)
    of_indexer, index = (q_s, w_s.squeeze(2), k_s.squeeze(2)), indices.squeeze(2).transpose(0, 1)
    groups, per_token = SimpleNamespace(tp=dist.group.WORLD), dict(calculate_per_token_loss=True)
    for options in {}, per_token:
        whole = megatron_indexer_loss(*of_indexer, index, q_t, k_t, 0.3, 0.5, True, **options)
        expected = torch.autograd.grad(whole, tensors.trained)
        own = (own_heads(q_t), own_heads(k_t))
        loss = megatron_indexer_loss(*of_indexer, index, *own, 0.3, 0.5, True, groups, **options)
        compare_gradients(torch.autograd.grad(loss, tensors.trained), expected)


def teacher_heads_under_a_wider_lse():
    """Ranks weigh their heads by the mass of the list, which may underflow."""
    _, world = rank_and_world()
    tensors = make_indexer(heads_t=2 * world, key_heads_t=world, top_k=5)
    _, dense = streamkl.indexer_kl(*tensors[:5], causal=True, return_rows=True)
    options = dict(causal=True, lse_t_wider=True, return_rows=True, reduction="sum")
    whole, rows = streamkl.indexer_kl(*tensors, lse_t=dense.lse_t, **options)
    expected = torch.autograd.grad(whole, tensors.trained)
    own = (own_heads(tensors.q_t), own_heads(tensors.k_t), *tensors[2:])
    for shift in 0, 256:
        given = dict(lse_t=own_heads(dense.lse_t) + shift, parallel=Parallel(tensor_group=dist.group.WORLD), **options)
        loss, own_rows = streamkl.indexer_kl(*own, **given)
        near("cross-entropy", own_rows.cross_entropy, rows.cross_entropy, LOSS * 10 if shift == 0 else 1e-3)
        near("mass", own_rows.mass, rows.mass if shift == 0 else torch.zeros_like(rows.mass), LOSS * 10)
        found = torch.autograd.grad(loss, tensors.trained)
        for index, (gradient, of_whole) in enumerate(zip(found, expected)):
            near(f"gradient {index}", gradient, of_whole, GRADIENT if shift == 0 else 1e-3)


def teacher_heads_of_attention():
    _, world = rank_and_world()
    tensors = make_tensors(heads_t=4 * world, key_heads_t=world, heads_s=2, key_heads_s=1)
    q_t, k_t, *student = (tensor.detach().requires_grad_(i > 1) for i, tensor in enumerate(tensors))
    # Teacher heads 0..2 W - 1 belong to student head 0: a rank holds some of each group.
    by_group = q_t.unflatten(2, (2, 2 * world))
    own_q = own_heads(by_group, 3).flatten(2, 3)
    all_k = k_t.repeat_interleave(4, 2).unflatten(2, (2, 2 * world))
    own_k = own_heads(all_k, 3).flatten(2, 3)
    whole = streamkl.attention_kl(q_t, k_t, *student, causal=True)
    loss = streamkl.attention_kl(own_q, own_k, *student, causal=True, parallel=Parallel(tensor_group=dist.group.WORLD))
    equal_on_all_ranks(loss, None)
    compare_gradients(torch.autograd.grad(loss, student), torch.autograd.grad(whole, student))


def refusals():
    q_t, k_t, q_s, k_s = make_tensors()
    for options, expected in (
        (dict(direction="reverse"), "direction must be 'forward'"),
        (dict(), "the teacher must not require gradients"),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            streamkl.attention_kl(q_t, k_t, q_s, k_s, parallel=Parallel(tensor_group=dist.group.WORLD), **options)
    world, own = dist.get_world_size(), [tensor.detach() for tensor in make_indexer(len_q=8, len_k=8)[:5]]
    uneven, bounds = torch.zeros(2 * world + 1, 1, 1), torch.tensor([0, 2 * world])
    for call, expected in (
        (lambda: streamkl.indexer_kl(*own, return_rows=True, parallel=Parallel(dist.group.WORLD, comm="ring")), "row states do not give"),
        (lambda: shard(uneven, dist.group.WORLD, 0, cu_seqlens=bounds), f"{2 * world + 1} tokens: must be a multiple of {world}, the size"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(expected)):
            call()


def teacher_heads_and_context():
    """Both at once: two halves of the teacher heads, each with the sequence cut in two."""
    rank, world = rank_and_world()
    if world != 4:
        return
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    tensors = make_indexer(heads_t=4, key_heads_t=2, len_q=16, len_k=16)
    expected = torch.autograd.grad(streamkl.indexer_kl(*tensors, causal=True), tensors.trained)
    part = rank // 2
    cut = [shard(tensor.detach(), mesh["cp"]) for tensor in (*tensors[:2], *tensors[2:5])]
    own_t = (cut[0].chunk(2, 2)[part], cut[1].chunk(2, 2)[part])
    student = [tensor.requires_grad_() for tensor in cut[2:]]
    loss = streamkl.indexer_kl(*own_t, *student, causal=True, parallel=Parallel(mesh["cp"], tensor_group=mesh["tp"]))
    compare_gradients(torch.autograd.grad(loss, student), [shard(each, mesh["cp"]) for each in expected])


def faults_in_a_mesh():
    """A rank that refuses its arguments ends the call on the ranks of both of its groups."""
    rank, world = rank_and_world()
    if world != 4:
        return
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    tensors = [tensor.detach() for tensor in make_indexer(len_q=8, len_k=8)[:5]]
    if rank == 0:
        tensors[2] = tensors[2][:, :6]
    with pytest.raises((ValueError, RuntimeError), match="refused its arguments" if rank else None):
        streamkl.indexer_kl(*tensors, parallel=Parallel(mesh["cp"], tensor_group=mesh["tp"]))


# ---- Heads of both models ------------------------------------------------------------------------------------------------


def ulysses():
    """Shards of the sequence become shards of the heads, and gradients return the same way."""
    rank, world = rank_and_world()
    tensors = make_tensors(len_q=4 * world, len_k=4 * world, heads_t=world * 2, key_heads_t=world, heads_s=world, key_heads_s=world)
    whole = streamkl.attention_kl(*tensors, causal=True)
    expected = torch.autograd.grad(whole, tensors)
    own = [shard(tensor.detach(), dist.group.WORLD, layout="contiguous").requires_grad_() for tensor in tensors]
    loss = streamkl.attention_kl(*(heads_of(tensor, world) for tensor in own), causal=True, parallel=Parallel(loss_group=dist.group.WORLD))
    near("loss", loss, whole, LOSS)
    equal_on_all_ranks(loss, None)
    found = torch.autograd.grad(loss, own)
    compare_gradients(found, [shard(each, dist.group.WORLD, layout="contiguous") for each in expected])


def heads_of(tensor, world):
    """[batch, length / W, heads, dim] on each rank as [batch, length, heads / W, dim]."""
    from torch.distributed.nn.functional import all_to_all_single

    sent = tensor.unflatten(2, (world, -1)).movedim(2, 0).contiguous()
    received = all_to_all_single(torch.empty_like(sent), sent)
    return received.movedim(0, 1).flatten(1, 2)


def unequal_batches():
    """The loss is the mean over all rows, not the mean of the ranks' means."""
    rank, world = rank_and_world()
    tensors = make_tensors(batch=2 * world, key_heads_s=2)
    lengths = torch.arange(2 * world) * 3 % 19
    weight = (torch.arange(19) < lengths[:, None]).float()
    whole = streamkl.attention_kl(*tensors, key_lengths=lengths, row_weight=weight)
    own = [tensor.detach()[2 * rank : 2 * rank + 2].requires_grad_() for tensor in tensors]
    options = dict(key_lengths=lengths[2 * rank : 2 * rank + 2], row_weight=weight[2 * rank : 2 * rank + 2])
    loss = streamkl.attention_kl(*own, parallel=Parallel(loss_group=dist.group.WORLD), **options)
    near("loss", loss, whole, LOSS)
    expected = [each[2 * rank : 2 * rank + 2] for each in torch.autograd.grad(whole, tensors)]
    compare_gradients(torch.autograd.grad(loss, own), expected)


def megatron():
    """Context parallel, and the teacher heads over ranks, agree with megatron-core's loss of whole score matrices."""
    from megatron.core.transformer.experimental_attention_variant.dsa import compute_dsa_indexer_loss

    rank, world = rank_and_world()
    group, length = dist.group.WORLD, 8 * world
    for top_k in 0, 6:
        tensors = make_indexer(len_q=length, len_k=length, heads_t=2 * world, key_heads_t=2 * world, top_k=top_k)
        future = torch.ones(length, length).triu(1).bool()
        index = None
        if top_k:  # Megatron's lists have no key twice, and no masked key
            scores = torch.rand(2, length, length).masked_fill(future, -1)
            scores[:, :, 0] = 2  # all rows list a key
            dist.broadcast(scores, 0)
            values, index = scores.topk(top_k)
            ours = torch.where(values < 0, -1, index).int()
        q_t, k_t, q_s, k_s, w_s = tensors[:5]

        def loss_of_megatron():
            dots = torch.einsum("bigd,bjhd->bgij", q_s, k_s).relu()
            y = torch.einsum("bihg,bgij->bij", w_s, dots) * (q_s.shape[-1] * w_s.shape[-1]) ** -0.5
            lists = index if top_k else torch.arange(length).expand(2, length, length)
            one_rank = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
            scale = q_t.shape[-1] ** -0.5
            return compute_dsa_indexer_loss(
                y.masked_fill(future, -torch.inf), lists, q_t.transpose(0, 1), k_t.transpose(0, 1), scale, 1.0, bool(top_k), one_rank
            )

        whole = loss_of_megatron()
        expected = torch.autograd.grad(whole, tensors.trained)
        cut = [shard(tensor.detach(), group) for tensor in tensors[:5]]
        student = [tensor.requires_grad_() for tensor in cut[2:]]
        own_index = shard(ours, group) if top_k else None
        loss = streamkl.indexer_kl(*cut[:2], *student, own_index, causal=True, parallel=Parallel(context_group=group))
        near("loss", loss, whole, 1e-5)  # Megatron adds 1e-10 to probabilities
        found = torch.autograd.grad(loss, student)
        for gradient, of_whole in zip(found, expected):
            near("gradient", gradient, shard(of_whole, group), 1e-4)
        given = (own_heads(q_t), own_heads(k_t), q_s, k_s, w_s, ours if top_k else None)
        by_heads = streamkl.indexer_kl(*given, causal=True, parallel=Parallel(tensor_group=group))
        for gradient, of_whole in zip(torch.autograd.grad(by_heads, tensors.trained), expected):
            near("gradient", gradient, of_whole, 1e-4)


# ---- DTensor -------------------------------------------------------------------------------------------------------------


def dtensor():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    _, world = rank_and_world()
    mesh = dist.init_device_mesh("cpu", (world,))
    shape = dict(batch=world, heads_t=2 * world, key_heads_t=world, heads_s=world, key_heads_s=world)

    def compare(function, tensors, placements, **options):
        wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        whole = function(*tensors, **options)
        expected = torch.autograd.grad(whole, [tensors[i] for i in wanted])
        cut = [
            distribute_tensor(tensor.detach(), mesh, [placement]).requires_grad_(tensor.requires_grad)
            for tensor, placement in zip(tensors, placements)
        ]
        loss = function(*cut, **options)
        assert loss.placements == (Replicate(),)
        near("loss", loss.to_local(), whole, LOSS)
        loss.backward()
        compare_gradients([cut[i].grad.full_tensor() for i in wanted], expected)

    for layout, heads in ("bnhd", 2), ("bhnd", 1):
        tensors = make_tensors(layout=layout, **shape)
        for placement in Shard(0), Shard(heads), Replicate():
            compare(streamkl.attention_kl, tensors, [placement] * 4, causal=True, layout=layout)
    one_key_head = make_tensors(**{**shape, "key_heads_s": 1})
    compare(streamkl.attention_kl, one_key_head, [Shard(2), Shard(2), Shard(2), Replicate()], causal=True)
    indexer = make_indexer(batch=world)[:5]
    compare(streamkl.indexer_kl, indexer, [Shard(0)] * 5, causal=True)

    def weighted_kl(*tensors):
        *tensors, row_weight = tensors
        return streamkl.attention_kl(*tensors, row_weight=row_weight)

    of_rows, of_heads = torch.linspace(0, 1, world * 19).view(world, 19), torch.linspace(0, 1, world**2 * 19).view(world, world, 19)
    for weight, split, placement in (of_rows, Shard(2), Replicate()), (of_heads, Shard(2), Shard(1)), (of_rows, Shard(0), Shard(0)):
        compare(weighted_kl, [*make_tensors(**shape), weight.requires_grad_()], [split] * 4 + [placement])

    def distributed(tensors, *placements):
        return [distribute_tensor(each.detach(), mesh, [placement]) for each, placement in zip(tensors, placements)]

    # A batch that the ranks cannot share equally, and an option that is no tensor.
    uneven = make_indexer(batch=world + 1)[:5]
    whole, rows = streamkl.indexer_kl(*(each.detach() for each in uneven), reduction="none", return_rows=True)
    cut = distributed(uneven, *[Shard(0)] * 5)
    found, found_rows = streamkl.indexer_kl(*cut, reduction="none", return_rows=True)
    for a, b in (found, whole), (found_rows.lse_t, rows.lse_t), (found_rows.kl, rows.kl):
        near("rows", a.full_tensor(), b, LOSS)
    options = dict(lse_t_wider=True, row_weight="mass")
    expected = streamkl.indexer_kl(*(each.detach() for each in uneven), lse_t=rows.lse_t + 1, **options)
    (lse_t,) = distributed([rows.lse_t + 1], Shard(0))
    near("by mass", streamkl.indexer_kl(*cut, lse_t=lse_t, **options).to_local(), expected, LOSS)

    *index_heads, w_s = make_indexer(index_heads=world, key_heads_t=1)[:5]
    index_heads.append(w_s.squeeze(2))
    odd_heads = make_tensors(heads_t=3 * world, key_heads_t=1 + world, heads_s=3 * world, key_heads_s=1 + world)
    for function, given, message in (
        (streamkl.indexer_kl, distributed(index_heads, Shard(2), Replicate(), Shard(2), Replicate(), Shard(2)), "for index heads whole ones"),
        (streamkl.attention_kl, distributed(odd_heads, *[Shard(2)] * 4), f"k_t: {1 + world} heads: must be a multiple of the {world} ranks"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            function(*given)

    cut = [distribute_tensor(tensor.detach(), mesh, [Shard(1)]) for tensor in tensors]
    for given, expected in (
        ([distribute_tensor(t.detach(), mesh, [Shard(2)]) for t in tensors], "must be Shard(0) (batch), Shard(1) (heads"),
        ([*cut[:3], tensors[3]], "k_s: a plain tensor with DTensors"),
        ([*cut[:3], distribute_tensor(tensors[3].detach(), mesh, [Shard(0)])], "k_s S"),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            streamkl.attention_kl(*given, layout="bhnd")
