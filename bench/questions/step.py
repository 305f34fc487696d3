"""What the attention KL adds to a whole training step: time and peak memory, compared with the same step without it.

    bench/run.py step                                # all setups: about a minute
    bench/run.py step --only N=8192                  # only some

    layers         with torch's fastest attention: two layers of an 8B-like teacher (32/8 heads of 128, hidden size 4096)
                   without gradients, and two of a 1B-like student (hidden size 2048) with 32, 16 or 8 heads. The loss is
                   the mean over the layers, with the LSEs of both attentions given, or computed
    hugging face   Llama models of transformers of the same sizes, with streamkl.hf.AttentionDistiller; 65536 tokens with
                   gradient checkpointing

A step runs the teacher forward and the student forward and backward, in bf16, one sequence. It has no optimizer, no
embedding of a large vocabulary and only a few layers, so the percentages are an upper bound of those of real training.
Peak memory includes the models.
"""

from dataclasses import dataclass

import torch

import streamkl
from harness.run import methods_of
from streamkl._sdpa import sdpa_with_lse

COLUMNS = (
    "date gpu torch commit kind teacher student length layers checkpointing method ms fastest_ms percent"
    " peak_bytes more_bytes note"
).split()

NO_LOSS, GIVEN, COMPUTED = "no loss", "LSEs given", "LSEs computed"
CARRIED, GRADIENT_ONLY = "carried", "carried, no value"
DISTILLER, FUSED_DISTILLER = "AttentionDistiller", "AttentionDistiller, fused"
LAYERS, HUGGING_FACE = "layers", "hugging face"
VARIANTS = {
    LAYERS: (NO_LOSS, GIVEN, COMPUTED, CARRIED, GRADIENT_ONLY),
    HUGGING_FACE: (NO_LOSS, DISTILLER, FUSED_DISTILLER),
}


@dataclass(frozen=True)
class Model:
    """The size of a decoder layer."""

    heads: int
    key_heads: int
    dim: int
    hidden: int
    mlp: int

    def __str__(self):
        return f"{self.heads}/{self.key_heads} heads of {self.dim}"


TEACHER = Model(32, 8, 128, hidden=4096, mlp=14336)  # as Llama 3 8B
STUDENTS = [Model(heads, 8, dim, hidden=2048, mlp=8192) for heads, dim in ((32, 64), (16, 128), (8, 128))]  # about 1B


@dataclass(frozen=True)
class Setup:
    """A step of a teacher, which has no gradients, and of a student."""

    kind: str
    student: Model
    length: int
    teacher: Model = TEACHER
    layers: int = 2
    checkpointing: bool = False

    @property
    def name(self):
        return f"{self.kind}, student {self.student}, N={self.length}"


SETUPS = [Setup(LAYERS, student, length) for length in (8192, 32768) for student in STUDENTS]
SETUPS += [
    Setup(HUGGING_FACE, student, length, checkpointing=length > 32768)
    for length in (16384, 65536)
    for student in STUDENTS
]


def add_options(parser):
    parser.set_defaults(rounds=9, sample_ms=600)


def cases(given):
    return SETUPS


def attend(q, k, v):
    """Causal attention and its LSE [batch, heads, length]. Key heads are expanded, as transformers does it."""
    group_size = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group_size, 1) for tensor in (k, v))
    return sdpa_with_lse(q, k, v, causal=True, fastest=True)


# ---- Plain layers --------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A Llama layer without RoPE: attention and a gated feed-forward block, pre-norm."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        width, shared = model.heads * model.dim, model.key_heads * model.dim

        def linear(size_in, size_out):
            return torch.nn.Linear(size_in, size_out, bias=False)

        self.norm, self.mlp_norm = torch.nn.RMSNorm(model.hidden), torch.nn.RMSNorm(model.hidden)
        self.q, self.k, self.v = (linear(model.hidden, size) for size in (width, shared, shared))
        self.out = linear(width, model.hidden)
        self.gate, self.up = linear(model.hidden, model.mlp), linear(model.hidden, model.mlp)
        self.down = linear(model.mlp, model.hidden)

    def forward(self, x, teacher=None, **carried):
        """The output, and the queries, keys and LSE of the attention, which carries the KL to those of a `teacher`."""
        normed = self.norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.model.dim)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        if teacher is None:
            attended, lse = attend(q, k, v)
        else:
            q_t, k_t, lse_t = teacher
            attended, lse = streamkl.attention(
                q, k, v, q_t=q_t, k_t=k_t, lse_t=lse_t, causal=True, layout="bhnd", **carried
            )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed)), (q, k, lse)


