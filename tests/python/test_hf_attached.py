"""An attached model runs the attention that it had: the same bits, and the same graphs of torch.compile."""

import pytest
import torch
from cases import LONG
from hf_models import batch, bert, gemma2, llama

from streamkl.hf import AttentionDistiller


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()


MODELS = {
    "llama sdpa": llama,
    "llama eager": lambda: llama(implementation="eager"),
    "bert sdpa": bert,
    "gemma2": gemma2,
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_same_bits(name, padding, autocast):
    student, inputs = MODELS[name]().train(), batch(padding)

    def step():
        student.zero_grad()
        torch.manual_seed(1)  # of the dropout
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = student(**inputs)[0]
        output.float().square().mean().backward()
        return output, *[parameter.grad.clone() for parameter in student.parameters() if parameter.grad is not None]

    alone = step()
    with AttentionDistiller(MODELS[name](), student) as distiller:
        attached = step()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            assert distiller.loss() > 0
    assert all(map(torch.equal, alone, attached))


@pytest.mark.parametrize(
    "implementation, masked", [("sdpa", False), ("eager", True), *([("sdpa", True), ("eager", False)] if LONG else [])]
)
def test_compiles_into_one_graph(implementation, masked):
    """With and without attention_mask, as Trainer calls it: use_cache=False."""
    teacher, student = llama(implementation=implementation), llama(implementation=implementation)
    inputs = dict(batch("left" if masked else "none"), use_cache=False)
    if not masked:
        del inputs["attention_mask"]
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        expected = distiller.loss()
        expected.backward()
        gradient = student.model.layers[0].self_attn.q_proj.weight.grad.clone()
        student.zero_grad()
        compiled = torch.compile(student, backend="eager", fullgraph=True)
        for _ in range(2):
            try:
                compiled(**inputs)
            except torch._dynamo.exc.Unsupported as error:
                alone = torch.compile(llama(implementation=implementation), backend="eager", fullgraph=True)
                with pytest.raises(torch._dynamo.exc.Unsupported):
                    alone(**inputs)
                pytest.skip(f"this transformers does not compile into one graph with this torch: {str(error)[:100]}")
            loss = distiller.loss()
            torch.testing.assert_close(loss, expected)
        loss.backward()
        torch.testing.assert_close(student.model.layers[0].self_attn.q_proj.weight.grad, gradient)
