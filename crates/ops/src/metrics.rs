//! Where metrics are registered, and how they become the text of a scrape.

use std::{fmt, fs};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, text},
    metrics::{counter::ConstCounter, gauge::ConstGauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use tokio::runtime::Handle;

/// Upper bounds in seconds that every latency of this product is counted in.
///
/// From half a millisecond (a cached decision and a hop on loopback) to 300 s (the longest call
/// that the gateway allows), about two and a half times apart.
pub const LATENCY_SECONDS: [f64; 17] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];

/// The content type of [`Metrics::encode`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics of a process. Register while starting, then share it behind an `Arc`.
#[derive(Debug)]
pub struct Metrics {
    root: Registry,
}

/// A histogram over [`LATENCY_SECONDS`]; fit for `Family::new_with_constructor(metrics::latency)`.
#[must_use]
pub fn latency() -> Histogram {
    Histogram::new(LATENCY_SECONDS)
}

// === impl Metrics ===

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// A registry that holds the metrics of the process itself (`process_…`), and of the asynchronous runtime that
    /// this is called in.
    #[must_use]
    pub fn new() -> Self {
        let mut root = Registry::default();
        // Whoever scrapes is served by another one.
        let runtime = Handle::try_current().ok();
        root.register_collector(Box::new(Process { runtime }));
        Self { root }
    }

    /// Where this product's own metrics go: `gateway_routes` becomes `kruntimes_gateway_routes`.
    pub fn kruntimes(&mut self) -> &mut Registry {
        self.root.sub_registry_with_prefix("kruntimes")
    }

    /// Where metrics go whose name somebody else has fixed, such as OpenTelemetry's.
    pub fn unprefixed(&mut self) -> &mut Registry {
        &mut self.root
    }

    /// One scrape in OpenMetrics text.
    ///
    /// # Errors
    /// When a metric cannot be written as text, which names no metric: see the newest one.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut page = String::new();
        text::encode(&mut page, &self.root)?;
        Ok(page)
    }
}

/// What the kernel knows of this process, read when asked.
#[derive(Debug)]
struct Process {
    runtime: Option<Handle>,
}

/// The part of /proc/self that is worth a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Usage {
    cpu_seconds: f64,
    start_time_seconds: f64,
    threads: i64,
    resident_bytes: i64,
}

// === impl Process ===

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        if let Some(runtime) = &self.runtime {
            let tasks = i64::try_from(runtime.metrics().num_alive_tasks()).unwrap_or(i64::MAX);
            gauge(
                &mut encoder,
                "kruntimes_tasks",
                "Tasks of the asynchronous runtime",
                None,
                tasks,
            )?;
        }
        // A kernel that hides /proc costs these metrics and nothing else.
        let Some(usage) = read_usage() else {
            return Ok(());
        };
        let cpu = ConstCounter::new(usage.cpu_seconds);
        cpu.encode(encoder.encode_descriptor(
            "process_cpu",
            "User and system time used",
            Some(&Unit::Seconds),
            prometheus_client::metrics::MetricType::Counter,
        )?)?;
        gauge(
            &mut encoder,
            "process_start_time",
            "Start of this process since the epoch",
            Some(&Unit::Seconds),
            usage.start_time_seconds,
        )?;
        gauge(
            &mut encoder,
            "process_resident_memory",
            "Memory in RAM",
            Some(&Unit::Bytes),
            usage.resident_bytes,
        )?;
        gauge(
            &mut encoder,
            "process_threads",
            "Threads of the operating system",
            None,
            usage.threads,
        )?;
        if let Some(open) = count_open_files() {
            gauge(
                &mut encoder,
                "process_open_fds",
                "Open file descriptors",
                None,
                open,
            )?;
        }
        Ok(())
    }
}

fn gauge<N>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: N,
) -> Result<(), fmt::Error>
where
    ConstGauge<N>: EncodeMetric,
{
    let kind = prometheus_client::metrics::MetricType::Gauge;
    ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, unit, kind)?)
}

