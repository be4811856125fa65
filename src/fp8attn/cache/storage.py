"""Sequences of a cache in a safetensors file. Other processes can load a prompt that was prefilled once.

A file holds, for `n` sequences:

| tensor | shape | |
|---|---|---|
| `pages.LAYER` | `[num_pages, num_kv_heads, page_bytes]` uint8 | a layer's pages, each once, as `page_layout` describes them |
| `page_table` | `[n, max_pages]` int32 | the pages of each sequence, in order; zero past its last one, -1 left of the window |
| `lengths` | `[n]` int32 | tokens |
| `k_mean.LAYER`, `v_mean.LAYER` | `[num_kv_heads, head_dim]` float32 | `KVFormat.stored_k_mean` and `v_mean`; absent: zero |
| `scales.LAYER.NAME` | as in `LayerScales` | calibrated scales; absent: pages have their own |

Its metadata has the format of the file, the shape of a layer, and the format of keys; of a cache with a window, the window.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open

from ..checks import check_tensor
from ..errors import UsageError
from ..files import write_tensors
from ..formats.page_layout import PAGE_SIZE, PageLayout
from ..params import BackendName
from ..scales import TENSORS, LayerScales
from .page_table import first_column, num_pages_of
from .sequences import Sequences

Cache = TypeVar("Cache", bound=Sequences)
Packed = tuple[dict[str, torch.Tensor], dict[str, str]]  # the tensors and the metadata of a file
FORMAT = "fp8attn.kv_pages.2"
WINDOWED = "fp8attn.kv_pages.3.window"  # page_table has -1 left of the window
CPU = torch.device("cpu")
AGAIN = "save it again with this version of fp8attn, or prefill the prompt again"


def pack(cache: Sequences, seqs: Sequence[int] | None = None) -> Packed:
    """The tensors and the metadata of a file with these sequences. None: all sequences."""
    cache.check_complete("save")
    lengths, table = cache.lengths, cache.table
    chosen = list(range(cache.num_seqs)) if seqs is None else table.indices(seqs)
    held = [table.pages_of(seq) for seq in chosen]
    number = {page: i for i, page in enumerate(dict.fromkeys(page for pages in held for page in pages if page >= 0))}
    width = max(1, *map(len, held))
    tensors = {
        "page_table": torch.tensor(
            [[number.get(page, -1) for page in pages] + [0] * (width - len(pages)) for pages in held], dtype=torch.int32
        ),
        "lengths": torch.tensor([lengths[seq] for seq in chosen], dtype=torch.int32),
    }
    taken = table.to_device(list(number), torch.long)
    for index, layer in enumerate(cache.layers):
        tensors[f"pages.{index}"] = layer.pages(table, table.cache_seqlens[index]).pool[taken].cpu()
        for name, mean in (("k_mean", layer.format.stored_k_mean), ("v_mean", layer.format.v_mean)):
            if mean is not None:
                tensors[f"{name}.{index}"] = mean.cpu().clone()  # tensors in a file share no memory
        if layer.scales is not None:
            tensors |= {f"scales.{index}.{name}": getattr(layer.scales, name).cpu().clone() for name in TENSORS}
    written = {
        "num_layers": cache.num_layers, "num_kv_heads": cache.num_kv_heads, "head_dim": cache.head_dim, "page_size": PAGE_SIZE,
        "key_dtype": cache.key_dtype, "rotate_keys": [layer.format.rotate for layer in cache.layers],
    }  # fmt: skip
    if cache.window is not None:
        written["window"] = cache.window
    return tensors, {"format": FORMAT if cache.window is None else WINDOWED} | {name: json.dumps(value) for name, value in written.items()}


def join(parts: list[tuple[Packed, list[int]]]) -> Packed:
    """What `pack` would return of one cache with the layers of several, which hold the same sequences: of each, what `pack` returned, and
    the numbers that its layers have in the one cache."""
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    rotated: dict[int, bool] = {}
    for (mine, metadata), layers in parts:
        tensors |= _renumbered(mine, dict(enumerate(layers)))
        rotated |= dict(zip(layers, json.loads(metadata["rotate_keys"]), strict=True))
    written = {"num_layers": len(rotated), "rotate_keys": [rotated[layer] for layer in range(len(rotated))]}
    return tensors, metadata | {name: json.dumps(value) for name, value in written.items()}


def take(tensors: dict[str, torch.Tensor], metadata: dict[str, str], layers: list[int], path: str | Path) -> Packed:
    """What `pack` would return of a cache with these layers alone."""
    try:
        rotated = json.loads(metadata["rotate_keys"])
        written = {"num_layers": len(layers), "rotate_keys": [rotated[layer] for layer in layers]}
        taken = _renumbered(tensors, {layer: number for number, layer in enumerate(layers)})
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is incomplete or not as written ({error!r}); {AGAIN}") from error
    return taken, metadata | {name: json.dumps(value) for name, value in written.items()}


def _renumbered(tensors: dict[str, torch.Tensor], numbers: dict[int, int]) -> dict[str, torch.Tensor]:
    """The tensors of the layers in `numbers`, by their new numbers, and those that are of all layers."""
    found = {}
    for name, x in tensors.items():
        kind, *rest = name.split(".", 2)
        if not rest:
            found[name] = x
        elif (layer := int(rest[0])) in numbers:
            found[".".join([kind, str(numbers[layer]), *rest[1:]])] = x
    return found


def unpack(
    make: type[Cache], tensors: dict[str, torch.Tensor], metadata: dict[str, str], path: str | Path, *, max_seqlen: int | None,
    device: torch.device | str | None, backend: BackendName, num_pages: int | None = None,
) -> Cache:  # fmt: skip
    """A cache of the class `make` from what `pack` returned; see `PagedKVCache.load`."""
    try:
        found = {name: json.loads(metadata[name]) for name in ("num_layers", "num_kv_heads", "head_dim", "page_size", "key_dtype")}
        rotate_keys, page_size = json.loads(metadata["rotate_keys"]), found.pop("page_size")
        window = json.loads(metadata.get("window", "null"))
        if page_size == PAGE_SIZE:
            lengths, table = _table(tensors, window)
            pools = _pools(tensors, 1 + max((page for pages in table for page in pages), default=-1), **found)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is incomplete or not as written ({error!r}); {AGAIN}") from error
    if page_size != PAGE_SIZE:
        raise UsageError(f"{path} has pages of {page_size} tokens, and this version of fp8attn has pages of {PAGE_SIZE}; {AGAIN}")
    if max_seqlen is not None and max(lengths) > max_seqlen:
        raise UsageError(f"{path} has sequences of {max(lengths)} tokens, which do not fit into max_seqlen={max_seqlen}; give a larger one")
    scales: list[LayerScales] | None = None
    if "scales.0.k_scale" in tensors:
        scales = []
        for index, rotated in enumerate(rotate_keys):
            k_scale, v_scale, k_mean, v_mean = (tensors[f"scales.{index}.{name}"] for name in TENSORS)
            scales.append(LayerScales(k_scale, v_scale, k_mean, v_mean, found["key_dtype"], rotated))
    cache = make(
        **found, rotate_keys=rotate_keys, scales=scales, num_seqs=len(lengths), num_pages=num_pages, max_seqlen=max_seqlen, window=window,
        device=device, backend=backend,
    )  # fmt: skip
    for index, layer in enumerate(cache.layers):  # the same bits, because K's mean is not rotated again
        layer.use_means(tensors.get(f"k_mean.{index}"), tensors.get(f"v_mean.{index}"))
    cache.fill(lengths, table, pools)
    return cache


def _table(tensors: dict[str, torch.Tensor], window: int | None) -> tuple[list[int], list[list[int]]]:
    """The length and the pages of each sequence of a file. Raises ValueError if they do not agree: kernels would read other pages."""
    lengths, table = tensors["lengths"], tensors["page_table"]
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
    tensors: dict[str, torch.Tensor], num_pages: int, num_layers: int, num_kv_heads: int, head_dim: int, key_dtype: str
) -> list[torch.Tensor]:
    """The pages of each layer of a file. Raises ValueError for other shapes, which a copy would broadcast."""
    pool, scale, mean = (num_pages, num_kv_heads, PageLayout.of(head_dim).nbytes), (num_kv_heads,), (num_kv_heads, head_dim)
    for index in range(num_layers):
        check_tensor(tensors[f"pages.{index}"], f"pages.{index}", pool, torch.uint8, CPU)
        for name in (f"{x}_mean.{index}" for x in "kv"):
            if name in tensors:
                check_tensor(tensors[name], name, mean, torch.float32, CPU)
        for name in TENSORS if "scales.0.k_scale" in tensors else ():
            shape = mean if name.endswith("mean") else scale
            check_tensor(tensors[f"scales.{index}.{name}"], f"scales.{index}.{name}", shape, None, CPU)
    return [tensors[f"pages.{index}"] for index in range(num_layers)]


def checksum(tensors: dict[str, torch.Tensor]) -> str:
    """A checksum of the names and bytes of tensors on the CPU."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), value))
    return f"{value:08x}"


def write(path: str | Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a file as a whole, and make the folders above it."""
    write_tensors(path, tensors, metadata | {"checksum": checksum(tensors)})


def read(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and metadata of a file that `write` made.

    Raises:
        UsageError: the file does not exist, is damaged, or has other contents.
    """
    if not Path(path).is_file():
        raise UsageError(f"{'a folder' if Path(path).is_dir() else 'no such file'}: {path}; write the file with cache.save(path)")
    try:
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UsageError(f"{path} is not a safetensors file, or it is cut short ({error}); {AGAIN}") from error
    if metadata.get("format") not in (FORMAT, WINDOWED):
        raise UsageError(
            f"{path} does not hold sequences of a cache ({FORMAT}, {WINDOWED}); its format is {metadata.get('format')!r}; {AGAIN}"
        )
    if metadata.get("checksum") != checksum(tensors):
        raise UsageError(f"{path} is incomplete or not as written (its bytes have another checksum); {AGAIN}")
    return tensors, metadata
