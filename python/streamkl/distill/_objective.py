"""The loss of a step: attention KL, output KL, language loss and error of the hidden states of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..hf import AttentionDistiller, capture
from ..hf._adapters import eval_mode
from ..hf._maps import nearest_layer
from ..hf._parameters import reach_everything
from ._fast import rounded_weights
from ._options import Options, UserError
from ._output_losses import output_losses


class Objective(torch.nn.Module):
    """A student with its loss: wrappers such as DDP and FSDP wrap this module, so that all of a step runs inside them."""

    def __init__(
        self, teacher: Any, student: Any, options: Options, weights: dict[str, Any], context_group: Any = None
    ) -> None:
        """`weights` are options of AttentionDistiller, about rows, heads and layers.

        `context_group` has the ranks that share a sequence.
        """
        super().__init__()
        self.module = student  # the name by which streamkl.hf finds the model inside wrappers
        self._no_split_modules = student._no_split_modules
        more = dict(
            sample_rows=options.sample_rows, relations=options.relations, temperature=options.temperature,
            **options.distiller(), **weights,
        )  # fmt: skip
        self.distiller = AttentionDistiller(teacher, student, **more)
        self.teaches_attention = True  # this phase of the training has the attention KL
        weights = dict(
            attention=options.attention_weight, output=options.output_weight, language=options.language_weight,
            hidden=options.hidden_weight,
        )  # fmt: skip
        self.weights = {name: weight for name, weight in weights.items() if weight > 0}
        self.outputs = (Outputs(teacher), Outputs(student))  # a tuple hides the teacher from this module's parameters
        _check(*self.outputs, self.weights)
        self.ranks, self.context_group = options.context_parallel, context_group
        # A recomputation and FSDP look for the weights after the forward, when the rounded ones are gone.
        self.rounds = options.precision == "bfloat16" and not (options.gradient_checkpointing or options.shard)
        if "hidden" in self.weights:
            self._attends = attention_layers(teacher), attention_layers(student)
            self._layers = {} if options.layer_map else _hidden_layers(teacher, student)
            self._is_paired = False  # the layers that attend have the teacher layers of the attention KL
            if layer_map := options.layer_map:
                of_teacher, of_student = self._attends
                if len(layer_map) != len(of_student) or max(layer_map) >= len(of_teacher):
                    raise UserError(f"--layer-map={layer_map}: the student has {len(of_student)} layers that attend, and the teacher "
                                    f"{len(of_teacher)}, numbered from 0")  # fmt: skip
                self._pair(enumerate(layer_map), layer_map)

    def attached(self) -> Any:
        """Inside this context the attention of both models is recorded, if the loss needs it."""
        return self.distiller if "attention" in self.weights else nullcontext()

    def pairs_in_words(self, ids: torch.Tensor) -> list[str]:
        """Which layer and heads of the student learn from which of the teacher, and what of the teacher the KL leaves out."""
        with self.distiller as distiller, torch.no_grad():
            self.outputs[1].hidden(ids)
            pairs = distiller.pairs()
            distiller.loss()
        return [
            f"{pair.s.name} ({pair.s.q.shape[1]} heads) learns from {pair.t.name} ({pair.t.q.shape[1]} heads); "
            f"{distiller.outside.get(key, 0.0):.1%} of the teacher's attention is on keys that the student does not see"
            for key, pair in pairs.items()
        ]

    @property
    def config(self) -> Any:
        return self.module.config

    def forward(self, ids: Any, labels: torch.Tensor | None = None, positions: torch.Tensor | None = None) -> Any:
        """{"loss", "attention", "output", "language", "hidden"}, as far as they have a weight.

        `labels` and `positions` are those of a shard of the sequences, under context parallelism. If `ids` is a
        function, its result: a sharded student must run inside this module.
        """
        if callable(ids):
            return ids()
        if not (self.rounds and torch.is_grad_enabled()):
            return self._losses(ids, labels, positions)
        # A function as `ids` is called inside this module, whose weights are the rounded ones meanwhile.
        inside = partial(self._losses, ids, labels, positions)
        return torch.func.functional_call(self, rounded_weights(self), (inside,))

    def _losses(
        self, ids: torch.Tensor, labels: torch.Tensor | None, positions: torch.Tensor | None
    ) -> dict[str, Any]:
        outputs_t, outputs_s = self.outputs
        states_s: list[torch.Tensor] | None = [] if "hidden" in self.weights else None
        states_t: list[torch.Tensor] | None = None if states_s is None else []
        hidden_s: Any = outputs_s.hidden(ids, positions, states_s)
        hidden_t: Any = None
        if self.weights.keys() & {"output", "hidden"}:
            with torch.no_grad():
                hidden_t = outputs_t.hidden(ids, positions, states_t)
        losses = {}
        if "attention" in self.weights and self.teaches_attention:
            losses["attention"] = self.distiller.loss()
            if states_s is not None:
                self._pair((pair.student_layer, pair.teacher_layer) for pair in self.distiller.explain().pairs)
        elif "attention" in self.weights and states_s is not None and not self._is_paired:
            self._pair(self.distiller.pairs())
        self.distiller.drop()
        total: Any = 0.0
        if "output" in self.weights and outputs_s.head is None:
            losses["output"] = F.mse_loss(hidden_s.float(), hidden_t.float())
            total = self.weights["output"] * losses["output"]
        elif self.weights.keys() & {"output", "language"}:
            labels = next_tokens(ids) if labels is None else labels
            length = ids.shape[1] * self.ranks  # tokens of a sequence; the last one predicts nothing
            weights = (self.weights.get("output", 0.0), self.weights.get("language", 0.0))
            labeled = ids.numel() * (length - 1) / length
            compared = hidden_t if "output" in self.weights else None
            total, *both = output_losses(outputs_t.head, outputs_s.head, compared, hidden_s, labels, weights, labeled)
            losses |= {name: loss for name, loss in zip(("output", "language"), both) if name in self.weights}
        if states_s is not None and states_t is not None:
            pairs = [(states_s[i + 1], states_t[j + 1]) for i, j in self._layers.items()]
            losses["hidden"] = self._relative_error(pairs)
            total = total + self.weights["hidden"] * losses["hidden"]
        if "attention" in losses:
            total = total + self.weights["attention"] * losses["attention"]
        # No loss reaches the pooler of an encoder, or the vision tower of a model that reads text.
        return {**losses, "loss": reach_everything(total, self.module, hidden_s)}

    def _relative_error(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Squared error of hidden states over the squares of the teacher's: the size of a layer's states does not count.

        The squares are those of whole sequences, whose first token has most of them in many models.
        """
        errors = torch.stack([F.mse_loss(state_s.float(), state_t.float()) for state_s, state_t in pairs])
        squares = torch.stack([state_t.float().square().mean() for _, state_t in pairs])
        if self.context_group is not None:
            torch.distributed.all_reduce(squares, group=self.context_group)
            squares /= self.ranks
        return (errors / squares).mean()

    def _pair(self, pairs: Iterable[tuple[int, int]], layer_map: list[int] | None = None) -> None:
        """Compares the hidden states of pairs of layers, numbered among those that attend.

        The state of a model's last layer has the final norm: it is compared with that of a last layer alone.
        """
        of_teacher, of_student = self._attends
        last_t, last_s = (each.model.config.get_text_config().num_hidden_layers - 1 for each in self.outputs)
        for i, j in ((of_student[i], of_teacher[j]) for i, j in pairs):
            if (i == last_s) == (j == last_t):
                self._layers[i] = j
            elif layer_map:
                raise UserError(f"--layer-map={layer_map}: --hidden-weight needs the last layer to learn from the last one: only their "
                                "hidden states have the final norm")  # fmt: skip
        self._is_paired = True


