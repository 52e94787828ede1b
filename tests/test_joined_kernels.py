"""Kernels joined to one unit: which are, that they compute the same, and what a failure does."""

from __future__ import annotations

import platform
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import async_compile, cpu_vec_isa

from kvtailor.backend import recording
from kvtailor.compiler import joined_kernels
from kvtailor.compiler.joined_kernels import collected, joinable, joined

KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0)
{
    #pragma omp simd
    for (int i = 0; i < 4; i++) out_ptr0[i] = in_ptr0[i];
}
"""


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def two_layers() -> nn.Module:
    """Each has two kernels with a matmul between them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner((x * 2).softmax(-1)).exp() + x).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    return Model().eval()


def compiled(regions: str = "layer", strict: bool = False, model: nn.Module | None = None):
    """The report of a compiled call that was compared with eager, and how many kernels joined."""
    before = counters["kvtailor"]["joined_kernels"]
    options = {"regions": regions, "strict": strict}
    # No entry of Inductor's cache, which would skip what is tested here.
    with torch._inductor.config.patch(fx_graph_cache=False), recording(check=True) as recorder:
        run = torch.compile(model or two_layers(), backend="kvtailor", options=options)
        with torch.no_grad():
            run(torch.randn(3, 8))
            run(torch.randn(3, 8))
    (graph,) = recorder.graphs
    assert graph.max_error <= 1e-5
    return graph, counters["kvtailor"]["joined_kernels"] - before


@pytest.mark.parametrize("regions", ["layer", pytest.param("none", marks=pytest.mark.slow)])
def test_kernels_of_a_module_are_one_unit(monkeypatch, regions):
    modules = []

    class Watched(joined_kernels.Module):
        def finish(self):
            modules.append(self)
            super().finish()

    monkeypatch.setattr(joined_kernels, "Module", Watched)
    original = async_compile.AsyncCompile
    graph, count = compiled(regions)
    assert all(p.reason is None for p in graph.pieces)
    (module,) = modules
    assert count == len(module.kernels) >= 2
    units = {id(kernel.unit) for kernel in module.kernels.values()}
    assert len(units) == 1
    # The compiled functions stand in Inductor's module, nothing of ours is between.
    for name, kernel in module.kernels.items():
        assert module.scope[name] is kernel.compiled()
        assert type(module.scope[name]).__name__ == "builtin_function_or_method"
    assert async_compile.AsyncCompile is original


def test_kernels_that_pieces_share_are_compiled_once(monkeypatch):
    class Other(nn.Module):
        """A layer of another kind, with a kernel that the first kind has too."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner((x * 2).softmax(-1)).sin() + x.exp()

    model = two_layers()
    model.layers.append(Other())
    sizes = []
    original = joined_kernels.unit_source
    monkeypatch.setattr(
        joined_kernels, "unit_source", lambda each: (sizes.append(len(each)), original(each))[1]
    )
    graph, count = compiled(model=model)
    assert graph.pieces[0].shared_with is None and graph.pieces[2].shared_with is None
    assert sizes == [2, 1] and count == 3


def test_the_instruction_set_is_the_one_inductor_picks(monkeypatch):
    asked = []
    original = cpu_vec_isa.valid_vec_isa_list

    class Unasked:
        """Inductor's list before anybody asked for it."""

        cache_info = staticmethod(lambda: SimpleNamespace(currsize=0))

        def __call__(self):
            asked.append(1)
            return original()

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", Unasked())
    with torch._inductor.config.patch({"cpp.simdlen": None}):
        expected = cpu_vec_isa.pick_vec_isa()
        assert asked == [1]
        with collected({}), joined():
            assert cpu_vec_isa.pick_vec_isa() is expected
            on_x86 = platform.machine() == "x86_64" and sys.platform == "linux"
            assert len(asked) == (1 if on_x86 else 2)
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        expected = cpu_vec_isa.pick_vec_isa()
        with collected({}), joined():
            assert cpu_vec_isa.pick_vec_isa() is expected
    assert isinstance(cpu_vec_isa.valid_vec_isa_list, Unasked)


