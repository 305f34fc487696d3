"""Calls on several processes, compared with the same call on one: see parallel_run.py.

Every rank makes the whole problem from the same seed, computes it alone, cuts it, and computes its shard with the others.
Prints one line per case that works.
"""

import os
import re
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import end_of_rank, make_tensors
from indexer_cases import make_indexer

import streamkl
from streamkl import Parallel
from streamkl.parallel import shard

LOSS, GRADIENT = 1e-6, 1e-5  # relative to the loss, and to the largest gradient

# Lengths per rank: the whole problem has as many tokens on any number of ranks as a multiple of 2 ranks allows.
ATTENTION = dict(batch=2, heads_t=4, key_heads_t=2, heads_s=4, key_heads_s=2, dim_t=8, dim_s=5)
INDEXER = dict(batch=2, heads_t=4, key_heads_t=2, index_heads=3, dim_t=8, dim_s=5)
PACKED = (4, 0, 2, 6)  # tokens of each sequence on a rank
PADDING = 2  # rows of a packed shard after its last sequence


def near(name, actual, expected, tolerance):
    largest = expected.detach().double().abs().max().item() if expected.numel() else 0.0
    error = (actual.detach().double() - expected.detach().double()).abs().max().item() if expected.numel() else 0.0
    assert error <= tolerance * largest + 1e-9, f"{name}: off by {error:.3g} where the largest is {largest:.3g}"


def equal_on_all_ranks(loss, group):
    found = [torch.empty_like(loss) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, loss.detach(), group=group)
    assert all(torch.equal(each, loss) for each in found), found


class Case:
    """A problem: its whole tensors, the options of the call, and those that are tensors of rows or lengths."""

    def __init__(self, function, tensors, options, group, cp, world):
        self.function, self.tensors, self.options = function, tensors, options
        self.group, self.cp, self.world = group, cp, world
        self.layout = options.get("layout", "bnhd")
        self.cu_seqlens = options.get("cu_seqlens_q")

    @property
    def name(self):
        return getattr(streamkl, self.function)

    def cut(self, tensor, dim):
        return shard(tensor, self.group, dim, layout=self.cp.get("layout", "zigzag"), cu_seqlens=self.cu_seqlens)

    def cut_tensor(self, tensor):
        if tensor is None:
            return None
        own = self.cut(tensor.detach(), -2 if self.layout == "bhnd" else -3)
        return own.requires_grad_(tensor.requires_grad)

    def own_options(self):
        own = dict(self.options)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if own.get(name) is not None:
                own[name] = own[name] // self.world
        for name in ("row_weight", "lse_t", "lse_s", "key_begin", "key_end"):
            if own.get(name) is not None:
                own[name] = self.cut(own[name], -1)
        return own

    def compare(self):
        wanted = [index for index, tensor in enumerate(self.tensors) if tensor is not None and tensor.requires_grad]
        whole = self.name(*self.tensors, **self.options)
        own_tensors = [self.cut_tensor(tensor) for tensor in self.tensors]
        own = self.name(*own_tensors, **self.own_options(), parallel=Parallel(self.group, **self.cp))
        assert own.dtype == torch.float32
        upstream = own_upstream = torch.tensor(0.7)
        if self.options.get("reduction") == "none":
            upstream = torch.linspace(-1, 2, whole.numel()).view_as(whole)
            own_upstream = self.cut(upstream, -1)
            near("loss", own, self.cut(whole, -1), GRADIENT)
        else:
            near("loss", own, whole, LOSS)
            equal_on_all_ranks(own, self.group)
        if not wanted:
            return
        expected = torch.autograd.grad(whole, [self.tensors[i] for i in wanted], upstream)
        found = torch.autograd.grad(own, [own_tensors[i] for i in wanted], own_upstream)
        for index, gradient, whole_gradient in zip(wanted, found, expected):
            assert gradient.dtype == self.tensors[index].dtype
            cut = self.cut_tensor(whole_gradient)
            largest = whole_gradient.abs().max().item()
            error = (gradient - cut).abs().max().item()
            assert error <= GRADIENT * largest, f"gradient {index}: off by {error:.3g} where the largest is {largest:.3g}"


