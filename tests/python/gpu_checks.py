#!/usr/bin/env python3
"""The Python package on a GPU. Needs torch with CUDA but no pytest: prints "ok - NAME" or "not ok - NAME" per check.

What also holds on a CPU is written once, in cases.py, indexer_cases.py, carried_cases.py and parallel_one_device.py, which
pytest runs there.

STREAMKL_LIBRARY=build/gpu/src/libstreamkl.so PYTHONPATH=python python3 tests/python/gpu_checks.py [NAME...]
"""

import os
import sys
import traceback
from functools import partial
from itertools import product

import carried_cases
import cases
import indexer_cases
import parallel_one_device
import torch
import torch.distributed as dist
from cases import compare, gradients_of, make_tensors
from indexer_cases import make_indexer

import streamkl
from streamkl import _library as lib
from streamkl import reference
from streamkl._problem import DK_S, DQ_S, Options

BF16 = dict(
    dtype=torch.bfloat16, device="cuda", dim_t=64, dim_s=64, heads_t=4, heads_s=4, key_heads_t=2, key_heads_s=4
)
INDEXER_BF16 = dict(
    dtype_t=torch.bfloat16, dtype_s=torch.bfloat16, device="cuda", heads_t=8, key_heads_t=2, index_heads=8, dim_t=128,
    dim_s=64, len_q=130, len_k=150,
)  # fmt: skip


def assert_close_in_norm(one, other, share=2e-2):
    assert (one.float() - other.float()).norm() <= share * other.float().norm()


BOUNDS = dict(cu_seqlens_q=torch.tensor([0, 3, 3, 12, 17]), cu_seqlens_k=torch.tensor([0, 6, 6, 10, 21]))
DIRECTIONS, REDUCTIONS, FLOATS = ("forward", "reverse"), ("mean", "sum", "none"), (torch.float32, torch.bfloat16)


def on_gpu(tensors):
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def check_masks_against_the_reference():
    shapes = dict(device="cuda"), dict(device="cuda", dtype=torch.float16), dict(BF16, len_q=130, len_k=150)
    lengths = torch.tensor([0, 17], device="cuda")
    masks = {}, dict(causal=True, window_size=(7, 0), softcap_s=5.0), dict(causal=True, key_lengths=lengths)
    for shape, mask, direction, reduction in product(shapes, masks, DIRECTIONS, REDUCTIONS):
        compare(make_tensors(**shape), direction=direction, reduction=reduction, **mask)


def check_packed_against_the_reference():
    weight = torch.rand(19).cuda()
    for layout, reduction in product(("bnhd", "bhnd"), REDUCTIONS):
        tensors = make_tensors(len_q=19, len_k=23, packed=True, layout=layout, device="cuda")
        compare(tensors, causal=True, layout=layout, reduction=reduction, row_weight=weight, **on_gpu(BOUNDS))


