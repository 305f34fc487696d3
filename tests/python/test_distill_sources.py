"""streamkl-distill: models of the Hub and of GGUF files, and trackers."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from distill_cases import arguments, make_teacher, run

from streamkl.distill._options import Options
from streamkl.distill._student import load_teacher


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("sources"))


# ---- The Hub ---------------------------------------------------------------------------------------------------------


def test_a_model_of_the_hub_comes_from_the_cache(folder, tmp_path):
    """A snapshot as huggingface_hub keeps it, without a network."""
    place = tmp_path / "hub/models--someone--tiny"
    snapshot = place / "snapshots/0123456789012345678901234567890123456789"
    snapshot.parent.mkdir(parents=True)
    os.symlink(folder / "teacher", snapshot)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(snapshot.name)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "streamkl.distill", *arguments(folder, "hub", "--dry-run")]
    for name, status, message in (
        ("someone/tiny", 0, "4 layers"),
        ("someone/else", 2, "--teacher someone/else: is no folder, and cannot be had"),
    ):
        command[command.index("--teacher") + 1] = name
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert answer.returncode == status and message in answer.stdout + answer.stderr, answer.stderr[-2000:]


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def write_gguf(path, model):
    """In float32, with the order of rows that llama.cpp has for queries and keys."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    names = dict(
        q_proj="attn_q", k_proj="attn_k", v_proj="attn_v", o_proj="attn_output", gate_proj="ffn_gate", up_proj="ffn_up",
        down_proj="ffn_down", input_layernorm="attn_norm", post_attention_layernorm="ffn_norm",
    )  # fmt: skip
    tops = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    for name, weight in model.state_dict().items():
        parts, values = name.split("."), weight.float().numpy()
        if parts[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if parts[-2] == "q_proj" else config.num_key_value_heads
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
            values = split.swapaxes(1, 2).reshape(values.shape)
        made = tops[name] if name in tops else f"blk.{parts[2]}.{names[parts[-2]]}"
        writer.add_tensor(f"{made}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_teacher(folder, tmp_path):
    """It computes what the folder computes, and a student can be made from it, trained and saved."""
    pytest.importorskip("gguf")
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "teacher")
    path = tmp_path / "teacher.gguf"
    write_gguf(path, model)
    loaded, ids = load_teacher(Options(teacher=str(path)), False), torch.arange(60)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert run(folder, "gguf", teacher=path, tokenizer=folder / "teacher", steps=1, needles=0, eval_sequences=1) == 0
    assert transformers.LlamaForCausalLM.from_pretrained(folder / "gguf/student").config.num_hidden_layers == 2


def test_gguf_without_its_package(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("streamkl.distill._student.find_spec", lambda name: None)
    (tmp_path / "teacher.gguf").write_bytes(b"GGUF")
    assert run(folder, "no-gguf", teacher=tmp_path / "teacher.gguf") == 2
    assert "teacher.gguf: needs the package gguf: pip install gguf" in capsys.readouterr().err


# ---- Trackers --------------------------------------------------------------------------------------------------------


def test_tensorboard(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(folder, "tracked", "--track", "tensorboard", eval_every=3, needles=0) == 0
    events = EventAccumulator(str(folder / "tracked/streamkl-distill")).Reload()
    log = [json.loads(line) for line in (folder / "tracked/log.jsonl").read_text().splitlines()]
    for name in "loss", "attention", "held_out_loss":
        expected = [(entry["step"], pytest.approx(entry[name])) for entry in log if name in entry]
        assert [(event.step, event.value) for event in events.Scalars(name)] == expected


def test_wandb(folder, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run(folder, "wandb", "--report-to", "wandb", needles=0, steps=2) == 0
    assert list((folder / "wandb/wandb").glob("offline-run-*/*.wandb"))


def test_a_tracker_that_is_not_installed(folder, monkeypatch, capsys):
    monkeypatch.setattr("streamkl.distill._device.get_available_trackers", list)
    assert run(folder, "untracked", "--track", "wandb") == 2
    assert "--track wandb: must be one of none, which are installed; pip install wandb?" in capsys.readouterr().err
