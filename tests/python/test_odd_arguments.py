"""Odd arguments of pooled teachers, linear students and the losses of streamkl.losses.

Each call is right, compared with float64, or raises a ValueError that names the argument.
"""

import inspect
import math

import pytest
import torch
from cases import make_tensors
from indexer_cases import make_indexer

import streamkl
from streamkl import losses, reference


def exact_pooled(q_t, k_t, q_s, k_s, link_s=None, softcap_s=0, sink_t=None, sink_s=None, lse_s=None, **options):
    return reference.indexer_kl(q_t, k_t, q_s, k_s, q_s.new_ones(*q_s.shape[:-1], 1), relu=False, **options)


def exact_entropy(q, k, row_weight, key_lengths, causal=True, softmax_scale_s=None, softcap_s=0.0, reduction="mean"):
    scale = q.shape[-1] ** -0.5 if softmax_scale_s is None else softmax_scale_s
    x = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    x = softcap_s * torch.tanh(x / softcap_s) if softcap_s else x
    seen = torch.ones(x.shape[2:], dtype=torch.bool).tril(k.shape[1] - q.shape[1] if causal else 99).expand(x.shape)
    if key_lengths is not None:
        seen = seen & (torch.arange(k.shape[1]) < key_lengths[:, None, None, None])
    attends = seen.any(-1)
    log_p = x.masked_fill(~seen & attends[..., None], -torch.inf).log_softmax(-1)
    rows = torch.where(seen, -log_p.exp() * log_p, 0.0).sum(-1)
    weight = attends.double() if row_weight is None else torch.where(attends, row_weight.double()[:, None], 0.0)
    total = torch.where(weight == 0, 0.0, rows * weight)
    return total if reduction == "none" else total.sum() / (weight.sum() or 1 if reduction == "mean" else 1)


def exact_mse(q_t, k_t, q_s, k_s, softmax_scale_t=None, softmax_scale_s=None, key_lengths=None, layout="bnhd"):
    def scores(q, k, scale):
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        return torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)

    difference = scores(q_t, k_t, softmax_scale_t) - scores(q_s, k_s, softmax_scale_s)
    if key_lengths is not None:
        difference = difference * (torch.arange(k_t.shape[1]) < key_lengths[:, None, None, None])
    return difference.square().sum() / max(difference.numel(), 1)


def exact_regrouped(tensor, heads, layout="bnhd"):
    return tensor.reshape(*tensor.shape[:-2], heads, tensor.shape[-2] * tensor.shape[-1] // heads)


TEACHER, LENGTHS = make_tensors(), torch.tensor([23, 11])
Q_T, K_T, Q_S, K_S = (tensor.detach() for tensor in TEACHER)
INDEXER = make_indexer(heads_s=2, keys_s=5, top_k=3)
WEIGHT, ENDS = torch.rand(2, 19), (torch.arange(19) + 5).expand(2, 19).contiguous()
OF_INDEXER = dict(zip(INDEXER._fields, INDEXER))
OF_DENSE = dict(zip(INDEXER._fields, make_indexer(keys_s=6)[:5]))
OF_POOLED = dict(q_t=Q_T, k_t=K_T, q_s=Q_S.clone().requires_grad_(), k_s=K_S[:, :5])
OF_LINEAR = dict(q_t=Q_T, k_t=K_T, q_s=Q_S.abs().requires_grad_(), k_s=K_S.abs())
CALLS = {
    "sparse": (streamkl.indexer_kl, reference.indexer_kl, OF_INDEXER | dict(row_weight=WEIGHT, key_lengths=LENGTHS, key_end=ENDS),
               dict(pool=("max", 4))),
    "dense": (streamkl.indexer_kl, reference.indexer_kl, OF_DENSE,
              dict(pool=("sum", 4), pool_heads="max", pool_blocks="visible", reduction="none")),
    "pooled": (streamkl.attention_kl, exact_pooled, OF_POOLED | dict(row_weight=WEIGHT), dict(pool=("max", 4), causal=True)),
    "linear": (streamkl.attention_kl, reference.attention_kl, OF_LINEAR, dict(link_s="linear", causal=True)),
    "weighted": (streamkl.attention_kl, reference.attention_kl, OF_LINEAR | dict(row_weight=WEIGHT), dict(link_s="linear")),
    "entropy": (losses.entropy, exact_entropy, dict(q=Q_T, k=K_T, row_weight=WEIGHT, key_lengths=LENGTHS), dict(causal=True)),
    "score_mse": (losses.score_mse, exact_mse, dict(q_t=Q_T, k_t=K_T, q_s=Q_T[..., :5], k_s=K_S, key_lengths=LENGTHS), {}),
    "relation_heads": (losses.relation_heads, exact_regrouped, dict(tensor=Q_T), dict(heads=8)),
}  # fmt: skip

WRONG = {
    "number": lambda t: 0.5, "list": lambda t: [1], "array": lambda t: t.detach().numpy(), "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor(list(t.detach())), "meta": lambda t: t.to("meta"), "complex": lambda t: t * 1j,
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
}  # fmt: skip
CHANGED = {
    "None": lambda t: None, "f64": lambda t: t.double(), "bf16": lambda t: t.bfloat16(), "int": lambda t: t.int(),
    "scalar": lambda t: t.flatten()[0], "vector": lambda t: t.flatten(), "row": lambda t: t[0], "more": lambda t: t[None],
    "strided": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1), "expanded": lambda t: t[:1].expand(t.shape),
    "zero": lambda t: t * 0, "nan": lambda t: t * math.nan, "negative": lambda t: -t,
}  # fmt: skip
for axis in range(4):
    CHANGED[f"cut {axis}"] = lambda t, axis=axis: t.narrow(axis, 0, t.shape[axis] - 1)
    CHANGED[f"empty {axis}"] = lambda t, axis=axis: t.narrow(axis, 0, 0)
    CHANGED[f"double {axis}"] = lambda t, axis=axis: torch.cat([t, t], axis)
