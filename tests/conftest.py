"""Settings that must hold before torch and triton are imported, and test selection by device."""

import os
import sys

# Two threads that wait for each other over a tensor of a few hundred numbers only lose time, and on
# a busy machine they lose minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: set later, it would be ignored.
    assert "triton" not in sys.modules, "a pytest plugin imported triton before TRITON_INTERPRET"
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Times on a shared machine say nothing, and a CI run must be repeatable.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, not skip, what needs a GPU: a skip in the report then always means a defect."""
    if torch.cuda.is_available():
        return
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        config.hook.pytest_deselected(items=gpu_items)
        items[:] = [item for item in items if item not in gpu_items]
