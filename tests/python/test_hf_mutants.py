"""Faults planted into the code that captures layers and reads masks: the distiller itself finds each of them, without a test."""

import inspect
import sys
import textwrap

import pytest
import torch
from cases import LONG
from hf_models import batch, bert, gemma2, gpt_oss, llama, llama4

from streamkl.hf import AttentionDistiller, _attention, _capture, _keys, _layers, _pairs, _proof, _rows

# (what it does, where, the text, what replaces it)
MUTANTS = [
    ("a wider window", _keys.keys_of_tensor, "keys.begin.expand(-1, len_q)", "(keys.begin - 1).clamp(min=0).expand(-1, len_q)"),
    ("a narrower window", _keys._evaluate, "argmax(-1), 0)", "argmax(-1) + (seen.sum(-1) > 4), 0)"),
    ("one key ahead", _keys.keys_in_window, "int(right) + 1", "int(right) + 2"),
    ("one key too few", _keys.keys_in_window, "int(right) + 1", "int(right)"),
    ("rows off by one", _keys.keys_of_tensor, "mask[..., :len_k]", "mask[..., :len_k].roll(1, 2)"),
    ("a mask that is ignored", _layers._read, "return keys_of_tensor(mask, len_q, len_k)", "return keys_in_window(math.inf, 0, len_q, len_k, device)"),
    ("a causal mask for a bidirectional model", _layers._read, "0 if causal else math.inf", "0"),
    ("no causal mask", _layers._read, "0 if causal else math.inf", "math.inf"),
    ("padding that is shown", _keys._evaluate, "Keys(begin, end, None if bool(shown.all()) else shown, len_k)", "Keys(begin * 0, end, None, len_k)"),
    ("the mask of the first sequence for all", _keys.keys_of_tensor, "mask.stride(dimension) == 0", "dimension == 0"),
    ("another scale", _proof.scale_of, "float(call.scale)", "1.01 * float(call.scale)"),
    ("no softcap", _attention.record_attention, 'kwargs.get("softcap") or 0.0', "0.0"),
    ("no sink", _attention.record_attention, 'kwargs.get("s_aux")', "None"),
    ("sinks of other heads", _attention.record_attention, "sink.clone()", "sink.roll(1)"),
    ("queries of other heads", _attention.record_attention, "recorder.step.calls.append(call)", "recorder.step.calls.append(replace(call, query=call.query.roll(1, 1)))"),
    ("keys of other heads", _attention.record_attention, "recorder.step.calls.append(call)", "recorder.step.calls.append(replace(call, key=call.key.roll(1, 1)))"),
    ("keys of another position", _attention.record_attention, "recorder.step.calls.append(call)", "recorder.step.calls.append(replace(call, key=call.key.roll(1, 2)))"),
    ("queries of another sequence", _attention.record_attention, "recorder.step.calls.append(call)", "recorder.step.calls.append(replace(call, query=call.query.roll(1, 0)))"),
    ("values of another sequence", _attention.record_attention, "recorder.step.calls.append(call)", "recorder.step.calls.append(replace(call, value=call.value if call.value is None else call.value.roll(1, 0)))"),
    ("LSEs of other heads", _attention.record_attention, "= lse, handle, apart", "= None if lse is None else lse.roll(1, 1), handle, apart"),
    ("tensors that change after the capture", _capture.Capture.take, "self._step, self._layers = step, None", "[call.key.data.mul_(1.1) for call in step.calls]; self._step, self._layers = step, None"),
    ("stale queries", _attention.record_attention, "recorder.step.calls.append(call)", "recorder.step.calls.append(replace(call, query=(recorder.step.calls or [call])[-1].query))"),
    ("LSEs of other keys", _pairs.RowCache.common, "(s.both(t), False)", "(s.both(t), True)"),
    ("all keys are compared", _pairs.RowCache.common, "(s.both(t), False)", "(s, False)"),
    ("rows that are not sorted by sequence", _rows._pack, "side.order)", "side.order.flip(0))"),
    ("packed windows off by one", _rows._masks, "window_size=(left, right)", "window_size=(left - 1 if left > 0 else left, right)"),
    ("row bounds off by one", _rows._masks, 'begin.int()', '(begin - 1).clamp(min=0).int()'),
    ("keys of padding are packed", _rows.pack_rows, "(rows, shown))", "(rows, shown.roll(1, 1)))"),
    ("rows of padding count", _rows.pack_rows, "torch.searchsorted(drawn, cu_q", "torch.searchsorted(drawn, cu_q + 1"),
]  # fmt: skip


def hole():
    inputs = batch()
    inputs["attention_mask"][0, 6:9] = 0
    return inputs


def packed():
    return dict(
        input_ids=batch()["input_ids"], position_ids=torch.arange(17).remainder(6).expand(3, -1), use_cache=False
    )


# (teacher, student, batch, options of the distiller)
SCENES = [
    (llama, llama, batch, {}), (llama, llama, packed, {}), (llama, llama, lambda: batch("left"), {}),
    (lambda: gemma2(window=5), lambda: gemma2(window=5), lambda: batch("right"), {}),
    (lambda: gemma2(window=7), lambda: gemma2(window=4), hole, {}), (gpt_oss, gpt_oss, batch, {}), (bert, bert, batch, {}),
    (lambda: sdpa(llama4(chunk=5)), lambda: sdpa(llama4(chunk=7)), batch, {}),
    (lambda: gemma2(window=5), lambda: gemma2(window=5), lambda: batch("left"), dict(sample_rows=0.5)),
]  # fmt: skip


def sdpa(model):
    model.set_attn_implementation("sdpa")
    return model


def run_scenes():
    for make_teacher, make_student, inputs, options in SCENES:
        torch.manual_seed(0)
        teacher, student = make_teacher(), make_student().train()
        with AttentionDistiller(teacher, student, **options) as distiller:
            student(**inputs())
            distiller.loss()


def mutated(function, old, new):
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{old!r} is not in {function.__qualname__}"
    names = dict(function.__globals__)
    exec(
        compile(
            "from __future__ import annotations\nfrom dataclasses import replace\n" + source.replace(old, new),
            "<mutant>",
            "exec",
        ),
        names,
    )
    return names[function.__name__]


def plant(monkeypatch, function, changed):
    """Replaces the function wherever it is known."""
    owner = function.__qualname__.rpartition(".")[0]
    for module in [each for name, each in sys.modules.items() if name.startswith("streamkl.hf")]:
        target = getattr(module, owner, None) if owner else module
        if target is not None and target.__dict__.get(function.__name__) is function:
            monkeypatch.setattr(target, function.__name__, changed)


def test_nothing_is_found_without_a_fault():
    run_scenes()


def test_every_fault_can_be_planted():
    for _, function, old, new in MUTANTS:
        mutated(function, old, new)


PLANTED = MUTANTS if LONG else MUTANTS[::4]  # each takes seconds


@pytest.mark.parametrize("what, function, old, new", PLANTED, ids=[each[0] for each in PLANTED])
def test_a_planted_fault_is_found(monkeypatch, what, function, old, new):
    plant(monkeypatch, function, mutated(function, old, new))
    with pytest.raises((ValueError, RuntimeError)) as error:
        run_scenes()
    print(f"{what}: {str(error.value)[:150]}")
