"""Students that streamkl-distill makes from a teacher: layers and heads of architectures whose layers differ."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from distill_cases import make_teacher, run, weights
from hf_models import gpt_oss
from hf_trainer_cases import make_tokenizer

from streamkl.distill import _student as sources
from streamkl.distill._make_student import (
    _config_of,
    _difference,
    _Sizes,
    _start_from,
    _with_fewer_heads,
    make_student,
)
from streamkl.distill._objective import Objective
from streamkl.distill._options import Options, UserError

SMALL = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_attention_heads=4, pad_token_id=0)
FAST = dict(steps=2, needles=0, eval_sequences=1)


def deepseek(layers=4, heads=4):
    """MLA: a head has 8 + 4 numbers of queries, 8 of values and 4 of RoPE, which config.head_dim is."""
    config = transformers.DeepseekV3Config(
        **SMALL, num_hidden_layers=layers, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM._from_config(config)


def smollm3(layers=4, heads=4):
    """Every fourth layer has no RoPE."""
    config = transformers.SmolLM3Config(**SMALL, num_hidden_layers=layers, num_key_value_heads=2)
    return transformers.SmolLM3ForCausalLM._from_config(config)


def jamba(layers=4, heads=4):
    """Every second layer attends, the others are Mamba's; the config has no list of them."""
    config = transformers.JambaConfig(
        **SMALL, num_hidden_layers=layers, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1,
        num_experts_per_tok=1, mamba_d_state=4, use_mamba_kernels=False,
    )  # fmt: skip
    return transformers.JambaForCausalLM._from_config(config)


def falcon_h1(layers=4, heads=4):
    """Attention and Mamba side by side."""
    from transformers.models.falcon_h1 import modeling_falcon_h1

    if not hasattr(modeling_falcon_h1, "create_causal_mask"):
        pytest.skip(
            "this release of transformers makes the masks of FalconH1 for its own attention implementations only"
        )
    config = transformers.FalconH1Config(
        **SMALL, num_hidden_layers=layers, num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8,
        mamba_d_state=8, mamba_chunk_size=16,
    )  # fmt: skip
    return transformers.FalconH1ForCausalLM._from_config(config)


def llava(layers=4, heads=4):
    """Its vision tower has as many layers as its language model."""
    text = dict(model_type="llama", **SMALL, num_hidden_layers=layers, num_key_value_heads=2)
    vision = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
                  num_attention_heads=4, image_size=8, patch_size=4)  # fmt: skip
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=99)
    return transformers.LlavaForConditionalGeneration._from_config(config)


def made(teacher, **options):
    return make_student(Options(**options), teacher)


@pytest.mark.parametrize(
    "make", [deepseek, smollm3, jamba, falcon_h1, gpt_oss, llava], ids=lambda make: make.__name__
)
def test_runs(tmp_path, make):
    """Layers and heads together, from folder to folder."""
    make_teacher(tmp_path, make)
    data = np.load(tmp_path / "data.npy") % 99  # 99 is the token of an image
    np.save(tmp_path / "data.npy", data)
    assert run(tmp_path, "out", **FAST) == 0
    assert len(weights(tmp_path / "out")) > 10


@pytest.mark.parametrize("how", ["mean", "pick"])
def test_heads_of_latent_attention(how):
    """Each projection has its own head size."""
    teacher = deepseek()
    student = made(teacher, student_heads=2, init_heads=how)
    (attention_t, attention_s) = (model.model.layers[3].self_attn for model in (teacher, student))
    for name, size in ("q_b_proj", 12), ("kv_b_proj", 16), ("o_proj", 8):
        weight_t, weight_s = (getattr(each, name).weight for each in (attention_t, attention_s))
        if name == "o_proj":
            weight_t, weight_s = weight_t.T, weight_s.T
        heads = weight_t.unflatten(0, (2, 2, size))
        group = heads[:, 0] if how == "pick" else heads.sum(1) if name == "o_proj" else heads.mean(1)
        torch.testing.assert_close(weight_s.unflatten(0, (2, size)), group)
    with pytest.raises(UserError, match="--student-key-heads=1: must be 0: multi-head latent attention"):
        made(teacher, student_heads=2, student_key_heads=1)


