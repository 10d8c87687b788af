//! Callers at a steady pace: for benchmarks, and for tests in which nobody may notice
//! what happens meanwhile.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;

use crate::{
    call::{self, Answer, Call, Gateway, Version},
    world::{Function, World},
};

/// One HTTP/1.1 connection that stays open from call to call.
pub struct Line {
    gateway: Gateway,
    open: Option<SendRequest<Full<Bytes>>>,
}

impl Line {
    /// Connects at the first call.
    #[must_use]
    pub fn new(gateway: &Gateway) -> Self {
        Self {
            gateway: gateway.clone(),
            open: None,
        }
    }

    /// Connects unless there is an open connection. Nothing of a call is sent.
    pub async fn connect(&mut self) -> Result<()> {
        if let Some(sender) = &mut self.open
            && sender.ready().await.is_ok()
        {
            return Ok(());
        }
        self.open = None;
        let stream = self.gateway.connect(Version::Http1).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        call::spawn(connection);
        sender.ready().await?;
        self.open = Some(sender);
        Ok(())
    }

    /// Sends one request; connects first when the last answer ended the connection. Dropped before its
    /// answer, the connection is closed.
    pub async fn send(&mut self, call: &Call) -> Result<Answer> {
        self.connect().await?;
        let mut sender = self.open.take().context("there is a connection")?;
        let mut request = http::Request::builder()
            .method(call.method.clone())
            .uri(&call.path)
            .header("host", &self.gateway.name);
        for (name, value) in &call.headers {
            request = request.header(name, value);
        }
        let answer = call::read(
            sender
                .send_request(request.body(Full::new(call.body.clone()))?)
                .await?,
        )
        .await?;
        self.open = Some(sender);
        Ok(answer)
    }
}

/// Callers that go on until they are stopped.
pub struct Callers {
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<Tally>>,
}

/// What callers saw.
#[derive(Debug, Default)]
pub struct Tally {
    /// Calls made.
    pub calls: usize,
    /// What was not 200, in words.
    pub failures: Vec<String>,
}

impl Callers {
    /// One caller for each function, each calling every `period`. With `fresh` every
    /// call has a connection of its own.
    #[must_use]
    pub fn start(world: &World, functions: &[Function], period: Duration, fresh: bool) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = functions
            .iter()
            .map(|function| {
                let call = Call::invoke(&function.path, &world.token, "1");
                call::spawn(keep_calling(
                    world.gateway.clone(),
                    call,
                    period,
                    fresh,
                    Arc::clone(&stop),
                ))
            })
            .collect();
        Self { stop, tasks }
    }

    /// Ends them and adds up.
    pub async fn stop(self) -> Result<Tally> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Tally::default();
        for task in self.tasks {
            let tally = task.await.context("a caller failed")?;
            all.calls += tally.calls;
            all.failures.extend(tally.failures);
        }
        Ok(all)
    }
}

async fn keep_calling(
    gateway: Gateway,
    call: Call,
    period: Duration,
    fresh: bool,
    stop: Arc<AtomicBool>,
) -> Tally {
    let mut line = Line::new(&gateway);
    let mut ticks = tokio::time::interval(period);
    let mut tally = Tally::default();
    while !stop.load(Ordering::Relaxed) {
        ticks.tick().await;
        let answer = if fresh {
            gateway.send(&call).await
        } else {
            line.send(&call).await
        };
        tally.calls += 1;
        match answer {
            Ok(answer) if answer.status == 200 => {}
            Ok(answer) => tally.failures.push(format!(
                "{} {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            )),
            Err(error) => tally.failures.push(format!("{error:#}")),
        }
    }
    tally
}

/// How a benchmark calls.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Calls a second of all callers together.
    pub per_second: f64,
    /// How long.
    pub length: Duration,
}

/// What a benchmark measured.
#[derive(Debug, Default)]
pub struct Figures {
    /// Microseconds from the call's due time to its whole answer, sorted.
    pub micros: Vec<u64>,
    /// Calls without a 200: what they were told, and how many of them.
    pub failures: BTreeMap<String, usize>,
    /// How long it took.
    pub elapsed: Duration,
}

impl Figures {
    /// Calls without a 200.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.failures.values().sum()
    }

    fn note(&mut self, answer: &Answer, took: Duration) -> Result<()> {
        if answer.status == 200 {
            self.micros.push(u64::try_from(took.as_micros())?);
        } else {
            // Not the whole document: each has an id of its own.
            let told = format!(
                "{} {}: {}",
                answer.status,
                answer.problem("reason"),
                answer.problem("detail")
            );
            *self.failures.entry(told).or_default() += 1;
        }
        Ok(())
    }

    fn add(&mut self, other: Self) {
        self.micros.extend(other.micros);
        for (told, calls) in other.failures {
            *self.failures.entry(told).or_default() += calls;
        }
    }

    /// The value below which this share of the calls lies, microseconds.
    #[must_use]
    pub fn percentile(&self, share: f64) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "an index of a list of thousands"
        )]
        let index = (self.micros.len() as f64 * share) as usize;
        let last = self.micros.len().saturating_sub(1);
        self.micros.get(index.min(last)).copied().unwrap_or_default()
    }

    /// Answers a second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a count of thousands")]
        let count = self.micros.len() as f64;
        count / self.elapsed.as_secs_f64()
    }
}

