//! Registrations that survive a restart of runtimed (C-6.3): one file a Run, in a volume that
//! only runtimed mounts.
//!
//! A record is written before the Runtime Server hears of the Run, and removed after the server has
//! let go of it: at any moment, what the server may hold is written here. It keeps the whole request,
//! because the id of a registration whose answer was lost is learned by asking again.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kruntimes_api::keys::{Attempt, RunKey, RunUid};
use kruntimes_proto::{executor::RegisterFunctionRequest, ids::RegistrationId};
use serde::{Deserialize, Serialize};

const SUFFIX: &str = ".json";

/// All records. Clones share them.
#[derive(Debug, Clone)]
pub struct Journal {
    shared: Arc<Shared>,
}

/// What is known of one registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Namespace of the Run.
    pub namespace: String,
    /// Name of the Run.
    pub name: String,
    /// `status.attempt` it is registered under.
    pub attempt: i32,
    /// Digest over the immutable inputs.
    pub digest: String,
    /// The server's id; absent while its answer is awaited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registration_id: Option<String>,
    /// What the server was asked, to ask it again.
    pub request: Request,
}

/// A RegisterFunction request without what the record says already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// Absolute path.
    pub working_dir: String,
    /// `file.function`.
    pub handler: String,
    /// Environment of the function.
    pub env: BTreeMap<String, String>,
    /// Seconds; zero for none.
    pub idle_timeout_seconds: i64,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    records: Mutex<HashMap<RunUid, Record>>,
    /// Held, by threads that may block, for as long as file and map differ.
    disk: Mutex<()>,
}

// === impl Record ===

impl Record {
    /// The message that makes, or finds again, the registration of `run`.
    #[must_use]
    pub fn to_message(&self, run: RunUid) -> RegisterFunctionRequest {
        RegisterFunctionRequest {
            run_uid: run.to_string(),
            registration_attempt: self.attempt,
            working_dir: self.request.working_dir.clone(),
            handler: self.request.handler.clone(),
            env: self.request.env.clone().into_iter().collect(),
            idle_timeout_seconds: self.request.idle_timeout_seconds,
            registration_digest: self.digest.clone(),
        }
    }

    /// The attempt, if the record holds a valid one.
    #[must_use]
    pub fn attempt(&self) -> Option<Attempt> {
        Attempt::new(self.attempt)
    }

    /// The id, if it is known and valid.
    #[must_use]
    pub fn registration_id(&self) -> Option<RegistrationId> {
        RegistrationId::parse(self.registration_id.as_deref()?.as_bytes()).ok()
    }

    /// The Run this is about.
    #[must_use]
    pub fn key(&self, uid: RunUid) -> RunKey {
        RunKey {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            uid,
        }
    }
}

// === impl Journal ===

