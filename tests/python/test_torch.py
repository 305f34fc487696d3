"""The operators with other parts of torch: compile, autocast, checkpointing, threads, double backward."""

import copy
import itertools
import pickle

import pytest
import torch
from cases import COMPILER, LONG, check_operators, check_threads, make_tensors
from indexer_cases import make_indexer
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import streamkl
from streamkl import reference
from streamkl._options import AttentionOptions, translate
from streamkl._problem import DK_S, DQ_S

STUDENT = DQ_S | DK_S


FORMS, GRADIENTS = ["dense", "packed", "key lengths"], [STUDENT, 15, 0]


@pytest.mark.parametrize(
    "form, gradients", itertools.product(FORMS, GRADIENTS) if LONG else zip(FORMS, GRADIENTS, strict=True)
)
def test_opcheck(form, gradients):
    tensors = [t.detach() for t in make_tensors(len_q=11, len_k=11, packed=form == "packed")]
    cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32) if form == "packed" else None
    key_lengths = torch.tensor([3, 11], dtype=torch.int32) if form == "key lengths" else None
    check_operators(tensors, gradients, cu_seqlens, key_lengths)


@pytest.mark.parametrize("dynamic", [False, True] if LONG else [True])
def test_compile(dynamic):
    """Every path of attention_kl in one graph, on views."""

    def step(q_t, k_t, q_s, k_s, cu_seqlens):
        q_s = (q_s * 2).transpose(1, 2)
        k_s = k_s.transpose(1, 2)
        rows, lse_t, lse_s = streamkl.attention_kl(
            q_t.transpose(1, 2),
            k_t.transpose(1, 2),
            q_s,
            k_s,
            causal=True,
            layout="bhnd",
            reduction="none",
            return_lse=True,
        )
        one_pass = streamkl.attention_kl(
            q_t.transpose(1, 2), k_t.transpose(1, 2), q_s, k_s, causal=True, layout="bhnd", lse_t=lse_t, lse_s=lse_s
        )
        packed = streamkl.attention_kl(
            q_t[0], k_t[0], q_s[0].transpose(0, 1), k_s[0].transpose(0, 1), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            row_weight=torch.ones(q_t.shape[1]),
        )  # fmt: skip
        return rows.sum() + one_pass + packed

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=COMPILER)
    for length in (16, 24) if dynamic else (16,):
        tensors = make_tensors(len_q=length, len_k=length)
        cu_seqlens = torch.tensor([0, 7, 15], dtype=torch.int32)
        expected, actual = step(*tensors, cu_seqlens), compiled(*tensors, cu_seqlens)
        torch.testing.assert_close(actual, expected)
        for one, other in zip(torch.autograd.grad(actual, tensors), torch.autograd.grad(expected, tensors)):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_takes_numbers_as_arguments(dynamic):
    """The checks of options accept a compiler's symbols, and lengths of int64 need no graph break."""

    def step(*tensors, left, scale, longest, cu_seqlens):
        return streamkl.attention_kl(
            *tensors, window_size=(left, 0), softmax_scale_s=scale, softcap_t=10 * scale, cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="eager")
    tensors = [t.detach() for t in make_tensors(len_q=16, len_k=16, packed=True)]
    for left, scale, longest in ((3, 0.25, 9), (5, 0.5, 12)):
        options = dict(left=left, scale=scale, longest=longest, cu_seqlens=torch.tensor([0, 7, 16]))
        torch.testing.assert_close(compiled(*tensors, **options), step(*tensors, **options))


def test_compile_f16_in_one_pass():
    """The operator returns gradients in f32, those of the tensors are f16."""
    tensors = make_tensors(dtype=torch.float16)
    _, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True)

    def step(*tensors):
        return streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for one, other in zip(torch.autograd.grad(compiled(*tensors), tensors), torch.autograd.grad(step(*tensors), tensors)):
        assert one.dtype == other.dtype == torch.float16
        torch.testing.assert_close(one, other)


