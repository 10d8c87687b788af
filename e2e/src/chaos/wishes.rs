//! What the command line asks for: `minutes=10 seed=7 deletions=20`.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

/// Longest run: callers hold a token that is valid for an hour.
const MOST_MINUTES: u64 = 45;

/// What is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wishes {
    /// How long things break; zero for not at all.
    pub length: Duration,
    /// What the plan is drawn from.
    pub seed: u64,
    /// How often a Pod is deleted to measure how long that is felt; zero for never.
    pub deletions: usize,
}

// === impl Wishes ===

impl Wishes {
    /// Reads arguments; an empty value is the default. Without a seed, `chance` is the seed.
    ///
    /// # Errors
    /// On what is not understood; the text names it and says what is.
    pub fn parse(arguments: impl Iterator<Item = String>, chance: u64) -> Result<Self> {
        let (mut minutes, mut seed, mut deletions) = (10, chance, 20);
        for argument in arguments {
            let (name, value) = argument.split_once('=').unwrap_or((&argument, ""));
            let number = || {
                value
                    .parse::<u64>()
                    .with_context(|| format!("{argument}: a whole number is needed"))
            };
            match name {
                "minutes" | "seed" | "deletions" if value.is_empty() => {}
                "minutes" => minutes = number()?,
                "seed" => seed = number()?,
                "deletions" => deletions = usize::try_from(number()?)?,
                _ => bail!("{argument} is not known; say minutes=10 seed=7 deletions=20"),
            }
        }
        ensure!(
            minutes <= MOST_MINUTES,
            "minutes={minutes}: at most {MOST_MINUTES}"
        );
        Ok(Self {
            length: Duration::from_secs(minutes * 60),
            seed,
            deletions,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Wishes> {
        Wishes::parse(arguments.iter().map(|it| (*it).to_owned()), 99)
    }

    #[test]
    fn what_is_left_out_or_empty_has_a_default() {
        let usual = Wishes {
            length: Duration::from_secs(600),
            seed: 99,
            deletions: 20,
        };
        assert_eq!(parse(&[]).unwrap(), usual);
        assert_eq!(parse(&["minutes=", "seed=", "deletions="]).unwrap(), usual);
        let other = Wishes {
            length: Duration::from_secs(120),
            seed: 7,
            deletions: 0,
        };
        assert_eq!(parse(&["minutes=2", "seed=7", "deletions=0"]).unwrap(), other);
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for wrong in ["minute=1", "minutes=ten", "seed=-1", "minutes=46", "7"] {
            let error = parse(&[wrong]).unwrap_err();
            assert!(format!("{error:#}").contains(wrong), "{error:#}");
        }
    }
}
