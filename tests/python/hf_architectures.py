"""Tiny models of all text architectures of transformers, made from their config classes, and what the distiller does with them.

    python tests/python/hf_architectures.py [CLASS...]

prints a row for each class, by default all of them; docs/guide/architectures.md groups these rows.
"""

import re
import sys
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import transformers
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)  # fmt: skip

from streamkl.hf import AttentionDistiller

VOCABULARY, LENGTH = 99, 13

# Sizes by the names that configs give them. head_dim has to be that of hidden_size / heads only where it is not configured.
SIZES = dict(
    hidden_size=32, n_embd=32, d_model=32, dim=32, embedding_size=32, emb_dim=32, n_embed=32, model_dim=32, embed_dim=32,
    decoder_embed_dim=32, encoder_embed_dim=32, word_embed_proj_dim=32, embedding_dim=32, decoder_hidden_size=32,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, encoder_attention_heads=4, decoder_attention_heads=4,
    num_key_value_heads=2, num_kv_heads=2, head_dim=8, d_kv=8, attention_head_dim=8, kv_channels=8, global_head_dim=8,
    num_global_key_value_heads=2, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, v_head_dim=8,
    qk_nope_head_dim=8, qk_rope_head_dim=8, qk_head_dim=16, q_lora_rank=16, kv_lora_rank=16, swa_v_head_dim=8,
    intermediate_size=48, n_inner=48, d_ff=48, encoder_ffn_dim=48, decoder_ffn_dim=48, ffn_dim=48, hidden_dim=48, ffn_hidden_size=48,
    decoder_intermediate_size=48, encoder_intermediate_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=24,
    shared_intermediate_size=24, intermediate_size_mlp=48, moe_shared_expert_intermediate_size=24, expert_ffn_hidden_size=24,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_topk=2, top_k_experts=2,
    n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, moe_top_k=2, moe_k=2, num_expert_group=1,
    vocab_size=VOCABULARY, max_position_embeddings=64, n_positions=64, n_ctx=64, max_seq_len=64, max_source_positions=64,
    max_target_positions=64, seq_length=64, model_max_length=64, sliding_window=5, attention_window=8, local_attention=8,
    window_size=5, attention_chunk_size=5, block_size=4, num_random_blocks=1, hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCABULARY, vocab_size_or_config_json_file=VOCABULARY, rotary_dim=8, rope_dim=8, mamba_d_state=8,
    mamba_n_heads=4, mamba_d_head=16, mamba_num_heads=4, mamba_head_dim=16, mamba_d_ssm=64, ssm_state_size=8, n_mamba_heads=4,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, lru_width=32, num_memory_blocks=2,
    index_n_heads=2, index_head_dim=16, index_topk=4, num_kv_shared_layers=0, laurel_rank=8, altup_num_inputs=2, conv_dim=32,
    lightning_nope_head_dim=4, lightning_rope_head_dim=4, mamba_dt_rank=4, time_step_rank=4, num_buckets=8, num_hash_functions=2,
)  # fmt: skip
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "num_encoder_layers", "decoder_num_hidden_layers",
)  # fmt: skip
NO_CHANCE = dict(
    dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0, activation_dropout=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    attn_pdrop=0.0, dropout_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, encoder_layerdrop=0.0,
    decoder_layerdrop=0.0, layerdrop=0.0, classifier_dropout=0.0, router_jitter_noise=0.0,
)  # fmt: skip


# ---- Models that see or hear -----------------------------------------------------------------------------------------

VISION = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4)
TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
IMAGE_TOKEN = VOCABULARY - 1


def _llava():
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION), text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE_TOKEN, vision_feature_layer=-1,
    )  # fmt: skip


def _qwen():
    vision = dict(
        depth=2, hidden_size=32, num_heads=4, intermediate_size=48, out_hidden_size=32, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=1, window_size=16, fullatt_block_indexes=[1],
    )  # fmt: skip
    rope = dict(rope_type="default", mrope_section=[2, 1, 1], rope_theta=1e4)
    return transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, image_token_id=IMAGE_TOKEN, video_token_id=3,
        vision_start_token_id=4, vision_end_token_id=5,
    )  # fmt: skip


def _gemma():
    text = dict(TEXT, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    return transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text), vision_config=transformers.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4, image_token_index=IMAGE_TOKEN, boi_token_index=4, eoi_token_index=5,
    )  # fmt: skip


