"""Whatever lies in the cache's folder: no code of its runs, nothing else is read or written."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtailor import files
from kvtailor.backend import rewrite
from kvtailor.compiler import warm_start
from kvtailor.compiler.plain import to_plain
from kvtailor.config import Options
from kvtailor.passes.report import GraphReport
from kvtailor.tests.test_warm_start import call, model

MARK = "canary_of_the_cache"
# What is compiled and what is touched while a file is read; _watching: the folder it lies in.
_compiled: list[str] = []
_touched: list[str] = []
_watching: list[Path] = []
# Events of what changes files, starts processes, loads or calls somebody.
_TOUCHING = ("os.", "subprocess.", "shutil.", "socket.", "ctypes.dlopen", "pty.", "tempfile.")
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.listxattr", "os.getxattr")


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event in ("compile", "import") and MARK in str(args[0]):
        _compiled.append(str(args[0]))
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    elsewhere = event == "open" and os.path.dirname(str(args[0])) != str(_watching[-1])
    if (writes and elsewhere) or (event.startswith(_TOUCHING) and event not in _HARMLESS):
        _touched.append(f"{event} {args}")


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("KVTAILOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "cache"
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def figures():
    """Of all the files that were read: nothing of them ran, and nothing else was touched."""
    told = Counter[str]()
    _figures.append(told)
    yield
    print(
        f"{told['files']} hostile or damaged files: {told['misses']} misses, {told['harmless']} "
        f"graphs that only compute, {len(_compiled)} code runs, {len(_touched)} files touched "
        f"elsewhere, {told['crashes']} crashes"
    )
    _figures.clear()


_figures: list[Counter[str]] = []


def listing(folder: Path) -> dict[str, Any]:
    """Every file under the folder but those in the cache: its kind, size, time and text."""
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "cache"
    }


class Holds(nn.Module):
    """The model of the other tests, a tensor lifted from its code, and ops with many arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x):
        steps = torch.arange(5, dtype=x.dtype, device=x.device)[:, None]
        return self.inner(x) + steps * torch.tensor([0.25, -1.0] * 4), x.std(-1, correction=0)


class Attempts:
    """Reads files as the backend would, while Dynamo compiles; what became of each."""

    def __init__(self, gm, inputs):
        self.gm, self.inputs, self.options = gm, inputs, Options(inner="eager")
        path, found = warm_start.load(gm, inputs, self.options)
        assert path is not None and found is None
        self.path = path
        rewritten = rewrite(gm, inputs, self.options, GraphReport("hostile"))
        warm_start.save(path, rewritten)
        self.whole = path.read_bytes()
        self.plain = json.loads(self.whole.partition(b"\n")[2])
        assert self.read() is not None
        self.count = 0

    def read(self):
        return warm_start._read(self.path, self.gm, self.inputs, self.options)

    def content(self, data: bytes) -> Any:
        self.count += 1
        self.path.write_bytes(data)
        told = _figures[-1]
        told["files"] += 1
        _watching.append(self.path.parent)
        try:
            found = self.read()
        except BaseException:
            told["crashes"] += 1
            raise
        finally:
            _watching.clear()
        told["misses" if found is None else "harmless"] += 1
        return found

    def sealed(self, plain: Any) -> Any:
        text = plain if isinstance(plain, str) else json.dumps(plain)
        return self.content(f"{warm_start._hash(text)}\n{text}".encode())

    def has_no_effect(self, found: Any) -> bool:
        return _calls(json.loads(json.dumps(to_plain(found)))) == _calls(self.plain)


def _calls(plain: Any) -> Any:
    """What is computed: without the names of modules and the numbers of rows, which are told."""
    nodes = [{k: v for k, v in n.items() if k not in ("module", "rows")} for n in plain["nodes"]]
    return {**plain, "nodes": nodes}


def attempt(trial) -> Attempts:
    """Run ``trial`` with an Attempts inside a backend, and compare the model with eager."""
    made = []
    kept = Path.cwd() / "kept" / f"{MARK}_kept"
    kept.parent.mkdir()
    kept.write_text("as it was")
    before = listing(Path.cwd())

    def backend(gm, inputs):
        made.append(Attempts(gm, inputs))
        trial(made[0])
        return gm.forward

    subject, x = Holds().eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(subject, backend=backend)(x), subject(x))
    assert not _compiled and not _touched
    assert listing(Path.cwd()) == before and list(before) == [str(kept)]
    return made[0]


