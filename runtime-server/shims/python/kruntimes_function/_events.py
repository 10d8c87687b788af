"""CloudEvents 1.0 in structured JSON mode."""

import base64
import datetime
import http.client
import json
import os
import re
import uuid

from kruntimes_function import PublishError, _http, _trace

MAX_BYTES = 1024 * 1024
NAME = re.compile(r"[a-z0-9]{1,20}")


def publish(attributes, timeout):
    body, event_id = encode(attributes)
    url = os.environ.get("PUBLISHER_PROXY_ADDRESS", "")
    if not url:
        raise PublishError(
            "PUBLISHER_PROXY_ADDRESS is not set: set it in the Run's env, or for all functions of the Runtime"
        )
    try:
        target = _http.address(url, "/")
    except ValueError:
        raise PublishError("PUBLISHER_PROXY_ADDRESS is no http or https address") from None
    left = _http.left()
    if left is not None:
        # Some time remains to tell of an exchange that fails.
        timeout = min(timeout, left - min(1.0, left / 4))
    try:
        status = _http.post(target, body, "application/cloudevents+json; charset=utf-8", timeout)
    except (OSError, http.client.HTTPException) as error:
        raise PublishError(f"{target[4]}: {error or type(error).__name__}") from error
    if not 200 <= status < 300:
        raise PublishError(f"{target[4]} answered {status}")
    return event_id


def encode(given):
    """(structured JSON, id); ValueError or TypeError names the attribute that is wrong."""
    data = given.pop("data", None)
    event = {
        "specversion": "1.0",
        "id": str(uuid.uuid4()),
        "source": f"/namespaces/{os.environ.get('FUNC_NAMESPACE', '')}/runs/{os.environ.get('FUNC_NAME', '')}",
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z"),
    }
    traceparent = _trace.current_traceparent()
    if traceparent:
        event["traceparent"] = traceparent
    for name, value in given.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"attribute {name!r}: a name has 1 to 20 lower-case letters and digits")
        if value is None:
            continue
        if isinstance(value, datetime.datetime):
            if value.tzinfo is None:
                raise ValueError(f"attribute {name!r}: a time needs a time zone")
            value = value.isoformat()
        if not isinstance(value, (str, bool, int)):
            raise TypeError(f"attribute {name!r} must be str, bool or int, not {type(value).__name__}")
        event[name] = value
    for name in ("id", "source", "type"):
        if not isinstance(event.get(name), str) or not event[name]:
            raise ValueError(f"attribute {name!r} must be text that is not empty")
    if event["specversion"] != "1.0":
        raise ValueError("attribute 'specversion' must be '1.0'")
    if isinstance(data, (bytes, bytearray, memoryview)):
        event.setdefault("datacontenttype", "application/octet-stream")
        event["data_base64"] = base64.b64encode(bytes(data)).decode("ascii")
    elif data is not None:
        event.setdefault("datacontenttype", "application/json")
        event["data"] = data
    body = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    if len(body) > MAX_BYTES:
        raise ValueError(f"the event has {len(body)} bytes; at most {MAX_BYTES} are allowed")
    return body, event["id"]
