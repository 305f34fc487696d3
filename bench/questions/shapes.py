"""Times the shapes that distillation has in practice, and finds those that are slow for their work.

    bench/run.py shapes                                    # all shapes: less than a minute
    bench/run.py shapes --quick                            # ten of them
    bench/run.py shapes --only 'student heads' --only f32  # those whose name contains one of the texts
    bench/run.py shapes --check                            # also compares results with float64
    bench/run.py shapes --check-only                       # only compares
    bench/run.py shapes --only 'mean of' --eager           # also times eager PyTorch, which stores the matrices
    bench/run.py shapes --csv bench/results/shapes.csv     # appends the results

Every shape is compared with the base shape (32 heads on 8 key heads of 128 on both sides, N = 8192, causal, bf16) and
with scaled_dot_product_attention by cuDNN on the teacher's shape, whose calls alternate with ours.

    forward    KL and LSEs. With teacher groups also with the teacher's LSEs given
    backward   both student gradients from saved LSEs
    one pass   KL and gradients, both LSEs given; cuDNN: its attention backward
    forward + backward   a step without given LSEs; with teacher groups the LSEs and then one pass, as attention_kl does

--check draws random inputs, with logits of standard deviation 4, and gives a weight to a sample of rows; KL, dq and dk of
all heads are compared with float64 there. `kernel` has the kernels that skl_plan_explain names.
"""

from functools import lru_cache

import torch

from harness.attention import FORWARD_GIVEN, AttentionCalls, Exact, Shape, prepared_calls, random_tensors
from harness.library import BACKWARD, FORWARD, ONE_PASS, STEP
from harness.report import errors_of, errors_text, ratio, rounded, tflops, worst
from harness.run import Result
from harness.timing import refusal_of, release_memory
from peers.attention import PEERS, leaves_of, sdpa

SHAPE_COLUMNS = (
    "batch length mask heads_t key_heads_t dim_t dtype_t heads_s key_heads_s dim_s dtype_s softcap teacher_gradients"
    " deterministic reverse"
).split()
COLUMNS = [
    *"date gpu torch commit shape pass".split(), *SHAPE_COLUMNS,
    *"ms fastest_ms tflops base_ms base_ratio cudnn_ms cudnn_ratio eager_ms eager_ratio kernel".split(),
    *"kl_error dq_error dk_error note".split(),
]  # fmt: skip
SHOWN = "pass ms tflops base_ratio cudnn_ratio eager_ratio kernel".split()

# {our pass: the other's}. The base shape has no teacher groups: its forward computes all LSEs. cuDNN's forward has as
# many products as ours, its backward one more. Eager PyTorch has no backward alone.
COMPARED = {
    "base": {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, BACKWARD: BACKWARD, ONE_PASS: ONE_PASS, STEP: STEP},
    "cudnn": {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, BACKWARD: BACKWARD, ONE_PASS: BACKWARD, STEP: STEP},
    "eager": {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, ONE_PASS: STEP, STEP: STEP},
}
CHECKED_STD = 4.0  # of the logits: large enough that a softcap which is left out shows


def students(heads, **others):
    """A student with fewer heads than its teacher; it keeps up to 8 key heads."""
    return {"heads_s": heads, "key_heads_s": min(heads, 8), **others}


def sizes(dim_t, dim_s):
    return {"dim_t": dim_t, "dim_s": dim_s}


BASE = Shape("base: 32/8 heads of 128")

