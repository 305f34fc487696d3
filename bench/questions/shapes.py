"""Times the shapes that distillation has in practice, and finds those that are slow for their work.

    bench/run.py shapes                                    # all shapes: less than a minute
    bench/run.py shapes --only 'student heads' --only f32  # those whose name contains one of the texts
    bench/run.py shapes --check                            # also compares results with float64

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

from harness.attention import FORWARD_GIVEN, AttentionCalls, Exact, Shape, prepared_calls, random_tensors
from harness.library import BACKWARD, FORWARD, ONE_PASS, STEP
from harness.report import errors_text, ratio, rounded, too_large, worst
from harness.run import Method, make_peer
from harness.timing import release_memory
from peers.attention import PEERS

COLUMNS = (
    "date gpu torch commit shape pass batch length mask heads_t key_heads_t dim_t dtype_t heads_s key_heads_s dim_s dtype_s"
    " softcap teacher_gradients deterministic reverse ms fastest_ms tflops base_ms base_ratio cudnn_ms cudnn_ratio"
    " kernel kl_error dq_error dk_error note"
).split()

# {our pass: the other's}. The base shape has no teacher groups: its forward computes all LSEs. cuDNN's forward has as
# many products as ours, its backward one more.
COMPARED = {
    "base": {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, BACKWARD: BACKWARD, ONE_PASS: ONE_PASS, STEP: STEP},
    "cudnn": {FORWARD: FORWARD, FORWARD_GIVEN: FORWARD, BACKWARD: BACKWARD, ONE_PASS: BACKWARD, STEP: STEP},
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


def add_options(parser):
    parser.add_argument("--check", action="store_true", help="also compare results with float64")


def cases(given):
    return SHAPES


# ---- Measuring -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def base_calls(shape, device):
    """The calls of the shape that all others are compared with."""
    return prepared_calls(shape, device)


def check(shape, device):
    """({result: largest relative error} of all ways to loss and gradients, what is wrong)"""
    tensors = random_tensors(shape, device, CHECKED_STD)
    exact = Exact(shape, tensors)
    calls = AttentionCalls(tensors, shape, exact.weight)
    errors, wrong = {}, []
    for passes in (FORWARD, BACKWARD), (ONE_PASS,), *([(STEP,)] if STEP in calls.calls else []):
        for result in calls.results().values():
            result.fill_(float("nan"))
        for name in passes:
            calls.run(name)
        found = exact.errors(calls.results())
        wrong += [f"{passes[-1]}: {text}" for text in too_large(found, exact.limits)]
        errors = {name: worst([error, errors.get(name, 0.0)]) for name, error in found.items()}
    return errors, wrong


def columns_of(name, kernel, ours, others):
    """The columns of a pass; a ratio is our time divided by the other."""
    row = {"kernel": kernel}
    for other, passes in COMPARED.items():
        ms = others[other].ms(passes[name])
        row |= {f"{other}_ms": rounded(ms, ".4f"), f"{other}_ratio": ratio(ours.ms(name), ms)}
    return row


def measure(shape, run, base=BASE):
    errors, wrong = {}, []
    if run.given.check:
        errors, wrong = check(shape, run.device)
        release_memory()
    calls = prepared_calls(shape, run.device)
    flops = {name: shape.flops(name) for name in COMPARED["base"]}
    ours = Method("ours", calls.timed(calls.calls), flops=flops, errors=errors)
    others = {"base": ours, "cudnn": make_peer("cudnn", lambda: PEERS["cudnn"](calls.tensors, shape))}
    if shape != base:
        theirs = base_calls(base, run.device)
        others["base"] = Method("base", theirs.timed(theirs.calls))
    kernels = {name: calls.kernels(name) for name in calls.calls}

    def columns(method, name):
        return columns_of(name, kernels.get(name), ours, others)

    result = run.time([ours], columns, others=[other for other in others.values() if other is not ours])
    result.wrong += wrong
    result.lines += [errors_text(errors)] if errors else []
    refused = [other for other in others.values() if other.refusal and other is not ours]
    result.notes += [f"{other.name} not measured: {other.refusal}" for other in refused]
    return result
