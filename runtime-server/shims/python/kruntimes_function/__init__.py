"""What a Python function may import from its runtime."""

__all__ = ["Response"]


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
