"""Rows of results: as a text table, and in a CSV file that grows from run to run. Needs neither torch nor a GPU."""

import csv
from datetime import date


def bytes_text(size):
    """A number of bytes, which may be a text, with three digits."""
    size = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.3g} {unit}" if abs(size) < 1000 else f"{size:.0f} {unit}"
        size /= 1024


def rounded(value, form):
    return "" if value is None else f"{value:{form}}"


def ratio(one, other, form=".3g"):
    """The text of one / other; empty if one of them was not measured."""
    return f"{one / other:{form}}" if one and other else ""


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


def too_large(errors, limits):
    """One text per error above its limit; NaN is."""
    return [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= limits[name]]


def case_columns(case, columns):
    """The columns that are attributes of a case, which may also stand under its name."""
    texts = {tuple: lambda value: "+".join(map(str, value)), bool: int}
    values = {column: getattr(case, column) for column in columns if hasattr(case, column)}
    values = {column: texts.get(type(value), lambda same: same)(value) for column, value in values.items()}
    return {"case": case.name, "shape": case.name} | values


# ---- The table -----------------------------------------------------------------------------------------------------


NAMES = "method kernel pass note".split()  # columns of text


def cell(column, value):
    return bytes_text(value) if column.endswith("_bytes") and value != "" else str(value)


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
    """`about` has the columns that are the same in all rows of a run. Other keys of a row are left out."""
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n", extrasaction="ignore")
        if is_new:
            writer.writeheader()
        writer.writerows({"date": date.today().isoformat(), **about, **row} for row in rows)
