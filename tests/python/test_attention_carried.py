"""streamkl.attention: its output is torch's, its gradients are those of the attention and of the KL."""

import pickle
import weakref

import pytest
import torch
from carried_cases import (
    CASES, Call, assert_gradients, assert_near, check_against_the_reference, check_compiled, check_random_case,
)  # fmt: skip
from cases import LONG
from torch.utils.checkpoint import checkpoint

import streamkl
from streamkl._options import CarriedOptions, translate


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name):
    check_against_the_reference(**CASES[name])


@pytest.mark.parametrize("name", ["bf16", "f16", "teacher_groups", "packed", "reverse", "row_weight"])
def test_apart(name, monkeypatch):
    """Where a GPU has no kernel for both: torch's own backward, and a one-pass call."""
    monkeypatch.setattr(streamkl._carried, "supports", lambda *_: False)
    monkeypatch.setattr(streamkl._carried, "in_one_call", None)
    check_against_the_reference(**CASES[name])


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_outputs_of_stored_matrices_have_the_strides_of_queries(layout):
    """Those of one query, too, whose rows may have any stride for torch, but not for TMA."""
    shape = (2, 1, 3, 16) if layout == "bnhd" else (2, 3, 1, 16)
    q = torch.randn(shape)
    lengths, options = streamkl._options.translate(
        streamkl._options.CarriedOptions, 0, dict(layout=layout, key_lengths=torch.tensor([0, 1]))
    )
    output, _ = streamkl._sdpa.attend(q, q, q, lengths, options)
    assert output.stride() == q.stride()


@pytest.mark.parametrize("seed", range(6))
def test_random_problems(seed):
    check_random_case(seed, "cpu")


@pytest.mark.parametrize(
    "name", ["teacher_groups", "packed", "row_weight", *(["causal", "bf16", "reverse"] if LONG else [])]
)
def test_compiled_code_has_no_graph_break(name):
    check_compiled(**CASES[name])


@pytest.mark.parametrize("name", ["gqa", "reverse"])
def test_compiled_code_apart(name, monkeypatch):
    monkeypatch.setattr(streamkl._traced_attention, "supports", lambda *_: False)
    monkeypatch.setattr(streamkl._traced_attention, "carries_kl", lambda *_: False)
    check_compiled(**CASES[name])


def test_compiled_code_takes_other_lengths():
    def loss(call):
        out, handle = call.attention(inject=False)
        return (out * call.upstream).sum() + handle.loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in 24, 31:
        call = Call(causal=True, sizes=(2, length, length))
        assert_near(compiled(call).detach(), loss(call).detach().double(), 1e-6)


def test_operator_passes_opcheck():
    call = Call(causal=True)
    lengths, options = streamkl._options.translate(
        streamkl._options.CarriedOptions, streamkl._carried.GRADIENTS, call.options
    )
    for lse_t in None, torch.zeros(2, 4, 37):
        given = *call.inputs, call.q_t, call.k_t, lse_t, True
        torch.library.opcheck(torch.ops.streamkl.carried_attention, (*given, *lengths, *options))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["causal", "reverse"])
def test_gradients_without_the_value(name, apart, monkeypatch):
    if apart:
        monkeypatch.setattr(streamkl._carried, "supports", lambda *_: False)
    call = Call(**CASES[name])
    expected = call.reference(kl_weight=3000.0)[2]
    out, handle = call.attention(kl_weight=3000.0, kl_value=False)
    (out * call.upstream).sum().backward()
    assert_gradients(call, expected)
    assert handle.loss.item() == 0
    if name == "causal":
        with pytest.raises(RuntimeError, match="kl_value=False"):
            handle.kl


def test_the_backward_runs_once():
    out, _ = Call(causal=True).attention()
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the backward runs once and frees the teacher: no retain_graph=True"):
        out.sum().backward()


def test_given_lse_is_used():
    call = Call(causal=True)
    _, lse_t, _ = streamkl.attention_kl(call.q_t, call.k_t, call.q.detach(), call.k.detach(), return_lse=True, **call.options)
    expected = call.reference(kl_weight=3000.0)[2]
    out, _ = call.attention(lse_t=lse_t, kl_weight=3000.0)
    (out * call.upstream).sum().backward()
    assert_gradients(call, expected)
    call.q.grad = None
    out, _ = call.attention(lse_t=lse_t + 1, kl_weight=3000.0)
    (out * call.upstream).sum().backward()
    assert (call.q.grad - expected[0]).norm() > 0.1 * expected[0].norm()


def test_the_loss_of_the_handle_carries_the_weight():
    """inject=False: a loss scale, and a factor of gradient accumulation, reach the KL."""
    call = Call(causal=True)
    expected = call.reference(kl_weight=0.5 * 1024, out_weight=1024.0)[2]
    for _ in range(2):  # two micro-batches
        out, handle = call.attention(kl_weight=0.5, inject=False)
        loss = (out * call.upstream).sum() + handle.loss
        (loss * (1024 / 2)).backward()
    assert_gradients(call, expected)


