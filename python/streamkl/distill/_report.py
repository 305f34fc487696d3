"""OUT/report.html: the results of a run, drawn by the page that `streamkl distill` uses, too (view/report.html)."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ._checkpoint import to_json
from ._evaluate import Evaluation
from ._needles import DEPTHS, KEY, VALUE
from ._options import EVALUATION, Options, in_bytes

_STYLES = {"teacher": "teacher", "before": "before", "after": "after", "student": "after", "control": "control"}
_CURVE_POINTS = 300


def page(report: dict[str, Any]) -> str:
    """The page with its data. `<` is escaped, so that no text can end the script that contains it."""
    installed, in_source = Path(__file__).with_name("report.html"), Path(__file__).parents[3] / "view" / "report.html"
    template = (installed if installed.exists() else in_source).read_text()
    data = to_json(report).replace("<", "\\u003c")
    before, _, after = template.partition("@DOCUMENT@")
    return before + data + after


def document(
    options: Options, evaluations: dict[str, Evaluation], history: list[dict[str, float]], student: Any, teacher: Any,
    diverged: str = "", measured: Sequence[dict[str, float]] = (), tokens_per_step: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`evaluations` are those of the student: "before", "after" and "control", "student" alone, or none.

    `diverged` says at which step the run has diverged; `measured` are losses of held-out sequences during training.
    """
    training = _training(history, measured, options)
    settings = _settings(options, student, teacher, is_evaluation="student" in evaluations)
    sections, figures = [training, settings], _cost(history, tokens_per_step)
    if evaluations:
        where = _distances(evaluations), _maps(evaluations), _where(evaluations)
        sections = [_retrieval(evaluations), _language(evaluations), *where, training, settings]
        figures = _figures(evaluations) + figures
    return dict(
        title="Attention distillation",
        verdict=verdict(evaluations),
        lead=_lead(options, student, teacher, evaluations, history, diverged),
        figures=figures,
        sections=[section for section in sections if section is not None],
        footer=f"StreamKL {__version__}",
    )


def _section(title: str, lead: str, *blocks: dict[str, Any] | None) -> dict[str, Any] | None:
    kept = [block for block in blocks if block is not None]
    return dict(title=title, lead=lead, blocks=kept) if kept else None


def _lead(options: Options, student, teacher, evaluations, history, diverged: str) -> str:
    a, b = (model.config.get_text_config() for model in (student, teacher))
    told = f"after {int(history[-1]['step'])} steps" if history else "as it is"
    models = (
        f"A student with {a.num_hidden_layers} layers of {a.num_attention_heads} heads, {{}} its teacher with "
        f"{b.num_hidden_layers} layers of {b.num_attention_heads} heads, {told}"
    )
    if diverged:
        return models.format("of") + f". The run stopped: {diverged}. The student was not evaluated."
    if not evaluations:
        return models.format("of") + ". It was not evaluated (--eval-sequences 0)."
    main = _main(evaluations)
    return models.format("compared with") + (
        f", on {main.sequences} held-out sequences of {main.context} tokens. The attention KL is {options.kl_in_words()}, "
        "and it is streamed: no N × N matrix is stored."
    )


def verdict(evaluations: dict[str, Evaluation]) -> str:
    """One line: what the attention loss has changed, as far as the run can tell. Empty without an evaluation."""
    if not evaluations:
        return ""
    main, before, control = _main(evaluations), evaluations.get("before"), evaluations.get("control")
    if before is None:
        return f"The student's attention is {main.kl:.3g} nats from its teacher's."
    moved = "fell" if main.kl < before.kl else "did not fall:"
    closer = f"The attention KL {moved} from {before.kl:.3g} to {main.kl:.3g} nats"
    if control is None:
        return f"{closer}. What the attention loss adds is unknown: --control trains without it."
    closer += f", to {control.kl:.3g} without the attention loss"
    if not main.language_sequence:
        return f"{closer}."
    difference, error = _against_control(main, control)
    numbers = f"{_in_words(_perplexity(main))} with it, {_in_words(_perplexity(control))} without"
    if not abs(difference) > 2 * error:
        sample = f"{main.sequences} sequence{'s' * (main.sequences != 1)}"
        return f"The attention loss makes no difference to the held-out perplexity that {sample} can show: {numbers}."
    helps = "helps" if difference < 0 else "hurts"
    return f"The attention loss {helps}: held-out perplexity {numbers} ({_signed(difference, error)} nats). {closer}."