ODD = (None, True, 0, -1, 3, 2**64 + 4, 10**40, 0.5, -0.0, math.nan, math.inf, 1e50, 1e-50, "", "x", "max", (), (0, 1), [2, 0],
       (2**64 + 1, 0), ("max", 3), ["sum", 4], ("max", 0), ("max", True), ("max", 2**64 + 4), (4, "max"), {}, torch.tensor(3),
       torch.tensor([0.5]))  # fmt: skip
ALSO_CALLED = {"softmax_scale_t": "scale_t", "softmax_scale_s": "scale_s", "window_size": "window_", "pool": "key lengths", "sink_t": "sink_",
               "sink_s": "sink_"}  # fmt: skip


def exact_of(function, given):
    """(result, arguments) for the same values in float64."""
    exact = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            value = value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value
        elif name.startswith("soft") and isinstance(value, int):
            value = float(value)
        if name not in ("check_lse", "deterministic", "return_lse", "return_rows"):
            exact[name] = value
    return function(**exact), exact


def gradients_of(result, arguments):
    wanted = {name: each for name, each in arguments.items() if isinstance(each, torch.Tensor) and each.requires_grad}
    if not (wanted and result.requires_grad):
        return {}
    return dict(zip(wanted, torch.autograd.grad(result.sum(), [*wanted.values()])))


def fault_of(function, exact, given, accepted_names, with_gradients=True):
    """None, or what is wrong with a call. Where scales are huge, f32 does not determine the gradients."""
    try:
        found = function(**given)
        found = found[0] if isinstance(found, tuple) else found
    except ValueError as error:
        return None if any(name in str(error) for name in accepted_names) else f"no name in: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    expected, arguments = exact_of(exact, given)
    try:
        torch.testing.assert_close(found.detach().float(), expected.detach().float(), rtol=1e-4, atol=1e-5, equal_nan=True)
        exact_gradients = gradients_of(expected, arguments)
        for name, gradient in gradients_of(found, given).items() if with_gradients else ():
            wanted = exact_gradients[name]
            if wanted.isfinite().all():
                torch.testing.assert_close(gradient.double(), wanted, rtol=1e-3, atol=1e-4 * (1 + wanted.abs().max().item()))
    except AssertionError as error:
        return str(error)


@pytest.mark.parametrize("call", CALLS)
def test_tensors(call):
    function, exact, tensors, options = CALLS[call]
    faults = {}
    for name, tensor in tensors.items():
        for what, change in (WRONG | CHANGED).items():
            if what.split()[0] in ("cut", "empty", "double") and int(what.split()[1]) >= tensor.dim():
                continue
            # Of two tensors that do not fit, the message may name either.
            names = [name] if what in WRONG else tensors | options
            given = tensors | options | {name: change(tensor.detach())}
            faults[name, what] = fault_of(function, exact, given, names)
    assert {key: fault for key, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("option, message", [
    (dict(reduction="avg"), "reduction='avg': must be 'mean', 'sum' or 'none'"),
    (dict(direction="Reverse"), "direction='Reverse': must be 'forward' or 'reverse'"),
    (dict(pool=("max", 4)), "pool: must be None for this function"),
    (dict(parallel=streamkl.Parallel()), "parallel: must be None for this function"),
])  # fmt: skip
def test_options_of_the_reference(option, message):
    with pytest.raises(ValueError, match=message):
        reference.attention_kl(*TEACHER, **option)


@pytest.mark.parametrize("call", CALLS)
def test_options(call):
    function, exact, tensors, options = CALLS[call]
    names = [name for name in inspect.signature(exact).parameters if name not in tensors]
    names = names if "options" not in names else inspect.signature(function).parameters.keys() - tensors.keys()
    faults = {}
    for name in sorted(names):
        for value in ODD:
            given = tensors | options | {name: value}
            faults[name, str(value)] = fault_of(function, exact, given, (name, ALSO_CALLED.get(name, name)), False)
    assert {key: fault for key, fault in faults.items() if fault} == {}