SHAPES = [
    BASE,
    Shape("16 student heads (mean of 2)", **students(16)),
    Shape("8 student heads (mean of 4)", **students(8)),
    Shape("4 student heads (mean of 8)", **students(4)),
    Shape("2 student heads (mean of 16)", **students(2)),
    Shape("16 student heads of 64", **students(16, dim_s=64)),
    Shape("8 student heads of 64", **students(8, dim_s=64)),
    Shape("8 student heads, softcap 50", **students(8, softcap=50.0)),
    Shape("8 student heads, deterministic", **students(8, deterministic=True)),
    Shape("8 student heads, reverse KL", **students(8, reverse=True)),
    Shape("8 student heads, teacher gradients", **students(8, teacher_gradients=True)),
    Shape("8 student heads, f16", **students(8, dtype_t="f16", dtype_s="f16")),
    Shape("teacher 128, student 64", **sizes(128, 64)),
    Shape("teacher 64, student 128", **sizes(64, 128)),
    Shape("teacher 256, student 64", **sizes(256, 64)),
    Shape("teacher 256, student 128", **sizes(256, 128)),
    Shape("teacher 192, student 128", **sizes(192, 128)),
    Shape("teacher 128, student 64, reverse KL", **sizes(128, 64), reverse=True),
    Shape("heads of 64", **sizes(64, 64)),
    Shape("heads of 80", **sizes(80, 80)),
    Shape("heads of 96", **sizes(96, 96)),
    Shape("heads of 256", **sizes(256, 256)),
    Shape("f16", dtype_t="f16", dtype_s="f16"),
    Shape("f32", dtype_t="f32", dtype_s="f32"),
    Shape("bf16 teacher, f32 student", dtype_s="f32"),
    Shape("softcap 50", softcap=50.0),
    Shape("softcap 50, reverse KL", softcap=50.0, reverse=True),
    Shape("softcap 50, heads of 256", softcap=50.0, **sizes(256, 256)),
    Shape("reverse KL", reverse=True),
    Shape("teacher gradients", teacher_gradients=True),
    Shape("teacher gradients, heads of 64", teacher_gradients=True, **sizes(64, 64)),
    Shape("deterministic", deterministic=True),
    Shape("no mask", causal=False),
    Shape("window of 1024 keys", window=1023),
    Shape("B=4, N=2048", batch=4, length=2048),
    Shape("B=8, N=1024", batch=8, length=1024),
    Shape("B=16, N=512, heads of 64", batch=16, length=512, **sizes(64, 64)),
]
assert len({shape.name for shape in SHAPES}) == len(SHAPES)

QUICK = {
    BASE.name, "16 student heads (mean of 2)", "8 student heads (mean of 4)", "teacher 128, student 64",
    "teacher 256, student 64", "f32", "softcap 50", "teacher gradients", "B=8, N=1024", "B=16, N=512, heads of 64",
}  # fmt: skip


def add_options(parser):
    parser.add_argument("--quick", action="store_true", help="ten of the shapes")
    parser.add_argument("--check", action="store_true", help="also compare results with float64")
    parser.add_argument("--check-only", action="store_true", help="only compare")
    parser.add_argument("--eager", action="store_true", help="also time eager PyTorch; takes tens of GiB")


def cases(given):
    return [shape for shape in SHAPES if not given.quick or shape.name in QUICK]


def columns_of(shape):
    values = {name: getattr(shape, name) for name in SHAPE_COLUMNS}
    return {"shape": shape.name} | {
        name: int(value) if type(value) is bool else value for name, value in values.items()
    }


# ---- The calls -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def base_calls(shape, device):
    """The calls of the shape that all others are compared with."""
    return prepared_calls(shape, device)


def cudnn_calls(shape, device):
    """{pass: call} of attention with the heads, head size and type of the teacher. Raises what PyTorch raises.

    Where PyTorch's interface to cuDNN refuses shared key heads, they are expanded beforehand, outside of the time.
    """
    if shape.window >= 0:
        raise ValueError("PyTorch's interface to cuDNN has no window")
    made, group_size = random_tensors(shape, device), shape.heads_t // shape.key_heads_t

    def attend(leaves):
        return sdpa(*leaves, shape.causal, "CUDNN_ATTENTION")

    def with_keys(k):
        leaves = leaves_of(made["q_t"], k, torch.randn_like(k))
        return leaves, attend(leaves)

    try:
        leaves, result = with_keys(made["k_t"])
    except RuntimeError:
        leaves, result = with_keys(made["k_t"].repeat_interleave(group_size, dim=1))

    def forward():
        with torch.no_grad():
            return attend(leaves)

    upstream = torch.randn_like(result)
    return {FORWARD: forward, BACKWARD: lambda: torch.autograd.grad(result, leaves, upstream, retain_graph=True)}


