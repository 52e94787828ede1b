"""The page of ``kvtailor inspect --html``: right against the JSON, and usable in a browser."""

from __future__ import annotations

import html as entities
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtailor.cli.html_report import TILES, html, linked_graphs, pictures, write_html
from kvtailor.cli.inspection import Inspection, Request, run_inspection
from kvtailor.kernels import reference
from kvtailor.passes.report import AttentionSite

MODELS = ("gemma3n_text", "llama4_text", "whisper")


@pytest.fixture(scope="module", params=MODELS)
def inspection(request) -> Inspection:
    return run_inspection(Request(f"hf:{request.param}", tokens=24, batch=1))


@pytest.fixture(scope="module")
def page(inspection, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(inspection, path)
    return path


def text_of(page: Path) -> str:
    body = re.sub(r"<(style|script)>.*?</\1>", "", page.read_text(), flags=re.S)
    return " ".join(entities.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_page_says_what_the_json_says(inspection, page):
    found: dict[str, Any] = inspection.as_dict()
    text = text_of(page)
    for graph, report in zip(found["graphs"], inspection.recorder.graphs):
        assert f"{graph['max_error']:.1e}" in text
        for site in graph["attention"]:
            assert site["site"].rpartition(".")[0] in text
            if site["proof"]:
                assert site["proof"] in text
            if site["reason"]:
                assert site["reason"] in text
            if site["query_rows"] != "all":
                assert f"{site['queries']} → {site['query_rows']} rows" in text
        for each in graph["passes"]:
            assert re.search(rf"{each['name']} {each['rewrites']} {each['ms']:.1f}\b", text)
        assert sum(layer["before"] for layer in graph["layers"]) == graph["flops"]["before"]
        assert sum(layer["after"] for layer in graph["layers"]) == graph["flops"]["after"]
        for graph_text in (report.graph_before, report.graph_after):
            assert all(" ".join(line.split()) in text for line in graph_text.splitlines())


def test_the_page_stands_alone(page):
    source = page.read_text()
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:,)", source)
    assert "http" not in re.sub(r"aten::|kvtailor::", "", source)
    assert "@import" not in source and "url(" not in source


def test_nothing_is_half_written(inspection, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("before")

    def fail(self: Path, data: bytes) -> None:
        with self.open("wb") as out:
            out.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError):
        write_html(inspection, path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "before"


@pytest.mark.parametrize(
    "flags",
    [
        {"causal": True, "offset": 0},
        {"causal": True, "window": 5, "offset": 3},
        {"causal": True, "chunk": 8, "offset": 0},
        {},
    ],
)
def test_a_mask_is_drawn_as_it_is(flags: dict[str, Any]):
    """Every tile against brute force over all its pairs."""
    queries, keys = 40, 48
    site = AttentionSite("a", "a", queries=queries, keys=keys, **flags)
    (picture,) = pictures([site])
    seen = reference.visible(
        queries,
        keys,
        torch.device("cpu"),
        causal=site.causal,
        q_offset=site.offset or 0,
        window=site.window,
        chunk=site.chunk,
    )[0, 0]
    for i, row in enumerate(picture.tiles):
        for j, tile in enumerate(row):
            part = seen[
                i * queries // TILES : (i + 1) * queries // TILES,
                j * keys // TILES : (j + 1) * keys // TILES,
            ]
            assert tile == ("on" if part.all() else "part" if part.any() else "off"), (i, j)


def test_rows_nobody_asks_for_are_not_drawn_as_computed():
    site = AttentionSite("a", "a", causal=True, queries=64, keys=64, offset=0, query_rows=1)
    (picture,) = pictures([site, AttentionSite("b", "b")])
    assert {t for row in picture.tiles[:-1] for t in row} == {"unasked"}
    assert set(picture.tiles[-1]) == {"on", "part"}
    assert picture.sites == ["a"] and "1 of 64 rows are asked for" in picture.notes


def test_equal_calls_are_linked_whatever_their_numbers():
    before, after = linked_graphs(
        "g", "%0 = input\n%1 = relu(%0)\n%2 = neg(%1)", "%0 = input\n%1 = neg(%0)"
    )
    assert [(line.other, line.mark) for line in before] == [
        ("ga0", ""),
        (None, "gone"),
        ("ga1", ""),
    ]
    assert [line.other for line in after] == ["gb0", "gb2"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on the path")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        instance = driver.chromium.launch(executable_path=chromium, args=arguments)
        yield instance
        instance.close()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(browser, page, width, scheme):
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    tab.on("console", lambda message: errors.append(message.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("request", lambda r: None if r.url.startswith("file:") else errors.append(r.url))
    tab.goto(page.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    graphs = tab.locator("details.graphs").first
    assert not graphs.locator("input").is_visible()
    # By keyboard alone: open, search, go on to the next hit.
    graphs.locator("summary").first.focus()
    tab.keyboard.press("Enter")
    search = graphs.locator("input")
    assert search.is_visible()
    tab.keyboard.press("Tab")
    tab.keyboard.type("linear")
    hits = graphs.locator(".ln.hit").count()
    assert hits > 1
    assert graphs.locator("[role=status]").inner_text() == f"1 of {hits}"
    tab.keyboard.press("Enter")
    assert graphs.locator("[role=status]").inner_text() == f"2 of {hits}"
    search.fill("no such call")
    assert graphs.locator("[role=status]").inner_text() == "0 found"
    link = graphs.locator(".ln a").first
    link.click()
    assert tab.url.endswith(link.get_attribute("href"))
    tab.keyboard.press("Escape")
    graphs.locator("summary").first.click()
    assert not search.is_visible()
    assert not errors
    tab.close()


def test_sixty_layers(browser, inspection, tmp_path):
    """A deep model's page opens, and answers a search, without touching every line's layout."""
    report = inspection.recorder.graphs[0]
    deep = Inspection(inspection.about, type(inspection.recorder)(), [], None)
    many = [
        AttentionSite(
            f"model.layers.{i}.self_attn", "n", causal=True, queries=64, keys=64, offset=0
        )
        for i in range(60)
    ]
    deep.recorder.graphs = [
        type(report)(
            attention=many,
            graph_before="\n".join(15 * report.graph_before.splitlines()),
            graph_after="\n".join(15 * report.graph_after.splitlines()),
        )
    ]
    path = tmp_path / "deep.html"
    write_html(deep, path)
    tab = browser.new_page()
    tab.goto(path.as_uri())
    assert tab.locator(".layer").count() == 60
    tab.locator("details.graphs summary").click()
    tab.locator("input").fill("aten::linear")
    assert "of" in tab.locator("[role=status]").inner_text()
    # Lines off the screen are not laid out.
    assert (
        tab.evaluate("getComputedStyle(document.querySelector('.ln')).contentVisibility") == "auto"
    )
    tab.close()


def test_a_graph_that_was_left_untouched(tmp_path):
    script = tmp_path / "model.py"
    script.write_text(
        "import torch\n"
        "def build():\n"
        "    q = torch.randn(1, 2, 4, 8, requires_grad=True)\n"
        "    def f(q):\n"
        "        with torch.enable_grad():\n"
        "            return torch.nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "    return f, (q,), {}\n"
    )
    found = run_inspection(Request(f"{script}:build"))
    assert "left untouched: grad-region" in " ".join(html(found).split())
