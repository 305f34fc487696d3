"""Looking at models without training them: capture, compare and save_pair."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..maps import AttentionMap, attention_map
from ._adapters import eval_mode
from ._capture import Capture
from ._distiller import AttentionDistiller
from ._layers import Layer
from ._pairs import Pair, RowCache, Sinks


class Layers:
    """The layers of a model's last forward, like a list."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._last: list[Layer] = []

    def _now(self) -> list[Layer]:
        if self._capture.has_run:
            self._last = self._capture.layers
        return self._last

    def __len__(self) -> int:
        return len(self._now())

    def __getitem__(self, index):
        return self._now()[index]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._now())


@contextmanager
def capture(model: torch.nn.Module) -> Iterator[Layers]:
    """Queries, keys, values, LSEs and masks of every attention layer of the model's last forward.

    The tensors are those of the model, with their graph. They stay after the block, as long as the layers do. A layer whose
    attention is not modeled says so in ``refusal``. A rank of a tensor-parallel model finds its own heads.

    Example::

        with streamkl.hf.capture(model) as layers, torch.no_grad():
            model(**batch)
        print(layers[0].q.shape, layers[0].scale, layers[0].causal)
    """
    captured = Capture(model, "model", needs_values=True)
    layers = Layers(captured)
    captured.attach()
    try:
        yield layers
        len(layers)
    finally:
        captured.detach()


# ---- save_pair -------------------------------------------------------------------------------------------------------


def save_pair(path: str | os.PathLike, teacher: Layer, student: Layer, *, sinks: Sinks = "both") -> list[str]:
    """Writes the queries and keys of two captured layers as safetensors that ``streamkl kl`` and ``streamkl map`` read.

    Tokens that are padding are left out; the file then contains ``cu_seqlens_q`` and ``cu_seqlens_k``. The tool knows no
    attention sinks: for layers with sinks, ``sinks="keys only"`` is needed.

    Returns:
        The options that the tool needs: masks, windows, scales and softcaps, such as ``["--causal", "--scale-t=0.125", ...]``.
    """
    from safetensors.torch import save_file

    pair = Pair("the pair", teacher.require(), student.require(), None, sinks)
    (q_t, k_t, q_s, k_s), options, _ = pair.arguments(RowCache())
    _refuse_more_than_keys("save_pair", options)
    tensors = dict(q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_s)
    if "cu_seqlens_q" in options:
        ends = {side: int(options[f"cu_seqlens_{side}"][-1]) for side in "qk"}
        tensors = {name: tensor[:, : ends[name[0]]] for name, tensor in tensors.items()}
        tensors.update(cu_seqlens_q=options["cu_seqlens_q"], cu_seqlens_k=options["cu_seqlens_k"])
    save_file(
        {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        },
        os.fspath(path),
    )
    left, right = options["window_size"]
    right = -1 if options["causal"] else right
    arguments = ["--causal"] if options["causal"] else []
    arguments += [f"--window={left},{right}"] if (left, right) != (-1, -1) else []
    for side in "ts":
        arguments.append(f"--scale-{side}={options[f'softmax_scale_{side}']!r}")
        if options[f"softcap_{side}"]:
            arguments.append(f"--softcap-{side}={options[f'softcap_{side}']!r}")
    return arguments


def _refuse_more_than_keys(where: str, options: dict[str, Any]) -> None:
    """Files and maps have neither sinks nor row bounds."""
    if "sink_t" in options:
        raise ValueError(f"{where}: the layers have attention sinks: pass sinks='keys only' to leave them out")
    if "causal" not in options:
        raise ValueError(
            f"{where}: the layers attend to keys that no causal mask, window or packed sequences describe"
        )


