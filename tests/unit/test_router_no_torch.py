"""The router must start without the engine's heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import json, sys
import treeserve_router.main
print(json.dumps(sorted(sys.modules)))
"""


def test_importing_the_router_loads_no_engine() -> None:
    output = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True).stdout
    modules = json.loads(output)
    assert "treeserve_router.main" in modules
    heavy = {"torch", "transformers", "triton", "treeserve_engine", "treeserve_kernels"}
    assert heavy.isdisjoint(modules)