def _hidden_layers(teacher: Any, student: Any) -> dict[int, int]:
    """The teacher layer of each student layer whose hidden states are compared: all layers, evenly spread."""
    count_t, count_s = (model.config.get_text_config().num_hidden_layers for model in (teacher, student))
    return {i: nearest_layer(range(count_t), i, count_s, count_t) for i in range(count_s)}


@torch.no_grad()
def attention_layers(model: Any) -> list[int]:
    """The number of each layer that attends, among all layers: a hybrid model has others, too, which no option counts."""
    with eval_mode(model), capture(model) as layers:
        Outputs(model).hidden(_some_tokens(model))
    names = [layer.name for layer in layers if (layer.kind, layer.tower) == ("self", "language")]
    return [next(int(part) for part in name.split(".") if part.isdigit()) for name in names]


def next_tokens(ids: torch.Tensor) -> torch.Tensor:
    """The label of every row; the last one has none."""
    return F.pad(ids[:, 1:], (0, 1), value=-100)


class Outputs:
    """The last hidden states of a model and the head that makes its logits of them, apart from each other."""

    def __init__(self, model: Any) -> None:
        self.model = model
        embeddings = model.get_output_embeddings()
        self.head: Any = embeddings
        self.is_causal = model.can_generate() and not model.config.is_encoder_decoder
        if embeddings is not None and not (type(embeddings) is torch.nn.Linear and _is_plain_head(model, embeddings)):
            self.head = torch.nn.Identity()  # "hidden" states are the logits

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None, states: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The last hidden states. `states` receives the embeddings and the hidden states of all layers."""
        module = self.model if isinstance(self.head, torch.nn.Identity) else self.model.base_model
        takes_cache = "use_cache" in inspect.signature(module.forward).parameters
        options = {"use_cache": False} if takes_cache else {}
        options |= {} if states is None else {"output_hidden_states": True}
        answer = module(input_ids=ids, **options, **({} if positions is None else {"position_ids": positions}))
        if states is not None:
            states += answer.hidden_states
        return answer.logits if isinstance(self.head, torch.nn.Identity) else answer.last_hidden_state


def _some_tokens(model: Any) -> torch.Tensor:
    return torch.arange(8, device=model.device)[None] % model.get_input_embeddings().num_embeddings


@torch.no_grad()
def _is_plain_head(model: Any, head: torch.nn.Module) -> bool:
    """Whether the logits are the head's output for the last hidden states: not for models that scale or cap them."""
    # Several tokens: the embedding of padding, often token 0, may be 0, and so are its logits then, whatever the model does.
    ids = _some_tokens(model)
    # A softcap hardly changes small logits.
    return all(_is_plain_at(model, head, ids, scale) for scale in (1.0, 1000.0))


