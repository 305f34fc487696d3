"""Packed sequences of different lengths: no padding is computed.

    python examples/packed_sequences.py

The loss of the packed batch equals the loss of the single sequences.
"""

import torch

import streamkl


def main():
    torch.manual_seed(0)
    lengths = [37, 1, 120, 64]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()  # [sequences + 1]
    total, longest = sum(lengths), max(lengths)
    q_t, k_t = torch.randn(total, 8, 64), torch.randn(total, 2, 64)  # [total, heads, dim]; 2 key heads
    q_s, k_s = torch.randn(total, 8, 32, requires_grad=True), torch.randn(total, 8, 32, requires_grad=True)

    loss = streamkl.attention_kl(
        q_t, k_t, q_s, k_s, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest,
        max_seqlen_k=longest,
    )  # fmt: skip
    loss.backward()

    one_by_one = []
    for begin, end in zip(cu_seqlens, cu_seqlens[1:]):
        sequence = [tensor[begin:end].unsqueeze(0) for tensor in (q_t, k_t, q_s, k_s)]
        one_by_one.append(streamkl.attention_kl(*sequence, causal=True, reduction="sum"))
    mean = sum(one_by_one) / (total * 8)  # rows x heads
    print(f"packed {loss.item():.6f}, one by one {mean.item():.6f}")
    torch.testing.assert_close(loss, mean)


if __name__ == "__main__":
    main()