def _whisper():
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=10, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=1, decoder_start_token_id=1, dropout=0.0,
    )  # fmt: skip


def _wav2vec2():
    return transformers.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16), conv_kernel=(4, 4),
        conv_stride=(4, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        feat_extract_norm="layer", hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip


MEDIA = {
    "ViTModel": (lambda: transformers.ViTConfig(**VISION), {}),
    "Dinov2Model": (lambda: transformers.Dinov2Config(**VISION), {}),
    "SiglipVisionModel": (lambda: transformers.SiglipVisionConfig(**VISION), {}),
    "CLIPVisionModel": (lambda: transformers.CLIPVisionConfig(**VISION), {}),
    "LlavaForConditionalGeneration": (_llava, dict(tokens=16)),
    "Qwen2_5_VLForConditionalGeneration": (_qwen, dict(tokens=4)),
    "Gemma3ForConditionalGeneration": (_gemma, dict(tokens=4)),
    "WhisperForConditionalGeneration": (_whisper, {}),
    "Wav2Vec2Model": (_wav2vec2, {}),
}


def _media_inputs(name, padding):
    """Images, sound, and text with an image in it; the text may be padded."""
    generator = torch.Generator().manual_seed(4)
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    if name == "Wav2Vec2Model":
        mask = torch.ones(2, 160, dtype=torch.long)
        if padding == "right":
            mask[0, 100:] = 0
        return dict(input_values=torch.randn(2, 160, generator=generator), attention_mask=mask)
    if name == "WhisperForConditionalGeneration":
        text = _text_inputs(padding, generator)
        return dict(
            input_features=torch.randn(2, 8, 20, generator=generator), decoder_input_ids=text["input_ids"],
            decoder_attention_mask=text["attention_mask"],
        )  # fmt: skip
    tokens = MEDIA[name][1].get("tokens")
    if tokens is None:
        return dict(pixel_values=pixels)
    text = _text_inputs(padding, generator)
    image = torch.full((2, tokens + 1), IMAGE_TOKEN)
    image[:, 0] = 4
    ids = torch.cat([text["input_ids"][:, :6], image, text["input_ids"][:, 6:]], 1)
    mask = torch.cat([text["attention_mask"][:, :6], torch.ones_like(image), text["attention_mask"][:, 6:]], 1)
    inputs = dict(input_ids=ids, attention_mask=mask, pixel_values=pixels)
    if name.startswith("Qwen"):
        patches = pixels.unflatten(3, (4, 4)).unflatten(2, (4, 4)).permute(0, 2, 4, 1, 3, 5).reshape(32, 48)
        inputs.update(pixel_values=patches, image_grid_thw=torch.tensor([[1, 4, 4]] * 2))
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    if name.startswith("Gemma"):
        inputs["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return inputs


def all_names():
    """Causal, masked and encoder-decoder language models; a model that hears or sees needs more than text."""
    mappings = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )  # fmt: skip
    names = {}
    for mapping in mappings:
        for family, classes in mapping.items():
            for name in classes if isinstance(classes, (tuple, list)) else (classes,):
                names.setdefault(name, family)
    return names


def page_names():
    return sorted({*all_names(), *MEDIA})


def classes_of(name):
    if name in MEDIA:
        return MEDIA[name][0], getattr(transformers, name)
    return CONFIG_MAPPING[all_names()[name]], getattr(transformers, name)


class NeedsMore(Exception):
    """A model that reads more than text; the message names the parts of its config."""


def tiny_config(config_class):
    """A config of 2 layers, or of one layer of each type that its default has."""
    if not isinstance(config_class, type):
        return config_class()  # a class of MEDIA
    default = config_class()
    if config_class.sub_configs:
        inner = {name: getattr(default, name, None) for name in config_class.sub_configs}
        if set(inner) != {"encoder", "decoder"}:
            raise NeedsMore(", ".join(inner))
        made = {name: _shrunk(config) for name, config in inner.items()}
        made["decoder"].is_decoder = made["decoder"].add_cross_attention = True
        return config_class(**made, **TOKENS)
    return _shrunk(default)


TOKENS = dict(pad_token_id=0, decoder_start_token_id=0, bos_token_id=1, eos_token_id=1)


def _shrunk(default):
    given = {name: size for name, size in {**SIZES, **NO_CHANCE}.items() if _may_be_set(default, name)}
    if "qk_rope_head_dim" in given:
        given.pop("head_dim", None)  # that of RoPE, which the config derives
        given["num_key_value_heads"] = 4  # MLA: every head has its own keys
    layers = 2
    if _may_be_set(default, "layer_types", list):
        distinct = list(dict.fromkeys(default.layer_types))
        layers = max(2, len(distinct))
        given["layer_types"] = (distinct + distinct)[:layers]
    given.update({name: layers for name in LAYERS if _may_be_set(default, name)})
    if "num_encoder_layers" in given or "encoder_layers" in given:
        given.pop("num_hidden_layers", None)
    return type(default)(**{**given, **TOKENS, **EXTRAS.get(type(default).__name__, {})})


EXTRAS = {
    "ZayaConfig": dict(num_experts_per_tok=1),
    "XmodConfig": dict(default_language="en_XX"),
    "EsmcConfig": dict(num_key_value_heads=4),
    "NemotronConfig": dict(num_key_value_heads=2, head_dim=8),
    "ReformerConfig": dict(axial_pos_embds=False, is_decoder=True),
    "Mamba2Config": dict(expand=2, num_heads=4, head_dim=16),
    "GPTNeoConfig": dict(attention_types=[[["global", "local"], 1]]),
    "Gemma4AssistantConfig": dict(hidden_size_per_layer_input=0),
    "FunnelConfig": dict(block_sizes=[1, 1]),
    "LukeConfig": dict(entity_vocab_size=9, entity_emb_size=16),
    "RoCBertConfig": dict(pronunciation_vocab_size=9, shape_vocab_size=9),
    "FalconConfig": dict(num_kv_heads=2, new_decoder_architecture=True),
}


def _may_be_set(default, name, kind=(int, float)):
    """Whether a config has a number of this name, or None for a head size that its models need."""
    if isinstance(getattr(type(default), name, None), property) and getattr(type(default), name).fset is None:
        return False
    try:
        value = getattr(default, name, "absent")
    except Exception:  # differs from layer to layer
        return False
    return (isinstance(value, kind) and not isinstance(value, bool)) or (name == "head_dim" and value is None)


def tiny_model(name, seed, factor=6.0):
    """Random weights attend almost uniformly: those of matrices are scaled."""
    config_class, model_class = classes_of(name)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class._from_config(tiny_config(config_class)).parameters())
        if size > 6_000_000:
            raise ValueError(f"{size} parameters")
        model = model_class._from_config(tiny_config(config_class), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * factor / 32)
            elif not parameter.any():  # biases, and scales that start at 0
                parameter.copy_(torch.randn_like(parameter) / 8)
            else:  # of norms, which undo the factor of the matrices
                parameter.mul_(factor / 6.0)
    return model