def check_views():
    base = torch.randn(2, 130, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    others = [torch.randn(2, 130, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for view in base[..., :64], base[..., 1:65], base[..., ::2], base[:, :, :1, :64].expand(2, 130, 4, 64):
        loss = streamkl.attention_kl(others[0], others[1], view, others[2], causal=True)
        copied = streamkl.attention_kl(others[0], others[1], view.contiguous(), others[2], causal=True)
        torch.testing.assert_close(loss, copied, rtol=1e-4, atol=1e-5)
        assert_close_in_norm(*(torch.autograd.grad(each, base)[0] for each in (loss, copied)))


def check_explain():
    """Launches of a forward and a backward; the choice depends on the alignment of the tensors."""
    _, _, q_s, k_s = make_tensors(**BF16, len_q=256, len_k=256)
    q_t, k_t = q_s.detach(), k_s.detach()
    text = streamkl.explain(q_t, k_t, q_s, k_s, causal=True)
    assert text.startswith("forward: cuda_") and "dq_s" in text and "dk_s" in text, text
    misaligned = torch.nn.functional.pad(q_s, (1, 0))[..., 1:]
    assert streamkl.explain(q_t, k_t, misaligned, k_s, causal=True) != text
    indexer = streamkl.explain_indexer(*make_indexer(**INDEXER_BF16), causal=True)
    assert indexer and all("cuda_" in line for line in indexer.splitlines()), indexer


def check_map():
    """Equals the CPU, which tests/python/test_map.py compares with the full matrices."""
    options = dict(causal=True, window_size=(90, 0), buckets=(5, 7))
    packed = dict(cu_seqlens_q=torch.tensor([0, 30, 130]), cu_seqlens_k=torch.tensor([0, 50, 150]))
    masks = {}, dict(key_lengths=torch.tensor([0, 120])), packed
    for heads_t, dtype, direction, lengths in product((4, 8), FLOATS, DIRECTIONS, masks):  # 8: teacher groups
        shape = dict(BF16, heads_t=heads_t, dtype=dtype, device="cpu", len_q=130, len_k=150)
        tensors = make_tensors(**shape, packed=lengths is packed)
        expected = streamkl.attention_map(*tensors, direction=direction, **options, **lengths)
        copies = [tensor.cuda() for tensor in tensors]
        maps = streamkl.attention_map(*copies, direction=direction, **options, **on_gpu(lengths))
        for name, picture, wanted in zip(maps._fields, maps, expected):
            assert picture.is_cuda
            error = (picture.cpu() - wanted).abs().max().item()
            assert error <= 1e-5, f"{name}: off by {error}, {dtype}, {direction}, {heads_t} teacher heads"


def check_stats():
    """Equals the CPU, which tests/python/test_stats.py compares with the full matrix."""
    masks = {}, dict(causal=True, softcap=5.0), dict(window_size=(20, 9), sink=torch.randn(4)), dict(key_lengths=torch.tensor([0, 120]))
    weighted = dict(row_weight=torch.rand(2, 4, 130), row_range=(3, -5), per_key_head=True)
    chosen = dict(want=streamkl.Statistics._fields, key_ranges=[(0, 4), (30, 90)], chosen_rows=[0, -1], top_k=64)
    for dtype, mask, rows in product((*FLOATS, torch.float16), masks, ({}, weighted)):
        q, k = torch.randn(2, 130, 4, 64).to(dtype), torch.randn(2, 150, 2, 64).to(dtype)
        expected = streamkl.attention_stats(q, k, **chosen, **mask, **rows)
        copies = {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in (mask | rows).items()}
        for name, result, wanted in zip(expected._fields, streamkl.attention_stats(q.cuda(), k.cuda(), **chosen, **copies), expected):
            if name == "top_keys":  # equal probabilities may change places
                continue
            assert result.is_cuda
            torch.testing.assert_close(result.cpu(), wanted, atol=1e-4, rtol=1e-4, msg=f"{name}: {dtype}, {mask}, {rows.keys()}")


def check_opcheck():
    cases.check_operators([tensor.detach() for tensor in make_tensors(**BF16)], DQ_S | DK_S)


def check_compile():
    def step(q_t, k_t, q_s, k_s):
        q_s = q_s * 2
        rows, lse_t, lse_s = streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True, reduction="none", return_lse=True)
        return rows.sum() + streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True, lse_t=lse_t, lse_s=lse_s)

    tensors = make_tensors(**BF16, len_q=128, len_k=128)
    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), step(*tensors), rtol=1e-3, atol=1e-3)
    for one, other in zip(gradients_of(compiled(*tensors), tensors), gradients_of(step(*tensors), tensors)):
        assert_close_in_norm(one, other)


