"""Spans with the everyday part of OpenTelemetry's interface, exported by OTLP over HTTP in JSON.

Where OpenTelemetry's SDK and its OTLP exporter are installed, they do the work; otherwise this file does.
"""

import collections
import contextlib
import contextvars
import functools
import json
import os
import random
import re
import sys
import threading
import time

from kruntimes_function import _http

QUEUE = 512  # spans that wait for the exporter; the oldest goes first
BATCH = 128  # spans of one request
TIMEOUT = 5.0  # seconds for one request
COMPLAIN = 60.0  # seconds between two lines about a collector that does not take them
ATTRIBUTES, EVENTS, TEXT = 64, 64, 4096  # of one span; characters

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
active = contextvars.ContextVar("kruntimes_span", default=None)


def text_of(value):
    """Bounded text, whatever the value does."""
    try:
        return str(value)[:TEXT].encode("utf-8", "replace").decode("utf-8")
    except Exception:
        return f"({type(value).__name__} without text)"


class SpanContext:
    """Which span of which trace."""

    __slots__ = ("trace_id", "span_id", "sampled")

    def __init__(self, trace_id, span_id, sampled):
        self.trace_id, self.span_id, self.sampled = trace_id, span_id, sampled

    @property
    def traceparent(self):
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


def remote():
    """The caller's span, if it sent one that can be read."""
    match = TRACEPARENT.fullmatch(_http.traceparent())
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return SpanContext(match[1], match[2], int(match[3], 16) & 1)


def current_traceparent():
    """For what is sent on: the active span, else the caller's."""
    span = active.get()
    if span is not None:
        return span.get_span_context().traceparent
    theirs = sys.modules.get("kruntimes_function._opentelemetry")
    return (theirs and theirs.current_traceparent()) or _http.traceparent()


def get_tracer(name):
    make = opentelemetry() if os.environ.get("TRACE_COLLECTOR_ENDPOINT") else None
    return Tracer(name) if make is None else make(name)


@functools.lru_cache(maxsize=None)
def opentelemetry():
    try:
        from kruntimes_function import _opentelemetry
    except (ImportError, ValueError):  # not installed, or no endpoint it could send to
        return None
    return _opentelemetry.get_tracer


class Tracer:
    def __init__(self, name):
        self.name = text_of(name)

    def start_span(self, name, attributes=None):
        """A span that ``end()`` ends; it is nobody's parent."""
        parent = active.get()
        return Span(self.name, name, parent.get_span_context() if parent is not None else remote(), attributes)

    @contextlib.contextmanager
    def start_as_current_span(self, name, attributes=None):
        """A span around a block; what is started inside is its child, and an exception is recorded."""
        span = self.start_span(name, attributes)
        token = active.set(span)
        try:
            yield span
        except Exception as error:
            span.record_exception(error)
            span.set_status("ERROR", type(error).__name__)
            raise
        finally:
            active.reset(token)
            span.end()


class Span:
    def __init__(self, tracer, name, parent, attributes):
        self._tracer, self._name, self._parent = tracer, text_of(name), parent
        trace_id = parent.trace_id if parent is not None else f"{random.getrandbits(128) or 1:032x}"
        sampled = parent.sampled if parent is not None else 1
        self._context = SpanContext(trace_id, f"{random.getrandbits(64) or 1:016x}", sampled)
        self._attributes, self._events, self._status = {}, [], {}
        self._start, self._end = time.time_ns(), None
        self.set_attributes(attributes or {})

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception):
            self.record_exception(error)
            self.set_status("ERROR", kind.__name__)
        self.end()

    def get_span_context(self):
        return self._context

    def is_recording(self):
        return self._end is None and bool(self._context.sampled)

    def set_attribute(self, key, value):
        if key in self._attributes or len(self._attributes) < ATTRIBUTES:
            self._attributes[key] = value

    def set_attributes(self, attributes):
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(self, name, attributes=None):
        if len(self._events) < EVENTS:
            self._events.append((time.time_ns(), text_of(name), dict(attributes or {})))

    def record_exception(self, error, attributes=None):
        about = {"exception.type": type(error).__name__, "exception.message": text_of(error)}
        self.add_event("exception", {**about, **(attributes or {})})

    def set_status(self, status, description=None):
        """``"OK"`` or ``"ERROR"``; OpenTelemetry's StatusCode and Status work too."""
        description = description or getattr(status, "description", None)
        name = getattr(getattr(status, "status_code", status), "name", status)
        self._status = {"code": {"OK": 1, "ERROR": 2}.get(str(name), 0)}
        if description:
            self._status["message"] = text_of(description)

    def update_name(self, name):
        self._name = text_of(name)

    def end(self):
        if self._end is None:
            self._end = time.time_ns()
            if self._context.sampled:
                exporter.add(self._tracer, self.to_otlp())

    def to_otlp(self):
        span = {
            "traceId": self._context.trace_id,
            "spanId": self._context.span_id,
            "name": self._name,
            "kind": 1,
            "startTimeUnixNano": str(self._start),
            "endTimeUnixNano": str(self._end),
            "attributes": attributes_of(self._attributes),
            "events": [
                {"timeUnixNano": str(at), "name": name, "attributes": attributes_of(attributes)}
                for at, name, attributes in self._events
            ],
            "status": self._status,
        }
        if self._parent is not None:
            span["parentSpanId"] = self._parent.span_id
        return span


