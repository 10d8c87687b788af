//! Kubernetes quantities as exact integers.
//!
//! Format and suffixes follow the API's `resource.Quantity`: a decimal number
//! with a binary (`Ki` … `Ei`) or decimal (`n` … `E`) suffix or an exponent.
//! Amounts are kept in billionths, rounded up below that as Kubernetes does, so
//! that sums over many Runs are exact.

use std::{borrow::Cow, collections::BTreeMap, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};

/// An amount of a resource as its author wrote it: a number or a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Quantity(pub String);

/// Amounts by resource name.
pub type Resources = BTreeMap<String, Quantity>;

/// An exact, non-negative amount in billionths of the unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Amount(u128);

/// Why a text is no amount.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a quantity ≥ 0; write for example 2, 500m, 1.5, 128Mi or 1e3")]
pub struct InvalidQuantity(String);

const NANO: u128 = 1_000_000_000;

impl Amount {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// A whole number of units.
    #[must_use]
    pub const fn whole(units: u64) -> Self {
        Self(units as u128 * NANO)
    }

    /// The sum, held at the largest amount.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference, held at zero.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Billionths of the unit.
    #[must_use]
    pub const fn nanos(self) -> u128 {
        self.0
    }
}

impl fmt::Display for Amount {
    /// Prints whole units, thousandths or billionths, whichever is exact first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(NANO) {
            write!(f, "{}", self.0 / NANO)
        } else if self.0.is_multiple_of(1_000_000) {
            write!(f, "{}m", self.0 / 1_000_000)
        } else {
            write!(f, "{}n", self.0)
        }
    }
}

impl FromStr for Amount {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        parse(text)
            .map(Self)
            .ok_or_else(|| InvalidQuantity(text.chars().take(40).collect()))
    }
}

impl Quantity {
    /// The exact amount.
    pub fn amount(&self) -> Result<Amount, InvalidQuantity> {
        self.0.parse()
    }
}

fn parse(text: &str) -> Option<u128> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let number_end = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(number_end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty())
        || fraction.contains('.')
        || whole.len() + fraction.len() > 30
    {
        return None;
    }
    let digits: u128 = format!("0{whole}{fraction}").parse().ok()?;
    let scale = u32::try_from(fraction.len()).ok()?;
    // amount = digits × multiplier ÷ 10^(scale + shift), in billionths.
    let (multiplier, shift): (u128, u32) = match suffix {
        "" => (NANO, 0),
        "n" => (1, 0),
        "u" => (1_000, 0),
        "m" => (1_000_000, 0),
        "k" => (NANO * 1_000, 0),
        "M" => (NANO * 1_000_000, 0),
        "G" => (NANO * NANO, 0),
        "T" => (NANO * 10u128.pow(12), 0),
        "P" => (NANO * 10u128.pow(15), 0),
        "E" => (NANO * 10u128.pow(18), 0),
        "Ki" => (NANO << 10, 0),
        "Mi" => (NANO << 20, 0),
        "Gi" => (NANO << 30, 0),
        "Ti" => (NANO << 40, 0),
        "Pi" => (NANO << 50, 0),
        "Ei" => (NANO << 60, 0),
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            match u32::try_from(power.abs()).ok().filter(|power| *power <= 18)? {
                power_of_ten if power >= 0 => (NANO.checked_mul(10u128.pow(power_of_ten))?, 0),
                power_of_ten => (NANO, power_of_ten),
            }
        }
    };
    let divisor = 10u128.checked_pow(scale + shift)?;
    Some(digits.checked_mul(multiplier)?.div_ceil(divisor))
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Whole(i64),
            Float(f64),
        }
        Ok(Self(match Written::deserialize(deserializer)? {
            Written::Text(text) => text,
            Written::Whole(number) => number.to_string(),
            Written::Float(number) => number.to_string(),
        }))
    }
}

impl JsonSchema for Quantity {
    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        // The bound keeps the cost of the rule on the map within the API server's budget.
        json_schema!({ "x-kubernetes-int-or-string": true, "maxLength": 32 })
    }

    fn inline_schema() -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nanos(text: &str) -> u128 {
        text.parse::<Amount>().unwrap().nanos()
    }

    #[test]
    fn suffixes_mean_what_kubernetes_means() {
        assert_eq!(nanos("2"), 2 * NANO);
        assert_eq!(nanos("500m"), NANO / 2);
        assert_eq!(nanos("1.5"), 3 * NANO / 2);
        assert_eq!(nanos(".5"), NANO / 2);
        assert_eq!(nanos("5."), 5 * NANO);
        assert_eq!(nanos("128Mi"), (128 << 20) * NANO);
        assert_eq!(nanos("0.5Gi"), (1 << 29) * NANO);
        assert_eq!(nanos("1e3"), 1_000 * NANO);
        assert_eq!(nanos("1E3"), 1_000 * NANO);
        assert_eq!(nanos("1E"), NANO * 10u128.pow(18));
        assert_eq!(nanos("1500e-3"), 3 * NANO / 2);
        assert_eq!(nanos("250u"), 250_000);
        assert_eq!(nanos("0"), 0);
    }

    #[test]
    fn less_than_a_billionth_rounds_up() {
        assert_eq!(nanos("0.1n"), 1);
    }

    #[test]
    fn what_is_no_quantity_is_refused_and_named() {
        for bad in [
            "", "-1", "1.2.3", "abc", "1 Gi", "1gi", "1KI", "e3", ".", "1e99", "١",
        ] {
            let refusal = bad.parse::<Amount>().unwrap_err().to_string();
            assert!(refusal.contains("not a quantity"), "{refusal}");
        }
    }

    #[test]
    fn numbers_and_texts_are_read_alike() {
        let read: Resources = serde_json::from_str(r#"{"runs": 2, "cpu": "500m", "x": 0.5}"#).unwrap();
        assert_eq!(read["runs"].amount().unwrap(), Amount::whole(2));
        assert_eq!(read["cpu"].amount().unwrap().to_string(), "500m");
        assert_eq!(read["x"].amount().unwrap().to_string(), "500m");
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "\\PC{0,40}") {
            let _ = text.parse::<Amount>();
        }

        #[test]
        fn printing_and_parsing_are_inverse(nanos in 0..u128::from(u64::MAX)) {
            let amount = Amount(nanos);
            prop_assert_eq!(amount.to_string().parse::<Amount>(), Ok(amount));
        }
    }
}
