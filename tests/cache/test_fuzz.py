from .fuzz import fuzz


def test_the_static_form_is_the_growing_form_after_random_operations():
    """`python -m tests.cache.fuzz` does 10,000."""
    assert fuzz(400, each=200) == 400