def spots(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in JSON: paths of keys and indices."""
    if path:
        yield path
    pairs = plain.items() if isinstance(plain, dict) else enumerate(plain)
    for key, value in pairs:
        if isinstance(value, (dict, list)):
            yield from spots(value, (*path, key))
        else:
            yield (*path, key)


def at(plain: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        plain = plain[key]
    return plain


TOUCH = f"open('{MARK}', 'w')"
TEXTS = [
    f"device=exec({TOUCH!r}) or 'cpu', pin_memory",
    f"__import__('os').system('touch {MARK}')",
    f"x)\n{TOUCH}\n(",
    f"');{TOUCH};('",
    f"{MARK}.{TOUCH}",
    "forward",
    "__class__",
    "",
    "e" * 100_000,
    "é\u2028\ud800",
]


def test_text_in_any_place_is_a_miss_or_has_no_effect():
    def trial(files: Attempts) -> None:
        rng, places = random.Random(0), list(spots(files.plain))
        for i in range(260):
            path, text = rng.choice(places), TEXTS[i % len(TEXTS)]
            plain = copy.deepcopy(files.plain)
            holder = at(plain, path[:-1])
            if isinstance(holder, dict) and i % 3 == 0:
                holder[text] = holder.pop(path[-1])
            else:
                holder[path[-1]] = text
            found = files.sealed(plain)
            assert found is None or files.has_no_effect(found), (path, text)

    assert attempt(trial).count == 260


@pytest.mark.parametrize(
    "name", [f"device=exec({TOUCH!r}) or 'cpu', pin_memory", "dtype=None, layout", "end", "x y"]
)
def test_names_of_arguments_are_the_schemas(name):
    def trial(files: Attempts) -> None:
        for node in [n for n in files.plain["nodes"] if n["op"] == "call_function"]:
            node["kwargs"][name] = False
            assert files.sealed(files.plain) is None
            del node["kwargs"][name]
        assert files.sealed(files.plain) is not None

    attempt(trial)


# Target, arguments: what reads or writes elsewhere, prints, hangs, or reads outside of tensors.
X = {"node": 0}
CALLS: list[tuple[str, list[Any]]] = [
    ("aten.from_file.default", [MARK, True, 4]),
    ("aten._print.default", [MARK]),
    ("aten.save.default", [X, MARK]),
    ("aten.warn.default", [MARK]),
    ("aten.fill_.Scalar", [X, 0]),
    ("aten.zero_.default", [X]),
    ("aten.resize_.default", [X, {"list": [1 << 40]}]),
    ("aten.set_.source_Tensor", [X, X]),
    ("aten.as_strided.default", [X, {"list": [1 << 20]}, {"list": [1]}]),
    ("aten.as_strided.default", [X, {"list": [1]}, {"list": [1]}, 1 << 40]),
    ("aten._unsafe_index.Tensor", [X, {"list": [X]}]),
    ("aten._unsafe_index_put.default", [X, {"list": [X]}, X]),
    ("aten.full.default", [{"list": [1 << 50]}, 1]),
    ("aten.full.default", [{"list": [1 << 62, 1 << 62]}, 1]),
    ("aten.expand.default", [X, {"list": [1 << 50, 2, 5, 8]}]),
    ("aten.arange.default", [10**30]),
    ("aten.nonzero.default", [X]),
    ("aten.item.default", [X]),
    ("aten.add.out", [X, X]),
    ("aten.record_stream.default", [X, 0]),
    ("aten.__class__.__init__", [X]),
    ("aten.add.__class__", [X]),
    ("prims.device_put.default", [X, {"device": "meta"}]),
    ("aten.to.device", [X, {"device": "meta"}, {"dtype": "float32"}]),
    ("aten.to.device", [X, {"device": MARK}, {"dtype": "float32"}]),
    ("aten.sum.dim_IntList", [X, {"list": [9]}]),
    ("aten.neg.default", [{"node": 10**6}]),
    ("aten.neg.default", [{"node": -1}]),
    ("aten.neg.default", [{"node": True}]),
    ("aten.neg.default", [{"float": MARK}]),
    ("aten.neg.default", [{"dtype": "nn"}]),
    ("aten.neg.default", [{"import": "os"}]),
    ("getitem", [X, MARK]),
    ("os.system.default", [f"touch {MARK}"]),
    ("profiler._record_function_enter.default", [MARK]),
    ("inductor.resize_storage_bytes_.default", [X, 1]),
    ("c10d.barrier.default", []),
    ("higher_order.wrap.default", [X]),
    ("builtins.exec.default", [TOUCH]),
]


def test_calls_that_do_more_than_compute_are_a_miss():
    def trial(files: Attempts) -> None:
        for target, args in CALLS:
            extra = {"op": "call_function", "target": target, "args": args, "kwargs": {}}
            # At the end, so that all else still stands where it is said to.
            nodes = [*files.plain["nodes"], {**extra, "module": "", "rows": "all"}]
            assert files.sealed({**files.plain, "nodes": nodes}) is None, target

    attempt(trial)


WRONG: list[Any] = [
    [],
    {},
    None,
    "[" * 100_000,
    '{"nodes": ' * 50_000,
    "9" * 10_000,
    "NaN",
    '{"nodes": [], "output": [], "packed": []}',
    '{"nodes": [{"op": "placeholder"}], "output": [{"node": 0}], "packed": []}',
]


def test_what_is_no_graph_is_a_miss():
    def trial(files: Attempts) -> None:
        deep: Any = 1
        for _ in range(200):
            deep = {"list": [deep]}
        calls = [i for i, n in enumerate(files.plain["nodes"]) if n["op"] == "call_function"]
        get = next(i for i, n in enumerate(files.plain["nodes"]) if "constant" in n)
        changes: list[tuple[tuple[Any, ...], Any]] = [
            (("nodes", calls[0], "args"), [deep]),
            (("nodes", calls[0], "op"), "call_module"),
            (("nodes", get), {"op": "get_attr", "target": "forward"}),
            (("nodes", get), {"op": "get_attr", "target": f"a.{MARK}"}),
            (("nodes", get, "constant", "data"), "00" * 5000),
            (("nodes", get, "constant", "shape"), [1 << 50]),
            (("nodes", get, "constant", "stride"), [1 << 50]),
            (("nodes", get, "constant", "dtype"), "nn"),
            (("nodes", get, "constant", "dtype"), "bool"),
            (("nodes", get, "constant", "dtype"), "quint8"),
            (("packed",), [[[0], [2]]]),
            (("packed",), [[[0, 0], [2, 2]]]),
            (("packed",), [[[10**9], [1]]]),
            (("packed",), [[[], []]]),
            (("output",), []),
            (("output", 0), files.plain["output"][1]),
            (("output", 0), None),
            (("nodes",), files.plain["nodes"][:-1]),
            (("nodes",), files.plain["nodes"][::-1]),
            (("nodes",), [files.plain["nodes"][0], *files.plain["nodes"]]),
        ]
        for wrong in WRONG:
            assert files.sealed(wrong) is None, str(wrong)[:50]
        for path, value in changes:
            plain = copy.deepcopy(files.plain)
            at(plain, path[:-1])[path[-1]] = value
            assert files.sealed(plain) is None, (path, str(value)[:50])

    attempt(trial)


def test_the_watch_sees(folder):
    folder.mkdir()
    _watching.append(folder)
    try:
        (folder / "own").write_text("")
        assert not _touched and not _compiled
        Path("elsewhere").write_text("")
        os.remove("elsewhere")
        compile(f"{MARK} = 1", "here", "exec")
    finally:
        _watching.clear()
    assert len(_touched) == 2 and len(_compiled) == 1
    _touched.clear()
    _compiled.clear()


def test_damage_is_a_miss():
    def trial(files: Attempts) -> None:
        rng = random.Random(0)
        for i in range(150):
            data = bytearray(files.whole)
            if i % 2:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            else:
                del data[rng.randrange(len(data)) :]
            assert files.content(bytes(data)) is None
        for data in (b"", b"\n", b"\xff\xfe", b"\xef\xbb\xbf" + files.whole, files.whole[65:]):
            assert files.content(data) is None

    attempt(trial)


def test_sealed_changes_of_any_kind_do_no_more_than_compute_something_else():
    x = torch.randn(2, 5, 8)

    def trial(files: Attempts) -> None:
        rng, places = random.Random(1), list(spots(files.plain))
        real = [t.clone() if isinstance(t, torch.Tensor) else t for t in files.inputs]
        for _ in range(120):
            plain = copy.deepcopy(files.plain)
            path, other = rng.choice(places), rng.choice(places)
            holder = at(plain, path[:-1])
            kind = rng.randrange(4)
            if kind == 0:
                del holder[path[-1]]
            elif kind == 1:
                holder[path[-1]] = copy.deepcopy(at(files.plain, other))
            elif kind == 2:
                holder[path[-1]] = rng.choice([-1, 0, 7, 1 << 70, None, True, [], {}, "aten"])
            else:
                nodes = plain["nodes"]
                i = rng.randrange(len(nodes))
                nodes.insert(rng.randrange(len(nodes)), nodes.pop(i))
            found = files.sealed(plain)
            if found is None or files.has_no_effect(found):
                continue
            try:
                results = found(*real)
            except (RuntimeError, IndexError):
                # Numbers in constants may name rows that are not there.
                continue
            assert [r.shape for r in results] == [x.shape, x.shape[:-1]]

    assert attempt(trial).count == 120


# --- what is no file of ours ----------------------------------------------------------------------


def a_fifo(path: Path, kept: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path, kept: Path) -> None:
    path.mkdir()


def a_link(path: Path, kept: Path) -> None:
    path.symlink_to(kept)


def a_link_to_a_device(path: Path, kept: Path) -> None:
    path.symlink_to("/dev/zero")


def a_loop(path: Path, kept: Path) -> None:
    path.symlink_to(path)


def a_device(path: Path, kept: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except OSError:
        pytest.skip("making a device needs rights")


def a_socket(path: Path, kept: Path) -> None:
    # The path of a socket has at most some hundred bytes.
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name[:50])
    os.rename(path.name[:50], path.name)
    os.chdir(here)


def a_large_file(path: Path, kept: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 34)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX files")
@pytest.mark.parametrize(
    "put",
    [a_fifo, a_folder, a_link, a_link_to_a_device, a_loop, a_device, a_socket, a_large_file],
)
def test_what_is_no_file_is_a_miss_and_leads_nowhere(folder, tmp_path, put):
    assert call() == "misses"
    (file,) = folder.iterdir()
    kept = tmp_path / "kept"
    kept.write_bytes(file.read_bytes())
    file.unlink()
    put(file, kept)
    before = kept.read_bytes()
    assert call() == "misses"
    assert kept.read_bytes() == before
    if put is a_folder:
        assert call() == "misses"
    else:
        # It was ours to replace, and what it pointed to was not.
        assert file.is_file() and not file.is_symlink() and call() == "hits"


# --- several writers ------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from kvtailor.files import written_whole
text = sys.argv[2] * 200_000
print("on", flush=True)
while True:
    with written_whole(Path(sys.argv[1])) as part:
        part.write_text(text)
"""


def test_four_writers_and_killed_ones_leave_nothing_half_written(tmp_path):
    path = tmp_path / "shared.json"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, c], stdout=subprocess.PIPE)
        for c in "abcd"
    ]
    try:
        for each in writers:
            assert each.stdout is not None and each.stdout.readline() == b"on\n"
        while not path.exists():
            time.sleep(0.001)
        for i in range(400):
            text = files.read_kept(path, 1 << 20)
            assert len(text) == 200_000 and len(set(text)) == 1
            if i in (100, 200):
                writers.pop().send_signal(signal.SIGKILL)
    finally:
        for each in writers:
            each.kill()
            each.wait()


def test_what_killed_writers_left_is_cleared_later(folder):
    folder.mkdir(mode=0o700)
    old, young, other = (
        folder / name for name in (".kvtailor-1.tmp", ".kvtailor-2.tmp", "mine.tmp")
    )
    for each in (old, young, other):
        each.touch()
    for each in (old, other):
        os.utime(each, (0, 0))
    assert call() == "misses"
    assert not old.exists() and young.exists() and other.exists()
