//! The API server's memory: objects, versions, a log of every change, and what each request does.
//!
//! It answers at one instant and knows no network. Rules that the CRDs hold on a real server (a terminal
//! phase never changes, an attempt never falls) are not enforced here: breaking one is noted as a
//! violation, because no part of the product may even try.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{api::coordination::v1::Lease, apimachinery::pkg::apis::meta::v1::Time as MetaTime};
use kruntimes_api::{Run, RunStatus, names};
use kruntimes_gateway::routes::Entry;
use kruntimes_scheduler::facts::{BeatFacts, PodFacts};

use crate::clock::{Clock, Time};

/// The namespace of everything.
pub(crate) const NAMESPACE: &str = "ns";
/// The one Runtime.
pub(crate) const RUNTIME: &str = "python";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Run,
    Pod,
    Beat,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Object {
    Run(Arc<Run>),
    Pod(Arc<PodFacts>),
    Beat(Arc<BeatFacts>),
}

/// One change of one object.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    pub(crate) before: Option<Object>,
    pub(crate) after: Option<Object>,
    /// What a gateway makes of the Run; of its last state, when it is gone.
    pub(crate) entry: Option<Entry>,
    pub(crate) at: Time,
}

/// What components ask.
#[derive(Debug, Clone)]
pub(crate) enum Request {
    GetRun(String),
    WriteStatus { run: Arc<Run>, status: Box<RunStatus> },
    WriteFinalizer { run: Arc<Run>, present: bool },
    DeleteRun { run: Arc<Run> },
    GetPod { name: String, uid: String },
    GetBeat(String),
    GetNode(usize),
    DeletePod { name: String, uid: String },
    Renew(BeatFacts),
    GetLease,
    PutLease(Box<Lease>),
}

#[derive(Debug, Clone)]
pub(crate) enum Reply {
    Run(Option<Arc<Run>>),
    /// Written; the object as it is now, if it is a Run.
    Done(Option<Arc<Run>>),
    Pod(Option<Arc<PodFacts>>),
    Beat(Option<Arc<BeatFacts>>),
    /// Whether Kubernetes hears of the node.
    Node(bool),
    Lease(Option<Box<Lease>>),
    /// 409, 404 or 410.
    Conflict,
    /// The request is refused and would be again.
    Refused,
    /// 500, or no answer: it may or may not have been done.
    Unknown,
}

#[derive(Debug)]
pub(crate) struct Api {
    clock: Clock,
    pub(crate) runs: BTreeMap<String, Arc<Run>>,
    pub(crate) pods: BTreeMap<String, Arc<PodFacts>>,
    pub(crate) beats: BTreeMap<String, Arc<BeatFacts>>,
    /// Nodes that Kubernetes does not hear of.
    pub(crate) silent_nodes: Vec<bool>,
    lease: Option<Lease>,
    version: u64,
    pub(crate) log: Vec<Change>,
    pub(crate) violations: Vec<String>,
}

// === impl Request ===

impl Request {
    pub(crate) fn writes(&self) -> bool {
        !matches!(
            self,
            Self::GetRun(_) | Self::GetPod { .. } | Self::GetBeat(_) | Self::GetNode(_) | Self::GetLease
        )
    }
}

// === impl Api ===

impl Api {
    pub(crate) fn new(clock: Clock, nodes: usize) -> Self {
        Self {
            clock,
            runs: BTreeMap::new(),
            pods: BTreeMap::new(),
            beats: BTreeMap::new(),
            silent_nodes: vec![false; nodes],
            lease: None,
            version: 0,
            log: Vec::new(),
            violations: Vec::new(),
        }
    }

