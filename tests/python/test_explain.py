"""explain names the launches of attention_kl and computes nothing."""

import pytest
import torch
from cases import make_tensors
from indexer_cases import make_indexer

import streamkl
from streamkl import _library as lib
from streamkl._explain import _Explaining


def steps(text):
    return [line.split(":")[0] for line in text.splitlines()]


def test_two_passes():
    q_t, k_t, q_s, k_s = make_tensors()
    text = streamkl.explain(q_t.detach(), k_t.detach(), q_s, k_s, causal=True)
    assert steps(text)[0] == "forward" and "dq_s" in steps(text)[-1] and "dk_s" in steps(text)[-1]
    kernels = [kernel.name for kernel in lib.kernels() if kernel.usable and kernel.device == 0]
    assert all(line.endswith(")") for line in text.splitlines())
    assert any(all(f"{kernel}," in line for line in text.splitlines()) for kernel in kernels)


def test_one_pass():
    q_t, k_t, q_s, k_s = make_tensors(heads_t=2)
    tensors = (q_t.detach(), k_t.detach(), q_s, k_s)
    _, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True)
    text = streamkl.explain(*tensors, lse_t=lse_t, lse_s=lse_s)
    assert "one-pass" in text and "forward" not in steps(text)
    assert steps(streamkl.explain(*tensors, lse_t=lse_t, lse_s=lse_s, reduction="none"))[0] == "forward"


def test_gradients_follow_requires_grad():
    q_t, k_t, q_s, k_s = (tensor.detach() for tensor in make_tensors(heads_t=2))
    assert steps(streamkl.explain(q_t, k_t, q_s, k_s)) == ["forward"]
    k_s.requires_grad_()
    assert "dq_s" not in streamkl.explain(q_t, k_t, q_s, k_s) and "dk_s" in streamkl.explain(q_t, k_t, q_s, k_s)
    with torch.no_grad():
        assert steps(streamkl.explain(q_t, k_t, q_s, k_s)) == ["forward"]


def test_it_is_the_text_of_the_library():
    tensors = [tensor.detach() for tensor in make_tensors()]
    expected = []
    with pytest.MonkeyPatch.context() as patch:
        explain = lib.Plan.explain
        patch.setattr(lib.Plan, "explain", lambda *call: expected.append((call, explain(*call))) or expected[-1][1])
        text = streamkl.explain(*tensors, softcap_t=3.0)
    (plan, op, inputs), answer = expected[0]
    assert (op, text, plan.problem.softcap_t) == (lib.FORWARD, answer, 3.0)
    addresses = [tensor.data_ptr().to_bytes(8, "little") for tensor in tensors]
    assert all(address in inputs for address in addresses)


def test_nothing_is_computed_and_no_gradient_is_kept():
    tensors = make_tensors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lib, "run_function", lambda op: pytest.fail("a kernel ran"))
        assert steps(streamkl.explain(*tensors, return_lse=True, reduction="sum"))[0] == "forward"
        views = [(tensor * 2).transpose(1, 2) for tensor in tensors]
        assert len(steps(streamkl.explain(*views, layout="bhnd"))) >= 2
    assert all(tensor.grad is None for tensor in tensors)


def test_errors_are_those_of_attention_kl():
    q_t, k_t, q_s, k_s = make_tensors()
    with pytest.raises(ValueError, match=r"k_t \[2, 23, 2, 8\] and k_s \[2, 22, 1, 5\]: key lengths 23 and 22"):
        streamkl.explain(q_t, k_t, q_s, k_s[:, :22])
    with pytest.raises(ValueError, match="direction='both'"):
        streamkl.explain(q_t, k_t, q_s, k_s, direction="both")


@pytest.mark.parametrize("top_k", [0, 4])
def test_indexer(top_k):
    indexer = make_indexer(top_k=top_k)
    text = streamkl.explain_indexer(*indexer, causal=True, return_rows=True)
    assert "one-pass" in text and "dw_s" in text
    with torch.no_grad():
        assert "dw_s" not in streamkl.explain_indexer(*indexer, causal=True)


has_gpu_kernels = any(kernel.name.startswith("cuda_sm90") for kernel in lib.kernels())