def _is_plain_at(model: Any, head: torch.nn.Module, ids: torch.Tensor, scale: float) -> bool:
    """The same for the last hidden states times `scale`."""
    states: list[torch.Tensor] = []

    def scaled(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * scale
        states.append(output.last_hidden_state)
        return output

    hook = model.base_model.register_forward_hook(scaled)
    try:
        with eval_mode(model):
            logits = model(input_ids=ids).logits
    finally:
        hook.remove()
    plain = head(states[-1])
    return logits.shape == plain.shape and bool(torch.allclose(logits, plain, rtol=1e-3, atol=1e-4 * scale))


def _check(outputs_t: Outputs, outputs_s: Outputs, weights: dict[str, float]) -> None:
    if "language" in weights and not (outputs_s.head is not None and outputs_s.is_causal):
        raise UserError(f"--language-weight: {type(outputs_s.model).__name__} predicts no next token: must be 0")
    if "hidden" in weights:
        _check_size("--hidden-weight", "hidden_size", outputs_t, outputs_s)
    if "output" not in weights:
        return
    if (outputs_t.head is None) != (outputs_s.head is None):
        raise UserError("--output-weight: only one of teacher and student has a language head: must be 0")
    _check_size("--output-weight", "hidden_size" if outputs_s.head is None else "vocab_size", outputs_t, outputs_s)


def _check_size(option: str, name: str, *outputs: Outputs) -> None:
    size_t, size_s = (getattr(each.model.config.get_text_config(), name, None) for each in outputs)
    if size_t != size_s:
        raise UserError(f"{option}: {name} is {size_t} in the teacher and {size_s} in the student: must be 0")
