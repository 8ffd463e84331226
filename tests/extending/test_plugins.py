"""Plug-ins of one file each: routers, a trace format and a chunk policy, by every command that reads a scenario."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from latency_models.io.config_io import print_note
from schedulers.routing import ROUTERS, draws, reads_caches
from tests.live.tiny_validation import CONFIG
from tests.twin.serving.scenarios import records, scenario
from tests.twin.serving.scenarios import run as simulated
from twin.cli import run
from workloads.errors import BadInput

pytestmark = pytest.mark.usefixtures("own_registries")

PLUGINS = Path(__file__).parent / "plugins"
LOG = "".join(f"{0.05 * i:.2f} {10 + i % 7}+{3 + i % 4}\n" for i in range(12))
NIGHT = {"path": "night.log", "format": "gateway-log"}
ENGINE = {
    "num_gpu_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "chunking": {"policy": "alternating", "every": 2},
}  # fmt: skip


def plugins(*names: str) -> list[str]:
    return [str(PLUGINS / f"{name}.py") for name in names]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scenario's folder with the plug-ins, a trace and a model in it."""
    for plugin in PLUGINS.glob("*.py"):
        shutil.copy(plugin, tmp_path)
    (tmp_path / "night.log").write_text(LOG)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 128}))
    monkeypatch.chdir(tmp_path.parent)
    return tmp_path


def write(folder: Path, document: dict[str, Any]) -> Path:
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump({"plugins": ["longest_prefix.py", "alternating.py", "gateway_log.py"], **document}))
    return file


def serving(folder: Path, replicas: int) -> Path:
    workload = {"trace": NIGHT, "arrivals": {"process": "poisson", "rate": 40.0}, "requests": 40}
    system = {"layout": "colocated", "replicas": replicas, "routing": "longest_prefix"}
    return write(folder, {**scenario(), "workload": workload, "engine": ENGINE, "system": system})


