"""One bounded POST: no redirects, no second try, and an end that does not depend on the peer."""

import http.client
import socket
import sys
import threading
import time
from urllib.parse import urlsplit


def address(url, default_path):
    """(connection class, host, port, path, text for people); ValueError when it is no http address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}.get(parts.scheme)
    if kind is None or not parts.hostname:
        raise ValueError("no http or https address")
    path = parts.path if parts.path not in ("", "/") else default_path
    # Not the query either: it may hold a key.
    shown = path
    if parts.query:
        path += f"?{parts.query}"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = f":{parts.port}" if parts.port else ""
    # Not netloc: it may hold a password.
    return kind, parts.hostname, parts.port, path, f"{parts.scheme}://{host}{port}{shown}"


def post(target, body, content_type, timeout):
    """Sends ``body``; the status of the answer. OSError or HTTPException when there is none in time."""
    kind, host, port, path, _ = target
    timeout = max(0.001, timeout)
    connection = kind(host, port, timeout=timeout)
    late = threading.Event()

    def give_up():
        late.set()
        if connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    # The time-out of a socket starts anew with every byte; this one does not.
    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        connection.connect()
        # Connecting took all the time: too late to send anything.
        if late.is_set():
            raise TimeoutError
        headers = {"Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close"}
        connection.request("POST", path, body, headers)
        status = connection.getresponse().status
        # Headers that end where we gave up look whole.
        if late.is_set():
            raise TimeoutError
        return status
    except (OSError, http.client.HTTPException) as error:
        # Either clock may be the first.
        if late.is_set() or isinstance(error, (TimeoutError, socket.timeout)):
            raise TimeoutError(f"no answer within {timeout:g} s") from error
        raise
    finally:
        timer.cancel()
        connection.close()


def call():
    """What is known of the running call; outside of a runtime nothing is."""
    return sys.modules.get("_kruntimes_call")


def left():
    """Seconds until the running call must end; None when nobody knows."""
    end = getattr(call(), "end", None)
    return None if end is None else max(0.0, end - time.monotonic())


def traceparent():
    return getattr(call(), "traceparent", "")


def tracestate():
    return getattr(call(), "tracestate", "")
