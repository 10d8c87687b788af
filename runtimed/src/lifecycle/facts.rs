//! A Run object → the few facts that can change what this Pod does with it.

use kruntimes_api::{
    Run,
    keys::{Attempt, PodUid},
    names::FINALIZER,
    run::{Endpoint, Owner, Phase},
    status::READY,
};

/// Who this process is.
#[derive(Debug, Clone)]
pub struct Me {
    /// Namespace of the Pod and of its Runs.
    pub namespace: String,
    /// Name of the Pod.
    pub pod: String,
    /// UID of the Pod.
    pub pod_uid: PodUid,
    /// Name of the Runtime.
    pub runtime: String,
    /// What `status.owner` says of a Run that is Ready here.
    pub owner: Owner,
}

/// What the Run object says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Assigned to this Pod, name and UID. `false` also when the object is gone.
    pub mine: bool,
    /// `status.attempt`; the first when it is absent, which the scheduler never writes.
    pub attempt: Attempt,
    /// This attempt was handed back.
    pub released: bool,
    /// The Run has ended for good.
    pub ended: bool,
    /// Somebody deleted it.
    pub deleting: bool,
    /// Somebody asked to end it.
    pub cancelled: bool,
    /// Our finalizer is on it.
    pub finalizer: bool,
    /// Somebody else's finalizer is on it.
    pub foreign_finalizer: bool,
    /// Function, and not task.
    pub function: bool,
    /// `startTime` is set and the phase says Running or Ready.
    pub claimed: bool,
    /// What it tells the world about readiness.
    pub told: Told,
}

/// What `status` tells gateways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// Not Ready.
    NotReady,
    /// Ready here, as it should be told.
    Ready,
    /// Ready, but of another key, address, URL or CA bundle than now.
    Outdated,
}

impl Facts {
    /// Of an object that does not exist any more, or belongs to another life of its name.
    #[must_use]
    pub fn gone() -> Self {
        Self {
            mine: false,
            attempt: Attempt::FIRST,
            released: false,
            ended: false,
            deleting: true,
            cancelled: false,
            finalizer: false,
            foreign_finalizer: false,
            function: true,
            claimed: false,
            told: Told::NotReady,
        }
    }

    /// Of an object as read. `endpoint` is what its status should hold when Ready, if that is known.
    #[must_use]
    pub fn of(run: &Run, me: &Me, endpoint: Option<&Endpoint>) -> Self {
        let status = run.status.as_ref();
        let attempt = run.attempt().unwrap_or(Attempt::FIRST);
        let phase = run.phase();
        let finalizers = run.metadata.finalizers.as_deref().unwrap_or_default();
        let released = status.and_then(|it| it.released_attempt);
        let told = if !(phase == Phase::Ready && run.condition(READY).is_some_and(|it| it.status == "True")) {
            Told::NotReady
        } else if status.and_then(|it| it.owner.as_ref()) == Some(&me.owner)
            && (endpoint.is_none() || status.and_then(|it| it.endpoint.as_ref()) == endpoint)
        {
            Told::Ready
        } else {
            Told::Outdated
        };
        Self {
            mine: run
                .assignment()
                .is_some_and(|(pod, uid)| pod == me.pod && uid == me.pod_uid),
            attempt,
            released: released.is_some_and(|released| released >= attempt.get()),
            ended: phase.is_terminal(),
            deleting: run.is_deleting(),
            cancelled: run.cancel_requested(),
            finalizer: finalizers.iter().any(|it| it == FINALIZER),
            foreign_finalizer: finalizers.iter().any(|it| it != FINALIZER),
            function: run.spec.mode.function.is_some(),
            claimed: status.is_some_and(|it| it.start_time.is_some())
                && matches!(phase, Phase::Running | Phase::Ready),
            told,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use kruntimes_api::fixtures;

    use super::*;

    /// Who the fixtures' `ready_on("pod-a")` speaks of.
    pub(crate) fn me() -> Me {
        Me {
            namespace: "ns".to_owned(),
            pod: "pod-a".to_owned(),
            pod_uid: PodUid::new(fixtures::uid("pod-a")).unwrap(),
            runtime: "python".to_owned(),
            owner: Owner {
                address: "10.0.0.1:9443".to_owned(),
                peer_key: "ab".repeat(32),
            },
        }
    }

    /// C-6.1: mine is name and uid.
    #[test]
    fn mine_is_name_and_uid() {
        let of = |run: &Run| Facts::of(run, &me(), None).mine;
        assert!(of(&fixtures::run("ns", "n").scheduled_on("pod-a").build()));
        assert!(!of(&fixtures::run("ns", "n").scheduled_on("pod-b").build()));
        assert!(!of(&fixtures::run("ns", "n").build()));
        let reused = fixtures::run("ns", "n")
            .scheduled_on("pod-a")
            .with(|run| run.status.as_mut().unwrap().assigned_pod_uid = Some(fixtures::uid("older pod-a")))
            .build();
        assert!(!of(&reused));
    }

    #[test]
    fn another_key_address_or_endpoint_is_outdated() {
        let run = fixtures::run("ns", "n").ready_on("pod-a").build();
        let endpoint = run.status.as_ref().unwrap().endpoint.clone();
        let told = |run: &Run, endpoint: Option<&Endpoint>| Facts::of(run, &me(), endpoint).told;
        assert_eq!(told(&run, endpoint.as_ref()), Told::Ready);
        assert_eq!(told(&run, None), Told::Ready, "nothing better is known");
        let mut other = endpoint.clone().unwrap();
        other.url.push('x');
        assert_eq!(told(&run, Some(&other)), Told::Outdated);
        let older = fixtures::run("ns", "n")
            .ready_on("pod-a")
            .owner("10.0.0.1:9443", &"cd".repeat(32))
            .build();
        assert_eq!(told(&older, endpoint.as_ref()), Told::Outdated);
        let recovering = fixtures::run("ns", "n")
            .ready_on("pod-a")
            .not_ready("Recovering")
            .build();
        assert_eq!(told(&recovering, endpoint.as_ref()), Told::NotReady);
    }

    #[test]
    fn a_release_counts_for_its_attempt_only() {
        let released = |attempt: i32| {
            let run = fixtures::run("ns", "n")
                .attempt(attempt)
                .scheduled_on("pod-a")
                .with(|run| run.status.as_mut().unwrap().released_attempt = Some(1))
                .build();
            Facts::of(&run, &me(), None).released
        };
        assert!(released(1) && !released(2));
    }
}