impl Journal {
    /// Reads the records in `dir`, which is made when absent. A file that is no record, as after a
    /// full disk, is set aside with a warning: it must not keep the Pod from starting.
    ///
    /// # Errors
    /// When the directory cannot be made or listed; the text names it.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let context = |error: io::Error| {
            io::Error::new(error.kind(), format!("--journal-dir {}: {error}", dir.display()))
        };
        fs::create_dir_all(dir).map_err(context)?;
        let mut records = HashMap::new();
        for file in fs::read_dir(dir).map_err(context)? {
            let path = file.map_err(context)?.path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or_default();
            let Some(uid) = name.strip_suffix(SUFFIX) else {
                continue;
            };
            match (uid.parse::<RunUid>(), read(&path)) {
                (Ok(uid), Ok(record)) => {
                    records.insert(uid, record);
                }
                (uid, record) => {
                    let problem = record.err().map(|error| error.to_string());
                    let problem = problem.or_else(|| uid.err().map(|error| error.to_string()));
                    tracing::warn!(path = %path.display(), problem, "a journal record cannot be read and is set aside");
                    let _ = fs::rename(&path, path.with_extension("unreadable"));
                }
            }
        }
        Ok(Self {
            shared: Arc::new(Shared {
                dir: dir.to_owned(),
                records: Mutex::new(records),
                disk: Mutex::default(),
            }),
        })
    }

    /// The record of a Run.
    #[must_use]
    pub fn get(&self, run: RunUid) -> Option<Record> {
        self.records().get(&run).cloned()
    }

    /// Every record.
    #[must_use]
    pub fn all(&self) -> Vec<(RunUid, Record)> {
        self.records()
            .iter()
            .map(|(uid, record)| (*uid, record.clone()))
            .collect()
    }

    /// Writes a record; it is on disk when this returns.
    ///
    /// # Errors
    /// When it could not be written; then the one before still holds.
    pub async fn put(&self, run: RunUid, record: Record) -> io::Result<()> {
        let journal = self.clone();
        blocking(move || {
            let _turn = journal.disk();
            journal.write(run, record)
        })
        .await
    }

    /// Writes the id into the record, or takes it out, if the record is there still: a caller that went
    /// away may be overtaken by the removal of the record, which must not come back.
    ///
    /// # Errors
    /// As for [`Journal::put`].
    pub async fn set_id(&self, run: RunUid, id: Option<&RegistrationId>) -> io::Result<()> {
        let (journal, id) = (self.clone(), id.map(|id| id.as_str().to_owned()));
        blocking(move || {
            let _turn = journal.disk();
            match journal.get(run) {
                Some(record) if record.registration_id != id => journal.write(
                    run,
                    Record {
                        registration_id: id,
                        ..record
                    },
                ),
                _ => Ok(()),
            }
        })
        .await
    }

    /// Removes the record of a Run, if there is one.
    ///
    /// # Errors
    /// When the file exists and cannot be removed.
    pub async fn remove(&self, run: RunUid) -> io::Result<()> {
        let journal = self.clone();
        blocking(move || {
            let _turn = journal.disk();
            match fs::remove_file(journal.path(run)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            journal.records().remove(&run);
            Ok(())
        })
        .await
    }

    fn write(&self, run: RunUid, record: Record) -> io::Result<()> {
        write(&self.path(run), &serde_json::to_vec(&record)?)?;
        self.records().insert(run, record);
        Ok(())
    }

    fn disk(&self) -> MutexGuard<'_, ()> {
        self.shared.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, run: RunUid) -> PathBuf {
        self.shared.dir.join(format!("{run}{SUFFIX}"))
    }

    fn records(&self) -> MutexGuard<'_, HashMap<RunUid, Record>> {
        self.shared.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(path: &Path) -> io::Result<Record> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

/// Readers see the old or the new content, never a part, also after a loss of power.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    // Environments may hold secrets.
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

/// Runs `work` where blocking is allowed. It runs to its end even if the caller goes away.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";

    fn record() -> Record {
        Record {
            namespace: "ns".to_owned(),
            name: "n".to_owned(),
            attempt: 2,
            digest: "sha256:00".to_owned(),
            registration_id: None,
            request: Request {
                working_dir: "/workspace/x".to_owned(),
                handler: "main.handler".to_owned(),
                env: BTreeMap::from([("A".to_owned(), "b".to_owned())]),
                idle_timeout_seconds: 0,
            },
        }
    }

    /// C-6.3: records survive a restart.
    #[tokio::test]
    async fn records_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let run: RunUid = RUN.parse().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        journal.put(run, record()).await.unwrap();
        let id = RegistrationId::generate();
        journal.set_id(run, Some(&id)).await.unwrap();
        let registered = Record {
            registration_id: Some(id.as_str().to_owned()),
            ..record()
        };
        let after = Journal::open(dir.path()).unwrap();
        assert_eq!(after.all(), vec![(run, registered)]);
        after.remove(run).await.unwrap();
        after.remove(run).await.unwrap();
        after.set_id(run, Some(&id)).await.unwrap();
        assert!(
            Journal::open(dir.path()).unwrap().all().is_empty(),
            "what was removed stays so"
        );
    }

    #[tokio::test]
    async fn a_torn_record_does_not_keep_the_others_from_being_read() {
        let dir = tempfile::tempdir().unwrap();
        let run: RunUid = RUN.parse().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        journal.put(run, record()).await.unwrap();
        for name in ["2c24c1f0-9f8f-4f80-82d5-000000000000.json", "x.json", "y.new"] {
            fs::write(dir.path().join(name), "{").unwrap();
        }
        assert_eq!(Journal::open(dir.path()).unwrap().all(), vec![(run, record())]);
        assert_eq!(
            Journal::open(dir.path()).unwrap().all().len(),
            1,
            "also the next time"
        );
    }

    #[tokio::test]
    async fn a_record_can_be_read_by_its_owner_only() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let run: RunUid = RUN.parse().unwrap();
        Journal::open(dir.path())
            .unwrap()
            .put(run, record())
            .await
            .unwrap();
        let mode = fs::metadata(dir.path().join(format!("{RUN}.json")))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
