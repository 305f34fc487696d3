"""The shapes of bench/shapes.py. Needs neither torch nor a GPU."""

from dataclasses import dataclass

from .cases import BACKWARD, FORWARD, ONE_PASS, STEP

FORWARD_GIVEN = "forward, lse_t given"  # differs from the forward only in teacher groups
PASSES = (FORWARD, FORWARD_GIVEN, BACKWARD, ONE_PASS)
ALL_PASSES = (*PASSES, STEP)  # the step takes no LSEs


@dataclass(frozen=True)
class Shape:
    """A problem of self-attention. The defaults are the base shape: Llama 3 8B's heads on both sides."""

    name: str
    heads_t: int = 32
    key_heads_t: int = 8
    dim_t: int = 128
    heads_s: int = 32
    key_heads_s: int = 8
    dim_s: int = 128
    batch: int = 1
    length: int = 8192
    dtype_t: str = "bf16"
    dtype_s: str = "bf16"
    causal: bool = True
    window: int = -1  # keys before a query that it attends to; -1: all
    softcap: float = 0.0
    teacher_gradients: bool = False
    deterministic: bool = False
    reverse: bool = False

    def __str__(self):
        def side(heads, key_heads, dim, dtype):
            return f"{heads}/{key_heads} x {dim} {dtype}"

        teacher = side(self.heads_t, self.key_heads_t, self.dim_t, self.dtype_t)
        student = side(self.heads_s, self.key_heads_s, self.dim_s, self.dtype_s)
        batch = f"B={self.batch} " if self.batch > 1 else ""
        return f"{batch}N={self.length} {self.mask}, teacher {teacher}, student {student}{''.join(self.extras)}"

    @property
    def extras(self):
        if self.softcap:
            yield f", softcap {self.softcap:g}"
        for name in "teacher_gradients", "deterministic", "reverse":
            if getattr(self, name):
                yield f", {name.replace('_', ' ')}"

    @property
    def group_size(self):
        return self.heads_t // self.heads_s

    @property
    def mask(self):
        return f"window {self.window}" if self.window >= 0 else "causal" if self.causal else "full"

    @property
    def passes(self):
        """The passes that are timed alone."""
        return [operation for operation in PASSES if operation != FORWARD_GIVEN or self.group_size > 1]

    @property
    def pairs(self):
        """Visible query-key pairs of one head of one sequence."""
        n, seen = self.length, self.window + 1 if 0 <= self.window < self.length else self.length
        return seen * (seen + 1) // 2 + (n - seen) * seen if self.causal else n * n

    def flops(self, operation):
        """Work that the loss requires: both logits once; for gradients, dq and dk of every side that has them."""
        if operation == STEP:
            return self.flops(FORWARD) + self.flops(BACKWARD)
        with_gradients = operation in (BACKWARD, ONE_PASS)
        products_s, products_t = (3 if with_gradients else 1), (3 if with_gradients and self.teacher_gradients else 1)
        sizes = products_t * self.heads_t * self.dim_t + products_s * self.heads_s * self.dim_s
        return 2 * self.batch * self.pairs * sizes


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

QUICK = [
    shape
    for shape in SHAPES
    if shape is BASE
    or shape.name
    in {
        "16 student heads (mean of 2)", "8 student heads (mean of 4)", "teacher 128, student 64", "teacher 256, student 64",
        "f32", "softcap 50", "teacher gradients", "B=8, N=1024", "B=16, N=512, heads of 64",
    }  # fmt: skip
]


def chosen(patterns, is_quick):
    """The shapes whose name contains one of the patterns; all if there is none. Raises ValueError."""
    among = QUICK if is_quick else SHAPES
    for pattern in patterns:
        if not any(pattern in shape.name for shape in among):
            names = "; ".join(shape.name for shape in among)
            raise ValueError(f"{pattern!r}: must be part of a name: {names}")
    return [shape for shape in among if not patterns or any(pattern in shape.name for pattern in patterns)]
