"""IndexerTrainer on small models of the architectures that attend to a list of keys."""

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from streamkl.hf import AttentionDistiller, IndexerTrainer
from streamkl.hf._indexer import indexer_tensors, row_bounds

ARCHITECTURES = {
    "axk2": {},
    "deepseek_v32": {},
    "glm_moe_dsa": dict(indexer_types=["full", "shared", "full"]),
    "hy_v4": dict(indexer_types=["full", "shared", "full"]),
}


def make_model(architecture, top_k=8, seed=0):
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        architecture, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, v_head_dim=12, qk_nope_head_dim=8, index_topk=top_k,
        index_head_dim=16, index_n_heads=4, max_position_embeddings=128, mlp_layer_types=["dense"] * 3,
        **ARCHITECTURES[architecture],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # a random model of this size attends almost uniformly
                parameter.mul_(6.0 if "indexer" in name else 60.0 if architecture == "hy_v4" else 20.0)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sparse_stage_runs_the_model_as_it_is(architecture):
    """The attention of a step returns what the model's own attention returns, and restores it afterwards."""
    model, tokens = make_model(architecture), torch.randint(0, 64, (2, 40))
    expected = model(tokens).logits.detach()
    trainer, seen = IndexerTrainer(model), []
    hook = model.lm_head.register_forward_hook(lambda _, __, output: seen.append(output))
    trainer.evaluate(input_ids=tokens, stage="sparse")
    hook.remove()
    torch.testing.assert_close(seen[0], expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_captured_tensors_give_the_list_of_the_indexer(architecture):
    model, calls = make_model(architecture), []
    indexer = model.model.layers[0].self_attn.indexer
    indexer.register_forward_hook(lambda _, a, k, output: calls.append((a, k, output)), with_kwargs=True)
    model(torch.randint(0, 64, (2, 40)))
    ((args, kwargs, listed),) = calls
    q, k, w = indexer_tensors(indexer, args, kwargs)
    assert q.requires_grad and k.requires_grad and w.requires_grad
    scores = torch.einsum("big,bigj->bij", w, torch.einsum("bigd,bjd->bigj", q, k).relu())
    scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    best, chosen = scores.topk(8).values, scores.gather(-1, listed.long()).sort(-1, descending=True).values
    torch.testing.assert_close(chosen[:, 8:], best[:, 8:])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_indexers_learn(architecture):
    model = make_model(architecture)
    others = torch.randint(0, 64, (4, 48))
    trainer = IndexerTrainer(model)
    assert {id(p) for p in trainer.parameters()} == {id(p) for p in model.parameters() if p.requires_grad}
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = trainer.evaluate(input_ids=others)
    assert before.loss.shape == before.recall.shape == (3,) and (before.recall <= 1 + 1e-5).all()
    optimizer = torch.optim.Adam(trainer.parameters(), lr=0.02)
    for stage, steps in ("dense", 40), ("sparse", 10):
        for _ in range(steps):
            trainer.backward(input_ids=torch.randint(0, 64, (4, 48)), stage=stage)
            optimizer.step(), optimizer.zero_grad()
    after = trainer.evaluate(input_ids=others)
    assert after.loss.mean() < 0.9 * before.loss.mean() and after.recall.mean() > before.recall.mean() + 0.1
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


def test_layers_that_share_an_indexer_teach_it_together():
    model, tokens = make_model("glm_moe_dsa"), torch.randint(0, 64, (1, 24))
    trainer = IndexerTrainer(model)
    trainer.backward(input_ids=tokens, stage="dense")
    weight = model.model.layers[0].self_attn.indexer.weights_proj.weight
    together, weight.grad = weight.grad.clone(), None
    alone = torch.zeros_like(together)
    from streamkl.hf import _indexer

    for layer in 0, 1:  # the losses of one layer at a time
        own = _indexer._Step.finish

        def finish(step, layer=layer):
            kept = len(step.losses) - len(step.pending)
            step.pending[:] = [loss for n, loss in enumerate(step.pending, kept) if n == layer]
            own(step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_indexer._Step, "finish", finish)
            trainer.backward(input_ids=tokens, stage="dense")
        alone += weight.grad
        weight.grad = None
    torch.testing.assert_close(together, alone)


def test_masks_become_row_bounds():
    causal = torch.ones(5, 5).tril().bool()[None, None]
    begin, end = row_bounds(causal)
    assert begin.tolist() == [[0] * 5] and end.tolist() == [[1, 2, 3, 4, 5]]
    padded = causal & (torch.arange(5) < 3)
    nothing = causal & (torch.arange(5)[:, None] != 0)  # the first query attends to no key
    assert [b.tolist() for b in row_bounds(nothing)] == [[[0] * 5], [[0, 2, 3, 4, 5]]]
    assert row_bounds(torch.where(padded, 0.0, -torch.inf))[1].tolist() == [[1, 2, 3, 3, 3]]
    hole = causal.clone()
    hole[..., 3, 1] = False
    nowhere = causal & (torch.arange(5) != 1)
    for mask, reason in (hole, "more than one range of keys: row 3"), (nowhere, "no query sees"), (causal.float(), "adds a bias"):
        with pytest.raises(ValueError, match=f"attention_mask: every query must attend to one range of keys.* {reason}"):
            row_bounds(mask)
    assert [len(bound) for bound in row_bounds(causal.expand(2, -1, -1, -1))] == [2, 2]
    with pytest.raises(ValueError, match="attention_mask: the ranges of the queries must not move back"):
        row_bounds(causal.flip(-2))


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_rows_of_padding_do_not_count(stage):
    """The loss of a padded batch is that of its sequences, whatever the padding contains."""
    model, tokens = make_model("deepseek_v32"), torch.randint(0, 64, (2, 20))
    trainer, mask = IndexerTrainer(model), torch.ones_like(tokens)
    mask[1, 12:] = 0
    alone = [trainer.evaluate(input_ids=each, stage=stage) for each in (tokens[:1], tokens[1:, :12])]
    for ids in tokens, torch.where(mask.bool(), tokens, 7):
        found = trainer.evaluate(input_ids=ids, attention_mask=mask, stage=stage)
        for whole, *parts in zip(found, *alone):
            torch.testing.assert_close(whole, (parts[0] * 20 + parts[1] * 12) / 32, rtol=1e-4, atol=1e-5)


def test_a_model_without_indexers_is_refused():
    with pytest.raises(ValueError, match="Linear: has no indexers; axk2, deepseek_v32, glm_moe_dsa and hy_v4 models have"):
        IndexerTrainer(torch.nn.Linear(2, 2))
    trainer = IndexerTrainer(make_model("deepseek_v32"))
    with pytest.raises(ValueError, match="stage='both': must be 'dense' or 'sparse'"):
        trainer.backward(input_ids=torch.zeros(1, 4, dtype=torch.long), stage="both")


def test_a_wrapper_is_refused():
    """It has no config, whose attention a step replaces. DDP would not average gradients that it has not computed."""
    model = make_model("deepseek_v32")
    wrapper = torch.nn.Sequential(model)
    with pytest.raises(TypeError, match="model: Sequential must be a transformers model: pass the model inside. On several"):
        IndexerTrainer(wrapper)
    wrapper.config = {}
    with pytest.raises(TypeError, match="model: Sequential must be a transformers model"):
        IndexerTrainer(wrapper)
    assert all(each.requires_grad for each in model.parameters())  # nothing has changed


def test_a_tensor_parallel_model_is_refused():
    """The target is the mean over all heads, and a rank would have some of them."""
    model = make_model("deepseek_v32")
    model._tp_size = 2  # what from_pretrained(..., tp_plan="auto") sets
    with pytest.raises(ValueError, match=r"model: DeepseekV32ForCausalLM is tensor parallel \(tp_size=2\).*without tp_plan"):
        IndexerTrainer(model)


def test_a_distiller_names_the_trainer_of_indexers():
    teacher, student = make_model("deepseek_v32"), make_model("deepseek_v32", seed=1)
    with AttentionDistiller(teacher, student) as distiller:
        student(torch.randint(0, 64, (1, 24)))
        with pytest.raises(ValueError, match="IndexerTrainer trains its indexers"):
            distiller.loss()