# ---- The comparison ------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    kind: str  # exact, refused, different, not built, no weights
    reason: str = ""


KINDS = {
    "self": ("attentions", "decoder_attentions"),
    "cross": ("cross_attentions",),
    "encoder": ("encoder_attentions",),
}


def outcome_of(name):
    """Teacher and student of one architecture: padded left, right and not; eager and sdpa; all kinds of attention."""
    for factor in 6.0, 2.0, 0.5:  # with sharper attention, the logarithm of a weight is less exact
        outcome = _outcome(name, factor)
        if outcome.kind != "too sharp":
            return outcome
    return Outcome("no weights", "their logarithm is not exact")


def _outcome(name, factor):
    try:
        teacher, student = tiny_model(name, 0, factor), tiny_model(name, 1, factor)
        student(**inputs_of("none", student))
    except NeedsMore as error:
        return Outcome("not built", f"needs more than text: {error}")
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return Outcome("not built", "no tiny model from its config")
    kinds = ("self", "cross", "encoder") if student.config.is_encoder_decoder else ("self",)
    try:
        for kind in kinds:
            for padding in "none", "left", "right":
                inputs = inputs_of(padding, student)
                found_by = {
                    implementation: _distilled(teacher, student, inputs, kind)
                    for implementation in ("eager", "sdpa")
                    if _set(implementation, teacher, student)
                }
                expected = _expected(name, factor, inputs, kind)
                if isinstance(expected, Outcome):
                    return expected
                for implementation, found in found_by.items():
                    if (difference := _difference(found, expected)) is not None:
                        return Outcome("different", f"{kind}, {implementation}, padding {padding}: {difference}")
    except (ValueError, TypeError) as error:
        refusal = re.match(
            r"(?:teacher|student): (?:layer \d+ \(.*?\) )?(.*?)(?:; leave the layer out.*)?$", str(error), re.DOTALL
        )
        if refusal is None:
            raise
        return Outcome("refused", refusal[1])
    return Outcome("exact")