    /// Does what is asked, now.
    pub(crate) fn apply(&mut self, request: Request, now: Time) -> Reply {
        match request {
            Request::GetRun(name) => Reply::Run(self.runs.get(&name).cloned()),
            Request::WriteStatus { run, status } => match self.current(&run) {
                None => Reply::Conflict,
                Some(current) => {
                    let mut next = (*current).clone();
                    next.status = Some(*status);
                    Reply::Done(Some(self.put_run(next, now)))
                }
            },
            Request::WriteFinalizer { run, present } => self.write_finalizer(&run, present, now),
            Request::DeleteRun { run } => match self.current(&run) {
                None => Reply::Conflict,
                Some(_) => {
                    self.delete_run(&name_of(&run), now);
                    Reply::Done(None)
                }
            },
            Request::GetPod { name, uid } => {
                let pod = self.pods.get(&name);
                Reply::Pod(pod.filter(|it| it.uid.as_str() == uid).cloned())
            }
            Request::GetBeat(pod) => Reply::Beat(self.beats.get(&pod).cloned()),
            Request::GetNode(node) => Reply::Node(!self.silent_nodes.get(node).copied().unwrap_or(true)),
            Request::DeletePod { name, uid } => match self.pods.get(&name) {
                Some(pod) if pod.uid.as_str() == uid => {
                    if !pod.signs.deleting {
                        self.change_pod(&name, now, |pod| pod.signs.deleting = true);
                    }
                    Reply::Done(None)
                }
                _ => Reply::Conflict,
            },
            Request::Renew(beat) => {
                self.put_beat(beat, now);
                Reply::Done(None)
            }
            Request::GetLease => Reply::Lease(self.lease.clone().map(Box::new)),
            Request::PutLease(lease) => {
                let known = self
                    .lease
                    .as_ref()
                    .and_then(|it| it.metadata.resource_version.clone());
                if known != lease.metadata.resource_version {
                    return Reply::Conflict;
                }
                self.version += 1;
                let mut lease = *lease;
                lease.metadata.resource_version = Some(self.version.to_string());
                self.lease = Some(lease);
                Reply::Done(None)
            }
        }
    }

    /// The object as it is, if `run` is exactly that.
    fn current(&self, run: &Run) -> Option<Arc<Run>> {
        let current = self.runs.get(&name_of(run))?;
        let same = current.metadata.uid == run.metadata.uid
            && current.metadata.resource_version == run.metadata.resource_version;
        same.then(|| Arc::clone(current))
    }

    fn write_finalizer(&mut self, run: &Run, present: bool, now: Time) -> Reply {
        let Some(current) = self.current(run) else {
            return Reply::Conflict;
        };
        let mut next = (*current).clone();
        let mut finalizers = next.metadata.finalizers.take().unwrap_or_default();
        let had = finalizers.iter().any(|it| it == names::FINALIZER);
        if present && !had && next.is_deleting() {
            // No new finalizer on what is being deleted.
            return Reply::Refused;
        }
        finalizers.retain(|it| it != names::FINALIZER);
        if present {
            finalizers.push(names::FINALIZER.to_owned());
        }
        let gone = next.is_deleting() && finalizers.is_empty();
        next.metadata.finalizers = Some(finalizers);
        if gone {
            let last = Arc::new(next);
            self.remove_run(&name_of(run), now);
            return Reply::Done(Some(last));
        }
        Reply::Done(Some(self.put_run(next, now)))
    }

    /// Stores a Run under a new version.
    pub(crate) fn put_run(&mut self, mut run: Run, now: Time) -> Arc<Run> {
        let name = name_of(&run);
        let before = self.runs.get(&name).cloned();
        if let Some(before) = before.as_deref() {
            self.check(before, &run);
        }
        self.version += 1;
        run.metadata.resource_version = Some(self.version.to_string());
        let run = Arc::new(run);
        self.runs.insert(name.clone(), Arc::clone(&run));
        let after = Some(Object::Run(Arc::clone(&run)));
        self.note(
            Kind::Run,
            name,
            before.map(Object::Run),
            after,
            entry_of(&run),
            now,
        );
        run
    }

    /// Deletes a Run as a user does: at once, or, where a finalizer holds it, by marking it.
    pub(crate) fn delete_run(&mut self, name: &str, now: Time) {
        let Some(run) = self.runs.get(name) else { return };
        if run.metadata.finalizers.as_ref().is_none_or(Vec::is_empty) {
            self.remove_run(name, now);
        } else if !run.is_deleting() {
            let mut next = (**run).clone();
            next.metadata.deletion_timestamp = Some(MetaTime(self.clock.wall(now)));
            self.put_run(next, now);
        }
    }

    fn remove_run(&mut self, name: &str, now: Time) {
        if let Some(before) = self.runs.remove(name) {
            self.version += 1;
            let entry = entry_of(&before);
            self.note(
                Kind::Run,
                name.to_owned(),
                Some(Object::Run(before)),
                None,
                entry,
                now,
            );
        }
    }

