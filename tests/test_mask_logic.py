"""The normal form: text of what it decides, and soundness by brute force over small domains."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Integer
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from kvtailor.passes.masks.integers import Atom, TooComplex, fdiv
from kvtailor.passes.masks.logic import (
    FALSE,
    TRUE,
    And,
    Bool,
    Eq,
    Ge,
    Lit,
    Logic,
    Ne,
    Or,
    conjuncts,
)
from kvtailor.passes.masks.text import Names, predicate_text

TQ, TK = 4, 6


class World:
    """A Logic over b, h, q < 4, k < 6 with two unknown tensors: x of ints, m of bools."""

    def __init__(self, tq: Any = TQ, tk: Any = TK, env: ShapeEnv | None = None) -> None:
        self.logic = Logic(env)
        sizes = (Integer(2), Integer(1), sympy.sympify(tq), sympy.sympify(tk))
        self.axes = tuple(self.logic.index(n, size) for n, size in zip("bhqk", sizes))
        self.b, self.h, self.q, self.k = self.axes
        graph = fx.Graph()
        self.x_node, self.m_node = graph.placeholder("x"), graph.placeholder("m")

    def x(self, at: Any) -> sympy.Symbol:
        return self.logic.integer(Atom(self.x_node, (sympy.sympify(at),)))

    def m(self, at: Any) -> Bool:
        return Lit(Atom(self.m_node, (sympy.sympify(at),)))

    def text(self, p: Bool) -> str:
        return predicate_text(p, Names(self.logic, self.axes), "x")


@pytest.fixture
def w() -> World:
    return World()


def show(w: World, p: Bool) -> str:
    return "True" if p == TRUE else "False" if p == FALSE else w.text(p)


# --- what is decided


def test_intervals_decide(w: World) -> None:
    logic, q, k = w.logic, w.q, w.k
    assert logic.ge(q) == TRUE
    assert logic.ge(k - 6) == FALSE
    assert logic.ge(8 - q - k) == TRUE
    assert logic.ge(7 - q - k) != TRUE
    assert logic.eq(k + 1) == FALSE
    assert logic.eq(q - q) == TRUE


def test_an_upper_bound_of_zero_is_an_equality(w: World) -> None:
    """not (q >= 1) is q == 0: what the first row of a diff needs."""
    logic = w.logic
    first = logic.negate(logic.ge(w.q - 1))
    assert first == Eq(w.q)
    assert logic.negate(first) == Ge(w.q - 1)


def test_coefficients_are_divided_out(w: World) -> None:
    logic, q, k = w.logic, w.q, w.k
    assert logic.ge(3 * q - 3 * k + 2) == logic.ge(q - k)
    assert logic.eq(2 * q - 2 * k + 1) == FALSE
    assert logic.eq(k - q) == logic.eq(q - k)


def test_implied_conjuncts_go(w: World) -> None:
    """k <= 3 says nothing under k <= q, q being 3 at most."""
    logic, q, k = w.logic, w.q, w.k
    assert logic.all_of(logic.ge(q - k), logic.ge(3 - k)) == logic.ge(q - k)
    assert logic.all_of(logic.ge(3 - k), logic.ge(q - k)) == logic.ge(q - k)
    assert logic.all_of(logic.ge(q - k), logic.ge(k - q - 1)) == FALSE
    assert logic.any_of(logic.ge(q - k), logic.ge(k - q - 1)) == TRUE


def test_absolute_values_are_two_bounds(w: World) -> None:
    logic, d = w.logic, w.q - w.k
    near = logic.where(logic.ge(d), logic.ge(2 - d), logic.ge(2 + d))
    assert set(conjuncts(near)) == {logic.ge(2 - d), logic.ge(2 + d)}
    far = logic.where(logic.ge(d), logic.ge(d - 3), logic.ge(-d - 3))
    assert far == logic.negate(near)


def test_a_where_chain_reduces(w: World) -> None:
    logic, c, p = w.logic, w.m(w.k), w.logic.ge(w.q - w.k)
    assert logic.where(c, logic.where(p, TRUE, FALSE), FALSE) == logic.all_of(c, p)
    assert logic.where(c, p, p) == p
    assert logic.where(c, TRUE, logic.where(c, FALSE, p)) == logic.any_of(c, p)
    # A clause loses what the other conjuncts rule out.
    assert logic.all_of(c, logic.any_of(logic.negate(c), p)) == logic.all_of(c, p)
    assert logic.all_of(c, logic.any_of(c, p)) == c


def test_floor_is_canonical(w: World) -> None:
    logic, q, k = w.logic, w.q, w.k
    assert logic.floor(8 * k + 3, 8) == k
    assert logic.floor(k + 20, 8) == 2 + logic.floor(k + 4, 8)
    assert logic.floor(q, 4) == 0
    assert logic.floor(q - 4, 4) == -1
    assert logic.floor(k - w.x(w.b) + 8, 8) == 1 + fdiv(k - w.x(w.b), Integer(8))
    assert logic.floor(k, 1) == k
    assert (logic.lower(fdiv(k, Integer(4))), logic.upper(fdiv(k, Integer(4)))) == (0, 1)


def test_replace_reaches_atoms_and_floors(w: World) -> None:
    logic, q, k = w.logic, w.q, w.k
    e = logic.floor(w.x(k) + k, 4) + w.x(k - 1)
    assert logic.replace(e, {k: q}) == fdiv(w.x(q) + q, Integer(4)) + w.x(q - 1)
    assert logic.replace(e, {w.b: Integer(0)}) == e
    rise = {w.x(k): w.x(q) + k - q}
    assert logic.rebuild(logic.ge(w.x(q) - w.x(k)), rise) == logic.ge(q - k)


def test_unbounded_keeps_what_sizes_imply(w: World) -> None:
    logic, wide = w.logic, w.k - w.q + 6
    assert logic.ge(wide) == TRUE
    logic.bounded = False
    assert logic.ge(wide) == Ge(wide)
    assert logic.ge(w.q) == TRUE
    logic.bounded = True
    assert logic.ge(wide) == TRUE


def test_too_complex_is_refused(w: World) -> None:
    logic = w.logic
    with pytest.raises(TooComplex, match="too many literals"):
        logic.all_of(*(logic.eq(w.x(i) - i) for i in range(70)))
    with pytest.raises(TooComplex, match="not an integer"):
        logic.ge(w.k / 2)
    with pytest.raises(TooComplex, match="not an integer"):
        logic.floor(w.k / 2, 2)


def test_dependencies(w: World) -> None:
    logic = w.logic
    assert logic.deps(logic.all_of(logic.ge(w.q - w.x(w.b)), w.m(w.k))) == {w.q, w.b, w.k}
    assert logic.has_atoms(w.m(0))
    assert not logic.has_atoms(logic.ge(w.q - w.k))
    assert logic.deps(TRUE) == frozenset()


# --- symbolic sizes


def symbolic() -> tuple[World, Any, Any]:
    """A World over symbolic Tq and Tk = Tq + past, both from a shape environment."""
    env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    mode = FakeTensorMode(shape_env=env)
    fake = mode.from_tensor(torch.zeros(5, 7), symbolic_context=context)
    tq, past = (n.node.expr for n in fake.shape)
    return World(tq, tq + past, env), tq, past


def test_sizes_cancel() -> None:
    w, tq, past = symbolic()
    logic, q, k = w.logic, w.q, w.k
    assert logic.ge(tq + past - 1 - k) == TRUE
    assert logic.ge(past + q - k) != TRUE
    # Sizes are at least 2.
    assert logic.ge(past - 1) == TRUE
    assert logic.ge(past - 3) == Ge(past - 3)
    causal = logic.ge(q + past - k)
    assert logic.all_of(causal, logic.ge(tq + past - 1 - k)) == causal


def test_maxima_of_sizes_are_carried() -> None:
    from torch.utils._sympy.functions import Max

    w, _, past = symbolic()
    logic, q, k = w.logic, w.q, w.k
    clipped = Max(0, past - 7)
    p = q + past - clipped
    assert logic.ge(k + clipped) == TRUE
    window = logic.all_of(logic.ge(p - k), logic.ge(k - p + 7))
    assert set(conjuncts(window)) == {Ge(sympy.expand(p - k)), Ge(sympy.expand(k - p + 7))}


def test_guards_between_sizes_count() -> None:
    w, tq, past = symbolic()
    assert not w.logic.nonnegative(past - tq)
    w, tq, past = symbolic()
    env = w.logic.shape_env
    assert env is not None
    a, b = (env.create_symintnode(s, hint=n) for s, n in ((tq, 5), (past, 7)))
    assert bool(b >= a), "a guard, as Dynamo makes them"
    assert w.logic.nonnegative(past - tq)


# --- text


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda w: w.logic.ge(w.q - w.k), "k <= q"),
        (lambda w: w.logic.ge(w.q + 3 - w.k), "k <= q + 3"),
        (lambda w: w.logic.ge(w.k - w.q + 1), "k >= q - 1"),
        (lambda w: w.logic.ge(3 - w.k), "k < 4"),
        (lambda w: w.logic.ge(w.x(w.b) - 1 - w.k), "k < x[b]"),
        (lambda w: w.logic.eq(w.x(w.q) - w.x(w.k)), "x[q] == x[k]"),
        (lambda w: w.logic.ne(w.x(w.k)), "x[k]"),
        (lambda w: w.logic.ne(w.x(w.k) - 2), "x[k] != 2"),
        (lambda w: w.logic.negate(w.m(w.k + 1)), "~x[k + 1]"),
        (lambda w: w.logic.eq(w.logic.floor(w.k, 4) - 1), "k//4 == 1"),
        (
            lambda w: w.logic.all_of(w.m(w.q), w.logic.any_of(w.logic.ge(w.q - w.k), w.m(w.k))),
            "x[q] & or[k <= q, x[k]]",
        ),
    ],
)
def test_text(make: Callable[[World], Bool], expected: str, w: World) -> None:
    assert w.text(make(w)) == expected


# --- brute force


@st.composite
def expressions(draw: Any) -> Callable[[World], sympy.Expr]:
    """A linear expression over q, k, x[q], x[k] and floors."""
    a, b, c = (draw(st.integers(-2, 2)) for _ in range(3))
    d = draw(st.sampled_from(["none", "none", "xq", "xk", "floor_k", "floor_x"]))
    n = draw(st.integers(2, 3))

    def make(w: World) -> sympy.Expr:
        extra = {
            "none": Integer(0),
            "xq": w.x(w.q),
            "xk": w.x(w.k),
            "floor_k": w.logic.floor(w.k + c, n),
            "floor_x": w.logic.floor(w.x(w.k) - w.q, n),
        }[d]
        return sympy.expand(a * w.q + b * w.k + c + extra)

    return make


@st.composite
def predicates(draw: Any, depth: int) -> Callable[[World], tuple[Bool, Any]]:
    """Builds (normal form, plain tree) side by side; the tree is ("op", ...) to evaluate."""
    kind = draw(st.sampled_from(["ge", "eq", "ne", "lit", "and", "or", "not", "where"]))
    if depth == 0 or kind in ("ge", "eq", "ne", "lit"):
        if kind == "lit":
            at_q = draw(st.booleans())
            return lambda w: (w.m(w.q if at_q else w.k), ("lit", w.m(w.q if at_q else w.k)))
        op, e = draw(st.sampled_from(["ge", "eq", "ne"])), draw(expressions())
        return lambda w: (getattr(w.logic, op)(e(w)), (op, e(w)))
    parts = [draw(predicates(depth - 1)) for _ in range({"not": 1, "where": 3}.get(kind, 2))]

    def make(w: World) -> tuple[Bool, Any]:
        built = [p(w) for p in parts]
        forms = [f for f, _ in built]
        op = {
            "and": w.logic.all_of,
            "or": w.logic.any_of,
            "not": w.logic.negate,
            "where": w.logic.where,
        }[kind]
        return op(*forms), (kind, *(t for _, t in built))

    return make


class Facts:
    """Truth at one (q, k), given the contents of x and m."""

    def __init__(self, w: World, q: int, k: int, x: list[int], m: list[bool]) -> None:
        self.w, self.env, self.x, self.m = w, {w.q: q, w.k: k}, x, m

    def integer(self, e: sympy.Expr) -> int:
        def value(t: sympy.Expr) -> sympy.Expr:
            if t in self.env:
                return Integer(self.env[t])
            if t in self.w.logic.atoms:
                return Integer(self.x[self.integer(self.w.logic.atoms[t].index[0])])
            if isinstance(t, fdiv):
                return Integer(int(value(t.args[0])) // int(t.args[1]))
            return t if not t.args else t.func(*map(value, t.args))

        return int(value(e))

    def form(self, p: Bool) -> bool:
        if isinstance(p, Lit):
            return self.m[self.integer(p.atom.index[0])] == p.positive
        if isinstance(p, (And, Or)):
            return (all if isinstance(p, And) else any)(self.form(a) for a in p.args)
        assert isinstance(p, (Ge, Eq, Ne))
        return self.literal({Ge: "ge", Eq: "eq", Ne: "ne"}[type(p)], p.e)

    def literal(self, op: str, e: sympy.Expr) -> bool:
        n = self.integer(e)
        return {"ge": n >= 0, "eq": n == 0, "ne": n != 0}[op]

    def tree(self, t: Any) -> bool:
        op, *args = t
        if op in ("ge", "eq", "ne"):
            return self.literal(op, args[0])
        if op == "lit":
            return self.form(args[0])
        if op == "and":
            return all(map(self.tree, args))
        if op == "or":
            return any(map(self.tree, args))
        if op == "not":
            return not self.tree(args[0])
        return self.tree(args[1]) if self.tree(args[0]) else self.tree(args[2])


def everywhere(w: World, x: list[int], m: list[bool]) -> list[Facts]:
    return [Facts(w, q, k, x, m) for q, k in itertools.product(range(TQ), range(TK))]


contents = st.tuples(
    st.lists(st.integers(-3, 5), min_size=TK, max_size=TK),
    st.lists(st.booleans(), min_size=TK, max_size=TK),
)


@given(make=predicates(3), data=contents)
@settings(max_examples=300, deadline=None)
def test_normal_form_equals_what_it_was_built_from(make: Any, data: Any) -> None:
    w = World()
    form, tree = make(w)
    no = w.logic.negate(form)
    for facts in everywhere(w, *data):
        assert facts.form(form) == facts.tree(tree), w.text(form)
        assert facts.form(no) != facts.tree(tree)


@given(first=predicates(1), second=predicates(1), data=contents)
@settings(max_examples=300, deadline=None)
def test_implication_is_sound(first: Any, second: Any, data: Any) -> None:
    w = World()
    (p, _), (q, _) = first(w), second(w)
    implied, apart = w.logic.implies(p, q), w.logic.disjoint(p, q)
    for facts in everywhere(w, *data):
        if facts.form(p):
            assert facts.form(q) or not implied
            assert not (facts.form(q) and apart)


@given(make=predicates(2), data=contents, shift=st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_rebuild_equals_substitution(make: Any, data: Any, shift: int) -> None:
    """k replaced by q + shift, also inside atoms."""
    w = World()
    form, _ = make(w)
    moved = w.logic.rebuild(form, {w.k: w.q + shift})
    for q in range(TQ):
        there = Facts(w, q, q + shift, *data)
        assert Facts(w, q, 0, *data).form(moved) == there.form(form)


@given(e=expressions(), data=contents)
@settings(max_examples=200, deadline=None)
def test_bounds_hold(e: Any, data: Any) -> None:
    w = World()
    expression = e(w)
    low, high = w.logic.lower(expression), w.logic.upper(expression)
    for facts in everywhere(w, *data):
        value = facts.integer(expression)
        assert low is None or low <= value
        assert high is None or value <= high
