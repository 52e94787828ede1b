"""The TensorRT inner compiler, tested up to its boundary: the package itself is replaced."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.compiler import inner
from kvtailor.compiler import tensorrt as trt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class FakeTensorRT(types.SimpleNamespace):
    """Takes what the documented compile() takes, checks it, and gives the program back to run."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.Input = lambda shape, dtype: (shape, dtype)
        self.dynamo = types.SimpleNamespace(compile=self.compile)

    def compile(
        self, exported_program, inputs=None, *, arg_inputs, device, attn_bias_is_causal=True
    ):
        assert isinstance(exported_program, torch.export.ExportedProgram)
        assert inputs is None and isinstance(device, torch.device)
        users = exported_program.graph_signature.user_inputs
        values = {
            n.name: n.meta["val"] for n in exported_program.graph.nodes if n.op == "placeholder"
        }
        given = [(tuple(values[u].shape), values[u].dtype) for u in users]
        assert given == arg_inputs
        self.calls.append(attn_bias_is_causal)
        return exported_program.module()


@pytest.fixture
def tensorrt(monkeypatch):
    fake = FakeTensorRT()
    monkeypatch.setattr(trt, "require", lambda: fake)
    # There is no CUDA device to put the inputs on: that one condition is left out.
    original = trt.refusal
    monkeypatch.setattr(
        trt, "refusal", lambda gm: None if (r := original(gm)) == "an input is on cpu" else r
    )
    return fake


def test_a_missing_package_is_one_clear_line():
    if trt.importlib.util.find_spec("torch_tensorrt"):
        pytest.skip("torch_tensorrt is installed")
    run = torch.compile(nn.Linear(2, 2), backend="kvtailor", options={"inner": "tensorrt"})
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="needs the package torch-ten"):
        run(torch.ones(1, 2))


def test_a_missing_package_is_no_failed_piece(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(trt.importlib, "import_module", absent)
    with pytest.raises(trt.MissingTensorRT, match=r"kvtailor\[tensorrt\]"):
        trt.require()


def test_pieces_of_torchs_own_ops_go_to_tensorrt_once_per_key(tensorrt):
    model, inputs = shrunk("llama")
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        run = torch.compile(model, backend="kvtailor", options={"inner": "tensorrt"}, dynamic=False)
        with recording() as recorder:
            torch.testing.assert_close(run(**inputs, use_cache=False).logits, expected)
    (graph,) = recorder.graphs
    assert [p.reason for p in graph.pieces] == [None] * 6
    # Prologue, one kind of layer, epilogue; never as causal masks.
    assert tensorrt.calls == [False] * 3


def test_the_rest_stays_with_inductor(tensorrt, monkeypatch):
    seen = []
    original = inner.inner_compile

    def compiler(gm, example_inputs, opts):
        seen.append(trt.refusal(gm))
        eager = opts.model_copy(update={"inner": "eager"})
        return original(gm, example_inputs, opts if seen[-1] is None else eager)

    monkeypatch.setattr(inner, "inner_compile", compiler)
    model, inputs = shrunk("mistral", tokens=64)
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        run = torch.compile(model, backend="kvtailor", options={"inner": "tensorrt"}, dynamic=False)
        torch.testing.assert_close(run(**inputs, use_cache=False).logits, expected)
    assert "kvtailor.local_attend.default is no op of torch's own" in seen
    assert len(tensorrt.calls) == seen.count(None) > 0


def test_what_is_refused(tensorrt):
    def graph(fn, *args, **kwargs):
        found = []

        def compiler(gm, example_inputs):
            from kvtailor.passes.capture.capture import capture

            found.append(trt.refusal(capture(gm, example_inputs)))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(fn, backend=compiler, **kwargs)(*args)
        return found[0]

    def write(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    x = torch.ones(3, 4)
    assert graph(lambda x: x * 2, x) is None
    assert "writes to its input" in graph(write, x)
    assert graph(lambda x: x * 2, x, dynamic=True) is not None
