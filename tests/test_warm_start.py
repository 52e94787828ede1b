"""The cache of rewritten graphs: what hits, what misses, and what is never trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from kvtailor import files
from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.compiler import plain as serialise
from kvtailor.compiler import warm_start
from kvtailor.compiler.plain import from_plain, to_plain
from kvtailor.runtime import packing_table

EAGER = {"inner": "eager"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    torch._dynamo.reset()
    made = tmp_path / "cache"
    monkeypatch.setenv("KVTAILOR_CACHE_DIR", str(made))
    yield made
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self, factor: float = 0.1) -> None:
        super().__init__()
        self.up, self.down, self.factor = nn.Linear(8, 16), nn.Linear(16, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        q = self.up(x)[:, None]
        y = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return x + self.down(y[:, 0] * self.factor) * torch.tensor(0.5)


def model(factor: float = 0.1, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Layer(factor), Layer(factor)).eval()


def call(subject=None, x=None, options=None, **kwargs) -> str:
    """Compile and run once, compare with eager; what the cache said of the one graph."""
    torch._dynamo.reset()
    subject = model() if subject is None else subject
    x = torch.randn(2, 5, 8) if x is None else x
    before = dict(counters["kvtailor"])
    run = torch.compile(subject, backend="kvtailor", options={**EAGER, **(options or {})}, **kwargs)
    with torch.no_grad():
        torch.testing.assert_close(run(x), subject(x))
    said = [
        name
        for name in ("cache_hits", "cache_misses")
        if counters["kvtailor"][name] > before.get(name, 0)
    ]
    return said[0].removeprefix("cache_") if said else "nothing"


def test_the_same_graph_hits_whatever_its_weights_and_objects_are():
    assert call() == "misses"
    assert call() == "hits"
    assert call(model(seed=1), torch.ones(2, 5, 8)) == "hits"


@pytest.mark.parametrize(
    "other",
    [
        lambda: call(model(0.2)),
        lambda: call(x=torch.randn(3, 5, 8)),
        lambda: call(x=torch.randn(2, 8, 5).mT),
        lambda: call(model().double(), torch.randn(2, 5, 8).double()),
        lambda: call(nn.Sequential(*model(), Layer())),
        lambda: call(options={"passes": {"narrow_rows": False}}),
        lambda: call(options={"regions": "none"}),
    ],
    ids=["constant", "shape", "stride", "dtype", "graph", "pass", "option"],
)
def test_anything_else_misses(other):
    call()
    assert other() == "misses"


def test_switches_versions_and_pass_order_miss(monkeypatch):
    call()
    with monkeypatch.context() as m:
        m.setenv("KVTAILOR_STRANGE_SWITCH", "1")
        assert call() == "misses"
    with monkeypatch.context() as m:
        m.setattr(warm_start, "versions", lambda: "another one")
        assert call() == "misses"
    with monkeypatch.context() as m:
        m.setattr(warm_start, "PASSES", warm_start.PASSES[::-1])
        assert call() == "misses"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        key_of = call()
    assert key_of == "misses"
    assert call() == "hits"


def test_versions_know_our_own_sources(monkeypatch):
    known = warm_start.versions()
    warm_start.versions.cache_clear()
    with monkeypatch.context() as m:
        m.setattr(warm_start.Path, "read_bytes", lambda self: b"other")
        assert warm_start.versions() != known
    warm_start.versions.cache_clear()
    assert warm_start.versions() == known


@pytest.mark.parametrize("keep", [0, 30, 80, -1])
def test_a_truncated_file_is_made_anew(folder, keep, caplog):
    call()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    assert call() == "misses"
    assert "damaged" in caplog.text
    assert file.read_bytes() == whole
    assert call() == "hits"


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain["nodes"].pop(),
        lambda plain: plain["nodes"][-1].update(target="os.system.default"),
        lambda plain: plain["nodes"][-1].update(target="aten.nothing.default"),
        lambda plain: plain["nodes"][-1].update(op="call_module"),
        lambda plain: plain.pop("output"),
        lambda plain: plain["nodes"].insert(0, {"op": "placeholder"}),
        lambda plain: plain["nodes"].append(plain["nodes"][0]),
        lambda plain: plain["nodes"][-1].update(args=[{"node": 10**6}]),
    ],
)
def test_a_file_of_the_right_hash_and_the_wrong_content_is_no_more_than_a_miss(folder, change):
    call()
    (file,) = folder.iterdir()
    plain = json.loads(file.read_text().partition("\n")[2])
    change(plain)
    text = json.dumps(plain)
    file.write_text(f"{warm_start._hash(text)}\n{text}")
    assert call() == "misses"


def test_a_killed_writer_leaves_nothing_behind(folder, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            call()
    assert list(folder.iterdir()) == []
    assert call() == "misses" and call() == "hits"


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
def test_a_folder_others_can_write_to_is_not_used(folder, caplog):
    folder.mkdir()
    folder.chmod(0o777)
    assert call() == "nothing" and "can be written to by others" in caplog.text
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    assert call() == "misses"


def test_off_and_inductors_own_switch(monkeypatch):
    with monkeypatch.context() as m:
        m.setenv("KVTAILOR_CACHE_DIR", "off")
        assert call() == "nothing"
    with torch._inductor.config.patch(force_disable_caches=True):
        assert call() == "nothing"


def test_what_has_no_key_is_not_kept(folder):
    lib = torch.library.Library("kvtailor_test_warm", "DEF")
    lib.define("own(Tensor x) -> Tensor")
    lib.impl("own", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("kvtailor_test_warm::own", torch.empty_like, lib=lib)
    own = torch.ops.kvtailor_test_warm.own.default
    assert call(lambda x: own(x) + 1) == "nothing"
    assert call(dynamic=True) == "nothing"
    assert call(lambda x: x + torch.arange(2000.0).sum()) == "misses"


def test_who_looks_has_the_passes_run():
    call()
    torch._dynamo.reset()
    run = torch.compile(model(), backend="kvtailor", options=EAGER)
    with recording() as recorder, torch.no_grad():
        run(torch.randn(2, 5, 8))
    assert len(recorder.graphs[0].attention) == 2 and recorder.graphs[0].passes


@pytest.mark.parametrize("name", ["gemma3n_text", "bart", "vit"])
def test_models_come_back_as_they_were(name, monkeypatch):
    kept = []

    def reading(plain, *rest):
        kept.append((plain, to_plain(from_plain(plain, *rest))))
        return from_plain(plain, *rest)

    monkeypatch.setattr(warm_start, "from_plain", reading)
    cache = {} if name == "vit" else {"use_cache": False}
    results = []
    for _ in range(2):
        # As a second process would: a model whose weights have been packed has another key.
        subject, inputs = shrunk(name)
        torch._dynamo.reset()
        run = torch.compile(subject, backend="kvtailor", options=EAGER)
        with torch.no_grad():
            results.append(run(**inputs, **cache)[0])
    assert torch.equal(*results)
    ((plain, again),) = kept
    assert json.loads(json.dumps(again)) == plain


def test_plain_data_keeps_every_bit():
    values = [0.1, -0.0, float("inf"), 1e-300, 3, True, None, "s", slice(None, 2, None), ...]
    values += [torch.float16, torch.device("cpu"), torch.strided, torch.channels_last, (1, [2.5])]
    text = json.dumps([serialise.encode(v, {}) for v in values])
    back = [serialise.decode(v, []) for v in json.loads(text)]
    assert [(type(a), repr(a)) for a in back] == [(type(a), repr(a)) for a in values]
    with pytest.raises(serialise.NotPlain):
        serialise.encode(object(), {})
    for wrong in ({"dtype": "float32x"}, {"dtype": "nn"}, {"import": "os"}):
        with pytest.raises((ValueError, AttributeError)):
            serialise.decode(wrong, [])


CONSTANTS = [
    torch.empty(0),
    torch.empty(2, 0, 3, dtype=torch.bool),
    torch.tensor(True),
    torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0]),
    torch.tensor([[1 + 2j, 3 - 4j]]).conj(),
    torch.arange(6.0).reshape(2, 3).mT,
    torch.arange(10)[3::2],
    torch.ones(1).expand(4, 5),
    torch.randn(3).bfloat16(),
    torch.randn(5).to(torch.float8_e4m3fn),
    torch.tensor(-(2**63)),
    torch.tensor([], dtype=torch.complex128),
]


@pytest.mark.parametrize("value", CONSTANTS, ids=lambda v: f"{v.dtype} {list(v.shape)}")
def test_constants_keep_every_bit_and_their_strides(value):
    back = serialise._tensor(json.loads(json.dumps(serialise._constant(value))))
    assert (back.dtype, back.shape, back.stride()) == (value.dtype, value.shape, value.stride())
    same, plain = back.contiguous(), value.resolve_conj().contiguous()
    assert torch.equal(same.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))


def test_a_constant_that_has_no_such_form_is_not_kept():
    for value in (torch.zeros(5000), torch.zeros(1, requires_grad=True), torch.eye(2).to_sparse()):
        with pytest.raises(serialise.NotPlain):
            serialise._constant(value)


def test_options_that_come_to_the_same_hit(monkeypatch):
    assert call() == "misses"
    assert call(options={"passes": {"narrow_rows": True}}) == "hits"
    assert call(options={"passes": {"fuse_gate_up": True, "narrow_rows": True}}) == "hits"
    assert call(options={"cuda_graphs": False, "pack": "view"}) == "hits"
    assert call(options={"passes": {"narrow_rows": False}}) == "misses"
    monkeypatch.setenv("KVTAILOR_DISABLE_PASSES", "narrow_rows")
    assert call() == "hits"


def test_no_home_is_no_cache_and_one_line(monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVTAILOR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(files.Path, "home", homeless)
    packing_table.current_table.cache_clear()
    files.no_cache.cache_clear()
    assert call() == call() == "nothing"
    assert caplog.text.count("no cache: Could not determine home directory.") == 1
    packing_table.current_table.cache_clear()


def test_a_file_in_the_folders_place_is_no_cache(folder, caplog):
    folder.write_text("mine")
    assert call() == "nothing" and "no cache: " in caplog.text
    assert folder.read_text() == "mine"


def test_a_full_disk_is_no_cache(folder, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(warm_start.Path, "write_text", full)
        assert call() == "misses" and "No space left" in caplog.text
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["llama"])
def test_a_model_with_its_default_cache_hits(name):
    before = dict(counters["kvtailor"])
    for _ in range(2):
        subject, inputs = shrunk(name)
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(subject, backend="kvtailor", options=EAGER)(**inputs)
    assert counters["kvtailor"]["cache_hits"] == before.get("cache_hits", 0) + 1


@pytest.mark.slow
def test_a_second_process_hits_with_default_caches():
    script = (
        "import torch\n"
        "from torch._dynamo.utils import counters\n"
        "from kvtailor.cli.models import shrunk\n"
        "for name in ('llama', 'gemma3_text', 'bart'):\n"
        "    model, inputs = shrunk(name)\n"
        "    with torch.no_grad():\n"
        "        torch.compile(model, backend='kvtailor', options={'inner': 'eager'})(**inputs)\n"
        "print(counters['kvtailor']['cache_hits'], counters['kvtailor']['cache_misses'])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert said == [["0", "3"], ["3", "0"]]


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_second_process_hits(folder, inner, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    script = (
        "import torch\n"
        "from torch._dynamo.utils import counters\n"
        "from kvtailor.cli.models import shrunk\n"
        "model, inputs = shrunk('llama')\n"
        f"run = torch.compile(model, backend='kvtailor', options={{'inner': '{inner}'}})\n"
        "with torch.no_grad():\n"
        "    run(**inputs, use_cache=False)\n"
        "found = {**counters['kvtailor'], **counters['aot_autograd']}\n"
        "print({k: v for k, v in found.items() if k.endswith(('_hits', '_misses', '_hit'))})\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    # Inductor's own cache knows the pieces again: prologue, layer, last layer's kind, epilogue.
    theirs = ", 'autograd_cache_hit': 3" if inner == "inductor" else ""
    assert said == ["{'cache_misses': 1}", f"{{'cache_hits': 1{theirs}}}"]