class Stack(torch.nn.Module):
    def __init__(self, model, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(model) for _ in range(layers))

    def forward(self, x, keeps, teacher=None, kl_value=True):
        kept = []
        for number, layer in enumerate(self.layers):
            x, attention = layer(x, teacher and teacher[number], kl_weight=1 / len(self.layers), kl_value=kl_value)
            if keeps:
                kept.append(attention)
        return x, kept


def layer_steps(setup, device):
    """{variant: call}: one step without an optimizer, whose time would make the share of the loss smaller."""
    with torch.device(device):
        models = setup.teacher, setup.student
        teacher, student = (Stack(model, setup.layers).bfloat16() for model in models)
        sizes = ((1, setup.length, model.hidden) for model in models)
        tokens_t, tokens_s = (torch.randn(size, dtype=torch.bfloat16) for size in sizes)

    def step(variant):
        with torch.no_grad():
            _, kept_t = teacher(tokens_t, variant != NO_LOSS)
        if variant in (CARRIED, GRADIENT_ONLY):
            output, kept_s = student(tokens_s, False, kept_t, kl_value=variant == CARRIED)
        else:
            output, kept_s = student(tokens_s, variant != NO_LOSS)
        loss = output.float().square().mean()
        for (q_t, k_t, lse_t), (q_s, k_s, lse_s) in zip(kept_t, kept_s):
            lses = dict(lse_t=lse_t, lse_s=lse_s) if variant == GIVEN else {}
            loss = loss + streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True, layout="bhnd", **lses) / setup.layers
        loss.backward()
        student.zero_grad()
        return loss.detach()

    return {variant: lambda variant=variant: step(variant) for variant in VARIANTS[LAYERS]}


# ---- Models of transformers ----------------------------------------------------------------------------------------------


VOCABULARY = 1024  # small: the output layer of a few layers must not dominate their step


def llama(model, layers, length, device):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=model.hidden, intermediate_size=model.mlp, num_hidden_layers=layers,
        num_attention_heads=model.heads, num_key_value_heads=model.key_heads, head_dim=model.dim,
        max_position_embeddings=length,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").bfloat16()


def hugging_face_steps(setup, device):
    """{variant: call} of models of transformers, with the attention that `sdpa` chooses."""
    from streamkl.hf import AttentionDistiller

    teacher, student = (llama(model, setup.layers, setup.length, device) for model in (setup.teacher, setup.student))
    teacher.eval()
    student.train()
    if setup.checkpointing:
        student.gradient_checkpointing_enable()
    tokens = torch.randint(VOCABULARY, (1, setup.length), device=device)
    batch = dict(input_ids=tokens, labels=tokens, use_cache=False)

    def without_loss():
        with torch.no_grad():
            teacher(input_ids=tokens, use_cache=False)
        loss = student(**batch).loss
        loss.backward()
        student.zero_grad()
        return loss.detach()

    distillers = {fused: AttentionDistiller(teacher, student, fused=fused) for fused in (False, True)}

    def with_distiller(fused):
        with distillers[fused] as distiller:
            with torch.no_grad():  # before the student, so that one forward computes its attention and the KL
                teacher(input_ids=tokens, use_cache=False, logits_to_keep=1)
            loss = student(**batch).loss + distiller.loss()
            loss.backward()
        student.zero_grad()
        return loss.detach()

    return {
        NO_LOSS: without_loss, DISTILLER: lambda: with_distiller(False), FUSED_DISTILLER: lambda: with_distiller(True)
    }  # fmt: skip


# ---- Measuring -----------------------------------------------------------------------------------------------------


def measure(setup, run):
    make = layer_steps if setup.kind == LAYERS else hugging_face_steps
    methods = methods_of(make(setup, run.device))
    return run.time(methods, lambda method, name: more_than(methods[0], method))


def more_than(without, method):
    """The time and the memory of a step in addition to those of the step without the loss."""
    if method is without or not without.timings:
        return {}
    more = method.timings[""].peak_bytes - without.timings[""].peak_bytes
    return {"percent": f"{(method.ms('') / without.ms('') - 1) * 100:.1f}", "more_bytes": more}
