"""Calls of streamkl.attention and their expected results, for the tests of the CPU and of a GPU."""

import random

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
    "rows_after_the_last_sequence": dict(causal=True, cu_seqlens_q=CU, cu_seqlens_k=CU, sizes=(1, 50, 45)),
    "reverse": dict(direction="reverse"),
    "softcaps": dict(softcap=3.0, softcap_t=4.0),
    "scales": dict(softmax_scale=0.3, softmax_scale_t=0.2),
    "sum": dict(reduction="sum"),
    "bnhd": dict(causal=True, layout="bnhd"),
    "row_weight": dict(row_weight=torch.linspace(0, 1, 37).expand(2, -1)),
}


class Call:
    """The tensors and options of a case; `kl_options` are those of attention_kl.

    heads: of q_t, k_t, q and k; dims: of teacher and student; sizes: batch, queries and keys, all packed ones together.
    """

    def __init__(
        self, *, dtype=torch.float32, heads=(4, 4, 4, 4), dims=(16, 16), sizes=None, seed=1, device="cpu", **options
    ):
        torch.manual_seed(seed)
        options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        self.options = {"layout": "bhnd", **options}
        packed, first = "cu_seqlens_q" in options, self.options["layout"] == "bhnd"
        batch, len_q, len_k = sizes or ((1, 41, 41) if packed else (2, 37, 37))

        def make(count, length, dim):
            shape = (count, length) if first else (length, count)
            return torch.randn(*(() if packed else (batch,)), *shape, dim).to(device, dtype)

        self.q_t, self.k_t = make(heads[0], len_q, dims[0]), make(heads[1], len_k, dims[0])
        of_student = (heads[2], len_q), (heads[3], len_k), (heads[3], len_k)
        self.q, self.k, self.v = (make(*each, dims[1]).requires_grad_() for each in of_student)
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


def check_compiled(**case):
    """Code without a graph break has the results of eager code, in every way to weight the KL."""

    def step(call, **how):
        out, handle = call.attention(kl_weight=3000.0, **how)
        injected = how.get("inject", True)
        total = (out * call.upstream).sum() + (0.0 if injected else 2.0 * handle.loss)
        return total, handle.loss, handle.kl if how.get("kl_value", True) else out

    for how in {}, dict(inject=False), dict(kl_value=False):
        results = []
        for function in step, torch.compile(step, fullgraph=True, backend="aot_eager"):
            call = Call(**case)
            made = function(call, **how)
            made[0].backward()
            results.append([*(each.detach() for each in made), *(tensor.grad for tensor in call.inputs)])
            torch._dynamo.reset()
        for eager, compiled in zip(*results):
            assert_small(compiled, eager.double(), call.tolerance())


# ---- Random problems -----------------------------------------------------------------------------------------------


def random_case(seed, device):
    """Arguments of Call: types, sizes and masks of the kernels that carry the KL, and of some problems that they refuse."""
    choose = random.Random(seed)
    group = choose.choice([1] * 9 + [2])  # teacher heads per student head
    keys, per_key = choose.randint(1, 2), choose.randint(1, 3)
    heads = keys * per_key
    teacher_keys = choose.choice([each for each in range(1, heads * group + 1) if heads * group % each == 0])
    batch, len_q = choose.randint(1, 3), choose.choice([1, 63, 64, 65, 96, 97, 128, 129, choose.randint(1, 700)])
    len_k = choose.choice([len_q, max(1, len_q - 3), len_q + choose.randint(1, 300)])
    case = dict(
        dtype=choose.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
        dims=(choose.choice([64, 128, 128, 80]), choose.choice([64, 128, 128, 96])),
        heads=(heads * group, teacher_keys, heads, keys),
        causal=choose.random() < 0.6,
        layout=choose.choice(["bhnd", "bnhd"]),
        reduction=choose.choice(["mean", "sum"]),
    )
    mask = choose.choice(["none", "none", "window", "key_lengths", "bounds", "packed"])
    if mask == "packed":
        cuts = sorted(choose.randint(0, len_q) for _ in range(batch))
        bounds = torch.tensor([0, *cuts, len_q], dtype=torch.int32, device=device)
        case |= dict(sizes=(1, len_q, len_q), cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        return case | dict(seed=seed, device=device)
    case["sizes"] = batch, len_q, len_k
    if mask == "window":
        case["window_size"] = choose.randint(0, len_k), choose.randint(0, len_k)
    elif mask == "key_lengths":
        case["key_lengths"] = torch.tensor([choose.randint(0, len_k) for _ in range(batch)], device=device)
    elif mask == "bounds":
        ends = sorted(choose.randint(1, len_k) for _ in range(len_q))
        case["key_end"] = torch.tensor([ends] * batch, device=device)
    if choose.random() < 0.3:
        case["row_weight"] = torch.rand(batch, len_q, generator=torch.Generator().manual_seed(seed)).to(device)
    return case | dict(seed=seed, device=device)


def check_random_case(seed, device):
    """Output, KLs and gradients of a random problem, each compared with float64."""
    call, choose = Call(**random_case(seed, device)), random.Random(seed)
    weight = choose.choice([0.3, 300.0]) if call.options["reduction"] == "mean" else 0.3
    with_value, gives_lse = choose.random() < 0.7, choose.random() < 0.5
    expected_out, expected_kl, expected, expected_loss = call.reference(weight)
    given = {}
    if gives_lse:
        _, given["lse_t"], _ = streamkl.attention_kl(
            call.q_t, call.k_t, call.q.detach(), call.k.detach(), return_lse=True, **call.kl_options
        )
    out, handle = call.attention(kl_weight=weight, kl_value=with_value, **given)
    (out * call.upstream).sum().backward()
    assert_small(out.detach(), expected_out.detach(), call.tolerance())
    if with_value:
        assert_small(handle.kl, expected_kl.detach(), 1e-3)
        assert_small(handle.loss.detach(), weight * expected_loss.detach(), 1e-3)
    for tensor, gradient in zip(call.inputs, expected):
        assert_small(tensor.grad, gradient, call.tolerance())


def assert_small(actual, expected, tolerance):
    """assert_near that allows a result of 0, such as the KL of rows with one key."""
    error, size = (actual.double() - expected).norm(), expected.norm()
    assert error <= tolerance * size + 1e-5 * expected.numel() ** 0.5, f"error {error:.3g} of {size:.3g}"