def test_compile_without_gradients():
    tensors = [t.detach() for t in make_tensors()]
    compiled = torch.compile(streamkl.attention_kl, fullgraph=True, backend=COMPILER)
    torch.testing.assert_close(compiled(*tensors), streamkl.attention_kl(*tensors))


def test_autocast():
    """Autocast may give bf16 queries and f32 keys: both are promoted to f32."""
    q_t, k_t, q_s, k_s = make_tensors()
    projection = torch.nn.Linear(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = streamkl.attention_kl(q_t, k_t, projection(q_s), k_s)
    assert loss.dtype == torch.float32
    loss.backward()
    assert q_s.grad is not None and projection.weight.grad is not None
    with pytest.raises(ValueError, match="q_s is torch.bfloat16 and k_s is torch.float32"):
        streamkl.attention_kl(q_t, k_t, q_s.bfloat16(), k_s)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    q_t, k_t, q_s, k_s = make_tensors()

    def block(q):
        return streamkl.attention_kl(q_t, k_t, q * 2, k_s, causal=True)

    plain = torch.autograd.grad(block(q_s), (q_s, k_s))
    if reentrant:
        checkpoint(block, q_s, use_reentrant=True).backward()
        again = (q_s.grad, k_s.grad)
    else:
        again = torch.autograd.grad(checkpoint(block, q_s, use_reentrant=False), (q_s, k_s))
    assert all(torch.equal(one, other) for one, other in zip(plain, again))


def test_double_backward_is_an_error():
    tensors = make_tensors()
    loss, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True)
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice; streamkl.reference"):
        torch.autograd.grad(first[2].square().sum(), tensors)
    with pytest.raises(RuntimeError, match="with both LSEs cannot be differentiated twice"):
        torch.autograd.grad(streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s), tensors, create_graph=True)


@pytest.mark.parametrize("function, make", [(streamkl.attention_kl, make_tensors), (streamkl.indexer_kl, make_indexer)])
def test_double_backward_in_the_weights_is_an_error(function, make):
    """The first gradients depend on the upstream gradient, and so on the weights."""
    tensors, weight = [tensor if tensor is None else tensor.detach() for tensor in make()], torch.rand(2, 19, requires_grad=True)
    tensors[2].requires_grad_()
    loss = function(*tensors, row_weight=weight)
    (first,) = torch.autograd.grad(loss, tensors[2], create_graph=True)
    with pytest.raises(RuntimeError, match=f"{function.__name__} cannot be differentiated twice; streamkl.reference"):
        torch.autograd.grad(loss + first.square().sum(), weight)


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x.expand(2, *x.shape)),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
}


@pytest.mark.parametrize("function", ["attention_kl", "indexer_kl"])
@pytest.mark.parametrize("name", [*TRANSFORMS, "dual"])
def test_transforms_are_refused(name, function):
    """In forward mode the operator would have a tangent of 0."""
    torch.manual_seed(0)
    q, w = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2)

    def loss(x):
        if function == "attention_kl":
            return streamkl.attention_kl(q, q, x, q)
        return streamkl.indexer_kl(q, q, x, q[:, :, :1], w)

    with pytest.raises(RuntimeError, match=f"streamkl.{function} does not support .*streamkl.reference.{function} supports them"):
        if name != "dual":
            TRANSFORMS[name](loss, torch.randn_like(q))
        else:
            with torch.autograd.forward_ad.dual_level():
                loss(torch.autograd.forward_ad.make_dual(torch.randn_like(q), q))


