"""A request from an OpenAPI document: the operation that takes a key, the example of its body, the name of its header.
It checks nothing of the document, and reads only what it needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from semel.errors import ConfigurationError
from semel.verify.connection import Client
from semel.verify.message import NoAnswer, Request
from semel.verify.request_file import BAD_IN_TARGET, BAD_IN_VALUE, TOKEN

METHODS = ("post", "patch", "put", "delete")
#: Headers that OpenAPI describes elsewhere than among the parameters.
_NOT_HERE = frozenset({"accept", "content-type", "authorization"})
#: A schema may contain itself.
MAX_DEPTH = 12

_KEY = re.compile(r"idempoten|paypal-request-id", re.IGNORECASE)
_SAMPLES: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "string": "semel", "null": None}
_FORMATS = {
    "date": "2030-01-31",
    "date-time": "2030-01-31T12:00:00Z",
    "email": "semel@example.com",
    "uuid": "7f1f4b4e-5c8f-4a53-8a4b-0d6a3f1f6a11",
    "uri": "https://example.com/",
}


class Found:
    """A request, and the name of the header for its key, if the document tells."""

    def __init__(self, request: Request, key_header: str | None) -> None:
        self.request = request
        self.key_header = key_header


async def load(source: str, client_for: Callable[[str], tuple[Client, str]]) -> Any:
    """Read the document at *source*, a file or a URL."""
    if re.match(r"https?://", source):
        client, path = client_for(source)
        outcome = await client.send(Request("GET", path, (("Accept", "application/json"),)))
        if isinstance(outcome, NoAnswer) or not outcome.is_success:
            said = outcome.reason if isinstance(outcome, NoAnswer) else f"it is answered with {outcome.status}"
            raise ConfigurationError(f"--openapi can't be read: {said}.")
        data = outcome.body
    else:
        data = _file(source)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        return _yaml(data, str(error))


def _file(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{name} can't be read: {error.strerror}.") from None


def found_in(document: Any, operation: str | None) -> Found:
    """Return the request of *operation*, ``POST /path``; without one, of the only operation that takes a key."""
    all_of_them = list(_operations(document))
    named = [each for each in all_of_them if operation is None or each[0] == _normal(operation)]
    keyed = [each for each in named if _key_name(document, each[1])]
    fitting = keyed or named
    if not fitting:
        there = ", ".join(name for name, _ in all_of_them) or "none"
        raise ConfigurationError(f"--openapi has no such operation. There are: {there}.")
    if len(fitting) > 1:
        raise ConfigurationError(f"Which operation? Give --operation: {', '.join(name for name, _ in fitting)}.")
    name, described = fitting[0]
    method, _, path = name.partition(" ")
    target = re.sub(r"\{([^}]*)\}", lambda match: _path_value(document, described, match[1]), path)
    media, content = _body(document, described)
    headers = [("Content-Type", media)] if media else []
    headers += _values(document, described, "header")
    if query := _values(document, described, "query"):
        target += ("&" if "?" in target else "?") + urlencode(query)
    body = b"" if content is None else (content.encode() if isinstance(content, str) else json.dumps(content).encode())
    key_name = _key_name(document, described)
    _look_at(target, headers, key_name)
    return Found(Request(method, target, tuple(headers), body), key_name)


def _look_at(target: str, headers: list[tuple[str, str]], key_name: str | None) -> None:
    """Refuse what can't be sent: a line break in a path would be a second request, with the same credentials."""
    if not target.startswith("/") or BAD_IN_TARGET.search(target) or "#" in target:
        raise ConfigurationError(f"--openapi: the path {target!r} can't be sent. Give the request with --request.")
    for name, text in headers:
        if not TOKEN.fullmatch(name) or BAD_IN_VALUE.search(text):
            raise ConfigurationError(f"--openapi: the header {name!r} with the value {text!r} can't be sent.")
    if key_name is not None and not TOKEN.fullmatch(key_name):
        raise ConfigurationError(f"--openapi: {key_name!r} can't be the name of a header. Give --key-header.")