def _against_control(main: Evaluation, control: Evaluation) -> tuple[float, float]:
    """Difference of the language losses on the same sequences, and its standard error: infinite with one sequence."""
    differences = np.subtract(main.language_sequence["student"], control.language_sequence["student"])
    count = len(differences)
    error = differences.std(ddof=1) / count**0.5 if count > 1 else np.inf
    return float(differences.mean()), float(error)


def _signed(difference: float, error: float) -> str:
    return f"{difference:+.3f}" + (f" ± {error:.3f}" if np.isfinite(error) else "")


def _in_words(perplexity: float) -> str:
    return f"{perplexity:.4g}" if perplexity < 1e4 else f"{perplexity:,.0f}"


def _perplexity(found: Evaluation, role: str = "student") -> float:
    return float(np.exp(np.mean(found.language_sequence[role])))


# ---- Key figures -----------------------------------------------------------------------------------------------------


def _figures(evaluations) -> list[dict[str, str]]:
    main, before, control = _main(evaluations), evaluations.get("before"), evaluations.get("control")
    figures = [_figure(f"{main.kl:.3g}", "held-out attention KL", "nats; mean over layers, rows and heads")]
    if before is not None:
        detail = f"{before.kl / max(main.kl, 1e-30):.1f} times smaller" + (
            f"; control {control.kl:.3g}" if control else ""
        )
        figures = [_figure(f"{before.kl:.3g} → {main.kl:.2g}", "held-out attention KL", detail)]
    for result in main.retrieval[-1:]:
        rates = result["attention"]
        if rates["teacher"] is not None:
            share_t, share_s = (100 * np.mean(rates[role]) for role in ("teacher", "student"))
            heads = len(result["heads"])
            detail = (
                f"teacher {share_t:.0f} %; {result['rows']:,} rows of {heads} retrieval head{'s' * (heads != 1)}, "
                f"{result['length']:,} tokens"
            )
            figures.append(_figure(f"{share_s:.1f} %", "needles found by attention", detail))
            worst = min(
                (share, rows)
                for share, rows in zip(result["kept"]["attention"], result["kept_of"]["attention"])
                if rows
            )
            detail = f"of {_mean_rows(worst[1])} rows in which the teacher finds the needle"
            figures.append(_figure(f"{100 * worst[0]:.1f} %", "found at the worst depth", detail))
        if result["answers"]["student"] is not None:
            detail = f"teacher {100 * np.mean(result['answers']['teacher']):.0f} %{_control_answers(control)}; {result['rows']:,} tokens"
            figures.append(_figure(f"{100 * np.mean(result['answers']['student']):.1f} %", "values answered", detail))
    if main.language_sequence:
        detail = f"teacher {_in_words(_perplexity(main, 'teacher'))}" + (
            f", control {_in_words(_perplexity(control))}" if control else ""
        )
        detail += f"; {main.sequences} sequences"
        figures.append(_figure(_in_words(_perplexity(main)), "held-out perplexity", detail))
    if main.output_kl is not None:
        detail = "nats" if before is None else f"nats; before training {before.output_kl:.3g}"
        figures.append(_figure(f"{main.output_kl:.3g}", "held-out output KL", detail))
    return figures


def _cost(history, tokens_per_step: int) -> list[dict[str, str]]:
    if not history:
        return []
    steps = f"{int(history[-1]['step'])} steps of {tokens_per_step:,} tokens"
    memory = in_bytes(max(entry["memory"] for entry in history))
    return [
        _figure(f"{history[-1]['seconds']:.0f} s", "of training", steps),
        _figure(memory, "peak memory", "of a process or its GPU"),
    ]


def _control_answers(control: Evaluation | None) -> str:
    if control is None or not control.retrieval:
        return ""
    return f", control {100 * np.mean(control.retrieval[-1]['answers']['student']):.0f} %"


def _main(evaluations: dict[str, Evaluation]) -> Evaluation:
    return evaluations.get("after") or evaluations["student"]


