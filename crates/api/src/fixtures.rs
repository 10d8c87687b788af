//! Builders of objects for tests: `run("ns", "n").ready_on("pod-a").build()`.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::{
    run::{
        Endpoint, EndpointProtocol, FunctionMode, Mode, Owner, Phase, Run, RunSpec, RunStatus, Source,
        TaskMode,
    },
    status::{READY, RUNNING, SCHEDULED, Says},
};

/// A time for tests that do not care which.
pub const NOW: Timestamp = Timestamp::UNIX_EPOCH;

/// Builds a [`Run`] as a cluster would hold it.
#[derive(Debug, Clone)]
pub struct RunBuilder(Run);

/// A pending function Run of Runtime `python` with a UID derived from its name.
#[must_use]
pub fn run(namespace: &str, name: &str) -> RunBuilder {
    let source = "def handler(event, context):\n    return event\n";
    let mut run = Run::new(name, function("python", "main.py", "main.handler", source));
    run.metadata.namespace = Some(namespace.to_owned());
    run.metadata.uid = Some(uid(&format!("{namespace}/{name}")));
    run.metadata.resource_version = Some("1".to_owned());
    run.metadata.generation = Some(1);
    run.metadata.creation_timestamp = Some(Time(NOW));
    RunBuilder(run)
}

/// What a function needs and nothing else: inline source, written to `path`.
#[must_use]
pub fn function(runtime: &str, path: &str, handler: &str, source: &str) -> RunSpec {
    RunSpec {
        runtime: runtime.to_owned(),
        source: Some(Source {
            inline: Some(source.to_owned()),
            inline_path: Some(path.to_owned()),
            ..Source::default()
        }),
        mode: Mode {
            task: None,
            function: Some(FunctionMode {
                handler: handler.to_owned(),
                idle_timeout_seconds: None,
            }),
        },
        env: None,
        resources: None,
        affinity: None,
        timeout: None,
        retry_policy: None,
        cancel_requested: None,
        ttl_seconds_after_finished: None,
    }
}

