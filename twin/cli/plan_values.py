"""Values of the flags of `twin plan` from their texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from workloads.errors import BadInput

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
