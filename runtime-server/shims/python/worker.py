"""The other end of the frames: one warm Python process per registration.

    python worker.py MODULE FUNCTION FOLDER SDK_DIRECTORY

Standard input is a socket to the server (u32 big-endian length, u8 type, payload).
It is moved away before the user's code is imported, so whatever that code prints
or reads cannot touch a result. The frames are described in src/worker/frame.rs.
"""

import fcntl
import os
import struct
import sys
import time

READY, FAILED, INVOKE, RESULT, ERROR = 1, 2, 3, 4, 5
RAISED, INVALID_OUTPUT, INVALID_INPUT = 1, 2, 3
# Types of values that are sent as they are: nothing to wait for, and asking each of them takes time.
PLAIN = frozenset((dict, list, str, int, float, bool, type(None)))

MAX_OUTPUT = 1024 * 1024
MAX_TRACE = 16 * 1024
MAX_MESSAGE = 4 * 1024
# Out of the way of code that closes "all" low descriptors.
WIRE_FD = 200

HEADER = struct.Struct(">IB")
CALL = struct.Struct(">QQHHH")
RESULT_HEAD = struct.Struct(">QQHI")
ERROR_HEAD = struct.Struct(">QQB")


class Wire:
    """Whole frames over one descriptor."""

    def __init__(self, fd):
        self.fd = fd

    def read(self):
        """The next frame as (type, payload), or None when the server is gone."""
        data = os.read(self.fd, 65536)
        while data and len(data) < HEADER.size:
            more = os.read(self.fd, HEADER.size - len(data))
            if not more:
                return None
            data += more
        if not data:
            return None
        length, kind = HEADER.unpack_from(data)
        have = len(data) - HEADER.size
        if have == length:
            return kind, memoryview(data)[HEADER.size :]
        payload = bytearray(length)
        view = memoryview(payload)
        view[:have] = data[HEADER.size :]
        while have < length:
            count = os.readv(self.fd, [view[have:]])
            if count == 0:
                return None
            have += count
        return kind, view

    def write(self, kind, *parts):
        length = sum(map(len, parts))
        parts = (HEADER.pack(length, kind), *parts)
        count = os.writev(self.fd, parts)
        if count < HEADER.size + length:
            rest = memoryview(b"".join(parts))[count:]
            while rest:
                rest = rest[os.write(self.fd, rest) :]


# What the SDK may know of the running call: a module, so that it is found from whatever imports it.
current = sys.modules["_kruntimes_call"] = type(sys)("_kruntimes_call")
current.traceparent, current.tracestate, current.end = "", "", None


class Context:
    """What a handler may know about its call (C-8.2)."""

    __slots__ = ("invocation_id", "traceparent", "tracestate", "_end")

    def __init__(self, invocation_id, traceparent, tracestate, end):
        self.invocation_id = invocation_id
        self.traceparent = traceparent
        self.tracestate = tracestate
        self._end = end

    def __repr__(self):
        return f"Context(invocation_id={self.invocation_id!r}, remaining={self.remaining:.3f})"

    @property
    def remaining(self):
        """Seconds until the deadline, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def deadline(self):
        """The deadline as Unix time in seconds."""
        return time.time() + self.remaining

    @property
    def logger(self):
        import logging

        logger = logging.getLogger("function")
        if not logging.getLogger().handlers:
            logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s")
        return logger

    @property
    def run_uid(self):
        return os.environ.get("KRUNTIME_RUN_UID", "")

    @property
    def run_name(self):
        return os.environ.get("FUNC_NAME", "")

    @property
    def run_namespace(self):
        return os.environ.get("FUNC_NAMESPACE", "")

    @property
    def run_labels(self):
        """The Run's labels as a map; changing it changes nothing else."""
        import json

        return json.loads(os.environ.get("FUNC_LABELS") or "{}")

    @property
    def runtime(self):
        return os.environ.get("FUNC_RUNTIME", "")


class Refused(Exception):
    """The handler cannot be used; the text says why."""


class InvalidOutput(Exception):
    """What the handler returned cannot be sent; the text names the type."""


def to_bytes(text):
    # Lone surrogates become escapes: no JSON reader takes them. Not text.encode, which a subclass may replace.
    return str.encode(text, "utf-8", "backslashreplace")


def clip(text, limit):
    raw = to_bytes(text)
    if len(raw) <= limit:
        return raw.decode("utf-8")
    return raw[: limit - 3].decode("utf-8", "ignore") + "…"


def clip_front(text, limit):
    """The end of a traceback says most."""
    raw = to_bytes(text)
    if len(raw) <= limit:
        return raw.decode("utf-8")
    return "…" + raw[3 - limit :].decode("utf-8", "ignore")


def name_of(kind):
    """The name of a class, which its metaclass cannot hide."""
    return type.__dict__["__name__"].__get__(kind)


