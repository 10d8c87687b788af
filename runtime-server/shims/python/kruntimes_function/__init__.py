"""What a Python function may import from its runtime.

    from kruntimes_function import Response, get_tracer, publish_cloud_event
"""

__all__ = ["PublishError", "Response", "get_tracer", "publish_cloud_event"]


class Response:
    """An answer that is not JSON: ``body`` goes out as it is, under ``content_type``.

    ``body`` is bytes, or text that is sent as UTF-8.
    """

    __slots__ = ("body", "content_type")

    def __init__(self, body=b"", content_type="application/octet-stream"):
        if isinstance(body, str):
            body = body.encode("utf-8")
        elif not isinstance(body, (bytes, bytearray, memoryview)):
            raise TypeError(f"body must be bytes or str, not {type(body).__name__}")
        if not isinstance(content_type, str):
            raise TypeError(f"content_type must be str, not {type(content_type).__name__}")
        self.body = bytes(body)
        self.content_type = content_type

    def __repr__(self):
        return f"Response({len(self.body)} bytes, {self.content_type!r})"


class PublishError(Exception):
    """An event did not reach the publisher proxy, or nobody knows whether it did."""


def get_tracer(name="kruntimes_function"):
    """A tracer whose spans are children of the call's trace context.

    Its spans go to TRACE_COLLECTOR_ENDPOINT (OTLP over HTTP, JSON) in the background; without that name, or
    when the caller's trace is not sampled, they go nowhere. It has the everyday part of OpenTelemetry's
    interface: ``start_as_current_span(name, attributes=...)``, ``start_span(name)``.
    """
    # Imported here: most functions need none of it, and it takes longer to load than they do.
    from kruntimes_function import _trace

    return _trace.get_tracer(name)


def publish_cloud_event(event=None, /, *, timeout=5.0, **attributes):
    """Sends one CloudEvent 1.0 to PUBLISHER_PROXY_ADDRESS and returns its id.

    Attributes come as a mapping, as keywords, or both: ``type`` is needed; ``data`` is any JSON value or bytes;
    ``id``, ``source``, ``time``, ``datacontenttype`` and ``traceparent`` have defaults; others are extensions.
    ``timeout`` (seconds) holds for the whole exchange, and is never longer than what is left of the call.

    Raises PublishError when no address is set, nobody answers in time, or the answer is no success. Nothing is
    sent twice. Raises ValueError or TypeError when the event is none.
    """
    from kruntimes_function import _events

    return _events.publish({**(event or {}), **attributes}, timeout)
