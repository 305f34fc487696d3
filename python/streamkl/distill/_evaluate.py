"""What a student has learnt: its attention KL on held-out data, retrieval by depth, language loss and attention maps."""

from __future__ import annotations

import json
import reprlib
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, get_args, get_origin, get_type_hints

import numpy as np
import torch

from ..hf import AttentionDistiller
from ..hf._adapters import eval_mode
from ..hf._compare import compare_captured
from ..hf._stats import stats_of_layer
from ._data import Sequences
from ._needles import VALUE, NeedleBatch, Retrieval, needle_batches
from ._objective import Outputs, next_tokens
from ._options import Options, UserError
from ._output_losses import row_losses

POSITIONS = 16  # buckets of a sequence
BUCKETS = 64  # buckets of queries, and of keys, in a map
MAP_LAYERS, MAP_HEADS = 4, 8  # maximum numbers of maps, unless layers and heads are named


@dataclass
class Evaluation:
    """Results of a student, and of its teacher, on held-out sequences. A pair is [student layer, teacher layer]."""

    sequences: int
    context: int
    pairs: list[list[int]]
    kl: float  # nats, mean over pairs, heads and rows
    kl_layer: list[float]  # one number per pair
    kl_head: list[list[float]]  # [pair][student head]
    kl_position: list[list[float | None]]  # [pair][bucket of positions]; None: no row is there
    distance_edges: list[int]  # tokens between a query and a key
    kl_distance: list[list[float]]  # [pair][distance]: what the keys of a distance contribute
    heads: list[list[list[int]]]  # [pair][head]: the student head, then the teacher heads that it learns from
    distance_share: dict[str, list[list[float]]]  # {"teacher", "student"}: [pair][bucket]: 0, 1, 2-3, 4-7, ... tokens
    entropy: dict[str, list[float]]  # {"teacher", "student"}: nats, mean over heads and rows of each pair
    output_kl: float | None = None  # nats; None: there is no language head
    language: dict[str, list[float | None]] = field(
        default_factory=dict
    )  # loss of {"teacher", "student"} by position
    language_sequence: dict[str, list[float]] = field(default_factory=dict)  # loss of each held-out sequence
    retrieval: list[dict[str, Any]] = field(default_factory=list)  # one per length
    maps: list[dict[str, Any]] = field(default_factory=list)  # {"pair", "head", "teacher", "student", "kl"}
    measured: dict[str, Any] = field(default_factory=dict)  # the options that say what was measured

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """The evaluation in a file with the result of as_json(). Raises UserError if the file has anything else."""
        again = "delete it, and --resume evaluates again"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read: {error}: {again}") from error
        hints = get_type_hints(cls)
        if isinstance(found, dict):
            found.setdefault("measured", {})  # earlier versions did not say
        if not isinstance(found, dict) or found.keys() != hints.keys():
            raise UserError(f"{path}: must be an object with {', '.join(hints)}: {again}")
        for name, hint in hints.items():
            if not _fits(found[name], hint):
                raise UserError(f"{path}: {name}={reprlib.repr(found[name])}: must be {hint}: {again}")
        return cls(**found)


def what_is_measured(options: Options, held_out: Sequences) -> dict[str, Any]:
    """Evaluations with the same options and sequences measure the same things."""
    names = ("eval_sequences", "needles", "map_layers", "map_heads", "direction")
    return {
        **{name: getattr(options, name) for name in names},
        "needle_lengths": options.lengths,
        "data": held_out.digest(),
    }


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON has the type of an annotation."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is list:
        return isinstance(value, list) and all(_fits(each, parts[0]) for each in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(each, parts[1]) for each in value.values())
    if parts:  # a union
        return any(_fits(value, part) for part in parts)
    return hint is Any or type(value) in ((int, float) if hint is float else (hint,))


@torch.no_grad()
def evaluate(
    teacher: Any, student: Any, held_out: Sequences, options: Options, *, context: Callable[[], Any] = nullcontext,
    progress: Callable[[int, int], None] = lambda done, total: None, inside: Callable[[Callable[[], Any]], Any] = lambda f: f(),
) -> Evaluation:  # fmt: skip
    """Runs both models on held-out sequences and on needles.

    `context` is entered around forwards, for autocast; `inside` runs a function inside the module that wraps the
    student.
    """
    count = min(options.eval_sequences, len(held_out))
    batches = {
        length: needle_batches(held_out, length, options.needles, options.seed)
        for length in options.lengths
        if options.needles
    }
    total, done = count + sum(map(len, batches.values())), 0
    outputs, device = inside(lambda: (Outputs(teacher), Outputs(student))), student.device
    distiller_options = {**options.distiller(), **_sinks(teacher)}
    with eval_mode(student), context(), AttentionDistiller(teacher, student, **distiller_options) as distiller:
        sums = _Sums(options)
        for index in range(count):
            ids = held_out.batch([index]).to(device)
            inside(partial(sums.add, distiller, outputs, ids))
            progress(done := done + 1, total)
        result = sums.result(count, what_is_measured(options, held_out))
        for length, parts in batches.items():
            retrieval = Retrieval()
            for batch in parts:
                inside(partial(_retrieve, retrieval, distiller, outputs, batch))
                progress(done := done + 1, total)
            if parts:
                result.retrieval.append(retrieval.result(length, _has_answers(outputs)))
    return result


