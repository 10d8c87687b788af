//! One leader at a time (bug scenario 97).

use kruntimes_api::fixtures;

use crate::common::*;

fn holder(api: &Api) -> Option<String> {
    let lease = api.get("leases", "system", "kruntimes-scheduler")?;
    Some(
        lease["spec"]["holderIdentity"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
    )
}

async fn until_leads(api: &Api, identity: &str) {
    api.until(&format!("{identity} leads"), |api| {
        (holder(api).as_deref() == Some(identity)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn another_takes_over_after_the_lease_of_a_killed_leader() {
    let api = installation();
    make_pod(&api, "pod-a", 4);
    let first = Scheduler::start(&api, "first");
    until_leads(&api, "first").await;
    let _second = Scheduler::start(&api, "second");
    make_run(&api, fixtures::run(NS, "r0"));
    until_assigned(&api, "r0").await;
    assert_eq!(holder(&api).as_deref(), Some("first"));
    drop(first);
    make_run(&api, fixtures::run(NS, "r1"));
    until_assigned(&api, "r1").await;
    assert_eq!(holder(&api).as_deref(), Some("second"));
}

#[tokio::test]
async fn a_leader_that_stops_gives_the_lease_back() {
    let api = installation();
    let first = Scheduler::start(&api, "first");
    until_leads(&api, "first").await;
    first.stop().await;
    assert_eq!(holder(&api).as_deref(), Some(""));
    let _second = Scheduler::start(&api, "second");
    until_leads(&api, "second").await;
}

#[tokio::test]
async fn a_leader_that_cannot_renew_stops_writing_and_no_run_is_assigned_twice() {
    let api = installation();
    make_pod(&api, "pod-a", 16);
    let _first = Scheduler::start(&api, "first");
    until_leads(&api, "first").await;
    let _second = Scheduler::start(&api, "second");
    api.faults(|it| it.mute_holders = vec!["first".to_owned()]);
    until_leads(&api, "second").await;
    for index in 0..8 {
        make_run(&api, fixtures::run(NS, &format!("r{index}")));
    }
    for index in 0..8 {
        let name = format!("r{index}");
        let run = until_assigned(&api, &name).await;
        assert_eq!(run.attempt().map(|it| it.get()), Some(1), "{name}");
        assert_eq!(api.lock().status_writes(&name).len(), 1, "{name}: one writer");
    }
    assert_eq!(holder(&api).as_deref(), Some("second"));
}

/// C-7.1
#[tokio::test]
async fn nothing_is_bound_before_every_watch_has_listed() {
    let api = installation();
    make_pod(&api, "pod-a", 1);
    api.faults(|it| it.unlisted = vec!["pods"]);
    make_run(&api, fixtures::run(NS, "early"));
    let _scheduler = Scheduler::start(&api, "first");
    until_leads(&api, "first").await;
    // The identities do not depend on the index: they are there, and still nobody was looked at.
    api.until("identities", |api| {
        api.get("secrets", "system", "kruntimes-gateway-peer")
    })
    .await;
    assert!(api.lock().writes.iter().all(|it| !it.what.starts_with("run")));
    api.faults(|it| it.unlisted.clear());
    until_assigned(&api, "early").await;
}
