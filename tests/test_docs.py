"""Every code block of README and docs runs; every command that README and docs show does, too."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtailor.cli import main as cli
from kvtailor.cli.models import shrunk
from kvtailor.compiler import inner
from kvtailor.passes.pipeline import PASSES
from kvtailor.tests.test_engine import Letters

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text()) if kind == language]


def given() -> dict[str, Any]:
    """What a block may take as there already: a model, its inputs, some states and prompts."""
    model, inputs = shrunk("llama", tokens=6, num_hidden_layers=1)
    return {
        "torch": torch,
        "kvtailor": __import__("kvtailor"),
        "model": model,
        "inputs": inputs,
        "tokenizer": Letters(),
        "prompts": ["hello", "help"],
        "decoder_states": torch.randn(2, 3, 512),
        "encoder_states": torch.randn(2, 7, 512),
    }


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Inductor is not what is tested here."""
    monkeypatch.setattr(inner, "inner_compile", lambda gm, *_: gm.forward)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_code_blocks_run(page, quick):
    """The blocks of a page run one after the other, in one namespace."""
    names = given()
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)


def commands() -> list[str]:
    lines = [line for page in PAGES for code in blocks(page, "sh") for line in code.splitlines()]
    return [line for line in lines if line.startswith("kvtailor ")]


# What needs a network or weights; what they do is tested elsewhere.
ELSEWHERE = re.compile(r"google/|\bdemo\b|\bgenerate\b|\bbench\b")


@pytest.mark.parametrize(
    "command", [c for c in commands() if not ELSEWHERE.search(c)], ids=lambda c: c.split("#")[0]
)
def test_commands_run(command, quick, monkeypatch, tmp_path, capsys):
    argv = shlex.split(command, comments=True)
    argv = [str(tmp_path / a) if a == "report.html" else a for a in argv]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip()


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def test_options_and_variables_are_documented():
    from kvtailor.config import Options

    page, debugging = (
        (ROOT / "docs" / name).read_text() for name in ("options.md", "debugging.md")
    )
    for name in Options.model_fields:
        assert f"`{name}`" in page, name
    folders = (ROOT / name for name in ("cli", "compiler", "kernels", "passes", "runtime"))
    files = [*ROOT.glob("*.py"), *(p for folder in folders for p in folder.rglob("*.py"))]
    sources = "".join(p.read_text() for p in files)
    for name in set(re.findall(r"KVTAILOR_[A-Z]+(?:_[A-Z]+)*", sources)):
        assert name in debugging, name


def maker(name: str) -> Any:
    """The script docs/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", ["make_api", "make_models"])
def test_made_pages_are_current(name):
    """``python docs/NAME.py`` writes it anew."""
    made = maker(name)
    assert made.PAGE.read_text() == made.page()


TRACED = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
compiled = torch.compile(
    lambda x: sdpa(x, x, x, is_causal=True), backend="kvtailor", options={"inner": "eager"}
)
with torch.no_grad():
    compiled(torch.randn(1, 2, 6, 8))
"""


def test_tlparse_gets_the_graph_after_every_pass(tmp_path):
    """TORCH_TRACE is what tlparse reads: lines of JSON, each artifact's text below its line."""
    environment = os.environ | {"TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", TRACED], check=True, env=environment)
    (log,) = tmp_path.iterdir()
    texts: dict[str, list[str]] = {}
    name = None
    for line in log.read_text().splitlines():
        if line.startswith("V"):
            found = re.search(r'"artifact": {"name": "(kvtailor_[^"]*)"', line)
            name = None if found is None else found[1]
        elif name is not None:
            texts.setdefault(name, []).append(line)
    first, last = min(texts), max(texts)
    assert first == "kvtailor_00_capture"
    assert len(texts) == 1 + len(PASSES)
    assert "scaled_dot_product_attention" in "".join(texts[first])
    assert "kvtailor::attend" in "".join("".join(text) for text in texts.values())
    assert last.startswith(f"kvtailor_{len(PASSES):02d}_")


def test_every_case_of_the_map_has_a_test():
    text = (ROOT / "tests" / "README.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::([\w*]+))?`", text)
    assert len(named) > 80
    for file, pattern in named:
        functions = re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), re.M)
        assert fnmatch.filter(functions, pattern or "*"), (file, pattern)