/// One caller for each function, evenly spread over the period, on one connection each.
/// A call that could not start when it was due counts from then: a slow answer must not
/// hide the ones that wait behind it.
pub async fn paced(world: &World, functions: &[Function], body: &Bytes, pace: Pace) -> Result<Figures> {
    let callers = u32::try_from(functions.len())?;
    let period = Duration::from_secs_f64(f64::from(callers) / pace.per_second);
    let start = Instant::now() + Duration::from_millis(500);
    let tasks: Vec<_> = functions
        .iter()
        .zip(0..callers)
        .map(|(function, index)| {
            let call = Call::invoke(&function.path, &world.token, body.clone());
            let first = start + period * index / callers;
            call::spawn(one_pace(world.gateway.clone(), call, first, period, pace.length))
        })
        .collect();
    gathered(tasks, start).await
}

/// One caller for each function, each calling again as soon as it has its answer, on one connection each.
pub async fn closed(
    world: &World,
    functions: &[Function],
    body: &Bytes,
    length: Duration,
) -> Result<Figures> {
    let start = Instant::now();
    let tasks: Vec<_> = functions
        .iter()
        .map(|function| {
            let call = Call::invoke(&function.path, &world.token, body.clone());
            call::spawn(one_after_another(world.gateway.clone(), call, start + length))
        })
        .collect();
    gathered(tasks, start).await
}

/// What callers of one busy function measured.
#[derive(Debug, Default)]
pub struct Crowded {
    /// Calls that were answered.
    pub answered: Figures,
    /// Calls that were told that the function is busy.
    pub busy: Figures,
}

/// So many callers of one function, on one connection each, all connected before it begins; they come within the first
/// second. Who is answered calls again at once; who is told 429 waits as long as `Retry-After` says.
pub async fn crowd(
    world: &World,
    function: &Function,
    callers: usize,
    body: &Bytes,
    length: Duration,
) -> Result<Crowded> {
    let call = Call::invoke(&function.path, &world.token, body.clone());
    let mut lines = Vec::new();
    for _ in 0..callers {
        let mut line = Line::new(&world.gateway);
        line.connect().await?;
        lines.push(line);
    }
    let start = Instant::now();
    let count = u32::try_from(callers)?;
    let tasks: Vec<_> = lines
        .into_iter()
        .zip(0..count)
        .map(|(line, index)| {
            let first = start + Duration::from_secs(1) * index / count;
            call::spawn(one_of_a_crowd(line, call.clone(), first, start + length))
        })
        .collect();
    let mut all = Crowded::default();
    for task in tasks {
        let one = task.await.context("a caller failed")??;
        all.answered.add(one.answered);
        all.busy.add(one.busy);
    }
    for figures in [&mut all.answered, &mut all.busy] {
        figures.elapsed = length;
        figures.micros.sort_unstable();
    }
    Ok(all)
}

async fn one_of_a_crowd(mut line: Line, call: Call, first: Instant, end: Instant) -> Result<Crowded> {
    let mut seen = Crowded::default();
    tokio::time::sleep_until(first).await;
    while Instant::now() < end {
        let begin = Instant::now();
        let answer = line.send(&call).await?;
        let took = begin.elapsed();
        if answer.status != 429 {
            seen.answered.note(&answer, took)?;
            continue;
        }
        seen.busy.micros.push(u64::try_from(took.as_micros())?);
        let seconds = answer
            .header("retry-after")
            .parse()
            .context("a 429 says when to try again")?;
        tokio::time::sleep_until(end.min(Instant::now() + Duration::from_secs(seconds))).await;
    }
    Ok(seen)
}

/// What the callers measured, together.
async fn gathered(tasks: Vec<tokio::task::JoinHandle<Result<Figures>>>, start: Instant) -> Result<Figures> {
    let mut all = Figures::default();
    for task in tasks {
        all.add(task.await.context("a caller failed")??);
    }
    all.elapsed = start.elapsed();
    all.micros.sort_unstable();
    Ok(all)
}

async fn one_after_another(gateway: Gateway, call: Call, end: Instant) -> Result<Figures> {
    let mut line = Line::new(&gateway);
    let mut figures = Figures::default();
    while Instant::now() < end {
        let begin = Instant::now();
        let answer = line.send(&call).await?;
        figures.note(&answer, begin.elapsed())?;
    }
    Ok(figures)
}

async fn one_pace(
    gateway: Gateway,
    call: Call,
    first: Instant,
    period: Duration,
    length: Duration,
) -> Result<Figures> {
    let mut line = Line::new(&gateway);
    // The handshake and the access review are not what is measured.
    line.send(&call).await?;
    let mut figures = Figures::default();
    let mut due = first;
    while due < first + length {
        let begin = if Instant::now() < due {
            // The timer is coarser than a call: count from when it woke us.
            tokio::time::sleep_until(due).await;
            Instant::now()
        } else {
            due
        };
        let answer = line.send(&call).await?;
        figures.note(&answer, begin.elapsed())?;
        due += period;
    }
    Ok(figures)
}
