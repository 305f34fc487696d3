"""Attention distillation of Hugging Face models, without changes to their code.

with streamkl.hf.AttentionDistiller(teacher, student) as distiller:
    for batch in loader:
        loss = student(**batch).loss + distiller.loss()
        loss.backward()
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._hf_capture import Capture, Layer
from ._options import Direction, is_whole
from .attention import attention_kl


class AttentionDistiller:
    """The KL between the attention of a teacher and that of a student, averaged over pairs of layers.

    Between `attach()` and `detach()`, or inside a ``with`` block, both models run their own attention as before, and the
    queries and keys of their last forward are kept, after RoPE. `loss()` compares them and frees them.

    Supported are padding on either side (2-D ``attention_mask``), causal and bidirectional attention, sliding windows,
    softcap, GQA, and gradient checkpointing with ``use_reentrant=False`` (transformers' default). If the windows of teacher
    and student differ, the KL covers the keys that are visible to both. If the attention of both models returns its LSEs, as
    torch's fused kernels do under ``attn_implementation="sdpa"``, loss and gradients take one pass.

    Args:
        teacher: a transformers model. It is put into eval mode and runs without gradients.
        student: a transformers model that reads the same tokens.
        layer_map: the teacher layer of each student layer: ``{student: teacher}``, or a sequence with one teacher layer per
            student layer. Default: evenly spread, ending at the last layer, preferably among layers of the same window.
        head_map: the teacher head of each student head, in every layer: ``{student: teacher}``, or a sequence with one teacher
            head per student head. Default: head i to head i, or the mean of ``heads_t / heads_s`` consecutive heads.
        direction: ``"forward"``: KL(teacher || student); ``"reverse"``: KL(student || teacher).
    """

    def __init__(
        self,
        teacher: torch.nn.Module,
        student: torch.nn.Module,
        *,
        layer_map: Mapping[int, int] | Sequence[int] | None = None,
        head_map: Mapping[int, int] | Sequence[int] | None = None,
        direction: Direction = "forward",
    ) -> None:
        self.teacher, self.student = Capture(teacher, "teacher"), Capture(student, "student")
        self.layer_map, self.head_map = _as_dict("layer_map", layer_map), _as_dict("head_map", head_map)
        self.direction = direction
        self.attached = False
        self.last_losses: dict[int, torch.Tensor] = {}
        """KL of every student layer in the last `loss()`, detached, for logging."""

    # ---- Attaching -----------------------------------------------------------------------------------------------------

    def attach(self) -> AttentionDistiller:
        """Start to record queries and keys."""
        if not self.attached:
            self.teacher.attach()
            try:
                self.student.attach()
            except TypeError:
                self.teacher.detach()
                raise
            self.teacher.model.eval()
            self.attached = True
        return self

    def detach(self) -> None:
        """Restore the attention of both models and free everything that was captured."""
        if self.attached:
            self.student.detach()
            self.teacher.detach()
            self.attached = False

    def __enter__(self) -> AttentionDistiller:
        return self.attach()

    def __exit__(self, *_) -> None:
        self.detach()

    # ---- The loss ----------------------------------------------------------------------------------------------------

    def loss(self) -> torch.Tensor:
        """Attention KL of the student's last forward, f32: mean over layer pairs, heads and rows that are not padding.

        If the teacher has not run since the last loss(), it runs now on the same input.
        """
        if not self.attached:
            raise RuntimeError(
                "AttentionDistiller: call attach(), or use it as a context manager, before the models run"
            )
        if not self.student.layers:
            raise RuntimeError("AttentionDistiller: the student has not run since the last loss()")
        self._check_checkpointing()
        if not self.teacher.layers:
            self._run_teacher()
        pairs = self._layer_pairs()
        losses = {i: self._layer_loss(i, self.teacher.layers[j], j, self.student.layers[i]) for i, j in pairs.items()}
        self.teacher.clear()
        self.student.clear()
        self.last_losses = {i: loss.detach() for i, loss in losses.items()}
        return torch.stack(list(losses.values())).mean()

    def _check_checkpointing(self) -> None:
        model, layers = self.student.model, self.student.layers
        checkpointing = model.training and getattr(model, "is_gradient_checkpointing", False)
        if checkpointing and torch.is_grad_enabled() and not any(layer.q.requires_grad for layer in layers):
            raise RuntimeError(
                "AttentionDistiller: reentrant checkpointing keeps no graph of the student's queries and keys; call "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
            )

    def _run_teacher(self) -> None:
        assert self.student.arguments is not None
        args, kwargs = self.student.arguments
        given = inspect.signature(self.student.model.forward).bind(*args, **kwargs).arguments
        given = {**given, **given.pop("kwargs", {})}
        accepted = inspect.signature(self.teacher.model.forward).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        unwanted = {"labels", "past_key_values", "num_items_in_batch", "return_dict"}
        with torch.no_grad():
            self.teacher.model(
                **{k: v for k, v in given.items() if k not in unwanted and (anything or k in accepted)}
            )

    def _layer_pairs(self) -> dict[int, int]:
        """{student layer: teacher layer}."""
        count_t, count_s = len(self.teacher.layers), len(self.student.layers)
        pairs = (
            self.layer_map if self.layer_map is not None else {i: self._teacher_layer_for(i) for i in range(count_s)}
        )
        for i, j in pairs.items():
            if not (0 <= i < count_s and 0 <= j < count_t):
                raise ValueError(
                    f"layer_map[{i}]={j}: the student has layers 0..{count_s - 1}, the teacher 0..{count_t - 1}"
                )
        return pairs

    def _teacher_layer_for(self, i: int) -> int:
        """Evenly spread, ending at the last layer; the nearest layer of the same window if there is one."""
        layers, count_s = self.teacher.layers, len(self.student.layers)
        even = (i + 1) * len(layers) / count_s - 1
        alike = [j for j, layer in enumerate(layers) if layer.window == self.student.layers[i].window]
        return min(alike or range(len(layers)), key=lambda j: abs(j - even))

    def _layer_loss(self, i: int, t: Layer, j: int, s: Layer) -> torch.Tensor:
        where = f"student layer {i} and teacher layer {j}"
        shape_t, shape_s = (t.q.shape[0], t.q.shape[2], t.k.shape[2]), (s.q.shape[0], s.q.shape[2], s.k.shape[2])
        if shape_t != shape_s:
            raise ValueError(
                f"{where}: [batch, queries, keys] {list(shape_t)} and {list(shape_s)} must be equal: did both read the same tokens?"
            )
        if t.causal != s.causal:
            raise ValueError(f"{where}: one is causal and the other is not")
        q_t, k_t, q_s, k_s, lse_t, lse_s = t.q, t.k, s.q, s.k, t.lse, s.lse
        if t.window != s.window or (t.padding is None) != (s.padding is None):
            lse_t = lse_s = None  # one of them covers keys that are not visible to both
        if self.head_map is not None:
            q_t, k_t, lse_t, q_s, k_s, lse_s = self._select_heads(where, q_t, k_t, lse_t, q_s, k_s, lse_s)
        elif t.q.shape[1] % s.q.shape[1] != 0:
            raise ValueError(f"{where}: {t.q.shape[1]} heads are not a multiple of {s.q.shape[1]}: pass a head_map")
        windows = [layer.window for layer in (t, s) if layer.window >= 0]
        left = min(windows, default=-1)
        options: dict[str, Any] = dict(
            causal=s.causal, window_size=(left, 0 if s.causal else left), softmax_scale_t=t.scale, softmax_scale_s=s.scale,
            softcap_t=t.softcap, softcap_s=s.softcap, direction=self.direction, layout="bhnd",
        )  # fmt: skip
        tensors, lses = (q_t, k_t, q_s, k_s), (lse_t, lse_s)
        padding = s.padding if s.padding is not None else t.padding
        if padding is not None:
            tensors, lses, lengths = _pack(tensors, lses, padding, where)
            options.update(lengths)
        return attention_kl(*tensors, lse_t=lses[0], lse_s=lses[1], **options)

    def _select_heads(self, where, q_t, k_t, lse_t, q_s, k_s, lse_s):
        heads_s, heads_t = list(self.head_map), list(self.head_map.values())
        for role, heads, q in ("student", heads_s, q_s), ("teacher", heads_t, q_t):
            if not all(0 <= head < q.shape[1] for head in heads):
                raise ValueError(f"head_map: {role} heads {heads} must be 0..{q.shape[1] - 1} at {where}")
        return *_heads(heads_t, q_t, k_t, lse_t), *_heads(heads_s, q_s, k_s, lse_s)


def _as_dict(name: str, mapping: Mapping[int, int] | Sequence[int] | None) -> dict[int, int] | None:
    if mapping is None:
        return None
    pairs = dict(mapping) if isinstance(mapping, Mapping) else dict(enumerate(mapping))
    if not all(is_whole(index) for pair in pairs.items() for index in pair):
        raise ValueError(f"{name}={mapping!r}: must contain whole numbers")
    return pairs


def _heads(heads, q, k, lse):
    """The given heads and the key head of each."""
    group = q.shape[1] // k.shape[1]
    index = torch.tensor(heads, device=q.device)
    return q[:, index], k[:, index // group], None if lse is None else lse[:, index]


def _pack(tensors, lses, padding, where):
    """Packs the tokens that are not padding in tensors [heads, batch * length, dim].

    The padding follows after the last sequence, where it is ignored. So no size depends on a value, and no host-device
    synchronisation is needed.
    """
    q, k = tensors[:2]
    if q.shape[2] != k.shape[2] or padding.shape != (q.shape[0], q.shape[2]):
        raise ValueError(f"{where}: attention_mask {list(padding.shape)} with {q.shape[2]} queries and {k.shape[2]} keys: "
                         "padding needs as many queries as keys")  # fmt: skip
    order = (~padding).flatten().int().argsort(stable=True)
    ends = padding.sum(-1).cumsum(0)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).int()
    packed = [t.transpose(0, 1).flatten(1, 2)[:, order] for t in tensors]
    rows = [None if lse is None else lse.transpose(0, 1).flatten(1)[:, order] for lse in lses]
    length = q.shape[2]
    lengths = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=length, max_seqlen_k=length)
    return packed, rows, lengths