def check_another_stream():
    """A call is ordered after the work on the current stream, not on the default stream."""
    tensors = make_tensors(**BF16, len_q=512, len_k=512)
    expected = streamkl.attention_kl(*tensors, causal=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.empty_like(tensors[2])
        torch.cuda._sleep(50_000_000)
        late.copy_(tensors[2])
        loss = streamkl.attention_kl(tensors[0], tensors[1], late, tensors[3], causal=True)
    stream.synchronize()
    assert torch.equal(loss, expected)


def check_no_synchronization():
    tensors = make_tensors(**BF16, len_q=512, len_k=512)
    packed = make_tensors(packed=True, device="cuda")
    cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32).cuda() for bounds in ([0, 5, 19], [0, 9, 23]))
    streamkl.attention_kl(*tensors, causal=True).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, lse_t, lse_s = streamkl.attention_kl(*tensors, causal=True, return_lse=True)
        loss.backward()
        streamkl.attention_kl(*tensors, causal=True, lse_t=lse_t, lse_s=lse_s).backward()
        streamkl.attention_kl(*packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_replays(step, tensors, make):
    """A captured graph, replayed with other inputs, gives the same bits as a call. Nothing synchronizes.

    make(seed=) returns other inputs of step(), which are copied to `tensors`.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in 1, 2:
        with torch.no_grad():
            for tensor, new in zip(tensors, make(seed=seed)):
                tensor.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(captured, step()))


def check_cuda_graph():
    make = partial(make_tensors, **BF16, len_q=256, len_k=256)
    tensors = [tensor.detach() for tensor in make()]
    student = [tensor.requires_grad_() for tensor in tensors[2:]]

    def step():
        loss, lse_t, lse_s = streamkl.attention_kl(*tensors, causal=True, deterministic=True, return_lse=True)
        one_pass = streamkl.attention_kl(*tensors, causal=True, deterministic=True, lse_t=lse_t, lse_s=lse_s)
        return loss, *torch.autograd.grad(loss, student), *torch.autograd.grad(one_pass, student)

    assert_replays(step, tensors, make)


def check_threads():
    cases.check_threads(**BF16, len_q=100, len_k=100)


def check_autocast():
    q_t, k_t, q_s, k_s = make_tensors(**dict(BF16, dtype=torch.float32))
    projection = torch.nn.Linear(64, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = streamkl.attention_kl(q_t, k_t, projection(q_s), k_s)
    loss.backward()
    assert loss.dtype == torch.float32 and projection.weight.grad is not None


def check_device_guard():
    """Tensors that are not on the current device, and tensors on different devices."""
    if torch.cuda.device_count() > 1:
        tensors = make_tensors(**dict(BF16, device="cuda:1"))
        assert torch.cuda.current_device() == 0
        streamkl.attention_kl(*tensors).backward()
        assert torch.cuda.current_device() == 0
        compare(make_tensors(device="cuda:1"))
    q_t, k_t, q_s, k_s = make_tensors(device="cuda")
    try:
        streamkl.attention_kl(q_t, k_t, q_s, k_s.cpu())
    except ValueError as error:
        assert "q_t is on cuda:0 and k_s on cpu: must be one device" in str(error)
    else:
        raise AssertionError("tensors on two devices were accepted")


def check_lses_of_torch():
    """attention_kl takes the LSEs of torch's fused attention: one pass equals two passes."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from streamkl.hf._attention import _sdpa_with_lse

    shape = dict(BF16, key_heads_t=4, len_q=200, len_k=200, layout="bhnd")
    q_t, k_t, q_s, k_s = make_tensors(**shape)
    expected, exact_t, exact_s = streamkl.attention_kl(
        q_t, k_t, q_s, k_s, causal=True, layout="bhnd", return_lse=True
    )
    for backend in SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION:
        with sdpa_kernel(backend):
            answer, lse_t = _sdpa_with_lse(None, q_t, k_t, k_t, None, True)
            _, lse_s = _sdpa_with_lse(None, q_s, k_s, k_s, None, True)
            if answer is None:
                print(f"skipped - {backend} is not for this GPU")
                continue
            plain = torch.nn.functional.scaled_dot_product_attention(q_t, k_t, k_t, is_causal=True)
        torch.testing.assert_close(answer[0], plain.transpose(1, 2))
        torch.testing.assert_close(lse_t, exact_t, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse_s, exact_s, rtol=1e-3, atol=1e-3)
        loss = streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True, layout="bhnd", lse_t=lse_t, lse_s=lse_s)
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
        assert_close_in_norm(*(torch.autograd.grad(each, q_s, retain_graph=True)[0] for each in (loss, expected)))


def check_distiller():
    from hf_models import batch, kl_from_attentions, llama

    from streamkl.hf import AttentionDistiller

    torch.manual_seed(0)
    teacher, student = llama(4, 8, 4, 64).cuda().eval(), llama(2, 4, 2).cuda().eval()
    for padding in "none", "left", "right":
        inputs = {name: tensor.cuda() for name, tensor in batch(padding).items()}
        expected = kl_from_attentions(teacher, student, inputs, {0: 1, 1: 3})
        with AttentionDistiller(teacher, student) as distiller:
            student(**inputs)
            loss = distiller.loss()
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-5)
        with AttentionDistiller(teacher, student, fused=True) as distiller:
            student(**inputs)
            distiller.loss().backward()
        assert distiller.carried_layers == []  # no kernel carries the KL of teacher groups
        torch.testing.assert_close(distiller.last_loss, expected.detach(), rtol=1e-3, atol=1e-5)


