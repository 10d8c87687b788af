//! `make bench-path`: callers of Python functions through TLS, authorization, hop and worker of the installed cluster.
//! Thirty of thirty functions at a fixed pace, 1 KB each way; one, and sixteen of sixteen, as fast as they are answered,
//! 100 bytes each way.

use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use kruntimes_e2e::{
    cluster::Cluster,
    install,
    load::{self, Figures, Pace},
    processor::Used,
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
/// How long a round as fast as possible lasts.
const CLOSED: Duration = Duration::from_secs(5);
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
    let body = json_of(1024);
    let warm_up = Pace {
        length: Duration::from_secs(5),
        ..PACE
    };
    load::paced(&world, &functions, &body, warm_up).await?;
    let mut rounds = Vec::new();
    for round in 1..=ROUNDS {
        let before = Used::now();
        let figures = load::paced(&world, &functions, &body, PACE).await?;
        told(
            &format!("{FUNCTIONS} callers, paced, round {round}"),
            &figures,
            &before,
        );
        rounds.push(figures);
    }
    let body = json_of(100);
    let mut one = Vec::new();
    let mut sixteen = Vec::new();
    for round in 1..=ROUNDS {
        for (callers, all) in [(1, &mut one), (16, &mut sixteen)] {
            let before = Used::now();
            let figures = load::closed(&world, &functions[..callers], &body, CLOSED).await?;
            told(
                &format!("{callers} callers, closed loop, round {round}"),
                &figures,
                &before,
            );
            all.push(figures);
        }
    }
    world.close().await?;
    let failed: usize = [&rounds, &one, &sixteen]
        .into_iter()
        .flatten()
        .map(|round| round.failed)
        .sum();
    let (p50, p50_low, p50_high) = spread(&rounds, |round| round.percentile(0.5));
    let (p99, p99_low, p99_high) = spread(&rounds, |round| round.percentile(0.99));
    let (one_p50, ..) = spread(&one, |round| round.percentile(0.5));
    let (one_p99, ..) = spread(&one, |round| round.percentile(0.99));
    let (sixteen_p99, ..) = spread(&sixteen, |round| round.percentile(0.99));
    let (rate, rate_low, rate_high) = spread(&sixteen, |round| whole(round.rate()));
    println!(
        "RESULT p50_us={p50} p99_us={p99} requests_per_second={:.1} failed={failed} \
         p50_us_min={p50_low} p50_us_max={p50_high} p99_us_min={p99_low} p99_us_max={p99_high} \
         one_p50_us={one_p50} one_p99_us={one_p99} sixteen_per_second={rate} sixteen_per_second_min={rate_low} \
         sixteen_per_second_max={rate_high} sixteen_p99_us={sixteen_p99} pods={PODS}",
        rounds.iter().map(Figures::rate).fold(f64::INFINITY, f64::min),
    );
    ensure!(failed == 0, "{failed} calls failed");
    Ok(())
}

/// A string of JSON of so many bytes, with its quotes.
fn json_of(bytes: usize) -> Bytes {
    Bytes::from(format!("\"{}\"", "x".repeat(bytes - 2)))
}

/// Prints a round, and what it cost each program for a call.
fn told(what: &str, figures: &Figures, before: &Used) {
    let calls = u64::try_from(figures.micros.len()).unwrap_or(u64::MAX).max(1);
    let cost: Vec<String> = Used::now()
        .since(before)
        .into_iter()
        .filter(|(_, micros)| micros / calls > 0)
        .map(|(program, micros)| format!("{program} {}", micros / calls))
        .collect();
    println!(
        "{what}: {} calls, {} failed, {:.0}/s, p50 {} us, p90 {} us, p99 {} us, max {} us; processor us a call: {}",
        figures.micros.len(),
        figures.failed,
        figures.rate(),
        figures.percentile(0.5),
        figures.percentile(0.9),
        figures.percentile(0.99),
        figures.percentile(1.0),
        cost.join(", "),
    );
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "calls a second, some thousands"
)]
fn whole(rate: f64) -> u64 {
    rate as u64
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