@pytest.mark.parametrize("name", ["sinks", "row_weight", "one_pass"])
@pytest.mark.parametrize("mode", ["jvp", "dual"])
def test_forward_mode_of_other_arguments_is_refused(name, mode):
    """Sinks, and weights in one pass, would have a tangent of 0, too."""
    q = torch.randn(1, 5, 2, 8)
    student = q.clone().requires_grad_()
    _, lse_t, lse_s = streamkl.attention_kl(q, q, q, q, return_lse=True)

    def loss(x):
        if name == "sinks":
            return streamkl.attention_kl(q, q, q, q, sink_t=x, sink_s=x)
        known = dict(lse_t=lse_t, lse_s=lse_s) if name == "one_pass" else {}
        return streamkl.attention_kl(q, q, student, q, row_weight=x, reduction="sum", **known)

    x = torch.ones(2) if name == "sinks" else torch.ones(1, 5)
    with pytest.raises(RuntimeError, match="streamkl.attention_kl does not support"):
        if mode == "jvp":
            torch.func.jvp(loss, (x,), (x,))
        else:
            with torch.autograd.forward_ad.dual_level():
                loss(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("function", ["attention_kl", "indexer_kl"])
def test_batches_of_gradients_are_refused(function):
    q, w = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2)

    def loss(x):
        if function == "attention_kl":
            return streamkl.attention_kl(q, q, x, q, reduction="none")
        return streamkl.indexer_kl(q, q, x, q[:, :, :1], w, reduction="none")

    with pytest.raises(RuntimeError, match=f"streamkl.{function} does not support batches of gradients"):
        torch.autograd.functional.jacobian(loss, q, vectorize=True)
    assert torch.autograd.functional.jacobian(loss, q).shape == (*loss(q).shape, *q.shape)


def test_a_transform_of_other_tensors():
    q, x = torch.randn(1, 5, 2, 8), torch.arange(3.0)
    loss = streamkl.attention_kl(q, q, q.roll(1, 1), q)
    found = torch.func.vmap(lambda x: x * streamkl.attention_kl(q, q, q.roll(1, 1), q))(x)
    torch.testing.assert_close(found, x * loss)


@pytest.mark.parametrize("one_pass", [False, True])
def test_backward_twice_with_retain_graph(one_pass):
    tensors = make_tensors()
    _, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True)
    loss = streamkl.attention_kl(*tensors, **(dict(lse_t=lse_t, lse_s=lse_s) if one_pass else {}))
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def saved_count(loss_of):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss_of()
    return sum(tensor.numel() for tensor in saved if tensor.dtype != torch.int32)


def test_only_needed_tensors_are_saved():
    q_t, k_t, q_s, k_s = tensors = [t.detach() for t in make_tensors(heads_t=2, key_heads_t=2, key_heads_s=2)]
    q_s.requires_grad_()
    rows = 2 * 2 * 19
    inputs = sum(tensor.numel() for tensor in tensors)
    assert saved_count(lambda: streamkl.attention_kl(*tensors, reduction="none")) == inputs + 2 * rows  # the LSEs
    assert (
        saved_count(lambda: streamkl.attention_kl(*tensors, direction="reverse", reduction="none"))
        == inputs + 3 * rows
    )
    _, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True)
    assert (
        saved_count(lambda: streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s, reduction="sum")) == q_s.numel()
    )
    with torch.no_grad():
        assert saved_count(lambda: streamkl.attention_kl(*tensors)) == 0


def test_gradient_of_the_weights():
    tensors = make_tensors()
    weight = torch.rand(2, 19, requires_grad=True)
    kl, lse_t, lse_s = streamkl.attention_kl(*tensors, reduction="none", return_lse=True)
    loss = streamkl.attention_kl(*tensors, row_weight=weight, reduction="sum", lse_t=lse_t, lse_s=lse_s)
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], kl.sum(1))


@pytest.mark.parametrize("module", [streamkl, reference])
def test_gradient_of_weights_of_0(module):
    """It is the KL, as for any weight, and 0 where the KL is NaN or infinite."""
    tensors = [tensor.detach() for tensor in make_tensors()]
    tensors[2][0, 5] = torch.nan
    weight = torch.rand(2, 19)
    weight[0, 3:6] = 0
    weight.requires_grad_()
    kl = module.attention_kl(*tensors, reduction="none").nan_to_num(0).sum(1)
    for reduction, total, mean in ("sum", 1, 0), ("mean", 2 * weight.sum(), (kl * weight).sum() / weight.sum()):
        loss = module.attention_kl(*tensors, row_weight=weight, reduction=reduction)
        torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], ((kl - mean) / total).detach())


