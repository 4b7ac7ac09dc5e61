"""What a Triton kernel becomes on a GPU that is not here: registers, spills, shared memory, instructions.

Triton compiles for any target with the tools in its own wheel (ptxas, cuobjdump, nvdisasm). Needs a process without
TRITON_INTERPRET. Numbers come from the machine code, not from what the compiler says it did.
"""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from frugal.ops.launch import Launch

# Shared memory a block may use, bytes (CUDA C++ programming guide, technical specifications per compute capability).
SHARED_LIMIT = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
TARGETS = tuple(SHARED_LIMIT)
AMD_TARGET, AMD_SHARED_LIMIT = "gfx1100", 65536
_MEMORY = ("LDG", "STG", "LDGSTS", "LDS", "STS", "LDL", "STL")


@dataclass
class Metrics:
    """Of one compiled kernel; None where the target's tools do not tell."""

    registers: int | None
    spill_loads: int | None
    spill_stores: int | None
    shared_bytes: int
    shared_limit_bytes: int
    matrix_instructions: int | None
    instructions: int | None = None
    fused_multiply_adds: int | None = None
    widths: dict[str, int] = field(default_factory=dict)
    """Memory instructions by width in bits, for example {"LDG.128": 4, "STG.128": 2}."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def target_name(target: int | str) -> str:
    """sm_86 for 86; AMD names as they are."""
    return f"sm_{target}" if isinstance(target, int) else target


def compile_launch(launch: Launch, target: int | str) -> Metrics:
    """Compile ``launch`` for ``target`` (86 for sm_86, or an AMD name) as a call with its arguments would."""
    amd = isinstance(target, str)
    signature, constants, attributes = launch.specialisation()
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    gpu = GPUTarget("hip" if amd else "cuda", target, 32)
    compiled = triton.compile(source, target=gpu, options=launch.compile_options)
    shared = int(compiled.metadata.shared)
    if amd:
        text = compiled.asm["amdgcn"]
        found = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
        matrix = len(re.findall(r"^\s*v_wmma", text, re.M))
        spills = found.get("vgpr_spill_count")
        return Metrics(found.get("vgpr_count"), spills, spills, shared, AMD_SHARED_LIMIT, matrix)
    return _from_machine_code(compiled.asm["cubin"], shared, SHARED_LIMIT[target])


def _from_machine_code(cubin: bytes, shared: int, limit: int) -> Metrics:
    tools = Path(knobs.nvidia.ptxas.path).parent
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run([tools / "cuobjdump", "--dump-resource-usage", path])
        listing = _run([tools / "nvdisasm", "-c", path])
    registers = re.search(r"REG:(\d+)", usage)
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing, re.M)
    counts = collections.Counter(name.split(".")[0] for name in instructions)
    widths: collections.Counter[str] = collections.Counter()
    for name in instructions:
        base = name.split(".")[0]
        if base in _MEMORY:
            width = re.search(r"\.(256|128|64|U8|U16|S8|S16)\b", name)
            bits = "32" if width is None else width.group(1).lstrip("US")
            widths[f"{base}.{bits}"] += 1
    matrix = sum(n for name, n in counts.items() if "MMA" in name and name != "FMMA")
    return Metrics(
        registers=int(registers.group(1)) if registers else None,
        spill_loads=counts["LDL"],
        spill_stores=counts["STL"],
        shared_bytes=shared,
        shared_limit_bytes=limit,
        matrix_instructions=matrix,
        instructions=len(instructions),
        fused_multiply_adds=counts["FFMA"] + counts["FFMA2"],
        widths=dict(sorted(widths.items())),
    )


def _run(command: list[Any]) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=120, check=True).stdout


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory, for building launches of real sizes."""
    return torch.empty(*shape, dtype=dtype, device="meta")
