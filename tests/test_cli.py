"""The command line: what inspect shows, exit codes, and one clear line for every wrong input."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from kvtailor.cli import doctor
from kvtailor.cli import main as cli
from kvtailor.cli.inspection import InspectError, Request, run_inspection


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the console script in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtailor", *argv])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call


@pytest.fixture
def script(tmp_path):
    """Write a script; the result is its MODEL name for ``function``."""

    def write(body: str, function: str = "build") -> str:
        path = tmp_path / "script.py"
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(body))
        return f"{path}:{function}"

    return write


ATTENTION = """
class Model(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
"""


# ---- what inspect shows ----


def test_json_has_the_promised_shape(run):
    code, out, err = run(
        "inspect", "hf:gemma3n_text", "--tokens=20", "--batch=2", "--padding=3", "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["model"] == "hf:gemma3n_text"
    assert (report["tokens"], report["batch"], report["padding"]) == (20, 2, 3)
    assert (report["cache"], report["dtype"], report["attn"]) == ("none", "float32", "sdpa")
    assert report["breaks"] == [] and report["recompile_limit"] is None
    (graph,) = report["graphs"]
    assert graph["max_error"] <= 1e-5
    assert graph["flops"]["before"] > graph["flops"]["after"] > 0
    assert [site["site"] for site in graph["attention"]] == [
        f"model.layers.{i}.self_attn" for i in range(4)
    ]
    assert {"window", "chunk", "padding", "segments", "residual", "proof", "lowering", "reason"} < (
        set(graph["attention"][0])
    )
    assert [site["kind"] for site in graph["attention"]] == ["sliding", "causal"] * 2
    assert all(site["padding"] for site in graph["attention"])
    assert [site["kv_owner"] for site in graph["attention"]] == [
        f"model.layers.{i}.self_attn" for i in (0, 1, 0, 1)
    ]
    assert graph["attention"][3]["query_rows"] == 1
    assert {"name", "rewrites", "skipped", "ms"} <= set(graph["passes"][0])
    assert {"name", "rows", "ops", "flops"} == set(graph["row_spaces"][0])
    assert {"name", "rows", "ops", "flops", "shared_with"} <= set(graph["pieces"][0])
    assert sum(space["flops"] for space in graph["row_spaces"]) == graph["flops"]["after"]
    assert sum(piece["flops"] for piece in graph["pieces"]) == graph["flops"]["after"]


def test_text_names_every_site_and_pass(run):
    code, out, _ = run("inspect", "hf:mistral", "--tokens", "16")
    assert code == 0
    for i in range(4):
        assert f"model.layers.{i}.self_attn" in out
    assert "sliding 8" in out and "q - k < 8" in out
    assert "recognise_attention" in out and "max error" in out


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_decode_step_is_a_graph_of_its_own(cache):
    result = run_inspection(Request("hf:llama", tokens=8, cache=cache, decode=1))
    prefill, decode = result.recorder.graphs
    assert len(prefill.attention) == len(decode.attention) == 4
    assert decode.flops_before < prefill.flops_before / 4
    assert result.max_error <= 1e-5 and result.failure() is None


@pytest.mark.parametrize(
    ("model", "cache"), [("bart", "dynamic"), ("whisper", "static"), ("mllama", "dynamic")]
)
def test_the_encoder_runs_in_the_first_call_only(model, cache):
    result = run_inspection(Request(f"hf:{model}", tokens=12, batch=2, cache=cache, decode=1))
    prefill, decode = result.recorder.graphs
    assert len(prefill.attention) > len(decode.attention) > 0
    assert result.max_error <= 1e-5


def test_all_logits_narrow_nothing_and_say_why():
    one = run_inspection(Request("hf:llama", tokens=12, logits_to_keep=1))
    every = run_inspection(Request("hf:llama", tokens=12, logits_to_keep=0))
    assert one.recorder.graphs[0].attention[-1].query_rows == 1
    (graph,) = every.recorder.graphs
    assert all(site.query_rows == "all" for site in graph.attention)
    (narrow,) = [each for each in graph.passes if each.name == "narrow_rows"]
    assert narrow.rewrites == 0 and narrow.skipped


def test_a_script_is_inspected(run, script):
    name = script(
        ATTENTION
        + """
def build():
    return Model(), (torch.randn(1, 2, 6, 8),), {}
"""
    )
    code, out, err = run("inspect", name, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["tokens"] is None and report["dtype"] == "float32"
    (site,) = report["graphs"][0]["attention"]
    assert site["kind"] == "causal"


def test_graph_before_and_after_and_json(run):
    before = run("inspect", "hf:llama", "--tokens=4", "--graph=before", "--json")
    after = run("inspect", "hf:llama", "--tokens=4", "--graph=after", "--json")
    (before_text,) = [g["graph"] for g in json.loads(before[1])["graphs"]]
    (after_text,) = [g["graph"] for g in json.loads(after[1])["graphs"]]
    assert "aten::scaled_dot_product_attention" in before_text
    assert "return" in after_text and before_text != after_text


def test_disabled_passes_do_not_run():
    result = run_inspection(Request("hf:llama", tokens=4, disable=("recognise_attention",)))
    assert "recognise_attention" not in [p.name for p in result.recorder.graphs[0].passes]
    assert "no attention was found in 1 graph" in (result.failure() or "")


# ---- graph breaks and limits (D09, D11) ----


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x, mask):
        logging.getLogger("model").info("layer")
        return x + scaled_dot_product_attention(self.q(x), x, x, attn_mask=mask)


class Breaking(nn.Module):
    """A data-dependent test on the mask, and a log line per layer."""

    def __init__(self, whole: bool):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.whole = whole

    def forward(self, x, mask):
        mask = mask & torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        if mask.all():
            mask = None
        for layer in self.layers:
            x = layer.forward(x, mask) if self.whole else layer(x, mask)
        return x


def build_breaking(whole: bool = False):
    torch.manual_seed(0)
    seen = torch.ones(1, 1, 6, dtype=torch.bool)
    seen[..., 0] = False
    return Breaking(whole), (torch.randn(2, 3, 6, 8), seen), {}


def test_d11_graph_breaks_are_named_and_a_foreign_mask_is_not_guessed():
    result = run_inspection(Request(f"{__file__}:build_breaking"))
    graphs = result.recorder.graphs
    assert len(graphs) >= 2 and result.max_error <= 1e-5
    test, log = result.breaks[0], result.breaks[1]
    assert "ata-dependent branching" in test["reason"] and test["at"].startswith("test_cli.py:")
    assert "ogg" in log["reason"] and log["at"].startswith("test_cli.py:")
    sites = [site for graph in graphs for site in graph.attention]
    assert sites
    for site in sites:
        assert site.kind == "masked" and not site.causal and site.residual


def test_d09_twelve_lengths_under_static_shapes_stay_equal(caplog):
    torch._dynamo.reset()

    def attend(x):
        return scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = torch.compile(attend, backend="kvtailor", dynamic=False, options={"inner": "eager"})
    with caplog.at_level(logging.WARNING, logger="torch._dynamo"):
        for length in range(1, 13):
            x = torch.randn(1, 2, length, 8)
            torch.testing.assert_close(compiled(x), attend(x))
    assert "recompile_limit" in caplog.text


@torch._dynamo.config.patch(recompile_limit=2)
def test_d09_inspect_says_how_many_graphs_and_that_the_limit_was_hit(run):
    argv = ("inspect", "hf:llama", "--tokens=4", "--cache=dynamic", "--decode=3", "--dynamic=no")
    code, out, _ = run(*argv)
    assert code == 0
    assert "2 graphs compiled, then the limit was hit" in out
    assert "recompile_limit is 2" in out
    code, out, _ = run(*argv, "--json")
    report = json.loads(out)
    assert report["recompile_limit"]["limit"] == 2 and len(report["graphs"]) == 2


# ---- never an empty success (L02) ----


def test_l02_a_function_without_tensors_is_no_success(run, script):
    code, _, err = run("inspect", script("def build():\n    return (lambda n: n + 1), (1,), {}"))
    assert code == 1
    assert err.splitlines()[-1].startswith("kvtailor: 0 graphs were compiled")


def test_l02_a_function_without_attention_is_no_success(run, script):
    name = script("def build():\n    return nn.Linear(2, 2), (torch.ones(1, 2),), {}")
    code, _, err = run("inspect", name)
    assert code == 1
    assert err.splitlines()[-1] == "kvtailor: no attention was found in 1 graph"


def test_l02_a_forward_that_raises_is_one_line_with_the_users_own_error(run, script):
    name = script(
        """
        class Model(nn.Module):
            def forward(self, x):
                raise RuntimeError("no wool left")

        def build():
            return Model(), (torch.ones(1),), {}
        """
    )
    code, out, err = run("inspect", name)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"kvtailor: {name} raised RuntimeError: no wool left (script.py, line 6)"
    ]


def test_a_wrong_result_is_no_success():
    result = run_inspection(Request("hf:llama", tokens=4))
    result.recorder.graphs[0].max_error = 1e-3
    assert "must be at most 1e-05, got 0.001" in (result.failure() or "")
    result.recorder.graphs[0].max_error = float("inf")
    assert "differs from eager" in (result.failure() or "")
    assert (
        json.loads(json.dumps(result.as_dict(), allow_nan=False))["graphs"][0]["max_error"] == "inf"
    )


# ---- wrong input: one line, exit code 2, nothing on stdout ----

WRONG = {
    "no command": ([], "no command given; kvtailor --help lists them"),
    "unknown command": (["inspct"], "No such command 'inspct'"),
    "unknown option": (["inspect", "hf:llama", "--tokns", "3"], "No such option: --tokns"),
    "no model": (["inspect"], "Missing argument 'MODEL'"),
    "not a number": (["inspect", "hf:llama", "--tokens", "x"], "Invalid value for '--tokens'"),
    "no tokens": (["inspect", "hf:llama", "--tokens=0"], "tokens must be positive, got 0"),
    "negative tokens": (["inspect", "hf:llama", "--tokens=-4"], "tokens must be positive, got -4"),
    "no batch": (["inspect", "hf:llama", "--batch=0"], "batch must be positive, got 0"),
    "negative decode": (["inspect", "hf:llama", "--decode=-1"], "decode must be 0 or more, got -1"),
    "padding too long": (
        ["inspect", "hf:llama", "--tokens=4", "--padding=4"],
        "padding must be less than tokens (4), got 4",
    ),
    "decode without a cache": (["inspect", "hf:llama", "--decode=1"], "decode steps need a cache"),
    "cache without a decoder": (
        ["inspect", "hf:bert", "--cache=dynamic"],
        "a cache needs a decoder, got cache dynamic for hf:bert",
    ),
    "unknown cache": (
        ["inspect", "hf:llama", "--cache=statc"],
        "unknown cache 'statc'; did you mean 'static'?",
    ),
    "unknown dtype": (
        ["inspect", "hf:llama", "--dtype=bfloat61"],
        "unknown dtype 'bfloat61'; did you mean 'bfloat16'?",
    ),
    "unknown attention": (
        ["inspect", "hf:llama", "--attn=spda"],
        "unknown attention implementation 'spda'; did you mean 'sdpa'?",
    ),
    "refused attention": (["inspect", "hf:gpt_oss", "--attn=sdpa"], "scaled_dot_product_attention"),
    "unknown inner compiler": (
        ["inspect", "hf:llama", "--inner=inductr"],
        "unknown inner compiler 'inductr'; did you mean 'inductor'?",
    ),
    "unknown pass": (
        ["inspect", "hf:llama", "--disable=narrow_row"],
        "unknown pass 'narrow_row'; did you mean 'narrow_rows'?",
    ),
    "unknown graph": (["inspect", "hf:llama", "--graph=aftr"], "unknown graph 'aftr'; did you"),
    "unknown dynamic": (["inspect", "hf:llama", "--dynamic=maybe"], "unknown dynamic setting"),
    "unknown architecture": (
        ["inspect", "hf:lama"],
        "unknown model 'lama'; did you mean 'llama'?",
    ),
    "forgotten prefix": (["inspect", "llama"], "unknown model 'llama'; did you mean 'hf:llama'?"),
    "unknown model": (["inspect", "no/such-model"], "cannot build no/such-model: "),
    "missing gguf": (["inspect", "missing.gguf"], "cannot build missing.gguf: "),
    "missing script": (["inspect", "missing.py:build"], "the script must be a file, got missing"),
    "unknown device": (
        ["calibrate", "--device=gpu"],
        "unknown device 'gpu'",
    ),
    "page without a name": (
        ["inspect", "hf:llama", "--html="],
        "a file that can be written, got an",
    ),
    "page that is a folder": (["inspect", "hf:llama", "--html=."], "a file that can be written"),
    "page in no folder": (["inspect", "hf:llama", "--html=no/x.html"], "a folder that exists, got"),
    "page below a file": (
        ["inspect", "hf:llama", f"--html={__file__}/x"],
        "the page needs a folder that exists, got",
    ),
    "results without a name": (["bench", "--out="], "the results need a file that can be written"),
    "script of a long name": (["inspect", "x" * 5000 + ".py:build"], "the script must be a file"),
    "no bound": (["bisect", "hf:llama", "--bound=nan"], "bound must be positive and finite"),
    "infinite bound": (["bisect", "hf:llama", "--bound=inf"], "bound must be positive and finite"),
    "no room": (["generate", "hf:llama", "-p5", "--max-memory=x"], "max_memory must be"),
    "no token": (["generate", "hf:llama", "-p99"], "prompt 1: tokens must be 0 to 63, got 99"),
    "empty prompt": (["generate", "hf:llama", "-p", ""], "prompt 1: a prompt must have a token"),
    "huge token": (["generate", "hf:llama", "-p", "9" * 30], "prompt 1: tokens must be 0 to 63"),
    "no new tokens": (["generate", "hf:llama", "-p5", "--max-new-tokens=0"], "max_new_tokens must"),
    "prompts in a folder": (["generate", "hf:llama", "--prompts-file=."], "cannot read ."),
    "endless prompts": (
        ["generate", "hf:llama", "--prompts-file=/dev/zero"],
        "cannot read /dev/zero: it must have less than",
    ),
    "no other side": (["inspect", "hf:llama", "--tokens=4", "--against=no.json"], "cannot read no"),
    "script without function": (["inspect", "missing.py"], "a script needs the name of a function"),
}


@pytest.mark.parametrize(("argv", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line(run, monkeypatch, tmp_path, argv, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvtailor: ") and message in line
    assert not list(tmp_path.iterdir())


OWN = "class Own(BaseException): pass\n"
BROKEN = (
    "class Broken(Exception):\n    def __str__(self): raise TypeError\n    __repr__ = __str__\n"
)
FORWARD = "class M(nn.Module):\n    def forward(self, x): raise {}\n"
BUILD = "def build():\n    return M(), (torch.ones(1),), {}"
SCRIPTS = {
    "gives up": ("def build():\n    raise GeneratorExit", "raised GeneratorExit (script.py, line"),
    "own kind": (OWN + "raise Own('bye')", "raised Own: bye (script.py, line 4)"),
    "own kind in a call": (OWN + FORWARD.format("Own('bye')") + BUILD, "raised Own: bye (script"),
    "exits in a call": (FORWARD.format("SystemExit(3)") + BUILD, "raised SystemExit: 3 (script"),
    "no text": (BROKEN + "raise Broken", "raised Broken: and its text raised TypeError (script.py"),
    "no text in a call": (
        BROKEN + FORWARD.format("Broken") + BUILD,
        "raised Broken: and its text raised TypeError (script.py",
    ),
    "broken model": (
        "class M(nn.Module):\n    def eval(self): raise OSError('no')\n" + BUILD,
        "raised OSError: no (script.py, line 4)",
    ),
    "raises": ("def build():\n    raise OSError('no thread')", "raised OSError: no thread (script"),
    "exits": ("raise SystemExit(3)", "raised SystemExit: 3 (script.py, line 3)"),
    "syntax": ("def build(:", "raised SyntaxError: invalid syntax"),
    "other name": ("def bild():\n    pass", "unknown function in"),
    "not a tuple": ("def build():\n    return nn.Identity()", "must return (model, args, kwargs)"),
    "args no tuple": (
        "def build():\n    return nn.Identity(), torch.ones(1), {}",
        "must return (model, args, kwargs), got (Identity, Tensor, dict)",
    ),
    "bad shapes": (
        "def build():\n    return nn.Linear(2, 2), (torch.ones(1, 3),), {}",
        "raised RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
    "wrong arguments": (
        "def build():\n    return nn.Linear(2, 2), (), {}",
        "missing 1 required positional argument",
    ),
}


@pytest.mark.parametrize(("body", "message"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_wrong_script_is_one_line(run, script, body, message):
    code, out, err = run("inspect", script(body))
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvtailor: ") and message in line


@pytest.mark.parametrize(
    "text", ["", "3", "[]", '{"graphs": [3]}', '{"graphs": [{"attention": [{}]}]}', "[" * 100_000]
)
def test_another_side_that_is_no_inspection_is_one_line(run, tmp_path, text):
    path = tmp_path / "b.json"
    path.write_text(text)
    code, out, err = run("inspect", "hf:llama", "--tokens=4", f"--against={path}")
    assert (code, out) == (2, "")
    assert err == f"kvtailor: {path} must be what kvtailor inspect --json prints\n"


MAIN = "from kvtailor.cli.main import main; main()"


def in_shell(command: str, **environ: str) -> tuple[int, str, str]:
    """A shell's command line, where K is the console script: (exit code, stdout, stderr)."""
    done = subprocess.run(
        ["bash", "-c", f"K() {{ {sys.executable} -c '{MAIN}' \"$@\"; }}; {command}"],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_or_not_read_is_no_traceback(unbuffered):
    code, _, err = in_shell("K --version > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (code, err) == (2, "kvtailor: cannot write the output: No space left on device\n")
    code, _, err = in_shell("K --help | true; exit ${PIPESTATUS[0]}", PYTHONUNBUFFERED=unbuffered)
    assert code in (0, 1) and err == ""


def test_an_output_of_ascii_alone_loses_nothing():
    code, out, err = in_shell(
        "K inspect hf:llama --tokens=4 --graph=after", PYTHONIOENCODING="ascii", LC_ALL="C"
    )
    assert code == 0 and "model.layers.0.self_attn" in out, err
    assert out.isascii() and "Traceback" not in err
    code, _, err = in_shell("K inspect $'\\xff\\n.py:f'", PYTHONIOENCODING="ascii")
    assert code == 2 and len(err.splitlines()) == 1


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX files")
def test_a_page_goes_where_a_shell_would_write_it(run, script, tmp_path):
    name = script(
        ATTENTION + "\ndef build():\n    return Model(), (torch.randn(1, 2, 6, 8),), {}\n"
    )
    kept, link = tmp_path / "kept.html", tmp_path / "link.html"
    kept.write_text("old")
    kept.chmod(0o640)
    link.symlink_to(kept)
    assert run("inspect", name, f"--html={link}")[0] == 0
    assert link.is_symlink() and kept.read_text().startswith("<!")
    assert kept.stat().st_mode & 0o777 == 0o640
    assert run("inspect", name, "--html=/dev/null")[0] == 0
    assert not os.path.isfile("/dev/null")
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix) == [
        "kept.html",
        "link.html",
        "script.py",
    ]


def test_an_error_of_ours_is_told_from_one_of_the_model(monkeypatch, script):
    name = script(ATTENTION + "\ndef build():\n    return Model(), (torch.ones(1, 1, 2, 8),), {}")

    def explode(*args, **kwargs):
        raise AssertionError("a stitch came loose")

    monkeypatch.setattr("kvtailor.compiler.reports.GraphReport", explode)
    with pytest.raises(InspectError, match="runs in eager mode, but compiled it raised"):
        run_inspection(Request(name))


# ---- help, version, doctor ----


def test_help_loads_neither_torch_nor_transformers(tmp_path):
    code = """if True:
        import sys
        from kvtailor.cli import main as cli
        sys.argv = ["kvtailor", *sys.argv[1:]]
        try:
            cli.main()
        finally:
            print(sorted({"torch", "transformers", "numpy", "sympy"} & set(sys.modules)))
    """
    for argv in (["--help"], ["inspect", "--help"], ["doctor", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "[]"
        assert len(done.stdout.splitlines()) > 1


def test_doctor_finds_the_backend_and_the_compiler(run):
    code, out, _ = run("doctor", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["versions"]["torch"] == torch.__version__
    states = {part["name"]: part["on"] for part in facts["parts"]}
    assert states['torch.compile(backend="kvtailor")'] and states["inner compiler eager"]
    assert states["pass narrow_rows"]
    assert facts["problems"] == []


def test_doctor_says_why_something_is_off(run, monkeypatch):
    monkeypatch.setenv("KVTAILOR_DISABLE_PASSES", "narrow_rows")
    monkeypatch.setattr(doctor, "compiler_version", lambda: None)
    monkeypatch.setattr(doctor, "_gpu", lambda: None)
    code, out, _ = run("doctor")
    assert code == 0
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "off" in lines["pass narrow_rows"] and "DISABLE_PASSES" in lines["pass narrow_rows"]
    assert "off" in lines["inner compiler inductor"] and "g++" in lines["inner compiler inductor"]


def test_doctor_fails_where_the_environment_is_wrong(run, monkeypatch):
    monkeypatch.setenv("KVTAILOR_DISABLE_PASSES", "narow_rows")
    code, _, err = run("doctor")
    assert code == 1
    assert "did you mean 'narrow_rows'?" in err.splitlines()[-1]


def test_doctor_without_a_compiler(monkeypatch):
    from torch._inductor import cpp_builder

    def missing():
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    assert doctor.compiler_version() is None
