"""streamkl-distill with --context-parallel on CPUs, where torch has no attention over shards: one that computes the same."""

import sys

import torch
from hf_distributed import cp_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from streamkl.distill import _loop as loop
from streamkl.distill.cli import main
from streamkl.hf._context import active_region


def attention(module, *arguments, **options):
    """Whole sequences are evaluated outside of the region."""
    return (cp_attention if active_region() else sdpa_attention_forward)(module, *arguments, **options)


def with_attention(own):
    def load(*arguments):
        model = own(*arguments)
        model.set_attn_implementation("attention_over_shards")
        return model

    return load


torch.set_num_threads(1)
AttentionInterface.register("attention_over_shards", attention)
loop.load_teacher, loop.load_student = with_attention(loop.load_teacher), with_attention(loop.load_student)
sys.exit(main())
