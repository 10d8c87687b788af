"""The same tracer by OpenTelemetry's own SDK; importing this fails where that is not installed."""

import os

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kruntimes_function import _http


def make_provider():
    _, _, _, _, url = _http.address(os.environ["TRACE_COLLECTOR_ENDPOINT"], "/v1/traces")
    resource = Resource.create({"service.name": os.environ.get("FUNC_NAME") or "function"})
    made = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=url, timeout=5)
    made.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=200))
    return made


provider = make_provider()


class Tracer:
    """OpenTelemetry's tracer, which takes the call's trace context where nothing else is the parent."""

    def __init__(self, tracer):
        self._tracer = tracer

    def __getattr__(self, name):
        return getattr(self._tracer, name)

    def start_span(self, name, context=None, **others):
        return self._tracer.start_span(name, context=self._parent(context), **others)

    def start_as_current_span(self, name, context=None, **others):
        return self._tracer.start_as_current_span(name, context=self._parent(context), **others)

    @staticmethod
    def _parent(context):
        if context is not None or trace.get_current_span().get_span_context().is_valid:
            return context
        received = {"traceparent": _http.traceparent(), "tracestate": _http.tracestate()}
        return TraceContextTextMapPropagator().extract(received)


def current_traceparent():
    carrier = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def get_tracer(name):
    return Tracer(provider.get_tracer(name))
