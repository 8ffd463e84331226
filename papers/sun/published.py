"""The SUN paper's published serving runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from papers.data import published, records

ISOLATED: Final = "isolated"
SHARED: Final = "shared"

Placement = Literal["isolated", "shared"]


@dataclass(frozen=True)
class ConcurrencyRow:
    """A row of Table 4: seconds, tokens, output tokens a second of all clients. Bits are the weights'; the cache has
    16.
    """

    model: str
    method: str
    prefill_bits: int
    decode_bits: int
    prompt: int
    answer: int
    concurrency: int
    ttft: float
    tpot: float
    throughput: float

    @property
    def tpot_of_throughput(self) -> float:
        """TPOT by the other column: each of c clients gets one answer in TTFT + (n - 1) TPOT seconds."""
        return (self.concurrency * self.answer / self.throughput - self.ttft) / (self.answer - 1)

    @property
    def decoding(self) -> float:
        """The share of a request's time in the system in which it decodes."""
        decoding = (self.answer - 1) * self.tpot
        return decoding / (self.ttft + decoding)


@dataclass(frozen=True)
class PoolRow:
    """Decode workers of four models under one load (4.3): tokens a second and GPU, and change of interactivity."""

    workers: int
    placement: str
    throughput_per_worker: float
    interactivity_change: float


@dataclass(frozen=True)
class AccuracyRow:
    """A printed accuracy, in per cent: tables 1 and 3, and figure 2 as section 3.2.2 says; `papers.sun.variants`."""

    where: str
    model: str
    variant: str
    benchmark: str
    accuracy: float


def accuracy_rows() -> list[AccuracyRow]:
    return records(AccuracyRow, "sun", "accuracy")


def concurrency_rows() -> list[ConcurrencyRow]:
    return records(
        ConcurrencyRow, "sun", "concurrency", prefill_bits="weight_bits_prefill", decode_bits="weight_bits_decode",
        prompt="isl", answer="osl", ttft="ttft_ms", tpot="tpot_ms", throughput="throughput_tok_s",
    )  # fmt: skip


def pool_rows() -> list[PoolRow]:
    """Section 4.3, figure 3: the isolated row first, then shared pools from large to small."""
    return records(
        PoolRow, "sun", "decode_pool", workers="decode_workers",
        throughput_per_worker="throughput_per_decode_gpu_tok_s",
        interactivity_change="interactivity_change_vs_isolated",
    )  # fmt: skip


def skew_facts() -> dict[str, float]:
    """Section 4.3, figure 4: the sizes that the text prints, relative."""
    return {row["fact"]: float(row["published"]) for row in published("sun", "skew")}