def attributes_of(attributes):
    return [{"key": text_of(key), "value": value_of(value)} for key, value in list(attributes.items())[:ATTRIBUTES]]


def value_of(value):
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return {"intValue": str(value)}
    # Infinity and NaN are no JSON numbers.
    if isinstance(value, float) and value - value == 0:
        return {"doubleValue": value}
    if isinstance(value, (list, tuple)):
        # Flat, as OpenTelemetry has it; what is inside an inner list becomes text.
        plain = [text_of(item) if isinstance(item, (list, tuple)) else item for item in value[:ATTRIBUTES]]
        return {"arrayValue": {"values": [value_of(item) for item in plain]}}
    return {"stringValue": text_of(value)}


class Exporter:
    """Sends spans from one thread in the background; nobody waits for it, and it keeps few."""

    def __init__(self):
        self.spans = collections.deque(maxlen=QUEUE)
        self.wake = threading.Event()
        self.thread = None
        self.complained = None

    def add(self, scope, span):
        if not os.environ.get("TRACE_COLLECTOR_ENDPOINT"):
            return
        self.spans.append((scope, span))
        # Not alive before the first span, and in a forked child.
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self.run, name="kruntimes-spans", daemon=True)
            self.thread.start()
        self.wake.set()

    def run(self):
        while True:
            self.wake.wait()
            self.wake.clear()
            while self.spans:
                self.send([self.spans.popleft() for _ in range(min(BATCH, len(self.spans)))])

    def send(self, batch):
        try:
            target = _http.address(os.environ.get("TRACE_COLLECTOR_ENDPOINT", ""), "/v1/traces")
            status = _http.post(target, encode(batch), "application/json", TIMEOUT)
            if not 200 <= status < 300:
                self.complain(f"{target[4]} answered {status}")
        except Exception as error:  # losing spans is all that may come of it
            self.complain(str(error) or type(error).__name__)

    def complain(self, why):
        now = time.monotonic()
        if self.complained is None or now - self.complained >= COMPLAIN:
            self.complained = now
            print(f"kruntimes_function: spans are lost, TRACE_COLLECTOR_ENDPOINT: {why[:500]}", file=sys.stderr)


def encode(batch):
    resource = {
        "service.name": os.environ.get("FUNC_NAME") or "function",
        "service.namespace": os.environ.get("FUNC_NAMESPACE", ""),
        "service.instance.id": os.environ.get("KRUNTIME_RUN_UID", ""),
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "kruntimes_function",
    }
    scopes = {}
    for scope, span in batch:
        scopes.setdefault(scope, []).append(span)
    body = {
        "resourceSpans": [
            {
                "resource": {"attributes": attributes_of({name: it for name, it in resource.items() if it})},
                "scopeSpans": [{"scope": {"name": scope}, "spans": spans} for scope, spans in scopes.items()],
            }
        ]
    }
    return json.dumps(body, allow_nan=False).encode("ascii")


exporter = Exporter()
