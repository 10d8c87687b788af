//! The hop as seen from the gateway: what the owner gets, and who is taken for an owner (contract 4; bug scenarios
//! 8, 10, 15, 23, 34 and 61).

use std::time::Duration;

use http::Version;
use kruntimes_api::fixtures;

use crate::common::{ALICE, World, admin, eventually, owner, wait_for};

/// Contract 4: client headers of the hop's names never pass; scenario 23.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_gets_the_fence_and_nothing_of_the_client_s_own() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let mut request = caller.with(&function.path, "x-kruntime-invocation-id", "my-id");
    for (name, value) in [
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        ("kruntime-attempt", "99"),
        ("kruntime-hop", "7"),
        ("kruntime-pod-uid", "mine"),
        ("kruntime-handler-us", "1"),
        ("x-kruntime-timeout-millis", "5000"),
        ("proxy-authorization", "secret"),
        ("te", "trailers"),
        ("upgrade", "h2c"),
        ("connection", "close, x-mine"),
        ("x-mine", "1"),
        ("cookie", "a=b"),
    ] {
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    let answer = caller.send(request, Version::HTTP_11).await;
    assert_eq!(answer.header("x-kruntime-invocation-id"), Some("my-id"));
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    assert_eq!(
        world.owner.handshakes.accepted(),
        1,
        "one client's `close` closes nothing of others"
    );
    let calls = world.owner.calls();
    let (metadata, message) = &calls[0];
    let get = |name: &str| metadata.get(name).map(|value| value.to_str().unwrap());
    assert_eq!(get("authorization"), Some(format!("Bearer {ALICE}").as_str()));
    assert_eq!(get("kruntime-attempt"), Some("1"));
    assert_eq!(get("kruntime-hop"), Some("1"));
    assert_eq!(get("kruntime-pod-uid"), Some(fixtures::uid("pod-a").as_str()));
    assert!(get("traceparent").unwrap().starts_with("00-0af7"));
    for name in [
        "x-mine",
        "proxy-authorization",
        "upgrade",
        "cookie",
        "kruntime-handler-us",
    ] {
        assert_eq!(get(name), None, "{name}");
    }
    assert_eq!(metadata.get_all("kruntime-hop").iter().count(), 1);
    let registration = message.registration.clone().unwrap();
    assert_eq!(
        (
            registration.run_uid.as_str(),
            registration.registration_id.as_str()
        ),
        (function.uid.as_str(), "")
    );
    assert_eq!(
        (message.invocation_id.as_str(), message.content_type.as_str()),
        ("my-id", "application/json")
    );
}

/// C-3.6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_token_may_stay_here() {
    let world = World::with(&["--caller-credential", "omit"], |_| {}).await;
    let function = world.function("demo", "hello");
    assert_eq!(world.caller().call(&function.path, "1").await.status, 200);
    assert!(world.owner.calls()[0].0.get("authorization").is_none());
}

/// Contract 4: exactly the key of the Run's status.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_cannot_be_reached_is_503_and_back_by_itself() {
    let world = World::start().await;
    let caller = world.caller();
    let gone = owner::Owner::start(&world.pki).await;
    let function = world.function_of(&gone, "demo", "hello");
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    gone.stop();
    eventually("the owner is found to be gone", || async {
        (caller.call(&function.path, "1").await.status == 503).then_some(())
    })
    .await;
    caller
        .refused(
            || caller.post(&function.path, "1"),
            (503, "OwnerUnreachable", "gateway", "no"),
        )
        .await;
    // The same process cannot come back; a new one at the same address has another key.
    let back = owner::Owner::start_at(&world.pki, &gone.address()).await;
    let run = fixtures::run("demo", "hello")
        .attempt(2)
        .ready_on("pod-b")
        .owner(&back.address(), &back.key());
    world.api.put(&run.build());
    eventually("the new owner answers", || async {
        (caller.call(&function.path, "1").await.status == 200).then_some(())
    })
    .await;
}

/// Scenario 8: an owner that cannot be dialled for a while is called again without any news from Kubernetes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_that_failed_is_tried_again_without_an_event() {
    let world = World::start().await;
    let caller = world.caller();
    let function = world.function("demo", "hello");
    wait_for(&caller, &function).await;
    // The kernel still accepts; nobody answers the handshake.
    world.owner.freeze();
    let answer = caller.call(&function.path, "1").await;
    assert_eq!(
        (answer.status, answer.reason(), answer.dispatched()),
        (503, "OwnerUnreachable".to_owned(), "no".to_owned())
    );
    world.owner.thaw();
    eventually("the owner is called again", || async {
        (caller.call(&function.path, "1").await.status == 200).then_some(())
    })
    .await;
}

