use std::time::Duration;

use jiff::Timestamp;
use kruntimes_api::{fixtures, keys::PodUid, run::Phase};
use serde_json::json;
use tokio::time::Instant;

use super::*;
use crate::facts::{self, BeatFacts};

fn key(name: &str) -> ObjectKey {
    ObjectKey::new("ns", name)
}

fn pod(name: &str) -> PodFacts {
    facts::serving(name, 2)
}

fn beat(pod: &PodFacts, second: i64) -> BeatFacts {
    BeatFacts {
        key: pod.beat(),
        runtime: "python".to_owned(),
        holder: pod.uid.as_str().to_owned(),
        renewed: Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime(
            Timestamp::from_second(second).unwrap(),
        )),
        modes: ["function".to_owned()].into(),
    }
}

fn woken(change: impl FnOnce(&mut World, &mut Wakes), world: &mut World) -> Vec<String> {
    let mut wakes = Wakes::default();
    change(world, &mut wakes);
    wakes.runs.into_iter().map(|it| it.name).collect()
}

fn runtime(uid: &str, replicas: i32) -> Runtime {
    serde_json::from_value(json!({
        "apiVersion": "kruntimes.io/v1alpha1", "kind": "Runtime",
        "metadata": { "name": "python", "namespace": "ns", "uid": uid },
        "spec": { "replicas": replicas, "template": { "spec": { "containers": [{ "name": "runtime" }] } } },
    }))
    .unwrap()
}

#[test]
fn a_free_place_wakes_those_who_wait_for_one_of_that_runtime() {
    let mut world = World::default();
    let apply = |run| move |world: &mut World, wakes: &mut Wakes| world.apply_run(run, wakes);
    woken(apply(fixtures::run("ns", "waits").build()), &mut world);
    woken(
        apply(fixtures::run("ns", "elsewhere").runtime("node").build()),
        &mut world,
    );
    let ready = fixtures::run("ns", "ready").ready_on("a");
    assert_eq!(
        woken(apply(ready.clone().build()), &mut world),
        ["ready"],
        "nothing is free yet"
    );
    assert_eq!(
        woken(apply(ready.clone().version("2").build()), &mut world),
        ["ready"]
    );
    assert_eq!(
        woken(apply(ready.clone().version("2").build()), &mut world),
        [""; 0],
        "no change"
    );
    let ended = ready.version("3").ended(Phase::Timeout, "IdleTimeout").build();
    assert_eq!(woken(apply(ended), &mut world), ["ready", "waits"]);
    assert_eq!(world.waiting_runs(), 2);
}

#[test]
fn a_pod_that_goes_wakes_its_runs_and_one_that_serves_those_who_wait() {
    let mut world = World::default();
    woken(
        |world, wakes| world.apply_run(fixtures::run("ns", "held").ready_on("a").build(), wakes),
        &mut world,
    );
    woken(
        |world, wakes| world.apply_run(fixtures::run("ns", "waits").build(), wakes),
        &mut world,
    );
    assert_eq!(
        woken(|world, wakes| world.apply_pod(pod("a"), wakes), &mut world),
        ["waits"]
    );
    assert_eq!(
        woken(|world, wakes| world.apply_pod(pod("a"), wakes), &mut world),
        [""; 0]
    );
    let unready = PodFacts {
        serves: false,
        ..pod("a")
    };
    assert_eq!(
        woken(|world, wakes| world.apply_pod(unready, wakes), &mut world),
        [""; 0],
        "unready is no loss"
    );
    let renamed = PodFacts {
        uid: PodUid::new("other").unwrap(),
        ..pod("a")
    };
    assert_eq!(
        woken(|world, wakes| world.apply_pod(renamed, wakes), &mut world),
        ["held", "waits"]
    );
    // A late deletion of the first does not remove the second.
    woken(|world, wakes| world.delete_pod(&pod("a"), wakes), &mut world);
    assert!(world.pod(&key("a")).is_some());
}

