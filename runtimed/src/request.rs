//! The form of what arrives over the hop (C-4): hop mark, fence, ids. Whether it holds is asked later.

use std::time::Duration;

use kruntimes_api::keys::{Attempt, PodUid, RunUid};
use kruntimes_proto::{
    executor::InvokeFunctionRequest,
    failure::{Failure, Reason},
    hop,
    ids::InvocationId,
    limits,
};
use tokio::time::Instant;
use tonic::metadata::{AsciiMetadataValue, MetadataMap};

use crate::fence::Expected;

/// A call whose form is right.
#[derive(Debug)]
pub struct Call {
    /// What it was routed by.
    pub expected: Expected,
    /// The caller's id, or a new one.
    pub id: InvocationId,
    /// The rest.
    pub message: InvokeFunctionRequest,
}

// === impl Call ===

impl Call {
    /// Reads what a gateway of this or a neighbouring version sends.
    ///
    /// # Errors
    /// [`Reason::BadHop`], naming the field.
    pub fn parse(metadata: &MetadataMap, message: InvokeFunctionRequest) -> Result<Self, Failure> {
        let registration = message.registration.clone().unwrap_or_default();
        if !registration.registration_id.is_empty() {
            return Err(bad("registration_id must be empty on this hop"));
        }
        let expected = expected(metadata, &registration.run_uid)?;
        let id = if message.invocation_id.is_empty() {
            InvocationId::generate()
        } else {
            invocation_id(&message.invocation_id)?
        };
        Ok(Self {
            expected,
            id,
            message,
        })
    }
}

/// The hop mark, and the assignment that was routed to.
///
/// # Errors
/// [`Reason::BadHop`], naming the field.
pub fn expected(metadata: &MetadataMap, run_uid: &str) -> Result<Expected, Failure> {
    if only(metadata, hop::HOP)? != hop::HOP_VALUE {
        return Err(bad("kruntime-hop must be exactly 1: a call crosses one hop"));
    }
    let attempt = only(metadata, hop::ATTEMPT)?.parse().ok().and_then(Attempt::new);
    let attempt = attempt.ok_or_else(|| bad("kruntime-attempt must be a number of at least 1"))?;
    let pod = PodUid::new(only(metadata, hop::POD_UID)?);
    let pod = pod.ok_or_else(|| bad("kruntime-pod-uid must not be empty"))?;
    let run: RunUid = run_uid
        .parse()
        .map_err(|_| bad("run_uid must be the UID of a Run"))?;
    Ok(Expected { run, attempt, pod })
}

/// An id that a caller chose.
///
/// # Errors
/// [`Reason::BadHop`].
pub fn invocation_id(text: &str) -> Result<InvocationId, Failure> {
    InvocationId::parse(text.as_bytes()).map_err(|error| bad(&error.to_string()))
}

/// At most what was asked, the maximum and the Run's remaining life (C-3.9).
///
/// # Errors
/// When the life is over.
pub fn deadline(asked_millis: i64, ends: Option<Instant>, now: Instant) -> Result<Duration, Failure> {
    let asked = match u64::try_from(asked_millis) {
        Ok(0) | Err(_) => limits::DEFAULT_TIMEOUT,
        Ok(millis) => Duration::from_millis(millis),
    };
    let left = ends.map_or(limits::MAX_TIMEOUT, |ends| ends.saturating_duration_since(now));
    let timeout = asked.min(limits::MAX_TIMEOUT).min(left);
    // Zero would mean the default to the server.
    if timeout < Duration::from_millis(1) {
        return Err(Failure::new(
            Reason::Terminating,
            "the life of the function is over",
        ));
    }
    Ok(timeout)
}

fn bad(detail: &str) -> Failure {
    Failure::new(Reason::BadHop, detail)
}

fn only<'a>(metadata: &'a MetadataMap, name: &str) -> Result<&'a str, Failure> {
    let mut values = metadata.get_all(name).iter();
    let value: Option<&AsciiMetadataValue> = values.next();
    match (value.and_then(|value| value.to_str().ok()), values.next()) {
        (Some(value), None) => Ok(value),
        _ => Err(bad(&format!("metadata {name} must be there exactly once"))),
    }
}

#[cfg(test)]
mod tests {
    use kruntimes_proto::{executor::FunctionRegistration, failure::Dispatched};

    use super::*;

    const RUN: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";

    fn metadata(pairs: &[(&'static str, &str)]) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        for (name, value) in pairs {
            metadata.append(*name, value.parse().unwrap());
        }
        metadata
    }

    fn message(change: impl FnOnce(&mut InvokeFunctionRequest)) -> InvokeFunctionRequest {
        let mut message = InvokeFunctionRequest {
            registration: Some(FunctionRegistration {
                run_uid: RUN.to_owned(),
                registration_id: String::new(),
            }),
            ..InvokeFunctionRequest::default()
        };
        change(&mut message);
        message
    }

    const GOOD: [(&str, &str); 3] = [
        ("kruntime-hop", "1"),
        ("kruntime-attempt", "2"),
        ("kruntime-pod-uid", "pod-a"),
    ];

    /// C-4: a missing or second hop mark is refused.
    #[test]
    fn a_missing_or_second_hop_mark_is_refused() {
        assert!(Call::parse(&metadata(&GOOD), message(|_| {})).is_ok());
        let twice = [GOOD.as_slice(), &[("kruntime-hop", "1")]].concat();
        let two = [("kruntime-hop", "2"), GOOD[1], GOOD[2]];
        for bad in [&GOOD[1..], &twice, &two] {
            let failure = Call::parse(&metadata(bad), message(|_| {})).err().unwrap();
            assert_eq!(
                (failure.reason, failure.dispatched),
                (Reason::BadHop, Dispatched::No)
            );
        }
    }

    #[test]
    fn a_call_without_a_whole_fence_is_refused() {
        let refused =
            |pairs: &[(&'static str, &str)], message| Call::parse(&metadata(pairs), message).is_err();
        for missing in 1..3 {
            let mut pairs = GOOD.to_vec();
            pairs.remove(missing);
            assert!(refused(&pairs, message(|_| {})));
        }
        for attempt in ["0", "-1", "x", ""] {
            let pairs = [GOOD[0], ("kruntime-attempt", attempt), GOOD[2]];
            assert!(refused(&pairs, message(|_| {})), "{attempt}");
        }
        let with_id = message(|it| it.registration.as_mut().unwrap().registration_id = "reg_1".to_owned());
        assert!(refused(&GOOD, with_id));
        assert!(refused(&GOOD, message(|it| it.registration = None)));
        assert!(refused(&GOOD, message(|it| it.invocation_id = "a b".to_owned())));
    }

    /// C-3.9: the least of what was asked, the maximum and the Run's life; zero is the default.
    #[tokio::test(start_paused = true)]
    async fn the_deadline_is_the_least_of_three() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let of = |asked, ends: Option<u32>| deadline(asked, ends.map(|it| now + it * second), now).ok();
        assert_eq!(of(5_000, None), Some(5 * second));
        assert_eq!(of(0, None), Some(30 * second), "zero is the default");
        assert_eq!(of(900_000, None), Some(300 * second));
        assert_eq!(of(900_000, Some(7)), Some(7 * second));
        assert_eq!(of(5_000, Some(0)), None);
    }
}
