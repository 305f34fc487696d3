"""Every torch operator, each of its tensors changed in shape, type, stride, device or to None.

A call gives the result of the unchanged tensors where only strides differ, and else an error that names the argument.
"""

from contextlib import suppress
from functools import lru_cache

import pytest
import torch
from cases import LONG, make_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from indexer_cases import make_indexer

import streamkl  # noqa: F401
from streamkl import _library as lib
from streamkl._checks import INPUTS
from streamkl._problem import DK_S, DK_T, DQ_S, DQ_T, DSINK_S, DSINK_T, DV_S, DW_S, Options

STUDENT, TEACHER = DQ_S | DK_S, DQ_T | DK_T
SINKS = DSINK_T | DSINK_S
CU = dict(
    cu_seqlens_q=torch.tensor([0, 5, 19], dtype=torch.int32), cu_seqlens_k=torch.tensor([0, 9, 23], dtype=torch.int32)
)
BOUNDS = dict(
    key_lengths=torch.tensor([20, 23], dtype=torch.int32),
    key_begin=torch.arange(19, dtype=torch.int32).expand(2, 19).contiguous(),
    key_end=torch.arange(3, 22, dtype=torch.int32).expand(2, 19).contiguous(),
)


def attention(packed=False, groups=1, **more):
    tensors = make_tensors(heads_t=2 * groups, key_heads_t=2, packed=packed)
    return dict(zip(INPUTS, (tensor.detach() for tensor in tensors))) | more


def indexer():
    tensors = make_indexer(top_k=4)
    named = dict(zip(("q_t", "k_t", "q_s", "k_s", "w_s", "indices"), (tensor.detach() for tensor in tensors)))
    return named | dict(indices=named["indices"].int())


def values(inputs):
    generator = torch.Generator().manual_seed(5)
    like = dict(v_s="k_s", o_s="q_s", do_s="q_s")
    return {name: torch.randn(inputs[other].shape, generator=generator) for name, other in like.items()}


# name: (tensors, options); each runs on every operator that takes these tensors.
PROBLEMS = {
    "attention": (attention(), dict(gradients=STUDENT, causal=True)),
    "teacher groups": (attention(groups=2), dict(gradients=STUDENT | TEACHER)),
    "reverse": (attention(), dict(gradients=STUDENT, direction=1)),
    "bounds": (attention(**BOUNDS), dict(gradients=STUDENT)),
    "packed": (attention(packed=True, **CU), dict(gradients=STUDENT, causal=True)),
    "sinks": (attention(sink_t=torch.zeros(2), sink_s=torch.ones(2)), dict(gradients=STUDENT | SINKS)),
    "indexer": (indexer(), dict(gradients=STUDENT | DW_S)),
}
OPERATORS = {
    name: getattr(torch.ops.streamkl, name).default
    for name in (
        "forward",
        "backward",
        "forward_backward",
        "attention_forward",
        "attention_backward",
        "attention_stats",
        "partial",
        "states_finish",
        "states_merge",
    )
}
# Compiled code alone calls these, on arguments that it has traced through fake kernels: test_attention_carried.py.
TRACED = {"carried_attention", "carried_attention_backward"}


def test_every_operator_is_tested():
    registered = {
        each.split("::")[1].split(".")[0]
        for each in torch._C._dispatch_get_all_op_names()
        if each.startswith("streamkl::")
    }
    assert registered == set(OPERATORS) | TRACED


@lru_cache(maxsize=None)
def call_of(problem, operator):
    """{argument: value} of a valid call, or None if the operator does not take the tensors of this problem."""
    inputs, options = PROBLEMS[problem]
    taken = [argument.name for argument in OPERATORS[operator]._schema.arguments]
    if operator == "states_merge":
        states = torch.randn(3, 7, 5)
        return dict(states=states, others=torch.randn(3, 7, 5)) if problem == "attention" else None
    if operator in ("attention_forward", "attention_backward"):
        if problem in ("teacher groups", "sinks", "indexer"):
            return None
        inputs, options = inputs | values(inputs), options | dict(gradients=STUDENT | DV_S)
    if operator == "attention_stats" and problem == "indexer":
        return None
    arguments = dict.fromkeys(taken) | inputs | Options(**options)._asdict()
    rows = lib.KL | lib.LSE_T | lib.LSE_S | (lib.DOT_T if problem == "teacher groups" else 0)
    forward = [argument.name for argument in OPERATORS["forward"]._schema.arguments]
    found = OPERATORS["forward"](*[{**dict.fromkeys(forward), **arguments, "rows": rows}[name] for name in forward])
    named = dict(zip(("kl", "lse_t", "lse_s", "dot_t"), found))
    named["grad_kl"] = torch.linspace(-1, 2, found[0].numel()).view_as(found[0])
    if operator == "states_finish":
        named["states"] = OPERATORS["partial"](*partial_arguments(arguments, named["lse_t"]))
    arguments["rows"] = {"forward": rows, "states_finish": rows & 7}.get(operator, rows & (lib.KL | lib.DOT_T))
    arguments |= dict(first_key=0, end_key=23)
    arguments |= statistics(inputs, found) if operator == "attention_stats" else {}
    arguments |= {name: row for name, row in named.items() if name in taken}
    return {name: arguments[name] for name in taken}


