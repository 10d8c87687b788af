//! Random operations on the registry, compared with a model that remembers only what
//! a reader of C-5.2 would: per Run the current generation and its state.

use std::{collections::HashMap, time::Instant};

use kruntimes_proto::{failure::Reason, ids::RegistrationId};
use kruntimes_runtime_server::registry::{Moment, Registered, Registry, State};
use proptest::prelude::*;

const RUNS: [&str; 2] = ["a", "b"];
const DIGESTS: [&str; 2] = ["sha256:1", "sha256:2"];

#[derive(Debug, Clone)]
enum Step {
    Register { run: usize, attempt: i32, digest: usize },
    Ready(Target),
    Failed(Target),
    Begin(Target),
    End(Target),
    Drain(Target),
    Remove(Target),
    Status(Target),
}

/// Some generation ever made, current or stale, and the Run it is claimed to be of.
#[derive(Debug, Clone)]
struct Target {
    run: usize,
    generation: prop::sample::Index,
}

#[derive(Debug, Clone)]
struct Held {
    id: RegistrationId,
    attempt: i32,
    digest: usize,
    state: State,
    busy: bool,
    activity: i64,
    fatal: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let target = || {
        (0..RUNS.len(), any::<prop::sample::Index>()).prop_map(|(run, generation)| Target { run, generation })
    };
    let register = (0..RUNS.len(), 1..4_i32, 0..DIGESTS.len())
        .prop_map(|(run, attempt, digest)| Step::Register { run, attempt, digest });
    let step = prop_oneof![
        3 => register,
        3 => target().prop_map(Step::Ready),
        1 => target().prop_map(Step::Failed),
        3 => target().prop_map(Step::Begin),
        2 => target().prop_map(Step::End),
        1 => target().prop_map(Step::Drain),
        1 => target().prop_map(Step::Remove),
        2 => target().prop_map(Step::Status),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_registry_does_what_the_contract_says(steps in steps()) {
        let start = Instant::now();
        let mut registry = Registry::default();
        let mut model: HashMap<&str, Held> = HashMap::new();
        let mut made: Vec<RegistrationId> = vec![RegistrationId::generate()];
        for (tick, step) in steps.into_iter().enumerate() {
            let now = Moment { monotonic: start, unix_nano: i64::try_from(tick).unwrap() + 1 };
            let resolve = |target: &Target| (RUNS[target.run], target.generation.get(&made).clone());
            match step {
                Step::Register { run, attempt, digest } => {
                    let run = RUNS[run];
                    let new = RegistrationId::generate();
                    let got = registry.register(run, attempt, DIGESTS[digest], &new);
                    match model.get(run).cloned() {
                        Some(held) if attempt < held.attempt => prop_assert_eq!(got.unwrap_err().reason, Reason::StaleRegistration),
                        Some(held) if attempt == held.attempt && digest != held.digest => prop_assert_eq!(got.unwrap_err().reason, Reason::RegistrationConflict),
                        Some(held) if attempt == held.attempt => prop_assert_eq!(got.unwrap(), Registered::Known(held.id)),
                        old => {
                            prop_assert_eq!(got.unwrap(), Registered::New { replaces: old.map(|held| held.id) });
                            made.push(new.clone());
                            model.insert(run, Held { id: new, attempt, digest, state: State::Registering, busy: false, activity: 0, fatal: false });
                        }
                    }
                }
                Step::Ready(target) => {
                    let (run, id) = resolve(&target);
                    registry.ready(run, &id, now);
                    if let Some(held) = model.get_mut(run).filter(|held| held.id == id && held.state == State::Registering) {
                        held.state = State::Ready;
                        held.activity = now.unix_nano;
                    }
                }
                Step::Failed(target) => {
                    let (run, id) = resolve(&target);
                    registry.failed(run, &id, "why");
                    if let Some(held) = model.get_mut(run).filter(|held| held.id == id && held.state != State::Draining) {
                        held.fatal |= held.state != State::Failed;
                        held.state = State::Failed;
                    }
                }
                Step::Begin(target) => {
                    let (run, id) = resolve(&target);
                    let got = registry.begin(run, &id, start, now).map_err(|failure| failure.reason);
                    let want = match model.get_mut(run) {
                        None => Err(Reason::RegistrationNotFound),
                        Some(held) if held.id != id => Err(Reason::StaleRegistration),
                        Some(held) => match held.state {
                            State::Registering => Err(Reason::Registering),
                            State::Draining => Err(Reason::Draining),
                            State::Failed => Err(Reason::Recovering),
                            State::Ready if held.busy => Err(Reason::Busy),
                            State::Ready => { held.busy = true; held.activity = now.unix_nano; Ok(()) }
                        },
                    };
                    prop_assert_eq!(got, want);
                }
                Step::End(target) => {
                    let (run, id) = resolve(&target);
                    registry.end(run, &id, now);
                    if let Some(held) = model.get_mut(run).filter(|held| held.id == id && held.busy) {
                        held.busy = false;
                        held.activity = now.unix_nano;
                    }
                }
                Step::Drain(target) => {
                    let (run, id) = resolve(&target);
                    let got = registry.drain(run, &id).map_err(|failure| failure.reason);
                    let want = match model.get_mut(run) {
                        None => Ok(false),
                        Some(held) if held.id != id => Err(Reason::StaleRegistration),
                        Some(held) => { held.state = State::Draining; Ok(true) }
                    };
                    prop_assert_eq!(got, want);
                }
                Step::Remove(target) => {
                    let (run, id) = resolve(&target);
                    registry.remove(run, &id);
                    if model.get(run).is_some_and(|held| held.id == id) {
                        model.remove(run);
                    }
                }
                Step::Status(target) => {
                    let (run, id) = resolve(&target);
                    let got = registry.status(run, &id).map_err(|failure| failure.reason);
                    match model.get(run) {
                        None => prop_assert_eq!(got, Err(Reason::RegistrationNotFound)),
                        Some(held) if held.id != id => prop_assert_eq!(got, Err(Reason::StaleRegistration)),
                        Some(held) => {
                            let got = got.unwrap();
                            prop_assert_eq!((got.state, got.in_flight, got.last_activity_unix_nano), (held.state, i32::from(held.busy), held.activity));
                            prop_assert_eq!(!got.fatal_error.is_empty(), held.fatal);
                        }
                    }
                }
            }
            prop_assert_eq!(registry.len(), model.len());
        }
    }
}

/// C-3.4.
#[test]
fn busy_says_how_long_the_running_call_may_still_take() {
    let start = Instant::now();
    let now = Moment {
        monotonic: start,
        unix_nano: 1,
    };
    let mut registry = Registry::default();
    let id = RegistrationId::generate();
    registry.register("a", 1, "d", &id).unwrap();
    registry.ready("a", &id, now);
    let second = std::time::Duration::from_secs(1);
    registry.begin("a", &id, start + 3 * second, now).unwrap();
    let later = Moment {
        monotonic: start + second,
        unix_nano: 2,
    };
    let failure = registry.begin("a", &id, start + 9 * second, later).unwrap_err();
    assert_eq!(failure.busy_at_most, Some(2 * second));
}

/// C-5.3.
#[test]
fn a_fatal_error_is_bounded() {
    let mut registry = Registry::default();
    let id = RegistrationId::generate();
    registry.register("a", 1, "d", &id).unwrap();
    registry.failed("a", &id, &"x".repeat(10_000));
    let status = registry.status("a", &id).unwrap();
    assert_eq!(status.state, State::Failed);
    assert!(status.fatal_error.len() <= 4096 && status.fatal_error.len() > 4000);
}
