//! What the template of a Runtime may not have (C-2), each with the field and the reason.

use kruntimes_api::{
    RuntimeSpec,
    runtime::{Recycle, Scheduling},
};
use serde_json::Value;

use super::{
    Refusal, USER, list,
    pod::{CONTAINER_RUNTIMED, RESERVED_VOLUMES, VOLUME_WORKSPACE},
};

/// The first thing that is refused.
pub(super) fn refuse(spec: &RuntimeSpec) -> Result<(), Refusal> {
    let refusal = |reason, message: String| Err(Refusal { reason, message });
    if spec.recycle == Some(Recycle::AfterRun) {
        return refusal(
            "NotSupported",
            "spec.recycle AfterRun is not supported yet; remove it".to_owned(),
        );
    }
    if spec.scheduling == Some(Scheduling::RuntimeServer) {
        return refusal(
            "NotSupported",
            "spec.scheduling RuntimeServer is not supported yet; remove it".to_owned(),
        );
    }
    let pod = &spec.template.spec.rest;
    let on = |field: &str| pod.get(field).and_then(Value::as_bool) == Some(true);
    for field in ["hostNetwork", "hostPID", "hostIPC"] {
        if on(field) {
            return refusal(
                "HostNamespace",
                format!(
                    "spec.template.spec.{field} is refused: a pool shares no namespace with its node; remove it"
                ),
            );
        }
    }
    if on("shareProcessNamespace") {
        return refusal(
            "SharedProcessNamespace",
            "spec.template.spec.shareProcessNamespace is refused: functions would see runtimed; remove it"
                .to_owned(),
        );
    }
    for (at, volume) in list(pod.get("volumes")).enumerate() {
        let name = name(volume);
        if volume.get("hostPath").is_some() {
            return refusal(
                "HostPath",
                format!("spec.template.spec.volumes[{at}].hostPath is refused; use another kind of volume"),
            );
        }
        if RESERVED_VOLUMES.contains(&name) {
            return refusal(
                "ReservedName",
                format!("spec.template.spec.volumes[{at}].name {name} is reserved; choose another"),
            );
        }
    }
    if spec
        .workspace
        .as_ref()
        .is_some_and(|it| it.get("hostPath").is_some())
    {
        return refusal(
            "HostPath",
            "spec.workspace.hostPath is refused; use another kind of volume".to_owned(),
        );
    }
    for (container, mount) in mounts(spec) {
        if RESERVED_VOLUMES.contains(&mount) && mount != VOLUME_WORKSPACE {
            return refusal(
                "ReservedName",
                format!(
                    "container {container} of spec.template.spec mounts {mount}, which only kruntimes may mount; remove the volumeMount"
                ),
            );
        }
    }
    let init = list(pod.get("initContainers")).filter_map(|it| it.get("name").and_then(Value::as_str));
    let own = spec.template.spec.containers.iter().map(|it| it.name.as_str());
    if own.chain(init).any(|name| name == CONTAINER_RUNTIMED) {
        return refusal(
            "ReservedName",
            "spec.template.spec holds a container named runtimed, which is reserved; choose another name"
                .to_owned(),
        );
    }
    let runtimes = spec
        .template
        .spec
        .containers
        .iter()
        .filter(|it| it.name == "runtime")
        .count();
    if runtimes != 1
        || spec
            .template
            .spec
            .containers
            .first()
            .is_none_or(|it| it.name != "runtime")
    {
        return refusal(
            "NoRuntimeContainer",
            "the first container of spec.template.spec.containers must be named runtime".to_owned(),
        );
    }
    if list(pod.get("ephemeralContainers")).next().is_some() {
        return refusal(
            "EphemeralContainers",
            "spec.template.spec.ephemeralContainers is refused; remove it".to_owned(),
        );
    }
    if pod
        .get("restartPolicy")
        .and_then(Value::as_str)
        .is_some_and(|it| it != "Always")
    {
        return refusal(
            "RestartPolicy",
            "spec.template.spec.restartPolicy must be Always or absent".to_owned(),
        );
    }
    let group = pod
        .get("securityContext")
        .and_then(|it| it.get("fsGroup"))
        .and_then(Value::as_i64);
    if group.is_some_and(|it| it != USER) {
        return refusal(
            "ReservedGroup",
            format!(
                "spec.template.spec.securityContext.fsGroup must be {USER} or absent: runtimed reads its token as that group"
            ),
        );
    }
    if let Some((field, user)) = user(spec).filter(|(_, user)| *user != USER) {
        return refusal(
            "ReservedUser",
            format!(
                "spec.template.spec.{field} is {user} and must be {USER} or absent: runtimed, which is that user, reads and removes what functions write"
            ),
        );
    }
    Ok(())
}

/// The field that says as which user the first container runs, and which one; `None` when none does.
fn user(spec: &RuntimeSpec) -> Option<(&'static str, i64)> {
    let of = |security: Option<&Value>| security?.get("runAsUser")?.as_i64();
    let container = spec.template.spec.containers.first();
    let own = container.and_then(|it| of(it.rest.get("securityContext")));
    let whole = || of(spec.template.spec.rest.get("securityContext"));
    own.map(|user| ("containers[0].securityContext.runAsUser", user))
        .or_else(|| whole().map(|user| ("securityContext.runAsUser", user)))
}

/// Containers of the template, init containers included, and the volumes they mount.
fn mounts(spec: &RuntimeSpec) -> impl Iterator<Item = (&str, &str)> {
    let own = spec.template.spec.containers.iter();
    let own = own.map(|it| (it.name.as_str(), it.rest.get("volumeMounts")));
    let init = list(spec.template.spec.rest.get("initContainers"));
    let init = init.map(|it| (name(it), it.get("volumeMounts")));
    own.chain(init)
        .flat_map(|(container, it)| list(it).map(move |it| (container, name(it))))
}

fn name(value: &Value) -> &str {
    value.get("name").and_then(Value::as_str).unwrap_or_default()
}
