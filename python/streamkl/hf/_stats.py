"""Statistics of the attention of a Hugging Face model, layer by layer, under its own attention implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch

from ..stats import Statistics, attention_stats, check_request
from ._capture import Capture
from ._layers import Layer
from ._pairs import Pair, RowCache

_OF_ROWS = ("lse", "entropy", "max_logit", "expected_distance", "range_mass", "top_p")
_EMPTY_ROW = {"lse": -torch.inf, "max_logit": -torch.inf, "top_keys": -1}  # other results: 0


class AttentionStats:
    """:func:`streamkl.attention_stats` of every attention layer of a model's last forward, under any attention
    implementation: sdpa and flash attention return no weights, and need not.

    A sequence of :class:`streamkl.Statistics`, one per layer. A layer is computed when it is read, from the queries and keys
    of the forward, which are kept until the next forward or the end of the block. A forward with a KV cache has the rows of its
    own tokens, and ``generate()`` ends with the forward of its last token. A layer whose attention is not modeled raises a
    ``ValueError`` that says why.

    Keys and rows are tokens of the batch: ``[batch, heads, length]``, 0 for padding. Results of heads are ``[sequences, heads,
    ...]``: one sequence per row of the batch, one per packed sequence, or one per chunk of chunked attention; a row of the
    batch that is all padding has none. ``row_range``, ``key_ranges``, ``chosen_rows``,
    ``weights`` and distances count the tokens of a sequence without its padding.

    Example::

        with streamkl.hf.AttentionStats(model, want=("key_sum", "entropy")) as stats, torch.no_grad():
            model(**batch)
            for layer, found in enumerate(stats):
                print(layer, found.entropy.mean().item(), found.key_sum[0, :, 0])

    Args:
        model: a transformers model, also inside DDP, FSDP, torch.compile or peft. A rank of a tensor-parallel model finds its
            own heads.
        want, options: those of :func:`streamkl.attention_stats`, except masks, scales and sinks, which are the model's.
    """

    def __init__(self, model: Any, want: Sequence[str] = ("key_sum", "entropy"), **options: Any) -> None:
        for name in sorted(options.keys() - _OPTIONS):
            raise TypeError(f"AttentionStats() got an unexpected keyword argument {name!r}")
        check_request(want, options)
        self._capture, self._want, self._options = Capture(model, "model", needs_values=True), tuple(want), options
        self._found: dict[int, Statistics] = {}
        self._of: list[Layer] | None = None

    def __enter__(self) -> AttentionStats:
        self._capture.attach()
        return self

    def __exit__(self, *_) -> None:
        self._capture.detach()
        self._of, self._found = None, {}

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator[Statistics]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Statistics: ...

    @overload
    def __getitem__(self, index: slice) -> list[Statistics]: ...

    def __getitem__(self, index):
        layers = self._layers()
        index = range(len(layers))[index]
        if isinstance(index, range):
            return [self[each] for each in index]
        if index not in self._found:
            self._found[index] = stats_of_layer(layers[index], f"layer {index}", self._want, **self._options)
        return self._found[index]

    @property
    def names(self) -> list[str]:
        """The names of the layers' modules in the model."""
        return [layer.name for layer in self._layers()]

    def _layers(self) -> list[Layer]:
        if not self._capture.has_run:
            raise RuntimeError("streamkl.hf.AttentionStats: run the model inside the with block first, and read there")
        if self._of is not self._capture.layers:
            self._of, self._found = self._capture.layers, {}
        if not self._of and self._capture.is_undone():
            raise RuntimeError(
                "streamkl.hf.AttentionStats: set_attn_implementation() inside the with block ends the capture: call it before"
            )
        return self._of


_OPTIONS = {"row_range", "per_key_head", "distance_buckets", "top_k", "key_ranges", "chosen_rows"}


@torch.no_grad()
def stats_of_layer(layer: Layer, where: str, want: Sequence[str], **options: Any) -> Statistics:
    """The statistics of a captured layer, by tokens of its batch."""
    pair = Pair(where, layer.require(), layer, None)
    (_, _, q, k), arguments, rows = pair.arguments(RowCache())
    masks = {name: value for name, value in arguments.items() if name[-2:] not in ("_t", "_s")}
    found = attention_stats(
        q, k, want=want, lse=None if "lse" in want else arguments["lse_s"], sink=arguments.get("sink_s"),
        softmax_scale=arguments["softmax_scale_s"], softcap=arguments["softcap_s"], **masks, **options,
    )  # fmt: skip
    if "cu_seqlens_q" not in arguments:
        return found
    places = {
        "q": rows.pack_queries(_numbers(layer.q))[0], "k": rows.pack_keys(_numbers(layer.k))[0]
    }  # fmt: skip
    shape_q, shape_k = ((tensor.shape[0], tensor.shape[2]) for tensor in (layer.q, layer.k))
    unpacked = {}
    for name, result in found._asdict().items():
        if result is None:
            continue
        if name == "top_keys":
            result = _tokens_of(result, places["k"], arguments["cu_seqlens_q"], arguments["cu_seqlens_k"], shape_k[1])
        if name in (*_OF_ROWS, "top_keys"):
            unpacked[name] = _unpacked(result, places["q"], *shape_q, _EMPTY_ROW.get(name, 0))
        elif name in ("key_sum", "key_max"):
            unpacked[name] = _unpacked(result, places["k"], *shape_k, 0)
        else:
            unpacked[name] = result
    return Statistics(**unpacked)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The number of each token of the batch, [batch, 1, length]."""
    batch, _, length, _ = tensor.shape
    return torch.arange(batch * length, device=tensor.device).view(batch, 1, length)


def _unpacked(result: torch.Tensor, places: torch.Tensor, batch: int, length: int, absent: float) -> torch.Tensor:
    """[heads, packed tokens, ...] as [batch, heads, length, ...]."""
    made = result.new_full((result.shape[0], batch * length, *result.shape[2:]), absent)
    made[:, places] = result
    return made.unflatten(1, (batch, length)).transpose(0, 1)


def _tokens_of(keys: torch.Tensor, places: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, length: int) -> torch.Tensor:
    """Keys by number in their packed sequence, [heads, total_q, top_k], as tokens of their row of the batch."""
    row = torch.arange(keys.shape[1], device=keys.device)
    sequence = torch.searchsorted(cu_q[1:].contiguous(), row, right=True).clamp(max=cu_k.numel() - 2)
    packed = (cu_k[sequence].long()[:, None] + keys).clamp(0, places.numel() - 1)
    return torch.where(keys < 0, -1, places[packed] % length).to(torch.int32)
