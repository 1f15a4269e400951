"""What a click shows of a box: facts with their units, decisions in order, what feeds it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fusec.ir.decision import Decision
from fusec.tools.report.html import environment
from fusec.tools.report.html.details import facts_of, names_of, saving_of
from fusec.tools.report.html.document import Box, Document, Tensor, Timing
from fusec.tools.report.static_rules import Finding


@pytest.fixture(scope="module")
def kernel(document: Document) -> Box:
    """A kernel of three layers."""
    found = next(box for box in document.graphs[0].boxes if box.kind == "kernel")
    return replace(found, names=("k0", "k1", "k2"))


def panel(document: Document, box: Box, g: int = 0) -> str:
    """Return the markup of what is shown of a box of a graph, in one line."""
    made = environment().get_template("panel.html")
    return " ".join(made.render(box=box, graph=document.graphs[g], g=g).split())


def facts(box: Box) -> dict[str, str]:
    return dict(facts_of(box))


def test_bytes_are_each_launch_s_where_there_are_several(kernel: Box) -> None:
    of_three = replace(kernel, bytes=2048, share=0.125)
    assert facts(of_three)["bytes each"] == "2.05 kB, all 12.5% of the graph's"
    alone = facts(replace(of_three, names=("k0",)))
    assert alone["bytes"] == "2.05 kB, 12.5% of the graph's" and "bytes each" not in alone
    assert (alone["launches"], facts(of_three)["launches"]) == ("1", "3")


def test_times_say_whose_word_they_are(kernel: Box) -> None:
    found = facts(replace(kernel, timing=Timing(1234.5, "expected"), floor_us=12.34))
    assert (found["time"], found["memory's floor"]) == ("1.23 ms, expected", "12.3 us")


def test_operations_have_a_rate_where_bytes_are_moved(kernel: Box) -> None:
    counted = replace(kernel, operations=3.0e6, bytes=1000)
    assert facts(counted)["operations"] == "3 M, 3 k a byte"
    assert facts(replace(counted, bytes=0))["operations"] == "3 M"
    assert "operations" not in facts(replace(counted, operations=0.0))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999.0, "999"),
        (1000.0, "1 k"),
        (2.5e6, "2.5 M"),
        (1e9, "1 G"),
        (1e12, "1 T"),
        (1e16, "10000 T"),
    ],
)
def test_operations_are_counted_in_thousands(kernel: Box, value: float, text: str) -> None:
    assert facts(replace(kernel, operations=value, bytes=0))["operations"] == text


def test_facts_of_machine_code_follow_those_of_the_model(kernel: Box) -> None:
    found = facts_of(replace(kernel, facts=(("registers a thread", "32"),)))
    assert found[0] == ("kind", "kernel of fusec") and found[-1] == ("registers a thread", "32")


def test_many_names_are_cut_with_their_number(kernel: Box) -> None:
    twelve = tuple(f"k{n}" for n in range(12))
    assert names_of(replace(kernel, names=twelve)) == ", ".join(twelve)
    more = names_of(replace(kernel, names=(*twelve, "k12", "k13")))
    assert more == ", ".join(twelve) + " and 2 more"


def test_a_price_has_its_sign_and_what_is_not_legal_has_none(
    document: Document, kernel: Box
) -> None:
    made = [Decision("a", "b", True, "axes unify", saved) for saved in (2.5, -2.5, 0.0, None)]
    assert [saving_of(one) for one in made] == ["+2.5 us", "-2.5 us", "+0 us", ""]
    merged = panel(document, replace(kernel, decisions=(made[0],)))
    assert '<span class="yes">✓ merged +2.5 us </span><code>a with b</code>: axes unify' in merged
    chosen = Decision("mm", "fused", False, "timed", 1.0, against="ATen")
    apart = panel(document, replace(kernel, decisions=(chosen,)))
    assert "– not run +1 us </span><code>mm in fused</code>, not ATen: timed" in apart


def test_faults_stand_before_warnings(document: Document, kernel: Box) -> None:
    fault = Finding("forward", "k0", "spills", "88 bytes", "a smaller tile")
    warning = replace(fault, rule="thin-loop")
    found = panel(document, replace(kernel, faults=(fault,), warnings=(warning,)))
    assert (
        '<span class="fault">✕ fault, spills: </span>88 bytes. a smaller tile</li>'
        '<li><span class="warning">! warning, thin-loop: </span>88 bytes. a smaller tile</li>'
    ) in found.replace("</li> <li>", "</li><li>")
    of_gpu = replace(kernel, facts=(("registers a thread", "32"),))
    assert "no fault in its machine code" in panel(document, of_gpu)
    assert "Verdict" not in panel(document, replace(kernel, facts=(), faults=(), warnings=()))


def test_tensors_have_type_and_size(document: Document, kernel: Box) -> None:
    found = panel(document, replace(kernel, reads=(Tensor("x", "f32[8, 64]", 2048),), writes=()))
    assert '<th scope="row">x</th><td>f32[8, 64]</td><td>2.05 kB</td>' in found
    assert "<h3>Writes</h3><table></table>" in found


def test_decisions_are_merges_first_and_the_dearest_first(document: Document) -> None:
    mixed = 0
    for graph in document.graphs:
        for box in graph.boxes:
            ranks = [(not d.taken, -abs(d.saved_us or 0)) for d in box.decisions]
            assert ranks == sorted(ranks)
            own = [d for d in graph.report.decisions if d in box.decisions]
            mixed += own != list(box.decisions)
    assert mixed  # they have another order in the graph


def test_what_feeds_a_box_is_named_by_its_place_in_the_page(document: Document) -> None:
    for g, graph in enumerate(document.graphs):
        for box in graph.boxes:
            links = re.findall(r'data-box="([^"]*)"', panel(document, box, g))
            assert links == [f"g{g}-b{other}" for other in (*box.fed_by, *box.feeds)]