def test_fused_projection():
    """Rows of queries, then of keys, then of values."""
    config = transformers.Phi3Config(**SMALL, num_hidden_layers=1, num_key_value_heads=2)
    teacher = transformers.Phi3ForCausalLM._from_config(config)
    student = made(teacher, student_heads=2)
    (qkv_t, qkv_s) = (model.model.layers[0].self_attn.qkv_proj.weight for model in (teacher, student))
    expected = [part.unflatten(0, (-1, 2, 8)).mean(1).flatten(0, 1) for part in qkv_t.split([32, 16, 16])]
    torch.testing.assert_close(qkv_s, torch.cat(expected))


def test_sinks_of_heads():
    teacher = gpt_oss()
    student = made(teacher, student_heads=2)
    (sinks_t, sinks_s) = (model.model.layers[0].self_attn.sinks for model in (teacher, student))
    torch.testing.assert_close(sinks_s, sinks_t.unflatten(0, (2, 2)).mean(1))


@pytest.mark.parametrize("chosen", [[1, 3], [0, 1], [3, 2]])
def test_lists_by_layer(tmp_path, chosen):
    """A student layer uses RoPE where its teacher layer does: in memory, and when it is loaded again."""
    teacher = smollm3()
    assert [layer.self_attn.use_rope for layer in teacher.model.layers] == [1, 1, 1, 0]
    made(teacher, student_layers=2, init_layers=chosen).save_pretrained(tmp_path)
    student = transformers.SmolLM3ForCausalLM.from_pretrained(tmp_path)
    for i, j in enumerate(chosen):
        assert student.model.layers[i].self_attn.use_rope == teacher.model.layers[j].self_attn.use_rope


def test_periods_by_layer():
    """Layers 0 and 2 of the teacher are Mamba's: the student's, too, start from those."""
    teacher = jamba()
    student = made(teacher, student_layers=2)
    for i, j in (0, 0), (1, 3):
        a, b = (model.model.layers[at].state_dict() for model, at in ((student, i), (teacher, j)))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(UserError, match="student layer 0 is no copy of teacher layer 1: .* choose other layers"):
        made(teacher, student_layers=2, init_layers=[1, 3])


def test_options_count_the_layers_that_attend(tmp_path, capsys):
    """Layers 1, 3 and 5 attend: they are 0, 1 and 2 of --layer-weight and --layer-map, also for their hidden states."""
    options = dict(attention_weight=0.0, output_weight=0.0, hidden_weight=1.0, layer_map=[1, 0, 2])
    teacher, student, ids = jamba(6), jamba(6), torch.arange(1, 8)[None]
    losses = Objective(teacher, student, Options(**options), {})(ids)
    states_t, states_s = (
        model(input_ids=ids, output_hidden_states=True).hidden_states for model in (teacher, student)
    )
    errors = [
        (states_s[i] - states_t[j]).square().sum() / states_t[j].square().sum() for i, j in ((2, 4), (4, 2), (6, 6))
    ]
    torch.testing.assert_close(losses["hidden"], torch.stack(errors).mean())
    with pytest.raises(
        UserError, match=r"--layer-map=\[3\]: the student has 3 layers that attend, and the teacher 3"
    ):
        Objective(teacher, student, Options(**options | dict(layer_map=[3])), {})
    make_teacher(tmp_path, jamba)
    all_layers = dict(student_layers=4, student_heads=4, **FAST)
    assert run(tmp_path, "out", layer_weight="0,1", **all_layers) == 0
    assert run(tmp_path, "out", "--overwrite", layer_weight="0,1,0,1", **all_layers) == 2
    assert "must have 2 numbers, one per student layer that attends" in capsys.readouterr().err


def test_vision_tower_stays():
    """Its layers are no layers of the language model."""
    teacher = llava()
    student = made(teacher, student_layers=2)
    assert student.config.text_config.num_hidden_layers == 2 and student.config.vision_config.num_hidden_layers == 4
    a, b = (model.model.vision_tower.state_dict() for model in (student, teacher))
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_encoder_decoders_are_refused():
    config = transformers.T5Config(vocab_size=100, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8)
    with pytest.raises(
        UserError, match="T5ForConditionalGeneration is an encoder-decoder: pass a student of your own"
    ):
        made(transformers.T5ForConditionalGeneration._from_config(config), student_layers=1)


def test_another_tokenizer_of_the_same_size(tmp_path, capsys):
    """The student's tokenizer has the same number of tokens, and two of them change places."""
    make_teacher(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "teacher")
    student = dict(student=tmp_path / "student", student_layers=None, student_heads=None)
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "teacher").save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    assert run(tmp_path, "same", **FAST, **student) == 0
    path = tmp_path / "student/tokenizer.json"
    path.write_text(path.read_text().replace('"w1":', '"w?":').replace('"w2":', '"w1":').replace('"w?":', '"w2":'))
    capsys.readouterr()
    assert run(tmp_path, "other", **FAST, **student) == 2
    error = capsys.readouterr().err
    assert (
        f"--student {tmp_path / 'student'}: its tokenizer differs" in error and "token 4 is 'w2', not 'w1'" in error
    )


