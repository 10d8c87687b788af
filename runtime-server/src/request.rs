//! Messages of the wire become checked values, once (C-5.2, C-5.3).

use std::{
    path::{Component, Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use kruntimes_proto::{
    executor::{
        FunctionRegistration, InvokeFunctionRequest, RegisterFunctionRequest, UnregisterFunctionRequest,
    },
    failure::{Failure, Reason},
    ids::{InvocationId, RegistrationId},
    limits,
};
use kruntimes_trace::Trace;
use tokio::time::Instant;

use crate::handler::Handler;

/// Longest Run UID, bytes; Kubernetes makes them 36 long.
const RUN_UID_BYTES: usize = 128;

/// One registration, as every later request names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// UID of the Run.
    pub run_uid: String,
    /// The generation.
    pub id: RegistrationId,
}

/// A checked `RegisterFunctionRequest`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Register {
    /// UID of the Run.
    pub run_uid: String,
    /// Counts from 1.
    pub attempt: i32,
    /// Over the immutable inputs.
    pub digest: String,
    /// Absolute, without `..`; whether it exists is checked by [`working_dir`].
    pub working_dir: PathBuf,
    /// At most 512 bytes; its folder is checked by [`folder`].
    pub handler: Handler,
    /// Valid names and values.
    pub env: Vec<(String, String)>,
}

/// A checked `InvokeFunctionRequest`.
#[derive(Debug)]
pub struct Invoke {
    /// Which function.
    pub function: Reference,
    /// The caller's, or a new one.
    pub invocation_id: InvocationId,
    /// W3C trace context.
    pub trace: Trace,
    /// JSON, at most 1 MiB; empty means `null`.
    pub input: Bytes,
    /// How long it may take; never unlimited.
    pub timeout: Duration,
    /// When that has passed.
    pub deadline: Instant,
}

/// A checked `UnregisterFunctionRequest`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unregister {
    /// Which function.
    pub function: Reference,
    /// Whether to end a running call at once.
    pub cancel: bool,
    /// Until when a running call may go on otherwise.
    pub drain_until: Instant,
}

/// Checks a reference; only the gateway's hop may leave the id empty.
///
/// # Errors
/// `InvalidPayload`, naming the field.
pub fn reference(wire: Option<FunctionRegistration>) -> Result<Reference, Failure> {
    let wire = wire.ok_or_else(|| invalid("registration is missing"))?;
    let id = RegistrationId::parse(wire.registration_id.as_bytes())
        .map_err(|error| invalid(format!("registration.registration_id: {error}")))?;
    Ok(Reference {
        run_uid: run_uid(wire.run_uid)?,
        id,
    })
}

/// Checks a registration.
///
/// # Errors
/// `InvalidPayload`, naming the field.
pub fn register(wire: RegisterFunctionRequest) -> Result<Register, Failure> {
    if wire.registration_attempt < 1 {
        return Err(invalid("registration_attempt must be 1 or more"));
    }
    bounded(
        "registration_digest",
        &wire.registration_digest,
        limits::DIGEST_BYTES,
    )?;
    bounded("handler", &wire.handler, limits::HANDLER_BYTES)?;
    if wire.idle_timeout_seconds < 0 {
        return Err(invalid("idle_timeout_seconds must be 0 or more"));
    }
    if wire.env.len() > limits::ENV_ENTRIES {
        return Err(invalid(format!(
            "env has {} entries; at most {} are allowed",
            wire.env.len(),
            limits::ENV_ENTRIES
        )));
    }
    for (name, value) in &wire.env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(invalid("env holds an empty name, a name with `=`, or a NUL byte"));
        }
    }
    let env: Vec<_> = wire.env.into_iter().collect();
    let handler = Handler::resolve(&wire.handler, &env).map_err(invalid)?;
    bounded(
        "handler, as HANDLER_MODULE_NAME and HANDLER_FUNCTION_NAME have it,",
        &handler.name,
        limits::HANDLER_BYTES,
    )?;
    let working_dir = PathBuf::from(wire.working_dir);
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    if !working_dir.is_absolute() || !working_dir.components().all(plain) {
        return Err(invalid("working_dir must be an absolute path without `..`"));
    }
    Ok(Register {
        run_uid: run_uid(wire.run_uid)?,
        attempt: wire.registration_attempt,
        digest: wire.registration_digest,
        working_dir,
        handler,
        env,
    })
}

