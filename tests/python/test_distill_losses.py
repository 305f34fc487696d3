"""Output KL and language loss in chunks: those of whole logits in float64, without a tensor of tokens x vocabulary numbers."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from cases import OnGpu
from hf_models import batch, bert, gemma2, llama

from streamkl.distill import _output_losses as chunked
from streamkl.distill._objective import Objective, Outputs, next_tokens
from streamkl.distill._options import Options, UserError

VOCABULARY, WIDTH, BATCH, LENGTH = 50, 8, 3, 11


def problem(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    head_t, head_s = (torch.nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype) for _ in range(2))
    hidden_t, hidden_s = (3 * torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype) for _ in range(2))
    labels = next_tokens(torch.randint(0, VOCABULARY, (BATCH, LENGTH)))
    return head_t, head_s, hidden_t, hidden_s.requires_grad_(), labels


def whole(head_t, head_s, hidden_t, hidden_s, labels):
    """(output KL, language loss)"""
    log_p, log_s = (head(hidden).log_softmax(-1) for head, hidden in ((head_t, hidden_t), (head_s, hidden_s)))
    output = (log_p.exp() * (log_p - log_s)).sum(-1).mean()
    return output, F.cross_entropy(head_s(hidden_s).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("logits", [1, 7 * VOCABULARY, 1 << 26], ids=["rows", "uneven", "whole"])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 2.0), (0.7, 0.3)])
@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients(monkeypatch, logits, weights, bias):
    monkeypatch.setattr(chunked, "LOGITS", logits)
    head_t, head_s, hidden_t, hidden_s, labels = problem(bias=bias)
    inputs = [hidden_s, *head_s.parameters()]
    expected = whole(head_t, head_s, hidden_t, hidden_s, labels)
    total = weights[0] * expected[0] + weights[1] * expected[1]
    gradients = torch.autograd.grad(3 * total, inputs)
    given_t = hidden_t if weights[0] else None
    found = chunked.output_losses(head_t, head_s, given_t, hidden_s, labels, weights, BATCH * (LENGTH - 1))
    torch.testing.assert_close(found[0].double(), total.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[2].double(), expected[1].detach(), rtol=1e-6, atol=1e-6)
    for a, b in zip(torch.autograd.grad(3 * found[0], inputs), gradients):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-7)
    rows = chunked.row_losses(head_t, head_s, hidden_t, hidden_s, labels)
    torch.testing.assert_close(rows["output"].mean(), expected[0].detach())
    torch.testing.assert_close(rows["language"].sum() / (BATCH * (LENGTH - 1)), expected[1].detach())


def test_tokens_that_the_teacher_excludes():
    """A teacher's logit of -inf adds nothing to the KL, also where the student excludes the token, too."""
    identity = torch.nn.Identity()
    logits_t, logits_s = torch.randn(2, 1, 4, 9)
    logits_t[..., 6:] = logits_s[..., 7:] = -torch.inf
    labels = torch.tensor([[0, 1, 2, -100]])
    expected = torch.nn.functional.kl_div(
        logits_s[..., :7].log_softmax(-1), logits_t[..., :7].softmax(-1), reduction="batchmean"
    )
    leaf = logits_s.clone().requires_grad_()
    total, output, _ = chunked.output_losses(identity, identity, logits_t, leaf, labels, (1.0, 0.0), 3)
    torch.testing.assert_close(output, expected / 4)
    total.backward()
    torch.testing.assert_close(leaf.grad, (logits_s.softmax(-1) - logits_t.softmax(-1)) / 4)
    rows = chunked.row_losses(identity, identity, logits_t, logits_s, labels)["output"]
    torch.testing.assert_close(rows.sum(), expected)


@pytest.mark.parametrize("logits, lengths", [(1, [1] * 33), (7 * VOCABULARY, [7, 7, 7, 7, 5]), (1 << 26, [33])])
def test_chunks(monkeypatch, logits, lengths):
    monkeypatch.setattr(chunked, "LOGITS", logits)
    _, _, hidden_t, hidden_s, labels = problem()
    for given in hidden_t, None:
        chunks = list(chunked._chunks(VOCABULARY, given, hidden_s, labels))
        assert [len(rows) for _, rows, _ in chunks] == [len(part) for _, _, part in chunks] == lengths
        assert len(list(chunked._chunks(VOCABULARY, given, hidden_s, labels, fused=True))) == 1
        assert [None if rows is None else len(rows) for rows, _, _ in chunks] == [
            given if given is None else n for n in lengths
        ]


def test_hidden_states_that_are_logits(monkeypatch):
    sizes, own = [], chunked._chunks
    monkeypatch.setattr(chunked, "_chunks", lambda size, *given: sizes.append(size) or own(size, *given))
    head_t, head_s, hidden_t, hidden_s, labels = problem()
    logits_t, logits_s = head_t(hidden_t).detach(), head_s(hidden_s).detach().requires_grad_()
    identity = torch.nn.Identity()
    expected = sum(whole(identity, identity, logits_t, logits_s, labels))
    total = chunked.output_losses(identity, identity, logits_t, logits_s, labels, (1.0, 1.0), BATCH * (LENGTH - 1))[0]
    assert sizes == [VOCABULARY]
    a, b = (torch.autograd.grad(each, logits_s)[0] for each in (total, expected))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            self.numel = max(self.numel, each.numel() if isinstance(each, torch.Tensor) else 0)
        return found


def test_no_tensor_has_tokens_times_vocabulary(monkeypatch):
    monkeypatch.setattr(chunked, "LOGITS", 4 * VOCABULARY)
    head_t, head_s, hidden_t, hidden_s, labels = problem(torch.float32)
    with Largest() as largest:
        chunked.output_losses(head_t, head_s, hidden_t, hidden_s, labels, (1.0, 1.0), 30)[0].backward()
    assert largest.numel == VOCABULARY * WIDTH  # the gradient of the head