class TwoWords:
    """A tokenizer that splits every text in the same way."""

    def __init__(self, split):
        self.split = split

    def get_vocab(self):
        return {"a": 0, "b": 1}

    def __call__(self, text, add_special_tokens):
        return {"input_ids": self.split}


def test_a_tokenizer_that_splits_other_words(monkeypatch):
    """Vocabularies may be equal where merges are not."""
    options = Options(student="folder")
    monkeypatch.setattr(sources, "_tokenizer_of", lambda given: TwoWords([0, 1]))
    sources.check_tokenizers(options, TwoWords([0, 1]))
    with pytest.raises(UserError, match=r"its tokenizer splits .* into \[0, 1\], and that of the data into \[1, 0\]"):
        sources.check_tokenizers(options, TwoWords([1, 0]))


def test_a_gguf_file_names_its_folder(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(sources, "find_spec", lambda name: name)
    assert sources._find("teacher", str(tmp_path / "a.gguf")) == (tmp_path, dict(gguf_file="a.gguf"))


def test_a_model_without_its_quantization():
    """The result can be saved, in the precision that is asked for."""
    model = smollm3()
    model.config.quantization_config = dict(quant_method="gguf")
    found = sources._without_quantization(model, torch.bfloat16)
    assert "quantization_config" not in found.config.to_dict() and found.dtype == torch.bfloat16
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(model.parameters(), found.parameters()))


def test_progress_bars_stay_off():
    logging = transformers.utils.logging
    assert logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with sources.without_bars():
            pass
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()


# ---- Teachers that no student is made of -------------------------------------------------------------------------------


class FourLayers(transformers.LlamaForCausalLM):
    """Ignores the number of layers of its config."""

    def __init__(self, config):
        config.num_hidden_layers = 4
        super().__init__(config)


class FourHeads(transformers.LlamaForCausalLM):
    def __init__(self, config):
        if config.num_attention_heads != 4:
            raise ValueError("four heads")
        super().__init__(config)


class TwoStacks(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.more = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in self.model.layers)


@pytest.mark.parametrize("kind, options, message", [
    (FourLayers, dict(student_layers=2), "--student-layers=2: FourLayers still has 4 layers"),
    (FourHeads, dict(student_heads=2), "FourHeads does not run with 4 layers, 2 heads and 2 key heads: ValueError"),
    (TwoStacks, dict(student_layers=2), "TwoStacks has 2 lists of 4 layers, not one"),
    (FourLayers, dict(student_heads=2, student_key_heads=4), "--student-key-heads=4: must divide 2, the student's heads"),
])  # fmt: skip
def test_teachers_that_do_not_follow_their_config(kind, options, message):
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=4)
    with pytest.raises(UserError, match=message):
        made(kind._from_config(config), **options)


def test_numbers_of_layers_in_a_config():
    """The student's layers have the numbers of their own places."""
    teacher = smollm3()
    teacher.config.mlp_only_layers = [1, 3]
    sizes = _Sizes(Options(student_layers=3), teacher)
    assert _config_of(teacher, sizes, [0, 1, 3]).mlp_only_layers == [1, 2]


class Weight(torch.nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape))


def test_layers_that_are_no_copies():
    sizes = SimpleNamespace(has_other_heads=False, has_rope=True)
    assert _difference(torch.nn.ReLU(), torch.nn.GELU(), sizes) == "the layer is a GELU, not a ReLU"
    assert _difference(Weight(2, 3), Weight(3, 2), sizes) == "its weights have other shapes"
    assert _difference(Weight(2, 3), Weight(2, 3), sizes) == ""


def test_weights_that_are_not_known():
    sizes = SimpleNamespace(heads_t=4, heads=2, key_heads_t=2, key_heads=1)
    with pytest.raises(UserError, match="weight: the teacher has no such weight"):
        _start_from(Weight(2), torch.nn.ReLU(), "layers", [], sizes, pick=False)
    with pytest.raises(UserError, match=r"gate is \[4, 3\] in the teacher and \[2, 3\] .* a head's is not known"):
        _with_fewer_heads("gate", torch.zeros(4, 3), torch.Size([2, 3]), sizes, pick=False)
