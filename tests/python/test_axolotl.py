"""The plugin of axolotl, with axolotl's own plugin manager, validation, loader, collators and trainer.

`scripts/check-frameworks` has an environment with axolotl.
"""

import functools
import os
from pathlib import Path

import pytest
import torch
import yaml
from hf_models import llama
from hf_trainer_cases import make_tokenizer, words

os.environ.update(AXOLOTL_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")  # both are read at import
pytest.importorskip("axolotl")

from axolotl.cli.config import load_cfg  # noqa: E402
from axolotl.common.datasets import TrainDatasetMeta  # noqa: E402
from axolotl.integrations.base import BasePlugin, PluginManager  # noqa: E402
from axolotl.train import train  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import LlamaForCausalLM, Trainer  # noqa: E402

from streamkl.hf import AttentionDistiller  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples/axolotl.yaml"
OURS, OTHER = "streamkl.axolotl.AttentionKLPlugin", "test_axolotl.OtherTrainer"


class OtherTrainer(BasePlugin):
    """A second plugin that replaces the trainer."""

    def get_trainer_cls(self, cfg):
        return Trainer


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Those of the example, with small models, on the CPU; learning_rate 0 leaves the student unchanged."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    PluginManager.get_instance().plugins.clear()
    torch.manual_seed(0)
    for name in "teacher", "student":
        llama().save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
    given = yaml.safe_load(EXAMPLE.read_text())
    given.update(
        base_model=str(tmp_path / "student"), attention_kl_teacher=str(tmp_path / "teacher"), output_dir=str(tmp_path / "out"),
        attention_kl_options=dict(layer_map={0: 0, 1: 1}), sequence_len=32, max_steps=2, micro_batch_size=2, learning_rate=0.0,
        gradient_accumulation_steps=2, lr_scheduler="constant", bf16=False, fp16=False, tf32=False, logging_steps=1,
        save_strategy="no", gradient_checkpointing=False, special_tokens=dict(pad_token="<pad>", eos_token="<eos>"),
        dataloader_num_workers=0, dataset_num_proc=1, use_tensorboard=False, pad_to_sequence_len=False,
    )  # fmt: skip
    return given


def run(tmp_path, settings):
    """(trainer, what the student read with gradients)"""
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    cfg = load_cfg(str(tmp_path / "settings.yaml"))
    tokenizer, rows = make_tokenizer(), []
    for i in range(48):
        ids = tokenizer(words(i, 4 + i % 7))["input_ids"]
        count = len(ids)
        rows.append(dict(input_ids=ids, labels=ids, attention_mask=[1] * count, position_ids=list(range(count)), length=count))
    if not settings["sample_packing"]:
        rows = [{name: row[name] for name in ("input_ids", "labels", "attention_mask")} for row in rows]
    read, own = [], LlamaForCausalLM.forward

    @functools.wraps(own)  # its signature tells which columns of a dataset are used
    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            read.append({name: value.clone() for name, value in kwargs.items() if isinstance(value, torch.Tensor)})
        return own(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LlamaForCausalLM, "forward", forward)
        meta = TrainDatasetMeta(train_dataset=Dataset.from_list(rows), eval_dataset=None, total_num_steps=2)
        _, _, trainer = train(cfg=cfg, dataset_meta=meta)
    return trainer, read


def sequences(inputs):
    """The sequences of a batch, each alone and without padding."""
    for row in range(len(inputs["input_ids"])):
        ids = inputs["input_ids"][row]
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))[row] > 0
        positions = inputs["position_ids"][row] if "position_ids" in inputs else torch.arange(len(ids))
        starts = [*torch.nonzero((positions == 0) & mask)[:, 0].tolist(), len(ids)]
        for begin, end in zip(starts, starts[1:]):
            kept = mask[begin:end]
            yield ids[begin:end][kept][None]


def expected_kl(tmp_path, micro_batches):
    """The mean over all rows, of sequences that are read one by one: KL(student || teacher), the default of the plugin here."""
    teacher, student = (LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("teacher", "student"))
    total, count = 0.0, 0
    with AttentionDistiller(teacher, student, direction="reverse") as distiller, torch.no_grad():
        for inputs in micro_batches:
            for ids in sequences(inputs):
                student(input_ids=ids)
                total, count = total + distiller.loss().item() * ids.shape[1], count + ids.shape[1]
    return total / count


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_logs_the_kl_of_its_rows(tmp_path, settings, packing):
    trainer, read = run(tmp_path, {**settings, "sample_packing": packing})
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2 and len(read) == 4
    if packing:
        assert any((inputs["position_ids"] == 0).sum() > len(inputs["input_ids"]) for inputs in read)
    for entry, micro_batches in zip(entries, (read[:2], read[2:])):
        assert entry["attention_kl"] == pytest.approx(expected_kl(tmp_path, micro_batches), rel=1e-4)
        assert entry["loss"] == pytest.approx(entry["model_loss"] + 0.1 * entry["attention_kl"], rel=1e-3)


def test_lora_learns_from_its_base_model(tmp_path, settings):
    """On packed sequences, as the example has them."""
    given = {**settings, "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj"], "learning_rate": 1e-2}
    del given["attention_kl_teacher"]
    trainer, _ = run(tmp_path, given)
    first, second = (entry["attention_kl"] for entry in trainer.state.log_history if "loss" in entry)
    assert first == pytest.approx(0, abs=1e-6) and second > 1e-6


def test_a_second_trainer_plugin_is_refused(tmp_path, settings):
    for plugins in [OURS, OTHER], [OTHER, OURS]:
        with pytest.raises(ValueError, match=f"plugins: {OTHER} and {OURS} both replace axolotl's trainer"):
            run(tmp_path, {**settings, "plugins": plugins})


def test_other_trainers_are_refused(tmp_path, settings):
    PluginManager.get_instance().register(OURS)
    (plugin,) = PluginManager.get_instance().plugins.values()
    with pytest.raises(ValueError, match="reward_model=True: .* leave out reward_model or the plugin"):
        plugin.pre_model_load({**settings, "reward_model": True})
