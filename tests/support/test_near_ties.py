"""What counts as a near-tie, on steps that are made up."""

import math

import pytest

from tests.support.near_ties import differences


def engine_of(answer, *steps):
    return {
        "answers": [answer],
        "logprobs": [[{str(token): logprob for token, logprob in step.items()} for step in steps]],
    }


def test_tokens_after_the_first_that_differs_do_not_count():
    expected = engine_of([5, 6, 7], {5: -0.5, 6: -3.0}, {6: -0.75, 8: -0.8125}, {7: -0.1, 9: -9.0})
    found = engine_of([5, 8, 9], {5: -0.625, 6: -2.0}, {8: -0.75, 6: -0.875}, {9: -0.1, 7: -9.0})
    tokens, flips = differences(found, expected)
    assert tokens == [0.125, 0.125]
    assert flips == [0.0625 + 0.125]


def test_equal_answers_have_no_flips():
    expected = engine_of([5, 6], {5: -0.5}, {6: -0.75})
    assert differences(expected, expected) == ([0.0, 0.0], [])


def test_a_token_that_is_not_likely_is_infinitely_far():
    tokens, flips = differences(engine_of([8], {8: -0.5, 6: -1.0}), engine_of([6], {6: -0.5, 7: -1.0}))
    assert tokens == [0.5]
    assert flips == [math.inf]


def test_each_token_has_its_step():
    with pytest.raises(ValueError, match=r"shorter"):
        differences(engine_of([5, 6], {5: -0.5}), engine_of([5, 6], {5: -0.5}, {6: -0.75}))
