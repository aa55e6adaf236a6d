"""Typed records that are stored in files. No torch."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from lenience.core.errors import InputError


class Record(BaseModel):
    """A record of a JSON file or of one of its lines. Unknown and missing fields are errors that
    name the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    @classmethod
    def read(cls, value: Any, where: str, fix: str = "restore it from a copy") -> Self:
        """Return a record from a JSON value. Raises InputError that names the place `where`, the
        wrong fields and the fix."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise InputError(f"{where}: {', '.join(_problems(error))}; {fix}") from None

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def _problems(error: ValidationError) -> list[str]:
    """Return one phrase per kind of fault."""
    lacks = []
    unknown = []
    wrong = []
    for item in error.errors():
        field = " ".join(map(str, item["loc"]))
        if item["type"] == "missing":
            lacks.append(field)
        elif item["type"] == "extra_forbidden":
            unknown.append(field)
        else:
            wrong.append(f"{field}: {item['msg']}" if field else item["msg"])
    phrases = [f"lacks {', '.join(lacks)}"] if lacks else []
    if unknown:
        phrases.append(f"has {', '.join(unknown)}, which is unknown here")
    return phrases + wrong
