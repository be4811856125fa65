"""Every decoder family of transformers: right on an FP8Cache, or refused with the reason."""

import pytest
import transformers

from fp8attn.integrations.transformers.config import layers_of, unsupported_reason
from tests.support.families import PAGE, config_of, errors, families, page
from tests.support.transformers_models import one_thread  # noqa: F401

NEWEST = "5.24"  # docs/families.md is of this release
# Families of which no small model is made, and why.
UNTRIED = {"dbrx": "its attention and its experts have configs of their own"}
SERVED = [name for name in families() if name not in UNTRIED and unsupported_reason(config_of(name)) is None]
# Logits of mixtures of experts: a rounding error can choose another expert. Granite multiplies by large constants.
LOUD = 0.2

pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith(NEWEST), reason=f"docs/families.md is of transformers {NEWEST}"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_a_model_of_the_family_is_right(name):
    growing, beside, static = errors(config_of(name))
    # 8 bits change something: of latents the two steps alone, because the prompt attends to exact keys.
    least = 1e-4 if all(layer.rank is None for layer in layers_of(config_of(name))) else 3e-6
    assert least < growing < LOUD
    assert beside is static is None or static == pytest.approx(beside, rel=1e-3)


def test_the_page_lists_them():
    assert page(UNTRIED) == PAGE.read_text(), "python -m tests.support.families --write"