@torch.no_grad()
def retrieval_scores(
    teacher: Any, student: Any, data: Sequences, options: Options, context: Callable[[], Any]
) -> dict[int, list[float]]:  # fmt: skip
    """{student layer: the share of needles that the teacher heads of each student head find}."""
    outputs, retrieval = (Outputs(teacher), Outputs(student)), Retrieval()
    student.eval()
    with context(), AttentionDistiller(teacher, student, **options.distiller(), **_sinks(teacher)) as distiller:
        for length in options.lengths:
            for batch in needle_batches(data, length, options.needles, options.seed):
                _read_needles(retrieval, distiller, outputs, batch)
    return retrieval.scores()


def _sinks(teacher: Any) -> dict[str, Any]:
    """Maps and distances are those of keys: the evaluation leaves attention sinks out."""
    has_sinks = any(name.endswith("sinks") for name, _ in teacher.named_parameters())
    return dict(sinks="keys only") if has_sinks else {}


def _has_answers(outputs: tuple[Outputs, Outputs]) -> bool:
    return all(each.head is not None and each.is_causal for each in outputs)


def _retrieve(retrieval: Retrieval, distiller, outputs: tuple[Outputs, Outputs], batch: NeedleBatch) -> None:
    outputs_t, outputs_s = outputs
    hidden_t, hidden_s = _read_needles(retrieval, distiller, outputs, batch)
    if not _has_answers(outputs):
        return
    answers = batch.answers().to(hidden_s.device)
    predicted = [
        each.head(hidden[:, batch.rows]).argmax(-1).unflatten(-1, (-1, VALUE))
        for each, hidden in ((outputs_t, hidden_t), (outputs_s, hidden_s))
    ]
    retrieval.add_answers(batch, *(each == answers for each in predicted))


def _read_needles(retrieval: Retrieval, distiller, outputs: tuple[Outputs, Outputs], batch: NeedleBatch) -> Any:
    """Adds where the attention of both models looks. Returns their last hidden states."""
    outputs_t, outputs_s = outputs
    ids = batch.ids.to(outputs_s.model.device)
    hidden_s, hidden_t = outputs_s.hidden(ids), outputs_t.hidden(ids)
    retrieval.add_attention(distiller.pairs(), batch)
    distiller.drop()
    return hidden_t, hidden_s


