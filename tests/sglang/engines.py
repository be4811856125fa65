"""Calls run_answers.py: an engine in a process of its own."""

from tests.support.answers import answers_of


def answers(way, variables=None, **options):
    """What an engine answers, as `answers_of`."""
    return answers_of("tests.sglang.run_answers", way, options, variables, timeout=900)
