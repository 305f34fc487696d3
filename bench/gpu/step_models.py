"""Models and steps of bench/step.py: plain layers, and models of transformers."""

import torch

import streamkl

from .step_cases import CARRIED, DISTILLER, FUSED_DISTILLER, GIVEN, GRADIENT_ONLY, LAYERS, NO_LOSS, VARIANTS

ATEN = torch.ops.aten


def attend(q, k, v, attention):
    """Causal attention and its LSE [batch, heads, length], by a kernel that scaled_dot_product_attention calls.

    Key heads are expanded, as transformers does it.
    """
    group_size = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group_size, 1) for tensor in (k, v))
    if attention == "cudnn":
        output, lse, *_ = ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
    elif attention == "flash":
        output, lse, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
    else:
        output, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return output, lse.detach().flatten(2)[..., : q.shape[2]]  # some kernels round the length up, or add a dimension of 1


# ---- Plain layers --------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A Llama layer without RoPE: attention and a gated feed-forward block, pre-norm."""

    def __init__(self, model, attention):
        super().__init__()
        self.model, self.attention = model, attention
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
        q, k, v = (project(normed).unflatten(-1, (-1, self.model.dim)).transpose(1, 2) for project in (self.q, self.k, self.v))
        if teacher is None:
            attended, lse = attend(q, k, v, self.attention)
        else:
            q_t, k_t, lse_t = teacher
            attended, lse = streamkl.attention(
                q, k, v, q_t=q_t, k_t=k_t, lse_t=lse_t, causal=True, layout="bhnd", **carried
            )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed)), (q, k, lse)


class Stack(torch.nn.Module):
    def __init__(self, model, layers, attention):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(model, attention) for _ in range(layers))

    def forward(self, x, keeps, teacher=None, kl_value=True):
        kept = []
        for number, layer in enumerate(self.layers):
            x, attention = layer(x, teacher and teacher[number], kl_weight=1 / len(self.layers), kl_value=kl_value)
            if keeps:
                kept.append(attention)
        return x, kept


def layer_steps(setup, device, attention):
    """{variant: call}: one step without an optimizer, whose time would make the share of the loss smaller."""
    with torch.device(device):
        teacher, student = (Stack(model, setup.layers, attention).bfloat16() for model in (setup.teacher, setup.student))
        tokens_t, tokens_s = (
            torch.randn(1, setup.length, model.hidden, dtype=torch.bfloat16) for model in (setup.teacher, setup.student)
        )

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

    def with_distiller(fused):
        with AttentionDistiller(teacher, student, fused=fused) as distiller:
            loss = student(**batch).loss + distiller.loss()  # runs the teacher
            loss.backward()
        student.zero_grad()
        return loss.detach() + (distiller.last_loss if fused else 0)

    return {
        NO_LOSS: without_loss, DISTILLER: lambda: with_distiller(False), FUSED_DISTILLER: lambda: with_distiller(True)
    }  # fmt: skip
