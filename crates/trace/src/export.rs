//! How spans leave: through a bounded queue to a thread of their own. Nobody waits for a collector; what it does not
//! take is lost and counted.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc as std_mpsc,
    },
    thread,
    time::Duration,
};

use opentelemetry::{InstrumentationScope, trace::TracerProvider as _};
use opentelemetry_otlp::{SpanExporter, WithTonicConfig as _};
use opentelemetry_sdk::{
    error::OTelSdkResult,
    trace::{SdkTracerProvider, Span, SpanData, SpanExporter as _, SpanProcessor},
};
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use tokio::{
    runtime::{Builder, Runtime},
    sync::{Notify, mpsc},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use crate::{
    settings::{Error, Settings},
    span::Tracer,
};

/// Spans that may wait; what comes on top is lost. Each has about a kibibyte.
const QUEUE: usize = 2048;
/// Spans of one request to the collector.
const BATCH: usize = 512;
/// How long a span may wait for others.
const LINGER: Duration = Duration::from_millis(500);
/// How long the end of the process waits for the collector.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What became of spans; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Numbers {
    exported: Counter,
    lost: Counter,
}

/// Sends what waits when it drops, for at most two seconds.
#[derive(Debug)]
#[must_use = "spans that wait are lost when the process ends without it"]
pub struct Flush {
    stop: CancellationToken,
    ended: std_mpsc::Receiver<()>,
}

/// The end of the queue that spans go in at.
#[derive(Debug)]
struct Queue {
    spans: mpsc::Sender<SpanData>,
    /// There is a whole batch.
    plenty: Arc<Notify>,
    numbers: Numbers,
    told: AtomicBool,
}

/// The other end, and what sends.
struct Sender {
    spans: mpsc::Receiver<SpanData>,
    plenty: Arc<Notify>,
    numbers: Numbers,
    stop: CancellationToken,
    exporter: SpanExporter,
    /// The last attempt failed, and the log has it.
    failing: bool,
}

/// A tracer whose spans are sent as the settings say.
///
/// # Errors
/// When the thread cannot be started, or the exporter refuses what it reads from the environment by itself, such as
/// `OTEL_EXPORTER_OTLP_HEADERS`.
pub fn start(settings: Settings) -> Result<(Tracer, Flush), Error> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let mut exporter = {
        // The channel is driven by the runtime it is made in.
        let _entered = runtime.enter();
        SpanExporter::builder()
            .with_tonic()
            .with_channel(settings.endpoint.connect_lazy())
            .build()
            .map_err(|error| Error::Exporter(error.to_string()))?
    };
    exporter.set_resource(&settings.resource);
    let (spans, queued) = mpsc::channel(QUEUE);
    let (numbers, plenty, stop) = (
        Numbers::default(),
        Arc::new(Notify::new()),
        CancellationToken::new(),
    );
    let queue = Queue {
        spans,
        plenty: Arc::clone(&plenty),
        numbers: numbers.clone(),
        told: AtomicBool::new(false),
    };
    let sender = Sender {
        spans: queued,
        plenty,
        numbers: numbers.clone(),
        stop: stop.clone(),
        exporter,
        failing: false,
    };
    let ended = spawn(runtime, sender)?;
    let provider = SdkTracerProvider::builder()
        .with_sampler(settings.sampler)
        .with_resource(settings.resource)
        .with_span_processor(queue)
        .build();
    let scope = InstrumentationScope::builder("kruntimes").with_version(env!("CARGO_PKG_VERSION"));
    let tracer = provider.tracer_with_scope(scope.build());
    Ok((Tracer::on(tracer, numbers), Flush { stop, ended }))
}

/// Its own thread and runtime: encoding costs no caller anything, and the last spans leave even when the process's
/// runtime is over.
fn spawn(runtime: Runtime, sender: Sender) -> io::Result<std_mpsc::Receiver<()>> {
    let (end, ended) = std_mpsc::channel();
    thread::Builder::new().name("spans".to_owned()).spawn(move || {
        runtime.block_on(sender.run());
        // Nobody may be waiting any more.
        let _ = end.send(());
    })?;
    Ok(ended)
}

// === impl Numbers ===

impl Numbers {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register(
            "trace_spans_exported",
            "Spans that a collector took",
            self.exported.clone(),
        );
        registry.register(
            "trace_spans_lost",
            "Spans that no collector took in time",
            self.lost.clone(),
        );
    }
}

// === impl Flush ===

impl Drop for Flush {
    fn drop(&mut self) {
        self.stop.cancel();
        // An error means that the thread is over, or that the time is.
        let _ = self.ended.recv_timeout(LAST_WORDS);
    }
}

// === impl Queue ===

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &opentelemetry::Context) {}

    fn on_end(&self, span: SpanData) {
        if self.spans.try_send(span).is_err() {
            self.numbers.lost.inc();
            if !self.told.swap(true, Ordering::Relaxed) && !self.spans.is_closed() {
                tracing::warn!("spans are lost: there are more than the collector takes");
            }
        } else if self.spans.max_capacity() - self.spans.capacity() >= BATCH {
            self.plenty.notify_one();
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

// === impl Sender ===

impl Sender {
    /// Until it is told to stop and the queue is empty.
    async fn run(mut self) {
        let stop = self.stop.clone();
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            tokio::select! {
                biased;
                taken = self.spans.recv_many(&mut batch, BATCH) => if taken == 0 { return },
                () = stop.cancelled() => return,
            }
            // It may be one of many.
            tokio::select! {
                () = sleep(LINGER) => {}
                () = self.plenty.notified() => {}
                () = stop.cancelled() => {}
            }
            while !batch.is_empty() {
                while batch.len() < BATCH
                    && let Ok(span) = self.spans.try_recv()
                {
                    batch.push(span);
                }
                self.send(std::mem::take(&mut batch)).await;
                let _ = self.spans.try_recv().map(|span| batch.push(span));
            }
        }
    }

    async fn send(&mut self, batch: Vec<SpanData>) {
        let spans = batch.len() as u64;
        match self.exporter.export(batch).await {
            Ok(()) => {
                self.numbers.exported.inc_by(spans);
                if std::mem::take(&mut self.failing) {
                    tracing::info!("the collector takes spans again");
                }
            }
            Err(error) => {
                self.numbers.lost.inc_by(spans);
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(%error, "spans are lost: the collector does not take them");
                }
            }
        }
    }
}
