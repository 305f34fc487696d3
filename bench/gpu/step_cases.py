"""The training steps of bench/step.py. Needs neither torch nor a GPU."""

from dataclasses import dataclass

NO_LOSS, GIVEN, COMPUTED = "no loss", "LSEs given", "LSEs computed"
CARRIED, GRADIENT_ONLY = "carried", "carried, no value"
DISTILLER, FUSED_DISTILLER = "AttentionDistiller", "AttentionDistiller, fused"
LAYERS, HUGGING_FACE = "layers", "hugging face"
VARIANTS = {LAYERS: (NO_LOSS, GIVEN, COMPUTED, CARRIED, GRADIENT_ONLY), HUGGING_FACE: (NO_LOSS, DISTILLER, FUSED_DISTILLER)}


@dataclass(frozen=True)
class Model:
    """The size of a decoder layer."""

    heads: int
    key_heads: int
    dim: int
    hidden: int
    mlp: int

    def __str__(self):
        return f"{self.heads}/{self.key_heads} heads of {self.dim}"


TEACHER = Model(32, 8, 128, hidden=4096, mlp=14336)  # as Llama 3 8B
STUDENTS = [Model(heads, 8, dim, hidden=2048, mlp=8192) for heads, dim in ((32, 64), (16, 128), (8, 128))]  # about 1B


@dataclass(frozen=True)
class Setup:
    """A step of a teacher, which has no gradients, and of a student."""

    kind: str
    student: Model
    length: int
    teacher: Model = TEACHER
    layers: int = 2
    checkpointing: bool = False

    def __str__(self):
        checkpointing = ", checkpointing" if self.checkpointing else ""
        return f"{self.kind}: student {self.student}, N={self.length}, {self.layers} layers{checkpointing}"

    @property
    def variants(self):
        return VARIANTS[self.kind]


SETUPS = [Setup(LAYERS, student, length) for length in (8192, 32768) for student in STUDENTS]
SETUPS += [
    Setup(HUGGING_FACE, student, length, checkpointing=length > 32768) for length in (16384, 65536) for student in STUDENTS
]
QUICK = [setup for setup in SETUPS if setup.student is not STUDENTS[2] and setup.length <= 16384]


def chosen(kinds, lengths, is_quick):
    """The setups of these kinds and lengths; all if there are none. Raises ValueError."""
    among = QUICK if is_quick else SETUPS
    found = [setup for setup in among if setup.kind in (kinds or VARIANTS) and setup.length in (lengths or [setup.length])]
    if not found:
        shown = "; ".join(sorted({f"{setup.kind} {setup.length}" for setup in among}))
        raise ValueError(f"no setup has {' or '.join(map(str, lengths))} tokens; there are {shown}")
    return found
