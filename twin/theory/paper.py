"""AFD section 4 exactly as published (Lemma 4.1, eq. 5-20; geometric decode lengths), and its gaps to a simulation.

The published figures follow with p = 1/μ_D, decode lengths counted on {1, 2, …}; the index of the token being decoded
is then (1 − p)/p = μ_D − 1 in the mean, which is how it enters eq. 10-14.

The gaps are one named factor for each step from the paper's formula to the measurement:

    eq. 6 at T̄(B; N)  × finite_horizon × length_distribution × exposed_communication × barrier
                      × unexplained × start_up × in_flight  =  eq. 21

Each factor is a ratio of two throughputs, so the product is exact whatever the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from latency_models.stages import PassLatency
from twin.theory.cycle import CycleModel


@dataclass(frozen=True, slots=True)
class PaperModel:
    """The paper's model of one bundle with the latency of a whole decode step (eq. 2-4), μ_P and μ_D in tokens.

    `requests`: N of eq. 12, requests that one attention instance serves; None for the limit (eq. 14).
    """

    latency: PassLatency
    batch_size: int
    mean_prefill: float
    mean_decode: float
    requests: float | None = None

    @property
    def p(self) -> float:
        """Per-step termination probability."""
        return 1 / self.mean_decode

    @property
    def horizon_steps(self) -> float:
        """The horizon K(B) = N/(B p) in steps (eq. 12)."""
        return math.inf if self.requests is None else self.requests / (self.batch_size * self.p)

    @property
    def mean_load(self) -> float:
        """The mean load T̄(B; N), or its limit T̄ when the horizon is not given (eq. 13-14)."""
        index = (1 - self.p) / self.p
        steps = self.horizon_steps
        ramp = 0.0 if math.isinf(steps) else (1 - (1 - self.p) ** steps) / (steps * self.p)
        return self.batch_size * (self.mean_prefill + index * (1 - ramp))

    @property
    def t_attention(self) -> float:
        """The mean attention time t̄_A = α_A T̄ + β_A."""
        return _line(self.latency.attention, self.mean_load)

    @property
    def t_communication(self) -> float:
        """The round trip t̄_C = α_C B + β_C."""
        return _line(self.latency.communication, self.batch_size)

    def t_ffn(self, ratio: float) -> float:
        """The FFN time t̄_F(r) = α_F r B + β_F."""
        return _line(self.latency.ffn, ratio * self.batch_size)

    @property
    def r_attention(self) -> float:
        """The ratio r_A at which the FFN takes as long as attention (eq. 15)."""
        return self._ratio_at(self.t_attention)

    @property
    def r_communication(self) -> float:
        """The ratio r_C at which the FFN takes as long as the round trip (eq. 16)."""
        return self._ratio_at(self.t_communication)

    @property
    def r_critical(self) -> float:
        """The ratio r_crit from which on the FFN is the bottleneck (eq. 17)."""
        return max(self.r_attention, self.r_communication)

    @property
    def r_peak(self) -> float:
        """The ratio at which throughput peaks while the FFN is the bottleneck (eq. 18)."""
        alpha, beta = self.latency.ffn
        return math.sqrt(beta / (alpha * self.batch_size)) if alpha > 0 else math.inf

    @property
    def r_star(self) -> float:
        """The optimal A/F ratio (eq. 19)."""
        return self.r_star_at(self.mean_load)

    def r_star_per_card(self, attention_cards: int, ffn_cards: int) -> float:
        """The ratio with the most tokens per time unit and card, where instances have different numbers of cards.

        Tokens per cycle over r·c_A + c_F in place of eq. 6's r + 1: while the FFN sets the cycle, r / ((r·c_A +
        c_F)(α_F B r + β_F)) peaks where c_A α_F B r² = c_F β_F. So only the last term of eq. 19 changes:
        r_peak·√(c_F/c_A).
        """
        return max(self._terms(attention_cards, ffn_cards).values())

    def regime_per_card(self, attention_cards: int, ffn_cards: int) -> str:
        """The term that sets `r_star_per_card`, named as in `regime`."""
        terms = self._terms(attention_cards, ffn_cards)
        return max(terms, key=terms.__getitem__)

    def throughput_per_card(self, ratio: float, attention_cards: int, ffn_cards: int) -> float:
        """Output tokens per time unit and card: eq. 6 with cards in place of instances."""
        return ratio * self.batch_size / ((ratio * attention_cards + ffn_cards) * self.cycle_time(ratio))

    def r_star_at(self, load: float) -> float:
        """The ratio of eq. 19 with another mean token load of an instance in place of T̄."""
        balance = self._ratio_at(_line(self.latency.attention, load))
        return max(balance, self.r_communication, self.r_peak)

    @property
    def regime(self) -> str:
        """The term of eq. 19 that sets r*: attention (I), communication (II), or the FFN's own peak (III)."""
        return self.regime_per_card(1, 1)

    def regime_at(self, ratio: float) -> str:
        """The stage that sets the cycle time at `ratio` (section 4.3)."""
        times = {
            "attention-bottleneck": self.t_attention,
            "communication-bottleneck": self.t_communication,
            "ffn-bottleneck": self.t_ffn(ratio),
        }
        return max(times, key=times.__getitem__)

    def cycle_time(self, ratio: float) -> float:
        """The cycle time of eq. 5 at the mean load: the slowest of the three stages."""
        return max(self.t_attention, self.t_communication, self.t_ffn(ratio))

    def throughput(self, ratio: float) -> float:
        """Output tokens per time unit and instance (eq. 6)."""
        return ratio * self.batch_size / ((ratio + 1) * self.cycle_time(ratio))

    @property
    def throughput_at_optimum(self) -> float:
        """The throughput at r*, Throughput* (eq. 20)."""
        ratio = self.r_star
        return ratio * self.batch_size / ((ratio + 1) * self.t_ffn(ratio))

    def _terms(self, attention_cards: int, ffn_cards: int) -> dict[str, float]:
        """The three terms of eq. 19 by the regime that each stands for, the last for instances of unequal cards."""
        return {
            "attention-bottleneck": self.r_attention,
            "communication-bottleneck": self.r_communication,
            "ffn-bottleneck": self.r_peak * math.sqrt(ffn_cards / attention_cards),
        }

    def _ratio_at(self, time: float) -> float:
        alpha, beta = self.latency.ffn
        if alpha == 0:
            return math.inf if time >= beta else 0.0
        return (time - beta) / (alpha * self.batch_size)


