"""Named tensors in safetensors files of bounded size, written and read one tensor at a time.

Up to the bound one file, `stem.safetensors`; above it `stem-00001-of-00004.safetensors` and so on
with `stem.safetensors.index.json`: transformers' format, so that `from_pretrained` reads a folder
whose stem is `model`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

MAX_FILE_BYTES = 5 * 10**9


def write_tensors(
    folder: Path | None,
    stem: str,
    sizes: Mapping[str, int],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `tensors`, holding one file's worth in memory.

    Args:
        folder: exists; None: go through the tensors and write nothing.
        sizes: bytes of every tensor, in the order of `tensors`.
    """
    files = _divide(sizes, stem, max_file_bytes)
    num_tensors = Counter(files.values())
    pending: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if folder is None:
            continue
        # A copy: the next tensor may be gathered into the memory of this one.
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if len(pending) == num_tensors[files[name]]:
            path = folder / files[name]
            safetensors.torch.save_file(pending, path, metadata={"format": "pt"})
            pending = {}
    if folder is not None and len(num_tensors) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _divide(sizes: Mapping[str, int], stem: str, max_file_bytes: int) -> dict[str, str]:
    """The file of each tensor: in order, a new one where the bound would be passed."""
    number, filled = 0, 0
    numbers = {}
    for name, size in sizes.items():
        if filled and filled + size > max_file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    if number == 0:
        return dict.fromkeys(sizes, f"{stem}.safetensors")
    return {
        name: f"{stem}-{n + 1:05d}-of-{number + 1:05d}.safetensors" for name, n in numbers.items()
    }


def open_tensors(folder: Path, stem: str, device: torch.device) -> Callable[[str], Tensor]:
    """A function that reads one of the tensors by its name.

    Raises: FileNotFoundError without such files; the function KeyError for a name not in them.
    """
    index = folder / f"{stem}.safetensors.index.json"
    paths = [folder / f"{stem}.safetensors"]
    if index.exists():
        files = json.loads(index.read_text())["weight_map"].values()
        paths = [folder / file for file in sorted(set(files))]
    opened = [safe_open(path, framework="pt", device=str(device)) for path in paths]
    holder = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
    return lambda name: holder[name].get_tensor(name)