/// A UID in canonical form, the same for the same text.
#[must_use]
pub fn uid(text: &str) -> String {
    // FNV-1a, twice: tests need difference, not secrecy.
    let hash = |seed: u64| {
        text.bytes().fold(0xcbf2_9ce4_8422_2325 ^ seed, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
    };
    let (a, b) = (hash(0), hash(0x9e37_79b9));
    format!(
        "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}",
        a >> 32,
        (a >> 16) & 0xffff,
        a & 0xfff,
        (b >> 48) & 0xfff,
        b & 0xffff_ffff_ffff
    )
}

impl RunBuilder {
    /// Another Runtime than `python`.
    #[must_use]
    pub fn runtime(mut self, runtime: &str) -> Self {
        runtime.clone_into(&mut self.0.spec.runtime);
        self
    }

    /// A UID of its own, as a recreated object has.
    #[must_use]
    pub fn uid(mut self, uid: &str) -> Self {
        self.0.metadata.uid = Some(uid.to_owned());
        self
    }

    /// A task instead of a function.
    #[must_use]
    pub fn task(mut self) -> Self {
        self.0.spec.mode = Mode {
            task: Some(TaskMode::default()),
            function: None,
        };
        if let Some(source) = &mut self.0.spec.source {
            source.inline_path = None;
        }
        self
    }

    /// A resourceVersion of its own.
    #[must_use]
    pub fn version(mut self, version: &str) -> Self {
        self.0.metadata.resource_version = Some(version.to_owned());
        self
    }

    /// The assignment's number.
    #[must_use]
    pub fn attempt(mut self, attempt: i32) -> Self {
        self.status().attempt = Some(attempt);
        self
    }

    /// Assigned to a Pod (with UID [`uid`] of its name), not yet claimed.
    #[must_use]
    pub fn scheduled_on(mut self, pod: &str) -> Self {
        let status = self.status();
        status.phase = Some(Phase::Scheduled);
        status.assigned_pod = Some(pod.to_owned());
        status.assigned_pod_uid = Some(uid(pod));
        status.attempt = status.attempt.or(Some(1));
        status.set(
            Says {
                kind: SCHEDULED,
                holds: true,
                reason: "Assigned",
                message: "",
            },
            Some(1),
            NOW,
        );
        self
    }

    /// Without a Pod, for this reason of the scheduler.
    #[must_use]
    pub fn waits_for(mut self, reason: &str) -> Self {
        let status = self.status();
        status.phase = Some(Phase::Pending);
        status.clear_assignment();
        status.set(
            Says {
                kind: SCHEDULED,
                holds: false,
                reason,
                message: "",
            },
            Some(1),
            NOW,
        );
        self
    }

    /// Claimed by the Pod's runtimed, being registered.
    #[must_use]
    pub fn running_on(mut self, pod: &str) -> Self {
        self = self.scheduled_on(pod);
        let status = self.status();
        status.phase = Some(Phase::Running);
        status.set(
            Says {
                kind: RUNNING,
                holds: true,
                reason: "Claimed",
                message: "",
            },
            Some(1),
            NOW,
        );
        status.set(
            Says {
                kind: READY,
                holds: false,
                reason: "Registering",
                message: "",
            },
            Some(1),
            NOW,
        );
        self
    }

    /// Ready on the Pod, whose owner listens on 10.0.0.1:9443.
    #[must_use]
    pub fn ready_on(mut self, pod: &str) -> Self {
        self = self.running_on(pod);
        let key = self.0.key().expect("a built Run has a key");
        let path = crate::invoke_path::build(&key.namespace, &self.0.spec.runtime, key.uid);
        let status = self.status();
        status.phase = Some(Phase::Ready);
        status.owner = Some(Owner {
            address: "10.0.0.1:9443".to_owned(),
            peer_key: "ab".repeat(32),
        });
        status.endpoint = Some(Endpoint {
            protocol: EndpointProtocol::HTTPS,
            url: format!("https://kruntimes-gateway.kruntimes-system.svc.cluster.local{path}"),
            ca_bundle: None,
        });
        status.set(
            Says {
                kind: READY,
                holds: true,
                reason: "FunctionRegistered",
                message: "",
            },
            Some(1),
            NOW,
        );
        self
    }

    /// Where the owner listens and which key it has.
    #[must_use]
    pub fn owner(mut self, address: &str, peer_key: &str) -> Self {
        self.status().owner = Some(Owner {
            address: address.to_owned(),
            peer_key: peer_key.to_owned(),
        });
        self
    }

    /// Ready=False for this reason.
    #[must_use]
    pub fn not_ready(mut self, reason: &str) -> Self {
        self.status().set(
            Says {
                kind: READY,
                holds: false,
                reason,
                message: "",
            },
            Some(1),
            NOW,
        );
        self
    }

    /// Ended.
    #[must_use]
    pub fn ended(mut self, phase: Phase, reason: &str) -> Self {
        self.status().finish(phase, reason, "", Some(1), NOW);
        self
    }

    /// Somebody asked to end it.
    #[must_use]
    pub fn cancelled(mut self) -> Self {
        self.0.spec.cancel_requested = Some(true);
        self
    }

    /// Somebody deleted it and a finalizer holds it.
    #[must_use]
    pub fn deleting(mut self) -> Self {
        self.0.metadata.deletion_timestamp = Some(Time(NOW));
        self.0.metadata.finalizers = Some(vec![crate::names::FINALIZER.to_owned()]);
        self
    }

    /// Any other change.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Run)) -> Self {
        change(&mut self.0);
        self
    }

    /// The Run.
    #[must_use]
    pub fn build(self) -> Run {
        self.0
    }

    fn status(&mut self) -> &mut RunStatus {
        self.0.status.get_or_insert_default()
    }
}