def test_logits_that_are_not_those_of_a_linear_head():
    """Gemma 2 caps them: they are compared themselves."""
    model, ids = gemma2(), batch()["input_ids"]
    model.config.final_logit_softcapping = 0.01
    outputs = Outputs(model)
    assert type(outputs.head) is torch.nn.Identity
    assert torch.equal(outputs.hidden(ids), model(input_ids=ids).logits)


def test_the_fused_kernel_overwrites_its_own_logits_alone(monkeypatch):
    """Those of a linear head are a temporary; hidden states that are logits are the caller's. The kernel needs Triton."""
    on_gpu = torch.zeros(1).as_subclass(OnGpu)
    assert chunked._HAS_TRITON == (importlib.util.find_spec("triton") is not None)
    monkeypatch.setattr(chunked, "_HAS_TRITON", True)
    assert chunked._is_fused(on_gpu) and not chunked._is_fused(torch.zeros(1))
    assert not chunked._is_fused(torch.zeros(1).double().as_subclass(OnGpu))
    overwrites = []
    monkeypatch.setattr(chunked, "_is_fused", lambda _: True)
    monkeypatch.setattr(
        chunked, "_fused_losses", lambda *given: overwrites.append(given[-1]) or chunked._chunk_losses(*given)
    )
    head_t, head_s, hidden_t, hidden_s, labels = problem()
    chunked.output_losses(head_t, head_s, hidden_t, hidden_s, labels, (1.0, 1.0), 30)
    identity = torch.nn.Identity()
    chunked.output_losses(identity, identity, head_t(hidden_t), head_s(hidden_s), labels, (1.0, 1.0), 30)
    assert overwrites == [True, False]


@pytest.mark.parametrize("may_overwrite", [False, True])
@pytest.mark.parametrize("has_teacher", [False, True])
def test_arguments_of_the_fused_kernel(monkeypatch, may_overwrite, has_teacher):
    """Contiguous logits, and a gradient that is a tensor of its own unless the logits may be overwritten."""
    given = []

    def kernel(logits_s, logits_t, labels, w_output, w_language, dy):
        given.extend((logits_s, logits_t, dy))
        return torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])

    monkeypatch.setitem(sys.modules, "streamkl.distill._output_kernel", SimpleNamespace(fused_losses=kernel))
    logits = torch.randn(9, 2).T
    teacher = torch.randn(9, 2).T if has_teacher else None
    dy, output, language = chunked._fused_losses(logits, teacher, torch.tensor([0, 1]), 1.0, 1.0, may_overwrite)
    assert (output, language) == (3, 7) and dy is given[2] and (dy is given[0]) == may_overwrite
    assert torch.equal(given[0], logits) and given[0].is_contiguous() and dy.shape == logits.shape
    assert given[1] is None if teacher is None else torch.equal(given[1], teacher) and given[1].is_contiguous()


def test_layers_of_hidden_states_are_spread_evenly():
    teacher, student, ids = llama(layers=4), llama(layers=2), batch()["input_ids"]
    found = [
        Objective(
            teacher, student, Options(attention_weight=0, output_weight=0, hidden_weight=1.0, layer_map=layers), {}
        )(ids)
        for layers in ([], [1, 3], [0, 3])
    ]
    assert found[0]["hidden"] == found[1]["hidden"] != found[2]["hidden"]


def test_hidden_states_of_shards(monkeypatch):
    """The mean over ranks is the error of whole sequences, whose first token has a massive activation."""
    states_s, states_t = torch.randn(2, 3, 8, 5)
    states_t[:, 0] *= 100
    shards = [(s, t) for s, t in zip(states_s.requires_grad_().chunk(2, 1), states_t.chunk(2, 1))]
    squares = sum(t.square().mean() for _, t in shards)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: tensor.fill_(squares))
    rank, whole = (SimpleNamespace(context_group=group, ranks=ranks) for group, ranks in (("", 2), (None, 1)))
    found = torch.stack([Objective._relative_error(rank, [shard]) for shard in shards]).mean()
    expected = Objective._relative_error(whole, [(states_s, states_t)])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, states_s) for loss in (found, expected)))


def test_wrappers_find_the_config_of_the_student():
    student = llama()
    assert Objective(llama(), student, Options(), {}).config is student.config


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_parameters_without_a_gradient_do_not_stop_ddp(one_rank, precision):
    """The head is no part of the hidden states. DDP notices a missing gradient one step later."""
    options = Options(attention_weight=0, output_weight=0, hidden_weight=1, precision=precision)
    objective = Objective(llama(), student := llama(), options, {})
    model = DistributedDataParallel(objective)
    for _ in range(2):
        with torch.autocast("cpu", enabled=objective.rounds):
            loss = model(batch()["input_ids"])["loss"]
        loss.backward()
    gradient = student.lm_head.weight.grad
    assert gradient is None or not gradient.any()


@pytest.mark.parametrize("models, weights, message", [
    ((bert, bert), dict(language_weight=1.0), "--language-weight: BertModel predicts no next token"),
    ((llama, bert), {}, "--output-weight: only one of teacher and student has a language head"),
    ((bert, lambda: bert(hidden=64)), {}, "--output-weight: hidden_size is 32 in the teacher and 64 in the student"),
    ((llama, lambda: llama(hidden=64)), dict(hidden_weight=1.0), "--hidden-weight: hidden_size is 32 in the teacher and 64"),
])  # fmt: skip
def test_models_without_the_output_of_a_loss(models, weights, message):
    with pytest.raises(UserError, match=message):
        Objective(*(make() for make in models), Options(**weights), {})