    pub(crate) fn put_pod(&mut self, pod: PodFacts, now: Time) {
        let name = pod.key.name.clone();
        let pod = Arc::new(pod);
        let before = self.pods.insert(name.clone(), Arc::clone(&pod));
        if before.as_ref() != Some(&pod) {
            self.version += 1;
            let (before, after) = (before.map(Object::Pod), Some(Object::Pod(pod)));
            self.note(Kind::Pod, name, before, after, None, now);
        }
    }

    pub(crate) fn change_pod(&mut self, name: &str, now: Time, change: impl FnOnce(&mut PodFacts)) {
        if let Some(pod) = self.pods.get(name) {
            let mut pod = (**pod).clone();
            change(&mut pod);
            pod.serves = pod.signs.ready && !pod.signs.deleting && !pod.signs.over;
            self.put_pod(pod, now);
        }
    }

    /// Removes a Pod with what it owns.
    pub(crate) fn remove_pod(&mut self, name: &str, now: Time) {
        let Some(before) = self.pods.remove(name) else {
            return;
        };
        self.version += 1;
        let holds = self
            .beats
            .get(name)
            .is_some_and(|it| it.holder == before.uid.as_str());
        self.note(
            Kind::Pod,
            name.to_owned(),
            Some(Object::Pod(before)),
            None,
            None,
            now,
        );
        if holds && let Some(beat) = self.beats.remove(name) {
            self.version += 1;
            self.note(
                Kind::Beat,
                name.to_owned(),
                Some(Object::Beat(beat)),
                None,
                None,
                now,
            );
        }
    }

    fn put_beat(&mut self, beat: BeatFacts, now: Time) {
        let name = beat.key.name.trim_start_matches("runtimed-").to_owned();
        // Owned by a Pod that is gone, it is collected at once.
        if self
            .pods
            .get(&name)
            .is_none_or(|it| it.uid.as_str() != beat.holder)
        {
            return;
        }
        let beat = Arc::new(beat);
        let before = self.beats.insert(name.clone(), Arc::clone(&beat));
        self.version += 1;
        let (before, after) = (before.map(Object::Beat), Some(Object::Beat(beat)));
        self.note(Kind::Beat, name, before, after, None, now);
    }

    fn note(
        &mut self,
        kind: Kind,
        name: String,
        before: Option<Object>,
        after: Option<Object>,
        entry: Option<Entry>,
        at: Time,
    ) {
        self.log.push(Change {
            kind,
            name,
            before,
            after,
            entry,
            at,
        });
    }

    /// Every object of a kind as it was after the first `position` changes, with what a gateway makes of it.
    pub(crate) fn list(&self, kind: Kind, position: usize) -> Vec<(Object, Option<&Entry>)> {
        let mut found: BTreeMap<&str, (&Object, Option<&Entry>)> = BTreeMap::new();
        for change in self.log.iter().take(position).filter(|it| it.kind == kind) {
            match &change.after {
                Some(object) => {
                    found.insert(&change.name, (object, change.entry.as_ref()));
                }
                None => {
                    found.remove(change.name.as_str());
                }
            }
        }
        found
            .into_values()
            .map(|(object, entry)| (object.clone(), entry))
            .collect()
    }

    /// C-2.2
    fn check(&mut self, before: &Run, after: &Run) {
        let name = name_of(after);
        let (old, new) = (before.phase(), after.phase());
        if old.is_terminal() && new != old {
            let text = format!("C-2.2: terminal phase of {name} changed from {old:?} to {new:?}");
            self.violations.push(text);
        }
        let (old, new) = (before.status.as_ref(), after.status.as_ref());
        if old.and_then(|it| it.attempt) > new.and_then(|it| it.attempt) {
            self.violations.push(format!("C-2.2: attempt of {name} fell"));
        }
        if new.is_some_and(|it| it.assigned_pod.is_some() != it.assigned_pod_uid.is_some()) {
            self.violations
                .push(format!("C-2.2: Pod name and UID of {name} do not come together"));
        }
        let start = |it: Option<&RunStatus>| it.and_then(|it| it.start_time.clone());
        if start(old).is_some() && start(old) != start(new) {
            self.violations
                .push(format!("C-2.2: startTime of {name} changed"));
        }
    }
}

pub(crate) fn name_of(run: &Run) -> String {
    run.metadata.name.clone().unwrap_or_default()
}

/// What a gateway makes of the object as it travels.
fn entry_of(run: &Run) -> Option<Entry> {
    let text = serde_json::to_vec(run).ok()?;
    Entry::of(&serde_json::from_slice(&text).ok()?)
}
