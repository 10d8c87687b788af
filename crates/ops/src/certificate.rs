//! When a certificate ends, read from its DER without judging anything else about it.

use rustls_pki_types::{CertificateDer, pem::PemObject};

/// The end of the first certificate in `pem`, in seconds since the epoch; `None` if there is none
/// or it does not parse.
#[must_use]
pub fn not_after_of_pem(pem: &[u8]) -> Option<i64> {
    not_after(&CertificateDer::from_pem_slice(pem).ok()?)
}

/// The end (`notAfter`) of a certificate in seconds since the epoch; `None` if it does not parse.
#[must_use]
pub fn not_after(der: &[u8]) -> Option<i64> {
    // Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version OPTIONAL, serialNumber,
    // signature, issuer, validity SEQUENCE { notBefore, notAfter }, … (RFC 5280, 4.1)
    let (certificate, _) = element(der, SEQUENCE)?;
    let (fields, _) = element(certificate, SEQUENCE)?;
    let fields = match element(fields, VERSION) {
        Some((_, rest)) => rest,
        None => fields,
    };
    let (_, fields) = element(fields, INTEGER)?;
    let (_, fields) = element(fields, SEQUENCE)?;
    let (_, fields) = element(fields, SEQUENCE)?;
    let (validity, _) = element(fields, SEQUENCE)?;
    let (_, _, validity) = any(validity)?;
    let (tag, time, _) = any(validity)?;
    parse_time(tag, time)
}

const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;

/// Content of an element with that tag, and what follows it.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (found, content, rest) = any(der)?;
    (found == tag).then_some((content, rest))
}

/// Tag, content and what follows.
fn any(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, first], mut rest) = der.split_first_chunk::<2>()?;
    let mut length = usize::from(first);
    if first & 0x80 != 0 {
        let bytes = usize::from(first & 0x7f);
        // A certificate of 4 GiB is none.
        if !(1..=4).contains(&bytes) {
            return None;
        }
        let (long, tail) = rest.split_at_checked(bytes)?;
        length = long.iter().fold(0, |sum, byte| (sum << 8) | usize::from(*byte));
        rest = tail;
    }
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ`, the only forms that certificates may have.
fn parse_time(tag: u8, text: &[u8]) -> Option<i64> {
    let text = text.strip_suffix(b"Z")?;
    if !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = |digits: &[u8]| {
        digits
            .iter()
            .fold(0_i64, |sum, digit| sum * 10 + i64::from(digit - b'0'))
    };
    let (year, rest) = match (tag, text.len()) {
        (UTC_TIME, 12) => {
            let short = number(&text[..2]);
            let century = if short < 50 { 2000 } else { 1900 };
            (century + short, &text[2..])
        }
        (GENERALIZED_TIME, 14) => (number(&text[..4]), &text[4..]),
        _ => return None,
    };
    let [month, day, hour, minute, second] = [0, 2, 4, 6, 8].map(|at| number(&rest[at..at + 2]));
    let sane = (1..=12).contains(&month) && (1..=31).contains(&day);
    (sane && hour < 24 && minute < 60 && second < 61)
        .then(|| days_since_epoch(year, month, day) * 86_400 + hour * 3_600 + minute * 60 + second)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar. Years begin in March, so that the
/// leap day is their last one.
fn days_since_epoch(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let month = (month + 9) % 12;
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // 719,468 days lie between 0000-03-01 and 1970-01-01.
    year * 365 + leap_days + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    fn until(year: i32, month: u8, day: u8) -> (Vec<u8>, String) {
        let mut params = CertificateParams::new(vec!["x.test".to_owned()]).expect("a name");
        params.not_after = date_time_ymd(year, month, day);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        (certificate.der().to_vec(), certificate.pem())
    }

    #[test]
    fn both_forms_of_time_and_leap_years() {
        // 2050 and later are written as GeneralizedTime.
        for ((year, month, day), seconds) in [
            ((2026, 11, 29), 1_795_910_400),
            ((2028, 2, 29), 1_835_395_200),
            ((2049, 12, 31), 2_524_521_600),
            ((2050, 1, 1), 2_524_608_000),
            ((2100, 3, 1), 4_107_542_400),
        ] {
            let (der, pem) = until(year, month, day);
            assert_eq!(not_after(&der), Some(seconds), "{year}-{month}-{day}");
            assert_eq!(not_after_of_pem(pem.as_bytes()), Some(seconds));
        }
    }

    #[test]
    fn cut_and_damaged_certificates_are_no_panic() {
        let (der, _) = until(2030, 1, 1);
        for end in 0..der.len() {
            assert_eq!(not_after(&der[..end]), None, "cut at {end}");
        }
        for at in 0..der.len() {
            for bit in 0..8 {
                let mut damaged = der.clone();
                damaged[at] ^= 1 << bit;
                let _ = not_after(&damaged);
            }
        }
        assert_eq!(not_after_of_pem(b"-----BEGIN CERTIFICATE-----"), None);
        assert_eq!(not_after_of_pem(b""), None);
    }
}
