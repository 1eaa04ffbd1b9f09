"""A Schema Registry over Confluent's REST interface, which all of them serve (Apicurio, Karapace, Redpanda, ...).

Subjects are `<topic>-<record name>` (Confluent's TopicRecordNameStrategy), because several event types share a topic
and each has compatible versions of its own. Readers need no strategy: the wire format carries the schema's id.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from schemas.avro_types import Schema
from schemas.codec import UnknownSchemaError

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
TIMEOUT_SEC = 10.0
NUM_TRIES = 4

NOT_FOUND = 404


class SchemaRegistryError(RuntimeError):
    """The registry could not be used: names the request and the remedy. Not the fault of the record at hand."""


class SchemaRegistry:
    """Registers and looks up schemas by HTTP; everything it has seen is cached, ids never change their meaning.

    `url` may hold credentials (https://user:password@host/path). Implements `schemas.codec.SchemaIds`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SchemaRegistryError(f"schema_registry.url {url!r} is no http:// or https:// address")
        address = parts.hostname if ":" not in parts.hostname else f"[{parts.hostname}]"
        netloc = f"{address}:{parts.port}" if parts.port else address
        self._url = urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))
        self._headers = {"Accept": CONTENT_TYPE, "Content-Type": CONTENT_TYPE}
        if parts.username is not None:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = "Basic " + base64.b64encode(credentials).decode()
        self._ids: dict[tuple[str, str], int] = {}
        self._schemas: dict[int, Schema] = {}

    @staticmethod
    def subject(topic: str, schema: Schema) -> str:
        """The subject a schema is registered under: topic and full record name."""
        namespace = schema.get("namespace")
        return f"{topic}-{namespace}.{schema['name']}" if namespace else f"{topic}-{schema['name']}"

    def id_of(self, topic: str, schema: Schema) -> int:
        """The id of `schema` for values of `topic`, registered when new.

        Raises SchemaRegistryError when the registry cannot be reached or refuses the schema.
        """
        subject, text = self.subject(topic, schema), json.dumps(schema, sort_keys=True)
        cached = self._ids.get((subject, text))
        if cached is None:
            answer = self._request("POST", f"/subjects/{quote(subject, safe='')}/versions", {"schema": text})
            cached = self._ids[subject, text] = int(answer["id"])
        return cached

    def schema_of(self, schema_id: int) -> Schema:
        """The schema of an id.

        Raises UnknownSchemaError when the registry does not know the id or it is no Avro record, and
        SchemaRegistryError when the registry cannot be reached.
        """
        cached = self._schemas.get(schema_id)
        if cached is None:
            answer = self._request("GET", f"/schemas/ids/{schema_id}")
            kind = answer.get("schemaType", "AVRO")
            parsed = json.loads(answer["schema"]) if kind == "AVRO" else None
            if not isinstance(parsed, dict) or "name" not in parsed:
                raise UnknownSchemaError(f"schema id {schema_id} at {self._url} is no Avro record ({kind})")
            cached = self._schemas[schema_id] = parsed
        return cached

    def _request(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data, self._headers, method=method)
        for attempt in range(1, NUM_TRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_SEC) as response:
                    answer = json.load(response)
                if not isinstance(answer, dict):
                    raise ValueError("no JSON object")
                return answer
            except urllib.error.HTTPError as exc:
                if exc.code < 500 or attempt == NUM_TRIES:
                    raise self._refused(method, path, exc) from exc
            except ValueError as exc:
                raise SchemaRegistryError(
                    f"{method} {self._url}{path}: the answer is not a Schema Registry's ({exc}); check "
                    "schema_registry.url (Apicurio serves this interface under /apis/ccompat/v7)"
                ) from exc
            except OSError as exc:
                if attempt == NUM_TRIES:
                    reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
                    raise SchemaRegistryError(
                        f"no Schema Registry at {self._url} ({reason}); start it, or unset schema_registry.url to "
                        "write Avro single-object framing"
                    ) from exc
            time.sleep(0.2 * 2 ** (attempt - 1))
        raise AssertionError("the last try returns or raises")

    def _refused(self, method: str, path: str, exc: urllib.error.HTTPError) -> Exception:
        text = exc.read().decode(errors="replace")
        try:
            detail = dict(json.loads(text))
        except (ValueError, TypeError):
            detail = {}
        where = f"{method} {self._url}{path}: HTTP {exc.code}: {detail.get('message', text[:200])}"
        # A registry's own "not found" has a code in its body; any other web server's has not.
        if method == "GET" and exc.code == NOT_FOUND and "error_code" in detail:
            return UnknownSchemaError(f"{where}; the record was written with another registry")
        remedies = {
            401: "put the credentials into schema_registry.url",
            403: "these credentials may not register schemas",
            NOT_FOUND: "check the path of schema_registry.url (Apicurio: /apis/ccompat/v7)",
            409: "the subject holds an incompatible schema of another origin; use another kafka.topic_prefix",
        }
        return SchemaRegistryError(f"{where}; {remedies.get(exc.code, 'see the log of the registry')}")
