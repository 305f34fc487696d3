"""Rows of results: as a text table, and in a CSV file that grows from run to run. Needs neither torch nor a GPU."""

import csv
from datetime import date


def bytes_text(size):
    sign, size = "-" if size < 0 else "", abs(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{sign}{size:.4g} {unit}"
        size /= 1024


def ratio(one, other):
    """None if one of them was not measured."""
    return one / other if one and other else None


def rounded(value, form):
    return "" if value is None else f"{value:{form}}"


def times_of(timing):
    """The columns of a Timing."""
    return {"ms": rounded(timing.median, ".4f"), "fastest_ms": rounded(timing.fastest, ".4f")}


def worst(errors):
    """The largest error; NaN is larger than all."""
    return float("nan") if any(error != error for error in errors) else max(errors)


def errors_of(errors):
    """The columns of {result: relative error}: of dq_t and dq_s the larger one."""
    kinds = {}
    for name, error in errors.items():
        kinds.setdefault(name.split("_")[0], []).append(error)
    return {f"{kind}_error": f"{worst(found):.2e}" for kind, found in kinds.items()}


def errors_text(errors):
    return "relative errors: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def tflops(flops, ms):
    return rounded(flops / ms * 1e-9 if ms else None, ".1f")


# ---- The table -----------------------------------------------------------------------------------------------------


NAMES = "method kernel pass variant rank call note".split()  # columns of text


def cell(column, value):
    return bytes_text(int(value)) if column.endswith("_bytes") and value != "" else str(value)


def table(rows, columns):
    """Lines of aligned columns: names to the left, numbers to the right. A column without values is left out."""
    lines = [[cell(column, row.get(column, "")) for column in columns] for row in rows]
    cells = [each for each in zip(columns, *lines) if any(each[1:])]

    def align(column):
        side = "<" if column[0] in NAMES else ">"
        return [f"{each:{side}{max(map(len, column))}}" for each in column]

    return ["  " + "  ".join(line).rstrip() for line in zip(*map(align, cells))]


# ---- CSV -----------------------------------------------------------------------------------------------------------


def check_csv(path, columns):
    """Raises ValueError if the file has other columns, or if its folder does not exist."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if path.exists() and path.stat().st_size:
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != columns:
            raise ValueError(f"its columns are not those of this question: {','.join(columns)}")


def append_csv(path, rows, about, columns):
    """`about` has the columns that are the same in all rows of a run."""
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows({"date": date.today().isoformat(), **about, **row} for row in rows)


def read_csv(path, columns):
    check_csv(path, columns)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
