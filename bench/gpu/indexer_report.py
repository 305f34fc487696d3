"""The table and the CSV rows of bench/indexer.py. Needs neither torch nor a GPU."""

import statistics

from .cases import STEP
from .report import bytes_text, column, rounded

COLUMNS = (
    "date gpu torch commit method kernel pass length heads key_heads dim index_heads index_dim top_k mask ms fastest_ms tflops"
    " of_cudnn_causal of_cudnn_full naive_ratio extra_bytes kl_error dq_error dk_error dw_error note"
).split()


def median(method, operation):
    return statistics.median(method.times[operation]) if operation in method.times else None


def rate(method, operation):
    """Useful TFLOP/s."""
    ms = median(method, operation)
    return method.flops[operation] / ms * 1e-9 if ms else None


def lines_of(methods):
    """One dict per method and pass."""
    by_name = {method.name: method for method in methods}
    attention, naive = by_name.get("cudnn"), by_name.get("naive")
    for method in methods:
        for operation in method.times:
            ms, mine = median(method, operation), rate(method, operation)
            line = {"method": method, "pass": operation, "ms": ms, "fastest": min(method.times[operation]), "rate": mine}
            for mask in "causal", "full":
                theirs = attention and method is not attention and rate(attention, f"forward, {mask}")
                line[f"of_{mask}"] = mine / theirs if theirs else None
            other = naive and method is not naive and median(naive, operation)
            line["naive"] = other / ms if other else None
            line["extra"] = method.extra_memory if operation == STEP else None
            yield line


def print_table(methods):
    print(
        f"  {'method':13} {'pass':19} {'median':>11} {'fastest':>11} {'TFLOP/s':>8} {'of cuDNN causal':>15} {'full':>5} "
        f"{'naive/this':>10} {'extra memory':>12}"
    )
    for line in lines_of(methods):
        memory = bytes_text(line["extra"]) if line["extra"] is not None else ""
        print(
            f"  {line['method'].name:13} {line['pass']:19} {line['ms']:8.3f} ms {line['fastest']:8.3f} ms "
            f"{line['rate']:8.1f} {column(line['of_causal'], '15.2f')} {column(line['of_full'], '5.2f')} "
            f"{column(line['naive'], '10.1f')} {memory:>12}"
        )
    for method in methods:
        if method.refusal:
            print(f"  {method.name:13} not measured: {method.refusal}")


def errors_text(errors):
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def shape_of(case):
    names = "length heads key_heads dim index_heads index_dim top_k mask".split()
    return {name: getattr(case, name) for name in names}


def csv_rows(methods, case):
    """One row per method and pass, and one per method that was not measured. cuDNN's rows have no shape."""
    for line in lines_of(methods):
        method = line["method"]
        yield (shape_of(case) if method.name != "cudnn" else {}) | {
            "method": method.name, "kernel": method.kernel, "pass": line["pass"], "ms": rounded(line["ms"], ".4f"),
            "fastest_ms": rounded(line["fastest"], ".4f"), "tflops": rounded(line["rate"], ".1f"),
            "of_cudnn_causal": rounded(line["of_causal"], ".3f"), "of_cudnn_full": rounded(line["of_full"], ".3f"),
            "naive_ratio": rounded(line["naive"], ".4g"), "extra_bytes": "" if line["extra"] is None else line["extra"],
            **{f"{name}_error": rounded(error, ".2e") for name, error in method.errors.items()},
        }  # fmt: skip
    for method in methods:
        if method.refusal:
            yield shape_of(case) | {"method": method.name, "note": f"not measured: {method.refusal}"}
