//! What heals each fault, kept from before the fault is made until it is healed: whatever ends a run, a
//! panic or Ctrl-C too, everything is healed.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context as _, Result, ensure};

use super::{
    mounts::mount_of,
    processes::{Process, run},
};

/// File that takes all the room of a disk.
pub const FILLER: &str = ".filler";

/// How one fault is healed. To heal what has healed by itself is no error.
#[derive(Debug, Clone)]
pub enum Undo {
    /// SIGCONT.
    Continue(Process),
    /// The bridge's port forwards again.
    Forward(String),
    /// A file goes.
    Remove(PathBuf),
    /// A volume is seen again as it was, with what has become of it meanwhile.
    Uncover {
        /// Who sees the other one.
        process: Process,
        /// Where, as the process sees it.
        at: &'static str,
        /// The volume, as seen from here.
        volume: PathBuf,
    },
}

/// Names an [`Undo`] until it is healed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id(u64);

/// Everything that is broken now. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Undos(Arc<Mutex<State>>);

/// Heals everything when dropped; nothing can be broken afterwards.
#[derive(Debug)]
pub struct HealAtEnd(pub Undos);

#[derive(Debug, Default)]
struct State {
    last: u64,
    open: BTreeMap<Id, Undo>,
    closed: bool,
}

// === impl Undos ===

impl Undos {
    /// Keeps `undo`, then breaks something. When that fails, what it did in part is healed.
    ///
    /// # Errors
    /// Those of `make`, and when the run is over.
    pub fn breaking(&self, undo: Undo, make: impl FnOnce() -> Result<()>) -> Result<Id> {
        let mut state = self.lock();
        ensure!(!state.closed, "the run is over");
        state.last += 1;
        let id = Id(state.last);
        state.open.insert(id, undo);
        // Under the lock: nobody heals in between.
        let made = make();
        drop(state);
        if let Err(error) = made {
            self.heal(id)?;
            return Err(error);
        }
        Ok(id)
    }

    /// Heals one fault; nothing happens when it is healed already.
    ///
    /// # Errors
    /// When it stays broken; it is tried once more at the end.
    pub fn heal(&self, id: Id) -> Result<()> {
        let mut state = self.lock();
        let Some(undo) = state.open.get(&id) else {
            return Ok(());
        };
        undo.heal()?;
        state.open.remove(&id);
        Ok(())
    }

    fn heal_all(&self) {
        let mut state = self.lock();
        state.closed = true;
        for (_, undo) in std::mem::take(&mut state.open) {
            if let Err(error) = undo.heal() {
                eprintln!("not healed: {error:#}");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HealAtEnd {
    fn drop(&mut self) {
        self.0.heal_all();
    }
}

// === impl Undo ===

impl Undo {
    fn heal(&self) -> Result<()> {
        match self {
            Self::Continue(process) => process.signal("CONT").map(drop),
            Self::Forward(link) => {
                if run("ip", &["link", "show", "dev", link]).is_err() {
                    // It went with its Pod.
                    return Ok(());
                }
                run("bridge", &["link", "set", "dev", link, "state", "3"]).map(drop)
            }
            Self::Remove(file) => gone(file),
            Self::Uncover { process, at, volume } => {
                if !process.signal("STOP")? {
                    // What it saw went with it.
                    return Ok(());
                }
                let healed = uncover(process, at, volume);
                process.signal("CONT")?;
                healed
            }
        }
    }
}

/// Brings the content of the small disk into the volume, and takes the disk away, if it is there.
fn uncover(process: &Process, at: &str, volume: &Path) -> Result<()> {
    if mount_of(process, at)?.kind != "tmpfs" {
        return Ok(());
    }
    let covered = process.root().join(at.trim_start_matches('/'));
    gone(&covered.join(FILLER))?;
    for entry in fs::read_dir(volume).with_context(|| format!("list {}", volume.display()))? {
        let name = entry?.file_name();
        if !covered.join(&name).exists() {
            gone(&volume.join(&name))?;
        }
    }
    copy(&covered, volume)?;
    let pid = process.pid.to_string();
    run("nsenter", &["-t", &pid, "-m", "--", "umount", at]).map(drop)
}

/// Copies what is in a folder, with owners and modes.
///
/// # Errors
/// When anything is not copied.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let from = from.join(".");
    run("cp", &["-a", &from.to_string_lossy(), &to.to_string_lossy()]).map(drop)
}

fn gone(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", file.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use anyhow::bail;

    use super::*;

    fn broken(undos: &Undos, file: &Path) -> Result<Id> {
        undos.breaking(Undo::Remove(file.to_owned()), || Ok(fs::write(file, "x")?))
    }

    #[test]
    fn everything_is_healed_at_the_end_of_a_run_that_panics() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("1"), dir.path().join("2"));
        let undos = Undos::default();
        let run = catch_unwind(AssertUnwindSafe(|| {
            let _heal = HealAtEnd(undos.clone());
            broken(&undos, &one).unwrap();
            broken(&undos, &two).unwrap();
            assert!(one.exists() && two.exists());
            panic!("in the middle of a run");
        }));
        assert!(run.is_err());
        assert!(!one.exists() && !two.exists());
        assert!(broken(&undos, &one).is_err(), "nothing is broken after the end");
        assert!(!one.exists());
    }

    #[test]
    fn what_is_broken_in_part_is_healed_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("1");
        let undos = Undos::default();
        let failed = undos.breaking(Undo::Remove(file.clone()), || {
            fs::write(&file, "x")?;
            bail!("half done")
        });
        assert!(failed.is_err() && !file.exists());
    }

    #[test]
    fn healing_twice_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("1");
        let undos = Undos::default();
        let id = broken(&undos, &file).unwrap();
        undos.heal(id).unwrap();
        undos.heal(id).unwrap();
        assert!(!file.exists());
    }
}
