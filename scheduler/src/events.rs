//! Events on transitions of Runs, for `kubectl describe` (C-2.4). They are told, not kept: a full
//! queue or a failed request loses them and delays nothing.

use kruntimes_api::{Run, names::MANAGER_SCHEDULER, status::UNASSIGNED};
use kube::{
    Client, Resource as _,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc;

use crate::{plan::Why, recover::Kind};

/// Events that may wait for the API server.
const QUEUE: usize = 256;
/// Longest note the API accepts, bytes.
const NOTE_MAX: usize = 1000;

/// Takes events; clones share the queue.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    queue: mpsc::Sender<Told>,
}

/// Sends what was taken.
pub(crate) struct Publisher {
    queue: mpsc::Receiver<Told>,
    recorder: Recorder,
}

type Told = (Event, k8s_openapi::api::core::v1::ObjectReference);

/// Both ends.
pub(crate) fn channel(client: Client, identity: &str) -> (Events, Publisher) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let reporter = Reporter {
        controller: MANAGER_SCHEDULER.to_owned(),
        instance: Some(identity.to_owned()),
    };
    (
        Events { queue: sender },
        Publisher {
            queue: receiver,
            recorder: Recorder::new(client, reporter),
        },
    )
}

// === impl Events ===

impl Events {
    /// A Run has got a Pod.
    pub(crate) fn assigned(&self, run: &Run, pod: &str) {
        self.tell(
            run,
            EventType::Normal,
            "Assigned",
            format!("assigned to Pod {pod}"),
        );
    }

    /// A status was written. A Run that waits is told once for each reason, as its status is written once.
    pub(crate) fn written(&self, run: &Run, why: Why, message: Option<&str>) {
        let Some((type_, reason)) = transition(why) else {
            return;
        };
        self.tell(run, type_, reason, message.unwrap_or_default().to_owned());
    }

    fn tell(&self, run: &Run, type_: EventType, reason: &str, mut note: String) {
        note.truncate(note.floor_char_boundary(NOTE_MAX));
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: "Schedule".to_owned(),
            secondary: None,
        };
        // Full: the API server is slow, and there are more important requests.
        let _ = self.queue.try_send((event, run.object_ref(&())));
    }
}

// === impl Publisher ===

impl Publisher {
    /// Runs until dropped.
    pub(crate) async fn run(mut self) {
        while let Some((event, object)) = self.queue.recv().await {
            if let Err(error) = self.recorder.publish(&event, &object).await {
                tracing::debug!(%error, reason = event.reason, "an event is lost");
            }
        }
    }
}

fn transition(why: Why) -> Option<(EventType, &'static str)> {
    Some(match why {
        Why::Healthy => return None,
        Why::Waits(wait) => (EventType::Warning, wait.reason()),
        Why::NeverFits => (EventType::Warning, "NeverFits"),
        Why::Cancelled | Why::Recover(Kind::Cancelled) => (EventType::Normal, "Cancelled"),
        Why::Lifetime => (EventType::Normal, "Lifetime"),
        Why::Recover(Kind::Recovering) => (EventType::Warning, "Recovering"),
        Why::Recover(Kind::Retrying) => (EventType::Warning, "Retrying"),
        Why::Recover(Kind::HandedOver | Kind::TurnedAway) => (EventType::Normal, UNASSIGNED),
        Why::Recover(Kind::Exhausted | Kind::Permanent) => (EventType::Warning, "Failed"),
    })
}

#[cfg(test)]
mod tests {
    use kruntimes_api::fixtures;

    use super::*;
    use crate::cycle::Wait;

    fn pair() -> (Events, mpsc::Receiver<Told>) {
        let (queue, receiver) = mpsc::channel(1);
        (Events { queue }, receiver)
    }

    /// C-2.4: every transition of a Run that the scheduler makes, and nothing that is none.
    #[test]
    fn transitions_are_told() {
        let (events, mut told) = pair();
        let run = fixtures::run("ns", "n").build();
        events.written(&run, Why::Healthy, None);
        assert!(told.try_recv().is_err());
        for (why, reason) in [
            (Why::Waits(Wait::CapacityFull), "CapacityFull"),
            (Why::NeverFits, "NeverFits"),
            (Why::Recover(Kind::Recovering), "Recovering"),
            (Why::Recover(Kind::HandedOver), "Unassigned"),
            (Why::Recover(Kind::TurnedAway), "Unassigned"),
            (Why::Recover(Kind::Exhausted), "Failed"),
            (Why::Cancelled, "Cancelled"),
        ] {
            events.written(&run, why, Some(reason));
            let (event, _) = told.try_recv().unwrap();
            assert_eq!(event.reason, reason);
        }
        events.written(&run, Why::Recover(Kind::Retrying), Some(&"é".repeat(1000)));
        let (event, object) = told.try_recv().unwrap();
        assert_eq!(
            (event.reason.as_str(), object.name.as_deref()),
            ("Retrying", Some("n"))
        );
        assert!(
            event
                .note
                .is_some_and(|it| it.len() <= NOTE_MAX && !it.is_empty())
        );
    }

    #[test]
    fn a_full_queue_delays_nobody() {
        let (events, mut told) = pair();
        let run = fixtures::run("ns", "n").build();
        events.assigned(&run, "pod-a");
        events.assigned(&run, "pod-b");
        assert!(told.try_recv().is_ok());
        assert!(told.try_recv().is_err(), "the second was dropped");
    }
}
