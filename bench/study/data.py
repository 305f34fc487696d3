#!/usr/bin/env python3
"""Makes the training and held-out data of the study from English documentation, in two stages.

    apt-get download linux-doc-6.12 ... && dpkg-deb -x FILE.deb DEBS/NAME     # the packages of SOURCES
    data.py texts --packages DEBS --essays FOLDER --out DATA
    data.py tokens --teacher TEACHER --out DATA

The first stage writes DATA/train.jsonl.xz and DATA/held-out.jsonl.xz, the second train.npy and held-out.npy, streams of uint16.
Every 40th document, chosen by the hash of its text, is held out; a text that occurs twice counts once.
"""

import argparse
import gzip
import hashlib
import html.parser
import json
import lzma
import re
import sys
from pathlib import Path

import numpy as np

SOURCES = {  # package: (files, files to leave out)
    "linux-doc-6.12": (r"Documentation/.*\.rst(\.gz)?$", r"/translations/|/index\.rst"),
    "python3.11-doc": (r"_sources/.*\.txt(\.gz)?$", r"/changelog"),
    "postgresql-doc-15": (r"\.html$", r"/(release|index|bookindex|features)"),
    "git-doc": (r"\.txt(\.gz)?$", r"RelNotes"),
    "perl-doc": (r"\.pod$", r"perl\d+delta|perltoc"),
    "debian-handbook": (r"html/en-US/.*\.html$", r"ix01|index"),
    "installation-guide-amd64": (r"/en/.*\.html$", r"index"),
    "debian-reference-en": (r"\.en\.html$", r"index"),
    "developers-reference": (r"developers-reference/[^/]*\.html$", r"genindex|search"),
    "aptitude-doc-en": (r"\.html$", r"index"),
    "sqlite3-doc": (r"\.html$", r"/(changes|releaselog|matrix|c3ref/(const|func|obj)list)|/th3|/syntax/"),
    "rust-doc": (r"html/(book|reference|nomicon|edition-guide|rust-by-example|cargo/(guide|reference)|error_codes|rustc|unstable-book)/.*\.html$",
                 r"/(print|toc|index)\.html"),
    "python-sqlalchemy-doc": (r"_sources/.*\.txt(\.gz)?$|html/(orm|core|faq|tutorial|dialects)/.*\.html$", r"changelog|genindex"),
    "erlang-doc": (r"doc/(design_principles|efficiency_guide|getting_started|programming_examples|reference_manual|system_principles|tutorial)/.*\.html$|lib/(stdlib|kernel|ssl|ssh|mnesia)[^/]*/doc/html/.*\.html$",
                   r"index|release_notes|notes"),
    "octave-doc": (r"octave\.html/.*\.html$", r"index"),
    "cmake-doc": (r"_sources/.*\.txt(\.gz)?$", r"/release/|index"),
}  # fmt: skip
HELD_OUT = 40  # one document of this many
LEAST = 1500  # characters of a document


class _Text(html.parser.HTMLParser):
    """The text of a page without navigation."""

    SKIPPED = {"script", "style", "head", "nav", "button", "svg"}
    BLOCKS = {"p", "div", "li", "tr", "pre", "h1", "h2", "h3", "h4", "dt", "dd", "br", "table"}

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skips = self.raw = 0

    def handle_starttag(self, tag, attrs):
        self.skips += tag in self.SKIPPED
        self.raw += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.skips -= tag in self.SKIPPED and self.skips > 0
        self.raw -= tag == "pre" and self.raw > 0
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.skips:
            self.parts.append(data if self.raw else re.sub(r"\s+", " ", data))


def read(path: Path) -> str:
    raw = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8", errors="replace")
    if path.suffix == ".html":
        parser = _Text()
        parser.feed(text)
        text = "".join(parser.parts)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def documents(packages: Path, essays: Path | None) -> dict[str, str]:
    """{hash of the text: text}, in the order of the hashes, which mixes the sources."""
    found: dict[str, str] = {}
    for name, (files, left_out) in SOURCES.items():
        size = 0
        for path in sorted((packages / name).rglob("*")):
            where = str(path)
            if path.is_symlink() or not path.is_file() or not re.search(files, where) or re.search(left_out, where):
                continue
            text = read(path)
            if len(text) >= LEAST:
                found[hashlib.sha256(text.encode()).hexdigest()] = text
                size += len(text)
        print(f"{name:28} {size / 1e6:7.2f} MB", file=sys.stderr)
    for path in sorted(essays.glob("*.txt")) if essays else []:
        text = read(path)
        found[hashlib.sha256(text.encode()).hexdigest()] = text
    return dict(sorted(found.items()))


def write_texts(packages: Path, essays: Path | None, out: Path) -> None:
    splits: dict[str, list[str]] = {"train": [], "held-out": []}
    for key, text in documents(packages, essays).items():
        splits["held-out" if int(key[-8:], 16) % HELD_OUT == 0 else "train"].append(text)
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in splits.items():
        with lzma.open(out / f"{name}.jsonl.xz", "wt", preset=9) as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        print(f"{name}: {len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} MB", file=sys.stderr)


def write_tokens(teacher: str, out: Path) -> None:
    from streamkl.distill._options import Options
    from streamkl.distill._student import load_tokenizer

    tokenizer = load_tokenizer(Options(teacher=teacher))
    for name in "train", "held-out":
        with lzma.open(out / f"{name}.jsonl.xz", "rt") as file:
            texts = [json.loads(line)["text"] for line in file]
        streams = []
        for at in range(0, len(texts), 512):  # a list of texts is tokenized by all cores
            found = tokenizer(texts[at : at + 512], add_special_tokens=False, verbose=False)["input_ids"]
            streams += [np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16) for ids in found]
        np.save(out / f"{name}.npy", np.concatenate(streams))
        print(f"{name}: {len(texts):,} documents, {sum(map(len, streams)):,} tokens", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    texts, tokens = stages.add_parser("texts"), stages.add_parser("tokens")
    texts.add_argument("--packages", type=Path, required=True)
    texts.add_argument("--essays", type=Path, help="a folder with .txt files")
    tokens.add_argument("--teacher", required=True)
    for stage in texts, tokens:
        stage.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.stage == "texts":
        write_texts(given.packages, given.essays, given.out)
    else:
        write_tokens(given.teacher, given.out)


if __name__ == "__main__":
    main()
