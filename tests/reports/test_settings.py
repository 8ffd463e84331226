"""Settings of a sweep's rows."""

from __future__ import annotations

from reports.fields import fixed, in_words, short_names, varying


def test_what_varies_and_what_is_fixed() -> None:
    settings = [{"a.b": 1, "seed": seed, "c": [1]} for seed in (3, 4, 3)]
    assert varying(settings) == ["seed"]
    assert fixed(settings) == "a.b=1, c=[1]"
    assert varying(settings[:1]) == []
    assert fixed([{}]) == ""
    assert in_words(settings[1], ["seed", "a.b"]) == "seed=4, a.b=1"


def test_short_names_tell_keys_apart() -> None:
    assert short_names(["engine.max_num_seqs", "workload.arrivals.rate"]) == ["max_num_seqs", "rate"]
    assert short_names(["workload.decode.mean", "workload.prefill.mean", "seed"]) == [
        "decode.mean", "prefill.mean", "seed",
    ]  # fmt: skip
    assert short_names(["model", "step_time.model"]) == ["model", "step_time.model"]