def _expected(name, factor, inputs, kind):
    """(losses, gradients) from the weights that the models return, in float64 if they can; otherwise an Outcome."""
    for dtype in torch.float64, torch.float32:
        try:
            expected = _from_weights([tiny_model(name, seed, factor).to(dtype) for seed in (0, 1)], inputs, kind)
            break
        except RuntimeError:
            if dtype == torch.float32:
                raise
    if expected is None:
        return Outcome("no weights", f"returns no {KINDS[kind][-1]}")
    if not all(torch.isfinite(each).all() for each in (expected[0], *expected[1].values())):
        return Outcome("too sharp")
    return expected


def inputs_of(padding, model):
    if type(model).__name__ in MEDIA:
        return _media_inputs(type(model).__name__, padding)
    inputs = _text_inputs(padding, torch.Generator().manual_seed(3))
    if model.config.is_encoder_decoder:
        ids, mask = (inputs[name].flip(0)[:, 2:] for name in ("input_ids", "attention_mask"))
        inputs.update(decoder_input_ids=ids, decoder_attention_mask=mask)
    return inputs


def _text_inputs(padding, generator):
    ids = torch.randint(6, IMAGE_TOKEN, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[0, :4] = 0
    mask = mask.flip(1) if padding == "right" else mask
    return dict(input_ids=ids.masked_fill(mask == 0, 0), attention_mask=mask)


def _set(implementation, *models):
    for model in models:
        if implementation == "sdpa" and not model._supports_sdpa:
            return False
        model.set_attn_implementation(implementation)
    return True


def _from_weights(models, inputs, kind):
    """(losses, gradients), or None if the models return no weights."""
    weights = []
    for model in models:
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")  # the others know no float64
        with mock.patch.dict(AttentionMaskInterface._global_mapping, eager=_mask_of_f32), _sink_weights(model):
            outputs = model(**inputs, output_attentions=True)
        given = next((outputs[name] for name in KINDS[kind] if outputs.get(name) is not None), ())
        weights.append([weight for weight in given if isinstance(weight, torch.Tensor) and weight.dim() == 4])
    if not weights[0] or not weights[1]:
        return None
    ids = inputs.get("decoder_input_ids" if kind != "encoder" and "decoder_input_ids" in inputs else "input_ids")
    if ids is not None and any(weight.shape[-2] != ids.shape[1] for weight in weights[0]):
        return None
    kept = _kept_rows(models[1], inputs, kind, weights[0][0])
    losses = []
    for p, s in zip(*weights):
        p = p.detach().double()
        if ((s == 0) & (p > 0)).any():
            return torch.tensor([torch.inf]), {}  # its logarithm is lost
        terms = torch.where(p > 0, p * (p.clamp_min(1e-300).log() - s.double().clamp_min(1e-300).log()), 0.0)
        losses.append(terms.sum(-1).transpose(1, 2)[kept].mean())
    torch.stack(losses).mean().backward()
    return torch.stack(losses).detach(), _gradients(models[1])


@contextmanager
def _sink_weights(model):
    """Models return weights without that of the sink, some of them normalized without it: its weight comes last here."""
    modeling = sys.modules[type(model).__module__]
    own = getattr(modeling, "eager_attention_forward", None)

    def with_sink(module, query, key, value, attention_mask, *args, **kwargs):
        output, weights = own(module, query, key, value, attention_mask, *args, **kwargs)
        if kwargs.get("s_aux") is None:
            return output, weights
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        logits = query @ key.transpose(2, 3) * kwargs["scaling"] + (0 if attention_mask is None else attention_mask)
        sink = kwargs["s_aux"][:, None, None].expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, sink], -1).softmax(-1)
        torch.testing.assert_close(output, (weights[..., :-1] @ value).transpose(1, 2), rtol=1e-4, atol=1e-4)
        return output, weights

    with mock.patch.object(modeling, "eager_attention_forward", with_sink) if own else nullcontext():
        yield


def _kept_rows(model, inputs, kind, weights):
    mask = inputs.get("attention_mask" if kind == "encoder" else "decoder_attention_mask", inputs.get("attention_mask"))
    if mask is not None and "input_values" in inputs:
        mask = model._get_feature_vector_attention_mask(weights.shape[-2], mask)
    return torch.ones(weights.shape[0], weights.shape[2], dtype=torch.bool) if mask is None else mask.bool()


