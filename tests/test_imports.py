"""What may import what, held in fresh processes and in the source, and what no file may contain."""

import ast
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = sorted((ROOT / "fgrpo_kernels").rglob("*.py"))
TRAIN = sorted((ROOT / "fgrpo_train").rglob("*.py"))
TRITON_FILES = {"primitives", "triton_linear_stats", "triton_objective", "triton_rows"}

BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
"""

REFERENCE_LOSS = """
import torch
from fgrpo_kernels import PolicyLossConfig, focal_policy_loss

hidden = torch.zeros(2, 3, 4, requires_grad=True)
out = focal_policy_loss(
    hidden,
    torch.ones(7, 4),
    torch.zeros(2, 3, dtype=torch.int64),
    torch.tensor([1.0, 3.0]),
    config=PolicyLossConfig(surrogate="reinforce", focal_gamma=0.0),
    impl={impl!r},
)
out.loss.backward()
print(out.loss.item())
"""

IMPORTED_BY_KERNELS = """
import json, sys
import torch
before = set(sys.modules)
import fgrpo_kernels
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def run_python(code: str) -> str:
    """What a fresh interpreter prints; its error output is the failure's message."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, with whether the import runs at the file's own import."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path.name}:{child.lineno}: imports are absolute"
                assert child.module is not None
                yield child.module, at_import
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, at_import and not is_function)

    return walk(ast.parse(path.read_text()), True)


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_loss_needs_torch_alone(impl: str) -> None:
    """Zero hidden states give a uniform policy: logp = -log 7, loss = mean(A) log 7 = 2 log 7."""
    blocked = {"triton", "transformers", "deepspeed", "vllm", "trl", "fgrpo_train"}
    printed = run_python(BLOCK.format(blocked=blocked) + REFERENCE_LOSS.format(impl=impl))
    assert math.isclose(float(printed), 2 * math.log(7), rel_tol=1e-6)


def test_importing_the_kernels_loads_nothing_but_the_standard_library() -> None:
    """Triton is there in this environment, and still is not loaded before it is used."""
    loaded = set(json.loads(run_python(IMPORTED_BY_KERNELS)))
    assert loaded - set(sys.stdlib_module_names) - {"torch"} == {"fgrpo_kernels"}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_do_not_know_the_trainer(path: Path) -> None:
    allowed = {"torch", "triton", "fgrpo_kernels"} | sys.stdlib_module_names
    if path.parent.name == "integrations":
        allowed |= {path.stem, "transformers"}
    for module, at_import in imports(path):
        top = module.split(".")[0]
        assert top in allowed, f"{path.name} imports {module}"
        if top == "triton":
            assert path.stem in TRITON_FILES, f"{path.name} imports triton"
        if top == "fgrpo_kernels" and TRITON_FILES & set(module.split(".")):
            assert path.stem in TRITON_FILES or not at_import, f"{path.name} is not lazy"


@pytest.mark.parametrize("path", TRAIN, ids=lambda path: path.stem)
def test_trainer_files_keep_to_their_engine(path: Path) -> None:
    owners = {"vllm": {"vllm_worker"}, "deepspeed": {"learner", "training_state"}}
    for module, _ in imports(path):
        top = module.split(".")[0]
        assert path.stem in owners.get(top, {path.stem}), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", TRAIN, ids=lambda path: path.stem)
def test_trainer_files_shadow_no_package(path: Path) -> None:
    """`deepspeed fgrpo_train/run.py` puts the folder of run.py first on sys.path."""
    taken = sys.stdlib_module_names | packages_distributions().keys() | {"vllm", "wandb", "ray"}
    assert path.stem == "__init__" or path.stem not in taken


def test_files_name_no_machine_and_no_registry() -> None:
    machine_path = re.compile(r"(?<![\w.~*-])/(?:work|home|Users|root|opt|tmp/\w)\b")
    registry = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs")
    for path in tracked_files():
        text = path.read_text(errors="replace")
        for pattern in (machine_path, registry):
            found = pattern.search(text)
            assert found is None, f"{path.relative_to(ROOT)}: {found and found.group()}"


def test_python_files_are_read_in_one_sitting() -> None:
    lengths = {
        str(path.relative_to(ROOT)): path.read_text().count("\n")
        for path in tracked_files()
        if path.suffix == ".py"
    }
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}
