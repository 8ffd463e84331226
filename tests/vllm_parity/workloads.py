"""Random workloads on which two schedulers must decide alike, in families that aim at different rules.

A workload counts time in rounds. In each round requests arrive, others are aborted, one step begins, and with as many
steps in flight as may be the oldest ends. Lengths are short and caches small, so that a hundred steps have seen it all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from schedulers.engine_config import EngineConfig

FAMILIES = (
    "plain", "bursts", "long_prompts", "shared_prefixes", "priorities", "aborts", "sessions", "tiny_caches", "settings"
)  # fmt: skip


@dataclass(frozen=True)
class Visit:
    """One request: it arrives in round `at`, its answer has `answer` tokens, and it is aborted in round `abort`.

    `ids` name the blocks of its prompt and answer that others may repeat; `abort` is -1 for never.
    """

    at: int
    prompt: int
    max_tokens: int
    answer: int
    ids: tuple[int, ...] = ()
    priority: int = 0
    abort: int = -1


@dataclass(frozen=True)
class Workload:
    """The settings of an engine and the requests that it gets, in the order of their arrival.

    `depth`: steps that may be in flight; 2 with async scheduling. `reset_at`: rounds in which the prefix cache is
    emptied.
    """

    name: str
    config: EngineConfig
    depth: int
    visits: tuple[Visit, ...]
    reset_at: tuple[int, ...] = ()

    @property
    def last_round(self) -> int:
        """The last round in which a request arrives."""
        return max(visit.at for visit in self.visits)

    def for_version(self, scheduler: str) -> Workload:
        """The same workload under the rules of a version of vLLM, without settings that this version lacks."""
        config = replace(self.config, scheduler=scheduler)
        if scheduler != "vllm-0.33":
            config = replace(config, prefill_schedule_interval=1)
        if scheduler == "vllm-0.19":
            config = replace(config, watermark=0.0, max_num_active_seqs=0)
        return replace(self, config=config)


def make_workload(family: str, seed: int) -> Workload:
    """Workload number `seed` of a family. Async scheduling and prefix caching are on in every second and fourth."""
    random = Random(f"{family} {seed}")
    depth, caching = 1 + seed % 2, seed // 2 % 2 == 1 or family in ("shared_prefixes", "sessions")
    block = random.choice((2, 4, 8, 16))
    requests = random.randint(4, 14)
    seqs = random.choice((2, 3, 4, 6, 8, 16))
    budget = max(seqs, random.choice((8, 16, 24, 48, 96, 200)))
    longest = random.choice((3, 6, 12)) * block
    if family == "long_prompts":
        longest, requests = random.choice((20, 40)) * block, random.randint(3, 8)
    visits = _visits(random, family, requests, longest, block)
    needed = max(-(-(visit.prompt + visit.max_tokens - 1) // block) for visit in visits)
    tight = family == "tiny_caches" or (family not in ("plain", "bursts") and random.random() < 0.7)
    if tight:
        blocks = needed + random.choice((0, 0, 1, 2, needed // 2, needed))
    else:
        blocks = sum(-(-(visit.prompt + visit.max_tokens) // block) for visit in visits)
    priorities = family == "priorities" or (family == "settings" and random.random() < 0.3)
    config = EngineConfig(
        num_gpu_blocks=blocks,
        block_size=block,
        prefix_id_tokens=block,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        enable_prefix_caching=caching,
        scheduling_policy="priority" if priorities else "fcfs",
        **(_settings(random, seqs, longest) if family == "settings" else {}),
    )
    resets = tuple(random.sample(range(60), 8)) if family == "settings" and random.random() < 0.3 else ()
    return Workload(f"{family} {seed}", config, depth, tuple(sorted(visits, key=lambda visit: visit.at)), resets)


def _settings(random: Random, seqs: int, longest: int) -> dict[str, Any]:
    """Settings of vLLM that are off by default, each in a part of the workloads."""
    drawn: dict[str, Any] = {
        "scheduler_reserve_full_isl": random.random() < 0.5,
        "long_prefill_token_threshold": random.choice((0, random.randint(1, longest))),
        "watermark": random.choice((0.0, 0.0, 0.1, 0.3)),
        "max_num_active_seqs": random.choice((0, 0, random.randint(1, seqs))),
        "prefill_schedule_interval": random.choice((1, 1, 2, 5)),
    }
    return drawn


def _visits(random: Random, family: str, requests: int, longest: int, block: int) -> list[Visit]:
    """The requests of a workload."""
    at, visits = 0, list[Visit]()
    mean_gap = 0 if family == "bursts" else random.choice((0, 1, 3, 8))
    documents = [tuple(random.sample(range(1000), longest // block)) for _ in range(random.randint(1, 3))]
    sessions: list[tuple[int, ...]] = []
    for _ in range(requests):
        if family == "bursts":
            at += random.choice((0, 0, 0, 0, 25))
        else:
            at += random.randint(0, 2 * mean_gap)
        prompt = random.choice((random.randint(1, longest), random.randint(1, longest // block) * block))
        max_tokens = random.choice((1, random.randint(1, 8), random.randint(1, 3 * block)))
        answer = random.choice((max_tokens, random.randint(1, max_tokens)))
        ids: tuple[int, ...] = ()
        if family in ("shared_prefixes", "tiny_caches", "aborts", "priorities", "settings") and random.random() < 0.8:
            whole = (prompt + random.choice((0, answer))) // block
            document = random.choice(documents)
            shared = random.randint(1, len(document))
            ids = (document[:shared] + tuple(random.sample(range(1000, 9000), whole)))[:whole]
        elif family == "sessions":
            history = sessions.pop(random.randrange(len(sessions))) if sessions and random.random() < 0.7 else ()
            prompt = len(history) * block + random.choice((random.randint(1, block), block))
            whole = (prompt + answer) // block
            ids = history + tuple(random.sample(range(1000, 9000), whole - len(history)))
            if whole < 3 * longest // block:
                sessions.append(ids)
        priority = random.randint(0, 2) if family in ("priorities", "settings") else 0
        abort = at + random.randint(0, 30) if family == "aborts" and random.random() < 0.4 else -1
        visits.append(Visit(at, prompt, max_tokens, answer, ids, priority, abort))
    return visits
