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
_ANYWAY = {
    "skip_bad": {"type": "boolean", "description": "leave out images that cannot be read"},
    "nested": {"type": "boolean", "description": "the folders of folders that were sent are the classes"},
}
CHECK = _form(_CLASSES | {"nested": _ANYWAY["nested"]}, [])
IMAGES = _form(_CLASSES | _ANYWAY, [])
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
    | _ANYWAY
    | {
        "name": {"type": "string", "description": "the task's name"},
        "epochs": {"type": "integer", "minimum": 1},
        "again": {"type": "boolean", "description": "more images for classes that it knows"},
    },
    [],
)
REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": {"description": "Refused: one line says why", "model": Refused}}


def docs_page(schema: dict[str, Any]) -> str:
    """Return a page that lists the API, without scripts and without anything from elsewhere; it fits a phone."""
    items = [
        _route(path, method, about) for path, methods in schema["paths"].items() for method, about in methods.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>dualprompt: API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="stylesheet" href="static/style.css"></head><body><main><h1>API</h1>'
        f'<ul class="routes">{"".join(items)}</ul>'
        '<p>The whole schema: <a href="openapi.json">openapi.json</a></p></main></body></html>'
    )


def _route(path: str, method: str, about: dict[str, Any]) -> str:
    content = about.get("requestBody", {}).get("content", {})
    body = next(iter(content.values()), {}).get("schema", {})
    fields = [
        f"{name}: {value.get('description', value.get('type', 'or null'))}"
        for name, value in body.get("properties", {}).items()
    ]
    fields += [f"?{each['name']}" for each in about.get("parameters", []) if each["in"] == "query"]
    fields += ["with the token"] if about.get("security") else []
    sent = f" as {' or '.join(content)}" if content else ""
    lines = [
        f"<code>{html.escape(f'{method.upper()} {path}')}</code>",
        f"<p>{html.escape(about.get('summary', '') + sent)}</p>",
        f'<p class="hint">{html.escape("; ".join(fields))}</p>' if fields else "",
    ]
    return f"<li>{''.join(lines)}</li>"
