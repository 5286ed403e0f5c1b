"""C++ code that calls torch's own C++ functions, compiled to a library.

What it includes is public, and belongs to the torch that it is compiled beside.
"""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import torch


def compile_with_torch(code: str, goal: Path) -> None:
    """Compile C++ code that includes headers of c10. Raises OSError or CalledProcessError.

    What: Inductor's choice of a compiler. Degraded path: those errors.
    """
    try:
        compiler = importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except Exception as error:
        raise OSError(f"no C++ compiler: {error}") from error
    source, there = goal.with_suffix(".cpp"), Path(torch.__file__).parent
    source.write_text(code)
    old_strings = [] if torch.compiled_with_cxx11_abi() else ["-D_GLIBCXX_USE_CXX11_ABI=0"]
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", "-w", *old_strings, f"-I{there / 'include'}"]
    command = [*compiler.split(), *flags, str(source), "-o", str(goal), f"-L{there / 'lib'}", "-lc10"]
    subprocess.run(command, check=True, capture_output=True)
    source.unlink()
