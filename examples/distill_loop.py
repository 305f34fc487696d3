"""Attention distillation in a plain training loop: one line of loss.

    python examples/distill_loop.py

Teacher and student are small transformers. For Hugging Face models see distill_trainer.py.
"""

import torch
import torch.nn.functional as F

import streamkl


class Attention(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 3 * width),
            torch.nn.Linear(width, width),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [batch, length, heads, dim]
        attended = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2)), q, k


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    embedding = torch.nn.Embedding(64, 128, device=device)
    teacher, student = Attention(128, heads=8).to(device), Attention(128, heads=4).to(device)
    with torch.no_grad():
        teacher.qkv.weight.mul_(4)  # a random teacher attends almost uniformly: sharpen it
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    for step in range(101):
        tokens = embedding(torch.randint(0, 64, (4, 128), device=device)).detach()
        with torch.no_grad():
            target, q_t, k_t = teacher(tokens)
        output, q_s, k_s = student(tokens)
        # 8 teacher heads, 4 student heads: each student head learns the mean of two teacher heads.
        attention_kl = streamkl.attention_kl(q_t, k_t, q_s, k_s, causal=True)
        loss = F.mse_loss(output, target) + attention_kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3}: attention KL {attention_kl.item():.4f}")


if __name__ == "__main__":
    main()