#[test]
fn a_renewal_wakes_nobody_and_a_return_does() {
    let mut world = World::default();
    let start = Instant::now();
    woken(
        |world, wakes| world.apply_run(fixtures::run("ns", "waits").build(), wakes),
        &mut world,
    );
    let at = |second: u64| start + Duration::from_secs(second);
    let renew = |second| {
        move |world: &mut World, wakes: &mut Wakes| {
            world.apply_beat(beat(&pod("a"), i64::try_from(second).unwrap()), at(second), wakes);
        }
    };
    assert_eq!(woken(renew(0), &mut world), ["waits"]);
    assert_eq!(woken(renew(10), &mut world), [""; 0]);
    assert_eq!(woken(renew(60), &mut world), ["waits"], "it was stale");
}

#[test]
fn a_list_replaces_what_is_known_of_its_namespace_only() {
    let mut world = World::default();
    let mut wakes = Wakes::default();
    world.apply_run(fixtures::run("ns", "gone").build(), &mut wakes);
    world.apply_run(fixtures::run("other", "kept").build(), &mut wakes);
    world.reset_runs(Some("ns"), vec![fixtures::run("ns", "new").build()], &mut wakes);
    assert!(world.run(&key("gone")).is_none());
    assert!(world.run(&key("new")).is_some());
    assert!(world.run(&ObjectKey::new("other", "kept")).is_some());
    assert_eq!(world.waiting_runs(), 2);
}

#[test]
fn what_comes_late_from_the_watch_is_no_news() {
    let mut world = World::default();
    let mut wakes = Wakes::default();
    let newer = fixtures::run("ns", "n").version("20").scheduled_on("a").build();
    world.apply_run(newer, &mut wakes);
    world.apply_run(fixtures::run("ns", "n").version("9").build(), &mut wakes);
    assert!(world.run(&key("n")).unwrap().assignment().is_some());
    // Another object of that name is not older, it is another.
    let recreated = fixtures::run("ns", "n")
        .uid(&fixtures::uid("second life"))
        .version("9")
        .build();
    world.apply_run(recreated, &mut wakes);
    assert!(world.run(&key("n")).unwrap().assignment().is_none());
}

#[test]
fn a_run_is_kept_without_its_code() {
    let mut world = World::default();
    world.apply_run(fixtures::run("ns", "n").build(), &mut Wakes::default());
    assert_eq!(world.run(&key("n")).unwrap().spec.source, None);
}

#[test]
fn a_runtime_wakes_its_pool_and_when_it_changes_those_who_wait() {
    let mut world = World::default();
    let mut wakes = Wakes::default();
    world.apply_run(fixtures::run("ns", "waits").build(), &mut wakes);
    wakes = Wakes::default();
    world.apply_runtime(runtime("u", 1), &mut wakes);
    assert!(wakes.runtimes.contains(&key("python")) && wakes.runs.contains(&key("waits")));
    wakes = Wakes::default();
    world.apply_runtime(runtime("u", 1), &mut wakes);
    assert!(wakes.is_empty());
    let mut told = runtime("u", 1);
    told.status = serde_json::from_value(json!({ "replicas": 1 })).unwrap();
    world.apply_runtime(told, &mut wakes);
    assert!(wakes.is_empty(), "its status is our own");
    world.delete_runtime(&runtime("older", 1), &mut wakes);
    assert!(
        world.runtime(&key("python")).is_some(),
        "another life of that name"
    );
    world.delete_runtime(&runtime("u", 1), &mut wakes);
    assert!(world.runtime(&key("python")).is_none() && wakes.runs.contains(&key("waits")));
}

/// A read that was answered before the Run went, and arrives after: no ghost takes its room for ever.
#[test]
fn a_live_read_does_not_bring_back_what_is_gone() {
    let mut world = World::default();
    let mut wakes = Wakes::default();
    let run = fixtures::run("ns", "n").scheduled_on("a").build();
    world.apply_run(run.clone(), &mut wakes);
    world.delete_run(&run, &mut wakes);
    world.refresh_run(run.clone(), &mut wakes);
    assert!(world.run(&key("n")).is_none());
    let reborn = fixtures::run("ns", "n")
        .uid(&fixtures::uid("second life"))
        .build();
    world.apply_run(reborn, &mut wakes);
    world.refresh_run(run, &mut wakes);
    assert!(world.run(&key("n")).unwrap().assignment().is_none());
}