def trouble(error, frames_to_skip=1):
    """An exception as the JSON of a frame, bounded, whatever the exception does."""
    import json

    kind = name_of(type(error))
    try:
        message = str(error)
    except BaseException:  # noqa: B036 - the user's __str__ may raise anything
        message = "(its text cannot be read)"
    try:
        import traceback

        trace = error.__traceback__
        for _ in range(frames_to_skip):
            trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
        text = "".join(traceback.format_exception(type(error), error, trace, limit=-40))
    except BaseException:  # noqa: B036 - as above
        text = f"{kind}: {message}"
    return json.dumps(
        {"type": clip(kind, 256), "message": clip(message, MAX_MESSAGE), "trace": clip_front(text, MAX_TRACE)}
    ).encode("ascii")


def load(module_name, function_name):
    import importlib

    top = module_name.partition(".")[0]
    if top in sys.modules and top != "kruntimes_function":
        raise Refused(f"module {top!r} has the name of a module that Python itself uses; rename the file")
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise Refused(f"module {module_name!r} exits when it is imported (code {error.code!r})") from error
    try:
        handler = getattr(module, function_name)
    except AttributeError:
        raise Refused(f"module {module_name!r} has no function {function_name!r}") from None
    if not callable(handler):
        raise Refused(f"{module_name}.{function_name} is not callable but {type(handler).__name__}")
    return handler, takes_context(handler, f"{module_name}.{function_name}")


def takes_context(handler, name):
    """Whether to call handler(event, context) or handler(event)."""
    code = getattr(handler, "__code__", None)
    if type(handler) is type(load) and not hasattr(handler, "__wrapped__") and not code.co_flags & 0x0C:
        # A plain function: importing inspect would take longer than everything else here.
        if code.co_kwonlyargcount == 0 and code.co_argcount and code.co_argcount - len(handler.__defaults__ or ()) <= 2:
            return code.co_argcount >= 2
    import inspect

    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = [it for it in parameters if it.kind in (it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD)]
    required = [it for it in positional if it.default is it.empty]
    needs_keyword = [it for it in parameters if it.kind is it.KEYWORD_ONLY and it.default is it.empty]
    any_number = any(it.kind is it.VAR_POSITIONAL for it in parameters)
    if len(required) > 2 or needs_keyword or not (positional or any_number):
        raise Refused(f"{name} must take (event, context) or (event)")
    return len(positional) >= 2 or any_number


def json_error(kind, error):
    """What Python's own JSON encoder says, in our words."""
    text = str(error) if type(error) in (TypeError, ValueError) else ""
    if text.startswith("keys must be str, int, float, bool or None, not "):
        return f"{kind} with a key of type {clip(text.rpartition(' ')[2], 256)}"
    if text.startswith("Circular reference"):
        return f"{kind} that holds itself"
    if text.startswith("Out of range float"):
        return "float that is NaN or infinite"
    if text.startswith("Exceeds the limit") and "digits" in text:
        return "int with too many digits"
    return f"{kind} ({name_of(type(error))})"


