"""The facts behind fingerprints, and how two differ."""

from __future__ import annotations

import json

from raykv.core.known_models import MOST_FACTS_LEN, MOST_MODELS, KnownModel, KnownModels, best_difference, differences


def model(number: int, facts: str = "", name: str = "m", groups: int = 1) -> KnownModel:
    return KnownModel(number.to_bytes(16, "big"), name, facts, groups)


def test_what_is_news() -> None:
    models = KnownModels()
    assert models.learn(model(1, '{"a":1}')) and not models.learn(model(1, '{"a":1}'))
    assert not models.learn(model(1, "")), "an older engine that tells nothing takes nothing away"
    found = models.get(model(1).fingerprint)
    assert found is not None and found.facts == '{"a":1}' and models.get(model(2).fingerprint) is None


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    models = KnownModels()
    models.learn(model(0))
    for number in range(1, MOST_MODELS + 1):
        models.learn(model(0))
        models.learn(model(number))
    numbers = {int.from_bytes(one.fingerprint, "big") for one in models.all()}
    assert len(numbers) == MOST_MODELS and 0 in numbers and 1 not in numbers
    models.learn(model(7, "x" * (MOST_FACTS_LEN + 1)))
    assert models.get(model(7).fingerprint) == model(7)


def test_differences_name_the_fact_and_both_values() -> None:
    a = json.dumps({"dtype": "fp16", "hf": {"layers": [1, 2], "only": True}, "place": {"rank": 0}})
    b = json.dumps({"dtype": "fp8", "hf": {"layers": [1, 3]}, "place": {"rank": 0}})
    assert differences(a, b) == [
        "dtype: fp16 here, fp8 there",
        "hf.layers[1]: 2 here, 3 there",
        "hf.only: true here, (not there) there",
    ]
    assert differences(a, a) == [] and differences(a, "") == [] and differences("{", a) == []
    long = differences(json.dumps({"x": "y" * 500}), json.dumps({"x": 1}))[0]
    assert len(long) < 120 and long.endswith("... here, 1 there")


def test_of_several_ranks_those_most_alike_are_compared() -> None:
    def rank(number: int, dtype: str) -> str:
        return json.dumps({"rank": number, "dtype": dtype})

    assert best_difference([rank(0, "a"), rank(1, "a")], [rank(1, "b"), rank(0, "b")]) == "dtype: a here, b there"
    assert best_difference([], [rank(0, "a")]) == ""
    many = json.dumps({str(number): 0 for number in range(9)})
    assert best_difference([many], [json.dumps({})]).endswith("and 6 more")