def _line(coefficients: tuple[float, float], size: float) -> float:
    alpha, beta = coefficients
    return alpha * size + beta


NAMES = {
    "finite_horizon": "the paper averages the load over a finite run from empty caches; here its limit",
    "length_distribution": "exact mean load of these lengths in place of the geometric formula",
    "exposed_communication": "m microbatches cannot always hide the round trip",
    "barrier": "each step waits for the slowest of the attention instances",
    "unexplained": "steady-state simulation over barrier-aware theory: sampling noise and what the theory leaves out",
    "start_up": "caches start empty, so the first steps are quicker",
    "in_flight": "eq. 21 does not count tokens of requests still in flight",
}


def decompose(
    paper: PaperModel,
    cycle: CycleModel,
    ratio: float,
    instances: int,
    steady: float,
    generated: float,
    measured: float,
) -> dict[str, float]:
    """The factors from `paper.throughput(ratio)` to `measured` (eq. 21), in order.

    `steady`: simulated throughput per instance. `generated`: over the span of eq. 21, counting every token.
    """
    chain = {
        "finite_horizon": replace(paper, requests=None).throughput(ratio),
        "length_distribution": cycle.rate(ratio, cycle.step_time_unlimited_overlap(ratio)),
        "exposed_communication": cycle.rate(ratio, cycle.step_time_at_mean_load(ratio)),
        "barrier": cycle.throughput(ratio, instances),
        "unexplained": steady,
        "start_up": generated,
        "in_flight": measured,
    }
    factors, before = {}, paper.throughput(ratio)
    for name, after in chain.items():
        factors[name] = after / before
        before = after
    return factors