def _operations(document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(paths, dict):
        raise ConfigurationError("--openapi is no OpenAPI document: it has no paths.")
    for path, item in paths.items():
        if isinstance(item, dict):
            shared = item.get("parameters", [])
            for method in METHODS:
                if isinstance(described := item.get(method), dict):
                    parameters = [*described.get("parameters", []), *shared]
                    yield f"{method.upper()} {path}", described | {"parameters": parameters}


def _parameters(document: Any, described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for each in described["parameters"]:
        resolved = _resolved(document, each)
        if isinstance(resolved, dict):
            yield resolved


def _key_name(document: Any, described: dict[str, Any]) -> str | None:
    for each in _parameters(document, described):
        name = each.get("name")
        if each.get("in") == "header" and isinstance(name, str) and _KEY.search(name):
            return name
    return None


def _values(document: Any, described: dict[str, Any], place: str) -> list[tuple[str, str]]:
    """Return the parameters in the query, or among the headers, that are required; and headers that have an example."""
    found = []
    for each in _parameters(document, described):
        name, schema = each.get("name"), _resolved(document, each.get("schema", {}))
        if each.get("in") != place or not isinstance(name, str) or _KEY.search(name) or name.lower() in _NOT_HERE:
            continue
        example = each.get("example", _first(_resolved(document, each.get("examples"))))
        if example is None and isinstance(schema, dict):
            example = schema.get("example", _first(schema.get("examples")))
        if each.get("required") is True or (place == "header" and example is not None):
            example = _sample(document, schema) if example is None else example
            found.append((name, example if isinstance(example, str) else json.dumps(example)))
    return found


def _path_value(document: Any, described: dict[str, Any], name: str) -> str:
    for each in _parameters(document, described):
        if each.get("in") == "path" and each.get("name") == name:
            example = each.get("example", _first(each.get("examples")))
            return quote(str(example if example is not None else _sample(document, each.get("schema", {}))), safe="")
    return "1"


def _body(document: Any, described: dict[str, Any]) -> tuple[str | None, Any]:
    body = _resolved(document, described.get("requestBody"))
    contents = body.get("content") if isinstance(body, dict) else None
    if not isinstance(contents, dict) or not contents:
        return None, None
    media = next((each for each in contents if each.endswith("json")), next(iter(contents)))
    content = contents[media] if isinstance(contents[media], dict) else {}
    example = content.get("example", _first(_resolved(document, content.get("examples"))))
    if example is None:
        if not media.endswith("json"):
            raise ConfigurationError(f"--openapi has no example of {media}. Give the request with --request.")
        example = _sample(document, content.get("schema", {}))
    return media, example


def _first(examples: Any) -> Any:
    if isinstance(examples, list):
        return examples[0] if examples else None
    if isinstance(examples, dict):
        first = next(iter(examples.values()), None)
        return first.get("value") if isinstance(first, dict) else None
    return None


def _sample(document: Any, schema: Any, depth: int = 0) -> Any:  # noqa: C901, PLR0911 - a branch for each kind
    schema = _resolved(document, schema)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    for name in ("example", "const", "default"):
        if schema.get(name) is not None:
            return schema[name]
    for name in ("examples", "enum"):
        if isinstance(schema.get(name), list) and schema[name]:
            return schema[name][0]
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            return _sample(document, schema[name][0], depth + 1)
    if isinstance(schema.get("allOf"), list):
        parts = [_sample(document, each, depth + 1) for each in schema["allOf"]]
        return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
    kind = schema.get("type")
    kind = next((each for each in kind if each != "null"), None) if isinstance(kind, list) else kind
    if kind == "array":
        return [_sample(document, schema.get("items", {}), depth + 1)]
    if isinstance(schema.get("properties"), dict):
        wanted = schema.get("required") or list(schema["properties"])
        properties = schema["properties"].items()
        return {name: _sample(document, each, depth + 1) for name, each in properties if name in wanted}
    if kind == "object" or isinstance(schema.get("additionalProperties"), dict):
        extra = schema.get("additionalProperties")
        return {"amount": _sample(document, extra, depth + 1)} if isinstance(extra, dict) else {}
    return _scalar(schema, kind)


def _scalar(schema: dict[str, Any], kind: Any) -> Any:
    if kind in {"integer", "number"}:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        return low + 1 if isinstance(low, int | float) and not isinstance(low, bool) else _SAMPLES[kind]
    if kind == "string":
        text = str(_FORMATS.get(schema.get("format", ""), _SAMPLES["string"]))
        least, most = schema.get("minLength", 0), schema.get("maxLength", len(text) + 1000)
        return text.ljust(int(least), "x")[: int(most)]
    return _SAMPLES.get(str(kind), "semel")


def _resolved(document: Any, node: Any) -> Any:
    for _ in range(MAX_DEPTH):
        pointer = node.get("$ref") if isinstance(node, dict) else None
        if not isinstance(pointer, str):
            return node
        if not pointer.startswith("#/"):
            raise ConfigurationError(f"--openapi points at another document, {pointer!r}. Give one that is whole.")
        node = document
        for part in pointer[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, dict) else None
    return None


def _normal(operation: str) -> str:
    method, _, path = operation.strip().partition(" ")
    return f"{method.upper()} {path.strip()}"


def _yaml(data: bytes, fault: str) -> Any:
    try:
        yaml = import_module("yaml")
    except ModuleNotFoundError:
        raise ConfigurationError(f"--openapi is no JSON ({fault}). To read YAML, run: pip install pyyaml") from None
    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--openapi is neither JSON nor YAML: {' '.join(str(error).split())}") from None
