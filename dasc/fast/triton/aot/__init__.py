"""Compile every kernel that ships, ahead of time and without a GPU, and report what the compiler made of it.

``python -m dasc.fast.triton.aot [MODULE ...]`` prints a table of all kernels, or of those of the wrapper modules named
(``decode``, ``conv``, ..), and exits with status 1 when one breaks a rule of :func:`problems`. It must run without
``TRITON_INTERPRET``: kernels imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

import dasc.fast.triton

# What one block may have of an SM's shared memory, on Hopper.
MAX_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class ShippedKernel:
    """A kernel at one configuration that its wrapper can choose.

    Attributes:
        name: for people; tells the configurations of one kernel apart.
        fn: the ``@triton.jit`` function.
        signature: Triton's type of each argument, in order, e.g. ``"*bf16"``, ``"i32"``, ``"fp32"``, ``"constexpr"``.
        constexprs: value of each ``constexpr`` argument, and ``None`` for each pointer left out (also ``"constexpr"``).
        num_warps: of a program.
        num_stages: of software pipelining.
        divisible_by_16: arguments that a launch finds to be multiples of 16 (pointers in bytes).
        uses_tensor_cores: the compiled kernel must contain ``wgmma``.
        fp_fusion: may contract multiplication and addition.
    """

    name: str
    fn: triton.runtime.JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    divisible_by_16: tuple[str, ...]
    uses_tensor_cores: bool
    fp_fusion: bool = True


@dataclass(frozen=True)
class CompiledReport:
    """What became of a kernel.

    Attributes:
        name: of the kernel.
        registers: a thread.
        spill_bytes: spill stores and loads that ptxas emitted, a thread.
        local_bytes: stack frame in local memory, a thread.
        shared_bytes: a program.
        wgmma: whether Hopper's warp-group matrix instructions are used.
        mma: whether the older warp-level matrix instructions are used.
    """

    name: str
    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int
    wgmma: bool
    mma: bool


def compiled(kernel: ShippedKernel, capability: int = 90) -> tuple[CompiledKernel, str]:
    """Compile ``kernel`` for the compute capability; no device is needed.

    Returns:
        What Triton made of it (``.asm["ptx"]``, ``.asm["sass"]``), and what ptxas said.

    Raises:
        ValueError: when ``signature`` is not that of ``fn``.
    """
    if list(kernel.signature) != kernel.fn.arg_names:
        raise ValueError(f"signature of {kernel.name} must name {kernel.fn.arg_names}, got {list(kernel.signature)}")
    attrs = {(kernel.fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in kernel.divisible_by_16}
    source = ASTSource(kernel.fn, kernel.signature, kernel.constexprs, attrs)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": kernel.fp_fusion}
    # ptxas tells of spills only while it compiles, so a cached kernel would have no report
    with (
        triton.knobs.nvidia.scope(),
        triton.knobs.compilation.scope(),
        contextlib.redirect_stdout(io.StringIO()) as log,
    ):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return result, log.getvalue()


def compile_shipped(kernel: ShippedKernel, capability: int = 90) -> CompiledReport:
    """Compile ``kernel`` and report.

    Raises:
        ValueError: as :func:`compiled`.
    """
    result, said = compiled(kernel, capability)
    ptx = result.asm["ptx"]
    return CompiledReport(
        name=kernel.name,
        registers=_number(r"Used (\d+) registers", said),
        spill_bytes=_number(r"(\d+) bytes spill stores", said) + _number(r"(\d+) bytes spill loads", said),
        local_bytes=_number(r"(\d+) bytes stack frame", said),
        shared_bytes=result.metadata.shared,
        wgmma="wgmma.mma_async" in ptx,
        mma="mma.sync" in ptx,
    )


def problems(kernel: ShippedKernel, report: CompiledReport) -> list[str]:
    """Rules that a compiled kernel breaks: spills, local memory, too much shared memory, tensor cores left idle."""
    found = []
    if report.spill_bytes:
        found.append(f"{kernel.name} spills {report.spill_bytes} bytes a thread")
    if report.local_bytes:
        found.append(f"{kernel.name} has {report.local_bytes} bytes of local memory a thread")
    if report.shared_bytes > MAX_SHARED_BYTES:
        found.append(f"{kernel.name} needs {report.shared_bytes} bytes of shared memory, {MAX_SHARED_BYTES} are there")
    if kernel.uses_tensor_cores and not report.wgmma:
        found.append(f"{kernel.name} has no wgmma")
    return found


def wrapper_modules() -> list[str]:
    """Names of the modules beside this one that ship kernels."""
    names = sorted(module.name for module in pkgutil.iter_modules(dasc.fast.triton.__path__))
    return [name for name in names if name != "aot" and hasattr(_module(name), "shipped")]


def shipped_kernels(modules: Sequence[str] | None = None) -> list[ShippedKernel]:
    """Every kernel at every configuration that ships.

    Args:
        modules: wrapper modules to look into; all of :func:`wrapper_modules` when ``None``.
    """
    return [
        kernel for name in (wrapper_modules() if modules is None else modules) for kernel in _module(name).shipped()
    ]


def table(kernels: Sequence[ShippedKernel], reports: Sequence[CompiledReport]) -> str:
    """One line a kernel."""
    wide = max((len(kernel.name) for kernel in kernels), default=4)
    lines = [f"{'kernel':{wide}}  warps stages  regs spill local shared  matrix"]
    for kernel, x in zip(kernels, reports, strict=True):
        matrix = " ".join(name for name in ("wgmma", "mma") if getattr(x, name)) or "-"
        lines.append(
            f"{x.name:{wide}}  {kernel.num_warps:5} {kernel.num_stages:6}  {x.registers:4} {x.spill_bytes:5} "
            f"{x.local_bytes:5} {x.shared_bytes:6}  {matrix}"
        )
    return "\n".join(lines)


def main(modules: Sequence[str]) -> int:
    """Print the table and the problems; the exit status."""
    kernels = shipped_kernels(modules or None)
    reports = [compile_shipped(kernel) for kernel in kernels]
    print(table(kernels, reports))
    found = [problem for kernel, report in zip(kernels, reports, strict=True) for problem in problems(kernel, report)]
    for problem in found:
        print(problem)
    return 1 if found else 0


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"dasc.fast.triton.{name}")


def _number(pattern: str, text: str) -> int:
    """The number in the only line that matches."""
    (number,) = re.findall(pattern, text)
    return int(number)