def test_no_gradient_flows_through_given_lses():
    tensors, indexer = make_tensors(), make_indexer()
    lses = [lse.requires_grad_() for lse in streamkl.attention_kl(*tensors, return_lse=True)[1:]]
    _, *returned = streamkl.attention_kl(*tensors, lse_t=lses[0], lse_s=lses[1], return_lse=True)
    lse_t = streamkl.indexer_kl(*indexer, return_rows=True)[1].lse_t.requires_grad_()
    returned.append(streamkl.indexer_kl(*indexer, lse_t=lse_t, return_rows=True)[1].lse_t)
    assert not any(lse.requires_grad for lse in returned)


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_plain_call_skips_the_dispatcher_and_others_do_not():
    tensors = make_tensors()
    _, lse_t, lse_s = streamkl.attention_kl(*tensors, return_lse=True)
    expected = {"streamkl::forward", "streamkl::backward", "streamkl::forward_backward"}

    def step():
        streamkl.attention_kl(*tensors).backward()
        streamkl.attention_kl(*tensors, lse_t=lse_t, lse_s=lse_s).backward()

    with Recorder() as recorder:
        step()
    assert expected <= set(recorder.names)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    assert expected <= {event.name for event in profile.events()}
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
    assert isinstance(streamkl.attention_kl(*fakes), FakeTensor)
    with pytest.MonkeyPatch.context() as patch:
        for name in expected:  # the dispatcher would call None
            patch.setattr(getattr(torch.ops.streamkl, name.split("::")[1]).default, "_op", None)
        step()


def test_options_are_checked_although_their_translation_is_cached():
    """1 equals True, and has the same hash."""
    tensors = make_tensors()
    streamkl.attention_kl(*tensors, causal=True, window_size=(1, 0))
    for wrong in dict(causal=1), dict(causal=True, window_size=(True, 0)), dict(softcap_t=True), dict(direction=["forward"]):
        with pytest.raises(ValueError, match="must be"):
            streamkl.attention_kl(*tensors, **wrong)


def test_threads():
    check_threads(len_q=17, len_k=17)


def test_deterministic():
    tensors = make_tensors(len_q=300, len_k=300)
    runs = [torch.autograd.grad(streamkl.attention_kl(*tensors, deterministic=True), tensors) for _ in range(3)]
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0]))


def test_loss_module():
    criterion = streamkl.AttentionKLLoss(causal=True, window_size=(5, 0), softcap_s=3.0, direction="reverse")
    tensors = make_tensors()
    expected = streamkl.attention_kl(*tensors, causal=True, window_size=(5, 0), softcap_s=3.0, direction="reverse")
    for same in criterion, copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion)):
        assert torch.equal(same(*tensors), expected)
    assert criterion.state_dict() == {} and list(criterion.parameters()) == []
    assert "window_size=(5, 0)" in repr(criterion) and "direction='reverse'" in repr(criterion)
    weight = torch.rand(2, 19)
    assert torch.equal(
        streamkl.AttentionKLLoss()(*tensors, row_weight=weight), streamkl.attention_kl(*tensors, row_weight=weight)
    )


def test_all_algorithms_deterministic():
    """torch's switch is the option of every call."""
    try:
        torch.use_deterministic_algorithms(True)
        assert translate(AttentionOptions, 0, {})[1].deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert not translate(AttentionOptions, 0, {})[1].deterministic


def test_a_module_refuses_options_of_others():
    with pytest.raises(TypeError, match=r"AttentionKLLoss\(\) got an unexpected keyword argument 'relu'"):
        streamkl.AttentionKLLoss(relu=False)


def test_merged_states_have_the_shape_of_one():
    with FakeTensorMode():
        states = torch.empty(2, 3, 5)
        merged = torch.ops.streamkl.states_merge(states, states)
        assert isinstance(merged, FakeTensor) and merged.shape == (2, 3, 5)
        with pytest.raises(ValueError, match=r"others: \[3, 5\] on cpu must be \[2, 3, 5\]"):
            torch.ops.streamkl.states_merge(states, states[0])
