"""Scripts in processes of their own that have torch and Monograph imported already.

A server that has imported both, and captured a step, forks for each script: an interpreter without anything that other
tests did, some seconds sooner.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support import ROOT

_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.support.warmed", "tests.support.warm"])


def run_script(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` would do and say, for a file with its arguments or for `-m` and a module."""
    with TemporaryDirectory() as folder:
        told = [Path(folder, name) for name in ("stdout", "stderr")]
        process = _SERVER.Process(target=_run, args=(list(arguments), str(cwd), dict(env), *map(str, told)))
        process.start()
        process.join()
        assert process.exitcode is not None
        texts = [path.read_text() for path in told]
    return subprocess.CompletedProcess(list(arguments), process.exitcode, *texts)


def run_module(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """What `python -m name *arguments` would do and say at the root of the repository."""
    return run_script(["-m", name, *map(str, arguments)], cwd=ROOT, env=os.environ)


def _run(arguments: list[str], cwd: str, env: dict[str, str], stdout: str, stderr: str) -> None:
    for number, path in ((0, os.devnull), (1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    status: object = 0
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], cwd
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).absolute().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status or 0))  # type: ignore[call-overload]
