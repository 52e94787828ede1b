"""The mask interpreter: what it reads equals what torch computes, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from kvtailor.passes.graph import output_node
from kvtailor.passes.masks.integers import Atom, fdiv
from kvtailor.passes.masks.interpret import Interpreter
from kvtailor.passes.masks.logic import And, Bool, Eq, Ge, Lit, Logic, Ne, Or
from kvtailor.passes.masks.ops import interpreter as interpreter_of
from kvtailor.passes.masks.pointwise import conjunct_nodes
from kvtailor.passes.masks.values import Pick, Real, Value, size_expr, sizes

MIN = torch.finfo(torch.float32).min


class Record(fx.Interpreter):
    """Runs a graph and keeps every value."""

    def run_all(self, *args: Any) -> dict[fx.Node, Any]:
        self.values: dict[fx.Node, Any] = {}
        self.run(*args)
        return self.values

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


class Concrete:
    """Evaluates values at concrete indices, atoms looked up in the tensors of a real run."""

    def __init__(self, logic: Logic, tensors: dict[fx.Node, Any], hints: dict[Any, int]):
        self.logic, self.tensors, self.hints = logic, tensors, hints

    def atom(self, atom: Atom, env: dict[Any, int]) -> Any:
        return self.tensors[atom.node][tuple(self.integer(i, env) for i in atom.index)].item()

    def integer(self, e: sympy.Expr, env: dict[Any, int]) -> int:
        def value(x: sympy.Expr) -> sympy.Expr:
            if x in env:
                return sympy.Integer(env[x])
            if x in self.hints:
                return sympy.Integer(self.hints[x])
            if x in self.logic.atoms:
                return sympy.Integer(self.atom(self.logic.atoms[x], env))
            if isinstance(x, fdiv):
                return sympy.Integer(int(value(x.args[0])) // int(x.args[1]))
            return x if not x.args else x.func(*map(value, x.args))

        return int(value(e))

    def boolean(self, p: Bool, env: dict[Any, int]) -> bool:
        if isinstance(p, Lit):
            return bool(self.atom(p.atom, env)) == p.positive
        if isinstance(p, And):
            return all(self.boolean(a, env) for a in p.args)
        if isinstance(p, Or):
            return any(self.boolean(a, env) for a in p.args)
        assert isinstance(p, (Ge, Eq, Ne))
        e = self.integer(p.e, env)
        return {Ge: e >= 0, Eq: e == 0, Ne: e != 0}[type(p)]

    def value(self, v: Value, env: dict[Any, int]) -> Any:
        if isinstance(v, Bool):
            return self.boolean(v, env)
        if isinstance(v, Pick):
            return self.value(v.then if self.boolean(v.condition, env) else v.other, env)
        if isinstance(v, Real):
            return v.const + sum(self.atom(a, env) for a in v.parts)
        return self.integer(v, env)


def atoms_of(v: Value, logic: Logic) -> Iterator[Atom]:
    if isinstance(v, (And, Or)):
        for a in v.args:
            yield from atoms_of(a, logic)
    elif isinstance(v, Lit):
        yield v.atom
    elif isinstance(v, (Ge, Eq, Ne)):
        yield from atoms_of(v.e, logic)
    elif isinstance(v, Pick):
        for part in (v.condition, v.then, v.other):
            yield from atoms_of(part, logic)
    elif isinstance(v, Real):
        yield from v.parts
    else:
        yield from (logic.atoms[s] for s in v.free_symbols if s in logic.atoms)


class Module(torch.nn.Module):
    def __init__(self, functions: Sequence[Callable[..., Tensor]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(*args) for f in self.functions)


class Traced:
    """Functions of the same inputs as one functional pre-dispatch ATen graph, as capture makes."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Tensor]],
        inputs: Sequence[Tensor],
        symbolic: bool = False,
    ) -> None:
        self.env = ShapeEnv()
        mode = FakeTensorMode(shape_env=self.env)
        how = DimDynamic.DYNAMIC if symbolic else DimDynamic.STATIC
        fakes = [
            mode.from_tensor(
                x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=[how] * x.dim())
            )
            for x in inputs
        ]
        module = Module(functions)
        self.gm, _ = aot_export_module(module, fakes, trace_joint=False, pre_dispatch=True)
        self.outputs: list[fx.Node] = list(output_node(self.gm).args[0])  # type: ignore[arg-type]
        self.expected = module(*inputs)
        self.tensors = Record(self.gm).run_all(*inputs)
        self.hints: dict[Any, int] = {}
        for node, real in zip(self.gm.graph.find_nodes(op="placeholder"), inputs):
            for fake, n in zip(node.meta["val"].shape, real.shape):
                if isinstance(fake, torch.SymInt):
                    self.hints[size_expr(fake)] = n

    def read(self, at: int = 0) -> tuple[Interpreter, list[sympy.Symbol], Value]:
        """(interpreter, index symbols, value) of an output."""
        logic, out = Logic(self.env), self.outputs[at]
        index = [logic.index(f"i{d}", n) for d, n in enumerate(sizes(out))]
        interpreter = interpreter_of(self.gm, logic)
        return interpreter, index, interpreter.read(out, index)

    def check(self, at: int = 0, understood: bool = True) -> Value:
        """Compare every element with eager; understood: only inputs may stay atoms."""
        interpreter, index, value = self.read(at)
        concrete = Concrete(interpreter.logic, self.tensors, self.hints)
        expected = self.expected[at]
        for where in itertools.product(*map(range, expected.shape)):
            got = concrete.value(value, dict(zip(index, where)))
            assert got == expected[where].item(), (where, got, value)
        if understood:
            for atom in atoms_of(value, interpreter.logic):
                assert atom.node.op == "placeholder", f"{atom.node} was not read"
        return value


def grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key indices of x [B, T] as [T, 1] and [1, T]."""
    i = torch.arange(x.shape[1])
    return i[:, None], i[None, :]


def ones(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=dtype)


# Functions of an int tensor x [2, 6] and a bool tensor m [2, 6].
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arange": lambda x, m: torch.arange(x.shape[1]),
    "arange_start_step": lambda x, m: torch.arange(3, 15, 2),
    "full": lambda x, m: torch.full((x.shape[1], 2), -7),
    "full_like": lambda x, m: torch.full_like(x, 4),
    "new_ones": lambda x, m: x.new_ones((), dtype=torch.bool),
    "eye": lambda x, m: torch.eye(x.shape[1], dtype=torch.bool),
    "expand": lambda x, m: x[:, None, None, :].expand(-1, 3, x.shape[1], -1),
    "unsqueeze_squeeze": lambda x, m: x[:, None, :, None].squeeze(-1).squeeze(1),
    "squeeze_all": lambda x, m: x[:1, None].squeeze(),
    "permute": lambda x, m: x[:, None].permute(2, 0, 1),
    "transpose": lambda x, m: x.transpose(0, 1),
    "t": lambda x, m: x.t(),
    "mT": lambda x, m: (x[:, None] + x[..., None]).mT,
    "slice": lambda x, m: x[:, 1:-1],
    "slice_step": lambda x, m: x[:, 1::2],
    "slice_negative": lambda x, m: x[:, -4:],
    "slice_past_start": lambda x, m: x[:, -20:],
    "select": lambda x, m: x[1],
    "select_negative": lambda x, m: x[:, -2],
    "flip": lambda x, m: x.flip(1),
    "view_ones": lambda x, m: x.view(2, 1, x.shape[1], 1),
    "repeat": lambda x, m: x[:, None].repeat(1, 3, 1),
    "clone": lambda x, m: x.clone(),
    "cast_same": lambda x, m: x.to(torch.int64),
    "to_bool": lambda x, m: x.to(torch.bool),
    "bool_to_int": lambda x, m: m.to(torch.int64) + 1,
    "bool_to_float": lambda x, m: (1.0 - m.float()) * MIN,
    "index": lambda x, m: x[torch.arange(2)[:, None, None], grid(x)[1][None]],
    "index_negative": lambda x, m: x[:, torch.arange(x.shape[1]) - x.shape[1]],
    "index_split": lambda x, m: x[:, None][torch.arange(2)[:, None], :, torch.arange(4)],
    "index_bool": lambda x, m: m[torch.arange(2)[:, None], torch.arange(3)],
    "index_select": lambda x, m: x.index_select(1, torch.arange(3)),
    "gather": lambda x, m: x.gather(1, torch.arange(3)[None].expand(2, -1)),
    "cat": lambda x, m: torch.cat([x[:, :2], x * 2, x[:, 1:3]], dim=1),
    "cat_bool": lambda x, m: torch.cat([m, ~m], dim=0),
    "stack": lambda x, m: torch.stack([x, x + 1, x + 2], dim=1),
    "pad": lambda x, m: F.pad(x, (2, 1), value=5),
    "pad_two_dims": lambda x, m: F.pad(m, (0, 2, 1, 0)),
    "pad_crop": lambda x, m: F.pad(x, (-1, -2)),
    "where": lambda x, m: torch.where(m, x, -x),
    "where_scalar": lambda x, m: torch.where(m, 0.0, MIN),
    "where_converts": lambda x, m: torch.where(
        m, torch.ones(2, x.shape[1], dtype=torch.int64), 0.5
    ),
    "masked_fill": lambda x, m: x.masked_fill(m, 3),
    "masked_fill_bool": lambda x, m: m.masked_fill(x == 0, False),
    "tril": lambda x, m: torch.tril(ones(x), 1),
    "triu_min": lambda x, m: torch.full((x.shape[1], x.shape[1]), MIN).triu(1),
    "tril_bool": lambda x, m: ones(x, torch.bool).tril(-1),
    "log_tril": lambda x, m: torch.tril(ones(x)).log(),
    "min_plus_min": lambda x, m: torch.full((4, 4), MIN).triu(1) + torch.full((4, 4), MIN).tril(),
    "floor_divide": lambda x, m: (torch.arange(x.shape[1]) - 3) // 4,
    "div_floor": lambda x, m: torch.div(grid(x)[0] - grid(x)[1], 3, rounding_mode="floor"),
    "div_trunc": lambda x, m: torch.div(torch.arange(x.shape[1]), 4, rounding_mode="trunc"),
    "remainder": lambda x, m: (torch.arange(x.shape[1]) - 5) % 3,
    "fmod": lambda x, m: torch.fmod(torch.arange(x.shape[1]), 3),
    "abs": lambda x, m: (grid(x)[0] - grid(x)[1]).abs(),
    "maximum": lambda x, m: torch.maximum(x, torch.arange(x.shape[1])),
    "minimum": lambda x, m: torch.minimum(x, torch.tensor(2)),
    "clamp": lambda x, m: x.clamp(min=-1, max=2),
    "clamp_min": lambda x, m: x.clamp_min(1),
    "alpha": lambda x, m: torch.add(x, torch.arange(x.shape[1]), alpha=3),
    "rsub": lambda x, m: torch.rsub(x, 5),
    "neg_mul": lambda x, m: -x * 3,
    "compare": lambda x, m: (x < 2) & (x >= 0) | (x == 5) & (x != 4) | (x > 8),
    "le_mixed": lambda x, m: grid(x)[1] <= grid(x)[0] + x[0, 0],
    "connectives": lambda x, m: ((m ^ (x > 1)) | torch.logical_not(m)) & torch.logical_or(m, x < 4),
    "bool_compare": lambda x, m: (m == (x > 1)) | (m < (x > 0)) | (m.ne(x < 3) & (m >= (x < 2))),
    "bool_product": lambda x, m: m * (x > 1) + (x < 0),
    "abs_window": lambda x, m: (grid(x)[0] - grid(x)[1]).abs() <= 2,
    "diff_prepend": lambda x, m: torch.diff(x, prepend=x[:, :1] - 1),
    "diff": lambda x, m: torch.diff(x, dim=0),
    "cumsum_ones": lambda x, m: torch.ones_like(x).cumsum(-1),
    "cumsum_false": lambda x, m: (torch.arange(x.shape[1]) < 0).cumsum(0),
    "sum_ones": lambda x, m: torch.ones_like(x).sum(-1),
    "sum_all": lambda x, m: torch.full((3, 4), 2).sum(),
    "sum_keepdim": lambda x, m: torch.ones_like(x).sum(-1, keepdim=True),
    "slice_scatter": lambda x, m: torch.slice_scatter(x, x[:, :2] + 1, 1, 2, 4),
    "select_scatter": lambda x, m: torch.select_scatter(x, x[0] * 2, 0, -1),
    "literal": lambda x, m: torch.where(m, torch.tensor(-1e9), torch.tensor(0.0)),
    "half_minimum": lambda x, m: torch.where(m, 0.0, torch.finfo(torch.float16).min).half(),
    "half_overflow": lambda x, m: torch.where(m, 0.0, -1e9).half(),
}

# Right, but as an atom of some node on the way.
ATOMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, m: x * x.flip(0),
    "true_division": lambda x, m: x / 2,
    "int8_may_wrap": lambda x, m: x.to(torch.int8) + 120,
    "int_to_float": lambda x, m: x.float() * 0.5,
    "cumsum": lambda x, m: m.cumsum(-1),
    "sum": lambda x, m: m.sum(-1),
    "sort": lambda x, m: x.sort(-1).values,
    "index_unknown_sign": lambda x, m: torch.arange(9)[x.clamp(-3, 3)],
    "matmul": lambda x, m: x.float() @ x.float().t(),
    "embedding": lambda x, m: F.embedding(x.clamp(0, 3), torch.arange(8.0).view(4, 2)),
    "trunc_of_negative": lambda x, m: torch.div(x, 4, rounding_mode="trunc"),
    "divide_by_tensor": lambda x, m: x // (x.abs() + 1),
    "literal_vector": lambda x, m: x + torch.tensor([1, 5, 2, 8, 3, 1]),
    "any": lambda x, m: m.any(-1),
    "strided_scatter": lambda x, m: torch.slice_scatter(x, x[:, :3], 1, 0, 6, 2),
    "reflect": lambda x, m: F.pad(x.float(), (1, 1), mode="reflect"),
    "float_compare": lambda x, m: x.float() > 0.5,
}


@pytest.fixture(scope="module", params=[False, True], ids=["static", "symbolic"])
def traced(request: pytest.FixtureRequest) -> Traced:
    """Every function of both tables in one graph."""
    torch.manual_seed(0)
    inputs = torch.randint(-4, 9, (2, 6)), torch.rand(2, 6) > 0.5
    return Traced([*READ.values(), *ATOMS.values()], inputs, symbolic=request.param)


@pytest.mark.parametrize("name", READ)
def test_reads(name: str, traced: Traced) -> None:
    traced.check(list(READ).index(name))


@pytest.mark.parametrize("name", ATOMS)
def test_unknown_is_an_atom(name: str, traced: Traced) -> None:
    traced.check(len(READ) + list(ATOMS).index(name), understood=False)
    with pytest.raises(AssertionError, match="was not read"):
        traced.check(len(READ) + list(ATOMS).index(name))


def test_views_that_merge_and_split() -> None:
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.view(12),
        lambda x: x.view(3, 4),
        lambda x: x.view(2, 2, 3),
        lambda x: x.view(1, 4, 1, 3),
        lambda x: x.view(2, 3, 2).transpose(1, 2).reshape(2, 6),
        lambda x: x.repeat(2, 3),
        lambda x: x.repeat_interleave(3, dim=1),
        lambda x: x[:, None].expand(2, 2, 6).reshape(4, 6).view(2, 2, 6),
    ]
    traced = Traced(views, [torch.arange(12).view(2, 6) * 5 - 3])
    for at in range(len(views)):
        traced.check(at)


def test_views_of_symbolic_sizes_that_merge_are_atoms() -> None:
    traced = Traced([lambda x: x.flatten()], [torch.arange(12).view(2, 6)], symbolic=True)
    _, _, value = traced.read()
    assert str(value) == "x0"


def test_an_atom_names_only_what_it_depends_on() -> None:
    """A product over [B, 1, Tq, Tk] of two key vectors is one element per key."""

    def f(x: Tensor) -> Tensor:
        wide = x[:, None, None, :].expand(-1, -1, x.shape[1], -1)
        return (wide * wide) > 3

    interpreter, (b, _, _, k), value = Traced([f], [torch.arange(12).view(2, 6)]).read()
    assert interpreter.deps(value) == {b, k}


def test_one_row_keeps_its_symbol() -> None:
    """With one query, arange(1) + 5 is still the query's place and not the number 5."""

    def f(x: Tensor) -> Tensor:
        q = torch.arange(x.shape[0])[None, None, :, None] + 5
        return (torch.arange(9) <= q).expand(1, 1, 1, 9)

    interpreter, (_, _, q, k), value = Traced([f], [torch.zeros(1)]).read()
    assert interpreter.deps(value) == {q, k}


