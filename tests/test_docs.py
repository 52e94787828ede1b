"""Every code block of README and docs runs; every command of the README does, too."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtailor import backend, cli
from kvtailor.tests.test_engine import Letters
from kvtailor.zoo import shrunk

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
    monkeypatch.setattr(backend, "inner_compile", lambda gm, *_: gm.forward)
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
    lines = [line for code in blocks(ROOT / "README.md", "sh") for line in code.splitlines()]
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

    readme, debugging = (p.read_text() for p in (ROOT / "README.md", ROOT / "docs/debugging.md"))
    for name in Options.model_fields:
        assert f"`{name}`" in readme, name
    folders = (ROOT, ROOT / "passes", ROOT / "runtime", ROOT / "kernels")
    sources = "".join(p.read_text() for folder in folders for p in folder.glob("*.py"))
    for name in set(re.findall(r"KVTAILOR_[A-Z]+(?:_[A-Z]+)*", sources)):
        assert name in debugging, name