def _mask_of_f32(**kwargs):
    """Some models round to float32 before the softmax, where the smallest float64 is -inf and a padded row NaN."""
    mask = eager_mask(**{**kwargs, "dtype": torch.float32})
    return None if mask is None else mask.to(kwargs["dtype"])


def _gradients(model):
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def _distilled(teacher, student, inputs, kind):
    student.zero_grad()
    with AttentionDistiller(teacher, student, attention=kind) as distiller:
        student(**inputs)
        distiller.loss().backward()
    return torch.stack(list(distiller.last_losses.values())).double(), _gradients(student)


def _difference(found, expected):
    """None: equal within 1e-4 of the loss and 1e-3 of the largest gradient."""
    if found[0].shape != expected[0].shape:
        return f"{len(found[0])} layers, {len(expected[0])} weights"
    error = ((found[0] - expected[0]).abs() / (expected[0].abs() + 1e-3)).max()
    if not error < 1e-4:
        return f"losses {found[0].tolist()} must be {expected[0].tolist()}"
    largest = max(gradient.abs().max() for gradient in expected[1].values()) + 1e-6
    for name, gradient in expected[1].items():
        error = (found[1].get(name, torch.zeros_like(gradient)) - gradient).abs().max()
        if not error <= 1e-3 * largest:
            return f"gradient of {name} differs by {error / largest:.2g} of the largest"
    return None


# ---- The page --------------------------------------------------------------------------------------------------------------

RESULTS = {
    "exact": "exact", "different": "different", "refused": "refused", "no weights": "not compared", "not built": "not tested"
}  # fmt: skip


def row_of(name, outcome):
    return f"| {name} | {RESULTS[outcome.kind]} | {outcome.reason.replace(chr(124), chr(47))} |".replace(
        "|  |", "| |"
    )


def grouped(rows):
    """Rows of result, reason and classes, from the rows of single classes."""
    results, classes = list(RESULTS.values()), {}
    for row in rows:
        name, result, reason = (cell.strip() for cell in row.strip("|").split("|"))
        reason = re.sub(r"(needs more than text): .*", r"\1", reason.replace(name, "the model"))
        classes.setdefault((results.index(result), reason), []).append(name)
    ordered = sorted(classes.items(), key=lambda group: (group[0][0], -len(group[1])))
    return [f"| {results[at]} | {reason} | {len(names)} | {', '.join(names)} |" for (at, reason), names in ordered]


def page(folder):
    """The page from the results of scripts/check-versions: NAME.versions and NAME.rows of each set of releases."""
    rows = {path.stem: path.read_text().splitlines() for path in sorted(folder.glob("*.rows"))}
    table = []
    for name in ("oldest", "pinned", "newest"):
        counts = [sum(f" | {result} | " in row for row in rows[name]) for result in RESULTS.values()]
        table.append(f"| {name} | {(folder / name).with_suffix('.versions').read_text().strip()} | {' | '.join(map(str, counts))} |")
    head = PAGE.format(table="\n".join(table), media=len(MEDIA), transformers=transformers.__version__)
    return "\n".join([head, *grouped(rows["pinned"])])


PAGE = """# Model families

What `AttentionDistiller` does with every causal, masked and encoder-decoder language model class of
transformers, and with {media} classes that see or hear. `scripts/check-versions` runs all of them,
with the proof of every layer on, and the tests of Hugging Face models with three sets of releases;
`scripts/check-versions --page` writes this page. `./test` checks a sample of it, `./test long` all.

| releases | torch | transformers | accelerate | TRL | tests | exact | different | refused | not compared | not tested |
|---|---|---|---|---|---|---:|---:|---:|---:|---:|
{table}

| result | meaning |
|---|---|
| exact | loss and gradients equal those of the float64 attention weights; eager and sdpa, padded left, right and not |
| different | they do not: a fault |
| refused | an error says why; nothing is computed |
| not compared | the model returns no attention weights of its softmax |
| not tested | the test cannot build a tiny one from its config, or it needs more than text |

The classes of transformers {transformers}, the pinned release:

| result | why | classes | names |
|---|---|---:|---|"""


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--page"]:
        print(page(Path(sys.argv[2])))
    else:
        for name in sys.argv[1:] or page_names():
            print(row_of(name, outcome_of(name)), flush=True)