/// Checks that a working directory is one of ours, following links.
///
/// # Errors
/// `InvalidPayload`, saying what is wrong.
pub fn working_dir(path: &Path, workspace: &Path) -> Result<PathBuf, Failure> {
    let real = path
        .canonicalize()
        .map_err(|error| invalid(format!("working_dir cannot be opened: {error}")))?;
    if !real.is_dir() {
        return Err(invalid("working_dir is not a directory"));
    }
    let below = workspace
        .canonicalize()
        .is_ok_and(|workspace| real.starts_with(&workspace) && real != workspace);
    if below {
        Ok(real)
    } else {
        Err(invalid("working_dir is not beneath the workspace of this server"))
    }
}

/// Checks the folder of a handler against its working directory, following links.
///
/// # Errors
/// `InvalidPayload`, saying what is wrong.
pub fn folder(below: &Path, working_dir: &Path) -> Result<PathBuf, Failure> {
    let real = working_dir
        .join(below)
        .canonicalize()
        .map_err(|error| invalid(format!("env HANDLER_FOLDER cannot be opened: {error}")))?;
    if real.is_dir() && real.starts_with(working_dir) {
        Ok(real)
    } else {
        Err(invalid("env HANDLER_FOLDER is no folder inside the source"))
    }
}

/// Checks a call. No call takes longer than `longest`, whatever it asks for.
///
/// # Errors
/// `InvalidPayload`, naming the field.
pub fn invoke(
    wire: InvokeFunctionRequest,
    trace: Trace,
    longest: Duration,
    now: Instant,
) -> Result<Invoke, Failure> {
    let function = reference(wire.registration)?;
    let invocation_id = if wire.invocation_id.is_empty() {
        InvocationId::generate()
    } else {
        InvocationId::parse(wire.invocation_id.as_bytes())
            .map_err(|error| invalid(format!("invocation_id: {error}")))?
    };
    if wire.input.len() > limits::INPUT_BYTES {
        return Err(invalid(format!(
            "input has {} bytes; at most {} are allowed",
            wire.input.len(),
            limits::INPUT_BYTES
        )));
    }
    if !is_json(&wire.content_type) {
        return Err(invalid("content_type must be application/json"));
    }
    let timeout = duration(
        "timeout_millis",
        wire.timeout_millis,
        limits::DEFAULT_TIMEOUT,
        limits::MAX_TIMEOUT,
    )?
    .min(longest);
    Ok(Invoke {
        function,
        invocation_id,
        trace,
        input: wire.input,
        timeout,
        deadline: now + timeout,
    })
}

/// Checks an unregistration.
///
/// # Errors
/// `InvalidPayload`, naming the field.
pub fn unregister(wire: UnregisterFunctionRequest, now: Instant) -> Result<Unregister, Failure> {
    let drain = duration(
        "drain_timeout_millis",
        wire.drain_timeout_millis,
        limits::DEFAULT_DRAIN,
        limits::MAX_DRAIN,
    )?;
    Ok(Unregister {
        function: reference(wire.registration)?,
        cancel: wire.cancel_in_flight,
        drain_until: now + drain,
    })
}

fn run_uid(text: String) -> Result<String, Failure> {
    bounded("run_uid", &text, RUN_UID_BYTES)?;
    Ok(text)
}

/// Visible ASCII of bounded length: safe in a log line and in a path.
fn bounded(field: &str, text: &str, max: usize) -> Result<(), Failure> {
    // A handler may have letters of any script; the others are made by machines.
    let visible = text
        .chars()
        .all(|letter| !letter.is_control() && !letter.is_whitespace());
    if text.is_empty() || text.len() > max || !visible {
        return Err(invalid(format!(
            "{field} must have 1 to {max} bytes without blanks or control characters"
        )));
    }
    Ok(())
}

fn duration(field: &str, millis: i64, default: Duration, max: Duration) -> Result<Duration, Failure> {
    match u64::try_from(millis) {
        Err(_) => Err(invalid(format!("{field} must be 0 or more"))),
        Ok(0) => Ok(default),
        Ok(millis) => Ok(Duration::from_millis(millis).min(max)),
    }
}

/// `application/json` with or without parameters; nothing means JSON too.
fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.is_empty() || essence.eq_ignore_ascii_case("application/json")
}

