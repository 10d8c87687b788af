"""The service that Envoy's transcoder translates to, as a descriptor set. In proto's words:

    package bench.v1;
    message InvokeHttpRequest { string namespace = 1; string runtime = 2; string uid = 3; google.api.HttpBody body = 4; }
    service Bridge {
      rpc InvokeHttp(InvokeHttpRequest) returns (google.api.HttpBody) {
        option (google.api.http) = {
          post: "/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}:invoke" body: "body" };
      }
    }

Bodies pass as they are, in both directions: the cheapest form of transcoding. Written field by field, so that no
compiler is needed; the numbers are those of google/protobuf/descriptor.proto and google/api/http.proto.
"""

PATH = "/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}:invoke"
OPTIONAL, STRING, MESSAGE, BYTES = 1, 9, 11, 12


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def block(field: int, *parts) -> bytes:
    """A text, or a message of `parts`."""
    data = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    return varint(field << 3 | 2) + varint(len(data)) + data


def member(name: str, place: int, kind: int, type_name: str = "") -> bytes:
    """A field of a message."""
    parts = [block(1, name), number(3, place), number(4, OPTIONAL), number(5, kind)]
    return block(2, *parts, *([block(6, type_name)] if type_name else []))


def descriptor_set() -> bytes:
    body = block(
        1,
        block(1, "google/api/httpbody.proto"),
        block(2, "google.api"),
        block(4, block(1, "HttpBody"), member("content_type", 1, STRING), member("data", 2, BYTES)),
        block(12, "proto3"),
    )
    rule = block(72295728, block(4, PATH), block(7, "body"))
    method = block(
        2,
        block(1, "InvokeHttp"),
        block(2, ".bench.v1.InvokeHttpRequest"),
        block(3, ".google.api.HttpBody"),
        block(4, rule),
    )
    bridge = block(
        1,
        block(1, "bridge.proto"),
        block(2, "bench.v1"),
        block(3, "google/api/httpbody.proto"),
        block(
            4,
            block(1, "InvokeHttpRequest"),
            member("namespace", 1, STRING),
            member("runtime", 2, STRING),
            member("uid", 3, STRING),
            member("body", 4, MESSAGE, ".google.api.HttpBody"),
        ),
        block(6, block(1, "Bridge"), method),
        block(12, "proto3"),
    )
    return body + bridge
