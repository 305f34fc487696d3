"""streamkl.hf.AttentionDistiller."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from .._carried import Term
from .._options import Parallel, check_choice, check_flags, is_whole
from . import _maps as maps
from ._adapters import adapters_are_off, base_model, check_base_is_teacher, modes_of, peft_model, restore_modes
from ._attention import Call
from ._capture import Capture, Step, Verify, refuse_tensor_parallel
from ._context import active_region, parallel_of, ranks_of
from ._explain import Explanation, FusedPair
from ._inputs import check_packing, check_same_input, check_shards, predicts_next_token, run_teacher
from ._keys import Refused
from ._layers import Kind, Layer, early_layer, skipped_layers, towers_of
from ._pair_proof import prove_pair
from ._pairs import RELATIONS, Apart, Pair, Relation, RowCache, Sinks
from ._parameters import reach_everything
from ._weights import HeadWeight, Weights


class AttentionDistiller:
    """The KL between the attention of a teacher and that of a student, averaged over the student's layers.

    Between `attach()` and `detach()`, or inside a ``with`` block, both models run their own attention as before,
    bit for bit unless it is `fused`, and the queries and keys of their last forward are kept, after RoPE. `loss()` compares them and
    frees them. If `loss()` or a forward fails, the step is dropped, and the next one begins with the student's next
    forward. Several distillers may share a student or a teacher: with one per teacher, a student learns from several.

    Supported is every mask that shows each query one range of keys (padding, packed sequences, causal, bidirectional,
    chunked and sliding attention), softcap, sinks, GQA, encoder-decoders, and gradient checkpointing with
    ``use_reentrant=False`` (transformers' default). Another kind of attention is refused by name. If teacher and
    student attend to different keys, the KL covers the keys that both attend to. If the attention of both models
    returns its LSEs, as torch's fused kernels do under ``attn_implementation="sdpa"``, loss and gradients take one
    pass.

    Args:
        teacher: a transformers model, or a wrapper of one (DDP, FSDP, torch.compile, peft). It runs in eval mode until
            `detach()` and receives no gradients. None: the base model of a PEFT student, such as one with LoRA, which runs
            with the adapters off and takes no memory of its own.
        student: the same for the student, which reads the same tokens.
        layer_map: the teacher layer, or layers, of each student layer: ``{student: teacher}``,
            ``{student: [teacher, ...]}``, or a sequence with one entry per student layer; a mapping may leave layers
            out. A layer is its number among the attention layers (a hybrid model has others), or the name of its
            module, such as ``"model.layers.3"``. Default: evenly spread, ending at the last layer, preferably among
            layers with the same window or chunks.
        head_map: the teacher head of each student head: ``{student: teacher}`` or a sequence with one teacher head
            per student head, in every layer; or such a map per student layer, ``{layer: head_map}``. Default: head
            i to head i, or the mean of ``heads_t / heads_s`` consecutive heads.
        direction: ``"forward"``: KL(teacher || student); ``"reverse"``: KL(student || teacher). ``"auto"``: what trained a real
            model best (docs/study): reverse where every student head learns one teacher head, by `head_map` or because
            both configs have the same number of heads; forward elsewhere.
        attention: of an encoder-decoder, the self-attention (``"self"``) or cross-attention (``"cross"``) of the
            decoder, or the self-attention of the encoder (``"encoder"``). Layers are counted within that kind.
        tower: of a model with several, such as ``"vision"`` and ``"language"``, the one that is compared. Default:
            ``"language"``, or the only one. Layers are counted within it.
        relations: which products are compared, as in MiniLMv2: ``"qk"`` is the attention, ``"qq"``, ``"kk"`` and
            ``"vv"`` are softmax(q q), softmax(k k) and softmax(v v) with scale 1 / sqrt(dim). Their KLs are
            averaged.
        relation_heads: cuts the concatenated heads of ``"qq"``, ``"kk"`` and ``"vv"`` into this many, as MiniLMv2 does, so
            that the numbers of heads of the models may differ. Default: the heads of the models.
        temperature: divides the logits of both; the loss is multiplied by its square, which keeps the size of the
            gradients.
        layer_weight: ``{student layer: weight}`` of each layer in the mean; 1 where it is left out. A layer of weight 0 is not
            compared.
        row_weight: how the rows of a head count in its mean. ``"far:512"``: by the teacher's attention to keys at least 512 tokens
            away, without the first 4 of the sequence; ``"far"`` is ``"far:256"``. The mean leaves out layers without any.
            ``"kl"``: by the KL of their attention, without its gradient, which takes one more forward. Default: all rows count
            the same.
        head_weight: weight of each student head, in every layer or as ``{student layer: weights}``; 1 where a layer is left
            out.
        rows: ``"all"`` rows that are not padding, or only those that predict a token of the ``labels`` (not -100): that of
            their own position, or the next one in a causal language model.
        sample_rows: the share of the rows that `loss()` compares, such as 1/8, which costs an eighth: random rows,
            the same in all layers, drawn with torch's random numbers. The loss is an unbiased estimate of that of
            all rows. It holds while the student trains: in eval mode, or without gradients, all rows count.
        fused: the student's attention carries the KL: its backward adds the KL's gradient. A layer pair whose student
            attention cannot carry it is compared as without `fused`; `explain()` tells which, and why. If the teacher
            runs before the student, a kernel of Hopper computes the student's attention and the KL in one forward,
            from the second step on. Elsewhere on Hopper the student's attention is cuDNN's where that is faster. Its
            output differs by rounding.
        fused_values: with `fused`, compute the value of the KL, too. Without it fused layers have only its gradient,
            which takes less time: their part of `loss()` is 0, and of `last_losses` NaN. It may be changed between
            steps, to measure the KL now and then.
        sinks: ``"both"``: the attention sink of a layer is an outcome of both distributions, so both models or none
            must have sinks. ``"keys only"``: sinks are left out, and the KL is that of the conditional
            distributions on the keys.
        check_input: raise an error if teacher and student have read different tokens.
        verify: ``"first"``: prove the model of every layer on its first batch, and again for every new kind of mask, mode
            and size of the batch: some rows, computed from what was captured, must equal what the layer returned.
            Otherwise `loss()` raises an error with the likely reason. ``"always"``: on every batch. ``"never"``: trust it.
        parallel: context parallelism: a :class:`streamkl.Parallel` with the ``context_group`` over which the sequences
            of both models are split. Default: that of torch's ``context_parallel`` region in which the student runs,
            which accelerate's ``maybe_context_parallel`` opens, too. LSEs of the models are not used then. The
            default of its ``gradients`` is ``"mean"``, as DDP and FSDP average them.
    """

    def __init__(
        self,
        teacher: torch.nn.Module | None,
        student: torch.nn.Module,
        *,
        layer_map: maps.LayerMap | None = None,
        head_map: maps.HeadMap | None = None,
        direction: maps.AskedDirection = "forward",
        attention: Kind = "self",
        tower: str | None = None,
        relations: Sequence[Relation] = ("qk",),
        relation_heads: int | None = None,
        temperature: float = 1.0,
        layer_weight: Mapping[int, float] | None = None,
        row_weight: str | None = None,
        head_weight: HeadWeight | None = None,
        rows: Literal["all", "labels"] = "all",
        sample_rows: float = 1,
        fused: bool = False,
        fused_values: bool = True,
        sinks: Sinks = "both",
        check_input: bool = True,
        verify: Verify = "first",
        parallel: Parallel | None = None,
    ) -> None:
        needs_values = "vv" in relations
        check_choice("verify", verify, ("first", "always", "never"))
        self._shares_model = teacher is None
        self.teacher = Capture(peft_model(student) if teacher is None else teacher, "teacher", needs_values, verify=verify)
        is_plain = tuple(relations) == ("qk",) and temperature == 1 and sample_rows == 1
        self.student = Capture(student, "student", needs_values, carries=fused and is_plain, verify=verify)
        self.student.drop, self.student.early_term = self.drop, self._early_term
        self.teacher.must_be_eval = not self._shares_model
        if self._shares_model:
            check_base_is_teacher(peft_model(student))
            self.teacher.takes = partial(adapters_are_off, self.student.model)
            self.student.takes = lambda: not self.teacher.takes()
            self.teacher.running = partial(base_model, peft_model(student))
        elif self.teacher.model is self.student.model:
            raise ValueError("teacher: must be another model than the student; copy.deepcopy(student) makes one, and "
                             "teacher=None is the base model of a PEFT student")  # fmt: skip
        for capture in (self.teacher, self.student):
            refuse_tensor_parallel(capture.model, capture.role)
        self.layer_map, self.head_map = maps.layer_map_of(layer_map), maps.head_map_of(head_map)
        check_flags(check_input=check_input, fused=fused, fused_values=fused_values)
        check_choice("direction", direction, ("forward", "reverse", "auto"))
        check_choice("attention", attention, ("self", "cross", "encoder"))
        check_choice("rows", rows, ("all", "labels"))
        if (attention, rows) == ("encoder", "labels"):
            raise ValueError("rows='labels': needs attention='self' or 'cross': labels are tokens of the decoder")
        if not relations or isinstance(relations, str) or not all(relation in RELATIONS for relation in relations):
            raise ValueError(f"relations={relations!r}: must be one or more of {', '.join(map(repr, RELATIONS))}")
        if attention == "cross" and tuple(relations) != ("qk",):
            raise ValueError(f"relations={relations!r}: must be ('qk',) with attention='cross': queries and keys are of other tokens")
        if relation_heads is not None and (not is_whole(relation_heads) or relation_heads < 1):
            raise ValueError(f"relation_heads={relation_heads!r}: must be None or a whole number, at least 1")
        if relation_heads is not None and (head_map is not None or set(relations) == {"qk"}):
            raise ValueError(f"relation_heads={relation_heads}: needs relations 'qq', 'kk' or 'vv', and no head_map")
        if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature={temperature!r}: must be a positive number")
        check_choice("sinks", sinks, ("both", "keys only"))
        models = self.teacher.model, self.student.model
        maps.check_against_configs(self.layer_map, self.head_map, *models, tower, attention)
        regroups = relation_heads is not None and "qk" not in relations
        self.direction = maps.direction_of(direction, None in (self.head_map or {}) or regroups, *models, tower, attention)
        self.attention, self.tower, self.relations = attention, tower, tuple(relations)
        self.temperature, self.rows, self.check_input = float(temperature), rows, check_input
        self.sample_rows, self.sinks, self.relation_heads = _checked_share(sample_rows), sinks, relation_heads
        self.fused, self.fused_values = fused, fused_values
        self.layer_weight = _checked_weights(layer_weight)
        self._weights = Weights(row_weight, head_weight)
        if relation_heads is not None and (row_weight is not None or head_weight is not None):
            raise ValueError(f"relation_heads={relation_heads}: needs row_weight=None and head_weight=None, which weight heads")
        if parallel is not None and (parallel.tensor_group is not None or parallel.loss_group is not None):
            raise ValueError("parallel: a distiller takes context_group alone, no tensor_group and no loss_group")
        self._asked_parallel = parallel or Parallel()
        self._depth = 0
        self._modes: dict[torch.nn.Module, bool] = {}  # training modes of the teacher before attach()
        self._verify, self._proven = verify, set()  # type: Verify, set[tuple]
        self.outside: dict[tuple[int, int], float] = {}
        """The share of the teacher's attention outside of the keys that both attend to, of the pairs where it is not 0."""
        self._last: dict[int, list[torch.Tensor]] = {}
        self._explained = Explanation([])
        self._teacher_of: dict[torch.nn.Module, str] = {}  # teacher layers of the fused layers in the last loss()
        self._cache: RowCache | None = None  # rows of the step whose attention carries early terms

    @property
    def last_losses(self) -> dict[int, torch.Tensor]:
        """KL of every student layer in the last `loss()`, detached, for logging; NaN if ``fused_values=False`` left it out, or
        no row of the layer counts, because ``row_weight="far:..."`` finds nothing that far away."""
        known = [loss for many in self._last.values() for loss in many]
        return {i: torch.stack(many).mean() if many else torch.full_like(known[0], torch.nan) for i, many in self._last.items()}

    @property
    def last_loss(self) -> torch.Tensor:
        """The value of the last `loss()`, from `last_losses`."""
        return self._mean_of_layers({i: loss for i, loss in self.last_losses.items() if self._last[i]})

    @property
    def carried_layers(self) -> list[int]:
        """The student layers whose attention carries a KL of the last `loss()`."""
        return sorted({pair.student_layer for pair in self._explained.pairs if pair.fused})

    def explain(self) -> Explanation:
        """Which layer pairs of the last `loss()` are fused, and why the others are not; it prints as a table.

        Raises:
            RuntimeError: there was no `loss()`.
        """
        if not self._explained.pairs:
            raise RuntimeError("AttentionDistiller: explain() tells of the last loss(): call that first")
        return self._explained

    # ---- Attaching -----------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        return self._depth > 0

    def attach(self) -> AttentionDistiller:
        """Start to record queries and keys. May be nested: the last detach() counts."""
        if self._depth == 0:
            self._modes = {} if self._shares_model else modes_of(self.teacher.model)
            self.teacher.attach()
            try:
                self.student.attach()
            except ValueError:
                self.teacher.detach()
                raise
        self._depth += 1
        return self

    def detach(self) -> None:
        """Restore the attention of both models, and the mode of the teacher, and free everything that was captured."""
        if self._depth == 1:
            self.student.detach()
            self.teacher.detach()
            restore_modes(self._modes)
            self._modes = {}
        self._depth = max(self._depth - 1, 0)

    def drop(self) -> None:
        """Drop the step: what was captured of both models since the last `loss()`."""
        self._cache = None
        self.teacher.close()
        self.student.close()

    def reset(self) -> None:
        """Drop the step, and prove the layers again on the next one."""
        self.teacher.reset()
        self.student.reset()
        self._proven.clear()
        self._teacher_of, self._cache = {}, None

    def __enter__(self) -> AttentionDistiller:
        return self.attach()

    def __exit__(self, *_) -> None:
        self.detach()

    # ---- The loss ----------------------------------------------------------------------------------------------------

    def loss(
        self, *, labels: torch.Tensor | None = None, row_weight: torch.Tensor | None = None, sample_rows: float | None = None
    ) -> torch.Tensor:  # fmt: skip
        """Attention KL of the student's last forward, f32: mean over layers, heads and rows that are not padding. A layer
        with several teacher layers has the mean of their KLs.

        If the teacher has not run since the last loss(), it runs now on the same input.

        Args:
            labels: as the student takes them, for ``rows="labels"``, if it did not receive them.
            row_weight: weight of every row in the mean, ``[batch, len_q]``, on top of that of the distiller.
            sample_rows: the share of the rows for this loss, also in eval mode. Default: that of the distiller.
        """
        return self._mean_of_layers(self.losses(labels=labels, row_weight=row_weight, sample_rows=sample_rows))

    def _mean_of_layers(self, losses: dict[int, torch.Tensor]) -> torch.Tensor:
        weights = {i: self.layer_weight.get(i, 1.0) for i in losses}
        total = sum(weights.values())
        if total == 0:
            raise ValueError(
                f"layer_weight={self.layer_weight!r}: at least one of the layers {list(losses)} must count"
            )
        device = next(iter(losses.values())).device
        losses = {i: loss.to(device) for i, loss in losses.items()}  # the layers of a model may be on several
        if len(set(weights.values())) == 1:
            return torch.stack(list(losses.values())).mean()
        return torch.stack([losses[i] * (weight / total) for i, weight in weights.items()]).sum()

    def losses(
        self, *, labels: torch.Tensor | None = None, row_weight: torch.Tensor | None = None, sample_rows: float | None = None
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        """The terms of `loss()`: the KL of every student layer, with its gradient. Frees what was captured."""
        try:
            return self._losses(labels, row_weight, sample_rows)
        finally:
            self.drop()

    def _losses(self, labels, row_weight, share) -> dict[int, torch.Tensor]:
        pairs, parallel = self.pairs(), self.parallel()
        given = self._row_weight(labels, row_weight)
        share = self._share(share)
        cache = self._cache if self._cache is not None and share == 1 else RowCache(share)
        if parallel and cache.share < 1:
            raise ValueError(f"sample_rows={cache.share:g}: must be 1 under context parallelism")
        if parallel and self._weights.rows is not None:
            raise ValueError(f"row_weight={self._weights.rows!r}: must be None under context parallelism")
        by_layer: dict[int, list[torch.Tensor]] = {}
        self._last, self._explained, self._teacher_of = {}, Explanation([]), {}
        apart = self._why_apart(parallel, share)
        counted = {key: pair for key, pair in pairs.items() if self.layer_weight.get(key[0], 1) > 0} or pairs
        weights = {
            key: self._weights.of(key[0], pair, given, self.direction, self.temperature, cache) for key, pair in counted.items()
        }
        without = self._weights.without_rows(weights)
        for (i, j), pair in counted.items():
            if (i, j) in without:
                self._last.setdefault(i, [])
                continue
            weight = weights.pop((i, j))
            if not parallel:
                self._prove_pair((i, j), pair, cache)
            reason = apart
            if reason is None:
                try:
                    loss = pair.carry(weight, self.direction, cache, self.fused_values)
                    self._teacher_of[self.student.model.get_submodule(pair.s.name)] = pair.t.name
                except Apart as why:
                    reason = str(why)
            if reason is not None:
                loss = pair.loss(weight, self.direction, self.relations, self.temperature, cache, parallel)
            is_known = reason is not None or self.fused_values
            by_layer.setdefault(i, []).append(loss)
            self._last.setdefault(i, []).append(loss.detach() if is_known else torch.full_like(loss, torch.nan))
            self._explained.pairs.append(FusedPair(i, pair.s.name, j, reason is None, reason or ""))
        losses = {i: torch.stack(many).mean() for i, many in by_layer.items()}
        first = next(iter(losses))
        losses[first] = reach_everything(losses[first], self.student.model, self.student.step.output)
        return losses

    def _why_apart(self, parallel: Parallel | None, share: float) -> str | None:
        """Why no layer is fused, if the distiller's own options tell."""
        if not self.fused:
            return "fused=False"
        if parallel:
            return "the sequences are split (context parallelism)"
        if self.relations != ("qk",):
            return f"relations={self.relations!r}"
        if self.temperature != 1:
            return f"temperature={self.temperature:g}"
        if self.sample_rows != 1 or share != 1:
            return f"sample_rows={self.sample_rows if share == 1 else share:g}"
        return None

    def _early_term(self, call: Call, step: Step) -> tuple[Term, tuple] | None:
        """The KL of a call that carried one in the last loss(), if the teacher has run. Weights of rows come with loss().

        It is only a beginning: loss() makes the term again unless it has the same teacher, rows and direction, and it
        raises what is an error.
        """
        name = self._teacher_of.get(call.module)
        if name is None or not self.fused_values or not self.teacher.has_run or self.student.is_checkpointing:
            return None
        self._cache = self._cache or RowCache()
        try:
            layer_t = next(layer for layer in self.teacher.layers if layer.name == name).require()
            pair = Pair("", layer_t, early_layer(call, step.read_keys(call)), None, self.sinks)
            return pair.early_term(self.direction, self._cache)
        except (Apart, Refused, ValueError, StopIteration):
            return None

    def _prove_pair(self, key: tuple[int, int], pair: Pair, cache: RowCache) -> None:
        sizes = [length.bit_length() for length in (pair.s.q.shape[2], pair.s.k.shape[2])]
        kind = (*key, *sizes, pair.s.q.shape[0] > 1, cache.share < 1, pair.s.counted is None, pair.has_same_keys(cache))
        if self._verify == "never" or (self._verify == "first" and kind in self._proven):
            return
        share = prove_pair(pair, cache)
        self._proven.add(kind)
        if not pair.has_same_keys(cache):
            self.outside[key] = share
            if share > 0.05:
                warnings.warn(
                    f"AttentionDistiller: {pair.where}: {share:.0%} of the teacher's attention is on keys that the student does not attend "
                    "to: the KL leaves it out", stacklevel=5,
                )  # fmt: skip

    def pairs(self) -> dict[tuple[int, int], Pair]:
        """{(student layer, teacher layer): their captured layers}, after the teacher has run and everything is checked.

        Drops the step if a check fails.
        """
        try:
            return self._pairs()
        except BaseException:
            self.drop()
            raise

    def _pairs(self) -> dict[tuple[int, int], Pair]:
        if not self.attached:
            raise RuntimeError(
                "AttentionDistiller: call attach(), or use it as a context manager, before the models run"
            )
        if not self.student.has_run:
            raise RuntimeError("AttentionDistiller: the student has not run since the last loss()")
        self._check_region(self.student)  # first: a region that ends changes the inputs back in place
        if not self.teacher.has_run:
            run_teacher(self.teacher, self.student)
        elif self.check_input:
            check_same_input(self.teacher, self.student)
        if self.teacher.step.training:
            how = (
                "the base model ran in training mode: leave its forward to loss(), or call eval() before"
                if self._shares_model
                else "the compiled teacher ran in training mode: call teacher.eval() before"
            )
            raise RuntimeError(f"AttentionDistiller: {how}")
        self._check_region(self.teacher)
        parallel = self.parallel()
        self.teacher.ranks = self.student.ranks = ranks_of(parallel)
        layers_t, layers_s = self._layers(self.teacher), self._layers(self.student)
        if parallel is None:
            check_packing(self.student, "student", layers_s)
            check_packing(self.student, "teacher", layers_t)
        else:
            check_shards(self.student, layers_s, self.attention, parallel)
        if parallel is not None and self._verify != "never":
            warnings.warn(
                "AttentionDistiller: layers that run on shards of their sequences (context parallelism) are not proven: compare their "
                "loss with that of whole sequences once, then pass verify='never'", stacklevel=5,
            )  # fmt: skip
        if self.layer_map is None:
            chosen = maps.default_layers(layers_t, layers_s)
        else:
            chosen = maps.numbered_layers(self.layer_map, layers_t, layers_s)
        for name, of_layers in (
            ("layer_weight", self.layer_weight), ("head_weight", self._weights.layers), ("head_map", self.head_map or {})
        ):  # fmt: skip
            maps.check_layers(name, (i for i in of_layers if i is not None), chosen, len(layers_s))
        self._check_graph([layers_s[i] for i in chosen])
        return {
            (i, j): Pair(
                f"student layer {i} and teacher layer {j}",
                layers_t[j].require(),
                layers_s[i].require(),
                self._heads(i),
                self.sinks,
                self.relation_heads,
            )
            for i, many in chosen.items()
            for j in many
        }

    def _check_region(self, ran: Capture) -> None:
        """Without a group of the caller, a model must have run in the context-parallel region that is active now, if any."""
        if self._asked_parallel.context_group is None and ran.step.region != active_region():
            raise RuntimeError(
                "AttentionDistiller: run both models, uncompiled, and loss() inside one context-parallel region, or pass "
                "parallel=streamkl.Parallel(context_group=...)"
            )

    def parallel(self) -> Parallel | None:
        """The groups of attention_kl, if the student ran on shards of its sequences.

        Raises:
            RuntimeError: the student has not run since the last loss(), or nobody knows over which ranks its sequences are split.
        """
        if not self.student.has_run:
            raise RuntimeError(
                "AttentionDistiller: parallel() tells how the last forward of the student ran, and it has not run since the last loss(): "
                "run it while the distiller is attached, and call parallel() before loss()"
            )
        return parallel_of(self.student.step.region, self._asked_parallel)

    def _layers(self, capture: Capture) -> list[Layer]:
        towers = towers_of(capture.model)
        tower = self.tower or ("language" if "language" in towers else towers[0])
        layers = [layer for layer in capture.layers if (layer.kind, layer.tower) == (self.attention, tower)]
        if not layers:
            asked, *found = (
                f"attention={kind!r}" + (f", tower={part!r}" if len(towers) > 1 or self.tower else "")
                for kind, part in (
                    (self.attention, tower),
                    *sorted({(layer.kind, layer.tower) for layer in capture.layers}),
                )
            )
            undone = " (set_attn_implementation() between attach() and detach() ends the capture)" if capture.is_undone() else ""
            raise ValueError(
                f"{capture.role}: the last forward of {type(capture.step.module).__name__} has no layers for {asked}; it has: "
                f"{'; '.join(found) or 'none' + undone}"
            )
        if skipped := skipped_layers(capture.model, layers, capture.layers):
            raise ValueError(
                f"{capture.role}: the last forward skipped {', '.join(skipped)}, and all layers must run, because they are counted: set "
                "layerdrop=0 (or encoder_layerdrop, decoder_layerdrop) in the config before the model trains, and give each model a config "
                "of its own, in which num_hidden_layers is that of its layers"
            )
        return layers

    def _heads(self, i: int) -> dict[int, int] | None:
        return None if self.head_map is None else self.head_map.get(i, self.head_map.get(None))

    def _share(self, asked: float | None) -> float:
        if asked is not None:
            return _checked_share(asked)
        return self.sample_rows if torch.is_grad_enabled() and self.student.model.training else 1.0

    def _check_graph(self, layers: list[Layer]) -> None:
        """With gradients enabled, a KL that trains nothing is an error."""
        if not torch.is_grad_enabled() or all(layer.has_graph and layer.q.requires_grad for layer in layers):
            return
        if not self.student.step.has_graph:
            reason = "its last forward ran under torch.no_grad(), as a second forward for metrics does: call loss() before that"
        elif self.student.is_checkpointing and not all(layer.has_graph for layer in layers):
            reason = (
                "reentrant checkpointing keeps no graph of its queries and keys: call "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
            )
        elif any(
            tensor is not None and tensor.requires_grad
            for layer in layers
            for tensor in (layer.q, layer.k, layer.sink)
        ):
            return  # the lower layers are frozen
        else:
            reason = "no parameter that its queries and keys depend on requires a gradient"
        raise RuntimeError(
            f"AttentionDistiller: the KL would not train the student: {reason}; to only measure the KL, call loss() under "
            "torch.no_grad()"
        )

    def _row_weight(self, labels: torch.Tensor | None, row_weight: torch.Tensor | None) -> torch.Tensor | None:
        if self.rows == "all":
            return row_weight
        if self.parallel():
            raise ValueError(
                "rows='labels': a shard of labels does not contain the next token of all its rows: pass row_weight"
            )
        labels = labels if labels is not None else self.student.step.arguments().get("labels")
        if labels is None:
            raise ValueError("rows='labels': the student ran without labels: pass loss(labels=...)")
        model = self.student.model
        if labels.dim() != 2:
            raise ValueError(
                f"rows='labels': labels {list(labels.shape)} of {type(model).__name__} must be [batch, length], one per token"
            )
        counted = labels != -100
        if self.attention == "self" and predicts_next_token(model):
            if model.can_generate() or all(layer.causal for layer in self._layers(self.student)):
                counted = torch.nn.functional.pad(counted[:, 1:], (0, 1))  # row i predicts token i + 1
        return counted.float() if row_weight is None else counted * row_weight


def _checked_weights(asked: Any) -> dict[int, float]:
    """The layer_weight of a distiller."""
    if asked is None:
        return {}
    weights = asked.values() if isinstance(asked, Mapping) else [None]
    if not all(isinstance(weight, (int, float)) and not isinstance(weight, bool) for weight in weights):
        raise ValueError(f"layer_weight={asked!r}: must be {{student layer: weight}}")
    if not all(0 <= weight < math.inf for weight in weights):  # type: ignore[operator]
        raise ValueError(f"layer_weight={asked!r}: must be finite, and not negative")
    return dict(asked)


def _checked_share(share: float) -> float:
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"sample_rows={share!r}: must be a number above 0, up to 1")
    return float(share)
