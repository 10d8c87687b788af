//! `make bench-path`: callers of Python functions through TLS, authorization, hop and worker.
//! Thirty of thirty functions at a fixed pace, 1 KB each way; one, and sixteen of sixteen, as fast as they are answered,
//! 100 bytes each way; and a crowd of 500 callers of one function, beside a single one. Arguments: `cluster` (what Helm installed) or `loopback` (the same binaries as processes, as other
//! systems are measured), then the cells, of `paced`, `one`, `sixteen` and `crowd`; all without any.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use kruntimes_e2e::{
    cluster::Cluster,
    install,
    load::{self, Crowded, Pace},
    processor::Used,
    stack::{Choices, Stack},
    world::{Function, World},
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
/// Callers of one function.
const CROWD: usize = 500;
/// How many kinds of failures of a round are told.
const FAILURES: usize = 10;
const ECHO: &str = "def handler(event, context):\n    return event\n";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Paced,
    One,
    Sixteen,
    Crowd,
}

impl Cell {
    const ALL: [(&str, Self); 4] = [
        ("paced", Self::Paced),
        ("one", Self::One),
        ("sixteen", Self::Sixteen),
        ("crowd", Self::Crowd),
    ];

    fn named(name: &str) -> Result<Self> {
        match Self::ALL.iter().find(|(known, _)| *known == name) {
            Some((_, cell)) => Ok(*cell),
            None => bail!("cell `{name}`: give `paced`, `one`, `sixteen` or `crowd`"),
        }
    }

    fn callers(self) -> usize {
        match self {
            Self::Paced => FUNCTIONS,
            Self::One => 1,
            Self::Sixteen => 16,
            Self::Crowd => CROWD,
        }
    }

    async fn round(self, world: &World, functions: &[Function]) -> Result<Crowded> {
        let few = functions.get(..self.callers()).unwrap_or(functions);
        let answered = match self {
            Self::Paced => load::paced(world, few, &json_of(1024), PACE).await?,
            Self::One | Self::Sixteen => load::closed(world, few, &json_of(100), CLOSED).await?,
            Self::Crowd => {
                let function = few.first().context("there is a function")?;
                return load::crowd(world, function, CROWD, &json_of(100), CLOSED).await;
            }
        };
        Ok(Crowded {
            answered,
            ..Crowded::default()
        })
    }
}

// One thread: callers that wake each other would take from what they measure.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let level = arguments.next().unwrap_or_else(|| "cluster".to_owned());
    let mut cells: Vec<Cell> = arguments.map(|name| Cell::named(&name)).collect::<Result<_>>()?;
    if cells.is_empty() {
        cells = Cell::ALL.iter().map(|(_, cell)| *cell).collect();
    }
    match level.as_str() {
        "cluster" => {
            let world = install::world(&Cluster::node().await?, PODS, RUNS).await?;
            measure(&world, &cells, &level).await?;
            world.close().await
        }
        "loopback" => {
            let choices = Choices {
                replicas: PODS,
                runs: RUNS,
                ..Choices::default()
            };
            let stack = Stack::start(&Cluster::api().await?, choices).await?;
            measure(&stack.world, &cells, &level).await?;
            stack.end().await
        }
        other => bail!("level `{other}`: give `cluster` or `loopback`"),
    }
}

async fn measure(world: &World, cells: &[Cell], level: &str) -> Result<()> {
    let mut functions = Vec::new();
    for index in 0..FUNCTIONS {
        functions.push(world.create(&format!("path-{index}"), world.spec(ECHO)).await?);
    }
    for function in &functions {
        world.ready(function).await?;
        world.invoke_until(function, "1", 200).await?;
    }
    let warm_up = Pace {
        length: Duration::from_secs(5),
        ..PACE
    };
    load::paced(world, &functions, &json_of(1024), warm_up).await?;
    let mut rounds: Vec<(Cell, Crowded)> = Vec::new();
    for round in 1..=ROUNDS {
        for &cell in cells {
            let before = Used::now();
            let figures = cell.round(world, &functions).await?;
            told(&format!("{cell:?}, round {round}"), &figures, &before);
            rounds.push((cell, figures));
        }
    }
    let of = |cell: Cell| -> Vec<&Crowded> {
        let of_cell = rounds.iter().filter(|(of, _)| *of == cell);
        of_cell.map(|(_, round)| round).collect()
    };
    let failed: usize = rounds.iter().map(|(_, round)| round.answered.failed()).sum();
    let mut line = format!("RESULT level={level} failed={failed} pods={PODS}");
    for (name, cell) in Cell::ALL {
        let rounds = of(cell);
        if rounds.is_empty() {
            continue;
        }
        line += &spread(&format!("{name}_p50_us"), &rounds, |round| {
            round.answered.percentile(0.5)
        });
        line += &spread(&format!("{name}_p99_us"), &rounds, |round| {
            round.answered.percentile(0.99)
        });
        line += &spread(&format!("{name}_per_second"), &rounds, |round| {
            whole(round.answered.rate())
        });
    }
    let crowds = of(Cell::Crowd);
    if !crowds.is_empty() {
        line += &spread("crowd_429_p99_us", &crowds, |round| round.busy.percentile(0.99));
        // Rounds take turns: each is compared with the single caller of its own minute.
        let shares: Vec<u64> = crowds.iter().zip(of(Cell::One)).map(share).collect();
        if !shares.is_empty() {
            line += &over("crowd_percent_of_one", shares);
        }
    }
    println!("{line}");
    ensure!(failed == 0, "{failed} calls failed");
    Ok(())
}

/// A string of JSON of so many bytes, with its quotes.
fn json_of(bytes: usize) -> Bytes {
    Bytes::from(format!("\"{}\"", "x".repeat(bytes - 2)))
}

/// How much of the one caller's rate a crowd had, per cent.
fn share((crowd, one): (&&Crowded, &Crowded)) -> u64 {
    whole(100.0 * crowd.answered.rate() / one.answered.rate())
}

/// Prints a round, and what it cost each program for a call.
fn told(what: &str, round: &Crowded, before: &Used) {
    let Crowded {
        answered: figures,
        busy,
    } = round;
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
        figures.failed(),
        figures.rate(),
        figures.percentile(0.5),
        figures.percentile(0.9),
        figures.percentile(0.99),
        figures.percentile(1.0),
        cost.join(", "),
    );
    for (told, calls) in figures.failures.iter().take(FAILURES) {
        println!("    {calls} calls: {told}");
    }
    if !busy.micros.is_empty() {
        println!(
            "    told that the function is busy: {} calls, p50 {} us, p99 {} us, max {} us",
            busy.micros.len(),
            busy.percentile(0.5),
            busy.percentile(0.99),
            busy.percentile(1.0),
        );
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "calls a second, some thousands, or per cent"
)]
fn whole(rate: f64) -> u64 {
    rate as u64
}

/// Median, least and greatest over the rounds, as ` key=… key_min=… key_max=…`.
fn spread(key: &str, rounds: &[&Crowded], of: impl Fn(&Crowded) -> u64) -> String {
    over(key, rounds.iter().map(|round| of(round)).collect())
}

fn over(key: &str, mut values: Vec<u64>) -> String {
    values.sort_unstable();
    let at = |index: usize| values.get(index).copied().unwrap_or_default();
    format!(
        " {key}={} {key}_min={} {key}_max={}",
        at(values.len() / 2),
        at(0),
        at(values.len().saturating_sub(1)),
    )
}
