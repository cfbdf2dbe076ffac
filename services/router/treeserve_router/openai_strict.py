"""What all parts of an OpenAI-compatible request have in common: nothing unknown passes, and null leaves to default."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """Refuses parameters that it does not list, and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """A null stands for an absent parameter, as clients mean it; one that is required keeps it, to be refused."""
        if not isinstance(value, dict):
            return value
        required = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: v for name, v in value.items() if v is not None or name in required}