# ---- Problems ------------------------------------------------------------------------------------------------------------


def attention(world, length=8, without_teacher=True, **changes):
    tensors = make_tensors(**{**ATTENTION, "len_q": world * length, "len_k": world * length, **changes})
    for tensor in tensors[:2] if without_teacher else ():
        tensor.requires_grad_(False)
    return tensors


def indexer(world, length=8, **changes):
    return list(make_indexer(**{**INDEXER, "len_q": world * length, "len_k": world * length, **changes}))


def lses_of(tensors, **options):
    _, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True, **options)
    return dict(lse_t=lse_t, lse_s=lse_s)


def packed(world):
    bounds = torch.tensor([0, *PACKED]).cumsum(0) * world
    return dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds)


def packed_length(world):
    return sum(PACKED) + PADDING


def row_weight(shape):
    weight = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    weight[..., 3:5] = 0
    return weight


CAUSAL = dict(causal=True)


def plain(world):
    return "attention_kl", attention(world), CAUSAL


def window_and_weight(world):
    options = dict(causal=True, window_size=(5, 0), row_weight=row_weight((2, world * 8)), softcap_t=2.0, softmax_scale_s=0.3)
    return "attention_kl", attention(world, layout="bhnd"), dict(layout="bhnd", **options)


def both_windows_reverse(world):
    return "attention_kl", attention(world), dict(window_size=(3, 4), direction="reverse", reduction="sum")


def teacher_gradients(world):
    return "attention_kl", attention(world, without_teacher=False), dict(reduction="none", **CAUSAL)


def one_pass(world):
    tensors = attention(world)
    return "attention_kl", tensors, dict(**CAUSAL, **lses_of(tensors, **CAUSAL))


def groups(world):
    return "attention_kl", attention(world, heads_s=2, key_heads_s=1), CAUSAL


def groups_one_pass(world):
    tensors = attention(world, heads_s=2, key_heads_s=2)
    return "attention_kl", tensors, dict(**CAUSAL, **lses_of(tensors, **CAUSAL))


def no_gradients(world):
    tensors = attention(world)
    return "attention_kl", [tensor.detach() for tensor in tensors], CAUSAL


def key_lengths(world):
    """Some ranks hold only padding: with contiguous shards all but the first."""
    lengths = torch.tensor([7, world * 8])
    weight = (torch.arange(world * 8) < lengths[:, None]).float()
    return "attention_kl", attention(world), dict(key_lengths=lengths, row_weight=weight, **CAUSAL)


def only_padding(world):
    lengths = torch.tensor([3, 0])
    weight = (torch.arange(world * 8) < lengths[:, None]).float()
    return "attention_kl", attention(world), dict(key_lengths=lengths, row_weight=weight, **CAUSAL)


