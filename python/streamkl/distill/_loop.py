"""The training loop: data and models, steps, checkpoints, and what a run writes at its end."""

from __future__ import annotations

import copy
import dataclasses
import math
import resource
import shutil
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Iterator

import torch
from accelerate.utils import DistributedType, set_seed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from tqdm import tqdm

from ..hf._maps import direction_of
from . import _checkpoint as checkpoints
from ._data import Sequences, load, order
from ._device import make_accelerator
from ._evaluate import Evaluation, evaluate, retrieval_scores, what_is_measured
from ._fast import fuse_norms
from ._logs import Log
from ._objective import Objective, attention_layers, next_tokens
from ._options import Options, UserError
from ._output import rehearsal, summary, write_divergence, write_model, write_report, write_results
from ._student import check_tokenizers, load_student, load_teacher, load_tokenizer


# Names in OUT and OUT/control: those that a run continues from, and those that it leaves.
_STATE = (checkpoints.NAME, "before.json", "log.jsonl", "best")
_RESULTS = ("student", "evaluation.json", "report.html", "options.toml")


class Stopped(Exception):
    """Ctrl-C: the run has written a checkpoint."""


class Diverged(Exception):
    """Loss or gradient of a step is not finite. The weights are those before the step."""


def distill(options: Options) -> Path:
    """Trains a student as the options say. Returns the folder with the model, the report and the checkpoint."""
    options.check()
    with _Interrupts() as interrupts:
        run = Run(options, interrupts)
        if options.dry_run:
            run.rehearse()
            return Path(options.out)
        run.complete()
        control = _control(run, interrupts) if options.control else None
        if control is not None:
            run.report(control)
        run.say(summary(run, control))
    return Path(options.out)


def _control(run: Run, interrupts: _Interrupts) -> Evaluation | None:
    """The same student, trained without the attention KL, evaluated. It starts from the same weights."""
    options, out = run.options, run.out / "control"
    resume = (out / checkpoints.NAME).exists()  # from this run: earlier checkpoints are gone
    options = dataclasses.replace(
        options, attention_weight=0.0, out=str(out), control=False, resume=resume, overwrite=not resume
    )
    run = Run(options, interrupts, run.before, like=run)
    run.complete()
    return run.after


