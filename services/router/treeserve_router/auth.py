"""API keys: how they are made, what a file says of them, and whose one is."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import yaml

from treeserve_core.errors import InvalidArgumentError
from treeserve_router.admission import MAX_ID_CHARS
from treeserve_wire.file_watch import FileWatch

RELOAD_S = 1.0

_PREFIX = "tsk_"
_SECRET_BYTES = 32
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = {"sha256": str, "tenant": str, "trusted": bool, "name": str}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ApiKey:
    """What is known of a key, which is not kept itself.

    Attributes:
        sha256: digest of the key, in hex.
        tenant: whose it is.
        trusted: its requests may be for other tenants and more urgent than the default: a gateway's, or an operator's.
        name: what logs call it.
    """

    sha256: str
    tenant: str
    trusted: bool = False
    name: str = ""


class Keyring:
    """The keys of a file, read again when it changes. A file that cannot be used is reported, and the last keys stay.

    Only digests are kept. A key has 256 random bits, so its plain SHA-256 cannot be undone, and how long it takes to
    look a digest up tells nothing of a key.

    Raises:
        InvalidArgumentError: if the file cannot be used; the message says where, and repeats nothing of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch = FileWatch(path)
        self._watch.changed()
        self._keys = _read(path)

    def find(self, key: str) -> ApiKey | None:
        """What is known of a key, if anything."""
        return self._keys.get(digest_of(key))

    def refresh(self) -> None:
        """Read the file if it has changed."""
        if not self._watch.changed():
            return
        try:
            self._keys = _read(self._path)
        except InvalidArgumentError as error:
            _log.error("changed API keys cannot be used; the last ones stay in force", reason=str(error))
        else:
            _log.info("API keys changed", path=str(self._path), keys=len(self._keys))

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_S)
            self.refresh()


def new_key() -> str:
    """A key that nobody has."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(key: str) -> str:
    """What stands for a key in the file."""
    return hashlib.sha256(key.encode()).hexdigest()


def file_line(key: ApiKey) -> str:
    """The line of a key in the file."""
    trusted = {"trusted": True} if key.trusted else {}
    return "- " + json.dumps({"sha256": key.sha256, "tenant": key.tenant, **trusted, "name": key.name})


def check_tenant(tenant: str) -> None:
    """Raises ValueError for a tenant that no request can have."""
    if not tenant:
        raise ValueError("tenant is missing")
    if len(tenant) > MAX_ID_CHARS:
        raise ValueError(f"tenant has more than {MAX_ID_CHARS} characters")


def _read(path: Path) -> Mapping[str, ApiKey]:
    """Keys by digest, of a YAML list of mappings with the fields of `ApiKey`.

    No message repeats what the file holds: somebody may have put a key there instead of its digest.
    """
    try:
        entries = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise InvalidArgumentError("api_keys_file", f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" at line {mark.line + 1}"
        raise InvalidArgumentError("api_keys_file", f"{path}: is not YAML{where}") from None
    if not isinstance(entries, list):
        raise InvalidArgumentError("api_keys_file", f"{path}: is no list of keys")
    keys: dict[str, ApiKey] = {}
    for number, entry in enumerate(entries, start=1):
        try:
            key = _key_from(entry)
            if key.sha256 in keys:
                raise ValueError("its sha256 is an earlier key's")
        except ValueError as error:
            raise InvalidArgumentError("api_keys_file", f"{path}: key {number}: {error}") from None
        keys[key.sha256] = key
    return keys


def _key_from(entry: Any) -> ApiKey:
    """Raises ValueError."""
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS.keys():
        raise ValueError(f"is no mapping of {', '.join(_FIELDS)} alone")
    for name, value in entry.items():
        if not isinstance(value, _FIELDS[name]):
            raise ValueError(f"{name} is no {_FIELDS[name].__name__}")
    if not _DIGEST.fullmatch(entry.get("sha256", "")):
        raise ValueError("sha256 is not 64 lower-case hexadecimal digits; `treeserve keys new` prints a whole line")
    check_tenant(entry.get("tenant", ""))
    return ApiKey(**({"name": entry["sha256"][:8]} | entry))
