"""A LoRA student whose teacher is its own base model: the same KL as with a copy of the base model."""

import copy
import warnings

import pytest
import torch
from hf_models import batch, llama
from hf_trainer_cases import arguments

from streamkl.hf import AttentionDistiller, DistillationTrainer

peft = pytest.importorskip("peft")


def lora(dropout=0.0):
    """(student, base model)"""
    torch.manual_seed(3)
    base = llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=dropout)
    return peft.get_peft_model(copy.deepcopy(base), config), base


@pytest.mark.parametrize("fused", [False, True])
def test_the_base_model_teaches(fused):
    """Two steps with dropout in the student alone: losses and gradients have the bits of those with a copy as the teacher."""
    found = []
    for shares in False, True:
        student, base = lora(dropout=0.3)
        student.train()
        torch.manual_seed(4)
        steps = []
        with (
            warnings.catch_warnings(),
            AttentionDistiller(None if shares else base, student, fused=fused) as distiller,
        ):
            warnings.simplefilter("error")
            for seed in 1, 2:
                student.zero_grad()
                output = student(**batch("none" if fused else "left", seed=seed))
                (0 * output.logits.sum() + distiller.loss()).backward()
                gradients = [p.grad.clone() for p in student.parameters() if p.requires_grad]
                steps.append((distiller.last_loss, *gradients))
                assert student.training and all(module.training for module in student.modules())
                assert len(gradients) == 8
        found.append(steps)
        assert student.base_model.model.config._attn_implementation == "sdpa"
    for a, b in zip(*found):
        assert a[0] > 0 and all(torch.equal(x, y) for x, y in zip(a, b))


def test_a_forward_of_the_base_model_is_the_teachers():
    """A caller that has run the base model itself, for its logits, shares that forward."""
    student, base = lora()
    inputs, runs = batch(), []
    student.base_model.model.model.register_forward_hook(lambda *_: runs.append(1))
    with AttentionDistiller(None, student) as distiller:
        student(**inputs)
        with student.disable_adapter(), torch.no_grad():
            student.eval()(**inputs)
        loss = distiller.loss()
    assert len(runs) == 2
    with AttentionDistiller(base, student) as distiller:
        student(**inputs)
        torch.testing.assert_close(distiller.loss(), loss)


def test_a_base_model_in_training_mode_is_no_teacher():
    student, _ = lora(dropout=0.3)
    with AttentionDistiller(None, student) as distiller:
        student.train()(**batch())
        with student.disable_adapter(), torch.no_grad():
            student(**batch())
        with pytest.raises(RuntimeError, match=r"the base model ran in training mode: leave its forward to loss\(\), or call eval"):
            distiller.loss()


def test_trainer(tmp_path):
    """Without a teacher, the trainer of a PEFT model learns from the base model."""
    data = [dict(input_ids=ids, labels=ids.clone()) for ids in batch(size=8)["input_ids"]]
    weights = []
    for shares in False, True:
        student, base = lora()
        trainer = DistillationTrainer(
            model=student, args=arguments(tmp_path, max_steps=3), train_dataset=data, kl_weight=5.0,
            teacher=None if shares else base,
        )  # fmt: skip
        trainer.train()
        weights.append({name: p.detach() for name, p in student.named_parameters() if p.requires_grad})
    assert weights[0] and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    "options",
    [dict(target_modules=["q_proj", "embed_tokens"]), dict(target_modules=["q_proj"], trainable_token_indices=[1])],
)
def test_adapters_of_embeddings(options):
    """The teacher's vocabulary is that of the module inside."""
    base = llama()
    student = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, init_lora_weights=False, **options))
    found = []
    for teacher in None, base:
        with AttentionDistiller(teacher, student) as distiller, torch.no_grad():
            student(**batch("left"))
            found.append(distiller.loss())
    assert found[0] > 0
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("trained", ["bias", "norm"])
def test_a_base_model_that_is_trained_is_no_teacher(trained):
    student, base = lora()
    if trained == "bias":
        base.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(base.config.hidden_size))
        student = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], bias="lora_only"))
    for name, parameter in student.named_parameters():
        if trained in name:
            parameter.requires_grad_(True)
    with pytest.raises(ValueError, match=f"{trained}.* is trained and belongs to the base model"):
        AttentionDistiller(None, student)


def test_an_initialization_that_changes_the_base_model():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    with pytest.raises(ValueError, match="init_lora_weights='pissa' of the adapter 'default' changes the weights of the base model"):
        AttentionDistiller(None, peft.get_peft_model(llama(), config))


def test_adapters_stay_frozen():
    """PEFT lets every active adapter be trained when the base model has run."""
    student, _ = lora()
    for name, parameter in student.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    flags = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    with AttentionDistiller(None, student) as distiller:
        student(**batch())
        distiller.loss().backward()
    assert flags == {name: parameter.requires_grad for name, parameter in student.named_parameters()}


def test_a_prefix_has_no_teacher():
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    student = peft.get_peft_model(llama(), config)
    with AttentionDistiller(None, student) as distiller:
        student(**batch("left"))
        with pytest.raises(
            ValueError, match="after 3 keys of past_key_values, as in prefix tuning, which the teacher"
        ):
            distiller.loss()


def test_other_students_have_no_base_model():
    with pytest.raises(ValueError, match="teacher=None: must be a transformers model; only a PEFT student"):
        AttentionDistiller(None, llama())
    student, _ = lora()
    with pytest.raises(ValueError, match="must be another model than the student; .* teacher=None is the base model"):
        AttentionDistiller(student, student)