def _mean_rows(count: float) -> str:
    """A number of rows, which is a mean over heads."""
    return f"{count:,.0f}" if count == round(count) else f"{count:,.1f}"


def _figure(value: str, label: str, detail: str) -> dict[str, str]:
    return dict(value=value, label=label, detail=detail)


# ---- Sections --------------------------------------------------------------------------------------------------------


def _retrieval(evaluations: dict[str, Evaluation]) -> dict[str, Any] | None:
    main = _main(evaluations)
    lead = (
        f"A needle is {KEY} tokens of a key and {VALUE} of a value that are rare in a held-out text. It is put at some depth "
        "of the text, which ends with the key and begins the value again; a long text has several. The attention of a row "
        "finds the needle if its largest "
        "probability is inside the needle; rates are means over the heads with which the teacher finds at least "
        "half of all needles. A value is answered if the model predicts its tokens."
    )
    choices = []
    for number, result in enumerate(main.retrieval):
        blocks = [
            _depth_bars(evaluations, number, "attention", "Needles found by attention, by depth"),
            _depth_bars(evaluations, number, "answers", "Values answered, by depth"),
        ]
        blocks += [
            _kept(evaluations, number, "attention", "Needles found, % of those that the teacher finds"),
            _kept(evaluations, number, "answers", "Values answered, % of those that the teacher answers"),
            _misses(main, result),
        ]
        heads = [[f"layer {i}, head {_head_names(main, (i, j))[h][0]}", _teacher_heads(main, (i, j), h)]
                 for i, j, h in result["heads"]]  # fmt: skip
        if heads:
            blocks.append(
                dict(kind="table", title="Retrieval heads", header=["student head", "learns from"], rows=heads)
            )
        else:
            blocks.append(
                dict(
                    kind="text",
                    title="Retrieval heads",
                    text="None: no head of the teacher finds half of these needles.",
                )
            )
        choices.append(dict(name=f"{result['length']} tokens", blocks=[block for block in blocks if block]))
    if not choices:
        return None
    return _section("Does the student use the whole context?", lead,
                    dict(kind="choice", label="length", choices=choices, shown=len(choices) - 1))  # fmt: skip


