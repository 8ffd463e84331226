"""The options of `twin plan`, in groups, and how their values are read: each field is a flag with its help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from twin.cli.console import Flag, Settings
from workloads.errors import BadInput

Texts = Annotated[list[str] | None, Parameter(negative=())]


class Options:
    """Base class of groups of flags."""

    @property
    def flags(self) -> dict[str, Any]:
        """The values by the names of their flags; None of one that is not given."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]  # subclasses are dataclasses
        return {f"--{name.replace('_', '-')}": getattr(self, name) or None for name in names}


@Parameter(name="*")
@dataclass(frozen=True)
class QuestionOptions:
    """Changes of the scenario's question."""

    set_: Settings = None
    """Change any field, key=value. Example: --set plan.limits.gpus=16"""

    slo: Texts = None
    """Goal, in place of those in the file: --slo ttft_p99=1s --slo tpot_p99=40ms --slo classify.e2e_p95=200ms"""

    rate: Texts = None
    """Requests per second; with --have and several models MODEL=RATE of each. Without it, a --trace's own times."""

    trace: Path | None = None
    """Trace whose lengths to use, and whose arrivals where the scenario replays."""


@Parameter(name="*")
@dataclass(frozen=True)
class CatalogueOptions(Options):
    """A question without a scenario; None where a flag is not given."""

    model: Texts = None
    """Without a scenario: a built-in name, Hugging Face id, a model file or a config.json; with --have several."""

    have: Texts = None
    """GPUs that there are, in place of --gpu, several kinds in turn: --have h100=2 --have l40s=4. What do they serve?
Without --rate as much as they can."""

    gpu: Texts = None
    """Without a scenario: a GPU of the hardware catalogue or the begin of its name (h200), or a file; several are
tried one by one."""

    price: Texts = None
    """Price of a GPU per hour: --price 3.5, or h200=3.5 where there are several. Makes cost the objective."""

    prompt_tokens: float | None = None
    """Without a trace: mean tokens of prompts, log-normal."""

    answer_tokens: float | None = None
    """Without a trace: mean tokens of answers, log-normal."""

    hit_rate: float | None = None
    """Share of prompt tokens that prefix caches supply. Default: as the ids of the trace have it, else 0."""

    tensor_parallel: str | None = None
    """Without a scenario: GPUs that share each layer, to try. Default: 1,2,4,8."""

    pipeline_parallel: str | None = None
    """Without a scenario: pipeline stages of an engine to try, each of this many GPUs. Default: 1."""

    data_parallel: str | None = None
    """Without a scenario: attention replicas of an engine to try, which share whole experts, over nodes where they are
many. Default: 1, and for latent attention (DeepSeek) also engines of 8 replicas of one GPU."""

    layout: str | None = None
    """Without a scenario: colocated, disaggregated (prefill and decode apart), afd (prefill engines and AFD bundles
that decode), with commas between. Default: colocated,disaggregated."""

    weights: str | None = None
    """Without a scenario: formats of weights to try (bf16, fp8, …). Default: as the model is published."""

    cache: str | None = None
    """Without a scenario: the format of the KV cache. Default: bf16."""

    chunk: str | None = None
    """Without a scenario: values of max_num_batched_tokens to try. Default: 512,1024,2048,4096,8192."""


@Parameter(name="*")
@dataclass(frozen=True)
class ObjectiveOptions(Options):
    """The objective of a plan."""

    max_gpus: int | None = None
    """At most this many GPUs in all."""

    node_size: int | None = None
    """GPUs of a node, shown beside GPUs. Default: as the hardware files say, 8 for most."""

    confidence: float | None = None
    """Confidence of the plan, given the error of the step times: a share of their draws, 0.5 to 1. Default: 0.9."""

    commitment: Texts = None
    """Beside the price: a lower one for a commitment, --commitment 1y=-30% --commitment 3y=-55%."""

    api_price: str | None = None
    """Beside the price: an API's for a million tokens, in=0.5,out=1.5, and the rate at which both cost the same."""

    objective: str | None = None
    """gpus, cost_per_hour, cost_per_million_tokens, or throughput: the highest rate on --max-gpus."""


@Parameter(name="*")
@dataclass(frozen=True)
class AnswerOptions(Options):
    """The kind of answer and its files."""

    brief: Flag = False
    """Leave out headroom and what would change the answer."""

    cpu_limit: float | None = None
    """CPU seconds after which the plan ends with what it has decided: bounds, and the cheapest deployment so far. Exit
code 5 if none is confirmed by then; the same command without the limit goes on."""

    what: Texts = None
    """What if, in a row beside the answer, may be given several times: --what rate=+50% --what prompts=2x,answers=0.5x
--what hit_rate=0.2 (share of prompt tokens that prefix caches supply)."""

    max_load: Flag = False
    """The highest rate at which the scenario's own deployment (engine, step_time, system) meets the goals, with an
interval, in place of a search."""

    candidate: Annotated[list[Path] | None, Parameter(negative=())] = None
    """Scenario file whose deployment (engine, step_time, system) competes with those of the plan; its row is in the
table even if it fails. Also the folder that AIConfigurator's --save-dir names, or a best_config_topn.csv in it.
May be given several times."""

    write: Path | None = None
    """Folder for the recommended deployment: scenarios that twin simulate reproduces, and launch commands."""