def test_conjunct_nodes_look_through_views() -> None:
    def f(m: Tensor, n: Tensor) -> Tensor:
        both = torch.ones((), dtype=torch.bool) & m[:, None, :]
        return (both & n[:, :, None]).unsqueeze(1).expand(-1, 3, -1, -1)

    traced = Traced([f], [torch.rand(2, 4) > 0.5, torch.rand(2, 4) > 0.5])
    interpreter, index, _ = traced.read()
    b, _, q, k = index
    found = conjunct_nodes(interpreter, traced.outputs[0], tuple(index))
    assert [at for node, at in found if node.op == "placeholder"] == [(b, k), (b, q)]


def test_complex_masks_are_refused_not_misread() -> None:
    traced = Traced(
        [lambda x: torch.view_as_real(x.to(torch.complex64))[..., 0] > 0], [torch.arange(3.0)]
    )
    assert isinstance(traced.check(understood=False), Lit)


def test_a_deep_chain_ends_in_an_atom() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(100):
            x = x + 1
        return x

    traced = Traced([f], [torch.arange(3)])
    traced.check(understood=False)


# --- random programs


@st.composite
def integers(draw: Any, depth: int) -> Callable[..., Tensor]:
    """A program over q [4, 1], k [1, 5], x [4, 5] that makes integers [4, 5]."""
    if depth == 0:
        leaf = draw(st.sampled_from("qkxc"))
        c = draw(st.integers(-3, 3))
        return {
            "q": lambda q, k, x, m: q + 0 * k,
            "k": lambda q, k, x, m: k + 0 * q,
            "x": lambda q, k, x, m: x,
            "c": lambda q, k, x, m: torch.full_like(x, c),
        }[leaf]
    a = draw(integers(depth - 1))
    op = draw(st.sampled_from(["add", "sub", "mul", "div", "mod", "abs", "max", "min", "where"]))
    if op in ("mul", "div", "mod"):
        c = draw(st.integers(1, 4))
        return {
            "mul": lambda *v: a(*v) * (c - 2),
            "div": lambda *v: a(*v) // c,
            "mod": lambda *v: a(*v) % c,
        }[op]
    if op == "abs":
        return lambda *v: a(*v).abs()
    b = draw(integers(depth - 1))
    if op == "where":
        p = draw(booleans(depth - 1))
        return lambda *v: torch.where(p(*v), a(*v), b(*v))
    return {
        "add": lambda *v: a(*v) + b(*v),
        "sub": lambda *v: a(*v) - b(*v),
        "max": lambda *v: torch.maximum(a(*v), b(*v)),
        "min": lambda *v: torch.minimum(a(*v), b(*v)),
    }[op]