def _depth_bars(evaluations, number: int, kind: str, title: str) -> dict[str, Any] | None:
    results = {name: found.retrieval[number] for name, found in evaluations.items() if number < len(found.retrieval)}
    of_teacher = next(iter(results.values()))[kind]["teacher"]
    if of_teacher is None:
        return None
    series = [dict(name="teacher", style="teacher", y=of_teacher)]
    series += [dict(name=name, style=_STYLES[name], y=result[kind]["student"]) for name, result in results.items()]
    groups = [str(100 * depth // DEPTHS) for depth in range(DEPTHS)]
    result = next(iter(results.values()))
    rows, heads = result["rows"] // DEPTHS, len(result["heads"])
    note = f"Each bar is {rows:,} rows" + (f" of {heads} head{'s' * (heads != 1)}." if kind == "attention" else ".")
    return dict(
        kind="bars",
        title=title,
        x_label="depth of the needle, % of the context",
        groups=groups,
        series=series,
        note=note,
    )


def _kept(evaluations, number: int, kind: str, title: str) -> dict[str, Any] | None:
    """Row by row: rows in which the teacher fails do not count."""
    results = {name: found.retrieval[number]["kept"][kind] for name, found in evaluations.items()
               if number < len(found.retrieval)}  # fmt: skip
    if any(shares is None for shares in results.values()):
        return None
    percent = [["-" if share is None else f"{100 * share:.0f}" for share in shares] for shares in results.values()]
    depths = [str(100 * depth // DEPTHS) for depth in range(DEPTHS)]
    rows = list(map(_mean_rows, _main(evaluations).retrieval[number]["kept_of"][kind]))
    return dict(
        kind="table",
        title=title,
        header=["depth, %", "teacher's rows", *results],
        rows=list(zip(depths, rows, *percent)),
    )


def _misses(main: Evaluation, result: dict[str, Any]) -> dict[str, Any] | None:
    """Where the student attends instead."""
    rows = [
        [
            f"{miss['head'][0]}, {_head_names(main, miss['head'][:2])[miss['head'][2]][0]}",
            *(str(miss[name]) for name in ("needle", "row", "key")),
        ]
        for miss in result["misses"]
    ]
    title = f"Rows in which only the teacher finds the needle: {len(rows)} shown of {result['missed']}"
    header = ["layer, head", "needle at", "row", "attends to"]
    return dict(kind="table", title=title, header=header, rows=rows) if rows else None


def _head_names(found: Evaluation, pair: Sequence[int]) -> list[list[int]]:
    """Of each head of a pair: the student head, then its teacher heads. Needles may pair a layer with another one."""
    return found.heads[[i for i, _ in found.pairs].index(pair[0])]


def _teacher_heads(found: Evaluation, pair: Sequence[int], head: int) -> str:
    """The teacher heads that a head of a pair learns from, in words."""
    _, *heads = _head_names(found, pair)[head]
    which = f"head {heads[0]}" if len(heads) == 1 else f"the mean of heads {', '.join(map(str, heads))}"
    return f"{which} of teacher layer {pair[1]}"


def _distances(evaluations: dict[str, Evaluation]) -> dict[str, Any] | None:
    """Attention statistics: how far each model looks, and how spread its attention is."""
    main = _main(evaluations)
    models = {"teacher": (main, "teacher"), **{name: (found, "student") for name, found in evaluations.items()}}
    layers = [f"layer {i} (teacher {j})" for i, j in main.pairs]
    entropy = dict(
        kind="lines", title="Entropy by layer", x_label="student layer", x_max=max(i for i, _ in main.pairs),
        series=[dict(name=name, style=_STYLES[name], x=[i for i, _ in main.pairs], y=found.entropy[role], dots=True)
                for name, (found, role) in models.items()],
        note="In nats, mean over heads and rows; the teacher's is that of the layer from which the student layer learns.",
    )  # fmt: skip
    blocks: list[dict[str, Any] | None] = [_histogram(models, None, ""), entropy]
    if len(layers) > 1:
        choices = [dict(name=name, blocks=[_histogram(models, n, f", {name}")]) for n, name in enumerate(layers)]
        blocks.append(dict(kind="choice", label="layer", choices=choices))
    lead = (
        "The attention of teacher and student to keys, by how many tokens they are apart, on "
        f"{main.sequences} held-out sequences: mean over heads, rows and, in the first chart, layers."
    )
    return _section("How far do they look?", lead, *blocks)


def _histogram(models: dict[str, tuple[Evaluation, str]], pair: int | None, of: str) -> dict[str, Any]:
    shares = {
        name: np.mean(found.distance_share[role], 0) if pair is None else np.array(found.distance_share[role][pair])
        for name, (found, role) in models.items()
    }
    count = len(shares["teacher"])
    return dict(
        kind="bars", title=f"Attention by distance{of}", x_label="tokens between query and key, from",
        groups=["0", *(_short(1 << n) for n in range(count - 1))], top=float(max(each.max() for each in shares.values())),
        series=[dict(name=name, style=_STYLES[name], y=each.tolist()) for name, each in shares.items()],
    )  # fmt: skip


def _short(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)


def _maps(evaluations: dict[str, Evaluation]) -> dict[str, Any] | None:
    lead = (
        "Attention on one held-out sequence, pooled into buckets: queries from top to bottom, keys from left to right, "
        "numbered by token. Brightness is the square root of the attention, with one scale per head, clipped at the 99th percentile of the "
        "teacher. In the KL, orange marks attention that the student misses, blue attention that it gives in excess."
    )
    by_pair: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for index, found in enumerate(_main(evaluations).maps):
        maps = {name: each.maps[index] for name, each in evaluations.items() if index < len(each.maps)}
        by_pair.setdefault(tuple(found["pair"]), []).append(_head_maps(_main(evaluations), found, maps))
    choices = [dict(name=f"{i}, learns from teacher layer {j}", blocks=blocks) for (i, j), blocks in by_pair.items()]
    return _section("Attention maps", lead, dict(kind="choice", label="layer", choices=choices) if choices else None)


def _head_maps(main: Evaluation, found: dict[str, Any], maps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Teacher, students and contributions to the KL, on common scales."""
    head, pair = found["head"], found["pair"]
    first = next(iter(maps.values()))
    top, kl_top = _bright(first["teacher"]), _bright(first["kl"])
    drawn = [dict(caption="teacher", palette="share", top=top, values=first["teacher"])]
    names = {"before": "student before", "after": "student after"}
    drawn += [
        dict(caption=names.get(name, name), palette="share", top=top, values=found["student"])
        for name, found in maps.items()
    ]
    drawn += [
        dict(
            caption=f"contributions to the KL{'' if name == 'student' else ', ' + name}",
            palette="signed",
            top=kl_top,
            values=found["kl"],
        )
        for name, found in maps.items()
        if name != "control"
    ]
    title, note = f"Head {_head_names(main, pair)[head][0]}", f"learns from {_teacher_heads(main, pair, head)}"
    return dict(kind="maps", title=title, note=note, tokens=[main.context, main.context], maps=drawn)


def _bright(values: list[list[float]]) -> float:
    """The 99th percentile of the magnitudes, as picture_bright of view/picture.c: a few bright cells do not dominate."""
    sizes = np.sort(np.abs(np.array(values)).ravel())
    bright = sizes[len(sizes) - 1 - len(sizes) // 100]
    return float(bright or sizes[-1] or 1.0)


def _training(history, measured: Sequence[dict[str, float]], options: Options) -> dict[str, Any] | None:
    if not history:
        return None
    names = {"loss": "loss", "attention": "attention KL", "output": "output loss", "language": "language loss"}
    blocks = []
    for name, label in names.items():
        if with_it := [entry for entry in history if name in entry]:  # a phase may end, or be extended
            x, y = _thinned([entry["step"] for entry in with_it]), _thinned([entry[name] for entry in with_it])
            series = [dict(name=label, style="after" if name == "attention" else "loss", x=x, y=y)]
            if measured:
                x, y = ([entry[each] for entry in measured] for each in ("step", name))
                series.append(dict(name="held out", style="teacher", x=x, y=y))
            blocks.append(dict(kind="lines", title=f"{label[0].upper()}{label[1:]} by step", x_label="step", log_y=True,
                               x_max=options.steps, series=series))  # fmt: skip
    return _section(
        "Training", "Losses of the training data, and of held-out sequences with --eval-every, in nats.", *blocks
    )


def _thinned(values: list[float]) -> list[float]:
    return [float(part.mean()) for part in np.array_split(np.array(values), min(_CURVE_POINTS, len(values)))]


def _where(evaluations: dict[str, Evaluation]) -> dict[str, Any] | None:
    main = _main(evaluations)
    heads = max(map(len, main.kl_head))
    blocks: list[dict[str, Any] | None] = [_by_position(evaluations, None), _by_distance(evaluations, None)]
    if len(main.pairs) > 1:
        choices = [
            dict(name=f"{i}", blocks=[_by_position(evaluations, n), _by_distance(evaluations, n)])
            for n, (i, _) in enumerate(main.pairs)
        ]
        blocks.append(dict(kind="choice", label="layer", choices=choices))
    top = max(kl for found in evaluations.values() for kls in found.kl_head for kl in kls)
    for name, found in evaluations.items():
        rows = [
            [f"{i} (teacher {j})", mean, *kls]
            for (i, j), mean, kls in zip(found.pairs, found.kl_layer, found.kl_head)
        ]
        header = ["layer", "mean", *(f"head {head}" for head in range(heads))]
        blocks.append(dict(kind="table", title=f"KL by layer and head: {name}", header=header, rows=rows, heat=top))
    lead = (
        "Held-out attention KL in nats. By distance: what the keys of each distance contribute, as a mean over rows; "
        "contributions may be negative, and their sum is the KL."
    )
    return _section("Where does the KL come from?", lead, *blocks)


def _by_position(evaluations: dict[str, Evaluation], pair: int | None) -> dict[str, Any]:
    """Of one pair of layers, or of their mean."""
    series, context = [], _main(evaluations).context
    for name, found in evaluations.items():
        rows = found.kl_position if pair is None else [found.kl_position[pair]]
        values = np.array([[np.nan if value is None else value for value in row] for row in rows]).mean(0)
        x = [(bucket + 0.5) * context / len(values) for bucket in range(len(values))]
        series.append(
            dict(
                name=name, style=_STYLES[name], x=x, y=[None if np.isnan(value) else float(value) for value in values]
            )
        )
    of = _of_layer(evaluations, pair)
    return dict(
        kind="lines",
        title=f"KL by position{of}",
        x_label="position of the query",
        log_y=True,
        x_max=context,
        series=series,
    )


def _by_distance(evaluations: dict[str, Evaluation], pair: int | None) -> dict[str, Any]:
    edges, of = _main(evaluations).distance_edges, _of_layer(evaluations, pair)
    columns = [
        np.mean(found.kl_distance, 0) if pair is None else np.array(found.kl_distance[pair])
        for found in evaluations.values()
    ]
    rows = [
        [f"{a}..{b}", *(float(column[n]) for column in columns)] for n, (a, b) in enumerate(zip(edges, edges[1:]))
    ]
    return dict(kind="table", title=f"KL by distance{of}", header=["tokens apart", *evaluations], rows=rows)


def _of_layer(evaluations: dict[str, Evaluation], pair: int | None) -> str:
    return "" if pair is None else f", layer {_main(evaluations).pairs[pair][0]}"


def _language(evaluations: dict[str, Evaluation]) -> dict[str, Any] | None:
    main = _main(evaluations)
    if not main.language:
        return None
    losses = {
        "teacher": main.language["teacher"],
        **{name: found.language["student"] for name, found in evaluations.items()},
    }
    x = [(bucket + 0.5) * main.context / len(losses["teacher"]) for bucket in range(len(losses["teacher"]))]
    perplexities = {name: np.exp(np.array(values, dtype=float)).tolist() for name, values in losses.items()}
    series = [dict(name=name, style=_STYLES[name], x=x, y=values) for name, values in perplexities.items()]
    models = {"teacher": (main, "teacher"), **{name: (found, "student") for name, found in evaluations.items()}}
    rows = [
        [name, float(np.mean(found.language_sequence[role])), _perplexity(found, role)]
        for name, (found, role) in models.items()
    ]
    note = f"Of {main.sequences} sequences of {main.context:,} tokens."
    control = evaluations.get("control")
    if control is not None:
        note += (
            f" The loss of the student after training minus that of the control is {_signed(*_against_control(main, control))}"
            " nats: the mean over these sequences and its standard error. Another seed may give another difference."
        )
    return _section(
        "Perplexity", "Of the next token on held-out data: the exponential of the language loss.",
        dict(kind="lines", title="Perplexity by position", x_label="position of the token", x_max=main.context, log_y=True, series=series),
        dict(kind="table", title="Mean", header=["model", "loss, nats", "perplexity"], rows=rows, note=note),
    )  # fmt: skip


def _settings(options: Options, student: Any, teacher: Any, is_evaluation: bool) -> dict[str, Any] | None:
    default = Options()
    changed = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(options)
        if getattr(options, f.name) != getattr(default, f.name)
        and (f.name in EVALUATION if is_evaluation else f.name not in ("resume", "overwrite", "dry_run"))
    }
    rows = [[name.replace("_", "-"), ", ".join(map(str, value)) if isinstance(value, list) else str(value)]
            for name, value in changed.items()]  # fmt: skip
    rows += [
        [f"parameters of the {role}", f"{model.num_parameters():,}"]
        for role, model in (("teacher", teacher), ("student", student))
    ]
    lead = "All other options have their defaults" + ("." if is_evaluation else "; options.toml lists every option.")
    command = ["streamkl-distill", *["eval"] * is_evaluation]
    return _section(
        "Reproducing this run", lead,
        dict(kind="command", text=_command(command, changed)), dict(kind="table", rows=rows, plain=True),
    )  # fmt: skip


def _command(parts: list[str], changed: dict[str, Any]) -> str:
    for name, value in changed.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parts.append(flag)
        elif isinstance(value, list) and value and isinstance(value[0], (int, float)):
            parts += [flag, ",".join(map(str, value))]
        else:
            parts += [flag, *(value if isinstance(value, list) else [str(value)])]
    return shlex.join(parts)