def check_attention_that_carries_its_kl():
    """Torch's own backward where no kernel carries the KL; deterministic, always."""
    for case in carried_cases.CASES.values():
        carried_cases.check_against_the_reference(**case, device="cuda")
        carried_cases.check_against_the_reference(**case, device="cuda", deterministic=True)
    for dims in (64, 64), (128, 128), (128, 64):
        more = dict(dtype=torch.bfloat16, dims=dims, causal=True, heads=(4, 2, 4, 2), device="cuda")
        carried_cases.check_against_the_reference(**more)
        carried_cases.check_against_the_reference(**more, window_size=(9, 0))
        bounds = carried_cases.CU
        carried_cases.check_against_the_reference(**more, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=21, max_seqlen_k=21)


def check_random_attention():
    """Problems of carried_cases.random_case; SKL_TEST_RANDOM of them."""
    for seed in range(int(os.environ.get("SKL_TEST_RANDOM", "200"))):
        try:
            carried_cases.check_random_case(seed, "cuda")
        except Exception as error:
            raise AssertionError(f"random_case({seed})") from error


def check_losses_of_logits_in_one_kernel():
    from streamkl.distill import _output_losses as chunked

    for dtype, size, weights in product(FLOATS, (1000, 49152), ((1.0, 0.0), (0.0, 1.0), (0.7, 0.3))):
        logits_s, logits_t = ((3 * torch.randn(77, size, device="cuda")).to(dtype) for _ in range(2))
        labels = torch.randint(0, size, (77,), device="cuda")
        labels[::5] = -100
        given_t = logits_t if weights[0] else None
        exact = chunked._chunk_losses(logits_s.double(), None if given_t is None else given_t.double(), labels, *weights, False)
        for may_overwrite in False, True:
            found = chunked._fused_losses(logits_s, given_t, labels, *weights, may_overwrite)
            assert_close_in_norm(found[0], exact[0], 4e-3 if dtype == torch.bfloat16 else 1e-5)
            for one, other in zip(found[1:], exact[1:]):
                torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def check_fused_norms():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from streamkl.distill._fast import fuse_norms

    norm = LlamaRMSNorm(576, 1e-5).cuda().bfloat16()
    x = torch.randn(4, 256, 576, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn_like(x)
    expected = norm(x), *torch.autograd.grad(norm(x), (x, norm.weight), g)
    assert fuse_norms(norm) == 1
    for one, other in zip((norm(x), *torch.autograd.grad(norm(x), (x, norm.weight), g)), expected):
        assert_close_in_norm(one, other)


def check_compiled_attention():
    for name in "bf16", "teacher_groups":
        carried_cases.check_compiled(**carried_cases.CASES[name], device="cuda")
    more = dict(dtype=torch.bfloat16, dims=(128, 128), causal=True, heads=(4, 2, 4, 2), device="cuda")
    carried_cases.check_compiled(**more)


def check_equal_attention_has_no_kl():
    """Exactly, also where shifts move and logits are large."""
    for dtype, dim, size in product((torch.bfloat16, torch.float16), (64, 128), (1.0, 4.0, 20.0)):
        q, k, v = (torch.randn(1, 4, 1000, dim, device="cuda", dtype=dtype) for _ in range(3))
        q, k = q * size, k * torch.linspace(size, 1.5 * size, 1000, device="cuda", dtype=dtype)[:, None]
        _, handle = streamkl.attention(q, k, v, q_t=q.clone(), k_t=k.clone(), causal=True, layout="bhnd")
        assert not handle.kl.any()


def check_deterministic_attention():
    """By flash attention in bf16, by stored matrices in f32."""
    for dtype in (torch.bfloat16, torch.float32):
        q_t, k_t, *own = (torch.randn(2, 300, 4, 64, device="cuda", dtype=dtype) for _ in range(5))

        def gradients():
            leaves = [tensor.clone().requires_grad_() for tensor in own]
            out, _ = streamkl.attention(*leaves, q_t=q_t, k_t=k_t, causal=True, deterministic=True)
            out.float().square().sum().backward()
            return [leaf.grad for leaf in leaves]

        assert not torch.are_deterministic_algorithms_enabled()
        assert all(map(torch.equal, gradients(), gradients()))
        assert not torch.are_deterministic_algorithms_enabled()


# ---- Indexers ------------------------------------------------------------------------------------------------------


def check_indexer_against_the_reference():
    """Dense and sparse, types, directions, reductions and masks."""
    lengths = torch.tensor([0, 17], device="cuda")
    masks = {}, dict(causal=True), dict(causal=True, window_size=(7, 0)), dict(causal=True, key_lengths=lengths)
    f16 = dict(device="cuda", dtype_t=torch.float16, dtype_s=torch.float16, dtype_w=torch.float16)
    shapes = dict(device="cuda"), f16, INDEXER_BF16
    for shape, top_k, direction, reduction, mask in product(shapes, (0, 9), DIRECTIONS, REDUCTIONS, masks):
        indexer_cases.compare(make_indexer(**shape, top_k=top_k), direction=direction, reduction=reduction, **mask)


def check_pooled_teachers():
    """Blocks of keys, dense and in lists, of sizes that divide tiles of keys, do not, and exceed them."""
    f16 = dict(INDEXER_BF16, dtype_t=torch.float16, dtype_s=torch.float16, dtype_w=torch.float16)
    targets = tuple(product(("max", "sum"), ("mean", "max"), ("complete", "earlier", "visible")))
    for shape, top_k in product((dict(device="cuda"), f16, INDEXER_BF16), (0, 3)):
        for n, (pool, pool_heads, pool_blocks) in enumerate(targets):
            len_k = shape.get("len_k", 23)
            block = (4, 16, 7, 64, 1, 100)[n % 6] if len_k > 100 else (4, 1, 5)[n % 3]
            keys_s = len_k // block if pool_blocks == "complete" else -(-len_k // block)
            lengths = torch.tensor([len_k, len_k // 2], device="cuda")
            mask = ({}, dict(causal=True), dict(causal=True, key_lengths=lengths), dict(window_size=(40, 9)))[n % 4]
            options = dict(pool=(pool, block), pool_heads=pool_heads, pool_blocks=pool_blocks)
            indexer = make_indexer(**shape, top_k=top_k, keys_s=keys_s, seed=n)
            indexer_cases.compare(indexer, **options, **mask, reduction=REDUCTIONS[n % 3])
            if n % 4 == 1:
                indexer_cases.compare(indexer, **options, **mask, direction="reverse")


def check_f16_gradients_stay_in_range():
    tensors = cases.make_disagreeing(device="cuda")
    cases.check_f16_range(cases.one_pass_kl, reference.attention_kl, tensors)
    for type_w in torch.float16, torch.float32:
        w_s = torch.ones(1, tensors[2].shape[1], 1, 1, dtype=type_w, device="cuda", requires_grad=True)
        for indices in None, torch.tensor([0, 1], device="cuda").expand(*w_s.shape[:-1], 2):
            cases.check_f16_range(streamkl.indexer_kl, reference.indexer_kl, [*tensors, w_s, indices])


LONG_ROWS = dict(len_q=130, len_k=300, dim_t=64, dim_s=64, device="cuda")


def check_row_bounds():
    rows = torch.arange(130, device="cuda").expand(2, -1)
    for dtype, heads_t in product(FLOATS, (2, 4)):
        tensors = make_tensors(**LONG_ROWS, heads_t=heads_t, dtype=dtype)
        compare(tensors, key_begin=rows // 16 * 16, key_end=2 * rows + 5)


def check_sinks():
    for dtype, heads_t in product(FLOATS, (2, 4)):
        tensors = make_tensors(**LONG_ROWS, heads_t=heads_t, dtype=dtype)
        sinks = [torch.linspace(-1, 3, heads, device="cuda").requires_grad_() for heads in (heads_t, 2)]
        for tensor in (*tensors[:2], sinks[0]):
            tensor.requires_grad_(heads_t == 2)
        compare(tensors, sink_t=sinks[0].detach(), sink_s=sinks[1].detach(), causal=True)
        exact = [tensor.detach().double() for tensor in tensors]
        exact_sinks = [sink.detach().double().requires_grad_(sink.requires_grad) for sink in sinks]
        trained, exact_trained = ([sink for sink in given if sink.requires_grad] for given in (sinks, exact_sinks))
        loss = streamkl.attention_kl(*tensors, sink_t=sinks[0], sink_s=sinks[1])
        exact_loss = reference.attention_kl(*exact, sink_t=exact_sinks[0], sink_s=exact_sinks[1])
        made, expected = torch.autograd.grad(loss, trained), torch.autograd.grad(exact_loss, exact_trained)
        for gradient, wanted in zip(made, expected):
            cases.assert_near("gradient of sinks", gradient, wanted, torch.float32, floor=1e-5)


def exact_row(q, k_t, k_s):
    """(KL, lse_t, lse_s) of one query in float64, a million keys at a time."""

    def logits(keys):
        return torch.cat([part.double() @ q.double() for part in keys.split(1 << 20)]) * q.numel() ** -0.5

    x, y = logits(k_t), logits(k_s)
    lse_t, lse_s = x.logsumexp(0), y.logsumexp(0)
    return ((x - lse_t).exp() * (x - lse_t - (y - lse_s))).sum(), lse_t, lse_s


def check_long_rows():
    """Errors at 2^24 keys. Multiples of 2^-6 keep the logits exact; the KL is 4e-5."""
    keys, rows, dim = 1 << 24, 4, 64
    for dtype in torch.bfloat16, torch.float16:
        q = torch.randint(-2, 3, (1, rows, 1, dim), device="cuda").to(dtype) / 2
        k_t = torch.randint(-64, 65, (1, keys, 1, dim), device="cuda", dtype=torch.int8).to(dtype) / 64
        k_s = k_t + torch.randint(-1, 2, (1, keys, 1, dim), device="cuda", dtype=torch.int8).to(dtype) / 64
        tensors = (q, k_t, q, k_s, None, None, None, None)
        lengths, options = (None,) * 5, Options(gradients=DQ_S)
        kl, lse_t, lse_s = torch.ops.streamkl.forward(*tensors, None, lib.KL | lib.LSE_T | lib.LSE_S, *lengths, *options)
        one_pass, _ = torch.ops.streamkl.forward_backward(*tensors, lse_t, lse_s, None, lib.KL, *lengths, *options)
        for row in range(rows):
            exact = exact_row(q[0, row, 0], k_t[0, :, 0], k_s[0, :, 0])
            found = [result.flatten()[row].item() for result in (kl, lse_t, lse_s, one_pass)]
            errors = [abs(value - right.item()) for value, right in zip(found, (*exact, exact[0]))]
            assert max(errors) <= 2e-6, (dtype, row, errors)


def check_lengths_beyond_int32():
    """They do not wrap: a GPU limits them to the tensors."""
    tensors = make_tensors(device="cuda")
    lengths = torch.tensor([2**32 + 3, 23], device="cuda")
    limited = streamkl.attention_kl(*tensors, key_lengths=lengths, reduction="sum")
    assert torch.equal(limited, streamkl.attention_kl(*tensors, key_lengths=torch.full_like(lengths, 23), reduction="sum"))


def check_indexer_shapes():
    """Several student heads with separate keys, one teacher head, latent attention, odd sizes, many index heads, no ReLU."""
    shapes = (
        dict(heads_t=4, key_heads_t=2, heads_s=2, key_heads_s=2), dict(heads_t=1, key_heads_t=1, index_heads=1),
        dict(heads_t=16, key_heads_t=1, dim_t=576, dim_s=128, index_heads=64), dict(dim_t=33, dim_s=1, index_heads=5),
        dict(heads_t=64, key_heads_t=8, dim_t=128, index_heads=32, dim_s=128, len_q=200, len_k=200),
    )  # fmt: skip
    for shape, top_k, dtype in product(shapes, (0, 33), FLOATS):
        indexer = make_indexer(**dict(shape, dtype_t=dtype, dtype_s=dtype, device="cuda", top_k=top_k))
        indexer_cases.compare(indexer, causal=True)
        indexer_cases.compare(indexer, causal=True, relu=False, softmax_scale_s=-0.1, softcap_t=3.0)


def check_indexer_packed():
    for layout, top_k, reduction in product(("bnhd", "bhnd"), (0, 4), ("mean", "none")):
        indexer = make_indexer(packed=True, layout=layout, device="cuda", top_k=top_k)
        if top_k:
            indexer.indices.clamp_(max=3)  # key 3 is in every sequence that has keys
        indexer_cases.compare(indexer, causal=True, layout=layout, reduction=reduction, **on_gpu(BOUNDS))


def check_indexer_lse_of_more_keys():
    for dtype in torch.float32, torch.bfloat16:
        indexer = make_indexer(**dict(INDEXER_BF16, dtype_t=dtype, dtype_s=dtype), top_k=40)
        dense = streamkl.indexer_kl(*indexer[:5], causal=True, return_rows=True)[1]
        for reduction in "mean", "none":
            indexer_cases.compare(indexer, lse_t=dense.lse_t, lse_t_wider=True, causal=True, reduction=reduction)


def check_indexer_keys_out_of_range():
    """A GPU ignores such indices, because a check would synchronize; the CPU refuses them."""
    indexer = make_indexer(**INDEXER_BF16, top_k=9)
    for wrong in -2, 150, 2**31 - 1, -(2**31):
        invalid, ignored = indexer.indices.clone(), indexer.indices.clone()
        invalid[..., ::2], ignored[..., ::2] = wrong, -1
        loss, expected = (streamkl.indexer_kl(*indexer._replace(indices=each), causal=True) for each in (invalid, ignored))
        assert torch.equal(loss, expected), f"{wrong}: {loss} and not {expected}"


def check_indexer_nan_in_masked_values():
    for top_k in 0, 9:
        indexer_cases.check_masked_nan(make_indexer(**INDEXER_BF16, top_k=top_k), keys=75)


def check_indexer_equals_the_cpu():
    """With several tiles."""
    on_cpu = make_indexer(**dict(INDEXER_BF16, device="cpu", batch=1, len_q=700, len_k=700))
    on_gpu = indexer_cases.Indexer(*(tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in on_cpu[:5]))
    expected, loss = (streamkl.indexer_kl(*indexer, causal=True) for indexer in (on_cpu, on_gpu))
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-6)
    for one, other in zip(torch.autograd.grad(loss, on_gpu.trained), torch.autograd.grad(expected, on_cpu.trained)):
        assert_close_in_norm(one.cpu(), other, 1e-2)


def check_indexer_is_deterministic():
    for top_k in 0, 9:
        indexer = make_indexer(**INDEXER_BF16, top_k=top_k)
        runs = [
            torch.autograd.grad(streamkl.indexer_kl(*indexer, causal=True, deterministic=True), indexer.trained)
            for _ in range(5)
        ]
        assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0]))


