"""Installed or not: the entry point, a machine without Triton or GPU, and what a wheel holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def python(code: str, cwd: Path, *, executable: str = sys.executable, **environ: str) -> str:
    """Standard output of a fresh process, started where nothing of ours lies."""
    done = subprocess.run(
        [executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ENTRY_POINT = """
import sys, torch
assert not any(name.startswith("kvtailor") for name in sys.modules)
assert "kvtailor" in torch._dynamo.list_backends()
function = torch.compile(lambda x: x.sin() + 1, backend="kvtailor", options={"inner": "eager"})
with torch.no_grad():
    assert torch.equal(function(torch.ones(3)), torch.ones(3).sin() + 1)
from torch._dynamo.utils import counters
assert counters["kvtailor"]["graphs"] == 1
# Looking it up again, and importing it by hand, change nothing.
from torch._dynamo.backends.registry import lookup_backend
import kvtailor.backend
assert lookup_backend("kvtailor") is kvtailor.backend.kvtailor
assert torch._dynamo.list_backends().count("kvtailor") == 1
print(kvtailor.backend.__file__)
"""


def test_l01_the_entry_point_is_enough(tmp_path):
    assert python(ENTRY_POINT, tmp_path).strip().endswith("backend.py")


# Files that hold Triton kernels; what chooses between them and plain torch imports them late.
KERNEL_FILES = {
    p.stem for p in (ROOT / "kernels").glob("*.py") if "\nimport triton" in p.read_text()
}

WITHOUT_TRITON = """
import importlib, pathlib, sys
sys.modules["triton"] = None  # importing it raises ImportError
import kvtailor
root = pathlib.Path(kvtailor.__file__).parent
folders = [root / name for name in ("cli", "compiler", "kernels", "passes", "runtime")]
for path in [*root.glob("*.py"), *(p for folder in folders for p in folder.rglob("*.py"))]:
    parts = path.relative_to(root).with_suffix("").parts
    if path.stem != "__init__" and not (parts[0] == "kernels" and path.stem in KERNEL_FILES):
        importlib.import_module(".".join(("kvtailor", *parts)))
import torch
from torch.nn.functional import scaled_dot_product_attention
def attend(x):
    return scaled_dot_product_attention(x, x, x, is_causal=True)
x = torch.randn(1, 2, 6, 8)
compiled = torch.compile(attend, backend="kvtailor", options={"inner": "eager"})
assert torch.allclose(compiled(x), attend(x), atol=1e-6)
print("done")
"""


def test_l03_every_module_imports_and_runs_without_triton_and_gpu(tmp_path):
    assert KERNEL_FILES
    code = f"KERNEL_FILES = {KERNEL_FILES}\n" + WITHOUT_TRITON
    assert python(code, tmp_path, CUDA_VISIBLE_DEVICES="").splitlines()[-1] == "done"


def test_l03_importing_the_package_loads_nothing_heavy(tmp_path):
    code = "import sys, kvtailor; print({'torch', 'triton', 'transformers'} & set(sys.modules))"
    assert python(code, tmp_path).strip() == "set()"


def test_public_names_are_lazy_and_right():
    import kvtailor
    from kvtailor import backend

    assert kvtailor.kvtailor is backend.kvtailor and kvtailor.recording is backend.recording
    with pytest.raises(AttributeError, match="no attribute 'kvtailer'"):
        kvtailor.kvtailer  # noqa: B018


def test_no_file_names_a_registry_host():
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "://" not in text and "index-url" not in text


@pytest.mark.slow
def test_l01_a_wheel_in_a_clean_environment(tmp_path):
    source, dist, clean = tmp_path / "source", tmp_path / "dist", tmp_path / "clean"
    skip = shutil.ignore_patterns(
        ".venv", ".git", "build", "*.egg-info", "__pycache__", ".*_cache", ".typings"
    )
    shutil.copytree(ROOT, source, ignore=skip)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", dist, source], check=True)
    (wheel,) = dist.iterdir()

    venv.create(clean, with_pip=False)
    executable = str(clean / "bin" / "python")
    subprocess.run([*pip, "--python", executable, "install", "-q", "--no-deps", wheel], check=True)
    # Our requirements, but not our editable install, whose own .pth file is not read from here.
    (site,) = clean.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")

    backend = Path(python(ENTRY_POINT, tmp_path, executable=executable).strip())
    assert site in backend.parents
    package = backend.parent
    assert (package / "py.typed").exists()
    texts = {p.name for p in (package / "examples" / "data").iterdir()}
    assert texts == {"prompt.txt", "prompt_continued.txt"}
    assert not (package / "tests").exists()
    for folder in ("benchmarks", "cli", "compiler", "kernels", "passes", "runtime"):
        ours, theirs = (
            {p.relative_to(base) for p in (base / folder).rglob("*.*") if "cache" not in p.suffix}
            for base in (ROOT, package)
        )
        skip = re.compile(r"results|\.pyc$|\.svg$")
        assert {p for p in ours if not skip.search(str(p))} <= theirs
    script = clean / "bin" / "kvtailor"
    done = subprocess.run([script, "doctor", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["versions"]["torch"] == torch.__version__
