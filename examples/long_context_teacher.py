"""Writes a teacher of random weights with layers as those of Llama 3 8B, and random tokens: to measure time and memory.

    python examples/long_context_teacher.py --layers 8 --context 65536 --out stack
    streamkl-distill --teacher stack/teacher --student-layers 4 --student-heads 16 --data stack/tokens.npy \\
        --context 65536 --precision bfloat16 --gradient-checkpointing --steps 8 --eval-sequences 0 --out stack/run
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("stack"))
    options = parser.parse_args()

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=options.layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0), tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(options.out / "teacher")
    shape = (options.sequences, options.context)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape, dtype=np.int32)
    np.save(options.out / "tokens.npy", tokens)


if __name__ == "__main__":
    main()
