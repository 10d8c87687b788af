//! Lines to an output that may be slow: many in one write, bounded, and nobody waits for them.
//!
//! Each call of a busy process leaves a line. Writing every one by itself costs a system call here and several
//! context switches in whatever reads the other end of the pipe, which together is more than the call itself.

use std::{
    io::{self, Write},
    mem,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// How long a line may wait for others.
const LINGER: Duration = Duration::from_millis(50);
/// Bytes that may wait; what comes on top is lost and counted.
const ROOM: usize = 1024 * 1024;
/// With so much there is no use in waiting for more.
const PLENTY: usize = 128 * 1024;
/// How long the end of the process waits for an output that takes nothing.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Where lines go; clones share it.
#[derive(Clone)]
pub struct Lines {
    shared: Arc<Shared>,
}

struct Shared {
    pending: Mutex<Pending>,
    /// For the thread: there is something to do.
    work: Condvar,
    /// For whoever finishes: everything was written.
    done: Condvar,
    output: Mutex<Box<dyn Write + Send>>,
}

#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
    urgent: bool,
    lost: u64,
    closed: bool,
    done: bool,
}

/// Turns the number of lost lines into a line that says so; see [`Lines::start`].
pub type Confess = fn(u64) -> Vec<u8>;

// === impl Lines ===

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").finish_non_exhaustive()
    }
}

impl Lines {
    /// Writes to `output` from a thread named `name`. After a loss, what `confess` makes of the number of lost
    /// lines comes first.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(name: &str, output: impl Write + Send + 'static, confess: Confess) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            pending: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
            output: Mutex::new(Box::new(output)),
        });
        let thread = Arc::clone(&shared);
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || thread.write_all(confess))?;
        Ok(Self { shared })
    }

    /// Takes one line, with its line feed; `false` when there is no room and it is lost. It is written within
    /// milliseconds, together with others; at once when `urgent`.
    pub fn push(&self, line: &[u8], urgent: bool) -> bool {
        let mut pending = lock(&self.shared.pending);
        if pending.closed {
            drop(pending);
            // Somebody has a last word after the end; there is no thread any more.
            let mut output = lock(&self.shared.output);
            return output.write_all(line).and_then(|()| output.flush()).is_ok();
        }
        if pending.bytes.len() + line.len() > ROOM {
            pending.lost += 1;
            return false;
        }
        let before = pending.bytes.len();
        pending.bytes.extend_from_slice(line);
        let wakes =
            before == 0 || urgent && !pending.urgent || before < PLENTY && pending.bytes.len() >= PLENTY;
        pending.urgent |= urgent;
        drop(pending);
        if wakes {
            self.shared.work.notify_one();
        }
        true
    }

    /// Writes what waits and ends the thread. Blocks, at most a second when the output takes nothing.
    pub fn finish(&self) {
        let mut pending = lock(&self.shared.pending);
        pending.closed = true;
        self.shared.work.notify_one();
        drop(
            self.shared
                .done
                .wait_timeout_while(pending, LAST_WORDS, |pending| !pending.done),
        );
    }
}

// === impl Shared ===

impl Shared {
    /// The thread.
    fn write_all(&self, confess: Confess) {
        let mut batch = Vec::new();
        let mut failing = false;
        loop {
            let (lost, closed) = self.next(&mut batch);
            if lost > 0 {
                let mut confession = confess(lost);
                confession.append(&mut batch);
                batch = confession;
            }
            let mut output = lock(&self.output);
            let written = output.write_all(&batch).and_then(|()| output.flush());
            drop(output);
            // Once, until it works again; and not to itself.
            if let Err(error) = &written
                && !failing
            {
                eprintln!("lines cannot be written: {error}");
            }
            failing = written.is_err();
            batch.clear();
            if closed {
                lock(&self.pending).done = true;
                self.done.notify_all();
                return;
            }
        }
    }

    /// Waits for lines and takes them all; says how many were lost, and whether these are the last.
    fn next(&self, batch: &mut Vec<u8>) -> (u64, bool) {
        let idle = |pending: &mut Pending| pending.bytes.is_empty() && !pending.closed;
        let pending = self
            .work
            .wait_while(lock(&self.pending), idle)
            .unwrap_or_else(PoisonError::into_inner);
        let patient =
            |pending: &mut Pending| !pending.urgent && !pending.closed && pending.bytes.len() < PLENTY;
        let (mut pending, _) = self
            .work
            .wait_timeout_while(pending, LINGER, patient)
            .unwrap_or_else(PoisonError::into_inner);
        // The two buffers change places, so that neither is allocated anew.
        mem::swap(&mut pending.bytes, batch);
        pending.urgent = false;
        (mem::take(&mut pending.lost), pending.closed)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Each write, as it comes; it returns when somebody has taken it.
    struct Output(Sender<String>, Option<Receiver<()>>);

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.send(String::from_utf8_lossy(bytes).into_owned());
            if let Some(taken) = &self.1 {
                let _ = taken.recv();
            }
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn silent(_: u64) -> Vec<u8> {
        Vec::new()
    }

    fn aloud(lost: u64) -> Vec<u8> {
        format!("lost {lost}\n").into_bytes()
    }

    #[test]
    fn lines_keep_their_order_and_share_a_write() {
        let (sent, written) = channel();
        let (take, taken) = channel();
        let lines = Lines::start("test", Output(sent, Some(taken)), silent).unwrap();
        assert!(lines.push(b"first\n", true));
        assert_eq!(written.recv().unwrap(), "first\n");
        // The thread is in its write now.
        for number in 0..100 {
            assert!(lines.push(format!("{number}\n").as_bytes(), number % 7 == 0));
        }
        drop(take);
        lines.finish();
        let all: Vec<String> = (0..100).map(|number| format!("{number}\n")).collect();
        assert_eq!(written.try_iter().collect::<Vec<_>>(), [all.concat()]);
    }

    #[test]
    fn what_finds_no_room_is_counted_and_confessed() {
        let (sent, written) = channel();
        let (take, taken) = channel();
        let lines = Lines::start("test", Output(sent, Some(taken)), aloud).unwrap();
        lines.push(b"first\n", true);
        written.recv().unwrap();
        let long = vec![b'x'; ROOM / 4];
        let kept = (0..7).filter(|_| lines.push(&long, false)).count();
        assert_eq!(kept, 4);
        drop(take);
        lines.finish();
        let rest: String = written.try_iter().collect();
        assert!(rest.starts_with("lost 3\nxxx"), "{}", &rest[..20]);
        assert_eq!(rest.len(), "lost 3\n".len() + ROOM);
    }

    #[test]
    fn the_end_waits_for_the_last_line_and_later_ones_are_written_too() {
        let (sent, written) = channel();
        let lines = Lines::start("test", Output(sent, None), silent).unwrap();
        lines.push(b"waits\n", false);
        lines.finish();
        lines.push(b"late\n", false);
        let text: String = written.try_iter().collect();
        assert_eq!(text, "waits\nlate\n");
    }

    #[test]
    fn an_output_that_takes_nothing_keeps_nobody_at_the_end() {
        let (sent, written) = channel();
        let (_take, taken) = channel();
        let lines = Lines::start("test", Output(sent, Some(taken)), silent).unwrap();
        lines.push(b"stuck\n", true);
        written.recv().unwrap();
        lines.finish();
    }
}
