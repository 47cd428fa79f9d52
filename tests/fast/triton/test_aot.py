"""Every kernel that ships compiles for Hopper without spills, in the memory that is there. ``-s`` shows the table."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dasc.fast

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

import triton
import triton.language as tl

from dasc.fast.triton.aot import (
    ShippedKernel,
    compile_shipped,
    compiled,
    main,
    problems,
    shipped_kernels,
    wrapper_modules,
)

WRAPPERS = Path(dasc.fast.__file__).parent / "triton"
MODULES = sorted(path.stem for path in WRAPPERS.glob("*.py") if "\ndef shipped(" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_without_spills_and_fit(module):
    result = subprocess.run(
        [sys.executable, "-m", "dasc.fast.triton.aot", module], capture_output=True, text=True, timeout=900
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_wrapper_with_kernels_is_found_and_names_tell_kernels_apart():
    assert wrapper_modules() == MODULES
    names = [kernel.name for kernel in shipped_kernels()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["decode_gdn_bf16_v32", "decode_kda_bf16_v32", "decode_kda_pool_kv_bf16_v32"])
def test_decode_moves_the_state_16_bytes_at_a_time_and_once(name):
    """A program of 64 threads has 32 rows of 128 elements in FP32: 16 vectors of 4 a thread."""
    (kernel,) = (kernel for kernel in shipped_kernels(["decode"]) if kernel.name == name)
    ptx = compiled(kernel)[0].asm["ptx"]
    moved = {way: len(re.findall(rf"{way}\.global\S*\.v4\.b32", ptx)) for way in ("ld", "st")}
    assert moved == {"ld": 16, "st": 16}


# What follows is made to break the rules.


@triton.jit
def hoard_kernel(x, out, N: tl.constexpr):
    """Holds all of ``x`` in registers while it sums it."""
    at = tl.arange(0, N)
    values = tl.load(x + at)
    tl.store(out + at, values * tl.sum(values, axis=0))


@triton.jit
def product_kernel(a, b, out, steps, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    acc = tl.zeros((N, N), tl.float32)
    for i in range(steps):
        acc += tl.dot(tl.load(a + i * N * N + at), tl.load(b + i * N * N + at))
    tl.store(out + at, acc)


HOARD = ShippedKernel(
    "hoard", hoard_kernel, {"x": "*fp32", "out": "*fp32", "N": "constexpr"}, {"N": 2**14}, 1, 1, (), False
)
PRODUCT = ShippedKernel(
    "product",
    product_kernel,
    {"a": "*bf16", "b": "*bf16", "out": "*fp32", "steps": "i32", "N": "constexpr"},
    {"N": 64},
    num_warps=4,
    num_stages=2,
    divisible_by_16=("a", "b", "out"),
    uses_tensor_cores=True,
)


def test_spills_are_seen():
    report = compile_shipped(HOARD)
    assert report.spill_bytes > 0
    assert report.local_bytes > 0
    assert [problem.split()[1] for problem in problems(HOARD, report)] == ["spills", "has"]
    small = dataclasses.replace(HOARD, constexprs={"N": 2**8})
    assert problems(small, compile_shipped(small)) == []


def test_too_much_shared_memory_is_seen():
    deep = dataclasses.replace(PRODUCT, num_stages=20)
    report = compile_shipped(deep)
    assert report.shared_bytes > 227 * 1024
    assert [problem.split()[1] for problem in problems(deep, report)] == ["needs"]


def test_matrix_instructions_are_seen():
    report = compile_shipped(PRODUCT)
    assert (report.wgmma, report.mma) == (True, False)
    assert problems(PRODUCT, report) == []
    older = dataclasses.replace(PRODUCT, constexprs={"N": 16}, num_warps=1)
    report = compile_shipped(older)
    assert (report.wgmma, report.mma) == (False, True)
    assert problems(older, report) == ["product has no wgmma"]


def test_a_signature_that_is_not_the_kernels_is_refused():
    with pytest.raises(ValueError, match="signature of hoard must name"):
        compile_shipped(dataclasses.replace(HOARD, signature={"x": "*fp32"}))


def test_a_broken_rule_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr("dasc.fast.triton.aot.shipped_kernels", lambda modules: [HOARD])
    assert main([]) == 1
    assert "hoard spills" in capsys.readouterr().out
    monkeypatch.setattr("dasc.fast.triton.aot.shipped_kernels", lambda modules: [PRODUCT])
    assert main([]) == 0