def eager_calls(tensors, shape):
    """{pass: call} of eager PyTorch. Raises ValueError for shapes that it does not have."""
    if shape.softcap or shape.reverse or shape.teacher_gradients or shape.window >= 0:
        raise ValueError("only masks and shapes are compared with it")
    weight = torch.ones(tensors["q_s"].shape[:3], device=tensors["q_s"].device)
    method = PEERS["eager"](tensors, shape, weight)
    return {FORWARD: method.calls[FORWARD], STEP: method.step}


# ---- Measuring -----------------------------------------------------------------------------------------------------


def check(shape, device):
    """({result: largest relative error} of all ways to loss and gradients, what is wrong)"""
    tensors = random_tensors(shape, device, CHECKED_STD)
    exact = Exact(shape, tensors)
    calls = AttentionCalls(tensors, shape, exact.weight)
    errors, wrong = {}, []
    for passes in (FORWARD, BACKWARD), (ONE_PASS,), *([(STEP,)] if STEP in calls.passes else []):
        for result in calls.results().values():
            result.fill_(float("nan"))
        for name in passes:
            calls.run(name)
        found = exact.errors(calls.results())
        wrong += [f"{passes[-1]}: {text}" for text in exact.wrong(found)]
        errors = {name: worst([error, errors.get(name, 0.0)]) for name, error in found.items()}
    return errors, wrong


def median(timings, who, name):
    """None if it was not timed; a step that was not timed as a whole is the sum of its two passes."""
    if name == STEP and (who, STEP) not in timings:
        both = [median(timings, who, one) for one in (FORWARD, BACKWARD)]
        return sum(both) if all(both) else None
    return timings[who, name].median if (who, name) in timings else None


def rows_of(shape, timings, kernels, errors):
    """One row per pass; a ratio is our time divided by the other."""
    for name in (*shape.passes, STEP):
        ms, timing = median(timings, "ours", name), timings.get(("ours", name))
        if not ms:
            continue
        row = columns_of(shape) | errors_of(errors) | {"pass": name, "kernel": kernels.get(name, "")}
        row |= {"ms": rounded(ms, ".4f"), "fastest_ms": rounded(timing and timing.fastest, ".4f")}
        row["tflops"] = tflops(shape.flops(name), ms)
        for who, passes in COMPARED.items():
            other = median(timings, who, passes.get(name))
            row |= {f"{who}_ms": rounded(other, ".4f"), f"{who}_ratio": rounded(ratio(ms, other), ".3g")}
        yield row


def measure(shape, run, base=BASE):
    given, result, errors = run.given, Result(), {}
    if given.check or given.check_only:
        errors, result.wrong = check(shape, run.device)
        result.lines.append(errors_text(errors))
        release_memory()
    if given.check_only:
        return result
    own = prepared_calls(shape, run.device)
    calls = {("ours", name): call for name, call in own.timed(own.passes).items()}
    if shape != base:
        calls |= {("base", name): call for name, call in base_calls(base, run.device).timed(base.passes).items()}
    others = {"cudnn": lambda: cudnn_calls(shape, run.device)}
    if given.eager:
        others["eager"] = lambda: eager_calls(own.tensors, shape)
    for who, make in others.items():
        try:
            calls |= {(who, name): call for name, call in make().items()}
        except Exception as error:  # they support fewer types, masks and options
            result.notes.append(f"{who} not measured: {refusal_of(error)}")
    timings = run.time(calls)
    if shape == base:
        timings |= {("base", name): timings["ours", name] for name in own.passes}
    for (who, name), timing in timings.items():
        if timing.refusal:
            (result.wrong if who == "ours" else result.notes).append(f"{who} {name} not measured: {timing.refusal}")
    result.rows = list(rows_of(shape, timings, {name: own.kernels(name) for name in own.passes}, errors))
    return result
