"""Sequences of a cache in a safetensors file. Other processes can load a prompt that was prefilled once.

A file holds, for `n` sequences:

| tensor | shape | |
|---|---|---|
| `lengths` | `[n]` int32 | tokens |
| `pages.LAYER` | `[num_pages, num_kv_heads, page_bytes]` uint8 | a layer's pages, each once, as `page_layout` describes
them |
| `page_table.LAYER` | `[n, max_pages]` int32 | the pages of each sequence, in order; zero past its last one, -1 left of
the window |
| `k_mean.LAYER`, `v_mean.LAYER` | `[num_kv_heads, head_dim]` float32 | `KVFormat.stored_k_mean` and `v_mean`; absent:
zero |
| `scales.LAYER.NAME` | as in `LayerScales` | calibrated scales; absent: pages have their own |

Its metadata has the format of the file, a checksum, and of each layer the shape, the format of keys, and the window.
Layers have the numbers of their model. So a file does not depend on how a model's layers were divided over caches, such
as those of several devices.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from ..checks import check_tensor
from ..errors import UsageError
from ..files import write_tensors
from ..formats.page_layout import PAGE_SIZE
from ..formats.spec import PageSpec
from ..params import BackendName
from ..scales import TENSORS, LayerScales
from .page_table import first_column, num_pages_of
from .sequences import Sequences

Cache = TypeVar("Cache", bound=Sequences)
Layers = dict[int, dict[str, Any]]  # of each layer of a file: `SHARED`, and `rotate_keys`
FORMAT = "fp8attn.kv_pages.4"
SHARED = ("num_kv_heads", "head_dim", "page_size", "key_dtype", "window")  # what the layers of one cache have in common
CPU = torch.device("cpu")
AGAIN = "save it again with this version of fp8attn, or prefill the prompt again"


def pack(
    cache: Sequences, seqs: Sequence[int] | None = None, numbers: Iterable[int] | None = None
) -> tuple[dict[str, torch.Tensor], Layers]:
    """The tensors and the layers of a file with these sequences (None: all). The cache's layers get these numbers
    (None: 0, 1, ...).
    """
    cache.check_complete("save")
    lengths, table = cache.lengths, cache.table
    chosen = list(range(cache.num_seqs)) if seqs is None else table.indices(seqs)
    held = [table.pages_of(seq) for seq in chosen]
    places = {page: i for i, page in enumerate(dict.fromkeys(page for pages in held for page in pages if page >= 0))}
    width = max(1, *map(len, held))
    rows = [[places.get(page, -1) for page in pages] + [0] * (width - len(pages)) for pages in held]
    tensors = {"lengths": torch.tensor([lengths[seq] for seq in chosen], dtype=torch.int32)}
    layers: Layers = {}
    taken = table.to_device(list(places), torch.long)
    shared = dict(
        zip(SHARED, (cache.num_kv_heads, cache.head_dim, PAGE_SIZE, cache.key_dtype, cache.window), strict=True)
    )
    for index, (number, layer) in enumerate(
        zip(range(cache.num_layers) if numbers is None else numbers, cache.layers, strict=True)
    ):
        layers[number] = shared | {"rotate_keys": layer.format.rotate}
        tensors[f"pages.{number}"] = layer.pages(table, table.cache_seqlens[index]).pool[taken].cpu()
        tensors[f"page_table.{number}"] = torch.tensor(rows, dtype=torch.int32)
        for name, mean in (("k_mean", layer.format.stored_k_mean), ("v_mean", layer.format.v_mean)):
            if mean is not None:
                tensors[f"{name}.{number}"] = mean.cpu().clone()  # tensors in a file share no memory
        if layer.scales is not None:
            tensors |= {f"scales.{number}.{name}": getattr(layer.scales, name).cpu().clone() for name in TENSORS}
    return tensors, layers


def unpack(
    make: type[Cache], tensors: dict[str, torch.Tensor], layers: Layers, path: str | Path, *, max_seqlen: int | None,
    device: torch.device | str | None, backend: BackendName, num_pages: int | None = None,
) -> Cache:  # fmt: skip
    """A cache of the class `make` from these layers of a file; see `PagedKVCache.load`."""
    kinds = [[layer.get(name) for name in SHARED] for layer in layers.values()]
    if any(kind != kinds[0] for kind in kinds):
        raise UsageError(
            f"{path} has layers of several shapes or windows, and a PagedKVCache has one; FP8Cache.load reads the file"
        )
    try:
        numbers, shared = list(layers), next(iter(layers.values()))
        rotate_keys = [layer["rotate_keys"] for layer in layers.values()]
        page_size, window = shared["page_size"], shared["window"]
        if page_size == PAGE_SIZE:
            lengths, table = _table(tensors, numbers, window)
            pools = _pools(tensors, numbers, 1 + max((page for pages in table for page in pages), default=-1), shared)
    except (KeyError, StopIteration, TypeError, ValueError) as error:
        raise UsageError(f"{path} is incomplete or not as written ({error!r}); {AGAIN}") from error
    if page_size != PAGE_SIZE:
        raise UsageError(
            f"{path} has pages of {page_size} tokens, and this version of fp8attn has pages of {PAGE_SIZE}; {AGAIN}"
        )
    if max_seqlen is not None and max(lengths) > max_seqlen:
        raise UsageError(
            f"{path} has sequences of {max(lengths)} tokens, which do not fit into max_seqlen={max_seqlen}; give a "
            f"larger one"
        )
    scales: list[LayerScales] | None = None
    if _has_scales(tensors, numbers):
        scales = []
        for number, rotated in zip(numbers, rotate_keys, strict=True):
            k_scale, v_scale, k_mean, v_mean = (tensors[f"scales.{number}.{name}"] for name in TENSORS)
            scales.append(LayerScales(k_scale, v_scale, k_mean, v_mean, shared["key_dtype"], rotated))
    cache = make(
        shared["num_kv_heads"], shared["head_dim"], num_layers=len(numbers), key_dtype=shared["key_dtype"],
        rotate_keys=rotate_keys,
        scales=scales, num_seqs=len(lengths), num_pages=num_pages, max_seqlen=max_seqlen, window=window, device=device,
        backend=backend,
    )  # fmt: skip
    for number, layer in zip(
        numbers, cache.layers, strict=True
    ):  # the same bits, because K's mean is not rotated again
        layer.use_means(tensors.get(f"k_mean.{number}"), tensors.get(f"v_mean.{number}"))
    cache.fill(lengths, table, pools)
    return cache


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
    tensors: dict[str, torch.Tensor], numbers: list[int], num_pages: int, shared: dict[str, Any]
) -> list[torch.Tensor]:
    """The pages of each layer of a cache. Raises ValueError for other shapes, which a copy would broadcast."""
    heads, head_dim = shared["num_kv_heads"], shared["head_dim"]
    pool, scale, mean = (num_pages, heads, PageSpec.of(head_dim).layout.nbytes), (heads,), (heads, head_dim)
    for number in numbers:
        check_tensor(tensors[f"pages.{number}"], f"pages.{number}", pool, torch.uint8, CPU)
        for name in (f"{x}_mean.{number}" for x in "kv"):
            if name in tensors:
                check_tensor(tensors[name], name, mean, torch.float32, CPU)
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
        path: the file.
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
    if not Path(path).is_file():
        raise UsageError(
            f"{'a folder' if Path(path).is_dir() else 'no such file'}: {path}; write the file with cache.save(path)"
        )
    try:
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UsageError(f"{path} is not a safetensors file, or it is cut short ({error}); {AGAIN}") from error
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