def check_indexer_compile():
    def step(*indexer):
        mean, rows = streamkl.indexer_kl(*indexer, causal=True, return_rows=True)
        given = streamkl.indexer_kl(*indexer, causal=True, lse_t=rows.lse_t, reduction="sum")
        return mean + given + streamkl.indexer_kl(*indexer, causal=True, reduction="none").square().sum()

    indexer = make_indexer(**INDEXER_BF16, top_k=9)
    compiled = torch.compile(step, fullgraph=True)
    actual, expected = compiled(*indexer), step(*indexer)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    for one, other in zip(*(torch.autograd.grad(loss, indexer.trained) for loss in (actual, expected))):
        assert_close_in_norm(one, other)


def check_indexer_in_a_cuda_graph():
    make = partial(make_indexer, **INDEXER_BF16, top_k=9)
    indexer = make()

    def step():
        loss, rows = streamkl.indexer_kl(*indexer, causal=True, deterministic=True, return_rows=True)
        given = streamkl.indexer_kl(*indexer, causal=True, deterministic=True, lse_t=rows.lse_t)
        return loss, *torch.autograd.grad(loss, indexer.trained), *torch.autograd.grad(given, indexer.trained)

    assert_replays(step, indexer, make)


def check_shards_of_all_ranks():
    for dtype in torch.float32, torch.bfloat16:
        parallel_one_device.check_shards("cuda", dtype, length=512)


def check_nccl_with_one_rank():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dtype in torch.float32, torch.bfloat16:
            parallel_one_device.check_group_of_one_rank("cuda", dtype, length=512)
    finally:
        dist.destroy_process_group()


CHECKS = {
    name.removeprefix("check_"): function for name, function in list(globals().items()) if name.startswith("check_")
}
NEEDS_TRANSFORMERS = {"lses_of_torch", "distiller", "fused_norms"}


def main(names):
    if not torch.cuda.is_available():
        sys.exit("gpu_checks.py: torch finds no GPU")
    try:
        import transformers  # noqa: F401

        skipped = set()
    except ImportError:
        skipped = NEEDS_TRANSFORMERS
    failed = 0
    for name in names or CHECKS:
        if name in skipped:
            print(f"skipped - {name}: needs transformers")
            continue
        try:
            CHECKS[name]()
            print(f"ok - {name}", flush=True)
        except Exception:
            failed += 1
            print(f"not ok - {name}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