class Caller:
    """Calls the handler and turns whatever happens into one frame."""

    def __init__(self, handler, with_context):
        import json

        def no_constant(word):
            raise ValueError(f"{word} is no JSON")

        def no_default(value):
            raise InvalidOutput(name_of(type(value)))

        decoder = json.JSONDecoder(parse_constant=no_constant)
        # The first knows nothing of what may stand around the value, and is faster.
        self.scan, self.decode = decoder.scan_once, decoder.decode
        self.encode = json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=no_default
        ).encode
        self.handler = handler
        self.with_context = with_context
        self.loop = None
        self.stdout, self.stderr = sys.stdout, sys.stderr

    def answer(self, payload):
        call, micros, id_length, trace_length, state_length = CALL.unpack_from(payload)
        start = CALL.size
        invocation_id = str(payload[start : start + id_length], "ascii", "replace")
        start += id_length
        traceparent = tracestate = ""
        if trace_length or state_length:
            traceparent = str(payload[start : start + trace_length], "ascii", "replace")
            start += trace_length
            tracestate = str(payload[start : start + state_length], "ascii", "replace")
            start += state_length
        end = time.monotonic() + micros / 1e6
        try:
            event = self.value_of(str(payload[start:], "utf-8")) if len(payload) > start else None
        except (ValueError, RecursionError) as error:
            return ERROR, ERROR_HEAD.pack(call, 0, INVALID_INPUT), trouble(error)
        payload.release()
        current.traceparent, current.tracestate, current.end = traceparent, tracestate, end
        begin = time.perf_counter_ns()
        try:
            if self.with_context:
                value = self.handler(event, Context(invocation_id, traceparent, tracestate, end))
            else:
                value = self.handler(event)
            if type(value) not in PLAIN and hasattr(value, "__await__"):
                value = self.wait_for(value)
        except SystemExit as error:
            self.flush()
            code = error.code
            os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
        except BaseException as error:  # noqa: B036 - everything else is the caller's to know
            took = (time.perf_counter_ns() - begin) // 1000
            self.flush()
            return ERROR, ERROR_HEAD.pack(call, took, RAISED), trouble(error)
        took = (time.perf_counter_ns() - begin) // 1000
        self.flush()
        try:
            body, content_type, outputs = self.output(value)
        except InvalidOutput as error:
            return ERROR, ERROR_HEAD.pack(call, took, INVALID_OUTPUT), trouble(error)
        except Exception as error:  # what was returned is the user's own, and so are its attributes
            refused = InvalidOutput(f"{name_of(type(value))} cannot be read ({name_of(type(error))})")
            return ERROR, ERROR_HEAD.pack(call, took, INVALID_OUTPUT), trouble(refused)
        head = RESULT_HEAD.pack(call, took, len(content_type), len(outputs))
        return RESULT, head, content_type, outputs, body

    def value_of(self, text):
        try:
            value, end = self.scan(text, 0)
            if end == len(text):
                return value
        except StopIteration:  # blanks in front, or no JSON
            pass
        return self.decode(text)

    def wait_for(self, awaitable):
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)

        async def wait():
            return await awaitable

        return self.loop.run_until_complete(wait())

    def output(self, value):
        outputs = b""
        sdk = sys.modules.get("kruntimes_function")
        if sdk is not None and isinstance(value, sdk.Response):
            # Both may have been replaced since the Response was made.
            if type(value.body) is not bytes or type(value.content_type) is not str:
                raise InvalidOutput("body of a Response must be bytes and its content_type str")
            body, content_type = value.body, to_bytes(value.content_type)[:1024]
        else:
            body, content_type = self.to_json(value), b"application/json"
            if type(value) is dict and "outputs" in value:
                outputs = self.outputs(value["outputs"])
        if len(body) > MAX_OUTPUT:
            raise InvalidOutput(f"output of {len(body)} bytes; at most {MAX_OUTPUT} are allowed")
        return body, content_type, outputs

    def outputs(self, value):
        if not isinstance(value, dict):
            raise InvalidOutput(f"`outputs` must be a map of strings, not {name_of(type(value))}")
        for key, item in value.items():
            if not isinstance(key, str) or not isinstance(item, str):
                wrong = key if not isinstance(key, str) else item
                raise InvalidOutput(f"`outputs` must be a map of strings; it holds {name_of(type(wrong))}")
        return self.to_json(value)

    def to_json(self, value):
        """JSON, or a refusal that names the type. Texts of exceptions stay out of it: they may be the user's own."""
        kind = type(value)
        try:
            return str.encode(self.encode(value), "utf-8")
        except InvalidOutput as error:
            why = str(error)
        except UnicodeEncodeError:
            why = "str with a lone surrogate"
        except RecursionError:
            why = f"{name_of(kind)} that is nested too deeply"
        except (TypeError, ValueError) as error:
            why = json_error(name_of(kind), error)
        except Exception as error:  # the user's own subclasses may raise anything
            why = f"{name_of(kind)} ({name_of(type(error))})"
        raise InvalidOutput(f"JSON cannot encode this output: {why}")

    def flush(self):
        """All printed text must be in the pipe before the result is."""
        streams = [self.stdout, self.stderr]
        # The handler may have put others in their place.
        if sys.stdout is not self.stdout:
            streams.append(sys.stdout)
        if sys.stderr is not self.stderr:
            streams.append(sys.stderr)
        for stream in streams:
            try:
                stream.flush()
            except Exception:  # closed, or replaced by something that cannot
                pass


def take_wire():
    """Moves the socket away from standard input and closes what we did not open."""
    fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, WIRE_FD)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.closerange(3, WIRE_FD)
    os.closerange(WIRE_FD + 1, 4096)
    # A forked child that does not exec would otherwise hold the wire open.
    os.register_at_fork(after_in_child=lambda: os.close(WIRE_FD))
    return Wire(WIRE_FD)


def main():
    module_name, function_name, folder, sdk = sys.argv[1:5]
    wire = take_wire()
    sys.argv = [module_name]
    sys.path[0] = folder
    sys.path.append(sdk)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        caller = Caller(*load(module_name, function_name))
    except BaseException as error:  # noqa: B036 - importing runs the user's code
        sys.stdout.flush()
        wire.write(FAILED, trouble(error, 0))
        os._exit(1)
    sys.stdout.flush()
    wire.write(READY, sys.version.split()[0].encode())
    while True:
        frame = wire.read()
        if frame is None or frame[0] != INVOKE:
            os._exit(0)
        wire.write(*caller.answer(frame[1]))


main()