@pytest.mark.skipif(not has_gpu_kernels, reason="this build has no GPU kernels")
def test_a_gpu_that_is_not_here():
    tensors = [torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(4)]
    for tensor in tensors[2:]:
        tensor.requires_grad_()
    assert "forward: cuda_sm90_bf16_64" in streamkl.explain(*tensors, causal=True, gpu="h200")
    on_ampere = streamkl.explain(*tensors, causal=True, gpu="a100")
    assert "dk_s: cuda_sm80_bf16_64, dk" in on_ampere and "sm90" not in on_ampere
    indexer = make_indexer()
    assert "cuda_general" in streamkl.explain_indexer(*indexer, causal=True, gpu="h100")  # f32
    with pytest.raises(ValueError, match="options.gpu=h20: must be a100"):
        streamkl.explain(*tensors, gpu="h20")


@pytest.mark.parametrize("gpu, first", [(None, [lib.FORWARD, lib.BACKWARD]), ("h200", [lib.FORWARD, lib.FORWARD_BACKWARD])])
def test_a_gpu_takes_the_lses_of_teacher_groups_first(gpu, first, monkeypatch):
    operations = []
    monkeypatch.setattr(_Explaining, "_explain", lambda self, plan, op, *_: operations.append(op))
    q_t, k_t, q_s, k_s = make_tensors()
    streamkl.explain(q_t.detach(), k_t.detach(), q_s, k_s, gpu=gpu)
    assert operations == first


BF16 = dict(dtype_t=torch.bfloat16, dtype_s=torch.bfloat16)
PACKED = dict(cu_seqlens_q=torch.tensor([0, 8, 19]), cu_seqlens_k=torch.tensor([0, 11, 23]))
BOUNDS = dict(key_begin=torch.arange(19).expand(2, 19) // 4, key_end=torch.full((2, 19), 20))
SPARSE_OF_HOPPER = {  # {case: (kernel, shape, options)}, as docs/guide/indexers.md says
    "lists longer than the keys, with -1 and duplicates": ("cuda_sm90_bf16_sparse", dict(top_k=2048), {}),
    "f16": ("cuda_sm90_f16_sparse", dict(dtype_t=torch.float16, dtype_s=torch.float16), {}),
    "latent attention": ("cuda_sm90_bf16_sparse", dict(heads_t=128, dim_t=576, index_heads=64, dim_s=128), {}),
    "groups of heads": ("cuda_sm90_bf16_sparse", dict(heads_t=64, key_heads_t=8, dim_t=128), {}),
    "more than 128 heads": ("cuda_sm90_bf16_sparse", dict(heads_t=200), {}),
    "packed": ("cuda_sm90_bf16_sparse", dict(packed=True), PACKED),
    "row weights": ("cuda_sm90_bf16_sparse", {}, dict(row_weight=torch.ones(2, 19))),
    "row bounds": ("cuda_sm90_bf16_sparse", {}, BOUNDS),
    "window": ("cuda_sm90_bf16_sparse", {}, dict(causal=True, window_size=(5, 0))),
    "no ReLU": ("cuda_sm90_bf16_sparse", {}, dict(relu=False)),
    "wider LSE": ("cuda_sm90_bf16_sparse", {}, dict(lse_t=torch.zeros(2, 16, 19), lse_t_wider=True, row_weight="mass")),
    "more than 64 index heads": ("cuda_sm80_bf16_sparse", dict(index_heads=65), {}),
    "index heads above 128": ("cuda_sm80_bf16_sparse", dict(dim_s=136), {}),
    "reverse KL": ("cuda_sm80_bf16_sparse", {}, dict(direction="reverse")),
    "deterministic": ("cuda_sm80_bf16_sparse", {}, dict(deterministic=True)),
    "softcap": ("cuda_general", {}, dict(softcap_t=30.0)),
    "f32": ("cuda_general", dict(dtype_t=torch.float32, dtype_s=torch.float32), {}),
    "mixed types": ("cuda_general", dict(dtype_s=torch.float32), {}),
    "odd head sizes": ("cuda_general", dict(dim_s=60), {}),
}


@pytest.mark.skipif(not has_gpu_kernels, reason="this build has no GPU kernels")
@pytest.mark.parametrize("case", SPARSE_OF_HOPPER)
def test_sparse_kernels_of_hopper(case):
    kernel, shape, options = SPARSE_OF_HOPPER[case]
    indexer = make_indexer(**dict(top_k=9, heads_t=16, key_heads_t=1, index_heads=8, dim_t=64, dim_s=64, **BF16) | shape)
    text = streamkl.explain_indexer(*indexer, gpu="h200", **options)
    last = [line for line in text.splitlines() if "clear" not in line][-1]
    assert f": {kernel}, " in last, text
