"""Fixtures of the chart suite: helm, and the manifests it renders."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_manifests import MONITORING, VARIANTS, Manifest

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy" / "helm" / "treeserve"

Helm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., list[Manifest]]


@pytest.fixture(scope="session")
def chart_tools() -> Path:
    """Folder with the executables helm and kubectl, fetched once into the checkout."""
    folder = REPOSITORY / ".tools"
    script = REPOSITORY / "requirements" / "fetch_chart_tools.py"
    subprocess.run([sys.executable, script, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def helm(chart_tools: Path) -> Helm:
    """`helm(*arguments, values)`: runs helm with the values on its standard input; never raises."""

    def run(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        command = [chart_tools / "helm", *arguments, "--values", "-"]
        return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """`render(values, *options, release)`: the chart's manifests in the namespace ``serving``."""

    def template(values: dict[str, Any], *options: str, release: str = "demo") -> list[Manifest]:
        run = helm("template", release, str(CHART), "--namespace", "serving", *options, values=values)
        assert run.returncode == 0, run.stderr
        return [manifest for manifest in yaml.safe_load_all(run.stdout) if manifest]

    return template


@pytest.fixture(scope="session")
def rendered(render: Render) -> dict[str, list[Manifest]]:
    """The manifests of every variant, with the Prometheus operator's API there."""
    return {name: render(values, *MONITORING) for name, values in VARIANTS.items()}


@pytest.fixture(params=sorted(VARIANTS))
def manifests(request: pytest.FixtureRequest, rendered: dict[str, list[Manifest]]) -> list[Manifest]:
    return rendered[request.param]
