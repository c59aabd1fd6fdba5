"""Which implementation a call uses: the name is only how, never what."""

from __future__ import annotations

import importlib
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

IMPLS = ("auto", "triton", "torch", "reference")


def choose_impl(impl: str, device: torch.device) -> str:
    """ "auto" is triton on a GPU and torch elsewhere; an explicit choice is taken or refused.

    Raises: ValueError for an unknown name; RuntimeError for "triton" without a usable device.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {list(IMPLS)}, got {impl!r}")
    if impl == "auto":
        return "triton" if device.type == "cuda" and _triton_installed() else "torch"
    if impl == "triton":
        if not _triton_installed():
            raise RuntimeError("impl='triton' needs the triton package: pip install triton")
        if device.type == "cpu" and not _interpreting():
            raise RuntimeError(
                "impl='triton' needs a GPU, received tensors on the CPU: move them to a GPU, use "
                "impl='torch', or set TRITON_INTERPRET=1 before Python starts to run the kernels "
                "in Triton's interpreter (for tests)"
            )
    return impl


def row_ops(impl: str) -> ModuleType:
    """The module of row operations; triton is imported here and nowhere before."""
    name = "triton_rows" if impl == "triton" else "torch_rows"
    return importlib.import_module(f"fgrpo_kernels.{name}")


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, whichever GPU its tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
