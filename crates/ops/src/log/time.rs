//! When a line was written (RFC 3339, microseconds).

use std::{
    cell::Cell,
    time::{SystemTime, UNIX_EPOCH},
};

use jiff::Timestamp;

/// `2026-01-31T12:00:00`, which all lines of that second begin with.
type Second = [u8; 19];

thread_local! {
    static LAST: Cell<(u64, Second)> = const { Cell::new((u64::MAX, [b'0'; 19])) };
}

/// Appends the time.
pub(super) fn put_now(line: &mut String) {
    #[expect(clippy::disallowed_methods, reason = "it decides nothing")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    put(line, now.as_secs(), now.subsec_micros());
}

fn put(line: &mut String, second: u64, micros: u32) {
    let (last, mut text) = LAST.get();
    if last != second {
        text = format(second);
        LAST.set((second, text));
    }
    line.push_str(std::str::from_utf8(&text).unwrap_or_default());
    line.push('.');
    let mut place = 100_000;
    while place > 0 {
        line.push(char::from(b'0' + (micros / place % 10) as u8));
        place /= 10;
    }
    line.push('Z');
}

fn format(second: u64) -> Second {
    let time = i64::try_from(second).unwrap_or(i64::MAX);
    let text = Timestamp::from_second(time).unwrap_or(Timestamp::MAX).to_string();
    // Without its end, and that of the last second of all times without its fraction.
    text.as_bytes().first_chunk().copied().unwrap_or([b'9'; 19])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_rfc_3339_does() {
        let text = |second, micros| {
            let mut line = String::new();
            put(&mut line, second, micros);
            line
        };
        assert_eq!(text(0, 0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(text(1_709_164_799, 999_999), "2024-02-28T23:59:59.999999Z");
        assert_eq!(text(1_709_164_800, 1), "2024-02-29T00:00:00.000001Z");
        assert_eq!(text(1_709_164_800, 20_300), "2024-02-29T00:00:00.020300Z");
        assert_eq!(text(u64::MAX, 0), "9999-12-30T22:00:00.000000Z");
    }
}
