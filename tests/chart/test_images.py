"""What goes into the images: locked, small enough, and nothing of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
REQUIREMENTS = REPOSITORY / "requirements"
IMAGE_LOCKS = ("router.lock", "engine.lock", "torch-cpu.lock")


def pins(lock: str) -> set[str]:
    return set(re.findall(r"^[A-Za-z0-9_.-]+==[^ ;\\]+", (REQUIREMENTS / lock).read_text(), re.MULTILINE))


def names(lock: str) -> set[str]:
    return {pin.partition("==")[0] for pin in pins(lock)}


@pytest.mark.parametrize("lock", IMAGE_LOCKS)
def test_an_image_runs_what_is_tested(lock):
    assert pins(lock) <= pins("treeserve.lock")


@pytest.mark.parametrize("lock", IMAGE_LOCKS)
def test_every_pin_has_a_hash(lock):
    text = (REQUIREMENTS / lock).read_text()
    blocks = re.findall(r"^[A-Za-z0-9_.-]+==.*?(?=^[A-Za-z0-9_.-]+==|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(pins(lock))
    assert all("--hash=sha256:" in block for block in blocks)


def test_each_image_holds_what_its_role_imports():
    assert {"grpcio", "redis", "starlette", "uvicorn", "jinja2", "typer", "kubernetes"} <= names("router.lock")
    assert not {"torch", "triton", "transformers"} & names("router.lock")
    assert {"grpcio", "triton", "transformers", "safetensors", "kubernetes"} <= names("engine.lock")
    assert "torch" not in names("engine.lock")  # apart, so that a GPU image can take another build
    assert names("torch-cpu.lock") == {"torch"}
    assert not {"pytest", "ruff", "mypy"} & (names("router.lock") | names("engine.lock"))


@pytest.mark.parametrize(
    "file", [*(REQUIREMENTS / lock for lock in IMAGE_LOCKS), REPOSITORY / "deploy/docker/Dockerfile"]
)
def test_no_index_and_no_path_of_a_machine_is_written_down(file):
    assert not re.search(r"https?://|file://|--index-url [^<]|--find-links [^-]|@ /", file.read_text())


def test_the_dockerfile_copies_what_the_build_context_lets_through():
    ignore = (REPOSITORY / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    packages = re.search(r"where = \[(.*?)\]", (REPOSITORY / "pyproject.toml").read_text(), re.DOTALL)
    assert packages
    for folder in re.findall(r'"([^"]+)"', packages[1]):
        assert folder in kept or folder.partition("/")[0] in kept
    assert {"pyproject.toml", "README.md", "LICENSE", "requirements/*.lock"} <= kept
