"""store_in_place: pages that are inputs are written where they lie."""

from __future__ import annotations

import pytest
import torch
from test_lower_paged_attention import HKV, HQ, SIZE, B, D, lowered, pool, skips

from kvtailor.kernels.ops import attend, gather_kv, paged_attend, store_kv
from kvtailor.passes.graph import aten

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_stores_of_one_pool_by_two_layers_are_in_place() -> None:
    torch.manual_seed(0)
    k_pages, table = pool(9)
    v_pages = k_pages * 2
    rows = torch.randn(2, 2, HKV, D)

    def fn(q, rows, k_pages, v_pages, table, slots):
        out = []
        for row, slot in zip(rows, slots):
            store_kv(row, row, k_pages, v_pages, slot)
            k = gather_kv(k_pages, table, 0, 9).transpose(1, 2)
            v = gather_kv(v_pages, table, 0, 9).transpose(1, 2)
            out.append(attend(q, k, v, scale=0.3))
        return out

    slots = table[:, 2].long() * SIZE
    slots = torch.stack([slots, slots])
    seen = lowered(fn, torch.randn(B, HQ, 1, D), rows, k_pages, v_pages, table, slots)
    assert (seen.paged.rewrites, seen.stored.rewrites) == (2, 2)
    assert seen.targets.count(store_kv) == 2 and seen.targets.count(paged_attend) == 2
    assert aten.copy_.default not in seen.targets


def test_keys_stored_over_are_not_read_later() -> None:
    """A layer that reads what was there before the next store keeps its gather, or its copy."""
    torch.manual_seed(0)
    k_pages, table = pool(9)
    v_pages, row = k_pages * 2, torch.randn(2, HKV, D)
    slots = table[:, 2].long() * SIZE

    def gathered_before(q, row, k_pages, v_pages, table, slots):
        k = gather_kv(k_pages, table, 0, 9).transpose(1, 2)
        v = gather_kv(v_pages, table, 0, 9).transpose(1, 2)
        store_kv(row, row, k_pages, v_pages, slots)
        return attend(q, k, v, scale=0.3)

    args = (torch.randn(B, HQ, 1, D), row, k_pages, v_pages, table, slots)
    seen = lowered(gathered_before, *args)
    assert skips(seen.paged) == ["stored-over"] and seen.stored.rewrites == 1

    def old_read(row, k_pages, v_pages, slots):
        old = k_pages.clone()
        store_kv(row, row, k_pages, v_pages, slots)
        return old * 2, k_pages[:1] + 1

    assert skips(lowered(old_read, row, k_pages, v_pages, slots).stored) == ["old-read"]

    def a_view(row, k_pages, v_pages, slots):
        store_kv(row, row, k_pages[1:], v_pages[1:], slots - SIZE)

    assert skips(lowered(a_view, row, k_pages, v_pages, slots).stored) == ["no-input"]

    def no_input(row, k_pages, slots):
        mine = k_pages.clone()
        store_kv(row, row, mine, k_pages, slots)
        return mine

    assert skips(lowered(no_input, row, k_pages, slots).stored) == ["no-input"]
