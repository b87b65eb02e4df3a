"""What the OpenAPI schema says beyond the routes, and a page of it that needs nothing from elsewhere."""

from __future__ import annotations

import html
from typing import Any

from pydantic import BaseModel

from dualprompt.serve.replies import Refused


def _form(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def json_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Return what the schema says of a request in JSON."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_FILE = {"type": "string", "format": "binary"}
_FILES = {"type": "array", "items": _FILE, "minItems": 1}
PREDICT = _form({"images": _FILES | {"description": "images"}}, ["images"])
PREDICT["requestBody"]["content"]["image/*"] = {"schema": _FILE}
_CLASSES = {
    "archive": _FILE | {"description": "a zip of class folders"},
    "images": _FILES | {"description": "instead of an archive: images whose file names are class/picture.jpg"},
}
IMAGES = _form(_CLASSES, [])
CORRECTION = _form(
    {
        "images": _FILE | {"description": "the image"},
        "label": {"type": "string", "description": "the class that it shows"},
        "answered": {"type": "string", "description": "the class that was answered"},
    },
    ["images", "label"],
)
TEACH = _form(
    _CLASSES
    | {
        "name": {"type": "string", "description": "the task's name"},
        "epochs": {"type": "integer", "minimum": 1},
        "again": {"type": "boolean", "description": "more images for classes that it knows"},
    },
    [],
)
REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": {"description": "Refused: one line says why", "model": Refused}}


def docs_page(schema: dict[str, Any]) -> str:
    """Return a page that lists the API, without scripts and without anything from elsewhere."""
    rows = []
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            body = about.get("requestBody", {}).get("content", {}).get("multipart/form-data", {}).get("schema", {})
            fields = [
                f"{name}: {value.get('description', value['type'])}"
                for name, value in body.get("properties", {}).items()
            ]
            fields += [f"?{each['name']}" for each in about.get("parameters", []) if each["in"] == "query"]
            fields += ["with the token"] if about.get("security") else []
            cells = (f"{method.upper()} {path}", about.get("summary", ""), "; ".join(fields))
            rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>dualprompt: API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="stylesheet" href="static/style.css"></head><body><main><h1>API</h1>'
        "<table><thead><tr><th>Request</th><th>What it does</th><th>Fields</th></tr></thead>"
        f"<tbody>{table}</tbody></table>"
        '<p>The whole schema: <a href="openapi.json">openapi.json</a></p></main></body></html>'
    )
