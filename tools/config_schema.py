"""Write the JSON schema of config files for editors: python -m tools.config_schema."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.config.help import describe
from toolkit.config.schema import Config, fields, tables
from toolkit.config.types import NONE
from toolkit.config.unsupported import UNSUPPORTED
from toolkit.errors import EXIT_FINISHED

SCHEMA = Path(__file__).parents[1] / "train_configs" / "schema.json"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    for field in fields():
        entry = definitions[tables()[field.table].__name__]["properties"][field.name]
        entry["description"] = describe(field)
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
    for key, (default, reason) in UNSUPPORTED.items():
        *path, name = key.split(".")
        table = schema
        for part in path:
            inner = table["properties"].setdefault(part, {"type": "object", "properties": {}})
            table = definitions[inner["$ref"].rpartition("/")[2]] if "$ref" in inner else inner
        table["properties"][name] = {"const": NONE if default is None else default, "description": reason}
    extends = {"type": "string", "description": "TOML file that this one changes, relative to this one"}
    return schema | {"properties": {"extends": extends} | schema["properties"]}


def main(argv: Sequence[str]) -> int:
    """Run the program and return its exit code."""
    description = f"Write the JSON schema of config files, which editors read, to {SCHEMA}."
    argparse.ArgumentParser(prog="python -m tools.config_schema", description=description).parse_args(argv)
    SCHEMA.write_text(json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {SCHEMA}")
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
