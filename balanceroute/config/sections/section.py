"""The base of all sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: no unknown keys, immutable, finite numbers, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
