"""The schema for editors: completion, descriptions and checks while a TOML file is written."""

from __future__ import annotations

from typing import Any

from toolkit.config.help import meaning
from toolkit.config.schema import Config, fields, tables
from toolkit.config.types import NONE


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    for field in fields():
        entry = definitions[tables()[field.table].__name__]["properties"][field.name]
        entry["description"] = meaning(field)
        entry.pop("title", None)
        if field.default is None:
            entry.pop("default", None)  # DataLoader stands in two tables
        for alternative in entry.get("anyOf", []):
            if alternative == {"type": "null"}:
                alternative.clear()
                alternative["const"] = NONE
    for table in [schema, *definitions.values()]:
        for name, info in table["properties"].items():
            if "$ref" in info:
                table["properties"][name] = {"$ref": info["$ref"]}
            elif "patternProperties" in info:  # a table of tables
                kept = {key: info[key] for key in ("description", "type", "patternProperties")}
                table["properties"][name] = kept | {"additionalProperties": False}
    extends = {"type": "string", "description": "TOML file that this one changes, relative to this one"}
    return schema | {"properties": {"extends": extends} | schema["properties"]}
