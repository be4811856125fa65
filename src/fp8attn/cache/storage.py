"""Sequences of a cache in a safetensors file. Other processes can load a prompt that was prefilled once.

A file holds, for `n` sequences:

| tensor | shape | |
|---|---|---|
| `lengths` | `[n]` int32 | tokens |
| `pages.LAYER` | `[num_pages, num_kv_heads, page_bytes]` uint8 | a layer's pages, each once (`page_layout`) |
| `page_table.LAYER` | `[n, max_pages]` int32 | the pages of each sequence; 0 past its last, -1 left of the window |
| `k_mean.LAYER`, `v_mean.LAYER` | `[num_kv_heads, head_dim]` float32 | those of `KVFormat`; absent: zero |
| `factor.LAYER` | `[num_kv_heads, rank / 128]` float32 | `KVFormat.factor`; absent: one |
| `scales.LAYER.NAME` | as in `LayerScales` | calibrated scales; absent: pages have their own |

Its metadata has the format of the file, a checksum, and of each layer `SHARED` and whether keys are rotated. Layers
have the numbers of their model. So a file does not depend on how a model's layers were divided over caches, such as
those of several devices.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checks import check_tensor
from ..errors import UsageError
from ..files import read_tensors, write_tensors
from ..formats.page_layout import PAGE_SIZE
from ..formats.spec import PageSpec, spec_of
from ..scales import TENSORS, LayerScales
from .page_table import PageTable, first_column, num_pages_of

Layers = dict[int, dict[str, Any]]  # of each layer of a file: `SHARED`, and `rotate_keys`
FORMAT = "fp8attn.kv_pages.5"
SHARED = ("num_kv_heads", "spec", "window")  # what the layers of one cache have in common; the spec by its name
CPU = torch.device("cpu")
AGAIN = "save it again with this version of fp8attn, or prefill the prompt again"


class Saved(NamedTuple):
    """The sequences of a file, for a new cache.

    Attributes:
        options: of the cache, but for those that `PagedKVCache.load` takes.
        lengths: tokens of each sequence.
        tables: the pages of each sequence, as indices into the pools; -1 left of the window.
        pools: `[num_pages, num_kv_heads, page_bytes]` uint8 of each layer.
        static: of each layer, `KVFormat.tensors`.
    """

    options: dict[str, Any]
    lengths: list[int]
    tables: list[list[int]]
    pools: list[torch.Tensor]
    static: list[tuple[torch.Tensor | None, ...]]


def pack(table: PageTable, seqs: Iterable[int], numbers: Iterable[int]) -> tuple[dict[str, torch.Tensor], Layers]:
    """The tensors and the layers of a file with these sequences. The layers get these numbers."""
    seqs = list(seqs)
    pages_of = [table.pages_of(seq) for seq in seqs]
    named = dict.fromkeys(page for pages in pages_of for page in pages if page >= 0)  # each once
    places = {page: i for i, page in enumerate(named)}
    width = max(1, *map(len, pages_of))
    rows = [[places.get(page, -1) for page in pages] + [0] * (width - len(pages)) for pages in pages_of]
    tensors = {"lengths": torch.tensor([table.lengths[seq] for seq in seqs], dtype=torch.int32)}
    layers: Layers = {}
    index = table.to_device(list(places), torch.long)
    for number, layer in zip(numbers, table.layers, strict=True):
        format = layer.format
        values = layer.num_kv_heads, format.name, table.window
        layers[number] = dict(zip(SHARED, values, strict=True)) | {"rotate_keys": format.rotate}
        tensors[f"pages.{number}"] = layer.fit(table.num_pages)[index].cpu()
        tensors[f"page_table.{number}"] = torch.tensor(rows, dtype=torch.int32)
        for name, x in zip(format.spec.static_widths, format.tensors, strict=True):
            if x is not None:
                tensors[f"{name}.{number}"] = x.cpu().clone()  # tensors in a file share no memory
        if layer.scales is not None:
            tensors |= {f"scales.{number}.{name}": getattr(layer.scales, name).cpu().clone() for name in TENSORS}
    return tensors, layers


def unpack(tensors: dict[str, torch.Tensor], layers: Layers, path: str | Path, max_seqlen: int | None) -> Saved:
    """The sequences of these layers of a file; see `PagedKVCache.load`."""
    shapes = [[layer.get(name) for name in SHARED] for layer in layers.values()]
    if any(shape != shapes[0] for shape in shapes):
        raise UsageError(
            f"{path} has layers of several shapes or windows, and a PagedKVCache has one; FP8Cache.load reads the file"
        )
    try:
        numbers, rotated = list(layers), [layer["rotate_keys"] for layer in layers.values()]
        num_kv_heads, name, window = (layers[numbers[0]][name] for name in SHARED)
        spec = spec_of(name)
        lengths, tables = _table(tensors, numbers, window)
        num_pages = 1 + max((page for pages in tables for page in pages), default=-1)
        pools = _pools(tensors, numbers, num_pages, num_kv_heads, spec)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is incomplete or not as written ({error!r}); {AGAIN}") from error
    if max_seqlen is not None and max(lengths) > max_seqlen:
        raise UsageError(
            f"{path} has sequences of {max(lengths)} tokens, which do not fit into max_seqlen={max_seqlen}; give a "
            f"larger one"
        )
    options = {
        "num_kv_heads": num_kv_heads, "head_dim": spec, "num_layers": len(numbers), "num_seqs": len(lengths),
        "window": window, "rotate_keys": rotated,
    }  # fmt: skip
    if _has_scales(tensors, numbers):
        options["scales"] = [
            LayerScales(
                **{name: tensors[f"scales.{number}.{name}"] for name in TENSORS}, key_dtype=spec.k.name,
                rotate_keys=each,
            )
            for number, each in zip(numbers, rotated, strict=True)
        ]  # fmt: skip
    static = [tuple(tensors.get(f"{name}.{number}") for name in spec.static_widths) for number in numbers]
    return Saved(options, lengths, tables, pools, static)


def _has_scales(tensors: dict[str, torch.Tensor], numbers: list[int]) -> bool:
    """Whether the layers of one cache have calibrated scales: all of them have, or none."""
    return f"scales.{numbers[0]}.k_scale" in tensors


def _table(
    tensors: dict[str, torch.Tensor], numbers: list[int], window: int | None
) -> tuple[list[int], list[list[int]]]:
    """The length and the pages of each sequence of a cache. Raises ValueError if they do not agree: kernels would read
    other pages.
    """
    lengths, table = tensors["lengths"], tensors[f"page_table.{numbers[0]}"]
    if any(not torch.equal(tensors[f"page_table.{number}"], table) for number in numbers):
        raise ValueError(f"page_table must be the same in the layers {numbers}")
    check_tensor(lengths, "lengths", (max(1, len(table)),), torch.int32, CPU)
    check_tensor(table, "page_table", (len(lengths), table.shape[-1]), torch.int32, CPU)
    counts = lengths.tolist()
    if min(counts) < 0 or num_pages_of(max(counts)) > table.shape[1]:
        raise ValueError(f"lengths must be 0 to {PAGE_SIZE * table.shape[1]}; got {counts}")
    pages = [row[: num_pages_of(length)] for row, length in zip(table.tolist(), counts, strict=True)]
    for row, length in zip(pages, counts, strict=True):
        left = row.count(-1)
        if left > first_column(length, window) or any(page >= 0 for page in row[:left]):
            raise ValueError(f"page_table must have the pages of the last {window} of {length} tokens; got {row}")
    named = {page for row in pages for page in row if page >= 0}
    if named != set(range(len(named))):
        raise ValueError(f"page_table must name the pages 0 to {len(named) - 1}; got {sorted(named)}")
    return counts, pages


def _pools(
    tensors: dict[str, torch.Tensor], numbers: list[int], num_pages: int, heads: int, spec: PageSpec
) -> list[torch.Tensor]:
    """The pages of each layer of a cache. Raises ValueError for other shapes, which a copy would broadcast."""
    pool, scale, mean = (num_pages, heads, spec.layout.nbytes), (heads,), (heads, spec.k_dim)
    for number in numbers:
        check_tensor(tensors[f"pages.{number}"], f"pages.{number}", pool, torch.uint8, CPU)
        for kind, width in spec.static_widths.items():
            if (name := f"{kind}.{number}") in tensors:
                check_tensor(tensors[name], name, (heads, width), torch.float32, CPU)
        for name in TENSORS if _has_scales(tensors, numbers) else ():
            shape = mean if name.endswith("mean") else scale
            check_tensor(tensors[f"scales.{number}.{name}"], f"scales.{number}.{name}", shape, None, CPU)
    return [tensors[f"pages.{number}"] for number in numbers]


def checksum(tensors: dict[str, torch.Tensor]) -> str:
    """A checksum of the names and bytes of tensors on the CPU."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(
            tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), value)
        )
    return f"{value:08x}"