class Run:
    """One student in training."""

    teacher: Any
    student: Any
    start: Any  # the student before training, on the CPU, for the control; None without one
    tokenizer: Any
    training: Sequences
    held_out: Sequences
    digest: str

    def __init__(
        self, options: Options, interrupts: _Interrupts, before: Evaluation | None = None, like: Run | None = None
    ) -> None:
        """`before`: the evaluation of the student as it starts, if there is one. `like`: a run with the same teacher and data."""
        self.options, self.interrupts, self.out = options, interrupts, Path(options.out)
        self.begin = time.monotonic()
        self.accelerator = make_accelerator(options)
        self.checkpoint = self.out / checkpoints.NAME
        self.mesh = self._make_mesh()
        if not options.dry_run:
            self._claim_folder()
        set_seed(options.seed)  # a model may have weights that its folder lacks
        self._load(like)
        self.digest = like.digest if like else self.training.digest()
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, float]] = []
        self.measured: list[dict[str, float]] = []  # losses on held-out sequences, of --eval-every
        state = None
        if self._resumes:
            state = checkpoints.read_state(self.checkpoint, options, self.digest, self.tokens_per_step())
        group = None if self.mesh is None else self.mesh["context"].get_group()
        self.objective = Objective(self.teacher, self.student, options, self._weights(), group)
        self.wrapped = self._wrap()
        self.trained = [parameter for parameter in self.student.parameters() if parameter.requires_grad]
        fused = self.accelerator.device.type == "cuda"  # one kernel for all weights
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=options.rate, weight_decay=options.weight_decay, fused=fused
        )
        evaluates = options.eval_sequences and not options.dry_run
        self.before = (before or self._evaluated_before()) if evaluates else None
        self.student.train()
        if state is not None:
            checkpoints.load(self.checkpoint, self.objective, self.wrapped, self.optimizer, state["step"])
            self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
            if state.get("eval_sequences") == options.eval_sequences:  # losses of other sequences do not compare
                self.measured = state["measured"]
        self.after = self.before

    # ---- Before training ---------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, Any]:
        """Options of the distiller: how rows, heads and layers count in the attention KL."""
        options = self.options
        layers = dict(enumerate(options.layer_weight))
        if options.layer_weight and len(layers) != (count := len(attention_layers(self.student))):
            raise UserError(
                f"--layer-weight={options.layer_weight}: must have {count} numbers, one per student layer that attends"
            )
        heads = None
        if options.head_weight == "retrieval":
            self._say("measure which heads of the teacher retrieve")
            heads = retrieval_scores(self.teacher, self.student, self.training, options, self.accelerator.autocast)
            # Scores weight heads of all layers: a layer counts by their sum.
            layers = {i: layers.get(i, 1.0) * sum(scores) for i, scores in heads.items()}
            heads = {i: scores for i, scores in heads.items() if any(scores)}
            if not heads:
                raise UserError("--head-weight=retrieval: no head of the teacher finds a needle")
        return dict(row_weight=options.row_weight or None, head_weight=heads, layer_weight=layers)

    @property
    def _is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def _resumes(self) -> bool:
        return self.options.resume and not self.options.dry_run and self.checkpoint.exists()

    def _load(self, like: Run | None) -> None:
        """Data, teacher and student, each with a line that says what takes the time."""
        options, device = self.options, self.accelerator.device
        fuses = device.type == "cuda" and not options.shard
        if like:
            self.teacher, self.tokenizer, self.training, self.held_out = (
                like.teacher,
                like.tokenizer,
                like.training,
                like.held_out,
            )
        else:
            self._say(f"load the teacher {options.teacher}")
            self.teacher = load_teacher(options, self._is_main).to(device)
            if fuses:
                fuse_norms(self.teacher)
        self._say(f"load the student {options.student}" if options.student else "make the student from the teacher")
        set_seed(options.seed)  # a run that shares a teacher begins with the same student
        student = like.start if like else None
        if student is None:
            student = load_student(options, self.teacher, self._is_main).cpu()
        # Sharding changes the classes of the teacher's layers, and then no student can be made from the teacher.
        self.start = copy.deepcopy(student) if options.control else None
        self.student = student.to(device)
        if fuses:
            fuse_norms(self.student)
        options.direction = direction_of(options.direction, bool(options.head_map), self.teacher, self.student)
        if like:
            return
        self._say("read the data")
        self.tokenizer = load_tokenizer(options)
        check_tokenizers(options, self.tokenizer)
        self.training, self.held_out = load(options, self.tokenizer, self.teacher)

    def _say(self, what: str) -> None:
        if self._is_main:
            print(f"{time.monotonic() - self.begin:6.1f} s  {what}", file=sys.stderr, flush=True)

    def _claim_folder(self) -> None:
        with checkpoints.clear_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            has_run = self.checkpoint.exists() or (self.out / "student").exists()
        if has_run and not (self.options.resume or self.options.overwrite):
            raise UserError(
                f"--out {self.out}: contains an earlier run: pass --resume to continue it, or --overwrite to replace it"
            )
        names = () if self._resumes else _STATE + _RESULTS * self.options.overwrite
        removed = [folder / name for folder in (self.out, self.out / "control") for name in names]
        self._refuse_inputs_in([path for path in removed if path.exists()])
        self.accelerator.wait_for_everyone()
        if not self._is_main:
            return
        for path in removed:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        checkpoints.write_text(self.out / "options.toml", self.options.as_toml())

    def _refuse_inputs_in(self, removed: list[Path]) -> None:
        """Inputs of this run must not be among the paths that it is about to remove."""
        for name in ("teacher", "student", "tokenizer", "data", "held_out"):
            value = getattr(self.options, name)
            for given in value if isinstance(value, list) else [value]:
                if given and any(Path(given).resolve().is_relative_to(path.resolve()) for path in removed):
                    raise UserError(f"--{name.replace('_', '-')} {given}: belongs to the earlier run in --out {self.out}, which "
                                    "this run replaces: use another --out")  # fmt: skip

    def _make_mesh(self) -> Any:
        """Processes that share sequences are neighbors."""
        share, processes = self.options.context_parallel, self.accelerator.num_processes
        if processes % share != 0:
            raise UserError(f"--context-parallel={share}: must divide {processes}, the number of processes")
        if share == 1:
            return None
        return init_device_mesh(
            self.accelerator.device.type, (processes // share, share), mesh_dim_names=("data", "context")
        )

    def _wrap(self) -> Any:
        """The objective for one process, for data-parallel processes (DDP), or sharded over them (FSDP2)."""
        if self.options.gradient_checkpointing:
            self.student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.accelerator.distributed_type is DistributedType.FSDP:
            raise UserError(
                "accelerate's FSDP: leave it out of its configuration and pass --shard, which is FSDP2, too"
            )
        if not self.options.shard or self.accelerator.num_processes == 1:
            return self.accelerator.prepare(self.objective)
        for model in self.teacher, self.student:
            for module in list(model.modules()):
                # Modules outside of the teacher's layers stay whole: their parts are called one by one.
                if type(module).__name__ in (model._no_split_modules or ()):
                    fully_shard(module)
        return fully_shard(self.objective)

    def _evaluated_before(self) -> Evaluation:
        """Of the student as it starts. A resumed run finds it on disk, unless it is to measure something else."""
        path = self.out / "before.json"
        if self._resumes and path.exists():
            known = Evaluation.read(path)
            if known.measured == what_is_measured(self.options, self.held_out):
                return known
        found = self._evaluate("before training")
        if self._is_main:
            checkpoints.write_json(path, found.as_json())
        return found

    def _evaluate(self, when: str) -> Evaluation:
        """All ranks compute the same: a sharded model needs all of them."""
        with tqdm(
            total=1, desc=f"evaluate {when}", disable=not self._is_main, leave=False, bar_format="{desc} {n}/{total}"
        ) as bar:

            def progress(done: int, total: int) -> None:
                bar.total, bar.n = total, done
                bar.refresh()
                if self.interrupts.pressed > 1:
                    raise KeyboardInterrupt

            return evaluate(
                self.teacher, self.student, self.held_out, self.options, context=self.accelerator.autocast, progress=progress,
                inside=self.wrapped,
            )  # fmt: skip

    # ---- Training ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        options = self.options
        log = Log(options, [*self.history, *map(_held_out, self.measured)], self.accelerator)
        with self.objective.attached(), log, tqdm(
            total=options.steps, initial=self.step, desc="distill", disable=not self._is_main, unit="step", dynamic_ncols=True
        ) as bar:  # fmt: skip
            while self.step < options.steps:
                entry = self.advance()
                if self.step % options.log_every == 0 or self.step == options.steps:
                    self.history.append(entry)
                    log.add(entry)
                bar.set_postfix_str(_postfix(entry))
                bar.update()
                every = options.eval_every
                if every and (self.step % every == 0 or self.step == options.steps):
                    self._measure()
                    log.add(_held_out(self.measured[-1]))
                stops = self._stops()
                every = options.checkpoint_every
                if stops or self.step == options.steps or (every and self.step % every == 0):
                    self._save()
                if stops and self.step < options.steps:
                    raise Stopped(f"stopped at step {self.step} of {options.steps}; continue with --resume")

    def advance(self) -> dict[str, float]:
        """Takes a step. Returns its line of the log."""
        started = time.monotonic()
        losses = self._one_step()
        took = time.monotonic() - started
        self.step += 1
        self.seconds += took
        return dict(
            step=self.step, **losses, rate=self._rate(self.step - 1), memory=_memory(self.accelerator.device),
            tokens_per_second=self.tokens_per_step() / took, seconds=self.seconds,
        )  # fmt: skip

    def batches(self) -> list[torch.Tensor]:
        """The micro-batches of the next step."""
        options, ranks = self.options, self.accelerator.num_processes
        per_micro = options.batch * ranks // options.context_parallel
        reader = self.accelerator.process_index // options.context_parallel  # ranks that share a sequence
        first = self.step * options.accumulate * per_micro + reader * options.batch
        found = []
        for micro in range(options.accumulate):
            indices = order(len(self.training), options.seed, first + micro * per_micro, options.batch)
            ids = self.training.batch(indices).to(self.accelerator.device)
            length = options.length_at(self.step)
            found.append(ids if ids.shape[1] == length else ids.view(-1, length))
        return found

    def _one_step(self) -> dict[str, float]:
        """Data, dropout and sampled rows depend on nothing but the seed, the step and the rank."""
        options, ranks = self.options, self.accelerator.num_processes
        set_seed((options.seed * 1_000_003 + self.step * ranks + self.accelerator.process_index) % 2**32)
        self.objective.teaches_attention = self.step < options.attention_until * options.steps
        sums: dict[str, torch.Tensor] = {}
        for micro, ids in enumerate(self.batches()):
            is_last = micro == options.accumulate - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.wrapped), self._split(ids) as shards:
                with self.accelerator.autocast():
                    losses = self.wrapped(*shards)
                self.accelerator.backward(losses["loss"] / options.accumulate)
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0) + loss.detach().float() / options.accumulate
        norm: Any = self.accelerator.clip_grad_norm_(self.trained, options.clip or math.inf)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        *means, norm = self.accelerator.reduce(torch.stack([*sums.values(), norm.detach().float()]), "mean").tolist()
        losses = dict(zip(sums, means))
        if not (math.isfinite(norm) and all(map(math.isfinite, means))):
            found = ", ".join(f"{name} {value:.4g}" for name, value in {**losses, "gradient norm": norm}.items())
            raise Diverged(f"step {self.step + 1} of {options.steps} diverged: {found}")
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def _measure(self) -> None:
        """Adds the losses of the held-out sequences, of which all ranks compute the same, and keeps the best student."""
        sums: Any = 0
        count = min(self.options.eval_sequences, len(self.held_out))
        self.student.eval()
        self.objective.teaches_attention = True  # measurements of all phases are comparable
        with torch.no_grad():
            for index in range(count):
                with self._split(self.held_out.batch([index]).to(self.accelerator.device)) as shards:
                    with self.accelerator.autocast():
                        losses = self.wrapped(*shards)
                    sums = sums + torch.stack([loss.float() for loss in losses.values()])
        self.student.train()
        means = self.accelerator.reduce(sums / count, "mean").tolist()
        self.measured.append(dict(step=self.step, **dict(zip(losses, means))))
        if self.measured[-1] is self.best:
            weights = checkpoints.full_weights(self.wrapped)
            if self._is_main:
                write_model(
                    self.out / "best", self, weights, [f"Held-out loss {self.best['loss']:.4g} at step {self.step}."]
                )

    @property
    def best(self) -> dict[str, float]:
        """The measurement with the lowest held-out loss."""
        return min(self.measured, key=lambda entry: entry["loss"])

    @contextmanager
    def _split(self, ids: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """The arguments of the objective; under context parallelism, shards of them, with torch's attention over all shards."""
        if self.mesh is None:
            yield [ids]
            return
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
        buffers = [ids, next_tokens(ids), positions]
        with context_parallel(self.mesh["context"], buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            yield buffers

    def tokens_per_step(self) -> int:
        readers = self.accelerator.num_processes // self.options.context_parallel
        return self.options.context * self.options.batch * self.options.accumulate * readers

    def _rate(self, step: int) -> float:
        """Linear warm-up, then cosine decay to a tenth."""
        warm = max(round(self.options.warmup * self.options.steps), 1)
        decayed = 0.1 + 0.45 * (1 + math.cos(math.pi * step / self.options.steps))
        return self.options.rate * min((step + 1) / warm, 1.0) * decayed

    def _stops(self) -> bool:
        """Whether any rank was interrupted."""
        pressed = self.interrupts.pressed > 0
        if self.accelerator.num_processes == 1:
            return pressed
        flag = torch.tensor(float(pressed), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _save(self) -> None:
        state = dict(
            step=self.step,
            steps=self.options.steps,
            seconds=self.seconds,
            history=self.history,
            measured=self.measured,
            eval_sequences=self.options.eval_sequences,
            tokens_per_step=self.tokens_per_step(),
            data=self.digest,
            options=self.options.affecting(),
        )
        checkpoints.save(self.checkpoint, self.wrapped, self.optimizer, state, self._is_main)

    def rehearse(self) -> None:
        """Runs one step and says what a run would do."""
        with self.objective.attached():
            times = []
            for _ in range(2):  # the first step also starts up
                started = time.monotonic()
                self._one_step()
                times.append(time.monotonic() - started)
        self.say(rehearsal(self, times[-1], _memory(self.accelerator.device)))

    def say(self, text: str) -> None:
        if self._is_main:
            print(text, flush=True)

    # ---- After training ----------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Trains and writes the results, or a report of how the loss diverged."""
        try:
            self.train()
        except Diverged as diverged:
            raise self.report_divergence(str(diverged)) from None
        self.finish()

    def finish(self) -> None:
        """Evaluates the student, if asked to, and writes model, model card, report and its data."""
        self.after = self._evaluate("after training") if self.options.eval_sequences else None
        weights = checkpoints.full_weights(self.wrapped)
        if self._is_main:
            write_results(self, weights)
        self.accelerator.wait_for_everyone()

    def report(self, control: Evaluation) -> None:
        """Adds the control to the report and its data."""
        if self._is_main:
            write_report(self, control)

    def report_divergence(self, what: str) -> UserError:
        """Writes a report without an evaluation of the student. Returns the error that ends the run."""
        if self._is_main:
            write_divergence(self, what)
        has_checkpoint = "the last checkpoint is whole" if self.checkpoint.exists() else "there is no checkpoint"
        return UserError(f"{what}: use a smaller --rate; {has_checkpoint}; report {self.out / 'report.html'}")


class _Interrupts:
    """Ctrl-C and SIGTERM end a run after its current step; a second one ends it at once."""

    def __init__(self) -> None:
        self.pressed = 0

    def __enter__(self) -> _Interrupts:
        self._before = {number: signal.signal(number, self._press) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _press(self, *_) -> None:
        self.pressed += 1
        if self.pressed > 1:
            raise KeyboardInterrupt


def _memory(device: torch.device) -> int:
    """Peak bytes of this process, on the device that it trains on."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _held_out(entry: dict[str, float]) -> dict[str, float]:
    """A measurement as a line of the log."""
    return {name if name == "step" else f"held_out_{name}": value for name, value in entry.items()}


def _postfix(entry: dict[str, float]) -> str:
    kl = f"KL {entry['attention']:.4g}, " if "attention" in entry else ""
    return (
        f"loss {entry['loss']:.4g}, {kl}{entry['tokens_per_second']:.0f} tokens/s, {entry['memory'] / 2**20:.0f} MiB"
    )