class _Sums:
    """Sums over held-out sequences."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.heads: dict[tuple[int, int], torch.Tensor] = {}
        self.positions: dict[tuple[int, int], np.ndarray] = {}
        self.maps: dict[tuple[int, int], Any] = {}  # maps of the first sequence
        self.kl_maps: dict[tuple[int, int], torch.Tensor] = {}
        self.losses: dict[str, list[torch.Tensor]] = {}
        self.head_names: dict[tuple[int, int], list[list[int]]] = {}
        self.looks: dict[tuple[str, int], np.ndarray] = {}  # [role, layer]: entropy, then the shares by distance
        self.length = 0

    def add(self, distiller: AttentionDistiller, outputs: tuple[Outputs, Outputs], ids: torch.Tensor) -> None:
        outputs_t, outputs_s = outputs
        hidden_s, hidden_t = outputs_s.hidden(ids), outputs_t.hidden(ids)
        self.length = ids.shape[1]
        self._look(distiller.pairs())
        found = compare_captured(distiller, (BUCKETS, BUCKETS))
        for key, rows in found.rows.items():
            self.heads[key] = self.heads.get(key, 0) + rows.nanmean((0, 2)).double().cpu()
            parts = [part.nanmean().item() for part in rows.tensor_split(min(POSITIONS, self.length), 2)]
            self.positions[key] = self.positions.get(key, 0) + np.array(parts)
            self.kl_maps[key] = self.kl_maps.get(key, 0) + found.maps[key].kl.mean(0).double().cpu()
        self.maps = self.maps or found.maps
        if outputs_s.head is None or outputs_t.head is None:
            return
        size_t, size_s = (each.model.config.get_text_config().vocab_size for each in outputs)
        is_same = size_t == size_s
        labels = next_tokens(ids)
        heads = outputs_t.head, outputs_s.head
        losses = row_losses(*heads, hidden_t if is_same else None, hidden_s, labels)
        of_teacher = row_losses(None, outputs_t.head, None, hidden_t, labels)
        self.losses.setdefault("student", []).append(losses["language"][:, :-1].cpu())
        self.losses.setdefault("teacher", []).append(of_teacher["language"][:, :-1].cpu())
        if is_same:
            self.losses.setdefault("output", []).append(losses["output"].cpu())
        if not outputs_s.is_causal:
            del self.losses["student"], self.losses["teacher"]

    def _look(self, pairs: dict[tuple[int, int], Any]) -> None:
        """Entropy and distances of every layer: layers of the teacher may be in several pairs."""
        self.head_names = {key: _heads_of(pair) for key, pair in pairs.items()}
        layers = {
            (role, index): layer
            for key, pair in pairs.items()
            for role, index, layer in (("student", key[0], pair.s), ("teacher", key[1], pair.t))
        }
        buckets = (self.length - 1).bit_length() + 1
        for (role, index), layer in layers.items():
            found = stats_of_layer(
                layer, f"{role} layer {index}", ("entropy", "distance_mass"), distance_buckets=buckets
            )
            assert found.entropy is not None  # requested above
            shares = found.distance_share.double().mean((0, 1)).tolist()
            numbers = np.array([found.entropy.double().mean().item(), *shares])
            self.looks[role, index] = self.looks.get((role, index), 0) + numbers

    def result(self, count: int, measured: dict[str, Any]) -> Evaluation:
        pairs = list(self.heads)
        looks = {
            role: [self.looks[role, pair[at]] / count for pair in pairs]
            for at, role in ((1, "teacher"), (0, "student"))
        }
        heads = [(self.heads[pair] / count).tolist() for pair in pairs]
        layers = [float(np.mean(each)) for each in heads]
        edges, distances = self._distances(pairs, count)
        output = self.losses.get("output")
        return Evaluation(
            sequences=count, context=self.length, pairs=[list(pair) for pair in pairs], kl=float(np.mean(layers)),
            kl_layer=layers, kl_head=heads, kl_position=[_without_nan(self.positions[pair] / count) for pair in pairs],
            distance_edges=edges, kl_distance=distances, heads=[self.head_names[pair] for pair in pairs],
            distance_share={role: [each[1:].tolist() for each in found] for role, found in looks.items()},
            entropy={role: [float(each[0]) for each in found] for role, found in looks.items()},
            output_kl=None if output is None else torch.cat(output).mean().item(),
            language={role: self._by_position(role) for role in ("teacher", "student") if role in self.losses},
            language_sequence={
                role: torch.cat(self.losses[role]).mean(1).tolist() for role in ("teacher", "student") if role in self.losses
            },
            maps=self._chosen_maps(pairs), measured=measured,
        )  # fmt: skip

    def _by_position(self, role: str) -> list[float | None]:
        losses = torch.cat(self.losses[role])
        return [part.mean().item() for part in losses.tensor_split(min(POSITIONS, losses.shape[1]), 1)]

    def _distances(self, pairs: list, count: int) -> tuple[list[int], list[list[float]]]:
        """KL by the distance of a key, in doubling steps of map cells: a cell is as wide as the context / BUCKETS."""
        size = next(iter(self.kl_maps.values())).shape[0]
        apart = (torch.arange(size)[:, None] - torch.arange(size)).abs()
        rows = torch.tensor([self.length * cell // size for cell in range(size + 1)]).diff()[:, None]  # of each cell
        steps = [0, 1]
        while steps[-1] < size:
            steps.append(min(2 * steps[-1], size))
        distances = []
        for pair in pairs:
            image = self.kl_maps[pair] / count * rows / self.length
            distances.append([image[(apart >= a) & (apart < b)].sum().item() for a, b in zip(steps, steps[1:])])
        return [step * self.length // size for step in steps], distances

    def _chosen_maps(self, pairs: list) -> list[dict[str, Any]]:
        layers = _chosen("layers", self.options.map_layers, sorted({i for i, _ in pairs}), MAP_LAYERS)
        return [
            dict(pair=list(pair), head=head, **{name: _rounded(getattr(found, name)[head]) for name in found._fields})
            for pair, found in self.maps.items()
            if pair[0] in layers
            for head in _chosen("heads", self.options.map_heads, list(range(found.kl.shape[0])), MAP_HEADS)
        ]


def _heads_of(pair: Any) -> list[list[int]]:
    """Of each row of its results: the student head, then the teacher heads that it learns from."""
    if pair.heads is not None:
        return [[student, teacher] for student, teacher in pair.heads.items()]
    heads_t, heads_s = pair.t.q.shape[1], pair.s.q.shape[1]
    group = heads_t // heads_s
    return [[head, *range(head * group, (head + 1) * group)] for head in range(heads_s)]


def _chosen(what: str, named: list[int], known: list[int], most: int) -> list[int]:
    """Those that are named; by default, some of those that are known, evenly spread."""
    if missing := set(named) - set(known):
        raise UserError(f"--map-{what}={sorted(missing)}: the student has the {what} {known}")
    return named or [known[at] for at in np.unique(np.linspace(0, len(known) - 1, most).round().astype(int))]


def _without_nan(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def _rounded(image: torch.Tensor) -> list[list[float]]:
    """Three digits: a map is looked at, and pages stay small."""
    return [[float(f"{value:.3g}") for value in row] for row in image.double().cpu().tolist()]
