"""Nodes: engines are placed on whole machines, and an answer says how many."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.twin.planning.scenarios import document, kind, plan, question
from twin.planning.catalogue import CatalogueQuestion, scenario_of
from twin.planning.cost import Nodes, nodes_of, place
from twin.planning.space import candidate, families

ENGINES = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 20)), max_size=30)


@given(ENGINES, st.integers(1, 9))
def test_engines_share_nodes_and_never_lie_across_two_of_them(engines: list[tuple[str, int]], size: int) -> None:
    places = place((device, count, size) for device, count in engines)
    slots: dict[tuple[int, int], str] = {}
    for (device, count), spot in zip(engines, places, strict=True):
        assert spot.span == -(-count // size)
        assert spot.span > 1 or spot.first + count <= size
        whole = count if spot.span == 1 else spot.span * size
        for slot in range(spot.first, spot.first + whole):
            position = spot.node + slot // size, slot % size
            assert slots.setdefault(position, device) == device
            assert list(slots).count(position) == 1
    assert sum(count for _, count in engines) <= len(slots)
    assert len({node for node, _ in slots}) == max((spot.node + spot.span - 1 for spot in places), default=0)


def test_thirteen_gpus_are_two_nodes_of_eight() -> None:
    base = question(document(node_size=8, engines=[kind("one", 1, 2.0, 1.0), kind("five", 5, 2.0, 4.0)]))
    colocated = {family.kinds[0].name: family for family in families(base) if family.layout == "colocated"}
    assert nodes_of(base, candidate(base.spec, colocated["one"], (13,))) == [Nodes("X", 2, 8)]
    assert nodes_of(base, candidate(base.spec, colocated["five"], (3,))) == [Nodes("X", 3, 8)]
    apart = next(family for family in families(base) if [kind.name for kind in family.kinds] == ["five", "one"])
    assert nodes_of(base, candidate(base.spec, apart, (2, 6))) == [Nodes("X", 2, 8)]
    unsized = question(document())
    assert nodes_of(unsized, candidate(unsized.spec, families(unsized)[0], (13,))) == []


def test_a_gpu_of_the_catalogue_knows_its_node_and_engines_fit_it() -> None:
    catalogue = CatalogueQuestion(
        "llama-3.1-8b", ["h200"], {"ttft_p99": 2.0}, 1.0, prompt_tokens=500, answer_tokens=50, layouts=("colocated",)
    )
    base = question(scenario_of(catalogue))
    tp8 = next(family for family in families(base) if family.kinds[0].name == "tp8")
    assert nodes_of(base, candidate(base.spec, tp8, (2,))) == [Nodes("h200-sxm", 2, 8)]
    smaller = scenario_of(CatalogueQuestion(**{**vars(catalogue), "node_size": 4}))
    assert [engine["name"] for engine in smaller["plan"]["engines"]] == ["tp1", "tp2", "tp4"]
    assert smaller["plan"]["node_size"] == 4


def test_nodes_are_in_the_answer_and_its_files(command, refused) -> None:
    unsized = document(layouts=["colocated"], vary={})
    answer, without = plan(document(layouts=["colocated"], vary={}, node_size=3)), plan(unsized)
    best = answer["recommendation"]
    assert best["gpus_of_nodes"] == 3 * best["nodes"][0]["count"] >= best["gpus"]
    assert f"Take {best['gpus']} GPUs on {Nodes(**best['nodes'][0])} (" in answer["answer"]
    assert without["recommendation"]["nodes"] == []
    same = {key: value for key, value in best.items() if "nodes" not in key}
    assert same == {key: without["recommendation"][key] for key in same}
    table = command(unsized, "--node-size", "3", "--brief", "--write", "files")
    assert f" {best['nodes'][0]['count']} of 3 " in table
    header = Path("files/scenario.yaml").read_text()
    assert f"# GPUs: {best['devices']} on {Nodes(**best['nodes'][0])}." in header
    assert "--node-size: got 0, expected a whole number from 1 up" in refused(unsized, "--node-size", "0")
