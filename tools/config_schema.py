"""Write the JSON schema of config files, which editors read: python -m tools.config_schema."""

from __future__ import annotations

import json
from pathlib import Path

from toolkit.config.json_schema import json_schema

SCHEMA = Path(__file__).parents[1] / "train_configs" / "schema.json"

if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {SCHEMA}")