# ---- compare ---------------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """The attention KL of two models on a batch. Keys are pairs ``(student layer, teacher layer)``."""

    rows: dict[tuple[int, int], torch.Tensor]
    """KL of every row, ``[batch, heads, length]``, NaN for padding."""
    maps: dict[tuple[int, int], AttentionMap]
    """Attention maps of both and of the KL, per head, if asked for."""
    heads: dict[tuple[int, int], list[int]]
    """The student heads that were compared: all of them, or those of ``head_map``."""

    def per_layer(self) -> dict[tuple[int, int], float]:
        return {pair: rows.nanmean().item() for pair, rows in self.rows.items()}

    def per_head(self) -> dict[tuple[int, int], torch.Tensor]:
        """``[heads]`` for each pair, those of ``heads``."""
        return {pair: rows.transpose(0, 1).flatten(1).nanmean(1) for pair, rows in self.rows.items()}

    def per_position(self, buckets: int = 8) -> dict[tuple[int, int], torch.Tensor]:
        """``[buckets]`` for each pair: the positions of the batch, in buckets of equal length."""
        edges = {pair: [rows.shape[2] * i // buckets for i in range(buckets + 1)] for pair, rows in self.rows.items()}
        return {
            pair: torch.stack([rows[..., a:b].nanmean() for a, b in zip(edges[pair], edges[pair][1:])])
            for pair, rows in self.rows.items()
        }

    def table(self) -> list[dict[str, Any]]:
        """One row per pair and head: student_layer, teacher_layer, head, kl."""
        return [
            dict(student_layer=i, teacher_layer=j, head=head, kl=kl)
            for (i, j), kls in self.per_head().items()
            for head, kl in zip(self.heads[i, j], kls.tolist())
        ]

    def __str__(self) -> str:
        lines = ["student layer  teacher layer  KL, nats  by position"]
        positions = self.per_position()
        for (i, j), kl in self.per_layer().items():
            lines.append(
                f"{i:13}  {j:13}  {kl:8.4f}  " + " ".join(f"{part:.3f}" for part in positions[i, j].tolist())
            )
        return "\n".join(lines)


_OPTIONS = {"layer_map", "head_map", "direction", "attention", "tower", "sinks", "verify"}


@torch.no_grad()
def compare(
    teacher: torch.nn.Module, student: torch.nn.Module, batch: Mapping[str, Any], *, buckets: tuple[int, int] | None = None,
    **options: Any,
) -> Comparison:  # fmt: skip
    """The attention KL of two models on a batch, by layer, head and position.

    Args:
        batch: arguments of both models.
        buckets: ``(rows, columns)`` of attention maps; default: no maps.
        options: ``layer_map``, ``head_map``, ``direction``, ``attention``, ``tower``, ``sinks``, ``verify`` of :class:`AttentionDistiller`.
    """
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"compare() takes no {min(unknown)}: must be one of {', '.join(sorted(_OPTIONS))}")
    with eval_mode(student), AttentionDistiller(teacher, student, **options) as distiller:
        student(**batch)
        return compare_captured(distiller, buckets)


def compare_captured(distiller: AttentionDistiller, buckets: tuple[int, int] | None = None) -> Comparison:
    """The same for the student's last forward under an attached distiller. Frees what was captured."""
    pairs, cache = distiller.pairs(), RowCache()
    if distiller.parallel():
        raise RuntimeError("streamkl.hf.compare: run it without context parallelism: it compares whole sequences")
    rows = {key: pair.row_losses(distiller.direction, cache) for key, pair in pairs.items()}
    maps = {}
    if buckets is not None:
        maps = {key: _map(pair, cache, buckets, distiller.direction) for key, pair in pairs.items()}
    heads = {key: list(pair.heads or range(pair.s.q.shape[1])) for key, pair in pairs.items()}
    distiller.drop()
    return Comparison(rows, maps, heads)


def _map(pair: Pair, cache: RowCache, buckets, direction) -> AttentionMap:
    tensors, options, _ = pair.arguments(cache)
    _refuse_more_than_keys(f"maps of {pair.where}", options)
    unused = ("lse_t", "lse_s", "max_seqlen_q", "max_seqlen_k")
    options = {name: value for name, value in options.items() if name not in unused}
    return attention_map(*tensors, buckets=buckets, direction=direction, **options)
