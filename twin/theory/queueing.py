"""Mean waiting times of the queues that an engine becomes with degenerate settings: the twin's oracles."""

from __future__ import annotations


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
