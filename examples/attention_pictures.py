"""Pictures of the attention of a Hugging Face model, without its attention matrices:

heads.csv     the numbers, one row per head
distance.svg  where each layer looks: attention by distance, with the first token apart
heads.svg     how much each head gives to the first token, and how often it finds the token that followed an earlier
              occurrence of the current one: in a short text, and over half the context

python examples/attention_pictures.py --model MODEL --text FILE ... --tokens 8192 --out FOLDER    # measures, then draws
python examples/attention_pictures.py --out FOLDER --layers 0-9,10-19    # draws heads.csv again, and prints a table
"""

import argparse
import csv
from pathlib import Path
from xml.sax.saxutils import escape

NEAR = 128  # tokens of the short retrieval text


# ---- Measuring -------------------------------------------------------------------------------------------------------


def measure(model, tokens):
    """One row per head: {"layer", "head", "first", "entropy", "near", "far", and a share for every distance bucket}."""
    import torch
    from attention_stats import retrieval_scores

    from streamkl.hf import AttentionStats

    length = tokens.shape[1]
    begins = torch.tensor([0] + [1 << n for n in range((length - 1).bit_length())])  # of the distance buckets
    bucket = torch.searchsorted(begins, torch.arange(length), right=True) - 1  # of the first token, for each query
    want = ("entropy", "distance_mass", "range_mass")
    found = []
    with AttentionStats(model, want, key_ranges=[(0, 1)], distance_buckets=len(begins)) as stats, torch.no_grad():
        model(input_ids=tokens, logits_to_keep=1)
        for layer in stats:
            to_first = layer.range_mass[0, :, :, 0]  # [heads, queries]
            distances = layer.distance_mass[0].clone().index_add_(1, bucket, -to_first).clamp(min=0)
            found.append((to_first.mean(1), layer.entropy[0].mean(1), distances / length))
    near, far = (retrieval_scores(model, model.config.vocab_size, size // 2) for size in (NEAR, length))
    rows = []
    for layer, (first, entropy, distances) in enumerate(found):
        for head in range(len(first)):
            numbers = dict(first=first[head], entropy=entropy[head], near=near[layer, head], far=far[layer, head])
            numbers.update((f"from {begin}", share) for begin, share in zip(begins.tolist(), distances[head]))
            rows.append(dict(layer=layer, head=head) | {key: f"{float(value):.4f}" for key, value in numbers.items()})
    return rows


def read_tokens(model, files, count):
    from transformers import AutoTokenizer

    text = "".join(Path(file).read_text() for file in files)
    tokens = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids[:, :count]
    if tokens.shape[1] < count:
        raise SystemExit(f"--text: has {tokens.shape[1]} tokens, --tokens asks for {count}")
    return tokens


# ---- Drawing ---------------------------------------------------------------------------------------------------------

STYLE = """
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
.paper{fill:#fff}.title{font-size:15px;font-weight:600}.soft{fill:#59636e}.cell{fill:#0a4c95}.line{stroke:#d1d9e0}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.paper{fill:#0d1117}.soft{fill:#9198a1}.cell{fill:#8fd0ff}.line{stroke:#2a313c}}
"""
WIDTH, LEFT, RIGHT, GAP = 760, 56, 24, 8


class Picture:
    """An SVG file of heat maps, one below the other."""

    def __init__(self):
        self.parts, self.height = [], 0

    def text(self, x, y, text, kind="soft", anchor="middle"):
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(str(text))}</text>'
        )

    def cell(self, x, y, width, height, share):
        self.parts.append(
            f'<rect class="cell" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill-opacity="{0.03 + 0.97 * share:.3f}"/>'
        )

    def heat_map(self, title, values, height, rows, columns, labels, ticks, apart=0):
        """`values`: a list of lists of shares; `height` of a row; `ticks` of the colors, at equal steps of their square
        root; the first `apart` columns stand apart."""
        begin, width = self.height + 58, (WIDTH - LEFT - RIGHT) / len(values[0])
        left = [LEFT + x * width + (GAP if x >= apart > 0 else 0) for x in range(len(values[0]))]
        self.text(LEFT, self.height + 26, title, "title", "start")
        self.text(LEFT - 8, begin - 6, rows, anchor="end")
        for y, line in enumerate(values):
            if len(values) < 12 or y % 5 == 0:
                self.text(LEFT - 8, begin + (y + 0.5) * height + 4, y, anchor="end")
            for x, value in zip(left, line):
                self.cell(x, begin + y * height, width - 1, height - 1, (min(value, ticks[-1]) / ticks[-1]) ** 0.5)
        end = begin + len(values) * height
        for x, label in zip(left, labels):
            self.text(x + width / 2, end + 15, label)
        self.text(LEFT + len(left) * width / 2, end + 34, columns)
        self.color_bar(begin - 22, ticks)
        self.height = end + 44

    def color_bar(self, y, ticks):
        step = 42
        begin = WIDTH - RIGHT - step * (len(ticks) - 1) - 18
        for part in range(8 * (len(ticks) - 1)):
            self.cell(begin + part * step / 8, y, step / 8, 8, part / (8 * (len(ticks) - 1) - 1))
        for number, tick in enumerate(ticks):
            self.text(begin + number * step, y - 4, f"{100 * tick:.0f} %" if tick else "0")

    def write(self, path, title):
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" role="img">'
        lines = [
            head,
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            '<rect class="paper" width="100%" height="100%"/>',
        ]
        path.write_text("\n".join([*lines, *self.parts, "</svg>\n"]))


