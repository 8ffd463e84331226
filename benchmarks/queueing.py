"""Mean times in the queues that an engine becomes with degenerate settings: oracles of tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence


def erlang_c(servers: int, load: float) -> float:
    """Probability that a customer of M/M/c waits; `load` is λ/μ, below `servers`."""
    term = total = 1.0
    for k in range(1, servers):
        term *= load / k
        total += term
    last = term * load / servers * servers / (servers - load)
    return last / (total + last)


def mmc_wait(arrival_rate: float, service_time: float, servers: int = 1) -> float:
    """Mean wait before service in M/M/c (Erlang); with one server ρ/(1 - ρ) services."""
    load = arrival_rate * service_time
    return erlang_c(servers, load) * service_time / (servers - load)


def md1_wait(arrival_rate: float, service_time: float) -> float:
    """Mean wait before service in M/D/1 (Pollaczek and Khinchine): half of M/M/1's."""
    load = arrival_rate * service_time
    return load / (2 * (1 - load)) * service_time


def priority_waits(arrival_rates: Sequence[float], service_time: float) -> list[float]:
    """Mean wait of each class in M/M/1 with priorities that do not interrupt a service, the first class first.

    With σ_k the load of the first k classes, W_k = ρ·s / ((1 - σ_{k-1})(1 - σ_k)) (Cobham 1954); all classes have
    exponential services of mean s, whose mean residual at an arrival is ρ·s.
    """
    loads = [rate * service_time for rate in arrival_rates]
    residual, before, waits = sum(loads) * service_time, 0.0, []
    for load in loads:
        waits.append(residual / ((1 - before) * (1 - before - load)))
        before += load
    return waits


def finite_source_response(users: int, think_time: float, service_time: float, servers: int = 1) -> float:
    """Mean time from request to answer in M/M/c//N, the machine-repairman queue: N users think, c servers serve.

    Think times may have any distribution, and need not be alike, as long as `think_time` is their mean per request
    (they are a delay station of a product-form network; Baskett, Chandy, Muntz and Palacios 1975).
    """
    weights = [1.0]  # of n users at the servers
    for n in range(1, users + 1):
        weights.append(weights[-1] * (users - n + 1) / think_time * service_time / min(n, servers))
    total = sum(weights)
    throughput = sum(min(n, servers) / service_time * weight for n, weight in enumerate(weights)) / total
    return users / throughput - think_time
