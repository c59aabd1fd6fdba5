"""What the compilers make of every Triton kernel, without a GPU.

    python benchmarks/compile_report.py [--json FILE]

Compiles each kernel for sm_80 (A100), sm_90 (H100, H200), sm_100 (B200) and gfx942 (MI300X) with
the tiles and warps that the launchers choose there, and prints registers, stack, spills, shared
memory, tensor-core instructions and how many bits global loads and stores move per thread. Of the
other options (dtypes, flags of the objective, a vocabulary that is or is not a multiple of 16)
every pair of values occurs; all combinations would be thousands.

Fails on
- a spill: on NVIDIA a load or store of local memory (LDL, STL) in the machine code, on AMD spilled
  registers or scratch memory.
- a matrix product without the tensor-core instructions of its GPU.
- more shared memory than a program of that GPU may use.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any

import machine_code
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fgrpo_kernels import PolicyLossConfig, triton_linear_stats, triton_objective, triton_rows
from fgrpo_kernels.primitives import COMPILER_OPTIONS


@dataclass(frozen=True)
class Target:
    gpu: GPUTarget
    shared_bytes: int
    """Limit of one program."""
    tensor_core: str
    """How the instructions begin that multiply 16-bit matrices at full speed."""


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024, "HMMA"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024, "HGMMA"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024, "UTCHMMA"),  # tcgen05.mma
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024, "v_mfma"),
}
VOCABULARIES = (1000, 151936)
"""One for each choice of `triton_rows.launch_options`."""
LOGITS_AND_E = (("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("fp64", "fp64"))
MODULES = {"rows": triton_rows, "linear_stats": triton_linear_stats}


@dataclass(frozen=True)
class Case:
    """A kernel with all that is compiled into it."""

    module: str
    kernel: str
    pointers: dict[str, str]
    """dtype behind a pointer; what is not named has the dtype under "*"."""
    constants: dict[str, int]
    options: dict[str, int]
    aligned: bool = True
    """Whether the lengths that the launcher specialises on are multiples of 16."""
    multiplies: bool = False

    @property
    def configuration(self) -> str:
        dtypes = "/".join(dict.fromkeys(d for n, d in self.pointers.items() if n != "ids_ptr"))
        values = {**self.constants, **self.options}
        shown = {name: value for name, value in values.items() if name not in COMPILER_OPTIONS}
        flags = [f"{name}={int(value)}" for name, value in shown.items() if value]
        return " ".join([dtypes, *flags, "" if self.aligned else "unaligned"]).strip()


@dataclass(frozen=True)
class Compiled:
    target: str
    kernel: str
    configuration: str
    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    tensor_core: dict[str, int]
    """Instructions that multiply matrices."""
    loads: dict[int, int]
    """Global loads by bits per thread."""
    stores: dict[int, int]
    failures: list[str]


def all_pairs(factors: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """A few combinations of the factors' values in which every pair of values occurs."""
    missing = {
        ((a, i), (b, j)): None
        for a, b in combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    while missing:
        chosen = dict(next(iter(missing)))
        for name in factors:
            if name not in chosen:
                gains = [
                    sum(
                        tuple(sorted_pair(factors, (name, i), p)) in missing for p in chosen.items()
                    )
                    for i in range(len(factors[name]))
                ]
                chosen[name] = gains.index(max(gains))
        for pair in combinations(((name, chosen[name]) for name in factors), 2):
            missing.pop(pair, None)
        yield {name: factors[name][chosen[name]] for name in factors}


def sorted_pair(factors: dict[str, tuple[Any, ...]], *pair: tuple[str, int]) -> Any:
    order = list(factors)
    return sorted(pair, key=lambda item: order.index(item[0]))


def split_options(options: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of the kernel, and options of the compiler."""
    constants = {name: value for name, value in options.items() if name.isupper()}
    return constants, {name: options[name] for name in options.keys() - constants.keys()}


def row_cases() -> Iterator[Case]:
    flag = (False, True)
    common = {"vocabulary": VOCABULARIES, "dtypes": LOGITS_AND_E, "aligned": flag}
    policy: dict[str, tuple[Any, ...]] = {
        "surrogate": tuple(triton_objective.SURROGATES),
        "kl": tuple(triton_objective.KLS),
        "correction": tuple(triton_objective.CORRECTIONS),
        "dual_clip": (None, 3.0),
        "entropy_coef": (0.0, 0.1),
        "has_old_logps": flag,
        "has_softcap": flag,
    }
    # In bf16 without an entropy gradient the kernel reads once: other code, with pairs of its own.
    one_read = {"dtypes": (("fp32", "bf16"),), "entropy_coef": (0.0,)}
    kernels: list[tuple[str, dict[str, tuple[Any, ...]]]] = [
        ("row_statistics_kernel", {}),
        ("row_gradient_kernel", {"HAS_ENTROPY": flag, "HAS_SOFTCAP": flag}),
        ("policy_rows_kernel", policy),
        ("policy_rows_kernel", {**policy, **one_read}),
    ]
    for kernel, factors in kernels:
        for chosen in all_pairs({**common, **factors}):
            constants, options = split_options(triton_rows.launch_options(chosen.pop("vocabulary")))
            logits, e = chosen.pop("dtypes")
            aligned = chosen.pop("aligned")
            if kernel == "policy_rows_kernel":
                constants |= policy_flags(**chosen)
            else:
                constants |= chosen
            pointers = {"*": logits, "e_ptr": e, "ids_ptr": "i64"}
            yield Case("rows", kernel, pointers, constants, options, aligned)


def policy_flags(
    surrogate: str,
    kl: str | None,
    correction: str | None,
    dual_clip: float | None,
    entropy_coef: float,
    has_old_logps: bool,
    has_softcap: bool,
) -> dict[str, int]:
    config = PolicyLossConfig(
        surrogate=surrogate,
        kl_coef=0.0 if kl is None else 0.1,
        kl_estimator=kl or "k3",
        rollout_correction=correction,
        rollout_min=0.5 if correction == "mask" else None,
        dual_clip=dual_clip,
        entropy_coef=entropy_coef,
    )
    flags = triton_objective.objective_flags(config, has_old_logps=has_old_logps)
    return {**flags, "HAS_SOFTCAP": has_softcap}


def linear_cases(target: Target) -> Iterator[Case]:
    flag = (False, True)
    factors = {
        "operand": ("bf16", "fp16"),
        **dict.fromkeys(("HAS_BIAS", "HAS_SOFTCAP", "WITH_ENTROPY", "WHOLE_D"), flag),
    }
    for flags in all_pairs(factors):
        narrow = flags.pop("operand")
        pointers = {"*": "fp32", "hidden_ptr": narrow, "weight_ptr": narrow, "ids_ptr": "i64"}
        gpu = target.gpu
        constants, options = split_options(
            triton_linear_stats.launch_options(
                gpu.backend, gpu.arch, target.shared_bytes, has_bias=flags["HAS_BIAS"]
            )
        )
        constants = {**flags, "UPCAST": False, **constants}
        yield Case(
            "linear_stats", "tile_statistics_kernel", pointers, constants, options, multiplies=True
        )
    constants, options = split_options(triton_linear_stats.merge_options())
    for with_entropy in flag:
        constants = {**constants, "WITH_ENTROPY": with_entropy}
        yield Case("linear_stats", "merge_tiles_kernel", {"*": "fp32"}, constants, options)


def cases(target: Target) -> list[Case]:
    return [*row_cases(), *linear_cases(target)]


def compile_case(target_name: str, case: Case) -> Compiled:
    target = TARGETS[target_name]
    function = getattr(MODULES[case.module], case.kernel)
    signature: dict[str, str] = {}
    attributes = {}
    for index, parameter in enumerate(function.params):
        name = parameter.name
        if name in case.constants:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            signature[name] = "*" + case.pointers.get(name, case.pointers["*"])
            multiple_of_16 = not parameter.do_not_specialize_on_alignment
        else:
            signature[name] = "i32"
            multiple_of_16 = case.aligned and not parameter.do_not_specialize
        if multiple_of_16:
            attributes[(index,)] = [["tt.divisibility", 16]]
    constants = {(function.arg_names.index(n),): value for n, value in case.constants.items()}
    source = ASTSource(function, signature, constants, attributes)
    binary = triton.compile(source, target=target.gpu, options=case.options)
    read = machine_code.read_amd if target.gpu.backend == "hip" else machine_code.read_nvidia
    facts = read(binary.asm)
    return Compiled(
        target=target_name,
        kernel=case.kernel,
        configuration=case.configuration,
        shared_bytes=binary.metadata.shared,
        failures=failures(target, case, shared_bytes=binary.metadata.shared, **facts),
        **facts,
    )


def failures(
    target: Target,
    case: Case,
    *,
    spills: int,
    shared_bytes: int,
    tensor_core: dict[str, int],
    **_: Any,
) -> list[str]:
    found = []
    if spills:
        found.append(f"{spills} spills")
    if shared_bytes > target.shared_bytes:
        found.append(f"{shared_bytes} bytes of shared memory, limit {target.shared_bytes}")
    if case.multiplies and not any(name.startswith(target.tensor_core) for name in tensor_core):
        found.append(f"no {target.tensor_core} instruction")
    return found


def histogram(counts: dict[Any, int]) -> str:
    return " ".join(f"{name}:{counts[name]}" for name in sorted(counts, reverse=True)) or "-"


def table(results: list[Compiled]) -> Iterator[str]:
    head = ("target", "kernel", "regs", "stack", "spills", "shared", "loads", "stores")
    layout = "{:7} {:23} {:>4} {:>5} {:>6} {:>7}  {:25} {:18} {:34} {}"
    yield layout.format(*head, "tensor core", "configuration")
    for r in results:
        numbers = (r.registers, r.stack_bytes, r.spills, r.shared_bytes)
        widths = (histogram(r.loads), histogram(r.stores), histogram(r.tensor_core))
        yield layout.format(r.target, r.kernel, *numbers, *widths, r.configuration)


def summary(results: list[Compiled]) -> Iterator[str]:
    """A Markdown table with the worst configuration of each target and kernel."""
    yield "| target | kernel | registers | spills | shared | tensor core | widest load / store |"
    yield "|---|---|---|---|---|---|---|"
    for target, kernel in dict.fromkeys((r.target, r.kernel) for r in results):
        group = [r for r in results if (r.target, r.kernel) == (target, kernel)]
        registers, spills, shared = (
            max(getattr(r, name) for r in group) for name in ("registers", "spills", "shared_bytes")
        )
        kinds = dict.fromkeys(name.split(".")[0] for r in group for name in r.tensor_core)
        load = max(bits for r in group for bits in r.loads)
        store = max(bits for r in group for bits in r.stores)
        cells = (target, kernel, registers, spills, shared, ", ".join(kinds) or "-")
        yield f"| {' | '.join(map(str, cells))} | {load} / {store} |"


def write_json(path: Path, results: list[Compiled]) -> None:
    """One line a kernel, so that two reports can be compared with diff."""
    facts = {"date": date.today().isoformat(), "triton": triton.__version__}
    head = json.dumps(facts)[:-1]
    lines = ",\n".join(json.dumps(asdict(result)) for result in results)
    path.write_text(f'{head}, "kernels": [\n{lines}\n]}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report here")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by the interpreter: unset it")
    work = [(name, case) for name, target in TARGETS.items() for case in cases(target)]
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(compile_case, *zip(*work, strict=True)))
    print(*table(results), "", *summary(results), "", sep="\n")
    failed = [r for r in results if r.failures]
    for r in failed:
        print(f"FAILED {r.target} {r.kernel} ({r.configuration}): {'; '.join(r.failures)}")
    print(f"{len(results)} compilations, {len(failed)} failed; triton {triton.__version__}")
    if arguments.json:
        write_json(arguments.json, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
