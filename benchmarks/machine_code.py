"""What the machine code of a compiled Triton kernel says: registers, spills, instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton


def read_nvidia(asm: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(asm["cubin"])
        usage = run_tool("cuobjdump", "--dump-resource-usage", str(path))
        code = run_tool("nvdisasm", "-c", str(path))
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[-1]),
        **read_sass(code),
    }


def run_tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


def read_sass(code: str) -> dict[str, Any]:
    """What the instructions of an NVIDIA kernel say. Local memory is where registers spill to; a
    stack alone is room that nothing may ever use."""
    names = Counter(
        re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    )
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for name, count in names.items():
        operation, *modifiers = name.split(".")
        widths = [
            int(m.lstrip("US")) for m in modifiers if re.fullmatch(r"[US]?(8|16|64|128|256)", m)
        ]
        if operation in ("LDG", "LDGSTS"):
            loads[widths[-1] if widths else 32] += count
        elif operation == "STG":
            stores[widths[-1] if widths else 32] += count
    matrix = re.compile(r"[HIDQ]MMA|[HIQ]GMMA|UTC\w*MMA")
    return {
        "spills": sum(n for name, n in names.items() if name.split(".")[0] in ("LDL", "STL")),
        "tensor_core": {name: n for name, n in names.items() if matrix.match(name)},
        "loads": dict(loads),
        "stores": dict(stores),
    }


def read_amd(asm: Any) -> dict[str, Any]:
    return read_gcn(asm["amdgcn"])


def read_gcn(code: str) -> dict[str, Any]:
    """What the assembly of an AMD kernel and its metadata say."""

    def metadata(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", code)[-1])

    bits = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
    widths: dict[str, Counter[int]] = {"load": Counter(), "store": Counter()}
    pattern = r"^\s+(?:global|buffer|flat)_(load|store)_[us]?(byte|short|dword(?:x\d)?)\w*\b"
    for direction, width in re.findall(pattern, code, re.MULTILINE):
        widths[direction][bits[width]] += 1
    stack = metadata("private_segment_fixed_size")
    spilled = metadata("vgpr_spill_count") + metadata("sgpr_spill_count")
    return {
        "registers": metadata("vgpr_count"),
        "stack_bytes": stack,
        "spills": spilled or stack // 4,
        "tensor_core": dict(Counter(re.findall(r"^\s+(v_mfma_\w+)", code, re.MULTILINE))),
        "loads": dict(widths["load"]),
        "stores": dict(widths["store"]),
    }