def write(
    path: str | Path, tensors: dict[str, torch.Tensor], layers: Layers, metadata: dict[str, str] | None = None
) -> None:
    """Write a file as a whole, and make the folders above it.

    Args:
        tensors, layers: what `pack` returned, of one cache or of several.
        metadata: more of it.
    """
    written = {"format": FORMAT, "layers": json.dumps(dict(sorted(layers.items()))), "checksum": checksum(tensors)}
    write_tensors(path, tensors, written | (metadata or {}))


def read(path: str | Path) -> tuple[dict[str, torch.Tensor], Layers, dict[str, str]]:
    """The tensors, the layers and the metadata of a file that `write` made.

    Raises:
        UsageError: the file does not exist, is damaged, or has other contents.
    """
    tensors, metadata = read_tensors(path, "write the file with cache.save(path)", AGAIN)
    if metadata.get("format") != FORMAT:
        raise UsageError(
            f"{path} does not hold sequences of a cache ({FORMAT}); its format is {metadata.get('format')!r}; {AGAIN}"
        )
    if metadata.get("checksum") != checksum(tensors):
        raise UsageError(f"{path} is incomplete or not as written (its bytes have another checksum); {AGAIN}")
    try:
        layers = {int(number): dict(about) for number, about in json.loads(metadata["layers"]).items()}
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is incomplete or not as written ({error!r}); {AGAIN}") from error
    return tensors, layers, metadata
