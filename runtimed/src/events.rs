//! Events on transitions of Runs, for `kubectl describe` (C-2.4). They are told, not kept: a full
//! queue or a failed request loses them and delays nothing.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kruntimes_api::{Run, names::MANAGER_RUNTIMED};
use kube::{
    Client, Resource as _,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::{sync::mpsc, time::timeout};

use crate::lifecycle::{
    Told,
    decide::{Action, End, Expired},
};

/// Events that may wait for the API server.
const QUEUE: usize = 256;
/// Longest note the API accepts, bytes.
const NOTE_MAX: usize = 1000;
/// One request.
const REQUEST: Duration = Duration::from_secs(10);

/// Takes events; clones share the queue.
#[derive(Debug, Clone)]
pub struct Events {
    queue: mpsc::Sender<(Event, ObjectReference)>,
}

/// Sends what was taken.
pub struct Publisher {
    queue: mpsc::Receiver<(Event, ObjectReference)>,
    recorder: Recorder,
}

/// Both ends; `pod` is who tells.
#[must_use]
pub fn channel(client: Client, pod: &str) -> (Events, Publisher) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let reporter = Reporter {
        controller: MANAGER_RUNTIMED.to_owned(),
        instance: Some(pod.to_owned()),
    };
    let publisher = Publisher {
        queue: receiver,
        recorder: Recorder::new(client, reporter),
    };
    (Events { queue: sender }, publisher)
}

// === impl Events ===

impl Events {
    /// A step of the lifecycle was written; `before` is what the Run told of its readiness then.
    pub fn written(&self, run: &Run, action: &Action, before: Told) {
        let Some((type_, reason, note)) = transition(action, before) else {
            return;
        };
        let mut note = note.to_owned();
        note.truncate(note.floor_char_boundary(NOTE_MAX));
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: "Own".to_owned(),
            secondary: None,
        };
        // Full: the API server is slow, and there are more important requests.
        let _ = self.queue.try_send((event, run.object_ref(&())));
    }
}

// === impl Publisher ===

impl Publisher {
    /// Runs until dropped.
    pub async fn run(mut self) {
        while let Some((event, object)) = self.queue.recv().await {
            let published = timeout(REQUEST, self.recorder.publish(&event, &object)).await;
            match published {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, reason = event.reason, "an event is lost"),
                Err(_) => tracing::debug!(reason = event.reason, "an event is lost: no answer"),
            }
        }
    }
}

/// What a written step is to people; `None`: no transition.
fn transition(action: &Action, before: Told) -> Option<(EventType, &str, &str)> {
    use EventType::{Normal, Warning};
    Some(match action {
        Action::Claim => (Normal, "Claimed", "the Pod's runtimed registers the function"),
        // Another owner, address or URL of a Run that stays Ready is none.
        Action::Announce if before != Told::NotReady => return None,
        Action::Announce => (Normal, "FunctionRegistered", "the function can be called"),
        Action::Withdraw => (
            Warning,
            "Recovering",
            "the Runtime Server does not answer for the function",
        ),
        Action::Release(fault) if fault.is_draining() => (Normal, fault.reason, &fault.message),
        Action::Release(fault) => (Warning, fault.reason, &fault.message),
        Action::Finish(End::Cancelled) => (Normal, "Cancelled", "cancelled on request"),
        Action::Finish(End::Deleted) => (Normal, "Deleting", "deleted"),
        Action::Finish(End::Expired(Expired::Lifetime)) => (Normal, "Lifetime", "spec.timeout has passed"),
        Action::Finish(End::Expired(Expired::Idle)) => (
            Normal,
            "IdleTimeout",
            "no call within spec.mode.function.idleTimeoutSeconds",
        ),
        Action::Wait
        | Action::Admit
        | Action::AddFinalizer
        | Action::Prepare
        | Action::Register
        | Action::CleanUp { .. }
        | Action::RemoveFinalizer
        | Action::Forget => return None,
    })
}

#[cfg(test)]
mod tests {
    use kruntimes_api::fixtures;

    use super::*;
    use crate::lifecycle::decide::Fault;

    fn pair(size: usize) -> (Events, mpsc::Receiver<(Event, ObjectReference)>) {
        let (queue, receiver) = mpsc::channel(size);
        (Events { queue }, receiver)
    }

    /// C-2.4: Events on transitions, and none while a Run stays what it is.
    #[test]
    fn transitions_are_told_and_refreshes_are_not() {
        let (events, mut told) = pair(8);
        let run = fixtures::run("ns", "n").build();
        events.written(&run, &Action::AddFinalizer, Told::NotReady);
        events.written(&run, &Action::Announce, Told::Outdated);
        assert!(told.try_recv().is_err());
        let fault = |reason, message: &str| {
            Action::Release(Fault {
                reason,
                message: message.to_owned(),
            })
        };
        for (action, reason, type_) in [
            (Action::Announce, "FunctionRegistered", EventType::Normal),
            (
                fault("RegistrationFailed", &"é".repeat(1000)),
                "RegistrationFailed",
                EventType::Warning,
            ),
            (fault("Draining", "x"), "Draining", EventType::Normal),
            (
                Action::Finish(End::Expired(Expired::Idle)),
                "IdleTimeout",
                EventType::Normal,
            ),
        ] {
            events.written(&run, &action, Told::NotReady);
            let (event, object) = told.try_recv().unwrap();
            assert_eq!((event.reason.as_str(), event.type_), (reason, type_));
            assert_eq!(object.name.as_deref(), Some("n"));
            let note = event.note.unwrap();
            assert!(!note.is_empty() && note.len() <= NOTE_MAX, "{}", note.len());
        }
    }

    #[test]
    fn a_full_queue_delays_nobody() {
        let (events, mut told) = pair(1);
        let run = fixtures::run("ns", "n").build();
        for _ in 0..2 {
            events.written(&run, &Action::Claim, Told::NotReady);
        }
        assert!(told.try_recv().is_ok());
        assert!(told.try_recv().is_err(), "the second was dropped");
    }
}
