"""The mutants of scripts/mutate: kinds of changes to one line of C or Python."""

import re
from pathlib import Path

EQUIVALENT = Path(__file__).with_name("mutants-equivalent.txt")

NUMBER = r"(?<![\w.])(\d+)(?![\w.])"
NAME = r"[\w.>\[\]-]+"
OPPOSITE = {"true": "false", "True": "False", "min": "max", "fmin": "fmax", "break": "continue"}
OPPOSITE |= {b: a for a, b in OPPOSITE.items()}


def exchange(*pairs):
    """Replaces each operator of a pair by the other."""
    table = {f" {a} ": f" {b} " for pair in pairs for a, b in (pair, pair[::-1])}
    return "|".join(re.escape(key) for key in table), lambda match: table[match[0]]


# Kind: (pattern, replacement). The pattern sees a line whose strings and comments are masked.
BOTH = {
    "boundary": exchange(("<", "<="), (">", ">=")),
    "comparison": exchange(("<", ">"), ("<=", ">=")),
    "equality": exchange(("==", "!=")),
    "sign": exchange(("+", "-"), ("+=", "-=")),
    "product": exchange(("*", "/")),
    "logic": exchange(("&&", "||"), ("and", "or")),
    "off by one": (NUMBER, lambda match: str(int(match[1]) + 1)),
    "zero": (r"(?<![\w.])([1-9]\d*)(?![\w.])", "0"),
    "arguments": (rf"\(({NAME}), ({NAME})(?=[,)])", r"(\2, \1"),
    "jump": (r"\b(break|continue)(?=;|$)", lambda match: OPPOSITE[match[1]]),
    "boolean": (r"\b(true|false|True|False)\b", lambda match: OPPOSITE[match[1]]),
    "minimum": (r"\b(f?min|f?max)(f?)(?=\()", lambda match: OPPOSITE[match[1]] + match[2]),
}
C = BOTH | {
    "bits": exchange(("&", "|"), ("<<", ">>")),
    "negation": (r"\b(if|while) \((.*)\)$", r"\1 (!(\2))"),
    "dropped not": (r"(?<=[( ])!(?=[\w(])", ""),
    "choice": (r"(?<= \? )([^?:,;()]+) : ([^?:,;()]+)", r"\2 : \1"),
    "statement": (r"^(\s+)[\w.>\[\]*-]+(\(.*\)| [-+*/|&]?= .*|\+\+);$", r"\1;"),
    "return": (r"\breturn (?!0;|SKL_OK;|CLI_OK;|NULL;|false;)([^;]+);", "return 0;"),
}
PYTHON = BOTH | {
    "negation": (r"^(\s*)(if|elif|while) (.*):$", r"\1\2 not (\3):"),
    "dropped not": (r"\bnot (?!in\b)", ""),
    "statement": (r"^(\s+)[\w.\[\]]+(\([^()]*\)| [-+*/|&]?= .*[^([{,])$", r"\1pass"),
    "return": (r"\breturn (?!None$)(\S.*[^([{,])$", "return None"),
}

TEXT = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|/\*.*?\*/|//.*|#.*')
NO_CODE = re.compile(r"\s*(#|/?\*|//|assert|static_assert|import |from |@|$)")
MASK = "\x01"  # no pattern matches it


def of_line(kinds, line):
    """(kind, changed line) for every mutant of a line."""
    masked = TEXT.sub(lambda match: MASK * len(match[0]), line)
    for kind, (pattern, replacement) in kinds.items():
        for match in re.finditer(pattern, masked):
            changed = match.expand(replacement) if isinstance(replacement, str) else replacement(match)
            for text in TEXT.findall(line[match.start() : match.end()]):  # what the replacement has copied
                changed = changed.replace(MASK * len(text), text, 1)
            mutant = line[: match.start()] + changed + line[match.end() :]
            if mutant != line and MASK not in mutant:
                yield kind, mutant


def code_lines(text, is_python):
    """Numbered lines with code: no comment, docstring, assertion, import or preprocessor line."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if is_python:
            quotes = line.count('"""')
            skipped = inside or quotes > 0
            inside ^= quotes == 1
        else:
            skipped = inside or re.match(r"\s*/\*", line)
            inside = bool(skipped) and "*/" not in line
        if not skipped and not NO_CODE.match(line):
            yield number, line


def of_file(path, text):
    """Every mutant of a file, as a dictionary."""
    is_python = path.endswith(".py")
    for number, line in code_lines(text, is_python):
        for kind, mutant in of_line(PYTHON if is_python else C, line):
            yield {"path": path, "line": number, "kind": kind, "old": line, "new": mutant}


def key(mutant):
    """Names a mutant; lines may move."""
    return mutant["path"], mutant["old"].strip(), mutant["new"].strip()


def equivalents():
    """Reasons by mutant. An entry is four lines: path, '- ' old, '+ ' new, '= ' reason."""
    entries, path, old, new = {}, None, None, None
    for line in EQUIVALENT.read_text().splitlines():
        mark, text = line[:2], line[2:].strip()
        old, new = (text if mark == "- " else old), (text if mark == "+ " else new)
        if mark == "= ":
            entries[path, old, new] = text
        elif mark not in ("- ", "+ ", "# ", "#", ""):
            path = line.strip()
    return entries
