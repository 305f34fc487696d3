"""What makes a step faster: weights rounded once, norms in one kernel, a teacher that several runs share."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distill_cases import CONTEXT, make_teacher
from hf_models import llama

from streamkl.distill._fast import fuse_norms, rounded_weights
from streamkl.distill._loop import Run
from streamkl.distill._objective import Objective
from streamkl.distill._options import Options

pytestmark = pytest.mark.usefixtures("any_precision")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("fast"))


def options(folder, out, **more):
    given = dict(teacher=str(folder / "teacher"), data=[str(folder / "data.npy")], out=str(folder / out), context=CONTEXT, steps=3,
                 batch=2, student_layers=2, student_heads=2, eval_sequences=0, language_weight=0.5, cpu=True, overwrite=True)  # fmt: skip
    return Options(**{**given, **more}).check()


def test_rounded_weights_have_exact_gradients():
    torch.manual_seed(0)
    linear = torch.nn.Linear(5, 3)
    linear.bias.requires_grad_(False)
    found = rounded_weights(linear)
    assert found.keys() == {"weight"} and found["weight"].dtype == torch.bfloat16
    assert torch.equal(found["weight"], linear.weight.bfloat16())
    g = torch.randn(3, 5).bfloat16()
    found["weight"].backward(g)
    assert linear.weight.grad.dtype == torch.float32 and torch.equal(linear.weight.grad, g.float())
    assert linear.bias.grad is None


def test_a_weight_without_a_gradient_keeps_none():
    linear = torch.nn.Linear(5, 3)
    rounded_weights(linear)["weight"].float().sum().backward()
    assert linear.bias.grad is None and linear.weight.grad is not None


@pytest.mark.parametrize("more, dtype", [({}, torch.bfloat16), (dict(gradient_checkpointing=True), torch.float32)])
def test_hidden_states_of_a_step(folder, more, dtype):
    run = Run(options(folder, "hidden", precision="bfloat16", **more), SimpleNamespace(pressed=0))
    seen = []
    run.student.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with run.objective.attached():
        run.advance()
    assert set(seen) == {dtype}
    assert all(
        weight.dtype == weight.grad.dtype == torch.float32 for weight in run.trained if weight.grad is not None
    )


def test_rounded_weights_train_like_autocast(folder, monkeypatch):
    def losses(out):
        run = Run(options(folder, out, precision="bfloat16", rate=3e-3, steps=8), SimpleNamespace(pressed=0))
        with run.objective.attached():
            return [run.advance()["loss"] for _ in range(8)]

    rounded = losses("rounded")
    monkeypatch.setattr("streamkl.distill._objective.rounded_weights", lambda module: {})
    assert np.allclose(rounded, losses("autocast"), rtol=0.02)


def test_norms_that_are_fused():
    torch.manual_seed(0)
    model = llama(layers=2, heads=2)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        expected = model(ids).logits
        assert fuse_norms(model) == 5  # two per layer and the last one
        torch.testing.assert_close(model(ids).logits, expected)


def test_other_norms_stay_as_they_are():
    class OnePlus(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.zeros(8)), 1e-6

        def forward(self, x):
            return torch.nn.functional.rms_norm(x, (8,), 1 + self.weight, self.variance_epsilon)

    norm = OnePlus()
    before = copy.deepcopy(norm)
    assert fuse_norms(norm) == 0
    x = torch.randn(2, 8)
    assert torch.equal(norm(x), before(x))


def test_a_run_like_another_shares_its_teacher_and_data(folder):
    first = Run(options(folder, "first"), SimpleNamespace(pressed=0))
    second = Run(options(folder, "second", attention_weight=0.0), SimpleNamespace(pressed=0), like=first)
    assert second.teacher is first.teacher and second.training is first.training and second.digest == first.digest
    assert second.student is not first.student
    assert all(torch.equal(a, b) for a, b in zip(first.trained, second.trained))


def test_a_control_of_sharded_models(folder):
    """Sharding gives the layers of the teacher other classes, as FSDP2 does here."""
    first = Run(options(folder, "sharded", control=True, eval_sequences=1, needles=0), SimpleNamespace(pressed=0))
    start = [weight.clone() for weight in first.trained]
    for layer in first.teacher.model.layers:
        layer.__class__ = type("FSDPLlamaDecoderLayer", (type(layer),), {})
    with first.objective.attached():
        first.advance()
    second = Run(options(folder, "control", attention_weight=0.0), SimpleNamespace(pressed=0), like=first)
    assert all(torch.equal(a, b) for a, b in zip(start, second.trained, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.trained, second.trained))


def test_an_objective_without_precision_rounds_nothing(folder):
    run = Run(options(folder, "exact"), SimpleNamespace(pressed=0))
    assert isinstance(run.objective, Objective) and not run.objective.rounds
