//! `make bench-path`: thirty callers of thirty Python functions, 1 KB each way, at a
//! fixed pace through TLS, authorization, hop and worker of the installed cluster.

use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use kruntimes_e2e::{
    cluster::Cluster,
    install,
    load::{self, Figures, Pace},
};

const FUNCTIONS: usize = 30;
/// Pods of the pool, and how many functions one holds. Figures of another layout are not comparable with these.
const PODS: i32 = 3;
const RUNS: u32 = 10;
const PACE: Pace = Pace {
    per_second: 900.0,
    length: Duration::from_secs(20),
};
const ROUNDS: usize = 5;
const ECHO: &str = "def handler(event, context):\n    return event\n";

// One thread: callers that wake each other would take from what they measure.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let world = install::world(&Cluster::node().await?, PODS, RUNS).await?;
    let mut functions = Vec::new();
    for index in 0..FUNCTIONS {
        functions.push(world.create(&format!("path-{index}"), world.spec(ECHO)).await?);
    }
    for function in &functions {
        world.ready(function).await?;
        world.invoke_until(function, "1", 200).await?;
    }
    // A string of JSON, 1024 bytes with its quotes.
    let body = Bytes::from(format!("\"{}\"", "x".repeat(1022)));
    let warm_up = Pace {
        length: Duration::from_secs(5),
        ..PACE
    };
    load::paced(&world, &functions, &body, warm_up).await?;
    let mut rounds = Vec::new();
    for round in 1..=ROUNDS {
        let figures = load::paced(&world, &functions, &body, PACE).await?;
        println!(
            "round {round}: {} calls, {} failed, {:.0}/s, p50 {} us, p90 {} us, p99 {} us, max {} us",
            figures.micros.len(),
            figures.failed,
            figures.rate(),
            figures.percentile(0.5),
            figures.percentile(0.9),
            figures.percentile(0.99),
            figures.percentile(1.0),
        );
        rounds.push(figures);
    }
    world.close().await?;
    let failed: usize = rounds.iter().map(|round| round.failed).sum();
    let (p50, p50_low, p50_high) = spread(&rounds, |round| round.percentile(0.5));
    let (p99, p99_low, p99_high) = spread(&rounds, |round| round.percentile(0.99));
    println!(
        "RESULT p50_us={p50} p99_us={p99} requests_per_second={:.1} failed={failed} \
         p50_us_min={p50_low} p50_us_max={p50_high} p99_us_min={p99_low} p99_us_max={p99_high} pods={PODS}",
        rounds.iter().map(Figures::rate).fold(f64::INFINITY, f64::min),
    );
    ensure!(failed == 0, "{failed} calls failed");
    Ok(())
}

/// Median, least and greatest over the rounds.
fn spread(rounds: &[Figures], of: impl Fn(&Figures) -> u64) -> (u64, u64, u64) {
    let mut values: Vec<u64> = rounds.iter().map(of).collect();
    values.sort_unstable();
    let middle = values.get(values.len() / 2).copied().unwrap_or_default();
    (
        middle,
        values.first().copied().unwrap_or_default(),
        values.last().copied().unwrap_or_default(),
    )
}