def test_simulate_and_sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = serving(folder, 2)
    assert run(["simulate", str(file), "--json", "--no-figures"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["trace"] == "night"
    assert document["scenario"]["plugins"] == ["longest_prefix.py", "alternating.py", "gateway_log.py"]
    assert min(engine["steps"] for engine in document["engines"]) > 0
    setting = ["--set", "engine.chunking.every=1,6", "--jobs", "2", "--json", "--no-figures"]
    assert run(["sweep", str(file), *setting]) == 0
    often, seldom = json.loads(capsys.readouterr().out)["points"]
    assert seldom["summary"]["ttft"]["mean"] > often["summary"]["ttft"]["mean"]


def validation(folder: Path, **changes: Any) -> Path:
    workload = {"trace": NIGHT, "arrivals": {"process": "poisson"}, "requests": 12}
    document = {
        "schema": "twin.scenario/1", "kind": "validation", "name": "plugged", "workload": workload,
        "model": {"path": "config.json", "weights": "random"}, "engine": ENGINE,
        "system": {"routing": "longest_prefix"}, "loads": [0.5], "repeats": 2,
        "profiling": {"rounds": 10, "max_steps": 20, "max_prompt_tokens": 24, "max_output_tokens": 8},
    }  # fmt: skip
    return write(folder, document | changes)


def test_serve_live(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from live.server import launcher

    backends: list[Any] = []
    monkeypatch.setattr(launcher, "run", lambda backend, *rest, **options: backends.append(backend) or 0)
    print_note.cache_clear()
    model = ["--model", str(folder / "config.json"), "--random-weights"]
    assert run(["serve-live", *model, "--scenario", str(serving(folder, 1))]) == 0
    (backend,) = backends
    engine = backend.engine
    assert type(engine.core.chunk_policy).__name__ == "Alternating"
    assert engine.core.chunk_policy.every == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(": one engine is run, which gets every request: system.routing longest_prefix chooses nothing")
    assert run(["serve-live", *model, "--scenario", str(serving(folder, 3))]) == 0
    assert "scenario.yaml: 1 of the scenario's 3 engines is run, which gets" in capsys.readouterr().err


def test_validate(folder: Path, capsys: pytest.CaptureFixture[str], refusal) -> None:
    pytest.importorskip("torch")
    file = validation(folder)
    assert run(["validate", str(file), "--json", "--runs", str(folder / "runs")]) in (0, 4, 5)
    document = json.loads(capsys.readouterr().out)
    assert document["scenario"]["engine"]["chunking"] == {"policy": "alternating", "every": 2}
    (load,) = document["loads"]
    assert load["predicted"][0]["requests"] == load["requests"] > 0
    assert document["scenario"]["system"] == {
        "layout": "colocated", "routing": "longest_prefix", "replicas": 1, "kv_events": None, "autoscaling": None,
        "device": None, "frontend": {"route": 0.0, "deliver": 0.0, "hand_over": 0.0},
    }  # fmt: skip
    for settings, message in (
        ({"replicas": 2}, "system.replicas: got 2, expected 1: the live engine is alone"),
        ({"routing": "longest"}, "system.routing: got 'longest', expected one of least_loaded, "),
        ({"layout": "disaggregated"}, "system.link: expected this field, which is missing"),
        ({"layout": "scattered"}, "system.layout: got 'scattered', expected"),
    ):
        assert message in refusal("validate", str(validation(folder, system=settings)))


REFUSING = """
from schedulers.routing import ROUTERS
from workloads.errors import BadInput

@ROUTERS.register("refusing")
class Refusing:
    def __init__(self, draw):
        pass

    def choose(self, request, engines):
        raise BadInput(f"expected fewer engines than {len(engines)}", field="system.routing")
"""


@pytest.mark.parametrize("command", ["simulate", "validate"])
def test_a_router_is_asked_about_one_engine_too(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "validate":
        pytest.importorskip("torch")
    (folder / "refusing.py").write_text(REFUSING)
    changes: dict[str, Any] = {"plugins": ["refusing.py"], "engine": {"num_gpu_blocks": 64, "max_num_seqs": 4}}
    changes["system"] = {"routing": "refusing"}
    workload = {**scenario()["workload"], "arrivals": {"process": "poisson"}}
    file = validation(folder, **changes, workload=workload)
    if command == "simulate":
        file = write(folder, scenario() | changes)
    assert run([command, str(file), "--runs", str(folder / "runs")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("system.routing: expected fewer engines than 1")


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("nowhere.py", "plugins[0]: got 'nowhere.py', expected a readable file"),
        ("no_such_module", "plugins[0]: got 'no_such_module', expected a plug-in that can be imported: ModuleNotFound"),
        ("broken.py", "plugins[0]: got 'broken.py', expected a plug-in that can be imported: ZeroDivisionError"),
        (3, "plugins[0]: got 3, expected text"),
    ],
)
def test_a_plugin_that_cannot_be_used(plugin: object, message: str, tmp_path: Path, refusal) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert message in refusal("simulate", write(tmp_path, scenario(plugins=[plugin])))


def test_a_plugin_on_the_command_line_starts_from_the_current_folder(folder: Path, refusal) -> None:
    (folder / "elsewhere").mkdir()
    file = serving(folder / "elsewhere", 1)
    command = ["simulate", str(file), "--json", "--no-figures", "--set", f"workload.trace.path={folder}/night.log"]
    assert "expected a readable file" in refusal(*command)
    names = ", ".join(f"{folder.name}/{name}.py" for name in ("longest_prefix", "alternating", "gateway_log"))
    assert run([*command, "--set", f"plugins=[{names}]"]) == 0


WRONG = {
    "system.routing=wrong": """
from schedulers.routing import ROUTERS

@ROUTERS.register("wrong")
class Wrong:
    def __init__(self, draw):
        pass

    def choose(self, request, engines):
        return RETURNED
""",
    "engine.chunking={policy: wrong}": """
from schedulers.step_policies import CHUNK_POLICIES

@CHUNK_POLICIES.register("wrong")
class Wrong:
    def max_prefill_tokens(self, num_decodes, *cached):
        return RETURNED
""",
    "engine.preemption_policy=wrong": """
from schedulers.scheduling_policies import PREEMPTION_POLICIES

@PREEMPTION_POLICIES.register("wrong")
def wrong(running):
    return RETURNED
""",
}


@pytest.mark.parametrize("setting", WRONG)
@pytest.mark.parametrize("returned", ["None", "'engine-0'"])
def test_a_policy_that_returns_another_type(setting: str, returned: str, tmp_path: Path, refusal) -> None:
    (tmp_path / "wrong.py").write_text(WRONG[setting].replace("RETURNED", returned))
    engine = {"num_gpu_blocks": 16}  # so few that sequences are preempted
    workload = {"decode": {"distribution": "fixed", "mean": 64}}
    file = write(tmp_path, scenario(plugins=["wrong.py"], engine=engine, workload=workload))
    line = refusal("simulate", file, "--set", setting, "--no-figures", "--runs", tmp_path / "runs")
    assert "scenario.yaml: plugins: got ['wrong.py'], expected policies that return what their protocols say: " in line


def document(routing: str, **engine: Any) -> dict[str, Any]:
    return scenario(
        plugins=plugins("longest_prefix", "fewest_requests"),
        workload={
            "requests": 150,
            "arrivals": {"process": "poisson", "rate": 20.0},
            "prefill": {"distribution": "uniform", "low": 6, "high": 90},
            "prefixes": {"groups": 12, "tokens": 48, "block_tokens": 16},
        },
        engine={"num_gpu_blocks": 60, **engine},
        system={"layout": "colocated", "replicas": 4, "routing": routing},
    )


def test_more_of_the_prompts_is_found_in_the_caches() -> None:
    cached = {
        name: sum(records(simulated(document(name)))["cached_tokens"]) for name in ("round_robin", "longest_prefix")
    }
    assert cached["longest_prefix"] > 1.2 * cached["round_robin"]


@pytest.mark.parametrize("router", ["longest_prefix", "fewest_requests"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_it_sees_does_not_depend_on_fast_forwarding(router: str, asynchronous: bool, ranks: int) -> None:
    expected = document(router, async_scheduling=asynchronous, data_parallel_size=ranks)
    fast, slow = (simulated({**expected, "fast_forward": mode}) for mode in (True, False))
    assert records(fast) == records(slow)
    assert sum(log.events for log in fast.logs) < 0.9 * sum(log.events for log in slow.logs)


def test_counts_of_requests_keep_waits_short_where_turns_do_not() -> None:
    waits = {}
    for name in ("fewest_requests", "round_robin"):
        busy = document(name, max_num_seqs=2)
        busy["workload"]["arrivals"]["rate"] = 60.0
        columns = records(simulated(busy))
        waits[name] = sum(columns["scheduled"]) - sum(columns["arrival"])
    assert waits["fewest_requests"] < 0.8 * waits["round_robin"]


def test_a_router_says_whether_it_draws_and_reads_caches() -> None:
    simulated({**document("round_robin"), "workload": {**document("round_robin")["workload"], "requests": 1}})
    assert [name for name in ROUTERS if not draws(name)] == [
        "least_loaded", "round_robin", "prefix_aware", "session_affinity", "consistent_hashing",
        "weighted_least_loaded", "shortest_expected_delay", "fewest_requests",
    ]  # fmt: skip
    assert [name for name in ROUTERS if reads_caches(name)] == ["prefix_aware", "longest_prefix"]


def chunked(chunking: Any) -> dict[str, Any]:
    workload = {"arrivals": {"process": "poisson", "rate": 40.0}}
    return scenario(plugins=plugins("alternating"), workload=workload, engine={"chunking": chunking})


def test_a_scenario_names_it_with_its_parameters() -> None:
    often, seldom = (records(simulated(chunked({"policy": "alternating", "every": n})))["first_token"] for n in (1, 5))
    assert sum(seldom) > sum(often)


@pytest.mark.parametrize(
    ("chunking", "message"),
    [
        ({"policy": "alternating"}, "expected parameters of alternating: .*missing 1 required .*: 'every'"),
        ({"policy": "alternating", "every": 0}, "expected parameters of alternating: expected every of at least 1"),
        ({"policy": "sometimes"}, "expected one of static, slo, alternating"),
        ("static", "engine.chunking: got .static., expected a section of fields"),
        (512, "engine.chunking: got 512, expected a section"),
        ({"policy": "static"}, "engine.chunking.tokens: expected this field, which is missing"),
        ([512], "engine.chunking: got .*, expected a section"),
        ({"policy": ["static"]}, "engine.chunking.policy: got .*, expected text"),
    ],
)
def test_what_it_does_not_take_is_refused_in_one_line(chunking: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        simulated(chunked(chunking))
