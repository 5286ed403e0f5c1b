"""Servers that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.running import Server, save_all


@pytest.fixture(scope="package")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the artifacts."""
    folder = tmp_path_factory.mktemp("artifacts")
    save_all(folder)
    return folder


@pytest.fixture(scope="package")
def server(artifacts: Path) -> Iterator[Server]:
    """A server of all artifacts that are quick."""
    options = ("--delay-ms", "20", "--max-batch", "4")
    models = ("scores.zip", "bag=words.zip", "centered.zip", "picked.zip", "counting.zip")
    found = Server(artifacts, *models, *options)
    yield found
    assert found.stop() == 0
