"""A small teacher and its data, for the tests of streamkl-distill."""

import json

import numpy as np
import torch
from hf_models import llama
from safetensors.torch import load_file

from streamkl.distill.cli import main

CONTEXT = 48


def make_teacher(folder, make=llama):
    """A folder with a model of 4 layers and 4 heads, and one with tokens."""
    torch.manual_seed(0)
    model = make(layers=4, heads=4)
    with torch.no_grad():  # the attention of small random models is almost uniform
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.mul_(30)
    model.save_pretrained(folder / "teacher")
    tokens = np.random.default_rng(0).integers(0, 100, (20, CONTEXT), dtype=np.int32)
    np.save(folder / "data.npy", tokens)
    return folder


def arguments(folder, out, *more, steps=6, **options):
    """Of a run that takes a second."""
    given = dict(
        teacher=folder / "teacher", data=folder / "data.npy", out=folder / out, context=CONTEXT, steps=steps, batch=2, rate=3e-3,
        student_layers=2, student_heads=2, eval_sequences=2, needles=1, needle_lengths=CONTEXT, checkpoint_every=2,
        attention_weight=1,  # a few steps show what it teaches
    )  # fmt: skip
    given.update(options)
    flags = [
        part
        for name, value in given.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    return ["--cpu", *flags, *more]


def run(folder, out, *more, **options):
    """The exit status of a run in this process."""
    return main(arguments(folder, out, *more, **options))


def weights(folder):
    return load_file(folder / "student/model.safetensors")


def same(a, b):
    """Bit for bit."""
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def evaluation(folder):
    return json.loads((folder / "evaluation.json").read_text())