def test_without_its_loss_nothing_is_carried():
    call = Call(causal=True)
    out, handle = call.attention(inject=False)
    (out * call.upstream).sum().backward()
    assert_gradients(call, call.reference(kl_weight=0.0)[2])
    assert handle.loss.item() > 0 and handle.kl.shape == (2, 4, 37)  # the value is known without it


def test_grad_scaler():
    """Injected with the scale of a GradScaler, the gradient of the KL is unscaled with the others."""
    call = Call(causal=True)
    expected = call.reference(kl_weight=0.5)[2]
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    optimizer = torch.optim.SGD(call.inputs, lr=0.0)
    out, _ = call.attention(kl_weight=scaler.scale(torch.tensor(0.5)))
    scaler.scale((out * call.upstream).sum()).backward()
    scaler.unscale_(optimizer)
    assert_gradients(call, expected)


def test_gradient_accumulation():
    call = Call(causal=True)
    expected = call.reference(kl_weight=0.5)[2]
    for _ in range(3):
        out, _ = call.attention(kl_weight=0.5)
        (out * call.upstream).sum().backward()
    assert_gradients(call, expected, factor=3.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    call = Call(causal=True)
    expected = call.reference(kl_weight=3.0)[2]
    handles = []

    def block(q, k, v):
        out, handle = streamkl.attention(q, k, v, q_t=call.q_t, k_t=call.k_t, kl_weight=3.0, **call.options)
        handles.append(handle)
        return out

    out = checkpoint(block, *call.inputs, use_reentrant=use_reentrant)
    (out * call.upstream).sum().backward()
    assert_gradients(call, expected)
    assert all(torch.equal(handle.kl, handles[0].kl) for handle in handles)


def test_autocast():
    call = Call(causal=True)
    rounded = Call(causal=True, dtype=torch.bfloat16)
    expected = call.reference(kl_weight=3000.0)[2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, handle = call.attention(kl_weight=3000.0)
    assert out.dtype == torch.bfloat16
    (out * call.upstream).sum().backward()
    for tensor, gradient in zip(call.inputs, expected):
        assert tensor.grad.dtype == torch.float32
        assert_near(tensor.grad, gradient, rounded.tolerance())


def test_stored_matrices_are_f32_under_autocast():
    """An LSE of rounded products is not that of the backward: the gradient of a small KL would be lost."""
    call = Call(key_lengths=torch.tensor([20, 37]), dtype=torch.bfloat16)
    call.q_t, call.k_t = 1.02 * call.q.detach(), call.k.detach()
    made = []
    for enabled in False, True:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out, _ = call.attention(kl_weight=3000.0)
        made.append([out, *torch.autograd.grad((out * call.upstream).sum(), call.inputs)])
    assert all(torch.equal(one, other) for one, other in zip(*made))


def test_autocast_promotes_the_teacher():
    """Autocast may give bf16 queries and f32 keys."""
    call = Call(causal=True)
    call.q_t = call.q_t.bfloat16()
    with pytest.raises(ValueError, match="q_t is torch.bfloat16 and k_t is torch.float32"):
        call.attention()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        handle = call.attention()[1]
        call.q_t = call.q_t.float()
        assert torch.equal(call.attention()[1].kl, handle.kl)


def test_compile():
    call = Call(causal=True)
    expected = call.reference(kl_weight=3.0)[2]
    handles = []

    @torch.compile(backend="aot_eager")
    def step(q, k, v):
        out, handle = streamkl.attention(q * 1.0, k, v, q_t=call.q_t, k_t=call.k_t, kl_weight=3.0, **call.options)
        handles.append(handle)
        return (out * call.upstream).sum()

    step(*call.inputs).backward()
    assert_gradients(call, expected)
    assert handles[-1].kl.shape == (2, 4, 37)


def test_teacher_gets_no_gradient_and_runs_without_any():
    call = Call(causal=True)
    q_t = call.q_t.requires_grad_()
    out, _ = call.attention()
    out.sum().backward()
    assert q_t.grad is None
    with torch.no_grad():
        out, handle = call.attention()
    assert not out.requires_grad and handle.loss.item() > 0


@pytest.mark.parametrize("name", ["q_t", "k_t", "lse_t", "kl_weight", "row_weight", "key_lengths"])
def test_a_tensor_changed_in_place_before_the_backward(name):
    """The backward reads it again: its gradients would be those of another loss."""
    call = Call()
    given = dict(
        q_t=call.q_t, k_t=call.k_t, lse_t=torch.zeros(2, 4, 37), kl_weight=torch.ones(()), row_weight=torch.ones(2, 37),
        key_lengths=torch.tensor([20, 37], dtype=torch.int32),
    )  # fmt: skip
    out, _ = streamkl.attention(*call.inputs, layout="bhnd", kl_value=False, **given)
    given[name].mul_(2)
    with pytest.raises(RuntimeError, match=rf"{name} has been changed in place .*: pass {name}.clone\(\)"):
        out.sum().backward()


def test_a_teacher_of_inference_mode():
    call = Call(causal=True)
    expected = call.reference(kl_weight=3.0)[2]
    with torch.inference_mode():
        call.q_t, call.k_t = call.q_t * 1, call.k_t * 1
    out, _ = call.attention(kl_weight=3.0)
    (out * call.upstream).sum().backward()
    assert_gradients(call, expected)


def test_a_handle_without_a_backward_keeps_no_teacher():
    call = Call(causal=True)
    with torch.no_grad():
        _, handle = call.attention()
    alive = weakref.ref(call.q_t)
    copied = pickle.loads(pickle.dumps(handle))
    assert torch.equal(copied.kl, handle.kl) and torch.equal(copied.loss, handle.loss)
    del call
    assert alive() is None


def test_batches_of_gradients_are_refused():
    call = Call(causal=True)
    out, handle = call.attention(inject=False)
    for made in out, handle.loss:
        with pytest.raises(RuntimeError, match="streamkl.attention does not support batches of gradients"):
            torch.autograd.grad(made, call.inputs, torch.ones(2, *made.shape), is_grads_batched=True, retain_graph=True)


def test_only_some_gradients():
    call = Call(causal=True)
    expected = call.reference()[2]
    call.k.requires_grad_(False)
    out, _ = call.attention()
    (out * call.upstream).sum().backward()
    assert call.k.grad is None
    assert_near(call.q.grad, expected[0], 2e-6)
    assert_near(call.v.grad, expected[2], 2e-6)


def test_a_graph_without_a_backward_is_freed():
    call = Call(causal=True)
    out, handle = call.attention()
    alive = weakref.ref(handle.slot)
    del out, handle
    assert alive() is None


ERRORS = {
    "v": (lambda c: dict(v=torch.randn(2, 4, 37, 8)), r"v: shape \[2, 4, 37, 8\] must be \[2, 4, 37, 16\]"),
    "q_t": (lambda c: dict(q_t=c.q_t[:, :3]), "3 teacher heads must be a multiple of 4 student heads"),
    "lse_t": (lambda c: dict(lse_t=torch.zeros(2, 4, 36)), r"lse_t: shape \[2, 4, 36\] must be"),
    "reduction": (lambda c: dict(reduction="none"), "must be 'mean' or 'sum'"),
    "head size": (lambda c: {x: torch.randn(2, 4, 37, 513) for x in "qkv"}, r"dim=513: must be 1..512"),
    "kl_weight type": (lambda c: dict(kl_weight="1"), "kl_weight='1': must be a number"),
    "kl_weight bool": (lambda c: dict(kl_weight=True), "kl_weight=True: must be a number"),
    "kl_weight range": (lambda c: dict(kl_weight=10**400), "kl_weight=10*: must be finite in float32"),
    "kl_weight shape": (lambda c: dict(kl_weight=torch.ones(3)), r"kl_weight: torch.float32 \[3\] must be a number, or a real"),
    "kl_weight dtype": (lambda c: dict(kl_weight=torch.tensor(1j)), r"kl_weight: torch.complex64 \[\] must be a number"),
    "kl_weight gradient": (
        lambda c: dict(kl_weight=torch.ones(1, requires_grad=True)), r"kl_weight: torch.float32 \[1\] with a gradient must be",
    ),
    "row_weight gradient": (
        lambda c: dict(row_weight=torch.ones(2, 37, requires_grad=True)), "row_weight: requires a gradient.*row_weight.detach",
    ),
    "inject": (lambda c: dict(inject=1), "inject=1: must be True or False"),
    "row_weight": (lambda c: dict(row_weight=torch.ones(2, 3)), r"row_weight: shape \[2, 3\] must be"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    change, message = ERRORS[name]
    call = Call(causal=True)
    arguments = dict(q=call.q, k=call.k, v=call.v, q_t=call.q_t, k_t=call.k_t, **call.options) | change(call)
    with pytest.raises(ValueError, match=message):
        streamkl.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_cannot_be_differentiated_twice():
    call = Call(causal=True)
    loss = (call.attention()[0] * call.upstream).sum()
    (gradient,) = torch.autograd.grad(loss, call.q, create_graph=True)
    with pytest.raises(RuntimeError, match="streamkl: attention cannot be differentiated twice"):
        (loss + gradient.square().sum()).backward()


def test_traced_attention_without_the_value():
    """The operator of compiled code leaves the KL to its backward if nobody asks for the value and the LSE is given."""
    q, k, v, q_t, k_t = (torch.randn(1, 7, 2, 8) for _ in range(5))
    lengths, options = translate(CarriedOptions, 0, {})
    known = streamkl.attention_kl(q_t, k_t, q, k, return_lse=True)
    output, kl, lse_t, lse_s = torch.ops.streamkl.carried_attention(q, k, v, q_t, k_t, known[1], False, *lengths, *options)
    assert kl.shape == lse_s.shape and (kl == 0).all() and lse_t.numel() == 0
    torch.testing.assert_close(lse_s, known[2])
    torch.testing.assert_close(output, streamkl.attention(q, k, v, q_t=q_t, k_t=k_t)[0])