/// Scenario 10: an owner that takes calls and answers none takes nothing from the functions of others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wedged_owner_holds_up_nobody_else() {
    let world = World::start().await;
    let caller = world.caller();
    let wedged = owner::Owner::start(&world.pki).await;
    let gate = wedged.gate();
    let stuck: Vec<_> = (0..10)
        .map(|index| world.function_of(&wedged, "demo", &format!("stuck-{index}")))
        .collect();
    let others: Vec<_> = (0..40)
        .map(|index| world.function("demo", &format!("other-{index}")))
        .collect();
    let waiting = futures::future::join_all(stuck.iter().map(|it| caller.call(&it.path, "1")));
    let goes_on = async {
        wedged.arrived(stuck.len()).await;
        for function in &others {
            assert_eq!(caller.call(&function.path, "1").await.status, 200);
        }
        assert!(
            admin(&world.gateway, "/readyz")
                .await
                .starts_with("HTTP/1.1 200 ")
        );
        // Until here not one of the others had its answer.
        gate.add_permits(stuck.len());
    };
    let (answers, ()) = tokio::join!(waiting, goes_on);
    assert!(answers.iter().all(|it| it.status == 200), "{answers:?}");
}

/// Contract 4: a reused Pod address cannot receive a token; scenario 15.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_again_address_gets_neither_call_nor_token() {
    let world = World::start().await;
    let caller = world.caller();
    let first = owner::Owner::start(&world.pki).await;
    let function = world.function_of(&first, "demo", "hello");
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    first.stop();
    // Another process takes the address; the old route stays.
    let other = eventually("the address is free", || async {
        let free = std::net::TcpListener::bind(first.address()).is_ok();
        if free {
            Some(owner::Owner::start_at(&world.pki, &first.address()).await)
        } else {
            None
        }
    })
    .await;
    for _ in 0..3 {
        let answer = caller.both(|| caller.post(&function.path, "1")).await;
        assert_eq!((answer.status, answer.dispatched().as_str()), (503, "no"));
    }
    assert!(other.calls().is_empty());
}

/// Contract 4: the gateway dials no loopback address and no other port, whatever a status says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_cannot_make_the_gateway_knock_at_the_node() {
    let world = World::with(&[], |config| config.args.allow_local_owners = false).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let answer = caller
        .refused(
            || caller.post(&function.path, "1"),
            (503, "OwnerUnreachable", "gateway", "no"),
        )
        .await;
    assert!(answer.text().contains("loopback"), "{}", answer.text());
    assert_eq!(
        world.owner.handshakes.accepted() + world.owner.handshakes.failed(),
        0
    );
}

/// Contract 4: a connection that was idle is tried before use; failure is 503, dispatched no; scenario 34.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_rested_is_tried_before_it_carries_a_call() {
    let world = World::with(&[], |config| config.rested = Duration::ZERO).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for calls in 1..4 {
        assert_eq!(caller.call(&function.path, "1").await.status, 200);
        assert_eq!(world.owner.calls().len(), calls, "trying is no call");
    }
    world.owner.freeze();
    // Nobody says that the connection is over. The call must neither hang nor be sent.
    let answer = caller.call(&function.path, "1").await;
    assert_eq!(
        (answer.status, answer.reason().as_str()),
        (503, "OwnerUnreachable")
    );
    assert_eq!(answer.dispatched(), "no");
    world.owner.thaw();
    eventually("the owner is found again", || async {
        (caller.call(&function.path, "1").await.status == 200).then_some(())
    })
    .await;
}

/// Contract 4; scenario 61: a Pod vanishes. Trying its connection must not make the connection look used and thereby
/// good, neither for those who come meanwhile nor after the one who tried has given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_connection_is_tried_nobody_else_is_sent_over_it() {
    let world = World::with(&[], |config| config.rested = Duration::ZERO).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    world.owner.freeze();
    let calls = (0..8).map(|_| caller.call(&function.path, "1"));
    for answer in futures::future::join_all(calls).await {
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (503, "OwnerUnreachable"),
            "{}",
            answer.dispatched()
        );
    }
    world.owner.thaw();
}

/// Contract 4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_silence_a_connection_is_tried_before_the_next_call() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    world.owner.freeze();
    let short = caller.with(&function.path, "x-kruntime-timeout-millis", "100");
    let lost = caller.send(short, Version::HTTP_11).await;
    assert_eq!((lost.status, lost.dispatched().as_str()), (504, "unknown"));
    let next = caller.call(&function.path, "1").await;
    assert_eq!((next.status, next.reason().as_str()), (503, "OwnerUnreachable"));
    assert_eq!(next.dispatched(), "no");
    world.owner.thaw();
}

/// Contract 4: a connection does not outlive what it was trusted for. A call that runs on an old one ends on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_connection_carries_no_new_call() {
    let world = World::with(&[], |config| config.max_age = Duration::ZERO).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let gate = world.owner.gate();
    let long = caller.call(&function.path, "1");
    let next = async {
        world.owner.arrived(1).await;
        let next = caller.call(&function.path, "2");
        let (next, ()) = tokio::join!(next, async {
            world.owner.arrived(2).await;
            assert_eq!(world.owner.handshakes.accepted(), 2);
            gate.add_permits(2);
        });
        next
    };
    let (long, next) = tokio::join!(long, next);
    assert_eq!((long.text(), next.text()), ("1", "2"));
}
