"""What is shown of a run: the table, and rows of the CSV."""

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
    """Milliseconds, or None where it was not measured."""
    turns = [method.times[operation] for method in methods if method.name == name and operation in method.times]
    return statistics.median(turns[0]) if turns else None


def ratio(one, other):
    return one / other if one and other else None


def rate(method, operation, median):
    """Useful TFLOP/s."""
    return method.matmuls[operation] * 2 * method.case.pairs * method.case.dim / median * 1e-9


def lines_of(methods):
    """A dict of figures for every method and pass; and for forward + backward, which the one pass stands against."""
    one_pass = median_of(methods, "streamkl", ONE_PASS)
    for method in methods:
        beside = [other for other in methods if other.name == "streamkl" != method.name]
        common = {"method": method, "extra": method.extra_memory}
        for operation, turns in method.times.items():
            median = statistics.median(turns)
            yield common | {
                "pass": operation, "ms": median, "fastest": min(turns), "rate": rate(method, operation, median),
                "ours": ratio(median_of(beside, "streamkl", operation), median),
                "one_pass": ratio(one_pass, median) if operation == BACKWARD else None,
            }  # fmt: skip
        if {FORWARD, BACKWARD} <= set(method.times):
            median = sum(median_of([method], method.name, operation) for operation in (FORWARD, BACKWARD))
            mine = sum(median_of(beside, "streamkl", operation) or 0 for operation in (FORWARD, BACKWARD))
            yield common | {"pass": STEP, "ms": median, "ours": ratio(mine, median), "one_pass": ratio(one_pass, median)}


# ---- The table -----------------------------------------------------------------------------------------------------------


def column(value, form):
    """The value in its width, or as many spaces."""
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


def beside_dense(methods, dense):
    """[(pass, our rate, our dense rate)]"""
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
    """One for every method and pass, one for every method that was not measured; notes: {pass: text}."""
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
    """Raises ValueError if the file has other columns, or no folder to lie in."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if path.exists() and path.stat().st_size:
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != columns:
            raise ValueError(f"its columns are not those of this program: {','.join(columns)}")


def append_csv(path, rows, run, columns=COLUMNS):
    """run: the columns that all rows share."""
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows({"date": date.today().isoformat(), **run, **row} for row in rows)


def read_csv(path):
    check_csv(path)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
