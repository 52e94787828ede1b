"""``kvtailor inspect A --against B``: what differs, and what is no B."""

from __future__ import annotations

import json

import pytest

from kvtailor.cli.against import Change, changed, compare, other_side
from kvtailor.cli.inspection import InspectError, Request, run_inspection

REQUEST = Request("hf:llama", tokens=12, batch=1)


@pytest.fixture(scope="module")
def found() -> dict:
    return run_inspection(REQUEST).as_dict()


def test_the_same_options_differ_in_nothing(found, tmp_path):
    path = tmp_path / "before.json"
    path.write_text(json.dumps(found))
    assert compare(found, other_side(REQUEST, str(path))) == []


def test_a_pass_that_is_off_shows_where_it_acted(found):
    changes = compare(found, other_side(REQUEST, "narrow_rows=off"))
    last = "model.layers.3.self_attn"
    assert Change("graph 0", last, "query_rows", 1, "all") in changes
    assert (
        Change(
            "graph 0", "narrow_rows", "rewrites", found["graphs"][0]["passes"][3]["rewrites"], None
        )
        in changes
    )
    assert not any(c.at == "layers.0.self_attn" for c in changes)


def test_another_shape_of_graphs_is_one_line_each(found):
    other = {"graphs": [*found["graphs"], {"captured": False, "reason": "export: no"}]}
    changes = compare(found, other)
    assert changes[0] == Change("", "", "graphs", 1, 2)
    assert Change("graph 1", "", "reason", None, "export: no") in changes
    gone = {"graphs": [{**found["graphs"][0], "attention": []}]}
    assert Change("graph 0", "model.layers.0.self_attn", "attention", "causal", None) in compare(
        found, gone
    )


def test_changes_to_the_request():
    new = changed(REQUEST, "narrow_rows=off, cache=static,logits-to-keep=0,prove_masks=on")
    assert (new.disable, new.cache, new.logits_to_keep) == (("narrow_rows",), "static", 0)
    assert changed(new, "narrow_rows=on").disable == ()


@pytest.mark.parametrize(
    "against, message",
    [
        ("narrow_rows", "changes like narrow_rows=off, got 'narrow_rows'"),
        ("narow_rows=off", "unknown option or pass 'narow_rows'; did you mean 'narrow_rows'?"),
        ("narrow_rows=no", "unknown state of narrow_rows 'no'"),
        ("tokens=many", "tokens must be a whole number, got 'many'"),
        ("model=hf:t5", "unknown option or pass 'model'"),
        ("missing.json", "cannot read missing.json: No such file"),
    ],
)
def test_what_is_no_other_side(against, message):
    with pytest.raises(InspectError, match=message.replace("?", r"\?")):
        other_side(REQUEST, against)


@pytest.mark.parametrize("text", ["", "[]", '{"graphs": 3}', "{"])
def test_a_file_that_is_no_inspection(text, tmp_path):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(InspectError, match="must be what kvtailor inspect --json prints"):
        other_side(REQUEST, str(path))