fn read_usage() -> Option<Usage> {
    parse_usage(
        &fs::read_to_string("/proc/self/stat").ok()?,
        &fs::read_to_string("/proc/self/status").ok()?,
        &fs::read_to_string("/proc/stat").ok()?,
    )
}

fn count_open_files() -> Option<i64> {
    // One of them is the directory being read.
    let all = fs::read_dir("/proc/self/fd").ok()?.count();
    i64::try_from(all.saturating_sub(1)).ok()
}

/// Linux reports these times in hundredths of a second to user space on every architecture we build for.
const TICKS_PER_SECOND: f64 = 100.0;

fn parse_usage(stat: &str, status: &str, system: &str) -> Option<Usage> {
    // The second field is the program's name in parentheses and may contain both blanks and ')'.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    // Numbers of proc(5), which counts from 1; `fields` begins with the third.
    let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    let boot = system
        .lines()
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse::<f64>()
        .ok()?;
    let resident_kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<i64>()
        .ok()?;
    Some(Usage {
        cpu_seconds: (field(14)? + field(15)?) / TICKS_PER_SECOND,
        start_time_seconds: boot + field(22)? / TICKS_PER_SECOND,
        threads: fields.get(20 - 3)?.parse().ok()?,
        resident_bytes: resident_kib.checked_mul(1024)?,
    })
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;

    use super::*;

    const STAT: &str = "42 (a) b) c) S 1 42 42 0 -1 4194560 9 0 0 0 150 50 0 0 20 0 7 0 2000 1 2 3";
    const STATUS: &str = "Name:\tx\nVmRSS:\t    2048 kB\nThreads:\t7\n";
    const SYSTEM: &str = "cpu 1 2 3\nbtime 1700000000\nprocesses 3\n";

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        assert_eq!(
            parse_usage(STAT, STATUS, SYSTEM),
            Some(Usage {
                cpu_seconds: 2.0,
                start_time_seconds: 1_700_000_020.0,
                threads: 7,
                resident_bytes: 2_097_152,
            })
        );
    }

    #[tokio::test]
    async fn tasks_are_those_of_the_runtime_that_serves() {
        let metrics = Metrics::new();
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..3 {
            waiting.spawn(std::future::pending::<()>());
        }
        let page = std::thread::scope(|it| it.spawn(|| metrics.encode()).join()).expect("no panic");
        let page = page.expect("a page");
        assert!(page.contains("\nkruntimes_tasks 3\n"), "{page}");
    }

    #[test]
    fn cut_files_are_no_panic() {
        for end in 0..STAT.len() {
            let _ = parse_usage(&STAT[..end], STATUS, SYSTEM);
        }
        assert_eq!(parse_usage(STAT, "", SYSTEM), None);
        assert_eq!(parse_usage(STAT, STATUS, ""), None);
    }

    #[test]
    fn names_and_units_of_a_scrape() {
        let mut metrics = Metrics::new();
        let served = Counter::<u64>::default();
        metrics
            .kruntimes()
            .register("gateway_requests", "Requests answered", served.clone());
        let time = latency();
        metrics.unprefixed().register(
            "http_server_request_duration_seconds",
            "OpenTelemetry's",
            time.clone(),
        );
        served.inc();
        time.observe(0.0007);
        let page = metrics.encode().expect("text");
        for line in [
            "kruntimes_gateway_requests_total 1\n",
            "http_server_request_duration_seconds_bucket{le=\"0.0005\"} 0\n",
            "http_server_request_duration_seconds_bucket{le=\"0.001\"} 1\n",
            "# TYPE process_cpu_seconds counter\n",
            "process_resident_memory_bytes ",
            "process_open_fds ",
            "process_start_time_seconds ",
        ] {
            assert!(page.contains(line), "{line} in\n{page}");
        }
        assert!(page.ends_with("# EOF\n"));
    }
}