def test_another_inductor_goes_its_own_way(monkeypatch, caplog):
    cpu_vec_isa.valid_vec_isa_list()  # Inductor remembers it; only ours asks again.
    monkeypatch.delattr(cpu_vec_isa, "supported_vec_isa_list")
    graph, count = compiled()
    assert count == 0 and all(p.reason is None for p in graph.pieces)
    assert "one by one" in caplog.text


@pytest.mark.slow
def test_large_kernels_are_units_of_their_own(monkeypatch):
    monkeypatch.setattr(joined_kernels, "LARGEST_UNIT", 1)
    sizes = []
    original = joined_kernels.unit_source
    monkeypatch.setattr(
        joined_kernels, "unit_source", lambda each: (sizes.append(len(each)), original(each))[1]
    )
    _, count = compiled()
    assert sizes == [1, 1] and count == 2


def test_what_is_joined():
    assert joinable(KERNEL.replace("in_ptr0[i];", "in_ptr0.template f<float>(i);")) is not None
    function = joinable(KERNEL)
    assert function is not None and function.startswith("void  kernel(const float*")
    for changed in (
        KERNEL.replace("#include", "#define A 1\n#include"),
        KERNEL.replace("{\n", "{\n#define A 1\n", 1),
        KERNEL.replace("#pragma", "#ifdef A\n#endif\n#pragma"),
        KERNEL.replace("void  kernel", "int  kernel"),
        KERNEL.replace("kernel", "another"),
        KERNEL + "namespace { int a; }",
        KERNEL + 'extern "C" void more() {}',
        KERNEL.replace("extern", "template <int n> void f() {}\nextern"),
        KERNEL + "template <int n> void f() {}",
    ):
        assert changed != KERNEL and joinable(changed) is None


def test_kernels_of_another_form_go_inductors_way(monkeypatch):
    monkeypatch.setattr(joined_kernels, "joinable", lambda source: None)
    graph, count = compiled()
    assert count == 0 and all(p.reason is None for p in graph.pieces)


def unwritable(kernels):
    raise KeyError("a field of another template")


@pytest.mark.parametrize(
    ("source", "why"),
    [(lambda kernels: "no C++ at all", "C++ compile error"), (unwritable, "'a field of")],
    ids=["broken", "unwritable"],
)
def test_a_unit_that_does_not_compile_is_taken_apart(monkeypatch, caplog, source, why):
    monkeypatch.setattr(joined_kernels, "unit_source", source)
    graph, count = compiled()
    assert count == 2 and all(p.reason is None for p in graph.pieces)
    assert f"2 kernels are compiled one by one: {why}" in caplog.text


def failing(self):
    raise RuntimeError("no compiler for this\nand a long story")


def test_kernels_that_do_not_compile_leave_their_pieces_uncompiled(monkeypatch, caplog):
    monkeypatch.setattr(joined_kernels.Kernel, "compiled", failing)
    graph, _ = compiled()
    assert [p.reason for p in graph.pieces] == ["RuntimeError: no compiler for this"] * 2
    assert "runs uncompiled" in caplog.text
    # Whoever has the same piece later does not find the half-made module.
    torch._dynamo.reset()
    graph, _ = compiled()
    assert [p.reason for p in graph.pieces] == ["RuntimeError: no compiler for this"] * 2


def test_strict_raises_for_kernels_that_do_not_compile(monkeypatch):
    monkeypatch.setattr(joined_kernels.Kernel, "compiled", failing)
    with pytest.raises(BackendCompilerFailed, match=r"piece layers\.0 runs uncompiled"):
        compiled(strict=True)


def test_a_whole_graph_whose_kernels_do_not_compile_runs_uncompiled(monkeypatch):
    monkeypatch.setattr(joined_kernels.Kernel, "compiled", failing)
    original = async_compile.AsyncCompile
    graph, _ = compiled("none")
    assert graph.without == ["it runs uncompiled: RuntimeError: no compiler for this"]
    assert async_compile.AsyncCompile is original and joined_kernels._collectors == []
