"""The cases of bench/carried.py. Needs neither torch nor a GPU."""

from dataclasses import dataclass

FORWARD, CUDNN, APART, CARRIED, WITH_KL = "forward", "cuDNN", "apart", "carried", "with KL"

COLUMNS = (
    "date gpu torch commit case length mask heads key_heads dim_t dim_s dtype method ms fastest_ms cudnn_ratio tflops"
    " dq_error dk_error dv_error note"
).split()


@dataclass(frozen=True)
class Case:
    name: str
    length: int = 8192
    heads: int = 16
    key_heads: int = 16
    dim_t: int = 128
    dim_s: int = 128
    causal: bool = True
    dtype: str = "bf16"
    sequences: int = 1  # of equal length, packed

    def __str__(self):
        mask = "causal" if self.causal else "full"
        packed = f", {self.sequences} packed sequences" if self.sequences > 1 else ""
        return (
            f"N={self.length}{packed}, {mask}, {self.heads}/{self.key_heads} heads, teacher of {self.dim_t}, student of"
            f" {self.dim_s}, {self.dtype}"
        )

    @property
    def flops(self):
        """Of six products: X with the teacher's head size, Y, dP, dq, dk and dv with the student's."""
        length = self.length // self.sequences
        pairs = self.heads * self.sequences * (length * (length + 1) // 2 if self.causal else length * length)
        return 2 * pairs * (self.dim_t + 5 * self.dim_s)


CASES = [
    Case("causal, heads of 128"),
    Case("full, heads of 128", causal=False),
    Case("causal, heads of 64", dim_t=64, dim_s=64),
    Case("full, heads of 64", dim_t=64, dim_s=64, causal=False),
    Case("causal, student of 64", dim_s=64),
    Case("causal, f16", dtype="f16"),
    Case("causal, 32/8 heads", heads=32, key_heads=8),
    Case("causal, packed", length=16384, sequences=4),
    Case("causal, N=2048", length=2048, heads=64, key_heads=64),
    Case("causal, N=32768", length=32768),
    Case("causal, N=131072", length=131072, heads=4, key_heads=4),
]


def chosen(texts):
    """The cases whose name contains one of the texts; all if there are none. Raises ValueError."""
    for text in texts:
        if not any(text in case.name for case in CASES):
            raise ValueError(f"{text}: no such case; there are {'; '.join(case.name for case in CASES)}")
    return [case for case in CASES if not texts or any(text in case.name for text in texts)]
