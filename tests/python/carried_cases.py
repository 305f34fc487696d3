"""Calls of streamkl.attention and their expected results, for the tests of the CPU and of a GPU."""

import torch

import streamkl
from streamkl import reference

CU = torch.tensor([0, 9, 9, 30, 41], dtype=torch.int32)
BOUNDS = torch.arange(37).clamp(max=30).expand(2, -1).contiguous()
CASES = {
    "full": dict(),
    "causal": dict(causal=True),
    "bf16": dict(causal=True, dtype=torch.bfloat16),
    "f16": dict(dtype=torch.float16),
    "gqa": dict(causal=True, heads=(8, 4, 4, 2)),
    "teacher_groups": dict(causal=True, heads=(8, 4, 2, 1)),
    "head_sizes": dict(dims=(24, 16)),
    "window": dict(causal=True, window_size=(5, 0)),
    "key_lengths": dict(key_lengths=torch.tensor([20, 37])),
    "bounds": dict(key_end=BOUNDS + 3),
    "packed": dict(causal=True, cu_seqlens_q=CU, cu_seqlens_k=CU),
    "reverse": dict(direction="reverse"),
    "softcaps": dict(softcap=3.0, softcap_t=4.0),
    "scales": dict(softmax_scale=0.3, softmax_scale_t=0.2),
    "sum": dict(reduction="sum"),
    "bnhd": dict(causal=True, layout="bnhd"),
    "row_weight": dict(row_weight=torch.linspace(0, 1, 37).expand(2, -1)),
}


class Call:
    """The tensors and options of a case; `kl_options` are those of attention_kl."""

    def __init__(self, *, dtype=torch.float32, heads=(4, 4, 4, 4), dims=(16, 16), device="cpu", **options):
        torch.manual_seed(1)
        options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        self.options = {"layout": "bhnd", **options}
        packed, first = "cu_seqlens_q" in options, self.options["layout"] == "bhnd"

        def make(count, dim):
            shape = (count, 41, dim) if packed else (2, count, 37, dim)
            return torch.randn(shape if first else (shape[0], shape[2], shape[1], shape[3]), dtype=dtype).to(device)

        self.q_t, self.k_t = make(heads[0], dims[0]), make(heads[1], dims[0])
        self.q, self.k, self.v = (make(h, dims[1]).requires_grad_() for h in (heads[2], heads[3], heads[3]))
        self.upstream = torch.randn_like(self.q)
        names = {"softmax_scale": "softmax_scale_s", "softcap": "softcap_s"}
        self.kl_options = {names.get(name, name): value for name, value in self.options.items()}

    @property
    def inputs(self):
        return self.q, self.k, self.v

    def attention(self, **more):
        return streamkl.attention(*self.inputs, q_t=self.q_t, k_t=self.k_t, **{**self.options, **more})

    def reference(self, kl_weight=1.0, out_weight=1.0):
        """(output, KLs, gradients) in float64."""
        q, k, v = (tensor.detach().double().requires_grad_() for tensor in self.inputs)
        unused = (
            "direction", "reduction", "row_weight", "softmax_scale_t", "softcap_t", "deterministic", "max_seqlen_q", "max_seqlen_k",
        )  # fmt: skip
        out, _ = reference.attention(q, k, v, **{name: x for name, x in self.options.items() if name not in unused})
        teacher = self.q_t.double(), self.k_t.double()
        loss = reference.attention_kl(*teacher, q, k, **self.kl_options)
        kl = reference.attention_kl(*teacher, q, k, **{**self.kl_options, "reduction": "none", "row_weight": None})
        (out_weight * (out * self.upstream).sum() + kl_weight * loss).backward()
        return out, kl, [q.grad, k.grad, v.grad], loss

    def tolerance(self):
        return {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 8e-3}[self.q.dtype]


def assert_near(actual, expected, tolerance):
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= tolerance, f"relative error {error:.3g}"


def assert_gradients(call, expected, factor=1.0):
    for tensor, gradient in zip(call.inputs, expected):
        assert tensor.grad.dtype == tensor.dtype
        assert_near(tensor.grad, factor * gradient, call.tolerance())


def check_against_the_reference(kl_weight=3000.0, **case):
    call = Call(**case)
    expected_out, expected_kl, expected, expected_loss = call.reference(kl_weight)
    out, handle = call.attention(kl_weight=kl_weight)
    tolerance = 1e-5 if case.get("device", "cpu") == "cpu" else 1e-3
    assert handle.kl.dtype == torch.float32
    assert_near(handle.kl, expected_kl.detach(), tolerance)
    assert_near(handle.loss.detach(), kl_weight * expected_loss.detach(), tolerance)
    assert_near(out.detach(), expected_out.detach(), call.tolerance())
    (out * call.upstream).sum().backward()
    assert_gradients(call, expected)
    plain = Call(**case).reference(kl_weight=0.0)[2]  # the KL matters in what was compared
    assert (expected[0] - plain[0]).norm() > 10 * call.tolerance() * expected[0].norm()
