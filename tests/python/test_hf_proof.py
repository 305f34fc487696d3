"""The first batch proves the model of every layer: an attention that does anything else is refused, with the reason."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from cases import LONG, OnGpu
from hf_models import batch, gemma2, gpt_oss, llama, llama4, loss_of
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from streamkl.hf import AttentionDistiller, _proof, capture
from streamkl.hf._keys import Keys, Refused, keys_in_window, keys_of_function, keys_of_sequences, keys_of_tensor
from streamkl.hf._layers import KeyReader, _of_layers, _read_flash
from streamkl.hf._pair_proof import _prove
from streamkl.hf._pairs import RowCache
from streamkl.hf._rows import pack_rows

# ---- Attention that differs from its arguments -----------------------------------------------------------------------


def _bias(module, query, key, value, mask, **kwargs):
    distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    return sdpa_attention_forward(module, query, key, value, mask + 0.1 * distance.clamp(max=0), **kwargs)


def _unmodeled_mask(module, query, key, value, mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value, 0 * mask, **kwargs)


def _wider_window(module, query, key, value, mask, **kwargs):
    wider = mask.clone()
    wider[..., :-1] = torch.where(mask[..., 1:] == 0, 0.0, mask[..., :-1])
    return sdpa_attention_forward(module, query, key, value, wider, **kwargs)


def _narrower_window(module, query, key, value, mask, **kwargs):
    narrower = torch.where(mask.roll(1, 3) == 0, mask, torch.finfo().min)
    return sdpa_attention_forward(module, query, key, value, narrower, **kwargs)


def _chunks_of_three(module, query, key, value, mask, **kwargs):
    chunk = torch.arange(key.shape[2]) // 3
    mask = mask.masked_fill(chunk[:, None] != chunk, torch.finfo().min)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _no_sink(module, query, key, value, mask, s_aux=None, **kwargs):
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _another_scale(module, query, key, value, mask, scaling=None, **kwargs):
    return sdpa_attention_forward(module, query, key, value, mask, scaling=1.0, **kwargs)


def _dropout(module, query, key, value, mask, dropout=0.0, **kwargs):
    return sdpa_attention_forward(module, query, key, value, mask, dropout=0.3, **kwargs)


def _other_keys(module, query, key, value, mask, **kwargs):
    return sdpa_attention_forward(module, query, 1.1 * key, value, mask, **kwargs)


def _other_value_heads(module, query, key, value, mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value.roll(1, 1), mask, **kwargs)


ODD = {
    "a position bias": (llama, _bias, "adds a bias to the logits, or reads other"),
    "an unmodeled mask": (llama, _unmodeled_mask, "it attends to all keys"),
    "a wider window": (lambda: gemma2(window=5), _wider_window, "its window is one key wider"),
    "a narrower window": (lambda: gemma2(window=5), _narrower_window, "its window is one key narrower"),
    "wrong chunks": (llama4, _chunks_of_three, "reads other"),
    "a sink that is left out": (gpt_oss, _no_sink, "it leaves out its attention sink"),
    "another scale": (llama, _another_scale, "its scale is 1, not 0.35"),
    "dropout in eval mode": (llama, _dropout, "adds a bias to the logits, or reads other"),
    "other keys": (llama, _other_keys, "reads other queries, keys or values"),
    "other value heads": (llama, _other_value_heads, "reads other queries, keys or values"),
}


@pytest.mark.parametrize("role", ["teacher", "student"])
@pytest.mark.parametrize("name", ODD)
def test_attention_that_differs_from_its_arguments_is_refused(name, role):
    make, attention, reason = ODD[name]
    transformers.AttentionInterface.register("odd", attention)
    transformers.AttentionMaskInterface.register("odd", eager_mask)
    models = dict(teacher=make(), student=make())
    if make is not gpt_oss:
        models[role].config.attn_logit_softcapping = None  # sdpa has no softcap
        for layer in models[role].model.layers:
            layer.self_attn.attn_logit_softcapping = None
    models[role].set_attn_implementation("odd")
    refusal = rf"{role}: layer \d \(model.layers.\d.self_attn\) does not compute softmax\(q k\) v.*head \d, row \d+.*{reason}"
    with pytest.raises(ValueError, match=refusal):
        loss_of(models["teacher"].eval(), models["student"].eval(), batch("right"))
    assert loss_of(models["teacher"], models["student"], batch("right"), verify="never") > 0


def test_dropout_in_eval_mode_is_named():
    """The module passes its dropout on, whatever its mode is."""
    teacher, student = llama(), llama().eval()

    def always(module, query, key, value, mask, dropout=0.0, **kwargs):
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, **kwargs)

    transformers.AttentionInterface.register("odd", always)
    student.set_attn_implementation("odd")
    layer = student.model.layers[0].self_attn
    own = layer.forward

    def forward(*args, **kwargs):
        name = student.config._attn_implementation
        function = transformers.AttentionInterface()[name]
        transformers.AttentionInterface.register(name, lambda *a, **k: function(*a, **{**k, "dropout": 0.3}))
        try:
            return own(*args, **kwargs)
        finally:
            transformers.AttentionInterface.register(name, function)

    layer.forward = forward
    with pytest.raises(ValueError, match=r"student: layer 0 .* it has a dropout of 0.3 in eval mode"):
        loss_of(teacher, student, batch())


def test_wrong_lses_are_refused(monkeypatch):
    from streamkl.hf import _attention

    own = _attention._sdpa_with_lse

    def off_by_a_key(*args, **kwargs):
        answer, lse = own(*args, **kwargs)
        return answer, None if lse is None else lse + 0.01

    monkeypatch.setattr(_attention, "_sdpa_with_lse", off_by_a_key)
    with pytest.raises(ValueError, match=r"returns LSEs of other logits or keys: .* at head \d, row"):
        loss_of(llama(key_heads=4), llama(key_heads=4), batch())


def test_dropout_in_training_is_no_error():
    teacher, student, inputs = llama(implementation="eager"), llama(implementation="eager").train(), batch("left")
    for layer in student.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert loss_of(teacher, student, inputs) > 0
    student.set_attn_implementation("sdpa")
    assert loss_of(teacher, student, inputs) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [llama, gemma2, gpt_oss])
def test_rounding_is_no_error(make, dtype):
    for padding in "none", "left":
        assert loss_of(make().to(dtype), make().to(dtype), batch(padding, length=200)) > 0


# ---- When it is proven -----------------------------------------------------------------------------------------------


def _prove_count(monkeypatch):
    from streamkl.hf import _layers

    proven, own = [], _layers.prove
    monkeypatch.setattr(_layers, "prove", lambda *args: proven.append(args) or own(*args))
    return proven


@pytest.mark.parametrize(
    "verify, counts", [("first", [4, 4, 8, 12]), ("always", [4, 8, 12, 16]), ("never", [0, 0, 0, 0])]
)
def test_every_new_kind_of_batch_is_proven(monkeypatch, verify, counts):
    proven, student = _prove_count(monkeypatch), llama()
    with AttentionDistiller(llama(), student, verify=verify) as distiller:
        for expected, inputs in zip(
            counts, (batch(), batch(seed=1), batch("left", length=40), batch("left", length=40))
        ):
            if expected == 12 and verify == "first":
                distiller.reset()
            student(**inputs)
            distiller.loss()
            assert len(proven) == expected


def test_a_refused_layer_stays_refused():
    """Also for the second distiller of a student, and in the second step."""
    transformers.AttentionInterface.register("odd", _another_scale)
    transformers.AttentionMaskInterface.register("odd", eager_mask)
    student = llama(implementation="odd")
    with AttentionDistiller(llama(), student) as one, AttentionDistiller(llama(), student) as two:
        for _ in range(2):
            student(**batch())
            for distiller in one, two:
                with pytest.raises(ValueError, match="its scale is 1"):
                    distiller.loss()


FAULTY, RIGHT = (_another_scale, "its scale is 1"), (sdpa_attention_forward, None)


@pytest.mark.parametrize(
    "attention, reason, dropout", [(*FAULTY, 0.0), (*RIGHT, 0.5), *([(*FAULTY, 0.5), (*RIGHT, 0.0)] if LONG else [])]
)
def test_a_compiled_model_is_proven(attention, reason, dropout):
    """With dropout, the proof runs the attention of the last sequence again."""
    transformers.AttentionInterface.register("odd", attention)
    transformers.AttentionMaskInterface.register("odd", eager_mask)
    student = llama(implementation="odd").train()
    for layer in student.model.layers:
        layer.self_attn.attention_dropout = dropout
    compiled = torch.compile(student, backend="eager")
    with AttentionDistiller(llama(), compiled) as distiller:
        compiled(**batch("left"), use_cache=False)
        if reason is None:
            assert distiller.loss() > 0 and len(distiller.student._recorder._proven) == len(student.model.layers)
            return
        with pytest.raises(ValueError, match=reason):
            distiller.loss()


# ---- Masks -----------------------------------------------------------------------------------------------------------


def _same(keys, shown):
    """Keys of all rows against a boolean mask."""
    assert torch.equal(keys.of_rows(torch.arange(keys.len_q))[:, 0].expand_as(shown), shown)


def test_keys_with_other_gaps_differ():
    a, b, c = (keys_of_tensor(torch.tensor([[1, *gap, 1]]), 4, 4) for gap in ([1, 0], [0, 1], [1, 0]))
    assert a.equals(c) and not a.equals(b)


def test_equal_keys():
    keys = keys_in_window(float("inf"), 0, 4, 4, "cpu")
    assert keys.both(keys) is keys
    assert not keys.equals(keys_in_window(float("inf"), 0, 3, 4, "cpu"))
    assert not keys.equals(keys_of_tensor(torch.tensor([[1, 1, 1, 0]]), 4, 4))


@pytest.mark.parametrize("shape, message", [
    ((2, 3), r"receives an attention mask \[2, 3\] for 4 keys"),
    ((2, 1, 3, 4), r"receives an attention mask \[2, 1, 3, 4\] for 4 queries and 4 keys"),
    ((2, 4, 4), r"receives an attention mask \[2, 4, 4\] for 4 queries and 4 keys"),
])  # fmt: skip
def test_masks_of_other_sizes(shape, message):
    with pytest.raises(Refused, match=message):
        keys_of_tensor(torch.ones(shape), 4, 4)


def call_with(mask, len_q=4, len_k=4):
    query, key = torch.zeros(1, 1, len_q, 2), torch.zeros(1, 1, len_k, 2)
    return SimpleNamespace(query=query, key=key, mask=mask, causal=True, implementation="sdpa", options={})


def test_masks_of_other_kinds():
    """A BlockMask is evaluated; a static cache and anything else are refused."""
    causal = SimpleNamespace(mask_mod=lambda b, h, q, k: k <= q)
    _same(KeyReader(None)(call_with(causal)), torch.ones(1, 4, 4).tril().bool())
    with pytest.raises(Refused, match="has 4 queries and 6 keys of a static cache"):
        KeyReader(None)(call_with(None, len_k=6))
    with pytest.raises(Refused, match="receives an attention mask of type str, which cannot be evaluated"):
        KeyReader(None)(call_with("causal"))


def test_ranges_that_move_backward():
    keys = Keys(torch.tensor([[1, 0]]), torch.tensor([[2, 1]]), None, 2)
    with pytest.raises(ValueError, match="layer 0: the keys of row 1 of sequence 0 begin or end before those of the row above"):
        pack_rows(keys, None, 1, "layer 0")


def test_an_output_of_another_shape_is_refused():
    """The heads are one dimension already."""
    transformers.AttentionInterface.register(
        "odd", lambda *given, **more: (sdpa_attention_forward(*given, **more)[0].flatten(2), None)
    )
    transformers.AttentionMaskInterface.register("odd", eager_mask)
    student = llama().eval()
    student.set_attn_implementation("odd")
    with pytest.raises(ValueError, match=r"returns an output \[2, 17, 32\] for \[2, \d, 4, 8\] of softmax\(q k\) v"):
        loss_of(llama(), student, batch())


def test_a_proof_that_is_forgotten_after_the_forward_is_made_by_the_next_one():
    """Two distillers share the models, and one of them forgets what is proven."""
    teacher, student, inputs = llama(), llama(), batch()
    with AttentionDistiller(teacher, student) as one, AttentionDistiller(teacher, student) as other:
        probed = []
        for resets in False, True, False:
            student(**inputs)
            probed.append([call.probe is not None for call in other.student.step.calls])
            if resets:
                one.reset()
            assert other.loss() > 0
    assert probed == [[True, True], [False, False], [True, True]]


def test_models_in_float64_are_refused():
    with pytest.raises(ValueError, match=r"computes in torch.float64: must be torch.float32, torch.float16 or"):
        loss_of(llama().double(), llama(), batch())


def test_closed_forms_are_those_of_the_evaluation():
    from transformers import masking_utils as masks

    def evaluated(function, length):
        return keys_of_function(function, 2, length, length, "cpu")

    number = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
    for closed, function in (
        (keys_in_window(float("inf"), 0, 9, 9, "cpu"), masks.causal_mask_function),
        (keys_in_window(3, 0, 9, 9, "cpu"), masks.sliding_window_causal_mask_function(4)),
        (keys_in_window(float("inf"), float("inf"), 9, 9, "cpu"), masks.bidirectional_mask_function),
        (keys_of_sequences(number), masks.packed_sequence_mask_function(number)),
    ):
        assert evaluated(function, 9).equals(closed) or evaluated(function, 9).begin.eq(closed.begin).all()
        assert evaluated(function, 9).end.eq(closed.end).all()


def test_random_masks():
    """Any mask of one range per row is read exactly; any other one is refused, with its first such row."""
    generator = torch.Generator().manual_seed(1)
    refused = 0
    for _ in range(200):
        length = int(torch.randint(1, 9, (), generator=generator))
        shown = torch.rand(2, length, length, generator=generator) < 0.8
        if torch.rand((), generator=generator) < 0.7:
            ends = torch.randint(0, length + 1, (2, 2, length), generator=generator).sort(0).values
            key = torch.arange(length)
            shown = (key >= ends[0][..., None]) & (key < ends[1][..., None]) & shown[:, :1]
        hidden = torch.finfo(torch.float32).min
        try:
            keys = keys_of_tensor(torch.where(shown, 0.0, hidden)[:, None], length, length)
        except Refused as error:
            refused += 1
            assert "attends to more than one range of keys: row" in str(error)
            columns = shown.any(1)
            assert any(
                len(set((columns[b].nonzero()[:, 0][None] == shown[b, i].nonzero()).nonzero()[:, 1].diff().tolist()) - {1})
                for b in range(2) for i in range(length)
            )  # fmt: skip
            continue
        _same(keys, shown)
        _same(keys_of_function(lambda b, h, q, k: shown[b, q, k], 2, length, length, "cpu"), shown)
    assert 20 < refused < 150


def test_four_dimensional_masks():
    """A causal mask as a tensor, blocks of it, and a mask with two ranges."""
    teacher, student, inputs = llama().eval(), llama().eval(), batch()
    causal = torch.ones(3, 1, 17, 17).tril().bool()
    expected = loss_of(teacher, student, inputs)
    torch.testing.assert_close(loss_of(teacher, student, dict(inputs, attention_mask=causal)), expected)
    blocks = causal & (torch.arange(17)[:, None] // 6 == torch.arange(17) // 6)
    packed = dict(input_ids=inputs["input_ids"], position_ids=(torch.arange(17) % 6).expand(3, -1), use_cache=False)
    torch.testing.assert_close(
        loss_of(teacher, student, dict(packed, attention_mask=blocks)), loss_of(teacher, student, packed)
    )
    two = causal.clone()
    two[1, 0, 9:, 3] = False
    with pytest.raises(
        ValueError, match=r"attends to more than one range of keys: row 9 of sequence 1 sees 9 of the keys 0..9"
    ):
        loss_of(teacher, student, dict(inputs, attention_mask=two))


def test_rows_of_padding_that_attend_to_padding():
    """They do not count, whatever the model shows them; FalconH1 of transformers 5.0 does so."""
    inputs = batch("left")

    def generous(*args, **kwargs):
        hidden = inputs["attention_mask"] == 0
        between = (hidden[:, None, :, None] & hidden[:, None, None]).tril()
        return eager_mask(*args, **kwargs).masked_fill(between, 0.0)

    transformers.AttentionInterface.register("odd", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register("odd", generous)
    teacher, student = llama(), llama()
    expected = loss_of(teacher, student, inputs)
    teacher.set_attn_implementation("odd")
    student.set_attn_implementation("odd")
    torch.testing.assert_close(loss_of(teacher, student, inputs), expected)


def test_biases_in_a_mask_are_refused():
    with pytest.raises(Refused, match="adds a bias to its logits"):
        keys_of_tensor(torch.randn(1, 1, 5, 5), 5, 5)
    shown = torch.ones(1, 2, 5, 5, dtype=torch.bool).tril()
    shown[0, 1, 4, 0] = False
    with pytest.raises(Refused, match="another attention mask for each head"):
        keys_of_tensor(shown, 5, 5)


def test_flex_attention():
    """A BlockMask is evaluated through its function."""
    from torch.nn.attention.flex_attention import create_block_mask

    block = create_block_mask(lambda b, h, q, k: (k <= q) & (k > q - 3), 2, None, 9, 9, device="cpu")
    _same(keys_of_function(block.mask_mod, 2, 9, 9, "cpu"), torch.ones(2, 9, 9).tril().triu(-2).bool())


@pytest.mark.parametrize("bounds", [None, [0, 4, 9]])
@pytest.mark.parametrize("mask", [None, [[1] * 7 + [0] * 2]])
@pytest.mark.parametrize("causal, window", [(False, None), (False, 3), (True, None), (True, 3)])
def test_flash_attention_takes_its_keys_as_arguments(causal, window, mask, bounds):
    token = torch.arange(9)
    apart, shown = token[:, None] - token, torch.ones(1, 9, 9, dtype=torch.bool)
    shown &= (apart >= 0) | (not causal)
    shown &= apart.abs() < (window or 9)
    if mask is not None:
        mask = torch.tensor(mask)
        shown &= mask.bool()[:, None]
    if bounds is not None:
        shown &= (token[:, None] < 4) == (token < 4)
        bounds = torch.tensor(bounds)
    _same(_read_flash(mask, causal, window, bounds, 9, 9, "cpu"), shown)


@pytest.mark.parametrize("model", ["teacher", "student"])
def test_a_pair_is_proven_on_the_queries_of_both_models(model):
    """Also where neither gives LSEs."""
    student = llama()
    with AttentionDistiller(llama(), student) as distiller:
        student(**batch())
        pair = next(iter(distiller.pairs().values()))
        tensors, options, rows = pair.arguments_to_prove(RowCache())
        at = 0 if model == "teacher" else 2
        other = [*tensors[:at], tensors[at].roll(1, -1), *tensors[at + 1 :]]
        with pytest.raises(RuntimeError, match="would be compared with other queries"):
            _prove(pair, other, {**options, "lse_t": None, "lse_s": None}, rows)


def proven(inputs, change):
    """Proves a pair whose arguments a fault has changed."""
    teacher, student = llama(), llama()
    with AttentionDistiller(teacher, student) as distiller:
        student(**inputs)
        pair = next(iter(distiller.pairs().values()))
        tensors, options, rows = pair.arguments_to_prove(RowCache())
        change(options, rows)
        return _prove(pair, tensors, options, rows)


def later_keys(options, rows):
    """Each sequence has the keys of the next one."""
    rows.keys.order = (rows.keys.order + 17) % 51


def lses_of_the_teacher(options, rows):
    if options["lse_t"] is None:
        pytest.skip("the attention of this torch returns no LSEs")
    options["lse_s"] = options["lse_t"]


@pytest.mark.parametrize("padding, change, fault", [
    ("none", lambda options, rows: options.update(window_size=(3, 0)), "other keys"),
    ("none", lses_of_the_teacher, "LSEs of other keys"),
    ("left", later_keys, "other keys"),
])  # fmt: skip
def test_a_pair_is_proven_on_its_keys_and_lses(padding, change, fault):
    with pytest.raises(RuntimeError, match=f"would be compared with {fault} than the layers have"):
        proven(batch(padding), change)
    assert proven(batch(padding), lambda options, rows: None) == 0


def test_calls_of_one_layer():
    """One with two sets of values has the same queries and keys twice; one in parts has parts of its queries."""
    twice, parts, plain = (torch.randn(2, 1, 4, 8) for _ in range(3))
    calls = [
        SimpleNamespace(module=module, query=query, key=key)
        for module, query, key in (
            ("twice", twice, twice), ("twice", twice, twice), ("parts", parts[:1], parts[:1]), ("parts", parts[1:], parts[1:]),
            ("plain", plain, plain), ("again", plain[:1], plain),
        )
    ]  # fmt: skip
    assert [(call.module, count) for call, count in _of_layers(calls)] == [
        ("twice", 1), ("parts", 2), ("plain", 1), ("again", 1)
    ]  # fmt: skip


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tf32_of_a_gpu_widens_the_bound_of_f32(dtype, allowed, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=allowed))
    output = torch.zeros(1, dtype=dtype).as_subclass(OnGpu)
    bound = _proof._Proof._bound(SimpleNamespace(output=output, call=SimpleNamespace(query=output)))
    assert bound == (_proof._TF32 if allowed and dtype == torch.float32 else _proof._ROUNDING[dtype])


def test_captured_layers_say_why(monkeypatch):
    student = llama()
    with capture(student) as layers, torch.no_grad():
        mask = torch.ones(3, 1, 17, 17).bool()
        mask[..., ::2] &= torch.arange(17)[:, None] % 2 == 0
        student(**dict(batch(), attention_mask=mask))
    assert "more than one range" in layers[0].refusal and copy.copy(layers[0]).keys is None
    transformers.AttentionInterface.register("odd", _another_scale)
    transformers.AttentionMaskInterface.register("odd", eager_mask)
    student.set_attn_implementation("odd")
    with capture(student) as layers, torch.no_grad():
        student(**batch())
    assert "its scale is 1, not 0.35" in layers[0].refusal
