//! Whether the owner of a Run is lost, and whether it is provably out (C-7.3).
//!
//! Two clocks decide. runtimed refuses calls once it could not renew its heartbeat for 30 s, counted
//! from before the renewal it last sent; we count from when we saw that renewal, hence later. After
//! 30 s of silence an owner is suspect: its route goes, and its Pod is deleted. After 40 s it serves
//! nobody any more, even where nobody can ask it: a Pod that nobody can reach is then as good as gone.
//!
//! Silence alone is no fence, nor is an unready Pod: the Pod must be gone, or going.

use std::time::Duration;

use kruntimes_api::Run;

use crate::{facts::Signs, world::HEARTBEAT_FRESH};

/// An owner that has not been heard for this long is suspect.
pub const SUSPECT_AFTER: Duration = HEARTBEAT_FRESH;
/// An owner that has not been heard for this long refuses every call.
pub const OUT_AFTER: Duration = Duration::from_secs(40);
/// A Pod whose last heartbeat is no older was still connected to Kubernetes a moment ago, and so was its node:
/// one missed renewal. What Kubernetes says of a node lags behind by most of a minute.
pub const RECENT: Duration = Duration::from_secs(15);
/// What waits for others, such as the kubelet, is looked at this often.
const LOOK: Duration = Duration::from_secs(5);

/// What is known of the Pod that a Run is assigned to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pub presence: Presence,
    /// Since its last heartbeat, never longer than true.
    pub silence: Duration,
    /// Whether Pod and heartbeat were just read live. What the watch shows is a hint (C-2.3).
    pub confirmed: bool,
    /// Who vouches for the end of a Pod that is gone.
    pub node: Node,
}

/// The node of a Pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Node {
    /// It never was on one.
    Never,
    /// Kubernetes says that it reports.
    Reports,
    /// It does not report, is gone, or is not known.
    Silent,
}

/// Whether a Pod of exactly the assigned UID exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    There(Signs),
    /// The watch does not show it.
    NotSeen,
    /// A live read found none.
    Gone,
}

/// Why the old owner can run nothing of this Run any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fence {
    /// It confirmed that it holds nothing of this attempt (`releasedAttempt`).
    Released,
    /// Its Pod does not exist any more, and has ended.
    PodGone,
    /// Its Pod is being deleted, is in no endpoints, and has long been silent.
    PodOut,
}

/// The fence that holds for an assigned Run.
pub fn fence(run: &Run, owner: &Owner) -> Option<Fence> {
    let status = run.status.as_ref()?;
    if status.attempt.is_some() && status.released_attempt == status.attempt {
        return Some(Fence::Released);
    }
    if !owner.confirmed {
        return None;
    }
    let out = owner.silence >= OUT_AFTER;
    match owner.presence {
        Presence::Gone => (owner.has_ended() || out).then_some(Fence::PodGone),
        Presence::There(signs) => (signs.deleting && !signs.ready && out).then_some(Fence::PodOut),
        Presence::NotSeen => None,
    }
}

// === impl Owner ===

impl Owner {
    /// Whether the owner may be lost.
    pub fn is_suspect(&self) -> bool {
        match self.presence {
            Presence::NotSeen | Presence::Gone => true,
            Presence::There(signs) => signs.over || self.silence >= SUSPECT_AFTER,
        }
    }

    /// Whether a Pod that is gone has really ended, and has not only lost its object.
    fn has_ended(&self) -> bool {
        match self.node {
            Node::Never => true,
            Node::Reports => self.silence < RECENT,
            Node::Silent => false,
        }
    }

    /// Whether deleting the Pod would bring a fence nearer.
    pub fn may_be_deleted(&self) -> bool {
        matches!(self.presence, Presence::There(signs) if self.confirmed && !signs.deleting && self.is_suspect())
    }

    /// When time alone may change what is said here.
    pub fn look_again(&self) -> Duration {
        let limit = if self.is_suspect() {
            OUT_AFTER
        } else {
            SUSPECT_AFTER
        };
        let left = limit.saturating_sub(self.silence);
        if left.is_zero() { LOOK } else { left }
    }

