"""`PageSpec`: what a page of one KV head holds, without tensors. Layouts, names and refusals follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import UsageError
from .codec import CODECS, DEFAULT_KEY_DTYPE, E4M3, INT8, Codec, codec_of
from .page_layout import PageLayout
from .rotation import MAX_BLOCK

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)  # channels of heads that pages exist for
RANKS = (128, 256, 512, 1024)  # channels of latents, and of the key with RoPE beside them, that pages exist for
ROPES = (0, 32, 64, 128)
ROPE_IN_CODES = (512, 128)  # the rank and the channels with RoPE that have pages in which all channels are codes
# With so many spare bytes a token, three of these pages are as long as two of head_dim 512, or four of 256 (Gemma 4).
SPARE = 40


@dataclass(frozen=True)
class PageSpec:
    """What a page of one KV head holds.

    A spec can describe pages that do not exist yet. Then `refusal` is the reason, and every function that takes a
    format refuses it.

    Attributes:
        k_dim, v_dim: channels of K and of V.
        k, v: the codecs. V's is `E4M3`, or that of K if V is in K.
        v_in_k: whether V is the first `v_dim` channels of K, as in multi-head latent attention, so that only K is
            stored, with a scale for each token. The other channels of K, which have RoPE, are in FP16,
        rope_in_codes: or in K's codec, with the scale of their token.
        spare: bytes of a token that nothing uses, so that blocks of an engine have one size (`SPARE`).
        name: all of the above in one word, by which torch ops and compiled code pass a spec.
        widths: channels of the two tensors that an append takes: K and V, or the latent and the key with RoPE.
    """

    k_dim: int
    v_dim: int
    k: Codec
    v_in_k: bool = False
    rope_in_codes: bool = False
    spare: int = 0

    if TYPE_CHECKING:
        v: ClassVar[Codec]
        name: ClassVar[str]
        widths: ClassVar[tuple[int, int]]

    def __post_init__(self) -> None:
        # They are no fields: Dynamo passes every field of a frozen dataclass to the constructor.
        vars(self)["v"] = self.k if self.v_in_k else E4M3
        name = f"k{self.k_dim}.{self.k.name}-v{self.v_dim}.{self.v.name}"
        name += "-v_in_k" * self.v_in_k + "-rope_in_codes" * self.rope_in_codes
        name += f"-{self.spare}_spare" if self.spare else ""
        vars(self)["name"] = name + "-token_scales" * self.v_in_k
        vars(self)["widths"] = (self.v_dim, self.k_dim - self.v_dim) if self.v_in_k else (self.k_dim, self.v_dim)

    @classmethod
    def of(cls, head_dim: int | PageSpec, key_dtype: str = DEFAULT_KEY_DTYPE) -> PageSpec:
        """The spec that the keywords of public functions describe: K and V of `head_dim` channels, or the spec itself.

        Raises:
            UsageError: there is no such key_dtype, or the given spec has another.
        """
        if isinstance(head_dim, PageSpec):
            if key_dtype not in (DEFAULT_KEY_DTYPE, head_dim.k.name):
                raise UsageError(f"pages {head_dim.name} have no key_dtype={key_dtype!r}: leave it out")
            return head_dim
        codec = codec_of(key_dtype)
        for spec in SPECS.values():
            if spec.k_dim == head_dim and spec.k is codec and not spec.v_in_k and not isinstance(head_dim, float):
                return spec
        return cls(head_dim, head_dim, codec)

    @classmethod
    def latent(cls, rank: int, rope: int, rope_in_codes: bool = False, spare: int = 0) -> PageSpec:
        """The spec of latent attention (MLA): `rank` channels that are key and value of all heads, and `rope` channels
        of a key with RoPE, in FP16 or in codes. `refusal` says whether there are such pages.
        """
        return cls(rank + rope, rank, INT8, True, rope_in_codes, spare)

    @property
    def static_widths(self) -> dict[str, int]:
        """The widths of the static tensors of a KV head, by the names that public functions have for them, in the order
        of `KVFormat.tensors`.
        """
        return {"k_mean": self.k_dim, "v_mean": self.v_dim, "factor": self.v_dim // MAX_BLOCK}

    @property
    def refusal(self) -> str | None:
        """Why there are no such pages; None if there are. `Backend.supports` says who can serve them."""
        if self.name in SPECS:
            return None
        if self == PageSpec(self.k_dim, self.k_dim, self.k):
            return f"head_dim must be one of {HEAD_DIMS}; got {self.k_dim!r}"
        return (
            f"there are no pages {self.name}: K and V must have one head_dim of {HEAD_DIMS} and be stored separately, "
            f"or be a latent of {RANKS} channels and a key with RoPE of {ROPES} (PageSpec.latent)"
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
    for spec in (
        *(PageSpec(head_dim, head_dim, codec) for codec in CODECS.values() for head_dim in HEAD_DIMS),
        *(PageSpec.latent(rank, rope) for rank in RANKS for rope in ROPES),
        *(PageSpec.latent(*ROPE_IN_CODES, rope_in_codes=True, spare=spare) for spare in (0, SPARE)),
    )
}
LAYOUTS = {
    spec.name: PageLayout.latent(spec.k_dim, spec.v_dim, 1 if spec.rope_in_codes else 2, spec.spare)
    if spec.v_in_k
    else PageLayout.of(spec.k_dim, spec.v_dim)
    for spec in SPECS.values()
}
