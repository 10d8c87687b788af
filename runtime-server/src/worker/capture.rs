//! Turns what a function prints into bounded log lines (C-8.6).
//!
//! Pure: bytes in, lines out. A line that is too long is cut with a mark, and so is
//! a call that prints too much; the pipe is read on regardless, so that nobody
//! blocks on a full one.

/// Longest line, bytes; the rest of it is dropped.
pub const LINE_BYTES: usize = 8 * 1024;
/// Most a call may log, bytes over both streams; further lines are dropped.
pub const CALL_BYTES: usize = 256 * 1024;

const CUT: &str = " … (line cut)";
const QUOTA: &str = "… (further output of this call is dropped)";

/// What one call may still log.
#[derive(Debug)]
pub struct Budget {
    left: usize,
    told: bool,
}

impl Budget {
    /// A full budget, for one call or one start.
    #[must_use]
    pub fn new() -> Self {
        Self {
            left: CALL_BYTES,
            told: false,
        }
    }

    /// The text to log, if any.
    fn spend(&mut self, line: String) -> Option<String> {
        // A line costs more than its text, so that a hundred thousand empty ones are bounded too.
        let cost = line.len() + 32;
        if let Some(left) = self.left.checked_sub(cost) {
            self.left = left;
            return Some(line);
        }
        self.left = 0;
        (!std::mem::replace(&mut self.told, true)).then(|| QUOTA.to_owned())
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::new()
    }
}

/// One stream, cut into lines.
#[derive(Debug, Default)]
pub struct Lines {
    partial: Vec<u8>,
    /// The current line was cut already; drop up to the next newline.
    skipping: bool,
}

impl Lines {
    /// Takes what was read and gives each finished line to `log`.
    pub fn push(&mut self, mut bytes: &[u8], budget: &mut Budget, log: &mut impl FnMut(&str)) {
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
            self.add(&bytes[..end], budget, log);
            self.finish(budget, log);
            bytes = &bytes[end + 1..];
        }
        self.add(bytes, budget, log);
    }

    /// Ends an unfinished line: the call, or the process, is over.
    pub fn flush(&mut self, budget: &mut Budget, log: &mut impl FnMut(&str)) {
        if self.partial.is_empty() {
            self.skipping = false;
        } else {
            self.finish(budget, log);
        }
    }

    fn add(&mut self, bytes: &[u8], budget: &mut Budget, log: &mut impl FnMut(&str)) {
        if self.skipping {
            return;
        }
        let room = LINE_BYTES - self.partial.len();
        self.partial.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if bytes.len() > room {
            let mut line = self.take();
            line.push_str(CUT);
            emit(line, budget, log);
            self.skipping = true;
        }
    }

    fn finish(&mut self, budget: &mut Budget, log: &mut impl FnMut(&str)) {
        if std::mem::take(&mut self.skipping) {
            return;
        }
        let line = self.take();
        emit(line, budget, log);
    }

    fn take(&mut self) -> String {
        let line = String::from_utf8_lossy(&self.partial).into_owned();
        self.partial.clear();
        line
    }
}

fn emit(line: String, budget: &mut Budget, log: &mut impl FnMut(&str)) {
    if let Some(text) = budget.spend(line) {
        log(&text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(parts: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut budget, mut out) = (Lines::default(), Budget::new(), Vec::new());
        for part in parts {
            lines.push(part, &mut budget, &mut |line| out.push(line.to_owned()));
        }
        lines.flush(&mut budget, &mut |line| out.push(line.to_owned()));
        out
    }

    #[test]
    fn lines_come_out_whole_however_they_were_read() {
        assert_eq!(lines(&[b"a\nb", b"c\n\nd"]), ["a", "bc", "", "d"]);
        assert_eq!(lines(&[b"\xff\n"]), ["\u{fffd}"]);
        assert!(lines(&[b""]).is_empty());
    }

    #[test]
    fn five_megabytes_without_a_newline_become_one_marked_line() {
        let part = vec![b'x'; 64 * 1024];
        let parts: Vec<&[u8]> = (0..80).map(|_| &part[..]).chain([&b"\nnext\n"[..]]).collect();
        let out = lines(&parts);
        assert_eq!(out.len(), 2);
        assert!(
            out[0].len() < LINE_BYTES + 32 && out[0].ends_with(CUT),
            "{}",
            out[0].len()
        );
        assert_eq!(out[1], "next");
    }

    #[test]
    fn a_hundred_thousand_lines_are_bounded_and_the_cut_is_told_once() {
        let many = b"short\n".repeat(100_000);
        let out = lines(&[&many]);
        assert!(out.iter().map(|line| line.len() + 1).sum::<usize>() <= CALL_BYTES);
        assert_eq!(out.iter().filter(|line| *line == QUOTA).count(), 1);
        assert_eq!(out.last().map(String::as_str), Some(QUOTA));
    }
}