    /// What led to suspicion, for people.
    pub fn complaint(&self) -> &'static str {
        match self.presence {
            Presence::Gone | Presence::NotSeen => "the owning Pod is gone",
            Presence::There(signs) if signs.over => "the owning Pod has ended",
            Presence::There(_) => "the owning Pod sends no heartbeat",
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use kruntimes_api::fixtures;

    use super::*;

    pub(crate) fn owner(presence: Presence) -> Owner {
        Owner {
            presence,
            silence: Duration::ZERO,
            confirmed: !matches!(presence, Presence::NotSeen),
            node: Node::Reports,
        }
    }

    pub(crate) fn there(deleting: bool, ready: bool) -> Presence {
        Presence::There(Signs {
            deleting,
            ready,
            over: false,
        })
    }

    fn run() -> Run {
        fixtures::run("ns", "n").attempt(2).ready_on("pod-a").build()
    }

    fn at(presence: Presence, silence: u64) -> Owner {
        Owner {
            silence: Duration::from_secs(silence),
            ..owner(presence)
        }
    }

    /// C-7.3: a missed heartbeat or an unready Pod alone is no fence, however long it lasts.
    #[test]
    fn neither_silence_nor_an_unready_pod_is_a_fence() {
        for ready in [true, false] {
            for silence in [0, 39, 40, 100_000] {
                assert_eq!(fence(&run(), &at(there(false, ready), silence)), None);
            }
        }
    }

    /// C-7.3: deleting, out of the endpoints, and 40 s without a heartbeat: all three.
    #[test]
    fn a_pod_that_is_deleted_unlisted_and_silent_for_40_s_is_out() {
        assert_eq!(fence(&run(), &at(there(true, false), 40)), Some(Fence::PodOut));
        assert_eq!(
            fence(&run(), &at(there(true, false), 39)),
            None,
            "it may still serve"
        );
        assert_eq!(
            fence(&run(), &at(there(true, true), 40)),
            None,
            "in the endpoints"
        );
        assert_eq!(fence(&run(), &at(there(false, false), 40)), None, "not deleting");
    }

    /// C-7.3: the exact Pod UID is gone; if its node is unreachable, 40 s have passed as well. A Pod that
    /// was deleted by force has only lost its object.
    #[test]
    fn a_pod_that_is_gone_from_an_unreachable_node_is_waited_for() {
        let lost = |node, silence| {
            let owner = Owner {
                node,
                ..at(Presence::Gone, silence)
            };
            (fence(&run(), &owner), owner.look_again())
        };
        let gone = Some(Fence::PodGone);
        assert_eq!(lost(Node::Silent, 0).0, None);
        assert_eq!(lost(Node::Silent, 39), (None, Duration::from_secs(1)));
        assert_eq!(lost(Node::Silent, 40).0, gone);
        // Its node has failed, and Kubernetes does not say so yet.
        assert_eq!(lost(Node::Reports, 14).0, gone);
        assert_eq!(lost(Node::Reports, 15), (None, Duration::from_secs(25)));
        assert_eq!(lost(Node::Reports, 40).0, gone);
        assert_eq!(lost(Node::Never, 39).0, gone);
    }

    /// C-2.3, C-7.3: what the watch shows proves nothing.
    #[test]
    fn nothing_is_fenced_by_what_the_watch_shows() {
        for presence in [Presence::NotSeen, there(true, false)] {
            let unconfirmed = Owner {
                confirmed: false,
                ..at(presence, 100)
            };
            assert_eq!(fence(&run(), &unconfirmed), None);
            assert!(unconfirmed.is_suspect() && !unconfirmed.may_be_deleted());
        }
    }

    /// C-7.3: `releasedAttempt` equals the attempt; an older one says nothing of this one.
    #[test]
    fn only_a_release_of_this_very_attempt_is_a_fence() {
        let released = |attempt| {
            let mut run = run();
            run.status.as_mut().unwrap().released_attempt = Some(attempt);
            run
        };
        assert_eq!(
            fence(&released(2), &at(there(false, true), 0)),
            Some(Fence::Released)
        );
        assert_eq!(fence(&released(1), &at(there(false, true), 0)), None);
        assert_eq!(fence(&released(1), &at(Presence::Gone, 0)), Some(Fence::PodGone));
    }

    /// C-7.3: after 30 s without renewal the Pod may be deleted, and one that has ended at once.
    #[test]
    fn a_silent_pod_is_deleted_to_obtain_a_fence() {
        assert!(!at(there(false, true), 29).may_be_deleted());
        assert_eq!(at(there(false, true), 29).look_again(), Duration::from_secs(1));
        assert!(at(there(false, true), 30).may_be_deleted());
        assert!(!at(there(true, true), 30).may_be_deleted(), "it is already");
        let evicted = Presence::There(Signs {
            over: true,
            ..Signs::default()
        });
        assert!(at(evicted, 0).may_be_deleted());
    }
}
