"""Attention sinks: one more outcome of both distributions."""

import pytest
import torch
from cases import assert_near, make_tensors

import streamkl
from streamkl import reference

torch.manual_seed(2606)


def make(heads_t, packed):
    """(tensors, sinks, options)"""
    tensors = make_tensors(len_q=21, len_k=33, heads_t=heads_t, heads_s=2, packed=packed)
    sinks = [(2 * torch.randn(heads)).requires_grad_() for heads in (heads_t, 2)]
    if heads_t > 2:  # groups of teacher heads with sinks have no teacher gradients
        for tensor in (*tensors[:2], sinks[0]):
            tensor.requires_grad_(False)
    if packed:
        return tensors, sinks, dict(cu_seqlens_q=torch.tensor([0, 9, 20]), cu_seqlens_k=torch.tensor([0, 12, 32]), causal=True)
    return tensors, sinks, dict(window_size=(9, 3), key_lengths=torch.tensor([20, 33]))


@pytest.mark.parametrize("lses", ["computed", "given"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads_t, direction", [(2, "forward"), (2, "reverse"), (4, "forward")])
def test_equals_the_reference(heads_t, direction, packed, reduction, lses):
    tensors, sinks, options = make(heads_t, packed)
    options |= dict(reduction=reduction, direction=direction)
    exact_tensors = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in (*tensors, *sinks)]
    *exact_inputs, sink_t, sink_s = exact_tensors
    exact, lse_t, lse_s = reference.attention_kl(*exact_inputs, sink_t=sink_t, sink_s=sink_s, return_lse=True, **options)
    given = dict(lse_t=lse_t.float(), lse_s=lse_s.float(), check_lse=True) if lses == "given" else {}
    loss = streamkl.attention_kl(*tensors, sink_t=sinks[0], sink_s=sinks[1], **given, **options)
    assert_near("loss", loss, exact, torch.float32)
    trained = [tensor for tensor in (*tensors, *sinks) if tensor.requires_grad]
    exact_trained = [tensor for tensor in exact_tensors if tensor.requires_grad]
    made, expected = torch.autograd.grad(loss.sum(), trained), torch.autograd.grad(exact.sum(), exact_trained)
    for tensor, gradient, wanted in zip(trained, made, expected):
        assert_near(f"gradient {list(tensor.shape)}", gradient, wanted, torch.float32)
    with torch.no_grad():
        _, made_t, made_s = streamkl.attention_kl(*tensors, sink_t=sinks[0], sink_s=sinks[1], return_lse=True, **options)
    for name, made_lse, wanted in ("lse_t", made_t, lse_t), ("lse_s", made_s, lse_s):
        assert torch.allclose(made_lse.double(), wanted, atol=1e-5), name


def test_a_sink_that_takes_everything_counts():
    """A student whose sinks take all attention is far from its teacher, although it agrees with it on the keys."""
    tensors = make_tensors(len_q=9, len_k=9, heads_t=2, heads_s=2)
    teacher = [tensor.detach() for tensor in tensors[:2]]
    same = streamkl.attention_kl(*teacher, *teacher, sink_t=torch.zeros(2), sink_s=torch.zeros(2))
    other = streamkl.attention_kl(*teacher, *teacher, sink_t=torch.zeros(2), sink_s=torch.full((2,), 20.0))
    assert same == 0 and other > 10


def test_16_bit_sinks_have_16_bit_gradients():
    tensors = make_tensors(len_q=9, len_k=9, heads_t=2, heads_s=2)
    sinks = [torch.randn(2, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    streamkl.attention_kl(*tensors, sink_t=sinks[0], sink_s=sinks[1]).backward()
    assert all(sink.grad.dtype == torch.bfloat16 and sink.grad.abs().max() > 0 for sink in sinks)


def test_compiles_into_one_graph():
    tensors, sinks, options = make(2, False)

    def loss(*inputs):
        return streamkl.attention_kl(*inputs[:4], sink_t=inputs[4], sink_s=inputs[5], **options)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, *sinks), loss(*tensors, *sinks))


REFUSED = {
    "sink_s is missing: a sink is an outcome of both distributions": dict(sink_t=torch.zeros(2)),
    "sink_t is missing": dict(sink_s=torch.zeros(2)),
    "sink_s: shape [3] must be [2]": dict(sink_t=torch.zeros(2), sink_s=torch.zeros(3)),
    "sink_t: float must be a torch.Tensor": dict(sink_t=0.0, sink_s=torch.zeros(2)),
    "sink_t: must be a tensor of floating-point numbers": dict(sink_t=torch.zeros(2).int(), sink_s=torch.zeros(2)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_sinks_are_refused(message):
    with pytest.raises(ValueError) as error:
        streamkl.attention_kl(*make_tensors(len_q=4, len_k=6, heads_t=2, heads_s=2), **REFUSED[message])
    assert message in str(error.value)


def test_groups_with_teacher_gradients_are_refused():
    tensors = make_tensors(len_q=4, len_k=6, heads_t=4, heads_s=2)
    with pytest.raises(ValueError, match="with sinks, teacher gradients need heads_t=4 to be heads_s=2"):
        streamkl.attention_kl(*tensors, sink_t=torch.zeros(4), sink_s=torch.zeros(2))