def chunked(world):
    """Row bounds of the caller, in the whole sequence."""
    begin = (torch.arange(world * 8) // 6 * 6).expand(2, -1)
    end = (begin + 5).clamp(max=world * 8)
    return "attention_kl", attention(world), dict(key_begin=begin, key_end=end, **CAUSAL)


def make_sinks(heads_t, heads_s):
    return dict(sink_t=torch.linspace(-1, 1, heads_t), sink_s=torch.linspace(0.5, -2, heads_s))


def sinks(world):
    return "attention_kl", attention(world), dict(**make_sinks(4, 4), **CAUSAL)


def sinks_one_pass(world):
    tensors, given = attention(world), dict(**make_sinks(4, 4), causal=True, window_size=(5, 0))
    return "attention_kl", tensors, dict(**given, **lses_of(tensors, **given))


def sinks_of_groups(world):
    return "attention_kl", attention(world, heads_s=2, key_heads_s=1), dict(**make_sinks(4, 2), **CAUSAL)


def packed_attention(world):
    tensors = attention(world, packed_length(world), packed=True)
    return "attention_kl", tensors, dict(causal=True, window_size=(9, -1), **packed(world))


def packed_bhnd(world):
    length = packed_length(world)
    tensors = attention(world, length, packed=True, layout="bhnd", heads_s=2, key_heads_s=1)
    options = dict(row_weight=row_weight((world * length,)), layout="bhnd", reduction="mean")
    return "attention_kl", tensors, dict(**options, **packed(world))


def packed_row_bounds(world):
    """Row bounds by number in their sequence: they fall from one sequence to the next. Rows of padding are not read."""
    length, bounds = packed_length(world), packed(world)["cu_seqlens_q"]
    rows = torch.arange(world * length)
    sequence = torch.searchsorted(bounds[1:], rows, right=True)
    position = torch.where(sequence < len(PACKED), rows - bounds[sequence], 10**6)
    options = dict(key_begin=(position - 5).clamp(min=0), key_end=position + 1)
    return "attention_kl", attention(world, length, packed=True), dict(**options, **packed(world))


def dense_indexer(world):
    return "indexer_kl", indexer(world), CAUSAL


def dense_indexer_with_lse(world):
    tensors = indexer(world)
    _, rows = streamkl.indexer_kl(*tensors, return_rows=True, **CAUSAL)
    return "indexer_kl", tensors, dict(lse_t=rows.lse_t, direction="reverse", row_weight=row_weight((2, world * 8)), **CAUSAL)


def sparse_indexer(world):
    return "indexer_kl", indexer(world, top_k=4), CAUSAL


def sparse_indexer_rows(world):
    return "indexer_kl", indexer(world, top_k=4, heads_s=2, key_heads_s=2), dict(reduction="none", **CAUSAL)


def sparse_packed_indexer(world):
    length = packed_length(world)
    tensors = indexer(world, length, packed=True, top_k=3)
    bounds = packed(world)["cu_seqlens_k"]
    sequence = torch.searchsorted(bounds[1:], torch.arange(world * length), right=True).clamp(max=len(PACKED) - 1)
    keys = bounds.diff()[sequence].view(-1, 1, 1)
    tensors[5] = torch.where(tensors[5] < 0, -1, tensors[5] % keys.clamp(min=1)).int()
    return "indexer_kl", tensors, dict(**CAUSAL, **packed(world))


def wider_lse(world):
    tensors = indexer(world, top_k=4)
    _, rows = streamkl.indexer_kl(*tensors[:5], return_rows=True, **CAUSAL)
    return "indexer_kl", tensors, dict(lse_t=rows.lse_t, lse_t_wider=True, **CAUSAL)


PROBLEMS = (
    plain, window_and_weight, both_windows_reverse, teacher_gradients, one_pass, groups, groups_one_pass, no_gradients,
    key_lengths, only_padding, chunked, sinks, sinks_one_pass, sinks_of_groups, packed_attention, packed_bhnd, packed_row_bounds, dense_indexer,
    dense_indexer_with_lse, sparse_indexer, sparse_indexer_rows, sparse_packed_indexer, wider_lse,
)  # fmt: skip


def context_parallel(problem, group=None, **cp):
    group = dist.group.WORLD if group is None else group
    world = dist.get_world_size(group)
    Case(*problem(world), group, cp, world).compare()


def all_problems():
    for problem in PROBLEMS:
        for layout in "zigzag", "contiguous":
            for comm in "allgather", "ring":
                try:
                    context_parallel(problem, layout=layout, comm=comm)
                except AssertionError as error:
                    raise AssertionError(f"{problem.__name__}, {layout}, {comm}: {error}") from error


def some_problems():
    """What ./test runs."""
    context_parallel(plain, layout="zigzag", comm="allgather")
    context_parallel(plain, layout="contiguous", comm="ring")
    context_parallel(packed_attention, layout="zigzag", comm="ring")
    context_parallel(one_pass, layout="contiguous", comm="allgather")
    context_parallel(key_lengths, layout="contiguous", comm="allgather")
    context_parallel(sparse_indexer, layout="zigzag", comm="ring")
    context_parallel(chunked, layout="contiguous", comm="ring")
    context_parallel(sinks_of_groups, layout="zigzag", comm="ring")
    context_parallel(sparse_packed_indexer, layout="contiguous", comm="ring")
    context_parallel(dense_indexer_with_lse, layout="zigzag", comm="allgather")


def layout_of_torch():
    """The zigzag shards are those of torch's context parallelism."""
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    world, rank = dist.get_world_size(), dist.get_rank()
    for length in 2 * world, 12 * world:
        order = _HeadTailLoadBalancer(length, world, "cpu")._generate_indices().flatten().long()
        assert torch.equal(shard(torch.arange(length), dist.group.WORLD, 0), order.chunk(world)[rank])


def compiled():
    """Inside of torch.compile: the same loss and gradients, by a graph break."""
    own = [shard(tensor, dist.group.WORLD).detach() for tensor in attention(dist.get_world_size())]
    own[2:] = [tensor.requires_grad_() for tensor in own[2:]]

    def step(q_t, k_t, q_s, k_s):
        return 3 * streamkl.attention_kl(q_t, k_t, 2 * q_s, k_s, causal=True, parallel=Parallel(dist.group.WORLD))

    expected, loss = step(*own), torch.compile(step, backend="aot_eager")(*own)
    near("loss", loss, expected, LOSS)
    for gradient, wanted in zip(*(torch.autograd.grad(each, own[2:]) for each in (loss, expected))):
        near("gradient", gradient, wanted, GRADIENT)


def sub_groups():
    """Two groups at the same time, whose ranks are not those of the world."""
    world, rank = dist.get_world_size(), dist.get_rank()
    half = world // 2
    groups = [dist.new_group(list(range(begin, begin + half))) for begin in (0, half)]
    for comm in "allgather", "ring":
        context_parallel(packed_attention, groups[rank // half], comm=comm)


def gradients_for_averaging():
    """gradients="mean": the mean over ranks of the gradient of a weight is that of one process."""
    world = dist.get_world_size()
    q_t, k_t, q_s, k_s = attention(world)
    weight = torch.eye(5, requires_grad=True)
    (expected,) = torch.autograd.grad(streamkl.attention_kl(q_t, k_t, q_s.detach() @ weight, k_s.detach(), causal=True), weight)
    own = [shard(tensor.detach(), dist.group.WORLD) for tensor in (q_t, k_t, q_s, k_s)]
    for gradients, divisor in ("mean", world), ("sum", 1), (None, 1):
        parallel = Parallel(dist.group.WORLD, gradients=gradients)
        loss = streamkl.attention_kl(*own[:2], own[2] @ weight, own[3], causal=True, parallel=parallel)
        (gradient,) = torch.autograd.grad(loss, weight)
        dist.all_reduce(gradient)
        near(f"gradients={gradients}", gradient / divisor, expected, GRADIENT)


def gradients_of_rows():
    """gradients="mean" also multiplies those of rows, and the weights of a mean count in its denominator, too."""
    world = dist.get_world_size()
    tensors = [tensor.detach() for tensor in attention(world)]
    own, student = [shard(tensor, dist.group.WORLD) for tensor in tensors], tensors[2].requires_grad_()
    (expected,) = torch.autograd.grad(streamkl.attention_kl(*tensors, reduction="none", causal=True).sum(), student)
    own[2].requires_grad_()
    rows = streamkl.attention_kl(*own, reduction="none", causal=True, parallel=Parallel(dist.group.WORLD, gradients="mean"))
    (gradient,) = torch.autograd.grad(rows.sum(), own[2])
    near("gradient", gradient / world, shard(expected, dist.group.WORLD), GRADIENT)
    indexer_tensors = [each.detach() for each in indexer(world)[:5]]
    for function, given in (streamkl.attention_kl, [each.detach() for each in tensors]), (streamkl.indexer_kl, indexer_tensors):
        weight = row_weight((2, world * 8)).requires_grad_()
        (expected,) = torch.autograd.grad(function(*given, row_weight=weight, causal=True), weight)
        cut = [shard(each, dist.group.WORLD) for each in given]
        own_weight = shard(weight.detach(), dist.group.WORLD).requires_grad_()
        loss = function(*cut, row_weight=own_weight, causal=True, parallel=Parallel(dist.group.WORLD))
        (gradient,) = torch.autograd.grad(loss, own_weight)
        near("gradient of row_weight", gradient, shard(expected, dist.group.WORLD), GRADIENT)


def gradients_of_sinks():
    """Those of a rank are of its own rows: their sum is that of one process, as for weights."""
    tensors = attention(dist.get_world_size(), without_teacher=False)
    given = {name: sink.requires_grad_() for name, sink in make_sinks(4, 4).items()}
    whole = streamkl.attention_kl(*tensors, **given, **CAUSAL)
    expected = torch.autograd.grad(whole, given.values())
    own = [shard(tensor.detach(), dist.group.WORLD) for tensor in tensors]
    loss = streamkl.attention_kl(*own, parallel=Parallel(dist.group.WORLD), **given, **CAUSAL)
    near("loss", loss, whole, LOSS)
    for gradient, of_whole in zip(torch.autograd.grad(loss, given.values()), expected):
        dist.all_reduce(gradient)
        near("gradient of a sink", gradient, of_whole, GRADIENT)
    expect(ValueError, "gradients of sinks need comm='allgather'", *own, comm="ring", **given)


def half_precision():
    """dk is summed in f32 and rounded once: as near to one process as its own rounding."""
    world = dist.get_world_size()
    for dtype, tolerance in (torch.bfloat16, 2**-8), (torch.float16, 2**-11):
        tensors = attention(world, dtype=dtype)
        lses = lses_of(tensors, causal=True)
        for given in {}, lses:
            expected = torch.autograd.grad(streamkl.attention_kl(*tensors, causal=True, **given), tensors[2:])
            own = [shard(tensor.detach(), dist.group.WORLD).requires_grad_(tensor.requires_grad) for tensor in tensors]
            own_lses = {name: shard(lse, dist.group.WORLD, -1) for name, lse in given.items()}
            for comm in "allgather", "ring":
                parallel = Parallel(dist.group.WORLD, comm=comm)
                loss = streamkl.attention_kl(*own, causal=True, parallel=parallel, **own_lses)
                for gradient, whole in zip(torch.autograd.grad(loss, own[2:]), expected):
                    assert gradient.dtype == dtype
                    near("gradient", gradient, shard(whole, dist.group.WORLD), 2 * tolerance)


# ---- Faults --------------------------------------------------------------------------------------------------------------


def expect(error_type, text, *tensors, comm="allgather", function=streamkl.attention_kl, parallel=None, **options):
    with pytest.raises(error_type, match=re.escape(text)):
        function(*tensors, parallel=parallel or Parallel(dist.group.WORLD, comm=comm), **options)


def faults_of_one_rank():
    """The last rank has an argument that no check compares: the others do not wait for it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    is_faulty, others = rank == world - 1, Parallel(loss_group=dist.group.WORLD)
    tensors, listed = [tensor.detach() for tensor in make_tensors(len_q=8, len_k=8)], make_indexer(len_q=8, len_k=8, top_k=3)
    listed = [tensor.detach() for tensor in listed]
    far = torch.where(torch.arange(3) == 1, 8 * world, listed[5]) if is_faulty else listed[5]
    bounds = dict(key_begin=torch.arange(8).expand(2, 8).flip(1) if is_faulty else torch.zeros(2, 8).long())
    cut = [tensors[0], tensors[1][..., :4], *tensors[2:]] if is_faulty else tensors
    refused = "of the group refused its arguments"
    for message, expected, given, options in (
        ("row_weight: shape [3] must be", refused, tensors, dict(row_weight=torch.ones(3) if is_faulty else torch.ones(2, 8))),
        ("window_size=5: must be a pair", refused, tensors, dict(window_size=5 if is_faulty else (-1, -1))),
        ("key_begin[0, 0]: must not be above the next", refused, tensors, bounds),
        (f"indices[0, 0, 0, 1]={8 * world}: must be -1..", refused, [*listed[:5], far], dict(function=streamkl.indexer_kl, comm="ring")),
        ("head sizes 8 and 4 must be equal", "of the groups refused its arguments", cut, dict(parallel=others)),
    ):
        expect(ValueError if is_faulty else RuntimeError, message if is_faulty else expected, *given, **options)
    expect(ValueError, "reduction: differs between ranks", *tensors, reduction="sum" if is_faulty else "mean", parallel=others)
    expect(ValueError, "sink_t: ", *tensors, **(make_sinks(4, 2) if is_faulty else {}))
    expect(ValueError, f"key_lengths[1]={8 * world + 1}: must be 0..{8 * world}", *tensors, key_lengths=torch.tensor([0, 8 * world + 1]))
    expect(ValueError, "share the ranks [0, 1", *tensors, parallel=Parallel(dist.group.WORLD, loss_group=dist.group.WORLD))
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    lengths = torch.tensor([0, 4, 16] if is_faulty else [0, 8, 16])
    expect(ValueError, "cu_seqlens_q: the checksum of its values", *flat, cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    dense = listed[:5]
    lse_t = streamkl.indexer_kl(*dense, return_rows=True)[1].lse_t + 3
    expect(ValueError, "lse_t: ", *dense, lse_t=lse_t, check_lse=True, function=streamkl.indexer_kl, parallel=others)
    context_parallel(plain)  # the group still works


def different_calls():
    """An error on every rank that names what differs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [tensor.detach() for tensor in make_tensors(len_q=8, len_k=8)]
    others = [tensor.detach() for tensor in make_tensors(len_q=8, len_k=10)]
    expect(ValueError, "k_t: [2, ", *(others if rank == world - 1 else tensors))
    expect(ValueError, f"causal: {rank == 0} on rank {rank} of the group differs", *tensors, causal=rank == 0)
    expect(ValueError, "parallel.comm: ", *tensors, comm="ring" if rank == 0 else "allgather")
    expect(ValueError, "q_s: ", *tensors[:2], *(tensor.bfloat16() if rank == 0 else tensor for tensor in tensors[2:]))
    sinks = make_sinks(tensors[0].shape[2], tensors[2].shape[2])
    expect(ValueError, "sink_s: the checksum of its values on rank ", *tensors, **(sinks | dict(sink_s=sinks["sink_s"] + rank)))
    swapped = sinks["sink_t"].flip(0) if rank == 0 else sinks["sink_t"]
    expect(ValueError, "sink_t: the checksum of its values on rank ", *tensors, **(sinks | dict(sink_t=swapped)))
    faulty = [tensors[0], tensors[1], tensors[2][:, :6], tensors[3]]
    if rank == 0:
        expect(ValueError, "query lengths 8 and 6 must be equal", *faulty)
    else:
        expect(RuntimeError, "rank 0 of the group refused its arguments", *tensors)
    odd = [tensor.detach() for tensor in make_tensors(len_q=7, len_k=7)]
    expect(ValueError, "a shard of 7 tokens", *odd)
    groups = make_tensors(len_q=8, len_k=8)  # a teacher with gradients and teacher groups
    expect(ValueError, "need comm='allgather'", *groups, comm="ring")
    context_parallel(plain)  # the group still works


def dies(before, comm="allgather"):
    """The last rank ends before a step of the others: they get an error, within the timeout of the group."""
    own = [shard(tensor.detach(), dist.group.WORLD) for tensor in attention(dist.get_world_size())]
    own[2:] = [tensor.requires_grad_() for tensor in own[2:]]
    parallel = Parallel(dist.group.WORLD, comm=comm)
    dies_now = dist.get_rank() == dist.get_world_size() - 1
    streamkl.attention_kl(*own, parallel=parallel).backward()
    dist.barrier()
    try:
        if before == "backward":
            loss = streamkl.attention_kl(*own, parallel=parallel)
        if dies_now:
            os._exit(0)
        if before == "forward":
            loss = streamkl.attention_kl(*own, parallel=parallel)
        loss.backward()
    except RuntimeError as error:
        os.write(1, f"rank {dist.get_rank()}: {type(error).__name__}\n".encode())  # print() may mix lines of ranks
        os._exit(0)
    os._exit(1)


def rank_dies_before_a_call():
    dies("forward")


def rank_dies_before_a_gather():
    dies("backward", comm="allgather")


def rank_dies_in_a_ring():
    dies("backward", comm="ring")


def run_cases(cases):
    torch.set_num_threads(1)
    # A fault in a test is an error on every rank after this time, not a hang.
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for name in sys.argv[1:]:
        cases[name]()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{name} works", flush=True)
    end_of_rank()
