//! `make sim SEEDS=N [SEED=n]`: many seeds and the broken variants, or one seed with its trace.

use std::process::ExitCode;

use clap::Parser;
use kruntimes_sim::{Variant, caught, many, run};

/// Seeds within which each broken variant must be caught.
const VARIANT_SEEDS: u64 = 1000;

/// Runs the deciding parts of all processes together under seeded schedules of faults.
#[derive(Debug, Parser)]
struct Args {
    /// How many seeds.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 1)]
    first: u64,
    /// Only this one, with its trace.
    #[arg(long)]
    seed: Option<u64>,
    /// With --seed: breaks the product on purpose; a number from 1 to 5.
    #[arg(long, requires = "seed")]
    variant: Option<usize>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let mut out = std::io::stdout().lock();
    let good = match args.seed {
        Some(seed) => one(&mut out, seed, args.variant),
        None => all(&mut out, &args),
    };
    match good {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) | Err(_) => ExitCode::FAILURE,
    }
}

fn one(out: &mut impl std::io::Write, seed: u64, variant: Option<usize>) -> std::io::Result<bool> {
    let variant = variant.and_then(|it| Variant::ALL.get(it.wrapping_sub(1)).copied());
    let outcome = run(seed, variant, true);
    for line in &outcome.trace {
        writeln!(out, "{line}")?;
    }
    let violations = u64::from(outcome.violation.is_some());
    writeln!(
        out,
        "RESULT seeds=1 steps={} violations={violations} broken_variants_caught=0",
        outcome.steps
    )?;
    Ok(violations == 0)
}

fn all(out: &mut impl std::io::Write, args: &Args) -> std::io::Result<bool> {
    let totals = many(args.first, args.seeds, None);
    writeln!(
        out,
        "{} seeds, {} steps, {} calls of which {} were answered by their function",
        totals.seeds, totals.steps, totals.calls, totals.answered
    )?;
    for (fault, times) in &totals.faults {
        writeln!(out, "{times:>10}  {fault}")?;
    }
    for (seed, text) in &totals.violations {
        writeln!(out, "seed {seed}: {text}")?;
    }
    let mut found = 0;
    for variant in Variant::ALL {
        match caught(args.first, VARIANT_SEEDS, variant) {
            Some((seed, text)) => {
                found += 1;
                writeln!(out, "broken on purpose, {}: seed {seed}: {text}", variant.name())?;
            }
            None => writeln!(out, "broken on purpose, {}: NOT caught", variant.name())?,
        }
    }
    writeln!(
        out,
        "RESULT seeds={} steps={} violations={} broken_variants_caught={found}",
        totals.seeds,
        totals.steps,
        totals.violations.len()
    )?;
    Ok(totals.violations.is_empty() && found == Variant::ALL.len())
}
