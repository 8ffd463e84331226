"""Digests of vLLM's decisions, 16 bits a step, in one compressed file a version."""

from __future__ import annotations

import lzma
from array import array
from collections.abc import Iterator
from pathlib import Path

from tests.vllm_parity.workloads import FAMILIES, make_workload

FOLDER = Path(__file__).parent / "recorded"


def path_of(scheduler: str, folder: Path = FOLDER) -> Path:
    """The file of a version."""
    return folder / f"{scheduler}.xz"


def write(scheduler: str, digests: dict[tuple[str, int], list[int]], folder: Path = FOLDER) -> None:
    """Store the digests of all steps of workloads, by family and number."""
    words = array("H")
    for family in FAMILIES:
        seeds = sorted(seed for name, seed in digests if name == family)
        assert seeds == list(range(len(seeds)))
        words.append(len(seeds))
        for seed in seeds:
            words.append(len(digests[family, seed]))
            words.extend(digests[family, seed])
    folder.mkdir(exist_ok=True)
    path_of(scheduler, folder).write_bytes(lzma.compress(words.tobytes(), preset=9))


def read(scheduler: str) -> Iterator[tuple[str, int, list[int]]]:
    """Each workload's family, its number, and the digests of its steps."""
    words = array("H", lzma.decompress(path_of(scheduler).read_bytes()))
    position = 0
    for family in FAMILIES:
        count, position = words[position], position + 1
        for seed in range(count):
            steps, position = words[position], position + 1
            yield family, seed, list(words[position : position + steps])
            position += steps


def first_difference(scheduler: str, family: str, seed: int, expected: list[int], found: list[int]) -> str | None:
    """The first step whose digest differs, in words; None if there is none."""
    name = make_workload(family, seed).name
    for step, (one, two) in enumerate(zip(expected, found, strict=False), start=1):
        if one != two:
            return f"{scheduler}, workload {name!r}: step {step} differs from vLLM's"
    if len(expected) != len(found):
        return f"{scheduler}, workload {name!r}: vLLM takes {len(expected)} steps, not {len(found)}"
    return None
