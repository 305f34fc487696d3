"""explain names the launches of attention_kl and computes nothing."""

import pytest
import torch
from cases import make_tensors
from indexer_cases import make_indexer

import streamkl
from streamkl import _library as lib


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