@st.composite
def booleans(draw: Any, depth: int) -> Callable[..., Tensor]:
    if depth == 0:
        return draw(
            st.sampled_from(
                [
                    lambda q, k, x, m: k <= q,
                    lambda q, k, x, m: m,
                    lambda q, k, x, m: q - k < 2,
                    lambda q, k, x, m: torch.ones_like(m).tril(-1),
                ]
            )
        )
    op = draw(st.sampled_from(["and", "or", "xor", "not", "where", "compare", "compare"]))
    if op == "compare":
        a, b = draw(integers(depth - 1)), draw(integers(depth - 1))
        f = draw(st.sampled_from([torch.le, torch.lt, torch.eq, torch.ne, torch.ge, torch.gt]))
        return lambda *v: f(a(*v), b(*v))
    p = draw(booleans(depth - 1))
    if op == "not":
        return lambda *v: ~p(*v)
    r = draw(booleans(depth - 1))
    if op == "where":
        s = draw(booleans(depth - 1))
        return lambda *v: torch.where(p(*v), r(*v), s(*v))
    return {
        "and": lambda *v: p(*v) & r(*v),
        "or": lambda *v: p(*v) | r(*v),
        "xor": lambda *v: p(*v) ^ r(*v),
    }[op]


@given(programs=st.lists(booleans(3), min_size=8, max_size=8), seed=st.integers(0, 3))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_programs(programs: list[Callable[..., Tensor]], seed: int) -> None:
    torch.manual_seed(seed)
    x, m = torch.randint(-3, 6, (4, 5)), torch.rand(4, 5) > 0.5

    def bound(program: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, m: program(torch.arange(4)[:, None], torch.arange(5)[None, :], x, m)

    traced = Traced([bound(p) for p in programs], [x, m])
    for at in range(len(programs)):
        traced.check(at, understood=False)