/// C-7.3: silence is counted from the last change that we saw, from the start when there was none, and
/// goes on when the Pod is gone.
#[test]
fn silence_is_never_longer_than_true() {
    let start = Instant::now();
    let at = |second: u64| start + Duration::from_secs(second);
    let mut world = World::born(start);
    let mut wakes = Wakes::default();
    let uid = pod("a").uid;
    let silence = |world: &World, second| world.silence(uid.as_str(), at(second)).as_secs();
    assert_eq!(silence(&world, 7), 7, "never heard");
    world.apply_pod(pod("a"), &mut wakes);
    // Found in a list, written long ago by the wall clock: still the first that we hear.
    let old = Timestamp::from_second(1_000_000).unwrap();
    world.reset_beats(None, vec![beat(&pod("a"), 5)], at(10), old, &mut wakes);
    assert_eq!(silence(&world, 12), 2);
    world.reset_beats(None, vec![beat(&pod("a"), 5)], at(15), old, &mut wakes);
    assert_eq!(silence(&world, 22), 12, "the same again is no sign of life");
    world.apply_beat(beat(&pod("a"), 6), at(23), &mut wakes);
    world.delete_pod(&pod("a"), &mut wakes);
    assert_eq!(silence(&world, 30), 7);
    assert_eq!(world.node_of(uid.as_str()), Some(Some("node-1")));
    assert_eq!(world.node_of("never seen"), None);
    world.heard("only heard", at(31));
    assert_eq!(
        world.node_of("only heard"),
        None,
        "a heartbeat does not say where"
    );
}

#[test]
fn lives_of_pods_that_are_gone_are_forgotten() {
    let start = Instant::now();
    let mut world = World::born(start);
    let mut wakes = Wakes::default();
    for index in 0..200_u64 {
        let now = start + Duration::from_secs(index * 60);
        let pod = pod(&format!("p{index}"));
        world.apply_pod(pod.clone(), &mut wakes);
        world.apply_beat(beat(&pod, 0), now, &mut wakes);
        world.delete_pod(&pod, &mut wakes);
    }
    assert!(world.lives.len() < 100, "{}", world.lives.len());
}

/// C-7.3: a Pod on its way out is looked at for its Runs, and one that is well is not.
#[test]
fn a_pod_that_begins_to_go_wakes_its_runs_once() {
    let mut world = World::default();
    let held = fixtures::run("ns", "held").ready_on("a").build();
    woken(|world, wakes| world.apply_run(held, wakes), &mut world);
    woken(|world, wakes| world.apply_pod(pod("a"), wakes), &mut world);
    let mut going = pod("a");
    going.signs.deleting = true;
    let apply = |pod: PodFacts| move |world: &mut World, wakes: &mut Wakes| world.apply_pod(pod, wakes);
    assert_eq!(woken(apply(going.clone()), &mut world), ["held"]);
    going.signs.ready = false;
    assert_eq!(woken(apply(going), &mut world), [""; 0]);
}

/// C-7.2: a Pod that owns Runs says so, and stops saying so.
#[test]
fn pods_that_own_runs_are_to_go_last() {
    let mut world = World::default();
    let mut wakes = Wakes::default();
    world.apply_pod(pod("a"), &mut wakes);
    world.apply_pod(pod("b"), &mut wakes);
    assert_eq!(world.mismarked(None), []);
    world.apply_run(fixtures::run("ns", "held").ready_on("a").build(), &mut wakes);
    assert_eq!(world.mismarked(None), [(pod("a"), true)]);
    assert_eq!(world.mismarked(Some(&ObjectKey::new("ns", "node"))), []);
    let marked = |name: &str| PodFacts {
        goes_last: true,
        ..pod(name)
    };
    world.apply_pod(marked("a"), &mut wakes);
    world.apply_pod(marked("b"), &mut wakes);
    assert_eq!(world.mismarked(None), [(marked("b"), false)]);
}
