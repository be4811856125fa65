"""`PageSpec`: what a page of one KV head holds, without tensors. Layouts, names and refusals follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ..errors import UsageError
from .codec import CODECS, DEFAULT_KEY_DTYPE, E4M3, Codec, codec_of
from .page_layout import PAGE_SIZE, PageLayout

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)  # channels of heads that pages exist for


@dataclass(frozen=True)
class PageSpec:
    """What a page of one KV head holds.

    A spec can describe pages that do not exist yet. Then `refusal` is the reason, and every function that takes a
    format refuses it.

    Attributes:
        k_dim, v_dim: channels of K and of V.
        k, v: the codecs. V's is always `E4M3`.
        v_in_k: whether V is the first `v_dim` channels of K, as in multi-head latent attention, so that only K is
            stored.
        scales: whether a page has one scale of K and one of V, or each token its own.
        tokens: tokens of a page.
        name: all of the above in one word, by which torch ops and compiled code pass a spec.
    """

    k_dim: int
    v_dim: int
    k: Codec
    v: Codec = E4M3
    v_in_k: bool = False
    scales: Literal["page", "token"] = "page"
    tokens: int = PAGE_SIZE

    if TYPE_CHECKING:
        name: ClassVar[str]

    def __post_init__(self) -> None:
        name = f"k{self.k_dim}.{self.k.name}-v{self.v_dim}.{self.v.name}"
        name += ("-v_in_k" if self.v_in_k else "") + ("" if self.scales == "page" else f"-{self.scales}_scales")
        # It is no field: Dynamo passes every field of a frozen dataclass to the constructor.
        vars(self)["name"] = name + ("" if self.tokens == PAGE_SIZE else f"-{self.tokens}_tokens")

    @classmethod
    def of(cls, head_dim: int, key_dtype: str = DEFAULT_KEY_DTYPE) -> PageSpec:
        """The spec that the keywords of public functions describe: K and V of `head_dim` channels.

        Raises:
            UsageError: there is no such key_dtype.
        """
        codec = codec_of(key_dtype)
        for spec in SPECS.values():
            if spec.k_dim == head_dim and spec.k is codec and not isinstance(head_dim, float):
                return spec
        return cls(head_dim, head_dim, codec)

    @property
    def refusal(self) -> str | None:
        """Why there are no such pages; None if there are. `Backend.supports` says who can serve them."""
        if self.name in SPECS:
            return None
        if self == PageSpec(self.k_dim, self.k_dim, self.k):
            return f"head_dim must be one of {HEAD_DIMS}; got {self.k_dim!r}"
        return (
            f"there are no pages {self.name}: K and V must have one head_dim of {HEAD_DIMS} and be stored separately, "
            f"V in E4M3, with scales of pages of {PAGE_SIZE} tokens"
        )

    @property
    def layout(self) -> PageLayout:
        """Where the parts of a page are.

        Raises:
            UsageError: there are no such pages.
        """
        if self.name not in LAYOUTS:
            raise UsageError(self.refusal)
        return LAYOUTS[self.name]


def spec_of(name: str) -> PageSpec:
    """The spec of a name.

    Raises:
        UsageError: there are no pages of this name.
    """
    if name not in SPECS:
        raise UsageError(
            f"there are no pages {name!r}; PageSpec.of(head_dim, key_dtype).name is one of {', '.join(SPECS)}"
        )
    return SPECS[name]


# The pages that exist, by name.
SPECS = {
    spec.name: spec
    for codec in CODECS.values()
    for head_dim in HEAD_DIMS
    for spec in [PageSpec(head_dim, head_dim, codec)]
}
LAYOUTS = {spec.name: PageLayout.of(spec.k_dim, spec.v_dim) for spec in SPECS.values()}
