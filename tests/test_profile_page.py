"""The page of --profile-html in a real browser: it draws, is readable, and asks nobody for anything.

Needs Chromium or Chrome (MILLSTREAM_BROWSER=path, or one on PATH); skipped without.
"""

import json
import os
import shutil
import struct
import subprocess
import zlib

import pytest
from click.testing import CliRunner

from engine.cli import cli

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("MILLSTREAM_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome (MILLSTREAM_BROWSER names one)")
WIDTH, HEIGHT = 1100, 1900

# Put behind the page: what a person would see, as numbers, in the title. Runs when everything has been loaded.
PROBE = """<script>addEventListener("load", () => {
  const box = (e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const svgs = [...document.querySelectorAll("svg")].map((svg) => ({
    label: svg.getAttribute("aria-label"), box: box(svg),
    rects: [...svg.querySelectorAll("rect")].map(box), lines: [...svg.querySelectorAll("polyline")].map(box),
    texts: [...svg.querySelectorAll("text")].map((t) => ({text: t.textContent, box: box(t),
      size: parseFloat(getComputedStyle(t).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width})),
  }));
  document.title = JSON.stringify({svgs, width: document.documentElement.scrollWidth,
    resources: performance.getEntriesByType("resource").map((r) => r.name)});
});</script>"""


def browse(folder, html, *more):
    """(DOM after loading, what the browser logged)"""
    file = folder / "page.html"
    file.write_text(html)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
               "--no-first-run", f"--user-data-dir={folder / 'user'}", "--host-resolver-rules=MAP * ~NOTFOUND",
               f"--window-size={WIDTH},{HEIGHT}", *more, file.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    return done.stdout.decode(), done.stderr.decode()


def seen(folder, html):
    """(the probe's figures, console messages)"""
    dom, log = browse(folder, html.replace("</body>", PROBE + "</body>"), "--dump-dom")
    title = dom.split("<title>", 1)[1].split("</title>", 1)[0]
    for code, character in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        title = title.replace(code, character)
    return json.loads(title), [line for line in log.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The page of a run that streams and speculates: every part of it is there."""
    file = tmp_path_factory.mktemp("profile") / "profile.html"
    args = ["generate", "He said, He said, He said,", "-n", "60", "--temperature", "0", "--ignore-eos", "--spec", "4",
            "--expert-slots", "12", "--history", "off", "--profile-html", str(file)]  # fmt: skip
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 0, done.stderr
    return file.read_text()


@pytest.fixture(scope="module")
def figures(html, tmp_path_factory):
    return seen(tmp_path_factory.mktemp("browser"), html)


def svg(found, word):
    return next(part for part in found["svgs"] if word in part["label"])


def area(box):
    return (box[2] - box[0]) * (box[3] - box[1])


def test_nothing_is_loaded_and_nothing_is_wrong(figures):
    found, console = figures
    assert found["resources"] == []
    assert console == []


def test_a_page_that_asks_for_more_is_noticed(html, tmp_path):
    """The checks above can fail."""
    asks = html.replace("</body>", '<img src="http://192.0.2.1:9/x.png"><script>missing()</script></body>')
    found, console = seen(tmp_path, asks)
    assert found["resources"] == ["http://192.0.2.1:9/x.png"]
    assert any("missing is not defined" in line for line in console)


def test_every_picture_has_a_size(figures):
    found, _ = figures
    assert found["width"] <= WIDTH
    bar = svg(found, "average token")
    assert sum(map(area, bar["rects"])) == pytest.approx(area(bar["box"]), rel=0.02)  # the parts fill the whole
    stacked = svg(found, "stacked")
    assert len(stacked["rects"]) > 60
    assert sum(map(area, stacked["rects"][1:])) > 0.03 * area(stacked["box"])
    heat = svg(found, "uses of experts")
    assert len(heat["rects"]) == 3 * 8
    assert all(area(cell) > 100 for cell in heat["rects"])
    assert all(area(bar) > 100 for bar in svg(found, "drafts accepted")["rects"])
    for word in ("% of experts", "MB read"):
        line = svg(found, word)["lines"][0]
        assert line[2] - line[0] > 500


def test_labels_are_whole_apart_and_large_enough(figures):
    for part in figures[0]["svgs"]:
        texts, (left, top, right, bottom) = part["texts"], part["box"]
        for i, text in enumerate(texts):
            a = text["box"]
            inside = a[0] >= left - 1 and a[1] >= top - 2 and a[2] <= right + 1 and a[3] <= bottom + 2
            assert inside, (part["label"], text)
            assert text["size"] >= 10, (part["label"], text)
            for other in texts[i + 1 :]:
                b = other["box"]
                apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 2 or b[3] <= a[1] + 2
                assert apart, (part["label"], text, other)


def test_screenshot_shows_colours(html, tmp_path):
    picture = tmp_path / "page.png"
    browse(tmp_path, html, f"--screenshot={picture}")
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (WIDTH, HEIGHT)
    packed, at = b"", 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    assert len(set(zlib.decompress(packed))) > 100  # an empty page is of one colour


def test_labels_of_many_layers_and_experts(tmp_path):
    import engine
    from engine.profile import Profiler, profile_report
    from engine.profile.page import page

    loaded = engine.load(threads=2)
    generation = loaded.generate("He said,", max_tokens=4, temperature=0)
    with Profiler(loaded) as profiler:
        profiler.attach(generation)
        list(generation)
    report = profile_report(profiler, generation, 1.0, 0.1, 10.0)
    profiler.experts = {layer: [layer * expert % 7 for expert in range(256)] for layer in range(61)}
    found = seen(tmp_path, page(report, profiler))
    test_labels_are_whole_apart_and_large_enough(found)
    assert len(svg(found[0], "uses of experts")["rects"]) == 61 * 256
