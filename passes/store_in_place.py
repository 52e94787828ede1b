"""New keys and values go straight into the pages, instead of into a copy of all pages.

Before:  n = auto_functionalized_v2(store_kv, k, v, _all_bases=[k_pages, v_pages]); ...
         out = paged_attend(q, n[1], n[2], ...);  copy_(k_pages, n[1]);  copy_(v_pages, n[2])
After:   store_kv(k, v, k_pages, v_pages, slots);  out = paged_attend(q, k_pages, v_pages, ...)
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from kvtailor.kernels.ops import store_kv
from kvtailor.passes.effects import is_view
from kvtailor.passes.graph import as_int, as_node, aten, emit, functional_form, inherit, is_call
from kvtailor.passes.report import PassReport

# Keyword arguments of the functional form when both pages are whole inputs, not views of them.
_WHOLE = {"k", "v", "slot_mapping", "_k_pages_base_index", "_v_pages_base_index", "_all_bases"}

# Which result of the functional form is the new value of base i.
_FIRST_BASE = 1


def store_in_place(gm: fx.GraphModule) -> PassReport:
    """Functional store_kv of input pages becomes the op itself.

    Left alone: pages that are no whole input, that are not written back to it at the end, or
    whose old content is still read after the store.
    """
    report = PassReport()
    stores = [n for n in gm.graph.nodes if _is_store(n)]
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    why: dict[fx.Node, tuple[str, str]] = {}
    chains: dict[fx.Node, list[fx.Node]] = {}
    for store in stores:
        if set(store.kwargs) != _WHOLE:
            why[store] = ("view", "the pages are a view of an input")
            continue
        for base in _bases(store):
            page = _input_of(base)
            if page is None:
                why[store] = ("no-input", "the pages are not an input of the graph")
            else:
                chains.setdefault(page, []).append(store)
    for page, chain in chains.items():
        reason = _why_copied(page, chain, order)
        if reason is not None:
            for store in chain:
                why.setdefault(store, reason)
    # A store writes two inputs, an input may be written by several stores: all or none of them.
    spreading = True
    while spreading:
        spreading = False
        for chain in chains.values():
            bad = next((why[store] for store in chain if store in why), None)
            for store in chain:
                if bad is not None and store not in why:
                    why[store], spreading = bad, True
    for store in stores:
        if store in why:
            report.skip(str(store), *why[store])
            continue
        _rewrite(store)
        report.rewrites += 1
    for page, chain in chains.items():
        if not any(store in why for store in chain):
            for user in list(page.users):
                if is_call(user, aten.copy_) and user.args[0] is page and user.args[1] is page:
                    user.replace_all_uses_with(page)
                    gm.graph.erase_node(user)
    return report


def _is_store(node: fx.Node) -> bool:
    return node.target is functional_form and node.args[0] is store_kv


def _bases(store: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The pages of keys and of values before the store."""
    bases: Any = store.kwargs["_all_bases"]
    k, v = (as_int(store.kwargs[f"_{name}_pages_base_index"]) for name in "kv")
    return as_node(bases[k]), as_node(bases[v])


def _base_of(result: fx.Node) -> fx.Node | None:
    """The pages that this result of a store is the new value of, None for another result."""
    bases: Any = as_node(result.args[0]).kwargs["_all_bases"]
    index = as_int(result.args[1]) - _FIRST_BASE
    return as_node(bases[index]) if index >= 0 else None


def _input_of(base: fx.Node) -> fx.Node | None:
    """The input that `base` is, or is after some stores."""
    while base.target is operator.getitem and _is_store(as_node(base.args[0])):
        base = as_node(_base_of(base))
    return base if base.op in ("placeholder", "get_attr") else None


def _versions(page: fx.Node, chain: list[fx.Node]) -> list[fx.Node]:
    """The page's value before the chain, then after each store."""
    versions = [page]
    for store in chain:
        new = next((user for user in store.users if _base_of(user) is versions[-1]), None)
        if new is None:
            # The new value is not used at all.
            break
        versions.append(new)
    return versions


def _why_copied(
    page: fx.Node, chain: list[fx.Node], order: dict[fx.Node, int]
) -> tuple[str, str] | None:
    """Why the chain of stores into this input must not be in place; None when it may."""
    versions = _versions(page, chain)
    if len(versions) != len(chain) + 1:
        return "not-kept", "what was stored is dropped"
    back = [u for u in page.users if is_call(u, aten.copy_) and u.args[0] is page]
    if len(back) != 1 or back[0].args[1] is not versions[-1]:
        return "not-kept", "the pages are not written back to the input"
    for version, store in zip(versions, chain):
        for user in version.users:
            if user is store or user is back[0]:
                continue
            if order[user] > order[store]:
                return "old-read", "the pages from before the store are read after it"
            if is_view(user):
                return "old-read", "a view of the pages from before the store may be read after it"
    return None


def _rewrite(store: fx.Node) -> None:
    graph = store.graph
    pages = [_input_of(base) for base in _bases(store)]
    arguments = (store.kwargs["k"], store.kwargs["v"], *pages, store.kwargs["slot_mapping"])
    with graph.inserting_before(store):
        new = emit(graph, store_kv, *arguments)
    inherit(store, new)
    for user in list(store.users):
        base = _base_of(user)
        if base is not None:
            user.replace_all_uses_with(as_node(_input_of(base)))
        graph.erase_node(user)
    graph.erase_node(store)