fn invalid(text: impl Into<String>) -> Failure {
    Failure::new(Reason::InvalidPayload, text)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn wire() -> RegisterFunctionRequest {
        RegisterFunctionRequest {
            run_uid: "2b5d".into(),
            registration_attempt: 1,
            working_dir: "/workspace/2b5d".into(),
            handler: "main.handler".into(),
            env: HashMap::from([("A".into(), "b".into())]),
            idle_timeout_seconds: 300,
            registration_digest: "sha256:00".into(),
        }
    }

    #[test]
    fn a_refused_registration_names_its_field() {
        assert!(register(wire()).is_ok());
        type Change = fn(&mut RegisterFunctionRequest);
        let cases: [(&str, Change); 11] = [
            ("run_uid", |it| it.run_uid.clear()),
            ("run_uid", |it| it.run_uid = "a\nb".into()),
            ("registration_attempt", |it| it.registration_attempt = 0),
            ("working_dir", |it| it.working_dir = "relative".into()),
            ("working_dir", |it| it.working_dir = "/workspace/../etc".into()),
            ("handler", |it| it.handler = "x".repeat(513)),
            ("registration_digest", |it| it.registration_digest.clear()),
            ("idle_timeout_seconds", |it| it.idle_timeout_seconds = -1),
            ("env", |it| {
                it.env = HashMap::from([("A=B".into(), String::new())])
            }),
            ("HANDLER_FOLDER", |it| {
                it.env = HashMap::from([("HANDLER_FOLDER".into(), "../x".into())])
            }),
            ("HANDLER_MODULE_NAME", |it| {
                it.env = HashMap::from([("HANDLER_MODULE_NAME".into(), "x".repeat(512))])
            }),
        ];
        for (field, change) in cases {
            let mut changed = wire();
            change(&mut changed);
            let failure = register(changed).unwrap_err();
            assert_eq!(failure.reason, Reason::InvalidPayload);
            assert!(failure.detail.contains(field), "{field}: {}", failure.detail);
        }
    }

    fn call() -> InvokeFunctionRequest {
        InvokeFunctionRequest {
            registration: Some(FunctionRegistration {
                run_uid: "u".into(),
                registration_id: "reg_1".into(),
            }),
            content_type: "application/json; charset=utf-8".into(),
            ..Default::default()
        }
    }

    fn read(wire: InvokeFunctionRequest, longest: Duration) -> Result<Invoke, Failure> {
        invoke(wire, Trace::default(), longest, Instant::now())
    }

    /// C-5.3: 30 s where the caller says nothing, 300 s at most, and never more than
    /// what the operator allows (C-8.4, `SERVER_CALL_TIMEOUT`).
    #[test]
    fn a_deadline_is_never_unlimited_and_an_id_is_always_there() {
        let plain = read(call(), limits::MAX_TIMEOUT).unwrap();
        assert_eq!(plain.timeout, limits::DEFAULT_TIMEOUT);
        assert!(plain.invocation_id.as_str().starts_with("inv_"));
        let long = || InvokeFunctionRequest {
            timeout_millis: i64::MAX,
            invocation_id: "mine".into(),
            ..call()
        };
        let patient = read(long(), limits::MAX_TIMEOUT).unwrap();
        assert_eq!(
            (patient.timeout, patient.invocation_id.as_str()),
            (limits::MAX_TIMEOUT, "mine")
        );
        let allowed = Duration::from_secs(9);
        for wish in [call(), long()] {
            assert_eq!(read(wish, allowed).unwrap().timeout, allowed);
        }
        let negative = InvokeFunctionRequest {
            timeout_millis: -1,
            ..call()
        };
        assert!(read(negative, allowed).is_err());
    }

    #[test]
    fn a_body_of_one_mebibyte_passes_and_one_byte_more_does_not() {
        let sized = |bytes: usize| InvokeFunctionRequest {
            input: vec![b' '; bytes].into(),
            ..call()
        };
        assert!(read(sized(1_048_576), limits::MAX_TIMEOUT).is_ok());
        assert!(read(sized(1_048_577), limits::MAX_TIMEOUT).is_err());
    }

    #[test]
    fn an_empty_registration_id_is_for_the_gateways_hop_alone() {
        let wire = FunctionRegistration {
            run_uid: "u".into(),
            registration_id: String::new(),
        };
        assert_eq!(reference(Some(wire)).unwrap_err().reason, Reason::InvalidPayload);
        assert_eq!(reference(None).unwrap_err().reason, Reason::InvalidPayload);
    }
}
