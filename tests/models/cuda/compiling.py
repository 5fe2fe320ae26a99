"""Kernels compiled for a GPU that this machine lacks, and what the compiler reports of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = (80, 90, 100)
"""Compute capabilities, times ten: A100, H100 and H200, B200."""

SPILL = re.compile(r"\b(?:STL|LDL)\b")
"""Instructions that write and read spilled registers."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What is known of a compiled kernel."""

    ptx: str
    num_registers: int
    """Registers per thread."""
    num_spilled: int
    """Spilled bytes per thread."""
    num_shared: int
    """Bytes of shared memory per program."""
    is_spilled_by_products: bool
    """True if spilled values are read or written anywhere between the first product and the last."""


def compiled(
    kernel: Any,
    pointers: Mapping[str, str],
    scalars: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    *,
    odd: Sequence[str] = (),
    **options: int,
) -> Compiled:
    """Compiles a kernel.

    Args:
        kernel: The kernel.
        pointers: Types of the pointers' targets: {"out": "bf16"}. They are aligned as torch aligns them.
        scalars: Types of the other arguments. Integers are multiples of 16, as strides are.
        constants: Values of the constants.
        capability: The GPU's compute capability, times ten.
        odd: Integers that need not be multiples of 16.
        options: `num_warps` and `num_stages`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: f"*{type_}" for name, type_ in pointers.items()} | dict(scalars)
    signature |= dict.fromkeys(constants, "constexpr")
    assert set(signature) == set(kernel.arg_names)
    aligned = {*pointers, *(name for name, type_ in scalars.items() if type_.startswith("i"))} - {*odd}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, attributes)
    found = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        code = _cuobjdump("-sass", file.name)
    assert "Function" in code
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    # A stack that is never accessed is no spill.
    num_spilled = max(numbers["STACK"], numbers["LOCAL"], 1) if SPILL.search(code) else 0
    products = [match.start() for match in re.finditer(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", code)]
    is_spilled = bool(products and SPILL.search(code[products[0] : products[-1]]))
    return Compiled(found.asm["ptx"], numbers["REG"], num_spilled, found.metadata.shared, is_spilled)


def begins_early(ptx: str, num_reads: int = 0) -> bool:
    """True if a kernel lets the next one begin, and writes nothing before it has waited for the one before it.

    Before that it may only read what no kernel writes, exactly `num_reads` times. The pointers are not checked.
    """
    if "griddepcontrol" not in ptx:
        return False
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert "griddepcontrol.launch_dependents" in before
    assert "griddepcontrol" not in after
    # Asynchronous copies would read what other kernels write, too.
    assert not re.search(r"\b(?:st\.global|atom\.|red\.|cp\.async)", before)
    assert len(re.findall(r"\bld\.global", before)) == num_reads
    return True


def _cuobjdump(option: str, path: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([program, option, path], check=True, capture_output=True, text=True).stdout