def statistics(inputs, found):
    """Arguments of attention_stats: all results except the LSE, which is given."""
    cu_seqlens = inputs.get("cu_seqlens_q")
    sequences = found[2].shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    ranges = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32).expand(sequences, 2, 2).contiguous()
    rows = torch.tensor([0, -1], dtype=torch.int32).expand(sequences, 2).contiguous()
    weight = torch.linspace(0, 2, found[2].numel()).view_as(found[2])
    numbers = dict(results=(1 << 13) - 1 - 4, row_begin=0, row_end=0, per_key_head=False, distance_count=4, top_k=3)
    return dict(row_weight=weight, key_ranges=ranges, chosen_rows=rows, **numbers)


def partial_arguments(arguments, lse_t):
    taken = [argument.name for argument in OPERATORS["partial"]._schema.arguments]
    known = {**dict.fromkeys(taken), **arguments, "lse_t": lse_t, "first_key": 0, "end_key": 23}
    return [known[name] for name in taken]


CALLS = [(problem, operator) for problem in PROBLEMS for operator in OPERATORS if call_of(problem, operator)]

# Changes after which the result is the same.
SAME = {
    "strided": lambda x: torch.stack([x, torch.full_like(x, 77)], -1)[..., 0],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "offset": lambda x: torch.cat([torch.full_like(x[:1], 77), x])[1:],
    "negative view": lambda x: torch._neg_view(-x) if x.dtype.is_floating_point else x,
}
# Changes that must be refused.
WRONG = {
    "longer": lambda x, dim: torch.cat([x, x.narrow(dim, 0, 1)], dim),
    "shorter": lambda x, dim: x.narrow(dim, 0, x.shape[dim] - 1),
    "one dimension more": lambda x, dim: x.unsqueeze(dim),
    "one dimension less": lambda x, dim: x.select(dim, 0),
    "no dimension": lambda x, dim: x.flatten()[0],
    "f64": lambda x, dim: x.double(),
    "f16": lambda x, dim: x.half(),
    "int64": lambda x, dim: x.long(),
    "bool": lambda x, dim: x.bool(),
    "meta": lambda x, dim: x.to("meta"),
    "none": lambda x, dim: None,
    "numpy": lambda x, dim: x.numpy(),
}


def outcome(operator, call):
    """The results. A CPU has no kernel for attention_forward: it refuses valid tensors by name, and has none."""
    try:
        answer = OPERATORS[operator](*call.values())
    except RuntimeError as error:
        if operator == "attention_forward" and "skl_attention_forward on a CPU" in str(error):
            return []
        raise
    return [answer] if isinstance(answer, torch.Tensor) else answer


@settings(deadline=None, max_examples=400 if LONG else 20)
@given(data=st.data())
@pytest.mark.parametrize("problem, operator", CALLS)
def test_a_changed_tensor(problem, operator, data):
    call = call_of(problem, operator)
    name = data.draw(st.sampled_from([name for name, value in call.items() if isinstance(value, torch.Tensor)]))
    tensor = call[name]
    change = data.draw(st.sampled_from([*SAME, *WRONG]))
    expected = outcome(operator, call)
    if change in SAME:
        found = outcome(operator, call | {name: SAME[change](tensor)})
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), f"{name}: {change}"
        return
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    changed = call | {name: WRONG[change](tensor, dim)}
    if may_fit(operator, name, change, dim - tensor.dim()):
        with suppress(ValueError):
            outcome(operator, changed)
        return
    # The dispatcher of torch refuses arrays of numpy.
    with pytest.raises(RuntimeError if change == "numpy" else ValueError, match=rf"\b{name}\b"):
        outcome(operator, changed)


def may_fit(operator, name, change, dim):
    """Whether a changed tensor may belong to another valid call: one with other heads, list lengths, or without a tensor."""
    if change in ("longer", "shorter"):
        if operator == "attention_stats" and name in ("q_s", "k_s"):
            return True  # there is no teacher to compare with
        return (name, dim) in (
            ("q_s", -2), ("k_s", -2), ("k_t", -2), ("indices", -1), ("key_ranges", -2), ("chosen_rows", -1)
        )  # fmt: skip
    optional = {each.name for each in OPERATORS[operator]._schema.arguments if str(each.type).startswith("Optional")}
    return (change == "none" and name in optional) or (name == "w_s" and change == "f16")


@pytest.mark.parametrize(
    "operator", [each for each in OPERATORS if each not in ("backward", "partial", "states_merge", "attention_stats")]
)
@pytest.mark.parametrize("rows", [-1, 1 << 7, 1 << 40])
def test_row_vectors_that_do_not_exist(operator, rows):
    with pytest.raises(ValueError, match=f"rows={rows}: must be bits of kl, lse_t"):
        OPERATORS[operator](*(call_of("attention", operator) | {"rows": rows}).values())


@pytest.mark.parametrize("operator", ["backward", "forward_backward"])
def test_gradients_of_absent_tensors(operator):
    for gradients in DW_S, DSINK_S, DV_S, 1 << 8, -1:
        with pytest.raises(ValueError, match="gradients"):
            OPERATORS[operator](*(call_of("attention", operator) | {"gradients": gradients}).values())
