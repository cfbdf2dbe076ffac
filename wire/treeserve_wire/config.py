"""Process configuration: one frozen dataclass from defaults, a YAML file, the environment and flags, in that order."""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from treeserve_core.errors import InvalidArgumentError, TreeserveError

T = TypeVar("T")

_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class ConfigError(TreeserveError):
    """A configuration that cannot be used; the message names the source and the field."""


def option(
    text: str, parse: Callable[[Mapping[str, Any]], Any] | None = None, *, default: str | None = None
) -> dict[str, Any]:
    """The metadata of a field.

    Args:
        text: its help text.
        parse: makes the field's value from a mapping, which YAML holds as such and all else as YAML text; raises
            InvalidArgumentError. None for a field of one of the types that `load_config` knows.
        default: what the help says the default is, where the field's own value says nothing; None shows that value.
    """
    return {"help": text, "parse": parse, "default": default}


def check_at_least(config: object, least: int, *names: str) -> None:
    """Raise InvalidArgumentError for the first of the named fields that is smaller."""
    for name in names:
        if getattr(config, name) < least:
            raise InvalidArgumentError(name, f"must be at least {least}")


def load_config(
    cls: type[T],
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    prefix: str = "TREESERVE_",
    prog: str | None = None,
) -> T:
    """Build `cls`: its defaults < ``--config FILE.yaml`` < environment ``<prefix><FIELD>`` < flags ``--field-name``.

    Fields may be str, int, float, bool, Path, tuple[str, ...] (a comma-separated list, or a repeated flag) or one of
    these with None; an empty string is None there. Help texts, and ways to read other types, come from
    ``field(metadata=option(...))``.

    Args:
        argv: arguments without the program's name; None takes those of the process.
        prog: the program's name in help and errors.

    Raises:
        ConfigError: for an unknown key, a value of the wrong type, a missing required field, or a value that the
            dataclass itself refuses.
        SystemExit: for ``--help`` and for arguments that argparse refuses.
    """
    fields = _fields(cls)
    flags = vars(_parser(cls, prefix, prog).parse_args(argv))
    file = flags.pop("config") or environ.get(f"{prefix}CONFIG")
    values = _from_file(Path(file), fields) if file else {}
    for name, convert in fields.items():
        variable = f"{prefix}{name.upper()}"
        if variable in environ:
            values[name] = _converted(convert, environ[variable], variable)
        if flags[name] is not None:
            values[name] = _converted(convert, flags[name], _flag(name))
    missing = [f.name for f in _dataclass_fields(cls) if _is_required(f) and f.name not in values]
    if missing:
        raise ConfigError(f"missing: {', '.join(_flag(name) for name in missing)}")
    try:
        return cls(**values)
    except (ValueError, InvalidArgumentError) as error:
        raise ConfigError(str(error)) from error


def merged(base: T, changes: object, where: str) -> T:
    """A dataclass instance with the fields that a mapping names replaced.

    Args:
        base: its fields are of the types that `load_config` knows.
        where: names the mapping in errors.

    Raises:
        InvalidArgumentError: for what is no mapping, an unknown field, or a value that cannot be used.
    """
    fields = _fields(type(base))
    try:
        values = {name: fields[name](value) for name, value in _to_mapping(changes).items()}
        return cast("T", dataclasses.replace(cast("Any", base), **values))
    except KeyError as error:
        raise InvalidArgumentError(where, f"unknown field {error}; known are {', '.join(sorted(fields))}") from None
    except (ValueError, InvalidArgumentError) as error:
        raise InvalidArgumentError(where, str(error)) from error


def _dataclass_fields(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _fields(cls: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """A converter from YAML or text for each field."""
    hints = get_type_hints(cls)
    return {
        field.name: _parsed(parse) if (parse := field.metadata.get("parse")) else _converter(hints[field.name])
        for field in _dataclass_fields(cls)
    }


def _parsed(parse: Callable[[Mapping[str, Any]], Any]) -> Callable[[Any], Any]:
    return lambda value: parse(_to_mapping(value))


def _converter(hint: Any) -> Callable[[Any], Any]:
    if get_origin(hint) in (Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"unsupported configuration type {hint}")
        convert = _converter(inner[0])
        return lambda value: None if value is None or value == "" else convert(value)
    if hint == tuple[str, ...]:
        return _to_strings
    if hint is bool:
        return _to_bool
    if hint in (str, int, float, Path):
        return lambda value: _to_scalar(hint, value)
    raise TypeError(f"unsupported configuration type {hint}")


def _to_scalar(kind: type[Any], value: Any) -> Any:
    """int, float, str or Path from text or a YAML scalar; nothing is silently cut off or stringified."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected {kind.__name__}, not {value!r}")
    if kind is int and isinstance(value, float):
        raise ValueError(f"expected int, not {value!r}")
    return kind(str(value) if kind in (str, Path) else value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in _BOOLS:
        raise ValueError(f"expected true or false, not {value!r}")
    return _BOOLS[str(value).lower()]


def _to_strings(value: Any) -> tuple[str, ...]:
    """Text is split at commas; a list holds texts that are split as well, because a flag may be repeated."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"expected a list of strings, not {value!r}")
    return tuple(part.strip() for item in items for part in item.split(",") if part.strip())


def _to_mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, or YAML text of one; nothing is an empty one."""
    try:
        content = yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"expected a mapping of names, not {value!r}")
    return content


def _converted(convert: Callable[[Any], Any], value: Any, source: str) -> Any:
    try:
        return convert(value)
    except (ValueError, InvalidArgumentError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _from_file(path: Path, fields: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of field names to values")
    unknown = sorted(str(key) for key in content if key not in fields)
    if unknown:
        raise ConfigError(f"{path}: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(fields))}")
    return {name: _converted(fields[name], value, f"{path}: {name}") for name, value in content.items()}


def _parser(cls: type[Any], prefix: str, prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=(cls.__doc__ or "").partition("\n")[0], allow_abbrev=False)
    config_help = (
        "YAML file with values of these options, named with _ for -; environment variables, such as "
        f"{prefix}{_dataclass_fields(cls)[0].name.upper()}, go before it, and options before both (default: no file)"
    )
    parser.add_argument("--config", metavar="FILE.yaml", help=config_help)
    hints = get_type_hints(cls)
    for field in _dataclass_fields(cls):
        extra: dict[str, Any] = {"metavar": field.name.upper()}
        if hints[field.name] is bool:  # --flag alone means true
            extra |= {"nargs": "?", "const": "true"}
        elif hints[field.name] == tuple[str, ...]:
            extra["action"] = "append"
        help_text = f"{field.metadata.get('help', '')} ({_default_text(field)})".replace("%", "%%").strip()
        parser.add_argument(_flag(field.name), dest=field.name, help=help_text, **extra)
    return parser


def _default_text(field: dataclasses.Field[Any]) -> str:
    if _is_required(field):
        return "required"
    if (said := field.metadata.get("default")) is not None:
        return f"default: {said}"
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(default, Mapping):
        return "default: built in" if default else "default: none"
    if default is None or default in ("", ()):
        return "default: none"
    return f"default: {','.join(default) if isinstance(default, tuple) else default}"
