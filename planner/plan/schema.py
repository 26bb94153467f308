"""The plan's format as JSON Schema, made from the records themselves: `python -m planner.plan.schema`."""

from __future__ import annotations

import json

from planner.plan.plan import Plan


def plan_schema() -> str:
    """JSON Schema (draft 2020-12) of a plan file, canonical text."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Plan.model_json_schema()}
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(plan_schema(), end="")
