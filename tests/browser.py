"""Chromium looks at a report: no console error, no horizontal scrolling, everything drawn, tables inside their cards."""

import html
import json
import re
import shutil
import subprocess

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Chooses every option of every selector, then measures. A map is drawn if it has more than one color.
MEASURE = """<script>onload = () => {
    const all = selector => [...document.querySelectorAll(selector)];
    for (const select of all("select"))
        for (const option of select.options) { select.value = option.value; select.onchange(); }
    const colors = canvas => {
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    };
    const isInside = table => {
        const card = table.closest(".card").getBoundingClientRect(), box = table.closest(".scroll").getBoundingClientRect();
        return box.left >= card.left && box.right <= card.right;
    };
    const isReadable = text => { // inside its chart, and not below another text of its chart
        const box = text.getBBox(), others = [...text.parentNode.querySelectorAll("text")].filter(other => other !== text);
        const meets = other => { const b = other.getBBox(); return b.x < box.x + box.width && box.x < b.x + b.width && b.y < box.y + box.height && box.y < b.y + b.height; };
        return box.x >= 0 && box.x + box.width <= text.parentNode.viewBox.baseVal.width && !others.some(meets);
    };
    const background = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
    parent.document.documentElement.dataset.found = JSON.stringify({
        width: innerWidth, content: document.documentElement.scrollWidth, sections: all("section").length,
        maps: all("figure > canvas").length, drawn: all("figure > canvas").every(canvas => colors(canvas) > 1),
        charts: all("svg.chart").length, lines: all("svg.chart path").every(path => !path.getAttribute("d").includes("NaN")),
        tables: all("table").length, inside: all("table").every(isInside), dark: background[0] < 128,
        labels: all("svg.chart text").filter(text => !isReadable(text)).map(text => text.textContent),
        axes: all("figure").every(figure => [".down", ".across"].every(side => Number(figure.querySelector(side).lastChild.textContent) > 0)),
        verdict: document.querySelector(".verdict").getBoundingClientRect().height > 0,
    });
}</script>"""


def document_of(page):
    """The data of a report."""
    return json.loads(re.search(r'<script id="document" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def check_report(path, tmp_path, width, dark, maps):
    """In a frame, because windows have a minimum width. `maps` is the number of maps that are shown at once."""
    page = path.read_text().replace("</body>", MEASURE + "</body>")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<!doctype html><iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    )
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/profile",
    ]
    if dark:
        options.append("--blink-settings=preferredColorScheme=0")
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=80
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', done.stdout)[1]))
    assert found["width"] == width and found["content"] <= width, found
    assert found["sections"] == len(document_of(page)["sections"]) and found["charts"] > 0 and found["lines"], found
    assert found["maps"] == maps and found["drawn"], found
    assert found["tables"] > 0 and found["inside"] and found["dark"] == dark, found
    assert found["labels"] == [] and found["axes"] and found["verdict"], found