@Parameter(name="*")
@dataclass(frozen=True)
class DayOptions(Options):
    """Fleets for a day, in place of one deployment."""

    day: str | None = None
    """Compare fixed with autoscaled fleets of the scenario over a day: a CSV file time,rate (seconds, requests/s), or
profile: the scenario's own arrivals."""

    minutes: float | None = None
    """With --day: share of minutes in which the P99 goals must hold. Default: 0.95."""

    mttf: str | None = None
    """With --day: mean time from one outage of an engine to the next (12h), exponential."""

    mttr: str | None = None
    """With --day: mean time until it is back (5min), exponential. Default: the start-up of an engine."""

    spot: str | None = None
    """With --day: also try engines at a share of the price, with outages of their own: price=0.4,mttf=2h"""

    energy_price: float | None = None
    """With --day: price of a kWh, added to the cost of engines; their devices need a power_limit."""

    max_kw: float | None = None
    """With --day: kW that all engines together may draw at their power limits."""

    days: int | None = None
    """With --day: days with other seeds, on which all fleets are compared. Default: 3."""


Value = TypeVar("Value")


def required(flag: str, value: Value | None) -> Value:
    """The value of a flag that a question without a scenario needs."""
    if value is None:
        raise BadInput("expected a scenario file, or --model, --gpu, --rate, --slo and --trace", field=flag)
    return value


def single(flag: str, texts: list[str] | None, instead: str) -> str | None:
    """The one value of a flag that may be given several times."""
    if texts is not None and len(texts) > 1:
        raise BadInput(f"expected one; several only {instead}", field=flag, value=texts[1])
    return texts[0] if texts else None


def rate_of_text(texts: list[str] | None) -> float | None:
    """The rate of a question about one model."""
    text = single("--rate", texts, "with --have")
    return None if text is None else _number("--rate", text, text, "requests per second")


def whole_numbers(flag: str, text: str) -> list[int]:
    """Whole numbers with commas between."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BadInput("expected whole numbers with commas between", field=flag, value=text)
    return [int(part) for part in parts]


def by_name(flag: str, texts: Iterable[str], expected: str, names: Iterable[str] = ()) -> dict[str, float]:
    """Numbers of at least 0 by name, of `NAME=NUMBER`; one without a name is that of all `names`."""
    numbers: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        if not equals and not names:
            raise BadInput(f"expected {expected}", field=flag, value=text)
        value = _number(flag, text, number, expected)
        numbers |= {name: value} if equals else dict.fromkeys(names, value)
    return numbers


def counts_by_name(flag: str, texts: Iterable[str], expected: str) -> dict[str, int]:
    """Whole numbers from 1 up by name, of `NAME=NUMBER`."""
    numbers = by_name(flag, texts, expected)
    for name, number in numbers.items():
        if number != int(number) or not 1 <= number <= 10_000:
            raise BadInput("expected a whole number from 1 to 10000", field=flag, value=f"{name}={number:g}")
    return {name: int(number) for name, number in numbers.items()}


def commitments_of_texts(texts: list[str] | None) -> dict[str, float] | None:
    """Shares of a price by commitment, of `1y=-30%`."""
    expected = "a lower price for a commitment, as 1y=-30%"
    if texts is None:
        return None
    if not all("=-" in text and text.endswith("%") for text in texts):
        raise BadInput(f"expected {expected}", field="--commitment", value=", ".join(texts))
    plain = [text.replace("=-", "=").removesuffix("%") for text in texts]
    return {name: 1 - number / 100 for name, number in by_name("--commitment", plain, expected).items()}


def api_price_of_text(text: str | None) -> dict[str, float] | None:
    """The price of an API for a million tokens, of `in=0.5,out=1.5`."""
    if text is None:
        return None
    numbers = by_name("--api-price", text.split(","), "in=PRICE,out=PRICE of a million tokens")
    if numbers.keys() != {"in", "out"}:
        raise BadInput("expected in=PRICE,out=PRICE of a million tokens", field="--api-price", value=text)
    return {"input": numbers["in"], "output": numbers["out"]}


def seconds_of_text(flag: str, text: str) -> float:
    """Seconds above 0 of `90`, `90s`, `5min`, `12h` or `30d`."""
    units = {"min": 60.0, "h": 3600.0, "d": 86400.0, "s": 1.0}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    value = _number(flag, text, text.removesuffix(unit), expected := "a time above 0, as 90s, 5min, 12h or 30d")
    if not value:
        raise BadInput(f"expected {expected}", field=flag, value=text)
    return value * units.get(unit, 1.0)


def spot_of_text(text: str) -> tuple[float, float]:
    """The share of the price and the mean time to an outage, seconds, of `price=0.4,mttf=2h`."""
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    if parts.keys() != {"price", "mttf"}:
        raise BadInput("expected price=SHARE,mttf=TIME", field="--spot", value=text)
    price = _number("--spot", text, parts["price"], "a share of the price, as price=0.4")
    return price, seconds_of_text("--spot", parts["mttf"])


def _number(flag: str, text: str, number: str, expected: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadInput(f"expected {expected}", field=flag, value=text)
    return value