def by_head(rows, name):
    """[heads][layers]"""
    layers, heads = (max(int(row[axis]) for row in rows) + 1 for axis in ("layer", "head"))
    values = [[0.0] * layers for _ in range(heads)]
    for row in rows:
        values[int(row["head"])][int(row["layer"])] = float(row[name])
    return values


def draw(rows, folder):
    """Pictures of the heads of a model: rows of heads.csv."""
    buckets = [name for name in rows[0] if name.startswith("from ")]
    columns = ["first", *buckets]
    means = [[sum(head[layer] for head in by_head(rows, name)) / len(by_head(rows, name)) for name in columns]
             for layer in range(len(by_head(rows, "first")[0]))]  # fmt: skip
    labels = ["first", *(short(int(name[5:])) for name in buckets)]
    picture = Picture()
    picture.heat_map("Where each layer looks: shares of its attention", means, 14, "layer",
                     "the first token | other keys, by their distance from the query: 0, 1, 2 to 3, 4 to 7, ...", labels,
                     (0, 0.04, 0.16, 0.36, 0.64), apart=1)  # fmt: skip
    picture.write(folder / "distance.svg", "Attention by layer and distance")
    picture = Picture()
    for name, title in TITLES.items():
        values = by_head(rows, name)
        labels = [layer if layer % 2 == 0 else "" for layer in range(len(values[0]))]
        picture.heat_map(title, values, 16, "head", "layer", labels, (0, 0.11, 0.44, 1))
    picture.write(folder / "heads.svg", "First token and retrieval, by layer and head")


def table(rows, groups):
    """A Markdown table of groups of layers: [(first, last)]."""
    lines = ["| layers | first token | 0 to 15 tokens back | 1,024 or more back | entropy, nats | best head, near | best head, far |",
             "|" + " --- |" + " ---: |" * 6]  # fmt: skip
    for first, last in groups:
        heads = [row for row in rows if first <= int(row["layer"]) <= last]

        def mean(names):
            return sum(float(row[name]) for row in heads for name in names) / len(heads)

        buckets = {int(name[5:]): name for name in rows[0] if name.startswith("from ")}
        close = mean([name for begin, name in buckets.items() if begin < 16])
        distant = mean([name for begin, name in buckets.items() if begin >= 1024])
        shares = [mean(["first"]), close, distant]
        best = [max(float(row[name]) for row in heads) for name in ("near", "far")]
        cells = [f"{first} to {last}", *(f"{100 * share:.0f} %" for share in shares), f"{mean(['entropy']):.1f}",
                 *(f"{100 * share:.0f} %" for share in best)]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def groups_of(text):
    return [tuple(map(int, part.split("-"))) for part in text.split(",")]


TITLES = {
    "first": "Attention to the first token",
    "near": f"Repeated tokens found, {NEAR // 2} tokens back",
    "far": "Repeated tokens found, half the context back",
}


def short(count):
    return f"{count // 1024}K" if count >= 1024 else str(count)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a causal language model; default: only draw")
    parser.add_argument("--text", nargs="+", help="files for the model to read")
    parser.add_argument("--tokens", type=int, default=8192, help="context length; default 8192")
    parser.add_argument("--layers", type=groups_of, help="print a table of groups of layers, such as 0-9,10-19")
    parser.add_argument("--out", type=Path, required=True, help="folder of heads.csv and the pictures")
    given = parser.parse_args()
    if given.model and not given.text:
        parser.error("--model: --text must be given too")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "heads.csv"
    if given.model:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(given.model).eval()
        rows = measure(model, read_tokens(given.model, given.text, given.tokens))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    draw(rows, given.out)
    if given.layers:
        print(table(rows, given.layers))


if __name__ == "__main__":
    main()
