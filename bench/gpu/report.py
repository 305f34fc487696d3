"""The table and the CSV rows of bench/peers.py. Needs neither torch nor a GPU."""

import csv
import statistics
from datetime import date

from .cases import BACKWARD, FORWARD, ONE_PASS, STEP

COLUMNS = (
    "date gpu torch commit method kernel pass heads key_heads batch length packed dim mask ms fastest_ms tflops"
    " ours_ratio one_pass_ratio extra_bytes kl_error dq_error dk_error note"
).split()


def bytes_text(size):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.4g} {unit}"
        size /= 1024


# ---- Figures of one case -------------------------------------------------------------------------------------------------


def median_of(methods, name, operation):
    """Milliseconds, or None if it was not measured."""
    samples = [method.times[operation] for method in methods if method.name == name and operation in method.times]
    return statistics.median(samples[0]) if samples else None


def ratio(one, other):
    return one / other if one and other else None


def rate(method, operation, median):
    """Useful TFLOP/s."""
    return method.matmuls[operation] * 2 * method.case.pairs * method.case.dim / median * 1e-9


def lines_of(methods):
    """One dict per method and pass, and one for forward + backward, which compares with one-pass."""
    one_pass = median_of(methods, "streamkl", ONE_PASS)
    for method in methods:
        streamkl = [other for other in methods if other.name == "streamkl" != method.name]
        common = {"method": method, "extra": method.extra_memory}
        for operation, samples in method.times.items():
            median = statistics.median(samples)
            yield common | {
                "pass": operation, "ms": median, "fastest": min(samples), "rate": rate(method, operation, median),
                "ours": ratio(median_of(streamkl, "streamkl", operation), median),
                "one_pass": ratio(one_pass, median) if operation == BACKWARD else None,
            }  # fmt: skip
        if {FORWARD, BACKWARD} <= set(method.times):
            median = sum(median_of([method], method.name, operation) for operation in (FORWARD, BACKWARD))
            mine = sum(median_of(streamkl, "streamkl", operation) or 0 for operation in (FORWARD, BACKWARD))
            yield common | {"pass": STEP, "ms": median, "ours": ratio(mine, median), "one_pass": ratio(one_pass, median)}


# ---- The table -----------------------------------------------------------------------------------------------------------


def column(value, form):
    """The value, or spaces of the same width."""
    text = f"{value:{form}}" if value is not None else ""
    return f"{text:>{form.split('.')[0]}}"


def print_table(methods):
    head = f"{'median':>10} {'fastest':>10} {'TFLOP/s':>8} {'ours/this':>9} {'one pass/this':>13} {'extra memory':>12}"
    print(f"  {'method':13} {'pass':18} {head}")
    for line in lines_of(methods):
        fastest = f"{line['fastest']:7.3f} ms" if "fastest" in line else ""
        print(
            f"  {line['method'].name:13} {line['pass']:18} {line['ms']:7.3f} ms {fastest:>10} "
            f"{column(line.get('rate'), '8.1f')} {column(line['ours'], '9.2f')} {column(line['one_pass'], '13.2f')} "
            f"{bytes_text(line['extra']):>12}"
        )
    for method in methods:
        if method.refusal:
            print(f"  {method.name:13} not measured: {method.refusal}")


def print_errors(methods):
    for method in methods:
        shown = ", ".join(f"{name} {error:.1e}" for name, error in method.errors.items())
        if shown:
            which = " one pass" if ONE_PASS in method.passes else ""
            print(f"  relative error of {method.name + which + ':':20} {shown}")


def print_explanations(methods):
    """The launches of each method, as the library explains them."""
    for method in methods:
        for line in method.explanation.splitlines():
            print(f"  {line}")


def compared_with_dense(methods, dense):
    """[(pass, rate, rate of the dense problem)]"""
    for mine, other in zip(methods, dense):
        for operation in mine.times:
            if operation in other.times:
                medians = [median_of([method], method.name, operation) for method in (mine, other)]
                yield operation, rate(mine, operation, medians[0]), rate(other, operation, medians[1])


# ---- CSV -----------------------------------------------------------------------------------------------------------------


def shape_of(case):
    return {
        "heads": case.heads, "key_heads": case.keys, "batch": case.batch, "length": case.length, "dim": case.dim,
        "packed": "+".join(map(str, case.packed)), "mask": case.mask,
    }  # fmt: skip


def rounded(value, form):
    return "" if value is None else f"{value:{form}}"


def csv_rows(methods, notes=None):
    """One row per method and pass, and one per method that was not measured; notes: {pass: text}."""
    for line in lines_of(methods):
        method = line["method"]
        yield shape_of(method.case) | {
            "method": method.name, "kernel": method.kernel, "pass": line["pass"], "ms": rounded(line["ms"], ".4f"),
            "fastest_ms": rounded(line.get("fastest"), ".4f"), "tflops": rounded(line.get("rate"), ".1f"),
            "ours_ratio": rounded(line["ours"], ".3g"), "one_pass_ratio": rounded(line["one_pass"], ".3g"),
            "extra_bytes": method.extra_memory, "note": (notes or {}).get(line["pass"], ""),
            **{f"{name}_error": rounded(error, ".2e") for name, error in method.errors.items()},
        }  # fmt: skip
    for method in methods:
        if method.refusal:
            yield shape_of(method.case) | {"method": method.name, "note": f"not measured: {method.refusal}"}


def check_csv(path, columns=COLUMNS):
    """Raises ValueError if the file has other columns, or if its folder does not exist."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if path.exists() and path.stat().st_size:
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != columns:
            raise ValueError(f"its columns are not those of this program: {','.join(columns)}")


def append_csv(path, rows, run, columns=COLUMNS):
    """`run` has the columns that are the same in all rows."""
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows({"date": date.today().isoformat(), **run, **row} for row in rows)


def read_csv(path, columns=COLUMNS):
    check_csv(path, columns)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
