"""Graphs as text, and what differs between two."""

from __future__ import annotations

from kvtailor.passes.text import graph_diff


def test_a_graph_diff_ignores_numbers_alone():
    before = "%0 = input\n%1 = aten::neg(%0)\n%2 = aten::exp(%1)\n%3 = aten::sin(%2)\nreturn %3"
    after = "%0 = input\n%1 = aten::exp(%0)\n%2 = aten::sin(%1)\nreturn %2"
    changed = [line for line in graph_diff(before, after).splitlines() if line[0] in "+-"]
    assert changed == ["- %1 = aten::neg(%0)"]
